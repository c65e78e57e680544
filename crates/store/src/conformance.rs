//! What every store has to do. Each case gets a store of its own, which is empty; a fault is a panic.

mod retention;

use crate::{Reader, Writer, model::Model};
use bowline_delivery::persist::{
    Batch, ConversationState, Device, Fence, Found, Ledger, LedgerDelta, Member, Message, Outcome,
    PARTITION_COUNT, Query, Receipt, Refused, Summary, Waiting, Write,
};
use bowline_protocol::{
    Body, ConversationId, DeviceId, MessageId, Seq, UserId, frame::Role, ids::DeviceClass,
};
use bytes::Bytes;

/// An empty store.
pub struct Store {
    pub writer: Box<dyn Writer>,
    pub reader: Box<dyn Reader>,
}

/// A promise, and how it is tried.
type Case = (&'static str, fn(&mut Store));

pub const CASES: &[Case] = &[
    ("a message reads back as it was written", reads_back),
    ("what names nothing that exists finds nothing", finds_nothing),
    ("an id is taken once, and says by what", duplicate_id),
    ("a number is taken once, and the newest is told", taken_number),
    ("all faults of a batch are told and nothing of it is stored", all_faults),
    ("a conversation is made once", conversation_once),
    ("a write to a conversation that does not exist fails the batch", unknown_conversation),
    ("a stale epoch stores nothing", stale_epoch),
    ("a deleted conversation leaves nothing behind", deleted_conversation),
    ("pages respect numbers, limits and bytes from both ends", pages),
    ("senders of a range", senders),
    ("a conversation waits for a device as the protocol says", waiting),
    ("a forgotten device is gone from its places", forgotten_device),
    ("conversations by newest activity, page by page", conversation_list),
    ("a direct conversation tells the other's positions", peers),
    ("the ledger adds up and counts what waits", ledger),
    (
        "what retention takes is gone for everybody, and its numbers are not given again",
        retention::expired_messages,
    ),
    ("what retention takes no longer waits, and the ledger adds up", retention::expired_ledger),
    ("an id outlives its message as long as it is to", retention::expired_ids),
    ("messages that are overdue are found, the oldest first, and no others", retention::overdue),
    ("messages beyond the newest of a conversation are found", retention::excess),
    ("devices that were not seen for long are found", retention::stale_devices),
];

/// Runs all cases, and `seeds` random histories beside [`Model`].
pub fn run(mut open: impl FnMut() -> Store, seeds: std::ops::Range<u64>) {
    for (name, case) in CASES {
        println!("case: {name}");
        case(&mut open());
    }
    for seed in seeds {
        println!("seed: {seed}");
        random(&mut open(), seed, 60);
    }
}

fn user(text: &str) -> UserId {
    UserId::parse(text).expect("a user id")
}

fn device(text: &str) -> DeviceId {
    DeviceId::parse(text).expect("a device id")
}

fn conversation(text: &str) -> ConversationId {
    ConversationId::parse(text).expect("a conversation id")
}

fn member() -> Member {
    Member {
        role: Role::Member,
        joined: 1,
        first: 1,
        delivered: 0,
        read: 0,
        own_above_delivered: 0,
        own_above_read: 0,
        lagging: vec![],
    }
}

fn message(place: &str, seq: Seq, from: &str, id: &str) -> Message {
    Message {
        conversation: conversation(place),
        seq,
        id: MessageId::parse(id).expect("a message id"),
        from: user(from),
        device: Some(device("phone")),
        ts: 1_000 + seq,
        body: Body::Json(Bytes::from(format!("{{\"text\":\"{id}\"}}"))),
        hash: u128::from(seq) << 70 | 7,
    }
}

fn create(place: &str, members: &[&str]) -> Write {
    Write::CreateConversation {
        conversation: conversation(place),
        name: None,
        meta: None,
        at: 500,
        members: members.iter().map(|name| (user(name), member())).collect(),
    }
}

fn put(place: &str, name: &str, member: Member) -> Write {
    Write::PutMember { conversation: conversation(place), user: user(name), member }
}

fn receipt(message: &Message) -> Receipt {
    Receipt {
        conversation: message.conversation.clone(),
        seq: message.seq,
        ts: message.ts,
        hash: message.hash,
    }
}

impl Store {
    fn commit(&mut self, writes: Vec<Write>) -> Outcome {
        self.writer.commit(&Batch { writes, ..Batch::default() })
    }

    fn store(&mut self, writes: Vec<Write>) {
        assert_eq!(self.commit(writes), Outcome::Committed);
    }

    fn state(&mut self, place: &str) -> Option<ConversationState> {
        match self.reader.read(&Query::Conversation { conversation: conversation(place), tail: 1000 }) {
            Found::Conversation(state) => state.map(|state| *state),
            other => panic!("asked for a conversation, found {other:?}"),
        }
    }

    fn messages(
        &mut self,
        place: &str,
        (from, to): (Seq, Seq),
        limit: u32,
        bytes_max: u64,
        newest: bool,
    ) -> Vec<Message> {
        let conversation = conversation(place);
        match self.reader.read(&Query::Messages { conversation, from, to, limit, bytes_max, newest }) {
            Found::Messages(messages) => messages,
            other => panic!("asked for messages, found {other:?}"),
        }
    }

    fn waiting(&mut self, name: &str, on: &str) -> (Vec<Device>, Vec<Waiting>) {
        match sorted(self.reader.read(&Query::Waiting { user: user(name), device: device(on) })) {
            Found::Waiting { devices, conversations } => (devices, conversations),
            other => panic!("asked for what waits, found {other:?}"),
        }
    }

    fn list(&mut self, name: &str, after: Option<&str>, limit: u32) -> (Vec<Summary>, bool) {
        let after = after.map(conversation);
        match self.reader.read(&Query::Conversations { user: user(name), after, limit }) {
            Found::Conversations { conversations, more } => (conversations, more),
            other => panic!("asked for conversations, found {other:?}"),
        }
    }

    fn ledger(&mut self) -> (Ledger, u64) {
        match self.reader.read(&Query::Ledger) {
            Found::Ledger { ledger, waiting } => (ledger, waiting),
            other => panic!("asked for the ledger, found {other:?}"),
        }
    }
}

fn reads_back(store: &mut Store) {
    let mut binary = message("d:ann:bob", 2, "bob", "0b0f8e0a-55aa-4b9f-a2a3-68a0c9a7c2c1");
    binary.body = Body::Binary(Bytes::from_static(&[0, 255, 7]));
    binary.device = None;
    binary.hash = u128::MAX;
    let large = Message {
        body: Body::Json(Bytes::from(vec![b'1'; 40_000])),
        device: Some(device("f3c1b1f2-6c1b-4d0a-9f6a-000000000001")),
        ..message("d:ann:bob", 3, "ann", "\u{0}odd:id\u{7f}")
    };
    let messages = vec![message("d:ann:bob", 1, "ann", "m1"), binary, large];
    let mut bob = member();
    bob.role = Role::Owner;
    (bob.joined, bob.first, bob.delivered, bob.read) = (1, 2, 3, 1);
    (bob.own_above_delivered, bob.own_above_read) = (0, 1);
    bob.lagging = vec![(device("tablet"), 1), (device("desk"), 200)];
    store.store(vec![Write::CreateConversation {
        conversation: conversation("d:ann:bob"),
        name: Some("Ann, Bob".into()),
        meta: Some(Bytes::from_static(b"{\"color\":1}")),
        at: 77,
        members: vec![(user("ann"), member()), (user("bob"), member())],
    }]);
    let fresh = store.state("d:ann:bob").expect("the conversation");
    assert_eq!((fresh.last, fresh.last_ts), (0, 77));
    store.store(messages.iter().cloned().map(Write::Message).collect());
    store.store(vec![put("d:ann:bob", "bob", bob.clone())]);

    let mut state = store.state("d:ann:bob").expect("the conversation");
    state.members.sort_by(|a, b| a.0.cmp(&b.0));
    assert_eq!(state.name.as_deref(), Some("Ann, Bob"));
    assert_eq!(state.meta.as_deref(), Some(&b"{\"color\":1}"[..]));
    assert_eq!((state.last, state.last_ts), (3, 1003));
    assert_eq!(state.members, vec![(user("ann"), member()), (user("bob"), bob)]);
    assert_eq!(state.tail, messages);

    store.store(vec![Write::RenameConversation {
        conversation: conversation("d:ann:bob"),
        name: Some("Bob".into()),
        meta: None,
    }]);
    store.store(vec![Write::RemoveMember { conversation: conversation("d:ann:bob"), user: user("ann") }]);
    let state = store.state("d:ann:bob").expect("the conversation");
    assert_eq!(state.name.as_deref(), Some("Bob"));
    assert_eq!(state.meta.as_deref(), Some(&b"{\"color\":1}"[..]));
    assert_eq!(state.members.len(), 1);
}

fn finds_nothing(store: &mut Store) {
    assert_eq!(store.state("g:none"), None);
    assert_eq!(store.messages("g:none", (1, 10), 10, 1000, false), []);
    assert_eq!(store.waiting("nobody", "phone"), (vec![], vec![]));
    assert_eq!(store.list("nobody", None, 10), (vec![], false));
    assert_eq!(store.list("nobody", Some("g:none"), 10), (vec![], false));
    assert_eq!(store.reader.read(&Query::Devices { user: user("nobody") }), Found::Devices(vec![]));
    assert_eq!(store.ledger(), (Ledger::default(), 0));
    // Taking away what is not there is no fault.
    store.store(vec![
        Write::RemoveMember { conversation: conversation("g:none"), user: user("nobody") },
        Write::RenameConversation { conversation: conversation("g:none"), name: None, meta: None },
        Write::DeleteConversation { conversation: conversation("g:none") },
        Write::ForgetDevice { user: user("nobody"), device: device("phone") },
    ]);
}

fn duplicate_id(store: &mut Store) {
    store.store(vec![create("d:ann:bob", &["ann", "bob"]), create("g:team", &["ann"])]);
    let first = message("d:ann:bob", 1, "ann", "same");
    store.store(vec![Write::Message(first.clone())]);
    let again = message("g:team", 1, "ann", "same");
    assert_eq!(
        store.commit(vec![Write::Message(again)]),
        Outcome::Refused(vec![(0, Refused::Duplicate(receipt(&first)))])
    );
    // Another sender may use the id.
    store.store(vec![Write::Message(message("d:ann:bob", 2, "bob", "same"))]);
    assert_eq!(store.messages("g:team", (0, 9), 9, 999, false), []);
}

fn taken_number(store: &mut Store) {
    store.store(vec![create("d:ann:bob", &["ann", "bob"])]);
    let messages = (1..=3).map(|seq| Write::Message(message("d:ann:bob", seq, "ann", &format!("m{seq}"))));
    store.store(messages.collect());
    assert_eq!(
        store.commit(vec![
            Write::Message(message("d:ann:bob", 4, "bob", "b4")),
            Write::Message(message("d:ann:bob", 2, "bob", "b2")),
        ]),
        Outcome::Refused(vec![(1, Refused::SeqTaken { last: 3 })])
    );
    assert_eq!(store.state("d:ann:bob").expect("the conversation").last, 3);
    store.store(vec![Write::Message(message("d:ann:bob", 4, "bob", "b2"))]);
}

fn all_faults(store: &mut Store) {
    store.store(vec![create("d:ann:bob", &["ann", "bob"])]);
    let first = message("d:ann:bob", 1, "ann", "m1");
    store.store(vec![Write::Message(first.clone())]);
    let new = message("d:ann:bob", 2, "ann", "m2");
    let batch = Batch {
        writes: vec![
            Write::Message(message("d:ann:bob", 5, "ann", "m1")),
            Write::Message(new.clone()),
            create("d:ann:bob", &["ann"]),
            Write::Message(message("d:ann:bob", 3, "ann", "m2")),
            Write::Message(message("d:ann:bob", 1, "bob", "b1")),
            create("g:new", &["ann"]),
            Write::Message(message("g:new", 1, "bob", "b2")),
            Write::Message(message("g:new", 1, "bob", "b3")),
            put("d:ann:bob", "bob", Member { delivered: 1, ..member() }),
        ],
        ledger: LedgerDelta { accepted: 5, delivered: 1, expired: 1 },
        ..Batch::default()
    };
    assert_eq!(
        store.writer.commit(&batch),
        Outcome::Refused(vec![
            (0, Refused::Duplicate(receipt(&first))),
            (2, Refused::ConversationExists),
            (3, Refused::Duplicate(receipt(&new))),
            (4, Refused::SeqTaken { last: 1 }),
            (7, Refused::SeqTaken { last: 0 }),
        ])
    );
    assert_eq!(store.state("g:new"), None);
    let state = store.state("d:ann:bob").expect("the conversation");
    assert_eq!(state.tail, vec![first]);
    assert!(state.members.iter().all(|(_, found)| *found == member()));
    assert_eq!(store.ledger(), (Ledger::default(), 2));
    // What was refused can be stored afterwards, by the same writer.
    store.store(vec![
        create("g:new", &["ann"]),
        Write::Message(message("g:new", 1, "bob", "b2")),
        Write::Message(new),
        put("d:ann:bob", "bob", Member { delivered: 2, ..member() }),
    ]);
    assert_eq!(store.ledger().1, 3);
}

fn conversation_once(store: &mut Store) {
    store.store(vec![create("g:team", &["ann"])]);
    let refused = |index| Outcome::Refused(vec![(index, Refused::ConversationExists)]);
    assert_eq!(store.commit(vec![create("g:team", &["bob"])]), refused(0));
    assert_eq!(store.commit(vec![create("g:two", &[]), create("g:two", &["bob"])]), refused(1));
    assert_eq!(store.state("g:team").expect("the conversation").members.len(), 1);
    assert_eq!(store.state("g:two"), None);
}

fn unknown_conversation(store: &mut Store) {
    let rows = [Write::Message(message("g:none", 1, "ann", "m")), put("g:none", "ann", member())];
    for write in rows {
        let outcome = store.commit(vec![create("g:made", &["ann"]), write.clone()]);
        assert!(matches!(outcome, Outcome::Failed(_)), "{write:?} was answered {outcome:?}");
        assert_eq!(store.state("g:made"), None);
    }
}

fn stale_epoch(store: &mut Store) {
    let batch = |fences: &[(u16, u64)]| Batch {
        fences: fences
            .iter()
            .map(|(partition, epoch)| Fence { partition: *partition, epoch: *epoch })
            .collect(),
        writes: vec![create("g:team", &["ann"])],
        ..Batch::default()
    };
    let last = PARTITION_COUNT - 1;
    assert_eq!(
        store.writer.commit(&batch(&[(0, 1), (last, 2)])),
        Outcome::Stale { partition: last, epoch: 1 }
    );
    assert_eq!(store.writer.commit(&batch(&[(3, 0)])), Outcome::Stale { partition: 3, epoch: 1 });
    assert_eq!(store.state("g:team"), None);
    assert_eq!(store.writer.commit(&batch(&[(0, 1), (3, 1), (last, 1)])), Outcome::Committed);
}

fn deleted_conversation(store: &mut Store) {
    store.store(vec![
        create("g:team", &["ann", "bob"]),
        Write::Message(message("g:team", 1, "ann", "m1")),
        Write::Message(message("g:team", 2, "ann", "m2")),
    ]);
    store.store(vec![Write::DeleteConversation { conversation: conversation("g:team") }]);
    assert_eq!(store.state("g:team"), None);
    assert_eq!(store.list("ann", None, 10), (vec![], false));
    assert_eq!(store.waiting("bob", "phone").1, []);
    assert_eq!(store.ledger().1, 0);
    // A new one begins at 1, and the ids are free.
    store.store(vec![create("g:team", &["bob"]), Write::Message(message("g:team", 1, "ann", "m1"))]);
    let state = store.state("g:team").expect("the conversation");
    assert_eq!((state.last, state.members.len()), (1, 1));
    assert_eq!(store.ledger().1, 1);
    // In one batch, too.
    store.store(vec![
        Write::DeleteConversation { conversation: conversation("g:team") },
        create("g:team", &["ann", "bob"]),
        Write::Message(message("g:team", 1, "ann", "m1")),
    ]);
    assert_eq!(store.ledger().1, 2);
}

fn pages(store: &mut Store) {
    let body = |seq: Seq| Body::Binary(Bytes::from(vec![seq as u8; 10]));
    let all: Vec<Message> = (1..=9)
        .map(|seq| Message { body: body(seq), ..message("g:team", seq, "ann", &format!("m{seq}")) })
        .collect();
    store.store(vec![create("g:team", &["ann"])]);
    store.store(all.iter().cloned().map(Write::Message).collect());
    // (range, limit, bytes_max, newest, expected)
    type Row = ((Seq, Seq), u32, u64, bool, &'static [Seq]);
    let rows: &[Row] = &[
        ((1, 9), 100, 1000, false, &[1, 2, 3, 4, 5, 6, 7, 8, 9]),
        ((0, u64::MAX), 3, 1000, false, &[1, 2, 3]),
        ((0, u64::MAX), 3, 1000, true, &[7, 8, 9]),
        ((4, 6), 100, 1000, false, &[4, 5, 6]),
        ((4, 6), 2, 1000, true, &[5, 6]),
        ((1, 9), 100, 30, false, &[1, 2, 3]),
        ((1, 9), 100, 35, true, &[7, 8, 9]),
        ((2, 9), 100, 1, false, &[2]),
        ((2, 8), 100, 0, true, &[8]),
        ((6, 4), 100, 1000, false, &[]),
        ((10, 20), 100, 1000, true, &[]),
        ((1, 9), 0, 1000, false, &[]),
    ];
    for (range, limit, bytes_max, newest, expected) in rows {
        let found = store.messages("g:team", *range, *limit, *bytes_max, *newest);
        let expected: Vec<_> = expected.iter().map(|seq| all[*seq as usize - 1].clone()).collect();
        assert_eq!(found, expected, "{range:?} limit {limit} bytes {bytes_max} newest {newest}");
    }
    match store.reader.read(&Query::Conversation { conversation: conversation("g:team"), tail: 2 }) {
        Found::Conversation(Some(state)) => assert_eq!(state.tail, all[7..]),
        other => panic!("asked for a conversation, found {other:?}"),
    }
}

fn senders(store: &mut Store) {
    store.store(vec![create("g:team", &["ann", "bob", "cy"])]);
    let from = ["ann", "bob", "ann", "cy", "ann"];
    let messages = from.iter().zip(1..).map(|(from, seq)| message("g:team", seq, from, &format!("m{seq}")));
    store.store(messages.map(Write::Message).collect());
    let rows: &[(&str, Seq, Seq, u64, &[&str])] = &[
        ("ann", 1, 5, 3, &["bob", "cy"]),
        ("ann", 2, 3, 1, &["bob"]),
        ("bob", 3, 5, 0, &["ann", "cy"]),
        ("stranger", 4, 4, 0, &["cy"]),
        ("ann", 6, 9, 0, &[]),
    ];
    for (name, from, to, own, others) in rows {
        let query =
            Query::Senders { conversation: conversation("g:team"), user: user(name), from: *from, to: *to };
        let expected = Found::Senders { own: *own, others: others.iter().map(|name| user(name)).collect() };
        assert_eq!(sorted(store.reader.read(&query)), expected, "{name} {from}..={to}");
    }
}

fn waiting(store: &mut Store) {
    // (position of the user, positions of devices, first, who sent what from which device, asking device, waits)
    type Row = (
        Seq,
        &'static [(&'static str, Seq)],
        Seq,
        &'static [(&'static str, &'static str)],
        &'static str,
        bool,
    );
    let rows: &[Row] = &[
        (0, &[], 1, &[], "phone", false),
        (0, &[], 1, &[("bob", "phone")], "phone", true),
        (1, &[], 1, &[("bob", "phone")], "phone", false),
        (1, &[("desk", 0)], 1, &[("bob", "phone")], "phone", false),
        (1, &[("desk", 0)], 1, &[("bob", "phone")], "desk", true),
        // Own messages wait for the other devices only.
        (0, &[], 1, &[("ann", "phone"), ("ann", "phone")], "phone", false),
        (0, &[], 1, &[("ann", "phone"), ("ann", "phone")], "desk", true),
        (0, &[], 1, &[("ann", "phone"), ("bob", "phone"), ("ann", "phone")], "phone", true),
        (2, &[], 1, &[("ann", "phone"), ("bob", "phone"), ("ann", "phone")], "phone", false),
        // Nothing below the first number that the user sees.
        (0, &[], 3, &[("bob", "phone"), ("bob", "phone")], "phone", false),
        (0, &[], 2, &[("bob", "phone"), ("bob", "phone")], "phone", true),
    ];
    for (index, (delivered, lagging, first, sent, on, waits)) in rows.iter().enumerate() {
        let (place, ann) = (format!("g:row{index}"), format!("ann{index}"));
        let name = |who: &str| if who == "ann" { ann.clone() } else { who.to_owned() };
        store.store(vec![create(&place, &[&ann, "bob"])]);
        let messages = sent.iter().zip(1..).map(|((from, device_id), seq)| Message {
            device: Some(device(device_id)),
            ..message(&place, seq, &name(from), &format!("{index}-{seq}"))
        });
        store.store(messages.map(Write::Message).collect());
        let lagging = lagging.iter().map(|(id, seq)| (device(id), *seq)).collect();
        let mine = Member { delivered: *delivered, first: *first, lagging, ..member() };
        store.store(vec![put(&place, &ann, mine.clone())]);
        let expected = waits.then(|| Waiting {
            conversation: conversation(&place),
            first: *first,
            last: sent.len() as Seq,
            position: mine.position(&device(on)),
            unread: sent.len() as u64,
        });
        assert_eq!(store.waiting(&ann, on).1, Vec::from_iter(expected), "row {index}");
    }
}

