//! Gateways: the driver of the product's sessions. It frames nothing and decides nothing; like the shards of the real
//! gateway it carries out what a session asks for, and keeps what the downlink brings before its turn.

use crate::{
    plants::Plant,
    socket::Socket,
    world::{Event, World},
};
use bowline_protocol::{
    CloseCode, DeviceId, Frame, ServerFrame, UserId,
    link::{Answer, ConnRef, Down, NodeRef, SameDevice, Target, Up, Uplink},
};
use bowline_session::{Action, Context, Denial, Fresh, Grant, Now, RoomJoin, Rules, Session, State, Turn};
use bytes::{BufMut, Bytes, BytesMut};
use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};

/// Events of one connection that are held until those before them have come; as the real gateway has it.
const EARLY_EVENTS_MAX: usize = 1024;
/// A gateway notices within this time that another router took over.
pub const NOTICE_MS: u64 = 800;

/// What travels between a client and its gateway.
#[derive(Debug, Clone)]
pub enum Wire {
    Text(Bytes),
    /// A header and a body.
    Binary(Bytes),
    Close(u16),
    /// The other side is gone.
    End,
}

pub struct Gateway {
    number: usize,
    pub node: Arc<NodeRef>,
    pub is_up: bool,
    pub boot: u32,
    pub conns: BTreeMap<u64, Conn>,
    next_conn: u64,
    last_login: u64,
    /// The router that its uplink leads to.
    pub router: usize,
    /// How wrong its wall clock is.
    pub offset: i64,
    /// For each connection, when what it said last arrives at the router.
    lanes: BTreeMap<u64, u64>,
    rules: Rules,
}

pub struct Conn {
    session: Session,
    socket: usize,
    /// Input that the session does not read yet.
    input: VecDeque<Wire>,
    output: VecDeque<(Wire, bool)>,
    pub is_stalled: bool,
    timer: u64,
    early: BTreeMap<u64, (u64, Down)>,
    /// For a planted fault.
    loses_next: bool,
}

impl Gateway {
    pub fn new(number: usize) -> Self {
        let rules = Rules {
            node_id: Arc::from(format!("n{number}")),
            ping_after_ms: 20_000,
            ping_jitter_ms: 2_000,
            close_after_ms: 40_000,
            backpressure_high: 16,
            backpressure_timeout_ms: 30_000,
            outbound_limit_bytes: 2_000,
            max_frame_bytes: 32 * 1024,
            frames_per_second: 0,
            same_device: SameDevice::Replace,
            room_join: RoomJoin::Any,
        };
        let mut gateway = Self {
            number,
            node: Arc::new(NodeRef { node_id: rules.node_id.clone(), boot_id: "".into() }),
            is_up: true,
            boot: 0,
            conns: BTreeMap::new(),
            next_conn: 0,
            last_login: 0,
            router: 0,
            offset: 0,
            lanes: BTreeMap::new(),
            rules,
        };
        gateway.begin_life();
        gateway
    }

    fn begin_life(&mut self) {
        self.boot += 1;
        let boot_id = Arc::from(format!("n{}b{}", self.number, self.boot));
        self.node = Arc::new(NodeRef { node_id: self.rules.node_id.clone(), boot_id });
        self.is_up = true;
        (self.next_conn, self.last_login) = (0, 0);
        self.conns.clear();
        self.lanes.clear();
    }
}

/// A frame as it travels.
fn wire_of(frame: &Frame) -> Wire {
    match &frame.body {
        None => Wire::Text(frame.json.clone()),
        Some(body) => {
            let mut bytes = BytesMut::with_capacity(4 + frame.len());
            bytes.put_u32(frame.json.len() as u32);
            bytes.put_slice(&frame.json);
            bytes.put_slice(body);
            Wire::Binary(bytes.freeze())
        }
    }
}

fn bytes_of(wire: &Wire) -> usize {
    match wire {
        Wire::Text(bytes) | Wire::Binary(bytes) => bytes.len(),
        Wire::Close(_) | Wire::End => 2,
    }
}

