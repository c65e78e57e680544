//! More than fits: senders are read more slowly, never cut; readers that stop are cut, and lose nothing.

use bowline_tests::{
    Client, PATIENCE, Server, Transport,
    client::{Event, Frame, Reader, Writer},
    until, wait,
};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

on_both![
    twenty_thousand_messages_without_waiting_are_all_stored_in_order,
    a_reader_that_stops_is_closed_4002_and_finds_everything_afterwards,
    a_slow_reader_changes_nobody_elses_deliveries,
    who_asks_faster_than_it_reads_is_paused_and_not_cut,
    who_never_reads_its_answers_is_closed_1013,
];

/// Reads until the end of the stream or until `enough` says so; the frames and the close frame, if it came.
fn read_until(reader: &mut Reader, limit: Duration, mut enough: impl FnMut(&Frame) -> bool) -> Vec<Frame> {
    let end = Instant::now() + limit;
    let mut frames = Vec::new();
    loop {
        match reader.next(end) {
            Some(Event::Frame(frame)) => {
                let done = enough(&frame);
                frames.push(frame);
                if done {
                    return frames;
                }
            }
            Some(Event::Closed(close)) => panic!("closed {close:?} after {} frames", frames.len()),
            Some(_) => {}
            None => panic!("after {limit:?} only {} frames", frames.len()),
        }
    }
}

fn twenty_thousand_messages_without_waiting_are_all_stored_in_order(transport: Transport) {
    const LIMIT: Duration = Duration::from_secs(180);
    // Over a link that delays, every sixteen cost some round trips: there, fewer have to do.
    let count: u64 = 20_000;
    let _turn = bowline_tests::turn();
    let server = Server::with(&[("gateway.backpressure_high", "16")]);
    let alice = server.connect(transport, "alice");
    let bob = server.connect(transport, "bob");
    let Client { reader: mut acks, mut writer, .. } = alice;
    let Client { reader: mut pushes, writer: mut confirms, .. } = bob;
    let sending = std::thread::spawn(move || {
        for n in 1..=count {
            let frame = json!({"type": "msg.send", "id": format!("n{n}"), "to": "bob", "body": n});
            writer.send(&frame).unwrap_or_else(|error| panic!("message {n} of {count}: {error}"));
        }
        writer
    });
    let receiving = std::thread::spawn(move || {
        let mut last = 0;
        read_until(&mut pushes, LIMIT, |frame| {
            assert_eq!(frame.kind(), "msg.push", "{}", frame.text);
            // One that is repeated says so; everything else is the next.
            if frame.seq() <= last {
                assert_eq!(frame.json["redelivered"], json!(true), "{}", frame.text);
                return false;
            }
            assert_eq!((frame.seq(), &frame.json["body"]), (last + 1, &json!(last + 1)));
            last += 1;
            if last % 100 == 0 {
                let recv = json!({"type": "msg.recv", "conversation_id": "d:alice:bob", "seq": last});
                confirms.send(&recv).expect("the connection is open");
            }
            last == count
        });
        (pushes, confirms)
    });
    let mut next = 1;
    read_until(&mut acks, LIMIT, |frame| {
        if frame.kind() == "msg.receipt" {
            return false;
        }
        assert_eq!((frame.kind(), frame.text_of("id")), ("msg.ack", &*format!("n{next}")), "{}", frame.text);
        assert_eq!(frame.seq(), next);
        next += 1;
        next > count
    });
    let _writer = sending.join().expect("all were sent");
    let _bob = receiving.join().expect("all were received");
    let metrics = until("everything is delivered and nothing is paused", || {
        let metrics = server.metrics();
        let delivered = metrics.get("bowline_ledger_delivered_total") == count as f64;
        (delivered && metrics.get("bowline_gateway_backpressure_paused") == 0.0).then_some(metrics)
    });
    let paused = metrics.get("bowline_gateway_backpressure_paused_total");
    assert!(paused > 0.0, "a limit of 16 pauses a sender that does not wait");
    assert_eq!(paused, metrics.get("bowline_gateway_backpressure_resumed_total"));
    assert_eq!(metrics.get("bowline_ledger_accepted_total"), count as f64);
    metrics.assert_ledger_balances();
}

