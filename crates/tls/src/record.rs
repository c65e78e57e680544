//! One connection: handshake, records in, records out.
//!
//! A connection at rest holds its keys and no buffer. Records are read, opened and sealed in buffers of the thread;
//! kept is what the other side has not completed, what the caller had no room for, and what the socket did not take.
//! rustls's buffered interface would keep 4 kB for each connection that has ever been read.

use crate::limits::{HANDSHAKE_BYTES, RECORDS_BYTES, SEALED_BYTES};
use rustls::{
    HandshakeKind, ServerConfig,
    server::UnbufferedServerConnection,
    unbuffered::{ConnectionState, EncodeError, EncryptError, UnbufferedStatus},
};
use std::{
    cell::RefCell,
    io::{self, IoSlice, Read, Write},
    sync::Arc,
};

/// The longest plaintext of a record, and what a record adds to it (RFC 8446, 5.2): header, type and tag.
const RECORD_BYTES_MAX: usize = 1 << 14;
const RECORD_OVERHEAD: usize = 5 + 1 + 16;
/// Room for the alert that ends a connection, and for a change of keys.
const WORD_BYTES: usize = 128;

/// The buffers of a thread.
#[derive(Default)]
struct Buffers {
    records: Vec<u8>,
    plain: Vec<u8>,
    sealed: Vec<u8>,
}

thread_local! {
    static BUFFERS: RefCell<Buffers> = RefCell::default();
}

/// What a call of [`Tls::read`] has got. Nothing at all is the end of the input.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Got {
    /// Plaintext, written to the caller's buffer.
    pub bytes: usize,
    /// What came from the socket; it may be a part of a record, or none of the plaintext.
    pub raw: usize,
    /// There may be more at once: in the socket, or here.
    pub more: bool,
}

/// The server's side of one connection.
pub struct Tls {
    conn: UnbufferedServerConnection,
    /// A record, or messages of the handshake, of which a part has come.
    partial: Vec<u8>,
    /// Plaintext that was not asked for yet, taken from `plain_at` on.
    plain: Vec<u8>,
    plain_at: usize,
    /// Records that the socket has not taken, from `unsent_at` on.
    unsent: Vec<u8>,
    unsent_at: usize,
    pub(crate) is_open: bool,
    /// The other side has said that nothing more comes, or its end of the socket is closed.
    has_ended: bool,
    has_closed: bool,
    /// rustls has found a fault. What it holds then no longer fits what is kept here, so it is asked nothing more.
    has_failed: bool,
}

/// What is to be said once the handshake is done.
#[derive(Clone, Copy)]
enum Wish<'a> {
    Nothing,
    Data(&'a [u8]),
    Close,
}

impl Tls {
    pub(crate) fn new(config: Arc<ServerConfig>) -> Result<Self, rustls::Error> {
        Ok(Self {
            conn: UnbufferedServerConnection::new(config)?,
            partial: Vec::new(),
            plain: Vec::new(),
            plain_at: 0,
            unsent: Vec::new(),
            unsent_at: 0,
            is_open: false,
            has_ended: false,
            has_closed: false,
            has_failed: false,
        })
    }

