//! The naive model: what is durable, kept the plainest way, and what must be true of it after every transaction.
//!
//! It sees each batch when it becomes durable, and counts everything anew from the messages themselves. It shares no
//! code with the core or the stores but the words of the seam.

use bowline_delivery::persist::{Batch, LedgerDelta, Member, Message, Write};
use bowline_protocol::{Body, ConversationId, DeviceId, MessageId, Millis, Seq, UserId};
use std::collections::{BTreeMap, BTreeSet};

/// A promise that was broken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// One of [`INVARIANTS`].
    pub invariant: &'static str,
    pub text: String,
}

/// Every invariant that is checked, with what it says.
pub const INVARIANTS: [(&str, &str); 15] = [
    ("durable", "what was acknowledged or shown is durable, as it was acknowledged, and stays"),
    ("numbers", "the numbers of a conversation are 1, 2, 3 …: no gap, none used twice, time never back"),
    ("once", "a message id of a user is one message"),
    (
        "order",
        "a connection sees the messages of a conversation in order, none twice unless marked redelivered",
    ),
    ("complete", "nothing is missing between the first and the newest message that a device has"),
    ("sender", "the sending device has the ack and not the push"),
    ("members", "who is no member sees nothing; members change only when somebody asked for it"),
    ("positions", "positions never move back, and never ahead of what the device said"),
    ("unread", "unread is the count of messages above the read position that others sent"),
    ("receipts", "a receipt leaves when the position is durable"),
    ("ledger", "accepted = delivered + waiting + expired, at every durable state"),
    ("identity", "a message is from who was bound to the connection that brought it"),
    ("outbox", "an event is kept for each message, in the message's own transaction"),
    ("answers", "every answer is to something that was asked, and says what is so"),
    ("liveness", "when the faults are over everybody is connected and has everything"),
];

pub type Checked = Result<(), Violation>;

pub fn broken<T>(invariant: &'static str, text: String) -> Result<T, Violation> {
    Err(Violation { invariant, text })
}

/// A message, and who may see it.
pub struct Kept {
    pub id: MessageId,
    pub from: UserId,
    pub device: Option<DeviceId>,
    pub ts: Millis,
    pub body: Body,
    /// Members when it was stored.
    pub audience: Vec<UserId>,
    /// Members who left or came back in the same transaction: they may see it, or not.
    pub doubtful: Vec<UserId>,
}

#[derive(Default)]
pub struct Conversation {
    pub messages: Vec<Kept>,
    pub members: BTreeMap<UserId, Member>,
    /// Where devices that were new began.
    starts: BTreeMap<(UserId, DeviceId), Seq>,
    /// The highest `first` that each user ever had here; kept when the user leaves.
    firsts: BTreeMap<UserId, Seq>,
    waiting: u64,
}

/// What devices have said, and what users and back ends have asked for; kept by whoever speaks for them.
#[derive(Default)]
pub struct Said {
    pub received: BTreeMap<(UserId, DeviceId, ConversationId), Seq>,
    pub read: BTreeMap<(UserId, ConversationId), Seq>,
    pub cleared: BTreeSet<(UserId, ConversationId)>,
    pub added: BTreeSet<(ConversationId, UserId)>,
    pub removed: BTreeSet<(ConversationId, UserId)>,
}

#[derive(Default)]
pub struct Model {
    pub conversations: BTreeMap<ConversationId, Conversation>,
    pub ids: BTreeMap<(UserId, MessageId), (ConversationId, Seq)>,
    pub devices: BTreeSet<(UserId, DeviceId)>,
    pub said: Said,
    /// An event is kept for each message.
    has_outbox: bool,
    ledger: LedgerDelta,
}

impl Conversation {
    pub fn last(&self) -> Seq {
        self.messages.len() as Seq
    }

    pub fn message(&self, seq: Seq) -> Option<&Kept> {
        self.messages.get(seq.checked_sub(1)? as usize)
    }

    /// Messages in `above < seq ≤ last` that others than `user` sent.
    pub fn others_in(&self, user: &UserId, above: Seq, last: Seq) -> u64 {
        let range = above.min(self.last()) as usize..last.min(self.last()) as usize;
        let count = |range: std::ops::Range<usize>| {
            self.messages[range].iter().filter(|kept| kept.from != *user).count() as u64
        };
        if range.start < range.end { count(range) } else { 0 }
    }