fn forgotten_device(store: &mut Store) {
    let lagging = vec![(device("desk"), 3), (device("phone"), 4)];
    let put_device = |id: &str, class, last_seen| Write::PutDevice {
        user: user("ann"),
        device: device(id),
        class,
        last_seen,
    };
    store.store(vec![
        create("g:one", &["ann", "bob"]),
        create("g:two", &["ann"]),
        put("g:one", "ann", Member { lagging: lagging.clone(), ..member() }),
        put("g:one", "bob", Member { lagging: lagging.clone(), ..member() }),
        put("g:two", "ann", Member { lagging: lagging[..1].to_vec(), ..member() }),
        put_device("desk", Some(DeviceClass::Web), 5),
        put_device("phone", Some(DeviceClass::Ios), 6),
        put_device("phone", None, 7),
    ]);
    let found = |id: &str, class, last_seen| Device { device: device(id), class, last_seen };
    assert_eq!(
        store.waiting("ann", "phone").0,
        [found("desk", Some(DeviceClass::Web), 5), found("phone", None, 7)]
    );
    store.store(vec![Write::ForgetDevice { user: user("ann"), device: device("desk") }]);
    assert_eq!(
        store.reader.read(&Query::Devices { user: user("ann") }),
        Found::Devices(vec![found("phone", None, 7)])
    );
    let place = |store: &mut Store, place: &str, name: &str| {
        let state = store.state(place).expect("the conversation");
        state.members.into_iter().find(|(id, _)| id.as_str() == name).expect("the member").1.lagging
    };
    assert_eq!(place(store, "g:one", "ann"), lagging[1..]);
    assert_eq!(place(store, "g:one", "bob"), lagging);
    assert_eq!(place(store, "g:two", "ann"), []);
}

