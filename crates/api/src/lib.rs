//! HTTP for application back ends, for operators, and for clients that hold no connection.
//!
//! [`server`] is the server API on its own listener; [`public`] serves what reaches the public listener and is
//! no upgrade. Neither has logic of its own: a request travels the uplink like a connection's frame does
//! ([`Requests`]), and its answer comes back by the downlink ([`ApiEnd`]).

mod answer;
mod body;
mod connection;
mod end;
mod head;
mod message;
pub mod public;
mod rewind;
pub mod server;
mod speak;

pub use end::{ApiEnd, Requests};

use bowline_protocol::{DeviceId, Millis, UserId, error::Refusal, frame::Body, ids::RoomName};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Bounds of this crate: what they count, and what happens when they are reached.
pub mod limits {
    use std::time::Duration;

    /// Messages in one array; more is 413.
    pub const MESSAGES_MAX: usize = 1000;
    /// Requests that wait for the router at a time; one more is 503 `overloaded`.
    pub const PENDING_MAX: usize = 65_536;
    /// How long an answer of the router is waited for; then 503 `unavailable`.
    pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
    /// How often a full uplink is offered what is left.
    pub const OFFER_AGAIN: Duration = Duration::from_millis(5);
    /// The smallest limit of a request's body, in bytes; it grows with the frame limit.
    pub const REQUEST_BYTES_MIN: usize = 4 << 20;
    /// What is read and thrown away of a body that is too large, so that the client gets to read its 413.
    pub const DISCARD_BYTES_MAX: usize = 256 << 20;
    /// How long a body may take to arrive; then 400.
    pub const BODY_TIME: Duration = Duration::from_secs(30);
    /// How long a body that nobody wants is read, so that the client gets to read its refusal.
    pub const DISCARD_TIME: Duration = Duration::from_secs(2);
    /// The largest `reason` of a kick, in bytes: a close frame holds no more.
    pub const REASON_BYTES_MAX: usize = 123;
    /// The longest life of a token, and how long one lives that does not say, in milliseconds.
    pub const TOKEN_TTL_MS_MAX: u64 = 10 * 365 * 24 * 3600 * 1000;
    pub const TOKEN_TTL_MS_DEFAULT: u64 = 3600 * 1000;
    /// The latest time that a session may end, in milliseconds: what the store's whole numbers hold.
    pub const EXPIRES_AT_MAX: u64 = i64::MAX as u64;
    /// How long a token of the demo page lives.
    pub const DEMO_TOKEN_TTL_MS: u64 = 24 * 3600 * 1000;
    /// Rooms that one token may name, and the longest such name in bytes.
    pub const TOKEN_ROOMS_MAX: usize = 1000;
    pub const ROOM_BYTES_MAX: usize = 128;
    /// The longest `sid` and `jti`, in bytes.
    pub const TOKEN_NAME_BYTES_MAX: usize = 256;
    /// Connections that the public HTTP server serves at a time; one more is closed unanswered.
    pub const PUBLIC_CONNECTIONS_MAX: usize = 65_536;
    /// How long a connection may take for the head of its next request over HTTP/1.1, of its first over HTTP/2; then it
    /// is closed.
    pub const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
    /// The longest head of a request, as at the gateway; a longer one is answered 431.
    pub const HEAD_BYTES_MAX: usize = bowline_protocol::ws::handshake::HEAD_BYTES_MAX;
    /// Header lines for which there is room: as many as such a head has of the shortest that are usual, `a: b`.
    pub const HEADER_LINES_MAX: usize = HEAD_BYTES_MAX / 6;
    /// A client over HTTP/2 that is silent so long is pinged, and closed when it does not answer within the other time.
    pub const PING_AFTER: Duration = Duration::from_secs(20);
    pub const PING_TIMEOUT: Duration = Duration::from_secs(10);
}

/// What operators ask of the node that this API runs on.
pub trait Node: Send + Sync {
    fn status(&self) -> Status;
    /// Begins to drain; asking again changes nothing.
    fn drain(&self, reason: &str);
    /// Why this node should get no clients, a sentence each.
    fn readiness(&self) -> Result<(), Vec<String>>;
    /// In the text format of Prometheus, version 0.0.4.
    fn metrics(&self) -> String;
}

/// Publishes in rooms.
pub trait Rooms: Send + Sync {
    /// All or none; says the number of the last message. Does not wait.
    fn publish(&self, room: &RoomName, messages: &[RoomMessage]) -> Result<u64, Refusal>;
}

/// A message of `POST /api/v1/rooms/{room}/messages`. Without `from` it is of the application itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RoomMessage {
    pub from: Option<UserId>,
    pub body: Body,
}

/// Makes and takes back what lets clients in. Calls write to the store and may block.
pub trait Access: Send + Sync {
    fn issue(&self, wanted: NewToken) -> Result<Issued, Refusal>;
    /// Opens a session that tokens may name.
    fn open_session(&self, session: NewSession) -> Result<(), Refusal>;
    /// How many open connections were closed.
    fn revoke(&self, target: Revoke) -> Result<u64, Refusal>;
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewToken {
    pub user: UserId,
    pub device: Option<DeviceId>,
    pub ttl_ms: u64,
    pub rooms: Option<Vec<Box<str>>>,
}

/// `POST /api/v1/tokens`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Issued {
    pub token: String,
    pub sid: String,
    #[schema(value_type = u64)]
    pub expires_at: Millis,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewSession {
    pub user: UserId,
    pub sid: Box<str>,
    pub expires_at: Millis,
}

/// What `POST /api/v1/tokens/revoke` names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Revoke {
    Token(Box<str>),
    Session(Box<str>),
    /// Everything that was issued until now.
    User(UserId),
}

/// `GET /admin/status`. Authenticated connections only are counted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Status {
    pub node_id: String,
    pub boot_id: String,
    pub version: String,
    pub state: State,
    pub uptime_ms: u64,
    pub connections: u64,
    pub users: u64,
    pub devices: u64,
    pub transports: Transports,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub drain: Option<Drain>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum State {
    Starting,
    Ready,
    Draining,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Transports {
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub ws: Option<Transport>,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub tcp: Option<Transport>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Transport {
    pub address: String,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub path: Option<String>,
    pub connections: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Drain {
    /// Milliseconds since the epoch.
    pub deadline: u64,
    pub remaining: u64,
}
