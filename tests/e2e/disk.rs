//! The disk under the server: what was synced, what does not fit, what takes long, and who else holds it.

use bowline_tests::{
    Client, PATIENCE, Server, Setup, Transport,
    client::Event,
    disk::{self, Fault, SmallDisk},
    tools, until,
};
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader},
    process::{Child, Stdio},
    time::{Duration, Instant},
};

on_both![a_slow_disk_delays_no_pong, a_database_locked_by_others_is_waited_out];

// --- what was not synced ------------------------------------------------------------------------------------------

const SENDERS: usize = 4;
const EACH: usize = 400;

/// Sends `EACH` messages over each of some connections without waiting and kills the server after `acks` acks. Gives
/// the number of every message that was acknowledged, by conversation and id.
fn send_and_kill(server: &mut Server, round: usize, acks: usize) -> BTreeMap<(String, String), u64> {
    let mut clients: Vec<Client> = (0..SENDERS)
        .map(|n| {
            let transport = if n % 4 == 3 { Transport::Tcp } else { Transport::Ws };
            server.connect_device(transport, &format!("sender{n}"), "only")
        })
        .collect();
    for n in 0..EACH {
        for (sender, client) in clients.iter_mut().enumerate() {
            let id = format!("r{round}-{n}");
            client.send(&json!({"type": "msg.send", "id": id, "to": format!("to{sender}"), "body": n}));
        }
    }
    let mut acked = BTreeMap::new();
    let mut note = |frame: bowline_tests::Frame| {
        let frame = frame.expect_kind("msg.ack");
        let place = (frame.conversation().to_owned(), frame.text_of("id").to_owned());
        assert_eq!(acked.insert(place, frame.seq()), None, "acknowledged twice: {}", frame.text);
    };
    for ack in 0..acks {
        note(clients[ack % SENDERS].expect("msg.ack"));
    }
    server.kill();
    // What it said until then counts.
    for client in &mut clients {
        // The message of another device of its user may have been announced to it.
        for frame in client.wait_closed().frames.into_iter().filter(|frame| frame.kind() != "sync.notice") {
            note(frame);
        }
    }
    acked
}

/// What a start after the kill does not have of what was acknowledged.
fn lost(server: &mut Server, acked: &BTreeMap<(String, String), u64>) -> usize {
    let mut found = BTreeMap::new();
    for sender in 0..SENDERS {
        let mut client = server.connect_device(Transport::Ws, &format!("sender{sender}"), "only");
        let conversation = format!("d:sender{sender}:to{sender}");
        if !client.conversations().iter().any(|line| line["conversation_id"] == json!(conversation)) {
            continue;
        }
        for (message, seq) in client.history_after(&conversation, 0).iter().zip(1..) {
            assert_eq!(message["seq"], json!(seq), "{conversation} has a gap");
            let id = message["id"].as_str().expect("an id").to_owned();
            assert_eq!(found.insert((conversation.clone(), id), seq), None, "stored twice: {message}");
        }
    }
    server.metrics().assert_ledger_balances();
    acked.iter().filter(|(place, seq)| found.get(place) != Some(seq)).count()
}

/// Kills a server on a disk with this fault a few times, and looks each time with a server on a good one.
fn kill_rounds(fault: Fault) -> usize {
    let good = Setup::new();
    // The database is made in peace.
    let mut first = good.clone().start();
    first.connect(Transport::Ws, "sender0").tell("to0", "the first");
    first.signal("TERM");
    assert_eq!(first.wait_end(PATIENCE).code(), Some(0));
    let mut acked = BTreeMap::new();
    for (round, acks) in [40, 400, 150, 4].into_iter().enumerate() {
        let mut server = disk::with_fault(good.clone(), fault).start();
        acked.extend(send_and_kill(&mut server, round, acks));
        let mut server = good.clone().start();
        let count = lost(&mut server, &acked);
        server.kill();
        if count > 0 {
            return count;
        }
    }
    0
}

