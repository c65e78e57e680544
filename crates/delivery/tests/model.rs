//! Random lives of a few users and devices against a naive model: unread counts, positions, order, completeness,
//! what retention takes, who sees what of a group, the ledger.

#[allow(dead_code)]
mod support;

use bowline_delivery::{Retention, persist::Message};
use bowline_protocol::{
    CloseCode, DeviceId, Seq, UserId,
    ids::GroupId,
    link::{Answer, Request, Up},
};
use proptest::prelude::*;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use support::{MemStore, World, config, read, recv};

const USERS: [&str; 3] = ["a", "b", "c"];
const DEVICES: [&str; 3] = ["1", "2", "3"];
const CONVERSATIONS: [&str; 4] = ["d:a:b", "d:a:c", "d:b:c", "g:t"];

#[derive(Debug, Clone)]
enum Op {
    Connect(usize, usize),
    Disconnect(usize, usize),
    /// The device goes on with its session: its connection is gone, or only silent.
    Resume {
        user: usize,
        device: usize,
        is_silent: bool,
    },
    Send {
        user: usize,
        device: usize,
        conversation: usize,
        count: usize,
    },
    Receive {
        user: usize,
        device: usize,
        conversation: usize,
        back: u64,
        read: bool,
    },
    Clear {
        user: usize,
        device: usize,
        conversation: usize,
    },
    Leave(usize),
    Join(usize),
    Forget(usize, usize),
    Fail,
    Advance(u64),
    Restart,
}

fn op() -> impl Strategy<Value = Op> {
    let (user, device, conversation) = (0..USERS.len(), 0..DEVICES.len(), 0..CONVERSATIONS.len());
    prop_oneof![
        3 => (user.clone(), device.clone()).prop_map(|(u, d)| Op::Connect(u, d)),
        1 => (user.clone(), device.clone()).prop_map(|(u, d)| Op::Disconnect(u, d)),
        2 => (user.clone(), device.clone(), any::<bool>())
            .prop_map(|(user, device, is_silent)| Op::Resume { user, device, is_silent }),
        6 => (user.clone(), device.clone(), conversation.clone(), 1..4usize)
            .prop_map(|(user, device, conversation, count)| Op::Send { user, device, conversation, count }),
        5 => (user.clone(), device.clone(), conversation.clone(), 0..3u64, any::<bool>())
            .prop_map(|(user, device, conversation, back, read)| Op::Receive { user, device, conversation, back, read }),
        1 => (user.clone(), device.clone(), conversation).prop_map(|(user, device, conversation)| Op::Clear { user, device, conversation }),
        1 => user.clone().prop_map(Op::Leave),
        1 => user.clone().prop_map(Op::Join),
        1 => (user, device).prop_map(|(u, d)| Op::Forget(u, d)),
        1 => Just(Op::Fail),
        2 => (1..8000u64).prop_map(Op::Advance),
        1 => Just(Op::Restart),
    ]
}

/// Off most of the time; else so that a life of a few minutes meets it.
fn retention() -> impl Strategy<Value = Retention> {
    let (ages, counts, ids) =
        (prop_oneof![Just(0), 1..30_000u64], prop_oneof![Just(0), 1..6u64], 0..20_000u64);
    (ages, counts, ids).prop_map(|(age_ms_max, messages_max, ids_ms_min)| Retention {
        age_ms_max,
        messages_max,
        ids_ms_min,
    })
}

/// One connection as its client sees it.
#[derive(Default)]
struct Client {
    conn: u64,
    /// The number in its session's name.
    session: u64,
    /// The newest first push of each conversation; the next one has to be above.
    pushed: BTreeMap<String, Seq>,
}

