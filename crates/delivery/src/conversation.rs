//! A conversation in memory: what is committed of it, and how positions move.

use crate::{limits, persist::ConversationState};
use bowline_protocol::{
    Body, ConversationId, DeviceId, MessageId, Millis, Seq, UserId,
    frame::{ReceiptKind, Role},
};
use std::collections::{HashMap, VecDeque};

pub use crate::persist::Member;

/// The committed state, as far as something is decided by it; the name of a group is the store's. What a transaction
/// in flight will change stands in its `Staged`.
#[derive(Debug)]
pub(crate) struct Conversation {
    /// A direct conversation exists from its first message on; before, it has its two members all the same.
    pub exists: bool,
    pub last: Seq,
    pub last_ts: Millis,
    /// Up to here the messages are gone; the members are lifted to it.
    pub floor: Seq,
    pub members: HashMap<UserId, Member, ahash::RandomState>,
    pub tail: Tail,
    /// How many members have the message that receipts counted last: delivered, read.
    there: [Option<There>; 2],
    /// Entries in the queue or in flight; such a conversation stays in memory.
    pub pending: u32,
    pub touched: Millis,
}

impl Conversation {
    pub fn load(state: ConversationState, hasher: ahash::RandomState, now: Millis) -> Self {
        let mut members = HashMap::with_hasher(hasher);
        members.extend(state.members);
        let mut tail = Tail::new(state.last);
        for message in state.tail {
            tail.push_front_of_load(
                message.seq,
                TailEntry {
                    from: message.from,
                    device: message.device,
                    content: Some(Box::new(Content { id: message.id, ts: message.ts, body: message.body })),
                },
            );
        }
        Self {
            exists: true,
            last: state.last,
            last_ts: state.last_ts,
            floor: state.floor,
            members,
            tail,
            there: [None, None],
            pending: 0,
            touched: now,
        }
    }

    /// One that is about to be created.
    pub fn empty(hasher: ahash::RandomState, now: Millis) -> Self {
        Self {
            exists: false,
            last: 0,
            last_ts: 0,
            floor: 0,
            members: HashMap::with_hasher(hasher),
            tail: Tail::new(0),
            there: [None, None],
            pending: 0,
            touched: now,
        }
    }

    /// A direct conversation that nobody has written to.
    pub fn unwritten(a: UserId, b: UserId, hasher: ahash::RandomState, now: Millis) -> Self {
        let mut conversation = Self::empty(hasher, now);
        conversation.members.insert(a, new_member(Role::Member, 1));
        conversation.members.insert(b, new_member(Role::Member, 1));
        conversation
    }
}

/// Members that have a message, so that not all of them are asked for each receipt.
#[derive(Debug)]
struct There {
    seq: Seq,
    /// Whoever sent it has it, and is no recipient.
    sender: Option<UserId>,
    count: u32,
}

impl There {
    fn new(conversation: &Conversation, kind: usize, seq: Seq) -> Self {
        let sender = conversation.tail.entry(seq).map(|entry| entry.from.clone());
        let mut there = Self { seq, sender, count: 0 };
        let counts = |(user, member): &(&UserId, &Member)| there.counts(kind, user, member);
        there.count = conversation.members.iter().filter(counts).count() as u32;
        there
    }

    fn counts(&self, kind: usize, user: &UserId, member: &Member) -> bool {
        [member.delivered, member.read][kind] >= self.seq && self.sender.as_ref() != Some(user)
    }
}

impl Conversation {
    /// Puts or removes a member.
    pub fn put_member(&mut self, user: UserId, member: Option<Member>) {
        let before = self.members.get(&user);
        for (kind, there) in self.there.iter_mut().enumerate() {
            let Some(there) = there else { continue };
            let counts = |member: Option<&Member>| member.is_some_and(|m| there.counts(kind, &user, m));
            let (was, is) = (counts(before), counts(member.as_ref()));
            there.count = there.count + u32::from(is) - u32::from(was);
        }
        match member {
            Some(member) => self.members.insert(user, member),
            None => self.members.remove(&user),
        };
    }

    /// The messages up to `floor` are gone.
    pub fn lift(&mut self, floor: Seq) {
        self.floor = floor;
        self.members.values_mut().for_each(|member| member.lift(floor));
        self.there = [None, None];
    }

    /// How many members, its sender aside, have this message, or have read it. From now on the number is kept up to
    /// date, until another one is asked for.
    pub fn count_there(&mut self, kind: ReceiptKind, seq: Seq) -> u32 {
        let kind = usize::from(kind == ReceiptKind::Read);
        if let Some(there) = self.there[kind].as_ref().filter(|there| there.seq == seq) {
            return there.count;
        }
        let there = There::new(self, kind, seq);
        self.there[kind].insert(there).count
    }

