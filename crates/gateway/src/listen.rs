//! Listening sockets.

use crate::{Config, Error};
use socket2::{Domain, Protocol, Socket, TcpKeepalive, Type};
use std::{io, net::SocketAddr, time::Duration};

/// Connections that the kernel completes before they are accepted.
const BACKLOG: i32 = 4096;
const KEEPALIVE: Duration = Duration::from_secs(30);

/// Binds one listener. Its options are those of the connections: Linux hands them on at accept.
pub fn bind(key: &'static str, address: SocketAddr, config: &Config) -> Result<mio::net::TcpListener, Error> {
    open(address, config).map_err(|source| Error::Listen { key, address, source })
}

fn open(address: SocketAddr, config: &Config) -> io::Result<mio::net::TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    // Without it a restart finds its own closed connections in the way.
    #[cfg(unix)]
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    prepare(&socket, config)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(mio::net::TcpListener::from_std(socket.into()))
}

/// No delay, keepalive, and a bound on what the kernel holds unsent.
fn prepare(socket: &Socket, config: &Config) -> io::Result<()> {
    socket.set_tcp_nodelay(true)?;
    socket.set_tcp_keepalive(&TcpKeepalive::new().with_time(KEEPALIVE).with_interval(KEEPALIVE))?;
    #[cfg(any(target_os = "linux", target_os = "android"))]
    socket.set_tcp_notsent_lowat(config.socket_unsent_bytes)?;
    let _ = config;
    Ok(())
}

/// Gives an accepted connection its options where the listener does not hand them on.
pub fn adjust(stream: &mio::net::TcpStream, config: &Config) {
    if cfg!(not(any(target_os = "linux", target_os = "android"))) {
        #[cfg(unix)]
        let result = prepare_stream(stream, config);
        #[cfg(not(unix))]
        let result = stream.set_nodelay(true);
        if let Err(error) = result {
            tracing::debug!(%error, "a connection keeps default socket options");
        }
    }
    let _ = (stream, config);
}

#[cfg(unix)]
fn prepare_stream(stream: &mio::net::TcpStream, config: &Config) -> io::Result<()> {
    use std::os::fd::AsFd;
    let socket = Socket::from(stream.as_fd().try_clone_to_owned()?);
    prepare(&socket, config)
}
