//! Pairs of users send each other durable messages; every push is acknowledged, as a client does.

use super::{
    job::{Job, Order, Tally},
    net::{Event, Net, Play, Readiness},
    report,
    stamp::{Reader, Stamp},
    wire::{self, Notice},
};
use hdrhistogram::Histogram;
use memchr::memmem::Finder;
use std::collections::VecDeque;

/// How long the last messages may take to arrive after the end.
const DRAIN_US: u64 = 10_000_000;
/// How long the last acknowledgements may take to reach the server: connections end abruptly.
const SETTLE_US: u64 = 250_000;
/// Messages of one connection without an answer; an open loop sends no more until some are answered, and their time
/// counts from when they were due.
const UNDER_WAY_MAX: usize = 256;

/// One side of a pair.
struct Side {
    conversation: String,
    /// Numbers and due times of what was sent and not answered.
    under_way: VecDeque<(u64, u64)>,
    newest: u64,
}

pub struct Pair {
    job: Job,
    readiness: Readiness,
    sides: Vec<Side>,
    reader: Reader,
    seq: Finder<'static>,
    id: Finder<'static>,
    clock: Option<Clock>,
    next_number: u64,
    /// Of an open loop: messages sent so far, and when the first was due.
    sent: u64,
    pushed: u64,
    /// When the last push arrived.
    pushed_us: u64,
    acknowledged: u64,
    refused: u64,
    delivered: u64,
    out_of_order: u64,
    redelivered: u64,
    /// What is answered of all that was sent, for the end.
    answered: u64,
    lost: u64,
    ack_us: Histogram<u64>,
    push_us: Histogram<u64>,
    text: Vec<u8>,
}

/// What counts.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    pub began_us: u64,
    pub epoch_us: u64,
    pub until_us: u64,
}

impl Clock {
    pub fn of(order: Order) -> Option<Self> {
        match order {
            Order::Go { began_us, epoch_us, until_us } => Some(Self { began_us, epoch_us, until_us }),
            _ => None,
        }
    }

    pub fn counts(&self, at_us: u64) -> bool {
        (self.epoch_us..self.until_us).contains(&at_us)
    }
}

impl Pair {
    pub fn new(job: &Job) -> Self {
        let sides = (0..job.count)
            .map(|index| {
                let number = job.first + index;
                let (one, other) = (Job::user(number & !1), Job::user(number | 1));
                // The server sorts the two by their bytes.
                let (one, other) = if one < other { (one, other) } else { (other, one) };
                Side { conversation: format!("d:{one}:{other}"), under_way: VecDeque::new(), newest: 0 }
            })
            .collect();
        Self {
            job: job.clone(),
            readiness: Readiness::new(),
            sides,
            reader: Reader::new(),
            seq: Finder::new("\"seq\":"),
            id: Finder::new("-"),
            clock: None,
            next_number: 0,
            sent: 0,
            pushed: 0,
            pushed_us: 0,
            acknowledged: 0,
            refused: 0,
            delivered: 0,
            out_of_order: 0,
            redelivered: 0,
            answered: 0,
            lost: 0,
            ack_us: report::histogram(),
            push_us: report::histogram(),
            text: Vec::new(),
        }
    }

    fn send(&mut self, net: &mut Net, index: usize, due_us: u64) {
        self.next_number += 1;
        let number = self.next_number;
        let Self { job, sides, text, .. } = self;
        text.clear();
        let head = format!(
            "{{\"type\":\"msg.send\",\"id\":\"{}.{}-{number}\",\"conversation_id\":\"{}\",\"body\":",
            job.run, job.first, sides[index].conversation
        );
        text.extend_from_slice(head.as_bytes());
        Stamp { number, due_us }.write(text, job.body_bytes);
        text.push(b'}');
        net.send(index, text);
        sides[index].under_way.push_back((number, due_us));
        self.sent += 1;
    }

    /// Takes the answer to a message; when it was due.
    fn take_answered(&mut self, index: usize, text: &[u8]) -> Option<u64> {
        // The first "-" of the frame stands in the id, before the number; error codes have none.
        let id = text.get(memchr::memmem::find(text, b"\"id\":\"")?..)?;
        let (number, _) = wire::number_behind(id, &self.id)?;
        let under_way = &mut self.sides[index].under_way;
        let at = under_way.iter().position(|(one, _)| *one == number)?;
        self.answered += 1;
        under_way.remove(at).map(|(_, due_us)| due_us)
    }

    fn on_answer(&mut self, net: &mut Net, index: usize, text: &[u8], is_ack: bool, now_us: u64) {
        let Some(clock) = self.clock else { return };
        let Some(due_us) = self.take_answered(index, text) else { return };
        match is_ack {
            true if clock.counts(due_us) => {
                self.acknowledged += 1;
                self.ack_us.saturating_record(now_us - due_us);
            }
            true => {}
            false => {
                // It will not be pushed.
                self.pushed += 1;
                self.refused += 1;
                self.readiness.why.get_or_insert_with(|| {
                    let notice = Notice::parse(text);
                    format!("{} {}", notice.error_code(), notice.message)
                });
            }
        }
        if self.job.rate.is_none() && now_us < clock.until_us {
            self.send(net, index, now_us);
        }
    }

