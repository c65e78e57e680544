//! A store in memory, as plain as can be: what the others are compared with, and what simulations run on.

use bowline_delivery::persist::{
    Batch, ConversationState, Device, Fence, Found, Ledger, Member, Message, OutboxEvent, Outcome, Overdue,
    PARTITION_COUNT, Query, Receipt, Refused, Summary, Waiting, Write,
};
use bowline_protocol::{ConversationId, DeviceId, MessageId, Millis, Seq, UserId, ids::DeviceClass};
use bytes::Bytes;
use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Writer and reader; clones are the same store.
#[derive(Clone, Default)]
pub struct Model(Arc<Mutex<State>>);

#[derive(Clone)]
struct State {
    conversations: BTreeMap<ConversationId, Arc<Conversation>>,
    ids: HashMap<(UserId, MessageId), Receipt>,
    /// The ids of messages that retention has taken.
    gone: BTreeSet<Gone>,
    devices: BTreeMap<(UserId, DeviceId), (Option<DeviceClass>, Millis)>,
    ledger: Ledger,
    outbox: Vec<OutboxEvent>,
    epochs: [u64; PARTITION_COUNT as usize],
    /// Messages that were ever stored.
    arrivals: u64,
}

/// When it was stored, and what it was.
type Gone = (Millis, ConversationId, Seq, UserId, MessageId);

#[derive(Clone)]
struct Conversation {
    name: Option<String>,
    meta: Option<Bytes>,
    at: Millis,
    members: BTreeMap<UserId, Member>,
    messages: Vec<Message>,
    /// The place of the newest message among all; 0 when there is none.
    arrived: u64,
    /// Up to here retention has taken the messages, and the time of the last of them.
    floor: Seq,
    floor_ts: Millis,
}

impl Default for State {
    fn default() -> Self {
        Self {
            conversations: BTreeMap::new(),
            ids: HashMap::new(),
            gone: BTreeSet::new(),
            devices: BTreeMap::new(),
            ledger: Ledger::default(),
            outbox: Vec::new(),
            epochs: [1; PARTITION_COUNT as usize],
            arrivals: 0,
        }
    }
}

impl Conversation {
    fn last(&self) -> Seq {
        self.messages.last().map_or(self.floor, |message| message.seq)
    }

    fn last_ts(&self) -> Millis {
        self.messages.last().map_or(self.at.max(self.floor_ts), |message| message.ts)
    }

    /// The oldest messages, as long as they are due and there is room.
    fn oldest(&self, room: usize, is_due: impl Fn(&Message) -> bool) -> Vec<(Seq, UserId)> {
        let due = self.messages.iter().take(room).take_while(|message| is_due(message));
        due.map(|message| (message.seq, message.from.clone())).collect()
    }

    fn waiting(&self) -> i64 {
        let term = |m: &Member| self.last() as i64 - (m.delivered + m.own_above_delivered) as i64;
        self.members.values().map(term).sum()
    }
}

impl Model {
    pub fn new() -> Self {
        Self::default()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A store of its own, with the same content.
    pub fn fork(&self) -> Self {
        Self(Arc::new(Mutex::new(self.state().clone())))
    }

    /// Another owner takes a partition: batches under the old epoch are stale from now on.
    pub fn take_over(&self, partition: u16, epoch: u64) {
        self.state().epochs[usize::from(partition)] = epoch;
    }

    /// The events that were stored and not taken yet.
    pub fn take_outbox(&self) -> Vec<OutboxEvent> {
        std::mem::take(&mut self.state().outbox)
    }
}

impl crate::Writer for Model {
    fn commit(&mut self, batch: &Batch) -> Outcome {
        self.state().commit(batch)
    }
}

impl crate::Reader for Model {
    fn read(&mut self, query: &Query) -> Found {
        self.state().read(query)
    }
}

/// The state that a batch is about to make.
struct Draft<'a> {
    before: &'a State,
    conversations: BTreeMap<ConversationId, Arc<Conversation>>,
    devices: BTreeMap<(UserId, DeviceId), (Option<DeviceClass>, Millis)>,
    ids: HashMap<(UserId, MessageId), Receipt>,
    deleted: BTreeSet<(UserId, MessageId)>,
    gone: BTreeSet<Gone>,
    arrivals: u64,
}

