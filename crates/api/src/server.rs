//! The server API: `docs/protocol.md`, "Server API". On its own listener, behind a key.

use crate::{
    Access, NewSession, NewToken, Node, Requests, Revoke,
    answer::{Problem, json, raw_json, unknown_route, wrong_method},
    body,
    limits::{
        MESSAGES_MAX, REASON_BYTES_MAX, REQUEST_BYTES_MIN, ROOM_BYTES_MAX, TOKEN_NAME_BYTES_MAX,
        TOKEN_ROOMS_MAX, TOKEN_TTL_MS_DEFAULT, TOKEN_TTL_MS_MAX,
    },
    message::Message,
};
use axum::{
    Router,
    body::Body,
    extract::{
        Path, Query, Request as HttpRequest, State,
        rejection::{PathRejection, QueryRejection},
    },
    middleware::{Next, from_fn, from_fn_with_state},
    response::{IntoResponse, Response},
    routing::{delete, get, post, put},
};
use bowline_protocol::{
    CloseCode, ConversationId, DeviceId, ErrorCode, Millis, Seq, UserId,
    error::Refusal,
    frame::{META_BYTES_MAX, NAME_BYTES_MAX, PAGE_LIMIT_DEFAULT, PAGE_LIMIT_MAX},
    ids::{self, GroupId},
    link::{Answer, DeviceState, Request, Send},
};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, StatusCode, header};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use std::{io, sync::Arc};
use tokio::net::TcpListener;

/// What the server API needs to know.
pub struct Config {
    /// `api.key`: whoever has it may do everything.
    pub key: String,
    /// `gateway.max_frame_bytes`: the limit of one message.
    pub max_frame_bytes: usize,
}

struct Api {
    config: Config,
    requests: Requests,
    node: Arc<dyn Node>,
    access: Arc<dyn Access>,
}

type Shared = State<Arc<Api>>;
type Outcome = Result<Response, Problem>;

/// Serves until the task is dropped.
pub async fn serve(
    listener: TcpListener,
    config: Config,
    requests: Requests,
    node: Arc<dyn Node>,
    access: Arc<dyn Access>,
) -> io::Result<()> {
    axum::serve(listener, routes(config, requests, node, access)).await
}

pub fn routes(config: Config, requests: Requests, node: Arc<dyn Node>, access: Arc<dyn Access>) -> Router {
    let api = Arc::new(Api { config, requests, node, access });
    Router::new()
        .route("/api/v1/messages", post(send))
        .route("/api/v1/groups", post(create_group))
        .route("/api/v1/groups/{id}", axum::routing::patch(change_group).delete(delete_group))
        .route("/api/v1/groups/{id}/members/{user}", put(add_member).delete(remove_member))
        .route("/api/v1/conversations/{id}/messages", get(history))
        .route("/api/v1/users/{id}", get(user))
        .route("/api/v1/users/{id}/kick", post(kick))
        .route("/api/v1/users/{id}/devices/{device}", delete(forget_device))
        .route("/api/v1/tokens", post(issue_token))
        .route("/api/v1/tokens/revoke", post(revoke))
        .route("/api/v1/sessions", post(open_session))
        .route("/admin/status", get(status))
        .route("/admin/drain", post(drain))
        .route("/healthz", get(healthz))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics))
        .fallback(unknown_route)
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn_with_state(api.clone(), check_key))
        .layer(from_fn(body::read_out))
        .with_state(api)
}

async fn check_key(State(api): Shared, request: HttpRequest, next: Next) -> Response {
    let open = matches!(request.uri().path(), "/healthz" | "/readyz");
    if open || has_key(request.headers(), &api.config.key) {
        return next.run(request).await;
    }
    let message = "this needs the key of the API: Authorization: Bearer <api.key>, or X-API-Key: <api.key>";
    Problem::new(ErrorCode::Unauthenticated, message).into_response()
}

fn has_key(headers: &HeaderMap, key: &str) -> bool {
    let named = headers.get("x-api-key").map(HeaderValue::as_bytes);
    let bearer = headers.get(header::AUTHORIZATION).and_then(bearer);
    [named, bearer].into_iter().flatten().any(|given| is_equal(given, key.as_bytes()))
}