fn conversation_list(store: &mut Store) {
    // Created at 500; messages arrive at 1000 + seq. `g:d` and `g:e` share their time: then by id.
    for place in ["g:a", "g:b", "g:c", "g:d", "g:e"] {
        store.store(vec![create(place, &["ann"])]);
    }
    store.store(vec![create("g:other", &["bob"])]);
    store.store(vec![
        Write::Message(message("g:b", 1, "bob", "m1")),
        Write::Message(message("g:c", 1, "bob", "m2")),
        Write::Message(message("g:c", 2, "bob", "m3")),
        Write::Message(message("g:a", 1, "bob", "m4")),
        Write::Message(message("g:a", 2, "bob", "m5")),
        Write::Message(message("g:a", 3, "bob", "m6")),
        put("g:c", "ann", Member { first: 3, delivered: 2, ..member() }),
    ]);
    let rows: &[(Option<&str>, u32, &[&str], bool)] = &[
        (None, 10, &["g:a", "g:c", "g:b", "g:d", "g:e"], false),
        (None, 2, &["g:a", "g:c"], true),
        (Some("g:c"), 2, &["g:b", "g:d"], true),
        (Some("g:d"), 2, &["g:e"], false),
        (Some("g:e"), 2, &[], false),
        // A conversation that the user is no member of still has its place in the order.
        (Some("g:other"), 2, &[], false),
        (None, 0, &[], true),
    ];
    for (after, limit, expected, more) in rows {
        let (found, found_more) = store.list("ann", *after, *limit);
        let ids: Vec<&str> = found.iter().map(|line| line.conversation.as_str()).collect();
        assert_eq!((&ids[..], found_more), (*expected, *more), "after {after:?}, {limit}");
    }
    let (found, _) = store.list("ann", None, 10);
    assert_eq!(found[0].last_message, Some(message("g:a", 3, "bob", "m6")));
    assert_eq!((found[0].last, found[0].peer), (3, None));
    // Cleared: the line stays, without what the user does not see.
    assert_eq!((found[1].last, found[1].member.first, &found[1].last_message), (2, 3, &None));
    assert_eq!((found[3].last, &found[3].last_message), (0, &None));
}

