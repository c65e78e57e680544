//! What the threads around the core rely on: when it has something to do, how much waits, what happened so far.

#[allow(dead_code)]
mod support;

use bowline_delivery::{
    Config, Counters, Event,
    persist::{Member, PARTITION_COUNT, partition_of},
};
use bowline_protocol::{
    CloseCode, ConversationId, DeviceId, UserId,
    frame::Role,
    link::{Claim, ConnRef, Down, Request, SameDevice, Up},
};
use std::sync::Arc;
use support::{MemStore, World, config, opening, recv, send};

const AB: &str = "d:a:b";

#[test]
fn while_the_core_is_held_what_comes_collects_for_one_transaction() {
    let mut world = World::new();
    let a = world.connect("a", "1");
    world.frame(a, &send("m0", "b"));
    let before = world.commits;
    world.core.hold(true);
    for n in 1..=3 {
        world.frame(a, &send(&format!("m{n}"), "b"));
    }
    assert_eq!((world.commits, world.core.queue_depth(), world.last_seq(AB)), (before, 3, 1));
    world.core.hold(false);
    world.settle();
    assert_eq!((world.commits, world.core.queue_depth(), world.last_seq(AB)), (before + 1, 0, 4));
}

#[test]
fn what_is_under_way_to_the_store_waits_as_well() {
    let mut world = World::new();
    let a = world.connect("a", "1");
    world.frame(a, &send("m0", "b"));
    world.late_outcomes = true;
    world.frames(&[(a, &send("m1", "b")), (a, &send("m2", "b"))]);
    world.frame(a, &send("m3", "b"));
    assert_eq!(world.core.queue_depth(), 3, "two under way, one behind them");
    world.tell_outcomes();
    assert_eq!(world.core.queue_depth(), 0);
}

#[test]
fn every_transaction_has_at_most_the_messages_it_may_have() {
    let mut world = World::with(Config { batch_max: 7, ..config() }, MemStore::default());
    let a = world.connect("a", "1");
    world.frame(a, &send("m", "b"));
    for (count, transactions) in [(7, 1), (8, 2), (14, 2), (15, 3)] {
        let before = world.commits;
        let texts: Vec<String> = (0..count).map(|n| send(&format!("m{count}.{n}"), "b")).collect();
        let frames: Vec<(u64, &str)> = texts.iter().map(|text| (a, text.as_str())).collect();
        world.frames(&frames);
        assert_eq!(world.commits - before, transactions, "{count} messages");
    }
}

#[test]
fn a_login_that_a_link_brings_twice_is_claimed_once() {
    let mut world = World::new();
    let a = world.open("a", "1", None, SameDevice::Replace);
    world.give(a, Up::Open(opening("a", "1", a)));
    world.settle();
    assert_eq!((world.accepts[&a], world.routes.len()), (1, 1), "and its route stays");
}

#[test]
fn who_leaves_before_its_route_is_claimed_leaves_no_route() {
    let mut world = World::new();
    let a = world.open("a", "1", None, SameDevice::Replace);
    world.give(a, Up::Closed(CloseCode::Bye));
    world.settle();
    assert!(world.routes.is_empty() && !world.accepted.contains_key(&a));
    assert_eq!(world.core.table_sizes()[..2], [0, 0]);
}

#[test]
fn what_is_said_of_an_earlier_connection_of_the_number_ends_nothing() {
    let rows = [(100, None), (0, Some(CloseCode::Replaced))];
    for (is_open, (offset, ended)) in
        [false, true].into_iter().flat_map(|is_open| rows.map(|row| (is_open, row)))
    {
        let mut world = World::new();
        world.hold_claims = !is_open;
        let other = world.open("b", "1", None, SameDevice::Replace);
        world.settle();
        world.hold_claims = true;
        let new = world.open("a", "1", None, SameDevice::Replace);
        world.settle();
        // Coordination names a connection of that number, of this login or of one before.
        let named = ConnRef { login: other + offset, ..world.conn_ref(other) };
        let (conn, open) = (world.conn_ref(new), Box::new(opening("a", "1", new)));
        let claim = Claim::Won { ended: vec![named] };
        world.core.on_event(Event::Claimed { conn, open, claim }, world.now);
        world.tell_claims();
        assert_eq!(world.closed.get(&other).copied(), ended, "open: {is_open}");
        assert_eq!(world.accepted.contains_key(&other), is_open || ended.is_none());
    }
}

#[test]
fn a_number_that_a_gateway_gave_to_a_new_connection_is_the_new_ones() {
    let mut world = World::new();
    world.hold_claims = true;
    let old = world.open("a", "1", None, SameDevice::Replace);
    world.settle();
    // Before the first is claimed its connection has ended, and another one has the number.
    let new = ConnRef { login: old + 100, ..world.conn_ref(old) };
    world.up_from(new.clone(), Up::Open(opening("c", "1", old)));
    world.give(old, Up::Closed(CloseCode::Bye));
    world.tell_claims();
    assert_eq!(world.routes.iter().map(|route| route.2.login).collect::<Vec<_>>(), [new.login]);
    let b = world.connect("b", "1");
    world.frames(&[(b, &send("m1", "a")), (b, &send("m2", "c"))]);
    assert_eq!(world.brief(old), ["push 1"]);
    world.up_from(new, Up::Closed(CloseCode::Bye));
    assert_eq!(world.core.table_sizes()[..2], [1, 1]);
}

