//! Framing over TCP: however the bytes are cut, the frames are those that a simple reading finds.
#![no_main]

use arbitrary::Arbitrary;
use bowline_fuzz::pieces;
use bowline_protocol::tcp::{Decoder, Fault, Message};
use libfuzzer_sys::fuzz_target;

const MAX: usize = 300;

#[derive(Debug, Arbitrary)]
struct Input<'a> {
    cuts: &'a [u8],
    frames: Vec<Part<'a>>,
}

#[derive(Debug, Arbitrary)]
enum Part<'a> {
    Raw(&'a [u8]),
    Frame(&'a [u8]),
}

/// Whether it is text, and its bytes.
type Said = (bool, Vec<u8>);

fn decode<'a>(parts: impl Iterator<Item = &'a [u8]>) -> (Vec<Said>, Option<Fault>) {
    let mut decoder = Decoder::default();
    let mut said = Vec::new();
    for part in parts {
        let mut at = 0;
        loop {
            match decoder.next(part, &mut at, MAX) {
                Ok(Some(Message::Text(text))) => said.push((true, text.to_vec())),
                Ok(Some(Message::Binary(bytes))) => said.push((false, bytes.to_vec())),
                Ok(None) => break,
                Err(fault) => return (said, Some(fault)),
            }
        }
        assert_eq!(at, part.len(), "what is left over is kept by the decoder");
    }
    (said, None)
}

/// The same by the words of the protocol.
fn model(mut bytes: &[u8]) -> (Vec<Said>, Option<Fault>) {
    let mut said = Vec::new();
    while let Some((length, rest)) = bytes.split_first_chunk::<4>() {
        let length = u32::from_be_bytes(*length) as usize;
        if length > MAX {
            return (said, Some(Fault::TooLarge { bytes: length, max: MAX }));
        }
        let Some((payload, rest)) = rest.split_at_checked(length) else { break };
        let is_text = payload.first() != Some(&0);
        if is_text && std::str::from_utf8(payload).is_err() {
            return (said, Some(Fault::Utf8));
        }
        said.push((is_text, payload.to_vec()));
        bytes = rest;
    }
    (said, None)
}

fuzz_target!(|input: Input<'_>| {
    let mut bytes = Vec::new();
    for part in &input.frames {
        match part {
            Part::Raw(raw) => bytes.extend_from_slice(raw),
            Part::Frame(payload) => {
                bytes.extend_from_slice(&(payload.len() as u32).to_be_bytes());
                bytes.extend_from_slice(payload);
            }
        }
    }
    let expected = model(&bytes);
    assert_eq!(decode(std::iter::once(&bytes[..])), expected);
    assert_eq!(decode(pieces(&bytes, input.cuts).into_iter()), expected);
});
