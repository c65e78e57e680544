//! The body of a request, read as far as its limit.

use crate::{answer::Problem, limits::DISCARD_BYTES_MAX};
use axum::body::Body;
use bowline_protocol::ErrorCode;
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use serde::Deserialize;

/// Reads a whole body. One that is too large is read on and thrown away, because a client that is still
/// writing would see a reset connection in place of the answer.
pub(crate) async fn read(mut body: Body, limit: usize) -> Result<Bytes, Problem> {
    let mut kept = BytesMut::new();
    let mut total = 0_usize;
    while let Some(frame) = body.frame().await {
        let frame =
            frame.map_err(|error| Problem::malformed(format!("the body ended before its time: {error}")))?;
        let Some(data) = frame.data_ref() else { continue };
        total += data.len();
        if total <= limit {
            kept.extend_from_slice(data);
        } else if total > DISCARD_BYTES_MAX {
            break;
        }
    }
    if total > limit {
        let message = format!("the body is larger than {limit} bytes, the limit of one request");
        return Err(Problem::new(ErrorCode::TooLarge, message));
    }
    Ok(kept.freeze())
}

/// Reads one JSON object.
pub(crate) fn parse<'a, T: Deserialize<'a>>(text: &'a [u8]) -> Result<T, Problem> {
    if text.iter().find(|b| !b.is_ascii_whitespace()) != Some(&b'{') {
        return Err(Problem::malformed("the body is no JSON object"));
    }
    serde_json::from_slice(text).map_err(|error| Problem::malformed(format!("the body: {error}")))
}
