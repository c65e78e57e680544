//! The core of a client against what a server may say.

use super::*;

/// What a core puts out, as short lines.
fn brief(core: &mut Core) -> Vec<String> {
    let line = |output| match output {
        Output::Connect { fresh_token } => format!("connect fresh={fresh_token}"),
        Output::Close => "close".into(),
        Output::Binary(bytes) => format!("binary {}", bytes.len()),
        Output::Text(text) => {
            let frame: Value = serde_json::from_str(&text).expect("JSON");
            let mut line = format!("> {}", frame["type"].as_str().unwrap_or_default());
            for field in ["id", "seq", "after_seq", "room", "since"] {
                if !frame[field].is_null() && !frame[field].to_string().contains('~') {
                    line += &format!(" {}", frame[field].to_string().trim_matches('"'));
                }
            }
            line
        }
        Output::Event(Event::Message(m)) => format!("message {}", m.seq),
        Output::Event(Event::Acked { id, seq, .. }) => format!("acked {id} {seq}"),
        Output::Event(Event::Failed { id, code, .. }) => format!("failed {id} {code}"),
        Output::Event(Event::Connected { .. }) => "connected".into(),
        Output::Event(Event::Waiting { .. }) => "waiting".into(),
        Output::Event(Event::RoomMessage(m)) => format!("{} {}", m.room, m.offset),
        Output::Event(Event::RoomJoined { room, is_gap, .. }) => format!("joined {room} {is_gap}"),
        Output::Event(Event::RoomRefused { room, code, .. }) => format!("refused {room} {code}"),
        Output::Event(Event::Disconnected { code, .. }) => format!("disconnected {code:?}"),
        Output::Event(Event::Stopped { code, .. }) => format!("stopped {code}"),
        Output::Event(other) => format!("{other:?}"),
    };
    core.take_outputs().into_iter().map(line).collect()
}

fn open(core: &mut Core, now: u64) {
    core.on_time(now);
    core.on_opened("t", now);
    core.on_text(
        r#"{"type":"connected","user_id":"a","device_id":"d","ping_after_ms":45000,"close_after_ms":90000}"#,
        now,
    );
    core.take_outputs();
}

fn core() -> Core {
    Core::new(Settings { seed: 3, ..Settings::default() })
}

fn push(seq: u64) -> String {
    format!(
        r#"{{"type":"msg.push","conversation_id":"d:a:b","seq":{seq},"id":"x{seq}","from":"b","ts":1,"body":1}}"#
    )
}

