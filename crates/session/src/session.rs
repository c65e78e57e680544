//! One connection: its counters, its identity, and what follows from what happens to it.

use crate::{
    machine::{Effect, Event, State},
    opening::{Denial, Fresh, Grant, Hello, Refusal, plan_open},
    rules::{
        CLOCK_SKEW_MS, CONNECT_TIMEOUT_MS, Context, EXPIRING_MS, LINGER_MS, LINGER_SLOW_MS, Now, RoomJoin,
        Rules, UNPARSABLE_MAX,
    },
};
use bowline_protocol::{
    ClientFrame, CloseCode, DeviceId, ErrorCode, Frame, Millis, ServerFrame, UserId, VERSION,
    frame::{Connect, DecodeError, PING_DATA_BYTES_MAX, RoomRequest},
    link::Up,
};
use bytes::Bytes;
use std::{cmp::Ordering, sync::Arc};

/// What has to be done, in order.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Judge a token and answer with [`Session::on_verdict`]. `refresh` when it extends an open session.
    Verify { token: String, device: Option<DeviceId>, refresh: bool },
    /// Tell the router.
    Up(Up),
    /// Carry out what is asked of a room. A join that the application has to judge counts as undecided until
    /// [`Session::on_decided`].
    Room(RoomRequest),
    /// Send a frame of the gateway's own.
    Send(Frame),
    /// Ask for a sign of life.
    Ping,
    /// The connection is open: count it.
    Opened,
    /// An end has begun; happens once. `open` when `Opened` came before.
    Ended { code: CloseCode, open: bool },
    /// Read the socket no further.
    Paused,
    /// The pause is over: by reading on, or because the connection ends.
    Resumed,
    /// Drop the queued frames that no byte was written of.
    CutQueue,
    /// Send `session.closed` and the transport's close frame.
    Close {
        code: CloseCode,
        reason: Option<Arc<str>>,
        retry_after_ms: Option<u64>,
        /// Set when it was refused while opening.
        refusal: Option<Box<Refusal>>,
    },
    /// Answer the client's close frame.
    AnswerClose,
    /// Everything is said: end the output where the transport can.
    EndOutput,
    /// Close the socket.
    Drop,
    /// A frame of the client was answered with an error.
    Failed { frame: Option<&'static str>, code: ErrorCode },
    /// A frame claimed to be from somebody else.
    Mismatch { claimed: String },
}

/// What a numbered event of the router is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// The next one.
    Take,
    /// It was here before.
    Had,
    /// It came before its turn.
    Early,
    /// It is for another connection than this, or for none.
    NotHere,
}

/// What revocation names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claims {
    pub token_id: Option<Box<str>>,
    pub session_id: Option<Box<str>>,
    /// What the token says about rooms, where that is asked. A thin pointer: most tokens say nothing.
    rooms: Option<Box<RoomClaim>>,
}

/// Names of rooms; one that ends in `*` stands for all that begin so.
#[derive(Debug, Clone, PartialEq, Eq)]
struct RoomClaim(Arc<[Box<str>]>);

impl RoomClaim {
    fn names(&self, room: &str) -> bool {
        self.0.iter().any(|name| match name.strip_suffix('*') {
            Some(prefix) => room.starts_with(prefix),
            None => **name == *room,
        })
    }
}

/// The identity of a connection. It is set once.
#[derive(Debug)]
struct Bound {
    user: UserId,
    device: DeviceId,
    session: u128,
    login: u64,
    issued_at: Millis,
    /// When the token runs out, and when the session ends for it.
    expires_at: Millis,
    ends_at: Millis,
    claims: Option<Box<Claims>>,
}

#[derive(Debug)]
pub struct Session {
    state: State,
    /// `Up::Open` went to the router and `Up::Closed` did not.
    router_knows: bool,
    /// The client was told that its token runs out.
    expiry_told: bool,
    congested: bool,
    slow: bool,
    /// Texts in a row that could not be parsed.
    unparsable: u8,
    jitter_ms: u32,
    undecided: u32,
    /// Bytes in the outbox.
    queued_bytes: u32,
    /// When the state was entered.
    since_ms: u64,
    /// When the last byte came.
    heard_ms: u64,
    /// The number of the next event from the router.
    next_no: u64,
    /// When the frames so far are paid for, in microseconds; only with `frames_per_second`.
    paid_until_us: u64,
    bound: Option<Box<Bound>>,
    hello: Option<Box<Hello>>,
    /// The `id` of an `auth.refresh` that is being judged.
    refresh: Option<Box<str>>,
}