    fn on_push(&mut self, net: &mut Net, index: usize, text: &[u8], now_us: u64) {
        let Some((seq, _)) = wire::number_behind(text, &self.seq) else { return };
        let side = &mut self.sides[index];
        let recv =
            format!("{{\"type\":\"msg.recv\",\"conversation_id\":\"{}\",\"seq\":{seq}}}", side.conversation);
        net.send(index, recv.as_bytes());
        let (Some(clock), Some((stamp, _))) = (self.clock, self.reader.next(text)) else { return };
        // Of an earlier run.
        if stamp.due_us < clock.began_us {
            return;
        }
        if seq <= side.newest {
            let is_again = memchr::memmem::find(text, b"\"redelivered\":true").is_some();
            *(if is_again { &mut self.redelivered } else { &mut self.out_of_order }) += 1;
            return;
        }
        side.newest = seq;
        self.pushed += 1;
        self.pushed_us = now_us;
        if clock.counts(stamp.due_us) {
            self.delivered += 1;
            self.push_us.saturating_record(now_us - stamp.due_us);
        }
    }
}

impl Play for Pair {
    fn on_event(&mut self, net: &mut Net, index: usize, event: Event<'_>, now_us: u64) {
        match event {
            Event::Open => self.readiness.on_ready(now_us - net.since_us(index)),
            Event::Text(text) if wire::is(text, "msg.ack") => self.on_answer(net, index, text, true, now_us),
            Event::Text(text) if wire::is(text, "error") => self.on_answer(net, index, text, false, now_us),
            Event::Text(text) if wire::is(text, "msg.push") => self.on_push(net, index, text, now_us),
            Event::Text(_) => {}
            Event::Refused { code, why, .. } => self.readiness.on_failed(format!("{code} {why}")),
            Event::Failed { why } => self.readiness.on_failed(why),
            Event::Closed { .. } => self.lost += 1,
        }
    }

    fn on_order(&mut self, net: &mut Net, order: Order, now_us: u64) {
        self.clock = Clock::of(order).or(self.clock);
        if self.clock.is_some() && self.job.rate.is_none() && self.sent == 0 {
            for index in 0..self.sides.len() {
                for _ in 0..self.job.in_flight {
                    self.send(net, index, now_us);
                }
            }
        }
    }

    /// An open loop: the connections take turns, so that each has its messages spread evenly.
    fn on_time(&mut self, net: &mut Net, now_us: u64) -> Option<u64> {
        let (clock, rate) = (self.clock?, self.job.rate?);
        let share = rate * self.job.count as f64 / self.job.total as f64;
        loop {
            let due_us = clock.began_us + (self.sent as f64 * 1e6 / share) as u64;
            if due_us >= clock.until_us {
                return Some(clock.until_us).filter(|until_us| *until_us > now_us);
            }
            if due_us > now_us {
                return Some(due_us);
            }
            let index = self.sent as usize % self.sides.len();
            if !net.is_open(index) {
                // What it would have sent is neither answered nor pushed.
                (self.sent, self.answered, self.pushed) = (self.sent + 1, self.answered + 1, self.pushed + 1);
            } else if self.sides[index].under_way.len() < UNDER_WAY_MAX {
                self.send(net, index, due_us);
            } else {
                // Its turn comes when some are answered.
                return None;
            }
        }
    }

    fn readiness(&self) -> &Readiness {
        &self.readiness
    }

    fn done(&self) -> u64 {
        self.acknowledged
    }

    fn is_over(&self, now_us: u64) -> bool {
        let Some(clock) = self.clock else { return false };
        let is_settled = now_us >= self.pushed_us + SETTLE_US;
        let is_quiet = self.answered == self.sent && self.pushed >= self.sent && is_settled;
        // Nobody is left who could hear anything.
        let is_alone = self.lost >= self.sides.len() as u64;
        now_us >= clock.until_us && (is_quiet || is_alone || now_us >= clock.until_us + DRAIN_US)
    }

    fn tally(&mut self) -> Tally {
        let mut tally = Tally::default();
        for (name, value) in [
            ("acknowledged", self.acknowledged),
            ("delivered", self.delivered),
            ("refused", self.refused),
            ("out_of_order", self.out_of_order),
            ("redelivered", self.redelivered),
            ("unanswered", self.sent - self.answered),
            ("lost", self.lost),
        ] {
            tally.count(name, value);
        }
        tally.times("ack", &self.ack_us);
        tally.times("push", &self.push_us);
        tally
    }
}
