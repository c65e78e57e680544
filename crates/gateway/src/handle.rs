//! The gateway as the program sees it.

use crate::{
    Config, Error, WORKERS_MAX,
    files::Files,
    gate::{Bounds, Gate},
    handshakes::Handshakes,
    judge::Judge,
    listen,
    metrics::Metrics,
    shard::{
        Shard, id,
        mail::{Door, Mail},
        socket::Socket,
    },
    shared::{Drain, Http, RoomJudge, Shared},
};
use bowline_auth::Verifier;
use bowline_links::{Downlinks, Uplinks, mailbox::Mailbox};
use bowline_protocol::{
    CloseCode, DeviceId, Millis, UserId,
    ids::RoomName,
    link::{Downlink, NodeRef, Target},
};
use bowline_rooms::{Post, Refused};
use bowline_tls::{Acceptor, Stream};
use bytes::Bytes;
use mio::net::TcpListener;
use smallvec::SmallVec;
use std::{
    net::SocketAddr,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread::JoinHandle,
    time::Duration,
};

/// Messages that wait for a shard before whoever sends more has to wait.
const MAILBOX_CAPACITY: usize = 16_384;
/// How long a shard may take to close what a revocation names; after that it is not counted.
const SWEEP_TIMEOUT: Duration = Duration::from_secs(10);

/// Makes gateways.
pub struct Gateway;

/// Listeners that are bound and not served yet.
pub struct Bound {
    config: Config,
    node: Arc<NodeRef>,
    judge: Judge,
    room_judge: Option<RoomJudge>,
    http: TcpListener,
    tcp: Option<TcpListener>,
    addresses: Addresses,
    acceptor: Option<Acceptor>,
}

/// Where a gateway listens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Addresses {
    pub ws: SocketAddr,
    pub tcp: Option<SocketAddr>,
}

impl Gateway {
    /// Checks the configuration and binds the listeners.
    pub fn bind(config: Config, node: Arc<NodeRef>, verifier: Arc<Verifier>) -> Result<Bound, Error> {
        Self::bind_with(config, node, Judge::Verifier(verifier))
    }

    pub(crate) fn bind_with(config: Config, node: Arc<NodeRef>, judge: Judge) -> Result<Bound, Error> {
        config.check()?;
        let acceptor = match (&config.tls_cert, &config.tls_key) {
            (Some(cert), Some(key)) => Some(Acceptor::load(cert, key).map_err(Error::Tls)?),
            _ => None,
        };
        let http = listen::bind("listen", config.listen, &config)?;
        let tcp =
            config.tcp_listen.map(|address| listen::bind("tcp_listen", address, &config)).transpose()?;
        let local = |key, listener: &TcpListener, address| {
            listener.local_addr().map_err(|source| Error::Listen { key, address, source })
        };
        let addresses = Addresses {
            ws: local("listen", &http, config.listen)?,
            tcp: match (&tcp, config.tcp_listen) {
                (Some(listener), Some(address)) => Some(local("tcp_listen", listener, address)?),
                _ => None,
            },
        };
        Ok(Bound { config, node, judge, room_judge: None, http, tcp, addresses, acceptor })
    }
}

impl Bound {
    pub fn addresses(&self) -> Addresses {
        self.addresses
    }

    /// Who is asked before a user joins a room, with `rooms.join = "hook"`. Without it nobody may.
    pub fn with_room_judge(mut self, judge: RoomJudge) -> Self {
        self.room_judge = Some(judge);
        self
    }

    /// Starts the shards. Connections of the public port that open no WebSocket go to `http`.
    pub fn start(self, uplinks: Arc<dyn Uplinks>, http: Http) -> Result<Handle, Error> {
        let Self { config, node, judge, room_judge, http: http_listener, tcp, addresses, acceptor } = self;
        let workers = match config.workers {
            0 => std::thread::available_parallelism().map_or(1, |n| n.get()).min(WORKERS_MAX),
            workers => workers,
        };
        let polls = (0..workers)
            .map(|shard| Shard::poll().map_err(|source| Error::Shard { shard, source }))
            .collect::<Result<Vec<_>, _>>()?;
        let mailboxes: Box<[_]> = polls
            .iter()
            .map(|(_, waker)| {
                let waker = waker.clone();
                Arc::new(Mailbox::new(MAILBOX_CAPACITY, move || {
                    if let Err(error) = waker.wake() {
                        tracing::error!(%error, "a shard cannot be woken");
                    }
                }))
            })
            .collect();
        let files = Files::of_process();
        let seats = match config.max_connections {
            0 => files.seats(),
            sessions => sessions,
        };
        let gate = Gate::new(Bounds {
            handshakes_per_second: config.handshakes_per_second,
            seats,
            standing: files.standing(),
            per_address: config.connections_per_address,
        });
        let handshakes = acceptor.map(|acceptor| Handshakes::start(acceptor, &mailboxes));
        let handshakes = handshakes.transpose().map_err(Error::Handshakes)?;
        let shared = Shared::new(config, node, judge, gate, files, mailboxes, room_judge, handshakes);
        let shared = Arc::new(shared);
        let mut listeners = Some((http_listener, tcp));
        let mut threads = Vec::with_capacity(workers);
        for (shard, (poll, _)) in polls.into_iter().enumerate() {
            let fail = |source| Error::Shard { shard, source };
            let state =
                Shard::new(shard, poll, listeners.take(), shared.clone(), uplinks.clone(), http.clone())
                    .map_err(fail)?;
            let thread = std::thread::Builder::new().name(format!("gateway-{shard}"));
            threads.push(thread.spawn(move || state.run()).map_err(fail)?);
        }
        let inner = Inner { shared, addresses, threads: Mutex::new(threads), next: AtomicUsize::new(0) };
        Ok(Handle { inner: Arc::new(inner) })
    }
}

