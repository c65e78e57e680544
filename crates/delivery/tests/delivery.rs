//! The core's promises, one test each, over a naive store.

#[allow(dead_code)]
mod support;

use bowline_delivery::Verdict;
use bowline_protocol::{
    CloseCode, DeviceId, ErrorCode, UserId,
    error::Refusal,
    link::{Answer, ConnRef, Down, NodeRef, Request, SameDevice, Send, SendTarget, Up},
};
use std::sync::Arc;
use support::{MemStore, World, body, config, opening, read, recv, send};

const AB: &str = "d:a:b";

#[test]
fn a_message_is_acknowledged_and_pushed_once_it_is_stored() {
    let mut world = World::new();
    let (a, a2, b) = (world.connect("a", "1"), world.connect("a", "2"), world.connect("b", "1"));
    world.frame(a, &send("m", "b"));
    assert_eq!(world.brief(a), ["ack m 1"]);
    assert_eq!(world.brief(a2), ["push 1"], "the sender's other devices too");
    assert_eq!(world.brief(b), ["push 1"]);
    assert_eq!(world.last_seq(AB), 1);
}

#[test]
fn messages_sent_without_waiting_are_stored_in_that_order_whatever_the_batches() {
    let mut world = World::with(bowline_delivery::Config { batch_max: 7, ..config() }, MemStore::default());
    let (a, b) = (world.connect("a", "1"), world.connect("b", "1"));
    let texts: Vec<String> = (0..100).map(|n| send(&format!("m{n}"), "b")).collect();
    let frames: Vec<(u64, &str)> = texts.iter().map(|t| (a, t.as_str())).collect();
    world.frames(&frames);
    let acks: Vec<String> = (0..100).map(|n| format!("ack m{n} {}", n + 1)).collect();
    assert_eq!(world.brief(a), acks);
    let pushes: Vec<String> = (1..=100).map(|n| format!("push {n}")).collect();
    assert_eq!(world.brief(b), pushes);
    assert_eq!(world.decided[&a], 100);
}

#[test]
fn a_repeat_gets_the_same_answer_and_stores_nothing() {
    let mut world = World::new();
    let a = world.connect("a", "1");
    let text = send("m", "b");
    world.frames(&[(a, &text), (a, &text)]);
    assert_eq!(world.brief(a), ["ack m 1", "ack m 1"]);
    world.frame(a, &text);
    assert_eq!(world.brief(a), ["ack m 1"]);
    world.restart();
    let a = world.connect("a", "9");
    world.take(a);
    let other = send("n", "b");
    world.frames(&[(a, &other), (a, &text)]);
    assert_eq!(world.brief(a), ["ack m 1", "ack n 2"], "found by the store's index after a restart");
    assert_eq!(world.last_seq(AB), 2);
}