const _: () = assert!(size_of::<Session>() <= 88);
const _: () = assert!(size_of::<Bound>() <= 96);
const _: () = assert!(size_of::<Claims>() <= 40);

type Out = Vec<Action>;

impl Session {
    /// A connection that has just come. `random` spreads its heartbeat.
    pub fn new(rules: &Rules, now: Now, random: u32) -> Self {
        Self {
            state: State::Waiting,
            router_knows: false,
            expiry_told: false,
            congested: false,
            slow: false,
            unparsable: 0,
            jitter_ms: (u64::from(random) % (rules.ping_jitter_ms + 1)) as u32,
            undecided: 0,
            queued_bytes: 0,
            since_ms: now.mono_ms,
            heard_ms: now.mono_ms,
            next_no: 1,
            paid_until_us: 0,
            bound: None,
            hello: None,
            refresh: None,
        }
    }

    /// One that needs no identity and whose messages the caller handles.
    pub fn without_identity(rules: &Rules, now: Now, random: u32) -> Self {
        Self { state: State::Reading, ..Self::new(rules, now, random) }
    }

    pub fn state(&self) -> State {
        self.state
    }

    /// The user, once the identity is known.
    pub fn user(&self) -> Option<&UserId> {
        self.bound.as_ref().map(|bound| &bound.user)
    }

    pub fn device(&self) -> Option<&DeviceId> {
        self.bound.as_ref().map(|bound| &bound.device)
    }

    /// 0 before there is an identity.
    pub fn login(&self) -> u64 {
        self.bound.as_ref().map_or(0, |bound| bound.login)
    }

    pub fn issued_at(&self) -> Millis {
        self.bound.as_ref().map_or(0, |bound| bound.issued_at)
    }

    pub fn claims(&self) -> Option<&Claims> {
        self.bound.as_ref()?.claims.as_deref()
    }

    /// It is closing because it reads too slowly.
    pub fn is_slow(&self) -> bool {
        self.slow
    }

    /// When [`Self::on_timer`] is due, by the clock that only runs forward.
    pub fn deadline_ms(&self, rules: &Rules, now: Now) -> u64 {
        let own = self.state_ends_ms(rules);
        let Some(bound) = self.bound.as_ref().filter(|_| self.state.is_open()) else { return own };
        let wall = if self.expiry_told {
            bound.ends_at
        } else {
            bound.expires_at.saturating_sub(EXPIRING_MS).min(bound.ends_at)
        };
        own.min(now.mono_ms.saturating_add(wall.saturating_sub(now.wall_ms)))
    }

    fn state_ends_ms(&self, rules: &Rules) -> u64 {
        match self.state {
            State::Waiting | State::Verifying | State::Opening => self.since_ms + CONNECT_TIMEOUT_MS,
            State::Reading => self.ping_ms(rules).min(self.silent_ms(rules)),
            State::Pinged => self.silent_ms(rules),
            State::Paused => self.since_ms + rules.backpressure_timeout_ms,
            State::Answering => self.since_ms + LINGER_MS,
            State::Closing | State::Leaving if self.slow => self.since_ms + LINGER_SLOW_MS,
            State::Closing | State::Leaving => self.since_ms + LINGER_MS,
            State::Gone => u64::MAX,
        }
    }

    fn ping_ms(&self, rules: &Rules) -> u64 {
        self.heard_ms + rules.ping_after_ms + u64::from(self.jitter_ms)
    }

    fn silent_ms(&self, rules: &Rules) -> u64 {
        self.heard_ms + rules.close_after_ms
    }

    // What happens.

