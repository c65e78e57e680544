//! The API for back ends: keys, messages, users, kicking, status and metrics.

use bowline_tests::{Server, Transport, http, metrics::Metrics, token, until};
use serde_json::{Value, json};
use std::collections::BTreeSet;

on_both![
    a_message_by_the_api_reaches_every_device,
    a_kicked_user_is_closed_4504,
    one_device_can_be_kicked_with_a_reason,
    the_state_of_a_user_names_its_devices,
    the_status_counts_authenticated_connections,
];

#[test]
fn the_key_opens_the_api_in_either_header_and_nothing_else_does() {
    let server = Server::start();
    let paths = [
        ("GET", "/admin/status"),
        ("GET", "/api/v1/users/alice"),
        ("POST", "/api/v1/messages"),
        ("POST", "/api/v1/groups"),
        ("POST", "/admin/drain"),
        ("POST", "/api/v1/users/alice/kick"),
        ("GET", "/api/v1/conversations/d:a:b/messages"),
    ];
    let bearer = format!("Bearer {}", token::API_KEY);
    let wrong = format!("Bearer {}x", token::API_KEY);
    let of_a_client = format!("Bearer {}", token::of("alice"));
    for (method, path) in paths {
        for headers in [
            vec![],
            vec![("authorization", &*wrong)],
            vec![("authorization", &*of_a_client)],
            vec![("authorization", token::API_KEY)],
            vec![("x-api-key", "wrong")],
            vec![("x-api-key", "")],
        ] {
            http::request(method, &server.api_url(path), &headers, None).expect_refusal(401);
        }
    }
    for headers in [("authorization", &*bearer), ("x-api-key", token::API_KEY)] {
        http::request("GET", &server.api_url("/admin/status"), &[headers], None).expect(200);
    }
    assert_eq!(server.status()["state"], "ready", "none of those drained it");
    for path in ["/healthz", "/readyz"] {
        http::request("GET", &server.api_url(path), &[], None).expect(200);
    }
}

#[test]
fn the_api_is_not_on_the_public_listener() {
    let server = Server::start();
    let bearer = format!("Bearer {}", token::API_KEY);
    for path in ["/admin/status", "/api/v1/users/alice", "/metrics"] {
        let answer = http::request("GET", &server.public_url(path), &[("authorization", &bearer)], None);
        assert_eq!(answer.status, 404, "{path}: {}", answer.text);
    }
}

#[test]
fn unknown_paths_and_bad_requests_are_refused_in_json() {
    let server = Server::start();
    server.get("/api/v1/nothing").expect_refusal(404);
    let message = |fields: Value| server.post("/api/v1/messages", &fields);
    for fields in [
        json!({}),
        json!("text"),
        json!({"id": "1", "from": "alice", "body": 1}),
        json!({"id": "1", "to": "bob", "body": 1}),
        json!({"from": "alice", "to": "bob", "body": 1}),
        json!({"id": "1", "from": "alice", "to": "bob"}),
        json!({"id": "1", "from": "alice", "to": "b:b", "body": 1}),
        json!({"id": "1", "from": "alice", "to": "bob", "conversation_id": "d:alice:bob", "body": 1}),
    ] {
        message(fields).expect_refusal(400);
    }
    let bearer = format!("Bearer {}", token::API_KEY);
    let url = server.api_url("/api/v1/messages");
    http::request("POST", &url, &[("authorization", &bearer)], Some("no JSON")).expect_refusal(400);
    let huge = json!({"id": "1", "from": "alice", "to": "bob", "body": "x".repeat(40_000)});
    message(huge).expect_refusal(413);
    message(json!({"id": "1", "from": "eve", "conversation_id": "d:alice:bob", "body": 1}))
        .expect_refusal(403);
}

