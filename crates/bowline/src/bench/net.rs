//! Thousands of connections in one thread: a poll, a table, one read buffer.
//!
//! What a scenario does with them is a [`Play`]. Frames are handed to it as they came; nothing is parsed that it does
//! not look at. What it says is joined for each connection and written once a turn.

use super::{
    job::{Job, Order, Tally},
    stream::{Stream, Tls},
    wire::{self, Answer, Framing, Notice, Piece},
};
use mio::{Interest, Poll, Token, event, net::TcpStream};
use socket2::{Domain, Protocol, Socket, Type};
use std::{
    io::{self, Read, Write},
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};

/// How long a connection may take to be made.
const CONNECT_TIMEOUT_US: u64 = 10_000_000;
/// What waits for a server that does not read; a connection with more is given up.
const UNSENT_BYTES_MAX: usize = 4 << 20;
const READ_BYTES: usize = 64 << 10;
/// What the kernel takes for a connection that is to stop reading: so its end of the way is full soon.
const STALLED_RECEIVE_BYTES: usize = 16 << 10;

/// Microseconds of the monotonic clock.
pub fn now_us() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000 + now.tv_nsec as u64 / 1000
}

/// What happens to a connection.
#[derive(Debug, PartialEq, Eq)]
pub enum Event<'a> {
    /// The server has let it in.
    Open,
    Text(&'a [u8]),
    /// The server has turned it away: an HTTP status, or a close code.
    Refused {
        code: u16,
        retry_after_ms: Option<u64>,
        why: String,
    },
    /// It could not be made.
    Failed {
        why: String,
    },
    /// It was open and ended.
    Closed {
        code: Option<u16>,
        retry_after_ms: Option<u64>,
        why: String,
    },
}

/// A scenario.
pub trait Play {
    fn on_event(&mut self, net: &mut Net, index: usize, event: Event<'_>, now_us: u64);

    fn on_order(&mut self, net: &mut Net, order: Order, now_us: u64);

    /// Does what is due, and tells when the next thing is.
    fn on_time(&mut self, _net: &mut Net, _now_us: u64) -> Option<u64> {
        None
    }

    /// Connections that are ready for the measurement, and those that will never be.
    fn readiness(&self) -> &Readiness;

    /// What is done so far, for the progress.
    fn done(&self) -> u64 {
        0
    }

    /// What the other workers are to know.
    fn take_arrived(&mut self) -> Option<u64> {
        None
    }

    /// Nothing more will happen; the figures are final.
    fn is_over(&self, now_us: u64) -> bool;

    fn tally(&mut self) -> Tally;
}

#[derive(Debug, Clone, Default)]
pub struct Readiness {
    pub ready: u64,
    pub failed: u64,
    /// Why the first one failed.
    pub why: Option<String>,
    pub connect_us: Option<hdrhistogram::Histogram<u64>>,
}

impl Readiness {
    pub fn new() -> Self {
        Self { connect_us: Some(super::report::histogram()), ..Self::default() }
    }

    pub fn on_ready(&mut self, took_us: u64) {
        self.ready += 1;
        if let Some(histogram) = &mut self.connect_us {
            histogram.saturating_record(took_us);
        }
    }

    pub fn on_failed(&mut self, why: String) {
        self.failed += 1;
        self.why.get_or_insert(why);
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Absent,
    Connecting,
    /// The upgrade was sent.
    Upgrading,
    /// `connected` is waited for.
    Opening,
    Open,
}

struct Conn {
    stream: Option<Stream<TcpStream>>,
    state: State,
    /// When it was begun.
    since_us: u64,
    /// An incomplete frame.
    partial: Vec<u8>,
    out: Vec<u8>,
    /// It is in the list of those that have something to write.
    is_listed: bool,
    /// What the server said last.
    notice: Option<Notice>,
    close_code: Option<u16>,
    /// Nothing is read.
    is_held: bool,
    /// It was held once, and is an ordinary one since.
    was_held: bool,
}

pub struct Net {
    poll: Poll,
    job: Job,
    tls: Option<Tls>,
    conns: Vec<Conn>,
    unsent: Vec<usize>,
}

impl Net {
    pub fn new(job: &Job) -> anyhow::Result<Self> {
        let conns = (0..job.count)
            .map(|_| Conn {
                stream: None,
                state: State::Absent,
                since_us: 0,
                partial: Vec::new(),
                out: Vec::new(),
                is_listed: false,
                notice: None,
                close_code: None,
                is_held: false,
                was_held: false,
            })
            .collect();
        let tls = Tls::of(&job.place)?;
        Ok(Self { poll: Poll::new()?, job: job.clone(), tls, conns, unsent: Vec::new() })
    }

