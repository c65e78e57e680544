//! `bowline bench`: every scenario against the real server, with a few dozen connections.

use bowline_tests::{Certificates, Server, Setup, bowline, server::Ended, token, until};
use serde_json::Value;
use std::sync::Arc;

/// Runs a bench with the secret of the tests, to its JSON.
fn bench(url: &str, arguments: &[&str]) -> Value {
    let ended = try_bench(url, arguments);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    serde_json::from_str(&ended.stdout).unwrap_or_else(|error| panic!("{arguments:?}: {error}: {ended:?}"))
}

fn try_bench(url: &str, arguments: &[&str]) -> Ended {
    let secret = format!("auth.secret={}", token::SECRET);
    let mut all = vec!["bench"];
    all.extend(arguments);
    all.extend(["--url", url, "--set", &secret, "--json"]);
    bowline(&all)
}

fn number(report: &Value, name: &str) -> f64 {
    report[name].as_f64().unwrap_or_else(|| panic!("no number {name} in {report:#}"))
}

fn urls(server: &Server) -> [String; 2] {
    [format!("ws://{}/ws", server.ws()), format!("tcp://{}", server.tcp())]
}

#[test]
fn idle_opens_holds_and_counts_on_both_transports() {
    let server = Server::start();
    for url in urls(&server) {
        let report = bench(&url, &["idle", "--connections", "40", "--duration", "300ms"]);
        assert_eq!(number(&report, "connections"), 40.0);
        for name in ["failed", "lost_while_held"] {
            assert_eq!(number(&report, name), 0.0, "{name}");
        }
        let (least, most) = (number(&report, "connect_p50_ms"), number(&report, "connect_max_ms"));
        assert!(least > 0.0 && least <= most, "{report:#}");
        assert!(number(&report, "connections_opened_per_s") > 0.0);
        number(&report, "server_memory_per_connection_bytes");
    }
}

#[test]
fn several_processes_share_the_connections_and_add_up() {
    let server = Server::start();
    let [ws, _] = urls(&server);
    let report = bench(&ws, &["idle", "--connections", "41", "--processes", "3", "--duration", "300ms"]);
    assert_eq!(number(&report, "connections"), 41.0);
    assert!(
        ["connections", "failed", "lost_while_held"].iter().all(|name| report[name].is_u64()),
        "{report:#}"
    );
    let report =
        bench(&ws, &["pair", "--connections", "30", "--processes", "2", "--duration", "1s", "--rate", "100"]);
    assert_eq!(number(&report, "connections"), 30.0);
    assert_eq!(number(&report, "acknowledged"), 100.0);
    assert_eq!(number(&report, "delivered"), 100.0);
}

#[test]
fn pair_counts_what_is_due_in_the_measured_time() {
    let server = Server::start();
    for url in urls(&server) {
        let report = bench(&url, &["pair", "--connections", "20", "--duration", "2s", "--rate", "100"]);
        assert_eq!(number(&report, "acknowledged"), 200.0, "{report:#}");
        assert_eq!(number(&report, "delivered"), 200.0, "{report:#}");
        for name in ["refused", "out_of_order", "unanswered", "lost"] {
            assert_eq!(number(&report, name), 0.0, "{name}: {report:#}");
        }
        let ack: Vec<f64> = ["p50", "p90", "p99", "max"]
            .iter()
            .map(|q| number(&report, &format!("send_to_ack_{q}_ms")))
            .collect();
        assert!(ack[0] > 0.0 && ack.is_sorted(), "{report:#}");
        assert!(number(&report, "server_cpu_s") >= 0.0);
        assert!(number(&report, "server_written_per_message_bytes") > 0.0, "{report:#}");
    }
    let metrics = until("every push is acknowledged", || {
        Some(server.metrics()).filter(|metrics| metrics.get("bowline_ledger_waiting") == 0.0)
    });
    metrics.assert_ledger_balances();
}

#[test]
fn pair_without_a_rate_is_a_closed_loop() {
    let server = Server::start();
    let [ws, _] = urls(&server);
    let report = bench(&ws, &["pair", "--connections", "10", "--duration", "1s", "--in-flight", "4"]);
    let acknowledged = number(&report, "acknowledged");
    assert!(acknowledged > 40.0, "{report:#}");
    assert!(number(&report, "delivered") >= acknowledged - 40.0, "{report:#}");
}

