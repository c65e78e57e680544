//! kill -9 at any moment: nothing acknowledged is lost, nothing comes twice, every number stays.

use bowline_tests::{
    Client, Login, Server, Transport,
    client::{Event, Reader, Writer},
    server::Addresses,
    wait,
};
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

on_both![
    every_acknowledged_message_survives_at_once,
    positions_unread_and_waiting_survive,
    what_was_pushed_and_not_acknowledged_waits_after_a_crash,
    the_same_id_gives_the_same_ack_after_a_crash,
    groups_roles_and_cleared_conversations_survive,
    a_restart_takes_the_same_ports_at_once,
];

/// Ends and starts the server, without a word to anybody.
fn crash(server: &mut Server) {
    server.kill();
    server.restart();
}

fn every_acknowledged_message_survives_at_once(transport: Transport) {
    let mut server = Server::start();
    for n in 1..=5 {
        let mut alice = server.connect(transport, "alice");
        let ack = alice.tell("bob", n);
        assert_eq!(ack.seq(), n);
        crash(&mut server);
        let mut bob = server.connect(transport, "bob");
        let last = bob.history_after("d:alice:bob", n - 1);
        assert_eq!(last.len(), 1, "{last:?}");
        assert_eq!((&last[0]["id"], &last[0]["ts"]), (&ack.json["id"], &ack.json["ts"]));
    }
}

fn positions_unread_and_waiting_survive(transport: Transport) {
    let mut server = Server::start();
    let mut alice = server.connect_device(transport, "alice", "a1");
    let mut bob = server.connect_device(transport, "bob", "b1");
    for n in 1..=10 {
        alice.tell("bob", n);
        bob.expect_push("d:alice:bob", n);
    }
    alice.tell("carol", "waits");
    bob.recv("d:alice:bob", 8);
    bob.read("d:alice:bob", 6);
    alice.expect_receipt("d:alice:bob", "delivered", "bob", 8);
    alice.expect_receipt("d:alice:bob", "read", "bob", 6);
    let lines = |server: &Server| -> Vec<Value> {
        [("alice", "a1"), ("bob", "b1")]
            .into_iter()
            .flat_map(|(user, device)| server.connect_device(transport, user, device).conversations())
            .collect()
    };
    let ledger = |server: &Server| {
        let metrics = server.metrics();
        metrics.assert_ledger_balances();
        ["accepted_total", "delivered_total", "expired_total", "waiting"]
            .map(|term| metrics.get(&format!("bowline_ledger_{term}")))
    };
    let before = (lines(&server), ledger(&server));
    assert_eq!(before.1, [11.0, 8.0, 0.0, 3.0]);
    crash(&mut server);
    assert_eq!((lines(&server), ledger(&server)), before);
    let mut bob = server.connect_device(transport, "bob", "b1");
    let notice = bob.expect("sync.notice");
    let line = &notice.list_of("conversations")[0];
    assert_eq!((&line["last_seq"], &line["unread"]), (&json!(10), &json!(4)), "{line}");
    let mut carol = server.connect(transport, "carol");
    assert_eq!(carol.expect("sync.notice").list_of("conversations")[0]["last_seq"], 1);
    // Life goes on at the next number.
    let mut alice = server.connect_device(transport, "alice", "a1");
    assert_eq!(alice.tell("bob", 11).seq(), 11);
    bob.expect_push("d:alice:bob", 11);
    bob.recv("d:alice:bob", 11);
    alice.expect_receipt("d:alice:bob", "delivered", "bob", 11);
    assert_eq!(ledger(&server), [12.0, 11.0, 0.0, 1.0]);
}

