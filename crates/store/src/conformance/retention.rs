//! What retention takes, and how it is found.

use super::*;
use bowline_delivery::persist::Overdue;

fn expire(place: &str, up_to: Seq, ids_from: u64) -> Write {
    Write::ExpireMessages { conversation: conversation(place), up_to, ids_from }
}

pub(super) fn expired_messages(store: &mut Store) {
    store.store(vec![
        create("g:team", &["ann", "bob", "cy"]),
        create("d:ann:bob", &["ann", "bob"]),
        Write::Message(message("d:ann:bob", 1, "bob", "b1")),
    ]);
    let sent = (1..=5).map(|seq| Write::Message(message("g:team", seq, "ann", &format!("m{seq}"))));
    store.store(sent.collect());
    let bob =
        Member { delivered: 4, read: 4, lagging: vec![(device("desk"), 1), (device("web"), 3)], ..member() };
    store.store(vec![put("g:team", "bob", bob), expire("g:team", 3, 9_000)]);
    let state = store.state("g:team").expect("the conversation");
    assert_eq!((state.floor, state.last, state.last_ts), (3, 5, 1005));
    assert_eq!(state.tail.iter().map(|m| m.seq).collect::<Vec<_>>(), [4, 5]);
    let place = |name: &str| {
        let (_, member) = state.members.iter().find(|(user, _)| user.as_str() == name).expect("a member");
        (member.first, member.delivered, member.read, member.lagging.clone())
    };
    assert_eq!(place("cy"), (4, 3, 3, vec![]), "lifted");
    assert_eq!(place("bob"), (4, 4, 4, vec![(device("desk"), 3), (device("web"), 3)]));
    assert_eq!(store.messages("g:team", (1, 9), 9, 999, false).len(), 2);
    let (_, waiting) = store.waiting("cy", "phone");
    let place = conversation("g:team");
    assert_eq!(waiting, [Waiting { conversation: place, first: 4, last: 5, position: 3, unread: 2 }]);
    let (list, _) = store.list("cy", None, 9);
    assert_eq!((list[0].member.first, list[0].member.unread(5)), (4, 2));
    // Backwards, or beyond the last: nothing moves, or everything goes.
    store.store(vec![expire("g:team", 2, 9_000), expire("g:team", 99, 9_000), expire("d:ann:bob", 1, 9_000)]);
    let state = store.state("g:team").expect("the conversation");
    assert_eq!((state.floor, state.last, state.last_ts, state.tail), (5, 5, 1005, vec![]));
    assert_eq!(store.waiting("cy", "phone").1, []);
    let (list, _) = store.list("bob", None, 9);
    assert_eq!((list[0].last, &list[0].last_message), (5, &None), "its place in the list is what it was");
    assert_eq!(list[1].peer, Some((1, 1)), "the other has nothing to receive any more");
    // Numbers go on, and none is given twice.
    let again = message("g:team", 5, "bob", "b5");
    assert_eq!(
        store.commit(vec![Write::Message(again)]),
        Outcome::Refused(vec![(0, Refused::SeqTaken { last: 5 })])
    );
    store.store(vec![Write::Message(message("g:team", 6, "bob", "b6"))]);
    let (_, waiting) = store.waiting("cy", "phone");
    assert_eq!((waiting[0].first, waiting[0].position, waiting[0].unread), (6, 5, 1));
    let outcome = store.commit(vec![expire("g:none", 1, 0)]);
    assert!(matches!(outcome, Outcome::Failed(_)), "{outcome:?}");
}

