//! TLS on the listeners for clients: what is agreed, whose certificate it is, and that nobody's handshake is another
//! one's trouble. `scripts/test tls` runs much of the suite through TLS besides.

use bowline_tests::{
    Certificates, PATIENCE, Server, Setup, Transport, bowline, http, raw, tools, until, wait::until_within,
};
use serde_json::{Value, json};
use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    process::Command,
    sync::Arc,
    time::{Duration, Instant},
};

on_both![
    two_clients_chat,
    a_reload_gives_new_connections_the_new_certificate_and_open_ones_go_on,
    bytes_that_are_no_tls_end_their_own_connection_only,
];

fn start() -> (Arc<Certificates>, Server) {
    let certificates = Arc::new(Certificates::new());
    let server = Setup::new().tls(&certificates).start();
    (certificates, server)
}

fn listener(server: &Server, transport: Transport) -> SocketAddr {
    match transport {
        Transport::Ws => server.listeners().ws,
        Transport::Tcp => server.listeners().tcp,
    }
}

/// A handshake by Python's `ssl`.
fn probe(address: SocketAddr, certificates: &Certificates, options: &[&str]) -> Value {
    let mut command = tools::python();
    command.arg(tools::folder().join("python/tls_probe.py"));
    command.arg(address.to_string()).arg(certificates.ca()).args(options);
    let output = command.output().expect("Python can be run");
    let text = String::from_utf8_lossy(&output.stdout);
    serde_json::from_str(&text)
        .unwrap_or_else(|error| panic!("{error} in {text:?}: {}", String::from_utf8_lossy(&output.stderr)))
}

fn handshakes(server: &Server, outcome: &str) -> f64 {
    let label = format!("outcome=\"{outcome}\"");
    server.metrics().find_with("bowline_gateway_tls_handshakes_total", &label).unwrap_or(0.0)
}

fn two_clients_chat(transport: Transport) {
    let (_certificates, server) = start();
    let mut alice = server.connect(transport, "alice");
    let mut bob = server.connect(transport, "bob");
    for seq in 1..=20 {
        // From a few bytes to more than one record holds.
        let body = "x".repeat(30_000 * (seq as usize % 2) + seq as usize);
        assert_eq!(alice.tell("bob", body.as_str()).seq(), seq);
        assert_eq!(bob.expect_push("d:alice:bob", seq).json["body"], json!(body));
    }
    assert!(handshakes(&server, "done") >= 2.0);
    assert_eq!(handshakes(&server, "failed"), 0.0);
}

#[test]
fn only_tls_1_3_is_spoken() {
    let (certificates, server) = start();
    for (transport, alpn) in [(Transport::Ws, json!("http/1.1")), (Transport::Tcp, Value::Null)] {
        let address = listener(&server, transport);
        let agreed = probe(address, &certificates, &[]);
        assert_eq!((&agreed["version"], &agreed["alpn"]), (&json!("TLSv1.3"), &alpn), "{agreed}");
        let refused = probe(address, &certificates, &["1.2"]);
        let cause = refused["failed"].as_str().unwrap_or_default();
        assert!(cause.to_lowercase().contains("protocol"), "{transport:?}: {refused}");
    }
    if Command::new("openssl").arg("version").output().is_err() {
        return;
    }
    let output = Command::new("openssl")
        .args(["s_client", "-connect", &server.listeners().tcp.to_string(), "-servername", "localhost"])
        .args(["-verify_return_error", "-CAfile"])
        .arg(certificates.ca())
        .stdin(std::process::Stdio::null())
        .output()
        .expect("openssl can be run");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("TLSv1.3") && text.contains("Verify return code: 0 (ok)"), "{text}");
}

