//! The command line: configuration, exit codes and what they say.

use bowline_tests::{Server, Setup, Transport, bowline, http, server::Ended, token};
use serde_json::json;
use std::net::TcpListener;

/// Exit code 2, and a text that names `what`.
fn refuses(ended: &Ended, what: &[&str]) {
    assert_eq!(ended.code, Some(2), "{ended:?}");
    for what in what {
        assert!(ended.stderr.contains(what), "{what:?} is not in {:?}", ended.stderr);
    }
    assert!(!ended.stderr.contains("panicked"), "{ended:?}");
    assert!(!ended.stderr.lines().any(|line| line.trim() == "ready"), "{ended:?}");
}

#[test]
fn a_taken_port_is_exit_code_2_and_named() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = taken.local_addr().expect("it is bound").to_string();
    refuses(&Setup::new().listen_ws(&address).start_in_vain(), &[&address]);
    refuses(&Setup::new().listen_tcp(&address).start_in_vain(), &[&address]);
    refuses(&Setup::new().listen_api(&address).start_in_vain(), &[&address]);
}

#[test]
fn an_unknown_key_is_exit_code_2_and_the_nearest_is_named() {
    let setup = Setup::new().set("gateway.ping_aftr_ms", 5);
    refuses(&setup.start_in_vain(), &["gateway.ping_aftr_ms", "gateway.ping_after_ms"]);
    let setup = Setup::new().environment("BOWLINE_GATEWAY__PING_AFTR_MS", "5");
    refuses(&setup.start_in_vain(), &["ping_after_ms"]);
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = folder.path().join("bowline.toml");
    std::fs::write(&file, "[gateway]\nping_aftr_ms = 5\n").expect("a file can be written");
    let file = file.to_str().expect("a path of text");
    let setup = Setup::new().argument("--config").argument(file);
    refuses(&setup.start_in_vain(), &["ping_aftr_ms", "ping_after_ms"]);
}

#[test]
fn a_bad_value_is_exit_code_2_and_names_the_key() {
    for (key, value) in [
        ("gateway.ping_after_ms", "soon"),
        ("gateway.same_device", "sometimes"),
        ("gateway.max_frame_bytes", "-1"),
        ("store.kind", "paper"),
    ] {
        refuses(&Setup::new().set(key, value).start_in_vain(), &[key]);
    }
    let missing = Setup::new().argument("--config").argument("/no/such/file.toml");
    refuses(&missing.start_in_vain(), &["/no/such/file.toml"]);
}

#[test]
fn a_path_that_http_has_is_no_path_for_a_websocket() {
    for path in ["/", "/v1/place", "/v1/messages", "/demo/token", "/demo/demo.js"] {
        refuses(
            &Setup::new().set("gateway.ws_path", path).start_in_vain(),
            &["gateway.ws_path", path, "/ws"],
        );
        let echo = Setup::new().set("gateway.echo_path", path);
        refuses(&echo.start_in_vain(), &["gateway.echo_path", path]);
    }
}

#[test]
fn a_slip_in_the_name_of_the_data_directory_makes_none() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let slip = folder.path().join("bowlin-data");
    let slip = slip.to_str().expect("a path of text");
    let asked = [
        vec!["token", "--user", "alice"],
        vec!["chat", "--user", "alice", "--to", "bob"],
        vec!["bench", "idle", "--url", "tcp://127.0.0.1:1"],
        vec!["check", "--url", "tcp://127.0.0.1:1"],
    ];
    for mut arguments in asked {
        arguments.extend(["--data", slip]);
        refuses(&bowline(&arguments), &[slip, "bowline serve --data"]);
        assert!(!std::path::Path::new(slip).exists(), "{arguments:?}");
    }
    // One that is there has a secret from the first token on, and a server that starts later takes it.
    std::fs::create_dir(slip).expect("it is not there");
    let made = bowline(&["token", "--user", "alice", "--data", slip]);
    assert_eq!(made.code, Some(0), "{made:?}");
    let server = Setup::new().without_secret().data(std::path::Path::new(slip)).start();
    server.login("alice").token(made.stdout.trim()).connect(Transport::Tcp);
}

