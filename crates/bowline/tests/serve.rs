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
            .split('"')
            .next()
            .unwrap_or_default()
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

/// Says 200 and `text` to every request, until the test ends.
fn answering(text: impl Fn() -> String + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/asked", listener.local_addr().unwrap());
    thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            let mut head = [0; 16 << 10];
            let mut read = 0;
            while !head[..read].windows(4).any(|bytes| bytes == b"\r\n\r\n") {
                match stream.read(&mut head[read..]) {
                    Ok(0) | Err(_) => break,
                    Ok(more) => read += more,
                }
            }
            let text = text();
            let answer = format!(
                "HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{text}",
                text.len()
            );
            let _ = stream.write_all(answer.as_bytes());
        }
    });
    url
}

/// The status and text of `GET /v1/place`.
fn place(server: &Server, token: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(server.address("demo page listen on http://")).unwrap();
    stream.set_read_timeout(Some(WAIT_MAX)).unwrap();
    let head = format!(
        "GET /v1/place HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\nconnection: close\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

fn pem(name: &str) -> String {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../auth/src/tests/keys");
    fs::read_to_string(format!("{folder}/{name}.pem")).unwrap()
}

fn signed(key: &str) -> String {
    let key = jsonwebtoken::EncodingKey::from_rsa_pem(pem(key).as_bytes()).unwrap();
    let claims = serde_json::json!({"sub": "ann", "exp": 4_000_000_000_u64});
    jsonwebtoken::encode(&jsonwebtoken::Header::new(jsonwebtoken::Algorithm::RS256), &claims, &key).unwrap()
}

fn key_set(key: &str) -> String {
    let key = jsonwebtoken::EncodingKey::from_rsa_pem(pem(key).as_bytes()).unwrap();
    let jwk = jsonwebtoken::jwk::Jwk::from_encoding_key(&key, jsonwebtoken::Algorithm::RS256).unwrap();
    serde_json::json!({"keys": [jwk]}).to_string()
}

#[test]
fn sighup_takes_another_public_key() {
    let dir = Dir::new();
    fs::write(dir.0.join("key.pem"), pem("rsa.pub")).unwrap();
    let mut server = dir.serve(&["--set", "auth.public_key=key.pem", "--node-id", "n1"]);
    let (old, new) = (signed("rsa"), signed("rsa-other"));
    let (status, told) = place(&server, &old);
    let (ws, tcp) = (server.address("WebSocket listens on "), server.address("TCP listens on "));
    assert_eq!((status, told), (200, format!(r#"{{"ws":"{ws}","tcp":"{tcp}","node_id":"n1"}}"#)));
    assert_eq!(place(&server, &new).0, 401);
    fs::write(dir.0.join("key.pem"), "nonsense").unwrap();
    server.signal("HUP");
    server.wait_for("the keys stay as they were");
    assert_eq!(place(&server, &old).0, 200);
    fs::write(dir.0.join("key.pem"), pem("rsa-other.pub")).unwrap();
    server.signal("HUP");
    server.wait_for("auth.public_key is read again");
    assert_eq!([place(&server, &old).0, place(&server, &new).0], [401, 200]);
    let (status, answer) = post(&server, &dir, "/api/v1/tokens", r#"{"user":"ann"}"#);
    let why = answer["message"].as_str().unwrap().to_owned();
    assert!(status == 409 && why.contains("whoever holds the private key signs them"), "{answer}");
}

#[test]
fn keys_of_an_issuer_and_the_applications_hook_judge_tokens() {
    let dir = Dir::new();
    let keys = answering(|| key_set("rsa"));
    let hook = answering(|| r#"{"user_id":"ann"}"#.to_owned());
    let (keys, hook) = (format!("auth.jwks_url={keys}"), format!("auth.hook_url={hook}"));
    let server = dir.serve(&["--set", &keys, "--set", &hook]);
    let asked =
        ["opaque".to_owned(), signed("rsa"), signed("rsa-other")].map(|token| place(&server, &token).0);
    assert_eq!(asked, [200, 200, 401]);
    // An issuer that is not there is told, and tokens wait for it in vain.
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut server = dir.serve(&["--data", "other", "--set", &format!("auth.jwks_url=http://{free}/")]);
    if !server.log.iter().any(|line| line.contains("keys cannot be fetched")) {
        server.wait_for("keys cannot be fetched");
    }
    assert_eq!(place(&server, &signed("rsa")).0, 503);
}

#[test]
fn a_backup_of_a_running_server_opens_and_serves() {
    let dir = Dir::new();
    let server = dir.serve(&[]);
    let message = |id: &str| format!(r#"{{"id":"{id}","from":"ann","to":"bob","body":"hello"}}"#);
    assert_eq!(post(&server, &dir, "/api/v1/messages", &message("1")).0, 200);
    let (code, told, error) = dir.run(&["backup", "--to", "copy.db"]);
    assert!(code == Some(0) && told.starts_with("copy.db: "), "{told}{error}");
    assert_eq!(post(&server, &dir, "/api/v1/messages", &message("2")).1["seq"], 2);
    for (arguments, part) in [
        (["backup", "--to", "copy.db", "--data", "bowline-data"], "exists already"),
        (["backup", "--to", "other.db", "--data", "nowhere"], "there is no database"),
    ] {
        let (code, _, error) = dir.run(&arguments);
        assert!(code == Some(2) && error.contains(part), "{arguments:?}: {error}");
    }
    drop(server);
    fs::create_dir(dir.0.join("restored")).unwrap();
    fs::rename(dir.0.join("copy.db"), dir.0.join("restored/bowline.db")).unwrap();
    fs::copy(dir.0.join("bowline-data/api.key"), dir.0.join("restored/api.key")).unwrap();
    let server = dir.serve(&["--data", "restored"]);
    // The first is there, so its id is known; what came after the copy is not.
    assert_eq!(post(&server, &dir, "/api/v1/messages", &message("1")).1["seq"], 1);
    assert_eq!(post(&server, &dir, "/api/v1/messages", &message("3")).1["seq"], 2);
}

#[test]
fn every_line_of_the_log_is_json_when_that_is_asked_for() {
    let dir = Dir::new();
    let sets = ["--set", "log.format=json", "--set", "log.level=debug", "--node-id", "n1"];
    let mut server = dir.serve(&sets);
    let mut client = Client::connect(&dir, &server, "ann");
    let body = r#"{"reason":"because"}"#;
    let (status, answer) = post(&server, &dir, "/api/v1/users/ann/kick", body);
    assert_eq!((status, &answer["closed"]), (200, &1.into()));
    assert_eq!(client.wait_for("session.closed")["code"], 4504);
    server.wait_for("connection ends");
    let lines = server.log.iter().filter(|line| *line != "ready");
    let lines: Vec<serde_json::Value> = lines.map(|line| serde_json::from_str(line).unwrap()).collect();
    let line = |message: &str| {
        let found = lines.iter().find(|line| line["message"] == message);
        found.unwrap_or_else(|| panic!("no line {message:?} in {lines:#?}"))
    };
    assert_eq!((&line("node")["node_id"], &line("node")["level"]), (&"n1".into(), &"INFO".into()));
    assert_eq!((&line("connected")["user"], &line("connected")["device"]), (&"ann".into(), &"d".into()));
    let kick = line("kick asked for over the API");
    assert_eq!(kick["user"], "ann");
    let end = line("connection ends");
    assert!(end["user"].as_str().unwrap().contains("ann") && end["login"].is_number(), "{end}");
    assert_eq!(end["cause"], "kicked");
    assert!(lines.iter().all(|line| line["timestamp"].is_string()), "{lines:#?}");
}
