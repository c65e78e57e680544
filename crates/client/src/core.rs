//! Every decision of a client, sans-IO.

use crate::{
    backoff::{Backoff, Next},
    outbox::{OUTBOX_MAX, Outbox},
    rooms::{ROOMS_MAX, Rooms, send_head},
    timeline::{Need, Timeline},
};
use bytes::Bytes;
use serde::Deserialize;
use serde_json::{Value, json, value::RawValue};
use std::collections::{BTreeMap, HashMap, VecDeque};

/// The largest page of history.
const PAGE: u32 = 200;
/// When a page that lacks what was announced is asked for again.
const FETCH_AGAIN_MS: u64 = 2_000;
/// A request that nobody answered on this connection is asked again on the next; so many may wait.
const REQUESTS_MAX: usize = 1_024;

/// The content of a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Body {
    /// Any JSON value, as text.
    Json(String),
    Binary(Bytes),
}

impl Default for Body {
    fn default() -> Self {
        Self::Json("null".into())
    }
}

/// Where a message goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    User(String),
    Conversation(String),
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Message {
    pub conversation_id: String,
    pub seq: u64,
    pub id: String,
    pub from: String,
    pub ts: u64,
    pub body: Body,
}

/// A message of a room.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RoomMessage {
    pub room: String,
    pub offset: u64,
    /// Empty when it is of the application itself.
    pub from: String,
    pub ts: u64,
    pub body: Body,
}

/// What an application is told.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    Connected {
        user_id: String,
        device_id: String,
        node_id: String,
        resumed: bool,
    },
    /// The next message of its conversation; each comes once and in order.
    Message(Message),
    /// Stored, and it will be delivered.
    Acked {
        id: String,
        conversation_id: String,
        seq: u64,
        ts: u64,
    },
    /// Refused for good.
    Failed {
        id: String,
        code: String,
        message: String,
    },
    /// In the room from now on, after a reconnect as well. `is_gap`: something was missed for good.
    RoomJoined {
        room: String,
        members: u64,
        is_gap: bool,
    },
    /// The next message of its room; each comes once and in order.
    RoomMessage(RoomMessage),
    /// Not let in; it is not asked again.
    RoomRefused {
        room: String,
        code: String,
        message: String,
    },
    Receipt {
        conversation_id: String,
        seq: u64,
        user_id: Option<String>,
        count: Option<u32>,
        is_read: bool,
    },
    /// Something waits; it is being fetched.
    Waiting {
        conversation_id: String,
        first_seq: u64,
        last_seq: u64,
        unread: u64,
    },
    /// The answer to a request, as it came.
    Answer {
        id: String,
        frame: Value,
    },
    /// Any other frame for the application (`conversation.changed`, `error` without an id, …).
    Frame(Value),
    /// The connection ended; the next try is in so many milliseconds.
    Disconnected {
        code: Option<u16>,
        reason: String,
        retry_in_ms: u64,
    },
    /// It ended for good.
    Stopped {
        code: u16,
        reason: String,
    },
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    #[error("{OUTBOX_MAX} messages wait for their acknowledgement; wait for some before sending more")]
    OutboxFull,
    #[error("a client may be in {ROOMS_MAX} rooms; leave one first")]
    TooManyRooms,
    #[error("not in the room {0:?}: join it, and wait for RoomJoined; rooms keep nothing to be sent later")]
    NotInRoom(String),
    #[error("the client has stopped: {0}")]
    Stopped(String),
}

/// What the driver is to do.
#[derive(Debug, Clone, PartialEq)]
pub enum Output {
    /// Open a connection; with a new token if `fresh_token`.
    Connect {
        fresh_token: bool,
    },
    Text(String),
    Binary(Bytes),
    /// End the connection.
    Close,
    Event(Event),
}

#[derive(Debug, Clone, Default)]
pub struct Settings {
    pub device_id: Option<String>,
    pub device_class: Option<String>,
    pub channel: Option<String>,
    /// Where each conversation was left, when the application remembers it.
    pub positions: HashMap<String, u64>,
    /// Any number; draws the delays.
    pub seed: u64,
}

#[derive(Debug, PartialEq, Eq)]
enum State {
    /// Not connected; the next try is due at this time.
    Away {
        at: u64,
        fresh_token: bool,
    },
    Connecting,
    /// `connect` was sent.
    Opening,
    Open {
        since: u64,
    },
    Stopped {
        reason: String,
    },
}

pub struct Core {
    settings: Settings,
    state: State,
    backoff: Backoff,
    /// In an order of their own, so that runs repeat.
    timelines: BTreeMap<String, Timeline>,
    outbox: Outbox,
    /// Requests that wait for their answers, to be asked again after a reconnect.
    requests: VecDeque<(String, String)>,
    /// Histories that fetch a gap.
    fetches: HashMap<String, String>,
    /// When a gap whose history was refused for now is asked for again.
    fetch_again_at: Option<u64>,
    rooms: Rooms,
    closing: Option<(u16, String, Option<u64>)>,
    /// Who this is, by the server's word.
    user_id: Option<String>,
    heard: u64,
    pinged: bool,
    ping_after_ms: u64,
    close_after_ms: u64,
    random: u64,
    next_id: u64,
    outputs: Vec<Output>,
}

