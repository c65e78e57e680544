//! permessage-deflate (RFC 7692), the server's side, sans-IO.
//!
//! No message is compressed with what came before it: both directions are agreed without context takeover, which a
//! server may ask for whatever the client has offered (7.1.1). So a connection has no state of its own, however many
//! there are, and one [`Deflater`] and one [`Inflater`] serve a whole thread.

use super::{Fault, Message};
use flate2::{Compress, Compression, Decompress, FlushCompress, FlushDecompress, Status};

/// What ends every compressed message and is not sent (7.2.1).
const TAIL: [u8; 4] = [0, 0, 0xff, 0xff];
/// A last block that holds nothing (RFC 1951, 3.2.6).
const LAST_BLOCK: [u8; 2] = [3, 0];
/// Windows that can be compressed for, in bits; an offer that asks for a smaller one is declined.
const WINDOW_BITS_MIN: u8 = 9;
const WINDOW_BITS_MAX: u8 = 15;
/// Payloads below this many bytes are sent as they are.
pub const DEFLATE_BYTES_MIN: usize = 64;
/// What a buffer may keep for the next message.
const KEPT_BYTES: usize = 256 << 10;
/// How a buffer begins.
const FIRST_BYTES: usize = 4 << 10;
/// Fast rather than small: every message is compressed on a thread that serves thousands of connections.
const LEVEL: u32 = 3;

/// What was agreed with a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Agreed {
    /// The window of what the server sends: 9 to 15.
    pub window_bits: u8,
    /// The client has asked for it, and is to be told.
    says_window_bits: bool,
}

impl Agreed {
    /// The first offer that can be taken, of the elements of `Sec-WebSocket-Extensions`.
    pub fn of<'a>(mut offers: impl Iterator<Item = &'a str>) -> Option<Self> {
        offers.find_map(Self::of_one)
    }

    /// Judges one offer. What is not known, stands twice or has a wrong value declines it (7.1).
    fn of_one(offer: &str) -> Option<Self> {
        let mut parts = offer.split(';').map(str::trim);
        if !parts.next()?.eq_ignore_ascii_case("permessage-deflate") {
            return None;
        }
        let mut agreed = Self { window_bits: WINDOW_BITS_MAX, says_window_bits: false };
        let mut seen = [false; 4];
        for part in parts {
            let (name, value) = match part.split_once('=') {
                Some((name, value)) => (name.trim_end(), Some(value.trim_start().trim_matches('"'))),
                None => (part, None),
            };
            let place = match (name, value) {
                ("server_no_context_takeover", None) => 0,
                ("client_no_context_takeover", None) => 1,
                ("server_max_window_bits", Some(value)) => {
                    let bits = window_bits(value).filter(|bits| *bits >= WINDOW_BITS_MIN)?;
                    agreed = Self { window_bits: bits, says_window_bits: true };
                    2
                }
                // What the client compresses with is its own affair: any window can be read.
                ("client_max_window_bits", None) => 3,
                ("client_max_window_bits", Some(value)) => window_bits(value).map(|_| 3)?,
                _ => return None,
            };
            if std::mem::replace(&mut seen[place], true) {
                return None;
            }
        }
        Some(agreed)
    }

    /// Appends the answer, the value of `Sec-WebSocket-Extensions`.
    pub fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(b"permessage-deflate; server_no_context_takeover; client_no_context_takeover");
        if self.says_window_bits {
            out.extend_from_slice(format!("; server_max_window_bits={}", self.window_bits).as_bytes());
        }
    }
}

/// 8 to 15, without leading zeros.
fn window_bits(text: &str) -> Option<u8> {
    match text {
        "8" | "9" | "10" | "11" | "12" | "13" | "14" | "15" => text.parse().ok(),
        _ => None,
    }
}

/// The longest compressed form of a message of so many bytes that is worth reading: a good one is hardly longer.
pub(super) fn deflated_bytes_max(max: usize) -> usize {
    max.saturating_add(max / 1024 + 64)
}

/// Compresses messages, one at a time.
#[derive(Default)]
pub struct Deflater {
    /// By window; each takes some 300 kB from its first use on.
    streams: [Option<Box<Compress>>; (WINDOW_BITS_MAX - WINDOW_BITS_MIN) as usize + 1],
    out: Vec<u8>,
}

