//! The table `gateway` of the configuration.

use crate::Error;
use bowline_protocol::link::SameDevice;
use bowline_rooms::Limits;
use bowline_session::{RoomJoin, Rules};
use std::{net::SocketAddr, path::PathBuf, sync::Arc};

/// Everything that can be set, with the defaults of the documentation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// The public listener: WebSocket, and what is handed on to the HTTP server.
    pub listen: SocketAddr,
    /// The listener for length-prefixed frames; `None` turns it off.
    pub tcp_listen: Option<SocketAddr>,
    pub ws_path: String,
    /// A WebSocket echo without authentication, for conformance suites; `None` turns it off.
    pub echo_path: Option<String>,
    /// Shards; 0 makes one for each core that the process may use.
    pub workers: usize,
    /// Silence after which a client is pinged, with a random 0 to `ping_jitter_ms` on top.
    pub ping_after_ms: u64,
    pub ping_jitter_ms: u64,
    /// Silence after which it is closed.
    pub close_after_ms: u64,
    /// Frames of one connection decoded and not yet decided, above which it is read no further.
    pub backpressure_high: u32,
    /// How long a connection may stay unread.
    pub backpressure_timeout_ms: u64,
    /// The largest frame of a client.
    pub max_frame_bytes: usize,
    /// Sessions; 0 takes the limit on open files less a margin.
    pub max_connections: usize,
    /// Connections with one peer address; 0 is no limit.
    pub connections_per_address: u32,
    /// Upgrades and TCP `connect`s per second, bursts of one second; 0 is no fixed rate.
    pub handshakes_per_second: u32,
    /// What a connection's queue of pushes may hold beyond the socket.
    pub outbound_limit_bytes: usize,
    /// What the kernel may hold unsent for a connection.
    pub socket_unsent_bytes: u32,
    pub drain_timeout_ms: u64,
    /// Over how long a drain spreads the delays after which clients come back.
    pub migrate_spread_ms: u64,
    /// Checked against each other only: pre-stop + drain < grace.
    pub pre_stop_ms: u64,
    pub termination_grace_ms: u64,
    /// Values of `Origin` that may open a WebSocket; none given allows all.
    pub allowed_origins: Vec<String>,
    /// Requests per second of one connection; 0 is no limit.
    pub frames_per_second: u32,
    pub same_device: SameDevice,
    /// Who may join a room; the table `rooms`.
    pub room_join: RoomJoin,
    pub rooms: Limits,
    /// Whether permessage-deflate is taken when a WebSocket client offers it.
    pub compression: bool,
    /// The certificate chain and its key, PEM; with them both listeners speak TLS only.
    pub tls_cert: Option<PathBuf>,
    pub tls_key: Option<PathBuf>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 8080)),
            tcp_listen: Some(SocketAddr::from(([127, 0, 0, 1], 8081))),
            ws_path: "/ws".into(),
            echo_path: None,
            workers: 0,
            ping_after_ms: 45_000,
            ping_jitter_ms: 5_000,
            close_after_ms: 90_000,
            backpressure_high: 1024,
            backpressure_timeout_ms: 30_000,
            max_frame_bytes: 32_768,
            max_connections: 0,
            connections_per_address: 0,
            handshakes_per_second: 0,
            outbound_limit_bytes: 1 << 20,
            socket_unsent_bytes: 128 << 10,
            drain_timeout_ms: 45_000,
            migrate_spread_ms: 10_000,
            pre_stop_ms: 10_000,
            termination_grace_ms: 90_000,
            allowed_origins: Vec::new(),
            frames_per_second: 0,
            same_device: SameDevice::Replace,
            room_join: RoomJoin::Any,
            rooms: Limits { window_messages: 300, window_ms: 300_000, members_max: 100_000 },
            compression: false,
            tls_cert: None,
            tls_key: None,
        }
    }
}