#[test]
fn a_drain_that_does_not_fit_the_grace_period_is_exit_code_2() {
    let setup = Setup::new().set("gateway.drain_timeout_ms", 85_000);
    refuses(&setup.start_in_vain(), &["drain_timeout_ms", "termination_grace_ms"]);
}

#[test]
fn a_locked_data_directory_is_exit_code_2_and_named() {
    let server = Server::start();
    let folder = server.data_dir().to_owned();
    let text = folder.to_str().expect("a path of text");
    refuses(&Setup::new().data(&folder).start_in_vain(), &[text]);
    // The one that holds it goes on.
    assert_eq!(server.status()["state"], "ready");
}

#[test]
fn an_unwritable_data_directory_is_exit_code_2_and_named() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = folder.path().join("file");
    std::fs::write(&file, "no directory").expect("a file can be written");
    let below = file.join("data");
    let text = file.to_str().expect("a path of text");
    refuses(&Setup::new().data(&below).start_in_vain(), &[text]);
    refuses(&Setup::new().data(&file).start_in_vain(), &[text]);
}

#[test]
fn a_corrupt_database_is_exit_code_1_and_says_what_to_do() {
    let mut server = Server::start();
    server.connect(Transport::Ws, "alice").tell("bob", "soon to be lost");
    let folder = server.data_dir().to_owned();
    let kept = server.setup();
    server.signal("TERM");
    assert_eq!(server.wait_end(bowline_tests::PATIENCE).code(), Some(0));
    let mut spoiled = 0;
    for entry in std::fs::read_dir(&folder).expect("the data directory is there") {
        let path = entry.expect("its entries can be read").path();
        let Ok(mut bytes) = std::fs::read(&path) else { continue };
        if bytes.starts_with(b"SQLite format 3\0") {
            bytes.iter_mut().skip(16).for_each(|byte| *byte = 0x5a);
            std::fs::write(&path, bytes).expect("a file can be written");
            spoiled += 1;
        }
    }
    assert!(spoiled > 0, "no database in {}", folder.display());
    let ended = kept.start_in_vain();
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stderr.contains(folder.to_str().expect("a path of text")), "it names the place: {ended:?}");
    for way_out in ["backup", ".recover"] {
        assert!(ended.stderr.contains(way_out), "it says how to recover: {ended:?}");
    }
    assert!(!ended.stderr.contains("panicked"), "{ended:?}");
}

#[test]
fn wrong_usage_is_exit_code_2() {
    for arguments in [
        &["no-such-command"][..],
        &["serve", "--no-such-flag"],
        &["serve", "--set", "without-a-value"],
        &["token"],
        &["token", "--user", "with:colon"],
        &["token", "--user", "alice", "--ttl", "never"],
    ] {
        let ended = bowline(arguments);
        assert_eq!(ended.code, Some(2), "{arguments:?}: {ended:?}");
        assert!(!ended.stderr.is_empty() && !ended.stderr.contains("panicked"), "{ended:?}");
    }
    let help = bowline(&["--help"]);
    assert_eq!(help.code, Some(0), "{help:?}");
    assert!(help.stdout.contains("serve"), "{help:?}");
}

