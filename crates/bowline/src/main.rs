//! The program: configuration, assembly of the roles, command line.

mod access;
mod admin;
mod bench;
mod chat;
mod cli;
mod config;
mod data;
mod errors;
mod files;
mod keys;
mod log;
mod metrics;
mod node;
mod serve;
mod stop;
mod token;

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use std::time::SystemTime;

fn main() -> std::process::ExitCode {
    cli::run()
}

/// Milliseconds since the epoch.
fn now_ms() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

/// 128 random bits.
fn random() -> anyhow::Result<[u8; 16]> {
    let mut bytes = [0_u8; 16];
    getrandom::fill(&mut bytes)
        .map_err(|error| anyhow::anyhow!("the system gives no random bytes: {error}"))?;
    Ok(bytes)
}

/// The same as 22 characters that are good in ids, names of files and addresses.
fn random_text() -> anyhow::Result<String> {
    Ok(URL_SAFE_NO_PAD.encode(random()?))
}
