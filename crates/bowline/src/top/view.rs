//! The figures, made of two samples.

use super::sample::Sample;
use crate::admin::{span, state_name};
use bowline_api::State;
use serde_json::{Map, Value, json};
use std::fmt::Write;

pub struct View {
    pub title: String,
    pub state: State,
    pub drain: Option<Drain>,
    pub sections: Vec<Section>,
}

pub struct Drain {
    pub remaining: u64,
    pub left_ms: u64,
}

pub struct Section {
    pub name: &'static str,
    pub lines: Vec<Line>,
}

pub struct Line {
    pub name: String,
    pub value: f64,
    unit: Unit,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Unit {
    Count,
    Rate,
    Bytes,
    ByteRate,
    Percent,
}

impl View {
    /// Rates are those between the two; without an earlier one, those since the start.
    pub fn of(before: Option<&Sample>, now: &Sample) -> Self {
        let status = &now.status;
        let figures = Figures { before: before.filter(|one| one.status.boot_id == status.boot_id), now };
        let title = format!(
            "{} · version {} · {} · up {}",
            status.node_id,
            status.version,
            state_name(status.state),
            span(status.uptime_ms)
        );
        let drain = status.drain.map(|drain| Drain {
            remaining: drain.remaining,
            left_ms: drain.deadline.saturating_sub(crate::now_ms()),
        });
        let sections = vec![
            figures.connections(),
            figures.traffic(),
            figures.messages(),
            figures.pressure(),
            figures.ledger(),
            figures.process(),
            figures.family("closes", "bowline_gateway_closed_total"),
            figures.family("refused handshakes", "bowline_gateway_handshake_refused_total"),
        ];
        Self { title, state: status.state, drain, sections }
    }

    pub fn text(&self) -> String {
        let mut out = format!("{}\n", self.title);
        if let Some(drain) = &self.drain {
            let _ = writeln!(out, "drain: {}", drain.text());
        }
        for section in self.sections.iter().filter(|section| !section.lines.is_empty()) {
            let _ = writeln!(out, "\n{}", section.name);
            for line in &section.lines {
                let _ = writeln!(out, "  {:<24}{:>14}", line.name, line.shown());
            }
        }
        out
    }

    pub fn json(&self) -> Value {
        let mut all = Map::new();
        all.insert("state".into(), json!(state_name(self.state)));
        all.insert("title".into(), json!(self.title));
        if let Some(Drain { remaining, left_ms }) = self.drain {
            all.insert("drain".into(), json!({"remaining": remaining, "left_ms": left_ms}));
        }
        let key = |name: &str| name.replace([' ', '-', '.'], "_");
        for section in &self.sections {
            let lines = section.lines.iter().map(|line| (key(&line.name), line.json()));
            all.insert(key(section.name), Value::Object(lines.collect()));
        }
        Value::Object(all)
    }
}

impl Drain {
    pub fn text(&self) -> String {
        format!("{} connections left, they close in {}", self.remaining, span(self.left_ms))
    }
}

impl Line {
    /// What is counted is a whole number, what is measured need not be.
    fn json(&self) -> Value {
        match self.unit {
            Unit::Count | Unit::Bytes => json!(self.value.round() as i64),
            Unit::Rate | Unit::ByteRate | Unit::Percent => json!((self.value * 1000.0).round() / 1000.0),
        }
    }

    /// For people: few digits, and the unit.
    pub fn shown(&self) -> String {
        match self.unit {
            Unit::Count => format!("{:.0}", self.value),
            Unit::Rate if self.value < 10.0 => format!("{:.1}/s", self.value),
            Unit::Rate => format!("{:.0}/s", self.value),
            Unit::Bytes => size(self.value),
            Unit::ByteRate => format!("{}/s", size(self.value)),
            Unit::Percent => format!("{:.1} %", self.value),
        }
    }
}

fn size(bytes: f64) -> String {
    let (mut value, mut units) = (bytes, ["B", "kB", "MB", "GB", "TB"].iter().peekable());
    loop {
        let unit = units.next().unwrap_or(&"TB");
        if value < 1000.0 || units.peek().is_none() {
            let digits = usize::from(*unit != "B" && value < 100.0);
            return format!("{value:.digits$} {unit}");
        }
        value /= 1000.0;
    }
}

struct Figures<'a> {
    before: Option<&'a Sample>,
    now: &'a Sample,
}