impl State {
    fn commit(&mut self, batch: &Batch) -> Outcome {
        for Fence { partition, epoch } in &batch.fences {
            let held = self.epochs[usize::from(*partition)];
            if held != *epoch {
                return Outcome::Stale { partition: *partition, epoch: held };
            }
        }
        let mut draft = Draft {
            before: self,
            conversations: self.conversations.clone(),
            devices: self.devices.clone(),
            ids: HashMap::new(),
            deleted: BTreeSet::new(),
            gone: self.gone.clone(),
            arrivals: self.arrivals,
        };
        let mut faults = Vec::new();
        for (index, write) in batch.writes.iter().enumerate() {
            match draft.write(write) {
                Ok(None) => {}
                Ok(Some(fault)) => faults.push((index, fault)),
                Err(text) => return Outcome::Failed(text.into()),
            }
        }
        if !faults.is_empty() {
            return Outcome::Refused(faults);
        }
        let Draft { conversations, devices, ids, deleted, gone, arrivals, .. } = draft;
        self.arrivals = arrivals;
        (self.conversations, self.devices, self.gone) = (conversations, devices, gone);
        self.ids.retain(|key, _| !deleted.contains(key));
        self.ids.extend(ids);
        self.ledger.accepted += batch.ledger.accepted;
        self.ledger.delivered += batch.ledger.delivered;
        self.ledger.expired += batch.ledger.expired;
        self.outbox.extend(batch.outbox.iter().cloned());
        Outcome::Committed
    }

    fn read(&self, query: &Query) -> Found {
        match query {
            Query::Conversation { conversation, tail } => {
                Found::Conversation(self.conversations.get(conversation).map(|found| {
                    let skip = found.messages.len().saturating_sub(*tail as usize);
                    Box::new(ConversationState {
                        name: found.name.clone(),
                        meta: found.meta.clone(),
                        last: found.last(),
                        last_ts: found.last_ts(),
                        floor: found.floor,
                        members: found.members.clone().into_iter().collect(),
                        tail: found.messages[skip..].to_vec(),
                    })
                }))
            }
            Query::Messages { conversation, from, to, limit, bytes_max, newest } => {
                let mut range: Vec<Message> = self.range(conversation, *from, *to).cloned().collect();
                if *newest {
                    range.reverse();
                }
                let (mut messages, mut bytes) = (Vec::new(), 0);
                for message in range.into_iter().take(*limit as usize) {
                    bytes += message.body.bytes().len() as u64;
                    if bytes > *bytes_max && !messages.is_empty() {
                        break;
                    }
                    messages.push(message);
                }
                if *newest {
                    messages.reverse();
                }
                Found::Messages(messages)
            }
            Query::Senders { conversation, user, from, to } => {
                let own = self.range(conversation, *from, *to).filter(|m| m.from == *user).count() as u64;
                let senders = self.range(conversation, *from, *to).map(|m| m.from.clone());
                let others: BTreeSet<UserId> = senders.filter(|from| from != user).collect();
                Found::Senders { own, others: others.into_iter().collect() }
            }
            Query::Waiting { user, device } => {
                let waiting = |(id, found): (&ConversationId, &Arc<Conversation>)| {
                    let member = found.members.get(user)?;
                    let position = member.position(device);
                    let by_this_device = |m: &Message| m.from == *user && m.device.as_ref() == Some(device);
                    let waits = found
                        .messages
                        .iter()
                        .any(|m| m.seq > position && m.seq >= member.first && !by_this_device(m));
                    waits.then(|| Waiting {
                        conversation: id.clone(),
                        first: member.first,
                        last: found.last(),
                        position,
                        unread: member.unread(found.last()),
                    })
                };
                Found::Waiting {
                    devices: self.devices(user),
                    conversations: self.conversations.iter().filter_map(waiting).collect(),
                }
            }
            Query::Conversations { user, after, limit } => self.list(user, after.as_ref(), *limit as usize),
            Query::Devices { user } => Found::Devices(self.devices(user)),
            Query::Ledger => {
                let waiting: i64 = self.conversations.values().map(|found| found.waiting()).sum();
                Found::Ledger { ledger: self.ledger, waiting: waiting.max(0) as u64 }
            }
            // Always from the beginning: what was found before has been taken since.
            Query::Overdue { before, ids_before, limit, .. } => {
                let ids = self.gone.first().is_some_and(|(ts, ..)| ts < ids_before);
                let runs =
                    self.runs(*limit as usize, |_, found, room| found.oldest(room, |m| m.ts < *before));
                overdue(runs, *limit, ids)
            }
            Query::Excess { keep, of, limit, .. } => {
                let runs = self.runs(*limit as usize, |id, found, room| {
                    let is_asked = of.as_ref().is_none_or(|of| of == id);
                    found.oldest(room, |m| is_asked && m.seq + keep <= found.last())
                });
                overdue(runs, *limit, false)
            }
            Query::StaleDevices { before, .. } => {
                let stale = self.devices.iter().filter(|(_, (_, last_seen))| last_seen < before);
                let devices = stale.map(|(device, _)| device.clone()).collect();
                Found::StaleDevices { devices, next: 0, more: false }
            }
        }
    }

