//! Who is this: tokens and keys, sessions and revocations.
//!
//! A token is judged once, when a connection opens: its signature by the configured keys, or by the application's
//! hook; its claims; then sessions and revocations. What is known at once is answered at once, on the caller's
//! thread; what takes a look elsewhere is answered through a [`Reply`].

mod keys;
mod mint;
mod remote;
mod revocation;
mod token;

pub use keys::KeyError;
pub use mint::{Claims, mint};
pub use remote::RemoteLimits;
pub use revocation::{Revocation, Revocations, Session, Sessions, Target};
pub use token::LEEWAY_MS;

use bowline_protocol::{DeviceId, Millis, UserId, ids::DeviceClass};
use keys::{Key, Signature};
use remote::{Aim, Answer, Job, KeySet, Remote};
use std::{
    net::IpAddr,
    sync::{Arc, PoisonError, RwLock},
};

/// Who a token speaks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    pub user: UserId,
    /// The device and class that the token binds, if it does.
    pub device: Option<DeviceId>,
    pub class: Option<DeviceClass>,
    /// As the token says; it is accepted for [`LEEWAY_MS`] more.
    pub expires_at: Millis,
    /// What revocation names; `issued_at` 0 when the token does not say.
    pub issued_at: Millis,
    pub token_id: Option<Box<str>>,
    pub session_id: Option<Box<str>>,
    /// Rooms (`name` or `prefix*`) that the token may join.
    pub rooms: Option<Arc<[Box<str>]>>,
}

/// Why a token is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    #[error("the token has expired")]
    Expired,
    #[error("the token is revoked")]
    Revoked,
    #[error("{0}")]
    Invalid(String),
    /// The token is good but names no user; HTTP 400.
    #[error("the token names no user: claim sub is missing")]
    NoSubject,
    /// It cannot be judged now; HTTP 503.
    #[error("{0}")]
    Unavailable(String),
}

#[derive(Debug, Clone, Copy)]
pub struct Question<'a> {
    pub token: &'a str,
    pub device_id: Option<&'a str>,
    pub remote: IpAddr,
}

/// Takes a verdict that could not be given at once; may be called on any thread.
pub type Reply = Box<dyn FnOnce(Result<Identity, Fault>) + Send>;

/// Where keys come from and what is asked of a token.
#[derive(Debug, Clone, Default)]
pub struct Config {
    /// For HS256.
    pub secret: Option<Vec<u8>>,
    /// The content of a PEM file: RSA (RS256), P-256 (ES256) or Ed25519 (EdDSA).
    pub public_key: Option<Vec<u8>>,
    /// Where the key set (JWKS) of the tokens' issuer is.
    pub jwks_url: Option<String>,
    /// The application's own judge. It is asked about all tokens where no key is configured, and otherwise about those
    /// that are no JSON Web Tokens.
    pub hook_url: Option<String>,
    pub remote: RemoteLimits,
    /// `aud` has to hold this one.
    pub audience: Option<String>,
    /// `iss` has to be this one.
    pub issuer: Option<String>,
    pub sessions: SessionMode,
}

/// What is checked beyond the token itself.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum SessionMode {
    /// Nothing: a token is good until it expires.
    Off,
    /// That it is not revoked.
    #[default]
    Revocation,
    /// Also that its session (`sid`) is registered.
    Required,
}

/// Judges tokens.
pub struct Verifier {
    core: Arc<Core>,
    remote: Option<Remote>,
}

/// What is known without asking anybody.
struct Core {
    /// The configured ones; replaced as a whole.
    keys: RwLock<Arc<[Key]>>,
    /// Keys of the issuer are looked for in a set that is fetched.
    has_remote_keys: bool,
    remote_keys: KeySet,
    expected: token::Expected,
    mode: SessionMode,
    revocations: Arc<Revocations>,
    sessions: Arc<Sessions>,
}

enum Verdict {
    Given(Result<Identity, Fault>),
    /// The issuer may have a key that is not known here yet; if it has not, this is the verdict.
    UnknownKey(Fault),
}

impl Verifier {
    /// One secret, HS256; nothing is revoked.
    pub fn with_secret(secret: &[u8]) -> Self {
        let core = Core {
            keys: RwLock::new([Key::secret(secret)].into()),
            has_remote_keys: false,
            remote_keys: KeySet::default(),
            expected: token::Expected::default(),
            mode: SessionMode::Revocation,
            revocations: Arc::default(),
            sessions: Arc::default(),
        };
        Self { core: Arc::new(core), remote: None }
    }

