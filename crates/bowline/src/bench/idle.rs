//! Opens connections, one after the other as fast as they are accepted, and holds them.

use super::{Options, Report, progress, report, server::Usage, used};
use anyhow::bail;
use bowline_client::{Client, Config, Event, Events};
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

/// Connections that are being opened at once.
const OPENING_MAX: usize = 64;

/// Opens connection `number`; returns it with the time that took.
pub async fn open(options: &Options, number: usize) -> anyhow::Result<(Client, Events, Duration)> {
    let user = format!("u{number}");
    let mut config = Config::with_token(&options.url, &(options.tokens)(&user)?);
    config.settings.device_id = Some("bench".into());
    config.trust = options.trust.clone();
    let began = Instant::now();
    let (client, mut events) = bowline_client::connect(config)?;
    loop {
        match events.recv().await {
            Some(Event::Connected { .. }) => return Ok((client, events, began.elapsed())),
            Some(Event::Disconnected { code, reason, .. }) => {
                bail!("connection {number} was not accepted: {} {reason}", code.unwrap_or_default())
            }
            Some(Event::Stopped { code, reason }) => {
                bail!("connection {number} was refused: {code} {reason}")
            }
            Some(_) => {}
            None => bail!("connection {number} ended"),
        }
    }
}

/// Opens all connections; what failed is counted.
pub async fn open_all(
    options: &Options,
) -> anyhow::Result<(Vec<(Client, Events)>, hdrhistogram::Histogram<u64>, usize)> {
    let bar = progress(options, options.connections as u64, "connecting")?;
    let mut times = report::histogram();
    let mut slots: Vec<Option<(Client, Events)>> = (0..options.connections).map(|_| None).collect();
    let mut failed = 0;
    let mut opening = JoinSet::new();
    let mut next = 0;
    while next < options.connections || !opening.is_empty() {
        while next < options.connections && opening.len() < OPENING_MAX {
            let (one, number) = (options.clone(), next);
            opening.spawn(async move { (number, open(&one, number).await) });
            next += 1;
        }
        match opening.join_next().await {
            Some(Ok((number, Ok((client, events, took))))) => {
                times.saturating_record(took.as_micros() as u64);
                slots[number] = Some((client, events));
            }
            Some(Ok((_, Err(error)))) => {
                failed += 1;
                bar.set_message(error.to_string());
            }
            Some(Err(error)) => bail!("a connection's task failed: {error}"),
            None => break,
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok((slots.into_iter().flatten().collect(), times, failed))
}

pub async fn run(options: &Options, pid: Option<u32>) -> anyhow::Result<Report> {
    let before = pid.and_then(Usage::of);
    let began = Instant::now();
    let (mut clients, times, failed) = open_all(options).await?;
    let took = began.elapsed().as_secs_f64();
    let opened = clients.len() as f64;
    let mut report = Report::default();
    report.row("connections", opened, "");
    report.row("failed", failed as f64, "");
    report.row("connections_opened", opened / took, "1/s");
    report.latencies("connect", &times);
    let at_rest = pid.and_then(Usage::of);
    if let Some((before, after)) = used(pid, before) {
        report.row("server_cpu_per_connection", (after.cpu_us - before.cpu_us) as f64 / opened, "µs");
        let grown = after.anonymous_bytes as f64 - before.anonymous_bytes as f64;
        report.row("server_memory_per_connection", grown / opened, "B");
    }
    let bar = progress(options, options.duration.as_secs(), "holding")?;
    let held = Instant::now();
    while held.elapsed() < options.duration {
        tokio::time::sleep((options.duration - held.elapsed()).min(Duration::from_secs(1))).await;
        bar.set_position(held.elapsed().as_secs());
    }
    bar.finish_and_clear();
    let mut lost = 0;
    for (_, events) in &mut clients {
        while let Ok(event) = events.try_recv() {
            lost += usize::from(matches!(event, Event::Disconnected { .. } | Event::Stopped { .. }));
        }
    }
    report.row("lost_while_held", lost as f64, "");
    if let Some((before, after)) = used(pid, at_rest) {
        let share = (after.cpu_us - before.cpu_us) as f64 / options.duration.as_micros().max(1) as f64;
        report.row("server_cpu_while_held", share * 100.0, "%");
    }
    Ok(report)
}
