//! One transaction after another: what waits is numbered and staged, and takes effect when it is durable.
//!
//! Numbers are given when a transaction is formed, from the committed state; so one that is refused leaves
//! nothing to take back but itself, and what is queued behind it has no numbers yet.

use crate::{
    Action, Asker, Core, Now, Slot,
    conversation::{Conversation, Member, Senders, TailEntry, named_by},
    deliver::Stored,
    forbidden, groups,
    ingest::conflict,
    limits,
    persist::{
        Batch, Fence, LedgerDelta, Message, OutboxEvent, Outcome, Query, Receipt, Refused, Write,
        partition_of,
    },
    reads::{Deferred, ReadPurpose},
    timers::Timer,
    unavailable,
};
use bowline_protocol::{
    Body, ConversationId, DeviceId, ErrorCode, MessageId, Millis, Seq, UserId, error::Refusal,
    ids::DeviceClass,
};
use bytes::Bytes;
use std::{collections::HashMap, sync::Arc};

/// A message that may be numbered.
#[derive(Debug, Clone)]
pub(crate) struct Incoming {
    pub asker: Asker,
    /// None for the API.
    pub device: Option<DeviceId>,
    pub user: UserId,
    pub conversation: ConversationId,
    pub id: MessageId,
    pub body: Body,
    pub hash: u128,
}

/// What waits for a transaction, in order.
#[derive(Debug, Clone)]
pub(crate) enum Entry {
    Message(Box<Incoming>),
    Create(Box<groups::CreateEntry>),
    Change(Box<groups::ChangeEntry>),
    Clear {
        asker: Asker,
        user: UserId,
        conversation: ConversationId,
    },
    PutDevice {
        user: UserId,
        device: DeviceId,
        class: Option<DeviceClass>,
        at: Millis,
    },
    ForgetDevice {
        asker: Option<Asker>,
        user: UserId,
        device: DeviceId,
    },
    /// Carried out once everything before it is decided, so that a reader sees its own writes.
    Read(Box<ReadPurpose>),
}

impl Entry {
    fn conversation(&self) -> Option<&ConversationId> {
        match self {
            Self::Message(incoming) => Some(&incoming.conversation),
            Self::Create(create) => Some(&create.conversation),
            Self::Change(change) => Some(&change.conversation),
            Self::Clear { conversation, .. } => Some(conversation),
            Self::PutDevice { .. } | Self::ForgetDevice { .. } | Self::Read(_) => None,
        }
    }
}

/// What an entry does once its transaction is durable.
pub(crate) enum Effect {
    Stored { seq: Seq, ts: Millis },
    Refuse(Refusal),
    Changed(groups::Announcement),
    Nothing,
}

/// A device's news of what it has, waiting for the next transaction. Several are joined.
#[derive(Debug)]
pub(crate) struct PendingPosition {
    pub device: DeviceId,
    pub received: Seq,
    pub read: Seq,
    /// Senders of the messages from `.0` to `.1`, when the store had to be asked.
    looked_up: Vec<(Seq, Seq, Senders)>,
    /// A look-up is under way.
    asked: bool,
    /// The user's devices, as far as they were known when the news came.
    known: Option<Arc<[DeviceId]>>,
}

/// A position that moves with a transaction.
pub(crate) struct Moved {
    pub conversation: ConversationId,
    pub user: UserId,
    pub device: DeviceId,
    /// Up to where some device has everything now, and who sent what is new in it.
    pub delivered: Option<(Seq, Vec<UserId>)>,
    pub read: Option<(Seq, Vec<UserId>)>,
}

/// What a transaction will make of a conversation.
#[derive(Default)]
pub(crate) struct Staged {
    pub last: Seq,
    pub last_ts: Millis,
    pub exists: bool,
    /// Begun by this transaction; nothing of it was in memory.
    pub created: bool,
    pub deleted: bool,
    pub name: Option<Option<String>>,
    pub meta: Option<Option<Bytes>>,
    /// Members that change; `None` are removed.
    pub members: HashMap<UserId, Option<Member>, ahash::RandomState>,
    /// In the order in which they were first touched, so that runs repeat.
    pub touched: Vec<UserId>,
}

