//! Publishing in rooms.

use super::{Outcome, Shared, parsed, schema};
use crate::{
    RoomMessage,
    answer::{Problem, json},
    body,
    limits::{MESSAGES_MAX, REQUEST_BYTES_MIN},
    message::{present, read_body, within_frame},
};
use axum::{
    body::Body,
    extract::{Path, State, rejection::PathRejection},
};
use bowline_protocol::{ErrorCode, UserId, ids::RoomName};
use http::StatusCode;
use serde::Deserialize;
use serde_json::value::RawValue;

#[derive(Deserialize)]
struct Fields<'a> {
    from: Option<UserId>,
    #[serde(borrow, default, deserialize_with = "present")]
    body: Option<&'a RawValue>,
    body_encoding: Option<String>,
}

/// Publishes messages in a room.
///
/// A list of up to 1,000 messages is published as a whole or not at all, one after the other.
#[utoipa::path(
    post,
    path = "/api/v1/rooms/{room}/messages",
    params(("room" = schema::RoomName, Path)),
    request_body(content = schema::NewRoomMessages, content_type = "application/json"),
    responses((status = 202, description = "The number of the message, of a list that of the last", body = schema::Published), schema::Refusals),
    tag = "rooms"
)]
pub async fn publish(State(api): Shared, path: Result<Path<String>, PathRejection>, body: Body) -> Outcome {
    let room = parsed(RoomName::parse(&path?.0))?;
    let bytes_max = api.config.max_frame_bytes;
    let text = body::read(body, REQUEST_BYTES_MIN.max(MESSAGES_MAX * (bytes_max + 1024))).await?;
    let messages = match text.iter().find(|b| !b.is_ascii_whitespace()) {
        Some(b'[') => parse_all(&text, bytes_max)?,
        _ => vec![parse(&text, bytes_max)?],
    };
    let offset = api.rooms.publish(&room, &messages)?;
    Ok(json(StatusCode::ACCEPTED, &serde_json::json!({ "offset": offset })))
}

fn parse_all(text: &[u8], bytes_max: usize) -> Result<Vec<RoomMessage>, Problem> {
    let items: Vec<&RawValue> =
        serde_json::from_slice(text).map_err(|error| Problem::malformed(format!("the body: {error}")))?;
    match items.len() {
        0 => return Err(Problem::malformed("the array holds no message")),
        1..=MESSAGES_MAX => {}
        count => {
            let message = format!("the array holds {count} messages; one request takes {MESSAGES_MAX}");
            return Err(Problem::new(ErrorCode::TooLarge, message));
        }
    }
    items
        .iter()
        .enumerate()
        .map(|(at, item)| {
            parse(item.get().as_bytes(), bytes_max).map_err(|mut problem| {
                problem.0.message = format!("message {at}: {}", problem.0.message);
                problem
            })
        })
        .collect()
}

fn parse(text: &[u8], bytes_max: usize) -> Result<RoomMessage, Problem> {
    within_frame(text, bytes_max)?;
    let fields: Fields<'_> = body::parse(text)?;
    Ok(RoomMessage { from: fields.from, body: read_body(fields.body, fields.body_encoding.as_deref())? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use bowline_protocol::frame;
    use bytes::Bytes;

    #[test]
    fn lists_are_read_as_a_whole() {
        let read = |text: &str| parse_all(text.as_bytes(), 100).map_err(|problem| problem.0.message);
        let json = |text: &'static str| frame::Body::Json(Bytes::from_static(text.as_bytes()));
        let got = read(r#"[{"body":1},{"from":"a","body":"AA==","body_encoding":"base64"}]"#).unwrap();
        assert_eq!(got[0], RoomMessage { from: None, body: json("1") });
        let bytes = frame::Body::Binary(Bytes::from_static(&[0]));
        assert_eq!(got[1], RoomMessage { from: Some(UserId::trusted("a")), body: bytes });
        let rows = [
            ("[]".to_owned(), "no message"),
            (r#"[{"body":1},{}]"#.to_owned(), "message 1: body is missing"),
            (r#"[{"from":"a:b","body":1}]"#.to_owned(), "message 0: the body: a user id"),
            (format!(r#"[{{"body":"{}"}}]"#, "x".repeat(100)), "gateway.max_frame_bytes allows 100"),
            (format!("[{}1]", "1,".repeat(1000)), "1001 messages"),
        ];
        for (text, part) in rows {
            let fault = read(&text).unwrap_err();
            assert!(fault.contains(part), "{fault} instead of {part}");
        }
    }
}
