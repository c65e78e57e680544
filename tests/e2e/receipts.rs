//! Receipts: delivered and read, to whom they go; and unread counts.

use bowline_tests::{Client, Server, Transport};
use serde_json::{Value, json};

on_both![
    delivered_goes_to_all_devices_of_the_sender_once,
    read_goes_to_the_sender_and_to_the_readers_other_devices,
    read_implies_received,
    own_messages_make_no_receipts,
    a_number_above_the_newest_counts_as_the_newest,
    in_a_group_receipts_go_to_those_whose_messages_are_covered,
    unread_counts_what_others_sent_above_the_read_position,
    unread_equals_a_simple_model,
    the_list_shows_how_far_the_peer_is,
    a_receipt_reaches_a_sender_who_was_away_by_the_list,
];

fn receipts(frames: &[bowline_tests::Frame]) -> Vec<(String, u64, String)> {
    frames
        .iter()
        .filter(|frame| frame.kind() == "msg.receipt")
        .map(|frame| (frame.text_of("kind").to_owned(), frame.seq(), frame.text_of("user_id").to_owned()))
        .collect()
}

const SHORT: std::time::Duration = std::time::Duration::from_millis(400);

fn delivered_goes_to_all_devices_of_the_sender_once(transport: Transport) {
    let server = Server::start();
    let mut senders = ["a1", "a2"].map(|device| server.connect_device(transport, "alice", device));
    let mut receivers = ["b1", "b2"].map(|device| server.connect_device(transport, "bob", device));
    senders[0].tell("bob", "hello");
    let [first, second] = &mut receivers;
    first.expect_push("d:alice:bob", 1);
    second.expect_push("d:alice:bob", 1);
    first.recv("d:alice:bob", 1);
    for sender in &mut senders {
        let receipt = sender.expect_receipt("d:alice:bob", "delivered", "bob", 1);
        assert_eq!(receipt.seq(), 1);
        assert!(receipt.number_of("ts") > 1_600_000_000_000, "{}", receipt.text);
    }
    // The second device of the same user changes nothing.
    second.recv("d:alice:bob", 1);
    second.settle();
    for client in senders.iter_mut().chain(&mut receivers) {
        client.expect_no("msg.receipt");
    }
}

fn read_goes_to_the_sender_and_to_the_readers_other_devices(transport: Transport) {
    let server = Server::start();
    let mut alice = server.connect_device(transport, "alice", "a1");
    let mut phone = server.connect_device(transport, "bob", "phone");
    let mut laptop = server.connect_device(transport, "bob", "laptop");
    for n in 1..=3 {
        alice.tell("bob", n);
    }
    for n in 1..=3 {
        phone.expect_push("d:alice:bob", n);
    }
    phone.read("d:alice:bob", 2);
    assert_eq!(alice.expect_receipt("d:alice:bob", "read", "bob", 2).seq(), 2);
    assert_eq!(laptop.expect_receipt("d:alice:bob", "read", "bob", 2).seq(), 2);
    let own = phone.listen(SHORT);
    assert!(own.iter().all(|frame| frame.kind() != "msg.receipt"), "the reading device knows: {own:?}");
    assert_eq!((phone.unread("d:alice:bob"), laptop.unread("d:alice:bob")), (1, 1));
}

fn read_implies_received(transport: Transport) {
    let server = Server::with(&[("router.ack_timeout_ms", "300")]);
    let mut alice = server.connect(transport, "alice");
    let mut bob = server.connect_device(transport, "bob", "phone");
    alice.tell("bob", 1);
    bob.expect_push("d:alice:bob", 1);
    bob.read("d:alice:bob", 1);
    alice.expect_receipt("d:alice:bob", "read", "bob", 1);
    // No repetition, nothing that waits, delivered in the ledger.
    let more = bob.listen(std::time::Duration::from_millis(1200));
    assert!(more.iter().all(|frame| frame.kind() != "msg.push"), "{more:?}");
    let metrics = server.metrics();
    assert_eq!(metrics.get("bowline_ledger_delivered_total"), 1.0);
    metrics.assert_ledger_balances();
    bob.close();
    let mut bob = server.connect_device(transport, "bob", "phone");
    bob.settle();
    bob.expect_no("sync.notice");
    let line = alice.conversation("d:alice:bob");
    assert_eq!((&line["peer_recv_seq"], &line["peer_read_seq"]), (&json!(1), &json!(1)), "{line}");
}

fn own_messages_make_no_receipts(transport: Transport) {
    let server = Server::start();
    let mut phone = server.connect_device(transport, "alice", "phone");
    let mut laptop = server.connect_device(transport, "alice", "laptop");
    phone.tell("bob", "hello");
    laptop.expect_push("d:alice:bob", 1);
    laptop.recv("d:alice:bob", 1);
    laptop.read("d:alice:bob", 1);
    laptop.settle();
    let seen = phone.listen(SHORT);
    assert!(
        receipts(&seen).iter().all(|(kind, ..)| kind != "delivered"),
        "alice is no recipient of her own message: {seen:?}"
    );
    assert_eq!(server.metrics().get("bowline_ledger_delivered_total"), 0.0);
}

fn a_number_above_the_newest_counts_as_the_newest(transport: Transport) {
    let server = Server::start();
    let mut alice = server.connect(transport, "alice");
    let mut bob = server.connect(transport, "bob");
    for n in 1..=2 {
        alice.tell("bob", n);
        bob.expect_push("d:alice:bob", n);
    }
    bob.read("d:alice:bob", 1_000_000);
    assert_eq!(alice.expect_receipt("d:alice:bob", "read", "bob", 2).seq(), 2);
    assert_eq!(bob.conversation("d:alice:bob")["read_seq"], 2);
    // What comes later is not read by that.
    alice.tell("bob", 3);
    bob.expect_push("d:alice:bob", 3);
    assert_eq!(bob.unread("d:alice:bob"), 1);
}