    /// Carries the handshake on as far as the socket allows; says whether it is done. What the client has sent behind
    /// it is kept for [`Self::read`], and what the socket did not take for [`Self::flush`].
    pub fn handshake(&mut self, io: &mut (impl Read + Write)) -> io::Result<bool> {
        loop {
            self.flush(io)?;
            if self.is_open {
                return Ok(true);
            }
            match self.read_records(io, &mut []) {
                Ok(_) if self.has_ended && !self.is_open => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error),
            }
        }
    }

    /// Whether the client has resumed an earlier session.
    pub fn is_resumed(&self) -> bool {
        self.conn.handshake_kind() == Some(HandshakeKind::Resumed)
    }

    /// Reads once from the socket and opens what came.
    pub fn read(&mut self, io: &mut (impl Read + Write), out: &mut [u8]) -> io::Result<Got> {
        if self.has_plaintext() {
            let take = out.len().min(self.plain.len() - self.plain_at);
            out[..take].copy_from_slice(&self.plain[self.plain_at..self.plain_at + take]);
            self.plain_at += take;
            if !self.has_plaintext() {
                (self.plain, self.plain_at) = (Vec::new(), 0);
            }
            return Ok(Got { bytes: take, raw: 0, more: true });
        }
        if self.has_ended {
            return Ok(Got::default());
        }
        self.read_records(io, out)
    }

    fn read_records(&mut self, io: &mut (impl Read + Write), out: &mut [u8]) -> io::Result<Got> {
        if self.has_failed {
            return Err(failed());
        }
        BUFFERS.with_borrow_mut(|buffers| {
            let records = &mut buffers.records;
            records.resize(RECORDS_BYTES, 0);
            let held = self.partial.len();
            let limit = if self.is_open { RECORDS_BYTES } else { HANDSHAKE_BYTES };
            if held >= limit {
                return Err(invalid("a handshake message is too long"));
            }
            let raw = loop {
                match io.read(&mut records[held..limit]) {
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    got => break got?,
                }
            };
            if raw == 0 {
                self.has_ended = true;
                return Ok(Got::default());
            }
            records[..held].copy_from_slice(&self.partial);
            let (plain, mut bytes) = (&mut self.plain, 0);
            let opened = advance(
                &mut self.conn,
                &mut records[..held + raw],
                &mut self.unsent,
                |payload| {
                    let (now, later) = payload.split_at(payload.len().min(out.len() - bytes));
                    out[bytes..bytes + now.len()].copy_from_slice(now);
                    bytes += now.len();
                    plain.extend_from_slice(later);
                },
                Wish::Nothing,
            );
            let opened = match opened {
                Ok(opened) => opened,
                Err(error) => {
                    self.has_failed = true;
                    // The alert, if it can be told at once.
                    let _gone = self.flush(io);
                    return Err(error);
                }
            };
            self.is_open |= opened.is_open;
            self.has_ended |= opened.has_ended;
            self.partial = match self.has_ended {
                true => Vec::new(),
                false => records[opened.used..held + raw].to_vec(),
            };
            // What rustls answers by itself.
            self.flush(io)?;
            let more = held + raw == limit || self.has_ended || self.has_plaintext();
            Ok(Got { bytes, raw, more })
        })
    }

    /// Plaintext lies here that a read gives without the socket.
    pub fn has_plaintext(&self) -> bool {
        self.plain_at < self.plain.len()
    }

    /// Seals what it takes of `bytes`, and writes. What it has taken is sent, or waits for [`Self::flush`]; as long
    /// as anything waits it takes nothing (`WouldBlock`).
    pub fn write(&mut self, io: &mut impl Write, bytes: &[u8]) -> io::Result<usize> {
        self.write_vectored(io, &[IoSlice::new(bytes)])
    }

    pub fn write_vectored(&mut self, io: &mut impl Write, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        if self.has_closed {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        if !self.flush(io)? {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        BUFFERS.with_borrow_mut(|buffers| {
            let Buffers { plain, sealed, .. } = buffers;
            let data = match slices {
                [] => return Ok(0),
                [one] => &one[..one.len().min(SEALED_BYTES)],
                many => {
                    plain.clear();
                    for slice in many {
                        let take = slice.len().min(SEALED_BYTES - plain.len());
                        plain.extend_from_slice(&slice[..take]);
                        if plain.len() == SEALED_BYTES {
                            break;
                        }
                    }
                    &plain[..]
                }
            };
            self.seal(io, sealed, Wish::Data(data))?;
            Ok(data.len())
        })
    }

    /// Says `close_notify`; the other direction stays open.
    pub fn close(&mut self, io: &mut impl Write) -> io::Result<()> {
        if !self.is_open || self.has_failed || std::mem::replace(&mut self.has_closed, true) {
            return Ok(());
        }
        let is_free = self.flush(io)?;
        BUFFERS.with_borrow_mut(|buffers| {
            if is_free {
                return self.seal(io, &mut buffers.sealed, Wish::Close);
            }
            let mut sealed = Vec::new();
            self.seal_into(&mut sealed, Wish::Close)?;
            self.unsent.extend_from_slice(&sealed);
            Ok(())
        })
    }

    /// Seals into the thread's buffer; what the socket does not take of it is kept.
    fn seal(&mut self, io: &mut impl Write, sealed: &mut Vec<u8>, wish: Wish<'_>) -> io::Result<()> {
        sealed.clear();
        self.seal_into(sealed, wish)?;
        let mut at = 0;
        while at < sealed.len() {
            match io.write(&sealed[at..]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => at += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        if at < sealed.len() {
            self.unsent.extend_from_slice(&sealed[at..]);
        }
        Ok(())
    }

    fn seal_into(&mut self, sealed: &mut Vec<u8>, wish: Wish<'_>) -> io::Result<()> {
        if self.has_failed {
            return Err(failed());
        }
        let plain = &mut self.plain;
        let take = |data: &[u8]| plain.extend_from_slice(data);
        let opened = advance(&mut self.conn, &mut self.partial, sealed, take, wish);
        self.has_failed = opened.is_err();
        let opened = opened?;
        self.has_ended |= opened.has_ended;
        self.partial.drain(..opened.used);
        Ok(())
    }

    /// Writes what the socket did not take before; says whether nothing is left.
    pub fn flush(&mut self, io: &mut impl Write) -> io::Result<bool> {
        while self.unsent_at < self.unsent.len() {
            match io.write(&self.unsent[self.unsent_at..]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => self.unsent_at += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        if self.unsent_at > 0 {
            (self.unsent, self.unsent_at) = (Vec::new(), 0);
        }
        Ok(true)
    }

    /// What waits for the socket, in bytes of records.
    pub fn unsent_bytes(&self) -> usize {
        self.unsent.len() - self.unsent_at
    }
}

#[cfg(test)]
impl Tls {
    /// What its buffers take.
    pub fn kept_bytes(&self) -> usize {
        self.partial.capacity() + self.plain.capacity() + self.unsent.capacity()
    }
}

struct Opened {
    /// How many bytes of the records are done with.
    used: usize,
    is_open: bool,
    has_ended: bool,
}

/// Takes records apart as far as they are whole: plaintext goes to `take`, what is to be answered and what is wished
/// to `sealed`. The records that are left, and no others, must stand in front at the next call.
fn advance(
    conn: &mut UnbufferedServerConnection,
    records: &mut [u8],
    sealed: &mut Vec<u8>,
    mut take: impl FnMut(&[u8]),
    wish: Wish<'_>,
) -> io::Result<Opened> {
    let mut opened = Opened { used: 0, is_open: false, has_ended: false };
    loop {
        let is_handshaking = conn.is_handshaking();
        let UnbufferedStatus { mut discard, state } = conn.process_tls_records(&mut records[opened.used..]);
        let state = match state {
            Ok(state) => state,
            Err(error) => {
                say_alert(conn, sealed);
                return Err(invalid(error));
            }
        };
        let mut is_over = false;
        match state {
            ConnectionState::ReadTraffic(mut traffic) => {
                while let Some(record) = traffic.next_record() {
                    let record = record.map_err(invalid)?;
                    discard += record.discard;
                    take(record.payload);
                }
            }
            ConnectionState::EncodeTlsData(mut data) => encode(&mut data, sealed)?,
            // They are in `sealed`, whose owner sends them.
            ConnectionState::TransmitTlsData(data) => data.done(),
            ConnectionState::PeerClosed => opened.has_ended = true,
            ConnectionState::WriteTraffic(mut traffic) => {
                opened.is_open = !is_handshaking;
                is_over = true;
                match wish {
                    Wish::Nothing => {}
                    Wish::Data(data) => {
                        let records = data.len() / RECORD_BYTES_MAX + 1;
                        let room = data.len() + records * RECORD_OVERHEAD + WORD_BYTES;
                        append(sealed, room, |out| traffic.encrypt(data, out))?;
                    }
                    Wish::Close => append(sealed, WORD_BYTES, |out| traffic.queue_close_notify(out))?,
                }
            }
            ConnectionState::BlockedHandshake | ConnectionState::Closed => {
                if matches!(wish, Wish::Data(_)) {
                    return Err(io::ErrorKind::BrokenPipe.into());
                }
                is_over = true;
            }
            _ => return Err(invalid("early data, which is not offered")),
        }
        opened.used += discard;
        if is_over {
            return Ok(opened);
        }
    }
}

fn encode(
    data: &mut rustls::unbuffered::EncodeTlsData<'_, rustls::server::ServerConnectionData>,
    sealed: &mut Vec<u8>,
) -> io::Result<()> {
    let at = sealed.len();
    let room = match data.encode(&mut []) {
        Ok(_) => return Ok(()),
        Err(EncodeError::InsufficientSize(needed)) => needed.required_size,
        Err(error) => return Err(invalid(error)),
    };
    sealed.resize(at + room, 0);
    let count = data.encode(&mut sealed[at..]).map_err(invalid)?;
    sealed.truncate(at + count);
    Ok(())
}

/// Appends what `write` writes, which may need more room than was thought.
fn append(
    sealed: &mut Vec<u8>,
    room: usize,
    mut write: impl FnMut(&mut [u8]) -> Result<usize, EncryptError>,
) -> io::Result<()> {
    let at = sealed.len();
    sealed.resize(at + room, 0);
    let count = match write(&mut sealed[at..]) {
        Err(EncryptError::InsufficientSize(needed)) => {
            sealed.resize(at + needed.required_size, 0);
            write(&mut sealed[at..])
        }
        written => written,
    };
    sealed.truncate(at + count.map_err(invalid)?);
    Ok(())
}

/// After a fault rustls has an alert to say, if anything, behind what it had to say before. It is asked for no more than
/// that: what it has to say comes before it looks at any record, and it must look at none, as it would find the same
/// fault again, or miss those that it has not let go.
fn say_alert(conn: &mut UnbufferedServerConnection, sealed: &mut Vec<u8>) {
    while conn.wants_write()
        && let Ok(ConnectionState::EncodeTlsData(mut data)) = conn.process_tls_records(&mut []).state
        && encode(&mut data, sealed).is_ok()
    {}
}

fn failed() -> io::Error {
    invalid("the connection has failed before")
}

fn invalid(cause: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, cause)
}
