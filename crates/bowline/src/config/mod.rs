//! Configuration: defaults, then a TOML file, the environment, flags and `--set`; what comes later wins.
//!
//! [`keys`] is the reference, [`layers`] reads, [`text`] shows. Nothing is guessed and nothing is passed over: an
//! unknown key, a value out of range, or a choice that this build does not have ends the start.

mod check;
pub mod keys;
mod layers;
pub mod text;

pub use check::Note;
pub use layers::Sources;

use bowline_auth::SessionMode;
use keys::Key;
use std::{collections::BTreeMap, fmt, net::SocketAddr, path::PathBuf};

/// Where a value comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    Default,
    File { path: PathBuf, line: usize },
    Environment(String),
    Flag(&'static str),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File { path, line } => write!(f, "{}:{line}", path.display()),
            Self::Environment(name) => write!(f, "environment {name}"),
            Self::Flag(name) => write!(f, "flag {name}"),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    Bool(bool),
    Int(u64),
    Text(String),
    List(Vec<String>),
}

/// As TOML.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bool(value) => write!(f, "{value}"),
            Self::Int(value) => write!(f, "{value}"),
            Self::Text(text) => write!(f, "{}", toml::Value::from(text.as_str())),
            Self::List(items) => write!(f, "{}", toml::Value::from(items.clone())),
        }
    }
}

/// A value and where it comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setting {
    pub value: Value,
    pub origin: Origin,
}

/// Every key that has a value.
#[derive(Debug, Clone)]
pub struct Settings {
    values: BTreeMap<String, Setting>,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the configuration file {} cannot be read: {error}", path.display())]
    File { path: PathBuf, error: std::io::Error },
    #[error("the configuration file {}: {message}", path.display())]
    Syntax { path: PathBuf, message: String },
    #[error("there is no key {key} ({origin}){}", did_you_mean(nearest.as_deref()))]
    Unknown { key: String, origin: Origin, nearest: Option<String> },
    #[error("{key} = {value} ({origin}): {key} takes {takes}")]
    Value { key: String, value: String, origin: Origin, takes: String },
    #[error("--set {text:?}: write --set KEY=VALUE, such as --set gateway.workers=2")]
    Set { text: String },
    #[error("the environment variable {name} holds no text; use UTF-8")]
    Environment { name: String },
    #[error("{key} = {value} ({origin}): this build does not have that; {possible}")]
    Unbuilt { key: String, value: String, origin: Origin, possible: String },
    #[error(
        "{key} = {value} ({origin}): without a configured key Bowline listens on loopback only; set {needed}, or \
         listen on 127.0.0.1"
    )]
    Exposed { key: &'static str, value: String, origin: Origin, needed: &'static str },
    #[error("{key} = {value} ({origin}): the address cannot be resolved: {error}")]
    Address { key: &'static str, value: String, origin: Origin, error: std::io::Error },
    /// Values that do not go together, or not with this machine.
    #[error(transparent)]
    Gateway(#[from] bowline_gateway::Error),
}

fn did_you_mean(nearest: Option<&str>) -> String {
    match nearest {
        Some(key) => format!("; did you mean {key}?"),
        None => "; `bowline config example` lists them all".into(),
    }
}

/// What the program is built from. Durations are milliseconds.
#[derive(Debug, Clone)]
pub struct Config {
    pub node: Node,
    pub gateway: bowline_gateway::Config,
    pub auth: Auth,
    pub api: Api,
    pub hooks: Hooks,
    pub links: Links,
    pub retention: bowline_router::Retention,
    pub router: Router,
    pub log: Log,
}

#[derive(Debug, Clone)]
pub struct Node {
    /// `None`: random.
    pub id: Option<String>,
    /// What clients are told, as URLs; `None`: where this node listens.
    pub advertise_ws: Option<String>,
    pub advertise_tcp: Option<String>,
    /// Whether the API's listener is opened; gateway and router always are.
    pub has_api: bool,
    pub data: PathBuf,
}

#[derive(Debug, Clone)]
pub struct Auth {
    pub secret: Option<String>,
    pub public_key: Option<String>,
    pub jwks_url: Option<String>,
    pub hook_url: Option<String>,
    pub audience: Option<String>,
    pub issuer: Option<String>,
    pub sessions: SessionMode,
}

impl Auth {
    /// Whether anybody has said who may sign tokens.
    pub fn has_key(&self) -> bool {
        self.secret.is_some() || !self.judges().is_empty()
    }

    /// The configured keys that tell good tokens and cannot sign any.
    pub fn judges(&self) -> Vec<&'static str> {
        let rows = [
            ("auth.public_key", &self.public_key),
            ("auth.jwks_url", &self.jwks_url),
            ("auth.hook_url", &self.hook_url),
        ];
        rows.into_iter().filter(|(_, value)| value.is_some()).map(|(key, _)| key).collect()
    }
}

