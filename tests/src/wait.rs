//! Waiting for a condition, with an end.

use std::time::{Duration, Instant};

/// How long anything may take that should take no time. Generous: it only costs when something is broken.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Asks `condition` again and again until it gives a value.
pub fn until<T>(what: &str, condition: impl FnMut() -> Option<T>) -> T {
    until_within(PATIENCE, what, condition)
}

pub fn until_within<T>(limit: Duration, what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + limit;
    loop {
        if let Some(value) = condition() {
            return value;
        }
        assert!(Instant::now() < end, "after {limit:?} still not: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
