//! Planned ends.

use super::rig::*;
use crate::{Config, State};
use bowline_protocol::CloseCode;
use std::time::Duration;

#[test]
fn a_drain_spreads_refuses_and_ends() {
    let rig = Rig::new(Config { drain_timeout_ms: 700, migrate_spread_ms: 9_000, workers: 1, ..config() });
    let mut clients: Vec<Client> = (0..10).map(|n| rig.client(BOTH[n % 2], &format!("u{n}"))).collect();
    let (mut unknown, mut late) = (rig.plain(Kind::Ws), rig.plain(Kind::Tcp));
    assert!(!rig.handle.is_draining());
    rig.handle.drain("deploy");
    rig.handle.drain("again");
    let status = rig.handle.status();
    let drain = status.drain.unwrap();
    assert_eq!((status.state, &*drain.reason, drain.remaining), (State::Draining, "deploy", 10));
    assert!(drain.deadline.abs_diff(wall_ms() + 700) < 500);

    let mut delays: Vec<u64> = Vec::new();
    for client in &mut clients {
        let migrate = client.expect(r#"{"type":"session.migrate","retry_after_ms":"#);
        assert_eq!(field(&migrate, "reason"), "deploy");
        delays.push(field(&migrate, "retry_after_ms").parse().unwrap());
        client.say(&send_frame("1"));
        client.expect(r#"{"type":"msg.ack","id":"1""#);
    }
    delays.sort_unstable();
    assert_eq!(delays, (0..10).map(|n| n * 1000).collect::<Vec<_>>(), "evenly");

    let (_, answer) = rig.upgrade("/ws?token=alice", "");
    assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("Retry-After"), "{answer}");
    for client in [&mut unknown, &mut late] {
        client.connect("alice");
        assert!(client.expect_closed(1013, "draining").contains("retry_after_ms"));
    }
    assert!(!rig.handle.wait_until_empty(Duration::ZERO));
    for client in &mut clients {
        assert!(client.expect_closed(1001, "draining").contains("retry_after_ms"));
    }
    drop(clients);
    assert!(rig.handle.wait_until_empty(PATIENCE));
    assert_eq!(rig.router.closed(&rig.router.opened("u3", 0)), "draining");
    assert!(rig.handle.metrics().closed(CloseCode::Draining) >= 10);
}
