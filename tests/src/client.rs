//! A blocking client. It speaks the same frames over WebSocket (a third-party library) and over plain TCP, so that
//! one suite runs on both.

use crate::{raw, server::Addresses, token, wait::PATIENCE};
use serde_json::{Value, json};
use std::{
    collections::VecDeque,
    io::{self, ErrorKind, Read, Write},
    net::{Shutdown, SocketAddr, TcpStream},
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};
use tungstenite::{
    HandshakeError, Message, WebSocket,
    client::IntoClientRequest,
    http::{HeaderName, HeaderValue},
    protocol::{CloseFrame, Role, WebSocketConfig, frame::coding::CloseCode},
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    Ws,
    Tcp,
}

/// How a WebSocket client hands over its token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    Header,
    Query,
    Subprotocol,
    FirstFrame,
}

/// An id that no other message of this run has.
pub fn fresh_id() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    format!("m{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

/// One frame from the server.
#[derive(Debug, Clone)]
pub struct Frame {
    pub json: Value,
    /// The JSON as it was written.
    pub text: String,
    /// The bytes behind the header of a binary frame.
    pub body: Option<Vec<u8>>,
    pub at: Instant,
}

impl Frame {
    fn parse(text: String, body: Option<Vec<u8>>) -> Self {
        let json =
            serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error} in the frame {text:?}"));
        Self { json, text, body, at: Instant::now() }
    }

    pub fn kind(&self) -> &str {
        self.json["type"].as_str().unwrap_or_else(|| panic!("no type in {}", self.text))
    }

    pub fn text_of(&self, field: &str) -> &str {
        self.json[field].as_str().unwrap_or_else(|| panic!("no text {field} in {}", self.text))
    }

    pub fn number_of(&self, field: &str) -> u64 {
        self.json[field].as_u64().unwrap_or_else(|| panic!("no number {field} in {}", self.text))
    }

    pub fn list_of(&self, field: &str) -> &[Value] {
        self.json[field].as_array().unwrap_or_else(|| panic!("no list {field} in {}", self.text))
    }

    pub fn seq(&self) -> u64 {
        self.number_of("seq")
    }

    pub fn conversation(&self) -> &str {
        self.text_of("conversation_id")
    }

    /// Fails unless this is an `error` with this code.
    pub fn expect_error(&self, code: &str) -> &Self {
        assert_eq!((self.kind(), self.json["code"].as_str()), ("error", Some(code)), "{}", self.text);
        assert!(self.json["message"].as_str().is_some_and(|text| !text.is_empty()), "{}", self.text);
        let temporary = ["rate_limited", "overloaded", "unavailable"].contains(&code);
        assert_eq!(self.json["retry_after_ms"].is_u64(), temporary, "{}", self.text);
        self
    }

    /// Fails unless this has that type.
    pub fn expect_kind(self, kind: &str) -> Self {
        assert_eq!(self.kind(), kind, "{}", self.text);
        self
    }
}

/// What comes out of a connection.
#[derive(Debug)]
pub enum Event {
    Frame(Frame),
    /// The answer to a bare text `ping`.
    BarePong,
    ProtocolPing,
    ProtocolPong(Vec<u8>),
    /// The server has closed; WebSocket says with which code.
    Closed(Option<(u16, String)>),
}

// --- reading and writing ------------------------------------------------------------------------------------------

/// The reading half of a connection.
pub enum Reader {
    Ws(Box<WebSocket<TcpStream>>),
    Tcp { stream: TcpStream, buffer: Vec<u8>, ended: bool },
}

impl Reader {
    /// The next event; `None` when none came until `end`.
    pub fn next(&mut self, end: Instant) -> Option<Event> {
        match self {
            Self::Ws(socket) => Self::next_ws(socket, end),
            Self::Tcp { stream, buffer, ended } => Self::next_tcp(stream, buffer, ended, end),
        }
    }

