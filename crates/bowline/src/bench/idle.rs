//! Opens connections, as fast as they are accepted, and holds them.

use super::{
    job::{Order, Tally},
    net::{Event, Net, Play, Readiness},
};

pub struct Idle {
    readiness: Readiness,
    lost: u64,
    is_over: bool,
}

impl Idle {
    pub fn new() -> Self {
        Self { readiness: Readiness::new(), lost: 0, is_over: false }
    }
}

impl Play for Idle {
    fn on_event(&mut self, net: &mut Net, index: usize, event: Event<'_>, now_us: u64) {
        match event {
            Event::Open => self.readiness.on_ready(now_us - net.since_us(index)),
            Event::Refused { code, why, .. } => self.readiness.on_failed(format!("{code} {why}")),
            Event::Failed { why } => self.readiness.on_failed(why),
            Event::Closed { .. } => self.lost += 1,
            Event::Text(_) => {}
        }
    }

    fn on_order(&mut self, _net: &mut Net, order: Order, _now_us: u64) {
        self.is_over |= order == Order::Finish;
    }

    fn readiness(&self) -> &Readiness {
        &self.readiness
    }

    fn is_over(&self, _now_us: u64) -> bool {
        self.is_over
    }

    fn tally(&mut self) -> Tally {
        let mut tally = Tally::default();
        tally.count("lost", self.lost);
        tally
    }
}
