//! The wire: what clients and servers say to each other, and what nodes say to each other.
//!
//! Everything here is sans-IO. [`frame`] holds the client frames of `docs/protocol.md`, [`ws`] and [`tcp`]
//! the two framings that carry them, [`json`] how objects are read, [`error`] the tables of error and close codes, and [`link`] the
//! messages between gateway, router and API.

pub mod error;
pub mod frame;
pub mod ids;
pub mod json;
pub mod link;
pub mod tcp;
pub mod ws;

pub use error::{CloseCode, ErrorCode};
pub use frame::{Body, ClientFrame, Frame, ServerFrame};
pub use ids::{ConversationId, DeviceId, MessageId, Millis, Seq, UserId};

/// The version of the client protocol that this build speaks.
pub const VERSION: u32 = 1;