#[derive(Default)]
struct Model {
    clients: BTreeMap<(usize, usize), Client>,
    /// What each device was pushed or told of, ever.
    told: BTreeMap<(usize, usize, String), BTreeSet<Seq>>,
    known: BTreeSet<(usize, usize)>,
    /// Up to where each device has everything.
    position: BTreeMap<(usize, usize, String), Seq>,
    read: BTreeMap<(usize, String), Seq>,
    first: BTreeMap<(usize, String), Seq>,
    acked: BTreeMap<String, (String, Seq)>,
    /// Sessions whose connection was closed.
    lost: BTreeMap<(usize, usize), u64>,
    next_id: u64,
}

impl Model {
    /// Takes what the clients were sent, and checks it.
    fn absorb(&mut self, world: &mut World) {
        for (&(user, device), client) in &mut self.clients {
            for frame in world.take(client.conn) {
                let conversation = frame["conversation_id"].as_str().unwrap_or_default().to_owned();
                let seq = frame["seq"].as_u64().unwrap_or_default();
                if frame["type"] == "msg.push" {
                    let place = &world.store.conversations[conversation.as_str()];
                    assert!(
                        place.members.contains_key(USERS[user]),
                        "{conversation} {seq} came after leaving"
                    );
                }
                match frame["type"].as_str().unwrap_or_default() {
                    "msg.push" if frame["redelivered"] != true => {
                        let before = client.pushed.insert(conversation.clone(), seq).unwrap_or(0);
                        assert!(seq > before, "{conversation}: push {seq} after {before}");
                        self.told.entry((user, device, conversation)).or_default().insert(seq);
                    }
                    "msg.push" => {
                        let told = self.told.get(&(user, device, conversation));
                        assert!(told.is_some_and(|t| t.contains(&seq)), "redelivered {seq} was never pushed");
                    }
                    "sync.notice" => {
                        for row in frame["conversations"].as_array().expect("rows") {
                            let id = row["conversation_id"].as_str().expect("an id").to_owned();
                            let numbers = 1..=row["last_seq"].as_u64().expect("a number");
                            self.told.entry((user, device, id)).or_default().extend(numbers);
                        }
                    }
                    "msg.ack" => {
                        let id = frame["id"].as_str().expect("an id").to_owned();
                        let place = (conversation, seq);
                        let before = self.acked.insert(id.clone(), place.clone());
                        assert!(
                            before.is_none_or(|b| b == place),
                            "{id} was acknowledged twice, differently"
                        );
                    }
                    _ => {}
                }
            }
        }
    }

    /// A resumed session has been pushed everything that this device has not acknowledged, each once and in order,
    /// and nothing was announced.
    fn check_resumed(&self, world: &World, user: usize, device: usize, conn: u64) {
        let frames = world.sent.get(&conn).map_or(&[][..], Vec::as_slice);
        assert!(frames.iter().all(|frame| frame["type"] != "sync.notice"), "{frames:?}");
        for (id, conversation) in &world.store.conversations {
            let Some(member) = conversation.members.get(USERS[user]) else { continue };
            let of = |frame: &&Value| frame["type"] == "msg.push" && frame["conversation_id"] == **id;
            let pushed: Vec<_> = frames.iter().filter(of).map(|frame| frame["seq"].as_u64()).collect();
            let position = member.position(&DeviceId::trusted(DEVICES[device]));
            let own = |m: &Message| *m.from == *USERS[user] && m.device.as_deref() == Some(DEVICES[device]);
            let wanted = conversation.messages.iter().filter(|m| m.seq > position && !own(m));
            assert_eq!(pushed, wanted.map(|m| Some(m.seq)).collect::<Vec<_>>(), "{id} from {position} on");
        }
    }

    /// The user begins where the conversation stands.
    fn begin_at(&mut self, user: usize, id: &str, last: Seq) {
        self.read.insert((user, id.to_owned()), last);
        self.first.insert((user, id.to_owned()), last + 1);
        for device in 0..DEVICES.len() {
            self.position.insert((user, device, id.to_owned()), last);
        }
    }

