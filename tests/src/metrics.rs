//! Reading `/metrics`.

use std::collections::BTreeMap;

/// One reading: each series with its labels as they were written.
#[derive(Debug, Clone)]
pub struct Metrics(BTreeMap<String, f64>);

impl Metrics {
    pub fn parse(text: &str) -> Self {
        let mut series = BTreeMap::new();
        for line in text.lines().filter(|line| !line.starts_with('#') && !line.trim().is_empty()) {
            let (name, value) = match line.rfind('}') {
                Some(end) => line.split_at(end + 1),
                None => line.split_once(' ').unwrap_or_else(|| panic!("no value in metrics line {line:?}")),
            };
            let value = value.split_whitespace().next().and_then(|word| word.parse().ok());
            let value = value.unwrap_or_else(|| panic!("no number in metrics line {line:?}"));
            series.insert(name.to_owned(), value);
        }
        assert!(!series.is_empty(), "no metrics in {text:?}");
        Self(series)
    }

    /// The sum over all series of this name; `None` when there is no such series.
    pub fn find(&self, name: &str) -> Option<f64> {
        self.find_with(name, "")
    }

    /// The sum over the series of this name whose labels contain `label`, such as `reason="bye"`.
    pub fn find_with(&self, name: &str, label: &str) -> Option<f64> {
        let mut sum = None;
        for (series, value) in &self.0 {
            let (family, labels) = series.split_once('{').unwrap_or((series, ""));
            if family == name && labels.contains(label) {
                *sum.get_or_insert(0.0) += value;
            }
        }
        sum
    }

    pub fn get(&self, name: &str) -> f64 {
        self.find(name).unwrap_or_else(|| panic!("no metric {name} in {:?}", self.0.keys()))
    }

    /// The families that are shown.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(|series| series.split('{').next().unwrap_or(series))
    }

    /// Fails unless every accepted message is delivered, waiting, expired or dropped.
    pub fn assert_ledger_balances(&self) {
        let term = |name: &str| self.get(&format!("bowline_ledger_{name}"));
        let dropped = self.find("bowline_ledger_dropped_total").unwrap_or(0.0);
        let (accepted, delivered) = (term("accepted_total"), term("delivered_total"));
        let (waiting, expired) = (term("waiting"), term("expired_total"));
        assert_eq!(
            accepted,
            delivered + waiting + expired + dropped,
            "accepted = delivered {delivered} + waiting {waiting} + expired {expired} + dropped {dropped}"
        );
    }
}
