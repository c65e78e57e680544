//! `bowline check`: a good server is found good under kills, and each way to be wrong is found and named.

use bowline_tests::{
    Certificates, Server, Setup,
    disk::{self, Fault},
    proxy::{Proxy, Wrong},
    server::{Ended, bowline_within},
    token,
};
use serde_json::Value;
use std::{sync::Arc, time::Duration};

/// A run of some seconds and the end of it, on a machine that does other things too.
const LIMIT: Duration = Duration::from_secs(120);

fn check(arguments: &[&str], environment: &[(&str, &str)]) -> Ended {
    let is_own = !arguments.contains(&"--url");
    let trial = ["--set", "links.trial_delay_ms=20", "--set", "links.trial_not_here_permille=20"];
    let trial = if is_own && bowline_tests::server::trial() { &trial[..] } else { &[] };
    let arguments = [&["check", "--json"], arguments, trial].concat();
    bowline_within(LIMIT, &arguments, environment)
}

fn verdict(ended: &Ended) -> Value {
    serde_json::from_str(&ended.stdout).unwrap_or_else(|error| panic!("{error}: {ended:?}"))
}

/// Exit code 0 and nothing found.
fn is_clean(ended: &Ended) -> Value {
    let verdict = verdict(ended);
    assert_eq!((ended.code, &verdict["verdict"]), (Some(0), &"clean".into()), "{ended:?}");
    for count in ["lost", "doubled", "reordered", "gaps", "changed", "miscounted", "unanswered"] {
        assert_eq!(verdict[count], 0, "{verdict}");
    }
    assert_eq!(verdict["acked"], verdict["sent"], "{verdict}");
    verdict
}

/// Exit code 1, this among what was found, and a history with an explanation.
fn is_violated(ended: &Ended, found: &str) {
    let verdict = verdict(ended);
    assert_eq!((ended.code, &verdict["verdict"]), (Some(1), &"violated".into()), "{ended:?}");
    assert!(verdict[found].as_u64().is_some_and(|count| count > 0), "{found} is not found: {verdict:#}");
    assert!(ended.stderr.contains(found), "{ended:?}");
    let first = &verdict["first_violation"];
    assert!(first["text"].as_str().is_some_and(|text| text.len() > 20), "{verdict:#}");
    let history = verdict["history"].as_str().expect("the history is kept");
    let lines = std::fs::read_to_string(history).expect("the history is there");
    assert!(lines.lines().count() > 100, "{history}");
    assert!(lines.lines().all(|line| serde_json::from_str::<Value>(line).is_ok()), "{history}");
    // It has been read; a temporary folder is this test's to remove.
    if let Some(folder) = std::path::Path::new(history).parent()
        && folder.file_name().is_some_and(|name| name.to_string_lossy().starts_with("bowline-check-"))
    {
        std::fs::remove_dir_all(folder).expect("the folder can be removed");
    }
}

#[test]
fn kills_under_load_leave_nothing_to_complain_about() {
    let _turn = bowline_tests::turn();
    let folder = tempfile::tempdir().expect("a temporary directory");
    let history = folder.path().join("history.ndjson");
    let history = history.to_str().expect("a path of text");
    let ended = check(&["--duration", "10s", "--seed", "7", "--history", history], &[]);
    let verdict = is_clean(&ended);
    let number = |name: &str| verdict[name].as_f64().unwrap_or_else(|| panic!("no {name} in {verdict}"));
    // A kill every 5 s at the least, and a hundred messages a second.
    assert!(number("kills") >= 2.0, "{verdict}");
    assert!(number("sent") >= 1_000.0 && number("delivered") > number("sent"), "{verdict}");
    assert!(number("reconnects") >= number("devices") * number("kills") / 2.0, "{verdict}");
    assert!(number("seconds") >= 10.0, "{verdict}");
    assert_eq!(verdict["seed"], 7);
    let lines = std::fs::read_to_string(history).expect("the history was asked for");
    for event in ["send", "ack", "push", "notice", "recv", "killed", "ready", "ledger", "row"] {
        assert!(lines.contains(&format!("\"event\":\"{event}\"")), "no {event} in {history}");
    }
    let again = check(&["--duration", "1s", "--history", history], &[]);
    assert_eq!(again.code, Some(1), "an existing history is kept: {again:?}");
    assert!(again.stderr.contains(history), "{again:?}");
}

