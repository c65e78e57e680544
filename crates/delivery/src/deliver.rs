//! From a message that is durable to the devices of every member: pushes, repeats, receipts.

use crate::{
    Core, Now, Slot,
    batch::{Incoming, Moved},
    conversation::Content,
    flight::Flight,
    limits,
    persist::{Message, Query},
    reads::ReadPurpose,
    timers::Timer,
    users::{ConnKey, Held},
};
use bowline_protocol::{
    Body, ConversationId, DeviceId, Frame, MessageId, Millis, Seq, ServerFrame, UserId,
    frame::{ReceiptKind, encode_push},
};
use indexmap::IndexSet;

/// A message that has just become durable.
pub(crate) struct Stored<'a> {
    pub incoming: &'a Incoming,
    pub seq: Seq,
    pub ts: Millis,
}

/// Members of a large group that reached a number with one transaction, and whom that concerns.
struct Counted {
    conversation: ConversationId,
    kind: ReceiptKind,
    seq: Seq,
    senders: Vec<UserId>,
}

impl Counted {
    fn key(&self) -> (&ConversationId, bool, Seq) {
        (&self.conversation, self.kind == ReceiptKind::Read, self.seq)
    }
}

/// A range of messages on its way to a device once more.
#[derive(Debug, Clone)]
pub(crate) struct Repeat {
    pub user: UserId,
    pub device: DeviceId,
    pub conversation: ConversationId,
    pub from: Seq,
    pub to: Seq,
}

impl Core {
    /// Pushes to every device of every member; the sending connection has the ack instead.
    pub(crate) fn push(&mut self, stored: Stored<'_>, now: Now) {
        let Stored { incoming, seq, ts } = stored;
        let id = &incoming.conversation;
        let Some(Slot::Ready(conversation)) = self.conversations.get(id) else { return };
        let sender_conn = match incoming.asker.origin {
            crate::Origin::Conn { key, .. } => Some(key),
            crate::Origin::Api { .. } => None,
        };
        let mut frame: Option<Frame> = None;
        let mut keys: Vec<ConnKey> = Vec::new();
        let (timeout, mut armed) = (self.config.ack_timeout_ms, Vec::new());
        // Whichever are fewer, members or connected users, are looked up among the others. Whoever joined, or cleared,
        // behind it in the same transaction does not see it.
        let (members, users) = (&conversation.members, &self.users);
        let online: Vec<usize> = if users.len() < members.len() {
            let sees = |(_, user): &(usize, &UserId)| members.get(*user).is_some_and(|m| m.first <= seq);
            users.keys().enumerate().filter(sees).map(|(index, _)| index).collect()
        } else {
            let seeing = members.iter().filter(|(_, member)| member.first <= seq);
            seeing.filter_map(|(user, _)| users.get_index_of(user)).collect()
        };
        for index in online {
            let Some((user_id, user)) = self.users.get_index_mut(index) else { continue };
            for device in &mut user.devices {
                let own = incoming.user == *user_id && incoming.device.as_ref() == Some(&device.id);
                let mut is_pushed = false;
                for key in device.conns.iter().filter(|k| !own || Some(**k) != sender_conn) {
                    let frame = frame.get_or_insert_with(|| {
                        encode_push(id, seq, &incoming.id, &incoming.user, ts, false, &incoming.body)
                    });
                    let Some(conn) = self.conns.get_mut(key) else { continue };
                    match &mut conn.sync {
                        Some(sync) if !sync.overflowed && sync.held.len() < limits::HELD_PUSHES_MAX => {
                            let (conversation, frame) = (id.clone(), frame.clone());
                            sync.held.push(Held { conversation, seq, own: incoming.user == *user_id, frame });
                        }
                        Some(sync) => sync.overflowed = true,
                        None => {
                            keys.push(*key);
                            is_pushed = true;
                        }
                    }
                }
                if is_pushed && !own {
                    let flight = device.flight(id);
                    flight.on_pushed(seq, now.mono);
                    if flight.arm(now.mono + timeout) {
                        armed.push((user_id.clone(), device.id.clone()));
                    }
                }
            }
        }
        for (user, device) in armed {
            let timer = Timer::Flight { user, device, conversation: id.clone() };
            self.timers.arm(now.mono + timeout, timer);
        }
        self.counters.pushes += keys.len() as u64;
        if let Some(frame) = frame {
            self.broadcast(&keys, &frame);
        }
    }

    /// A device says what it has: its repeats end there.
    pub(crate) fn on_device_has(
        &mut self,
        user: &UserId,
        device: &DeviceId,
        conversation: &ConversationId,
        seq: Seq,
        now: Now,
    ) {
        let Some(device) = self.users.get_mut(user).and_then(|u| u.device_mut(device)) else { return };
        device.announced.retain(|(c, last)| c != conversation || *last > seq);
        if let Some(flight) = device.flights.iter_mut().find(|f| f.conversation == *conversation) {
            flight.on_received(seq, now.mono);
        }
    }