fn a_reload_gives_new_connections_the_new_certificate_and_open_ones_go_on(transport: Transport) {
    let (certificates, server) = start();
    let address = listener(&server, transport);
    let mut alice = server.connect(transport, "alice");
    let mut bob = server.connect(transport, "bob");
    let first = probe(address, &certificates, &[])["cert"].clone();
    assert!(first.is_string());

    certificates.renew();
    assert_eq!(probe(address, &certificates, &[])["cert"], first, "nobody has said that it is to be read");
    server.signal("HUP");
    let second = until("the new certificate is shown", || {
        Some(probe(address, &certificates, &[])["cert"].clone()).filter(|cert| *cert != first)
    });
    assert!(second.is_string());
    alice.tell("bob", "still here");
    bob.expect_push("d:alice:bob", 1);

    // What cannot be used changes nothing, and the log says what to do.
    std::fs::write(certificates.key(), "no key at all").expect("a file can be written");
    server.signal("HUP");
    let line = until("the log tells of it", || {
        server.log().into_iter().find(|line| line.contains("the certificate stays as it was"))
    });
    assert!(line.contains("gateway.tls.key") && line.contains("key.pem"), "{line}");
    assert_eq!(probe(address, &certificates, &[])["cert"], second);
    bob.tell("alice", "and here");
    alice.expect_push("d:alice:bob", 2);
}

#[test]
fn a_certificate_that_cannot_be_used_is_exit_code_2() {
    let good = Certificates::new();
    let other = Certificates::new();
    let path = |path: std::path::PathBuf| path.to_string_lossy().into_owned();
    let (cert, key) = (path(good.cert()), path(good.key()));
    type Row<'a> = (&'a [(&'a str, &'a str)], &'a str, &'a str);
    let rows: [Row<'_>; 6] = [
        (&[("gateway.tls.cert", &cert)], "gateway.tls.key", "takes both"),
        (&[("gateway.tls.key", &key)], "gateway.tls.cert", "takes both"),
        (
            &[("gateway.tls.cert", "/nowhere/cert.pem"), ("gateway.tls.key", &key)],
            "gateway.tls.cert",
            "/nowhere/cert.pem",
        ),
        (&[("gateway.tls.cert", &key), ("gateway.tls.key", &key)], "gateway.tls.cert", "no certificate"),
        (&[("gateway.tls.cert", &cert), ("gateway.tls.key", &cert)], "gateway.tls.key", "no private key"),
        (
            &[("gateway.tls.cert", &cert), ("gateway.tls.key", &path(other.key()))],
            "gateway.tls.key",
            "does not belong",
        ),
    ];
    for (settings, key, cause) in rows {
        let setup = settings.iter().fold(Setup::new(), |setup, (key, value)| setup.set(key, value));
        let ended = setup.start_in_vain();
        assert_eq!(ended.code, Some(2), "{settings:?}: {}", ended.stderr);
        assert!(ended.stderr.contains(key) && ended.stderr.contains(cause), "{settings:?}: {}", ended.stderr);
    }
}

#[test]
fn slow_handshakes_are_cut_after_10_s_and_cost_nobody_else() {
    const HALF_OPEN: usize = 64;
    let _turn = bowline_tests::turn();
    let (_certificates, server) = start();
    let began = Instant::now();
    let silent: Vec<TcpStream> = (0..HALF_OPEN)
        .map(|n| {
            let transport = if n % 2 == 0 { Transport::Ws } else { Transport::Tcp };
            TcpStream::connect(listener(&server, transport)).expect("it listens")
        })
        .collect();
    // One byte a second of what could become a handshake.
    let mut slow = TcpStream::connect(listener(&server, Transport::Ws)).expect("it listens");
    let dripping = std::thread::spawn(move || {
        let record = [&[22, 3, 1, 2, 0, 1, 0, 1, 252, 3, 3][..], &[7; 500]].concat();
        slow.set_read_timeout(Some(Duration::from_secs(1))).expect("an open socket takes options");
        for byte in record {
            if slow.write_all(&[byte]).is_err() || slow.read(&mut [0; 64]).is_ok() {
                break;
            }
        }
        began.elapsed()
    });
    until("all are under way", || {
        let under_way = server.metrics().get("bowline_gateway_tls_handshakes_under_way");
        (under_way >= HALF_OPEN as f64).then_some(())
    });
    for (n, transport) in [Transport::Ws, Transport::Tcp].into_iter().cycle().take(10).enumerate() {
        let at = Instant::now();
        let mut client = server.connect(transport, &format!("user{n}"));
        client.tell("somebody", "hello");
        assert!(at.elapsed() < Duration::from_secs(2), "{:?} for one that is not slow", at.elapsed());
    }
    for mut stream in silent {
        let (bytes, ended) = raw::read_to_end(&mut stream, Duration::from_secs(15));
        assert!(ended && bytes.is_empty(), "{bytes:?}, ended {ended}");
    }
    let (took, dripped) = (began.elapsed(), dripping.join().expect("it was cut"));
    for took in [took, dripped] {
        assert!((9.0..13.0).contains(&took.as_secs_f64()), "cut after {took:?}");
    }
    until("they are counted", || (handshakes(&server, "timed_out") == HALF_OPEN as f64 + 1.0).then_some(()));
    assert_eq!(server.metrics().get("bowline_gateway_tls_handshakes_under_way"), 0.0);
}