    /// Is this number nothing that the user should have been sent?
    pub fn is_not_for(&self, user: &UserId, seq: Seq) -> bool {
        let Some(kept) = self.message(seq) else { return false };
        !kept.audience.contains(user) || self.firsts.get(user).is_some_and(|first| seq < *first)
    }

    /// From `base` on, over what the device itself sent.
    pub fn over_own(&self, user: &UserId, device: &DeviceId, mut base: Seq) -> Seq {
        while self.message(base + 1).is_some_and(|m| m.from == *user && m.device.as_ref() == Some(device)) {
            base += 1;
        }
        base
    }

    pub fn start(&self, user: &UserId, device: &DeviceId) -> Option<Seq> {
        self.starts.get(&(user.clone(), device.clone())).copied()
    }

    pub fn was_member(&self, user: &UserId) -> bool {
        self.firsts.contains_key(user)
    }
}

impl Model {
    pub fn new(has_outbox: bool) -> Self {
        Self { has_outbox, ..Self::default() }
    }

    /// A batch became durable; of the owner of the conversations, or of one that was taken over.
    pub fn on_durable(&mut self, batch: &Batch, by_owner: bool) -> Checked {
        let mut touched: BTreeSet<&ConversationId> = BTreeSet::new();
        let mut stored: Vec<(&ConversationId, Seq)> = Vec::new();
        let mut members: BTreeMap<(&ConversationId, &UserId), Option<&Member>> = BTreeMap::new();
        let mut devices = Vec::new();
        for write in &batch.writes {
            match write {
                Write::CreateConversation { conversation, members: first, .. } => {
                    if self.conversations.contains_key(conversation) {
                        return broken("durable", format!("{conversation} was created a second time"));
                    }
                    self.conversations.insert(conversation.clone(), Conversation::default());
                    touched.insert(conversation);
                    members.extend(first.iter().map(|(user, member)| ((conversation, user), Some(member))));
                }
                Write::Message(message) => {
                    self.keep(message)?;
                    touched.insert(&message.conversation);
                    stored.push((&message.conversation, message.seq));
                }
                Write::PutMember { conversation, user, member } => {
                    touched.insert(conversation);
                    members.insert((conversation, user), Some(member));
                }
                Write::RemoveMember { conversation, user } => {
                    touched.insert(conversation);
                    members.insert((conversation, user), None);
                }
                Write::RenameConversation { .. } => {}
                Write::DeleteConversation { conversation } => {
                    return broken("durable", format!("{conversation} was deleted and nobody asked for it"));
                }
                Write::ExpireMessages { conversation, up_to, .. } => {
                    return broken(
                        "durable",
                        format!("{conversation} lost all up to {up_to}; all is kept here"),
                    );
                }
                Write::ForgetIds { before, .. } => {
                    return broken("once", format!("ids before {before} were forgotten; all are kept here"));
                }
                // Devices belong to no partition and are not fenced. What a router that was taken over still writes of
                // them its successor does not know: such a device is new when it comes to the successor.
                Write::PutDevice { .. } if !by_owner => {}
                Write::PutDevice { user, device, .. } => devices.push((user, device)),
                Write::ForgetDevice { user, device } => {
                    return broken("positions", format!("device {device} of {user} was forgotten"));
                }
            }
        }
        self.place(&stored, &members)?;
        for (&(id, user), &member) in &members {
            self.move_member(id, user, member)?;
        }
        for (user, device) in devices {
            self.meet_device(user, device);
        }
        self.balance(batch, &stored, &touched)?;
        let events = batch.outbox.iter().filter(|event| event.kind == "message.stored").count();
        if events != if self.has_outbox { stored.len() } else { 0 } {
            return broken("outbox", format!("{events} events for {} messages", stored.len()));
        }
        Ok(())
    }

