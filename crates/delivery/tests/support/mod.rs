//! A naive store and a small world of clients around the core, driven step by step.

use bowline_delivery::{
    Action, Config, Core, Event, Now, Retention, Verdict,
    persist::{
        Batch, ConversationState, Device, Found, Ledger, Member, Message, Outcome, Overdue, Query, Receipt,
        Refused, Summary, Waiting, Write, partition_of,
    },
};
use bowline_protocol::{
    Body, ClientFrame, CloseCode, ConversationId, DeviceId, Seq, UserId,
    link::{Answer, Claim, ConnRef, Down, NodeRef, Open, Request, SameDevice, Up, Uplink},
};
use bytes::Bytes;
use serde_json::Value;
use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    sync::Arc,
};

#[derive(Default, Clone)]
pub struct MemConversation {
    pub name: Option<String>,
    pub meta: Option<Bytes>,
    pub at: u64,
    pub members: BTreeMap<UserId, Member>,
    pub messages: Vec<Message>,
    pub activity: u64,
    /// Up to here retention has taken the messages, and the time of the last of them.
    pub floor: Seq,
    pub floor_ts: u64,
}

impl MemConversation {
    pub fn last(&self) -> Seq {
        self.floor + self.messages.len() as u64
    }

    pub fn message(&self, seq: Seq) -> Option<&Message> {
        self.messages.iter().find(|m| m.seq == seq)
    }
}

#[derive(Default, Clone)]
pub struct MemStore {
    pub conversations: BTreeMap<ConversationId, MemConversation>,
    pub devices: BTreeMap<(UserId, DeviceId), Device>,
    pub ledger: Ledger,
    pub outbox: usize,
    /// Messages that retention has taken and whose ids are remembered.
    pub gone: Vec<Message>,
    activity: u64,
}

impl MemStore {
    pub fn commit(&mut self, batch: &Batch) -> Outcome {
        let mut next = self.clone();
        let mut faults = Vec::new();
        for (index, write) in batch.writes.iter().enumerate() {
            next.write(write).err().into_iter().for_each(|fault| faults.push((index, fault)));
        }
        if !faults.is_empty() {
            return Outcome::Refused(faults);
        }
        next.ledger.accepted += batch.ledger.accepted;
        next.ledger.delivered += batch.ledger.delivered;
        next.ledger.expired += batch.ledger.expired;
        next.outbox += batch.outbox.len();
        *self = next;
        Outcome::Committed
    }

