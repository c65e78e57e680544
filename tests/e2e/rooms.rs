//! Rooms: large, live, with a window of recent messages.

use bowline_tests::{Client, Frame, Login, PATIENCE, Server, Setup, Transport, client::Event, token, until};
use serde_json::{Value, json};
use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    sync::{Arc, Mutex},
    time::Instant,
};

on_both![
    everybody_in_the_room_has_the_message_its_sender_included,
    only_members_send_and_who_has_left_hears_nothing,
    a_room_and_its_bodies_travel_unread,
    who_reconnects_gets_what_it_missed_in_its_order,
    a_session_with_rooms_is_not_resumed,
    beyond_the_window_it_is_said_that_something_is_missing,
    a_restart_is_another_epoch,
    the_api_publishes_to_all_members,
    batches_are_for_those_who_asked,
    where_one_stands_is_an_object,
    a_full_room_takes_nobody_else,
    a_slow_member_is_closed_4002_and_nobody_else_notices,
];

/// `resumed: true` would say that its memberships go on.
fn a_session_with_rooms_is_not_resumed(transport: Transport) {
    let server = Server::start();
    for (in_room, resumed) in [(false, true), (true, false)] {
        let mut bob = server.login("bob").device("phone").connect(transport);
        if in_room {
            join(&mut bob, "r");
        }
        let session = bob.field("session_id").to_owned();
        drop(bob);
        bowline_tests::until("the router has heard of it all", || {
            (server.get("/api/v1/users/bob").json()["online"] == false).then_some(())
        });
        let bob = server.login("bob").device("phone").resume(&session).connect(transport);
        assert_eq!(bob.connected["resumed"], json!(resumed));
        bob.close();
    }
}

fn join(client: &mut Client, room: &str) -> Frame {
    client.ask("room.join", json!({"room": room})).expect_kind("room.joined")
}

fn rejoin(client: &mut Client, room: &str, epoch: &str, offset: u64) -> Frame {
    let since = json!({"epoch": epoch, "offset": offset});
    client.ask("room.join", json!({"room": room, "since": since})).expect_kind("room.joined")
}

fn say(client: &mut Client, room: &str, body: impl Into<Value>) {
    client.send(&json!({"type": "room.send", "id": "s", "room": room, "body": body.into()}));
}

/// The next push, which must have this number.
fn pushed(client: &mut Client, room: &str, offset: u64) -> Frame {
    let push = client.expect("room.push");
    assert_eq!((push.text_of("room"), push.number_of("offset")), (room, offset), "{}", push.text);
    push
}