    /// The same, and nothing is kept.
    pub fn count_once(&self, kind: ReceiptKind, seq: Seq) -> u32 {
        There::new(self, usize::from(kind == ReceiptKind::Read), seq).count
    }
}

/// Someone who joins where the next message will be number `next`.
pub(crate) fn new_member(role: Role, next: Seq) -> Member {
    Member {
        role,
        joined: next,
        first: next,
        delivered: next - 1,
        read: next - 1,
        own_above_delivered: 0,
        own_above_read: 0,
        lagging: Vec::new(),
    }
}

/// Who sent a message. There are hundreds of them for each busy conversation.
#[derive(Debug)]
pub(crate) struct TailEntry {
    pub from: UserId,
    pub device: Option<DeviceId>,
    /// What is needed for another push: of the newest messages only.
    pub content: Option<Box<Content>>,
}

#[derive(Debug)]
pub(crate) struct Content {
    pub id: MessageId,
    pub ts: Millis,
    pub body: Body,
}

const _: () = assert!(size_of::<TailEntry>() <= 40);

/// The newest messages, without gaps up to the last.
#[derive(Debug)]
pub(crate) struct Tail {
    entries: VecDeque<TailEntry>,
    last: Seq,
    /// The newest so many have bodies, of so many bytes.
    bodies: usize,
    body_bytes: usize,
}

impl Tail {
    pub fn new(last: Seq) -> Self {
        Self { entries: VecDeque::new(), last, bodies: 0, body_bytes: 0 }
    }

    /// The number of the oldest entry; one above the last when there is none.
    pub fn first(&self) -> Seq {
        self.last + 1 - self.entries.len() as u64
    }

    fn push_front_of_load(&mut self, seq: Seq, entry: TailEntry) {
        // Loaded ascending: the entries end at `last` once all are in.
        debug_assert!(seq <= self.last);
        self.append(entry);
    }

    pub fn push(&mut self, seq: Seq, entry: TailEntry) {
        debug_assert_eq!(seq, self.last + 1);
        self.last = seq;
        self.append(entry);
    }

    fn append(&mut self, entry: TailEntry) {
        self.body_bytes += entry.content.as_ref().map_or(0, |content| content.body.bytes().len());
        self.bodies += 1;
        // Before there is one too many, for which the room would be doubled.
        if self.entries.len() == limits::TAIL_ENTRIES_MAX {
            self.entries.pop_front();
        }
        self.entries.push_back(entry);
        while self.bodies > limits::TAIL_BODIES_MAX
            || (self.bodies > 1 && self.body_bytes > limits::TAIL_BODY_BYTES_MAX)
        {
            let index = self.entries.len() - self.bodies;
            if let Some(content) = self.entries[index].content.take() {
                self.body_bytes -= content.body.bytes().len();
            }
            self.bodies -= 1;
        }
    }

    /// The entry of a number, when it is remembered.
    pub fn entry(&self, seq: Seq) -> Option<&TailEntry> {
        let first = self.first();
        (first..=self.last).contains(&seq).then(|| &self.entries[(seq - first) as usize])
    }

