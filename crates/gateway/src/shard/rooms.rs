//! Rooms as a shard has them: which of its connections are members, and what those ask for.
//!
//! A room with members here has an entry with a dense list of them; each connection knows its place in the lists of
//! its rooms. So joining, leaving and the end of a connection cost the same however many members there are, and a
//! message goes straight through one list; see `fanout`.

use super::{Shard, conn::Membership, fanout::Pending, id, mail::Mail, with};
use bowline_protocol::{
    ErrorCode, Frame, ServerFrame,
    frame::{Body, RoomRequest, Since},
    ids::RoomName,
    link::Up,
};
use bowline_rooms::{Joined, Message, Post, Room, limits::ROOMS_PER_CONNECTION_MAX};
use bowline_session::{RoomJoin, rules::RETRY_AFTER_MS};
use slab::Slab;
use std::{collections::HashMap, sync::Arc};

/// How often a part of all rooms is looked through for what nobody needs any more.
const SWEEP_EVERY_MS: u64 = 1_000;

/// A member of a room.
pub(super) struct Member {
    /// The connection, and where in its list the room stands.
    pub index: u32,
    place: u32,
    /// It is pushed what comes after this number.
    pub joined: u64,
    pub batch: bool,
}

const _: () = assert!(size_of::<Member>() <= 24);

#[cfg(test)]
impl Member {
    pub fn rehearsed(joined: u64, batch: bool) -> Self {
        Self { index: 0, place: 0, joined, batch }
    }
}

/// A room with members on this shard.
pub(super) struct LocalRoom {
    pub room: Arc<Room>,
    pub members: Vec<Member>,
    pub pending: Pending,
    /// It is in the list of rooms with something to deliver.
    pub is_listed: bool,
}

#[derive(Default)]
pub struct LocalRooms {
    pub(super) table: Slab<LocalRoom>,
    by_name: HashMap<RoomName, u32, ahash::RandomState>,
    /// Rooms with something to deliver at the end of the turn.
    pub(super) dirty: Vec<u32>,
    next_sweep_ms: u64,
}

impl LocalRooms {
    fn find(&self, name: &RoomName) -> Option<u32> {
        self.by_name.get(name).copied()
    }

    fn open(&mut self, joined: &Joined) -> u32 {
        let room = joined.room.clone();
        let name = room.name().clone();
        let pending = Pending::after(joined.offset);
        let local = LocalRoom { room, members: Vec::new(), pending, is_listed: false };
        let slot = self.table.insert(local) as u32;
        self.by_name.insert(name, slot);
        slot
    }
}

impl Shard {
    pub(super) fn on_room(&mut self, index: u32, request: RoomRequest) {
        match request {
            RoomRequest::Send { id, room, body, .. } => self.send_in_room(index, &id, &room, &body),
            RoomRequest::Leave { id, room } => self.leave_room(index, &id, &room),
            join if self.shared.rules.room_join == RoomJoin::Hook => self.ask_application(index, join),
            RoomRequest::Join { id, room, since, batch } => {
                self.join_room(index, &id, &room, since.as_ref(), batch);
            }
        }
    }

    fn send_in_room(&mut self, index: u32, id: &str, name: &RoomName, body: &Body) {
        let Some((slot, _)) = self.membership(index, name) else {
            let message = "only members send in a room; join it first";
            return self.refuse_in_room(index, "room.send", id, ErrorCode::Forbidden, message);
        };
        let user = self.conns.at(index).and_then(|conn| conn.session.user().cloned());
        let room = &self.rooms.table[slot as usize].room;
        let post = Post { from: user.as_deref(), body };
        match self.shared.rooms.send(room, self.number, post, self.now.wall_ms, &*self.shared) {
            Ok(message) => self.on_room_message(slot, message),
            Err(refused) => {
                let message = refused.to_string();
                self.refuse_in_room(index, "room.send", id, ErrorCode::Overloaded, &message);
            }
        }
    }

