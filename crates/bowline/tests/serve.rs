//! The whole program on free ports: how it begins, what it serves, how it ends.

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    path::PathBuf,
    process::{Child, Command, ExitStatus, Stdio},
    sync::{
        atomic::{AtomicU32, Ordering},
        mpsc::{Receiver, channel},
    },
    thread,
    time::{Duration, Instant},
};

const WAIT_MAX: Duration = Duration::from_secs(20);

/// A directory that lives as long as the test.
struct Dir(PathBuf);

impl Dir {
    fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("bowline-serve-{}-{count}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_bowline"));
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("BOWLINE_") {
                command.env_remove(name);
            }
        }
        command.current_dir(&self.0).args(arguments);
        command
    }

    /// A finished command: exit code, standard output, standard error.
    fn run(&self, arguments: &[&str]) -> (Option<i32>, String, String) {
        let output = self.command(arguments).output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (output.status.code(), text(output.stdout), text(output.stderr))
    }

    fn serve(&self, more: &[&str]) -> Server {
        let mut arguments =
            vec!["serve", "--listen", "127.0.0.1:0", "--tcp", "127.0.0.1:0", "--api", "127.0.0.1:0"];
        arguments.extend_from_slice(more);
        let mut child = self.command(&arguments).stderr(Stdio::piped()).spawn().unwrap();
        let errors = BufReader::new(child.stderr.take().unwrap());
        let (sender, lines) = channel();
        thread::spawn(move || {
            for line in errors.lines().map_while(Result::ok) {
                let _ = sender.send(line);
            }
        });
        let mut server = Server { child, lines, log: Vec::new() };
        server.wait_for("ready");
        server
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

struct Server {
    child: Child,
    lines: Receiver<String>,
    log: Vec<String>,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    /// Reads the log until a line holds `part`.
    fn wait_for(&mut self, part: &str) {
        loop {
            match self.lines.recv_timeout(WAIT_MAX) {
                Ok(line) => {
                    self.log.push(line);
                    if self.log.last().is_some_and(|line| line.contains(part)) {
                        return;
                    }
                }
                Err(_) => panic!("no {part:?} in the log:\n{}", self.log.join("\n")),
            }
        }
    }

    /// The `host:port` that the log has after `before`.
    fn address(&self, before: &str) -> String {
        let line = self.log.iter().find_map(|line| Some(line.split_once(before)?.1));
        line.unwrap_or_else(|| panic!("no {before:?} in\n{}", self.log.join("\n")))
            .trim_end_matches('/')
            .to_owned()
    }

    fn api(&self) -> String {
        self.address("metrics listen on ")
    }

    fn signal(&self, name: &str) {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").args(["-s", name, &id]).status().unwrap().success());
    }

    fn wait(&mut self) -> ExitStatus {
        let began = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(began.elapsed() < WAIT_MAX, "the server does not end:\n{}", self.log.join("\n"));
            thread::sleep(Duration::from_millis(10));
        }
    }

    fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }
}

/// A client over TCP.
struct Client(TcpStream);

impl Client {
    fn connect(dir: &Dir, server: &Server, user: &str) -> Self {
        let (code, token, error) = dir.run(&["token", "--user", user]);
        assert_eq!(code, Some(0), "{error}");
        let mut client = Self::with_token(server, token.trim());
        client.wait_for("connected");
        client
    }

    /// Says `connect` and waits for nothing.
    fn with_token(server: &Server, token: &str) -> Self {
        let stream = TcpStream::connect(server.address("tcp://")).unwrap();
        stream.set_read_timeout(Some(WAIT_MAX)).unwrap();
        let mut client = Self(stream);
        client.send(&serde_json::json!({"type": "connect", "token": token, "device_id": "d"}));
        client
    }

    fn send(&mut self, frame: &serde_json::Value) {
        let text = frame.to_string();
        self.0.write_all(&(text.len() as u32).to_be_bytes()).unwrap();
        self.0.write_all(text.as_bytes()).unwrap();
    }