pub(crate) fn bearer(value: &HeaderValue) -> Option<&[u8]> {
    let (scheme, rest) = value.as_bytes().split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then(|| rest.trim_ascii())
}

/// Takes as long whatever the first difference is; only the length shows.
fn is_equal(one: &[u8], other: &[u8]) -> bool {
    let differing = one.iter().zip(other).fold(0, |sum, (a, b)| sum | (a ^ b));
    one.len() == other.len() && std::hint::black_box(differing) == 0
}

// Messages

#[derive(Serialize)]
struct Stored {
    conversation_id: ConversationId,
    seq: Seq,
    ts: Millis,
}

async fn send(State(api): Shared, body: Body) -> Outcome {
    let limit = REQUEST_BYTES_MIN.max(MESSAGES_MAX * (api.config.max_frame_bytes + 1024));
    let text = body::read(body, limit).await?;
    if text.iter().find(|b| !b.is_ascii_whitespace()) == Some(&b'[') {
        return send_all(&api, &text).await;
    }
    let request = parse_send(&text, api.config.max_frame_bytes)?;
    match api.requests.ask(request).await? {
        Answer::Stored { conversation_id, seq, ts } => {
            Ok(json(StatusCode::OK, &Stored { conversation_id, seq, ts }))
        }
        other => Err(unexpected(&other)),
    }
}

/// Those that are sound go to the router together and in order; the others are answered here.
async fn send_all(api: &Api, text: &[u8]) -> Outcome {
    #[derive(Serialize)]
    struct Results {
        results: Vec<serde_json::Value>,
    }
    let items: Vec<&RawValue> =
        serde_json::from_slice(text).map_err(|error| Problem::malformed(format!("the body: {error}")))?;
    if items.len() > MESSAGES_MAX {
        let message = format!("the array holds {} messages; one request takes {MESSAGES_MAX}", items.len());
        return Err(Problem::new(ErrorCode::TooLarge, message));
    }
    let mut requests = Vec::with_capacity(items.len());
    let faults: Vec<Option<Problem>> = items
        .iter()
        .map(|item| match parse_send(item.get().as_bytes(), api.config.max_frame_bytes) {
            Ok(request) => {
                requests.push(request);
                None
            }
            Err(problem) => Some(problem),
        })
        .collect();
    let mut answers = api.requests.ask_all(requests).await.into_iter();
    let results = faults
        .into_iter()
        .map(|fault| match fault {
            Some(problem) => serde_json::to_value(problem.0),
            None => match answers.next() {
                Some(Ok(Answer::Stored { conversation_id, seq, ts })) => {
                    serde_json::to_value(Stored { conversation_id, seq, ts })
                }
                Some(Err(refusal)) => serde_json::to_value(refusal),
                Some(Ok(other)) => serde_json::to_value(unexpected(&other).0),
                None => serde_json::to_value(Problem::new(ErrorCode::Internal, "no answer").0),
            },
        })
        .collect::<Result<_, _>>()
        .map_err(|error| Problem::new(ErrorCode::Internal, error.to_string()))?;
    Ok(json(StatusCode::OK, &Results { results }))
}

fn parse_send(text: &[u8], bytes_max: usize) -> Result<Request, Problem> {
    let message = Message::parse(text, bytes_max)?;
    let from = message.from.ok_or_else(|| Problem::malformed("from is missing: who sends this?"))?;
    Ok(Request::Send(Send { id: message.id, from, target: message.target, body: message.body }))
}

// Groups

#[derive(Deserialize)]
struct NewGroup<'a> {
    group_id: Option<GroupId>,
    name: Option<String>,
    members: Vec<UserId>,
    owner: Option<UserId>,
    #[serde(borrow)]
    meta: Option<&'a RawValue>,
}

async fn create_group(State(api): Shared, body: Body) -> Outcome {
    let text = body::read(body, REQUEST_BYTES_MIN).await?;
    let group: NewGroup<'_> = body::parse(&text)?;
    let request = Request::GroupCreate {
        group_id: group.group_id,
        name: checked_name(group.name)?,
        members: group.members,
        owner: group.owner,
        meta: checked_meta(group.meta)?,
    };
    match api.requests.ask(request).await? {
        Answer::Created { conversation_id } => {
            Ok(json(StatusCode::CREATED, &serde_json::json!({ "conversation_id": conversation_id })))
        }
        other => Err(unexpected(&other)),
    }
}

