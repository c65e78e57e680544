//! What a transaction does once the store has answered: acknowledged, pushed and announced when it is durable;
//! numbered anew without what the store has already; refused when the store failed.

use crate::{
    Core, Now, Slot,
    batch::{Effect, Entry, InFlight, Item, Staged},
    conversation::{Content, Conversation, TailEntry},
    deliver::Stored,
    ingest::conflict,
    limits,
    persist::{Outcome, Receipt, Refused},
    reads::Deferred,
    timers::Timer,
    unavailable,
};
use bowline_protocol::{ConversationId, ErrorCode, Seq, UserId, error::Refusal};
use std::collections::{HashMap, VecDeque};

impl Core {
    pub(crate) fn on_outcome(&mut self, outcome: Outcome, now: Now) {
        let Some(in_flight) = self.in_flight.take() else { return };
        match outcome {
            Outcome::Committed => self.on_committed(in_flight, now),
            Outcome::Refused(faults) => self.on_faults(in_flight, faults, now),
            Outcome::Stale { partition, epoch } => {
                let reason = format!("partition {partition} belongs to another node since epoch {epoch}");
                self.on_failed(in_flight, &reason, now);
            }
            Outcome::Failed(reason) => self.on_failed(in_flight, &reason, now),
        }
    }

    fn on_committed(&mut self, in_flight: InFlight, now: Now) {
        let InFlight { items, moved, mut staged, order, .. } = in_flight;
        let mut waited = Vec::new();
        for item in &items {
            self.remember(item);
        }
        for id in &order {
            if let Some(staged) = staged.remove(id) {
                waited.extend(self.apply(id, staged, now));
            }
        }
        self.forget_devices(&items);
        for item in items {
            self.release_pending(&item.entry);
            self.on_entry_durable(item.entry, item.effect, now);
        }
        self.send_receipts(moved, now);
        for deferred in waited {
            self.on_deferred(deferred, now);
        }
    }

    fn forget_devices(&mut self, items: &[Item]) {
        let forgotten = items.iter().filter_map(|item| match (&item.entry, &item.effect) {
            (Entry::ForgetDevice { user, device, .. }, Effect::Forgotten) => {
                Some((user.clone(), device.clone()))
            }
            _ => None,
        });
        let forgotten: Vec<_> = forgotten.collect();
        if !forgotten.is_empty() {
            self.counters.devices_forgotten += forgotten.len() as u64;
            self.on_devices_forgotten(&forgotten);
        }
    }

    /// Keeps a stored message among the newest of its conversation.
    fn remember(&mut self, item: &Item) {
        if let (Entry::Message(incoming), Effect::Stored { seq, ts }) = (&item.entry, &item.effect)
            && let Some(Slot::Ready(conversation)) = self.conversations.get_mut(&incoming.conversation)
        {
            let (from, device) = (incoming.user.clone(), incoming.device.clone());
            let content = Content { id: incoming.id.clone(), ts: *ts, body: incoming.body.clone() };
            conversation.tail.push(*seq, TailEntry { from, device, content: Some(Box::new(content)) });
        }
    }

    /// Makes the staged state the committed one. Returns what waited for a conversation to be created.
    fn apply(&mut self, id: &ConversationId, staged: Staged, now: Now) -> Vec<Deferred> {
        if staged.deleted {
            self.conversations.remove(id);
            return Vec::new();
        }
        let mut waited = Vec::new();
        if staged.created {
            let made = Slot::Ready(Box::new(Conversation::empty(self.hasher.clone(), now.mono)));
            if let Some(Slot::Loading(deferred)) = self.conversations.insert(id.clone(), made) {
                waited = deferred;
            }
        }
        self.apply_to(id, staged, now);
        waited
    }

    fn apply_to(&mut self, id: &ConversationId, staged: Staged, now: Now) {
        let Some(Slot::Ready(conversation)) = self.conversations.get_mut(id) else { return };
        (conversation.last, conversation.last_ts) = (staged.last, staged.last_ts);
        (conversation.exists, conversation.touched) = (staged.exists, now.mono);
        for (user, member) in staged.members {
            conversation.put_member(user, member);
        }
        if staged.floor > conversation.floor {
            conversation.lift(staged.floor);
        }
        let (last, floor) = (conversation.last, conversation.floor);
        self.on_grown(id, last, floor, now);
    }

