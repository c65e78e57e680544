//! How the files that the process may open are shared out. A connection is a file, and whatever clients do, the API
//! with its probes, the store and the hooks must go on opening theirs.

/// Kept for all that is no client, at most and at least: calls of the API, requests to hooks, the store.
const KEPT_MAX: usize = 384;
const KEPT_MIN: usize = 32;
/// What is open from the start, and room to tell those without a seat that there is none.
const MARGIN_MAX: usize = 128;
const MARGIN_MIN: usize = 96;
/// Standing places at most and at least, see [`crate::gate`].
const STANDING_MAX: usize = 65_536;
const STANDING_MIN: usize = 64;
/// With few files there are so many seats all the same; it is [`Files::end_of_clients`] that holds then.
const SEATS_MIN: usize = 64;

/// The limit on open files, shared out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Files {
    limit: usize,
}

impl Files {
    pub fn new(limit: usize) -> Self {
        Self { limit }
    }

    /// The limit of this process; without one, as many as can be counted.
    pub fn of_process() -> Self {
        #[cfg(unix)]
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        #[cfg(not(unix))]
        let limit = None;
        Self::new(limit.map_or(usize::MAX, |files: u64| usize::try_from(files).unwrap_or(usize::MAX)))
    }

    /// Seats for sessions.
    pub fn seats(self) -> usize {
        let margin = (self.limit / 8).clamp(MARGIN_MIN, MARGIN_MAX);
        self.limit.saturating_sub(self.kept() + margin).max(SEATS_MIN)
    }

    /// Standing places. They are no share of their own: they use what seats leave, and when that is little it is
    /// [`Self::end_of_clients`] that holds.
    pub fn standing(self) -> usize {
        (self.limit / 16).clamp(STANDING_MIN, STANDING_MAX)
    }

    /// The number of a file from which on clients get none. The system gives the lowest number that is free, so that
    /// a file of this number says how many are open, whoever has opened them.
    pub fn end_of_clients(self) -> usize {
        self.limit - self.kept().min(self.limit / 2)
    }

    fn kept(self) -> usize {
        (self.limit / 8).clamp(KEPT_MIN, KEPT_MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shares_fit_together() {
        for limit in [256, 1024, 4096, 20_000, 1 << 20, usize::MAX] {
            let files = Files::new(limit);
            let (seats, end) = (files.seats(), files.end_of_clients());
            // 60 or so are open before the first client comes.
            assert!(seats + 60 + 32 <= end, "{limit}: {seats} of {end}");
            assert!(end + KEPT_MIN <= limit && files.standing() >= STANDING_MIN, "{limit}: {end}");
        }
        let shares = |limit| {
            let files = Files::new(limit);
            (files.seats(), files.standing(), files.end_of_clients())
        };
        assert_eq!(shares(1024), (768, 64, 896));
        assert_eq!(shares(20_000), (19_488, 1250, 19_616));
        assert_eq!(shares(64), (64, 64, 32));
    }
}
