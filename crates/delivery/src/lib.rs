//! The router's decisions, sans-IO: what came from gateways, what the store and coordination answered and the
//! time go in ([`Event`]); what is to be done comes out ([`Action`]).
//!
//! The way of a message: [`ingest`] finds its conversation, what became of the same id before and the verdict;
//! [`batch`] gives it a number and puts it into one transaction with what else is due, such as the [`positions`] of
//! devices; [`outcome`] is what follows when that is durable, or is not; [`deliver`] pushes. [`inbox`] tells what
//! waits, [`groups`] who is a member, [`requests`] answers the API, [`retention`] deletes what is old. One transaction is under way at a time: memory holds what is committed, and a
//! transaction that is refused leaves no trace.

#![forbid(unsafe_code)]

mod batch;
mod conversation;
mod dedupe;
mod deliver;
mod flight;
mod groups;
mod inbox;
mod ingest;
pub mod limits;
mod outcome;
pub mod persist;
mod positions;
mod reads;
mod requests;
mod resume;
mod retention;
mod timers;
mod users;

use batch::{Entry, InFlight};
use bowline_protocol::{
    ClientFrame, CloseCode, ConversationId, DeviceId, ErrorCode, Frame, Millis, ServerFrame, UserId,
    error::Refusal,
    link::{Answer, Claim, ConnRef, Down, Downlink, Open, SameDevice, Target, Up, Uplink},
};
use conversation::Conversation;
use dedupe::Dedupe;
use indexmap::IndexMap;
use persist::{Batch, Found, Outcome, Query};
use positions::PendingPosition;
use reads::{Deferred, ReadPurpose};
pub use retention::Retention;
use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
};
use timers::Timers;
use users::{Conn, ConnKey, Device, Nodes, User, conn_ref};

/// The time, twice: `wall` stamps messages, `mono` drives timers and never goes back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Now {
    pub wall: Millis,
    pub mono: Millis,
}

#[derive(Debug, Clone)]
pub struct Config {
    /// How long a push waits for `msg.recv` before it is repeated, and how often it is.
    pub ack_timeout_ms: u64,
    pub max_redeliveries: u32,
    /// Messages in one transaction.
    pub batch_max: usize,
    pub group_members_max: usize,
    /// The largest frame of a client; what the server sends is at most [`SERVER_FIELDS_BYTES`] more.
    ///
    /// [`SERVER_FIELDS_BYTES`]: bowline_protocol::frame::SERVER_FIELDS_BYTES
    pub frame_bytes_max: usize,
    /// Random for each process; makes tables unpredictable from outside and runs repeatable in tests.
    pub seed: u64,
    /// The epoch under which this process owns its conversations: 1 for the only owner there is; in a cluster what
    /// coordination gave with the lease. The store takes nothing of an owner whose epoch is over.
    pub owner_epoch: u64,
    /// Every message waits for a verdict ([`Action::AskVerdict`]) before it is numbered.
    pub before_send: bool,
    /// `message.stored` events are written to the outbox.
    pub outbox: bool,
    pub retention: Retention,
    /// How long a session is held after its connection has ended; 0: not at all.
    pub resume_ms: u64,
}

#[derive(Debug, Clone)]
pub enum Event {
    Uplink(Uplink),
    /// Answer to [`Action::Claim`].
    Claimed {
        conn: ConnRef,
        open: Box<Open>,
        claim: Claim,
    },
    /// Answer to [`Action::LookUp`].
    LookedUp {
        conn: ConnRef,
        here: bool,
        no: u64,
        event: Box<Down>,
    },
    /// Answer to [`Action::Commit`].
    Outcome(Outcome),
    /// Answer to [`Action::Read`].
    Found {
        read: u64,
        found: Found,
    },
    /// Answer to [`Action::AskVerdict`].
    Verdict {
        ticket: u64,
        verdict: Verdict,
    },
}

/// May this message be stored?
#[derive(Debug, Clone, PartialEq)]
pub enum Verdict {
    Allow { body: Option<bowline_protocol::Body> },
    Refuse(Refusal),
}

