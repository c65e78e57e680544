//! `bowline drain`: asks for a drain, and waits for its end.

use bowline_tests::{PATIENCE, Server, Transport, bowline, server::Ended, token};
use serde_json::Value;
use std::time::{Duration, Instant};

fn drain(server: &Server, more: &[&str]) -> Ended {
    let url = server.api_url("");
    let mut all = vec!["drain", "--api-url", &url, "--api-key", token::API_KEY];
    all.extend(more);
    bowline(&all)
}

fn server() -> Server {
    Server::with(&[("gateway.drain_timeout_ms", "2000"), ("gateway.migrate_spread_ms", "500")])
}

#[test]
fn it_waits_for_the_deadline_when_somebody_stays() {
    let server = server();
    let mut client = server.connect(Transport::Ws, "alice");
    let began = Instant::now();
    let ended = drain(&server, &["--reason", "maintenance"]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let took = began.elapsed();
    assert!(took > Duration::from_millis(1900) && took < Duration::from_secs(8), "{took:?}");
    let [begun, over] = ended.stdout.lines().collect::<Vec<_>>()[..] else { panic!("two lines: {ended:?}") };
    assert!(begun.contains("is draining: 1 connections left"), "{ended:?}");
    assert!(over.contains("no connection is left"), "{ended:?}");
    assert!(ended.stderr.is_empty(), "quiet where nobody looks: {ended:?}");
    assert_eq!(client.expect("session.migrate").text_of("reason"), "maintenance");
    client.expect_closed(1001, "draining");
    assert_eq!(server.status()["state"], "draining");
}

#[test]
fn it_ends_as_soon_as_nobody_is_left_and_asking_again_changes_nothing() {
    let server = Server::with(&[("gateway.drain_timeout_ms", "60000")]);
    let client = server.connect(Transport::Tcp, "alice");
    let begun = drain(&server, &["--no-wait"]);
    assert_eq!(begun.code, Some(0), "{begun:?}");
    let deadline = server.status()["drain"]["deadline"].clone();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| drain(&server, &["--json"]));
        client.close();
        let ended = waiting.join().expect("no panic");
        assert_eq!(ended.code, Some(0), "{ended:?}");
        let status: Value = serde_json::from_str(&ended.stdout).unwrap_or_else(|_| panic!("{ended:?}"));
        assert_eq!(status["drain"]["remaining"], 0, "{status:#}");
        assert_eq!(status["drain"]["deadline"], deadline, "{status:#}");
    });
}

#[test]
fn a_server_that_ends_meanwhile_is_no_failure() {
    let mut server = Server::with(&[("gateway.drain_timeout_ms", "60000")]);
    let client = server.connect(Transport::Ws, "alice");
    drain(&server, &["--no-wait"]);
    let url = server.api_url("");
    let waiting =
        std::thread::spawn(move || bowline(&["drain", "--api-url", &url, "--api-key", token::API_KEY]));
    server.signal("TERM");
    client.close();
    assert_eq!(server.wait_end(PATIENCE).code(), Some(0));
    let ended = waiting.join().expect("no panic");
    // It may have come too late to ask at all.
    let came_late = ended.code == Some(1) && ended.stderr.contains("no server answers");
    assert!(ended.code == Some(0) || came_late, "{ended:?}");
}

#[test]
fn without_a_server_it_fails_and_says_so() {
    let ended = bowline(&["drain", "--api-url", "http://127.0.0.1:1", "--api-key", "any"]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stderr.contains("no server answers"), "{ended:?}");
}
