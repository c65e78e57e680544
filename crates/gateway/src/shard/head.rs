//! The request head of the public port: an upgrade is judged here, everything else goes to the HTTP server.

use super::{
    Shard,
    conn::{Held, Stage, Upgrade},
    with,
};
use crate::{gate::Turned, metrics::Count};
use bowline_protocol::{
    CloseCode, ErrorCode,
    ws::handshake::{self, HEAD_BYTES_MAX, Refused, Request},
};
use bowline_session::{Hello, Session};
use bytes::Bytes;
use std::{num::NonZeroU8, sync::Arc};

/// What becomes of a request.
enum Plan {
    /// The head is not complete.
    Wait,
    /// It is for the HTTP server.
    HandOver,
    Refuse(Refused),
    Echo {
        upgrade: Upgrade,
        head_bytes: usize,
    },
    Session {
        upgrade: Upgrade,
        token: Option<String>,
        hello: Hello,
        head_bytes: usize,
    },
}

impl Shard {
    /// Bytes of a connection whose request head is not complete.
    pub(super) fn on_head_bytes(&mut self, index: u32, new: &mut [u8]) {
        let Some(conn) = self.conns.at(index) else { return };
        if !conn.session.state().is_active() {
            return;
        }
        match conn.held.take() {
            Some(mut held) => {
                let seen = held.bytes.len();
                held.bytes.extend_from_slice(new);
                self.judge_head(index, &mut held.bytes, seen);
            }
            None => self.judge_head(index, new, 0),
        }
    }

    /// `seen` bytes were looked at before and hold no whole head.
    fn judge_head(&mut self, index: u32, bytes: &mut [u8], seen: usize) {
        match self.plan_head(index, bytes, seen) {
            Plan::Wait => {
                if let Some(conn) = self.conns.at(index) {
                    conn.held = Some(Box::new(Held { bytes: bytes.to_vec() }));
                }
            }
            Plan::HandOver => self.hand_over(index, bytes),
            Plan::Refuse(refused) => self.refuse_head(index, &refused),
            Plan::Echo { upgrade, head_bytes } => {
                let random = self.entropy.next() as u32;
                if let Some(conn) = self.conns.at(index) {
                    conn.session = Session::without_identity(&self.shared.rules, self.now, random);
                    conn.stage = Stage::Echo(Default::default());
                }
                self.switch(index, &upgrade);
                self.set_timer(index);
                self.take_apart(index, &mut bytes[head_bytes..]);
            }
            Plan::Session { upgrade, token, hello, head_bytes } => {
                let Some(conn) = self.conns.at(index) else { return };
                let rest = &mut bytes[head_bytes..];
                let Some(token) = token else {
                    conn.session.on_query(hello);
                    conn.stage = Stage::WebSocket(Default::default());
                    self.switch(index, &upgrade);
                    return self.take_apart(index, rest);
                };
                if !rest.is_empty() {
                    conn.held = Some(Box::new(Held { bytes: rest.to_vec() }));
                }
                conn.stage = Stage::Head(Some(Box::new(upgrade)));
                let actions = &mut self.actions;
                with(&self.shared, self.now, self.number, &mut self.conns, index, |conn, cx| {
                    conn.session.on_handshake(cx, token, hello, actions);
                });
                self.act(index);
            }
        }
    }