#[derive(Debug, Clone)]
pub struct Api {
    pub listen: SocketAddr,
    pub key: Option<String>,
}

#[derive(Debug, Clone)]
pub struct Hooks {
    pub secret: Option<String>,
    pub room_join_url: Option<String>,
}

#[derive(Debug, Clone, Copy)]
pub struct Links {
    pub trial_delay_ms: u64,
    pub trial_not_here_permille: u32,
}

#[derive(Debug, Clone, Copy)]
pub struct Router {
    pub ack_timeout_ms: u64,
    pub max_redeliveries: u32,
    pub batch_max: usize,
    pub group_members_max: usize,
    pub offline_grace_ms: u64,
}

#[derive(Debug, Clone)]
pub struct Log {
    pub level: String,
    pub is_json: bool,
}

impl Settings {
    /// Every key with its value, in the order of the reference.
    pub fn all(&self) -> Vec<(&'static Key, String, Option<&Setting>)> {
        let mut all = Vec::new();
        for key in keys::KEYS {
            let mut found: Vec<_> = self.values.iter().filter(|(path, _)| key.is(path)).collect();
            found.sort_by_key(|(path, _)| path.as_str());
            if found.is_empty() && !key.path.contains('*') {
                all.push((key, key.path.to_owned(), None));
            }
            all.extend(found.into_iter().map(|(path, setting)| (key, path.clone(), Some(setting))));
        }
        all
    }

    fn setting(&self, path: &str) -> Option<&Setting> {
        debug_assert!(keys::find(path).is_some(), "{path} is not in the table");
        self.values.get(path)
    }

    pub fn text(&self, path: &str) -> Option<&str> {
        match self.setting(path) {
            Some(Setting { value: Value::Text(text), .. }) => Some(text),
            _ => None,
        }
    }

    fn owned(&self, path: &str) -> Option<String> {
        self.text(path).map(str::to_owned)
    }

    fn bool(&self, path: &str) -> bool {
        matches!(self.setting(path), Some(Setting { value: Value::Bool(true), .. }))
    }

    pub fn list(&self, path: &str) -> &[String] {
        match self.setting(path) {
            Some(Setting { value: Value::List(items), .. }) => items,
            _ => &[],
        }
    }

    pub fn int<T: TryFrom<u64>>(&self, path: &str) -> T {
        let value = match self.setting(path) {
            Some(Setting { value: Value::Int(value), .. }) => *value,
            _ => 0,
        };
        T::try_from(value).ok().expect("the table bounds every number to what its field holds")
    }

    pub fn address(&self, key: &'static str) -> Result<SocketAddr, Error> {
        use std::net::ToSocketAddrs;
        let text = self.text(key).unwrap_or_default();
        let fail = |error| Error::Address {
            key,
            value: format!("{text:?}"),
            origin: self.setting(key).map_or(Origin::Default, |setting| setting.origin.clone()),
            error,
        };
        let mut found = text.to_socket_addrs().map_err(fail)?;
        found.next().ok_or_else(|| fail(std::io::Error::other("the name has no address")))
    }

