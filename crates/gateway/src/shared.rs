//! What the shards of one gateway share.

use crate::{
    config::Config, files::Files, gate::Gate, handshakes::Handshakes, judge::Judge, metrics::Counters,
    registry::Registry, shard::mail::Mail,
};
use bowline_links::mailbox::Mailbox;
use bowline_protocol::{DeviceId, UserId, ids::RoomName, link::NodeRef};
use bowline_rooms::{Carrier, Message, Room, Rooms};
use bowline_session::{Now, Rules};
use bowline_tls::Stream;
use bytes::Bytes;
use std::{
    sync::{
        Arc, Condvar, Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

/// Takes over connections of the public port that open no WebSocket, with the bytes that were read.
pub type Http = Arc<dyn Fn(Stream, Bytes) + Send + Sync>;

/// May this user join this room?
#[derive(Debug, Clone)]
pub struct RoomQuestion {
    pub user: UserId,
    pub device: DeviceId,
    pub room: RoomName,
}

/// Takes the application's verdict on a join, or why there is none; may be called on any thread.
pub type RoomReply = Box<dyn FnOnce(Result<bool, String>) + Send>;

/// Asks the application, with `rooms.join = "hook"`. Called on a shard's thread: it must not wait.
pub type RoomJudge = Arc<dyn Fn(RoomQuestion, RoomReply) + Send + Sync>;

/// A drain that has begun.
#[derive(Debug, Clone)]
pub struct Drain {
    pub reason: Arc<str>,
    /// On the shards' clock, and on the wall's.
    pub deadline_mono_ms: u64,
    pub deadline_wall_ms: u64,
    /// Connections at its beginning.
    pub open: u64,
}

pub struct Shared {
    pub config: Config,
    pub rules: Rules,
    pub node: Arc<NodeRef>,
    pub judge: Judge,
    pub gate: Arc<Gate>,
    pub files: Files,
    pub registry: Registry,
    pub rooms: Rooms,
    pub room_judge: Option<RoomJudge>,
    pub clock: Clock,
    pub drain: OnceLock<Drain>,
    /// One for each shard.
    pub counters: Box<[Counters]>,
    pub mailboxes: Box<[Arc<Mailbox<Mail>>]>,
    /// Where the listeners speak TLS.
    pub handshakes: Option<Arc<Handshakes>>,
    /// The shards have ended, and nobody empties their mailboxes any more.
    pub stopped: AtomicBool,
    last_login: AtomicU64,
    /// Sockets of connections that were open and are not gone.
    live: AtomicUsize,
    none_live: (Mutex<()>, Condvar),
}

impl Shared {
    #[allow(clippy::too_many_arguments)]
    pub fn new(
        config: Config,
        node: Arc<NodeRef>,
        judge: Judge,
        gate: Gate,
        files: Files,
        mailboxes: Box<[Arc<Mailbox<Mail>>]>,
        room_judge: Option<RoomJudge>,
        handshakes: Option<Arc<Handshakes>>,
    ) -> Self {
        Self {
            rooms: Rooms::new(config.rooms, mailboxes.len(), random()),
            rules: config.rules(node.node_id.clone()),
            config,
            node,
            judge,
            gate: Arc::new(gate),
            files,
            registry: Registry::default(),
            room_judge,
            clock: Clock::new(),
            drain: OnceLock::new(),
            counters: mailboxes.iter().map(|_| Counters::default()).collect(),
            mailboxes,
            handshakes,
            stopped: AtomicBool::new(false),
            last_login: AtomicU64::new(0),
            live: AtomicUsize::new(0),
            none_live: Default::default(),
        }
    }

    /// A login time in microseconds, larger than any before.
    pub fn next_login(&self) -> u64 {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros() as u64;
        let before = self
            .last_login
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |last| Some(now.max(last + 1)))
            .unwrap_or_default();
        now.max(before + 1)
    }

    pub fn live(&self) -> usize {
        self.live.load(Ordering::Relaxed)
    }

    pub fn add_live(&self) {
        self.live.fetch_add(1, Ordering::Relaxed);
    }

    pub fn remove_live(&self) {
        if self.live.fetch_sub(1, Ordering::AcqRel) == 1 {
            let _held = self.none_live.0.lock().unwrap_or_else(PoisonError::into_inner);
            self.none_live.1.notify_all();
        }
    }

    /// Waits until no connection is left; says whether that came within `timeout`.
    pub fn wait_until_empty(&self, timeout: Duration) -> bool {
        let guard = self.none_live.0.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.none_live.1.wait_timeout_while(guard, timeout, |()| self.live() > 0);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }
}

impl Carrier for Shared {
    fn has_space(&self, shard: usize) -> bool {
        let mailbox = &self.mailboxes[shard];
        mailbox.depth() < mailbox.capacity()
    }

    /// Past the capacity, which was looked at before: a shard that waits for another may be waited for by that one.
    fn carry(&self, shard: usize, room: &Arc<Room>, messages: &[Message]) {
        let mail = |message: &Message| Mail::Room { room: room.clone(), message: message.clone() };
        self.mailboxes[shard].push_together(messages.iter().map(mail));
    }
}

fn random() -> [u64; 2] {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).expect("the system has random numbers once it is up");
    let [a, b] = [&bytes[..8], &bytes[8..]].map(|half| half.try_into().expect("half of 16 bytes"));
    [u64::from_ne_bytes(a), u64::from_ne_bytes(b)]
}

/// Milliseconds since the gateway's start, and since the epoch.
pub struct Clock {
    start: Instant,
}

impl Clock {
    fn new() -> Self {
        Self { start: Instant::now() }
    }

    pub fn now(&self) -> Now {
        Now {
            mono_ms: self.start.elapsed().as_millis() as u64,
            wall_ms: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64,
        }
    }

    pub fn micros(&self) -> u64 {
        self.start.elapsed().as_micros() as u64
    }
}