#[test]
fn what_was_not_acknowledged_goes_out_again_in_order_with_the_same_ids() {
    let mut core = core();
    core.send("1".into(), Target::User("b".into()), Body::default(), 0).unwrap();
    open(&mut core, 0);
    core.send("2".into(), Target::User("b".into()), Body::default(), 0).unwrap();
    assert_eq!(brief(&mut core), ["> msg.send 2"]);
    core.on_text(r#"{"type":"msg.ack","id":"1","conversation_id":"d:a:b","seq":1,"ts":1}"#, 1);
    assert_eq!(brief(&mut core), ["acked 1 1", "> msg.recv 1"]);
    core.send("3".into(), Target::User("b".into()), Body::default(), 1).unwrap();
    core.on_closed(Some(1006), "", 2);
    assert_eq!(brief(&mut core), ["> msg.send 3", "disconnected Some(1006)"]);
    let due = core.next_due().unwrap();
    core.on_time(due);
    core.on_opened("t", due);
    core.on_text(r#"{"type":"connected","device_id":"d","ping_after_ms":45000,"close_after_ms":90000}"#, due);
    let lines = brief(&mut core);
    assert_eq!(lines[..3], ["connect fresh=false", "> connect", "connected"]);
    assert_eq!(lines[4..], ["> msg.send 2", "> msg.send 3"]);
}

#[test]
fn a_temporary_refusal_is_repeated_and_a_final_one_reported() {
    let mut core = core();
    open(&mut core, 0);
    for id in ["1", "2"] {
        core.send(id.into(), Target::User("b".into()), Body::default(), 0).unwrap();
    }
    core.take_outputs();
    core.on_text(r#"{"type":"error","code":"unavailable","message":"","id":"1","retry_after_ms":500}"#, 0);
    core.on_text(r#"{"type":"error","code":"forbidden","message":"","id":"2"}"#, 0);
    assert_eq!(brief(&mut core), ["failed 2 forbidden"]);
    let due = core.next_due().unwrap();
    assert!((500..=1000).contains(&due));
    core.on_time(due);
    assert_eq!(brief(&mut core), ["> msg.send 1"]);
}

#[test]
fn messages_come_in_order_and_gaps_are_fetched() {
    let mut core = core();
    open(&mut core, 0);
    core.on_text(&push(1), 0);
    assert_eq!(brief(&mut core), ["message 1", "> msg.recv 1"]);
    core.on_text(&push(4), 0);
    assert_eq!(brief(&mut core), ["> history 1"]);
    core.on_text(&push(5), 0);
    assert_eq!(brief(&mut core), [""; 0]);
    let page = r#"{"type":"history.page","id":"~1","conversation_id":"d:a:b","first_seq":1,"more":false,"messages":[
        {"seq":2,"id":"x","from":"b","ts":1,"body":1},{"seq":3,"id":"y","from":"b","ts":1,"body":"AP8H","body_encoding":"base64"}]}"#;
    core.on_text(page, 0);
    assert_eq!(brief(&mut core), ["message 2", "message 3", "message 4", "message 5", "> msg.recv 5"]);
}

#[test]
fn a_history_that_is_refused_for_now_is_asked_for_again() {
    let mut core = core();
    open(&mut core, 0);
    core.on_text(&push(1), 0);
    core.on_text(&push(3), 0);
    core.take_outputs();
    let refused = |id: u64, code: &str| {
        format!(r#"{{"type":"error","code":"{code}","message":"","id":"~{id}","retry_after_ms":500}}"#)
    };
    core.on_text(&refused(1, "unavailable"), 0);
    let due = core.next_due().unwrap();
    assert!((500..=1000).contains(&due), "{due}");
    core.on_time(due);
    assert_eq!(brief(&mut core), ["> history 1"]);
    // Refused for good: what can be had is handed out.
    core.on_text(&refused(2, "forbidden"), due);
    assert_eq!(brief(&mut core), ["message 3", "> msg.recv 3"]);
}

#[test]
fn the_same_id_twice_has_two_answers() {
    let mut core = core();
    open(&mut core, 0);
    for _ in 0..2 {
        core.send("1".into(), Target::User("b".into()), Body::default(), 0).unwrap();
    }
    core.take_outputs();
    let refused = r#"{"type":"error","code":"unavailable","message":"","id":"1","retry_after_ms":500}"#;
    core.on_text(refused, 0);
    core.on_text(refused, 0);
    core.on_time(2_000);
    assert_eq!(brief(&mut core), ["> msg.send 1", "> msg.send 1"]);
    for _ in 0..2 {
        core.on_text(r#"{"type":"msg.ack","id":"1","conversation_id":"d:a:b","seq":1,"ts":1}"#, 2_000);
    }
    assert_eq!(core.unacknowledged(), 0);
    core.take_outputs();
    // One that was answered otherwise before: the number is not a gap.
    core.on_text(r#"{"type":"msg.ack","id":"1","conversation_id":"d:a:b","seq":2,"ts":1}"#, 2_000);
    assert_eq!(brief(&mut core), ["> msg.recv 2"]);
}

#[test]
fn an_own_message_whose_ack_was_lost_is_acknowledged_by_the_history() {
    let mut core = core();
    open(&mut core, 0);
    core.on_text(&push(1), 0);
    core.send("x".into(), Target::User("b".into()), Body::default(), 0).unwrap();
    core.on_closed(Some(1006), "", 1);
    let due = core.next_due().unwrap();
    open(&mut core, due);
    core.on_text(&push(3), 9_000);
    core.take_outputs();
    let page = r#"{"type":"history.page","id":"~1","conversation_id":"d:a:b","first_seq":1,"more":false,
        "messages":[{"seq":2,"id":"x","from":"a","ts":1,"body":1},{"seq":3,"id":"y","from":"b","ts":1,"body":1}]}"#;
    core.on_text(page, 9_000);
    assert_eq!(brief(&mut core), ["acked x 2", "message 3", "> msg.recv 3"]);
    assert_eq!(core.unacknowledged(), 0);
}

#[test]
fn final_codes_stop_and_a_drain_names_the_time() {
    let mut core = core();
    open(&mut core, 0);
    core.on_text(r#"{"type":"session.migrate","retry_after_ms":700,"reason":"draining"}"#, 100);
    assert_eq!(brief(&mut core), ["close", "disconnected Some(1001)"]);
    assert_eq!(core.next_due(), Some(800));
    open(&mut core, 800);
    core.on_text(r#"{"type":"session.closed","code":4503,"reason":"revoked"}"#, 900);
    core.on_closed(Some(1006), "", 900);
    assert_eq!(brief(&mut core), ["stopped 4503"]);
    assert_eq!(core.next_due(), None);
    assert!(core.send("1".into(), Target::User("b".into()), Body::default(), 901).is_err());
}

fn room_push(offset: u64) -> String {
    format!(r#"{{"type":"room.push","room":"r","offset":{offset},"from":"b","ts":1,"body":1}}"#)
}

/// Comes back and says what it asks for then.
fn comes_back(core: &mut Core, now: u64) -> Vec<String> {
    core.on_closed(Some(1006), "", now);
    core.on_time(core.next_due().unwrap());
    core.on_opened("t", now);
    core.take_outputs();
    core.on_text(r#"{"type":"connected","device_id":"d","ping_after_ms":45000,"close_after_ms":90000}"#, now);
    brief(core)
}

#[test]
fn rooms_are_joined_again_from_where_the_client_stands() {
    let mut core = core();
    core.join("r").unwrap();
    assert!(core.send_in_room("r", Body::default()).is_err(), "not yet");
    core.on_time(0);
    core.on_opened("t", 0);
    core.take_outputs();
    core.on_text(r#"{"type":"connected","device_id":"d","ping_after_ms":45000,"close_after_ms":90000}"#, 0);
    assert_eq!(brief(&mut core), ["connected", "> room.join r"]);
    core.on_text(r#"{"type":"room.joined","id":"~join1","room":"r","epoch":"e","offset":4,"recovered":false,"members":2}"#, 0);
    core.on_text(&room_push(4), 0);
    core.on_text(&room_push(5), 0);
    let batch = r#"{"type":"room.batch","room":"r","messages":[{"offset":6,"from":"b","ts":1,"body":1},{"offset":7,"from":"b","ts":1,"body":1}]}"#;
    core.on_text(batch, 0);
    assert_eq!(brief(&mut core), ["joined r false", "r 5", "r 6", "r 7"]);
    core.send_in_room("r", Body::default()).unwrap();
    core.on_text(r#"{"type":"error","code":"overloaded","message":"","id":"~room2","retry_after_ms":1}"#, 0);
    assert_eq!(brief(&mut core), ["> room.send r", "failed ~room2 overloaded"]);
    assert_eq!(comes_back(&mut core, 10)[1..], [r#"> room.join r {"epoch":"e","offset":7}"#]);
    core.on_text(
        r#"{"type":"room.joined","id":"~join3","room":"r","epoch":"e","offset":9,"recovered":true}"#,
        10,
    );
    core.on_text(&room_push(8), 10);
    core.on_text(&room_push(9), 10);
    assert_eq!(brief(&mut core), ["joined r false", "r 8", "r 9"]);
    comes_back(&mut core, 20);
    core.on_text(
        r#"{"type":"room.joined","id":"~join4","room":"r","epoch":"f","offset":2,"recovered":false}"#,
        20,
    );
    core.on_text(&room_push(3), 20);
    assert_eq!(brief(&mut core), ["joined r true", "r 3"]);
    core.leave("r");
    core.on_text(&room_push(4), 20);
    core.on_text(r#"{"type":"ok","id":"~leave5"}"#, 20);
    assert_eq!(brief(&mut core), ["> room.leave r"]);
    assert_eq!(comes_back(&mut core, 30), ["connected"]);
}

#[test]
fn a_full_room_is_asked_again_and_a_closed_one_given_up() {
    let mut core = core();
    open(&mut core, 0);
    core.join("full").unwrap();
    core.join("closed").unwrap();
    core.take_outputs();
    core.on_text(
        r#"{"type":"error","code":"overloaded","message":"","id":"~join1","retry_after_ms":500}"#,
        0,
    );
    core.on_text(r#"{"type":"error","code":"forbidden","message":"","id":"~join2"}"#, 0);
    assert_eq!(brief(&mut core), ["refused closed forbidden"]);
    let due = core.next_due().unwrap();
    assert!((500..=1000).contains(&due));
    core.on_time(due);
    assert_eq!(brief(&mut core), ["> room.join full"]);
    assert_eq!(core.next_due(), Some(45_000));
}

#[test]
fn a_refused_client_waits_as_long_as_it_was_asked_to() {
    let mut core = core();
    core.on_time(0);
    core.on_refused("429", Some(5_000), 10);
    let due = core.next_due().unwrap();
    assert!((5_010..=6_010).contains(&due), "{due}");
    core.on_time(due);
    assert!(brief(&mut core).contains(&"connect fresh=false".to_owned()));
}

#[test]
fn silence_is_asked_about_and_then_ended() {
    let mut core = core();
    open(&mut core, 0);
    core.on_time(45_000);
    assert_eq!(brief(&mut core), ["> ping"]);
    core.on_text(r#"{"type":"pong"}"#, 45_100);
    core.on_time(90_000);
    assert_eq!(brief(&mut core), [""; 0]);
    core.on_time(90_100);
    core.on_time(135_100);
    assert_eq!(brief(&mut core), ["> ping", "close", "disconnected None"]);
}
