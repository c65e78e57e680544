//! Histories written by hand, each with what is wrong with it.

use super::{Judge, Kind, Verdict};
use crate::check::history::{ConversationInfo, DeviceInfo, Entry, Ledger, Told, What, World};

/// alice has two devices, bob and carol one each. alice and bob talk, and all three in a group.
fn world() -> World {
    let device = |user: &str, name: &str| DeviceInfo { name: name.into(), user: user.into() };
    let conversation = |id: &str, members: &[&str]| ConversationInfo {
        id: id.into(),
        members: members.iter().map(|member| (*member).into()).collect(),
    };
    World {
        seed: 0,
        devices: vec![
            device("alice", "a1"),
            device("alice", "a2"),
            device("bob", "b1"),
            device("carol", "c1"),
        ],
        conversations: vec![
            conversation("d:alice:bob", &["alice", "bob"]),
            conversation("g:all", &["alice", "bob", "carol"]),
        ],
    }
}

/// One line is one event: `device event conversation number …`; `ab` is the conversation of two, `all` the group. Each
/// comes a millisecond after the one before; `wait` is three seconds.
///
/// Times of messages are their numbers times ten, and bodies are good, unless the line says otherwise.
fn entries(script: &str) -> Vec<Entry> {
    let mut us = 0;
    let mut entries = Vec::new();
    for line in script.lines().map(str::trim).filter(|line| !line.is_empty()) {
        us += if line == "wait" { 3_000_000 } else { 1_000 };
        let words: Vec<&str> = line.split_whitespace().collect();
        let word = |n: usize| words.get(n).copied().unwrap_or_default();
        let number =
            |n: usize| word(n).parse::<u64>().unwrap_or_else(|_| panic!("no number {n} in {line:?}"));
        let place = |n: usize| match word(n) {
            "ab" => "d:alice:bob",
            "all" => "g:all",
            other => other,
        };
        let has = |flag: &str| words.contains(&flag);
        let told = || {
            let (id, from) = word(4).split_once('@').unwrap_or_else(|| panic!("no id@user in {line:?}"));
            let ts = words.iter().find_map(|word| word.strip_prefix("ts=")?.parse().ok());
            Told {
                conversation: place(2).into(),
                seq: number(3),
                id: id.into(),
                from: from.into(),
                ts: ts.unwrap_or(number(3) * 10),
                intact: !has("spoiled"),
            }
        };
        let what = match word(1) {
            _ if line == "wait" => continue,
            _ if line == "killed" => What::Killed,
            "opens" => What::Opening,
            "connects" => What::Connected { resumed: has("resumed") },
            "closes" => What::Closed { by_us: true, why: String::new() },
            "sends" => What::Send { conversation: place(2).into(), id: word(3).into(), again: has("again") },
            "acked" => {
                let told = words.iter().find_map(|word| word.strip_prefix("ts=")?.parse().ok());
                let (conversation, seq, id) = (place(2).into(), number(3), word(4).into());
                What::Ack { conversation, id, seq, ts: told.unwrap_or(seq * 10) }
            }
            "refused" => {
                What::Refused { id: word(2).into(), code: "unavailable".into(), for_now: !has("final") }
            }
            "pushed" => What::Push { told: told(), redelivered: has("again") },
            "page" => What::Page { conversation: place(2).into(), after: number(3) },
            "row" => What::Row { told: told() },
            "noticed" => {
                What::Notice { conversation: place(2).into(), first_seq: 1, last_seq: number(3), unread: 1 }
            }
            "receives" => What::Recv { conversation: place(2).into(), seq: number(3) },
            "reads" => What::Read { conversation: place(2).into(), seq: number(3) },
            "receipt" => What::Receipt {
                conversation: place(2).into(),
                seq: number(3),
                user: word(4).into(),
                read: false,
            },
            "asks" => What::Ask { request: word(2).into() },
            "answered" => What::Answer { request: word(2).into() },
            "reviews" => What::Reviewing,
            "reviewed" => What::Reviewed,
            "unfinished" => What::Unfinished { what: "go on".into() },
            "listed" => What::Listed {
                conversation: place(2).into(),
                last_seq: number(3),
                read_seq: number(4),
                unread: number(5),
            },
            "ledger" => What::Ledger {
                ledger: Ledger {
                    accepted: number(2),
                    delivered: number(3),
                    waiting: number(4),
                    expired: number(5),
                    dropped: number(6),
                },
                at_rest: has("rest"),
            },
            other => panic!("{other:?} is no event, in {line:?}"),
        };
        let device = Some(word(0)).filter(|name| *name != "server" && *name != "killed").map(Into::into);
        entries.push(Entry { us, device, what });
    }
    entries
}

