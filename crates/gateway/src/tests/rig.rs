//! What the tests share: a rehearsed router and verifier, and clients on plain sockets.

use crate::{
    Addresses, Config, Handle, RoomJudge,
    handle::Gateway,
    judge::{Judge, Rehearsed},
};
use bowline_auth::{Fault, Identity};
use bowline_links::{Downlinks, Uplinks};
use bowline_protocol::{
    ClientFrame, DeviceId, Frame, ServerFrame, UserId,
    link::{ConnRef, Down, Downlink, NodeRef, Target, Up, Uplink},
};
use bytes::Bytes;
use std::{
    collections::HashMap,
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    sync::{Arc, Condvar, Mutex, OnceLock},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

/// Nothing that is waited for may take longer.
pub const PATIENCE: Duration = Duration::from_secs(20);

pub fn wall_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as u64
}

/// What the router does by itself.
#[derive(Clone, Copy)]
pub struct Manners {
    pub accepts: bool,
    /// Answers `msg.send` with an ack.
    pub acks: bool,
    /// Messages it takes before its queue is full.
    pub capacity: usize,
}

#[derive(Default)]
struct Inbox {
    got: Vec<Uplink>,
    /// Of each connection, by its number: how many events it was sent.
    sent: HashMap<u64, u64>,
    taken: usize,
}

/// A router that notes everything.
pub struct Router {
    inbox: Mutex<Inbox>,
    changed: Condvar,
    manners: Mutex<Manners>,
    pub handle: OnceLock<Handle>,
    node: Arc<NodeRef>,
}

impl Uplinks for Router {
    fn send(&self, batch: &mut Vec<Uplink>) {
        let manners = *self.manners.lock().unwrap();
        let mut inbox = self.inbox.lock().unwrap();
        let take = batch.len().min(manners.capacity.saturating_sub(inbox.taken));
        inbox.taken += take;
        inbox.got.extend(batch.drain(..take));
        self.changed.notify_all();
    }

    fn depth(&self) -> (usize, usize) {
        let capacity = self.manners.lock().unwrap().capacity;
        (self.inbox.lock().unwrap().taken, capacity)
    }
}

impl Router {
    pub fn set(&self, change: impl FnOnce(&mut Manners)) {
        change(&mut self.manners.lock().unwrap());
    }

    /// Answers what comes, as the manners say, for ever.
    fn run(self: Arc<Self>) {
        let mut seen = 0;
        loop {
            let fresh: Vec<Uplink> = {
                let inbox = self.inbox.lock().unwrap();
                let (inbox, _) = self
                    .changed
                    .wait_timeout_while(inbox, Duration::from_millis(100), |inbox| inbox.got.len() == seen)
                    .unwrap();
                inbox.got[seen..].to_vec()
            };
            seen += fresh.len();
            let manners = *self.manners.lock().unwrap();
            for Uplink { from, event } in fresh {
                match event {
                    Up::Open(_) if manners.accepts => self.tell(&from, Down::Accepted { resumed: false }),
                    Up::Frame(ClientFrame::MsgSend { send }) if manners.acks => {
                        let ack =
                            ServerFrame::MsgAck { id: &send.id, conversation_id: "d:a:b", seq: 1, ts: 1 };
                        self.tell(&from, Down::Frame { frame: ack.encode(), decided: 1, answer: true });
                    }
                    _ => {}
                }
            }
        }
    }

    /// Sends the next event to a connection.
    pub fn tell(&self, to: &ConnRef, event: Down) {
        let no = {
            let mut inbox = self.inbox.lock().unwrap();
            let sent = inbox.sent.entry(to.connection).or_insert(0);
            *sent += 1;
            *sent
        };
        self.tell_numbered(to, no, event);
    }

    pub fn tell_numbered(&self, to: &ConnRef, no: u64, event: Down) {
        self.tell_all([Target { connection: to.connection, login: to.login, no }], event);
    }

    pub fn tell_all(&self, to: impl IntoIterator<Item = Target>, event: Down) {
        let message = Downlink { node: self.node.clone(), to: to.into_iter().collect(), event };
        self.handle.get().unwrap().send(vec![message]);
    }

    /// The next number for a connection, taken.
    pub fn number(&self, to: &ConnRef) -> u64 {
        let mut inbox = self.inbox.lock().unwrap();
        let sent = inbox.sent.entry(to.connection).or_insert(0);
        *sent += 1;
        *sent
    }

