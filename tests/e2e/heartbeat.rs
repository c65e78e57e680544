//! Silence: who is pinged, who is closed, and what counts as a sign of life.

use bowline_tests::{
    Server, Transport,
    client::{Event, Way, Writer},
    raw,
};
use serde_json::json;
use std::time::{Duration, Instant};

on_both![
    silence_is_pinged_and_then_closed_1001,
    a_pong_keeps_the_connection,
    any_bytes_keep_the_connection,
    ping_is_answered_with_its_data,
    a_bare_ping_is_answered_by_a_bare_pong,
    a_stranger_is_not_pinged,
    a_close_before_the_ping_does_not_wait_for_it,
];

const PING_AFTER: Duration = Duration::from_millis(400);
const CLOSE_AFTER: Duration = Duration::from_millis(1200);

fn server() -> Server {
    Server::with(&[
        ("gateway.ping_after_ms", "400"),
        ("gateway.ping_jitter_ms", "100"),
        ("gateway.close_after_ms", "1200"),
    ])
}

fn silence_is_pinged_and_then_closed_1001(transport: Transport) {
    let server = server();
    let mut client = server.connect(transport, "alice");
    assert_eq!(client.connected["ping_after_ms"], 400);
    assert_eq!(client.connected["close_after_ms"], 1200);
    let began = Instant::now();
    let ping = client.expect("ping");
    let pinged = ping.at - began;
    assert!(pinged + Duration::from_millis(50) > PING_AFTER, "pinged after {pinged:?}");
    assert!(pinged < CLOSE_AFTER, "pinged after {pinged:?}");
    let ending = client.expect_closed(1001, "heartbeat-timeout");
    let closed = began.elapsed();
    assert!(closed + Duration::from_millis(50) > CLOSE_AFTER, "closed after {closed:?}");
    assert!(ending.frames.is_empty(), "one ping is enough: {ending:?}");
    bowline_tests::until("the connection is gone from the tables", || {
        (server.status()["connections"] == 0).then_some(())
    });
    let metrics = server.metrics();
    let closed = metrics.find_with("bowline_gateway_closed_total", "reason=\"heartbeat-timeout\"");
    assert_eq!(closed, Some(1.0));
}

fn a_close_before_the_ping_does_not_wait_for_it(transport: Transport) {
    let server = Server::with(&[
        ("gateway.ping_after_ms", "40000"),
        ("gateway.ping_jitter_ms", "40000"),
        ("gateway.close_after_ms", "1000"),
    ]);
    let mut client = server.connect(transport, "alice");
    let began = Instant::now();
    let ending = client.expect_closed(1001, "heartbeat-timeout");
    let closed = began.elapsed();
    assert!(
        closed > Duration::from_millis(900) && closed < Duration::from_secs(10),
        "closed after {closed:?}"
    );
    assert!(ending.frames.is_empty(), "nothing was due before: {ending:?}");
}

fn a_pong_keeps_the_connection(transport: Transport) {
    let server = server();
    let mut client = server.connect(transport, "alice");
    let began = Instant::now();
    while began.elapsed() < CLOSE_AFTER * 2 {
        client.expect("ping");
        client.send(&json!({"type": "pong"}));
    }
    assert_eq!(client.tell("bob", "alive").seq(), 1);
}

fn any_bytes_keep_the_connection(transport: Transport) {
    let server = server();
    let mut client = server.connect(transport, "alice");
    // A frame that arrives byte by byte: no frame is ever complete in the meantime.
    let text = json!({"type": "msg.send", "id": "slow", "to": "bob", "body": "slowly"}).to_string();
    let bytes = match transport {
        Transport::Ws => raw::ws_frame(0x81, text.as_bytes()),
        Transport::Tcp => raw::tcp_frame(text.as_bytes()),
    };
    let (last, first) = bytes.split_last().expect("a frame has bytes");
    let began = Instant::now();
    let mut first = first.iter();
    while began.elapsed() < CLOSE_AFTER * 2 {
        if let Some(byte) = first.next() {
            client.writer.send_bytes(&[*byte]).expect("the connection is open");
        }
        // This is the pace of the client, not a wait for anything.
        std::thread::sleep(PING_AFTER / 8);
    }
    client.writer.send_bytes(first.as_slice()).expect("the connection is open");
    client.writer.send_bytes(&[*last]).expect("the connection is open");
    assert_eq!(client.reply("slow").expect_kind("msg.ack").seq(), 1);
    let pings = client.take_kept();
    assert!(pings.iter().all(|frame| frame.kind() != "ping"), "any bytes cancel the ping: {pings:?}");
}

#[test]
fn pings_of_the_websocket_protocol_keep_the_connection() {
    let server = server();
    let mut client = server.connect(Transport::Ws, "alice");
    let began = Instant::now();
    let mut pongs = 0;
    while began.elapsed() < CLOSE_AFTER * 2 {
        let Writer::Ws(socket) = &mut client.writer else { unreachable!("this is WebSocket") };
        socket.send(tungstenite::Message::Ping(vec![7, 7].into())).expect("the connection is open");
        let end = Instant::now() + PING_AFTER / 2;
        while let Some(event) = client.reader.next(end) {
            match event {
                Event::ProtocolPong(data) => {
                    assert_eq!(data, [7, 7]);
                    pongs += 1;
                }
                other => panic!("only pongs are due, not {other:?}"),
            }
        }
    }
    assert!(pongs >= 6, "each ping has its pong, these are {pongs}");
    assert_eq!(client.tell("bob", "alive").seq(), 1);
}

fn ping_is_answered_with_its_data(transport: Transport) {
    let server = Server::start();
    let mut client = server.connect(transport, "alice");
    for data in ["", "x", "é 🪢 \" \\", &"y".repeat(1024)] {
        client.send(&json!({"type": "ping", "data": data}));
        assert_eq!(client.expect("pong").text_of("data"), data);
    }
    client.send(&json!({"type": "ping"}));
    assert_eq!(client.expect("pong").text, r#"{"type":"pong"}"#);
}

fn a_bare_ping_is_answered_by_a_bare_pong(transport: Transport) {
    let server = Server::start();
    let mut client = server.connect(transport, "alice");
    for _ in 0..20 {
        client.send_text("ping");
        let event = client.reader.next(Instant::now() + bowline_tests::PATIENCE);
        assert!(matches!(event, Some(Event::BarePong)), "{event:?}");
    }
    // Twenty of them are no text that cannot be parsed.
    assert_eq!(client.tell("bob", "still here").seq(), 1);
}

fn a_stranger_is_not_pinged(transport: Transport) {
    let server = server();
    let mut client =
        server.login("nobody").way(Way::FirstFrame).open(transport).expect("no identity is needed to open");
    // It is closed for one reason or the other; nothing is said to it before.
    let ending = client.wait_closed();
    assert!(ending.frames.is_empty(), "{ending:?}");
    let code = ending.notice.expect("session.closed is the last frame").number_of("code");
    assert!([1001, 4003].contains(&code), "the code is {code}");
}
