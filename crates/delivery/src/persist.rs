//! What the core asks of a store, and what a store answers. The words of the seam; `crates/store` carries them out.
//!
//! One [`Batch`] is one transaction. The core proposes numbers; the transaction enforces them: a sequence number
//! or a (sender, id) that is taken, or an owner epoch that is stale, refuses the batch whole, and nothing of it
//! is stored.

use bowline_protocol::{
    Body, ConversationId, DeviceId, MessageId, Millis, Seq, UserId, frame::Role, ids::DeviceClass,
};
use bytes::Bytes;
use std::sync::Arc;

/// Conversations are dealt out to owners by partition; see [`partition_of`].
pub const PARTITION_COUNT: u16 = 12;

/// The partition of a conversation.
pub fn partition_of(conversation: &ConversationId) -> u16 {
    (xxhash_rust::xxh3::xxh3_64(conversation.as_bytes()) % u64::from(PARTITION_COUNT)) as u16
}

/// The owner epoch under which a batch writes to a partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fence {
    pub partition: u16,
    pub epoch: u64,
}

/// One transaction: durable when the store has answered [`Outcome::Committed`]. Writes are carried out in order.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Batch {
    /// Each partition written to, with the epoch that the core holds; another epoch in the store is
    /// [`Outcome::Stale`].
    pub fences: Vec<Fence>,
    pub writes: Vec<Write>,
    pub ledger: LedgerDelta,
    /// Events for the application, kept until they are taken.
    pub outbox: Vec<OutboxEvent>,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Write {
    /// A conversation with its first members. One that exists is [`Refused::ConversationExists`].
    CreateConversation {
        conversation: ConversationId,
        name: Option<String>,
        meta: Option<Bytes>,
        at: Millis,
        members: Vec<(UserId, Member)>,
    },
    /// One message with the number that it is to have.
    Message(Message),
    /// The whole state of one member; inserted or replaced.
    PutMember {
        conversation: ConversationId,
        user: UserId,
        member: Member,
    },
    RemoveMember {
        conversation: ConversationId,
        user: UserId,
    },
    /// `None` leaves a value as it is.
    RenameConversation {
        conversation: ConversationId,
        name: Option<String>,
        meta: Option<Bytes>,
    },
    /// The conversation, its members and its messages.
    DeleteConversation {
        conversation: ConversationId,
    },
    /// Inserted, or class and `last_seen` replaced.
    PutDevice {
        user: UserId,
        device: DeviceId,
        class: Option<DeviceClass>,
        last_seen: Millis,
    },
    /// The device; its places in [`Member::lagging`] are taken out as well.
    ForgetDevice {
        user: UserId,
        device: DeviceId,
    },
    /// Retention takes the messages up to this number: the conversation's floor. Every member is [lifted] to it; the
    /// own messages among them are taken off the senders' rows by writes of their own. The ids of those that were
    /// stored at `ids_from` or later go on refusing a repeat, until [`Write::ForgetIds`].
    ///
    /// [lifted]: Member::lift
    ExpireMessages {
        conversation: ConversationId,
        up_to: Seq,
        ids_from: Millis,
    },
    /// The ids of messages that retention has taken and that were stored before this time, at most so many.
    ForgetIds {
        before: Millis,
        limit: u32,
    },
}

/// A message as it is stored.
#[derive(Debug, Clone, PartialEq)]
pub struct Message {
    pub conversation: ConversationId,
    pub seq: Seq,
    pub id: MessageId,
    pub from: UserId,
    /// The device that sent it; none when the API did.
    pub device: Option<DeviceId>,
    pub ts: Millis,
    pub body: Body,
    /// Of what the sender sent (target and body); see `ingest`.
    pub hash: u128,
}

/// One user's place in one conversation: the whole inbox is these rows.
///
/// A device that is not in `lagging` is at `delivered`; so a user with one device needs no entry, and a device
/// that is new starts at the user's delivered position.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    pub role: Role,
    /// The number of the first message after joining.
    pub joined: Seq,
    /// The first number this user sees: `joined`, or later once cleared.
    pub first: Seq,
    /// Up to here some device of the user has everything.
    pub delivered: Seq,
    pub read: Seq,
    /// How many messages above `delivered`, and above `read`, are the user's own.
    pub own_above_delivered: u64,
    pub own_above_read: u64,
    /// Known devices that are behind `delivered`, each with its position.
    pub lagging: Vec<(DeviceId, Seq)>,
}

/// What a batch adds to the ledger. The unit is one message for one recipient user.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LedgerDelta {
    pub accepted: u64,
    pub delivered: u64,
    pub expired: u64,
}

/// The ledger's totals. `accepted = delivered + waiting + expired + dropped`, where `waiting` is counted on its
/// own: summed from the members' rows at start, then kept by every write.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Ledger {
    pub accepted: u64,
    pub delivered: u64,
    pub expired: u64,
    pub dropped: u64,
}

/// One event of the outbox, as the webhook will carry it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutboxEvent {
    pub kind: &'static str,
    /// Events with the same key leave in order.
    pub key: Arc<str>,
    pub at: Millis,
    pub data: Bytes,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    Committed,
    /// Nothing was stored; each fault with the index of its write. All faults of the batch are named.
    Refused(Vec<(usize, Refused)>),
    /// Nothing was stored: another owner holds this partition.
    Stale {
        partition: u16,
        epoch: u64,
    },
    /// Nothing was stored: the store failed (disk full, locked, gone).
    Failed(Arc<str>),
}

#[derive(Debug, Clone, PartialEq)]
pub enum Refused {
    /// This sender used this id before, for this message.
    Duplicate(Receipt),
    /// The number is taken; `last` is the newest number of the conversation.
    SeqTaken {
        last: Seq,
    },
    ConversationExists,
}

