//! Drives the core of `delivery`: one thread decides, one writes to the store, a few read from it.
//!
//! The deciding thread takes everything that waits, lets the core decide on all of it, and then carries out what
//! follows: so the batches grow with the load, and nothing waits when there is none.

mod store;

use bowline_coordination::Coordination;
use bowline_delivery::{Action, Core, Counters, Event, Now};
use bowline_links::{Downlinks, Uplinks, mailbox::Mailbox};
use bowline_protocol::link::{Downlink, Uplink};
use bowline_store::{Reader, Writer};
use std::{
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle, Thread},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};
use store::Stores;

pub use bowline_delivery::{Config, Retention};

/// Messages that may wait for the router. Above, links keep what they have and gateways stop reading.
pub const INBOX_MESSAGES_MAX: usize = 65_536;

/// Under load a transaction begins at the earliest so long after the one before, and takes in what came meanwhile.
/// Each costs some hundred microseconds whatever it holds, so that a few large ones are cheaper than many small ones.
const PACE: Duration = Duration::from_millis(2);
/// One with fewer writes is no load: the next may follow at once.
const PACED_WRITES: usize = 3;

/// What the router works with.
pub struct Parts {
    pub coordination: Arc<dyn Coordination>,
    pub writer: Box<dyn Writer>,
    pub readers: Vec<Box<dyn Reader>>,
}

/// A router that runs. As [`Uplinks`] it takes what comes from gateways and the API.
#[derive(Clone)]
pub struct Handle {
    shared: Arc<Shared>,
}

struct Shared {
    uplinks: Mailbox<Uplink>,
    events: Mailbox<Event>,
    stop: AtomicBool,
    thread: Arc<OnceLock<Thread>>,
    join: Mutex<Option<JoinHandle<()>>>,
    snapshot: Mutex<Snapshot>,
}

/// What the router publishes of itself.
#[derive(Debug, Clone, Copy, Default)]
pub struct Snapshot {
    pub counters: Counters,
    /// Entries that wait for a transaction.
    pub queue_depth: usize,
    /// Connections, users with one, conversations in memory.
    pub table_sizes: [usize; 3],
}

/// Starts the router's threads. `downlinks` leads to the gateways and the API.
pub fn start(
    config: Config,
    parts: Parts,
    downlinks: impl FnOnce(Handle) -> Arc<dyn Downlinks>,
) -> std::io::Result<Handle> {
    let thread: Arc<OnceLock<Thread>> = Arc::default();
    let waker = || {
        let thread = thread.clone();
        move || {
            if let Some(thread) = thread.get() {
                thread.unpark();
            }
        }
    };
    let shared = Arc::new(Shared {
        uplinks: Mailbox::new(INBOX_MESSAGES_MAX, waker()),
        events: Mailbox::new(usize::MAX, waker()),
        stop: AtomicBool::new(false),
        thread: thread.clone(),
        join: Mutex::new(None),
        snapshot: Mutex::default(),
    });
    let handle = Handle { shared: shared.clone() };
    let downlinks = downlinks(handle.clone());
    let stores = Stores::start(parts.writer, parts.readers, &shared)?;
    let driver = Driver {
        core: Core::new(config),
        shared: shared.clone(),
        stores,
        coordination: parts.coordination,
        downlinks,
        began: Instant::now(),
        paced_until: Instant::now(),
    };
    let join = thread::Builder::new().name("router".into()).spawn(move || driver.run())?;
    let _ = thread.set(join.thread().clone());
    join.thread().unpark();
    *shared.join.lock().unwrap_or_else(PoisonError::into_inner) = Some(join);
    Ok(handle)
}

impl Handle {
    pub fn snapshot(&self) -> Snapshot {
        *self.shared.snapshot.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Decides on what has arrived, finishes the transaction under way, and ends the threads.
    pub fn stop(&self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        if let Some(thread) = self.shared.thread.get() {
            thread.unpark();
        }
        if let Some(join) = self.shared.join.lock().unwrap_or_else(PoisonError::into_inner).take() {
            // A panic of the router has been reported by the panic hook.
            let _ = join.join();
        }
    }
}

impl Uplinks for Handle {
    fn send(&self, batch: &mut Vec<Uplink>) {
        self.shared.uplinks.offer(batch);
    }

