//! The demo page and its tokens.

use bowline_tests::{Server, Setup, Transport, http, tools};
use serde_json::json;
use std::{
    io::{BufRead, BufReader, Write},
    process::Stdio,
    sync::mpsc,
    time::Duration,
};

/// A server as the first command of the README starts it: no key is configured.
fn plain() -> Server {
    Setup::new().without_secret().without_key().start()
}

#[test]
fn the_page_comes_whole_from_the_server() {
    let server = plain();
    let page = http::request("GET", &server.public_url("/"), &[], None).expect(200);
    assert!(page.header("content-type").is_some_and(|kind| kind.starts_with("text/html")), "{page:?}");
    let mut fetched = 0;
    for attribute in ["src=\"", "href=\""] {
        for part in page.text.split(attribute).skip(1) {
            let link = part.split('"').next().expect("a split has a first part");
            if link.starts_with("data:") {
                continue;
            }
            assert!(link.starts_with('/') && !link.starts_with("//"), "{link} is not on this server");
            let asset = http::request("GET", &server.public_url(link), &[], None).expect(200);
            assert!(!asset.text.is_empty() && !asset.text.contains("https://"), "{link} reaches elsewhere");
            fetched += 1;
        }
    }
    assert!(fetched > 0, "the page has a script: {}", page.text);
}

#[test]
fn demo_tokens_are_given_while_no_key_is_configured() {
    let server = plain();
    let ask = |body: &str| http::request("POST", &server.public_url("/demo/token"), &[], Some(body));
    let answer = ask(&json!({"user": "alice"}).to_string()).expect(200).json();
    let token = answer["token"].as_str().expect("a token");
    for transport in [Transport::Ws, Transport::Tcp] {
        let client = server.login("alice").token(token).connect(transport);
        assert_eq!(client.field("user_id"), "alice");
    }
    for body in ["{}", "no JSON", r#"{"user": ""}"#, r#"{"user": "with:colon"}"#, r#"{"user": 7}"#] {
        ask(body).expect_refusal(400);
    }
}

#[test]
fn demo_tokens_are_not_given_once_a_key_is_configured() {
    let server = Server::start();
    let body = json!({"user": "alice"}).to_string();
    let answer = http::request("POST", &server.public_url("/demo/token"), &[], Some(&body));
    assert!([403, 404].contains(&answer.status), "{} {}", answer.status, answer.text);
    assert!(answer.json().get("token").is_none(), "{}", answer.text);
}

#[test]
fn two_browser_windows_chat_reload_and_survive_a_crash_of_the_server() {
    let _turn = bowline_tests::turn();
    let mut server = plain();
    let screenshots = tools::output_folder();
    let picture = screenshots.join("demo.png");
    let _ = std::fs::remove_file(&picture);
    let mut command = tools::node();
    command
        .arg(tools::folder().join("node/browser.mjs"))
        .env("SERVER_PAGE", format!("http://{}", server.ws()))
        .env("BROWSER", tools::chromium())
        .env("SCREENSHOTS", &screenshots)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    let mut child = command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let output = BufReader::new(child.stdout.take().expect("stdout is a pipe"));
    let mut input = child.stdin.take().expect("stdin is a pipe");
    let (lines, received) = mpsc::channel();
    std::thread::spawn(move || {
        for line in output.lines().map_while(Result::ok) {
            if lines.send(line).is_err() {
                break;
            }
        }
    });
    let mut seen: Vec<String> = Vec::new();
    let outcome = loop {
        match received.recv_timeout(Duration::from_secs(90)) {
            Ok(line) => {
                match line.as_str() {
                    "kill" => server.kill(),
                    "start" => server.restart_in_place(),
                    _ => {}
                }
                if ["kill", "start"].contains(&line.as_str()) {
                    writeln!(input, "{line} done").expect("the script waits for the answer");
                }
                seen.push(line);
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                break child.wait().expect("a child can be waited for");
            }
            Err(mpsc::RecvTimeoutError::Timeout) => {
                let _ = child.kill();
                let _ = child.wait();
                panic!("the browser was silent for 90 s after {seen:?}");
            }
        }
    };
    assert!(outcome.success() && seen == ["kill", "start", "passed"], "{outcome}: {seen:?}");
    let picture = std::fs::read(&picture).expect("a screenshot was saved");
    assert!(picture.starts_with(b"\x89PNG") && picture.len() > 5000, "{} bytes", picture.len());
}
