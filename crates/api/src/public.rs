//! HTTP on the public listener: what a gateway shard has found to be no upgrade, with the bytes it has read.

use crate::{
    Access, NewToken, Requests,
    answer::{Problem, json, unknown_route, wrong_method},
    body,
    connection::Connection,
    head,
    limits::{DEMO_TOKEN_TTL_MS, HEAD_TIMEOUT, PUBLIC_CONNECTIONS_MAX, REQUEST_BYTES_MIN},
    message::Message,
    rewind::Rewind,
    server::bearer,
    speak::{http1, serve_http2},
};
use axum::{
    Extension, Router,
    body::Body,
    extract::{Query, Request as HttpRequest, State},
    middleware::{Next, from_fn, from_fn_with_state},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use bowline_auth::{Fault, Identity, Question, Verifier};
use bowline_protocol::{
    DeviceId, ErrorCode, Millis, UserId,
    error::Refusal,
    frame::ServerFrame,
    ids::DeviceClass,
    link::{Answer, Request, Send as SendMessage},
};
use bowline_tls::Stream;
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, Version, header};
use hyper::{
    body::Incoming,
    service::{Service, service_fn},
};
use hyper_util::{rt::TokioIo, service::TowerToHyperService};
use serde::{Deserialize, Serialize};
use std::{
    future::poll_fn,
    net::{IpAddr, SocketAddr},
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    time::SystemTime,
};
use tokio::{
    io::AsyncWriteExt,
    runtime::Handle,
    sync::{Semaphore, oneshot},
    time::timeout,
};

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Takes a connection back, with the bytes that were read from it.
type HandBack = Box<dyn Fn(Stream, Bytes) + Send + Sync>;

pub struct Config {
    /// `gateway.ws_path`: where the demo page connects, and what is no upgrade is answered 426.
    pub ws_path: String,
    /// `gateway.allowed_origins`: empty allows all.
    pub allowed_origins: Vec<String>,
    /// `gateway.max_frame_bytes`: the limit of one message.
    pub max_frame_bytes: usize,
    /// Who makes the tokens of `POST /demo/token`; `None` once a key is configured.
    pub demo_tokens: Option<Arc<dyn Access>>,
    pub place: Place,
}

/// Where clients of this node connect: `GET /v1/place`.
#[derive(Debug, Clone)]
pub struct Place {
    pub node_id: String,
    /// `node.advertise_ws` and `node.advertise_tcp`, as URLs.
    pub advertised_ws: Option<String>,
    pub advertised_tcp: Option<String>,
    pub ws: SocketAddr,
    pub tcp: Option<SocketAddr>,
    /// The listeners speak TLS.
    pub tls: bool,
}

struct Public {
    config: Config,
    page: String,
    requests: Requests,
    verifier: Arc<Verifier>,
}

type Shared = State<Arc<Public>>;

/// The two ends of the connection that a request came on.
#[derive(Clone, Copy)]
struct Ends {
    peer: SocketAddr,
    local: SocketAddr,
}

/// Whether a path is one of those here, so that no WebSocket can be at it.
pub fn serves(path: &str) -> bool {
    let is_of_demo = |file: &str| !file.is_empty() && !file.contains('/');
    matches!(path, "/" | "/v1/messages" | "/v1/place") || path.strip_prefix("/demo/").is_some_and(is_of_demo)
}

/// Serves connections that were accepted elsewhere.
#[derive(Clone)]
pub struct Server {
    routes: Router,
    places: Arc<Semaphore>,
    runtime: Handle,
    hand_back: Arc<OnceLock<HandBack>>,
}

impl Server {
    pub fn new(config: Config, requests: Requests, verifier: Arc<Verifier>, runtime: Handle) -> Self {
        let page = include_str!("../assets/index.html").replace("{ws_path}", &escaped(&config.ws_path));
        let public = Arc::new(Public { config, page, requests, verifier });
        // `serves` knows these paths.
        let routes = Router::new()
            .route("/", get(demo_page))
            .route("/demo/{file}", get(asset))
            .route("/demo/token", post(demo_token))
            .route("/v1/messages", post(send))
            .route("/v1/place", get(place))
            .fallback(elsewhere)
            .method_not_allowed_fallback(wrong_method)
            .layer(from_fn_with_state(public.clone(), check_origin))
            .layer(from_fn(head::check))
            .layer(from_fn(body::read_out))
            .with_state(public);
        let places = Arc::new(Semaphore::new(PUBLIC_CONNECTIONS_MAX));
        Self { routes, places, runtime, hand_back: Arc::default() }
    }

