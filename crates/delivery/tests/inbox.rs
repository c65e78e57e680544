//! What a device is told when it connects, and which devices a user has.

#[allow(dead_code)]
mod support;

use bowline_delivery::limits;
use bowline_protocol::{
    CloseCode, DeviceId, UserId,
    frame::SERVER_FIELDS_BYTES,
    ids::DeviceClass,
    link::{Answer, ConnRef, Open, Request, SameDevice, Up},
};
use support::{World, opening, recv, send};

const AB: &str = "d:a:b";

/// A connection whose look-up of what waits is not answered until the world settles; meanwhile frames are carried out.
fn connect_slowly(world: &mut World, user: &str, device: &str, meanwhile: &[(u64, &str)]) -> u64 {
    (world.backwards, world.hold_reads) = (true, true);
    let conn = world.connect(user, device);
    meanwhile.iter().for_each(|(conn, text)| world.frame(*conn, text));
    (world.backwards, world.hold_reads) = (false, false);
    world.settle();
    conn
}

#[test]
fn what_comes_while_it_is_looked_up_is_pushed_behind_the_notice_and_counted_there_once() {
    let mut world = World::new();
    let (a, b2) = (world.connect("a", "1"), world.connect("b", "2"));
    world.frame(a, &send("m1", "b"));
    let while_away = [(a, &send("m2", "b")[..]), (b2, &send("m3", "a")), (a, &send("m4", "b"))];
    let before = world.connect("b", "1");
    world.disconnect(before);
    world.frame(a, &send("m0", "b"));
    let b = connect_slowly(&mut world, "b", "1", &while_away);
    assert_eq!(world.brief(b), ["notice d:a:b 1-2 u2", "push 3", "push 4", "push 5"]);
    // Without anything older there is no notice at all.
    let mut world = World::new();
    let a = world.connect("a", "1");
    let b = connect_slowly(&mut world, "b", "1", &[(a, &send("m1", "b")), (a, &send("m1", "c"))]);
    assert_eq!(world.brief(b), ["push 1"]);
    world.advance(3_000);
    assert_eq!(world.brief(b), ["again 1"], "a push like any other");
}

#[test]
fn as_many_pushes_are_held_as_may_be_and_beyond_everything_is_announced() {
    for more in [0, 1] {
        let count = limits::HELD_PUSHES_MAX as u64 + more;
        let mut world = World::new();
        let a = world.connect("a", "1");
        world.frame(a, &send("warm", "b"));
        let texts: Vec<String> = (1..=count).map(|n| send(&format!("m{n}"), "b")).collect();
        let meanwhile: Vec<(u64, &str)> = texts.iter().map(|text| (a, text.as_str())).collect();
        let b = connect_slowly(&mut world, "b", "1", &meanwhile);
        let told = world.brief(b);
        if more == 0 {
            assert_eq!(
                (told.len() as u64, &told[0][..], &told[1][..]),
                (count + 1, "notice d:a:b 1-1 u1", "push 2")
            );
        } else {
            assert_eq!(told, [format!("notice d:a:b 1-{0} u{0}", count + 1)]);
        }
        world.frame(a, &send("after", "b"));
        assert_eq!(world.brief(b).len(), 1, "and what comes then is pushed");
    }
}