fn peers(store: &mut Store) {
    store.store(vec![
        create("d:ann:bob", &["ann", "bob"]),
        create("d:ann:ann", &["ann"]),
        put("d:ann:bob", "bob", Member { delivered: 5, read: 4, ..member() }),
    ]);
    let (found, _) = store.list("ann", None, 10);
    let peers: Vec<_> = found.iter().map(|line| (line.conversation.as_str(), line.peer)).collect();
    assert_eq!(peers, [("d:ann:ann", None), ("d:ann:bob", Some((5, 4)))]);
}

fn ledger(store: &mut Store) {
    store.store(vec![create("g:team", &["ann", "bob", "cy"])]);
    let write = |store: &mut Store, writes: Vec<Write>, ledger: (u64, u64, u64)| {
        let (accepted, delivered, expired) = ledger;
        let ledger = LedgerDelta { accepted, delivered, expired };
        assert_eq!(store.writer.commit(&Batch { writes, ledger, ..Batch::default() }), Outcome::Committed);
        let (ledger, waiting) = store.ledger();
        assert_eq!(ledger.accepted, ledger.delivered + ledger.expired + waiting, "{ledger:?} {waiting}");
        waiting
    };
    // The sender's row says that the message is its own; the two others wait.
    let sent = |seq: Seq| Write::Message(message("g:team", seq, "ann", &format!("m{seq}")));
    let ann = |delivered| put("g:team", "ann", Member { delivered, ..member() });
    assert_eq!(write(store, vec![sent(1), ann(1)], (2, 0, 0)), 2);
    assert_eq!(write(store, vec![ann(2), sent(2)], (2, 0, 0)), 4);
    let bob = Member { delivered: 1, ..member() };
    assert_eq!(write(store, vec![put("g:team", "bob", bob.clone())], (0, 1, 0)), 3);
    // One that bob sends from behind.
    let own = Member { own_above_delivered: 1, ..bob };
    let third = Write::Message(message("g:team", 3, "bob", "b3"));
    assert_eq!(write(store, vec![third, put("g:team", "bob", own)], (2, 0, 0)), 5);
    // Joining late brings nothing; leaving takes away.
    let late = Member { joined: 4, first: 4, delivered: 3, read: 3, ..member() };
    assert_eq!(write(store, vec![put("g:team", "dee", late)], (0, 0, 0)), 5);
    let leave = Write::RemoveMember { conversation: conversation("g:team"), user: user("cy") };
    assert_eq!(write(store, vec![leave], (0, 0, 3)), 2);
    assert_eq!(
        write(store, vec![Write::DeleteConversation { conversation: conversation("g:team") }], (0, 0, 2)),
        0
    );
}