impl Config {
    /// Looks for values that cannot work, alone or together.
    pub fn check(&self) -> Result<(), Error> {
        let fail = |key, problem: String| Err(Error::Config { key, problem });
        if self.ping_after_ms == 0 {
            return fail("ping_after_ms", "is 0; it must be at least 1".into());
        }
        if self.close_after_ms == 0 {
            return fail("close_after_ms", "is 0; it must be at least 1".into());
        }
        if self.ping_jitter_ms > u64::from(u32::MAX) {
            return fail("ping_jitter_ms", format!("is {}; it must be below 2^32", self.ping_jitter_ms));
        }
        if self.backpressure_high == 0 {
            return fail("backpressure_high", "is 0; it takes at least 1".into());
        }
        if !(256..=16 << 20).contains(&self.max_frame_bytes) {
            return fail("max_frame_bytes", format!("is {}; it takes 256 to 16777216", self.max_frame_bytes));
        }
        if self.outbound_limit_bytes < 4096 {
            return fail(
                "outbound_limit_bytes",
                format!("is {}; it takes at least 4096", self.outbound_limit_bytes),
            );
        }
        if self.pre_stop_ms + self.drain_timeout_ms >= self.termination_grace_ms {
            return fail(
                "drain_timeout_ms",
                format!(
                    "is {}; with pre_stop_ms {} it must stay below termination_grace_ms {}, or the process is killed while it drains",
                    self.drain_timeout_ms, self.pre_stop_ms, self.termination_grace_ms
                ),
            );
        }
        for (key, path) in [("ws_path", Some(&self.ws_path)), ("echo_path", self.echo_path.as_ref())] {
            if let Some(path) = path.filter(|path| !path.starts_with('/') || path.contains('?')) {
                return fail(key, format!("is {path:?}; a path starts with / and has no query"));
            }
        }
        if self.echo_path.as_ref() == Some(&self.ws_path) {
            return fail("echo_path", "is the same as ws_path; choose another path".into());
        }
        let one_of_two = "is not set and the other of tls.cert and tls.key is; TLS takes both";
        match (&self.tls_cert, &self.tls_key) {
            (Some(_), None) => return fail("tls.key", one_of_two.into()),
            (None, Some(_)) => return fail("tls.cert", one_of_two.into()),
            _ => {}
        }
        if self.workers > crate::WORKERS_MAX {
            return fail("workers", format!("is {}; it takes at most {}", self.workers, crate::WORKERS_MAX));
        }
        Ok(())
    }

    pub(crate) fn rules(&self, node_id: Arc<str>) -> Rules {
        Rules {
            node_id,
            ping_after_ms: self.ping_after_ms,
            ping_jitter_ms: self.ping_jitter_ms,
            close_after_ms: self.close_after_ms,
            backpressure_high: self.backpressure_high,
            backpressure_timeout_ms: self.backpressure_timeout_ms,
            outbound_limit_bytes: self.outbound_limit_bytes,
            max_frame_bytes: self.max_frame_bytes,
            frames_per_second: self.frames_per_second,
            same_device: self.same_device,
            room_join: self.room_join,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_that_cannot_work_are_named() {
        assert!(Config::default().check().is_ok());
        type Change = fn(&mut Config);
        let rows: [(&str, Change); 10] = [
            ("close_after_ms", |c| c.close_after_ms = 0),
            ("backpressure_high", |c| c.backpressure_high = 0),
            ("max_frame_bytes", |c| c.max_frame_bytes = 10),
            ("outbound_limit_bytes", |c| c.outbound_limit_bytes = 0),
            ("drain_timeout_ms", |c| c.drain_timeout_ms = 80_000),
            ("ws_path", |c| c.ws_path = "ws".into()),
            ("echo_path", |c| c.echo_path = Some("/ws".into())),
            ("workers", |c| c.workers = 1000),
            ("tls.key", |c| c.tls_cert = Some("cert.pem".into())),
            ("tls.cert", |c| c.tls_key = Some("key.pem".into())),
        ];
        for (expected, change) in rows {
            let mut config = Config::default();
            change(&mut config);
            match config.check() {
                Err(Error::Config { key, .. }) => assert_eq!(key, expected),
                other => panic!("{expected}: {other:?}"),
            }
        }
    }
}
