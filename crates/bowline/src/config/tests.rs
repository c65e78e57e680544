use super::*;
use std::{fs, sync::atomic::AtomicU32};

/// A TOML file that lives as long as the test.
struct File(PathBuf);

impl File {
    fn new(text: &str) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("bowline-config-{}-{count}.toml", std::process::id()));
        fs::write(&path, text).unwrap();
        Self(path)
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

fn read(
    toml: Option<&str>,
    environment: &[(&str, &str)],
    flags: &[(&'static str, &'static str, &str)],
    sets: &[&str],
) -> Result<Settings, Error> {
    let file = toml.map(File::new);
    Sources {
        file: file.as_ref().map(|file| file.0.clone()),
        environment: environment.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect(),
        flags: flags.iter().map(|(flag, key, value)| (*flag, *key, (*value).to_owned())).collect(),
        sets: sets.iter().map(|set| (*set).to_owned()).collect(),
    }
    .read()
}

#[test]
fn the_defaults_are_those_of_the_reference_and_are_valid() {
    let (config, notes) = read(None, &[], &[], &[]).unwrap().config().unwrap();
    assert_eq!(config.gateway.listen.to_string(), "127.0.0.1:8080");
    assert_eq!((config.gateway.ping_after_ms, config.gateway.close_after_ms), (45000, 90000));
    assert_eq!((config.router.ack_timeout_ms, config.router.batch_max), (3000, 200));
    assert_eq!((config.retention.age_ms_max, config.retention.ids_ms_min), (0, 86_400_000));
    assert!(!config.auth.has_key() && config.node.has_api);
    assert_eq!(notes, []);
}

#[test]
fn later_layers_win_and_each_value_remembers_its_origin() {
    let toml = "[gateway]\nping_after_ms = 1\nclose_after_ms = 2\nlisten = \"127.0.0.1:1\"\nworkers = 1\n";
    let environment = [
        ("BOWLINE_GATEWAY__CLOSE_AFTER_MS", "3"),
        ("BOWLINE_GATEWAY__LISTEN", "127.0.0.1:2"),
        ("BOWLINE_GATEWAY__WORKERS", "2"),
    ];
    let flags = [("--listen", "gateway.listen", "127.0.0.1:3")];
    let settings = read(Some(toml), &environment, &flags, &["gateway.workers=4"]).unwrap();
    let rows = [
        ("gateway.ping_jitter_ms", Value::Int(5000), "default"),
        ("gateway.ping_after_ms", Value::Int(1), ":2"),
        ("gateway.close_after_ms", Value::Int(3), "environment BOWLINE_GATEWAY__CLOSE_AFTER_MS"),
        ("gateway.listen", Value::Text("127.0.0.1:3".into()), "flag --listen"),
        ("gateway.workers", Value::Int(4), "flag --set"),
    ];
    for (path, value, origin) in rows {
        let setting = settings.setting(path).unwrap();
        assert_eq!(setting.value, value, "{path}");
        assert!(setting.origin.to_string().ends_with(origin), "{path}: {}", setting.origin);
    }
}

