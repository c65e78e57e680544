//! What has to be asked elsewhere: the key set of a token issuer, and the application's hook.
//!
//! One thread with a small runtime of its own does all of it, so that neither a slow issuer nor a slow application
//! holds up a shard. Keys are fetched at start, at intervals, and when a token names one that is not known; they stay
//! in force when the issuer cannot be reached. A token that waits for keys waits until the next fetch, which is never
//! sooner than [`RemoteLimits::keys_interval_min_ms`] after the last one: whoever makes up key names can slow down
//! others that do, and nobody else.

use crate::{
    Core, Fault, Identity, KeyError, Reply, Verdict,
    keys::{self, Key},
};
use bowline_hooks::http;
use bowline_protocol::{DeviceId, Millis, UserId, ids::DeviceClass, json};
use reqwest::{Client, StatusCode, Url};
use serde::{Deserialize, Serialize};
use std::{
    net::IpAddr,
    sync::{Arc, PoisonError, RwLock},
    time::Duration,
};
use tokio::{
    sync::{Notify, Semaphore, mpsc},
    time::Instant,
};

/// The largest answers that are read.
const KEYS_BYTES_MAX: usize = 1 << 20;
const ANSWER_BYTES_MAX: usize = 64 << 10;

/// Times and bounds of what is asked elsewhere.
#[derive(Debug, Clone)]
pub struct RemoteLimits {
    /// How long the application's hook may take for a token, waiting in the queue included.
    pub hook_timeout_ms: Millis,
    /// Questions to the hook that are on their way at once; the rest waits.
    pub hook_in_flight_max: usize,
    /// Tokens that wait, for the hook or for keys; beyond that they cannot be judged now.
    pub waiting_max: usize,
    pub keys_timeout_ms: Millis,
    /// How often keys are fetched when nothing asks for it.
    pub keys_interval_ms: Millis,
    /// The least time between two fetches.
    pub keys_interval_min_ms: Millis,
}

impl Default for RemoteLimits {
    fn default() -> Self {
        Self {
            hook_timeout_ms: 5_000,
            hook_in_flight_max: 256,
            waiting_max: 16_384,
            keys_timeout_ms: 5_000,
            keys_interval_ms: 300_000,
            keys_interval_min_ms: 5_000,
        }
    }
}

/// The way to the thread; it ends when this is dropped, and answers what still waits.
pub(crate) struct Remote {
    jobs: mpsc::Sender<Job>,
    has_hook: bool,
    /// Wakes the thread for a fetch of the keys.
    fetch: Arc<Notify>,
}

/// A token that waits.
pub(crate) struct Job {
    pub(crate) token: String,
    pub(crate) device_id: Option<String>,
    pub(crate) remote: IpAddr,
    pub(crate) now: Millis,
    pub(crate) aim: Aim,
    pub(crate) answer: Answer,
}

#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Aim {
    Hook,
    Keys,
}

/// Answers once; when it is dropped without an answer, that it cannot be judged now.
pub(crate) struct Answer(Option<Reply>);

impl Answer {
    pub(crate) fn new(reply: Reply) -> Self {
        Self(Some(reply))
    }

    fn give(mut self, verdict: Result<Identity, Fault>) {
        if let Some(reply) = self.0.take() {
            reply(verdict);
        }
    }

    /// Takes the promise back, because the verdict is given in another way.
    pub(crate) fn withdraw(mut self) {
        self.0 = None;
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        if let Some(reply) = self.0.take() {
            reply(Err(Fault::Unavailable("tokens cannot be judged: the server is stopping".into())));
        }
    }
}

/// The keys of the issuer, as last fetched.
#[derive(Default)]
pub(crate) struct KeySet {
    keys: RwLock<Fetched>,
}

#[derive(Default, Clone)]
pub(crate) struct Fetched {
    pub(crate) keys: Arc<[Key]>,
    /// Why there are none, or why they are old.
    pub(crate) fault: Option<String>,
}

impl KeySet {
    pub(crate) fn fetched(&self) -> Fetched {
        self.keys.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn put(&self, fetched: Result<Vec<Key>, String>) {
        let mut known = self.keys.write().unwrap_or_else(PoisonError::into_inner);
        match fetched {
            Ok(keys) => *known = Fetched { keys: keys.into(), fault: None },
            Err(fault) => known.fault = Some(fault),
        }
    }
}

impl Remote {
    pub(crate) fn start(
        core: Arc<Core>,
        keys_url: Option<&str>,
        hook_url: Option<&str>,
        limits: RemoteLimits,
    ) -> Result<Self, KeyError> {
        let url =
            |key, text: &str| http::address(text).ok_or_else(|| KeyError::Url { key, text: text.to_owned() });
        let keys_url = keys_url.map(|text| url("auth.jwks_url", text)).transpose()?;
        let hook_url = hook_url.map(|text| url("auth.hook_url", text)).transpose()?;
        let is_plain = [&keys_url, &hook_url].into_iter().flatten().all(|url| url.scheme() == "http");
        let client = http::client(is_plain).map_err(|error| KeyError::Client { error })?;
        let (jobs, asked) = mpsc::channel(limits.waiting_max.max(1));
        let has_hook = hook_url.is_some();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| KeyError::Thread { error: error.to_string() })?;
        let fetch = Arc::new(Notify::new());
        let work = Work { core, client, limits, hook_url, fetch: fetch.clone() };
        std::thread::Builder::new()
            .name("auth-remote".into())
            .spawn(move || runtime.block_on(work.run(keys_url, asked)))
            .map_err(|error| KeyError::Thread { error: error.to_string() })?;
        Ok(Self { jobs, has_hook, fetch })
    }