#[test]
fn many_conversations_are_announced_in_pages_and_the_last_says_so() {
    let mut world = World::new();
    let a = world.connect("a", "1");
    let count = limits::NOTICES_PER_PAGE * 2 + 1;
    for n in 0..count {
        let group_id = Some(bowline_protocol::ids::GroupId::trusted(&format!("g{n:04}")));
        let members = ["a", "b"].map(UserId::trusted).to_vec();
        world.request(Request::GroupCreate { group_id, name: None, members, owner: None, meta: None });
        world.frame(
            a,
            &format!(r#"{{"type":"msg.send","id":"m{n}","conversation_id":"g:g{n:04}","body":1}}"#),
        );
    }
    let b = world.connect("b", "1");
    let pages = world.take(b);
    let rows = |page: &serde_json::Value| page["conversations"].as_array().map_or(0, Vec::len);
    assert_eq!(pages.iter().map(rows).collect::<Vec<_>>(), [100, 100, 1]);
    assert_eq!(pages.iter().map(|page| page["more"] == true).collect::<Vec<_>>(), [true, true, false]);
    // Where frames are small, a page ends early.
    world.config.frame_bytes_max = 1_000;
    world.restart();
    let b = world.connect("b", "1");
    let pages = world.take(b);
    assert_eq!(pages.iter().map(rows).sum::<usize>(), count);
    let longest = pages.iter().map(|page| page.to_string().len()).max();
    assert!(longest > Some(1_900), "{longest:?}");
    for frame_bytes_max in 900..1_000 {
        world.config.frame_bytes_max = frame_bytes_max;
        world.restart();
        let b = world.connect("b", "1");
        let longest = world.take(b).iter().map(|page| page.to_string().len()).max();
        assert!(longest <= Some(frame_bytes_max + SERVER_FIELDS_BYTES), "{longest:?}");
    }
}

fn devices(world: &mut World, user: &str) -> Vec<(String, Option<DeviceClass>, u64)> {
    let rows = world.store.devices.iter().filter(|((owner, _), _)| owner.as_str() == user);
    rows.map(|((_, id), row)| (id.to_string(), row.class, row.last_seen)).collect()
}

#[test]
fn a_user_has_at_most_so_many_devices_and_the_one_longest_unseen_gives_way() {
    let mut world = World::new();
    let max = limits::DEVICES_PER_USER_MAX;
    // The very first stays connected.
    world.connect("b", "d00");
    for n in 1..max {
        world.advance(10);
        let conn = world.connect("b", &format!("d{n:02}"));
        world.disconnect(conn);
    }
    // One that is known already displaces nobody.
    world.advance(10);
    let again = world.connect("b", "d02");
    world.disconnect(again);
    assert_eq!(devices(&mut world, "b").len(), max);
    world.advance(10);
    world.connect("b", "new");
    let left: Vec<String> = devices(&mut world, "b").into_iter().map(|(id, ..)| id).collect();
    assert_eq!(left.len(), max);
    assert!(!left.contains(&"d01".to_owned()), "{left:?}");
    assert!(["d00", "d02", "d03", "new"].iter().all(|id| left.contains(&(*id).to_owned())), "{left:?}");
}

#[test]
fn a_device_that_gave_way_is_behind_nowhere_any_more() {
    let mut world = World::new();
    let a = world.connect("a", "1");
    let old = world.connect("b", "old");
    world.disconnect(old);
    world.advance(10);
    let b = world.connect("b", "b");
    world.frame(a, &send("m1", "b"));
    world.frame(b, &recv(AB, 1));
    assert_eq!(world.store.conversations[AB].members["b"].lagging.len(), 1);
    for n in 0..limits::DEVICES_PER_USER_MAX - 1 {
        let conn = world.connect("b", &format!("d{n:02}"));
        world.disconnect(conn);
    }
    assert_eq!(world.store.conversations[AB].members["b"].lagging, []);
    // In memory as in the store: the next write brings nothing back.
    world.frame(a, &send("m2", "b"));
    world.frame(b, &recv(AB, 2));
    let behind = &world.store.conversations[AB].members["b"].lagging;
    assert!(!behind.is_empty() && behind.iter().all(|(device, _)| device.as_str() != "old"), "{behind:?}");
}

#[test]
fn devices_are_forgotten_in_every_conversation_whichever_are_more() {
    // In a small conversation many users' devices are forgotten at once, in a large one few.
    let mut world = World::new();
    let users: Vec<String> = (0..8).map(|n| format!("u{n}")).collect();
    for (name, members) in [("small", &users[..2]), ("large", &users[..])] {
        let group_id = Some(bowline_protocol::ids::GroupId::trusted(name));
        let members = members.iter().map(|user| UserId::trusted(user)).collect();
        world.request(Request::GroupCreate { group_id, name: None, members, owner: None, meta: None });
    }
    let mut conns = Vec::new();
    for user in &users[..5] {
        let gone = world.connect(user, "gone");
        let kept = world.connect(user, "kept");
        world.disconnect(gone);
        world.disconnect(kept);
        conns.push(world.connect(user, "1"));
    }
    for group in ["small", "large"] {
        world.frame(
            conns[0],
            &format!(r#"{{"type":"msg.send","id":"{group}","conversation_id":"g:{group}","body":1}}"#),
        );
    }
    let all: Vec<(u64, String)> =
        conns.iter().flat_map(|conn| ["g:small", "g:large"].map(|group| (*conn, recv(group, 1)))).collect();
    all.iter().for_each(|(conn, text)| world.frame(*conn, text));
    let lagging = |world: &World, group: &str, user: &str| {
        let member = &world.store.conversations[group].members[user];
        member.lagging.iter().map(|(device, _)| device.to_string()).collect::<Vec<_>>()
    };
    assert_eq!(lagging(&world, "g:large", "u3"), ["gone", "kept"]);
    world.core.hold(true);
    for user in &users[..5] {
        let (user, device) = (UserId::trusted(user), DeviceId::trusted("gone"));
        world.give_request(Request::ForgetDevice { user, device });
    }
    world.core.hold(false);
    world.settle();
    // What memory has is written with the next positions.
    for group in ["small", "large"] {
        world.frame(
            conns[0],
            &format!(r#"{{"type":"msg.send","id":"{group}2","conversation_id":"g:{group}","body":1}}"#),
        );
    }
    for (conn, text) in &all {
        world.frame(*conn, &text.replace(r#""seq":1"#, r#""seq":2"#));
    }
    for (group, user) in [("g:small", "u1"), ("g:large", "u1"), ("g:large", "u4")] {
        assert_eq!(lagging(&world, group, user), ["kept"], "{group} {user}");
    }
    assert_eq!(world.core.counters().devices_forgotten, 5);
}

#[test]
fn a_device_that_is_connected_is_known_also_when_it_was_forgotten() {
    let mut world = World::new();
    let (a, b, b2) = (world.connect("a", "1"), world.connect("b", "1"), world.connect("b", "2"));
    let forget = Request::ForgetDevice { user: UserId::trusted("b"), device: DeviceId::trusted("2") };
    assert_eq!(world.request(forget), Answer::Done);
    world.frame(a, &send("m1", "b"));
    world.frame(b, &recv(AB, 1));
    world.disconnect(b2);
    let b2 = world.connect("b", "2");
    assert_eq!(world.brief(b2), ["notice d:a:b 1-1 u1"], "it had not received it");
}

/// Opens as [`World::connect`] does, with a class.
fn connect_class(world: &mut World, device: &str, class: Option<DeviceClass>) -> u64 {
    let conn = world.open("a", "spare", None, SameDevice::Replace);
    world.give(conn, Up::Closed(CloseCode::Bye));
    world.settle();
    world.give(conn, Up::Open(Open { class, ..opening("b", device, conn) }));
    world.settle();
    conn
}

#[test]
fn a_device_is_written_when_it_is_new_has_another_class_or_was_not_seen_for_an_hour() {
    let mut world = World::new();
    let one = connect_class(&mut world, "1", None);
    assert_eq!(devices(&mut world, "b"), [("1".into(), None, world.now.wall)]);
    world.disconnect(one);
    let left = world.now.wall;
    // Within the hour nothing is written.
    world.advance(limits::SEEN_COARSE_MS);
    let commits = world.commits;
    let one = connect_class(&mut world, "1", None);
    assert_eq!((world.commits, devices(&mut world, "b")), (commits, vec![("1".into(), None, left)]));
    world.disconnect(one);
    // A class that was not told before is noted, and one that is not told again stays.
    for (told, kept) in [
        (Some(DeviceClass::Ios), Some(DeviceClass::Ios)),
        (None, Some(DeviceClass::Ios)),
        (Some(DeviceClass::Ios), Some(DeviceClass::Ios)),
        (Some(DeviceClass::Web), Some(DeviceClass::Web)),
    ] {
        world.advance(10);
        let (commits, before) = (world.commits, devices(&mut world, "b")[0].1);
        let conn = connect_class(&mut world, "1", told);
        assert_eq!(devices(&mut world, "b")[0].1, kept, "{told:?}");
        assert_eq!(world.commits > commits, before != kept, "{told:?} is written when it is news");
        let Answer::User { devices: shown, .. } = world.request(Request::User { user: UserId::trusted("b") })
        else {
            panic!()
        };
        assert_eq!(shown.len(), 1);
        world.disconnect(conn);
    }
    world.advance(limits::SEEN_COARSE_MS + 1);
    let two = connect_class(&mut world, "0", Some(DeviceClass::Iot));
    connect_class(&mut world, "1", None);
    assert_eq!(
        devices(&mut world, "b")[1],
        ("1".into(), Some(DeviceClass::Web), world.now.wall),
        "an hour and more ago"
    );
    world.disconnect(two);
}

#[test]
fn the_api_sees_which_devices_are_connected_and_since_when() {
    let mut world = World::new();
    let conns = ["2", "1"].map(|device| world.connect("b", device));
    world.disconnect(conns[0]);
    let Answer::User { online, devices } = world.request(Request::User { user: UserId::trusted("b") }) else {
        panic!()
    };
    let shown: Vec<(&str, Option<&str>)> =
        devices.iter().map(|d| (d.device_id.as_str(), d.node_id.as_deref())).collect();
    assert_eq!((online, shown), (true, vec![("1", Some("n1")), ("2", None)]));
    assert_eq!(devices[1].connected_at, None);
    // A login is a time in microseconds; the newest of several connections counts.
    for (conn, login) in
        [(90, 1_700_000_000_123_456), (91, 1_700_000_000_999_999), (92, 1_600_000_000_000_000)]
    {
        let open = Open { same_device: SameDevice::Allow, ..opening("c", "1", conn) };
        world.up_from(ConnRef { login, ..world.conn_ref(conn) }, Up::Open(open));
    }
    let Answer::User { devices, .. } = world.request(Request::User { user: UserId::trusted("c") }) else {
        panic!()
    };
    assert_eq!((devices.len(), devices[0].connected_at), (1, Some(1_700_000_000_999)));
    // Only the named device is sent away.
    let kick = |device: Option<&str>| Request::Kick {
        user: UserId::trusted("b"),
        device: device.map(DeviceId::trusted),
        reason: None,
        code: CloseCode::Kicked,
    };
    let two = world.connect("b", "2");
    assert_eq!(world.request(kick(Some("2"))), Answer::Closed { count: 1 });
    assert_eq!(world.closed.keys().collect::<Vec<_>>(), [&two]);
    assert_eq!(world.core.table_sizes()[0], 4);
    world.connect("b", "3");
    assert_eq!(world.request(kick(None)), Answer::Closed { count: 2 });
    assert_eq!(world.core.table_sizes()[0], 3);
}

#[test]
fn a_device_counts_from_its_login_on_before_it_was_told_anything() {
    let mut world = World::new();
    let (a, b) = (world.connect("a", "1"), world.connect("b", "1"));
    world.frame(a, &send("m1", "b"));
    world.frame(b, &recv(AB, 1));
    (world.backwards, world.hold_reads) = (true, true);
    let b2 = world.connect("b", "2");
    world.frame(a, &send("m2", "b"));
    world.frame(b, &recv(AB, 2));
    let member = &world.store.conversations[AB].members["b"];
    assert_eq!((member.delivered, member.position(&DeviceId::trusted("2"))), (2, 1));
    world.disconnect(b2);
    (world.backwards, world.hold_reads) = (false, false);
    world.settle();
    let b2 = world.connect("b", "2");
    assert_eq!(world.brief(b2), ["notice d:a:b 1-2 u2"]);
}

#[test]
fn what_the_store_shows_before_it_is_known_to_be_durable_is_pushed_once_it_is() {
    let mut world = World::new();
    let (a, b2) = (world.connect("a", "1"), world.connect("b", "2"));
    let first = world.connect("b", "1");
    world.disconnect(first);
    world.frames(&[(a, &send("m0", "c")), (a, &send("m1", "b"))]);
    (world.backwards, world.hold_reads) = (true, true);
    let b = world.connect("b", "1");
    // Stored, and the look-up sees them; the outcome is told later.
    world.late_outcomes = true;
    world.frames(&[
        (a, &send("m2", "b")),
        (b2, &send("m3", "a")),
        (a, &send("m4", "b")),
        (a, &send("m5", "c")),
        (a, &send("m6", "c")),
        (a, &send("m7", "c")),
    ]);
    (world.backwards, world.hold_reads) = (false, false);
    world.settle();
    assert_eq!(world.last_seq(AB), 4);
    assert_eq!(world.brief(b), ["notice d:a:b 1-1 u1"]);
    world.tell_outcomes();
    assert_eq!(world.brief(b), ["push 2", "push 3", "push 4"]);
}

#[test]
fn a_device_that_the_store_has_not_taken_yet_stays_where_it_is() {
    let mut world = World::new();
    let a = world.connect("a", "1");
    for user in ["b", "c"] {
        let conn = world.connect(user, "1");
        world.disconnect(conn);
    }
    let conn = world.connect("b", "2");
    world.disconnect(conn);
    // The second device of `c` comes and goes while the store fails.
    world.failures = 2;
    let c2 = world.connect("c", "2");
    world.disconnect(c2);
    assert_eq!(devices(&mut world, "c").len(), 1);
    // Of another user a device of that name is known, and another one is stored now; that says nothing.
    world.connect("b", "1");
    world.connect("b", "3");
    let c1 = world.connect("c", "1");
    world.frame(a, &send("m1", "c"));
    world.frame(c1, &recv("d:a:c", 1));
    let behind = |world: &World| world.store.conversations["d:a:c"].members["c"].lagging.clone();
    world.advance(limits::STORE_RETRY_MS);
    assert_eq!(behind(&world), [(DeviceId::trusted("2"), 0)]);
    assert_eq!(devices(&mut world, "c").len(), 2, "it is stored when the store can");
    // Once it is, it is a device like any other, and may be forgotten.
    let forget = Request::ForgetDevice { user: UserId::trusted("c"), device: DeviceId::trusted("2") };
    assert_eq!(world.request(forget), Answer::Done);
    world.disconnect(c1);
    let c1 = world.connect("c", "1");
    world.frame(a, &send("m2", "c"));
    world.frame(c1, &recv("d:a:c", 2));
    assert_eq!(behind(&world), []);
}

#[test]
fn who_leaves_before_its_devices_are_found_moves_no_other_device() {
    let mut world = World::new();
    let (a, b2) = (world.connect("a", "1"), world.connect("b", "2"));
    let b = world.connect("b", "1");
    [b, b2].into_iter().for_each(|conn| world.disconnect(conn));
    world.frame(a, &send("m1", "b"));
    (world.backwards, world.hold_reads) = (true, true);
    let b = world.connect("b", "1");
    let looked_up = world.lanes.len();
    world.frame(b, &recv(AB, 1));
    assert_eq!(world.lanes.len(), looked_up, "its devices are being looked up");
    world.disconnect(b);
    world.advance(1_000);
    assert_eq!(world.lanes.len(), looked_up + 1, "once more, for what it said");
    world.advance(1_000);
    assert_eq!(world.lanes.len(), looked_up + 1);
    (world.backwards, world.hold_reads) = (false, false);
    world.settle();
    let member = &world.store.conversations[AB].members["b"];
    assert_eq!((member.delivered, member.position(&DeviceId::trusted("2"))), (1, 0));
    let b2 = world.connect("b", "2");
    assert_eq!(world.brief(b2), ["notice d:a:b 1-1 u1"]);
}