    fn on_entry_durable(&mut self, entry: Entry, effect: Effect, now: Now) {
        match (entry, effect) {
            (Entry::Message(incoming), Effect::Stored { seq, ts }) => {
                self.counters.messages_stored += 1;
                let conversation = incoming.conversation.clone();
                let receipt = Receipt { conversation, seq, ts, hash: incoming.hash };
                self.acknowledge(&incoming.asker, &incoming.id, &receipt);
                for asker in self.dedupe.on_stored(&incoming.user, &incoming.id, receipt.clone()) {
                    self.acknowledge(&asker, &incoming.id, &receipt);
                }
                self.push(Stored { incoming: &incoming, seq, ts }, now);
            }
            (Entry::Message(incoming), Effect::Refuse(refusal)) => self.refuse_incoming(&incoming, refusal),
            (Entry::Clear { asker, user, conversation }, Effect::Nothing) => {
                self.confirm(&asker, None);
                self.announce_cleared(&user, &conversation);
            }
            (Entry::Create(create), Effect::Changed(announcement)) => {
                self.confirm(&create.asker, Some(&create.conversation));
                self.announce(announcement);
            }
            (Entry::Change(change), Effect::Changed(announcement)) => {
                self.confirm(&change.asker, None);
                self.on_members_left(&announcement);
                self.announce(announcement);
            }
            (Entry::Change(change), Effect::Nothing) => self.confirm(&change.asker, None),
            (Entry::ForgetDevice { asker: Some(asker), .. }, _) => self.confirm(&asker, None),
            (Entry::Expire(expire), effect) => self.on_expired(&expire, &effect, now),
            (Entry::ForgetIds { .. }, _) => self.on_swept(false, now),
            (Entry::Read(purpose), _) => self.read_again(*purpose, now),
            (Entry::Clear { asker, .. }, Effect::Refuse(refusal)) => self.refuse(&asker, refusal),
            (Entry::Change(change), Effect::Refuse(refusal)) => self.refuse(&change.asker, refusal),
            // Until the user's devices are found, which may have been looked up before this.
            (Entry::PutDevice { user, device, .. }, _)
                if self.users.get(&user).is_none_or(|user| user.known.is_some()) =>
            {
                self.unstored_devices.retain(|(u, d)| (u, d) != (&user, &device));
            }
            // No other pair is ever staged.
            _ => {}
        }
    }

    /// Some writes met what the store already has. Those are answered; the rest is numbered anew.
    fn on_faults(&mut self, in_flight: InFlight, faults: Vec<(usize, Refused)>, now: Now) {
        let mut verdicts: HashMap<usize, Refused> = HashMap::new();
        for (write, fault) in faults {
            if let Some(Some(item)) = in_flight.writes.get(write) {
                verdicts.entry(*item).or_insert(fault);
            }
        }
        if verdicts.is_empty() {
            // A fault that no entry can answer for would come back for ever.
            return self.on_failed(in_flight, "the store refused a write that belongs to no request", now);
        }
        for (key, pending) in in_flight.positions {
            self.put_back(key, pending);
        }
        let mut again = Vec::new();
        let mut reload = Vec::new();
        for (index, item) in in_flight.items.into_iter().enumerate() {
            match (verdicts.remove(&index), item.entry) {
                (Some(Refused::Duplicate(receipt)), Entry::Message(incoming)) => {
                    self.release_pending_id(&incoming.conversation);
                    if receipt.conversation != incoming.conversation || receipt.hash != incoming.hash {
                        self.refuse_incoming(&incoming, conflict(&incoming.id));
                        continue;
                    }
                    self.counters.messages_repeated += 1;
                    self.acknowledge(&incoming.asker, &incoming.id, &receipt);
                    for asker in self.dedupe.on_stored(&incoming.user, &incoming.id, receipt.clone()) {
                        self.acknowledge(&asker, &incoming.id, &receipt);
                    }
                }
                (Some(Refused::ConversationExists), Entry::Create(create)) => {
                    let message = format!("group {} exists already", create.conversation);
                    self.refuse(&create.asker, Refusal::new(ErrorCode::Conflict, message));
                    self.load_again(&create.conversation);
                }
                (Some(Refused::SeqTaken { .. } | Refused::ConversationExists), entry) => {
                    reload.extend(entry.conversation().cloned());
                    again.push(entry);
                }
                (_, entry) => again.push(entry),
            }
        }
        for entry in again.into_iter().rev() {
            self.queue.push_front(entry);
        }
        for id in reload {
            self.reload(&id, now);
        }
    }

