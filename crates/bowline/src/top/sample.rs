//! What a node says of itself at one moment.

use crate::admin::{self, Target};
use bowline_api::Status;
use std::{collections::BTreeMap, time::Instant};

pub struct Sample {
    pub at: Instant,
    pub status: Status,
    pub metrics: Metrics,
}

impl Sample {
    pub fn take(target: &Target) -> anyhow::Result<Self> {
        let status = admin::status(target)?;
        let metrics = Metrics::parse(&admin::metrics(target)?);
        Ok(Self { at: Instant::now(), status, metrics })
    }
}

/// Series by name and labels, as they are written.
#[derive(Debug, Default)]
pub struct Metrics(BTreeMap<String, f64>);

impl Metrics {
    /// Lines that are no series are passed over.
    pub fn parse(text: &str) -> Self {
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        let series = lines.filter_map(|line| {
            let end = line.rfind('}').map_or_else(|| line.find(' '), |end| Some(end + 1))?;
            let (name, value) = line.split_at_checked(end)?;
            Some((name.to_owned(), value.split_whitespace().next()?.parse().ok()?))
        });
        Self(series.collect())
    }

    /// The sum over all series of a name; `None` when this server has none.
    pub fn get(&self, name: &str) -> Option<f64> {
        let mut found = self.family(name).map(|(_, value)| value).peekable();
        found.peek()?;
        Some(found.sum())
    }

    /// The series of a name, each with the values of its labels.
    pub fn family<'a>(&'a self, name: &'a str) -> impl Iterator<Item = (String, f64)> + 'a {
        self.0.iter().filter_map(move |(series, value)| {
            let rest = series.strip_prefix(name)?;
            let labels = match rest {
                "" => String::new(),
                rest => {
                    let pairs = rest.strip_prefix('{')?.strip_suffix('}')?.split(',');
                    let values = pairs.filter_map(|pair| Some(pair.split_once('=')?.1.trim_matches('"')));
                    values.collect::<Vec<_>>().join(" ")
                }
            };
            Some((labels, *value))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn series_are_read_with_their_labels() {
        let text = "# HELP a b\n# TYPE closed counter\nclosed_total{reason=\"bye\"} 4\n\
                    closed_total{reason=\"draining\"} 2.5\nclosed 7\nfailures{operation=\"msg.send\",code=\"conflict\"} 1\n\
                    nonsense\n";
        let metrics = Metrics::parse(text);
        assert_eq!(metrics.get("closed_total"), Some(6.5));
        assert_eq!(metrics.get("closed"), Some(7.0));
        assert_eq!(metrics.get("open"), None);
        let reasons: Vec<_> = metrics.family("closed_total").collect();
        assert_eq!(reasons, [("bye".into(), 4.0), ("draining".into(), 2.5)]);
        assert_eq!(metrics.family("failures").next(), Some(("msg.send conflict".into(), 1.0)));
    }
}
