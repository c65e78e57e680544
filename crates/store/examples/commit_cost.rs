//! What a durable message costs in the embedded store:
//! `cargo run --release -p bowline-store --example commit_cost [-- DIRECTORY [SECONDS [PAGE_BYTES [CACHE_BYTES [LOG_BYTES]]]]]`.
//!
//! 1,000 pairs exchange 200-byte messages; with each message the core writes the sender's member row, and the
//! receiver's once the message has arrived. Linux only: figures come from `/proc`.

use bowline_delivery::persist::{
    Batch, Fence, LedgerDelta, Member, Message, Outcome, PARTITION_COUNT, Query, Write,
};
use bowline_protocol::{Body, ConversationId, DeviceId, MessageId, UserId, frame::Role};
use bowline_store::{
    Reader as _, Writer as _,
    sqlite::{self, Options},
};
use bytes::Bytes;
use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

const PAIRS: usize = 1000;
const BODY_BYTES: usize = 200;

fn main() {
    let mut args = std::env::args().skip(1);
    let dir = args.next().map_or_else(|| std::env::temp_dir().join("bowline-commit-cost"), PathBuf::from);
    let seconds = args.next().map_or(3, |text| text.parse().expect("seconds"));
    let page_bytes =
        args.next().map_or(Options::default().page_bytes, |text| text.parse().expect("page bytes"));
    let writer_cache_bytes =
        args.next().map_or(Options::default().writer_cache_bytes, |text| text.parse().expect("cache bytes"));
    let log_bytes = args.next().map_or(Options::default().log_bytes, |text| text.parse().expect("log bytes"));
    println!("{page_bytes}-byte pages, {PAIRS} pairs, {BODY_BYTES}-byte bodies, {seconds} s each");
    for rows in [4, 16, 64, 200] {
        let _ = std::fs::remove_dir_all(&dir);
        let options = Options {
            page_bytes,
            writer_cache_bytes,
            log_bytes,
            log_bytes_max: 4 * log_bytes,
            ..Options::default()
        };
        measure(&dir, &options, rows, Duration::from_secs(seconds));
    }
    let _ = std::fs::remove_dir_all(&dir);
}

struct Pair {
    conversation: ConversationId,
    users: [UserId; 2],
    last: u64,
}

fn member(delivered: u64) -> Member {
    Member {
        role: Role::Member,
        joined: 1,
        first: 1,
        delivered,
        read: delivered,
        own_above_delivered: 0,
        own_above_read: 0,
        lagging: vec![],
    }
}

