//! Going down on purpose: by the API, by a signal, in order and in time.

use bowline_tests::{
    PATIENCE, Server, Transport,
    client::{Refused, Way},
    http, raw, rolling, token, until,
};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

on_both![
    a_drain_by_the_api_moves_everybody_and_the_process_stays,
    open_connections_work_unchanged_until_the_deadline,
    a_signal_drains_and_exits_0,
    the_process_ends_as_soon_as_nobody_is_left,
    a_second_signal_stops_at_once,
    who_reads_slowly_gets_everything_before_a_signal_ends_the_process,
    what_was_acknowledged_in_a_drain_is_there_afterwards,
];

fn a_drain_by_the_api_moves_everybody_and_the_process_stays(transport: Transport) {
    const CLIENTS: usize = 30;
    let mut server =
        Server::with(&[("gateway.drain_timeout_ms", "3000"), ("gateway.migrate_spread_ms", "1000")]);
    let mut clients: Vec<_> = (0..CLIENTS).map(|n| server.connect(transport, &format!("user{n}"))).collect();
    http::request("GET", &server.api_url("/readyz"), &[], None).expect(200);
    assert_eq!(server.status()["state"], "ready");
    let began = Instant::now();
    server.post("/admin/drain?reason=maintenance", &json!({})).expect(202);

    let delays: Vec<u64> = clients
        .iter_mut()
        .map(|client| {
            let migrate = client.expect("session.migrate");
            assert!(!migrate.text_of("reason").is_empty(), "{}", migrate.text);
            migrate.number_of("retry_after_ms")
        })
        .collect();
    assert!(began.elapsed() < Duration::from_millis(2000), "every client is told at once");
    assert!(delays.iter().all(|delay| *delay <= 1000), "{delays:?}");
    let (least, most) = (delays.iter().min().expect("clients"), delays.iter().max().expect("clients"));
    assert!(*least < 400 && *most > 600, "the delays are spread evenly: {delays:?}");

    let ready = http::request("GET", &server.api_url("/readyz"), &[], None);
    assert_eq!(ready.status, 503, "{}", ready.text);
    assert!(ready.text.contains("drain"), "it says why: {}", ready.text);
    http::request("GET", &server.api_url("/healthz"), &[], None).expect(200);
    let status = server.status();
    assert_eq!(status["state"], "draining");
    assert_eq!(status["drain"]["remaining"], json!(CLIENTS), "{status}");
    let deadline = status["drain"]["deadline"].clone();
    assert!(!deadline.is_null(), "{status}");

    // New clients are sent away.
    let request = raw::upgrade("/ws", &[("Authorization", &format!("Bearer {}", token::of("late")))]);
    let late = raw::exchange(server.ws(), &request);
    assert_eq!(late.status, 503, "{late:?}");
    assert!(late.header("retry-after").is_some(), "{late:?}");
    match server.login("late").way(Way::FirstFrame).try_connect(Transport::Tcp) {
        Err(Refused::Closed(ending)) => {
            let notice = ending.notice.expect("session.closed is the last frame");
            assert_eq!(notice.number_of("code"), 1013, "{}", notice.text);
            assert!(notice.json["retry_after_ms"].is_u64(), "{}", notice.text);
            assert_eq!(notice.text_of("reason"), "draining");
        }
        Err(other) => panic!("{other:?}"),
        Ok(_) => panic!("a draining server took a connection"),
    }

    // It is counted by what it was told, and nobody else has ended yet.
    let ended = |reason: &str| {
        let label = format!("reason=\"{reason}\"");
        server.metrics().find_with("bowline_gateway_closed_total", &label).unwrap_or(0.0)
    };
    assert_eq!((ended("draining"), ended("overloaded")), (1.0, 0.0));

    // Once more changes nothing.
    server.post("/admin/drain?reason=again", &json!({})).expect(202);
    assert_eq!(server.status()["drain"]["deadline"], deadline);
    for client in &mut clients {
        assert_eq!(client.take_kept().len(), 0, "nothing but the migration was said");
        client.expect_closed(1001, "draining");
    }
    let took = began.elapsed();
    assert!(took > Duration::from_millis(2900), "closed after {took:?}");
    assert!(took < Duration::from_millis(6000), "closed after {took:?}");

    // The process stays, with its API, until it is told to go.
    until("everybody is gone", || (server.status()["connections"] == 0).then_some(()));
    assert_eq!(server.has_ended(), None);
    http::request("GET", &server.api_url("/readyz"), &[], None).expect(503);
    server.signal("TERM");
    // These clients close nothing themselves; they are waited for as long as the close of any connection may take.
    assert_eq!(server.wait_end(Duration::from_secs(10)).code(), Some(0));
}