    pub fn registry(&self) -> &mio::Registry {
        self.poll.registry()
    }

    pub fn poll(&mut self, events: &mut mio::Events, wait: Option<Duration>) -> io::Result<()> {
        match self.poll.poll(events, wait) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(()),
            result => result,
        }
    }

    pub fn is_open(&self, index: usize) -> bool {
        self.conns[index].state == State::Open
    }

    /// When it was begun to be made.
    pub fn since_us(&self, index: usize) -> u64 {
        self.conns[index].since_us
    }

    /// Begins to make a connection.
    pub fn open(&mut self, index: usize, now_us: u64) -> io::Result<()> {
        let address = self.job.place.address;
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
        socket.set_nonblocking(true)?;
        socket.set_tcp_nodelay(true)?;
        // Closing is then immediate, and leaves no port behind that waits.
        socket.set_linger(Some(Duration::ZERO))?;
        if self.job.is_stalled(index) && !self.conns[index].was_held {
            socket.set_recv_buffer_size(STALLED_RECEIVE_BYTES)?;
        }
        if self.job.sources > 0 {
            // One source address has some 28,000 ports.
            let host = 2 + (self.job.first + index) % self.job.sources;
            socket.bind(&SocketAddr::from((Ipv4Addr::new(127, 0, 0, host as u8), 0)).into())?;
        }
        match socket.connect(&address.into()) {
            Err(error) if !is_under_way(&error) => return Err(error),
            _ => {}
        }
        let mut socket = TcpStream::from_std(socket.into());
        let interest = Interest::READABLE | Interest::WRITABLE;
        self.poll.registry().register(&mut socket, Token(index), interest)?;
        let stream = Stream::new(socket, self.tls.as_ref())?;
        let conn = &mut self.conns[index];
        (conn.stream, conn.state, conn.since_us) = (Some(stream), State::Connecting, now_us);
        (conn.notice, conn.close_code) = (None, None);
        Ok(())
    }

    /// Stops reading. The poll says nothing of it any more, not even that it ends.
    pub fn hold(&mut self, index: usize) {
        let conn = &mut self.conns[index];
        if let Some(stream) = &mut conn.stream
            && self.poll.registry().deregister(stream.socket_mut()).is_ok()
        {
            (conn.is_held, conn.was_held) = (true, true);
        }
    }

    /// Reads on after [`Self::hold`]; the poll tells what has happened meanwhile.
    pub fn resume(&mut self, index: usize) -> io::Result<()> {
        let conn = &mut self.conns[index];
        let Some(stream) = conn.stream.as_mut().filter(|_| conn.is_held) else { return Ok(()) };
        conn.is_held = false;
        socket2::SockRef::from(stream.socket()).set_recv_buffer_size(READ_BYTES)?;
        let interest = Interest::READABLE | Interest::WRITABLE;
        self.poll.registry().register(stream.socket_mut(), Token(index), interest)
    }

    /// Ends a connection without a word.
    pub fn abort(&mut self, index: usize) {
        let conn = &mut self.conns[index];
        conn.stream = None;
        conn.state = State::Absent;
        conn.is_held = false;
        conn.partial = Vec::new();
        conn.out = Vec::new();
    }

    /// Says something; it is written at the end of the turn.
    pub fn send(&mut self, index: usize, text: &[u8]) {
        let framing = self.job.place.framing;
        self.write(index, |out| framing.write(out, text));
    }

    fn write(&mut self, index: usize, write: impl FnOnce(&mut Vec<u8>)) {
        let conn = &mut self.conns[index];
        if conn.stream.is_none() {
            return;
        }
        write(&mut conn.out);
        if !conn.is_listed {
            conn.is_listed = true;
            self.unsent.push(index);
        }
    }

