//! One worker: a thread of the bench, or a process of its own where one process may not open enough files.

use super::{
    Scenario, fanout, idle,
    job::{Job, Order, Told},
    net::{self, Net, Play, now_us},
    pair, storm,
};
use anyhow::{Context, bail};
use mio::{Interest, Token};
use std::{
    io::{self, BufRead, BufReader, Read, Write},
    os::{fd::AsFd, unix::net::UnixStream},
    time::Duration,
};

const CONTROL: Token = Token(usize::MAX);
const ALARM: Token = Token(usize::MAX - 1);
const EVENTS_MAX: usize = 1024;
/// How often progress is told and time-outs are looked at.
const TICK_US: u64 = 200_000;

/// The hidden command: the link to the bench is standard input, which is a socket.
pub fn run_as_process() -> anyhow::Result<()> {
    let link = io::stdin().as_fd().try_clone_to_owned().context("standard input")?;
    run(UnixStream::from(link))
}

/// Takes a job from the link, does it, and says how it went.
pub fn run(link: UnixStream) -> anyhow::Result<()> {
    let mut line = String::new();
    // Nothing follows the job before it is answered, so nothing stays behind in this buffer.
    BufReader::new(&link).read_line(&mut line).context("the job cannot be read")?;
    let job: Job = serde_json::from_str(&line).context("the job is none")?;
    let mut worker = Worker::new(job, link)?;
    let result = worker.run();
    if let Err(error) = &result {
        worker.control.tell(&Told::Failed(format!("{error:#}")))?;
        worker.control.flush_all()?;
    }
    Ok(())
}

struct Worker {
    job: Job,
    net: Net,
    play: Box<dyn Play>,
    control: Control,
    alarm: Alarm,
    next_open: usize,
    is_ready: bool,
    has_told: bool,
}

impl Worker {
    fn new(job: Job, link: UnixStream) -> anyhow::Result<Self> {
        crate::files::raise_limit();
        let net = Net::new(&job)?;
        let play: Box<dyn Play> = match job.scenario {
            Scenario::Idle => Box::new(idle::Idle::new()),
            Scenario::Pair => Box::new(pair::Pair::new(&job)),
            Scenario::Fanout => Box::new(fanout::Fanout::new(&job)),
            Scenario::Storm => Box::new(storm::Storm::new(&job)?),
        };
        let control = Control::new(link, net.registry())?;
        let alarm = Alarm::new(net.registry())?;
        Ok(Self { job, net, play, control, alarm, next_open: 0, is_ready: false, has_told: false })
    }

    fn run(&mut self) -> anyhow::Result<()> {
        let mut events = mio::Events::with_capacity(EVENTS_MAX);
        let mut buffer = net::read_buffer();
        let mut tick_us = now_us();
        loop {
            let now = now_us();
            self.open_some(now)?;
            let due = self.play.on_time(&mut self.net, now);
            self.net.flush(&mut *self.play, now);
            self.tell(now)?;
            if now >= tick_us {
                tick_us = now + TICK_US;
                self.net.expire(&mut *self.play, now);
                self.tell_progress()?;
            }
            self.control.flush()?;
            let wake_us = due.unwrap_or(u64::MAX).min(tick_us);
            let wait = self.alarm.set(wake_us, now)?;
            self.net.poll(&mut events, wait)?;
            for event in &events {
                match event.token() {
                    CONTROL => {
                        for order in self.control.take_orders()? {
                            if order == Order::End {
                                return Ok(());
                            }
                            self.play.on_order(&mut self.net, order, now_us());
                        }
                    }
                    // Setting it again takes back what it had to say.
                    ALARM => {}
                    Token(index) => {
                        self.net.on_ready(&mut *self.play, index, event, &mut buffer, now_us());
                    }
                }
            }
        }
    }

    /// Opens connections, some at a time.
    fn open_some(&mut self, now: u64) -> anyhow::Result<()> {
        if self.next_open == self.job.count {
            return Ok(());
        }
        let readiness = self.play.readiness();
        let settled = (readiness.ready + readiness.failed) as usize;
        while self.next_open < self.job.count && self.next_open < settled + self.job.opening_max {
            self.net.open(self.next_open, now).with_context(|| {
                format!("connection {} cannot be opened", self.job.first + self.next_open)
            })?;
            self.next_open += 1;
        }
        Ok(())
    }

