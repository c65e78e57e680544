//! A storm of millions of clients in virtual time: the client library's back-off and the gateway's gate as they
//! are, with nothing in between.
//!
//! Every client loses its connection at the same moment. For a while the server takes nobody (it restarts), then it
//! takes as many handshakes a second as its gate lets in, and answers the others 429 with `Retry-After`, in seconds
//! as HTTP has it.

use super::{Report, report, storm::Random};
use bowline_client::backoff::{Backoff, Next};
use bowline_gateway::{Bounds, Gate};

#[derive(Debug, Clone, Copy)]
pub struct Simulation {
    pub clients: u32,
    /// `gateway.handshakes_per_second`.
    pub accept_rate: u32,
    /// How long the server is away.
    pub away_ms: u64,
    pub seed: u64,
}

/// What happened; times are milliseconds since the connections were lost.
pub struct Outcome {
    pub back: u32,
    pub all_back_ms: u64,
    pub attempts: u64,
    pub refused: u64,
    /// Attempts while the server was away.
    pub unanswered: u64,
    pub attempts_of_one_max: u32,
    /// The most in any second.
    pub peak_accepted: u64,
    /// The same once the gate's first burst is spent.
    pub peak_accepted_after_burst: u64,
    pub peak_attempts: u64,
    /// When the clients were back.
    return_ms: hdrhistogram::Histogram<u64>,
}

/// Longer than any delay: `Retry-After` and the longest back-off.
const WHEEL_MS: usize = 1 << 17;
/// A client that is not back after so long is lost; ten years of service.
const END_MS: u64 = 10 * 365 * 24 * 3_600_000;

#[derive(Clone, Default)]
struct Client {
    backoff: Backoff,
    attempts: u32,
}

impl Simulation {
    pub fn run(&self) -> Outcome {
        let mut world = World::new(*self);
        (0..self.clients).for_each(|number| world.plan(number, 0, None));
        let mut now_ms = 0;
        while world.waiting > 0 && now_ms < END_MS {
            world.step(now_ms);
            now_ms += 1;
        }
        world.outcome
    }
}

struct World {
    simulation: Simulation,
    gate: Gate,
    clients: Vec<Client>,
    random: Random,
    /// Who comes in which millisecond.
    wheel: Vec<Vec<u32>>,
    /// Clients in the wheel.
    waiting: u64,
    accepted: Window,
    attempted: Window,
    outcome: Outcome,
}

impl World {
    fn new(simulation: Simulation) -> Self {
        Self {
            simulation,
            gate: Gate::new(Bounds {
                handshakes_per_second: simulation.accept_rate,
                seats: simulation.clients as usize,
                standing: 0,
                per_address: 0,
            }),
            clients: vec![Client::default(); simulation.clients as usize],
            random: Random::new(simulation.seed),
            wheel: vec![Vec::new(); WHEEL_MS],
            waiting: 0,
            accepted: Window::default(),
            attempted: Window::default(),
            outcome: Outcome {
                back: 0,
                all_back_ms: 0,
                attempts: 0,
                refused: 0,
                unanswered: 0,
                attempts_of_one_max: 0,
                peak_accepted: 0,
                peak_accepted_after_burst: 0,
                peak_attempts: 0,
                return_ms: report::histogram(),
            },
        }
    }

    /// A client's connection has ended, or was not made: when it comes again.
    fn plan(&mut self, number: u32, now_ms: u64, retry_after_ms: Option<u64>) {
        let backoff = &mut self.clients[number as usize].backoff;
        // Without a close code it always comes again.
        let Next::After(delay_ms) = backoff.on_ended(None, retry_after_ms, 0, self.random.next()) else {
            return;
        };
        // An attempt takes time: the next one is never in the same step.
        let step = (delay_ms.max(1) as usize).min(WHEEL_MS - 1);
        self.wheel[(now_ms as usize + step) % WHEEL_MS].push(number);
        self.waiting += 1;
    }

    /// One millisecond.
    fn step(&mut self, now_ms: u64) {
        let due = std::mem::take(&mut self.wheel[now_ms as usize % WHEEL_MS]);
        let (count, back_before) = (due.len() as u64, self.outcome.back);
        self.waiting -= count;
        for (turn, number) in due.into_iter().enumerate() {
            // They come one after the other.
            let now_us = (now_ms + 1000) * 1000 + turn as u64 * 1000 / count;
            self.attempt(number, now_ms, now_us);
        }
        let outcome = &mut self.outcome;
        outcome.attempts += count;
        outcome.peak_attempts = outcome.peak_attempts.max(self.attempted.add(now_ms, count));
        let in_second = self.accepted.add(now_ms, u64::from(outcome.back - back_before));
        outcome.peak_accepted = outcome.peak_accepted.max(in_second);
        // The burst lies in the first second, and windows of a second see it for another.
        if now_ms >= self.simulation.away_ms + 2000 {
            outcome.peak_accepted_after_burst = outcome.peak_accepted_after_burst.max(in_second);
        }
    }

