//! Opening a connection: the ways to give a token, what `connected` says, one identity for good.

use bowline_tests::{
    Login, PATIENCE, Server, Setup, Transport, bowline,
    client::{Refused, Way, fresh_id},
    raw, token,
};
use serde_json::{Value, json};
use std::{
    io::Write,
    time::{Duration, Instant},
};

on_both![
    connected_says_who_where_and_how,
    the_device_is_the_one_asked_for_or_bound_or_random,
    frames_sent_behind_connect_are_processed_after_it,
    any_other_frame_before_connect_closes_4502,
    text_that_cannot_be_parsed_before_connect_closes_4502,
    ping_is_answered_before_connect,
    a_connection_without_identity_is_closed_4003_after_10_s,
    a_bad_token_in_connect_closes_4502,
    a_device_other_than_the_bound_one_closes_4505,
    a_class_other_than_the_bound_one_closes_4505,
    an_unknown_version_closes_4507_and_names_the_known_ones,
    a_second_connect_is_an_identity_mismatch,
    clocks_may_differ_by_30_s,
    a_token_that_runs_out_is_announced_and_then_closes_4001,
    auth_refresh_extends_the_session,
    auth_refresh_of_another_user_is_refused_and_changes_nothing,
    a_session_of_another_user_or_device_is_not_resumed,
    a_resumed_session_is_sent_again_what_it_had_not_acknowledged,
    the_same_device_replaces_its_older_connection,
    same_device_allow_keeps_both_connections,
    same_device_refuse_keeps_the_older_connection,
];

/// A connection that has not said who it is.
fn open(server: &Server, transport: Transport) -> bowline_tests::Client {
    server.login("nobody").way(Way::FirstFrame).open(transport).expect("no identity is needed to open")
}

