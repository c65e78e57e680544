//! Every connection is dropped at once, and comes back by the client library's own rule.

use super::{
    job::{Job, Order, Tally},
    net::{Event, Net, Play, Readiness},
    report,
};
use bowline_client::backoff::{Backoff, Next};
use hdrhistogram::Histogram;
use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap},
};

/// How long a connection that is refused for now is tried before the storm.
const OPENING_MAX_US: u64 = 60_000_000;
/// The peak rate is found in steps of so many milliseconds.
const MOMENT_MS: u64 = 10;

struct Client {
    backoff: Backoff,
    opened_us: u64,
    is_back: bool,
}

pub struct Storm {
    readiness: Readiness,
    clients: Vec<Client>,
    random: Random,
    /// Who comes again, and when.
    due: BinaryHeap<Reverse<(u64, usize)>>,
    /// When the first connection was refused for now.
    refused_since_us: Option<u64>,
    dropped_us: Option<u64>,
    until_us: u64,
    /// Clients that will not come back.
    stopped: u64,
    back: u64,
    attempts: u64,
    failures: u64,
    lost_again: u64,
    refused: BTreeMap<u16, u64>,
    moments: BTreeMap<u64, u64>,
    return_us: Histogram<u64>,
}

impl Storm {
    pub fn new(job: &Job) -> anyhow::Result<Self> {
        let seed = u64::from_le_bytes(crate::random()?[..8].try_into()?);
        let client = |_| Client { backoff: Backoff::default(), opened_us: 0, is_back: false };
        Ok(Self {
            readiness: Readiness::new(),
            clients: (0..job.count).map(client).collect(),
            random: Random::new(seed),
            due: BinaryHeap::new(),
            refused_since_us: None,
            dropped_us: None,
            until_us: 0,
            stopped: 0,
            back: 0,
            attempts: 0,
            failures: 0,
            lost_again: 0,
            refused: BTreeMap::new(),
            moments: BTreeMap::new(),
            return_us: report::histogram(),
        })
    }

    fn on_open(&mut self, net: &Net, index: usize, now_us: u64) {
        self.clients[index].opened_us = now_us;
        let Some(dropped_us) = self.dropped_us else {
            return self.readiness.on_ready(now_us - net.since_us(index));
        };
        if std::mem::replace(&mut self.clients[index].is_back, true) {
            return;
        }
        self.back += 1;
        let took_us = now_us - dropped_us;
        self.return_us.saturating_record(took_us);
        *self.moments.entry(took_us / 1000 / MOMENT_MS * MOMENT_MS).or_default() += 1;
    }

    /// A connection has ended or was not made: when it comes again.
    fn plan(&mut self, index: usize, code: Option<u16>, retry_after_ms: Option<u64>, now_us: u64) {
        let random = self.random.next();
        let client = &mut self.clients[index];
        let lasted_ms = match std::mem::take(&mut client.opened_us) {
            0 => 0,
            opened_us => (now_us - opened_us) / 1000,
        };
        match client.backoff.on_ended(code, retry_after_ms, lasted_ms, random) {
            Next::After(delay_ms) | Next::FreshToken(delay_ms) => {
                self.due.push(Reverse((now_us + delay_ms * 1000, index)));
            }
            Next::Stop => self.stopped += 1,
        }
    }

    fn drop_all(&mut self, net: &mut Net, until_us: u64, now_us: u64) {
        self.dropped_us = Some(now_us);
        self.until_us = until_us;
        self.attempts = 0;
        for index in 0..self.clients.len() {
            net.abort(index);
        }
        for index in 0..self.clients.len() {
            // As after a long and quiet time.
            self.clients[index].backoff = Backoff::default();
            self.plan(index, None, None, now_us);
        }
    }

    /// Whether a refusal before the storm may be taken for a "later": a limit on handshakes lets everybody in.
    fn is_for_now(&mut self, code: u16, now_us: u64) -> bool {
        let since_us = *self.refused_since_us.get_or_insert(now_us);
        matches!(code, 429 | 503 | 1013) && now_us < since_us + OPENING_MAX_US
    }
}

impl Play for Storm {
    fn on_event(&mut self, net: &mut Net, index: usize, event: Event<'_>, now_us: u64) {
        let is_storm = self.dropped_us.is_some();
        match event {
            Event::Open => self.on_open(net, index, now_us),
            Event::Text(_) => {}
            Event::Refused { code, retry_after_ms, .. } if is_storm => {
                *self.refused.entry(code).or_default() += 1;
                // A status of HTTP is no close code.
                let code = Some(code).filter(|code| *code >= 1000);
                self.plan(index, code, retry_after_ms, now_us);
            }
            Event::Failed { .. } if is_storm => {
                self.failures += 1;
                self.plan(index, None, None, now_us);
            }
            Event::Closed { code, retry_after_ms, .. } if is_storm => {
                self.lost_again += 1;
                self.plan(index, code, retry_after_ms, now_us);
            }
            Event::Refused { code, retry_after_ms, .. } if self.is_for_now(code, now_us) => {
                self.plan(index, None, retry_after_ms, now_us);
            }
            Event::Refused { code, why, .. } => self.readiness.on_failed(format!("{code} {why}")),
            Event::Failed { why } => self.readiness.on_failed(why),
            // Before the storm; it is dropped with the others.
            Event::Closed { .. } => {}
        }
    }

    fn on_order(&mut self, net: &mut Net, order: Order, now_us: u64) {
        if let Order::Drop { until_us } = order {
            self.drop_all(net, until_us, now_us);
        }
    }

    fn on_time(&mut self, net: &mut Net, now_us: u64) -> Option<u64> {
        while let Some(Reverse((due_us, index))) = self.due.peek().copied() {
            if due_us > now_us {
                return Some(due_us);
            }
            self.due.pop();
            self.attempts += 1;
            if net.open(index, now_us).is_err() {
                self.failures += 1;
                self.plan(index, None, None, now_us);
            }
        }
        None
    }

    fn readiness(&self) -> &Readiness {
        &self.readiness
    }

    fn done(&self) -> u64 {
        self.back
    }

    fn is_over(&self, now_us: u64) -> bool {
        let is_settled = self.back + self.stopped >= self.clients.len() as u64;
        self.dropped_us.is_some() && (is_settled || now_us >= self.until_us)
    }

    fn tally(&mut self) -> Tally {
        let mut tally = Tally::default();
        for (name, value) in [
            ("back", self.back),
            ("stopped", self.stopped),
            ("attempts", self.attempts),
            ("failures", self.failures),
            ("lost_again", self.lost_again),
        ] {
            tally.count(name, value);
        }
        for (code, count) in &self.refused {
            tally.count(&format!("refused_{code}"), *count);
        }
        tally.moments(std::mem::take(&mut self.moments));
        tally.times("return", &self.return_us);
        tally
    }
}

/// SplitMix64: delays need spread, not secrecy.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}