pub(crate) struct InFlight {
    items: Vec<Item>,
    moved: Vec<Moved>,
    /// The positions that moved, to be put back should the transaction fail.
    positions: Vec<((ConversationId, UserId), Vec<PendingPosition>)>,
    staged: HashMap<ConversationId, Staged, ahash::RandomState>,
    order: Vec<ConversationId>,
    /// For each write, the item it belongs to.
    writes: Vec<Option<usize>>,
}

struct Item {
    entry: Entry,
    effect: Effect,
}

impl InFlight {
    pub fn len(&self) -> usize {
        self.items.len()
    }

    pub fn touches(&self, id: &ConversationId) -> bool {
        self.staged.contains_key(id)
    }
}

/// A transaction being formed.
pub(crate) struct Forming {
    pub batch: Batch,
    pub staged: HashMap<ConversationId, Staged, ahash::RandomState>,
    pub order: Vec<ConversationId>,
}

impl Forming {
    /// The staged form of a conversation that is in memory.
    pub fn stage(&mut self, id: &ConversationId, conversation: &Conversation) -> &mut Staged {
        self.staged.entry(id.clone()).or_insert_with(|| {
            self.order.push(id.clone());
            Staged {
                last: conversation.last,
                last_ts: conversation.last_ts,
                exists: conversation.exists,
                created: false,
                deleted: false,
                name: None,
                meta: None,
                members: HashMap::with_hasher(conversation.members.hasher().clone()),
                touched: Vec::new(),
            }
        })
    }

    pub fn fence(&mut self, conversation: &ConversationId) {
        let partition = partition_of(conversation);
        if !self.batch.fences.iter().any(|f| f.partition == partition) {
            self.batch.fences.push(Fence { partition, epoch: 1 });
        }
    }
}

impl Staged {
    /// The member as it will be.
    pub fn member<'a>(&'a self, user: &UserId, conversation: &'a Conversation) -> Option<&'a Member> {
        match self.members.get(user) {
            Some(staged) => staged.as_ref(),
            None => conversation.members.get(user),
        }
    }

    pub fn put_member(&mut self, user: &UserId, member: Option<Member>) {
        if self.members.insert(user.clone(), member).is_none() {
            self.touched.push(user.clone());
        }
    }

    /// How many members there will be.
    pub fn member_count(&self, conversation: &Conversation) -> usize {
        let mut count = conversation.members.len();
        for (user, staged) in &self.members {
            match (conversation.members.contains_key(user), staged.is_some()) {
                (false, true) => count += 1,
                (true, false) => count -= 1,
                _ => {}
            }
        }
        count
    }
}

impl Core {
    pub(crate) fn enqueue(&mut self, entry: Entry) {
        if let Some(id) = entry.conversation()
            && let Some(Slot::Ready(conversation)) = self.conversations.get_mut(id)
        {
            conversation.pending += 1;
        }
        self.queue.push_back(entry);
    }

    /// Carries a look-up out behind everything that waits; at once when nothing does.
    pub(crate) fn read_behind_writes(&mut self, purpose: ReadPurpose) {
        if self.queue.is_empty() && self.position_order.is_empty() && self.in_flight.is_none() {
            self.read_again(purpose);
        } else {
            self.queue.push_back(Entry::Read(Box::new(purpose)));
        }
    }

    /// `msg.recv` or `msg.read`.
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn on_position(
        &mut self,
        asker: Asker,
        user: UserId,
        device: DeviceId,
        text: &str,
        seq: Seq,
        read: bool,
        now: Now,
    ) {
        let Some(id) = named_by(&user, text) else {
            return self.refuse(&asker, forbidden(text));
        };
        self.with_conversation(
            &id,
            Deferred::Position { asker, user, device, seq, read, conversation: id.clone() },
            now,
        );
    }

