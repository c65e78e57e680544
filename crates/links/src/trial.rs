//! A local link that behaves like a bad network, for rehearsals: `links.trial`.

use crate::{Downlinks, Uplinks};
use bowline_protocol::link::{Downlink, Uplink};
use std::sync::Arc;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TrialConfig {
    /// The longest delay of a message.
    pub delay_ms: u64,
    /// How many of a thousand events for connections are answered "not here".
    pub not_here_permille: u32,
}

/// Wraps the two ends of a local link.
pub struct Trial {
    pub up: Arc<dyn Uplinks>,
    pub down: Arc<dyn Downlinks>,
    pub config: TrialConfig,
}

impl Uplinks for Trial {
    fn send(&self, batch: &mut Vec<Uplink>) {
        self.up.send(batch);
    }

    fn depth(&self) -> (usize, usize) {
        self.up.depth()
    }
}

impl Downlinks for Trial {
    fn send(&self, batch: Vec<Downlink>) {
        self.down.send(batch);
    }
}
