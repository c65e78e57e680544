//! The two tables of the protocol: error codes of frames and HTTP answers, and close codes of connections.

use serde::{Deserialize, Serialize};

/// Why a request was not carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorCode {
    Malformed,
    UnknownType,
    Unauthenticated,
    Forbidden,
    IdentityMismatch,
    NotFound,
    TooLarge,
    RateLimited,
    Overloaded,
    Unavailable,
    Conflict,
    Version,
    Internal,
}

impl ErrorCode {
    pub const ALL: [Self; 13] = [
        Self::Malformed,
        Self::UnknownType,
        Self::Unauthenticated,
        Self::Forbidden,
        Self::IdentityMismatch,
        Self::NotFound,
        Self::TooLarge,
        Self::RateLimited,
        Self::Overloaded,
        Self::Unavailable,
        Self::Conflict,
        Self::Version,
        Self::Internal,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Malformed => "malformed",
            Self::UnknownType => "unknown_type",
            Self::Unauthenticated => "unauthenticated",
            Self::Forbidden => "forbidden",
            Self::IdentityMismatch => "identity_mismatch",
            Self::NotFound => "not_found",
            Self::TooLarge => "too_large",
            Self::RateLimited => "rate_limited",
            Self::Overloaded => "overloaded",
            Self::Unavailable => "unavailable",
            Self::Conflict => "conflict",
            Self::Version => "version",
            Self::Internal => "internal",
        }
    }

    /// The status of an HTTP answer with this code.
    pub fn status(self) -> u16 {
        match self {
            Self::Malformed | Self::UnknownType | Self::Version => 400,
            Self::Unauthenticated => 401,
            Self::Forbidden | Self::IdentityMismatch => 403,
            Self::NotFound => 404,
            Self::Conflict => 409,
            Self::TooLarge => 413,
            Self::RateLimited => 429,
            Self::Internal => 500,
            Self::Overloaded | Self::Unavailable => 503,
        }
    }

    /// What it says about the request, without a final full stop.
    pub const fn meaning(self) -> &'static str {
        match self {
            Self::Malformed => "no JSON object, or a field is missing or out of bounds",
            Self::UnknownType => "there is no such frame",
            Self::Unauthenticated => "no identity yet, or the token or key is not good",
            Self::Forbidden => {
                "not allowed; also every conversation that one is no member of, whether it exists or not"
            }
            Self::IdentityMismatch => "the request claims to be of somebody else than the token says",
            Self::NotFound => "there is no such thing",
            Self::TooLarge => "above a limit, which the message names",
            Self::RateLimited => "more than may be sent in this time",
            Self::Overloaded => "the server has more to do than it can, or is full",
            Self::Unavailable => "something that the server needs does not answer, or it is draining",
            Self::Conflict => "the id is taken by something else, or the state does not allow it",
            Self::Version => "this version of the protocol is not spoken",
            Self::Internal => "a fault of the server; its log says more",
        }
    }

    /// Whose fault it is.
    pub const fn fault(self) -> Fault {
        match self {
            Self::Malformed
            | Self::UnknownType
            | Self::IdentityMismatch
            | Self::TooLarge
            | Self::Conflict
            | Self::Version => Fault::Program,
            Self::Unauthenticated | Self::Forbidden | Self::NotFound => Fault::Request,
            Self::RateLimited => Fault::Pace,
            Self::Overloaded | Self::Unavailable | Self::Internal => Fault::Server,
        }
    }

    /// What whoever asked does next.
    pub const fn advice(self) -> &'static str {
        match self {
            Self::Malformed | Self::UnknownType | Self::IdentityMismatch => {
                "do not send it again; correct the program, the message says where"
            }
            Self::Unauthenticated => "get a fresh token, or the right key, and ask again",
            Self::Forbidden => "do not send it again; tell the user, or have the right granted first",
            Self::NotFound => "do not send it again; check the name",
            Self::TooLarge => "do not send it again; send less at once",
            Self::RateLimited | Self::Overloaded | Self::Unavailable => {
                "send the same again, with the same id, after `retry_after_ms` (HTTP: `Retry-After`)"
            }
            Self::Conflict => "do not send it again as it is; take another id, or look at what there is",
            Self::Version => "do not send it again; update the program",
            Self::Internal => {
                "send the same again, with the same id, a few times and with pauses; then report it"
            }
        }
    }

    /// Sending the same request again, unchanged, may succeed.
    pub fn is_temporary(self) -> bool {
        matches!(self, Self::RateLimited | Self::Overloaded | Self::Unavailable)
    }
}

/// Whose fault a refusal is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The asking program's: it has to be corrected.
    Program,
    /// The request's: it names what is not there, or not allowed to this user.
    Request,
    /// The asking program's pace.
    Pace,
    /// The server's, or that of something it needs.
    Server,
}

impl Fault {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Program => "the asking program's",
            Self::Request => "the request's, or the user's rights",
            Self::Pace => "the asking program's pace",
            Self::Server => "the server's",
        }
    }
}

/// A refusal that travels to whoever asked: a frame `error`, or an HTTP body.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    pub code: ErrorCode,
    pub message: String,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub retry_after_ms: Option<u64>,
}

impl Refusal {
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        let retry_after_ms = code.is_temporary().then_some(1000);
        Self { code, message: message.into(), retry_after_ms }
    }
}

