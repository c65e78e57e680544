//! Pairs of users send each other durable messages; every push is acknowledged, as a client does.

use super::{Options, Report, idle, progress, report, server::Usage, used};
use bowline_client::{Body, Client, Event, Events, core::Target};
use hdrhistogram::Histogram;
use std::{
    collections::HashMap,
    time::{Duration, Instant},
};
use tokio::task::JoinSet;

/// Sent before the measurement: conversations are opened, caches filled. A quarter of the duration, at most this.
const WARM_UP_MAX: Duration = Duration::from_secs(5);

/// How long the last messages may take to arrive after the end.
const DRAIN: Duration = Duration::from_secs(10);

struct Tally {
    acked: u64,
    delivered: u64,
    refused: u64,
    out_of_order: u64,
    ack_us: Histogram<u64>,
    push_us: Histogram<u64>,
}

impl Tally {
    fn new() -> Self {
        let (ack_us, push_us) = (report::histogram(), report::histogram());
        Self { acked: 0, delivered: 0, refused: 0, out_of_order: 0, ack_us, push_us }
    }

    fn add(&mut self, other: Self) -> anyhow::Result<()> {
        self.acked += other.acked;
        self.delivered += other.delivered;
        self.refused += other.refused;
        self.out_of_order += other.out_of_order;
        self.ack_us.add(other.ack_us)?;
        self.push_us.add(other.push_us)?;
        Ok(())
    }
}

pub async fn run(options: &Options, pid: Option<u32>) -> anyhow::Result<Report> {
    let even = Options { connections: options.connections & !1, ..options.clone() };
    let (clients, _, failed) = idle::open_all(&even).await?;
    if failed > 0 {
        anyhow::bail!("{failed} of {} connections could not be opened", even.connections);
    }
    let began = Instant::now();
    let epoch = began + (options.duration / 4).min(WARM_UP_MAX);
    let interval =
        options.rate.map(|rate| Duration::from_secs_f64(clients.len() as f64 / rate.max(1) as f64));
    let mut tasks = JoinSet::new();
    let count = clients.len();
    for (number, (client, events)) in clients.into_iter().enumerate() {
        let one = Pair {
            client,
            events,
            peer: format!("u{}", number ^ 1),
            began,
            epoch,
            until: epoch + options.duration,
            // Spread over one interval, so that not everybody sends at once.
            due: began + interval.unwrap_or_default().mul_f64(number as f64 / count as f64),
            interval,
            filler: "x".repeat(options.body_bytes.saturating_sub(STAMP_BYTES)),
        };
        tasks.spawn(one.run());
    }
    tokio::time::sleep_until(epoch.into()).await;
    let before = pid.and_then(Usage::of);
    let bar = progress(options, options.duration.as_secs(), "sending")?;
    let ticker = bar.clone();
    let duration = options.duration;
    let tick = tokio::spawn(async move {
        while epoch.elapsed() < duration {
            tokio::time::sleep(Duration::from_millis(500)).await;
            ticker.set_position(epoch.elapsed().as_secs());
        }
    });
    let mut tally = Tally::new();
    while let Some(one) = tasks.join_next().await {
        tally.add(one??)?;
    }
    tick.await?;
    bar.finish_and_clear();

    let mut report = Report::default();
    report.row("connections", count as f64, "");
    report.row("acknowledged", tally.acked as f64, "");
    report.row("delivered", tally.delivered as f64, "");
    report.row("refused", tally.refused as f64, "");
    report.row("out_of_order", tally.out_of_order as f64, "");
    report.row("acknowledged_rate", tally.acked as f64 / options.duration.as_secs_f64(), "1/s");
    report.latencies("send_to_ack", &tally.ack_us);
    report.latencies("send_to_push", &tally.push_us);
    if let Some((before, after)) = used(pid, before) {
        let cpu_s = (after.cpu_us - before.cpu_us) as f64 / 1e6;
        report.row("server_cpu", cpu_s, "s");
        report.row("messages_per_server_cpu_second", tally.acked as f64 / cpu_s.max(0.001), "");
        let written = after.written_bytes.saturating_sub(before.written_bytes) as f64;
        report.row("server_written_per_message", written / tally.acked.max(1) as f64, "B");
    }
    Ok(report)
}

struct Pair {
    client: Client,
    events: Events,
    peer: String,
    began: Instant,
    /// Where the measurement begins: what was due earlier is not counted.
    epoch: Instant,
    until: Instant,
    due: Instant,
    interval: Option<Duration>,
    filler: String,
}

/// A body begins with the time at which it was due, in microseconds since the first one: 16 digits.
const STAMP_BYTES: usize = 16;

impl Pair {
    async fn run(mut self) -> anyhow::Result<Tally> {
        let mut tally = Tally::new();
        let mut under_way: HashMap<String, Instant> = HashMap::new();
        let mut newest = 0;
        let mut may_send = true;
        loop {
            let now = Instant::now();
            let is_over = now >= self.until;
            if is_over && under_way.is_empty() && now >= self.until + Duration::from_millis(200) {
                return Ok(tally);
            }
            if now >= self.until + DRAIN {
                return Ok(tally);
            }
            let sends = !is_over && may_send && (self.interval.is_some() || under_way.is_empty());
            if sends && now >= self.due {
                let due = if self.interval.is_some() { self.due } else { now };
                let stamp = (due - self.began).as_micros();
                let body = Body::Json(format!("\"{stamp:016}{}\"", self.filler));
                let id = self.client.send(Target::User(self.peer.clone()), body).await?;
                under_way.insert(id, due);
                may_send = self.interval.is_some();
                self.due += self.interval.unwrap_or_default();
                continue;
            }
            let wake = if sends {
                self.due
            } else if is_over {
                now + Duration::from_millis(100)
            } else {
                self.until
            };
            let event = tokio::select! {
                event = self.events.recv() => event,
                () = tokio::time::sleep_until(wake.into()) => continue,
            };
            match event {
                Some(Event::Acked { id, .. }) => {
                    if let Some(due) = under_way.remove(&id)
                        && due >= self.epoch
                    {
                        tally.acked += 1;
                        tally.ack_us.saturating_record(due.elapsed().as_micros() as u64);
                    }
                    may_send = true;
                }
                Some(Event::Failed { id, .. }) => {
                    under_way.remove(&id);
                    tally.refused += 1;
                    may_send = true;
                }
                Some(Event::Message(message)) => {
                    tally.out_of_order += u64::from(message.seq <= newest);
                    newest = message.seq;
                    if let Body::Json(text) = &message.body
                        && let Some(stamp) = text.get(1..1 + STAMP_BYTES).and_then(|s| s.parse::<u64>().ok())
                    {
                        let due = self.began + Duration::from_micros(stamp);
                        if due >= self.epoch {
                            tally.delivered += 1;
                            tally.push_us.saturating_record(due.elapsed().as_micros() as u64);
                        }
                    }
                }
                Some(_) => {}
                None => return Ok(tally),
            }
        }
    }
}
