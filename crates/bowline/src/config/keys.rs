//! Every configuration key: the one place that says what a key is called, takes and means.

/// One row of the reference.
pub struct Key {
    /// Dotted; `*` stands for a name that the operator chooses.
    pub path: &'static str,
    pub kind: Kind,
    /// As TOML; `None` is a key that is not set unless somebody sets it.
    pub default: Option<&'static str>,
    /// What it means, in one or two sentences without a final full stop.
    pub meaning: &'static str,
    /// What zero, or not being set, means; empty when there is nothing to say.
    pub zero: &'static str,
    pub state: State,
}

/// What values a key takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Bool,
    /// A whole number of `unit`.
    Int {
        min: u64,
        max: u64,
        unit: &'static str,
    },
    Text,
    /// Text that is never shown.
    Secret,
    /// `host:port`.
    Address,
    /// `http://…` or `https://…`.
    Url,
    /// Begins with `/`.
    Path,
    Choice(&'static [&'static str]),
    /// Any texts.
    List,
    /// Some of these.
    Set(&'static [&'static str]),
}

/// How far this build has a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    Works,
    /// Taken and checked, without effect yet; `config check` says so.
    NoEffect,
    /// These values work (none: leave it unset); any other ends the start.
    Only(&'static [&'static str]),
}

use Kind::{Address, Bool, Choice, List, Path, Secret, Set, Text, Url};
use State::{NoEffect, Only, Works};

/// A hundred years.
const MS_MAX: u64 = 100 * 365 * 24 * 3600 * 1000;

const fn ms(min: u64) -> Kind {
    Kind::Int { min, max: MS_MAX, unit: "ms" }
}

const fn bytes(min: u64, max: u64) -> Kind {
    Kind::Int { min, max, unit: "bytes" }
}

const fn count(min: u64, max: u64) -> Kind {
    Kind::Int { min, max, unit: "" }
}

const fn percent(min: u64) -> Kind {
    Kind::Int { min, max: 100, unit: "%" }
}

const fn key(
    path: &'static str,
    kind: Kind,
    default: Option<&'static str>,
    meaning: &'static str,
    zero: &'static str,
    state: State,
) -> Key {
    Key { path, kind, default, meaning, zero, state }
}

/// The device classes of the protocol.
const CLASSES: &[&str] = &["web", "ios", "android", "desktop", "iot"];
const EVENTS: &[&str] = &["message.stored", "user.online", "user.offline", "push.needed"];
/// Nothing but leaving it unset.
const UNSET: State = Only(&[]);

