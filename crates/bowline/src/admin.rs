//! Asks a running server, over its API.

use anyhow::{Context, anyhow, bail};
use bowline_api::{State, Status, Transport};
use bytes::Bytes;
use http_body_util::{BodyExt, Empty, Limited};
use hyper::{Method, Request, StatusCode, header};
use hyper_util::rt::TokioIo;
use std::{fmt::Write, time::Duration};

/// The largest answer that is read, in bytes.
const ANSWER_BYTES_MAX: usize = 4 << 20;
const TIMEOUT: Duration = Duration::from_secs(10);

/// Nobody listens there.
#[derive(Debug, thiserror::Error)]
#[error("no server answers at {authority}; is it running, and is --api-url right?")]
pub struct Unreachable {
    authority: String,
    source: std::io::Error,
}

/// An API to ask.
pub struct Target {
    /// `host:port`.
    authority: String,
    prefix: String,
    key: Option<String>,
}

impl Target {
    pub fn parse(url: &str, key: Option<String>) -> anyhow::Result<Self> {
        let uri: hyper::Uri = url
            .parse()
            .with_context(|| format!("--api-url {url:?} is no address; write http://127.0.0.1:8090"))?;
        if uri.scheme_str() != Some("http") {
            bail!("--api-url {url:?}: write http://host:port; the API speaks no TLS");
        }
        let host = uri.host().filter(|host| !host.is_empty());
        let host = host.ok_or_else(|| anyhow!("--api-url {url:?} names no host"))?;
        Ok(Self {
            authority: format!("{host}:{}", uri.port_u16().unwrap_or(80)),
            prefix: uri.path().trim_end_matches('/').to_owned(),
            key,
        })
    }
}

pub fn status(target: &Target) -> anyhow::Result<Status> {
    ask(target, Method::GET, "/admin/status")
}

pub fn drain(target: &Target, reason: &str) -> anyhow::Result<Status> {
    ask(target, Method::POST, &format!("/admin/drain?reason={}", percent_encoded(reason)))
}

/// The text of `/metrics`.
pub fn metrics(target: &Target) -> anyhow::Result<String> {
    let text = fetch(target, Method::GET, "/metrics")?;
    String::from_utf8(text.to_vec()).with_context(|| format!("{} answered no text", target.authority))
}

fn ask(target: &Target, method: Method, path: &str) -> anyhow::Result<Status> {
    let text = fetch(target, method, path)?;
    serde_json::from_slice(&text)
        .with_context(|| format!("{} answered something that is no status", target.authority))
}

fn fetch(target: &Target, method: Method, path: &str) -> anyhow::Result<Bytes> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (code, text) = runtime
        .block_on(async { tokio::time::timeout(TIMEOUT, exchange(target, method, path)).await })
        .map_err(|_| anyhow!("{} did not answer within {} s", target.authority, TIMEOUT.as_secs()))??;
    if code.is_success() {
        return Ok(text);
    }
    let told: Option<serde_json::Value> = serde_json::from_slice(&text).ok();
    let message = told.as_ref().and_then(|value| value["message"].as_str()).unwrap_or("no explanation");
    let hint = match code {
        StatusCode::UNAUTHORIZED => "; give the server's key with --api-key or BOWLINE_API_KEY",
        _ => "",
    };
    bail!("{} answered {code}: {message}{hint}", target.authority)
}

async fn exchange(target: &Target, method: Method, path: &str) -> anyhow::Result<(StatusCode, Bytes)> {
    let connected = tokio::net::TcpStream::connect(&target.authority).await;
    let stream = connected.map_err(|source| Unreachable { authority: target.authority.clone(), source })?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    let driver = tokio::spawn(connection);
    let mut request = Request::builder()
        .method(method)
        .uri(format!("{}{path}", target.prefix))
        .header(header::HOST, &target.authority)
        .header(header::CONTENT_LENGTH, 0);
    if let Some(key) = &target.key {
        request = request.header(header::AUTHORIZATION, format!("Bearer {key}"));
    }
    let response = sender.send_request(request.body(Empty::<Bytes>::new())?).await?;
    let code = response.status();
    let body = Limited::new(response.into_body(), ANSWER_BYTES_MAX).collect().await;
    let text = body.map_err(|error| anyhow!("the answer broke off: {error}"))?.to_bytes();
    driver.abort();
    Ok((code, text))
}

fn percent_encoded(text: &str) -> String {
    text.bytes().fold(String::new(), |mut out, byte| {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => out.push(byte as char),
            _ => {
                let _ = write!(out, "%{byte:02X}");
            }
        }
        out
    })
}

// Output

pub fn state_name(state: State) -> &'static str {
    match state {
        State::Starting => "starting",
        State::Ready => "ready",
        State::Draining => "draining",
    }
}

pub fn json(status: &Status) -> String {
    format!("{:#}\n", serde_json::json!(status))
}

pub fn human(status: &Status) -> String {
    let state = state_name(status.state);
    let mut out = format!(
        "node         {} (boot {}, version {})\nstate        {state}, up {}\nconnections  {} ({} users, {} devices)\n",
        status.node_id,
        status.boot_id,
        status.version,
        span(status.uptime_ms),
        status.connections,
        status.users,
        status.devices
    );
    for (name, transport) in [("ws", &status.transports.ws), ("tcp", &status.transports.tcp)] {
        if let Some(Transport { address, path, connections }) = transport {
            let path = path.as_deref().unwrap_or("");
            let _ = writeln!(out, "{name:<13}{address}{path}, {connections} connections");
        }
    }
    if status.drain.is_some() {
        let _ = writeln!(out, "drain        {}", drain_line(status));
    }
    out
}

pub fn drain_begun(status: &Status) -> String {
    format!("{} is draining: {}\n", status.node_id, drain_line(status))
}

fn drain_line(status: &Status) -> String {
    let Some(drain) = status.drain else { return "not begun".into() };
    let left_ms = drain.deadline.saturating_sub(crate::now_ms());
    format!("{} connections left, they close in {}", drain.remaining, span(left_ms))
}

/// A time in the two units that matter.
pub fn span(ms: u64) -> String {
    let seconds = ms / 1000;
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min {} s", seconds / 60, seconds % 60),
        3600..86_400 => format!("{} h {} min", seconds / 3600, seconds / 60 % 60),
        _ => format!("{} d {} h", seconds / 86_400, seconds / 3600 % 24),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_an_api() {
        let rows = [
            ("http://127.0.0.1:8090", Ok(("127.0.0.1:8090", ""))),
            ("http://host/bowline/", Ok(("host:80", "/bowline"))),
            ("http://[::1]:1", Ok(("[::1]:1", ""))),
            ("https://host", Err("no TLS")),
            ("127.0.0.1:8090", Err("--api-url")),
            ("", Err("--api-url")),
        ];
        for (url, expected) in rows {
            match (Target::parse(url, None), expected) {
                (Ok(target), Ok((authority, prefix))) => {
                    assert_eq!(
                        (target.authority.as_str(), target.prefix.as_str()),
                        (authority, prefix),
                        "{url}"
                    );
                }
                (Err(error), Err(part)) => assert!(format!("{error:#}").contains(part), "{url}: {error:#}"),
                (result, _) => panic!("{url}: {:?}", result.map(|target| target.authority)),
            }
        }
        assert_eq!(percent_encoded("a b&c/ü"), "a%20b%26c%2F%C3%BC");
    }
}
