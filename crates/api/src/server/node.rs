//! The node: status, drain, readiness, metrics.

use super::{Outcome, Shared, schema};
use crate::{
    Status,
    answer::{Problem, json},
    limits::REASON_BYTES_MAX,
};
use axum::{
    extract::{Query, State, rejection::QueryRejection},
    response::{IntoResponse, Response},
};
use bowline_protocol::ErrorCode;
use http::{StatusCode, header};
use serde::Deserialize;
use utoipa::IntoParams;

/// Shows what this node does.
#[utoipa::path(
    get,
    path = "/admin/status",
    responses((status = 200, description = "The node", body = Status), schema::KeyRefusals),
    tag = "node"
)]
pub async fn status(State(api): Shared) -> Response {
    json(StatusCode::OK, &api.node.status())
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct DrainQuery {
    #[param(value_type = Option<schema::Reason>, nullable = false)]
    reason: Option<String>,
}
/// Begins to drain.
///
/// Asking again changes nothing; the process stays until it is told to end by a signal.
#[utoipa::path(
    post,
    path = "/admin/drain",
    params(DrainQuery),
    responses((status = 202, description = "Draining", body = Status), schema::Refusals),
    tag = "node"
)]
pub async fn drain(State(api): Shared, query: Result<Query<DrainQuery>, QueryRejection>) -> Outcome {
    let query = query.map_err(|error| Problem::malformed(error.body_text()))?.0;
    let reason = query.reason.as_deref().filter(|reason| !reason.is_empty()).unwrap_or("drain");
    if reason.len() > REASON_BYTES_MAX {
        return Err(Problem::malformed(format!(
            "reason is {} bytes long; it takes at most {REASON_BYTES_MAX}",
            reason.len()
        )));
    }
    tracing::info!(cause = reason, "drain asked for over the API");
    api.node.drain(reason);
    Ok(json(StatusCode::ACCEPTED, &api.node.status()))
}
/// Whether the process works.
#[utoipa::path(
    get,
    path = "/healthz",
    responses((status = 200, description = "The process works", body = schema::Health)),
    tag = "node",
    security(())
)]
pub async fn healthz() -> Response {
    json(StatusCode::OK, &serde_json::json!({ "status": "ok" }))
}
/// Whether this node should get clients.
#[utoipa::path(
    get,
    path = "/readyz",
    responses((status = 200, description = "Ready", body = schema::Health), (status = 503, description = "Not ready", body = schema::NotReady)),
    tag = "node",
    security(())
)]
pub async fn readyz(State(api): Shared) -> Response {
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

/// Counters and gauges, for Prometheus.
#[utoipa::path(
    get,
    path = "/metrics",
    responses((status = 200, description = "The text format of Prometheus", content_type = "text/plain", body = String), schema::KeyRefusals),
    tag = "node"
)]
pub async fn metrics(State(api): Shared) -> Outcome {
    // Reads the ledger from the store, so it is kept off the threads that serve.
    const FORMAT: &str = "text/plain; version=0.0.4; charset=utf-8";
    let text = tokio::task::spawn_blocking(move || api.node.metrics())
        .await
        .map_err(|_| Problem::new(ErrorCode::Internal, "metrics cannot be collected; see the log"))?;
    Ok(([(header::CONTENT_TYPE, FORMAT)], text).into_response())
}