    /// The next frame of this type.
    fn wait_for(&mut self, kind: &str) -> serde_json::Value {
        loop {
            let mut length = [0; 4];
            self.0.read_exact(&mut length).unwrap_or_else(|error| panic!("no {kind}: {error}"));
            let mut text = vec![0; u32::from_be_bytes(length) as usize];
            self.0.read_exact(&mut text).unwrap();
            let frame: serde_json::Value = serde_json::from_slice(&text).unwrap();
            if frame["type"] == kind {
                return frame;
            }
        }
    }
}

#[test]
fn an_unconfigured_server_is_ready_tells_how_to_get_in_and_ends_with_0() {
    let dir = Dir::new();
    let mut server = dir.serve(&[]);
    assert_eq!(server.log.last().unwrap(), "ready");
    let log = server.log.join("\n");
    assert!(log.contains("bowline token --user") && log.contains("api.key is configured"), "{log}");
    // The key comes from the data directory, the node's name from the server.
    let (code, out, error) = dir.run(&["status", "--json", "--api-url", &server.api()]);
    assert_eq!(code, Some(0), "{error}");
    let status: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!((&status["state"], &status["connections"]), (&"ready".into(), &0.into()));
    assert_eq!(status["transports"]["tcp"]["address"], server.address("tcp://"));
    let (code, _, error) = dir.run(&["status", "--api-url", &server.api(), "--api-key", "wrong"]);
    assert!(code == Some(1) && error.contains("--api-key"), "{error}");
    server.signal("INT");
    assert_eq!(server.wait().code(), Some(0));
}

#[test]
fn what_is_taken_is_exit_code_2() {
    let dir = Dir::new();
    let _server = dir.serve(&[]);
    let (code, _, error) = dir.run(&["serve", "--listen", "127.0.0.1:0", "--tcp", "127.0.0.1:0"]);
    assert!(code == Some(2) && error.contains("held by another server"), "{error}");
    let holder = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = holder.local_addr().unwrap().to_string();
    for flag in ["--listen", "--tcp", "--api"] {
        let mut arguments = vec!["serve", "--data", "other"];
        for free in ["--listen", "--tcp", "--api"] {
            arguments.extend([free, if free == flag { taken.as_str() } else { "127.0.0.1:0" }]);
        }
        let (code, out, error) = dir.run(&arguments);
        assert!(code == Some(2) && error.contains(&taken) && out.is_empty(), "{flag}: {error}");
    }
}

#[test]
fn a_message_reaches_whoever_is_connected_and_is_kept_over_a_kill() {
    let dir = Dir::new();
    let server = dir.serve(&[]);
    let (mut alice, mut bob) =
        (Client::connect(&dir, &server, "alice"), Client::connect(&dir, &server, "bob"));
    alice.send(&serde_json::json!({"type": "msg.send", "id": "1", "to": "bob", "body": "hi"}));
    assert_eq!(alice.wait_for("msg.ack")["seq"], 1);
    assert_eq!(bob.wait_for("msg.push")["body"], "hi");
    // Dropping a server kills it.
    drop(server);
    let server = dir.serve(&[]);
    let mut bob = Client::connect(&dir, &server, "bob");
    assert_eq!(bob.wait_for("sync.notice")["conversations"][0]["last_seq"], 1);
    bob.send(&serde_json::json!({"type": "history", "id": "h", "conversation_id": "d:alice:bob"}));
    assert_eq!(bob.wait_for("history.page")["messages"][0]["body"], "hi");
}

#[test]
fn the_signal_drains_and_the_process_ends_with_its_last_connection() {
    let dir = Dir::new();
    let mut server = dir.serve(&[]);
    let mut client = Client::connect(&dir, &server, "alice");
    server.signal("TERM");
    assert!(client.wait_for("session.migrate")["retry_after_ms"].is_u64());
    // Open connections work on.
    client.send(&serde_json::json!({"type": "msg.send", "id": "1", "to": "bob", "body": 1}));
    client.wait_for("msg.ack");
    assert!(server.is_running());
    drop(client);
    assert_eq!(server.wait().code(), Some(0));
}