    #[allow(clippy::too_many_arguments)]
    pub(crate) fn on_position_ready(
        &mut self,
        asker: Asker,
        user: UserId,
        device: DeviceId,
        id: ConversationId,
        seq: Seq,
        read: bool,
        now: Now,
    ) {
        let Some(Slot::Ready(conversation)) = self.conversations.get(&id) else { return };
        let Some(member) = conversation.members.get(&user) else {
            return self.refuse(&asker, forbidden(&id));
        };
        // A number above the newest counts as the newest.
        let seq = seq.min(conversation.last);
        let is_news = seq > member.position(&device) || (read && seq > member.read);
        self.decide(&asker);
        self.on_device_has(&user, &device, &id, seq, now);
        if !is_news {
            return;
        }
        let known = self.users.get(&user).and_then(|u| u.known.clone());
        let key = (id, user);
        let pending = self.positions.entry(key.clone()).or_default();
        if pending.is_empty() {
            self.position_order.push_back(key);
        }
        let read = if read { seq } else { 0 };
        match pending.iter_mut().find(|p| p.device == device) {
            Some(p) => (p.received, p.read) = (p.received.max(seq), p.read.max(read)),
            None => {
                let (looked_up, asked) = (Vec::new(), false);
                pending.push(PendingPosition { device, received: seq, read, looked_up, asked, known });
            }
        }
    }

    pub(crate) fn on_clear(&mut self, asker: Asker, user: UserId, text: &str, now: Now) {
        match named_by(&user, text) {
            None => self.refuse(&asker, forbidden(text)),
            Some(id) => {
                let entry = Entry::Clear { asker, user, conversation: id.clone() };
                self.with_conversation(&id, Deferred::Entry(Box::new(entry)), now);
            }
        }
    }

    /// Forms the next transaction, when none is under way and something waits.
    pub(crate) fn form_batches(&mut self, now: Now) {
        if self.held {
            return;
        }
        self.form_batch(now);
        // What writes nothing is carried out at once.
        while self.in_flight.is_none() && !self.queue.is_empty() {
            self.form_batch(now);
        }
    }

    fn form_batch(&mut self, now: Now) {
        if self.in_flight.is_some() || (self.queue.is_empty() && self.position_order.is_empty()) {
            return;
        }
        let mut forming = Forming {
            batch: Batch::default(),
            staged: HashMap::with_hasher(self.hasher.clone()),
            order: Vec::new(),
        };
        let resting = now.mono < self.store_rest_until;
        let (moved, positions) =
            if resting { Default::default() } else { self.stage_positions(&mut forming, now) };
        let mut in_flight = InFlight {
            items: Vec::new(),
            moved,
            positions,
            staged: HashMap::with_hasher(self.hasher.clone()),
            order: Vec::new(),
            writes: Vec::new(),
        };
        let mut messages = 0;
        while messages < self.config.batch_max {
            let Some(entry) = self.queue.pop_front() else { break };
            let item = in_flight.items.len();
            let before = forming.batch.writes.len();
            let effect = match &entry {
                Entry::Message(incoming) => {
                    messages += 1;
                    self.stage_message(&mut forming, incoming, now)
                }
                Entry::Create(create) => self.stage_create(&mut forming, create, now),
                Entry::Change(change) => self.stage_change(&mut forming, change),
                Entry::Clear { user, conversation, .. } => self.stage_clear(&mut forming, user, conversation),
                Entry::PutDevice { user, device, class, at } => {
                    let (user, device) = (user.clone(), device.clone());
                    forming.batch.writes.push(Write::PutDevice {
                        user,
                        device,
                        class: *class,
                        last_seen: *at,
                    });
                    Effect::Nothing
                }
                Entry::ForgetDevice { user, device, .. } => {
                    forming
                        .batch
                        .writes
                        .push(Write::ForgetDevice { user: user.clone(), device: device.clone() });
                    Effect::Nothing
                }
                Entry::Read(_) => Effect::Nothing,
            };
            in_flight.writes.resize(before, None);
            in_flight.writes.resize(forming.batch.writes.len(), Some(item));
            in_flight.items.push(Item { entry, effect });
        }
        for id in &forming.order {
            let staged = &forming.staged[id];
            for user in staged.touched.iter().filter(|_| !staged.deleted) {
                let (conversation, user) = (id.clone(), user.clone());
                forming.batch.writes.push(match &staged.members[&user] {
                    Some(member) => Write::PutMember { conversation, user, member: member.clone() },
                    None => Write::RemoveMember { conversation, user },
                });
            }
        }
        in_flight.writes.resize(forming.batch.writes.len(), None);
        (in_flight.staged, in_flight.order) = (forming.staged, forming.order);
        let is_empty = forming.batch.writes.is_empty();
        if in_flight.items.is_empty() && is_empty {
            if !self.position_order.is_empty() && resting {
                self.timers.arm(self.store_rest_until, Timer::Store);
            }
            return;
        }
        self.in_flight = Some(in_flight);
        if is_empty {
            self.on_outcome(Outcome::Committed, now);
        } else {
            self.counters.transactions += 1;
            self.actions.push(Action::Commit(Box::new(forming.batch)));
        }
    }