/// The fields of the frames that a client acts on.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Fields<'a> {
    #[serde(rename = "type")]
    kind: String,
    id: Option<String>,
    conversation_id: Option<String>,
    seq: u64,
    from: String,
    ts: u64,
    #[serde(borrow)]
    body: Option<&'a RawValue>,
    body_encoding: Option<String>,
    code: Option<Value>,
    message: String,
    reason: String,
    retry_after_ms: Option<u64>,
    user_id: Option<String>,
    device_id: String,
    node_id: String,
    resumed: bool,
    ping_after_ms: u64,
    close_after_ms: u64,
    data: Option<String>,
    first_seq: u64,
    more: bool,
    #[serde(borrow)]
    messages: Vec<Fields<'a>>,
    #[serde(borrow)]
    conversations: Vec<Fields<'a>>,
    last_seq: u64,
    unread: u64,
    room: Option<String>,
    epoch: String,
    offset: u64,
    recovered: bool,
    members: Option<Value>,
}

/// Begins the ids of what is sent in rooms, which has no answer but an error.
const ROOM_SEND: &str = "~room";

impl Core {
    pub fn new(settings: Settings) -> Self {
        let timelines = settings.positions.iter().map(|(id, seq)| (id.clone(), Timeline::at(*seq))).collect();
        Self {
            random: settings.seed | 1,
            settings,
            state: State::Away { at: 0, fresh_token: false },
            backoff: Backoff::default(),
            timelines,
            outbox: Outbox::default(),
            requests: VecDeque::new(),
            fetches: HashMap::new(),
            fetch_again_at: None,
            rooms: Rooms::default(),
            closing: None,
            user_id: None,
            heard: 0,
            pinged: false,
            ping_after_ms: 45_000,
            close_after_ms: 90_000,
            next_id: 0,
            outputs: Vec::new(),
        }
    }

    pub fn take_outputs(&mut self) -> Vec<Output> {
        std::mem::take(&mut self.outputs)
    }

    /// When [`Core::on_time`] is to be called at the latest.
    pub fn next_due(&self) -> Option<u64> {
        match &self.state {
            State::Away { at, .. } => Some(*at),
            State::Open { .. } => {
                let silence = if self.pinged { self.close_after_ms } else { self.ping_after_ms };
                let heartbeat = self.heard + silence;
                let dues = [self.outbox.next_due(), self.rooms.next_due(), self.fetch_again_at];
                Some(dues.into_iter().flatten().fold(heartbeat, u64::min))
            }
            State::Opening => Some(self.heard + self.close_after_ms),
            State::Connecting | State::Stopped { .. } => None,
        }
    }

