//! Gateway ↔ router: the two seams through which they meet, also inside one process.
//!
//! A link takes messages in batches. The receiving ends implement the same traits: the router's inbox is an
//! [`Uplinks`], a gateway's (and the API's) is a [`Downlinks`]; [`Local`] hands one to the other. [`Trial`] is a
//! local link that behaves like a bad network: it serialises, delays and now and then answers "not here".

mod local;
pub mod mailbox;
mod trial;

pub use local::Local;
pub use trial::{Trial, TrialConfig};

use bowline_protocol::link::{Downlink, NodeRef, Uplink};
use std::sync::Arc;

/// The way up. Messages of one connection arrive in the order in which they were sent, at least once.
pub trait Uplinks: Send + Sync {
    /// Takes messages from the front of `batch` as far as there is room. What is left stays in `batch`; the
    /// caller keeps it, reads no further from its clients, and offers it again.
    fn send(&self, batch: &mut Vec<Uplink>);

    /// How many messages wait at the other end, and how many may.
    fn depth(&self) -> (usize, usize);
}

/// The way down. Messages for one connection arrive in the order in which they were sent, at least once; an end
/// that cannot take one answers `NotHere`. Blocks while the other end's queue is full: gateways never wait for
/// the router, so this ends.
pub trait Downlinks: Send + Sync {
    fn send(&self, batch: Vec<Downlink>);
}

/// Who receives what comes down to one node.
#[derive(Clone)]
pub struct NodeEnds {
    pub node: Arc<NodeRef>,
    /// Takes what is for connections.
    pub gateway: Option<Arc<dyn Downlinks>>,
    /// Takes `Down::Answer`.
    pub api: Option<Arc<dyn Downlinks>>,
}
