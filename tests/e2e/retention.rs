//! Retention: what is deleted by age and by number, what everybody sees of it, and that it balances across kills.

use bowline_tests::{Client, Metrics, Server, Transport, turn, until};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

on_both![
    the_newest_messages_remain_and_everybody_is_told_where_history_begins,
    old_messages_go_and_what_nobody_received_counts_as_expired,
    an_id_outlives_its_message_also_over_a_crash,
];

/// Waits until history begins here.
fn until_first(client: &mut Client, conversation: &str, first: u64) -> Value {
    until("history begins where it should", || {
        let page = client.history(conversation, json!({"limit": 200}));
        (page.number_of("first_seq") == first).then_some(page.json)
    })
}

fn numbers(messages: &[Value]) -> Vec<u64> {
    messages.iter().map(|message| message["seq"].as_u64().expect("a number")).collect()
}

fn the_newest_messages_remain_and_everybody_is_told_where_history_begins(transport: Transport) {
    let server = Server::with(&[("store.retention_messages", "5")]);
    let mut alice = server.connect(transport, "alice");
    let mut bob = server.connect_device(transport, "bob", "phone");
    for n in 1..=3 {
        alice.tell("bob", n);
        bob.expect_push("d:alice:bob", n);
    }
    bob.read("d:alice:bob", 2);
    alice.expect_receipt("d:alice:bob", "read", "bob", 2);
    bob.close();
    for n in 4..=20 {
        alice.tell("bob", n);
    }
    let page = until_first(&mut alice, "d:alice:bob", 16);
    assert_eq!(numbers(page["messages"].as_array().expect("rows")), [16, 17, 18, 19, 20]);
    assert_eq!(page["more"], false);
    let mut bob = server.connect_device(transport, "bob", "phone");
    let notice = bob.expect("sync.notice");
    let expected = json!([{"conversation_id": "d:alice:bob", "last_seq": 20, "first_seq": 16, "unread": 5}]);
    assert_eq!(notice.json["conversations"], expected);
    assert_eq!(numbers(&bob.history_after("d:alice:bob", 2)), [16, 17, 18, 19, 20]);
    let line = bob.conversation("d:alice:bob");
    let of = |name: &str| line[name].as_u64().expect("a number");
    assert_eq!((of("first_seq"), of("read_seq"), of("unread"), of("last_seq")), (16, 15, 5, 20));
    bob.read("d:alice:bob", 20);
    until("everything is accounted for", || {
        let metrics = server.metrics();
        metrics.assert_ledger_balances();
        (metrics.get("bowline_ledger_waiting") == 0.0).then_some(())
    });
    let metrics = server.metrics();
    // Two were received before, five at last; thirteen went before bob came.
    assert_eq!(metrics.get("bowline_ledger_delivered_total"), 7.0);
    assert_eq!(metrics.get("bowline_ledger_expired_total"), 13.0);
    assert_eq!(metrics.get("bowline_router_messages_expired_total"), 15.0);
}

fn old_messages_go_and_what_nobody_received_counts_as_expired(transport: Transport) {
    let server = Server::with(&[("store.retention_ms", "1500")]);
    let mut alice = server.connect(transport, "alice");
    alice.ask("conversation.create", json!({"group_id": "team", "members": ["bob", "carol"]}));
    for n in 1..=4 {
        alice.say("g:team", n);
    }
    let sent = Instant::now();
    let page = until_first(&mut alice, "g:team", 5);
    assert_eq!(page["messages"], json!([]));
    assert!(sent.elapsed() > Duration::from_millis(1400), "gone after {:?}", sent.elapsed());
    let mut bob = server.connect(transport, "bob");
    bob.settle();
    assert!(bob.take_kept().iter().all(|frame| frame.kind() != "sync.notice"), "nothing is left to announce");
    let line = bob.conversation("g:team");
    assert_eq!((&line["last_seq"], &line["unread"], &line["first_seq"]), (&json!(4), &json!(0), &json!(5)));
    assert_eq!(line.get("last_message"), None);
    // Numbers go on, and live delivery does.
    assert_eq!(alice.say("g:team", "later").seq(), 5);
    bob.expect_push("g:team", 5);
    let metrics = server.metrics();
    metrics.assert_ledger_balances();
    assert_eq!(metrics.get("bowline_ledger_expired_total"), 8.0);
}

