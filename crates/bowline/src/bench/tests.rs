//! Scenarios against a small server that does as it is told, so that what they count can be known beforehand.

use super::{
    Scenario,
    fleet::Fleet,
    job::{Job, Order, Tally},
    net::now_us,
    wire::{Framing, Piece, Place},
};
use serde_json::{Value, json};
use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// What a fake server does wrong.
#[derive(Clone, Copy, PartialEq)]
enum Manner {
    Good,
    /// Several messages in one frame.
    Batches,
    /// The third message is left out for everybody.
    LosesTheThird,
    /// Every message comes twice.
    Doubles,
    /// The first `connect` of every other connection is refused.
    RefusesOnce,
    NoRooms,
}

struct Fake {
    manner: Manner,
    members: Mutex<Vec<TcpStream>>,
    offset: AtomicU64,
    connects: AtomicU64,
    kept: Mutex<Vec<Value>>,
}

fn fake(manner: Manner) -> Place {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let fake = Arc::new(Fake {
        manner,
        members: Mutex::default(),
        offset: AtomicU64::new(0),
        connects: AtomicU64::new(0),
        kept: Mutex::default(),
    });
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (fake, stream) = (fake.clone(), stream.unwrap());
            std::thread::spawn(move || fake.serve(stream));
        }
    });
    Place::parse(&format!("tcp://{address}"), None).unwrap()
}

fn say(mut stream: &TcpStream, frame: &Value) {
    let mut out = Vec::new();
    Framing::Tcp.write(&mut out, frame.to_string().as_bytes());
    // Whoever is gone hears nothing.
    let _ = stream.write_all(&out);
}

impl Fake {
    fn serve(&self, mut stream: TcpStream) {
        let (mut bytes, mut chunk) = (Vec::new(), [0; 4096]);
        while let Ok(count @ 1..) = stream.read(&mut chunk) {
            bytes.extend_from_slice(&chunk[..count]);
            while let Some((Piece::Text(text), length)) = Framing::Tcp.split(&bytes).unwrap() {
                let frame: Value = serde_json::from_slice(text).unwrap();
                bytes.drain(..length);
                if !self.on_frame(&stream, &frame) {
                    return;
                }
            }
        }
    }

