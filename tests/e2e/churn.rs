//! Connections that come and go: the short forms of `scripts/churn` and `scripts/soak`.

use bowline_tests::{Server, Transport, churn, soak};
use std::time::Duration;

#[test]
fn five_thousand_connections_leave_nothing_behind() {
    let _turn = bowline_tests::turn();
    let server = Server::start();
    let report = churn::run(&server, 5_000, 16 << 20);
    assert!(report.authenticated > 2_500 && report.abrupt >= 1_600, "{report:?}");
    // It serves as before.
    assert_eq!(server.connect(Transport::Ws, "alice").tell("bob", 1).seq(), 1);
}

/// The short form of `scripts/soak`: who talks meanwhile misses nothing, and memory grows no more than its tables take
/// until they are full.
#[test]
fn users_who_talk_while_others_come_and_go_miss_nothing() {
    let _turn = bowline_tests::turn();
    let server = Server::start();
    let report = soak::run(&server, Duration::from_secs(20));
    assert!(report.connections > 200 && report.messages > 200, "{report:?}");
    let sizes: Vec<f64> = report.samples.iter().map(|(_, bytes)| *bytes).collect();
    assert!(sizes.len() >= 2 && sizes[sizes.len() - 1] <= sizes[0] + 16e6, "{report:?}");
}