/// Twenty members of a room, one of which stops reading.
fn one_of_twenty_stalls(url: &str) -> Value {
    let report = bench(
        url,
        &[
            "fanout",
            "--connections",
            "20",
            "--stalled",
            "1",
            "--rate",
            "100",
            "--body-bytes",
            "8192",
            "--duration",
            "2s",
        ],
    );
    assert_eq!((number(&report, "connections"), number(&report, "published")), (20.0, 200.0), "{report:#}");
    for name in ["missing", "gaps", "reordered", "slow_consumers", "lost", "refused", "stalled_missing"] {
        assert_eq!(number(&report, name), 0.0, "{name}: {report:#}");
    }
    for name in ["stalled", "stalled_closed", "stalled_slow_consumer"] {
        assert_eq!(number(&report, name), 1.0, "{name}: {report:#}");
    }
    report
}

const SMALL_QUEUES: [(&str, &str); 2] =
    [("gateway.outbound_limit_bytes", "65536"), ("gateway.socket_unsent_bytes", "16384")];

#[test]
fn a_member_that_stops_reading_is_closed_and_misses_nothing_and_the_others_notice_nothing() {
    let server = Server::with(&[&SMALL_QUEUES[..], &[("rooms.window_messages", "100000")]].concat());
    for url in urls(&server) {
        let report = one_of_twenty_stalls(&url);
        assert_eq!(number(&report, "stalled_recovered"), 1.0, "{report:#}");
    }
}

#[test]
fn a_member_that_stopped_reading_for_longer_than_the_window_is_told_so() {
    let server = Server::with(&[&SMALL_QUEUES[..], &[("rooms.window_messages", "10")]].concat());
    for url in urls(&server) {
        let report = one_of_twenty_stalls(&url);
        assert_eq!(number(&report, "stalled_recovered"), 0.0, "{report:#}");
    }
}

#[test]
fn a_storm_of_two_hundred_comes_back_in_the_first_second() {
    let server = Server::start();
    for url in urls(&server) {
        let report = bench(&url, &["storm", "--connections", "200", "--duration", "60s"]);
        assert_eq!(number(&report, "back"), 200.0, "{report:#}");
        for name in ["not_back", "failures", "refused_429", "refused_503", "refused_other", "probe_lost"] {
            assert_eq!(number(&report, name), 0.0, "{name}: {report:#}");
        }
        assert_eq!(number(&report, "attempts"), 200.0, "{report:#}");
        assert!(number(&report, "all_back_s") < 10.0, "{report:#}");
        let (p50, p99) = (number(&report, "return_p50_ms"), number(&report, "return_p99_ms"));
        // Spread over the first second, by the client library's rule.
        assert!(p50 > 200.0 && p99 > p50, "{report:#}");
        assert!(number(&report, "ping_storm_p99_ms") > 0.0, "{report:#}");
        let peak = number(&report, "peak_accepted_per_s");
        assert!((20.0..=200.0).contains(&peak), "{report:#}");
    }
}

#[test]
fn a_storm_comes_back_at_the_rate_that_the_server_allows() {
    let _turn = bowline_tests::turn();
    let server = Server::with(&[("gateway.handshakes_per_second", "60")]);
    for url in urls(&server) {
        let report = bench(&url, &["storm", "--connections", "160", "--duration", "5m"]);
        assert_eq!(number(&report, "back"), 160.0, "{report:#}");
        let refused = number(&report, "refused_429") + number(&report, "refused_other");
        assert!(refused > 0.0, "{report:#}");
        assert_eq!(number(&report, "attempts"), 160.0 + refused, "{report:#}");
        // A burst of one second and what is due in one.
        assert!(number(&report, "peak_accepted_per_s") <= 122.0, "{report:#}");
        assert!(number(&report, "all_back_s") > 1.0, "{report:#}");
        assert_eq!(number(&report, "probe_lost"), 0.0, "who is connected notices nothing: {report:#}");
    }
}

