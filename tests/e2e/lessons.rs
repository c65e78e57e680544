//! What went wrong in systems like this one, each as a test: those that no other file holds. The whole list, with the
//! tests of every row, is in `docs/promises.md`.

use bowline_tests::{Client, Server, Transport, until};
use serde_json::{Value, json};
use std::time::Duration;

on_both![
    a_hundred_silent_drops_in_a_row_all_resume,
    a_resume_leaves_no_hole_or_says_so,
    a_reconnect_of_the_same_device_does_not_kick_itself,
    receipts_of_a_large_group_are_few_and_small,
    a_cleared_count_does_not_come_back,
];

/// The network goes away without a word: the old connections stay open for the server, and end while later ones are
/// at work.
fn a_hundred_silent_drops_in_a_row_all_resume(transport: Transport) {
    let server = Server::with(&[("router.ack_timeout_ms", "60000")]);
    let mut alice = server.connect(transport, "alice");
    let mut bob = server.connect_device(transport, "bob", "phone");
    let session = bob.field("session_id").to_owned();
    let mut old: Vec<Client> = Vec::new();
    let mut sent = 0;
    for drop in 1..=100 {
        if drop % 10 == 1 {
            sent += 1;
            alice.tell("bob", sent);
            bob.expect_push("d:alice:bob", sent);
        }
        let next = server.login("bob").device("phone").resume(&session).connect(transport);
        assert_eq!(next.connected["resumed"], json!(true), "drop {drop}");
        assert_eq!(next.field("session_id"), session, "the session keeps its id");
        old.push(std::mem::replace(&mut bob, next));
        for n in 1..=sent {
            assert_eq!(bob.expect_push("d:alice:bob", n).json["redelivered"], true);
        }
        if drop % 25 == 0 {
            // The old transports end at last; nobody is concerned.
            old.clear();
        }
    }
    bob.recv("d:alice:bob", sent);
    alice.expect_receipt("d:alice:bob", "delivered", "bob", sent);
    alice.tell("bob", "still here?");
    bob.expect_push("d:alice:bob", sent + 1);
    bob.settle();
    let metrics = server.metrics();
    assert_eq!(metrics.get("bowline_router_sessions_resumed_total"), 100.0);
    metrics.assert_ledger_balances();
}

fn a_resume_leaves_no_hole_or_says_so(transport: Transport) {
    let server = Server::start();
    let mut alice = server.connect(transport, "alice");
    let mut bob = server.connect_device(transport, "bob", "phone");
    let session = bob.field("session_id").to_owned();
    alice.tell("bob", 1);
    bob.expect_push("d:alice:bob", 1);
    drop(bob);
    // What is pushed to a connection that has gone unnoticed counts as sent before.
    until("bob is offline", || (server.get("/api/v1/users/bob").json()["online"] == false).then_some(()));
    for n in 2..=40 {
        alice.tell("bob", n);
    }
    let mut bob = server.login("bob").device("phone").resume(&session).connect(transport);
    assert_eq!(bob.connected["resumed"], json!(true));
    for n in 1..=40 {
        let push = bob.expect_push("d:alice:bob", n);
        let redelivered = push.json.get("redelivered").cloned();
        assert_eq!(redelivered, (n == 1).then_some(json!(true)), "{}", push.text);
    }
    // More than is pushed at once: said, and announced.
    let session = bob.field("session_id").to_owned();
    drop(bob);
    for n in 0..600 {
        alice.send(&json!({"type": "msg.send", "id": format!("many{n}"), "to": "bob", "body": n}));
    }
    alice.find("the last ack", |frame| frame.kind() == "msg.ack" && frame.seq() == 640);
    let mut bob = server.login("bob").device("phone").resume(&session).connect(transport);
    assert_eq!(bob.connected["resumed"], json!(false));
    let notice = bob.expect("sync.notice");
    assert_eq!(notice.list_of("conversations")[0]["last_seq"], 640);
    assert_eq!(bob.history_after("d:alice:bob", 0).len(), 640);
    bob.settle();
    assert!(bob.take_kept().iter().all(|frame| frame.kind() != "msg.push"));
}

