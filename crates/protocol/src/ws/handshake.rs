//! The request that opens a WebSocket (RFC 6455, 4.2): its head parsed, judged and answered. Sans-IO.

use super::deflate::Agreed;
use crate::{
    error::ErrorCode,
    frame::{write_number, write_string},
    ids::{CHANNEL_BYTES_MAX, DeviceClass, DeviceId},
};
use base64::Engine;
use sha1::{Digest, Sha1};
use std::borrow::Cow;

/// The longest request head; a longer one is answered 431.
pub const HEAD_BYTES_MAX: usize = 64 * 1024;
/// Header lines for which there is room from the start; a head that has more is looked at again, with room for all.
const HEADERS_USUAL: usize = 32;
/// No header line is shorter, its end included: `a:` and a line feed.
const HEADER_BYTES_MIN: usize = 3;
/// The subprotocol that is selected when the client offers it.
pub const SUBPROTOCOL: &str = "bowline.v1.json";

/// An answer that ends a request before the upgrade.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    pub status: u16,
    pub code: ErrorCode,
    pub message: Cow<'static, str>,
    /// Carried by 429 and 503.
    pub retry_after_ms: Option<u64>,
}

impl Refused {
    pub fn new(status: u16, code: ErrorCode, message: impl Into<Cow<'static, str>>) -> Self {
        Self { status, code, message: message.into(), retry_after_ms: None }
    }

    pub fn retry_after(mut self, ms: u64) -> Self {
        self.retry_after_ms = Some(ms);
        self
    }

    fn malformed(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(400, ErrorCode::Malformed, message)
    }

    /// The same in seconds, as HTTP has it.
    pub fn retry_after_s(&self) -> Option<u64> {
        self.retry_after_ms.map(|ms| ms.div_ceil(1000).max(1))
    }

    /// Appends the whole HTTP answer.
    pub fn write(&self, out: &mut Vec<u8>) {
        let mut body = Vec::with_capacity(64 + self.message.len());
        body.extend_from_slice(b"{\"code\":");
        write_string(&mut body, self.code.as_str());
        body.extend_from_slice(b",\"message\":");
        write_string(&mut body, &self.message);
        if let Some(ms) = self.retry_after_ms {
            body.extend_from_slice(b",\"retry_after_ms\":");
            write_number(&mut body, ms);
        }
        body.push(b'}');
        let reason = match self.status {
            400 => "Bad Request",
            401 => "Unauthorized",
            403 => "Forbidden",
            404 => "Not Found",
            409 => "Conflict",
            426 => "Upgrade Required",
            429 => "Too Many Requests",
            431 => "Request Header Fields Too Large",
            _ => "Service Unavailable",
        };
        let mut head = format!(
            "HTTP/1.1 {} {reason}\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: {}\r\n",
            self.status,
            body.len(),
            if self.status == 426 { "close, Upgrade" } else { "close" },
        );
        match self.status {
            401 => head.push_str("WWW-Authenticate: Bearer\r\n"),
            426 => head.push_str("Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"),
            _ => {}
        }
        if let Some(seconds) = self.retry_after_s() {
            head.push_str(&format!("Retry-After: {seconds}\r\n"));
        }
        head.push_str("\r\n");
        out.extend_from_slice(head.as_bytes());
        out.extend_from_slice(&body);
    }
}

/// A complete request head.
#[derive(Debug)]
pub struct Request<'a> {
    pub method: &'a str,
    pub path: &'a str,
    pub query: Option<&'a str>,
    minor_version: u8,
    headers: Vec<httparse::Header<'a>>,
    /// How many bytes the head takes.
    pub head_bytes: usize,
}

