//! A worker thread and its connections.
//!
//! One turn of the loop: wait for sockets, mail or time; take the mail; fire what is due; read what can be read;
//! offer the router what came of it; write what is queued. Every step is bounded, so that no connection keeps
//! the others waiting: a turn reads one buffer of a connection, and what is left comes in the next turn.
//!
//! Sockets are registered once, for both directions, and report changes only. What is known to be readable and was
//! not read, because its turn was over or the connection is paused, is remembered in the connection.

mod accept;
mod act;
pub mod conn;
mod down;
mod fanout;
mod head;
pub mod id;
pub mod mail;
mod read;
mod rooms;
pub mod socket;
mod sweep;
mod write;

use crate::{
    metrics::{Count, Counters},
    shared::{Http, Shared},
    slots::Slots,
    wheel::Wheel,
};
use bowline_links::Uplinks;
use bowline_protocol::{
    link::{ConnRef, Up, Uplink},
    ws::deflate::{Deflater, Inflater},
};
use bowline_session::{Action, Context, Fresh, Now, Outbox};
use conn::Conn;
use down::Early;
use mail::Mail;
use mio::{Events, Interest, Poll, Token, Waker};
use std::{
    collections::{BTreeMap, HashMap},
    io,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};
use sweep::Sweep;

const WAKER: Token = Token(usize::MAX);
const HTTP_LISTENER: Token = Token(usize::MAX - 1);
const TCP_LISTENER: Token = Token(usize::MAX - 2);

/// Events taken from the poll in one turn.
const EVENTS: usize = 1024;
/// The shared read buffer: what a turn reads of one connection.
const READ_BYTES: usize = 64 << 10;
/// Outboxes that are kept for the next use.
const SPARE_OUTBOXES: usize = 256;
/// How soon a full router is asked again.
const RETRY_MS: u64 = 2;
/// A turn that takes longer than this, for so long, is overload.
const LATE_MS: u64 = 500;
const LATE_FOR_MS: u64 = 2_000;

pub struct Shard {
    number: usize,
    poll: Poll,
    shared: Arc<Shared>,
    uplinks: Arc<dyn Uplinks>,
    http: Http,
    doors: Option<accept::Doors>,
    conns: Slots<Conn>,
    wheel: Wheel,
    now: Now,
    buffer: Vec<u8>,
    deflater: Deflater,
    inflater: Inflater,
    /// Connections with something to read, and those that wait for the router.
    to_read: Vec<u32>,
    stalled: Vec<u32>,
    to_flush: Vec<u32>,
    /// What the connection at hand asks for.
    actions: Vec<Action>,
    /// The code of the client's close frame that is to be answered.
    peer_code: Option<u16>,
    /// By slot, what came before its turn; see `down`.
    early: HashMap<u32, BTreeMap<u64, Early>>,
    /// What goes up, and whether the router's queue had no room for all of it.
    up: Vec<Uplink>,
    blocked: bool,
    // Boxed as the connections have them.
    #[allow(clippy::vec_box)]
    spare_outboxes: Vec<Box<Outbox>>,
    mail: Vec<Mail>,
    sweeps: Vec<Sweep>,
    rooms: rooms::LocalRooms,
    /// When the drain closes what is left.
    drain_deadline_ms: Option<u64>,
    late_since_ms: Option<u64>,
    /// When the next forged frame is logged.
    mismatch_log_ms: u64,
    /// When the next connection that could not be accepted is logged.
    accept_log_ms: u64,
    entropy: Entropy,
    stopping: bool,
}

impl Shard {
    pub fn poll() -> io::Result<(Poll, Arc<Waker>)> {
        let poll = Poll::new()?;
        let waker = Arc::new(Waker::new(poll.registry(), WAKER)?);
        Ok((poll, waker))
    }

    pub fn new(
        number: usize,
        poll: Poll,
        listeners: Option<(mio::net::TcpListener, Option<mio::net::TcpListener>)>,
        shared: Arc<Shared>,
        uplinks: Arc<dyn Uplinks>,
        http: Http,
    ) -> io::Result<Self> {
        let doors = listeners.map(|(http, tcp)| accept::Doors::open(&poll, http, tcp)).transpose()?;
        let now = shared.clock.now();
        Ok(Self {
            number,
            poll,
            uplinks,
            http,
            doors,
            conns: Slots::default(),
            wheel: Wheel::new(now.mono_ms),
            now,
            buffer: vec![0; READ_BYTES],
            deflater: Deflater::default(),
            inflater: Inflater::default(),
            to_read: Vec::new(),
            stalled: Vec::new(),
            to_flush: Vec::new(),
            actions: Vec::new(),
            peer_code: None,
            early: HashMap::new(),
            up: Vec::new(),
            blocked: false,
            spare_outboxes: Vec::new(),
            mail: Vec::new(),
            sweeps: Vec::new(),
            rooms: rooms::LocalRooms::default(),
            drain_deadline_ms: None,
            late_since_ms: None,
            mismatch_log_ms: 0,
            accept_log_ms: 0,
            entropy: Entropy::default(),
            stopping: false,
            shared,
        })
    }

