//! What the signature does not say: tokens that were revoked, and sessions that must be registered.
//!
//! Both are kept in memory, as large as what has not expired, and are loaded from the store at start. Whoever revokes
//! stores it first and calls [`Revocations::revoke`] then.

use crate::{Fault, Identity, SessionMode};
use bowline_protocol::{Millis, UserId};
use std::{
    collections::HashMap,
    sync::{
        PoisonError, RwLock,
        atomic::{AtomicBool, Ordering},
    },
};

/// How often, in insertions, what has expired is taken out.
const SWEEP_EVERY: usize = 1024;

/// What a revocation names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// A token, by `jti`.
    Token(Box<str>),
    /// A session, by `sid`.
    Session(Box<str>),
    /// All tokens of a user that were issued until then. A token that does not say when counts as old.
    User { user: UserId, issued_until: Millis },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Revocation {
    pub target: Target,
    /// When every token that it refuses has expired; it is forgotten [`crate::LEEWAY_MS`] later.
    pub expires_at: Millis,
}

impl Target {
    /// Whether it refuses this identity.
    pub fn names(&self, identity: &Identity) -> bool {
        match self {
            Self::Token(id) => identity.token_id.as_ref() == Some(id),
            Self::Session(id) => identity.session_id.as_ref() == Some(id),
            Self::User { user, issued_until } => {
                identity.user == *user && identity.issued_at <= *issued_until
            }
        }
    }
}

#[derive(Default)]
struct Revoked {
    /// When each expires.
    tokens: HashMap<Box<str>, Millis>,
    sessions: HashMap<Box<str>, Millis>,
    /// (issued until, expires at).
    users: HashMap<UserId, (Millis, Millis)>,
    insertions: usize,
}

/// The revocations that are in force; shared by all that judge tokens.
#[derive(Default)]
pub struct Revocations {
    /// Spares the lock where nothing was ever revoked.
    any: AtomicBool,
    revoked: RwLock<Revoked>,
}

impl Revocations {
    pub fn is_revoked(&self, identity: &Identity) -> bool {
        if !self.any.load(Ordering::Acquire) {
            return false;
        }
        let revoked = self.revoked.read().unwrap_or_else(PoisonError::into_inner);
        identity.token_id.as_ref().is_some_and(|id| revoked.tokens.contains_key(id))
            || identity.session_id.as_ref().is_some_and(|id| revoked.sessions.contains_key(id))
            || revoked.users.get(&identity.user).is_some_and(|(until, _)| identity.issued_at <= *until)
    }

    /// Puts a revocation into force. One of the same name is extended, never shortened.
    pub fn revoke(&self, revocation: Revocation, now: Millis) {
        let mut revoked = self.revoked.write().unwrap_or_else(PoisonError::into_inner);
        let Revocation { target, expires_at } = revocation;
        let expires_at = expires_at.saturating_add(crate::LEEWAY_MS);
        let extend = |known: &mut Millis| *known = expires_at.max(*known);
        match target {
            Target::Token(id) => extend(revoked.tokens.entry(id).or_default()),
            Target::Session(id) => extend(revoked.sessions.entry(id).or_default()),
            Target::User { user, issued_until } => {
                let (until, known) = revoked.users.entry(user).or_default();
                *until = issued_until.max(*until);
                extend(known);
            }
        }
        revoked.insertions += 1;
        if revoked.insertions.is_multiple_of(SWEEP_EVERY) {
            revoked.tokens.retain(|_, at| *at > now);
            revoked.sessions.retain(|_, at| *at > now);
            revoked.users.retain(|_, (_, at)| *at > now);
        }
        self.any.store(true, Ordering::Release);
    }

    /// How many are in force.
    pub fn count(&self) -> usize {
        let revoked = self.revoked.read().unwrap_or_else(PoisonError::into_inner);
        revoked.tokens.len() + revoked.sessions.len() + revoked.users.len()
    }
}

/// A session that tokens may belong to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Session {
    pub id: Box<str>,
    pub user: UserId,
    pub expires_at: Millis,
}

#[derive(Default)]
struct Registered {
    sessions: HashMap<Box<str>, (UserId, Millis)>,
    insertions: usize,
}

/// The registered sessions: what `auth.sessions = "required"` asks for.
#[derive(Default)]
pub struct Sessions {
    registered: RwLock<Registered>,
}

impl Sessions {
    /// Registers a session, or replaces the one of the same id.
    pub fn put(&self, session: Session, now: Millis) {
        let mut registered = self.registered.write().unwrap_or_else(PoisonError::into_inner);
        registered.sessions.insert(session.id, (session.user, session.expires_at));
        registered.insertions += 1;
        if registered.insertions.is_multiple_of(SWEEP_EVERY) {
            registered.sessions.retain(|_, (_, at)| *at > now);
        }
    }

    /// Whether this is a session of this user that has not expired.
    pub fn is_registered(&self, id: &str, user: &UserId, now: Millis) -> bool {
        let registered = self.registered.read().unwrap_or_else(PoisonError::into_inner);
        registered.sessions.get(id).is_some_and(|(owner, at)| owner == user && *at > now)
    }

    pub fn count(&self) -> usize {
        self.registered.read().unwrap_or_else(PoisonError::into_inner).sessions.len()
    }
}

/// The second layer: an identity whose token is good.
pub(crate) fn check(
    mode: SessionMode,
    revocations: &Revocations,
    sessions: &Sessions,
    identity: &Identity,
    now: Millis,
) -> Result<(), Fault> {
    if mode == SessionMode::Off {
        return Ok(());
    }
    if revocations.is_revoked(identity) {
        return Err(Fault::Revoked);
    }
    if mode == SessionMode::Revocation {
        return Ok(());
    }
    match &identity.session_id {
        None => Err(Fault::Invalid(
            "the token names no session (claim sid), and auth.sessions asks for one".into(),
        )),
        Some(id) if sessions.is_registered(id, &identity.user, now) => Ok(()),
        Some(id) => {
            Err(Fault::Invalid(format!("the token's session {id:?} is not registered, or has ended")))
        }
    }
}
