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

    fn asker(request_id: u64) -> Asker {
        Asker { origin: Origin::Api { node: 0, request_id }, frame_id: None }
    }

    fn id(text: &str) -> MessageId {
        MessageId::trusted(text)
    }

    fn receipt(seq: u64, hash: u128) -> Receipt {
        Receipt { conversation: ConversationId::trusted("d:a:b"), seq, ts: 0, hash }
    }

    struct Rig {
        dedupe: Dedupe,
        user: UserId,
    }

    impl Rig {
        fn new() -> Self {
            Self {
                dedupe: Dedupe::new(7, ahash::RandomState::with_seeds(1, 2, 3, 4)),
                user: UserId::trusted("a"),
            }
        }

        /// What is known of a message, in a word.
        fn sent(&mut self, text: &str, conversation: &str, hash: u128) -> String {
            let conversation = ConversationId::trusted(conversation);
            match self.dedupe.on_sent(&self.user, &id(text), &conversation, hash, &asker(hash as u64)) {
                Known::New => "new".into(),
                Known::Waits => "waits".into(),
                Known::Stored(receipt) => format!("stored {}", receipt.seq),
                Known::Conflict(receipt) => format!("conflict {:?}", receipt.map(|r| r.seq)),
            }
        }
    }

    #[test]
    fn an_id_is_one_message() {
        let mut rig = Rig::new();
        assert_eq!(rig.sent("m", "d:a:b", 1), "new");
        // On its way: the same waits, another body or conversation is a conflict.
        assert_eq!(rig.sent("m", "d:a:b", 1), "waits");
        assert_eq!(
            (rig.sent("m", "d:a:b", 2), rig.sent("m", "d:a:c", 1)),
            ("conflict None".into(), "conflict None".into())
        );
        let waiting = rig.dedupe.on_stored(&rig.user.clone(), &id("m"), receipt(5, 1));
        assert_eq!(waiting.to_vec(), [asker(1)]);
        assert_eq!(rig.sent("m", "d:a:b", 1), "stored 5");
        for (conversation, hash) in [("d:a:b", 2), ("d:a:c", 1), ("d:a:c", 2)] {
            assert_eq!(rig.sent("m", conversation, hash), "conflict Some(5)", "{conversation} {hash}");
        }
        rig.user = UserId::trusted("b");
        assert_eq!(rig.sent("m", "d:a:b", 1), "new", "ids are the sender's own");
    }

    #[test]
    fn what_was_refused_may_be_sent_anew_and_what_is_stored_is_never_refused() {
        let mut rig = Rig::new();
        rig.sent("m", "d:a:b", 1);
        rig.sent("m", "d:a:b", 1);
        assert_eq!(rig.dedupe.on_refused(&rig.user.clone(), &id("m")).to_vec(), [asker(1)]);
        assert_eq!(rig.sent("m", "d:a:b", 1), "new");
        rig.dedupe.forget(&rig.user, &id("m"));
        assert_eq!(rig.sent("m", "d:a:b", 1), "waits", "what is on its way is not forgotten");
        rig.dedupe.on_stored(&rig.user.clone(), &id("m"), receipt(1, 1));
        assert!(rig.dedupe.on_refused(&rig.user.clone(), &id("m")).is_empty());
        assert_eq!(rig.sent("m", "d:a:b", 1), "stored 1");
        rig.dedupe.forget(&rig.user, &id("m"));
        assert_eq!(rig.sent("m", "d:a:b", 1), "new");
    }

    #[test]
    fn outcomes_are_remembered_for_a_generation_at_least_in_tables_that_do_not_grow() {
        let mut rig = Rig::new();
        let user = rig.user.clone();
        let name = |n: usize| format!("m{n}");
        let mut capacity = None;
        for n in 1..=5 * limits::DEDUPE_GENERATION {
            assert_eq!(rig.sent(&name(n), "d:a:b", 1), "new");
            assert!(rig.dedupe.on_stored(&user, &id(&name(n)), receipt(n as u64, 1)).is_empty());
            if n == 2 * limits::DEDUPE_GENERATION {
                capacity = Some([rig.dedupe.young.capacity(), rig.dedupe.old.capacity()]);
            }
            let oldest = n.saturating_sub(limits::DEDUPE_GENERATION).max(1);
            assert_eq!(rig.sent(&name(oldest), "d:a:b", 1), format!("stored {oldest}"), "after {n}");
        }
        assert_eq!(capacity, Some([rig.dedupe.young.capacity(), rig.dedupe.old.capacity()]));
        assert_eq!(rig.dedupe.young.len(), limits::DEDUPE_GENERATION);
        assert_eq!(rig.sent("m1", "d:a:b", 1), "new");
        // What is on its way is no part of it.
        for n in 0..2 * limits::DEDUPE_GENERATION {
            rig.dedupe.on_stored(&user, &id(&format!("n{n}")), receipt(1, 1));
        }
        assert_eq!(rig.sent("m1", "d:a:b", 1), "waits");
        assert_eq!((rig.dedupe.pending.len(), rig.dedupe.old.len()), (1, limits::DEDUPE_GENERATION));
    }

    #[test]
    fn what_was_sent_is_told_apart_by_conversation_kind_and_body() {
        let json = |text: &'static str| Body::Json(bytes::Bytes::from_static(text.as_bytes()));
        let binary = Body::Binary(bytes::Bytes::from_static(b"1"));
        let hashes = [("d:a:b", json("1")), ("d:a:c", json("1")), ("d:a:b", json("2")), ("d:a:b", binary)]
            .map(|(id, body)| content_hash(&ConversationId::trusted(id), &body));
        for (index, hash) in hashes.iter().enumerate() {
            assert!(!hashes[..index].contains(hash), "{index}");
        }
    }
}
