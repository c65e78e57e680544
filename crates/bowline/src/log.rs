//! Log lines on standard error.

use crate::{cli::Failure, config::Log};
use anyhow::anyhow;
use std::io::IsTerminal;
use tracing_subscriber::EnvFilter;

/// Begins to log; once in a process.
pub fn start(config: &Log) -> Result<(), Failure> {
    let filter = EnvFilter::builder().parse(&config.level).map_err(|error| {
        Failure::Usage(anyhow!(
            "log.level = {:?}: {error}; it takes error, warn, info, debug, trace or off, also by module",
            config.level
        ))
    })?;
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let started = if config.is_json {
        builder.json().flatten_event(true).with_current_span(false).with_span_list(false).try_init()
    } else {
        builder.with_ansi(std::io::stderr().is_terminal()).with_target(false).try_init()
    };
    started.map_err(|error| Failure::Failed(anyhow!("logging cannot begin: {error}")))
}