    /// The time that [`Self::deadline_ms`] named has come, or an earlier one.
    pub fn on_timer(&mut self, cx: &Context<'_>, out: &mut Out) {
        if let Some(bound) = self.bound.as_ref().filter(|_| self.state.is_open()) {
            if bound.ends_at <= cx.now.wall_ms {
                return self.close(cx, CloseCode::TokenExpired, None, None, out);
            }
            if !self.expiry_told && bound.expires_at.saturating_sub(EXPIRING_MS) <= cx.now.wall_ms {
                self.expiry_told = true;
                out.push(Action::Send(ServerFrame::AuthExpiring { expires_at: bound.expires_at }.encode()));
            }
        }
        if self.state_ends_ms(cx.rules) <= cx.now.mono_ms {
            // A close that is due no later than the ping does not wait for it.
            let is_silent = self.silent_ms(cx.rules) <= self.ping_ms(cx.rules).min(cx.now.mono_ms);
            let event = match self.state {
                State::Reading if is_silent => Event::Silent,
                _ => Event::TimeUp,
            };
            self.step(cx, event, out);
        }
    }

    /// Bytes came.
    pub fn on_bytes(&mut self, cx: &Context<'_>, out: &mut Out) {
        self.heard_ms = cx.now.mono_ms;
        if self.state == State::Pinged {
            self.step(cx, Event::Bytes, out);
        }
    }