impl Deflater {
    /// The compressed form of a payload in parts; `None` when it would be no shorter.
    pub fn deflate(&mut self, window_bits: u8, parts: &[&[u8]]) -> Option<&[u8]> {
        let payload_bytes: usize = parts.iter().map(|part| part.len()).sum();
        let window_bits = window_bits.clamp(WINDOW_BITS_MIN, WINDOW_BITS_MAX);
        let stream = self.streams[usize::from(window_bits - WINDOW_BITS_MIN)].get_or_insert_with(|| {
            Box::new(Compress::new_with_window_bits(Compression::new(LEVEL), false, window_bits))
        });
        stream.reset();
        if self.out.len() > KEPT_BYTES {
            self.out = Vec::new();
        }
        // There is room for what is shorter, and for its tail.
        let room = payload_bytes + TAIL.len();
        if self.out.len() < room {
            self.out.resize(room.max(FIRST_BYTES), 0);
        }
        let out = &mut self.out[..room];
        let mut at = 0;
        let steps = parts.iter().map(|part| (*part, FlushCompress::None));
        for (mut rest, flush) in steps.chain([(&[][..], FlushCompress::Sync)]) {
            loop {
                let (read, written) = (stream.total_in(), stream.total_out());
                let status = stream.compress(rest, &mut out[at..], flush);
                rest = &rest[(stream.total_in() - read) as usize..];
                at += (stream.total_out() - written) as usize;
                match status {
                    Ok(_) if at == room => return None,
                    Ok(_) if rest.is_empty() => break,
                    Ok(_) => {}
                    Err(_) => return None,
                }
            }
        }
        let deflated = self.out[..at].strip_suffix(&TAIL)?;
        (deflated.len() < payload_bytes).then_some(deflated)
    }
}

/// How far a part of a message has led.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fed {
    On,
    /// To the end of a block that says it is the last one.
    ToAnEnd,
}

/// Opens compressed messages, one at a time.
#[derive(Default)]
pub struct Inflater {
    stream: Option<Box<Decompress>>,
    out: Vec<u8>,
}