    fn join_room(&mut self, index: u32, id: &str, name: &RoomName, since: Option<&Since>, batch: bool) {
        if let Some((slot, place)) = self.membership(index, name) {
            return self.join_again(index, slot, place, id, since, batch);
        }
        let Some(conn) = self.conns.at(index) else { return };
        if conn.memberships().len() >= ROOMS_PER_CONNECTION_MAX {
            let message = format!(
                "one connection may be in {ROOMS_PER_CONNECTION_MAX} rooms; leave one, or open another connection"
            );
            return self.refuse_in_room(index, "room.join", id, ErrorCode::RateLimited, &message);
        }
        let joined = match self.shared.rooms.join(name, self.number, since, self.now.wall_ms) {
            Ok(joined) => joined,
            Err(refused) => {
                let message = refused.to_string();
                return self.refuse_in_room(index, "room.join", id, ErrorCode::Overloaded, &message);
            }
        };
        let slot = match self.rooms.find(name) {
            Some(slot) => slot,
            None => self.rooms.open(&joined),
        };
        let members = &mut self.rooms.table[slot as usize].members;
        if let Some(conn) = self.conns.at(index) {
            let login = conn.session.login();
            let rooms = &mut conn.extras().rooms;
            let is_first = rooms.is_empty();
            members.push(Member { index, place: rooms.len() as u32, joined: joined.offset, batch });
            rooms.push(Membership { room: slot, position: members.len() as u32 - 1 });
            if is_first {
                self.tell_router(index, login, Up::InRooms);
            }
        }
        self.answer_joined(index, id, &joined);
    }

    /// A member that asks again is told where it stands: what was not pushed to it yet still is.
    fn join_again(
        &mut self,
        index: u32,
        slot: u32,
        place: usize,
        id: &str,
        since: Option<&Since>,
        batch: bool,
    ) {
        self.deliver(slot);
        let Some(position) = self.conns.at(index).map(|conn| conn.memberships()[place].position) else {
            return;
        };
        let local = &mut self.rooms.table[slot as usize];
        let member = &mut local.members[position as usize];
        member.batch = batch;
        let offset = member.joined.max(local.pending.delivered());
        let room = local.room.clone();
        let joined = self.shared.rooms.join_again(&room, since, offset, self.now.wall_ms);
        self.answer_joined(index, id, &joined);
    }

    /// What was missed follows as answers: the client has asked for it.
    fn answer_joined(&mut self, index: u32, id: &str, joined: &Joined) {
        let frame = ServerFrame::RoomJoined {
            id,
            room: joined.room.name(),
            epoch: joined.room.epoch(),
            offset: joined.offset,
            recovered: joined.recovered,
            members: u64::from(joined.members),
        };
        self.answer_in_room(index, &frame.encode());
        self.queue_missed(index, &joined.missed);
    }

    fn leave_room(&mut self, index: u32, id: &str, name: &RoomName) {
        if let Some((slot, place)) = self.membership(index, name) {
            // What was published before is its own still.
            self.deliver(slot);
            let mut left = None;
            if let Some(conn) = self.conns.at(index) {
                let rooms = &mut conn.extras().rooms;
                left = Some(rooms.swap_remove(place));
                if let Some(moved) = rooms.get(place) {
                    let members = &mut self.rooms.table[moved.room as usize].members;
                    members[moved.position as usize].place = place as u32;
                }
                if rooms.is_empty() {
                    conn.extras = None;
                }
            }
            self.leave_rooms(left);
        }
        self.answer_in_room(index, &ServerFrame::Ok { id, conversation_id: None }.encode());
    }

    /// Takes memberships away that their connection does not list any more.
    pub(super) fn leave_rooms(&mut self, left: impl IntoIterator<Item = Membership>) {
        for Membership { room: slot, position } in left {
            let local = &mut self.rooms.table[slot as usize];
            local.members.swap_remove(position as usize);
            if let Some(moved) = local.members.get(position as usize)
                && let Some(conn) = self.conns.at(moved.index)
                && let Some(membership) = conn.extras().rooms.get_mut(moved.place as usize)
            {
                membership.position = position;
            }
            let room = local.room.clone();
            if local.members.is_empty() {
                self.rooms.table.remove(slot as usize);
                self.rooms.by_name.remove(room.name());
            }
            self.shared.rooms.leave(&room, self.number, self.now.wall_ms);
        }
    }

