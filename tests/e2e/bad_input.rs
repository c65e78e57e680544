//! What no client should send: each fault has its answer, and the server goes on.

use bowline_tests::{PATIENCE, Server, Transport, client::Way, raw, until};
use serde_json::json;
use std::{io::Write, time::Duration};

on_both![
    a_frame_above_the_limit_closes_1009,
    a_binary_frame_above_the_limit_closes_1009,
    the_limit_is_configurable,
    invalid_utf_8_closes_1007,
    the_tenth_unparsable_text_in_a_row_closes_4505,
    nine_unparsable_texts_and_a_good_frame_close_nothing,
    unparsable_texts_of_every_kind_are_malformed,
    half_a_frame_and_then_the_end_harms_nobody,
    who_ends_its_output_is_answered_first,
    a_large_answer_reaches_who_has_ended_its_output,
    an_error_repeats_any_id,
    garbage_harms_nobody,
    abrupt_ends_leave_nothing_behind,
];

fn a_frame_above_the_limit_closes_1009(transport: Transport) {
    let server = Server::start();
    let mut client = server.connect(transport, "alice");
    let frame = json!({"type": "msg.send", "id": "big", "to": "bob", "body": "x".repeat(32_768)});
    client.send(&frame);
    client.expect_closed(1009, "too-large");
    let mut bob = server.connect(transport, "bob");
    assert_eq!(bob.conversations(), [] as [serde_json::Value; 0], "nothing of it was stored");
}

fn a_binary_frame_above_the_limit_closes_1009(transport: Transport) {
    let server = Server::start();
    let mut client = server.connect(transport, "alice");
    let header = json!({"type": "msg.send", "id": "big", "to": "bob"});
    client.writer.send_binary(&header, &[7; 32_768]).expect("the connection is open");
    client.expect_closed(1009, "too-large");
}

fn the_limit_is_configurable(transport: Transport) {
    let server = Server::with(&[("gateway.max_frame_bytes", "2048")]);
    let mut client = server.connect(transport, "alice");
    assert_eq!(client.connected["max_frame_bytes"], 2048);
    client.tell("bob", "x".repeat(1900));
    client.send(&json!({"type": "msg.send", "id": "big", "to": "bob", "body": "x".repeat(2048)}));
    client.expect_closed(1009, "too-large");
}

#[test]
fn a_fragmented_message_above_the_limit_closes_1009() {
    let server = Server::start();
    let mut client = server.connect(Transport::Ws, "alice");
    client.writer.send_bytes(&raw::ws_frame(0x01, &[b' '; 20_000])).expect("the connection is open");
    client.writer.send_bytes(&raw::ws_frame(0x00, &[b' '; 20_000])).expect("the connection is open");
    client.expect_closed(1009, "too-large");
}

#[test]
fn fragments_and_control_frames_between_them_are_one_message() {
    let server = Server::start();
    let mut client = server.connect(Transport::Ws, "alice");
    let text = json!({"type": "msg.send", "id": "parts", "to": "bob", "body": "é in parts"}).to_string();
    let bytes = text.as_bytes();
    // Cut within the two bytes of é as well.
    let cut = text.find('é').expect("it is there") + 1;
    let mut all = raw::ws_frame(0x01, &bytes[..5]);
    all.extend(raw::ws_frame(0x89, b"between"));
    all.extend(raw::ws_frame(0x00, &bytes[5..cut]));
    all.extend(raw::ws_frame(0x00, &[]));
    all.extend(raw::ws_frame(0x80, &bytes[cut..]));
    client.writer.send_bytes(&all).expect("the connection is open");
    assert_eq!(client.reply("parts").expect_kind("msg.ack").seq(), 1);
    assert_eq!(client.history_after("d:alice:bob", 0)[0]["body"], "é in parts");
}

#[test]
fn a_tcp_length_above_the_limit_closes_1009_before_the_bytes_come() {
    let server = Server::start();
    for length in [32_769_u32, 1 << 24, 0x7fff_ffff, 0xffff_ffff] {
        let mut client = server.connect(Transport::Tcp, "alice");
        client.writer.send_bytes(&length.to_be_bytes()).expect("the connection is open");
        client.expect_closed(1009, "too-large");
    }
    // A stranger is told no less.
    let mut stranger =
        server.login("x").way(Way::FirstFrame).open(Transport::Tcp).expect("no identity is needed to open");
    stranger.writer.send_bytes(&u32::MAX.to_be_bytes()).expect("the connection is open");
    stranger.expect_closed(1009, "too-large");
}

#[test]
fn an_empty_tcp_frame_is_malformed() {
    let server = Server::start();
    let mut client = server.connect(Transport::Tcp, "alice");
    client.writer.send_bytes(&[0; 4]).expect("the connection is open");
    client.expect("error").expect_error("malformed");
    assert_eq!(client.tell("bob", 1).seq(), 1);
}