    /// Says who takes a connection on which a WebSocket is asked for after other requests: a proxy does that with
    /// connections that it keeps. The first call counts.
    pub fn hand_back(&self, take: impl Fn(Stream, Bytes) + Send + Sync + 'static) {
        let _ = self.hand_back.set(Box::new(take));
    }

    /// Takes a connection and the bytes that were read from it so far; returns at once, on any thread.
    pub fn serve(&self, stream: impl Into<Stream>, head: Bytes) {
        let stream = stream.into();
        let Ok(place) = self.places.clone().try_acquire_owned() else {
            tracing::warn!(limit = PUBLIC_CONNECTIONS_MAX, "too many HTTP connections; one was closed");
            return;
        };
        let server = self.clone();
        self.runtime.spawn(async move {
            // How a connection ends is the client's business.
            if let Err(error) = server.serve_connection(stream, head).await {
                tracing::debug!(error, "an HTTP connection ended");
            }
            drop(place);
        });
    }

    async fn serve_connection(self, stream: Stream, head: Bytes) -> Result<(), BoxError> {
        let socket = &stream.socket;
        socket.set_nonblocking(true)?;
        let ends = Ends { peer: socket.peer_addr()?, local: socket.local_addr()? };
        let mut rewind = Rewind { head, stream: Connection::new(stream)? };
        let routes = TowerToHyperService::new(self.routes.layer(Extension(ends)));
        if timeout(HEAD_TIMEOUT, rewind.begins_with(b"PRI ")).await?? {
            return serve_http2(rewind, routes).await;
        }
        let turn = Arc::new(Mutex::new(Turn::default()));
        let has_taker = self.hand_back.get().is_some();
        let service = service_fn(|request| answer_or_hand_back(&routes, &turn, has_taker, request));
        let mut connection = http1().serve_connection(TokioIo::new(rewind), service);
        let ended = poll_fn(|context| connection.poll_without_shutdown(context)).await;
        let head = lock(&turn).handed_back.take();
        let (Some(head), Some(take)) = (head, self.hand_back.get()) else {
            let mut rewind = connection.into_parts().io.into_inner();
            rewind.stream.shutdown().await?;
            return Ok(ended?);
        };
        let parts = connection.into_parts();
        let rewind = parts.io.into_inner();
        let read = [&head[..], &parts.read_buf, &rewind.head].concat();
        take(rewind.stream.into_stream()?, read.into());
        Ok(())
    }
}

/// What a connection over HTTP/1 has come to.
#[derive(Default)]
struct Turn {
    requests: u64,
    /// The head of the request that asks for a WebSocket.
    handed_back: Option<Vec<u8>>,
}

#[derive(Debug)]
struct HandedBack;

impl std::fmt::Display for HandedBack {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the connection goes back to the gateway")
    }
}

impl std::error::Error for HandedBack {}

fn lock(turn: &Mutex<Turn>) -> MutexGuard<'_, Turn> {
    turn.lock().unwrap_or_else(PoisonError::into_inner)
}

type Answering = Pin<Box<dyn Future<Output = Result<Response, HandedBack>> + Send>>;

/// The first request of a connection came from a shard, which has seen that it asks for no WebSocket; giving that
/// one back would go round for ever.
fn answer_or_hand_back(
    routes: &TowerToHyperService<Router>,
    turn: &Mutex<Turn>,
    has_taker: bool,
    request: http::Request<Incoming>,
) -> Answering {
    let mut turn = lock(turn);
    turn.requests += 1;
    if has_taker && turn.requests > 1 && asks_for_web_socket(&request) {
        turn.handed_back = Some(head_of(&request));
        return Box::pin(async { Err(HandedBack) });
    }
    drop(turn);
    let answer = routes.call(request);
    Box::pin(async move {
        match answer.await {
            Ok(response) => Ok(response),
            Err(never) => match never {},
        }
    })
}

