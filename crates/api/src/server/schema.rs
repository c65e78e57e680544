//! What the description of the API says beyond the handlers: texts with bounds, answers, refusals, keys.

use super::messages::Stored;
use crate::limits::{MESSAGES_MAX, REASON_BYTES_MAX, ROOM_BYTES_MAX, TOKEN_NAME_BYTES_MAX};
use bowline_protocol::{ErrorCode, frame::NAME_BYTES_MAX, ids::ID_BYTES_MAX};
use serde_json::Value;
use std::{borrow::Cow, collections::BTreeMap};
use utoipa::{
    IntoResponses, Modify, OpenApi, PartialSchema, ToSchema,
    openapi::{
        ArrayBuilder, ContentBuilder, HeaderBuilder, Object, ObjectBuilder, Ref, RefOr, Response,
        ResponseBuilder, Schema,
        schema::Type,
        security::{ApiKey, ApiKeyValue, HttpAuthScheme, HttpBuilder, SecurityScheme},
    },
};

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Bowline server API",
        description = "For application back ends and operators. Refusals are `{\"code\", \"message\"}`; \
            sizes of texts are in bytes of UTF-8, times in milliseconds since 1970."
    ),
    // Those that stand in paths only are not found by themselves.
    components(schemas(RoomName)),
    modifiers(&Keys),
    security(("bearer" = []), ("api_key" = []))
)]
pub struct Description;

struct Keys;

impl Modify for Keys {
    fn modify(&self, openapi: &mut utoipa::openapi::OpenApi) {
        let components = openapi.components.get_or_insert_default();
        let bearer = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).description(Some("`api.key`")).build();
        components.add_security_scheme("bearer", SecurityScheme::Http(bearer));
        let header = ApiKeyValue::with_description("X-API-Key", "`api.key`");
        components.add_security_scheme("api_key", SecurityScheme::ApiKey(ApiKey::Header(header)));
    }
}

/// A type that is a text with bounds.
macro_rules! texts {
    ($($name:ident: $max:expr, $pattern:expr, $description:expr;)*) => {$(
        pub struct $name;

        impl PartialSchema for $name {
            fn schema() -> RefOr<Schema> {
                let pattern: Option<&str> = $pattern;
                text($max).pattern(pattern).description(Some($description)).build().into()
            }
        }

        impl ToSchema for $name {
            fn name() -> Cow<'static, str> {
                stringify!($name).into()
            }
        }
    )*};
}

fn text(bytes_max: usize) -> ObjectBuilder {
    ObjectBuilder::new().schema_type(Type::String).min_length(Some(1)).max_length(Some(bytes_max))
}

const ID: Option<&str> = Some(r"^[^:\u0000-\u001f\u007f-\u009f]+$");

const CONVERSATION: &str =
    r"^(d:[^:\u0000-\u001f\u007f-\u009f]{1,64}:|g:)[^:\u0000-\u001f\u007f-\u009f]{1,64}$";

texts! {
    UserId: ID_BYTES_MAX, ID, "1 to 64 bytes without `:` and control characters";
    DeviceId: ID_BYTES_MAX, ID, "1 to 64 bytes without `:` and control characters";
    GroupId: ID_BYTES_MAX, ID, "Without `g:`; 1 to 64 bytes without `:` and control characters";
    MessageId: ID_BYTES_MAX, None, "Unique among all messages of this sender; the same id again is the same message";
    ConversationId: 2 * ID_BYTES_MAX + 3, Some(CONVERSATION), "`d:<user>:<user>`, the users in byte order, or `g:<group id>`";
    RoomName: ROOM_BYTES_MAX, Some(r"^[^\u0000-\u001f\u007f-\u009f]+$"), "1 to 128 bytes without control characters";
    TokenName: TOKEN_NAME_BYTES_MAX, None, "`jti` or `sid` of a token";
    RoomPattern: ROOM_BYTES_MAX, None, "The name of a room, or the beginning of names and `*`";
}

/// Texts that may be empty.
macro_rules! free_texts {
    ($($name:ident: $max:expr, $description:expr;)*) => {$(
        pub struct $name;

        impl PartialSchema for $name {
            fn schema() -> RefOr<Schema> {
                text($max).min_length(None).description(Some($description)).build().into()
            }
        }

        impl ToSchema for $name {
            fn name() -> Cow<'static, str> {
                stringify!($name).into()
            }
        }
    )*};
}

free_texts! {
    Name: NAME_BYTES_MAX, "At most 256 bytes";
    Reason: REASON_BYTES_MAX, "What the clients are told, at most 123 bytes";
}

/// A refusal: what was asked is not done.
#[derive(ToSchema)]
#[allow(dead_code)]
pub struct Refusal {
    code: Code,
    /// What happened, and what to do about it.
    message: String,
    /// With 429 and 503: when to send the same again.
    retry_after_ms: Option<u64>,
}

pub struct Code;

impl PartialSchema for Code {
    fn schema() -> RefOr<Schema> {
        let codes = ErrorCode::ALL.map(ErrorCode::as_str);
        ObjectBuilder::new().schema_type(Type::String).enum_values(Some(codes)).build().into()
    }
}

impl ToSchema for Code {
    fn name() -> Cow<'static, str> {
        "ErrorCode".into()
    }
}

