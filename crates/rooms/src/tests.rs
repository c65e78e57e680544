use crate::*;
use bowline_protocol::frame::{Body, Since};
use bowline_protocol::ids::RoomName;
use bytes::Bytes;
use proptest::prelude::*;
use std::{cell::RefCell, sync::Arc};

/// Mailboxes of shards: what was carried, and which take no more.
#[derive(Default)]
struct Boxes {
    mail: RefCell<Vec<(usize, u64)>>,
    full: RefCell<Vec<usize>>,
}

impl Carrier for Boxes {
    fn has_space(&self, shard: usize) -> bool {
        !self.full.borrow().contains(&shard)
    }

    fn carry(&self, shard: usize, _: &Arc<Room>, messages: &[Message]) {
        self.mail.borrow_mut().extend(messages.iter().map(|message| (shard, message.offset)));
    }
}

impl Boxes {
    fn take(&self) -> Vec<(usize, u64)> {
        std::mem::take(&mut self.mail.borrow_mut())
    }
}

const LIMITS: Limits = Limits { window_messages: 3, window_ms: 100, members_max: 2 };

fn rooms(limits: Limits) -> Rooms {
    Rooms::new(limits, 3, [7, 8])
}

fn name(text: &str) -> RoomName {
    RoomName::parse(text).unwrap()
}

fn json(text: &'static str) -> Body {
    Body::Json(Bytes::from_static(text.as_bytes()))
}

fn publish(rooms: &Rooms, room: &str, count: usize, now: u64) -> u64 {
    let body = json("1");
    let posts = vec![Post { from: None, body: &body }; count];
    rooms.publish(&name(room), &posts, now, &Boxes::default()).unwrap()
}

fn since(joined: &Joined, offset: u64) -> Since {
    Since { epoch: joined.room.epoch().to_owned(), offset }
}

#[test]
fn a_push_is_the_frame_of_the_protocol() {
    let rooms = rooms(LIMITS);
    let room = rooms.join(&name("a \"b\""), 0, None, 0).unwrap().room;
    let boxes = Boxes::default();
    let body = json("{\"x\" : 1}");
    let message = rooms.send(&room, 0, Post { from: Some("u\"1"), body: &body }, 17, &boxes).unwrap();
    assert_eq!(
        &message.frame.json[..],
        br#"{"type":"room.push","room":"a \"b\"","offset":1,"from":"u\"1","ts":17,"body":{"x" : 1}}"#
    );
    let bytes = Body::Binary(Bytes::from_static(&[0, 1]));
    let message = rooms.send(&room, 0, Post { from: None, body: &bytes }, 16, &boxes).unwrap();
    assert_eq!(
        &message.frame.json[..],
        br#"{"type":"room.push","room":"a \"b\"","offset":2,"ts":17}"#,
        "time does not go back"
    );
    assert_eq!(message.frame.body, Some(Bytes::from_static(&[0, 1])));
}