impl World {
    pub fn start_gateway(&mut self, gateway: usize) {
        let latest = self.routers.len() - 1;
        let owner = self.owner.unwrap_or(latest);
        let found = &mut self.gateways[gateway];
        if found.is_up {
            return;
        }
        found.begin_life();
        found.router = owner;
        self.note(|| format!("gateway {gateway} is up again"));
    }

    /// The process ends: its sockets are closed by the kernel, and nobody else is told.
    pub fn crash_gateway(&mut self, gateway: usize) {
        let found = &mut self.gateways[gateway];
        found.is_up = false;
        let sockets: Vec<usize> = std::mem::take(&mut found.conns).values().map(|c| c.socket).collect();
        for socket in sockets {
            self.send_to_client(socket, Wire::End);
        }
    }

    /// A client connects. Returns the socket, when somebody listens.
    pub fn accept(&mut self, gateway: usize, device: usize, life: u64) -> Option<usize> {
        let (now, random) = (self.session_now(gateway), self.rng.next() as u32);
        let found = &mut self.gateways[gateway];
        if !found.is_up {
            return None;
        }
        found.next_conn += 1;
        let conn = found.next_conn;
        let socket = self.sockets.len();
        let session = Session::new(&found.rules, now, random);
        let new = Conn {
            session,
            socket,
            input: VecDeque::new(),
            output: VecDeque::new(),
            is_stalled: false,
            timer: u64::MAX,
            early: BTreeMap::new(),
            loses_next: false,
        };
        found.conns.insert(conn, new);
        let boot = found.boot;
        self.sockets.push(Socket::new(device, life, gateway, boot, conn));
        self.set_session_timer(gateway, conn);
        Some(socket)
    }

    fn session_now(&self, gateway: usize) -> Now {
        Now { mono_ms: self.now, wall_ms: self.wall(self.gateways[gateway].offset) }
    }

