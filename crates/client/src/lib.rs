//! The client library: ordering, gap repair, back-off and repeats made invisible.
//!
//! [`core`] holds every decision and no socket: what happened and the time go in, what to do comes out.
//! [`connect`] drives it over WebSocket or TCP on tokio. See `docs/protocol.md` for the frames.

pub mod backoff;
pub mod core;
mod dial;
mod driver;
mod outbox;
mod rooms;
mod timeline;

pub use crate::core::{Body, Event, Message, RoomMessage, SendError};
pub use dial::{Address, Stream, Trust, TrustError};
pub use driver::{Client, Config, ConnectError, Events, TokenSource, connect};