    pub fn on_time(&mut self, now: u64) {
        match &self.state {
            State::Away { at, fresh_token } if *at <= now => {
                self.outputs.push(Output::Connect { fresh_token: *fresh_token });
                self.state = State::Connecting;
            }
            State::Open { .. } | State::Opening => {
                let silence = now.saturating_sub(self.heard);
                if silence >= self.close_after_ms {
                    self.outputs.push(Output::Close);
                    self.on_closed(None, "the server is silent", now);
                } else if silence >= self.ping_after_ms && !self.pinged {
                    self.pinged = true;
                    self.outputs.push(Output::Text(r#"{"type":"ping"}"#.into()));
                }
                if matches!(self.state, State::Open { .. }) {
                    self.rooms.due(now).iter().for_each(|room| self.ask_for_room(room));
                }
                if self.fetch_again_at.is_some_and(|at| at <= now) {
                    self.fetch_again_at = None;
                    self.timelines.values_mut().for_each(Timeline::ask_again);
                    self.settle(now);
                }
                self.flush(now);
            }
            _ => {}
        }
    }

    /// The connection is open: says who this is.
    pub fn on_opened(&mut self, token: &str, now: u64) {
        (self.heard, self.pinged) = (now, false);
        let mut connect = json!({"type": "connect", "token": token, "version": 1});
        let settings = &self.settings;
        let fields = [
            ("device_id", &settings.device_id),
            ("device_class", &settings.device_class),
            ("channel", &settings.channel),
        ];
        for (name, value) in fields {
            if let Some(value) = value {
                connect[name] = json!(value);
            }
        }
        self.outputs.push(Output::Text(connect.to_string()));
        self.state = State::Opening;
    }

    /// The connection ended, or could not be made (`code` none).
    pub fn on_closed(&mut self, code: Option<u16>, reason: &str, now: u64) {
        self.on_ended(code, reason, None, now);
    }

    /// The server turned the connection away before it was one, and asked for this much time.
    pub fn on_refused(&mut self, reason: &str, retry_after_ms: Option<u64>, now: u64) {
        self.on_ended(None, reason, retry_after_ms, now);
    }

    fn on_ended(&mut self, code: Option<u16>, reason: &str, asked_ms: Option<u64>, now: u64) {
        if matches!(self.state, State::Away { .. } | State::Stopped { .. }) {
            return;
        }
        let lasted = match self.state {
            State::Open { since } => now.saturating_sub(since),
            _ => 0,
        };
        // The last frame says more than the close code, on TCP it is all there is.
        let (code, reason, retry_after) = match self.closing.take() {
            Some((code, reason, retry)) => (Some(code), reason, retry),
            None => (code, reason.to_owned(), asked_ms),
        };
        self.timelines.values_mut().for_each(Timeline::on_disconnected);
        self.fetches.clear();
        self.fetch_again_at = None;
        self.rooms.on_disconnected();
        self.outbox.on_disconnected();
        let random = self.roll();
        let (delay, fresh_token) = match self.backoff.on_ended(code, retry_after, lasted, random) {
            Next::Stop => {
                self.state = State::Stopped { reason: reason.clone() };
                return self.emit(Event::Stopped { code: code.unwrap_or_default(), reason });
            }
            Next::After(delay) => (delay, false),
            Next::FreshToken(delay) => (delay, true),
        };
        self.state = State::Away { at: now + delay, fresh_token };
        self.emit(Event::Disconnected { code, reason, retry_in_ms: delay });
    }

    /// Sends a message; it is repeated with the same id until it is answered.
    pub fn send(&mut self, id: String, target: Target, body: Body, now: u64) -> Result<(), SendError> {
        if let State::Stopped { reason } = &self.state {
            return Err(SendError::Stopped(reason.clone()));
        }
        if self.outbox.len() >= OUTBOX_MAX {
            return Err(SendError::OutboxFull);
        }
        self.outbox.push(id, target, body);
        self.flush(now);
        Ok(())
    }

    pub fn read(&mut self, conversation_id: &str, seq: u64) {
        if matches!(self.state, State::Open { .. }) {
            let frame = json!({"type": "msg.read", "conversation_id": conversation_id, "seq": seq});
            self.outputs.push(Output::Text(frame.to_string()));
        }
    }

    /// Asks something that has an answer with this `id`; asked again after a reconnect.
    pub fn request(&mut self, mut frame: Value, id: String) -> Result<(), SendError> {
        if let State::Stopped { reason } = &self.state {
            return Err(SendError::Stopped(reason.clone()));
        }
        if self.requests.len() >= REQUESTS_MAX {
            return Err(SendError::OutboxFull);
        }
        frame["id"] = json!(id);
        let text = frame.to_string();
        if matches!(self.state, State::Open { .. }) {
            self.outputs.push(Output::Text(text.clone()));
        }
        self.requests.push_back((id, text));
        Ok(())
    }

    /// Joins a room, now and after each reconnect, from where the client stands then.
    pub fn join(&mut self, room: &str) -> Result<(), SendError> {
        if let State::Stopped { reason } = &self.state {
            return Err(SendError::Stopped(reason.clone()));
        }
        if !self.rooms.want(room) {
            return Err(SendError::TooManyRooms);
        }
        if matches!(self.state, State::Open { .. }) {
            self.ask_for_room(room);
        }
        Ok(())
    }

    pub fn leave(&mut self, room: &str) {
        if self.rooms.drop(room) && matches!(self.state, State::Open { .. }) {
            let id = self.next_id("~leave");
            let frame = json!({"type": "room.leave", "id": id, "room": room});
            self.outputs.push(Output::Text(frame.to_string()));
        }
    }

    /// Sends in a room; a refusal is told as [`Event::Failed`] with the id that this returns. There is no ack: the
    /// message comes back as everybody has it.
    pub fn send_in_room(&mut self, room: &str, body: Body) -> Result<String, SendError> {
        if !self.rooms.is_joined(room) {
            return Err(SendError::NotInRoom(room.to_owned()));
        }
        let id = self.next_id(ROOM_SEND);
        let output = with_body(&send_head(&id, room), body);
        self.outputs.push(output);
        Ok(id)
    }

    fn ask_for_room(&mut self, room: &str) {
        let id = self.next_id("~join");
        if let Some(text) = self.rooms.ask(room, id) {
            self.outputs.push(Output::Text(text));
        }
    }

    fn next_id(&mut self, kind: &str) -> String {
        self.next_id += 1;
        format!("{kind}{}", self.next_id)
    }

    /// How many messages wait for their acknowledgement.
    pub fn unacknowledged(&self) -> usize {
        self.outbox.len()
    }

    /// Where each conversation stands; what an application keeps for the next start.
    pub fn positions(&self) -> impl Iterator<Item = (&str, u64)> {
        self.timelines.iter().filter_map(|(id, t)| Some((id.as_str(), t.position()?)))
    }

    pub fn on_text(&mut self, text: &str, now: u64) {
        (self.heard, self.pinged) = (now, false);
        if text == "pong" {
            return;
        }
        match serde_json::from_str::<Fields<'_>>(text) {
            Ok(fields) => self.on_frame(fields, None, text, now),
            Err(error) => self.emit(Event::Frame(json!({"type": "unreadable", "error": error.to_string()}))),
        }
    }

    /// A header and a body.
    pub fn on_binary(&mut self, bytes: &[u8], now: u64) {
        (self.heard, self.pinged) = (now, false);
        let header = bytes
            .split_first_chunk::<4>()
            .and_then(|(length, rest)| rest.split_at_checked(u32::from_be_bytes(*length) as usize));
        let Some((header, body)) = header else { return };
        let Ok(text) = std::str::from_utf8(header) else { return };
        if let Ok(fields) = serde_json::from_str::<Fields<'_>>(text) {
            self.on_frame(fields, Some(Bytes::copy_from_slice(body)), text, now);
        }
    }

