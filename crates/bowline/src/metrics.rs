//! Metrics in the text format of Prometheus. Roles count in plain numbers; this gives them names when asked.

use crate::process::Process;
use bowline_delivery::persist::Ledger;
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, MetricEncoder, text},
    metrics::MetricType,
    registry::Registry,
};
use std::fmt::{self, Write as _};

/// Counters and gauges at one moment.
#[derive(Debug, Clone, Default)]
pub struct Snapshot {
    pub gateway: bowline_gateway::Metrics,
    pub users: u64,
    pub devices: u64,
    pub router: bowline_router::Snapshot,
    /// `None` when the store could not be read: then there are no series, rather than wrong ones.
    pub ledger: Option<LedgerTotals>,
    /// `None` where the system does not tell.
    pub process: Option<Process>,
}

/// One message for one recipient is one unit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LedgerTotals {
    pub totals: Ledger,
    pub waiting: u64,
}

/// Writes one scrape.
pub fn encode(snapshot: Snapshot) -> Result<String, fmt::Error> {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(snapshot));
    let mut out = String::new();
    text::encode(&mut out, &registry)?;
    Ok(plain(&out))
}

/// The library writes OpenMetrics, where a counter is described without its `_total`, and so may have the name of a
/// gauge. The format of Prometheus, version 0.0.4, describes each metric under the name of its samples, and knows
/// neither units nor an end.
fn plain(open_metrics: &str) -> String {
    let mut out = String::with_capacity(open_metrics.len());
    let mut lines = open_metrics.lines().peekable();
    while let Some(line) = lines.next() {
        let describes = |word: &str, line: &str| {
            let (name, rest) = line.strip_prefix("# ")?.strip_prefix(word)?.trim_start().split_once(' ')?;
            Some((name.to_owned(), rest.to_owned()))
        };
        let total = |kind: &str| if kind == "counter" { "_total" } else { "" };
        if let Some((name, help)) = describes("HELP", line) {
            // The type stands in the next line.
            let kind =
                lines.peek().and_then(|next| describes("TYPE", next)).map_or(String::new(), |(_, kind)| kind);
            out.push_str(&format!("# HELP {name}{} {help}\n", total(&kind)));
        } else if let Some((name, kind)) = describes("TYPE", line) {
            out.push_str(&format!("# TYPE {name}{} {kind}\n", total(&kind)));
        } else if !line.starts_with('#') {
            out.push_str(line);
            out.push('\n');
        }
    }
    out
}

/// A snapshot in which every label is named.
fn named() -> Snapshot {
    Snapshot {
        gateway: bowline_gateway::Metrics {
            closed_total: vec![("bye", 0)],
            tls_handshakes_total: vec![("done", 0)],
            handshake_refused_total: vec![(401, 0)],
            ingress_failures_total: vec![("msg.send", "conflict", 0)],
            ..Default::default()
        },
        ledger: Some(LedgerTotals::default()),
        process: Some(Process { cpu_s: 0.0, resident_bytes: 0 }),
        ..Snapshot::default()
    }
}

/// The table of `docs/operations.md`, read off a scrape.
pub fn reference() -> Result<String, fmt::Error> {
    let text = encode(named())?;
    let mut out = String::from("| metric | type | labels | meaning |\n|---|---|---|---|\n");
    let described = |line: &str, word: &str| -> Option<(String, String)> {
        let (name, rest) = line.strip_prefix("# ")?.strip_prefix(word)?.trim_start().split_once(' ')?;
        Some((name.to_owned(), rest.to_owned()))
    };
    let lines: Vec<&str> = text.lines().collect();
    for (index, line) in lines.iter().enumerate() {
        let Some((name, meaning)) = described(line, "HELP") else { continue };
        let kind = described(lines.get(index + 1).unwrap_or(&""), "TYPE").ok_or(fmt::Error)?.1;
        let sample = lines.get(index + 2).ok_or(fmt::Error)?;
        let (shown, labels) = match sample.split_once('{') {
            None => (sample.split(' ').next().unwrap_or(&name), String::from("–")),
            Some((shown, labels)) => {
                let parts = labels.split("\",").filter_map(|part| part.split('=').next());
                (shown, parts.map(|label| format!("`{label}`")).collect::<Vec<_>>().join(", "))
            }
        };
        let meaning = meaning.trim_end_matches('.');
        writeln!(out, "| `{shown}` | {kind} | {labels} | {meaning} |")?;
    }
    Ok(out)
}

