//! From bytes to frames.

use super::{
    READ_BYTES, Shard,
    conn::{Held, Stage},
    with,
};
use crate::metrics::Count;
use bowline_protocol::{
    CloseCode, tcp,
    ws::{
        self, Message,
        deflate::{DEFLATE_BYTES_MIN, Deflater, Inflater},
    },
};
use bowline_session::{Chunk, State};
use bowline_tls::Got;
use std::{io, num::NonZeroU8};

/// The largest message of the echo: what conformance suites send, and of what comes compressed less, because it
/// costs the client nothing.
const ECHO_BYTES_MAX: usize = 16 << 20;
const ECHO_INFLATED_BYTES_MAX: usize = 1 << 20;

impl Shard {
    /// Reads every connection that has something, once.
    pub(super) fn read_ready(&mut self) {
        if self.to_read.is_empty() {
            return;
        }
        let mut ready = std::mem::take(&mut self.to_read);
        for index in ready.drain(..) {
            let Some(conn) = self.conns.at(index).filter(|conn| conn.to_read) else { continue };
            conn.to_read = false;
            if self.blocked && conn.session.state().is_open() {
                conn.stalled = true;
                self.stalled.push(index);
                continue;
            }
            self.read(index);
            self.plan_read(index);
        }
        // What came on the list meanwhile waits for the next turn.
        ready.append(&mut self.to_read);
        self.to_read = ready;
    }