    fn stage_message(&self, forming: &mut Forming, incoming: &Incoming, now: Now) -> Effect {
        let id = &incoming.conversation;
        let Some(Slot::Ready(conversation)) = self.conversations.get(id) else {
            return Effect::Refuse(forbidden(id));
        };
        let staged = forming.stage(id, conversation);
        let Some(sender) = staged.member(&incoming.user, conversation).filter(|_| !staged.deleted) else {
            return Effect::Refuse(forbidden(id));
        };
        let mut sender = sender.clone();
        let seq = staged.last + 1;
        // Time may jump back; in a conversation it never does.
        let ts = now.wall.max(staged.last_ts);
        let known = self.users.get(&incoming.user).and_then(|u| u.known.as_deref());
        sender.on_own_message(seq, incoming.device.as_ref(), known);
        (staged.last, staged.last_ts) = (seq, ts);
        staged.put_member(&incoming.user, Some(sender));
        let recipients = staged.member_count(conversation) as u64 - 1;
        let create = (!staged.exists).then(|| Write::CreateConversation {
            conversation: id.clone(),
            name: None,
            meta: None,
            at: ts,
            members: sorted_members(conversation),
        });
        staged.exists = true;
        forming.batch.writes.extend(create);
        forming.fence(id);
        forming.batch.ledger.accepted += recipients;
        let message = Message {
            conversation: id.clone(),
            seq,
            id: incoming.id.clone(),
            from: incoming.user.clone(),
            device: incoming.device.clone(),
            ts,
            body: incoming.body.clone(),
            hash: incoming.hash,
        };
        if self.config.outbox {
            forming.batch.outbox.push(stored_event(&message));
        }
        forming.batch.writes.push(Write::Message(message));
        Effect::Stored { seq, ts }
    }

    fn stage_clear(&self, forming: &mut Forming, user: &UserId, id: &ConversationId) -> Effect {
        let Some(Slot::Ready(conversation)) = self.conversations.get(id) else {
            return Effect::Refuse(forbidden(id));
        };
        let staged = forming.stage(id, conversation);
        let Some(mut member) = staged.member(user, conversation).filter(|_| !staged.deleted).cloned() else {
            return Effect::Refuse(forbidden(id));
        };
        if !staged.exists {
            return Effect::Nothing;
        }
        let expired = member.waiting(staged.last);
        member.clear(staged.last);
        staged.put_member(user, Some(member));
        forming.fence(id);
        forming.batch.ledger.expired += expired;
        Effect::Nothing
    }

