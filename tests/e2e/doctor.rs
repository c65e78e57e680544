//! `bowline doctor`: what it finds on machines that are not well, and that it disturbs nobody.

use bowline_tests::{Server, Setup, Transport, bowline, server::Ended, until};
use serde_json::Value;
use std::{net::TcpListener, path::Path};

/// Free ports, so that nothing else of this machine is found.
const FREE: [&str; 6] = ["--listen", "127.0.0.1:0", "--tcp", "127.0.0.1:0", "--api", "127.0.0.1:0"];

fn doctor(data: &Path, more: &[&str]) -> (Ended, Value) {
    let data = data.to_str().expect("a path of text");
    let mut all = vec!["doctor", "--json", "--data", data];
    all.extend(more);
    let ended = bowline(&all);
    let found = serde_json::from_str(&ended.stdout).unwrap_or(Value::Null);
    (ended, found)
}

fn finding<'a>(found: &'a Value, check: &str) -> &'a Value {
    let all = found["findings"].as_array().unwrap_or_else(|| panic!("no findings in {found:#}"));
    all.iter().find(|one| one["check"] == check).unwrap_or_else(|| panic!("no {check} in {found:#}"))
}

/// The state of a check, and that whatever is wrong comes with advice.
fn state<'a>(found: &'a Value, check: &str) -> &'a str {
    let finding = finding(found, check);
    let state = finding["state"].as_str().expect("a state");
    assert_eq!(finding["advice"].is_null(), state == "ok", "{finding:#}");
    state
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a temporary directory")
}

#[test]
fn an_empty_machine_is_fit() {
    let folder = folder();
    let data = folder.path().join("not-there-yet");
    let (ended, found) = doctor(&data, &FREE);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    for check in ["configuration", "data directory", "database", "gateway.listen", "time of a drain"] {
        assert_eq!(state(&found, check), "ok", "{found:#}");
    }
    for check in ["open files", "memory", "clock", "ephemeral ports", "disk", "TCP options"] {
        assert_ne!(state(&found, check), "fail", "{found:#}");
    }
    assert!(!data.exists(), "it makes nothing");
    let mut all = vec!["doctor", "--data", data.to_str().expect("a path of text")];
    all.extend(FREE);
    let text = bowline(&all).stdout;
    assert!(text.lines().any(|line| line.starts_with("OK") && line.contains("configuration")), "{text}");
}

#[test]
fn a_running_server_is_recognised_and_not_disturbed() {
    let mut server = Server::start();
    let mut alice = server.connect(Transport::Ws, "alice");
    alice.tell("bob", 1);
    let addresses = server.addresses();
    let [ws, tcp, api] = [addresses.ws, addresses.tcp, addresses.api].map(|one| one.to_string());
    let arguments = ["--listen", &ws, "--tcp", &tcp, "--api", &api];
    let (ended, found) = doctor(server.data_dir(), &arguments);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    for check in ["gateway.listen", "gateway.tcp_listen", "api.listen"] {
        assert_eq!(state(&found, check), "ok");
        assert!(
            finding(&found, check)["found"].as_str().is_some_and(|text| text.contains("held by the server"))
        );
    }
    let directory = finding(&found, "data directory")["found"].to_string();
    assert!(directory.contains("held by the server"), "{directory}");
    assert_eq!(state(&found, "database"), "ok", "it is of the version that this program knows");
    assert_eq!(alice.tell("bob", 2).seq(), 2);

    // What a killed server left behind is not touched either.
    server.kill();
    let log = server.data_dir().join("bowline.db-wal");
    let before = std::fs::read(&log).expect("the log is there");
    let (ended, found) = doctor(server.data_dir(), &arguments);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let directory = finding(&found, "data directory")["found"].to_string();
    assert!(directory.contains("no server"), "{directory}");
    assert_eq!(std::fs::read(&log).expect("the log is there"), before);
    server.restart();
    let mut bob = server.connect(Transport::Tcp, "bob");
    bob.expect("sync.notice");
}

#[test]
fn a_port_of_somebody_else_fails_and_names_the_holder() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = taken.local_addr().expect("it is bound").to_string();
    for (flag, check) in
        [("--listen", "gateway.listen"), ("--tcp", "gateway.tcp_listen"), ("--api", "api.listen")]
    {
        let mut arguments = FREE.to_vec();
        let at = arguments.iter().position(|one| *one == flag).expect("the flag") + 1;
        arguments[at] = &address;
        let (ended, found) = doctor(folder().path(), &arguments);
        assert_eq!(ended.code, Some(1), "{ended:?}");
        assert_eq!((state(&found, check), found["state"].as_str()), ("fail", Some("fail")));
        let holder = format!("process {}", std::process::id());
        assert!(finding(&found, check)["found"].to_string().contains(&holder), "{found:#}");
    }
}