    fn on_frame(&mut self, frame: Fields<'_>, binary: Option<Bytes>, text: &str, now: u64) {
        match frame.kind.as_str() {
            "connected" => {
                self.state = State::Open { since: now };
                (self.ping_after_ms, self.close_after_ms) =
                    (frame.ping_after_ms.max(1), frame.close_after_ms.max(2));
                // The server may choose the device id; it is this client's from now on.
                self.settings.device_id = Some(frame.device_id.clone());
                self.user_id.clone_from(&frame.user_id);
                self.emit(Event::Connected {
                    user_id: frame.user_id.unwrap_or_default(),
                    device_id: frame.device_id,
                    node_id: frame.node_id,
                    resumed: frame.resumed,
                });
                for (_, text) in &self.requests {
                    self.outputs.push(Output::Text(text.clone()));
                }
                self.rooms.names().iter().for_each(|room| self.ask_for_room(room));
                self.settle(now);
            }
            "ping" => self.outputs.push(Output::Text(match frame.data {
                Some(data) => json!({"type": "pong", "data": data}).to_string(),
                None => r#"{"type":"pong"}"#.into(),
            })),
            "pong" => {}
            "msg.push" => {
                let message = message_of(&frame, binary);
                let timeline = self.timelines.entry(message.conversation_id.clone()).or_default();
                timeline.on_message(message.seq, Some(message));
            }
            "msg.ack" => {
                let (id, conversation_id) =
                    (frame.id.unwrap_or_default(), frame.conversation_id.unwrap_or_default());
                // Its number counts even if another answer came before for the same id.
                self.timelines.entry(conversation_id.clone()).or_default().on_message(frame.seq, None);
                if self.outbox.remove(&id).is_some() {
                    self.emit(Event::Acked { id, conversation_id, seq: frame.seq, ts: frame.ts });
                }
            }
            "error" => self.on_error(frame, text, now),
            "sync.notice" => {
                for row in frame.conversations {
                    let id = row.conversation_id.unwrap_or_default();
                    self.timelines.entry(id.clone()).or_default().on_notice(row.first_seq, row.last_seq);
                    let (first_seq, last_seq, unread) = (row.first_seq, row.last_seq, row.unread);
                    self.emit(Event::Waiting { conversation_id: id, first_seq, last_seq, unread });
                }
            }
            "history.page" => {
                let id = frame.id.clone().unwrap_or_default();
                if let Some(conversation) = self.fetches.remove(&id) {
                    let messages = frame
                        .messages
                        .iter()
                        .map(|m| Message { conversation_id: conversation.clone(), ..message_of(m, None) });
                    let messages = messages.collect();
                    let timeline = self.timelines.entry(conversation).or_default();
                    timeline.on_page(frame.first_seq, messages, frame.more);
                    if timeline.is_refused() {
                        let again = now + FETCH_AGAIN_MS;
                        self.fetch_again_at = Some(self.fetch_again_at.map_or(again, |at| at.min(again)));
                    }
                } else {
                    self.on_answer(id, text);
                }
            }
            "msg.receipt" => self.on_receipt(text),
            "session.closed" => {
                let code = frame.code.and_then(|c| c.as_u64()).unwrap_or(1001) as u16;
                self.closing = Some((code, frame.reason, frame.retry_after_ms));
            }
            "session.migrate" => {
                // The server goes on serving; the client moves at its own time.
                let delay = frame.retry_after_ms.unwrap_or_default();
                self.closing = Some((1001, "draining".into(), Some(delay)));
                self.outputs.push(Output::Close);
                self.on_closed(Some(1001), "draining", now);
            }
            "room.push" => self.on_room_message(frame.room.as_deref(), &frame, binary),
            "room.batch" => {
                let room = frame.room.as_deref();
                frame.messages.iter().for_each(|message| self.on_room_message(room, message, None));
            }
            "room.joined" => self.on_room_joined(frame, text),
            "ok" if frame.id.as_ref().is_some_and(|id| id.starts_with("~leave")) => {}
            "ok" | "conversation.page" => self.on_answer(frame.id.unwrap_or_default(), text),
            _ => {
                if let Ok(value) = serde_json::from_str(text) {
                    self.emit(Event::Frame(value));
                }
            }
        }
        self.settle(now);
    }