    fn next_ws(socket: &mut WebSocket<TcpStream>, end: Instant) -> Option<Event> {
        loop {
            limit_reading(socket.get_ref(), end)?;
            return Some(match socket.read() {
                Ok(Message::Text(text)) if text.as_str() == "pong" => Event::BarePong,
                Ok(Message::Text(text)) => Event::Frame(Frame::parse(text.as_str().to_owned(), None)),
                Ok(Message::Binary(bytes)) => Event::Frame(parse_binary(&bytes)),
                Ok(Message::Ping(_)) => Event::ProtocolPing,
                Ok(Message::Pong(data)) => Event::ProtocolPong(data.to_vec()),
                Ok(Message::Close(frame)) => Event::Closed(
                    frame.map(|frame| (u16::from(frame.code), frame.reason.as_str().to_owned())),
                ),
                Ok(Message::Frame(_)) => continue,
                Err(tungstenite::Error::Io(error)) if is_timeout(&error) => continue,
                Err(
                    tungstenite::Error::ConnectionClosed
                    | tungstenite::Error::AlreadyClosed
                    | tungstenite::Error::Io(_)
                    | tungstenite::Error::Protocol(
                        tungstenite::error::ProtocolError::ResetWithoutClosingHandshake,
                    ),
                ) => Event::Closed(None),
                Err(error) => panic!("the server broke the WebSocket protocol: {error}"),
            });
        }
    }

    fn next_tcp(
        stream: &mut TcpStream,
        buffer: &mut Vec<u8>,
        ended: &mut bool,
        end: Instant,
    ) -> Option<Event> {
        loop {
            if let Some(length) = buffer.first_chunk::<4>() {
                let length = u32::from_be_bytes(*length) as usize;
                assert!(length < 1 << 24, "the server announces a frame of {length} bytes");
                if buffer.len() >= 4 + length {
                    let payload: Vec<u8> = buffer.drain(..4 + length).skip(4).collect();
                    return Some(if payload == b"pong" {
                        Event::BarePong
                    } else if payload.first() == Some(&0) {
                        Event::Frame(parse_binary(&payload))
                    } else {
                        let text = String::from_utf8(payload).expect("frames are UTF-8");
                        Event::Frame(Frame::parse(text, None))
                    });
                }
            }
            if *ended {
                return Some(Event::Closed(None));
            }
            limit_reading(stream, end)?;
            let mut chunk = [0; 16384];
            match stream.read(&mut chunk) {
                Ok(0) => {
                    assert!(buffer.is_empty(), "the connection ended within a frame: {buffer:?}");
                    *ended = true;
                }
                Ok(count) => buffer.extend_from_slice(&chunk[..count]),
                Err(error) if is_timeout(&error) => {}
                Err(_) => *ended = true,
            }
        }
    }
}

fn limit_reading(stream: &TcpStream, end: Instant) -> Option<()> {
    let left = end.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())?;
    // A closed socket takes no options, and reading it says so.
    let _ = stream.set_read_timeout(Some(left));
    Some(())
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}

fn parse_binary(bytes: &[u8]) -> Frame {
    let (length, rest) = bytes.split_first_chunk::<4>().expect("a binary frame begins with a length");
    let length = u32::from_be_bytes(*length) as usize;
    assert!(length <= rest.len(), "the header of {length} bytes does not fit the frame");
    let (header, body) = rest.split_at(length);
    let header = String::from_utf8(header.to_vec()).expect("the header is UTF-8");
    Frame::parse(header, Some(body.to_vec()))
}

/// The writing half of a connection.
pub enum Writer {
    Ws(Box<WebSocket<TcpStream>>),
    Tcp(TcpStream),
}

impl Writer {
    fn stream(&self) -> &TcpStream {
        match self {
            Self::Ws(socket) => socket.get_ref(),
            Self::Tcp(stream) => stream,
        }
    }

    pub fn send_text(&mut self, text: &str) -> io::Result<()> {
        match self {
            Self::Ws(socket) => socket.send(Message::text(text)).map_err(io_error),
            Self::Tcp(stream) => stream.write_all(&raw::tcp_frame(text.as_bytes())),
        }
    }

    pub fn send(&mut self, frame: &Value) -> io::Result<()> {
        self.send_text(&frame.to_string())
    }