#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    Send(Downlink),
    /// One transaction; the next one comes after its outcome.
    Commit(Box<Batch>),
    /// Look-ups of one lane are carried out in order.
    Read {
        read: u64,
        lane: u64,
        query: Query,
    },
    /// Take the route of a device for this connection, by login time.
    Claim {
        conn: ConnRef,
        open: Box<Open>,
    },
    /// Give the route up, if it still is this connection's.
    Release {
        conn: ConnRef,
        user: UserId,
    },
    /// "Not here" was answered: is this connection's route still valid?
    LookUp {
        conn: ConnRef,
        user: UserId,
        no: u64,
        event: Box<Down>,
    },
    AskVerdict {
        ticket: u64,
        message: Box<bowline_protocol::link::Send>,
        conversation: ConversationId,
    },
}

/// Who is to be answered: a frame of a connection, or a request of the API.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Asker {
    origin: Origin,
    /// The `id` of the frame.
    frame_id: Option<Arc<str>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Origin {
    Conn { key: ConnKey, login: u64 },
    Api { node: u32, request_id: u64 },
}

/// Counts that the router publishes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    pub messages_stored: u64,
    pub messages_repeated: u64,
    pub messages_refused: u64,
    pub pushes: u64,
    pub redeliveries: u64,
    pub receipts: u64,
    pub not_here: u64,
    pub transactions: u64,
    pub transactions_failed: u64,
    pub messages_expired: u64,
    pub devices_forgotten: u64,
    pub resumed: u64,
}

pub struct Core {
    config: Config,
    hasher: ahash::RandomState,
    nodes: Nodes,
    // Entries stand side by side in these two, so that the room kept for growth is not touched.
    conns: IndexMap<ConnKey, Conn, ahash::RandomState>,
    /// Connections whose route is being claimed.
    opening: HashMap<ConnKey, Opening, ahash::RandomState>,
    users: IndexMap<UserId, User, ahash::RandomState>,
    closes: users::Closes,
    conversations: HashMap<ConversationId, Slot, ahash::RandomState>,
    dedupe: Dedupe,
    gates: HashMap<UserId, VecDeque<Box<batch::Incoming>>, ahash::RandomState>,
    lanes: HashMap<(UserId, ConversationId), ingest::Lane, ahash::RandomState>,
    tickets: HashMap<u64, (UserId, ConversationId), ahash::RandomState>,
    queue: VecDeque<Entry>,
    positions: HashMap<(ConversationId, UserId), Vec<PendingPosition>, ahash::RandomState>,
    position_order: VecDeque<(ConversationId, UserId)>,
    in_flight: Option<InFlight>,
    held: bool,
    /// Devices that the store may not have yet: it failed to take them, or they left before the user's devices were
    /// found.
    unstored_devices: Vec<(UserId, DeviceId)>,
    /// The store failed; nothing but new messages is tried before this time.
    store_rest_until: Millis,
    reads: HashMap<u64, Box<ReadPurpose>, ahash::RandomState>,
    timers: Timers,
    sweeper: retention::Sweeper,
    /// Without a connection, for a while.
    sessions: resume::Sessions,
    decided: Vec<ConnKey>,
    next_number: u64,
    counters: Counters,
    actions: Vec<Action>,
}

struct Opening {
    login: u64,
    is_closed: bool,
    /// A newer login took the route before the answer to this one came.
    is_replaced: bool,
}

pub(crate) enum Slot {
    Loading(Vec<Deferred>),
    Ready(Box<Conversation>),
}

impl Core {
    pub fn new(config: Config) -> Self {
        let s = config.seed;
        let hasher = ahash::RandomState::with_seeds(s, s.rotate_left(17), s ^ 0x5bd1_e995, !s);
        let map = || hasher.clone();
        Self {
            nodes: Nodes::default(),
            conns: IndexMap::with_hasher(map()),
            opening: HashMap::with_hasher(map()),
            users: IndexMap::with_hasher(map()),
            closes: users::Closes::default(),
            conversations: HashMap::with_hasher(map()),
            dedupe: Dedupe::new(s, map()),
            gates: HashMap::with_hasher(map()),
            lanes: HashMap::with_hasher(map()),
            tickets: HashMap::with_hasher(map()),
            queue: VecDeque::new(),
            positions: HashMap::with_hasher(map()),
            position_order: VecDeque::new(),
            in_flight: None,
            held: false,
            unstored_devices: Vec::new(),
            store_rest_until: 0,
            reads: HashMap::with_hasher(map()),
            timers: Timers::default(),
            sweeper: retention::Sweeper::default(),
            sessions: HashMap::with_hasher(map()),
            decided: Vec::new(),
            next_number: 1,
            counters: Counters::default(),
            actions: Vec::new(),
            hasher,
            config,
        }
    }