    fn runs(
        &self,
        limit: usize,
        oldest: impl Fn(&ConversationId, &Conversation, usize) -> Vec<(Seq, UserId)>,
    ) -> Vec<Overdue> {
        let (mut runs, mut room) = (Vec::new(), limit);
        for (id, found) in &self.conversations {
            let messages = oldest(id, found, room);
            room -= messages.len();
            if !messages.is_empty() {
                runs.push(Overdue { conversation: id.clone(), messages });
            }
        }
        runs
    }

    fn range(&self, id: &ConversationId, from: Seq, to: Seq) -> impl Iterator<Item = &Message> {
        let messages = self.conversations.get(id).map_or(&[][..], |found| &found.messages);
        messages.iter().filter(move |message| (from..=to).contains(&message.seq))
    }

    fn devices(&self, user: &UserId) -> Vec<Device> {
        let own = self.devices.iter().filter(|((owner, _), _)| owner == user);
        own.map(|((_, device), (class, last_seen))| Device {
            device: device.clone(),
            class: *class,
            last_seen: *last_seen,
        })
        .collect()
    }

    fn list(&self, user: &UserId, after: Option<&ConversationId>, limit: usize) -> Found {
        let order = |id: &ConversationId, found: &Conversation| {
            (Reverse((found.last_ts(), found.arrived)), id.clone())
        };
        let mine = self.conversations.iter().filter(|(_, found)| found.members.contains_key(user));
        let mut all: Vec<_> = mine.map(|(id, found)| order(id, found)).collect();
        all.sort();
        if let Some(after) = after {
            match self.conversations.get(after) {
                Some(found) => all.retain(|line| *line > order(after, found)),
                None => all.clear(),
            }
        }
        let more = all.len() > limit;
        all.truncate(limit);
        let summary = |(_, id): (Reverse<(Millis, u64)>, ConversationId)| {
            let found = &self.conversations[&id];
            let member = found.members[user].clone();
            let other = id.peers().map(|(a, b)| if a == *user { b } else { a });
            let peer = other.filter(|other| other != user).and_then(|other| found.members.get(&other));
            Summary {
                name: found.name.clone(),
                meta: found.meta.clone(),
                last: found.last(),
                peer: peer.map(|member| (member.delivered, member.read)),
                last_message: found.messages.last().filter(|m| m.seq >= member.first).cloned(),
                member,
                conversation: id,
            }
        };
        Found::Conversations { conversations: all.into_iter().map(summary).collect(), more }
    }
}

fn overdue(runs: Vec<Overdue>, limit: u32, ids: bool) -> Found {
    let count: usize = runs.iter().map(|run| run.messages.len()).sum();
    Found::Overdue { runs, next: 0, more: count == limit as usize, ids }
}