    /// Somebody else wrote to this conversation: forget what is known of it, and take what waits for it out of
    /// the queue until it is loaded again.
    fn reload(&mut self, id: &ConversationId, now: Now) {
        if matches!(self.conversations.get(id), Some(Slot::Loading(_))) {
            return;
        }
        self.conversations.remove(id);
        let (mut waiting, mut rest) = (Vec::new(), VecDeque::new());
        for entry in self.queue.drain(..) {
            if entry.conversation() == Some(id) { waiting.push(entry) } else { rest.push_back(entry) }
        }
        self.queue = rest;
        for entry in waiting {
            self.with_conversation(id, Deferred::Entry(Box::new(entry)), now);
        }
    }

    fn on_failed(&mut self, in_flight: InFlight, reason: &str, now: Now) {
        self.counters.transactions_failed += 1;
        self.store_rest_until = now.mono + limits::STORE_RETRY_MS;
        for (key, pending) in in_flight.positions {
            self.put_back(key, pending);
        }
        for item in in_flight.items {
            self.release_pending(&item.entry);
            match item.entry {
                entry @ (Entry::PutDevice { .. } | Entry::ForgetDevice { asker: None, .. }) => {
                    if let Entry::PutDevice { user, device, .. } = &entry {
                        self.unstored_devices.push((user.clone(), device.clone()));
                    }
                    self.timers.arm(self.store_rest_until, Timer::Enqueue(Box::new(entry)));
                }
                Entry::Message(incoming) => self.refuse_incoming(&incoming, unavailable(reason)),
                Entry::Create(create) => {
                    self.refuse(&create.asker, unavailable(reason));
                    self.load_again(&create.conversation);
                }
                Entry::Change(change) => self.refuse(&change.asker, unavailable(reason)),
                Entry::Clear { asker, .. } | Entry::ForgetDevice { asker: Some(asker), .. } => {
                    self.refuse(&asker, unavailable(reason));
                }
                Entry::Expire(_) | Entry::ForgetIds { .. } => self.on_swept(true, now),
                Entry::Read(purpose) => self.read_again(*purpose, now),
            }
        }
    }

    /// The store may show what is under way before its outcome is told. When it did, up to `last`: up to where the
    /// conversation is known to be durable, and how many messages above that others than `user` sent.
    pub(crate) fn not_pushed_yet(&self, id: &ConversationId, user: &UserId, last: Seq) -> Option<(Seq, u64)> {
        let in_flight = self.in_flight.as_ref().filter(|f| f.touches(id))?;
        let committed = match self.conversations.get(id) {
            Some(Slot::Ready(conversation)) => conversation.last,
            _ => 0,
        };
        let shown = in_flight.items.iter().filter(|item| match (&item.entry, &item.effect) {
            (Entry::Message(incoming), Effect::Stored { seq, .. }) => {
                incoming.conversation == *id && incoming.user != *user && *seq <= last
            }
            _ => false,
        });
        (last > committed).then(|| (committed, shown.count() as u64))
    }

    fn release_pending(&mut self, entry: &Entry) {
        if let Some(id) = entry.conversation() {
            self.release_pending_id(&id.clone());
        }
    }

    fn release_pending_id(&mut self, id: &ConversationId) {
        if let Some(Slot::Ready(conversation)) = self.conversations.get_mut(id) {
            conversation.pending = conversation.pending.saturating_sub(1);
        }
    }
}