    fn keep(&mut self, message: &Message) -> Checked {
        let Message { conversation: id, seq, id: message_id, from, device, ts, body, .. } = message;
        let Some(conversation) = self.conversations.get_mut(id) else {
            return broken("numbers", format!("{message_id} is stored in {id}, which does not exist"));
        };
        let (last, last_ts) = (conversation.last(), conversation.messages.last().map_or(0, |m| m.ts));
        if *seq != last + 1 {
            return broken(
                "numbers",
                format!("{message_id} in {id} has number {seq}; the newest was {last}"),
            );
        }
        if *ts < last_ts {
            return broken("numbers", format!("{id} {seq} is of {ts}, the one before of {last_ts}"));
        }
        if let Some((other, at)) = self.ids.get(&(from.clone(), message_id.clone())) {
            return broken("once", format!("{message_id} of {from} is {other} {at}, and now {id} {seq}"));
        }
        check_origin(message)?;
        self.ids.insert((from.clone(), message_id.clone()), (id.clone(), *seq));
        conversation.messages.push(Kept {
            id: message_id.clone(),
            from: from.clone(),
            device: device.clone(),
            ts: *ts,
            body: body.clone(),
            audience: Vec::new(),
            doubtful: Vec::new(),
        });
        Ok(())
    }

    /// Says who may see what was stored.
    fn place(
        &mut self,
        stored: &[(&ConversationId, Seq)],
        members: &BTreeMap<(&ConversationId, &UserId), Option<&Member>>,
    ) -> Checked {
        for &(id, seq) in stored {
            let Some(conversation) = self.conversations.get_mut(id) else { continue };
            let (mut audience, mut doubtful) = (Vec::new(), Vec::new());
            for (user, before) in &conversation.members {
                match members.get(&(id, user)) {
                    None => audience.push(user.clone()),
                    Some(Some(after)) if after.joined == before.joined => audience.push(user.clone()),
                    Some(Some(after)) if after.joined <= seq => audience.push(user.clone()),
                    Some(_) => doubtful.push(user.clone()),
                }
            }
            for ((_, user), after) in members.iter().filter(|((c, _), _)| *c == id) {
                if conversation.members.contains_key(*user) {
                    continue;
                }
                match after {
                    Some(after) if after.joined <= seq => audience.push((*user).clone()),
                    Some(_) => {}
                    None => doubtful.push((*user).clone()),
                }
            }
            let kept = &mut conversation.messages[seq as usize - 1];
            if !audience.contains(&kept.from) && !doubtful.contains(&kept.from) {
                return broken(
                    "members",
                    format!("{} is no member of {id} and has message {seq}", kept.from),
                );
            }
            (kept.audience, kept.doubtful) = (audience, doubtful);
        }
        Ok(())
    }

