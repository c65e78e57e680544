//! Client connections: listeners, handshake gate, shards, drain.
//!
//! A gateway runs as shards, each a thread that owns its connections: one poll, one table, one read buffer, one
//! timing wheel. Other threads reach a connection through its shard's mailbox. What a connection means is decided
//! by `bowline_session`; here are the sockets around it.
//!
//! Shard 0 accepts for all and deals out in turn. Connections then spread evenly whatever the shards are busy with,
//! which a listener shared by several polls does not give, and the kernel wakes one thread for a connection, not
//! all. The price is one mailbox message for a connection of another shard.

mod config;
mod files;
mod gate;
mod handle;
mod handshakes;
mod judge;
mod listen;
mod metrics;
mod registry;
mod shard;
mod shared;
mod slots;
mod wheel;
mod wire;

pub use bowline_rooms::{Limits as RoomLimits, Post as RoomPost, Refused as RoomRefused};
pub use bowline_session::RoomJoin;
pub use config::Config;
pub use files::Files;
pub use gate::{Bounds, Gate, Turned};
pub use handle::{
    Addresses, Bound, DrainStatus, Gateway, Handle, SessionKey, State, Status, TransportStatus,
};
pub use metrics::{Metrics, OPERATIONS, STATUSES};
pub use shared::{Http, RoomJudge, RoomQuestion, RoomReply};

/// The longest time from the server's word that a connection ends to its end, in milliseconds.
pub const CLOSE_MS_MAX: u64 = bowline_session::rules::LINGER_SLOW_MS;
/// The number of a connection has 8 bits for its shard.
pub const WORKERS_MAX: usize = 256;

/// Why a gateway cannot start.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("gateway.{key} {problem}")]
    Config { key: &'static str, problem: String },
    #[error("cannot listen on {address} (gateway.{key}): {source}; {}", advice(source))]
    Listen { key: &'static str, address: std::net::SocketAddr, source: std::io::Error },
    #[error("cannot start shard {shard}: {source}; the limits on threads and open files may be too low")]
    Shard { shard: usize, source: std::io::Error },
    #[error("gateway.tls.{}: {}", .0.part().as_str(), .0)]
    Tls(bowline_tls::Error),
    #[error(
        "cannot start the threads of TLS handshakes: {0}; the limits on threads and open files may be too low"
    )]
    Handshakes(std::io::Error),
}

fn advice(error: &std::io::Error) -> &'static str {
    match error.kind() {
        std::io::ErrorKind::AddrInUse => "another process holds the port: stop it or choose another port",
        std::io::ErrorKind::AddrNotAvailable => "no interface of this machine has the address",
        std::io::ErrorKind::PermissionDenied => "ports below 1024 need a privilege: choose a higher one",
        _ => "check the address",
    }
}

#[cfg(test)]
mod tests;
