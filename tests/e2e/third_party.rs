//! Other people's clients: Python's `websockets` and sockets, Node's `ws` and its own WebSocket, and the example of
//! the README.

use bowline_tests::{Certificates, PATIENCE, Server, Setup, Transport, token, tools};
use serde_json::json;
use std::{
    io::Read,
    process::{Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

const LIMIT: Duration = Duration::from_secs(120);

/// Runs a program to its end; its output, standard error behind standard output.
fn run(mut command: Command) -> (Option<i32>, String) {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let pipes: [Box<dyn Read + Send>; 2] = [
        Box::new(child.stdout.take().expect("stdout is a pipe")),
        Box::new(child.stderr.take().expect("stderr is a pipe")),
    ];
    let readers = pipes.map(|mut pipe| {
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            let _ = pipe.read_to_end(&mut bytes);
            String::from_utf8_lossy(&bytes).into_owned()
        })
    });
    let end = Instant::now() + LIMIT;
    let status = loop {
        if let Some(status) = child.try_wait().expect("a child can be waited for") {
            break status;
        }
        if Instant::now() > end {
            let _ = child.kill();
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    let output = readers.map(|reader| reader.join().expect("reading ends")).concat();
    (status.code(), output)
}

/// Runs a suite of clients in another language and checks its closing line.
pub fn suite(mut command: Command, server: &Server, least: u32) {
    let users = ["alice", "bob", "carol", "dave", "erin", "frank", "gina", "hank"];
    let tokens: serde_json::Map<_, _> =
        users.iter().map(|user| (user.to_string(), json!(token::of(user)))).collect();
    let listeners = server.listeners();
    let scheme = if server.speaks_tls() { "wss" } else { "ws" };
    command
        .env("SERVER_WS", format!("{scheme}://localhost:{}/ws", listeners.ws.port()))
        .env("SERVER_TCP", listeners.tcp.to_string())
        .env("SERVER_TOKENS", json!(tokens).to_string());
    let (code, output) = run(command);
    let last = output.lines().rfind(|line| line.ends_with(" failed")).unwrap_or_default();
    let passed: u32 = last.split(' ').next().and_then(|word| word.parse().ok()).unwrap_or(0);
    assert_eq!(code, Some(0), "{output}");
    assert_eq!(last, format!("{passed} passed, 0 failed"), "{output}");
    assert!(passed >= least, "only {passed} tests were run:\n{output}");
}

#[test]
fn clients_in_python() {
    let server = Server::start();
    let mut command = tools::python();
    command.arg(tools::folder().join("python/client_test.py"));
    suite(command, &server, 14);
}

#[test]
fn clients_in_node() {
    let server = Server::start();
    let mut command = tools::node();
    command.arg(tools::folder().join("node/client.mjs"));
    suite(command, &server, 5);
}

#[test]
fn clients_in_python_over_tls() {
    let certificates = Arc::new(Certificates::new());
    let server = Setup::new().tls(&certificates).start();
    let mut command = tools::python();
    command.arg(tools::folder().join("python/client_test.py")).env("SSL_CERT_FILE", certificates.ca());
    suite(command, &server, 14);
}

#[test]
fn clients_in_node_over_tls() {
    let certificates = Arc::new(Certificates::new());
    let server = Setup::new().tls(&certificates).start();
    let mut command = tools::node();
    command.arg(tools::folder().join("node/client.mjs")).env("NODE_EXTRA_CA_CERTS", certificates.ca());
    suite(command, &server, 5);
}

#[test]
fn the_example_of_the_readme_does_what_it_says() {
    let readme = tools::folder().join("../README.md");
    let text = std::fs::read_to_string(&readme).expect("the README is there");
    let code = text
        .split("```python\n")
        .nth(1)
        .and_then(|rest| rest.split("```").next())
        .expect("the README has an example in Python");
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = folder.path().join("example.py");
    std::fs::write(&file, code).expect("a file can be written");

    // Without configured keys, as the README starts it.
    let server = Setup::new().without_secret().without_key().start();
    let address = server.ws().to_string();
    let mut children = Vec::new();
    for (user, to, text) in [("alice", "bob", "Hello Bob"), ("bob", "alice", "Hello Alice")] {
        let mut command = tools::python();
        command.args(["-u".as_ref(), file.as_os_str()]).args([user, to, text, &address]);
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let mut pipe = child.stdout.take().expect("stdout is a pipe");
        let (lines, received) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let (mut all, mut chunk) = (Vec::new(), [0; 1024]);
            while let Ok(count @ 1..) = pipe.read(&mut chunk) {
                all.extend_from_slice(&chunk[..count]);
                if lines.send(String::from_utf8_lossy(&all).into_owned()).is_err() {
                    break;
                }
            }
        });
        // Alice first, so that what she says is there before Bob comes.
        wait_for(&received, "stored");
        children.push((child, received));
    }
    let shown = wait_for(&children[0].1, "Hello Alice");
    for (child, _) in &mut children {
        assert!(child.try_wait().expect("a child can be waited for").is_none(), "it goes on listening");
        child.kill().expect("an own child can be killed");
        child.wait().expect("a child can be waited for");
    }
    assert!(shown.contains("bob"), "it says who wrote: {shown}");
    let made = bowline_tests::bowline(&[
        "token",
        "--user",
        "bob",
        "--data",
        server.data_dir().to_str().expect("a path of text"),
    ]);
    let mut bob = server.login("bob").token(made.stdout.trim()).connect(Transport::Ws);
    let history = bob.history_after("d:alice:bob", 0);
    let texts: Vec<_> = history.iter().map(|message| message["body"]["text"].clone()).collect();
    assert_eq!(texts, [json!("Hello Bob"), json!("Hello Alice")]);
}

/// What a program has printed once that contains `text`.
fn wait_for(received: &std::sync::mpsc::Receiver<String>, text: &str) -> String {
    let end = Instant::now() + PATIENCE;
    let mut all = String::new();
    while !all.contains(text) {
        let left = end.saturating_duration_since(Instant::now());
        all = received
            .recv_timeout(left)
            .unwrap_or_else(|error| panic!("{error} while waiting for {text:?} in {all:?}"));
    }
    all
}