    /// A frame whose body is bytes.
    pub fn send_binary(&mut self, header: &Value, body: &[u8]) -> io::Result<()> {
        let header = header.to_string();
        let mut bytes = (header.len() as u32).to_be_bytes().to_vec();
        bytes.extend_from_slice(header.as_bytes());
        bytes.extend_from_slice(body);
        match self {
            Self::Ws(socket) => socket.send(Message::binary(bytes)).map_err(io_error),
            Self::Tcp(stream) => stream.write_all(&raw::tcp_frame(&bytes)),
        }
    }

    /// Says that no more is to come, and can be read on.
    pub fn end(&mut self) -> io::Result<()> {
        self.stream().shutdown(Shutdown::Write)
    }

    /// Bytes as they are, past the framing.
    pub fn send_bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        let mut stream = self.stream();
        stream.write_all(bytes)
    }
}

fn io_error(error: tungstenite::Error) -> io::Error {
    match error {
        tungstenite::Error::Io(error) => error,
        other => io::Error::other(other),
    }
}

// --- opening ------------------------------------------------------------------------------------------------------

/// A connection to be opened.
#[derive(Debug, Clone)]
pub struct Login {
    addresses: Addresses,
    user: String,
    token: String,
    way: Way,
    device: Option<String>,
    class: Option<String>,
    channel: Option<String>,
    resume: Option<String>,
    version: Option<u64>,
    receive_buffer: Option<usize>,
    path: String,
    headers: Vec<(String, String)>,
}

/// Why a connection was not opened.
#[derive(Debug)]
pub enum Refused {
    /// Before the upgrade.
    Http { status: u16, headers: Vec<(String, String)>, body: String },
    /// By `session.closed` and a close code, with what came before it.
    Closed(Ending),
    /// There is nobody, or it went away.
    Gone(String),
}

impl Login {
    pub fn new(addresses: Addresses, user: &str) -> Self {
        Self {
            addresses,
            user: user.to_owned(),
            token: token::of(user),
            way: Way::Header,
            device: None,
            class: None,
            channel: None,
            resume: None,
            version: None,
            receive_buffer: None,
            path: "/ws".to_owned(),
            headers: Vec::new(),
        }
    }

    pub fn token(mut self, token: impl Into<String>) -> Self {
        self.token = token.into();
        self
    }

    pub fn way(mut self, way: Way) -> Self {
        self.way = way;
        self
    }

    pub fn device(mut self, device: &str) -> Self {
        self.device = Some(device.to_owned());
        self
    }

    pub fn class(mut self, class: &str) -> Self {
        self.class = Some(class.to_owned());
        self
    }

    pub fn channel(mut self, channel: &str) -> Self {
        self.channel = Some(channel.to_owned());
        self
    }

    pub fn resume(mut self, session: &str) -> Self {
        self.resume = Some(session.to_owned());
        self
    }

    pub fn version(mut self, version: u64) -> Self {
        self.version = Some(version);
        self
    }

    /// How much the kernel may hold for this client before it reads.
    pub fn receive_buffer(mut self, bytes: usize) -> Self {
        self.receive_buffer = Some(bytes);
        self
    }

