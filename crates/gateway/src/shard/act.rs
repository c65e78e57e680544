//! Carries out what a session asks for.

use super::{
    Shard,
    conn::{Conn, Stage},
    id,
    mail::Mail,
    with,
};
use crate::{
    judge,
    metrics::Count,
    wire::{Shared, Transport, encode},
};
use bowline_auth::{Fault, Identity, Question, Reply};
use bowline_protocol::{CloseCode, DeviceId, ServerFrame, ws, ws::handshake::Refused};
use bowline_session::{Action, Refusal};
use bytes::Bytes;
use std::{
    net::{IpAddr, Ipv4Addr},
    sync::Arc,
};

/// Forged frames are logged once in so long, for each shard; the counter counts them all.
const MISMATCH_LOG_MS: u64 = 1000;

impl Shard {
    /// Carries out what was collected for a connection, and what follows from that.
    pub(super) fn act(&mut self, index: u32) {
        while !self.actions.is_empty() {
            let mut actions = std::mem::take(&mut self.actions);
            for action in actions.drain(..) {
                self.carry_out(index, action);
            }
            if self.actions.is_empty() {
                self.actions = actions;
            }
        }
        self.set_timer(index);
    }

    fn carry_out(&mut self, index: u32, action: Action) {
        let Some(conn) = self.conns.at(index) else { return };
        match action {
            Action::Verify { token, device, refresh } => self.verify(index, &token, device.as_ref(), refresh),
            Action::Up(event) => {
                let login = conn.session.login();
                self.tell_router(index, login, event);
            }
            Action::Room(request) => self.on_room(index, request),
            Action::Send(frame) => {
                let mut shared = Shared::new(&frame);
                let bytes = shared.bytes(conn.transport, conn.window_bits, &mut self.deflater);
                self.queue(index, bytes, false);
            }
            Action::Ping => self.ping(index),
            Action::Opened => self.on_opened(index),
            Action::Ended { code, open } => self.on_ended(index, code, open),
            Action::Paused => self.count(Count::Paused, 1),
            Action::Resumed => {
                self.count(Count::Resumed, 1);
                self.plan_read(index);
            }
            Action::CutQueue => {
                let dropped = conn.outbox.as_mut().map_or(0, |outbox| outbox.drop_whole_frames());
                self.count(Count::SlowFramesDropped, dropped as u64);
            }
            Action::Close { code, reason, retry_after_ms, refusal } => {
                self.say_closed(index, code, reason.as_deref(), retry_after_ms, refusal);
            }
            Action::AnswerClose => {
                let code = self.peer_code.take();
                self.queue_close_frame(index, code, "");
            }
            Action::EndOutput => {
                let ends = matches!(conn.stage, Stage::Tcp(_) | Stage::Deaf);
                if ends && !std::mem::replace(&mut conn.output_ended, true) {
                    conn.socket.end_output();
                }
            }
            Action::Drop => self.remove(index),
            Action::Failed { frame, code } => self.counters().failed(frame, code),
            Action::Mismatch { claimed } => {
                let user = conn.session.user().cloned();
                self.count(Count::IdentityMismatches, 1);
                if self.mismatch_log_ms <= self.now.mono_ms {
                    self.mismatch_log_ms = self.now.mono_ms + MISMATCH_LOG_MS;
                    let connection = id::encode(self.number, self.conns.generation(index), index);
                    tracing::warn!(connection, ?user, claimed, "a frame claims to be from somebody else");
                }
            }
        }
    }

    /// Asks the verifier; `connect` passes the gate first, as a handshake did before.
    fn verify(&mut self, index: u32, token: &str, device: Option<&DeviceId>, refresh: bool) {
        let Some(conn) = self.conns.at(index) else { return };
        // A handshake has passed it a moment ago.
        let passed = matches!(conn.stage, Stage::Head(_));
        if !refresh
            && !passed
            && let Err(turned) = self.enter(index)
        {
            let actions = &mut self.actions;
            with(&self.shared, self.now, self.number, &mut self.conns, index, |conn, cx| {
                conn.session.refuse(cx, turned.refusal(), actions);
            });
            return;
        }
        let connection = id::encode(self.number, self.conns.generation(index), index);
        let Some(conn) = self.conns.at(index) else { return };
        let remote = conn.socket.peer_ip().unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
        let question = Question { token, device_id: device.map(DeviceId::as_str), remote };
        let mailbox = self.shared.mailboxes[self.number].clone();
        let later = move || -> Reply {
            Box::new(move |judged| mailbox.push_control(Mail::Verdict { connection, refresh, judged }))
        };
        if let Some(judged) = self.shared.judge.verify(question, self.now.wall_ms, later) {
            self.judged(index, refresh, judged);
        }
    }

    /// A verdict that came by mail.
    pub(super) fn on_verdict(&mut self, connection: u64, refresh: bool, judged: Result<Identity, Fault>) {
        let (index, generation) = id::place(connection);
        if self.conns.of(index, generation).is_some() {
            self.judged(index, refresh, judged);
            self.act(index);
        }
    }

    fn judged(&mut self, index: u32, refresh: bool, judged: Result<Identity, Fault>) {
        let fresh = self.fresh();
        let actions = &mut self.actions;
        with(&self.shared, self.now, self.number, &mut self.conns, index, |conn, cx| {
            conn.session.on_verdict(cx, refresh, judge::verdict(judged), fresh, actions);
        });
    }

