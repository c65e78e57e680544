//! A loaded server that is restarted under its clients: each comes back at its own time, and no message is lost or
//! doubled.

use crate::{Setup, server::Server, token, wait};
use bowline_client::{Body, Client, Config, Event, core::Target};
use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::{sync::Semaphore, task::JoinSet};

/// Connections that are being opened at once at the start.
const OPENING_MAX: usize = 64;
/// How long the last messages may take to arrive.
const SETTLE: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Copy)]
pub struct Options {
    pub connections: usize,
    /// Messages a second, of all.
    pub rate: usize,
    pub restarts: usize,
    /// `gateway.migrate_spread_ms`.
    pub spread: Duration,
    /// Load before, between and after the restarts.
    pub calm: Duration,
}

/// What the clients saw.
#[derive(Debug, Default)]
pub struct Report {
    pub sent: usize,
    pub acked: usize,
    pub delivered: usize,
    /// Acknowledged and never delivered.
    pub lost: usize,
    /// Delivered more than once, or under another number.
    pub doubled: usize,
    pub out_of_order: usize,
    /// Ends of connections, all of them caused by the restarts.
    pub moves: usize,
    /// Ends for which the server named no delay.
    pub unannounced: usize,
    /// For each restart, the most clients that came back within one second.
    pub peak_per_second: Vec<usize>,
    /// The longest time that a client was away beyond the delay that the server gave it.
    pub longest_beyond_delay: Duration,
    /// The same, where the server was not back yet at that time: counted from when it was.
    pub longest_beyond_return: Duration,
    /// For each restart, how long the server took to end after the signal, and then was away.
    pub ending: Vec<Duration>,
    pub down: Vec<Duration>,
}

#[derive(Default)]
struct Record {
    sent: usize,
    /// By id: conversation and number.
    acked: HashMap<String, (String, u64)>,
    /// By id: number, and how often it came.
    delivered: HashMap<String, (u64, usize)>,
    out_of_order: usize,
    /// (ended, delay that was named, back again)
    moves: Vec<(Instant, Option<Duration>, Instant)>,
}

struct World {
    record: Mutex<Record>,
    connected: AtomicUsize,
    /// No more messages are begun.
    ending: AtomicBool,
    options: Options,
}

impl World {
    fn record(&self) -> MutexGuard<'_, Record> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub fn run(options: Options) -> Report {
    let spread_ms = options.spread.as_millis().to_string();
    let mut server = Setup::new().set("gateway.migrate_spread_ms", spread_ms).start();
    let world = Arc::new(World {
        record: Mutex::default(),
        connected: AtomicUsize::new(0),
        ending: AtomicBool::new(false),
        options,
    });
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let runtime = runtime.expect("threads for the clients");
    let mut clients = JoinSet::new();
    runtime.block_on(async {
        let opening = Arc::new(Semaphore::new(OPENING_MAX));
        for number in 0..options.connections {
            clients.spawn(client(world.clone(), number, server.ws().to_string(), opening.clone()));
        }
    });
    all_connected(&world, "at the start");
    let mut report = Report::default();
    let mut returns = Vec::new();
    std::thread::sleep(options.calm);
    for _ in 0..options.restarts {
        let moves_before = world.record().moves.len();
        let asked = Instant::now();
        server.signal("TERM");
        server.wait_end(Duration::from_secs(60));
        let ended = Instant::now();
        report.ending.push(ended - asked);
        server.restart_in_place();
        report.down.push(ended.elapsed());
        returns.push(Instant::now());
        wait::until_within(options.spread + SETTLE, "everybody has moved", || {
            (world.record().moves.len() >= moves_before + options.connections).then_some(())
        });
        all_connected(&world, "after a restart");
        report.peak_per_second.push(peak_per_second(&world.record().moves[moves_before..]));
        std::thread::sleep(options.calm);
    }
    world.ending.store(true, Ordering::Release);
    settle(&world);
    assert_balanced(&server);
    drop(runtime);
    judge(&world.record(), &returns, report)
}

fn all_connected(world: &World, when: &str) {
    wait::until_within(world.options.spread + SETTLE, &format!("all are connected {when}"), || {
        (world.connected.load(Ordering::Acquire) == world.options.connections).then_some(())
    });
}

