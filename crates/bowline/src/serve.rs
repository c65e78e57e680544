//! `bowline serve`: puts the roles together.

use crate::{
    cli::Failure,
    config::{Config, Note},
    log,
};

pub fn run(config: Config, notes: &[Note]) -> Result<(), Failure> {
    log::start(&config.log)?;
    for note in notes {
        tracing::warn!("configuration: {note}");
    }
    Ok(())
}
