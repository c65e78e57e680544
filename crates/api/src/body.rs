//! The body of a request, read as far as its limit.

use crate::{
    answer::Problem,
    limits::{BODY_TIME, DISCARD_BYTES_MAX, DISCARD_TIME},
};
use axum::{
    body::{Body, HttpBody},
    extract::Request,
    middleware::Next,
    response::Response,
};
use bowline_protocol::{ErrorCode, json};
use bytes::{Bytes, BytesMut};
use http::header;
use http_body_util::BodyExt;
use hyper::body::{Frame, SizeHint};
use serde::Deserialize;
use std::{
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll},
    time::Duration,
};
use tokio::time::timeout;

/// Reads a whole body. One that is too large is read on and thrown away, because a client that is still
/// writing would see a reset connection in place of the answer.
pub(crate) async fn read(body: Body, limit: usize) -> Result<Bytes, Problem> {
    read_within(body, limit, BODY_TIME).await
}

async fn read_within(body: Body, limit: usize, time: Duration) -> Result<Bytes, Problem> {
    timeout(time, read_all(body, limit)).await.unwrap_or_else(|_| {
        Err(Problem::malformed(format!("the body was not there within {} s", time.as_secs_f32())))
    })
}

async fn read_all(mut body: Body, limit: usize) -> Result<Bytes, Problem> {
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
    json::object(text).map_err(|error| Problem::malformed(format!("the body: {error}")))
}

/// Reads what the answer has left of a body, and throws it away. A client that is refused before its body was read
/// would see a reset connection in place of the refusal. One that waits for leave to send its body does not send it.
pub(crate) async fn read_out(request: Request, next: Next) -> Response {
    if request.body().is_end_stream() || request.headers().contains_key(header::EXPECT) {
        return next.run(request).await;
    }
    let mut rest = Lent::default();
    let response = next
        .run(request.map(|body| {
            rest = Lent(Arc::new(Mutex::new(body)));
            Body::new(rest.clone())
        }))
        .await;
    let discard = async {
        let mut total = 0;
        while total <= DISCARD_BYTES_MAX
            && let Some(Ok(frame)) = rest.frame().await
        {
            total += frame.data_ref().map_or(0, Bytes::len);
        }
    };
    // After that the answer is given, whether or not the client can see it.
    let _ = timeout(DISCARD_TIME, discard).await;
    response
}

/// A body that can be read on after whoever had it has let it go.
#[derive(Clone, Default)]
struct Lent(Arc<Mutex<Body>>);

impl Lent {
    fn lock(&self) -> MutexGuard<'_, Body> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl HttpBody for Lent {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut *self.lock()).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.lock().is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.lock().size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A body of which no more comes.
    struct Stuck;

    impl HttpBody for Stuck {
        type Data = Bytes;
        type Error = axum::Error;

        fn poll_frame(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
            Poll::Pending
        }
    }

    #[tokio::test]
    async fn a_body_that_does_not_come_is_not_awaited_for_ever() {
        let read = read_within(Body::new(Stuck), 10, Duration::from_millis(1)).await;
        assert!(read.is_err());
        let read = read_within(Body::from("x"), 10, Duration::from_secs(9)).await;
        assert_eq!(read.ok(), Some(Bytes::from("x")));
    }
}
