//! The command line: names and exit codes. 0 done, 1 failed, 2 usage or configuration.

use crate::{
    admin, bench, chat, check,
    config::{self, Note, Settings, Sources, text},
    data::DataDir,
    doctor, drain, errors, metrics, serve,
    token::{self, Tokens},
    top,
};
use crate::{random, random_text};
use anyhow::{Context, anyhow};
use bowline_client::Trust;
use bowline_store::sqlite::{self, BackupError};
use clap::{Args, Parser, Subcommand};
use std::{
    io::{IsTerminal, Write},
    path::PathBuf,
    process::ExitCode,
    time::Duration,
};

/// A failure with its exit code.
#[derive(Debug)]
pub enum Failure {
    /// Exit code 1.
    Failed(anyhow::Error),
    /// Exit code 2: the command line or the configuration is wrong, or what they name is taken.
    Usage(anyhow::Error),
}

impl From<config::Error> for Failure {
    fn from(error: config::Error) -> Self {
        Self::Usage(error.into())
    }
}

/// Durable messages in order, once, to millions of open connections.
#[derive(Parser)]
#[command(name = "bowline", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Runs a server
    Serve(ServeArgs),
    /// Prints a token for a user
    Token(TokenArgs),
    /// Shows what a running server does
    Status(StatusArgs),
    /// Shows it live, until q
    Top(TopArgs),
    /// Lets a running server take no new clients, move those it has, and waits until they are gone
    Drain(DrainArgs),
    /// Looks whether this machine is fit for a server
    Doctor(DoctorArgs),
    /// Copies the database to a file, also while a server runs
    Backup(BackupArgs),
    /// Chats in the terminal
    Chat(ChatArgs),
    /// Measures a running server
    Bench(BenchArgs),
    /// A process of `bench`; the job comes from standard input
    #[command(hide = true)]
    BenchWorker,
    /// Loads servers, kills them, and judges whether what is promised holds
    Check(CheckArgs),
    /// Shows or checks the configuration
    Config {
        #[command(subcommand)]
        command: ConfigCommand,
    },
}

/// Where the configuration comes from.
#[derive(Args, Clone, Default)]
struct ConfigArgs {
    /// TOML file
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Directory for the database and the generated keys [default: ./bowline-data]
    #[arg(long, value_name = "DIR")]
    data: Option<String>,
    /// Any key of the configuration
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
}

#[derive(Args)]
struct ServeArgs {
    #[command(flatten)]
    config: ConfigArgs,
    #[command(flatten)]
    flags: ServeFlags,
}

/// Flags for the keys that are given most often.
#[derive(Args, Default)]
struct ServeFlags {
    /// What this process does: front,gateway,router,api
    #[arg(long, value_name = "ROLES")]
    role: Option<String>,
    /// Public listener [default: 127.0.0.1:8080]
    #[arg(long, value_name = "ADDR")]
    listen: Option<String>,
    /// TCP listener [default: 127.0.0.1:8081]
    #[arg(long, value_name = "ADDR")]
    tcp: Option<String>,
    /// API listener [default: 127.0.0.1:8090]
    #[arg(long, value_name = "ADDR")]
    api: Option<String>,
    /// Name of this node [default: random]
    #[arg(long, value_name = "ID")]
    node_id: Option<String>,
}

#[derive(Args)]
struct TokenArgs {
    /// Whom the token speaks for
    #[arg(long, value_name = "ID")]
    user: String,
    /// The only device that it is good for
    #[arg(long, value_name = "ID")]
    device: Option<String>,
    /// How long it is good: 90s, 15m, 1h, 7d
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = parse_duration)]
    ttl: Duration,
    #[command(flatten)]
    config: ConfigArgs,
}

#[derive(Args)]
struct BackupArgs {
    /// The file to write, which must not exist yet
    #[arg(long, value_name = "FILE")]
    to: PathBuf,
    #[command(flatten)]
    config: ConfigArgs,
}

#[derive(Args)]
struct ChatArgs {
    /// Who you are
    #[arg(long, value_name = "ID")]
    user: String,
    /// Whom to talk to
    #[arg(long, value_name = "USER", conflicts_with_all = ["conversation", "room"])]
    to: Option<String>,
    /// The conversation to talk in, such as g:team
    #[arg(long, value_name = "ID", conflicts_with = "room")]
    conversation: Option<String>,
    /// The room to join and talk in
    #[arg(long, value_name = "ROOM")]
    room: Option<String>,
    /// Your device [default: the server chooses one]
    #[arg(long, value_name = "ID")]
    device: Option<String>,
    #[command(flatten)]
    public: PublicArgs,
}