    fn write(&mut self, write: &Write) -> Result<(), Refused> {
        self.activity += 1;
        match write {
            Write::CreateConversation { conversation, name, meta, at, members } => {
                if self.conversations.contains_key(conversation) {
                    return Err(Refused::ConversationExists);
                }
                let made = MemConversation {
                    name: name.clone(),
                    meta: meta.clone(),
                    at: *at,
                    members: members.iter().cloned().collect(),
                    messages: Vec::new(),
                    activity: self.activity,
                    floor: 0,
                    floor_ts: 0,
                };
                self.conversations.insert(conversation.clone(), made);
            }
            Write::Message(message) => {
                let all = self.conversations.values().flat_map(|c| &c.messages).chain(&self.gone);
                if let Some(old) = all.into_iter().find(|m| m.from == message.from && m.id == message.id) {
                    let (conversation, seq, ts, hash) = (old.conversation.clone(), old.seq, old.ts, old.hash);
                    return Err(Refused::Duplicate(Receipt { conversation, seq, ts, hash }));
                }
                let activity = self.activity;
                let conversation = self.conversations.get_mut(&message.conversation).expect("exists");
                if message.seq <= conversation.last() {
                    return Err(Refused::SeqTaken { last: conversation.last() });
                }
                conversation.messages.push(message.clone());
                conversation.activity = activity;
            }
            Write::PutMember { conversation, user, member } => {
                let conversation = self.conversations.get_mut(conversation).expect("exists");
                let mut member = member.clone();
                if conversation.floor > 0 {
                    member.lift(conversation.floor);
                }
                conversation.members.insert(user.clone(), member);
            }
            Write::RemoveMember { conversation, user } => {
                self.conversations.get_mut(conversation).expect("exists").members.remove(user);
            }
            Write::RenameConversation { conversation, name, meta } => {
                let conversation = self.conversations.get_mut(conversation).expect("exists");
                conversation.name = name.clone().or(conversation.name.take());
                conversation.meta = meta.clone().or(conversation.meta.take());
            }
            Write::DeleteConversation { conversation } => {
                self.conversations.remove(conversation);
            }
            Write::PutDevice { user, device, class, last_seen } => {
                let row = Device { device: device.clone(), class: *class, last_seen: *last_seen };
                self.devices.insert((user.clone(), device.clone()), row);
            }
            Write::ForgetDevice { user, device } => {
                self.devices.remove(&(user.clone(), device.clone()));
                for conversation in self.conversations.values_mut() {
                    if let Some(member) = conversation.members.get_mut(user) {
                        member.lagging.retain(|(d, _)| d != device);
                    }
                }
            }
            Write::ExpireMessages { conversation, up_to, ids_from } => {
                let conversation = self.conversations.get_mut(conversation).expect("exists");
                assert!(*up_to > conversation.floor && *up_to <= conversation.last());
                conversation.floor = *up_to;
                conversation.members.values_mut().for_each(|member| member.lift(*up_to));
                while conversation.messages.first().is_some_and(|m| m.seq <= *up_to) {
                    let message = conversation.messages.remove(0);
                    conversation.floor_ts = message.ts;
                    self.gone.extend((message.ts >= *ids_from).then_some(message));
                }
            }
            Write::ForgetIds { before, limit } => {
                let mut left = *limit;
                self.gone.retain(|m| {
                    let goes = m.ts < *before && left > 0;
                    left -= u32::from(goes);
                    !goes
                });
            }
        }
        Ok(())
    }

    pub fn waiting(&self) -> u64 {
        self.conversations
            .values()
            .flat_map(|c| c.members.iter().map(move |(u, m)| waiting_of(c, u, m)))
            .sum()
    }

    pub fn read(&self, query: &Query) -> Found {
        match query {
            Query::Conversation { conversation, tail } => {
                Found::Conversation(self.conversations.get(conversation).map(|c| {
                    let last = c.last();
                    Box::new(ConversationState {
                        floor: c.floor,
                        name: c.name.clone(),
                        meta: c.meta.clone(),
                        last,
                        last_ts: c.messages.last().map_or(c.at.max(c.floor_ts), |m| m.ts),
                        members: c.members.iter().map(|(u, m)| (u.clone(), m.clone())).collect(),
                        tail: c.messages[c.messages.len().saturating_sub(*tail as usize)..].to_vec(),
                    })
                }))
            }
            Query::Messages { conversation, from, to, limit, newest, .. } => {
                let all =
                    self.conversations.get(conversation).map(|c| c.messages.clone()).unwrap_or_default();
                let mut found: Vec<Message> =
                    all.into_iter().filter(|m| (*from..=*to).contains(&m.seq)).collect();
                if *newest {
                    found.drain(..found.len().saturating_sub(*limit as usize));
                } else {
                    found.truncate(*limit as usize);
                }
                Found::Messages(found)
            }
            Query::Senders { conversation, user, from, to } => {
                let mut others = Vec::new();
                let mut own = 0;
                for message in self.conversations.get(conversation).iter().flat_map(|c| &c.messages) {
                    if (*from..=*to).contains(&message.seq) {
                        if message.from == *user {
                            own += 1;
                        } else if !others.contains(&message.from) {
                            others.push(message.from.clone());
                        }
                    }
                }
                Found::Senders { own, others }
            }
            Query::Waiting { user, device } => {
                let mut conversations = Vec::new();
                for (id, c) in &self.conversations {
                    let Some(member) = c.members.get(user) else { continue };
                    let position = member.position(device);
                    let above = c.messages.iter().filter(|m| m.seq > position);
                    let mut not_own = above.filter(|m| m.from != *user || m.device.as_ref() != Some(device));
                    if not_own.next().is_some() {
                        let last = c.last();
                        let (first, unread) = (member.first, member.unread(last));
                        conversations.push(Waiting {
                            conversation: id.clone(),
                            first,
                            last,
                            position,
                            unread,
                        });
                    }
                }
                Found::Waiting { devices: self.devices_of(user), conversations }
            }
            Query::Conversations { user, after, limit } => {
                let mut rows: Vec<_> =
                    self.conversations.iter().filter(|(_, c)| c.members.contains_key(user)).collect();
                rows.sort_by_key(|(_, c)| std::cmp::Reverse(c.activity));
                let start = after
                    .as_ref()
                    .and_then(|a| rows.iter().position(|(id, _)| *id == a))
                    .map_or(0, |i| i + 1);
                let more = rows.len() > start + *limit as usize;
                let summaries = rows.into_iter().skip(start).take(*limit as usize).map(|(id, c)| {
                    let member = c.members[user].clone();
                    let peer = id.peers().map(|(a, b)| if a == *user { b } else { a });
                    Summary {
                        conversation: id.clone(),
                        name: c.name.clone(),
                        meta: c.meta.clone(),
                        last: c.last(),
                        peer: peer.map(|p| (c.members[&p].delivered, c.members[&p].read)),
                        last_message: c.messages.last().filter(|m| m.seq >= member.first).cloned(),
                        member,
                    }
                });
                Found::Conversations { conversations: summaries.collect(), more }
            }
            Query::Devices { user } => Found::Devices(self.devices_of(user)),
            Query::Ledger => Found::Ledger { ledger: self.ledger, waiting: self.waiting() },
            Query::Overdue { before, ids_before, limit, .. } => {
                let ids = self.gone.iter().any(|m| m.ts < *ids_before);
                self.runs(*limit, ids, |_, _, message| message.ts < *before)
            }
            Query::Excess { keep, of, limit, .. } => self.runs(*limit, false, |id, conversation, message| {
                of.as_ref().is_none_or(|of| of == id) && message.seq + keep <= conversation.last()
            }),
            Query::StaleDevices { before, .. } => {
                let stale = self.devices.iter().filter(|(_, device)| device.last_seen < *before);
                let devices = stale.map(|(key, _)| key.clone()).collect();
                Found::StaleDevices { devices, next: 0, more: false }
            }
        }
    }

