//! `bowline doctor`: looks at the machine as a server of this configuration would find it. Changes nothing, and works
//! while a server runs.
//!
//! What is read from the system is apart from what is made of it: the judges are functions of numbers.

mod clock;
mod data;
mod machine;
mod ports;
mod sockets;
mod tls;

use crate::config::Settings;
use serde_json::{Value, json};
use std::fmt::Write;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum State {
    Ok,
    Warn,
    Fail,
}

impl State {
    fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Fail => "fail",
        }
    }
}

/// One line of the result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    pub check: &'static str,
    pub state: State,
    pub found: String,
    /// What to do about it; none where nothing is to be done.
    pub advice: Option<String>,
}

impl Finding {
    fn ok(check: &'static str, found: impl Into<String>) -> Self {
        Self { check, state: State::Ok, found: found.into(), advice: None }
    }

    fn warn(check: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { check, state: State::Warn, found: found.into(), advice: Some(advice.into()) }
    }

    fn fail(check: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { check, state: State::Fail, found: found.into(), advice: Some(advice.into()) }
    }
}

pub struct Diagnosis(Vec<Finding>);

pub fn examine(settings: &Settings) -> Diagnosis {
    let home = data::Home::of(settings);
    let mut findings = configuration(settings);
    findings.extend(data::examine(&home));
    findings.extend(ports::examine(settings, &home));
    findings.extend(tls::examine(settings));
    findings.extend(machine::examine(settings, &home));
    findings.push(drain(settings));
    findings.push(sockets::examine(settings));
    findings.push(clock::examine(&home));
    Diagnosis(findings)
}

fn configuration(settings: &Settings) -> Vec<Finding> {
    const CHECK: &str = "configuration";
    match settings.config() {
        Ok((_, notes)) if notes.is_empty() => vec![Finding::ok(CHECK, "a server would start with it")],
        Ok((_, notes)) => notes
            .iter()
            .map(|note| Finding::warn(CHECK, note.to_string(), "see docs/config.md for what the key does"))
            .collect(),
        Err(error) => vec![Finding::fail(
            CHECK,
            error.to_string(),
            "a server would not start; `bowline config print` shows where each value comes from",
        )],
    }
}

/// Whether a drain ends before the orchestrator loses patience.
fn drain(settings: &Settings) -> Finding {
    let [pre_stop, drain, grace] =
        ["gateway.pre_stop_ms", "gateway.drain_timeout_ms", "gateway.termination_grace_ms"]
            .map(|key| settings.int::<u64>(key));
    judge_drain(pre_stop, drain, grace)
}

/// The closes after the deadline, and the end of the store, take a moment too.
const DRAIN_MARGIN_MS: u64 = 5_000;

fn judge_drain(pre_stop: u64, drain: u64, grace: u64) -> Finding {
    const CHECK: &str = "time of a drain";
    let needed = pre_stop.saturating_add(drain);
    let found = format!(
        "pre_stop_ms {pre_stop} + drain_timeout_ms {drain} = {needed} ms of termination_grace_ms {grace}"
    );
    if needed >= grace {
        return Finding::fail(
            CHECK,
            found,
            "the process would be killed while it drains: shorten the drain or make the grace period longer",
        );
    }
    if needed.saturating_add(DRAIN_MARGIN_MS) > grace {
        return Finding::warn(
            CHECK,
            found,
            "leave 5 s for the last closes: the store is written until the end",
        );
    }
    Finding::ok(CHECK, found)
}

impl Diagnosis {
    /// The worst of all.
    pub fn state(&self) -> State {
        self.0.iter().map(|finding| finding.state).max().unwrap_or(State::Ok)
    }

    pub fn failed(&self) -> usize {
        self.0.iter().filter(|finding| finding.state == State::Fail).count()
    }

    pub fn text(&self) -> String {
        let width = self.0.iter().map(|finding| finding.check.len()).max().unwrap_or(0);
        let mut out = String::new();
        for finding in &self.0 {
            let state = finding.state.name().to_uppercase();
            let _ = writeln!(out, "{state:<5}{:<width$}  {}", finding.check, finding.found);
            if let Some(advice) = &finding.advice {
                let _ = writeln!(out, "{:<5}{:<width$}  -> {advice}", "", "");
            }
        }
        out
    }

    pub fn json(&self) -> Value {
        let findings = self.0.iter().map(|finding| {
            json!({
                "check": finding.check,
                "state": finding.state.name(),
                "found": finding.found,
                "advice": finding.advice,
            })
        });
        json!({"state": self.state().name(), "findings": findings.collect::<Vec<_>>()})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drain_has_to_fit_the_grace_period() {
        for (pre_stop, drain, grace, state) in [
            (10_000, 45_000, 90_000, State::Ok),
            (10_000, 76_000, 90_000, State::Warn),
            (10_000, 80_000, 90_000, State::Fail),
            (u64::MAX, 1, 90_000, State::Fail),
        ] {
            assert_eq!(judge_drain(pre_stop, drain, grace).state, state, "{pre_stop} {drain} {grace}");
        }
    }

    #[test]
    fn the_worst_finding_is_the_result() {
        let all = Diagnosis(vec![
            Finding::ok("a", "fine"),
            Finding::fail("longer", "broken", "mend it"),
            Finding::warn("b", "worn", "watch it"),
        ]);
        assert_eq!((all.state(), all.failed()), (State::Fail, 1));
        assert_eq!(all.json()["findings"][1]["advice"], "mend it");
        assert_eq!(all.json()["state"], "fail");
        assert!(all.text().contains("FAIL longer  broken\n             -> mend it\n"), "{}", all.text());
    }
}
