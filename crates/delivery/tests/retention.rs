//! What is deleted without anybody asking for it: old messages, too many messages, ids, devices.

#[allow(dead_code)]
mod support;

use bowline_delivery::{
    Config, Retention, limits,
    persist::{Found, Query},
};
use bowline_protocol::{
    DeviceId, UserId,
    link::{Answer, Request},
};
use serde_json::Value;
use support::{MemStore, World, config, read, recv, send};

const AB: &str = "d:a:b";

fn world(retention: Retention) -> World {
    World::with(Config { retention, ..config() }, MemStore::default())
}

/// Ages in ms, and how many of each conversation.
fn by_age(age_ms_max: u64) -> Retention {
    Retention { age_ms_max, messages_max: 0, ids_ms_min: 1 }
}

fn by_count(messages_max: u64) -> Retention {
    Retention { age_ms_max: 0, messages_max, ids_ms_min: 1 }
}

fn send_all(world: &mut World, conn: u64, to: &str, numbers: std::ops::RangeInclusive<u64>) {
    for n in numbers {
        world.frame(conn, &send(&format!("{to}{n}"), to));
    }
}

/// Lets the sweep come by as often as it has something to do.
fn sweep(world: &mut World) {
    for _ in 0..20 {
        world.advance(limits::SWEEP_MS / 10);
    }
}

fn stored(world: &World, id: &str) -> Vec<u64> {
    world.store.conversations[id].messages.iter().map(|m| m.seq).collect()
}