fn in_a_group_receipts_go_to_those_whose_messages_are_covered(transport: Transport) {
    let server = Server::start();
    let users = ["alice", "bob", "carol", "dave"];
    let made = json!({"group_id": "crew", "members": users, "owner": "alice"});
    server.post("/api/v1/groups", &made).expect(201);
    let [mut alice, mut bob, mut carol, mut dave] = users.map(|user| server.connect(transport, user));
    alice.say("g:crew", 1);
    bob.say("g:crew", 2);
    alice.say("g:crew", 3);
    for seq in 1..=3 {
        carol.expect_push("g:crew", seq);
    }
    carol.recv("g:crew", 2);
    alice.expect_receipt("g:crew", "delivered", "carol", 1);
    bob.expect_receipt("g:crew", "delivered", "carol", 2);
    carol.read("g:crew", 3);
    alice.expect_receipt("g:crew", "read", "carol", 3);
    bob.expect_receipt("g:crew", "read", "carol", 2);
    let seen = dave.listen(SHORT);
    assert_eq!(receipts(&seen), [], "dave sent nothing");
    // From 3 to 3 there was only a message of alice: bob had no receipt for `delivered` up to 3 to get.
    let own = carol.listen(SHORT);
    assert_eq!(receipts(&own), [], "carol reads, others are told");
}

fn unread_counts_what_others_sent_above_the_read_position(transport: Transport) {
    let server = Server::start();
    let mut alice = server.connect(transport, "alice");
    let mut bob = server.connect(transport, "bob");
    for n in 1..=3 {
        alice.tell("bob", n);
    }
    assert_eq!((alice.unread("d:alice:bob"), bob.unread("d:alice:bob")), (0, 3));
    // Sending is not reading.
    bob.tell("alice", 4);
    assert_eq!((alice.unread("d:alice:bob"), bob.unread("d:alice:bob")), (1, 3));
    bob.read("d:alice:bob", 2);
    alice.expect_receipt("d:alice:bob", "read", "bob", 2);
    assert_eq!(bob.unread("d:alice:bob"), 1, "3 is unread, 4 is one's own");
    bob.read("d:alice:bob", 4);
    alice.expect_receipt("d:alice:bob", "read", "bob", 3);
    assert_eq!(bob.unread("d:alice:bob"), 0);
}

fn unread_equals_a_simple_model(transport: Transport) {
    let server = Server::start();
    let users = ["alice", "bob", "carol"];
    let made = json!({"group_id": "crew", "members": users, "owner": "alice"});
    server.post("/api/v1/groups", &made).expect(201);
    let mut clients = users.map(|user| server.connect(transport, user));
    let (mut senders, mut read): (Vec<usize>, [u64; 3]) = (Vec::new(), [0; 3]);
    // A fixed walk of a small generator: the same at every run.
    let mut state: u32 = 12345;
    let mut roll = |n: u32| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 16) % n
    };
    for step in 0..120 {
        let who = roll(3) as usize;
        if roll(3) < 2 {
            senders.push(who);
            assert_eq!(clients[who].say("g:crew", step).seq(), senders.len() as u64);
        } else if !senders.is_empty() {
            let seq = u64::from(roll(senders.len() as u32)) + 1;
            clients[who].read("g:crew", seq);
            read[who] = read[who].max(seq);
        }
        if step % 10 == 9 {
            for (user, client) in clients.iter_mut().enumerate() {
                let model = senders[read[user] as usize..].iter().filter(|sender| **sender != user).count();
                assert_eq!(client.unread("g:crew"), model as u64, "{} after step {step}", users[user]);
            }
        }
    }
}

fn the_list_shows_how_far_the_peer_is(transport: Transport) {
    let server = Server::start();
    let mut alice = server.connect(transport, "alice");
    let mut bob = server.connect(transport, "bob");
    let peer = |client: &mut Client| {
        let line = client.conversation("d:alice:bob");
        [line["peer_recv_seq"].clone(), line["peer_read_seq"].clone()].map(|n| n.as_u64().unwrap_or(0))
    };
    for n in 1..=3 {
        alice.tell("bob", n);
        bob.expect_push("d:alice:bob", n);
    }
    assert_eq!(peer(&mut alice), [0, 0]);
    bob.recv("d:alice:bob", 3);
    alice.expect_receipt("d:alice:bob", "delivered", "bob", 3);
    assert_eq!(peer(&mut alice), [3, 0]);
    bob.read("d:alice:bob", 2);
    alice.expect_receipt("d:alice:bob", "read", "bob", 2);
    assert_eq!(peer(&mut alice), [3, 2]);
    assert_eq!(alice.conversation("d:alice:bob")["kind"], json!("direct"));
}

fn a_receipt_reaches_a_sender_who_was_away_by_the_list(transport: Transport) {
    let server = Server::start();
    let mut alice = server.connect_device(transport, "alice", "phone");
    alice.tell("bob", "read this while I am away");
    alice.close();
    let mut bob = server.connect(transport, "bob");
    bob.expect("sync.notice");
    bob.read("d:alice:bob", 1);
    bob.settle();
    let mut alice = server.connect_device(transport, "alice", "phone");
    let line: Value = bowline_tests::until("the position is there", || {
        Some(alice.conversation("d:alice:bob")).filter(|line| line["peer_read_seq"] == 1)
    });
    assert_eq!(line["peer_recv_seq"], 1, "{line}");
}
