//! What was pushed to a device and not acknowledged: when it is due again, and how often it was.
//!
//! A push is repeated after 1, 2 and 4 acknowledgement timeouts, each counted from the attempt before, and then
//! waits in the inbox. Any progress of the device in that conversation starts the timers again. Pushes that were
//! written together share one range, so that a burst costs one entry.

use crate::limits;
use bowline_protocol::{ConversationId, Millis, Seq};
use std::collections::VecDeque;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Range {
    pub from: Seq,
    pub to: Seq,
    pub attempts: u32,
    began: Millis,
    written: Millis,
}

#[derive(Debug)]
pub(crate) struct Flight {
    pub conversation: ConversationId,
    ranges: VecDeque<Range>,
    /// When a timer of the core will look at this flight; 0 when none will.
    armed_for: Millis,
    /// The newest number that the device said it has.
    received: Seq,
}

impl Flight {
    pub fn new(conversation: ConversationId) -> Self {
        Self { conversation, ranges: VecDeque::new(), armed_for: 0, received: 0 }
    }

    /// Whether a timer is to be set for this time: none is, or only for later, when what was pushed before is due.
    pub fn arm(&mut self, at: Millis) -> bool {
        let at = at.max(1);
        let is_needed = self.armed_for == 0 || at < self.armed_for;
        if is_needed {
            self.armed_for = at;
        }
        is_needed
    }

    /// A timer that was set for this time is here. One of an earlier flight, or one that an earlier time took the place
    /// of, is not for this one.
    pub fn take_timer(&mut self, at: Millis) -> bool {
        let is_mine = self.armed_for == at.max(1);
        if is_mine {
            self.armed_for = 0;
        }
        is_mine
    }

    /// The newest number that was pushed and is not acknowledged.
    pub fn last(&self) -> Option<Seq> {
        self.ranges.back().map(|range| range.to)
    }

    /// The first number that is waited for.
    pub fn first(&self) -> Option<Seq> {
        self.ranges.front().map(|range| range.from)
    }

    /// A first push was written.
    pub fn on_pushed(&mut self, seq: Seq, now: Millis) {
        // Pushed to another connection of the device as well.
        if self.last().is_some_and(|last| seq <= last) {
            return;
        }
        if let Some(last) = self.ranges.back_mut()
            && last.attempts == 0
            && now.saturating_sub(last.began) < limits::FLIGHT_SPAN_MS
        {
            (last.to, last.written) = (seq, now);
            return;
        }
        self.ranges.push_back(Range { from: seq, to: seq, attempts: 0, began: now, written: now });
    }

    /// Everything up to `seq` has arrived. The device gets on, be it with what it fetches.
    pub fn on_received(&mut self, seq: Seq, now: Millis) {
        if seq > self.received {
            self.received = seq;
            self.drop_up_to(seq);
            self.restart(now);
        }
    }

    /// What lies up to `seq` is not to be pushed again.
    pub fn drop_up_to(&mut self, seq: Seq) {
        while self.ranges.front().is_some_and(|r| r.to <= seq) {
            self.ranges.pop_front();
        }
        if let Some(first) = self.ranges.front_mut()
            && first.from <= seq
        {
            first.from = seq + 1;
        }
    }

    /// The timers start again.
    pub fn restart(&mut self, now: Millis) {
        for range in &mut self.ranges {
            range.written = now;
        }
    }

    /// When the first range is due.
    pub fn due(&self, timeout: Millis) -> Option<Millis> {
        self.ranges.iter().map(|r| r.written + (timeout << r.attempts)).min()
    }

