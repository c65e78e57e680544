//! The frames of `docs/protocol.md`: decoded when a client sends them, encoded when the server does.
//!
//! A frame is one JSON object, or a JSON header and body bytes beside it. Bodies are carried as the bytes that
//! came; nothing here reads them.

use crate::{
    error::{CloseCode, ErrorCode},
    ids::{ConversationId, DeviceClass, DeviceId, GroupId, MessageId, Millis, RoomName, Seq, UserId},
    json::{self, Object},
    link::{Send, SendTarget},
};
use bytes::Bytes;
use serde::{Deserialize, Deserializer, Serialize, de::DeserializeOwned};
use serde_json::{Map, Value, value::RawValue};
use std::sync::Arc;

/// The longest `data` of a ping, in bytes.
pub const PING_DATA_BYTES_MAX: usize = 1024;
/// The longest `name` of a group, in bytes.
pub const NAME_BYTES_MAX: usize = 256;
/// The largest `meta` of a group, in bytes of JSON.
pub const META_BYTES_MAX: usize = 4096;
/// How many users one `group.add` or `group.remove` may name.
pub const GROUP_CHANGE_USERS_MAX: usize = 500;
/// The largest page that may be asked for, and the one that is given unasked.
pub const PAGE_LIMIT_MAX: u32 = 200;
pub const PAGE_LIMIT_DEFAULT: u32 = 50;
/// A body above this many bytes is left out of `last_message`.
pub const LAST_MESSAGE_BODY_BYTES_MAX: usize = 1024;
/// What the server may add to a frame of the largest size for its own fields.
pub const SERVER_FIELDS_BYTES: usize = 1024;

/// The content of a message: any JSON value as it was written, or bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Body {
    Json(Bytes),
    Binary(Bytes),
}

impl Body {
    pub fn bytes(&self) -> &Bytes {
        match self {
            Self::Json(bytes) | Self::Binary(bytes) => bytes,
        }
    }

    /// Appends `"body":…` (and `"body_encoding"`) as they stand where only JSON can travel.
    pub fn write_json(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(b"\"body\":");
        match self {
            Self::Json(raw) => out.extend_from_slice(raw),
            Self::Binary(bytes) => {
                use base64::Engine;
                out.push(b'"');
                let text = base64::engine::general_purpose::STANDARD.encode(bytes);
                out.extend_from_slice(text.as_bytes());
                out.extend_from_slice(b"\",\"body_encoding\":\"base64\"");
            }
        }
    }
}

/// A frame for a client, whatever carries it: JSON text, or (with `body`) a header and bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Frame {
    pub json: Bytes,
    pub body: Option<Bytes>,
}

impl Frame {
    pub fn len(&self) -> usize {
        self.json.len() + self.body.as_ref().map_or(0, |b| b.len() + 4)
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// What a client may send once it has an identity, and `connect` before.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum ClientFrame {
    Connect(Connect),
    Ping {
        data: Option<String>,
    },
    Pong,
    AuthRefresh {
        id: String,
        token: String,
    },
    MsgSend {
        send: SendRequest,
    },
    MsgRecv {
        /// Not asked for; an error repeats it.
        id: Option<Arc<str>>,
        conversation: Arc<str>,
        seq: Seq,
    },
    MsgRead {
        /// Not asked for; an error repeats it.
        id: Option<Arc<str>>,
        conversation: Arc<str>,
        seq: Seq,
    },
    History {
        id: Arc<str>,
        conversation: Arc<str>,
        after: Option<Seq>,
        before: Option<Seq>,
        limit: u32,
    },
    ConversationList {
        id: Arc<str>,
        after: Option<Arc<str>>,
        limit: u32,
    },
    ConversationCreate {
        id: Arc<str>,
        group_id: Option<GroupId>,
        name: Option<String>,
        members: Vec<UserId>,
        meta: Option<Bytes>,
    },
    ConversationClear {
        id: Arc<str>,
        conversation: Arc<str>,
    },
    GroupAdd {
        id: Arc<str>,
        conversation: Arc<str>,
        users: Vec<UserId>,
    },
    GroupRemove {
        id: Arc<str>,
        conversation: Arc<str>,
        users: Vec<UserId>,
    },
    GroupRole {
        id: Arc<str>,
        conversation: Arc<str>,
        user: UserId,
        role: Role,
    },
    GroupRename {
        id: Arc<str>,
        conversation: Arc<str>,
        name: Option<String>,
        meta: Option<Bytes>,
    },
    GroupLeave {
        id: Arc<str>,
        conversation: Arc<str>,
    },
    /// For the gateway that holds the connection.
    Room(RoomRequest),
}

/// What a client asks of a room.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum RoomRequest {
    Join {
        id: Arc<str>,
        room: RoomName,
        since: Option<Since>,
        batch: bool,
    },
    Leave {
        id: Arc<str>,
        room: RoomName,
    },
    /// `from` is what the client claims to be.
    Send {
        id: Arc<str>,
        room: RoomName,
        body: Body,
        from: Option<String>,
    },
}

