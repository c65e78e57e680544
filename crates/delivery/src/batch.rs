//! One transaction after another: what waits is numbered and staged, and takes effect when it is durable.
//!
//! Numbers are given when a transaction is formed, from the committed state; so one that is refused leaves
//! nothing to take back but itself, and what is queued behind it has no numbers yet. What it does once the store
//! has answered is in [`outcome`](crate::outcome).

use crate::{
    Action, Asker, Core, Now, Slot,
    conversation::{Conversation, Member, named_by},
    forbidden, groups, limits,
    persist::{Batch, Fence, LedgerDelta, Message, OutboxEvent, Outcome, Write, partition_of},
    positions::PendingPosition,
    reads::{Deferred, ReadPurpose},
    retention::Expire,
    timers::Timer,
};
use bowline_protocol::{
    Body, ConversationId, DeviceId, MessageId, Millis, Seq, UserId, error::Refusal, ids::DeviceClass,
};
use std::collections::HashMap;

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
    /// Messages that are too old or too many.
    Expire(Box<Expire>),
    /// Ids that need not be remembered any more.
    ForgetIds {
        before: Millis,
    },
    /// Carried out once everything before it is decided, so that a reader sees its own writes.
    Read(Box<ReadPurpose>),
}

impl Entry {
    pub(crate) fn conversation(&self) -> Option<&ConversationId> {
        match self {
            Self::Message(incoming) => Some(&incoming.conversation),
            Self::Create(create) => Some(&create.conversation),
            Self::Change(change) => Some(&change.conversation),
            Self::Clear { conversation, .. } => Some(conversation),
            Self::Expire(expire) => Some(&expire.conversation),
            Self::PutDevice { .. } | Self::ForgetDevice { .. } | Self::ForgetIds { .. } | Self::Read(_) => {
                None
            }
        }
    }
}

/// What an entry does once its transaction is durable.
pub(crate) enum Effect {
    Stored { seq: Seq, ts: Millis },
    Refuse(Refusal),
    Changed(groups::Announcement),
    Expired { floor: Seq },
    Forgotten,
    Nothing,
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
    pub floor: Seq,
    pub exists: bool,
    /// Begun by this transaction; nothing of it was in memory.
    pub created: bool,
    pub deleted: bool,
    /// How many members there will be.
    pub member_count: usize,
    /// Members that change; `None` are removed.
    pub members: HashMap<UserId, Option<Member>, ahash::RandomState>,
    /// In the order in which they were first touched, so that runs repeat.
    pub touched: Vec<UserId>,
}

pub(crate) struct InFlight {
    pub items: Vec<Item>,
    pub moved: Vec<Moved>,
    /// The positions that moved, to be put back should the transaction fail.
    pub positions: Vec<((ConversationId, UserId), Vec<PendingPosition>)>,
    pub staged: HashMap<ConversationId, Staged, ahash::RandomState>,
    pub order: Vec<ConversationId>,
    /// For each write, the item it belongs to.
    pub writes: Vec<Option<usize>>,
}

pub(crate) struct Item {
    pub entry: Entry,
    pub effect: Effect,
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
    owner_epoch: u64,
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
                floor: conversation.floor,
                exists: conversation.exists,
                created: false,
                deleted: false,
                member_count: conversation.members.len(),
                members: HashMap::with_hasher(conversation.members.hasher().clone()),
                touched: Vec::new(),
            }
        })
    }

    pub fn fence(&mut self, conversation: &ConversationId) {
        let partition = partition_of(conversation);
        if !self.batch.fences.iter().any(|f| f.partition == partition) {
            self.batch.fences.push(Fence { partition, epoch: self.owner_epoch });
        }
    }
}

impl Staged {
    pub fn is_member(&self, user: &UserId, conversation: &Conversation) -> bool {
        match self.members.get(user) {
            Some(staged) => staged.is_some(),
            None => conversation.members.contains_key(user),
        }
    }

    /// The member as it will be.
    pub fn member(&self, user: &UserId, conversation: &Conversation) -> Option<Member> {
        let member = match self.members.get(user) {
            Some(staged) => staged.as_ref(),
            None => conversation.members.get(user),
        };
        member.cloned().map(|mut member| {
            // When the floor moves in this transaction, who is not touched by it is lifted by whoever looks.
            if self.floor > conversation.floor {
                member.lift(self.floor);
            }
            member
        })
    }

    /// Puts or removes a member; `was` says whether there was one.
    pub fn put_member(&mut self, user: &UserId, member: Option<Member>, conversation: &Conversation) {
        let was = self.is_member(user, conversation);
        self.member_count = self.member_count + usize::from(member.is_some()) - usize::from(was);
        if self.members.insert(user.clone(), member).is_none() {
            self.touched.push(user.clone());
        }
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
    pub(crate) fn read_behind_writes(&mut self, purpose: ReadPurpose, now: Now) {
        if self.queue.is_empty() && self.position_order.is_empty() && self.in_flight.is_none() {
            self.read_again(purpose, now);
        } else {
            self.queue.push_back(Entry::Read(Box::new(purpose)));
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
            owner_epoch: self.config.owner_epoch,
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
                // It is back since this was decided.
                Entry::ForgetDevice { asker: None, user, device } if self.is_connected(user, device) => {
                    Effect::Nothing
                }
                Entry::Expire(expire) => self.stage_expire(&mut forming, expire, now),
                Entry::ForgetIds { before } => {
                    let limit = limits::IDS_FORGOTTEN_MAX;
                    forming.batch.writes.push(Write::ForgetIds { before: *before, limit });
                    Effect::Nothing
                }
                Entry::ForgetDevice { user, device, .. } => {
                    forming
                        .batch
                        .writes
                        .push(Write::ForgetDevice { user: user.clone(), device: device.clone() });
                    Effect::Forgotten
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
        let Some(mut sender) = staged.member(&incoming.user, conversation).filter(|_| !staged.deleted) else {
            return Effect::Refuse(forbidden(id));
        };
        let seq = staged.last + 1;
        // Time may jump back; in a conversation it never does.
        let ts = now.wall.max(staged.last_ts);
        let known = self.users.get(&incoming.user).and_then(|u| u.known.as_deref());
        sender.on_own_message(seq, incoming.device.as_ref(), known);
        (staged.last, staged.last_ts) = (seq, ts);
        staged.put_member(&incoming.user, Some(sender), conversation);
        let recipients = staged.member_count as u64 - 1;
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
        let Some(mut member) = staged.member(user, conversation).filter(|_| !staged.deleted) else {
            return Effect::Refuse(forbidden(id));
        };
        if !staged.exists {
            return Effect::Nothing;
        }
        let expired = member.waiting(staged.last);
        member.clear(staged.last);
        staged.put_member(user, Some(member), conversation);
        forming.fence(id);
        forming.batch.ledger.expired += expired;
        Effect::Nothing
    }
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
