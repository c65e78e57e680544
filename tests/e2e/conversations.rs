//! Direct conversations: sending, acks, pushes, once, in order, with any body.

use bowline_tests::{
    Client, Server, Transport,
    client::{Frame, fresh_id},
};
use serde_json::{Value, json};

on_both![
    direct_messages_travel_both_ways,
    a_direct_conversation_is_named_by_its_users_in_byte_order,
    every_conversation_counts_for_itself_from_1,
    every_device_of_both_users_has_the_message_and_the_sending_one_the_ack,
    all_devices_see_the_same_order,
    messages_sent_without_waiting_are_stored_in_that_order,
    the_same_id_again_gives_the_same_ack_and_stores_nothing,
    the_same_id_from_another_device_gives_the_same_ack,
    the_same_id_with_another_body_or_target_is_a_conflict,
    ids_are_unique_per_sender_only,
    a_from_that_is_not_the_bound_user_is_refused_and_not_stored,
    a_conversation_of_others_is_forbidden_existing_or_not,
    refused_messages_take_no_number,
    a_frame_that_fails_does_not_stop_the_ones_after_it,
    bodies_travel_unread,
    binary_bodies_travel_as_bytes_and_rest_as_base64,
    binary_and_text_clients_understand_each_other,
    a_body_of_the_largest_size_travels,
    unknown_fields_are_ignored,
    bad_fields_are_malformed_and_name_the_frame,
    a_message_reaches_the_other_transport,
];

fn pair(server: &Server, transport: Transport) -> (Client, Client) {
    (server.connect_device(transport, "alice", "a1"), server.connect_device(transport, "bob", "b1"))
}