impl<'a> Request<'a> {
    /// Parses a head; `None` while it is not complete.
    pub fn parse(bytes: &'a [u8]) -> Result<Option<Self>, Refused> {
        let too_large = || Refused::new(431, ErrorCode::TooLarge, "the request head is larger than 64 KiB");
        let mut headers = vec![httparse::EMPTY_HEADER; HEADERS_USUAL];
        loop {
            let room = headers.len();
            let mut request = httparse::Request::new(&mut headers);
            let parsed = match request.parse(bytes) {
                Err(httparse::Error::TooManyHeaders) if room == HEADERS_USUAL => {
                    let lines = memchr::memchr_iter(b'\n', bytes).count();
                    let most = lines.min(HEAD_BYTES_MAX / HEADER_BYTES_MIN);
                    headers.resize(most.max(HEADERS_USUAL + 1), httparse::EMPTY_HEADER);
                    continue;
                }
                parsed => parsed,
            };
            return match parsed {
                Ok(httparse::Status::Complete(head_bytes)) if head_bytes <= HEAD_BYTES_MAX => {
                    let (method, target) =
                        (request.method.unwrap_or_default(), request.path.unwrap_or_default());
                    let minor_version = request.version.unwrap_or_default();
                    let used = request.headers.len();
                    headers.truncate(used);
                    let target = origin_form(target);
                    let (path, query) = match target.split_once('?') {
                        Some((path, query)) => (path, Some(query)),
                        None => (target, None),
                    };
                    Ok(Some(Self { method, path, query, minor_version, headers, head_bytes }))
                }
                Ok(httparse::Status::Complete(_)) | Err(httparse::Error::TooManyHeaders) => Err(too_large()),
                Ok(httparse::Status::Partial) if bytes.len() > HEAD_BYTES_MAX => Err(too_large()),
                Ok(httparse::Status::Partial) => Ok(None),
                Err(error) => Err(Refused::malformed(format!("the request is not HTTP/1.1: {error}"))),
            };
        }
    }

    fn values(&self, name: &'static str) -> impl Iterator<Item = &'a [u8]> + '_ {
        self.headers.iter().filter(move |h| h.name.eq_ignore_ascii_case(name)).map(|h| h.value)
    }

    /// The elements of a header that is a comma-separated list.
    fn elements(&self, name: &'static str) -> impl Iterator<Item = &'a str> + '_ {
        self.values(name)
            .filter_map(|value| std::str::from_utf8(value).ok())
            .flat_map(|value| value.split(','))
            .map(str::trim)
            .filter(|element| !element.is_empty())
    }

    fn one(&self, name: &'static str) -> Result<Option<&'a [u8]>, Refused> {
        let mut values = self.values(name);
        match (values.next(), values.next()) {
            (value, None) => Ok(value),
            _ => Err(Refused::malformed(format!("the header {name} is given twice"))),
        }
    }

    /// It asks for a WebSocket, well formed or not.
    pub fn is_upgrade(&self) -> bool {
        self.elements("upgrade").any(|protocol| protocol.eq_ignore_ascii_case("websocket"))
    }

    pub fn origin(&self) -> Option<&'a [u8]> {
        self.values("origin").next()
    }

    /// Judges the upgrade itself: 426 when it asks for none, 400 when it is malformed or brings several tokens.
    pub fn upgrade(&self) -> Result<Upgrade, Refused> {
        let needed = |message| Refused::new(426, ErrorCode::Malformed, message);
        if !self.is_upgrade() {
            return Err(needed("this path speaks WebSocket: send Upgrade: websocket"));
        }
        if self.method != "GET" || self.minor_version != 1 {
            return Err(Refused::malformed("a WebSocket is opened by GET and HTTP/1.1"));
        }
        if !self.elements("connection").any(|option| option.eq_ignore_ascii_case("upgrade")) {
            return Err(Refused::malformed("the header Connection does not say Upgrade"));
        }
        if self.one("host")?.is_none() {
            return Err(Refused::malformed("the header Host is missing"));
        }
        self.one("origin")?;
        match self.one("sec-websocket-version")? {
            Some(b"13") => {}
            Some(_) => return Err(needed("Sec-WebSocket-Version must be 13")),
            None => return Err(Refused::malformed("Sec-WebSocket-Version is missing; it must be 13")),
        }
        let accept = match self.one("sec-websocket-key")? {
            Some(key) if key_is_valid(key) => accept(key),
            _ => {
                return Err(Refused::malformed("Sec-WebSocket-Key is missing or not the Base64 of 16 bytes"));
            }
        };
        let deflate = Agreed::of(self.elements("sec-websocket-extensions"));
        let mut upgrade =
            Upgrade { accept, subprotocol: false, deflate, token: None, params: Params::default() };
        let mut tokens = Vec::new();
        for value in self.values("authorization") {
            if let Some(token) = bearer(value)? {
                tokens.push(token.to_owned());
            }
        }
        for protocol in self.elements("sec-websocket-protocol") {
            if protocol == SUBPROTOCOL {
                upgrade.subprotocol = true;
            } else if let Some(token) = protocol.strip_prefix("bearer.") {
                tokens.push(token.to_owned());
            }
        }
        upgrade.params = Params::parse(self.query.unwrap_or_default(), &mut tokens)?;
        if tokens.len() > 1 {
            return Err(Refused::malformed(
                "several tokens: give one, as Authorization, ?token=, subprotocol or first frame",
            ));
        }
        upgrade.token = tokens.pop();
        Ok(upgrade)
    }
}