    pub fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }

    /// The `connect` frame.
    pub fn frame(&self) -> Value {
        let mut frame = json!({"type": "connect", "token": self.token});
        let text = |text: &Option<String>| text.clone().map(Value::from);
        let fields = [
            ("device_id", text(&self.device)),
            ("device_class", text(&self.class)),
            ("channel", text(&self.channel)),
            ("resume", text(&self.resume)),
            ("version", self.version.map(Value::from)),
        ];
        for (name, value) in fields {
            if let Some(value) = value {
                frame[name] = value;
            }
        }
        frame
    }

    /// Opens, and waits for `connected`.
    pub fn connect(&self, transport: Transport) -> Client {
        match self.try_connect(transport) {
            Ok(client) => client,
            Err(refused) => panic!("{} was refused over {transport:?}: {refused:?}", self.user),
        }
    }

    pub fn try_connect(&self, transport: Transport) -> Result<Client, Refused> {
        let mut client = self.open(transport)?;
        if transport == Transport::Tcp || self.way == Way::FirstFrame {
            client.writer.send(&self.frame()).map_err(|error| Refused::Gone(error.to_string()))?;
        }
        client.finish_opening().map_err(Refused::Closed)?;
        Ok(client)
    }

    /// Opens the transport. What needs a first frame has yet to send it.
    pub fn open(&self, transport: Transport) -> Result<Client, Refused> {
        let address = match transport {
            Transport::Ws => self.addresses.ws,
            Transport::Tcp => self.addresses.tcp,
        };
        let gone = |error: io::Error| Refused::Gone(format!("{address}: {error}"));
        let stream = self.stream(address).map_err(gone)?;
        let (reader, writer, subprotocol) = match transport {
            Transport::Ws => self.upgrade(stream)?,
            Transport::Tcp => {
                let writing = stream.try_clone().expect("a socket can be shared");
                (Reader::Tcp { stream, buffer: Vec::new(), ended: false }, Writer::Tcp(writing), None)
            }
        };
        Ok(Client {
            transport,
            user: self.user.clone(),
            reader,
            writer,
            kept: VecDeque::new(),
            connected: Value::Null,
            subprotocol,
        })
    }

    fn stream(&self, address: SocketAddr) -> io::Result<TcpStream> {
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None)?;
        if let Some(bytes) = self.receive_buffer {
            // The size has to be known before the connection is made: it decides the window.
            socket.set_recv_buffer_size(bytes)?;
        }
        socket.connect_timeout(&address.into(), PATIENCE)?;
        let stream = TcpStream::from(socket);
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(stream)
    }

    fn upgrade(&self, stream: TcpStream) -> Result<(Reader, Writer, Option<String>), Refused> {
        let mut query = Vec::new();
        if self.way == Way::Query {
            query.push(format!("token={}", self.token));
        }
        if self.way != Way::FirstFrame {
            let fields = [
                ("device_id", &self.device),
                ("device_class", &self.class),
                ("channel", &self.channel),
                ("resume", &self.resume),
            ];
            for (name, value) in fields {
                if let Some(value) = value {
                    query.push(format!("{name}={value}"));
                }
            }
        }
        let query = if query.is_empty() { String::new() } else { format!("?{}", query.join("&")) };
        let url = format!("ws://{}{}{query}", self.addresses.ws, self.path);
        let mut request = url.into_client_request().expect("the address is well formed");
        let mut put = |name: &str, value: &str| {
            let name = HeaderName::from_bytes(name.as_bytes()).expect("a header name");
            request.headers_mut().insert(name, HeaderValue::from_str(value).expect("a header value"));
        };
        match self.way {
            Way::Header => put("authorization", &format!("Bearer {}", self.token)),
            Way::Subprotocol => {
                put("sec-websocket-protocol", &format!("bowline.v1.json, bearer.{}", self.token));
            }
            Way::Query | Way::FirstFrame => {}
        }
        for (name, value) in &self.headers {
            put(name, value);
        }
        let config = || WebSocketConfig::default().read_buffer_size(8192).max_message_size(Some(1 << 24));
        let writing = stream.try_clone().expect("a socket can be shared");
        match tungstenite::client::client_with_config(request, stream, Some(config())) {
            Ok((socket, response)) => {
                let writer = WebSocket::from_raw_socket(writing, Role::Client, Some(config()));
                let selected = response.headers().get("sec-websocket-protocol");
                let selected = selected.map(|name| name.to_str().expect("a token is ASCII").to_owned());
                Ok((Reader::Ws(Box::new(socket)), Writer::Ws(Box::new(writer)), selected))
            }
            Err(HandshakeError::Failure(tungstenite::Error::Http(response))) => Err(Refused::Http {
                status: response.status().as_u16(),
                headers: response
                    .headers()
                    .iter()
                    .map(|(name, value)| {
                        (name.to_string(), String::from_utf8_lossy(value.as_bytes()).into_owned())
                    })
                    .collect(),
                body: response
                    .body()
                    .as_ref()
                    .map(|body| String::from_utf8_lossy(body).into_owned())
                    .unwrap_or_default(),
            }),
            Err(error) => Err(Refused::Gone(format!("the upgrade failed: {error}"))),
        }
    }
}