    /// One JSON text, or the bare word `ping`.
    pub fn on_text(&mut self, cx: &Context<'_>, text: &[u8], out: &mut Out) {
        // Pings come as often as anything, so that the usual forms are known without a parser.
        let json = match text {
            b"ping" => Bytes::from_static(b"pong"),
            br#"{"type":"ping"}"# => Bytes::from_static(br#"{"type":"pong"}"#),
            text => match plain_ping_data(text) {
                Some(data) => [br#"{"type":"pong","data":""#, data, br#""}"#].concat().into(),
                None => return self.on_frame(cx, ClientFrame::decode_text(text), out),
            },
        };
        self.unparsable = 0;
        // It counts, and is answered in any case.
        let _late = self.pay(cx);
        self.answer(Frame { json, body: None }, out);
    }

    /// One binary message.
    pub fn on_binary(&mut self, cx: &Context<'_>, bytes: &[u8], out: &mut Out) {
        self.on_frame(cx, ClientFrame::decode_binary(bytes), out);
    }

    /// The query of a handshake that brings no token: `connect` is to come.
    pub fn on_query(&mut self, hello: Hello) {
        if hello != Hello::default() {
            self.hello = Some(Box::new(hello));
        }
    }

    /// A handshake that brings a token.
    pub fn on_handshake(&mut self, cx: &Context<'_>, token: String, hello: Hello, out: &mut Out) {
        self.verify(cx, token, hello, out);
    }

    fn verify(&mut self, cx: &Context<'_>, token: String, hello: Hello, out: &mut Out) {
        if self.apply(cx, Event::Connect, out) == Effect::Verify {
            let device = hello.device.clone();
            self.hello = Some(Box::new(hello));
            out.push(Action::Verify { token, device, refresh: false });
        }
    }

    /// The verdict on the token of [`Action::Verify`].
    pub fn on_verdict(
        &mut self,
        cx: &Context<'_>,
        refresh: bool,
        verdict: Result<Grant, Denial>,
        fresh: Fresh,
        out: &mut Out,
    ) {
        if refresh {
            return self.on_refresh_verdict(cx, verdict, out);
        }
        if self.state != State::Verifying {
            return;
        }
        let hello = self.hello.take().unwrap_or_default();
        let open = verdict.map_err(Refusal::of_denial).and_then(|grant| {
            plan_open(&grant, &hello, fresh, cx.rules.same_device).map(|open| (grant, open))
        });
        let (grant, open) = match open {
            Ok(open) => open,
            Err(refusal) => return self.refuse(cx, refusal, out),
        };
        self.bound = Some(Box::new(Bound {
            user: open.user.clone(),
            device: open.device.clone(),
            session: fresh.session,
            login: fresh.login,
            issued_at: 0,
            expires_at: 0,
            ends_at: 0,
            claims: None,
        }));
        self.take_claims(cx, grant);
        if open.resume.is_some() {
            self.hello = Some(hello);
        }
        if self.apply(cx, Event::Verified, out) == Effect::Open {
            self.router_knows = true;
            out.push(Action::Up(Up::Open(open)));
        }
    }

    /// Notes what the token says about time and revocation.
    fn take_claims(&mut self, cx: &Context<'_>, grant: Grant) {
        let Some(bound) = &mut self.bound else { return };
        bound.issued_at = grant.issued_at;
        bound.expires_at = grant.expires_at;
        bound.ends_at = if grant.expires_at <= cx.now.wall_ms {
            grant.expires_at.saturating_add(CLOCK_SKEW_MS)
        } else {
            grant.expires_at
        };
        let rooms = grant.rooms.filter(|_| cx.rules.room_join == RoomJoin::Claim);
        let claims = Claims {
            token_id: grant.token_id,
            session_id: grant.session_id,
            rooms: rooms.map(|names| Box::new(RoomClaim(names))),
        };
        let any = claims.token_id.is_some() || claims.session_id.is_some() || claims.rooms.is_some();
        bound.claims = any.then(|| Box::new(claims));
        self.expiry_told = false;
    }

    fn on_refresh_verdict(&mut self, cx: &Context<'_>, verdict: Result<Grant, Denial>, out: &mut Out) {
        let Some(id) = self.refresh.take() else { return };
        let Some(bound) = self.bound.as_ref().filter(|_| self.state.is_open()) else { return };
        let fault = match verdict {
            Ok(grant) if grant.user != bound.user => Some((
                ErrorCode::IdentityMismatch,
                "the new token is for another user; open another connection for that one".to_owned(),
            )),
            Ok(grant) if grant.device.as_ref().is_some_and(|device| *device != bound.device) => Some((
                ErrorCode::IdentityMismatch,
                "the new token is for another device; open another connection for that one".to_owned(),
            )),
            Ok(grant) => {
                self.take_claims(cx, grant);
                None
            }
            Err(Denial::Unavailable(message)) => Some((ErrorCode::Unavailable, message)),
            Err(Denial::Token(message) | Denial::NoSubject(message)) => {
                Some((ErrorCode::Unauthenticated, message))
            }
        };
        match fault {
            Some((code, message)) => self.fail(Some("auth.refresh"), code, &message, Some(&id), out),
            None => {
                out.push(Action::Send(ServerFrame::Ok { id: &id, conversation_id: None }.encode()));
                // A short token may be about to run out already.
                self.on_timer(cx, out);
            }
        }
        self.judge_answered(cx, out);
    }

    /// The number of the next event of the router.
    pub fn next_no(&self) -> u64 {
        self.next_no
    }

    /// Whether an event of the router is the next one for this connection; if so it is taken.
    pub fn take_turn(&mut self, login: u64, no: u64) -> Turn {
        match &self.bound {
            Some(bound) if bound.login == login && self.router_knows => {}
            _ => return Turn::NotHere,
        }
        // Number 0 stands outside the order.
        if no == 0 {
            return Turn::Take;
        }
        match no.cmp(&self.next_no) {
            Ordering::Less => Turn::Had,
            Ordering::Equal => {
                self.next_no += 1;
                Turn::Take
            }
            Ordering::Greater => Turn::Early,
        }
    }

    /// The router has accepted the connection.
    pub fn on_accepted(&mut self, cx: &Context<'_>, resumed: bool, out: &mut Out) {
        if self.apply(cx, Event::Accepted, out) != Effect::Greet {
            return;
        }
        self.heard_ms = cx.now.mono_ms;
        let resume = self.hello.take().and_then(|hello| hello.resume);
        let Some(bound) = &mut self.bound else { return };
        if let Some(held) = resume.filter(|_| resumed).and_then(|text| u128::from_str_radix(&text, 16).ok()) {
            bound.session = held;
        }
        let connected = ServerFrame::Connected {
            session_id: &format!("{:032x}", bound.session),
            connection_id: &format!("{:016x}", cx.connection),
            user_id: &bound.user,
            device_id: &bound.device,
            node_id: &cx.rules.node_id,
            resumed,
            ping_after_ms: cx.rules.ping_after_ms,
            close_after_ms: cx.rules.close_after_ms,
            max_frame_bytes: cx.rules.max_frame_bytes as u64,
            server_time: cx.now.wall_ms,
            version: VERSION,
        };
        out.push(Action::Opened);
        out.push(Action::Send(connected.encode()));
        self.on_timer(cx, out);
    }

    /// The router has refused it.
    pub fn on_refused(&mut self, cx: &Context<'_>, code: CloseCode, out: &mut Out) {
        self.router_knows = false;
        self.refuse(cx, Refusal::of_router(code), out);
    }

    /// The router has decided so many frames.
    pub fn on_decided(&mut self, cx: &Context<'_>, count: u32, out: &mut Out) {
        self.undecided = self.undecided.saturating_sub(count);
        self.judge_marks(cx, out);
        self.judge_answered(cx, out);
    }

    /// The outbox holds so much, the socket having taken what it would.
    pub fn on_queue(&mut self, cx: &Context<'_>, bytes: usize, push_bytes: usize, out: &mut Out) {
        self.queued_bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        if self.state.is_open() && push_bytes > cx.rules.outbound_limit_bytes {
            self.slow = true;
            out.push(Action::CutQueue);
            return self.close(cx, CloseCode::SlowConsumer, None, None, out);
        }
        if push_bytes > 0 && !self.congested && self.router_knows && self.state.is_open() {
            self.congested = true;
            out.push(Action::Up(Up::Congested));
        }
        self.judge_marks(cx, out);
    }

    /// The outbox is empty.
    pub fn on_flushed(&mut self, cx: &Context<'_>, out: &mut Out) {
        self.queued_bytes = 0;
        if self.congested && self.router_knows {
            self.congested = false;
            out.push(Action::Up(Up::Flowing));
        }
        self.judge_marks(cx, out);
        self.step(cx, Event::Flushed, out);
    }

    /// Compares undecided frames and queued bytes with their marks.
    fn judge_marks(&mut self, cx: &Context<'_>, out: &mut Out) {
        let half = cx.rules.outbound_limit_bytes / 2;
        let queued = self.queued_bytes as usize;
        match self.state {
            State::Reading | State::Pinged
                if self.undecided > cx.rules.backpressure_high || queued > half =>
            {
                self.step(cx, Event::High, out);
            }
            State::Paused
                if self.undecided < cx.rules.backpressure_high.div_ceil(2) && queued <= half / 2 =>
            {
                self.step(cx, Event::Low, out);
            }
            _ => {}
        }
    }

    /// The node drains: the client is to come back elsewhere after its own delay.
    pub fn on_drain(&mut self, retry_after_ms: u64, reason: &str, out: &mut Out) {
        if self.state.is_open() && self.bound.is_some() {
            let frame = ServerFrame::SessionMigrate { retry_after_ms, target: None, reason };
            out.push(Action::Send(frame.encode()));
        }
    }

    /// The client's close frame came.
    pub fn on_peer_closed(&mut self, cx: &Context<'_>, out: &mut Out) {
        self.step(cx, Event::PeerClosed, out);
    }

    /// The client's output has ended; it may read on. What it asked for before is answered.
    pub fn on_peer_ended(&mut self, cx: &Context<'_>, out: &mut Out) {
        self.step(cx, Event::PeerEnded, out);
        self.judge_answered(cx, out);
    }

    fn judge_answered(&mut self, cx: &Context<'_>, out: &mut Out) {
        if self.undecided == 0 && self.refresh.is_none() {
            self.step(cx, Event::Answered, out);
        }
    }

    /// The socket has failed.
    pub fn on_peer_gone(&mut self, cx: &Context<'_>, out: &mut Out) {
        self.step(cx, Event::PeerGone, out);
    }

    /// The server ends the connection.
    pub fn close(
        &mut self,
        cx: &Context<'_>,
        code: CloseCode,
        reason: Option<Arc<str>>,
        retry_after_ms: Option<u64>,
        out: &mut Out,
    ) {
        if let Effect::Farewell(code) = self.apply(cx, Event::Close(code), out) {
            out.push(Action::Close { code, reason, retry_after_ms, refusal: None });
        }
    }

    /// The connection is refused while it opens.
    pub fn refuse(&mut self, cx: &Context<'_>, refusal: Refusal, out: &mut Out) {
        let first = out.len();
        if let Effect::Farewell(code) = self.apply(cx, Event::Close(refusal.close), out) {
            // It is counted by the reason that the client is told.
            for action in &mut out[first..] {
                if let (Action::Ended { code, .. }, Some(told)) = (action, refusal.told_as) {
                    *code = told;
                }
            }
            let retry_after_ms = refusal.retry_after_ms;
            let reason = refusal.told_as.map(|told| Arc::from(told.reason()));
            out.push(Action::Close { code, reason, retry_after_ms, refusal: Some(Box::new(refusal)) });
        }
    }

    // Frames.

    fn on_frame(&mut self, cx: &Context<'_>, frame: Result<ClientFrame, DecodeError>, out: &mut Out) {
        if self.state == State::Waiting {
            return self.on_first_frame(cx, frame, out);
        }
        if !self.state.is_open() {
            return;
        }
        let paid = self.pay(cx);
        let frame = match frame {
            Ok(frame) => frame,
            Err(error) => return self.on_undecodable(cx, error, paid, out),
        };
        self.unparsable = 0;
        if let (Err(wait_ms), false) = (paid, is_free(&frame)) {
            return too_fast(Some(frame.name()), frame_id(&frame), wait_ms, out);
        }
        match frame {
            ClientFrame::Ping { data } => self.pong(data.as_deref(), out),
            ClientFrame::Pong => {}
            ClientFrame::Connect(connect) => {
                let message = "this connection has its identity; open another one for another identity";
                let id = connect.id.as_deref();
                self.fail(Some("connect"), ErrorCode::IdentityMismatch, message, id, out);
            }
            ClientFrame::AuthRefresh { id, token } => self.on_refresh(id, token, out),
            ClientFrame::Room(request) => self.on_room(cx, request, out),
            frame => self.forward(cx, frame, out),
        }
    }

    /// Before there is an identity only `connect` and `ping` may come.
    fn on_first_frame(&mut self, cx: &Context<'_>, frame: Result<ClientFrame, DecodeError>, out: &mut Out) {
        let (message, id) = match &frame {
            Ok(ClientFrame::Ping { data }) => return self.pong(data.as_deref(), out),
            Ok(other) => (format!("send connect before {}", other.name()), frame_id(other)),
            Err(error) => (format!("send connect first: {}", error.message), error.id.as_deref()),
        };
        if let Ok(ClientFrame::Connect(connect)) = frame {
            return self.on_connect(cx, connect, out);
        }
        self.fail(None, ErrorCode::Unauthenticated, &message, id, out);
        self.close(cx, CloseCode::Unauthenticated, None, None, out);
    }

    fn on_connect(&mut self, cx: &Context<'_>, connect: Connect, out: &mut Out) {
        if connect.version != VERSION {
            let reason = Arc::from(format!("version: this server speaks {VERSION}"));
            return self.close(cx, CloseCode::Version, Some(reason), None, out);
        }
        let hello = Hello::from_connect(&connect, self.hello.take());
        self.verify(cx, connect.token, hello, out);
    }

    fn on_undecodable(&mut self, cx: &Context<'_>, error: DecodeError, paid: Result<(), u64>, out: &mut Out) {
        self.unparsable = if error.unparsable { self.unparsable + 1 } else { 0 };
        match paid {
            Ok(()) => self.fail(None, error.code, &error.message, error.id.as_deref(), out),
            Err(wait_ms) => too_fast(None, error.id.as_deref(), wait_ms, out),
        }
        if self.unparsable >= UNPARSABLE_MAX {
            self.close(cx, CloseCode::Policy, None, None, out);
        }
    }

    fn on_refresh(&mut self, id: String, token: String, out: &mut Out) {
        if self.refresh.is_some() {
            let message = "the refresh before is still being judged";
            return self.fail(Some("auth.refresh"), ErrorCode::RateLimited, message, Some(&id), out);
        }
        self.refresh = Some(id.into());
        let device = self.device().cloned();
        out.push(Action::Verify { token, device, refresh: true });
    }

    /// Sends a frame up, unless it claims to be from somebody else.
    fn forward(&mut self, cx: &Context<'_>, frame: ClientFrame, out: &mut Out) {
        if let ClientFrame::MsgSend { send } = &frame
            && let Some(claimed) = &send.from
            && self.user().is_none_or(|user| user.as_str() != claimed)
        {
            out.push(Action::Mismatch { claimed: claimed.clone() });
            let message = "from is not the user of this connection; leave it out";
            return self.fail(Some("msg.send"), ErrorCode::IdentityMismatch, message, Some(&send.id), out);
        }
        self.undecided += 1;
        out.push(Action::Up(Up::Frame(frame)));
        self.judge_marks(cx, out);
    }

    /// Rooms are the gateway's own: what comes of them is not the router's to decide.
    fn on_room(&mut self, cx: &Context<'_>, request: RoomRequest, out: &mut Out) {
        if let RoomRequest::Send { id, from: Some(claimed), .. } = &request
            && self.user().is_none_or(|user| user.as_str() != claimed)
        {
            out.push(Action::Mismatch { claimed: claimed.clone() });
            let message = "from is not the user of this connection; leave it out";
            return self.fail(Some("room.send"), ErrorCode::IdentityMismatch, message, Some(id), out);
        }
        if let RoomRequest::Join { id, room, .. } = &request {
            match cx.rules.room_join {
                RoomJoin::Any => {}
                RoomJoin::Claim if self.claims_room(room) => {}
                RoomJoin::Claim => {
                    let message = "the token does not name this room in its claim rooms";
                    return self.fail(Some("room.join"), ErrorCode::Forbidden, message, Some(id), out);
                }
                RoomJoin::Hook => self.undecided += 1,
            }
        }
        out.push(Action::Room(request));
        self.judge_marks(cx, out);
    }

    fn claims_room(&self, room: &str) -> bool {
        let rooms = self.claims().and_then(|claims| claims.rooms.as_ref());
        rooms.is_some_and(|rooms| rooms.names(room))
    }

    /// Takes a frame's share of `frames_per_second`; the error says how long to wait.
    fn pay(&mut self, cx: &Context<'_>) -> Result<(), u64> {
        const BURST_US: u64 = 1_000_000;
        if cx.rules.frames_per_second == 0 {
            return Ok(());
        }
        let now_us = cx.now.mono_ms * 1000;
        let until_us = self.paid_until_us.max(now_us) + BURST_US / u64::from(cx.rules.frames_per_second);
        if until_us > now_us + BURST_US {
            return Err((until_us - now_us - BURST_US).div_ceil(1000));
        }
        self.paid_until_us = until_us;
        Ok(())
    }

    // Answers and transitions.

    fn answer(&mut self, frame: Frame, out: &mut Out) {
        if self.state.is_active() {
            out.push(Action::Send(frame));
        }
    }

    fn pong(&mut self, data: Option<&str>, out: &mut Out) {
        self.answer(ServerFrame::Pong { data }.encode(), out);
    }

    fn fail(
        &mut self,
        frame: Option<&'static str>,
        code: ErrorCode,
        message: &str,
        id: Option<&str>,
        out: &mut Out,
    ) {
        let retry_after_ms = code.is_temporary().then_some(crate::rules::RETRY_AFTER_MS);
        out.push(Action::Failed { frame, code });
        out.push(Action::Send(ServerFrame::Error { code, message, id, retry_after_ms }.encode()));
    }

    /// Goes through the table and does what follows for the counters; the effect is the caller's.
    fn apply(&mut self, cx: &Context<'_>, event: Event, out: &mut Out) -> Effect {
        let before = self.state;
        let (after, effect) = before.next(event);
        if before == after {
            return effect;
        }
        self.state = after;
        self.since_ms = cx.now.mono_ms;
        if before == State::Paused {
            // What was sent meanwhile lies unread in the socket; silence is counted from here.
            self.heard_ms = cx.now.mono_ms;
            out.push(Action::Resumed);
        }
        if before.is_active() && !after.is_active() {
            let code = match effect {
                Effect::Farewell(code) => code,
                _ => CloseCode::Bye,
            };
            if self.router_knows {
                out.push(Action::Up(Up::Closed(code)));
                self.router_knows = false;
            }
            (self.hello, self.refresh) = (None, None);
            out.push(Action::Ended { code, open: before.is_open() && self.bound.is_some() });
        }
        effect
    }

    /// A transition whose effect needs no more than the effect itself.
    fn step(&mut self, cx: &Context<'_>, event: Event, out: &mut Out) {
        let opening = matches!(self.state, State::Verifying | State::Opening);
        match self.apply(cx, event, out) {
            Effect::Farewell(code) => {
                let refusal = opening.then(|| Box::new(Refusal::overloaded()));
                let retry_after_ms = refusal.as_ref().and_then(|refusal| refusal.retry_after_ms);
                out.push(Action::Close { code, reason: None, retry_after_ms, refusal });
            }
            Effect::Ping => out.push(Action::Ping),
            Effect::Pause => out.push(Action::Paused),
            Effect::AnswerClose => out.push(Action::AnswerClose),
            Effect::EndOutput => out.push(Action::EndOutput),
            Effect::Drop => out.push(Action::Drop),
            // The others follow from events that are applied where they happen.
            Effect::None | Effect::Resume | Effect::Verify | Effect::Open | Effect::Greet => {}
        }
    }
}

fn too_fast(frame: Option<&'static str>, id: Option<&str>, wait_ms: u64, out: &mut Out) {
    let message = "more frames per second than this server takes from one connection";
    let (code, retry_after_ms) = (ErrorCode::RateLimited, Some(wait_ms));
    out.push(Action::Failed { frame, code });
    out.push(Action::Send(ServerFrame::Error { code, message, id, retry_after_ms }.encode()));
}

/// Whether a frame counts but is never refused for coming too fast: the heartbeat goes on whatever else is sent, and a
/// position that is lost would not be told again.
fn is_free(frame: &ClientFrame) -> bool {
    use ClientFrame::{MsgRead, MsgRecv, Ping, Pong};
    matches!(frame, Ping { .. } | Pong | MsgRecv { .. } | MsgRead { .. })
}

/// The `data` of a ping in its usual form, when it can be sent back as it stands.
fn plain_ping_data(text: &[u8]) -> Option<&[u8]> {
    let data = text.strip_prefix(br#"{"type":"ping","data":""#)?.strip_suffix(br#""}"#)?;
    let plain =
        data.len() <= PING_DATA_BYTES_MAX && data.iter().all(|byte| !matches!(byte, b'"' | b'\\' | ..b' '));
    plain.then_some(data)
}

/// The `id` of a frame, which an error repeats.
fn frame_id(frame: &ClientFrame) -> Option<&str> {
    match frame {
        ClientFrame::Connect(connect) => connect.id.as_deref(),
        ClientFrame::MsgRecv { id, .. } | ClientFrame::MsgRead { id, .. } => id.as_deref(),
        ClientFrame::MsgSend { send } => Some(&send.id),
        ClientFrame::History { id, .. }
        | ClientFrame::ConversationList { id, .. }
        | ClientFrame::ConversationCreate { id, .. }
        | ClientFrame::ConversationClear { id, .. }
        | ClientFrame::GroupAdd { id, .. }
        | ClientFrame::GroupRemove { id, .. }
        | ClientFrame::GroupRole { id, .. }
        | ClientFrame::GroupRename { id, .. }
        | ClientFrame::GroupLeave { id, .. } => Some(id),
        ClientFrame::AuthRefresh { id, .. } => Some(id),
        ClientFrame::Room(request) => Some(request.id()),
        ClientFrame::Ping { .. } | ClientFrame::Pong => None,
    }
}

#[cfg(test)]
mod tests;
