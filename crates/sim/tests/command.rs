//! The command, as a user calls it.

use serde_json::Value;
use std::process::{Command, Output};

fn sim(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_bowline-sim")).args(args).output().expect("it runs")
}

fn text(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).expect("UTF-8")
}

#[test]
fn good_seeds_end_with_0_and_say_how_fast_they_were() {
    let output = sim(&["--seeds", "0..20", "--json"]);
    assert_eq!(output.status.code(), Some(0));
    let object: Value = serde_json::from_str(&text(&output)).expect("one object");
    assert_eq!((&object["seeds"], &object["failed"]), (&20.into(), &0.into()));
    assert!(object["seconds"].is_number() && object["seeds_per_second"].as_f64() > Some(0.0));
    assert!(text(&sim(&["--seeds", "0..20"])).contains("20 seeds, no violation"));
}

#[test]
fn a_seed_that_fails_ends_with_1_and_is_shown() {
    let args = ["--seeds", "0..1000", "--plant", "unread-counts-own"];
    let output = sim(&[&args[..], &["--json"]].concat());
    assert_eq!(output.status.code(), Some(1));
    let object: Value = serde_json::from_str(&text(&output)).expect("one object");
    assert_eq!((&object["failed"], &object["plant"]), (&1.into(), &"unread-counts-own".into()));
    let (seed, invariant) = (object["seed"].as_u64().expect("a seed"), object["invariant"].as_str());

    let output = sim(&args);
    assert_eq!(output.status.code(), Some(1));
    let shown = text(&output);
    for expected in [&format!("seed {seed} fails"), invariant.expect("a name"), "shrunk from", "VIOLATION"] {
        assert!(shown.contains(expected), "{expected:?} is not in {shown}");
    }
}

#[test]
fn planted_faults_are_listed_one_a_line() {
    let output = sim(&["--plant", "list"]);
    assert_eq!(output.status.code(), Some(0));
    let lines: Vec<String> = text(&output).lines().map(str::to_owned).collect();
    assert!(
        lines.len() == bowline_sim::Plant::ALL.len() && lines.iter().any(|line| line == "ack-before-sync"),
        "{lines:?}"
    );
}

#[test]
fn a_wrong_call_ends_with_2() {
    for args in [
        &["--seeds", "5..5"][..],
        &["--seeds", "x"],
        &["--seeds", "0..2", "--plant", "nothing-of-the-kind"],
        &["--plant", "stale-owner"],
        &["--unknown"],
        &[],
    ] {
        let output = sim(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(!output.stderr.is_empty(), "{args:?} says why");
    }
}