    /// Who sent what in `from..=to`: how many are `user`'s, and the others, each once. `None` when the tail does
    /// not reach back so far.
    pub fn senders(&self, user: &UserId, from: Seq, to: Seq) -> Option<Senders> {
        if from > to {
            return Some(Senders::default());
        }
        let mut senders = Senders::default();
        for seq in from..=to {
            let entry = self.entry(seq)?;
            if entry.from == *user {
                senders.own += 1;
            } else if !senders.others.contains(&entry.from) {
                senders.others.push(entry.from.clone());
            }
        }
        Some(senders)
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Senders {
    pub own: u64,
    pub others: Vec<UserId>,
}

impl Member {
    /// Moves one device up to `to`; `own` of the messages between the user's delivered position and `to` are the
    /// user's own. `known` are all devices of the user.
    pub(crate) fn move_device(&mut self, device: &DeviceId, to: Seq, own: u64, known: &[DeviceId]) {
        if to <= self.position(device) {
            return;
        }
        if to <= self.delivered {
            self.lagging.retain(|(d, _)| d != device);
            if to < self.delivered {
                self.lagging.push((device.clone(), to));
            }
            return;
        }
        for other in known.iter().filter(|d| *d != device) {
            if !self.lagging.iter().any(|(d, _)| d == other) {
                self.lagging.push((other.clone(), self.delivered));
            }
        }
        self.lagging.retain(|(d, _)| d != device);
        self.own_above_delivered = self.own_above_delivered.saturating_sub(own);
        self.delivered = to;
    }

    /// Moves the read position forward; `own` of the messages between are the user's own.
    pub(crate) fn move_read(&mut self, to: Seq, own: u64) {
        self.own_above_read = self.own_above_read.saturating_sub(own);
        self.read = to;
    }

    /// The user sent message `seq`, the newest, from `device`.
    pub(crate) fn on_own_message(&mut self, seq: Seq, device: Option<&DeviceId>, known: Option<&[DeviceId]>) {
        self.own_above_delivered += 1;
        self.own_above_read += 1;
        if let (Some(device), Some(known)) = (device, known)
            && self.position(device) + 1 == seq
        {
            self.move_device(device, seq, 1, known);
        }
    }

    /// Everything up to `last` is hidden, and counts as delivered and read.
    pub(crate) fn clear(&mut self, last: Seq) {
        self.first = last + 1;
        (self.delivered, self.read) = (last, last);
        (self.own_above_delivered, self.own_above_read) = (0, 0);
        self.lagging.clear();
    }
}

/// The conversation a client names, if it is one that this user could belong to.
pub(crate) fn named_by(user: &UserId, text: &str) -> Option<ConversationId> {
    let id = ConversationId::parse(text).ok()?;
    match id.peers() {
        Some((a, b)) if a != *user && b != *user => None,
        _ => Some(id),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(name: &str) -> DeviceId {
        DeviceId::trusted(name)
    }

    #[test]
    fn a_device_that_moves_ahead_leaves_the_others_where_they_were() {
        let known = [device("x"), device("y")];
        let mut member = new_member(Role::Member, 1);
        member.move_device(&known[0], 5, 0, &known);
        assert_eq!((member.delivered, member.position(&known[0]), member.position(&known[1])), (5, 5, 0));
        member.move_device(&known[1], 3, 0, &known);
        assert_eq!((member.delivered, member.position(&known[1])), (5, 3));
        member.move_device(&known[1], 2, 0, &known);
        assert_eq!(member.position(&known[1]), 3, "positions never move back");
        member.move_device(&known[1], 7, 0, &known);
        assert_eq!((member.delivered, member.position(&known[0]), member.position(&known[1])), (7, 5, 7));
        assert_eq!(member.position(&device("new")), 7, "a new device starts at the delivered position");
        member.move_device(&known[0], 7, 0, &known);
        assert_eq!(member.lagging, [], "nobody is behind any more");
    }

    #[test]
    fn own_messages_are_neither_unread_nor_waiting() {
        let known = [device("x")];
        let mut member = new_member(Role::Member, 1);
        member.on_own_message(1, Some(&known[0]), Some(&known));
        assert_eq!((member.delivered, member.read, member.waiting(1), member.unread(1)), (1, 0, 0, 0));
        // Another's message 2, then an own 3: nothing moves past what has not arrived.
        member.on_own_message(3, Some(&known[0]), Some(&known));
        assert_eq!((member.delivered, member.waiting(3), member.unread(3)), (1, 1, 1));
        member.move_device(&known[0], 3, 1, &known);
        member.move_read(3, 2);
        assert_eq!((member.waiting(3), member.unread(3)), (0, 0));
    }

    #[test]
    fn the_tail_counts_what_it_remembers() {
        let (a, b) = (UserId::trusted("a"), UserId::trusted("b"));
        let mut tail = Tail::new(10);
        for (seq, from) in [(11, &a), (12, &b), (13, &a)] {
            tail.push(seq, TailEntry { from: from.clone(), device: None, content: None });
        }
        assert_eq!(tail.first(), 11);
        assert_eq!(tail.senders(&a, 11, 13), Some(Senders { own: 2, others: vec![b.clone()] }));
        assert_eq!(tail.senders(&a, 10, 13), None);
        assert_eq!(tail.senders(&a, 14, 13), Some(Senders::default()));
        assert_eq!(tail.senders(&b, 11, 13), Some(Senders { own: 1, others: vec![a.clone()] }), "each once");
        assert_eq!(tail.senders(&a, 12, 12), Some(Senders { own: 0, others: vec![b.clone()] }));
        assert_eq!(tail.senders(&a, 13, 14), None, "nobody has sent 14 yet");
        let known = |seq| tail.entry(seq).map(|entry| entry.from.as_str());
        assert_eq!([10, 11, 12, 13, 14].map(known), [None, Some("a"), Some("b"), Some("a"), None]);
    }

    fn entry(body_bytes: usize) -> TailEntry {
        let body = Body::Json(vec![b'1'; body_bytes].into());
        let content = Some(Box::new(Content { id: MessageId::trusted("m"), ts: 0, body }));
        TailEntry { from: UserId::trusted("a"), device: None, content }
    }

    /// How many of the newest messages have their bodies still.
    fn bodies(tail: &Tail) -> usize {
        let count = tail.entries.iter().rev().take_while(|entry| entry.content.is_some()).count();
        assert!(tail.entries.iter().rev().skip(count).all(|entry| entry.content.is_none()));
        let bytes =
            tail.entries.iter().filter_map(|entry| entry.content.as_ref()).map(|c| c.body.bytes().len());
        assert_eq!((tail.bodies, tail.body_bytes), (count, bytes.sum()));
        count
    }

    #[test]
    fn the_tail_is_bounded_in_messages_in_bodies_and_in_their_bytes() {
        let mut tail = Tail::new(0);
        for seq in 1..=limits::TAIL_ENTRIES_MAX as u64 + 1 {
            tail.push(seq, entry(1));
            let count = (seq as usize).min(limits::TAIL_ENTRIES_MAX);
            assert_eq!((tail.entries.len(), tail.first()), (count, seq + 1 - count as u64));
            assert_eq!(bodies(&tail), count.min(limits::TAIL_BODIES_MAX));
        }
        let mut tail = Tail::new(0);
        let part = 16 * 1024;
        for seq in 1..=4 {
            tail.push(seq, entry(part));
        }
        assert_eq!(bodies(&tail), 4, "64 KiB are kept");
        tail.push(5, entry(1));
        assert_eq!(bodies(&tail), 4, "and no byte more");
        tail.push(6, entry(part * 5));
        assert_eq!(bodies(&tail), 1, "the newest is kept whatever its size");
        assert_eq!(tail.first(), 1, "who sent what is known of all");
    }

    #[test]
    fn a_count_of_those_who_have_a_message_follows_who_comes_moves_and_goes() {
        let hasher = ahash::RandomState::with_seeds(1, 2, 3, 4);
        let user = |n: u64| UserId::trusted(&format!("u{n}"));
        let mut conversation = Conversation::empty(hasher, 0);
        conversation.last = 5;
        conversation.tail = Tail::new(4);
        conversation.tail.push(5, TailEntry { from: user(0), ..entry(1) });
        let at = |delivered, read| Member { delivered, read, ..new_member(Role::Member, 1) };
        for (n, member) in [(0, at(5, 5)), (1, at(5, 4)), (2, at(5, 5)), (3, at(4, 0))] {
            conversation.put_member(user(n), Some(member));
        }
        let counts = |conversation: &mut Conversation| {
            let found =
                [ReceiptKind::Delivered, ReceiptKind::Read].map(|kind| conversation.count_there(kind, 5));
            // The same, counted anew.
            conversation.there = [None, None];
            let anew =
                [ReceiptKind::Delivered, ReceiptKind::Read].map(|kind| conversation.count_there(kind, 5));
            assert_eq!(found, anew);
            found
        };
        assert_eq!(counts(&mut conversation), [2, 1], "its sender is no recipient");
        conversation.put_member(user(3), Some(at(5, 5)));
        assert_eq!(counts(&mut conversation), [3, 2]);
        conversation.put_member(user(1), Some(at(5, 5)));
        conversation.put_member(user(0), None);
        assert_eq!(counts(&mut conversation), [3, 3]);
        conversation.put_member(user(2), None);
        conversation.put_member(user(4), Some(at(4, 0)));
        assert_eq!(counts(&mut conversation), [2, 2]);
        assert_eq!(conversation.count_there(ReceiptKind::Delivered, 4), 3, "another message, another count");
        conversation.lift(5);
        assert_eq!(counts(&mut conversation), [3, 3], "who is lifted lacks nothing");
    }

    #[test]
    fn clearing_leaves_nothing_to_wait_for_and_nothing_unread() {
        let known = [device("x"), device("y")];
        let mut member = new_member(Role::Member, 3);
        assert_eq!((member.joined, member.first, member.delivered, member.read), (3, 3, 2, 2));
        member.on_own_message(4, None, None);
        member.move_device(&known[0], 3, 0, &known);
        member.clear(7);
        assert_eq!((member.first, member.joined, member.waiting(7), member.unread(7)), (8, 3, 0, 0));
        assert_eq!((member.position(&known[1]), member.waiting(8), member.unread(8)), (7, 1, 1));
    }

    #[test]
    fn a_user_names_only_what_could_be_theirs() {
        let a = UserId::trusted("a");
        for (text, is_theirs) in [
            ("d:a:b", true),
            ("d:b:a", false),
            ("d:b:c", false),
            ("g:t", true),
            ("x", false),
            ("d:a:a", true),
        ] {
            assert_eq!(named_by(&a, text).is_some(), is_theirs, "{text}");
        }
        assert_eq!(named_by(&UserId::trusted("b"), "d:a:b").as_deref(), Some("d:a:b"));
    }
}
