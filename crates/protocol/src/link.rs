//! What gateway, router and API say to each other. Owned data that could cross a process boundary: a link may
//! be a local call, and may as well be a network.
//!
//! Delivery over a link is at least once. Each event for a connection carries its number (`no`, from 1); a
//! gateway takes them in order, ignores those it had, and answers [`Up::NotHere`] to what it cannot take: a
//! connection that is gone, or a number ahead of the next one. Number 0 stands outside the order and is taken at
//! once.

use crate::{
    error::{CloseCode, Refusal},
    frame::{Body, ClientFrame, Frame},
    ids::{ConversationId, DeviceClass, DeviceId, GroupId, MessageId, Millis, Seq, UserId},
};
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use std::sync::Arc;

/// One life of one node: its id, and a boot id that is new at every start.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct NodeRef {
    pub node_id: Arc<str>,
    pub boot_id: Arc<str>,
}

/// One connection on one node. `connection` and `login` are 0 for what speaks for the whole node.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ConnRef {
    pub node: Arc<NodeRef>,
    pub connection: u64,
    /// Microseconds since the epoch at which the identity was accepted; no two of one node are equal.
    pub login: u64,
}

/// Gateway or API → router.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Uplink {
    pub from: ConnRef,
    pub event: Up,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Up {
    /// An identity was verified; answered by [`Down::Accepted`] or [`Down::Refused`].
    Open(Open),
    /// One decoded frame of an accepted connection, to be decided.
    Frame(ClientFrame),
    /// The socket is full: pushes wait in the session's queue, redelivery timers stand still.
    Congested,
    /// What was queued has been written.
    Flowing,
    /// It has joined a room: memberships are its gateway's and end with it, so that nobody can go on with its session.
    InRooms,
    Closed(CloseCode),
    /// Answer to a downlink event that found no connection (`gone`), or came before its turn.
    NotHere {
        no: u64,
        event: Box<Down>,
        gone: bool,
    },
    /// A request of the API; `from.connection` is 0.
    Request {
        request_id: u64,
        request: Request,
    },
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Open {
    pub user: UserId,
    pub device: DeviceId,
    pub class: Option<DeviceClass>,
    pub channel: Option<Arc<str>>,
    /// The id of this session, by which a later connection may ask to go on with it.
    pub session: Arc<str>,
    /// The session that the client would like to go on with.
    pub resume: Option<Arc<str>>,
    pub same_device: SameDevice,
}

/// What happens when a device logs in that already is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SameDevice {
    Replace,
    Refuse,
    Allow,
}

/// What coordination says to a login.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Claim {
    /// The route is this connection's; these connections of the same device end.
    Won { ended: Vec<ConnRef> },
    /// Refused: the device is connected elsewhere, or a newer login holds the route.
    InUse,
}

/// Router → gateways and API of one node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Downlink {
    pub node: Arc<NodeRef>,
    /// Empty for an answer to the API.
    pub to: SmallVec<[Target; 1]>,
    pub event: Down,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Target {
    pub connection: u64,
    pub login: u64,
    /// The number of this event among all for this connection, from 1.
    pub no: u64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Down {
    Accepted {
        resumed: bool,
    },
    /// `same_device = "refuse"`.
    Refused(CloseCode),
    /// A frame for the client. `decided` frames of this connection are decided with it. An answer to a
    /// client's own request never makes it a slow consumer.
    Frame {
        frame: Frame,
        decided: u32,
        answer: bool,
    },
    /// So many frames of this connection are decided that have no answer.
    Decided(u32),
    Close {
        code: CloseCode,
        /// Replaces the code's own reason text, when the application gave one.
        reason: Option<Arc<str>>,
    },
    Answer {
        request_id: u64,
        answer: Box<Answer>,
    },
}

/// What the API asks of the router.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Request {
    Send(Send),
    GroupCreate {
        group_id: Option<GroupId>,
        name: Option<String>,
        members: Vec<UserId>,
        owner: Option<UserId>,
        meta: Option<Bytes>,
    },
    GroupAdd {
        group: GroupId,
        user: UserId,
    },
    GroupRemove {
        group: GroupId,
        user: UserId,
    },
    GroupChange {
        group: GroupId,
        name: Option<String>,
        meta: Option<Bytes>,
    },
    GroupDelete {
        group: GroupId,
    },
    History {
        conversation: ConversationId,
        after: Option<Seq>,
        before: Option<Seq>,
        limit: u32,
    },
    User {
        user: UserId,
    },
    Kick {
        user: UserId,
        device: Option<DeviceId>,
        reason: Option<Arc<str>>,
        code: CloseCode,
    },
    ForgetDevice {
        user: UserId,
        device: DeviceId,
    },
}

/// A message from the API.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Send {
    pub id: MessageId,
    pub from: UserId,
    pub target: SendTarget,
    pub body: Body,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum SendTarget {
    User(UserId),
    /// As the client wrote it: whether it names a conversation of this user is for the router to say.
    Conversation(Arc<str>),
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Answer {
    Stored {
        conversation_id: ConversationId,
        seq: Seq,
        ts: Millis,
    },
    Created {
        conversation_id: ConversationId,
    },
    Done,
    /// A `history.page` without `type` and `id`, as JSON.
    Page(Bytes),
    User {
        online: bool,
        devices: Vec<DeviceState>,
    },
    Closed {
        count: u32,
    },
    Refused(Refusal),
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DeviceState {
    pub device_id: DeviceId,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_class: Option<DeviceClass>,
    /// Where it is connected now.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_id: Option<Arc<str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub connected_at: Option<Millis>,
    pub last_seen: Millis,
}
