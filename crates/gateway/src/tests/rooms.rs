//! Rooms: order, completeness and bounds, whichever shards publishers and members are on.

use super::rig::*;
use crate::{Config, RoomJoin, RoomLimits, RoomPost};
use bowline_protocol::{Body, CloseCode, ids::RoomName};
use bytes::Bytes;
use std::{
    io::Write,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

fn workers(workers: usize) -> Config {
    Config { workers, ..config() }
}

fn join(room: &str) -> String {
    format!(r#"{{"type":"room.join","id":"j","room":"{room}"}}"#)
}

fn send(room: &str, body: &str) -> String {
    format!(r#"{{"type":"room.send","id":"s","room":"{room}","body":{body}}}"#)
}

fn publish(rig: &Rig, room: &str, bodies: &[&'static str]) -> u64 {
    let bodies: Vec<Body> =
        bodies.iter().map(|text| Body::Json(Bytes::from_static(text.as_bytes()))).collect();
    let posts: Vec<RoomPost<'_>> = bodies.iter().map(|body| RoomPost { from: None, body }).collect();
    rig.handle.publish(&RoomName::trusted(room), &posts).unwrap()
}

impl Client {
    /// Joins, and says from which number on it will be pushed.
    fn joins(&mut self, room: &str) -> u64 {
        self.say(&join(room));
        let joined = self.expect(r#"{"type":"room.joined","id":"j""#);
        field(&joined, "offset").parse().unwrap()
    }

    /// The next push must have this number; its body.
    fn pushed(&mut self, offset: u64) -> String {
        let push = self.expect(r#"{"type":"room.push""#);
        assert_eq!(field(&push, "offset"), offset.to_string(), "{push}");
        push.split_once(r#","body":"#).unwrap().1.trim_end_matches('}').to_owned()
    }
}

#[test]
fn a_message_goes_to_every_member_its_sender_included() {
    for count in [1, 2] {
        let rig = Rig::new(workers(count));
        let mut clients: Vec<Client> =
            (0..6).map(|n| rig.client(BOTH[n / 2 % 2], &format!("u{n}"))).collect();
        for (n, client) in clients.iter_mut().enumerate() {
            client.say(&join("lobby"));
            let joined = client.text();
            assert!(
                joined.starts_with(r#"{"type":"room.joined","id":"j","room":"lobby","epoch":""#),
                "{joined}"
            );
            assert_eq!((field(&joined, "offset"), field(&joined, "recovered")), ("0", "false"));
            assert_eq!(field(&joined, "members"), (n + 1).to_string());
        }
        for n in 0..6 {
            clients[n].say(&send("lobby", &format!("{{\"n\":{n}}}")));
            for client in &mut clients {
                let push = client.text();
                let expected =
                    format!(r#"{{"type":"room.push","room":"lobby","offset":{},"from":"u{n}","ts":"#, n + 1);
                assert!(push.starts_with(&expected), "{push}");
                assert!(push.ends_with(&format!(r#","body":{{"n":{n}}}}}"#)), "{push}");
            }
        }
        let metrics = rig.handle.metrics();
        assert_eq!((metrics.rooms, metrics.rooms_members, metrics.rooms_published_total), (1, 6, 6));
        rig.until("36 deliveries", |handle| handle.metrics().rooms_deliveries_total == 36);
    }
}

#[test]
fn only_members_send_and_what_one_has_left_is_not_pushed() {
    let rig = Rig::start();
    let mut alice = rig.client(Kind::Ws, "alice");
    let mut bob = rig.client(Kind::Tcp, "bob");
    alice.joins("r");
    bob.say(&send("r", "1"));
    bob.expect(r#"{"type":"error","code":"forbidden""#);
    bob.joins("r");
    // What was sent before leaving still comes.
    bob.say(&send("r", "2"));
    bob.say(r#"{"type":"room.leave","id":"l","room":"r"}"#);
    bob.say(&send("r", "3"));
    assert_eq!(bob.pushed(1), "2");
    assert_eq!(bob.text(), r#"{"type":"ok","id":"l"}"#);
    let refused = bob.expect(r#"{"type":"error","code":"forbidden""#);
    assert_eq!(field(&refused, "id"), "s");
    bob.say(r#"{"type":"room.leave","id":"l","room":"never"}"#);
    assert_eq!(bob.text(), r#"{"type":"ok","id":"l"}"#);
    assert_eq!(alice.pushed(1), "2");
    alice.say(&send("r", "4"));
    assert_eq!(alice.pushed(2), "4");
    bob.say("ping");
    assert_eq!(bob.text(), "pong");
    let bad = ["", &"x".repeat(129), "a\\u0000b"];
    for room in bad {
        bob.say(&join(room));
        bob.expect(r#"{"type":"error","code":"malformed""#);
    }
}

#[test]
fn every_way_to_end_a_connection_leaves_its_rooms() {
    let rig = Rig::new(workers(2));
    let mut stays = rig.client(Kind::Ws, "stays");
    stays.joins("r0");
    let ends: [fn(&mut Client); 4] = [
        |client| client.raw(&framed(client.kind, 8, &[])),
        |client| client.stream.shutdown(std::net::Shutdown::Both).unwrap(),
        |client| client.raw(&[0xff; 64]),
        |client| {
            let linger = socket2::SockRef::from(&client.stream).set_linger(Some(Duration::ZERO));
            linger.unwrap();
        },
    ];
    for end in ends {
        let mut clients: Vec<Client> = (0..4).map(|n| rig.client(Kind::Ws, &format!("u{n}"))).collect();
        for client in &mut clients {
            for room in ["r0", "r1", "r2"] {
                client.joins(room);
            }
        }
        assert_eq!((rig.handle.metrics().rooms, rig.handle.metrics().rooms_members), (3, 13));
        for mut client in clients {
            end(&mut client);
        }
        rig.until("all have left", |handle| {
            let metrics = handle.metrics();
            (metrics.rooms, metrics.rooms_members) == (1, 1)
        });
    }
    stays.say(&send("r0", "1"));
    stays.pushed(1);
}

#[test]
fn members_that_come_and_go_keep_their_places() {
    let rig = Rig::new(workers(1));
    let rooms = ["a", "b", "c"];
    let mut clients: Vec<Client> = (0..4).map(|n| rig.client(BOTH[n % 2], &format!("u{n}"))).collect();
    let mut members = [[false; 4]; 3];
    let mut offsets = [0_u64; 3];
    let mut random = 7_u32;
    for _ in 0..300 {
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let (n, room) = ((random >> 8) as usize % 4, (random >> 16) as usize % 3);
        if members[room][n] {
            clients[n].say(&format!(r#"{{"type":"room.leave","id":"l","room":"{}"}}"#, rooms[room]));
            assert_eq!(clients[n].text(), r#"{"type":"ok","id":"l"}"#);
        } else {
            // It may be another one: nobody was there and nothing was kept.
            offsets[room] = clients[n].joins(rooms[room]);
        }
        members[room][n] = !members[room][n];
        for room in 0..3 {
            let Some(sender) = (0..4).find(|n| members[room][*n]) else { continue };
            clients[sender].say(&send(rooms[room], "1"));
            offsets[room] += 1;
            for n in (0..4).filter(|n| members[room][*n]) {
                clients[n].pushed(offsets[room]);
            }
        }
    }
}

#[test]
fn the_order_is_one_for_all_whoever_publishes() {
    const EACH: u64 = 2_000;
    for count in [1, 2, 3] {
        let rig = Rig::new(Config { outbound_limit_bytes: 64 << 20, ..workers(count) });
        let mut clients: Vec<Client> =
            (0..8).map(|n| rig.client(BOTH[n / 2 % 2], &format!("u{n}"))).collect();
        for client in &mut clients {
            client.joins("r");
        }
        std::thread::scope(|scope| {
            for client in &clients[..4] {
                let (kind, mut stream) = (client.kind, client.stream.try_clone().unwrap());
                scope.spawn(move || {
                    for n in 0..EACH {
                        stream.write_all(&framed(kind, 1, send("r", &n.to_string()).as_bytes())).unwrap();
                    }
                });
            }
            scope.spawn(|| {
                for _ in 0..EACH / 10 {
                    publish(&rig, "r", &["-1"; 10]);
                }
            });
            let reading: Vec<_> = clients
                .iter_mut()
                .map(|client| {
                    scope
                        .spawn(move || (1..=EACH * 5).map(|offset| client.pushed(offset)).collect::<Vec<_>>())
                })
                .collect();
            let mut seen: Vec<Vec<String>> =
                reading.into_iter().map(|thread| thread.join().unwrap()).collect();
            let first = seen.pop().unwrap();
            assert!(seen.iter().all(|other| *other == first), "all see the same");
        });
    }
}

/// Publishers on all shards and the API, members that join and leave: everybody sees all from its number on.
#[test]
fn a_member_sees_a_run_without_gaps_from_where_it_joined() {
    let rig = Rig::new(Config { outbound_limit_bytes: 64 << 20, ..workers(2) });
    let is_over = AtomicBool::new(false);
    let mut publishers: Vec<Client> = (0..4).map(|n| rig.client(Kind::Tcp, &format!("p{n}"))).collect();
    for client in &mut publishers {
        client.joins("r");
    }
    std::thread::scope(|scope| {
        for client in &mut publishers {
            let (is_over, mut writer) = (&is_over, client.stream.try_clone().unwrap());
            scope.spawn(move || {
                while !is_over.load(Ordering::Relaxed) {
                    for n in 0..5 {
                        let frame = framed(Kind::Tcp, 1, send("r", &n.to_string()).as_bytes());
                        writer.write_all(&frame).unwrap();
                    }
                    std::thread::sleep(Duration::from_micros(300));
                }
                writer.write_all(&framed(Kind::Tcp, 1, b"ping")).unwrap();
            });
            scope.spawn(move || {
                let mut offset = 1;
                // The bare pong may overtake pushes of its turn.
                let mut text = client.text();
                while text != "pong" {
                    assert_eq!(field(&text, "offset"), offset.to_string(), "{text}");
                    offset += 1;
                    text = client.text();
                }
            });
        }
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                publish(&rig, "r", &["-1", "-2", "-3"]);
                std::thread::sleep(Duration::from_micros(500));
            }
        });
        let joining: Vec<_> = (0..4)
            .map(|n| {
                let rig = &rig;
                scope.spawn(move || {
                    for round in 0..40 {
                        let mut client = rig.client(BOTH[n / 2 % 2], &format!("m{n}-{round}"));
                        for _ in 0..3 {
                            let mut offset = client.joins("r");
                            for _ in 0..30 {
                                offset += 1;
                                client.pushed(offset);
                            }
                            client.say(r#"{"type":"room.leave","id":"l","room":"r"}"#);
                            let mut text = client.text();
                            while text != r#"{"type":"ok","id":"l"}"# {
                                offset += 1;
                                assert_eq!(field(&text, "offset"), offset.to_string(), "{text}");
                                text = client.text();
                            }
                        }
                    }
                })
            })
            .collect();
        for thread in joining {
            thread.join().unwrap();
        }
        is_over.store(true, Ordering::Relaxed);
    });
}

#[test]
fn who_comes_back_gets_what_it_missed_and_then_the_rest() {
    for count in [1, 2] {
        let rig = Rig::new(Config {
            rooms: RoomLimits { window_messages: 5, window_ms: 300_000, members_max: 100 },
            ..workers(count)
        });
        let mut alice = rig.client(Kind::Ws, "alice");
        alice.say(&join("r"));
        let joined = alice.text();
        let epoch = field(&joined, "epoch").to_owned();
        let since = |offset: u64, epoch: &str| {
            format!(
                r#"{{"type":"room.join","id":"j","room":"r","since":{{"epoch":"{epoch}","offset":{offset}}}}}"#
            )
        };
        for n in 1..=10 {
            alice.say(&send("r", &n.to_string()));
            alice.pushed(n);
        }
        for (offset, known, recovered) in [
            (10, true, true),
            (7, true, true),
            (5, true, true),
            (4, true, false),
            (7, false, false),
            (11, true, false),
        ] {
            let mut bob = rig.client(Kind::Tcp, &format!("bob{offset}"));
            bob.say(&since(offset, if known { &epoch } else { "other" }));
            let joined = bob.text();
            assert_eq!(field(&joined, "recovered"), recovered.to_string(), "{offset}: {joined}");
            assert_eq!((field(&joined, "offset"), field(&joined, "epoch")), ("10", &*epoch));
            if recovered {
                for missed in offset + 1..=10 {
                    assert_eq!(bob.pushed(missed), missed.to_string());
                }
            }
            bob.say("ping");
            assert_eq!(bob.text(), "pong");
        }
        // Once more on the same connection: what was missed again, and each new one once.
        alice.say(&since(8, &epoch));
        let joined = alice.expect(r#"{"type":"room.joined""#);
        assert_eq!((field(&joined, "recovered"), field(&joined, "offset")), ("true", "10"));
        alice.pushed(9);
        alice.pushed(10);
        assert_eq!(alice.joins("r"), 10);
        alice.say(&send("r", "11"));
        alice.pushed(11);
        alice.say("ping");
        assert_eq!(alice.text(), "pong");
    }
}

#[test]
fn joining_again_within_a_burst_doubles_and_loses_nothing() {
    for count in [1, 2] {
        let rig = Rig::new(workers(count));
        let mut other = rig.client(Kind::Tcp, "other");
        other.joins("r");
        let mut client = rig.client(Kind::Ws, "client");
        client.joins("r");
        let mut bytes = Vec::new();
        for n in 0..200 {
            bytes.extend(framed(client.kind, 1, send("r", &n.to_string()).as_bytes()));
            bytes.extend(framed(client.kind, 1, join("r").as_bytes()));
        }
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for n in 0..200 {
                    other.say(&send("r", &n.to_string()));
                }
            });
            client.raw(&bytes);
            let (mut offset, mut joins) = (0, 0);
            while offset < 400 || joins < 200 {
                let text = client.text();
                if text.starts_with(r#"{"type":"room.joined""#) {
                    joins += 1;
                } else {
                    offset += 1;
                }
                assert_eq!(field(&text, "offset"), offset.to_string(), "{text}");
            }
        });
    }
}

#[test]
fn a_burst_travels_in_batches_to_those_who_said_so() {
    let rig = Rig::new(Config { max_frame_bytes: 1024, ..workers(1) });
    for kind in BOTH {
        let room = format!("{kind:?}");
        let mut plain = rig.client(kind, &format!("plain-{room}"));
        plain.joins(&room);
        let mut batched = rig.client(kind, &format!("batched-{room}"));
        batched.say(&format!(r#"{{"type":"room.join","id":"j","room":"{room}","batch":true}}"#));
        batched.expect(r#"{"type":"room.joined""#);
        // One alone is a push for everybody.
        batched.say(&send(&room, "0"));
        assert_eq!((batched.pushed(1), plain.pushed(1)), ("0".into(), "0".into()));
        let mut bytes = Vec::new();
        let mut publisher = rig.client(Kind::Tcp, &format!("publisher-{room}"));
        publisher.joins(&room);
        for n in 0..100 {
            let body = format!(r#"{{"n":{n},"x":"{}"}}"#, "x".repeat(200));
            bytes.extend(framed(Kind::Tcp, 1, send(&room, &body).as_bytes()));
            if n == 50 {
                let header = format!(r#"{{"type":"room.send","id":"s","room":"{room}"}}"#);
                let mut binary = (header.len() as u32).to_be_bytes().to_vec();
                binary.extend_from_slice(header.as_bytes());
                binary.extend_from_slice(&[0, 1, 2]);
                bytes.extend(framed(Kind::Tcp, 2, &binary));
            }
        }
        publisher.raw(&bytes);
        let (mut next, mut batches) = (2, 0);
        while next < 103 {
            let text = match batched.next() {
                Got::Text(text) => text,
                Got::Binary(bytes) => {
                    assert!(bytes.ends_with(&[0, 1, 2]));
                    String::from_utf8(bytes[4..bytes.len() - 3].to_vec()).unwrap()
                }
                other => panic!("{other:?}"),
            };
            assert!(text.len() <= 2048, "{} bytes", text.len());
            let begin = format!(r#"{{"type":"room.batch","room":"{room}","messages":[{{"offset":"#);
            batches += usize::from(text.starts_with(&begin));
            for part in text.split("\"offset\":").skip(1) {
                assert!(part.starts_with(&format!("{next},\"from\":")), "{part} instead of {next}");
                next += 1;
            }
        }
        assert!(batches > 0, "at least some of a hundred came together");
        for offset in 2..103 {
            match plain.next() {
                Got::Text(text) => assert_eq!(field(&text, "offset"), offset.to_string()),
                Got::Binary(bytes) => {
                    let header = String::from_utf8(bytes[4..bytes.len() - 3].to_vec()).unwrap();
                    assert_eq!(field(&header, "offset"), offset.to_string());
                }
                other => panic!("{other:?}"),
            }
        }
    }
}

#[test]
fn a_slow_member_is_closed_and_the_others_see_everything() {
    for kind in BOTH {
        let rig = Rig::new(Config { outbound_limit_bytes: 200_000, ..workers(1) });
        let mut slow = rig.client(kind, "slow");
        slow.joins("r");
        let mut quick = rig.client(kind, "quick");
        quick.joins("r");
        let body = format!("\"{}\"", "x".repeat(20_000));
        let mut offset = 0;
        rig.until("it is slow", |handle| {
            offset += 1;
            quick.say(&send("r", &body));
            assert_eq!(quick.pushed(offset), body);
            handle.metrics().closed(CloseCode::SlowConsumer) == 1
        });
        rig.until("it has left", |handle| handle.metrics().rooms_members == 1);
        for _ in 0..5 {
            offset += 1;
            quick.say(&send("r", &body));
            quick.pushed(offset);
        }
        // What it reads in the end are whole frames, in order, and the last words.
        let mut seen = 0;
        let closed = loop {
            let text = slow.text();
            if text.starts_with(r#"{"type":"session.closed""#) {
                break text;
            }
            seen += 1;
            assert_eq!(field(&text, "offset"), seen.to_string());
            assert!(text.ends_with(&format!("{body}}}")));
        };
        assert!(closed.contains(r#""code":4002,"reason":"slow-consumer""#), "{closed}");
        assert!(seen < offset);
    }
}

#[test]
fn frames_and_bytes_are_counted() {
    let rig = Rig::new(workers(1));
    let mut clients: Vec<Client> = (0..3).map(|n| rig.client(Kind::Tcp, &format!("u{n}"))).collect();
    for client in &mut clients {
        client.joins("r");
    }
    // What was read is counted a moment later.
    rig.until("the answers are counted", |handle| handle.metrics().frames_out_total == 6);
    let before = rig.handle.metrics();
    clients[0].say(&send("r", "1"));
    let mut bytes = 0;
    for client in &mut clients {
        bytes += client.expect(r#"{"type":"room.push""#).len() as u64 + 4;
    }
    rig.until("they are counted", |handle| {
        let now = handle.metrics();
        (now.frames_out_total - before.frames_out_total, now.bytes_out_total - before.bytes_out_total)
            == (3, bytes)
    });
}

#[test]
fn rooms_and_members_are_bounded() {
    let limits = RoomLimits { window_messages: 5, window_ms: 300_000, members_max: 2 };
    let rig = Rig::new(Config { rooms: limits, ..workers(2) });
    let mut clients: Vec<Client> = (0..3).map(|n| rig.client(Kind::Tcp, &format!("u{n}"))).collect();
    clients[0].joins("r");
    clients[1].joins("r");
    clients[2].say(&join("r"));
    let refused = clients[2].expect(r#"{"type":"error","code":"overloaded""#);
    assert_eq!(field(&refused, "retry_after_ms"), "1000");
    // One that is in it may ask again.
    assert_eq!(clients[1].joins("r"), 0);
    for n in 0..1000 {
        clients[2].joins(&format!("room{n}"));
    }
    clients[2].say(&join("one more"));
    clients[2].expect(r#"{"type":"error","code":"rate_limited""#);
    assert_eq!(rig.handle.metrics().rooms_members, 1002);
    drop(clients);
    rig.until("all have left", |handle| (handle.metrics().rooms, handle.metrics().rooms_members) == (0, 0));
}

#[test]
fn rooms_that_nobody_needs_go_away() {
    let limits = RoomLimits { window_messages: 5, window_ms: 1, members_max: 2 };
    let rig = Rig::new(Config { rooms: limits, ping_after_ms: 100, ..workers(2) });
    let mut client = rig.client(Kind::Ws, "alice");
    client.joins("r");
    let epoch_of = |client: &mut Client| {
        client.say(&join("r"));
        field(&client.expect(r#"{"type":"room.joined""#), "epoch").to_owned()
    };
    let epoch = epoch_of(&mut client);
    client.say(&send("r", "1"));
    client.pushed(1);
    let until = Instant::now() + Duration::from_millis(5);
    while Instant::now() < until {
        std::thread::yield_now();
    }
    client.say(r#"{"type":"room.leave","id":"l","room":"r"}"#);
    client.expect(r#"{"type":"ok""#);
    assert_eq!(rig.handle.metrics().rooms, 0, "its only message is too old");
    assert_ne!(epoch_of(&mut client), epoch);
}

#[test]
fn the_application_judges_joins() {
    let asked = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let list = asked.clone();
    let rig = Rig::with_room_judge(
        Config { room_join: RoomJoin::Hook, ..workers(2) },
        std::sync::Arc::new(move |question, reply| {
            list.lock().unwrap().push(format!("{}/{} {}", question.user, question.device, question.room));
            std::thread::spawn(move || match question.room.as_str() {
                "open" => reply(Ok(true)),
                "closed" => reply(Ok(false)),
                _ => reply(Err("no answer".into())),
            });
        }),
    );
    for kind in BOTH {
        let mut client = rig.client(kind, "alice");
        assert_eq!(client.joins("open"), 0);
        client.say(&join("closed"));
        client.expect(r#"{"type":"error","code":"forbidden""#);
        client.say(&join("lost"));
        client.expect(r#"{"type":"error","code":"unavailable""#);
    }
    assert_eq!(
        asked.lock().unwrap()[..3],
        ["alice/alice-device open", "alice/alice-device closed", "alice/alice-device lost"]
    );
    // What was asked before the end of the input is answered.
    let mut client = rig.client(Kind::Tcp, "bob");
    client.say(&join("open"));
    client.stream.shutdown(std::net::Shutdown::Write).unwrap();
    client.expect(r#"{"type":"room.joined""#);
    rig.until("it has left", |handle| handle.metrics().rooms_members <= 2);
    // Nobody to ask: nobody gets in.
    let rig = Rig::new(Config { room_join: RoomJoin::Hook, ..workers(1) });
    let mut client = rig.client(Kind::Tcp, "alice");
    client.say(&join("open"));
    client.expect(r#"{"type":"error","code":"unavailable""#);
}
