//! Every decision of a client, sans-IO. What the server says comes in at [`incoming`].

mod incoming;

use crate::{
    backoff::{Backoff, Next},
    outbox::{OUTBOX_MAX, Outbox},
    rooms::{ROOMS_MAX, Rooms, send_head},
    timeline::{Need, Timeline},
};
use bytes::Bytes;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

/// The largest page of history.
const PAGE: u32 = 200;
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
    /// Those with something to hand out, to fetch or to tell.
    unsettled: BTreeSet<String>,
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

/// Begins the ids of what is sent in rooms, which has no answer but an error.
const ROOM_SEND: &str = "~room";

impl Core {
    pub fn new(settings: Settings) -> Self {
        let timelines: BTreeMap<String, Timeline> =
            settings.positions.iter().map(|(id, seq)| (id.clone(), Timeline::at(*seq))).collect();
        Self {
            random: settings.seed | 1,
            settings,
            state: State::Away { at: 0, fresh_token: false },
            backoff: Backoff::default(),
            unsettled: timelines.keys().cloned().collect(),
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
                    self.for_all_timelines(Timeline::ask_again);
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
        self.for_all_timelines(Timeline::on_disconnected);
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

    /// A conversation about which there is news.
    fn timeline(&mut self, conversation: String) -> &mut Timeline {
        self.unsettled.insert(conversation.clone());
        self.timelines.entry(conversation).or_default()
    }

    fn for_all_timelines(&mut self, change: impl FnMut(&mut Timeline)) {
        self.timelines.values_mut().for_each(change);
        self.unsettled.extend(self.timelines.keys().cloned());
    }

    /// Hands out what is in order, fetches what is missing, tells what arrived.
    fn settle(&mut self, now: u64) {
        if !matches!(self.state, State::Open { .. }) {
            return;
        }
        let mut frames = Vec::new();
        for id in std::mem::take(&mut self.unsettled) {
            let Some(timeline) = self.timelines.get_mut(&id) else { continue };
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

#[cfg(test)]
mod tests;