/// Up to where a client knows a room.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Since {
    pub epoch: String,
    pub offset: u64,
}

impl RoomRequest {
    pub fn id(&self) -> &str {
        match self {
            Self::Join { id, .. } | Self::Leave { id, .. } | Self::Send { id, .. } => id,
        }
    }

    /// The name on the wire.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Join { .. } => "room.join",
            Self::Leave { .. } => "room.leave",
            Self::Send { .. } => "room.send",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Connect {
    /// Not asked for; an error repeats it.
    pub id: Option<String>,
    pub token: String,
    pub device_id: Option<DeviceId>,
    pub device_class: Option<DeviceClass>,
    pub channel: Option<String>,
    pub version: u32,
    pub resume: Option<String>,
}

/// `msg.send`. `from` is what the frame claims; the session compares it with who is bound.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SendRequest {
    pub id: MessageId,
    pub from: Option<String>,
    pub target: SendTarget,
    pub body: Body,
}

impl SendRequest {
    pub fn by(self, from: UserId) -> Send {
        Send { id: self.id, from, target: self.target, body: self.body }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    Member,
    Admin,
    Owner,
}

/// Why a frame could not be decoded; answered by the frame `error`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DecodeError {
    pub code: ErrorCode,
    pub message: String,
    /// The `id` of the frame, when it could be read.
    pub id: Option<String>,
    /// It was no JSON object at all; ten of those in a row end the connection.
    pub unparsable: bool,
}

impl ClientFrame {
    /// Decodes one JSON text.
    pub fn decode_text(text: &[u8]) -> Result<Self, DecodeError> {
        Fields::parse(text)?.frame(None)
    }

    /// Decodes a binary message: 4-byte header length, JSON header, body.
    pub fn decode_binary(bytes: &[u8]) -> Result<Self, DecodeError> {
        let unparsable =
            |message: String| DecodeError { code: ErrorCode::Malformed, message, id: None, unparsable: true };
        let Some((length, rest)) = bytes.split_first_chunk::<4>() else {
            return Err(unparsable(format!(
                "a binary frame of {} bytes has no 4-byte header length",
                bytes.len()
            )));
        };
        let length = u32::from_be_bytes(*length) as usize;
        if length >= 1 << 24 || length > rest.len() {
            return Err(unparsable(format!(
                "the header length {length} exceeds the {} bytes that follow",
                rest.len()
            )));
        }
        let (header, body) = rest.split_at(length);
        Fields::parse(header)?.frame(Some(body))
    }

    /// The name on the wire.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Connect(_) => "connect",
            Self::Ping { .. } => "ping",
            Self::Pong => "pong",
            Self::AuthRefresh { .. } => "auth.refresh",
            Self::MsgSend { .. } => "msg.send",
            Self::MsgRecv { .. } => "msg.recv",
            Self::MsgRead { .. } => "msg.read",
            Self::History { .. } => "history",
            Self::ConversationList { .. } => "conversation.list",
            Self::ConversationCreate { .. } => "conversation.create",
            Self::ConversationClear { .. } => "conversation.clear",
            Self::GroupAdd { .. } => "group.add",
            Self::GroupRemove { .. } => "group.remove",
            Self::GroupRole { .. } => "group.role",
            Self::GroupRename { .. } => "group.rename",
            Self::GroupLeave { .. } => "group.leave",
            Self::Room(request) => request.name(),
        }
    }
}

