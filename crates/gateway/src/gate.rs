//! The handshake gate: who may open a session now, judged before any token.
//!
//! Every connection of a client has a [`Place`] from the moment it is accepted, so that those which never say who
//! they are count like all others. Sessions and what may become one have seats. Whoever finds none stands while it is
//! told so, and so do requests for the HTTP server, which have no part in the number of sessions.

use bowline_protocol::{CloseCode, ErrorCode, ws::handshake::Refused};
use bowline_session::{Refusal, rules::RETRY_AFTER_MS};
use std::{
    collections::HashMap,
    net::IpAddr,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

/// Bursts of one second are allowed.
const BURST_US: u64 = 1_000_000;
/// Standing places of one address, where `connections_per_address` is lower: what a browser opens for a page.
const STANDING_PER_ADDRESS_MIN: u32 = 8;

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
                (503, ErrorCode::Overloaded, "this node holds as many connections as it may", RETRY_AFTER_MS)
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
            told_as: matches!(self, Self::Draining { .. }).then_some(CloseCode::Draining),
            retry_after_ms: Some(retry_after_ms),
        }
    }
}

/// What a connection occupies from the moment it is accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// It is a session, or may become one.
    Seat,
    /// It found no seat and is to be told so, was refused, or is a request for the HTTP server.
    Standing,
}

/// Places of one kind.
struct Places {
    taken: AtomicUsize,
    most: usize,
}

impl Places {
    fn new(most: usize) -> Self {
        Self { taken: AtomicUsize::new(0), most }
    }

    fn take(&self) -> bool {
        let is_free = self.taken.fetch_add(1, Ordering::Relaxed) < self.most;
        if !is_free {
            self.give_back();
        }
        is_free
    }

    fn give_back(&self) {
        self.taken.fetch_sub(1, Ordering::Relaxed);
    }
}

/// How many connections the gate lets in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    pub handshakes_per_second: u32,
    pub seats: usize,
    pub standing: usize,
    /// Connections with one address; 0 is no limit.
    pub per_address: u32,
}

pub struct Gate {
    handshakes_per_second: u32,
    per_address: u32,
    seats: Places,
    standing: Places,
    /// When the handshakes so far are paid for, in microseconds.
    paid_until_us: AtomicU64,
    /// Places of an address, by kind.
    addresses: Mutex<HashMap<IpAddr, [u32; 2]>>,
}

impl Gate {
    pub fn new(bounds: Bounds) -> Self {
        Self {
            handshakes_per_second: bounds.handshakes_per_second,
            per_address: bounds.per_address,
            seats: Places::new(bounds.seats),
            standing: Places::new(bounds.standing),
            paid_until_us: AtomicU64::new(0),
            addresses: Mutex::new(HashMap::new()),
        }
    }

    /// A place for a connection that was accepted: a seat, or where there is none a standing place, in which it is
    /// told so. `None` when there is neither: nothing is left but to close it.
    pub fn admit(self: &Arc<Self>, address: IpAddr) -> Option<Place> {
        let address = (self.per_address > 0).then(|| Box::new(address));
        let kind = [Kind::Seat, Kind::Standing]
            .into_iter()
            .find(|kind| self.take(*kind, address.as_deref().copied()).is_ok())?;
        Some(Place { gate: self.clone(), address, kind })
    }

    /// Pays for one handshake.
    pub fn pay(&self, now_us: u64) -> Result<(), Turned> {
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

    fn places(&self, kind: Kind) -> &Places {
        match kind {
            Kind::Seat => &self.seats,
            Kind::Standing => &self.standing,
        }
    }

    fn take(&self, kind: Kind, address: Option<IpAddr>) -> Result<(), Turned> {
        if !self.places(kind).take() {
            return Err(Turned::Full);
        }
        let Some(address) = address else { return Ok(()) };
        let most = match kind {
            Kind::Seat => self.per_address,
            Kind::Standing => self.per_address.max(STANDING_PER_ADDRESS_MIN),
        };
        let mut addresses = self.addresses.lock().unwrap_or_else(PoisonError::into_inner);
        let count = &mut addresses.entry(address).or_default()[kind as usize];
        if *count < most {
            *count += 1;
            return Ok(());
        }
        drop(addresses);
        self.places(kind).give_back();
        Err(Turned::TooManyFromAddress)
    }

    fn give_back(&self, kind: Kind, address: Option<IpAddr>) {
        self.places(kind).give_back();
        let Some(address) = address else { return };
        let mut addresses = self.addresses.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(counts) = addresses.get_mut(&address) {
            counts[kind as usize] -= 1;
            if *counts == [0, 0] {
                addresses.remove(&address);
            }
        }
    }
}

/// The place of one connection, given back when it is dropped, wherever the connection has got to by then.
pub struct Place {
    gate: Arc<Gate>,
    /// Kept where connections are counted by address. Boxed, as most are not.
    address: Option<Box<IpAddr>>,
    kind: Kind,
}

impl Place {
    /// Takes a seat, unless the connection has one.
    pub fn sit(&mut self) -> Result<(), Turned> {
        self.change(Kind::Seat)
    }