    fn runs(
        &self,
        limit: u32,
        ids: bool,
        is_due: impl Fn(&ConversationId, &MemConversation, &Message) -> bool,
    ) -> Found {
        let (mut runs, mut room) = (Vec::new(), limit as usize);
        for (id, conversation) in &self.conversations {
            let due = conversation.messages.iter().take(room).take_while(|m| is_due(id, conversation, m));
            let messages: Vec<_> = due.map(|m| (m.seq, m.from.clone())).collect();
            room -= messages.len();
            if !messages.is_empty() {
                runs.push(Overdue { conversation: id.clone(), messages });
            }
        }
        Found::Overdue { runs, next: 0, more: room == 0, ids }
    }

    fn devices_of(&self, user: &UserId) -> Vec<Device> {
        self.devices.iter().filter(|((u, _), _)| u == user).map(|(_, d)| d.clone()).collect()
    }
}

/// Every partition that is written to is fenced, once, and no other.
fn check_fences(batch: &Batch, epoch: u64) {
    let written = batch.writes.iter().filter_map(|write| match write {
        Write::Message(message) => Some(&message.conversation),
        Write::CreateConversation { conversation, .. }
        | Write::PutMember { conversation, .. }
        | Write::RemoveMember { conversation, .. }
        | Write::RenameConversation { conversation, .. }
        | Write::DeleteConversation { conversation }
        | Write::ExpireMessages { conversation, .. } => Some(conversation),
        Write::PutDevice { .. } | Write::ForgetDevice { .. } | Write::ForgetIds { .. } => None,
    });
    let written: BTreeSet<u16> = written.map(partition_of).collect();
    let fenced: BTreeSet<u16> = batch.fences.iter().map(|fence| fence.partition).collect();
    assert_eq!((written, batch.fences.len()), (fenced.clone(), fenced.len()), "{batch:?}");
    assert!(batch.fences.iter().all(|fence| fence.epoch == epoch));
}

