//! Hours of coming and going under load, and what that does to the server's memory.

use crate::{Transport, churn, client::Login, server::Server, token};
use serde_json::json;
use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// Pairs of users that talk all the time, one over each transport, and how often each says something.
const PAIRS: usize = 8;
const SAY_EVERY: Duration = Duration::from_millis(40);
/// Connections that come and go in a second.
const CONNECTIONS_PER_SECOND: u64 = 100;
/// How often memory is looked at.
const SAMPLE_EVERY: Duration = Duration::from_secs(5);
/// The share of the time that counts as warm-up: tables and caches grow to what the load needs.
const WARM_UP: f64 = 0.25;

#[derive(Debug)]
pub struct Report {
    pub connections: u64,
    pub messages: u64,
    pub seconds: f64,
    /// (seconds since the start, bytes), after the warm-up.
    pub samples: Vec<(f64, f64)>,
    /// Bytes an hour, with its standard error.
    pub slope: f64,
    pub slope_error: f64,
}

impl Report {
    pub fn mean_bytes(&self) -> f64 {
        self.samples.iter().map(|(_, bytes)| bytes).sum::<f64>() / self.samples.len().max(1) as f64
    }

    /// The slope is zero within three standard errors, or too small to matter: a hundredth of the memory in an hour.
    pub fn is_flat(&self) -> bool {
        self.slope <= 3.0 * self.slope_error || self.slope <= self.mean_bytes() / 100.0
    }
}

pub fn run(server: &Server, duration: Duration) -> Report {
    let began = Instant::now();
    let end = began + duration;
    let over = AtomicBool::new(false);
    let [connections, messages] = [AtomicU64::new(0), AtomicU64::new(0)];
    let samples = Mutex::new(Vec::new());
    let logins = churn::Logins::new();
    std::thread::scope(|scope| {
        for pair in 0..PAIRS {
            let (over, messages) = (&over, &messages);
            scope.spawn(move || talk(server, pair, over, messages));
        }
        for thread in 0..churn::THREADS {
            let (over, connections, logins) = (&over, &connections, &logins);
            scope.spawn(move || {
                while !over.load(Ordering::Relaxed) {
                    let n = connections.fetch_add(1, Ordering::Relaxed);
                    logins.one(server, thread, n);
                    // All threads together keep the pace.
                    let due = began + Duration::from_secs_f64(n as f64 / CONNECTIONS_PER_SECOND as f64);
                    std::thread::sleep(due.saturating_duration_since(Instant::now()));
                }
            });
        }
        while Instant::now() < end {
            std::thread::sleep(SAMPLE_EVERY.min(end - Instant::now().min(end)));
            let at = began.elapsed().as_secs_f64();
            if at >= duration.as_secs_f64() * WARM_UP {
                let bytes = server.memory_bytes() as f64;
                samples.lock().unwrap_or_else(PoisonError::into_inner).push((at, bytes));
            }
        }
        over.store(true, Ordering::Relaxed);
    });
    let samples = samples.into_inner().unwrap_or_else(PoisonError::into_inner);
    let (slope, slope_error) = slope_of(&samples);
    Report {
        connections: connections.into_inner(),
        messages: messages.into_inner(),
        seconds: began.elapsed().as_secs_f64(),
        samples,
        slope: slope * 3600.0,
        slope_error: slope_error * 3600.0,
    }
}

/// Two users tell each other something, acknowledge it, and once in a while one of them comes anew.
fn talk(server: &Server, pair: usize, over: &AtomicBool, messages: &AtomicU64) {
    let names = [format!("talk{pair}a"), format!("talk{pair}b")];
    let conversation = format!("d:{}:{}", names[0], names[1]);
    let open = |user: &String, transport| {
        let claims = json!({"sub": user, "exp": token::now_secs() + 86_400});
        Login::new(server.addresses(), user).token(token::signed(&claims)).device("d").connect(transport)
    };
    let mut a = open(&names[0], Transport::Ws);
    let mut b = open(&names[1], Transport::Tcp);
    let mut turn: u64 = 0;
    while !over.load(Ordering::Relaxed) {
        let began = Instant::now();
        let seq = a.tell(&names[1], "something of a usual length, as people write it to each other").seq();
        b.expect_push(&conversation, seq);
        b.recv(&conversation, seq);
        b.read(&conversation, seq);
        messages.fetch_add(1, Ordering::Relaxed);
        turn += 1;
        if turn.is_multiple_of(50) {
            // What was not claimed, such as receipts, is not kept by the test either.
            a.take_kept();
            b.take_kept();
        }
        if turn.is_multiple_of(500) {
            b.settle();
            b = open(&names[1], Transport::Tcp);
        }
        std::thread::sleep(SAY_EVERY.saturating_sub(began.elapsed()));
    }
}

/// Least squares: the slope of (x, y), and its standard error.
fn slope_of(samples: &[(f64, f64)]) -> (f64, f64) {
    let count = samples.len() as f64;
    if count < 3.0 {
        return (0.0, f64::INFINITY);
    }
    let mean = |part: fn(&(f64, f64)) -> f64| samples.iter().map(part).sum::<f64>() / count;
    let (mean_x, mean_y) = (mean(|s| s.0), mean(|s| s.1));
    let spread: f64 = samples.iter().map(|(x, _)| (x - mean_x).powi(2)).sum();
    let slope = samples.iter().map(|(x, y)| (x - mean_x) * (y - mean_y)).sum::<f64>() / spread;
    let rest: f64 = samples.iter().map(|(x, y)| (y - mean_y - slope * (x - mean_x)).powi(2)).sum();
    (slope, (rest / (count - 2.0) / spread).sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slope_is_told_from_noise() {
        let noise = |n: u32| f64::from(n * 7919 % 13) - 6.0;
        let flat: Vec<_> = (0..100).map(|n| (f64::from(n), 1000.0 + noise(n))).collect();
        let rising: Vec<_> = flat.iter().map(|(x, y)| (*x, y + x)).collect();
        let (slope, error) = slope_of(&flat);
        assert!(slope.abs() < 3.0 * error, "{slope} {error}");
        let (slope, error) = slope_of(&rising);
        assert!((slope - 1.0).abs() < 3.0 * error && slope > 3.0 * error, "{slope} {error}");
    }
}
