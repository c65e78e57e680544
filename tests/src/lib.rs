//! What the end-to-end tests stand on: the real program as a child process, clients on third-party libraries,
//! and waiting for conditions. Nothing here links a crate of the server, so that the tests see what users see; the
//! client library is linked where the two together make a promise.

pub mod churn;
pub mod client;
pub mod disk;
pub mod http;
pub mod metrics;
pub mod proxy;
pub mod raw;
pub mod rolling;
pub mod server;
pub mod soak;
pub mod tls;
pub mod token;
pub mod tools;
pub mod wait;

pub use client::{Client, Frame, Login, Transport};
pub use metrics::Metrics;
pub use server::{Server, Setup, bowline};
pub use tls::Certificates;
pub use wait::{PATIENCE, until};

/// Tests that load the machine take turns, so that they do not slow each other beyond their limits.
pub fn turn() -> std::sync::MutexGuard<'static, ()> {
    static TURN: std::sync::Mutex<()> = std::sync::Mutex::new(());
    TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