    fn depth(&self) -> (usize, usize) {
        (self.shared.uplinks.depth(), INBOX_MESSAGES_MAX)
    }
}

struct Driver {
    core: Core,
    shared: Arc<Shared>,
    stores: Stores,
    coordination: Arc<dyn Coordination>,
    downlinks: Arc<dyn Downlinks>,
    began: Instant,
    /// Before then no transaction is formed.
    paced_until: Instant,
}

impl Driver {
    fn run(mut self) {
        let (mut uplinks, mut events) = (Vec::new(), Vec::new());
        loop {
            let is_stopping = self.shared.stop.load(Ordering::SeqCst);
            // Answers first: what they decide makes room for what is new.
            self.shared.events.drain(&mut events);
            self.shared.uplinks.drain(&mut uplinks);
            let is_idle = uplinks.is_empty() && events.is_empty();
            let now = self.now();
            for event in events.drain(..) {
                self.core.on_event(event, now);
            }
            for uplink in uplinks.drain(..) {
                self.core.on_event(Event::Uplink(uplink), now);
            }
            let pause = self.paced_until.saturating_duration_since(Instant::now());
            self.core.hold(!pause.is_zero() && !is_stopping);
            self.core.on_turn(now);
            let is_busy = self.carry_out();
            if !is_idle || is_busy {
                self.publish();
                continue;
            }
            if is_stopping && self.core.queue_depth() == 0 {
                return;
            }
            let due =
                self.core.next_due().map(|due| Duration::from_millis(due.saturating_sub(now.mono).max(1)));
            let wait = due.unwrap_or(Duration::from_secs(1));
            thread::park_timeout(if pause.is_zero() { wait } else { wait.min(pause) });
        }
    }

    /// Carries out what the core decided. Returns whether there was anything.
    fn carry_out(&mut self) -> bool {
        let actions = self.core.take_actions();
        let is_busy = !actions.is_empty();
        let mut down: Vec<Downlink> = Vec::new();
        let mut reads = Vec::new();
        for action in actions {
            match action {
                Action::Send(downlink) => down.push(downlink),
                Action::Commit(batch) => {
                    if batch.writes.len() >= PACED_WRITES {
                        self.paced_until = Instant::now() + PACE;
                    }
                    self.stores.commit(batch);
                }
                Action::Read { read, lane, query } => reads.push((lane, (read, query))),
                Action::Claim { conn, open } => {
                    let (shared, to) = (self.shared.clone(), conn.clone());
                    let asked = open.clone();
                    let reply =
                        move |claim| shared.events.push_control(Event::Claimed { conn: to, open, claim });
                    self.coordination.claim(&conn, &asked, Box::new(reply));
                }
                Action::Release { conn, user } => self.coordination.release(&conn, &user),
                Action::LookUp { conn, user, no, event } => {
                    let (shared, to) = (self.shared.clone(), conn.clone());
                    let reply =
                        move |here| shared.events.push_control(Event::LookedUp { conn: to, here, no, event });
                    self.coordination.look_up(&conn, &user, Box::new(reply));
                }
                Action::AskVerdict { ticket, .. } => {
                    // No hook is configured: everything is allowed.
                    let verdict = bowline_delivery::Verdict::Allow { body: None };
                    self.shared.events.push_control(Event::Verdict { ticket, verdict });
                }
            }
        }
        self.stores.read(reads);
        if !down.is_empty() {
            self.downlinks.send(down);
        }
        is_busy
    }

    fn publish(&self) {
        let snapshot = Snapshot {
            counters: self.core.counters(),
            queue_depth: self.core.queue_depth(),
            table_sizes: self.core.table_sizes(),
        };
        *self.shared.snapshot.lock().unwrap_or_else(PoisonError::into_inner) = snapshot;
    }

    fn now(&self) -> Now {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Now { wall: wall.as_millis() as u64, mono: self.began.elapsed().as_millis() as u64 }
    }
}
