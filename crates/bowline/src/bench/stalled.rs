//! Members of a room that stop reading: what becomes of them, and whether they lose anything.
//!
//! They join, and read nothing while the others are measured. Then what is left for them is read to its end. Those that
//! the server has closed come back and ask for what followed the last message that they have seen; for each it is
//! counted whether that came, whole, in order and once.

use super::{
    job::{Job, Tally},
    net::{Event, Net},
    wire::{self, Joined},
};
use memchr::memmem::Finder;
use std::collections::HashMap;

/// How long reading what is left, coming back and catching up may take, for all of them together.
const RECOVERY_US: u64 = 15_000_000;
/// What the server says to a client that reads too slowly.
const SLOW_CONSUMER: (u16, &str) = (4002, "slow-consumer");

pub struct Stalled {
    sleepers: HashMap<usize, Sleeper>,
    offset: Finder<'static>,
    room: String,
    /// When they began to read again.
    woken_us: Option<u64>,
}

impl Stalled {
    pub fn new(room: String) -> Self {
        Self { sleepers: HashMap::new(), offset: Finder::new("\"offset\":"), room, woken_us: None }
    }

    /// One has joined, and reads no more.
    pub fn on_joined(&mut self, net: &mut Net, index: usize, text: &[u8]) {
        net.hold(index);
        self.sleepers.insert(index, Sleeper::new(Joined::parse(text)));
    }

    pub fn is_asleep(&self) -> bool {
        self.woken_us.is_none() && !self.sleepers.is_empty()
    }

    /// All read again; `newest` is what the others have.
    pub fn wake(&mut self, net: &mut Net, newest: u64, now_us: u64) {
        self.woken_us = Some(now_us);
        for (index, sleeper) in &mut self.sleepers {
            sleeper.on_wake(newest);
            if net.resume(*index).is_err() {
                sleeper.phase = Phase::Over;
            }
        }
    }

    pub fn on_event(&mut self, net: &mut Net, index: usize, event: Event<'_>, now_us: u64) {
        let Some(sleeper) = self.sleepers.get_mut(&index) else { return };
        match event {
            Event::Text(mut text) if wire::is(text, "room.push") || wire::is(text, "room.batch") => {
                while let Some((offset, at)) = wire::number_behind(text, &self.offset) {
                    sleeper.on_offset(offset);
                    text = &text[at..];
                }
            }
            Event::Text(text) if wire::is(text, "room.joined") => sleeper.on_back(&Joined::parse(text)),
            Event::Text(text) if wire::is(text, "error") => sleeper.phase = Phase::Over,
            Event::Text(_) => {}
            Event::Open => {
                let join = serde_json::json!({
                    "type": "room.join",
                    "id": format!("back-{index}"),
                    "room": self.room,
                    "since": {"epoch": sleeper.epoch, "offset": sleeper.last},
                    "batch": true,
                });
                net.send(index, join.to_string().as_bytes());
            }
            Event::Closed { code, why, .. } => {
                let comes_back = sleeper.on_closed(code, &why);
                if comes_back && net.open(index, now_us).is_err() {
                    sleeper.phase = Phase::Over;
                }
            }
            Event::Refused { .. } | Event::Failed { .. } => sleeper.phase = Phase::Over,
        }
    }

    pub fn is_over(&self, now_us: u64) -> bool {
        let is_late = self.woken_us.is_some_and(|woken_us| now_us >= woken_us + RECOVERY_US);
        is_late || self.sleepers.values().all(|sleeper| sleeper.phase == Phase::Over)
    }

    pub fn count(&self, tally: &mut Tally) {
        for sleeper in self.sleepers.values() {
            for (name, value) in [
                ("stalled", 1),
                ("stalled_closed", u64::from(sleeper.is_closed)),
                ("stalled_slow_consumer", u64::from(sleeper.is_told_why)),
                ("stalled_recovered", u64::from(sleeper.has_recovered())),
                ("stalled_missing", sleeper.missing()),
            ] {
                tally.count(name, value);
            }
        }
    }
}

impl Job {
    /// The second of each of the last pairs stops reading: so every worker has members that do not.
    pub fn is_stalled(&self, index: usize) -> bool {
        let number = self.first + index;
        number % 2 == 1 && number / 2 + self.stalled >= self.total / 2
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Asleep,
    /// It reads what was left for it.
    Waking,
    /// It is closed, and comes back.
    Returning,
    /// It is back in the room and gets what it has missed.
    CatchingUp,
    Over,
}

#[derive(Debug)]
struct Sleeper {
    phase: Phase,
    epoch: String,
    /// The newest offset that it has seen.
    last: u64,
    /// What it should come to have.
    newest: u64,
    /// Offsets that were passed over since it is back.
    gaps: u64,
    is_closed: bool,
    /// It was closed as a slow consumer, and was told so.
    is_told_why: bool,
    /// The server said that nothing is missing.
    is_promised: bool,
    /// A number was passed over, or came again.
    is_broken: bool,
}

impl Sleeper {
    fn new(joined: Joined) -> Self {
        Self {
            phase: Phase::Asleep,
            epoch: joined.epoch,
            last: joined.offset,
            newest: joined.offset,
            gaps: 0,
            is_closed: false,
            is_told_why: false,
            is_promised: false,
            is_broken: false,
        }
    }

