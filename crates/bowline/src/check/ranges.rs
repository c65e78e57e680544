//! Sets of message numbers, kept as ranges: what a device has is nearly always one range, however long the run.

use std::collections::BTreeMap;

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ranges {
    /// First and last number of each range; ranges neither overlap nor touch.
    ranges: BTreeMap<u64, u64>,
}

impl Ranges {
    /// True when `number` was not there.
    pub fn insert(&mut self, number: u64) -> bool {
        if self.contains(number) {
            return false;
        }
        self.insert_range(number, number);
        true
    }

    /// Inserts `first..=last`.
    pub fn insert_range(&mut self, mut first: u64, mut last: u64) {
        if first > last {
            return;
        }
        let (below, above) = (first.saturating_sub(1), last.saturating_add(1));
        // Whatever begins no later than just behind the end, and ends no earlier than just before the beginning.
        while let Some((start, end)) = self.ranges.range(..=above).next_back().map(|(s, e)| (*s, *e)) {
            if end < below {
                break;
            }
            self.ranges.remove(&start);
            (first, last) = (first.min(start), last.max(end));
        }
        self.ranges.insert(first, last);
    }

    pub fn merge(&mut self, other: &Self) {
        for (first, last) in &other.ranges {
            self.insert_range(*first, *last);
        }
    }

    pub fn contains(&self, number: u64) -> bool {
        self.ranges.range(..=number).next_back().is_some_and(|(_, last)| *last >= number)
    }

    /// The largest number, or 0.
    pub fn max(&self) -> u64 {
        self.ranges.last_key_value().map_or(0, |(_, last)| *last)
    }

    /// The last number up to which everything from 1 on is there.
    pub fn contiguous(&self) -> u64 {
        self.ranges.get(&1).copied().unwrap_or(0)
    }

    /// The ranges that are missing between `first` and `last`, both included.
    pub fn missing(&self, first: u64, last: u64) -> Vec<(u64, u64)> {
        let mut gaps = Vec::new();
        let mut next = first;
        let from = self.ranges.range(..=first).next_back().map_or(first, |(start, _)| *start);
        for (start, end) in self.ranges.range(from..) {
            if *start > last || next > last {
                break;
            }
            if *start > next {
                gaps.push((next, start - 1));
            }
            next = next.max(end.saturating_add(1));
        }
        if next <= last {
            gaps.push((next, last));
        }
        gaps
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn ranges_are_a_set_of_numbers() {
        let mut random = fastrand::Rng::with_seed(5);
        for _ in 0..200 {
            let (mut ranges, mut naive) = (Ranges::default(), BTreeSet::new());
            for _ in 0..random.usize(0..25) {
                let first = random.u64(1..40);
                let last = first + random.u64(0..4);
                if random.bool() {
                    assert_eq!(ranges.insert(first), naive.insert(first));
                } else {
                    ranges.insert_range(first, last);
                    naive.extend(first..=last);
                }
            }
            assert_eq!(ranges.max(), naive.last().copied().unwrap_or(0));
            assert_eq!(ranges.contiguous(), (1..).take_while(|n| naive.contains(n)).last().unwrap_or(0));
            let (low, high) = (random.u64(1..50), random.u64(1..50));
            let missing: Vec<u64> = ranges.missing(low, high).into_iter().flat_map(|(a, b)| a..=b).collect();
            let expected: Vec<u64> = (low..=high).filter(|n| !naive.contains(n)).collect();
            assert_eq!(missing, expected, "{ranges:?} {low} {high}");
        }
    }
}