fn asks_for_web_socket<B>(request: &http::Request<B>) -> bool {
    let upgrades = request.headers().get_all(header::UPGRADE);
    request.method() == Method::GET
        && upgrades
            .iter()
            .any(|value| value.as_bytes().to_ascii_lowercase().windows(9).any(|w| w == b"websocket"))
}

/// The request's head as it may have been written.
fn head_of<B>(request: &http::Request<B>) -> Vec<u8> {
    let target = request.uri().path_and_query().map_or("/", |target| target.as_str());
    let mut head = format!("{} {target} {:?}\r\n", request.method(), request.version()).into_bytes();
    for (name, value) in request.headers() {
        head.extend_from_slice(name.as_str().as_bytes());
        head.extend_from_slice(b": ");
        head.extend_from_slice(value.as_bytes());
        head.extend_from_slice(b"\r\n");
    }
    head.extend_from_slice(b"\r\n");
    head
}

/// The path of the WebSocket without an upgrade, which no version of HTTP but 1.1 has; there is nothing anywhere else.
async fn elsewhere(State(public): Shared, request: HttpRequest) -> Response {
    if request.uri().path() != public.config.ws_path {
        return unknown_route(request).await.into_response();
    }
    let message = "this path speaks WebSocket: send Upgrade: websocket over HTTP/1.1";
    let refusal = Refusal::new(ErrorCode::Malformed, message);
    let mut response = json(StatusCode::UPGRADE_REQUIRED, &refusal);
    let headers = response.headers_mut();
    headers.insert(header::SEC_WEBSOCKET_VERSION, HeaderValue::from_static("13"));
    // A header about the connection is none of HTTP/2 (RFC 9113, 8.2.2).
    if request.version() < Version::HTTP_2 {
        headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
        headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
    }
    response
}

// Origins

/// CORS by `gateway.allowed_origins`. The demo's tokens are for its own page only and are not part of it.
async fn check_origin(State(public): Shared, request: HttpRequest, next: Next) -> Response {
    let origin = request.headers().get(header::ORIGIN).cloned();
    if request.uri().path().starts_with("/demo/") || request.uri().path() == "/" {
        return next.run(request).await;
    }
    let Some(origin) = origin else { return next.run(request).await };
    let allowed = &public.config.allowed_origins;
    if !allowed.is_empty() && !allowed.iter().any(|one| one.as_bytes() == origin.as_bytes()) {
        let message = "this origin is not among gateway.allowed_origins";
        return Problem::new(ErrorCode::Forbidden, message).into_response();
    }
    let mut response = if request.method() == Method::OPTIONS {
        let mut response = StatusCode::NO_CONTENT.into_response();
        let headers = response.headers_mut();
        headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST, OPTIONS"));
        headers.insert(
            header::ACCESS_CONTROL_ALLOW_HEADERS,
            HeaderValue::from_static("Authorization, Content-Type"),
        );
        headers.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600"));
        response
    } else {
        next.run(request).await
    };
    let headers = response.headers_mut();
    if allowed.is_empty() {
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, HeaderValue::from_static("*"));
    } else {
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.append(header::VARY, HeaderValue::from_static("Origin"));
    }
    headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static("Retry-After"));
    response
}

// Messages

/// What the query may say about who asks.
#[derive(Deserialize)]
struct Asker {
    token: Option<String>,
    device_id: Option<DeviceId>,
    device_class: Option<String>,
}

