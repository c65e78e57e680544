//! This node as operators see it: status, readiness, metrics.

use crate::{
    metrics::{self, LedgerTotals, Snapshot},
    process::Process,
};
use bowline_api::{Drain, Requests, RoomMessage, State, Status, Transport, Transports};
use bowline_delivery::persist::{Found, Query};
use bowline_gateway::{Handle as Gateway, RoomPost};
use bowline_protocol::{
    ErrorCode, UserId,
    error::Refusal,
    ids::RoomName,
    link::{NodeRef, Request},
};
use bowline_router::Handle as Router;
use bowline_store::Reader;
use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// How often the canary flies.
const CANARY_EVERY: Duration = Duration::from_secs(2);
/// How long one may take.
const CANARY_TIMEOUT: Duration = Duration::from_secs(3);
/// Without a canary that came back for so long the node is not ready.
const CANARY_AGE_MAX_MS: u64 = 6_000;

pub struct Node {
    pub node: Arc<NodeRef>,
    pub gateway: Gateway,
    pub router: Router,
    pub ledger: Mutex<Box<dyn Reader>>,
    pub canary: Arc<Canary>,
    pub started: Instant,
    /// Every listener is up.
    pub is_up: AtomicBool,
}

impl Node {
    fn state(&self) -> State {
        match (self.gateway.is_draining(), self.is_up.load(Ordering::Acquire)) {
            (true, _) => State::Draining,
            (false, true) => State::Ready,
            (false, false) => State::Starting,
        }
    }

    fn ledger(&self) -> Option<LedgerTotals> {
        let mut reader = self.ledger.lock().unwrap_or_else(PoisonError::into_inner);
        match reader.read(&Query::Ledger) {
            Found::Ledger { ledger, waiting } => Some(LedgerTotals { totals: ledger, waiting }),
            Found::Failed(error) => {
                tracing::warn!(%error, "the ledger cannot be read; its metrics are left out");
                None
            }
            other => {
                tracing::error!(?other, "the store answered something else than the ledger");
                None
            }
        }
    }
}

impl bowline_api::Node for Node {
    fn status(&self) -> Status {
        let status = self.gateway.status();
        let transport = |from: bowline_gateway::TransportStatus| {
            let path = Some(from.path).filter(|path| !path.is_empty());
            let connections = from.connections as u64;
            from.address.map(|address| Transport { address: address.to_string(), path, connections })
        };
        Status {
            node_id: self.node.node_id.to_string(),
            boot_id: self.node.boot_id.to_string(),
            version: env!("CARGO_PKG_VERSION").into(),
            state: self.state(),
            uptime_ms: self.started.elapsed().as_millis() as u64,
            connections: status.connections as u64,
            users: status.users as u64,
            devices: status.devices as u64,
            transports: Transports { ws: transport(status.ws), tcp: transport(status.tcp) },
            drain: status
                .drain
                .map(|drain| Drain { deadline: drain.deadline, remaining: drain.remaining as u64 }),
        }
    }

    fn drain(&self, reason: &str) {
        self.gateway.drain(reason);
    }

    fn readiness(&self) -> Result<(), Vec<String>> {
        let mut reasons = Vec::new();
        match self.state() {
            State::Starting => reasons.push("starting: not every listener is up".to_owned()),
            State::Draining => reasons.push("draining".to_owned()),
            State::Ready => {}
        }
        reasons.extend(self.canary.complaint());
        if reasons.is_empty() { Ok(()) } else { Err(reasons) }
    }

    fn metrics(&self) -> String {
        let status = self.gateway.status();
        let snapshot = Snapshot {
            gateway: self.gateway.metrics(),
            users: status.users as u64,
            devices: status.devices as u64,
            router: self.router.snapshot(),
            ledger: self.ledger(),
            process: Process::this(),
        };
        metrics::encode(snapshot).unwrap_or_else(|error| {
            tracing::error!(%error, "metrics cannot be written");
            String::new()
        })
    }
}

impl bowline_api::Rooms for Node {
    fn publish(&self, room: &RoomName, messages: &[RoomMessage]) -> Result<u64, Refusal> {
        let posts: Vec<RoomPost<'_>> = messages
            .iter()
            .map(|message| RoomPost { from: message.from.as_deref(), body: &message.body })
            .collect();
        self.gateway
            .publish(room, &posts)
            .map_err(|refused| Refusal::new(ErrorCode::Overloaded, refused.to_string()))
    }
}

/// A question that goes the whole way every few seconds: up the link, through the router and the store, and down
/// the link again. A node whose data path is dead must not look healthy.
pub struct Canary {
    began: Instant,
    /// When one came back last, in milliseconds since `began`; 0 is never.
    back_at_ms: AtomicU64,
}

impl Canary {
    pub fn new() -> Self {
        Self { began: Instant::now(), back_at_ms: AtomicU64::new(0) }
    }

    /// Flies once; whether it came back.
    pub async fn fly(&self, requests: &Requests) -> bool {
        let user = UserId::trusted("bowline-canary");
        let is_back = requests.ask(Request::User { user }).await.is_ok();
        if is_back {
            let now = self.began.elapsed().as_millis() as u64;
            self.back_at_ms.store(now.max(1), Ordering::Release);
        }
        is_back
    }

    pub async fn run(&self, requests: Requests) {
        let requests = requests.with_timeout(CANARY_TIMEOUT);
        let mut was_back = true;
        loop {
            let is_back = self.fly(&requests).await;
            if was_back && !is_back {
                tracing::warn!("the canary did not come back: the router or the store does not answer");
            } else if is_back && !was_back {
                tracing::info!("the canary came back");
            }
            was_back = is_back;
            tokio::time::sleep(CANARY_EVERY).await;
        }
    }

    fn complaint(&self) -> Option<String> {
        let now = self.began.elapsed().as_millis() as u64;
        match self.back_at_ms.load(Ordering::Acquire) {
            0 => Some("no request has come back from the router yet".into()),
            at if now.saturating_sub(at) > CANARY_AGE_MAX_MS => Some(format!(
                "no request has come back from the router for {} ms; see its log",
                now.saturating_sub(at)
            )),
            _ => None,
        }
    }
}
