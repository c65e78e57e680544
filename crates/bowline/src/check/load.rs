//! The clients: every device is a task that connects, sends, receives, acknowledges, fetches what it missed, and now
//! and then breaks off. It does what `docs/protocol.md` tells clients to do, and notes everything it sees.

mod timeline;

use super::{
    history::{Entry, Name, Told, What},
    plan::{Content, DevicePlan, Group, Target},
    wire::{Cut, Frame, Login, Socket},
};
use crate::token::Tokens;
use anyhow::{anyhow, bail};
use bowline_client::Trust;
use serde_json::json;
use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use timeline::Timeline;
use tokio::{
    sync::{mpsc, watch},
    time::{self, Instant},
};

/// Sends without an answer that a device has under way; it sends nothing new meanwhile.
const OUTBOX_MAX: usize = 400;
/// Sends that are repeated later, for each user.
const REPEATS_MAX: usize = 16;
/// What was due earlier than that is not caught up with.
const LAG_MAX: Duration = Duration::from_secs(5);
/// A connection without an answer for so long is given up.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long the last pushes may take before a device asks for them.
const PUSHES_WITHIN: Duration = Duration::from_secs(4);
/// After so much silence a device asks whether anybody is there.
const SILENCE: Duration = Duration::from_secs(30);

/// What all devices do now. Each goes on to the next when all are through.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Connect, and make the groups.
    Gather,
    Load,
    /// Nothing new is sent; everything that was is answered.
    Answer,
    /// Everything arrives.
    Catch,
    /// Everything is acknowledged.
    Tell,
    /// Everything is looked at from the beginning.
    Review,
    Over,
}

impl Phase {
    /// What a device could not do that did not get through it.
    pub fn what(self) -> &'static str {
        match self {
            Self::Gather => "connect",
            Self::Load | Self::Over => "go on",
            Self::Answer => "have its messages answered",
            Self::Catch => "receive what was sent",
            Self::Tell => "acknowledge what it received",
            Self::Review => "read the history to its end",
        }
    }
}

/// Notes what happens.
#[derive(Clone)]
pub struct Recorder {
    pub entries: mpsc::Sender<Entry>,
    pub began: Instant,
}

impl Recorder {
    pub async fn note(&self, device: Option<&Name>, what: What) {
        let us = self.began.elapsed().as_micros() as u64;
        // Whoever reads the entries ends early only when the disk fails, and then says so.
        let _ = self.entries.send(Entry { us, device: device.cloned(), what }).await;
    }
}

/// What the devices have in common.
pub struct Shared {
    pub recorder: Recorder,
    pub tokens: Arc<Tokens>,
    pub trust: Option<Trust>,
    pub conversations: Vec<Name>,
    pub by_conversation: HashMap<Name, usize>,
    /// The newest number that anybody was told of, by conversation.
    pub newest: Vec<AtomicU64>,
    pub users: HashMap<Name, Mutex<User>>,
    /// The phase that each device is through.
    pub through: Vec<Mutex<Option<Phase>>>,
    /// Why nothing will come of this run.
    pub fatal: OnceLock<String>,
    /// Why a device could not connect, the last time.
    pub trouble: Mutex<String>,
    /// Between two messages of a device.
    pub interval: Duration,
}

/// What the devices of one user have in common.
#[derive(Default)]
pub struct User {
    repeats: VecDeque<Outgoing>,
    read: HashMap<usize, u64>,
}

pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A message of this device.
#[derive(Debug, Clone)]
struct Outgoing {
    id: String,
    conversation: usize,
    peer: Option<Name>,
    /// On this connection.
    sent: Option<Instant>,
    /// On any.
    was_sent: bool,
    /// It was refused for now.
    not_before: Option<Instant>,
}

/// What was asked and is not answered.
enum Request {
    Fetch {
        conversation: usize,
        after: u64,
    },
    Group {
        conversation: Name,
    },
    /// All that was told is behind it.
    Probe,
    List,
    Review {
        conversation: usize,
        after: u64,
    },
}

