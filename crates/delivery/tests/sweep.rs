//! The sweep step by step: what it asks the store and when, and what it makes of the answers. The test is the store.

#[allow(dead_code)]
mod support;

use bowline_delivery::{
    Config, Now, Retention, limits,
    persist::{Found, Overdue, Query, Write},
};
use bowline_protocol::{
    ConversationId, DeviceId, UserId,
    link::{ConnRef, Up},
};
use support::{MemStore, World, config, opening, recv, send};

const AB: &str = "d:a:b";
const HOUR: u64 = 3_600_000;

struct Script {
    world: World,
    read: u64,
}

impl Script {
    fn new(retention: Retention) -> Self {
        let mut world = World::with(Config { retention, ..config() }, MemStore::default());
        // Long after the epoch, so that times of the past are numbers.
        world.now.wall = 100 * 24 * HOUR;
        Self::of(world)
    }

    fn of(mut world: World) -> Self {
        world.is_silent = true;
        Self { world, read: 0 }
    }

    fn now(&self) -> u64 {
        self.world.now.mono
    }

    /// Waits for the next question, and says when it came.
    fn asked(&mut self) -> (u64, Query) {
        for _ in 0..1_000 {
            self.world.settle();
            match &self.world.take_reads()[..] {
                [] => {}
                [(read, query)] => {
                    self.read = *read;
                    return (self.now(), query.clone());
                }
                several => panic!("one step at a time: {several:?}"),
            }
            let due = self.world.core.next_due().expect("the sweep never ends");
            self.world.advance(due - self.now());
        }
        panic!("nothing is asked any more");
    }

    fn answer(&mut self, found: Found) {
        self.world.answer(self.read, found);
    }

    fn nothing_overdue(&mut self, next: u64, more: bool) {
        self.answer(Found::Overdue { runs: Vec::new(), next, more, ids: false });
    }

    fn no_stale_devices(&mut self, next: u64, more: bool) {
        self.answer(Found::StaleDevices { devices: Vec::new(), next, more });
    }

    fn overdue(&self, retention: Retention, after: u64) -> Query {
        let wall = self.world.now.wall;
        Query::Overdue {
            before: if retention.age_ms_max == 0 { 0 } else { wall - retention.age_ms_max },
            ids_before: wall - retention.ids_ms_min,
            after,
            limit: limits::SWEPT_MESSAGES_MAX,
        }
    }

    fn stale(&self, after: u64) -> Query {
        let before = self.world.now.wall - limits::DEVICE_UNSEEN_MS_MAX;
        Query::StaleDevices { before, after, limit: limits::DEVICES_SEARCHED }
    }

    /// Expects this question at this time.
    #[track_caller]
    fn expect(&mut self, at: u64, query: impl Fn(&Self) -> Query) {
        let (now, asked) = self.asked();
        assert_eq!((now, asked), (at, query(self)));
    }
}

fn excess(keep: u64, of: Option<&str>, after: u64) -> Query {
    let of = of.map(ConversationId::trusted);
    Query::Excess { keep, of, after, limit: limits::SWEPT_MESSAGES_MAX }
}

fn run(id: &str, messages: &[(u64, &str)]) -> Overdue {
    let messages = messages.iter().map(|(seq, from)| (*seq, UserId::trusted(from))).collect();
    Overdue { conversation: ConversationId::trusted(id), messages }
}

fn found(runs: Vec<Overdue>, more: bool) -> Found {
    Found::Overdue { runs, next: 0, more, ids: false }
}

#[test]
fn without_retention_only_devices_are_looked_at_every_hour() {
    let mut script = Script::new(Retention::default());
    script.expect(0, |s| s.stale(0));
    script.no_stale_devices(5, true);
    script.expect(10, |s| s.stale(5));
    script.no_stale_devices(9, false);
    script.expect(10 + HOUR, |s| s.stale(0));
    script.no_stale_devices(0, false);
    script.expect(10 + 2 * HOUR, |s| s.stale(0));
}