/// The library adds `_total` to the names of counters.
impl Collector for Snapshot {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut out = Out(encoder);
        self.encode_gateway(&mut out)?;
        self.encode_router(&mut out)?;
        if let Some(ledger) = &self.ledger {
            encode_ledger(ledger, &mut out)?;
        }
        match &self.process {
            Some(process) => encode_process(process, &mut out),
            None => Ok(()),
        }
    }
}

impl Snapshot {
    fn encode_gateway(&self, out: &mut Out<'_>) -> fmt::Result {
        let gateway = &self.gateway;
        let transports = [("ws", gateway.web_socket_connections), ("tcp", gateway.tcp_connections)];
        out.gauges("bowline_gateway_connections", "Authenticated connections", "transport", &transports)?;
        out.gauge("bowline_gateway_users", "Users with a connection", self.users)?;
        out.gauge("bowline_gateway_devices", "Devices with a connection", self.devices)?;
        out.counter("bowline_gateway_opened", "Connections authenticated", gateway.opened_total)?;
        out.counter("bowline_gateway_frames_in", "Frames from clients", gateway.frames_in_total)?;
        out.counter("bowline_gateway_frames_out", "Frames to clients", gateway.frames_out_total)?;
        out.counter("bowline_gateway_received_bytes", "Bytes from clients", gateway.bytes_in_total)?;
        out.counter("bowline_gateway_sent_bytes", "Bytes to clients", gateway.bytes_out_total)?;
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
        out.counter(
            "bowline_gateway_slow_frames_dropped",
            "Frames queued for slow consumers when those were closed",
            gateway.slow_frames_dropped_total,
        )?;
        out.counter(
            "bowline_gateway_identity_mismatch",
            "Frames that claimed another identity than the bound one",
            gateway.identity_mismatch_total,
        )?;
        out.counter(
            "bowline_gateway_accept_failures",
            "Connections that could not be accepted",
            gateway.accept_failures_total,
        )?;
        out.counter(
            "bowline_gateway_turned_away",
            "Connections closed at once because there was no place for them",
            gateway.turned_away_total,
        )?;
        out.counter(
            "bowline_gateway_http_connections",
            "Connections handed to the HTTP server",
            gateway.handed_to_http_total,
        )?;
        out.counters(
            "bowline_gateway_tls_handshakes",
            "TLS handshakes, by what became of them",
            "outcome",
            &gateway.tls_handshakes_total,
        )?;
        out.counter(
            "bowline_gateway_tls_resumed",
            "TLS handshakes that went on with an earlier session",
            gateway.tls_resumed_total,
        )?;
        out.gauge(
            "bowline_gateway_tls_handshakes_under_way",
            "TLS handshakes that are not done",
            gateway.tls_handshakes_under_way,
        )?;
        out.counter(
            "bowline_gateway_not_here",
            "Events of the router for connections that are gone",
            gateway.not_here_total,
        )?;
        out.gauge("bowline_gateway_rooms", "Rooms", gateway.rooms)?;
        out.gauge(
            "bowline_gateway_rooms_members",
            "Members of all rooms; a connection counts once for each of its rooms",
            gateway.rooms_members,
        )?;
        out.counter(
            "bowline_gateway_rooms_published",
            "Messages published in rooms",
            gateway.rooms_published_total,
        )?;
        out.counter(
            "bowline_gateway_rooms_deliveries",
            "Messages of rooms written to members or queued for them",
            gateway.rooms_deliveries_total,
        )?;
        out.counters("bowline_gateway_closed", "Connections closed", "reason", &gateway.closed_total)?;
        out.counters(
            "bowline_gateway_handshake_refused",
            "Handshakes refused",
            "status",
            &gateway.handshake_refused_total,
        )?;
        let mut family = out.describe(
            "bowline_gateway_ingress_failures",
            "Frames answered with an error",
            MetricType::Counter,
        )?;
        for (operation, code, value) in &gateway.ingress_failures_total {
            let labels = [("operation", *operation), ("code", *code)];
            family.encode_family(&labels)?.encode_counter::<NoLabels, _, u64>(value, None)?;
        }
        Ok(())
    }

