//! A client whose network dropped goes on where it was, or is told that it does not.

#[allow(dead_code)]
mod support;

use bowline_delivery::{
    Config, limits,
    persist::{Found, Query},
};
use bowline_protocol::{
    CloseCode,
    link::{Down, SameDevice, Up},
};
use support::{MemStore, World, config, recv, send};

const AB: &str = "d:a:b";

/// The connection is lost; the session of `conn` waits.
fn lose(world: &mut World, conn: u64) {
    world.up(conn, Up::Closed(CloseCode::Bye));
}

fn resume(world: &mut World, user: &str, device: &str, session: u64) -> (u64, bool) {
    let conn = world.resume(user, device, Some(&format!("s{session}")));
    (conn, world.accepted[&conn])
}

#[test]
fn what_was_pushed_comes_again_and_what_was_never_sent_comes_without_a_mark() {
    let mut world = World::new();
    let (a, b) = (world.connect("a", "1"), world.connect("b", "1"));
    for n in 1..=3 {
        world.frame(a, &send(&format!("m{n}"), "b"));
    }
    world.frame(b, &recv(AB, 1));
    lose(&mut world, b);
    world.advance(1_000);
    world.frame(a, &send("m4", "b"));
    let (b, resumed) = resume(&mut world, "b", "1", b);
    assert!(resumed);
    assert_eq!(world.brief(b), ["again 2", "again 3", "push 4"]);
    // From here on as ever.
    world.frame(a, &send("m5", "b"));
    assert_eq!(world.brief(b), ["push 5"]);
    world.frame(b, &recv(AB, 3));
    world.advance(3_000);
    assert_eq!(world.brief(b), ["again 4", "again 5"]);
}

#[test]
fn a_resume_without_anything_open_is_one_as_well() {
    let mut world = World::new();
    let (_, b) = (world.connect("a", "1"), world.connect("b", "1"));
    lose(&mut world, b);
    let (b, resumed) = resume(&mut world, "b", "1", b);
    assert!(resumed, "a position is given at connect");
    assert_eq!(world.brief(b), [""; 0]);
}

#[test]
fn who_was_in_a_room_comes_anew() {
    let mut world = World::new();
    let (a, b) = (world.connect("a", "1"), world.connect("b", "1"));
    world.frame(a, &send("m1", "b"));
    world.up(b, Up::InRooms);
    lose(&mut world, b);
    let (b, resumed) = resume(&mut world, "b", "1", b);
    assert!(!resumed, "its memberships have ended");
    assert_eq!(world.brief(b).len(), 1, "what waits is announced");
}

#[test]
fn what_was_only_announced_is_pushed_without_a_mark() {
    let mut world = World::new();
    let a = world.connect("a", "1");
    world.connect("b", "9");
    let b = world.connect("b", "1");
    world.disconnect(b);
    world.frame(a, &send("m1", "b"));
    let b = world.connect("b", "1");
    world.frame(a, &send("m2", "b"));
    assert_eq!(world.brief(b), ["notice d:a:b 1-1 u1", "push 2"]);
    lose(&mut world, b);
    let (b, resumed) = resume(&mut world, "b", "1", b);
    assert!(resumed);
    assert_eq!(world.brief(b), ["push 1", "again 2"]);
}

#[test]
fn what_was_given_up_after_its_attempts_comes_again() {
    let mut world = World::new();
    let (a, b) = (world.connect("a", "1"), world.connect("b", "1"));
    world.frame(a, &send("m1", "b"));
    for _ in 0..40 {
        world.advance(1_000);
    }
    assert_eq!(world.brief(b), ["push 1", "again 1", "again 1", "again 1"]);
    lose(&mut world, b);
    world.advance(10);
    let (b, _) = resume(&mut world, "b", "1", b);
    assert_eq!(world.brief(b), ["again 1"]);
}

#[test]
fn own_messages_do_not_come_back() {
    let mut world = World::new();
    let (a, b) = (world.connect("a", "1"), world.connect("b", "1"));
    world.frame(a, &send("m1", "b"));
    world.frame(b, &send("m2", "a"));
    world.frame(a, &send("m3", "b"));
    world.take(b);
    lose(&mut world, b);
    let (b, _) = resume(&mut world, "b", "1", b);
    assert_eq!(world.brief(b), ["again 1", "again 3"]);
}

