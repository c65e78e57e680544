//! The messages of a run: what was sent, and which number of which conversation each has.

use super::Name;
use std::{
    collections::{BTreeMap, HashMap},
    ops::{Index, IndexMut},
};

/// Numbers without a message are listed up to so many ranges of a conversation.
const UNUSED_MAX: usize = 1_000;

#[derive(Default)]
pub struct Messages {
    /// In the order in which they were first sent.
    messages: Vec<Message>,
    by_id: HashMap<(usize, Name), usize>,
    /// The message of each number, for each conversation.
    numbers: Vec<BTreeMap<u64, usize>>,
}

pub struct Message {
    pub id: Name,
    pub device: usize,
    pub conversation: usize,
    /// 0 until somebody was told.
    pub seq: u64,
    pub ts: u64,
    pub acked: bool,
    /// Refused for a while at least once: it takes its place when it is sent again.
    pub was_refused: bool,
    pub is_refused: bool,
    is_doubled: bool,
    is_changed: bool,
}

impl Message {
    /// Many devices may see the same fault; it is counted once.
    pub fn is_first_double(&mut self) -> bool {
        !std::mem::replace(&mut self.is_doubled, true)
    }

    pub fn is_first_change(&mut self) -> bool {
        !std::mem::replace(&mut self.is_changed, true)
    }
}

/// Whether a message is what stands at a number.
pub enum Number {
    Good,
    Elsewhere { conversation: usize },
    Another { seq: u64 },
    Taken { by: usize },
    AnotherTime { ts: u64 },
}

impl Index<usize> for Messages {
    type Output = Message;
    fn index(&self, message: usize) -> &Message {
        &self.messages[message]
    }
}

impl IndexMut<usize> for Messages {
    fn index_mut(&mut self, message: usize) -> &mut Message {
        &mut self.messages[message]
    }
}

impl Messages {
    pub fn add_conversation(&mut self) {
        self.numbers.push(BTreeMap::new());
    }

    pub fn count(&self) -> usize {
        self.messages.len()
    }

    pub fn on_sent(&mut self, user: usize, device: usize, conversation: usize, id: &str) {
        let id: Name = id.into();
        self.by_id.insert((user, id.clone()), self.messages.len());
        self.messages.push(Message {
            id,
            device,
            conversation,
            seq: 0,
            ts: 0,
            acked: false,
            was_refused: false,
            is_refused: false,
            is_doubled: false,
            is_changed: false,
        });
    }

    pub fn on_refused(&mut self, user: usize, id: &str, for_now: bool) {
        if let Some(message) = self.find(user, id) {
            let message = &mut self.messages[message];
            message.was_refused = true;
            message.is_refused |= !for_now;
        }
    }

    pub fn find(&self, user: usize, id: &str) -> Option<usize> {
        self.by_id.get(&(user, Name::from(id))).copied()
    }

    /// Somebody was told that this message has that number; the first time it is believed.
    pub fn place(&mut self, index: usize, conversation: usize, seq: u64, ts: u64) -> Number {
        let message = &mut self.messages[index];
        if message.conversation != conversation {
            return Number::Elsewhere { conversation: message.conversation };
        }
        if message.seq == 0 {
            (message.seq, message.ts) = (seq, ts);
            let by = *self.numbers[conversation].entry(seq).or_insert(index);
            return if by == index { Number::Good } else { Number::Taken { by } };
        }
        if message.seq != seq {
            return Number::Another { seq: message.seq };
        }
        let ts_before = message.ts;
        match self.at(conversation, seq) {
            Some(by) if by != index => Number::Taken { by },
            _ if ts_before != ts => Number::AnotherTime { ts: ts_before },
            _ => Number::Good,
        }
    }

    pub fn at(&self, conversation: usize, seq: u64) -> Option<usize> {
        self.numbers[conversation].get(&seq).copied()
    }

    /// The newest number of a conversation, or 0.
    pub fn last(&self, conversation: usize) -> u64 {
        self.numbers[conversation].last_key_value().map_or(0, |(seq, _)| *seq)
    }

    pub fn stored(&self, conversation: usize) -> u64 {
        self.numbers[conversation].len() as u64
    }

    /// How many messages above a number were sent by devices that are not the user's own.
    pub fn of_others(&self, conversation: usize, above: u64, own: impl Fn(usize) -> bool) -> u64 {
        let above = self.numbers[conversation].range(above.saturating_add(1)..);
        above.filter(|(_, message)| !own(self.messages[**message].device)).count() as u64
    }

    /// Ranges of numbers below the newest one that no message has.
    pub fn unused_numbers(&self, conversation: usize) -> Vec<(u64, u64)> {
        let mut next = 1;
        let mut unused = Vec::new();
        for seq in self.numbers[conversation].keys() {
            if *seq > next && unused.len() < UNUSED_MAX {
                unused.push((next, seq - 1));
            }
            next = seq.saturating_add(1);
        }
        unused
    }
}
