//! Users, their devices and connections.

use super::{Outcome, Shared, done, parsed, schema, unexpected};
use crate::{
    answer::{Problem, json},
    body,
    limits::{REASON_BYTES_MAX, REQUEST_BYTES_MIN},
};
use axum::{
    body::Body,
    extract::{Path, State, rejection::PathRejection},
};
use bowline_protocol::{
    CloseCode, DeviceId, UserId,
    link::{Answer, DeviceState, Request},
};
use http::StatusCode;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use utoipa::ToSchema;

/// Shows a user.
///
/// One that nobody has heard of is not online and has no devices.
#[utoipa::path(
    get,
    path = "/api/v1/users/{id}",
    params(("id" = schema::UserId, Path)),
    responses((status = 200, description = "The user and the devices that are known", body = schema::User), schema::Refusals),
    tag = "users"
)]
pub async fn user(State(api): Shared, path: Result<Path<String>, PathRejection>) -> Outcome {
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

#[derive(Deserialize, Default, ToSchema)]
pub struct Kick {
    #[schema(value_type = Option<schema::DeviceId>)]
    device_id: Option<DeviceId>,
    #[schema(value_type = Option<schema::Reason>)]
    reason: Option<String>,
}

/// Ends a user's connections.
///
/// The body may be left out: then all of them end.
#[utoipa::path(
    post,
    path = "/api/v1/users/{id}/kick",
    params(("id" = schema::UserId, Path)),
    request_body(content = Option<Kick>, content_type = "application/json"),
    responses((status = 200, description = "Their connections end with 4504", body = schema::Closed), schema::Refusals),
    tag = "users"
)]
pub async fn kick(State(api): Shared, path: Result<Path<String>, PathRejection>, body: Body) -> Outcome {
    let user = parsed(UserId::parse(&path?.0))?;
    let text = body::read(body, REQUEST_BYTES_MIN).await?;
    let kick: Kick = if text.trim_ascii().is_empty() { Kick::default() } else { body::parse(&text)? };
    if let Some(reason) = kick.reason.as_ref().filter(|reason| reason.len() > REASON_BYTES_MAX) {
        return Err(Problem::malformed(format!(
            "reason is {} bytes long; a close frame holds {REASON_BYTES_MAX}",
            reason.len()
        )));
    }
    tracing::info!(%user, device = ?kick.device_id, cause = ?kick.reason, "kick asked for over the API");
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
/// Forgets a device.
///
/// Otherwise that happens 30 days after it was last seen.
#[utoipa::path(
    delete,
    path = "/api/v1/users/{id}/devices/{device}",
    params(("id" = schema::UserId, Path), ("device" = schema::DeviceId, Path)),
    responses((status = 204, description = "Done"), schema::Refusals),
    tag = "users"
)]
pub async fn forget_device(
    State(api): Shared,
    path: Result<Path<(String, String)>, PathRejection>,
) -> Outcome {
    let Path((user, device)) = path?;
    let (user, device) = (parsed(UserId::parse(&user))?, parsed(DeviceId::parse(&device))?);
    done(&api, Request::ForgetDevice { user, device }).await
}
