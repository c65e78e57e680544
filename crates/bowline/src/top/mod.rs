//! `bowline top`: one node, live.
//!
//! A thread asks the API once a second ([`sample`]), [`view`] makes figures of two samples, [`screen`] draws them.
//! Where nobody looks, because the output is no terminal, the figures are printed once.

mod sample;
mod screen;
mod view;

use crate::admin::Target;
use sample::Sample;
use std::time::Duration;

/// How often the server is asked.
const EVERY: Duration = Duration::from_secs(1);

/// Draws until somebody presses `q`.
pub fn watch(target: Target) -> anyhow::Result<()> {
    // The first answer decides whether there is anything to draw.
    let first = Sample::take(&target)?;
    screen::run(target, first)
}

/// The figures of one second, as text or JSON.
pub fn once(target: &Target, is_json: bool) -> anyhow::Result<String> {
    let before = Sample::take(target)?;
    std::thread::sleep(EVERY);
    let after = Sample::take(target)?;
    let view = view::View::of(Some(&before), &after);
    Ok(if is_json { format!("{:#}\n", view.json()) } else { view.text() })
}