    /// Takes one event. What follows from it is in [`Core::take_actions`], some of it only after
    /// [`Core::on_turn`].
    pub fn on_event(&mut self, event: Event, now: Now) {
        match event {
            Event::Uplink(Uplink { from, event }) => self.on_uplink(from, event, now),
            Event::Claimed { conn, open, claim } => self.on_claimed(conn, *open, claim, now),
            Event::LookedUp { conn, here, no, event } => self.on_looked_up(conn, here, no, *event, now),
            Event::Outcome(outcome) => self.on_outcome(outcome, now),
            Event::Found { read, found } => self.on_found(read, found, now),
            Event::Verdict { ticket, verdict } => self.on_verdict(ticket, verdict),
        }
    }

    /// Ends a turn: timers that are due, the next transaction, what was decided without an answer.
    pub fn on_turn(&mut self, now: Now) {
        self.start_sweep(now);
        self.on_timers(now);
        self.form_batches(now);
        self.report_decided();
        self.drop_idle_conversations();
    }

    /// While it is held, no transaction is formed: what comes collects for the next one.
    pub fn hold(&mut self, held: bool) {
        self.held = held;
    }

    /// When the next timer is due (`mono`).
    pub fn next_due(&self) -> Option<Millis> {
        self.timers.next_due()
    }

    pub fn take_actions(&mut self) -> Vec<Action> {
        std::mem::take(&mut self.actions)
    }

    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Entries that wait for a transaction.
    pub fn queue_depth(&self) -> usize {
        self.queue.len() + self.in_flight.as_ref().map_or(0, |f| f.len())
    }

    /// Connections, users with one, conversations in memory; for metrics and tests of leaks.
    pub fn table_sizes(&self) -> [usize; 3] {
        [self.conns.len(), self.users.len(), self.conversations.len()]
    }

    fn on_uplink(&mut self, from: ConnRef, event: Up, now: Now) {
        let key = (self.nodes.index(&from.node), from.connection);
        match event {
            Up::Open(open) => {
                // A link may bring it twice. A second claim would begin the numbers of the connection anew, and its
                // gateway would take what follows for what it had.
                let is_open = self.conns.get(&key).is_some_and(|c| c.login == from.login);
                if is_open || self.opening.get(&key).is_some_and(|o| o.login == from.login) {
                    return;
                }
                let opening = Opening { login: from.login, is_closed: false, is_replaced: false };
                self.opening.insert(key, opening);
                self.actions.push(Action::Claim { conn: from, open: Box::new(open) });
                return;
            }
            Up::Request { request_id, request } => {
                let origin = Origin::Api { node: key.0, request_id };
                return self.on_request(Asker { origin, frame_id: None }, request, now);
            }
            _ => {}
        }
        let Some(conn) = self.conns.get_mut(&key).filter(|c| c.login == from.login) else {
            return self.on_stranger(key, from, event);
        };
        match event {
            Up::Open(_) | Up::Request { .. } => {}
            Up::Frame(frame) => self.on_frame(key, frame, now),
            Up::Congested => conn.congested = true,
            Up::Flowing => {
                conn.congested = false;
                let (user, device) = (conn.user.clone(), conn.device.clone());
                if let Some(device) = self.users.get_mut(&user).and_then(|u| u.device_mut(&device)) {
                    device.flights.iter_mut().for_each(|f| f.restart(now.mono));
                }
            }
            Up::InRooms => conn.in_rooms = true,
            Up::Closed(code) => self.remove_conn(key, resume::may_resume(code), now),
            Up::NotHere { no, event, gone: false } => self.send_again(from, no, *event),
            Up::NotHere { no, event, gone: true } => {
                self.counters.not_here += 1;
                // Several events may be under way to a connection that is gone: none is sent a third time.
                if no <= conn.gone_no {
                    return self.give_up(key, from, now);
                }
                conn.gone_no = no;
                let user = conn.user.clone();
                self.actions.push(Action::LookUp { conn: from, user, no, event });
            }
        }
    }

