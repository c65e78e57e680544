//! Connections that come and go: the short form of `scripts/churn`.

use bowline_tests::{Server, Transport, churn};

#[test]
fn five_thousand_connections_leave_nothing_behind() {
    let _turn = bowline_tests::turn();
    let server = Server::start();
    let report = churn::run(&server, 5_000, 16 << 20);
    assert!(report.authenticated > 2_500 && report.abrupt >= 1_600, "{report:?}");
    // It serves as before.
    assert_eq!(server.connect(Transport::Ws, "alice").tell("bob", 1).seq(), 1);
}