fn judge(script: &str) -> Verdict {
    let mut judge = Judge::new(&world());
    let mut last = 0;
    for entry in entries(script) {
        // What is judged is what can be read back.
        let text = serde_json::to_string(&entry).unwrap();
        assert_eq!(serde_json::from_str::<Entry>(&text).unwrap(), entry, "{text}");
        judge.on(&entry);
        last = entry.us;
    }
    judge.finish(last + 3_000_000)
}

const ALL_CONNECT: &str = "a1 connects
    a2 connects
    b1 connects
    c1 connects
";

/// Checks the counts of a history in which everybody is connected from the beginning.
fn check(name: &str, script: &str, expected: &[(Kind, u64)]) {
    let verdict = judge(&format!("{ALL_CONNECT}{script}"));
    let told: Vec<&str> = verdict.violations.iter().map(|violation| violation.text.as_str()).collect();
    for kind in Kind::ALL {
        let count = expected.iter().find(|(expected, _)| *expected == kind).map_or(0, |(_, count)| *count);
        assert_eq!(verdict.count(kind), count, "{name}: {} in {told:#?}", kind.name());
    }
    assert_eq!(verdict.is_clean(), expected.is_empty(), "{name}");
    assert_eq!(told.is_empty(), expected.is_empty(), "{name}");
}

/// One message, everywhere.
const ONE: &str = "a1 sends ab m1
    a1 acked ab 1 m1
    a2 pushed ab 1 m1@alice
    b1 pushed ab 1 m1@alice
";

#[test]
fn what_is_as_promised_is_clean() {
    check("nothing", "", &[]);
    check("one message", ONE, &[]);
    let repeat = "a1 sends ab m1 again
        a1 acked ab 1 m1
        a2 sends ab m1 again
        a2 acked ab 1 m1";
    check("a repeated id has the same answer", &format!("{ONE}{repeat}"), &[]);
    let repush = "wait
        b1 pushed ab 1 m1@alice again
        b1 pushed ab 1 m1@alice again";
    check("a push that says that it is a repeat", &format!("{ONE}{repush}"), &[]);
    let away = "b1 closes
        a1 sends ab m1
        a1 acked ab 1 m1
        a2 pushed ab 1 m1@alice
        b1 connects
        b1 noticed ab 1
        b1 page ab 0
        b1 row ab 1 m1@alice
        wait";
    check("who was away is told, and pages", away, &[]);
    let resumed = "b1 closes
        a1 sends ab m1
        a1 acked ab 1 m1
        a2 pushed ab 1 m1@alice
        b1 connects resumed
        b1 pushed ab 1 m1@alice
        wait";
    check("a session that was held goes on", resumed, &[]);
    let announced = "b1 closes
        a1 sends ab m1
        a1 acked ab 1 m1
        a2 pushed ab 1 m1@alice
        b1 connects
        b1 noticed ab 1
        b1 closes
        b1 connects RESUMED
        b1 page ab 0
        b1 row ab 1 m1@alice
        wait";
    check("a session that was held knows what was announced", &announced.replace("RESUMED", "resumed"), &[]);
    check("one that was not is told again", &announced.replace("RESUMED", ""), &[(Kind::Gap, 1)]);
    let unheard = "a1 sends ab m1
        killed
        a1 closes
        a1 connects
        a1 sends ab m1 again
        a1 acked ab 1 m1
        a2 pushed ab 1 m1@alice
        b1 pushed ab 1 m1@alice
        a1 sends ab m2
        a1 acked ab 2 m2
        a2 pushed ab 2 m2@alice
        b1 pushed ab 2 m2@alice
        wait";
    check("a send that a kill has taken is sent again", unheard, &[]);
    let refused = "a1 sends ab m1
        a1 sends ab m2
        a1 refused m1
        a1 acked ab 1 m2
        a2 pushed ab 1 m2@alice
        b1 pushed ab 1 m2@alice
        a1 sends ab m1 again
        a1 acked ab 2 m1
        a2 pushed ab 2 m1@alice
        b1 pushed ab 2 m1@alice";
    check("what was refused takes its place later", refused, &[]);
    let cut_off = "b1 pushed ab 1 m1@alice";
    let script = format!(
        "a1 sends ab m1\na1 acked ab 1 m1\na2 pushed ab 1 m1@alice\nb1 closes\nb1 connects\n{cut_off}"
    );
    check("a push that was on its way", &script, &[]);
}

