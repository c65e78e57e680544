//! The two HTTP servers over a router that answers from a table.

use bowline_api::{
    Access, ApiEnd, Drain, Issued, NewSession, NewToken, Node, Requests, Revoke, RoomMessage, Rooms, State,
    Status, Transport, Transports, public, server,
};
use bowline_auth::Verifier;
use bowline_links::{Downlinks, Uplinks};
use bowline_protocol::{
    Body, CloseCode, ConversationId, DeviceId, ErrorCode, UserId,
    error::Refusal,
    ids::{DeviceClass, RoomName},
    link::{Answer, DeviceState, Down, Downlink, NodeRef, Request, SendTarget, Up, Uplink},
};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{HeaderMap, Method, StatusCode, header};
use hyper_util::rt::{TokioExecutor, TokioIo};
use std::{
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

const KEY: &str = "the-key";

type Headers<'a> = &'a [(&'a str, &'a str)];

/// A router that answers at once, or never.
struct Router {
    end: Arc<ApiEnd>,
    node: Arc<NodeRef>,
    seen: Mutex<Vec<Request>>,
    /// How many messages it takes at a time.
    room: AtomicUsize,
    is_silent: AtomicBool,
}

impl Uplinks for Router {
    fn send(&self, batch: &mut Vec<Uplink>) {
        let take = batch.len().min(self.room.load(Ordering::Relaxed));
        for message in batch.drain(..take) {
            assert_eq!((message.from.connection, message.from.login), (0, 0));
            let Up::Request { request_id, request } = message.event else { panic!("the API only asks") };
            let answer = Box::new(answer(&request));
            self.seen.lock().unwrap().push(request);
            if !self.is_silent.load(Ordering::Relaxed) {
                let event = Down::Answer { request_id, answer };
                self.end.send(vec![Downlink { node: self.node.clone(), to: Default::default(), event }]);
            }
        }
    }

    fn depth(&self) -> (usize, usize) {
        (0, 1)
    }
}

fn refused(code: ErrorCode) -> Answer {
    Answer::Refused(Refusal::new(code, format!("refused as {}", code.as_str())))
}

/// Ids that are the name of an error code are refused with it.
fn code_of(text: &str) -> Option<ErrorCode> {
    ErrorCode::ALL.into_iter().find(|code| code.as_str() == text)
}

fn answer(request: &Request) -> Answer {
    let named = match request {
        Request::Send(send) => code_of(&send.id),
        Request::GroupCreate { group_id, .. } => group_id.as_ref().and_then(|id| code_of(id)),
        Request::GroupAdd { group, .. }
        | Request::GroupRemove { group, .. }
        | Request::GroupChange { group, .. }
        | Request::GroupDelete { group } => code_of(group),
        Request::History { conversation, .. } => code_of(&conversation[2..]),
        Request::User { user } | Request::Kick { user, .. } | Request::ForgetDevice { user, .. } => {
            code_of(user)
        }
    };
    if let Some(code) = named {
        return refused(code);
    }
    match request {
        Request::Send(send) => Answer::Stored {
            conversation_id: match &send.target {
                SendTarget::User(user) => ConversationId::direct(&send.from, user),
                SendTarget::Conversation(text) => ConversationId::trusted(text),
            },
            seq: 7,
            ts: 1000,
        },
        Request::GroupCreate { .. } => Answer::Created { conversation_id: ConversationId::trusted("g:new") },
        Request::GroupAdd { .. }
        | Request::GroupRemove { .. }
        | Request::GroupChange { .. }
        | Request::GroupDelete { .. }
        | Request::ForgetDevice { .. } => Answer::Done,
        Request::History { .. } => Answer::Page(Bytes::from_static(b"{\"messages\":[]}")),
        Request::User { .. } => Answer::User {
            online: true,
            devices: vec![DeviceState {
                device_id: DeviceId::trusted("phone"),
                device_class: Some(DeviceClass::Ios),
                node_id: Some("n1".into()),
                connected_at: Some(5),
                last_seen: 6,
            }],
        },
        Request::Kick { .. } => Answer::Closed { count: 2 },
    }
}

#[derive(Default)]
struct TestNode {
    drains: Mutex<Vec<String>>,
}

impl Node for TestNode {
    fn status(&self) -> Status {
        let is_draining = !self.drains.lock().unwrap().is_empty();
        Status {
            node_id: "n1".into(),
            boot_id: "b1".into(),
            version: "1".into(),
            state: if is_draining { State::Draining } else { State::Ready },
            uptime_ms: 1,
            connections: 3,
            users: 2,
            devices: 3,
            transports: Transports {
                ws: Some(Transport {
                    address: "127.0.0.1:1".into(),
                    path: Some("/ws".into()),
                    connections: 3,
                }),
                tcp: None,
            },
            drain: is_draining.then_some(Drain { deadline: 9, remaining: 3 }),
        }
    }

    fn drain(&self, reason: &str) {
        self.drains.lock().unwrap().push(reason.to_owned());
    }

    fn readiness(&self) -> Result<(), Vec<String>> {
        if self.drains.lock().unwrap().is_empty() { Ok(()) } else { Err(vec!["draining".into()]) }
    }

    fn metrics(&self) -> String {
        "bowline_test 1\n".into()
    }
}

/// Gives and takes back without looking.
#[derive(Default)]
struct TestAccess {
    seen: Mutex<Vec<String>>,
}

impl Access for TestAccess {
    fn issue(&self, wanted: NewToken) -> Result<Issued, Refusal> {
        self.seen.lock().unwrap().push(format!("{wanted:?}"));
        Ok(Issued { token: format!("token-of-{}", wanted.user), sid: "s".into(), expires_at: wanted.ttl_ms })
    }

    fn open_session(&self, session: NewSession) -> Result<(), Refusal> {
        match &*session.sid {
            "unavailable" => Err(Refusal::new(ErrorCode::Unavailable, "the store does not answer")),
            _ => Ok(()),
        }
    }

    fn revoke(&self, target: Revoke) -> Result<u64, Refusal> {
        self.seen.lock().unwrap().push(format!("{target:?}"));
        Ok(3)
    }
}

/// Notes what is published; the room `full` takes nothing.
#[derive(Default)]
struct TestRooms {
    seen: Mutex<Vec<(String, Vec<RoomMessage>)>>,
}

impl Rooms for TestRooms {
    fn publish(&self, room: &RoomName, messages: &[RoomMessage]) -> Result<u64, Refusal> {
        if room.as_str() == "full" {
            return Err(Refusal::new(ErrorCode::Overloaded, "too many rooms"));
        }
        self.seen.lock().unwrap().push((room.to_string(), messages.to_vec()));
        Ok(40 + messages.len() as u64)
    }
}

struct Rig {
    rooms: Arc<TestRooms>,
    access: Arc<TestAccess>,
    router: Arc<Router>,
    end: Arc<ApiEnd>,
    node: Arc<TestNode>,
    requests: Requests,
    api: SocketAddr,
}

impl Rig {
    async fn start() -> Self {
        let node_ref = Arc::new(NodeRef { node_id: "n1".into(), boot_id: "b1".into() });
        let end = Arc::new(ApiEnd::new(node_ref.clone()));
        let router = Arc::new(Router {
            end: end.clone(),
            node: node_ref,
            seen: Mutex::default(),
            room: AtomicUsize::new(usize::MAX),
            is_silent: AtomicBool::new(false),
        });
        let requests = Requests::new(end.clone(), router.clone()).with_timeout(Duration::from_millis(300));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let api = listener.local_addr().unwrap();
        let node = Arc::new(TestNode::default());
        let config = server::Config { key: KEY.into(), max_frame_bytes: 1024 };
        let access = Arc::new(TestAccess::default());
        let rooms = Arc::new(TestRooms::default());
        let serving =
            server::serve(listener, config, requests.clone(), node.clone(), access.clone(), rooms.clone());
        tokio::spawn(serving);
        Self { rooms, access, router, end, node, requests, api }
    }

    /// One request to the server API, with its key.
    async fn call(&self, method: &str, path: &str, body: &str) -> Answered {
        self.call_with(method, path, body, &[("x-api-key", KEY)]).await
    }

    async fn call_with(&self, method: &str, path: &str, body: &str, headers: Headers<'_>) -> Answered {
        let stream = tokio::net::TcpStream::connect(self.api).await.unwrap();
        exchange(stream, method, path, body, headers).await
    }

    fn last(&self) -> Request {
        self.router.seen.lock().unwrap().pop().expect("the router was asked")
    }
}

struct Answered {
    status: u16,
    headers: HeaderMap,
    text: String,
}

impl Answered {
    fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.text).unwrap_or_else(|_| panic!("no JSON: {}", self.text))
    }
}

