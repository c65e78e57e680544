//! How a connection gets its identity: what the client says, what the verifier says, and what comes of it.

use bowline_protocol::{
    CloseCode, DeviceId, ErrorCode, Millis, UserId,
    frame::Connect,
    ids::DeviceClass,
    link::{Open, SameDevice},
};
use std::sync::Arc;

/// What a client says about itself, in the query of its handshake or in `connect`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Hello {
    pub device: Option<DeviceId>,
    pub class: Option<DeviceClass>,
    pub channel: Option<Arc<str>>,
    pub resume: Option<Arc<str>>,
}

impl Hello {
    /// What `connect` says, completed by what the query said before.
    pub(crate) fn from_connect(connect: &Connect, query: Option<Box<Self>>) -> Self {
        let query = query.map(|query| *query).unwrap_or_default();
        Self {
            device: connect.device_id.clone().or(query.device),
            class: connect.device_class.or(query.class),
            channel: connect.channel.as_deref().map(Arc::from).or(query.channel),
            resume: connect.resume.as_deref().map(Arc::from).or(query.resume),
        }
    }
}

/// A verified identity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grant {
    pub user: UserId,
    /// Device and class that the token binds, if it does.
    pub device: Option<DeviceId>,
    pub class: Option<DeviceClass>,
    pub expires_at: Millis,
    pub issued_at: Millis,
    pub token_id: Option<Box<str>>,
    pub session_id: Option<Box<str>>,
    /// Rooms (`name` or `prefix*`) that the token may join.
    pub rooms: Option<Arc<[Box<str>]>>,
}

/// Why there is no identity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Denial {
    /// The token will not do.
    Token(String),
    /// The token is good but names no user.
    NoSubject(String),
    /// It cannot be judged now.
    Unavailable(String),
}

/// What is new for every connection that gets an identity; the gateway makes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fresh {
    /// Microseconds since the epoch, larger than any before on this node.
    pub login: u64,
    /// Random.
    pub session: u128,
}

/// Why an opening connection was refused, for whoever answers it before the upgrade, and for the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    pub close: CloseCode,
    pub status: u16,
    pub code: ErrorCode,
    pub message: String,
    /// The client is told this reason instead of the close code's own, and by it the end is counted.
    pub told_as: Option<CloseCode>,
    pub retry_after_ms: Option<u64>,
}

impl Refusal {
    pub(crate) fn of_denial(denial: Denial) -> Self {
        let (close, status, code, message, retry_after_ms) = match denial {
            Denial::Token(message) => {
                (CloseCode::Unauthenticated, 401, ErrorCode::Unauthenticated, message, None)
            }
            Denial::NoSubject(message) => {
                (CloseCode::Unauthenticated, 400, ErrorCode::Malformed, message, None)
            }
            Denial::Unavailable(message) => (
                CloseCode::Overloaded,
                503,
                ErrorCode::Unavailable,
                message,
                Some(crate::rules::RETRY_AFTER_MS),
            ),
        };
        Self { close, status, code, message, told_as: None, retry_after_ms }
    }

    pub(crate) fn of_router(close: CloseCode) -> Self {
        let (status, code, message) = match close {
            CloseCode::DeviceInUse => (
                409,
                ErrorCode::Conflict,
                "this device is connected already, and the server refuses a second",
            ),
            CloseCode::Replaced => {
                (409, ErrorCode::Conflict, "a newer login of this device took the place of this one")
            }
            _ => (503, ErrorCode::Unavailable, "the router does not take this connection now"),
        };
        let retry_after_ms = (status == 503).then_some(crate::rules::RETRY_AFTER_MS);
        Self { close, status, code, message: message.to_owned(), told_as: None, retry_after_ms }
    }

    pub fn overloaded() -> Self {
        Self {
            close: CloseCode::Overloaded,
            status: 503,
            code: ErrorCode::Overloaded,
            message: "no answer from the verifier or the router in time".to_owned(),
            told_as: None,
            retry_after_ms: Some(crate::rules::RETRY_AFTER_MS),
        }
    }
}

/// Joins the token's identity with what the client says. A device or class that the token does not bind to is
/// refused.
pub(crate) fn plan_open(
    grant: &Grant,
    hello: &Hello,
    fresh: Fresh,
    same_device: SameDevice,
) -> Result<Open, Refusal> {
    let binding = |message| Refusal {
        close: CloseCode::Policy,
        status: 403,
        code: ErrorCode::IdentityMismatch,
        message,
        told_as: None,
        retry_after_ms: None,
    };
    if let (Some(bound), Some(asked)) = (&grant.device, &hello.device)
        && bound != asked
    {
        return Err(binding(format!("the token is for device {bound:?}, the request for {asked:?}")));
    }
    if let (Some(bound), Some(asked)) = (grant.class, hello.class)
        && bound != asked
    {
        return Err(binding(format!(
            "the token is for device class {}, the request for {}",
            bound.as_str(),
            asked.as_str()
        )));
    }
    let device = grant.device.clone().or_else(|| hello.device.clone());
    Ok(Open {
        user: grant.user.clone(),
        device: device.unwrap_or_else(|| {
            DeviceId::trusted(&format!("{:016x}", (fresh.session >> 64) as u64 ^ fresh.login))
        }),
        class: grant.class.or(hello.class),
        channel: hello.channel.clone(),
        session: format!("{:032x}", fresh.session).into(),
        resume: hello.resume.clone(),
        same_device,
    })
}
