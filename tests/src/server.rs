//! The real program as a child process.

use crate::{
    client::{Client, Login, Transport},
    http::{self, Answer},
    metrics::Metrics,
    tls::{Certificates, Tunnel},
    token,
    wait::{PATIENCE, until_within},
};
use serde_json::Value;
use std::{
    io::{BufRead, BufReader, Read},
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{Arc, Mutex, PoisonError},
    thread::JoinHandle,
    time::{Duration, Instant},
};

/// Where the program is: `BOWLINE_BIN`, or beside the running test in the same profile.
pub fn program() -> PathBuf {
    let path = match std::env::var_os("BOWLINE_BIN") {
        Some(path) => PathBuf::from(path),
        None => {
            let test = std::env::current_exe().expect("a running test has a path");
            // target/<profile>/deps/e2e-…, or target/<profile>/churn
            let folder = test.parent().expect("a program lies in a folder");
            let profile = if folder.ends_with("deps") { folder.parent() } else { Some(folder) };
            let profile = profile.expect("the folder is not the root");
            profile.join(format!("bowline{}", std::env::consts::EXE_SUFFIX))
        }
    };
    assert!(
        path.is_file(),
        "{} does not exist: build the program first with `cargo build -p bowline` (with the profile of the \
         tests), or name it in BOWLINE_BIN",
        path.display()
    );
    path
}

/// Whether the suite runs over the bad local link.
pub fn trial() -> bool {
    std::env::var("BOWLINE_TEST_TRIAL").is_ok_and(|value| value == "1")
}

/// Whether every server of the suite speaks TLS, and its clients reach it through tunnels.
pub fn over_tls() -> bool {
    std::env::var("BOWLINE_TEST_TLS").is_ok_and(|value| value == "1")
}

fn command() -> Command {
    prepared(Command::new(program()))
}

/// The program, which may open so many files and no more.
fn command_with_files(files: u32) -> Command {
    let mut command = Command::new("sh");
    command.arg("-c").arg(format!("ulimit -n {files} && exec \"$0\" \"$@\"")).arg(program());
    prepared(command)
}

