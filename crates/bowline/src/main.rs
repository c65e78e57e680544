//! The program: configuration, assembly of the roles, command line.

mod access;
mod admin;
mod bench;
mod chat;
mod check;
mod cli;
mod config;
mod data;
mod doctor;
mod drain;
mod errors;
mod files;
mod hooks;
mod keys;
mod log;
mod metrics;
mod node;
mod process;
mod serve;
mod stop;
mod token;
mod top;

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use std::time::SystemTime;

fn main() -> std::process::ExitCode {
    bound_arenas();
    cli::run()
}

/// Memory that one thread frees is then there for the others: with an arena for each thread, 15,000 idle sessions
/// take a tenth more.
#[cfg(target_env = "gnu")]
#[allow(unsafe_code)]
fn bound_arenas() {
    // SAFETY: mallopt sets a number, and no other thread has been started.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 2) };
}

#[cfg(not(target_env = "gnu"))]
fn bound_arenas() {}

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