async fn send(
    State(public): Shared,
    Extension(ends): Extension<Ends>,
    uri: Uri,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Problem> {
    let identity = identify(&public.verifier, &uri, &headers, ends).await?;
    let text = body::read(body, REQUEST_BYTES_MIN.max(public.config.max_frame_bytes)).await?;
    let message = Message::parse(&text, public.config.max_frame_bytes)?;
    if message.from.as_ref().is_some_and(|from| *from != identity.user) {
        let message = format!("from must be {:?}, whom the token speaks for, or be left out", identity.user);
        return Err(Problem::new(ErrorCode::IdentityMismatch, message));
    }
    let request = Request::Send(SendMessage {
        id: message.id.clone(),
        from: identity.user,
        target: message.target,
        body: message.body,
    });
    match public.requests.ask(request).await? {
        Answer::Stored { conversation_id, seq, ts } => Ok(json(
            StatusCode::OK,
            &ServerFrame::MsgAck { id: &message.id, conversation_id: &conversation_id, seq, ts },
        )),
        other => {
            tracing::error!(answer = ?other, "the router answered a message with something else");
            Err(Problem::new(ErrorCode::Internal, "the router answered something else; see the log"))
        }
    }
}

/// Where a client that connects directly should go.
async fn place(
    State(public): Shared,
    Extension(ends): Extension<Ends>,
    uri: Uri,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    #[derive(Serialize)]
    struct Answered<'a> {
        ws: String,
        #[serde(skip_serializing_if = "Option::is_none")]
        tcp: Option<String>,
        node_id: &'a str,
    }
    identify(&public.verifier, &uri, &headers, ends).await?;
    let Place { node_id, advertised_ws, advertised_tcp, ws, tcp, tls } = &public.config.place;
    let (ws_scheme, tcp_scheme) = if *tls { ("wss", "tls") } else { ("ws", "tcp") };
    let reached = |address: &SocketAddr| match address.ip().is_unspecified() {
        true => SocketAddr::new(ends.local.ip().to_canonical(), address.port()),
        false => *address,
    };
    let listening_ws = || format!("{ws_scheme}://{}{}", reached(ws), public.config.ws_path);
    let listening_tcp = || tcp.as_ref().map(|tcp| format!("{tcp_scheme}://{}", reached(tcp)));
    let answered = Answered {
        ws: advertised_ws.clone().unwrap_or_else(listening_ws),
        tcp: advertised_tcp.clone().or_else(listening_tcp),
        node_id,
    };
    Ok(json(StatusCode::OK, &answered))
}

/// Whom the token speaks for: the one in the header or the query; both at once is malformed, as for WebSocket.
async fn identify(
    verifier: &Verifier,
    uri: &Uri,
    headers: &HeaderMap,
    ends: Ends,
) -> Result<Identity, Problem> {
    let asker = Query::<Asker>::try_from_uri(uri).map_err(|error| Problem::malformed(error.body_text()))?.0;
    let class = asker.device_class.as_deref().map(|class| {
        DeviceClass::parse(class).ok_or_else(|| {
            Problem::malformed(format!(
                "device_class is {class:?}; it takes web, ios, android, desktop or iot"
            ))
        })
    });
    let class = class.transpose()?;
    let token = one_token(asker.token, headers)?;
    let device_id = asker.device_id.as_deref();
    let question = Question { token: &token, device_id, remote: ends.peer.ip() };
    let identity = judge(verifier, question).await.map_err(refused_token)?;
    let is_other_device = identity.device.as_ref().zip(asker.device_id.as_ref()).is_some_and(|(a, b)| a != b);
    let is_other_class = identity.class.zip(class).is_some_and(|(a, b)| a != b);
    if is_other_device || is_other_class {
        let message = "the token is bound to another device or device class than the request names";
        return Err(Problem::new(ErrorCode::Forbidden, message));
    }
    Ok(identity)
}

fn one_token(query: Option<String>, headers: &HeaderMap) -> Result<String, Problem> {
    let header = headers
        .get(header::AUTHORIZATION)
        .and_then(bearer)
        .map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    match (header, query) {
        (Some(_), Some(_)) => Err(Problem::malformed("give one token: in Authorization or as ?token=")),
        (Some(token), None) | (None, Some(token)) => Ok(token),
        (None, None) => Err(Problem::new(
            ErrorCode::Unauthenticated,
            "there is no token: send Authorization: Bearer <token>, or ?token=<token>",
        )),
    }
}

async fn judge(verifier: &Verifier, question: Question<'_>) -> Result<Identity, Fault> {
    let (reply, verdict) = oneshot::channel();
    let later = move || -> bowline_auth::Reply {
        Box::new(move |result| {
            // Whoever asked may have gone.
            let _ = reply.send(result);
        })
    };
    if let Some(result) = verifier.verify(question, now_ms(), later) {
        return result;
    }
    match timeout(HEAD_TIMEOUT, verdict).await {
        Ok(Ok(result)) => result,
        _ => Err(Fault::Unavailable("the token could not be judged in time".into())),
    }
}