/// Which server clients connect to.
#[derive(Args)]
struct PublicArgs {
    /// ws://host:port/ws or tcp://host:port, with TLS wss:// or tls:// [default: the WebSocket listener of the
    /// configuration]
    #[arg(long, value_name = "URL")]
    url: Option<String>,
    /// PEM file with the issuers to trust instead of the system's, for wss:// and tls://
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// Token of the user [default: a demo token of the server at --url, where it gives them; else signed with the
    /// secret of the configuration or of the data directory]
    #[arg(long, value_name = "T")]
    token: Option<String>,
    #[command(flatten)]
    config: ConfigArgs,
}

#[derive(Args)]
struct BenchArgs {
    #[arg(value_enum)]
    scenario: bench::Scenario,
    #[command(flatten)]
    public: PublicArgs,
    /// Connections, each with a user of its own
    #[arg(long, value_name = "N", default_value_t = 1000)]
    connections: usize,
    /// How long to measure: 90s, 15m [default: 10s; storm: how long to wait for all, 10m]
    #[arg(long, value_name = "D", value_parser = parse_duration)]
    duration: Option<Duration>,
    /// Messages a second in all, sent whether or not others have arrived [default: 0, --in-flight holds]
    #[arg(long, value_name = "N")]
    rate: Option<f64>,
    /// Without a rate: messages under way at once, of each connection (pair) or of the room (fanout)
    #[arg(long, value_name = "K", default_value_t = 1)]
    in_flight: usize,
    /// Members of the room that publish (fanout)
    #[arg(long, value_name = "N", default_value_t = 1)]
    publishers: usize,
    /// Members of the room that join and read nothing (fanout); the others are measured, and then it is seen whether
    /// these were closed as slow consumers, come back and have missed nothing
    #[arg(long, value_name = "N", default_value_t = 0)]
    stalled: usize,
    /// Bytes of a message's body
    #[arg(long, value_name = "N", default_value_t = 128)]
    body_bytes: usize,
    /// The server's process, for its CPU and memory [default: who listens at the URL's port on this machine]
    #[arg(long, value_name = "PID")]
    server_pid: Option<u32>,
    /// Processes that hold the connections [default: as many as the limit on open files asks for]
    #[arg(long, value_name = "N")]
    processes: Option<usize>,
    /// storm: no server, but the same rules in virtual time for so many clients
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    simulate: Option<u32>,
    /// Of the simulated server: handshakes a second (gateway.handshakes_per_second)
    #[arg(long, value_name = "N", default_value_t = 5000, requires = "simulate", value_parser = clap::value_parser!(u32).range(1..))]
    accept_rate: u32,
    /// Of the simulated server: how long it is away
    #[arg(long, value_name = "D", requires = "simulate", value_parser = parse_duration)]
    away: Option<Duration>,
    /// Of the simulation: another number, other random delays
    #[arg(long, value_name = "N", default_value_t = 1, requires = "simulate")]
    seed: u64,
    /// The result as JSON, and no progress
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
struct CheckArgs {
    /// Running servers, ws://host:port/ws or tcp://host:port, with TLS wss:// or tls://; they are loaded, and not killed
    /// [default: a server is started for the run, and killed every few seconds]
    #[arg(long, value_name = "URL", num_args = 1..)]
    url: Vec<String>,
    /// PEM file with the issuers to trust instead of the system's, for wss:// and tls://
    #[arg(long, value_name = "FILE", requires = "url")]
    ca: Option<PathBuf>,
    /// How long to send: 90s, 15m
    #[arg(long, value_name = "D", default_value = "30s", value_parser = parse_duration)]
    duration: Duration,
    /// Users; half of them have two devices or three
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u64).range(2..=10_000))]
    users: u64,
    /// Messages a second in all
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = clap::value_parser!(u64).range(1..=100_000))]
    rate: u64,
    /// What the load follows from [default: random]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Where to keep what the clients saw [default: kept in a temporary folder when the verdict is not clean]
    #[arg(long, value_name = "FILE")]
    history: Option<PathBuf>,
    /// The verdict as JSON, and no progress
    #[arg(long)]
    json: bool,
    /// With --url, the secret that signs the tokens of the run [default: as `bench` and `chat` find it]
    #[arg(long, value_name = "S", requires = "url")]
    token_secret: Option<String>,
    /// With --url, the address of its API, where the ledger is looked at as well
    #[arg(long, value_name = "URL", requires = "url")]
    api_url: Option<String>,
    /// Key of that API [default: that of the configuration, or the one in the data directory]
    #[arg(long, value_name = "K", env = "BOWLINE_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
    #[command(flatten)]
    config: ConfigArgs,
}

