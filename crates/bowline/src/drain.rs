//! `bowline drain`: watches a drain to its end.

use crate::admin::{self, Target, Unreachable};
use anyhow::{Context, bail};
use bowline_api::Status;
use indicatif::{ProgressBar, ProgressStyle};
use std::{io::IsTerminal, time::Duration};

const LOOK_EVERY: Duration = Duration::from_millis(250);
/// How long the closes may take beyond the deadline.
const CLOSES_MAX_MS: u64 = bowline_gateway::CLOSE_MS_MAX + 5_000;

/// How a drain ended.
pub struct Ended {
    /// The last that the server said.
    pub status: Status,
    what: String,
}

impl Ended {
    pub fn line(&self) -> String {
        format!("{}: {}\n", self.status.node_id, self.what)
    }
}

/// Waits until no connection is left. Tells how far it is where somebody looks.
pub fn wait(target: &Target, mut status: Status, is_quiet: bool) -> anyhow::Result<Ended> {
    let bar = bar(&status, is_quiet || !std::io::stderr().is_terminal())?;
    let ended = loop {
        let Some(drain) = status.drain else { bail!("{} says that it does not drain", status.node_id) };
        let left_ms = drain.deadline.saturating_sub(crate::now_ms());
        bar.set_position(bar.length().unwrap_or_default().saturating_sub(drain.remaining));
        bar.set_message(format!("{} left, closed in {}", drain.remaining, admin::span(left_ms)));
        if drain.remaining == 0 {
            break Ended { status, what: "no connection is left".into() };
        }
        if crate::now_ms() > drain.deadline + CLOSES_MAX_MS {
            bail!("{}: {} connections are left beyond the deadline", status.node_id, drain.remaining);
        }
        std::thread::sleep(LOOK_EVERY);
        match admin::status(target) {
            Ok(next) if next.boot_id != status.boot_id => {
                break Ended { status, what: "the server was restarted".into() };
            }
            Ok(next) => status = next,
            // It was told to stop as well, and did when nobody was left.
            Err(error) if error.is::<Unreachable>() => {
                break Ended { status, what: "the server has ended".into() };
            }
            Err(error) => return Err(error),
        }
    };
    bar.finish_and_clear();
    Ok(ended)
}

fn bar(status: &Status, is_quiet: bool) -> anyhow::Result<ProgressBar> {
    if is_quiet {
        return Ok(ProgressBar::hidden());
    }
    let style = ProgressStyle::with_template("draining {bar:30} {msg}").context("the progress line")?;
    let connections = status.drain.map_or(0, |drain| drain.remaining);
    Ok(ProgressBar::new(connections).with_style(style))
}
