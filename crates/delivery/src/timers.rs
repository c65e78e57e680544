//! The core's timers: a heap of what is due when. Entries may be out of date; who takes one looks again.

use crate::{Core, Now};
use bowline_protocol::{ConversationId, DeviceId, Millis, UserId};
use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap},
};

pub(crate) enum Timer {
    Flight {
        user: UserId,
        device: DeviceId,
        conversation: ConversationId,
    },
    /// A look-up failed because the store did; do it again.
    Retry(Box<crate::reads::ReadPurpose>),
    /// What nobody asked for and has to be stored all the same.
    Enqueue(Box<crate::batch::Entry>),
    /// The store's rest is over.
    Store,
    /// A client has waited long enough for its session.
    Resume {
        key: crate::users::ConnKey,
        login: u64,
    },
    /// A session was held for its time.
    Session(u64),
    /// A step of the sweep.
    Sweep,
    /// Connected devices are written down as seen, from this one of the users on.
    Seen {
        from: usize,
    },
}

#[derive(Default)]
pub(crate) struct Timers {
    heap: BinaryHeap<Reverse<(Millis, u64)>>,
    timers: HashMap<u64, Timer>,
    next: u64,
}

impl Timers {
    pub fn arm(&mut self, at: Millis, timer: Timer) {
        self.next += 1;
        self.heap.push(Reverse((at, self.next)));
        self.timers.insert(self.next, timer);
    }

    pub fn next_due(&self) -> Option<Millis> {
        self.heap.peek().map(|Reverse((at, _))| *at)
    }

    fn pop(&mut self, now: Millis) -> Option<(Millis, Timer)> {
        let Reverse((at, number)) = *self.heap.peek()?;
        if at > now {
            return None;
        }
        self.heap.pop();
        self.timers.remove(&number).map(|timer| (at, timer))
    }
}

impl Core {
    pub(crate) fn on_timers(&mut self, now: Now) {
        while let Some((at, timer)) = self.timers.pop(now.mono) {
            match timer {
                Timer::Flight { user, device, conversation } => {
                    self.on_flight_timer(user, device, conversation, at, now)
                }
                Timer::Retry(purpose) => self.read_again(*purpose, now),
                Timer::Enqueue(entry) => self.enqueue(*entry),
                Timer::Store => {}
                Timer::Resume { key, login } => {
                    if self.conns.get(&key).is_some_and(|c| c.login == login) {
                        self.give_up_resume(key, now);
                    }
                }
                Timer::Session(session) => self.on_session_timer(session, now),
                Timer::Sweep => self.on_sweep_timer(now),
                Timer::Seen { from } => self.on_seen_timer(from, now),
            }
        }
    }
}
