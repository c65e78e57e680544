//! Tokens and sessions: what lets clients in.

use super::{Outcome, Shared, schema};
use crate::{
    Issued, NewSession, NewToken, Revoke,
    answer::{Problem, json},
    body,
    limits::{
        EXPIRES_AT_MAX, REQUEST_BYTES_MIN, ROOM_BYTES_MAX, TOKEN_NAME_BYTES_MAX, TOKEN_ROOMS_MAX,
        TOKEN_TTL_MS_DEFAULT, TOKEN_TTL_MS_MAX,
    },
};
use axum::{body::Body, extract::State, response::IntoResponse};
use bowline_protocol::{DeviceId, ErrorCode, Millis, UserId, error::Refusal};
use http::StatusCode;
use serde::Deserialize;
use utoipa::ToSchema;

const _: () = assert!(TOKEN_TTL_MS_MAX == 315_360_000_000 && TOKEN_ROOMS_MAX == 1000);

#[derive(Deserialize, ToSchema)]
pub struct TokenFields {
    #[schema(value_type = schema::UserId)]
    user: UserId,
    /// The only device that it is good for.
    #[schema(value_type = Option<schema::DeviceId>)]
    device_id: Option<DeviceId>,
    /// An hour when it is left out, ten years at most.
    #[schema(minimum = 1, maximum = 315_360_000_000_u64)]
    ttl_ms: Option<u64>,
    /// The rooms that it may join.
    #[schema(value_type = Option<Vec<schema::RoomPattern>>, max_items = 1000)]
    rooms: Option<Vec<Box<str>>>,
}
/// Makes a token, with a session of its own.
///
/// Where Bowline cannot sign (no `auth.secret`) it is refused (409).
#[utoipa::path(
    post,
    path = "/api/v1/tokens",
    request_body(content = TokenFields, content_type = "application/json"),
    responses((status = 200, description = "The token and its session", body = Issued), schema::Refusals),
    tag = "tokens"
)]
pub async fn issue_token(State(api): Shared, body: Body) -> Outcome {
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

#[derive(Deserialize, ToSchema)]
pub struct SessionFields {
    #[schema(value_type = schema::UserId)]
    user: UserId,
    #[schema(value_type = schema::TokenName)]
    sid: Box<str>,
    #[schema(value_type = u64, maximum = 9_223_372_036_854_775_807_u64)]
    expires_at: Millis,
}
/// Opens a session that tokens may name.
///
/// What `auth.sessions = "required"` asks for.
#[utoipa::path(
    post,
    path = "/api/v1/sessions",
    request_body(content = SessionFields, content_type = "application/json"),
    responses((status = 204, description = "Opened"), schema::Refusals),
    tag = "tokens"
)]
pub async fn open_session(State(api): Shared, body: Body) -> Outcome {
    let text = body::read(body, REQUEST_BYTES_MIN).await?;
    let SessionFields { user, sid, expires_at } = body::parse(&text)?;
    let sid = checked_token_name("sid", sid)?;
    if expires_at > EXPIRES_AT_MAX {
        return Err(Problem::malformed(format!(
            "expires_at is {expires_at}; it takes at most {EXPIRES_AT_MAX}"
        )));
    }
    blocking(move || api.access.open_session(NewSession { user, sid, expires_at })).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

#[derive(Deserialize, ToSchema)]
pub struct RevokeFields {
    #[schema(value_type = Option<schema::TokenName>)]
    jti: Option<Box<str>>,
    #[schema(value_type = Option<schema::TokenName>)]
    sid: Option<Box<str>>,
    #[schema(value_type = Option<schema::UserId>)]
    user: Option<UserId>,
}
/// Takes tokens back.
///
/// Exactly one of `jti`, `sid` and `user`; the last means all that were issued until now.
#[utoipa::path(
    post,
    path = "/api/v1/tokens/revoke",
    request_body(content = RevokeFields, content_type = "application/json"),
    responses((status = 200, description = "Their connections end with 4503", body = schema::Closed), schema::Refusals),
    tag = "tokens"
)]
pub async fn revoke(State(api): Shared, body: Body) -> Outcome {
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