    pub(crate) fn on_flight_timer(
        &mut self,
        user_id: UserId,
        device_id: DeviceId,
        conversation: ConversationId,
        at: Millis,
        now: Now,
    ) {
        let (timeout, repeats_max) = (self.config.ack_timeout_ms, self.config.max_redeliveries);
        let Some(user) = self.users.get_mut(&user_id) else { return };
        let Some(device) = user.device_mut(&device_id) else { return };
        let congested = device.conns.iter().any(|k| self.conns.get(k).is_some_and(|c| c.congested));
        let Some(index) = device.flights.iter().position(|f| f.conversation == conversation) else { return };
        let floor = match self.conversations.get(&conversation) {
            Some(Slot::Ready(conversation)) => conversation.floor,
            _ => 0,
        };
        // Above an announced gap nothing is repeated, and no attempt is used up: the device fetches what lies below, and
        // that is progress. A gap that retention has taken is none.
        let above_gap = device.is_announced_above(&conversation, floor);
        let flight = &mut device.flights[index];
        if !flight.take_timer(at) {
            return;
        }
        flight.drop_up_to(floor);
        if congested || above_gap {
            flight.restart(now.mono);
        }
        let due = flight.take_due(now.mono, timeout, repeats_max);
        let Some(next) = flight.due(timeout) else {
            device.flights.swap_remove(index);
            return;
        };
        flight.arm(next);
        let (user, device) = (user_id.clone(), device_id.clone());
        self.timers.arm(next, Timer::Flight { user, device, conversation: conversation.clone() });
        for range in due {
            let (user, device) = (user_id.clone(), device_id.clone());
            let (conversation, from, to) = (conversation.clone(), range.from, range.to);
            self.repeat(Repeat { user, device, conversation, from, to });
        }
    }

    /// Pushes a range again: from memory when all of it is there, else from the store.
    pub(crate) fn repeat(&mut self, repeat: Repeat) {
        let Some(Slot::Ready(conversation)) = self.conversations.get(&repeat.conversation) else {
            return self.read_repeat(repeat);
        };
        let mut frames = Vec::new();
        for seq in repeat.from..=repeat.to {
            match conversation.tail.entry(seq) {
                Some(entry) if entry.from == repeat.user && entry.device.as_ref() == Some(&repeat.device) => {
                }
                Some(entry) => match entry.content.as_deref() {
                    Some(Content { id, ts, body }) => {
                        frames.push((seq, again(&repeat, seq, id, &entry.from, *ts, body)));
                    }
                    None => return self.read_repeat(repeat),
                },
                None => return self.read_repeat(repeat),
            }
        }
        self.push_again(&repeat, frames);
    }

    fn read_repeat(&mut self, repeat: Repeat) {
        let query = Query::Messages {
            conversation: repeat.conversation.clone(),
            from: repeat.from,
            to: repeat.to,
            limit: limits::REDELIVERY_PAGE,
            bytes_max: limits::TAIL_BODY_BYTES_MAX as u64,
            newest: false,
        };
        self.read(query, ReadPurpose::Repeat(repeat));
    }

    /// The store gave the first messages of a range; the rest is asked for when there is one.
    pub(crate) fn on_repeat_found(&mut self, mut repeat: Repeat, messages: Vec<Message>) {
        let Some(last) = messages.last().map(|m| m.seq) else { return };
        let own = |m: &Message| m.from == repeat.user && m.device.as_ref() == Some(&repeat.device);
        let frames = messages
            .iter()
            .filter(|m| !own(m))
            .map(|m| (m.seq, again(&repeat, m.seq, &m.id, &m.from, m.ts, &m.body)));
        let frames = frames.collect();
        self.push_again(&repeat, frames);
        if last < repeat.to
            && self.users.get(&repeat.user).is_some_and(|u| u.device(&repeat.device).is_some())
        {
            repeat.from = last + 1;
            self.read_repeat(repeat);
        }
    }

    fn push_again(&mut self, repeat: &Repeat, frames: Vec<(Seq, Frame)>) {
        // Removed, or cleared, or received meanwhile, all of it or its beginning: then it is not wanted any more.
        let Some(device) = self.users.get(&repeat.user).and_then(|u| u.device(&repeat.device)) else {
            return;
        };
        let flight = device.flights.iter().find(|f| f.conversation == repeat.conversation);
        let Some(first) = flight.and_then(Flight::first) else { return };
        // A connection that was not told yet what waits hears of it by that.
        let is_synced = |key: &ConnKey| self.conns.get(key).is_some_and(|conn| conn.sync.is_none());
        let keys: Vec<ConnKey> = device.conns.iter().copied().filter(is_synced).collect();
        for (_, frame) in frames.into_iter().filter(|(seq, _)| *seq >= first) {
            self.counters.redeliveries += 1;
            self.broadcast(&keys, &frame);
        }
    }