fn connected_says_who_where_and_how(transport: Transport) {
    let server = Server::start();
    let login = server.login("alice").device("phone").class("ios").channel("sales").way(Way::FirstFrame);
    let mut client = login.open(transport).expect("no identity is needed to open");
    client.send(&login.frame());
    let before = token::now_ms();
    let frame = client.expect("connected");
    assert!(frame.text.starts_with(r#"{"type":"connected","#), "type comes first, compact: {}", frame.text);
    assert_eq!(frame.text, frame.text.replace(": ", ":"), "compact JSON");
    assert_eq!((frame.text_of("user_id"), frame.text_of("device_id")), ("alice", "phone"));
    for field in ["session_id", "connection_id", "node_id"] {
        assert!(!frame.text_of(field).is_empty(), "{field} in {}", frame.text);
    }
    assert_eq!(frame.json["resumed"], json!(false));
    assert_eq!(frame.number_of("ping_after_ms"), 45_000);
    assert_eq!(frame.number_of("close_after_ms"), 90_000);
    assert_eq!(frame.number_of("max_frame_bytes"), 32_768);
    assert_eq!(frame.number_of("version"), 1);
    assert!(frame.number_of("server_time").abs_diff(before) < 10_000, "the time is in milliseconds");
}

#[test]
fn a_token_is_taken_from_the_authorization_header() {
    let server = Server::start();
    let client = server.login("alice").way(Way::Header).device("phone").connect(Transport::Ws);
    assert_eq!((client.field("user_id"), client.device_id()), ("alice", "phone"));
    assert_eq!(client.subprotocol, None, "nothing was offered");
}

#[test]
fn a_token_is_taken_from_the_query() {
    let server = Server::start();
    let client = server.login("alice").way(Way::Query).device("phone").connect(Transport::Ws);
    assert_eq!((client.field("user_id"), client.device_id()), ("alice", "phone"));
}

#[test]
fn a_token_is_taken_from_the_list_of_subprotocols() {
    let server = Server::start();
    let client = server.login("alice").way(Way::Subprotocol).device("phone").connect(Transport::Ws);
    assert_eq!((client.field("user_id"), client.device_id()), ("alice", "phone"));
    assert_eq!(client.subprotocol.as_deref(), Some("bowline.v1.json"), "the server selects the first");
}

#[test]
fn a_token_is_taken_from_a_first_frame() {
    let server = Server::start();
    for transport in [Transport::Ws, Transport::Tcp] {
        let client = server.login("alice").way(Way::FirstFrame).device("phone").connect(transport);
        assert_eq!((client.field("user_id"), client.device_id()), ("alice", "phone"));
    }
}

#[test]
fn the_subprotocol_is_selected_without_a_token_in_it_too() {
    let server = Server::start();
    let login = server.login("alice").header("sec-websocket-protocol", "bowline.v1.json");
    assert_eq!(login.connect(Transport::Ws).subprotocol.as_deref(), Some("bowline.v1.json"));
}

#[test]
fn a_token_of_the_command_line_opens_a_connection_while_the_server_runs() {
    let server = Setup::new().without_secret().start();
    let data = server.data_dir().to_str().expect("a path of text");
    let made = bowline(&["token", "--user", "alice", "--device", "phone", "--ttl", "1h", "--data", data]);
    assert_eq!(made.code, Some(0), "{made:?}");
    let made_token = made.stdout.trim();
    assert_eq!(made_token.split('.').count(), 3, "the token alone stands on standard output: {made:?}");
    for transport in [Transport::Ws, Transport::Tcp] {
        let client = server.login("alice").token(made_token).connect(transport);
        assert_eq!((client.field("user_id"), client.device_id()), ("alice", "phone"));
        drop(client);
    }
    let other = server.login("alice").token(made_token).device("laptop").try_connect(Transport::Ws);
    assert!(matches!(other, Err(Refused::Http { status: 403, .. })), "--device binds");
}

fn the_device_is_the_one_asked_for_or_bound_or_random(transport: Transport) {
    let server = Server::start();
    let asked = server.login("alice").device("phone").connect(transport);
    assert_eq!(asked.device_id(), "phone");
    let bound = server.login("alice").token(token::of_device("alice", "watch")).connect(transport);
    assert_eq!(bound.device_id(), "watch");
    let both = server.login("alice").token(token::of_device("alice", "car")).device("car").connect(transport);
    assert_eq!(both.device_id(), "car");
    let random = [server.connect(transport, "alice"), server.connect(transport, "alice")];
    let [first, second] = random.each_ref().map(|client| client.device_id());
    assert!(first != second && !first.is_empty() && first.len() <= 64, "{first} {second}");
}

fn frames_sent_behind_connect_are_processed_after_it(transport: Transport) {
    let server = Server::start();
    let login = server.login("alice").way(Way::FirstFrame);
    let mut client = open(&server, transport);
    let id = fresh_id();
    let frames = [
        login.frame(),
        json!({"type": "msg.send", "id": id, "to": "bob", "body": "first"}),
        json!({"type": "ping", "data": "behind"}),
    ];
    // One write, so that the server reads them together.
    let bytes: Vec<u8> = frames
        .iter()
        .flat_map(|frame| match transport {
            Transport::Ws => raw::ws_frame(0x81, frame.to_string().as_bytes()),
            Transport::Tcp => raw::tcp_frame(frame.to_string().as_bytes()),
        })
        .collect();
    client.writer.send_bytes(&bytes).expect("the connection is open");
    client.finish_opening().expect("the token is good");
    assert_eq!(client.reply(&id).expect_kind("msg.ack").seq(), 1);
    assert_eq!(client.expect("pong").text_of("data"), "behind");
}

fn any_other_frame_before_connect_closes_4502(transport: Transport) {
    let server = Server::start();
    let mut client = open(&server, transport);
    client.send(&json!({"type": "msg.send", "id": "early", "to": "bob", "body": 1}));
    let ending = client.expect_closed(4502, "unauthenticated");
    assert_eq!(ending.frames.len(), 1, "{ending:?}");
    ending.frames[0].expect_error("unauthenticated");
    // Nothing of it was carried out.
    let mut bob = server.connect(transport, "bob");
    assert_eq!(bob.conversations(), [] as [Value; 0]);
}

fn text_that_cannot_be_parsed_before_connect_closes_4502(transport: Transport) {
    let server = Server::start();
    let mut client = open(&server, transport);
    client.send_text("this is no JSON");
    let ending = client.expect_closed(4502, "unauthenticated");
    assert_eq!(ending.frames.len(), 1, "{ending:?}");
    ending.frames[0].expect_error("unauthenticated");
}

fn ping_is_answered_before_connect(transport: Transport) {
    let server = Server::start();
    let login = server.login("alice").way(Way::FirstFrame);
    let mut client = open(&server, transport);
    client.send(&json!({"type": "ping", "data": "early"}));
    assert_eq!(client.expect("pong").text_of("data"), "early");
    client.send(&login.frame());
    client.finish_opening().expect("a ping before connect is no fault");
}

fn a_connection_without_identity_is_closed_4003_after_10_s(transport: Transport) {
    let server = Server::start();
    let mut client = open(&server, transport);
    let began = Instant::now();
    // Pings give no identity.
    client.send(&json!({"type": "ping"}));
    client.expect("pong");
    let ending = client.expect_closed(4003, "connect-timeout");
    let took = began.elapsed();
    assert!(took > Duration::from_millis(9_500), "closed after {took:?}");
    assert!(took < Duration::from_secs(15), "closed after {took:?}");
    assert!(ending.frames.is_empty(), "nothing is said to a stranger: {ending:?}");
    assert_eq!(server.status()["connections"], 0);
}

fn bad_tokens() -> Vec<(&'static str, String)> {
    let claims = json!({"sub": "alice", "exp": token::now_secs() + 3600});
    let (good, now) = (token::of("alice"), token::now_secs());
    let (head, signature) = good.rsplit_once('.').expect("a token has three parts");
    let flipped = if signature.starts_with('A') { "B" } else { "A" };
    vec![
        ("garbage", "garbage".to_owned()),
        (
            "signed with another secret",
            token::signed_with(&claims, "another secret, as long as the real one"),
        ),
        ("a changed signature", format!("{head}.{flipped}{}", &signature[1..])),
        ("no signature", format!("{head}.")),
        ("alg none", token::unsigned(&claims)),
        ("expired", token::signed(&json!({"sub": "alice", "exp": now - 60}))),
        ("not valid yet", token::signed(&json!({"sub": "alice", "exp": now + 3600, "nbf": now + 120}))),
        ("without exp", token::signed(&json!({"sub": "alice"}))),
    ]
}

fn a_bad_token_in_connect_closes_4502(transport: Transport) {
    let server = Server::start();
    for (fault, bad) in bad_tokens() {
        let login = server.login("alice").token(bad).way(Way::FirstFrame);
        match login.try_connect(transport) {
            Err(Refused::Closed(ending)) => ending.check(transport, 4502, "unauthenticated"),
            Err(other) => panic!("{fault}: {other:?}"),
            Ok(_) => panic!("{fault}: was taken"),
        }
    }
    // The server goes on with those who are good.
    server.connect(transport, "alice");
}

#[test]
fn a_bad_token_in_the_handshake_is_401() {
    let server = Server::start();
    for (fault, bad) in bad_tokens() {
        for way in [Way::Header, Way::Query, Way::Subprotocol] {
            let answer = server.login("alice").token(&*bad).way(way).try_connect(Transport::Ws);
            let Err(Refused::Http { status, .. }) = answer else { panic!("{fault}, {way:?}: was taken") };
            assert_eq!(status, 401, "{fault}, {way:?}");
        }
    }
}

/// What a binding refuses: before the upgrade, or by a close code.
fn refused_by_binding(login: &Login, transport: Transport) {
    match login.clone().way(Way::FirstFrame).try_connect(transport) {
        Err(Refused::Closed(ending)) => ending.check(transport, 4505, "policy"),
        Err(other) => panic!("{other:?}"),
        Ok(_) => panic!("a binding was ignored"),
    }
    if transport == Transport::Ws {
        let answer = login.try_connect(transport);
        assert!(matches!(answer, Err(Refused::Http { status: 403, .. })), "403 before the upgrade");
    }
}

fn a_device_other_than_the_bound_one_closes_4505(transport: Transport) {
    let server = Server::start();
    let login = server.login("alice").token(token::of_device("alice", "phone")).device("laptop");
    refused_by_binding(&login, transport);
}

fn a_class_other_than_the_bound_one_closes_4505(transport: Transport) {
    let server = Server::start();
    let claims = json!({"sub": "alice", "exp": token::now_secs() + 3600, "device_class": "ios"});
    let bound = server.login("alice").token(token::signed(&claims));
    refused_by_binding(&bound.clone().class("web"), transport);
    bound.class("ios").connect(transport);
}

fn an_unknown_version_closes_4507_and_names_the_known_ones(transport: Transport) {
    let server = Server::start();
    match server.login("alice").version(99).way(Way::FirstFrame).try_connect(transport) {
        Err(Refused::Closed(ending)) => {
            let notice = ending.notice.expect("session.closed is the last frame");
            assert_eq!(notice.number_of("code"), 4507, "{}", notice.text);
            assert!(notice.text_of("reason").contains('1'), "the versions are named: {}", notice.text);
            if transport == Transport::Ws {
                assert_eq!(ending.close.map(|(code, _)| code), Some(4507));
            }
        }
        Err(other) => panic!("{other:?}"),
        Ok(_) => panic!("version 99 was taken"),
    }
    server.login("alice").version(1).way(Way::FirstFrame).connect(transport);
}

fn a_second_connect_is_an_identity_mismatch(transport: Transport) {
    let server = Server::start();
    let mut client = server.connect(transport, "alice");
    client.send(&server.login("mallory").frame());
    client.expect("error").expect_error("identity_mismatch");
    let ack = client.tell("bob", "still alice");
    assert_eq!(ack.conversation(), "d:alice:bob");
}

fn clocks_may_differ_by_30_s(transport: Transport) {
    let server = Server::start();
    let now = token::now_secs();
    for claims in [
        json!({"sub": "alice", "exp": now - 10}),
        json!({"sub": "alice", "exp": now + 3600, "nbf": now + 15}),
    ] {
        server.login("alice").token(token::signed(&claims)).connect(transport);
    }
}

fn a_token_that_runs_out_is_announced_and_then_closes_4001(transport: Transport) {
    let server = Server::start();
    let expires = token::now_secs() + 3;
    let claims = json!({"sub": "alice", "exp": expires});
    let mut client = server.login("alice").token(token::signed(&claims)).connect(transport);
    let notice = client.expect("auth.expiring");
    assert_eq!(notice.number_of("expires_at"), expires * 1000);
    client.expect_closed_within(Duration::from_secs(45), 4001, "token-expired");
    assert!(token::now_secs() >= expires, "closed before the token ran out");
}

fn auth_refresh_extends_the_session(transport: Transport) {
    let server = Server::start();
    let expires = token::now_secs() + 2;
    let claims = json!({"sub": "alice", "exp": expires});
    let mut short = server.login("alice").device("short").token(token::signed(&claims)).connect(transport);
    let mut long = server.login("alice").device("long").token(token::signed(&claims)).connect(transport);
    long.demand("auth.refresh", json!({"token": token::of("alice")}));
    short.expect_closed_within(Duration::from_secs(45), 4001, "token-expired");
    // Its twin, refreshed, outlives it.
    assert_eq!(long.tell("bob", "still here").seq(), 1);
}

fn auth_refresh_of_another_user_is_refused_and_changes_nothing(transport: Transport) {
    let server = Server::start();
    let mut client = server.connect(transport, "alice");
    let answer = client.ask("auth.refresh", json!({"token": token::of("mallory")}));
    assert_eq!(answer.kind(), "error", "{}", answer.text);
    assert_eq!(client.tell("bob", "still alice").conversation(), "d:alice:bob");
}

fn a_session_of_another_user_or_device_is_not_resumed(transport: Transport) {
    let server = Server::start();
    let mut alice = server.connect_device(transport, "alice", "phone");
    let session = alice.field("session_id").to_owned();
    let other_user = server.login("bob").device("phone").resume(&session).connect(transport);
    let other_device = server.login("alice").device("laptop").resume(&session).connect(transport);
    let unknown = server.login("carol").resume("no-such-session").connect(transport);
    for client in [&other_user, &other_device, &unknown] {
        assert_eq!(client.connected["resumed"], json!(false), "{}", client.connected);
    }
    // It is left alone.
    assert_eq!(alice.tell("bob", "here").seq(), 1);
}

fn a_resumed_session_is_sent_again_what_it_had_not_acknowledged(transport: Transport) {
    let server = Server::start();
    let mut alice = server.connect(transport, "alice");
    let mut bob = server.connect_device(transport, "bob", "phone");
    let conversation = alice.tell("bob", "one").conversation().to_owned();
    bob.expect_push(&conversation, 1);
    let session = bob.field("session_id").to_owned();
    drop(bob);
    let mut bob = server.login("bob").device("phone").resume(&session).connect(transport);
    assert_eq!(bob.connected["resumed"], json!(true));
    let push = bob.expect_push(&conversation, 1);
    assert_eq!(push.json["redelivered"], json!(true), "{}", push.text);
    alice.say(&conversation, "two");
    let push = bob.expect_push(&conversation, 2);
    assert_eq!(push.json.get("redelivered"), None, "{}", push.text);
}

fn the_same_device_replaces_its_older_connection(transport: Transport) {
    let server = Server::start();
    let mut older = server.connect_device(transport, "alice", "phone");
    let mut laptop = server.connect_device(transport, "alice", "laptop");
    let mut newer = server.connect_device(transport, "alice", "phone");
    older.expect_closed(4501, "replaced");
    let mut bob = server.connect(transport, "bob");
    let conversation = bob.tell("alice", "hello").conversation().to_owned();
    newer.expect_push(&conversation, 1);
    laptop.expect_push(&conversation, 1);
    let state = server.get("/api/v1/users/alice").expect(200).json();
    assert_eq!(state["devices"].as_array().map(Vec::len), Some(2), "{state}");
}

fn same_device_allow_keeps_both_connections(transport: Transport) {
    let server = Server::with(&[("gateway.same_device", "allow")]);
    let mut first = server.connect_device(transport, "alice", "phone");
    let mut second = server.connect_device(transport, "alice", "phone");
    let mut bob = server.connect(transport, "bob");
    let conversation = bob.tell("alice", "hello").conversation().to_owned();
    first.expect_push(&conversation, 1);
    second.expect_push(&conversation, 1);
}

fn same_device_refuse_keeps_the_older_connection(transport: Transport) {
    let server = Server::with(&[("gateway.same_device", "refuse")]);
    let mut first = server.connect_device(transport, "alice", "phone");
    match server.login("alice").device("phone").way(Way::FirstFrame).try_connect(transport) {
        Err(Refused::Closed(ending)) => ending.check(transport, 4506, "device-in-use"),
        Err(other) => panic!("{other:?}"),
        Ok(_) => panic!("a second connection of the device was let in"),
    }
    if transport == Transport::Ws {
        let answer = server.login("alice").device("phone").try_connect(transport);
        assert!(matches!(answer, Err(Refused::Http { status: 409, .. })), "409 before the upgrade");
    }
    let mut bob = server.connect(transport, "bob");
    let conversation = bob.tell("alice", "hello").conversation().to_owned();
    first.expect_push(&conversation, 1);
    // Once it is gone, the device may come again.
    first.close();
    bowline_tests::until("the device may log in again", || {
        server.login("alice").device("phone").way(Way::FirstFrame).try_connect(transport).ok()
    });
}

#[test]
fn a_request_head_that_is_not_complete_after_10_s_is_closed_without_an_answer() {
    let server = Server::start();
    let mut stream = raw::connect(server.ws());
    let began = Instant::now();
    stream.write_all(b"GET /ws HTTP/1.1\r\nHost: localhost\r\n").expect("the connection is open");
    let (answer, ended) = raw::read_to_end(&mut stream, PATIENCE);
    assert!(ended, "it was not closed");
    assert_eq!(String::from_utf8_lossy(&answer), "");
    assert!(began.elapsed() > Duration::from_millis(9_500), "closed after {:?}", began.elapsed());
}

#[test]
fn a_connection_that_says_nothing_is_closed_without_an_answer() {
    let server = Server::start();
    let mut silent = raw::connect(server.ws());
    let (answer, ended) = raw::read_to_end(&mut silent, PATIENCE);
    assert!(ended && answer.is_empty(), "{answer:?}");
}