fn everybody_in_the_room_has_the_message_its_sender_included(transport: Transport) {
    let server = Server::start();
    let mut members: Vec<Client> = (0..5).map(|n| server.connect(transport, &format!("u{n}"))).collect();
    // One of the other transport as well.
    let other = if transport == Transport::Ws { Transport::Tcp } else { Transport::Ws };
    members.push(server.connect(other, "u5"));
    for (n, member) in members.iter_mut().enumerate() {
        let joined = join(member, "lobby");
        assert_eq!((joined.number_of("offset"), joined.number_of("members")), (0, n as u64 + 1));
        assert_eq!(joined.json["recovered"], false);
        assert!(!joined.text_of("epoch").is_empty());
    }
    let before = token::now_ms();
    for n in 0..6 {
        say(&mut members[n], "lobby", json!({"n": n}));
        let pushes: Vec<Frame> =
            members.iter_mut().map(|member| pushed(member, "lobby", n as u64 + 1)).collect();
        for push in &pushes {
            assert_eq!((push.text_of("from"), &push.json["body"]), (&*format!("u{n}"), &json!({"n": n})));
            assert_eq!(push.text, pushes[0].text, "one message for all");
        }
        assert!((before..=token::now_ms()).contains(&pushes[0].number_of("ts")));
        assert!(pushes[0].text.starts_with(r#"{"type":"room.push","room":"lobby","#), "{}", pushes[0].text);
    }
    let metrics = server.metrics();
    assert_eq!(metrics.get("bowline_gateway_rooms"), 1.0);
    assert_eq!(metrics.get("bowline_gateway_rooms_members"), 6.0);
    assert_eq!(metrics.get("bowline_gateway_rooms_published_total"), 6.0);
    // What was written is counted a moment later.
    until("every delivery is counted", || {
        (server.metrics().get("bowline_gateway_rooms_deliveries_total") == 36.0).then_some(())
    });
}

fn only_members_send_and_who_has_left_hears_nothing(transport: Transport) {
    let server = Server::start();
    let (mut alice, mut bob) = (server.connect(transport, "alice"), server.connect(transport, "bob"));
    join(&mut alice, "r");
    for room in ["r", "another"] {
        let refused = bob.request(&json!({"type": "room.send", "id": "1", "room": room, "body": 1}));
        refused.expect_error("forbidden");
    }
    join(&mut bob, "r");
    say(&mut bob, "r", 1);
    pushed(&mut alice, "r", 1);
    pushed(&mut bob, "r", 1);
    bob.demand("room.leave", json!({"room": "r"}));
    bob.demand("room.leave", json!({"room": "r"}));
    bob.request(&json!({"type": "room.send", "id": "2", "room": "r", "body": 1})).expect_error("forbidden");
    say(&mut alice, "r", 2);
    pushed(&mut alice, "r", 2);
    bob.expect_no("room.push");
    for room in ["", &"x".repeat(129), "a\nb"] {
        alice.ask("room.join", json!({"room": room})).expect_error("malformed");
    }
    // A closed connection is a member no more.
    alice.close();
    until("nobody is left", || {
        let metrics = server.metrics();
        (metrics.get("bowline_gateway_rooms_members") == 0.0).then_some(())
    });
}

fn a_room_and_its_bodies_travel_unread(transport: Transport) {
    let server = Server::start();
    let mut alice = server.connect(transport, "alice");
    let room = "Ünïcode \"quoted\" \\ d:a:b 🎈";
    assert_eq!(join(&mut alice, room).text_of("room"), room);
    let raw = r#"{"type":"room.send","id":"s","room":"Ünïcode \"quoted\" \\ d:a:b 🎈","body":{"a" : 1.0e0,"b":"\u00e9"}}"#;
    alice.send_text(raw);
    let push = pushed(&mut alice, room, 1);
    assert!(push.text.ends_with(r#""body":{"a" : 1.0e0,"b":"\u00e9"}}"#), "{}", push.text);
    alice.writer.send_binary(&json!({"type": "room.send", "id": "s", "room": room}), &[0, 255, 7]).unwrap();
    let push = pushed(&mut alice, room, 2);
    assert_eq!((push.body.as_deref(), push.json["body"].is_null()), (Some(&[0, 255, 7][..]), true));
}

fn who_reconnects_gets_what_it_missed_in_its_order(transport: Transport) {
    let server = Server::start();
    let mut alice = server.connect(transport, "alice");
    join(&mut alice, "r");
    let mut bob = server.connect(transport, "bob");
    let epoch = join(&mut bob, "r").text_of("epoch").to_owned();
    for n in 1..=3 {
        say(&mut alice, "r", n);
        pushed(&mut alice, "r", n);
        pushed(&mut bob, "r", n);
    }
    bob.close();
    for n in 4..=20 {
        say(&mut alice, "r", n);
        pushed(&mut alice, "r", n);
    }
    let mut bob = server.connect(transport, "bob");
    let joined = rejoin(&mut bob, "r", &epoch, 3);
    assert_eq!((&joined.json["recovered"], joined.text_of("epoch")), (&json!(true), &*epoch));
    assert_eq!(joined.number_of("offset"), 20);
    for n in 4..=20 {
        assert_eq!(pushed(&mut bob, "r", n).json["body"], n);
    }
    say(&mut alice, "r", 21);
    pushed(&mut bob, "r", 21);
    // Everybody may leave: what was said is kept for a while.
    alice.close();
    bob.close();
    let mut bob = server.connect(transport, "bob");
    let joined = rejoin(&mut bob, "r", &epoch, 19);
    assert_eq!((&joined.json["recovered"], joined.number_of("members")), (&json!(true), 1));
    pushed(&mut bob, "r", 20);
    pushed(&mut bob, "r", 21);
}

fn beyond_the_window_it_is_said_that_something_is_missing(transport: Transport) {
    let server = Server::with(&[("rooms.window_messages", "5")]);
    let mut alice = server.connect(transport, "alice");
    let epoch = join(&mut alice, "r").text_of("epoch").to_owned();
    for n in 1..=10 {
        say(&mut alice, "r", n);
        pushed(&mut alice, "r", n);
    }
    for (epoch, offset, recovered) in [
        (&*epoch, 5, true),
        (&epoch, 4, false),
        (&epoch, 10, true),
        (&epoch, 11, false),
        ("other", 10, false),
    ] {
        let mut bob = server.connect(transport, "bob");
        let joined = rejoin(&mut bob, "r", epoch, offset);
        assert_eq!(joined.json["recovered"], recovered, "since {offset} of {epoch}");
        assert_eq!(joined.number_of("offset"), 10);
        if recovered {
            (offset + 1..=10).for_each(|n| drop(pushed(&mut bob, "r", n)));
        }
        bob.expect_no("room.push");
        bob.close();
    }
    // Too old is as good as gone.
    let server = Server::with(&[("rooms.window_ms", "1")]);
    let mut alice = server.connect(transport, "alice");
    let epoch = join(&mut alice, "r").text_of("epoch").to_owned();
    say(&mut alice, "r", 1);
    pushed(&mut alice, "r", 1);
    until("it is too old", || (rejoin(&mut alice, "r", &epoch, 0).json["recovered"] == false).then_some(()));
    assert_eq!(rejoin(&mut alice, "r", &epoch, 1).json["recovered"], true, "nothing is missing");
}

fn a_restart_is_another_epoch(transport: Transport) {
    let mut server = Server::start();
    let mut alice = server.connect(transport, "alice");
    let epoch = join(&mut alice, "r").text_of("epoch").to_owned();
    say(&mut alice, "r", 1);
    pushed(&mut alice, "r", 1);
    server.kill();
    server.restart();
    let mut alice = server.connect(transport, "alice");
    let joined = rejoin(&mut alice, "r", &epoch, 1);
    assert_ne!(joined.text_of("epoch"), epoch);
    assert_eq!((&joined.json["recovered"], joined.number_of("offset")), (&json!(false), 0));
    say(&mut alice, "r", 1);
    pushed(&mut alice, "r", 1);
}

fn the_api_publishes_to_all_members(transport: Transport) {
    let server = Server::start();
    let mut members: Vec<Client> = (0..4).map(|n| server.connect(transport, &format!("u{n}"))).collect();
    members.iter_mut().for_each(|member| drop(join(member, "a b/c")));
    let path = "/api/v1/rooms/a%20b%2Fc/messages";
    let post = |body: &Value| server.post(path, body).expect(202).json();
    assert_eq!(post(&json!({"body": {"x": 1}, "from": "boss"})), json!({"offset": 1}));
    assert_eq!(post(&json!([{"body": 2}, {"body": 3, "from": "u0"}, {"body": 4}])), json!({"offset": 4}));
    assert_eq!(post(&json!({"body": "AP8=", "body_encoding": "base64"})), json!({"offset": 5}));
    for member in &mut members {
        let push = pushed(member, "a b/c", 1);
        assert_eq!((push.text_of("from"), &push.json["body"]), ("boss", &json!({"x": 1})));
        for n in 2..=4 {
            let push = pushed(member, "a b/c", n);
            assert_eq!(push.json["body"], n);
            assert_eq!(push.json.get("from"), (n == 3).then_some(&json!("u0")));
        }
        assert_eq!(pushed(member, "a b/c", 5).body.as_deref(), Some(&[0, 255][..]));
    }
    for body in [json!({}), json!([]), json!([{"body": 1}, {}]), json!({"body": 1, "from": "a:b"})] {
        server.post(path, &body).expect_refusal(400);
    }
    server.post("/api/v1/rooms/a%0Ab/messages", &json!({"body": 1})).expect_refusal(400);
    server.post(path, &json!({"body": "x".repeat(40_000)})).expect_refusal(413);
    // None of a list that was refused has come.
    assert_eq!(post(&json!({"body": 6})), json!({"offset": 6}));
    members.iter_mut().for_each(|member| drop(pushed(member, "a b/c", 6)));
}

fn batches_are_for_those_who_asked(transport: Transport) {
    let server = Server::start();
    let mut plain = server.connect(transport, "plain");
    join(&mut plain, "r");
    let mut batched = server.connect(transport, "batched");
    batched.ask("room.join", json!({"room": "r", "batch": true})).expect_kind("room.joined");
    let list: Vec<Value> = (1..=500).map(|n| json!({"body": n, "from": "boss"})).collect();
    server.post("/api/v1/rooms/r/messages", &json!(list)).expect(202);
    (1..=500).for_each(|n| drop(pushed(&mut plain, "r", n)));
    let (mut next, mut batches) = (1, 0);
    while next <= 500 {
        let frame = batched.find("a push or batch", |frame| frame.kind().starts_with("room."));
        assert!(frame.text.len() <= 32_768 + 1_024);
        let messages = match frame.kind() {
            "room.batch" => {
                batches += 1;
                assert!(frame.list_of("messages").len() > 1);
                frame.list_of("messages").to_vec()
            }
            _ => vec![frame.json.clone()],
        };
        assert_eq!(frame.text_of("room"), "r");
        for message in messages {
            assert_eq!((&message["offset"], &message["body"]), (&json!(next), &json!(next)));
            assert_eq!((&message["from"], message["ts"].is_u64()), (&json!("boss"), true));
            next += 1;
        }
    }
    // They were published together: a frame holds as many as fit, and five hundred are one frame.
    assert_eq!(batches, 1, "five hundred at once");
}

fn where_one_stands_is_an_object(transport: Transport) {
    let server = Server::start();
    let mut client = server.connect(transport, "alice");
    let joined = client.ask("room.join", json!({"room": "r"}));
    let epoch = joined.text_of("epoch").to_owned();
    for since in [json!([epoch, 0]), json!("0"), json!(0), json!([])] {
        client.ask("room.join", json!({"room": "r", "since": since})).expect_error("malformed");
    }
    let joined = client.ask("room.join", json!({"room": "r", "since": {"epoch": epoch, "offset": 0}}));
    assert_eq!(joined.json["recovered"], true, "{}", joined.text);
}

fn a_full_room_takes_nobody_else(transport: Transport) {
    let server = Server::with(&[("rooms.members_max", "2")]);
    let mut clients: Vec<Client> = (0..3).map(|n| server.connect(transport, &format!("u{n}"))).collect();
    join(&mut clients[0], "r");
    join(&mut clients[1], "r");
    clients[2].ask("room.join", json!({"room": "r"})).expect_error("overloaded");
    join(&mut clients[2], "another");
    clients[0].demand("room.leave", json!({"room": "r"}));
    join(&mut clients[2], "r");
}

fn a_slow_member_is_closed_4002_and_nobody_else_notices(transport: Transport) {
    let server = Server::with(&[("gateway.outbound_limit_bytes", "200000")]);
    let login = Login::new(server.addresses(), "slow").receive_buffer(4096);
    let mut slow = login.connect(transport);
    join(&mut slow, "r");
    let mut quick = server.connect(transport, "quick");
    join(&mut quick, "r");
    let body = "x".repeat(20_000);
    let mut offset = 0;
    until("the slow one is closed", || {
        offset += 1;
        say(&mut quick, "r", body.as_str());
        pushed(&mut quick, "r", offset);
        let metrics = server.metrics();
        let closed = metrics.find_with("bowline_gateway_closed_total", "reason=\"slow-consumer\"");
        (closed == Some(1.0)).then_some(())
    });
    slow.expect_closed(4002, "slow-consumer");
    offset += 1;
    say(&mut quick, "r", 1);
    pushed(&mut quick, "r", offset);
}

#[test]
fn the_claim_says_which_rooms_a_token_may_join() {
    let server = Server::with(&[("rooms.join", "claim")]);
    let named = |rooms: Value| {
        let claims = json!({"sub": "alice", "exp": token::now_secs() + 3600, "rooms": rooms});
        Login::new(server.addresses(), "alice").token(token::signed(&claims))
    };
    for transport in [Transport::Ws, Transport::Tcp] {
        let mut client = named(json!(["lobby", "team-*"])).connect(transport);
        for (room, allowed) in [
            ("lobby", true),
            ("team-red", true),
            ("team-", true),
            ("lobby2", false),
            ("team", false),
            ("x", false),
        ] {
            let answer = client.ask("room.join", json!({"room": room}));
            match allowed {
                true => drop(answer.expect_kind("room.joined")),
                false => drop(answer.expect_error("forbidden")),
            }
        }
        client.close();
        let mut none = server.connect(transport, "alice");
        none.ask("room.join", json!({"room": "lobby"})).expect_error("forbidden");
        none.close();
    }
    // A token of the API has what was asked for.
    let issued =
        server.post("/api/v1/tokens", &json!({"user": "bob", "rooms": ["den-*"]})).expect(200).json();
    let mut bob = Login::new(server.addresses(), "bob")
        .token(issued["token"].as_str().expect("a token"))
        .connect(Transport::Ws);
    join(&mut bob, "den-1");
    bob.ask("room.join", json!({"room": "lobby"})).expect_error("forbidden");
}

#[test]
fn a_thousand_members_hear_the_same() {
    const MEMBERS: usize = 1000;
    const MESSAGES: u64 = 20;
    let _turn = bowline_tests::turn();
    let server = Setup::new().set("gateway.workers", 2).start();
    let mut members: Vec<Client> = (0..MEMBERS)
        .map(|n| {
            let transport = if n % 2 == 0 { Transport::Ws } else { Transport::Tcp };
            let mut client = server.connect(transport, &format!("u{n}"));
            join(&mut client, "hall");
            client
        })
        .collect();
    for n in 0..MESSAGES {
        let sender = n as usize * 37 % MEMBERS;
        say(&mut members[sender], "hall", json!(n));
    }
    let mut order = Vec::new();
    for (n, member) in members.iter_mut().enumerate() {
        let bodies: Vec<Value> =
            (1..=MESSAGES).map(|offset| pushed(member, "hall", offset).json["body"].clone()).collect();
        if n == 0 {
            order = bodies;
        } else {
            assert_eq!(bodies, order, "member {n}");
        }
    }
}

/// Publishers, the API, and members that come back again and again with what they know: nothing is missed and
/// nothing comes twice.
#[test]
fn who_comes_and_goes_misses_nothing_within_the_window() {
    let _turn = bowline_tests::turn();
    let server = Setup::new().set("gateway.workers", 2).set("rooms.window_messages", 100_000).start();
    let mut stays = server.connect(Transport::Ws, "stays");
    let epoch = join(&mut stays, "r").text_of("epoch").to_owned();
    std::thread::scope(|scope| {
        for n in 0..2 {
            let user = format!("p{n}");
            let mut publisher = server.connect([Transport::Ws, Transport::Tcp][n], &user);
            scope.spawn(move || {
                join(&mut publisher, "r");
                let end = Instant::now() + PATIENCE;
                for n in 0..3000 {
                    say(&mut publisher, "r", n);
                    // The other one's message with this body is not its own: whoever leaves upon that leaves with its
                    // own unread, which resets the connection and may take with it what the server has not read.
                    let is_own = |frame: &Frame| frame.text_of("from") == user && frame.json["body"] == n;
                    while !is_own(&publisher.find("its own", |frame| frame.kind() == "room.push")) {
                        assert!(Instant::now() < end + PATIENCE, "{user} does not hear its message {n}");
                    }
                }
            });
        }
        let mut known = 0;
        let mut round = 0;
        while known < 6000 {
            round += 1;
            let transport = [Transport::Ws, Transport::Tcp][round % 2];
            let mut client = server.connect(transport, "comes");
            let joined = rejoin(&mut client, "r", &epoch, known);
            assert_eq!(joined.json["recovered"], true, "{}", joined.text);
            for _ in 0..200.min(6000 - known) {
                known += 1;
                pushed(&mut client, "r", known);
            }
        }
        let last = Instant::now() + PATIENCE;
        let mut seen = 0;
        while seen < 6000 {
            match stays.reader.next(last) {
                Some(Event::Frame(frame)) => {
                    seen += 1;
                    assert_eq!(frame.number_of("offset"), seen);
                }
                other => panic!("{other:?} after {seen}"),
            }
        }
    });
}

// --- the application's hook -----------------------------------------------------------------------------------------

/// `whsec_` and the key that it stands for.
const HOOK_SECRET: (&str, &[u8]) =
    ("whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=", b"0123456789abcdef0123456789abcdef");

/// The value of a header, whatever the case of its name.
fn header<'a>(head: &'a str, name: &str) -> &'a str {
    let found =
        head.lines().filter_map(|line| line.split_once(": ")).find(|(n, _)| n.eq_ignore_ascii_case(name));
    found.unwrap_or_else(|| panic!("no {name} in {head}")).1
}

/// What the specification of Standard Webhooks says that the signature is.
fn signature(head: &str, body: &str) -> String {
    use base64::{
        Engine,
        engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD},
    };
    let signed = format!("{}.{}.{body}", header(head, "webhook-id"), header(head, "webhook-timestamp"));
    let key = jsonwebtoken::EncodingKey::from_secret(HOOK_SECRET.1);
    let text = jsonwebtoken::crypto::sign(signed.as_bytes(), &key, jsonwebtoken::Algorithm::HS256);
    let bytes = URL_SAFE_NO_PAD.decode(text.expect("HS256 signs with any key")).expect("Base64");
    format!("v1,{}", STANDARD.encode(bytes))
}

/// Reads one request: its head, and its body.
fn read_request(stream: &mut TcpStream) -> Option<(String, String)> {
    let mut reader = BufReader::new(stream.try_clone().ok()?);
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if reader.read_line(&mut head).ok()? == 0 {
            return None;
        }
    }
    let length = header(&head, "content-length").parse().ok()?;
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    Some((head, String::from_utf8(body).ok()?))
}

