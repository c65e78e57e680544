//! The server API: `docs/protocol.md`, "Server API". On its own listener, behind a key.
//!
//! What is routed is described: the same list gives the routes and `GET /api/openapi.json`.

mod groups;
mod messages;
mod node;
mod rooms;
mod schema;
mod tokens;
mod users;

use crate::{
    Access, Node, Requests, Rooms,
    answer::{Problem, raw_json, unknown_route, wrong_method},
    connection::Connection,
    head,
    limits::HEAD_TIMEOUT,
    rewind::Rewind,
    speak::{http1, serve_http2},
};
use axum::{
    BoxError, Extension, Router,
    extract::{Request as HttpRequest, State, rejection::PathRejection},
    middleware::{Next, from_fn, from_fn_with_state},
    response::{IntoResponse, Response},
};
use bowline_protocol::{
    ErrorCode, ids,
    link::{Answer, Request},
};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, StatusCode, header};
use hyper_util::{rt::TokioIo, service::TowerToHyperService};
use std::{io, sync::Arc, time::Duration};
use tokio::{
    net::{TcpListener, TcpStream},
    time::{sleep, timeout},
};
use utoipa::OpenApi;
use utoipa_axum::{router::OpenApiRouter, routes};

/// How long nothing is accepted when the process is out of files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What the server API needs to know.
pub struct Config {
    /// `api.key`: whoever has it may do everything.
    pub key: String,
    /// `gateway.max_frame_bytes`: the limit of one message.
    pub max_frame_bytes: usize,
}

struct Api {
    config: Config,
    requests: Requests,
    node: Arc<dyn Node>,
    access: Arc<dyn Access>,
    rooms: Arc<dyn Rooms>,
}

type Shared = State<Arc<Api>>;
type Outcome = Result<Response, Problem>;

/// Serves until the task is dropped.
pub async fn serve(
    listener: TcpListener,
    config: Config,
    requests: Requests,
    node: Arc<dyn Node>,
    access: Arc<dyn Access>,
    rooms: Arc<dyn Rooms>,
) -> io::Result<()> {
    let routes = routes(config, requests, node, access, rooms);
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "the API cannot accept connections; raise the limit on open files");
                sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let routes = routes.clone();
        tokio::spawn(async move {
            // How a connection ends is the client's business.
            if let Err(error) = serve_connection(stream, routes).await {
                tracing::debug!(error, "an HTTP connection ended");
            }
        });
    }
}

/// A head that is not complete in time ends the connection.
async fn serve_connection(stream: TcpStream, routes: Router) -> Result<(), BoxError> {
    stream.set_nodelay(true)?;
    let mut rewind = Rewind { head: Bytes::new(), stream: Connection::new(stream.into_std()?.into())? };
    let service = TowerToHyperService::new(routes);
    if timeout(HEAD_TIMEOUT, rewind.begins_with(b"PRI ")).await?? {
        return serve_http2(rewind, service).await;
    }
    Ok(http1().serve_connection(TokioIo::new(rewind), service).await?)
}

pub fn routes(
    config: Config,
    requests: Requests,
    node: Arc<dyn Node>,
    access: Arc<dyn Access>,
    rooms: Arc<dyn Rooms>,
) -> Router {
    let api = Arc::new(Api { config, requests, node, access, rooms });
    let (routes, description) = OpenApiRouter::with_openapi(schema::Description::openapi())
        .routes(routes!(messages::send))
        .routes(routes!(messages::history))
        .routes(routes!(rooms::publish))
        .routes(routes!(groups::create_group))
        .routes(routes!(groups::change_group, groups::delete_group))
        .routes(routes!(groups::add_member, groups::remove_member))
        .routes(routes!(users::user))
        .routes(routes!(users::kick))
        .routes(routes!(users::forget_device))
        .routes(routes!(tokens::issue_token))
        .routes(routes!(tokens::revoke))
        .routes(routes!(tokens::open_session))
        .routes(routes!(node::status))
        .routes(routes!(node::drain))
        .routes(routes!(node::healthz))
        .routes(routes!(node::readyz))
        .routes(routes!(node::metrics))
        .routes(routes!(description))
        .split_for_parts();
    let text = serde_json::to_vec(&description).expect("a description is always JSON");
    routes
        .fallback(unknown_route)
        .method_not_allowed_fallback(wrong_method)
        .layer(Extension(Text(text.into())))
        .layer(from_fn(head::check))
        .layer(from_fn_with_state(api.clone(), check_key))
        .layer(from_fn(crate::body::read_out))
        .with_state(api)
}

/// The description of the API, written once.
#[derive(Clone)]
struct Text(Bytes);

/// This description, as OpenAPI 3.1.
#[utoipa::path(
    get,
    path = "/api/openapi.json",
    responses((status = 200, description = "The description", body = Object), schema::KeyRefusals),
    tag = "node"
)]
async fn description(Extension(Text(text)): Extension<Text>) -> Response {
    raw_json(StatusCode::OK, text)
}

async fn check_key(State(api): Shared, request: HttpRequest, next: Next) -> Response {
    let open = matches!(request.uri().path(), "/healthz" | "/readyz");
    if open || has_key(request.headers(), &api.config.key) {
        return next.run(request).await;
    }
    let message = "this needs the key of the API: Authorization: Bearer <api.key>, or X-API-Key: <api.key>";
    Problem::new(ErrorCode::Unauthenticated, message).into_response()
}

fn has_key(headers: &HeaderMap, key: &str) -> bool {
    let named = headers.get("x-api-key").map(HeaderValue::as_bytes);
    let bearer = headers.get(header::AUTHORIZATION).and_then(bearer);
    [named, bearer].into_iter().flatten().any(|given| is_equal(given, key.as_bytes()))
}

pub(crate) fn bearer(value: &HeaderValue) -> Option<&[u8]> {
    let (scheme, rest) = value.as_bytes().split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then(|| rest.trim_ascii())
}

/// Takes as long whatever the first difference is; only the length shows.
fn is_equal(one: &[u8], other: &[u8]) -> bool {
    let differing = one.iter().zip(other).fold(0, |sum, (a, b)| sum | (a ^ b));
    one.len() == other.len() && std::hint::black_box(differing) == 0
}

/// A request whose answer is 204.
async fn done(api: &Api, request: Request) -> Outcome {
    match api.requests.ask(request).await? {
        Answer::Done => Ok(StatusCode::NO_CONTENT.into_response()),
        other => Err(unexpected(&other)),
    }
}

impl From<PathRejection> for Problem {
    fn from(rejection: PathRejection) -> Self {
        Self::malformed(rejection.body_text())
    }
}

fn parsed<T>(result: Result<T, ids::Error>) -> Result<T, Problem> {
    result.map_err(|error| Problem::malformed(error.to_string()))
}

fn unexpected(answer: &Answer) -> Problem {
    tracing::error!(?answer, "the router answered something else than was asked");
    Problem::new(ErrorCode::Internal, "the router answered something else than was asked; see the log")
}