    /// The room's slot, and where the connection lists it.
    fn membership(&mut self, index: u32, name: &RoomName) -> Option<(u32, usize)> {
        let slot = self.rooms.find(name)?;
        let memberships = self.conns.at(index)?.memberships();
        let place = memberships.iter().position(|membership| membership.room == slot)?;
        Some((slot, place))
    }

    /// A message that another shard or the API has published.
    pub(super) fn on_room_mail(&mut self, room: &Arc<Room>, message: Message) {
        // The members may have gone meanwhile, and the name may be another room's by now.
        if let Some(slot) = self.rooms.find(room.name())
            && Arc::ptr_eq(&self.rooms.table[slot as usize].room, room)
        {
            self.on_room_message(slot, message);
        }
    }

    // The application's judgement

    fn ask_application(&mut self, index: u32, request: RoomRequest) {
        let connection = id::encode(self.number, self.conns.generation(index), index);
        let Some(conn) = self.conns.at(index) else { return };
        let RoomRequest::Join { room, .. } = &request else { return };
        let (Some(user), Some(device)) = (conn.session.user(), conn.session.device()) else { return };
        let question = crate::RoomQuestion { user: user.clone(), device: device.clone(), room: room.clone() };
        let Some(judge) = self.shared.room_judge.clone() else {
            let why = Err("there is nobody to ask (hooks.room_join_url)".to_owned());
            return self.on_judged_join(index, &request, why);
        };
        let mailbox = self.shared.mailboxes[self.number].clone();
        let request = Box::new(request);
        judge(
            question,
            Box::new(move |allowed| {
                mailbox.push_control(Mail::RoomVerdict { connection, request, allowed });
            }),
        );
    }

    pub(super) fn on_room_verdict(
        &mut self,
        connection: u64,
        request: &RoomRequest,
        allowed: Result<bool, String>,
    ) {
        let (index, generation) = id::place(connection);
        if self.conns.of(index, generation).is_some_and(|conn| conn.session.state().is_open()) {
            self.on_judged_join(index, request, allowed);
            self.act(index);
        }
    }

    fn on_judged_join(&mut self, index: u32, request: &RoomRequest, allowed: Result<bool, String>) {
        let RoomRequest::Join { id, room, since, batch } = request else { return };
        match allowed {
            Ok(true) => self.join_room(index, id, room, since.as_ref(), *batch),
            Ok(false) => {
                let message = "the application does not let this user into the room";
                self.refuse_in_room(index, "room.join", id, ErrorCode::Forbidden, message);
            }
            Err(why) => {
                let message = format!("the application did not judge the join: {why}");
                self.refuse_in_room(index, "room.join", id, ErrorCode::Unavailable, &message);
            }
        }
        let actions = &mut self.actions;
        with(&self.shared, self.now, self.number, &mut self.conns, index, |conn, cx| {
            conn.session.on_decided(cx, 1, actions);
        });
    }

    // Answers

    fn answer_in_room(&mut self, index: u32, frame: &Frame) {
        if let Some(conn) = self.conns.at(index) {
            let bytes = crate::wire::encode(frame, conn.transport);
            self.queue(index, bytes, false);
        }
    }

    fn refuse_in_room(
        &mut self,
        index: u32,
        request: &'static str,
        id: &str,
        code: ErrorCode,
        message: &str,
    ) {
        self.counters().failed(Some(request), code);
        let retry_after_ms = code.is_temporary().then_some(RETRY_AFTER_MS);
        let error = ServerFrame::Error { code, message, id: Some(id), retry_after_ms };
        self.answer_in_room(index, &error.encode());
    }

    // What nobody needs any more

    /// When rooms are looked through next; one shard does it for all.
    pub(super) fn rooms_sweep_ms(&self) -> Option<u64> {
        (self.number == 0 && self.shared.rooms.rooms() > 0).then_some(self.rooms.next_sweep_ms)
    }

    pub(super) fn sweep_rooms(&mut self) {
        if self.rooms_sweep_ms().is_some_and(|at_ms| at_ms <= self.now.mono_ms) {
            self.shared.rooms.sweep(self.now.wall_ms);
            self.rooms.next_sweep_ms = self.now.mono_ms + SWEEP_EVERY_MS;
        }
    }
}