/// Which server is asked.
#[derive(Args)]
struct ApiArgs {
    /// Address of the API [default: that of the configuration, http://127.0.0.1:8090]
    #[arg(long, value_name = "URL", env = "BOWLINE_API_URL")]
    api_url: Option<String>,
    /// Key of the API [default: that of the configuration, or the one in the data directory]
    #[arg(long, value_name = "K", env = "BOWLINE_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
    /// The answer as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    config: ConfigArgs,
}

#[derive(Args)]
struct StatusArgs {
    #[command(flatten)]
    api: ApiArgs,
}

#[derive(Args)]
struct TopArgs {
    #[command(flatten)]
    api: ApiArgs,
}

#[derive(Args)]
struct DoctorArgs {
    #[command(flatten)]
    config: ConfigArgs,
    #[command(flatten)]
    flags: ServeFlags,
    /// The findings as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
struct DrainArgs {
    /// What the clients are told
    #[arg(long, value_name = "R", default_value = "drain")]
    reason: String,
    /// Returns as soon as the drain has begun
    #[arg(long)]
    no_wait: bool,
    #[command(flatten)]
    api: ApiArgs,
}

#[derive(Subcommand)]
enum ConfigCommand {
    /// The effective values and where they come from
    Print {
        #[command(flatten)]
        config: ConfigArgs,
        #[command(flatten)]
        flags: ServeFlags,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Whether a server would start with it
    Check {
        #[command(flatten)]
        config: ConfigArgs,
        #[command(flatten)]
        flags: ServeFlags,
    },
    /// A TOML file with every key and what it means
    Example,
    /// The reference in Markdown
    #[command(hide = true)]
    Reference,
    /// The reference of error and close codes in Markdown
    #[command(hide = true)]
    Errors,
    /// The table of metrics in Markdown
    #[command(hide = true)]
    Metrics,
}

pub fn run() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are results, everything else is a fault of usage; clap knows which.
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { 2 } else { 0 });
        }
    };
    match dispatch(cli.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure::Failed(error)) => {
            eprintln!("bowline: {error:#}");
            ExitCode::from(1)
        }
        Err(Failure::Usage(error)) => {
            eprintln!("bowline: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn dispatch(command: Command) -> Result<(), Failure> {
    match command {
        Command::Serve(args) => {
            let (config, notes) = args.config.settings(&args.flags)?.config()?;
            serve::run(config, &notes)
        }
        Command::Token(args) => print_token(args),
        Command::Status(args) => {
            let target = args.api.target()?;
            let status = admin::status(&target).map_err(Failure::Failed)?;
            print(&if args.api.json { admin::json(&status) } else { admin::human(&status) })
        }
        Command::Top(args) => {
            let target = args.api.target()?;
            let is_seen = std::io::stdout().is_terminal() && std::io::stdin().is_terminal();
            if is_seen && !args.api.json {
                return top::watch(target).map_err(Failure::Failed);
            }
            print(&top::once(&target, args.api.json).map_err(Failure::Failed)?)
        }
        Command::Drain(args) => {
            let target = args.api.target()?;
            let begun = admin::drain(&target, &args.reason).map_err(Failure::Failed)?;
            if args.no_wait {
                return print(&if args.api.json { admin::json(&begun) } else { admin::drain_begun(&begun) });
            }
            if !args.api.json {
                print(&admin::drain_begun(&begun))?;
            }
            let ended = drain::wait(&target, begun, args.api.json).map_err(Failure::Failed)?;
            print(&if args.api.json { admin::json(&ended.status) } else { ended.line() })
        }
        Command::Doctor(args) => {
            let diagnosis = doctor::examine(&args.config.settings(&args.flags)?);
            print(&if args.json { format!("{:#}\n", diagnosis.json()) } else { diagnosis.text() })?;
            match diagnosis.failed() {
                0 => Ok(()),
                1 => Err(Failure::Failed(anyhow!("one check fails"))),
                failed => Err(Failure::Failed(anyhow!("{failed} checks fail"))),
            }
        }
        Command::Backup(args) => back_up(&args),
        Command::Chat(args) => {
            let token = args.public.tokens()?.one(&args.user).map_err(Failure::Failed)?;
            let mut client = bowline_client::Config::with_token(&args.public.url()?, &token);
            client.trust = args.public.trust()?;
            client.settings.device_id = args.device;
            client.settings.device_class = Some("desktop".into());
            let ChatArgs { user, to, conversation, room, .. } = args;
            chat::run(chat::Options { user, to, conversation, room, client }).map_err(Failure::Failed)
        }
        Command::Bench(args) => run_bench(args),
        Command::BenchWorker => bench::run_as_process().map_err(Failure::Failed),
        Command::Check(args) => run_check(args),
        Command::Config { command } => run_config(command),
    }
}

fn back_up(args: &BackupArgs) -> Result<(), Failure> {
    let (config, _) = args.config.settings(&ServeFlags::default())?.config()?;
    let began = std::time::Instant::now();
    sqlite::backup(&config.node.data, &args.to).map_err(|error| match error {
        BackupError::Missing { .. } | BackupError::Exists { .. } => Failure::Usage(error.into()),
        BackupError::Open { .. } | BackupError::Failed { .. } | BackupError::Sync { .. } => {
            Failure::Failed(error.into())
        }
    })?;
    let bytes = std::fs::metadata(&args.to).map_or(0, |file| file.len());
    print(&format!("{}: {bytes} bytes in {} ms\n", args.to.display(), began.elapsed().as_millis()))
}

fn run_bench(args: BenchArgs) -> Result<(), Failure> {
    let report = match args.simulate {
        Some(_) if args.scenario != bench::Scenario::Storm => {
            let error = anyhow!("--simulate is for bench storm; the other scenarios need a server");
            return Err(Failure::Usage(error));
        }
        Some(clients) => {
            let away_ms = args.away.map_or(0, |away| away.as_millis() as u64);
            let simulation =
                bench::Simulation { clients, accept_rate: args.accept_rate, away_ms, seed: args.seed };
            simulation.run().report(&simulation)
        }
        None => {
            let duration = args.duration.unwrap_or(match args.scenario {
                bench::Scenario::Storm => Duration::from_secs(600),
                _ => Duration::from_secs(10),
            });
            bench::run(&bench::Options {
                scenario: args.scenario,
                url: args.public.url()?,
                ca: args.public.ca.clone(),
                connections: args.connections,
                duration,
                rate: args.rate.filter(|rate| *rate != 0.0),
                in_flight: args.in_flight,
                publishers: args.publishers,
                stalled: args.stalled,
                body_bytes: args.body_bytes,
                server_pid: args.server_pid,
                processes: args.processes,
                tokens: args.public.tokens()?,
                quiet: args.json || !std::io::stderr().is_terminal(),
            })?
        }
    };
    print(&if args.json { format!("{:#}\n", report.json()) } else { report.table() })?;
    match report.failure() {
        Some(why) => Err(Failure::Failed(anyhow!("{why}"))),
        None => Ok(()),
    }
}

fn run_check(args: CheckArgs) -> Result<(), Failure> {
    let (at, tokens) = args.at()?;
    let trust = args.trust()?;
    let seed = match args.seed {
        Some(seed) => seed,
        // Short enough to be typed again.
        None => u64::from(u32::from_le_bytes(
            random().map_err(Failure::Failed)?[..4].try_into().expect("4 of 16 bytes"),
        )),
    };
    let report = check::run(check::Options {
        at,
        duration: args.duration,
        users: args.users as usize,
        rate: args.rate,
        seed,
        tokens: std::sync::Arc::new(tokens),
        trust,
        history: args.history,
        quiet: args.json || !std::io::stderr().is_terminal(),
    })
    .map_err(Failure::Failed)?;
    print(&if args.json { format!("{:#}\n", report.json()) } else { report.human() })?;
    if report.is_clean() { Ok(()) } else { Err(Failure::Failed(anyhow!(report.broken()))) }
}

fn run_config(command: ConfigCommand) -> Result<(), Failure> {
    match command {
        ConfigCommand::Print { config, flags, json } => {
            let settings = config.settings(&flags)?;
            print(&if json { format!("{:#}\n", text::print_json(&settings)) } else { text::print(&settings) })
        }
        ConfigCommand::Check { config, flags } => {
            let (_, notes) = config.settings(&flags)?.config()?;
            let notes: String = notes.iter().map(|note: &Note| format!("note: {note}\n")).collect();
            print(&format!("{notes}the configuration is valid\n"))
        }
        ConfigCommand::Example => print(&text::example()),
        ConfigCommand::Reference => print(&text::reference()),
        ConfigCommand::Errors => print(&errors::reference()),
        ConfigCommand::Metrics => {
            let table =
                metrics::reference().context("the metrics cannot be written").map_err(Failure::Failed)?;
            print(&table)
        }
    }
}

fn print_token(args: TokenArgs) -> Result<(), Failure> {
    let usage = |error: bowline_protocol::ids::Error| Failure::Usage(error.into());
    let user = bowline_protocol::UserId::parse(&args.user).map_err(usage)?;
    let device = args.device.as_deref().map(bowline_protocol::DeviceId::parse).transpose().map_err(usage)?;
    let (config, _) = args.config.settings(&ServeFlags::default())?.config()?;
    let signer = token::Signer::for_config(&config)?;
    let token = signer.sign(&user, device.as_ref(), args.ttl).map_err(Failure::Failed)?;
    print(&format!("{token}\n"))
}

/// Results go to standard output; a reader that has gone away is no failure worth a panic.
fn print(text: &str) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())
        .and_then(|()| out.flush())
        .context("the result cannot be written to standard output")
        .map_err(Failure::Failed)
}

