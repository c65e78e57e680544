//! New connections: accepted by shard 0, dealt out in turn.

use super::{
    HTTP_LISTENER, Shard, TCP_LISTENER,
    conn::{Conn, Stage},
    mail::{Door, Mail},
    socket::Socket,
};
use crate::{files::Files, gate::Place, listen, metrics::Count, wire::Transport};
use bowline_session::Session;
use bytes::Bytes;
use mio::{
    Interest, Poll, Token,
    net::{TcpListener, TcpStream},
};
use std::io;

/// Connections accepted in one turn from one listener.
const ACCEPTS: usize = 256;
/// How long no connection is accepted when the process is out of files.
const OUT_OF_FILES_MS: u64 = 100;
/// That is logged once in so long.
const ACCEPT_LOG_MS: u64 = 10_000;

/// The listeners, on the shard that has them.
pub struct Doors {
    http: (TcpListener, bool),
    tcp: Option<(TcpListener, bool)>,
    /// Out of files: try again then.
    retry_ms: Option<u64>,
    /// The shard that gets the next connection.
    next: usize,
}

impl Doors {
    pub fn open(poll: &Poll, mut http: TcpListener, tcp: Option<TcpListener>) -> io::Result<Self> {
        poll.registry().register(&mut http, HTTP_LISTENER, Interest::READABLE)?;
        let tcp = match tcp {
            Some(mut tcp) => {
                poll.registry().register(&mut tcp, TCP_LISTENER, Interest::READABLE)?;
                Some((tcp, true))
            }
            None => None,
        };
        Ok(Self { http: (http, true), tcp, retry_ms: None, next: 0 })
    }

    fn ready(&self) -> bool {
        self.retry_ms.is_none() && (self.http.1 || self.tcp.as_ref().is_some_and(|tcp| tcp.1))
    }
}

impl Shard {
    pub(super) fn doors_ready(&self) -> bool {
        self.doors.as_ref().is_some_and(Doors::ready)
    }

    pub(super) fn doors_retry_ms(&self) -> Option<u64> {
        self.doors.as_ref()?.retry_ms
    }

    pub(super) fn on_door(&mut self, token: Token) {
        let Some(doors) = &mut self.doors else { return };
        match (token, &mut doors.tcp) {
            (HTTP_LISTENER, _) => doors.http.1 = true,
            (_, Some(tcp)) => tcp.1 = true,
            _ => {}
        }
    }

    /// Accepts what waits, a bounded number.
    pub(super) fn accept(&mut self) {
        let Some(mut doors) = self.doors.take() else { return };
        if doors.retry_ms.is_some_and(|at_ms| at_ms <= self.now.mono_ms) {
            doors.retry_ms = None;
        }
        if doors.ready() {
            let mut next = doors.next;
            if doors.http.1 {
                doors.http.1 = self.accept_from(&doors.http.0, Door::Http, &mut next, &mut doors.retry_ms);
            }
            if let Some((listener, ready)) = doors.tcp.as_mut().filter(|tcp| tcp.1) {
                *ready = self.accept_from(listener, Door::Tcp, &mut next, &mut doors.retry_ms);
            }
            doors.next = next;
        }
        self.doors = Some(doors);
    }

    /// Says whether more may wait.
    fn accept_from(
        &mut self,
        listener: &TcpListener,
        door: Door,
        next: &mut usize,
        retry_ms: &mut Option<u64>,
    ) -> bool {
        for _ in 0..ACCEPTS {
            match listener.accept() {
                Ok((stream, _)) if is_reserved(&stream, self.shared.files) => {
                    drop(stream);
                    self.pause_doors(retry_ms, "clients have as many files open as they may");
                    return true;
                }
                Ok((stream, peer)) => match self.shared.gate.admit(peer.ip()) {
                    Some(place) => self.deal(stream, place, door, next),
                    None => self.count(Count::TurnedAway, 1),
                },
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return false,
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::Interrupted
                            | io::ErrorKind::ConnectionAborted
                            | io::ErrorKind::ConnectionReset
                    ) => {}
                Err(error) => {
                    self.pause_doors(retry_ms, &error.to_string());
                    return true;
                }
            }
        }
        true
    }

    /// Accepts nothing for a while: what comes waits in the kernel.
    fn pause_doors(&mut self, retry_ms: &mut Option<u64>, cause: &str) {
        self.count(Count::AcceptFailures, 1);
        *retry_ms = Some(self.now.mono_ms + OUT_OF_FILES_MS);
        if self.accept_log_ms <= self.now.mono_ms {
            self.accept_log_ms = self.now.mono_ms + ACCEPT_LOG_MS;
            tracing::warn!(cause, "cannot accept connections for now; raise the limit on open files");
        }
    }

    /// Gives a connection to the shard whose turn it is, through the TLS handshake where there is one.
    fn deal(&mut self, stream: TcpStream, place: Place, door: Door, next: &mut usize) {
        listen::adjust(&stream, &self.shared.config);
        let shard = *next;
        *next = (*next + 1) % self.shared.mailboxes.len();
        if let Some(handshakes) = &self.shared.handshakes {
            return handshakes.begin(stream, place, door, shard);
        }
        let socket = Socket::new(stream, None, place);
        if shard == self.number {
            self.adopt(socket, door, &[]);
        } else {
            let mail = Mail::Accepted { socket, door, read: Bytes::new() };
            self.shared.mailboxes[shard].push_control(mail);
        }
    }

    /// Takes a connection into the table, with what was read of it elsewhere.
    pub(super) fn adopt(&mut self, socket: Socket, door: Door, read: &[u8]) {
        let session = Session::new(&self.shared.rules, self.now, self.entropy.next() as u32);
        let conn = match door {
            Door::Http => Conn::new(socket, Stage::Head(None), Transport::WebSocket, session),
            Door::Tcp => Conn::new(socket, Stage::Tcp(Default::default()), Transport::Tcp, session),
        };
        let (index, _) = self.conns.insert(conn);
        if let Err(error) = self.register(index) {
            tracing::warn!(%error, "a connection cannot be watched and is dropped");
            self.conns.remove(index);
            return;
        }
        self.set_timer(index);
        if !read.is_empty() {
            let mut read = read.to_vec();
            self.take_apart(index, &mut read);
        }
        if let Some(conn) = self.conns.at(index).filter(|conn| conn.socket.has_read_ahead()) {
            conn.readable = true;
            self.plan_read(index);
        }
    }
}

/// Whether a connection is one of the last files that the process may open, which are not for clients.
#[cfg(unix)]
fn is_reserved(stream: &TcpStream, files: Files) -> bool {
    use std::os::fd::AsRawFd;
    usize::try_from(stream.as_raw_fd()).is_ok_and(|number| number >= files.end_of_clients())
}

#[cfg(not(unix))]
fn is_reserved(_: &TcpStream, _: Files) -> bool {
    false
}