    /// Starts a thread where a key set or a hook is configured; what cannot be reached then is asked again.
    pub fn new(
        config: Config,
        revocations: Arc<Revocations>,
        sessions: Arc<Sessions>,
    ) -> Result<Self, KeyError> {
        let keys = configured(config.secret.as_deref(), config.public_key.as_deref())?;
        let core = Arc::new(Core {
            keys: RwLock::new(keys),
            has_remote_keys: config.jwks_url.is_some(),
            remote_keys: KeySet::default(),
            expected: token::Expected { audience: config.audience, issuer: config.issuer },
            mode: config.sessions,
            revocations,
            sessions,
        });
        let (keys_url, hook_url) = (config.jwks_url.as_deref(), config.hook_url.as_deref());
        let remote = match (keys_url, hook_url) {
            (None, None) => None,
            _ => Some(Remote::start(Arc::clone(&core), keys_url, hook_url, config.remote)?),
        };
        Ok(Self { core, remote })
    }

    /// Judges now, or, when that takes a look elsewhere, returns `None` and calls what `later` makes.
    pub fn verify(
        &self,
        question: Question<'_>,
        now: Millis,
        later: impl FnOnce() -> Reply,
    ) -> Option<Result<Identity, Fault>> {
        let Some(remote) = &self.remote else {
            return Some(self.core.judge_with_what_is_known(question.token, now));
        };
        let is_opaque = !self.core.has_keys() || token::Parts::of(question.token).is_err();
        let aim = if remote.has_hook() && is_opaque {
            Aim::Hook
        } else {
            match self.core.judge(question.token, now) {
                Verdict::Given(verdict) => return Some(verdict),
                Verdict::UnknownKey(_) => Aim::Keys,
            }
        };
        let job = Job {
            token: question.token.to_owned(),
            device_id: question.device_id.map(str::to_owned),
            remote: question.remote,
            now,
            aim,
            answer: Answer::new(later()),
        };
        match remote.ask(job) {
            Ok(()) => None,
            Err(job) => {
                job.answer.withdraw();
                Some(Err(remote::busy()))
            }
        }
    }

    /// Replaces the configured keys, and has the issuer's key set fetched. On an error nothing has changed.
    pub fn reload(&self, secret: Option<&[u8]>, public_key: Option<&[u8]>) -> Result<(), KeyError> {
        let keys = configured(secret, public_key)?;
        *self.core.keys.write().unwrap_or_else(PoisonError::into_inner) = keys;
        if let Some(remote) = &self.remote {
            remote.fetch_soon();
        }
        Ok(())
    }

    /// Why tokens may be refused that the issuer's newest keys would let pass: the last fetch failed.
    pub fn keys_fault(&self) -> Option<String> {
        self.core.remote_keys.fetched().fault
    }
}

fn configured(secret: Option<&[u8]>, public_key: Option<&[u8]>) -> Result<Arc<[Key]>, KeyError> {
    let secret = secret.map(|secret| Ok(Key::secret(secret)));
    secret.into_iter().chain(public_key.map(Key::public)).collect()
}

impl Core {
    fn keys(&self) -> Arc<[Key]> {
        self.keys.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn has_keys(&self) -> bool {
        self.has_remote_keys || !self.keys().is_empty()
    }

    fn judge(&self, token: &str, now: Millis) -> Verdict {
        match self.try_judge(token, now) {
            Ok(verdict) => verdict,
            Err(fault) => Verdict::Given(Err(fault)),
        }
    }

    fn judge_with_what_is_known(&self, token: &str, now: Millis) -> Result<Identity, Fault> {
        match self.judge(token, now) {
            Verdict::Given(verdict) => verdict,
            Verdict::UnknownKey(fault) => Err(fault),
        }
    }

    fn try_judge(&self, token: &str, now: Millis) -> Result<Verdict, Fault> {
        let parts = token::Parts::of(token)?;
        let header = parts.header()?;
        let header = header.read()?;
        let own = self.keys();
        let signature = if self.has_remote_keys {
            let fetched = self.remote_keys.fetched();
            keys::verify(&[&own, &fetched.keys], &header, &parts)
        } else {
            keys::verify(&[&own], &header, &parts)
        };
        match signature {
            Signature::Good => {}
            Signature::UnknownKey(fault) if self.has_remote_keys && keys::is_asymmetric(&header.alg) => {
                return Ok(Verdict::UnknownKey(fault));
            }
            Signature::Bad(fault) | Signature::UnknownKey(fault) => return Err(fault),
        }
        let identity = token::identity(&parts, &self.expected, now)?;
        Ok(Verdict::Given(self.check(identity, now)))
    }

    /// The second layer: sessions and revocations.
    fn check(&self, identity: Identity, now: Millis) -> Result<Identity, Fault> {
        revocation::check(self.mode, &self.revocations, &self.sessions, &identity, now)?;
        Ok(identity)
    }

    /// The same for what the application's hook says. It names no sessions: whether one is open is for the application
    /// to judge.
    fn check_hooked(&self, identity: Identity, now: Millis) -> Result<Identity, Fault> {
        let mode = if self.mode == SessionMode::Off { SessionMode::Off } else { SessionMode::Revocation };
        revocation::check(mode, &self.revocations, &self.sessions, &identity, now)?;
        Ok(identity)
    }
}

#[cfg(test)]
mod tests;
