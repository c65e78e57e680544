//! What the server says, frame by frame.

use super::{Body, Core, Event, Message, Output, ROOM_SEND, RoomMessage, State};
use bytes::Bytes;
use serde::Deserialize;
use serde_json::{Value, json, value::RawValue};

/// When a page that lacks what was announced is asked for again.
const FETCH_AGAIN_MS: u64 = 2_000;

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

impl Core {
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
                let timeline = self.timeline(message.conversation_id.clone());
                timeline.on_message(message.seq, Some(message));
            }
            "msg.ack" => {
                let (id, conversation_id) =
                    (frame.id.unwrap_or_default(), frame.conversation_id.unwrap_or_default());
                // Its number counts even if another answer came before for the same id.
                self.timeline(conversation_id.clone()).on_message(frame.seq, None);
                if self.outbox.remove(&id).is_some() {
                    self.emit(Event::Acked { id, conversation_id, seq: frame.seq, ts: frame.ts });
                }
            }
            "error" => self.on_error(frame, text, now),
            "sync.notice" => {
                for row in frame.conversations {
                    let id = row.conversation_id.unwrap_or_default();
                    self.timeline(id.clone()).on_notice(row.first_seq, row.last_seq);
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
                    let timeline = self.timeline(conversation);
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
            let timeline = self.timeline(conversation);
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