    /// Something came from a connection that is not known, or not yet.
    fn on_stranger(&mut self, key: ConnKey, from: ConnRef, event: Up) {
        match event {
            Up::Closed(_) => {
                if let Some(opening) = self.opening.get_mut(&key).filter(|o| o.login == from.login) {
                    opening.is_closed = true;
                }
            }
            Up::Frame(_) => {
                // The gateway holds a connection that was given up here; its client has to come again, unless it was
                // sent away and that has not arrived yet.
                self.close_again(key, from);
            }
            Up::NotHere { no, event, .. } if no > 0 => {
                // It was given up, and something has not arrived: the close, or what came before it, without which the
                // close would never have its turn.
                match *event {
                    close @ Down::Close { .. } => self.send_again(from, 0, close),
                    _ => self.close_again(key, from),
                }
            }
            _ => {}
        }
    }

    /// Closes what was given up, outside the order: as it was closed before, if it was; else it has to come again.
    fn close_again(&mut self, key: ConnKey, conn: ConnRef) {
        let code = self.closes.find(key, conn.login).unwrap_or(CloseCode::Shutdown);
        self.send_again(conn, 0, Down::Close { code, reason: None });
    }

    fn send_again(&mut self, conn: ConnRef, no: u64, event: Down) {
        let to = [Target { connection: conn.connection, login: conn.login, no }].into();
        self.actions.push(Action::Send(Downlink { node: conn.node, to, event }));
    }

    fn on_frame(&mut self, key: ConnKey, frame: ClientFrame, now: Now) {
        let Some(conn) = self.conns.get(&key) else { return };
        let (user, device) = (conn.user.clone(), conn.device.clone());
        let origin = Origin::Conn { key, login: conn.login };
        let asker = |frame_id| Asker { origin: origin.clone(), frame_id };
        match frame {
            ClientFrame::MsgSend { send } => {
                let asker = asker(Some(Arc::from(send.id.as_str())));
                self.on_send(asker, send.by(user), Some(device), now);
            }
            ClientFrame::MsgRecv { id, conversation, seq } => {
                self.on_position(asker(id), user, device, &conversation, seq, false, now);
            }
            ClientFrame::MsgRead { id, conversation, seq } => {
                self.on_position(asker(id), user, device, &conversation, seq, true, now);
            }
            ClientFrame::History { id, conversation, after, before, limit } => {
                self.on_history(
                    asker(Some(id)),
                    user,
                    &conversation,
                    reads::Page { after, before, limit },
                    now,
                );
            }
            ClientFrame::ConversationList { id, after, limit } => {
                self.on_list(asker(Some(id)), user, after.as_deref(), limit);
            }
            ClientFrame::ConversationClear { id, conversation } => {
                self.on_clear(asker(Some(id)), user, &conversation, now);
            }
            ClientFrame::ConversationCreate { id, group_id, name, members, meta } => {
                let create = groups::Create {
                    group_id,
                    name,
                    members,
                    owner: Some(user.clone()),
                    meta,
                    by: Some(user),
                };
                self.on_create(asker(Some(id)), create, now);
            }
            ClientFrame::GroupAdd { id, conversation, users } => {
                self.on_group(asker(Some(id)), user, &conversation, groups::Change::Add(users), now);
            }
            ClientFrame::GroupRemove { id, conversation, users } => {
                self.on_group(asker(Some(id)), user, &conversation, groups::Change::Remove(users), now);
            }
            ClientFrame::GroupRole { id, conversation, user: of, role } => {
                self.on_group(asker(Some(id)), user, &conversation, groups::Change::Role(of, role), now);
            }
            ClientFrame::GroupRename { id, conversation, name, meta } => {
                self.on_group(
                    asker(Some(id)),
                    user,
                    &conversation,
                    groups::Change::Rename { name, meta },
                    now,
                );
            }
            ClientFrame::GroupLeave { id, conversation } => {
                self.on_group(asker(Some(id)), user, &conversation, groups::Change::Leave, now);
            }
            // The session's own frames never come this far; a link that sends one is answered all the same.
            other @ (ClientFrame::Connect(_)
            | ClientFrame::Ping { .. }
            | ClientFrame::Pong
            | ClientFrame::AuthRefresh { .. }
            | ClientFrame::Room(_)) => {
                let message = format!("{} is for the gateway, not for the router", other.name());
                self.refuse(&asker(None), Refusal::new(ErrorCode::UnknownType, message));
            }
        }
    }