/// Sends large messages to bob until `stop`; how many were acknowledged.
fn pour(alice: &mut Client, most: u64, mut stop: impl FnMut() -> bool) -> u64 {
    let body = "x".repeat(20_000);
    for n in 1..=most {
        assert_eq!(alice.tell("bob", body.as_str()).seq(), n);
        alice.take_kept();
        if n % 10 == 0 && stop() {
            return n;
        }
    }
    panic!("nothing happened within {most} messages");
}

fn closed_slow(server: &Server) -> bool {
    let metrics = server.metrics();
    metrics.find_with("bowline_gateway_closed_total", "reason=\"slow-consumer\"") >= Some(1.0)
}

fn a_reader_that_stops_is_closed_4002_and_finds_everything_afterwards(transport: Transport) {
    let _turn = bowline_tests::turn();
    let server = Server::start();
    let mut alice = server.connect(transport, "alice");
    let mut bob = server.login("bob").device("phone").receive_buffer(65_536).connect(transport);
    // Bob reads nothing from here on. 1 MiB beside the socket is the limit.
    let mut closed_at = None;
    let count = pour(&mut alice, 2000, || {
        // A few more once it is closed: they find no connection.
        closed_slow(&server) && {
            let at = *closed_at.get_or_insert_with(Instant::now);
            at.elapsed() > Duration::from_millis(300)
        }
    });
    assert!(count * 20_000 > 1 << 20, "closed after {count} messages: too early");
    // What comes now are whole frames in order, and the reason. Some may be missing, none within.
    let ending = bob.expect_closed(4002, "slow-consumer");
    let mut last = 0;
    for push in &ending.frames {
        assert_eq!(push.kind(), "msg.push", "{}", push.text);
        if push.seq() > last {
            assert_eq!(push.seq(), last + 1, "a number was skipped");
            last = push.seq();
        }
    }
    assert!(last < count, "all {count} were delivered; nobody was slow");
    // Nothing is lost.
    let mut bob = server.connect_device(transport, "bob", "phone");
    let notice = bob.expect("sync.notice");
    assert_eq!(notice.list_of("conversations")[0]["last_seq"], json!(count));
    let all: Vec<u64> =
        bob.history_after("d:alice:bob", 0).iter().filter_map(|message| message["seq"].as_u64()).collect();
    assert_eq!(all, (1..=count).collect::<Vec<_>>());
    bob.recv("d:alice:bob", count);
    alice.expect_receipt("d:alice:bob", "delivered", "bob", count);
    let metrics = server.metrics();
    assert_eq!(metrics.get("bowline_ledger_delivered_total"), count as f64);
    metrics.assert_ledger_balances();
    assert_eq!(
        metrics.find("bowline_gateway_backpressure_paused_total"),
        metrics.find("bowline_gateway_backpressure_resumed_total"),
    );
}

fn a_slow_reader_changes_nobody_elses_deliveries(transport: Transport) {
    let _turn = bowline_tests::turn();
    let server = Server::start();
    server
        .post("/api/v1/groups", &json!({"group_id": "crew", "members": ["alice", "slow", "quick"]}))
        .expect(201);
    let mut alice = server.connect(transport, "alice");
    let _slow = server.login("slow").receive_buffer(65_536).connect(transport);
    let mut quick = server.connect(transport, "quick");
    let body = "x".repeat(20_000);
    let mut slowest = Duration::ZERO;
    for seq in 1..=300 {
        let began = Instant::now();
        assert_eq!(alice.say("g:crew", body.as_str()).seq(), seq);
        quick.expect_push("g:crew", seq);
        quick.recv("g:crew", seq);
        slowest = slowest.max(began.elapsed());
        alice.take_kept();
    }
    assert!(slowest < Duration::from_secs(3), "one delivery took {slowest:?}");
    until("the slow one is closed", || closed_slow(&server).then_some(()));
}