    fn on_error(&mut self, frame: Fields<'_>, text: &str, now: u64) {
        let code = frame.code.as_ref().and_then(Value::as_str).unwrap_or("internal").to_owned();
        let Some(id) = frame.id else {
            return self.emit(Event::Frame(serde_json::from_str(text).unwrap_or_default()));
        };
        let is_temporary = matches!(code.as_str(), "rate_limited" | "overloaded" | "unavailable");
        let delay = frame.retry_after_ms.unwrap_or(1_000);
        let again = now + delay + self.roll() % (delay + 1);
        if is_temporary && self.outbox.retry(&id, again) {
            return;
        }
        if self.outbox.remove(&id).is_some() {
            return self.emit(Event::Failed { id, code, message: frame.message });
        }
        if let Some(room) = self.rooms.on_refused(&id, is_temporary.then_some(again)) {
            if !is_temporary {
                self.emit(Event::RoomRefused { room, code, message: frame.message });
            }
            return;
        }
        if id.starts_with(ROOM_SEND) {
            return self.emit(Event::Failed { id, code, message: frame.message });
        }
        if let Some(conversation) = self.fetches.remove(&id) {
            let timeline = self.timelines.entry(conversation).or_default();
            if is_temporary {
                timeline.on_refused();
                self.fetch_again_at = Some(self.fetch_again_at.map_or(again, |at| at.min(again)));
            } else {
                // It is not this user's any more: what was missing will not come.
                timeline.give_up();
            }
            return;
        }
        self.on_answer(id, text);
    }

    fn on_room_joined(&mut self, frame: Fields<'_>, text: &str) {
        let id = frame.id.unwrap_or_default();
        match self.rooms.on_joined(&id, &frame.epoch, frame.offset, frame.recovered) {
            Some(joined) => self.emit(Event::RoomJoined {
                room: joined.room,
                members: frame.members.and_then(|members| members.as_u64()).unwrap_or_default(),
                is_gap: joined.is_gap,
            }),
            None => self.on_answer(id, text),
        }
    }

    fn on_room_message(&mut self, room: Option<&str>, frame: &Fields<'_>, binary: Option<Bytes>) {
        let message = RoomMessage {
            room: room.unwrap_or_default().to_owned(),
            offset: frame.offset,
            from: frame.from.clone(),
            ts: frame.ts,
            body: body_of(frame, binary),
        };
        if self.rooms.take(&message) {
            self.emit(Event::RoomMessage(message));
        }
    }

    fn on_answer(&mut self, id: String, text: &str) {
        self.requests.retain(|(asked, _)| *asked != id);
        let frame = serde_json::from_str(text).unwrap_or_default();
        self.emit(Event::Answer { id, frame });
    }

    fn on_receipt(&mut self, text: &str) {
        let frame: Value = serde_json::from_str(text).unwrap_or_default();
        self.emit(Event::Receipt {
            conversation_id: frame["conversation_id"].as_str().unwrap_or_default().to_owned(),
            seq: frame["seq"].as_u64().unwrap_or_default(),
            user_id: frame["user_id"].as_str().map(str::to_owned),
            count: frame["count"].as_u64().map(|n| n as u32),
            is_read: frame["kind"] == "read",
        });
    }

    /// Hands out what is in order, fetches what is missing, tells what arrived.
    fn settle(&mut self, now: u64) {
        if !matches!(self.state, State::Open { .. }) {
            return;
        }
        let mut frames = Vec::new();
        for (id, timeline) in &mut self.timelines {
            for message in timeline.take() {
                // An own message whose acknowledgement was lost with a connection.
                let is_own =
                    self.user_id.as_ref() == Some(&message.from) && self.outbox.remove(&message.id).is_some();
                self.outputs.push(Output::Event(if is_own {
                    let Message { conversation_id, seq, id, ts, .. } = message;
                    Event::Acked { id, conversation_id, seq, ts }
                } else {
                    Event::Message(message)
                }));
            }
            let need = timeline.need();
            if need != Need::Nothing {
                self.next_id += 1;
                let fetch = format!("~{}", self.next_id);
                let mut frame = json!({"type": "history", "id": fetch, "conversation_id": id, "limit": PAGE});
                if let Need::After(position) = need {
                    frame["after_seq"] = json!(position);
                }
                self.fetches.insert(fetch, id.clone());
                frames.push(frame.to_string());
            }
            if let Some(seq) = timeline.take_news() {
                frames.push(json!({"type": "msg.recv", "conversation_id": id, "seq": seq}).to_string());
            }
        }
        self.outputs.extend(frames.into_iter().map(Output::Text));
        self.flush(now);
    }

