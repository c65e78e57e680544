//! `bowline bench`: measures a running server, and shows what the server paid for it.
//!
//! [`worker`]s hold the connections, as threads or processes; each runs a scenario ([`idle`], [`pair`], [`fanout`],
//! [`storm`]) over lean connections ([`net`]) and counts. Here their shares are dealt out and their counts added up.
//!
//! Latencies of an open loop (`--rate`) count from when a message was due, not from when it could be sent: time
//! spent waiting in the client is not left out.

mod fanout;
mod fleet;
mod idle;
mod job;
mod net;
mod pair;
mod plan;
mod probe;
mod report;
mod run;
mod server;
mod simulate;
mod stalled;
mod stamp;
mod storm;
mod stream;
mod wire;
mod worker;

pub use plan::ephemeral_ports;
pub use report::Report;
pub use run::run;
pub use server::listener_at;
pub use simulate::Simulation;
pub use worker::run_as_process;

use crate::token::Tokens;
use serde::{Deserialize, Serialize};
use std::{path::PathBuf, time::Duration};

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
pub enum Scenario {
    /// Opens connections and holds them: memory, CPU for each connection
    Idle,
    /// Pairs of users send each other durable messages: rate, latency, CPU and bytes for each message
    Pair,
    /// One room: some publish, all receive: latency, deliveries, CPU for each
    Fanout,
    /// Drops every connection at once; they come back by the client library's rule
    Storm,
}

pub struct Options {
    pub scenario: Scenario,
    pub url: String,
    /// PEM file with the issuers to trust, for TLS; none is those that the system trusts.
    pub ca: Option<PathBuf>,
    pub connections: usize,
    pub duration: Duration,
    /// Messages a second in all; none is a closed loop.
    pub rate: Option<f64>,
    /// Messages under way in a closed loop: of each connection of a pair, of all publishers of a room.
    pub in_flight: usize,
    pub publishers: usize,
    /// Members of a room that stop reading.
    pub stalled: usize,
    pub body_bytes: usize,
    pub server_pid: Option<u32>,
    /// Processes that hold the connections; none is as many as the limit on open files asks for.
    pub processes: Option<usize>,
    pub tokens: Tokens,
    pub quiet: bool,
}

#[cfg(test)]
mod tests;