fn measure(dir: &std::path::Path, options: &Options, rows: usize, time: Duration) {
    let mut opened = sqlite::open(dir, options).expect("the store opens");
    let mut pairs: Vec<Pair> = (0..PAIRS)
        .map(|pair| {
            let users = [2 * pair, 2 * pair + 1].map(|user| UserId::trusted(&format!("user-{user:06}")));
            Pair { conversation: ConversationId::direct(&users[0], &users[1]), users, last: 0 }
        })
        .collect();
    let create = pairs.iter().map(|pair| Write::CreateConversation {
        conversation: pair.conversation.clone(),
        name: None,
        meta: None,
        at: 1,
        members: pair.users.iter().map(|user| (user.clone(), member(0))).collect(),
    });
    commit(&mut opened.writer, Batch { writes: create.collect(), ..Batch::default() });

    let fences: Vec<_> = (0..PARTITION_COUNT).map(|partition| Fence { partition, epoch: 1 }).collect();
    let device = DeviceId::trusted("0b0f8e0a-55aa-4b9f-a2a3-68a0c9a7c2c1");
    let body = Bytes::from(vec![b'x'; BODY_BYTES]);
    let mut dice = 0x9e37_79b9_7f4a_7c15_u64;
    let mut roll = move || {
        dice ^= dice << 13;
        dice ^= dice >> 7;
        dice ^= dice << 17;
        dice
    };
    let mut arrived: Vec<(usize, usize, u64)> = Vec::new();
    let (mut messages, mut latencies) = (0, Vec::new());
    let mut writing = Duration::ZERO;
    let (cpu, thread_cpu, bytes) = (cpu_us("self"), cpu_us("thread-self"), bytes_written());
    let mut building = Duration::ZERO;
    let begin = Instant::now();
    while begin.elapsed() < time {
        let built = Instant::now();
        let mut writes = Vec::with_capacity(rows * 3);
        let mut next = Vec::with_capacity(rows);
        for _ in 0..rows {
            let (at, side) = ((roll() >> 20) as usize % PAIRS, (roll() >> 20) as usize % 2);
            let pair = &mut pairs[at];
            pair.last += 1;
            let (a, b) = (roll(), roll());
            let id = format!(
                "{:08x}-{:04x}-4{:03x}-8{:03x}-{:012x}",
                a as u32,
                a >> 48,
                a >> 32 & 0xfff,
                b >> 52,
                b & 0xffff_ffff_ffff
            );
            writes.push(Write::Message(Message {
                conversation: pair.conversation.clone(),
                seq: pair.last,
                id: MessageId::trusted(&id),
                from: pair.users[side].clone(),
                device: Some(device.clone()),
                ts: 1_800_000_000_000 + messages,
                body: Body::Json(body.clone()),
                hash: u128::from(a) << 64 | u128::from(b),
            }));
            writes.push(Write::PutMember {
                conversation: pair.conversation.clone(),
                user: pair.users[side].clone(),
                member: member(pair.last),
            });
            next.push((at, 1 - side, pair.last));
            messages += 1;
        }
        let delivered = arrived.len() as u64;
        for (at, side, seq) in std::mem::replace(&mut arrived, next) {
            writes.push(Write::PutMember {
                conversation: pairs[at].conversation.clone(),
                user: pairs[at].users[side].clone(),
                member: member(seq),
            });
        }
        let ledger = LedgerDelta { accepted: rows as u64, delivered, expired: 0 };
        let batch = Batch { fences: fences.clone(), writes, ledger, outbox: vec![] };
        let started = Instant::now();
        building += started - built;
        commit(&mut opened.writer, batch);
        latencies.push(started.elapsed());
        writing += started.elapsed();
    }
    let count = messages as f64;
    // What building the batches took is the core's cost, not the store's.
    let thread_us = (cpu_us("thread-self") - thread_cpu) as f64 - building.as_micros() as f64;
    let process_us = (cpu_us("self") - cpu) as f64 - building.as_micros() as f64;
    latencies.sort_unstable();
    let at = |share: f64| latencies[((latencies.len() - 1) as f64 * share) as usize].as_secs_f64() * 1e3;
    println!(
        "{rows:>3} a commit: {:>6.0} messages/s, CPU {:.1} µs a message (writer {:.1}), commit P50 {:.2} P99 {:.2} max {:.1} ms, \
         {:.1} kB written a message",
        count / writing.as_secs_f64(),
        process_us / count,
        thread_us / count,
        at(0.5),
        at(0.99),
        at(1.0),
        (bytes_written() - bytes) as f64 / count / 1e3,
    );
    let mut reader = opened.readers.open().expect("a reader");
    let ask = |reader: &mut sqlite::Reader, name: &str, query: &dyn Fn(usize) -> Query| {
        let begin = Instant::now();
        for at in 0..2 * PAIRS {
            std::hint::black_box(reader.read(&query(at)));
        }
        println!("      {name}: {:.1} µs", begin.elapsed().as_secs_f64() * 1e6 / (2 * PAIRS) as f64);
    };
    if rows == 200 {
        let device = || DeviceId::trusted("phone");
        ask(&mut reader, "what waits for a stranger", &|at| Query::Waiting {
            user: UserId::trusted(&format!("stranger-{at}")),
            device: device(),
        });
        ask(&mut reader, "what waits for a user", &|at| Query::Waiting {
            user: UserId::trusted(&format!("user-{at:06}")),
            device: device(),
        });
        ask(&mut reader, "a conversation with 64 messages", &|at| Query::Conversation {
            conversation: pairs[at / 2].conversation.clone(),
            tail: 64,
        });
        ask(&mut reader, "a conversation without", &|at| Query::Conversation {
            conversation: pairs[at / 2].conversation.clone(),
            tail: 0,
        });
        let file = std::fs::metadata(opened.readers.path()).expect("the database").len();
        println!("      {:.0} bytes of file a message", file as f64 / count);
        // The files as a kill would leave them.
        let copy = dir.with_extension("copy");
        let _ = std::fs::remove_dir_all(&copy);
        std::fs::create_dir_all(&copy).expect("a directory beside it");
        for name in [sqlite::FILE_NAME.to_owned(), format!("{}-wal", sqlite::FILE_NAME)] {
            std::fs::copy(dir.join(&name), copy.join(&name)).expect("a copy");
        }
        let log = std::fs::metadata(copy.join(format!("{}-wal", sqlite::FILE_NAME))).expect("the log").len();
        let begin = Instant::now();
        let reopened = sqlite::open(&copy, options).expect("the copy opens");
        println!(
            "      opened after a kill, {messages} messages, {} MB of log: {:.0} ms",
            log >> 20,
            begin.elapsed().as_secs_f64() * 1e3
        );
        drop(reopened);
        let _ = std::fs::remove_dir_all(&copy);
    }
}

fn commit(writer: &mut sqlite::Writer, batch: Batch) {
    let outcome = writer.commit(&batch);
    assert_eq!(outcome, Outcome::Committed);
}

/// User and system time of a process or thread, from its clock ticks of 10 ms.
fn cpu_us(which: &str) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{which}/stat")).expect("/proc");
    let after_name = text.rsplit_once(')').expect("a name in parentheses").1;
    let ticks =
        |at: usize| after_name.split_whitespace().nth(at).expect("a field").parse::<u64>().expect("ticks");
    (ticks(11) + ticks(12)) * 10_000
}

/// Bytes that this process sent towards the disk.
fn bytes_written() -> u64 {
    let text = std::fs::read_to_string("/proc/self/io").expect("/proc");
    let line = text.lines().find_map(|line| line.strip_prefix("write_bytes: ")).expect("write_bytes");
    line.parse().expect("bytes")
}