    fn encode_router(&self, out: &mut Out<'_>) -> fmt::Result {
        let counters = &self.router.counters;
        let [connections, users, conversations] = self.router.table_sizes.map(|size| size as u64);
        out.counter("bowline_router_messages_stored", "Messages stored", counters.messages_stored)?;
        out.counter("bowline_router_messages_repeated", "Ids that were known", counters.messages_repeated)?;
        out.counter("bowline_router_messages_refused", "Messages refused", counters.messages_refused)?;
        out.counter("bowline_router_pushes", "Messages pushed to devices", counters.pushes)?;
        out.counter("bowline_router_redeliveries", "Messages pushed again", counters.redeliveries)?;
        out.counter("bowline_router_receipts", "Receipts sent", counters.receipts)?;
        out.counter("bowline_router_not_here", "Events that found no connection", counters.not_here)?;
        out.counter("bowline_router_transactions", "Transactions committed", counters.transactions)?;
        out.counter(
            "bowline_router_transactions_failed",
            "Transactions that the store did not take",
            counters.transactions_failed,
        )?;
        out.counter("bowline_router_sessions_resumed", "Sessions that went on", counters.resumed)?;
        let expired = counters.messages_expired;
        out.counter("bowline_router_messages_expired", "Messages deleted by retention", expired)?;
        let forgotten = counters.devices_forgotten;
        out.counter("bowline_router_devices_forgotten", "Devices forgotten", forgotten)?;
        out.gauge(
            "bowline_router_queue_depth",
            "Entries that wait for a transaction",
            self.router.queue_depth as u64,
        )?;
        out.gauge("bowline_router_connections", "Connections that the router knows", connections)?;
        out.gauge("bowline_router_users", "Users in memory", users)?;
        out.gauge("bowline_router_conversations", "Conversations in memory", conversations)
    }
}

fn encode_ledger(ledger: &LedgerTotals, out: &mut Out<'_>) -> fmt::Result {
    let LedgerTotals { totals, waiting } = ledger;
    out.counter("bowline_ledger_accepted", "Messages accepted, for each recipient", totals.accepted)?;
    out.counter("bowline_ledger_delivered", "Messages that arrived at a device", totals.delivered)?;
    out.counter(
        "bowline_ledger_expired",
        "Messages that will not be delivered: retention, cleared, members that left",
        totals.expired,
    )?;
    // The store keeps one total: no reason for giving up a durable message exists.
    out.counters("bowline_ledger_dropped", "Messages given up", "reason", &[("unknown", totals.dropped)])?;
    out.gauge("bowline_ledger_waiting", "Messages that wait in inboxes", *waiting)
}

