//! Connections that never say who they are: they count like all others, and take from nobody what it needs.

use bowline_tests::{Certificates, Server, Setup, Transport, client::Refused, raw, until};
use std::{
    io::{Read, Write},
    net::TcpStream,
    sync::Arc,
    time::{Duration, Instant},
};

/// Four that say nothing, or not enough: an HTTP head without an end, a silent TCP connection, and on each listener one
/// that is answered and is nobody. Those come last, so that all are accepted when they are answered.
fn strangers(server: &Server) -> Vec<TcpStream> {
    let mut slow = raw::connect(server.listeners().ws);
    if !server.speaks_tls() {
        slow.write_all(b"GET /ws HTTP/1.1\r\nHost: localhost\r\n").expect("it is open");
    }
    let silent = raw::connect(server.listeners().tcp);
    let mut nameless = raw::connect(server.ws());
    nameless.write_all(&raw::upgrade("/ws", &[])).expect("it is open");
    assert_eq!(raw::read_response(&mut nameless).status, 101);
    let mut pinging = raw::connect(server.tcp());
    pinging.write_all(&raw::tcp_frame(b"ping")).expect("it is open");
    let mut pong = [0; 8];
    pinging.read_exact(&mut pong).expect("it is answered");
    assert_eq!(&pong, b"\0\0\0\x04pong");
    vec![slow, silent, nameless, pinging]
}

fn status(server: &Server) -> Result<(), u16> {
    match server.login("alice").try_connect(Transport::Ws) {
        Ok(_) => Ok(()),
        Err(Refused::Http { status, .. }) => Err(status),
        Err(other) => panic!("{other:?}"),
    }
}

/// Why `connect` is refused by TCP, and that it says when to come back.
fn refused_by_tcp(server: &Server) -> u64 {
    match server.login("alice").try_connect(Transport::Tcp) {
        Err(Refused::Closed(ending)) => {
            let notice = ending.notice.expect("session.closed is the last frame");
            assert!(notice.number_of("retry_after_ms") > 0, "{}", notice.text);
            notice.number_of("code")
        }
        Err(other) => panic!("{other:?}"),
        Ok(_) => panic!("one too many was let in"),
    }
}

#[test]
fn they_count_for_their_address() {
    let server = Setup::new().set("gateway.connections_per_address", 4).start();
    let held = strangers(&server);
    assert_eq!(status(&server), Err(429));
    assert_eq!(refused_by_tcp(&server), 1013);
    // They go, and have left nothing behind.
    drop(held);
    until("there is room again", || server.login("alice").try_connect(Transport::Ws).ok());
}

#[test]
fn they_count_among_all() {
    let server = Setup::new().set("gateway.max_connections", 4).start();
    let held = strangers(&server);
    assert_eq!(status(&server), Err(503));
    assert_eq!(refused_by_tcp(&server), 1013);
    // What is no session is served all the same.
    let page = raw::exchange(server.ws(), b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n");
    assert_eq!(page.status, 200);
    drop(held);
    until("there is room again", || server.login("alice").try_connect(Transport::Ws).ok());
}

#[test]
fn they_count_while_they_shake_hands() {
    let certificates = Arc::new(Certificates::new());
    let server = Setup::new().tls(&certificates).set("gateway.connections_per_address", 3).start();
    // Two whole ones go through tunnels from the same address; one never begins its handshake.
    let _whole = server.connect(Transport::Ws, "bob");
    let silent = [(); 2].map(|()| raw::connect(server.listeners().ws));
    assert_eq!(status(&server), Err(429));
    drop(silent);
    until("there is room again", || server.login("alice").try_connect(Transport::Ws).ok());
}

#[test]
fn one_address_takes_a_bounded_number_of_sockets() {
    let server = Setup::new().set("gateway.connections_per_address", 2).start();
    let held: Vec<TcpStream> = (0..100).map(|_| raw::connect(server.listeners().tcp)).collect();
    // Two are heard, some wait for their refusal, the others are closed at once.
    until("the others are closed", || {
        (server.metrics().find("bowline_gateway_turned_away_total") >= Some(80.0)).then_some(())
    });
    drop(held);
    until("there is room again", || server.login("alice").try_connect(Transport::Ws).ok());
}

#[test]
fn when_they_take_all_files_the_api_answers_on() {
    let server = Setup::new().open_files(256).set("gateway.max_connections", 100_000).start();
    let addresses = [server.listeners().ws, server.listeners().tcp];
    let held: Vec<TcpStream> = (0..600).map(|n| raw::connect(addresses[n % 2])).collect();
    until("no more are accepted", || {
        (server.metrics().find("bowline_gateway_accept_failures_total") >= Some(1.0)).then_some(())
    });
    let (began, cpu) = (Instant::now(), cpu_seconds(&server));
    while began.elapsed() < Duration::from_secs(2) {
        let asked = Instant::now();
        for path in ["/healthz", "/readyz"] {
            // A connection of its own: it takes a file.
            let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
            assert_eq!(raw::exchange(server.api(), request.as_bytes()).status, 200, "{path}");
        }
        assert!(asked.elapsed() < Duration::from_secs(1), "it took {:?}", asked.elapsed());
        std::thread::sleep(Duration::from_millis(50));
    }
    // Accepting in vain is no loop without a pause.
    let (share, seconds) = (cpu_seconds(&server) - cpu, began.elapsed().as_secs_f64());
    assert!(share < seconds / 2.0, "{share} s of CPU in {seconds} s");
    drop(held);
    until("clients get in again", || server.login("alice").try_connect(Transport::Ws).ok());
}

fn cpu_seconds(server: &Server) -> f64 {
    server.metrics().find("process_cpu_seconds_total").expect("a metric of every process")
}

/// A preface over HTTP/2, whole or not, and a request whose head does not end.
#[test]
fn http_2_without_a_request_is_closed_after_10_s() {
    const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    const SETTINGS: &[u8] = &[0, 0, 0, 4, 0, 0, 0, 0, 0];
    // HEADERS of stream 1 without END_HEADERS: `:method: GET`.
    const HEADERS: &[u8] = &[0, 0, 1, 1, 1, 0, 0, 0, 1, 0x82];
    let _turn = bowline_tests::turn();
    let certificates = Arc::new(Certificates::new());
    let (plain, tls) = (Server::start(), Setup::new().tls(&certificates).start());
    let began = Instant::now();
    let mut streams = Vec::new();
    for address in [plain.ws(), plain.api(), tls.ws()] {
        for end in [18, PREFACE.len(), PREFACE.len() + 9, PREFACE.len() + 19] {
            let mut stream = raw::connect(address);
            stream.write_all(&[PREFACE, SETTINGS, HEADERS].concat()[..end]).expect("it is open");
            streams.push((address, end, stream));
        }
    }
    for (address, end, stream) in &mut streams {
        let (_, ended) = raw::read_to_end(stream, Duration::from_secs(25));
        assert!(ended, "{address}, {end} bytes: still open after {:?}", began.elapsed());
    }
    let took = began.elapsed();
    assert!(took > Duration::from_secs(9), "closed after {took:?}");
    assert!(took < Duration::from_secs(20), "closed after {took:?}");
}