// --- the client ---------------------------------------------------------------------------------------------------

/// How a connection ended.
#[derive(Debug)]
pub struct Ending {
    /// What came before the end, and was not taken yet; without `session.closed`.
    pub frames: Vec<Frame>,
    /// `session.closed`, when it was the last frame.
    pub notice: Option<Box<Frame>>,
    /// The close frame of WebSocket.
    pub close: Option<(u16, String)>,
}

/// A connection.
pub struct Client {
    pub transport: Transport,
    pub user: String,
    pub reader: Reader,
    pub writer: Writer,
    /// What came while something else was waited for.
    kept: VecDeque<Frame>,
    /// The frame `connected`.
    pub connected: Value,
    /// The subprotocol that the server selected.
    pub subprotocol: Option<String>,
}

impl Client {
    /// Waits for `connected`.
    pub fn finish_opening(&mut self) -> Result<(), Ending> {
        let end = Instant::now() + PATIENCE;
        let mut before = Vec::new();
        loop {
            match self.reader.next(end) {
                Some(Event::Frame(frame)) if frame.kind() == "connected" => {
                    assert!(before.is_empty(), "frames came before connected: {before:?}");
                    self.connected = frame.json;
                    return Ok(());
                }
                Some(Event::Frame(frame)) => before.push(frame),
                Some(Event::Closed(close)) => {
                    let notice = before.pop_if(|frame| frame.kind() == "session.closed").map(Box::new);
                    return Err(Ending { frames: before, notice, close });
                }
                Some(_) => {}
                None => panic!("no connected within {PATIENCE:?}, but {before:?}"),
            }
        }
    }

    pub fn field(&self, name: &str) -> &str {
        self.connected[name].as_str().unwrap_or_else(|| panic!("no text {name} in {}", self.connected))
    }

    pub fn device_id(&self) -> &str {
        self.field("device_id")
    }

    // --- sending ----------------------------------------------------------------------------------------------

    pub fn send(&mut self, frame: &Value) {
        self.send_text(&frame.to_string());
    }

    pub fn send_text(&mut self, text: &str) {
        self.writer
            .send_text(text)
            .unwrap_or_else(|error| panic!("{} cannot send {text:?}: {error}", self.user));
    }

    /// Sends a request and waits for its answer, whatever that is.
    pub fn request(&mut self, frame: &Value) -> Frame {
        let id = frame["id"].as_str().expect("requests have an id").to_owned();
        self.send(frame);
        self.reply(&id)
    }

    /// Sends a request with an id of its own and waits for its answer, whatever that is.
    pub fn ask(&mut self, kind: &str, fields: Value) -> Frame {
        let mut frame = json!({"type": kind, "id": fresh_id()});
        for (name, value) in fields.as_object().expect("fields are an object") {
            frame[name] = value.clone();
        }
        self.request(&frame)
    }

    /// The same for requests that are answered `ok`.
    pub fn demand(&mut self, kind: &str, fields: Value) -> Frame {
        self.ask(kind, fields).expect_kind("ok")
    }

    /// Sends a message to a user and waits for the ack.
    pub fn tell(&mut self, to: &str, body: impl Into<Value>) -> Frame {
        self.ask("msg.send", json!({"to": to, "body": body.into()})).expect_kind("msg.ack")
    }

    /// Sends a message to a conversation and waits for the ack.
    pub fn say(&mut self, conversation: &str, body: impl Into<Value>) -> Frame {
        self.ask("msg.send", json!({"conversation_id": conversation, "body": body.into()}))
            .expect_kind("msg.ack")
    }

    pub fn recv(&mut self, conversation: &str, seq: u64) {
        self.send(&json!({"type": "msg.recv", "conversation_id": conversation, "seq": seq}));
    }

    pub fn read(&mut self, conversation: &str, seq: u64) {
        self.send(&json!({"type": "msg.read", "conversation_id": conversation, "seq": seq}));
    }

    // --- receiving --------------------------------------------------------------------------------------------