    fn move_member(&mut self, id: &ConversationId, user: &UserId, after: Option<&Member>) -> Checked {
        let said = &self.said;
        let Some(conversation) = self.conversations.get_mut(id) else {
            return broken("members", format!("a member of {id}, which does not exist"));
        };
        let before = conversation.members.get(user).cloned();
        let may_join = id.peers().is_some_and(|(a, b)| a == *user || b == *user)
            || said.added.contains(&(id.clone(), user.clone()));
        let Some(after) = after else {
            if before.is_some() && !said.removed.contains(&(id.clone(), user.clone())) {
                return broken("members", format!("{user} was removed from {id} and nobody asked for it"));
            }
            conversation.members.remove(user);
            if may_join {
                // It may have joined in the same transaction.
                conversation.firsts.entry(user.clone()).or_default();
            }
            return Ok(());
        };
        let before = before.filter(|before| before.joined == after.joined);
        match &before {
            None if !may_join => {
                return broken("members", format!("{user} is a member of {id} and nobody asked for it"));
            }
            None => {}
            Some(before) => {
                let back = after.first < before.first
                    || after.delivered < before.delivered
                    || after.read < before.read;
                if back {
                    return broken("positions", format!("{user} in {id}: {before:?} became {after:?}"));
                }
            }
        }
        let first = before.as_ref().map_or(after.joined, |before| before.first);
        if after.first != first && !said.cleared.contains(&(user.clone(), id.clone())) {
            return broken(
                "positions",
                format!("{user} begins at {} in {id} and cleared nothing", after.first),
            );
        }
        let last = conversation.last();
        let read_max = said.read.get(&(user.clone(), id.clone())).copied().unwrap_or(0).max(after.first - 1);
        if after.read > read_max || after.delivered > last {
            return broken(
                "positions",
                format!("{user} in {id} is at {after:?}, but has read up to {read_max}"),
            );
        }
        for (owner, device) in self.devices.iter().filter(|(owner, _)| owner == user) {
            let position = after.position(device);
            if let Some(before) = &before
                && position < before.position(device)
            {
                return broken("positions", format!("{user}/{device} in {id}: {before:?} became {after:?}"));
            }
            let key = (owner.clone(), device.clone());
            let heard = said.received.get(&(owner.clone(), device.clone(), id.clone())).copied();
            let start = conversation.starts.get(&key).copied().unwrap_or(0);
            let base = heard.unwrap_or(0).max(start).max(after.first - 1);
            let max = conversation.over_own(user, device, base);
            if position > max {
                let text =
                    format!("{user}/{device} is at {position} in {id}; it has no more than {max}: {after:?}");
                return broken("positions", text);
            }
        }
        let (waiting, unread) = (after.waiting(last), after.unread(last));
        let above = |position: Seq| conversation.others_in(user, position.max(after.joined - 1), last);
        if waiting != above(after.delivered) || unread != above(after.read) {
            let (naive_waiting, naive_unread) = (above(after.delivered), above(after.read));
            return broken(
                "unread",
                format!(
                    "{user} in {id}: {waiting} wait and {unread} are unread, by counting {naive_waiting} and \
                     {naive_unread}"
                ),
            );
        }
        let first = conversation.firsts.entry(user.clone()).or_default();
        *first = after.first.max(*first);
        conversation.members.insert(user.clone(), after.clone());
        Ok(())
    }

    /// A device became known: it begins where its user stands.
    fn meet_device(&mut self, user: &UserId, device: &DeviceId) {
        if !self.devices.insert((user.clone(), device.clone())) {
            return;
        }
        for conversation in self.conversations.values_mut() {
            if let Some(member) = conversation.members.get(user) {
                conversation.starts.insert((user.clone(), device.clone()), member.position(device));
            }
        }
    }

    fn balance(
        &mut self,
        batch: &Batch,
        stored: &[(&ConversationId, Seq)],
        touched: &BTreeSet<&ConversationId>,
    ) -> Checked {
        let (mut least, mut most) = (0, 0);
        for (id, seq) in stored {
            let Some(kept) = self.conversations.get(*id).and_then(|c| c.message(*seq)) else { continue };
            let others = |users: &[UserId]| users.iter().filter(|user| **user != kept.from).count() as u64;
            least += others(&kept.audience);
            most += others(&kept.audience) + others(&kept.doubtful);
        }
        let LedgerDelta { accepted, delivered, expired } = batch.ledger;
        if !(least..=most).contains(&accepted) {
            return broken("ledger", format!("{accepted} accepted, by counting {least} to {most}"));
        }
        for id in touched {
            let Some(conversation) = self.conversations.get_mut(*id) else { continue };
            let last = conversation.last();
            let waits = |(user, member): (&UserId, &Member)| {
                conversation.others_in(user, member.delivered.max(member.joined - 1), last)
            };
            conversation.waiting = conversation.members.iter().map(waits).sum();
        }
        self.ledger.accepted += accepted;
        self.ledger.delivered += delivered;
        self.ledger.expired += expired;
        let waiting: u64 = self.conversations.values().map(|c| c.waiting).sum();
        let LedgerDelta { accepted, delivered, expired } = self.ledger;
        if accepted != delivered + waiting + expired {
            let text =
                format!("{accepted} accepted, {delivered} delivered, {waiting} wait, {expired} expired");
            return broken("ledger", text);
        }
        Ok(())
    }
}

/// Ids are made as `user.device.number` (`user.api.number` for a back end): so each message says where it is from.
fn check_origin(message: &Message) -> Checked {
    let device = message.device.as_ref().map_or("api", |device| device.as_str());
    let origin = format!("{}.{device}.", message.from);
    if !message.id.starts_with(&origin) {
        let text = format!("{} was stored as a message of {}/{device}", message.id, message.from);
        return broken("identity", text);
    }
    Ok(())
}
