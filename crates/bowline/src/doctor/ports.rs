//! The listeners' ports: free, or held by the server that is being looked at.

use super::{Finding, data::Home};
use crate::{bench::listener_at, config::Settings};
use socket2::{Domain, Protocol, Socket, Type};
use std::{fs, io, net::SocketAddr};

pub fn examine(settings: &Settings, home: &Home) -> Vec<Finding> {
    let has_api = settings.list("node.roles").iter().any(|role| role == "api");
    let rows = [
        ("gateway.listen", true),
        ("gateway.tcp_listen", true),
        // Without the role nobody listens there.
        ("api.listen", has_api),
    ];
    rows.into_iter()
        .filter(|(_, is_used)| *is_used)
        .map(|(key, _)| match settings.address(key) {
            Ok(address) => judge(key, address, bind(address), listener_at(address.port()), home.holder),
            Err(error) => {
                Finding::fail(key, error.to_string(), "write an address of this machine and a port")
            }
        })
        .collect()
}

/// Takes the port for a moment, without listening: nobody can connect meanwhile.
fn bind(address: SocketAddr) -> io::Result<()> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())
}

fn judge(
    key: &'static str,
    address: SocketAddr,
    bound: io::Result<()>,
    listener: Option<u32>,
    holder: Option<u32>,
) -> Finding {
    let error = match bound {
        Ok(()) if address.port() == 0 => {
            return Finding::ok(key, format!("{address}: a free port is picked at the start"));
        }
        Ok(()) => return Finding::ok(key, format!("{address} is free")),
        Err(error) => error,
    };
    match (error.kind(), listener, holder) {
        (io::ErrorKind::AddrInUse, Some(listener), Some(holder)) if listener == holder => Finding::ok(
            key,
            format!("{address} is held by the server of this data directory (process {holder})"),
        ),
        (io::ErrorKind::AddrInUse, Some(listener), _) => Finding::fail(
            key,
            format!("{address} is held by process {listener}{}", name_of(listener)),
            "stop that one, or choose another address",
        ),
        (io::ErrorKind::AddrInUse, None, Some(holder)) => Finding::warn(
            key,
            format!("{address} is held, perhaps by the server of this data directory (process {holder})"),
            "run doctor as the user of the server to be sure",
        ),
        (io::ErrorKind::AddrInUse, None, None) => Finding::fail(
            key,
            format!("{address} is held by a process that this user cannot see"),
            "stop that one (`ss -ltnp` as root names it), or choose another address",
        ),
        (io::ErrorKind::AddrNotAvailable, ..) => Finding::fail(
            key,
            format!("no interface of this machine has the address {}", address.ip()),
            "write an address of this machine, or 0.0.0.0 for all",
        ),
        (io::ErrorKind::PermissionDenied, ..) => Finding::fail(
            key,
            format!("{address} needs a privilege: {error}"),
            "choose a port from 1024 on, or give the program CAP_NET_BIND_SERVICE",
        ),
        _ => Finding::fail(key, format!("{address}: {error}"), "check the address"),
    }
}

fn name_of(process: u32) -> String {
    let name = fs::read_to_string(format!("/proc/{process}/comm")).unwrap_or_default();
    if name.is_empty() { String::new() } else { format!(" ({})", name.trim()) }
}

#[cfg(test)]
mod tests {
    use super::{super::State, *};

    #[test]
    fn a_port_is_free_ours_or_taken() {
        let address = SocketAddr::from(([127, 0, 0, 1], 8080));
        let taken = || Err(io::Error::from(io::ErrorKind::AddrInUse));
        let check = |bound, listener, holder| judge("gateway.listen", address, bound, listener, holder).state;
        assert_eq!(check(Ok(()), None, None), State::Ok);
        assert_eq!(check(taken(), Some(7), Some(7)), State::Ok);
        assert_eq!(check(taken(), Some(7), Some(8)), State::Fail);
        assert_eq!(check(taken(), Some(7), None), State::Fail);
        assert_eq!(check(taken(), None, Some(7)), State::Warn);
        assert_eq!(check(taken(), None, None), State::Fail);
        for kind in [io::ErrorKind::AddrNotAvailable, io::ErrorKind::PermissionDenied, io::ErrorKind::Other] {
            assert_eq!(check(Err(kind.into()), None, None), State::Fail);
        }
    }

    #[test]
    fn a_port_that_somebody_listens_at_is_seen() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        assert_eq!(bind(address).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        drop(listener);
        assert!(bind(address).is_ok());
    }
}