    pub(crate) fn has_hook(&self) -> bool {
        self.has_hook
    }

    /// Fetches the keys as soon as the least time between two fetches allows.
    pub(crate) fn fetch_soon(&self) {
        self.fetch.notify_one();
    }

    /// Hands a token over; back again when too many wait.
    pub(crate) fn ask(&self, job: Job) -> Result<(), Job> {
        self.jobs.try_send(job).map_err(|error| match error {
            mpsc::error::TrySendError::Full(job) | mpsc::error::TrySendError::Closed(job) => job,
        })
    }
}

/// What the thread works with.
struct Work {
    core: Arc<Core>,
    client: Client,
    limits: RemoteLimits,
    hook_url: Option<Url>,
    fetch: Arc<Notify>,
}

impl Work {
    async fn run(self, keys_url: Option<Url>, mut asked: mpsc::Receiver<Job>) {
        let work = Arc::new(self);
        let in_flight = Arc::new(Semaphore::new(work.limits.hook_in_flight_max.max(1)));
        let waiting_max = work.limits.waiting_max;
        // Tokens that wait for the next fetch, and for the one that is on its way.
        let mut waiting: Vec<Job> = Vec::new();
        let (fetched, mut fetches) = mpsc::channel(1);
        let mut is_fetching = false;
        let mut next_fetch = Instant::now();
        let mut not_before = next_fetch;
        // Tasks for the hook hold a job each; together they are as bounded as the queue.
        let hook_slots = Arc::new(Semaphore::new(waiting_max.max(1)));
        loop {
            let due = if waiting.is_empty() { next_fetch.max(not_before) } else { not_before };
            tokio::select! {
                job = asked.recv() => match job {
                    None => return,
                    Some(job) if job.aim == Aim::Hook => match Arc::clone(&hook_slots).try_acquire_owned() {
                        Ok(slot) => {
                            let (work, in_flight) = (Arc::clone(&work), Arc::clone(&in_flight));
                            tokio::spawn(async move {
                                work.ask_hook(job, &in_flight).await;
                                drop(slot);
                            });
                        }
                        Err(_) => job.answer.give(Err(busy())),
                    },
                    // The keys may have come while it was in the queue.
                    Some(job) => match work.core.judge(&job.token, job.now) {
                        Verdict::Given(verdict) => job.answer.give(verdict),
                        Verdict::UnknownKey(_) if waiting.len() < waiting_max => waiting.push(job),
                        Verdict::UnknownKey(_) => job.answer.give(Err(busy())),
                    },
                },
                () = work.fetch.notified() => next_fetch = Instant::now(),
                () = tokio::time::sleep_until(due), if keys_url.is_some() && !is_fetching => {
                    is_fetching = true;
                    not_before = Instant::now() + Duration::from_millis(work.limits.keys_interval_min_ms);
                    let (work, fetched) = (Arc::clone(&work), fetched.clone());
                    let url = keys_url.clone().expect("checked by the branch's condition");
                    let waited = std::mem::take(&mut waiting);
                    tokio::spawn(async move {
                        let keys = work.fetch_keys(&url).await;
                        // The loop has gone when this fails; so has the need.
                        let _ = fetched.send((keys, waited)).await;
                    });
                },
                Some((keys, waited)) = fetches.recv() => {
                    is_fetching = false;
                    let has_failed = keys.is_err();
                    work.core.remote_keys.put(keys);
                    let late = work.judge_again(std::mem::take(&mut waiting), false);
                    work.judge_again(waited, true);
                    waiting = late;
                    let pause = if has_failed {
                        work.limits.keys_interval_min_ms
                    } else {
                        work.limits.keys_interval_ms
                    };
                    next_fetch = Instant::now() + Duration::from_millis(pause);
                },
            }
        }
    }

