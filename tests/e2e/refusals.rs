//! The gate before the upgrade: each refusal with its status, its body and its place in the order.

use bowline_tests::{
    Server, Setup, Transport, client::Refused, client::Way, raw, raw::Response, token, until,
};
use serde_json::json;
use std::{net::SocketAddr, time::Duration};

const CODES: [&str; 13] = [
    "malformed",
    "unknown_type",
    "unauthenticated",
    "forbidden",
    "identity_mismatch",
    "not_found",
    "too_large",
    "rate_limited",
    "overloaded",
    "unavailable",
    "conflict",
    "version",
    "internal",
];

fn check(response: &Response, status: u16) {
    assert_eq!(response.status, status, "{response:?}");
    let body = response.json();
    assert!(body["code"].as_str().is_some_and(|code| CODES.contains(&code)), "{response:?}");
    assert!(body["message"].as_str().is_some_and(|text| !text.is_empty()), "{response:?}");
    let retry = response.header("retry-after").map(|text| text.parse::<u64>().expect("seconds"));
    assert_eq!(retry.is_some(), [429, 503].contains(&status), "{response:?}");
}

fn refused(address: SocketAddr, request: &[u8], status: u16) -> Response {
    let response = raw::exchange(address, request);
    check(&response, status);
    response
}

fn bearer(token: &str) -> String {
    format!("Bearer {token}")
}

#[test]
fn a_request_head_above_64_kib_is_431() {
    let server = Server::start();
    let filler = "x".repeat(70 * 1024);
    refused(server.ws(), &raw::upgrade("/ws", &[("X-Filler", &filler)]), 431);
    // It comes first: the path is wrong as well.
    refused(server.ws(), &raw::upgrade("/nowhere", &[("X-Filler", &filler)]), 431);
    // Half of it is taken.
    let (half, good) = ("x".repeat(30 * 1024), bearer(&token::of("alice")));
    let response =
        raw::exchange(server.ws(), &raw::upgrade("/ws", &[("X-Filler", &half), ("Authorization", &good)]));
    assert_eq!(response.status, 101, "{response:?}");
}

#[test]
fn a_head_of_many_lines_is_taken() {
    let server = Server::start();
    let good = bearer(&token::of("alice"));
    for count in [99, 101, 260, 4000] {
        let names: Vec<String> = (0..count).map(|n| format!("X{n}")).collect();
        let mut headers: Vec<(&str, &str)> = names.iter().map(|name| (&**name, "a")).collect();
        headers.push(("Authorization", &good));
        assert_eq!(raw::exchange(server.ws(), &raw::upgrade("/ws", &headers)).status, 101, "{count}");
        let lines: String = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        let plain =
            |path: &str| format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n{lines}\r\n").into_bytes();
        assert_eq!(raw::exchange(server.ws(), &plain("/v1/place")).status, 200, "{count}");
        assert_eq!(raw::exchange(server.api(), &plain("/healthz")).status, 200, "{count}");
        // And on a connection that is kept.
        let mut stream = raw::connect(server.ws());
        for _ in 0..2 {
            std::io::Write::write_all(&mut stream, &plain("/v1/place")).expect("it is open");
            assert_eq!(raw::read_response(&mut stream).status, 200, "{count}");
        }
    }
    // Beyond that it is bounded, if less exactly.
    let filler = "x".repeat(300 * 1024);
    let plain = format!("GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Filler: {filler}\r\n\r\n");
    assert_eq!(raw::exchange(server.api(), plain.as_bytes()).status, 431);
}

#[test]
fn what_is_no_upgrade_is_426_on_a_kept_connection_too() {
    let server = Server::start();
    let mut stream = raw::connect(server.ws());
    for (path, status) in [("/", 200), ("/ws", 426), ("/ws?token=x", 426), ("/", 200)] {
        let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n");
        std::io::Write::write_all(&mut stream, request.as_bytes()).expect("it is open");
        let response = raw::read_response(&mut stream);
        assert_eq!(response.status, status, "{path}: {response:?}");
        if status == 426 {
            assert_eq!(response.json()["code"], "malformed");
            assert_eq!(response.header("sec-websocket-version"), Some("13"));
            assert_eq!(response.header("upgrade"), Some("websocket"));
        }
    }
}