    /// The first frame that fits; what does not stays for later, in its order. An `error` or the end of the
    /// session that was not asked for fails.
    pub fn find(&mut self, what: &str, fits: impl Fn(&Frame) -> bool) -> Frame {
        if let Some(place) = self.kept.iter().position(&fits) {
            return self.kept.remove(place).expect("the place was found");
        }
        let end = Instant::now() + PATIENCE;
        loop {
            match self.reader.next(end) {
                Some(Event::Frame(frame)) if fits(&frame) => return frame,
                Some(Event::Frame(frame)) if ["error", "session.closed"].contains(&frame.kind()) => {
                    panic!("{} waited for {what} and received {}", self.user, frame.text)
                }
                Some(Event::Frame(frame)) => self.kept.push_back(frame),
                Some(Event::Closed(close)) => {
                    panic!("{} waited for {what} and was closed: {close:?}", self.user)
                }
                Some(Event::BarePong | Event::ProtocolPing | Event::ProtocolPong(_)) => {}
                None => panic!("{} waited for {what} and received only {:?}", self.user, self.kept),
            }
        }
    }

    /// The first frame of this type.
    pub fn expect(&mut self, kind: &str) -> Frame {
        self.find(kind, |frame| frame.kind() == kind)
    }

    /// The answer to the request with this id.
    pub fn reply(&mut self, id: &str) -> Frame {
        const ANSWERS: [&str; 6] =
            ["ok", "error", "msg.ack", "history.page", "conversation.page", "room.joined"];
        self.find(&format!("the answer to {id}"), |frame| {
            ANSWERS.contains(&frame.kind()) && frame.json["id"].as_str() == Some(id)
        })
    }

    /// The next push, which must be the message `seq` of `conversation`.
    pub fn expect_push(&mut self, conversation: &str, seq: u64) -> Frame {
        let push = self.expect("msg.push");
        assert_eq!((push.conversation(), push.seq()), (conversation, seq), "{}", push.text);
        push
    }

    /// The first receipt of this kind by this user that covers `seq` or more.
    pub fn expect_receipt(&mut self, conversation: &str, kind: &str, by: &str, seq: u64) -> Frame {
        self.find(&format!("a {kind} receipt of {by} for {conversation} up to {seq}"), |frame| {
            frame.kind() == "msg.receipt"
                && frame.json["conversation_id"] == conversation
                && frame.json["kind"] == kind
                && frame.json["user_id"] == by
                && frame.json["seq"].as_u64() >= Some(seq)
        })
    }

    /// Waits until the server has decided everything that this client sent, by asking something after it.
    pub fn settle(&mut self) {
        self.ask("conversation.list", json!({"limit": 1})).expect_kind("conversation.page");
    }

    /// Everything that came and was not taken, oldest first, without waiting.
    pub fn take_kept(&mut self) -> Vec<Frame> {
        self.kept.drain(..).collect()
    }

    /// What comes within `time`, and what was kept: for things that must not happen.
    pub fn listen(&mut self, time: Duration) -> Vec<Frame> {
        let end = Instant::now() + time;
        let mut frames = self.take_kept();
        while let Some(event) = self.reader.next(end) {
            match event {
                Event::Frame(frame) => frames.push(frame),
                Event::Closed(close) => panic!("{} was closed: {close:?}", self.user),
                Event::BarePong | Event::ProtocolPing | Event::ProtocolPong(_) => {}
            }
        }
        frames
    }

    /// Fails when a frame of this type is there or comes within a short time.
    pub fn expect_no(&mut self, kind: &str) {
        let frames = self.listen(Duration::from_millis(300));
        if let Some(frame) = frames.iter().find(|frame| frame.kind() == kind) {
            panic!("{} received {}", self.user, frame.text);
        }
        self.kept.extend(frames);
    }

    // --- pages ------------------------------------------------------------------------------------------------

    pub fn history(&mut self, conversation: &str, fields: Value) -> Frame {
        let mut all = json!({"conversation_id": conversation});
        for (name, value) in fields.as_object().expect("fields are an object") {
            all[name] = value.clone();
        }
        self.ask("history", all).expect_kind("history.page")
    }