fn a_reconnect_of_the_same_device_does_not_kick_itself(transport: Transport) {
    let server = Server::start();
    let mut alice = server.connect(transport, "alice");
    let mut bob = server.connect_device(transport, "bob", "phone");
    for n in 1..=20 {
        let newer = server.connect_device(transport, "bob", "phone");
        bob.expect_closed(4501, "replaced");
        bob = newer;
        alice.tell("bob", n);
        bob.expect_push("d:alice:bob", n);
        bob.recv("d:alice:bob", n);
    }
    until("one connection is left of bob's", || {
        let status = server.get("/admin/status").expect(200).json();
        (status["connections"] == 2).then_some(())
    });
}

fn receipts_of_a_large_group_are_few_and_small(transport: Transport) {
    const ONLINE: usize = 60;
    let server = Server::start();
    let mut alice = server.connect(transport, "alice");
    let members: Vec<String> = (0..499).map(|n| format!("member-with-a-rather-long-name-{n:030}")).collect();
    let create = json!({"group_id": "crowd", "members": members});
    alice.ask("conversation.create", create).expect_kind("ok");
    let mut online: Vec<Client> =
        members[..ONLINE].iter().map(|member| server.connect(transport, member)).collect();
    const MESSAGES: u64 = 5;
    for n in 1..=MESSAGES {
        alice.say("g:crowd", n);
        for client in &mut online {
            client.expect_push("g:crowd", n);
            client.read("g:crowd", n);
        }
    }
    alice.find("the last count", |frame| {
        frame.kind() == "msg.receipt"
            && (&frame.json["kind"], frame.seq()) == (&json!("read"), MESSAGES)
            && frame.json["count"] == ONLINE
    });
    let kept = alice.take_kept();
    // What names so many members stays within the limit of a frame.
    let changed = kept.iter().find(|frame| frame.kind() == "conversation.changed").expect("the creation");
    assert!(changed.text.len() <= 32_768 + 1_024, "{} bytes", changed.text.len());
    let receipts: Vec<_> = kept.into_iter().filter(|frame| frame.kind() == "msg.receipt").collect();
    assert!(receipts.iter().all(|frame| frame.json["user_id"] == Value::Null && frame.text.len() < 300));
    // At most one of each kind for every transaction, however many acknowledge.
    let transactions = server.metrics().get("bowline_router_transactions_total");
    assert!((receipts.len() as f64) < 2.0 * transactions, "{} of {transactions}", receipts.len());
}

fn a_cleared_count_does_not_come_back(transport: Transport) {
    let mut server = Server::start();
    let mut alice = server.connect(transport, "alice");
    let mut bob = server.connect_device(transport, "bob", "phone");
    let mut tablet = server.connect_device(transport, "bob", "tablet");
    for n in 1..=5 {
        alice.tell("bob", n);
        tablet.expect_push("d:alice:bob", n);
    }
    bob.tell("alice", "mine");
    assert_eq!(bob.unread("d:alice:bob"), 5, "an own message is not unread");
    bob.demand("conversation.clear", json!({"conversation_id": "d:alice:bob"}));
    // What the other device says of earlier messages brings nothing back.
    tablet.recv("d:alice:bob", 3);
    tablet.read("d:alice:bob", 2);
    tablet.settle();
    assert_eq!((bob.unread("d:alice:bob"), tablet.unread("d:alice:bob")), (0, 0));
    server.kill();
    server.restart();
    let mut tablet = server.connect_device(transport, "bob", "tablet");
    assert_eq!(tablet.unread("d:alice:bob"), 0);
    let quiet = tablet.listen(Duration::from_millis(200));
    assert!(quiet.iter().all(|frame| frame.kind() != "sync.notice"), "{quiet:?}");
    let mut alice = server.connect(transport, "alice");
    alice.tell("bob", 7);
    tablet.expect_push("d:alice:bob", 7);
    assert_eq!(tablet.unread("d:alice:bob"), 1);
}