fn a_message_by_the_api_reaches_every_device(transport: Transport) {
    let server = Server::start();
    let mut devices = [
        server.connect_device(transport, "alice", "a1"),
        server.connect_device(transport, "bob", "b1"),
        server.connect_device(transport, "bob", "b2"),
    ];
    let message = json!({"id": "api-1", "from": "alice", "to": "bob", "body": {"text": "from the back end"}});
    let answer = server.send(&message);
    assert_eq!((&answer["conversation_id"], &answer["seq"]), (&json!("d:alice:bob"), &json!(1)));
    assert!(answer["ts"].as_u64() > Some(1_600_000_000_000), "{answer}");
    for device in &mut devices {
        let push = device.expect_push("d:alice:bob", 1);
        assert_eq!((push.text_of("id"), push.text_of("from")), ("api-1", "alice"));
        assert_eq!((&push.json["body"], &push.json["ts"]), (&message["body"], &answer["ts"]));
    }
    // The same again is the same; another body is a conflict.
    assert_eq!(server.send(&message), answer);
    let other = json!({"id": "api-1", "from": "alice", "to": "bob", "body": 2});
    let refusal = server.post("/api/v1/messages", &other).expect_refusal(409);
    assert_eq!(refusal["code"], "conflict");
    for device in &mut devices {
        device.expect_no("msg.push");
    }
}

#[test]
fn many_messages_are_taken_at_once_and_answered_in_order() {
    let server = Server::start();
    let message = |n: usize| json!({"id": format!("m{n}"), "from": "alice", "to": "bob", "body": n});
    let mut batch: Vec<Value> = (1..=1000).map(message).collect();
    // Two of them are bad; the others go their way.
    batch[10] = json!({"id": "m11", "from": "alice", "to": "b:b", "body": 1});
    batch[20] = json!({"id": "m1", "from": "alice", "to": "bob", "body": "another"});
    let answer = server.send(&json!(batch));
    let results = answer["results"].as_array().expect("results");
    assert_eq!(results.len(), 1000);
    let mut seq = 0;
    for (n, result) in results.iter().enumerate() {
        match n {
            10 => assert_eq!(result["code"], "malformed", "{result}"),
            20 => assert_eq!(result["code"], "conflict", "{result}"),
            _ => {
                seq += 1;
                assert_eq!(result["seq"].as_u64(), Some(seq), "{n}: {result}");
                assert_eq!(result["conversation_id"], "d:alice:bob");
            }
        }
    }
    let too_many: Vec<Value> = (2001..=3001).map(message).collect();
    let refused = server.post("/api/v1/messages", &json!(too_many));
    assert!([400, 413].contains(&refused.status), "{} {}", refused.status, refused.text);
    let page = server.get("/api/v1/conversations/d:alice:bob/messages?limit=1").expect(200).json();
    assert_eq!(page["messages"][0]["seq"], json!(998), "none of those was stored");
}

fn a_kicked_user_is_closed_4504(transport: Transport) {
    let server = Server::start();
    let mut alice = ["a1", "a2"].map(|device| server.connect_device(transport, "alice", device));
    let mut bob = server.connect(transport, "bob");
    let answer = server.post("/api/v1/users/alice/kick", &json!({})).expect(200).json();
    assert_eq!(answer, json!({"closed": 2}));
    for client in &mut alice {
        client.expect_closed(4504, "kicked");
    }
    assert_eq!(bob.tell("alice", "gone?").seq(), 1);
    assert_eq!(server.post("/api/v1/users/alice/kick", &json!({})).expect(200).json(), json!({"closed": 0}));
    // The token is still good.
    server.connect(transport, "alice").expect("sync.notice");
}

fn one_device_can_be_kicked_with_a_reason(transport: Transport) {
    let server = Server::start();
    let mut phone = server.connect_device(transport, "alice", "phone");
    let mut laptop = server.connect_device(transport, "alice", "laptop");
    let kick = json!({"device_id": "phone", "reason": "moved house"});
    assert_eq!(server.post("/api/v1/users/alice/kick", &kick).expect(200).json(), json!({"closed": 1}));
    let ending = phone.wait_closed();
    let notice = ending.notice.expect("session.closed is the last frame");
    assert_eq!((notice.number_of("code"), notice.text_of("reason")), (4504, "moved house"));
    if transport == Transport::Ws {
        assert_eq!(ending.close, Some((4504, "moved house".to_owned())));
    }
    assert_eq!(laptop.tell("bob", "still here").seq(), 1);
}

