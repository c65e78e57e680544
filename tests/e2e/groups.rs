//! Groups: made and changed by frames and by the API, roles, what members see from when on.

use bowline_tests::{Client, Server, Transport};
use serde_json::{Value, json};

on_both![
    a_group_is_made_by_a_frame,
    the_server_chooses_an_id_when_none_is_given,
    a_group_id_is_taken_once,
    messages_reach_every_device_of_every_member,
    members_see_what_came_after_they_joined,
    removed_members_see_and_send_nothing_more,
    members_leave,
    owners_and_admins_change_members_and_names_and_others_do_not,
    only_the_owner_gives_roles,
    changes_go_to_every_member_and_to_who_was_removed,
    names_and_meta_are_bounded_and_listed,
    a_group_is_made_and_changed_by_the_api,
    receipts_of_a_large_group_are_counts,
    a_message_to_many_members_counts_for_each,
];

/// A group of alice (owner), bob and carol, and their connections.
fn trio(server: &Server, transport: Transport) -> [Client; 3] {
    let mut members = ["alice", "bob", "carol"].map(|user| server.connect(transport, user));
    let fields = json!({"group_id": "crew", "name": "The crew", "members": ["bob", "carol"]});
    let ok = members[0].demand("conversation.create", fields);
    assert_eq!(ok.conversation(), "g:crew");
    for member in &mut members {
        let change = member.expect("conversation.changed");
        assert_eq!(
            (change.conversation(), change.text_of("change")),
            ("g:crew", "created"),
            "{}",
            change.text
        );
    }
    members
}

fn change(client: &mut Client, kind: &str) -> Value {
    let frame = client.find(&format!("the change {kind}"), |frame| {
        frame.kind() == "conversation.changed" && frame.json["change"] == kind
    });
    frame.json
}

fn a_group_is_made_by_a_frame(transport: Transport) {
    let server = Server::start();
    let mut alice = server.connect(transport, "alice");
    let mut bob = server.connect(transport, "bob");
    let fields =
        json!({"group_id": "crew", "name": "The crew", "members": ["bob"], "meta": {"colour": "red"}});
    let ok = alice.demand("conversation.create", fields);
    assert_eq!(ok.conversation(), "g:crew");
    let created = change(&mut bob, "created");
    assert_eq!((&created["conversation_id"], &created["by"]), (&json!("g:crew"), &json!("alice")));
    for client in [&mut alice, &mut bob] {
        let line = client.conversation("g:crew");
        assert_eq!((&line["kind"], &line["name"]), (&json!("group"), &json!("The crew")));
        assert_eq!((&line["meta"], &line["last_seq"]), (&json!({"colour": "red"}), &json!(0)));
    }
    // The creator is a member.
    assert_eq!(alice.say("g:crew", "hello").seq(), 1);
    assert_eq!(bob.expect_push("g:crew", 1).text_of("from"), "alice");
    assert_eq!(bob.say("g:crew", "hello").seq(), 2);
    alice.expect_push("g:crew", 2);
}

fn the_server_chooses_an_id_when_none_is_given(transport: Transport) {
    let server = Server::start();
    let mut alice = server.connect(transport, "alice");
    let [first, second] = [(); 2]
        .map(|()| alice.demand("conversation.create", json!({"members": ["bob"]})).conversation().to_owned());
    assert!(first.starts_with("g:") && first.len() > 2, "{first}");
    assert_ne!(first, second);
    assert_eq!(alice.say(&first, 1).seq(), 1);
}

fn a_group_id_is_taken_once(transport: Transport) {
    let server = Server::start();
    let [mut alice, ..] = trio(&server, transport);
    let mut eve = server.connect(transport, "eve");
    let fields = json!({"group_id": "crew", "members": ["alice"]});
    eve.ask("conversation.create", fields).expect_error("conflict");
    eve.ask("msg.send", json!({"conversation_id": "g:crew", "body": 1})).expect_error("forbidden");
    assert_eq!(alice.conversation("g:crew")["name"], "The crew");
    alice.expect_no("conversation.changed");
}