/// Every field that some frame has, unread. Fields that a frame does not have are ignored, whatever they hold.
#[derive(Deserialize)]
struct Fields<'a> {
    #[serde(borrow, default, rename = "type", deserialize_with = "present")]
    kind: Raw<'a>,
    #[serde(borrow, default, deserialize_with = "present")]
    id: Raw<'a>,
    #[serde(borrow, default, deserialize_with = "present")]
    conversation_id: Raw<'a>,
    #[serde(borrow, default, deserialize_with = "present")]
    seq: Raw<'a>,
    #[serde(borrow, default, deserialize_with = "present")]
    body: Raw<'a>,
    #[serde(borrow, default, deserialize_with = "present")]
    to: Raw<'a>,
    #[serde(borrow, default, deserialize_with = "present")]
    from: Raw<'a>,
    #[serde(borrow, default, deserialize_with = "present")]
    data: Raw<'a>,
    #[serde(borrow, default, deserialize_with = "present")]
    token: Raw<'a>,
    #[serde(borrow, default, deserialize_with = "present")]
    device_id: Raw<'a>,
    #[serde(borrow, default, deserialize_with = "present")]
    device_class: Raw<'a>,
    #[serde(borrow, default, deserialize_with = "present")]
    channel: Raw<'a>,
    #[serde(borrow, default, deserialize_with = "present")]
    version: Raw<'a>,
    #[serde(borrow, default, deserialize_with = "present")]
    resume: Raw<'a>,
    #[serde(borrow, default, deserialize_with = "present")]
    after_seq: Raw<'a>,
    #[serde(borrow, default, deserialize_with = "present")]
    before_seq: Raw<'a>,
    #[serde(borrow, default, deserialize_with = "present")]
    after: Raw<'a>,
    #[serde(borrow, default, deserialize_with = "present")]
    limit: Raw<'a>,
    #[serde(borrow, default, deserialize_with = "present")]
    group_id: Raw<'a>,
    #[serde(borrow, default, deserialize_with = "present")]
    name: Raw<'a>,
    #[serde(borrow, default, deserialize_with = "present")]
    members: Raw<'a>,
    #[serde(borrow, default, deserialize_with = "present")]
    meta: Raw<'a>,
    #[serde(borrow, default, deserialize_with = "present")]
    users: Raw<'a>,
    #[serde(borrow, default, deserialize_with = "present")]
    user: Raw<'a>,
    #[serde(borrow, default, deserialize_with = "present")]
    role: Raw<'a>,
    #[serde(borrow, default, deserialize_with = "present")]
    room: Raw<'a>,
    #[serde(borrow, default, deserialize_with = "present")]
    since: Raw<'a>,
    #[serde(borrow, default, deserialize_with = "present")]
    batch: Raw<'a>,
}

type Raw<'a> = Option<&'a RawValue>;

/// Keeps `null` as a value; an absent field is `None`.
fn present<'de: 'a, 'a, D: Deserializer<'de>>(d: D) -> Result<Raw<'a>, D::Error> {
    <&RawValue>::deserialize(d).map(Some)
}

impl<'a> Fields<'a> {
    fn parse(text: &'a [u8]) -> Result<Self, DecodeError> {
        let unparsable =
            |message: String| DecodeError { code: ErrorCode::Malformed, message, id: None, unparsable: true };
        json::object(text).map_err(|error| {
            // An object all the same when, for instance, a field stands in it twice.
            match serde_json::from_slice::<Map<String, Value>>(text) {
                Ok(object) => DecodeError {
                    code: ErrorCode::Malformed,
                    message: format!("the frame cannot be taken: {error}"),
                    id: object.get("id").and_then(|id| id.as_str()).map(str::to_owned),
                    unparsable: false,
                },
                Err(_) => unparsable(format!("the frame is no JSON object: {error}")),
            }
        })
    }

