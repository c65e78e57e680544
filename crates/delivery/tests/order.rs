//! What one connection says is carried out in that order, and each push has its own time.

#[allow(dead_code)]
mod support;

use bowline_delivery::persist::Query;
use bowline_protocol::{UserId, ids::GroupId, link::Request};
use support::{World, recv, send};

const AB: &str = "d:a:b";

fn history(conversation: &str) -> String {
    format!(r#"{{"type":"history","id":"h","conversation_id":"{conversation}"}}"#)
}

fn group(world: &mut World, name: &str, members: usize) -> Vec<UserId> {
    let members: Vec<UserId> = (0..members).map(|n| UserId::trusted(&format!("u{n}"))).collect();
    let (group_id, owner) = (Some(GroupId::trusted(name)), Some(members[0].clone()));
    world.request(Request::GroupCreate { group_id, name: None, members: members.clone(), owner, meta: None });
    members
}

#[test]
fn who_reads_sees_what_it_wrote_before() {
    let mut world = World::new();
    let a = world.connect("a", "1");
    let (m1, page) = (send("m1", "b"), history(AB));
    world.frames(&[(a, &m1), (a, &page)]);
    assert_eq!(world.brief(a), ["ack m1 1", "page 1 more=false"]);
    // And not what it writes behind it, however much is under way.
    world.late_outcomes = true;
    let (m2, m3) = (send("m2", "b"), send("m3", "b"));
    world.frame(a, &m2);
    world.frames(&[(a, &page), (a, &m3)]);
    assert_eq!(world.brief(a), [""; 0]);
    world.tell_outcomes();
    let seen = world.brief(a);
    assert!(
        seen.contains(&"page 1,2 more=false".to_owned())
            || seen.contains(&"page 1,2,3 more=false".to_owned()),
        "{seen:?}"
    );
    assert_eq!(seen.iter().filter(|line| line.starts_with("page")).count(), 1);

    let clear = format!(r#"{{"type":"conversation.clear","id":"c","conversation_id":"{AB}"}}"#);
    world.frames(&[(a, &clear), (a, &page)]);
    assert_eq!(world.brief(a), ["ok c", "changed cleared", "page  more=false"]);
}

#[test]
fn who_reads_where_others_write_all_the_time_has_its_turn() {
    let mut world = World::new();
    let (a, b) = (world.connect("a", "1"), world.connect("b", "1"));
    world.frame(a, &send("m0", "b"));
    world.late_outcomes = true;
    world.frame(a, &send("m1", "b"));
    world.frame(b, &history(AB));
    for n in 2..6 {
        world.frame(a, &send(&format!("m{n}"), "b"));
        world.tell_outcome();
    }
    let pages: Vec<String> = world.brief(b).into_iter().filter(|line| line.starts_with("page")).collect();
    assert_eq!(pages.len(), 1, "{pages:?}");
}

#[test]
fn who_left_reads_no_more() {
    let mut world = World::new();
    group(&mut world, "g", 3);
    let member = world.connect("u1", "1");
    world.frame(member, r#"{"type":"msg.send","id":"m","conversation_id":"g:g","body":1}"#);
    world.take(member);
    let leave = r#"{"type":"group.leave","id":"l","conversation_id":"g:g"}"#;
    let page = history("g:g");
    world.frames(&[(member, leave), (member, &page)]);
    let seen = world.brief(member);
    assert!(seen.contains(&"ok l".to_owned()) && seen.contains(&"error forbidden h".to_owned()), "{seen:?}");
}

#[test]
fn a_page_waits_for_messages_that_wait_for_another_conversation() {
    let mut world = World::new();
    let a = world.connect("a", "1");
    world.frame(a, &send("m1", "b"));
    world.take(a);
    (world.backwards, world.hold_reads) = (true, true);
    // The conversation with c has to be loaded, and what goes to b waits behind it.
    let (other, m2, page) = (send("x", "c"), send("m2", "b"), history(AB));
    world.frames(&[(a, &other), (a, &m2), (a, &page)]);
    assert_eq!(world.brief(a), [""; 0]);
    (world.backwards, world.hold_reads) = (false, false);
    world.settle();
    assert_eq!(world.brief(a), ["ack x 1", "ack m2 2", "page 1,2 more=false"]);
}

#[test]
fn a_page_waits_for_nothing_that_does_not_concern_it() {
    let mut world = World::new();
    let a = world.connect("a", "1");
    world.frame(a, &send("m1", "b"));
    (world.backwards, world.hold_reads) = (true, true);
    let (other, page) = (send("x", "c"), history(AB));
    world.frames(&[(a, &other), (a, &page)]);
    let asked = world.take_reads();
    let of_page = |(_, query): &&(u64, Query)| matches!(query, Query::Messages { conversation, .. } if conversation.as_str() == AB);
    assert_eq!(asked.iter().filter(of_page).count(), 1, "{asked:?}");
}

#[test]
fn a_list_waits_for_messages_to_conversations_that_are_being_loaded() {
    let mut world = World::new();
    let a = world.connect("a", "1");
    (world.backwards, world.hold_reads) = (true, true);
    let (to_b, to_c) = (send("m1", "b"), send("m2", "c"));
    let list = r#"{"type":"conversation.list","id":"l","limit":10}"#;
    world.frames(&[(a, &to_b), (a, &to_c), (a, list)]);
    assert_eq!(world.brief(a), [""; 0]);
    (world.backwards, world.hold_reads) = (false, false);
    world.settle();
    let frames = world.take(a);
    let page = frames.iter().find(|frame| frame["type"] == "conversation.page").expect("a page");
    assert_eq!(page["conversations"].as_array().expect("a list").len(), 2, "{page}");
}

#[test]
fn what_waits_is_announced_before_anything_that_a_client_asks() {
    let mut world = World::new();
    let a = world.connect("a", "1");
    world.frame(a, &send("m1", "b"));
    world.take(a);
    (world.backwards, world.hold_reads) = (true, true);
    let b = world.connect("b", "1");
    let (page, reply) = (history(AB), send("r", "a"));
    world.frames(&[(b, &page), (b, &reply)]);
    assert_eq!(world.brief(b), [""; 0]);
    (world.backwards, world.hold_reads) = (false, false);
    world.settle();
    let seen = world.brief(b);
    assert_eq!(seen[0], "notice d:a:b 1-1 u1", "{seen:?}");
    assert_eq!((seen.len(), world.brief(a)), (3, vec!["push 2".to_owned()]));
}

#[test]
fn what_was_said_before_the_notice_counts_although_the_client_is_gone() {
    let mut world = World::new();
    let a = world.connect("a", "1");
    (world.backwards, world.hold_reads) = (true, true);
    let b = world.connect("b", "1");
    world.frame(b, &send("m", "a"));
    world.disconnect(b);
    (world.backwards, world.hold_reads) = (false, false);
    world.settle();
    assert_eq!(world.brief(a), ["push 1"]);
}

#[test]
fn while_the_store_cannot_be_read_whoever_asks_is_told_so() {
    let mut world = World::new();
    world.read_failures = 3;
    let a = world.connect("a", "1");
    world.frame(a, &send("m1", "b"));
    assert_eq!(world.brief(a), ["error unavailable m1"]);
}

#[test]
fn a_push_is_repeated_at_its_own_time_whatever_became_of_those_before() {
    for (later, acknowledged) in
        [(3_500, false), (3_500, true), (10_000, false), (22_000, false), (22_000, true)]
    {
        let mut world = World::new();
        let (a, b) = (world.connect("a", "1"), world.connect("b", "1"));
        world.frame(a, &send("m1", "b"));
        for _ in 0..later / 500 {
            world.advance(500);
        }
        world.take(b);
        if acknowledged {
            world.frame(b, &recv(AB, 1));
        }
        world.frame(a, &send("m2", "b"));
        assert_eq!(world.brief(b), ["push 2"]);
        world.advance(2_999);
        let early = world.brief(b);
        assert!(!early.contains(&"again 2".to_owned()), "{later} {acknowledged}: {early:?}");
        world.advance(1);
        let due = world.brief(b);
        assert!(due.contains(&"again 2".to_owned()), "{later} {acknowledged}: {due:?}");
    }
}

#[test]
fn a_push_above_a_gap_keeps_its_attempts_until_the_gap_is_closed() {
    let mut world = World::new();
    let (a, b) = (world.connect("a", "1"), world.connect("b", "1"));
    world.disconnect(b);
    for id in ["m1", "m2"] {
        world.frame(a, &send(id, "b"));
    }
    let b = world.connect("b", "1");
    world.frame(a, &send("m3", "b"));
    assert_eq!(world.brief(b), ["notice d:a:b 1-2 u2", "push 3"]);
    for _ in 0..60 {
        world.advance(1_000);
    }
    assert_eq!(world.brief(b), [""; 0]);
    world.frame(b, &recv(AB, 2));
    let mut at = Vec::new();
    for second in 1..=60 {
        world.advance(1_000);
        at.extend(world.brief(b).iter().map(|line| (second, line.clone())));
    }
    assert_eq!(at, [3, 9, 21].map(|second| (second, "again 3".to_owned())));
}

#[test]
fn receipts_count_for_each_number_that_was_reached() {
    let mut world = World::new();
    let members = group(&mut world, "big", 121);
    let conns: Vec<u64> = members[..61].iter().map(|user| world.connect(user, "1")).collect();
    let says = |id: &str| format!(r#"{{"type":"msg.send","id":"{id}","conversation_id":"g:big","body":1}}"#);
    world.frame(conns[0], &says("m1"));
    world.frame(conns[1], &says("m2"));
    world.frame(conns[0], &says("m3"));
    world.take(conns[0]);
    world.take(conns[1]);
    let texts: Vec<String> = (0..60).map(|n| recv("g:big", 1 + n / 20)).collect();
    let frames: Vec<(u64, &str)> = conns[1..].iter().copied().zip(texts.iter().map(String::as_str)).collect();
    world.frames(&frames);
    // Those who sent the first and the third have received theirs; u1, among the first twenty, sent the second.
    assert_eq!(world.brief(conns[0]), ["delivered 1 n=60", "delivered 2 n=40", "delivered 3 n=20"]);
    assert_eq!(world.brief(conns[1]), ["delivered 2 n=40", "delivered 3 n=20"]);
}

#[test]
fn of_very_many_numbers_the_newest_have_receipts() {
    // So many numbers of one group, and of another one in the same transaction.
    for (first, second, told) in [(20, 0, 16), (10, 10, 20), (20, 20, 32), (16, 1, 17)] {
        let mut world = World::new();
        let conns = ["y", "z"].map(|name| {
            let members = group(&mut world, name, 121);
            members[..=20].iter().map(|user| world.connect(user, name)).collect::<Vec<u64>>()
        });
        let mut texts = Vec::new();
        for (conns, name, count) in [(&conns[0], "y", first), (&conns[1], "z", second)] {
            for n in 0..count {
                let text = format!(
                    r#"{{"type":"msg.send","id":"{name}{n}","conversation_id":"g:{name}","body":1}}"#
                );
                world.frame(conns[0], &text);
                texts.push((conns[1 + n as usize], recv(&format!("g:{name}"), n + 1)));
            }
        }
        world.take(conns[0][0]);
        let frames: Vec<(u64, &str)> = texts.iter().map(|(conn, text)| (*conn, text.as_str())).collect();
        world.frames(&frames);
        let seen = world.brief(conns[0][0]);
        assert_eq!(seen.len(), told, "{first} {second}: {seen:?}");
        assert!(seen.contains(&format!("delivered {first} n=1")), "the newest: {seen:?}");
        let oldest = first.saturating_sub(16) + 1;
        assert!(seen.contains(&format!("delivered {oldest} n={}", first - oldest + 1)), "{seen:?}");
    }
}

#[test]
fn receipts_are_for_members_who_see_the_message() {
    let mut world = World::new();
    group(&mut world, "g", 3);
    let (owner, sender, other) =
        (world.connect("u0", "1"), world.connect("u1", "1"), world.connect("u2", "1"));
    world.frame(sender, r#"{"type":"msg.send","id":"m","conversation_id":"g:g","body":1}"#);
    world.frame(owner, &recv("g:g", 1));
    assert_eq!(world.brief(sender), ["ack m 1", "delivered 1 u0"]);
    world.frame(sender, r#"{"type":"group.leave","id":"l","conversation_id":"g:g"}"#);
    world.frame(owner, r#"{"type":"group.add","id":"a","conversation_id":"g:g","users":["u1"]}"#);
    world.take(sender);
    world.frame(other, &recv("g:g", 1));
    assert_eq!(world.brief(sender), [""; 0], "it joined behind the message");
}
