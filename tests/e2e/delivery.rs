//! Delivery: again until acknowledged, then the inbox; what is announced at login and what is pushed.

use bowline_tests::{Client, Server, Transport, client::fresh_id};
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

on_both![
    an_unacknowledged_push_is_repeated_three_times_and_then_waits,
    an_acknowledged_push_is_not_repeated,
    progress_starts_the_timer_again,
    acknowledging_one_device_says_nothing_about_another,
    what_waits_is_announced_by_one_notice_and_not_pushed,
    many_waiting_conversations_are_announced_in_pages,
    five_hundred_waiting_messages_come_in_pages,
    nothing_is_announced_when_nothing_waits,
    later_messages_are_pushed_at_once_though_earlier_ones_were_not_fetched,
    a_push_above_an_announced_gap_is_not_repeated,
    a_new_device_starts_where_its_user_stands,
    an_offline_device_catches_up_while_another_is_online,
    the_senders_other_device_catches_up_too,
    an_own_message_does_not_wait_for_the_device_that_sent_it,
    positions_never_move_back,
];

/// The lines of every page of `sync.notice`.
fn notices(client: &mut Client) -> BTreeMap<String, Value> {
    let mut lines = BTreeMap::new();
    loop {
        let page = client.expect("sync.notice");
        assert!(!page.list_of("conversations").is_empty(), "a page has a line: {}", page.text);
        assert!(page.text.len() <= 32_768 + 1024, "a page of {} bytes", page.text.len());
        for line in page.list_of("conversations") {
            let id = line["conversation_id"].as_str().expect("an id").to_owned();
            assert!(lines.insert(id, line.clone()).is_none(), "announced twice: {line}");
        }
        match &page.json["more"] {
            Value::Bool(true) => {}
            Value::Bool(false) | Value::Null => return lines,
            other => panic!("more is {other}"),
        }
    }
}

fn an_unacknowledged_push_is_repeated_three_times_and_then_waits(transport: Transport) {
    const TIMEOUT: Duration = Duration::from_millis(400);
    let server = Server::with(&[("router.ack_timeout_ms", "400")]);
    let mut alice = server.connect(transport, "alice");
    let mut bob = server.connect_device(transport, "bob", "phone");
    let id = alice.tell("bob", "are you there?").text_of("id").to_owned();
    let mut at: Vec<Instant> = Vec::new();
    for attempt in 0..4 {
        let push = bob.expect_push("d:alice:bob", 1);
        assert_eq!((push.text_of("id"), push.text_of("body")), (&*id, "are you there?"));
        let repeated = push.json.get("redelivered").cloned();
        assert_eq!(repeated, (attempt > 0).then_some(json!(true)), "attempt {attempt}: {}", push.text);
        at.push(push.at);
    }
    for (n, pair) in at.windows(2).enumerate() {
        let (waited, due) = (pair[1] - pair[0], TIMEOUT * (1 << n));
        assert!(waited + Duration::from_millis(100) > due, "attempt {} came after {waited:?}", n + 2);
        assert!(waited < due + Duration::from_secs(3), "attempt {} came after {waited:?}", n + 2);
    }
    // There is no fifth.
    let more = bob.listen(TIMEOUT * 9);
    assert!(more.iter().all(|frame| frame.kind() != "msg.push"), "{more:?}");
    // It waits.
    bob.close();
    let mut bob = server.connect_device(transport, "bob", "phone");
    let waiting = notices(&mut bob);
    assert_eq!(waiting["d:alice:bob"]["last_seq"], 1);
    assert_eq!(bob.history_after("d:alice:bob", 0)[0]["body"], "are you there?");
    let metrics = server.metrics();
    assert_eq!(metrics.get("bowline_ledger_waiting"), 1.0);
    metrics.assert_ledger_balances();
}

fn an_acknowledged_push_is_not_repeated(transport: Transport) {
    let server = Server::with(&[("router.ack_timeout_ms", "300")]);
    let mut alice = server.connect(transport, "alice");
    let mut bob = server.connect(transport, "bob");
    for n in 1..=3 {
        alice.tell("bob", n);
        bob.expect_push("d:alice:bob", n);
    }
    bob.recv("d:alice:bob", 3);
    let more = bob.listen(Duration::from_millis(1500));
    assert!(more.iter().all(|frame| frame.kind() != "msg.push"), "{more:?}");
    let metrics = server.metrics();
    assert_eq!(metrics.get("bowline_ledger_delivered_total"), 3.0);
    assert_eq!(metrics.get("bowline_ledger_waiting"), 0.0);
    metrics.assert_ledger_balances();
}

