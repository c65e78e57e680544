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
    fn so_many_are_remembered_and_the_oldest_goes_first() {
        let mut rig = Rig::new();
        let user = rig.user.clone();
        let max = limits::DEDUPE_ENTRIES_MAX;
        for n in 0..max {
            rig.dedupe.on_stored(&user, &id(&format!("m{n}")), receipt(n as u64, 1));
        }
        assert_eq!(rig.sent("m0", "d:a:b", 1), "stored 0", "all of them");
        rig.dedupe.on_stored(&user, &id("more"), receipt(0, 1));
        assert_eq!(
            (rig.sent("m0", "d:a:b", 1), rig.sent("m1", "d:a:b", 1)),
            ("new".into(), "stored 1".into())
        );
        // The first one is on its way again: it keeps its place when its old one would have gone.
        for n in 1..=max {
            rig.dedupe.on_stored(&user, &id(&format!("n{n}")), receipt(1, 1));
        }
        assert_eq!(rig.sent("m0", "d:a:b", 1), "waits");
        assert_eq!(rig.dedupe.entries.len(), max + 1, "nothing else is left behind");
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