    /// Stages positions that can be: their conversation is in memory, the user's devices are known, and so are
    /// the senders of what lies between. For the others it asks.
    #[allow(clippy::type_complexity)]
    fn stage_positions(
        &mut self,
        forming: &mut Forming,
        now: Now,
    ) -> (Vec<Moved>, Vec<((ConversationId, UserId), Vec<PendingPosition>)>) {
        let (mut moved, mut taken, mut kept) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..self.position_order.len().min(limits::POSITIONS_PER_BATCH_MAX) {
            let Some(key) = self.position_order.pop_front() else { break };
            let Some(mut pending) = self.positions.remove(&key) else { continue };
            let (id, user) = (&key.0, &key.1);
            let Some(Slot::Ready(conversation)) = self.conversations.get(id) else {
                // Dropped from memory meanwhile: every change comes again once it is loaded.
                kept.push((key, pending));
                continue;
            };
            let Some(member) = conversation.members.get(user) else { continue };
            // Devices that are behind must be named before the user's position moves past them.
            let connected = self.users.get(user).and_then(|u| u.known.clone());
            let Some(known) = connected.or_else(|| pending.iter().find_map(|p| p.known.clone())) else {
                if !self.users.contains_key(user) && !pending.iter().any(|p| p.asked) {
                    pending[0].asked = true;
                    let (conversation, user) = (id.clone(), user.clone());
                    self.read(
                        Query::Devices { user: user.clone() },
                        ReadPurpose::Known { conversation, user },
                    );
                }
                kept.push((key, pending));
                continue;
            };
            let mut next = member.clone();
            let mut news = Vec::new();
            let mut missing = None;
            for position in &pending {
                match plan_move(conversation, &mut next, user, position, &known) {
                    Ok(move_) => news.push(move_),
                    Err(range) => {
                        missing = Some(range);
                        break;
                    }
                }
            }
            if let Some((from, to)) = missing {
                if !pending.iter().any(|p| p.asked) {
                    pending[0].asked = true;
                    let query = Query::Senders { conversation: id.clone(), user: user.clone(), from, to };
                    self.read(
                        query,
                        ReadPurpose::Senders { conversation: id.clone(), user: user.clone(), from, to },
                    );
                }
                kept.push((key, pending));
                continue;
            }
            forming.batch.ledger.delivered +=
                member.waiting(conversation.last) - next.waiting(conversation.last);
            forming.fence(id);
            forming.stage(id, conversation).put_member(user, Some(next));
            for (position, (delivered, read)) in pending.iter().zip(news) {
                if delivered.is_some() || read.is_some() {
                    let (conversation, user, device) = (id.clone(), user.clone(), position.device.clone());
                    moved.push(Moved { conversation, user, device, delivered, read });
                }
            }
            taken.push((key, pending));
        }
        for (key, pending) in kept {
            if !self.conversations.contains_key(&key.0) {
                self.with_conversation(&key.0.clone(), Deferred::Nothing, now);
            }
            self.put_back(key, pending);
        }
        (moved, taken)
    }

    fn put_back(&mut self, key: (ConversationId, UserId), pending: Vec<PendingPosition>) {
        let now = self.positions.entry(key.clone()).or_default();
        if now.is_empty() {
            self.position_order.push_back(key);
            *now = pending;
            return;
        }
        for old in pending {
            match now.iter_mut().find(|p| p.device == old.device) {
                Some(p) => (p.received, p.read) = (p.received.max(old.received), p.read.max(old.read)),
                None => now.push(old),
            }
        }
    }

    /// The store told who sent what in a range.
    pub(crate) fn on_senders(
        &mut self,
        conversation: ConversationId,
        user: UserId,
        range: (Seq, Seq),
        found: Option<Senders>,
    ) {
        if let Some(pending) = self.positions.get_mut(&(conversation, user)) {
            for position in pending.iter_mut() {
                position.asked = false;
            }
            if let (Some(first), Some(senders)) = (pending.first_mut(), found) {
                first.looked_up.push((range.0, range.1, senders));
            }
        }
    }