fn messages_reach_every_device_of_every_member(transport: Transport) {
    let server = Server::start();
    let [mut alice, mut bob, mut carol] = trio(&server, transport);
    let mut second = [
        server.connect_device(transport, "alice", "a2"),
        server.connect_device(transport, "bob", "b2"),
        server.connect_device(transport, "carol", "c2"),
    ];
    for (seq, body) in [(1, "one"), (2, "two")] {
        assert_eq!(alice.say("g:crew", body).seq(), seq);
        for client in [&mut bob, &mut carol].into_iter().chain(&mut second) {
            let push = client.expect_push("g:crew", seq);
            assert_eq!((push.text_of("from"), push.text_of("body")), ("alice", body));
        }
    }
    alice.expect_no("msg.push");
}

fn members_see_what_came_after_they_joined(transport: Transport) {
    let server = Server::start();
    let [mut alice, ..] = trio(&server, transport);
    for n in 1..=3 {
        alice.say("g:crew", n);
    }
    let mut dave = server.connect(transport, "dave");
    dave.ask("history", json!({"conversation_id": "g:crew"})).expect_error("forbidden");
    alice.demand("group.add", json!({"conversation_id": "g:crew", "users": ["dave"]}));
    change(&mut dave, "member_added");
    let line = dave.conversation("g:crew");
    assert_eq!(
        (&line["first_seq"], &line["last_seq"], &line["unread"]),
        (&json!(4), &json!(3), &json!(0)),
        "{line}"
    );
    let page = dave.history("g:crew", json!({"after_seq": 0}));
    assert_eq!((page.number_of("first_seq"), page.list_of("messages").len()), (4, 0));
    assert_eq!(page.json["more"], json!(false));
    alice.say("g:crew", 4);
    dave.expect_push("g:crew", 4);
    let history = dave.history_after("g:crew", 0);
    assert_eq!(history.len(), 1, "{history:?}");
    assert_eq!((history[0]["seq"].as_u64(), dave.unread("g:crew")), (Some(4), 1));
    // Those who were there before see all.
    assert_eq!(alice.history_after("g:crew", 0).len(), 4);
    // Who is removed and comes back starts anew.
    alice.demand("group.remove", json!({"conversation_id": "g:crew", "users": ["dave"]}));
    alice.say("g:crew", 5);
    alice.demand("group.add", json!({"conversation_id": "g:crew", "users": ["dave"]}));
    change(&mut dave, "member_added");
    alice.say("g:crew", 6);
    dave.expect_push("g:crew", 6);
    let seen: Vec<u64> =
        dave.history_after("g:crew", 0).iter().filter_map(|message| message["seq"].as_u64()).collect();
    assert_eq!(seen, [6]);
}

fn removed_members_see_and_send_nothing_more(transport: Transport) {
    let server = Server::start();
    let [mut alice, mut bob, mut carol] = trio(&server, transport);
    alice.say("g:crew", 1);
    bob.expect_push("g:crew", 1);
    alice.demand("group.remove", json!({"conversation_id": "g:crew", "users": ["bob"]}));
    let removed = change(&mut bob, "member_removed");
    assert_eq!((&removed["users"], &removed["by"]), (&json!(["bob"]), &json!("alice")));
    alice.say("g:crew", 2);
    carol.expect_push("g:crew", 1);
    carol.expect_push("g:crew", 2);
    bob.ask("history", json!({"conversation_id": "g:crew"})).expect_error("forbidden");
    bob.ask("msg.send", json!({"conversation_id": "g:crew", "body": 1})).expect_error("forbidden");
    bob.expect_no("msg.push");
    assert_eq!(bob.conversations(), [] as [Value; 0]);
    // Nothing waits for bob at the next login either.
    let device = bob.device_id().to_owned();
    bob.close();
    let mut bob = server.connect_device(transport, "bob", &device);
    bob.settle();
    bob.expect_no("sync.notice");
}

