//! One room: some of its members publish, all of them receive, the publishers as well.
//!
//! In a closed loop a message is done when every member has it. Publishers live in the first worker; the others tell
//! it when their members have a message. Members that stop reading ([`stalled`](super::stalled)) are none of those.

use super::{
    job::{Job, Order, Tally},
    net::{Event, Net, Play, Readiness},
    pair::Clock,
    report,
    stalled::Stalled,
    stamp::{Reader, Stamp},
    wire::{self, Notice},
};
use hdrhistogram::Histogram;
use memchr::memmem::Finder;
use std::collections::VecDeque;

/// How long the last messages may take to arrive after the end.
const DRAIN_US: u64 = 10_000_000;
/// A closed loop whose messages do not arrive goes on after this, and says so.
const STALL_US: u64 = 1_000_000;
/// Messages whose arrival a worker follows for the first one; more than any loop has under way.
const UNDER_WAY_MAX: usize = 65_536;
/// Close code of a client that reads too slowly.
const SLOW_CONSUMER: u16 = 4002;

#[derive(Clone, Copy)]
struct Member {
    /// The newest offset that it has; `None` before it is in the room.
    offset: Option<u64>,
}

/// A message of a closed loop that some members do not have yet.
struct UnderWay {
    number: u64,
    /// Of this worker's members.
    left: u64,
    /// Workers that miss it.
    workers: usize,
}

pub struct Fanout {
    job: Job,
    readiness: Readiness,
    members: Vec<Member>,
    publishers: Vec<usize>,
    stalled: Stalled,
    in_room: u64,
    reader: Reader,
    offset: Finder<'static>,
    clock: Option<Clock>,
    published: u64,
    /// Of those, what counts.
    published_measured: u64,
    under_way: VecDeque<UnderWay>,
    /// Messages that this worker's members all have, for the others to know.
    arrived: VecDeque<u64>,
    /// When a message had last arrived at all members here.
    moved_us: u64,
    received_us: u64,
    /// Every delivery, for the end and the progress.
    received: u64,
    /// Deliveries within the measured time, whenever their message was sent.
    deliveries: u64,
    /// Deliveries of the messages that count.
    measured: u64,
    gaps: u64,
    reordered: u64,
    stalls: u64,
    slow_consumers: u64,
    lost: u64,
    refused: u64,
    publish_us: Histogram<u64>,
    text: Vec<u8>,
}

impl Fanout {
    pub fn new(job: &Job) -> Self {
        let readers = (0..job.count).filter(|index| !job.is_stalled(*index));
        Self {
            job: job.clone(),
            readiness: Readiness::new(),
            members: vec![Member { offset: None }; job.count],
            publishers: readers.take(job.publishers).collect(),
            stalled: Stalled::new(room_of(job)),
            in_room: 0,
            reader: Reader::new(),
            offset: Finder::new("\"offset\":"),
            clock: None,
            published: 0,
            published_measured: 0,
            under_way: VecDeque::new(),
            arrived: VecDeque::new(),
            moved_us: 0,
            received_us: 0,
            received: 0,
            deliveries: 0,
            measured: 0,
            gaps: 0,
            reordered: 0,
            stalls: 0,
            slow_consumers: 0,
            lost: 0,
            refused: 0,
            publish_us: report::histogram(),
            text: Vec::new(),
        }
    }

    fn publishes(&self) -> bool {
        self.job.first == 0
    }

    fn is_closed_loop(&self) -> bool {
        self.job.rate.is_none()
    }

    fn publish(&mut self, net: &mut Net, due_us: u64) {
        let Some(clock) = self.clock else { return };
        self.published += 1;
        self.published_measured += u64::from(clock.counts(due_us));
        let number = self.published;
        let publisher = self.publishers[number as usize % self.publishers.len()];
        self.text.clear();
        let head = format!(
            "{{\"type\":\"room.send\",\"id\":\"{number}\",\"room\":\"{}\",\"body\":",
            room_of(&self.job)
        );
        self.text.extend_from_slice(head.as_bytes());
        Stamp { number, due_us }.write(&mut self.text, self.job.body_bytes);
        self.text.push(b'}');
        net.send(publisher, &self.text);
        if self.is_closed_loop() {
            self.under_way.push_back(UnderWay { number, left: self.in_room, workers: self.job.workers - 1 });
        }
    }