#[test]
fn the_verdict_is_a_line_of_standard_output() {
    let _turn = bowline_tests::turn();
    let ended = bowline_within(LIMIT, &["check", "--duration", "2s", "--users", "4", "--rate", "50"], &[]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.stdout.lines().any(|line| line == "verdict: clean"), "{ended:?}");
    assert!(ended.stderr.is_empty(), "{ended:?}");
}

#[test]
fn a_running_server_is_checked_by_its_address_alone_and_left_running() {
    let _turn = bowline_tests::turn();
    let mut server = Setup::new().without_secret().start();
    let (ws, tcp) = (format!("ws://{}/ws", server.ws()), format!("tcp://{}", server.tcp()));
    let ended = check(&["--url", &ws, "--url", &tcp, "--duration", "3s", "--users", "6"], &[]);
    let verdict = is_clean(&ended);
    assert_eq!(verdict["kills"], 0, "{verdict}");
    assert!(verdict["sent"].as_u64().is_some_and(|sent| sent > 300), "{verdict}");
    // A second run on the same data, with the same seed, meets the first one's messages and minds them not.
    is_clean(&check(&["--url", &ws, "--duration", "1s", "--users", "6", "--seed", "1"], &[]));
    is_clean(&check(&["--url", &ws, "--duration", "1s", "--users", "6", "--seed", "1"], &[]));
    assert!(server.has_ended().is_none());
}

#[test]
fn the_key_of_the_ledger_is_that_of_the_data_directory() {
    let _turn = bowline_tests::turn();
    let server = Setup::new().without_secret().without_key().start();
    let (ws, api) = (format!("ws://{}/ws", server.ws()), format!("http://{}", server.api()));
    let load = ["--url", &ws, "--api-url", &api, "--duration", "1s", "--users", "4"];
    let data = server.data_dir().to_str().expect("a path of text");
    is_clean(&check(&[&load[..], &["--data", data]].concat(), &[]));
    // Without it the server's ledger is closed.
    let other = tempfile::tempdir().expect("a temporary directory");
    std::fs::copy(server.data_dir().join("auth.secret"), other.path().join("auth.secret"))
        .expect("the secret can be copied");
    let ended = check(&[&load[..], &["--data", other.path().to_str().expect("text")]].concat(), &[]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stderr.contains("401"), "{ended:?}");
}

#[test]
fn a_running_server_is_checked_through_tls() {
    let _turn = bowline_tests::turn();
    let certificates = Arc::new(Certificates::new());
    let server = Setup::new().tls(&certificates).start();
    let ca = certificates.ca().to_string_lossy().into_owned();
    let ws = format!("wss://localhost:{}/ws", server.listeners().ws.port());
    let tcp = format!("tls://{}", server.listeners().tcp);
    let load = ["--duration", "3s", "--users", "6", "--token-secret", token::SECRET];
    // Several addresses behind one flag are the same as several flags.
    let verdict = is_clean(&check(&[&["--url", &ws, &tcp, "--ca", &ca], &load[..]].concat(), &[]));
    assert!(verdict["sent"].as_u64().is_some_and(|sent| sent > 300), "{verdict}");
    // Whoever is not trusted is told nothing.
    let ended = check(&[&["--url", &ws, "--ca", "/no/such/ca.pem"], &load[..]].concat(), &[]);
    assert_eq!((ended.code, ended.stdout.as_str()), (Some(2), ""), "{ended:?}");
    assert!(ended.stderr.contains("/no/such/ca.pem"), "{ended:?}");
    let other = Certificates::new();
    let other = other.ca().to_string_lossy().into_owned();
    let ended = check(&[&["--url", &ws, "--ca", &other], &load[..]].concat(), &[]);
    assert_eq!((ended.code, ended.stdout.as_str()), (Some(1), ""), "{ended:?}");
    assert!(ended.stderr.contains("certificate"), "{ended:?}");
}

