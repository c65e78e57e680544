//! The workers as the bench sees them: threads or processes, each at the end of a link.

use super::job::{Job, Order, Tally, Told};
use anyhow::{Context, anyhow, bail};
use std::{
    io::{BufRead, BufReader, Write},
    os::{fd::OwnedFd, unix::net::UnixStream},
    process::{Child, Command, Stdio},
    sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel},
    time::{Duration, Instant},
};

/// What workers have said and nobody has looked at; they wait beyond.
const INBOX_MAX: usize = 4096;

pub struct Fleet {
    links: Vec<UnixStream>,
    children: Vec<Child>,
    /// `None` is the end of a worker.
    inbox: Receiver<(usize, Option<Told>)>,
    progress: Vec<u64>,
    pub readiness: Vec<Option<(u64, u64)>>,
    /// Why a connection could not be made.
    pub why: Option<String>,
    pub connect: Tally,
    results: Vec<Option<Tally>>,
}

impl Fleet {
    /// One worker is a thread, several are processes.
    pub fn start(jobs: Vec<Job>, as_processes: bool) -> anyhow::Result<Self> {
        let (sender, inbox) = sync_channel(INBOX_MAX);
        let count = jobs.len();
        let mut fleet = Self {
            links: Vec::new(),
            children: Vec::new(),
            inbox,
            progress: vec![0; count],
            readiness: vec![None; count],
            why: None,
            connect: Tally::default(),
            results: vec![None; count],
        };
        for (number, job) in jobs.into_iter().enumerate() {
            let (mut link, end) = UnixStream::pair().context("a link to a worker")?;
            if as_processes {
                fleet.children.push(spawn(end)?);
            } else {
                std::thread::Builder::new().name("bench".into()).spawn(move || super::worker::run(end))?;
            }
            let mut line = serde_json::to_vec(&job)?;
            line.push(b'\n');
            link.write_all(&line).context("a worker takes no job")?;
            listen(number, link.try_clone()?, sender.clone())?;
            fleet.links.push(link);
        }
        Ok(fleet)
    }

    pub fn order(&mut self, order: Order) -> anyhow::Result<()> {
        (0..self.links.len()).try_for_each(|worker| self.order_one(worker, order))
    }

    fn order_one(&mut self, worker: usize, order: Order) -> anyhow::Result<()> {
        let mut line = serde_json::to_vec(&order)?;
        line.push(b'\n');
        self.links[worker].write_all(&line).context("a worker takes no orders")
    }

    /// Takes in what workers say until `is_enough`, or the time.
    pub fn listen(
        &mut self,
        until: Option<Instant>,
        mut is_enough: impl FnMut(&Self) -> bool,
    ) -> anyhow::Result<()> {
        loop {
            if is_enough(self) {
                return Ok(());
            }
            // Now and then, so that whoever asks can look at the clock.
            let mut wait = Duration::from_millis(200);
            if let Some(until) = until {
                match until.checked_duration_since(Instant::now()) {
                    Some(left) if !left.is_zero() => wait = wait.min(left),
                    _ => return Ok(()),
                }
            }
            match self.inbox.recv_timeout(wait) {
                Ok((worker, told)) => self.take(worker, told)?,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => bail!("the workers of the bench have ended"),
            }
        }
    }

    fn take(&mut self, worker: usize, told: Option<Told>) -> anyhow::Result<()> {
        match told {
            Some(Told::Opening { ready, failed }) => self.progress[worker] = ready + failed,
            Some(Told::Ready { ready, failed, why, tally }) => {
                self.progress[worker] = 0;
                self.readiness[worker] = Some((ready, failed));
                self.why = self.why.take().or(why);
                self.connect.add(tally);
            }
            Some(Told::Progress { done }) => self.progress[worker] = done,
            Some(Told::Arrived { message }) => self.order_one(0, Order::Arrived { message })?,
            Some(Told::Result(tally)) => self.results[worker] = Some(tally),
            Some(Told::Failed(why)) => return Err(anyhow!(why)),
            None if self.results[worker].is_some() => {}
            None => bail!("a worker of the bench ended before its time"),
        }
        Ok(())
    }

    pub fn progress(&self) -> u64 {
        self.progress.iter().sum()
    }

    pub fn is_ready(&self) -> bool {
        self.readiness.iter().all(Option::is_some)
    }

    /// Connections that are ready, and those that failed.
    pub fn ready_and_failed(&self) -> (u64, u64) {
        let known = self.readiness.iter().flatten();
        known.fold((0, 0), |(ready, failed), one| (ready + one.0, failed + one.1))
    }

    pub fn has_results(&self) -> bool {
        self.results.iter().all(Option::is_some)
    }

    pub fn sum(&self) -> Tally {
        let mut sum = Tally::default();
        self.results.iter().flatten().for_each(|tally| sum.add(tally.clone()));
        sum
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        // A worker ends when its link does.
        for link in &self.links {
            let _ = link.shutdown(std::net::Shutdown::Both);
        }
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn spawn(end: UnixStream) -> anyhow::Result<Child> {
    let program = std::env::current_exe().context("this program's own file")?;
    Command::new(program)
        .arg("bench-worker")
        .stdin(Stdio::from(OwnedFd::from(end)))
        .stdout(Stdio::null())
        .stderr(Stdio::inherit())
        .spawn()
        .context("a worker process cannot be started")
}

fn listen(worker: usize, link: UnixStream, inbox: SyncSender<(usize, Option<Told>)>) -> anyhow::Result<()> {
    std::thread::Builder::new().name("bench-link".into()).spawn(move || {
        for line in BufReader::new(link).lines() {
            let told = line.ok().and_then(|line| serde_json::from_str(&line).ok());
            let is_end = told.is_none();
            if inbox.send((worker, told)).is_err() || is_end {
                return;
            }
        }
        let _ = inbox.send((worker, None));
    })?;
    Ok(())
}