/// How a connection ended, and how long the device stays away.
struct End {
    by_us: Option<Cut>,
    why: String,
    away: Duration,
}

pub struct Device {
    pub index: usize,
    pub plan: DevicePlan,
    pub groups: Vec<Group>,
    pub shared: Arc<Shared>,
    pub phase: watch::Receiver<Phase>,
    /// Where the servers are; empty while none is up.
    pub urls: watch::Receiver<Vec<String>>,
}

/// A device and what it remembers from one connection to the next.
struct Client {
    plan: DevicePlan,
    index: usize,
    shared: Arc<Shared>,
    phase: watch::Receiver<Phase>,
    random: fastrand::Rng,
    timelines: BTreeMap<usize, Timeline>,
    outbox: VecDeque<Outgoing>,
    groups: Vec<Group>,
    sent: u64,
    requested: u64,
    session: Option<String>,
    next_send: Option<Instant>,
    line: Option<Line>,
}

/// The connection.
struct Line {
    socket: Socket,
    is_connected: bool,
    began: Instant,
    heard: Instant,
    asked_at: Instant,
    requests: HashMap<String, (Request, Instant)>,
    next_recv: Option<Instant>,
    next_read: Instant,
    cut_at: Option<Instant>,
    /// What of the phase was begun, and when.
    begun: Option<(Phase, Instant)>,
    /// Conversations whose review is still to come.
    to_review: VecDeque<usize>,
}

impl Device {
    pub async fn run(self) {
        let Self { index, plan, groups, shared, phase, mut urls } = self;
        let conversations = plan.targets.iter().map(|target| (target.conversation, Timeline::default()));
        let mut client = Client {
            random: fastrand::Rng::with_seed(plan.seed),
            timelines: conversations.collect(),
            plan,
            index,
            shared,
            phase,
            outbox: VecDeque::new(),
            groups,
            sent: 0,
            requested: 0,
            session: None,
            next_send: None,
            line: None,
        };
        let mut failures = 0_u32;
        while client.now_is() != Phase::Over {
            let url = {
                let urls = urls.borrow_and_update();
                (!urls.is_empty()).then(|| urls[index % urls.len()].clone())
            };
            let Some(url) = url else {
                tokio::select! {
                    changed = urls.changed() => if changed.is_err() { return },
                    changed = client.phase.changed() => if changed.is_err() { return },
                }
                continue;
            };
            let end = match client.open(&url).await {
                Ok(()) => client.serve().await,
                Err(error) => {
                    failures += 1;
                    let most = Duration::from_millis(50 << failures.min(5));
                    let away = most.mul_f64(0.5 + client.random.f64() / 2.0);
                    End { by_us: None, why: format!("{error:#}"), away }
                }
            };
            if client.line.as_ref().is_some_and(|line| line.is_connected) {
                failures = 0;
            }
            let away = client.close(end).await;
            if client.shared.fatal.get().is_some() {
                return;
            }
            let _ = time::timeout(away, client.phase.wait_for(|phase| *phase == Phase::Over)).await;
        }
    }
}

impl Client {
    fn now_is(&self) -> Phase {
        *self.phase.borrow()
    }

    async fn note(&self, what: What) {
        self.shared.recorder.note(Some(&self.plan.name), what).await;
    }

    fn through(&self, phase: Phase) {
        *lock(&self.shared.through[self.index]) = Some(phase);
    }

    fn name_of(&self, conversation: usize) -> Name {
        self.shared.conversations[conversation].clone()
    }

    // --- connecting -----------------------------------------------------------------------------------------------