    fn frame(&self, binary: Option<&[u8]>) -> Result<ClientFrame, DecodeError> {
        self.build(binary).map_err(|(code, message)| DecodeError {
            code,
            message,
            id: self.any_id(),
            unparsable: false,
        })
    }

    /// The `id`, whether or not the frame takes one: errors repeat it.
    fn any_id<T: Deserialize<'a>>(&self) -> Option<T> {
        self.id.and_then(|raw| serde_json::from_str(raw.get()).ok())
    }

    fn build(&self, binary: Option<&[u8]>) -> Result<ClientFrame, (ErrorCode, String)> {
        let kind: String = need("type", self.kind)?;
        let id = || need::<Arc<str>>("id", self.id).and_then(bounded_id);
        let conversation = || need::<Arc<str>>("conversation_id", self.conversation_id);
        let limit = || -> Result<u32, Fault> {
            match optional::<u32>("limit", self.limit)? {
                None => Ok(PAGE_LIMIT_DEFAULT),
                Some(n) if (1..=PAGE_LIMIT_MAX).contains(&n) => Ok(n),
                Some(n) => Err(fault(format!("limit is {n}; it takes 1 to {PAGE_LIMIT_MAX}"))),
            }
        };
        Ok(match kind.as_str() {
            "msg.send" => ClientFrame::MsgSend { send: self.send(binary)? },
            "msg.recv" => ClientFrame::MsgRecv {
                id: self.any_id(),
                conversation: conversation()?,
                seq: need("seq", self.seq)?,
            },
            "msg.read" => ClientFrame::MsgRead {
                id: self.any_id(),
                conversation: conversation()?,
                seq: need("seq", self.seq)?,
            },
            "room.send" => ClientFrame::Room(RoomRequest::Send {
                id: id()?,
                room: need("room", self.room)?,
                body: self.body(binary)?,
                from: optional("from", self.from)?,
            }),
            "room.join" => ClientFrame::Room(RoomRequest::Join {
                id: id()?,
                room: need("room", self.room)?,
                since: optional::<Option<Object<Since>>>("since", self.since)?.flatten().map(|since| since.0),
                batch: optional("batch", self.batch)?.unwrap_or(false),
            }),
            "room.leave" => {
                ClientFrame::Room(RoomRequest::Leave { id: id()?, room: need("room", self.room)? })
            }
            "ping" => {
                let data: Option<String> = optional("data", self.data)?;
                bounded("data", data.as_deref(), PING_DATA_BYTES_MAX)?;
                ClientFrame::Ping { data }
            }
            "pong" => ClientFrame::Pong,
            "connect" => {
                let class: Option<String> = optional("device_class", self.device_class)?;
                let channel: Option<String> = optional("channel", self.channel)?;
                bounded("channel", channel.as_deref(), crate::ids::CHANNEL_BYTES_MAX)?;
                ClientFrame::Connect(Connect {
                    id: self.any_id(),
                    token: need("token", self.token)?,
                    device_id: optional("device_id", self.device_id)?,
                    device_class: class.map(|text| device_class(&text)).transpose()?,
                    channel,
                    version: optional("version", self.version)?.unwrap_or(crate::VERSION),
                    resume: optional("resume", self.resume)?,
                })
            }
            "auth.refresh" => {
                ClientFrame::AuthRefresh { id: id()?.to_string(), token: need("token", self.token)? }
            }
            "history" => {
                let (after, before) =
                    (optional("after_seq", self.after_seq)?, optional("before_seq", self.before_seq)?);
                if after.is_some() && before.is_some() {
                    return Err(fault("give after_seq or before_seq, not both".into()));
                }
                ClientFrame::History {
                    id: id()?,
                    conversation: conversation()?,
                    after,
                    before,
                    limit: limit()?,
                }
            }
            "conversation.list" => ClientFrame::ConversationList {
                id: id()?,
                after: optional("after", self.after)?,
                limit: limit()?,
            },
            "conversation.create" => ClientFrame::ConversationCreate {
                id: id()?,
                group_id: optional("group_id", self.group_id)?,
                name: self.group_name()?,
                members: need("members", self.members)?,
                meta: self.group_meta()?,
            },
            "conversation.clear" => {
                ClientFrame::ConversationClear { id: id()?, conversation: conversation()? }
            }
            "group.add" => {
                ClientFrame::GroupAdd { id: id()?, conversation: conversation()?, users: self.group_users()? }
            }
            "group.remove" => ClientFrame::GroupRemove {
                id: id()?,
                conversation: conversation()?,
                users: self.group_users()?,
            },
            "group.role" => ClientFrame::GroupRole {
                id: id()?,
                conversation: conversation()?,
                user: need("user", self.user)?,
                role: need::<String>("role", self.role).and_then(|text| role(&text))?,
            },
            "group.rename" => ClientFrame::GroupRename {
                id: id()?,
                conversation: conversation()?,
                name: self.group_name()?,
                meta: self.group_meta()?,
            },
            "group.leave" => ClientFrame::GroupLeave { id: id()?, conversation: conversation()? },
            other => {
                let shown: String = other.chars().take(64).collect();
                return Err((ErrorCode::UnknownType, format!("this server knows no frame type {shown:?}")));
            }
        })
    }

    fn send(&self, binary: Option<&[u8]>) -> Result<SendRequest, Fault> {
        let to: Option<UserId> = optional("to", self.to)?;
        let conversation: Option<Arc<str>> = optional("conversation_id", self.conversation_id)?;
        let target = match (to, conversation) {
            (Some(user), None) => SendTarget::User(user),
            (None, Some(conversation)) => SendTarget::Conversation(conversation),
            _ => return Err(fault("give exactly one of to and conversation_id".into())),
        };
        let body = self.body(binary)?;
        Ok(SendRequest { id: need("id", self.id)?, from: optional("from", self.from)?, target, body })
    }

    fn body(&self, binary: Option<&[u8]>) -> Result<Body, Fault> {
        match (binary, self.body) {
            (Some(bytes), _) => Ok(Body::Binary(Bytes::copy_from_slice(bytes))),
            (None, Some(raw)) => Ok(Body::Json(Bytes::copy_from_slice(raw.get().as_bytes()))),
            (None, None) => Err(fault("body is missing".into())),
        }
    }

    fn group_name(&self) -> Result<Option<String>, Fault> {
        let name: Option<String> = optional("name", self.name)?;
        bounded("name", name.as_deref(), NAME_BYTES_MAX)?;
        Ok(name)
    }

    fn group_meta(&self) -> Result<Option<Bytes>, Fault> {
        match self.meta.map(RawValue::get) {
            None | Some("null") => Ok(None),
            Some(text) if !text.starts_with('{') => Err(fault("meta is no object".into())),
            Some(text) => {
                bounded("meta", Some(text), META_BYTES_MAX)?;
                Ok(Some(Bytes::copy_from_slice(text.as_bytes())))
            }
        }
    }

    fn group_users(&self) -> Result<Vec<UserId>, Fault> {
        let users: Vec<UserId> = need("users", self.users)?;
        if users.is_empty() || users.len() > GROUP_CHANGE_USERS_MAX {
            return Err(fault(format!(
                "users names {}; it takes 1 to {GROUP_CHANGE_USERS_MAX}",
                users.len()
            )));
        }
        Ok(users)
    }
}

