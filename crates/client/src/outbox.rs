//! What was sent and not acknowledged: kept in order, repeated with the same id.

use crate::core::{Body, Target};
use std::collections::VecDeque;

/// Messages that may wait for their acknowledgement.
pub const OUTBOX_MAX: usize = 65_536;

#[derive(Debug, Clone)]
pub(crate) struct Outgoing {
    pub id: String,
    pub target: Target,
    pub body: Body,
    /// Sent on this connection and not answered; or to be sent at this time.
    pub state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    Due(u64),
    Sent,
}

#[derive(Debug, Default)]
pub(crate) struct Outbox {
    queue: VecDeque<Outgoing>,
}

impl Outbox {
    pub fn len(&self) -> usize {
        self.queue.len()
    }

    pub fn push(&mut self, id: String, target: Target, body: Body) {
        self.queue.push_back(Outgoing { id, target, body, state: State::Due(0) });
    }

    /// It is answered for good.
    pub fn remove(&mut self, id: &str) -> Option<Outgoing> {
        let is_sent = |o: &Outgoing| o.id == id && o.state == State::Sent;
        let index = self.queue.iter().position(is_sent).or(self.queue.iter().position(|o| o.id == id))?;
        self.queue.remove(index)
    }

    /// It is to be sent again, not before `at`. When the same id was sent several times, each has its answer.
    pub fn retry(&mut self, id: &str, at: u64) -> bool {
        let found = self.queue.iter_mut().find(|o| o.id == id && o.state == State::Sent);
        found.map(|o| o.state = State::Due(at)).is_some()
    }

    /// A new connection: everything goes out again, in order.
    pub fn on_disconnected(&mut self) {
        self.queue.iter_mut().for_each(|o| o.state = State::Due(0));
    }

    /// Takes what is due, in order; it counts as sent.
    pub fn take_due(&mut self, now: u64) -> Vec<Outgoing> {
        let is_due = |o: &&mut Outgoing| matches!(o.state, State::Due(at) if at <= now);
        self.queue
            .iter_mut()
            .filter(is_due)
            .map(|o| {
                o.state = State::Sent;
                o.clone()
            })
            .collect()
    }

    pub fn next_due(&self) -> Option<u64> {
        let due = self.queue.iter().filter_map(|o| match o.state {
            State::Due(at) => Some(at),
            State::Sent => None,
        });
        due.min()
    }
}
