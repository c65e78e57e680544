//! permessage-deflate: whatever comes is opened to no more than the bound, and the same every time; what is compressed
//! comes out as it was, whatever was opened before.
#![no_main]

use arbitrary::Arbitrary;
use bowline_protocol::ws::{
    Message,
    deflate::{Agreed, Deflater, Inflater},
};
use libfuzzer_sys::fuzz_target;

#[derive(Debug, Arbitrary)]
struct Input<'a> {
    foreign: &'a [u8],
    max: u16,
    is_text: bool,
    text: &'a str,
    times: u8,
    window_bits: u8,
    offers: Vec<&'a str>,
}

fuzz_target!(|input: Input<'_>| {
    let (mut inflater, mut deflater) = (Inflater::default(), Deflater::default());
    let max = usize::from(input.max);
    let open = |inflater: &mut Inflater| match inflater.open(input.is_text, input.foreign, max) {
        Ok(Message::Text(bytes) | Message::Binary(bytes)) => {
            assert!(bytes.len() <= max);
            assert!(!input.is_text || std::str::from_utf8(bytes).is_ok());
            Ok(bytes.to_vec())
        }
        Ok(other) => panic!("a compressed message cannot be {other:?}"),
        Err(fault) => Err(fault),
    };
    let first = open(&mut inflater);
    let payload = input.text.repeat(usize::from(input.times % 16)).into_bytes();
    let (one, two) = payload.split_at(payload.len() / 3);
    if let Some(deflated) = deflater.deflate(input.window_bits, &[one, two]) {
        assert!(deflated.len() < payload.len());
        assert_eq!(inflater.inflate(deflated, payload.len()), Ok(&payload[..]));
    }
    assert_eq!(open(&mut inflater), first, "it matters what was opened before");
    if let Some(agreed) = Agreed::of(input.offers.iter().copied()) {
        assert!((9..=15).contains(&agreed.window_bits));
        let mut answer = Vec::new();
        agreed.write(&mut answer);
        assert!(answer.starts_with(b"permessage-deflate; ") && answer.is_ascii());
    }
});
