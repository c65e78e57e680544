//! TLS of the listeners: [`Acceptor`] has the certificate and reads it again, [`Tls`] is one connection.
//!
//! Only TLS 1.3 is spoken (RFC 8446). [`Tls`] owns no socket: whoever does, a shard, the threads of the handshakes or
//! the HTTP server, lends it for every call, so that a connection can go from one to the other in the middle.

mod acceptor;
mod record;

pub use acceptor::{Acceptor, Door, Error, Part};
pub use record::{Got, Tls};

use std::{any::Any, net::TcpStream};

/// A connection on its way from one owner to another.
pub struct Stream {
    pub socket: TcpStream,
    /// Where the listener speaks TLS.
    pub tls: Option<Box<Tls>>,
    /// What the first owner wants dropped with the connection, and back if it comes back.
    pub attached: Option<Box<dyn Any + Send + Sync>>,
}

impl From<TcpStream> for Stream {
    fn from(socket: TcpStream) -> Self {
        Self { socket, tls: None, attached: None }
    }
}

/// Bounds of this crate: what they count, and what happens when they are reached.
pub mod limits {
    /// What is read of a socket at once, with what was kept of a record before, in bytes. A handshake message that
    /// does not fit ends the connection.
    pub const RECORDS_BYTES: usize = 64 << 10;
    /// The same before the handshake is done: one record and a little.
    pub const HANDSHAKE_BYTES: usize = 20 << 10;
    /// Plaintext that is sealed at once, and ciphertext that may wait for a socket beyond its own buffer: this much
    /// and the records' headers.
    pub const SEALED_BYTES: usize = 32 << 10;
}

#[cfg(test)]
mod tests;
