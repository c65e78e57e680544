//! The client's side of the two framings and of the upgrade, for connections of which a process holds thousands.
//!
//! `bowline_protocol` has the server's side. Masks are zero: a load generator has nothing to hide from proxies, and a
//! payload that is sent to thousands stays as it is.

use anyhow::{Context, anyhow};
use bowline_client::Address;
use std::{
    net::{SocketAddr, ToSocketAddrs},
    path::{Path, PathBuf},
};

/// The largest frame that is taken from a server.
const FRAME_BYTES_MAX: usize = 16 << 20;
/// The longest answer to an upgrade.
const HEAD_BYTES_MAX: usize = 64 << 10;
/// Base64 of 16 bytes; nobody checks what the server makes of it.
const WEB_SOCKET_KEY: &str = "Ym93bGluZSBiZW5jaCBrZQ==";

#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Framing {
    WebSocket,
    Tcp,
}

/// Where a server listens.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Place {
    pub framing: Framing,
    pub address: SocketAddr,
    /// The name that its certificate has to have, with TLS.
    pub host: String,
    pub is_secure: bool,
    /// Whose certificates are taken for good; `None`: those that the system trusts.
    pub ca: Option<PathBuf>,
    /// As it was written, for the header `Host`.
    pub authority: String,
    /// Empty for TCP.
    pub path: String,
}

impl Place {
    pub fn parse(url: &str, ca: Option<&Path>) -> anyhow::Result<Self> {
        let Some(Address { is_web_socket, is_secure, host, port }) = Address::parse(url) else {
            return Err(anyhow!(
                "--url {url:?}: write ws://host:port/ws or tcp://host:port, and with TLS wss:// or tls://"
            ));
        };
        let addresses = (host.as_str(), port)
            .to_socket_addrs()
            .with_context(|| format!("--url {url:?}: the host cannot be resolved"))?;
        // Of IPv4 there are many source addresses on loopback.
        let address = addresses.min_by_key(SocketAddr::is_ipv6);
        let address = address.ok_or_else(|| anyhow!("--url {url:?}: the host has no address"))?;
        let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
        let (authority, path) = rest.split_at(rest.find(['/', '?']).unwrap_or(rest.len()));
        let (framing, path) = match is_web_socket {
            true if path.starts_with('/') => (Framing::WebSocket, path.to_owned()),
            true => (Framing::WebSocket, format!("/ws{path}")),
            false => (Framing::Tcp, String::new()),
        };
        let (authority, ca) = (authority.to_owned(), ca.map(Path::to_owned));
        Ok(Self { framing, address, host, is_secure, ca, authority, path })
    }

    /// What a new connection says first.
    pub fn write_hello(&self, out: &mut Vec<u8>, token: &str, device: &str) {
        match self.framing {
            Framing::WebSocket => {
                let Self { authority, path, .. } = self;
                let separator = if path.contains('?') { '&' } else { '?' };
                out.extend_from_slice(
                    format!(
                        "GET {path}{separator}device_id={device} HTTP/1.1\r\nHost: {authority}\r\nUpgrade: websocket\r\n\
                         Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {WEB_SOCKET_KEY}\r\n\
                         Authorization: Bearer {token}\r\n\r\n"
                    )
                    .as_bytes(),
                );
            }
            Framing::Tcp => {
                let connect = serde_json::json!({"type": "connect", "token": token, "device_id": device});
                Framing::Tcp.write(out, connect.to_string().as_bytes());
            }
        }
    }
}

