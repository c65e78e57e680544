//! Who may do what in a group, what members see of it, and what they are told.

#[allow(dead_code)]
mod support;

use bowline_delivery::{Config, persist::Write};
use bowline_protocol::{
    ErrorCode, UserId,
    error::Refusal,
    frame::{GROUP_CHANGE_USERS_MAX, SERVER_FIELDS_BYTES},
    ids::GroupId,
    link::{Answer, Request},
};
use serde_json::Value;
use support::{MemStore, World, config, send};

fn group(name: &str) -> GroupId {
    GroupId::trusted(name)
}

fn user(name: &str) -> UserId {
    UserId::trusted(name)
}

/// A request about `g:t`, with the rest of its fields.
fn ask(kind: &str, rest: &str) -> String {
    format!(r#"{{"type":"{kind}","id":"q","conversation_id":"g:t"{rest}}}"#)
}

fn code(answer: &Answer) -> Option<ErrorCode> {
    match answer {
        Answer::Refused(Refusal { code, .. }) => Some(*code),
        _ => None,
    }
}

/// `g:t` with an owner `o`, admins `a` and `a2`, members `m` and `m2`, and a connection of each, in this order.
fn staffed() -> (World, [u64; 5]) {
    let mut world = World::new();
    let conns = ["o", "a", "a2", "m", "m2"].map(|name| world.connect(name, "1"));
    world.frame(
        conns[0],
        r#"{"type":"conversation.create","id":"q","group_id":"t","members":["a","a2","m","m2"]}"#,
    );
    for admin in ["a", "a2"] {
        world.frame(conns[0], &ask("group.role", &format!(r#","user":"{admin}","role":"admin""#)));
    }
    conns.iter().for_each(|conn| drop(world.take(*conn)));
    (world, conns)
}

#[test]
fn who_may_do_what() {
    const OWNER: usize = 0;
    const ADMIN: usize = 1;
    const MEMBER: usize = 3;
    let rows = [
        ("group.add", r#","users":["n"]"#, [true, true, false]),
        ("group.rename", r#","name":"N""#, [true, true, false]),
        ("group.remove", r#","users":["m2"]"#, [true, true, false]),
        ("group.remove", r#","users":["a2"]"#, [true, false, false]),
        ("group.remove", r#","users":["m2","a2"]"#, [true, false, false]),
        ("group.remove", r#","users":["o"]"#, [true, false, false]),
        ("group.remove", r#","users":["a"]"#, [true, true, false]),
        ("group.role", r#","user":"m2","role":"admin""#, [true, false, false]),
        ("group.role", r#","user":"a","role":"member""#, [true, false, false]),
        ("group.leave", "", [true, true, true]),
    ];
    for (kind, rest, allowed) in rows {
        for (by, allowed) in [OWNER, ADMIN, MEMBER].into_iter().zip(allowed) {
            let (mut world, conns) = staffed();
            world.frame(conns[by], &ask(kind, rest));
            let expected = if allowed { "ok q" } else { "error forbidden q" };
            assert_eq!(world.brief(conns[by])[0], expected, "{kind}{rest} by {by}");
        }
    }
}

#[test]
fn a_change_that_changes_nothing_is_confirmed_and_tells_nobody() {
    let (mut world, conns) = staffed();
    for (kind, rest) in [
        ("group.add", r#","users":["m","a"]"#),
        ("group.remove", r#","users":["nobody"]"#),
        ("group.role", r#","user":"a","role":"admin""#),
    ] {
        let commits = world.commits;
        world.frame(conns[0], &ask(kind, rest));
        assert_eq!(
            (world.brief(conns[0]), world.commits),
            (vec!["ok q".to_owned()], commits),
            "{kind}{rest}"
        );
        assert_eq!(world.brief(conns[3]), [""; 0]);
    }
    world.frame(conns[0], &ask("group.role", r#","user":"nobody","role":"admin""#));
    assert_eq!(world.brief(conns[0]), ["error not_found q"]);
}

#[test]
fn everybody_is_told_of_a_change_once_and_who_was_removed_too() {
    let (mut world, conns) = staffed();
    world.frame(conns[0], &ask("group.remove", r#","users":["m2","m2","m"]"#));
    for conn in conns {
        let told: Vec<Value> =
            world.take(conn).into_iter().filter(|f| f["type"] == "conversation.changed").collect();
        assert_eq!(told.len(), 1);
        let (users, by) = (&told[0]["users"], &told[0]["by"]);
        assert_eq!((users, by), (&serde_json::json!(["m", "m2"]), &Value::from("o")));
    }
    world.frame(conns[0], &ask("group.rename", r#","name":"New","meta":{"x":1}"#));
    let told = world.take(conns[1]).pop().expect("told");
    assert_eq!(
        (&told["change"], &told["name"], &told["meta"]["x"]),
        (&"renamed".into(), &"New".into(), &1.into())
    );
    assert!(told["users"].is_null(), "it touches nobody");
    assert_eq!(world.brief(conns[4]), [""; 0], "who is out hears no more");
}

#[test]
fn roles_names_and_meta_are_kept() {
    let (mut world, conns) = staffed();
    world.frame(conns[0], &ask("group.rename", r#","name":"N","meta":{"x":1}"#));
    world.frame(conns[0], &ask("group.rename", r#","name":"M""#));
    for is_restarted in [false, true] {
        let conn = if is_restarted {
            world.restart();
            world.connect("o", "1")
        } else {
            conns[0]
        };
        world.take(conn);
        world.frame(conn, r#"{"type":"conversation.list","id":"l"}"#);
        let page = world.take(conn).pop().expect("a page");
        let row = &page["conversations"][0];
        assert_eq!(
            (&row["name"], &row["meta"]["x"], &row["kind"]),
            (&"M".into(), &1.into(), &"group".into())
        );
        // And by who was made an admin.
        let admin = world.connect("a", "1");
        world.frame(admin, &ask("group.add", r#","users":["n"]"#));
        assert_eq!(
            world.brief(admin).last().map(String::as_str),
            Some(if is_restarted { "ok q" } else { "changed member_added" })
        );
    }
}

#[test]
fn a_group_begins_with_what_it_was_made_of() {
    let mut world = World::new();
    let o = world.connect("o", "1");
    let create = r#"{"type":"conversation.create","id":"q","group_id":"t","members":["o","b"],"name":"T","meta":{"k":[1]}}"#;
    world.frame(o, create);
    let told = world.take(o);
    assert_eq!(told[0]["conversation_id"], "g:t");
    assert_eq!(
        (&told[1]["name"], &told[1]["meta"]["k"][0], &told[1]["by"]),
        (&"T".into(), &1.into(), &"o".into())
    );
    assert_eq!(told[1]["users"], serde_json::json!(["b", "o"]));
    let stored = &world.store.conversations["g:t"];
    assert_eq!(
        (stored.name.as_deref(), stored.meta.as_deref(), stored.at),
        (Some("T"), Some(&br#"{"k":[1]}"#[..]), world.now.wall)
    );
    // Its creator is the owner, also when it named itself among the members.
    world.frame(o, &ask("group.role", r#","user":"b","role":"admin""#));
    assert_eq!(world.brief(o), ["ok q", "changed role"]);
    // A name that the server chose is new each time.
    let mut made = Vec::new();
    for _ in 0..2 {
        world.frame(o, r#"{"type":"conversation.create","id":"q","members":["b"]}"#);
        made.push(world.take(o)[0]["conversation_id"].as_str().expect("an id").to_owned());
    }
    assert!(made[0] != made[1] && made.iter().all(|id| id.starts_with("g:")), "{made:?}");
}

#[test]
fn a_group_has_at_least_one_member_and_at_most_so_many() {
    let mut world = World::with(Config { group_members_max: 3, ..config() }, MemStore::default());
    let names = |count: usize| (0..count).map(|n| user(&format!("u{n}"))).collect::<Vec<_>>();
    let create = |name: &str, members| Request::GroupCreate {
        group_id: Some(group(name)),
        name: None,
        members,
        owner: None,
        meta: None,
    };
    assert_eq!(code(&world.request(create("none", Vec::new()))), Some(ErrorCode::Malformed));
    assert_eq!(code(&world.request(create("four", names(4)))), Some(ErrorCode::TooLarge));
    assert!(matches!(world.request(create("three", names(3))), Answer::Created { .. }));
    assert_eq!(code(&world.request(create("three", names(3)))), Some(ErrorCode::Conflict));
    assert!(matches!(world.request(create("two", names(2))), Answer::Created { .. }));
    let add = |name: &str| Request::GroupAdd { group: group("two"), user: user(name) };
    assert_eq!(world.request(add("u0")), Answer::Done, "it is there already");
    assert_eq!(world.request(add("n1")), Answer::Done);
    assert_eq!(code(&world.request(add("n2"))), Some(ErrorCode::TooLarge));
}

#[test]
fn the_api_is_told_what_is_not_there() {
    let mut world = World::new();
    let (gone, who) = (group("none"), user("a"));
    for request in [
        Request::GroupAdd { group: gone.clone(), user: who.clone() },
        Request::GroupRemove { group: gone.clone(), user: who.clone() },
        Request::GroupChange { group: gone.clone(), name: Some("n".into()), meta: None },
        Request::GroupDelete { group: gone.clone() },
    ] {
        assert_eq!(code(&world.request(request)), Some(ErrorCode::NotFound));
    }
    let a = world.connect("a", "1");
    for (kind, rest) in [("group.leave", ""), ("group.add", r#","users":["b"]"#), ("conversation.clear", "")]
    {
        world.frame(a, &ask(kind, rest));
        assert_eq!(world.brief(a), ["error forbidden q"], "{kind}: to a user it is nobody's");
    }
    let members = vec![user("b")];
    world.request(Request::GroupCreate {
        group_id: Some(gone.clone()),
        name: None,
        members,
        owner: None,
        meta: None,
    });
    assert_eq!(
        code(&world.request(Request::GroupRemove { group: gone.clone(), user: who })),
        Some(ErrorCode::NotFound)
    );
    assert_eq!(world.request(Request::GroupRemove { group: gone.clone(), user: user("b") }), Answer::Done);
    let nothing = Request::GroupChange { group: gone, name: None, meta: None };
    assert_eq!(world.request(nothing), Answer::Done);
}

#[test]
fn a_direct_conversation_is_no_group() {
    let mut world = World::new();
    let a = world.connect("a", "1");
    world.frame(a, &send("m", "b"));
    world.take(a);
    world.frame(a, r#"{"type":"group.add","id":"q","conversation_id":"d:a:b","users":["c"]}"#);
    world.frame(a, r#"{"type":"group.leave","id":"q","conversation_id":"d:a:b"}"#);
    world.frame(a, r#"{"type":"group.leave","id":"q","conversation_id":"d:b:c"}"#);
    assert_eq!(world.brief(a), ["error malformed q", "error malformed q", "error forbidden q"]);
}

#[test]
fn a_group_that_is_deleted_is_nobodys_and_what_waited_has_expired() {
    let (mut world, conns) = staffed();
    for n in 1..=2 {
        world.frame(
            conns[0],
            &format!(r#"{{"type":"msg.send","id":"m{n}","conversation_id":"g:t","body":{n}}}"#),
        );
    }
    world.frame(conns[3], &support::recv("g:t", 1));
    conns.iter().for_each(|conn| drop(world.take(*conn)));
    // In the same transaction nothing more can be done to it.
    let delete = Request::GroupDelete { group: group("t") };
    world.core.hold(true);
    let from = conns[0];
    world.give_request(delete);
    world.frames(&[
        (from, r#"{"type":"msg.send","id":"m3","conversation_id":"g:t","body":3}"#),
        (from, &ask("group.add", r#","users":["n"]"#)),
        (from, &ask("conversation.clear", "")),
    ]);
    world.core.hold(false);
    world.settle();
    assert_eq!(
        world.brief(from),
        ["changed member_removed", "error forbidden m3", "error forbidden q", "error forbidden q"]
    );
    assert_eq!(world.brief(conns[4]), ["changed member_removed"]);
    assert_eq!(
        (world.store.ledger.accepted, world.store.ledger.delivered, world.store.ledger.expired),
        (8, 1, 7)
    );
    world.advance(60_000);
    assert_eq!(world.brief(conns[4]), [""; 0], "nothing is pushed again");
    world.frame(from, &ask("history", ""));
    assert_eq!(world.brief(from), ["error forbidden q"]);
}

#[test]
fn members_that_come_and_go_with_messages_in_one_transaction_are_counted_message_by_message() {
    let mut world = World::new();
    let a = world.connect("a", "1");
    world.frame(a, r#"{"type":"conversation.create","id":"q","group_id":"t","members":["b"]}"#);
    let message = |n: u32| format!(r#"{{"type":"msg.send","id":"m{n}","conversation_id":"g:t","body":{n}}}"#);
    world.core.hold(true);
    world.frames(&[
        (a, &message(1)),
        (a, &ask("group.add", r#","users":["c","d"]"#)),
        (a, &message(2)),
        (a, &ask("group.remove", r#","users":["b","c"]"#)),
        (a, &message(3)),
        (a, &ask("group.add", r#","users":["c"]"#)),
        (a, &message(4)),
    ]);
    world.core.hold(false);
    let before = world.commits;
    world.settle();
    assert_eq!(world.commits - before, 1);
    // 1 to b; 2 to b, c, d; 3 to d; 4 to c, d. What b and c left behind has expired.
    assert_eq!((world.store.ledger.accepted, world.store.ledger.expired), (7, 3));
    let members = &world.store.conversations["g:t"].members;
    assert_eq!((members["c"].joined, members["d"].joined, members.len()), (4, 2, 3));
    world.check_ledger();
}

#[test]
fn many_members_are_not_named_and_no_announcement_is_too_large() {
    let bytes_max = |world: &World| world.config.frame_bytes_max + SERVER_FIELDS_BYTES;
    for (count, is_named) in [(GROUP_CHANGE_USERS_MAX, true), (GROUP_CHANGE_USERS_MAX + 1, false)] {
        let mut world = World::new();
        let o = world.connect("u0", "1");
        let members = (0..count).map(|n| user(&format!("u{n}"))).collect();
        world.request(Request::GroupCreate {
            group_id: Some(group("t")),
            name: None,
            members,
            owner: None,
            meta: None,
        });
        let told = world.take(o).pop().expect("told");
        assert_eq!(told["users"].is_array(), is_named, "{count}");
    }
    // What does not fit is left out: first who it touches, then `meta`, then the rest.
    for (frame_bytes_max, has) in [
        (4_000, [true, true, true]),
        (1_200, [false, true, true]),
        (100, [false, false, true]),
        (0, [false, false, true]),
    ] {
        let mut world = World::with(Config { frame_bytes_max, ..config() }, MemStore::default());
        let o = world.connect("u00", "1");
        let members =
            (0..100).map(|n| user(&format!("u{n:02}{}", "x".repeat(if n == 0 { 0 } else { 10 })))).collect();
        let meta = Some(bytes::Bytes::from(format!(r#"{{"m":"{}"}}"#, "y".repeat(1_500))));
        let name = Some("N".to_owned());
        world.request(Request::GroupCreate { group_id: Some(group("t")), name, members, owner: None, meta });
        let told = world.take(o).pop().expect("told");
        let found = ["users", "meta", "name"].map(|field| !told[field].is_null());
        assert_eq!(found, has, "{frame_bytes_max}");
        assert!(told.to_string().len() <= bytes_max(&world));
    }
}

#[test]
fn a_group_is_written_once_with_its_members_and_their_roles() {
    let mut world = World::new();
    let members = ["c", "a", "b"].map(user).to_vec();
    let owner = Some(user("b"));
    world.request(Request::GroupCreate {
        group_id: Some(group("t")),
        name: None,
        members,
        owner,
        meta: None,
    });
    let [Write::CreateConversation { members, .. }] = &world.last_batch.writes[..] else {
        panic!("{:?}", world.last_batch.writes)
    };
    let rows: Vec<String> =
        members.iter().map(|(user, member)| format!("{user} {:?}", member.role)).collect();
    assert_eq!(rows, ["a Member", "b Owner", "c Member"]);
}

#[test]
fn in_a_conversation_time_never_goes_back() {
    let mut world = World::new();
    let a = world.connect("a", "1");
    world.frame(a, r#"{"type":"conversation.create","id":"q","group_id":"t","members":["b"]}"#);
    let created = world.now.wall;
    let say = |n: u32| format!(r#"{{"type":"msg.send","id":"m{n}","conversation_id":"g:t","body":1}}"#);
    // The clock jumps back right behind the creation, forth and back again.
    for (n, (wall, ts)) in [(created - 500, created), (created + 90, created + 90), (created, created + 90)]
        .into_iter()
        .enumerate()
    {
        world.now.wall = wall;
        world.take(a);
        world.frame(a, &say(n as u32));
        assert_eq!(world.take(a)[0]["ts"], ts);
    }
    world.restart();
    let a = world.connect("a", "1");
    world.now.wall = created;
    world.take(a);
    world.frame(a, &say(9));
    assert_eq!(world.take(a)[0]["ts"], created + 90, "after a restart, too");
}

#[test]
fn the_application_is_not_asked_about_messages_of_those_who_are_no_members() {
    let mut world = World::with(Config { before_send: true, ..config() }, MemStore::default());
    let (a, b) = (world.connect("a", "1"), world.connect("b", "1"));
    world.frame(a, r#"{"type":"conversation.create","id":"q","group_id":"t","members":[]}"#);
    for text in ["g:t", "g:none", "d:a:c"] {
        world
            .frame(b, &format!(r#"{{"type":"msg.send","id":"{text}","conversation_id":"{text}","body":1}}"#));
        assert_eq!((world.brief(b), world.verdicts.len()), (vec![format!("error forbidden {text}")], 0));
    }
    world.frame(a, r#"{"type":"msg.send","id":"m","conversation_id":"g:t","body":1}"#);
    assert_eq!(world.verdicts.len(), 1);
}