impl Inflater {
    /// What a compressed message says.
    pub fn open(&mut self, is_text: bool, payload: &[u8], max: usize) -> Result<Message<'_>, Fault> {
        let message = self.inflate(payload, max)?;
        match is_text {
            true if simdutf8::basic::from_utf8(message).is_err() => Err(Fault::Utf8),
            true => Ok(Message::Text(message)),
            false => Ok(Message::Binary(message)),
        }
    }

    /// The message of at most `max` bytes; however it is compressed, no more are ever made of it.
    pub fn inflate(&mut self, payload: &[u8], max: usize) -> Result<&[u8], Fault> {
        let stream = self.stream.get_or_insert_with(|| Box::new(Decompress::new(false)));
        stream.reset(false);
        self.forget();
        let mut at = 0;
        let has_ended = self.feed(payload, &mut at, max)? == Fed::ToAnEnd;
        // One that ends in a last block is whole as it is; of any other the tail is the rest of an empty block.
        if !has_ended {
            let before = at;
            let is_whole = self.feed(&TAIL, &mut at, max)? == Fed::On && at == before && self.is_at_a_block();
            if !is_whole {
                return Err(Fault::Deflate);
            }
        }
        if at > max {
            return Err(Fault::TooLarge { max });
        }
        Ok(&self.out[..at])
    }

    /// Gives back a buffer that a large message has left.
    pub fn forget(&mut self) {
        if self.out.len() > KEPT_BYTES {
            self.out = Vec::new();
        }
    }

    /// Opens a part of a message behind the `at` bytes that are there.
    fn feed(&mut self, mut rest: &[u8], at: &mut usize, max: usize) -> Result<Fed, Fault> {
        let Some(stream) = &mut self.stream else { return Err(Fault::Deflate) };
        let limit = max.saturating_add(1);
        let mut fed = Fed::On;
        while !rest.is_empty() || *at == self.out.len().min(limit) {
            if *at == self.out.len().min(limit) {
                if *at == limit {
                    return Err(Fault::TooLarge { max });
                }
                self.out.resize((*at * 2).max(FIRST_BYTES).min(limit.max(FIRST_BYTES)), 0);
            }
            let end = self.out.len().min(limit);
            let (read, written) = (stream.total_in(), stream.total_out());
            let status = stream.decompress(rest, &mut self.out[*at..end], FlushDecompress::Sync);
            let (read, written) = (stream.total_in() - read, stream.total_out() - written);
            rest = &rest[read as usize..];
            *at += written as usize;
            fed = Fed::On;
            match status {
                // A block that says it is the last one; a message may go on behind it (7.2.3.4).
                Ok(Status::StreamEnd) => {
                    stream.reset(false);
                    fed = Fed::ToAnEnd;
                    if rest.is_empty() {
                        break;
                    }
                }
                Ok(Status::Ok | Status::BufError) if *at == end => {}
                Ok(_) if rest.is_empty() || read > 0 || written > 0 => {}
                Ok(_) | Err(_) => return Err(Fault::Deflate),
            }
        }
        Ok(fed)
    }

    /// Whether the next thing would be a block. A message that was cut leaves the stream within one, where the last
    /// block that is tried here means something else.
    fn is_at_a_block(&mut self) -> bool {
        let Some(stream) = &mut self.stream else { return false };
        let (read, written) = (stream.total_in(), stream.total_out());
        let status = stream.decompress(&LAST_BLOCK, &mut [0], FlushDecompress::Sync);
        let used = (stream.total_in() - read) as usize;
        matches!(status, Ok(Status::StreamEnd)) && used == LAST_BLOCK.len() && stream.total_out() == written
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn offers_are_taken_or_declined() {
        let plain = "permessage-deflate; server_no_context_takeover; client_no_context_takeover";
        let nine = format!("{plain}; server_max_window_bits=9");
        let rows = [
            ("permessage-deflate", Some(plain)),
            ("Permessage-Deflate ; client_max_window_bits", Some(plain)),
            ("permessage-deflate; client_max_window_bits=8; client_no_context_takeover", Some(plain)),
            ("permessage-deflate; server_no_context_takeover; server_max_window_bits = \"9\"", Some(&nine)),
            ("permessage-deflate; server_max_window_bits=8, permessage-deflate", Some(plain)),
            ("x-webkit-deflate-frame, foo; bar=1, permessage-deflate; server_max_window_bits=9", Some(&nine)),
            ("permessage-deflate; server_max_window_bits=8", None),
            ("permessage-deflate; server_max_window_bits=16", None),
            ("permessage-deflate; server_max_window_bits=09", None),
            ("permessage-deflate; server_max_window_bits", None),
            ("permessage-deflate; client_max_window_bits=7", None),
            ("permessage-deflate; client_no_context_takeover=1", None),
            ("permessage-deflate; server_no_context_takeover; server_no_context_takeover", None),
            ("permessage-deflate; mystery", None),
            ("permessage-bzip2", None),
            ("", None),
        ];
        for (offers, expected) in rows {
            let answer = Agreed::of(offers.split(',').map(str::trim)).map(|agreed| {
                let mut out = Vec::new();
                agreed.write(&mut out);
                String::from_utf8(out).unwrap()
            });
            assert_eq!(answer.as_deref(), expected, "{offers}");
        }
    }

    #[test]
    fn the_examples_of_the_rfc() {
        let mut inflater = Inflater::default();
        // RFC 7692, 7.2.3.1 (one block), 7.2.3.3 (stored), 7.2.3.4 (the last block), 7.2.3.5 (two blocks).
        let rows: [&[u8]; 4] = [
            &[0xf2, 0x48, 0xcd, 0xc9, 0xc9, 0x07, 0x00],
            &[0x00, 0x05, 0x00, 0xfa, 0xff, 0x48, 0x65, 0x6c, 0x6c, 0x6f, 0x00],
            &[0xf3, 0x48, 0xcd, 0xc9, 0xc9, 0x07, 0x00, 0x00],
            &[0xf2, 0x48, 0x05, 0x00, 0x00, 0x00, 0xff, 0xff, 0xca, 0xc9, 0xc9, 0x07, 0x00],
        ];
        for bytes in rows {
            assert_eq!(inflater.inflate(bytes, 100), Ok(&b"Hello"[..]), "{bytes:x?}");
            assert_eq!(inflater.inflate(bytes, 5), Ok(&b"Hello"[..]));
            assert_eq!(inflater.inflate(bytes, 4), Err(Fault::TooLarge { max: 4 }));
        }
        assert_eq!(inflater.inflate(&[0], 100), Ok(&b""[..]));
        assert_eq!(inflater.inflate(&[0], 0), Ok(&b""[..]));
        // A last block with nothing behind it.
        assert_eq!(inflater.inflate(&[0xf3, 0x48, 0xcd, 0xc9, 0xc9, 0x07, 0x00], 9), Ok(&b"Hello"[..]));
        assert_eq!(inflater.inflate(&[], 100), Err(Fault::Deflate));
        assert_eq!(inflater.inflate(&[0xff; 20], 100), Err(Fault::Deflate));
        // One message knows nothing of the one before it (7.2.3.2).
        assert_eq!(inflater.inflate(&[0xf2, 0x00, 0x11, 0x00, 0x00], 100), Err(Fault::Deflate));
    }

    #[test]
    fn a_message_that_was_cut_is_noticed_wherever() {
        let mut deflater = Deflater::default();
        let mut inflater = Inflater::default();
        let text = (0..400).map(|n| format!("{} is {n:x}, ", n * n)).collect::<String>();
        let noise: Vec<u8> = (0..2000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        for message in
            [text.as_bytes(), b"HelloHelloHello, and what there is to say beside", &[7; 300], &noise]
        {
            // Noise is stored as it is, in a block with its length.
            let deflated = deflater.deflate(15, &[message]).map_or_else(|| stored(message), <[u8]>::to_vec);
            assert_eq!(inflater.inflate(&deflated, 10_000), Ok(message));
            for bytes in 0..deflated.len() {
                let cut = inflater.inflate(&deflated[..bytes], 10_000);
                assert_eq!(cut, Err(Fault::Deflate), "{bytes} of {}", deflated.len());
            }
        }
    }

    /// One stored block (RFC 1951, 3.2.4), and the header of the empty one behind it.
    fn stored(message: &[u8]) -> Vec<u8> {
        let length = message.len() as u16;
        [&[0][..], &length.to_le_bytes(), &(!length).to_le_bytes(), message, &[0]].concat()
    }

    #[test]
    fn a_bomb_stays_small() {
        let mut deflater = Deflater::default();
        let zeros = vec![0; 8 << 20];
        let bomb = deflater.deflate(15, &[&zeros]).unwrap().to_vec();
        assert!(bomb.len() < 40_000, "{}", bomb.len());
        let mut inflater = Inflater::default();
        assert_eq!(inflater.inflate(&bomb, 32_768), Err(Fault::TooLarge { max: 32_768 }));
        assert!(inflater.out.len() <= 64 << 10, "{}", inflater.out.len());
        assert!(inflater.inflate(&bomb, 8 << 20) == Ok(&zeros[..]));
        assert_eq!(inflater.inflate(&[0xf2, 0x48, 0xcd, 0xc9, 0xc9, 0x07, 0x00], 9), Ok(&b"Hello"[..]));
        assert!(inflater.out.len() <= KEPT_BYTES);
    }

    #[test]
    fn what_does_not_shrink_is_left_as_it_is() {
        let mut deflater = Deflater::default();
        let mut state = 1_u32;
        let noise = std::iter::from_fn(|| {
            // Marsaglia's xorshift.
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            Some((state >> 16) as u8)
        });
        let noise: Vec<u8> = noise.take(1000).collect();
        assert_eq!(deflater.deflate(15, &[&noise]), None);
        assert_eq!(deflater.deflate(15, &[b""]), None);
        assert!(deflater.deflate(9, &[&[7; 1000]]).is_some_and(|bytes| bytes.len() < 50));
    }

    proptest! {
        #[test]
        fn what_was_compressed_comes_out(
            words in proptest::collection::vec("[a-e]{1,6}", 0..3000),
            cut in any::<usize>(),
            window_bits in 9_u8..=15,
        ) {
            let text = words.join(" ").into_bytes();
            let (one, two) = text.split_at(cut % (text.len() + 1));
            let (mut deflater, mut inflater) = (Deflater::default(), Inflater::default());
            for _ in 0..2 {
                if let Some(deflated) = deflater.deflate(window_bits, &[one, two]) {
                    prop_assert!(deflated.len() < text.len());
                    prop_assert_eq!(inflater.inflate(deflated, text.len()), Ok(&text[..]));
                } else {
                    prop_assert!(text.len() < 200);
                }
            }
        }

        #[test]
        fn whatever_comes_is_bounded(bytes in proptest::collection::vec(any::<u8>(), 0..300), max in 0_usize..5000) {
            let mut inflater = Inflater::default();
            if let Ok(message) = inflater.inflate(&bytes, max) {
                prop_assert!(message.len() <= max);
            }
        }
    }
}