    fn on_claimed(&mut self, conn: ConnRef, open: Open, claim: Claim, now: Now) {
        let key = (self.nodes.index(&conn.node), conn.connection);
        let is_awaited = self.opening.get(&key).is_some_and(|opening| opening.login == conn.login);
        let opening = if is_awaited { self.opening.remove(&key) } else { None };
        let ended = match claim {
            Claim::Won { ended } => ended,
            Claim::InUse => {
                // Where a newer login replaces an older one, this one only looks older: the clocks of two nodes differ,
                // or it was overtaken. It may come again, the other is ended then.
                let code = match open.same_device {
                    SameDevice::Refuse => CloseCode::DeviceInUse,
                    SameDevice::Replace | SameDevice::Allow => CloseCode::Overloaded,
                };
                return self.send_again(conn, 1, Down::Refused(code));
            }
        };
        // A session that this one goes on with is taken from the connection that has it: whatever that one still
        // says concerns nobody any more.
        let asked = open.resume.as_deref().map(resume::session_key);
        let fenced = asked.and_then(|session| self.conn_of_session(session, &open.user, &open.device));
        if let Some(old_key) = fenced.filter(|old_key| *old_key != key) {
            self.send_down(old_key, Down::Close { code: CloseCode::Replaced, reason: None });
            self.remove_conn(old_key, true, now);
        }
        self.end_routes(ended, now);
        match opening {
            Some(Opening { is_closed: false, is_replaced: false, .. }) => {}
            Some(Opening { is_closed: false, is_replaced: true, .. }) => {
                return self.send_again(conn, 1, Down::Refused(CloseCode::Replaced));
            }
            _ => return self.actions.push(Action::Release { conn, user: open.user }),
        }
        if open.same_device != SameDevice::Allow {
            self.end_others(&open.user, &open.device, key, now);
        }
        if self.conns.contains_key(&key) {
            // The gateway gave this number to a new connection; the word that the old one closed is still due.
            self.remove_conn(key, true, now);
        }
        let resuming = asked.filter(|session| self.is_held(*session, &open.user, &open.device, now));
        self.conns.insert(
            key,
            Conn {
                login: conn.login,
                user: open.user.clone(),
                device: open.device.clone(),
                sent: 0,
                decided: 0,
                congested: false,
                in_rooms: false,
                gone_no: 0,
                session: resume::session_key(&open.session),
                sync: Some(Box::new(users::Sync { resuming, ..users::Sync::default() })),
            },
        );
        let user = self.users.entry(open.user.clone()).or_default();
        // From here on it is one of the user's devices: it stays where it is when another moves on.
        if let Some(known) = &mut user.known
            && !known.contains(&open.device)
        {
            *known = known.iter().chain([&open.device]).cloned().collect();
            positions::widen(&mut self.positions, &open.user, &open.device);
        }
        match user.device_mut(&open.device) {
            Some(device) => {
                device.conns.push(key);
                device.class = open.class.or(device.class);
            }
            None => user.devices.push(Device {
                id: open.device,
                class: open.class,
                conns: [key].into(),
                flights: users::Rare::default(),
                announced: users::Rare::default(),
            }),
        }
        match resuming {
            None => self.send_down(key, Down::Accepted { resumed: false }),
            Some(_) => {
                let timer = timers::Timer::Resume { key, login: conn.login };
                self.timers.arm(now.mono + limits::RESUME_WAIT_MS, timer);
            }
        }
        self.begin_sync(key);
    }

