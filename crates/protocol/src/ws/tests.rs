use super::*;
use proptest::prelude::*;

/// A client's frame, masked.
fn frame(first: u8, payload: &[u8]) -> Vec<u8> {
    let mut out = vec![first];
    match payload.len() {
        n @ 0..126 => out.push(0x80 | n as u8),
        n @ 126..0x1_0000 => {
            out.push(0x80 | 126);
            out.extend_from_slice(&(n as u16).to_be_bytes());
        }
        n => {
            out.push(0x80 | 127);
            out.extend_from_slice(&(n as u64).to_be_bytes());
        }
    }
    let mask = [0x37, 0xfa, 0x21, 0x3d];
    out.extend_from_slice(&mask);
    out.extend(payload.iter().enumerate().map(|(i, b)| b ^ mask[i % 4]));
    out
}

#[derive(Debug, Clone, PartialEq)]
enum Seen {
    Text(Vec<u8>),
    Binary(Vec<u8>),
    Deflated(bool, Vec<u8>),
    Ping(Vec<u8>),
    Pong,
    Close(Option<u16>),
    Fault(Fault),
}

/// Feeds `bytes` in pieces that end at `cuts`.
fn decode(bytes: &[u8], cuts: &[usize], max: usize) -> Vec<Seen> {
    decode_with(bytes, cuts, max, false)
}

fn decode_with(bytes: &[u8], cuts: &[usize], max: usize, may_deflate: bool) -> Vec<Seen> {
    let mut decoder = Decoder::default();
    let mut seen = Vec::new();
    let mut ends: Vec<usize> = cuts.iter().map(|cut| cut % (bytes.len() + 1)).collect();
    ends.sort_unstable();
    ends.push(bytes.len());
    let mut start = 0;
    for end in ends {
        let mut piece = bytes[start..end].to_vec();
        start = end;
        let mut at = 0;
        loop {
            seen.push(match decoder.next(&mut piece, &mut at, max, may_deflate) {
                Ok(None) => break,
                Ok(Some(Message::Text(text))) => Seen::Text(text.to_vec()),
                Ok(Some(Message::Binary(bytes))) => Seen::Binary(bytes.to_vec()),
                Ok(Some(Message::Deflated { is_text, payload })) => Seen::Deflated(is_text, payload.to_vec()),
                Ok(Some(Message::Ping(data))) => Seen::Ping(data.to_vec()),
                Ok(Some(Message::Pong)) => Seen::Pong,
                Ok(Some(Message::Close(code))) => Seen::Close(code),
                Err(fault) => {
                    seen.push(Seen::Fault(fault));
                    return seen;
                }
            });
        }
        assert_eq!(at, piece.len(), "all bytes are taken");
    }
    seen
}

fn faults(bytes: &[u8]) -> Option<u16> {
    match decode(bytes, &[], 100).pop() {
        Some(Seen::Fault(fault)) => Some(fault.close_code().code()),
        _ => None,
    }
}

