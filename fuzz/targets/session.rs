//! One connection under any list of events: what it asks for keeps its order, and silence ends it.
#![no_main]

use arbitrary::Arbitrary;
use bowline_protocol::{CloseCode, UserId, link::SameDevice, link::Up};
use bowline_session::{
    Action, Context, Denial, Fresh, Grant, Hello, Now, RoomJoin, Rules, Session, State, Turn,
};
use libfuzzer_sys::fuzz_target;

#[derive(Debug, Arbitrary)]
struct Input<'a> {
    frames_per_second: u8,
    random: u32,
    /// `gateway.same_device`; only passed on.
    replace: bool,
    steps: Vec<Step<'a>>,
}

#[derive(Debug, Arbitrary)]
enum Step<'a> {
    /// Time passes, and the timer fires when it is due.
    Pass {
        ms: u16,
    },
    /// Time passes until the timer is due.
    Due,
    /// The wall clock jumps.
    Jump {
        to_ms: u32,
    },
    Bytes,
    Known {
        frame: u8,
    },
    Text {
        text: &'a str,
    },
    Binary {
        bytes: &'a [u8],
    },
    Query,
    Handshake,
    Verdict {
        refresh: bool,
        verdict: Verdict,
        expires_in_ms: u32,
    },
    Turn {
        login: bool,
        no: u8,
    },
    Accepted {
        resumed: bool,
    },
    Refused,
    Decided {
        count: u8,
    },
    Queue {
        bytes: u16,
        pushes: u16,
    },
    Flushed,
    Drain,
    PeerClosed,
    PeerGone,
    Close {
        code: u8,
    },
}

#[derive(Debug, Arbitrary)]
enum Verdict {
    Alice,
    Other,
    Bad,
    Unavailable,
}

const FRAMES: [&str; 14] = [
    "ping",
    r#"{"type":"ping"}"#,
    r#"{"type":"ping","data":"d"}"#,
    r#"{"type":"pong"}"#,
    r#"{"type":"connect","token":"t"}"#,
    r#"{"type":"connect","token":"t","device_id":"phone","resume":"00ab"}"#,
    r#"{"type":"connect","token":"t","version":9}"#,
    r#"{"type":"msg.send","id":"m","to":"bob","body":1}"#,
    r#"{"type":"msg.send","id":"m","to":"bob","from":"mallory","body":1}"#,
    r#"{"type":"msg.recv","conversation_id":"d:alice:bob","seq":1}"#,
    r#"{"type":"history","id":"h","conversation_id":"d:alice:bob"}"#,
    r#"{"type":"auth.refresh","id":"r","token":"t2"}"#,
    r#"{"type":"no.such.type","id":"x"}"#,
    "not JSON",
];

const FRESH: Fresh = Fresh { login: 77, session: 0xabc };
const HIGH: u32 = 4;
const LIMIT: usize = 1000;

/// What has to be true of all actions together.
#[derive(Debug, Default)]
struct Watch {
    verifying: bool,
    refreshing: bool,
    router_knows: bool,
    ever_known: bool,
    opened: bool,
    ended: bool,
    paused: bool,
    congested: bool,
    farewell: bool,
    dropped: bool,
    undecided: u32,
}

