//! Groups and their members.

use super::{Outcome, Shared, done, parsed, schema, unexpected};
use crate::{
    answer::{Problem, json},
    body,
    limits::REQUEST_BYTES_MIN,
};
use axum::{
    body::Body,
    extract::{Path, State, rejection::PathRejection},
};
use bowline_protocol::{
    UserId,
    frame::{META_BYTES_MAX, NAME_BYTES_MAX},
    ids::GroupId,
    link::{Answer, Request},
};
use bytes::Bytes;
use http::StatusCode;
use serde::Deserialize;
use serde_json::value::RawValue;
use utoipa::ToSchema;

#[derive(Deserialize, ToSchema)]
pub struct NewGroup<'a> {
    #[schema(value_type = Option<schema::GroupId>)]
    group_id: Option<GroupId>,
    #[schema(value_type = Option<schema::Name>)]
    name: Option<String>,
    #[schema(value_type = Vec<schema::UserId>)]
    members: Vec<UserId>,
    /// One of the members, or another user, who becomes one.
    #[schema(value_type = Option<schema::UserId>)]
    owner: Option<UserId>,
    /// An object of at most 4 KiB.
    #[schema(value_type = Option<Object>)]
    #[serde(borrow)]
    meta: Option<&'a RawValue>,
}
/// Creates a group.
///
/// With a `group_id` that is taken it is refused (409).
#[utoipa::path(
    post,
    path = "/api/v1/groups",
    request_body(content = NewGroup<'_>, content_type = "application/json"),
    responses((status = 201, description = "Created", body = schema::Created), schema::Refusals),
    tag = "groups"
)]
pub async fn create_group(State(api): Shared, body: Body) -> Outcome {
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

#[derive(Deserialize, ToSchema)]
pub struct GroupChange<'a> {
    #[schema(value_type = Option<schema::Name>)]
    name: Option<String>,
    /// An object of at most 4 KiB.
    #[schema(value_type = Option<Object>)]
    #[serde(borrow)]
    meta: Option<&'a RawValue>,
}
/// Changes name, meta or both.
#[utoipa::path(
    patch,
    path = "/api/v1/groups/{id}",
    params(("id" = schema::GroupId, Path)),
    request_body(content = GroupChange<'_>, content_type = "application/json"),
    responses((status = 204, description = "Done"), schema::Refusals),
    tag = "groups"
)]
pub async fn change_group(
    State(api): Shared,
    path: Result<Path<String>, PathRejection>,
    body: Body,
) -> Outcome {
    let group = group_id(&path?.0)?;
    let text = body::read(body, REQUEST_BYTES_MIN).await?;
    let change: GroupChange<'_> = body::parse(&text)?;
    let (name, meta) = (checked_name(change.name)?, checked_meta(change.meta)?);
    if name.is_none() && meta.is_none() {
        return Err(Problem::malformed("give name, meta or both"));
    }
    done(&api, Request::GroupChange { group, name, meta }).await
}
/// Deletes a group with its messages.
#[utoipa::path(
    delete,
    path = "/api/v1/groups/{id}",
    params(("id" = schema::GroupId, Path)),
    responses((status = 204, description = "Done"), schema::Refusals),
    tag = "groups"
)]
pub async fn delete_group(State(api): Shared, path: Result<Path<String>, PathRejection>) -> Outcome {
    done(&api, Request::GroupDelete { group: group_id(&path?.0)? }).await
}
/// Adds a member.
#[utoipa::path(
    put,
    path = "/api/v1/groups/{id}/members/{user}",
    params(("id" = schema::GroupId, Path), ("user" = schema::UserId, Path)),
    responses((status = 204, description = "Done"), schema::Refusals),
    tag = "groups"
)]
pub async fn add_member(State(api): Shared, path: Result<Path<(String, String)>, PathRejection>) -> Outcome {
    let Path((group, user)) = path?;
    done(&api, Request::GroupAdd { group: group_id(&group)?, user: parsed(UserId::parse(&user))? }).await
}
/// Removes a member.
#[utoipa::path(
    delete,
    path = "/api/v1/groups/{id}/members/{user}",
    params(("id" = schema::GroupId, Path), ("user" = schema::UserId, Path)),
    responses((status = 204, description = "Done"), schema::Refusals),
    tag = "groups"
)]
pub async fn remove_member(
    State(api): Shared,
    path: Result<Path<(String, String)>, PathRejection>,
) -> Outcome {
    let Path((group, user)) = path?;
    done(&api, Request::GroupRemove { group: group_id(&group)?, user: parsed(UserId::parse(&user))? }).await
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