#[derive(Deserialize)]
struct GroupChange<'a> {
    name: Option<String>,
    #[serde(borrow)]
    meta: Option<&'a RawValue>,
}

async fn change_group(State(api): Shared, path: Result<Path<String>, PathRejection>, body: Body) -> Outcome {
    let group = group_id(&path?.0)?;
    let text = body::read(body, REQUEST_BYTES_MIN).await?;
    let change: GroupChange<'_> = body::parse(&text)?;
    let (name, meta) = (checked_name(change.name)?, checked_meta(change.meta)?);
    if name.is_none() && meta.is_none() {
        return Err(Problem::malformed("give name, meta or both"));
    }
    done(&api, Request::GroupChange { group, name, meta }).await
}

async fn delete_group(State(api): Shared, path: Result<Path<String>, PathRejection>) -> Outcome {
    done(&api, Request::GroupDelete { group: group_id(&path?.0)? }).await
}

async fn add_member(State(api): Shared, path: Result<Path<(String, String)>, PathRejection>) -> Outcome {
    let Path((group, user)) = path?;
    done(&api, Request::GroupAdd { group: group_id(&group)?, user: parsed(UserId::parse(&user))? }).await
}

async fn remove_member(State(api): Shared, path: Result<Path<(String, String)>, PathRejection>) -> Outcome {
    let Path((group, user)) = path?;
    done(&api, Request::GroupRemove { group: group_id(&group)?, user: parsed(UserId::parse(&user))? }).await
}

/// A request whose answer is 204.
async fn done(api: &Api, request: Request) -> Outcome {
    match api.requests.ask(request).await? {
        Answer::Done => Ok(StatusCode::NO_CONTENT.into_response()),
        other => Err(unexpected(&other)),
    }
}

fn group_id(text: &str) -> Result<GroupId, Problem> {
    parsed(GroupId::parse(text))
}

fn checked_name(name: Option<String>) -> Result<Option<String>, Problem> {
    match name {
        Some(name) if name.len() > NAME_BYTES_MAX => Err(Problem::malformed(format!(
            "name is {} bytes long; it takes at most {NAME_BYTES_MAX}",
            name.len()
        ))),
        name => Ok(name),
    }
}

fn checked_meta(meta: Option<&RawValue>) -> Result<Option<Bytes>, Problem> {
    match meta.map(RawValue::get) {
        None | Some("null") => Ok(None),
        Some(text) if !text.starts_with('{') => Err(Problem::malformed("meta is no object")),
        Some(text) if text.len() > META_BYTES_MAX => Err(Problem::malformed(format!(
            "meta is {} bytes long; it takes at most {META_BYTES_MAX}",
            text.len()
        ))),
        Some(text) => Ok(Some(Bytes::copy_from_slice(text.as_bytes()))),
    }
}

// Conversations and users

#[derive(Deserialize)]
struct Page {
    after_seq: Option<Seq>,
    before_seq: Option<Seq>,
    limit: Option<u32>,
}

async fn history(
    State(api): Shared,
    path: Result<Path<String>, PathRejection>,
    query: Result<Query<Page>, QueryRejection>,
) -> Outcome {
    let conversation = parsed(ConversationId::parse(&path?.0))?;
    let page = query.map_err(|error| Problem::malformed(error.body_text()))?.0;
    if page.after_seq.is_some() && page.before_seq.is_some() {
        return Err(Problem::malformed("give after_seq or before_seq, not both"));
    }
    let limit = page.limit.unwrap_or(PAGE_LIMIT_DEFAULT);
    if !(1..=PAGE_LIMIT_MAX).contains(&limit) {
        return Err(Problem::malformed(format!("limit is {limit}; it takes 1 to {PAGE_LIMIT_MAX}")));
    }
    let request = Request::History { conversation, after: page.after_seq, before: page.before_seq, limit };
    match api.requests.ask(request).await? {
        Answer::Page(text) => Ok(raw_json(StatusCode::OK, text)),
        other => Err(unexpected(&other)),
    }
}