/// Counted from the messages themselves, not from what the core says of them.
fn waiting_of(conversation: &MemConversation, user: &UserId, member: &Member) -> u64 {
    conversation
        .messages
        .iter()
        .filter(|m| m.seq > member.delivered && m.from != *user && m.seq >= member.joined)
        .count() as u64
}

/// The core, its store, and what the clients were sent.
pub struct World {
    pub core: Core,
    pub store: MemStore,
    pub now: Now,
    pub config: Config,
    node: Arc<NodeRef>,
    next_conn: u64,
    /// Frames for each connection, in the order of their numbers.
    pub sent: HashMap<u64, Vec<Value>>,
    /// Connections that were accepted, and whether their session was resumed.
    pub accepted: HashMap<u64, bool>,
    pub decided: HashMap<u64, u32>,
    pub closed: HashMap<u64, CloseCode>,
    pub answers: HashMap<u64, Answer>,
    pub verdicts: VecDeque<u64>,
    pub routes: Vec<(UserId, DeviceId, ConnRef, SameDevice)>,
    /// What the store answers to the next transactions instead of carrying them out.
    pub failures: usize,
    pub commits: usize,
    /// The last transaction that the store was given.
    pub last_batch: Batch,
    /// Conversations that were loaded, in order; and the lane of each look-up.
    pub loads: Vec<ConversationId>,
    pub lanes: Vec<u64>,
    /// Look-ups are answered in the opposite order, later than everything else.
    pub backwards: bool,
    /// Look-ups are not answered.
    pub is_silent: bool,
    reads: Vec<(u64, Query)>,
    found: Vec<(u64, Found)>,
    next_request: u64,
    /// How often each connection was accepted.
    pub accepts: HashMap<u64, u32>,
    /// Coordination says "in use" to every login.
    pub refuse_claims: bool,
    /// Claims of routes wait until [`World::tell_claims`].
    pub hold_claims: bool,
    claims: Vec<(ConnRef, Box<Open>)>,
    /// Connections that are not on the first node.
    elsewhere: HashMap<u64, Arc<NodeRef>>,
    /// The newest number of each connection's events, and those that did not arrive.
    numbers: HashMap<u64, u64>,
    missing: BTreeSet<(u64, u64)>,
    /// Messages to nodes, and why connections were closed.
    pub downlinks: usize,
    pub reasons: HashMap<u64, Option<Arc<str>>>,
    /// Outcomes wait until [`World::tell_outcomes`], although what they tell of is stored.
    pub late_outcomes: bool,
    /// What coordination answers waits until it is asked for, the newest first.
    pub late_claim_answers: bool,
    claim_answers: Vec<Event>,
    outcomes: Vec<Outcome>,
    /// Look-ups wait.
    pub hold_reads: bool,
    /// So many look-ups fail.
    pub read_failures: usize,
}

pub fn config() -> Config {
    Config {
        ack_timeout_ms: 3000,
        max_redeliveries: 3,
        batch_max: 200,
        group_members_max: 1000,
        frame_bytes_max: 32768,
        seed: 42,
        owner_epoch: 1,
        before_send: false,
        outbox: false,
        retention: Retention::default(),
        resume_ms: 15_000,
    }
}

impl World {
    pub fn new() -> Self {
        Self::with(config(), MemStore::default())
    }

    pub fn with(config: Config, store: MemStore) -> Self {
        Self {
            core: Core::new(config.clone()),
            store,
            now: Now { wall: 1_000_000, mono: 0 },
            config,
            node: Arc::new(NodeRef { node_id: "n1".into(), boot_id: "b1".into() }),
            next_conn: 1,
            sent: HashMap::new(),
            accepted: HashMap::new(),
            decided: HashMap::new(),
            closed: HashMap::new(),
            answers: HashMap::new(),
            verdicts: VecDeque::new(),
            routes: Vec::new(),
            failures: 0,
            commits: 0,
            last_batch: Batch::default(),
            loads: Vec::new(),
            lanes: Vec::new(),
            backwards: false,
            is_silent: false,
            reads: Vec::new(),
            found: Vec::new(),
            next_request: 1,
            accepts: HashMap::new(),
            refuse_claims: false,
            read_failures: 0,
            hold_claims: false,
            claims: Vec::new(),
            elsewhere: HashMap::new(),
            numbers: HashMap::new(),
            missing: BTreeSet::new(),
            downlinks: 0,
            reasons: HashMap::new(),
            late_outcomes: false,
            late_claim_answers: false,
            claim_answers: Vec::new(),
            outcomes: Vec::new(),
            hold_reads: false,
        }
    }

