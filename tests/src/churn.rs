//! Many connections that come and go in every way there is.

use crate::{client::Login, raw, server::Server, token, wait};
use serde_json::json;
use socket2::{Domain, Socket, Type};
use std::{
    io::{Read, Write},
    net::{Ipv4Addr, Shutdown, SocketAddr, TcpStream},
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

pub const THREADS: u64 = 4;
/// The addresses that clients come from: a single one has too few ports.
const SOURCES: u64 = 8;
/// How many users each thread logs in as; each has a device of its own kind of transport.
const USERS: u64 = 250;

/// What a run was.
#[derive(Debug)]
pub struct Report {
    pub opened: u64,
    /// Of those, how many had an identity.
    pub authenticated: u64,
    /// Ended by a reset.
    pub abrupt: u64,
    pub seconds: f64,
    pub memory_before: u64,
    pub memory_after: u64,
}

/// Opens and ends `count` connections, after a tenth of that to warm up. Fails unless everything is forgotten
/// afterwards and the memory grew by no more than `growth_bytes_max`.
pub fn run(server: &Server, count: u64, growth_bytes_max: u64) -> Report {
    let logins = Logins::new();
    let warm = count / 10;
    drive(server, &logins, 0, warm);
    assert_empty(server);
    let memory_before = server.memory_bytes();
    let opened_before = server.metrics().get("bowline_gateway_opened_total");
    let began = Instant::now();
    let [authenticated, abrupt] = drive(server, &logins, warm, count);
    let seconds = began.elapsed().as_secs_f64();
    assert_empty(server);
    let opened = server.metrics().get("bowline_gateway_opened_total") - opened_before;
    assert_eq!(opened, authenticated as f64, "the server counts those that had an identity");
    // What is freed is not given back at once.
    wait::until("the memory is near where it was", || {
        (server.memory_bytes() <= memory_before + growth_bytes_max).then_some(())
    });
    let memory_after = server.memory_bytes();
    Report { opened: count, authenticated, abrupt, seconds, memory_before, memory_after }
}

/// No table knows anybody.
fn assert_empty(server: &Server) {
    let status = wait::until("the gateway has forgotten all connections", || {
        Some(server.status()).filter(|status| {
            ["connections", "users", "devices"].iter().all(|table| status[*table] == 0)
                && ["ws", "tcp"].iter().all(|way| status["transports"][*way]["connections"] == 0)
        })
    });
    wait::until(&format!("the other tables are empty too; the status is {status}"), || {
        let metrics = server.metrics();
        ["gateway_connections", "gateway_users", "gateway_devices", "router_connections", "router_users"]
            .iter()
            .all(|table| metrics.get(&format!("bowline_{table}")) == 0.0)
            .then_some(())
    });
    let online = server.get("/api/v1/users/churn0-1").expect(200).json();
    assert_eq!(online["online"], false, "{online}");
}

/// Tokens made beforehand, so that signing is not what is measured.
pub struct Logins(Vec<Vec<String>>);

impl Default for Logins {
    fn default() -> Self {
        Self::new()
    }
}

impl Logins {
    pub fn new() -> Self {
        let token = |user: String| token::signed(&json!({"sub": user, "exp": token::now_secs() + 86_400}));
        let of_thread = |thread| (0..USERS).map(|n| token(format!("churn{thread}-{n}"))).collect();
        Self((0..THREADS).map(of_thread).collect())
    }

    /// The n-th connection of all, by one of the threads: whether it had an identity, and whether it was reset.
    pub fn one(&self, server: &Server, thread: u64, n: u64) -> [bool; 2] {
        one(server, n, &self.0[thread as usize][(n % USERS) as usize])
    }
}

/// How many had an identity, and how many ended by a reset.
fn drive(server: &Server, logins: &Logins, first: u64, count: u64) -> [u64; 2] {
    let next = AtomicU64::new(0);
    let sums = [AtomicU64::new(0), AtomicU64::new(0)];
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (next, sums) = (&next, &sums);
            scope.spawn(move || {
                loop {
                    let n = next.fetch_add(1, Ordering::Relaxed);
                    if n >= count {
                        return;
                    }
                    let counted = logins.one(server, thread, first + n);
                    for (sum, is) in sums.iter().zip(counted) {
                        sum.fetch_add(u64::from(is), Ordering::Relaxed);
                    }
                }
            });
        }
    });
    sums.map(|sum| sum.into_inner())
}