/// Under the names that every exporter uses.
fn encode_process(process: &Process, out: &mut Out<'_>) -> fmt::Result {
    out.describe("process_cpu_seconds", "CPU time of the process", MetricType::Counter)?
        .encode_counter::<NoLabels, _, u64>(&process.cpu_s, None)?;
    out.gauge("process_resident_memory_bytes", "Memory of the process", process.resident_bytes)
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

    fn gauges(&mut self, name: &str, help: &str, label: &str, values: &[(&str, u64)]) -> fmt::Result {
        let mut family = self.describe(name, help, MetricType::Gauge)?;
        for (text, value) in values {
            family.encode_family(&[(label, *text)])?.encode_gauge(value)?;
        }
        Ok(())
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
    use std::collections::{HashMap, HashSet};

    #[test]
    fn docs_operations_md_has_the_table() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/operations.md");
        let found = std::fs::read_to_string(path).unwrap_or_default();
        let table = reference().unwrap();
        assert!(table.lines().count() > 35, "{table}");
        assert!(
            found.contains(&table),
            "put this into docs/operations.md (`bowline config metrics`):\n{table}"
        );
    }

    #[test]
    fn names_are_those_of_the_reference() {
        let snapshot = Snapshot {
            gateway: bowline_gateway::Metrics {
                web_socket_connections: 7,
                backpressure_paused_total: 3,
                backpressure_resumed_total: 2,
                backpressure_paused: 1,
                closed_total: vec![("bye", 4), ("draining", 0)],
                handshake_refused_total: vec![(401, 5)],
                ingress_failures_total: vec![("msg.send", "conflict", 8)],
                ..Default::default()
            },
            ledger: Some(LedgerTotals {
                totals: Ledger { accepted: 9, delivered: 6, expired: 1, dropped: 0 },
                waiting: 2,
            }),
            ..Snapshot::default()
        };
        let text = super::encode(snapshot).unwrap();
        for line in [
            "bowline_gateway_connections{transport=\"ws\"} 7",
            "bowline_gateway_backpressure_paused_total 3",
            "bowline_gateway_backpressure_resumed_total 2",
            "bowline_gateway_backpressure_paused 1",
            "bowline_gateway_closed_total{reason=\"bye\"} 4",
            "bowline_gateway_closed_total{reason=\"draining\"} 0",
            "bowline_gateway_handshake_refused_total{status=\"401\"} 5",
            "bowline_gateway_ingress_failures_total{operation=\"msg.send\",code=\"conflict\"} 8",
            "bowline_ledger_accepted_total 9",
            "bowline_ledger_delivered_total 6",
            "bowline_ledger_expired_total 1",
            "bowline_ledger_dropped_total{reason=\"unknown\"} 0",
            "bowline_ledger_waiting 2",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is missing in\n{text}");
        }
    }

    /// A page as a strict reader takes it: every sample belongs to the one metric that is described before it, no name
    /// is described twice and no sample given twice, histograms are whole.
    fn read_strictly(page: &str) -> Result<usize, String> {
        let (mut types, mut seen) = (HashMap::new(), HashSet::new());
        let mut current = (String::new(), String::new());
        let mut helped = String::new();
        for line in page.lines() {
            let fault = |what: &str| Err(format!("{what}: {line}"));
            if let Some(rest) = line.strip_prefix("# HELP ") {
                helped = rest.split(' ').next().unwrap_or_default().to_owned();
                continue;
            }
            if let Some(rest) = line.strip_prefix("# TYPE ") {
                let Some((name, kind)) = rest.split_once(' ') else { return fault("no type") };
                if !["counter", "gauge", "histogram"].contains(&kind) || helped != name {
                    return fault("no known type, or no help before it");
                }
                if types.insert(name.to_owned(), kind.to_owned()).is_some() {
                    return fault("described twice");
                }
                current = (name.to_owned(), kind.to_owned());
                continue;
            }
            if line.is_empty() || line.starts_with('#') {
                return fault("no line of this format");
            }
            let Some((series, value)) = line.rsplit_once(' ') else { return fault("no value") };
            if value.parse::<f64>().is_err() || !seen.insert(series.to_owned()) {
                return fault("no number, or given twice");
            }
            let name = series.split('{').next().unwrap_or_default();
            let (family, kind) = &current;
            let parts: &[&str] = if kind == "histogram" { &["_bucket", "_sum", "_count"] } else { &[""] };
            if !parts.iter().any(|part| name.strip_suffix(part) == Some(family)) {
                return fault("a sample of another metric than the one described");
            }
            if kind == "counter" && !name.ends_with("_total") {
                return fault("a counter without _total");
            }
        }
        for (name, kind) in &types {
            let has = |part: &str| seen.iter().any(|series| series.starts_with(&format!("{name}{part}")));
            let is_whole = has("_sum") && has("_count") && seen.iter().any(|one| one.contains("le=\"+Inf\""));
            if kind == "histogram" && !is_whole {
                return Err(format!("the histogram {name} is not whole"));
            }
        }
        Ok(types.len())
    }

    #[test]
    fn the_page_is_read_by_a_strict_reader() {
        let page = encode(named()).unwrap();
        assert!(read_strictly(&page).unwrap() > 35, "{page}");
        assert!(page.contains("# TYPE bowline_gateway_backpressure_paused_total counter\n"), "{page}");
        assert!(page.contains("# TYPE bowline_gateway_backpressure_paused gauge\n"), "{page}");
    }

    #[test]
    fn histograms_units_and_the_end_are_translated() {
        use prometheus_client::{
            metrics::{counter::Counter, histogram::Histogram},
            registry::Unit,
        };
        let mut registry = Registry::default();
        let times = Histogram::new([0.1, 1.0]);
        times.observe(0.5);
        registry.register_with_unit("wait", "How long, of # HELP", Unit::Seconds, times);
        registry.register("seen", "How often", Counter::<u64>::default());
        let mut text = String::new();
        text::encode(&mut text, &registry).unwrap();
        assert!(read_strictly(&text).is_err(), "{text}");
        let page = plain(&text);
        assert_eq!(read_strictly(&page), Ok(2), "{page}");
        for line in [
            "# TYPE wait_seconds histogram",
            "wait_seconds_bucket{le=\"+Inf\"} 1",
            "# HELP seen_total How often.",
            "seen_total 0",
        ] {
            assert!(page.lines().any(|one| one == line), "{line} is missing in\n{page}");
        }
    }
}