fn invalid_utf_8_closes_1007(transport: Transport) {
    let server = Server::start();
    for fault in [
        b"\xff".as_slice(),
        b"{\"type\":\"ping\",\"data\":\"\xc3\x28\"}",
        b"\xed\xa0\x80",
        b"\xf4\x90\x80\x80",
    ] {
        let mut client = server.connect(transport, "alice");
        let bytes = match transport {
            Transport::Ws => raw::ws_frame(0x81, fault),
            Transport::Tcp => raw::tcp_frame(fault),
        };
        client.writer.send_bytes(&bytes).expect("the connection is open");
        client.expect_closed(1007, "malformed");
    }
}

fn the_tenth_unparsable_text_in_a_row_closes_4505(transport: Transport) {
    let server = Server::start();
    let mut client = server.connect(transport, "alice");
    for _ in 0..10 {
        client.send_text("no JSON");
    }
    let ending = client.expect_closed(4505, "policy");
    let errors = ending.frames.iter().filter(|frame| frame.kind() == "error").count();
    assert!((9..=10).contains(&errors), "{errors} of them were answered");
    for error in &ending.frames {
        error.expect_error("malformed");
    }
}

fn nine_unparsable_texts_and_a_good_frame_close_nothing(transport: Transport) {
    let server = Server::start();
    let mut client = server.connect(transport, "alice");
    for round in 1..=3 {
        for _ in 0..9 {
            client.send_text("no JSON");
        }
        for _ in 0..9 {
            client.expect("error").expect_error("malformed");
        }
        assert_eq!(client.tell("bob", round).seq(), round);
    }
}

fn unparsable_texts_of_every_kind_are_malformed(transport: Transport) {
    let server = Server::start();
    let mut client = server.connect(transport, "alice");
    let deep = "[".repeat(20_000);
    for text in
        ["{", "[]", "1", "null", "\"ping\"", "{}{}", "{\"type\":\"ping\"} x", "{'type':'ping'}", &deep]
    {
        client.send_text(text);
        client.expect("error").expect_error("malformed");
        // A good one in between, so that they are not in a row.
        client.send(&json!({"type": "ping"}));
        client.expect("pong");
    }
}

#[test]
fn a_broken_websocket_frame_closes_1002() {
    let server = Server::start();
    let mut unmasked = vec![0x81, 4];
    unmasked.extend_from_slice(b"ping");
    let long_control = raw::ws_frame(0x89, &[0; 126]);
    for (fault, bytes) in [
        ("unmasked", unmasked),
        ("reserved bit", raw::ws_frame(0xc1, b"ping")),
        ("reserved opcode", raw::ws_frame(0x83, b"ping")),
        ("continuation of nothing", raw::ws_frame(0x80, b"ping")),
        ("fragmented control frame", raw::ws_frame(0x09, b"ping")),
        ("long control frame", long_control),
    ] {
        let mut client = server.connect(Transport::Ws, "alice");
        client.writer.send_bytes(&bytes).expect("the connection is open");
        let ending = client.wait_closed();
        assert_eq!(ending.close.map(|(code, _)| code), Some(1002), "{fault}");
    }
}

#[test]
fn after_the_close_frame_the_socket_ends() {
    let server = Server::start();
    let mut stream = raw::connect(server.ws());
    let bearer = format!("Bearer {}", bowline_tests::token::of("alice"));
    stream.write_all(&raw::upgrade("/ws", &[("Authorization", &bearer)])).expect("the connection is open");
    assert_eq!(raw::read_response(&mut stream).status, 101);
    // A close from the client is answered and the socket ended.
    stream.write_all(&raw::ws_frame(0x88, &1000_u16.to_be_bytes())).expect("the connection is open");
    let (bytes, ended) = raw::read_to_end(&mut stream, PATIENCE);
    assert!(ended, "the socket stays open");
    assert!(bytes.windows(4).any(|part| part == [0x88, 2, 0x03, 0xe8]), "no close frame in {bytes:?}");
    // A client that never answers the server's close loses the socket within a few seconds.
    let mut stream = raw::connect(server.ws());
    stream.write_all(&raw::upgrade("/ws", &[("Authorization", &bearer)])).expect("the connection is open");
    assert_eq!(raw::read_response(&mut stream).status, 101);
    stream.write_all(&raw::ws_frame(0x81, b"\xff")).expect("the connection is open");
    let (_, ended) = raw::read_to_end(&mut stream, Duration::from_secs(10));
    assert!(ended, "the socket stays open");
}

fn half_a_frame_and_then_the_end_harms_nobody(transport: Transport) {
    let server = Server::start();
    let mut watcher = server.connect(transport, "alice");
    let frame = json!({"type": "msg.send", "id": "half", "to": "alice", "body": "half"}).to_string();
    let bytes = match transport {
        Transport::Ws => raw::ws_frame(0x81, frame.as_bytes()),
        Transport::Tcp => raw::tcp_frame(frame.as_bytes()),
    };
    for cut in [1, 3, 5, bytes.len() - 1] {
        let mut client = server.connect(transport, "bob");
        client.writer.send_bytes(&bytes[..cut]).expect("the connection is open");
        drop(client);
    }
    until("only the watcher is left", || (server.status()["connections"] == 1).then_some(()));
    watcher.expect_no("msg.push");
    assert_eq!(watcher.tell("bob", 1).seq(), 1);
}

