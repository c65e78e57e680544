//! permessage-deflate: agreed only where it is configured, understood by other people's clients, and bounded.

use crate::third_party::suite;
use bowline_tests::{PATIENCE, Server, raw, token, tools};
use std::{
    io::{Read, Write},
    time::Duration,
};

fn compressing() -> Server {
    Server::with(&[("gateway.compression", "true")])
}

/// What the server says to an offer, as it stands in the answer 101.
fn answer(server: &Server, offer: &str) -> Option<String> {
    let mut stream = raw::connect(server.ws());
    let path = format!("/ws?token={}", token::of("alice"));
    stream.write_all(&raw::upgrade(&path, &[("Sec-WebSocket-Extensions", offer)])).expect("it is open");
    let response = raw::read_response(&mut stream);
    assert_eq!(response.status, 101);
    response.header("sec-websocket-extensions").map(str::to_owned)
}

#[test]
fn an_offer_is_declined_unless_it_is_configured() {
    let plain = Server::start();
    assert_eq!(answer(&plain, "permessage-deflate; client_max_window_bits"), None);
    // And what comes compressed all the same is a breach.
    let mut stream = raw::connect(plain.ws());
    let path = format!("/ws?token={}", token::of("bob"));
    let offer = ("Sec-WebSocket-Extensions", "permessage-deflate");
    stream.write_all(&raw::upgrade(&path, &[offer])).expect("it is open");
    stream.write_all(&raw::ws_frame(0xc1, &[0xf2, 0x48, 0xcd, 0xc9, 0xc9, 0x07, 0x00])).expect("it is open");
    expect_close(&mut stream, 1002);

    let server = compressing();
    let taken = "permessage-deflate; server_no_context_takeover; client_no_context_takeover";
    let nine = format!("{taken}; server_max_window_bits=9");
    let rows = [
        ("permessage-deflate", Some(taken)),
        ("permessage-deflate; client_max_window_bits", Some(taken)),
        ("permessage-deflate; server_max_window_bits=9", Some(&*nine)),
        ("permessage-deflate; server_max_window_bits=8, permessage-deflate", Some(taken)),
        ("permessage-deflate; server_max_window_bits=8", None),
        ("permessage-deflate; unheard_of", None),
        ("x-other", None),
    ];
    for (offer, expected) in rows {
        assert_eq!(answer(&server, offer).as_deref(), expected, "{offer}");
    }
}

/// Reads up to the close frame, which ends everything.
fn expect_close(stream: &mut std::net::TcpStream, code: u16) {
    let (bytes, _) = raw::read_to_end(stream, Duration::from_secs(2).min(PATIENCE));
    let close = [&[0x88][..], &code.to_be_bytes()].concat();
    let found = bytes.windows(4).any(|window| window[0] == close[0] && window[2..] == close[1..]);
    assert!(found, "no close {code} in {:?}", String::from_utf8_lossy(&bytes));
}

/// A code in which each bit says 129 more zeros, and so many bytes of them.
fn bomb(bytes: usize) -> Vec<u8> {
    let head = [
        0xec, 0xc1, 0x31, 0x01, 0x00, 0x00, 0x00, 0xc2, 0xa0, 0x4a, 0xeb, 0x9f, 0xce, 0x0c, 0xfe, 0x40, 0x01,
    ];
    [&head[..], &vec![0; bytes]].concat()
}

#[test]
fn a_bomb_is_closed_1009_and_what_cannot_be_opened_1007() {
    let server = compressing();
    // Hello (RFC 7692, 7.2.3.1) without its end, in one frame and in two; a stored block of which one byte is missing.
    let hello = [0xf2, 0x48, 0xcd, 0xc9, 0xc9, 0x07, 0x00];
    let stored = [0x00, 0x05, 0x00, 0xfa, 0xff, 0x48, 0x65, 0x6c, 0x6c];
    let rows = [
        (vec![0xff; 40], 1007),
        (hello[..6].to_vec(), 1007),
        (hello[..3].to_vec(), 1007),
        (stored.to_vec(), 1007),
        (Vec::new(), 1007),
        (bomb(1000), 1009),
    ];
    for (payload, code) in rows {
        let mut stream = raw::connect(server.ws());
        let path = format!("/ws?token={}", token::of("alice"));
        let offer = ("Sec-WebSocket-Extensions", "permessage-deflate");
        stream.write_all(&raw::upgrade(&path, &[offer])).expect("it is open");
        stream.write_all(&raw::ws_frame(0xc1, &payload)).expect("it is open");
        expect_close(&mut stream, code);
    }
}

#[test]
fn a_message_that_was_cut_in_fragments_is_closed_1007() {
    let server = compressing();
    let mut stream = raw::connect(server.ws());
    let path = format!("/ws?token={}", token::of("alice"));
    stream
        .write_all(&raw::upgrade(&path, &[("Sec-WebSocket-Extensions", "permessage-deflate")]))
        .expect("it is open");
    stream.write_all(&raw::ws_frame(0x41, &[0xf2, 0x48])).expect("it is open");
    stream.write_all(&raw::ws_frame(0x80, &[0xcd, 0xc9])).expect("it is open");
    expect_close(&mut stream, 1007);
}

#[test]
fn the_echo_makes_no_more_of_a_bomb_than_of_any_message() {
    let server = Server::with(&[("gateway.compression", "true"), ("gateway.echo_path", "/echo")]);
    let open = || {
        let mut stream = raw::connect(server.ws());
        let offer = ("Sec-WebSocket-Extensions", "permessage-deflate");
        stream.write_all(&raw::upgrade("/echo", &[offer])).expect("it is open");
        assert_eq!(raw::read_response(&mut stream).status, 101);
        stream
    };
    let hello = raw::ws_frame(0xc1, &[0xf2, 0x48, 0xcd, 0xc9, 0xc9, 0x07, 0x00]);
    let mut stream = open();
    stream.write_all(&hello).expect("it is open");
    let mut echo = [0; 7];
    stream.read_exact(&mut echo).expect("it is echoed");
    assert_eq!(&echo, b"\x81\x05Hello");
    let before = server.memory_bytes();
    for _ in 0..20 {
        let mut stream = open();
        // 60 MB of zeros.
        stream.write_all(&raw::ws_frame(0xc1, &bomb(60_000))).expect("it is open");
        expect_close(&mut stream, 1009);
    }
    let grown = server.memory_bytes().saturating_sub(before);
    assert!(grown < 16 << 20, "it grew by {grown} bytes");
}

#[test]
fn compressed_and_plain_clients_understand_each_other() {
    let server = compressing();
    let mut command = tools::python();
    command.arg(tools::folder().join("python/deflate_test.py"));
    suite(command, &server, 5);
}

#[test]
fn clients_of_others_are_content_with_it() {
    let server = compressing();
    let mut command = tools::python();
    command.arg(tools::folder().join("python/client_test.py"));
    suite(command, &server, 14);
    let server = compressing();
    let mut command = tools::node();
    command.arg(tools::folder().join("node/client.mjs"));
    suite(command, &server, 5);
}