    /// A crash: memory is gone, what was committed stays.
    pub fn restart(&mut self) {
        let (config, store) = (self.config.clone(), self.store.clone());
        let (next_conn, now) = (self.next_conn, self.now);
        *self = Self::with(config, store);
        (self.next_conn, self.now) = (next_conn, now);
    }

    pub fn conn_ref(&self, conn: u64) -> ConnRef {
        let node = self.elsewhere.get(&conn).unwrap_or(&self.node).clone();
        ConnRef { node, connection: conn, login: conn }
    }

    /// As [`World::connect`], on another node than the first.
    pub fn connect_on(&mut self, node: &str, user: &str, device: &str) -> u64 {
        let node = NodeRef { node_id: node.into(), boot_id: "b1".into() };
        self.elsewhere.insert(self.next_conn, Arc::new(node));
        self.connect(user, device)
    }

    /// Answers the claims that waited.
    pub fn tell_claims(&mut self) {
        self.hold_claims = false;
        for (conn, open) in std::mem::take(&mut self.claims) {
            self.carry_out(Action::Claim { conn, open });
        }
        self.settle();
    }

    /// The session of a connection is called after it: `s1`, `s2`.
    pub fn connect(&mut self, user: &str, device: &str) -> u64 {
        self.resume(user, device, None)
    }

    pub fn connect_as(&mut self, user: &str, device: &str, same_device: SameDevice) -> u64 {
        let conn = self.open(user, device, None, same_device);
        self.settle();
        conn
    }

    pub fn resume(&mut self, user: &str, device: &str, resume: Option<&str>) -> u64 {
        self.resume_as(user, device, resume, SameDevice::Replace)
    }

    pub fn resume_as(
        &mut self,
        user: &str,
        device: &str,
        resume: Option<&str>,
        same_device: SameDevice,
    ) -> u64 {
        let conn = self.open(user, device, resume, same_device);
        self.settle();
        conn
    }

    /// As [`World::resume`], with frames of others that are decided before its look-ups are answered.
    pub fn resume_amid(&mut self, user: &str, device: &str, resume: &str, frames: &[(u64, &str)]) -> u64 {
        self.backwards = true;
        let conn = self.open(user, device, Some(resume), SameDevice::Replace);
        for _ in 0..2 {
            self.core.on_turn(self.now);
            self.core.take_actions().into_iter().for_each(|action| self.carry_out(action));
        }
        assert!(!self.accepted.contains_key(&conn), "what waits is being looked up");
        self.frames(frames);
        self.backwards = false;
        conn
    }

    /// What [`World::connect`] says; the turn is still to come.
    pub fn open(&mut self, user: &str, device: &str, resume: Option<&str>, same_device: SameDevice) -> u64 {
        let conn = self.next_conn;
        self.next_conn += 1;
        let resume = resume.map(Into::into);
        self.give(conn, Up::Open(Open { resume, same_device, ..opening(user, device, conn) }));
        conn
    }

    /// Tells the oldest of the outcomes that wait; others go on waiting.
    pub fn tell_outcome(&mut self) {
        let outcome = self.outcomes.remove(0);
        self.event(Event::Outcome(outcome));
        self.settle();
    }

    /// Tells the outcomes that waited, and those that follow from them.
    pub fn tell_outcomes(&mut self) {
        self.late_outcomes = false;
        for outcome in std::mem::take(&mut self.outcomes) {
            self.event(Event::Outcome(outcome));
        }
        self.settle();
    }

    /// Tells what coordination answered, the newest first.
    pub fn tell_claim_answers(&mut self) {
        for claimed in std::mem::take(&mut self.claim_answers).into_iter().rev() {
            self.event(claimed);
        }
    }

