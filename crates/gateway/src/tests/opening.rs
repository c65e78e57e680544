//! Ways to get an identity, and what a session starts with.

use super::rig::*;
use bowline_protocol::{
    CloseCode,
    link::{Down, Up},
};
use bytes::Bytes;
use std::io::Write;

#[test]
fn every_way_to_give_the_token() {
    let rig = Rig::start();
    let ways = [
        ("/ws", "Authorization: Bearer alice\r\n", false),
        ("/ws?token=alice", "", false),
        ("/ws", "Sec-WebSocket-Protocol: bowline.v1.json, bearer.alice\r\n", true),
        ("/ws?token=later-alice", "", false),
        ("/ws", "Sec-WebSocket-Protocol: bowline.v1.json\r\nAuthorization: Bearer alice\r\n", true),
    ];
    for (target, headers, subprotocol) in ways {
        let (mut client, answer) = rig.upgrade(target, headers);
        assert!(answer.starts_with("HTTP/1.1 101 Switching Protocols\r\n"), "{answer}");
        assert!(answer.contains("Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n"), "{answer}");
        assert_eq!(
            answer.contains("\r\nSec-WebSocket-Protocol: bowline.v1.json\r\n"),
            subprotocol,
            "{answer}"
        );
        let connected = client.expect(r#"{"type":"connected","session_id":""#);
        assert_eq!(field(&connected, "user_id"), "alice");
        client.say(r#"{"type":"ping"}"#);
        client.expect(r#"{"type":"pong"}"#);
    }
    for kind in BOTH {
        for token in ["alice", "later-alice"] {
            let mut client = rig.plain(kind);
            client.connect(token);
            assert_eq!(field(&client.expect(r#"{"type":"connected""#), "user_id"), "alice");
        }
    }
}

#[test]
fn connected_says_what_holds() {
    let rig = Rig::start();
    let mut seen = std::collections::HashSet::new();
    for kind in BOTH {
        let mut client = rig.plain(kind);
        client.say(
            r#"{"type":"connect","token":"alice","device_id":"phone","device_class":"ios","channel":"app"}"#,
        );
        let connected = client.expect(r#"{"type":"connected""#);
        for (name, value) in [
            ("user_id", "alice"),
            ("device_id", "phone"),
            ("node_id", "n1"),
            ("resumed", "false"),
            ("ping_after_ms", "45000"),
            ("close_after_ms", "90000"),
            ("max_frame_bytes", "32768"),
            ("version", "1"),
        ] {
            assert_eq!(field(&connected, name), value, "{name}");
        }
        assert!(wall_ms().abs_diff(field(&connected, "server_time").parse().unwrap()) < 60_000);
        assert_eq!(field(&connected, "session_id").len(), 32);
        assert!(seen.insert(field(&connected, "session_id").to_owned()));
        assert!(seen.insert(field(&connected, "connection_id").to_owned()));
    }
    let opens = rig.router.wait("two opens", |got| {
        let opens: Vec<_> = got
            .iter()
            .filter_map(|up| match &up.event {
                Up::Open(open) => Some((up.from.login, open.clone())),
                _ => None,
            })
            .collect();
        (opens.len() == 2).then_some(opens)
    });
    for (_, open) in &opens {
        assert_eq!((open.device.as_str(), open.channel.as_deref()), ("phone", Some("app")));
    }
    assert_ne!(opens[0].0, opens[1].0, "no two logins are equal");
}

#[test]
fn a_device_without_a_name_gets_one() {
    let rig = Rig::start();
    let (mut client, _) = rig.upgrade("/ws?token=alice", "");
    let connected = client.expect(r#"{"type":"connected""#);
    assert_eq!(field(&connected, "device_id").len(), 16);
    let (mut bound, _) = rig.upgrade("/ws?token=alice%2Fphone", "");
    assert_eq!(field(&bound.expect(r#"{"type":"connected""#), "device_id"), "phone");
}

#[test]
fn frames_behind_connect_are_processed_after_it_however_they_are_cut() {
    let rig = Rig::start();
    for kind in BOTH {
        for token in ["alice", "later-alice"] {
            let mut bytes = framed(kind, 1, format!(r#"{{"type":"connect","token":"{token}"}}"#).as_bytes());
            for id in 0..5 {
                bytes.extend(framed(kind, 1, send_frame(&id.to_string()).as_bytes()));
            }
            for step in [bytes.len(), 7, 1] {
                let mut client = rig.plain(kind);
                for piece in bytes.chunks(step) {
                    client.raw(piece);
                }
                client.expect(r#"{"type":"connected""#);
                for id in 0..5 {
                    client.expect(&format!(r#"{{"type":"msg.ack","id":"{id}""#));
                }
            }
        }
    }
}

#[test]
fn frames_right_behind_the_handshake_wait_for_it() {
    let rig = Rig::start();
    for target in ["/ws?token=alice", "/ws?token=later-alice"] {
        let mut client = rig.dial(Kind::Ws);
        let mut bytes = request(target, "").into_bytes();
        bytes.extend(framed(Kind::Ws, 1, send_frame("1").as_bytes()));
        client.raw(&bytes);
        assert!(client.http_answer().starts_with("HTTP/1.1 101"));
        client.expect(r#"{"type":"connected""#);
        client.expect(r#"{"type":"msg.ack","id":"1""#);
    }
}

#[test]
fn pings_are_answered_before_and_after_and_by_a_router_that_does_nothing() {
    let rig = Rig::start();
    rig.router.set(|m| (m.acks, m.accepts) = (false, true));
    for kind in BOTH {
        let mut client = rig.plain(kind);
        client.say("ping");
        assert_eq!(client.text(), "pong");
        client.say(r#"{"type":"ping","data":"x\"y"}"#);
        assert_eq!(client.text(), r#"{"type":"pong","data":"x\"y"}"#);
        client.connect("alice");
        client.expect(r#"{"type":"connected""#);
        client.say(&send_frame("1"));
        client.say("ping");
        assert_eq!(client.text(), "pong");
        if kind == Kind::Ws {
            client.raw(&framed(kind, 9, b"hey"));
            assert_eq!(client.next(), Got::Pong(b"hey".to_vec()));
        }
    }
}

#[test]
fn binary_bodies_take_the_binary_form_both_ways() {
    let rig = Rig::start();
    rig.router.set(|m| m.acks = false);
    for kind in BOTH {
        let mut client = rig.client(kind, "alice");
        let header = br#"{"type":"msg.send","id":"b","to":"bob"}"#;
        let mut payload = (header.len() as u32).to_be_bytes().to_vec();
        payload.extend_from_slice(header);
        payload.extend_from_slice(b"\0\xff");
        client.raw(&framed(kind, 2, &payload));
        let conn = rig.router.wait("a binary body", |got| {
            got.iter().find_map(|up| match &up.event {
                Up::Frame(frame) if format!("{frame:?}").contains("Binary(b\"\\0\\xff\")") => {
                    Some(up.from.clone())
                }
                _ => None,
            })
        });
        let conn = if kind == Kind::Tcp { rig.router.opened("alice", 1) } else { conn };
        let frame = bowline_protocol::Frame {
            json: Bytes::from_static(b"{}"),
            body: Some(Bytes::from_static(b"\0\xff")),
        };
        rig.router.tell(&conn, Down::Frame { frame, decided: 1, answer: false });
        assert_eq!(client.next(), Got::Binary(b"\0\0\0\x02{}\0\xff".to_vec()));
    }
}

#[test]
fn status_counts_what_is_authenticated() {
    let rig = Rig::start();
    let _idle = rig.plain(Kind::Ws);
    let _one = rig.client(Kind::Ws, "alice");
    let _two = rig.client(Kind::Tcp, "alice");
    let _three = rig.client(Kind::Tcp, "bob");
    let status = rig.handle.status();
    assert_eq!((status.connections, status.users, status.devices), (3, 2, 2));
    assert_eq!((status.ws.connections, status.tcp.connections), (1, 2));
    assert_eq!((status.ws.path.as_str(), status.ws.address), ("/ws", Some(rig.addresses.ws)));
    drop(_two);
    rig.until("one less", |handle| handle.status().connections == 2);
    drop(_one);
    rig.until("alice is gone", |handle| handle.status().users == 1);
}

#[test]
fn what_opens_no_web_socket_goes_to_the_http_server_with_its_bytes() {
    let rig = Rig::start();
    let text = "POST /v1/messages HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n{}";
    let mut client = rig.dial(Kind::Ws);
    let (head, tail) = text.split_at(20);
    client.raw(head.as_bytes());
    client.raw(tail.as_bytes());
    let mut list = rig.http.lock().unwrap();
    while list.is_empty() {
        list = rig.handed.wait(list).unwrap();
    }
    let (mut stream, read) = list.pop().unwrap();
    drop(list);
    let mut bytes = read.to_vec();
    stream.set_nonblocking(false).unwrap();
    while bytes.len() < text.len() {
        let mut more = [0; 100];
        let n = std::io::Read::read(&mut stream, &mut more).unwrap();
        bytes.extend_from_slice(&more[..n]);
    }
    assert_eq!(bytes, text.as_bytes());
    stream.write_all(b"HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n").unwrap();
    assert!(client.http_answer().starts_with("HTTP/1.1 204"));

    // The next request on that connection is an upgrade: it is handed back.
    client.raw(request("/ws?token=alice", "").as_bytes());
    let mut head = vec![0; 4096];
    let n = std::io::Read::read(&mut stream, &mut head).unwrap();
    stream.set_nonblocking(true).unwrap();
    rig.handle.adopt(stream.into(), Bytes::copy_from_slice(&head[..n]));
    assert!(client.http_answer().starts_with("HTTP/1.1 101"));
    client.expect(r#"{"type":"connected""#);
    assert_eq!(rig.handle.metrics().handed_to_http_total, 1);
}

#[test]
fn a_refresh_extends_the_session_of_the_same_user_only() {
    let rig = Rig::start();
    for kind in BOTH {
        let mut client = rig.client(kind, "alice");
        client.say(r#"{"type":"auth.refresh","id":"r","token":"later-alice"}"#);
        client.expect(r#"{"type":"ok","id":"r"}"#);
        client.say(r#"{"type":"auth.refresh","id":"s","token":"bob"}"#);
        client.expect(r#"{"type":"error","code":"identity_mismatch""#);
        client.say(r#"{"type":"auth.refresh","id":"t","token":"bad"}"#);
        let error = client.expect(r#"{"type":"error","code":"unauthenticated""#);
        assert_eq!(field(&error, "id"), "t");
    }
}

#[test]
fn nobody_speaks_for_somebody_else() {
    let rig = Rig::start();
    let mut client = rig.client(Kind::Ws, "alice");
    client.say(r#"{"type":"msg.send","id":"1","to":"bob","body":1,"from":"mallory"}"#);
    client.expect(r#"{"type":"error","code":"identity_mismatch""#);
    client.connect("bob");
    client.expect(r#"{"type":"error","code":"identity_mismatch""#);
    client.say(&send_frame("2"));
    client.expect(r#"{"type":"msg.ack","id":"2""#);
    assert_eq!(rig.router.count(|up| matches!(up, Up::Frame(_))), 1);
    assert_eq!(rig.handle.metrics().identity_mismatch_total, 1);
    let failures = rig.handle.metrics().ingress_failures_total;
    assert!(failures.contains(&("msg.send", "identity_mismatch", 1)), "{failures:?}");
}

#[test]
fn every_end_of_every_kind_leaves_no_trace() {
    let rig = Rig::start();
    for round in 0..200 {
        let kind = BOTH[round % 2];
        let mut client = rig.client(kind, &format!("user{}", round % 7));
        match round % 5 {
            0 => drop(client),
            1 => {
                socket2::SockRef::from(&client.stream).set_linger(Some(std::time::Duration::ZERO)).unwrap();
            }
            2 => client.raw(&[0xff; 9]),
            3 => client.raw(b"\x81"),
            _ => client.say(&send_frame("1")),
        }
    }
    rig.until("all are gone", |handle| handle.remaining() == 0);
    let status = rig.handle.status();
    assert_eq!((status.connections, status.users, status.devices), (0, 0, 0));
    rig.router.wait("200 ends", |got| {
        let ends = got.iter().filter(|up| matches!(up.event, Up::Closed(_))).count();
        assert!(ends <= 200);
        (ends == 200).then_some(())
    });
    let metrics = rig.handle.metrics();
    let closed: u64 = metrics.closed_total.iter().map(|(_, n)| n).sum();
    assert_eq!((metrics.opened_total, closed), (200, 200), "{:?}", metrics.closed_total);
    assert!(metrics.closed(CloseCode::Bye) >= 120);
}