    fn attempt(&mut self, number: u32, now_ms: u64, now_us: u64) {
        let client = &mut self.clients[number as usize];
        client.attempts += 1;
        let outcome = &mut self.outcome;
        if now_ms < self.simulation.away_ms {
            outcome.unanswered += 1;
            return self.plan(number, now_ms, None);
        }
        match self.gate.pay(now_us) {
            Ok(()) => {
                outcome.back += 1;
                outcome.all_back_ms = now_ms;
                outcome.attempts_of_one_max = outcome.attempts_of_one_max.max(client.attempts);
                outcome.return_ms.saturating_record(now_ms);
            }
            Err(turned) => {
                outcome.refused += 1;
                let retry_after_ms = turned.refused().retry_after_s().map(|seconds| seconds * 1000);
                self.plan(number, now_ms, retry_after_ms);
            }
        }
    }
}

/// How many there were in the last second.
struct Window {
    counts: Vec<u64>,
    sum: u64,
}

impl Default for Window {
    fn default() -> Self {
        Self { counts: vec![0; 1000], sum: 0 }
    }
}

impl Window {
    fn add(&mut self, now_ms: u64, count: u64) -> u64 {
        let place = &mut self.counts[now_ms as usize % 1000];
        self.sum = self.sum - *place + count;
        *place = count;
        self.sum
    }
}

impl Outcome {
    pub fn report(&self, simulation: &Simulation) -> Report {
        let mut report = Report::default();
        report.count("clients", u64::from(simulation.clients), "");
        report.count("accept_limit", u64::from(simulation.accept_rate), "1/s");
        report.count("back", u64::from(self.back), "");
        report.count("not_back", u64::from(simulation.clients - self.back), "");
        report.row("all_back", self.all_back_ms as f64 / 1000.0, "s");
        report.count("attempts", self.attempts, "");
        report.count("attempts_of_one_max", u64::from(self.attempts_of_one_max), "");
        report.count("refused_429", self.refused, "");
        report.count("unanswered", self.unanswered, "");
        report.count("peak_accepted", self.peak_accepted, "1/s");
        report.count("peak_accepted_after_burst", self.peak_accepted_after_burst, "1/s");
        report.count("peak_attempts", self.peak_attempts, "1/s");
        for (label, quantile) in report::QUANTILES {
            let seconds = self.return_ms.value_at_quantile(quantile) as f64 / 1000.0;
            report.row(&format!("return_{label}"), seconds, "s");
        }
        report
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a storm that everybody survives; its figures.
    fn check(simulation: Simulation) -> Outcome {
        let outcome = simulation.run();
        let shown = outcome.report(&simulation).json();
        let Simulation { clients, accept_rate, away_ms, .. } = simulation;
        let (clients, rate) = (u64::from(clients), u64::from(accept_rate));
        assert_eq!(u64::from(outcome.back), clients, "{shown:#}");
        // In any second at most what is due in it and the burst of one second that the gate saves up.
        assert!(outcome.peak_accepted <= 2 * rate, "{shown:#}");
        // Once that is spent the rate holds; when few are left their number varies a little around it.
        let slack = 4 * rate.isqrt();
        assert!(outcome.peak_accepted_after_burst <= rate + slack, "{shown:#}");
        // It takes as long as the rate asks for, and the last ones a few of their longest delays.
        let least_ms = away_ms + (clients - rate.min(clients)) * 1000 / rate;
        assert!((least_ms..least_ms + 300_000).contains(&outcome.all_back_ms), "{shown:#}");
        outcome
    }

    #[test]
    fn two_million_clients_come_back_at_the_rate_of_the_gate() {
        let simulation = Simulation { clients: 2_000_000, accept_rate: 5_000, away_ms: 5_000, seed: 1 };
        let outcome = check(simulation);
        // It was a storm, and the gate let in what it may.
        assert!(outcome.refused > 1_000_000, "{}", outcome.refused);
        assert!(outcome.peak_accepted_after_burst >= 4_900, "{}", outcome.peak_accepted_after_burst);
    }

    #[test]
    fn storms_of_other_sizes_end_as_well() {
        for seed in 1..6 {
            check(Simulation { clients: 20_000, accept_rate: 100, away_ms: 0, seed });
            check(Simulation { clients: 20_000, accept_rate: 200, away_ms: 60_000, seed });
            check(Simulation { clients: 500, accept_rate: 5_000, away_ms: 0, seed });
        }
    }
}