struct Inner {
    shared: Arc<Shared>,
    addresses: Addresses,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// The shard that takes the next connection handed back.
    next: AtomicUsize,
}

/// A running gateway. It runs until [`Handle::stop_now`].
#[derive(Clone)]
pub struct Handle {
    inner: Arc<Inner>,
}

/// Whether new connections are taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    Ready,
    Draining,
}

/// Authenticated connections, and where they come in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    pub state: State,
    pub connections: usize,
    pub users: usize,
    pub devices: usize,
    pub ws: TransportStatus,
    pub tcp: TransportStatus,
    pub drain: Option<DrainStatus>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TransportStatus {
    pub address: Option<SocketAddr>,
    /// Empty where there are none.
    pub path: String,
    pub connections: usize,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DrainStatus {
    pub reason: Arc<str>,
    /// When what is left is closed.
    pub deadline: Millis,
    pub remaining: usize,
}

/// What a revocation can go by.
#[derive(Debug, Clone, Copy)]
pub struct SessionKey<'a> {
    pub user: &'a UserId,
    pub device: &'a DeviceId,
    /// Claims `sid` and `jti` of the token.
    pub session_id: Option<&'a str>,
    pub token_id: Option<&'a str>,
    /// 0 when the token does not say.
    pub issued_at: Millis,
}

impl Handle {
    pub fn addresses(&self) -> Addresses {
        self.inner.addresses
    }

    pub fn metrics(&self) -> Metrics {
        let shared = &self.inner.shared;
        let mut metrics = Metrics {
            rooms: shared.rooms.rooms() as u64,
            rooms_members: shared.rooms.members(),
            rooms_published_total: shared.rooms.published(),
            ..Metrics::sum(shared.counters.iter())
        };
        if let Some(handshakes) = &shared.handshakes {
            metrics.tls_handshakes_under_way = handshakes.under_way() as u64;
            metrics.tls_handshakes_total = handshakes.outcomes().all();
            metrics.tls_resumed_total = handshakes.outcomes().resumed();
        }
        metrics
    }