fn members_leave(transport: Transport) {
    let server = Server::start();
    let [mut alice, mut bob, mut carol] = trio(&server, transport);
    bob.demand("group.leave", json!({"conversation_id": "g:crew"}));
    for client in [&mut alice, &mut carol] {
        assert_eq!(change(client, "member_removed")["users"], json!(["bob"]));
    }
    assert_eq!(alice.say("g:crew", 1).seq(), 1, "changes of members take no number");
    carol.expect_push("g:crew", 1);
    bob.expect_no("msg.push");
    bob.ask("msg.send", json!({"conversation_id": "g:crew", "body": 1})).expect_error("forbidden");
    bob.ask("group.leave", json!({"conversation_id": "g:crew"})).expect_error("forbidden");
}

fn owners_and_admins_change_members_and_names_and_others_do_not(transport: Transport) {
    let server = Server::start();
    let [mut alice, mut bob, mut carol] = trio(&server, transport);
    let tries = [
        ("group.add", json!({"conversation_id": "g:crew", "users": ["dave"]})),
        ("group.rename", json!({"conversation_id": "g:crew", "name": "Mutiny"})),
        ("group.remove", json!({"conversation_id": "g:crew", "users": ["carol"]})),
        ("group.role", json!({"conversation_id": "g:crew", "user": "bob", "role": "owner"})),
    ];
    for (kind, fields) in &tries {
        bob.ask(kind, fields.clone()).expect_error("forbidden");
    }
    carol.expect_no("conversation.changed");
    alice.demand("group.role", json!({"conversation_id": "g:crew", "user": "bob", "role": "admin"}));
    assert_eq!(change(&mut bob, "role")["users"], json!(["bob"]));
    for (kind, fields) in &tries[..3] {
        bob.demand(kind, fields.clone());
    }
    assert_eq!(alice.conversation("g:crew")["name"], "Mutiny");
    assert_eq!(change(&mut carol, "member_removed")["by"], "bob");
    alice.demand("group.role", json!({"conversation_id": "g:crew", "user": "bob", "role": "member"}));
    bob.ask("group.rename", json!({"conversation_id": "g:crew", "name": "Again"})).expect_error("forbidden");
}

fn only_the_owner_gives_roles(transport: Transport) {
    let server = Server::start();
    let [mut alice, mut bob, mut carol] = trio(&server, transport);
    alice.demand("group.role", json!({"conversation_id": "g:crew", "user": "bob", "role": "admin"}));
    for (user, role) in [("carol", "admin"), ("bob", "owner"), ("alice", "member")] {
        bob.ask("group.role", json!({"conversation_id": "g:crew", "user": user, "role": role}))
            .expect_error("forbidden");
    }
    let unknown =
        alice.ask("group.role", json!({"conversation_id": "g:crew", "user": "bob", "role": "captain"}));
    unknown.expect_error("malformed");
    carol
        .ask("group.remove", json!({"conversation_id": "g:crew", "users": ["bob"]}))
        .expect_error("forbidden");
}