    /// Runs until it is told to stop.
    pub fn run(mut self) {
        let mut events = Events::with_capacity(EVENTS);
        while !self.stopping {
            let timeout = self.timeout();
            if let Err(error) = self.poll.poll(&mut events, Some(timeout))
                && error.kind() != io::ErrorKind::Interrupted
            {
                tracing::error!(%error, shard = self.number, "cannot wait for sockets");
            }
            self.now = self.shared.clock.now();
            let began_ms = self.now.mono_ms;
            for event in &events {
                match event.token() {
                    WAKER => {}
                    HTTP_LISTENER | TCP_LISTENER => self.on_door(event.token()),
                    Token(index) => self.on_socket(index as u32, event),
                }
            }
            self.accept();
            self.take_mail();
            self.fire_due();
            self.run_sweeps();
            self.read_ready();
            self.deliver_rooms();
            self.send_up();
            self.flush_all();
            self.judge_lateness(began_ms);
        }
        self.end();
    }

    /// How long nothing can happen by itself.
    fn timeout(&self) -> Duration {
        let work = !self.to_read.is_empty() || !self.sweeps.is_empty() || self.doors_ready();
        if work {
            return Duration::ZERO;
        }
        let mut until_ms = self.wheel.next_ms().unwrap_or(u64::MAX);
        for at_ms in
            [self.drain_deadline_ms, self.doors_retry_ms(), self.rooms_sweep_ms()].into_iter().flatten()
        {
            until_ms = until_ms.min(at_ms);
        }
        if !self.up.is_empty() {
            until_ms = until_ms.min(self.now.mono_ms + RETRY_MS);
        }
        let now_ms = self.shared.clock.now().mono_ms;
        // The clock is in whole milliseconds: one more, so that the time has come when we wake.
        Duration::from_millis(until_ms.saturating_sub(now_ms).saturating_add(1).min(60_000))
    }

    fn on_socket(&mut self, index: u32, event: &mio::event::Event) {
        let Some(conn) = self.conns.at(index) else { return };
        if event.is_readable() || event.is_read_closed() || event.is_error() {
            conn.readable = true;
            conn.ending |= event.is_read_closed() || event.is_error();
            if conn.stalled {
                // The bytes have come, though they are not read yet.
                with(&self.shared, self.now, self.number, &mut self.conns, index, |conn, cx| {
                    conn.session.on_bytes(cx, &mut self.actions);
                });
                return self.act(index);
            }
            self.plan_read(index);
        }
        if event.is_writable() {
            self.plan_flush_queued(index);
        }
    }

    /// Puts a connection on the list of those to read, if there is something and it is wanted.
    fn plan_read(&mut self, index: u32) {
        if let Some(conn) = self.conns.at(index)
            && conn.has_input()
            && conn.wants_input()
            && !conn.to_read
            && !conn.stalled
        {
            conn.to_read = true;
            self.to_read.push(index);
        }
    }

    fn take_mail(&mut self) {
        let mut mail = std::mem::take(&mut self.mail);
        self.shared.mailboxes[self.number].drain(&mut mail);
        for item in mail.drain(..) {
            match item {
                Mail::Down(message) => self.on_down(message),
                Mail::Verdict { connection, refresh, judged } => self.on_verdict(connection, refresh, judged),
                Mail::Room { room, message } => self.on_room_mail(&room, message),
                Mail::RoomVerdict { connection, request, allowed } => {
                    self.on_room_verdict(connection, &request, allowed);
                }
                Mail::Accepted { socket, door, read } => self.adopt(socket, door, &read),
                Mail::Drain => self.on_drain(),
                Mail::CloseWhere { predicate, code, closed } => {
                    self.sweeps.push(Sweep::close_where(predicate, code, closed));
                }
                Mail::Stop => self.stopping = true,
            }
        }
        self.mail = mail;
    }