fn open_connections_work_unchanged_until_the_deadline(transport: Transport) {
    let server = Server::with(&[("gateway.drain_timeout_ms", "5000"), ("gateway.migrate_spread_ms", "500")]);
    let mut alice = server.connect(transport, "alice");
    let mut bob = server.connect(transport, "bob");
    server.post("/admin/drain", &json!({})).expect(202);
    let began = Instant::now();
    let mut seq = 0;
    while began.elapsed() < Duration::from_millis(1200) {
        seq += 1;
        assert_eq!(alice.tell("bob", seq).seq(), seq);
        bob.expect_push("d:alice:bob", seq);
        bob.recv("d:alice:bob", seq);
    }
    alice.expect_receipt("d:alice:bob", "delivered", "bob", seq);
    // The API takes messages too.
    server.send(&json!({"id": "api", "from": "carol", "to": "bob", "body": 1}));
    bob.expect_push("d:bob:carol", 1);
    alice.expect_closed(1001, "draining");
    bob.expect_closed(1001, "draining");
}

fn a_signal_drains_and_exits_0(transport: Transport) {
    for signal in ["TERM", "INT"] {
        let mut server =
            Server::with(&[("gateway.drain_timeout_ms", "1500"), ("gateway.migrate_spread_ms", "500")]);
        let mut client = server.connect(transport, "alice");
        let began = Instant::now();
        server.signal(signal);
        assert!(client.expect("session.migrate").number_of("retry_after_ms") <= 500);
        client.expect_closed(1001, "draining");
        let took = began.elapsed();
        assert!(took > Duration::from_millis(1400), "SIG{signal}: closed after {took:?}");
        assert_eq!(server.wait_end(PATIENCE).code(), Some(0), "SIG{signal}");
    }
}

fn the_process_ends_as_soon_as_nobody_is_left(transport: Transport) {
    let mut server = Server::with(&[("gateway.drain_timeout_ms", "40000")]);
    let mut client = server.connect(transport, "alice");
    server.signal("TERM");
    client.expect("session.migrate");
    assert_eq!(server.has_ended(), None, "somebody is still there");
    let began = Instant::now();
    client.close();
    assert_eq!(server.wait_end(PATIENCE).code(), Some(0));
    assert!(began.elapsed() < Duration::from_secs(8), "it ended after {:?}", began.elapsed());
}

#[test]
fn without_connections_a_signal_ends_it_at_once() {
    let mut server = Server::start();
    let began = Instant::now();
    server.signal("TERM");
    assert_eq!(server.wait_end(PATIENCE).code(), Some(0));
    assert!(began.elapsed() < Duration::from_secs(5), "it ended after {:?}", began.elapsed());
}

fn who_reads_slowly_gets_everything_before_a_signal_ends_the_process(transport: Transport) {
    const MESSAGES: u64 = 400;
    let _turn = bowline_tests::turn();
    let mut server =
        Server::with(&[("gateway.drain_timeout_ms", "1000"), ("gateway.socket_unsent_bytes", "16384")]);
    let mut slow = server.login("slow").receive_buffer(4096).connect(transport);
    slow.ask("room.join", json!({"room": "r"})).expect_kind("room.joined");
    let messages: Vec<Value> = (0..20).map(|_| json!({"body": "x".repeat(1000)})).collect();
    for _ in 0..MESSAGES / 20 {
        server.post("/api/v1/rooms/r/messages", &json!(messages)).expect(202);
    }
    server.signal("TERM");
    // It reads on three seconds after the deadline. This is the pace of the client, not a wait for anything.
    std::thread::sleep(Duration::from_secs(4));
    assert_eq!(server.has_ended(), None, "somebody has not been told yet");
    for offset in 1..=MESSAGES {
        assert_eq!(slow.expect("room.push").number_of("offset"), offset);
    }
    slow.expect("session.migrate");
    slow.expect_closed(1001, "draining");
    assert_eq!(server.wait_end(PATIENCE).code(), Some(0));
}