impl ConfigArgs {
    fn settings(&self, flags: &ServeFlags) -> Result<Settings, config::Error> {
        let rows = [
            ("--data", "node.data", &self.data),
            ("--role", "node.roles", &flags.role),
            ("--listen", "gateway.listen", &flags.listen),
            ("--tcp", "gateway.tcp_listen", &flags.tcp),
            ("--api", "api.listen", &flags.api),
            ("--node-id", "node.id", &flags.node_id),
        ];
        Sources {
            file: self.config.clone(),
            environment: std::env::vars_os().collect(),
            flags: rows
                .into_iter()
                .filter_map(|(flag, key, value)| Some((flag, key, value.clone()?)))
                .collect(),
            sets: self.set.clone(),
        }
        .read()
    }
}

impl CheckArgs {
    /// Which servers, and who signs for their users.
    fn at(&self) -> Result<(check::At, Tokens), Failure> {
        for url in &self.url {
            check::address_of(url).map_err(Failure::Usage)?;
        }
        if self.url.is_empty() {
            return self.own();
        }
        let tokens = match &self.token_secret {
            Some(secret) => {
                let set = [self.config.set.clone(), vec![format!("auth.secret={secret}")]].concat();
                signed(&ConfigArgs { set, ..self.config.clone() })?
            }
            None => {
                let first_ws = self.url.iter().find(|url| url.starts_with("ws"));
                tokens(first_ws.or(self.url.first()), self.ca.clone(), &self.config)?
            }
        };
        let ledger = self.api_url.as_ref().map(|url| -> Result<_, Failure> {
            let url = format!("{}/metrics", url.trim_end_matches('/'));
            Ok(check::LedgerSource { url, key: api_key(self.api_key.as_ref(), &self.config)? })
        });
        let ledger = ledger.transpose()?;
        Ok((check::At::Urls { urls: self.url.clone(), ledger }, tokens))
    }