    /// Carries out the look-ups that wait; their answers still do.
    pub fn answer_reads_early(&mut self) {
        for (read, query) in std::mem::take(&mut self.reads) {
            self.found.push((read, self.store.read(&query)));
        }
    }

    /// Takes the look-ups that wait, so that the test answers them itself.
    pub fn take_reads(&mut self) -> Vec<(u64, Query)> {
        std::mem::take(&mut self.reads)
    }

    pub fn answer(&mut self, read: u64, found: Found) {
        self.event(Event::Found { read, found });
        self.settle();
    }

    /// Coordination loses everything.
    pub fn forget_routes(&mut self) {
        self.routes.clear();
    }

    pub fn disconnect(&mut self, conn: u64) {
        self.up(conn, Up::Closed(CloseCode::Bye));
    }

    pub fn up(&mut self, conn: u64, event: Up) {
        self.up_from(self.conn_ref(conn), event);
    }

    pub fn up_from(&mut self, from: ConnRef, event: Up) {
        self.event(Event::Uplink(Uplink { from, event }));
        self.settle();
    }

    /// Gives several frames in one turn.
    pub fn frames(&mut self, frames: &[(u64, &str)]) {
        for (conn, text) in frames {
            let from = self.conn_ref(*conn);
            let frame = ClientFrame::decode_text(text.as_bytes()).expect("a valid frame");
            self.event(Event::Uplink(Uplink { from, event: Up::Frame(frame) }));
        }
        self.settle();
    }

    pub fn frame(&mut self, conn: u64, text: &str) {
        self.frames(&[(conn, text)]);
    }

    /// A request of the API; the turn is still to come.
    pub fn give_request(&mut self, request: Request) -> u64 {
        self.next_request += 1;
        let from = ConnRef { node: self.node.clone(), connection: 0, login: 0 };
        let request_id = self.next_request;
        self.event(Event::Uplink(Uplink { from, event: Up::Request { request_id, request } }));
        request_id
    }

    pub fn request(&mut self, request: Request) -> Answer {
        let request_id = self.give_request(request);
        self.settle();
        self.answers.remove(&request_id).expect("every request is answered")
    }

    /// One event; the turn is still to come.
    pub fn give(&mut self, conn: u64, event: Up) {
        let from = self.conn_ref(conn);
        self.event(Event::Uplink(Uplink { from, event }));
    }

    fn event(&mut self, event: Event) {
        if let Event::Uplink(Uplink { from, event: Up::NotHere { no, .. } }) = &event {
            self.missing.insert((from.connection, *no));
        }
        self.core.on_event(event, self.now);
    }

    /// Lets time pass as the driver does: from one timer to the next, and nothing happens between.
    pub fn advance(&mut self, ms: u64) {
        self.settle();
        let end = self.now.mono + ms;
        while let Some(due) = self.core.next_due().filter(|due| *due <= end) {
            assert!(due > self.now.mono, "what was due has happened");
            self.pass(due - self.now.mono);
            self.settle();
        }
        self.pass(end - self.now.mono);
        self.core.on_turn(self.now);
        assert_eq!(self.core.take_actions(), [], "nothing happens before its timer");
    }

    fn pass(&mut self, ms: u64) {
        (self.now.wall, self.now.mono) = (self.now.wall + ms, self.now.mono + ms);
    }

    /// One turn later; what is looked up in it is answered when the world settles again.
    pub fn advance_before_reads(&mut self, ms: u64) {
        self.pass(ms);
        let was_backwards = std::mem::replace(&mut self.backwards, true);
        self.core.on_turn(self.now);
        for action in self.core.take_actions() {
            self.carry_out(action);
        }
        self.backwards = was_backwards;
    }

    pub fn verdict(&mut self, ticket: u64, verdict: Verdict) {
        self.event(Event::Verdict { ticket, verdict });
        self.settle();
    }