impl Draft<'_> {
    fn write(&mut self, write: &Write) -> Result<Option<Refused>, String> {
        match write {
            Write::CreateConversation { conversation, name, meta, at, members } => {
                if self.conversations.contains_key(conversation) {
                    return Ok(Some(Refused::ConversationExists));
                }
                let new = Conversation {
                    name: name.clone(),
                    meta: meta.clone(),
                    at: *at,
                    members: members.iter().cloned().collect(),
                    messages: Vec::new(),
                    arrived: 0,
                    floor: 0,
                    floor_ts: 0,
                };
                self.conversations.insert(conversation.clone(), Arc::new(new));
            }
            Write::Message(message) => {
                let found = self
                    .conversations
                    .get_mut(&message.conversation)
                    .ok_or_else(|| format!("{} does not exist", message.conversation))?;
                let key = (message.from.clone(), message.id.clone());
                let stored = self.before.ids.get(&key).filter(|_| !self.deleted.contains(&key));
                if let Some(receipt) = self.ids.get(&key).or(stored) {
                    return Ok(Some(Refused::Duplicate(receipt.clone())));
                }
                let is_there = |other: &Message| other.seq == message.seq;
                if message.seq <= found.floor || found.messages.iter().any(is_there) {
                    let stored = self.before.conversations.get(&message.conversation);
                    return Ok(Some(Refused::SeqTaken { last: stored.map_or(0, |found| found.last()) }));
                }
                let receipt = Receipt {
                    conversation: message.conversation.clone(),
                    seq: message.seq,
                    ts: message.ts,
                    hash: message.hash,
                };
                self.ids.insert(key, receipt);
                self.arrivals += 1;
                let found = Arc::make_mut(found);
                if message.seq > found.last() {
                    found.arrived = self.arrivals;
                }
                let messages = &mut found.messages;
                messages.push(message.clone());
                messages.sort_by_key(|message| message.seq);
            }
            Write::PutMember { conversation, user, member } => {
                let found = self
                    .conversations
                    .get_mut(conversation)
                    .ok_or_else(|| format!("{conversation} does not exist"))?;
                let mut member = member.clone();
                if found.floor > 0 {
                    member.lift(found.floor);
                }
                Arc::make_mut(found).members.insert(user.clone(), member);
            }
            Write::RemoveMember { conversation, user } => {
                if let Some(found) = self.conversations.get_mut(conversation) {
                    Arc::make_mut(found).members.remove(user);
                }
            }
            Write::RenameConversation { conversation, name, meta } => {
                if let Some(found) = self.conversations.get_mut(conversation).map(Arc::make_mut) {
                    found.name = name.clone().or(found.name.take());
                    found.meta = meta.clone().or(found.meta.take());
                }
            }
            Write::DeleteConversation { conversation } => {
                if let Some(found) = self.conversations.remove(conversation) {
                    for message in &found.messages {
                        let key = (message.from.clone(), message.id.clone());
                        self.ids.remove(&key);
                        self.deleted.insert(key);
                    }
                    self.forget_ids(|(_, place, ..)| place == conversation, usize::MAX);
                }
            }
            Write::ExpireMessages { conversation, up_to, ids_from } => {
                let found = self
                    .conversations
                    .get_mut(conversation)
                    .ok_or_else(|| format!("{conversation} does not exist"))?;
                let floor = (*up_to).min(found.last());
                if floor <= found.floor {
                    return Ok(None);
                }
                let found = Arc::make_mut(found);
                found.floor = floor;
                if found.last() <= floor {
                    found.arrived = 0;
                }
                let (taken, kept) =
                    std::mem::take(&mut found.messages).into_iter().partition(|m| m.seq <= floor);
                found.messages = kept;
                found.members.values_mut().for_each(|member| member.lift(floor));
                let taken: Vec<Message> = taken;
                found.floor_ts = taken.last().map_or(0, |m| m.ts).max(found.floor_ts);
                for Message { conversation, seq, id, from, ts, .. } in taken {
                    if ts >= *ids_from {
                        self.gone.insert((ts, conversation, seq, from, id));
                    } else {
                        self.ids.remove(&(from.clone(), id.clone()));
                        self.deleted.insert((from, id));
                    }
                }
            }
            Write::ForgetIds { before, limit } => {
                self.forget_ids(|(ts, ..)| ts < before, *limit as usize);
            }
            Write::PutDevice { user, device, class, last_seen } => {
                self.devices.insert((user.clone(), device.clone()), (*class, *last_seen));
            }
            Write::ForgetDevice { user, device } => {
                self.devices.remove(&(user.clone(), device.clone()));
                for found in self.conversations.values_mut() {
                    if let Some(member) = Arc::make_mut(found).members.get_mut(user) {
                        member.lagging.retain(|(other, _)| other != device);
                    }
                }
            }
        }
        Ok(None)
    }

    fn forget_ids(&mut self, is_meant: impl Fn(&Gone) -> bool, limit: usize) {
        let meant: Vec<Gone> = self.gone.iter().filter(|gone| is_meant(gone)).take(limit).cloned().collect();
        for gone in meant {
            self.gone.remove(&gone);
            let (.., from, id) = gone;
            self.ids.remove(&(from.clone(), id.clone()));
            self.deleted.insert((from, id));
        }
    }
}
