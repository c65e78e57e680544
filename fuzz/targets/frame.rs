//! Frames of clients: what is taken is JSON of the type it says it is, with the body that was sent; what is not is
//! answered, with the frame's id where it has one.
#![no_main]

use bowline_protocol::{Body, ClientFrame};
use libfuzzer_sys::fuzz_target;
use serde_json::Value;

fuzz_target!(|bytes: &[u8]| {
    // The first byte says whether it is text or binary.
    let Some((kind, bytes)) = bytes.split_first() else { return };
    if kind % 4 == 0 {
        binary(bytes);
    } else if std::str::from_utf8(bytes).is_ok() {
        // The framing lets nothing else through.
        text(bytes);
    }
});

fn text(bytes: &[u8]) {
    let json: Option<Value> = serde_json::from_slice(bytes).ok();
    match ClientFrame::decode_text(bytes) {
        Ok(frame) => {
            let json = json.expect("a frame is JSON");
            assert_eq!(json["type"].as_str(), Some(frame.name()));
            check(&frame, &json);
            if let ClientFrame::MsgSend { send } = &frame {
                let Body::Json(body) = &send.body else { panic!("bytes out of a text") };
                let body: Value = serde_json::from_slice(body).expect("the body is JSON");
                assert_eq!(body, json["body"]);
            }
        }
        Err(error) => {
            assert!(!error.message.is_empty());
            if error.unparsable {
                // Ten of these end the connection: objects are never counted among them.
                assert!(!json.is_some_and(|json| json.is_object()), "{error:?}");
            } else if let Some(id) = &error.id {
                assert!(!id.is_empty() || json.is_some_and(|json| json["id"] == ""), "{error:?}");
            }
        }
    }
}

fn binary(bytes: &[u8]) {
    let Ok(frame) = ClientFrame::decode_binary(bytes) else { return };
    let (length, rest) = bytes.split_first_chunk::<4>().expect("a frame begins with a length");
    let (header, body) = rest.split_at(u32::from_be_bytes(*length) as usize);
    let json: Value = serde_json::from_slice(header).expect("a header is JSON");
    assert_eq!(json["type"].as_str(), Some(frame.name()));
    check(&frame, &json);
    if let ClientFrame::MsgSend { send } = &frame {
        assert_eq!(send.body, Body::Binary(body.to_vec().into()));
    }
}

/// What every frame keeps to.
fn check(frame: &ClientFrame, json: &Value) {
    match frame {
        ClientFrame::MsgSend { send } => {
            assert!((1..=64).contains(&send.id.len()), "{frame:?}");
            assert_eq!(Some(&*send.id), json["id"].as_str());
        }
        ClientFrame::Ping { data: Some(data) } => assert!(data.len() <= 1024),
        ClientFrame::History { limit, .. } | ClientFrame::ConversationList { limit, .. } => {
            assert!((1..=200).contains(limit), "{frame:?}");
        }
        ClientFrame::GroupAdd { users, .. } | ClientFrame::GroupRemove { users, .. } => {
            assert!(users.len() <= 500, "{frame:?}");
        }
        _ => {}
    }
}
