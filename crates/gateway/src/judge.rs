//! The verifier as the shards ask it.

use bowline_auth::{Fault, Identity, Question, Reply, Verifier};
use bowline_protocol::Millis;
use bowline_session::{Denial, Grant};
use std::sync::Arc;

/// Judges tokens at once, or later through a reply.
pub enum Judge {
    Verifier(Arc<Verifier>),
    #[cfg(test)]
    Rehearsed(Rehearsed),
}

#[cfg(test)]
pub type Rehearsed =
    Box<dyn Fn(Question<'_>, Box<dyn FnOnce() -> Reply>) -> Option<Result<Identity, Fault>> + Send + Sync>;

impl Judge {
    pub fn verify(
        &self,
        question: Question<'_>,
        now: Millis,
        later: impl FnOnce() -> Reply + 'static,
    ) -> Option<Result<Identity, Fault>> {
        match self {
            Self::Verifier(verifier) => verifier.verify(question, now, later),
            #[cfg(test)]
            Self::Rehearsed(verify) => verify(question, Box::new(later)),
        }
    }
}

/// The verdict in the session's words.
pub fn verdict(judged: Result<Identity, Fault>) -> Result<Grant, Denial> {
    match judged {
        Ok(identity) => Ok(Grant {
            user: identity.user,
            device: identity.device,
            class: identity.class,
            expires_at: identity.expires_at,
            issued_at: identity.issued_at,
            token_id: identity.token_id,
            session_id: identity.session_id,
            rooms: identity.rooms,
        }),
        Err(fault) => Err(match &fault {
            Fault::NoSubject => Denial::NoSubject(fault.to_string()),
            Fault::Unavailable(_) => Denial::Unavailable(fault.to_string()),
            Fault::Expired | Fault::Revoked | Fault::Invalid(_) => Denial::Token(fault.to_string()),
        }),
    }
}