/// Puts in order what has none.
fn sorted(found: Found) -> Found {
    match found {
        Found::Conversation(Some(mut state)) => {
            state.members.sort_by(|a, b| a.0.cmp(&b.0));
            Found::Conversation(Some(state))
        }
        Found::Senders { own, mut others } => {
            others.sort();
            Found::Senders { own, others }
        }
        Found::Waiting { mut devices, mut conversations } => {
            devices.sort_by(|a, b| a.device.cmp(&b.device));
            conversations.sort_by(|a, b| a.conversation.cmp(&b.conversation));
            Found::Waiting { devices, conversations }
        }
        Found::Devices(mut devices) => {
            devices.sort_by(|a, b| a.device.cmp(&b.device));
            Found::Devices(devices)
        }
        other => other,
    }
}

/// A history that the seed makes, on the store and on [`Model`]: all answers are the same.
pub fn random(store: &mut Store, seed: u64, steps: u32) {
    let mut model = Model::new();
    let mut dice = Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    for step in 0..steps {
        let batch = dice.batch(&mut model);
        let (expected, outcome) = (model.commit(&batch), store.writer.commit(&batch));
        match (&expected, &outcome) {
            (Outcome::Failed(_), Outcome::Failed(_)) => {}
            _ => assert_eq!(outcome, expected, "seed {seed}, step {step}: {batch:#?}"),
        }
        let queries: Vec<Query> = dice.queries().into_iter().collect();
        let together = store.reader.read_all(&queries);
        assert_eq!(together.len(), queries.len());
        for (query, together) in queries.iter().zip(together) {
            let (expected, found) = (sorted(model.read(query)), sorted(store.reader.read(query)));
            assert_eq!(found, expected, "seed {seed}, step {step}: {query:?} after {batch:#?}");
            assert_eq!(sorted(together), expected, "seed {seed}, step {step}: {query:?} with others");
        }
    }
}

