//! Carries a [`Core`] out on tokio, over WebSocket (`ws://`) or TCP (`tcp://`), with TLS (`wss://`, `tls://`) or without.

use crate::{
    core::{Body, Core, Event, Output, SendError, Settings, Target},
    dial::{Address, Stream, Trust, TrustError},
};
use bytes::Bytes;
use futures_util::{SinkExt, StreamExt};
use serde_json::Value;
use std::{
    collections::HashMap,
    future::Future,
    pin::Pin,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    sync::{mpsc, oneshot},
    time,
};
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{self, protocol::WebSocketConfig},
};

/// Events that wait for the application; beyond, nothing more is read from the server.
const EVENTS_MAX: usize = 1_024;
/// Commands that wait for the driver.
const COMMANDS_MAX: usize = 1_024;
/// How long a connection may take to be made.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// The largest frame that is read over TCP.
const FRAME_BYTES_MAX: usize = 64 << 20;

/// Where tokens come from; called for each connection, with `true` when the last one has expired.
pub type TokenSource =
    Arc<dyn Fn(bool) -> Pin<Box<dyn Future<Output = Result<String, String>> + Send>> + Send + Sync>;

#[derive(Clone)]
pub struct Config {
    /// `ws://host:port/ws` or `tcp://host:port`, with TLS `wss://host:port/ws` or `tls://host:port`.
    pub url: String,
    pub token: TokenSource,
    /// Whose certificates are taken for good; `None`: those that the system trusts.
    pub trust: Option<Trust>,
    pub settings: Settings,
}

impl Config {
    /// One token for good.
    pub fn with_token(url: &str, token: &str) -> Self {
        let token = token.to_owned();
        let source: TokenSource = Arc::new(move |_| {
            let token = token.clone();
            Box::pin(async move { Ok(token) })
        });
        let mut bytes = [0; 8];
        // Without a random source the delays are merely the same as another client's.
        let _ = getrandom::fill(&mut bytes);
        let settings = Settings { seed: u64::from_le_bytes(bytes), ..Settings::default() };
        Self { url: url.to_owned(), token: source, trust: None, settings }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    #[error(
        "{0:?} is no address of a server; write ws://host:port/ws or tcp://host:port, with TLS wss:// or tls://"
    )]
    Url(String),
    #[error(transparent)]
    Trust(#[from] TrustError),
}

/// A running client. Cheap to clone; the client ends when the last clone and the events are dropped.
#[derive(Clone)]
pub struct Client {
    commands: mpsc::Sender<Command>,
}

/// What happens, in order.
pub type Events = mpsc::Receiver<Event>;

enum Command {
    Send { id: String, target: Target, body: Body, reply: oneshot::Sender<Result<(), SendError>> },
    Read { conversation_id: String, seq: u64 },
    Request { frame: Value, reply: oneshot::Sender<Value> },
    Positions { reply: oneshot::Sender<HashMap<String, u64>> },
    Join { room: String, reply: oneshot::Sender<Result<(), SendError>> },
    Leave { room: String },
    SendInRoom { room: String, body: Body, reply: oneshot::Sender<Result<String, SendError>> },
}

/// Starts a client; it connects, and comes again, by itself.
pub fn connect(mut config: Config) -> Result<(Client, Events), ConnectError> {
    let Some(address) = Address::parse(&config.url) else { return Err(ConnectError::Url(config.url)) };
    if address.is_secure && config.trust.is_none() {
        config.trust = Some(Trust::system()?);
    }
    let (events, receiver) = mpsc::channel(EVENTS_MAX);
    let (commands, command_receiver) = mpsc::channel(COMMANDS_MAX);
    let core = Core::new(config.settings.clone());
    let driver = Driver {
        core,
        address,
        config,
        events,
        began: Instant::now(),
        replies: HashMap::new(),
        next_id: 0,
        socket: None,
    };
    tokio::spawn(driver.run(command_receiver));
    Ok((Client { commands }, receiver))
}

fn stopped() -> SendError {
    SendError::Stopped("its events were dropped".into())
}