async fn user(State(api): Shared, path: Result<Path<String>, PathRejection>) -> Outcome {
    #[derive(Serialize)]
    struct Answered {
        user_id: UserId,
        online: bool,
        devices: Vec<DeviceState>,
    }
    let user = parsed(UserId::parse(&path?.0))?;
    match api.requests.ask(Request::User { user: user.clone() }).await? {
        Answer::User { online, devices } => {
            Ok(json(StatusCode::OK, &Answered { user_id: user, online, devices }))
        }
        other => Err(unexpected(&other)),
    }
}

#[derive(Deserialize, Default)]
struct Kick {
    device_id: Option<DeviceId>,
    reason: Option<String>,
}

/// The body may be left out: then all of the user's connections end.
async fn kick(State(api): Shared, path: Result<Path<String>, PathRejection>, body: Body) -> Outcome {
    let user = parsed(UserId::parse(&path?.0))?;
    let text = body::read(body, REQUEST_BYTES_MIN).await?;
    let kick: Kick = if text.trim_ascii().is_empty() { Kick::default() } else { body::parse(&text)? };
    if let Some(reason) = kick.reason.as_ref().filter(|reason| reason.len() > REASON_BYTES_MAX) {
        return Err(Problem::malformed(format!(
            "reason is {} bytes long; a close frame holds {REASON_BYTES_MAX}",
            reason.len()
        )));
    }
    let request = Request::Kick {
        user,
        device: kick.device_id,
        reason: kick.reason.map(Arc::from),
        code: CloseCode::Kicked,
    };
    match api.requests.ask(request).await? {
        Answer::Closed { count } => Ok(json(StatusCode::OK, &serde_json::json!({ "closed": count }))),
        other => Err(unexpected(&other)),
    }
}

async fn forget_device(State(api): Shared, path: Result<Path<(String, String)>, PathRejection>) -> Outcome {
    let Path((user, device)) = path?;
    let (user, device) = (parsed(UserId::parse(&user))?, parsed(DeviceId::parse(&device))?);
    done(&api, Request::ForgetDevice { user, device }).await
}

// Tokens

#[derive(Deserialize)]
struct TokenFields {
    user: UserId,
    device_id: Option<DeviceId>,
    ttl_ms: Option<u64>,
    rooms: Option<Vec<Box<str>>>,
}

async fn issue_token(State(api): Shared, body: Body) -> Outcome {
    let text = body::read(body, REQUEST_BYTES_MIN).await?;
    let fields: TokenFields = body::parse(&text)?;
    let ttl_ms = fields.ttl_ms.unwrap_or(TOKEN_TTL_MS_DEFAULT);
    if !(1..=TOKEN_TTL_MS_MAX).contains(&ttl_ms) {
        return Err(Problem::malformed(format!("ttl_ms is {ttl_ms}; it takes 1 to {TOKEN_TTL_MS_MAX}")));
    }
    let rooms = fields.rooms.as_deref().unwrap_or_default();
    if rooms.len() > TOKEN_ROOMS_MAX || rooms.iter().any(|room| !(1..=ROOM_BYTES_MAX).contains(&room.len())) {
        return Err(Problem::malformed(format!(
            "rooms takes up to {TOKEN_ROOMS_MAX} names of 1 to {ROOM_BYTES_MAX} bytes"
        )));
    }
    let wanted = NewToken { user: fields.user, device: fields.device_id, ttl_ms, rooms: fields.rooms };
    let issued = blocking(move || api.access.issue(wanted)).await?;
    Ok(json(StatusCode::OK, &issued))
}

#[derive(Deserialize)]
struct SessionFields {
    user: UserId,
    sid: Box<str>,
    expires_at: Millis,
}