    fn flush(&mut self, now: u64) {
        if !matches!(self.state, State::Open { .. }) {
            return;
        }
        for message in self.outbox.take_due(now) {
            let (name, to) = match &message.target {
                Target::User(user) => ("to", user),
                Target::Conversation(id) => ("conversation_id", id),
            };
            let quote = |text: &str| Value::from(text).to_string();
            let head = format!(r#"{{"type":"msg.send","id":{},"{name}":{}"#, quote(&message.id), quote(to));
            self.outputs.push(with_body(&head, message.body));
        }
    }

    fn emit(&mut self, event: Event) {
        self.outputs.push(Output::Event(event));
    }

    fn roll(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random >> 11
    }
}

/// A frame of which everything but the body is written.
fn with_body(head: &str, body: Body) -> Output {
    match body {
        Body::Json(json) => Output::Text(format!("{head},\"body\":{json}}}")),
        Body::Binary(bytes) => {
            let mut frame = (head.len() as u32 + 1).to_be_bytes().to_vec();
            frame.extend_from_slice(head.as_bytes());
            frame.push(b'}');
            frame.extend_from_slice(&bytes);
            Output::Binary(frame.into())
        }
    }
}

fn body_of(frame: &Fields<'_>, binary: Option<Bytes>) -> Body {
    let json = frame.body.map_or("null", RawValue::get);
    match binary {
        Some(bytes) => Body::Binary(bytes),
        None if frame.body_encoding.as_deref() == Some("base64") => {
            Body::Binary(unbase64(json.trim_matches('"')).into())
        }
        None => Body::Json(json.to_owned()),
    }
}

fn message_of(frame: &Fields<'_>, binary: Option<Bytes>) -> Message {
    Message {
        conversation_id: frame.conversation_id.clone().unwrap_or_default(),
        seq: frame.seq,
        id: frame.id.clone().unwrap_or_default(),
        from: frame.from.clone(),
        ts: frame.ts,
        body: body_of(frame, binary),
    }
}

fn unbase64(text: &str) -> Vec<u8> {
    use base64::Engine;
    base64::engine::general_purpose::STANDARD.decode(text).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a core puts out, as short lines.
    fn brief(core: &mut Core) -> Vec<String> {
        let line = |output| match output {
            Output::Connect { fresh_token } => format!("connect fresh={fresh_token}"),
            Output::Close => "close".into(),
            Output::Binary(bytes) => format!("binary {}", bytes.len()),
            Output::Text(text) => {
                let frame: Value = serde_json::from_str(&text).expect("JSON");
                let mut line = format!("> {}", frame["type"].as_str().unwrap_or_default());
                for field in ["id", "seq", "after_seq", "room", "since"] {
                    if !frame[field].is_null() && !frame[field].to_string().contains('~') {
                        line += &format!(" {}", frame[field].to_string().trim_matches('"'));
                    }
                }
                line
            }
            Output::Event(Event::Message(m)) => format!("message {}", m.seq),
            Output::Event(Event::Acked { id, seq, .. }) => format!("acked {id} {seq}"),
            Output::Event(Event::Failed { id, code, .. }) => format!("failed {id} {code}"),
            Output::Event(Event::Connected { .. }) => "connected".into(),
            Output::Event(Event::Waiting { .. }) => "waiting".into(),
            Output::Event(Event::RoomMessage(m)) => format!("{} {}", m.room, m.offset),
            Output::Event(Event::RoomJoined { room, is_gap, .. }) => format!("joined {room} {is_gap}"),
            Output::Event(Event::RoomRefused { room, code, .. }) => format!("refused {room} {code}"),
            Output::Event(Event::Disconnected { code, .. }) => format!("disconnected {code:?}"),
            Output::Event(Event::Stopped { code, .. }) => format!("stopped {code}"),
            Output::Event(other) => format!("{other:?}"),
        };
        core.take_outputs().into_iter().map(line).collect()
    }

    fn open(core: &mut Core, now: u64) {
        core.on_time(now);
        core.on_opened("t", now);
        core.on_text(r#"{"type":"connected","user_id":"a","device_id":"d","ping_after_ms":45000,"close_after_ms":90000}"#, now);
        core.take_outputs();
    }

    fn core() -> Core {
        Core::new(Settings { seed: 3, ..Settings::default() })
    }

    fn push(seq: u64) -> String {
        format!(
            r#"{{"type":"msg.push","conversation_id":"d:a:b","seq":{seq},"id":"x{seq}","from":"b","ts":1,"body":1}}"#
        )
    }

    #[test]
    fn what_was_not_acknowledged_goes_out_again_in_order_with_the_same_ids() {
        let mut core = core();
        core.send("1".into(), Target::User("b".into()), Body::default(), 0).unwrap();
        open(&mut core, 0);
        core.send("2".into(), Target::User("b".into()), Body::default(), 0).unwrap();
        assert_eq!(brief(&mut core), ["> msg.send 2"]);
        core.on_text(r#"{"type":"msg.ack","id":"1","conversation_id":"d:a:b","seq":1,"ts":1}"#, 1);
        assert_eq!(brief(&mut core), ["acked 1 1", "> msg.recv 1"]);
        core.send("3".into(), Target::User("b".into()), Body::default(), 1).unwrap();
        core.on_closed(Some(1006), "", 2);
        assert_eq!(brief(&mut core), ["> msg.send 3", "disconnected Some(1006)"]);
        let due = core.next_due().unwrap();
        core.on_time(due);
        core.on_opened("t", due);
        core.on_text(
            r#"{"type":"connected","device_id":"d","ping_after_ms":45000,"close_after_ms":90000}"#,
            due,
        );
        let lines = brief(&mut core);
        assert_eq!(lines[..3], ["connect fresh=false", "> connect", "connected"]);
        assert_eq!(lines[4..], ["> msg.send 2", "> msg.send 3"]);
    }

    #[test]
    fn a_temporary_refusal_is_repeated_and_a_final_one_reported() {
        let mut core = core();
        open(&mut core, 0);
        for id in ["1", "2"] {
            core.send(id.into(), Target::User("b".into()), Body::default(), 0).unwrap();
        }
        core.take_outputs();
        core.on_text(
            r#"{"type":"error","code":"unavailable","message":"","id":"1","retry_after_ms":500}"#,
            0,
        );
        core.on_text(r#"{"type":"error","code":"forbidden","message":"","id":"2"}"#, 0);
        assert_eq!(brief(&mut core), ["failed 2 forbidden"]);
        let due = core.next_due().unwrap();
        assert!((500..=1000).contains(&due));
        core.on_time(due);
        assert_eq!(brief(&mut core), ["> msg.send 1"]);
    }

    #[test]
    fn messages_come_in_order_and_gaps_are_fetched() {
        let mut core = core();
        open(&mut core, 0);
        core.on_text(&push(1), 0);
        assert_eq!(brief(&mut core), ["message 1", "> msg.recv 1"]);
        core.on_text(&push(4), 0);
        assert_eq!(brief(&mut core), ["> history 1"]);
        core.on_text(&push(5), 0);
        assert_eq!(brief(&mut core), [""; 0]);
        let page = r#"{"type":"history.page","id":"~1","conversation_id":"d:a:b","first_seq":1,"more":false,"messages":[
            {"seq":2,"id":"x","from":"b","ts":1,"body":1},{"seq":3,"id":"y","from":"b","ts":1,"body":"AP8H","body_encoding":"base64"}]}"#;
        core.on_text(page, 0);
        assert_eq!(brief(&mut core), ["message 2", "message 3", "message 4", "message 5", "> msg.recv 5"]);
    }

    #[test]
    fn a_history_that_is_refused_for_now_is_asked_for_again() {
        let mut core = core();
        open(&mut core, 0);
        core.on_text(&push(1), 0);
        core.on_text(&push(3), 0);
        core.take_outputs();
        let refused = |id: u64, code: &str| {
            format!(r#"{{"type":"error","code":"{code}","message":"","id":"~{id}","retry_after_ms":500}}"#)
        };
        core.on_text(&refused(1, "unavailable"), 0);
        let due = core.next_due().unwrap();
        assert!((500..=1000).contains(&due), "{due}");
        core.on_time(due);
        assert_eq!(brief(&mut core), ["> history 1"]);
        // Refused for good: what can be had is handed out.
        core.on_text(&refused(2, "forbidden"), due);
        assert_eq!(brief(&mut core), ["message 3", "> msg.recv 3"]);
    }

    #[test]
    fn the_same_id_twice_has_two_answers() {
        let mut core = core();
        open(&mut core, 0);
        for _ in 0..2 {
            core.send("1".into(), Target::User("b".into()), Body::default(), 0).unwrap();
        }
        core.take_outputs();
        let refused = r#"{"type":"error","code":"unavailable","message":"","id":"1","retry_after_ms":500}"#;
        core.on_text(refused, 0);
        core.on_text(refused, 0);
        core.on_time(2_000);
        assert_eq!(brief(&mut core), ["> msg.send 1", "> msg.send 1"]);
        for _ in 0..2 {
            core.on_text(r#"{"type":"msg.ack","id":"1","conversation_id":"d:a:b","seq":1,"ts":1}"#, 2_000);
        }
        assert_eq!(core.unacknowledged(), 0);
        core.take_outputs();
        // One that was answered otherwise before: the number is not a gap.
        core.on_text(r#"{"type":"msg.ack","id":"1","conversation_id":"d:a:b","seq":2,"ts":1}"#, 2_000);
        assert_eq!(brief(&mut core), ["> msg.recv 2"]);
    }

    #[test]
    fn an_own_message_whose_ack_was_lost_is_acknowledged_by_the_history() {
        let mut core = core();
        open(&mut core, 0);
        core.on_text(&push(1), 0);
        core.send("x".into(), Target::User("b".into()), Body::default(), 0).unwrap();
        core.on_closed(Some(1006), "", 1);
        let due = core.next_due().unwrap();
        open(&mut core, due);
        core.on_text(&push(3), 9_000);
        core.take_outputs();
        let page = r#"{"type":"history.page","id":"~1","conversation_id":"d:a:b","first_seq":1,"more":false,
            "messages":[{"seq":2,"id":"x","from":"a","ts":1,"body":1},{"seq":3,"id":"y","from":"b","ts":1,"body":1}]}"#;
        core.on_text(page, 9_000);
        assert_eq!(brief(&mut core), ["acked x 2", "message 3", "> msg.recv 3"]);
        assert_eq!(core.unacknowledged(), 0);
    }

    #[test]
    fn final_codes_stop_and_a_drain_names_the_time() {
        let mut core = core();
        open(&mut core, 0);
        core.on_text(r#"{"type":"session.migrate","retry_after_ms":700,"reason":"draining"}"#, 100);
        assert_eq!(brief(&mut core), ["close", "disconnected Some(1001)"]);
        assert_eq!(core.next_due(), Some(800));
        open(&mut core, 800);
        core.on_text(r#"{"type":"session.closed","code":4503,"reason":"revoked"}"#, 900);
        core.on_closed(Some(1006), "", 900);
        assert_eq!(brief(&mut core), ["stopped 4503"]);
        assert_eq!(core.next_due(), None);
        assert!(core.send("1".into(), Target::User("b".into()), Body::default(), 901).is_err());
    }

    fn room_push(offset: u64) -> String {
        format!(r#"{{"type":"room.push","room":"r","offset":{offset},"from":"b","ts":1,"body":1}}"#)
    }

    /// Comes back and says what it asks for then.
    fn comes_back(core: &mut Core, now: u64) -> Vec<String> {
        core.on_closed(Some(1006), "", now);
        core.on_time(core.next_due().unwrap());
        core.on_opened("t", now);
        core.take_outputs();
        core.on_text(
            r#"{"type":"connected","device_id":"d","ping_after_ms":45000,"close_after_ms":90000}"#,
            now,
        );
        brief(core)
    }

    #[test]
    fn rooms_are_joined_again_from_where_the_client_stands() {
        let mut core = core();
        core.join("r").unwrap();
        assert!(core.send_in_room("r", Body::default()).is_err(), "not yet");
        core.on_time(0);
        core.on_opened("t", 0);
        core.take_outputs();
        core.on_text(
            r#"{"type":"connected","device_id":"d","ping_after_ms":45000,"close_after_ms":90000}"#,
            0,
        );
        assert_eq!(brief(&mut core), ["connected", "> room.join r"]);
        core.on_text(r#"{"type":"room.joined","id":"~join1","room":"r","epoch":"e","offset":4,"recovered":false,"members":2}"#, 0);
        core.on_text(&room_push(4), 0);
        core.on_text(&room_push(5), 0);
        let batch = r#"{"type":"room.batch","room":"r","messages":[{"offset":6,"from":"b","ts":1,"body":1},{"offset":7,"from":"b","ts":1,"body":1}]}"#;
        core.on_text(batch, 0);
        assert_eq!(brief(&mut core), ["joined r false", "r 5", "r 6", "r 7"]);
        core.send_in_room("r", Body::default()).unwrap();
        core.on_text(
            r#"{"type":"error","code":"overloaded","message":"","id":"~room2","retry_after_ms":1}"#,
            0,
        );
        assert_eq!(brief(&mut core), ["> room.send r", "failed ~room2 overloaded"]);
        assert_eq!(comes_back(&mut core, 10)[1..], [r#"> room.join r {"epoch":"e","offset":7}"#]);
        core.on_text(
            r#"{"type":"room.joined","id":"~join3","room":"r","epoch":"e","offset":9,"recovered":true}"#,
            10,
        );
        core.on_text(&room_push(8), 10);
        core.on_text(&room_push(9), 10);
        assert_eq!(brief(&mut core), ["joined r false", "r 8", "r 9"]);
        comes_back(&mut core, 20);
        core.on_text(
            r#"{"type":"room.joined","id":"~join4","room":"r","epoch":"f","offset":2,"recovered":false}"#,
            20,
        );
        core.on_text(&room_push(3), 20);
        assert_eq!(brief(&mut core), ["joined r true", "r 3"]);
        core.leave("r");
        core.on_text(&room_push(4), 20);
        core.on_text(r#"{"type":"ok","id":"~leave5"}"#, 20);
        assert_eq!(brief(&mut core), ["> room.leave r"]);
        assert_eq!(comes_back(&mut core, 30), ["connected"]);
    }

    #[test]
    fn a_full_room_is_asked_again_and_a_closed_one_given_up() {
        let mut core = core();
        open(&mut core, 0);
        core.join("full").unwrap();
        core.join("closed").unwrap();
        core.take_outputs();
        core.on_text(
            r#"{"type":"error","code":"overloaded","message":"","id":"~join1","retry_after_ms":500}"#,
            0,
        );
        core.on_text(r#"{"type":"error","code":"forbidden","message":"","id":"~join2"}"#, 0);
        assert_eq!(brief(&mut core), ["refused closed forbidden"]);
        let due = core.next_due().unwrap();
        assert!((500..=1000).contains(&due));
        core.on_time(due);
        assert_eq!(brief(&mut core), ["> room.join full"]);
        assert_eq!(core.next_due(), Some(45_000));
    }

    #[test]
    fn a_refused_client_waits_as_long_as_it_was_asked_to() {
        let mut core = core();
        core.on_time(0);
        core.on_refused("429", Some(5_000), 10);
        let due = core.next_due().unwrap();
        assert!((5_010..=6_010).contains(&due), "{due}");
        core.on_time(due);
        assert!(brief(&mut core).contains(&"connect fresh=false".to_owned()));
    }

    #[test]
    fn silence_is_asked_about_and_then_ended() {
        let mut core = core();
        open(&mut core, 0);
        core.on_time(45_000);
        assert_eq!(brief(&mut core), ["> ping"]);
        core.on_text(r#"{"type":"pong"}"#, 45_100);
        core.on_time(90_000);
        assert_eq!(brief(&mut core), [""; 0]);
        core.on_time(90_100);
        core.on_time(135_100);
        assert_eq!(brief(&mut core), ["> ping", "close", "disconnected None"]);
    }
}