#[test]
fn an_event_for_many_connections_goes_to_each_node_once() {
    let mut world = World::new();
    let a = world.connect("a", "1");
    let conns: Vec<u64> =
        (0..6).map(|n| world.connect_on(["n2", "n3", "n1"][n % 3], "b", &format!("{n}"))).collect();
    world.frame(a, &send("m1", "b"));
    let before = world.downlinks;
    world.frame(a, &send("m2", "b"));
    assert_eq!(world.downlinks - before, 4, "the ack, and a push for each of three nodes");
    for conn in conns {
        assert_eq!(world.brief(conn), ["push 1", "push 2"]);
    }
}

#[test]
fn a_close_that_did_not_arrive_keeps_its_reason() {
    let mut world = World::new();
    let b = world.connect("b", "1");
    let reason: Option<Arc<str>> = Some("spam".into());
    let event = Down::Close { code: CloseCode::Kicked, reason: reason.clone() };
    let (user, code) = (UserId::trusted("b"), CloseCode::Kicked);
    world.request(Request::Kick { user, device: None, reason: reason.clone(), code });
    world.reasons.clear();
    world.up(b, Up::NotHere { no: 2, event: Box::new(event), gone: true });
    assert_eq!(world.reasons[&b], reason);
}

#[test]
fn what_is_for_the_gateway_is_answered_all_the_same() {
    let mut world = World::new();
    let a = world.connect("a", "1");
    for text in [r#"{"type":"ping"}"#, r#"{"type":"pong"}"#, r#"{"type":"connect","token":"t"}"#] {
        world.frame(a, text);
        assert_eq!(world.brief(a), ["error unknown_type "], "{text}");
    }
    assert_eq!(world.decided[&a], 3, "nothing is left undecided");
}

#[test]
fn the_counters_say_what_happened() {
    let mut world = World::new();
    let (a, b) = (world.connect("a", "1"), world.connect("b", "1"));
    let counted = |world: &World| {
        let Counters { messages_stored, messages_repeated, messages_refused, .. } = world.core.counters();
        (messages_stored, messages_repeated, messages_refused)
    };
    for n in 1..=3 {
        world.frame(a, &send(&format!("m{n}"), "b"));
    }
    world.frame(a, &send("m1", "b"));
    world.frame(a, &send("m2", "b"));
    world.frame(a, &send("m2", "c"));
    world.frame(a, r#"{"type":"msg.send","id":"x","conversation_id":"g:none","body":1}"#);
    assert_eq!(counted(&world), (3, 2, 2));
    let Counters { pushes, redeliveries, receipts, .. } = world.core.counters();
    assert_eq!((pushes, redeliveries, receipts), (3, 0, 0));
    world.advance(3_000);
    world.frame(b, &recv(AB, 2));
    let Counters { pushes, redeliveries, receipts, .. } = world.core.counters();
    assert_eq!((pushes, redeliveries, receipts), (3, 3, 1));
    world.failures = 2;
    world.frames(&[(a, &send("m4", "b"))]);
    world.frames(&[(a, &send("m4", "b"))]);
    assert_eq!((counted(&world), world.core.counters().transactions_failed), ((3, 2, 4), 2));
    assert_eq!(world.core.counters().transactions, world.commits as u64);
    let event = Box::new(Down::Decided(1));
    for no in [90, 91] {
        world.up(b, Up::NotHere { no, event: event.clone(), gone: true });
    }
    assert_eq!(world.core.counters().not_here, 2);
}

#[test]
fn conversations_are_dealt_out_to_partitions_evenly_and_for_ever() {
    let mut counts = [0; PARTITION_COUNT as usize];
    for n in 0..1_200 {
        counts[usize::from(partition_of(&ConversationId::trusted(&format!("d:a:user{n}"))))] += 1;
    }
    assert!(counts.iter().all(|count| (60..=140).contains(count)), "{counts:?}");
    // Who owns what is stored by partition.
    let known = ["d:a:b", "g:t", "d:alice:bob"].map(|id| partition_of(&ConversationId::trusted(id)));
    assert_eq!(known, [6, 7, 8]);
}

#[test]
fn a_member_that_is_lifted_has_nobody_behind_who_is_not() {
    let device = |name: &str, seq| (DeviceId::trusted(name), seq);
    let mut member = Member {
        role: Role::Member,
        joined: 1,
        first: 1,
        delivered: 5,
        read: 2,
        own_above_delivered: 0,
        own_above_read: 0,
        lagging: vec![device("x", 1), device("y", 4)],
    };
    member.lift(3);
    assert_eq!((member.first, member.delivered, member.read), (4, 5, 3));
    assert_eq!(member.lagging, [device("x", 3), device("y", 4)]);
    member.lift(5);
    assert_eq!((member.first, member.delivered, member.read, &member.lagging[..]), (6, 5, 5, &[][..]));
    member.lift(4);
    assert_eq!((member.first, member.delivered, member.read), (6, 5, 5), "never back");
}