fn progress_starts_the_timer_again(transport: Transport) {
    const TIMEOUT: Duration = Duration::from_millis(1000);
    let server = Server::with(&[("router.ack_timeout_ms", "1000")]);
    let mut alice = server.connect(transport, "alice");
    let mut bob = server.connect(transport, "bob");
    alice.tell("bob", 1);
    alice.tell("bob", 2);
    bob.expect_push("d:alice:bob", 1);
    bob.expect_push("d:alice:bob", 2);
    // Half a timeout later the first is acknowledged: the second has a whole timeout from now on.
    let quiet = bob.listen(TIMEOUT / 2);
    assert!(quiet.iter().all(|frame| frame.kind() != "msg.push"), "{quiet:?}");
    bob.recv("d:alice:bob", 1);
    let acknowledged = Instant::now();
    let again = bob.expect_push("d:alice:bob", 2);
    assert_eq!(again.json["redelivered"], json!(true));
    let waited = again.at - acknowledged;
    assert!(waited + Duration::from_millis(100) > TIMEOUT, "it came again after {waited:?}");
}

fn acknowledging_one_device_says_nothing_about_another(transport: Transport) {
    let server = Server::with(&[("router.ack_timeout_ms", "300")]);
    let mut alice = server.connect(transport, "alice");
    let mut phone = server.connect_device(transport, "bob", "phone");
    let mut laptop = server.connect_device(transport, "bob", "laptop");
    alice.tell("bob", 1);
    phone.expect_push("d:alice:bob", 1);
    laptop.expect_push("d:alice:bob", 1);
    phone.recv("d:alice:bob", 1);
    let again = laptop.expect_push("d:alice:bob", 1);
    assert_eq!(again.json["redelivered"], json!(true));
    phone.expect_no("msg.push");
}

fn what_waits_is_announced_by_one_notice_and_not_pushed(transport: Transport) {
    const WAITING: u64 = 500;
    let server = Server::start();
    let mut bob = server.connect_device(transport, "bob", "phone");
    let mut alice = server.connect(transport, "alice");
    alice.tell("bob", 0);
    bob.expect_push("d:alice:bob", 1);
    bob.recv("d:alice:bob", 1);
    alice.expect_receipt("d:alice:bob", "delivered", "bob", 1);
    bob.close();
    for n in 1..=WAITING {
        alice.send(&json!({"type": "msg.send", "id": fresh_id(), "to": "bob", "body": n}));
    }
    for _ in 1..=WAITING {
        alice.expect("msg.ack");
    }
    let mut bob = server.connect_device(transport, "bob", "phone");
    let lines = notices(&mut bob);
    assert_eq!(lines.len(), 1, "{lines:?}");
    let line = &lines["d:alice:bob"];
    assert_eq!((line["last_seq"].as_u64(), line["first_seq"].as_u64()), (Some(WAITING + 1), Some(1)));
    assert_eq!(line["unread"].as_u64(), Some(WAITING + 1));
    let history = bob.history_after("d:alice:bob", 1);
    assert!(history.iter().map(|message| message["seq"].as_u64()).eq((2..=WAITING + 1).map(Some)));
    // History moves no position; the acknowledgement does.
    bob.expect_no("msg.push");
    bob.close();
    let mut bob = server.connect_device(transport, "bob", "phone");
    assert_eq!(notices(&mut bob).len(), 1, "it still waits");
    bob.recv("d:alice:bob", WAITING + 1);
    alice.expect_receipt("d:alice:bob", "delivered", "bob", WAITING + 1);
    bob.close();
    let mut bob = server.connect_device(transport, "bob", "phone");
    bob.settle();
    bob.expect_no("sync.notice");
}