#[test]
fn the_same_id_with_another_body_or_target_is_a_conflict() {
    let mut world = World::new();
    let a = world.connect("a", "1");
    world.frame(a, &send("m", "b"));
    world.take(a);
    world.frame(a, r#"{"type":"msg.send","id":"m","to":"b","body":"other"}"#);
    world.frame(a, &send("m", "c"));
    assert_eq!(world.brief(a), ["error conflict m", "error conflict m"]);
    world.restart();
    let a = world.connect("a", "1");
    world.take(a);
    world.frame(a, &send("m", "c"));
    world.frame(a, r#"{"type":"msg.send","id":"m","to":"b","body":"other"}"#);
    assert_eq!(world.brief(a), ["error conflict m", "error conflict m"]);
    assert_eq!(world.core.counters().messages_repeated, 0);
    world.frame(a, &send("m", "b"));
    assert_eq!((world.brief(a), world.core.counters().messages_repeated), (vec!["ack m 1".to_owned()], 1));
    let b = world.connect("b", "1");
    world.take(b);
    world.frame(b, &send("m", "a"));
    assert_eq!(world.brief(b), ["ack m 2"], "ids are the sender's own");
}

#[test]
fn a_refused_transaction_is_numbered_anew_without_a_gap() {
    let mut world = World::new();
    let (a, b) = (world.connect("a", "1"), world.connect("b", "1"));
    for n in 1..=3 {
        world.frame(a, &send(&format!("m{n}"), "b"));
    }
    world.restart();
    let (a, b) = (world.connect("a", "1"), {
        let _ = b;
        world.connect("b", "1")
    });
    world.take(a);
    world.take(b);
    let texts = ["m1", "x", "m2", "y", "m3"].map(|id| send(id, "b"));
    let frames: Vec<(u64, &str)> = texts.iter().map(|t| (a, t.as_str())).collect();
    world.frames(&frames);
    let mut acks = world.brief(a);
    acks.sort();
    assert_eq!(acks, ["ack m1 1", "ack m2 2", "ack m3 3", "ack x 4", "ack y 5"]);
    assert_eq!(world.brief(b), ["push 4", "push 5"]);
}

#[test]
fn a_store_that_fails_refuses_and_takes_the_repeat() {
    let mut world = World::new();
    let (a, b) = (world.connect("a", "1"), world.connect("b", "1"));
    world.failures = 1;
    let (m, n) = (send("m", "b"), send("n", "b"));
    world.frames(&[(a, &m), (a, &n)]);
    let frames = world.take(a);
    assert_eq!(
        frames.iter().map(support::brief).collect::<Vec<_>>(),
        ["error unavailable m", "error unavailable n"]
    );
    assert!(frames[0]["retry_after_ms"].as_u64().is_some());
    world.frames(&[(a, &m), (a, &n)]);
    assert_eq!(world.brief(a), ["ack m 1", "ack n 2"]);
    assert_eq!(world.brief(b), ["push 1", "push 2"]);
}

#[test]
fn positions_survive_a_store_that_fails() {
    let mut world = World::new();
    let (a, b) = (world.connect("a", "1"), world.connect("b", "1"));
    world.frame(a, &send("m", "b"));
    world.take(a);
    world.failures = 1;
    world.frame(b, &read(AB, 1));
    assert_eq!(world.brief(a), [""; 0]);
    world.advance(1000);
    assert_eq!(world.brief(a), ["delivered 1 b", "read 1 b"]);
}

#[test]
fn receipts_go_to_the_senders_and_reading_to_the_readers_other_devices() {
    let mut world = World::new();
    let (a, a2) = (world.connect("a", "1"), world.connect("a", "2"));
    let (b, b2) = (world.connect("b", "1"), world.connect("b", "2"));
    world.frame(a, &send("m", "b"));
    for conn in [a, a2, b, b2] {
        world.take(conn);
    }
    world.frame(b, &recv(AB, 1));
    assert_eq!(
        (world.brief(a), world.brief(a2)),
        (vec!["delivered 1 b".into()], vec!["delivered 1 b".to_string()])
    );
    world.frame(b2, &recv(AB, 1));
    assert_eq!(world.brief(a), [""; 0], "the first device of a user counts");
    world.frame(b2, &read(AB, 7));
    assert_eq!(world.brief(a), ["read 1 b"], "a number above the newest counts as the newest");
    assert_eq!(world.brief(b), ["read 1 b"]);
    assert_eq!(world.brief(b2), [""; 0]);
    world.frame(a2, &recv(AB, 1));
    assert_eq!(world.brief(b), [""; 0], "own messages make no receipts");
}

#[test]
fn what_was_stored_before_is_announced_and_what_comes_later_is_pushed() {
    let mut world = World::new();
    let a = world.connect("a", "1");
    for n in 1..=3 {
        world.frame(a, &send(&format!("m{n}"), "b"));
    }
    let b = world.connect("b", "1");
    assert_eq!(world.brief(b), ["notice d:a:b 1-3 u3"]);
    world.frame(a, &send("m4", "b"));
    assert_eq!(world.brief(b), ["push 4"]);
    world.advance(60_000);
    assert_eq!(world.brief(b), [""; 0], "above an announced gap nothing is repeated");
    world.frame(b, &recv(AB, 4));
    world.disconnect(b);
    let b = world.connect("b", "1");
    assert_eq!(world.brief(b), [""; 0]);
    let b2 = world.connect("b", "2");
    assert_eq!(world.brief(b2), [""; 0], "a new device starts at the user's delivered position");
}

#[test]
fn what_the_store_shows_before_its_outcome_is_told_is_pushed_and_not_announced() {
    let mut world = World::new();
    let (a, b) = (world.connect("a", "1"), world.connect("b", "1"));
    world.frame(a, &send("m1", "b"));
    world.disconnect(b);
    world.late_outcomes = true;
    let b = world.connect("b", "1");
    world.frame(a, &send("m2", "b"));
    assert_eq!(world.brief(b), ["notice d:a:b 1-1 u1"]);
    world.tell_outcomes();
    assert_eq!(world.brief(b), ["push 2"]);
}

#[test]
fn a_device_that_has_just_come_stays_where_it_is_when_another_moves_on() {
    let mut world = World::new();
    let (a, b) = (world.connect("a", "1"), world.connect("b", "1"));
    // The second device goes before it was told what waits, and that is found when it has gone.
    (world.backwards, world.hold_reads) = (true, true);
    let b2 = world.connect("b", "2");
    world.disconnect(b2);
    world.frame(a, &send("m1", "b"));
    world.frame(b, &recv(AB, 1));
    (world.backwards, world.hold_reads) = (false, false);
    world.settle();
    let b2 = world.connect("b", "2");
    assert_eq!(world.brief(b2), ["notice d:a:b 1-1 u1"]);
}

#[test]
fn a_known_device_that_was_away_is_told_what_it_missed() {
    let mut world = World::new();
    let a = world.connect("a", "1");
    let (b, b2) = (world.connect("b", "1"), world.connect("b", "2"));
    world.disconnect(b2);
    world.frame(a, &send("m1", "b"));
    world.frame(a, &send("m2", "b"));
    world.frame(b, &read(AB, 2));
    let b2 = world.connect("b", "2");
    assert_eq!(world.brief(b2), ["notice d:a:b 1-2 u0"]);
    world.frame(b2, &recv(AB, 1));
    world.restart();
    let b2 = world.connect("b", "2");
    assert_eq!(world.brief(b2), ["notice d:a:b 1-2 u0"]);
}

#[test]
fn own_messages_do_not_wait_for_the_device_that_sent_them() {
    let mut world = World::new();
    let a = world.connect("a", "1");
    let a2 = world.connect("a", "2");
    world.disconnect(a2);
    world.frame(a, &send("m1", "b"));
    world.disconnect(a);
    let a = world.connect("a", "1");
    assert_eq!(world.brief(a), [""; 0]);
    let a2 = world.connect("a", "2");
    assert_eq!(world.brief(a2), ["notice d:a:b 1-1 u0"]);
}

#[test]
fn a_push_is_repeated_after_one_two_and_four_timeouts_then_waits() {
    let mut world = World::new();
    let (a, b) = (world.connect("a", "1"), world.connect("b", "1"));
    world.frame(a, &send("m", "b"));
    world.take(b);
    let mut at = Vec::new();
    for tick in 1..1_000 {
        world.advance(100);
        at.extend(world.brief(b).iter().map(|frame| (tick, frame.clone())));
    }
    assert_eq!(at, [(30, "again 1".into()), (90, "again 1".into()), (210, "again 1".to_string())]);
    world.disconnect(b);
    let b = world.connect("b", "1");
    assert_eq!(world.brief(b), ["notice d:a:b 1-1 u1"]);
}

#[test]
fn a_repeat_passes_by_a_connection_that_was_not_told_yet_what_waits() {
    let mut world = World::new();
    let a = world.connect("a", "1");
    let old = world.connect_as("b", "1", SameDevice::Allow);
    world.frame(a, &send("m1", "b"));
    assert_eq!(world.brief(old), ["push 1"]);
    (world.backwards, world.hold_reads) = (true, true);
    let new = world.connect_as("b", "1", SameDevice::Allow);
    world.advance(3000);
    assert_eq!((world.brief(old), world.brief(new)), (vec!["again 1".to_owned()], vec![]));
    (world.backwards, world.hold_reads) = (false, false);
    world.settle();
    assert_eq!(world.brief(new), ["notice d:a:b 1-1 u1"]);
}

#[test]
fn progress_starts_the_timer_again_and_a_full_socket_stops_it() {
    let mut world = World::new();
    let (a, b) = (world.connect("a", "1"), world.connect("b", "1"));
    for n in 1..=3 {
        world.frame(a, &send(&format!("m{n}"), "b"));
    }
    world.take(b);
    world.advance(2000);
    world.frame(b, &recv(AB, 1));
    world.advance(2900);
    assert_eq!(world.brief(b), [""; 0]);
    world.up(b, Up::Congested);
    world.advance(10_000);
    assert_eq!(world.brief(b), [""; 0]);
    world.up(b, Up::Flowing);
    world.advance(2900);
    assert_eq!(world.brief(b), [""; 0]);
    world.advance(100);
    assert_eq!(world.brief(b), ["again 2", "again 3"]);
}

#[test]
fn what_was_received_while_it_was_looked_up_is_not_pushed_again() {
    let mut world = World::new();
    let (a, b) = (world.connect("a", "1"), world.connect("b", "1"));
    // More than are kept in memory for another push.
    for n in 1..=70 {
        world.frame(a, &send(&format!("m{n}"), "b"));
    }
    world.take(b);
    world.advance_before_reads(3000);
    world.frame(b, &recv(AB, 69));
    assert_eq!(world.brief(b), ["again 70"]);
}

#[test]
fn messages_of_one_sender_keep_their_order_through_verdicts() {
    let mut world =
        World::with(bowline_delivery::Config { before_send: true, ..config() }, MemStore::default());
    let (a, b, c) = (world.connect("a", "1"), world.connect("b", "1"), world.connect("c", "1"));
    let texts = ["m1", "m2", "m3"].map(|id| send(id, "b"));
    let other = send("x", "b");
    world.frames(&[(a, &texts[0]), (a, &texts[1]), (c, &other), (a, &texts[2])]);
    let tickets: Vec<u64> = world.verdicts.drain(..).collect();
    let allow = || Verdict::Allow { body: None };
    world.verdict(tickets[3], allow());
    world.verdict(tickets[1], Verdict::Refuse(Refusal::new(ErrorCode::Forbidden, "no")));
    world.verdict(tickets[2], allow());
    assert_eq!((world.brief(a), world.brief(c)), (vec![], vec!["ack x 1".to_string()]), "others do not wait");
    world.verdict(tickets[0], Verdict::Allow { body: Some(body("\"changed\"")) });
    assert_eq!(world.brief(a), ["error forbidden m2", "ack m1 1", "ack m3 2"]);
    assert_eq!(world.brief(b).len(), 3);
    world.frame(a, &texts[0]);
    assert_eq!(world.brief(a), ["ack m1 1"], "what the sender sent counts, not what was stored");
}

#[test]
fn history_pages_forwards_backwards_and_from_the_end() {
    let mut world = World::new();
    let a = world.connect("a", "1");
    for n in 1..=10 {
        world.frame(a, &send(&format!("m{n}"), "b"));
    }
    world.take(a);
    let rows = [
        (r#""limit":3"#, "page 8,9,10 more=true"),
        (r#""limit":3,"before_seq":8"#, "page 5,6,7 more=true"),
        (r#""limit":9,"before_seq":8"#, "page 1,2,3,4,5,6,7 more=false"),
        (r#""limit":3,"after_seq":0"#, "page 1,2,3 more=true"),
        (r#""limit":3,"after_seq":7"#, "page 8,9,10 more=false"),
        (r#""limit":3,"after_seq":10"#, "page  more=false"),
        (r#""limit":3,"before_seq":1"#, "page  more=false"),
        (r#""limit":200"#, "page 1,2,3,4,5,6,7,8,9,10 more=false"),
    ];
    for (arguments, expected) in rows {
        world.frame(a, &format!(r#"{{"type":"history","id":"h","conversation_id":"{AB}",{arguments}}}"#));
        assert_eq!(world.brief(a), [expected], "{arguments}");
    }
    let c = world.connect("c", "1");
    for conversation in [AB, "g:none", "d:x:y", "nonsense"] {
        world.frame(c, &format!(r#"{{"type":"history","id":"h","conversation_id":"{conversation}"}}"#));
        assert_eq!(world.brief(c), ["error forbidden h"], "{conversation}");
    }
}

#[test]
fn groups_have_roles_and_members_see_what_came_after_they_joined() {
    let mut world = World::new();
    let (a, b, c) = (world.connect("a", "1"), world.connect("b", "1"), world.connect("c", "1"));
    let group = |rest: &str| format!(r#"{{"type":"{rest},"id":"q","conversation_id":"g:t"}}"#);
    world.frame(a, r#"{"type":"conversation.create","id":"q","group_id":"t","members":["b"],"name":"T"}"#);
    assert_eq!(world.brief(a), ["ok q", "changed created"]);
    assert_eq!(world.brief(b), ["changed created"]);
    world.frame(b, r#"{"type":"conversation.create","id":"q","group_id":"t","members":[]}"#);
    assert_eq!(world.brief(b), ["error conflict q"]);
    world.frame(a, r#"{"type":"msg.send","id":"m1","conversation_id":"g:t","body":1}"#);
    assert_eq!(world.brief(b), ["push 1"]);
    world.frame(b, &group(r#"group.add","users":["c"]"#));
    assert_eq!(world.brief(b), ["error forbidden q"]);
    world.frame(a, &group(r#"group.add","users":["c"]"#));
    assert_eq!(world.brief(c), ["changed member_added"]);
    world.frame(a, r#"{"type":"msg.send","id":"m2","conversation_id":"g:t","body":2}"#);
    assert_eq!(world.brief(c), ["push 2"]);
    world.frame(c, r#"{"type":"history","id":"h","conversation_id":"g:t"}"#);
    assert_eq!(world.brief(c), ["page 2 more=false"]);
    world.frame(a, &group(r#"group.role","user":"b","role":"admin""#));
    world.take(b);
    world.take(c);
    world.frame(b, &group(r#"group.remove","users":["a"]"#));
    assert_eq!(world.brief(b), ["error forbidden q"], "an admin does not remove the owner");
    world.frame(b, &group(r#"group.remove","users":["c"]"#));
    assert_eq!(world.brief(b), ["ok q", "changed member_removed"]);
    assert_eq!(world.brief(c), ["changed member_removed"]);
    world.frame(c, r#"{"type":"msg.send","id":"m3","conversation_id":"g:t","body":3}"#);
    assert_eq!(world.brief(c), ["error forbidden m3"]);
    world.frame(b, &group(r#"group.leave""#));
    world.restart();
    let b = world.connect("b", "1");
    assert_eq!(world.brief(b), [""; 0]);
    world.check_ledger();
    assert_eq!(world.store.ledger.expired, 3, "m1 and m2 for b, m2 for c");
}

#[test]
fn who_is_added_in_the_same_transaction_sees_only_what_comes_after() {
    let mut world = World::new();
    let (a, b) = (world.connect("a", "1"), world.connect("b", "1"));
    world.frame(a, r#"{"type":"conversation.create","id":"c","group_id":"t","members":["a"]}"#);
    world.take(a);
    let message = |id: &str| format!(r#"{{"type":"msg.send","id":"{id}","conversation_id":"g:t","body":1}}"#);
    let (before, after) = (message("before"), message("after"));
    let add = r#"{"type":"group.add","id":"add","conversation_id":"g:t","users":["b"]}"#;
    world.frames(&[(a, &before), (a, add), (a, &after)]);
    assert_eq!(world.brief(a), ["ack before 1", "ok add", "changed member_added", "ack after 2"]);
    assert_eq!(world.brief(b), ["changed member_added", "push 2"]);
}

#[test]
fn what_is_sent_right_behind_the_creation_of_a_group_waits_for_it() {
    let mut world = World::new();
    let (a, b) = (world.connect("a", "1"), world.connect("b", "1"));
    world.frames(&[
        (a, r#"{"type":"conversation.create","id":"q","group_id":"t","members":["b"]}"#),
        (a, r#"{"type":"msg.send","id":"m1","conversation_id":"g:t","body":1}"#),
    ]);
    assert_eq!(world.brief(a), ["ok q", "changed created", "ack m1 1"]);
    assert_eq!(world.brief(b), ["changed created", "push 1"]);
}

#[test]
fn clearing_hides_what_was_and_counts_it_as_expired() {
    let mut world = World::new();
    let (a, b) = (world.connect("a", "1"), world.connect("b", "1"));
    let b2 = world.connect("b", "2");
    for n in 1..=2 {
        world.frame(a, &send(&format!("m{n}"), "b"));
    }
    for conn in [a, b, b2] {
        world.take(conn);
    }
    world.frame(b, r#"{"type":"conversation.clear","id":"q","conversation_id":"d:a:b"}"#);
    assert_eq!(world.brief(b), ["ok q", "changed cleared"]);
    assert_eq!(world.brief(b2), ["changed cleared"]);
    assert_eq!(world.brief(a), [""; 0], "nobody else is told");
    world.frame(b, r#"{"type":"history","id":"h","conversation_id":"d:a:b"}"#);
    assert_eq!(world.brief(b), ["page  more=false"]);
    world.frame(b, r#"{"type":"conversation.list","id":"l"}"#);
    let page = world.take(b).remove(0);
    let row = &page["conversations"][0];
    assert_eq!(
        (row["unread"].as_u64(), row["first_seq"].as_u64(), row["last_seq"].as_u64()),
        (Some(0), Some(3), Some(2))
    );
    assert!(row["last_message"].is_null());
    assert_eq!(world.store.ledger.expired, 2);
    world.frame(a, &send("m3", "b"));
    world.advance(3000);
    assert_eq!(world.brief(b), ["push 3", "again 3"]);
}

#[test]
fn a_list_shows_what_was_just_read() {
    let mut world = World::new();
    let (a, b) = (world.connect("a", "1"), world.connect("b", "1"));
    world.frame(a, &send("m1", "b"));
    world.take(b);
    let read = read(AB, 1);
    world.frames(&[(b, &read), (b, r#"{"type":"conversation.list","id":"l"}"#)]);
    let page = world.take(b).remove(0);
    let row = &page["conversations"][0];
    assert_eq!(
        (row["unread"].as_u64(), row["read_seq"].as_u64(), row["kind"].as_str()),
        (Some(0), Some(1), Some("direct"))
    );
    assert_eq!(row["peer_recv_seq"].as_u64(), Some(1), "the sender has what it sent");
    assert_eq!(row["last_message"]["body"].as_str(), Some("m1"));
}

#[test]
fn not_here_is_looked_up_once_more_and_then_left_to_the_inbox() {
    let mut world = World::new();
    let (a, b) = (world.connect("a", "1"), world.connect("b", "1"));
    world.frame(a, &send("m1", "b"));
    let push = world.take(b).remove(0);
    let frame = bowline_protocol::Frame { json: push.to_string().into(), body: None };
    let event = Down::Frame { frame, decided: 0, answer: false };
    let not_here = || Up::NotHere { no: 2, event: Box::new(event.clone()), gone: true };
    world.up(b, not_here());
    assert_eq!(world.brief(b), ["push 1"], "the route is still there: sent again");
    world.up(b, not_here());
    assert_eq!(world.core.table_sizes()[0], 1, "a second time, and the connection is given up");
    assert_eq!(
        world.closed.remove(&b),
        Some(CloseCode::Shutdown),
        "should it be there, it has to come again"
    );
    world.frame(a, &send("m2", "b"));
    assert_eq!(world.brief(b), [""; 0]);
    let b = world.connect("b", "1");
    assert_eq!(world.brief(b), ["notice d:a:b 1-2 u2"]);
}

#[test]
fn a_connection_that_is_gone_is_given_up_however_much_is_under_way_to_it() {
    let mut world = World::new();
    let (a, b) = (world.connect("a", "1"), world.connect("b", "1"));
    world.frames(&[(a, &send("m1", "b")), (a, &send("m2", "b"))]);
    let event = Box::new(Down::Decided(1));
    for no in [2, 3, 2] {
        assert_eq!(world.core.table_sizes()[0], 2);
        world.up(b, Up::NotHere { no, event: event.clone(), gone: true });
    }
    assert_eq!(world.core.table_sizes()[0], 1);
}

#[test]
fn a_connection_that_was_given_up_is_told_to_come_again() {
    let mut world = World::new();
    world.frame(77, &send("m", "b"));
    assert_eq!(world.closed[&77], CloseCode::Shutdown);
}

#[test]
fn a_close_behind_an_event_that_does_not_arrive_is_sent_outside_the_order() {
    let mut world = World::new();
    let old = world.connect("a", "1");
    world.connect("a", "1");
    world.closed.clear();
    let event = Box::new(Down::Decided(1));
    world.up(old, Up::NotHere { no: 2, event, gone: true });
    assert_eq!(world.closed.remove(&old), Some(CloseCode::Replaced));
}

#[test]
fn a_device_that_left_before_the_others_were_found_stays_where_it_is() {
    let mut world = World::new();
    let a = world.connect("a", "1");
    (world.backwards, world.hold_reads) = (true, true);
    let b2 = world.connect("b", "2");
    let b = world.connect("b", "1");
    // Both look-ups were made before the second device is stored.
    world.answer_reads_early();
    world.disconnect(b2);
    (world.backwards, world.hold_reads) = (false, false);
    world.settle();
    world.frame(a, &send("m1", "b"));
    world.frame(b, &recv(AB, 1));
    let b2 = world.connect("b", "2");
    assert_eq!(world.brief(b2), ["notice d:a:b 1-1 u1"]);
}

#[test]
fn senders_are_looked_up_for_each_of_several_devices() {
    let mut world = World::new();
    let a = world.connect("a", "1");
    let ids: Vec<String> = (1..=20).map(|n| send(&format!("m{n}"), "b")).collect();
    let frames: Vec<(u64, &str)> = ids.iter().map(|text| (a, text.as_str())).collect();
    world.frames(&frames);
    // After a restart only the newest messages are in memory.
    world.restart();
    let (b1, b2) = (world.connect("b", "1"), world.connect("b", "2"));
    world.frames(&[(b1, &recv(AB, 10)), (b2, &read(AB, 19))]);
    let member = &world.store.conversations[AB].members["b"];
    assert_eq!((member.delivered, member.read), (19, 19));
    assert_eq!(member.position(&DeviceId::trusted("1")), 10);
}

#[test]
fn news_that_wait_know_of_a_device_that_came_meanwhile() {
    let mut world = World::new();
    let (a, b) = (world.connect("a", "1"), world.connect("b", "1"));
    world.frame(a, &send("m1", "b"));
    world.failures = 1;
    world.frame(b, &recv(AB, 1));
    // A second device comes, and both go, before the store takes what the first one said.
    let b2 = world.connect("b", "2");
    world.disconnect(b);
    world.disconnect(b2);
    world.advance(1_000);
    assert_eq!(world.store.conversations[AB].members["b"].delivered, 1);
    let b2 = world.connect("b", "2");
    assert_eq!(world.brief(b2), ["notice d:a:b 1-1 u1"]);
}

#[test]
fn a_login_that_a_link_brings_twice_is_one() {
    let mut world = World::new();
    let a = world.connect("a", "1");
    world.up(a, Up::Open(opening("a", "1", a)));
    assert_eq!(world.accepts[&a], 1, "its numbers go on");
    let b = world.connect("b", "1");
    world.frame(b, &send("m", "a"));
    assert_eq!(world.brief(a), ["push 1"]);
    world.disconnect(a);
    assert_eq!(world.core.table_sizes()[..2], [1, 1]);
}

#[test]
fn a_login_that_looks_older_may_come_again_where_the_newer_one_replaces() {
    for (same_device, code) in
        [(SameDevice::Replace, CloseCode::Overloaded), (SameDevice::Refuse, CloseCode::DeviceInUse)]
    {
        let mut world = World::new();
        world.refuse_claims = true;
        let a = world.connect_as("a", "1", same_device);
        assert_eq!(world.closed.remove(&a), Some(code));
        assert_eq!(world.core.table_sizes()[..2], [0, 0]);
    }
}

#[test]
fn a_connection_that_coordination_forgot_is_told_to_come_again() {
    let mut world = World::new();
    let (a, b) = (world.connect("a", "1"), world.connect("b", "1"));
    world.forget_routes();
    world.frame(a, &send("m1", "b"));
    let event = Box::new(Down::Decided(1));
    world.up(b, Up::NotHere { no: 2, event, gone: true });
    assert_eq!(world.core.table_sizes()[0], 1);
    assert_eq!(world.closed.remove(&b), Some(CloseCode::Shutdown));
}

#[test]
fn what_a_device_has_is_not_lost_while_the_store_cannot_be_read() {
    let mut world = World::new();
    let (a, b) = (world.connect("a", "1"), world.connect("b", "1"));
    world.frame(a, &send("m1", "b"));
    let store = world.store.clone();
    world = World::with(config(), store);
    let b2 = world.connect("b", "1");
    assert_eq!(world.brief(b2), ["notice d:a:b 1-1 u1"]);
    world.read_failures = 2;
    world.frame(b2, &recv("d:a:b", 1));
    world.advance(1_000);
    assert_eq!(world.store.conversations["d:a:b"].members["b"].delivered, 0);
    world.advance(1_000);
    assert_eq!(world.store.conversations["d:a:b"].members["b"].delivered, 1);
    assert_eq!((world.brief(b2), world.decided[&b2]), (vec![], 1));
    let _ = b;
}

#[test]
fn a_close_that_does_not_arrive_is_sent_again_outside_the_order() {
    for gone in [false, true] {
        let mut world = World::new();
        let old = world.connect("a", "1");
        world.connect("a", "1");
        assert_eq!(world.closed.remove(&old), Some(CloseCode::Replaced));
        let event = Box::new(Down::Close { code: CloseCode::Replaced, reason: None });
        world.up(old, Up::NotHere { no: 3, event: event.clone(), gone });
        assert_eq!(world.closed.remove(&old), Some(CloseCode::Replaced), "the reason stays");
        // Once: a gateway that has no such connection answers that too.
        world.up(old, Up::NotHere { no: 0, event, gone: true });
        assert_eq!(world.closed.remove(&old), None);
    }
}

#[test]
fn a_second_login_of_a_device_ends_the_first_and_tables_empty_again() {
    let mut world = World::new();
    let old = world.connect("a", "1");
    let new = world.connect("a", "1");
    assert_eq!(world.closed[&old], CloseCode::Replaced);
    world.disconnect(old);
    assert_eq!(world.core.table_sizes()[..2], [1, 1]);
    world.disconnect(new);
    world.disconnect(new);
    assert_eq!(world.core.table_sizes()[..2], [0, 0]);
}

#[test]
fn a_login_whose_answer_was_overtaken_by_a_newer_one_is_the_one_replaced() {
    let mut world = World::new();
    let first = world.connect("a", "1");
    world.late_claim_answers = true;
    let [second, third] = [(); 2].map(|()| world.connect("a", "1"));
    world.tell_claim_answers();
    world.settle();
    assert_eq!(world.closed, [first, second].map(|conn| (conn, CloseCode::Replaced)).into());
    assert_eq!(world.accepts.get(&third), Some(&1));
    assert_eq!(world.core.table_sizes()[..2], [1, 1]);
    world.disconnect(third);
    assert_eq!(world.core.table_sizes()[..2], [0, 0]);
}

#[test]
fn a_login_ends_what_another_router_made_coordination_forget() {
    let mut world = World::new();
    let several = [(); 2].map(|()| world.connect_as("b", "1", SameDevice::Allow));
    let ghost = world.connect("a", "1");
    world.forget_routes();
    let now = world.connect("a", "1");
    assert_eq!(world.closed, [(ghost, CloseCode::Replaced)].into());
    world.disconnect(now);
    assert_eq!(world.core.table_sizes()[..2], [2, 1], "several of b may be there: {several:?}");
}

#[test]
fn receipts_of_a_large_group_count_instead_of_naming() {
    let mut world = World::new();
    let members: Vec<UserId> = (0..150).map(|n| UserId::trusted(&format!("u{n}"))).collect();
    let (group_id, owner) = (Some(bowline_protocol::ids::GroupId::trusted("big")), Some(members[0].clone()));
    world.request(Request::GroupCreate { group_id, name: None, members, owner, meta: None });
    let conns: Vec<u64> = (0..20).map(|n| world.connect(&format!("u{n}"), "1")).collect();
    world.frame(conns[0], r#"{"type":"msg.send","id":"m","conversation_id":"g:big","body":1}"#);
    world.take(conns[0]);
    let text = recv("g:big", 1);
    let frames: Vec<(u64, &str)> = conns[1..].iter().map(|c| (*c, text.as_str())).collect();
    world.frames(&frames);
    assert_eq!(world.brief(conns[0]), ["delivered 1 n=19"], "one receipt for all");
}

#[test]
fn the_api_sends_looks_and_kicks() {
    let mut world = World::new();
    let (a, b) = (world.connect("a", "1"), world.connect("b", "1"));
    let message = |id: &str, target| {
        Request::Send(Send {
            id: bowline_protocol::MessageId::trusted(id),
            from: UserId::trusted("a"),
            target,
            body: body("1"),
        })
    };
    let answer = world.request(message("m", SendTarget::User(UserId::trusted("b"))));
    assert!(matches!(answer, Answer::Stored { seq: 1, .. }), "{answer:?}");
    assert_eq!((world.brief(a), world.brief(b)), (vec!["push 1".to_string()], vec!["push 1".to_string()]));
    let answer = world.request(message("n", SendTarget::Conversation("g:none".into())));
    assert!(matches!(answer, Answer::Refused(Refusal { code: ErrorCode::Forbidden, .. })), "{answer:?}");
    let Answer::User { online, devices } = world.request(Request::User { user: UserId::trusted("b") }) else {
        panic!()
    };
    assert!(online && devices.len() == 1 && devices[0].node_id.is_some());
    let kick =
        Request::Kick { user: UserId::trusted("b"), device: None, reason: None, code: CloseCode::Kicked };
    assert_eq!(world.request(kick), Answer::Closed { count: 1 });
    assert_eq!(world.closed[&b], CloseCode::Kicked);
    let Answer::User { online, devices } = world.request(Request::User { user: UserId::trusted("b") }) else {
        panic!()
    };
    assert!(!online && devices.len() == 1 && devices[0].node_id.is_none());
    let forget = Request::ForgetDevice { user: UserId::trusted("b"), device: DeviceId::trusted("1") };
    assert_eq!(world.request(forget), Answer::Done);
    let Answer::User { devices, .. } = world.request(Request::User { user: UserId::trusted("b") }) else {
        panic!()
    };
    assert!(devices.is_empty());
}

#[test]
fn binary_bodies_travel_beside_the_frame_and_as_base64_in_history() {
    let mut world = World::new();
    let (a, b) = (world.connect("a", "1"), world.connect("b", "1"));
    let target = SendTarget::User(UserId::trusted("b"));
    let (id, from) = (bowline_protocol::MessageId::trusted("m"), UserId::trusted("a"));
    let bytes = bowline_protocol::Body::Binary(vec![0, 255, 7].into());
    world.request(Request::Send(Send { id, from, target, body: bytes }));
    let push = world.take(b).remove(0);
    assert_eq!(push["binary"], serde_json::json!([0, 255, 7]));
    world.frame(a, &format!(r#"{{"type":"history","id":"h","conversation_id":"{AB}"}}"#));
    let page = world.take(a).pop().unwrap();
    let message = &page["messages"][0];
    assert_eq!((message["body"].as_str(), message["body_encoding"].as_str()), (Some("AP8H"), Some("base64")));
}

#[test]
fn another_writers_numbers_are_learnt_and_nothing_is_lost() {
    let mut world = World::new();
    let (a, b) = (world.connect("a", "1"), world.connect("b", "1"));
    world.frame(a, &send("m1", "b"));
    // Somebody else wrote number 2 behind the core's back.
    let mut foreign = world.store.conversations[AB].messages[0].clone();
    (foreign.seq, foreign.id) = (2, bowline_protocol::MessageId::trusted("foreign"));
    world.store.ledger.accepted += 1;
    world.store.conversations.get_mut(AB).unwrap().messages.push(foreign);
    world.take(a);
    world.take(b);
    let (x, y) = (send("x", "b"), send("y", "b"));
    world.frames(&[(a, &x), (a, &y)]);
    assert_eq!(world.brief(a), ["ack x 3", "ack y 4"]);
    assert_eq!(world.brief(b), ["push 3", "push 4"]);
}

#[test]
fn one_sender_is_stored_in_order_across_conversations() {
    let mut world = World::new();
    let a = world.connect("a", "1");
    world.frame(a, &send("warm", "c"));
    world.take(a);
    // `c` is in memory, the others have to be loaded, and the store answers in another order.
    world.backwards = true;
    let texts = ["b", "c", "d", "c"].iter().enumerate().map(|(n, to)| send(&format!("m{n}"), to));
    let texts: Vec<String> = texts.collect();
    let frames: Vec<(u64, &str)> = texts.iter().map(|t| (a, t.as_str())).collect();
    world.frames(&frames);
    assert_eq!(world.brief(a), ["ack m0 1", "ack m1 2", "ack m2 1", "ack m3 3"]);
}

#[test]
fn what_an_earlier_life_of_a_node_says_is_void() {
    let mut world = World::new();
    let (a, b) = (world.connect("a", "1"), world.connect("b", "1"));
    // The same node id, connection and login, from before a restart.
    let earlier = NodeRef { node_id: "n1".into(), boot_id: "b0".into() };
    for event in [Up::Congested, Up::Closed(CloseCode::Bye)] {
        world.up_from(ConnRef { node: Arc::new(earlier.clone()), connection: b, login: b }, event);
    }
    world.frame(a, &send("m", "b"));
    assert_eq!(world.brief(b), ["push 1"]);
    assert_eq!(world.core.table_sizes()[0], 2);
    world.advance(3000);
    assert_eq!(world.brief(b), ["again 1"], "its socket is not full");
}

#[test]
fn a_group_of_ten_thousand_is_a_group_like_any_other() {
    let members_max = 10_000;
    let config = bowline_delivery::Config { group_members_max: members_max, ..config() };
    let mut world = World::with(config, MemStore::default());
    let group = bowline_protocol::ids::GroupId::trusted("t");
    let members: Vec<UserId> = (0..members_max).map(|n| UserId::trusted(&format!("u{n}"))).collect();
    let group_id = Some(group.clone());
    world.request(Request::GroupCreate { group_id, name: None, members, owner: None, meta: None });
    let full = world.request(Request::GroupAdd { group: group.clone(), user: UserId::trusted("late") });
    assert!(matches!(full, Answer::Refused(r) if r.code == ErrorCode::TooLarge), "it takes no more");
    let conns: Vec<u64> = (0..20).map(|n| world.connect(&format!("u{n}"), "1")).collect();
    for n in 1..=3 {
        world.frame(
            conns[0],
            &format!(r#"{{"type":"msg.send","id":"m{n}","conversation_id":"g:t","body":{n}}}"#),
        );
    }
    assert_eq!(world.store.ledger.accepted, 3 * 9_999);
    assert_eq!(world.brief(conns[19]), ["push 1", "push 2", "push 3"]);
    world.take(conns[0]);
    let recv = recv("g:t", 3);
    let together: Vec<(u64, &str)> = conns[1..11].iter().map(|conn| (*conn, recv.as_str())).collect();
    world.frames(&together);
    world.frame(conns[11], &recv);
    assert_eq!(world.brief(conns[0]), ["delivered 3 n=10", "delivered 3 n=11"]);
    // Who leaves takes what waits along, and is told nothing any more; who was there counts no longer.
    let leave = r#"{"type":"group.leave","id":"q","conversation_id":"g:t"}"#;
    world.frame(conns[19], leave);
    world.frame(conns[11], leave);
    world.frame(conns[12], &recv);
    let counts: Vec<String> =
        world.brief(conns[0]).into_iter().filter(|frame| frame.starts_with("delivered")).collect();
    assert_eq!(counts, ["delivered 3 n=11"]);
    assert_eq!(world.store.ledger.expired, 3);
    world.take(conns[19]);
    world.frame(conns[19], r#"{"type":"history","id":"h","conversation_id":"g:t"}"#);
    assert_eq!(world.brief(conns[19]), ["error forbidden h"]);
    // And who comes back sees what comes from then on.
    world.request(Request::GroupAdd { group, user: UserId::trusted("u19") });
    world.frame(conns[19], r#"{"type":"history","id":"h","conversation_id":"g:t"}"#);
    assert_eq!(world.brief(conns[19]), ["changed member_added", "page  more=false"]);
    world.check_ledger();
}

#[test]
fn who_was_sent_away_and_speaks_on_is_told_the_same_again() {
    let mut world = World::new();
    let old = world.connect("b", "1");
    let new = world.connect("b", "1");
    assert_eq!(world.closed.remove(&old), Some(CloseCode::Replaced));
    world.frame(old, &recv(AB, 1));
    assert_eq!(world.closed.remove(&old), Some(CloseCode::Replaced), "it would come again and kick itself");
    assert!(!world.closed.contains_key(&new));
}
