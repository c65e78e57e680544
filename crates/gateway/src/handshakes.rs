//! TLS handshakes, on threads of their own.
//!
//! A handshake costs as much as hundreds of frames, and a client may take its time about it. So shards see
//! connections whose handshake is done: the thread that accepts gives a new one to one of these threads, which carry
//! all theirs on as bytes come, and hand over what is ready. None waits for a client: one that is silent costs a
//! place in a table, and its time is over after ten seconds.

use crate::{
    gate::Place,
    shard::{
        mail::{Door, Mail},
        socket::Socket,
    },
    slots::Slots,
};
use bowline_links::mailbox::Mailbox;
use bowline_tls::{Acceptor, Tls};
use mio::{Events, Interest, Poll, Token, Waker, net::TcpStream};
use std::{
    collections::VecDeque,
    io,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

/// Handshakes under way; a connection beyond is closed.
const UNDER_WAY_MAX: usize = 4096;
/// How long one may take in all.
const HANDSHAKE_TIME: Duration = Duration::from_secs(10);
/// Threads at most; there is one for two shards.
const THREADS_MAX: usize = 8;
/// Events taken from the poll in one turn.
const EVENTS: usize = 256;
const WAKER: Token = Token(usize::MAX);

/// What became of the handshakes so far.
#[derive(Default)]
pub struct Outcomes {
    done: AtomicU64,
    /// Those among them that went on with an earlier session.
    resumed: AtomicU64,
    failed: AtomicU64,
    timed_out: AtomicU64,
    turned_away: AtomicU64,
}

impl Outcomes {
    /// By name; every one is listed.
    pub fn all(&self) -> Vec<(&'static str, u64)> {
        let rows = [
            ("done", &self.done),
            ("failed", &self.failed),
            ("timed_out", &self.timed_out),
            ("turned_away", &self.turned_away),
        ];
        rows.into_iter().map(|(name, count)| (name, count.load(Ordering::Relaxed))).collect()
    }

    pub fn resumed(&self) -> u64 {
        self.resumed.load(Ordering::Relaxed)
    }
}

/// A connection that was accepted, and who gets it.
struct Fresh {
    stream: TcpStream,
    place: Place,
    door: Door,
    shard: usize,
}

enum Job {
    Begin(Fresh),
    Stop,
}

/// The threads, as the others see them.
pub struct Handshakes {
    acceptor: Acceptor,
    inboxes: Vec<Arc<Mailbox<Job>>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    under_way: Arc<AtomicUsize>,
    outcomes: Arc<Outcomes>,
}

impl Handshakes {
    /// Starts the threads; connections that are ready go to the mailboxes of the shards.
    pub fn start(acceptor: Acceptor, shards: &[Arc<Mailbox<Mail>>]) -> io::Result<Arc<Self>> {
        let count = shards.len().div_ceil(2).min(THREADS_MAX);
        let polls = (0..count).map(|_| Poll::new()).collect::<io::Result<Vec<_>>>()?;
        let mut inboxes = Vec::with_capacity(count);
        for poll in &polls {
            let waker = Waker::new(poll.registry(), WAKER)?;
            inboxes.push(Arc::new(Mailbox::new(UNDER_WAY_MAX, move || {
                if let Err(error) = waker.wake() {
                    tracing::error!(%error, "a thread of TLS handshakes cannot be woken");
                }
            })));
        }
        let handshakes = Arc::new(Self {
            acceptor,
            inboxes,
            threads: Mutex::default(),
            under_way: Arc::default(),
            outcomes: Arc::default(),
        });
        let mut threads = Vec::with_capacity(count);
        for (number, poll) in polls.into_iter().enumerate() {
            let worker = Worker {
                poll,
                inbox: handshakes.inboxes[number].clone(),
                shards: shards.to_vec(),
                common: handshakes.clone(),
                table: Slots::default(),
                due: VecDeque::new(),
            };
            let thread = std::thread::Builder::new().name(format!("handshakes-{number}"));
            threads.push(thread.spawn(move || worker.run())?);
        }
        *handshakes.lock() = threads;
        Ok(handshakes)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<JoinHandle<()>>> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a connection for a shard, or closes it when too many are under way.
    pub fn begin(&self, stream: TcpStream, place: Place, door: Door, shard: usize) {
        if self.under_way.fetch_add(1, Ordering::Relaxed) >= UNDER_WAY_MAX {
            self.under_way.fetch_sub(1, Ordering::Relaxed);
            self.outcomes.turned_away.fetch_add(1, Ordering::Relaxed);
            return;
        }
        self.inboxes[shard % self.inboxes.len()].push_control(Job::Begin(Fresh {
            stream,
            place,
            door,
            shard,
        }));
    }

    pub fn reload(&self) -> Result<(), bowline_tls::Error> {
        self.acceptor.reload()
    }

    pub fn outcomes(&self) -> &Outcomes {
        &self.outcomes
    }

    pub fn under_way(&self) -> usize {
        self.under_way.load(Ordering::Relaxed)
    }

    /// Ends the threads; what is under way is closed.
    pub fn stop(&self) {
        for inbox in &self.inboxes {
            inbox.push_control(Job::Stop);
        }
        for thread in std::mem::take(&mut *self.lock()) {
            if thread.join().is_err() {
                tracing::error!("a thread of TLS handshakes has panicked");
            }
        }
    }
}

struct Handshake {
    stream: TcpStream,
    tls: Box<Tls>,
    place: Place,
    door: Door,
    shard: usize,
}

struct Worker {
    poll: Poll,
    inbox: Arc<Mailbox<Job>>,
    shards: Vec<Arc<Mailbox<Mail>>>,
    common: Arc<Handshakes>,
    table: Slots<Handshake>,
    /// When the time of a handshake is over, by slot and generation; all have the same time, so this is in order.
    due: VecDeque<(Instant, u32, u32)>,
}

impl Worker {
    fn run(mut self) {
        let mut events = Events::with_capacity(EVENTS);
        let mut jobs = Vec::new();
        loop {
            let timeout = self.due.front().map(|(at, ..)| at.saturating_duration_since(Instant::now()));
            if let Err(error) = self.poll.poll(&mut events, timeout)
                && error.kind() != io::ErrorKind::Interrupted
            {
                tracing::error!(%error, "cannot wait for the sockets of TLS handshakes");
            }
            for event in &events {
                if event.token() != WAKER {
                    self.step(event.token().0 as u32);
                }
            }
            self.inbox.drain(&mut jobs);
            for job in jobs.drain(..) {
                match job {
                    Job::Begin(fresh) => self.begin(fresh),
                    Job::Stop => return,
                }
            }
            self.end_late();
        }
    }

    fn begin(&mut self, Fresh { stream, place, door, shard }: Fresh) {
        let tls = match self.common.acceptor.accept(door.into()) {
            Ok(tls) => Box::new(tls),
            Err(error) => {
                tracing::error!(%error, "a TLS handshake cannot begin");
                return self.count(|outcomes| &outcomes.failed);
            }
        };
        let (index, generation) = self.table.insert(Handshake { stream, tls, place, door, shard });
        self.due.push_back((Instant::now() + HANDSHAKE_TIME, index, generation));
        let Some(handshake) = self.table.at(index) else { return };
        let (token, interest) = (Token(index as usize), Interest::READABLE | Interest::WRITABLE);
        // What has come already is reported too.
        if let Err(error) = self.poll.registry().register(&mut handshake.stream, token, interest) {
            tracing::warn!(%error, "a connection cannot be watched and is dropped");
            self.end(index, |outcomes| &outcomes.failed);
        }
    }

    /// Carries one on as far as its socket allows.
    fn step(&mut self, index: u32) {
        let Some(handshake) = self.table.at(index) else { return };
        match handshake.tls.handshake(&mut handshake.stream) {
            Ok(false) => {}
            Ok(true) => self.hand_over(index),
            Err(error) => {
                tracing::debug!(peer = ?handshake.stream.peer_addr().ok(), %error, "a TLS handshake has failed");
                self.end(index, |outcomes| &outcomes.failed);
            }
        }
    }

    fn hand_over(&mut self, index: u32) {
        let Some(mut handshake) = self.table.remove(index) else { return };
        if let Err(error) = self.poll.registry().deregister(&mut handshake.stream) {
            tracing::warn!(%error, "a connection cannot be handed to its shard and is dropped");
            return self.count(|outcomes| &outcomes.failed);
        }
        let Handshake { stream, tls, place, door, shard } = handshake;
        if tls.is_resumed() {
            self.common.outcomes.resumed.fetch_add(1, Ordering::Relaxed);
        }
        self.count(|outcomes| &outcomes.done);
        let socket = Socket::new(stream, Some(tls), place);
        self.shards[shard].push_control(Mail::Accepted { socket, door, read: Default::default() });
    }

    fn end_late(&mut self) {
        let now = Instant::now();
        while let Some((_, index, generation)) = self.due.pop_front_if(|(at, ..)| *at <= now) {
            if self.table.of(index, generation).is_some() {
                self.end(index, |outcomes| &outcomes.timed_out);
            }
        }
    }

    fn end(&mut self, index: u32, outcome: fn(&Outcomes) -> &AtomicU64) {
        if self.table.remove(index).is_some() {
            self.count(outcome);
        }
    }

    /// One less is under way.
    fn count(&self, outcome: fn(&Outcomes) -> &AtomicU64) {
        outcome(&self.common.outcomes).fetch_add(1, Ordering::Relaxed);
        self.common.under_way.fetch_sub(1, Ordering::Relaxed);
    }
}