fn a_second_signal_stops_at_once(transport: Transport) {
    let mut server = Server::with(&[("gateway.drain_timeout_ms", "40000")]);
    let mut client = server.connect(transport, "alice");
    server.signal("TERM");
    client.expect("session.migrate");
    let began = Instant::now();
    server.signal("TERM");
    client.expect_closed(1001, "shutdown");
    server.wait_end(PATIENCE);
    assert!(began.elapsed() < Duration::from_secs(8), "it ended after {:?}", began.elapsed());
}

#[test]
fn a_signal_after_a_drain_by_the_api_ends_the_process() {
    let mut server = Server::with(&[("gateway.drain_timeout_ms", "40000")]);
    let client = server.connect(Transport::Ws, "alice");
    server.post("/admin/drain", &json!({})).expect(202);
    client.close();
    until("nobody is left", || (server.status()["connections"] == 0).then_some(()));
    assert_eq!(server.has_ended(), None, "a drain by the API leaves the process");
    server.signal("TERM");
    assert_eq!(server.wait_end(Duration::from_secs(8)).code(), Some(0));
}

fn what_was_acknowledged_in_a_drain_is_there_afterwards(transport: Transport) {
    let mut server =
        Server::with(&[("gateway.drain_timeout_ms", "1000"), ("gateway.migrate_spread_ms", "100")]);
    let mut alice = server.connect(transport, "alice");
    server.signal("TERM");
    alice.expect("session.migrate");
    // Sending on until the end of the connection.
    let mut acked: Vec<String> = Vec::new();
    for n in 0..100_000 {
        let id = format!("n{n}");
        if alice.writer.send(&json!({"type": "msg.send", "id": id, "to": "bob", "body": n})).is_err() {
            break;
        }
        let end = Instant::now() + PATIENCE;
        match alice.reader.next(end) {
            Some(bowline_tests::client::Event::Frame(frame)) if frame.kind() == "msg.ack" => {
                assert_eq!(frame.text_of("id"), id);
                acked.push(id);
            }
            Some(bowline_tests::client::Event::Frame(frame)) => {
                // A refusal may be asked for again; the end is the end.
                assert!(["session.closed", "error"].contains(&frame.kind()), "{}", frame.text);
                if frame.kind() == "session.closed" {
                    break;
                }
            }
            _ => break,
        }
    }
    assert!(!acked.is_empty(), "the drain left no time for a message");
    assert_eq!(server.wait_end(PATIENCE).code(), Some(0));
    server.restart();
    let mut bob = server.connect(transport, "bob");
    let history = bob.history_after("d:alice:bob", 0);
    let stored: Vec<&str> = history.iter().filter_map(|message| message["id"].as_str()).collect();
    assert!(stored.len() <= acked.len() + 1, "one may be stored whose ack was not seen");
    assert!(acked.iter().zip(&stored).all(|(acked, stored)| acked == stored), "{acked:?} {stored:?}");
    assert!(stored.len() >= acked.len(), "{} acknowledged, {} stored", acked.len(), stored.len());
    let numbers: Vec<u64> = history.iter().filter_map(|message| message["seq"].as_u64()).collect();
    assert_eq!(numbers, (1..=stored.len() as u64).collect::<Vec<_>>());
    assert!(history.iter().all(|message| message["body"] != Value::Null));
    server.metrics().assert_ledger_balances();
}

/// The short form of `scripts/rolling-restart`.
#[test]
fn a_restart_under_clients_loses_and_doubles_nothing() {
    let _turn = bowline_tests::turn();
    let second = Duration::from_secs(1);
    let options = rolling::Options { connections: 60, rate: 60, restarts: 1, spread: second, calm: second };
    let report = rolling::run(options);
    assert!(report.sent > 0 && report.moves == 60, "{report:?}");
    assert_eq!((report.acked, report.delivered), (report.sent, report.sent), "{report:?}");
    assert_eq!(
        (report.lost, report.doubled, report.out_of_order, report.unannounced),
        (0, 0, 0, 0),
        "{report:?}"
    );
}
