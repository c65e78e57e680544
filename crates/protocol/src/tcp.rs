//! Frames over plain TCP: a 4-byte big-endian length and that many bytes, sans-IO.
//!
//! A payload whose first byte is 0x00 is the binary form, header length, JSON header and body; any other is JSON text.

use crate::error::CloseCode;

/// What a client said.
#[derive(Debug, PartialEq, Eq)]
pub enum Message<'a> {
    /// Valid UTF-8.
    Text(&'a [u8]),
    Binary(&'a [u8]),
}

/// Why the connection must be closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    #[error("a text frame is not UTF-8")]
    Utf8,
    #[error("a frame of {bytes} bytes exceeds the {max} allowed; send larger content as an object")]
    TooLarge { bytes: usize, max: usize },
}

impl Fault {
    pub fn close_code(self) -> CloseCode {
        match self {
            Self::Utf8 => CloseCode::Malformed,
            Self::TooLarge { .. } => CloseCode::TooLarge,
        }
    }
}

/// Takes the bytes of one connection apart. Eight bytes while nothing is partial.
#[derive(Debug, Default)]
pub struct Decoder {
    partial: Option<Box<Partial>>,
}

#[derive(Debug, Default)]
struct Partial {
    /// Length and payload, as far as they have come.
    bytes: Vec<u8>,
    /// The frame was handed out and is to be forgotten.
    done: bool,
}

impl Decoder {
    /// The next frame in `buf[*at..]`, or `None` when more bytes are needed; `at` moves behind what was used. The
    /// decoder keeps what is partial. After a fault it must not be used again.
    pub fn next<'b>(
        &'b mut self,
        buf: &'b [u8],
        at: &mut usize,
        max: usize,
    ) -> Result<Option<Message<'b>>, Fault> {
        if self.partial.as_ref().is_some_and(|partial| partial.done) {
            self.partial = None;
        }
        let rest = &buf[*at..];
        if self.partial.is_none() {
            if let Some((length, rest)) = rest.split_first_chunk::<4>() {
                let length = checked_length(*length, max)?;
                if let Some(payload) = rest.get(..length) {
                    *at += 4 + length;
                    return message(payload).map(Some);
                }
            } else if rest.is_empty() {
                return Ok(None);
            }
        }
        let partial = self.partial.get_or_insert_default();
        let missing = 4usize.saturating_sub(partial.bytes.len()).min(rest.len());
        partial.bytes.extend_from_slice(&rest[..missing]);
        *at += missing;
        let Some(length) = partial.bytes.first_chunk::<4>() else { return Ok(None) };
        let length = checked_length(*length, max)?;
        let rest = &buf[*at..];
        let missing = (4 + length - partial.bytes.len()).min(rest.len());
        partial.bytes.extend_from_slice(&rest[..missing]);
        *at += missing;
        if partial.bytes.len() < 4 + length {
            return Ok(None);
        }
        partial.done = true;
        message(&partial.bytes[4..]).map(Some)
    }

    /// Nothing is partial: the connection is between two frames.
    pub fn is_idle(&self) -> bool {
        self.partial.as_ref().is_none_or(|partial| partial.done)
    }
}

fn checked_length(length: [u8; 4], max: usize) -> Result<usize, Fault> {
    let bytes = u32::from_be_bytes(length) as usize;
    if bytes > max { Err(Fault::TooLarge { bytes, max }) } else { Ok(bytes) }
}

fn message(payload: &[u8]) -> Result<Message<'_>, Fault> {
    if payload.first() == Some(&0) {
        return Ok(Message::Binary(payload));
    }
    simdutf8::basic::from_utf8(payload).map(|_| Message::Text(payload)).map_err(|_| Fault::Utf8)
}

/// Appends the length of a frame.
pub fn write_header(out: &mut Vec<u8>, payload_bytes: usize) {
    let length = u32::try_from(payload_bytes).expect("frames of the server stay far below 4 GiB");
    out.extend_from_slice(&length.to_be_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Debug, Clone, PartialEq)]
    enum Seen {
        Text(Vec<u8>),
        Binary(Vec<u8>),
        Fault(Fault),
    }

    fn decode(bytes: &[u8], cuts: &[usize], max: usize) -> Vec<Seen> {
        let mut decoder = Decoder::default();
        let mut seen = Vec::new();
        let mut ends: Vec<usize> = cuts.iter().map(|cut| cut % (bytes.len() + 1)).collect();
        ends.sort_unstable();
        ends.push(bytes.len());
        let mut start = 0;
        for end in ends {
            let piece = &bytes[start..end];
            start = end;
            let mut at = 0;
            loop {
                seen.push(match decoder.next(piece, &mut at, max) {
                    Ok(None) => break,
                    Ok(Some(Message::Text(text))) => Seen::Text(text.to_vec()),
                    Ok(Some(Message::Binary(bytes))) => Seen::Binary(bytes.to_vec()),
                    Err(fault) => {
                        seen.push(Seen::Fault(fault));
                        return seen;
                    }
                });
            }
        }
        seen
    }

    fn frame(payload: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        write_header(&mut out, payload.len());
        out.extend_from_slice(payload);
        out
    }

    #[test]
    fn frames_and_faults() {
        let text = |s: &str| Seen::Text(s.as_bytes().to_vec());
        let rows: [(Vec<u8>, Vec<Seen>); 6] = [
            (frame(b"ab"), vec![text("ab")]),
            (frame(b""), vec![text("")]),
            (frame(&[0, 1, 255]), vec![Seen::Binary(vec![0, 1, 255])]),
            (frame(b"a\xff"), vec![Seen::Fault(Fault::Utf8)]),
            (vec![0, 0, 0, 11], vec![Seen::Fault(Fault::TooLarge { bytes: 11, max: 10 })]),
            ([frame(b"0123456789"), frame(b"x")].concat(), vec![text("0123456789"), text("x")]),
        ];
        for (bytes, expected) in rows {
            assert_eq!(decode(&bytes, &[], 10), expected, "{bytes:?}");
        }
    }

    proptest! {
        #[test]
        fn any_split_gives_the_same_frames(
            payloads in proptest::collection::vec(prop_oneof![
                "[a-zé€]{0,40}".prop_map(String::into_bytes),
                proptest::collection::vec(any::<u8>(), 0..60),
            ], 1..8),
            cuts in proptest::collection::vec(any::<usize>(), 0..12),
        ) {
            let bytes: Vec<u8> = payloads.iter().flat_map(|p| frame(p)).collect();
            let whole = decode(&bytes, &[], 50);
            prop_assert_eq!(&whole, &decode(&bytes, &cuts, 50));
            let each: Vec<usize> = (0..bytes.len()).collect();
            prop_assert_eq!(&whole, &decode(&bytes, &each, 50));
        }
    }
}