    /// Judges a head in the documented order; what comes after the origin is for the session.
    fn plan_head(&mut self, index: u32, bytes: &[u8], seen: usize) -> Plan {
        if bytes.starts_with(b"PRI * HTTP/2") {
            return Plan::HandOver;
        }
        let complete = memchr::memmem::find(&bytes[seen.saturating_sub(3)..], b"\r\n\r\n").is_some();
        // An incomplete head is parsed once, for what is no HTTP at all, and then only when it is complete.
        if !complete && seen > 0 && bytes.len() <= HEAD_BYTES_MAX {
            return Plan::Wait;
        }
        let request = match Request::parse(bytes) {
            Ok(Some(request)) => request,
            Ok(None) => return Plan::Wait,
            Err(refused) => return Plan::Refuse(refused),
        };
        let config = &self.shared.config;
        let echo = config.echo_path.as_deref() == Some(request.path);
        if request.path != config.ws_path && !echo {
            return if request.is_upgrade() {
                Plan::Refuse(Refused::new(404, ErrorCode::NotFound, "no WebSocket is served at this path"))
            } else {
                Plan::HandOver
            };
        }
        let opening = match request.upgrade() {
            Ok(opening) => opening,
            Err(refused) => return Plan::Refuse(refused),
        };
        let origin_is_good = request.origin().is_none_or(|origin| {
            config.allowed_origins.is_empty()
                || config
                    .allowed_origins
                    .iter()
                    .any(|allowed| allowed.as_bytes().eq_ignore_ascii_case(origin))
        });
        let head_bytes = request.head_bytes;
        if let Err(turned) = self.enter(index) {
            return Plan::Refuse(turned.refused());
        }
        if !origin_is_good {
            return Plan::Refuse(Refused::new(
                403,
                ErrorCode::Forbidden,
                "this Origin may not connect; add it to gateway.allowed_origins",
            ));
        }
        let deflate = opening.deflate.filter(|_| self.shared.config.compression);
        let upgrade = Upgrade { accept: opening.accept, subprotocol: opening.subprotocol, deflate };
        if echo {
            return Plan::Echo { upgrade, head_bytes };
        }
        let hello = Hello {
            device: opening.params.device_id,
            class: opening.params.device_class,
            channel: opening.params.channel.map(Arc::from),
            resume: opening.params.resume.map(Arc::from),
        };
        Plan::Session { upgrade, token: opening.token, hello, head_bytes }
    }

    /// Asks the gate, once: whether new sessions are taken at all, and for a seat unless the connection has one.
    pub(super) fn enter(&mut self, index: u32) -> Result<(), Turned> {
        if self.shared.drain.get().is_some() {
            return Err(Turned::Draining { retry_after_ms: self.random_delay_ms().max(1) });
        }
        if self.is_overloaded() {
            return Err(Turned::Overloaded);
        }
        let Some(conn) = self.conns.at(index).filter(|conn| !conn.entered) else { return Ok(()) };
        conn.socket.place.sit()?;
        self.shared.gate.pay(self.shared.clock.micros())?;
        conn.entered = true;
        Ok(())
    }

    /// When a client that comes back anywhere else should do so.
    pub(super) fn random_delay_ms(&mut self) -> u64 {
        self.entropy.next() % (self.shared.config.migrate_spread_ms + 1)
    }

    /// Sends 101.
    pub(super) fn switch(&mut self, index: u32, upgrade: &Upgrade) {
        let mut answer = Vec::with_capacity(192);
        handshake::write_switching(&mut answer, &upgrade.accept, upgrade.subprotocol, upgrade.deflate);
        if let Some(conn) = self.conns.at(index) {
            conn.window_bits = upgrade.deflate.and_then(|agreed| NonZeroU8::new(agreed.window_bits));
        }
        self.queue(index, answer.into(), false);
    }

    /// Answers a request that opens nothing, and closes when the client has read it.
    fn refuse_head(&mut self, index: u32, refused: &Refused) {
        self.answer_refused(index, refused);
        let actions = &mut self.actions;
        with(&self.shared, self.now, self.number, &mut self.conns, index, |conn, cx| {
            conn.session.close(cx, CloseCode::Unauthenticated, None, None, actions);
        });
        self.act(index);
    }

    /// Sends an HTTP answer; the client is not listened to any more.
    pub(super) fn answer_refused(&mut self, index: u32, refused: &Refused) {
        self.counters().refused(refused.status);
        let connection = super::id::encode(self.number, self.conns.generation(index), index);
        tracing::debug!(connection, status = refused.status, cause = %refused.message, "handshake refused");
        if let Some(conn) = self.conns.at(index) {
            conn.stage = Stage::Deaf;
            conn.held = None;
            // It keeps nobody out while it reads; where there is nowhere to stand it keeps its seat.
            let _seated = conn.socket.place.stand();
        }
        let mut answer = Vec::new();
        refused.write(&mut answer);
        self.queue(index, answer.into(), false);
    }

    /// Gives the connection, with what was read of it, to the HTTP server.
    fn hand_over(&mut self, index: u32, read: &[u8]) {
        if let Some(conn) = self.conns.at(index)
            && let Err(turned) = conn.socket.place.stand()
        {
            return self.refuse_head(index, &turned.refused());
        }
        let Some(mut conn) = self.take_out(index) else { return };
        if let Err(error) = self.poll.registry().deregister(&mut conn.socket.stream) {
            tracing::warn!(%error, "a connection cannot be handed to the HTTP server and is dropped");
            return;
        }
        self.count(Count::HandedToHttp, 1);
        (self.http)(conn.socket.into(), Bytes::copy_from_slice(read));
    }
}
