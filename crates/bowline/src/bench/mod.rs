//! `bowline bench`: measures a running server with the client library, and shows what the server paid for it.
//!
//! Latencies of an open loop (`--rate`) count from when a message was due, not from when it could be sent: time
//! spent waiting in the client is not left out.

mod idle;
mod pair;
mod report;
mod server;

pub use report::Report;
use server::Usage;

use anyhow::{Context, bail};
use bowline_client::Trust;
use std::{sync::Arc, time::Duration};

/// Users are named by number; each has a device `bench`.
pub type Tokens = Arc<dyn Fn(&str) -> anyhow::Result<String> + Send + Sync>;

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Scenario {
    /// Opens connections and holds them: memory, CPU for each connection.
    Idle,
    /// Pairs of users send each other durable messages: rate, latency, CPU and bytes for each message.
    Pair,
}

#[derive(Clone)]
pub struct Options {
    pub scenario: Scenario,
    pub url: String,
    /// `None`: the issuers that the system trusts.
    pub trust: Option<Trust>,
    pub connections: usize,
    pub duration: Duration,
    /// Messages a second in all; none is a closed loop with one message under way for each connection.
    pub rate: Option<u64>,
    pub body_bytes: usize,
    pub server_pid: Option<u32>,
    pub tokens: Tokens,
    pub quiet: bool,
}

pub fn run(mut options: Options) -> anyhow::Result<Report> {
    if options.trust.is_none() && ["wss:", "tls:"].iter().any(|scheme| options.url.starts_with(scheme)) {
        // Once for all connections.
        options.trust = Some(Trust::system()?);
    }
    if options.connections < 2 {
        bail!("--connections {} is too few; it takes 2 or more", options.connections);
    }
    let limit = server::open_files_limit();
    if options.connections as u64 + 64 > limit {
        bail!(
            "{} connections need more than the {limit} files this process may open; raise it (ulimit -n) or take fewer",
            options.connections
        );
    }
    let pid = options.server_pid.or_else(|| server::listener_of(&options.url));
    if pid.is_none() && !options.quiet {
        eprintln!(
            "the server's process is not found on this machine; give --server-pid for its CPU and memory"
        );
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    runtime.block_on(async {
        match options.scenario {
            Scenario::Idle => idle::run(&options, pid).await,
            Scenario::Pair => pair::run(&options, pid).await,
        }
    })
}

/// A progress line on standard error, or none.
fn progress(options: &Options, length: u64, what: &'static str) -> anyhow::Result<indicatif::ProgressBar> {
    if options.quiet {
        return Ok(indicatif::ProgressBar::hidden());
    }
    let style = indicatif::ProgressStyle::with_template("{prefix} {bar:30} {pos}/{len} {per_sec} {msg}")
        .context("the progress line")?;
    Ok(indicatif::ProgressBar::new(length).with_style(style).with_prefix(what))
}

/// What the server used between two looks.
fn used(pid: Option<u32>, before: Option<Usage>) -> Option<(Usage, Usage)> {
    Some((before?, Usage::of(pid?)?))
}