#[test]
fn a_wrong_path_is_404() {
    let server = Server::start();
    let response = refused(server.ws(), &raw::upgrade("/nowhere", &[]), 404);
    assert_eq!(response.json()["code"], "not_found");
    // Before 426: it is no upgrade either.
    refused(server.ws(), b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\n\r\n", 404);
}

#[test]
fn the_path_is_configurable() {
    let server = Server::with(&[("gateway.ws_path", "/live/socket")]);
    refused(server.ws(), &raw::upgrade("/ws", &[]), 404);
    let good = bearer(&token::of("alice"));
    let response = raw::exchange(server.ws(), &raw::upgrade("/live/socket", &[("Authorization", &good)]));
    assert_eq!(response.status, 101, "{response:?}");
}

#[test]
fn what_is_no_upgrade_is_426() {
    let server = Server::start();
    let bad = bearer("garbage");
    let request = format!("GET /ws HTTP/1.1\r\nHost: localhost\r\nAuthorization: {bad}\r\n\r\n");
    // Before 401: its token is bad as well.
    let response = refused(server.ws(), request.as_bytes(), 426);
    let upgrade = response.header("upgrade").map(str::to_ascii_lowercase);
    assert_eq!(upgrade.as_deref(), Some("websocket"), "the answer names what it wants: {response:?}");
}

#[test]
fn a_malformed_upgrade_is_400() {
    let server = Server::start();
    let head = |rest: &str| {
        format!(
            "GET /ws HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n{rest}\r\n\r\n"
        )
    };
    let bad = bearer("garbage");
    for rest in [
        "Sec-WebSocket-Version: 13".to_owned(),
        "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: short".to_owned(),
        format!("Sec-WebSocket-Version: 13\r\nAuthorization: {bad}"),
    ] {
        refused(server.ws(), head(&rest).as_bytes(), 400);
    }
}

#[test]
fn another_version_of_websocket_is_426_and_ours_is_named() {
    let server = Server::start();
    for version in ["8", "12", "14", "0"] {
        let request = String::from_utf8(raw::upgrade("/ws", &[])).expect("it is text");
        let request = request.replace("Version: 13", &format!("Version: {version}"));
        let response = refused(server.ws(), request.as_bytes(), 426);
        assert_eq!(response.header("sec-websocket-version"), Some("13"), "{response:?}");
    }
}

#[test]
fn a_host_is_named_once_and_an_origin_not_twice() {
    let server = Server::start();
    let good = bearer(&token::of("alice"));
    let upgrade = |headers: &[(&str, &str)]| {
        let all = [headers, &[("Authorization", &*good)]].concat();
        String::from_utf8(raw::upgrade("/ws", &all)).expect("it is text")
    };
    let origin = ("Origin", "https://good.example");
    assert_eq!(raw::exchange(server.ws(), upgrade(&[origin]).as_bytes()).status, 101);
    for request in [
        upgrade(&[]).replace("Host: localhost\r\n", ""),
        upgrade(&[("Host", "other")]),
        upgrade(&[origin, origin]),
        upgrade(&[origin, ("Origin", "https://evil.example")]),
    ] {
        assert_eq!(refused(server.ws(), request.as_bytes(), 400).json()["code"], "malformed", "{request}");
    }
    // So it is for HTTP beside it, and for the API.
    let plain = |headers: &str| format!("GET / HTTP/1.1\r\nConnection: close\r\n{headers}\r\n");
    assert_eq!(raw::exchange(server.ws(), plain("Host: a\r\nOrigin: b\r\n").as_bytes()).status, 200);
    for headers in ["", "Host: a\r\nHost: a\r\n", "Host: a\r\nOrigin: b\r\nOrigin: c\r\n"] {
        refused(server.ws(), plain(headers).as_bytes(), 400);
        refused(server.api(), plain(headers).replace("GET /", "GET /healthz").as_bytes(), 400);
    }
}

#[test]
fn several_tokens_are_400() {
    let server = Server::start();
    let (good, good_bearer) = (token::of("alice"), bearer(&token::of("alice")));
    let subprotocol = format!("bowline.v1.json, bearer.{good}");
    let by_query = format!("/ws?token={good}");
    for (path, headers) in [
        (&*by_query, vec![("Authorization", &*good_bearer)]),
        (&*by_query, vec![("Sec-WebSocket-Protocol", &*subprotocol)]),
        ("/ws", vec![("Authorization", &*good_bearer), ("Sec-WebSocket-Protocol", &*subprotocol)]),
    ] {
        refused(server.ws(), &raw::upgrade(path, &headers), 400);
    }
}

#[test]
fn a_draining_server_is_503() {
    let server = Server::with(&[("gateway.allowed_origins", r#"["https://good.example"]"#)]);
    // Somebody stays, so that the drain goes on.
    let _held = server.connect(Transport::Ws, "alice");
    server.post("/admin/drain?reason=test", &json!({})).expect(202);
    // Before 403 and 401: the origin and the token are bad as well.
    let bad = bearer("garbage");
    let headers = [("Origin", "https://evil.example"), ("Authorization", &*bad)];
    let response = refused(server.ws(), &raw::upgrade("/ws", &headers), 503);
    assert!(["unavailable", "overloaded"].contains(&response.json()["code"].as_str().expect("a code")));
    // Behind 404, 426 and 400.
    refused(server.ws(), &raw::upgrade("/nowhere", &[]), 404);
    refused(server.ws(), b"GET /ws HTTP/1.1\r\nHost: localhost\r\n\r\n", 426);
    let several = format!("/ws?token={}", token::of("alice"));
    refused(server.ws(), &raw::upgrade(&several, &[("Authorization", &bad)]), 400);
}

#[test]
fn a_full_server_is_503_and_1013_and_takes_the_next_once_there_is_room() {
    let server = Server::with(&[("gateway.max_connections", "2")]);
    let first = server.connect(Transport::Ws, "alice");
    let _second = server.connect(Transport::Tcp, "bob");
    let good = bearer(&token::of("carol"));
    refused(server.ws(), &raw::upgrade("/ws", &[("Authorization", &good)]), 503);
    match server.login("carol").try_connect(Transport::Tcp) {
        Err(Refused::Closed(ending)) => {
            let notice = ending.notice.expect("session.closed is the last frame");
            assert_eq!(notice.number_of("code"), 1013, "{}", notice.text);
            assert!(notice.number_of("retry_after_ms") > 0, "{}", notice.text);
        }
        Err(other) => panic!("{other:?}"),
        Ok(_) => panic!("a third connection was let in"),
    }
    first.close();
    until("there is room again", || server.login("carol").try_connect(Transport::Ws).ok());
}

#[test]
fn too_many_handshakes_are_429_and_1013() {
    let server = Server::with(&[
        ("gateway.handshakes_per_second", "1"),
        ("gateway.allowed_origins", r#"["https://good.example"]"#),
    ]);
    // Before 403: the origin is bad as well. Each of these counts, whatever becomes of it.
    let request = raw::upgrade("/ws", &[("Origin", "https://evil.example")]);
    let first = raw::exchange(server.ws(), &request);
    assert_eq!(first.status, 403, "{first:?}");
    let response = until("the limit is reached", || {
        Some(raw::exchange(server.ws(), &request)).filter(|response| response.status != 403)
    });
    check(&response, 429);
    assert_eq!(response.json()["code"], "rate_limited");
    let notice = until("the limit is reached by TCP too", || {
        match server.login("alice").try_connect(Transport::Tcp) {
            Err(Refused::Closed(ending)) => ending.notice,
            _ => None,
        }
    });
    assert_eq!(notice.number_of("code"), 1013, "{}", notice.text);
    assert!(notice.number_of("retry_after_ms") > 0, "{}", notice.text);
    // It is a rate: after a while one gets in again.
    until("a second has passed", || server.login("alice").try_connect(Transport::Tcp).ok());
}

#[test]
fn a_forbidden_origin_is_403() {
    let server = Server::with(&[("gateway.allowed_origins", r#"["https://good.example"]"#)]);
    let good = bearer(&token::of("alice"));
    let attempt = |origin: Option<&str>, token: &str| {
        let mut headers = vec![("Authorization", token)];
        headers.extend(origin.map(|origin| ("Origin", origin)));
        raw::exchange(server.ws(), &raw::upgrade("/ws", &headers))
    };
    assert_eq!(attempt(Some("https://good.example"), &good).status, 101);
    assert_eq!(attempt(None, &good).status, 101, "a missing origin passes");
    for origin in ["https://evil.example", "http://good.example", "https://good.example.evil.example"] {
        check(&attempt(Some(origin), &good), 403);
    }
    // Before 401.
    check(&attempt(Some("https://evil.example"), &bearer("garbage")), 403);
}

#[test]
fn an_empty_list_of_origins_allows_all() {
    let server = Server::start();
    let good = bearer(&token::of("alice"));
    let headers = [("Authorization", &*good), ("Origin", "https://anywhere.example")];
    assert_eq!(raw::exchange(server.ws(), &raw::upgrade("/ws", &headers)).status, 101);
}

#[test]
fn a_bad_token_is_401_and_one_without_a_user_400() {
    let server = Server::start();
    // Before 403 for the binding: the device is another as well.
    let bad = token::signed_with(
        &json!({"sub": "alice", "exp": token::now_secs() + 60, "device_id": "phone"}),
        "another secret, as long as the real one",
    );
    let response =
        refused(server.ws(), &raw::upgrade("/ws?device_id=laptop", &[("Authorization", &bearer(&bad))]), 401);
    assert_eq!(response.json()["code"], "unauthenticated");
    let nobody = token::signed(&json!({"exp": token::now_secs() + 60}));
    refused(server.ws(), &raw::upgrade("/ws", &[("Authorization", &bearer(&nobody))]), 400);
}

#[test]
fn a_device_other_than_the_bound_one_is_403() {
    let server = Server::with(&[("gateway.same_device", "refuse")]);
    let bound = bearer(&token::of_device("alice", "phone"));
    let held = server.login("alice").device("laptop").connect(Transport::Ws);
    // Before 409: that device is in use as well.
    refused(server.ws(), &raw::upgrade("/ws?device_id=laptop", &[("Authorization", &bound)]), 403);
    drop(held);
}

#[test]
fn a_device_in_use_is_409_where_the_policy_refuses() {
    let server = Server::with(&[("gateway.same_device", "refuse")]);
    let _held = server.login("alice").device("phone").connect(Transport::Ws);
    let good = bearer(&token::of("alice"));
    let request = raw::upgrade("/ws?device_id=phone", &[("Authorization", &good)]);
    let response = refused(server.ws(), &request, 409);
    assert_eq!(response.json()["code"], "conflict");
}

#[test]
fn refusals_are_counted_by_status() {
    let server = Server::start();
    for _ in 0..3 {
        refused(server.ws(), &raw::upgrade("/ws", &[("Authorization", "Bearer garbage")]), 401);
    }
    refused(server.ws(), &raw::upgrade("/nowhere", &[]), 404);
    until("the counters have caught up", || {
        let metrics = server.metrics();
        let count = |status| {
            metrics.find_with("bowline_gateway_handshake_refused_total", &format!("status=\"{status}\""))
        };
        (count(401) == Some(3.0) && count(404) >= Some(1.0)).then_some(())
    });
}

#[test]
fn connections_of_one_address_can_be_limited() {
    let server = Setup::new().set("gateway.connections_per_address", 2).start();
    let _held = [server.connect(Transport::Ws, "alice"), server.connect(Transport::Ws, "bob")];
    let answer = server.login("carol").try_connect(Transport::Ws);
    let Err(Refused::Http { status, .. }) = answer else { panic!("a third connection was let in") };
    assert!([429, 503].contains(&status), "the status is {status}");
}

#[test]
fn a_refused_client_can_be_heard_in_the_first_frame_way() {
    // A browser sees no status; the same faults come as frames and close codes.
    let server = Server::start();
    let login = server.login("alice").token("garbage").way(Way::FirstFrame);
    let mut client = login.open(Transport::Ws).expect("the upgrade itself is good");
    client.send(&login.frame());
    client.expect_closed_within(Duration::from_secs(10), 4502, "unauthenticated");
}
