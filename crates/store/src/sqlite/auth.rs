//! What must outlive a restart about tokens: revocations and sessions.

use super::{Home, codec};
use bowline_protocol::{Millis, UserId};
use rusqlite::{Connection, params};
use std::sync::Arc;

/// Reads and writes revocations and sessions, on a connection of its own. Each write is durable when it returns.
pub struct AuthTables {
    db: Connection,
    home: Arc<Home>,
}

#[derive(Debug, thiserror::Error)]
pub enum AuthError {
    #[error("revocations and sessions could not be {action}: {source}")]
    Failed { action: &'static str, source: rusqlite::Error },
}

/// What has expired is kept this much longer: clocks differ, and tokens are accepted a little beyond their time.
const KEPT_MS: Millis = 60_000;

/// What a revocation names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RevocationKind {
    /// A token, by `jti`.
    Token,
    /// A session, by `sid`.
    Session,
    /// All tokens of a user that were issued until then.
    User,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Revocation {
    pub kind: RevocationKind,
    pub name: Box<str>,
    pub issued_until: Millis,
    /// When every token that it refuses has expired.
    pub expires_at: Millis,
}

/// A session that tokens may belong to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Session {
    pub session_id: Box<str>,
    pub user: UserId,
    pub expires_at: Millis,
}

impl RevocationKind {
    fn as_str(self) -> &'static str {
        match self {
            Self::Token => "token",
            Self::Session => "session",
            Self::User => "user",
        }
    }

    fn parse(text: &str) -> Option<Self> {
        [Self::Token, Self::Session, Self::User].into_iter().find(|kind| kind.as_str() == text)
    }
}

impl AuthTables {
    pub(super) fn new(db: Connection, home: Arc<Home>) -> Self {
        Self { db, home }
    }

    /// All that are still needed; those that are not are deleted.
    pub fn revocations(&mut self, now: Millis) -> Result<Vec<Revocation>, AuthError> {
        self.write("cleaned up", |db| {
            db.execute("DELETE FROM revocations WHERE expires_at <= ?1", [clamp(now.saturating_sub(KEPT_MS))])
        })?;
        let read = || {
            let mut select =
                self.db.prepare_cached("SELECT kind, name, issued_until, expires_at FROM revocations")?;
            let mut rows = select.query([])?;
            let mut revocations = Vec::new();
            while let Some(row) = rows.next()? {
                // A kind that only a later version knows is none of this one's.
                let Some(kind) = RevocationKind::parse(row.get_ref(0)?.as_str()?) else { continue };
                revocations.push(Revocation {
                    kind,
                    name: row.get(1)?,
                    issued_until: codec::unsigned(row, 2)?,
                    expires_at: codec::unsigned(row, 3)?,
                });
            }
            Ok(revocations)
        };
        read().map_err(|source| AuthError::Failed { action: "read", source })
    }

    /// Stores a revocation. One of the same name is extended, never shortened.
    pub fn revoke(&mut self, revocation: &Revocation) -> Result<(), AuthError> {
        self.write("written", |db| {
            db.prepare_cached(
                "INSERT INTO revocations (kind, name, issued_until, expires_at) VALUES (?1, ?2, ?3, ?4) \
                 ON CONFLICT DO UPDATE SET issued_until = max(issued_until, excluded.issued_until), \
                 expires_at = max(expires_at, excluded.expires_at)",
            )?
            .execute(params![
                revocation.kind.as_str(),
                &*revocation.name,
                clamp(revocation.issued_until),
                clamp(revocation.expires_at)
            ])
        })
    }

    /// All sessions that have not expired; the others are deleted.
    pub fn sessions(&mut self, now: Millis) -> Result<Vec<Session>, AuthError> {
        self.write("cleaned up", |db| {
            db.execute("DELETE FROM sessions WHERE expires_at <= ?1", [clamp(now.saturating_sub(KEPT_MS))])
        })?;
        let read = || {
            let mut select = self.db.prepare_cached("SELECT session_id, user, expires_at FROM sessions")?;
            let rows = select.query_map([], |row| {
                Ok(Session {
                    session_id: row.get(0)?,
                    user: UserId::trusted(row.get_ref(1)?.as_str()?),
                    expires_at: codec::unsigned(row, 2)?,
                })
            })?;
            rows.collect::<rusqlite::Result<Vec<_>>>()
        };
        read().map_err(|source| AuthError::Failed { action: "read", source })
    }

    /// Stores a session, or replaces the one of the same id.
    pub fn put_session(&mut self, session: &Session) -> Result<(), AuthError> {
        self.write("written", |db| {
            db.prepare_cached(
                "INSERT INTO sessions (session_id, user, expires_at) VALUES (?1, ?2, ?3) \
                 ON CONFLICT DO UPDATE SET user = excluded.user, expires_at = excluded.expires_at",
            )?
            .execute(params![
                &*session.session_id,
                session.user.as_str(),
                clamp(session.expires_at)
            ])
        })
    }

    fn write(
        &mut self,
        action: &'static str,
        write: impl FnOnce(&Connection) -> rusqlite::Result<usize>,
    ) -> Result<(), AuthError> {
        let _turn = self.home.enter();
        write(&self.db).map(|_| ()).map_err(|source| AuthError::Failed { action, source })
    }
}

fn clamp(at: Millis) -> i64 {
    i64::try_from(at).unwrap_or(i64::MAX)
}