#[test]
fn the_names_that_scripts_rely_on_are_there() {
    let api = ["--api-url", "--api-key"];
    for (command, names) in [
        (
            &["serve"][..],
            &["--config", "--data", "--role", "--listen", "--tcp", "--api", "--node-id", "--set"][..],
        ),
        (&["token"], &["--user", "--device", "--ttl", "--config", "--data"]),
        (&["chat"], &["--user", "--to", "--conversation", "--room", "--url", "--token", "--ca"]),
        (&["status"], &api),
        (&["top"], &api),
        (&["drain"], &["--reason", "--api-url", "--api-key"]),
        (
            &["bench"],
            &["idle", "pair", "fanout", "storm", "--url", "--connections", "--duration", "--json", "--ca"],
        ),
        (&["check"], &["--url", "--duration", "--users", "--rate", "--seed", "--json", "--ca"]),
        (&["config", "print"], &["--config"]),
        (&["config", "check"], &["--config"]),
        (&["config", "example"], &[]),
        (&["doctor"], &["--config"]),
    ] {
        let help = bowline(&[command, &["--help"]].concat());
        assert_eq!(help.code, Some(0), "{command:?}: {help:?}");
        let words: Vec<&str> = help.stdout.split_whitespace().map(|word| word.trim_matches(':')).collect();
        for name in names {
            assert!(words.contains(name), "{command:?} {name}: {}", help.stdout);
        }
    }
}

#[test]
fn the_defaults_that_scripts_rely_on_are_there() {
    let ended = bowline(&["config", "print", "--json"]);
    let found: serde_json::Value = serde_json::from_str(&ended.stdout).expect("JSON");
    for (key, default) in [
        ("node.data", json!("./bowline-data")),
        ("gateway.listen", json!("127.0.0.1:8080")),
        ("gateway.tcp_listen", json!("127.0.0.1:8081")),
        ("api.listen", json!("127.0.0.1:8090")),
        ("front.listen", json!("127.0.0.1:8000")),
        ("gateway.ws_path", json!("/ws")),
        ("gateway.workers", json!(0)),
        ("gateway.ping_after_ms", json!(45_000)),
        ("gateway.ping_jitter_ms", json!(5_000)),
        ("gateway.close_after_ms", json!(90_000)),
        ("gateway.backpressure_high", json!(1024)),
        ("gateway.backpressure_timeout_ms", json!(30_000)),
        ("gateway.max_frame_bytes", json!(32_768)),
        ("gateway.max_connections", json!(0)),
        ("gateway.connections_per_address", json!(0)),
        ("gateway.handshakes_per_second", json!(0)),
        ("gateway.outbound_limit_bytes", json!(1_048_576)),
        ("gateway.socket_unsent_bytes", json!(131_072)),
        ("gateway.drain_timeout_ms", json!(45_000)),
        ("gateway.migrate_spread_ms", json!(10_000)),
        ("gateway.pre_stop_ms", json!(10_000)),
        ("gateway.termination_grace_ms", json!(90_000)),
        ("gateway.allowed_origins", json!([])),
        ("gateway.tls.cert", json!(null)),
        ("gateway.compression", json!(false)),
        ("gateway.echo_path", json!(null)),
        ("gateway.frames_per_second", json!(0)),
        ("gateway.same_device", json!("replace")),
        ("auth.sessions", json!("revocation")),
        ("coordination.kind", json!("memory")),
        ("coordination.offline_grace_ms", json!(15_000)),
        ("links.uplink", json!("local")),
        ("links.downlink", json!("local")),
        ("store.kind", json!("sqlite")),
        ("store.retention_ms", json!(0)),
        ("store.retention_messages", json!(0)),
        ("router.ack_timeout_ms", json!(3_000)),
        ("router.max_redeliveries", json!(3)),
        ("router.dedupe_ttl_ms", json!(86_400_000)),
        ("router.batch_max", json!(200)),
        ("router.group_members_max", json!(10_000)),
        ("hooks.push_classes", json!(["ios", "android"])),
        ("hooks.before_send_timeout_ms", json!(1_000)),
        ("hooks.before_send_on_failure", json!("refuse")),
        ("rooms.join", json!("any")),
        ("rooms.window_messages", json!(300)),
        ("rooms.window_ms", json!(300_000)),
        ("rooms.members_max", json!(100_000)),
    ] {
        assert_eq!(found[key]["value"], default, "{key}");
        assert_eq!(found[key]["origin"], "default", "{key}");
    }
}

