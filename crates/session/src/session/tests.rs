use super::*;
use bowline_protocol::link::SameDevice;

struct Rig {
    rules: Rules,
    now: Now,
    session: Session,
}

fn rules() -> Rules {
    Rules {
        node_id: "n1".into(),
        ping_after_ms: 45_000,
        ping_jitter_ms: 5_000,
        close_after_ms: 90_000,
        backpressure_high: 4,
        backpressure_timeout_ms: 30_000,
        outbound_limit_bytes: 1000,
        max_frame_bytes: 32_768,
        frames_per_second: 0,
        same_device: SameDevice::Replace,
        room_join: RoomJoin::Any,
    }
}

fn grant(user: &str) -> Grant {
    Grant {
        user: UserId::trusted(user),
        device: None,
        class: None,
        expires_at: 10_000_000,
        issued_at: 1,
        token_id: None,
        session_id: None,
        rooms: None,
    }
}

const FRESH: Fresh = Fresh { login: 77, session: 0xabc };

impl Rig {
    fn with(rules: Rules) -> Self {
        let now = Now { mono_ms: 1_000, wall_ms: 1_000_000 };
        Self { session: Session::new(&rules, now, 3), rules, now }
    }

    fn run(&mut self, step: impl FnOnce(&mut Session, &Context<'_>, &mut Out)) -> Vec<Action> {
        let mut out = Vec::new();
        let cx = Context { rules: &self.rules, now: self.now, connection: 5 };
        step(&mut self.session, &cx, &mut out);
        out
    }

    fn text(&mut self, text: &str) -> Vec<Action> {
        self.run(|s, cx, out| s.on_text(cx, text.as_bytes(), out))
    }

    fn verdict(&mut self, verdict: Result<Grant, Denial>) -> Vec<Action> {
        self.run(|s, cx, out| s.on_verdict(cx, false, verdict, FRESH, out))
    }

    /// A session that is open as alice.
    fn open(rules: Rules) -> Self {
        let mut rig = Self::with(rules);
        rig.text(r#"{"type":"connect","token":"t","device_id":"phone"}"#);
        rig.verdict(Ok(grant("alice")));
        assert_eq!(rig.session.take_turn(77, 1), Turn::Take);
        rig.run(|s, cx, out| s.on_accepted(cx, false, out));
        assert_eq!(rig.session.state(), State::Reading);
        rig
    }

    /// Goes to where the deadline is, and fires it.
    fn pass(&mut self) -> Vec<Action> {
        let to = self.session.deadline_ms(&self.rules, self.now);
        self.now.wall_ms += to.saturating_sub(self.now.mono_ms);
        self.now.mono_ms = to.max(self.now.mono_ms);
        self.run(|s, cx, out| s.on_timer(cx, out))
    }
}

/// The actions in short: what is sent, told and done.
fn short(actions: &[Action]) -> Vec<String> {
    actions
        .iter()
        .map(|action| match action {
            Action::Send(frame) => {
                let json = String::from_utf8_lossy(&frame.json).into_owned();
                match serde_json_type(&json) {
                    Some(kind) => kind,
                    None => json,
                }
            }
            Action::Up(Up::Frame(frame)) => format!("up {}", frame.name()),
            Action::Up(Up::Open(open)) => format!("open {}/{}", open.user, open.device),
            Action::Up(Up::Closed(code)) => format!("up closed {}", code.reason()),
            Action::Up(Up::Congested) => "congested".into(),
            Action::Up(Up::Flowing) => "flowing".into(),
            Action::Up(_) => "up ?".into(),
            Action::Close { code, reason, retry_after_ms, refusal } => format!(
                "close {} {}{}{}",
                code.code(),
                reason.as_deref().unwrap_or(code.reason()),
                retry_after_ms.map_or(String::new(), |ms| format!(" after {ms}")),
                refusal.as_ref().map_or(String::new(), |r| format!(" ({})", r.status)),
            ),
            Action::Ended { code, open } => format!("ended {} {open}", code.reason()),
            Action::Verify { token, refresh, .. } => format!("verify {token} {refresh}"),
            Action::Failed { code, .. } => format!("failed {}", code.as_str()),
            Action::Room(request) => format!("{} {}", request.name(), request.id()),
            Action::Mismatch { claimed } => format!("mismatch {claimed}"),
            other => format!("{other:?}").to_lowercase(),
        })
        .collect()
}

/// `type`, and `code` or `id` where there are.
fn serde_json_type(json: &str) -> Option<String> {
    let field = |name: &str| {
        let start = json.find(&format!("\"{name}\":\""))? + name.len() + 4;
        Some(json[start..].split('"').next().unwrap_or_default().to_owned())
    };
    let mut text = field("type")?;
    for name in ["code", "id", "data", "session_id"] {
        if let Some(value) = field(name) {
            text = format!("{text} {value}");
        }
    }
    Some(text)
}

fn send(id: &str) -> String {
    format!(r#"{{"type":"msg.send","id":"{id}","to":"bob","body":1}}"#)
}

#[test]
fn a_connection_opens_in_four_steps() {
    let mut rig = Rig::with(rules());
    assert_eq!((rig.session.user(), rig.session.login(), rig.session.issued_at()), (None, 0, 0));
    assert_eq!(short(&rig.text("ping")), ["pong"]);
    assert_eq!(short(&rig.text(r#"{"type":"ping","data":"x"}"#)), ["pong x"]);
    assert_eq!(short(&rig.text(r#"{"type":"connect","token":"t"}"#)), ["verify t false"]);
    assert!(!rig.session.state().reads_frames());
    let random = FRESH.login;
    assert_eq!(short(&rig.verdict(Ok(grant("alice")))), [format!("open alice/{random:016x}")]);
    let who =
        |s: &Session| (s.user().map(ToString::to_string), s.device().is_some(), s.login(), s.issued_at());
    assert_eq!(who(&rig.session), (Some("alice".into()), true, 77, 1));
    assert_eq!(rig.session.take_turn(77, 1), Turn::Take);
    let greeted = rig.run(|s, cx, out| s.on_accepted(cx, false, out));
    assert_eq!(short(&greeted), ["opened", "connected 00000000000000000000000000000abc"]);
    assert_eq!(short(&rig.text(&send("1"))), ["up msg.send"]);
    assert_eq!(
        short(&rig.text(r#"{"type":"connect","token":"t"}"#)),
        ["failed identity_mismatch", "error identity_mismatch"]
    );
}

#[test]
fn before_there_is_an_identity_nothing_else_may_come() {
    for text in [r#"{"type":"history"}"#, r#"{"type":"pong"}"#, "nonsense", "", r#"{"type":"connect"}"#] {
        let mut rig = Rig::with(rules());
        assert_eq!(
            short(&rig.text(text)),
            [
                "failed unauthenticated",
                "error unauthenticated",
                "ended unauthenticated false",
                "close 4502 unauthenticated"
            ],
            "{text}"
        );
        assert_eq!(short(&rig.text(text)), [""; 0], "nothing is heard after the end");
    }
}

#[test]
fn refusals_while_opening() {
    let bound = |device: &str| Ok(Grant { device: Some(DeviceId::trusted(device)), ..grant("a") });
    let class = |class| Ok(Grant { class: Some(class), ..grant("a") });
    use bowline_protocol::ids::DeviceClass::{Ios, Web};
    let rows: [(Result<Grant, Denial>, Option<&str>); 7] = [
        (Err(Denial::Token("bad".into())), Some("close 4502 unauthenticated (401)")),
        (Err(Denial::NoSubject("none".into())), Some("close 4502 unauthenticated (400)")),
        (Err(Denial::Unavailable("later".into())), Some("close 1013 overloaded after 1000 (503)")),
        (bound("other"), Some("close 4505 policy (403)")),
        (class(Ios), Some("close 4505 policy (403)")),
        (bound("phone"), None),
        (class(Web), None),
    ];
    for (verdict, expected) in rows {
        let mut rig = Rig::with(rules());
        rig.text(r#"{"type":"connect","token":"t","device_id":"phone","device_class":"web"}"#);
        let actions = short(&rig.verdict(verdict.clone()));
        match expected {
            Some(close) => assert_eq!(actions.last().map(String::as_str), Some(close), "{verdict:?}"),
            None => assert_eq!(actions, ["open a/phone"], "{verdict:?}"),
        }
    }
    let mut rig = Rig::with(rules());
    let version = rig.text(r#"{"type":"connect","token":"t","version":2}"#);
    assert_eq!(short(&version), ["ended version false", "close 4507 version: this server speaks 1"]);

    for (code, told) in [
        (CloseCode::DeviceInUse, ["ended device-in-use false", "close 4506 device-in-use (409)"]),
        (CloseCode::Replaced, ["ended replaced false", "close 4501 replaced (409)"]),
        (CloseCode::Overloaded, ["ended overloaded false", "close 1013 overloaded after 1000 (503)"]),
    ] {
        let mut rig = Rig::with(rules());
        rig.text(r#"{"type":"connect","token":"t"}"#);
        rig.verdict(Ok(grant("a")));
        let refused = rig.run(|s, cx, out| s.on_refused(cx, code, out));
        assert_eq!(short(&refused), told);
    }
}

#[test]
fn connect_completes_what_the_query_said() {
    let mut rig = Rig::with(rules());
    rig.session.on_query(Hello {
        device: Some(DeviceId::trusted("query")),
        channel: Some("app".into()),
        ..Hello::default()
    });
    rig.text(r#"{"type":"connect","token":"t","device_id":"frame"}"#);
    let actions = rig.verdict(Ok(grant("a")));
    let [Action::Up(Up::Open(open))] = &actions[..] else { panic!("{actions:?}") };
    assert_eq!((open.device.as_str(), open.channel.as_deref()), ("frame", Some("app")));
}

#[test]
fn time_without_identity_is_bounded() {
    let mut rig = Rig::with(rules());
    assert_eq!(rig.session.deadline_ms(&rig.rules, rig.now), 11_000);
    assert_eq!(short(&rig.pass()), ["ended connect-timeout false", "close 4003 connect-timeout"]);

    let mut rig = Rig::with(rules());
    rig.text(r#"{"type":"connect","token":"t"}"#);
    let late = ["ended overloaded false", "close 1013 overloaded after 1000 (503)"];
    assert_eq!(short(&rig.pass()), late);
    assert_eq!(short(&rig.verdict(Ok(grant("a")))), [""; 0], "a late verdict changes nothing");

    let mut rig = Rig::with(rules());
    rig.text(r#"{"type":"connect","token":"t"}"#);
    rig.verdict(Ok(grant("a")));
    assert_eq!(short(&rig.pass()), ["up closed overloaded", late[0], late[1]]);
    assert_eq!(rig.session.take_turn(77, 1), Turn::NotHere);
}

#[test]
fn silence_is_pinged_and_then_closed() {
    let mut rig = Rig::open(rules());
    let opened = rig.now.mono_ms;
    assert_eq!(short(&rig.pass()), ["ping"]);
    assert_eq!(rig.now.mono_ms, opened + 45_003);
    rig.run(|s, cx, out| s.on_bytes(cx, out));
    assert_eq!(rig.session.state(), State::Reading);
    let heard = rig.now.mono_ms;
    assert_eq!(short(&rig.pass()), ["ping"]);
    assert_eq!(
        short(&rig.pass()),
        ["up closed heartbeat-timeout", "ended heartbeat-timeout true", "close 1001 heartbeat-timeout"]
    );
    assert_eq!(rig.now.mono_ms, heard + 90_000);
    assert_eq!(short(&rig.pass()), ["drop"]);
    assert_eq!(rig.now.mono_ms, heard + 95_000);
}

/// Both count from the last byte, neither from the other.
#[test]
fn a_close_that_is_due_before_the_ping_does_not_wait_for_it() {
    // The jitter of this connection is 3 ms.
    for (ping_after_ms, close_after_ms) in [(5_000, 1_000), (45_000, 45_002), (45_000, 45_003)] {
        let mut rig = Rig::open(Rules { ping_after_ms, close_after_ms, ..rules() });
        let heard = rig.now.mono_ms;
        let closed = short(&rig.pass());
        assert_eq!(closed.last().map(String::as_str), Some("close 1001 heartbeat-timeout"), "{closed:?}");
        assert_eq!(rig.now.mono_ms, heard + close_after_ms);
    }
    let mut rig = Rig::open(Rules { ping_after_ms: 45_000, close_after_ms: 45_004, ..rules() });
    assert_eq!(short(&rig.pass()), ["ping"]);
    // Whoever looks at its clock too late pings all the same: what was sent meanwhile may not be read yet.
    let mut rig = Rig::open(rules());
    rig.now.mono_ms += 200_000;
    assert_eq!(short(&rig.pass()), ["ping"]);
}

#[test]
fn undecided_frames_pause_above_the_mark_and_resume_below_half() {
    let mut rig = Rig::open(rules());
    for id in 1..=4 {
        assert_eq!(short(&rig.text(&send(&id.to_string()))), ["up msg.send"]);
    }
    assert_eq!(short(&rig.text(r#"{"type":"ping"}"#)), ["pong"], "pings never count");
    assert_eq!(short(&rig.text(&send("5"))), ["up msg.send", "paused"]);
    assert_eq!(short(&rig.text(&send("6"))), ["up msg.send"], "what is decoded is never dropped");
    assert_eq!(short(&rig.run(|s, cx, out| s.on_decided(cx, 4, out))), [""; 0], "2 is not below half of 4");
    assert_eq!(short(&rig.run(|s, cx, out| s.on_decided(cx, 1, out))), ["resumed"]);
    assert_eq!(rig.session.state(), State::Reading);
}

#[test]
fn while_paused_there_is_a_watchdog_and_no_heartbeat() {
    let mut rig = Rig::open(rules());
    rig.now.mono_ms += 40_000;
    for id in 0..5 {
        rig.text(&send(&id.to_string()));
    }
    let paused = rig.now.mono_ms;
    assert_eq!(
        short(&rig.pass()),
        [
            "resumed",
            "up closed backpressure-timeout",
            "ended backpressure-timeout true",
            "close 1013 backpressure-timeout"
        ]
    );
    assert_eq!(rig.now.mono_ms, paused + 30_000);

    let mut rig = Rig::open(rules());
    for id in 0..5 {
        rig.text(&send(&id.to_string()));
    }
    rig.now.mono_ms += 29_000;
    rig.run(|s, cx, out| s.on_decided(cx, 5, out));
    assert_eq!(rig.session.deadline_ms(&rig.rules, rig.now), rig.now.mono_ms + 45_003);
}

#[test]
fn answers_pause_reading_and_only_pushes_make_a_slow_consumer() {
    let mut rig = Rig::open(rules());
    let queue = |rig: &mut Rig, bytes, push| short(&rig.run(|s, cx, out| s.on_queue(cx, bytes, push, out)));
    assert_eq!(queue(&mut rig, 500, 0), [""; 0]);
    assert_eq!(queue(&mut rig, 501, 0), ["paused"]);
    assert_eq!(queue(&mut rig, 50_000, 0), [""; 0]);
    assert_eq!(queue(&mut rig, 251, 0), [""; 0]);
    assert_eq!(queue(&mut rig, 250, 0), ["resumed"]);
    assert_eq!(queue(&mut rig, 1000, 1000), ["congested", "paused"]);
    assert_eq!(short(&rig.run(|s, cx, out| s.on_flushed(cx, out))), ["flowing", "resumed"]);
    assert_eq!(
        queue(&mut rig, 1001, 1001),
        ["cutqueue", "up closed slow-consumer", "ended slow-consumer true", "close 4002 slow-consumer"]
    );
    let closed = rig.now.mono_ms;
    assert_eq!(short(&rig.pass()), ["drop"]);
    assert_eq!(rig.now.mono_ms, closed + 30_000);
}

#[test]
fn ten_unparsable_texts_in_a_row_are_a_policy_violation() {
    let mut rig = Rig::open(rules());
    for _ in 0..9 {
        assert_eq!(short(&rig.text("{")), ["failed malformed", "error malformed"]);
    }
    assert_eq!(short(&rig.text(r#"{"type":"x","id":"9"}"#)), ["failed unknown_type", "error unknown_type 9"]);
    for _ in 0..9 {
        assert_eq!(short(&rig.text("[]")).len(), 2);
    }
    assert_eq!(
        short(&rig.text("")),
        ["failed malformed", "error malformed", "up closed policy", "ended policy true", "close 4505 policy"]
    );
}

#[test]
fn from_must_be_the_bound_user() {
    let mut rig = Rig::open(rules());
    let forged = r#"{"type":"msg.send","id":"1","to":"bob","body":1,"from":"bob"}"#;
    assert_eq!(
        short(&rig.text(forged)),
        ["mismatch bob", "failed identity_mismatch", "error identity_mismatch 1"]
    );
    assert_eq!(short(&rig.text(&forged.replace(r#""from":"bob""#, r#""from":"alice""#))), ["up msg.send"]);
}

#[test]
fn a_token_runs_out_or_is_refreshed() {
    let mut rig = Rig::open(rules());
    for _ in 0..200 {
        rig.run(|s, cx, out| s.on_bytes(cx, out));
        let actions = short(&rig.pass());
        if actions != ["ping"] {
            assert_eq!(actions, ["auth.expiring"]);
            break;
        }
    }
    assert_eq!(rig.now.wall_ms, 10_000_000 - 60_000);
    let refresh = r#"{"type":"auth.refresh","id":"r","token":"u"}"#;
    assert_eq!(short(&rig.text(refresh)), ["verify u true"]);
    assert_eq!(short(&rig.text(refresh)), ["failed rate_limited", "error rate_limited r"]);
    let verdict =
        |rig: &mut Rig, verdict| short(&rig.run(|s, cx, out| s.on_verdict(cx, true, verdict, FRESH, out)));
    let other = Grant { device: Some(DeviceId::trusted("x")), ..grant("alice") };
    for (bad, code) in [
        (Ok(grant("bob")), "identity_mismatch"),
        (Ok(other), "identity_mismatch"),
        (Err(Denial::Token("bad".into())), "unauthenticated"),
        (Err(Denial::Unavailable("later".into())), "unavailable"),
    ] {
        assert_eq!(verdict(&mut rig, bad), [format!("failed {code}"), format!("error {code} r")]);
        rig.text(refresh);
    }
    let longer = Grant { expires_at: rig.now.wall_ms + 61_000, ..grant("alice") };
    assert_eq!(verdict(&mut rig, Ok(longer)), ["ok r"]);
    assert_eq!(rig.session.deadline_ms(&rig.rules, rig.now), rig.now.mono_ms + 1_000);
    assert_eq!(short(&rig.pass()), ["auth.expiring"]);
    rig.run(|s, cx, out| s.on_bytes(cx, out));
    let mut actions = short(&rig.pass());
    while actions == ["ping"] {
        rig.run(|s, cx, out| s.on_bytes(cx, out));
        actions = short(&rig.pass());
    }
    assert_eq!(actions, ["up closed token-expired", "ended token-expired true", "close 4001 token-expired"]);
}

#[test]
fn events_of_the_router_are_taken_in_order() {
    let mut rig = Rig::open(rules());
    let rows = [
        (77, 1, Turn::Had),
        (77, 3, Turn::Early),
        (77, 0, Turn::Take),
        (78, 2, Turn::NotHere),
        (77, 2, Turn::Take),
        (77, 2, Turn::Had),
        (77, 3, Turn::Take),
    ];
    assert_eq!(rig.session.next_no(), 2);
    for (login, no, expected) in rows {
        assert_eq!(rig.session.take_turn(login, no), expected, "{login} {no}");
    }
    assert_eq!(rig.session.next_no(), 4);
    rig.run(|s, cx, out| s.close(cx, CloseCode::Kicked, None, None, out));
    assert_eq!(rig.session.take_turn(77, 4), Turn::NotHere);
}

#[test]
fn a_session_that_was_held_keeps_its_id() {
    for (resumed, expected) in [(true, 0xfeed_u128), (false, 0xabc)] {
        let mut rig = Rig::with(rules());
        rig.text(&format!(r#"{{"type":"connect","token":"t","resume":"{:032x}"}}"#, 0xfeed));
        rig.verdict(Ok(grant("a")));
        let actions = rig.run(|s, cx, out| s.on_accepted(cx, resumed, out));
        assert_eq!(short(&actions)[1], format!("connected {expected:032x}"));
    }
}

const RECV: &str = r#"{"type":"msg.recv","conversation_id":"g:x","seq":1}"#;

#[test]
fn whatever_comes_above_the_rate_is_answered_and_the_heartbeat_and_positions_go_on() {
    let rows = [
        (send("3"), vec!["failed rate_limited", "error rate_limited 3"]),
        (r#"{"type":"nonsense","id":"3"}"#.into(), vec!["failed rate_limited", "error rate_limited 3"]),
        (r#"{"type":"history","id":"3"}"#.into(), vec!["failed rate_limited", "error rate_limited 3"]),
        ("no JSON".into(), vec!["failed rate_limited", "error rate_limited"]),
        (r#"{"type":"connect","token":"t"}"#.into(), vec!["failed rate_limited", "error rate_limited"]),
        (
            r#"{"type":"auth.refresh","id":"3","token":"t"}"#.into(),
            vec!["failed rate_limited", "error rate_limited 3"],
        ),
        (join("3", "lobby"), vec!["failed rate_limited", "error rate_limited 3"]),
        (RECV.into(), vec!["up msg.recv"]),
        (RECV.replace("recv", "read"), vec!["up msg.read"]),
        (r#"{"type":"ping","data":"x"}"#.into(), vec!["pong x"]),
        ("ping".into(), vec!["pong"]),
        (r#"{"type":"pong"}"#.into(), vec![]),
    ];
    for (text, expected) in rows {
        let mut rig = Rig::open(Rules { frames_per_second: 2, backpressure_high: 99, ..rules() });
        for _ in 0..2 {
            assert_eq!(short(&rig.text(&send("1"))), ["up msg.send"]);
        }
        assert_eq!(short(&rig.text(&text)), expected, "{text}");
        rig.now.mono_ms += 500;
        assert_eq!(short(&rig.text(&send("3"))), ["up msg.send"]);
    }
}

#[test]
fn every_frame_counts_towards_the_rate() {
    let pong = r#"{"type":"pong"}"#;
    let ping = r#"{"type":"ping","data":"\u0041"}"#;
    for text in ["ping", r#"{"type":"ping"}"#, ping, pong, RECV, "no JSON", r#"{"type":"nonsense"}"#] {
        let mut rig = Rig::open(Rules { frames_per_second: 2, backpressure_high: 99, ..rules() });
        rig.text(text);
        rig.text(text);
        assert_eq!(short(&rig.text(&send("3"))), ["failed rate_limited", "error rate_limited 3"], "{text}");
        // What is never refused runs up no debt either.
        for _ in 0..5 {
            rig.text(pong);
        }
        rig.now.mono_ms += 500;
        assert_eq!(short(&rig.text(&send("3"))), ["up msg.send"], "{text}");
    }
    // Ten in a row that cannot be parsed are too many, answered in whatever way.
    let mut rig = Rig::open(Rules { frames_per_second: 1, ..rules() });
    let last = (0..10).map(|_| short(&rig.text("no JSON"))).last().unwrap();
    assert_eq!(last.last().map(String::as_str), Some("close 4505 policy"), "{last:?}");
}

#[test]
fn a_refusal_is_counted_by_the_reason_that_is_told() {
    let mut rig = Rig::with(rules());
    rig.text(r#"{"type":"connect","token":"t"}"#);
    let told_as = Some(CloseCode::Draining);
    let refusal = Refusal { told_as, ..Refusal::overloaded() };
    let refused = rig.run(|s, cx, out| s.refuse(cx, refusal, out));
    assert_eq!(short(&refused), ["ended draining false", "close 1013 draining after 1000 (503)"]);
}

#[test]
fn whatever_ends_a_connection_ends_it_once() {
    let ends: [fn(&mut Session, &Context<'_>, &mut Out); 4] = [
        |s, cx, out| s.on_peer_closed(cx, out),
        |s, cx, out| s.on_peer_gone(cx, out),
        |s, cx, out| s.close(cx, CloseCode::Kicked, None, None, out),
        |s, cx, out| s.on_queue(cx, 5000, 5000, out),
    ];
    for first in 0..ends.len() {
        for second in 0..ends.len() {
            let mut rig = Rig::open(rules());
            let mut actions = rig.run(ends[first]);
            actions.extend(rig.run(ends[second]));
            while rig.session.state() != State::Gone {
                actions.extend(rig.pass());
            }
            let actions = short(&actions);
            for once in ["up closed", "ended", "drop"] {
                let count = actions.iter().filter(|a| a.starts_with(once)).count();
                assert_eq!(count, 1, "{once}: {actions:?}");
            }
        }
    }
}

#[test]
fn pings_of_every_form_get_their_data_back() {
    let long = "x".repeat(1024);
    let rows = [
        ("ping", "pong".to_owned()),
        (r#"{"type":"ping"}"#, r#"{"type":"pong"}"#.to_owned()),
        (r#"{ "type" : "ping" }"#, r#"{"type":"pong"}"#.to_owned()),
        (r#"{"type":"ping","data":""}"#, r#"{"type":"pong","data":""}"#.to_owned()),
        (r#"{"type":"ping","data":"é"}"#, r#"{"type":"pong","data":"é"}"#.to_owned()),
        (r#"{"type":"ping","data":"a\"b"}"#, r#"{"type":"pong","data":"a\"b"}"#.to_owned()),
        (r#"{"type":"ping","data":"a","x":"b"}"#, r#"{"type":"pong","data":"a"}"#.to_owned()),
        (&format!(r#"{{"type":"ping","data":"{long}"}}"#), format!(r#"{{"type":"pong","data":"{long}"}}"#)),
    ];
    for mut rig in [Rig::with(rules()), Rig::open(rules())] {
        for (ping, pong) in &rows {
            match &rig.text(ping)[..] {
                [Action::Send(frame)] => assert_eq!(frame.json, pong, "{ping}"),
                other => panic!("{ping}: {other:?}"),
            }
        }
    }
    let mut rig = Rig::open(rules());
    for bad in [
        format!(r#"{{"type":"ping","data":"{long}x"}}"#),
        "{\"type\":\"ping\",\"data\":\"\n\"}".into(),
        r#"{"type":"ping","data":"\"}"#.into(),
    ] {
        assert_eq!(short(&rig.text(&bad)), ["failed malformed", "error malformed"], "{bad}");
    }
}

#[test]
fn what_was_asked_before_the_end_of_the_input_is_answered() {
    let mut rig = Rig::open(rules());
    rig.text(&send("m1"));
    rig.text(&send("m2"));
    assert_eq!(short(&rig.run(|s, cx, out| s.on_peer_ended(cx, out))), [] as [&str; 0]);
    assert!(rig.session.state().is_open(), "answers are delivered still");
    assert_eq!(short(&rig.run(|s, cx, out| s.on_decided(cx, 1, out))), [] as [&str; 0]);
    let last = short(&rig.run(|s, cx, out| s.on_decided(cx, 1, out)));
    assert_eq!(last, ["up closed bye", "ended bye true"]);
    assert_eq!(short(&rig.run(|s, cx, out| s.on_flushed(cx, out))), ["drop"]);
}

#[test]
fn the_end_of_the_input_ends_a_connection_that_waits_for_nothing() {
    let mut rig = Rig::open(rules());
    let last = short(&rig.run(|s, cx, out| s.on_peer_ended(cx, out)));
    assert_eq!(last, ["up closed bye", "ended bye true"]);
    assert_eq!(short(&rig.run(|s, cx, out| s.on_flushed(cx, out))), ["drop"]);
}

#[test]
fn answers_that_never_come_are_not_awaited_for_ever() {
    let mut rig = Rig::open(rules());
    rig.text(&send("m1"));
    rig.run(|s, cx, out| s.on_peer_ended(cx, out));
    let start = rig.now.mono_ms;
    assert_eq!(short(&rig.pass()), ["up closed bye", "ended bye true"]);
    assert_eq!(rig.now.mono_ms - start, LINGER_MS);
    assert_eq!(short(&rig.pass()), ["drop"]);
}

#[test]
fn an_error_repeats_the_id_of_a_frame_that_needs_none() {
    let mut rig = Rig::open(rules());
    let connect = r#"{"type":"connect","id":"c1","token":"t"}"#;
    assert_eq!(short(&rig.text(connect))[1], "error identity_mismatch c1");
    let mut rig = Rig::with(rules());
    let recv = r#"{"type":"msg.recv","id":"r1","conversation_id":"g:x","seq":1}"#;
    assert_eq!(short(&rig.text(recv))[1], "error unauthenticated r1");
    for (text, id) in [(send("m1"), "m1"), (r#"{"type":"nope","id":"n1"}"#.into(), "n1")] {
        let mut rig = Rig::with(rules());
        assert_eq!(short(&rig.text(&text))[1], format!("error unauthenticated {id}"));
    }
}

fn join(id: &str, room: &str) -> String {
    format!(r#"{{"type":"room.join","id":"{id}","room":"{room}"}}"#)
}

#[test]
fn what_is_asked_of_rooms_stays_in_the_gateway() {
    let mut rig = Rig::open(Rules { backpressure_high: 1, ..rules() });
    assert_eq!(short(&rig.text(&join("1", "lobby"))), ["room.join 1"]);
    for id in ["2", "3", "4"] {
        let send = format!(r#"{{"type":"room.send","id":"{id}","room":"lobby","body":1}}"#);
        assert_eq!(short(&rig.text(&send)), [format!("room.send {id}")]);
    }
    assert_eq!(rig.session.state(), State::Reading, "nothing of it is undecided");
    // Before there is an identity it is refused as everything is.
    let mut rig = Rig::with(rules());
    let refused = short(&rig.text(&join("1", "lobby")));
    assert_eq!(refused[..2], ["failed unauthenticated", "error unauthenticated 1"]);
}

#[test]
fn the_claim_names_rooms_or_how_they_begin() {
    let mut rig = Rig::open(Rules { room_join: RoomJoin::Claim, ..rules() });
    let refused = ["failed forbidden", "error forbidden 1"];
    assert_eq!(short(&rig.text(&join("1", "lobby"))), refused, "a token that names none");
    rig.text(r#"{"type":"auth.refresh","id":"r","token":"t"}"#);
    let names: Arc<[Box<str>]> = ["lobby".into(), "team-*".into(), "*-x".into()].into();
    let grant = Grant { rooms: Some(names), ..grant("alice") };
    rig.run(|s, cx, out| s.on_verdict(cx, true, Ok(grant), FRESH, out));
    let rows = [
        ("lobby", true),
        ("team-", true),
        ("team-red", true),
        ("lobby2", false),
        ("team", false),
        ("*-x", true),
        ("a-x", false),
    ];
    for (room, allowed) in rows {
        let expected = if allowed { vec!["room.join 1"] } else { refused.to_vec() };
        assert_eq!(short(&rig.text(&join("1", room))), expected, "{room}");
    }
}

#[test]
fn a_join_that_the_application_judges_is_undecided_until_it_has() {
    let mut rig = Rig::open(Rules { room_join: RoomJoin::Hook, backpressure_high: 1, ..rules() });
    assert_eq!(short(&rig.text(&join("1", "lobby"))), ["room.join 1"]);
    assert_eq!(short(&rig.text(&join("2", "lobby"))), ["room.join 2", "paused"]);
    assert_eq!(short(&rig.run(|s, cx, out| s.on_decided(cx, 2, out))), ["resumed"]);
}

#[test]
fn requests_of_rooms_are_paid_for_like_others() {
    let mut rig = Rig::open(Rules { frames_per_second: 2, ..rules() });
    assert_eq!(short(&rig.text(&join("1", "lobby"))), ["room.join 1"]);
    assert_eq!(short(&rig.text(&join("2", "lobby"))), ["room.join 2"]);
    assert_eq!(short(&rig.text(&join("3", "lobby"))), ["failed rate_limited", "error rate_limited 3"]);
}

#[test]
fn a_connection_is_who_the_token_says_from_its_verdict_on() {
    let mut rig = Rig::open(Rules { room_join: RoomJoin::Claim, ..rules() });
    assert_eq!(rig.session.claims(), None, "a token that says nothing more");
    let named = |name: &str| Some(Box::from(name));
    let rooms: Arc<[Box<str>]> = ["lobby".into()].into();
    for (token_id, session_id, rooms) in
        [(named("t1"), None, None), (None, named("s1"), None), (None, None, Some(rooms))]
    {
        rig.text(r#"{"type":"auth.refresh","id":"r","token":"t"}"#);
        let has_rooms = rooms.is_some();
        let (token, session) = (token_id.clone(), session_id.clone());
        let grant = Grant { token_id, session_id, rooms, ..grant("alice") };
        rig.run(|s, cx, out| s.on_verdict(cx, true, Ok(grant), FRESH, out));
        let claims = rig.session.claims().expect("what revocation names, or rooms");
        assert_eq!((&claims.token_id, &claims.session_id), (&token, &session));
        assert_eq!(short(&rig.text(&join("1", "lobby"))).len(), if has_rooms { 1 } else { 2 });
    }
}

#[test]
fn a_token_in_the_handshake_opens_as_one_in_connect_does() {
    let mut rig = Rig::with(rules());
    let hello = Hello { device: Some(DeviceId::trusted("tablet")), ..Hello::default() };
    let asked = rig.run(|s, cx, out| s.on_handshake(cx, "t".into(), hello, out));
    let device = Some(DeviceId::trusted("tablet"));
    assert_eq!(asked, [Action::Verify { token: "t".into(), device, refresh: false }]);
    assert_eq!(short(&rig.verdict(Ok(grant("alice")))), ["open alice/tablet"]);
}

#[test]
fn a_refresh_is_judged_for_the_device_that_is_bound() {
    let mut rig = Rig::open(rules());
    let asked = rig.text(r#"{"type":"auth.refresh","id":"r","token":"u"}"#);
    let device = Some(DeviceId::trusted("phone"));
    assert_eq!(asked, [Action::Verify { token: "u".into(), device, refresh: true }]);
}

#[test]
fn binary_frames_are_frames_like_any_other() {
    let binary = |header: &str, body: &[u8]| {
        [&(header.len() as u32).to_be_bytes()[..], header.as_bytes(), body].concat()
    };
    let frame = binary(r#"{"type":"msg.send","id":"1","to":"bob"}"#, &[0, 255]);
    let mut rig = Rig::open(rules());
    let sent = rig.run(|s, cx, out| s.on_binary(cx, &frame, out));
    let [Action::Up(Up::Frame(ClientFrame::MsgSend { send }))] = &sent[..] else { panic!("{sent:?}") };
    assert_eq!(send.body, bowline_protocol::Body::Binary(Bytes::from_static(&[0, 255])));
    let refused = rig.run(|s, cx, out| s.on_binary(cx, &frame[..9], out));
    assert_eq!(short(&refused), ["failed malformed", "error malformed"]);
}

/// Lets time pass, answering pings, until something else happens.
fn pass_until_it_acts(rig: &mut Rig) -> Vec<String> {
    for _ in 0..1_000 {
        rig.run(|s, cx, out| s.on_bytes(cx, out));
        let actions = short(&rig.pass());
        if actions != ["ping"] {
            return actions;
        }
    }
    panic!("only pings");
}

#[test]
fn a_session_ends_with_its_token_and_clocks_may_differ_by_half_a_minute() {
    let end = ["up closed token-expired", "ended token-expired true", "close 4001 token-expired"];
    let mut rig = Rig::open(rules());
    assert_eq!(pass_until_it_acts(&mut rig), ["auth.expiring"]);
    assert_eq!(pass_until_it_acts(&mut rig), end);
    assert_eq!(rig.now.wall_ms, 10_000_000, "the time that the token names");

    // By the verifier's clock it was good still.
    let mut rig = Rig::with(rules());
    rig.text(r#"{"type":"connect","token":"t"}"#);
    let expires_at = rig.now.wall_ms - 5_000;
    rig.verdict(Ok(Grant { expires_at, ..grant("alice") }));
    let greeted = short(&rig.run(|s, cx, out| s.on_accepted(cx, false, out)));
    assert_eq!(greeted.last().map(String::as_str), Some("auth.expiring"));
    assert_eq!(pass_until_it_acts(&mut rig), end);
    assert_eq!(rig.now.wall_ms, expires_at + 30_000);
}

#[test]
fn a_connection_without_identity_is_open_and_known_to_nobody() {
    let (rules, now) = (rules(), Now { mono_ms: 1_000, wall_ms: 1_000_000 });
    let mut rig = Rig { session: Session::without_identity(&rules, now, 3), rules, now };
    assert_eq!(rig.session.state(), State::Reading);
    assert_eq!(
        short(&rig.run(|s, _, out| s.on_drain(100, "rolling", out))),
        [""; 0],
        "nobody to send elsewhere"
    );
    assert_eq!(short(&rig.pass()), ["ping"], "silence is judged as with any other");
    let closed = short(&rig.run(|s, cx, out| s.close(cx, CloseCode::Draining, None, None, out)));
    assert_eq!(closed, ["ended draining false", "close 1001 draining"]);
}

#[test]
fn a_drain_sends_every_open_client_elsewhere_and_nobody_else() {
    let drain = |rig: &mut Rig| rig.run(|s, _, out| s.on_drain(1_500, "rolling", out));
    let mut rig = Rig::with(rules());
    assert_eq!(drain(&mut rig), [], "it has no identity yet");
    let mut rig = Rig::open(rules());
    let told = drain(&mut rig);
    let [Action::Send(frame)] = &told[..] else { panic!("{told:?}") };
    assert_eq!(
        String::from_utf8_lossy(&frame.json),
        r#"{"type":"session.migrate","retry_after_ms":1500,"reason":"rolling"}"#
    );
    assert_eq!(short(&rig.text(&send("1"))), ["up msg.send"], "it works unchanged");
    rig.run(|s, cx, out| s.close(cx, CloseCode::Kicked, None, None, out));
    assert_eq!(drain(&mut rig), [], "its end has begun");
}

#[test]
fn a_close_frame_of_the_client_is_answered_at_once() {
    let mut rig = Rig::open(rules());
    let closed = short(&rig.run(|s, cx, out| s.on_peer_closed(cx, out)));
    assert_eq!(closed, ["up closed bye", "ended bye true", "answerclose"]);
    assert_eq!(short(&rig.run(|s, cx, out| s.on_flushed(cx, out))), ["drop"]);
}

#[test]
fn a_socket_that_failed_is_dropped_at_once() {
    let mut rig = Rig::open(rules());
    let gone = short(&rig.run(|s, cx, out| s.on_peer_gone(cx, out)));
    assert_eq!(gone, ["up closed bye", "ended bye true", "drop"]);
}

#[test]
fn the_router_hears_of_a_full_socket_and_of_an_empty_one_once_each() {
    let mut rig = Rig::open(rules());
    let flushed = |rig: &mut Rig| short(&rig.run(|s, cx, out| s.on_flushed(cx, out)));
    assert_eq!(flushed(&mut rig), [""; 0], "it was told of no full one");
    let queued = |rig: &mut Rig| short(&rig.run(|s, cx, out| s.on_queue(cx, 100, 100, out)));
    assert_eq!((queued(&mut rig), queued(&mut rig)), (vec!["congested".to_owned()], vec![]));
    assert_eq!((flushed(&mut rig), flushed(&mut rig)), (vec!["flowing".to_owned()], vec![]));
    // After its end it is nobody's.
    queued(&mut rig);
    rig.run(|s, cx, out| s.close(cx, CloseCode::Kicked, None, None, out));
    assert_eq!(flushed(&mut rig), ["endoutput"]);
}

#[test]
fn at_the_mark_a_socket_is_still_read() {
    let mut rig = Rig::open(rules());
    for id in 1..=4 {
        rig.text(&send(&id.to_string()));
    }
    assert_eq!(short(&rig.run(|s, cx, out| s.on_queue(cx, 10, 0, out))), [""; 0], "4 are not above 4");
    assert_eq!(rig.session.state(), State::Reading);
}

#[test]
fn only_who_reads_too_slowly_is_slow() {
    let mut rig = Rig::open(rules());
    assert!(!rig.session.is_slow());
    rig.run(|s, cx, out| s.on_queue(cx, 1001, 1001, out));
    assert!(rig.session.is_slow());
    let mut rig = Rig::open(rules());
    rig.run(|s, cx, out| s.close(cx, CloseCode::Kicked, None, None, out));
    assert!(!rig.session.is_slow(), "another end");
}

#[test]
fn what_is_said_in_a_room_is_said_by_the_bound_user() {
    let mut rig = Rig::open(rules());
    let say =
        |from: &str| format!(r#"{{"type":"room.send","id":"1","room":"lobby","body":1,"from":"{from}"}}"#);
    assert_eq!(
        short(&rig.text(&say("bob"))),
        ["mismatch bob", "failed identity_mismatch", "error identity_mismatch 1"]
    );
    assert_eq!(short(&rig.text(&say("alice"))), ["room.send 1"]);
}

#[test]
fn who_is_too_fast_is_told_how_long_to_wait() {
    let mut rig = Rig::open(Rules { frames_per_second: 4, backpressure_high: 99, ..rules() });
    // Not at the beginning of a second: waiting is counted from now.
    rig.now.mono_ms += 123;
    for id in 0..4 {
        assert_eq!(short(&rig.text(&send(&id.to_string()))), ["up msg.send"]);
    }
    let mut wait = |after: u64| {
        rig.now.mono_ms += after;
        let refused = rig.text(&send("late"));
        let Some(Action::Send(frame)) = refused.last() else { panic!("{refused:?}") };
        let json = String::from_utf8_lossy(&frame.json).into_owned();
        let (_, rest) = json.split_once(r#""retry_after_ms":"#).expect("how long");
        rest.trim_end_matches('}').parse::<u64>().expect("a number")
    };
    assert_eq!((wait(0), wait(100)), (250, 150));
    rig.now.mono_ms += 150;
    assert_eq!(short(&rig.text(&send("late"))), ["up msg.send"], "it was told the truth");
}