#[test]
fn messages_by_age_page_by_page_then_after_a_twentieth_of_their_time() {
    let retention = Retention { age_ms_max: 200_000, messages_max: 0, ids_ms_min: 300_000 };
    let mut script = Script::new(retention);
    script.expect(0, |s| s.overdue(retention, 0));
    script.nothing_overdue(7, true);
    script.expect(10, |s| s.overdue(retention, 7));
    script.nothing_overdue(8, true);
    script.expect(20, |s| s.overdue(retention, 8));
    script.nothing_overdue(9, false);
    script.expect(30, |s| s.stale(0));
    script.no_stale_devices(0, false);
    // From where it stopped; after an hour from the beginning.
    let mut at = 20;
    while at + 10_000 <= HOUR {
        at += 10_000;
        script.expect(at, |s| s.overdue(retention, 9));
        script.nothing_overdue(9, false);
    }
    script.expect(at + 10_000, |s| s.overdue(retention, 0));
    script.nothing_overdue(3, false);
    script.expect(30 + HOUR, |s| s.stale(0));
    script.no_stale_devices(0, false);
    script.expect(at + 20_000, |s| s.overdue(retention, 3));
}

#[test]
fn how_often_the_oldest_are_looked_at_follows_from_what_is_kept_shortest() {
    // (age, count, ids) and the time between two looks.
    for (age_ms_max, messages_max, ids_ms_min, every) in [
        (100_000, 0, 60_000, 3_000),
        (60_000, 0, 100_000, 3_000),
        (0, 5, 60_000, 3_000),
        (60_000, 5, 0, 1_000),
        (1_000, 0, 1_000, 1_000),
        (20_000, 0, 20_000, 1_000),
        (HOUR, 0, HOUR, 60_000),
        (0, 5, HOUR, 60_000),
    ] {
        let retention = Retention { age_ms_max, messages_max, ids_ms_min };
        let mut script = Script::new(retention);
        let mut looks = Vec::new();
        while looks.len() < 3 {
            match script.asked() {
                (at, Query::Overdue { .. }) => {
                    looks.push(at);
                    script.nothing_overdue(0, false);
                }
                (_, Query::Excess { .. }) => script.nothing_overdue(0, false),
                (_, Query::StaleDevices { .. }) => script.no_stale_devices(0, false),
                (_, other) => panic!("{other:?}"),
            }
        }
        assert_eq!((looks[1] - looks[0], looks[2] - looks[1]), (every, every), "{retention:?}");
    }
}