fn an_id_outlives_its_message_also_over_a_crash(transport: Transport) {
    let mut server = Server::with(&[("store.retention_messages", "1"), ("router.dedupe_ttl_ms", "6000")]);
    let mut alice = server.connect(transport, "alice");
    let first = json!({"type": "msg.send", "id": "first", "to": "bob", "body": 1});
    // Its time is counted from when it was stored, which is before it is acknowledged.
    let sent = Instant::now();
    let ack = alice.request(&first).expect_kind("msg.ack");
    alice.tell("bob", 2);
    until_first(&mut alice, "d:alice:bob", 2);
    assert_eq!(alice.request(&first).json, ack.json);
    server.kill();
    server.restart();
    let mut alice = server.connect(transport, "alice");
    let again = alice.request(&first);
    let other = alice.request(&json!({"type": "msg.send", "id": "first", "to": "bob", "body": "another"}));
    if sent.elapsed() < Duration::from_millis(5500) {
        assert_eq!(again.json, ack.json, "stored nothing new");
        other.expect_error("conflict");
    }
    // And then it is an id like any other.
    let stored = until("the id is free", || {
        let ack = alice.request(&first).expect_kind("msg.ack");
        (ack.seq() != 1).then_some(ack)
    });
    assert!(sent.elapsed() > Duration::from_millis(6000), "free after {:?}", sent.elapsed());
    assert_eq!(stored.seq(), 3);
    server.metrics().assert_ledger_balances();
}

/// What is stored of each conversation, and what the ledger says once nothing moves any more.
fn settled(server: &Server) -> Metrics {
    until("the sweep has come to its end", || {
        server.metrics().assert_ledger_balances();
        let mut watcher = server.login("alice").device("watcher").connect(Transport::Ws);
        let lines = watcher.conversations();
        let kept = |line: &Value| line["last_seq"].as_u64().zip(line["first_seq"].as_u64());
        let done = lines.iter().all(|line| kept(line).is_some_and(|(last, first)| last + 1 - first <= KEPT));
        done.then(|| server.metrics())
    })
}

const KEPT: u64 = 10;

#[test]
fn kills_in_the_middle_of_the_sweep_leave_the_ledger_balanced_and_no_gap() {
    const PEERS: u64 = 20;
    const ROUNDS: u64 = 6;
    const EACH: u64 = 150;
    let _turn = turn();
    let mut server = Server::with(&[("store.retention_messages", &KEPT.to_string())]);
    let mut last = 0;
    for round in 0..ROUNDS {
        let mut alice = server.login("alice").device("phone").connect(Transport::Ws);
        let before = server.metrics().get("bowline_router_messages_expired_total");
        for peer in 0..PEERS {
            for n in 0..EACH {
                let id = format!("{round}-{peer}-{n}");
                alice.send(&json!({"type": "msg.send", "id": id, "to": format!("bob{peer}"), "body": n}));
            }
        }
        for peer in 0..PEERS {
            alice.find("the last ack", |frame| {
                frame.kind() == "msg.ack" && frame.text_of("id") == format!("{round}-{peer}-{}", EACH - 1)
            });
        }
        last += EACH;
        // Some receive, so that expired and delivered meet.
        for peer in (0..PEERS).step_by(3) {
            let mut bob = server.login(&format!("bob{peer}")).device("phone").connect(Transport::Tcp);
            bob.recv(&format!("d:alice:bob{peer}"), last - 3);
            bob.settle();
        }
        if round % 2 == 0 {
            // Sometime while the sweep is at work: it begins after a second.
            until("the sweep has begun", || {
                (server.metrics().get("bowline_router_messages_expired_total") > before).then_some(())
            });
        }
        server.kill();
        server.restart();
        server.metrics().assert_ledger_balances();
    }
    let metrics = settled(&server);
    assert_eq!(metrics.get("bowline_ledger_accepted_total"), (PEERS * ROUNDS * EACH) as f64);
    let mut alice = server.login("alice").device("phone").connect(Transport::Ws);
    for peer in 0..PEERS {
        let conversation = format!("d:alice:bob{peer}");
        let messages = alice.history_after(&conversation, 0);
        assert_eq!(numbers(&messages), Vec::from_iter(last - KEPT + 1..=last), "{conversation}");
        let mut bob = server.login(&format!("bob{peer}")).device("phone").connect(Transport::Tcp);
        let unread = bob.unread(&conversation);
        assert_eq!(unread, KEPT, "{conversation}: nothing that is gone is unread");
    }
    // The same again after another crash.
    server.kill();
    server.restart();
    let again = settled(&server);
    for name in ["accepted_total", "delivered_total", "expired_total", "waiting"] {
        let name = format!("bowline_ledger_{name}");
        assert_eq!(again.get(&name), metrics.get(&name), "{name}");
    }
}
