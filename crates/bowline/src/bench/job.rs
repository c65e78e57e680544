//! What the bench and its worker processes say to each other: JSON, one object a line.

use super::{Scenario, wire::Place};
use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// One worker's share. Times on this link are microseconds of the system's monotonic clock, which all processes see.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Job {
    pub scenario: Scenario,
    pub place: Place,
    /// The numbers of its connections begin here; those of a pair, 2k and 2k + 1, are never parted.
    pub first: usize,
    pub count: usize,
    /// Connections and workers in all.
    pub total: usize,
    pub workers: usize,
    /// One for each connection, or one for all.
    pub tokens: Vec<String>,
    /// Source addresses on loopback that connections are spread over; 0 leaves the choice to the system.
    pub sources: usize,
    /// Connections that are opened at once.
    pub opening_max: usize,
    /// Unlike that of any other run: for ids and names.
    pub run: String,
    /// Messages a second of all workers; `None` is a closed loop.
    pub rate: Option<f64>,
    pub in_flight: usize,
    pub publishers: usize,
    /// Members of a room that stop reading, of all workers.
    pub stalled: usize,
    pub body_bytes: usize,
}

impl Job {
    pub fn user(number: usize) -> String {
        format!("u{number}")
    }

    pub fn token(&self, index: usize) -> &str {
        let one = if self.tokens.len() == 1 { 0 } else { index };
        self.tokens.get(one).map_or("", String::as_str)
    }

    /// Connections that share a token share a user, and a device is connected once.
    pub fn device(&self, index: usize) -> String {
        if self.tokens.len() == 1 { format!("bench-{}", self.first + index) } else { "bench".into() }
    }
}

/// To a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Order {
    /// Send from `began_us` on; what is due from `epoch_us` to `until_us` counts.
    Go {
        began_us: u64,
        epoch_us: u64,
        until_us: u64,
    },
    /// Another worker's members all have this message.
    Arrived {
        message: u64,
    },
    /// Drop every connection, and come back until then.
    Drop {
        until_us: u64,
    },
    /// Say what was seen.
    Finish,
    End,
}

/// From a worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Told {
    Opening {
        ready: u64,
        failed: u64,
    },
    /// Every connection is ready, or has failed.
    Ready {
        ready: u64,
        failed: u64,
        /// Why one of them failed.
        why: Option<String>,
        /// How long each took.
        tally: Tally,
    },
    Progress {
        done: u64,
    },
    Arrived {
        message: u64,
    },
    Result(Tally),
    Failed(String),
}

/// Counters, times and moments by name, as a worker has them and as their sum.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Tally {
    counts: BTreeMap<String, u64>,
    /// Value and how often it was seen.
    times: BTreeMap<String, Vec<(u64, u64)>>,
    /// Milliseconds since the event, and how many that was true for.
    moments: Vec<(u64, u64)>,
}

impl Tally {
    pub fn count(&mut self, name: &str, value: u64) {
        *self.counts.entry(name.to_owned()).or_default() += value;
    }

    pub fn get(&self, name: &str) -> u64 {
        self.counts.get(name).copied().unwrap_or_default()
    }

    /// The counters whose names begin so, with the rest of the name.
    pub fn family<'a>(&'a self, prefix: &'a str) -> impl Iterator<Item = (&'a str, u64)> {
        self.counts.iter().filter_map(move |(name, value)| Some((name.strip_prefix(prefix)?, *value)))
    }

    pub fn times(&mut self, name: &str, histogram: &Histogram<u64>) {
        let seen = histogram.iter_recorded().map(|step| (step.value_iterated_to(), step.count_at_value()));
        self.times.entry(name.to_owned()).or_default().extend(seen);
    }

    pub fn histogram(&self, name: &str) -> Histogram<u64> {
        let mut histogram = super::report::histogram();
        for (value, count) in self.times.get(name).into_iter().flatten() {
            histogram.saturating_record_n(*value, *count);
        }
        histogram
    }

    pub fn moments(&mut self, moments: impl IntoIterator<Item = (u64, u64)>) {
        self.moments.extend(moments);
    }

    /// The most in any second.
    pub fn peak_per_second(&self) -> u64 {
        let mut moments = self.moments.clone();
        moments.sort_unstable();
        let (mut from, mut inside, mut peak) = (0, 0, 0);
        for (at, count) in &moments {
            inside += count;
            while moments[from].0 + 1000 <= *at {
                inside -= moments[from].1;
                from += 1;
            }
            peak = peak.max(inside);
        }
        peak
    }

    pub fn add(&mut self, other: Self) {
        for (name, value) in other.counts {
            self.count(&name, value);
        }
        for (name, seen) in other.times {
            self.times.entry(name).or_default().extend(seen);
        }
        self.moments.extend(other.moments);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tallies_of_workers_add_up_over_the_link() {
        let mut sum = Tally::default();
        for worker in 0..3_u64 {
            let mut one = Tally::default();
            one.count("delivered", 10 + worker);
            let mut histogram = super::super::report::histogram();
            histogram.record_n(1000 * (worker + 1), 10).unwrap();
            one.times("ack", &histogram);
            one.moments([(worker * 400, 5), (5000, 1)]);
            let line = serde_json::to_string(&Told::Result(one)).unwrap();
            let Told::Result(one) = serde_json::from_str(&line).unwrap() else { panic!("{line}") };
            sum.add(one);
        }
        assert_eq!(sum.get("delivered"), 33);
        let histogram = sum.histogram("ack");
        assert_eq!(histogram.len(), 30);
        assert!(histogram.equivalent(histogram.value_at_quantile(0.5), 2000));
        assert!(histogram.equivalent(histogram.max(), 3000));
        // 0, 400 and 800 ms lie in one second.
        assert_eq!(sum.peak_per_second(), 15);
    }
}
