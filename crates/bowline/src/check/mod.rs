//! `bowline check`: a load with faults on real servers, everything that clients saw written down, and a verdict.
//!
//! Clients are bare connections (`wire`), because a client library repairs gaps and hides doubles. They do what the
//! protocol tells clients (`load`); what they saw is the history (`history`), and `judge` reads it. Without an address
//! the run starts a server of its own and kills it every few seconds (`servers`).

mod history;
mod judge;
mod load;
mod plan;
mod ranges;
mod servers;
mod wire;

pub use servers::LedgerSource;
pub use wire::address_of;

use crate::token::Tokens;
use anyhow::{Context, anyhow, bail};
use bowline_client::Trust;
use history::{What, Writer};
use judge::{Judge, Kind, Verdict};
use load::{Device, Phase, Recorder, Shared, lock};
use plan::Plan;
use serde_json::{Map, Value, json};
use servers::{Server, Setup};
use std::{
    fmt::Write,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, OnceLock, atomic::AtomicU64},
    time::Duration,
};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::{mpsc, watch},
    time::{self, Instant},
};

/// Entries that wait to be written down.
const ENTRIES_MAX: usize = 1 << 16;
/// How long the devices may take to connect.
const GATHER_WITHIN: Duration = Duration::from_secs(30);
/// How long each phase after the load may take; more for a long run, which leaves more to read.
const SETTLE_WITHIN: Duration = Duration::from_secs(60);
/// How often a server that others started is asked for its ledger.
const LEDGER_EVERY: Duration = Duration::from_secs(1);

pub struct Options {
    pub at: At,
    pub duration: Duration,
    pub users: usize,
    /// Messages a second in all.
    pub rate: u64,
    pub seed: u64,
    pub tokens: Arc<Tokens>,
    /// Whose certificates are taken for good; needed where an address asks for TLS.
    pub trust: Option<Trust>,
    /// Where the history is to be; none is a folder that is removed when the verdict is clean.
    pub history: Option<PathBuf>,
    pub quiet: bool,
}

/// Which servers are checked.
pub enum At {
    /// One of our own, which is killed.
    Own(Box<OwnServer>),
    /// Those at these addresses, which are left alone.
    Urls { urls: Vec<String>, ledger: Option<LedgerSource> },
}

pub struct OwnServer {
    pub arguments: Vec<String>,
    pub secret: String,
    pub api_key: String,
    /// None is below the folder of the run.
    pub data: Option<PathBuf>,
}

pub struct Report {
    verdict: Verdict,
    users: usize,
    devices: usize,
    seed: u64,
    seconds: f64,
    /// What was kept of the run.
    history: Option<PathBuf>,
    /// What the clients saw of the first violation.
    events: Vec<String>,
}

pub fn run(options: Options) -> anyhow::Result<Report> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(check(options))
}

async fn check(options: Options) -> anyhow::Result<Report> {
    let folder = tempfile::Builder::new().prefix("bowline-check-").tempdir();
    let folder = folder.context("a folder for the run cannot be made")?;
    let path = options.history.clone().unwrap_or_else(|| folder.path().join("history.ndjson"));
    let run = format!("{:06x}", u32::from_le_bytes(crate::random()?[..4].try_into()?) & 0xff_ffff);
    let plan = Plan::new(&run, options.users, options.seed);
    let writer = Writer::create(&path, &plan.world)?;
    let judged = conduct(&options, &plan, writer, folder.path()).await;
    let (verdict, seconds) = match judged {
        Ok(judged) => judged,
        Err(error) => {
            let kept = folder.keep();
            return Err(error.context(format!("the run is in {}", kept.display())));
        }
    };
    let mut report = Report {
        users: options.users,
        devices: plan.devices.len(),
        seed: options.seed,
        seconds,
        history: Some(path),
        events: Vec::new(),
        verdict,
    };
    if report.verdict.is_clean() {
        report.history = options.history;
        folder.close().context("the folder of the run cannot be removed")?;
    } else {
        // The server's data and log stay beside the history.
        let _ = folder.keep();
        report.explain()?;
    }
    Ok(report)
}