fn many_waiting_conversations_are_announced_in_pages(transport: Transport) {
    const SENDERS: usize = 600;
    let server = Server::start();
    // Long names, so that one page cannot hold them.
    let sender = |n: usize| format!("sender-with-a-rather-long-name-{n:04}");
    let batch: Vec<Value> = (0..SENDERS)
        .map(|n| json!({"id": format!("first-{n}"), "from": sender(n), "to": "bob", "body": n}))
        .collect();
    let answer = server.send(&json!(batch));
    assert_eq!(answer["results"].as_array().map(Vec::len), Some(SENDERS));
    let mut bob = server.connect_device(transport, "bob", "phone");
    // A device that is new to the server starts where its user stands, which is at nothing.
    let lines = notices(&mut bob);
    assert_eq!(lines.len(), SENDERS);
    for (id, line) in &lines {
        assert_eq!((line["last_seq"].as_u64(), line["unread"].as_u64()), (Some(1), Some(1)), "{id}: {line}");
    }
    let metrics = server.metrics();
    assert_eq!(metrics.get("bowline_ledger_waiting"), SENDERS as f64);
    metrics.assert_ledger_balances();
}

/// One line at login, then the client pages; never one push for each message.
fn five_hundred_waiting_messages_come_in_pages(transport: Transport) {
    let server = Server::start();
    let mut alice = server.connect(transport, "alice");
    for n in 1..=500 {
        alice.send(&json!({"type": "msg.send", "id": format!("m{n}"), "to": "bob", "body": n}));
    }
    alice.find("the last ack", |frame| frame.kind() == "msg.ack" && frame.seq() == 500);
    let mut bob = server.connect_device(transport, "bob", "phone");
    let lines = notices(&mut bob);
    assert_eq!(lines.len(), 1);
    assert_eq!(
        (&lines["d:alice:bob"]["last_seq"], &lines["d:alice:bob"]["unread"]),
        (&json!(500), &json!(500))
    );
    let (mut pages, mut messages) = (0, Vec::new());
    loop {
        let after = messages.len() as u64;
        let page = bob.history("d:alice:bob", json!({"after_seq": after, "limit": 200}));
        pages += 1;
        messages.extend(page.list_of("messages").iter().map(|message| message["body"].as_u64()));
        if page.json["more"] == false {
            break;
        }
    }
    assert!(pages <= 10, "{pages} pages");
    assert_eq!(messages, (1..=500).map(Some).collect::<Vec<_>>());
    bob.recv("d:alice:bob", 500);
    bob.settle();
    assert!(bob.take_kept().iter().all(|frame| frame.kind() != "msg.push"), "nothing was pushed");
    alice.expect_receipt("d:alice:bob", "delivered", "bob", 500);
    server.metrics().assert_ledger_balances();
}

fn nothing_is_announced_when_nothing_waits(transport: Transport) {
    let server = Server::start();
    let mut bob = server.connect_device(transport, "bob", "phone");
    bob.settle();
    bob.expect_no("sync.notice");
    bob.tell("alice", "my own message is nothing that waits for me");
    bob.close();
    let mut bob = server.connect_device(transport, "bob", "phone");
    bob.settle();
    bob.expect_no("sync.notice");
}

fn later_messages_are_pushed_at_once_though_earlier_ones_were_not_fetched(transport: Transport) {
    let server = Server::start();
    let mut alice = server.connect(transport, "alice");
    alice.tell("bob", "before");
    let mut bob = server.connect(transport, "bob");
    notices(&mut bob);
    for n in 2..=10 {
        alice.tell("bob", n);
    }
    // No msg.recv in between.
    for n in 2..=10 {
        let push = bob.expect_push("d:alice:bob", n);
        assert_eq!(push.json.get("redelivered"), None);
    }
}

fn a_push_above_an_announced_gap_is_not_repeated(transport: Transport) {
    let server = Server::with(&[("router.ack_timeout_ms", "200")]);
    let mut alice = server.connect(transport, "alice");
    alice.tell("bob", "before");
    let mut bob = server.connect_device(transport, "bob", "phone");
    notices(&mut bob);
    alice.tell("bob", "after");
    bob.expect_push("d:alice:bob", 2);
    let more = bob.listen(Duration::from_millis(1500));
    assert!(more.iter().all(|frame| frame.kind() != "msg.push"), "{more:?}");
    // Once the gap is filled, both are acknowledged together.
    assert_eq!(bob.history_after("d:alice:bob", 0).len(), 2);
    bob.recv("d:alice:bob", 2);
    alice.expect_receipt("d:alice:bob", "delivered", "bob", 2);
}

