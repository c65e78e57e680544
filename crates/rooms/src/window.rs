//! The recent messages of a room: numbers without gaps, up to the newest.

use crate::{Limits, Message};
use bowline_protocol::Millis;
use std::collections::VecDeque;

#[derive(Debug, Default)]
pub(crate) struct Window {
    messages: VecDeque<Message>,
    newest: u64,
}

impl Window {
    /// The number of the newest message, kept or not; 0 when there never was one.
    pub fn newest(&self) -> u64 {
        self.newest
    }

    pub fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// Messages do not go back in time, whatever the clock does.
    pub fn ts(&self, now: Millis) -> Millis {
        self.messages.back().map_or(now, |last| last.ts.max(now))
    }

    pub fn push(&mut self, message: Message, limits: &Limits) {
        debug_assert_eq!(message.offset, self.newest + 1);
        self.newest = message.offset;
        while self.messages.len() >= limits.window_messages.max(1) {
            self.messages.pop_front();
        }
        self.messages.push_back(message);
    }

    /// Drops what is too old.
    pub fn trim(&mut self, now: Millis, limits: &Limits) {
        while let Some(first) = self.messages.front()
            && first.ts.saturating_add(limits.window_ms) <= now
        {
            self.messages.pop_front();
        }
        if self.messages.is_empty() {
            self.messages = VecDeque::new();
        }
    }

    /// What came after `offset`; none when some of that is gone, or there never was such an offset.
    pub fn after(&self, offset: u64) -> Option<impl Iterator<Item = &Message>> {
        let missing = self.newest.checked_sub(offset)?;
        let skip = (self.messages.len() as u64).checked_sub(missing)?;
        Some(self.messages.range(skip as usize..))
    }
}