/// Plays the run from its beginning to its end.
async fn conduct(
    options: &Options,
    plan: &Plan,
    mut writer: Writer,
    folder: &Path,
) -> anyhow::Result<(Verdict, f64)> {
    let (entries, mut receiver) = mpsc::channel(ENTRIES_MAX);
    let recorder = Recorder { entries, began: Instant::now() };
    let mut judge = Judge::new(&plan.world);
    // Judged as it is written, on a thread of its own.
    let judging = std::thread::Builder::new().name("judge".into()).spawn(move || {
        let mut written = Ok(());
        let mut last_us = 0;
        while let Some(entry) = receiver.blocking_recv() {
            last_us = entry.us;
            judge.on(&entry);
            if written.is_ok() {
                written = writer.write(&entry);
            }
        }
        written.and_then(|()| writer.finish()).map(|()| (judge.finish(last_us), last_us as f64 / 1e6))
    });
    let judging = judging.context("the judge's thread cannot be started")?;
    let mut interrupts = interrupts()?;
    let ran = tokio::select! {
        ran = play(options, plan, &recorder, folder, interrupts.clone()) => ran,
        _ = interrupts.wait_for(|count| *count > 1) => Err(anyhow!("interrupted")),
    };
    drop(recorder);
    let judged = tokio::task::spawn_blocking(move || judging.join());
    let judged = judged.await?.map_err(|_| anyhow!("the judge's thread has failed"))?;
    ran.and(judged)
}

/// How often this program was asked to end: the first time what was done so far is judged, the second time it ends.
fn interrupts() -> anyhow::Result<watch::Receiver<u32>> {
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let (count, receiver) = watch::channel(0);
    tokio::spawn(async move {
        loop {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
            count.send_modify(|count| *count += 1);
        }
    });
    Ok(receiver)
}

async fn play(
    options: &Options,
    plan: &Plan,
    recorder: &Recorder,
    folder: &Path,
    mut interrupts: watch::Receiver<u32>,
) -> anyhow::Result<()> {
    let (mut own, urls, ledger) = match &options.at {
        At::Own(own) => {
            let server = Server::start(Setup {
                arguments: own.arguments.clone(),
                data: own.data.clone().unwrap_or_else(|| folder.join("data")),
                log: folder.join("server.log"),
                secret: own.secret.clone(),
                api_key: own.api_key.clone(),
            });
            let server = server.await?;
            let urls = server.urls();
            (Some(server), urls, None)
        }
        At::Urls { urls, ledger } => (None, urls.clone(), ledger.clone()),
    };
    let (urls, phase) = (watch::Sender::new(urls), watch::Sender::new(Phase::Gather));
    let shared = Arc::new(shared(options, plan, recorder));
    let mut tasks = tokio::task::JoinSet::new();
    for (index, device) in plan.devices.iter().enumerate() {
        let is_first = plan.devices.iter().position(|other| other.user == device.user) == Some(index);
        let owned = plan.groups.iter().filter(|group| is_first && group.members[0] == device.user);
        let device = Device {
            index,
            plan: device.clone(),
            groups: owned.cloned().collect(),
            shared: shared.clone(),
            phase: phase.subscribe(),
            urls: urls.subscribe(),
        };
        tasks.spawn(device.run());
    }
    let crew = Crew { shared: &shared, plan, phase: &phase };
    if let Some(device) = crew.late_at(Phase::Gather, GATHER_WITHIN).await? {
        bail!("{} could not connect: {}", plan.devices[device].name, lock(&shared.trouble));
    }

    phase.send_replace(Phase::Load);
    let until = Instant::now() + options.duration;
    let progress = tokio::spawn(progress(options.duration, options.quiet));
    let seed = options.seed ^ 0x6b69_6c6c;
    let stop = watch::Sender::new(false);
    let mut stopped = stop.subscribe();
    let loading = load_until(until, own.as_mut(), seed, ledger.as_ref(), recorder, &urls, &mut stopped);
    let stopping = async {
        tokio::select! {
            () = crew.fatal() => {}
            _ = interrupts.wait_for(|count| *count > 0) => {}
        }
        stop.send_replace(true);
        std::future::pending::<()>().await;
    };
    let loaded = tokio::select! {
        ended = loading => ended,
        () = stopping => Ok(()),
    };
    progress.abort();
    loaded?;

    for next in [Phase::Answer, Phase::Catch, Phase::Tell, Phase::Review] {
        phase.send_replace(next);
        if crew.late_at(next, SETTLE_WITHIN + options.duration / 4).await?.is_some() {
            break;
        }
        if next == Phase::Tell
            && let Some(server) = &own
        {
            note_rest(server, recorder).await?;
        }
    }
    for (index, device) in plan.devices.iter().enumerate() {
        let now = *phase.borrow();
        if *lock(&shared.through[index]) < Some(now) {
            let what = now.what().to_owned();
            recorder.note(Some(&device.name), What::Unfinished { what }).await;
        }
    }
    if let Some(source) = &ledger {
        servers::note_ledger(source, recorder, false).await?;
    }
    phase.send_replace(Phase::Over);
    while let Some(ended) = tasks.join_next().await {
        ended.context("a device's task has failed")?;
    }
    Ok(())
}