    /// The connections whose routes a newer login took.
    fn end_routes(&mut self, ended: Vec<ConnRef>, now: Now) {
        for old in ended {
            let key = (self.nodes.index(&old.node), old.connection);
            if self.conns.get(&key).is_some_and(|conn| conn.login == old.login) {
                self.replace(key, now);
            } else if let Some(opening) = self.opening.get_mut(&key).filter(|o| o.login == old.login) {
                opening.is_replaced = true;
            }
        }
    }

    /// All other connections of a device of which there is to be one. Coordination does not name them all: a router
    /// that was taken over may have been told of one that it never had, and nobody would ever say that it is gone.
    fn end_others(&mut self, user: &UserId, device: &DeviceId, key: ConnKey, now: Now) {
        let Some(device) = self.users.get(user).and_then(|user| user.device(device)) else { return };
        for other in device.conns.clone().into_iter().filter(|other| *other != key) {
            self.replace(other, now);
        }
    }

    fn replace(&mut self, key: ConnKey, now: Now) {
        self.send_down(key, Down::Close { code: CloseCode::Replaced, reason: None });
        self.remove_conn(key, false, now);
    }

    fn on_looked_up(&mut self, conn: ConnRef, here: bool, no: u64, event: Down, now: Now) {
        let key = (self.nodes.index(&conn.node), conn.connection);
        if self.conns.get(&key).is_none_or(|c| c.login != conn.login) {
            // Given up meanwhile: what did not arrive is not sent, and the close behind it would not have its turn.
            return self.close_again(key, conn);
        }
        if here { self.send_again(conn, no, event) } else { self.give_up(key, conn, now) }
    }

    /// Nobody seems to be there. Should the gateway hold the connection all the same, because a link or coordination
    /// erred, its client has to come again: it would wait for ever for what is not sent any more.
    fn give_up(&mut self, key: ConnKey, conn: ConnRef, now: Now) {
        self.remove_conn(key, true, now);
        self.send_again(conn, 0, Down::Close { code: CloseCode::Shutdown, reason: None });
    }

    /// Takes a connection out of every table; nothing happens when it is out already. Its session may be held.
    fn remove_conn(&mut self, key: ConnKey, is_held: bool, now: Now) {
        let Some(conn) = self.conns.swap_remove(&key) else { return };
        let conn_ref = conn_ref(&self.nodes, key, conn.login);
        self.actions.push(Action::Release { conn: conn_ref, user: conn.user.clone() });
        let Some(user) = self.users.get_mut(&conn.user) else { return };
        let Some(index) = user.devices.iter().position(|d| d.id == conn.device) else { return };
        user.devices[index].conns.retain(|k| *k != key);
        let is_last = user.devices[index].conns.is_empty();
        if is_held && !conn.in_rooms {
            match conn.sync.as_ref().and_then(|sync| sync.resuming) {
                Some(session) => self.hold_longer(session, now),
                None => self.hold_session(conn.session, &conn.user, index, now),
            }
        }
        let Some(user) = self.users.get_mut(&conn.user) else { return };
        if is_last {
            let device = user.devices.remove(index);
            if user.known.is_none() {
                positions::widen(&mut self.positions, &conn.user, &device.id);
            }
            if user.devices.is_empty() {
                self.users.swap_remove(&conn.user);
            } else if user.known.is_none() {
                // It counts when the user's devices are found, even if it is stored behind that look-up.
                self.unstored_devices.push((conn.user.clone(), device.id.clone()));
            }
            self.enqueue(Entry::PutDevice {
                user: conn.user,
                device: device.id,
                class: device.class,
                at: now.wall,
            });
        }
    }

    /// Sends one event to one connection.
    fn send_down(&mut self, key: ConnKey, event: Down) {
        let Some(conn) = self.conns.get_mut(&key) else { return };
        if let Down::Close { code, .. } = &event {
            self.closes.note(key, conn.login, *code);
        }
        conn.sent += 1;
        let to = [Target { connection: key.1, login: conn.login, no: conn.sent }].into();
        self.actions.push(Action::Send(Downlink { node: self.nodes.node(key.0).clone(), to, event }));
    }