/// What every endpoint behind the key may answer.
pub struct KeyRefusals;

impl IntoResponses for KeyRefusals {
    fn responses() -> BTreeMap<String, RefOr<Response>> {
        refusals(&[(401, "The key is missing or wrong")])
    }
}

/// What endpoints that ask the router or the store may answer beside.
pub struct Refusals;

impl IntoResponses for Refusals {
    fn responses() -> BTreeMap<String, RefOr<Response>> {
        refusals(&[
            (400, "The request is malformed"),
            (401, "The key is missing or wrong"),
            (403, "It is not allowed"),
            (404, "There is no such thing"),
            (409, "It contradicts what there is"),
            (413, "It is above a limit"),
            (429, "Too many; later again"),
            (503, "It cannot be done now; later again"),
        ])
    }
}

fn refusals(rows: &[(u16, &str)]) -> BTreeMap<String, RefOr<Response>> {
    let refusal: RefOr<Schema> = Ref::from_schema_name("Refusal").into();
    let rows = rows.iter().map(|(status, meaning)| {
        let content = ContentBuilder::new().schema(Some(refusal.clone())).build();
        let mut response = ResponseBuilder::new().description(*meaning).content("application/json", content);
        if matches!(status, 429 | 503) {
            let seconds = Object::builder().schema_type(Type::Integer).minimum(Some(1)).build();
            let header = HeaderBuilder::new().schema(Some(seconds)).description(Some("In seconds"));
            response = response.header("Retry-After", header.build());
        }
        (status.to_string(), response.build().into())
    });
    rows.collect()
}

/// One message, or a list of them.
#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code)]
pub enum NewMessages {
    One(NewMessage),
    /// The same, up to 1,000; one that is not sound is refused in its place.
    Many(Vec<Value>),
}

/// What became of one message of a list.
#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code)]
pub enum Sent {
    Stored(Stored),
    Refused(Refusal),
}

/// Exactly one of `to` and `conversation_id`.
#[derive(ToSchema)]
#[allow(dead_code)]
pub struct NewMessage {
    id: MessageId,
    from: UserId,
    to: Option<UserId>,
    conversation_id: Option<String>,
    /// Any JSON; with `body_encoding`, bytes in Base64.
    body: Value,
    body_encoding: Option<Encoding>,
}

/// One message, or a list of 1 to 1,000.
#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code)]
pub enum NewRoomMessages {
    One(NewRoomMessage),
    Many(NewRoomMessageList),
}

pub struct NewRoomMessageList;

impl PartialSchema for NewRoomMessageList {
    fn schema() -> RefOr<Schema> {
        let items: RefOr<Schema> = Ref::from_schema_name("NewRoomMessage").into();
        ArrayBuilder::new().items(items).min_items(Some(1)).max_items(Some(MESSAGES_MAX)).build().into()
    }
}

impl ToSchema for NewRoomMessageList {
    fn name() -> Cow<'static, str> {
        "NewRoomMessageList".into()
    }
}

#[derive(ToSchema)]
#[allow(dead_code)]
pub struct NewRoomMessage {
    /// Who says it; left out for the application itself.
    from: Option<UserId>,
    /// Any JSON; with `body_encoding`, bytes in Base64.
    body: Value,
    body_encoding: Option<Encoding>,
}

#[derive(ToSchema)]
#[allow(dead_code)]
pub struct Published {
    offset: u64,
}

#[derive(ToSchema)]
#[serde(rename_all = "snake_case")]
#[allow(dead_code)]
pub enum Encoding {
    Base64,
}

/// A page of a conversation, in ascending order.
#[derive(ToSchema)]
#[allow(dead_code)]
pub struct HistoryPage {
    conversation_id: ConversationId,
    /// The first number that there is.
    first_seq: u64,
    messages: Vec<Message>,
    /// There is more in the direction that was asked for.
    more: bool,
}

#[derive(ToSchema)]
#[allow(dead_code)]
pub struct Message {
    seq: u64,
    id: MessageId,
    from: UserId,
    ts: u64,
    body: Value,
    #[schema(nullable = false)]
    body_encoding: Option<Encoding>,
}

#[derive(ToSchema)]
#[allow(dead_code)]
pub struct Created {
    conversation_id: ConversationId,
}

#[derive(ToSchema)]
#[allow(dead_code)]
pub struct Closed {
    /// Open connections that were ended.
    closed: u64,
}

#[derive(ToSchema)]
#[allow(dead_code)]
pub struct User {
    user_id: UserId,
    online: bool,
    devices: Vec<Device>,
}

#[derive(ToSchema)]
#[allow(dead_code)]
pub struct Device {
    device_id: DeviceId,
    #[schema(nullable = false)]
    device_class: Option<String>,
    /// Where it is connected now, and since when.
    #[schema(nullable = false)]
    node_id: Option<String>,
    #[schema(nullable = false)]
    connected_at: Option<u64>,
    last_seen: u64,
}

#[derive(ToSchema)]
#[allow(dead_code)]
pub struct Health {
    status: String,
}

#[derive(ToSchema)]
#[allow(dead_code)]
pub struct NotReady {
    code: Code,
    message: String,
    reasons: Vec<String>,
}
