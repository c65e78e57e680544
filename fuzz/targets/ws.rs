//! WebSocket framing, with messages that may be compressed or without: however the bytes are cut, the messages are the same, and what a client sent comes out.
#![no_main]

use arbitrary::Arbitrary;
use bowline_fuzz::pieces;
use bowline_protocol::ws::{CONTROL_BYTES_MAX, Decoder, Fault, Message};
use libfuzzer_sys::fuzz_target;

const MAX: usize = 300;

#[derive(Debug, Arbitrary)]
struct Input<'a> {
    cuts: &'a [u8],
    may_deflate: bool,
    frames: Vec<Part<'a>>,
}

#[derive(Debug, Arbitrary)]
enum Part<'a> {
    /// Bytes as they are.
    Raw(&'a [u8]),
    /// A frame that is formed well, with its first byte as it comes.
    Frame { first: u8, mask: [u8; 4], payload: &'a [u8] },
    /// A message that is allowed, in fragments.
    Text { text: &'a str, mask: [u8; 4], fragments: &'a [u8] },
}

/// What came out, in owned form.
#[derive(Debug, PartialEq)]
enum Said {
    Text(Vec<u8>),
    Binary(Vec<u8>),
    Deflated(bool, Vec<u8>),
    Ping(Vec<u8>),
    Pong,
    Close(Option<u16>),
}

fn frame(out: &mut Vec<u8>, first: u8, mask: [u8; 4], payload: &[u8]) {
    out.push(first);
    match payload.len() {
        length @ 0..126 => out.push(0x80 | length as u8),
        length @ 126..65_536 => {
            out.push(0x80 | 126);
            out.extend_from_slice(&(length as u16).to_be_bytes());
        }
        length => {
            out.push(0x80 | 127);
            out.extend_from_slice(&(length as u64).to_be_bytes());
        }
    }
    out.extend_from_slice(&mask);
    out.extend(payload.iter().zip(mask.iter().cycle()).map(|(byte, mask)| byte ^ mask));
}

fn decode<'a>(parts: impl Iterator<Item = &'a [u8]>, may_deflate: bool) -> (Vec<Said>, Option<Fault>, bool) {
    let mut decoder = Decoder::default();
    let mut said = Vec::new();
    for part in parts {
        let mut buffer = part.to_vec();
        let mut at = 0;
        loop {
            let before = at;
            let next = match decoder.next(&mut buffer, &mut at, MAX, may_deflate) {
                Ok(Some(message)) => match message {
                    Message::Text(text) => {
                        std::str::from_utf8(text).expect("text is UTF-8");
                        assert!(text.len() <= MAX);
                        Said::Text(text.to_vec())
                    }
                    Message::Binary(bytes) => {
                        assert!(bytes.len() <= MAX);
                        Said::Binary(bytes.to_vec())
                    }
                    Message::Deflated { is_text, payload } => {
                        assert!(may_deflate && payload.len() <= 2 * MAX);
                        Said::Deflated(is_text, payload.to_vec())
                    }
                    Message::Ping(bytes) => {
                        assert!(bytes.len() <= CONTROL_BYTES_MAX);
                        Said::Ping(bytes.to_vec())
                    }
                    Message::Pong => Said::Pong,
                    Message::Close(code) => Said::Close(code),
                },
                Ok(None) => break,
                Err(fault) => return (said, Some(fault), false),
            };
            assert!(at > before || part.is_empty(), "a message without bytes");
            said.push(next);
        }
        assert_eq!(at, part.len(), "what is left over is kept by the decoder");
    }
    (said, None, decoder.is_idle())
}

fuzz_target!(|input: Input<'_>| {
    let mut bytes = Vec::new();
    let mut expected = Some(Vec::new());
    for part in &input.frames {
        match part {
            Part::Raw(raw) => {
                bytes.extend_from_slice(raw);
                expected = None;
            }
            Part::Frame { first, mask, payload } => {
                frame(&mut bytes, *first, *mask, payload);
                expected = None;
            }
            Part::Text { text, mask, fragments } => {
                let parts = pieces(text.as_bytes(), fragments);
                let count = parts.len().max(1);
                for (n, part) in parts.into_iter().chain(text.is_empty().then_some(&[][..])).enumerate() {
                    let fin = if n + 1 == count { 0x80 } else { 0 };
                    frame(&mut bytes, fin | u8::from(n == 0), *mask, part);
                }
                match &mut expected {
                    Some(said) if text.len() <= MAX => said.push(Said::Text(text.as_bytes().to_vec())),
                    _ => expected = None,
                }
            }
        }
    }
    let whole = decode(std::iter::once(&bytes[..]), input.may_deflate);
    let cut = decode(pieces(&bytes, input.cuts).into_iter(), input.may_deflate);
    assert_eq!(whole, cut, "it matters how the bytes are cut");
    if let Some(expected) = expected {
        assert_eq!(whole, (expected, None, true), "what was sent is not what came out");
    }
});
