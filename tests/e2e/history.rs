//! History and the list of conversations: every parameter, pages, visibility, clearing.

use bowline_tests::{Client, Server, Transport, client::fresh_id, token};
use serde_json::{Value, json};

on_both![
    the_newest_messages_come_without_parameters,
    after_seq_goes_up,
    before_seq_goes_down,
    limits_are_checked,
    what_a_history_message_holds,
    pages_end_early_to_stay_within_the_frame_limit,
    both_ways_through_history_see_every_message_once,
    the_list_has_the_newest_activity_first,
    the_list_comes_in_pages,
    the_last_message_is_there_unless_it_is_large,
    clearing_hides_and_marks_read_for_one_user_only,
    clearing_what_waits_expires_it,
    a_cleared_conversation_goes_on,
    the_api_reads_the_same_history,
];

fn seqs(messages: &[Value]) -> Vec<u64> {
    messages.iter().map(|message| message["seq"].as_u64().expect("a number")).collect()
}

/// A conversation of `count` messages from alice to bob.
fn filled(server: &Server, transport: Transport, count: u64) -> (Client, Client) {
    let mut alice = server.connect(transport, "alice");
    for n in 1..=count {
        alice.send(&json!({"type": "msg.send", "id": fresh_id(), "to": "bob", "body": n}));
    }
    for _ in 1..=count {
        alice.expect("msg.ack");
    }
    let bob = server.connect(transport, "bob");
    (alice, bob)
}

fn page(client: &mut Client, fields: Value) -> (Vec<u64>, bool) {
    let page = client.history("d:alice:bob", fields);
    assert_eq!(page.conversation(), "d:alice:bob");
    (seqs(page.list_of("messages")), page.json["more"].as_bool().expect("more is true or false"))
}

fn the_newest_messages_come_without_parameters(transport: Transport) {
    let server = Server::start();
    let (mut alice, mut bob) = filled(&server, transport, 60);
    for client in [&mut alice, &mut bob] {
        assert_eq!(page(client, json!({})), ((11..=60).collect(), true), "50, ascending");
        assert_eq!(page(client, json!({"limit": 60})), ((1..=60).collect(), false));
        assert_eq!(page(client, json!({"limit": 1})), (vec![60], true));
    }
}

fn after_seq_goes_up(transport: Transport) {
    let server = Server::start();
    let (_alice, mut bob) = filled(&server, transport, 10);
    assert_eq!(page(&mut bob, json!({"after_seq": 0, "limit": 4})), ((1..=4).collect(), true));
    assert_eq!(page(&mut bob, json!({"after_seq": 4, "limit": 6})), ((5..=10).collect(), false));
    assert_eq!(page(&mut bob, json!({"after_seq": 4, "limit": 5})), ((5..=9).collect(), true));
    assert_eq!(page(&mut bob, json!({"after_seq": 10})), (vec![], false));
    assert_eq!(page(&mut bob, json!({"after_seq": 1_000_000})), (vec![], false));
}

fn before_seq_goes_down(transport: Transport) {
    let server = Server::start();
    let (_alice, mut bob) = filled(&server, transport, 10);
    assert_eq!(page(&mut bob, json!({"before_seq": 11, "limit": 4})), ((7..=10).collect(), true));
    assert_eq!(page(&mut bob, json!({"before_seq": 7, "limit": 4})), ((3..=6).collect(), true));
    assert_eq!(page(&mut bob, json!({"before_seq": 3, "limit": 4})), ((1..=2).collect(), false));
    assert_eq!(page(&mut bob, json!({"before_seq": 3, "limit": 2})), ((1..=2).collect(), false));
    assert_eq!(page(&mut bob, json!({"before_seq": 1})), (vec![], false));
    assert_eq!(page(&mut bob, json!({"before_seq": 1_000_000, "limit": 1})), (vec![10], true));
}

fn limits_are_checked(transport: Transport) {
    let server = Server::start();
    let (_alice, mut bob) = filled(&server, transport, 201);
    assert_eq!(page(&mut bob, json!({"after_seq": 0, "limit": 200})), ((1..=200).collect(), true));
    for fields in [
        json!({"limit": 0}),
        json!({"limit": 201}),
        json!({"limit": -1}),
        json!({"limit": "10"}),
        json!({"after_seq": -1}),
        json!({"after_seq": 1, "before_seq": 5}),
    ] {
        let mut all = fields;
        all["conversation_id"] = json!("d:alice:bob");
        bob.ask("history", all).expect_error("malformed");
    }
    for limit in [0, 201] {
        bob.ask("conversation.list", json!({"limit": limit})).expect_error("malformed");
    }
}

