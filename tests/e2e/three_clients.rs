//! One group, three clients that share no code: `bowline chat`, the demo page in a browser, and twenty lines of
//! Python over plain TCP.

use bowline_tests::{Setup, tools};
use serde_json::json;
use std::{
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{Receiver, channel},
    time::{Duration, Instant},
};

const LIMIT: Duration = Duration::from_secs(60);

/// A client in a process of its own, with the lines that it has printed.
struct Process {
    child: Child,
    input: ChildStdin,
    lines: Receiver<String>,
    seen: Vec<String>,
}

impl Process {
    fn start(mut command: Command) -> Self {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let output = BufReader::new(child.stdout.take().expect("stdout is a pipe"));
        let input = child.stdin.take().expect("stdin is a pipe");
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Self { child, input, lines, seen: Vec::new() }
    }

    fn say(&mut self, line: &str) {
        writeln!(self.input, "{line}").expect("the client reads its input");
    }

    /// Waits until a line with this text was printed.
    fn wait(&mut self, text: &str) {
        let end = Instant::now() + LIMIT;
        while !self.seen.iter().any(|line| line.contains(text)) {
            let left = end.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok(line) => self.seen.push(line),
                Err(error) => panic!("waited for {text:?} ({error}) and saw {:?}", self.seen),
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn the_terminal_the_page_and_twenty_lines_of_tcp_chat_in_one_group() {
    let _turn = bowline_tests::turn();
    let server = Setup::new().without_secret().start();
    let members = json!({"group_id": "team", "name": "Team", "members": ["alice", "bob", "carol"]});
    server.post("/api/v1/groups", &members).expect(201);
    let data = server.data_dir().to_str().expect("a path of text").to_owned();

    let mut command = Command::new(bowline_tests::server::program());
    let url = format!("ws://{}/ws", server.ws());
    command.args(["chat", "--user", "alice", "--conversation", "g:team", "--url", &url, "--data", &data]);
    let mut terminal = Process::start(command);
    terminal.wait("-- g:team");

    let token = bowline_tests::bowline(&["token", "--user", "carol", "--data", &data]);
    let (host, port) = (server.tcp().ip().to_string(), server.tcp().port().to_string());
    let mut command = tools::python();
    command.arg(tools::folder().join("python/tcp_chat.py"));
    command.args([&host, &port, token.stdout.trim(), "g:team"]);
    let mut tcp = Process::start(command);
    tcp.wait("connected");

    let mut command = tools::node();
    command
        .arg(tools::folder().join("node/group.mjs"))
        .args(["from the terminal", "from twenty lines"])
        .env("SERVER_PAGE", format!("http://{}/?user=bob&conversation=g:team", server.ws()))
        .env("BROWSER", tools::chromium())
        .env("SCREENSHOTS", tools::output_folder());
    let mut page = Process::start(command);
    page.wait("online");
    terminal.say("from the terminal");
    tcp.say("from twenty lines");

    page.wait("passed");
    terminal.wait("bob: from the page");
    terminal.wait("carol: from twenty lines");
    tcp.wait("bob: from the page");
    tcp.wait("alice: from the terminal");
    terminal.wait("received up to #");
}
