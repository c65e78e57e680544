//! Rooms of one node: who is counted in, the numbers of messages, and the window of recent ones.
//!
//! Sans-IO: the time comes in, and mail goes out through a [`Carrier`]. [`Rooms`] is shared by all shards of a gateway
//! and the API. A room is locked for as long as it takes to give a message its number, keep it and put it into the
//! mailboxes of the shards that have members; so each mailbox has the messages of a room in the order of their
//! numbers. Which connections are members is known by their shards only; a room knows how many each shard has.

mod message;
mod room;
mod table;
mod window;

pub use message::{Message, Post, batch_frame};
pub use room::{Joined, Room};
pub use table::Rooms;

use bowline_protocol::Millis;

/// Bounds that are not configured: what they count, and what happens when they are reached.
pub mod limits {
    /// Rooms of one connection; one more is refused as `rate_limited`.
    pub const ROOMS_PER_CONNECTION_MAX: usize = 1_000;
    /// Rooms of one node; one more is refused as `overloaded`.
    pub const ROOMS_MAX: usize = 1_000_000;
    /// Parts of the table that are locked apart, and looked through in turn for rooms that nobody needs.
    pub const STRIPES: usize = 64;
    /// Rooms after which one look leaves the other parts to the next.
    pub const SWEEP_ROOMS: usize = 4_096;
}

/// What is configured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Recent messages that a room keeps, and for how long.
    pub window_messages: usize,
    pub window_ms: Millis,
    pub members_max: u32,
}

/// Why something was not done; all of it may be possible later.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    #[error("the room has {0} members, and takes no more (rooms.members_max)")]
    Full(u32),
    #[error("this node has {} rooms, and takes no more", limits::ROOMS_MAX)]
    TooManyRooms,
    #[error("members of the room are behind by more than this node holds for them; send it again later")]
    Behind,
}

/// Takes messages to the shards.
pub trait Carrier {
    /// Whether a shard takes more mail now.
    fn has_space(&self, shard: usize) -> bool;
    /// Puts messages into a shard's mailbox, together. Called while the room is locked: it must not wait.
    fn carry(&self, shard: usize, room: &std::sync::Arc<Room>, messages: &[Message]);
}

#[cfg(test)]
mod tests;
