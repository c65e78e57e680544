//! A timing wheel with one entry for each connection.
//!
//! A heartbeat moves its deadline with every byte, so entries are not moved: an entry fires at the time that was
//! right when it was set, and its owner sets it again. Only an earlier deadline moves it. Deadlines beyond the
//! wheel's span fire at its end and are set again then.

const TICK_MS: u64 = 16;
const BUCKETS: usize = 4096;
const WORDS: usize = BUCKETS / 64;
const NONE: u32 = u32::MAX;

#[derive(Clone, Copy)]
struct Entry {
    before: u32,
    after: u32,
    /// The tick at which it fires; `NONE` when it is not in the wheel.
    tick: u32,
}

pub struct Wheel {
    /// By index of the connection.
    entries: Vec<Entry>,
    /// The first entry of each bucket.
    heads: Vec<u32>,
    /// A bit for each bucket that is not empty.
    used: [u64; WORDS],
    /// Everything before this tick has fired.
    tick: u64,
}

impl Wheel {
    pub fn new(now_ms: u64) -> Self {
        Self { entries: Vec::new(), heads: vec![NONE; BUCKETS], used: [0; WORDS], tick: now_ms / TICK_MS }
    }

    /// Makes sure that `index` fires at `at_ms`, rounded up to a tick, or earlier.
    pub fn set(&mut self, index: u32, at_ms: u64) {
        let longest = self.tick + BUCKETS as u64 - 1;
        let tick = at_ms.div_ceil(TICK_MS).clamp(self.tick, longest);
        if self.entries.len() <= index as usize {
            self.entries.resize(index as usize + 1, Entry { before: NONE, after: NONE, tick: NONE });
        }
        let now = self.entries[index as usize].tick;
        if now != NONE {
            // Ticks are kept in 32 bits: 2 years of them.
            if u64::from(now) <= tick {
                return;
            }
            self.clear(index);
        }
        let bucket = tick as usize % BUCKETS;
        let head = self.heads[bucket];
        self.entries[index as usize] = Entry { before: NONE, after: head, tick: tick as u32 };
        if head != NONE {
            self.entries[head as usize].before = index;
        }
        self.heads[bucket] = index;
        self.used[bucket / 64] |= 1 << (bucket % 64);
    }

    pub fn clear(&mut self, index: u32) {
        let Some(entry) = self.entries.get_mut(index as usize) else { return };
        let Entry { before, after, tick } = *entry;
        if tick == NONE {
            return;
        }
        entry.tick = NONE;
        let bucket = tick as usize % BUCKETS;
        if before == NONE {
            self.heads[bucket] = after;
        } else {
            self.entries[before as usize].after = after;
        }
        if after != NONE {
            self.entries[after as usize].before = before;
        }
        if self.heads[bucket] == NONE {
            self.used[bucket / 64] &= !(1 << (bucket % 64));
        }
    }

    /// Takes out what is due into `due`.
    pub fn take_due(&mut self, now_ms: u64, due: &mut Vec<u32>) {
        let end = now_ms / TICK_MS + 1;
        if end - self.tick.min(end) >= BUCKETS as u64 {
            self.tick = end - BUCKETS as u64;
        }
        while let Some(tick) = self.next_tick().filter(|tick| *tick < end) {
            let bucket = tick as usize % BUCKETS;
            let mut index = std::mem::replace(&mut self.heads[bucket], NONE);
            self.used[bucket / 64] &= !(1 << (bucket % 64));
            while index != NONE {
                due.push(index);
                let entry = &mut self.entries[index as usize];
                entry.tick = NONE;
                index = entry.after;
            }
        }
        self.tick = self.tick.max(end);
    }

    /// When something is due next.
    pub fn next_ms(&self) -> Option<u64> {
        self.next_tick().map(|tick| tick * TICK_MS)
    }

    fn next_tick(&self) -> Option<u64> {
        let start = self.tick as usize % BUCKETS;
        for step in 0..=WORDS {
            let word = (start / 64 + step) % WORDS;
            let mut bits = self.used[word];
            if step == 0 {
                bits &= u64::MAX << (start % 64);
            } else if step == WORDS {
                bits &= !(u64::MAX << (start % 64));
            }
            if bits != 0 {
                let bucket = word * 64 + bits.trailing_zeros() as usize;
                return Some(self.tick + ((bucket + BUCKETS - start) % BUCKETS) as u64);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_fire_once_not_early_and_at_most_a_tick_late() {
        let mut wheel = Wheel::new(5_000);
        // A simple model: when each index wants to fire.
        let mut wanted = std::collections::BTreeMap::new();
        let mut random = 12345u64;
        let mut next = || {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            random >> 33
        };
        let mut now = 5_000;
        for _ in 0..20_000 {
            match next() % 4 {
                0 | 1 => {
                    let (index, at) = ((next() % 300) as u32, now + next() % 60_000);
                    wheel.set(index, at);
                    let entry = wanted.entry(index).or_insert(at);
                    *entry = (*entry).min(at);
                }
                2 => {
                    let index = (next() % 300) as u32;
                    wheel.clear(index);
                    wanted.remove(&index);
                }
                _ => {
                    let soonest = wanted.values().min().copied();
                    match (wheel.next_ms(), soonest) {
                        (Some(at), Some(soonest)) => {
                            assert!(at + TICK_MS > soonest && at < soonest + TICK_MS)
                        }
                        (at, soonest) => assert_eq!(at.is_some(), soonest.is_some()),
                    }
                    now += next() % 400;
                    let mut due = Vec::new();
                    wheel.take_due(now, &mut due);
                    for index in due {
                        let at = wanted.remove(&index).expect("it was set");
                        assert!(at <= now, "{at} fired at {now}");
                    }
                    assert!(wanted.values().all(|at| at + TICK_MS > now));
                }
            }
        }
    }

    #[test]
    fn a_far_deadline_fires_at_the_end_of_the_wheel() {
        let mut wheel = Wheel::new(0);
        wheel.set(3, 10_000_000);
        let at = wheel.next_ms().unwrap();
        assert!((60_000..70_000).contains(&at), "{at}");
        let mut due = Vec::new();
        wheel.take_due(at + 1_000_000, &mut due);
        assert_eq!((due.as_slice(), wheel.next_ms()), (&[3][..], None));
    }
}