fn who_ends_its_output_is_answered_first(transport: Transport) {
    let server = Server::start();
    let login = server.login("alice").way(Way::FirstFrame);
    let mut client = login.open(transport).expect("the server takes connections");
    client.send(&login.frame());
    for n in 0..100 {
        client.send(&json!({"type": "msg.send", "id": format!("m{n}"), "to": "bob", "body": n}));
    }
    client.writer.end().expect("the connection is open");
    let ending = client.wait_closed();
    let acks: Vec<u64> =
        ending.frames.iter().filter(|frame| frame.kind() == "msg.ack").map(|frame| frame.seq()).collect();
    assert_eq!(acks, (1..=100).collect::<Vec<_>>());
    until("nobody is left", || (server.status()["connections"] == 0).then_some(()));
}

fn a_large_answer_reaches_who_has_ended_its_output(transport: Transport) {
    let server = Server::start();
    let mut sender = server.connect(transport, "alice");
    for _ in 0..20 {
        sender.tell("bob", "x".repeat(30_000));
    }
    let mut client = server.login("bob").receive_buffer(4096).connect(transport);
    for after in 0..20 {
        let id = format!("h{after}");
        client.send(
            &json!({"type": "history", "id": id, "conversation_id": "d:alice:bob", "after_seq": after}),
        );
    }
    client.writer.end().expect("the connection is open");
    let ending = client.wait_closed();
    assert_eq!(ending.frames.iter().filter(|frame| frame.kind() == "history.page").count(), 20);
}

fn an_error_repeats_any_id(transport: Transport) {
    let server = Server::start();
    let mut client = server.connect(transport, "alice");
    let rows = [
        (json!({"type": "msg.recv", "conversation_id": "g:none", "seq": 1}), "forbidden"),
        (json!({"type": "msg.read", "conversation_id": "g:none", "seq": 1}), "forbidden"),
        (json!({"type": "msg.recv", "conversation_id": "d:alice:bob", "seq": -1}), "malformed"),
        (json!({"type": "connect", "token": "any"}), "identity_mismatch"),
        (json!({"type": "ping", "data": 5}), "malformed"),
        (json!({"type": "nothing"}), "unknown_type"),
    ];
    for (n, (mut frame, code)) in rows.into_iter().enumerate() {
        frame["id"] = format!("e{n}").into();
        client.send(&frame);
        let answer = client.expect("error");
        answer.expect_error(code);
        assert_eq!(answer.json["id"], frame["id"], "{}", answer.text);
    }
}

fn garbage_harms_nobody(transport: Transport) {
    let server = Server::start();
    let mut watcher = server.connect(transport, "alice");
    let address = match transport {
        Transport::Ws => server.ws(),
        Transport::Tcp => server.tcp(),
    };
    let mut state: u32 = 7;
    let noise: Vec<u8> = std::iter::repeat_with(|| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    })
    .take(100_000)
    .collect();
    for bytes in [
        noise.as_slice(),
        b"\r\n\r\n\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /ws HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        &[0; 4096],
        &[0xff; 4096],
    ] {
        let mut stream = raw::connect(address);
        // The server may end the connection in the middle of it.
        let _ = stream.write_all(bytes);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let (_, ended) = raw::read_to_end(&mut stream, PATIENCE);
        assert!(ended, "a connection of garbage stays open: {:?}...", &bytes[..4]);
    }
    assert_eq!(watcher.tell("bob", 1).seq(), 1);
    assert_eq!(server.status()["connections"], 1);
}

fn abrupt_ends_leave_nothing_behind(transport: Transport) {
    const COUNT: usize = 1000;
    let _turn = bowline_tests::turn();
    let server = Server::start();
    let mut left = Vec::new();
    for n in 0..COUNT {
        let mut client = server.connect_device(transport, &format!("user{}", n % 300), &format!("d{n}"));
        match n % 4 {
            // Ended at once, without a word.
            0 => drop(client),
            // As it should be.
            1 => client.close(),
            // In the middle of a frame.
            2 => {
                client.writer.send_bytes(&[0x81]).expect("the connection is open");
                drop(client);
            }
            // With an answer under way; these go a little later.
            _ => {
                client.send(&json!({"type": "conversation.list", "id": "l"}));
                left.push(client);
                if left.len() > 50 {
                    left.clear();
                }
            }
        }
    }
    drop(left);
    let status =
        until("the tables are empty", || Some(server.status()).filter(|status| status["connections"] == 0));
    assert_eq!((&status["users"], &status["devices"]), (&json!(0), &json!(0)), "{status}");
    for transport in ["ws", "tcp"] {
        assert_eq!(status["transports"][transport]["connections"], 0, "{status}");
    }
    let state = server.get("/api/v1/users/user3").expect(200).json();
    assert_eq!(state["online"], json!(false), "{state}");
    server.connect(transport, "alice");
}