fn changes_go_to_every_member_and_to_who_was_removed(transport: Transport) {
    let server = Server::start();
    let [mut alice, mut bob, mut carol] = trio(&server, transport);
    let mut bobs_other = server.connect_device(transport, "bob", "b2");
    let mut eve = server.connect(transport, "eve");
    alice.demand("group.add", json!({"conversation_id": "g:crew", "users": ["dave", "erin"]}));
    for client in [&mut alice, &mut bob, &mut bobs_other, &mut carol] {
        let added = change(client, "member_added");
        let mut users: Vec<&str> =
            added["users"].as_array().expect("users are named").iter().filter_map(Value::as_str).collect();
        users.sort_unstable();
        assert_eq!((users, &added["by"]), (vec!["dave", "erin"], &json!("alice")));
    }
    alice
        .demand("group.rename", json!({"conversation_id": "g:crew", "name": "New name", "meta": {"x": [1]}}));
    for client in [&mut bob, &mut bobs_other, &mut carol] {
        let renamed = change(client, "renamed");
        assert_eq!((&renamed["name"], &renamed["meta"]), (&json!("New name"), &json!({"x": [1]})));
    }
    alice.demand("group.role", json!({"conversation_id": "g:crew", "user": "carol", "role": "admin"}));
    for client in [&mut bob, &mut carol] {
        assert_eq!(change(client, "role")["users"], json!(["carol"]));
    }
    alice.demand("group.remove", json!({"conversation_id": "g:crew", "users": ["bob"]}));
    for client in [&mut bob, &mut bobs_other, &mut carol] {
        assert_eq!(change(client, "member_removed")["users"], json!(["bob"]));
    }
    alice.demand("group.rename", json!({"conversation_id": "g:crew", "name": "Newer name"}));
    assert_eq!(change(&mut carol, "renamed")["name"], "Newer name");
    bob.expect_no("conversation.changed");
    eve.expect_no("conversation.changed");
    assert_eq!(alice.say("g:crew", 1).seq(), 1, "changes take no number");
}

fn names_and_meta_are_bounded_and_listed(transport: Transport) {
    let server = Server::start();
    let [mut alice, ..] = trio(&server, transport);
    let crew = |fields: Value| {
        let mut all = json!({"conversation_id": "g:crew"});
        for (name, value) in fields.as_object().expect("an object") {
            all[name] = value.clone();
        }
        all
    };
    let (name, meta) = ("n".repeat(256), json!({"m": "m".repeat(4000)}));
    alice.demand("group.rename", crew(json!({"name": name, "meta": meta})));
    let line = alice.conversation("g:crew");
    assert_eq!((&line["name"], &line["meta"]), (&json!(name), &meta));
    for (kind, fields) in [
        ("group.rename", crew(json!({"name": "n".repeat(257)}))),
        ("group.rename", crew(json!({"meta": {"m": "m".repeat(4100)}}))),
        ("group.rename", crew(json!({"meta": [1]}))),
        ("group.add", crew(json!({"users": []}))),
        ("group.add", crew(json!({"users": (0..501).map(|n| format!("u{n}")).collect::<Vec<_>>()}))),
        ("conversation.create", json!({"members": ["bob"], "name": "n".repeat(257)})),
        ("conversation.create", json!({"members": ["bob"], "group_id": "with:colon"})),
    ] {
        let answer = alice.ask(kind, fields);
        assert_eq!(answer.kind(), "error", "{}", answer.text);
        let code = answer.text_of("code");
        assert!(["malformed", "too_large"].contains(&code), "{}", answer.text);
    }
    let line = alice.conversation("g:crew");
    assert_eq!((&line["name"], &line["meta"]), (&json!(name), &meta), "nothing changed");
}

