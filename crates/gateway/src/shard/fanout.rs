//! Messages of rooms on their way to the members.
//!
//! What a turn of the loop brings for a room is collected and delivered together when everything is read: the frames
//! stand back to back in one buffer, made once for each form (transport, compression, batches), and each member gets one write of it, straight from
//! here. Only a member whose socket is full, or who has something queued, has them queued: one slice of the same
//! buffer for each frame, which is what may be dropped as a whole when it turns out too slow. A delivery takes no
//! memory and no encoding of its own.
//!
//! Messages come from this shard's own members and, by mail, from elsewhere. A number that is ahead of the next one
//! waits: those before it were put into the mailbox before it got its number.

use super::{
    Shard,
    rooms::{LocalRooms, Member},
};
use crate::{
    metrics::Count,
    wire::{Row, Transport},
};
use bowline_protocol::{Frame, frame::SERVER_FIELDS_BYTES, ws::deflate::Deflater};
use bowline_rooms::{Message, batch_frame};
use smallvec::SmallVec;
use std::{collections::VecDeque, num::NonZeroU8};

/// A room with so many bytes to deliver does not wait for the end of the turn.
const PENDING_BYTES_MAX: usize = 64 << 10;

/// What a room has for its members here, by number.
#[derive(Default)]
pub(super) struct Pending {
    messages: VecDeque<Message>,
    bytes: usize,
    /// Up to here the members have everything.
    delivered: u64,
}

impl Pending {
    pub fn after(delivered: u64) -> Self {
        Self { delivered, ..Self::default() }
    }

    pub fn delivered(&self) -> u64 {
        self.delivered
    }

    /// Puts a message in its place. One that was there, or is from before the first member, is passed over.
    fn insert(&mut self, message: Message) {
        let at = self.messages.partition_point(|other| other.offset < message.offset);
        let is_known = self.messages.get(at).is_some_and(|other| other.offset == message.offset);
        if message.offset > self.delivered && !is_known {
            self.bytes += message.frame.len();
            self.messages.insert(at, message);
        }
    }

    /// How many can be delivered: those without a gap before them.
    fn ready(&self) -> usize {
        // They are in order, each once: the last tells whether one is missing.
        let offsets = self.messages.iter().zip(self.delivered + 1..);
        match self.messages.back() {
            Some(last) if last.offset == self.delivered + self.messages.len() as u64 => self.messages.len(),
            _ => offsets.take_while(|(message, expected)| message.offset == *expected).count(),
        }
    }

    fn has_gap(&self) -> bool {
        self.ready() < self.messages.len()
    }

    fn take_ready(&mut self) -> Vec<Message> {
        let ready = self.ready();
        let taken: Vec<Message> = self.messages.drain(..ready).collect();
        self.bytes -= taken.iter().map(|message| message.frame.len()).sum::<usize>();
        self.delivered += ready as u64;
        taken
    }
}

/// The form in which a member gets messages: by transport, compressed or not, batched or not.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Form {
    transport: Transport,
    window_bits: Option<NonZeroU8>,
    batched: bool,
}

/// Messages with consecutive numbers, in the forms in which members get them.
struct Span<'a> {
    room: &'a str,
    messages: &'a [Message],
    frame_bytes_max: usize,
    /// Made when the first member needs it; nearly everybody has the same.
    rows: SmallVec<[(Form, Row); 2]>,
}