fn bytes_that_are_no_tls_end_their_own_connection_only(transport: Transport) {
    let (_certificates, server) = start();
    let mut alice = server.connect(transport, "alice");
    let garbage: [&[u8]; 5] = [
        b"GET /ws HTTP/1.1\r\nHost: localhost\r\n\r\n",
        &[0; 70_000],
        &[22, 3, 1, 0xff, 0xff, 1, 2, 3],
        &[22, 3, 1, 0, 5, 1, 0xff, 0xff, 0xff, 0],
        &[23, 3, 3, 0, 4, 1, 2, 3, 4],
    ];
    for (n, bytes) in garbage.into_iter().enumerate() {
        let mut stream = TcpStream::connect(listener(&server, transport)).expect("it listens");
        // Whoever closes on the first of it does not read the rest.
        let _gone = stream.write_all(bytes);
        // The handshake message that claims to be long may be waited for.
        if n == 3 {
            drop(stream);
        } else {
            let (answer, ended) = raw::read_to_end(&mut stream, PATIENCE);
            assert!(ended, "garbage {n} was not cut");
            assert!(answer.len() < 10, "nothing but an alert: {answer:?}");
        }
    }
    until("all have failed", || (handshakes(&server, "failed") == garbage.len() as f64).then_some(()));
    alice.tell("bob", "still here");
}

/// What one connection through a tunnel answers to a request.
fn ask(stream: &mut TcpStream, request: &str) -> String {
    stream.write_all(request.as_bytes()).expect("the connection is open");
    let (mut text, mut buffer) = (String::new(), [0; 65_536]);
    until_within(PATIENCE, "an answer", || {
        let count = stream.read(&mut buffer).expect("the connection is open");
        text.push_str(&String::from_utf8_lossy(&buffer[..count]));
        let (head, body) = text.split_once("\r\n\r\n")?;
        let length =
            head.lines().find_map(|line| line.to_lowercase().strip_prefix("content-length: ")?.parse().ok());
        (body.len() >= length.unwrap_or(0)).then_some(())
    });
    text
}

#[test]
fn http_goes_on_over_tls() {
    let (_certificates, server) = start();
    let token = bowline_tests::token::of("alice");
    let page = http::request("GET", &server.public_url("/"), &[], None).expect(200);
    assert!(page.text.contains("<html"), "{}", page.text);
    let bearer = format!("Bearer {token}");
    let headers = [("authorization", bearer.as_str())];
    let place = http::request("GET", &server.public_url("/v1/place"), &headers, None).expect(200).json();
    assert_eq!(place["ws"], json!(format!("wss://{}/ws", server.listeners().ws)));
    assert_eq!(place["tcp"], json!(format!("tls://{}", server.listeners().tcp)));
    // A body of many records, up and, as a refusal that names nothing of it, down.
    let message = json!({"id": "m1", "to": "bob", "body": "x".repeat(30_000)}).to_string();
    let url = server.public_url("/v1/messages");
    let ack = http::request("POST", &url, &headers, Some(&message)).expect(200).json();
    assert_eq!((&ack["type"], &ack["seq"]), (&json!("msg.ack"), &json!(1)));
    let large = json!({"id": "m2", "to": "bob", "body": "x".repeat(3_000_000)}).to_string();
    http::request("POST", &url, &headers, Some(&large)).expect_refusal(413);
}