type Fault = (ErrorCode, String);

fn fault(message: String) -> Fault {
    (ErrorCode::Malformed, message)
}

fn bounded_id(id: Arc<str>) -> Result<Arc<str>, Fault> {
    bounded("id", Some(&id), crate::ids::ID_BYTES_MAX)?;
    if id.is_empty() { Err(fault("id is empty".into())) } else { Ok(id) }
}

fn bounded(name: &str, text: Option<&str>, max: usize) -> Result<(), Fault> {
    match text {
        Some(text) if text.len() > max => {
            Err(fault(format!("{name} is {} bytes long; it takes at most {max}", text.len())))
        }
        _ => Ok(()),
    }
}

fn device_class(text: &str) -> Result<DeviceClass, Fault> {
    DeviceClass::parse(text)
        .ok_or_else(|| fault(format!("device_class {text:?} is none of web, ios, android, desktop, iot")))
}

fn role(text: &str) -> Result<Role, Fault> {
    match text {
        "owner" => Ok(Role::Owner),
        "admin" => Ok(Role::Admin),
        "member" => Ok(Role::Member),
        _ => Err(fault(format!("role {text:?} is none of owner, admin, member"))),
    }
}

fn need<T: DeserializeOwned>(name: &str, raw: Raw<'_>) -> Result<T, Fault> {
    optional(name, raw)?.ok_or_else(|| fault(format!("{name} is missing")))
}