/// Where a message was stored: what an acknowledgement says, and the hash to compare.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Receipt {
    pub conversation: ConversationId,
    pub seq: Seq,
    pub ts: Millis,
    pub hash: u128,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Query {
    /// All that the core keeps of a conversation: members, newest number, and the newest `tail` messages.
    Conversation {
        conversation: ConversationId,
        tail: u32,
    },
    /// Messages with `from ≤ seq ≤ to`, ascending, at most `limit`, ending early after `bytes_max` of bodies
    /// (at least one is given). With `newest` the last of the range rather than the first.
    Messages {
        conversation: ConversationId,
        from: Seq,
        to: Seq,
        limit: u32,
        bytes_max: u64,
        newest: bool,
    },
    /// How many messages with `from ≤ seq ≤ to` this user sent, and who else sent some.
    Senders {
        conversation: ConversationId,
        user: UserId,
        from: Seq,
        to: Seq,
    },
    /// The conversations that wait for a device, and the user's known devices.
    Waiting {
        user: UserId,
        device: DeviceId,
    },
    /// The user's conversations by newest activity, after one of them.
    Conversations {
        user: UserId,
        after: Option<ConversationId>,
        limit: u32,
    },
    Devices {
        user: UserId,
    },
    Ledger,
    /// Messages stored before `before`, about in order of arrival. `after` is 0, or the `next` of an earlier answer;
    /// at most `limit` messages are looked at. Also asks whether [`Write::ForgetIds`] with `ids_before` finds any.
    Overdue {
        before: Millis,
        ids_before: Millis,
        after: u64,
        limit: u32,
    },
    /// Messages beyond the newest `keep` of each conversation, or of one. `after` is 0, or the `next` of an earlier
    /// answer; at most `limit` messages, and not many more conversations, are looked at.
    Excess {
        keep: u64,
        of: Option<ConversationId>,
        after: u64,
        limit: u32,
    },
    /// Devices last seen before this time. `after` is 0, or the `next` of an earlier answer; about `limit` devices
    /// are looked at.
    StaleDevices {
        before: Millis,
        after: u64,
        limit: u32,
    },
}

#[derive(Debug, Clone, PartialEq)]
pub enum Found {
    /// `None`: there is no such conversation.
    Conversation(Option<Box<ConversationState>>),
    Messages(Vec<Message>),
    Senders {
        own: u64,
        others: Vec<UserId>,
    },
    Waiting {
        devices: Vec<Device>,
        conversations: Vec<Waiting>,
    },
    Conversations {
        conversations: Vec<Summary>,
        more: bool,
    },
    Devices(Vec<Device>),
    Ledger {
        ledger: Ledger,
        waiting: u64,
    },
    /// To [`Query::Overdue`] and [`Query::Excess`]. `more`: ask again with `next`.
    Overdue {
        runs: Vec<Overdue>,
        next: u64,
        more: bool,
        /// There are ids to forget.
        ids: bool,
    },
    StaleDevices {
        devices: Vec<(UserId, DeviceId)>,
        next: u64,
        more: bool,
    },
    /// The store could not be read.
    Failed(Arc<str>),
}

#[derive(Debug, Clone, PartialEq)]
pub struct ConversationState {
    pub name: Option<String>,
    pub meta: Option<Bytes>,
    pub last: Seq,
    /// Time of the newest message, or of creation.
    pub last_ts: Millis,
    /// Up to here retention has taken the messages. The members are lifted to it.
    pub floor: Seq,
    pub members: Vec<(UserId, Member)>,
    /// The newest messages, ascending and without gaps up to `last`.
    pub tail: Vec<Message>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    pub device: DeviceId,
    pub class: Option<DeviceClass>,
    pub last_seen: Millis,
}

/// A conversation that holds a message above the device's position that this device did not send.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Waiting {
    pub conversation: ConversationId,
    pub first: Seq,
    pub last: Seq,
    pub position: Seq,
    pub unread: u64,
}

/// Messages of one conversation that retention may take: ascending and without gaps, each with its sender.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Overdue {
    pub conversation: ConversationId,
    pub messages: Vec<(Seq, UserId)>,
}

/// One line of a conversation list.
#[derive(Debug, Clone, PartialEq)]
pub struct Summary {
    pub conversation: ConversationId,
    pub name: Option<String>,
    pub meta: Option<Bytes>,
    pub last: Seq,
    pub member: Member,
    /// The other member's positions, in a direct conversation.
    pub peer: Option<(Seq, Seq)>,
    /// None when there is none that this user sees.
    pub last_message: Option<Message>,
}

impl Member {
    /// Messages that wait for the user: above `delivered`, sent by others.
    pub fn waiting(&self, last: Seq) -> u64 {
        last.saturating_sub(self.delivered).saturating_sub(self.own_above_delivered)
    }

    /// Messages above the read position that others sent.
    pub fn unread(&self, last: Seq) -> u64 {
        last.saturating_sub(self.read).saturating_sub(self.own_above_read)
    }

    /// The messages up to `floor` are gone: nobody sees them, has to fetch them or has them unread.
    ///
    /// A row need not be written for this; who reads one lifts it.
    pub fn lift(&mut self, floor: Seq) {
        self.first = self.first.max(floor + 1);
        self.delivered = self.delivered.max(floor);
        self.read = self.read.max(floor);
        for (_, position) in &mut self.lagging {
            *position = floor.max(*position);
        }
        let delivered = self.delivered;
        self.lagging.retain(|(_, position)| *position < delivered);
    }

    /// The position of one known device.
    pub fn position(&self, device: &DeviceId) -> Seq {
        self.lagging.iter().find(|(d, _)| d == device).map_or(self.delivered, |(_, seq)| *seq)
    }
}
