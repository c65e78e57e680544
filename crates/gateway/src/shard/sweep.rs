//! What concerns all connections of a shard: begun at once, carried out in parts, so that no turn is long.

use super::{Shard, conn::Stage, id, mail::Predicate};
use crate::SessionKey;
use bowline_protocol::CloseCode;
use std::sync::mpsc;

/// Slots looked at in one turn.
const SLOTS: u32 = 2048;

pub struct Sweep {
    next: u32,
    kind: Kind,
}

enum Kind {
    /// Tell every client when to come back: the n-th after its share of the spread, the shards taking turns.
    Migrate {
        told: u64,
    },
    /// The drain's deadline.
    Drained,
    CloseWhere {
        predicate: Predicate,
        code: CloseCode,
        count: usize,
        closed: mpsc::SyncSender<usize>,
    },
}

impl Sweep {
    pub fn drained() -> Self {
        Self { next: 0, kind: Kind::Drained }
    }

    pub fn close_where(predicate: Predicate, code: CloseCode, closed: mpsc::SyncSender<usize>) -> Self {
        Self { next: 0, kind: Kind::CloseWhere { predicate, code, count: 0, closed } }
    }
}

impl Shard {
    pub(super) fn on_drain(&mut self) {
        let Some(drain) = self.shared.drain.get() else { return };
        self.drain_deadline_ms = Some(drain.deadline_mono_ms);
        self.sweeps.push(Sweep { next: 0, kind: Kind::Migrate { told: 0 } });
    }

    pub(super) fn run_sweeps(&mut self) {
        let mut sweeps = std::mem::take(&mut self.sweeps);
        sweeps.retain_mut(|sweep| !self.run_sweep(sweep));
        sweeps.append(&mut self.sweeps);
        self.sweeps = sweeps;
    }

    /// Goes on with a sweep; says whether it is over.
    fn run_sweep(&mut self, sweep: &mut Sweep) -> bool {
        let end = sweep.next.saturating_add(SLOTS).min(self.conns.end());
        for index in sweep.next..end {
            self.visit(index, &mut sweep.kind);
        }
        sweep.next = end;
        let over = end >= self.conns.end();
        if let (true, Kind::CloseWhere { count, closed, .. }) = (over, &sweep.kind) {
            // Whoever asked may have gone.
            let _gone = closed.send(*count);
        }
        over
    }

    fn visit(&mut self, index: u32, kind: &mut Kind) {
        let Some(conn) = self.conns.at(index) else { return };
        match kind {
            Kind::Migrate { told } => {
                if conn.session.state().is_open() && conn.session.user().is_some() {
                    let spread_ms = self.shared.config.migrate_spread_ms;
                    // Connections are dealt out in turn, so that all shards have about as many.
                    let place = *told * self.shared.mailboxes.len() as u64 + self.number as u64;
                    let last = self.shared.drain.get().map_or(0, |drain| drain.open).saturating_sub(1);
                    let delay_ms = spread_ms * place / last.max(1);
                    *told += 1;
                    let reason = self.shared.drain.get().map(|drain| drain.reason.clone());
                    conn.session.on_drain(
                        delay_ms.min(spread_ms),
                        reason.as_deref().unwrap_or("draining"),
                        &mut self.actions,
                    );
                    self.act(index);
                }
            }
            Kind::Drained => {
                // Requests for the HTTP server go on.
                if !matches!(conn.stage, Stage::Head(None)) {
                    let delay_ms = self.random_delay_ms();
                    self.close(index, CloseCode::Draining, None, Some(delay_ms));
                }
            }
            Kind::CloseWhere { predicate, code, count, .. } => {
                let session = &conn.session;
                if !session.state().is_active() {
                    return;
                }
                let (Some(user), Some(device)) = (session.user(), session.device()) else { return };
                let claims = session.claims();
                let key = SessionKey {
                    user,
                    device,
                    session_id: claims.and_then(|claims| claims.session_id.as_deref()),
                    token_id: claims.and_then(|claims| claims.token_id.as_deref()),
                    issued_at: session.issued_at(),
                };
                if predicate(&key) {
                    *count += 1;
                    let connection = id::encode(self.number, self.conns.generation(index), index);
                    tracing::debug!(connection, cause = code.reason(), "closed by request");
                    self.close(index, *code, None, None);
                }
            }
        }
    }

    /// Closes everything, in this turn.
    pub(super) fn close_all(&mut self, code: CloseCode) {
        for index in 0..self.conns.end() {
            self.close(index, code, None, None);
        }
    }
}