impl Watch {
    fn on(&mut self, action: &Action) {
        assert!(!self.dropped, "{action:?} after the socket was closed");
        match action {
            Action::Verify { refresh: false, .. } => {
                assert!(!self.verifying && !self.ever_known, "a second identity");
                self.verifying = true;
            }
            Action::Verify { refresh: true, .. } => {
                assert!(self.opened && !self.ended && !self.refreshing);
                self.refreshing = true;
            }
            Action::Up(Up::Open(open)) => {
                assert!(self.verifying && !self.ever_known && !self.ended);
                assert_eq!(&*open.user, "alice");
                (self.router_knows, self.ever_known) = (true, true);
            }
            Action::Up(Up::Frame(_)) => {
                assert!(self.router_knows && self.opened && !self.ended, "a frame of a stranger");
                self.undecided += 1;
                // One text may come on top: the marks are judged after it.
                assert!(self.undecided <= HIGH + 1, "{} frames are undecided", self.undecided);
            }
            Action::Up(Up::Closed(_)) => {
                assert!(self.router_knows, "closed without having been opened");
                self.router_knows = false;
            }
            Action::Up(Up::Congested) => {
                assert!(self.router_knows && !std::mem::replace(&mut self.congested, true));
            }
            Action::Up(Up::Flowing) => {
                assert!(self.router_knows && std::mem::replace(&mut self.congested, false));
            }
            Action::Up(other) => panic!("a session says {other:?}"),
            Action::Opened => assert!(self.router_knows && !std::mem::replace(&mut self.opened, true)),
            Action::Ended { open, .. } => {
                assert!(!std::mem::replace(&mut self.ended, true), "it ends twice");
                assert_eq!(*open, self.opened);
                assert!(!self.router_knows, "the router was not told");
                assert!(!self.paused, "a pause outlives the connection");
            }
            Action::Paused => assert!(self.opened && !std::mem::replace(&mut self.paused, true)),
            Action::Resumed => assert!(std::mem::replace(&mut self.paused, false)),
            Action::Ping => assert!(self.opened && !self.ended && !self.paused),
            Action::Send(frame) => {
                assert!(!self.farewell, "something is sent after session.closed");
                let json: serde_json::Value = serde_json::from_slice(&frame.json).unwrap_or_else(|error| {
                    assert_eq!(frame.json, "pong", "{error}");
                    serde_json::json!({"type": "pong"})
                });
                assert!(json["type"].is_string());
            }
            Action::Close { .. } => {
                assert!(self.ended && !std::mem::replace(&mut self.farewell, true), "it closes twice");
            }
            Action::AnswerClose => assert!(self.ended && !self.farewell),
            Action::Drop => {
                assert!(self.ended, "the socket is closed before the end");
                self.dropped = true;
            }
            Action::Room(_) => assert!(self.opened && !self.ended),
            Action::CutQueue | Action::EndOutput | Action::Failed { .. } | Action::Mismatch { .. } => {}
        }
    }
}

struct Run {
    rules: Rules,
    now: Now,
    session: Session,
    watch: Watch,
}

impl Run {
    fn step(&mut self, event: impl FnOnce(&mut Session, &Context<'_>, &mut Vec<Action>)) {
        let mut out = Vec::new();
        let cx = Context { rules: &self.rules, now: self.now, connection: 5 };
        event(&mut self.session, &cx, &mut out);
        for action in &out {
            self.watch.on(action);
        }
        let state = self.session.state();
        assert_eq!(state.is_open(), self.watch.opened && !self.watch.ended, "{state:?}");
        assert_eq!(state == State::Paused, self.watch.paused, "{state:?}");
        assert_eq!(state == State::Gone, self.watch.dropped, "{state:?}");
        assert_eq!(state.is_active(), !self.watch.ended, "{state:?}");
    }

    fn due(&mut self) {
        let due = self.session.deadline_ms(&self.rules, self.now);
        if due == u64::MAX {
            return assert_eq!(self.session.state(), State::Gone, "it waits for nothing");
        }
        let wait = due.saturating_sub(self.now.mono_ms);
        self.now.mono_ms += wait;
        self.now.wall_ms = self.now.wall_ms.saturating_add(wait);
        let before = self.session.state();
        self.step(|s, cx, out| s.on_timer(cx, out));
        let next = self.session.deadline_ms(&self.rules, self.now);
        assert!(
            next > self.now.mono_ms || self.session.state() != before,
            "the timer of {before:?} fires again and again"
        );
    }
}

fuzz_target!(|input: Input<'_>| {
    let rules = Rules {
        node_id: "n1".into(),
        ping_after_ms: 4_500,
        ping_jitter_ms: 500,
        close_after_ms: 9_000,
        backpressure_high: HIGH,
        backpressure_timeout_ms: 3_000,
        outbound_limit_bytes: LIMIT,
        max_frame_bytes: 32_768,
        frames_per_second: u32::from(input.frames_per_second),
        same_device: if input.replace { SameDevice::Replace } else { SameDevice::Refuse },
        room_join: RoomJoin::Any,
    };
    let now = Now { mono_ms: 1_000, wall_ms: 1_000_000 };
    let session = Session::new(&rules, now, input.random);
    let mut run = Run { rules, now, session, watch: Watch::default() };
    for step in input.steps {
        apply(&mut run, step);
    }
    // Only time passes from here on.
    for _ in 0..12 {
        run.due();
    }
    assert_eq!(run.session.state(), State::Gone, "silence did not end it: {:?}", run.watch);
    assert_eq!(run.session.deadline_ms(&run.rules, run.now), u64::MAX);
});

