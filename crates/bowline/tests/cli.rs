//! The program from outside: what goes to standard output, what to standard error, exit codes.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::atomic::{AtomicU32, Ordering},
};

/// A directory that lives as long as the test.
struct Dir(PathBuf);

impl Dir {
    fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("bowline-cli-{}-{count}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn bowline(dir: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_bowline"));
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("BOWLINE_") {
            command.env_remove(name);
        }
    }
    command.current_dir(dir).args(arguments);
    command
}

fn run(dir: &Path, arguments: &[&str]) -> Output {
    bowline(dir, arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

#[test]
fn exit_codes_tell_usage_from_failure() {
    let dir = Dir::new();
    fs::write(dir.0.join("good.toml"), "[gateway]\nworkers = 2\n").unwrap();
    fs::write(dir.0.join("bad.toml"), "[gateway]\nworker = 2\n").unwrap();
    let rows: [(&[&str], i32, &str); 20] = [
        (&["--help"], 0, ""),
        (&["--version"], 0, ""),
        (&["config", "example"], 0, ""),
        (&["config", "check"], 0, ""),
        (&["config", "check", "--config", "good.toml"], 0, ""),
        (&["config", "check", "--config", "bad.toml"], 2, "bad.toml:2); did you mean gateway.workers?"),
        (&["config", "check", "--config", "missing.toml"], 2, "missing.toml"),
        (&["config", "check", "--set", "links.uplink=kafka"], 2, "possible: local"),
        (&["config", "check", "--listen", "0.0.0.0:1"], 2, "loopback only"),
        (&["serve", "--config", "bad.toml"], 2, "gateway.worker"),
        (&["serve", "--role", "front"], 2, "node.roles"),
        (&["serve", "--set", "gateway.drain_timeout_ms=80000"], 2, "termination_grace_ms"),
        (&["serve", "--listen", "nonsense"], 2, "gateway.listen"),
        (&["token"], 2, "--user"),
        (&["token", "--user", "a:b"], 2, "user id"),
        (&["token", "--user", "a", "--ttl", "soon"], 2, "unit of time"),
        (&["nonsense"], 2, "nonsense"),
        (&[], 2, "Usage"),
        (&["status", "--api-url", "http://127.0.0.1:1", "--api-key", "x"], 1, "no server answers"),
        (&["drain", "--api-url", "https://x", "--api-key", "x"], 2, "no TLS"),
    ];
    for (arguments, code, part) in rows {
        let output = run(&dir.0, arguments);
        let told = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {told}");
        assert!(told.contains(part), "{arguments:?}: {told:?} lacks {part:?}");
        assert_eq!(output.stdout.is_empty(), code != 0, "{arguments:?}");
    }
}

#[test]
fn a_token_is_all_that_token_prints_and_the_key_stays() {
    let dir = Dir::new();
    let claims = |output: &Output| -> (serde_json::Value, String) {
        use base64::Engine;
        assert!(output.status.success() && output.stderr.is_empty(), "{}", text(&output.stderr));
        let token = text(&output.stdout).strip_suffix('\n').unwrap().to_owned();
        let part = token.split('.').nth(1).unwrap();
        let json = base64::engine::general_purpose::URL_SAFE_NO_PAD.decode(part).unwrap();
        (serde_json::from_slice(&json).unwrap(), token)
    };
    fs::create_dir(dir.0.join("d")).unwrap();
    let (first, token) = claims(&run(
        &dir.0,
        &["token", "--user", "alice", "--device", "phone", "--ttl", "2h", "--data", "d"],
    ));
    assert_eq!((&first["sub"], &first["device_id"]), (&"alice".into(), &"phone".into()));
    let left = first["exp"].as_f64().unwrap() - first["iat"].as_f64().unwrap();
    assert!((7200.0..7201.0).contains(&left), "{left}");
    let secret = fs::read_to_string(dir.0.join("d/auth.secret")).unwrap();
    let key = jsonwebtoken::DecodingKey::from_secret(secret.trim().as_bytes());
    let rules = jsonwebtoken::Validation::new(jsonwebtoken::Algorithm::HS256);
    assert!(jsonwebtoken::decode::<serde_json::Value>(&token, &key, &rules).is_ok());
    claims(&run(&dir.0, &["token", "--user", "bob", "--data", "d"]));
    assert_eq!(fs::read_to_string(dir.0.join("d/auth.secret")).unwrap(), secret);
    let set = ["token", "--user", "bob", "--set", "auth.secret=another", "--set", "auth.audience=chat"];
    let (claims, token) = claims(&run(&dir.0, &set));
    assert_eq!(claims["aud"], "chat");
    let key = jsonwebtoken::DecodingKey::from_secret(b"another");
    let mut rules = jsonwebtoken::Validation::new(jsonwebtoken::Algorithm::HS256);
    rules.set_audience(&["chat"]);
    assert!(jsonwebtoken::decode::<serde_json::Value>(&token, &key, &rules).is_ok());
    for (set, told) in [
        (
            "auth.public_key=key.pem",
            "auth.public_key: whoever holds the private key signs them; Bowline cannot",
        ),
        ("auth.jwks_url=http://127.0.0.1:1/", "auth.jwks_url: whoever holds the private key signs them"),
        ("auth.hook_url=http://127.0.0.1:1/", "auth.hook_url: the application issues them; Bowline cannot"),
    ] {
        let output = run(&dir.0, &["token", "--user", "bob", "--set", set]);
        assert_eq!(output.status.code(), Some(2));
        assert!(text(&output.stderr).contains(told), "{}", text(&output.stderr));
    }
}

#[test]
fn print_shows_values_with_their_origin() {
    let dir = Dir::new();
    fs::write(dir.0.join("b.toml"), "[auth]\nsecret = \"do-not-show\"\n[gateway]\nworkers = 3\n").unwrap();
    let output = bowline(&dir.0, &["config", "print", "--config", "b.toml", "--listen", "127.0.0.1:9"])
        .env("BOWLINE_GATEWAY__PING_AFTER_MS", "100")
        .output()
        .unwrap();
    let shown = text(&output.stdout);
    for (line, origin) in [
        ("gateway.workers = 3", "b.toml:4"),
        ("gateway.ping_after_ms = 100", "environment BOWLINE_GATEWAY__PING_AFTER_MS"),
        ("gateway.listen = \"127.0.0.1:9\"", "flag --listen"),
        ("gateway.close_after_ms = 90000", "default"),
        ("auth.secret = \"<hidden>\"", "b.toml:2"),
    ] {
        let found = shown.lines().any(|shown| shown.starts_with(line) && shown.ends_with(origin));
        assert!(found, "{line} # {origin} is missing in\n{shown}");
    }
    let output = run(&dir.0, &["config", "print", "--json", "--config", "b.toml"]);
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["gateway.workers"], serde_json::json!({"value": 3, "origin": "b.toml:4"}));
    assert!(!text(&output.stdout).contains("do-not-show"));
}
