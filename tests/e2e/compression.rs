//! permessage-deflate: agreed only where it is configured, understood by other people's clients, and bounded.

use crate::third_party::suite;
use bowline_tests::{PATIENCE, Server, raw, token, tools};
use std::{io::Write, time::Duration};

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

#[test]
fn a_bomb_is_closed_1009_and_what_cannot_be_opened_1007() {
    let server = compressing();
    // A code in which each bit says 129 more zeros.
    let head = [
        0xec, 0xc1, 0x31, 0x01, 0x00, 0x00, 0x00, 0xc2, 0xa0, 0x4a, 0xeb, 0x9f, 0xce, 0x0c, 0xfe, 0x40, 0x01,
    ];
    let bomb = [&head[..], &[0; 1000]].concat();
    for (payload, code) in [(vec![0xff; 40], 1007), (bomb, 1009)] {
        let mut stream = raw::connect(server.ws());
        let path = format!("/ws?token={}", token::of("alice"));
        let offer = ("Sec-WebSocket-Extensions", "permessage-deflate");
        stream.write_all(&raw::upgrade(&path, &[offer])).expect("it is open");
        stream.write_all(&raw::ws_frame(0xc1, &payload)).expect("it is open");
        expect_close(&mut stream, code);
    }
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