    /// Waits until `found` finds something in all that came up.
    pub fn wait<T>(&self, what: &str, mut found: impl FnMut(&[Uplink]) -> Option<T>) -> T {
        let until = Instant::now() + PATIENCE;
        let mut inbox = self.inbox.lock().unwrap();
        loop {
            if let Some(found) = found(&inbox.got) {
                return found;
            }
            let left = until.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "the router never saw {what}: {:?}", inbox.got);
            inbox = self.changed.wait_timeout(inbox, left).unwrap().0;
        }
    }

    /// The n-th connection that opened as `user`.
    pub fn opened(&self, user: &str, n: usize) -> ConnRef {
        self.wait(user, |got| {
            got.iter()
                .filter(|up| matches!(&up.event, Up::Open(open) if open.user.as_str() == user))
                .nth(n)
                .map(|up| up.from.clone())
        })
    }

    /// Waits for the `Closed` of a connection; there may be one only.
    pub fn closed(&self, conn: &ConnRef) -> &'static str {
        self.wait("closed", |got| {
            let mut reasons = got.iter().filter(|up| up.from == *conn).filter_map(|up| match up.event {
                Up::Closed(code) => Some(code.reason()),
                _ => None,
            });
            let reason = reasons.next();
            assert_eq!(reasons.next(), None, "a connection is closed once");
            reason
        })
    }

    pub fn count(&self, what: impl Fn(&Up) -> bool) -> usize {
        self.inbox.lock().unwrap().got.iter().filter(|up| what(&up.event)).count()
    }

    /// Room for more.
    pub fn empty(&self) {
        self.inbox.lock().unwrap().taken = 0;
    }
}

/// A running gateway.
pub struct Rig {
    pub handle: Handle,
    pub router: Arc<Router>,
    pub addresses: Addresses,
    /// What the HTTP server was handed.
    pub http: Arc<Mutex<Vec<(TcpStream, Bytes)>>>,
    pub handed: Arc<Condvar>,
}

pub fn config() -> Config {
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    Config { listen: any, tcp_listen: Some(any), workers: 2, ..Config::default() }
}

/// Tokens name their user. `alice/phone` binds a device, `alice+300` runs out in so many milliseconds, `later-alice`
/// is judged by another thread.
fn judge() -> Rehearsed {
    Box::new(|question, later| {
        let token = question.token.to_owned();
        let Some(rest) = token.strip_prefix("later-") else { return Some(judged(&token)) };
        let (reply, token) = (later(), rest.to_owned());
        std::thread::spawn(move || reply(judged(&token)));
        None
    })
}

fn judged(token: &str) -> Result<Identity, Fault> {
    match token {
        "" | "bad" => return Err(Fault::Invalid("the signature is wrong".into())),
        "expired" => return Err(Fault::Expired),
        "revoked" => return Err(Fault::Revoked),
        "nobody" => return Err(Fault::NoSubject),
        "busy" => return Err(Fault::Unavailable("the hook does not answer".into())),
        _ => {}
    }
    let (name, ttl_ms) = token.split_once('+').unwrap_or((token, "3600000"));
    let (user, device) = match name.split_once('/') {
        Some((user, device)) => (user, Some(DeviceId::trusted(device))),
        None => (name, None),
    };
    Ok(Identity {
        user: UserId::trusted(user),
        device,
        class: None,
        expires_at: wall_ms() + ttl_ms.parse::<u64>().unwrap(),
        issued_at: 5,
        token_id: Some(format!("jti-{user}").into()),
        session_id: None,
        rooms: None,
    })
}

impl Rig {
    pub fn new(config: Config) -> Self {
        Self::started(config, None)
    }

    pub fn with_room_judge(config: Config, judge: RoomJudge) -> Self {
        Self::started(config, Some(judge))
    }

    fn started(config: Config, room_judge: Option<RoomJudge>) -> Self {
        let node = Arc::new(NodeRef { node_id: "n1".into(), boot_id: "b1".into() });
        let router = Arc::new(Router {
            inbox: Mutex::default(),
            changed: Condvar::new(),
            manners: Mutex::new(Manners { accepts: true, acks: true, capacity: usize::MAX }),
            handle: OnceLock::new(),
            node: node.clone(),
        });
        let http = Arc::new(Mutex::new(Vec::new()));
        let handed = Arc::new(Condvar::new());
        let mut bound = Gateway::bind_with(config, node, Judge::Rehearsed(judge())).unwrap();
        if let Some(judge) = room_judge {
            bound = bound.with_room_judge(judge);
        }
        let addresses = bound.addresses();
        let (list, news) = (http.clone(), handed.clone());
        let take = move |stream: bowline_tls::Stream, read| {
            list.lock().unwrap().push((stream.socket, read));
            news.notify_all();
        };
        let handle = bound.start(router.clone(), Arc::new(take)).unwrap();
        assert!(router.handle.set(handle.clone()).is_ok());
        let runner = router.clone();
        std::thread::spawn(move || runner.run());
        Self { handle, router, addresses, http, handed }
    }

