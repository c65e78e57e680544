//! Answers as JSON, errors included: `{"code", "message"}` with the status of the code.

use axum::{
    body::Body,
    response::{IntoResponse, Response},
};
use bowline_protocol::{ErrorCode, error::Refusal};
use bytes::Bytes;
use http::{HeaderValue, StatusCode, header};
use serde::Serialize;

/// An error that leaves over HTTP.
pub(crate) struct Problem(pub Refusal);

impl Problem {
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self(Refusal::new(code, message))
    }

    pub fn malformed(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::Malformed, message)
    }
}

impl From<Refusal> for Problem {
    fn from(refusal: Refusal) -> Self {
        Self(refusal)
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.0.code.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = json(status, &self.0);
        if let Some(wait) = self.0.retry_after_ms {
            let seconds = wait.div_ceil(1000).max(1);
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

pub(crate) fn json(status: StatusCode, value: &impl Serialize) -> Response {
    match serde_json::to_vec(value) {
        Ok(text) => raw_json(status, text.into()),
        Err(error) => {
            tracing::error!(%error, "an answer could not be written as JSON");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}

/// An answer that is JSON already.
pub(crate) fn raw_json(status: StatusCode, text: Bytes) -> Response {
    let mut response = Response::new(Body::from(text));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

pub(crate) async fn unknown_route(request: axum::extract::Request) -> Problem {
    Problem::new(ErrorCode::NotFound, format!("there is nothing at {}", shown(request.uri().path())))
}

/// 405; axum adds the header `Allow`.
pub(crate) async fn wrong_method(request: axum::extract::Request) -> Response {
    let message = format!("{} does not take {}", shown(request.uri().path()), request.method());
    json(StatusCode::METHOD_NOT_ALLOWED, &Refusal::new(ErrorCode::Malformed, message))
}

fn shown(path: &str) -> &str {
    path.get(..128).unwrap_or(path)
}
