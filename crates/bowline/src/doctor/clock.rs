//! The clock: tokens are judged by it, and messages carry its time.

use super::{Finding, data::Home};

const CHECK: &str = "clock";
/// Files that are newer than now by more than this tell of a clock that was set back.
const AHEAD_MAX_MS: u64 = 60_000;
/// When this was written; no clock is right that shows less.
const EARLIEST_MS: u64 = 1_760_000_000_000;

pub fn examine(home: &Home) -> Finding {
    judge(crate::now_ms(), home.newest_file_ms(), is_synchronised())
}

fn judge(now_ms: u64, newest_file_ms: Option<u64>, is_synchronised: Option<bool>) -> Finding {
    const SYNCHRONISE: &str = "run a time service such as chrony or systemd-timesyncd";
    if now_ms < EARLIEST_MS {
        return Finding::fail(
            CHECK,
            format!("it shows {now_ms} ms since 1970, which is long ago"),
            "set it: every token looks as if it were not valid yet",
        );
    }
    let ahead_ms = newest_file_ms.unwrap_or(0).saturating_sub(now_ms);
    if ahead_ms > AHEAD_MAX_MS {
        return Finding::warn(
            CHECK,
            format!("the database was written {} s from now: the clock was set back", ahead_ms / 1000),
            SYNCHRONISE,
        );
    }
    match is_synchronised {
        Some(true) => Finding::ok(CHECK, "synchronised"),
        Some(false) => {
            Finding::warn(CHECK, "the system says that nothing synchronises it", SYNCHRONISE.to_owned())
        }
        None => Finding::ok(CHECK, "plausible; this system does not tell whether it is synchronised"),
    }
}

/// What the kernel was told by a time service.
#[cfg(target_os = "linux")]
#[allow(unsafe_code)]
fn is_synchronised() -> Option<bool> {
    // SAFETY: a timex is plain numbers, for all of which zero is allowed.
    let mut timex: libc::timex = unsafe { std::mem::zeroed() };
    // SAFETY: with modes = 0 nothing is set; the kernel fills the structure.
    let state = unsafe { libc::adjtimex(&mut timex) };
    (state >= 0).then_some(timex.status & libc::STA_UNSYNC == 0)
}

#[cfg(not(target_os = "linux"))]
fn is_synchronised() -> Option<bool> {
    None
}

#[cfg(test)]
mod tests {
    use super::{super::State, *};

    #[test]
    fn a_clock_is_judged_by_what_is_known() {
        let now = EARLIEST_MS + 1_000_000_000;
        for (now_ms, newest, synchronised, state) in [
            (now, Some(now - 5), Some(true), State::Ok),
            (now, None, None, State::Ok),
            (now, None, Some(false), State::Warn),
            (now, Some(now + 3_600_000), Some(true), State::Warn),
            (86_400_000, None, Some(true), State::Fail),
        ] {
            assert_eq!(judge(now_ms, newest, synchronised).state, state, "{now_ms} {newest:?}");
        }
    }
}