#[test]
fn what_is_not_there_is_lost() {
    let never = "a1 sends ab m1
        a1 acked ab 1 m1
        a2 pushed ab 1 m1@alice";
    check("it never reached the other one", never, &[(Kind::Lost, 1)]);
    let own = "a1 sends ab m1
        a1 acked ab 1 m1
        b1 pushed ab 1 m1@alice";
    check("nor the sender's other device", own, &[(Kind::Lost, 1)]);
    let seen = "a1 sends ab m1
        b1 pushed ab 1 m1@alice
        a1 acked ab 1 m1
        a2 pushed ab 1 m1@alice
        b1 closes
        killed
        b1 connects
        b1 reviews
        b1 page ab 0
        b1 listed ab 1 0 1
        b1 reviewed";
    check("it was pushed, and is gone afterwards", seen, &[(Kind::Lost, 1)]);
    let group = "a1 sends all m1
        a1 acked all 1 m1
        a2 pushed all 1 m1@alice
        a1 sends all m2
        a1 acked all 2 m2
        a2 pushed all 2 m2@alice";
    check("two messages, each for two members", group, &[(Kind::Lost, 2)]);
}

#[test]
fn what_is_there_twice_is_doubled() {
    let push = "b1 pushed ab 1 m1@alice";
    check("pushed twice on one connection", &format!("{ONE}{push}"), &[(Kind::Doubled, 1)]);
    let back = "b1 closes
        b1 connects
        b1 pushed ab 1 m1@alice";
    check("pushed to who had it before", &format!("{ONE}{back}"), &[(Kind::Doubled, 1)]);
    let known = "b1 receives ab 1
        b1 asks q
        b1 answered q
        b1 pushed ab 1 m1@alice again";
    check("pushed again after it was surely acknowledged", &format!("{ONE}{known}"), &[(Kind::Doubled, 1)]);
    let crossed = "b1 asks q
        b1 receives ab 1
        b1 answered q
        b1 pushed ab 1 m1@alice again";
    check("the acknowledgement may have crossed it", &format!("{ONE}{crossed}"), &[]);
    let history = "b1 page ab 0
        b1 row ab 1 m1@alice
        b1 row ab 1 m1@alice";
    check("twice in a page of history", &format!("{ONE}{history}"), &[(Kind::Doubled, 1)]);
    let pages = "b1 page ab 0
        b1 row ab 1 m1@alice
        b1 page ab 1
        b1 row ab 1 m1@alice";
    check("in the page behind it as well", &format!("{ONE}{pages}"), &[(Kind::Doubled, 1)]);
    let ack = "a1 sends ab m1 again
        a1 acked ab 2 m1";
    check("another number for the same id", &format!("{ONE}{ack}"), &[(Kind::Doubled, 1)]);
    let stored = "b1 pushed ab 2 m1@alice
        a2 pushed ab 2 m1@alice";
    check("stored twice, seen by two", &format!("{ONE}{stored}"), &[(Kind::Doubled, 1)]);
    let number = "b1 sends ab n1
        b1 acked ab 1 n1";
    check("one number for two messages", &format!("{ONE}{number}"), &[(Kind::Doubled, 1), (Kind::Lost, 1)]);
}