/// Between two attempts of the redelivery: what the device acknowledged is done, the rest is announced, and what comes
/// afterwards is repeated as before.
fn what_was_pushed_and_not_acknowledged_waits_after_a_crash(transport: Transport) {
    let mut server = Server::with(&[("router.ack_timeout_ms", "400")]);
    let mut alice = server.connect(transport, "alice");
    let mut bob = server.connect_device(transport, "bob", "phone");
    for n in 1..=3 {
        alice.tell("bob", n);
        bob.expect_push("d:alice:bob", n);
    }
    bob.recv("d:alice:bob", 1);
    alice.expect_receipt("d:alice:bob", "delivered", "bob", 1);
    bob.find("the second attempt", |frame| frame.json["redelivered"] == true);
    crash(&mut server);
    let mut alice = server.connect(transport, "alice");
    let mut bob = server.connect_device(transport, "bob", "phone");
    let notice = bob.expect("sync.notice");
    let expected = json!([{"conversation_id": "d:alice:bob", "last_seq": 3, "first_seq": 1, "unread": 3}]);
    assert_eq!(notice.json["conversations"], expected);
    // Announced, so not pushed; and what comes above the gap is not repeated before the gap is closed.
    alice.tell("bob", 4);
    assert!(!bob.expect_push("d:alice:bob", 4).text.contains("redelivered"));
    let quiet = bob.listen(Duration::from_millis(1000));
    assert!(quiet.iter().all(|frame| frame.kind() != "msg.push"), "{quiet:?}");
    assert_eq!(bob.history_after("d:alice:bob", 1).len(), 3);
    bob.recv("d:alice:bob", 4);
    alice.expect_receipt("d:alice:bob", "delivered", "bob", 4);
    alice.tell("bob", 5);
    bob.expect_push("d:alice:bob", 5);
    let again = bob.expect_push("d:alice:bob", 5);
    assert_eq!(again.json["redelivered"], true);
    server.metrics().assert_ledger_balances();
}

fn the_same_id_gives_the_same_ack_after_a_crash(transport: Transport) {
    let mut server = Server::start();
    let mut alice = server.connect(transport, "alice");
    let send = |body: u64| json!({"type": "msg.send", "id": "once", "to": "bob", "body": body});
    let before = alice.request(&send(1)).expect_kind("msg.ack");
    crash(&mut server);
    let mut alice = server.connect(transport, "alice");
    assert_eq!(alice.request(&send(1)).json, before.json);
    alice.request(&send(2)).expect_error("conflict");
    assert_eq!(alice.history_after("d:alice:bob", 0).len(), 1);
}

fn groups_roles_and_cleared_conversations_survive(transport: Transport) {
    let mut server = Server::start();
    let mut alice = server.connect(transport, "alice");
    let fields =
        json!({"group_id": "crew", "name": "Crew", "members": ["bob", "carol"], "meta": {"colour": "red"}});
    alice.demand("conversation.create", fields);
    alice.demand("group.role", json!({"conversation_id": "g:crew", "user": "bob", "role": "admin"}));
    alice.say("g:crew", 1);
    alice.demand("group.add", json!({"conversation_id": "g:crew", "users": ["dave"]}));
    alice.demand("conversation.clear", json!({"conversation_id": "g:crew"}));
    crash(&mut server);
    let mut alice = server.connect(transport, "alice");
    let line = alice.conversation("g:crew");
    assert_eq!(
        [&line["name"], &line["meta"], &line["first_seq"], &line["unread"]],
        [&json!("Crew"), &json!({"colour": "red"}), &json!(2), &json!(0)],
        "{line}"
    );
    let mut dave = server.connect(transport, "dave");
    assert_eq!(dave.conversation("g:crew")["first_seq"], 2);
    let mut bob = server.connect(transport, "bob");
    bob.demand("group.rename", json!({"conversation_id": "g:crew", "name": "By an admin"}));
    let mut carol = server.connect(transport, "carol");
    carol.ask("group.rename", json!({"conversation_id": "g:crew", "name": "No"})).expect_error("forbidden");
    assert_eq!(carol.say("g:crew", 2).seq(), 2);
}

fn a_restart_takes_the_same_ports_at_once(transport: Transport) {
    let mut server = Server::start();
    let addresses = server.addresses();
    let _open: Vec<Client> = (0..20).map(|n| server.connect(transport, &format!("user{n}"))).collect();
    server.kill();
    server.restart_in_place();
    assert_eq!(server.addresses(), addresses);
    server.connect(transport, "alice");
}

// --- ten kills in one run -----------------------------------------------------------------------------------------

const PAIRS: u64 = 5;
/// Messages of each pair.
const EACH: u64 = 10_000;
const KILLS: u64 = 10;
const LIMIT: Duration = Duration::from_secs(400);

/// What the clients of the run share.
struct Run {
    addresses: Mutex<Addresses>,
    acked: AtomicU64,
    end: Instant,
}

impl Run {
    /// Connects as soon as there is a server.
    fn connect(&self, transport: Transport, user: &str) -> Client {
        let left = self.end.saturating_duration_since(Instant::now());
        wait::until_within(left, "there is a server", || {
            let addresses = *self.addresses.lock().unwrap_or_else(PoisonError::into_inner);
            Login::new(addresses, user).device("only").try_connect(transport).ok()
        })
    }
}

fn transport_of(pair: u64) -> Transport {
    if pair.is_multiple_of(2) { Transport::Ws } else { Transport::Tcp }
}