/// One frame of the server.
#[derive(Debug, PartialEq, Eq)]
pub enum Piece<'a> {
    Text(&'a [u8]),
    Ping(&'a [u8]),
    Close(Option<u16>),
    /// Nothing that matters here.
    Other,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the server's framing is broken: {0}")]
pub struct Fault(&'static str);

impl Framing {
    /// The first frame in `bytes` and how many bytes it takes; `None` while it is not complete.
    pub fn split(self, bytes: &[u8]) -> Result<Option<(Piece<'_>, usize)>, Fault> {
        match self {
            Self::WebSocket => split_web_socket(bytes),
            Self::Tcp => {
                let Some((length, rest)) = bytes.split_first_chunk::<4>() else { return Ok(None) };
                let length = u32::from_be_bytes(*length) as usize;
                if length > FRAME_BYTES_MAX {
                    return Err(Fault("a frame is too long"));
                }
                let Some(payload) = rest.get(..length) else { return Ok(None) };
                let piece = if payload.first() == Some(&0) { Piece::Other } else { Piece::Text(payload) };
                Ok(Some((piece, 4 + length)))
            }
        }
    }

    /// Appends a frame with this text.
    pub fn write(self, out: &mut Vec<u8>, text: &[u8]) {
        match self {
            Self::WebSocket => write_web_socket(out, 0x81, text),
            Self::Tcp => {
                out.extend_from_slice(&(text.len() as u32).to_be_bytes());
                out.extend_from_slice(text);
            }
        }
    }

    /// Appends the answer to a ping of the WebSocket protocol.
    pub fn write_pong(self, out: &mut Vec<u8>, payload: &[u8]) {
        if self == Self::WebSocket {
            write_web_socket(out, 0x8a, payload);
        }
    }
}

fn split_web_socket(bytes: &[u8]) -> Result<Option<(Piece<'_>, usize)>, Fault> {
    let [first, second, rest @ ..] = bytes else { return Ok(None) };
    if second & 0x80 != 0 {
        return Err(Fault("a frame is masked"));
    }
    if first & 0xf0 != 0x80 {
        return Err(Fault("a frame is fragmented or has a reserved bit"));
    }
    let (length, head) = match second & 0x7f {
        126 => match rest.first_chunk::<2>() {
            Some(length) => (u16::from_be_bytes(*length) as usize, 4),
            None => return Ok(None),
        },
        127 => match rest.first_chunk::<8>() {
            Some(length) => (usize::try_from(u64::from_be_bytes(*length)).unwrap_or(usize::MAX), 10),
            None => return Ok(None),
        },
        short => (usize::from(short), 2),
    };
    if length > FRAME_BYTES_MAX {
        return Err(Fault("a frame is too long"));
    }
    let Some(payload) = bytes.get(head..head + length) else { return Ok(None) };
    let piece = match first & 0x0f {
        1 => Piece::Text(payload),
        8 => Piece::Close(payload.first_chunk::<2>().map(|code| u16::from_be_bytes(*code))),
        9 => Piece::Ping(payload),
        _ => Piece::Other,
    };
    Ok(Some((piece, head + length)))
}

fn write_web_socket(out: &mut Vec<u8>, first: u8, payload: &[u8]) {
    out.push(first);
    match payload.len() {
        0..126 => out.push(0x80 | payload.len() as u8),
        126..0x1_0000 => {
            out.push(0x80 | 126);
            out.extend_from_slice(&(payload.len() as u16).to_be_bytes());
        }
        _ => {
            out.push(0x80 | 127);
            out.extend_from_slice(&(payload.len() as u64).to_be_bytes());
        }
    }
    out.extend_from_slice(&[0; 4]);
    out.extend_from_slice(payload);
}

/// The answer to an upgrade.
#[derive(Debug, PartialEq, Eq)]
pub struct Answer {
    pub status: u16,
    pub retry_after_ms: Option<u64>,
    /// Where the frames begin; for a refusal where its body begins.
    pub head_bytes: usize,
    body_bytes: usize,
}

impl Answer {
    /// `None` while it is not complete: the head of a 101, or head and body of a refusal.
    pub fn parse(bytes: &[u8]) -> Result<Option<Self>, Fault> {
        let Some(end) = memchr::memmem::find(bytes, b"\r\n\r\n") else {
            let is_long = bytes.len() > HEAD_BYTES_MAX;
            return if is_long { Err(Fault("the answer to the upgrade is too long")) } else { Ok(None) };
        };
        let head = String::from_utf8_lossy(&bytes[..end]);
        let mut lines = head.split("\r\n");
        let status = lines.next().and_then(|line| line.split(' ').nth(1)).and_then(|text| text.parse().ok());
        let status = status.ok_or(Fault("the answer to the upgrade has no status"))?;
        let number = |name: &str| -> Option<u64> {
            let fields = head.split("\r\n").filter_map(|line| line.split_once(':'));
            fields.into_iter().find(|(found, _)| found.eq_ignore_ascii_case(name))?.1.trim().parse().ok()
        };
        let body_bytes = if status == 101 { 0 } else { number("content-length").unwrap_or(0) as usize };
        let retry_after_ms = number("retry-after").map(|seconds| seconds.saturating_mul(1000));
        let answer = Self { status, retry_after_ms, head_bytes: end + 4, body_bytes };
        Ok((bytes.len() >= end + 4 + body_bytes.min(HEAD_BYTES_MAX)).then_some(answer))
    }

    /// What a refusal says.
    pub fn message(&self, bytes: &[u8]) -> String {
        let body = bytes.get(self.head_bytes..self.head_bytes + self.body_bytes).unwrap_or_default();
        let told: Option<serde_json::Value> = serde_json::from_slice(body).ok();
        let message = told.as_ref().and_then(|value| value["message"].as_str());
        message.unwrap_or("no explanation").to_owned()
    }
}

/// The last frame of a server, `session.closed`, or its `error`.
#[derive(Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(default)]
pub struct Notice {
    #[serde(rename = "type")]
    pub kind: String,
    /// A number in `session.closed`, a word in `error`.
    code: serde_json::Value,
    pub reason: String,
    pub message: String,
    pub retry_after_ms: Option<u64>,
}

impl Notice {
    pub fn parse(text: &[u8]) -> Self {
        serde_json::from_slice(text).unwrap_or_default()
    }

    pub fn close_code(&self) -> Option<u16> {
        self.code.as_u64().and_then(|code| u16::try_from(code).ok())
    }

    pub fn error_code(&self) -> &str {
        self.code.as_str().unwrap_or("unknown")
    }
}

/// The answer to `room.join`.
#[derive(Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(default)]
pub struct Joined {
    pub epoch: String,
    pub offset: u64,
    pub recovered: bool,
}

impl Joined {
    pub fn parse(text: &[u8]) -> Self {
        serde_json::from_slice(text).unwrap_or_default()
    }
}

/// Whether a frame is of this type, which the server writes first.
pub fn is(text: &[u8], kind: &str) -> bool {
    text.strip_prefix(b"{\"type\":\"")
        .and_then(|rest| rest.strip_prefix(kind.as_bytes()))
        .is_some_and(|rest| rest.first() == Some(&b'"'))
}

/// The number that follows `mark`, and where it ends.
pub fn number_behind(text: &[u8], mark: &memchr::memmem::Finder<'_>) -> Option<(u64, usize)> {
    let at = mark.find(text)? + mark.needle().len();
    let digits = text[at..].iter().take(19).take_while(|byte| byte.is_ascii_digit()).count();
    let value = text[at..at + digits].iter().fold(0, |value, byte| value * 10 + u64::from(byte - b'0'));
    (digits > 0).then_some((value, at + digits))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_a_server() {
        use Framing::{Tcp, WebSocket};
        let rows = [
            ("ws://127.0.0.1:8080/ws", WebSocket, "127.0.0.1:8080", "/ws", false),
            ("ws://127.0.0.1", WebSocket, "127.0.0.1:80", "/ws", false),
            ("wss://127.0.0.1/chat?a=b", WebSocket, "127.0.0.1:443", "/chat?a=b", true),
            ("wss://[::1]:9?a=b", WebSocket, "[::1]:9", "/ws?a=b", true),
            ("tcp://127.0.0.1:8081", Tcp, "127.0.0.1:8081", "", false),
            ("tls://localhost:8081", Tcp, "127.0.0.1:8081", "", true),
        ];
        for (url, framing, address, path, is_secure) in rows {
            let place = Place::parse(url, None).unwrap();
            assert_eq!((place.framing, place.path.as_str(), place.is_secure), (framing, path, is_secure));
            assert_eq!(place.address.to_string(), address, "{url}");
        }
        assert_eq!(Place::parse("tls://localhost:8081", None).unwrap().host, "localhost");
        for url in ["127.0.0.1:8080", "http://127.0.0.1:8080", "tcp://127.0.0.1", "ws://127.0.0.1:0/ws"] {
            let error = Place::parse(url, None).unwrap_err().to_string();
            assert!(error.contains(url) && error.contains("ws://host:port"), "{url}: {error}");
        }
    }

    #[test]
    fn frames_are_split_wherever_they_break() {
        for length in [0, 5, 125, 126, 65_535, 65_536] {
            let text = vec![b'x'; length];
            for framing in [Framing::WebSocket, Framing::Tcp] {
                let mut bytes = Vec::new();
                match framing {
                    Framing::WebSocket => {
                        let kind = bowline_protocol::ws::Kind::Text;
                        bowline_protocol::ws::write_header(&mut bytes, kind, length);
                        bytes.extend_from_slice(&text);
                    }
                    Framing::Tcp => framing.write(&mut bytes, &text),
                }
                let whole = bytes.len();
                for cut in [0, 1, 3, whole - 1] {
                    assert_eq!(framing.split(&bytes[..cut.min(whole - 1)]), Ok(None), "{framing:?} {length}");
                }
                bytes.extend_from_slice(b"more");
                assert_eq!(framing.split(&bytes), Ok(Some((Piece::Text(&text), whole))));
            }
        }
        assert_eq!(Framing::WebSocket.split(&[0x88, 2, 3, 0xe9]), Ok(Some((Piece::Close(Some(1001)), 4))));
        assert!(Framing::WebSocket.split(&[0x01, 0]).is_err());
        assert!(Framing::Tcp.split(&[0xff; 8]).is_err());
    }

    #[test]
    fn the_server_side_reads_what_is_written() {
        for length in [0, 125, 126, 70_000] {
            let text = vec![b'y'; length];
            let mut bytes = Vec::new();
            Framing::WebSocket.write(&mut bytes, &text);
            let mut decoder = bowline_protocol::ws::Decoder::default();
            let message = decoder.next(&mut bytes, &mut 0, 1 << 20, false).unwrap();
            assert_eq!(message, Some(bowline_protocol::ws::Message::Text(&text)));
        }
    }

    #[test]
    fn answers_to_an_upgrade() {
        let mut bytes = Vec::new();
        bowline_protocol::ws::handshake::Refused::new(429, bowline_protocol::ErrorCode::RateLimited, "later")
            .retry_after(1500)
            .write(&mut bytes);
        assert_eq!(Answer::parse(&bytes[..bytes.len() - 1]), Ok(None));
        let answer = Answer::parse(&bytes).unwrap().unwrap();
        assert_eq!((answer.status, answer.retry_after_ms), (429, Some(2000)));
        assert_eq!(answer.message(&bytes), "later");
        let switching = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n\x81";
        assert_eq!(Answer::parse(switching).unwrap().unwrap().head_bytes, switching.len() - 1);
    }

    #[test]
    fn types_and_numbers_are_found_without_parsing() {
        let text = br#"{"type":"room.push","room":"r","offset":17,"from":"a"}"#;
        assert!(is(text, "room.push") && !is(text, "room") && !is(b"pong", "pong"));
        let mark = memchr::memmem::Finder::new("\"offset\":");
        assert_eq!(number_behind(text, &mark).map(|(value, _)| value), Some(17));
        assert_eq!(number_behind(b"\"offset\":x", &mark), None);
    }
}