/// A small random source (xorshift), so that a seed means the same everywhere.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % sides
    }

    fn user(&mut self) -> UserId {
        user(["ann", "bob", "cy", "dee"][self.roll(4) as usize])
    }

    fn device(&mut self) -> DeviceId {
        device(["phone", "desk", "5e0c5bd4-0000-4000-8000-00000000000a"][self.roll(3) as usize])
    }

    fn conversation(&mut self) -> ConversationId {
        match self.roll(3) {
            0 => conversation(["g:one", "g:two", "g:three"][self.roll(3) as usize]),
            _ => ConversationId::direct(&self.user(), &self.user()),
        }
    }

    fn member(&mut self, last: Seq) -> Member {
        let delivered = self.roll(last + 1);
        let read = self.roll(delivered + 1);
        let count = self.roll(3);
        Member {
            role: [Role::Member, Role::Admin, Role::Owner][self.roll(3) as usize],
            joined: 1,
            first: 1 + self.roll(last + 2),
            delivered,
            read,
            own_above_delivered: self.roll(last - delivered + 1),
            own_above_read: self.roll(last - read + 1),
            lagging: (0..count).map(|_| (self.device(), self.roll(delivered + 1))).collect(),
        }
    }

    fn batch(&mut self, model: &mut Model) -> Batch {
        // What the batch has numbered so far, so that most numbers follow each other.
        let mut numbered = std::collections::BTreeMap::<ConversationId, Seq>::new();
        let mut writes = Vec::new();
        for _ in 0..=self.roll(8) {
            let conversation = self.conversation();
            let stored =
                match model.read(&Query::Conversation { conversation: conversation.clone(), tail: 0 }) {
                    Found::Conversation(Some(state)) => Some(state.last),
                    _ => None,
                };
            let known = numbered.contains_key(&conversation) || stored.is_some();
            let last = numbered.get(&conversation).copied().or(stored).unwrap_or(0);
            if !known && self.roll(10) > 0 {
                numbered.insert(conversation.clone(), 0);
                let members = match conversation.peers() {
                    Some((a, b)) if a == b => vec![(a, self.member(0))],
                    Some((a, b)) => vec![(a, self.member(0)), (b, self.member(0))],
                    None => vec![(self.user(), self.member(0))],
                };
                let name = (self.roll(2) == 0).then(|| format!("name {}", self.roll(10)));
                let meta = (self.roll(2) == 0).then(|| Bytes::from_static(b"{}"));
                writes.push(Write::CreateConversation {
                    conversation,
                    name,
                    meta,
                    at: self.roll(50),
                    members,
                });
                continue;
            }
            writes.push(match self.roll(40) {
                0..24 => {
                    let seq = if self.roll(30) == 0 { 1 + self.roll(last + 1) } else { last + 1 };
                    numbered.insert(conversation.clone(), last.max(seq));
                    Write::Message(Message {
                        conversation,
                        seq,
                        id: MessageId::trusted(&format!("id{}", self.roll(3000))),
                        from: self.user(),
                        device: (self.roll(4) > 0).then(|| self.device()),
                        ts: self.roll(100),
                        body: Body::Json(Bytes::from(vec![b'7'; self.roll(30) as usize + 1])),
                        hash: u128::from(self.0) * u128::from(u64::MAX),
                    })
                }
                24..34 => Write::PutMember { conversation, user: self.user(), member: self.member(last) },
                34 => Write::RemoveMember { conversation, user: self.user() },
                35 => Write::RenameConversation {
                    conversation,
                    name: (self.roll(2) == 0).then(|| "new".into()),
                    meta: (self.roll(2) == 0).then(|| Bytes::from_static(b"[1]")),
                },
                36 if self.roll(3) == 0 => {
                    numbered.remove(&conversation);
                    Write::DeleteConversation { conversation }
                }
                37 => Write::ForgetDevice { user: self.user(), device: self.device() },
                36 => Write::ExpireMessages {
                    conversation,
                    up_to: self.roll(last + 2),
                    ids_from: self.roll(100),
                },
                38 => Write::ForgetIds { before: self.roll(60), limit: 1_000 },
                _ => Write::PutDevice {
                    user: self.user(),
                    device: self.device(),
                    class: (self.roll(2) == 0).then_some(DeviceClass::Desktop),
                    last_seen: self.roll(100),
                },
            });
        }
        let fence = |dice: &mut Self| Fence {
            partition: dice.roll(u64::from(PARTITION_COUNT)) as u16,
            epoch: if dice.roll(60) == 0 { 2 } else { 1 },
        };
        Batch {
            fences: (0..self.roll(3)).map(|_| fence(self)).collect(),
            writes,
            ledger: LedgerDelta { accepted: self.roll(5), delivered: self.roll(5), expired: self.roll(2) },
            outbox: vec![],
        }
    }

    fn queries(&mut self) -> Vec<Query> {
        let conversation = self.conversation();
        vec![
            Query::Conversation { conversation: conversation.clone(), tail: self.roll(6) as u32 },
            Query::Messages {
                conversation: conversation.clone(),
                from: self.roll(10),
                to: self.roll(40),
                limit: self.roll(10) as u32,
                bytes_max: self.roll(200),
                newest: self.roll(2) == 0,
            },
            Query::Senders { conversation, user: self.user(), from: self.roll(10), to: self.roll(40) },
            Query::Waiting { user: self.user(), device: self.device() },
            Query::Conversations {
                user: self.user(),
                after: (self.roll(2) == 0).then(|| self.conversation()),
                limit: self.roll(6) as u32,
            },
            Query::Devices { user: self.user() },
            Query::Ledger,
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_model_conforms() {
        run(
            || {
                let model = Model::new();
                Store { writer: Box::new(model.clone()), reader: Box::new(model) }
            },
            0..3,
        );
    }
}
