//! What became of the messages that were sent lately, so that a repeat gets the same answer at once.
//!
//! Bounded: what has dropped out is still caught by the store, whose index is unique by (sender, id).

use crate::{Asker, limits, persist::Receipt};
use bowline_protocol::{Body, ConversationId, MessageId, UserId};
use smallvec::SmallVec;
use std::collections::{HashMap, VecDeque};
use xxhash_rust::xxh3::{Xxh3, xxh3_128_with_seed};

pub(crate) struct Dedupe {
    seed: u64,
    entries: HashMap<u128, Entry, ahash::RandomState>,
    stored: VecDeque<u128>,
}

enum Entry {
    Pending { conversation: ConversationId, hash: u128, waiters: SmallVec<[Asker; 1]> },
    Stored(Receipt),
}

/// What is known of a message that is sent.
pub(crate) enum Known {
    /// Nothing: go on; the entry is pending from now on.
    New,
    /// The same is on its way; the asker waits with the first one.
    Waits,
    Stored(Receipt),
    /// The id was used for something else; where that was stored, when it is.
    Conflict(Option<Receipt>),
}

/// Identifies what the sender sent: the conversation and the body as it came. Stored with the message.
pub(crate) fn content_hash(conversation: &ConversationId, body: &Body) -> u128 {
    let mut hash = Xxh3::new();
    hash.update(conversation.as_bytes());
    hash.update(match body {
        Body::Json(_) => b"\0j",
        Body::Binary(_) => b"\0b",
    });
    hash.update(body.bytes());
    hash.digest128()
}

impl Dedupe {
    pub fn new(seed: u64, hasher: ahash::RandomState) -> Self {
        Self { seed, entries: HashMap::with_hasher(hasher), stored: VecDeque::new() }
    }

    fn key(&self, sender: &UserId, id: &MessageId) -> u128 {
        // User ids hold no colon, so that no two pairs make one text.
        let mut text: SmallVec<[u8; 132]> = SmallVec::new();
        text.extend_from_slice(sender.as_bytes());
        text.push(b':');
        text.extend_from_slice(id.as_bytes());
        xxh3_128_with_seed(&text, self.seed)
    }

    pub fn on_sent(
        &mut self,
        sender: &UserId,
        id: &MessageId,
        conversation: &ConversationId,
        hash: u128,
        asker: &Asker,
    ) -> Known {
        let key = self.key(sender, id);
        match self.entries.get_mut(&key) {
            None => {
                let entry =
                    Entry::Pending { conversation: conversation.clone(), hash, waiters: SmallVec::new() };
                self.entries.insert(key, entry);
                Known::New
            }
            Some(Entry::Pending { conversation: c, hash: h, waiters }) if c == conversation && *h == hash => {
                waiters.push(asker.clone());
                Known::Waits
            }
            Some(Entry::Stored(receipt)) if receipt.conversation == *conversation && receipt.hash == hash => {
                Known::Stored(receipt.clone())
            }
            Some(Entry::Stored(receipt)) => Known::Conflict(Some(receipt.clone())),
            Some(Entry::Pending { .. }) => Known::Conflict(None),
        }
    }

    /// Its message is gone and its time is over: it may be used anew.
    pub fn forget(&mut self, sender: &UserId, id: &MessageId) {
        let key = self.key(sender, id);
        if matches!(self.entries.get(&key), Some(Entry::Stored(_))) {
            self.entries.remove(&key);
        }
    }

    /// It was stored; answers whoever repeated it meanwhile.
    pub fn on_stored(&mut self, sender: &UserId, id: &MessageId, receipt: Receipt) -> SmallVec<[Asker; 1]> {
        let key = self.key(sender, id);
        let before = self.entries.insert(key, Entry::Stored(receipt));
        self.stored.push_back(key);
        while self.stored.len() > limits::DEDUPE_ENTRIES_MAX {
            if let Some(oldest) = self.stored.pop_front()
                && matches!(self.entries.get(&oldest), Some(Entry::Stored(_)))
            {
                self.entries.remove(&oldest);
            }
        }
        match before {
            Some(Entry::Pending { waiters, .. }) => waiters,
            _ => SmallVec::new(),
        }
    }

    /// It was refused: sending it again starts anew. Returns whoever repeated it meanwhile.
    pub fn on_refused(&mut self, sender: &UserId, id: &MessageId) -> SmallVec<[Asker; 1]> {
        let key = self.key(sender, id);
        match self.entries.get(&key) {
            Some(Entry::Pending { .. }) => match self.entries.remove(&key) {
                Some(Entry::Pending { waiters, .. }) => waiters,
                _ => SmallVec::new(),
            },
            _ => SmallVec::new(),
        }
    }
}