/// Sends all messages of a pair, up to 200 without an ack, and sends what has no ack again after each crash. Gives the
/// number of each.
fn send_all(run: &Run, pair: u64) -> Vec<u64> {
    let (user, to) = (format!("sender{pair}"), format!("receiver{pair}"));
    let mut acked: Vec<u64> = Vec::new();
    while (acked.len() as u64) < EACH {
        let Client { mut reader, mut writer, .. } = run.connect(transport_of(pair), &user);
        let mut sent = acked.len() as u64;
        'connection: while (acked.len() as u64) < EACH {
            while sent < EACH && sent - (acked.len() as u64) < 200 {
                let id = format!("{sent}");
                if writer.send(&json!({"type": "msg.send", "id": id, "to": to, "body": sent})).is_err() {
                    break 'connection;
                }
                sent += 1;
            }
            match reader.next(run.end) {
                Some(Event::Frame(frame)) => match frame.kind() {
                    "msg.ack" => {
                        assert_eq!(frame.text_of("id"), acked.len().to_string(), "acks come in order");
                        acked.push(frame.seq());
                        run.acked.fetch_add(1, Ordering::Relaxed);
                    }
                    "msg.receipt" | "sync.notice" | "ping" => {}
                    _ => panic!("{user} received {}", frame.text),
                },
                Some(Event::Closed(_)) => break,
                Some(_) => {}
                None => panic!("{user} has {} acks at the end of the time", acked.len()),
            }
        }
    }
    acked
}

/// Receives until all are there, fetching what was announced or skipped. Gives the id and body of each number.
fn receive_all(run: &Run, pair: u64) -> BTreeMap<u64, (String, u64)> {
    let user = format!("receiver{pair}");
    let conversation = format!("d:receiver{pair}:sender{pair}");
    let mut have: BTreeMap<u64, (String, u64)> = BTreeMap::new();
    while (have.len() as u64) < EACH {
        let Client { mut reader, mut writer, .. } = run.connect(transport_of(pair), &user);
        let _ = receive_some(run, &conversation, &mut reader, &mut writer, &mut have);
    }
    have
}

/// Until everything is there, or the connection ends (`Err`).
fn receive_some(
    run: &Run,
    conversation: &str,
    reader: &mut Reader,
    writer: &mut Writer,
    have: &mut BTreeMap<u64, (String, u64)>,
) -> std::io::Result<()> {
    let (mut asked, mut seen) = (false, 0);
    // What lies between is asked for once; pushes go on meanwhile.
    let ask = |writer: &mut Writer, have: &BTreeMap<u64, (String, u64)>, asked: &mut bool| {
        if std::mem::replace(asked, true) {
            return Ok(());
        }
        let after = have.len() as u64;
        let id = format!("after{after}");
        writer.send(
            &json!({"type": "history", "id": id, "conversation_id": conversation, "after_seq": after, "limit": 200}),
        )
    };
    // Asked once at the start too: a notice may have been lost with the connection before.
    ask(writer, have, &mut asked)?;
    loop {
        let frame = match reader.next(run.end) {
            Some(Event::Frame(frame)) => frame,
            Some(Event::Closed(_)) => return Err(std::io::ErrorKind::ConnectionReset.into()),
            Some(_) => continue,
            None => panic!("{conversation}: {} of {} at the end of the time", have.len(), EACH),
        };
        let messages: Vec<Value> = match frame.kind() {
            "msg.push" => vec![frame.json.clone()],
            "history.page" => {
                asked = false;
                frame.list_of("messages").to_vec()
            }
            "sync.notice" => {
                ask(writer, have, &mut asked)?;
                continue;
            }
            // Nobody has written to this conversation yet.
            "error" if frame.json["code"] == "forbidden" && have.is_empty() => {
                asked = false;
                continue;
            }
            "msg.receipt" | "ping" => continue,
            _ => panic!("{conversation}: received {}", frame.text),
        };
        let before = have.len() as u64;
        for message in &messages {
            let seq = message["seq"].as_u64().expect("a number");
            let id = message["id"].as_str().expect("an id").to_owned();
            let content = (id, message["body"].as_u64().expect("the body that was sent"));
            match have.get(&seq) {
                Some(known) => assert_eq!(*known, content, "{conversation}: {seq} has changed"),
                // Only what joins on is taken; the rest is asked for in its turn.
                None if seq == have.len() as u64 + 1 => {
                    have.insert(seq, content);
                }
                None => {}
            }
        }
        let now = have.len() as u64;
        seen = messages.iter().filter_map(|message| message["seq"].as_u64()).fold(seen, u64::max);
        if seen > now || frame.json["more"] == json!(true) {
            ask(writer, have, &mut asked)?;
        }
        if now / 50 > before / 50 || now == EACH {
            writer.send(&json!({"type": "msg.recv", "conversation_id": conversation, "seq": now}))?;
            writer.send(&json!({"type": "msg.read", "conversation_id": conversation, "seq": now / 2}))?;
        }
        if now == EACH {
            return Ok(());
        }
    }
}

