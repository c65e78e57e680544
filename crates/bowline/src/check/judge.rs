//! From a history to a verdict. Pure: entries in, one by one, and the counts and first violations out.
//!
//! What is judged is what `docs/protocol.md` promises to clients. Acknowledged messages reach every device of every member
//! and stay in the history; the numbers of a conversation have no gaps, and each belongs to one message for good; an id is
//! one message; devices are sent messages in the order of their numbers, and once unless the repeat says so; messages of
//! a sender keep their order; what waits is announced and what is stored later is pushed; counts and ledger are right.
//!
//! Bodies are not kept, and what a device has is kept as ranges: half an hour at full load takes some tens of megabytes.

mod end;
mod messages;
#[cfg(test)]
mod tests;

use super::{
    history::{Entry, Ledger, Name, Told, What, World},
    ranges::Ranges,
};
use messages::{Messages, Number};
use std::collections::{BTreeMap, HashMap, VecDeque};

/// A connection that lived for so long after something was acknowledged has been told of it, or never will be. On one
/// that broke off sooner it may have been on its way.
const TOLD_WITHIN_US: u64 = 2_500_000;
/// How long acknowledgements are remembered by time; connections that end are judged right then.
const ACKED_KEPT_US: u64 = 4 * TOLD_WITHIN_US;
/// Violations that are told in full; all are counted.
pub const TOLD_MAX: usize = 10;
/// Ranges of numbers that connections left out, to be looked at in the end. Beyond, the run is lost anyway.
const SKIPPED_MAX: usize = 100_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Acknowledged or seen by somebody, and not there for a device that should have it.
    Lost,
    /// There twice: two numbers for one id, two messages for one number, or sent to a device again unasked.
    Doubled,
    /// Not in the order of the numbers, or not in the order in which one device sent it.
    Reordered,
    /// Numbers that no message has, or that a device was not told of in their turn.
    Gap,
    /// Another content, time, conversation or sender than before.
    Changed,
    /// A count, position or ledger that is not what the messages say.
    Miscounted,
    /// Sent until the end, and never answered.
    Unanswered,
}