    /// Takes apart what is held of a connection, or else reads one buffer of its socket.
    fn read(&mut self, index: u32) {
        let Some(conn) = self.conns.at(index).filter(|conn| conn.wants_input()) else { return };
        if !matches!(conn.stage, Stage::Head(None))
            && let Some(mut held) = conn.held.take()
        {
            return self.take_apart(index, &mut held.bytes);
        }
        if is_choked(conn) {
            return;
        }
        let mut buffer = std::mem::take(&mut self.buffer);
        let got = loop {
            match conn.socket.read(&mut buffer) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                got => break got,
            }
        };
        match got {
            Ok(Got { bytes: 0, raw: 0, .. }) => {
                conn.readable = false;
                self.on_peer_ended(index);
            }
            Ok(Got { bytes, raw, more }) => {
                // The end may lie behind what was read.
                conn.readable = more || conn.ending;
                self.count(Count::BytesIn, raw as u64);
                match bytes {
                    0 => self.on_part_of_record(index),
                    _ => self.take_apart(index, &mut buffer[..bytes]),
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => conn.readable = false,
            Err(error) => {
                conn.readable = false;
                tracing::debug!(%error, user = ?conn.session.user(), "a connection failed while it was read");
                self.on_peer_gone(index);
            }
        }
        self.buffer = buffer;
    }

    /// A sign of life, and nothing that can be opened yet.
    fn on_part_of_record(&mut self, index: u32) {
        let actions = &mut self.actions;
        with(&self.shared, self.now, self.number, &mut self.conns, index, |conn, cx| {
            conn.session.on_bytes(cx, actions);
        });
        self.plan_flush_queued(index);
        self.act(index);
    }

    fn on_peer_ended(&mut self, index: u32) {
        let actions = &mut self.actions;
        with(&self.shared, self.now, self.number, &mut self.conns, index, |conn, cx| {
            conn.session.on_peer_ended(cx, actions);
        });
        self.act(index);
        self.plan_flush_queued(index);
    }

    pub(super) fn on_peer_gone(&mut self, index: u32) {
        let actions = &mut self.actions;
        with(&self.shared, self.now, self.number, &mut self.conns, index, |conn, cx| {
            conn.session.on_peer_gone(cx, actions);
        });
        self.act(index);
    }

    /// Takes bytes of a connection apart as far as it may be read; the rest is held.
    pub(super) fn take_apart(&mut self, index: u32, bytes: &mut [u8]) {
        let Some(conn) = self.conns.at(index) else { return };
        if matches!(conn.stage, Stage::Head(None)) {
            return self.on_head_bytes(index, bytes);
        }
        let mut at = 0;
        let mut fault = None;
        let mut frames = 0;
        let mut peer_code = None;
        let actions = &mut self.actions;
        let (inflater, deflater) = (&mut self.inflater, &mut self.deflater);
        with(&self.shared, self.now, self.number, &mut self.conns, index, |conn, cx| {
            let window_bits = conn.window_bits;
            conn.session.on_bytes(cx, actions);
            let max = cx.rules.max_frame_bytes;
            const ECHO_MAX: [usize; 2] = [ECHO_BYTES_MAX, ECHO_INFLATED_BYTES_MAX];
            loop {
                let reads = conn.session.state().reads_frames();
                let discards = !conn.session.state().is_active();
                match &mut conn.stage {
                    _ if !reads && !discards => break,
                    Stage::Head(_) | Stage::Deaf => {
                        at = bytes.len();
                        break;
                    }
                    Stage::Tcp(_) if discards => {
                        at = bytes.len();
                        break;
                    }
                    Stage::Tcp(decoder) => match decoder.next(bytes, &mut at, max) {
                        Ok(None) => break,
                        Ok(Some(tcp::Message::Text(text))) => conn.session.on_text(cx, text, actions),
                        Ok(Some(tcp::Message::Binary(binary))) => conn.session.on_binary(cx, binary, actions),
                        Err(error) => {
                            fault = Some((error.close_code(), error.to_string()));
                            break;
                        }
                    },
                    Stage::WebSocket(decoder) => {
                        match next(decoder, bytes, &mut at, [max; 2], window_bits, inflater) {
                            Ok(None) => break,
                            Ok(Some(Message::Close(code))) => {
                                if !discards {
                                    peer_code = code;
                                }
                                conn.session.on_peer_closed(cx, actions);
                            }
                            Ok(Some(_)) if discards => {}
                            Ok(Some(Message::Text(text))) => conn.session.on_text(cx, text, actions),
                            Ok(Some(Message::Binary(binary))) => conn.session.on_binary(cx, binary, actions),
                            Ok(Some(Message::Ping(data))) => {
                                let mut pong = Vec::with_capacity(ws::HEADER_BYTES_MAX + data.len());
                                ws::write_header(&mut pong, ws::Kind::Pong, data.len());
                                pong.extend_from_slice(data);
                                let chunk = Chunk { bytes: pong.into(), push: false };
                                conn.outbox.get_or_insert_with(Default::default).push(chunk);
                            }
                            // `next` has opened it.
                            Ok(Some(Message::Deflated { .. } | Message::Pong)) => {}
                            Err(error) => {
                                fault = Some((error.close_code(), error.to_string()));
                                break;
                            }
                        }
                    }
                    Stage::Echo(decoder) => {
                        match next(decoder, bytes, &mut at, ECHO_MAX, window_bits, inflater) {
                            Ok(None) => break,
                            Ok(Some(Message::Close(code))) => {
                                if !discards {
                                    peer_code = code;
                                }
                                conn.session.on_peer_closed(cx, actions);
                            }
                            Ok(Some(_)) if discards => {}
                            Ok(Some(Message::Pong)) => {}
                            Ok(Some(message)) => {
                                let (kind, data) = match message {
                                    Message::Text(data) => (ws::Kind::Text, data),
                                    Message::Binary(data) => (ws::Kind::Binary, data),
                                    Message::Ping(data) => (ws::Kind::Pong, data),
                                    Message::Deflated { .. } | Message::Pong | Message::Close(_) => continue,
                                };
                                let echo = frame_of(kind, data, window_bits, deflater);
                                let chunk = Chunk { bytes: echo.into(), push: false };
                                conn.outbox.get_or_insert_with(Default::default).push(chunk);
                            }
                            Err(error) => {
                                fault = Some((error.close_code(), error.to_string()));
                                break;
                            }
                        }
                    }
                }
                frames += 1;
            }
            if at < bytes.len() && fault.is_none() && conn.session.state().is_active() {
                conn.held = Some(Box::new(Held { bytes: bytes[at..].to_vec() }));
            }
        });
        self.inflater.forget();
        self.count(Count::FramesIn, frames);
        self.peer_code = peer_code;
        self.plan_flush_queued(index);
        self.act(index);
        if let Some((code, message)) = fault {
            self.on_fault(index, code, &message);
        }
    }

    /// The client's bytes make no sense any more: it is told, and whatever else it sends is discarded.
    fn on_fault(&mut self, index: u32, code: CloseCode, message: &str) {
        let actions = &mut self.actions;
        with(&self.shared, self.now, self.number, &mut self.conns, index, |conn, cx| {
            tracing::debug!(user = ?conn.session.user(), connection = cx.connection, message, "closing");
            conn.session.close(cx, code, None, None, actions);
        });
        self.act(index);
        if let Some(conn) = self.conns.at(index) {
            conn.stage = Stage::Deaf;
        }
    }
}

/// The next message, opened if it was compressed. The bounds are those of a message as it came and as it was opened.
fn next<'a>(
    decoder: &'a mut ws::Decoder,
    bytes: &'a mut [u8],
    at: &mut usize,
    [max, inflated_max]: [usize; 2],
    window_bits: Option<NonZeroU8>,
    inflater: &'a mut Inflater,
) -> Result<Option<Message<'a>>, ws::Fault> {
    match decoder.next(bytes, at, max, window_bits.is_some())? {
        Some(Message::Deflated { is_text, payload }) => {
            inflater.open(is_text, payload, inflated_max).map(Some)
        }
        message => Ok(message),
    }
}

/// One frame of the echo.
fn frame_of(kind: ws::Kind, data: &[u8], window_bits: Option<NonZeroU8>, deflater: &mut Deflater) -> Vec<u8> {
    let is_message = matches!(kind, ws::Kind::Text | ws::Kind::Binary);
    let bits = window_bits.filter(|_| is_message && data.len() >= DEFLATE_BYTES_MIN);
    let mut frame = Vec::with_capacity(ws::HEADER_BYTES_MAX + data.len());
    match bits.and_then(|bits| deflater.deflate(bits.get(), &[data])) {
        Some(deflated) => ws::write_deflated(&mut frame, kind == ws::Kind::Text, deflated),
        None => {
            ws::write_header(&mut frame, kind, data.len());
            frame.extend_from_slice(data);
        }
    }
    frame
}

/// A client without identity that does not read what it is answered is read again when it has.
fn is_choked(conn: &super::conn::Conn) -> bool {
    conn.session.state() == State::Waiting
        && conn.outbox.as_ref().is_some_and(|outbox| outbox.bytes() > READ_BYTES)
}