    fn on_opened(&mut self, index: u32) {
        let Some(conn) = self.conns.at(index) else { return };
        conn.live = true;
        self.shared.add_live();
        if let (Some(user), Some(device)) = (conn.session.user(), conn.session.device()) {
            self.shared.registry.add(user, device);
            tracing::debug!(%user, %device, login = conn.session.login(), "connected");
        }
        let transport = conn.transport;
        if let Stage::Head(upgrade) = &mut conn.stage
            && let Some(upgrade) = upgrade.take()
        {
            conn.stage = Stage::WebSocket(Default::default());
            self.switch(index, &upgrade);
        }
        self.count(
            match transport {
                Transport::WebSocket => Count::WebSocketOpened,
                Transport::Tcp => Count::TcpOpened,
            },
            1,
        );
        if let Some(drain) = self.shared.drain.get() {
            let (reason, delay_ms) = (drain.reason.clone(), self.random_delay_ms());
            let actions = &mut self.actions;
            if let Some(conn) = self.conns.at(index) {
                conn.session.on_drain(delay_ms, &reason, actions);
            }
        }
        self.plan_read(index);
    }

    fn on_ended(&mut self, index: u32, code: CloseCode, open: bool) {
        let Some(conn) = self.conns.at(index) else { return };
        let counted = matches!(conn.stage, Stage::WebSocket(_) | Stage::Tcp(_) | Stage::Echo(_));
        let transport = conn.transport;
        conn.held = None;
        if let Some(extras) = &mut conn.extras {
            let memberships = std::mem::take(&mut extras.rooms);
            self.leave_rooms(memberships);
        }
        let Some(conn) = self.conns.at(index) else { return };
        let user = conn.session.user();
        if let (true, Some(user), Some(device)) = (open, user, conn.session.device()) {
            self.shared.registry.remove(user, device);
        }
        let login = conn.session.login();
        match code {
            CloseCode::SlowConsumer | CloseCode::Policy | CloseCode::BackpressureTimeout => {
                tracing::info!(?user, login, cause = code.reason(), "connection ends");
            }
            _ => tracing::debug!(?user, login, cause = code.reason(), "connection ends"),
        }
        if counted {
            self.counters().closed(code);
        }
        if open {
            self.count(
                match transport {
                    Transport::WebSocket => Count::WebSocketEnded,
                    Transport::Tcp => Count::TcpEnded,
                },
                1,
            );
        }
        // Its input is wanted again, to be discarded, and one that leaves may have nothing more to write.
        self.plan_read(index);
        self.plan_flush_queued(index);
    }

    /// The last words, in the form that the connection is in.
    fn say_closed(
        &mut self,
        index: u32,
        code: CloseCode,
        reason: Option<&str>,
        retry_after_ms: Option<u64>,
        refusal: Option<Box<Refusal>>,
    ) {
        let Some(conn) = self.conns.at(index) else { return };
        let transport = conn.transport;
        match &conn.stage {
            // A head that was never completed is not answered.
            Stage::Head(None) => return self.remove(index),
            Stage::Head(Some(_)) => {
                let refusal = refusal.map_or_else(Refusal::overloaded, |refusal| *refusal);
                let mut refused = Refused::new(refusal.status, refusal.code, refusal.message);
                refused.retry_after_ms = refusal.retry_after_ms;
                return self.answer_refused(index, &refused);
            }
            Stage::Deaf => return,
            Stage::Echo(_) => {}
            Stage::WebSocket(_) | Stage::Tcp(_) => {
                if let Some(refusal) = refusal {
                    tracing::debug!(code = code.code(), cause = %refusal.message, "connect refused");
                    self.counters().failed(Some("connect"), refusal.code);
                }
                let frame = ServerFrame::closed(code, reason, retry_after_ms).encode();
                self.queue(index, encode(&frame, transport), false);
            }
        }
        self.queue_close_frame(index, Some(code.code()), reason.unwrap_or(code.reason()));
    }

    /// The transport's own close, where it has one.
    fn queue_close_frame(&mut self, index: u32, code: Option<u16>, reason: &str) {
        let Some(conn) = self.conns.at(index) else { return };
        if conn.transport == Transport::WebSocket {
            let mut close = Vec::new();
            ws::write_close(&mut close, code, reason);
            self.queue(index, close.into(), false);
        }
    }

    fn ping(&mut self, index: u32) {
        let Some(conn) = self.conns.at(index) else { return };
        let bytes = match (&conn.stage, conn.transport) {
            (Stage::Echo(_), _) => Bytes::from_static(b"\x89\x00"),
            (_, transport) => encode(&ServerFrame::Ping.encode(), transport),
        };
        self.queue(index, bytes, false);
    }

    /// Takes a connection out of every table.
    pub(super) fn take_out(&mut self, index: u32) -> Option<Conn> {
        let mut conn = self.conns.remove(index)?;
        self.wheel.clear(index);
        self.early.remove(&index);
        if let Some(extras) = &mut conn.extras {
            let memberships = std::mem::take(&mut extras.rooms);
            self.leave_rooms(memberships);
        }
        if std::mem::take(&mut conn.live) {
            self.shared.remove_live();
        }
        Some(conn)
    }

    /// Closes the socket: with a reset when the client has not taken what was its to read.
    pub(super) fn remove(&mut self, index: u32) {
        let Some(mut conn) = self.take_out(index) else { return };
        if !conn.has_unsent() {
            conn.socket.say_goodbye();
        } else if !self.stopping
            && let Err(error) = conn.socket.reset_at_end()
        {
            tracing::debug!(%error, "a connection cannot be reset");
        }
    }

    pub(super) fn close(
        &mut self,
        index: u32,
        code: CloseCode,
        reason: Option<Arc<str>>,
        retry_after_ms: Option<u64>,
    ) {
        let actions = &mut self.actions;
        with(&self.shared, self.now, self.number, &mut self.conns, index, |conn, cx| {
            conn.session.close(cx, code, reason, retry_after_ms, actions);
        });
        self.act(index);
    }
}