    /// Leaves the seat to others and stands.
    pub fn stand(&mut self) -> Result<(), Turned> {
        self.change(Kind::Standing)
    }

    fn change(&mut self, kind: Kind) -> Result<(), Turned> {
        if self.kind == kind {
            return Ok(());
        }
        let address = self.address.as_deref().copied();
        self.gate.take(kind, address)?;
        self.gate.give_back(self.kind, address);
        self.kind = kind;
        Ok(())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.gate.give_back(self.kind, self.address.as_deref().copied());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gate(handshakes_per_second: u32, seats: usize, standing: usize, per_address: u32) -> Arc<Gate> {
        Arc::new(Gate::new(Bounds { handshakes_per_second, seats, standing, per_address }))
    }

    fn address(last: u8) -> IpAddr {
        IpAddr::from([127, 0, 0, last])
    }

    #[test]
    fn handshakes_per_second_with_bursts_of_one_second() {
        let gate = gate(10, 1000, 0, 0);
        let mut passed = 0;
        for n in 0..30 {
            passed += usize::from(gate.pay(5_000_000 + n).is_ok());
        }
        assert_eq!(passed, 10);
        assert_eq!(gate.pay(5_000_100), Err(Turned::TooMany { retry_after_ms: 100 }));
        assert_eq!(gate.pay(5_100_100), Ok(()));
        assert!(gate.pay(5_100_100).is_err());
    }

    #[test]
    fn whoever_is_accepted_counts_until_it_is_gone() {
        let gate = gate(0, 2, 2, 0);
        let mut places: Vec<Place> = (0..4).map(|_| gate.admit(address(1)).unwrap()).collect();
        let kinds: Vec<Kind> = places.iter().map(|place| place.kind).collect();
        assert_eq!(kinds, [Kind::Seat, Kind::Seat, Kind::Standing, Kind::Standing]);
        assert!(gate.admit(address(2)).is_none());
        assert_eq!(places[2].sit(), Err(Turned::Full));
        assert_eq!(places[0].stand(), Err(Turned::Full));
        drop(places.remove(0));
        assert_eq!(places[1].sit(), Ok(()));
        assert_eq!(places[1].sit(), Ok(()), "it has one");
        // A place to stand is free again.
        assert_eq!(gate.admit(address(2)).unwrap().kind, Kind::Standing);
        drop(places);
        assert_eq!([&gate.seats, &gate.standing].map(|p| p.taken.load(Ordering::Relaxed)), [0, 0]);
    }

    #[test]
    fn one_address_takes_no_more_than_its_share_and_leaves_nothing_behind() {
        let gate = gate(0, 1000, 1000, 3);
        let mut places = Vec::new();
        while let Some(place) = gate.admit(address(1)) {
            places.push(place);
        }
        let seats = places.iter().filter(|place| place.kind == Kind::Seat).count();
        assert_eq!((seats, places.len()), (3, 3 + STANDING_PER_ADDRESS_MIN as usize));
        assert_eq!(places[5].sit(), Err(Turned::TooManyFromAddress));
        assert_eq!(gate.admit(address(2)).unwrap().kind, Kind::Seat);
        drop(places.remove(0));
        assert_eq!(places[5].sit(), Ok(()));
        drop(places);
        assert!(gate.addresses.lock().unwrap().is_empty());
    }
}