    fn on_frame(&self, stream: &TcpStream, frame: &Value) -> bool {
        match frame["type"].as_str().unwrap() {
            "connect" => {
                assert_eq!(frame["token"], "good");
                let number = self.connects.fetch_add(1, Ordering::SeqCst);
                if self.manner == Manner::RefusesOnce
                    && (20..40).contains(&number)
                    && number.is_multiple_of(2)
                {
                    let closed = json!({"type": "session.closed", "code": 1013, "reason": "overloaded", "retry_after_ms": 5});
                    say(stream, &closed);
                    return false;
                }
                // The field `type` comes first.
                let mut out = Vec::new();
                Framing::Tcp.write(&mut out, br#"{"type":"connected","session_id":"s"}"#);
                let _ = (&mut &*stream).write_all(&out);
            }
            "room.join" if self.manner == Manner::NoRooms => {
                let mut out = Vec::new();
                let error = br#"{"type":"error","code":"unknown_type","message":"no rooms here","id":"1"}"#;
                Framing::Tcp.write(&mut out, error);
                let _ = (&mut &*stream).write_all(&out);
            }
            "room.join" => {
                self.members.lock().unwrap().push(stream.try_clone().unwrap());
                let mut out = Vec::new();
                Framing::Tcp.write(
                    &mut out,
                    br#"{"type":"room.joined","id":"x","room":"r","epoch":"e","offset":0,"recovered":false}"#,
                );
                let _ = (&mut &*stream).write_all(&out);
            }
            "room.send" => self.on_send(&frame["body"]),
            _ => {}
        }
        true
    }

    fn on_send(&self, body: &Value) {
        // Held until everybody has it, so that the members see one order.
        let members = self.members.lock().unwrap();
        let offset = self.offset.fetch_add(1, Ordering::SeqCst) + 1;
        let message = |offset: u64| format!(r#""offset":{offset},"from":"u0","ts":1,"body":{body}}}"#);
        let push = format!(r#"{{"type":"room.push","room":"r",{}"#, message(offset));
        let frames = match self.manner {
            Manner::LosesTheThird if offset == 3 => vec![],
            Manner::Doubles => vec![push.clone(), push],
            Manner::Batches => {
                let mut kept = self.kept.lock().unwrap();
                kept.push(json!(format!("{{{}", message(offset))));
                if kept.len() < 2 {
                    return;
                }
                let all: Vec<String> = kept.drain(..).map(|one| one.as_str().unwrap().to_owned()).collect();
                vec![format!(r#"{{"type":"room.batch","room":"r","messages":[{}]}}"#, all.join(","))]
            }
            _ => vec![push],
        };
        for mut member in members.iter() {
            for frame in &frames {
                let mut out = Vec::new();
                Framing::Tcp.write(&mut out, frame.as_bytes());
                let _ = member.write_all(&out);
            }
        }
    }
}

fn job(scenario: Scenario, place: Place, count: usize, rate: Option<f64>, in_flight: usize) -> Job {
    Job {
        scenario,
        place,
        first: 0,
        count,
        total: count,
        workers: 1,
        tokens: vec!["good".into()],
        sources: 2,
        opening_max: 8,
        run: "test".into(),
        rate,
        in_flight,
        publishers: 2,
        stalled: 0,
        body_bytes: 100,
    }
}

/// Opens everything; the fleet and how many are ready.
fn open(jobs: Vec<Job>) -> (Fleet, u64, u64) {
    let mut fleet = Fleet::start(jobs, false).unwrap();
    fleet.listen(Some(Instant::now() + Duration::from_secs(20)), Fleet::is_ready).unwrap();
    assert!(fleet.is_ready());
    let (ready, failed) = fleet.ready_and_failed();
    (fleet, ready, failed)
}

fn finish(fleet: &mut Fleet) -> Tally {
    fleet.listen(Some(Instant::now() + Duration::from_secs(30)), Fleet::has_results).unwrap();
    assert!(fleet.has_results());
    fleet.sum()
}

/// Publishes for a second to 12 members.
fn fanout(manner: Manner, rate: Option<f64>, in_flight: usize) -> Tally {
    let (mut fleet, ready, failed) = open(vec![job(Scenario::Fanout, fake(manner), 12, rate, in_flight)]);
    assert_eq!((ready, failed), (12, 0), "{:?}", fleet.why);
    let began_us = now_us();
    // No warm-up, so that every message counts.
    let go = Order::Go { began_us, epoch_us: began_us, until_us: began_us + 1_000_000 };
    fleet.order(go).unwrap();
    finish(&mut fleet)
}

#[test]
fn a_room_at_a_rate_counts_every_delivery() {
    let tally = fanout(Manner::Good, Some(50.0), 1);
    assert_eq!(tally.get("published"), 50);
    assert_eq!(tally.get("measured"), 600);
    for name in ["gaps", "reordered", "stalls", "lost", "slow_consumers"] {
        assert_eq!(tally.get(name), 0, "{name}");
    }
    let times = tally.histogram("publish");
    assert_eq!(times.len(), 600);
    assert!(times.max() < 1_000_000, "{}", times.max());
}

#[test]
fn a_closed_loop_keeps_its_messages_under_way() {
    let tally = fanout(Manner::Good, None, 3);
    let published = tally.get("published");
    assert!(published > 50, "{published}");
    assert_eq!(tally.get("measured"), published * 12);
    assert_eq!(tally.get("stalls"), 0);
}

#[test]
fn messages_in_one_frame_are_counted_each() {
    let tally = fanout(Manner::Batches, None, 4);
    let published = tally.get("published");
    assert!(published > 20, "{published}");
    assert_eq!((tally.get("gaps"), tally.get("reordered")), (0, 0));
    assert!(tally.get("measured") >= (published - 4) * 12, "{} {published}", tally.get("measured"));
}

#[test]
fn gaps_repeats_and_stalls_are_seen() {
    let lossy = fanout(Manner::LosesTheThird, Some(20.0), 1);
    assert_eq!((lossy.get("gaps"), lossy.get("measured")), (12, 12 * 19));
    let stalled = fanout(Manner::LosesTheThird, None, 1);
    assert_eq!(stalled.get("measured"), 24, "the loop waits for the third one until it is over");
    let doubled = fanout(Manner::Doubles, Some(20.0), 1);
    assert_eq!((doubled.get("measured"), doubled.get("reordered")), (240, 240));
}

#[test]
fn a_server_without_rooms_is_told() {
    let (fleet, ready, failed) = open(vec![job(Scenario::Fanout, fake(Manner::NoRooms), 4, None, 1)]);
    assert_eq!((ready, failed), (0, 4));
    assert!(fleet.why.as_ref().is_some_and(|why| why.contains("no rooms here")), "{:?}", fleet.why);
}

#[test]
fn workers_of_one_room_work_together() {
    let place = fake(Manner::Good);
    let one = Job { total: 10, workers: 2, ..job(Scenario::Fanout, place, 6, None, 2) };
    let other = Job { first: 6, count: 4, ..one.clone() };
    let (mut fleet, ready, _) = open(vec![one, other]);
    assert_eq!(ready, 10);
    let began_us = now_us();
    let go = Order::Go { began_us, epoch_us: began_us, until_us: began_us + 1_000_000 };
    fleet.order(go).unwrap();
    let tally = finish(&mut fleet);
    assert!(tally.get("published") > 20, "{}", tally.get("published"));
    assert_eq!(tally.get("measured"), tally.get("published") * 10);
    assert_eq!(tally.get("stalls"), 0);
}

#[test]
fn a_storm_brings_everybody_back_whoever_is_refused() {
    let (mut fleet, ready, _) = open(vec![job(Scenario::Storm, fake(Manner::RefusesOnce), 20, None, 1)]);
    assert_eq!(ready, 20);
    fleet.order(Order::Drop { until_us: now_us() + 60_000_000 }).unwrap();
    let tally = finish(&mut fleet);
    assert_eq!(tally.get("back"), 20);
    assert_eq!(tally.get("refused_1013"), 10);
    assert_eq!(tally.get("attempts"), 30);
    assert_eq!((tally.get("failures"), tally.get("stopped")), (0, 0));
    assert_eq!(tally.histogram("return").len(), 20);
    assert!((1..=20).contains(&tally.peak_per_second()));
}