    async fn open(&mut self, url: &str) -> anyhow::Result<()> {
        let token = self.shared.tokens.one(&self.plan.user)?;
        let resume = self.session.take().filter(|_| self.random.bool());
        self.note(What::Opening).await;
        let login = Login {
            url,
            trust: self.shared.trust.as_ref(),
            token: &token,
            device_id: &self.plan.device_id,
            resume: resume.as_deref(),
            in_handshake: self.random.bool(),
        };
        let socket = Socket::open(&login).await?;
        let now = Instant::now();
        self.line = Some(Line {
            socket,
            is_connected: false,
            began: now,
            heard: now,
            asked_at: now,
            requests: HashMap::new(),
            next_recv: None,
            next_read: now + Duration::from_millis(self.random.u64(500..2500)),
            cut_at: None,
            begun: None,
            to_review: VecDeque::new(),
        });
        for outgoing in &mut self.outbox {
            outgoing.sent = None;
        }
        for timeline in self.timelines.values_mut() {
            timeline.on_closed();
        }
        Ok(())
    }

    async fn close(&mut self, end: End) -> Duration {
        let line = self.line.take();
        let was_open = line.is_some();
        if let (Some(line), Some(cut)) = (line, end.by_us) {
            // Noted first: what the server does from here on is not what this connection should have seen.
            self.note(What::Closed { by_us: true, why: end.why }).await;
            line.socket.cut(cut).await;
        } else if was_open {
            self.note(What::Closed { by_us: false, why: end.why }).await;
        } else {
            let is_refused = ["refused 4", "closed 45", "invalid peer certificate"]
                .iter()
                .any(|part| end.why.contains(part));
            if is_refused && !end.why.contains("refused 429") {
                let _ = self.shared.fatal.set(format!("{}: {}", self.plan.name, end.why));
            }
            *lock(&self.shared.trouble) = end.why;
        }
        end.away
    }

    async fn serve(&mut self) -> End {
        loop {
            if self.now_is() == Phase::Over {
                return End { by_us: Some(Cut::Clean), why: "the run is over".into(), away: Duration::ZERO };
            }
            let due = self.next_due();
            let Some(line) = &mut self.line else {
                return End { by_us: None, why: "no connection".into(), away: Duration::ZERO };
            };
            let frame = tokio::select! {
                frame = line.socket.next() => Some(frame),
                () = time::sleep_until(due) => None,
                _ = self.phase.changed() => None,
            };
            let done = match frame {
                Some(Ok(frame)) => self.on_frame(frame).await,
                Some(Err(error)) => Err(error),
                None => Ok(()),
            };
            let done = match done {
                Ok(()) => self.on_time().await,
                Err(error) => Err(error),
            };
            match done {
                Ok(None) => {}
                Ok(Some(cut)) => {
                    let away = match self.random.u8(..10) {
                        0..7 => self.random.u64(..200),
                        _ => self.random.u64(300..2500),
                    };
                    let away = Duration::from_millis(away);
                    return End { by_us: Some(cut), why: format!("{cut:?}").to_lowercase(), away };
                }
                Err(error) => {
                    let away = Duration::from_millis(self.random.u64(..150));
                    return End { by_us: None, why: format!("{error:#}"), away };
                }
            }
        }
    }

    fn next_due(&self) -> Instant {
        let now = Instant::now();
        let Some(line) = &self.line else { return now };
        let mut due = now + Duration::from_millis(500);
        let times = [line.next_recv, Some(line.next_read), line.cut_at, self.next_send];
        for time in times.into_iter().flatten() {
            due = due.min(time);
        }
        for timeline in self.timelines.values() {
            due = timeline.fetch_at(now).map_or(due, |at| due.min(at));
        }
        for outgoing in &self.outbox {
            due = outgoing.not_before.map_or(due, |at| due.min(at));
        }
        // What is long due waits for something else; it is looked at again soon.
        due.max(now + Duration::from_millis(2))
    }

    // --- what is due ----------------------------------------------------------------------------------------------