impl Span<'_> {
    /// What a member gets: a row, and how many frames of it came before it joined. None when all did.
    fn row(&mut self, mut form: Form, member: &Member, deflater: &mut Deflater) -> Option<(&Row, usize)> {
        let first = self.messages.first()?.offset;
        let skip = (member.joined + 1).saturating_sub(first) as usize;
        if skip >= self.messages.len() {
            return None;
        }
        form.batched &= skip == 0 && self.messages.len() > 1;
        let at = match self.rows.iter().position(|(other, _)| *other == form) {
            Some(at) => at,
            None => {
                let row = self.make(form, deflater);
                self.rows.push((form, row));
                self.rows.len() - 1
            }
        };
        // A batch has no part that a member does not get.
        Some((&self.rows[at].1, if form.batched { 0 } else { skip }))
    }

    fn make(&self, form: Form, deflater: &mut Deflater) -> Row {
        if form.batched {
            return Row::new(self.batches().iter(), form.transport, form.window_bits, deflater);
        }
        let frames = self.messages.iter().map(|message| &message.frame);
        Row::new(frames, form.transport, form.window_bits, deflater)
    }

    fn batches(&self) -> Vec<Frame> {
        let (mut frames, mut rest) = (Vec::new(), self.messages);
        while let Some((count, frame)) = batch_frame(self.room, rest, self.frame_bytes_max) {
            frames.push(frame);
            rest = &rest[count..];
        }
        frames
    }
}

impl LocalRooms {
    /// A message is missing somewhere, which is in the mailbox.
    fn has_gap(&self) -> bool {
        self.dirty.iter().any(|slot| {
            self.table.get(*slot as usize).is_some_and(|local| local.is_listed && local.pending.has_gap())
        })
    }

    fn list(&mut self, slot: u32) {
        if let Some(local) = self.table.get_mut(slot as usize)
            && !local.is_listed
        {
            local.is_listed = true;
            self.dirty.push(slot);
        }
    }
}

impl Shard {
    /// A message for the members of a room here.
    pub(super) fn on_room_message(&mut self, slot: u32, message: Message) {
        let pending = &mut self.rooms.table[slot as usize].pending;
        pending.insert(message);
        if pending.bytes >= PENDING_BYTES_MAX {
            self.deliver(slot);
        }
        if !self.rooms.table[slot as usize].pending.messages.is_empty() {
            self.rooms.list(slot);
        }
    }

    /// Delivers what the turn has brought for rooms.
    pub(super) fn deliver_rooms(&mut self) {
        if self.rooms.dirty.is_empty() {
            return;
        }
        if self.rooms.has_gap() {
            self.take_mail();
        }
        let mut dirty = std::mem::take(&mut self.rooms.dirty);
        for slot in dirty.drain(..) {
            let Some(local) = self.rooms.table.get_mut(slot as usize).filter(|local| local.is_listed) else {
                continue;
            };
            local.is_listed = false;
            self.deliver(slot);
            if self.rooms.table.get(slot as usize).is_some_and(|local| local.pending.has_gap()) {
                self.rooms.list(slot);
            }
        }
        if self.rooms.dirty.is_empty() {
            self.rooms.dirty = dirty;
        }
    }

    /// Delivers what a room has. It does nothing but write and queue, so that it may be called in the middle of
    /// anything: a socket that fails or is full is met again when the queue is flushed.
    pub(super) fn deliver(&mut self, slot: u32) {
        let Some(local) = self.rooms.table.get_mut(slot as usize) else { return };
        let messages = local.pending.take_ready();
        if messages.is_empty() {
            return;
        }
        let name = local.room.name().clone();
        let members = std::mem::take(&mut local.members);
        let mut span = Span {
            room: &name,
            messages: &messages,
            frame_bytes_max: self.shared.rules.max_frame_bytes + SERVER_FIELDS_BYTES,
            rows: SmallVec::new(),
        };
        let (mut bytes, mut frames, mut deliveries) = (0, 0, 0);
        for member in &members {
            let Some(conn) = self.conns.at(member.index) else { continue };
            let form =
                Form { transport: conn.transport, window_bits: conn.window_bits, batched: member.batch };
            let Some((row, skip)) = span.row(form, member, &mut self.deflater) else { continue };
            let at = row.start(skip);
            let rest = &row.bytes[at..];
            // An outbox is there only while something is queued.
            let written = match &conn.outbox {
                None => conn.socket.write(rest).unwrap_or(0),
                Some(_) => 0,
            };
            bytes += written;
            if written == rest.len() {
                frames += row.frames() - skip;
            } else {
                let whole = row.whole(at + written);
                frames += whole - skip;
                let begun = at + written - row.start(whole);
                self.queue_row(member.index, row, whole, begun);
            }
            deliveries += messages.len() - skip.min(messages.len());
        }
        if let Some(local) = self.rooms.table.get_mut(slot as usize) {
            local.members = members;
        }
        self.count(Count::BytesOut, bytes as u64);
        self.count(Count::FramesOut, frames as u64);
        self.count(Count::RoomDeliveries, deliveries as u64);
    }

