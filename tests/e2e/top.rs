//! `bowline top`: one snapshot where nobody looks, a live view in a terminal.

use bowline_tests::{
    PATIENCE, Server, Transport, bowline, client::Client, server::program, token, until, wait::until_within,
};
use serde_json::Value;
use std::{
    io::{Read, Write},
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex},
};

fn arguments(server: &str, more: &[&str]) -> Vec<String> {
    let mut all: Vec<String> =
        ["top", "--api-url", server, "--api-key", token::API_KEY].map(String::from).into();
    all.extend(more.iter().map(|one| (*one).to_owned()));
    all
}

fn top(server: &str, more: &[&str]) -> bowline_tests::server::Ended {
    let all = arguments(server, more);
    bowline(&all.iter().map(String::as_str).collect::<Vec<_>>())
}

fn talk(server: &Server) -> (Client, Client) {
    let mut alice = server.connect(Transport::Ws, "alice");
    let bob = server.connect(Transport::Tcp, "bob");
    for n in 0..3 {
        alice.tell("bob", n);
    }
    (alice, bob)
}

#[test]
fn without_a_terminal_it_prints_one_snapshot() {
    let server = Server::start();
    let _clients = talk(&server);
    let url = server.api_url("");
    let ended = top(&url, &[]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    for part in ["ready", "connections", "frames in", "queue depth", "waiting", "memory"] {
        assert!(ended.stdout.contains(part), "{part} is missing in\n{}", ended.stdout);
    }
    assert!(!ended.stdout.contains('\u{1b}'), "no colours where nobody looks: {ended:?}");
    let ended = top(&url, &["--json"]);
    let view: Value = serde_json::from_str(&ended.stdout).unwrap_or_else(|_| panic!("{ended:?}"));
    assert_eq!(view["state"], "ready");
    for (section, name, value) in [
        ("connections", "connections", 2),
        ("connections", "users", 2),
        ("connections", "ws", 1),
        ("connections", "tcp", 1),
        ("ledger", "accepted", 3),
        ("ledger", "waiting", 3),
        ("pressure", "paused_now", 0),
    ] {
        assert_eq!(view[section][name].as_u64(), Some(value), "{section} {name}: {view:#}");
    }
    assert!(view["process"]["memory"].as_f64().is_some_and(|bytes| bytes > 1e6), "{view:#}");
    assert!(view["process"]["cpu"].is_number(), "{view:#}");
}

#[test]
fn without_a_server_it_says_so() {
    let nobody = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        format!("http://{}", listener.local_addr().expect("it is bound"))
    };
    let ended = top(&nobody, &[]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stderr.contains("no server answers") && ended.stdout.is_empty(), "{ended:?}");
    let server = Server::start();
    let url = server.api_url("");
    let ended = bowline(&["top", "--api-url", &url, "--api-key", "wrong"]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stderr.contains("--api-key"), "{ended:?}");
}

/// A program in a terminal of 120 by 40, made by `script`.
struct Terminal {
    child: Child,
    screen: Arc<Mutex<Vec<u8>>>,
}

impl Terminal {
    fn run(arguments: &[String]) -> Self {
        let quoted: Vec<String> = arguments.iter().map(|one| format!("'{one}'")).collect();
        let line = format!("stty rows 40 cols 120; exec '{}' {}", program().display(), quoted.join(" "));
        let mut child = Command::new("script")
            .args(["--quiet", "--flush", "--return", "--command", &line, "/dev/null"])
            .env("TERM", "xterm-256color")
            .env("SHELL", "/bin/sh")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("`script` (util-linux) can be run");
        let screen = Arc::new(Mutex::new(Vec::new()));
        let (mut pipe, kept) = (child.stdout.take().expect("stdout is a pipe"), screen.clone());
        std::thread::spawn(move || {
            let mut chunk = [0; 4096];
            while let Ok(count @ 1..) = pipe.read(&mut chunk) {
                kept.lock().expect("nobody panics with it").extend_from_slice(&chunk[..count]);
            }
        });
        Self { child, screen }
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.screen.lock().expect("nobody panics with it")).into_owned()
    }

    fn press(&mut self, keys: &[u8]) {
        let pipe = self.child.stdin.as_mut().expect("stdin is a pipe");
        pipe.write_all(keys).and_then(|()| pipe.flush()).expect("the terminal takes keys");
    }

    fn wait_end(&mut self) -> i32 {
        let ended = until_within(PATIENCE, "the program has ended", || {
            self.child.try_wait().expect("a child can be waited for")
        });
        ended.code().expect("it was not killed")
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What leaves the alternate screen, and what shows the cursor again.
const LEAVE: &str = "\u{1b}[?1049l";
const SHOW_CURSOR: &str = "\u{1b}[?25h";

#[test]
fn in_a_terminal_it_draws_until_q_and_leaves_it_as_it_was() {
    let server = Server::start();
    let _clients = talk(&server);
    for keys in [&b"q"[..], b"\x03"] {
        let mut terminal = Terminal::run(&arguments(&server.api_url(""), &[]));
        until("everything is drawn", || {
            let text = terminal.text();
            let parts = ["ready", "connections", "frames", "waiting", "q", "quits"];
            parts.iter().all(|part| text.contains(part)).then_some(())
        });
        terminal.press(keys);
        assert_eq!(terminal.wait_end(), 0, "{}", terminal.text());
        until("the terminal is put back", || {
            let text = terminal.text();
            (text.contains(LEAVE) && text.contains(SHOW_CURSOR)).then_some(())
        });
    }
}

#[test]
fn a_server_that_goes_away_is_told_and_waited_for() {
    let mut server = Server::start();
    let mut terminal = Terminal::run(&arguments(&server.api_url(""), &[]));
    until("something is drawn", || terminal.text().contains("connections").then_some(()));
    server.kill();
    until("it says that nobody answers", || terminal.text().contains("answers").then_some(()));
    terminal.press(b"q");
    assert_eq!(terminal.wait_end(), 0, "{}", terminal.text());
}