#[test]
fn a_late_push_is_out_of_order_before_it_is_anything_else() {
    let late = "a1 sends ab m1
        a1 sends ab m2
        a1 acked ab 1 m1
        a1 acked ab 2 m2
        a2 pushed ab 1 m1@alice
        a2 pushed ab 2 m2@alice
        b1 pushed ab 2 m2@alice
        b1 page ab 0
        b1 row ab 1 m1@alice
        b1 receives ab 2
        b1 asks q
        b1 answered q
        b1 pushed ab 1 m1@alice";
    check("late, and known to have arrived", late, &[(Kind::Reordered, 1)]);
}

#[test]
fn what_is_not_in_order_is_reordered() {
    let two = "a1 sends ab m1
        a1 sends ab m2
        a1 acked ab 1 m1
        a1 acked ab 2 m2
        a2 pushed ab 1 m1@alice
        a2 pushed ab 2 m2@alice
    ";
    let pushed = "b1 pushed ab 2 m2@alice
        b1 pushed ab 1 m1@alice";
    check("pushed in another order", &format!("{two}{pushed}"), &[(Kind::Reordered, 1)]);
    let rows = "b1 pushed ab 1 m1@alice
        b1 pushed ab 2 m2@alice
        b1 page ab 0
        b1 row ab 2 m2@alice
        b1 row ab 1 m1@alice";
    check("in the history in another order", &format!("{two}{rows}"), &[(Kind::Reordered, 1)]);
    let sender = "a1 sends ab m1
        a1 sends ab m2
        a1 acked ab 2 m1
        a1 acked ab 1 m2
        a2 pushed ab 1 m2@alice
        a2 pushed ab 2 m1@alice
        b1 pushed ab 1 m2@alice
        b1 pushed ab 2 m1@alice";
    check("stored in another order than sent", sender, &[(Kind::Reordered, 1)]);
}

#[test]
fn numbers_that_are_left_out_are_gaps() {
    let unused = "a1 sends ab m1
        a1 acked ab 3 m1
        a2 pushed ab 3 m1@alice
        b1 pushed ab 3 m1@alice";
    check("no message has them", unused, &[(Kind::Gap, 2)]);
    let three = "a1 sends ab m1
        a1 acked ab 1 m1
        a1 sends ab m2
        a1 acked ab 2 m2
        a1 sends ab m3
        a1 acked ab 3 m3
        a2 pushed ab 1 m1@alice
        a2 pushed ab 2 m2@alice
        a2 pushed ab 3 m3@alice
    ";
    let skipped = "b1 pushed ab 1 m1@alice
        b1 pushed ab 3 m3@alice
        b1 page ab 1
        b1 row ab 2 m2@alice";
    check("a push is left out", &format!("{three}{skipped}"), &[(Kind::Gap, 1)]);
    let last = "b1 pushed ab 1 m1@alice
        wait
        b1 page ab 1
        b1 row ab 2 m2@alice
        b1 row ab 3 m3@alice";
    check("the last pushes never come", &format!("{three}{last}"), &[(Kind::Gap, 2)]);
    let unannounced = "b1 closes
        wait
        b1 connects
        wait
        b1 page ab 0
        b1 row ab 1 m1@alice
        b1 row ab 2 m2@alice
        b1 row ab 3 m3@alice";
    check("what waits is not announced", &format!("{three}{unannounced}"), &[(Kind::Gap, 3)]);
    let quick = "b1 closes
        b1 connects
        b1 closes
        wait
        b1 connects
        b1 noticed ab 3
        b1 page ab 0
        b1 row ab 1 m1@alice
        b1 row ab 2 m2@alice
        b1 row ab 3 m3@alice";
    check("a connection that broke off at once", &format!("{three}{quick}"), &[]);
}