#[test]
fn flags_override_the_environment_and_that_overrides_the_file() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = folder.path().join("bowline.toml");
    let text = "[gateway]\nping_after_ms = 1001\nclose_after_ms = 5001\nmax_frame_bytes = 4001\n";
    std::fs::write(&file, text).expect("a file can be written");
    let server = Setup::new()
        .argument("--config")
        .argument(file.to_str().expect("a path of text"))
        .environment("BOWLINE_GATEWAY__CLOSE_AFTER_MS", "5002")
        .environment("BOWLINE_GATEWAY__MAX_FRAME_BYTES", "4002")
        .set("gateway.max_frame_bytes", 4003)
        .start();
    let client = server.connect(Transport::Ws, "alice");
    let seen = ["ping_after_ms", "close_after_ms", "max_frame_bytes"].map(|name| &client.connected[name]);
    assert_eq!(seen, [&json!(1001), &json!(5002), &json!(4003)]);
}

#[test]
fn keys_that_nobody_gave_are_made_once_and_printed() {
    let mut server = Setup::new().without_key().without_secret().start();
    let opens = |server: &Server, key: &str| {
        let headers = [("x-api-key", key)];
        http::request("GET", &server.api_url("/admin/status"), &headers, None).status == 200
    };
    // Some word of a line about the key is the key.
    let printed = |server: &Server| {
        let log = server.log();
        let words = log.iter().filter(|line| line.to_ascii_lowercase().contains("key"));
        let word_list: Vec<String> = words
            .flat_map(|line| line.split(|c: char| c.is_whitespace() || "=\"'`,;()".contains(c)))
            .filter(|word| word.len() >= 16 && word.is_ascii())
            .map(String::from)
            .collect();
        word_list.into_iter().find(|word| opens(server, word)).unwrap_or_else(|| panic!("no key in {log:?}"))
    };
    let key = printed(&server);
    let data = server.data_dir().to_str().expect("a path of text").to_owned();
    let made = bowline(&["token", "--user", "alice", "--data", &data]);
    let made_token = made.stdout.trim().to_owned();
    server.login("alice").token(&*made_token).connect(Transport::Tcp);
    server.kill();
    server.restart();
    assert!(opens(&server, &key), "the key is another after a restart");
    server.login("alice").token(&*made_token).connect(Transport::Tcp);
}

#[test]
fn the_log_names_every_listener_before_it_says_ready() {
    let server = Server::start();
    let log = server.log();
    let ready = log.iter().position(|line| line.trim() == "ready").expect("it is ready");
    for address in [server.ws(), server.tcp(), server.api()] {
        let named = log.iter().position(|line| line.contains(&address.to_string()));
        assert!(named < Some(ready) && named.is_some(), "{address} in {log:?}");
    }
    let all = log.join("\n");
    assert!(!all.contains(token::SECRET) && !all.contains(token::API_KEY), "configured keys are not printed");
}

#[test]
fn without_a_configured_key_only_loopback_is_served() {
    let ended = Setup::new().without_secret().listen_ws("0.0.0.0:0").start_in_vain();
    refuses(&ended, &["auth.secret"]);
}

#[test]
fn bench_needs_only_the_address_of_a_server_that_gives_demo_tokens() {
    let server = bowline_tests::Setup::new().without_secret().start();
    let url = format!("ws://{}/ws", server.ws());
    for (scenario, counted) in [("idle", "connections"), ("pair", "acknowledged")] {
        let arguments =
            ["bench", scenario, "--url", &url, "--connections", "6", "--duration", "1s", "--json"];
        let ended = bowline_tests::bowline(&arguments);
        let report: serde_json::Value = serde_json::from_str(&ended.stdout)
            .unwrap_or_else(|error| panic!("{scenario}: {error}: {} {}", ended.stdout, ended.stderr));
        assert_eq!(report["connections"], 6.0, "{scenario}: {report}");
        assert!(report[counted].as_f64().is_some_and(|count| count >= 6.0), "{scenario}: {report}");
        assert!(
            report["server_cpu_s"].is_number() || report["server_memory_per_connection_bytes"].is_number()
        );
    }
}
