//! The handshake gate: every status, in its order, and the same over frames.

use super::rig::*;
use crate::{Config, Error, Gateway};
use bowline_auth::Verifier;
use bowline_protocol::{
    CloseCode,
    link::{Down, NodeRef},
};
use std::sync::Arc;

fn status(answer: &str) -> u16 {
    answer.split(' ').nth(1).and_then(|text| text.parse().ok()).unwrap_or(0)
}

/// The status of an answer, after a look at its form.
fn refused(answer: &str) -> u16 {
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
    assert!(head.contains("Content-Type: application/json"), "{answer}");
    assert!(body.starts_with(r#"{"code":""#) && body.contains(r#","message":""#), "{answer}");
    let retry = matches!(status(answer), 429 | 503);
    assert_eq!(head.contains("\r\nRetry-After: "), retry, "{answer}");
    status(answer)
}

#[test]
fn refusals_come_in_their_order() {
    let rig = Rig::new(Config { allowed_origins: vec!["https://good".into()], ..config() });
    let bad_origin = "Origin: https://evil\r\n";
    let huge = format!("X: {}\r\n", "x".repeat(65_536));
    let rows = [
        (request("/other", &huge), 431),
        (request("/other", bad_origin), 404),
        (format!("GET /ws?device_id=a%3Ab HTTP/1.1\r\nHost: h\r\n{bad_origin}\r\n"), 426),
        (request("/ws?token=a&token=b", bad_origin), 400),
        (request("/ws?device_id=a%3Ab", bad_origin), 400),
        (request("/ws", "").replace("dGhlIHNhbXBsZSBub25jZQ==", "short"), 400),
        (request("/ws", "").replace("Version: 13", "Version: 12"), 426),
        (request("/ws?token=bad", bad_origin), 403),
        (request("/ws?token=bad", "Origin: https://good\r\n"), 401),
        (request("/ws?token=expired", ""), 401),
        (request("/ws?token=revoked", ""), 401),
        (request("/ws?token=", ""), 401),
        (request("/ws?token=later-bad", ""), 401),
        (request("/ws?token=nobody", ""), 400),
        (request("/ws?token=busy", ""), 503),
        (request("/ws?token=alice%2Fphone&device_id=pad", ""), 403),
        ("nonsense\r\n\r\n".into(), 400),
    ];
    let mut counts = std::collections::BTreeMap::new();
    for (request, expected) in rows {
        let mut client = rig.dial(Kind::Ws);
        client.raw(request.as_bytes());
        let answer = client.http_answer();
        assert_eq!(refused(&answer), expected, "{:.300}\n{answer}", request);
        assert_eq!(client.next(), Got::End);
        *counts.entry(expected).or_insert(0) += 1;
    }
    for (status, count) in counts {
        assert_eq!(rig.handle.metrics().refused(status), count, "{status}");
    }
    assert_eq!(rig.router.count(|_| true), 0, "the router hears of none");
}

#[test]
fn upgrade_required_says_what_to_upgrade_to() {
    let rig = Rig::start();
    let mut client = rig.dial(Kind::Ws);
    client.raw(b"GET /ws HTTP/1.1\r\nHost: h\r\n\r\n");
    let answer = client.http_answer();
    assert!(answer.contains("\r\nUpgrade: websocket\r\n") && answer.contains("Upgrade\r\n"), "{answer}");
}

#[test]
fn a_device_in_use_is_refused_before_the_upgrade() {
    let rig = Rig::start();
    rig.router.set(|m| m.accepts = false);
    let mut client = rig.dial(Kind::Ws);
    client.raw(request("/ws?token=alice", "").as_bytes());
    rig.router.tell(&rig.router.opened("alice", 0), Down::Refused(CloseCode::DeviceInUse));
    assert_eq!(refused(&client.http_answer()), 409);
    assert_eq!(client.next(), Got::End);
    for (n, kind) in BOTH.into_iter().enumerate() {
        let mut client = rig.plain(kind);
        client.connect("bob");
        rig.router.tell(&rig.router.opened("bob", n), Down::Refused(CloseCode::DeviceInUse));
        client.expect_closed(4506, "device-in-use");
    }
    assert_eq!(rig.router.count(|up| matches!(up, bowline_protocol::link::Up::Closed(_))), 0);
}

#[test]
fn refused_connects_are_closed_with_their_codes() {
    let rig = Rig::start();
    for kind in BOTH {
        let rows = [
            (r#"{"type":"connect","token":"bad"}"#, 4502, "unauthenticated"),
            (r#"{"type":"connect","token":"expired"}"#, 4502, "unauthenticated"),
            (r#"{"type":"connect","token":"nobody"}"#, 4502, "unauthenticated"),
            (r#"{"type":"connect","token":"busy"}"#, 1013, "overloaded"),
            (r#"{"type":"connect","token":"alice/phone","device_id":"pad"}"#, 4505, "policy"),
            (r#"{"type":"connect","token":"alice","version":9}"#, 4507, "version: this server speaks 1"),
        ];
        for (connect, code, reason) in rows {
            let mut client = rig.plain(kind);
            client.say(connect);
            let closed = client.expect_closed(code, reason);
            assert_eq!(closed.contains("retry_after_ms"), code == 1013, "{closed}");
        }
        for other in [send_frame("1").as_str(), "nonsense", r#"{"type":"pong"}"#] {
            let mut client = rig.plain(kind);
            client.say(other);
            client.expect(r#"{"type":"error","code":"unauthenticated""#);
            client.expect_closed(4502, "unauthenticated");
        }
    }
}

#[test]
fn too_many_full_and_overloaded() {
    let rig = Rig::new(Config { handshakes_per_second: 1, ..config() });
    let _first = rig.client(Kind::Tcp, "alice");
    let (_, answer) = rig.upgrade("/ws?token=alice", "");
    assert_eq!(refused(&answer), 429);
    let mut client = rig.plain(Kind::Tcp);
    client.connect("alice");
    assert!(client.expect_closed(1013, "overloaded").contains("retry_after_ms"));

    let rig = Rig::new(Config { max_connections: 1, ..config() });
    let first = rig.client(Kind::Ws, "alice");
    let (_, answer) = rig.upgrade("/ws?token=alice", "");
    assert_eq!(refused(&answer), 503);
    drop(first);
    rig.until("the seat is free", |handle| handle.remaining() == 0);
    rig.client(Kind::Ws, "alice");

    let rig = Rig::new(Config { connections_per_address: 1, ..config() });
    let _first = rig.client(Kind::Ws, "alice");
    let (_, answer) = rig.upgrade("/ws?token=alice", "");
    assert_eq!(refused(&answer), 429);

    let rig = Rig::start();
    rig.router.set(|m| m.capacity = 0);
    let (_, answer) = rig.upgrade("/ws?token=alice", "");
    assert_eq!(refused(&answer), 503);
    let mut client = rig.plain_tcp_then_connect("alice");
    assert!(client.expect_closed(1013, "overloaded").contains("retry_after_ms"));
}

impl Rig {
    fn plain_tcp_then_connect(&self, token: &str) -> Client {
        let mut client = self.plain(Kind::Tcp);
        client.connect(token);
        client
    }
}

/// What has no identity, no complete head or no answer from the router in ten seconds.
#[test]
fn ten_seconds_are_enough() {
    let rig = Rig::start();
    rig.router.set(|m| m.accepts = false);
    let mut half = rig.dial(Kind::Ws);
    half.raw(b"GET /ws HT");
    let mut idle: Vec<Client> = BOTH.into_iter().map(|kind| rig.plain(kind)).collect();
    let mut waiting = rig.dial(Kind::Ws);
    waiting.raw(request("/ws?token=alice", "").as_bytes());
    let mut opening: Vec<Client> = BOTH.into_iter().map(|kind| rig.plain(kind)).collect();
    for client in &mut opening {
        client.connect("bob");
    }
    let began = std::time::Instant::now();
    assert_eq!(half.next(), Got::End);
    for client in &mut idle {
        client.expect_closed(4003, "connect-timeout");
    }
    assert_eq!(refused(&waiting.http_answer()), 503);
    for client in &mut opening {
        client.expect_closed(1013, "overloaded");
    }
    assert!(began.elapsed().as_millis() > 9_000);
    assert_eq!(rig.router.closed(&rig.router.opened("alice", 0)), "overloaded");
    assert_eq!(rig.handle.metrics().closed(CloseCode::ConnectTimeout), 2);
}

#[test]
fn a_port_that_is_taken_is_named() {
    let rig = Rig::start();
    let taken = rig.addresses.ws;
    let node = Arc::new(NodeRef { node_id: "n".into(), boot_id: "b".into() });
    let verifier = Arc::new(Verifier::with_secret(b"x"));
    let result = Gateway::bind(Config { listen: taken, ..config() }, node, verifier);
    let Err(error) = result.map(|_| ()) else { panic!("bound twice") };
    assert!(matches!(error, Error::Listen { key: "listen", .. }));
    assert!(error.to_string().contains(&taken.to_string()), "{error}");
    assert!(error.to_string().contains("another process holds the port"), "{error}");
}