    async fn on_time(&mut self) -> anyhow::Result<Option<Cut>> {
        let (now, phase) = (Instant::now(), self.now_is());
        let Some(line) = &mut self.line else { bail!("no connection") };
        let silence = now - line.heard;
        let oldest = line.requests.values().map(|(_, at)| *at);
        let oldest = oldest.chain(self.outbox.iter().filter_map(|outgoing| outgoing.sent)).min();
        if oldest.is_some_and(|at| now - at > PATIENCE) || silence > SILENCE + PATIENCE {
            bail!("no answer for {} s", PATIENCE.as_secs());
        }
        if !line.is_connected {
            if now - line.began > PATIENCE {
                bail!("the server did not say `connected`");
            }
            return Ok(None);
        }
        if silence > SILENCE && now - line.asked_at > SILENCE {
            line.asked_at = now;
            line.socket.send(r#"{"type":"ping"}"#).await?;
        }
        if phase == Phase::Load && line.cut_at.is_some_and(|at| at <= now) {
            let how = [Cut::Clean, Cut::Reset, Cut::Reset, Cut::InFrame];
            return Ok(self.random.choice(how));
        }
        if phase == Phase::Load {
            self.send_due(now).await?;
        }
        self.flush(now).await?;
        self.fetch(now).await?;
        self.tell_due(now, phase).await?;
        self.on_phase(now, phase).await?;
        Ok(None)
    }

    /// Sends what is new.
    async fn send_due(&mut self, now: Instant) -> anyhow::Result<()> {
        let interval = self.shared.interval;
        let first = interval.mul_f64(self.random.f64());
        let mut due = *self.next_send.get_or_insert(now + first);
        due = now.checked_sub(LAG_MAX).map_or(due, |earliest| due.max(earliest));
        let mut burst = 0;
        while (due <= now || burst > 0) && self.outbox.len() < OUTBOX_MAX {
            if burst == 0 && self.random.u8(..25) == 0 {
                burst = self.random.u32(2..7);
            }
            burst = burst.saturating_sub(1);
            due += interval.mul_f64(0.5 + self.random.f64());
            let repeat = if self.random.u8(..25) == 0 { self.take_repeat() } else { None };
            if let Some(outgoing) = repeat {
                self.write(&outgoing, true).await?;
                continue;
            }
            let total: u32 = self.plan.targets.iter().map(|target| target.weight).sum();
            let mut pick = self.random.u32(..total.max(1));
            let chosen = self.plan.targets.iter().find(|target| {
                let is_it = pick < target.weight;
                pick = pick.saturating_sub(target.weight);
                is_it
            });
            let Some(Target { conversation, peer, .. }) = chosen.cloned() else { return Ok(()) };
            self.sent += 1;
            let id = format!("{}{}", self.plan.device_id, self.sent);
            // One may name the conversation of two as well as the other one.
            let peer = peer.filter(|_| self.random.u8(..4) > 0);
            self.outbox.push_back(Outgoing {
                id,
                conversation,
                peer,
                sent: None,
                was_sent: false,
                not_before: None,
            });
        }
        self.next_send = Some(due);
        Ok(())
    }

    fn take_repeat(&mut self) -> Option<Outgoing> {
        let user = self.shared.users.get(&self.plan.user)?;
        lock(user).repeats.pop_front()
    }

    /// Sends what is new or was not answered on an earlier connection, in the order in which it was first sent.
    async fn flush(&mut self, now: Instant) -> anyhow::Result<()> {
        for index in 0..self.outbox.len() {
            let outgoing = &mut self.outbox[index];
            if outgoing.sent.is_some() || outgoing.not_before.is_some_and(|at| at > now) {
                continue;
            }
            (outgoing.sent, outgoing.not_before) = (Some(now), None);
            let outgoing = outgoing.clone();
            let is_old = std::mem::replace(&mut self.outbox[index].was_sent, true);
            self.write(&outgoing, is_old).await?;
            if !is_old && self.random.u8(..50) == 0 {
                self.write(&outgoing, true).await?;
            }
        }
        Ok(())
    }

    async fn write(&mut self, outgoing: &Outgoing, again: bool) -> anyhow::Result<()> {
        let conversation = self.name_of(outgoing.conversation);
        self.note(What::Send { conversation: conversation.clone(), id: outgoing.id.clone(), again }).await;
        let (name, to) = match &outgoing.peer {
            Some(peer) => ("to", peer),
            None => ("conversation_id", &conversation),
        };
        let head = format!(r#"{{"type":"msg.send","id":"{}","{name}":"{to}""#, outgoing.id);
        let line = self.line.as_mut().ok_or_else(|| anyhow!("no connection"))?;
        match Content::of(&self.plan.user, &outgoing.id) {
            Content::Json(body) => line.socket.send(&format!("{head},\"body\":{body}}}")).await,
            Content::Binary(body) => line.socket.send_binary(&format!("{head}}}"), &body).await,
        }
    }

    async fn ask(&mut self, mut frame: serde_json::Value, request: Request) -> anyhow::Result<()> {
        self.requested += 1;
        let id = format!("?{}", self.requested);
        frame["id"] = json!(id);
        self.note(What::Ask { request: id.clone() }).await;
        let line = self.line.as_mut().ok_or_else(|| anyhow!("no connection"))?;
        line.requests.insert(id, (request, Instant::now()));
        line.socket.send(&frame.to_string()).await
    }

    /// Asks for what is missing.
    async fn fetch(&mut self, now: Instant) -> anyhow::Result<()> {
        let due: Vec<usize> = self
            .timelines
            .iter()
            .filter(|(_, timeline)| timeline.fetch_at(now) == Some(now))
            .map(|(conversation, _)| *conversation)
            .collect();
        for conversation in due {
            let Some(timeline) = self.timelines.get_mut(&conversation) else { continue };
            timeline.on_fetching();
            let (after, limit) = (timeline.contiguous(), self.random.u32(20..=200));
            let id = self.name_of(conversation);
            let frame =
                json!({"type": "history", "conversation_id": &*id, "after_seq": after, "limit": limit});
            self.ask(frame, Request::Fetch { conversation, after }).await?;
        }
        Ok(())
    }

    /// Acknowledges what has arrived, and reads some of it.
    async fn tell_due(&mut self, now: Instant, phase: Phase) -> anyhow::Result<()> {
        let Some(line) = &mut self.line else { return Ok(()) };
        let has_news = self.timelines.values().any(Timeline::has_news);
        if has_news && line.next_recv.is_none() {
            let delay_ms = match (self.plan.is_lazy && phase == Phase::Load, self.index % 3) {
                (true, _) => self.random.u64(3_500..6_500),
                (false, 0) => 0,
                (false, _) => self.random.u64(20..400),
            };
            line.next_recv = Some(now + Duration::from_millis(delay_ms));
        }
        if line.next_recv.is_some_and(|at| at <= now) {
            line.next_recv = None;
            let news =
                self.timelines.iter_mut().filter_map(|(c, timeline)| Some((*c, timeline.take_news()?)));
            for (conversation, seq) in news.collect::<Vec<_>>() {
                self.tell(conversation, seq, false).await?;
            }
        }
        let Some(line) = &mut self.line else { return Ok(()) };
        if phase == Phase::Load && line.next_read <= now {
            line.next_read = now + Duration::from_millis(self.random.u64(700..3_000));
            let held: Vec<(usize, u64)> = self
                .timelines
                .iter()
                .map(|(c, t)| (*c, t.contiguous()))
                .filter(|(_, seq)| *seq > 0)
                .collect();
            if let Some((conversation, newest)) = self.random.choice(held) {
                let seq = newest - self.random.u64(..newest.min(4));
                self.tell(conversation, seq, true).await?;
            }
        }
        Ok(())
    }

    async fn tell(&mut self, conversation: usize, seq: u64, read: bool) -> anyhow::Result<()> {
        let id = self.name_of(conversation);
        let kind = if read { "msg.read" } else { "msg.recv" };
        let text = format!(r#"{{"type":"{kind}","conversation_id":"{id}","seq":{seq}}}"#);
        if read {
            if let Some(user) = self.shared.users.get(&self.plan.user) {
                let mut user = lock(user);
                let position = user.read.entry(conversation).or_default();
                *position = seq.max(*position);
            }
            self.note(What::Read { conversation: id, seq }).await;
        } else {
            self.note(What::Recv { conversation: id, seq }).await;
        }
        let line = self.line.as_mut().ok_or_else(|| anyhow!("no connection"))?;
        line.socket.send(&text).await
    }

    // --- phases ---------------------------------------------------------------------------------------------------

    async fn on_phase(&mut self, now: Instant, phase: Phase) -> anyhow::Result<()> {
        let Some(line) = &mut self.line else { return Ok(()) };
        let since = match line.begun {
            Some((begun, at)) if begun == phase => Some(at),
            _ => None,
        };
        if since.is_none() {
            line.begun = Some((phase, now));
        }
        match phase {
            Phase::Gather => match (since, self.groups.is_empty()) {
                (_, true) => self.through(phase),
                (None, false) => {
                    for Group { conversation, members } in self.groups.clone() {
                        let group = conversation.trim_start_matches("g:");
                        let members: Vec<&str> = members.iter().map(|name| &**name).collect();
                        let frame =
                            json!({"type": "conversation.create", "group_id": group, "members": members});
                        self.ask(frame, Request::Group { conversation }).await?;
                    }
                }
                (Some(_), false) => {}
            },
            Phase::Load | Phase::Over => self.through(phase),
            Phase::Answer if self.outbox.is_empty() => self.through(phase),
            Phase::Answer => {}
            Phase::Catch => {
                let is_late = since.is_some_and(|at| now - at >= PUSHES_WITHIN);
                let mut is_through = true;
                for (conversation, timeline) in &mut self.timelines {
                    let newest = self.shared.newest[*conversation].load(Ordering::Relaxed);
                    if timeline.contiguous() >= newest {
                        continue;
                    }
                    if is_late && timeline.wants() < newest {
                        timeline.on_announced(newest);
                    }
                    is_through &= is_late && timeline.is_in_vain();
                }
                if is_through {
                    self.through(phase);
                }
            }
            Phase::Tell if since.is_none() => self.tell_everything().await?,
            Phase::Review if since.is_none() => {
                self.note(What::Reviewing).await;
                let conversations: Vec<usize> = self.timelines.keys().copied().collect();
                if let Some(line) = &mut self.line {
                    line.to_review = conversations.into();
                }
                self.ask(json!({"type": "conversation.list", "limit": 200}), Request::List).await?;
            }
            Phase::Tell | Phase::Review => {}
        }
        Ok(())
    }

    /// Whatever went down with a connection or a server is said again; then a question stands behind it.
    async fn tell_everything(&mut self) -> anyhow::Result<()> {
        let held: Vec<(usize, u64)> = self.timelines.iter().map(|(c, t)| (*c, t.contiguous())).collect();
        for (conversation, seq) in held.into_iter().filter(|(_, seq)| *seq > 0) {
            self.tell(conversation, seq, false).await?;
        }
        let read: Vec<(usize, u64)> = match self.shared.users.get(&self.plan.user) {
            Some(user) => lock(user).read.iter().map(|(c, seq)| (*c, *seq)).collect(),
            None => Vec::new(),
        };
        for (conversation, seq) in read {
            self.tell(conversation, seq, true).await?;
        }
        self.ask(json!({"type": "conversation.list", "limit": 1}), Request::Probe).await
    }

    async fn review_next(&mut self) -> anyhow::Result<()> {
        let next = self.line.as_mut().and_then(|line| line.to_review.pop_front());
        match next {
            Some(conversation) => self.review(conversation, 0).await,
            None => {
                self.note(What::Reviewed).await;
                self.through(Phase::Review);
                Ok(())
            }
        }
    }

    async fn review(&mut self, conversation: usize, after: u64) -> anyhow::Result<()> {
        let id = self.name_of(conversation);
        let frame = json!({"type": "history", "conversation_id": &*id, "after_seq": after, "limit": 200});
        self.ask(frame, Request::Review { conversation, after }).await
    }

    // --- what the server says -------------------------------------------------------------------------------------

    async fn on_frame(&mut self, frame: Frame) -> anyhow::Result<()> {
        let now = Instant::now();
        let Some(line) = &mut self.line else { bail!("no connection") };
        line.heard = now;
        match frame.kind.as_str() {
            "connected" => {
                line.is_connected = true;
                if !self.plan.is_steady {
                    line.cut_at = Some(now + Duration::from_millis(self.random.u64(500..16_000)));
                }
                self.session = Some(frame.session_id).filter(|id| !id.is_empty());
                self.note(What::Connected { resumed: frame.resumed }).await;
            }
            "ping" => {
                let pong = match frame.data {
                    Some(data) => json!({"type": "pong", "data": data}),
                    None => json!({"type": "pong"}),
                };
                line.socket.send(&pong.to_string()).await?;
            }
            "msg.push" => self.on_push(frame).await,
            "msg.ack" => self.on_ack(frame).await,
            "error" => self.on_error(frame, now).await?,
            "sync.notice" => {
                for line in frame.conversations {
                    if let Some(conversation) = self.held(&line.conversation_id)
                        && let Some(timeline) = self.timelines.get_mut(&conversation)
                    {
                        timeline.on_announced(line.last_seq);
                    }
                    let super::wire::Line {
                        conversation_id: conversation, first_seq, last_seq, unread, ..
                    } = line;
                    self.note(What::Notice { conversation, first_seq, last_seq, unread }).await;
                }
            }
            "history.page" => self.on_page(frame, now).await?,
            "conversation.page" => self.on_list(frame).await?,
            "ok" => {
                let id = frame.id.unwrap_or_default();
                if let Some((Request::Group { conversation }, _)) = line.requests.remove(&id) {
                    self.groups.retain(|group| group.conversation != conversation);
                }
            }
            "msg.receipt" => {
                let Frame { conversation_id: conversation, seq, user_id, receipt, .. } = frame;
                if let Some(user) = user_id {
                    let read = receipt.as_deref() == Some("read");
                    self.note(What::Receipt { conversation, seq, user, read }).await;
                }
            }
            "session.migrate" => bail!("the server asks its clients to go: {}", frame.reason),
            "session.closed" => {
                let code = frame.code.as_u64().unwrap_or_default();
                let why = format!("closed {code} {}", frame.reason);
                // 4501 is another connection of this device, which can only be our own.
                if (4500..5000).contains(&code) && code != 4501 {
                    let _ = self.shared.fatal.set(format!("{}: {why}", self.plan.name));
                }
                bail!(why);
            }
            _ => {}
        }
        Ok(())
    }

    fn held(&self, conversation: &str) -> Option<usize> {
        self.shared.by_conversation.get(conversation).copied()
    }

    fn told(&self, frame: Frame, conversation: &str) -> Told {
        let intact = frame.is_intact();
        let Frame { seq, id, from, ts, .. } = frame;
        Told { conversation: conversation.into(), seq, id: id.unwrap_or_default(), from, ts, intact }
    }

    fn on_number(&mut self, conversation: usize, seq: u64) {
        self.shared.newest[conversation].fetch_max(seq, Ordering::Relaxed);
        if let Some(timeline) = self.timelines.get_mut(&conversation) {
            timeline.on_message(seq);
        }
    }

    async fn on_push(&mut self, frame: Frame) {
        if let Some(conversation) = self.held(&frame.conversation_id) {
            self.on_number(conversation, frame.seq);
        }
        let redelivered = frame.redelivered;
        let conversation = frame.conversation_id.clone();
        self.note(What::Push { told: self.told(frame, &conversation), redelivered }).await;
    }

    async fn on_ack(&mut self, frame: Frame) {
        let Frame { id, conversation_id, seq, ts, .. } = frame;
        let id = id.unwrap_or_default();
        let is_own = id.starts_with(&self.plan.device_id);
        if let Some(conversation) = self.held(&conversation_id) {
            if is_own {
                self.on_number(conversation, seq);
            } else {
                self.shared.newest[conversation].fetch_max(seq, Ordering::Relaxed);
            }
        }
        if let Some(index) = self.outbox.iter().position(|outgoing| outgoing.id == id)
            && let Some(outgoing) = self.outbox.remove(index)
            && self.random.u8(..16) == 0
            && let Some(user) = self.shared.users.get(&self.plan.user)
        {
            let mut user = lock(user);
            if user.repeats.len() < REPEATS_MAX {
                user.repeats.push_back(outgoing);
            }
        }
        self.note(What::Ack { conversation: conversation_id, id, seq, ts }).await;
    }

    async fn on_error(&mut self, frame: Frame, now: Instant) -> anyhow::Result<()> {
        let code = frame.code.as_str().unwrap_or("internal").to_owned();
        let Some(id) = frame.id else { return Ok(()) };
        let for_now = matches!(code.as_str(), "rate_limited" | "overloaded" | "unavailable");
        let wait = Duration::from_millis(frame.retry_after_ms.unwrap_or(1_000).min(5_000));
        if let Some(index) = self.outbox.iter().position(|outgoing| outgoing.id == id) {
            if for_now {
                let outgoing = &mut self.outbox[index];
                (outgoing.sent, outgoing.not_before) = (None, Some(now + wait));
            } else {
                self.outbox.remove(index);
            }
            self.note(What::Refused { id, code, for_now }).await;
            return Ok(());
        }
        let Some((request, _)) = self.line.as_mut().and_then(|line| line.requests.remove(&id)) else {
            return Ok(());
        };
        match request {
            Request::Group { conversation } if code == "conflict" => {
                // An earlier connection made it.
                self.groups.retain(|group| group.conversation != conversation);
            }
            Request::Fetch { conversation, .. } => {
                if let Some(timeline) = self.timelines.get_mut(&conversation) {
                    timeline.on_page_end(now);
                }
            }
            // Nobody has ever written there.
            Request::Review { .. } if code == "forbidden" => self.review_next().await?,
            _ if for_now => {
                time::sleep(wait).await;
                bail!("{code}: {}", frame.message)
            }
            _ => bail!("{id} was refused: {code}: {}", frame.message),
        }
        Ok(())
    }

    async fn on_page(&mut self, frame: Frame, now: Instant) -> anyhow::Result<()> {
        let id = frame.id.unwrap_or_default();
        self.note(What::Answer { request: id.clone() }).await;
        let request = self.line.as_mut().and_then(|line| line.requests.remove(&id));
        let (conversation, after, is_review) = match request {
            Some((Request::Fetch { conversation, after }, _)) => (conversation, after, false),
            Some((Request::Review { conversation, after }, _)) => (conversation, after, true),
            _ => return Ok(()),
        };
        let name = self.name_of(conversation);
        self.note(What::Page { conversation: name.clone(), after }).await;
        let last = frame.messages.last().map(|row| row.seq);
        for row in frame.messages {
            self.on_number(conversation, row.seq);
            self.note(What::Row { told: self.told(row, &name) }).await;
        }
        match (is_review, last) {
            (true, Some(last)) if frame.more => self.review(conversation, last).await,
            (true, _) => self.review_next().await,
            (false, _) => {
                if let Some(timeline) = self.timelines.get_mut(&conversation) {
                    timeline.on_page_end(now);
                }
                Ok(())
            }
        }
    }

    async fn on_list(&mut self, frame: Frame) -> anyhow::Result<()> {
        let id = frame.id.unwrap_or_default();
        self.note(What::Answer { request: id.clone() }).await;
        match self.line.as_mut().and_then(|line| line.requests.remove(&id)) {
            Some((Request::Probe, _)) => self.through(Phase::Tell),
            Some((Request::List, _)) => {
                let after = frame.conversations.last().map(|line| line.conversation_id.clone());
                for line in frame.conversations {
                    let super::wire::Line {
                        conversation_id: conversation, last_seq, read_seq, unread, ..
                    } = line;
                    self.note(What::Listed { conversation, last_seq, read_seq, unread }).await;
                }
                match after.filter(|_| frame.more) {
                    Some(after) => {
                        let next = json!({"type": "conversation.list", "limit": 200, "after": after});
                        self.ask(next, Request::List).await?;
                    }
                    None => self.review_next().await?,
                }
            }
            _ => {}
        }
        Ok(())
    }
}
