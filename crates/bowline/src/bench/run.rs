//! The course of each scenario, and its figures.

use super::{
    Options, Report, Scenario,
    fleet::Fleet,
    job::{Order, Tally},
    net::now_us,
    plan::Plan,
    probe::{Pinging, Probe},
    report::{progress, seconds_bar},
    server::{self, Usage},
    stream::Tls,
    wire::Place,
};
use crate::cli::Failure;
use anyhow::{Context, bail};
use std::time::{Duration, Instant};

/// Sent before the measurement: conversations are opened, caches filled. A quarter of the duration, at most this.
const WARM_UP_MAX: Duration = Duration::from_secs(5);
/// Orders reach every worker before they take effect.
const LEAD: Duration = Duration::from_millis(50);
/// How long the results may take when everything is over.
const RESULTS_MAX: Duration = Duration::from_secs(30);
/// What became of those that stopped reading.
const STALLED: [&str; 5] =
    ["stalled", "stalled_closed", "stalled_slow_consumer", "stalled_recovered", "stalled_missing"];
/// The server has gone, or has closed everybody.
const ALL_LOST: &str = "every connection was lost before the end; is the server still running?";
/// How long the server's answers are watched before a storm.
const CALM: Duration = Duration::from_secs(1);

pub fn run(options: &Options) -> Result<Report, Failure> {
    let place = Place::parse(&options.url, options.ca.as_deref()).map_err(Failure::Usage)?;
    let tls = Tls::of(&place).map_err(Failure::Usage)?;
    crate::files::raise_limit();
    let plan = Plan::of(options, &place)?;
    let pid = options.server_pid.or_else(|| server::listener_of(&options.url));
    if pid.and_then(Usage::of).is_none() && !options.quiet {
        eprintln!(
            "the server's process is not found on this machine, or not readable; give --server-pid for its CPU and memory"
        );
    }
    let token = options.tokens.one("bench-probe").map_err(Failure::Failed)?;
    let probe = match Probe::open(&place, tls.as_ref(), &token) {
        // How many connections can be made is what this scenario finds out.
        Err(error) if options.scenario == Scenario::Idle && is_untrusted(&error) => {
            eprintln!("{error:#}");
            None
        }
        probe => Some(probe.map_err(Failure::Failed)?),
    };
    Bench { options, pid, plan: Some(plan) }.run(probe).map_err(Failure::Failed)
}

fn is_untrusted(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(rustls::Error::InvalidCertificate(_)))
}

struct Bench<'a> {
    options: &'a Options,
    pid: Option<u32>,
    plan: Option<Plan>,
}

/// What the server had used at two moments.
type Used = Option<(Usage, Usage)>;