fn direct_messages_travel_both_ways(transport: Transport) {
    let server = Server::start();
    let (mut alice, mut bob) = pair(&server, transport);
    let before = bowline_tests::token::now_ms();
    let id = fresh_id();
    let ack = alice.request(&json!({"type": "msg.send", "id": id, "to": "bob", "body": {"text": "hello"}}));
    let ack = ack.expect_kind("msg.ack");
    assert_eq!((ack.text_of("id"), ack.conversation(), ack.seq()), (&*id, "d:alice:bob", 1));
    assert!(ack.number_of("ts").abs_diff(before) < 10_000, "ts is in milliseconds: {}", ack.text);
    let push = bob.expect_push("d:alice:bob", 1);
    assert!(push.text.starts_with(r#"{"type":"msg.push","#), "{}", push.text);
    assert_eq!((push.text_of("id"), push.text_of("from")), (&*id, "alice"));
    assert_eq!(push.json["body"], json!({"text": "hello"}));
    assert_eq!(push.json["ts"], ack.json["ts"]);
    assert_eq!(push.json.get("redelivered"), None);
    // Back, by the name of the conversation.
    let ack = bob.say("d:alice:bob", "hello yourself");
    assert_eq!((ack.conversation(), ack.seq()), ("d:alice:bob", 2));
    assert_eq!(alice.expect_push("d:alice:bob", 2).json["body"], "hello yourself");
    alice.expect_no("msg.push");
}

fn a_direct_conversation_is_named_by_its_users_in_byte_order(transport: Transport) {
    let server = Server::start();
    let mut small = server.connect(transport, "b");
    assert_eq!(small.tell("Z", 1).conversation(), "d:Z:b", "upper case sorts before lower case");
    assert_eq!(small.tell("bb", 1).conversation(), "d:b:bb");
    assert_eq!(small.tell("é", 1).conversation(), "d:b:é");
    let wrong = small.ask("msg.send", json!({"conversation_id": "d:b:Z", "body": 1}));
    assert_eq!(wrong.kind(), "error", "the other order names nothing: {}", wrong.text);
}

fn every_conversation_counts_for_itself_from_1(transport: Transport) {
    let server = Server::start();
    let (mut alice, _bob) = pair(&server, transport);
    for seq in 1..=3 {
        assert_eq!(alice.tell("bob", seq).seq(), seq);
        assert_eq!(alice.tell("carol", seq).seq(), seq);
    }
}

fn every_device_of_both_users_has_the_message_and_the_sending_one_the_ack(transport: Transport) {
    let server = Server::start();
    let mut sending = server.connect_device(transport, "alice", "a1");
    let mut others = [
        server.connect_device(transport, "alice", "a2"),
        server.connect_device(transport, "bob", "b1"),
        server.connect_device(transport, "bob", "b2"),
    ];
    let ack = sending.tell("bob", "to all");
    for device in &mut others {
        let push = device.expect_push(ack.conversation(), 1);
        assert_eq!((push.text_of("from"), &push.json["body"]), ("alice", &json!("to all")));
    }
    sending.expect_no("msg.push");
    for device in &mut others {
        device.expect_no("msg.ack");
    }
}

fn all_devices_see_the_same_order(transport: Transport) {
    const EACH: u64 = 100;
    let server = Server::start();
    let mut senders = [
        server.connect_device(transport, "alice", "a1"),
        server.connect_device(transport, "alice", "a2"),
        server.connect_device(transport, "bob", "b1"),
    ];
    let mut watchers =
        [server.connect_device(transport, "alice", "a3"), server.connect_device(transport, "bob", "b2")];
    for n in 0..EACH {
        for (s, sender) in senders.iter_mut().enumerate() {
            let to = if s == 2 { "alice" } else { "bob" };
            sender.send(&json!({"type": "msg.send", "id": format!("{s}-{n}"), "to": to, "body": n}));
        }
    }
    let order = |watcher: &mut Client| -> Vec<String> {
        (1..=3 * EACH).map(|seq| watcher.expect_push("d:alice:bob", seq).text_of("id").to_owned()).collect()
    };
    let [first, second] = watchers.each_mut().map(order);
    assert_eq!(first, second, "two devices of two users");
    for s in 0..3 {
        let prefix = format!("{s}-");
        let own: Vec<&String> = first.iter().filter(|id| id.starts_with(&prefix)).collect();
        let sent: Vec<String> = (0..EACH).map(|n| format!("{s}-{n}")).collect();
        assert!(own.iter().copied().eq(sent.iter()), "sender {s} kept its order: {own:?}");
    }
    // What the senders themselves saw, acks and pushes, is the same order.
    for sender in &mut senders {
        let mut seen: Vec<(u64, String)> = Vec::new();
        while seen.len() < first.len() {
            let frame = sender.find("ack or push", |frame| ["msg.ack", "msg.push"].contains(&frame.kind()));
            seen.push((frame.seq(), frame.text_of("id").to_owned()));
        }
        seen.sort();
        assert!(seen.iter().map(|(_, id)| id).eq(first.iter()), "acks and pushes make up all numbers");
    }
}

fn messages_sent_without_waiting_are_stored_in_that_order(transport: Transport) {
    const COUNT: u64 = 500;
    let server = Server::start();
    let (mut alice, mut bob) = pair(&server, transport);
    for n in 1..=COUNT {
        alice.send(&json!({"type": "msg.send", "id": format!("n{n}"), "to": "bob", "body": n}));
    }
    for n in 1..=COUNT {
        let ack = alice.expect("msg.ack");
        assert_eq!((ack.text_of("id"), ack.seq()), (&*format!("n{n}"), n));
        assert_eq!(bob.expect_push("d:alice:bob", n).json["body"], n);
    }
}

fn the_same_id_again_gives_the_same_ack_and_stores_nothing(transport: Transport) {
    let server = Server::start();
    let (mut alice, mut bob) = pair(&server, transport);
    let send = json!({"type": "msg.send", "id": "once", "to": "bob", "body": {"n": 1}});
    let first = alice.request(&send).expect_kind("msg.ack");
    let second = alice.request(&send).expect_kind("msg.ack");
    assert_eq!(first.json, second.json);
    // The same conversation named the other way is the same target.
    let named = json!({"type": "msg.send", "id": "once", "conversation_id": "d:alice:bob", "body": {"n": 1}});
    assert_eq!(alice.request(&named).json, first.json);
    // And back to back, before the first is stored.
    let twice = json!({"type": "msg.send", "id": "twice", "to": "bob", "body": 2});
    alice.send(&twice);
    alice.send(&twice);
    let acks = [alice.reply("twice"), alice.reply("twice")];
    assert_eq!(acks[0].json, acks[1].json);
    assert_eq!(acks[0].seq(), 2);
    bob.expect_push("d:alice:bob", 1);
    bob.expect_push("d:alice:bob", 2);
    bob.expect_no("msg.push");
    assert_eq!(alice.history_after("d:alice:bob", 0).len(), 2);
}

fn the_same_id_from_another_device_gives_the_same_ack(transport: Transport) {
    let server = Server::start();
    let (mut alice, _bob) = pair(&server, transport);
    let mut other = server.connect_device(transport, "alice", "a2");
    let send = json!({"type": "msg.send", "id": "once", "to": "bob", "body": 1});
    let first = alice.request(&send).expect_kind("msg.ack");
    let second = other.request(&send).expect_kind("msg.ack");
    assert_eq!(first.json, second.json);
    // The API speaks for the same sender.
    let answer = server.send(&json!({"id": "once", "from": "alice", "to": "bob", "body": 1}));
    assert_eq!((answer["seq"].as_u64(), &answer["ts"]), (Some(1), &first.json["ts"]));
}

fn the_same_id_with_another_body_or_target_is_a_conflict(transport: Transport) {
    let server = Server::start();
    let (mut alice, mut bob) = pair(&server, transport);
    let send = |to: &str, body: Value| json!({"type": "msg.send", "id": "once", "to": to, "body": body});
    alice.request(&send("bob", json!(1))).expect_kind("msg.ack");
    alice.request(&send("bob", json!(2))).expect_error("conflict");
    alice.request(&send("carol", json!(1))).expect_error("conflict");
    let ack = alice.request(&send("bob", json!(1))).expect_kind("msg.ack");
    assert_eq!(ack.seq(), 1, "the first stays good");
    bob.expect_push("d:alice:bob", 1);
    bob.expect_no("msg.push");
    assert_eq!(alice.conversations().len(), 1, "carol has nothing");
}

fn ids_are_unique_per_sender_only(transport: Transport) {
    let server = Server::start();
    let (mut alice, mut bob) = pair(&server, transport);
    let from = |to: &str, body: &str| json!({"type": "msg.send", "id": "1", "to": to, "body": body});
    assert_eq!(alice.request(&from("bob", "a")).expect_kind("msg.ack").seq(), 1);
    assert_eq!(bob.request(&from("alice", "b")).expect_kind("msg.ack").seq(), 2);
}

fn a_from_that_is_not_the_bound_user_is_refused_and_not_stored(transport: Transport) {
    let server = Server::start();
    let (mut alice, mut bob) = pair(&server, transport);
    let forged = alice.ask("msg.send", json!({"to": "bob", "from": "mallory", "body": "forged"}));
    forged.expect_error("identity_mismatch");
    let honest = alice.ask("msg.send", json!({"to": "bob", "from": "alice", "body": "honest"}));
    assert_eq!(honest.expect_kind("msg.ack").seq(), 1);
    assert_eq!(bob.expect_push("d:alice:bob", 1).json["body"], "honest");
    let mut mallory = server.connect(transport, "mallory");
    assert_eq!(mallory.conversations(), [] as [Value; 0]);
}

fn a_conversation_of_others_is_forbidden_existing_or_not(transport: Transport) {
    let server = Server::start();
    let (mut alice, mut bob) = pair(&server, transport);
    alice.tell("bob", "private");
    bob.expect_push("d:alice:bob", 1);
    let mut eve = server.connect(transport, "eve");
    for conversation in ["d:alice:bob", "d:alice:nobody", "g:no-such-group"] {
        eve.ask("msg.send", json!({"conversation_id": conversation, "body": 1})).expect_error("forbidden");
        eve.ask("history", json!({"conversation_id": conversation})).expect_error("forbidden");
        eve.ask("conversation.clear", json!({"conversation_id": conversation})).expect_error("forbidden");
    }
    eve.read("d:alice:bob", 1);
    eve.expect("error").expect_error("forbidden");
    alice.expect_no("msg.receipt");
    bob.expect_no("msg.push");
}

fn refused_messages_take_no_number(transport: Transport) {
    let server = Server::start();
    let (mut alice, _bob) = pair(&server, transport);
    assert_eq!(alice.tell("bob", 1).seq(), 1);
    alice.ask("msg.send", json!({"to": "bob", "from": "eve", "body": 1})).expect_error("identity_mismatch");
    alice.ask("msg.send", json!({"to": "bob"})).expect_error("malformed");
    assert_eq!(alice.tell("bob", 2).seq(), 2);
}

fn a_frame_that_fails_does_not_stop_the_ones_after_it(transport: Transport) {
    let server = Server::start();
    let (mut alice, _bob) = pair(&server, transport);
    let message = |id: &str| json!({"type": "msg.send", "id": id, "to": "bob", "body": id});
    alice.send(&message("1"));
    alice.send(&json!({"type": "no.such.type", "id": "2"}));
    alice.send_text("no JSON");
    alice.send(&json!({"type": "history", "id": "3", "conversation_id": "d:bob:carol"}));
    alice.send(&message("4"));
    // What is answered at once does not wait for what has to be stored.
    let mut answers: Vec<Frame> = (0..5)
        .map(|_| alice.find("an answer", |frame| ["msg.ack", "error"].contains(&frame.kind())))
        .collect();
    let mut take = |id: Option<&str>| {
        let place = answers.iter().position(|frame| frame.json.get("id").and_then(Value::as_str) == id);
        answers.remove(place.unwrap_or_else(|| panic!("no answer to {id:?}")))
    };
    assert_eq!(take(Some("1")).expect_kind("msg.ack").seq(), 1);
    take(Some("2")).expect_error("unknown_type");
    take(None).expect_error("malformed");
    take(Some("3")).expect_error("forbidden");
    assert_eq!(take(Some("4")).expect_kind("msg.ack").seq(), 2);
}

fn bodies_travel_unread(transport: Transport) {
    let server = Server::start();
    let (mut alice, mut bob) = pair(&server, transport);
    // As text: a server that reads numbers or escapes would write some of these another way.
    let bodies = [
        "null",
        "true",
        r#""text""#,
        r#""""#,
        "[]",
        "{}",
        "1.0",
        "123456789012345678901234567890",
        r#""é \" \\ \n \u0000 漢 🪢""#,
        r#"{"b":1,"a":2,"b":3}"#,
        r#"{"type":"msg.push","seq":99,"from":"mallory"}"#,
        r#"[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]"#,
    ];
    for (n, body) in bodies.iter().enumerate() {
        alice.send_text(&format!(r#"{{"type":"msg.send","id":"b{n}","to":"bob","body":{body}}}"#));
    }
    let mut texts = Vec::new();
    for n in 1..=bodies.len() {
        let push = bob.find("the push", |frame| frame.kind() == "msg.push");
        assert_eq!(push.seq(), n as u64);
        texts.push(push.text);
    }
    for (text, body) in texts.iter().zip(bodies) {
        assert!(text.contains(&format!(r#""body":{body}"#)), "{body} became {text}");
    }
    let page = bob.history("d:alice:bob", json!({"after_seq": 0}));
    for body in bodies {
        assert!(page.text.contains(&format!(r#""body":{body}"#)), "{body} became {}", page.text);
    }
}

fn binary_bodies_travel_as_bytes_and_rest_as_base64(transport: Transport) {
    use base64::{Engine, engine::general_purpose::STANDARD};
    let server = Server::start();
    let (mut alice, mut bob) = pair(&server, transport);
    let bytes: Vec<u8> = (0..=255).cycle().take(5000).collect();
    let header = json!({"type": "msg.send", "id": "bytes", "to": "bob"});
    alice.writer.send_binary(&header, &bytes).expect("the connection is open");
    assert_eq!(alice.reply("bytes").expect_kind("msg.ack").seq(), 1);
    let push = bob.expect_push("d:alice:bob", 1);
    assert_eq!(push.body.as_deref(), Some(&*bytes), "bytes, not Base64");
    assert_eq!((push.text_of("from"), push.json.get("body")), ("alice", None));
    // Back, and an empty one.
    let header = json!({"type": "msg.send", "id": "none", "conversation_id": "d:alice:bob"});
    bob.writer.send_binary(&header, &[]).expect("the connection is open");
    assert_eq!(alice.expect_push("d:alice:bob", 2).body.as_deref(), Some(&[] as &[u8]));
    // Where only JSON can travel.
    let history = bob.history_after("d:alice:bob", 0);
    assert_eq!(history[0]["body"], json!(STANDARD.encode(&bytes)));
    assert_eq!((&history[0]["body_encoding"], &history[1]["body"]), (&json!("base64"), &json!("")));
    let page = server.get("/api/v1/conversations/d:alice:bob/messages").expect(200).json();
    assert_eq!(page["messages"][0]["body"], json!(STANDARD.encode(&bytes)));
    assert_eq!(page["messages"][0]["body_encoding"], "base64");
    // The same bytes again are the same message; others are not.
    let header = json!({"type": "msg.send", "id": "bytes", "to": "bob"});
    alice.writer.send_binary(&header, &bytes).expect("the connection is open");
    assert_eq!(alice.reply("bytes").expect_kind("msg.ack").seq(), 1);
    alice.writer.send_binary(&header, b"others").expect("the connection is open");
    alice.reply("bytes").expect_error("conflict");
}

fn binary_and_text_clients_understand_each_other(transport: Transport) {
    let server = Server::start();
    let (mut alice, mut bob) = pair(&server, transport);
    // Any frame may come in the binary form; without a body of its own it is just a frame.
    alice.writer.send_binary(&json!({"type": "ping", "data": "b"}), &[]).expect("the connection is open");
    assert_eq!(alice.expect("pong").text_of("data"), "b");
    alice.tell("bob", "text");
    let header = json!({"type": "msg.send", "id": "bytes", "to": "bob"});
    alice.writer.send_binary(&header, b"\x00\xff").expect("the connection is open");
    assert_eq!(bob.expect_push("d:alice:bob", 1).json["body"], "text");
    assert_eq!(bob.expect_push("d:alice:bob", 2).body.as_deref(), Some(b"\x00\xff".as_slice()));
}

fn a_body_of_the_largest_size_travels(transport: Transport) {
    let server = Server::start();
    let (mut alice, mut bob) = pair(&server, transport);
    let head = r#"{"type":"msg.send","id":"big","to":"bob","body":""#;
    let body = "x".repeat(32_768 - head.len() - 2);
    let frame = format!("{head}{body}\"}}");
    assert_eq!(frame.len(), 32_768);
    alice.send_text(&frame);
    assert_eq!(alice.reply("big").expect_kind("msg.ack").seq(), 1);
    let push = bob.expect_push("d:alice:bob", 1);
    assert_eq!(push.text_of("body"), body);
    assert!(push.text.len() <= 32_768 + 1024, "the server adds at most 1 KiB: {}", push.text.len());
    let page = bob.history("d:alice:bob", json!({}));
    assert_eq!(page.json["messages"][0]["body"], json!(body));
    assert!(page.text.len() <= 32_768 + 1024, "a page is no larger: {}", page.text.len());
}

fn unknown_fields_are_ignored(transport: Transport) {
    let server = Server::start();
    let (mut alice, _bob) = pair(&server, transport);
    let ack = alice.ask("msg.send", json!({"to": "bob", "body": 1, "later": [1, {"x": null}], "seq": "?"}));
    assert_eq!(ack.expect_kind("msg.ack").seq(), 1);
}

fn bad_fields_are_malformed_and_name_the_frame(transport: Transport) {
    let server = Server::start();
    let (mut alice, _bob) = pair(&server, transport);
    let long = "x".repeat(65);
    for (kind, fields) in [
        ("msg.send", json!({"to": "bob"})),
        ("msg.send", json!({"body": 1})),
        ("msg.send", json!({"to": "bob", "conversation_id": "d:alice:bob", "body": 1})),
        ("msg.send", json!({"to": "with:colon", "body": 1})),
        ("msg.send", json!({"to": "", "body": 1})),
        ("msg.send", json!({"to": long, "body": 1})),
        ("msg.send", json!({"to": "line\nbreak", "body": 1})),
        ("msg.send", json!({"to": 7, "body": 1})),
        ("history", json!({})),
        ("history", json!({"conversation_id": "d:alice:bob", "limit": "many"})),
        ("auth.refresh", json!({})),
        ("conversation.create", json!({"members": "bob"})),
    ] {
        let answer = alice.ask(kind, fields.clone());
        answer.expect_error("malformed");
    }
    // Ids that are none.
    for id in [json!(7), json!(""), json!(long), json!(null)] {
        alice.send(&json!({"type": "msg.send", "id": id, "to": "bob", "body": 1}));
        alice.expect("error").expect_error("malformed");
    }
    alice.send(&json!({"type": "msg.recv", "conversation_id": "d:alice:bob", "seq": -1}));
    alice.expect("error").expect_error("malformed");
    alice.send(&json!({"type": "ping", "data": "x".repeat(1025)}));
    alice.expect("error").expect_error("malformed");
    alice.send(&json!({"no": "type"}));
    alice.expect("error").expect_error("malformed");
    assert_eq!(alice.tell("bob", "all is well").seq(), 1);
}

fn a_message_reaches_the_other_transport(transport: Transport) {
    let server = Server::start();
    let other = if transport == Transport::Ws { Transport::Tcp } else { Transport::Ws };
    let mut alice = server.connect(transport, "alice");
    let mut bob = server.connect(other, "bob");
    let ack = alice.tell("bob", "across");
    assert_eq!(bob.expect_push(ack.conversation(), 1).json["body"], "across");
    bob.recv(ack.conversation(), 1);
    alice.expect_receipt(ack.conversation(), "delivered", "bob", 1);
}