pub(super) fn expired_ledger(store: &mut Store) {
    let write = |store: &mut Store, writes: Vec<Write>, (accepted, delivered, expired): (u64, u64, u64)| {
        let ledger = LedgerDelta { accepted, delivered, expired };
        assert_eq!(store.writer.commit(&Batch { writes, ledger, ..Batch::default() }), Outcome::Committed);
        let (ledger, waiting) = store.ledger();
        assert_eq!(ledger.accepted, ledger.delivered + ledger.expired + waiting, "{ledger:?} {waiting}");
        waiting
    };
    store.store(vec![create("g:team", &["ann", "bob", "cy"])]);
    // Ann sends four from behind, bob has the first two.
    let sent = (1..=4).map(|seq| Write::Message(message("g:team", seq, "ann", &format!("m{seq}"))));
    let mut writes: Vec<Write> = sent.collect();
    writes.push(put("g:team", "ann", Member { own_above_delivered: 4, own_above_read: 4, ..member() }));
    writes.push(put("g:team", "bob", Member { delivered: 2, ..member() }));
    assert_eq!(write(store, writes, (8, 2, 0)), 6);
    // Three go: three of cy's, one of bob's. Ann's row is written lifted, before or after.
    let ann =
        Member { first: 4, delivered: 3, read: 3, own_above_delivered: 1, own_above_read: 1, ..member() };
    assert_eq!(write(store, vec![put("g:team", "ann", ann), expire("g:team", 3, 0)], (0, 0, 4)), 2);
    assert_eq!(write(store, vec![put("g:team", "bob", Member { delivered: 4, ..member() })], (0, 1, 0)), 1);
    let leave = Write::RemoveMember { conversation: conversation("g:team"), user: user("cy") };
    assert_eq!(write(store, vec![leave], (0, 0, 1)), 0);
    // Someone who never had anything, in a conversation that is deleted above a floor.
    let sent = Write::Message(message("g:team", 5, "bob", "b5"));
    let bob = Member { delivered: 4, own_above_delivered: 1, ..member() };
    assert_eq!(write(store, vec![sent, put("g:team", "bob", bob)], (1, 0, 0)), 1);
    let delete = Write::DeleteConversation { conversation: conversation("g:team") };
    assert_eq!(write(store, vec![delete], (0, 0, 1)), 0);
}

pub(super) fn expired_ids(store: &mut Store) {
    store.store(vec![create("g:team", &["ann"]), create("g:other", &["ann"])]);
    // Stored at 1001 to 1004; the ids of the last two are to stay.
    let sent: Vec<Message> = (1..=4).map(|seq| message("g:team", seq, "ann", &format!("m{seq}"))).collect();
    store.store(sent.iter().cloned().map(Write::Message).collect());
    store.store(vec![expire("g:team", 4, 1003)]);
    let again = |seq, id: &str| Write::Message(message("g:other", seq, "ann", id));
    store.store(vec![again(1, "m1"), again(2, "m2")]);
    let refused = |at: usize| Outcome::Refused(vec![(0, Refused::Duplicate(receipt(&sent[at])))]);
    assert_eq!(store.commit(vec![again(3, "m3")]), refused(2));
    assert_eq!(store.commit(vec![again(3, "m4")]), refused(3));
    // One at a time, the oldest first.
    let forget = |before| Write::ForgetIds { before, limit: 1 };
    store.store(vec![forget(1003)]);
    assert_eq!(store.commit(vec![again(3, "m3")]), refused(2));
    store.store(vec![forget(9_000)]);
    store.store(vec![again(3, "m3")]);
    assert_eq!(store.commit(vec![again(4, "m4")]), refused(3));
    // With its conversation an id is free.
    store.store(vec![Write::DeleteConversation { conversation: conversation("g:team") }]);
    store.store(vec![again(4, "m4")]);
    assert_eq!(store.messages("g:other", (1, 9), 9, 999, false).len(), 4);
}

/// Follows the answers to their end, at most `limit` messages each, and takes what they name.
fn take_all(store: &mut Store, ask: impl Fn(u64) -> Query, limit: usize) -> Vec<(String, Seq, String)> {
    let (mut after, mut taken) = (0, Vec::new());
    loop {
        let Found::Overdue { runs, next, more, .. } = store.reader.read(&ask(after)) else {
            panic!("asked for messages to take, found something else")
        };
        assert!(runs.iter().map(|run| run.messages.len()).sum::<usize>() <= limit);
        for Overdue { conversation, messages } in runs {
            let up_to = messages.last().expect("a run has messages").0;
            store.store(vec![expire(&conversation, up_to, u64::MAX)]);
            taken.extend(
                messages.into_iter().map(|(seq, from)| (conversation.to_string(), seq, from.to_string())),
            );
        }
        if !more {
            return taken;
        }
        after = next;
    }
}