fn refused_token(fault: Fault) -> Problem {
    let code = match fault {
        Fault::Expired | Fault::Revoked | Fault::Invalid(_) => ErrorCode::Unauthenticated,
        Fault::NoSubject => ErrorCode::Malformed,
        Fault::Unavailable(_) => ErrorCode::Unavailable,
    };
    Problem::new(code, fault.to_string())
}

fn now_ms() -> Millis {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_millis() as Millis)
}

// The demo page

async fn demo_page(State(public): Shared) -> Response {
    file("text/html; charset=utf-8", public.page.clone())
}

/// For the value of an attribute.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('"', "&quot;").replace('<', "&lt;")
}

async fn asset(axum::extract::Path(name): axum::extract::Path<String>, uri: Uri) -> Response {
    match name.as_str() {
        "demo.js" => file("text/javascript; charset=utf-8", include_str!("../assets/demo.js")),
        "demo.css" => file("text/css; charset=utf-8", include_str!("../assets/demo.css")),
        _ => Problem::new(ErrorCode::NotFound, format!("there is nothing at {}", uri.path())).into_response(),
    }
}

fn file(kind: &'static str, text: impl IntoResponse) -> Response {
    let headers = [
        (header::CONTENT_TYPE, kind),
        (header::CACHE_CONTROL, "no-cache"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (
            header::CONTENT_SECURITY_POLICY,
            "default-src 'self'; img-src 'self' data:; connect-src 'self' ws: wss:; frame-ancestors 'none'",
        ),
    ];
    (headers, text).into_response()
}

#[derive(Deserialize)]
struct DemoUser {
    user: UserId,
}

/// A token for the asking, for whoever sits at this machine. A page of another site, in a browser here, sends
/// its own `Origin`; one that has pointed its name at this machine sends its own `Host`.
async fn demo_token(
    State(public): Shared,
    Extension(ends): Extension<Ends>,
    uri: Uri,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Problem> {
    let Some(tokens) = &public.config.demo_tokens else {
        return Err(Problem::new(
            ErrorCode::NotFound,
            "a key is configured, so this server gives no demo tokens; make one with `bowline token`",
        ));
    };
    let forbidden = |message: &str| Problem::new(ErrorCode::Forbidden, message);
    if !ends.peer.ip().to_canonical().is_loopback() {
        return Err(forbidden("demo tokens are for clients on this machine only"));
    }
    let host = uri
        .authority()
        .map(|authority| authority.as_str())
        .or_else(|| headers.get(header::HOST).and_then(|host| host.to_str().ok()))
        .unwrap_or("");
    if !is_loopback_host(host) {
        return Err(forbidden("demo tokens are given at localhost, 127.0.0.1 or [::1] only"));
    }
    if let Some(origin) = headers.get(header::ORIGIN) {
        let origin = origin.to_str().unwrap_or("");
        if origin.split_once("://").is_none_or(|(_, rest)| rest != host) {
            return Err(forbidden("demo tokens are for this server's own page only"));
        }
    }
    let text = body::read(body, REQUEST_BYTES_MIN).await?;
    let asked: DemoUser = body::parse(&text)?;
    let wanted = NewToken { user: asked.user, device: None, ttl_ms: DEMO_TOKEN_TTL_MS, rooms: None };
    let tokens = tokens.clone();
    let issued = tokio::task::spawn_blocking(move || tokens.issue(wanted)).await.map_err(|_| {
        Problem::new(ErrorCode::Internal, "the token could not be made; see the server's log")
    })??;
    Ok(json(StatusCode::OK, &serde_json::json!({ "token": issued.token })))
}

fn is_loopback_host(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or(""),
        None => host.rsplit_once(':').map_or(host, |(name, _)| name),
    };
    name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_this_machine_are_loopback_hosts() {
        let rows = [
            ("localhost:8080", true),
            ("LOCALHOST", true),
            ("127.0.0.1:1", true),
            ("127.9.9.9", true),
            ("[::1]:80", true),
            ("[::1]", true),
            ("example.com:80", false),
            ("localhost.example.com", false),
            ("10.0.0.1:80", false),
            ("", false),
        ];
        for (host, expected) in rows {
            assert_eq!(is_loopback_host(host), expected, "{host:?}");
        }
    }
}
