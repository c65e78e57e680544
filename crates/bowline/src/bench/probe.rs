//! One connection beside all others: it finds out whether the server can be reached and takes the token, and measures
//! how soon it answers while it is busy with others.

use super::{
    report,
    stream::{Stream, Tls},
    wire::{self, Answer, Framing, Notice, Piece, Place},
};
use anyhow::{Context, bail};
use hdrhistogram::Histogram;
use std::{
    io::{self, Read, Write},
    net::TcpStream,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

const TIMEOUT: Duration = Duration::from_secs(10);
/// A ping is due every so often, however long the last one takes.
const PING_EVERY: Duration = Duration::from_millis(20);

pub struct Probe {
    stream: Stream<TcpStream>,
    framing: Framing,
    read: Vec<u8>,
}

/// A frame of the server.
enum Heard {
    Text(Vec<u8>),
    Closed(Option<u16>),
}

impl Probe {
    /// Opens it, or says what is wrong and what to do about it.
    pub fn open(place: &Place, tls: Option<&Tls>, token: &str) -> anyhow::Result<Self> {
        let socket = TcpStream::connect_timeout(&place.address, TIMEOUT).with_context(|| {
            format!("no server answers at {}; is it running, and is --url right?", place.address)
        })?;
        socket.set_read_timeout(Some(TIMEOUT))?;
        socket.set_nodelay(true)?;
        let stream = Stream::new(socket, tls)?;
        let mut probe = Self { stream, framing: place.framing, read: Vec::new() };
        probe.stream.flush().map_err(unwrapped).with_context(|| {
            format!(
                "no TLS with {}: is its certificate for that name, and its issuer trusted (--ca)?",
                place.host
            )
        })?;
        let mut hello = Vec::new();
        place.write_hello(&mut hello, token, "bench-probe");
        probe.stream.write_all(&hello).context("the server hung up")?;
        if place.framing == Framing::WebSocket {
            probe.take_answer(place)?;
        }
        let mut notice = Notice::default();
        loop {
            match probe.hear().with_context(|| format!("{} does not speak this protocol", place.address))? {
                Heard::Text(text) if wire::is(&text, "connected") => return Ok(probe),
                Heard::Text(text) => notice = Notice::parse(&text),
                Heard::Closed(code) => {
                    let code = notice.close_code().or(code).unwrap_or_default();
                    let why = if notice.message.is_empty() {
                        notice.reason.clone()
                    } else {
                        notice.message.clone()
                    };
                    bail!("the server refuses: {code} {why}{}", advice(code));
                }
            }
            if notice.kind == "session.closed" {
                let code = notice.close_code().unwrap_or_default();
                bail!("the server refuses: {code} {}{}", notice.reason, advice(code));
            }
        }
    }

    fn take_answer(&mut self, place: &Place) -> anyhow::Result<()> {
        loop {
            if let Some(answer) = Answer::parse(&self.read)? {
                if answer.status != 101 {
                    let (status, message) = (answer.status, answer.message(&self.read));
                    bail!("the server refuses: {status} {message}{}", advice(status));
                }
                self.read.drain(..answer.head_bytes);
                return Ok(());
            }
            self.read_more().with_context(|| format!("{} does not answer an upgrade", place.address))?;
        }
    }

    fn read_more(&mut self) -> anyhow::Result<()> {
        let mut chunk = [0; 4096];
        match self.stream.read(&mut chunk)? {
            0 => bail!("the server ended the connection"),
            count => self.read.extend_from_slice(&chunk[..count]),
        }
        Ok(())
    }

    fn hear(&mut self) -> anyhow::Result<Heard> {
        loop {
            let found = match self.framing.split(&self.read)? {
                Some((Piece::Text(text), length)) => Some((Heard::Text(text.to_vec()), length)),
                Some((Piece::Close(code), length)) => Some((Heard::Closed(code), length)),
                Some((_, length)) => {
                    self.read.drain(..length);
                    continue;
                }
                None => None,
            };
            match found {
                Some((heard, length)) => {
                    self.read.drain(..length);
                    return Ok(heard);
                }
                None => self.read_more()?,
            }
        }
    }

    /// Asks whether the server is there, and waits for it to say so.
    fn ping(&mut self, data: &str) -> anyhow::Result<()> {
        let mut out = Vec::new();
        self.framing.write(&mut out, format!("{{\"type\":\"ping\",\"data\":\"{data}\"}}").as_bytes());
        self.stream.write_all(&out)?;
        loop {
            match self.hear()? {
                Heard::Text(text) if wire::is(&text, "pong") => return Ok(()),
                Heard::Text(_) => {}
                Heard::Closed(code) => bail!("closed {}", code.unwrap_or_default()),
            }
        }
    }
}

/// An error of TLS without the one of the socket around it.
fn unwrapped(error: io::Error) -> anyhow::Error {
    error.downcast::<rustls::Error>().map_or_else(anyhow::Error::from, anyhow::Error::from)
}

/// What to do about a refusal: a status of HTTP, or a close code.
fn advice(code: u16) -> &'static str {
    match code {
        401 | 403 | 4502 | 4505 => {
            "; give a token that it takes (--token), or the configuration or data directory that it has (--config, \
             --data)"
        }
        404 => "; is the path of --url right?",
        _ => "",
    }
}

/// Pings in a thread of its own until it is stopped.
pub struct Pinging {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<(Probe, Histogram<u64>, bool)>,
}

impl Pinging {
    pub fn start(mut probe: Probe) -> anyhow::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let is_over = stop.clone();
        let thread = std::thread::Builder::new().name("bench-probe".into()).spawn(move || {
            let mut times = report::histogram();
            let (mut due, mut number) = (Instant::now(), 0_u64);
            while !is_over.load(Ordering::Relaxed) {
                std::thread::sleep(due.saturating_duration_since(Instant::now()));
                number += 1;
                if probe.ping(&number.to_string()).is_err() {
                    return (probe, times, true);
                }
                times.saturating_record(due.elapsed().as_micros() as u64);
                due += PING_EVERY;
            }
            (probe, times, false)
        })?;
        Ok(Self { stop, thread })
    }

    /// The probe, its times, and whether it was lost.
    pub fn stop(self) -> anyhow::Result<(Probe, Histogram<u64>, bool)> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().map_err(|_| anyhow::anyhow!("the probe's thread failed"))
    }
}