    /// Turns until nothing happens any more.
    pub fn settle(&mut self) {
        for _ in 0..10_000 {
            self.core.on_turn(self.now);
            let actions = self.core.take_actions();
            if actions.is_empty() {
                if self.is_silent {
                    return;
                }
                let next = if self.hold_reads { None } else { self.reads.pop() };
                match next {
                    None if !self.hold_reads && !self.found.is_empty() => {
                        for (read, found) in std::mem::take(&mut self.found) {
                            self.event(Event::Found { read, found });
                        }
                    }
                    None => return,
                    Some((read, query)) => {
                        let found = self.store.read(&query);
                        self.event(Event::Found { read, found });
                    }
                }
            }
            for action in actions {
                self.carry_out(action);
            }
        }
        panic!("the core does not come to rest");
    }

    fn carry_out(&mut self, action: Action) {
        if let Action::Read { lane, query, .. } = &action {
            self.lanes.push(*lane);
            if let Query::Conversation { conversation, .. } = query {
                self.loads.push(conversation.clone());
            }
        }
        match action {
            Action::Send(message) => {
                if let Down::Answer { request_id, answer } = message.event {
                    self.answers.insert(request_id, *answer);
                    return;
                }
                self.downlinks += 1;
                for target in &message.to {
                    assert_eq!(message.node, self.conn_ref(target.connection).node, "its own node is told");
                    // Each event has the next number, but for one that is sent again and one outside the order.
                    let last = self.numbers.entry(target.connection).or_default();
                    if target.no == *last + 1 {
                        *last = target.no;
                    } else {
                        let is_again = self.missing.contains(&(target.connection, target.no));
                        assert!(target.no == 0 || is_again, "{} after {last}", target.no);
                    }
                    match &message.event {
                        Down::Frame { frame, decided, .. } => {
                            *self.decided.entry(target.connection).or_default() += decided;
                            let mut value: Value =
                                serde_json::from_slice(&frame.json).expect("frames are JSON");
                            if let Some(body) = &frame.body {
                                value["binary"] = Value::from(body.to_vec());
                            }
                            self.sent.entry(target.connection).or_default().push(value);
                        }
                        Down::Decided(count) => *self.decided.entry(target.connection).or_default() += count,
                        Down::Close { code, reason } => {
                            self.closed.insert(target.connection, *code);
                            self.reasons.insert(target.connection, reason.clone());
                        }
                        Down::Refused(code) => {
                            self.closed.insert(target.connection, *code);
                        }
                        Down::Accepted { resumed } => {
                            *self.accepts.entry(target.connection).or_default() += 1;
                            self.accepted.insert(target.connection, *resumed);
                            let nothing = !self.sent.contains_key(&target.connection);
                            assert!(nothing, "nothing comes before the connection is accepted");
                        }
                        Down::Answer { .. } => {}
                    }
                }
            }
            Action::Commit(batch) => {
                self.commits += 1;
                check_fences(&batch, self.config.owner_epoch);
                self.last_batch = (*batch).clone();
                let outcome = if self.failures > 0 {
                    self.failures -= 1;
                    Outcome::Failed("disk full".into())
                } else {
                    self.store.commit(&batch)
                };
                if self.late_outcomes {
                    self.outcomes.push(outcome);
                } else {
                    self.event(Event::Outcome(outcome));
                }
                self.check_ledger();
            }
            Action::Read { read, .. } if self.read_failures > 0 => {
                self.read_failures -= 1;
                self.event(Event::Found { read, found: Found::Failed("disk".into()) });
            }
            Action::Read { read, query, .. } if self.backwards || self.is_silent => {
                self.reads.push((read, query))
            }
            Action::Read { read, query, .. } => {
                let found = self.store.read(&query);
                self.event(Event::Found { read, found });
            }
            Action::Claim { conn, open } if self.hold_claims => self.claims.push((conn, open)),
            Action::Claim { conn, open } if self.refuse_claims => {
                self.event(Event::Claimed { conn, open, claim: Claim::InUse });
            }
            Action::Claim { conn, open }
                if open.same_device == SameDevice::Refuse
                    && self.routes.iter().any(|r| r.0 == open.user && r.1 == open.device) =>
            {
                self.event(Event::Claimed { conn, open, claim: Claim::InUse });
            }
            Action::Claim { conn, open } => {
                let is_rival =
                    |r: &(UserId, DeviceId, ConnRef, SameDevice)| r.0 == open.user && r.1 == open.device;
                let ended = match open.same_device {
                    SameDevice::Allow => Vec::new(),
                    _ => self.routes.iter().filter(|r| is_rival(r)).map(|r| r.2.clone()).collect(),
                };
                self.routes.retain(|r| !ended.contains(&r.2));
                self.routes.push((open.user.clone(), open.device.clone(), conn.clone(), open.same_device));
                self.claim_answers.push(Event::Claimed { conn, open, claim: Claim::Won { ended } });
                if !self.late_claim_answers {
                    self.tell_claim_answers();
                }
            }
            Action::Release { conn, .. } => self.routes.retain(|r| r.2 != conn),
            Action::LookUp { conn, no, event, .. } => {
                let here = self.routes.iter().any(|r| r.2 == conn);
                self.event(Event::LookedUp { conn, here, no, event });
            }
            Action::AskVerdict { ticket, .. } => self.verdicts.push_back(ticket),
        }
    }