/// A conversation with a history that is worth asking for, and a client that asks without reading.
fn insatiable(
    server: &Server,
    transport: Transport,
    questions: u64,
) -> (Reader, std::thread::JoinHandle<Writer>) {
    let mut alice = server.connect(transport, "alice");
    alice.tell("bob", "x".repeat(30_000));
    drop(alice);
    let alice = server.login("alice").receive_buffer(65_536).connect(transport);
    let Client { reader, mut writer, .. } = alice;
    let asking = std::thread::spawn(move || {
        for n in 0..questions {
            let question =
                json!({"type": "history", "id": format!("q{n}"), "conversation_id": "d:alice:bob"});
            if writer.send(&question).is_err() {
                break;
            }
        }
        writer
    });
    (reader, asking)
}

fn who_asks_faster_than_it_reads_is_paused_and_not_cut(transport: Transport) {
    const QUESTIONS: u64 = 400;
    let _turn = bowline_tests::turn();
    let server = Server::start();
    let (mut reader, asking) = insatiable(&server, transport, QUESTIONS);
    until("the asker is paused", || {
        (server.metrics().get("bowline_gateway_backpressure_paused") >= 1.0).then_some(())
    });
    // Now it reads; every question has its answer, in order.
    let mut next = 0;
    read_until(&mut reader, Duration::from_secs(60), |frame| {
        assert_eq!(frame.text_of("id"), format!("q{next}"), "{}", &frame.text[..200.min(frame.text.len())]);
        assert_eq!(frame.kind(), "history.page");
        next += 1;
        next == QUESTIONS
    });
    let _writer = asking.join().expect("all questions were sent");
    until("nothing is paused", || {
        let metrics = server.metrics();
        let paused = metrics.get("bowline_gateway_backpressure_paused_total");
        let resumed = metrics.get("bowline_gateway_backpressure_resumed_total");
        (metrics.get("bowline_gateway_backpressure_paused") == 0.0 && paused == resumed).then_some(())
    });
}

fn who_never_reads_its_answers_is_closed_1013(transport: Transport) {
    let _turn = bowline_tests::turn();
    let server = Server::with(&[
        ("gateway.backpressure_timeout_ms", "700"),
        // Silence is not judged while reading is paused.
        ("gateway.ping_after_ms", "300"),
        ("gateway.ping_jitter_ms", "0"),
        ("gateway.close_after_ms", "600"),
    ]);
    let (mut reader, asking) = insatiable(&server, transport, 1_000_000);
    wait::until_within(PATIENCE, "it is closed for backpressure", || {
        let metrics = server.metrics();
        let closed = metrics.find_with("bowline_gateway_closed_total", "reason=\"backpressure-timeout\"");
        (closed >= Some(1.0)).then_some(())
    });
    let end = Instant::now() + PATIENCE;
    let mut last: Option<Value> = None;
    let close = loop {
        match reader.next(end).expect("the connection ends") {
            Event::Frame(frame) => last = Some(frame.json),
            Event::Closed(close) => break close,
            _ => {}
        }
    };
    let last = last.expect("frames came before the end");
    assert_eq!(
        (&last["type"], &last["code"], &last["reason"]),
        (&json!("session.closed"), &json!(1013), &json!("backpressure-timeout"))
    );
    if transport == Transport::Ws {
        assert_eq!(close, Some((1013, "backpressure-timeout".to_owned())));
    }
    drop(asking.join().expect("asking ended"));
    let metrics = server.metrics();
    assert_eq!(metrics.get("bowline_gateway_backpressure_paused"), 0.0);
    assert_eq!(
        metrics.get("bowline_gateway_backpressure_paused_total"),
        metrics.get("bowline_gateway_backpressure_resumed_total"),
        "one that closes while paused counts as resumed"
    );
}
