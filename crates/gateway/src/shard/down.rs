//! What comes from the router.

use super::{Shard, id, with};
use crate::{metrics::Count, wire::Shared};
use bowline_protocol::link::{ConnRef, Down, Downlink, Target, Up, Uplink};
use bowline_session::Turn;

/// Events of one connection that are held until those before them have come. More are answered "not here", and so
/// is everything early while this many connections miss something.
const EARLY_EVENTS_MAX: usize = 1024;
const EARLY_CONNECTIONS_MAX: usize = 1024;

/// An event that came before its turn.
pub(super) struct Early {
    login: u64,
    event: Down,
}

impl Shard {
    pub(super) fn on_down(&mut self, message: Downlink) {
        let Downlink { to, event, .. } = message;
        self.take(&to, &event);
        if self.early.is_empty() {
            return;
        }
        for target in &to {
            self.take_early(target.connection);
        }
    }

    fn take(&mut self, to: &[Target], event: &Down) {
        match event {
            Down::Frame { frame, decided, answer } => {
                let mut shared = Shared::new(frame);
                for target in to {
                    if !self.take_turn(target, event) {
                        continue;
                    }
                    let (index, _) = id::place(target.connection);
                    let Some(conn) = self.conns.at(index) else { continue };
                    if conn.session.state().is_open() {
                        let bytes = shared.bytes(conn.transport, conn.window_bits, &mut self.deflater);
                        self.queue(index, bytes, !answer);
                    }
                    if *decided > 0 {
                        self.on_decided(index, *decided);
                    }
                }
            }
            event => {
                for target in to {
                    if self.take_turn(target, event) {
                        self.on_event(id::place(target.connection).0, event);
                    }
                }
            }
        }
    }

    /// What was missing has come: takes what was held behind it.
    fn take_early(&mut self, connection: u64) {
        let (index, generation) = id::place(connection);
        while let Some(held) = self.early.get_mut(&index) {
            let Some(no) = self.conns.of(index, generation).map(|conn| conn.session.next_no()) else {
                return;
            };
            let Some(Early { login, event }) = held.remove(&no) else {
                held.retain(|held_no, _| *held_no > no);
                if held.is_empty() {
                    self.early.remove(&index);
                }
                return;
            };
            self.take(&[Target { connection, login, no }], &event);
        }
    }

    /// The event is the next one for its target. One that comes before its turn is held; one that has no
    /// connection is answered.
    fn take_turn(&mut self, target: &Target, event: &Down) -> bool {
        let (index, generation) = id::place(target.connection);
        let turn = if id::shard(target.connection) == self.number {
            let conn = self.conns.of(index, generation);
            conn.map_or(Turn::NotHere, |conn| conn.session.take_turn(target.login, target.no))
        } else {
            Turn::NotHere
        };
        if turn == Turn::Early && self.hold(index, target, event) {
            return false;
        }
        if matches!(turn, Turn::NotHere | Turn::Early) {
            self.count(Count::NotHere, 1);
            let node = self.shared.node.clone();
            self.up.push(Uplink {
                from: ConnRef { node, connection: target.connection, login: target.login },
                event: Up::NotHere {
                    no: target.no,
                    event: Box::new(event.clone()),
                    gone: turn == Turn::NotHere,
                },
            });
        }
        turn == Turn::Take
    }

    fn hold(&mut self, index: u32, target: &Target, event: &Down) -> bool {
        if self.early.len() >= EARLY_CONNECTIONS_MAX && !self.early.contains_key(&index) {
            return false;
        }
        let held = self.early.entry(index).or_default();
        if held.len() >= EARLY_EVENTS_MAX {
            return false;
        }
        held.insert(target.no, Early { login: target.login, event: event.clone() });
        true
    }

    fn on_decided(&mut self, index: u32, count: u32) {
        let actions = &mut self.actions;
        with(&self.shared, self.now, self.number, &mut self.conns, index, |conn, cx| {
            conn.session.on_decided(cx, count, actions);
        });
        if !self.actions.is_empty() {
            self.act(index);
        }
    }

    fn on_event(&mut self, index: u32, event: &Down) {
        let actions = &mut self.actions;
        with(&self.shared, self.now, self.number, &mut self.conns, index, |conn, cx| match event {
            Down::Accepted { resumed } => conn.session.on_accepted(cx, *resumed, actions),
            Down::Refused(code) => conn.session.on_refused(cx, *code, actions),
            Down::Decided(count) => conn.session.on_decided(cx, *count, actions),
            Down::Close { code, reason } => conn.session.close(cx, *code, reason.clone(), None, actions),
            // The first goes its own way, and an answer is for the API.
            Down::Frame { .. } | Down::Answer { .. } => {}
        });
        self.act(index);
    }
}