#[test]
fn a_server_that_cannot_be_checked_is_no_verdict() {
    let wrong = bowline_within(LIMIT, &["check", "--url", "http://127.0.0.1:1"], &[]);
    assert_eq!(wrong.code, Some(2), "{wrong:?}");
    assert!(wrong.stderr.contains("ws://host:port/ws"), "{wrong:?}");
    for arguments in [&["check", "--users", "1"], &["check", "--rate", "0"], &["check", "--duration", "soon"]]
    {
        let ended = bowline_within(LIMIT, arguments, &[]);
        assert_eq!(ended.code, Some(2), "{arguments:?}: {ended:?}");
    }
    let folder = tempfile::tempdir().expect("a temporary directory");
    std::fs::write(folder.path().join("file"), "of somebody").expect("a file can be written");
    let taken = check(&["--data", folder.path().to_str().expect("a path of text")], &[]);
    assert_eq!(taken.code, Some(2), "{taken:?}");
    assert!(taken.stderr.contains("not empty"), "{taken:?}");
    // Tokens that the server does not take end the run at once.
    let server = Server::start();
    let url = format!("ws://{}/ws", server.ws());
    let ended = check(&["--url", &url, "--token-secret", "not-the-one-of-the-server-at-all"], &[]);
    assert_eq!((ended.code, ended.stdout.as_str()), (Some(1), ""), "{ended:?}");
    assert!(ended.stderr.contains("401") || ended.stderr.contains("4502"), "{ended:?}");
}

/// Checks a server through a proxy that is wrong in this way.
fn check_wrong(wrong: Wrong) -> Ended {
    let server = Server::start();
    let proxy = Proxy::start(server.ws(), server.tcp(), wrong);
    let (ws, tcp) = (format!("ws://{}/ws", proxy.ws), format!("tcp://{}", proxy.tcp));
    let load = ["--duration", "3s", "--users", "8", "--seed", "3", "--token-secret", token::SECRET];
    let ended = check(&[&["--url", &ws, "--url", &tcp], &load[..]].concat(), &[]);
    assert_eq!(proxy.has_done_wrong(), wrong != Wrong::Nothing, "{wrong:?}: {ended:?}");
    ended
}

/// All of these are wrong in a way that is found under this name.
fn are_found(name: &str, wrongs: &[Wrong]) {
    let _turn = bowline_tests::turn();
    std::thread::scope(|scope| {
        for wrong in wrongs {
            scope.spawn(|| is_violated(&check_wrong(*wrong), name));
        }
    });
}

#[test]
fn a_proxy_that_does_nothing_wrong_is_clean() {
    let _turn = bowline_tests::turn();
    is_clean(&check_wrong(Wrong::Nothing));
}

#[test]
fn what_is_lost_is_found() {
    are_found("lost", &[Wrong::Lost, Wrong::Forgotten, Wrong::AckedOnly]);
}

#[test]
fn what_is_doubled_is_found() {
    are_found("doubled", &[Wrong::PushedTwice, Wrong::Renumbered, Wrong::RowTwice]);
}

#[test]
fn what_is_out_of_order_is_found() {
    are_found("reordered", &[Wrong::Swapped]);
}

#[test]
fn what_is_left_out_is_found() {
    are_found("gaps", &[Wrong::NotPushed]);
}

#[test]
fn what_is_spoiled_or_miscounted_is_found() {
    are_found("changed", &[Wrong::Spoiled]);
    are_found("miscounted", &[Wrong::Unread]);
}

/// A run whose server stands on a disk with this fault: a kill is a power cut.
fn check_on(fault: Fault) -> Ended {
    let _turn = bowline_tests::turn();
    let folder = tempfile::tempdir().expect("a temporary directory");
    let data = folder.path().join("data");
    std::fs::create_dir(&data).expect("a folder can be made");
    let environment = disk::environment(&data, fault);
    let environment: Vec<(&str, &str)> = environment.iter().map(|(name, value)| (*name, &**value)).collect();
    let data = data.to_str().expect("a path of text");
    check(&["--duration", "8s", "--users", "8", "--seed", "5", "--data", data], &environment)
}

#[test]
fn power_cuts_under_load_leave_nothing_to_complain_about() {
    let verdict = is_clean(&check_on(Fault { leak_permille: 300, ..Fault::default() }));
    assert!(verdict["kills"].as_u64().is_some_and(|kills| kills >= 2), "{verdict}");
}

#[test]
fn a_store_that_does_not_sync_is_found() {
    is_violated(&check_on(Fault { ignore_syncs: true, ..Fault::default() }), "lost");
}