    pub fn check_ledger(&self) {
        let Ledger { accepted, delivered, expired, dropped } = self.store.ledger;
        assert_eq!(accepted, delivered + self.store.waiting() + expired + dropped, "the ledger balances");
    }

    /// Takes what a connection was sent.
    pub fn take(&mut self, conn: u64) -> Vec<Value> {
        self.sent.remove(&conn).unwrap_or_default()
    }

    /// Takes it, as `type` and the number that matters.
    pub fn brief(&mut self, conn: u64) -> Vec<String> {
        let frames = self.take(conn);
        frames.iter().map(brief).collect()
    }

    pub fn last_seq(&self, conversation: &str) -> Seq {
        self.store.conversations.get(conversation).map_or(0, MemConversation::last)
    }
}

/// What a connection says when it opens.
pub fn opening(user: &str, device: &str, conn: u64) -> Open {
    Open {
        user: UserId::trusted(user),
        device: DeviceId::trusted(device),
        class: None,
        channel: None,
        session: format!("s{conn}").into(),
        resume: None,
        same_device: SameDevice::Replace,
    }
}

pub fn brief(frame: &Value) -> String {
    let kind = frame["type"].as_str().unwrap_or_default();
    let text = |name: &str| frame[name].as_str().unwrap_or_default().to_owned();
    match kind {
        "msg.ack" => format!("ack {} {}", text("id"), frame["seq"]),
        "msg.push" if frame["redelivered"] == true => format!("again {}", frame["seq"]),
        "msg.push" => format!("push {}", frame["seq"]),
        "msg.receipt" if frame["count"].is_number() => {
            format!("{} {} n={}", text("kind"), frame["seq"], frame["count"])
        }
        "msg.receipt" => format!("{} {} {}", text("kind"), frame["seq"], text("user_id")),
        "error" => format!("error {} {}", text("code"), text("id")),
        "ok" => format!("ok {}", text("id")),
        "sync.notice" => {
            let rows = frame["conversations"].as_array().expect("rows").iter().map(|r| {
                format!(
                    "{} {}-{} u{}",
                    r["conversation_id"].as_str().unwrap_or_default(),
                    r["first_seq"],
                    r["last_seq"],
                    r["unread"]
                )
            });
            format!("notice {}", rows.collect::<Vec<_>>().join(","))
        }
        "history.page" => {
            let rows: Vec<String> =
                frame["messages"].as_array().expect("rows").iter().map(|m| m["seq"].to_string()).collect();
            format!("page {} more={}", rows.join(","), frame["more"])
        }
        "conversation.changed" => format!("changed {}", text("change")),
        other => other.to_owned(),
    }
}

pub fn send(id: &str, to: &str) -> String {
    format!(r#"{{"type":"msg.send","id":"{id}","to":"{to}","body":"{id}"}}"#)
}

pub fn recv(conversation: &str, seq: Seq) -> String {
    format!(r#"{{"type":"msg.recv","conversation_id":"{conversation}","seq":{seq}}}"#)
}

pub fn read(conversation: &str, seq: Seq) -> String {
    format!(r#"{{"type":"msg.read","conversation_id":"{conversation}","seq":{seq}}}"#)
}

pub fn body(text: &str) -> Body {
    Body::Json(Bytes::copy_from_slice(text.as_bytes()))
}