impl Client {
    /// Queues a message with an id of the application's; `Ok` says that it will be sent until it is answered.
    pub async fn send_with_id(&self, id: &str, target: Target, body: Body) -> Result<(), SendError> {
        let (reply, answer) = oneshot::channel();
        let command = Command::Send { id: id.to_owned(), target, body, reply };
        self.commands.send(command).await.map_err(|_| stopped())?;
        answer.await.map_err(|_| stopped())?
    }

    /// Queues a message with a random id, and returns the id.
    pub async fn send(&self, target: Target, body: Body) -> Result<String, SendError> {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes)
            .map_err(|error| SendError::Stopped(format!("no random numbers: {error}")))?;
        let id = format!("{:032x}", u128::from_le_bytes(bytes));
        self.send_with_id(&id, target, body).await.map(|()| id)
    }

    pub async fn read(&self, conversation_id: &str, seq: u64) -> Result<(), SendError> {
        let command = Command::Read { conversation_id: conversation_id.to_owned(), seq };
        self.commands.send(command).await.map_err(|_| stopped())
    }

    /// Asks something that has an answer (`history`, `conversation.list`, `conversation.create`, …).
    pub async fn request(&self, frame: Value) -> Result<Value, SendError> {
        let (reply, answer) = oneshot::channel();
        self.commands.send(Command::Request { frame, reply }).await.map_err(|_| stopped())?;
        answer.await.map_err(|_| stopped())
    }

    /// Joins a room, now and after each reconnect; `RoomJoined` or `RoomRefused` says what came of it.
    pub async fn join(&self, room: &str) -> Result<(), SendError> {
        let (reply, answer) = oneshot::channel();
        let command = Command::Join { room: room.to_owned(), reply };
        self.commands.send(command).await.map_err(|_| stopped())?;
        answer.await.map_err(|_| stopped())?
    }

    pub async fn leave(&self, room: &str) -> Result<(), SendError> {
        let command = Command::Leave { room: room.to_owned() };
        self.commands.send(command).await.map_err(|_| stopped())
    }

    /// Sends in a room that the client is in, and returns the id that a refusal (`Failed`) would name.
    pub async fn send_in_room(&self, room: &str, body: Body) -> Result<String, SendError> {
        let (reply, answer) = oneshot::channel();
        let command = Command::SendInRoom { room: room.to_owned(), body, reply };
        self.commands.send(command).await.map_err(|_| stopped())?;
        answer.await.map_err(|_| stopped())?
    }

    /// Up to where each conversation was handed out.
    pub async fn positions(&self) -> Result<HashMap<String, u64>, SendError> {
        let (reply, answer) = oneshot::channel();
        self.commands.send(Command::Positions { reply }).await.map_err(|_| stopped())?;
        answer.await.map_err(|_| stopped())
    }
}

struct Driver {
    core: Core,
    address: Address,
    config: Config,
    events: mpsc::Sender<Event>,
    began: Instant,
    replies: HashMap<String, oneshot::Sender<Value>>,
    next_id: u64,
    socket: Option<Socket>,
}

enum Socket {
    Ws(Box<WebSocketStream<Stream>>),
    Tcp { stream: Stream, buffer: Vec<u8> },
}

enum Incoming {
    Text(String),
    Binary(Bytes),
    Ignored,
    Closed(Option<u16>, String),
}

impl Driver {
    async fn run(mut self, mut commands: mpsc::Receiver<Command>) {
        self.core.on_time(self.now());
        loop {
            if !self.carry_out().await {
                return;
            }
            let wait = self.core.next_due().map(|due| Duration::from_millis(due.saturating_sub(self.now())));
            tokio::select! {
                command = commands.recv() => match command {
                    Some(command) => self.on_command(command),
                    None => return,
                },
                () = async { match wait { Some(wait) => time::sleep(wait).await, None => std::future::pending().await } } => {
                    self.core.on_time(self.now());
                }
                incoming = async { match &mut self.socket { Some(socket) => socket.next().await, None => std::future::pending().await } } => {
                    let now = self.now();
                    match incoming {
                        Incoming::Text(text) => self.core.on_text(&text, now),
                        Incoming::Binary(bytes) => self.core.on_binary(&bytes, now),
                        Incoming::Ignored => {}
                        Incoming::Closed(code, reason) => {
                            self.socket = None;
                            self.core.on_closed(code, &reason, now);
                        }
                    }
                }
            }
        }
    }