/// Why the server ends a connection; its number and its reason text on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CloseCode {
    Bye,
    HeartbeatTimeout,
    Draining,
    Shutdown,
    ProtocolError,
    Malformed,
    TooLarge,
    BackpressureTimeout,
    Overloaded,
    TokenExpired,
    SlowConsumer,
    ConnectTimeout,
    Replaced,
    Unauthenticated,
    Revoked,
    Kicked,
    Policy,
    DeviceInUse,
    Version,
}

impl CloseCode {
    pub const ALL: [Self; 19] = [
        Self::Bye,
        Self::HeartbeatTimeout,
        Self::Draining,
        Self::Shutdown,
        Self::ProtocolError,
        Self::Malformed,
        Self::TooLarge,
        Self::BackpressureTimeout,
        Self::Overloaded,
        Self::TokenExpired,
        Self::SlowConsumer,
        Self::ConnectTimeout,
        Self::Replaced,
        Self::Unauthenticated,
        Self::Revoked,
        Self::Kicked,
        Self::Policy,
        Self::DeviceInUse,
        Self::Version,
    ];

    pub fn code(self) -> u16 {
        match self {
            Self::Bye => 1000,
            Self::HeartbeatTimeout | Self::Draining | Self::Shutdown => 1001,
            Self::ProtocolError => 1002,
            Self::Malformed => 1007,
            Self::TooLarge => 1009,
            Self::BackpressureTimeout | Self::Overloaded => 1013,
            Self::TokenExpired => 4001,
            Self::SlowConsumer => 4002,
            Self::ConnectTimeout => 4003,
            Self::Replaced => 4501,
            Self::Unauthenticated => 4502,
            Self::Revoked => 4503,
            Self::Kicked => 4504,
            Self::Policy => 4505,
            Self::DeviceInUse => 4506,
            Self::Version => 4507,
        }
    }

    /// The reason text on the wire and the value of the `reason` label in metrics.
    pub fn reason(self) -> &'static str {
        match self {
            Self::Bye => "bye",
            Self::HeartbeatTimeout => "heartbeat-timeout",
            Self::Draining => "draining",
            Self::Shutdown => "shutdown",
            Self::ProtocolError => "protocol-error",
            Self::Malformed => "malformed",
            Self::TooLarge => "too-large",
            Self::BackpressureTimeout => "backpressure-timeout",
            Self::Overloaded => "overloaded",
            Self::TokenExpired => "token-expired",
            Self::SlowConsumer => "slow-consumer",
            Self::ConnectTimeout => "connect-timeout",
            Self::Replaced => "replaced",
            Self::Unauthenticated => "unauthenticated",
            Self::Revoked => "revoked",
            Self::Kicked => "kicked",
            Self::Policy => "policy",
            Self::DeviceInUse => "device-in-use",
            Self::Version => "version",
        }
    }

    /// Why it happens, without a final full stop.
    pub const fn meaning(self) -> &'static str {
        match self {
            Self::Bye => "the client closed, or has nothing more to do here",
            Self::HeartbeatTimeout => "nothing was heard of the client for `gateway.close_after_ms`",
            Self::Draining => "the server takes its clients away: an update, or an operator asked for it",
            Self::Shutdown => "the server ends without a drain",
            Self::ProtocolError => "the client breaks the WebSocket protocol (RFC 6455)",
            Self::Malformed => "a text message is no UTF-8, or a compressed one cannot be opened",
            Self::TooLarge => "a frame is larger than `gateway.max_frame_bytes`",
            Self::BackpressureTimeout => {
                "the client was paused for `gateway.backpressure_timeout_ms`: it sends faster than can be decided, or \
                 does not read its answers"
            }
            Self::Overloaded => "the server is full or has more to do than it can",
            Self::TokenExpired => "the token ran out and was not refreshed",
            Self::SlowConsumer => {
                "the client reads more slowly than it is sent to: its queue grew past `gateway.outbound_limit_bytes`"
            }
            Self::ConnectTimeout => "no identity within 10 s",
            Self::Replaced => "the same device has connected again (`gateway.same_device`)",
            Self::Unauthenticated => "the token is not good, or a frame came before the identity",
            Self::Revoked => "the token or its session was taken back",
            Self::Kicked => "the application ended the connection",
            Self::Policy => "repeated violations, or a device that the token is not bound to",
            Self::DeviceInUse => "the device is connected already, and `gateway.same_device` is `refuse`",
            Self::Version => {
                "the client's version of the protocol is not spoken; the reason names those that are"
            }
        }
    }

    /// What the client does next.
    pub const fn advice(self) -> &'static str {
        match self {
            Self::Bye => "nothing",
            Self::HeartbeatTimeout | Self::Shutdown | Self::ConnectTimeout => "reconnect",
            Self::Draining => "reconnect after `retry_after_ms`; it does not count as a failure",
            Self::ProtocolError => "reconnect; correct the client",
            Self::Malformed | Self::TooLarge => "reconnect; do not repeat that frame",
            Self::BackpressureTimeout | Self::Overloaded => "reconnect with back-off",
            Self::TokenExpired => "get a fresh token, then reconnect",
            Self::SlowConsumer => "reconnect and fetch what was missed: nothing is lost",
            Self::Replaced | Self::Kicked | Self::DeviceInUse => "stop; the user decides",
            Self::Unauthenticated | Self::Revoked => "stop: this token will not do",
            Self::Policy => "stop; correct the program",
            Self::Version => "stop; update the program",
        }
    }
}