#[test]
fn lists_come_as_toml_or_with_commas_and_an_empty_text_takes_back() {
    let environment = [("BOWLINE_GATEWAY__ALLOWED_ORIGINS", "https://a.example, https://b.example")];
    let (config, _) = read(None, &environment, &[], &[]).unwrap().config().unwrap();
    assert_eq!(config.gateway.allowed_origins, ["https://a.example", "https://b.example"]);
    let sets = [r#"gateway.allowed_origins=["https://c.example"]"#, "auth.secret="];
    let (config, _) = read(Some("auth.secret = \"x\""), &environment, &[], &sets).unwrap().config().unwrap();
    assert_eq!(config.gateway.allowed_origins, ["https://c.example"]);
    assert!(!config.auth.has_key());
}

#[test]
fn every_fault_names_the_key_where_it_stands_and_what_to_do() {
    type Row<'a> = (&'a str, &'a [(&'a str, &'a str)], &'a [&'a str], &'a [&'a str]);
    let rows: &[Row<'_>] = &[
        // TOML, environment, --set, parts of the message
        ("[gateway]\nping_afte_ms = 1", &[], &[], &["gateway.ping_afte_ms", ":2", "gateway.ping_after_ms?"]),
        ("[gatway]\nlisten = \"x\"", &[], &[], &["gatway.listen", "did you mean gateway.listen?"]),
        ("nonsense = 1", &[], &[], &["there is no key nonsense", ":1", "config example"]),
        ("[gateway]\nworkers = \"four\"", &[], &[], &["gateway.workers = \"four\"", ":2", "0 to 256"]),
        ("gateway.workers = -1", &[], &[], &["gateway.workers = -1", "0 to 256"]),
        ("gateway.workers = 1.5", &[], &[], &["1.5", "a whole number"]),
        ("gateway.listen = \"8080\"", &[], &[], &["gateway.listen", "an address with a port"]),
        ("gateway.compression = 1", &[], &[], &["true or false"]),
        ("gateway = 1", &[], &[], &["there is no key gateway"]),
        ("auth.secret = 12345", &[], &[], &["auth.secret = <hidden>"]),
        ("[gateway", &[], &[], &["the configuration file", "line 1"]),
        ("", &[("BOWLINE_GATEWAY__PING", "1")], &[], &["gateway.ping", "BOWLINE_GATEWAY__PING"]),
        ("", &[("BOWLINE_GATEWAY_WORKERS", "1")], &[], &["did you mean BOWLINE_GATEWAY__WORKERS?"]),
        ("", &[], &["gateway.same_device=both"], &["both", "--set", "\"replace\", \"refuse\", \"allow\""]),
        ("", &[], &["gateway.workers"], &["KEY=VALUE"]),
        ("", &[], &["gateway.ws_path=ws"], &["begins with \"/\""]),
        ("", &[], &["node.roles=router,queen"], &["a list of \"front\""]),
        ("", &[], &["node.roles=front"], &["node.roles", "does not have that", "gateway and router"]),
        ("", &[], &["node.id=a:b"], &["node.id", "1 to 64 bytes"]),
        ("", &[], &["coordination.kind=redis"], &["coordination.kind = \"redis\"", "possible: memory"]),
        ("", &[], &["links.uplink=kafka"], &["links.uplink = \"kafka\"", "possible: local"]),
        ("", &[], &["gateway.tls.cert=/x.pem"], &["gateway.tls.key", "takes both"]),
        ("", &[], &["gateway.tls.key=/x.pem"], &["gateway.tls.cert", "takes both"]),
        ("", &[], &["auth.jwks_url=ftp://x"], &["auth.jwks_url = ftp://x", "http:// or https://"]),
        ("", &[], &["node.advertise_ws=example.com"], &["node.advertise_ws", "host:port, ws://host:port"]),
        ("", &[], &["node.advertise_ws=http://x:1"], &["node.advertise_ws", "wss://host:port"]),
        ("", &[], &["node.advertise_tcp=x:0"], &["node.advertise_tcp", "tcp://host:port"]),
        ("", &[], &["agents.helper.url=http://x"], &["agents.helper.url", "leave it unset"]),
        ("", &[], &["hooks.url=http://x"], &["hooks.url", "leave it unset"]),
        ("", &[], &["rooms.join=hook"], &["rooms.join", "hooks.room_join_url"]),
        ("", &[], &["gateway.listen=0.0.0.0:8080"], &["loopback only", "auth.secret"]),
        ("", &[], &["gateway.tcp_listen=[::]:1"], &["gateway.tcp_listen", "loopback only"]),
        ("auth.secret = \"x\"", &[], &["api.listen=0.0.0.0:1"], &["api.listen", "set api.key"]),
        ("", &[], &["gateway.close_after_ms=0"], &["gateway.close_after_ms"]),
        ("", &[], &["gateway.echo_path=/ws"], &["gateway.echo_path", "ws_path"]),
        ("", &[], &["gateway.drain_timeout_ms=80000"], &["10000", "80000", "90000", "must stay below"]),
    ];
    for (toml, environment, sets, parts) in rows {
        let error = match read(Some(toml), environment, &[], sets).and_then(|settings| settings.config()) {
            Ok(_) => panic!("{toml:?} {environment:?} {sets:?} was taken"),
            Err(error) => error.to_string(),
        };
        for part in *parts {
            assert!(error.contains(part), "{toml:?} {environment:?} {sets:?}: {error:?} lacks {part:?}");
        }
    }
}

#[test]
fn what_is_no_configuration_is_left_alone() {
    let environment = [
        ("BOWLINE_API_URL", "http://x"),
        ("BOWLINE_API_KEY", "x"),
        ("BOWLINE_PORT", "tcp://10.0.0.1:8080"),
        ("BOWLINE_SERVICE_HOST", "10.0.0.1"),
        ("PATH", "/bin"),
    ];
    assert!(read(None, &environment, &[], &[]).is_ok());
}

#[test]
fn values_without_effect_are_noted() {
    let sets = ["front.virtual_nodes=7", "auth.secret=short"];
    let (_, notes) = read(None, &[], &[], &sets).unwrap().config().unwrap();
    let text: Vec<String> = notes.iter().map(Note::to_string).collect();
    assert!(text[0].starts_with("front.virtual_nodes has no effect"), "{text:?}");
    assert!(text[1].contains("5 bytes"), "{text:?}");
}

#[test]
fn every_kind_of_key_opens_the_listeners() {
    let rows = [
        ("auth.secret=0123456789abcdef0123456789abcdef", vec![]),
        ("auth.public_key=key.pem", vec!["auth.public_key"]),
        ("auth.jwks_url=https://issuer.example/keys", vec!["auth.jwks_url"]),
        ("auth.hook_url=http://127.0.0.1:1/auth", vec!["auth.hook_url"]),
    ];
    for (key, judges) in rows {
        let sets = [key, "api.key=k", "api.listen=0.0.0.0:0", "gateway.listen=[::]:0"];
        let (config, _) = read(None, &[], &[], &sets).unwrap().config().unwrap();
        assert!(config.auth.has_key(), "{key}");
        assert_eq!(config.auth.judges(), judges, "{key}");
    }
}

#[test]
fn advertised_addresses_become_urls() {
    let sets =
        ["gateway.ws_path=/socket", "node.advertise_ws=a.example:80", "node.advertise_tcp=a.example:81"];
    let (config, _) = read(None, &[], &[], &sets).unwrap().config().unwrap();
    assert_eq!(config.node.advertise_ws.as_deref(), Some("ws://a.example:80/socket"));
    assert_eq!(config.node.advertise_tcp.as_deref(), Some("tcp://a.example:81"));
    let tls = ["gateway.tls.cert=a.pem", "gateway.tls.key=b.pem"];
    let (config, _) = read(None, &[], &[], &[&sets[..], &tls].concat()).unwrap().config().unwrap();
    assert_eq!(config.node.advertise_ws.as_deref(), Some("wss://a.example:80/socket"));
    assert_eq!(config.node.advertise_tcp.as_deref(), Some("tls://a.example:81"));
    let sets = ["node.advertise_ws=wss://a.example/ws"];
    let (config, _) = read(None, &[], &[], &sets).unwrap().config().unwrap();
    assert_eq!(config.node.advertise_ws.as_deref(), Some("wss://a.example/ws"));
}