    fn now(&self) -> u64 {
        self.began.elapsed().as_millis() as u64
    }

    fn on_command(&mut self, command: Command) {
        match command {
            Command::Send { id, target, body, reply } => {
                let result = self.core.send(id, target, body, self.now());
                // Whoever asked may have gone.
                let _ = reply.send(result);
            }
            Command::Read { conversation_id, seq } => self.core.read(&conversation_id, seq),
            Command::Request { frame, reply } => {
                self.next_id += 1;
                let id = format!("r{}", self.next_id);
                if self.core.request(frame, id.clone()).is_ok() {
                    self.replies.insert(id, reply);
                }
            }
            // Whoever asked may have gone.
            Command::Join { room, reply } => drop(reply.send(self.core.join(&room))),
            Command::Leave { room } => self.core.leave(&room),
            Command::SendInRoom { room, body, reply } => {
                drop(reply.send(self.core.send_in_room(&room, body)));
            }
            Command::Positions { reply } => {
                let positions = self.core.positions().map(|(id, seq)| (id.to_owned(), seq)).collect();
                let _ = reply.send(positions);
            }
        }
    }

    /// Does what the core says; false once nobody listens.
    async fn carry_out(&mut self) -> bool {
        loop {
            let outputs = self.core.take_outputs();
            if outputs.is_empty() {
                return true;
            }
            let mut unflushed = false;
            for output in outputs {
                let sent = match output {
                    Output::Event(Event::Answer { id, frame }) => {
                        if let Some(reply) = self.replies.remove(&id) {
                            let _ = reply.send(frame);
                        } else if self.events.send(Event::Answer { id, frame }).await.is_err() {
                            return false;
                        }
                        continue;
                    }
                    Output::Event(event) => {
                        if self.events.send(event).await.is_err() {
                            return false;
                        }
                        continue;
                    }
                    Output::Close => {
                        if let Some(socket) = self.socket.take() {
                            socket.close().await;
                        }
                        continue;
                    }
                    Output::Connect { fresh_token } => {
                        self.open(fresh_token).await;
                        continue;
                    }
                    Output::Text(text) => self.feed(text.into_bytes().into(), false).await,
                    Output::Binary(bytes) => self.feed(bytes, true).await,
                };
                unflushed = true;
                if let Err(reason) = sent {
                    self.socket = None;
                    self.core.on_closed(None, &reason, self.now());
                }
            }
            if unflushed
                && let Some(socket) = &mut self.socket
                && let Err(reason) = socket.flush().await
            {
                self.socket = None;
                self.core.on_closed(None, &reason, self.now());
            }
        }
    }

    async fn feed(&mut self, bytes: Bytes, is_binary: bool) -> Result<(), String> {
        match &mut self.socket {
            Some(socket) => socket.feed(bytes, is_binary).await,
            None => Ok(()),
        }
    }

    async fn open(&mut self, fresh_token: bool) {
        let attempt = async {
            let token = (self.config.token)(fresh_token).await?;
            let socket = Socket::open(&self.address, &self.config).await?;
            Ok::<_, NotOpened>((token, socket))
        };
        let result = time::timeout(CONNECT_TIMEOUT, attempt)
            .await
            .unwrap_or_else(|_| Err("it takes too long".to_owned().into()));
        let now = self.now();
        match result {
            Ok((token, socket)) => {
                self.socket = Some(socket);
                self.core.on_opened(&token, now);
            }
            Err(NotOpened { reason, retry_after_ms }) => self.core.on_refused(&reason, retry_after_ms, now),
        }
    }
}

/// Why there is no connection, and what the server asked for.
struct NotOpened {
    reason: String,
    retry_after_ms: Option<u64>,
}

impl From<String> for NotOpened {
    fn from(reason: String) -> Self {
        Self { reason, retry_after_ms: None }
    }
}