#[test]
fn a_simulated_storm_keeps_the_limit_and_brings_everybody_back() {
    let arguments =
        ["bench", "storm", "--simulate", "20000", "--accept-rate", "1000", "--away", "2s", "--json"];
    let ended = bowline(&arguments);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let report: Value = serde_json::from_str(&ended.stdout).expect("JSON");
    assert_eq!(number(&report, "back"), 20_000.0);
    assert!(number(&report, "peak_accepted_per_s") <= 2_000.0, "{report:#}");
    assert!(number(&report, "all_back_s") > 19.0, "{report:#}");
    assert_eq!(bowline(&arguments).stdout, ended.stdout, "the same seed, the same storm");
}

#[test]
fn what_is_wrong_is_one_line_that_says_what_to_do() {
    let server = Server::start();
    let [ws, tcp] = urls(&server);
    let certificates = Certificates::new();
    let ca = certificates.ca().to_string_lossy().into_owned();
    let nobody = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        format!("ws://{}/ws", listener.local_addr().expect("it is bound"))
    };
    let secret = format!("auth.secret={}", token::SECRET);
    let other = "auth.secret=another-secret-that-is-long-enough-for-all";
    let with = |set: &str, url: &str, more: &[&str]| {
        let mut all = vec!["bench", "idle", "--url", url, "--set", set];
        all.extend(more);
        bowline(&all)
    };
    for (ended, code, part) in [
        (with(&secret, &nobody, &[]), 1, "is it running"),
        (with(other, &ws, &[]), 1, "--token"),
        (with(other, &tcp, &[]), 1, "--token"),
        (with(&secret, &ws.replace("/ws", "/wrong"), &[]), 1, "404"),
        (with(&secret, &ws.replace("ws://", "wss://"), &["--ca", &ca]), 1, "TLS"),
        (with(&secret, "tls://127.0.0.1:1", &["--ca", "/no/such/ca.pem"]), 2, "/no/such/ca.pem"),
        (with(&secret, "http://127.0.0.1:1", &[]), 2, "wss://"),
        (with(&secret, &ws, &["--connections", "1"]), 2, "--connections"),
        (with(&secret, &ws, &["--connections", "2000000000"]), 2, "ulimit"),
        (with(&secret, &ws, &["--publishers", "0"]), 2, "--publishers"),
        (with(&secret, &ws, &["--stalled", "1"]), 2, "bench fanout"),
        (with(&secret, &ws, &["--server-pid", "4194999"]), 2, "--server-pid"),
        // Nobody is asked for that.
        (with(&secret, &nobody, &["--connections", "0"]), 2, "--connections"),
        (with(&secret, &nobody, &["--publishers", "0"]), 2, "--publishers"),
        (with(&secret, &nobody, &["--stalled", "600"]), 2, "bench fanout"),
    ] {
        assert_eq!(ended.code, Some(code), "{ended:?}");
        let line = ended.stderr.lines().find(|line| line.contains(part));
        assert!(line.is_some() && ended.stderr.lines().count() <= 2, "{part:?} is not in {ended:?}");
    }
    let none = bowline(&["bench", "storm", "--simulate", "0"]);
    assert!(none.code == Some(2) && none.stderr.contains("--simulate"), "{none:?}");
    let shared = bowline(&["bench", "pair", "--url", &ws, "--token", &token::of("alice")]);
    assert_eq!(shared.code, Some(2), "{shared:?}");
    assert!(shared.stderr.contains("--token names one"), "{shared:?}");
}