    /// Judges tokens that waited for a fetch. Those that came while it was on its way may wait for the next: they are
    /// given back.
    fn judge_again(&self, waited: Vec<Job>, is_final: bool) -> Vec<Job> {
        let fault = self.core.remote_keys.fetched().fault;
        let mut rest = Vec::new();
        for job in waited {
            match (self.core.judge(&job.token, job.now), &fault) {
                (Verdict::Given(verdict), _) => job.answer.give(verdict),
                (Verdict::UnknownKey(_), Some(fault)) => {
                    job.answer.give(Err(Fault::Unavailable(fault.clone())));
                }
                (Verdict::UnknownKey(unknown), None) if is_final => job.answer.give(Err(unknown)),
                (Verdict::UnknownKey(_), None) => rest.push(job),
            }
        }
        rest
    }

    async fn fetch_keys(&self, url: &Url) -> Result<Vec<Key>, String> {
        let fetch = async {
            let response = self.client.get(url.clone()).send().await.map_err(|error| http::chain(&error))?;
            if response.status() != StatusCode::OK {
                return Err(format!("it answered {}", response.status()));
            }
            let bytes = http::read(response, KEYS_BYTES_MAX).await.map_err(|error| error.to_string())?;
            let keys = keys::of_set(&bytes)?;
            if keys.is_empty() {
                Err("it holds no key for RS256, ES256 or EdDSA".to_owned())
            } else {
                Ok(keys)
            }
        };
        let timeout = Duration::from_millis(self.limits.keys_timeout_ms);
        let fetched = tokio::time::timeout(timeout, fetch)
            .await
            .unwrap_or_else(|_| Err(format!("no answer within {} ms", timeout.as_millis())));
        fetched.map_err(|fault| format!("the key set at {url} (auth.jwks_url) cannot be used: {fault}"))
    }

    async fn ask_hook(&self, job: Job, in_flight: &Semaphore) {
        let Job { token, device_id, remote, now, answer, .. } = job;
        let question = HookQuestion { token: &token, device_id: device_id.as_deref(), remote_addr: remote };
        let body = serde_json::to_vec(&question).expect("texts are always JSON");
        let timeout = Duration::from_millis(self.limits.hook_timeout_ms);
        let asking = async {
            let _permit = in_flight.acquire().await.expect("the semaphore is never closed");
            self.hook_verdict(body, now).await
        };
        let verdict = tokio::time::timeout(timeout, asking)
            .await
            .unwrap_or_else(|_| Err(format!("no answer within {} ms", timeout.as_millis())))
            .unwrap_or_else(|fault| {
                Err(Fault::Unavailable(format!(
                    "the application's hook (auth.hook_url) did not judge: {fault}"
                )))
            });
        answer.give(verdict.and_then(|identity| self.core.check_hooked(identity, now)));
    }

    /// The outer error is a fault of the hook.
    async fn hook_verdict(&self, body: Vec<u8>, now: Millis) -> Result<Result<Identity, Fault>, String> {
        let url = self.hook_url.clone().ok_or("it is not configured")?;
        let request = self.client.post(url).header("content-type", "application/json").body(body);
        let response = request.send().await.map_err(|error| http::chain(&error))?;
        match response.status() {
            status if status.is_success() => {}
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                return Ok(Err(Fault::Invalid("the application refuses the token".into())));
            }
            status => return Err(format!("it answered {status}")),
        }
        let bytes = http::read(response, ANSWER_BYTES_MAX).await.map_err(|error| error.to_string())?;
        hook_identity(&bytes, now)
    }
}

#[derive(Serialize)]
struct HookQuestion<'a> {
    token: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    device_id: Option<&'a str>,
    remote_addr: IpAddr,
}

#[derive(Deserialize)]
struct HookAnswer {
    user_id: Option<String>,
    /// Milliseconds since the epoch.
    expires_at: Option<Millis>,
    device_class: Option<String>,
}

fn hook_identity(bytes: &[u8], now: Millis) -> Result<Result<Identity, Fault>, String> {
    let answer: HookAnswer =
        json::object(bytes).map_err(|error| format!("its answer cannot be read: {error}"))?;
    let Some(user) = answer.user_id else { return Ok(Err(Fault::NoSubject)) };
    let user = UserId::parse(&user).map_err(|error| format!("its answer's user_id: {error}"))?;
    let class = answer
        .device_class
        .map(|class| {
            DeviceClass::parse(&class)
                .ok_or_else(|| format!("its answer's device_class {class:?} is unknown"))
        })
        .transpose()?;
    let expires_at = answer.expires_at.unwrap_or(Millis::MAX);
    if expires_at <= now {
        return Ok(Err(Fault::Expired));
    }
    Ok(Ok(Identity {
        user,
        device: None::<DeviceId>,
        class,
        expires_at,
        // The application has just said so: what was revoked before does not count any more.
        issued_at: now,
        token_id: None,
        session_id: None,
        rooms: None,
    }))
}

pub(crate) fn busy() -> Fault {
    Fault::Unavailable("too many tokens wait to be judged; try again".into())
}