/// (first, last, read, unread) of a line of the list.
fn line(world: &mut World, conn: u64, id: &str) -> (u64, u64, u64, u64) {
    world.take(conn);
    world.frame(conn, r#"{"type":"conversation.list","id":"l"}"#);
    let page = world.take(conn).into_iter().find(|f| f["type"] == "conversation.page").expect("a page");
    let rows = page["conversations"].as_array().expect("rows");
    let row = rows.iter().find(|row| row["conversation_id"] == id).expect("a row");
    let number = |name: &str| row[name].as_u64().expect("a number");
    (number("first_seq"), number("last_seq"), number("read_seq"), number("unread"))
}

#[test]
fn the_newest_messages_of_each_conversation_remain() {
    let mut world = world(by_count(3));
    let (a, b) = (world.connect("a", "1"), world.connect("b", "1"));
    send_all(&mut world, a, "b", 1..=10);
    send_all(&mut world, b, "c", 1..=2);
    sweep(&mut world);
    assert_eq!((stored(&world, AB), stored(&world, "d:b:c")), (vec![8, 9, 10], vec![1, 2]));
    assert_eq!(line(&mut world, a, AB), (8, 10, 7, 0));
    assert_eq!(line(&mut world, b, AB), (8, 10, 7, 3), "what is gone is not unread");
    // One more pushes one out.
    send_all(&mut world, a, "b", 11..=11);
    sweep(&mut world);
    assert_eq!(stored(&world, AB), [9, 10, 11]);
    world.check_ledger();
}

#[test]
fn messages_go_when_they_are_too_old_and_not_before() {
    let mut world = world(by_age(60_000));
    let a = world.connect("a", "1");
    send_all(&mut world, a, "b", 1..=2);
    world.advance(40_000);
    send_all(&mut world, a, "b", 3..=3);
    world.advance(15_000);
    sweep(&mut world);
    assert_eq!(stored(&world, AB), [1, 2, 3]);
    world.advance(4_000);
    sweep(&mut world);
    assert_eq!(stored(&world, AB), [3]);
    world.advance(60_000);
    sweep(&mut world);
    assert_eq!(stored(&world, AB), [0; 0]);
    send_all(&mut world, a, "b", 4..=4);
    assert_eq!(stored(&world, AB), [4], "numbers go on");
}

#[test]
fn what_was_not_received_counts_as_expired_once_for_each_recipient() {
    let mut world = world(by_count(2));
    let members = ["a", "b", "c", "d"].map(UserId::trusted).to_vec();
    let group_id = Some(bowline_protocol::ids::GroupId::trusted("t"));
    world.request(Request::GroupCreate { group_id, name: None, members, owner: None, meta: None });
    let (a, b) = (world.connect("a", "1"), world.connect("b", "1"));
    for n in 1..=5 {
        world.frame(a, &format!(r#"{{"type":"msg.send","id":"m{n}","conversation_id":"g:t","body":{n}}}"#));
    }
    world.frame(b, &recv("g:t", 2));
    sweep(&mut world);
    // Three gone: one of b's, three of c's and d's each; a sent them.
    assert_eq!((world.store.ledger.accepted, world.store.ledger.delivered), (15, 2));
    assert_eq!((world.store.ledger.expired, world.store.waiting()), (7, 6));
    let member = &world.store.conversations["g:t"].members["b"];
    assert_eq!((member.first, member.delivered, member.read), (4, 3, 3));
}

#[test]
fn clients_are_told_where_history_begins_and_find_nothing_below() {
    let mut world = world(by_count(3));
    let (a, b) = (world.connect("a", "1"), world.connect("b", "1"));
    send_all(&mut world, a, "b", 1..=3);
    world.frame(b, &read(AB, 1));
    world.disconnect(b);
    send_all(&mut world, a, "b", 4..=8);
    sweep(&mut world);
    let b = world.connect("b", "1");
    assert_eq!(world.brief(b), ["notice d:a:b 6-8 u3"]);
    world.frame(b, r#"{"type":"history","id":"h","conversation_id":"d:a:b","after_seq":0}"#);
    let page = world.take(b).remove(0);
    let numbers: Vec<_> =
        page["messages"].as_array().expect("rows").iter().map(|m| m["seq"].clone()).collect();
    assert_eq!((&page["first_seq"], numbers), (&Value::from(6), vec![6.into(), 7.into(), 8.into()]));
    world.frame(b, r#"{"type":"history","id":"h","conversation_id":"d:a:b","before_seq":6}"#);
    assert_eq!(world.brief(b), ["page  more=false"]);
    // The whole of the past for the application, too, begins there.
    let conversation = bowline_protocol::ConversationId::trusted(AB);
    match world.request(Request::History { conversation, after: None, before: None, limit: 10 }) {
        Answer::Page(page) => assert!(page.starts_with(br#"{"conversation_id":"d:a:b","first_seq":6"#)),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_device_that_was_behind_is_lifted_and_what_is_left_is_announced() {
    let mut world = world(by_count(2));
    let (a, b1, b2) = (world.connect("a", "1"), world.connect("b", "1"), world.connect("b", "2"));
    send_all(&mut world, a, "b", 1..=4);
    world.frame(b1, &recv(AB, 4));
    world.disconnect(b2);
    sweep(&mut world);
    let lagging = &world.store.conversations[AB].members["b"].lagging;
    assert_eq!(lagging[..], [(DeviceId::trusted("2"), 2)]);
    let b2 = world.connect("b", "2");
    assert_eq!(world.brief(b2), ["notice d:a:b 3-4 u2"]);
}

#[test]
fn what_is_gone_is_not_pushed_again_and_hides_no_later_push() {
    // Up to the end of what was announced, and beyond it.
    for kept in [3, 2] {
        let mut world = world(by_count(kept));
        let (a, b) = (world.connect("a", "1"), world.connect("b", "1"));
        send_all(&mut world, a, "b", 1..=2);
        world.disconnect(b);
        // Announced, not fetched; what comes then lies above a gap, until retention takes the gap.
        let b = world.connect("b", "1");
        assert_eq!(world.brief(b), ["notice d:a:b 1-2 u2"]);
        send_all(&mut world, a, "b", 3..=5);
        assert_eq!(world.brief(b), ["push 3", "push 4", "push 5"]);
        sweep(&mut world);
        let left = Vec::from_iter(6 - kept..=5);
        assert_eq!(stored(&world, AB), left);
        world.advance(3_000);
        assert_eq!(world.brief(b), left.iter().map(|n| format!("again {n}")).collect::<Vec<_>>());
    }
}

#[test]
fn an_id_outlives_its_message_for_its_time_and_is_free_afterwards() {
    let mut world = world(Retention { age_ms_max: 0, messages_max: 1, ids_ms_min: 60_000 });
    let a = world.connect("a", "1");
    send_all(&mut world, a, "b", 1..=3);
    sweep(&mut world);
    assert_eq!(stored(&world, AB), [3]);
    world.take(a);
    world.frame(a, &send("b1", "b"));
    assert_eq!(world.brief(a), ["ack b1 1"], "remembered here");
    world.restart();
    let a = world.connect("a", "1");
    world.take(a);
    world.frame(a, &send("b1", "b"));
    world.frame(a, &send("b1", "c"));
    assert_eq!(world.brief(a), ["ack b1 1", "error conflict b1"], "remembered by the store");
    world.advance(60_000);
    sweep(&mut world);
    assert_eq!(world.store.gone.len(), 0);
    world.take(a);
    world.frame(a, &send("b1", "b"));
    assert_eq!(world.brief(a), ["ack b1 4"], "a message like any other");
    // That of a message which is stored is never free.
    world.advance(600_000);
    sweep(&mut world);
    world.frame(a, &send("b1", "b"));
    assert_eq!(world.brief(a), ["ack b1 4"]);
}

#[test]
fn an_id_is_answered_from_memory_for_its_whole_time_and_as_long_as_its_message_is_stored() {
    let mut world = world(Retention { age_ms_max: 0, messages_max: 1, ids_ms_min: 60_000 });
    let a = world.connect("a", "1");
    let (first, second) = (send("m1", "b"), send("m2", "b"));
    world.frames(&[(a, &first), (a, &second)]);
    let sent_at = world.now.wall;
    sweep(&mut world);
    assert_eq!(stored(&world, AB), [2]);
    let repeat = |world: &mut World, text: &str| {
        let commits = world.commits;
        world.take(a);
        world.frame(a, text);
        (world.brief(a).remove(0), world.commits - commits)
    };
    world.advance(sent_at + 60_000 - world.now.wall);
    assert_eq!(repeat(&mut world, &first), ("ack m1 1".into(), 0), "to the last moment");
    world.advance(5_000);
    assert_eq!(repeat(&mut world, &second), ("ack m2 2".into(), 0), "its message is there still");
    let other = first.replace(r#""body":"m1""#, r#""body":"other""#);
    assert_eq!(
        repeat(&mut world, &other),
        ("ack m1 3".into(), 1),
        "its time is over: for whatever it is used now"
    );
}

#[test]
fn a_store_that_fails_only_delays_the_sweep() {
    let mut world = world(by_count(2));
    let a = world.connect("a", "1");
    send_all(&mut world, a, "b", 1..=5);
    world.failures = 3;
    world.advance(limits::SWEEP_MS);
    assert_eq!(stored(&world, AB), [1, 2, 3, 4, 5]);
    world.check_ledger();
    for _ in 0..10 {
        world.advance(limits::STORE_RETRY_MS);
    }
    assert_eq!(stored(&world, AB), [4, 5]);
    world.check_ledger();
}

#[test]
fn a_restart_takes_what_is_too_many_by_new_settings() {
    let mut world = world(by_count(0));
    let a = world.connect("a", "1");
    for to in ["b", "c", "d"] {
        send_all(&mut world, a, to, 1..=700);
    }
    world.config.retention = by_count(100);
    world.restart();
    sweep(&mut world);
    for id in ["d:a:b", "d:a:c", "d:a:d"] {
        assert_eq!(stored(&world, id), Vec::from_iter(601..=700), "{id}");
    }
    world.check_ledger();
}

#[test]
fn a_group_that_is_deleted_under_the_sweep_stays_deleted() {
    let mut world = world(by_count(1));
    let group = bowline_protocol::ids::GroupId::trusted("t");
    let members = ["a", "b"].map(UserId::trusted).to_vec();
    let group_id = Some(group.clone());
    world.request(Request::GroupCreate { group_id, name: None, members, owner: None, meta: None });
    let a = world.connect("a", "1");
    for n in 1..=5 {
        world.frame(a, &format!(r#"{{"type":"msg.send","id":"m{n}","conversation_id":"g:t","body":{n}}}"#));
    }
    assert_eq!(world.request(Request::GroupDelete { group }), Answer::Done);
    sweep(&mut world);
    assert!(!world.store.conversations.contains_key("g:t"));
    send_all(&mut world, a, "b", 1..=3);
    sweep(&mut world);
    assert_eq!(stored(&world, AB), [3], "and the sweep goes on");
    world.check_ledger();
}

fn devices(world: &World, user: &str) -> Vec<(String, u64)> {
    match world.store.read(&Query::Devices { user: UserId::trusted(user) }) {
        Found::Devices(devices) => devices.into_iter().map(|d| (d.device.to_string(), d.last_seen)).collect(),
        other => panic!("{other:?}"),
    }
}

/// The time passes in steps, as timers make it do.
fn days(world: &mut World, count: u64) {
    for _ in 0..count * 24 {
        world.advance(3_600_000);
    }
}

#[test]
fn a_device_is_forgotten_thirty_days_after_it_was_seen_and_is_new_when_it_returns() {
    let mut world = World::new();
    let (a, b1, b2) = (world.connect("a", "1"), world.connect("b", "1"), world.connect("b", "2"));
    send_all(&mut world, a, "b", 1..=3);
    world.frame(b1, &recv(AB, 3));
    world.disconnect(b2);
    let left_at = world.now.wall;
    assert_eq!(devices(&world, "b")[1], ("2".into(), left_at), "seen until it left");
    days(&mut world, 29);
    assert_eq!(devices(&world, "b").len(), 2);
    assert_eq!(world.store.conversations[AB].members["b"].lagging.len(), 1);
    days(&mut world, 2);
    let left: Vec<String> = devices(&world, "b").into_iter().map(|(device, _)| device).collect();
    assert_eq!(left, ["1"], "the one that stayed connected stays known");
    assert_eq!(world.store.conversations[AB].members["b"].lagging.len(), 0);
    let b2 = world.connect("b", "2");
    assert_eq!(world.brief(b2), [""; 0], "it starts at the user's delivered position");
    send_all(&mut world, a, "b", 4..=4);
    assert_eq!(world.brief(b2), ["push 4"]);
}

#[test]
fn a_device_that_stays_connected_is_seen_should_the_process_die() {
    let mut world = World::new();
    world.connect("b", "1");
    days(&mut world, 40);
    let seen = devices(&world, "b")[0].1;
    assert!(world.now.wall - seen <= limits::SEEN_MS + 3_600_000, "{} ms ago", world.now.wall - seen);
    world.restart();
    days(&mut world, 1);
    assert_eq!(devices(&world, "b").len(), 1);
}

#[test]
fn a_device_is_seen_when_it_connects_and_when_it_leaves() {
    let mut world = World::new();
    let b = world.connect("b", "1");
    assert_eq!(devices(&world, "b")[0].1, world.now.wall);
    world.advance(5_000);
    world.disconnect(b);
    assert_eq!(devices(&world, "b")[0].1, world.now.wall);
    days(&mut world, 3);
    world.connect("b", "1");
    assert_eq!(devices(&world, "b")[0].1, world.now.wall);
}

#[test]
fn a_device_may_be_forgotten_on_request() {
    let mut world = World::new();
    let (a, b1, b2) = (world.connect("a", "1"), world.connect("b", "1"), world.connect("b", "2"));
    send_all(&mut world, a, "b", 1..=2);
    world.frame(b1, &recv(AB, 2));
    world.disconnect(b2);
    let request = Request::ForgetDevice { user: UserId::trusted("b"), device: DeviceId::trusted("2") };
    assert_eq!(world.request(request), Answer::Done);
    let b2 = world.connect("b", "2");
    assert_eq!(world.brief(b2), [""; 0]);
}