impl From<tungstenite::Error> for NotOpened {
    fn from(error: tungstenite::Error) -> Self {
        let retry_after_ms = match &error {
            tungstenite::Error::Http(answer) => answer
                .headers()
                .get("retry-after")
                .and_then(|seconds| seconds.to_str().ok()?.trim().parse::<u64>().ok())
                .map(|seconds| seconds.saturating_mul(1000)),
            _ => None,
        };
        Self { reason: error.to_string(), retry_after_ms }
    }
}

impl Socket {
    async fn open(address: &Address, config: &Config) -> Result<Self, NotOpened> {
        let stream = address.dial(config.trust.as_ref()).await.map_err(|error| error.to_string())?;
        if !address.is_web_socket {
            return Ok(Self::Tcp { stream, buffer: Vec::new() });
        }
        let sizes = WebSocketConfig::default().read_buffer_size(4096).write_buffer_size(4096);
        let (stream, _) =
            tokio_tungstenite::client_async_with_config(&config.url, stream, Some(sizes)).await?;
        Ok(Self::Ws(Box::new(stream)))
    }

    /// The next message. Dropping the future loses nothing.
    async fn next(&mut self) -> Incoming {
        match self {
            Self::Ws(stream) => match stream.next().await {
                Some(Ok(tungstenite::Message::Text(text))) => Incoming::Text(text.as_str().to_owned()),
                Some(Ok(tungstenite::Message::Binary(bytes))) => Incoming::Binary(bytes),
                Some(Ok(tungstenite::Message::Close(frame))) => {
                    let reason = frame.as_ref().map(|f| f.reason.to_string()).unwrap_or_default();
                    Incoming::Closed(frame.map(|f| f.code.into()), reason)
                }
                Some(Ok(_)) => Incoming::Ignored,
                Some(Err(error)) => Incoming::Closed(None, error.to_string()),
                None => Incoming::Closed(None, "the connection ended".into()),
            },
            Self::Tcp { stream, buffer } => loop {
                if let Some((length, rest)) = buffer.split_first_chunk::<4>() {
                    let length = u32::from_be_bytes(*length) as usize;
                    if length > FRAME_BYTES_MAX {
                        return Incoming::Closed(None, format!("a frame of {length} bytes"));
                    }
                    if rest.len() >= length {
                        let frame = Bytes::copy_from_slice(&rest[..length]);
                        buffer.drain(..4 + length);
                        return match (frame.first(), String::from_utf8(frame.to_vec())) {
                            (Some(0), _) => Incoming::Binary(frame),
                            (_, Ok(text)) => Incoming::Text(text),
                            (_, Err(_)) => Incoming::Closed(None, "a frame that is no UTF-8".into()),
                        };
                    }
                }
                let mut chunk = [0; 16 * 1024];
                match stream.read(&mut chunk).await {
                    Ok(0) => return Incoming::Closed(None, "the connection ended".into()),
                    Ok(count) => buffer.extend_from_slice(&chunk[..count]),
                    Err(error) => return Incoming::Closed(None, error.to_string()),
                }
            },
        }
    }

    async fn feed(&mut self, bytes: Bytes, is_binary: bool) -> Result<(), String> {
        match self {
            Self::Ws(stream) => {
                let message = if is_binary {
                    tungstenite::Message::Binary(bytes)
                } else {
                    let text = String::from_utf8(bytes.to_vec()).map_err(|e| e.to_string())?;
                    tungstenite::Message::Text(text.into())
                };
                stream.feed(message).await.map_err(|e| e.to_string())
            }
            Self::Tcp { stream, .. } => {
                let mut frame = (bytes.len() as u32).to_be_bytes().to_vec();
                frame.extend_from_slice(&bytes);
                stream.write_all(&frame).await.map_err(|e| e.to_string())
            }
        }
    }

    async fn flush(&mut self) -> Result<(), String> {
        match self {
            Self::Ws(stream) => stream.flush().await.map_err(|e| e.to_string()),
            Self::Tcp { stream, .. } => stream.flush().await.map_err(|e| e.to_string()),
        }
    }

    async fn close(self) {
        // The server learns of it in any case.
        match self {
            Self::Ws(mut stream) => drop((*stream).close(None).await),
            Self::Tcp { mut stream, .. } => drop(stream.shutdown().await),
        }
    }
}
