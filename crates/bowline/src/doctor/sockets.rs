//! The options of sockets that the gateway relies on: set, and read back.

use super::Finding;
use crate::config::Settings;
use socket2::{Domain, Protocol, Socket, TcpKeepalive, Type};
use std::{io, time::Duration};

const CHECK: &str = "TCP options";
/// As the gateway sets it.
const KEEPALIVE: Duration = Duration::from_secs(30);

pub fn examine(settings: &Settings) -> Finding {
    let unsent_bytes = settings.int::<u32>("gateway.socket_unsent_bytes");
    match try_out(unsent_bytes) {
        Ok(found) => Finding::ok(CHECK, found),
        Err(error) => Finding::warn(
            CHECK,
            format!("keepalive, no-delay or the bound on unsent bytes cannot be set: {error}"),
            "dead peers are found by the heartbeat alone, and slow ones later than configured",
        ),
    }
}

fn try_out(unsent_bytes: u32) -> io::Result<String> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP))?;
    socket.set_tcp_nodelay(true)?;
    socket.set_tcp_keepalive(&TcpKeepalive::new().with_time(KEEPALIVE).with_interval(KEEPALIVE))?;
    let mut found =
        format!("no-delay {}, keepalive {} s", socket.tcp_nodelay()?, socket.tcp_keepalive_time()?.as_secs());
    #[cfg(any(target_os = "linux", target_os = "android"))]
    {
        socket.set_tcp_notsent_lowat(unsent_bytes)?;
        found += &format!(", at most {} bytes unsent", socket.tcp_notsent_lowat()?);
    }
    let _ = unsent_bytes;
    Ok(std::mem::take(&mut found))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_read_back() {
        let found = try_out(4096).unwrap();
        assert!(found.contains("keepalive 30 s"), "{found}");
        if cfg!(target_os = "linux") {
            assert!(found.contains("4096 bytes"), "{found}");
        }
    }
}