#[test]
fn what_a_client_may_not_send() {
    let close = |code: u16| frame(0x88, &code.to_be_bytes());
    let rows: [(&str, Vec<u8>, Option<u16>); 25] = [
        ("text", frame(0x81, b"hi"), None),
        ("reserved bit 1", frame(0xc1, b"hi"), Some(1002)),
        ("reserved bit 3", frame(0x91, b"hi"), Some(1002)),
        ("opcode 3", frame(0x83, b"hi"), Some(1002)),
        ("opcode 11", vec![0x8b], Some(1002)),
        ("unmasked", vec![0x81, 0x02, b'h', b'i'], Some(1002)),
        ("fragmented ping", frame(0x09, b"hi"), Some(1002)),
        ("ping of 125", frame(0x89, &[0; 125]), None),
        ("ping of 126", frame(0x89, &[0; 126]), Some(1002)),
        ("continuation of nothing", frame(0x80, b"hi"), Some(1002)),
        ("text inside a message", [frame(0x01, b"a"), frame(0x81, b"b")].concat(), Some(1002)),
        ("ping inside a message", [frame(0x01, b"a"), frame(0x89, b""), frame(0x80, b"b")].concat(), None),
        ("longest", frame(0x82, &[0; 100]), None),
        ("too long", frame(0x82, &[0; 101]), Some(1009)),
        ("too long, header only", vec![0x82, 0xff, 0, 0, 1, 0, 0, 0, 0, 0, 1, 2, 3, 4], Some(1009)),
        ("length with its highest bit", vec![0x82, 0xff, 128, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4], Some(1002)),
        ("too long in parts", [frame(0x02, &[0; 60]), frame(0x80, &[0; 41])].concat(), Some(1009)),
        ("bad text", frame(0x81, b"\xff"), Some(1007)),
        ("a surrogate", frame(0x81, b"\xed\xa0\x80"), Some(1007)),
        ("text cut in a character", frame(0x81, "é".as_bytes().split_at(1).0), Some(1007)),
        ("a character over two frames", [frame(0x01, b"\xc3"), frame(0x80, b"\xa9")].concat(), None),
        ("bad text before the end", frame(0x01, b"\xf4\x90"), Some(1007)),
        ("close with one byte", frame(0x88, b"1"), Some(1002)),
        ("close with a bad reason", frame(0x88, b"\x03\xe8\xff"), Some(1007)),
        ("close", close(1000), None),
    ];
    for (name, bytes, expected) in rows {
        assert_eq!(faults(&bytes), expected, "{name}");
    }
    for (code, good) in [
        (0, false),
        (999, false),
        (1003, true),
        (1004, false),
        (1005, false),
        (1006, false),
        (1011, true),
        (1014, true),
        (1015, false),
        (2999, false),
        (3000, true),
        (4999, true),
        (5000, false),
    ] {
        assert_eq!(faults(&close(code)).is_none(), good, "close code {code}");
    }
}

#[test]
fn a_fault_shows_before_the_frame_is_complete() {
    let bytes = frame(0x81, b"aaaa\xffbbbbbbbb");
    assert_eq!(faults(&bytes[..6 + 4]), None);
    assert_eq!(faults(&bytes[..6 + 5]), Some(1007));
}

#[test]
fn nothing_is_kept_between_messages() {
    let mut decoder = Decoder::default();
    let bytes = [frame(0x01, b"ab"), frame(0x89, b"x"), frame(0x80, b"c")].concat();
    let (one, two) = bytes.split_at(4);
    let (mut one, mut two) = (one.to_vec(), two.to_vec());
    let mut at = 0;
    assert_eq!(decoder.next(&mut one, &mut at, 9, false), Ok(None));
    assert!(!decoder.is_idle());
    at = 0;
    assert_eq!(decoder.next(&mut two, &mut at, 9, false), Ok(Some(Message::Ping(b"x"))));
    assert_eq!(decoder.next(&mut two, &mut at, 9, false), Ok(Some(Message::Text(b"abc"))));
    assert_eq!(decoder.next(&mut two, &mut at, 9, false), Ok(None));
    assert!(decoder.partial.is_none());
    assert_eq!(size_of::<Decoder>(), 8);
}