fn the_state_of_a_user_names_its_devices(transport: Transport) {
    let server = Server::start();
    let unknown = server.get("/api/v1/users/nobody").expect(200).json();
    assert_eq!((&unknown["online"], &unknown["devices"]), (&json!(false), &json!([])));
    let before = token::now_ms() - 10_000;
    let phone = server.login("alice").device("phone").class("ios").connect(transport);
    let _laptop = server.login("alice").device("laptop").connect(transport);
    let node = phone.field("node_id").to_owned();
    let state = server.get("/api/v1/users/alice").expect(200).json();
    assert_eq!((&state["user_id"], &state["online"]), (&json!("alice"), &json!(true)));
    let devices = state["devices"].as_array().expect("devices");
    let names: BTreeSet<&str> = devices.iter().filter_map(|device| device["device_id"].as_str()).collect();
    assert_eq!(names, BTreeSet::from(["laptop", "phone"]));
    for device in devices {
        assert_eq!(device["node_id"], json!(node), "{device}");
        for time in ["connected_at", "last_seen"] {
            assert!(device[time].as_u64() > Some(before), "{time} in {device}");
        }
        if device["device_id"] == "phone" {
            assert_eq!(device["device_class"], "ios");
        }
    }
    phone.close();
    let state = until("the phone is offline", || {
        let state = server.get("/api/v1/users/alice").expect(200).json();
        let devices = state["devices"].as_array().expect("devices").clone();
        let phone = devices.iter().find(|device| device["device_id"] == "phone");
        // A known device is told with its last sign of life, or not at all.
        let offline = phone.is_none_or(|phone| phone.get("node_id").is_none_or(Value::is_null));
        offline.then_some(state)
    });
    assert_eq!(state["online"], json!(true), "the laptop is there");
}

#[test]
fn a_device_can_be_forgotten() {
    let server = Server::start();
    server.login("alice").device("phone").connect(Transport::Ws).close();
    until("the phone is offline", || {
        let state = server.get("/api/v1/users/alice").expect(200).json();
        (state["online"] == json!(false)).then_some(())
    });
    let answer = server.call("DELETE", "/api/v1/users/alice/devices/phone", None);
    assert!([200, 204].contains(&answer.status), "{} {}", answer.status, answer.text);
    let state = server.get("/api/v1/users/alice").expect(200).json();
    assert_eq!(state["devices"], json!([]), "{state}");
}

fn the_status_counts_authenticated_connections(transport: Transport) {
    let server = Server::start();
    let name = if transport == Transport::Ws { "ws" } else { "tcp" };
    let status = server.status();
    for field in ["node_id", "boot_id", "version"] {
        assert!(status[field].as_str().is_some_and(|text| !text.is_empty()), "{field} in {status}");
    }
    assert_eq!((&status["state"], &status["connections"]), (&json!("ready"), &json!(0)));
    assert!(status["uptime_ms"].is_u64(), "{status}");
    assert_eq!(status["transports"]["ws"]["address"], json!(server.ws().to_string()));
    assert_eq!(status["transports"]["ws"]["path"], json!("/ws"));
    assert_eq!(status["transports"]["tcp"]["address"], json!(server.tcp().to_string()));

    let stranger = server
        .login("x")
        .way(bowline_tests::client::Way::FirstFrame)
        .open(transport)
        .expect("no identity is needed to open");
    let held = [
        server.connect_device(transport, "alice", "a1"),
        server.connect_device(transport, "alice", "a2"),
        server.connect_device(transport, "bob", "b1"),
    ];
    assert_eq!(held[0].field("node_id"), status["node_id"].as_str().expect("text"));
    let status = server.status();
    let counts = [&status["connections"], &status["users"], &status["devices"]];
    assert_eq!(counts, [&json!(3), &json!(2), &json!(3)], "the stranger does not count: {status}");
    assert_eq!(status["transports"][name]["connections"], 3, "{status}");
    drop(stranger);
    for client in held {
        client.close();
    }
    until("everybody is gone", || (server.status()["connections"] == 0).then_some(()));
}