#[test]
fn settings_that_do_not_fit_each_other_or_the_machine_fail() {
    for (set, check) in [
        ("gateway.drain_timeout_ms=85000", "time of a drain"),
        ("gateway.drain_timeout_ms=85000", "configuration"),
        ("gateway.max_connections=100000000", "open files"),
        ("gateway.listen=0.0.0.0:0", "configuration"),
        ("gateway.listen=192.0.2.1:8080", "gateway.listen"),
        ("gateway.tls.cert=/no/such/cert.pem", "TLS"),
    ] {
        let mut arguments = vec!["--set", set];
        // Flags override --set only where they name the same key.
        arguments.extend(if set.contains("listen") { &FREE[2..] } else { &FREE[..] });
        let (ended, found) = doctor(folder().path(), &arguments);
        assert_eq!(ended.code, Some(1), "{set}: {ended:?}");
        assert_eq!(state(&found, check), "fail", "{set}: {found:#}");
        assert!(ended.stderr.contains("fail"), "{ended:?}");
    }
}

#[test]
fn tls_files_are_read_and_judged() {
    let folder = folder();
    let cert = folder.path().join("cert.pem");
    std::fs::write(&cert, "-----BEGIN NOTHING-----\n-----END NOTHING-----\n").expect("a file can be written");
    let text = cert.to_str().expect("a path of text");
    let (cert_set, key_set) = (format!("gateway.tls.cert={text}"), format!("gateway.tls.key={text}"));
    let mut arguments = vec!["--set", &cert_set, "--set", &key_set];
    arguments.extend(FREE);
    let (ended, found) = doctor(folder.path(), &arguments);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert_eq!(state(&found, "TLS"), "fail", "{found:#}");
    assert!(finding(&found, "TLS")["found"].to_string().contains("no certificate"), "{found:#}");
}

#[test]
fn a_damaged_and_a_newer_database_fail() {
    let mut server = Server::start();
    let folder = server.data_dir().to_owned();
    let kept = server.setup();
    server.signal("TERM");
    assert_eq!(server.wait_end(bowline_tests::PATIENCE).code(), Some(0));
    let file = folder.join("bowline.db");
    let good = std::fs::read(&file).expect("the database can be read");
    let mut newer = good.clone();
    // The version of the tables, `user_version`, is at byte 60 of the header.
    newer[60..64].copy_from_slice(&99_u32.to_be_bytes());
    let mut damaged = good.clone();
    damaged.iter_mut().skip(16).for_each(|byte| *byte = 0x5a);
    for (bytes, part) in [(newer, "version 99"), (damaged, "damaged")] {
        std::fs::write(&file, bytes).expect("a file can be written");
        let (ended, found) = doctor(&folder, &FREE);
        assert_eq!(ended.code, Some(1), "{ended:?}");
        assert_eq!(state(&found, "database"), "fail");
        assert!(finding(&found, "database")["found"].to_string().contains(part), "{found:#}");
    }
    std::fs::write(&file, good).expect("a file can be written");
    assert_eq!(doctor(&folder, &FREE).0.code, Some(0));
    drop(kept);
}

#[test]
fn a_directory_that_others_may_read_is_a_warning() {
    use std::os::unix::fs::PermissionsExt;
    let folder = folder();
    let data = folder.path().join("open");
    std::fs::create_dir(&data).expect("a directory can be made");
    std::fs::set_permissions(&data, std::fs::Permissions::from_mode(0o755)).expect("it is one's own");
    let (ended, found) = doctor(&data, &FREE);
    assert_eq!(ended.code, Some(0), "a warning is no failure: {ended:?}");
    assert_eq!(state(&found, "permissions"), "warn");
    assert!(finding(&found, "permissions")["advice"].to_string().contains("chmod 700"));
}

#[test]
fn a_configuration_that_cannot_be_read_is_exit_code_2() {
    let folder = folder();
    let file = folder.path().join("bowline.toml");
    std::fs::write(&file, "[gateway\n").expect("a file can be written");
    let text = file.to_str().expect("a path of text");
    for arguments in [
        &["doctor", "--config", text][..],
        &["doctor", "--config", "/no/such/file.toml"],
        &["doctor", "--set", "gateway.ping_aftr_ms=5"],
        &["doctor", "--set", "gateway.ping_after_ms=soon"],
    ] {
        let ended = bowline(arguments);
        assert_eq!(ended.code, Some(2), "{arguments:?}: {ended:?}");
        assert!(!ended.stderr.is_empty() && ended.stdout.is_empty(), "{ended:?}");
    }
}

#[test]
fn the_limit_of_the_running_server_counts() {
    let server = Setup::new().start();
    let (_, found) = doctor(server.data_dir(), &FREE);
    let files = finding(&found, "open files")["found"].to_string();
    let limits = until("the server's limits can be read", || {
        let holder = std::fs::read_to_string(server.data_dir().join("lock")).ok()?;
        std::fs::read_to_string(format!("/proc/{}/limits", holder.trim())).ok()
    });
    let line = limits.lines().find(|line| line.starts_with("Max open files")).expect("the limit of files");
    let hard = line.split_whitespace().nth(4).expect("the hard limit");
    assert!(files.contains(hard), "{files} {line}");
}