/// RFC 7692, 6: the first frame of a message says that it is compressed, and no other frame may.
#[test]
fn compressed_messages_are_handed_out_as_they_came() {
    // Not even text as it stands there.
    let (bytes, long) = (b"\xff\x00\xc3", [7; 300]);
    let deflated = |is_text, bytes: &[u8]| vec![Seen::Deflated(is_text, bytes.to_vec())];
    let fault = |text| vec![Seen::Fault(Fault::Protocol(text))];
    let reserved = "a reserved bit is set";
    let rows: [(&str, Vec<u8>, Vec<Seen>); 9] = [
        ("text", frame(0xc1, bytes), deflated(true, bytes)),
        ("binary", frame(0xc2, bytes), deflated(false, bytes)),
        (
            "fragments",
            [frame(0x41, b"\xff"), frame(0x00, b"\x00"), frame(0x80, b"\xc3")].concat(),
            deflated(true, bytes),
        ),
        (
            "a message that is not, behind one that is",
            [frame(0x42, b"\xff\x00"), frame(0x80, b"\xc3"), frame(0x01, b"a"), frame(0x80, b"\xff")]
                .concat(),
            vec![Seen::Deflated(false, bytes.to_vec()), Seen::Fault(Fault::Utf8)],
        ),
        ("a ping", frame(0xc9, b""), fault(reserved)),
        ("a close", frame(0xc8, b""), fault(reserved)),
        ("a continuation", [frame(0x41, b"a"), frame(0xc0, b"b")].concat(), fault(reserved)),
        ("reserved bit 2", frame(0xe1, b"a"), fault(reserved)),
        ("too long by far", frame(0xc1, &long), vec![Seen::Fault(Fault::TooLarge { max: 200 })]),
    ];
    for (name, bytes, expected) in rows {
        assert_eq!(decode_with(&bytes, &[], 200, true), expected, "{name}");
        let each: Vec<usize> = (0..bytes.len()).collect();
        assert_eq!(decode_with(&bytes, &each, 200, true), expected, "{name}, byte by byte");
    }
    assert_eq!(decode(&frame(0xc1, bytes), &[], 200), fault(reserved), "not agreed");
}

#[test]
fn headers_use_the_shortest_length() {
    for (bytes, expected) in [
        (0, vec![0x81, 0]),
        (125, vec![0x81, 125]),
        (126, vec![0x81, 126, 0, 126]),
        (65_535, vec![0x81, 126, 255, 255]),
        (65_536, vec![0x81, 127, 0, 0, 0, 0, 0, 1, 0, 0]),
    ] {
        let mut out = Vec::new();
        write_header(&mut out, Kind::Text, bytes);
        assert_eq!(out, expected);
    }
    let mut out = Vec::new();
    write_close(&mut out, Some(4505), &"é".repeat(100));
    assert_eq!((out.len(), out[1]), (2 + 2 + 122, 124));
}

/// One frame of a good or nearly good conversation.
fn any_frame() -> impl Strategy<Value = Vec<u8>> {
    let payload = prop_oneof![
        Just(b"".to_vec()),
        "[a-zé€😀]{0,60}".prop_map(String::into_bytes),
        proptest::collection::vec(any::<u8>(), 0..140),
    ];
    let first = prop_oneof![
        4 => Just(0x81u8), 2 => Just(0x01), 2 => Just(0x00), 2 => Just(0x80), 2 => Just(0x82),
        2 => Just(0x89), 1 => Just(0x8a), 1 => Just(0x88), 1 => any::<u8>()
    ];
    (first, payload).prop_map(|(first, payload)| frame(first, &payload))
}

proptest! {
    #[test]
    fn any_split_gives_the_same_messages(
        frames in proptest::collection::vec(any_frame(), 1..8),
        cuts in proptest::collection::vec(any::<usize>(), 0..12),
    ) {
        let bytes = frames.concat();
        let whole = decode(&bytes, &[], 200);
        prop_assert_eq!(&whole, &decode(&bytes, &cuts, 200));
        let each: Vec<usize> = (0..bytes.len()).collect();
        prop_assert_eq!(&whole, &decode(&bytes, &each, 200));
    }

    #[test]
    fn masking_twice_changes_nothing(bytes in proptest::collection::vec(any::<u8>(), 0..100), offset in 0usize..9) {
        let mut changed = bytes.clone();
        unmask(&mut changed, [1, 2, 3, 4], offset);
        for (i, byte) in bytes.iter().enumerate() {
            prop_assert_eq!(changed[i], byte ^ [1, 2, 3, 4][(i + offset) % 4]);
        }
    }
}