    /// Writes what was said.
    pub fn flush(&mut self, play: &mut dyn Play, now_us: u64) {
        for index in std::mem::take(&mut self.unsent) {
            self.conns[index].is_listed = false;
            self.flush_one(play, index, now_us);
        }
    }

    fn flush_one(&mut self, play: &mut dyn Play, index: usize, now_us: u64) {
        let conn = &mut self.conns[index];
        let Some(stream) = &mut conn.stream else { return };
        let mut written = 0;
        let result = loop {
            let step = match &conn.out[written..] {
                [] => stream.flush().map(|()| 0),
                rest => stream.write(rest),
            };
            match step {
                // Nothing is left, or nothing more is taken.
                Ok(0) => break Ok(()),
                Ok(count) => written += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break Ok(()),
                Err(error) => break Err(error.to_string()),
            }
        };
        if written == conn.out.len() {
            // Thousands of them are silent most of the time.
            conn.out = Vec::new();
        } else {
            conn.out.drain(..written);
        }
        let result = match conn.out.len() > UNSENT_BYTES_MAX {
            true => Err("the server does not read".to_owned()),
            false => result,
        };
        if let Err(why) = result {
            self.end(play, index, why, now_us);
        }
    }

    /// Takes in what the poll says about a connection.
    pub fn on_ready(
        &mut self,
        play: &mut dyn Play,
        index: usize,
        event: &event::Event,
        buffer: &mut [u8],
        now_us: u64,
    ) {
        if event.is_writable() && !self.on_writable(play, index, now_us) {
            return;
        }
        // TLS may wait for room to write before it reads, and for the other side's records before it writes.
        let is_tls = self.tls.is_some();
        if event.is_readable() || event.is_read_closed() || event.is_error() || is_tls {
            let to_the_end = event.is_read_closed() || event.is_error() || is_tls;
            self.read(play, index, buffer, to_the_end, now_us);
        }
        if is_tls {
            self.flush_one(play, index, now_us);
        }
    }

    /// False when the connection is gone, or not yet there.
    fn on_writable(&mut self, play: &mut dyn Play, index: usize, now_us: u64) -> bool {
        let conn = &mut self.conns[index];
        let Some(stream) = &conn.stream else { return false };
        if conn.state != State::Connecting {
            self.flush_one(play, index, now_us);
            return true;
        }
        match stream.socket().take_error() {
            Ok(None) if stream.socket().peer_addr().is_err() => return false,
            Ok(None) => {}
            Ok(Some(error)) | Err(error) => {
                self.end(play, index, error.to_string(), now_us);
                return false;
            }
        }
        let place = &self.job.place;
        conn.state = match place.framing {
            Framing::WebSocket => State::Upgrading,
            Framing::Tcp => State::Opening,
        };
        place.write_hello(&mut conn.out, self.job.token(index), &self.job.device(index));
        self.flush_one(play, index, now_us);
        true
    }