#[test]
fn the_session_of_another_user_or_device_is_left_alone() {
    let mut world = World::new();
    let (a, b) = (world.connect("a", "1"), world.connect("b", "1"));
    world.frame(a, &send("m1", "b"));
    world.take(b);
    let (_, open) = resume(&mut world, "c", "1", b);
    let (_, other) = resume(&mut world, "b", "2", b);
    assert_eq!((open, other), (false, false));
    world.frame(a, &send("m2", "b"));
    assert_eq!(world.brief(b), ["push 2"], "it goes on");
    lose(&mut world, b);
    let (_, thief) = resume(&mut world, "c", "1", b);
    assert!(!thief);
    let (b, resumed) = resume(&mut world, "b", "1", b);
    assert!(resumed);
    assert_eq!(world.brief(b), ["again 1", "again 2"]);
}

#[test]
fn a_session_is_held_for_its_time_and_not_for_who_was_sent_away() {
    let mut world = World::new();
    let b = world.connect("b", "1");
    lose(&mut world, b);
    world.advance(14_999);
    let (b, resumed) = resume(&mut world, "b", "1", b);
    assert!(resumed);
    // The session keeps its name.
    lose(&mut world, b);
    world.advance(15_000);
    assert!(!resume(&mut world, "b", "1", 1).1);
    for code in [CloseCode::Kicked, CloseCode::Revoked, CloseCode::Policy, CloseCode::Unauthenticated] {
        let b = world.connect("b", "1");
        world.up(b, Up::Closed(code));
        assert!(!resume(&mut world, "b", "1", b).1, "{code:?}");
    }
}

#[test]
fn a_resume_fences_the_old_transport() {
    let mut world = World::new();
    let (a, old) = (world.connect("a", "1"), world.connect("b", "1"));
    world.frame(a, &send("m1", "b"));
    world.take(old);
    // It dropped without a word: for the server it is open still.
    let (new, resumed) = resume(&mut world, "b", "1", old);
    assert!(resumed);
    assert_eq!(world.closed[&old], CloseCode::Replaced);
    assert_eq!(world.brief(new), ["again 1"]);
    // Its late words end nothing, and neither do its timers.
    world.up(old, Up::Closed(CloseCode::HeartbeatTimeout));
    let (no, gone) = (1, true);
    let event = Box::new(Down::Accepted { resumed: false });
    world.up(old, Up::NotHere { no, event, gone });
    world.advance(2_999);
    assert_eq!(world.brief(new), [""; 0]);
    world.advance(1);
    assert_eq!(world.brief(new), ["again 1"]);
    world.frame(new, &recv(AB, 1));
    world.advance(60_000);
    assert_eq!(world.brief(new), [""; 0]);
    assert_eq!(world.core.table_sizes()[0], 2);
}

#[test]
fn a_client_takes_its_own_session_back_where_a_second_login_is_refused() {
    let mut world = World::new();
    let old = world.connect_as("b", "1", SameDevice::Refuse);
    let other = world.connect_as("b", "1", SameDevice::Refuse);
    assert_eq!(world.closed.remove(&other), Some(CloseCode::DeviceInUse));
    let thief = world.resume_as("b", "1", Some("s999"), SameDevice::Refuse);
    assert_eq!(world.closed.remove(&thief), Some(CloseCode::DeviceInUse));
    let session = format!("s{old}");
    let new = world.resume_as("b", "1", Some(&session), SameDevice::Refuse);
    assert_eq!((world.closed.remove(&old), world.accepted[&new]), (Some(CloseCode::Replaced), true));
    assert_eq!(world.core.table_sizes()[..2], [1, 1]);
}

#[test]
fn a_hundred_silent_drops_in_a_row_all_resume() {
    let mut world = World::new();
    let (a, first) = (world.connect("a", "1"), world.connect("b", "1"));
    let mut conn = first;
    world.frame(a, &send("m0", "b"));
    for n in 1..=100 {
        if n % 3 == 0 {
            lose(&mut world, conn);
        }
        if n % 7 == 0 {
            world.frame(a, &send(&format!("m{n}"), "b"));
        }
        world.take(conn);
        let (next, resumed) = resume(&mut world, "b", "1", first);
        assert!(resumed, "drop {n}");
        let all: Vec<String> = world.brief(next);
        assert_eq!(all.len() as u64, world.last_seq(AB), "{all:?}");
        conn = next;
        world.advance(100);
    }
    assert_eq!(world.core.counters().resumed, 100);
    // One timer is left for what is open, not a hundred.
    world.take(conn);
    world.advance(3_000);
    assert_eq!(world.brief(conn).len() as u64, world.last_seq(AB));
}