/// The load, and what is done to the server meanwhile.
async fn load_until(
    until: Instant,
    own: Option<&mut Server>,
    seed: u64,
    ledger: Option<&LedgerSource>,
    recorder: &Recorder,
    urls: &watch::Sender<Vec<String>>,
    stop: &mut watch::Receiver<bool>,
) -> anyhow::Result<()> {
    if let Some(server) = own {
        return server.torment(until, seed, recorder, urls, stop).await;
    }
    while Instant::now() < until && !*stop.borrow() {
        if let Some(source) = ledger {
            servers::note_ledger(source, recorder, false).await?;
        }
        let next = until.min(Instant::now() + LEDGER_EVERY);
        let _ = time::timeout_at(next, stop.wait_for(|stop| *stop)).await;
    }
    Ok(())
}

/// Everything was acknowledged. The last positions may still be on their way to the disk.
async fn note_rest(server: &Server, recorder: &Recorder) -> anyhow::Result<()> {
    let source = server.ledger();
    for _ in 0..50 {
        if source.read().await?.waiting == 0 {
            break;
        }
        time::sleep(Duration::from_millis(100)).await;
    }
    servers::note_ledger(&source, recorder, true).await.map(drop)
}

fn shared(options: &Options, plan: &Plan, recorder: &Recorder) -> Shared {
    let conversations: Vec<_> = plan.world.conversations.iter().map(|info| info.id.clone()).collect();
    Shared {
        recorder: recorder.clone(),
        tokens: options.tokens.clone(),
        trust: options.trust.clone(),
        by_conversation: conversations.iter().cloned().enumerate().map(|(index, id)| (id, index)).collect(),
        newest: conversations.iter().map(|_| AtomicU64::new(0)).collect(),
        conversations,
        users: plan.devices.iter().map(|device| (device.user.clone(), Mutex::default())).collect(),
        through: plan.devices.iter().map(|_| Mutex::new(None)).collect(),
        fatal: OnceLock::new(),
        trouble: Mutex::default(),
        interval: Duration::from_secs_f64(plan.devices.len() as f64 / options.rate as f64),
    }
}

/// The devices, seen from outside.
struct Crew<'a> {
    shared: &'a Shared,
    plan: &'a Plan,
    phase: &'a watch::Sender<Phase>,
}

impl Crew<'_> {
    /// Waits until all are through; whoever is not in time.
    async fn late_at(&self, phase: Phase, within: Duration) -> anyhow::Result<Option<usize>> {
        debug_assert_eq!(*self.phase.borrow(), phase);
        let end = Instant::now() + within;
        loop {
            if let Some(why) = self.shared.fatal.get() {
                bail!("the server turned a client away for good: {why}");
            }
            let late = (0..self.plan.devices.len()).find(|n| *lock(&self.shared.through[*n]) < Some(phase));
            if late.is_none() || Instant::now() >= end {
                return Ok(late);
            }
            time::sleep(Duration::from_millis(20)).await;
        }
    }

    async fn fatal(&self) {
        while self.shared.fatal.get().is_none() {
            time::sleep(Duration::from_millis(100)).await;
        }
    }
}

