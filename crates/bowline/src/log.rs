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
    started.map_err(|error| Failure::Failed(anyhow!("logging cannot begin: {error}")))?;
    log_panics();
    Ok(())
}

/// A panic is a line of the log like any other, before the process ends.
fn log_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let place = panic.location().map(ToString::to_string).unwrap_or_default();
        let thread = std::thread::current();
        let payload = panic.payload();
        let text = payload.downcast_ref::<&str>().copied();
        let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
        tracing::error!(
            cause = text.unwrap_or("no text"),
            place,
            thread = thread.name().unwrap_or("unnamed"),
            "this is a fault of Bowline; please report it"
        );
    }));
}