#[test]
fn batches_are_bounded_and_bytes_travel_alone() {
    let rooms = rooms(LIMITS);
    let room = rooms.join(&name("r"), 0, None, 0).unwrap().room;
    let bodies = [json("1"), json("22"), Body::Binary(Bytes::from_static(b"x")), json("3"), json("4")];
    let messages: Vec<Message> = bodies
        .iter()
        .map(|body| rooms.send(&room, 0, Post { from: Some("a"), body }, 5, &Boxes::default()).unwrap())
        .collect();
    let pieces = |bytes_max| {
        let (mut rest, mut frames) = (&messages[..], Vec::new());
        while let Some((count, frame)) = batch_frame("r", rest, bytes_max) {
            frames.push(String::from_utf8(frame.json.to_vec()).unwrap());
            rest = &rest[count..];
        }
        frames
    };
    let all = pieces(1000);
    let first = r#"{"type":"room.batch","room":"r","messages":[{"offset":1,"from":"a","ts":5,"body":1},{"offset":2,"from":"a","ts":5,"body":22}]}"#;
    assert_eq!((all.len(), all[0].as_str()), (3, first));
    assert_eq!(all[1], r#"{"type":"room.push","room":"r","offset":3,"from":"a","ts":5}"#);
    assert!(all[2].starts_with(r#"{"type":"room.batch","room":"r","messages":[{"offset":4,"#), "{}", all[2]);
    assert_eq!(pieces(first.len())[0], first);
    let small = pieces(first.len() - 1);
    assert_eq!(small[0], r#"{"type":"room.push","room":"r","offset":1,"from":"a","ts":5,"body":1}"#);
    assert_eq!(small.len(), 4);
}

#[test]
fn mail_goes_to_shards_with_members_and_not_to_the_senders_own() {
    let rooms = rooms(Limits { members_max: 9, ..LIMITS });
    let boxes = Boxes::default();
    let room = rooms.join(&name("r"), 0, None, 0).unwrap().room;
    rooms.join(&name("r"), 2, None, 0).unwrap();
    let body = json("1");
    let post = Post { from: None, body: &body };
    assert_eq!(rooms.send(&room, 0, post, 0, &boxes).unwrap().offset, 1);
    assert_eq!(boxes.take(), [(2, 1)]);
    assert_eq!(rooms.publish(&name("r"), &[post, post], 0, &boxes), Ok(3));
    assert_eq!(boxes.take(), [(0, 2), (0, 3), (2, 2), (2, 3)]);
    // One that takes no more holds all back, and no number is taken.
    boxes.full.borrow_mut().push(2);
    assert_eq!(rooms.send(&room, 0, post, 0, &boxes).unwrap_err(), Refused::Behind);
    assert_eq!(rooms.publish(&name("r"), &[post], 0, &boxes), Err(Refused::Behind));
    assert_eq!(rooms.send(&room, 2, post, 0, &boxes).unwrap().offset, 4);
    assert_eq!(boxes.take(), [(0, 4)]);
    rooms.leave(&room, 0, 0);
    rooms.leave(&room, 2, 0);
    assert_eq!(rooms.publish(&name("r"), &[post], 0, &boxes), Ok(5));
    assert_eq!((boxes.take(), rooms.published()), (vec![], 5));
}

#[test]
fn what_was_missed_is_there_or_it_is_said_that_it_is_not() {
    let rooms = rooms(LIMITS);
    let first = rooms.join(&name("r"), 0, None, 0).unwrap();
    assert_eq!((first.offset, first.recovered, first.members), (0, false, 1));
    publish(&rooms, "r", 4, 10);
    let rows = [
        // The window has the last three.
        (0, None),
        (1, Some(vec![2, 3, 4])),
        (3, Some(vec![4])),
        (4, Some(vec![])),
        (5, None),
    ];
    for (offset, expected) in rows {
        let joined = rooms.join(&name("r"), 0, Some(&since(&first, offset)), 20).unwrap();
        let missed: Vec<u64> = joined.missed.iter().map(|message| message.offset).collect();
        assert_eq!((joined.offset, joined.recovered), (4, expected.is_some()), "since {offset}");
        assert_eq!(missed, expected.unwrap_or_default(), "since {offset}");
        rooms.leave(&joined.room, 0, 20);
    }
    let other = Since { epoch: "x".into(), offset: 4 };
    assert!(!rooms.join(&name("r"), 0, Some(&other), 20).unwrap().recovered);
    // Too old: only who has everything is up to date.
    rooms.leave(&first.room, 0, 20);
    assert!(!rooms.join(&name("r"), 0, Some(&since(&first, 3)), 110).unwrap().recovered);
    let again = rooms.join_again(&first.room, Some(&since(&first, 4)), 4, 110);
    assert_eq!((again.recovered, again.missed.len()), (true, 0));
}

#[test]
fn a_room_that_nobody_needs_goes_and_the_next_has_another_epoch() {
    let rooms = rooms(LIMITS);
    let one = rooms.join(&name("r"), 0, None, 0).unwrap();
    rooms.leave(&one.room, 0, 0);
    assert_eq!((rooms.rooms(), rooms.members()), (0, 0));
    let two = rooms.join(&name("r"), 0, None, 0).unwrap();
    assert_ne!(one.room.epoch(), two.room.epoch());
    publish(&rooms, "r", 1, 0);
    rooms.leave(&two.room, 0, 99);
    assert_eq!(rooms.rooms(), 1, "its window is of use to who comes back");
    let three = rooms.join(&name("r"), 0, Some(&since(&two, 0)), 99).unwrap();
    assert_eq!((three.recovered, three.missed.len()), (true, 1));
    rooms.leave(&three.room, 0, 99);
    rooms.sweep(99);
    assert_eq!(rooms.rooms(), 1, "its window is of use still");
    rooms.sweep(100);
    assert_eq!(rooms.rooms(), 0);
    assert!(!rooms.join(&name("r"), 0, Some(&since(&two, 1)), 100).unwrap().recovered);
}

#[test]
fn one_look_is_enough_for_some_rooms_and_bounded_for_many() {
    let rooms = rooms(LIMITS);
    let count = limits::SWEEP_ROOMS * 3;
    for n in 0..count {
        publish(&rooms, &format!("r{n}"), 1, 0);
    }
    assert_eq!(rooms.rooms(), count);
    let mut left = count;
    for looks in 1.. {
        rooms.sweep(1_000);
        let gone = left - rooms.rooms();
        left -= gone;
        // A part more than the bound at most, and about a 64th of all is a part.
        assert!(gone > 0 && gone < limits::SWEEP_ROOMS + count / 16, "{gone}");
        if left == 0 {
            assert!(looks <= 3, "{looks}");
            break;
        }
    }
}

#[test]
fn a_full_room_takes_nobody() {
    let rooms = rooms(LIMITS);
    let room = rooms.join(&name("r"), 0, None, 0).unwrap().room;
    rooms.join(&name("r"), 1, None, 0).unwrap();
    assert_eq!(rooms.join(&name("r"), 1, None, 0).unwrap_err(), Refused::Full(2));
    rooms.join(&name("other"), 1, None, 0).unwrap();
    rooms.leave(&room, 0, 0);
    assert_eq!(rooms.join(&name("r"), 1, None, 0).unwrap().members, 2);
    assert_eq!(rooms.members(), 3);
}

#[derive(Debug, Clone)]
enum Step {
    Join(usize),
    Leave(usize),
    Publish(usize),
    Wait(u64),
    Sweep,
    /// Comes back to what a member knew so many messages ago.
    Again {
        shard: usize,
        ago: u64,
    },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (0..3_usize).prop_map(Step::Join),
        (0..3_usize).prop_map(Step::Leave),
        (1..4_usize).prop_map(Step::Publish),
        (1..60_u64).prop_map(Step::Wait),
        Just(Step::Sweep),
        (0..3_usize, 0..6_u64).prop_map(|(shard, ago)| Step::Again { shard, ago }),
    ]
}

proptest! {
    /// The same as a list of all messages that was ever published.
    #[test]
    fn a_room_is_like_a_list_with_an_end(steps in proptest::collection::vec(step(), 1..80)) {
        let rooms = rooms(Limits { window_messages: 3, window_ms: 100, members_max: 4 });
        let mut now = 0_u64;
        // Of the room that there is: its epoch, when each message was published, members of each shard.
        let mut epoch = String::new();
        let mut times: Vec<u64> = Vec::new();
        let mut members: Vec<(usize, Arc<Room>)> = Vec::new();
        for step in steps {
            let kept = |times: &[u64], now: u64, offset: u64| {
                let index = offset as usize - 1;
                times.len() - index <= 3 && times[index] + 100 > now
            };
            // One that may have gone is another one, or still the same, when nothing of it is kept.
            let gone = members.is_empty() && !(1..=times.len() as u64).any(|n| kept(&times, now, n));
            match step {
                Step::Join(shard) | Step::Again { shard, .. } => {
                    let ago = if let Step::Again { ago, .. } = step { ago } else { 0 };
                    let offset = (times.len() as u64).saturating_sub(ago);
                    let asked = Since { epoch: epoch.clone(), offset };
                    let asked = matches!(step, Step::Again { .. }).then_some(&asked);
                    match rooms.join(&name("r"), shard, asked, now) {
                        Err(refused) => prop_assert_eq!((refused, members.len()), (Refused::Full(4), 4)),
                        Ok(joined) => {
                            if joined.room.epoch() != epoch {
                                prop_assert!(gone, "a room with members or messages stays");
                                epoch = joined.room.epoch().to_owned();
                                times.clear();
                                prop_assert!(!joined.recovered);
                            } else if asked.is_some() {
                                let missing: Vec<u64> = (offset + 1..=times.len() as u64).collect();
                                let there = missing.iter().all(|n| kept(&times, now, *n));
                                prop_assert_eq!(joined.recovered, there);
                                let got: Vec<u64> = joined.missed.iter().map(|m| m.offset).collect();
                                prop_assert_eq!(got, if there { missing } else { Vec::new() });
                            } else {
                                prop_assert!(!joined.recovered && joined.missed.is_empty());
                            }
                            prop_assert_eq!(joined.offset, times.len() as u64);
                            members.push((shard, joined.room));
                            prop_assert_eq!(joined.members as usize, members.len());
                        }
                    }
                }
                Step::Leave(n) if n < members.len() => {
                    let (shard, room) = members.swap_remove(n);
                    rooms.leave(&room, shard, now);
                }
                Step::Leave(_) => {}
                Step::Publish(count) => {
                    let offset = publish(&rooms, "r", count, now);
                    if offset != (times.len() + count) as u64 {
                        prop_assert!(gone, "a room with members or messages stays");
                        prop_assert_eq!(offset, count as u64);
                        times.clear();
                    }
                    times.extend(std::iter::repeat_n(now, count));
                    if gone {
                        // Which epoch it has now is told to who joins.
                        let joined = rooms.join(&name("r"), 0, None, now).unwrap();
                        epoch = joined.room.epoch().to_owned();
                        rooms.leave(&joined.room, 0, now);
                    }
                }
                Step::Wait(time) => now += time,
                Step::Sweep => (0..limits::STRIPES).for_each(|_| rooms.sweep(now)),
            }
            prop_assert_eq!(rooms.members() as usize, members.len());
        }
    }
}
