//! A storm of millions of clients in virtual time: the client library's back-off and the gateway's gate as they
//! are, with nothing in between.
//!
//! Every client loses its connection at the same moment. For a while the server takes nobody (it restarts), then it
//! takes as many handshakes a second as its gate lets in, and answers the others 429 with `Retry-After`, in seconds
//! as HTTP has it.

use super::{Report, report, storm::Random};
use bowline_client::backoff::{Backoff, Next};
use bowline_gateway::Gate;

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

struct Client {
    backoff: Backoff,
    attempts: u32,
}

impl Simulation {
    pub fn run(&self) -> anyhow::Result<Outcome> {
        let mut random = Random::new(self.seed);
        let gate = Gate::new(self.accept_rate, self.clients as usize, 0);
        let mut clients: Vec<Client> =
            (0..self.clients).map(|_| Client { backoff: Backoff::default(), attempts: 0 }).collect();
        let mut wheel: Vec<Vec<u32>> = vec![Vec::new(); WHEEL_MS];
        let mut waiting = 0_u64;
        let mut plan = |wheel: &mut Vec<Vec<u32>>, number: u32, client: &mut Client, now, retry| -> bool {
            let Next::After(delay_ms) = client.backoff.on_ended(None, retry, 0, random.next()) else {
                return false;
            };
            // A delay of less than a step is one step: an attempt takes time.
            let step = (delay_ms.max(1) as usize).min(WHEEL_MS - 1);
            wheel[(now as usize + step) % WHEEL_MS].push(number);
            true
        };
        for (number, client) in clients.iter_mut().enumerate() {
            waiting += u64::from(plan(&mut wheel, number as u32, client, 0_u64, None));
        }
        let mut outcome = Outcome {
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
        };
        let (mut accepted, mut attempted) = (Window::default(), Window::default());
        let mut now_ms = 0_u64;
        while waiting > 0 && now_ms < END_MS {
            let due = std::mem::take(&mut wheel[now_ms as usize % WHEEL_MS]);
            waiting -= due.len() as u64;
            outcome.attempts += due.len() as u64;
            let mut entered = 0;
            let count = due.len() as u64;
            for (turn, number) in due.into_iter().enumerate() {
                let client = &mut clients[number as usize];
                client.attempts += 1;
                // The attempts of one millisecond come one after the other.
                let now_us = (now_ms + 1000) * 1000 + turn as u64 * 1000 / count;
                let retry_after_ms = if now_ms < self.away_ms {
                    outcome.unanswered += 1;
                    None
                } else {
                    match gate.enter(None, now_us) {
                        Ok(()) => {
                            entered += 1;
                            outcome.attempts_of_one_max = outcome.attempts_of_one_max.max(client.attempts);
                            outcome.return_ms.saturating_record(now_ms);
                            continue;
                        }
                        Err(turned) => {
                            outcome.refused += 1;
                            turned.refused().retry_after_s().map(|seconds| seconds * 1000)
                        }
                    }
                };
                waiting += u64::from(plan(&mut wheel, number, client, now_ms, retry_after_ms));
            }
            if entered > 0 {
                outcome.back += entered as u32;
                outcome.all_back_ms = now_ms;
            }
            let in_second = accepted.add(now_ms, entered);
            outcome.peak_accepted = outcome.peak_accepted.max(in_second);
            if now_ms >= self.away_ms + 2000 {
                outcome.peak_accepted_after_burst = outcome.peak_accepted_after_burst.max(in_second);
            }
            outcome.peak_attempts = outcome.peak_attempts.max(attempted.add(now_ms, count));
            now_ms += 1;
        }
        Ok(outcome)
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
        report.row("clients", f64::from(simulation.clients), "");
        report.row("accept_limit", f64::from(simulation.accept_rate), "1/s");
        report.row("back", f64::from(self.back), "");
        report.row("not_back", f64::from(simulation.clients - self.back), "");
        report.row("all_back", self.all_back_ms as f64 / 1000.0, "s");
        report.row("attempts", self.attempts as f64, "");
        report.row("attempts_of_one_max", f64::from(self.attempts_of_one_max), "");
        report.row("refused_429", self.refused as f64, "");
        report.row("unanswered", self.unanswered as f64, "");
        report.row("peak_accepted", self.peak_accepted as f64, "1/s");
        report.row("peak_accepted_after_burst", self.peak_accepted_after_burst as f64, "1/s");
        report.row("peak_attempts", self.peak_attempts as f64, "1/s");
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
        let outcome = simulation.run().unwrap();
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