    /// The store told which devices a user has that is not connected any more.
    pub(crate) fn on_known(
        &mut self,
        conversation: ConversationId,
        user: UserId,
        found: Option<Arc<[DeviceId]>>,
    ) {
        for position in self.positions.get_mut(&(conversation, user)).into_iter().flatten() {
            position.asked = false;
            position.known = found.clone();
        }
    }

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
        for item in items {
            self.release_pending(&item.entry);
            self.on_entry_durable(item.entry, item.effect, now);
        }
        self.send_receipts(moved, now);
        for deferred in waited {
            self.on_deferred(deferred, now);
        }
    }

    /// Keeps a stored message among the newest of its conversation.
    fn remember(&mut self, item: &Item) {
        if let (Entry::Message(incoming), Effect::Stored { seq, ts }) = (&item.entry, &item.effect)
            && let Some(Slot::Ready(conversation)) = self.conversations.get_mut(&incoming.conversation)
        {
            let (id, from, device) = (incoming.id.clone(), incoming.user.clone(), incoming.device.clone());
            conversation
                .tail
                .push(*seq, TailEntry { id, from, device, ts: *ts, body: Some(incoming.body.clone()) });
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
        conversation.name = staged.name.unwrap_or(conversation.name.take());
        conversation.meta = staged.meta.unwrap_or(conversation.meta.take());
        for (user, member) in staged.members {
            match member {
                Some(member) => conversation.members.insert(user, member),
                None => conversation.members.remove(&user),
            };
        }
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
            (Entry::ForgetDevice { asker, user, device }, _) => {
                self.on_device_forgotten(&user, &device);
                if let Some(asker) = asker {
                    self.confirm(&asker, None);
                }
            }
            (Entry::Read(purpose), _) => self.read_again(*purpose),
            (Entry::Clear { asker, .. }, Effect::Refuse(refusal)) => self.refuse(&asker, refusal),
            (Entry::Create(create), Effect::Refuse(refusal)) => {
                self.refuse(&create.asker, refusal);
                self.load_again(&create.conversation);
            }
            (Entry::Change(change), Effect::Refuse(refusal)) => self.refuse(&change.asker, refusal),
            (Entry::PutDevice { user, device, .. }, _) => {
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
                    if receipt.seq == 0
                        || receipt.conversation != incoming.conversation
                        || receipt.hash != incoming.hash
                    {
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
        let (mut waiting, mut rest) = (Vec::new(), std::collections::VecDeque::new());
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
        if !self.position_order.is_empty() {
            self.timers.arm(self.store_rest_until, Timer::Store);
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
                Entry::Read(purpose) => self.read_again(*purpose),
            }
        }
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

type News = (Option<(Seq, Vec<UserId>)>, Option<(Seq, Vec<UserId>)>);

/// Moves a member's positions as one device says, or names the range whose senders must be asked of the store.
fn plan_move(
    conversation: &Conversation,
    member: &mut Member,
    user: &UserId,
    position: &PendingPosition,
    known: &[DeviceId],
) -> Result<News, (Seq, Seq)> {
    let senders = |from: Seq, to: Seq| {
        let looked_up =
            position.looked_up.iter().find(|(f, t, _)| (*f, *t) == (from, to)).map(|(.., s)| s.clone());
        conversation.tail.senders(user, from, to).or(looked_up).ok_or((from, to))
    };
    // A device has its own messages without being sent them.
    let mut to = position.received.min(conversation.last);
    while let Some(entry) = conversation.tail.entry(to + 1)
        && entry.from == *user
        && entry.device.as_ref() == Some(&position.device)
    {
        to += 1;
    }
    let mut news: News = (None, None);
    let read_senders = match position.read.min(conversation.last) {
        read if read > member.read => Some((read, senders(member.read + 1, read)?)),
        _ => None,
    };
    if to > member.delivered {
        let Senders { own, others } = senders(member.delivered + 1, to)?;
        member.move_device(&position.device, to, own, known);
        news.0 = Some((to, others));
    } else {
        member.move_device(&position.device, to, 0, known);
    }
    if let Some((read, Senders { own, others })) = read_senders {
        member.move_read(read, own);
        news.1 = Some((read, others));
    }
    Ok(news)
}

fn sorted_members(conversation: &Conversation) -> Vec<(UserId, Member)> {
    let mut members: Vec<_> = conversation.members.iter().map(|(u, m)| (u.clone(), m.clone())).collect();
    members.sort_by(|a, b| a.0.cmp(&b.0));
    members
}

/// `message.stored`, as the webhook will carry it.
fn stored_event(message: &Message) -> OutboxEvent {
    use bowline_protocol::frame::{write_number, write_string};
    let mut data = Vec::with_capacity(128 + message.body.bytes().len());
    data.extend_from_slice(b"{\"id\":");
    write_string(&mut data, &message.id);
    data.extend_from_slice(b",\"conversation_id\":");
    write_string(&mut data, &message.conversation);
    data.extend_from_slice(b",\"seq\":");
    write_number(&mut data, message.seq);
    data.extend_from_slice(b",\"from\":");
    write_string(&mut data, &message.from);
    data.extend_from_slice(b",\"ts\":");
    write_number(&mut data, message.ts);
    data.push(b',');
    message.body.write_json(&mut data);
    data.push(b'}');
    OutboxEvent {
        kind: "message.stored",
        key: message.conversation.as_str().into(),
        at: message.ts,
        data: data.into(),
    }
}

/// The ledger's change when a member leaves with so much waiting.
pub(crate) fn expire(ledger: &mut LedgerDelta, member: &Member, last: Seq) {
    ledger.expired += member.waiting(last);
}
