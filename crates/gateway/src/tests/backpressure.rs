//! Order, bounds and what happens when somebody is slow.

use super::rig::*;
use crate::Config;
use bowline_protocol::{
    ClientFrame, CloseCode, Frame,
    link::{ConnRef, Down, Target, Up},
};
use std::io::Write;

/// The ids of the messages that a connection has sent up, in order.
fn sent(got: &[bowline_protocol::link::Uplink], conn: &ConnRef) -> Vec<String> {
    got.iter()
        .filter(|up| up.from == *conn)
        .filter_map(|up| match &up.event {
            Up::Frame(ClientFrame::MsgSend { send }) => Some(send.id.to_string()),
            _ => None,
        })
        .collect()
}

#[test]
fn twenty_thousand_frames_through_a_mark_of_sixteen() {
    for kind in BOTH {
        let rig = Rig::new(Config { backpressure_high: 16, ..config() });
        let client = rig.client(kind, "alice");
        let conn = rig.router.opened("alice", 0);
        let mut writer = client.stream.try_clone().unwrap();
        let sender = std::thread::spawn(move || {
            let mut bytes = Vec::new();
            for id in 0..20_000 {
                bytes.extend(framed(kind, 1, send_frame(&id.to_string()).as_bytes()));
            }
            writer.write_all(&bytes).unwrap();
        });
        let mut client = client;
        for id in 0..20_000 {
            client.expect(&format!(r#"{{"type":"msg.ack","id":"{id}""#));
        }
        sender.join().unwrap();
        let ids = rig.router.wait("all", |got| Some(sent(got, &conn)));
        assert!(ids.iter().map(|id| id.parse::<usize>().unwrap()).eq(0..20_000), "in order, once");
        let metrics = rig.handle.metrics();
        assert!(metrics.backpressure_paused_total > 0);
        assert_eq!(metrics.backpressure_paused_total, metrics.backpressure_resumed_total);
        assert_eq!(metrics.backpressure_paused, 0);
    }
}

#[test]
fn a_router_that_decides_nothing_pauses_once_and_is_waited_for_so_long() {
    for kind in BOTH {
        let rig = Rig::new(Config {
            backpressure_high: 16,
            backpressure_timeout_ms: 1500,
            ping_after_ms: 100,
            ping_jitter_ms: 0,
            close_after_ms: 300,
            ..config()
        });
        rig.router.set(|m| m.acks = false);
        let mut client = rig.client(kind, "alice");
        let conn = rig.router.opened("alice", 0);
        for id in 0..40 {
            client.say(&send_frame(&id.to_string()));
        }
        rig.until("paused", |handle| handle.metrics().backpressure_paused == 1);
        let seen = rig.router.wait("17", |got| Some(sent(got, &conn)).filter(|ids| ids.len() >= 17));
        assert_eq!(seen.len(), 17, "the mark and one that is above it");
        // Half of 16 is not below half.
        rig.router.tell(&conn, Down::Decided(9));
        rig.router.tell(&conn, push(1));
        let mut next = client.text();
        while next == r#"{"type":"ping"}"# {
            next = client.text();
        }
        assert!(next.starts_with(r#"{"type":"msg.push""#), "{next}");
        assert_eq!(rig.handle.metrics().backpressure_paused, 1);
        rig.router.tell(&conn, Down::Decided(1));
        rig.router.wait("ten more", |got| (sent(got, &conn).len() == 27).then_some(()));
        // Now it stays paused, longer than its heartbeat would allow.
        let closed = loop {
            let text = client.text();
            if text != r#"{"type":"ping"}"# {
                break text;
            }
        };
        assert!(closed.contains(r#""code":1013,"reason":"backpressure-timeout""#), "{closed}");
        assert_eq!(rig.router.closed(&conn), "backpressure-timeout");
        let metrics = rig.handle.metrics();
        assert_eq!((metrics.backpressure_paused_total, metrics.backpressure_resumed_total), (2, 2));
    }
}

#[test]
fn a_full_router_loses_nothing_and_takes_nobody_new() {
    let rig = Rig::start();
    let mut clients: Vec<Client> = (0..4).map(|n| rig.client(BOTH[n % 2], &format!("u{n}"))).collect();
    rig.router.empty();
    rig.router.set(|m| (m.capacity, m.acks) = (50, false));
    for client in &mut clients {
        for id in 0..200 {
            client.say(&send_frame(&id.to_string()));
        }
    }
    rig.router.wait("50", |got| {
        (got.iter().filter(|up| matches!(up.event, Up::Frame(_))).count() == 50).then_some(())
    });
    let (_, answer) = rig.upgrade("/ws?token=alice", "");
    assert!(answer.starts_with("HTTP/1.1 503"), "{answer}");
    let mut total = 50;
    while total < 800 {
        rig.router.empty();
        total = rig.router.wait("more", |got| {
            let now = got.iter().filter(|up| matches!(up.event, Up::Frame(_))).count();
            (now > total).then_some(now)
        });
    }
    for n in 0..4 {
        let conn = rig.router.opened(&format!("u{n}"), 0);
        let ids = rig.router.wait("all", |got| Some(sent(got, &conn)));
        assert!(ids.iter().map(|id| id.parse::<usize>().unwrap()).eq(0..200), "u{n}: {ids:?}");
    }
}

#[test]
fn events_ahead_of_their_turn_or_for_nobody_are_not_here() {
    let rig = Rig::start();
    let mut client = rig.client(Kind::Ws, "alice");
    let conn = rig.router.opened("alice", 0);
    let text = |n: u32| Down::Frame {
        frame: Frame { json: format!("{{\"n\":{n}}}").into(), body: None },
        decided: 0,
        answer: false,
    };
    // Held until what lies before has come; what was here before is passed over.
    for no in [4, 3, 1, 2, 3, 3] {
        rig.router.tell_numbered(&conn, no, text(no as u32));
    }
    for n in [2, 3, 4] {
        client.expect(&format!("{{\"n\":{n}}}"));
    }
    // No more than a thousand are held.
    for no in 6..=1030 {
        rig.router.tell_numbered(&conn, no, text(no as u32));
    }
    let event = rig.router.wait("not here", |got| {
        got.iter().find_map(|up| match &up.event {
            Up::NotHere { no: 1030, event, gone: false } if up.from == conn => Some(event.clone()),
            _ => None,
        })
    });
    assert_eq!(*event, text(1030));
    for no in [5, 1030] {
        rig.router.tell_numbered(&conn, no, text(no as u32));
    }
    for n in 5..=1030 {
        client.expect(&format!("{{\"n\":{n}}}"));
    }
    let gone = ConnRef { login: conn.login + 1, ..conn.clone() };
    let nobody = ConnRef { connection: conn.connection + 5, ..conn.clone() };
    let elsewhere = ConnRef { connection: conn.connection | 77 << 56, ..conn.clone() };
    for other in [gone, nobody, elsewhere] {
        rig.router.tell_numbered(&other, 1, text(1));
        rig.router.wait("not here", |got| {
            got.iter()
                .any(|up| matches!(up.event, Up::NotHere { no: 1, gone: true, .. }) && up.from == other)
                .then_some(())
        });
    }
    drop(client);
    rig.router.closed(&conn);
    rig.router.tell_numbered(&conn, 1031, text(4));
    rig.router.wait("not here", |got| {
        got.iter()
            .any(|up| matches!(up.event, Up::NotHere { no: 1031, gone: true, .. }) && up.from == conn)
            .then_some(())
    });
    assert_eq!(rig.handle.metrics().not_here_total, 5);
}

#[test]
fn one_event_for_many_reaches_all_of_them_on_every_shard() {
    let rig = Rig::new(Config { workers: 3, ..config() });
    let mut clients: Vec<Client> = (0..12).map(|n| rig.client(BOTH[n / 2 % 2], &format!("u{n}"))).collect();
    for round in 0..5 {
        let targets: Vec<Target> = (0..12)
            .map(|n| {
                let conn = rig.router.opened(&format!("u{n}"), 0);
                Target { connection: conn.connection, login: conn.login, no: rig.router.number(&conn) }
            })
            .collect();
        rig.router.tell_all(targets, push(round));
    }
    for client in &mut clients {
        for round in 0..5 {
            let expected = format!(r#"{{"type":"msg.push","body":"{}"}}"#, "x".repeat(round));
            assert_eq!(client.text(), expected);
        }
    }
}

#[test]
fn a_slow_consumer_gets_the_frame_it_began_and_its_last_words() {
    for kind in BOTH {
        let rig = Rig::new(Config { outbound_limit_bytes: 200_000, ..config() });
        let mut client = rig.client(kind, "alice");
        let conn = rig.router.opened("alice", 0);
        let mut pushed = 0;
        rig.until("it is slow", |handle| {
            // More than the kernel takes, in pieces that are no slow consumer's by themselves.
            rig.router.tell(&conn, push(50_000));
            pushed += 1;
            handle.metrics().closed(CloseCode::SlowConsumer) == 1
        });
        assert_eq!(rig.router.closed(&conn), "slow-consumer");
        rig.router.wait("congestion", |got| {
            got.iter().any(|up| up.from == conn && up.event == Up::Congested).then_some(())
        });
        let mut whole = 0;
        let closed = loop {
            let text = client.text();
            if text.starts_with(r#"{"type":"session.closed""#) {
                break text;
            }
            assert_eq!(text.len(), 50_000 + r#"{"type":"msg.push","body":""}"#.len());
            whole += 1;
        };
        assert!(closed.contains(r#""code":4002,"reason":"slow-consumer""#), "{closed}");
        assert!(whole < pushed && rig.handle.metrics().slow_frames_dropped_total > 0);
        if kind == Kind::Ws {
            assert_eq!(client.next(), Got::Close(4002, "slow-consumer".into()));
        }
    }
}

#[test]
fn congestion_is_told_and_so_is_its_end() {
    let rig = Rig::new(Config { outbound_limit_bytes: 64 << 20, ..config() });
    let mut client = rig.client(Kind::Tcp, "alice");
    let conn = rig.router.opened("alice", 0);
    // More than the kernel holds for a connection, and less than the limit.
    const PUSHED: usize = 600;
    for _ in 0..PUSHED {
        rig.router.tell(&conn, push(50_000));
    }
    rig.router.wait("congested", |got| got.iter().any(|up| up.event == Up::Congested).then_some(()));
    for _ in 0..PUSHED {
        client.expect(r#"{"type":"msg.push""#);
    }
    rig.router.wait("flowing", |got| got.iter().any(|up| up.event == Up::Flowing).then_some(()));
    client.say("ping");
    assert_eq!(client.text(), "pong");
}

#[test]
fn answers_never_make_a_slow_consumer() {
    for kind in BOTH {
        let rig = Rig::new(Config { outbound_limit_bytes: 100_000, ..config() });
        rig.router.set(|m| m.acks = false);
        let mut client = rig.client(kind, "alice");
        let conn = rig.router.opened("alice", 0);
        let answer = |id: usize| Down::Frame {
            frame: Frame {
                json: format!("{{\"id\":{id},\"x\":\"{}\"}}", "x".repeat(40_000)).into(),
                body: None,
            },
            decided: 1,
            answer: true,
        };
        for id in 0..300 {
            client.say(&send_frame(&id.to_string()));
            rig.router.tell(&conn, answer(id));
        }
        rig.until("it is read no further", |handle| handle.metrics().backpressure_paused == 1);
        for id in 0..300 {
            client.expect(&format!("{{\"id\":{id},"));
        }
        client.say("ping");
        assert_eq!(client.text(), "pong");
        rig.until("it is read again", |handle| handle.metrics().backpressure_paused == 0);
        let ids = rig.router.wait("all", |got| Some(sent(got, &conn)).filter(|ids| ids.len() == 300));
        assert!(ids.iter().map(|id| id.parse::<usize>().unwrap()).eq(0..300));
    }
}

#[test]
fn one_that_reads_nothing_holds_up_nobody() {
    let rig = Rig::new(Config { workers: 1, outbound_limit_bytes: 64 << 20, ..config() });
    let _stuck = rig.client(Kind::Ws, "stuck");
    let mut other = rig.client(Kind::Ws, "other");
    let (stuck, conn) = (rig.router.opened("stuck", 0), rig.router.opened("other", 0));
    for _ in 0..400 {
        rig.router.tell(&stuck, push(100_000));
    }
    rig.router.tell(&conn, push(1));
    other.expect(r#"{"type":"msg.push""#);
    other.say("ping");
    assert_eq!(other.text(), "pong");
}