impl Kind {
    pub const ALL: [Self; 7] = [
        Self::Lost,
        Self::Doubled,
        Self::Reordered,
        Self::Gap,
        Self::Changed,
        Self::Miscounted,
        Self::Unanswered,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Lost => "lost",
            Self::Doubled => "doubled",
            Self::Reordered => "reordered",
            Self::Gap => "gaps",
            Self::Changed => "changed",
            Self::Miscounted => "miscounted",
            Self::Unanswered => "unanswered",
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct Violation {
    pub kind: Kind,
    pub us: u64,
    pub text: String,
    pub conversation: Option<Name>,
    pub seq: Option<u64>,
    pub id: Option<Name>,
}

#[derive(Debug, Default, PartialEq)]
pub struct Verdict {
    /// Messages, each counted once.
    pub sent: u64,
    pub acked: u64,
    /// Messages that reached a device first, over all devices but the sending ones.
    pub delivered: u64,
    /// Sends of ids that were sent before.
    pub repeated: u64,
    /// Pushes that said so themselves.
    pub redelivered: u64,
    pub reconnects: u64,
    pub kills: u64,
    counts: [u64; Kind::ALL.len()],
    /// The first ones, in the order in which they were found.
    pub violations: Vec<Violation>,
}

impl Verdict {
    pub fn count(&self, kind: Kind) -> u64 {
        self.counts[kind as usize]
    }

    pub fn is_clean(&self) -> bool {
        self.counts.iter().all(|count| *count == 0)
    }

    fn add(&mut self, count: u64, violation: Violation) {
        self.counts[violation.kind as usize] += count;
        if self.violations.len() < TOLD_MAX {
            self.violations.push(violation);
        }
    }
}

pub struct Judge {
    device_names: HashMap<Name, usize>,
    user_names: HashMap<Name, usize>,
    conversation_names: HashMap<Name, usize>,
    devices: Vec<Device>,
    users: Vec<User>,
    conversations: Vec<Conversation>,
    messages: Messages,
    skipped: Vec<Skipped>,
    verdict: Verdict,
}

struct Device {
    name: Name,
    user: usize,
    conversations: BTreeMap<usize, Holding>,
    connection: Option<Connection>,
    was_connected: bool,
    /// What was announced on the last connection. A session that is resumed goes on from there.
    noticed: HashMap<usize, u64>,
    /// Positions that were durable for this device when it began to connect.
    proven: HashMap<usize, u64>,
    page: Option<(usize, u64)>,
    is_reviewing: bool,
    is_reviewed: bool,
}

/// What a device has of a conversation.
#[derive(Default)]
struct Holding {
    /// When this connection began, and since then.
    before: Ranges,
    during: Ranges,
    /// In the history as it was in the end.
    review: Ranges,
    is_listed: bool,
}

impl Holding {
    fn has(&self, seq: u64) -> bool {
        self.before.contains(seq) || self.during.contains(seq)
    }
}

struct Connection {
    since_us: u64,
    resumed: bool,
    live: HashMap<usize, Live>,
    /// Positions that were told, those that a request stands behind, and those that the server surely knows.
    told: HashMap<usize, u64>,
    probe: Option<(String, HashMap<usize, u64>)>,
    sure: HashMap<usize, u64>,
}

/// What came over one connection in one conversation.
#[derive(Default)]
struct Live {
    /// Pushes, and acks of own messages.
    told: Ranges,
    pushed: Ranges,
    first: u64,
    last: u64,
    noticed: u64,
}

struct User {
    device_count: usize,
    /// The highest position that one of its devices said it has read, by conversation.
    read: HashMap<usize, u64>,
}

struct Conversation {
    id: Name,
    members: Vec<usize>,
    /// The highest number that was acknowledged, by time, and what lies further back.
    acked: VecDeque<(u64, u64)>,
    acked_before: u64,
    /// Delivered positions that a receipt proves, by user.
    proven: HashMap<usize, u64>,
}

impl Conversation {
    fn on_acked(&mut self, us: u64, seq: u64) {
        if self.acked.back().is_none_or(|(_, last)| *last < seq) {
            self.acked.push_back((us, seq));
        }
        while self.acked.len() > 1 && self.acked[1].0 + ACKED_KEPT_US < us {
            self.acked_before = self.acked.pop_front().map_or(0, |(_, seq)| seq);
        }
    }

    fn acked_until(&self, us: u64) -> u64 {
        let known = self.acked.iter().take_while(|(at, _)| *at <= us).last();
        known.map_or(self.acked_before, |(_, seq)| *seq)
    }
}

/// Numbers that a device was not told of on one connection.
struct Skipped {
    us: u64,
    device: usize,
    conversation: usize,
    first: u64,
    last: u64,
}

impl Judge {
    pub fn new(world: &World) -> Self {
        let mut judge = Self {
            device_names: HashMap::new(),
            user_names: HashMap::new(),
            conversation_names: HashMap::new(),
            devices: Vec::new(),
            users: Vec::new(),
            conversations: Vec::new(),
            messages: Messages::default(),
            skipped: Vec::new(),
            verdict: Verdict::default(),
        };
        for info in &world.devices {
            let next = judge.users.len();
            let user = *judge.user_names.entry(info.user.clone()).or_insert(next);
            if user == next {
                judge.users.push(User { device_count: 0, read: HashMap::new() });
            }
            judge.users[user].device_count += 1;
            judge.device_names.insert(info.name.clone(), judge.devices.len());
            judge.devices.push(Device {
                name: info.name.clone(),
                user,
                conversations: BTreeMap::new(),
                connection: None,
                was_connected: false,
                noticed: HashMap::new(),
                proven: HashMap::new(),
                page: None,
                is_reviewing: false,
                is_reviewed: false,
            });
        }
        for info in &world.conversations {
            let index = judge.conversations.len();
            let members = info.members.iter().filter_map(|user| judge.user_names.get(user).copied());
            let members: Vec<usize> = members.collect();
            for device in judge.devices.iter_mut().filter(|device| members.contains(&device.user)) {
                device.conversations.insert(index, Holding::default());
            }
            judge.conversation_names.insert(info.id.clone(), index);
            judge.conversations.push(Conversation {
                id: info.id.clone(),
                members,
                acked: VecDeque::new(),
                acked_before: 0,
                proven: HashMap::new(),
            });
            judge.messages.add_conversation();
        }
        judge
    }

    pub fn on(&mut self, entry: &Entry) {
        let us = entry.us;
        match (&entry.what, &entry.device) {
            (What::Killed, _) => self.verdict.kills += 1,
            (What::Ready, _) => {}
            (What::Ledger { ledger, at_rest }, _) => self.on_ledger(us, *ledger, *at_rest),
            (what, Some(name)) => {
                if let Some(device) = self.device_names.get(name).copied() {
                    self.on_device(us, device, what);
                }
            }
            (_, None) => {}
        }
    }

    fn on_device(&mut self, us: u64, device: usize, what: &What) {
        match what {
            What::Opening => self.on_opening(device),
            What::Connected { resumed } => self.on_connected(us, device, *resumed),
            What::Closed { .. } => self.on_closed(us, device),
            What::Send { conversation, id, again } => self.on_send(device, conversation, id, *again),
            What::Ack { conversation, id, seq, ts } => self.on_ack(us, device, conversation, id, *seq, *ts),
            What::Refused { id, for_now, .. } => {
                self.messages.on_refused(self.devices[device].user, id, *for_now)
            }
            What::Push { told, redelivered } => self.on_push(us, device, told, *redelivered),
            What::Notice { conversation, last_seq, .. } => {
                self.on_notice(us, device, conversation, *last_seq)
            }
            What::Recv { conversation, seq } => {
                if let (Some(conversation), Some(connection)) =
                    (self.conversation(conversation), &mut self.devices[device].connection)
                {
                    raise(&mut connection.told, conversation, *seq);
                }
            }
            What::Read { conversation, seq } => {
                if let Some(conversation) = self.conversation(conversation) {
                    raise(&mut self.users[self.devices[device].user].read, conversation, *seq);
                }
            }
            What::Receipt { conversation, seq, user, read: _ } => {
                if let (Some(conversation), Some(user)) =
                    (self.conversation(conversation), self.user_names.get(user.as_str()).copied())
                {
                    raise(&mut self.conversations[conversation].proven, user, *seq);
                }
            }
            What::Ask { request } => self.on_asked(device, request),
            What::Answer { request } => self.on_answered(device, request),
            What::Page { conversation, after } => {
                self.devices[device].page = self.conversation(conversation).map(|c| (c, *after));
            }
            What::Row { told } => self.on_row(us, device, told),
            What::Reviewing => self.devices[device].is_reviewing = true,
            What::Reviewed => self.on_reviewed(us, device),
            What::Unfinished { what } => {
                let text = format!("{} could not {what} in time", self.devices[device].name);
                self.complain(Kind::Unanswered, us, None, text);
            }
            What::Listed { conversation, last_seq, read_seq, unread } => {
                self.on_listed(us, device, conversation, *last_seq, *read_seq, *unread)
            }
            What::Killed | What::Ready | What::Ledger { .. } => {}
        }
    }

    fn conversation(&self, id: &str) -> Option<usize> {
        self.conversation_names.get(id).copied()
    }

    /// Notes a violation about one number of a conversation.
    fn blame(&mut self, kind: Kind, us: u64, conversation: usize, seq: u64, id: Option<Name>, text: String) {
        let id = id.or_else(|| {
            let message = self.messages.at(conversation, seq)?;
            Some(self.messages[message].id.clone())
        });
        let conversation = Some(self.conversations[conversation].id.clone());
        self.verdict.add(1, Violation { kind, us, text, conversation, seq: Some(seq), id });
    }

    fn complain(&mut self, kind: Kind, us: u64, conversation: Option<usize>, text: String) {
        let conversation = conversation.map(|index| self.conversations[index].id.clone());
        self.verdict.add(1, Violation { kind, us, text, conversation, seq: None, id: None });
    }

    // --- connections ----------------------------------------------------------------------------------------------

    fn on_opening(&mut self, device: usize) {
        let Device { user, conversations, .. } = &self.devices[device];
        // Of several devices it is not known which one a receipt stands for.
        let proven = if self.users[*user].device_count == 1 {
            let of = |index: &usize| Some((*index, *self.conversations[*index].proven.get(user)?));
            conversations.keys().filter_map(of).collect()
        } else {
            HashMap::new()
        };
        self.devices[device].proven = proven;
    }

    fn on_connected(&mut self, us: u64, device: usize, resumed: bool) {
        self.on_closed(us, device);
        let device = &mut self.devices[device];
        self.verdict.reconnects += u64::from(std::mem::replace(&mut device.was_connected, true));
        device.page = None;
        for holding in device.conversations.values_mut() {
            let during = std::mem::take(&mut holding.during);
            holding.before.merge(&during);
        }
        let noticed = std::mem::take(&mut device.noticed).into_iter().filter(|_| resumed);
        let live = |(index, noticed)| (index, Live { noticed, ..Live::default() });
        device.connection = Some(Connection {
            since_us: us,
            resumed,
            live: noticed.map(live).collect(),
            told: HashMap::new(),
            probe: None,
            sure: HashMap::new(),
        });
    }

    /// Was everything told that this connection should have been told?
    fn on_closed(&mut self, us: u64, device: usize) {
        let Some(connection) = self.devices[device].connection.take() else { return };
        let is_settled = us.saturating_sub(connection.since_us) >= TOLD_WITHIN_US;
        let noticed = connection.live.iter().map(|(index, live)| (*index, live.noticed));
        self.devices[device].noticed = noticed.collect();
        for (index, holding) in &self.devices[device].conversations {
            let nothing = Live::default();
            let live = connection.live.get(index).unwrap_or(&nothing);
            let (first, last) = if is_settled {
                let acked = self.conversations[*index].acked_until(us - TOLD_WITHIN_US);
                (live.noticed + 1, live.last.max(acked))
            } else {
                (live.first.max(live.noticed + 1), live.last)
            };
            if first == 0 || first > last {
                continue;
            }
            let mut known = holding.before.clone();
            known.merge(&live.told);
            for (first, last) in known.missing(first, last) {
                if self.skipped.len() < SKIPPED_MAX {
                    self.skipped.push(Skipped { us, device, conversation: *index, first, last });
                }
            }
        }
    }

    fn on_asked(&mut self, device: usize, request: &str) {
        if let Some(connection) = &mut self.devices[device].connection
            && connection.probe.is_none()
            && !connection.told.is_empty()
        {
            connection.probe = Some((request.to_owned(), std::mem::take(&mut connection.told)));
        }
    }

    /// Frames of one connection are processed in order: what was told before the question is known.
    fn on_answered(&mut self, device: usize, request: &str) {
        if let Some(connection) = &mut self.devices[device].connection
            && let Some((_, told)) = connection.probe.take_if(|(asked, _)| asked == request)
        {
            for (conversation, seq) in told {
                raise(&mut connection.sure, conversation, seq);
            }
        }
    }

    // --- messages -------------------------------------------------------------------------------------------------

    fn on_send(&mut self, device: usize, conversation: &str, id: &str, again: bool) {
        let Some(conversation) = self.conversation(conversation) else { return };
        let user = self.devices[device].user;
        if again {
            self.verdict.repeated += 1;
        } else {
            self.verdict.sent += 1;
            self.messages.on_sent(user, device, conversation, id);
            self.on_asked(device, id);
        }
    }

    fn on_ack(&mut self, us: u64, device: usize, conversation: &str, id: &str, seq: u64, ts: u64) {
        self.on_answered(device, id);
        let user = self.devices[device].user;
        let Some(message) = self.messages.find(user, id) else {
            let text =
                format!("{} was given an ack for {id}, which it never sent", self.devices[device].name);
            return self.complain(Kind::Changed, us, None, text);
        };
        let Some(conversation) = self.conversation(conversation) else {
            let text = format!("the ack of {id} names {conversation}, where nobody sent anything");
            return self.complain(Kind::Changed, us, None, text);
        };
        if !std::mem::replace(&mut self.messages[message].acked, true) {
            self.verdict.acked += 1;
        }
        let by = format!("the ack to {}", self.devices[device].name);
        if !self.place(us, message, conversation, seq, ts, &by) {
            return;
        }
        self.conversations[conversation].on_acked(us, seq);
        if self.messages[message].device == device {
            self.have(device, conversation, seq);
            if let Some(live) = self.live(device, conversation) {
                live.told.insert(seq);
            }
        }
    }

    fn on_push(&mut self, us: u64, device: usize, told: &Told, redelivered: bool) {
        let name = self.devices[device].name.clone();
        let Some(conversation) = self.holds(us, device, told) else { return };
        let (seq, id) = (told.seq, &told.conversation);
        self.verdict.redelivered += u64::from(redelivered);
        let was_had = self.devices[device].conversations[&conversation].before.contains(seq);
        let Some(connection) = &mut self.devices[device].connection else { return };
        let acknowledged = connection.sure.get(&conversation).copied().unwrap_or(0);
        let is_resumed = connection.resumed;
        let live = connection.live.entry(conversation).or_default();
        let (is_new, last) = (live.pushed.insert(seq), live.last);
        live.told.insert(seq);
        if !redelivered {
            live.first = if live.first == 0 { seq } else { live.first.min(seq) };
            live.last = last.max(seq);
        }
        let of = format!("{name} was pushed number {seq} of {id}");
        let fault = if !redelivered && !is_new {
            Some((Kind::Doubled, format!("{of} twice on one connection, without `redelivered`")))
        } else if !redelivered && was_had && !is_resumed {
            Some((
                Kind::Doubled,
                format!("{of} without `redelivered`, although it had it before it connected"),
            ))
        } else if !redelivered && seq < last {
            Some((Kind::Reordered, format!("{of} behind number {last}")))
        } else if seq <= acknowledged {
            let known = format!("after the server knew that it has everything up to {acknowledged}");
            Some((Kind::Doubled, format!("{of} {known}")))
        } else {
            None
        };
        if let Some((kind, text)) = fault {
            self.blame(kind, us, conversation, seq, None, text);
        }
        self.on_told(us, device, conversation, told, &format!("the push to {name}"));
    }

    fn on_row(&mut self, us: u64, device: usize, told: &Told) {
        let name = self.devices[device].name.clone();
        let Some(conversation) = self.holds(us, device, told) else { return };
        let (seq, id) = (told.seq, &told.conversation);
        if let Some((of, last)) = &mut self.devices[device].page
            && *of == conversation
        {
            let before = std::mem::replace(last, seq.max(*last));
            if seq == before {
                let text = format!("{name} found number {seq} of {id} twice in the history");
                self.blame(Kind::Doubled, us, conversation, seq, None, text);
            } else if seq < before {
                let text = format!("{name} found number {seq} of {id} behind number {before} in the history");
                self.blame(Kind::Reordered, us, conversation, seq, None, text);
            }
        }
        let is_so = self.on_told(us, device, conversation, told, &format!("the history that {name} read"));
        let device = &mut self.devices[device];
        if is_so
            && device.is_reviewing
            && let Some(holding) = device.conversations.get_mut(&conversation)
        {
            holding.review.insert(seq);
        }
    }

    /// The conversation, when the device takes part in it.
    fn holds(&mut self, us: u64, device: usize, told: &Told) -> Option<usize> {
        let index = self.conversation(&told.conversation);
        let index = index.filter(|index| self.devices[device].conversations.contains_key(index));
        if index.is_none() {
            let text = format!(
                "{} was told a message of {}, where it does not belong",
                self.devices[device].name, told.conversation
            );
            self.complain(Kind::Changed, us, None, text);
        }
        index
    }

    /// A message arrived at a device. True when it is what it should be.
    fn on_told(&mut self, us: u64, device: usize, conversation: usize, told: &Told, how: &str) -> bool {
        let user = self.user_names.get(told.from.as_str()).copied();
        let Some(message) = user.and_then(|user| self.messages.find(user, &told.id)) else {
            let text = format!(
                "{how} has {} of {} as number {} of {}, which nobody sent",
                told.id, told.from, told.seq, told.conversation
            );
            self.blame(Kind::Changed, us, conversation, told.seq, Some(told.id.as_str().into()), text);
            return false;
        };
        if !self.place(us, message, conversation, told.seq, told.ts, how) {
            return false;
        }
        if !told.intact && self.messages[message].is_first_change() {
            let text = format!("{how} has another body than {} was sent with", told.id);
            self.blame(Kind::Changed, us, conversation, told.seq, None, text);
        }
        if self.have(device, conversation, told.seq) && self.messages[message].device != device {
            self.verdict.delivered += 1;
        }
        true
    }

    /// Holds what somebody was told against what is known. False when the message is not what stands there.
    fn place(&mut self, us: u64, message: usize, conversation: usize, seq: u64, ts: u64, how: &str) -> bool {
        let id = self.messages[message].id.clone();
        let name = |judge: &Self, index: usize| judge.conversations[index].id.clone();
        let (kind, is_so, text) = match self.messages.place(message, conversation, seq, ts) {
            Number::Good => return true,
            Number::Elsewhere { conversation: sent_to } => {
                let (told, sent) = (name(self, conversation), name(self, sent_to));
                (Kind::Changed, false, format!("{how} has {id} in {told}, but it was sent to {sent}"))
            }
            Number::Another { seq: first } => {
                let of = name(self, conversation);
                (
                    Kind::Doubled,
                    false,
                    format!("{how} has {id} as number {seq} of {of}, where it was {first}"),
                )
            }
            Number::Taken { by } => {
                let (of, by) = (name(self, conversation), self.messages[by].id.clone());
                (
                    Kind::Doubled,
                    false,
                    format!("{how} has {id} as number {seq} of {of}, which is the number of {by}"),
                )
            }
            Number::AnotherTime { ts: first } => {
                let of = name(self, conversation);
                (
                    Kind::Changed,
                    true,
                    format!("{how} gives number {seq} of {of} the time {ts}; it was {first}"),
                )
            }
        };
        let is_first = match kind {
            Kind::Doubled => self.messages[message].is_first_double(),
            _ => self.messages[message].is_first_change(),
        };
        if is_first {
            self.blame(kind, us, conversation, seq, Some(id), text);
        }
        is_so
    }

    fn have(&mut self, device: usize, conversation: usize, seq: u64) -> bool {
        let Some(holding) = self.devices[device].conversations.get_mut(&conversation) else { return false };
        !holding.before.contains(seq) && holding.during.insert(seq)
    }

    fn live(&mut self, device: usize, conversation: usize) -> Option<&mut Live> {
        let connection = self.devices[device].connection.as_mut()?;
        Some(connection.live.entry(conversation).or_default())
    }

    fn on_notice(&mut self, us: u64, device: usize, conversation: &str, last_seq: u64) {
        let name = self.devices[device].name.clone();
        let index = self.conversation(conversation);
        let Some(index) = index.filter(|index| self.devices[device].conversations.contains_key(index)) else {
            let text = format!("{name} was told that {conversation} waits, where it does not belong");
            return self.complain(Kind::Changed, us, None, text);
        };
        let proven = self.devices[device].proven.get(&index).copied().unwrap_or(0);
        if last_seq <= proven {
            let text = format!(
                "{name} was told that {conversation} waits up to number {last_seq}, although its receipt for {proven} \
                 had gone out before it connected"
            );
            self.complain(Kind::Miscounted, us, Some(index), text);
        }
        if let Some(live) = self.live(device, index) {
            live.noticed = live.noticed.max(last_seq);
        }
    }

    // --- counts ---------------------------------------------------------------------------------------------------

    fn on_listed(&mut self, us: u64, device: usize, conversation: &str, last: u64, read: u64, unread: u64) {
        let Some(index) = self.conversation(conversation) else { return };
        let Device { name, user, .. } = &self.devices[device];
        let (name, user) = (name.clone(), *user);
        if let Some(holding) = self.devices[device].conversations.get_mut(&index) {
            holding.is_listed = true;
        }
        let newest = self.messages.last(index);
        let position = self.users[user].read.get(&index).copied().unwrap_or(0);
        let unread_naive = self.messages.of_others(index, read, |device| self.devices[device].user == user);
        let what = if last != newest {
            format!("last_seq {last}; the newest number is {newest}")
        } else if read != position {
            format!("read_seq {read}; the user has read up to {position}")
        } else if unread != unread_naive {
            format!("unread {unread}; others sent {unread_naive} messages above number {read}")
        } else {
            return;
        };
        let text = format!("the list of {name} says of {conversation}: {what}");
        self.complain(Kind::Miscounted, us, Some(index), text);
    }

    fn on_reviewed(&mut self, us: u64, device: usize) {
        self.devices[device].is_reviewed = true;
        let holdings = self.devices[device].conversations.iter();
        let unlisted =
            holdings.filter(|(index, holding)| !holding.is_listed && self.messages.last(**index) > 0);
        for index in unlisted.map(|(index, _)| *index).collect::<Vec<_>>() {
            let (name, id) = (&self.devices[device].name, &self.conversations[index].id);
            let text = format!("the list of {name} does not have {id}");
            self.complain(Kind::Miscounted, us, Some(index), text);
        }
    }

    fn on_ledger(&mut self, us: u64, ledger: Ledger, at_rest: bool) {
        let Ledger { accepted, delivered, waiting, expired, dropped } = ledger;
        if accepted != delivered + waiting + expired + dropped {
            let text = format!(
                "the ledger does not balance: accepted {accepted}, but delivered {delivered} + waiting {waiting} + \
                 expired {expired} + dropped {dropped}"
            );
            return self.complain(Kind::Miscounted, us, None, text);
        }
        if !at_rest {
            return;
        }
        let recipients = |(index, conversation): (usize, &Conversation)| {
            self.messages.stored(index) * (conversation.members.len() as u64 - 1)
        };
        let expected: u64 = self.conversations.iter().enumerate().map(recipients).sum();
        if (accepted, delivered, waiting) != (expected, expected, 0) {
            let text = format!(
                "the ledger says accepted {accepted}, delivered {delivered}, waiting {waiting}; {expected} were sent \
                 to somebody, and all of them were received"
            );
            self.complain(Kind::Miscounted, us, None, text);
        }
    }
}

fn raise(positions: &mut HashMap<usize, u64>, key: usize, seq: u64) {
    let position = positions.entry(key).or_default();
    *position = seq.max(*position);
}