pub(super) fn overdue(store: &mut Store) {
    store.store(vec![create("g:a", &["ann", "bob"]), create("g:b", &["ann"]), create("g:c", &["ann"])]);
    let at = |place, seq, from, ts| Message { ts, ..message(place, seq, from, &format!("{place}{seq}")) };
    let sent = [
        at("g:a", 1, "ann", 10),
        at("g:b", 1, "ann", 11),
        at("g:a", 2, "bob", 12),
        at("g:c", 1, "ann", 900),
        at("g:b", 2, "ann", 13),
        at("g:a", 3, "ann", 14),
        at("g:a", 4, "ann", 20),
    ];
    store.store(sent.into_iter().map(Write::Message).collect());
    let ask = |before| move |after| Query::Overdue { before, ids_before: 0, after, limit: 2 };
    assert_eq!(take_all(store, ask(10), 2), []);
    let mut taken = take_all(store, ask(20), 2);
    taken.sort();
    let expected =
        [("g:a", 1, "ann"), ("g:a", 2, "bob"), ("g:a", 3, "ann"), ("g:b", 1, "ann"), ("g:b", 2, "ann")];
    assert_eq!(taken, expected.map(|(place, seq, from)| (place.to_owned(), seq, from.to_owned())));
    assert_eq!(take_all(store, ask(20), 2), []);
    // What arrives when everything is gone is found as well.
    assert_eq!(take_all(store, ask(1_000), 2).len(), 2);
    store.store(vec![Write::Message(at("g:a", 5, "ann", 1_000))]);
    assert_eq!(take_all(store, ask(1_001), 2), [("g:a".to_owned(), 5, "ann".to_owned())]);
    // Ids that are remembered, and from when on they need not be.
    store.store(vec![Write::Message(at("g:a", 6, "ann", 1_100)), expire("g:a", 6, 0)]);
    for (ids_before, expected) in [(1_100, false), (1_101, true)] {
        let asked = Query::Overdue { before: 0, ids_before, after: 0, limit: 2 };
        assert!(
            matches!(store.reader.read(&asked), Found::Overdue { ids, .. } if ids == expected),
            "{ids_before}"
        );
    }
}

pub(super) fn excess(store: &mut Store) {
    store.store(vec![create("g:a", &["ann"]), create("g:b", &["ann"]), create("g:c", &["ann"])]);
    for (place, count) in [("g:a", 5), ("g:b", 2), ("g:c", 4)] {
        let sent =
            (1..=count).map(|seq| Write::Message(message(place, seq, "ann", &format!("{place}{seq}"))));
        store.store(sent.collect());
    }
    let of_one = |keep| move |after| Query::Excess { keep, of: Some(conversation("g:c")), after, limit: 1 };
    let place = |place: &str, seq| (place.to_owned(), seq, "ann".to_owned());
    assert_eq!(take_all(store, of_one(3), 1), [place("g:c", 1)]);
    assert_eq!(take_all(store, of_one(3), 1), []);
    let of_all = |keep| move |after| Query::Excess { keep, of: None, after, limit: 2 };
    assert_eq!(
        take_all(store, of_all(2), 2),
        [place("g:a", 1), place("g:a", 2), place("g:a", 3), place("g:c", 2)]
    );
    assert_eq!(take_all(store, of_all(2), 2), []);
    for name in ["g:a", "g:b", "g:c"] {
        let state = store.state(name).expect("the conversation");
        assert_eq!(state.last - state.floor, 2, "{name}");
    }
}

pub(super) fn stale_devices(store: &mut Store) {
    let put = |name: &str, id: &str, last_seen| Write::PutDevice {
        user: user(name),
        device: device(id),
        class: None,
        last_seen,
    };
    store.store(vec![
        put("ann", "phone", 10),
        put("ann", "desk", 20),
        put("bob", "phone", 9),
        put("cy", "web", 30),
        put("cy", "phone", 5),
    ]);
    let (mut after, mut found) = (0, Vec::new());
    loop {
        match store.reader.read(&Query::StaleDevices { before: 20, after, limit: 2 }) {
            Found::StaleDevices { devices, next, more } => {
                found.extend(devices.into_iter().map(|(user, device)| format!("{user}/{device}")));
                match more {
                    true => after = next,
                    false => break,
                }
            }
            other => panic!("asked for devices, found {other:?}"),
        }
    }
    found.sort();
    assert_eq!(found, ["ann/phone", "bob/phone", "cy/phone"]);
}