    fn on_wake(&mut self, newest: u64) {
        self.newest = self.newest.max(newest);
        self.phase = Phase::Waking;
        self.judge();
    }

    fn on_offset(&mut self, offset: u64) {
        self.is_broken |= offset != self.last + 1;
        if offset > self.last {
            if self.phase == Phase::CatchingUp {
                self.gaps += offset - self.last - 1;
            }
            self.last = offset;
        }
        self.judge();
    }

    /// Whether it comes back.
    fn on_closed(&mut self, code: Option<u16>, why: &str) -> bool {
        if self.phase != Phase::Waking {
            self.phase = Phase::Over;
            return false;
        }
        self.phase = Phase::Returning;
        self.is_closed = true;
        self.is_told_why = (code, why) == (Some(SLOW_CONSUMER.0), SLOW_CONSUMER.1);
        true
    }

    fn on_back(&mut self, joined: &Joined) {
        self.newest = self.newest.max(joined.offset);
        self.is_promised = joined.recovered;
        self.phase = if joined.recovered { Phase::CatchingUp } else { Phase::Over };
        self.judge();
    }

    /// One that has everything is done, be it because it was not slow enough to be closed.
    fn judge(&mut self) {
        if matches!(self.phase, Phase::Waking | Phase::CatchingUp) && self.last >= self.newest {
            self.phase = Phase::Over;
        }
    }

    fn has_recovered(&self) -> bool {
        self.is_promised && !self.is_broken && self.last >= self.newest
    }

    fn missing(&self) -> u64 {
        if self.is_promised { self.gaps + self.newest.saturating_sub(self.last) } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn joined(offset: u64, recovered: bool) -> Joined {
        Joined { epoch: "e".into(), offset, recovered }
    }

    /// One that has seen 1 to 3 of 10 before it was closed, comes back, is told `recovered` and gets `pushes`.
    fn back(recovered: bool, pushes: &[u64]) -> Sleeper {
        let mut sleeper = Sleeper::new(joined(0, false));
        sleeper.on_wake(10);
        (1..=3).for_each(|offset| sleeper.on_offset(offset));
        assert!(sleeper.on_closed(Some(4002), "slow-consumer"));
        sleeper.on_back(&joined(10, recovered));
        pushes.iter().for_each(|offset| sleeper.on_offset(*offset));
        sleeper
    }

    #[test]
    fn only_a_whole_recovery_counts() {
        let check = |recovered: bool, pushes: &[u64], expected: (bool, u64)| {
            let sleeper = back(recovered, pushes);
            assert_eq!((sleeper.has_recovered(), sleeper.missing()), expected, "{recovered} {pushes:?}");
            assert!(sleeper.is_closed && sleeper.is_told_why);
        };
        check(true, &[4, 5, 6, 7, 8, 9, 10], (true, 0));
        check(true, &[4, 5, 6], (false, 4));
        check(true, &[4, 6, 7, 8, 9, 10], (false, 1));
        check(true, &[4, 5, 5, 6, 7, 8, 9, 10], (false, 0));
        check(true, &[3, 4, 5, 6, 7, 8, 9, 10], (false, 0));
        // Nothing is promised: nothing is missing.
        check(false, &[], (false, 0));
        check(false, &[11], (false, 0));
    }

    #[test]
    fn who_was_not_closed_or_not_told_why_does_not_count() {
        let mut sleeper = Sleeper::new(joined(0, false));
        sleeper.on_wake(3);
        (1..=3).for_each(|offset| sleeper.on_offset(offset));
        assert_eq!(sleeper.phase, Phase::Over);
        assert!(!sleeper.is_closed && !sleeper.has_recovered());
        for (code, why) in [(None, "reset"), (Some(4002), "other"), (Some(1013), "slow-consumer")] {
            let mut sleeper = Sleeper::new(joined(0, false));
            sleeper.on_wake(3);
            assert!(sleeper.on_closed(code, why));
            assert!(sleeper.is_closed && !sleeper.is_told_why, "{code:?} {why}");
            assert!(!sleeper.on_closed(code, why), "who is closed again while it comes back stays away");
        }
    }
}