impl Figures<'_> {
    fn connections(&self) -> Section {
        let status = &self.now.status;
        let mut lines = vec![
            count("connections", status.connections),
            count("users", status.users),
            count("devices", status.devices),
        ];
        for (name, transport) in [("ws", &status.transports.ws), ("tcp", &status.transports.tcp)] {
            lines.extend(transport.as_ref().map(|transport| count(name, transport.connections)));
        }
        lines.extend(self.rate("opened", "bowline_gateway_opened_total"));
        lines.extend(self.rate("closed", "bowline_gateway_closed_total"));
        Section { name: "connections", lines }
    }

    fn traffic(&self) -> Section {
        let bytes =
            |name: &str, metric| self.rate(name, metric).map(|line| Line { unit: Unit::ByteRate, ..line });
        let lines = [
            self.rate("frames in", "bowline_gateway_frames_in_total"),
            self.rate("frames out", "bowline_gateway_frames_out_total"),
            bytes("bytes in", "bowline_gateway_received_bytes_total"),
            bytes("bytes out", "bowline_gateway_sent_bytes_total"),
        ];
        Section { name: "traffic", lines: lines.into_iter().flatten().collect() }
    }

    fn messages(&self) -> Section {
        let lines = [
            self.rate("stored", "bowline_router_messages_stored_total"),
            self.rate("accepted", "bowline_ledger_accepted_total"),
            self.rate("delivered", "bowline_ledger_delivered_total"),
            self.rate("pushed", "bowline_router_pushes_total"),
            self.rate("pushed again", "bowline_router_redeliveries_total"),
            self.rate("refused", "bowline_router_messages_refused_total"),
        ];
        Section { name: "messages", lines: lines.into_iter().flatten().collect() }
    }

    fn pressure(&self) -> Section {
        let lines = [
            self.gauge("paused now", "bowline_gateway_backpressure_paused"),
            self.rate("paused", "bowline_gateway_backpressure_paused_total"),
            self.gauge("queue depth", "bowline_router_queue_depth"),
            self.gauge("slow frames dropped", "bowline_gateway_slow_frames_dropped_total"),
            self.gauge("frames answered error", "bowline_gateway_ingress_failures_total"),
            self.gauge("transactions failed", "bowline_router_transactions_failed_total"),
        ];
        Section { name: "pressure", lines: lines.into_iter().flatten().collect() }
    }

    fn ledger(&self) -> Section {
        let lines = [
            self.gauge("accepted", "bowline_ledger_accepted_total"),
            self.gauge("delivered", "bowline_ledger_delivered_total"),
            self.gauge("waiting", "bowline_ledger_waiting"),
            self.gauge("expired", "bowline_ledger_expired_total"),
            self.gauge("dropped", "bowline_ledger_dropped_total"),
        ];
        Section { name: "ledger", lines: lines.into_iter().flatten().collect() }
    }

    fn process(&self) -> Section {
        let cpu = self.rate("cpu", "process_cpu_seconds_total");
        let cpu = cpu.map(|line| Line { value: line.value * 100.0, unit: Unit::Percent, ..line });
        let memory = self.gauge("memory", "process_resident_memory_bytes");
        let memory = memory.map(|line| Line { unit: Unit::Bytes, ..line });
        Section { name: "process", lines: cpu.into_iter().chain(memory).collect() }
    }

    /// Those that have happened, the most frequent first.
    fn family(&self, name: &'static str, metric: &str) -> Section {
        let mut lines: Vec<Line> = self
            .now
            .metrics
            .family(metric)
            .filter(|(_, value)| *value > 0.0)
            .map(|(name, value)| Line { name, value, unit: Unit::Count })
            .collect();
        lines.sort_by(|a, b| b.value.total_cmp(&a.value));
        Section { name, lines }
    }

    fn gauge(&self, name: &str, metric: &str) -> Option<Line> {
        let value = self.now.metrics.get(metric)?;
        Some(Line { name: name.to_owned(), value, unit: Unit::Count })
    }

    fn rate(&self, name: &str, metric: &str) -> Option<Line> {
        let now = self.now.metrics.get(metric)?;
        let (grown, seconds) = match self.before {
            Some(before) => {
                let passed = self.now.at.duration_since(before.at).as_secs_f64();
                (now - before.metrics.get(metric).unwrap_or_default(), passed)
            }
            None => (now, self.now.status.uptime_ms as f64 / 1000.0),
        };
        Some(Line { name: name.to_owned(), value: grown / seconds.max(0.001), unit: Unit::Rate })
    }
}