#[test]
fn messages_by_count_are_looked_at_once_an_hour_and_where_a_conversation_grew() {
    let retention = Retention { age_ms_max: 0, messages_max: 3, ids_ms_min: 2 * HOUR };
    let mut script = Script::new(retention);
    script.expect(0, |_| excess(3, None, 0));
    script.nothing_overdue(4, true);
    script.expect(10, |_| excess(3, None, 4));
    script.nothing_overdue(6, false);
    script.expect(20, |s| s.overdue(retention, 0));
    script.nothing_overdue(0, false);
    script.expect(30, |s| s.stale(0));
    script.no_stale_devices(0, false);
    // Four are one too many, three are not; a second later it is seen to.
    script.world.is_silent = false;
    let a = script.world.connect("a", "1");
    for n in 1..=3 {
        script.world.frame(a, &send(&format!("m{n}"), "b"));
    }
    script.world.is_silent = true;
    script.world.advance(5_000);
    assert_eq!(script.world.take_reads(), []);
    let grown = script.now();
    script.world.frame(a, &send("m4", "b"));
    script.expect(grown + 1_000, |_| excess(3, Some(AB), 0));
    // More than one step may take: it is looked at once more.
    script.answer(found(vec![run(AB, &[(1, "a")])], true));
    script.expect(grown + 1_010, |_| excess(3, Some(AB), 0));
    script.answer(found(Vec::new(), false));
    // What is left is not too much, whatever is said of it.
    assert_eq!(script.world.store.conversations[AB].floor, 1);
    script.world.frame(a, r#"{"type":"conversation.clear","id":"q","conversation_id":"d:a:b"}"#);
    assert_eq!(script.world.store.conversations[AB].members["a"].first, 5);
    script.expect(60_020, |s| s.overdue(retention, 0));
    script.nothing_overdue(0, false);
}

#[test]
fn everything_is_counted_anew_after_an_hour() {
    let retention = Retention { age_ms_max: 0, messages_max: 3, ids_ms_min: 2 * HOUR };
    let mut script = Script::new(retention);
    let mut at = Vec::new();
    while at.len() < 3 {
        match script.asked() {
            (now, query @ Query::Excess { .. }) => {
                assert_eq!(query, excess(3, None, 0), "from the beginning");
                at.push(now);
                script.nothing_overdue(8, false);
            }
            (_, Query::StaleDevices { .. }) => script.no_stale_devices(0, false),
            _ => script.nothing_overdue(0, false),
        }
    }
    assert_eq!(at, [0, HOUR, 2 * HOUR]);
}

#[test]
fn one_step_is_under_way_at_a_time() {
    let retention = Retention { age_ms_max: 60_000, messages_max: 0, ids_ms_min: 1 };
    let mut script = Script::new(retention);
    let a = script.world.connect("a", "1");
    script.world.is_silent = false;
    for n in 1..=3 {
        script.world.frame(a, &send(&format!("m{n}"), "b"));
    }
    script.world.is_silent = true;
    script.world.advance(70_000);
    let reads = script.world.take_reads();
    assert_eq!(reads.len(), 1, "an answer is awaited, however long: {reads:?}");
    // The transaction that takes what was found is awaited as well.
    script.world.late_outcomes = true;
    let runs = vec![run(AB, &[(1, "a"), (2, "a")])];
    script.world.answer(reads[0].0, Found::Overdue { runs, next: 0, more: false, ids: true });
    script.world.advance(70_000);
    assert_eq!(script.world.take_reads(), []);
    script.world.tell_outcomes();
    let told = script.now();
    let (at, _) = script.asked();
    assert_eq!(at, told + limits::SWEEP_PAUSE_MS);
    assert_eq!(script.world.core.counters().messages_expired, 2);
}

#[test]
fn a_step_that_waits_for_a_conversation_is_not_overtaken() {
    let retention = Retention { age_ms_max: HOUR, messages_max: 2, ids_ms_min: 1 };
    let mut world = World::with(Config { retention, ..config() }, MemStore::default());
    world.now.wall = 100 * 24 * HOUR;
    let (a, c) = (world.connect("a", "1"), world.connect("c", "1"));
    world.frames(&[(a, &send("m1", "b")), (c, &send("c1", "d"))]);
    world.restart();
    let a = world.connect("a", "1");
    world.frame(a, &send("m2", "b"));
    let mut script = Script::of(world);
    loop {
        match script.asked() {
            (_, Query::Overdue { .. }) => break,
            (_, Query::StaleDevices { .. }) => script.no_stale_devices(0, false),
            (_, Query::Excess { .. }) => script.nothing_overdue(0, false),
            (_, other) => panic!("{other:?}"),
        }
    }
    // One of the two is not in memory.
    script.answer(found(vec![run(AB, &[(1, "a")]), run("d:c:d", &[(1, "c")])], false));
    let load = script.world.take_reads();
    assert!(matches!(&load[..], [(_, Query::Conversation { .. })]), "{load:?}");
    assert_eq!(script.world.store.conversations[AB].floor, 1);
    // Meanwhile another grows too large.
    for n in 3..=5 {
        script.world.frame(a, &send(&format!("m{n}"), "b"));
    }
    script.world.advance(5_000);
    assert_eq!(script.world.take_reads(), []);
    let loaded = script.world.store.read(&load[0].1);
    script.world.answer(load[0].0, loaded);
    assert_eq!(script.world.store.conversations["d:c:d"].floor, 1);
    let now = script.now();
    script.expect(now + limits::SWEEP_PAUSE_MS, |_| excess(2, Some(AB), 0));
}

#[test]
fn ids_are_forgotten_in_steps_until_there_are_none() {
    let retention = Retention { age_ms_max: 60_000, messages_max: 0, ids_ms_min: 50_000 };
    let mut script = Script::new(retention);
    script.expect(0, |s| s.overdue(retention, 0));
    let before = script.world.now.wall - 50_000;
    script.answer(Found::Overdue { runs: Vec::new(), next: 0, more: false, ids: true });
    assert_eq!(
        script.world.last_batch.writes,
        [Write::ForgetIds { before, limit: limits::IDS_FORGOTTEN_MAX }]
    );
    script.expect(10, |s| s.overdue(retention, 0));
    script.nothing_overdue(0, false);
    script.expect(20, |s| s.stale(0));
}

#[test]
fn a_failure_begins_anew_a_second_later() {
    let retention = Retention { age_ms_max: 60_000, messages_max: 5, ids_ms_min: 60_000 };
    for is_read in [true, false] {
        let mut script = Script::new(retention);
        script.expect(0, |_| excess(5, None, 0));
        script.nothing_overdue(8, true);
        script.expect(10, |_| excess(5, None, 8));
        script.nothing_overdue(0, false);
        script.expect(20, |s| s.overdue(retention, 0));
        let failed = script.now();
        if is_read {
            script.answer(Found::Failed("disk".into()));
        } else {
            script.world.failures = 1;
            script.answer(Found::Overdue { runs: Vec::new(), next: 6, more: true, ids: true });
        }
        script.expect(failed + limits::STORE_RETRY_MS, |_| excess(5, None, 0));
        script.nothing_overdue(0, false);
        script.expect(failed + limits::STORE_RETRY_MS + 10, |s| s.overdue(retention, 0));
    }
}

#[test]
fn while_the_store_rests_the_sweep_does_too() {
    let mut script = Script::new(Retention { age_ms_max: 60_000, messages_max: 0, ids_ms_min: 60_000 });
    script.asked();
    script.nothing_overdue(0, false);
    script.asked();
    script.no_stale_devices(0, false);
    script.world.is_silent = false;
    let a = script.world.connect("a", "1");
    script.world.frame(a, &send("m", "b"));
    script.world.is_silent = true;
    // Just before the next look is due.
    script.world.advance(2_990 - script.now());
    script.world.failures = 1;
    script.world.frame(a, &send("n", "b"));
    let (at, query) = script.asked();
    assert!(matches!(query, Query::Overdue { .. }), "{query:?}");
    assert_eq!(at, 2_990 + limits::STORE_RETRY_MS);
}

/// A conversation with five messages, 2 and 4 of them `b`'s; `b` has received and read the first.
fn five_messages() -> (Script, [u64; 2]) {
    let mut world = World::with(
        Config { retention: Retention { age_ms_max: HOUR, messages_max: 0, ids_ms_min: HOUR }, ..config() },
        MemStore::default(),
    );
    world.now.wall = 100 * 24 * HOUR;
    let conns = ["a", "b"].map(|user| world.connect(user, "1"));
    for (n, conn, to) in [(1, 0, "b"), (2, 1, "a"), (3, 0, "b"), (4, 1, "a"), (5, 0, "b")] {
        world.frame(conns[conn], &send(&format!("m{n}"), to));
        if n == 1 {
            world.frame(conns[1], &support::read(AB, 1));
        }
    }
    world.advance(100);
    (Script::of(world), conns)
}

/// Waits for a look at the oldest messages, and answers it so.
fn take(script: &mut Script, runs: Vec<Overdue>) {
    loop {
        match script.asked() {
            (_, Query::Overdue { .. }) => return script.answer(found(runs, false)),
            (_, Query::StaleDevices { .. }) => script.no_stale_devices(0, false),
            (_, query) => {
                let found = script.world.store.read(&query);
                script.answer(found);
            }
        }
    }
}

#[test]
fn what_goes_is_counted_for_who_had_not_received_it() {
    for (runs, floor, expired) in [
        (vec![run(AB, &[(1, "a"), (2, "b"), (3, "a")])], 3, 2),
        (vec![run(AB, &[(1, "a")])], 1, 0),
        (vec![run(AB, &[(1, "a"), (2, "b"), (3, "a"), (4, "b"), (5, "a")])], 5, 4),
        // Of two runs the second is left to another step.
        (vec![run(AB, &[(1, "a"), (2, "b")]), run(AB, &[(3, "a"), (4, "b")])], 2, 1),
        // What is not at the front stays: there would be a gap.
        (vec![run(AB, &[(2, "b"), (3, "a")])], 0, 0),
        (vec![run(AB, &[])], 0, 0),
        (vec![run("g:none", &[(1, "a")])], 0, 0),
    ] {
        let (mut script, _) = five_messages();
        take(&mut script, runs.clone());
        let stored = &script.world.store.conversations[AB];
        assert_eq!((stored.floor, script.world.store.ledger.expired), (floor, expired), "{runs:?}");
        assert_eq!(script.world.core.counters().messages_expired, floor);
        script.world.check_ledger();
        // Whatever came of it, the sweep goes on.
        take(&mut script, vec![run(AB, &[(1, "a"), (2, "b"), (3, "a"), (4, "b"), (5, "a")])]);
        assert_eq!(script.world.store.conversations[AB].floor, 5, "the rest, with what is gone before it");
        script.world.check_ledger();
    }
}

#[test]
fn members_that_move_in_the_same_transaction_are_lifted_all_the_same() {
    let whole = || vec![run(AB, &[(1, "a"), (2, "b"), (3, "a")])];
    let clear = r#"{"type":"conversation.clear","id":"q","conversation_id":"d:a:b"}"#.to_owned();
    for text in [recv(AB, 2), recv(AB, 5), support::read(AB, 4), clear, send("m6", "a")] {
        for is_before in [false, true] {
            let (mut script, [_, b]) = five_messages();
            script.world.core.hold(true);
            let frame = |script: &mut Script| script.world.frame(b, &text);
            if is_before {
                frame(&mut script);
            }
            take(&mut script, whole());
            if !is_before {
                frame(&mut script);
            }
            script.world.core.hold(false);
            script.world.settle();
            let stored = &script.world.store.conversations[AB];
            assert_eq!(stored.floor, 3, "{text}");
            let member = &stored.members["b"];
            assert!(member.first >= 4 && member.delivered >= 3 && member.read >= 3, "{member:?}");
            script.world.check_ledger();
            let unread =
                stored.messages.iter().filter(|m| m.seq > member.read && m.from.as_str() != "b").count();
            assert_eq!(member.unread(stored.last()), unread as u64, "{text}");
        }
    }
}

#[test]
fn who_leaves_or_clears_in_the_same_transaction_leaves_only_what_was_left() {
    let ask = |kind: &str| format!(r#"{{"type":"{kind}","id":"q","conversation_id":"g:t"}}"#);
    for text in [ask("group.leave"), ask("conversation.clear")] {
        let (mut script, [a, b]) = five_messages();
        script.world.is_silent = false;
        script.world.frame(a, r#"{"type":"conversation.create","id":"q","group_id":"t","members":["b"]}"#);
        for n in 1..=5 {
            let message = format!(r#"{{"type":"msg.send","id":"t{n}","conversation_id":"g:t","body":{n}}}"#);
            script.world.frame(a, &message);
        }
        script.world.is_silent = true;
        script.world.core.hold(true);
        take(&mut script, vec![run("g:t", &[(1, "a"), (2, "a"), (3, "a")])]);
        script.world.frame(b, &text);
        script.world.core.hold(false);
        script.world.settle();
        assert_eq!(script.world.store.ledger.expired, 5, "{text}: three by time, two with b");
        script.world.check_ledger();
    }
}

#[test]
fn a_device_that_came_back_before_it_was_forgotten_keeps_its_place() {
    let (mut script, [a, _]) = five_messages();
    script.world.is_silent = false;
    let b2 = script.world.connect("b", "2");
    script.world.disconnect(b2);
    script.world.frame(a, &send("m6", "b"));
    let b1 = script.world.connect("b", "1");
    script.world.frame(b1, &recv(AB, 6));
    script.world.is_silent = true;
    let stale = || {
        vec![(UserId::trusted("b"), DeviceId::trusted("2")), (UserId::trusted("b"), DeviceId::trusted("1"))]
    };
    // One that is connected is not even considered.
    script.world.core.hold(true);
    loop {
        match script.asked() {
            (_, Query::StaleDevices { .. }) => break,
            _ => script.nothing_overdue(0, false),
        }
    }
    script.answer(Found::StaleDevices { devices: stale(), next: 0, more: false });
    assert_eq!(script.world.core.queue_depth(), 1);
    script.world.is_silent = false;
    let b2 = script.world.connect("b", "2");
    script.world.core.hold(false);
    script.world.settle();
    assert_eq!(script.world.core.counters().devices_forgotten, 0);
    assert_eq!(script.world.brief(b2), ["notice d:a:b 1-6 u3"]);
}

#[test]
fn a_conversation_that_was_only_loaded_to_be_swept_is_the_first_to_leave_memory() {
    let (script, _) = five_messages();
    let mut world = script.world;
    world.is_silent = false;
    world.restart();
    let mut script = Script::of(world);
    // It is loaded by the sweep, and before that by nobody.
    loop {
        match script.asked() {
            (_, Query::Overdue { .. }) => break,
            (_, Query::StaleDevices { .. }) => script.no_stale_devices(0, false),
            (_, other) => panic!("{other:?}"),
        }
    }
    script.world.is_silent = false;
    script.world.advance(1_000);
    let history = |id: &str| bowline_protocol::link::Request::History {
        conversation: ConversationId::trusted(id),
        after: None,
        before: None,
        limit: 1,
    };
    let max = limits::CONVERSATIONS_MAX;
    for n in 1..max {
        script.world.give_request(history(&format!("d:x:y{n}")));
    }
    script.world.settle();
    script.world.advance(1_000);
    script.answer(found(vec![run(AB, &[(1, "a")])], false));
    assert_eq!(script.world.core.table_sizes()[2], max);
    script.world.request(history("d:x:one-more"));
    script.world.loads.clear();
    script.world.request(history(AB));
    assert_eq!(script.world.loads, [ConversationId::trusted(AB)], "although it was touched late");
}

#[test]
fn devices_that_stay_connected_are_written_once_a_day_a_thousand_users_at_a_time() {
    let mut world = World::new();
    // The login tells since when a connection is there, and its numbers here are small.
    world.now = Now { wall: 24 * HOUR, mono: 1_000 };
    let count = limits::SEEN_USERS + 1;
    for n in 0..count {
        world.open(&format!("u{n:04}"), "1", None, bowline_protocol::link::SameDevice::Replace);
    }
    world.settle();
    let written = |world: &World| world.last_batch.writes.len();
    world.advance(24 * HOUR - 1);
    let commits = world.commits;
    world.advance(1);
    assert_eq!((world.commits - commits, written(&world)), (1, limits::SEEN_USERS));
    world.advance(limits::SWEEP_MS);
    assert_eq!((world.commits - commits, written(&world)), (2, 1));
    world.advance(24 * HOUR - 1);
    assert_eq!(world.commits - commits, 2);
    world.advance(1);
    assert_eq!((world.commits - commits, written(&world)), (3, limits::SEEN_USERS));
}

#[test]
fn who_came_within_half_a_day_was_written_then() {
    let mut world = World::new();
    world.now.wall = 10 * 24 * HOUR;
    world.settle();
    let looked_at = world.now.wall + limits::SEEN_MS;
    let half = 12 * HOUR;
    for (conn, since) in [(1, looked_at - half - 1), (2, looked_at - half), (3, looked_at - HOUR)] {
        let from = ConnRef { login: since * 1_000, ..world.conn_ref(conn) };
        world.up_from(from, Up::Open(opening(&format!("u{conn}"), "1", conn)));
    }
    world.advance(limits::SEEN_MS - 1);
    let seen = |world: &World| {
        let rows = world.store.devices.iter().filter(|(_, row)| row.last_seen == looked_at);
        rows.map(|((user, _), _)| user.to_string()).collect::<Vec<_>>()
    };
    assert_eq!(seen(&world), [""; 0]);
    world.advance(1);
    assert_eq!(seen(&world), ["u1"]);
}
