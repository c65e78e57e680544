//! From queues to sockets.

use super::{SPARE_OUTBOXES, Shard, with};
use crate::metrics::Count;
use bowline_session::{Chunk, State};
use bytes::Bytes;
use std::io::{self, IoSlice};

/// Frames written by one call.
const FRAMES: usize = 256;
/// An outbox that has held more chunks than this is not kept for the next use.
const SPARE_CHUNKS: usize = 64;

impl Shard {
    /// Queues one frame, which leaves at the end of the turn.
    pub(super) fn queue(&mut self, index: u32, bytes: Bytes, push: bool) {
        let Some(conn) = self.conns.at(index) else { return };
        let spare = &mut self.spare_outboxes;
        let outbox = conn.outbox.get_or_insert_with(|| spare.pop().unwrap_or_default());
        outbox.push(Chunk { bytes, push });
        if !conn.to_flush {
            conn.to_flush = true;
            self.to_flush.push(index);
        }
    }

    /// Puts a connection on the list of those to flush, if it has something to write or to finish.
    pub(super) fn plan_flush_queued(&mut self, index: u32) {
        let Some(conn) = self.conns.at(index) else { return };
        if !conn.to_flush && (conn.has_unsent() || conn.session.state() == State::Leaving) {
            conn.to_flush = true;
            self.to_flush.push(index);
        }
    }

    /// Writes what is queued. A socket that is full is left until it says that it is not.
    pub(super) fn flush_all(&mut self) {
        while !self.to_flush.is_empty() {
            let mut list = std::mem::take(&mut self.to_flush);
            for index in list.drain(..) {
                if let Some(conn) = self.conns.at(index).filter(|conn| conn.to_flush) {
                    conn.to_flush = false;
                    self.flush(index);
                }
            }
            if self.to_flush.is_empty() {
                self.to_flush = list;
            }
        }
    }

    fn flush(&mut self, index: u32) {
        let Some(conn) = self.conns.at(index) else { return };
        let (mut bytes, mut frames) = (0, 0);
        let mut failed = conn.socket.flush().err();
        while failed.is_none()
            && let Some(outbox) = conn.outbox.as_mut().filter(|outbox| !outbox.is_empty())
        {
            let (offered, written) = if outbox.frames() == 1 {
                let front = outbox.front().unwrap_or_default();
                (front.len(), conn.socket.write(front))
            } else {
                let mut slices = [IoSlice::new(&[]); FRAMES];
                let filled = outbox.fill(&mut slices);
                let offered = slices[..filled].iter().map(|slice| slice.len()).sum();
                (offered, conn.socket.write_vectored(&slices[..filled]))
            };
            match written {
                Ok(count) => {
                    bytes += count;
                    frames += outbox.on_written(count);
                    if count < offered && conn.socket.is_full_when_short() {
                        break;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    failed = Some(error);
                    break;
                }
            }
        }
        let empty = conn.outbox.as_ref().is_none_or(|outbox| outbox.is_empty());
        if (empty || failed.is_some())
            && let Some(outbox) = conn.outbox.take()
            && empty
            && outbox.capacity() <= SPARE_CHUNKS
            && self.spare_outboxes.len() < SPARE_OUTBOXES
        {
            self.spare_outboxes.push(outbox);
        }
        self.count(Count::BytesOut, bytes as u64);
        self.count(Count::FramesOut, frames as u64);
        if let Some(error) = failed {
            tracing::debug!(%error, "a connection failed while it was written");
            return self.on_peer_gone(index);
        }
        let actions = &mut self.actions;
        with(&self.shared, self.now, self.number, &mut self.conns, index, |conn, cx| {
            let waiting = conn.socket.unsent_bytes();
            match &conn.outbox {
                Some(outbox) => {
                    conn.session.on_queue(cx, outbox.bytes() + waiting, outbox.push_bytes(), actions);
                }
                None if waiting > 0 => conn.session.on_queue(cx, waiting, 0, actions),
                None => conn.session.on_flushed(cx, actions),
            }
        });
        if !self.actions.is_empty() {
            self.act(index);
        }
        // One that was not read because it did not take its answers.
        self.plan_read(index);
    }
}