fn origin_form(target: &str) -> &str {
    let Some(rest) = target.strip_prefix("http://").or_else(|| target.strip_prefix("https://")) else {
        return target;
    };
    rest.find(['/', '?']).map_or("/", |at| &rest[at..])
}

fn bearer(value: &[u8]) -> Result<Option<&str>, Refused> {
    let value = std::str::from_utf8(value)
        .map_err(|_| Refused::malformed("the header Authorization is not UTF-8"))?
        .trim();
    // The scheme alone is a token too: an empty one, which is no good.
    let (scheme, token) = value.split_once(' ').unwrap_or((value, ""));
    Ok(scheme.eq_ignore_ascii_case("bearer").then(|| token.trim()))
}

fn key_is_valid(key: &[u8]) -> bool {
    base64::engine::general_purpose::STANDARD.decode(key).is_ok_and(|bytes| bytes.len() == 16)
}

/// `Sec-WebSocket-Accept` for a key.
fn accept(key: &[u8]) -> [u8; 28] {
    let digest =
        Sha1::new().chain_update(key).chain_update(b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").finalize();
    let mut text = [0; 28];
    let written = base64::engine::general_purpose::STANDARD
        .encode_slice(digest, &mut text)
        .expect("20 bytes are 28 characters of Base64");
    debug_assert_eq!(written, text.len());
    text
}

/// A well-formed upgrade.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Upgrade {
    pub accept: [u8; 28],
    /// `bowline.v1.json` was offered and is to be selected.
    pub subprotocol: bool,
    /// The offer of permessage-deflate that can be taken.
    pub deflate: Option<Agreed>,
    pub token: Option<String>,
    pub params: Params,
}

/// Appends the answer 101.
pub fn write_switching(out: &mut Vec<u8>, accept: &[u8; 28], subprotocol: bool, deflate: Option<Agreed>) {
    out.extend_from_slice(
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: ",
    );
    out.extend_from_slice(accept);
    if subprotocol {
        out.extend_from_slice(b"\r\nSec-WebSocket-Protocol: ");
        out.extend_from_slice(SUBPROTOCOL.as_bytes());
    }
    if let Some(agreed) = deflate {
        out.extend_from_slice(b"\r\nSec-WebSocket-Extensions: ");
        agreed.write(out);
    }
    out.extend_from_slice(b"\r\n\r\n");
}

/// What the query says about the client.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Params {
    pub device_id: Option<DeviceId>,
    pub device_class: Option<DeviceClass>,
    pub channel: Option<String>,
    pub resume: Option<String>,
}

impl Params {
    /// Reads a query; tokens go to `tokens`, names that are not known are ignored.
    fn parse(query: &str, tokens: &mut Vec<String>) -> Result<Self, Refused> {
        let mut params = Self::default();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            if !matches!(name, "token" | "device_id" | "device_class" | "channel" | "resume") {
                continue;
            }
            let value = percent_decode(value).ok_or_else(|| {
                Refused::malformed(format!("the parameter {name} is not percent-encoded UTF-8"))
            })?;
            match name {
                "token" => tokens.push(value),
                "device_id" => {
                    let id = DeviceId::parse(&value);
                    params.device_id =
                        Some(id.map_err(|error| {
                            Refused::malformed(format!("the parameter device_id: {error}"))
                        })?);
                }
                "device_class" => {
                    let class = DeviceClass::parse(&value).ok_or_else(|| {
                        Refused::malformed(
                            "the parameter device_class is none of web, ios, android, desktop, iot",
                        )
                    })?;
                    params.device_class = Some(class);
                }
                "channel" if value.len() > CHANNEL_BYTES_MAX => {
                    return Err(Refused::malformed(format!(
                        "the parameter channel is {} bytes long; it takes at most {CHANNEL_BYTES_MAX}",
                        value.len()
                    )));
                }
                "channel" => params.channel = Some(value),
                _ => params.resume = Some(value),
            }
        }
        Ok(params)
    }
}