    /// Lets a session take something, and carries out what follows.
    fn with_session(
        &mut self,
        gateway: usize,
        conn: u64,
        take: impl FnOnce(&mut Session, &Context<'_>, &mut Vec<Action>),
    ) {
        let now = self.session_now(gateway);
        let mut actions = Vec::new();
        let found = &mut self.gateways[gateway];
        let Some(entry) = found.conns.get_mut(&conn) else { return };
        let cx = Context { rules: &found.rules, now, connection: conn };
        take(&mut entry.session, &cx, &mut actions);
        for action in actions {
            self.carry_out_session(gateway, conn, action);
        }
    }

    /// After anything that happened to a connection: reads on, writes, sets the timer.
    fn after_session(&mut self, gateway: usize, conn: u64) {
        self.read_on(gateway, conn);
        self.flush(gateway, conn);
        self.set_session_timer(gateway, conn);
    }

    fn carry_out_session(&mut self, gateway: usize, conn: u64, action: Action) {
        let boot = self.gateways[gateway].boot;
        let Some(entry) = self.gateways[gateway].conns.get_mut(&conn) else { return };
        match action {
            Action::Verify { token, .. } => {
                let delay = self.rng.below(5);
                self.after(delay, Event::Judged { gateway, boot, conn, token });
            }
            Action::Up(event) => {
                let login = entry.session.login();
                self.send_up(gateway, conn, login, event);
            }
            Action::Send(frame) => entry.output.push_back((wire_of(&frame), false)),
            Action::Ping => entry.output.push_back((wire_of(&ServerFrame::Ping.encode()), false)),
            Action::CutQueue => entry.output.clear(),
            Action::Close { code, reason, retry_after_ms, .. } => {
                let frame = ServerFrame::closed(code, reason.as_deref(), retry_after_ms).encode();
                entry.output.push_back((wire_of(&frame), false));
                entry.output.push_back((Wire::Close(code.code()), false));
                self.note(|| format!("gateway {gateway} closes connection {conn}: {}", code.reason()));
            }
            Action::AnswerClose => entry.output.push_back((Wire::Close(1000), false)),
            Action::Drop => {
                let socket = entry.socket;
                self.gateways[gateway].conns.remove(&conn);
                self.send_to_client(socket, Wire::End);
            }
            // No client of these is in a room.
            Action::Room(_)
            | Action::Opened
            | Action::Ended { .. }
            | Action::Paused
            | Action::Resumed
            | Action::EndOutput
            | Action::Failed { .. }
            | Action::Mismatch { .. } => {}
        }
    }

    fn send_up(&mut self, gateway: usize, conn: u64, login: u64, event: Up) {
        let mut conn = conn;
        let mut login = login;
        if self.plant == Some(Plant::WrongSender) && matches!(event, Up::Frame(_)) && self.rng.chance(50) {
            let others = self.gateways[gateway].conns.iter().map(|(n, c)| (*n, c.session.login()));
            let others: Vec<(u64, u64)> = others.filter(|(_, login)| *login > 0).collect();
            (conn, login) = *self.rng.pick(&others);
        }
        let from = ConnRef { node: self.gateways[gateway].node.clone(), connection: conn, login };
        let is_twice = self.rng.chance(self.plan.network.twice);
        let delay = self.rng.range(0, self.plan.network.link_ms);
        let found = &mut self.gateways[gateway];
        // The uplink keeps the order of a connection, and may bring a message twice.
        let lane = found.lanes.entry(conn).or_default();
        let at = (self.now + delay).max(*lane);
        *lane = at;
        let router = found.router;
        let uplink = Uplink { from, event };
        if is_twice {
            self.at(at, Event::Up { router, uplink: uplink.clone() });
        }
        self.at(at, Event::Up { router, uplink });
    }

    /// A request of the API of this node.
    pub fn send_request(&mut self, gateway: usize, request: bowline_protocol::link::Request) -> Option<u64> {
        if !self.gateways[gateway].is_up {
            return None;
        }
        self.next_id += 1;
        let request_id = self.next_id;
        self.send_up(gateway, 0, 0, Up::Request { request_id, request });
        Some(request_id)
    }

    pub fn on_judged(&mut self, gateway: usize, boot: u32, conn: u64, token: &str) {
        if !self.is_life(gateway, boot) {
            return;
        }
        let wall = self.wall(self.gateways[gateway].offset);
        let session = u128::from(self.rng.next());
        let found = &mut self.gateways[gateway];
        found.last_login = (wall * 1000).max(found.last_login + 1);
        let fresh = Fresh { login: found.last_login, session };
        let verdict = match token.strip_prefix("token of ") {
            Some(user) => Ok(Grant {
                user: UserId::trusted(user),
                device: None::<DeviceId>,
                class: None,
                expires_at: wall + 1_000_000_000,
                issued_at: wall,
                token_id: None,
                session_id: None,
                rooms: None,
            }),
            None => Err(Denial::Token("no token of this server".into())),
        };
        self.with_session(gateway, conn, |session, cx, out| {
            session.on_verdict(cx, false, verdict, fresh, out);
        });
        self.after_session(gateway, conn);
    }

    fn is_life(&self, gateway: usize, boot: u32) -> bool {
        self.gateways[gateway].is_up && self.gateways[gateway].boot == boot
    }

    /// Something came from a client.
    pub fn on_gateway_wire(&mut self, socket: usize, wire: Wire) {
        let Socket { gateway, boot, conn, is_cut, .. } = self.sockets[socket];
        if !self.is_life(gateway, boot) || (is_cut && !matches!(wire, Wire::End)) {
            return;
        }
        match wire {
            Wire::End => {
                self.with_session(gateway, conn, |session, cx, out| session.on_peer_gone(cx, out));
            }
            wire => {
                self.with_session(gateway, conn, |session, cx, out| session.on_bytes(cx, out));
                if let Some(entry) = self.gateways[gateway].conns.get_mut(&conn) {
                    entry.input.push_back(wire);
                }
            }
        }
        self.after_session(gateway, conn);
    }

    /// Gives a session its input, as far as it reads.
    fn read_on(&mut self, gateway: usize, conn: u64) {
        while let Some(entry) = self.gateways[gateway].conns.get_mut(&conn) {
            let state = entry.session.state();
            if !state.reads_frames() && state.is_active() {
                return;
            }
            let Some(wire) = entry.input.pop_front() else { return };
            let discards = !state.is_active();
            self.with_session(gateway, conn, |session, cx, out| match wire {
                Wire::Close(_) => session.on_peer_closed(cx, out),
                _ if discards => {}
                Wire::Text(text) => session.on_text(cx, &text, out),
                Wire::Binary(bytes) => session.on_binary(cx, &bytes, out),
                Wire::End => {}
            });
        }
    }

    /// Writes what is queued, unless the client does not read.
    fn flush(&mut self, gateway: usize, conn: u64) {
        loop {
            let Some(entry) = self.gateways[gateway].conns.get_mut(&conn) else { return };
            if entry.is_stalled && !entry.output.is_empty() {
                let bytes = |push: bool| -> usize {
                    entry.output.iter().filter(|(_, p)| *p || !push).map(|(wire, _)| bytes_of(wire)).sum()
                };
                let (all, pushes) = (bytes(false), bytes(true));
                // It may be closed for being slow; what is said then waits for the socket all the same.
                return self.with_session(gateway, conn, |session, cx, out| {
                    session.on_queue(cx, all, pushes, out);
                });
            }
            let is_leaving = entry.session.state() == State::Leaving;
            if entry.output.is_empty() && !is_leaving {
                return;
            }
            let socket = entry.socket;
            for (wire, _) in std::mem::take(&mut entry.output) {
                self.send_to_client(socket, wire);
            }
            self.with_session(gateway, conn, |session, cx, out| session.on_flushed(cx, out));
        }
    }

    /// The client reads again.
    pub fn unstall(&mut self, socket: usize) {
        let Socket { gateway, boot, conn, .. } = self.sockets[socket];
        if !self.is_life(gateway, boot) {
            return;
        }
        if let Some(entry) = self.gateways[gateway].conns.get_mut(&conn).filter(|e| e.is_stalled) {
            entry.is_stalled = false;
            self.after_session(gateway, conn);
        }
    }

    fn set_session_timer(&mut self, gateway: usize, conn: u64) {
        let now = self.session_now(gateway);
        let found = &mut self.gateways[gateway];
        let boot = found.boot;
        let Some(entry) = found.conns.get_mut(&conn) else { return };
        let due = entry.session.deadline_ms(&found.rules, now);
        if due < entry.timer {
            entry.timer = due;
            self.at(due.max(self.now + 1), Event::SessionTimer { gateway, boot, conn });
        }
    }

    pub fn on_session_timer(&mut self, gateway: usize, boot: u32, conn: u64) {
        if !self.is_life(gateway, boot) {
            return;
        }
        let Some(entry) = self.gateways[gateway].conns.get_mut(&conn) else { return };
        if entry.timer > self.now {
            // An earlier deadline was set since, and has its own event.
            return;
        }
        entry.timer = u64::MAX;
        self.with_session(gateway, conn, |session, cx, out| session.on_timer(cx, out));
        self.after_session(gateway, conn);
    }

    /// The gateway learns that another router took over: the connections of the old one have to open again.
    pub fn on_router_noticed(&mut self, gateway: usize, boot: u32, router: usize) {
        if !self.is_life(gateway, boot) || self.gateways[gateway].router >= router {
            return;
        }
        self.gateways[gateway].router = router;
        self.note(|| format!("gateway {gateway} turns to router {router}"));
        let conns: Vec<u64> = self.gateways[gateway].conns.keys().copied().collect();
        for conn in conns {
            self.with_session(gateway, conn, |session, cx, out| {
                session.close(cx, CloseCode::Shutdown, None, None, out);
            });
            self.after_session(gateway, conn);
        }
    }

    /// Something came from a router.
    pub fn on_down(&mut self, router: usize, node: &Arc<NodeRef>, target: Option<Target>, event: Down) {
        let gateway = self.gateways.iter().position(|g| g.node.node_id == node.node_id).unwrap_or(0);
        let is_here = self.gateways[gateway].is_up && self.gateways[gateway].node == *node;
        let takes_any = self.plant == Some(Plant::EarlierBoot) && self.gateways[gateway].is_up;
        let Some(mut target) = target else {
            if let (true, Down::Answer { request_id, answer }) = (is_here, event) {
                self.on_answer(request_id, &answer);
            }
            return;
        };
        if !is_here && !takes_any {
            // Nobody of that life is there: the link says so.
            let from = ConnRef { node: node.clone(), connection: target.connection, login: target.login };
            let event = Up::NotHere { no: target.no, event: Box::new(event), gone: true };
            let delay = self.rng.range(0, self.plan.network.link_ms);
            return self.after(delay, Event::Up { router, uplink: Uplink { from, event } });
        }
        if !is_here && let Some(entry) = self.gateways[gateway].conns.get(&target.connection) {
            target.login = entry.session.login();
            target.no = entry.session.next_no();
        }
        self.take(gateway, target, event);
        self.take_early(gateway, target.connection);
        self.after_session(gateway, target.connection);
    }

    fn take(&mut self, gateway: usize, target: Target, event: Down) {
        let Target { connection, login, no } = target;
        let out_of_order = self.plant == Some(Plant::OutOfOrder);
        let found = &mut self.gateways[gateway];
        let turn = match found.conns.get_mut(&connection) {
            Some(entry) if out_of_order && entry.session.login() == login => Turn::Take,
            Some(entry) => entry.session.take_turn(login, no),
            None => Turn::NotHere,
        };
        match turn {
            Turn::Take => self.take_event(gateway, connection, event),
            Turn::Had => {}
            Turn::Early if found.conns[&connection].early.len() < EARLY_EVENTS_MAX => {
                if let Some(entry) = found.conns.get_mut(&connection) {
                    entry.early.insert(no, (login, event));
                }
            }
            Turn::Early | Turn::NotHere => {
                let gone = turn == Turn::NotHere;
                self.send_up(gateway, connection, login, Up::NotHere { no, event: Box::new(event), gone });
            }
        }
    }

    /// What was missing has come: takes what was held behind it.
    fn take_early(&mut self, gateway: usize, connection: u64) {
        while let Some(entry) = self.gateways[gateway].conns.get_mut(&connection) {
            let no = entry.session.next_no();
            let Some((login, event)) = entry.early.remove(&no) else {
                entry.early.retain(|held, _| *held > no);
                return;
            };
            self.take(gateway, Target { connection, login, no }, event);
        }
    }

    fn take_event(&mut self, gateway: usize, conn: u64, event: Down) {
        let loses = self.plant == Some(Plant::PushLost) && self.rng.chance(100);
        if let (Down::Accepted { resumed: true }, Some(Plant::ResumeHole)) = (&event, self.plant)
            && let Some(entry) = self.gateways[gateway].conns.get_mut(&conn)
        {
            entry.loses_next = true;
        }
        if let Down::Frame { frame, decided, answer } = &event {
            let Some(entry) = self.gateways[gateway].conns.get_mut(&conn) else { return };
            let loses = loses || (!*answer && std::mem::take(&mut entry.loses_next));
            if entry.session.state().is_open() && (*answer || !loses) {
                entry.output.push_back((wire_of(frame), !answer));
            }
            if *decided == 0 {
                return;
            }
        }
        self.with_session(gateway, conn, |session, cx, out| match event {
            Down::Frame { decided, .. } => session.on_decided(cx, decided, out),
            Down::Accepted { resumed } => session.on_accepted(cx, resumed, out),
            Down::Refused(code) => session.on_refused(cx, code, out),
            Down::Decided(count) => session.on_decided(cx, count, out),
            Down::Close { code, reason } => session.close(cx, code, reason, None, out),
            Down::Answer { .. } => {}
        });
    }

    /// An answer to the API.
    fn on_answer(&mut self, request_id: u64, answer: &Answer) {
        let Some(asked) = self.api.remove(&request_id) else { return };
        match (asked, answer) {
            (Some((id, user)), Answer::Stored { conversation_id, seq, ts }) => {
                let checked =
                    crate::checks::acknowledged(&self.model, &user, &id, conversation_id, *seq, *ts);
                self.check(checked);
            }
            (None, Answer::Stored { .. }) => {
                self.fail("answers", format!("request {request_id} was answered as a message"));
            }
            _ => {}
        }
    }
}