fn prepared(mut command: Command) -> Command {
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("BOWLINE_") {
            command.env_remove(name);
        }
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// How a program ended that was meant to end.
#[derive(Debug)]
pub struct Ended {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

/// Runs `bowline` with these arguments to its end.
pub fn bowline(arguments: &[&str]) -> Ended {
    bowline_within(PATIENCE, arguments, &[])
}

/// The same with variables of its environment, for what takes longer.
pub fn bowline_within(limit: Duration, arguments: &[&str], environment: &[(&str, &str)]) -> Ended {
    let mut command = command();
    command.args(arguments).envs(environment.iter().copied());
    run(command, &arguments.join(" "), limit)
}

fn run(mut command: Command, what: &str, limit: Duration) -> Ended {
    let mut child = command.spawn().unwrap_or_else(|error| panic!("bowline {what}: {error}"));
    let (stdout, stderr) = (collect(child.stdout.take()), collect(child.stderr.take()));
    let end = Instant::now() + limit;
    let status = loop {
        if let Some(status) = child.try_wait().expect("a child can be waited for") {
            break Some(status);
        }
        if Instant::now() > end {
            let _ = child.kill();
            let _ = child.wait();
            break None;
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let (stdout, stderr) = (stdout.join().expect("reading ends"), stderr.join().expect("reading ends"));
    let Some(status) = status else {
        panic!("`bowline {what}` did not end within {limit:?}\n{stdout}\n{stderr}")
    };
    Ended { code: status.code(), stdout, stderr }
}

fn collect(pipe: Option<impl Read + Send + 'static>) -> JoinHandle<String> {
    let mut pipe = pipe.expect("the child was started with pipes");
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = pipe.read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// What a server is started with.
#[derive(Clone)]
pub struct Setup {
    settings: Vec<(String, String)>,
    secret: bool,
    key: bool,
    data: Arc<tempfile::TempDir>,
    data_path: Option<PathBuf>,
    listen: [String; 3],
    arguments: Vec<String>,
    environment: Vec<(String, String)>,
    certificates: Option<Arc<Certificates>>,
    open_files: Option<u32>,
}

impl Default for Setup {
    fn default() -> Self {
        Self::new()
    }
}

impl Setup {
    pub fn new() -> Self {
        Self {
            settings: Vec::new(),
            secret: true,
            key: true,
            data: Arc::new(tempfile::tempdir().expect("a temporary directory")),
            data_path: None,
            listen: ["127.0.0.1:0"; 3].map(String::from),
            arguments: Vec::new(),
            environment: Vec::new(),
            certificates: over_tls().then(|| Arc::new(Certificates::new())),
            open_files: None,
        }
    }

    pub fn set(mut self, key: &str, value: impl ToString) -> Self {
        self.settings.push((key.to_owned(), value.to_string()));
        self
    }

    /// Further flags of `serve`.
    pub fn argument(mut self, argument: &str) -> Self {
        self.arguments.push(argument.to_owned());
        self
    }

    /// A variable of its environment.
    pub fn environment(mut self, name: &str, value: &str) -> Self {
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Its limit on open files.
    pub fn open_files(mut self, files: u32) -> Self {
        self.open_files = Some(files);
        self
    }

    /// Its listeners for clients speak TLS; clients of the suite reach them through tunnels.
    pub fn tls(mut self, certificates: &Arc<Certificates>) -> Self {
        self.certificates = Some(certificates.clone());
        self
    }

    /// No `auth.secret`: the server makes its own.
    pub fn without_secret(mut self) -> Self {
        self.secret = false;
        self
    }

    /// No `api.key`: the server makes its own.
    pub fn without_key(mut self) -> Self {
        self.key = false;
        self
    }

    /// Another data directory than a fresh one.
    pub fn data(mut self, path: &Path) -> Self {
        self.data_path = Some(path.to_owned());
        self
    }

    pub fn listen_ws(mut self, address: impl ToString) -> Self {
        self.listen[0] = address.to_string();
        self
    }

    pub fn listen_tcp(mut self, address: impl ToString) -> Self {
        self.listen[1] = address.to_string();
        self
    }

    pub fn listen_api(mut self, address: impl ToString) -> Self {
        self.listen[2] = address.to_string();
        self
    }

    pub fn data_dir(&self) -> &Path {
        self.data_path.as_deref().unwrap_or(self.data.path())
    }

    fn command(&self) -> Command {
        let mut command = self.open_files.map_or_else(command, command_with_files);
        command.arg("serve").arg("--data").arg(self.data_dir());
        for (flag, address) in ["--listen", "--tcp", "--api"].iter().zip(&self.listen) {
            command.args([flag, address.as_str()]);
        }
        let mut set = |key: &str, value: &str| {
            command.arg("--set").arg(format!("{key}={value}"));
        };
        if self.secret {
            set("auth.secret", token::SECRET);
        }
        if self.key {
            set("api.key", token::API_KEY);
        }
        if let Some(certificates) = &self.certificates {
            set("gateway.tls.cert", &certificates.cert().to_string_lossy());
            set("gateway.tls.key", &certificates.key().to_string_lossy());
        }
        if trial() {
            set("links.trial_delay_ms", "20");
            set("links.trial_not_here_permille", "20");
        }
        for (key, value) in &self.settings {
            set(key, value);
        }
        command.args(&self.arguments);
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        // Whatever a server leaves behind is left in its own directory.
        command.current_dir(self.data.path());
        command
    }

    /// Starts the server and waits until it is ready.
    pub fn start(self) -> Server {
        Server::launch(self)
    }

    /// Starts a server that is meant to refuse.
    pub fn start_in_vain(self) -> Ended {
        run(self.command(), "serve", PATIENCE)
    }
}

/// Where a server listens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Addresses {
    pub ws: SocketAddr,
    pub tcp: SocketAddr,
    pub api: SocketAddr,
}

/// A server that runs, until it is dropped.
pub struct Server {
    setup: Setup,
    child: Child,
    ended: Option<ExitStatus>,
    log: Arc<Mutex<Vec<String>>>,
    /// Where it listens, and where clients go: through tunnels if it speaks TLS.
    listeners: Addresses,
    addresses: Addresses,
    tunnels: Option<[Tunnel; 2]>,
}

impl Server {
    pub fn start() -> Self {
        Setup::new().start()
    }

    /// With these settings.
    pub fn with(settings: &[(&str, &str)]) -> Self {
        settings.iter().fold(Setup::new(), |setup, (key, value)| setup.set(key, value)).start()
    }

    fn launch(setup: Setup) -> Self {
        let mut child = setup.command().spawn().unwrap_or_else(|error| panic!("bowline serve: {error}"));
        let log = Arc::new(Mutex::new(Vec::new()));
        keep_lines(child.stderr.take().expect("stderr is a pipe"), log.clone());
        keep_lines(child.stdout.take().expect("stdout is a pipe"), log.clone());
        // Owned from here on, so that a server that never gets ready is ended too.
        let unknown = SocketAddr::from(([127, 0, 0, 1], 0));
        let addresses = Addresses { ws: unknown, tcp: unknown, api: unknown };
        let mut server =
            Self { setup, child, ended: None, log, listeners: addresses, addresses, tunnels: None };
        until_within(PATIENCE, "the server is ready", || {
            let ready = server.log().iter().any(|line| line.trim() == "ready");
            if !ready && let Some(status) = server.child.try_wait().expect("a child can be waited for") {
                server.ended = Some(status);
                panic!("the server ended with {status} before it was ready:\n{}", server.log().join("\n"));
            }
            ready.then_some(())
        });
        server.addresses = addresses_in(&server.log())
            .unwrap_or_else(|missing| panic!("no address of {missing} in:\n{}", server.log().join("\n")));
        server.listeners = server.addresses;
        if let Some(certificates) = &server.setup.certificates {
            let Addresses { ws, tcp, .. } = server.listeners;
            let tunnels = [ws, tcp].map(|target| Tunnel::to(target, certificates));
            (server.addresses.ws, server.addresses.tcp) = (tunnels[0].address, tunnels[1].address);
            server.tunnels = Some(tunnels);
        }
        server
    }

    pub fn ws(&self) -> SocketAddr {
        self.addresses.ws
    }

    pub fn tcp(&self) -> SocketAddr {
        self.addresses.tcp
    }

    pub fn api(&self) -> SocketAddr {
        self.addresses.api
    }

    pub fn speaks_tls(&self) -> bool {
        self.setup.certificates.is_some()
    }

    /// Where it listens itself, whatever clients go through.
    pub fn listeners(&self) -> Addresses {
        self.listeners
    }

    pub fn addresses(&self) -> Addresses {
        self.addresses
    }

    pub fn data_dir(&self) -> &Path {
        self.setup.data_dir()
    }

    /// What it was started with, for another start on the same data directory.
    pub fn setup(&self) -> Setup {
        self.setup.clone()
    }

    /// What the program has written so far, colours taken out.
    pub fn log(&self) -> Vec<String> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    // --- life -------------------------------------------------------------------------------------------------

    /// Sends a signal, by its name: `TERM`, `INT`, `HUP`, `STOP`, `CONT`.
    pub fn signal(&self, name: &str) {
        let status = Command::new("kill").arg(format!("-{name}")).arg(self.child.id().to_string()).status();
        assert!(status.expect("`kill` can be run").success(), "the server took no SIG{name}");
    }

    /// What it holds in memory now, in bytes.
    pub fn memory_bytes(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()));
        let status = status.expect("a running process has a status");
        let line =
            status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("the status tells VmRSS");
        let kib: u64 = line.trim().trim_end_matches(" kB").parse().expect("VmRSS is a number of kB");
        kib * 1024
    }

    /// Kills the server as a power cut would.
    pub fn kill(&mut self) {
        self.child.kill().expect("an own child can be killed");
        self.ended = Some(self.child.wait().expect("a child can be waited for"));
    }

    /// Starts again after an end, on the same data directory. Ports that were left to chance change.
    pub fn restart(&mut self) {
        assert!(self.ended.is_some(), "the server still runs");
        let next = Self::launch(self.setup.clone());
        *self = next;
    }

    /// Starts again on the very same ports.
    pub fn restart_in_place(&mut self) {
        let Addresses { ws, tcp, api } = self.listeners;
        self.setup = self.setup.clone().listen_ws(ws).listen_tcp(tcp).listen_api(api);
        let (tunnels, addresses) = (self.tunnels.take(), self.addresses);
        self.restart();
        if tunnels.is_some() {
            (self.tunnels, self.addresses) = (tunnels, addresses);
        }
    }

    pub fn has_ended(&mut self) -> Option<ExitStatus> {
        if self.ended.is_none() {
            self.ended = self.child.try_wait().expect("a child can be waited for");
        }
        self.ended
    }

    /// Waits for the end that was asked for.
    pub fn wait_end(&mut self, limit: Duration) -> ExitStatus {
        until_within(limit, "the server has ended", || self.has_ended())
    }

    // --- clients ----------------------------------------------------------------------------------------------

    pub fn login(&self, user: &str) -> Login {
        Login::new(self.addresses, user)
    }

    pub fn connect(&self, transport: Transport, user: &str) -> Client {
        self.login(user).connect(transport)
    }

    pub fn connect_device(&self, transport: Transport, user: &str, device: &str) -> Client {
        self.login(user).device(device).connect(transport)
    }

    // --- the API ----------------------------------------------------------------------------------------------

    pub fn api_url(&self, path: &str) -> String {
        format!("http://{}{path}", self.addresses.api)
    }

    pub fn public_url(&self, path: &str) -> String {
        format!("http://{}{path}", self.addresses.ws)
    }

    pub fn call(&self, method: &str, path: &str, body: Option<&Value>) -> Answer {
        let bearer = format!("Bearer {}", token::API_KEY);
        let body = body.map(Value::to_string);
        http::request(method, &self.api_url(path), &[("authorization", &bearer)], body.as_deref())
    }

    pub fn get(&self, path: &str) -> Answer {
        self.call("GET", path, None)
    }

    pub fn post(&self, path: &str, body: &Value) -> Answer {
        self.call("POST", path, Some(body))
    }

    /// Sends one message by the API and gives its answer.
    pub fn send(&self, message: &Value) -> Value {
        self.post("/api/v1/messages", message).expect(200).json()
    }

    pub fn status(&self) -> Value {
        self.get("/admin/status").expect(200).json()
    }

    pub fn metrics(&self) -> Metrics {
        Metrics::parse(&self.get("/metrics").expect(200).text)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if self.ended.is_none() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
        if std::thread::panicking() {
            let log = self.log();
            let tail = &log[log.len().saturating_sub(40)..];
            eprintln!("--- the end of the server's log ---\n{}\n---", tail.join("\n"));
        }
    }
}

fn keep_lines(pipe: impl Read + Send + 'static, log: Arc<Mutex<Vec<String>>>) {
    std::thread::spawn(move || {
        for line in BufReader::new(pipe).split(b'\n') {
            let Ok(line) = line else { break };
            let line = without_colours(&String::from_utf8_lossy(&line));
            log.lock().unwrap_or_else(PoisonError::into_inner).push(line);
        }
    });
}

fn without_colours(line: &str) -> String {
    let mut plain = String::with_capacity(line.len());
    let mut rest = line.chars();
    while let Some(c) = rest.next() {
        if c == '\u{1b}' {
            // ESC [ … letter
            for c in rest.by_ref() {
                if c.is_ascii_alphabetic() {
                    break;
                }
            }
        } else {
            plain.push(c);
        }
    }
    plain
}

/// Finds the three listeners in the log: the lines that name a loopback address, told apart by their words.
fn addresses_in(log: &[String]) -> Result<Addresses, &'static str> {
    let (mut ws, mut tcp, mut api) = (None, None, None);
    for line in log {
        let Some(address) = loopback_address(line) else { continue };
        let words: Vec<String> =
            line.split(|c: char| !c.is_alphanumeric()).map(str::to_ascii_lowercase).collect();
        let has = |names: &[&str]| names.iter().any(|name| words.iter().any(|word| word == name));
        let slot = if has(&["tcp"]) {
            &mut tcp
        } else if has(&["api", "admin"]) {
            &mut api
        } else if has(&["ws", "websocket", "public"]) {
            &mut ws
        } else {
            continue;
        };
        slot.get_or_insert(address);
    }
    Ok(Addresses {
        ws: ws.ok_or("the public listener")?,
        tcp: tcp.ok_or("the TCP listener")?,
        api: api.ok_or("the API listener")?,
    })
}

fn loopback_address(line: &str) -> Option<SocketAddr> {
    let start = line.find("127.0.0.1:")?;
    let text = &line[start..];
    let end = text["127.0.0.1:".len()..]
        .find(|c: char| !c.is_ascii_digit())
        .map_or(text.len(), |n| n + "127.0.0.1:".len());
    text[..end].parse().ok().filter(|address: &SocketAddr| address.port() != 0)
}