fn what_a_history_message_holds(transport: Transport) {
    let server = Server::start();
    let mut alice = server.connect(transport, "alice");
    let ack = alice.tell("bob", json!({"text": "hello"}));
    let page = alice.history("d:alice:bob", json!({}));
    assert!(page.text.starts_with(r#"{"type":"history.page","#), "{}", page.text);
    assert_eq!(page.number_of("first_seq"), 1);
    let expected = json!([{
        "seq": 1,
        "id": ack.text_of("id"),
        "from": "alice",
        "ts": ack.number_of("ts"),
        "body": {"text": "hello"},
    }]);
    assert_eq!(page.json["messages"], expected);
}

fn pages_end_early_to_stay_within_the_frame_limit(transport: Transport) {
    let server = Server::start();
    let mut alice = server.connect(transport, "alice");
    let body = "x".repeat(12_000);
    for _ in 0..6 {
        alice.tell("bob", body.as_str());
    }
    // One near the limit, too.
    alice.tell("bob", "y".repeat(32_000));
    for (fields, upwards) in [(json!({"after_seq": 0, "limit": 200}), true), (json!({"limit": 200}), false)] {
        let page = alice.history("d:alice:bob", fields);
        assert!(page.text.len() <= 32_768 + 1024, "a page of {} bytes", page.text.len());
        let got = seqs(page.list_of("messages"));
        assert_eq!(page.json["more"], json!(true));
        assert_eq!(got.contains(&1), upwards, "from the end that was asked for: {got:?}");
        assert_eq!(got.contains(&7), !upwards, "from the end that was asked for: {got:?}");
    }
    assert_eq!(seqs(&alice.history_after("d:alice:bob", 0)), [1, 2, 3, 4, 5, 6, 7]);
}

fn both_ways_through_history_see_every_message_once(transport: Transport) {
    let server = Server::start();
    let (_alice, mut bob) = filled(&server, transport, 130);
    let up = seqs(&bob.history_after("d:alice:bob", 0));
    assert_eq!(up, (1..=130).collect::<Vec<_>>());
    let (mut down, mut before) = (Vec::new(), 131);
    loop {
        let (mut got, more) = page(&mut bob, json!({"before_seq": before, "limit": 17}));
        before = *got.first().expect("a page has a message while there is more");
        got.append(&mut down);
        down = got;
        if !more {
            break;
        }
    }
    assert_eq!(down, up);
}

fn ids(lines: &[Value]) -> Vec<&str> {
    lines.iter().map(|line| line["conversation_id"].as_str().expect("an id")).collect()
}

fn the_list_has_the_newest_activity_first(transport: Transport) {
    let server = Server::start();
    let mut alice = server.connect(transport, "alice");
    let mut carol = server.connect(transport, "carol");
    assert_eq!(alice.conversations(), [] as [Value; 0]);
    for user in ["bob", "carol", "dave"] {
        alice.tell(user, 1);
    }
    assert_eq!(ids(&alice.conversations()), ["d:alice:dave", "d:alice:carol", "d:alice:bob"]);
    let newest = carol.tell("alice", 2).number_of("ts");
    assert_eq!(ids(&alice.conversations()), ["d:alice:carol", "d:alice:dave", "d:alice:bob"]);
    // Of a message and a conversation of the same millisecond either may be the newer one.
    bowline_tests::until("the clock has gone on", || (token::now_ms() > newest).then_some(()));
    alice.demand("conversation.create", json!({"group_id": "crew", "members": ["bob"]}));
    assert_eq!(ids(&alice.conversations())[0], "g:crew");
    let line = alice.conversation("d:alice:carol");
    assert_eq!(
        [&line["kind"], &line["first_seq"], &line["last_seq"], &line["read_seq"], &line["unread"]],
        [&json!("direct"), &json!(1), &json!(2), &json!(0), &json!(1)],
        "{line}"
    );
}

fn the_list_comes_in_pages(transport: Transport) {
    const COUNT: usize = 25;
    let server = Server::start();
    let mut alice = server.connect(transport, "alice");
    for n in 0..COUNT {
        alice.tell(&format!("user{n:02}"), n);
    }
    let (mut all, mut after) = (Vec::new(), None::<String>);
    loop {
        let mut fields = json!({"limit": 10});
        if let Some(after) = &after {
            fields["after"] = json!(after);
        }
        let page = alice.ask("conversation.list", fields).expect_kind("conversation.page");
        let got: Vec<String> = ids(page.list_of("conversations")).into_iter().map(String::from).collect();
        assert!(got.len() <= 10, "{got:?}");
        after = got.last().cloned();
        all.extend(got);
        if page.json["more"] == json!(false) {
            break;
        }
    }
    let expected: Vec<String> = (0..COUNT).rev().map(|n| format!("d:alice:user{n:02}")).collect();
    assert_eq!(all, expected);
}

fn the_last_message_is_there_unless_it_is_large(transport: Transport) {
    let server = Server::start();
    let mut alice = server.connect(transport, "alice");
    let ack = alice.tell("bob", json!({"text": "short"}));
    let last = alice.conversation("d:alice:bob")["last_message"].clone();
    assert_eq!((&last["seq"], &last["id"]), (&json!(1), &json!(ack.text_of("id"))), "{last}");
    assert_eq!((&last["from"], &last["body"]), (&json!("alice"), &json!({"text": "short"})), "{last}");
    assert_eq!(last["ts"], ack.json["ts"]);
    // 1,024 bytes of JSON are taken, one more is not.
    alice.tell("bob", "x".repeat(1022));
    let last = alice.conversation("d:alice:bob")["last_message"].clone();
    assert_eq!(last["body"], json!("x".repeat(1022)), "{last}");
    alice.tell("bob", "x".repeat(1023));
    let last = alice.conversation("d:alice:bob")["last_message"].clone();
    assert_eq!(last.get("body"), None, "the body alone is left out: {last}");
    assert_eq!(last["seq"], 3, "{last}");
}

fn clearing_hides_and_marks_read_for_one_user_only(transport: Transport) {
    let server = Server::start();
    let mut alice = server.connect(transport, "alice");
    let mut phone = server.connect_device(transport, "bob", "phone");
    let mut laptop = server.connect_device(transport, "bob", "laptop");
    for n in 1..=3 {
        alice.tell("bob", n);
        phone.expect_push("d:alice:bob", n);
    }
    phone.recv("d:alice:bob", 3);
    alice.expect_receipt("d:alice:bob", "delivered", "bob", 3);
    phone.demand("conversation.clear", json!({"conversation_id": "d:alice:bob"}));
    let cleared = laptop.expect("conversation.changed");
    assert_eq!((cleared.conversation(), cleared.text_of("change")), ("d:alice:bob", "cleared"));
    let page = laptop.history("d:alice:bob", json!({"after_seq": 0}));
    assert_eq!((page.number_of("first_seq"), page.list_of("messages").len()), (4, 0));
    let line = phone.conversation("d:alice:bob");
    assert_eq!(
        [&line["unread"], &line["first_seq"], &line["last_seq"]],
        [&json!(0), &json!(4), &json!(3)],
        "it stays in the list: {line}"
    );
    assert_eq!(line.get("last_message").filter(|last| !last.is_null()), None, "what is hidden is not shown");
    // Nobody else is concerned.
    let others = alice.listen(std::time::Duration::from_millis(400));
    assert!(
        others.iter().all(|frame| !["conversation.changed", "msg.receipt"].contains(&frame.kind())),
        "{others:?}"
    );
    assert_eq!(seqs(&alice.history_after("d:alice:bob", 0)), [1, 2, 3]);
    server.metrics().assert_ledger_balances();
}

fn clearing_what_waits_expires_it(transport: Transport) {
    let server = Server::start();
    let mut alice = server.connect(transport, "alice");
    for n in 1..=4 {
        alice.tell("bob", n);
    }
    assert_eq!(server.metrics().get("bowline_ledger_waiting"), 4.0);
    let mut bob = server.connect_device(transport, "bob", "phone");
    bob.expect("sync.notice");
    bob.demand("conversation.clear", json!({"conversation_id": "d:alice:bob"}));
    let metrics = server.metrics();
    assert_eq!(metrics.get("bowline_ledger_waiting"), 0.0);
    assert_eq!(metrics.get("bowline_ledger_expired_total"), 4.0);
    assert_eq!(metrics.get("bowline_ledger_delivered_total"), 0.0);
    metrics.assert_ledger_balances();
    bob.close();
    let mut bob = server.connect_device(transport, "bob", "phone");
    bob.settle();
    bob.expect_no("sync.notice");
    alice.expect_no("msg.receipt");
}

fn a_cleared_conversation_goes_on(transport: Transport) {
    let server = Server::start();
    let mut alice = server.connect(transport, "alice");
    let mut bob = server.connect(transport, "bob");
    alice.tell("bob", 1);
    bob.expect_push("d:alice:bob", 1);
    bob.demand("conversation.clear", json!({"conversation_id": "d:alice:bob"}));
    assert_eq!(alice.tell("bob", 2).seq(), 2);
    bob.expect_push("d:alice:bob", 2);
    assert_eq!(bob.unread("d:alice:bob"), 1);
    assert_eq!(seqs(&bob.history_after("d:alice:bob", 0)), [2]);
    bob.read("d:alice:bob", 2);
    alice.expect_receipt("d:alice:bob", "read", "bob", 2);
    server.metrics().assert_ledger_balances();
}

fn the_api_reads_the_same_history(transport: Transport) {
    let server = Server::start();
    let (mut alice, _bob) = filled(&server, transport, 10);
    let url = "/api/v1/conversations/d:alice:bob/messages";
    for (query, fields) in [
        ("", json!({})),
        ("?limit=3", json!({"limit": 3})),
        ("?after_seq=4&limit=2", json!({"after_seq": 4, "limit": 2})),
        ("?before_seq=4", json!({"before_seq": 4})),
    ] {
        let answer = server.get(&format!("{url}{query}")).expect(200).json();
        let page = alice.history("d:alice:bob", fields);
        for field in ["conversation_id", "first_seq", "messages", "more"] {
            assert_eq!(answer[field], page.json[field], "{field} of {query:?}");
        }
    }
    server.get(&format!("{url}?limit=0")).expect_refusal(400);
    server.get(&format!("{url}?limit=201")).expect_refusal(400);
    server.get(&format!("{url}?after_seq=1&before_seq=2")).expect_refusal(400);
    server.get("/api/v1/conversations/d:alice:nobody/messages").expect_refusal(404);
    server.get("/api/v1/conversations/g:none/messages").expect_refusal(404);
}