    pub(crate) fn forget_flights(&mut self, user: &UserId, conversation: &ConversationId) {
        for device in self.users.get_mut(user).into_iter().flat_map(|u| &mut u.devices) {
            device.flights.retain(|f| f.conversation != *conversation);
            device.announced.retain(|(c, _)| c != conversation);
        }
    }

    /// Receipts for positions that are durable now: to the senders of what they cover, and of reading also to
    /// the reader's other devices.
    pub(crate) fn send_receipts(&mut self, moved: Vec<Moved>, now: Now) {
        let mut counted = Vec::new();
        for Moved { conversation: id, user, device, delivered, read } in moved {
            let Some(Slot::Ready(conversation)) = self.conversations.get(&id) else { continue };
            let is_named = conversation.members.len() <= limits::NAMED_RECEIPTS_MEMBERS_MAX;
            // Whoever left is told nothing more, and who came back nothing of what it cannot see.
            let sees = |user: &UserId, seq| conversation.members.get(user).is_some_and(|m| m.first <= seq);
            let [delivered, read] = [delivered, read].map(|moved| {
                moved.map(|(seq, mut senders)| {
                    senders.retain(|sender| sees(sender, seq));
                    (seq, senders)
                })
            });
            for (kind, moved) in [(ReceiptKind::Delivered, delivered), (ReceiptKind::Read, read)] {
                let Some((seq, senders)) = moved else { continue };
                let mut keys = Vec::new();
                if kind == ReceiptKind::Read {
                    let devices = self.users.get(&user).map_or(&[][..], |u| &u.devices[..]);
                    keys.extend(
                        devices.iter().filter(|d| d.id != device).flat_map(|d| d.conns.iter().copied()),
                    );
                }
                if is_named {
                    keys.extend(self.conns_of(&senders));
                } else {
                    counted.push(Counted { conversation: id.clone(), kind, seq, senders });
                }
                self.send_receipt(&keys, &id, (kind, seq), Some(&user), None, now);
            }
        }
        self.send_counted(counted, now);
    }

    /// One receipt for each number that members reached, the newest last; of very many numbers, for the newest.
    fn send_counted(&mut self, mut counted: Vec<Counted>, now: Now) {
        counted.sort_by(|a, b| a.key().cmp(&b.key()));
        let levels: Vec<&[Counted]> = counted.chunk_by(|a, b| a.key() == b.key()).collect();
        for (index, level) in levels.iter().enumerate() {
            let Counted { conversation: id, kind, seq, .. } = &level[0];
            let has_same = |above: usize| {
                levels.get(index + above).is_some_and(|l| (&l[0].conversation, l[0].kind) == (id, *kind))
            };
            if has_same(limits::COUNTED_RECEIPTS_MAX) {
                continue;
            }
            let senders: IndexSet<&UserId> = level.iter().flat_map(|counted| &counted.senders).collect();
            let keys = self.conns_of(senders);
            let Some(Slot::Ready(conversation)) = self.conversations.get_mut(id) else { continue };
            if !keys.is_empty() {
                let count = match has_same(1) {
                    true => conversation.count_once(*kind, *seq),
                    false => conversation.count_there(*kind, *seq),
                };
                self.send_receipt(&keys, id, (*kind, *seq), None, Some(count), now);
            }
        }
    }

    fn send_receipt(
        &mut self,
        keys: &[ConnKey],
        conversation_id: &ConversationId,
        (kind, seq): (ReceiptKind, Seq),
        user_id: Option<&UserId>,
        count: Option<u32>,
        now: Now,
    ) {
        if keys.is_empty() {
            return;
        }
        let frame = ServerFrame::MsgReceipt {
            conversation_id,
            seq,
            user_id: user_id.map(|u| &**u),
            count,
            kind,
            ts: now.wall,
        }
        .encode();
        self.counters.receipts += keys.len() as u64;
        self.broadcast(keys, &frame);
    }

    fn conns_of<'a>(&self, users: impl IntoIterator<Item = &'a UserId>) -> Vec<ConnKey> {
        let devices = users.into_iter().filter_map(|u| self.users.get(u)).flat_map(|u| &u.devices);
        devices.flat_map(|d| d.conns.iter().copied()).collect()
    }
}

fn again(repeat: &Repeat, seq: Seq, id: &MessageId, from: &UserId, ts: Millis, body: &Body) -> Frame {
    encode_push(&repeat.conversation, seq, id, from, ts, true, body)
}