fn a_group_is_made_and_changed_by_the_api(transport: Transport) {
    let server = Server::start();
    let mut bob = server.connect(transport, "bob");
    let mut carol = server.connect(transport, "carol");
    let made =
        json!({"group_id": "crew", "name": "Crew", "members": ["bob"], "owner": "alice", "meta": {"k": 1}});
    let answer = server.post("/api/v1/groups", &made).expect(201).json();
    assert_eq!(answer["conversation_id"], "g:crew");
    let created = change(&mut bob, "created");
    assert_eq!(created.get("by"), None, "the API made it: {created}");
    server.post("/api/v1/groups", &made).expect_refusal(409);
    let chosen = server.post("/api/v1/groups", &json!({"members": ["bob"]})).expect(201).json();
    assert!(chosen["conversation_id"].as_str().is_some_and(|id| id.starts_with("g:")), "{chosen}");

    server.call("PUT", "/api/v1/groups/crew/members/carol", None).expect(204);
    assert_eq!(change(&mut carol, "member_added")["users"], json!(["carol"]));
    assert_eq!(carol.say("g:crew", "hello").seq(), 1);
    server.call("PATCH", "/api/v1/groups/crew", Some(&json!({"name": "New"}))).expect(204);
    let renamed = change(&mut carol, "renamed");
    assert_eq!((&renamed["name"], renamed.get("by")), (&json!("New"), None));
    assert_eq!(carol.conversation("g:crew")["meta"], json!({"k": 1}), "what was not named stays");
    server.call("DELETE", "/api/v1/groups/crew/members/carol", None).expect(204);
    assert_eq!(change(&mut carol, "member_removed")["users"], json!(["carol"]));
    carol.ask("msg.send", json!({"conversation_id": "g:crew", "body": 1})).expect_error("forbidden");
    // The owner that was named is one.
    let mut alice = server.connect(transport, "alice");
    alice.demand("group.role", json!({"conversation_id": "g:crew", "user": "bob", "role": "admin"}));
    for (method, path) in [
        ("PUT", "/api/v1/groups/none/members/bob"),
        ("DELETE", "/api/v1/groups/none/members/bob"),
        ("DELETE", "/api/v1/groups/none"),
    ] {
        server.call(method, path, None).expect_refusal(404);
    }
    server.call("PATCH", "/api/v1/groups/none", Some(&json!({"name": "x"}))).expect_refusal(404);
    server.call("DELETE", "/api/v1/groups/crew", None).expect(204);
    alice.ask("msg.send", json!({"conversation_id": "g:crew", "body": 1})).expect_error("forbidden");
    assert_eq!(alice.conversations(), [] as [Value; 0]);
    server.metrics().assert_ledger_balances();
}

fn receipts_of_a_large_group_are_counts(transport: Transport) {
    let server = Server::start();
    let members: Vec<String> = (0..120).map(|n| format!("m{n}")).collect();
    let made = json!({"group_id": "big", "members": members, "owner": "alice"});
    server.post("/api/v1/groups", &made).expect(201);
    let mut alice = server.connect(transport, "alice");
    let mut readers = [server.connect(transport, "m0"), server.connect(transport, "m1")];
    alice.say("g:big", "to many");
    for reader in &mut readers {
        reader.expect_push("g:big", 1);
        reader.read("g:big", 1);
    }
    for kind in ["delivered", "read"] {
        let receipt = alice.find("the count of both readers", |frame| {
            frame.kind() == "msg.receipt" && frame.json["kind"] == kind && frame.json["count"] == 2
        });
        assert_eq!((receipt.conversation(), receipt.seq()), ("g:big", 1));
        assert_eq!(receipt.json.get("user_id"), None, "{}", receipt.text);
    }
}

fn a_message_to_many_members_counts_for_each(transport: Transport) {
    let _turn = bowline_tests::turn();
    const MEMBERS: usize = 5000;
    let server = Server::start();
    let members: Vec<String> = (0..MEMBERS).map(|n| format!("m{n:04}")).collect();
    let made = json!({"group_id": "town", "members": members, "owner": "mayor"});
    server.post("/api/v1/groups", &made).expect(201);
    let mut mayor = server.connect(transport, "mayor");
    let mut online = server.connect(transport, "m0000");
    mayor.say("g:town", "one");
    online.expect_push("g:town", 1);
    online.read("g:town", 1);
    mayor.find("the count of one", |frame| frame.kind() == "msg.receipt" && frame.json["count"] == 1);
    assert_eq!(online.say("g:town", "two").seq(), 2);
    for (user, unread) in [("mayor", 1), ("m0000", 0), ("m0001", 2), ("m4999", 2)] {
        let mut client = server.connect(transport, user);
        assert_eq!(client.unread("g:town"), unread, "{user}");
    }
    let metrics = server.metrics();
    metrics.assert_ledger_balances();
    assert_eq!(metrics.get("bowline_ledger_accepted_total"), 2.0 * MEMBERS as f64);
}
