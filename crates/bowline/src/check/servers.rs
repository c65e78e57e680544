//! The servers that a run starts by itself: this very program, on free ports, killed at random and started again on the
//! same data directory.

use super::{
    history::{Ledger, What},
    load::Recorder,
};
use anyhow::{Context, anyhow, bail};
use std::{
    fs::File,
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};
use tokio::{
    sync::{mpsc, watch},
    time::{self, Instant},
};

/// How long a server may take to be ready.
const READY_WITHIN: Duration = Duration::from_secs(60);
const METRICS_WITHIN: Duration = Duration::from_secs(10);
/// Between two kills, in milliseconds. A start takes its time as well, and the next kill comes within 5 s.
const KILL_AFTER_MS: std::ops::Range<u64> = 700..4_400;
/// One kill of so many hits a server that is just starting.
const KILL_AT_START: u32 = 6;

/// What a server is started with.
pub struct Setup {
    /// Flags of `serve` beyond those given here.
    pub arguments: Vec<String>,
    pub data: PathBuf,
    pub log: PathBuf,
    pub secret: String,
    pub api_key: String,
}

pub struct Server {
    setup: Setup,
    child: Child,
    lines: mpsc::Receiver<String>,
    urls: Vec<String>,
    api: String,
}

impl Server {
    /// Starts one, and waits until it is ready.
    pub async fn start(setup: Setup) -> anyhow::Result<Self> {
        let (child, lines) = spawn(&setup)?;
        let mut server = Self { setup, child, lines, urls: Vec::new(), api: String::new() };
        server.wait_ready().await?;
        Ok(server)
    }

    /// Where clients connect: WebSocket and TCP.
    pub fn urls(&self) -> Vec<String> {
        self.urls.clone()
    }

    pub fn ledger(&self) -> LedgerSource {
        LedgerSource { url: format!("{}/metrics", self.api), key: Some(self.setup.api_key.clone()) }
    }

    async fn wait_ready(&mut self) -> anyhow::Result<()> {
        (self.urls, self.api) = (Vec::new(), String::new());
        let what = || format!("see {}", self.setup.log.display());
        let ready = async {
            while let Some(line) = self.lines.recv().await {
                for (name, scheme) in [("WebSocket listens on ", "ws://"), ("TCP listens on ", "tcp://")] {
                    if let Some((_, url)) = line.split_once(name)
                        && url.starts_with(scheme)
                    {
                        self.urls.push(url.trim().to_owned());
                    }
                }
                if let Some((_, url)) = line.split_once("metrics listen on ") {
                    self.api = url.trim().to_owned();
                }
                if line.trim() == "ready" {
                    return true;
                }
            }
            false
        };
        match time::timeout(READY_WITHIN, ready).await {
            Ok(true) if self.urls.len() == 2 && !self.api.is_empty() => Ok(()),
            Ok(true) => bail!("the server did not say where it listens; {}", what()),
            Ok(false) => {
                let status = self.child.wait().map_or_else(|error| error.to_string(), |s| s.to_string());
                bail!("the server ended before it was ready: {status}; {}", what())
            }
            Err(_) => bail!("the server was not ready after {} s; {}", READY_WITHIN.as_secs(), what()),
        }
    }

    /// Kills it without a word.
    fn kill(&mut self) -> anyhow::Result<()> {
        if let Some(status) = self.child.try_wait()? {
            bail!("the server ended by itself: {status}; see {}", self.setup.log.display());
        }
        self.child.kill().context("the server cannot be killed")?;
        self.child.wait().context("the server cannot be waited for")?;
        Ok(())
    }

    async fn restart(&mut self, random: &mut fastrand::Rng, recorder: &Recorder) -> anyhow::Result<()> {
        (self.child, self.lines) = spawn(&self.setup)?;
        if random.u32(..KILL_AT_START) == 0 {
            time::sleep(Duration::from_millis(random.u64(..250))).await;
            self.kill()?;
            recorder.note(None, What::Killed).await;
            (self.child, self.lines) = spawn(&self.setup)?;
        }
        self.wait_ready().await?;
        recorder.note(None, What::Ready).await;
        Ok(())
    }