    fn fire_due(&mut self) {
        let mut due = Vec::new();
        self.wheel.take_due(self.now.mono_ms, &mut due);
        for index in due {
            let actions = &mut self.actions;
            with(&self.shared, self.now, self.number, &mut self.conns, index, |conn, cx| {
                if conn.stalled || conn.to_read {
                    // Its silence is ours: what it has sent is read later in this turn, or when the router has room.
                    conn.session.on_bytes(cx, actions);
                }
                conn.session.on_timer(cx, actions);
            });
            self.act(index);
        }
        self.sweep_rooms();
        if self.drain_deadline_ms.is_some_and(|at_ms| at_ms <= self.now.mono_ms) {
            self.drain_deadline_ms = None;
            self.sweeps.push(Sweep::drained());
        }
    }

    /// Offers the router what has collected. What it has no room for is kept, and open connections are not
    /// read until it has.
    fn send_up(&mut self) {
        if !self.up.is_empty() {
            self.uplinks.send(&mut self.up);
        }
        let blocked = !self.up.is_empty();
        if self.blocked && !blocked {
            for index in std::mem::take(&mut self.stalled) {
                if let Some(conn) = self.conns.at(index).filter(|conn| conn.stalled) {
                    conn.stalled = false;
                    self.plan_read(index);
                }
            }
        }
        self.blocked = blocked;
    }

    fn tell_router(&mut self, index: u32, login: u64, event: Up) {
        let connection = id::encode(self.number, self.conns.generation(index), index);
        let node = self.shared.node.clone();
        self.up.push(Uplink { from: ConnRef { node, connection, login }, event });
    }

    /// The shard is behind, or the router is: no new sessions.
    fn is_overloaded(&self) -> bool {
        let late = self.late_since_ms.is_some_and(|since| self.now.mono_ms - since >= LATE_FOR_MS);
        late || self.blocked || {
            let (depth, capacity) = self.uplinks.depth();
            depth >= capacity
        }
    }

    fn judge_lateness(&mut self, began_ms: u64) {
        let ended_ms = self.shared.clock.now().mono_ms;
        if ended_ms - began_ms <= LATE_MS {
            self.late_since_ms = None;
        } else if self.late_since_ms.is_none() {
            self.late_since_ms = Some(began_ms);
        }
    }

    fn counters(&self) -> &Counters {
        &self.shared.counters[self.number]
    }

    fn count(&self, count: Count, by: u64) {
        self.counters().add(count, by);
    }

    fn fresh(&mut self) -> Fresh {
        let session = u128::from(self.entropy.next()) << 64 | u128::from(self.entropy.next());
        Fresh { login: self.shared.next_login(), session }
    }

    /// Sets the timer of a connection to its next deadline.
    fn set_timer(&mut self, index: u32) {
        let Some(conn) = self.conns.at(index) else { return };
        self.wheel.set(index, conn.session.deadline_ms(&self.shared.rules, self.now));
    }

    /// The second signal: everybody is told, whatever can be written at once is, and that is all.
    fn end(&mut self) {
        self.close_all(bowline_protocol::CloseCode::Shutdown);
        self.send_up();
        self.flush_all();
        self.shared.stopped.store(true, Ordering::Release);
        for index in 0..self.conns.end() {
            self.remove(index);
        }
        // Whoever waits for room in the mailbox must not wait for ever.
        let mut rest = Vec::new();
        self.shared.mailboxes[self.number].drain(&mut rest);
    }

    fn register(&mut self, index: u32) -> io::Result<()> {
        let Some(conn) = self.conns.at(index) else { return Ok(()) };
        let interest = Interest::READABLE | Interest::WRITABLE;
        self.poll.registry().register(&mut conn.socket.stream, Token(index as usize), interest)
    }
}

/// Calls `step` with a connection and the context of its session.
fn with(
    shared: &Shared,
    now: Now,
    shard: usize,
    conns: &mut Slots<Conn>,
    index: u32,
    step: impl FnOnce(&mut Conn, &Context<'_>),
) {
    let connection = id::encode(shard, conns.generation(index), index);
    if let Some(conn) = conns.at(index) {
        step(conn, &Context { rules: &shared.rules, now, connection });
    }
}

/// Random numbers, fetched from the system by the kilobyte.
struct Entropy {
    bytes: [u8; 1024],
    used: usize,
}

impl Default for Entropy {
    fn default() -> Self {
        Self { bytes: [0; 1024], used: 1024 }
    }
}

impl Entropy {
    fn next(&mut self) -> u64 {
        if self.used + 8 > self.bytes.len() {
            getrandom::fill(&mut self.bytes).expect("the system has random numbers once it is up");
            self.used = 0;
        }
        let mut word = [0; 8];
        word.copy_from_slice(&self.bytes[self.used..self.used + 8]);
        self.bytes[self.used..self.used + 8].fill(0);
        self.used += 8;
        u64::from_ne_bytes(word)
    }
}