async fn exchange(
    stream: tokio::net::TcpStream,
    method: &str,
    path: &str,
    body: &str,
    headers: Headers<'_>,
) -> Answered {
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    let mut request = hyper::Request::builder().method(method).uri(path);
    if headers.iter().all(|(name, _)| *name != "host") {
        request = request.header(header::HOST, "localhost");
    }
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let request = request.body(Full::new(Bytes::copy_from_slice(body.as_bytes()))).unwrap();
    let response = sender.send_request(request).await.unwrap();
    let (status, headers) = (response.status().as_u16(), response.headers().clone());
    let text = response.into_body().collect().await.unwrap().to_bytes();
    Answered { status, headers, text: String::from_utf8(text.to_vec()).unwrap() }
}

// The server API

#[tokio::test]
async fn every_endpoint_asks_the_router_and_answers_as_documented() {
    let rig = Rig::start().await;
    let rows = [
        (
            "POST",
            "/api/v1/messages",
            r#"{"id":"1","from":"bob","to":"alice","body":{"a":1}}"#,
            200,
            r#"{"conversation_id":"d:alice:bob","seq":7,"ts":1000}"#,
        ),
        (
            "POST",
            "/api/v1/groups",
            r#"{"members":["a"],"owner":"a","meta":{"x":1}}"#,
            201,
            r#"{"conversation_id":"g:new"}"#,
        ),
        ("PUT", "/api/v1/groups/team/members/alice", "", 204, ""),
        ("DELETE", "/api/v1/groups/team/members/alice", "", 204, ""),
        ("PATCH", "/api/v1/groups/team", r#"{"name":"New"}"#, 204, ""),
        ("DELETE", "/api/v1/groups/team", "", 204, ""),
        (
            "GET",
            "/api/v1/conversations/d:alice:bob/messages?after_seq=3&limit=200",
            "",
            200,
            r#"{"messages":[]}"#,
        ),
        ("GET", "/api/v1/conversations/g%3Ateam/messages", "", 200, r#"{"messages":[]}"#),
        (
            "GET",
            "/api/v1/users/alice",
            "",
            200,
            r#"{"user_id":"alice","online":true,"devices":[{"device_id":"phone","device_class":"ios","node_id":"n1","connected_at":5,"last_seen":6}]}"#,
        ),
        (
            "POST",
            "/api/v1/users/alice/kick",
            r#"{"device_id":"phone","reason":"spam"}"#,
            200,
            r#"{"closed":2}"#,
        ),
        ("POST", "/api/v1/users/alice/kick", "", 200, r#"{"closed":2}"#),
        ("DELETE", "/api/v1/users/alice/devices/phone", "", 204, ""),
        (
            "POST",
            "/api/v1/tokens",
            r#"{"user":"a","ttl_ms":9}"#,
            200,
            r#"{"token":"token-of-a","sid":"s","expires_at":9}"#,
        ),
        ("POST", "/api/v1/tokens/revoke", r#"{"user":"a"}"#, 200, r#"{"closed":3}"#),
        ("POST", "/api/v1/tokens/revoke", r#"{"jti":"x"}"#, 200, r#"{"closed":3}"#),
        ("POST", "/api/v1/tokens/revoke", r#"{"sid":"x"}"#, 200, r#"{"closed":3}"#),
        ("POST", "/api/v1/sessions", r#"{"user":"a","sid":"s","expires_at":1}"#, 204, ""),
        ("GET", "/healthz", "", 200, r#"{"status":"ok"}"#),
        ("GET", "/readyz", "", 200, r#"{"status":"ready"}"#),
        ("GET", "/metrics", "", 200, "bowline_test 1\n"),
    ];
    for (method, path, body, status, expected) in rows {
        let answered = rig.call(method, path, body).await;
        assert_eq!((answered.status, answered.text.as_str()), (status, expected), "{method} {path}");
    }
    assert_eq!(rig.end.waiting(), 0);
}

/// The routes and the description come from one list; what is checked here is that nothing was routed beside it.
#[tokio::test]
async fn the_description_and_the_routes_are_the_same() {
    let rig = Rig::start().await;
    let description = rig.call("GET", "/api/openapi.json", "").await;
    assert_eq!(description.status, 200);
    let description = description.json();
    assert!(description["openapi"].as_str().unwrap().starts_with("3.1"), "{}", description["openapi"]);
    let text = description.to_string();
    let mut references =
        text.split("\"#/components/schemas/").skip(1).filter_map(|rest| rest.split('"').next());
    let dangling = references.find(|name| description["components"]["schemas"][*name].is_null());
    assert_eq!(dangling, None, "a schema that is referred to is not there");
    let mut operations = 0;
    for (path, item) in description["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            operations += 1;
            assert!(operation["summary"].is_string(), "{method} {path} has no summary");
            let filled = path.replace("{id}", "d:a:b").replace("{user}", "ann").replace("{device}", "phone");
            let answered = rig.call(&method.to_uppercase(), &filled, "").await;
            let is_routed = answered.status != 405 && !answered.text.contains("there is nothing at");
            assert!(is_routed, "{method} {filled}: {} {}", answered.status, answered.text);
            let status = answered.status.to_string();
            assert!(
                operation["responses"].get(&status).is_some(),
                "{method} {path}: {status} is not described"
            );
            if operation["security"] != serde_json::json!([{}]) {
                assert!(operation["responses"].get("401").is_some(), "{method} {path} needs the key");
            }
        }
    }
    let server = concat!(env!("CARGO_MANIFEST_DIR"), "/src/server.rs");
    let source = std::fs::read_to_string(server).unwrap();
    assert!(!source.contains(".route("), "routes are made with `routes!`, which describes them");
    assert_eq!(operations, 20, "an endpoint came or went: look at docs/protocol.md too");
}

#[tokio::test]
async fn the_router_is_asked_for_what_was_written() {
    let rig = Rig::start().await;
    rig.call(
        "POST",
        "/api/v1/messages",
        r#"{"id":"1","from":"b","conversation_id":"g:x","body":"AP8=","body_encoding":"base64"}"#,
    )
    .await;
    let Request::Send(send) = rig.last() else { panic!() };
    assert_eq!(send.target, SendTarget::Conversation("g:x".into()));
    assert_eq!(send.body, Body::Binary(Bytes::from_static(&[0, 255])));
    rig.call("POST", "/api/v1/users/alice/kick", r#"{"device_id":"phone","reason":"spam"}"#).await;
    let expected = Request::Kick {
        user: UserId::trusted("alice"),
        device: Some(DeviceId::trusted("phone")),
        reason: Some("spam".into()),
        code: CloseCode::Kicked,
    };
    assert_eq!(rig.last(), expected);
    rig.call("GET", "/api/v1/conversations/g:x/messages?before_seq=9", "").await;
    let conversation = ConversationId::trusted("g:x");
    assert_eq!(rig.last(), Request::History { conversation, after: None, before: Some(9), limit: 50 });
}

#[tokio::test]
async fn faults_are_answered_as_json_with_their_status() {
    let rig = Rig::start().await;
    let large = format!(r#"{{"id":"1","from":"a","to":"b","body":"{}"}}"#, "x".repeat(2000));
    let huge = "x".repeat(6 << 20);
    let many = format!("[{}]", vec!["{}"; 1001].join(","));
    let long_meta = format!(r#"{{"meta":{{"x":"{}"}}}}"#, "x".repeat(5000));
    let long_reason = format!(r#"{{"reason":"{}"}}"#, "x".repeat(124));
    let rows: [(&str, &str, &str, u16, &str); 37] = [
        ("POST", "/api/v1/messages", "no json", 400, "malformed"),
        ("POST", "/api/v1/messages", "", 400, "malformed"),
        ("POST", "/api/v1/messages", "[1,", 400, "malformed"),
        ("POST", "/api/v1/messages", r#"{"id":"1","to":"b","body":1}"#, 400, "malformed"),
        ("POST", "/api/v1/messages", r#"{"id":"1","from":"a:b","to":"b","body":1}"#, 400, "malformed"),
        ("POST", "/api/v1/messages", &large, 413, "too_large"),
        ("POST", "/api/v1/messages", &huge, 413, "too_large"),
        ("POST", "/api/v1/messages", &many, 413, "too_large"),
        ("POST", "/api/v1/groups", r#"{"name":"x"}"#, 400, "malformed"),
        ("POST", "/api/v1/groups", r#"{"members":[],"meta":3}"#, 400, "malformed"),
        ("POST", "/api/v1/groups", &huge, 413, "too_large"),
        ("PATCH", "/api/v1/groups/team", "{}", 400, "malformed"),
        ("PATCH", "/api/v1/groups/team", &long_meta, 400, "malformed"),
        ("PUT", "/api/v1/groups/g%3Ateam/members/a", "", 400, "malformed"),
        ("GET", "/api/v1/conversations/d:b:a/messages", "", 400, "malformed"),
        ("GET", "/api/v1/conversations/g:x/messages?limit=201", "", 400, "malformed"),
        ("GET", "/api/v1/conversations/g:x/messages?limit=x", "", 400, "malformed"),
        ("GET", "/api/v1/conversations/g:x/messages?after_seq=1&before_seq=2", "", 400, "malformed"),
        ("GET", "/api/v1/users/a%00b", "", 400, "malformed"),
        ("POST", "/api/v1/users/a/kick", &long_reason, 400, "malformed"),
        ("POST", "/api/v1/users/a/kick", "[]", 400, "malformed"),
        ("POST", "/api/v1/rooms/r/messages", "{}", 400, "malformed"),
        ("POST", "/api/v1/rooms/r/messages", "[]", 400, "malformed"),
        ("POST", "/api/v1/rooms/r/messages", r#"[{"body":1},{"from":"a:b","body":1}]"#, 400, "malformed"),
        ("POST", "/api/v1/rooms/a%0Ab/messages", r#"{"body":1}"#, 400, "malformed"),
        ("POST", "/api/v1/rooms/full/messages", r#"{"body":1}"#, 503, "overloaded"),
        ("POST", "/api/v1/tokens", "{}", 400, "malformed"),
        ("POST", "/api/v1/tokens", r#"{"user":"a","ttl_ms":0}"#, 400, "malformed"),
        ("POST", "/api/v1/tokens", r#"{"user":"a","rooms":[""]}"#, 400, "malformed"),
        ("POST", "/api/v1/tokens/revoke", "{}", 400, "malformed"),
        ("POST", "/api/v1/tokens/revoke", r#"{"user":"a","sid":"s"}"#, 400, "malformed"),
        ("POST", "/api/v1/sessions", r#"{"user":"a","sid":"","expires_at":1}"#, 400, "malformed"),
        (
            "POST",
            "/api/v1/sessions",
            r#"{"user":"a","sid":"s","expires_at":9223372036854775808}"#,
            400,
            "malformed",
        ),
        (
            "POST",
            "/api/v1/sessions",
            r#"{"user":"a","sid":"unavailable","expires_at":1}"#,
            503,
            "unavailable",
        ),
        ("GET", "/nothing/here", "", 404, "not_found"),
        ("GET", "/api/v1/messages", "", 405, "malformed"),
        ("DELETE", "/admin/status", "", 405, "malformed"),
    ];
    for (method, path, body, status, code) in rows {
        let answered = rig.call(method, path, body).await;
        assert_eq!((answered.status, &answered.json()["code"]), (status, &code.into()), "{method} {path}");
        assert!(answered.json()["message"].as_str().is_some_and(|text| !text.is_empty()), "{method} {path}");
        assert_eq!(answered.headers[header::CONTENT_TYPE], "application/json");
        assert_eq!(answered.headers.contains_key(header::ALLOW), status == 405, "{method} {path}");
    }
    assert!(rig.router.seen.lock().unwrap().is_empty(), "nothing of this reaches the router");
}

#[tokio::test]
async fn refusals_of_the_router_keep_their_code() {
    let rig = Rig::start().await;
    for code in ErrorCode::ALL {
        let name = code.as_str();
        let rows = [
            (
                "POST",
                "/api/v1/messages".to_owned(),
                format!(r#"{{"id":"{name}","from":"a","to":"b","body":1}}"#),
            ),
            ("POST", "/api/v1/groups".to_owned(), format!(r#"{{"group_id":"{name}","members":["a"]}}"#)),
            ("PUT", format!("/api/v1/groups/{name}/members/a"), String::new()),
            ("DELETE", format!("/api/v1/groups/{name}/members/a"), String::new()),
            ("PATCH", format!("/api/v1/groups/{name}"), r#"{"name":"x"}"#.to_owned()),
            ("DELETE", format!("/api/v1/groups/{name}"), String::new()),
            ("GET", format!("/api/v1/conversations/g:{name}/messages"), String::new()),
            ("GET", format!("/api/v1/users/{name}"), String::new()),
            ("POST", format!("/api/v1/users/{name}/kick"), String::new()),
            ("DELETE", format!("/api/v1/users/{name}/devices/d"), String::new()),
        ];
        for (method, path, body) in rows {
            let answered = rig.call(method, &path, &body).await;
            assert_eq!((answered.status, &answered.json()["code"]), (code.status(), &name.into()), "{path}");
            assert_eq!(answered.headers.contains_key(header::RETRY_AFTER), code.is_temporary(), "{path}");
        }
    }
}

#[tokio::test]
async fn an_array_is_answered_in_its_order() {
    let rig = Rig::start().await;
    let body = r#"[
        {"id":"1","from":"a","to":"b","body":1},
        {"id":"2","from":"a","body":1},
        {"id":"conflict","from":"a","to":"b","body":1},
        7,
        {"id":"3","from":"a","to":"c","body":1}
    ]"#;
    let answered = rig.call("POST", "/api/v1/messages", body).await;
    assert_eq!(answered.status, 200);
    let json = answered.json();
    let results = json["results"].as_array().unwrap();
    assert_eq!(results[0], serde_json::json!({"conversation_id": "d:a:b", "seq": 7, "ts": 1000}));
    let codes: Vec<_> = results.iter().map(|result| result["code"].as_str().unwrap_or("")).collect();
    assert_eq!(codes, ["", "malformed", "conflict", "malformed", ""]);
    assert_eq!(results[4]["conversation_id"], "d:a:c");
    let empty = rig.call("POST", "/api/v1/messages", "[]").await;
    assert_eq!((empty.status, empty.text.as_str()), (200, r#"{"results":[]}"#));
}

#[tokio::test]
async fn a_router_that_is_silent_or_full_is_503_and_leaves_nothing_behind() {
    let rig = Rig::start().await;
    rig.router.is_silent.store(true, Ordering::Relaxed);
    let answered = rig.call("GET", "/api/v1/users/a", "").await;
    assert_eq!((answered.status, &answered.json()["code"]), (503, &"unavailable".into()));
    rig.router.is_silent.store(false, Ordering::Relaxed);
    rig.router.room.store(0, Ordering::Relaxed);
    let answered = rig.call("GET", "/api/v1/users/a", "").await;
    assert_eq!((answered.status, &answered.json()["code"]), (503, &"overloaded".into()));
    assert_eq!(answered.headers[header::RETRY_AFTER], "1");
    assert_eq!(rig.end.waiting(), 0);
    // One place at a time: everything gets there, in order.
    rig.router.room.store(1, Ordering::Relaxed);
    let body = r#"[{"id":"1","from":"a","to":"b","body":1},{"id":"2","from":"a","to":"b","body":1},{"id":"3","from":"a","to":"b","body":1}]"#;
    rig.router.seen.lock().unwrap().clear();
    assert_eq!(rig.call("POST", "/api/v1/messages", body).await.status, 200);
    let ids: Vec<_> = (rig.router.seen.lock().unwrap().iter())
        .map(|request| match request {
            Request::Send(send) => send.id.to_string(),
            _ => String::new(),
        })
        .collect();
    assert_eq!(ids, ["1", "2", "3"]);
}

#[tokio::test]
async fn the_key_opens_everything_and_probes_need_none() {
    let rig = Rig::start().await;
    let rows: [(&str, Headers<'_>, u16); 9] = [
        ("/admin/status", &[], 401),
        ("/metrics", &[], 401),
        ("/nothing", &[], 401),
        ("/admin/status", &[("x-api-key", "the-kez")], 401),
        ("/admin/status", &[("x-api-key", "the-key-and-more")], 401),
        ("/admin/status", &[("authorization", "Basic the-key")], 401),
        ("/admin/status", &[("authorization", "bearer the-key")], 200),
        ("/healthz", &[], 200),
        ("/readyz", &[], 200),
    ];
    for (path, headers, status) in rows {
        let answered = rig.call_with("GET", path, "", headers).await;
        assert_eq!(answered.status, status, "{path} {headers:?}");
        if status == 401 {
            assert_eq!(answered.json()["code"], "unauthenticated");
        }
    }
}

#[tokio::test]
async fn a_drain_begins_and_turns_readiness() {
    let rig = Rig::start().await;
    let status = rig.call("GET", "/admin/status", "").await.json();
    assert_eq!((&status["state"], &status["transports"]["ws"]["path"]), (&"ready".into(), &"/ws".into()));
    assert!(status.get("drain").is_none());
    let answered = rig.call("POST", "/admin/drain?reason=new%20version", "").await;
    assert_eq!((answered.status, &answered.json()["state"]), (202, &"draining".into()));
    assert_eq!(*rig.node.drains.lock().unwrap(), ["new version"]);
    assert_eq!(rig.call("POST", "/admin/drain", "").await.status, 202);
    let ready = rig.call("GET", "/readyz", "").await;
    assert_eq!((ready.status, &ready.json()["reasons"]), (503, &serde_json::json!(["draining"])));
    let status = rig.call("GET", "/admin/status", "").await.json();
    assert_eq!(status["drain"], serde_json::json!({"deadline": 9, "remaining": 3}));
}

// The public listener

fn public_server(rig: &Rig, origins: &[&str], has_demo: bool) -> public::Server {
    let demo: Arc<dyn Access> = rig.access.clone();
    let config = public::Config {
        ws_path: "/socket".into(),
        allowed_origins: origins.iter().map(|origin| (*origin).to_owned()).collect(),
        max_frame_bytes: 1024,
        demo_tokens: has_demo.then_some(demo),
        place: public::Place {
            node_id: "n1".into(),
            advertised_ws: None,
            advertised_tcp: Some("tcp://a.example:81".into()),
            ws: "0.0.0.0:80".parse().unwrap(),
            tcp: Some("127.0.0.1:81".parse().unwrap()),
            tls: false,
        },
    };
    let verifier = Arc::new(Verifier::with_secret(SECRET));
    public::Server::new(config, rig.requests.clone(), verifier, tokio::runtime::Handle::current())
}

const SECRET: &[u8] = b"0123456789abcdef0123456789abcdef";

/// Requests that are refused by their head, their bodies coming after it: each is answered, on one connection.
async fn refused_by_the_head(mut stream: tokio::net::TcpStream, path: &str) {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let body = "x".repeat(100_000);
    for _ in 0..3 {
        let head =
            format!("POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n", body.len());
        stream.write_all(head.as_bytes()).await.unwrap();
        stream.write_all(body.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        while !answer.ends_with(b"}") {
            assert_ne!(stream.read_buf(&mut answer).await.unwrap(), 0, "the connection ended");
        }
        assert!(answer.starts_with(b"HTTP/1.1 401 "), "{}", String::from_utf8_lossy(&answer));
    }
}

#[tokio::test]
async fn who_is_refused_before_the_body_was_read_sees_the_refusal() {
    let rig = Rig::start().await;
    refused_by_the_head(tokio::net::TcpStream::connect(rig.api).await.unwrap(), "/api/v1/messages").await;
    let server = public_server(&rig, &[], false);
    refused_by_the_head(connect(&server).await, "/v1/messages").await;
}

/// A connection of which `server` serves the other end.
async fn connect(server: &public::Server) -> tokio::net::TcpStream {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    server.serve(listener.accept().unwrap().0, Bytes::new());
    client.set_nonblocking(true).unwrap();
    tokio::net::TcpStream::from_std(client).unwrap()
}

async fn ask(
    server: &public::Server,
    method: &str,
    path: &str,
    body: &str,
    headers: Headers<'_>,
) -> Answered {
    exchange(connect(server).await, method, path, body, headers).await
}

#[tokio::test]
async fn the_demo_page_is_served_with_its_parts() {
    let rig = Rig::start().await;
    let server = public_server(&rig, &[], true);
    let page = ask(&server, "GET", "/", "", &[]).await;
    assert!(page.status == 200 && page.text.contains("data-ws-path=\"/socket\""), "{}", page.text);
    assert_eq!(page.headers[header::CONTENT_TYPE], "text/html; charset=utf-8");
    assert!(page.headers.contains_key(header::CONTENT_SECURITY_POLICY));
    for part in ["/demo/demo.js", "/demo/demo.css"] {
        assert!(page.text.contains(part));
        assert_eq!(ask(&server, "GET", part, "", &[]).await.status, 200, "{part}");
    }
    for (method, path, status) in [("GET", "/demo/x", 404), ("GET", "/x", 404), ("DELETE", "/", 405)] {
        let answered = ask(&server, method, path, "", &[]).await;
        assert!(answered.status == status && answered.json()["code"].is_string(), "{path}");
    }
}

#[tokio::test]
async fn the_paths_that_are_served_are_known() {
    let rig = Rig::start().await;
    let server = public_server(&rig, &[], true);
    // A path that is there takes no DELETE; one that is not is 404.
    for path in ["/", "/demo/token", "/demo/demo.js", "/demo/x", "/v1/messages", "/v1/place"] {
        let is_there = ask(&server, "DELETE", path, "", &[]).await.status == 405;
        assert!(is_there && public::serves(path), "{path}");
    }
    assert!(!public::serves("/socket"));
    for path in ["/ws", "/demo", "/demo/", "/demo/a/b", "/v1", "/v1/place/x", "/v1/ws"] {
        let is_there = ask(&server, "DELETE", path, "", &[]).await.status != 404;
        assert!(!is_there && !public::serves(path), "{path}");
    }
}

#[tokio::test]
async fn demo_tokens_are_for_this_machine_and_its_own_page() {
    let rig = Rig::start().await;
    let server = public_server(&rig, &[], true);
    let body = r#"{"user":"alice"}"#;
    let rows: [(&str, Headers<'_>, u16); 6] = [
        (body, &[("host", "localhost:8080")], 200),
        (body, &[("host", "127.0.0.1:8080"), ("origin", "http://127.0.0.1:8080")], 200),
        (body, &[("host", "127.0.0.1:8080"), ("origin", "https://evil.example")], 403),
        (body, &[("host", "evil.example")], 403),
        (r#"{"user":"a:b"}"#, &[], 400),
        ("", &[], 400),
    ];
    for (body, headers, status) in rows {
        let answered = ask(&server, "POST", "/demo/token", body, headers).await;
        assert_eq!(answered.status, status, "{body} {headers:?}: {}", answered.text);
        assert!(!answered.headers.contains_key(header::ACCESS_CONTROL_ALLOW_ORIGIN));
        if status == 200 {
            assert_eq!(answered.json()["token"], "token-of-alice");
        }
    }
    let server = public_server(&rig, &[], false);
    let answered = ask(&server, "POST", "/demo/token", body, &[]).await;
    assert!(answered.status == 404 && answered.text.contains("bowline token"), "{}", answered.text);
}

#[tokio::test]
async fn other_sites_may_ask_when_they_are_allowed_origins() {
    let rig = Rig::start().await;
    let (any, some) = (public_server(&rig, &[], false), public_server(&rig, &["https://a.example"], false));
    let rows = [
        (&any, "https://x.example", 204, Some("*")),
        (&some, "https://a.example", 204, Some("https://a.example")),
        (&some, "https://x.example", 403, None),
    ];
    for (server, origin, status, allowed) in rows {
        let headers = [("origin", origin), ("access-control-request-method", "POST")];
        let answered = ask(server, "OPTIONS", "/v1/messages", "", &headers).await;
        let told =
            answered.headers.get(header::ACCESS_CONTROL_ALLOW_ORIGIN).map(|value| value.to_str().unwrap());
        assert_eq!((answered.status, told), (status, allowed), "{origin}");
        let answered = ask(server, "POST", "/v1/messages", "", &[("origin", origin)]).await;
        let told =
            answered.headers.get(header::ACCESS_CONTROL_ALLOW_ORIGIN).map(|value| value.to_str().unwrap());
        assert_eq!((answered.status, told), (if allowed.is_some() { 401 } else { 403 }, allowed), "{origin}");
    }
}

#[tokio::test]
async fn bytes_that_were_read_before_are_part_of_the_request() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let rig = Rig::start().await;
    let server = public_server(&rig, &[], true);
    let text = "GET /demo/demo.css HTTP/1.1\r\nhost: localhost\r\n\r\nGET /x HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
    for split in [1, 10, 50, text.len()] {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (head, rest) = text.split_at(split);
        server.serve(listener.accept().unwrap().0, Bytes::copy_from_slice(head.as_bytes()));
        client.set_nonblocking(true).unwrap();
        let mut client = tokio::net::TcpStream::from_std(client).unwrap();
        client.write_all(rest.as_bytes()).await.unwrap();
        let mut got = String::new();
        client.read_to_string(&mut got).await.unwrap();
        assert!(got.starts_with("HTTP/1.1 200") && got.contains("HTTP/1.1 404"), "split at {split}: {got}");
    }
}

#[tokio::test]
async fn http_2_is_spoken_when_the_client_begins_with_it() {
    let rig = Rig::start().await;
    let server = public_server(&rig, &[], true);
    let io = TokioIo::new(connect(&server).await);
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), io).await.unwrap();
    tokio::spawn(connection);
    for (method, path, status) in [
        (Method::GET, "/", 200),
        (Method::POST, "/demo/token", 200),
        (Method::GET, "/socket", 426),
        (Method::POST, "/socket?token=x", 426),
    ] {
        let body = if method == Method::POST { r#"{"user":"bob"}"# } else { "" };
        let request = hyper::Request::builder()
            .method(method)
            .uri(format!("http://localhost{path}"))
            .body(Full::new(Bytes::from_static(body.as_bytes())))
            .unwrap();
        let response = sender.send_request(request).await.unwrap();
        assert_eq!(response.status(), StatusCode::from_u16(status).unwrap(), "{path}");
    }
}

#[tokio::test]
async fn a_client_with_a_token_is_told_its_place() {
    let rig = Rig::start().await;
    let server = public_server(&rig, &[], false);
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_millis() as u64;
    let mut claims = bowline_auth::Claims::new(UserId::trusted("alice"), now, 60_000);
    claims.device = Some(DeviceId::trusted("phone"));
    let bearer = format!("Bearer {}", bowline_auth::mint(SECRET, &claims));
    let good: Headers<'_> = &[("authorization", &bearer)];
    let answered = ask(&server, "GET", "/v1/place", "", good).await;
    assert_eq!(
        answered.text,
        r#"{"ws":"ws://127.0.0.1:80/socket","tcp":"tcp://a.example:81","node_id":"n1"}"#
    );
    let rows: [(&str, Headers<'_>, u16); 6] = [
        ("/v1/place?device_id=phone&device_class=ios", good, 200),
        ("/v1/place?device_id=tablet", good, 403),
        ("/v1/place?device_id=a:b", good, 400),
        ("/v1/place?device_class=toaster", good, 400),
        ("/v1/place?token=x", good, 400),
        ("/v1/place", &[], 401),
    ];
    for (path, headers, status) in rows {
        let answered = ask(&server, "GET", path, "", headers).await;
        assert_eq!(answered.status, status, "{path}: {}", answered.text);
        assert!(status == 200 || answered.json()["code"].is_string(), "{path}: {}", answered.text);
    }
}

#[tokio::test]
async fn a_message_is_sent_by_whom_the_token_speaks_for() {
    let rig = Rig::start().await;
    let server = public_server(&rig, &[], false);
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_millis() as u64;
    let token = |user, issued_at| {
        bowline_auth::mint(SECRET, &bowline_auth::Claims::new(UserId::trusted(user), issued_at, 60_000))
    };
    let good = format!("Bearer {}", token("alice", now));
    let old = format!("Bearer {}", token("alice", now - 200_000));
    let query = format!("/v1/messages?token={}", token("alice", now));
    let message = r#"{"id":"m","to":"bob","body":1}"#;
    let rows: [(&str, &str, Headers<'_>, u16, &str); 11] = [
        ("/v1/messages", message, &[("authorization", &good)], 200, "msg.ack"),
        (&query, message, &[], 200, "msg.ack"),
        (
            "/v1/messages",
            r#"{"id":"m","from":"alice","to":"bob","body":1}"#,
            &[("authorization", &good)],
            200,
            "msg.ack",
        ),
        (
            "/v1/messages",
            r#"{"id":"m","from":"eve","to":"bob","body":1}"#,
            &[("authorization", &good)],
            403,
            "identity_mismatch",
        ),
        ("/v1/messages", message, &[], 401, "unauthenticated"),
        ("/v1/messages", message, &[("authorization", "Bearer nonsense")], 401, "unauthenticated"),
        ("/v1/messages", message, &[("authorization", &old)], 401, "unauthenticated"),
        (&query, message, &[("authorization", &good)], 400, "malformed"),
        ("/v1/messages", "{}", &[("authorization", &good)], 400, "malformed"),
        (
            "/v1/messages",
            r#"{"id":"conflict","to":"bob","body":1}"#,
            &[("authorization", &good)],
            409,
            "conflict",
        ),
        (
            "/v1/messages",
            r#"{"id":"rate_limited","to":"bob","body":1}"#,
            &[("authorization", &good)],
            429,
            "rate_limited",
        ),
    ];
    for (path, body, headers, status, kind) in rows {
        let answered = ask(&server, "POST", path, body, headers).await;
        let json = answered.json();
        let found = json.get("type").or(json.get("code"));
        assert_eq!((answered.status, found), (status, Some(&kind.into())), "{path} {body} {headers:?}");
    }
    let answered = ask(&server, "POST", &query, message, &[]).await;
    assert_eq!(
        answered.text,
        r#"{"type":"msg.ack","id":"m","conversation_id":"d:alice:bob","seq":7,"ts":1000}"#
    );
}

#[tokio::test]
async fn a_web_socket_on_a_kept_connection_goes_back_to_the_gateway() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let rig = Rig::start().await;
    let server = public_server(&rig, &[], true);
    let (sender, receiver) = std::sync::mpsc::channel();
    server.hand_back(move |stream, read| sender.send((stream.socket, read)).unwrap());
    let upgrade = "GET /ws?token=x HTTP/1.1\r\nhost: a\r\nconnection: Upgrade\r\nupgrade: WebSocket\r\n\r\n";
    let mut client = connect(&server).await;
    // The first request was seen by a shard: whatever it says, it is answered here.
    client.write_all(upgrade.as_bytes()).await.unwrap();
    let mut got = vec![0; 4096];
    let count = client.read(&mut got).await.unwrap();
    assert!(got[..count].starts_with(b"HTTP/1.1 404"));
    client.write_all(format!("{upgrade}and what follows").as_bytes()).await.unwrap();
    let (mut stream, read) =
        tokio::task::spawn_blocking(move || receiver.recv_timeout(Duration::from_secs(5)))
            .await
            .unwrap()
            .unwrap();
    stream.set_nonblocking(false).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    let mut text = read.to_vec();
    while !text.ends_with(b"and what follows") {
        let mut more = [0; 100];
        let count = std::io::Read::read(&mut stream, &mut more).unwrap();
        assert!(count > 0);
        text.extend_from_slice(&more[..count]);
    }
    assert_eq!(String::from_utf8(text).unwrap(), format!("{upgrade}and what follows"));
    std::io::Write::write_all(&mut stream, b"hello").unwrap();
    let count = client.read(&mut got).await.unwrap();
    assert_eq!(&got[..count], b"hello");
}

#[tokio::test]
async fn messages_of_rooms_are_published_as_a_whole() {
    let rig = Rig::start().await;
    let answer =
        rig.call("POST", "/api/v1/rooms/a%20b%2Fc/messages", r#"{"from":"alice","body":{"x" : 1}}"#).await;
    assert_eq!((answer.status, answer.text.as_str()), (202, r#"{"offset":41}"#));
    let answer = rig.call("POST", "/api/v1/rooms/r/messages", r#"[{"body":1},{"body":2},{"body":3}]"#).await;
    assert_eq!((answer.status, answer.text.as_str()), (202, r#"{"offset":43}"#));
    let seen = rig.rooms.seen.lock().unwrap();
    let json = |text: &'static str| Body::Json(Bytes::from_static(text.as_bytes()));
    let alice = RoomMessage { from: Some(UserId::trusted("alice")), body: json(r#"{"x" : 1}"#) };
    assert_eq!(seen[0], ("a b/c".to_owned(), vec![alice]));
    let bodies: Vec<&Body> = seen[1].1.iter().map(|message| &message.body).collect();
    assert_eq!(bodies, [&json("1"), &json("2"), &json("3")]);
}