fn a_new_device_starts_where_its_user_stands(transport: Transport) {
    let server = Server::start();
    let mut alice = server.connect(transport, "alice");
    let mut phone = server.connect_device(transport, "bob", "phone");
    for n in 1..=3 {
        alice.tell("bob", n);
        phone.expect_push("d:alice:bob", n);
    }
    phone.recv("d:alice:bob", 2);
    alice.expect_receipt("d:alice:bob", "delivered", "bob", 2);
    let mut laptop = server.connect_device(transport, "bob", "laptop");
    let lines = notices(&mut laptop);
    assert_eq!(lines["d:alice:bob"]["last_seq"], 3, "the third was delivered to nobody yet");
    phone.recv("d:alice:bob", 3);
    alice.expect_receipt("d:alice:bob", "delivered", "bob", 3);
    let mut watch = server.connect_device(transport, "bob", "watch");
    watch.settle();
    watch.expect_no("sync.notice");
    assert_eq!(watch.history_after("d:alice:bob", 0).len(), 3, "though it may look back");
}

fn an_offline_device_catches_up_while_another_is_online(transport: Transport) {
    let server = Server::start();
    let mut alice = server.connect(transport, "alice");
    let laptop = server.connect_device(transport, "bob", "laptop");
    laptop.close();
    let mut phone = server.connect_device(transport, "bob", "phone");
    alice.tell("bob", 1);
    phone.expect_push("d:alice:bob", 1);
    phone.read("d:alice:bob", 1);
    alice.expect_receipt("d:alice:bob", "read", "bob", 1);
    let mut laptop = server.connect_device(transport, "bob", "laptop");
    let lines = notices(&mut laptop);
    let line = &lines["d:alice:bob"];
    assert_eq!((&line["last_seq"], &line["unread"]), (&json!(1), &json!(0)), "it was read elsewhere: {line}");
}

fn the_senders_other_device_catches_up_too(transport: Transport) {
    let server = Server::start();
    let laptop = server.connect_device(transport, "alice", "laptop");
    laptop.close();
    let mut phone = server.connect_device(transport, "alice", "phone");
    phone.tell("bob", "from the phone");
    let mut laptop = server.connect_device(transport, "alice", "laptop");
    let lines = notices(&mut laptop);
    assert_eq!((&lines["d:alice:bob"]["last_seq"], &lines["d:alice:bob"]["unread"]), (&json!(1), &json!(0)));
}

fn an_own_message_does_not_wait_for_the_device_that_sent_it(transport: Transport) {
    let server = Server::start();
    let mut alice = server.connect_device(transport, "alice", "phone");
    let mut bob = server.connect(transport, "bob");
    alice.tell("bob", 1);
    bob.tell("alice", 2);
    alice.expect_push("d:alice:bob", 2);
    alice.recv("d:alice:bob", 2);
    bob.expect_receipt("d:alice:bob", "delivered", "alice", 2);
    alice.tell("bob", 3);
    alice.close();
    let mut alice = server.connect_device(transport, "alice", "phone");
    alice.settle();
    alice.expect_no("sync.notice");
}

fn positions_never_move_back(transport: Transport) {
    let server = Server::start();
    let mut alice = server.connect(transport, "alice");
    let mut bob = server.connect_device(transport, "bob", "phone");
    for n in 1..=5 {
        alice.tell("bob", n);
        bob.expect_push("d:alice:bob", n);
    }
    bob.read("d:alice:bob", 5);
    alice.expect_receipt("d:alice:bob", "read", "bob", 5);
    alice.take_kept();
    bob.read("d:alice:bob", 2);
    bob.recv("d:alice:bob", 1);
    bob.settle();
    assert_eq!(bob.unread("d:alice:bob"), 0);
    alice.expect_no("msg.receipt");
    bob.close();
    let mut bob = server.connect_device(transport, "bob", "phone");
    bob.settle();
    bob.expect_no("sync.notice");
    assert_eq!(bob.conversation("d:alice:bob")["read_seq"], 5);
}
