//! Questions to the application over [`http`], signed as Standard Webhooks 1.0 says
//! (<https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md>).

mod asker;
pub mod http;
mod secret;

pub use asker::{Asker, Error};
pub use secret::{Secret, SecretError};

/// Bounds of this crate: what they count, and what happens when they are reached.
pub mod limits {
    use std::time::Duration;

    /// Questions that are on their way at a time; others wait.
    pub const IN_FLIGHT_MAX: usize = 64;
    /// Questions on their way and waiting; one more fails.
    pub const WAITING_MAX: usize = 4096;
    /// How long an answer may take, the wait included.
    pub const TIMEOUT: Duration = Duration::from_secs(5);
    /// The longest answer, in bytes.
    pub const ANSWER_BYTES_MAX: usize = 64 << 10;
}