    /// Publishes messages of the application in a room, all or none; says the number of the last. May be called on
    /// any thread but a shard's.
    pub fn publish(&self, room: &RoomName, posts: &[Post<'_>]) -> Result<u64, Refused> {
        let shared = &self.inner.shared;
        shared.rooms.publish(room, posts, shared.clock.now().wall_ms, &**shared)
    }

    /// Whether the listeners speak TLS.
    pub fn speaks_tls(&self) -> bool {
        self.inner.shared.handshakes.is_some()
    }

    /// Reads the certificate and its key again. Open connections go on; what cannot be used changes nothing.
    pub fn reload_certificate(&self) -> Result<(), Error> {
        self.inner.shared.handshakes.as_ref().map_or(Ok(()), |one| one.reload()).map_err(Error::Tls)
    }

    pub fn status(&self) -> Status {
        let shared = &self.inner.shared;
        let metrics = self.metrics();
        let (ws, tcp) = (metrics.web_socket_connections as usize, metrics.tcp_connections as usize);
        Status {
            state: if self.is_draining() { State::Draining } else { State::Ready },
            connections: ws + tcp,
            users: shared.registry.users(),
            devices: shared.registry.devices(),
            ws: TransportStatus {
                address: Some(self.inner.addresses.ws),
                path: shared.config.ws_path.clone(),
                connections: ws,
            },
            tcp: TransportStatus { address: self.inner.addresses.tcp, path: String::new(), connections: tcp },
            drain: shared.drain.get().map(|drain| DrainStatus {
                reason: drain.reason.clone(),
                deadline: drain.deadline_wall_ms,
                remaining: ws + tcp,
            }),
        }
    }

    /// Begins a drain: new handshakes are refused, every client is told when to come back, and what is left at
    /// the deadline is closed. A drain that has begun is not changed.
    pub fn drain(&self, reason: &str) {
        let shared = &self.inner.shared;
        let now = shared.clock.now();
        let drain = Drain {
            reason: Arc::from(reason),
            deadline_mono_ms: now.mono_ms + shared.config.drain_timeout_ms,
            deadline_wall_ms: now.wall_ms + shared.config.drain_timeout_ms,
            open: shared.live() as u64,
        };
        if shared.drain.set(drain).is_ok() {
            tracing::info!(reason, connections = shared.live(), "draining");
            self.tell_all(|| Mail::Drain);
        }
    }

    pub fn is_draining(&self) -> bool {
        self.inner.shared.drain.get().is_some()
    }

    /// Connections that are not gone yet, those that are closing included.
    pub fn remaining(&self) -> usize {
        self.inner.shared.live()
    }

    /// Waits until no connection is left; `false` when `timeout` comes first.
    pub fn wait_until_empty(&self, timeout: Duration) -> bool {
        self.inner.shared.wait_until_empty(timeout)
    }

    /// Closes everything with `shutdown` and ends the shards; returns when they have ended.
    pub fn stop_now(&self) {
        if let Some(handshakes) = &self.inner.shared.handshakes {
            handshakes.stop();
        }
        self.tell_all(|| Mail::Stop);
        let threads = std::mem::take(&mut *self.inner.threads.lock().unwrap_or_else(PoisonError::into_inner));
        for thread in threads {
            if thread.join().is_err() {
                tracing::error!("a shard has panicked");
            }
        }
    }

    /// Closes the sessions that the predicate names and says how many those were. For revocation by user, session
    /// or token. Not to be called on a shard's thread.
    pub fn close_where(
        &self,
        predicate: impl Fn(&SessionKey<'_>) -> bool + Send + Sync + 'static,
        code: CloseCode,
    ) -> usize {
        let predicate: crate::shard::mail::Predicate = Arc::new(predicate);
        let (closed, counts) = mpsc::sync_channel(self.inner.shared.mailboxes.len());
        self.tell_all(|| Mail::CloseWhere { predicate: predicate.clone(), code, closed: closed.clone() });
        drop(closed);
        std::iter::from_fn(|| counts.recv_timeout(SWEEP_TIMEOUT).ok()).sum()
    }

    /// Takes a connection back from the HTTP server that asks for an upgrade after all; `read` is the request head
    /// and what was read behind it. The stream must not be blocking.
    pub fn adopt(&self, stream: Stream, read: Bytes) {
        let shared = &self.inner.shared;
        let Some(socket) = Socket::back(stream, &shared.gate) else {
            return tracing::debug!("there is no place for a connection of the HTTP server; it is closed");
        };
        let shard = self.inner.next.fetch_add(1, Ordering::Relaxed) % shared.mailboxes.len();
        shared.mailboxes[shard].push_control(Mail::Accepted { socket, door: Door::Http, read });
    }

    fn tell_all(&self, mut mail: impl FnMut() -> Mail) {
        for mailbox in &self.inner.shared.mailboxes {
            mailbox.push_control(mail());
        }
    }
}

impl Downlinks for Handle {
    fn send(&self, batch: Vec<Downlink>) {
        let shared = &self.inner.shared;
        if shared.stopped.load(Ordering::Acquire) {
            return;
        }
        let mut parts: Vec<Vec<Mail>> = shared.mailboxes.iter().map(|_| Vec::new()).collect();
        for message in batch {
            if message.node != shared.node {
                // Meant for an earlier life of this node: void.
                tracing::debug!(node = %message.node.node_id, boot = %message.node.boot_id, "not for this node");
                continue;
            }
            split(message, &mut parts);
        }
        for (mailbox, part) in shared.mailboxes.iter().zip(parts) {
            mailbox.push(part);
        }
    }
}

/// Gives every shard its targets of one message.
fn split(message: Downlink, parts: &mut [Vec<Mail>]) {
    let last = parts.len() - 1;
    let shard_of = |target: &Target| id::shard(target.connection).min(last);
    let Some(first) = message.to.first().map(shard_of) else { return };
    if parts.len() == 1 || message.to.iter().all(|target| shard_of(target) == first) {
        return parts[first].push(Mail::Down(message));
    }
    let mut by_shard: Vec<SmallVec<[Target; 1]>> = vec![SmallVec::new(); parts.len()];
    for target in &message.to {
        by_shard[shard_of(target)].push(*target);
    }
    for (part, to) in parts.iter_mut().zip(by_shard) {
        if !to.is_empty() {
            part.push(Mail::Down(Downlink { node: message.node.clone(), to, event: message.event.clone() }));
        }
    }
}
