//! Pages of history and of conversations, what sees what, and conversations that leave memory.

#[allow(dead_code)]
mod support;

use bowline_delivery::{
    Config, limits,
    persist::{Batch, Query},
};
use bowline_protocol::{
    ConversationId, ErrorCode, UserId,
    error::Refusal,
    frame::{LAST_MESSAGE_BODY_BYTES_MAX, SERVER_FIELDS_BYTES},
    ids::GroupId,
    link::{Answer, Request},
};
use serde_json::Value;
use support::{MemStore, World, config, read, recv, send};

const AB: &str = "d:a:b";

fn history(id: &str, rest: &str) -> String {
    format!(r#"{{"type":"history","id":"{id}","conversation_id":"{AB}"{rest}}}"#)
}

fn api_history(conversation: &str, after: Option<u64>, limit: u32) -> Request {
    Request::History { conversation: ConversationId::trusted(conversation), after, before: None, limit }
}

/// The frame as it was sent, in bytes.
fn bytes(frame: &Value) -> usize {
    frame.to_string().len()
}

#[test]
fn pages_are_full_and_never_too_large_whatever_their_ids() {
    // Quotes take two bytes in JSON, control characters six.
    for (from, to) in [("a".to_owned(), "b".to_owned()), ("\"".repeat(63) + "a", "\"".repeat(63) + "b")] {
        let conversation = format!("d:{from}:{to}");
        let mut world = World::new();
        let conn = world.connect(&from, "1");
        for n in 1..=40 {
            let body = "x".repeat(100 + n);
            let (to, id) = (Value::from(to.as_str()), format!("m{n}"));
            world.frame(conn, &format!(r#"{{"type":"msg.send","id":"{id}","to":{to},"body":"{body}"}}"#));
        }
        for id in ["h".to_owned(), "\\u0001".repeat(64)] {
            for frame_bytes_max in (1_000..1_300).step_by(3) {
                world.config.frame_bytes_max = frame_bytes_max;
                world.restart();
                let conn = world.connect(&from, "2");
                world.take(conn);
                all_pages(&mut world, conn, &conversation, &id);
            }
        }
    }
}

/// Fetches forty messages from the first on.
fn all_pages(world: &mut World, conn: u64, conversation: &str, id: &str) {
    let max = world.config.frame_bytes_max + SERVER_FIELDS_BYTES;
    let mut after = 0;
    loop {
        let text = Value::from(conversation);
        world.frame(
            conn,
            &format!(
                r#"{{"type":"history","id":"{id}","conversation_id":{text},"after_seq":{after},"limit":200}}"#
            ),
        );
        let page = world.take(conn).remove(0);
        assert!(bytes(&page) <= max, "{} of {max}", bytes(&page));
        let messages = page["messages"].as_array().expect("messages");
        // A message takes more than is spoken of here beside its body.
        let (first, longest) = (messages[0]["seq"].as_u64(), 140 + from_bytes(&messages[0]) + 100);
        assert_eq!(first, Some(after + 1));
        let more = page["more"] == true;
        // The next one would not have fitted, but for what is set aside for the ids.
        let set_aside = id.len() + 6 * conversation.len() + 64;
        assert!(!more || bytes(&page) + longest + set_aside > max, "{} of {max}", bytes(&page));
        after += messages.len() as u64;
        if !more {
            break;
        }
    }
    assert_eq!(after, 40);
}

fn from_bytes(message: &Value) -> usize {
    message["from"].to_string().len()
}

#[test]
fn a_page_backwards_ends_with_the_newest_that_fit() {
    let mut world = World::with(Config { frame_bytes_max: 1_000, ..config() }, MemStore::default());
    let a = world.connect("a", "1");
    for n in 1..=20 {
        let body = "x".repeat(200);
        world.frame(a, &format!(r#"{{"type":"msg.send","id":"m{n}","to":"b","body":"{body}"}}"#));
    }
    world.take(a);
    let (mut before, mut seen) = (21, Vec::new());
    while before > 1 {
        world.frame(a, &history("h", &format!(r#","before_seq":{before},"limit":200"#)));
        let page = world.take(a).remove(0);
        let numbers: Vec<u64> =
            page["messages"].as_array().expect("messages").iter().filter_map(|m| m["seq"].as_u64()).collect();
        assert_eq!((numbers.last(), page["more"] == true), (Some(&(before - 1)), numbers[0] > 1));
        before = numbers[0];
        seen.splice(0..0, numbers);
    }
    assert_eq!(seen, Vec::from_iter(1..=20));
}

#[test]
fn a_message_that_fills_a_page_alone_is_one() {
    let mut world = World::with(Config { frame_bytes_max: 10, ..config() }, MemStore::default());
    let a = world.connect("a", "1");
    for n in 1..=2 {
        world.frame(
            a,
            &format!(r#"{{"type":"msg.send","id":"m{n}","to":"b","body":"{}"}}"#, "x".repeat(2_000)),
        );
    }
    world.take(a);
    world.frame(a, &history("h", r#","after_seq":0"#));
    assert_eq!(world.brief(a), ["page 1 more=true"]);
}

#[test]
fn lists_come_in_pages_that_are_full_and_never_too_large() {
    let mut world = World::new();
    let a = world.connect("a", "1");
    for n in 0..30 {
        let body = "x".repeat(100 + n * 3);
        world.frame(a, &format!(r#"{{"type":"msg.send","id":"m{n}","to":"b{n:02}","body":"{body}"}}"#));
    }
    for id in ["l".to_owned(), "\\u0001".repeat(64)] {
        for frame_bytes_max in (1_000..1_400).step_by(7) {
            world.config.frame_bytes_max = frame_bytes_max;
            world.restart();
            let a = world.connect("a", "2");
            world.take(a);
            let max = frame_bytes_max + SERVER_FIELDS_BYTES;
            let (mut seen, mut after) = (0, String::new());
            loop {
                world.frame(a, &format!(r#"{{"type":"conversation.list","id":"{id}","limit":200{after}}}"#));
                let page = world.take(a).remove(0);
                let rows = page["conversations"].as_array().expect("rows");
                assert!(bytes(&page) <= max, "{} of {max}", bytes(&page));
                assert_eq!(
                    rows[0]["conversation_id"],
                    format!("d:a:b{:02}", 29 - seen),
                    "newest activity first"
                );
                seen += rows.len();
                let more = page["more"] == true;
                assert!(!more || bytes(&page) + 450 + 80 > max, "{} of {max}", bytes(&page));
                assert_eq!(more, seen < 30);
                if !more {
                    break;
                }
                after = format!(r#","after":{}"#, rows[rows.len() - 1]["conversation_id"]);
            }
        }
    }
    let c = world.connect("c", "1");
    world.frame(c, r#"{"type":"conversation.list","id":"l","after":"d:a:b01"}"#);
    assert_eq!(world.brief(c), ["error forbidden l"]);
    world.frame(c, r#"{"type":"conversation.list","id":"l"}"#);
    let page = world.take(c).remove(0);
    assert_eq!((page["conversations"].as_array().map(Vec::len), &page["more"]), (Some(0), &false.into()));
    // The store may have more than it was asked for.
    let a = world.connect("a", "3");
    world.take(a);
    world.frame(a, r#"{"type":"conversation.list","id":"l","limit":2}"#);
    let page = world.take(a).remove(0);
    assert_eq!((page["conversations"].as_array().map(Vec::len), &page["more"]), (Some(2), &true.into()));
}

#[test]
fn a_list_leaves_out_a_last_body_that_is_too_large() {
    for (length, is_shown) in [(LAST_MESSAGE_BODY_BYTES_MAX, true), (LAST_MESSAGE_BODY_BYTES_MAX + 1, false)]
    {
        let mut world = World::new();
        let a = world.connect("a", "1");
        let body = format!("\"{}\"", "x".repeat(length - 2));
        world.frame(a, &format!(r#"{{"type":"msg.send","id":"m","to":"b","body":{body}}}"#));
        world.take(a);
        world.frame(a, r#"{"type":"conversation.list","id":"l"}"#);
        let page = world.take(a).remove(0);
        let last = &page["conversations"][0]["last_message"];
        assert_eq!(
            (&last["seq"], &last["id"], &last["from"], &last["ts"]),
            (&1.into(), &"m".into(), &"a".into(), &world.now.wall.into())
        );
        assert_eq!(last["body"].is_string(), is_shown, "{length}");
    }
}

#[test]
fn the_api_sees_all_of_history_and_what_does_not_exist() {
    let mut world = World::new();
    let (a, b) = (world.connect("a", "1"), world.connect("b", "1"));
    let refused = |answer: Answer| match answer {
        Answer::Refused(Refusal { code, .. }) => code,
        other => panic!("{other:?}"),
    };
    assert_eq!(refused(world.request(api_history("g:none", None, 9))), ErrorCode::NotFound);
    assert_eq!(
        refused(world.request(api_history(AB, None, 9))),
        ErrorCode::NotFound,
        "nobody has written to it"
    );
    assert_eq!(refused(world.request(api_history(AB, None, 9))), ErrorCode::NotFound, "in memory");
    world.frame(a, &history("h", ""));
    assert_eq!(world.brief(a), ["page  more=false"], "to its members it is empty");
    world.frames(&[(a, &send("m1", "b")), (a, &send("m2", "b"))]);
    world.frame(b, r#"{"type":"conversation.clear","id":"q","conversation_id":"d:a:b"}"#);
    let Answer::Page(page) = world.request(api_history(AB, Some(1), 9)) else { panic!() };
    let page: Value = serde_json::from_slice(&page).expect("JSON");
    assert_eq!(
        (&page["first_seq"], &page["messages"][0]["seq"], &page["more"]),
        (&1.into(), &2.into(), &false.into())
    );
    assert!(page["id"].is_null() && page["type"].is_null(), "the API's answer has no frame around it");
}

#[test]
fn what_retention_takes_between_the_question_and_the_answer_is_not_promised() {
    let mut world = World::new();
    let a = world.connect("a", "1");
    for n in 1..=9 {
        world.frame(a, &send(&format!("m{n}"), "b"));
    }
    world.take(a);
    let mut asked_then_gone = |rest: &str, gone: u64| {
        let store = world.store.clone();
        (world.backwards, world.hold_reads) = (true, true);
        world.frame(a, &history("h", rest));
        let conversation = world.store.conversations.get_mut(AB).expect("it exists");
        conversation.messages.retain(|m| m.seq > gone);
        (world.backwards, world.hold_reads) = (false, false);
        world.settle();
        world.store = store;
        let page = world.take(a).remove(0);
        (page["first_seq"].as_u64(), page["messages"].as_array().map(Vec::len), page["more"] == true)
    };
    assert_eq!(asked_then_gone(r#","after_seq":2,"limit":3"#, 0), (Some(1), Some(3), true));
    assert_eq!(asked_then_gone(r#","after_seq":2,"limit":3"#, 4), (Some(5), Some(3), true));
    assert_eq!(asked_then_gone(r#","after_seq":2,"limit":200"#, 4), (Some(5), Some(5), false));
    assert_eq!(asked_then_gone(r#","before_seq":5,"limit":3"#, 1), (Some(1), Some(3), true));
    assert_eq!(
        asked_then_gone(r#","before_seq":5,"limit":3"#, 9),
        (Some(5), Some(0), false),
        "all of the range"
    );
    assert_eq!(
        asked_then_gone(r#","after_seq":9"#, 9),
        (Some(1), Some(0), false),
        "nothing was asked of the store"
    );
}

#[test]
fn the_answers_of_one_connection_keep_their_order() {
    let mut world = World::new();
    let (a, b) = (world.connect("a", "1"), world.connect("b", "1"));
    world.frame(a, &send("m", "b"));
    world.lanes.clear();
    for conn in [a, b, a] {
        world.frame(conn, &history("h", ""));
        world.frame(conn, r#"{"type":"conversation.list","id":"l"}"#);
    }
    let lanes = std::mem::take(&mut world.lanes);
    assert!(lanes.len() == 6 && lanes[0] == lanes[1] && lanes[2] == lanes[3], "{lanes:?}");
    assert!(lanes[0] == lanes[4] && lanes[0] == lanes[5] && lanes[0] != lanes[2], "{lanes:?}");
    for _ in 0..2 {
        world.request(api_history(AB, None, 9));
    }
    assert!(world.lanes[0] != world.lanes[1] && !lanes.contains(&world.lanes[1]), "nobody waits for another");
}

#[test]
fn a_reader_sees_its_own_writes() {
    let mut world = World::new();
    let (a, b) = (world.connect("a", "1"), world.connect("b", "1"));
    world.frame(a, &send("m0", "b"));
    for conn in [a, b] {
        world.take(conn);
    }
    let list = r#"{"type":"conversation.list","id":"l"}"#;
    // Under way to the store.
    world.late_outcomes = true;
    world.frame(a, &send("m1", "b"));
    world.frame(a, list);
    assert_eq!(world.brief(a), [""; 0]);
    world.tell_outcomes();
    assert_eq!(world.brief(a), ["ack m1 2", "conversation.page"]);
    // Waiting for a transaction, as a message or as a position.
    for text in [send("m2", "a"), read(AB, 2)] {
        world.core.hold(true);
        world.frames(&[(b, text.as_str()), (b, list)]);
        world.take(b);
        world.core.hold(false);
        world.settle();
        assert!(world.brief(b).contains(&"conversation.page".to_owned()), "{text}");
    }
    // And when nothing waits, at once.
    world.core.hold(true);
    world.frame(b, list);
    assert_eq!(world.brief(b), ["conversation.page"]);
}

#[test]
fn a_store_that_cannot_be_read_refuses_and_forgets_nothing() {
    let mut world = World::new();
    let a = world.connect("a", "1");
    world.frame(a, &send("m1", "b"));
    world.restart();
    let a = world.connect("a", "1");
    world.take(a);
    let (m2, m3, list) = (send("m2", "b"), send("m3", "c"), r#"{"type":"conversation.list","id":"l"}"#);
    let clear = r#"{"type":"conversation.clear","id":"c","conversation_id":"d:a:b"}"#;
    let leave = r#"{"type":"group.leave","id":"g","conversation_id":"g:t"}"#;
    let create = r#"{"type":"conversation.create","id":"n","group_id":"n","members":["b"]}"#;
    for (text, id) in [
        (m2.as_str(), "m2"),
        (list, "l"),
        (clear, "c"),
        (leave, "g"),
        (create, "n"),
        (&history("h", ""), "h"),
    ] {
        world.read_failures = 1;
        world.frame(a, text);
        assert_eq!(world.brief(a), [format!("error unavailable {id}")]);
    }
    let user = UserId::trusted("a");
    world.read_failures = 1;
    let answer = world.request(Request::User { user });
    assert!(matches!(answer, Answer::Refused(r) if r.code == ErrorCode::Unavailable));
    // One conversation cannot be loaded: the sender's other messages go on.
    world.frame(a, &send("m0", "d"));
    world.take(a);
    world.read_failures = 1;
    world.frames(&[(a, &m2), (a, &m3), (a, &send("m4", "d"))]);
    assert_eq!(world.brief(a), ["error unavailable m2", "ack m3 1", "ack m4 2"]);
    world.frame(a, &m2);
    assert_eq!(world.brief(a), ["ack m2 2"], "and may be sent again");
}

#[test]
fn a_message_to_a_group_that_does_not_exist_holds_up_no_other() {
    let mut world = World::new();
    let a = world.connect("a", "1");
    let lost = r#"{"type":"msg.send","id":"lost","conversation_id":"g:none","body":1}"#;
    world.frames(&[(a, &send("m1", "b")), (a, lost), (a, &send("m2", "c")), (a, &send("m3", "b"))]);
    let mut told = world.brief(a);
    told.sort();
    assert_eq!(told, ["ack m1 1", "ack m2 1", "ack m3 2", "error forbidden lost"]);
}

#[test]
fn a_connection_that_cannot_be_told_what_waits_is_told_when_the_store_can_be_read() {
    let mut world = World::new();
    let a = world.connect("a", "1");
    world.frame(a, &send("m1", "b"));
    world.read_failures = 2;
    let b = world.connect("b", "1");
    assert_eq!(world.brief(b), [""; 0]);
    world.advance(limits::STORE_RETRY_MS - 1);
    world.frame(a, &send("m2", "b"));
    assert_eq!(world.brief(b), [""; 0], "what comes meanwhile is held");
    world.advance(1);
    assert_eq!(world.brief(b), [""; 0]);
    world.advance(limits::STORE_RETRY_MS);
    assert_eq!(world.brief(b), ["notice d:a:b 1-1 u1", "push 2"]);
}

#[test]
fn conversations_longest_unused_leave_memory_and_come_back_as_they_were() {
    let mut world = World::new();
    let (a, b) = (world.connect("a", "1"), world.connect("b", "1"));
    // In this order: one that is at rest, one with a message under way to the store, one with a message that waits,
    // and one of which a device says what it has, which is under way, too.
    world.frame(a, &send("m0", "idle"));
    let c = world.connect("c", "1");
    world.frames(&[(a, &send("m1", "b")), (b, &send("m1", "c")), (c, &send("c1", "a"))]);
    world.advance(1);
    world.late_outcomes = true;
    world.frames(&[(a, &send("m2", "b")), (a, &recv("d:a:c", 1))]);
    world.frame(b, &send("m2", "c"));
    world.advance(1);
    let touch = |world: &mut World, numbers: std::ops::Range<usize>| {
        for n in numbers {
            world.give_request(api_history(&format!("d:x:y{n}"), None, 1));
        }
        world.settle();
        world.core.table_sizes()[2]
    };
    let max = limits::CONVERSATIONS_MAX;
    assert_eq!(touch(&mut world, 0..max - 4), max);
    world.advance(1);
    assert_eq!(
        touch(&mut world, max..max + 1),
        max * 9 / 10 + 1,
        "a tenth makes room, but for what a device says"
    );
    for conn in [a, b] {
        world.take(conn);
    }
    world.tell_outcomes();
    assert_eq!(
        (world.brief(a), world.brief(b)),
        (vec!["ack m2 2".into()], vec!["push 2".into(), "ack m2 2".to_owned()])
    );
    world.loads.clear();
    let loaded = |world: &mut World, id: &str| {
        world.request(api_history(id, None, 1));
        std::mem::take(&mut world.loads) == [ConversationId::trusted(id)]
    };
    assert!(!loaded(&mut world, AB) && !loaded(&mut world, "d:b:c"), "these were in use");
    assert!(!loaded(&mut world, &format!("d:x:y{max}")), "the newest stays");
    assert!(loaded(&mut world, "d:a:idle") && loaded(&mut world, "d:x:y0"));
    world.frame(a, &send("m3", "idle"));
    assert_eq!(world.brief(a), ["ack m3 2"]);
    // What is decided needs not be kept any longer.
    world.advance(1);
    touch(&mut world, max..max * 2);
    world.loads.clear();
    assert!(loaded(&mut world, AB));
}

#[test]
fn what_was_said_of_a_conversation_that_left_memory_is_written_all_the_same() {
    let mut world = World::new();
    let (a, b) = (world.connect("a", "1"), world.connect("b", "1"));
    world.frame(a, &send("m1", "b"));
    world.failures = 1;
    world.frame(b, &recv(AB, 1));
    world.advance(1);
    for n in 0..limits::CONVERSATIONS_MAX {
        world.give_request(api_history(&format!("d:x:y{n}"), None, 1));
    }
    world.settle();
    world.loads.clear();
    world.advance(limits::STORE_RETRY_MS);
    assert_eq!(world.loads, [ConversationId::trusted(AB)]);
    assert_eq!(world.store.conversations[AB].members["b"].delivered, 1);
}

#[test]
fn an_event_for_the_application_is_stored_with_its_message() {
    let mut world = World::with(Config { outbox: true, ..config() }, MemStore::default());
    let a = world.connect("a", "1");
    world.frame(a, r#"{"type":"msg.send","id":"m\"1","to":"b","body":{"x":[1]}}"#);
    let Batch { outbox, .. } = &world.last_batch;
    assert_eq!(outbox.len(), 1);
    assert_eq!((outbox[0].kind, &outbox[0].key[..], outbox[0].at), ("message.stored", AB, world.now.wall));
    assert_eq!(
        std::str::from_utf8(&outbox[0].data),
        Ok(&*format!(
            r#"{{"id":"m\"1","conversation_id":"d:a:b","seq":1,"from":"a","ts":{},"body":{{"x":[1]}}}}"#,
            world.now.wall
        ))
    );
    // Nothing else is one.
    world.frame(a, &read(AB, 1));
    let group_id = Some(GroupId::trusted("t"));
    let members = vec![UserId::trusted("a")];
    world.request(Request::GroupCreate { group_id, name: None, members, owner: None, meta: None });
    assert_eq!(world.store.outbox, 1);
}

#[test]
fn clearing_what_nobody_has_written_to_is_nothing() {
    let mut world = World::new();
    let a = world.connect("a", "1");
    let commits = world.commits;
    world.frame(a, r#"{"type":"conversation.clear","id":"q","conversation_id":"d:a:b"}"#);
    assert_eq!((world.brief(a), world.commits), (vec!["ok q".to_owned(), "changed cleared".into()], commits));
    assert!(!world.store.conversations.contains_key(AB));
}

#[test]
fn the_store_is_asked_for_no_more_than_a_page_holds() {
    let mut world = World::new();
    let a = world.connect("a", "1");
    world.frames(&[(a, &send("m1", "b")), (a, &send("m2", "b"))]);
    world.is_silent = true;
    for (rest, from, to, newest) in
        [(r#","after_seq":1"#, 2, 2, false), (r#","before_seq":2"#, 1, 1, true), ("", 1, 2, true)]
    {
        world.frame(a, &history("h", &format!(r#"{rest},"limit":7"#)));
        let asked = world.take_reads().remove(0).1;
        let bytes_max = (world.config.frame_bytes_max + SERVER_FIELDS_BYTES) as u64;
        let conversation = ConversationId::trusted(AB);
        assert_eq!(asked, Query::Messages { conversation, from, to, limit: 7, bytes_max, newest });
    }
}

#[test]
fn a_conversation_that_another_writer_deleted_is_nobodys() {
    let mut world = World::new();
    let a = world.connect("a", "1");
    let ask = |kind: &str, id: &str| format!(r#"{{"type":"{kind}","id":"{id}","conversation_id":"g:t"}}"#);
    world.frame(a, r#"{"type":"conversation.create","id":"q","group_id":"t","members":["b"]}"#);
    world.frame(a, r#"{"type":"msg.send","id":"m1","conversation_id":"g:t","body":1}"#);
    // Somebody else wrote number 2 behind the core's back, and deleted it all before it is looked at again.
    let conversation = world.store.conversations.get_mut("g:t").expect("it exists");
    let mut foreign = conversation.messages[0].clone();
    (foreign.seq, foreign.id) = (2, bowline_protocol::MessageId::trusted("foreign"));
    conversation.messages.push(foreign);
    world.store.ledger.accepted += 1;
    world.take(a);
    (world.backwards, world.hold_reads) = (true, true);
    world.frames(&[
        (a, r#"{"type":"msg.send","id":"m2","conversation_id":"g:t","body":1}"#),
        (a, &ask("conversation.clear", "c")),
        (a, &ask("group.leave", "g")),
    ]);
    assert_eq!(world.brief(a), [""; 0]);
    world.store.conversations.remove("g:t");
    (world.backwards, world.hold_reads) = (false, false);
    world.settle();
    assert_eq!(world.brief(a), ["error forbidden m2", "error forbidden c", "error forbidden g"]);
}
