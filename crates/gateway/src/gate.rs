//! The handshake gate: who may open a session now, judged before any token.

use bowline_protocol::{CloseCode, ErrorCode, ws::handshake::Refused};
use bowline_session::{Refusal, rules::RETRY_AFTER_MS};
use std::{
    collections::HashMap,
    net::IpAddr,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

/// Bursts of one second are allowed.
const BURST_US: u64 = 1_000_000;

/// Why a client is turned away for now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turned {
    Draining { retry_after_ms: u64 },
    Overloaded,
    Full,
    TooMany { retry_after_ms: u64 },
    TooManyFromAddress,
}

impl Turned {
    fn parts(self) -> (u16, ErrorCode, &'static str, u64) {
        match self {
            Self::Draining { retry_after_ms } => (
                503,
                ErrorCode::Unavailable,
                "this node is draining; connect again to reach another",
                retry_after_ms,
            ),
            Self::Overloaded => (503, ErrorCode::Overloaded, "this node is overloaded", RETRY_AFTER_MS),
            Self::Full => {
                (503, ErrorCode::Overloaded, "this node holds as many sessions as it may", RETRY_AFTER_MS)
            }
            Self::TooMany { retry_after_ms } => {
                (429, ErrorCode::RateLimited, "too many handshakes per second", retry_after_ms)
            }
            Self::TooManyFromAddress => {
                (429, ErrorCode::RateLimited, "too many connections from this address", RETRY_AFTER_MS)
            }
        }
    }

    /// As an answer before the upgrade.
    pub fn refused(self) -> Refused {
        let (status, code, message, retry_after_ms) = self.parts();
        Refused::new(status, code, message).retry_after(retry_after_ms)
    }

    /// As an answer to `connect`.
    pub fn refusal(self) -> Refusal {
        let (status, code, message, retry_after_ms) = self.parts();
        Refusal {
            close: CloseCode::Overloaded,
            status,
            code,
            message: message.to_owned(),
            reason: matches!(self, Self::Draining { .. }).then_some("draining"),
            retry_after_ms: Some(retry_after_ms),
        }
    }
}

pub struct Gate {
    handshakes_per_second: u32,
    sessions_max: usize,
    per_address_max: u32,
    sessions: AtomicUsize,
    /// When the handshakes so far are paid for, in microseconds.
    paid_until_us: AtomicU64,
    addresses: Mutex<HashMap<IpAddr, u32>>,
}

impl Gate {
    pub fn new(handshakes_per_second: u32, sessions_max: usize, per_address_max: u32) -> Self {
        Self {
            handshakes_per_second,
            sessions_max,
            per_address_max,
            sessions: AtomicUsize::new(0),
            paid_until_us: AtomicU64::new(0),
            addresses: Mutex::new(HashMap::new()),
        }
    }

    pub fn counts_addresses(&self) -> bool {
        self.per_address_max > 0
    }

    /// Takes a seat, which [`Self::leave`] gives back. Full comes before too many.
    pub fn enter(&self, address: Option<IpAddr>, now_us: u64) -> Result<(), Turned> {
        if self.sessions.fetch_add(1, Ordering::Relaxed) >= self.sessions_max {
            self.sessions.fetch_sub(1, Ordering::Relaxed);
            return Err(Turned::Full);
        }
        let entered = self.pay(now_us).and_then(|()| self.count_address(address));
        if entered.is_err() {
            self.sessions.fetch_sub(1, Ordering::Relaxed);
        }
        entered
    }

    pub fn leave(&self, address: Option<IpAddr>) {
        self.sessions.fetch_sub(1, Ordering::Relaxed);
        let Some(address) = address.filter(|_| self.counts_addresses()) else { return };
        let mut addresses = self.addresses.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = addresses.get_mut(&address) {
            *count -= 1;
            if *count == 0 {
                addresses.remove(&address);
            }
        }
    }

    fn pay(&self, now_us: u64) -> Result<(), Turned> {
        if self.handshakes_per_second == 0 {
            return Ok(());
        }
        let cost_us = BURST_US / u64::from(self.handshakes_per_second);
        self.paid_until_us
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |paid_until_us| {
                let next = paid_until_us.max(now_us) + cost_us;
                (next <= now_us + BURST_US).then_some(next)
            })
            .map(|_| ())
            .map_err(|paid_until_us| Turned::TooMany {
                retry_after_ms: ((paid_until_us + cost_us).saturating_sub(now_us + BURST_US))
                    .div_ceil(1000)
                    .max(1),
            })
    }

    fn count_address(&self, address: Option<IpAddr>) -> Result<(), Turned> {
        let Some(address) = address.filter(|_| self.counts_addresses()) else { return Ok(()) };
        let mut addresses = self.addresses.lock().unwrap_or_else(PoisonError::into_inner);
        let count = addresses.entry(address).or_insert(0);
        if *count >= self.per_address_max {
            return Err(Turned::TooManyFromAddress);
        }
        *count += 1;
        Ok(())
    }
}

/// How many sessions the limit on open files allows.
pub fn sessions_by_file_limit() -> usize {
    /// For listeners, the store, the API and what the program opens besides.
    const MARGIN: usize = 256;
    #[cfg(unix)]
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    #[cfg(not(unix))]
    let limit = None;
    limit.map_or(usize::MAX, |files| (files as usize).saturating_sub(MARGIN).max(64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handshakes_per_second_with_bursts_of_one_second() {
        let gate = Gate::new(10, 1000, 0);
        let mut passed = 0;
        for n in 0..30 {
            passed += usize::from(gate.enter(None, 5_000_000 + n).is_ok());
        }
        assert_eq!(passed, 10);
        assert_eq!(gate.enter(None, 5_000_100), Err(Turned::TooMany { retry_after_ms: 100 }));
        assert_eq!(gate.enter(None, 5_100_100), Ok(()));
        assert!(gate.enter(None, 5_100_100).is_err());
    }

    #[test]
    fn seats_and_addresses_are_given_back() {
        let gate = Gate::new(0, 2, 1);
        let (one, other) = (Some(IpAddr::from([127, 0, 0, 1])), Some(IpAddr::from([127, 0, 0, 2])));
        assert_eq!(gate.enter(one, 0), Ok(()));
        assert_eq!(gate.enter(one, 0), Err(Turned::TooManyFromAddress));
        assert_eq!(gate.enter(other, 0), Ok(()));
        assert_eq!(gate.enter(other, 0), Err(Turned::Full));
        gate.leave(one);
        assert_eq!(gate.enter(one, 0), Ok(()));
    }
}