/// Head and body of each question that the application was asked.
type Questions = Arc<Mutex<Vec<(String, String)>>>;

/// Answers questions about rooms by their names, one connection each, and notes the questions.
fn application() -> (String, Questions) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let url = format!("http://{}/may-join", listener.local_addr().expect("it is bound"));
    let asked = Questions::default();
    let notes = asked.clone();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            let notes = notes.clone();
            std::thread::spawn(move || {
                let Some((head, body)) = read_request(&mut stream) else { return };
                let question: Value = serde_json::from_str(&body).unwrap_or_default();
                let (status, answer) = match question["room"].as_str() {
                    Some("open") => ("200 OK", r#"{"allow":true}"#),
                    Some("closed") => ("200 OK", r#"{"allow":false}"#),
                    Some("nonsense") => ("200 OK", "yes"),
                    Some("list") => ("200 OK", "[true]"),
                    _ => ("500 Internal Server Error", ""),
                };
                notes.lock().expect("nobody panics").push((head, body));
                let length = answer.len();
                let text = format!(
                    "HTTP/1.1 {status}\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{answer}"
                );
                // The server may have given up.
                let _ = stream.write_all(text.as_bytes());
            });
        }
    });
    (url, asked)
}

#[test]
fn the_application_says_who_may_join_and_knows_who_asks() {
    let (url, asked) = application();
    let server = Setup::new()
        .set("rooms.join", "hook")
        .set("hooks.room_join_url", &url)
        .set("hooks.secret", HOOK_SECRET.0)
        .start();
    for transport in [Transport::Ws, Transport::Tcp] {
        let mut client = server.connect_device(transport, "alice", "phone");
        for (room, refusal) in [
            ("open", None),
            ("closed", Some("forbidden")),
            ("nonsense", Some("unavailable")),
            ("list", Some("unavailable")),
            ("broken", Some("unavailable")),
        ] {
            let answer = client.ask("room.join", json!({"room": room}));
            match refusal {
                None => drop(answer.expect_kind("room.joined")),
                Some(code) => drop(answer.expect_error(code)),
            }
        }
        say(&mut client, "open", 1);
        assert_eq!(client.expect("room.push").json["body"], 1);
        client.close();
    }
    let asked = asked.lock().expect("nobody panics");
    assert_eq!(asked.len(), 10);
    let mut ids = Vec::new();
    for (head, body) in asked.iter() {
        let question: Value = serde_json::from_str(body).expect("JSON");
        assert_eq!((&question["user_id"], &question["device_id"]), (&json!("alice"), &json!("phone")));
        assert!(head.starts_with("POST /may-join HTTP/1.1"), "{head}");
        let time: u64 = header(head, "webhook-timestamp").parse().expect("seconds");
        assert!(time.abs_diff(token::now_secs()) < 60, "{time}");
        assert_eq!(header(head, "webhook-signature"), signature(head, body));
        ids.push(header(head, "webhook-id"));
    }
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), 10, "each question has an id of its own");
}

