//! What one message to a large group costs the router: the core's decisions and the embedded store, on one thread.
//! `cargo run --release -p bowline-router --example group_cost [-- MEMBERS [ONLINE [MESSAGES]]]`. Linux only: the
//! time comes from `/proc`.
//!
//! Each message is pushed to every member that is connected, and each of these acknowledges it; acknowledgements come
//! in ten lots, each of which is a transaction.

use bowline_delivery::{Action, Config, Core, Event, Now, Retention};
use bowline_protocol::{
    ClientFrame, DeviceId, UserId,
    ids::GroupId,
    link::{Claim, ConnRef, Down, NodeRef, Open, Request, SameDevice, Up, Uplink},
};
use bowline_store::{Reader as _, Writer as _, sqlite};
use std::{path::Path, sync::Arc, time::Instant};

const LOTS: u64 = 10;

fn main() {
    let mut args = std::env::args().skip(1).map(|text| text.parse::<u64>().expect("a number"));
    let (members, online, messages) =
        (args.next().unwrap_or(10_000), args.next().unwrap_or(500), args.next().unwrap_or(100));
    let dir = std::env::temp_dir().join(format!("bowline-group-cost-{}", std::process::id()));
    let mut router = Router::open(&dir);
    let names: Vec<UserId> = (0..members).map(|n| UserId::trusted(&format!("user{n}"))).collect();
    let began = Instant::now();
    router.request(Request::GroupCreate {
        group_id: Some(GroupId::trusted("big")),
        name: None,
        members: names.clone(),
        owner: None,
        meta: None,
    });
    println!("a group of {members} made in {} ms", began.elapsed().as_millis());
    for (conn, user) in (1..=online).zip(&names) {
        router.connect(conn, user);
    }
    router.frame(1, r#"{"type":"msg.send","id":"first","conversation_id":"g:big","body":0}"#);
    let (mut sending, mut receiving) = (0, 0);
    let body = "x".repeat(128);
    for n in 0..messages {
        let before = cpu_us();
        router.frame(
            1,
            &format!(r#"{{"type":"msg.send","id":"m{n}","conversation_id":"g:big","body":"{body}"}}"#),
        );
        let between = cpu_us();
        let recv = format!(r#"{{"type":"msg.recv","conversation_id":"g:big","seq":{}}}"#, n + 2);
        for lot in 0..LOTS {
            for conn in (2..=online).filter(|conn| conn % LOTS == lot) {
                router.take(conn, &recv);
            }
            router.settle();
        }
        sending += between - before;
        receiving += cpu_us() - between;
    }
    let ms = |us: u64| us as f64 / messages as f64 / 1000.0;
    println!(
        "{members} members, {online} online: {:.2} ms of CPU a message ({:.2} ms to store and push it, {:.2} ms for \
         {} acknowledgements), {} pushes, {} receipts, {} transactions",
        ms(sending + receiving),
        ms(sending),
        ms(receiving),
        online - 1,
        router.core.counters().pushes,
        router.core.counters().receipts,
        router.core.counters().transactions,
    );
    let _ = std::fs::remove_dir_all(&dir);
}

/// The core and its store, without threads.
struct Router {
    core: Core,
    writer: sqlite::Writer,
    reader: sqlite::Reader,
    node: Arc<NodeRef>,
    began: Instant,
}

impl Router {
    fn open(dir: &Path) -> Self {
        let store = sqlite::open(dir, &sqlite::Options::default()).expect("a store");
        let config = Config {
            owner_epoch: 1,
            ack_timeout_ms: 3000,
            max_redeliveries: 3,
            batch_max: 200,
            group_members_max: 1_000_000,
            frame_bytes_max: 32_768,
            seed: 1,
            before_send: false,
            outbox: false,
            retention: Retention::default(),
            resume_ms: 15_000,
        };
        Self {
            core: Core::new(config),
            writer: store.writer,
            reader: store.readers.open().expect("a reader"),
            node: Arc::new(NodeRef { node_id: "n".into(), boot_id: "b".into() }),
            began: Instant::now(),
        }
    }

    fn now(&self) -> Now {
        let mono = self.began.elapsed().as_millis() as u64;
        Now { wall: 1_700_000_000_000 + mono, mono }
    }

    fn up(&mut self, conn: u64, event: Up) {
        let from = ConnRef { node: self.node.clone(), connection: conn, login: conn };
        self.core.on_event(Event::Uplink(Uplink { from, event }), self.now());
    }

    fn connect(&mut self, conn: u64, user: &UserId) {
        self.up(
            conn,
            Up::Open(Open {
                user: user.clone(),
                device: DeviceId::trusted("phone"),
                class: None,
                channel: None,
                session: conn.to_string().into(),
                resume: None,
                same_device: SameDevice::Replace,
            }),
        );
        self.settle();
    }

    fn request(&mut self, request: Request) {
        self.up(0, Up::Request { request_id: 1, request });
        self.settle();
    }

    fn take(&mut self, conn: u64, text: &str) {
        let frame = ClientFrame::decode_text(text.as_bytes()).expect("a frame");
        self.up(conn, Up::Frame(frame));
    }

    fn frame(&mut self, conn: u64, text: &str) {
        self.take(conn, text);
        self.settle();
    }

    fn settle(&mut self) {
        loop {
            let now = self.now();
            self.core.on_turn(now);
            let actions = self.core.take_actions();
            if actions.is_empty() {
                return;
            }
            for action in actions {
                let event = match action {
                    Action::Commit(batch) => Event::Outcome(self.writer.commit(&batch)),
                    Action::Read { read, query, .. } => {
                        Event::Found { read, found: self.reader.read(&query) }
                    }
                    Action::Claim { conn, open } => {
                        Event::Claimed { conn, open, claim: Claim::Won { ended: Vec::new() } }
                    }
                    Action::Send(down) => {
                        if let Down::Answer { answer, .. } = &down.event {
                            println!("{answer:?}");
                        }
                        continue;
                    }
                    Action::Release { .. } | Action::LookUp { .. } | Action::AskVerdict { .. } => continue,
                };
                self.core.on_event(event, now);
            }
        }
    }
}

/// What the main thread has run for; the thread that copies the store's log is not counted.
fn cpu_us() -> u64 {
    let text = std::fs::read_to_string("/proc/self/schedstat").expect("Linux");
    let nanos: u64 = text.split(' ').next().and_then(|text| text.parse().ok()).expect("a number");
    nanos / 1000
}