fn apply(run: &mut Run, step: Step<'_>) {
    // A gateway hands frames over only while they are read.
    let reads = run.session.state().reads_frames();
    match step {
        Step::Pass { ms } => {
            run.now.mono_ms += u64::from(ms);
            run.now.wall_ms = run.now.wall_ms.saturating_add(u64::from(ms));
            if run.session.deadline_ms(&run.rules, run.now) <= run.now.mono_ms {
                run.step(|s, cx, out| s.on_timer(cx, out));
            }
        }
        Step::Due => run.due(),
        Step::Jump { to_ms } => run.now.wall_ms = u64::from(to_ms),
        Step::Bytes => run.step(|s, cx, out| s.on_bytes(cx, out)),
        Step::Known { frame } if reads => {
            let text = FRAMES[usize::from(frame) % FRAMES.len()];
            run.step(|s, cx, out| s.on_text(cx, text.as_bytes(), out));
        }
        Step::Text { text } if reads => run.step(|s, cx, out| s.on_text(cx, text.as_bytes(), out)),
        Step::Binary { bytes } if reads => run.step(|s, cx, out| s.on_binary(cx, bytes, out)),
        Step::Known { .. } | Step::Text { .. } | Step::Binary { .. } => {}
        Step::Query if run.session.state() == State::Waiting => {
            run.session.on_query(Hello { channel: Some("c".into()), ..Hello::default() });
        }
        Step::Handshake if run.session.state() == State::Waiting => {
            run.step(|s, cx, out| s.on_handshake(cx, "t".into(), Hello::default(), out));
        }
        Step::Query | Step::Handshake => {}
        Step::Verdict { refresh, verdict, expires_in_ms } => {
            let grant = |user: &str| Grant {
                user: UserId::trusted(user),
                device: None,
                class: None,
                expires_at: run.now.wall_ms.saturating_add(u64::from(expires_in_ms)),
                issued_at: 1,
                token_id: None,
                session_id: Some("sid".into()),
                rooms: None,
            };
            // Whoever the token of the handshake names is who it is.
            let verdict = match verdict {
                Verdict::Other if refresh => Ok(grant("mallory")),
                Verdict::Alice | Verdict::Other => Ok(grant("alice")),
                Verdict::Bad => Err(Denial::Token("bad".into())),
                Verdict::Unavailable => Err(Denial::Unavailable("later".into())),
            };
            if refresh {
                run.watch.refreshing = false;
            }
            run.step(|s, cx, out| s.on_verdict(cx, refresh, verdict, FRESH, out));
        }
        Step::Turn { login, no } => {
            let turn = run.session.take_turn(if login { FRESH.login } else { 1 }, u64::from(no));
            assert!(run.watch.router_knows && login || turn == Turn::NotHere);
        }
        // The router answers once, and only whom it knows.
        Step::Accepted { resumed } if run.session.state() == State::Opening => {
            run.step(|s, cx, out| s.on_accepted(cx, resumed, out));
        }
        Step::Refused if run.session.state() == State::Opening => {
            run.watch.router_knows = false;
            run.step(|s, cx, out| s.on_refused(cx, CloseCode::DeviceInUse, out));
        }
        Step::Accepted { .. } | Step::Refused => {}
        Step::Decided { count } => {
            let count = u32::from(count).min(run.watch.undecided);
            run.watch.undecided -= count;
            run.step(|s, cx, out| s.on_decided(cx, count, out));
        }
        Step::Queue { bytes, pushes } => {
            let bytes = usize::from(bytes).max(1);
            let pushes = usize::from(pushes).min(bytes);
            run.step(|s, cx, out| s.on_queue(cx, bytes, pushes, out));
        }
        Step::Flushed => run.step(|s, cx, out| s.on_flushed(cx, out)),
        Step::Drain => run.step(|s, _, out| s.on_drain(5, "test", out)),
        Step::PeerClosed => run.step(|s, cx, out| s.on_peer_closed(cx, out)),
        Step::PeerGone => run.step(|s, cx, out| s.on_peer_gone(cx, out)),
        Step::Close { code } => {
            let code = CloseCode::ALL[usize::from(code) % CloseCode::ALL.len()];
            run.step(|s, cx, out| s.close(cx, code, None, None, out));
        }
    }
}
