//! Who is this: tokens and keys, sessions and revocations.
//!
//! A token is judged once, when a connection opens: its signature by the configured keys, or by the application's
//! hook; its claims; then sessions and revocations. What is known at once is answered at once, on the caller's
//! thread; what takes a look elsewhere is answered through a [`Reply`].

mod keys;
mod mint;
mod revocation;
mod token;

pub use keys::KeyError;
pub use mint::{Claims, mint};
pub use revocation::{Revocation, Revocations, Session, Sessions, Target};
pub use token::LEEWAY_MS;

use bowline_protocol::{DeviceId, Millis, UserId, ids::DeviceClass};
use keys::Key;
use std::{net::IpAddr, sync::Arc};

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
    keys: Vec<Key>,
    expected: token::Expected,
    mode: SessionMode,
    revocations: Arc<Revocations>,
    sessions: Arc<Sessions>,
}

impl Verifier {
    /// One secret, HS256; nothing is revoked.
    pub fn with_secret(secret: &[u8]) -> Self {
        Self {
            keys: vec![Key::secret(secret)],
            expected: token::Expected::default(),
            mode: SessionMode::Revocation,
            revocations: Arc::default(),
            sessions: Arc::default(),
        }
    }

    pub fn new(
        config: Config,
        revocations: Arc<Revocations>,
        sessions: Arc<Sessions>,
    ) -> Result<Self, KeyError> {
        let mut keys = Vec::new();
        if let Some(secret) = &config.secret {
            keys.push(Key::secret(secret));
        }
        if let Some(pem) = &config.public_key {
            keys.push(Key::public(pem)?);
        }
        let expected = token::Expected { audience: config.audience, issuer: config.issuer };
        Ok(Self { keys, expected, mode: config.sessions, revocations, sessions })
    }

    /// Judges now, or, when that takes a look elsewhere, returns `None` and calls what `later` makes.
    pub fn verify(
        &self,
        question: Question<'_>,
        now: Millis,
        later: impl FnOnce() -> Reply,
    ) -> Option<Result<Identity, Fault>> {
        let _ = later;
        Some(self.judge(question.token, now))
    }

    fn judge(&self, token: &str, now: Millis) -> Result<Identity, Fault> {
        let parts = token::Parts::of(token)?;
        let header = parts.header()?;
        keys::verify(&self.keys, &header, &parts)?;
        let identity = token::identity(&parts, &self.expected, now)?;
        revocation::check(self.mode, &self.revocations, &self.sessions, &identity, now)?;
        Ok(identity)
    }
}

#[cfg(test)]
mod tests;