#[test]
fn a_kept_connection_becomes_a_web_socket_under_tls() {
    let (_certificates, server) = start();
    let mut stream = TcpStream::connect(server.ws()).expect("the tunnel listens");
    stream.set_read_timeout(Some(PATIENCE)).expect("an open socket takes options");
    for _ in 0..2 {
        let page = ask(&mut stream, "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n");
        assert!(page.starts_with("HTTP/1.1 200 "), "{page}");
    }
    let upgrade = format!(
        "GET /ws?token={} HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
        bowline_tests::token::of("alice")
    );
    let mut text = ask(&mut stream, &upgrade);
    assert!(text.starts_with("HTTP/1.1 101 "), "{text}");
    let mut buffer = [0; 4096];
    while !text.contains("\"connected\"") {
        let count = stream.read(&mut buffer).expect("the connection is open");
        assert!(count > 0, "{text}");
        text.push_str(&String::from_utf8_lossy(&buffer[..count]));
    }
    stream.write_all(&raw::ws_frame(0x81, b"ping")).expect("the connection is open");
    let count = stream.read(&mut buffer).expect("the connection is open");
    assert_eq!(&buffer[..count], b"\x81\x04pong");
}

#[test]
fn who_speaks_no_common_protocol_is_told_so() {
    let (certificates, server) = start();
    let offer = |transport, protocols: &str| {
        let output = Command::new("openssl")
            .args(["s_client", "-connect", &listener(&server, transport).to_string()])
            .args(["-servername", "localhost", "-alpn", protocols, "-CAfile"])
            .arg(certificates.ca())
            .stdin(std::process::Stdio::null())
            .output()
            .expect("openssl can be run");
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat()
    };
    // Alert 120 (RFC 7301, 3.2).
    let told = offer(Transport::Ws, "h2,foo");
    assert!(told.contains("alert no application protocol"), "{told}");
    let told = offer(Transport::Ws, "foo,http/1.1");
    assert!(told.contains("ALPN protocol: http/1.1") && !told.contains("alert"), "{told}");
    // Frames have no name there.
    let told = offer(Transport::Tcp, "foo");
    assert!(told.contains("No ALPN negotiated") && told.contains("Verify return code: 0 (ok)"), "{told}");
}

#[test]
fn the_command_line_speaks_tls() {
    let (certificates, server) = start();
    let ca = certificates.ca().to_string_lossy().into_owned();
    let token = bowline_tests::token::of("alice");
    let urls = [
        format!("wss://localhost:{}/ws", server.listeners().ws.port()),
        format!("tls://{}", server.listeners().tcp),
    ];
    for url in &urls {
        let chat = ["chat", "--user", "alice", "--to", "bob", "--url", url, "--token", &token];
        let ended = bowline(&[&chat[..], &["--ca", &ca]].concat());
        assert_eq!(ended.code, Some(0), "{url}: {} {}", ended.stdout, ended.stderr);
        assert!(ended.stdout.contains("connected as alice"), "{url}: {}", ended.stdout);
    }
    // Whoever is not trusted is not spoken to.
    let other = Certificates::new();
    let other = other.ca().to_string_lossy().into_owned();
    for (ca, failed, code) in [(&other, 2, 1), (&ca, 0, 0)] {
        let bench = ["bench", "idle", "--connections", "2", "--duration", "1s", "--json", "--url", &urls[0]];
        let ended = bowline(&[&bench[..], &["--token", &token, "--ca", ca]].concat());
        assert_eq!(ended.code, Some(code), "{} {}", ended.stdout, ended.stderr);
        let report: Value = serde_json::from_str(&ended.stdout).expect("the report is JSON");
        assert_eq!(report["failed"], json!(failed), "{report}");
    }
}