    /// Whose certificates are taken for good; `None` where nobody shows one.
    fn trust(&self) -> Result<Option<Trust>, Failure> {
        let is_secure = |url: &String| check::address_of(url).is_ok_and(|address| address.is_secure);
        if !self.url.iter().any(is_secure) {
            return Ok(None);
        }
        let trust = self.ca.as_deref().map_or_else(Trust::system, Trust::file);
        trust.map(Some).map_err(|error| Failure::Usage(error.into()))
    }

    /// A server of its own, with what the command line says about it.
    fn own(&self) -> Result<(check::At, Tokens), Failure> {
        let data = self.config.data.as_ref().map(PathBuf::from);
        if let Some(path) =
            data.as_deref().filter(|path| path.read_dir().is_ok_and(|mut all| all.next().is_some()))
        {
            return Err(Failure::Usage(anyhow!(
                "--data {}: the server of the run starts with nothing, and this folder is not empty; name another one, or \
                 check a running server with --url",
                path.display()
            )));
        }
        let secret = random_text().and_then(|one| Ok(one + &random_text()?)).map_err(Failure::Failed)?;
        let api_key = random_text().map_err(Failure::Failed)?;
        let mut arguments = Vec::new();
        if let Some(file) = &self.config.config {
            arguments.extend(["--config".to_owned(), file.display().to_string()]);
        }
        for set in &self.config.set {
            arguments.extend(["--set".to_owned(), set.clone()]);
        }
        let set = [self.config.set.clone(), vec![format!("auth.secret={secret}")]].concat();
        let tokens = signed(&ConfigArgs { set, ..self.config.clone() })?;
        let own = check::OwnServer { arguments, secret, api_key, data };
        Ok((check::At::Own(Box::new(own)), tokens))
    }
}