impl Bench<'_> {
    fn run(&mut self, probe: Option<Probe>) -> anyhow::Result<Report> {
        match self.options.scenario {
            Scenario::Idle => self.idle(),
            Scenario::Pair => self.pair(),
            Scenario::Fanout => self.fanout(),
            Scenario::Storm => self.storm(probe.context("a storm has a probe")?),
        }
    }

    fn usage(&self) -> Option<Usage> {
        self.pid.and_then(Usage::of)
    }

    fn used_since(&self, before: Option<Usage>) -> Used {
        Some((before?, self.usage()?))
    }

    /// Opens all connections; whoever needs all of them fails when some could not be opened.
    fn open(&mut self, may_fail: bool) -> anyhow::Result<Fleet> {
        let plan = self.plan.take().context("the bench runs once")?;
        let count: usize = plan.jobs.iter().map(|job| job.count).sum();
        let mut fleet = Fleet::start(plan.jobs, plan.as_processes)?;
        let bar = progress(self.options.quiet, count as u64, "connecting")?;
        fleet.listen(None, |fleet| {
            if !fleet.is_ready() {
                bar.set_position(fleet.progress());
            }
            fleet.is_ready()
        })?;
        bar.finish_and_clear();
        let (_, failed) = fleet.ready_and_failed();
        let why = fleet.why.clone().unwrap_or_default();
        if failed > 0 && !may_fail {
            bail!("{failed} of {count} connections could not be opened, the first because of: {why}");
        }
        if failed > 0 {
            eprintln!("{failed} of {count} connections could not be opened, the first because of: {why}");
        }
        Ok(fleet)
    }

    fn idle(&mut self) -> anyhow::Result<Report> {
        let before = self.usage();
        let began = Instant::now();
        let mut fleet = self.open(true)?;
        let took = began.elapsed().as_secs_f64();
        let (opened, failed) = fleet.ready_and_failed();
        let mut report = Report::default();
        report.needed("connections", opened, "no connection could be opened");
        report.count("failed", failed, "");
        report.row("connections_opened", opened as f64 / took, "1/s");
        report.latencies("connect", &fleet.connect.histogram("connect"));
        if let Some((before, after)) = self.used_since(before) {
            let each = |used: f64| used / opened as f64;
            report.row("server_cpu_per_connection", each((after.cpu_us - before.cpu_us) as f64), "µs");
            let grown = after.anonymous_bytes as f64 - before.anonymous_bytes as f64;
            report.row("server_memory_per_connection", each(grown), "B");
        }
        let at_rest = self.usage();
        let held = Instant::now();
        // Without any there is nothing to hold.
        let duration = if opened > 0 { self.options.duration } else { Duration::ZERO };
        let bar = seconds_bar(self.options.quiet, duration, "holding")?;
        fleet.listen(Some(held + duration), |_| {
            bar.set_position(held.elapsed().as_secs());
            false
        })?;
        bar.finish_and_clear();
        let used = self.used_since(at_rest);
        let spent_us = held.elapsed().as_micros().max(1) as f64;
        fleet.order(Order::Finish)?;
        let tally = self.results(&mut fleet)?;
        report.count("lost_while_held", tally.get("lost"), "");
        report.fail_if(tally.get("lost") >= opened, ALL_LOST);
        if let Some((before, after)) = used {
            let share = (after.cpu_us - before.cpu_us) as f64 / spent_us;
            report.row("server_cpu_while_held", share * 100.0, "%");
        }
        fleet.order(Order::End)?;
        Ok(report)
    }

    fn results(&self, fleet: &mut Fleet) -> anyhow::Result<Tally> {
        fleet.listen(Some(Instant::now() + RESULTS_MAX), Fleet::has_results)?;
        if !fleet.has_results() {
            bail!("a worker of the bench gives no result");
        }
        Ok(fleet.sum())
    }

    /// Warms up, measures, and waits for the last messages.
    fn measure(&self, fleet: &mut Fleet, what: &'static str) -> anyhow::Result<(Tally, Used)> {
        let duration = self.options.duration;
        let (began, began_us) = (Instant::now() + LEAD, now_us() + LEAD.as_micros() as u64);
        let warm_up = (duration / 4).min(WARM_UP_MAX);
        let epoch = began + warm_up;
        let epoch_us = began_us + warm_up.as_micros() as u64;
        let until_us = epoch_us + duration.as_micros() as u64;
        fleet.order(Order::Go { began_us, epoch_us, until_us })?;
        fleet.listen(Some(epoch), |_| false)?;
        let before = self.usage();
        let bar = seconds_bar(self.options.quiet, duration, what)?;
        let at_epoch = fleet.progress();
        fleet.listen(Some(epoch + duration), |fleet| {
            let elapsed = epoch.elapsed().as_secs_f64().max(0.1);
            bar.set_position(elapsed as u64);
            let rate = fleet.progress().saturating_sub(at_epoch) as f64 / elapsed;
            bar.set_message(format!("{rate:.0} messages/s"));
            false
        })?;
        let used = self.used_since(before);
        bar.finish_and_clear();
        let tally = self.results(fleet)?;
        if let (Some(why), false) = (&fleet.why, self.options.quiet) {
            eprintln!("some messages were refused: {why}");
        }
        Ok((tally, used))
    }

    fn pair(&mut self) -> anyhow::Result<Report> {
        let mut fleet = self.open(false)?;
        let (count, _) = fleet.ready_and_failed();
        let (tally, used) = self.measure(&mut fleet, "sending")?;
        let mut report = Report::default();
        report.count("connections", count, "");
        let acknowledged = tally.get("acknowledged");
        report.needed("acknowledged", acknowledged, "no message was acknowledged");
        for name in ["delivered", "refused", "out_of_order", "redelivered", "unanswered", "lost"] {
            report.count(name, tally.get(name), "");
        }
        report.fail_if(tally.get("delivered") == 0, "no message was delivered");
        report.fail_if(tally.get("lost") >= count, ALL_LOST);
        report.row("acknowledged_rate", acknowledged as f64 / self.options.duration.as_secs_f64(), "1/s");
        report.latencies("send_to_ack", &tally.histogram("ack"));
        report.latencies("send_to_push", &tally.histogram("push"));
        if let Some((before, after)) = used {
            let cpu_s = (after.cpu_us - before.cpu_us) as f64 / 1e6;
            report.row("server_cpu", cpu_s, "s");
            report.row("messages_per_server_cpu_second", acknowledged as f64 / cpu_s.max(0.01), "");
            report.row("server_cpu_per_message", cpu_s * 1e6 / acknowledged.max(1) as f64, "µs");
            let written = after.written_bytes.saturating_sub(before.written_bytes) as f64;
            report.row("server_written_per_message", written / acknowledged.max(1) as f64, "B");
            report.count("server_memory", after.anonymous_bytes, "B");
        }
        fleet.order(Order::End)?;
        Ok(report)
    }

    fn fanout(&mut self) -> anyhow::Result<Report> {
        let mut fleet = self.open(false)?;
        let (count, _) = fleet.ready_and_failed();
        let (tally, used) = self.measure(&mut fleet, "publishing")?;
        let mut report = Report::default();
        let seconds = self.options.duration.as_secs_f64();
        let (published, deliveries) = (tally.get("published"), tally.get("deliveries"));
        report.count("connections", count, "");
        report.needed("published", published, "no message was published");
        report.row("published_rate", published as f64 / seconds, "1/s");
        report.needed("deliveries", deliveries, "no message was delivered");
        report.row("deliveries_rate", deliveries as f64 / seconds, "1/s");
        let stalled = self.options.stalled as u64;
        let expected = published * (count - stalled);
        let measured = tally.get("measured");
        report.count("missing", expected.saturating_sub(measured), "");
        report.fail_if(measured == 0, "no member got what was published");
        for name in ["gaps", "reordered", "slow_consumers", "lost", "refused", "stalls"] {
            report.count(name, tally.get(name), "");
        }
        report.fail_if(tally.get("lost") >= count - stalled, ALL_LOST);
        report.latencies("publish_to_receive", &tally.histogram("publish"));
        if stalled > 0 {
            for name in STALLED {
                report.count(name, tally.get(name), "");
            }
        }
        if let Some((before, after)) = used {
            let cpu_s = (after.cpu_us - before.cpu_us) as f64 / 1e6;
            report.row("server_cpu", cpu_s, "s");
            report.row("deliveries_per_server_cpu_second", deliveries as f64 / cpu_s.max(0.01), "");
            report.row("server_cpu_per_message", cpu_s * 1e6 / published.max(1) as f64, "µs");
            report.count("server_memory", after.anonymous_bytes, "B");
        }
        fleet.order(Order::End)?;
        Ok(report)
    }

    fn storm(&mut self, probe: Probe) -> anyhow::Result<Report> {
        let mut fleet = self.open(false)?;
        let (count, _) = fleet.ready_and_failed();
        let pinging = Pinging::start(probe)?;
        fleet.listen(Some(Instant::now() + CALM), |_| false)?;
        let (probe, before_us, _) = pinging.stop()?;
        let before = self.usage();
        let pinging = Pinging::start(probe)?;
        let limit = self.options.duration;
        fleet.order(Order::Drop { until_us: now_us() + limit.as_micros() as u64 })?;
        let bar = progress(self.options.quiet, count, "coming back")?;
        fleet.listen(Some(Instant::now() + limit + RESULTS_MAX), |fleet| {
            bar.set_position(fleet.progress());
            fleet.has_results()
        })?;
        bar.finish_and_clear();
        let used = self.used_since(before);
        let (_, during_us, is_probe_lost) = pinging.stop()?;
        let tally = self.results(&mut fleet)?;
        fleet.order(Order::End)?;

        let mut report = Report::default();
        let back = tally.get("back");
        let returns = tally.histogram("return");
        report.count("connections", count, "");
        report.needed("back", back, "no connection came back");
        report.count("not_back", count - back, "");
        report.row("all_back", if back == count { returns.max() as f64 / 1e6 } else { f64::NAN }, "s");
        report.count("attempts", tally.get("attempts"), "");
        let (too_many, unavailable) = (tally.get("refused_429"), tally.get("refused_503"));
        let refused: u64 = tally.family("refused_").map(|(_, count)| count).sum();
        report.count("refused_429", too_many, "");
        report.count("refused_503", unavailable, "");
        report.count("refused_other", refused - too_many - unavailable, "");
        report.count("failures", tally.get("failures"), "");
        report.count("lost_again", tally.get("lost_again"), "");
        report.count("peak_accepted", tally.peak_per_second(), "1/s");
        report.latencies("return", &returns);
        report.latencies("ping_before", &before_us);
        report.latencies("ping_storm", &during_us);
        report.count("probe_lost", u64::from(is_probe_lost), "");
        if let Some((before, after)) = used {
            let cpu_us = (after.cpu_us - before.cpu_us) as f64;
            report.row("server_cpu", cpu_us / 1e6, "s");
            report.row("server_cpu_per_return", cpu_us / back.max(1) as f64, "µs");
        }
        Ok(report)
    }
}