#[test]
fn what_is_another_than_before_is_changed() {
    let body = "a1 sends ab m1
        a1 acked ab 1 m1
        a2 pushed ab 1 m1@alice
        b1 pushed ab 1 m1@alice spoiled";
    check("the body", body, &[(Kind::Changed, 1)]);
    let time = "a1 sends ab m1 again
        a1 acked ab 1 m1 ts=11";
    check("the time", &format!("{ONE}{time}"), &[(Kind::Changed, 1)]);
    let place = "a1 sends ab m1 again
        a1 acked all 1 m1";
    check("the conversation", &format!("{ONE}{place}"), &[(Kind::Changed, 1)]);
    let sender = "b1 pushed ab 2 m1@bob";
    check("the sender", &format!("{ONE}{sender}"), &[(Kind::Changed, 1)]);
    check("a conversation of others", "c1 pushed ab 1 m1@alice", &[(Kind::Changed, 1)]);
    check("a notice of others", "c1 noticed ab 1", &[(Kind::Changed, 1)]);
    check("an ack for nothing", "c1 acked all 1 m1", &[(Kind::Changed, 1)]);
}

#[test]
fn what_does_not_add_up_is_miscounted() {
    let read = "b1 reads ab 1
        b1 reviews
        b1 page ab 0
        b1 row ab 1 m1@alice
    ";
    for (listed, is_right) in [
        ("b1 listed ab 1 1 0", true),
        ("b1 listed ab 2 1 0", false),
        ("b1 listed ab 1 0 1", false),
        ("b1 listed ab 1 1 1", false),
    ] {
        let expected: &[(Kind, u64)] = if is_right { &[] } else { &[(Kind::Miscounted, 1)] };
        check(listed, &format!("{ONE}{read}{listed}\nb1 reviewed"), expected);
    }
    check("not listed at all", &format!("{ONE}{read}b1 reviewed"), &[(Kind::Miscounted, 1)]);
    let own = "a1 reviews
        a1 page ab 0
        a1 row ab 1 m1@alice
        a1 listed ab 1 0 0
        a1 reviewed";
    check("own messages are not unread", &format!("{ONE}{own}"), &[]);
    for (ledger, is_right) in [
        ("server ledger 5 2 1 1 1", true),
        ("server ledger 5 2 1 1 0", false),
        ("server ledger 1 1 0 0 0 rest", true),
        ("server ledger 1 0 1 0 0 rest", false),
        ("server ledger 2 2 0 0 0 rest", false),
    ] {
        let expected: &[(Kind, u64)] = if is_right { &[] } else { &[(Kind::Miscounted, 1)] };
        check(ledger, &format!("{ONE}{ledger}"), expected);
    }
    let back = "b1 receives ab 1
        a1 receipt ab 1 bob
        b1 closes
        killed
        b1 opens
        b1 connects
        b1 noticed ab 1";
    check("a position went back", &format!("{ONE}{back}"), &[(Kind::Miscounted, 1)]);
    let crossed = "b1 receives ab 1
        b1 closes
        b1 opens
        a1 receipt ab 1 bob
        b1 connects
        b1 noticed ab 1";
    check("the position was not known yet", &format!("{ONE}{crossed}"), &[]);
}

#[test]
fn what_has_no_end_is_unanswered() {
    check("a send", "a1 sends ab m1", &[(Kind::Unanswered, 1)]);
    check("a final refusal is an answer", "a1 sends ab m1\na1 refused m1 final", &[]);
    check("a device that could not go on", "a1 unfinished", &[(Kind::Unanswered, 1)]);
}

#[test]
fn the_first_violation_is_told_with_its_place() {
    let verdict = judge(&format!("{ALL_CONNECT}{ONE}b1 pushed ab 1 m1@alice\na1 sends ab m2"));
    let first = &verdict.violations[0];
    assert_eq!(first.kind, Kind::Doubled);
    assert_eq!((first.conversation.as_deref(), first.seq), (Some("d:alice:bob"), Some(1)));
    assert_eq!(first.id.as_deref(), Some("m1"));
    assert!(first.text.contains("b1 was pushed number 1 of d:alice:bob twice"), "{}", first.text);
    assert_eq!((verdict.sent, verdict.acked, verdict.delivered), (2, 1, 2));
}