    /// Fills a closed loop up.
    fn publish_more(&mut self, net: &mut Net, now_us: u64) {
        let Some(clock) = self.clock else { return };
        if !self.is_closed_loop() || !self.publishes() || now_us >= clock.until_us {
            return;
        }
        while self.under_way.len() < self.job.in_flight {
            self.publish(net, now_us);
        }
    }

    /// One or several messages of the room.
    fn on_messages(&mut self, index: usize, mut text: &[u8], now_us: u64) {
        let Some(clock) = self.clock else { return };
        while let Some((offset, at)) = wire::number_behind(text, &self.offset) {
            let behind = &text[at..];
            let Some((stamp, at)) = self.reader.next(behind) else { return };
            text = &behind[at..];
            let member = &mut self.members[index];
            match member.offset {
                Some(newest) if offset <= newest => {
                    self.reordered += 1;
                    continue;
                }
                Some(newest) => self.gaps += offset - newest - 1,
                None => {}
            }
            member.offset = Some(offset);
            self.received += 1;
            self.received_us = now_us;
            self.deliveries += u64::from(clock.counts(now_us));
            if clock.counts(stamp.due_us) {
                self.measured += 1;
                self.publish_us.saturating_record(now_us.saturating_sub(stamp.due_us));
            }
            if self.is_closed_loop() {
                self.on_arrived_here(stamp.number, now_us);
            }
        }
    }

    fn on_arrived_here(&mut self, number: u64, now_us: u64) {
        let at = match self.under_way.iter().position(|one| one.number == number) {
            Some(at) => at,
            // The others learn of a message by its first arrival.
            None if !self.publishes() => {
                if self.under_way.len() == UNDER_WAY_MAX {
                    self.under_way.pop_front();
                }
                self.under_way.push_back(UnderWay { number, left: self.in_room, workers: 0 });
                self.under_way.len() - 1
            }
            // It was given up.
            None => return,
        };
        let publishes = self.publishes();
        let one = &mut self.under_way[at];
        one.left = one.left.saturating_sub(1);
        if one.left > 0 {
            return;
        }
        self.moved_us = now_us;
        if publishes && one.workers > 0 {
            return;
        }
        self.under_way.remove(at);
        if !self.publishes() {
            self.arrived.push_back(number);
        }
    }

    fn on_arrived_elsewhere(&mut self, number: u64) {
        let Some(at) = self.under_way.iter().position(|one| one.number == number) else { return };
        let one = &mut self.under_way[at];
        one.workers = one.workers.saturating_sub(1);
        if one.workers == 0 && one.left == 0 {
            self.under_way.remove(at);
        }
    }

    fn on_joined(&mut self, net: &mut Net, index: usize, text: &[u8], now_us: u64) {
        let newest = wire::number_behind(text, &self.offset).map(|(offset, _)| offset);
        if self.members[index].offset.is_none() {
            self.members[index].offset = Some(newest.unwrap_or_default());
            self.readiness.on_ready(now_us - net.since_us(index));
            if self.job.is_stalled(index) {
                self.stalled.on_joined(net, index, text);
            } else {
                self.in_room += 1;
            }
        }
    }

    /// Everything that was published is with those who read, or will not come any more.
    fn is_measured(&self, now_us: u64) -> bool {
        let Some(clock) = self.clock else { return false };
        let has_all = self.publishes() && self.received >= self.published * self.in_room;
        // Only the first worker knows how many there were; the others wait until nothing comes any more.
        let is_silent = now_us >= self.received_us.max(clock.until_us) + STALL_US;
        let is_quiet = has_all || (!self.publishes() && is_silent);
        now_us >= clock.until_us && (is_quiet || now_us >= clock.until_us + DRAIN_US)
    }