    /// Takes what is due: ranges to push again, counted as written now. Those that were repeated often enough
    /// are left to the inbox.
    pub fn take_due(&mut self, now: Millis, timeout: Millis, repeats_max: u32) -> Vec<Range> {
        let is_due = |r: &Range| r.written + (timeout << r.attempts) <= now;
        self.ranges.retain(|r| !is_due(r) || r.attempts < repeats_max);
        let mut due = Vec::new();
        for range in self.ranges.iter_mut().filter(|r| is_due(r)) {
            range.attempts += 1;
            range.written = now;
            due.push(*range);
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flight(pushes: &[(Seq, Millis)]) -> Flight {
        let mut flight = Flight::new(ConversationId::trusted("d:a:b"));
        for (seq, at) in pushes {
            flight.on_pushed(*seq, *at);
        }
        flight
    }

    fn seqs(ranges: &[Range]) -> Vec<(Seq, Seq)> {
        ranges.iter().map(|r| (r.from, r.to)).collect()
    }

    #[test]
    fn a_push_is_repeated_after_one_two_and_four_timeouts() {
        let mut flight = flight(&[(1, 0)]);
        let mut at = Vec::new();
        for now in 0..100 {
            if !flight.take_due(now, 10, 3).is_empty() {
                at.push(now);
            }
        }
        assert_eq!(at, [10, 30, 70]);
        assert!(flight.take_due(150, 10, 3).is_empty());
        assert_eq!(flight.first(), None);
    }

    #[test]
    fn progress_starts_the_timers_again() {
        let mut flight = flight(&[(1, 0), (5, 200)]);
        flight.on_received(3, 250);
        assert_eq!(flight.due(1000), Some(1250));
        flight.on_received(2, 900);
        assert_eq!(flight.due(1000), Some(1250), "an older number is no progress");
        assert_eq!(seqs(&flight.take_due(1250, 1000, 3)), [(5, 5)]);
        assert_eq!(flight.first(), Some(5));
        flight.on_received(5, 1300);
        assert_eq!(flight.first(), None);
    }

    #[test]
    fn what_is_pushed_later_may_be_due_earlier() {
        let mut flight = flight(&[(1, 0)]);
        assert!(flight.arm(1000) && !flight.arm(1000));
        assert!(flight.take_timer(1000));
        flight.take_due(1000, 1000, 3);
        assert_eq!(flight.due(1000), Some(3000));
        assert!(flight.arm(3000));
        flight.on_pushed(2, 1500);
        assert!(flight.arm(2500), "its own time comes first");
        assert!(!flight.take_timer(3000) && flight.take_timer(2500));
        assert_eq!(seqs(&flight.take_due(2500, 1000, 3)), [(2, 2)]);
        assert_eq!(flight.due(1000), Some(3000));
    }

    #[test]
    fn what_is_fetched_below_is_progress() {
        let mut flight = flight(&[(3, 0)]);
        flight.on_received(2, 900);
        assert_eq!((flight.due(1000), flight.first()), (Some(1900), Some(3)));
        flight.on_received(1, 1500);
        assert_eq!(flight.due(1000), Some(1900));
    }

    #[test]
    fn what_is_acknowledged_in_the_middle_of_a_range_is_not_repeated() {
        let mut flight = flight(&[(1, 0), (2, 0), (3, 0), (5, 500)]);
        assert_eq!((flight.first(), flight.last()), (Some(1), Some(5)));
        for (seq, first) in [(0, 1), (2, 3), (2, 3), (4, 5)] {
            flight.drop_up_to(seq);
            assert_eq!((flight.first(), flight.last()), (Some(first), Some(5)), "{seq}");
        }
        flight.drop_up_to(5);
        flight.drop_up_to(9);
        assert_eq!((flight.first(), flight.last(), flight.due(10)), (None, None, None));
    }

    #[test]
    fn what_goes_to_a_second_connection_is_pushed_once() {
        let mut flight = flight(&[(3, 0), (3, 0), (2, 0)]);
        assert_eq!((flight.first(), flight.last(), flight.ranges.len()), (Some(3), Some(3), 1));
        // A range that was repeated already does not grow: what is new has its attempts before it.
        assert_eq!(seqs(&flight.take_due(10, 10, 3)), [(3, 3)]);
        flight.on_pushed(4, 10);
        assert_eq!((flight.ranges.len(), flight.due(10)), (2, Some(20)));
    }

    #[test]
    fn one_timer_at_a_time_looks_at_a_flight() {
        let mut flight = flight(&[]);
        assert!(!flight.take_timer(5), "none was set");
        assert!(flight.arm(5) && !flight.arm(7));
        assert!(!flight.take_timer(7) && flight.take_timer(5) && !flight.take_timer(5));
        assert!(flight.arm(0), "at the very beginning of time, too");
        assert!(!flight.arm(3) && flight.take_timer(0));
    }

    #[test]
    fn a_burst_is_one_range() {
        let flight = flight(&[(1, 0), (2, 1), (4, 50), (5, 100), (6, 101)]);
        let ranges: Vec<_> = flight.ranges.iter().copied().collect();
        assert_eq!(seqs(&ranges), [(1, 4), (5, 6)]);
    }
}
