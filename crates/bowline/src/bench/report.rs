//! The result as a table and as JSON.

use anyhow::Context;
use hdrhistogram::Histogram;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Map, Value, json};
use std::time::Duration;

pub const QUANTILES: [(&str, f64); 4] = [("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0)];

#[derive(Debug, Clone, Copy)]
enum Figure {
    Count(u64),
    Measure(f64),
}

/// Rows in order, each a name, a figure and its unit.
#[derive(Default)]
pub struct Report {
    rows: Vec<(String, Figure, &'static str)>,
    failure: Option<&'static str>,
}

impl Report {
    pub fn row(&mut self, name: &str, value: f64, unit: &'static str) {
        self.rows.push((name.to_owned(), Figure::Measure(value), unit));
    }

    /// A row that is a whole number.
    pub fn count(&mut self, name: &str, value: u64, unit: &'static str) {
        self.rows.push((name.to_owned(), Figure::Count(value), unit));
    }

    /// A count of which something has to be there, or nothing was measured: `why` says so then.
    pub fn needed(&mut self, name: &str, value: u64, why: &'static str) {
        self.count(name, value, "");
        self.fail_if(value == 0, why);
    }

    /// What makes all figures worth nothing.
    pub fn fail_if(&mut self, has_failed: bool, why: &'static str) {
        if has_failed {
            self.failure.get_or_insert(why);
        }
    }

    /// Why the figures are worth nothing.
    pub fn failure(&self) -> Option<&'static str> {
        self.failure
    }

    /// The percentiles of a histogram of microseconds.
    pub fn latencies(&mut self, name: &str, histogram: &Histogram<u64>) {
        for (label, quantile) in QUANTILES {
            self.row(&format!("{name}_{label}"), histogram.value_at_quantile(quantile) as f64 / 1000.0, "ms");
        }
    }

    pub fn json(&self) -> Value {
        let rows = self.rows.iter().map(|(name, value, unit)| {
            let key = if unit.is_empty() { name.clone() } else { format!("{name}_{}", key_unit(unit)) };
            let value = match value {
                Figure::Count(count) => json!(count),
                // What is no number, because there is none, is null.
                Figure::Measure(value) => json!((value * 1000.0).round() / 1000.0),
            };
            (key, value)
        });
        Value::Object(rows.collect::<Map<String, Value>>())
    }

    pub fn table(&self) -> String {
        let mut table = comfy_table::Table::new();
        table.load_preset(comfy_table::presets::NOTHING);
        for (name, value, unit) in &self.rows {
            let shown = match value {
                Figure::Count(count) => count.to_string(),
                Figure::Measure(value) => format!("{value:.*}", if value.fract() == 0.0 { 0 } else { 3 }),
            };
            table.add_row([name.clone(), shown, (*unit).to_owned()]);
        }
        if let Some(column) = table.column_mut(1) {
            column.set_cell_alignment(comfy_table::CellAlignment::Right);
        }
        format!("{table}\n")
    }
}

fn key_unit(unit: &str) -> &str {
    match unit {
        "B" => "bytes",
        "µs" => "us",
        "1/s" => "per_s",
        "%" => "percent",
        other => other,
    }
}

pub fn histogram() -> Histogram<u64> {
    // One microsecond to an hour, three digits.
    Histogram::new_with_bounds(1, 3_600_000_000, 3).expect("the bounds are valid")
}

/// A progress line on standard error, or none.
pub fn progress(is_quiet: bool, length: u64, what: &'static str) -> anyhow::Result<ProgressBar> {
    let template = "{prefix} {bar:30} {pos}/{len} {per_sec} {msg}";
    bar(is_quiet, length, what, template)
}

/// The same over so many seconds.
pub fn seconds_bar(is_quiet: bool, duration: Duration, what: &'static str) -> anyhow::Result<ProgressBar> {
    bar(is_quiet, duration.as_secs(), what, "{prefix} {bar:30} {pos}/{len} s {msg}")
}

fn bar(is_quiet: bool, length: u64, what: &'static str, template: &str) -> anyhow::Result<ProgressBar> {
    if is_quiet {
        return Ok(ProgressBar::hidden());
    }
    let style = ProgressStyle::with_template(template).context("the progress line")?;
    Ok(ProgressBar::new(length).with_style(style).with_prefix(what))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_a_table_and_json() {
        let mut report = Report::default();
        report.needed("connections", 10, "nobody is there");
        report.row("memory", 812.5, "B");
        assert_eq!(report.json(), json!({"connections": 10, "memory_bytes": 812.5}));
        assert!(report.table().contains("812.500"), "{}", report.table());
        report.fail_if(false, "nothing failed");
        assert_eq!(report.failure(), None);
        report.needed("acknowledged", 0, "nothing was acknowledged");
        assert_eq!(report.failure(), Some("nothing was acknowledged"));
    }
}
