//! A message as HTTP carries it: the fields of `msg.send`, binary bodies as Base64.

use crate::answer::Problem;
use base64::Engine;
use bowline_protocol::{Body, ErrorCode, MessageId, UserId, link::SendTarget};
use bytes::Bytes;
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;
use std::sync::Arc;

/// One message, checked as far as it can be without the router.
pub(crate) struct Message {
    pub id: MessageId,
    pub from: Option<UserId>,
    pub target: SendTarget,
    pub body: Body,
}

#[derive(Deserialize)]
struct Fields<'a> {
    id: Option<MessageId>,
    from: Option<UserId>,
    to: Option<UserId>,
    conversation_id: Option<Arc<str>>,
    #[serde(borrow, default, deserialize_with = "present")]
    body: Option<&'a RawValue>,
    body_encoding: Option<String>,
}

/// Keeps `null` as a body; an absent one is `None`.
pub(crate) fn present<'de: 'a, 'a, D: Deserializer<'de>>(d: D) -> Result<Option<&'a RawValue>, D::Error> {
    <&RawValue>::deserialize(d).map(Some)
}

impl Message {
    pub fn parse(text: &[u8], bytes_max: usize) -> Result<Self, Problem> {
        within_frame(text, bytes_max)?;
        let fields: Fields<'_> = crate::body::parse(text)?;
        let target = match (fields.to, fields.conversation_id) {
            (Some(user), None) => SendTarget::User(user),
            (None, Some(conversation)) => SendTarget::Conversation(conversation),
            _ => return Err(Problem::malformed("give exactly one of to and conversation_id")),
        };
        let body = read_body(fields.body, fields.body_encoding.as_deref())?;
        let id = fields.id.ok_or_else(|| Problem::malformed("id is missing"))?;
        Ok(Self { id, from: fields.from, target, body })
    }
}

/// A message over HTTP is bounded like a frame.
pub(crate) fn within_frame(text: &[u8], bytes_max: usize) -> Result<(), Problem> {
    if text.len() <= bytes_max {
        return Ok(());
    }
    let message =
        format!("the message is {} bytes long; gateway.max_frame_bytes allows {bytes_max}", text.len());
    Err(Problem::new(ErrorCode::TooLarge, message))
}

pub(crate) fn read_body(raw: Option<&RawValue>, encoding: Option<&str>) -> Result<Body, Problem> {
    let raw = raw.ok_or_else(|| Problem::malformed("body is missing"))?;
    match encoding {
        None => Ok(Body::Json(Bytes::copy_from_slice(raw.get().as_bytes()))),
        Some("base64") => Ok(Body::Binary(decode_base64(raw)?)),
        Some(other) => Err(Problem::malformed(format!(
            "body_encoding is {other:?}; it takes \"base64\", or is left out for JSON"
        ))),
    }
}

fn decode_base64(raw: &RawValue) -> Result<Bytes, Problem> {
    let text: String = serde_json::from_str(raw.get())
        .map_err(|_| Problem::malformed("body is no string, but body_encoding is \"base64\""))?;
    match base64::engine::general_purpose::STANDARD.decode(text) {
        Ok(bytes) => Ok(bytes.into()),
        Err(error) => Err(Problem::malformed(format!("body is no Base64: {error}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_checked_field_by_field() {
        let rows: [(&str, Result<Body, &str>); 10] = [
            (r#"{"id":"1","to":"b","body":{"a":1}}"#, Ok(Body::Json(Bytes::from_static(b"{\"a\":1}")))),
            (r#"{"id":"1","to":"b","body":null}"#, Ok(Body::Json(Bytes::from_static(b"null")))),
            (
                r#"{"id":"1","to":"b","body":"AP8=","body_encoding":"base64"}"#,
                Ok(Body::Binary(Bytes::from_static(&[0, 255]))),
            ),
            (r#"{"id":"1","to":"b","body":7,"body_encoding":"base64"}"#, Err("no string")),
            (r#"{"id":"1","to":"b","body":"*","body_encoding":"base64"}"#, Err("no Base64")),
            (r#"{"id":"1","to":"b"}"#, Err("body is missing")),
            (r#"{"to":"b","body":1}"#, Err("id is missing")),
            (r#"{"id":"1","body":1}"#, Err("exactly one of to")),
            (r#"{"id":"1","to":"b","conversation_id":"g:x","body":1}"#, Err("exactly one of to")),
            (r#"{"id":"1","to":"b:c","body":1}"#, Err("user id")),
        ];
        for (text, expected) in rows {
            match (Message::parse(text.as_bytes(), 1024), expected) {
                (Ok(message), Ok(body)) => assert_eq!(message.body, body, "{text}"),
                (Err(problem), Err(part)) => {
                    assert!(problem.0.message.contains(part), "{text}: {}", problem.0.message);
                }
                (Ok(_), Err(part)) => panic!("{text} was taken; expected {part}"),
                (Err(problem), Ok(_)) => panic!("{text}: {}", problem.0.message),
            }
        }
    }
}