#[test]
fn at_the_deadline_of_a_drain_connections_close() {
    let dir = Dir::new();
    let mut server = dir.serve(&["--set", "gateway.drain_timeout_ms=300"]);
    let mut client = Client::connect(&dir, &server, "alice");
    server.signal("TERM");
    let closed = client.wait_for("session.closed");
    assert_eq!((&closed["code"], &closed["reason"]), (&1001.into(), &"draining".into()));
    drop(client);
    assert_eq!(server.wait().code(), Some(0));
}

#[test]
fn a_second_signal_stops_at_once() {
    let dir = Dir::new();
    let mut server = dir.serve(&[]);
    let mut client = Client::connect(&dir, &server, "alice");
    server.signal("TERM");
    client.wait_for("session.migrate");
    server.signal("TERM");
    assert_eq!(client.wait_for("session.closed")["reason"], "shutdown");
    assert_eq!(server.wait().code(), Some(0));
}

#[test]
fn a_drain_by_the_api_leaves_the_process_up() {
    let dir = Dir::new();
    let mut server = dir.serve(&["--set", "gateway.drain_timeout_ms=100"]);
    let mut client = Client::connect(&dir, &server, "alice");
    let (code, out, error) = dir.run(&["drain", "--reason", "new version", "--api-url", &server.api()]);
    assert!(code == Some(0) && out.contains("is draining: 1 connections left"), "{out}{error}");
    assert_eq!(client.wait_for("session.migrate")["reason"], "new version");
    client.wait_for("session.closed");
    drop(client);
    let (_, out, _) = dir.run(&["status", "--api-url", &server.api()]);
    assert!(out.contains("draining"), "{out}");
    assert!(server.is_running());
    server.signal("TERM");
    assert_eq!(server.wait().code(), Some(0));
}

/// One request to the API.
fn post(server: &Server, dir: &Dir, path: &str, body: &str) -> (u16, serde_json::Value) {
    let key = fs::read_to_string(dir.0.join("bowline-data/api.key")).unwrap();
    let address = server.api().trim_start_matches("http://").to_owned();
    let mut stream = TcpStream::connect(&address).unwrap();
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: {address}\r\nx-api-key: {}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
        key.trim(),
        body.len()
    );
    stream.write_all(head.as_bytes()).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    (head[9..12].parse().unwrap(), serde_json::from_str(body).unwrap_or_default())
}

#[test]
fn what_is_revoked_stays_revoked() {
    let dir = Dir::new();
    let more = ["--set", "auth.sessions=required"];
    let server = dir.serve(&more);
    let issue = |server: &Server| {
        let (status, issued) = post(server, &dir, "/api/v1/tokens", r#"{"user":"alice","device_id":"d"}"#);
        assert_eq!(status, 200);
        issued
    };
    let (one, two) = (issue(&server), issue(&server));
    let mut client = Client::with_token(&server, one["token"].as_str().unwrap());
    client.wait_for("connected");
    let (status, closed) =
        post(&server, &dir, "/api/v1/tokens/revoke", &serde_json::json!({"sid": one["sid"]}).to_string());
    assert_eq!((status, &closed["closed"]), (200, &1.into()));
    assert_eq!(client.wait_for("session.closed")["code"], 4503);
    drop((client, server));
    let server = dir.serve(&more);
    let mut client = Client::with_token(&server, one["token"].as_str().unwrap());
    assert_eq!(client.wait_for("session.closed")["code"], 4502);
    Client::with_token(&server, two["token"].as_str().unwrap()).wait_for("connected");
    let (_, closed) = post(&server, &dir, "/api/v1/tokens/revoke", r#"{"user":"alice"}"#);
    assert!(closed["closed"].is_u64());
    let mut client = Client::with_token(&server, two["token"].as_str().unwrap());
    assert_eq!(client.wait_for("session.closed")["code"], 4502);
    Client::with_token(&server, issue(&server)["token"].as_str().unwrap()).wait_for("connected");
    let (code, _, error) = dir.run(&["token", "--user", "alice", "--set", "auth.sessions=required"]);
    assert!(code == Some(2) && error.contains("/api/v1/tokens"), "{error}");
}