    /// Sends one frame to many connections; those on one node share a message.
    fn broadcast(&mut self, keys: &[ConnKey], frame: &Frame) {
        let mut keys: smallvec::SmallVec<[ConnKey; 8]> = keys.into();
        keys.sort_by_key(|k| k.0);
        for group in keys.chunk_by(|a, b| a.0 == b.0) {
            let mut to = smallvec::SmallVec::with_capacity(group.len());
            for key in group {
                if let Some(conn) = self.conns.get_mut(key) {
                    if let Some(sync) = conn.sync.as_mut().filter(|sync| sync.resuming.is_some()) {
                        match sync.early.len() < limits::EARLY_FRAMES_MAX {
                            true => sync.early.push(frame.clone()),
                            false => sync.overflowed = true,
                        }
                        continue;
                    }
                    conn.sent += 1;
                    to.push(Target { connection: key.1, login: conn.login, no: conn.sent });
                }
            }
            if !to.is_empty() {
                let event = Down::Frame { frame: frame.clone(), decided: 0, answer: false };
                self.actions.push(Action::Send(Downlink {
                    node: self.nodes.node(group[0].0).clone(),
                    to,
                    event,
                }));
            }
        }
    }

    /// The frame of `asker` is decided, and this is its answer.
    fn answer_frame(&mut self, asker: &Asker, frame: Frame) {
        if let Origin::Conn { key, login } = asker.origin
            && self.conns.get(&key).is_some_and(|c| c.login == login)
        {
            self.send_down(key, Down::Frame { frame, decided: 1, answer: true });
        }
    }

    /// The frame of `asker` is decided; it has no answer.
    fn decide(&mut self, asker: &Asker) {
        if let Origin::Conn { key, login } = asker.origin
            && let Some(conn) = self.conns.get_mut(&key).filter(|c| c.login == login)
        {
            conn.decided += 1;
            if conn.decided == 1 {
                self.decided.push(key);
            }
        }
    }

    fn report_decided(&mut self) {
        for key in std::mem::take(&mut self.decided) {
            if let Some(count) =
                self.conns.get_mut(&key).map(|c| std::mem::take(&mut c.decided)).filter(|n| *n > 0)
            {
                self.send_down(key, Down::Decided(count));
            }
        }
    }

    fn answer_api(&mut self, node: u32, request_id: u64, answer: Answer) {
        let event = Down::Answer { request_id, answer: Box::new(answer) };
        let node = self.nodes.node(node).clone();
        self.actions.push(Action::Send(Downlink { node, to: Default::default(), event }));
    }

    /// Answers `ok`, or the API's `Done`.
    fn confirm(&mut self, asker: &Asker, conversation: Option<&ConversationId>) {
        match asker.origin {
            Origin::Api { node, request_id } => {
                let answer = match conversation {
                    Some(id) => Answer::Created { conversation_id: id.clone() },
                    None => Answer::Done,
                };
                self.answer_api(node, request_id, answer);
            }
            Origin::Conn { .. } => {
                let id = asker.frame_id.as_deref().unwrap_or_default();
                let frame =
                    ServerFrame::Ok { id, conversation_id: conversation.map(|c| c.as_str()) }.encode();
                self.answer_frame(asker, frame);
            }
        }
    }

    fn refuse(&mut self, asker: &Asker, refusal: Refusal) {
        match asker.origin {
            Origin::Api { node, request_id } => self.answer_api(node, request_id, Answer::Refused(refusal)),
            Origin::Conn { .. } => {
                let frame = ServerFrame::Error {
                    code: refusal.code,
                    message: &refusal.message,
                    id: asker.frame_id.as_deref(),
                    retry_after_ms: refusal.retry_after_ms,
                }
                .encode();
                self.answer_frame(asker, frame);
            }
        }
    }

    fn number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number
    }
}

/// A conversation that is not this user's: existing or not, the answer is the same.
pub(crate) fn forbidden(conversation: &str) -> Refusal {
    let shown: String = conversation.chars().take(140).collect();
    Refusal::new(ErrorCode::Forbidden, format!("you do not belong to conversation {shown:?}"))
}

pub(crate) fn unavailable(reason: &str) -> Refusal {
    Refusal::new(ErrorCode::Unavailable, format!("the store cannot take this now ({reason}); send it again"))
}
