//! Messages: sending and reading.

use super::{Api, Outcome, Shared, parsed, schema, unexpected};
use crate::{
    answer::{Problem, json, raw_json},
    body,
    limits::{MESSAGES_MAX, REQUEST_BYTES_MIN},
    message::Message,
};
use axum::{
    body::Body,
    extract::{
        Path, Query, State,
        rejection::{PathRejection, QueryRejection},
    },
};
use bowline_protocol::{
    ConversationId, ErrorCode, Millis, Seq,
    error::Refusal,
    frame::{PAGE_LIMIT_DEFAULT, PAGE_LIMIT_MAX},
    link::{Answer, Request, Send},
};
use http::StatusCode;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::{IntoParams, ToSchema};

/// Stored, and will be delivered.
#[derive(Serialize, ToSchema)]
pub struct Stored {
    #[schema(value_type = schema::ConversationId)]
    conversation_id: ConversationId,
    #[schema(value_type = u64)]
    seq: Seq,
    #[schema(value_type = u64)]
    ts: Millis,
}

/// What became of one message of a list.
#[derive(Serialize)]
#[serde(untagged)]
enum Sent {
    Stored(Stored),
    Refused(Refusal),
}

#[derive(Serialize, ToSchema)]
pub struct Results {
    #[schema(value_type = Vec<schema::Sent>)]
    results: Vec<Sent>,
}

#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code)]
enum SentAnswer {
    One(Stored),
    Many(Results),
}
/// Sends messages.
///
/// A list of up to 1,000 messages is answered with `results`, for each what it would have been answered alone.
#[utoipa::path(
    post,
    path = "/api/v1/messages",
    request_body(content = schema::NewMessages, content_type = "application/json"),
    responses((status = 200, description = "Stored; for a list, each in its place", body = SentAnswer), schema::Refusals),
    tag = "messages"
)]
pub async fn send(State(api): Shared, body: Body) -> Outcome {
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
            Some(problem) => Sent::Refused(problem.0),
            None => match answers.next() {
                Some(Ok(Answer::Stored { conversation_id, seq, ts })) => {
                    Sent::Stored(Stored { conversation_id, seq, ts })
                }
                Some(Err(refusal)) => Sent::Refused(refusal),
                Some(Ok(other)) => Sent::Refused(unexpected(&other).0),
                None => Sent::Refused(Refusal::new(ErrorCode::Internal, "no answer")),
            },
        })
        .collect();
    Ok(json(StatusCode::OK, &Results { results }))
}

fn parse_send(text: &[u8], bytes_max: usize) -> Result<Request, Problem> {
    let message = Message::parse(text, bytes_max)?;
    let from = message.from.ok_or_else(|| Problem::malformed("from is missing: who sends this?"))?;
    Ok(Request::Send(Send { id: message.id, from, target: message.target, body: message.body }))
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct Page {
    #[param(value_type = Option<u64>, nullable = false)]
    after_seq: Option<Seq>,
    #[param(value_type = Option<u64>, nullable = false)]
    before_seq: Option<Seq>,
    /// 50 when it is left out.
    #[param(minimum = 1, maximum = 200, nullable = false)]
    limit: Option<u32>,
}
/// Reads messages of a conversation.
///
/// Without `after_seq` and `before_seq` the newest; both together are malformed.
#[utoipa::path(
    get,
    path = "/api/v1/conversations/{id}/messages",
    params(("id" = schema::ConversationId, Path), Page),
    responses((status = 200, description = "A page", body = schema::HistoryPage), schema::Refusals),
    tag = "messages"
)]
pub async fn history(
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
