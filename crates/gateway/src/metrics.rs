//! Counters. Every shard writes its own and nobody else's; they are summed when somebody looks.

use bowline_protocol::{CloseCode, ErrorCode};
use std::sync::atomic::{AtomicU64, Ordering};

/// The statuses by which a handshake is refused.
pub const STATUSES: [u16; 9] = [400, 401, 403, 404, 409, 426, 429, 431, 503];

/// What a client's frame asked for; `frame` stands for one whose type is not known.
pub const OPERATIONS: [&str; 20] = [
    "frame",
    "connect",
    "ping",
    "auth.refresh",
    "msg.send",
    "msg.recv",
    "msg.read",
    "history",
    "conversation.list",
    "conversation.create",
    "conversation.clear",
    "group.add",
    "group.remove",
    "group.role",
    "group.rename",
    "group.leave",
    "room.join",
    "room.leave",
    "room.send",
    "pong",
];

/// Counters without a label.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Count {
    WebSocketOpened,
    WebSocketEnded,
    TcpOpened,
    TcpEnded,
    FramesIn,
    FramesOut,
    BytesIn,
    BytesOut,
    Paused,
    Resumed,
    SlowFramesDropped,
    IdentityMismatches,
    AcceptFailures,
    TurnedAway,
    HandedToHttp,
    NotHere,
    RoomDeliveries,
}

const COUNTS: usize = Count::RoomDeliveries as usize + 1;

pub(crate) struct Counters {
    counts: [AtomicU64; COUNTS],
    closed: [AtomicU64; CloseCode::ALL.len()],
    refused: [AtomicU64; STATUSES.len()],
    failures: [[AtomicU64; ErrorCode::ALL.len()]; OPERATIONS.len()],
}

impl Default for Counters {
    fn default() -> Self {
        Self {
            counts: std::array::from_fn(|_| AtomicU64::new(0)),
            closed: std::array::from_fn(|_| AtomicU64::new(0)),
            refused: std::array::from_fn(|_| AtomicU64::new(0)),
            failures: std::array::from_fn(|_| std::array::from_fn(|_| AtomicU64::new(0))),
        }
    }
}

/// There is one writer, so that this needs no locked instruction.
fn bump(cell: &AtomicU64, by: u64) {
    cell.store(cell.load(Ordering::Relaxed) + by, Ordering::Relaxed);
}

impl Counters {
    pub fn add(&self, count: Count, by: u64) {
        bump(&self.counts[count as usize], by);
    }

    pub fn closed(&self, code: CloseCode) {
        bump(&self.closed[code as usize], 1);
    }

    pub fn refused(&self, status: u16) {
        if let Some(at) = STATUSES.iter().position(|s| *s == status) {
            bump(&self.refused[at], 1);
        }
    }

    pub fn failed(&self, operation: Option<&str>, code: ErrorCode) {
        let operation = operation.and_then(|name| OPERATIONS.iter().position(|o| *o == name)).unwrap_or(0);
        bump(&self.failures[operation][code as usize], 1);
    }
}

/// What a gateway has counted since its start.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Metrics {
    /// Authenticated connections now.
    pub web_socket_connections: u64,
    pub tcp_connections: u64,
    pub opened_total: u64,
    /// Frames and bytes of clients, whatever became of them.
    pub frames_in_total: u64,
    pub frames_out_total: u64,
    pub bytes_in_total: u64,
    pub bytes_out_total: u64,
    pub backpressure_paused_total: u64,
    pub backpressure_resumed_total: u64,
    pub backpressure_paused: u64,
    /// Frames that were queued for a slow consumer when it was closed.
    pub slow_frames_dropped_total: u64,
    pub identity_mismatch_total: u64,
    pub accept_failures_total: u64,
    /// Connections that were closed when they were accepted, because there was no place for them.
    pub turned_away_total: u64,
    /// Connections handed to the HTTP server.
    pub handed_to_http_total: u64,
    /// Events of the router for connections that are gone, or before their turn.
    pub not_here_total: u64,
    /// Rooms now, and their members: one that is in two counts twice.
    pub rooms: u64,
    pub rooms_members: u64,
    /// Messages of rooms, and how many members they were written or queued for.
    pub rooms_published_total: u64,
    pub rooms_deliveries_total: u64,
    /// TLS handshakes by what became of them; every outcome is listed, none without TLS.
    pub tls_handshakes_total: Vec<(&'static str, u64)>,
    /// Those that went on with an earlier session.
    pub tls_resumed_total: u64,
    pub tls_handshakes_under_way: u64,
    /// By reason; every reason is listed.
    pub closed_total: Vec<(&'static str, u64)>,
    /// By HTTP status; every status is listed.
    pub handshake_refused_total: Vec<(u16, u64)>,
    /// By operation and error code, where there were any.
    pub ingress_failures_total: Vec<(&'static str, &'static str, u64)>,
}

impl Metrics {
    pub(crate) fn sum<'a>(shards: impl Iterator<Item = &'a Counters> + Clone) -> Self {
        let total = |cell: &dyn Fn(&'a Counters) -> &'a AtomicU64| {
            shards.clone().map(|shard| cell(shard).load(Ordering::Relaxed)).sum::<u64>()
        };
        let count = |count: Count| total(&|shard| &shard.counts[count as usize]);
        let mut metrics = Self {
            web_socket_connections: count(Count::WebSocketOpened)
                .saturating_sub(count(Count::WebSocketEnded)),
            tcp_connections: count(Count::TcpOpened).saturating_sub(count(Count::TcpEnded)),
            opened_total: count(Count::WebSocketOpened) + count(Count::TcpOpened),
            frames_in_total: count(Count::FramesIn),
            frames_out_total: count(Count::FramesOut),
            bytes_in_total: count(Count::BytesIn),
            bytes_out_total: count(Count::BytesOut),
            backpressure_paused_total: count(Count::Paused),
            backpressure_resumed_total: count(Count::Resumed),
            backpressure_paused: count(Count::Paused).saturating_sub(count(Count::Resumed)),
            slow_frames_dropped_total: count(Count::SlowFramesDropped),
            identity_mismatch_total: count(Count::IdentityMismatches),
            accept_failures_total: count(Count::AcceptFailures),
            turned_away_total: count(Count::TurnedAway),
            handed_to_http_total: count(Count::HandedToHttp),
            not_here_total: count(Count::NotHere),
            rooms_deliveries_total: count(Count::RoomDeliveries),
            ..Self::default()
        };
        for code in CloseCode::ALL {
            metrics.closed_total.push((code.reason(), total(&|shard| &shard.closed[code as usize])));
        }
        for (at, status) in STATUSES.into_iter().enumerate() {
            metrics.handshake_refused_total.push((status, total(&|shard| &shard.refused[at])));
        }
        for (operation, name) in OPERATIONS.into_iter().enumerate() {
            for code in ErrorCode::ALL {
                let count = total(&|shard| &shard.failures[operation][code as usize]);
                if count > 0 {
                    metrics.ingress_failures_total.push((name, code.as_str(), count));
                }
            }
        }
        metrics
    }

    /// How many connections were closed for a reason.
    pub fn closed(&self, code: CloseCode) -> u64 {
        self.closed_total.iter().find(|(reason, _)| *reason == code.reason()).map_or(0, |(_, n)| *n)
    }

    /// How many handshakes were refused with a status.
    pub fn refused(&self, status: u16) -> u64 {
        self.handshake_refused_total.iter().find(|(s, _)| *s == status).map_or(0, |(_, n)| *n)
    }
}