async fn progress(duration: Duration, quiet: bool) {
    let style = indicatif::ProgressStyle::with_template("checking {bar:30} {pos}/{len} s");
    let (false, Ok(style)) = (quiet, style) else { return };
    let bar = indicatif::ProgressBar::new(duration.as_secs()).with_style(style);
    let began = Instant::now();
    while began.elapsed() < duration {
        bar.set_position(began.elapsed().as_secs());
        time::sleep(Duration::from_millis(250)).await;
    }
    bar.finish_and_clear();
}

// --- the result ---------------------------------------------------------------------------------------------------

impl Report {
    pub fn is_clean(&self) -> bool {
        self.verdict.is_clean()
    }

    fn explain(&mut self) -> anyhow::Result<()> {
        if let (Some(first), Some(path)) = (self.verdict.violations.first(), &self.history) {
            let (conversation, id) = (first.conversation.as_deref(), first.id.as_deref());
            self.events = history::events_of(path, conversation, first.seq, id)?;
        }
        Ok(())
    }

    pub fn json(&self) -> Value {
        let verdict = &self.verdict;
        let mut fields = Map::new();
        let mut put = |name: &str, value: Value| fields.insert(name.to_owned(), value);
        put("verdict", json!(if self.is_clean() { "clean" } else { "violated" }));
        put("sent", json!(verdict.sent));
        put("acked", json!(verdict.acked));
        put("delivered", json!(verdict.delivered));
        for kind in Kind::ALL {
            put(kind.name(), json!(verdict.count(kind)));
        }
        put("kills", json!(verdict.kills));
        put("reconnects", json!(verdict.reconnects));
        put("seconds", json!((self.seconds * 1000.0).round() / 1000.0));
        put("repeated", json!(verdict.repeated));
        put("redelivered", json!(verdict.redelivered));
        put("users", json!(self.users));
        put("devices", json!(self.devices));
        put("seed", json!(self.seed));
        if let Some(path) = &self.history {
            put("history", json!(path));
        }
        if let Some(first) = verdict.violations.first() {
            put(
                "first_violation",
                json!({"kind": first.kind.name(), "text": first.text, "events": self.events}),
            );
        }
        Value::Object(fields)
    }

    pub fn human(&self) -> String {
        let verdict = &self.verdict;
        let mut out = format!("verdict: {}\n", if self.is_clean() { "clean" } else { "violated" });
        // Writing to a string cannot fail.
        let _ = writeln!(
            out,
            "{} messages sent ({} repeats), {} acknowledged, {} delivered to {} devices of {} users ({} again)",
            verdict.sent,
            verdict.repeated,
            verdict.acked,
            verdict.delivered,
            self.devices,
            self.users,
            verdict.redelivered
        );
        let _ = writeln!(
            out,
            "{} kills, {} reconnects in {:.1} s; seed {}",
            verdict.kills, verdict.reconnects, self.seconds, self.seed
        );
        let counts: Vec<String> =
            Kind::ALL.iter().map(|kind| format!("{} {}", kind.name(), verdict.count(*kind))).collect();
        let _ = writeln!(out, "{}", counts.join(", "));
        if let Some((first, rest)) = verdict.violations.split_first() {
            let _ = writeln!(out, "\nfirst violation ({}): {}", first.kind.name(), first.text);
            for event in &self.events {
                let _ = writeln!(out, "    {event}");
            }
            for violation in rest {
                let _ = writeln!(out, "also ({}): {}", violation.kind.name(), violation.text);
            }
        }
        if let Some(path) = &self.history {
            let _ = writeln!(out, "history: {}", path.display());
        }
        out
    }

    /// One line on what was broken.
    pub fn broken(&self) -> String {
        let counts = Kind::ALL.iter().map(|kind| (kind.name(), self.verdict.count(*kind)));
        let counts: Vec<String> =
            counts.filter(|(_, count)| *count > 0).map(|(name, count)| format!("{name} {count}")).collect();
        format!("what was promised does not hold: {}", counts.join(", "))
    }
}