/// In the order of the reference; keys of one table stand together.
#[rustfmt::skip]
pub const KEYS: &[Key] = &[
    key("node.id", Text, None, "The name of this node, 1 to 64 bytes without `:`", "not set: random at every start", Works),
    key("node.roles", Set(&["front", "gateway", "router", "api"]), Some(r#"["gateway", "router", "api"]"#), "What this process does; one process that is a whole server has these three", "", Works),
    key("node.data", Text, Some(r#""./bowline-data""#), "The directory for the database and the generated keys; made when it is missing", "", Works),
    key("node.advertise_ws", Text, None, "The WebSocket address that clients are told for this node (`GET /v1/place`): `host:port`, `ws://…` or `wss://…`", "not set: `gateway.listen`, or the address that the asker has reached where that is every address", Works),
    key("node.advertise_tcp", Text, None, "The TCP address that clients are told for this node: `host:port`, `tcp://…` or `tls://…`", "not set: as `advertise_ws`, from `gateway.tcp_listen`", Works),

    key("gateway.listen", Address, Some(r#""127.0.0.1:8080""#), "The public listener: WebSocket, HTTP and the demo page. Port 0 picks a free one. Beyond loopback only with a configured key", "", Works),
    key("gateway.tcp_listen", Address, Some(r#""127.0.0.1:8081""#), "The listener for plain TCP clients. Beyond loopback only with a configured key", "", Works),
    key("gateway.ws_path", Path, Some(r#""/ws""#), "The path of the WebSocket endpoint", "", Works),
    key("gateway.workers", count(0, 256), Some("0"), "Threads that own connections", "0: one for each core that the process may use", Works),
    key("gateway.ping_after_ms", ms(1), Some("45000"), "Silence, counted from the last byte received, after which a client is pinged", "", Works),
    key("gateway.ping_jitter_ms", ms(0), Some("5000"), "The longest random addition to `ping_after_ms`", "0: none", Works),
    key("gateway.close_after_ms", ms(1), Some("90000"), "Silence, counted from the last byte received, after which a connection is closed", "", Works),
    key("gateway.backpressure_high", count(1, 1_000_000), Some("1024"), "Frames of one connection decoded and not yet decided by the router at which its socket is read no further, until half are decided", "", Works),
    key("gateway.backpressure_timeout_ms", ms(1), Some("30000"), "How long a connection may stay paused before it is closed `backpressure-timeout`", "", Works),
    key("gateway.max_frame_bytes", bytes(256, 16_777_215), Some("32768"), "The largest frame that a client may send; a larger one closes 1009", "", Works),
    key("gateway.max_connections", count(0, 100_000_000), Some("0"), "Sessions at most, with all connections that may become one, from the moment they are accepted; further handshakes get 503", "0: what the limit of open files allows", Works),
    key("gateway.connections_per_address", count(0, 100_000_000), Some("0"), "Connections from one address at most, from the moment they are accepted; further ones get 429", "0: no limit", Works),
    key("gateway.handshakes_per_second", count(0, 10_000_000), Some("0"), "Upgrades and TCP connects taken in a second, before authentication, in bursts of one second; further ones get 429", "0: no fixed rate", Works),
    key("gateway.outbound_limit_bytes", bytes(4096, 1 << 30), Some("1048576"), "The queue of one connection beyond its socket; above it the connection closes `slow-consumer`", "", Works),
    key("gateway.socket_unsent_bytes", bytes(1024, 1 << 30), Some("131072"), "What the kernel may hold unsent for one connection", "", Works),
    key("gateway.drain_timeout_ms", ms(0), Some("45000"), "How long open connections go on after a drain has begun", "0: they close at once", Works),
    key("gateway.migrate_spread_ms", ms(0), Some("10000"), "Over how long a drain spreads the clients' reconnects", "0: all at once", Works),
    key("gateway.pre_stop_ms", ms(0), Some("10000"), "What the orchestrator waits before it sends SIGTERM. Only checked: with `drain_timeout_ms` it must stay below `termination_grace_ms`", "0: it does not wait", Works),
    key("gateway.termination_grace_ms", ms(1), Some("90000"), "After how long the orchestrator kills the process. Only checked, see `pre_stop_ms`", "", Works),
    key("gateway.allowed_origins", List, Some("[]"), "The values of `Origin` that browsers may connect from, such as `https://example.com`", "empty: all", Works),
    key("gateway.tls.cert", Text, None, "The file with the certificate chain, PEM, the server's own first. With it and its key both listeners for clients speak TLS 1.3 only; SIGHUP reads both again", "not set: no TLS", Works),
    key("gateway.tls.key", Text, None, "The file with the private key, PEM, without a passphrase", "not set: no TLS", Works),
    key("gateway.compression", Bool, Some("false"), "Whether permessage-deflate is taken when a WebSocket client offers it; without context takeover, so that a connection costs no memory for it", "", Works),
    key("gateway.echo_path", Path, None, "A WebSocket path that echoes, for conformance suites; without authentication. Takes messages of 16 MiB, and of 1 MiB when they come compressed", "not set: off", Works),
    key("gateway.frames_per_second", count(0, 1_000_000), Some("0"), "Frames taken from one connection in a second, bursts of one second; further ones are answered `rate_limited`. Every frame counts, what cannot be read too. Pings, `msg.recv` and `msg.read` count as well, and are never refused", "0: no limit", Works),
    key("gateway.same_device", Choice(&["replace", "refuse", "allow"]), Some(r#""replace""#), "What happens when a device logs in that is connected: the old connection ends, the new one is refused, or both stay", "", Works),

    key("auth.secret", Secret, None, "The secret that signs tokens, HS256", "not set, nor another key: random, kept in the data directory, loopback only", Works),
    key("auth.public_key", Text, None, "The public key of tokens (RS256, ES256 or EdDSA): PEM text, or the path of a PEM file, which SIGHUP reads again", "not set: none", Works),
    key("auth.jwks_url", Url, None, "Where the key set (JWKS) of the tokens' issuer is; fetched at start, every 5 minutes, when a token names a key that is not known, and on SIGHUP", "not set: none", Works),
    key("auth.hook_url", Url, None, "The application's own judge: of all tokens where no other key is configured, and otherwise of those that are no JSON Web Tokens", "not set: none", Works),
    key("auth.audience", Text, None, "What the claim `aud` must hold", "not set: not checked", Works),
    key("auth.issuer", Text, None, "What the claim `iss` must be", "not set: not checked", Works),
    key("auth.sessions", Choice(&["off", "revocation", "required"]), Some(r#""revocation""#), "Whether tokens are looked up in the store: not, for revocation, or each must name a session that the application has opened", "", Works),

    key("api.listen", Address, Some(r#""127.0.0.1:8090""#), "The listener of API, administration and metrics. Beyond loopback only with a configured `api.key`", "", Works),
    key("api.key", Secret, None, "The key of the API", "not set: random, kept in the data directory, printed at start", Works),

    key("coordination.kind", Choice(&["memory", "redis"]), Some(r#""memory""#), "Where nodes, routes and leases are kept", "", Only(&["memory"])),
    key("coordination.url", Text, None, "The address of Redis", "not set: none", UNSET),
    key("coordination.route_ttl_ms", ms(1), Some("90000"), "How long a route lives without being renewed", "", NoEffect),
    key("coordination.node_ttl_ms", ms(1), Some("1500"), "How long a node counts as alive without being heard of", "", NoEffect),
    key("coordination.offline_grace_ms", ms(0), Some("15000"), "How long a session is held after its connection has ended, for a client that comes back with `resume`", "0: it ends with the connection", Works),

    key("health.threshold", count(0, 100), Some("90"), "The score from which on a node gets new clients", "0: always", NoEffect),
    key("health.cpu_percent", percent(1), Some("80"), "Use of the processor above which a node loses score", "", NoEffect),
    key("health.memory_percent", percent(1), Some("85"), "Use of memory above which a node loses score", "", NoEffect),
    key("health.redis_p90_ms", ms(1), Some("50"), "Round trip to Redis, 90th percentile, above which a node loses score", "", NoEffect),
    key("health.queue_depth", count(1, 100_000_000), Some("1000"), "Queued events above which new connections get 503", "", NoEffect),
    key("health.leave_below_connections", count(0, 100_000_000), Some("0"), "A node with fewer connections leaves the cluster by itself", "0: never", NoEffect),

    key("links.uplink", Choice(&["local", "grpc", "kafka"]), Some(r#""local""#), "How gateways reach the router", "", Only(&["local"])),
    key("links.downlink", Choice(&["local", "grpc", "redis", "kafka"]), Some(r#""local""#), "How the router reaches gateways", "", Only(&["local"])),
    key("links.kafka.brokers", List, Some("[]"), "The brokers to begin with", "empty: none", Only(&["[]"])),
    key("links.grpc.listen", Address, None, "The listener for other nodes", "not set: none", UNSET),
    key("links.trial_delay_ms", Kind::Int { min: 0, max: 60_000, unit: "ms" }, Some("0"), "Rehearsal of a bad network on the local link: the longest delay of a message", "0: none", Works),
    key("links.trial_not_here_permille", count(0, 1000), Some("0"), "Rehearsal of a bad network on the local link: how many of a thousand events find their connection gone", "0: none", Works),

    key("store.kind", Choice(&["sqlite", "mysql", "postgres"]), Some(r#""sqlite""#), "The database", "", Only(&["sqlite"])),
    key("store.url", Secret, None, "Where the database is; may hold a password", "not set: in the data directory", UNSET),
    key("store.retention_ms", ms(0), Some("0"), "The age at which messages are deleted; what a recipient has not received of them counts as expired", "0: never", Works),
    key("store.retention_messages", count(0, 1 << 40), Some("0"), "Messages kept of each conversation, the newest", "0: all", Works),

    key("router.ack_timeout_ms", ms(1), Some("3000"), "How long a pushed message waits for `msg.recv` before it is pushed again; doubled at each attempt", "", Works),
    key("router.max_redeliveries", count(0, 10), Some("3"), "How often a message is pushed again before it waits in the inbox", "0: never", Works),
    key("router.dedupe_ttl_ms", ms(1), Some("86400000"), "How long an id is remembered at least, also when its message is deleted", "", Works),
    key("router.batch_max", count(1, 100_000), Some("200"), "Messages in one transaction of the store at most", "", Works),
    key("router.group_members_max", count(1, 1_000_000), Some("10000"), "Members of one group at most", "", Works),
    key("router.breaker_percent", percent(1), Some("50"), "Share of failures of one gateway above which its messages go straight to the inbox", "", NoEffect),
    key("router.breaker_window_ms", ms(1), Some("30000"), "The time over which failures of a gateway are counted", "", NoEffect),

    key("hooks.url", Url, None, "Where events are sent", "not set: no events", UNSET),
    key("hooks.secret", Secret, None, "The secret that signs webhooks, `whsec_…`", "not set: generated once webhooks are used, and kept in the data directory", Works),
    key("hooks.events", Set(EVENTS), Some(r#"["message.stored", "user.online", "user.offline", "push.needed"]"#), "Which events are sent", "empty: none", NoEffect),
    key("hooks.push_classes", Set(CLASSES), Some(r#"["ios", "android"]"#), "The device classes for which `push.needed` is sent", "empty: none", NoEffect),
    key("hooks.before_send_url", Url, None, "Who is asked before a message is stored", "not set: nobody", UNSET),
    key("hooks.before_send_timeout_ms", ms(1), Some("1000"), "How long that answer is waited for", "", NoEffect),
    key("hooks.before_send_on_failure", Choice(&["refuse", "allow"]), Some(r#""refuse""#), "What happens to the message when there is no answer", "", NoEffect),
    key("hooks.room_join_url", Url, None, "Who is asked before a user joins a room, with `rooms.join = \"hook\"`", "not set: nobody", Works),

    key("rooms.join", Choice(&["any", "claim", "hook"]), Some(r#""any""#), "Who may join a room: any authenticated user, the token's claim `rooms`, or the application (`hooks.room_join_url`)", "", Works),
    key("rooms.window_messages", count(1, 1_000_000), Some("300"), "Recent messages that a room keeps; each is at most `gateway.max_frame_bytes` long", "", Works),
    key("rooms.window_ms", ms(1), Some("300000"), "How long a room keeps a message", "", Works),
    key("rooms.members_max", count(1, 10_000_000), Some("100000"), "Members of one room at most; one more is refused as `overloaded`", "", Works),

    key("agents.*.url", Url, None, "The user `@<name>` is answered by this OpenAI-compatible service", "not set: no such agent", UNSET),
    key("agents.*.model", Text, None, "The model to ask for", "not set: the service's own choice", UNSET),
    key("agents.*.key_env", Text, None, "The environment variable that holds the key of the service", "not set: no key", UNSET),
    key("agents.*.system", Text, None, "What the model is told first", "not set: nothing", UNSET),
    key("agents.*.context_messages", count(0, 10_000), None, "Earlier messages of the conversation that are sent along", "0: none", UNSET),
    key("agents.*.timeout_ms", ms(1), None, "How long the service may be silent", "", UNSET),

    key("front.listen", Address, Some(r#""127.0.0.1:8000""#), "The listener of the front", "", NoEffect),
    key("front.tcp_listen", Address, Some(r#""127.0.0.1:8001""#), "The listener of the front for plain TCP clients", "", NoEffect),
    key("front.tls.cert", Text, None, "The file with the certificate chain, PEM", "not set: no TLS", NoEffect),
    key("front.tls.key", Text, None, "The file with the private key, PEM", "not set: no TLS", NoEffect),
    key("front.http_upstreams", List, Some("[]"), "Where requests go that are for no gateway", "empty: nowhere", NoEffect),
    key("front.trusted_proxies", List, Some("[]"), "Addresses (`10.0.0.0/8`) whose forwarding headers count", "empty: nobody's", NoEffect),
    key("front.virtual_nodes", count(1, 100_000), Some("1024"), "Places of each node on the ring", "", NoEffect),

    key("log.level", Text, Some(r#""info""#), "`error`, `warn`, `info`, `debug`, `trace` or `off`, also by module: `info,bowline_gateway=debug`", "", Works),
    key("log.format", Choice(&["human", "json"]), Some(r#""human""#), "How log lines look on standard error", "", Works),
];

/// The key that a path belongs to.
pub fn find(path: &str) -> Option<&'static Key> {
    KEYS.iter().find(|key| key.is(path))
}

impl Key {
    /// Whether this row describes `path`.
    pub fn is(&self, path: &str) -> bool {
        match self.path.split_once(".*.") {
            None => self.path == path,
            Some((table, field)) => path
                .strip_prefix(table)
                .and_then(|rest| rest.strip_prefix('.'))
                .and_then(|rest| rest.strip_suffix(field))
                .and_then(|rest| rest.strip_suffix('.'))
                .is_some_and(|name| !name.is_empty() && !name.contains('.')),
        }
    }

    pub fn is_secret(&self) -> bool {
        self.kind == Secret
    }
}

impl Kind {
    /// What a key of this kind takes, as the end of "takes …".
    pub fn takes(self) -> String {
        let quoted = |all: &[&str]| all.iter().map(|one| format!("{one:?}")).collect::<Vec<_>>().join(", ");
        match self {
            Self::Bool => "true or false".into(),
            Self::Int { min, max, unit } => {
                let unit = if unit.is_empty() { String::new() } else { format!(" {unit}") };
                format!("a whole number from {min} to {max}{unit}")
            }
            Self::Text | Self::Secret => "a text".into(),
            Self::Address => "an address with a port, such as \"127.0.0.1:8080\"".into(),
            Self::Url => "an address that begins with http:// or https://".into(),
            Self::Path => "a path that begins with \"/\"".into(),
            Self::Choice(all) => format!("one of {}", quoted(all)),
            Self::List => "a list of texts".into(),
            Self::Set(all) => format!("a list of {}", quoted(all)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_unique_and_wildcards_match_one_name() {
        for (index, key) in KEYS.iter().enumerate() {
            assert!(KEYS[..index].iter().all(|other| other.path != key.path), "{} stands twice", key.path);
        }
        let rows = [
            ("agents.helper.url", true),
            ("agents.helper.key_env", true),
            ("agents.url", false),
            ("agents..url", false),
            ("agents.a.b.url", false),
            ("agents.helper.colour", false),
            ("gateway.ping_after_ms", true),
            ("gateway.ping", false),
        ];
        for (path, known) in rows {
            assert_eq!(find(path).is_some(), known, "{path}");
        }
    }
}