/// Makes tokens for users: those of a demo server, or signed ones.
fn tokens(url: Option<&String>, ca: Option<PathBuf>, config: &ConfigArgs) -> Result<Tokens, Failure> {
    let (settings, _) = config.settings(&ServeFlags::default())?.config()?;
    // A server that is only named by its address may give demo tokens; its secret is not known here.
    let is_only_named = url.is_some() && config.data.is_none() && !settings.auth.has_key();
    if let (true, Some(url)) = (is_only_named, url.cloned()) {
        let demo = Tokens::Demo { url, ca };
        if demo.one("bowline").is_ok() {
            return Ok(demo);
        }
    }
    signed(config)
}

fn signed(config: &ConfigArgs) -> Result<Tokens, Failure> {
    let (config, _) = config.settings(&ServeFlags::default())?.config()?;
    Ok(Tokens::Signed(token::Signer::for_config(&config)?))
}

impl PublicArgs {
    fn url(&self) -> Result<String, Failure> {
        match &self.url {
            Some(url) => Ok(url.clone()),
            None => {
                let (config, _) = self.config.settings(&ServeFlags::default())?.config()?;
                let scheme = if config.gateway.tls_cert.is_some() { "wss" } else { "ws" };
                Ok(format!("{scheme}://{}{}", config.gateway.listen, config.gateway.ws_path))
            }
        }
    }

    /// Whose certificates are taken for good; `None`: those that the system trusts.
    fn trust(&self) -> Result<Option<Trust>, Failure> {
        self.ca.as_deref().map(Trust::file).transpose().map_err(|error| Failure::Usage(error.into()))
    }

    /// Makes tokens for users: the one that was given, or signed ones.
    fn tokens(&self) -> Result<Tokens, Failure> {
        if let Some(token) = self.token.clone() {
            return Ok(Tokens::Given(token));
        }
        tokens(self.url.as_ref(), self.ca.clone(), &self.config)
    }
}

impl ApiArgs {
    /// What is not said on the command line comes from the configuration and the data directory, so that nothing
    /// need be said on the machine of the server.
    fn target(&self) -> Result<admin::Target, Failure> {
        let url = match &self.api_url {
            Some(url) => url.clone(),
            None => {
                format!("http://{}", self.config.settings(&ServeFlags::default())?.config()?.0.api.listen)
            }
        };
        let key = api_key(self.api_key.as_ref(), &self.config)?;
        admin::Target::parse(&url, key).map_err(Failure::Usage)
    }
}

/// The key of an API: the one that was given, that of the configuration, or the one in the data directory.
fn api_key(given: Option<&String>, config: &ConfigArgs) -> Result<Option<String>, Failure> {
    if given.is_some() {
        return Ok(given.cloned());
    }
    let (config, _) = config.settings(&ServeFlags::default())?.config()?;
    Ok(config.api.key.or_else(|| DataDir::peek(&config.node.data, DataDir::API_KEY)))
}

/// `90s`, `15m`, `1h`, `7d`, `500ms`; a bare number is seconds.
fn parse_duration(text: &str) -> Result<Duration, String> {
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = text.split_at(digits);
    let scale_ms = match unit {
        "ms" => 1,
        "s" | "" => 1000,
        "m" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        _ => return Err(format!("{unit:?} is no unit of time; write 90s, 15m, 1h or 7d")),
    };
    let number: u64 =
        number.parse().map_err(|_| "write a number and a unit, such as 90s, 15m, 1h or 7d".to_owned())?;
    let ms = number.checked_mul(scale_ms).filter(|ms| *ms > 0).ok_or("the time is 0 or too long")?;
    Ok(Duration::from_millis(ms))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_units() {
        let rows = [
            ("1h", Some(3_600_000)),
            ("90s", Some(90_000)),
            ("15m", Some(900_000)),
            ("7d", Some(604_800_000)),
            ("250ms", Some(250)),
            ("30", Some(30_000)),
            ("0s", None),
            ("h", None),
            ("1 h", None),
            ("-1h", None),
            ("", None),
            ("99999999999999999999d", None),
            ("9999999999999999d", None),
        ];
        for (text, ms) in rows {
            assert_eq!(parse_duration(text).ok().map(|d| d.as_millis()), ms, "{text:?}");
        }
    }
}
