//! The link of one process: a call.

use crate::{Downlinks, NodeEnds};
use bowline_protocol::link::{Down, Downlink};

/// Hands what the router sends to the ends of this node.
pub struct Local {
    ends: NodeEnds,
}

impl Local {
    pub fn new(ends: NodeEnds) -> Self {
        Self { ends }
    }
}

impl Downlinks for Local {
    fn send(&self, batch: Vec<Downlink>) {
        let (answers, frames): (Vec<_>, Vec<_>) = batch
            .into_iter()
            .filter(|message| message.node == self.ends.node)
            .partition(|message| matches!(message.event, Down::Answer { .. }));
        for (end, part) in [(&self.ends.gateway, frames), (&self.ends.api, answers)] {
            if let (Some(end), false) = (end, part.is_empty()) {
                end.send(part);
            }
        }
    }
}