#[test]
fn a_power_cut_takes_nothing_that_was_acknowledged() {
    let _turn = bowline_tests::turn();
    for leak_permille in [0, 300] {
        let fault = Fault { leak_permille, ..Fault::default() };
        assert_eq!(kill_rounds(fault), 0, "acknowledged and gone, with {fault:?}");
    }
}

/// The test above can fail: on a disk whose syncs do nothing, it does.
#[test]
fn a_power_cut_without_syncs_is_noticed() {
    let _turn = bowline_tests::turn();
    let fault = Fault { ignore_syncs: true, ..Fault::default() };
    assert!(kill_rounds(fault) > 0, "messages are there that nothing brought to the disk");
}

// --- a full disk --------------------------------------------------------------------------------------------------

/// Sends one message and waits for its ack or its refusal, which must be a temporary one.
fn try_send(client: &mut Client, id: &str, body: &str) -> Option<u64> {
    let answer = client.request(&json!({"type": "msg.send", "id": id, "to": "bob", "body": body}));
    if answer.kind() == "msg.ack" {
        return Some(answer.seq());
    }
    answer.expect_error("unavailable");
    let wait = answer.number_of("retry_after_ms");
    assert!((1..=60_000).contains(&wait), "{}", answer.text);
    None
}

fn answers_pings(client: &mut Client, round: usize) {
    let data = format!("full{round}");
    client.send(&json!({"type": "ping", "data": data}));
    let pong = client.find("the pong", |frame| frame.kind() == "pong" && frame.json["data"] == json!(data));
    assert_eq!(pong.text_of("data"), data);
}

#[test]
fn a_full_disk_refuses_for_now_and_loses_nothing() {
    const DISK_BYTES: u64 = 24 << 20;
    let disk = SmallDisk::mount(DISK_BYTES);
    let ballast = disk.path().join("ballast");
    std::fs::write(&ballast, vec![1; 12 << 20]).expect("the ballast fits");
    let mut server = Setup::new().data(&disk.path().join("data")).start();
    let mut senders = [
        server.connect_device(Transport::Ws, "alice", "a1"),
        server.connect_device(Transport::Tcp, "carol", "c1"),
    ];
    let mut bob = server.connect_device(Transport::Ws, "bob", "b1");
    let body = "x".repeat(20_000);
    let mut acked: [BTreeMap<u64, String>; 2] = Default::default();
    let mut refused: [Vec<String>; 2] = Default::default();
    // Until both were refused some times in a row.
    let mut in_a_row = [0; 2];
    for n in 0.. {
        assert!(n < 5_000, "the disk does not fill");
        let mut sent = Vec::new();
        for (sender, client) in senders.iter_mut().enumerate() {
            let id = format!("m{n}");
            match try_send(client, &id, &body) {
                Some(seq) => {
                    assert_eq!(acked[sender].insert(seq, id), None);
                    in_a_row[sender] = 0;
                    sent.push(seq);
                }
                None => {
                    refused[sender].push(id);
                    in_a_row[sender] += 1;
                }
            }
        }
        // What was acknowledged is delivered, full or not.
        for _ in sent {
            bob.expect("msg.push");
        }
        if in_a_row.iter().all(|count| *count >= 5) {
            break;
        }
    }
    assert!(acked.iter().all(|acked| !acked.is_empty()), "nothing fitted");
    // Everybody is still connected and is served what needs no room.
    for round in 0..3 {
        for client in senders.iter_mut().chain([&mut bob]) {
            answers_pings(client, round);
        }
    }
    let newest = *acked[0].last_key_value().expect("some were acknowledged").0;
    let page = senders[0].history("d:alice:bob", json!({"after_seq": newest - 1}));
    assert_eq!(page.list_of("messages").len(), 1, "what was refused is not there");
    assert_eq!(server.status()["connections"], 3);
    assert_eq!(server.get("/healthz").status, 200);
    // Positions are kept in memory until they can be written.
    bob.recv("d:alice:bob", newest);

    std::fs::remove_file(&ballast).expect("the ballast can be removed");
    // The same ids again are taken, without a restart, each once.
    for (sender, client) in senders.iter_mut().enumerate() {
        for id in &refused[sender] {
            let seq = until("there is room again", || try_send(client, id, &body));
            assert_eq!(acked[sender].insert(seq, id.clone()), None, "{id} took a number that was taken");
        }
    }
    senders[0].expect_receipt("d:alice:bob", "delivered", "bob", newest);
    check_acked(&server, &acked);
    server.metrics().assert_ledger_balances();
    // And it is on the disk.
    server.kill();
    server.restart();
    check_acked(&server, &acked);
    server.metrics().assert_ledger_balances();
}