/// Waits until everything that was sent is acknowledged and has arrived, or nothing moves any more.
fn settle(world: &World) {
    let end = Instant::now() + SETTLE;
    loop {
        let record = world.record();
        let done = record.acked.len() == record.sent && record.delivered.len() == record.sent;
        drop(record);
        if done || Instant::now() > end {
            return;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn assert_balanced(server: &Server) {
    wait::until("the ledger says that nothing waits", || {
        (server.metrics().get("bowline_ledger_waiting") == 0.0).then_some(())
    });
    server.metrics().assert_ledger_balances();
}

fn judge(record: &Record, returns: &[Instant], report: Report) -> Report {
    let delivered_as = |id: &String| record.delivered.get(id).copied().unwrap_or_default();
    let doubled = record.acked.iter().filter(|(id, (_, seq))| {
        let (number, times) = delivered_as(id);
        times > 1 || (times == 1 && number != *seq)
    });
    let beyond = record
        .moves
        .iter()
        .filter_map(|(ended, delay, back)| Some(back.duration_since(*ended).saturating_sub((*delay)?)));
    // The return that a client came back to is the last one before it did.
    let returned = |back: Instant| returns.iter().copied().filter(|at| *at <= back).max();
    let beyond_return = record.moves.iter().filter_map(|(ended, delay, back)| {
        let due = (*ended + (*delay)?).max(returned(*back).unwrap_or(*ended));
        Some(back.saturating_duration_since(due))
    });
    Report {
        longest_beyond_return: beyond_return.max().unwrap_or_default(),
        sent: record.sent,
        acked: record.acked.len(),
        delivered: record.delivered.len(),
        lost: record.acked.keys().filter(|id| delivered_as(id).1 == 0).count(),
        doubled: doubled.count(),
        out_of_order: record.out_of_order,
        moves: record.moves.len(),
        unannounced: record.moves.iter().filter(|(_, delay, _)| delay.is_none()).count(),
        longest_beyond_delay: beyond.max().unwrap_or_default(),
        ..report
    }
}

fn peak_per_second(moves: &[(Instant, Option<Duration>, Instant)]) -> usize {
    let mut back: Vec<Instant> = moves.iter().map(|(_, _, back)| *back).collect();
    back.sort();
    let second = Duration::from_secs(1);
    let within = |from: Instant| back.iter().filter(|at| (from..from + second).contains(*at)).count();
    back.iter().step_by(back.len() / 200 + 1).map(|from| within(*from)).max().unwrap_or(0)
}

/// One user: sends to its neighbour at its share of the rate, and notes what it sees.
async fn client(world: Arc<World>, number: usize, address: String, opening: Arc<Semaphore>) {
    let slot = opening.acquire_owned().await.expect("nobody closes it");
    let mut config = Config::with_token(&format!("ws://{address}/ws"), &token::of(&format!("r{number}")));
    config.settings.device_id = Some("d".into());
    let (client, mut events) = bowline_client::connect(config).expect("the address is good");
    let mut away: Option<(Instant, Option<Duration>)> = None;
    let interval =
        Duration::from_secs_f64(world.options.connections as f64 / world.options.rate.max(1) as f64);
    let mut due = None;
    let mut newest = HashMap::new();
    let mut next = 0;
    let mut slot = Some(slot);
    loop {
        let sleep = match due {
            Some(at) if !world.ending.load(Ordering::Acquire) => at,
            _ => Instant::now() + Duration::from_secs(1),
        };
        let event = tokio::select! {
            event = events.recv() => event,
            () = tokio::time::sleep_until(sleep.into()) => {
                if let Some(at) = due.filter(|at| *at <= Instant::now() && !world.ending.load(Ordering::Acquire)) {
                    due = Some(at + interval);
                    next += 1;
                    send(&world, &client, number, next).await;
                }
                continue;
            }
        };
        let Some(event) = event else { return };
        match event {
            Event::Connected { .. } => {
                world.connected.fetch_add(1, Ordering::AcqRel);
                slot.take();
                if let Some((ended, delay)) = away.take() {
                    world.record().moves.push((ended, delay, Instant::now()));
                }
                // Spread over one interval.
                due.get_or_insert_with(|| {
                    Instant::now() + interval.mul_f64(number as f64 / world.options.connections as f64)
                });
            }
            Event::Disconnected { code, retry_in_ms, .. } => {
                let announced = (code == Some(1001)).then(|| Duration::from_millis(retry_in_ms));
                if away.is_none() {
                    world.connected.fetch_sub(1, Ordering::AcqRel);
                    away = Some((Instant::now(), announced));
                }
            }
            Event::Acked { id, conversation_id, seq, .. } => {
                world.record().acked.insert(id, (conversation_id, seq));
            }
            Event::Message(message) => {
                let last = newest.entry(message.conversation_id).or_insert(0);
                let mut record = world.record();
                record.out_of_order += usize::from(message.seq <= *last);
                *last = message.seq;
                let entry = record.delivered.entry(message.id).or_insert((message.seq, 0));
                entry.1 += 1;
            }
            Event::Stopped { code, reason } => panic!("client {number} was stopped: {code} {reason}"),
            Event::Failed { id, code, message } => panic!("{id} was refused: {code} {message}"),
            _ => {}
        }
    }
}

async fn send(world: &World, client: &Client, number: usize, next: usize) {
    let id = format!("r{number}-{next}");
    world.record().sent += 1;
    let body = Body::Json(format!("\"{id}\""));
    let target = Target::User(format!("r{}", number ^ 1));
    client.send_with_id(&id, target, body).await.unwrap_or_else(|error| panic!("{id}: {error}"));
}
