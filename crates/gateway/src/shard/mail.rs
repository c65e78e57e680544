//! What other threads tell a shard.

use super::socket::Socket;
use bowline_auth::{Fault, Identity};
use bowline_protocol::{CloseCode, frame::RoomRequest, link::Downlink};
use bowline_rooms::{Message, Room};
use bytes::Bytes;
use std::sync::{Arc, mpsc};

/// Who is meant by a revocation.
pub type Predicate = Arc<dyn Fn(&crate::SessionKey<'_>) -> bool + Send + Sync>;

pub enum Mail {
    /// From the router; every target is a connection of this shard.
    Down(Downlink),
    /// A verdict that took its time.
    Verdict { connection: u64, refresh: bool, judged: Result<Identity, Fault> },
    /// A message of a room with members here.
    Room { room: Arc<Room>, message: Message },
    /// What the application says to a join.
    RoomVerdict { connection: u64, request: Box<RoomRequest>, allowed: Result<bool, String> },
    /// A connection that was accepted elsewhere, with what was read of it.
    Accepted { socket: Socket, door: Door, read: Bytes },
    /// A drain has begun; `Shared::drain` says which.
    Drain,
    /// Close what the predicate names, and say how many that were.
    CloseWhere { predicate: Predicate, code: CloseCode, closed: mpsc::SyncSender<usize> },
    /// Close everything at once and end.
    Stop,
}

/// The listener by which a connection came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Door {
    Http,
    Tcp,
}

impl From<Door> for bowline_tls::Door {
    fn from(door: Door) -> Self {
        match door {
            Door::Http => Self::Http,
            Door::Tcp => Self::Frames,
        }
    }
}
