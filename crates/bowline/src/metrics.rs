//! Metrics in the text format of OpenMetrics. Roles count in plain numbers; this gives them names when asked.

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, MetricEncoder, text},
    metrics::MetricType,
    registry::Registry,
};
use std::fmt;

/// Counters and gauges at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Snapshot {
    pub gateway: Gateway,
    pub ledger: Ledger,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Gateway {
    pub connections: u64,
    pub users: u64,
    pub devices: u64,
    pub backpressure_paused_total: u64,
    pub backpressure_resumed_total: u64,
    pub backpressure_paused: u64,
    /// By the reason of the close.
    pub closed: Vec<(&'static str, u64)>,
    /// By the status of the answer.
    pub handshake_refused: Vec<(u16, u64)>,
}

/// One message for one recipient is one unit.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ledger {
    pub accepted: u64,
    pub delivered: u64,
    pub expired: u64,
    pub dropped: Vec<(&'static str, u64)>,
    pub waiting: u64,
}

/// Writes one scrape.
pub fn encode(snapshot: Snapshot) -> Result<String, fmt::Error> {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(snapshot));
    let mut out = String::new();
    text::encode(&mut out, &registry)?;
    Ok(out)
}

/// The library adds `_total` to the names of counters.
impl Collector for Snapshot {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut out = Out(encoder);
        let Self { gateway, ledger } = self;
        out.gauge("bowline_gateway_connections", "Authenticated connections", gateway.connections)?;
        out.gauge("bowline_gateway_users", "Users with a connection", gateway.users)?;
        out.gauge("bowline_gateway_devices", "Devices with a connection", gateway.devices)?;
        out.counter(
            "bowline_gateway_backpressure_paused",
            "Connections that began to be read no further",
            gateway.backpressure_paused_total,
        )?;
        out.counter(
            "bowline_gateway_backpressure_resumed",
            "Paused connections that were read again, or closed",
            gateway.backpressure_resumed_total,
        )?;
        out.gauge(
            "bowline_gateway_backpressure_paused",
            "Connections that are read no further now",
            gateway.backpressure_paused,
        )?;
        out.counters("bowline_gateway_closed", "Connections closed", "reason", &gateway.closed)?;
        out.counters(
            "bowline_gateway_handshake_refused",
            "Handshakes refused",
            "status",
            &gateway.handshake_refused,
        )?;
        out.counter("bowline_ledger_accepted", "Messages accepted, for each recipient", ledger.accepted)?;
        out.counter("bowline_ledger_delivered", "Messages that arrived at a device", ledger.delivered)?;
        out.counter(
            "bowline_ledger_expired",
            "Messages that will not be delivered: retention, cleared, members that left",
            ledger.expired,
        )?;
        out.counters("bowline_ledger_dropped", "Messages given up", "reason", &ledger.dropped)?;
        out.gauge("bowline_ledger_waiting", "Messages that wait in inboxes", ledger.waiting)
    }
}

struct Out<'a>(DescriptorEncoder<'a>);

impl Out<'_> {
    fn describe<'a>(
        &'a mut self,
        name: &'a str,
        help: &'a str,
        kind: MetricType,
    ) -> Result<MetricEncoder<'a>, fmt::Error> {
        self.0.encode_descriptor(name, help, None, kind)
    }

    fn gauge(&mut self, name: &str, help: &str, value: u64) -> fmt::Result {
        self.describe(name, help, MetricType::Gauge)?.encode_gauge(&value)
    }

    fn counter(&mut self, name: &str, help: &str, value: u64) -> fmt::Result {
        self.describe(name, help, MetricType::Counter)?.encode_counter::<NoLabels, _, u64>(&value, None)
    }

    fn counters<T: ToString>(
        &mut self,
        name: &str,
        help: &str,
        label: &str,
        values: &[(T, u64)],
    ) -> fmt::Result {
        let mut family = self.describe(name, help, MetricType::Counter)?;
        for (text, value) in values {
            let labels = [(label, text.to_string())];
            family.encode_family(&labels)?.encode_counter::<NoLabels, _, u64>(value, None)?;
        }
        Ok(())
    }
}

type NoLabels = [(&'static str, &'static str); 0];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_reference() {
        let snapshot = Snapshot {
            gateway: Gateway {
                backpressure_paused_total: 3,
                backpressure_resumed_total: 2,
                backpressure_paused: 1,
                closed: vec![("bye", 4), ("draining", 0)],
                handshake_refused: vec![(401, 5)],
                ..Gateway::default()
            },
            ledger: Ledger { accepted: 9, delivered: 6, expired: 1, dropped: vec![("none", 0)], waiting: 2 },
        };
        let text = super::encode(snapshot).unwrap();
        for line in [
            "bowline_gateway_backpressure_paused_total 3",
            "bowline_gateway_backpressure_resumed_total 2",
            "bowline_gateway_backpressure_paused 1",
            "bowline_gateway_closed_total{reason=\"bye\"} 4",
            "bowline_gateway_closed_total{reason=\"draining\"} 0",
            "bowline_gateway_handshake_refused_total{status=\"401\"} 5",
            "bowline_ledger_accepted_total 9",
            "bowline_ledger_delivered_total 6",
            "bowline_ledger_expired_total 1",
            "bowline_ledger_dropped_total{reason=\"none\"} 0",
            "bowline_ledger_waiting 2",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is missing in\n{text}");
        }
        assert!(text.ends_with("# EOF\n"));
    }
}
