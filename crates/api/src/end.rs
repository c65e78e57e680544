//! The API's end of the links: requests go up, answers come down.

use crate::limits::{ANSWER_TIMEOUT, OFFER_AGAIN, PENDING_MAX};
use bowline_links::{Downlinks, Uplinks};
use bowline_protocol::{
    ErrorCode,
    error::Refusal,
    link::{Answer, ConnRef, Down, Downlink, NodeRef, Request, Up, Uplink},
};
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use tokio::{
    sync::oneshot,
    time::{Instant, sleep, timeout_at},
};

/// Where answers arrive: the API's [`Downlinks`].
pub struct ApiEnd {
    node: Arc<NodeRef>,
    pending: Mutex<Pending>,
}

#[derive(Default)]
struct Pending {
    last_id: u64,
    waiting: HashMap<u64, oneshot::Sender<Answer>>,
}

impl ApiEnd {
    pub fn new(node: Arc<NodeRef>) -> Self {
        Self { node, pending: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Requests that wait for an answer.
    pub fn waiting(&self) -> usize {
        self.lock().waiting.len()
    }
}

impl Downlinks for ApiEnd {
    fn send(&self, batch: Vec<Downlink>) {
        let mut pending = self.lock();
        for message in batch {
            if let Down::Answer { request_id, answer } = message.event
                && message.node == self.node
                && let Some(reply) = pending.waiting.remove(&request_id)
            {
                // Whoever asked may have gone; the answer is then nobody's.
                let _ = reply.send(*answer);
            }
        }
    }
}

/// Asks the router.
#[derive(Clone)]
pub struct Requests {
    end: Arc<ApiEnd>,
    uplinks: Arc<dyn Uplinks>,
    timeout: Duration,
}

/// Takes back what is still waiting when whoever asked goes away.
struct Asked<'a> {
    end: &'a ApiEnd,
    ids: std::ops::Range<u64>,
}

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        let mut pending = self.end.lock();
        for id in self.ids.clone() {
            pending.waiting.remove(&id);
        }
    }
}

impl Requests {
    pub fn new(end: Arc<ApiEnd>, uplinks: Arc<dyn Uplinks>) -> Self {
        Self { end, uplinks, timeout: ANSWER_TIMEOUT }
    }

    /// Waits less long for answers than [`ANSWER_TIMEOUT`]; for tests.
    pub fn with_timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    /// One request and its answer.
    pub async fn ask(&self, request: Request) -> Result<Answer, Refusal> {
        let mut answers = self.ask_all(vec![request]).await;
        answers.pop().unwrap_or_else(|| Err(Refusal::new(ErrorCode::Internal, "a request had no answer")))
    }

    /// All at once, in this order; the answers come in the same order.
    pub async fn ask_all(&self, requests: Vec<Request>) -> Vec<Result<Answer, Refusal>> {
        let count = requests.len();
        let deadline = Instant::now() + self.timeout;
        let Some((asked, replies)) = self.register(count) else {
            let refusal = Refusal::new(
                ErrorCode::Overloaded,
                format!("{PENDING_MAX} requests are waiting for the router; try again in a moment"),
            );
            return vec![Err(refusal); count];
        };
        let from = ConnRef { node: self.end.node.clone(), connection: 0, login: 0 };
        let mut batch: Vec<Uplink> = requests
            .into_iter()
            .zip(asked.ids.clone())
            .map(|(request, request_id)| Uplink {
                from: from.clone(),
                event: Up::Request { request_id, request },
            })
            .collect();
        self.uplinks.send(&mut batch);
        while !batch.is_empty() && Instant::now() < deadline {
            sleep(OFFER_AGAIN).await;
            self.uplinks.send(&mut batch);
        }
        let sent = count - batch.len();
        let mut answers = Vec::with_capacity(count);
        for (index, reply) in replies.into_iter().enumerate() {
            answers.push(if index < sent { self.wait(reply, deadline).await } else { Err(queue_is_full()) });
        }
        answers
    }

    fn register(&self, count: usize) -> Option<(Asked<'_>, Vec<oneshot::Receiver<Answer>>)> {
        let mut pending = self.end.lock();
        if pending.waiting.len() + count > PENDING_MAX {
            return None;
        }
        let first = pending.last_id + 1;
        let ids = first..first + count as u64;
        pending.last_id += count as u64;
        let replies = ids
            .clone()
            .map(|id| {
                let (reply, answer) = oneshot::channel();
                pending.waiting.insert(id, reply);
                answer
            })
            .collect();
        Some((Asked { end: &self.end, ids }, replies))
    }

    async fn wait(&self, reply: oneshot::Receiver<Answer>, deadline: Instant) -> Result<Answer, Refusal> {
        match timeout_at(deadline, reply).await {
            Ok(Ok(Answer::Refused(refusal))) => Err(refusal),
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(_)) | Err(_) => Err(Refusal::new(
                ErrorCode::Unavailable,
                format!(
                    "the router gave no answer within {} ms; it may have done it: send the same again",
                    self.timeout.as_millis()
                ),
            )),
        }
    }
}

fn queue_is_full() -> Refusal {
    Refusal::new(ErrorCode::Overloaded, "the router's queue is full; try again in a moment")
}