#[test]
fn ten_kills_in_fifty_thousand_messages_lose_double_and_reorder_nothing() {
    let _turn = bowline_tests::turn();
    let mut server = Server::start();
    let run = Arc::new(Run {
        addresses: Mutex::new(server.addresses()),
        acked: AtomicU64::new(0),
        end: Instant::now() + LIMIT,
    });
    let senders: Vec<_> = (0..PAIRS)
        .map(|pair| {
            let run = run.clone();
            std::thread::spawn(move || send_all(&run, pair))
        })
        .collect();
    let receivers: Vec<_> = (0..PAIRS)
        .map(|pair| {
            let run = run.clone();
            std::thread::spawn(move || receive_all(&run, pair))
        })
        .collect();
    for kill in 1..=KILLS {
        let due = kill * PAIRS * EACH / (KILLS + 1);
        wait::until_within(LIMIT, "the run has come as far as the next kill", || {
            let broken = senders.iter().any(|t| t.is_finished()) || receivers.iter().any(|t| t.is_finished());
            let far = run.acked.load(Ordering::Relaxed) >= due;
            // Why a client gave up is told where it is joined.
            (far || broken).then_some(())
        });
        crash(&mut server);
        *run.addresses.lock().unwrap_or_else(PoisonError::into_inner) = server.addresses();
    }
    let acked: Vec<Vec<u64>> =
        senders.into_iter().map(|t| t.join().expect("every message is acked")).collect();
    let received: Vec<_> =
        receivers.into_iter().map(|t| t.join().expect("every message is received")).collect();

    for pair in 0..PAIRS {
        let (acked, received) = (&acked[pair as usize], &received[pair as usize]);
        // The numbers are 1 to n, in the order of sending, each once.
        assert_eq!(*acked, (1..=EACH).collect::<Vec<_>>(), "pair {pair}: the acks");
        let expected = (1..=EACH).map(|seq| (seq, ((seq - 1).to_string(), seq - 1)));
        assert!(received.iter().map(|(seq, content)| (*seq, content.clone())).eq(expected), "pair {pair}");
        // And the store says the same.
        let mut sender = server.login(&format!("sender{pair}")).device("only").connect(transport_of(pair));
        let history = sender.history_after(&format!("d:receiver{pair}:sender{pair}"), 0);
        assert_eq!(history.len() as u64, EACH, "pair {pair}");
        for (n, message) in history.iter().enumerate() {
            assert_eq!(
                (message["seq"].as_u64(), message["body"].as_u64()),
                (Some(n as u64 + 1), Some(n as u64))
            );
        }
    }
    // A receiver's last word may have gone down with its connection or with the server; a client says it again.
    for pair in 0..PAIRS {
        let mut receiver =
            server.login(&format!("receiver{pair}")).device("only").connect(transport_of(pair));
        let conversation = format!("d:receiver{pair}:sender{pair}");
        receiver.recv(&conversation, EACH);
        receiver.read(&conversation, EACH / 2);
        receiver.settle();
    }
    let settled = |server: &Server| {
        wait::until("everything is counted as delivered", || {
            let metrics = server.metrics();
            metrics.assert_ledger_balances();
            (metrics.get("bowline_ledger_delivered_total") == (PAIRS * EACH) as f64).then_some(())
        });
        let metrics = server.metrics();
        assert_eq!(metrics.get("bowline_ledger_accepted_total"), (PAIRS * EACH) as f64);
        assert_eq!(metrics.get("bowline_ledger_waiting"), 0.0);
        let lines: Vec<Value> = (0..PAIRS)
            .flat_map(|pair| {
                let login = server.login(&format!("receiver{pair}")).device("only");
                login.connect(transport_of(pair)).conversations()
            })
            .collect();
        for line in &lines {
            assert_eq!((&line["read_seq"], &line["unread"]), (&json!(EACH / 2), &json!(EACH / 2)), "{line}");
        }
        lines
    };
    let before = settled(&server);
    crash(&mut server);
    assert_eq!(settled(&server), before, "positions and counts are as before");
}
