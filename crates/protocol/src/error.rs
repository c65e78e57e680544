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

    /// Sending the same request again, unchanged, may succeed.
    pub fn is_temporary(self) -> bool {
        matches!(self, Self::RateLimited | Self::Overloaded | Self::Unavailable)
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
}
