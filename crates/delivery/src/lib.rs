//! The router's decisions, sans-IO: what came from gateways, what the store and coordination answered and the
//! time go in ([`Event`]); what is to be done comes out ([`Action`]).
//!
//! The way of a message: [`ingest`] finds its conversation, what became of the same id before and the verdict;
//! [`batch`] gives it a number and puts it into one transaction with what else is due, such as the [`positions`] of
//! devices; [`outcome`] is what follows when that is durable, or is not; [`deliver`] pushes. [`inbox`] tells what
//! waits, [`groups`] who is a member, [`requests`] answers the API, [`retention`] deletes what is old. [`connections`]
//! come and go, [`downlink`] is what they are sent. One transaction is under way at a time: memory holds what is
//! committed, and a transaction that is refused leaves no trace.

#![forbid(unsafe_code)]

mod batch;
mod connections;
mod conversation;
mod dedupe;
mod deliver;
mod downlink;
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
    ClientFrame, ConversationId, DeviceId, ErrorCode, Millis, UserId,
    error::Refusal,
    link::{Claim, ConnRef, Down, Downlink, Open, Up, Uplink},
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
use users::{Conn, ConnKey, Nodes, User};

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
    opening: HashMap<ConnKey, connections::Opening, ahash::RandomState>,
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
            Up::Open(open) => return self.on_open(key, from, open, now),
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

    fn take_frame(&mut self, key: ConnKey, frame: ClientFrame, now: Now) {
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
                self.on_list(asker(Some(id)), user, after.as_deref(), limit, now);
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