    /// Kills and starts again until the time is over or nobody wants any more, and leaves the server running.
    pub async fn torment(
        &mut self,
        until: Instant,
        seed: u64,
        recorder: &Recorder,
        urls: &watch::Sender<Vec<String>>,
        stop: &mut watch::Receiver<bool>,
    ) -> anyhow::Result<()> {
        let mut random = fastrand::Rng::with_seed(seed);
        let began = Instant::now();
        let mut last = began;
        loop {
            let mut wait = Duration::from_millis(random.u64(KILL_AFTER_MS));
            if last == began {
                // However short the run, it has one.
                wait = wait.min(until.saturating_duration_since(began) / 2);
            }
            let due = last + wait;
            let is_stopped = tokio::select! {
                () = time::sleep_until(due.min(until)) => false,
                stopped = stop.wait_for(|stop| *stop) => stopped.is_ok(),
            };
            if is_stopped || due >= until {
                return Ok(());
            }
            note_ledger(&self.ledger(), recorder, false).await?;
            last = Instant::now();
            self.kill()?;
            recorder.note(None, What::Killed).await;
            urls.send_replace(Vec::new());
            self.restart(&mut random, recorder).await?;
            note_ledger(&self.ledger(), recorder, false).await?;
            urls.send_replace(self.urls());
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts the program; what it logs goes to a file, and here line by line until it is ready.
fn spawn(setup: &Setup) -> anyhow::Result<(Child, mpsc::Receiver<String>)> {
    let program = std::env::current_exe().context("this program's own file is not known")?;
    let mut command = Command::new(&program);
    // What is set for a server of one's own is not meant for this one.
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("BOWLINE_")) {
        command.env_remove(name);
    }
    command.arg("serve").args(&setup.arguments).arg("--data").arg(&setup.data);
    command.args(["--listen", "127.0.0.1:0", "--tcp", "127.0.0.1:0", "--api", "127.0.0.1:0"]);
    command.args(["--set", "log.level=info", "--set", "log.format=human"]);
    command.args(["--set", &format!("auth.secret={}", setup.secret)]);
    command.args(["--set", &format!("api.key={}", setup.api_key)]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().with_context(|| format!("{} cannot be started", program.display()))?;
    let errors = child.stderr.take().context("the server's log cannot be read")?;
    let mut log = open_log(&setup.log)?;
    let (lines, receiver) = mpsc::channel(256);
    std::thread::Builder::new()
        .name("server-log".into())
        .spawn(move || {
            for line in BufReader::new(errors).lines().map_while(Result::ok) {
                // A log that cannot be written is not what this run is about.
                let _ = writeln!(log, "{line}");
                let _ = lines.try_send(line);
            }
        })
        .context("a thread for the server's log cannot be started")?;
    Ok((child, receiver))
}

fn open_log(path: &Path) -> anyhow::Result<File> {
    let opened = File::options().create(true).append(true).open(path);
    opened.with_context(|| format!("the server's log {} cannot be written", path.display()))
}

// The ledger

/// Where a ledger is to be read.
#[derive(Clone)]
pub struct LedgerSource {
    pub url: String,
    pub key: Option<String>,
}

impl LedgerSource {
    pub async fn read(&self) -> anyhow::Result<Ledger> {
        let client = reqwest::Client::builder().no_proxy().timeout(METRICS_WITHIN).build()?;
        let mut request = client.get(&self.url);
        if let Some(key) = &self.key {
            request = request.bearer_auth(key);
        }
        let answer = request.send().await.with_context(|| format!("{} does not answer", self.url))?;
        let text = answer.error_for_status().with_context(|| format!("{} refuses", self.url))?.text().await?;
        parse_ledger(&text).ok_or_else(|| anyhow!("{} has no ledger", self.url))
    }
}

pub async fn note_ledger(
    source: &LedgerSource,
    recorder: &Recorder,
    at_rest: bool,
) -> anyhow::Result<Ledger> {
    let ledger = source.read().await?;
    recorder.note(None, What::Ledger { ledger, at_rest }).await;
    Ok(ledger)
}

fn parse_ledger(metrics: &str) -> Option<Ledger> {
    let sum = |name: &str| {
        let values = metrics.lines().filter_map(|line| {
            let rest = line.strip_prefix("bowline_ledger_")?.strip_prefix(name)?;
            // Either ` 5` or `{reason="x"} 5`.
            rest.starts_with([' ', '{']).then(|| rest.rsplit(' ').next()?.parse::<f64>().ok())?
        });
        values.fold(None, |sum, value| Some(sum.unwrap_or(0.0) + value)).map(|sum| sum as u64)
    };
    Some(Ledger {
        accepted: sum("accepted_total")?,
        delivered: sum("delivered_total")?,
        waiting: sum("waiting")?,
        expired: sum("expired_total")?,
        // No reason has come up yet, then there is no line.
        dropped: sum("dropped_total").unwrap_or(0),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ledger_is_found_among_the_metrics() {
        let text = "# HELP bowline_ledger_waiting x\nbowline_ledger_waiting 3\nbowline_ledger_accepted_total 10\n\
                    bowline_ledger_delivered_total 5\nbowline_ledger_expired_total 1\n\
                    bowline_ledger_dropped_total{reason=\"a\"} 1\nbowline_ledger_dropped_total{reason=\"b\"} 0\n";
        let ledger = Ledger { accepted: 10, delivered: 5, waiting: 3, expired: 1, dropped: 1 };
        assert_eq!(parse_ledger(text), Some(ledger));
        assert_eq!(parse_ledger("# nothing\n"), None);
    }
}