async fn open_session(State(api): Shared, body: Body) -> Outcome {
    let text = body::read(body, REQUEST_BYTES_MIN).await?;
    let SessionFields { user, sid, expires_at } = body::parse(&text)?;
    let sid = checked_token_name("sid", sid)?;
    blocking(move || api.access.open_session(NewSession { user, sid, expires_at })).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

#[derive(Deserialize)]
struct RevokeFields {
    jti: Option<Box<str>>,
    sid: Option<Box<str>>,
    user: Option<UserId>,
}

async fn revoke(State(api): Shared, body: Body) -> Outcome {
    let text = body::read(body, REQUEST_BYTES_MIN).await?;
    let target = match body::parse(&text)? {
        RevokeFields { jti: Some(id), sid: None, user: None } => {
            Revoke::Token(checked_token_name("jti", id)?)
        }
        RevokeFields { jti: None, sid: Some(id), user: None } => {
            Revoke::Session(checked_token_name("sid", id)?)
        }
        RevokeFields { jti: None, sid: None, user: Some(user) } => Revoke::User(user),
        _ => return Err(Problem::malformed("give exactly one of jti, sid and user")),
    };
    let closed = blocking(move || api.access.revoke(target)).await?;
    Ok(json(StatusCode::OK, &serde_json::json!({ "closed": closed })))
}

fn checked_token_name(name: &str, text: Box<str>) -> Result<Box<str>, Problem> {
    match text.len() {
        1..=TOKEN_NAME_BYTES_MAX => Ok(text),
        bytes => Err(Problem::malformed(format!(
            "{name} is {bytes} bytes long; it takes 1 to {TOKEN_NAME_BYTES_MAX}"
        ))),
    }
}

/// Runs what writes to the store on a thread that may wait.
async fn blocking<T: std::marker::Send + 'static>(
    action: impl FnOnce() -> Result<T, Refusal> + std::marker::Send + 'static,
) -> Result<T, Problem> {
    match tokio::task::spawn_blocking(action).await {
        Ok(result) => result.map_err(Problem),
        Err(_) => Err(Problem::new(ErrorCode::Internal, "the request failed; see the server's log")),
    }
}

// The node

async fn status(State(api): Shared) -> Response {
    json(StatusCode::OK, &api.node.status())
}

#[derive(Deserialize)]
struct DrainQuery {
    reason: Option<String>,
}

async fn drain(State(api): Shared, query: Result<Query<DrainQuery>, QueryRejection>) -> Outcome {
    let query = query.map_err(|error| Problem::malformed(error.body_text()))?.0;
    let reason = query.reason.as_deref().filter(|reason| !reason.is_empty()).unwrap_or("drain");
    if reason.len() > REASON_BYTES_MAX {
        return Err(Problem::malformed(format!(
            "reason is {} bytes long; it takes at most {REASON_BYTES_MAX}",
            reason.len()
        )));
    }
    api.node.drain(reason);
    Ok(json(StatusCode::ACCEPTED, &api.node.status()))
}

async fn healthz() -> Response {
    json(StatusCode::OK, &serde_json::json!({ "status": "ok" }))
}

async fn readyz(State(api): Shared) -> Response {
    match api.node.readiness() {
        Ok(()) => json(StatusCode::OK, &serde_json::json!({ "status": "ready" })),
        Err(reasons) => json(
            StatusCode::SERVICE_UNAVAILABLE,
            &serde_json::json!({
                "code": ErrorCode::Unavailable,
                "message": format!("not ready: {}", reasons.join("; ")),
                "reasons": reasons,
            }),
        ),
    }
}

/// Reads the ledger from the store, so it is kept off the threads that serve.
async fn metrics(State(api): Shared) -> Outcome {
    const FORMAT: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    let text = tokio::task::spawn_blocking(move || api.node.metrics())
        .await
        .map_err(|_| Problem::new(ErrorCode::Internal, "metrics cannot be collected; see the log"))?;
    Ok(([(header::CONTENT_TYPE, FORMAT)], text).into_response())
}

impl From<PathRejection> for Problem {
    fn from(rejection: PathRejection) -> Self {
        Self::malformed(rejection.body_text())
    }
}

fn parsed<T>(result: Result<T, ids::Error>) -> Result<T, Problem> {
    result.map_err(|error| Problem::malformed(error.to_string()))
}

fn unexpected(answer: &Answer) -> Problem {
    tracing::error!(?answer, "the router answered something else than was asked");
    Problem::new(ErrorCode::Internal, "the router answered something else than was asked; see the log")
}
