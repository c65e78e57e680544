//! The rooms that a client wants to be in: asked for again on every connection, from where it stands.

use crate::core::RoomMessage;
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};

/// Rooms of one connection.
pub const ROOMS_MAX: usize = 1_000;

/// What a client knows of a room: everything up to `offset` of the numbers called `epoch`.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Position {
    epoch: String,
    offset: u64,
}

#[derive(Debug, Default)]
struct Membership {
    position: Option<Position>,
    /// The server says so, on this connection.
    is_joined: bool,
    /// It was refused for the moment, and is asked again then.
    again_at: Option<u64>,
}

#[derive(Debug, Default)]
pub(crate) struct Rooms {
    wanted: BTreeMap<String, Membership>,
    /// By the `id` of the question.
    asked: HashMap<String, String>,
}

/// What a server's `room.joined` means here.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Joined {
    pub room: String,
    /// Something that was published since is not to be had any more.
    pub is_gap: bool,
}

impl Rooms {
    /// False when there are too many.
    pub fn want(&mut self, room: &str) -> bool {
        let has_place = self.wanted.len() < ROOMS_MAX || self.wanted.contains_key(room);
        if has_place {
            self.wanted.entry(room.to_owned()).or_default();
        }
        has_place
    }

    /// Whether it was wanted.
    pub fn drop(&mut self, room: &str) -> bool {
        self.asked.retain(|_, asked| asked != room);
        self.wanted.remove(room).is_some()
    }

    pub fn is_joined(&self, room: &str) -> bool {
        self.wanted.get(room).is_some_and(|membership| membership.is_joined)
    }

    pub fn names(&self) -> Vec<String> {
        self.wanted.keys().cloned().collect()
    }

    /// The question for a room that is wanted.
    pub fn ask(&mut self, room: &str, id: String) -> Option<String> {
        let membership = self.wanted.get_mut(room)?;
        membership.again_at = None;
        let mut frame = json!({"type": "room.join", "id": id, "room": room, "batch": true});
        if let Some(Position { epoch, offset }) = &membership.position {
            frame["since"] = json!({"epoch": epoch, "offset": offset});
        }
        self.asked.insert(id, room.to_owned());
        Some(frame.to_string())
    }

    /// None when nobody asked so.
    pub fn on_joined(&mut self, id: &str, epoch: &str, offset: u64, recovered: bool) -> Option<Joined> {
        let room = self.asked.remove(id)?;
        let membership = self.wanted.get_mut(&room)?;
        membership.is_joined = true;
        let is_gap = membership.position.is_some() && !recovered;
        if !recovered {
            membership.position = Some(Position { epoch: epoch.to_owned(), offset });
        }
        Some(Joined { room, is_gap })
    }

    /// The room that was refused, when this is about one; it is wanted no more unless it is to be asked `again_at`.
    pub fn on_refused(&mut self, id: &str, again_at: Option<u64>) -> Option<String> {
        let room = self.asked.remove(id)?;
        match again_at {
            Some(_) => self.wanted.get_mut(&room)?.again_at = again_at,
            None => drop(self.wanted.remove(&room)),
        }
        Some(room)
    }

    /// Whether a message is news.
    pub fn take(&mut self, message: &RoomMessage) -> bool {
        let Some(membership) = self.wanted.get_mut(&message.room).filter(|membership| membership.is_joined)
        else {
            return false;
        };
        match &mut membership.position {
            Some(position) if message.offset > position.offset => {
                position.offset = message.offset;
                true
            }
            _ => false,
        }
    }

    pub fn on_disconnected(&mut self) {
        self.asked.clear();
        for membership in self.wanted.values_mut() {
            (membership.is_joined, membership.again_at) = (false, None);
        }
    }

    pub fn next_due(&self) -> Option<u64> {
        self.wanted.values().filter_map(|membership| membership.again_at).min()
    }

    pub fn due(&self, now: u64) -> Vec<String> {
        let is_due = |membership: &Membership| membership.again_at.is_some_and(|at| at <= now);
        self.wanted
            .iter()
            .filter(|(_, membership)| is_due(membership))
            .map(|(room, _)| room.clone())
            .collect()
    }
}

/// A message sent in a room, up to where the body follows; `json!` would order the fields.
pub(crate) fn send_head(id: &str, room: &str) -> String {
    format!(r#"{{"type":"room.send","id":{},"room":{}"#, Value::from(id), Value::from(room))
}