    /// A device says that it has everything up to `seq`; its own messages behind that it has as well.
    fn receive(&mut self, world: &World, user: usize, device: usize, id: &str, seq: Seq) {
        let position = self.position.entry((user, device, id.to_owned())).or_default();
        *position = seq.max(*position);
        let Some(conversation) = world.store.conversations.get(id) else { return };
        // What is gone needs not be had.
        *position = conversation.floor.max(*position);
        let own = |m: &Message| *m.from == *USERS[user] && m.device.as_deref() == Some(DEVICES[device]);
        while conversation.message(*position + 1).is_some_and(own) {
            *position += 1;
        }
    }

    fn delivered(&self, user: usize, id: &str) -> Seq {
        (0..DEVICES.len())
            .filter_map(|d| self.position.get(&(user, d, id.to_owned())))
            .copied()
            .max()
            .unwrap_or(0)
    }

    fn conn(&self, user: usize, device: usize) -> Option<u64> {
        self.clients.get(&(user, device)).map(|c| c.conn)
    }
}

fn is_member(world: &World, user: usize, conversation: usize) -> bool {
    match CONVERSATIONS[conversation] {
        "g:t" => world.store.conversations["g:t"].members.contains_key(USERS[user]),
        direct => direct.split(':').skip(1).any(|part| part == USERS[user]),
    }
}