    /// What the program is built from, once everything is checked.
    pub fn config(&self) -> Result<(Config, Vec<Note>), Error> {
        use bowline_gateway::{RoomJoin, RoomLimits};
        use bowline_protocol::link::SameDevice;
        let (ws_scheme, tcp_scheme) = match self.text("gateway.tls.cert") {
            Some(_) => ("wss", "tls"),
            None => ("ws", "tcp"),
        };
        let config = Config {
            node: Node {
                id: self.owned("node.id"),
                advertise_ws: self.text("node.advertise_ws").map(|text| {
                    check::with_scheme(text, ws_scheme, self.text("gateway.ws_path").unwrap_or_default())
                }),
                advertise_tcp: self
                    .text("node.advertise_tcp")
                    .map(|text| check::with_scheme(text, tcp_scheme, "")),
                has_api: self.list("node.roles").iter().any(|role| role == "api"),
                data: PathBuf::from(self.text("node.data").unwrap_or_default()),
            },
            gateway: bowline_gateway::Config {
                listen: self.address("gateway.listen")?,
                tcp_listen: Some(self.address("gateway.tcp_listen")?),
                ws_path: self.owned("gateway.ws_path").unwrap_or_default(),
                workers: self.int("gateway.workers"),
                ping_after_ms: self.int("gateway.ping_after_ms"),
                ping_jitter_ms: self.int("gateway.ping_jitter_ms"),
                close_after_ms: self.int("gateway.close_after_ms"),
                backpressure_high: self.int("gateway.backpressure_high"),
                backpressure_timeout_ms: self.int("gateway.backpressure_timeout_ms"),
                max_frame_bytes: self.int("gateway.max_frame_bytes"),
                max_connections: self.int("gateway.max_connections"),
                connections_per_address: self.int("gateway.connections_per_address"),
                handshakes_per_second: self.int("gateway.handshakes_per_second"),
                outbound_limit_bytes: self.int("gateway.outbound_limit_bytes"),
                socket_unsent_bytes: self.int("gateway.socket_unsent_bytes"),
                drain_timeout_ms: self.int("gateway.drain_timeout_ms"),
                migrate_spread_ms: self.int("gateway.migrate_spread_ms"),
                pre_stop_ms: self.int("gateway.pre_stop_ms"),
                termination_grace_ms: self.int("gateway.termination_grace_ms"),
                allowed_origins: self.list("gateway.allowed_origins").to_vec(),
                echo_path: self.owned("gateway.echo_path"),
                frames_per_second: self.int("gateway.frames_per_second"),
                compression: self.bool("gateway.compression"),
                tls_cert: self.owned("gateway.tls.cert").map(PathBuf::from),
                tls_key: self.owned("gateway.tls.key").map(PathBuf::from),
                same_device: match self.text("gateway.same_device") {
                    Some("refuse") => SameDevice::Refuse,
                    Some("allow") => SameDevice::Allow,
                    _ => SameDevice::Replace,
                },
                room_join: match self.text("rooms.join") {
                    Some("claim") => RoomJoin::Claim,
                    Some("hook") => RoomJoin::Hook,
                    _ => RoomJoin::Any,
                },
                rooms: RoomLimits {
                    window_messages: self.int("rooms.window_messages"),
                    window_ms: self.int("rooms.window_ms"),
                    members_max: self.int("rooms.members_max"),
                },
            },
            auth: Auth {
                secret: self.owned("auth.secret"),
                public_key: self.owned("auth.public_key"),
                jwks_url: self.owned("auth.jwks_url"),
                hook_url: self.owned("auth.hook_url"),
                audience: self.owned("auth.audience"),
                issuer: self.owned("auth.issuer"),
                sessions: match self.text("auth.sessions") {
                    Some("off") => SessionMode::Off,
                    Some("required") => SessionMode::Required,
                    _ => SessionMode::Revocation,
                },
            },
            api: Api { listen: self.address("api.listen")?, key: self.owned("api.key") },
            hooks: Hooks {
                secret: self.owned("hooks.secret"),
                room_join_url: self.owned("hooks.room_join_url"),
            },
            links: Links {
                trial_delay_ms: self.int("links.trial_delay_ms"),
                trial_not_here_permille: self.int("links.trial_not_here_permille"),
            },
            retention: bowline_router::Retention {
                age_ms_max: self.int("store.retention_ms"),
                messages_max: self.int("store.retention_messages"),
                ids_ms_min: self.int("router.dedupe_ttl_ms"),
            },
            router: Router {
                ack_timeout_ms: self.int("router.ack_timeout_ms"),
                max_redeliveries: self.int("router.max_redeliveries"),
                batch_max: self.int("router.batch_max"),
                group_members_max: self.int("router.group_members_max"),
                offline_grace_ms: self.int("coordination.offline_grace_ms"),
            },
            log: Log {
                level: self.owned("log.level").unwrap_or_default(),
                is_json: self.text("log.format") == Some("json"),
            },
        };
        let notes = check::check(self, &config)?;
        Ok((config, notes))
    }
}

#[cfg(test)]
mod tests;