    pub fn start() -> Self {
        Self::new(config())
    }

    /// A client with a socket and nothing said.
    pub fn dial(&self, kind: Kind) -> Client {
        let address = match kind {
            Kind::Ws => self.addresses.ws,
            Kind::Tcp => self.addresses.tcp.unwrap(),
        };
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_nodelay(true).unwrap();
        Client { stream, kind, buffer: Vec::new() }
    }

    /// Asks for an upgrade; the answer's head, and its body when it is a refusal.
    pub fn upgrade(&self, target: &str, headers: &str) -> (Client, String) {
        let mut client = self.dial(Kind::Ws);
        client.raw(request(target, headers).as_bytes());
        let answer = client.http_answer();
        (client, answer)
    }

    /// A WebSocket without identity, or a TCP connection.
    pub fn plain(&self, kind: Kind) -> Client {
        match kind {
            Kind::Tcp => self.dial(Kind::Tcp),
            Kind::Ws => {
                let (client, answer) = self.upgrade("/ws", "");
                assert!(answer.starts_with("HTTP/1.1 101"), "{answer}");
                client
            }
        }
    }

    /// A client that is connected by the frame `connect`.
    pub fn client(&self, kind: Kind, token: &str) -> Client {
        let mut client = self.plain(kind);
        client.connect(token);
        let connected = client.text();
        assert!(connected.starts_with(r#"{"type":"connected""#), "{connected}");
        client
    }

    /// Waits for a state of the gateway that is reached soon, by itself.
    pub fn until(&self, what: &str, mut reached: impl FnMut(&Handle) -> bool) {
        let until = Instant::now() + PATIENCE;
        while !reached(&self.handle) {
            assert!(Instant::now() < until, "never: {what}; {:?}", self.handle.metrics());
            std::thread::yield_now();
        }
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.handle.stop_now();
    }
}

pub fn request(target: &str, headers: &str) -> String {
    format!(
        "GET {target} HTTP/1.1\r\nHost: h\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n{headers}\r\n"
    )
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Ws,
    Tcp,
}

pub const BOTH: [Kind; 2] = [Kind::Ws, Kind::Tcp];

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Got {
    Text(String),
    Binary(Vec<u8>),
    /// A WebSocket close frame.
    Close(u16, String),
    Pong(Vec<u8>),
    Ping,
    End,
    /// The socket was reset.
    Reset,
}

pub struct Client {
    pub stream: TcpStream,
    pub kind: Kind,
    pub buffer: Vec<u8>,
}

/// A client's frame on the wire.
pub fn framed(kind: Kind, opcode: u8, payload: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    match kind {
        Kind::Tcp => out.extend_from_slice(&(payload.len() as u32).to_be_bytes()),
        Kind::Ws => {
            out.push(0x80 | opcode);
            match payload.len() {
                n @ 0..126 => out.push(0x80 | n as u8),
                n @ 126..0x1_0000 => {
                    out.push(0x80 | 126);
                    out.extend_from_slice(&(n as u16).to_be_bytes());
                }
                n => {
                    out.push(0x80 | 127);
                    out.extend_from_slice(&(n as u64).to_be_bytes());
                }
            }
            let mask = [1, 2, 3, 4];
            out.extend_from_slice(&mask);
            out.extend(payload.iter().enumerate().map(|(i, b)| b ^ mask[i % 4]));
            return out;
        }
    }
    out.extend_from_slice(payload);
    out
}

pub fn send_frame(id: &str) -> String {
    format!(r#"{{"type":"msg.send","id":"{id}","to":"bob","body":"hello"}}"#)
}

/// A push of so many bytes.
pub fn push(bytes: usize) -> Down {
    let json = format!(r#"{{"type":"msg.push","body":"{}"}}"#, "x".repeat(bytes));
    Down::Frame { frame: Frame { json: json.into(), body: None }, decided: 0, answer: false }
}

impl Client {
    pub fn raw(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    pub fn say(&mut self, text: &str) {
        let bytes = framed(self.kind, 1, text.as_bytes());
        self.raw(&bytes);
    }

    pub fn connect(&mut self, token: &str) {
        self.say(&format!(r#"{{"type":"connect","token":"{token}","device_id":"{token}-device"}}"#));
    }

    fn more(&mut self) -> Option<Got> {
        let mut chunk = [0; 16 << 10];
        match self.stream.read(&mut chunk) {
            Ok(0) => Some(Got::End),
            Ok(n) => {
                self.buffer.extend_from_slice(&chunk[..n]);
                None
            }
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => Some(Got::Reset),
            Err(error) => panic!("{error} with {:?}", String::from_utf8_lossy(&self.buffer)),
        }
    }

    /// Head and body of an HTTP answer.
    pub fn http_answer(&mut self) -> String {
        loop {
            if let Some(at) = self.buffer.windows(4).position(|w| w == b"\r\n\r\n") {
                let head = String::from_utf8(self.buffer[..at + 4].to_vec()).unwrap();
                let length = head
                    .lines()
                    .find_map(|line| line.strip_prefix("Content-Length: "))
                    .map_or(0, |n| n.parse::<usize>().unwrap());
                if self.buffer.len() >= at + 4 + length {
                    let rest = self.buffer.split_off(at + 4 + length);
                    let answer = std::mem::replace(&mut self.buffer, rest);
                    return String::from_utf8(answer).unwrap();
                }
            }
            assert_eq!(self.more(), None, "{:?}", String::from_utf8_lossy(&self.buffer));
        }
    }

    pub fn next(&mut self) -> Got {
        loop {
            if let Some((got, used)) = self.parse() {
                self.buffer.drain(..used);
                return got;
            }
            if let Some(end) = self.more() {
                return end;
            }
        }
    }

    fn parse(&self) -> Option<(Got, usize)> {
        let b = &self.buffer;
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        if self.kind == Kind::Tcp {
            let length = u32::from_be_bytes(b.get(..4)?.try_into().unwrap()) as usize;
            let payload = b.get(4..4 + length)?;
            let got = match payload.first() {
                Some(0) => Got::Binary(payload.to_vec()),
                _ => Got::Text(text(payload)),
            };
            return Some((got, 4 + length));
        }
        let (head, length) = match *b.get(1)? {
            126 => (4, u16::from_be_bytes(b.get(2..4)?.try_into().unwrap()) as usize),
            127 => (10, u64::from_be_bytes(b.get(2..10)?.try_into().unwrap()) as usize),
            n => (2, n as usize),
        };
        let payload = b.get(head..head + length)?;
        let got = match b[0] {
            0x81 => Got::Text(text(payload)),
            0x82 => Got::Binary(payload.to_vec()),
            0x88 if payload.is_empty() => Got::Close(1005, String::new()),
            0x88 => Got::Close(u16::from_be_bytes([payload[0], payload[1]]), text(&payload[2..])),
            0x89 => Got::Ping,
            0x8a => Got::Pong(payload.to_vec()),
            other => panic!("opcode {other:x}"),
        };
        Some((got, head + length))
    }

    pub fn text(&mut self) -> String {
        match self.next() {
            Got::Text(text) => text,
            other => panic!("{other:?} instead of a text"),
        }
    }

    /// The next text must begin so.
    pub fn expect(&mut self, start: &str) -> String {
        let text = self.text();
        assert!(text.starts_with(start), "{text} instead of {start}");
        text
    }

    /// `session.closed`, the close frame of the transport, and the end; with what came as the last frame.
    pub fn expect_closed(&mut self, code: u16, reason: &str) -> String {
        let closed = self.expect(&format!(r#"{{"type":"session.closed","code":{code},"reason":"{reason}""#));
        if self.kind == Kind::Ws {
            assert_eq!(self.next(), Got::Close(code, reason.to_owned()));
            let answer = framed(Kind::Ws, 8, &code.to_be_bytes());
            // The server may be gone already when the connection was failed.
            let _gone = self.stream.write_all(&answer);
        }
        let end = self.next();
        assert!(matches!(end, Got::End | Got::Reset), "{end:?}");
        closed
    }
}

/// The value of a field of flat JSON.
pub fn field<'a>(json: &'a str, name: &str) -> &'a str {
    let start =
        json.find(&format!("\"{name}\":")).unwrap_or_else(|| panic!("no {name} in {json}")) + name.len() + 3;
    json[start..].split([',', '}']).next().unwrap().trim_matches('"')
}