/// One connection: whether it had an identity, and whether it ended by a reset.
fn one(server: &Server, n: u64, token: &str) -> [bool; 2] {
    // From another address each time round the kinds.
    let source = Ipv4Addr::new(127, 0, 0, 2 + (n / 9 % SOURCES) as u8);
    let open = |address| connect(source, address);
    match n % 9 {
        // WebSocket, closed as it should be.
        0 => {
            let mut stream = upgraded(open(server.ws()), Some(token));
            read_until(&mut stream, b"\"connected\"");
            write(&mut stream, &raw::ws_frame(0x88, &1000_u16.to_be_bytes()));
            to_end(&mut stream);
            [true, false]
        }
        // WebSocket, the socket dropped without a word.
        1 => {
            let mut stream = upgraded(open(server.ws()), Some(token));
            read_until(&mut stream, b"\"connected\"");
            [true, false]
        }
        // WebSocket, reset; sometimes within a frame.
        2 => {
            let mut stream = upgraded(open(server.ws()), Some(token));
            read_until(&mut stream, b"\"connected\"");
            if n.is_multiple_of(2) {
                write(&mut stream, &[0x81, 0xfe]);
            }
            reset(stream);
            [true, true]
        }
        // TCP, ended as it should be.
        3 => {
            let mut stream = open(server.tcp());
            write(&mut stream, &first_frame(server, token));
            read_until(&mut stream, b"\"connected\"");
            stream.shutdown(Shutdown::Write).expect("an open socket can be half closed");
            to_end(&mut stream);
            [true, false]
        }
        // TCP, reset with a request under way.
        4 => {
            let mut stream = open(server.tcp());
            write(&mut stream, &first_frame(server, token));
            read_until(&mut stream, b"\"connected\"");
            write(&mut stream, &raw::tcp_frame(br#"{"type":"conversation.list","id":"l"}"#));
            reset(stream);
            [true, true]
        }
        // Upgraded, and gone without a word of who it is.
        5 => {
            upgraded(open(server.ws()), None);
            [false, false]
        }
        // A token that will not do.
        6 => {
            let mut stream = open(server.ws());
            write(&mut stream, &raw::upgrade("/ws", &[("Authorization", "Bearer no-such-token")]));
            assert_eq!(raw::read_response(&mut stream).status, 401);
            [false, false]
        }
        // Half of a request, reset.
        7 => {
            let mut stream = open(server.ws());
            write(&mut stream, b"GET /ws HTTP/1.1\r\nHost: local");
            reset(stream);
            [false, true]
        }
        // TCP, nothing said, gone.
        _ => {
            open(server.tcp());
            [false, false]
        }
    }
}

fn connect(source: Ipv4Addr, address: SocketAddr) -> TcpStream {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
    socket.bind(&SocketAddr::from((source, 0)).into()).expect("a loopback address has a free port");
    socket
        .connect_timeout(&address.into(), wait::PATIENCE)
        .unwrap_or_else(|error| panic!("from {source} to {address}: {error}"));
    let stream = TcpStream::from(socket);
    stream.set_nodelay(true).expect("an open socket takes options");
    stream.set_read_timeout(Some(wait::PATIENCE)).expect("an open socket takes options");
    stream.set_write_timeout(Some(wait::PATIENCE)).expect("an open socket takes options");
    stream
}

fn upgraded(mut stream: TcpStream, token: Option<&str>) -> TcpStream {
    let bearer = token.map(|token| format!("Bearer {token}"));
    let headers: Vec<(&str, &str)> = bearer.iter().map(|bearer| ("Authorization", &**bearer)).collect();
    write(&mut stream, &raw::upgrade("/ws?device_id=w", &headers));
    assert_eq!(raw::read_response(&mut stream).status, 101);
    stream
}

fn first_frame(server: &Server, token: &str) -> Vec<u8> {
    let login = Login::new(server.addresses(), "by the token").token(token).device("t");
    raw::tcp_frame(login.frame().to_string().as_bytes())
}

fn write(stream: &mut TcpStream, bytes: &[u8]) {
    stream.write_all(bytes).expect("the connection is open");
}

fn read_until(stream: &mut TcpStream, word: &[u8]) {
    let mut all = Vec::new();
    let mut chunk = [0; 2048];
    while !all.windows(word.len()).any(|part| part == word) {
        let count = stream.read(&mut chunk).expect("the connection is open");
        assert_ne!(count, 0, "the connection ended after {:?}", String::from_utf8_lossy(&all));
        all.extend_from_slice(&chunk[..count]);
    }
}

fn to_end(stream: &mut TcpStream) {
    let (bytes, ended) = raw::read_to_end(stream, Duration::from_secs(20));
    assert!(ended, "the connection stays open after {bytes:?}");
}

/// Drops the connection with a reset.
fn reset(stream: TcpStream) {
    let socket = Socket::from(stream);
    socket.set_linger(Some(Duration::ZERO)).expect("an open socket takes options");
}