fn optional<T: DeserializeOwned>(name: &str, raw: Raw<'_>) -> Result<Option<T>, Fault> {
    match raw {
        None => Ok(None),
        Some(raw) => serde_json::from_str(raw.get()).map_err(|error| {
            // The position speaks of the field's own text, which the sender cannot use.
            let text = error.to_string();
            let what = text.rsplit_once(" at line").map_or(text.as_str(), |(what, _)| what);
            fault(format!("{name}: {what}"))
        }),
    }
}

/// What the server says. Encoded once, however many connections it is for.
#[derive(Debug, Clone, Serialize)]
#[serde(tag = "type")]
pub enum ServerFrame<'a> {
    #[serde(rename = "connected")]
    Connected {
        session_id: &'a str,
        connection_id: &'a str,
        user_id: &'a str,
        device_id: &'a str,
        node_id: &'a str,
        resumed: bool,
        ping_after_ms: u64,
        close_after_ms: u64,
        max_frame_bytes: u64,
        server_time: Millis,
        version: u32,
    },
    #[serde(rename = "ping")]
    Ping,
    #[serde(rename = "pong")]
    Pong {
        #[serde(skip_serializing_if = "Option::is_none")]
        data: Option<&'a str>,
    },
    #[serde(rename = "auth.expiring")]
    AuthExpiring { expires_at: Millis },
    #[serde(rename = "session.migrate")]
    SessionMigrate {
        retry_after_ms: u64,
        #[serde(skip_serializing_if = "Option::is_none")]
        target: Option<&'a str>,
        reason: &'a str,
    },
    #[serde(rename = "session.closed")]
    SessionClosed {
        code: u16,
        reason: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        retry_after_ms: Option<u64>,
    },
    #[serde(rename = "ok")]
    Ok {
        id: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        conversation_id: Option<&'a str>,
    },
    #[serde(rename = "error")]
    Error {
        code: ErrorCode,
        message: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        id: Option<&'a str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        retry_after_ms: Option<u64>,
    },
    #[serde(rename = "msg.ack")]
    MsgAck { id: &'a str, conversation_id: &'a str, seq: Seq, ts: Millis },
    #[serde(rename = "msg.receipt")]
    MsgReceipt {
        conversation_id: &'a str,
        seq: Seq,
        #[serde(skip_serializing_if = "Option::is_none")]
        user_id: Option<&'a str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        count: Option<u32>,
        kind: ReceiptKind,
        ts: Millis,
    },
    #[serde(rename = "room.joined")]
    RoomJoined { id: &'a str, room: &'a str, epoch: &'a str, offset: u64, recovered: bool, members: u64 },
    #[serde(rename = "sync.notice")]
    SyncNotice { conversations: &'a [Notice], more: bool },
    #[serde(rename = "conversation.changed")]
    ConversationChanged {
        conversation_id: &'a str,
        change: Change,
        #[serde(skip_serializing_if = "Option::is_none")]
        by: Option<&'a str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        users: Option<&'a [UserId]>,
        #[serde(skip_serializing_if = "Option::is_none")]
        name: Option<&'a str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        meta: Option<&'a RawValue>,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ReceiptKind {
    Delivered,
    Read,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Change {
    Created,
    MemberAdded,
    MemberRemoved,
    Role,
    Renamed,
    Cleared,
}

/// One line of a `sync.notice`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Notice {
    pub conversation_id: ConversationId,
    pub last_seq: Seq,
    pub first_seq: Seq,
    pub unread: u64,
}

impl ServerFrame<'_> {
    pub fn encode(&self) -> Frame {
        let json = serde_json::to_vec(self).expect("frames hold only strings, numbers and checked JSON");
        Frame { json: json.into(), body: None }
    }
}

/// `msg.push`, the frame that is worth its own encoder.
pub fn encode_push(
    conversation_id: &ConversationId,
    seq: Seq,
    id: &str,
    from: &UserId,
    ts: Millis,
    redelivered: bool,
    body: &Body,
) -> Frame {
    let mut json = Vec::with_capacity(160 + body.bytes().len());
    json.extend_from_slice(b"{\"type\":\"msg.push\",\"conversation_id\":");
    write_string(&mut json, conversation_id);
    json.extend_from_slice(b",\"seq\":");
    write_number(&mut json, seq);
    json.extend_from_slice(b",\"id\":");
    write_string(&mut json, id);
    json.extend_from_slice(b",\"from\":");
    write_string(&mut json, from);
    json.extend_from_slice(b",\"ts\":");
    write_number(&mut json, ts);
    if redelivered {
        json.extend_from_slice(b",\"redelivered\":true");
    }
    with_body(json, body)
}

/// Ends a frame, of which everything is written but the body and the last brace, with a body as it came.
pub fn with_body(mut json: Vec<u8>, body: &Body) -> Frame {
    let body = match body {
        Body::Json(raw) => {
            json.extend_from_slice(b",\"body\":");
            json.extend_from_slice(raw);
            None
        }
        Body::Binary(bytes) => Some(bytes.clone()),
    };
    json.push(b'}');
    Frame { json: json.into(), body }
}

/// Appends `text` as a JSON string.
pub fn write_string(out: &mut Vec<u8>, text: &str) {
    serde_json::to_writer(out, text).expect("a string can always be written to memory");
}

/// Appends `number` in decimal.
pub fn write_number(out: &mut Vec<u8>, number: u64) {
    serde_json::to_writer(out, &number).expect("a number can always be written to memory");
}

impl<'a> ServerFrame<'a> {
    pub fn closed(code: CloseCode, reason: Option<&'a str>, retry_after_ms: Option<u64>) -> Self {
        Self::SessionClosed { code: code.code(), reason: reason.unwrap_or(code.reason()), retry_after_ms }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(text: &str) -> Result<&'static str, (ErrorCode, Option<String>, bool)> {
        ClientFrame::decode_text(text.as_bytes()).map(|f| f.name()).map_err(|e| (e.code, e.id, e.unparsable))
    }

    #[test]
    fn frames_are_told_apart_and_faults_name_the_frame() {
        let id = |s: &str| Some(s.to_owned());
        use ErrorCode::*;
        let rows = [
            (r#"{"type":"ping"}"#, Ok("ping")),
            (r#"{"type":"ping","data":"x","members":5}"#, Ok("ping")),
            (r#"{"type":"msg.send","id":"1","to":"bob","body":null}"#, Ok("msg.send")),
            (r#"{"type":"msg.send","id":"1","to":"bob"}"#, Err((Malformed, id("1"), false))),
            (
                r#"{"type":"msg.send","id":"1","to":"bob","conversation_id":"g:x","body":1}"#,
                Err((Malformed, id("1"), false)),
            ),
            (r#"{"type":"msg.send","id":7,"to":"bob","body":1}"#, Err((Malformed, None, false))),
            (r#"{"type":"msg.send","id":"1","to":"b:b","body":1}"#, Err((Malformed, id("1"), false))),
            (r#"{"type":"msg.recv","conversation_id":"d:a:b","seq":4}"#, Ok("msg.recv")),
            (r#"{"type":"msg.recv","conversation_id":"d:a:b","seq":-4}"#, Err((Malformed, None, false))),
            (r#"{"type":"nothing","id":"q"}"#, Err((UnknownType, id("q"), false))),
            (r#"{"id":"q"}"#, Err((Malformed, id("q"), false))),
            (r#"{"type":"ping","id":"q","role":1,"role":2}"#, Err((Malformed, id("q"), false))),
            (
                r#"{"type":"history","id":"h","conversation_id":"g:x","limit":0}"#,
                Err((Malformed, id("h"), false)),
            ),
            (r#"{"type":"history","id":"h","conversation_id":"g:x","limit":200}"#, Ok("history")),
            (r#"{"type":"room.join","id":"j","room":"r"}"#, Ok("room.join")),
            (
                r#"{"type":"room.join","id":"j","room":"r","since":{"epoch":"e","offset":4},"batch":true}"#,
                Ok("room.join"),
            ),
            (r#"{"type":"room.join","id":"j","room":"r","since":null}"#, Ok("room.join")),
            (
                r#"{"type":"room.join","id":"j","room":"r","since":{"epoch":"e"}}"#,
                Err((Malformed, id("j"), false)),
            ),
            (r#"{"type":"room.join","id":"j","room":"r","since":["e",4]}"#, Err((Malformed, id("j"), false))),
            (
                r#"{"type":"group.role","id":"j","conversation_id":"g:x","user":"u","role":"admin"}"#,
                Ok("group.role"),
            ),
            (
                r#"{"type":"group.role","id":"j","conversation_id":"g:x","user":"u","role":{"admin":null}}"#,
                Err((Malformed, id("j"), false)),
            ),
            (r#"{"type":"room.join","id":"j","room":"r","batch":1}"#, Err((Malformed, id("j"), false))),
            (r#"{"type":"room.join","id":"j","room":"a\tb"}"#, Err((Malformed, id("j"), false))),
            (r#"{"type":"room.join","room":"r"}"#, Err((Malformed, None, false))),
            (r#"{"type":"room.leave","id":"l","room":""}"#, Err((Malformed, id("l"), false))),
            (r#"{"type":"room.leave","id":"l","room":"r"}"#, Ok("room.leave")),
            (r#"{"type":"room.send","id":"s","room":"r","body":null}"#, Ok("room.send")),
            (r#"{"type":"room.send","id":"s","room":"r"}"#, Err((Malformed, id("s"), false))),
            (r#"[1]"#, Err((Malformed, None, true))),
            (r#"{"type":"#, Err((Malformed, None, true))),
            (r#""#, Err((Malformed, None, true))),
        ];
        for (text, expected) in rows {
            assert_eq!(code(text), expected, "{text}");
        }
    }

    #[test]
    fn a_body_is_kept_as_it_was_written() {
        let text = br#"{"type":"msg.send","id":"1","to":"bob","body":{"a" : 1.0,"b":"\u00e9"}}"#;
        let ClientFrame::MsgSend { send } = ClientFrame::decode_text(text).unwrap() else { panic!() };
        assert_eq!(send.body, Body::Json(Bytes::from_static(br#"{"a" : 1.0,"b":"\u00e9"}"#)));
    }

    #[test]
    fn a_binary_body_stands_behind_its_header() {
        let header = br#"{"type":"msg.send","id":"1","to":"bob"}"#;
        let mut bytes = (header.len() as u32).to_be_bytes().to_vec();
        bytes.extend_from_slice(header);
        bytes.extend_from_slice(&[0, 255, 1]);
        let ClientFrame::MsgSend { send } = ClientFrame::decode_binary(&bytes).unwrap() else { panic!() };
        assert_eq!(send.body, Body::Binary(Bytes::from_static(&[0, 255, 1])));
        assert!(ClientFrame::decode_binary(&[0, 0, 1]).unwrap_err().unparsable);
        assert!(ClientFrame::decode_binary(&[0, 0, 1, 0, b'{']).unwrap_err().unparsable);
    }

    #[test]
    fn the_type_comes_first_and_pushes_are_compact() {
        let (conversation, from) = (ConversationId::trusted("d:a:b"), UserId::trusted("a"));
        let push =
            encode_push(&conversation, 3, "x\"y", &from, 17, true, &Body::Json(Bytes::from_static(b"{}")));
        assert_eq!(
            &push.json[..],
            br#"{"type":"msg.push","conversation_id":"d:a:b","seq":3,"id":"x\"y","from":"a","ts":17,"redelivered":true,"body":{}}"#
        );
        let ok = ServerFrame::Ok { id: "1", conversation_id: None }.encode();
        assert_eq!(&ok.json[..], br#"{"type":"ok","id":"1"}"#);
    }
}