    fn tell(&mut self, now: u64) -> anyhow::Result<()> {
        while let Some(message) = self.play.take_arrived() {
            self.control.tell(&Told::Arrived { message })?;
        }
        if !self.is_ready {
            let readiness = self.play.readiness();
            if readiness.ready + readiness.failed == self.job.count as u64 {
                self.is_ready = true;
                let mut tally = super::job::Tally::default();
                if let Some(histogram) = &readiness.connect_us {
                    tally.times("connect", histogram);
                }
                let (ready, failed, why) = (readiness.ready, readiness.failed, readiness.why.clone());
                self.control.tell(&Told::Ready { ready, failed, why, tally })?;
            }
        } else if !self.has_told && self.play.is_over(now) {
            self.has_told = true;
            self.control.tell(&Told::Result(self.play.tally()))?;
        }
        Ok(())
    }

    fn tell_progress(&mut self) -> anyhow::Result<()> {
        let told = if self.is_ready {
            Told::Progress { done: self.play.done() }
        } else {
            let readiness = self.play.readiness();
            Told::Opening { ready: readiness.ready, failed: readiness.failed }
        };
        self.control.tell(&told)
    }
}

/// The worker's end of the link. It never waits for the bench to read.
struct Control {
    stream: mio::net::UnixStream,
    read: Vec<u8>,
    unsent: Vec<u8>,
}

impl Control {
    fn new(link: UnixStream, registry: &mio::Registry) -> anyhow::Result<Self> {
        link.set_nonblocking(true)?;
        let mut stream = mio::net::UnixStream::from_std(link);
        registry.register(&mut stream, CONTROL, Interest::READABLE | Interest::WRITABLE)?;
        Ok(Self { stream, read: Vec::new(), unsent: Vec::new() })
    }

    fn tell(&mut self, told: &Told) -> anyhow::Result<()> {
        serde_json::to_writer(&mut self.unsent, told)?;
        self.unsent.push(b'\n');
        Ok(())
    }

    fn flush(&mut self) -> anyhow::Result<()> {
        while !self.unsent.is_empty() {
            match self.stream.write(&self.unsent) {
                Ok(count) => drop(self.unsent.drain(..count)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => bail!("the bench is gone: {error}"),
            }
        }
        Ok(())
    }

    /// Waits until everything is written.
    fn flush_all(&mut self) -> anyhow::Result<()> {
        while !self.unsent.is_empty() {
            self.flush()?;
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    fn take_orders(&mut self) -> anyhow::Result<Vec<Order>> {
        let mut chunk = [0; 4096];
        loop {
            match self.stream.read(&mut chunk) {
                // The bench has gone; so does the worker.
                Ok(0) => return Ok(vec![Order::End]),
                Ok(count) => self.read.extend_from_slice(&chunk[..count]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => bail!("the bench is gone: {error}"),
            }
        }
        let end = self.read.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        let whole: Vec<u8> = self.read.drain(..end).collect();
        let lines = whole.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
        lines.map(|line| serde_json::from_slice(line).context("an order is none")).collect()
    }
}

/// Wakes the poll to the microsecond; a poll alone counts in milliseconds.
struct Alarm {
    #[cfg(target_os = "linux")]
    timer: std::os::fd::OwnedFd,
    #[cfg(target_os = "linux")]
    set_us: u64,
}

#[cfg(target_os = "linux")]
impl Alarm {
    fn new(registry: &mio::Registry) -> anyhow::Result<Self> {
        use rustix::time::{TimerfdClockId, TimerfdFlags};
        use std::os::fd::AsRawFd;
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        let timer = rustix::time::timerfd_create(TimerfdClockId::Monotonic, flags)?;
        registry.register(&mut mio::unix::SourceFd(&timer.as_raw_fd()), ALARM, Interest::READABLE)?;
        Ok(Self { timer, set_us: 0 })
    }

    /// How long the poll may wait, besides.
    fn set(&mut self, wake_us: u64, now_us: u64) -> anyhow::Result<Option<Duration>> {
        use rustix::time::{Itimerspec, TimerfdTimerFlags, Timespec};
        if wake_us <= now_us {
            return Ok(Some(Duration::ZERO));
        }
        if std::mem::replace(&mut self.set_us, wake_us) == wake_us {
            return Ok(None);
        }
        let at = |us: u64| Timespec { tv_sec: (us / 1_000_000) as _, tv_nsec: (us % 1_000_000 * 1000) as _ };
        let once = Itimerspec { it_interval: at(0), it_value: at(wake_us) };
        rustix::time::timerfd_settime(&self.timer, TimerfdTimerFlags::ABSTIME, &once)?;
        Ok(None)
    }
}

#[cfg(not(target_os = "linux"))]
impl Alarm {
    fn new(_registry: &mio::Registry) -> anyhow::Result<Self> {
        Ok(Self {})
    }

    fn set(&mut self, wake_us: u64, now_us: u64) -> anyhow::Result<Option<Duration>> {
        Ok(Some(Duration::from_micros(wake_us.saturating_sub(now_us))))
    }
}
