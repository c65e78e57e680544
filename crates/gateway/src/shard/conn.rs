//! One connection as its shard keeps it.

use super::socket::Socket;
use crate::wire::Transport;
use bowline_protocol::{
    tcp,
    ws::{self, deflate::Agreed},
};
use bowline_session::{Outbox, Session, State};
use std::num::NonZeroU8;

/// A room that a connection is a member of: where its shard has the room, and where the room has the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Membership {
    pub room: u32,
    pub position: u32,
}

/// What few connections have.
#[derive(Debug, Default)]
pub struct Extras {
    pub rooms: Vec<Membership>,
}

/// How far a connection is, and how its bytes are taken apart.
pub enum Stage {
    /// A request head is being read. Once it asked for a session, what the answer 101 needs.
    Head(Option<Box<Upgrade>>),
    WebSocket(ws::Decoder),
    Tcp(tcp::Decoder),
    /// The WebSocket echo of conformance suites.
    Echo(ws::Decoder),
    /// An HTTP answer was given, or the bytes of the client make no sense any more: they are discarded.
    Deaf,
}

/// An upgrade that waits for its token to be judged and for the router.
pub struct Upgrade {
    pub accept: [u8; 28],
    pub subprotocol: bool,
    pub deflate: Option<Agreed>,
}

/// Bytes that were read and not taken apart yet.
pub struct Held {
    pub bytes: Vec<u8>,
}

pub struct Conn {
    pub socket: Socket,
    pub transport: Transport,
    /// The socket may have bytes, or its end, to read.
    pub readable: bool,
    /// The end of the input has been announced; it may lie behind bytes.
    pub ending: bool,
    /// It is in the list of connections to read.
    pub to_read: bool,
    /// It is in the list of connections to flush.
    pub to_flush: bool,
    /// It is not read because the router's queue is full.
    pub stalled: bool,
    /// It has passed the gate.
    pub entered: bool,
    /// It counts among the live sessions.
    pub live: bool,
    pub output_ended: bool,
    /// What its messages are compressed with, in bits; none means as they are.
    pub window_bits: Option<NonZeroU8>,
    pub stage: Stage,
    pub session: Session,
    pub held: Option<Box<Held>>,
    pub outbox: Option<Box<Outbox>>,
    pub extras: Option<Box<Extras>>,
}

const _: () = assert!(size_of::<Conn>() <= 192);

impl Conn {
    pub fn new(socket: Socket, stage: Stage, transport: Transport, session: Session) -> Self {
        Self {
            socket,
            transport,
            readable: false,
            ending: false,
            to_read: false,
            to_flush: false,
            stalled: false,
            entered: false,
            live: false,
            output_ended: false,
            window_bits: None,
            stage,
            session,
            held: None,
            outbox: None,
            extras: None,
        }
    }

    pub fn extras(&mut self) -> &mut Extras {
        self.extras.get_or_insert_default()
    }

    pub fn memberships(&self) -> &[Membership] {
        self.extras.as_ref().map_or(&[], |extras| &extras.rooms)
    }

    /// Something is queued, or waits for the socket.
    pub fn has_unsent(&self) -> bool {
        self.outbox.is_some() || self.socket.unsent_bytes() > 0
    }

    /// Bytes wait to be taken apart, here or in the socket.
    pub fn has_input(&self) -> bool {
        self.readable || self.held.is_some()
    }

    /// Its bytes are wanted: frames, or what is discarded after the end. One that is answered after the end of its
    /// input has none, but may fail.
    pub fn wants_input(&self) -> bool {
        let state = self.session.state();
        state.reads_frames() || !state.is_active() || state == State::Answering
    }
}
