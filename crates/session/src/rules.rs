//! What all sessions of a gateway have in common: limits, and the moment at which something happens.

use bowline_protocol::{Millis, link::SameDevice};
use std::sync::Arc;

/// How long a connection may be without identity, a request head incomplete, a verifier or router without answer.
pub const CONNECT_TIMEOUT_MS: u64 = 10_000;
/// How long a client may take to close after the server's close frame.
pub const LINGER_MS: u64 = 5_000;
/// The same for a slow consumer, which has to read a frame that was begun first.
pub const LINGER_SLOW_MS: u64 = 30_000;
/// How long before a token runs out the client is told.
pub const EXPIRING_MS: u64 = 60_000;
/// What two clocks may differ by: a token that was taken although it had run out is good for so long.
pub const CLOCK_SKEW_MS: u64 = 30_000;
/// So many texts in a row that cannot be parsed end the connection.
pub const UNPARSABLE_MAX: u8 = 10;
/// What a client that is turned away for now is told to wait.
pub const RETRY_AFTER_MS: u64 = 1_000;

#[derive(Debug, Clone)]
pub struct Rules {
    pub node_id: Arc<str>,
    pub ping_after_ms: u64,
    pub ping_jitter_ms: u64,
    pub close_after_ms: u64,
    /// Frames decoded and not yet decided by the router, above which the socket is read no further.
    pub backpressure_high: u32,
    pub backpressure_timeout_ms: u64,
    /// Bytes of pushes queued beyond the socket, above which a client is a slow consumer.
    pub outbound_limit_bytes: usize,
    pub max_frame_bytes: usize,
    /// Frames per second of one connection, bursts of one second; 0 is no limit.
    pub frames_per_second: u32,
    pub same_device: SameDevice,
    pub room_join: RoomJoin,
}

/// Who may join a room.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum RoomJoin {
    /// Everybody with an identity.
    #[default]
    Any,
    /// Whose token names the room.
    Claim,
    /// Whom the application lets in.
    Hook,
}

/// A moment, by a clock that only runs forward and by the wall's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Now {
    pub mono_ms: u64,
    pub wall_ms: Millis,
}

/// What a session needs to know about where it is.
#[derive(Debug, Clone, Copy)]
pub struct Context<'a> {
    pub rules: &'a Rules,
    pub now: Now,
    /// The number by which router and gateway name this connection.
    pub connection: u64,
}