#[test]
fn metrics_have_the_promised_names_in_prometheus_form() {
    let server = Server::start();
    let mut alice = server.connect(Transport::Ws, "alice");
    alice.tell("bob", 1);
    let page = server.get("/metrics").expect(200);
    assert_eq!(page.header("content-type"), Some("text/plain; version=0.0.4; charset=utf-8"));
    let text = page.text;
    let metrics = Metrics::parse(&text);
    // A counter and a gauge, each described under its own name.
    for line in
        ["bowline_gateway_backpressure_paused_total counter", "bowline_gateway_backpressure_paused gauge"]
    {
        let line = format!("# TYPE {line}");
        assert_eq!(text.lines().filter(|one| *one == line).count(), 1, "{line}: {text}");
    }
    for name in [
        "bowline_gateway_backpressure_paused_total",
        "bowline_gateway_backpressure_resumed_total",
        "bowline_gateway_backpressure_paused",
        "bowline_ledger_accepted_total",
        "bowline_ledger_delivered_total",
        "bowline_ledger_expired_total",
        "bowline_ledger_waiting",
    ] {
        assert!(metrics.find(name).is_some(), "{name} is missing from\n{text}");
    }
    let strangers: Vec<&str> = metrics.names().filter(|name| !name.starts_with("bowline_")).collect();
    assert!(
        strangers.iter().all(|name| name.starts_with("process_")),
        "names are bowline_<role>_…: {strangers:?}"
    );
    assert!(!text.contains("alice"), "no label takes a value that a client can choose");
    assert_eq!(metrics.get("bowline_ledger_accepted_total"), 1.0);
    metrics.assert_ledger_balances();
}

#[test]
fn a_path_that_is_not_percent_encoded_is_400_and_nothing_is_made_of_it() {
    let server = Server::start();
    let mut member = server.connect(Transport::Ws, "alice");
    for room in ["%zz", "a%", "a%2", "%%20"] {
        member.ask("room.join", json!({"room": room})).expect_kind("room.joined");
        let path = format!("/api/v1/rooms/{room}/messages");
        let answer = server.post(&path, &json!({"body": 1})).expect_refusal(400);
        assert!(answer["message"].as_str().is_some_and(|text| text.contains("%25")), "{answer}");
        server.get(&format!("/api/v1/conversations/d:a:b{room}/messages")).expect_refusal(400);
        server.get(&format!("/api/v1/users/{room}")).expect_refusal(400);
    }
    // Encoded as it should be it is that very room.
    server.post("/api/v1/rooms/%25zz/messages", &json!({"body": 2})).expect(202);
    let push = member.expect("room.push");
    assert_eq!((push.text_of("room"), push.number_of("offset"), &push.json["body"]), ("%zz", 1, &json!(2)));
}

#[test]
fn a_list_is_no_object() {
    let server = Server::start();
    // The fields of each in their order, as a list.
    for (path, list) in [
        ("/api/v1/groups", json!(["g", "name", ["a", "b"], "a", null])),
        ("/api/v1/tokens", json!(["alice", "phone", 1000, []])),
        ("/api/v1/tokens/revoke", json!(["j", null, null])),
        ("/api/v1/sessions", json!(["alice", "s", 1])),
        ("/api/v1/users/alice/kick", json!(["phone", "because"])),
        ("/api/v1/rooms/r/messages", json!([["alice", 1, null]])),
    ] {
        server.post(path, &list).expect_refusal(400);
    }
    let results =
        server.post("/api/v1/messages", &json!([["1", "a", "b", null, 1, null]])).expect(200).json();
    assert_eq!(results["results"][0]["code"], "malformed", "{results}");
}