// --- the command line -----------------------------------------------------------------------------------------------

/// Runs `bowline chat` with this input, and says what it printed.
fn chat(server: &Server, user: &str, input: &str) -> (Option<i32>, String) {
    let mut child = std::process::Command::new(bowline_tests::server::program())
        .args(["chat", "--user", user, "--room", "lobby", "--token", &token::of(user)])
        .args(["--url", &format!("ws://{}/ws", server.ws())])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("the program starts");
    child.stdin.take().expect("a pipe").write_all(input.as_bytes()).expect("it reads");
    let output = child.wait_with_output().expect("it ends");
    (output.status.code(), String::from_utf8(output.stdout).expect("text"))
}

#[test]
fn chat_talks_in_a_room_and_ends_when_all_of_it_has_come_back() {
    let server = Server::with(&[("rooms.join", "any")]);
    let mut alice = server.connect(Transport::Tcp, "alice");
    join(&mut alice, "lobby");
    let (code, text) = chat(&server, "bob", "hello\nis anybody there?\n");
    assert_eq!(code, Some(0), "{text}");
    for line in ["-- in room lobby, 2 there", "#1 bob: hello", "#2 bob: is anybody there?"] {
        assert!(text.lines().any(|one| one == line), "no {line:?} in {text}");
    }
    assert_eq!(pushed(&mut alice, "lobby", 1).json["body"], json!({"text": "hello"}));
    assert_eq!(pushed(&mut alice, "lobby", 2).json["body"], json!({"text": "is anybody there?"}));
    let server = Server::with(&[("rooms.join", "claim")]);
    let (code, _) = chat(&server, "bob", "hello\n");
    assert_eq!(code, Some(1), "it was not let in");
}
