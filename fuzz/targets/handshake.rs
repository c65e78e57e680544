//! Heads of requests: a head is complete or not, whatever follows it, and every refusal is a whole HTTP answer.
#![no_main]

use bowline_protocol::ws::handshake::Request;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    match Request::parse(bytes) {
        Ok(Some(request)) => {
            let head = request.head_bytes;
            assert!(head <= bytes.len() && bytes[..head].ends_with(b"\n"), "{head} of {}", bytes.len());
            let alone =
                Request::parse(&bytes[..head]).ok().flatten().expect("the head needs nothing behind it");
            assert_eq!(
                (alone.method, alone.path, alone.query),
                (request.method, request.path, request.query)
            );
            assert!(
                matches!(Request::parse(&bytes[..head - 1]), Ok(None)),
                "a head that is complete too early"
            );
            let _ = request.origin();
            match request.upgrade() {
                Ok(_) => assert!(request.is_upgrade()),
                Err(refused) => answered(|out| refused.write(out)),
            }
        }
        Ok(None) => {}
        Err(refused) => answered(|out| refused.write(out)),
    }
});

fn answered(write: impl FnOnce(&mut Vec<u8>)) {
    let mut out = Vec::new();
    write(&mut out);
    let text = String::from_utf8(out).expect("an answer is text");
    let (head, body) = text.split_once("\r\n\r\n").expect("the head of an answer ends");
    assert!(head.starts_with("HTTP/1.1 4"), "{head}");
    assert!(head.contains(&format!("Content-Length: {}\r\n", body.len())), "{head}");
    let body: serde_json::Value = serde_json::from_str(body).expect("the body is JSON");
    assert!(body["code"].is_string() && body["message"].is_string(), "{body}");
}