    /// Queues the frames of a row from one on, of which so many bytes are written already.
    fn queue_row(&mut self, index: u32, row: &Row, from: usize, begun: usize) {
        for number in from..row.frames() {
            self.queue(index, row.frame(number), true);
        }
        if begun > 0
            && let Some(conn) = self.conns.at(index)
            && let Some(outbox) = &mut conn.outbox
        {
            // It was empty: the frame that was begun is the first.
            outbox.on_written(begun);
        }
    }

    /// Queues what a member has missed.
    pub(super) fn queue_missed(&mut self, index: u32, missed: &[Message]) {
        let Some(conn) = self.conns.at(index).filter(|_| !missed.is_empty()) else { return };
        let frames = missed.iter().map(|message| &message.frame);
        let row = Row::new(frames, conn.transport, conn.window_bits, &mut self.deflater);
        for number in 0..row.frames() {
            self.queue(index, row.frame(number), false);
        }
        self.count(Count::RoomDeliveries, missed.len() as u64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bowline_protocol::{frame::Body, ids::RoomName};
    use bowline_rooms::{Limits, Post, Rooms};

    fn messages(count: usize) -> Vec<Message> {
        struct Nowhere;
        impl bowline_rooms::Carrier for Nowhere {
            fn has_space(&self, _: usize) -> bool {
                true
            }
            fn carry(&self, _: usize, _: &std::sync::Arc<bowline_rooms::Room>, _: &[Message]) {}
        }
        let limits = Limits { window_messages: 10, window_ms: 1000, members_max: 10 };
        let rooms = Rooms::new(limits, 1, [1, 2]);
        let room = rooms.join(&RoomName::trusted("r"), 0, None, 0).unwrap().room;
        let body = Body::Json(bytes::Bytes::from_static(b"1"));
        let post = Post { from: None, body: &body };
        (0..count).map(|_| rooms.send(&room, 0, post, 0, &Nowhere).unwrap()).collect()
    }

    #[test]
    fn numbers_ahead_of_their_turn_wait_and_known_ones_are_passed_over() {
        let all = messages(6);
        let mut pending = Pending::after(1);
        let mut took = Vec::new();
        for number in [4, 1, 2, 2, 4, 6, 3, 5, 5, 6] {
            pending.insert(all[number - 1].clone());
            assert_eq!(pending.has_gap(), pending.ready() < pending.messages.len());
            took.push(pending.take_ready().iter().map(|message| message.offset).collect::<Vec<_>>());
        }
        let expected: [&[u64]; 10] = [&[], &[], &[2], &[], &[], &[], &[3, 4], &[5, 6], &[], &[]];
        assert_eq!(took, expected);
        assert_eq!((pending.delivered(), pending.bytes), (6, 0));
    }

    #[test]
    fn who_joined_within_a_span_gets_what_came_after() {
        let all = messages(4);
        let mut span = Span { room: "r", messages: &all, frame_bytes_max: 1000, rows: SmallVec::new() };
        let mut deflater = Deflater::default();
        let rows = [
            (0, false, Some((4, 0))),
            (0, true, Some((1, 0))),
            (1, false, Some((4, 1))),
            (1, true, Some((4, 1))),
            (3, false, Some((4, 3))),
            (4, true, None),
            (9, false, None),
        ];
        for (joined, batch, expected) in rows {
            let member = Member::rehearsed(joined, batch);
            let form = Form { transport: Transport::Tcp, window_bits: None, batched: batch };
            let got = span.row(form, &member, &mut deflater).map(|(row, skip)| (row.frames(), skip));
            assert_eq!(got, expected, "joined at {joined}, batch {batch}");
        }
    }
}