fn count(name: &str, value: u64) -> Line {
    Line { name: name.to_owned(), value: value as f64, unit: Unit::Count }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::top::sample::Metrics;
    use bowline_api::{Status, Transport, Transports};
    use std::time::{Duration, Instant};

    pub fn sample(at: Instant, boot: &str, metrics: &str) -> Sample {
        let transport =
            |connections| Some(Transport { address: "127.0.0.1:1".into(), path: None, connections });
        Sample {
            at,
            status: Status {
                node_id: "n1".into(),
                boot_id: boot.into(),
                version: "0.1.0".into(),
                state: State::Draining,
                uptime_ms: 90_000,
                connections: 12,
                users: 7,
                devices: 11,
                transports: Transports { ws: transport(9), tcp: transport(3) },
                drain: Some(bowline_api::Drain { deadline: crate::now_ms() + 20_000, remaining: 12 }),
            },
            metrics: Metrics::parse(metrics),
        }
    }

    #[test]
    fn rates_are_those_between_two_samples() {
        let began = Instant::now();
        let text = |n: u64| {
            format!(
                "bowline_gateway_frames_in_total {}\nbowline_gateway_closed_total{{reason=\"bye\"}} {n}\n\
                 bowline_gateway_closed_total{{reason=\"kicked\"}} 0\nprocess_cpu_seconds_total {}\n\
                 process_resident_memory_bytes 52428800\nbowline_ledger_waiting 4\n",
                n * 10,
                n as f64 / 10.0
            )
        };
        let before = sample(began, "a", &text(100));
        let after = sample(began + Duration::from_secs(2), "a", &text(110));
        let json = View::of(Some(&before), &after).json();
        assert_eq!(json["traffic"]["frames_in"], 50.0);
        assert_eq!(json["connections"]["closed"], 5.0);
        assert_eq!(json["connections"]["ws"], 9.0);
        assert_eq!(json["process"]["cpu"], 50.0);
        assert_eq!(json["closes"], json!({"bye": 110}));
        assert_eq!(json["ledger"]["waiting"], 4.0);
        assert_eq!(json["drain"]["remaining"], 12);
        // After a restart the counters begin anew.
        let restarted = sample(began + Duration::from_secs(2), "b", &text(9));
        let json = View::of(Some(&before), &restarted).json();
        assert_eq!(json["traffic"]["frames_in"], 1.0);
    }

    #[test]
    fn the_text_has_units() {
        let view = View::of(None, &sample(Instant::now(), "a", "process_resident_memory_bytes 52428800\n"));
        let text = view.text();
        for part in ["n1 · version 0.1.0 · draining · up 1 min 30 s", "12 connections left", "52.4 MB"] {
            assert!(text.contains(part), "{part} is missing in\n{text}");
        }
        for (bytes, shown) in [(0.0, "0 B"), (999.0, "999 B"), (1500.0, "1.5 kB"), (2e15, "2000 TB")] {
            assert_eq!(size(bytes), shown);
        }
    }
}