    fn on_error(&mut self, index: usize, text: &[u8]) {
        let notice = Notice::parse(text);
        let why = format!("{} {}", notice.error_code(), notice.message);
        match self.members[index].offset {
            None => self.readiness.on_failed(format!("room.join: {why}")),
            Some(_) => {
                self.refused += 1;
                self.readiness.why.get_or_insert(why);
            }
        }
    }

    fn on_closed(&mut self, index: usize, code: Option<u16>, why: String) {
        match self.members[index].offset {
            None => self.readiness.on_failed(format!("{} {why}", code.unwrap_or_default())),
            Some(_) => {
                self.in_room -= 1;
                self.slow_consumers += u64::from(code == Some(SLOW_CONSUMER));
                self.lost += 1;
            }
        }
    }
}

fn room_of(job: &Job) -> String {
    format!("bench-{}", job.run)
}

impl Play for Fanout {
    fn on_event(&mut self, net: &mut Net, index: usize, event: Event<'_>, now_us: u64) {
        if self.job.is_stalled(index) && self.members[index].offset.is_some() {
            return self.stalled.on_event(net, index, event, now_us);
        }
        match event {
            Event::Text(text) if wire::is(text, "room.push") || wire::is(text, "room.batch") => {
                self.on_messages(index, text, now_us);
                self.publish_more(net, now_us);
            }
            Event::Open => {
                let (id, room) = (format!("join-{index}"), room_of(&self.job));
                let join = serde_json::json!({"type": "room.join", "id": id, "room": room, "batch": true});
                net.send(index, join.to_string().as_bytes());
            }
            Event::Text(text) if wire::is(text, "room.joined") => self.on_joined(net, index, text, now_us),
            Event::Text(text) if wire::is(text, "error") => self.on_error(index, text),
            Event::Text(_) => {}
            Event::Refused { code, why, .. } => self.readiness.on_failed(format!("{code} {why}")),
            Event::Failed { why } => self.readiness.on_failed(why),
            Event::Closed { code, why, .. } => self.on_closed(index, code, why),
        }
    }

    fn on_order(&mut self, net: &mut Net, order: Order, now_us: u64) {
        self.clock = Clock::of(order).or(self.clock);
        if let Order::Arrived { message } = order {
            self.on_arrived_elsewhere(message);
        }
        self.moved_us = now_us;
        self.publish_more(net, now_us);
    }

    fn on_time(&mut self, net: &mut Net, now_us: u64) -> Option<u64> {
        if self.stalled.is_asleep() && self.is_measured(now_us) {
            let newest = self.members.iter().filter_map(|member| member.offset).max();
            self.stalled.wake(net, newest.unwrap_or_default(), now_us);
        }
        let clock = self.clock.filter(|_| self.publishes())?;
        let Some(rate) = self.job.rate else {
            if now_us > self.moved_us + STALL_US && now_us < clock.until_us && !self.under_way.is_empty() {
                self.stalls += 1;
                self.under_way.clear();
                self.moved_us = now_us;
                self.publish_more(net, now_us);
            }
            return None;
        };
        loop {
            let due_us = clock.began_us + (self.published as f64 * 1e6 / rate) as u64;
            if due_us >= clock.until_us {
                return None;
            }
            if due_us > now_us {
                return Some(due_us);
            }
            self.publish(net, due_us);
        }
    }

    fn readiness(&self) -> &Readiness {
        &self.readiness
    }

    fn done(&self) -> u64 {
        self.received
    }

    fn take_arrived(&mut self) -> Option<u64> {
        self.arrived.pop_front()
    }

    fn is_over(&self, now_us: u64) -> bool {
        self.is_measured(now_us) && self.stalled.is_over(now_us)
    }

    fn tally(&mut self) -> Tally {
        let mut tally = Tally::default();
        for (name, value) in [
            ("published", self.published_measured),
            ("deliveries", self.deliveries),
            ("measured", self.measured),
            ("gaps", self.gaps),
            ("reordered", self.reordered),
            ("stalls", self.stalls),
            ("slow_consumers", self.slow_consumers),
            ("lost", self.lost),
            ("refused", self.refused),
        ] {
            tally.count(name, value);
        }
        self.stalled.count(&mut tally);
        tally.times("publish", &self.publish_us);
        tally
    }
}
