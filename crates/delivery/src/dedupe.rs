//! What became of the messages that were sent lately, so that a repeat gets the same answer at once.
//!
//! Bounded: what has dropped out is still caught by the store, whose index is unique by (sender, id).

use crate::{Asker, limits, persist::Receipt};
use bowline_protocol::{Body, ConversationId, MessageId, UserId};
use smallvec::SmallVec;
use std::collections::HashMap;
use xxhash_rust::xxh3::{Xxh3, xxh3_128_with_seed};

pub(crate) struct Dedupe {
    seed: u64,
    pending: HashMap<u128, Pending, ahash::RandomState>,
    /// Two generations: when the younger is full, the older is emptied and takes its place. Nothing is ever taken out
    /// one by one, as in a table that is always full and has to grow for the holes that this leaves.
    young: Outcomes,
    old: Outcomes,
}

type Outcomes = HashMap<u128, Receipt, ahash::RandomState>;

/// On its way to the store.
struct Pending {
    conversation: ConversationId,
    hash: u128,
    waiters: SmallVec<[Asker; 1]>,
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
        let [young, old] = [hasher.clone(), hasher.clone()].map(HashMap::with_hasher);
        Self { seed, pending: HashMap::with_hasher(hasher), young, old }
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
        if let Some(pending) = self.pending.get_mut(&key) {
            if pending.conversation != *conversation || pending.hash != hash {
                return Known::Conflict(None);
            }
            pending.waiters.push(asker.clone());
            return Known::Waits;
        }
        match self.young.get(&key).or_else(|| self.old.get(&key)) {
            None => {
                let waiters = SmallVec::new();
                self.pending.insert(key, Pending { conversation: conversation.clone(), hash, waiters });
                Known::New
            }
            Some(stored) if stored.conversation == *conversation && stored.hash == hash => {
                Known::Stored(stored.clone())
            }
            Some(stored) => Known::Conflict(Some(stored.clone())),
        }
    }

    /// Its message is gone and its time is over: it may be used anew.
    pub fn forget(&mut self, sender: &UserId, id: &MessageId) {
        let key = self.key(sender, id);
        self.young.remove(&key);
        self.old.remove(&key);
    }

    /// It was stored; answers whoever repeated it meanwhile.
    pub fn on_stored(&mut self, sender: &UserId, id: &MessageId, receipt: Receipt) -> SmallVec<[Asker; 1]> {
        let key = self.key(sender, id);
        if self.young.len() >= limits::DEDUPE_GENERATION {
            self.old.clear();
            std::mem::swap(&mut self.young, &mut self.old);
        }
        self.young.insert(key, receipt);
        self.pending.remove(&key).map(|pending| pending.waiters).unwrap_or_default()
    }

    /// It was refused: sending it again starts anew. Returns whoever repeated it meanwhile.
    pub fn on_refused(&mut self, sender: &UserId, id: &MessageId) -> SmallVec<[Asker; 1]> {
        let key = self.key(sender, id);
        self.pending.remove(&key).map(|pending| pending.waiters).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Origin;

    #[test]
    fn outcomes_are_remembered_for_a_generation_at_least_in_tables_that_do_not_grow() {
        let hasher = ahash::RandomState::with_seeds(1, 2, 3, 4);
        let mut dedupe = Dedupe::new(1, hasher);
        let (sender, conversation) = (UserId::trusted("a"), ConversationId::trusted("d:a:b"));
        let asker = Asker { origin: Origin::Api { node: 0, request_id: 1 }, frame_id: None };
        let id = |n: usize| MessageId::trusted(&format!("m{n}"));
        let receipt =
            |n: usize| Receipt { conversation: conversation.clone(), seq: n as u64, ts: 1, hash: 7 };
        let mut capacity = None;
        for n in 1..=5 * limits::DEDUPE_GENERATION {
            assert!(matches!(dedupe.on_sent(&sender, &id(n), &conversation, 7, &asker), Known::New));
            assert!(dedupe.on_stored(&sender, &id(n), receipt(n)).is_empty());
            if n == 2 * limits::DEDUPE_GENERATION {
                capacity = Some([dedupe.young.capacity(), dedupe.old.capacity()]);
            }
            let oldest = n.saturating_sub(limits::DEDUPE_GENERATION).max(1);
            let known = dedupe.on_sent(&sender, &id(oldest), &conversation, 7, &asker);
            assert!(
                matches!(known, Known::Stored(receipt) if receipt.seq == oldest as u64),
                "{oldest} after {n}"
            );
        }
        assert_eq!(capacity, Some([dedupe.young.capacity(), dedupe.old.capacity()]));
        assert!(matches!(dedupe.on_sent(&sender, &id(1), &conversation, 7, &asker), Known::New));
    }
}
