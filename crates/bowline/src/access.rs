//! Who gets in: tokens made by this server, sessions, revocations.

use crate::{now_ms, random_text, token::Signer};
use bowline_api::{Access, Issued, NewSession, NewToken, Revoke};
use bowline_auth::{Revocation, Revocations, Session, Sessions, Target};
use bowline_gateway::{Handle as Gateway, SessionKey};
use bowline_protocol::{CloseCode, ErrorCode, Millis, UserId, error::Refusal};
use bowline_store::sqlite::{self, AuthTables, RevocationKind};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// How long a revocation is kept: longer than any token lives that this server makes. Nobody says how long those of
/// others live.
const REVOCATION_KEPT_MS: Millis = bowline_api::limits::TOKEN_TTL_MS_MAX;

/// The store has each change first; then it is in force.
pub struct Keeper {
    tables: Mutex<AuthTables>,
    pub revocations: Arc<Revocations>,
    pub sessions: Arc<Sessions>,
    /// Or why this server cannot sign.
    signer: Result<Signer, String>,
    gateway: OnceLock<Gateway>,
}

impl Keeper {
    /// With what was revoked, and which sessions were opened, in earlier lives.
    pub fn load(mut tables: AuthTables, signer: Result<Signer, String>) -> anyhow::Result<Self> {
        let now = now_ms();
        let (revocations, sessions) = (Revocations::default(), Sessions::default());
        for row in tables.revocations(now)? {
            let target = match row.kind {
                RevocationKind::Token => Target::Token(row.name),
                RevocationKind::Session => Target::Session(row.name),
                RevocationKind::User => {
                    Target::User { user: UserId::trusted(&row.name), issued_until: row.issued_until }
                }
            };
            revocations.revoke(Revocation { target, expires_at: row.expires_at }, now);
        }
        for row in tables.sessions(now)? {
            sessions.put(Session { id: row.session_id, user: row.user, expires_at: row.expires_at }, now);
        }
        Ok(Self {
            tables: Mutex::new(tables),
            revocations: Arc::new(revocations),
            sessions: Arc::new(sessions),
            signer,
            gateway: OnceLock::new(),
        })
    }

    /// Whose connections a revocation closes.
    pub fn guard(&self, gateway: Gateway) {
        let _ = self.gateway.set(gateway);
    }

    fn tables(&self) -> MutexGuard<'_, AuthTables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Access for Keeper {
    fn issue(&self, wanted: NewToken) -> Result<Issued, Refusal> {
        let signer = self.signer.as_ref().map_err(|why| Refusal::new(ErrorCode::Conflict, why))?;
        let unavailable = |error: anyhow::Error| Refusal::new(ErrorCode::Unavailable, error.to_string());
        let (user, sid) = (wanted.user.clone(), random_text().map_err(unavailable)?);
        let (token, expires_at) = signer.sign_for_session(wanted, &sid).map_err(unavailable)?;
        self.open_session(NewSession { user, sid: sid.as_str().into(), expires_at })?;
        Ok(Issued { token, sid, expires_at })
    }

    fn open_session(&self, session: NewSession) -> Result<(), Refusal> {
        let NewSession { user, sid, expires_at } = session;
        let row = sqlite::Session { session_id: sid.clone(), user: user.clone(), expires_at };
        self.tables().put_session(&row).map_err(not_stored)?;
        self.sessions.put(Session { id: sid, user, expires_at }, now_ms());
        Ok(())
    }

    fn revoke(&self, target: Revoke) -> Result<u64, Refusal> {
        let now = now_ms();
        let expires_at = now + REVOCATION_KEPT_MS;
        let (kind, name, target) = match target {
            Revoke::Token(id) => (RevocationKind::Token, id.clone(), Target::Token(id)),
            Revoke::Session(id) => (RevocationKind::Session, id.clone(), Target::Session(id)),
            Revoke::User(user) => {
                (RevocationKind::User, user.as_str().into(), Target::User { user, issued_until: now })
            }
        };
        let row = sqlite::Revocation { kind, name, issued_until: now, expires_at };
        self.tables().revoke(&row).map_err(not_stored)?;
        self.revocations.revoke(Revocation { target: target.clone(), expires_at }, now);
        let Some(gateway) = self.gateway.get() else { return Ok(0) };
        let named = target.clone();
        let closed = gateway.close_where(move |session| is_named(&named, session), CloseCode::Revoked);
        tracing::info!(?target, connections = closed, "revoked over the API");
        Ok(closed as u64)
    }
}

fn is_named(target: &Target, session: &SessionKey<'_>) -> bool {
    match target {
        Target::Token(id) => session.token_id == Some(id),
        Target::Session(id) => session.session_id == Some(id),
        Target::User { user, issued_until } => session.user == user && session.issued_at <= *issued_until,
    }
}

fn not_stored(error: sqlite::AuthError) -> Refusal {
    tracing::warn!(%error, "a session or revocation cannot be stored");
    Refusal::new(ErrorCode::Unavailable, "it cannot be stored now; nothing has changed, send it again")
}