#[test]
fn every_scenario_speaks_tls() {
    let certificates = Arc::new(Certificates::new());
    let server = Setup::new().tls(&certificates).start();
    let ca = certificates.ca().to_string_lossy().into_owned();
    let port = |address: std::net::SocketAddr| address.port();
    let ws = format!("wss://localhost:{}/ws", port(server.listeners().ws));
    let tcp = format!("tls://127.0.0.1:{}", port(server.listeners().tcp));
    for url in [ws, tcp] {
        let bench = |arguments: &[&str]| bench(&url, &[arguments, &["--ca", &ca]].concat());
        let report = bench(&["idle", "--connections", "41", "--processes", "2", "--duration", "300ms"]);
        assert_eq!((number(&report, "connections"), number(&report, "failed")), (41.0, 0.0), "{report:#}");
        assert_eq!(number(&report, "lost_while_held"), 0.0, "{report:#}");
        let report = bench(&["pair", "--connections", "20", "--duration", "1s", "--rate", "100"]);
        assert_eq!(number(&report, "delivered"), 100.0, "{report:#}");
        // Bodies of more than a record, so that sockets are full and records come in parts.
        let room = ["fanout", "--connections", "20", "--in-flight", "8", "--body-bytes", "30000"];
        let report = bench(&[&room[..], &["--duration", "1s"]].concat());
        assert!(number(&report, "deliveries") >= 20.0, "{report:#}");
        for name in ["missing", "gaps", "reordered", "lost", "refused"] {
            assert_eq!(number(&report, name), 0.0, "{name}: {report:#}");
        }
        let report = bench(&["storm", "--connections", "50", "--duration", "60s"]);
        assert_eq!((number(&report, "back"), number(&report, "failures")), (50.0, 0.0), "{report:#}");
        assert_eq!(number(&report, "probe_lost"), 0.0, "{report:#}");
    }
    let metrics = server.metrics();
    let handshakes = |outcome| {
        metrics
            .find_with("bowline_gateway_tls_handshakes_total", &format!("outcome=\"{outcome}\""))
            .unwrap_or(0.0)
    };
    // 41, 20, 20 and twice 50 connections, each with its own, and one probe for each run.
    assert_eq!((handshakes("done"), handshakes("failed")), (2.0 * (181.0 + 4.0), 0.0));
}

#[test]
fn one_token_opens_many_devices() {
    let server = Setup::new().start();
    let url = format!("ws://{}/ws", server.ws());
    let token = token::of("alice");
    let ended = bowline(&[
        "bench",
        "idle",
        "--url",
        &url,
        "--token",
        &token,
        "--connections",
        "10",
        "--duration",
        "300ms",
        "--json",
    ]);
    let report: Value = serde_json::from_str(&ended.stdout).unwrap_or_else(|_| panic!("{ended:?}"));
    assert_eq!((number(&report, "connections"), number(&report, "lost_while_held")), (10.0, 0.0));
}

#[test]
fn a_bench_that_measures_nothing_fails() {
    // Whoever sends is closed for it.
    let server = Setup::new().start();
    let [ws, _] = urls(&server);
    let pair = ["pair", "--connections", "2", "--duration", "200ms", "--body-bytes", "40000"];
    let ended = try_bench(&ws, &pair);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    let report: Value = serde_json::from_str(&ended.stdout).unwrap_or_else(|_| panic!("{ended:?}"));
    assert_eq!(number(&report, "acknowledged"), 0.0, "{report:#}");
    assert!(ended.stderr.contains("no message was acknowledged"), "{ended:?}");

    let room = ["fanout", "--connections", "4", "--duration", "200ms", "--body-bytes", "40000"];
    let ended = try_bench(&ws, &room);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stderr.contains("no message was "), "{ended:?}");

    // The server goes in the middle of it.
    for scenario in ["pair", "fanout", "idle"] {
        let server = Setup::new().start();
        let [ws, _] = urls(&server);
        let ended = std::thread::scope(|scope| {
            let bench = scope.spawn(|| try_bench(&ws, &[scenario, "--connections", "4", "--duration", "5s"]));
            until("it is under way", || (server.status()["connections"].as_u64() >= Some(4)).then_some(()));
            // The warm-up goes by, and some of the measured time.
            std::thread::sleep(std::time::Duration::from_secs(3));
            server.signal("KILL");
            bench.join().expect("the bench runs")
        });
        assert_eq!(ended.code, Some(1), "{scenario}: {ended:?}");
        assert!(ended.stderr.contains("every connection was lost"), "{scenario}: {ended:?}");
    }

    // The probe gets in, and nobody else.
    let server = Setup::new().set("gateway.max_connections", 1).start();
    for url in urls(&server) {
        let ended = try_bench(&url, &["idle", "--connections", "5", "--duration", "10s"]);
        assert_eq!(ended.code, Some(1), "{ended:?}");
        let report: Value = serde_json::from_str(&ended.stdout).unwrap_or_else(|_| panic!("{ended:?}"));
        assert_eq!((number(&report, "connections"), number(&report, "failed")), (0.0, 5.0), "{report:#}");
        assert!(ended.stderr.contains("no connection could be opened"), "{ended:?}");
    }
}