/// Decodes `%XX` and, as forms write spaces, `+`.
fn percent_decode(text: &str) -> Option<String> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, tail)) = rest.split_first() {
        rest = tail;
        out.push(match byte {
            b'+' => b' ',
            b'%' => {
                let (digits, tail) = rest.split_at_checked(2)?;
                rest = tail;
                let digit = |d: u8| char::from(d).to_digit(16);
                (digit(digits[0])? * 16 + digit(digits[1])?) as u8
            }
            byte => byte,
        });
    }
    String::from_utf8(out).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &str = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n";

    fn head(line: &str, headers: &str) -> String {
        format!(
            "{line} HTTP/1.1\r\nHost: a\r\nUpgrade: WebSocket\r\nConnection: keep-alive, Upgrade\r\n{headers}\r\n"
        )
    }

    fn judge(head: &str) -> Result<Upgrade, (u16, String)> {
        let refused = |r: Refused| (r.status, r.message.into_owned());
        Request::parse(head.as_bytes()).map_err(refused)?.expect("a whole head").upgrade().map_err(refused)
    }

    #[test]
    fn the_accept_value_of_the_rfc() {
        let upgrade = judge(&head("GET /ws", &format!("{KEY}Sec-WebSocket-Version: 13\r\n"))).unwrap();
        assert_eq!(&upgrade.accept, b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo=");
        assert!(!upgrade.subprotocol && upgrade.token.is_none());
    }

    #[test]
    fn faults_of_an_upgrade() {
        let v = "Sec-WebSocket-Version: 13\r\n";
        let kv = format!("{KEY}{v}");
        let long = format!("GET /ws?channel={}", "x".repeat(33));
        let rows = [
            (head("GET /ws", &kv), 0),
            ("GET /ws HTTP/1.1\r\nHost: a\r\n\r\n".into(), 426),
            ("GET /ws HTTP/1.1\r\nHost: a\r\nUpgrade: h2c\r\n\r\n".into(), 426),
            (format!("GET /ws HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\n{kv}\r\n"), 400),
            (
                format!(
                    "GET /ws HTTP/1.0\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n{kv}\r\n"
                ),
                400,
            ),
            (format!("GET /ws HTTP/1.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n{kv}\r\n"), 400),
            (head("POST /ws", &kv), 400),
            (head("GET /ws", KEY), 400),
            (head("GET /ws", &format!("{KEY}Sec-WebSocket-Version: 8\r\n")), 426),
            (head("GET /ws", v), 400),
            (head("GET /ws", &format!("Sec-WebSocket-Key: abc\r\n{v}")), 400),
            (head("GET /ws", &format!("{KEY}{KEY}{v}")), 400),
            (head("GET /ws?token=a&token=b", &kv), 400),
            (head("GET /ws?token=a", &format!("{kv}Authorization: Bearer b\r\n")), 400),
            (head("GET /ws?token=a", &format!("{kv}Sec-WebSocket-Protocol: bearer.b\r\n")), 400),
            (head("GET /ws?token=a", &format!("{kv}Authorization: Basic b\r\n")), 0),
            (head("GET /ws?token=a", &format!("{kv}Authorization: Bearer \r\n")), 400),
            (head("GET /ws?device_id=a%3Ab", &kv), 400),
            (head("GET /ws?device_id=", &kv), 400),
            (head("GET /ws?device_id=a%2", &kv), 400),
            (head("GET /ws?device_id=%ff", &kv), 400),
            (head("GET /ws?device_class=fridge", &kv), 400),
            (head(&long, &kv), 400),
            (head("GET /ws?other=%zz", &kv), 0),
        ];
        for (head, expected) in rows {
            assert_eq!(judge(&head).err().map_or(0, |e| e.0), expected, "{head}");
        }
    }

    #[test]
    fn one_token_from_any_place() {
        let kv = format!("{KEY}Sec-WebSocket-Version: 13\r\n");
        let rows = [
            (head("GET /ws?token=t.0-_", &kv), false),
            (head("GET /ws", &format!("{kv}authorization: bearer t.0-_\r\n")), false),
            (
                head("GET /ws", &format!("{kv}Sec-WebSocket-Protocol: bowline.v1.json, bearer.t.0-_\r\n")),
                true,
            ),
            (
                head(
                    "GET /ws",
                    &format!(
                        "{kv}Sec-WebSocket-Protocol: bearer.t.0-_\r\nSec-WebSocket-Protocol: bowline.v1.json\r\n"
                    ),
                ),
                true,
            ),
        ];
        for (head, subprotocol) in rows {
            let upgrade = judge(&head).unwrap();
            assert_eq!(
                (upgrade.token.as_deref(), upgrade.subprotocol),
                (Some("t.0-_"), subprotocol),
                "{head}"
            );
        }
    }

    #[test]
    fn the_query_describes_the_device() {
        let line = "GET http://host/ws?device_id=my%20phone&device_class=ios&channel=a+b&resume=r%C3%A9";
        let text = head(line, &format!("{KEY}Sec-WebSocket-Version: 13\r\n"));
        let request = Request::parse(text.as_bytes()).unwrap().unwrap();
        assert_eq!(request.path, "/ws");
        let params = request.upgrade().unwrap().params;
        assert_eq!(params.device_id.as_deref(), Some("my phone"));
        assert_eq!(params.device_class, Some(DeviceClass::Ios));
        assert_eq!((params.channel.as_deref(), params.resume.as_deref()), (Some("a b"), Some("ré")));
    }

    #[test]
    fn heads_are_bounded() {
        let line = |n: usize| format!("X: {}\r\n", "x".repeat(n - 5));
        let base = head("GET /ws", "").len();
        let fits = head("GET /ws", &line(HEAD_BYTES_MAX - base));
        assert_eq!(fits.len(), HEAD_BYTES_MAX);
        assert!(Request::parse(fits.as_bytes()).unwrap().is_some());
        let over = head("GET /ws", &line(HEAD_BYTES_MAX - base + 1));
        assert_eq!(Request::parse(over.as_bytes()).unwrap_err().status, 431);
        assert!(Request::parse(&over.as_bytes()[..HEAD_BYTES_MAX]).unwrap().is_none());
        assert_eq!(Request::parse(&vec![b'G'; HEAD_BYTES_MAX + 1]).unwrap_err().status, 431);
        // However many lines that are.
        for (line, count) in [("A: b\r\n", 31), ("A: b\r\n", 300), ("A: b\r\n", 10_000), ("A:\n", 21_000)] {
            let text = head("GET /ws", &line.repeat(count));
            let request = Request::parse(text.as_bytes()).unwrap().unwrap();
            assert_eq!((request.headers.len(), request.head_bytes), (count + 3, text.len()));
            assert!(Request::parse(&text.as_bytes()[..text.len() - 1]).unwrap().is_none());
        }
        let over = head("GET /ws", &"A:\n".repeat(30_000));
        assert_eq!(Request::parse(over.as_bytes()).unwrap_err().status, 431);
        assert_eq!(Request::parse(b"\x16\x03\x01\x00").unwrap_err().status, 400);
    }

    #[test]
    fn a_refusal_is_a_whole_answer() {
        let mut out = Vec::new();
        Refused::new(429, ErrorCode::RateLimited, "too \"many\"").retry_after(1500).write(&mut out);
        let text = String::from_utf8(out).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 429 Too Many Requests\r\n"), "{head}");
        assert!(head.contains("Retry-After: 2"), "{head}");
        assert_eq!(body, r#"{"code":"rate_limited","message":"too \"many\"","retry_after_ms":1500}"#);
        assert!(head.contains(&format!("Content-Length: {}", body.len())), "{head}");
    }
}