/// The id of each message.
fn by_number(messages: &[Value]) -> BTreeMap<u64, String> {
    let line = |message: &Value| {
        let id = message["id"].as_str().expect("an id").to_owned();
        (message["seq"].as_u64().expect("a number"), id)
    };
    messages.iter().map(line).collect()
}

/// The conversations of both senders hold what was acknowledged, number by number, and nothing else.
fn check_acked(server: &Server, acked: &[BTreeMap<u64, String>; 2]) {
    for ((user, conversation), acked) in
        [("alice", "d:alice:bob"), ("carol", "d:bob:carol")].iter().zip(acked)
    {
        let mut client = server.connect_device(Transport::Ws, user, "checks");
        let stored = by_number(&client.history_after(conversation, 0));
        assert_eq!(stored, *acked, "{conversation}");
        assert!(stored.keys().copied().eq(1..=stored.len() as u64), "{conversation} has a gap");
    }
}

/// Full in the middle of many that are sent without waiting, and killed while it is full.
#[test]
fn a_kill_on_a_full_disk_loses_nothing_acknowledged() {
    let disk = SmallDisk::mount(16 << 20);
    let ballast = disk.path().join("ballast");
    std::fs::write(&ballast, vec![1; 8 << 20]).expect("the ballast fits");
    let mut server = Setup::new().data(&disk.path().join("data")).start();
    let mut alice = server.connect_device(Transport::Ws, "alice", "a1");
    let body = "y".repeat(8_000);
    let mut acked: BTreeMap<u64, String> = BTreeMap::new();
    let mut refused = 0;
    for burst in 0.. {
        assert!(burst < 200, "the disk does not fill");
        for n in 0..50 {
            let id = format!("b{burst}-{n}");
            alice.send(&json!({"type": "msg.send", "id": id, "to": "bob", "body": body}));
        }
        for _ in 0..50 {
            let answer = alice.find("an answer", |frame| ["msg.ack", "error"].contains(&frame.kind()));
            if answer.kind() == "error" {
                answer.expect_error("unavailable");
                refused += 1;
            } else {
                acked.insert(answer.seq(), answer.text_of("id").to_owned());
            }
        }
        if refused >= 100 {
            break;
        }
    }
    server.kill();
    std::fs::remove_file(&ballast).expect("the ballast can be removed");
    server.restart();
    let mut alice = server.connect_device(Transport::Ws, "alice", "a1");
    let stored = by_number(&alice.history_after("d:alice:bob", 0));
    assert_eq!(stored, acked);
    server.metrics().assert_ledger_balances();
}

// --- a disk that fails ---------------------------------------------------------------------------------------------

/// Syncs fail, and what they were to write never reaches the disk: then nothing is acknowledged.
#[test]
fn a_disk_that_fails_to_sync_loses_nothing_acknowledged() {
    let good = Setup::new();
    let mut server = disk::with_fault(good.clone(), Fault::default()).start();
    let broken = server.data_dir().join(disk::BROKEN);
    let mut alice = server.connect_device(Transport::Ws, "alice", "a1");
    let mut acked = BTreeMap::new();
    for round in 0..3 {
        for n in 0..5 {
            let id = format!("good{round}-{n}");
            let seq = until("the disk is good", || try_send(&mut alice, &id, "x"));
            assert_eq!(acked.insert(seq, id), None);
        }
        std::fs::write(&broken, "").expect("a file can be written");
        for n in 0..3 {
            let id = format!("bad{round}-{n}");
            assert_eq!(try_send(&mut alice, &id, "x"), None, "acknowledged, and not on the disk");
        }
        answers_pings(&mut alice, round);
        std::fs::remove_file(&broken).expect("the file can be removed");
    }
    let seq = until("the disk is good again", || try_send(&mut alice, "last", "x"));
    assert_eq!(acked.insert(seq, "last".to_owned()), None);
    server.kill();
    let server = good.start();
    let mut alice = server.connect_device(Transport::Ws, "alice", "a1");
    assert_eq!(by_number(&alice.history_after("d:alice:bob", 0)), acked);
    server.metrics().assert_ledger_balances();
}

