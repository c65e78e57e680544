//! Pushes, what is pushed again and what is not, and who hears of it in receipts.

#[allow(dead_code)]
mod support;

use bowline_delivery::limits;
use bowline_protocol::{
    UserId,
    ids::GroupId,
    link::{Request, SameDevice},
};
use support::{World, read, recv, send};

const AB: &str = "d:a:b";

/// Sends so many messages at once: they are written together.
fn burst(world: &mut World, conn: u64, to: &str, numbers: std::ops::RangeInclusive<u64>) {
    let texts: Vec<String> = numbers.map(|n| send(&format!("{to}{n}"), to)).collect();
    let frames: Vec<(u64, &str)> = texts.iter().map(|text| (conn, text.as_str())).collect();
    world.frames(&frames);
}

fn pushes(word: &str, numbers: std::ops::RangeInclusive<u64>) -> Vec<String> {
    numbers.map(|n| format!("{word} {n}")).collect()
}

fn make_group(world: &mut World, name: &str, members: &[&str]) {
    let members = members.iter().map(|name| UserId::trusted(name)).collect();
    let group_id = Some(GroupId::trusted(name));
    world.request(Request::GroupCreate { group_id, name: None, members, owner: None, meta: None });
}

fn say(id: &str, group: &str) -> String {
    format!(r#"{{"type":"msg.send","id":"{id}","conversation_id":"g:{group}","body":1}}"#)
}

#[test]
fn the_connection_that_sent_has_the_ack_and_every_other_the_push() {
    let mut world = World::new();
    let one = world.connect_as("a", "1", SameDevice::Allow);
    let two = world.connect_as("a", "1", SameDevice::Allow);
    let other = world.connect("a", "2");
    world.frame(one, &send("m", "b"));
    assert_eq!(
        (world.brief(one), world.brief(two), world.brief(other)),
        (vec!["ack m 1".to_owned()], vec!["push 1".to_owned()], vec!["push 1".to_owned()])
    );
    // The device has what it sent, whichever of its connections was asked; the other has not said so.
    world.advance(3_000);
    assert_eq!((world.brief(two), world.brief(other)), (vec![], vec!["again 1".to_owned()]));
}

#[test]
fn own_messages_within_a_range_are_not_pushed_again_and_those_of_ones_other_devices_are() {
    // From memory, and from the store.
    for count in [1, 70] {
        let mut world = World::new();
        let (a, b, b2) = (world.connect("a", "1"), world.connect("b", "1"), world.connect("b", "2"));
        for (conn, text) in
            [(a, send("m1", "b")), (b, send("m2", "a")), (b2, send("m3", "a")), (a, send("m4", "b"))]
        {
            world.frame(conn, &text);
        }
        burst(&mut world, a, "b", 5..=4 + count);
        world.take(b);
        world.advance(3_000);
        let expected = [pushes("again", 1..=1), pushes("again", 3..=4 + count)].concat();
        assert_eq!(world.brief(b), expected);
    }
}

#[test]
fn a_long_range_is_pushed_again_page_by_page_and_whole() {
    let mut world = World::new();
    let (a, b) = (world.connect("a", "1"), world.connect("b", "1"));
    let count = u64::from(limits::REDELIVERY_PAGE) * 2 + 50;
    burst(&mut world, a, "b", 1..=count);
    assert_eq!(world.brief(b), pushes("push", 1..=count));
    world.advance(3_000);
    assert_eq!(world.brief(b), pushes("again", 1..=count));
    assert_eq!(world.core.counters().redeliveries, count);
    // A page that is full to its end is followed by nothing.
    let mut world = World::new();
    let (a, b) = (world.connect("a", "1"), world.connect("b", "1"));
    let count = u64::from(limits::REDELIVERY_PAGE) * 2;
    burst(&mut world, a, "b", 1..=count);
    world.take(b);
    let looked_up = world.lanes.len();
    world.advance(3_000);
    assert_eq!((world.brief(b), world.lanes.len() - looked_up), (pushes("again", 1..=count), 2));
}

#[test]
fn what_is_in_memory_is_pushed_again_without_asking_the_store() {
    let mut world = World::new();
    let (a, b) = (world.connect("a", "1"), world.connect("b", "1"));
    burst(&mut world, a, "b", 1..=limits::TAIL_BODIES_MAX as u64);
    world.take(b);
    let looked_up = world.lanes.len();
    world.advance(3_000);
    assert_eq!(world.brief(b), pushes("again", 1..=limits::TAIL_BODIES_MAX as u64));
    assert_eq!(world.lanes.len(), looked_up);
}

#[test]
fn progress_in_one_conversation_is_none_in_another() {
    let mut world = World::new();
    let (a, c, b) = (world.connect("a", "1"), world.connect("c", "1"), world.connect("b", "1"));
    world.frames(&[(a, &send("m1", "b")), (c, &send("m1", "b"))]);
    world.take(b);
    world.advance(2_000);
    world.frame(b, &recv("d:b:c", 1));
    world.advance(1_000);
    let again = world.take(b);
    assert_eq!(again.iter().map(|f| f["conversation_id"].as_str()).collect::<Vec<_>>(), [Some(AB)]);
}

#[test]
fn a_gap_that_was_announced_ends_when_the_device_has_it_and_no_sooner() {
    let mut world = World::new();
    let (a, c) = (world.connect("a", "1"), world.connect("c", "1"));
    world.connect("b", "1");
    for conn in [a, c] {
        burst(&mut world, conn, "b", 1..=2);
    }
    let b = world.connect("b", "1");
    assert_eq!(world.brief(b), ["notice d:a:b 1-2 u2,d:b:c 1-2 u2"]);
    for conn in [a, c] {
        burst(&mut world, conn, "b", 3..=3);
    }
    world.take(b);
    // The attempts count all the same: after 3, 6 and 12 seconds.
    let again = |world: &mut World, ms: u64| {
        world.advance(ms);
        world.take(b).iter().map(|f| f["conversation_id"].to_string()).collect::<Vec<_>>()
    };
    assert_eq!(again(&mut world, 3_000), [""; 0]);
    world.frames(&[(b, &recv(AB, 1)), (b, &recv("d:b:c", 2))]);
    assert_eq!(again(&mut world, 6_000), [r#""d:b:c""#], "the gap of the other is open still");
    world.frame(b, &recv(AB, 2));
    assert!(again(&mut world, 12_000).contains(&r#""d:a:b""#.to_owned()));
}

#[test]
fn who_left_or_cleared_is_pushed_nothing_of_it_again_and_everything_else() {
    let mut world = World::new();
    let (a, b, b2) = (world.connect("a", "1"), world.connect("b", "1"), world.connect("b", "2"));
    for name in ["t", "u"] {
        make_group(&mut world, name, &["a", "b"]);
    }
    let send_all = |world: &mut World, n: u64| {
        world.frames(&[
            (a, &send(&format!("m{n}"), "b")),
            (a, &say(&format!("t{n}"), "t")),
            (a, &say(&format!("u{n}"), "u")),
        ]);
    };
    send_all(&mut world, 1);
    world.frame(b, r#"{"type":"group.leave","id":"q","conversation_id":"g:t"}"#);
    world.frame(b, r#"{"type":"conversation.clear","id":"q","conversation_id":"d:a:b"}"#);
    for conn in [b, b2] {
        world.take(conn);
    }
    world.advance(3_000);
    for conn in [b, b2] {
        let again = world.take(conn);
        assert_eq!(again.iter().map(|f| f["conversation_id"].as_str()).collect::<Vec<_>>(), [Some("g:u")]);
    }
}

#[test]
fn a_device_that_clears_has_no_gap_any_more() {
    let mut world = World::new();
    let a = world.connect("a", "1");
    world.connect("b", "1");
    world.frame(a, &send("m1", "b"));
    let b = world.connect("b", "1");
    world.frame(b, r#"{"type":"conversation.clear","id":"q","conversation_id":"d:a:b"}"#);
    world.frame(a, &send("m2", "b"));
    world.take(b);
    world.advance(3_000);
    assert_eq!(world.brief(b), ["again 2"]);
}

#[test]
fn receipts_go_to_those_whose_messages_are_newly_covered() {
    // Who sent what is known from memory; after a restart it is asked of the store.
    for is_restarted in [false, true] {
        let mut world = World::new();
        make_group(&mut world, "t", &["a", "b", "c", "d"]);
        let mut conns = ["a", "c", "d"].map(|name| world.connect(name, "1"));
        for (n, conn) in [(1, 0), (2, 1), (3, 0), (4, 2)] {
            world.frame(conns[conn], &say(&format!("m{n}"), "t"));
        }
        if is_restarted {
            // Behind what is loaded with the conversation.
            for n in 5..=30 {
                world.frame(conns[2], &say(&format!("m{n}"), "t"));
            }
            world.restart();
            conns = ["a", "c", "d"].map(|name| world.connect(name, "1"));
        }
        let b = world.connect("b", "1");
        world.take(b);
        conns.iter().for_each(|conn| drop(world.take(*conn)));
        let heard = |world: &mut World, text: &str| {
            world.frame(b, text);
            conns.map(|conn| world.brief(conn).join(" "))
        };
        let said = |text: &str| text.to_owned();
        assert_eq!(heard(&mut world, &recv("g:t", 1)), [said("delivered 1 b"), said(""), said("")]);
        assert_eq!(heard(&mut world, &recv("g:t", 2)), [said(""), said("delivered 2 b"), said("")]);
        assert_eq!(
            heard(&mut world, &recv("g:t", 4)),
            [said("delivered 4 b"), said(""), said("delivered 4 b")]
        );
        assert_eq!(heard(&mut world, &read("g:t", 2)), [said("read 2 b"), said("read 2 b"), said("")]);
        assert_eq!(heard(&mut world, &read("g:t", 3)), [said("read 3 b"), said(""), said("")]);
        assert_eq!(heard(&mut world, &read("g:t", 3)), [said(""), said(""), said("")], "said before");
        assert_eq!(
            heard(&mut world, &recv("g:t", 1)),
            [said(""), said(""), said("")],
            "positions never move back"
        );
        assert_eq!(heard(&mut world, &read("g:t", 4)), [said(""), said(""), said("read 4 b")]);
        assert_eq!(world.brief(b), [""; 0], "and its own devices that read hear nothing");
    }
}

#[test]
fn what_was_said_before_is_not_written_again() {
    let mut world = World::new();
    let (a, b) = (world.connect("a", "1"), world.connect("b", "1"));
    burst(&mut world, a, "b", 1..=3);
    world.frame(b, &recv(AB, 2));
    let commits = world.commits;
    for seq in [2, 1, 0] {
        world.frame(b, &recv(AB, seq));
    }
    assert_eq!(world.commits, commits);
    world.frame(b, &read(AB, 2));
    world.frame(b, &recv(AB, 3));
    let commits = world.commits;
    for text in [read(AB, 2), read(AB, 1), recv(AB, 3), recv(AB, 9), recv(AB, 2)] {
        world.frame(b, &text);
    }
    assert_eq!((world.commits, world.decided[&b]), (commits, 11), "and each is decided");
}

#[test]
fn a_hundred_members_are_named_and_one_more_are_counted() {
    for (count, is_named) in
        [(limits::NAMED_RECEIPTS_MEMBERS_MAX, true), (limits::NAMED_RECEIPTS_MEMBERS_MAX + 1, false)]
    {
        let mut world = World::new();
        let names: Vec<String> = (0..count).map(|n| format!("u{n}")).collect();
        make_group(&mut world, "t", &names.iter().map(String::as_str).collect::<Vec<_>>());
        let (u0, u1) = (world.connect("u0", "1"), world.connect("u1", "1"));
        world.frame(u0, &say("m1", "t"));
        world.take(u0);
        world.frame(u1, &recv("g:t", 1));
        assert_eq!(world.brief(u0), [if is_named { "delivered 1 u1" } else { "delivered 1 n=1" }]);
    }
}

#[test]
fn counted_receipts_are_joined_by_conversation_kind_and_number() {
    let mut world = World::new();
    let names: Vec<String> = (0..150).map(|n| format!("u{n}")).collect();
    let members: Vec<&str> = names.iter().map(String::as_str).collect();
    for name in ["t", "u"] {
        make_group(&mut world, name, &members);
    }
    let conns: Vec<u64> = (0..5).map(|n| world.connect(&format!("u{n}"), "1")).collect();
    world.frames(&[
        (conns[0], &say("t1", "t")),
        (conns[4], &say("t2", "t")),
        (conns[0], &say("t3", "t")),
        (conns[0], &say("u1", "u")),
    ]);
    conns.iter().for_each(|conn| drop(world.take(*conn)));
    world.frames(&[
        (conns[1], &read("g:t", 3)),
        (conns[2], &recv("g:t", 1)),
        (conns[3], &recv("g:t", 2)),
        (conns[2], &recv("g:u", 1)),
        (conns[3], &read("g:u", 1)),
    ]);
    let told = |world: &mut World, conn: u64| {
        let frames = world.take(conn);
        let mut told: Vec<String> = frames
            .iter()
            .map(|f| format!("{} {}", f["conversation_id"].as_str().unwrap_or_default(), support::brief(f)))
            .collect();
        told.sort();
        told
    };
    // Of `t` only one has number 3; it has read it, too. Whose message was covered by nobody hears nothing.
    let of_t = ["g:t delivered 1 n=3", "g:t delivered 2 n=2", "g:t delivered 3 n=1", "g:t read 3 n=1"];
    let of_u = ["g:u delivered 1 n=2", "g:u read 1 n=1"];
    assert_eq!(told(&mut world, conns[0]), [&of_t[..], &of_u].concat());
    assert_eq!(told(&mut world, conns[4]), of_t[1..]);
    assert_eq!(told(&mut world, conns[1]), [""; 0]);
}

#[test]
fn what_a_device_said_before_and_while_the_store_failed_is_joined() {
    let mut world = World::new();
    let a = world.connect("a", "1");
    let (b, b2) = (world.connect("b", "1"), world.connect("b", "2"));
    burst(&mut world, a, "b", 1..=5);
    (world.failures, world.late_outcomes) = (1, true);
    world.frames(&[(b, &read(AB, 2)), (b2, &recv(AB, 4))]);
    // Meanwhile the first goes on, in one, and says nothing new in the other.
    world.frames(&[(b, &recv(AB, 3)), (b, &read(AB, 1))]);
    world.tell_outcomes();
    world.advance(limits::STORE_RETRY_MS);
    let member = &world.store.conversations[AB].members["b"];
    let position = |device: &str| member.position(&bowline_protocol::DeviceId::trusted(device));
    assert_eq!((position("1"), position("2"), member.delivered, member.read), (3, 4, 4, 2));
}

#[test]
fn a_device_has_its_own_messages_behind_what_it_received() {
    let mut world = World::new();
    let (a, b, b2) = (world.connect("a", "1"), world.connect("b", "1"), world.connect("b", "2"));
    for (conn, text) in
        [(a, send("m1", "b")), (b, send("m2", "a")), (b, send("m3", "a")), (b2, send("m4", "a"))]
    {
        world.frame(conn, &text);
    }
    world.frame(b, &recv(AB, 1));
    let at = |world: &World, device: &str| {
        world.store.conversations[AB].members["b"].position(&bowline_protocol::DeviceId::trusted(device))
    };
    assert_eq!((at(&world, "1"), at(&world, "2")), (3, 0), "up to what its other device sent");
    world.frame(b2, &recv(AB, 3));
    assert_eq!((at(&world, "1"), at(&world, "2")), (3, 4));
    // And sending moves a position only when nothing lies between.
    world.frame(b, &send("m5", "a"));
    assert_eq!(at(&world, "1"), 3);
    world.frame(b, &recv(AB, 4));
    assert_eq!(at(&world, "1"), 5);
}

#[test]
fn the_timer_of_a_push_starts_when_it_is_written() {
    let mut world = World::new();
    let a = world.connect("a", "1");
    world.frame(a, &send("m0", "b"));
    let b = world.connect("b", "1");
    world.frame(b, &recv(AB, 1));
    (world.backwards, world.hold_reads) = (true, true);
    let b = world.connect("b", "1");
    world.frame(a, &send("m1", "b"));
    world.advance(2_000);
    (world.backwards, world.hold_reads) = (false, false);
    world.settle();
    assert_eq!(world.brief(b), ["push 2"]);
    world.advance(2_999);
    assert_eq!(world.brief(b), [""; 0]);
    world.advance(1);
    assert_eq!(world.brief(b), ["again 2"]);
}

#[test]
fn what_was_loaded_with_a_conversation_tells_who_sent_it() {
    let mut world = World::new();
    let a = world.connect("a", "1");
    burst(&mut world, a, "b", 1..=30);
    world.restart();
    let (a, b) = (world.connect("a", "1"), world.connect("b", "1"));
    world.take(a);
    // The newest are loaded, those below are asked for.
    for (seq, looked_up) in [(10, 2), (14, 1), (16, 0), (30, 0)] {
        let before = world.lanes.len();
        world.frame(b, &recv(AB, seq));
        assert_eq!(
            (world.lanes.len() - before, world.brief(a)),
            (looked_up, vec![format!("delivered {seq} b")])
        );
    }
}

#[test]
fn what_waits_for_a_look_up_keeps_nobody_busy() {
    let mut world = World::new();
    let a = world.connect("a", "1");
    burst(&mut world, a, "b", 1..=30);
    world.restart();
    let (a, b) = (world.connect("a", "1"), world.connect("b", "1"));
    world.frame(b, &recv(AB, 1));
    world.take(a);
    (world.backwards, world.hold_reads) = (true, true);
    world.frame(b, &recv(AB, 3));
    let looked_up = world.lanes.len();
    world.advance(10_000);
    assert_eq!((world.lanes.len(), world.brief(a)), (looked_up, vec![]), "it is asked for once");
    (world.backwards, world.hold_reads) = (false, false);
    world.settle();
    assert_eq!(world.brief(a), ["delivered 3 b"]);
}