    fn read(&mut self, play: &mut dyn Play, index: usize, buffer: &mut [u8], to_the_end: bool, now_us: u64) {
        loop {
            let conn = &mut self.conns[index];
            let Some(stream) = conn.stream.as_mut().filter(|_| !conn.is_held) else { return };
            match stream.read(buffer) {
                Ok(0) => return self.end(play, index, "the server ended it".into(), now_us),
                Ok(count) => {
                    self.take(play, index, &buffer[..count], now_us);
                    // Less than was asked for: nothing is left, unless the end stands behind it.
                    if count < buffer.len() && !to_the_end {
                        return;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) => return self.end(play, index, error.to_string(), now_us),
            }
        }
    }

    fn take(&mut self, play: &mut dyn Play, index: usize, bytes: &[u8], now_us: u64) {
        let mut partial = std::mem::take(&mut self.conns[index].partial);
        let rest = if partial.is_empty() {
            bytes[self.take_frames(play, index, bytes, now_us)..].to_vec()
        } else {
            partial.extend_from_slice(bytes);
            let used = self.take_frames(play, index, &partial, now_us);
            partial.drain(..used);
            partial
        };
        if self.conns[index].stream.is_some() {
            self.conns[index].partial = rest;
        }
    }

    /// How many bytes were used.
    fn take_frames(&mut self, play: &mut dyn Play, index: usize, bytes: &[u8], now_us: u64) -> usize {
        let mut used = 0;
        loop {
            let rest = &bytes[used..];
            let taken = match self.conns[index].state {
                State::Absent | State::Connecting => return bytes.len(),
                State::Upgrading => self.take_answer(play, index, rest, now_us),
                State::Opening | State::Open => match self.job.place.framing.split(rest) {
                    Ok(Some((piece, length))) => {
                        self.on_piece(play, index, piece, now_us);
                        Ok(Some(length))
                    }
                    Ok(None) => Ok(None),
                    Err(fault) => Err(fault),
                },
            };
            match taken {
                Ok(Some(length)) => used += length,
                Ok(None) => return used,
                Err(fault) => {
                    self.end(play, index, fault.to_string(), now_us);
                    return bytes.len();
                }
            }
        }
    }

    fn take_answer(
        &mut self,
        play: &mut dyn Play,
        index: usize,
        bytes: &[u8],
        now_us: u64,
    ) -> Result<Option<usize>, wire::Fault> {
        let Some(answer) = Answer::parse(bytes)? else { return Ok(None) };
        if answer.status == 101 {
            self.conns[index].state = State::Opening;
            return Ok(Some(answer.head_bytes));
        }
        self.abort(index);
        let Answer { status: code, retry_after_ms, .. } = answer;
        play.on_event(
            self,
            index,
            Event::Refused { code, retry_after_ms, why: answer.message(bytes) },
            now_us,
        );
        Ok(Some(bytes.len()))
    }

    fn on_piece(&mut self, play: &mut dyn Play, index: usize, piece: Piece<'_>, now_us: u64) {
        let conn = &mut self.conns[index];
        match piece {
            Piece::Text(text) if conn.state == State::Opening => {
                if wire::is(text, "connected") {
                    conn.state = State::Open;
                    play.on_event(self, index, Event::Open, now_us);
                } else {
                    conn.notice = Some(Notice::parse(text));
                }
            }
            Piece::Text(text) if wire::is(text, "session.closed") => conn.notice = Some(Notice::parse(text)),
            Piece::Text(text) if wire::is(text, "ping") => self.send(index, br#"{"type":"pong"}"#),
            Piece::Text(text) => play.on_event(self, index, Event::Text(text), now_us),
            Piece::Ping(payload) => {
                let framing = self.job.place.framing;
                self.write(index, |out| framing.write_pong(out, payload));
            }
            Piece::Close(code) => {
                conn.close_code = code;
                self.end(play, index, "the server closed it".into(), now_us);
            }
            Piece::Other => {}
        }
    }

    /// A connection has ended, and says why as well as it can.
    fn end(&mut self, play: &mut dyn Play, index: usize, why: String, now_us: u64) {
        let conn = &mut self.conns[index];
        if conn.stream.is_none() {
            return;
        }
        let state = conn.state;
        let (notice, close_code) = (conn.notice.take(), conn.close_code.take());
        self.abort(index);
        let code = notice.as_ref().and_then(Notice::close_code).or(close_code);
        let retry_after_ms = notice.as_ref().and_then(|notice| notice.retry_after_ms);
        let told = notice.map(|notice| if notice.reason.is_empty() { notice.message } else { notice.reason });
        let why = told.filter(|told| !told.is_empty()).unwrap_or(why);
        let event = match (state, code) {
            (State::Open, code) => Event::Closed { code, retry_after_ms, why },
            (_, Some(code)) => Event::Refused { code, retry_after_ms, why },
            (_, None) => Event::Failed { why },
        };
        play.on_event(self, index, event, now_us);
    }

    /// Gives up connections that take too long to be made.
    pub fn expire(&mut self, play: &mut dyn Play, now_us: u64) {
        for index in 0..self.conns.len() {
            let conn = &self.conns[index];
            let is_opening = matches!(conn.state, State::Connecting | State::Upgrading | State::Opening);
            if is_opening && now_us.saturating_sub(conn.since_us) > CONNECT_TIMEOUT_US {
                self.end(play, index, "it takes too long to connect".into(), now_us);
            }
        }
    }
}

pub fn read_buffer() -> Vec<u8> {
    vec![0; READ_BYTES]
}

fn is_under_way(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::WouldBlock || error.raw_os_error() == Some(libc::EINPROGRESS)
}
