//! One room.

use crate::{Carrier, Limits, Message, Post, Refused, message, window::Window};
use bowline_protocol::{Millis, frame::Since, ids::RoomName};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

#[derive(Debug)]
pub struct Room {
    name: RoomName,
    /// Opaque for clients: other numbers have another epoch.
    epoch: Box<str>,
    head: Box<[u8]>,
    state: Mutex<State>,
}

#[derive(Debug)]
pub(crate) struct State {
    pub window: Window,
    /// Members of each shard, and of all.
    members: Box<[u32]>,
    pub total: u32,
    /// It was taken out of the table; who still holds it looks for the room again.
    pub is_closed: bool,
}

/// How a member begins.
#[derive(Debug)]
pub struct Joined {
    pub room: Arc<Room>,
    /// Everything up to this number is not pushed to this member any more.
    pub offset: u64,
    pub recovered: bool,
    /// What it missed, up to `offset`.
    pub missed: Vec<Message>,
    pub members: u32,
}

impl Room {
    pub(crate) fn new(name: RoomName, epoch: String, shards: usize) -> Self {
        let head = message::head(&name);
        let members = vec![0; shards].into();
        let state = State { window: Window::default(), members, total: 0, is_closed: false };
        Self { name, epoch: epoch.into(), head, state: Mutex::new(state) }
    }

    pub fn name(&self) -> &RoomName {
        &self.name
    }

    pub fn epoch(&self) -> &str {
        &self.epoch
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn answer(
        self: &Arc<Self>,
        state: &State,
        since: Option<&Since>,
        offset: u64,
        members: u32,
    ) -> Joined {
        let since = since.filter(|since| *since.epoch == *self.epoch);
        let missed = since.and_then(|since| state.window.after(since.offset));
        let recovered = missed.is_some();
        let missed = missed.map_or_else(Vec::new, |messages| {
            messages.take_while(|message| message.offset <= offset).cloned().collect()
        });
        Joined { room: self.clone(), offset, recovered, missed, members }
    }
}

impl State {
    pub fn add(&mut self, shard: usize, limits: &Limits) -> Result<(), Refused> {
        if self.total >= limits.members_max {
            return Err(Refused::Full(self.total));
        }
        self.members[shard] += 1;
        self.total += 1;
        Ok(())
    }

    pub fn remove(&mut self, shard: usize) {
        debug_assert!(self.members[shard] > 0);
        self.members[shard] -= 1;
        self.total -= 1;
    }

    /// Nobody would notice if it were another one.
    pub fn is_idle(&self) -> bool {
        self.total == 0 && self.window.is_empty()
    }

    /// Fails when a shard that has members takes no more; `own` hears of the messages otherwise.
    pub fn check(&self, own: Option<usize>, carrier: &impl Carrier) -> Result<(), Refused> {
        let behind = self
            .members
            .iter()
            .enumerate()
            .any(|(shard, count)| *count > 0 && Some(shard) != own && !carrier.has_space(shard));
        if behind { Err(Refused::Behind) } else { Ok(()) }
    }

    /// Numbers a message and keeps it.
    pub fn publish(&mut self, room: &Room, post: Post<'_>, now: Millis, limits: &Limits) -> Message {
        let message = Message::new(&room.head, self.window.newest() + 1, self.window.ts(now), post);
        self.window.trim(now, limits);
        self.window.push(message.clone(), limits);
        message
    }

    /// Mails what was published to every shard with members but `own`.
    pub fn mail(&self, room: &Arc<Room>, own: Option<usize>, messages: &[Message], carrier: &impl Carrier) {
        for (shard, count) in self.members.iter().enumerate() {
            if *count > 0 && Some(shard) != own {
                carrier.carry(shard, room, messages);
            }
        }
    }
}