fn run(ops: Vec<Op>, retention: Retention) {
    let mut world = World::with(bowline_delivery::Config { retention, ..config() }, MemStore::default());
    let mut model = Model::default();
    let members = USERS.iter().map(|u| UserId::trusted(u)).collect();
    let group = GroupId::trusted("t");
    let group_id = Some(group.clone());
    world.request(Request::GroupCreate { group_id, name: None, members, owner: None, meta: None });
    for op in ops {
        match op {
            Op::Connect(user, device) => {
                let conn = world.connect(USERS[user], DEVICES[device]);
                if model.known.insert((user, device)) {
                    for id in CONVERSATIONS {
                        let delivered = model.delivered(user, id);
                        model.position.insert((user, device, id.to_owned()), delivered);
                    }
                }
                model.lost.remove(&(user, device));
                let client = Client { conn, session: conn, ..Client::default() };
                model.clients.insert((user, device), client);
            }
            Op::Resume { user, device, is_silent } => {
                let open = model.clients.remove(&(user, device));
                if let Some(client) = open.as_ref().filter(|_| !is_silent) {
                    world.up(client.conn, Up::Closed(CloseCode::Bye));
                }
                let lost = model.lost.remove(&(user, device));
                let Some(session) = open.map(|client| client.session).or(lost) else { continue };
                let conn = world.resume(USERS[user], DEVICES[device], Some(&format!("s{session}")));
                let is_resumed = world.accepted[&conn];
                let session = if is_resumed { session } else { conn };
                model.clients.insert((user, device), Client { conn, session, ..Client::default() });
                if is_resumed {
                    model.check_resumed(&world, user, device, conn);
                }
            }
            Op::Disconnect(user, device) => {
                if let Some(client) = model.clients.remove(&(user, device)) {
                    world.disconnect(client.conn);
                    model.lost.insert((user, device), client.session);
                }
            }
            Op::Send { user, device, conversation, count } => {
                let Some(conn) = model.conn(user, device).filter(|_| is_member(&world, user, conversation))
                else {
                    continue;
                };
                let texts: Vec<String> = (0..count)
                    .map(|_| {
                        model.next_id += 1;
                        let (id, to) = (model.next_id, CONVERSATIONS[conversation]);
                        format!(r#"{{"type":"msg.send","id":"m{id}","conversation_id":"{to}","body":{id}}}"#)
                    })
                    .collect();
                let frames: Vec<(u64, &str)> = texts.iter().map(|t| (conn, t.as_str())).collect();
                world.frames(&frames);
                let position = model.position[&(user, device, CONVERSATIONS[conversation].to_owned())];
                model.receive(&world, user, device, CONVERSATIONS[conversation], position);
            }
            Op::Receive { user, device, conversation, back, read: is_read } => {
                let Some(conn) = model.conn(user, device).filter(|_| is_member(&world, user, conversation))
                else {
                    continue;
                };
                let id = CONVERSATIONS[conversation];
                let seq = world.last_seq(id).saturating_sub(back);
                model.receive(&world, user, device, id, seq);
                if is_read {
                    let before = model.read.entry((user, id.into())).or_default();
                    *before = seq.max(*before);
                    world.frame(conn, &read(id, seq));
                } else {
                    world.frame(conn, &recv(id, seq));
                }
            }
            Op::Clear { user, device, conversation } => {
                let Some(conn) = model.conn(user, device).filter(|_| is_member(&world, user, conversation))
                else {
                    continue;
                };
                let id = CONVERSATIONS[conversation];
                world.frame(
                    conn,
                    &format!(r#"{{"type":"conversation.clear","id":"q","conversation_id":"{id}"}}"#),
                );
                let answers: Vec<Value> = world.sent.get(&conn).cloned().unwrap_or_default();
                if answers.iter().any(|f| f["type"] == "ok") {
                    let last = world.last_seq(id);
                    let before = model.read.entry((user, id.into())).or_default();
                    *before = last.max(*before);
                    model.first.insert((user, id.into()), last + 1);
                    for device in 0..DEVICES.len() {
                        model.receive(&world, user, device, id, last);
                    }
                }
            }
            Op::Leave(user) => {
                let request =
                    Request::GroupRemove { group: group.clone(), user: UserId::trusted(USERS[user]) };
                world.request(request);
            }
            Op::Join(user) => {
                let was = world.store.conversations["g:t"].members.contains_key(USERS[user]);
                let request = Request::GroupAdd { group: group.clone(), user: UserId::trusted(USERS[user]) };
                if world.request(request) == Answer::Done && !was {
                    model.begin_at(user, "g:t", world.last_seq("g:t"));
                }
            }
            Op::Forget(user, device) => {
                // One that is connected goes on; it is a device like any other when it has left.
                if model.conn(user, device).is_none() {
                    let (user_id, device_id) =
                        (UserId::trusted(USERS[user]), DeviceId::trusted(DEVICES[device]));
                    if world.request(Request::ForgetDevice { user: user_id, device: device_id })
                        == Answer::Done
                    {
                        model.known.remove(&(user, device));
                        model.lost.remove(&(user, device));
                    }
                }
            }
            Op::Fail => world.failures = 1,
            Op::Advance(ms) => world.advance(ms),
            Op::Restart => {
                // What is not durable yet may be lost with the process; let it become durable.
                world.failures = 0;
                world.advance(1000);
                model.absorb(&mut world);
                world.restart();
                model.clients.clear();
                model.lost.clear();
            }
        }
        model.absorb(&mut world);
    }
    world.failures = 0;
    for _ in 0..5 {
        world.advance(1000);
    }
    model.absorb(&mut world);
    check_retention(&world, retention);
    // Everyone comes (again), so that what waits is announced.
    for (user, device) in model.known.clone() {
        let conn = world.connect(USERS[user], DEVICES[device]);
        model.clients.insert((user, device), Client { conn, session: conn, ..Client::default() });
    }
    model.absorb(&mut world);
    check(&world, &model);
    check_lists(&mut world, &model);
}

/// Of each conversation the newest are there, as many as are to be kept, and nothing that is too old.
fn check_retention(world: &World, Retention { age_ms_max, messages_max, .. }: Retention) {
    for (id, conversation) in &world.store.conversations {
        let count = conversation.messages.len() as u64;
        if messages_max > 0 {
            assert!(count <= messages_max, "{id} keeps {count} of {messages_max}");
        }
        if age_ms_max == 0 {
            let kept =
                if messages_max > 0 { conversation.last().min(messages_max) } else { conversation.last() };
            assert_eq!(count, kept, "{id}: the newest remain");
        }
        // Looked at every second.
        let oldest = conversation.messages.first().map_or(world.now.wall, |m| m.ts);
        assert!(
            age_ms_max == 0 || oldest + age_ms_max + 2_000 >= world.now.wall,
            "{id} holds what is too old"
        );
    }
}

/// What the lists say is what the model counts.
fn check_lists(world: &mut World, model: &Model) {
    for (&(user, device), client) in &model.clients {
        world.frame(client.conn, r#"{"type":"conversation.list","id":"l","limit":200}"#);
        let answers = world.take(client.conn);
        let page = answers.iter().find(|f| f["type"] == "conversation.page").expect("a page");
        for row in page["conversations"].as_array().expect("rows") {
            let id = row["conversation_id"].as_str().expect("an id");
            let conversation = &world.store.conversations[id];
            let first =
                model.first.get(&(user, id.to_owned())).copied().unwrap_or(1).max(conversation.floor + 1);
            let read = model.read.get(&(user, id.to_owned())).copied().unwrap_or(0).max(conversation.floor);
            let unread = conversation.messages.iter().filter(|m| m.seq > read && *m.from != *USERS[user]);
            let expected = (conversation.last(), first, read, unread.count() as u64);
            let number = |name: &str| row[name].as_u64().expect("a number");
            let found = (number("last_seq"), number("first_seq"), number("read_seq"), number("unread"));
            assert_eq!(
                found, expected,
                "{}/{} in {id}: last, first, read, unread",
                USERS[user], DEVICES[device]
            );
        }
    }
}

fn check(world: &World, model: &Model) {
    for (id, conversation) in &world.store.conversations {
        let numbers = conversation.messages.iter().map(|m| m.seq);
        assert!(numbers.eq(conversation.floor + 1..=conversation.last()), "{id}: gapless");
        for (user, name) in USERS.iter().enumerate() {
            let Some(member) = conversation.members.get(*name) else { continue };
            let last = conversation.last();
            let key = (user, id.to_string());
            let read = model.read.get(&key).copied().unwrap_or(0).min(last).max(conversation.floor);
            let above = |m: &&Message| m.seq > read && *m.from != **name;
            let unread = conversation.messages.iter().filter(above).count() as u64;
            assert_eq!((member.read, member.unread(last)), (read, unread), "{name} in {id}: read and unread");
            for (device, device_name) in
                DEVICES.iter().enumerate().filter(|(d, _)| model.known.contains(&(user, *d)))
            {
                let position = model.position[&(user, device, id.to_string())].max(conversation.floor);
                let stored = member.position(&DeviceId::trusted(device_name));
                assert!(stored <= member.delivered && member.delivered <= last);
                assert!(stored <= position, "{name}/{device_name} in {id}: stored {stored}, has {position}");
                let told = model.told.get(&(user, device, id.to_string())).cloned().unwrap_or_default();
                let first = model.first.get(&key).copied().unwrap_or(1);
                for message in &conversation.messages {
                    let own = *message.from == **name && message.device.as_deref() == Some(device_name);
                    let wanted = message.seq > position && message.seq >= first && !own;
                    assert!(
                        !wanted || told.contains(&message.seq),
                        "{name}/{device_name}: {id} {} came to nobody",
                        message.seq
                    );
                }
            }
        }
    }
    for (id, (conversation, seq)) in &model.acked {
        let place = &world.store.conversations[conversation.as_str()];
        match place.message(*seq) {
            Some(stored) => {
                assert_eq!(stored.id.as_str(), id, "what was acknowledged is stored where it was said")
            }
            None => assert!(*seq <= place.floor, "{id}, {seq} of {conversation}, is lost"),
        }
    }
    world.check_ledger();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, max_shrink_iters: 20_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_life_agrees_with_the_model(ops in prop::collection::vec(op(), 1..80)) {
        run(ops, Retention::default());
    }

    #[test]
    fn any_life_with_retention_agrees_with_the_model(
        ops in prop::collection::vec(op(), 1..80),
        retention in retention(),
    ) {
        run(ops, retention);
    }
}
