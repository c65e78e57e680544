//! How many users and devices are connected to this node: user → device → connections, as counts.
//!
//! Keys are 64-bit hashes with a random seed: an entry is 16 bytes however long the ids are, and two of a million
//! users share one with a probability below 10⁻⁷.

use ahash::{HashMap, RandomState};
use bowline_protocol::{DeviceId, UserId};
use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicUsize, Ordering},
};

/// So many parts, each with its own lock, so that shards seldom meet.
const STRIPES: usize = 16;

type Counts = HashMap<u64, u32>;

pub struct Registry {
    seed: RandomState,
    stripes: [Mutex<(Counts, Counts)>; STRIPES],
    users: AtomicUsize,
    devices: AtomicUsize,
}

impl Default for Registry {
    fn default() -> Self {
        Self {
            seed: RandomState::new(),
            stripes: Default::default(),
            users: AtomicUsize::new(0),
            devices: AtomicUsize::new(0),
        }
    }
}

impl Registry {
    pub fn users(&self) -> usize {
        self.users.load(Ordering::Relaxed)
    }

    pub fn devices(&self) -> usize {
        self.devices.load(Ordering::Relaxed)
    }

    pub fn add(&self, user: &UserId, device: &DeviceId) {
        self.change(user, device, |counts, key| {
            let count = counts.entry(key).or_insert(0);
            *count += 1;
            isize::from(*count == 1)
        });
    }

    pub fn remove(&self, user: &UserId, device: &DeviceId) {
        self.change(user, device, |counts, key| match counts.get_mut(&key) {
            Some(count) if *count > 1 => {
                *count -= 1;
                0
            }
            Some(_) => {
                counts.remove(&key);
                -1
            }
            None => 0,
        });
    }

    fn change(&self, user: &UserId, device: &DeviceId, mut step: impl FnMut(&mut Counts, u64) -> isize) {
        let user_key = self.seed.hash_one(user.as_str());
        let device_key = self.seed.hash_one((user_key, device.as_str()));
        let mut stripe =
            self.stripes[user_key as usize % STRIPES].lock().unwrap_or_else(PoisonError::into_inner);
        let (users, devices) = &mut *stripe;
        // Under the stripe's lock the change of each total is exact; the totals are read without it.
        self.users.fetch_add(step(users, user_key) as usize, Ordering::Relaxed);
        self.devices.fetch_add(step(devices, device_key) as usize, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_return_to_nothing() {
        let registry = Registry::default();
        let (user, device) =
            (|n: usize| UserId::trusted(&n.to_string()), |n: usize| DeviceId::trusted(&n.to_string()));
        for n in 0..300 {
            registry.add(&user(n % 100), &device(n % 2));
        }
        assert_eq!((registry.users(), registry.devices()), (100, 100));
        registry.add(&user(0), &device(9));
        assert_eq!((registry.users(), registry.devices()), (100, 101));
        registry.remove(&user(0), &device(9));
        for n in 0..300 {
            registry.remove(&user(n % 100), &device(n % 2));
        }
        registry.remove(&user(5), &device(1));
        assert_eq!((registry.users(), registry.devices()), (0, 0));
    }
}