#[test]
fn more_than_can_be_pushed_is_announced() {
    let mut world = World::new();
    let (a, b) = (world.connect("a", "1"), world.connect("b", "1"));
    lose(&mut world, b);
    let texts: Vec<String> = (0..=limits::RESUME_MESSAGES_MAX).map(|n| send(&format!("m{n}"), "b")).collect();
    let frames: Vec<(u64, &str)> = texts.iter().map(|text| (a, text.as_str())).collect();
    world.frames(&frames);
    let (b, resumed) = resume(&mut world, "b", "1", b);
    assert!(!resumed);
    assert_eq!(world.brief(b), [format!("notice d:a:b 1-{0} u{0}", limits::RESUME_MESSAGES_MAX + 1)]);
}

#[test]
fn bodies_that_are_too_large_together_are_announced() {
    let mut world = World::new();
    let (a, b) = (world.connect("a", "1"), world.connect("b", "1"));
    lose(&mut world, b);
    let body = "x".repeat(limits::RESUME_BYTES_MAX / 10);
    for n in 0..11 {
        world.frame(a, &format!(r#"{{"type":"msg.send","id":"m{n}","to":"b","body":"{body}"}}"#));
    }
    let (b, resumed) = resume(&mut world, "b", "1", b);
    assert!(!resumed);
    assert_eq!(world.brief(b), ["notice d:a:b 1-11 u11"]);
}

#[test]
fn what_happens_while_the_session_is_read_follows_in_order() {
    let mut world = World::new();
    let (a, b) = (world.connect("a", "1"), world.connect("b", "1"));
    world.frame(a, &send("m1", "b"));
    world.frame(b, &send("b1", "a"));
    world.take(b);
    lose(&mut world, b);
    let frames = [(a, &send("m2", "b")[..]), (a, &recv(AB, 2))];
    let conn = world.resume_amid("b", "1", &format!("s{b}"), &frames);
    assert!(world.accepted[&conn]);
    assert_eq!(world.brief(conn), ["delivered 2 a", "again 1", "push 3"]);
}

#[test]
fn nothing_is_held_when_it_is_turned_off() {
    let mut world = World::with(Config { resume_ms: 0, ..config() }, MemStore::default());
    let (a, b) = (world.connect("a", "1"), world.connect("b", "1"));
    world.frame(a, &send("m1", "b"));
    lose(&mut world, b);
    let (b, resumed) = resume(&mut world, "b", "1", b);
    assert!(!resumed);
    assert_eq!(world.brief(b), ["notice d:a:b 1-1 u1"]);
}

#[test]
fn a_store_that_does_not_answer_keeps_nobody_out() {
    let mut world = World::new();
    let (a, b) = (world.connect("a", "1"), world.connect("b", "1"));
    world.frame(a, &send("m1", "b"));
    lose(&mut world, b);
    world.is_silent = true;
    let conn = world.resume("b", "1", Some(&format!("s{b}")));
    assert!(!world.accepted.contains_key(&conn));
    world.advance(limits::RESUME_WAIT_MS);
    assert!(!world.accepted[&conn], "let in without its session");
    world.is_silent = false;
    world.settle();
    assert_eq!(world.brief(conn), ["notice d:a:b 1-1 u1"]);
    // It may try again while the session is held.
    lose(&mut world, conn);
    let (conn, resumed) = resume(&mut world, "b", "1", b);
    assert!(resumed);
    assert_eq!(world.brief(conn), ["again 1"]);
}

/// Messages of so many users, one each, that `conn` is pushed or misses.
fn one_each(world: &mut World, users: std::ops::Range<usize>) {
    for n in users {
        let conn = world.connect(&format!("u{n:03}"), "1");
        world.frame(conn, &send("m", "b"));
    }
}

#[test]
fn only_who_was_not_sent_away_may_go_on() {
    for code in CloseCode::ALL {
        let mut world = World::new();
        let b = world.connect("b", "1");
        world.up(b, Up::Closed(code));
        // Whose end was its own, the network's or the server's plan; not whose identity was refused or taken.
        let may = !matches!(
            code,
            CloseCode::ConnectTimeout
                | CloseCode::Replaced
                | CloseCode::Unauthenticated
                | CloseCode::Revoked
                | CloseCode::Kicked
                | CloseCode::Policy
                | CloseCode::DeviceInUse
                | CloseCode::Version
        );
        assert_eq!(resume(&mut world, "b", "1", b).1, may, "{code:?}");
    }
}

#[test]
fn a_session_with_as_much_open_as_may_be_is_held_and_with_more_it_is_not() {
    let max = limits::RESUME_CONVERSATIONS_MAX;
    for (announced, pushed, is_held) in
        [(0, max, true), (max / 2, max / 2, true), (0, max + 1, false), (max / 2, max / 2 + 1, false)]
    {
        let mut world = World::new();
        let first = world.connect("b", "1");
        world.disconnect(first);
        one_each(&mut world, 0..announced);
        let b = world.connect("b", "1");
        one_each(&mut world, announced..announced + pushed);
        world.take(b);
        lose(&mut world, b);
        let (b, resumed) = resume(&mut world, "b", "1", b);
        assert_eq!(resumed, is_held, "{announced} announced, {pushed} pushed");
        if resumed {
            let words: Vec<String> = world.brief(b).iter().map(|text| text[..5].to_owned()).collect();
            let count = |word: &str| words.iter().filter(|w| *w == word).count();
            assert_eq!((count("push "), count("again")), (announced, pushed));
        }
    }
}

#[test]
fn as_many_conversations_and_messages_as_may_be_are_pushed_and_more_are_announced() {
    let (conversations, messages) = (limits::RESUME_CONVERSATIONS_MAX, limits::RESUME_MESSAGES_MAX as usize);
    for (count, is_resumed) in [(conversations, true), (conversations + 1, false)] {
        let mut world = World::new();
        let b = world.connect("b", "1");
        lose(&mut world, b);
        one_each(&mut world, 0..count);
        let (b, resumed) = resume(&mut world, "b", "1", b);
        assert_eq!((resumed, world.take(b).len() > 2), (is_resumed, is_resumed), "{count} conversations");
    }
    // More than one page of one conversation, and some of another, together exactly as many as may be.
    let mut world = World::new();
    let (a, c, b) = (world.connect("a", "1"), world.connect("c", "1"), world.connect("b", "1"));
    world.frame(a, &send("m0", "b"));
    world.frame(b, &recv(AB, 1));
    lose(&mut world, b);
    let texts: Vec<String> = (1..=messages).map(|n| send(&format!("m{n}"), "b")).collect();
    let frames: Vec<(u64, &str)> = texts
        .iter()
        .enumerate()
        .map(|(n, text)| (if n < messages - 10 { a } else { c }, text.as_str()))
        .collect();
    world.frames(&frames);
    let looked_up = world.lanes.len();
    let (b, resumed) = resume(&mut world, "b", "1", b);
    assert!(resumed);
    let pushes = world.take(b);
    let of = |id: &str| {
        pushes
            .iter()
            .filter(|f| f["conversation_id"] == id)
            .filter_map(|f| f["seq"].as_u64())
            .collect::<Vec<_>>()
    };
    assert_eq!(of(AB), Vec::from_iter(2..=messages as u64 - 9));
    assert_eq!(of("d:b:c"), Vec::from_iter(1..=10));
    // What waits, three pages of the one and one of the other.
    assert_eq!(world.lanes.len() - looked_up, 5);
}

#[test]
fn bodies_are_counted_over_all_conversations_and_to_the_byte() {
    for more in [0, 1] {
        let mut world = World::new();
        let (a, c, b) = (world.connect("a", "1"), world.connect("c", "1"), world.connect("b", "1"));
        lose(&mut world, b);
        let half = limits::RESUME_BYTES_MAX / 2;
        for (conn, length) in [(a, half), (c, half + more)] {
            // With its quotes.
            let body = "x".repeat(length - 2);
            world.frame(conn, &format!(r#"{{"type":"msg.send","id":"m","to":"b","body":"{body}"}}"#));
        }
        let (_, resumed) = resume(&mut world, "b", "1", b);
        assert_eq!(resumed, more == 0);
    }
}

#[test]
fn an_attempt_that_ends_before_it_is_answered_prolongs_the_session() {
    let mut world = World::new();
    let (a, b) = (world.connect("a", "1"), world.connect("b", "1"));
    world.frame(a, &send("m1", "b"));
    lose(&mut world, b);
    world.advance(14_000);
    world.is_silent = true;
    let attempt = world.resume("b", "1", Some(&format!("s{b}")));
    world.up(attempt, Up::Closed(CloseCode::HeartbeatTimeout));
    world.is_silent = false;
    world.advance(14_999);
    let (b, resumed) = resume(&mut world, "b", "1", b);
    assert!(resumed, "held from the attempt on");
    assert_eq!(world.brief(b), ["again 1"]);
}

#[test]
fn more_than_is_held_for_a_resume_is_announced() {
    let renamed =
        |n: usize| format!(r#"{{"type":"group.rename","id":"r","conversation_id":"g:t","name":"{n}"}}"#);
    for (max, is_push) in [(limits::HELD_PUSHES_MAX, true), (limits::EARLY_FRAMES_MAX, false)] {
        for more in [0, 1] {
            let mut world = World::new();
            let (a, b) = (world.connect("a", "1"), world.connect("b", "1"));
            world.frame(a, r#"{"type":"conversation.create","id":"c","group_id":"t","members":["b"]}"#);
            lose(&mut world, b);
            let text = |n| if is_push { send(&format!("m{n}"), "b") } else { renamed(n) };
            let meanwhile: Vec<String> = (1..=max + more).map(text).collect();
            let frames: Vec<(u64, &str)> = meanwhile.iter().map(|text| (a, text.as_str())).collect();
            // Its conversation has to be in memory: this one is pushed in any case.
            world.frame(a, &send("m0", "b"));
            let conn = world.resume_amid("b", "1", &format!("s{b}"), &frames);
            assert_eq!(world.accepted[&conn], more == 0, "{max} and {more} more");
            let told = world.brief(conn);
            match (is_push, more) {
                (true, 0) => assert_eq!(told, (1..=max + 1).map(|n| format!("push {n}")).collect::<Vec<_>>()),
                (true, _) => assert_eq!(told, [format!("notice d:a:b 1-{0} u{0}", max + 2)]),
                (false, 0) => assert_eq!(
                    (told.len(), &told[0][..], &told[max][..]),
                    (max + 1, "changed renamed", "push 1")
                ),
                (false, _) => assert_eq!((told.len(), &told[max][..]), (max + 1, "notice d:a:b 1-1 u1")),
            }
            // From here on as ever.
            world.frame(a, &send("after", "b"));
            assert_eq!(world.brief(conn).len(), 1);
        }
    }
}

#[test]
fn what_was_pushed_in_one_conversation_says_nothing_of_another() {
    let mut world = World::new();
    let (a, c, b) = (world.connect("a", "1"), world.connect("c", "1"), world.connect("b", "1"));
    for n in 1..=3 {
        world.frame(a, &send(&format!("m{n}"), "b"));
    }
    world.frame(c, &send("m1", "b"));
    lose(&mut world, b);
    world.frame(c, &send("m2", "b"));
    world.frame(a, &send("m4", "b"));
    let (b, _) = resume(&mut world, "b", "1", b);
    let told = world.take(b);
    let of =
        |id: &str| told.iter().filter(|f| f["conversation_id"] == id).map(support::brief).collect::<Vec<_>>();
    assert_eq!(
        (of(AB), of("d:b:c")),
        (
            vec!["again 1".into(), "again 2".into(), "again 3".into(), "push 4".to_owned()],
            vec!["again 1".into(), "push 2".to_owned()]
        )
    );
    world.frames(&[(b, &recv(AB, 4)), (b, &recv("d:b:c", 2))]);
    world.advance(60_000);
    assert_eq!(world.brief(b), [""; 0]);
}

#[test]
fn what_came_just_before_the_end_and_was_received_by_nobody_comes_again_once() {
    // Long after its last attempt the server has no note of it but its time.
    let mut world = World::new();
    let (a, b) = (world.connect("a", "1"), world.connect("b", "1"));
    world.frame(a, &send("m1", "b"));
    world.advance(60_000);
    world.take(b);
    lose(&mut world, b);
    // In the very moment of the end, and later.
    world.frame(a, &send("m2", "b"));
    let (b, resumed) = resume(&mut world, "b", "1", b);
    assert!(resumed);
    assert_eq!(world.brief(b), ["again 1", "push 2"]);
}

#[test]
fn a_session_that_cannot_be_read_does_not_go_on() {
    let mut world = World::new();
    let (a, b) = (world.connect("a", "1"), world.connect("b", "1"));
    world.frame(a, &send("m1", "b"));
    lose(&mut world, b);
    world.is_silent = true;
    let conn = world.resume("b", "1", Some(&format!("s{b}")));
    let waiting = world.take_reads().remove(0);
    let found = world.store.read(&waiting.1);
    world.answer(waiting.0, found);
    let messages = world.take_reads().remove(0);
    assert!(matches!(messages.1, Query::Messages { from: 1, to: 1, .. }), "{messages:?}");
    world.is_silent = false;
    world.answer(messages.0, Found::Failed("disk".into()));
    assert!(!world.accepted[&conn]);
    assert_eq!(world.brief(conn), ["notice d:a:b 1-1 u1"]);
}