// --- a slow disk --------------------------------------------------------------------------------------------------

fn a_slow_disk_delays_no_pong(transport: Transport) {
    const DELAY: Duration = Duration::from_millis(1500);
    let good = Setup::new();
    let mut first = good.clone().start();
    first.connect_device(transport, "alice", "a1").tell("bob", "the first");
    first.signal("TERM");
    assert_eq!(first.wait_end(PATIENCE).code(), Some(0));
    let fault = Fault { sync_delay: DELAY, ..Fault::default() };
    let server = disk::with_fault(good, fault).start();
    let mut alice = server.connect_device(transport, "alice", "a1");
    for round in 0..3 {
        let began = Instant::now();
        alice.send(&json!({"type": "msg.send", "id": format!("slow{round}"), "to": "bob", "body": round}));
        // Each waits for its pong. All are answered before the message is.
        for n in 0..20 {
            let data = format!("{round}-{n}");
            alice.send(&json!({"type": "ping", "data": data}));
            let sent = Instant::now();
            match alice.reader.next(sent + PATIENCE) {
                Some(Event::Frame(frame)) => assert_eq!(
                    (frame.kind(), frame.json["data"].as_str()),
                    ("pong", Some(&*data)),
                    "after {:?}: {}",
                    began.elapsed(),
                    frame.text
                ),
                other => panic!("no pong, but {other:?}"),
            }
            assert!(sent.elapsed() < DELAY / 2, "a pong took {:?}", sent.elapsed());
        }
        let ack = alice.expect("msg.ack");
        assert_eq!(ack.text_of("id"), format!("slow{round}"));
        assert!(ack.at - began >= DELAY, "the disk was not slow: {:?}", ack.at - began);
    }
}

// --- somebody else's lock -----------------------------------------------------------------------------------------

/// Another program that holds the database's lock for writers.
struct Locker(Child);

impl Locker {
    fn hold(server: &Server) -> Self {
        const PROGRAM: &str = "import sqlite3, sys\n\
             db = sqlite3.connect(sys.argv[1], timeout=20, isolation_level=None)\n\
             db.execute('BEGIN IMMEDIATE')\n\
             print('held', flush=True)\n\
             sys.stdin.read()\n";
        let mut child = tools::python()
            .args(["-c", PROGRAM])
            .arg(server.data_dir().join("bowline.db"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("Python can be run");
        let mut line = String::new();
        let mut out = BufReader::new(child.stdout.take().expect("a pipe"));
        out.read_line(&mut line).expect("the pipe can be read");
        assert_eq!(line.trim(), "held");
        Self(child)
    }
}

impl Drop for Locker {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn a_database_locked_by_others_is_waited_out(transport: Transport) {
    let server = Server::start();
    let mut alice = server.connect_device(transport, "alice", "a1");
    assert_eq!(alice.tell("bob", 1).seq(), 1);
    let locker = Locker::hold(&server);
    alice.send(&json!({"type": "msg.send", "id": "locked", "to": "bob", "body": 2}));
    answers_pings(&mut alice, 0);
    alice.reply("locked").expect_error("unavailable");
    answers_pings(&mut alice, 1);
    drop(locker);
    let seq = until("the lock is gone", || {
        let answer = alice.request(&json!({"type": "msg.send", "id": "locked", "to": "bob", "body": 2}));
        (answer.kind() == "msg.ack").then(|| answer.seq())
    });
    assert_eq!(seq, 2);
    let bodies: Vec<Value> =
        alice.history_after("d:alice:bob", 0).iter().map(|message| message["body"].clone()).collect();
    assert_eq!(bodies, [json!(1), json!(2)]);
    server.metrics().assert_ledger_balances();
}
