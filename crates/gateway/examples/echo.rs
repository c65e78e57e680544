//! A gateway with nothing behind it and a WebSocket echo at `/echo`, for conformance suites.
//!
//! `cargo run --release -p bowline-gateway --example echo -- 127.0.0.1:9001`

use bowline_auth::Verifier;
use bowline_gateway::{Config, Gateway};
use bowline_links::Uplinks;
use bowline_protocol::link::{NodeRef, Uplink};
use std::sync::Arc;

struct Nobody;

impl Uplinks for Nobody {
    fn send(&self, batch: &mut Vec<Uplink>) {
        batch.clear();
    }

    fn depth(&self) -> (usize, usize) {
        (0, 1)
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let listen = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:0".to_owned()).parse()?;
    let config = Config {
        listen,
        tcp_listen: None,
        echo_path: Some("/echo".to_owned()),
        workers: 1,
        ..Config::default()
    };
    let node = Arc::new(NodeRef { node_id: "echo".into(), boot_id: "1".into() });
    let bound = Gateway::bind(config, node, Arc::new(Verifier::with_secret(b"no session is opened here")))?;
    println!("ws://{}/echo", bound.addresses().ws);
    let _gateway = bound.start(Arc::new(Nobody), Arc::new(|_, _| ()))?;
    loop {
        std::thread::park();
    }
}
