//! When to come again after a connection ended, by its close code.
//!
//! The delay is drawn from zero to a ceiling that doubles from 1 s to 30 s ("full jitter"), so that the clients
//! of a server that restarts spread themselves. A drain names the delay and is no failure; codes from 4500 on
//! end the client until somebody does something. After a drain the server may still be on its way back: the first
//! tries follow each other closely, since the drain has spread the clients already.

/// The ceiling of the first delay, and of all later ones.
pub const FIRST_MS: u64 = 1_000;
pub const LONGEST_MS: u64 = 30_000;
/// A connection that lasted this long starts the delays anew.
pub const STABLE_MS: u64 = 10_000;
/// After a drain so many tries follow each other within so long, which doubles with every second one up to the ceiling of
/// any first delay.
pub const MOVE_TRIES: u32 = 12;
pub const MOVE_RETRY_MS: u64 = 250;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// Come again after so many milliseconds.
    After(u64),
    /// Get a fresh token first, and come again.
    FreshToken(u64),
    /// Do not come again.
    Stop,
}

#[derive(Debug, Clone, Default)]
pub struct Backoff {
    failures: u32,
    /// Close tries that are left after a drain.
    moves: u32,
}

impl Backoff {
    /// A connection has ended, or could not be made (`code` none). `lasted_ms` is how long it was usable,
    /// `retry_after_ms` what the server asked for, `random` any number.
    pub fn on_ended(
        &mut self,
        code: Option<u16>,
        retry_after_ms: Option<u64>,
        lasted_ms: u64,
        random: u64,
    ) -> Next {
        match code {
            Some(4500..=4999) => return Next::Stop,
            // A drain: the server has dealt out the delays already.
            Some(1001) if retry_after_ms.is_some() => {
                self.moves = MOVE_TRIES;
                return Next::After(retry_after_ms.unwrap_or_default());
            }
            None if lasted_ms == 0 && self.moves > 0 => {
                let ceiling = (MOVE_RETRY_MS << ((MOVE_TRIES - self.moves) / 2)).min(FIRST_MS);
                self.moves -= 1;
                // What a refusal asks for is not added: it is that of the server that goes, not of the one that comes.
                return Next::After(random % (ceiling + 1));
            }
            _ => {}
        }
        self.moves = 0;
        if lasted_ms >= STABLE_MS {
            self.failures = 0;
        }
        let ceiling = (FIRST_MS << self.failures.min(5)).min(LONGEST_MS);
        self.failures += 1;
        let delay = random % (ceiling + 1) + retry_after_ms.unwrap_or_default();
        if code == Some(4001) { Next::FreshToken(delay) } else { Next::After(delay) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_close_code_has_its_rule() {
        let rows = [
            (Some(1001), Some(700), Next::After(700)),
            (Some(1001), None, Next::After(999)),
            (Some(1006), None, Next::After(999)),
            (None, None, Next::After(999)),
            (Some(1013), Some(2000), Next::After(2999)),
            (Some(4001), None, Next::FreshToken(999)),
            (Some(4002), None, Next::After(999)),
            (Some(4501), None, Next::Stop),
            (Some(4502), None, Next::Stop),
            (Some(4999), None, Next::Stop),
        ];
        for (code, retry, expected) in rows {
            assert_eq!(Backoff::default().on_ended(code, retry, 0, 999), expected, "{code:?}");
        }
    }

    #[test]
    fn after_a_drain_the_first_tries_are_close() {
        let mut backoff = Backoff::default();
        assert_eq!(backoff.on_ended(Some(1001), Some(700), 60_000, 999), Next::After(700));
        let ceilings = [250, 250, 500, 500].into_iter().chain([1000; MOVE_TRIES as usize - 4]);
        for ceiling in ceilings {
            assert_eq!(backoff.on_ended(None, Some(9_000), 0, 999), Next::After(999 % (ceiling + 1)));
        }
        assert_eq!(backoff.on_ended(None, None, 0, 999), Next::After(999));
        // A refusal or a connection in between is no move any more.
        backoff.on_ended(Some(1001), Some(700), 60_000, 999);
        assert_eq!(backoff.on_ended(Some(1013), None, 0, 999), Next::After(999));
        assert_eq!(backoff.on_ended(None, None, 0, 999), Next::After(999));
    }

    #[test]
    fn ceilings_double_to_thirty_seconds_and_start_anew_after_a_stable_time() {
        let mut backoff = Backoff::default();
        let ceilings: Vec<Next> =
            (0..7).map(|_| backoff.on_ended(None, None, 0, 30_000 * 1001 + 30_000)).collect();
        // The random number is chosen so that every draw differs; what counts is the bound.
        for (n, next) in ceilings.iter().enumerate() {
            let bound = [1_000, 2_000, 4_000, 8_000, 16_000, 30_000, 30_000][n];
            assert!(matches!(next, Next::After(ms) if *ms <= bound), "{n}: {next:?}");
        }
        for random in [0, 1_000, 1_001] {
            let mut again = backoff.clone();
            let next = again.on_ended(None, None, STABLE_MS, random);
            assert!(matches!(next, Next::After(ms) if ms <= FIRST_MS), "{next:?}");
        }
    }
}
