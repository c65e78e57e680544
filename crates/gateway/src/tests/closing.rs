//! Every close code, and the order of the last words.

use super::rig::*;
use crate::Config;
use bowline_protocol::{CloseCode, link::Down};
use std::sync::Arc;

#[test]
fn faults_of_framing() {
    let rig = Rig::new(Config { max_frame_bytes: 1000, ..config() });
    let big = "x".repeat(1001);
    let rows: [(Kind, Vec<u8>, u16, &str); 7] = [
        (Kind::Ws, framed(Kind::Ws, 1, big.as_bytes()), 1009, "too-large"),
        (Kind::Tcp, framed(Kind::Tcp, 1, big.as_bytes()), 1009, "too-large"),
        (
            Kind::Ws,
            [framed(Kind::Ws, 1, &big.as_bytes()[..900])[..].to_vec(), vec![0x83]].concat(),
            1002,
            "protocol-error",
        ),
        (Kind::Ws, framed(Kind::Ws, 1, b"\xff"), 1007, "malformed"),
        (Kind::Tcp, framed(Kind::Tcp, 1, b"\xff"), 1007, "malformed"),
        (Kind::Ws, vec![0x81, 0x01, b'x'], 1002, "protocol-error"),
        (Kind::Tcp, vec![0xff; 4], 1009, "too-large"),
    ];
    for (n, (kind, bytes, code, reason)) in rows.into_iter().enumerate() {
        let user = format!("u{n}");
        let mut client = rig.client(kind, &user);
        client.raw(&bytes);
        if n == 2 {
            client.expect(r#"{"type":"error","code":"malformed""#);
        }
        client.expect_closed(code, reason);
        assert_eq!(rig.router.closed(&rig.router.opened(&user, 0)), reason);
    }
    let metrics = rig.handle.metrics();
    assert_eq!((metrics.closed(CloseCode::TooLarge), metrics.closed(CloseCode::Malformed)), (3, 2));
}

#[test]
fn the_router_closes_with_its_code_and_reason() {
    let rig = Rig::start();
    for kind in BOTH {
        for (code, reason) in [
            (CloseCode::Replaced, None),
            (CloseCode::Kicked, Some("spam")),
            (CloseCode::Revoked, None),
            (CloseCode::Bye, None),
        ] {
            let user = format!("{kind:?}{}", code.code());
            let mut client = rig.client(kind, &user);
            let conn = rig.router.opened(&user, 0);
            rig.router.tell(&conn, push(10));
            rig.router.tell(&conn, Down::Close { code, reason: reason.map(Arc::from) });
            client.expect(r#"{"type":"msg.push""#);
            client.expect_closed(code.code(), reason.unwrap_or(code.reason()));
            assert_eq!(rig.router.closed(&conn), code.reason());
        }
    }
}

#[test]
fn a_client_that_says_goodbye_is_answered() {
    let rig = Rig::start();
    for (payload, code) in [(&b""[..], 1005), (b"\x03\xe8done", 1000), (b"\x0b\xb8", 3000)] {
        let mut client = rig.client(Kind::Ws, "alice");
        client.raw(&framed(Kind::Ws, 8, payload));
        assert_eq!(client.next(), Got::Close(code, String::new()));
        assert_eq!(client.next(), Got::End);
    }
    let client = rig.client(Kind::Tcp, "alice");
    drop(client);
    rig.until("four goodbyes", |handle| handle.metrics().closed(CloseCode::Bye) == 4);
    for n in 0..4 {
        assert_eq!(rig.router.closed(&rig.router.opened("alice", n)), "bye");
    }
}

#[test]
fn silence_is_pinged_then_closed_and_bytes_of_any_kind_end_it() {
    let rig = Rig::new(Config { ping_after_ms: 200, ping_jitter_ms: 10, close_after_ms: 600, ..config() });
    for kind in BOTH {
        let mut client = rig.client(kind, "alice");
        let began = std::time::Instant::now();
        client.expect(r#"{"type":"ping"}"#);
        if kind == Kind::Ws {
            client.raw(&framed(kind, 10, b""));
        } else {
            client.raw(b"\0");
        }
        client.expect(r#"{"type":"ping"}"#);
        client.expect_closed(1001, "heartbeat-timeout");
        assert!(began.elapsed().as_millis() >= 790, "{:?}", began.elapsed());
    }
    assert_eq!(rig.handle.metrics().closed(CloseCode::HeartbeatTimeout), 2);
}

#[test]
fn a_token_runs_out() {
    let rig = Rig::start();
    for kind in BOTH {
        let mut client = rig.client(kind, "alice+400");
        client.expect(r#"{"type":"auth.expiring","expires_at":"#);
        client.expect_closed(4001, "token-expired");
        let mut client = rig.client(kind, "bob+400");
        client.expect(r#"{"type":"auth.expiring""#);
        client.say(r#"{"type":"auth.refresh","id":"r","token":"bob"}"#);
        client.expect(r#"{"type":"ok","id":"r"}"#);
        rig.router.tell(&rig.router.opened("bob", usize::from(kind == Kind::Tcp)), push(1));
        client.expect(r#"{"type":"msg.push""#);
    }
}

#[test]
fn ten_texts_that_are_no_json_are_too_many() {
    let rig = Rig::start();
    for kind in BOTH {
        let mut client = rig.client(kind, "alice");
        for _ in 0..10 {
            client.say("{]");
        }
        for _ in 0..10 {
            client.expect(r#"{"type":"error","code":"malformed""#);
        }
        client.expect_closed(4505, "policy");
    }
}

#[test]
fn revocation_closes_whom_it_names() {
    let rig = Rig::start();
    let mut clients: Vec<Client> =
        ["alice", "bob", "alice"].iter().enumerate().map(|(n, user)| rig.client(BOTH[n % 2], user)).collect();
    let closed = rig.handle.close_where(|key| key.user.as_str() == "alice", CloseCode::Revoked);
    assert_eq!(closed, 2);
    assert_eq!(rig.handle.close_where(|key| key.user.as_str() == "alice", CloseCode::Revoked), 0);
    clients[0].expect_closed(4503, "revoked");
    clients[2].expect_closed(4503, "revoked");
    assert_eq!(rig.handle.close_where(|key| key.token_id == Some("jti-bob"), CloseCode::Revoked), 1);
    clients[1].expect_closed(4503, "revoked");
}

#[test]
fn a_second_signal_says_shutdown() {
    let rig = Rig::start();
    let mut clients: Vec<Client> = BOTH.into_iter().map(|kind| rig.client(kind, "alice")).collect();
    rig.handle.stop_now();
    for client in &mut clients {
        client.expect_closed(1001, "shutdown");
    }
    assert_eq!(rig.handle.remaining(), 0);
    assert_eq!(rig.router.closed(&rig.router.opened("alice", 0)), "shutdown");
    // Nobody is there to take it, and nobody waits for that.
    for _ in 0..3 {
        rig.router.tell(&rig.router.opened("alice", 0), push(1));
    }
    assert_eq!(rig.handle.close_where(|_| true, CloseCode::Revoked), 0);
}

#[test]
fn after_the_last_words_input_is_discarded() {
    let rig = Rig::start();
    let mut client = rig.client(Kind::Tcp, "alice");
    let conn = rig.router.opened("alice", 0);
    rig.router.tell(&conn, Down::Close { code: CloseCode::Kicked, reason: None });
    assert_eq!(rig.router.closed(&conn), "kicked");
    for n in 0..100 {
        client.say(&send_frame(&n.to_string()));
    }
    client.expect(r#"{"type":"session.closed","code":4504"#);
    assert_eq!(client.next(), Got::End, "the output has ended, and nothing was reset");
    assert_eq!(rig.router.count(|up| matches!(up, bowline_protocol::link::Up::Frame(_))), 0);
    drop(client);
    rig.until("it is gone", |handle| handle.remaining() == 0);
}