    /// Every message above `after`, page by page.
    pub fn history_after(&mut self, conversation: &str, after: u64) -> Vec<Value> {
        let mut messages: Vec<Value> = Vec::new();
        loop {
            let last = messages.last().map_or(after, |message| message["seq"].as_u64().expect("a number"));
            let page = self.history(conversation, json!({"after_seq": last, "limit": 200}));
            let more = page.json["more"].as_bool().expect("more is true or false");
            assert!(!more || !page.list_of("messages").is_empty(), "an empty page says that there is more");
            messages.extend(page.list_of("messages").iter().cloned());
            if !more {
                return messages;
            }
        }
    }

    /// The whole list, page by page.
    pub fn conversations(&mut self) -> Vec<Value> {
        let mut all: Vec<Value> = Vec::new();
        loop {
            let mut fields = json!({"limit": 200});
            if let Some(last) = all.last() {
                fields["after"] = last["conversation_id"].clone();
            }
            let page = self.ask("conversation.list", fields).expect_kind("conversation.page");
            let more = page.json["more"].as_bool().expect("more is true or false");
            assert!(
                !more || !page.list_of("conversations").is_empty(),
                "an empty page says that there is more"
            );
            all.extend(page.list_of("conversations").iter().cloned());
            if !more {
                return all;
            }
        }
    }

    /// One line of the list.
    pub fn conversation(&mut self, id: &str) -> Value {
        let all = self.conversations();
        all.iter()
            .find(|line| line["conversation_id"] == id)
            .unwrap_or_else(|| panic!("{} does not list {id}, but {all:?}", self.user))
            .clone()
    }

    pub fn unread(&mut self, id: &str) -> u64 {
        self.conversation(id)["unread"].as_u64().expect("unread is a number")
    }

    // --- the end ----------------------------------------------------------------------------------------------

    /// Waits for the end of the connection.
    pub fn wait_closed(&mut self) -> Ending {
        self.wait_closed_within(PATIENCE)
    }

    pub fn wait_closed_within(&mut self, limit: Duration) -> Ending {
        let end = Instant::now() + limit;
        let mut frames = self.take_kept();
        loop {
            match self.reader.next(end) {
                Some(Event::Frame(frame)) => frames.push(frame),
                Some(Event::Closed(close)) => {
                    let notice = frames.pop_if(|frame| frame.kind() == "session.closed").map(Box::new);
                    return Ending { frames, notice, close };
                }
                Some(_) => {}
                None => panic!("{} was not closed within {limit:?}; received {frames:?}", self.user),
            }
        }
    }

    /// Waits for the end, which must be this one: `session.closed` as the last frame on both transports, and the
    /// close frame on WebSocket.
    pub fn expect_closed(&mut self, code: u16, reason: &str) -> Ending {
        self.expect_closed_within(PATIENCE, code, reason)
    }

    pub fn expect_closed_within(&mut self, limit: Duration, code: u16, reason: &str) -> Ending {
        let ending = self.wait_closed_within(limit);
        ending.check(self.transport, code, reason);
        ending
    }

    /// Ends the connection as a client should.
    pub fn close(mut self) {
        match &mut self.writer {
            Writer::Ws(socket) => {
                let frame = CloseFrame { code: CloseCode::Normal, reason: "".into() };
                let _ = socket.close(Some(frame));
                let _ = socket.flush();
            }
            Writer::Tcp(stream) => {
                let _ = stream.shutdown(Shutdown::Write);
            }
        }
        let end = Instant::now() + PATIENCE;
        while !matches!(self.reader.next(end), Some(Event::Closed(_)) | None) {}
    }
}

impl Ending {
    pub fn check(&self, transport: Transport, code: u16, reason: &str) {
        let notice =
            self.notice.as_ref().unwrap_or_else(|| panic!("no session.closed at the end of {self:?}"));
        assert_eq!(
            (notice.number_of("code"), notice.text_of("reason")),
            (u64::from(code), reason),
            "{}",
            notice.text
        );
        if transport == Transport::Ws {
            assert_eq!(self.close, Some((code, reason.to_owned())), "the close frame");
        }
    }
}
