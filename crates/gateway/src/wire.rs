//! Frames as bytes of their transport.

use bowline_protocol::{
    Frame, tcp,
    ws::{
        self,
        deflate::{DEFLATE_BYTES_MIN, Deflater},
    },
};
use bytes::{BufMut, Bytes};
use smallvec::SmallVec;
use std::num::NonZeroU8;

/// What carries a connection's frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    WebSocket,
    Tcp,
}

/// A frame, framed.
pub fn encode(frame: &Frame, transport: Transport) -> Bytes {
    let mut out = Vec::with_capacity(ws::HEADER_BYTES_MAX + frame.len());
    append(&mut out, frame, transport);
    out.into()
}

/// Appends a frame, framed.
pub fn append(out: &mut Vec<u8>, frame: &Frame, transport: Transport) {
    let payload_bytes = frame.len();
    match transport {
        Transport::WebSocket => {
            let kind = if frame.body.is_some() { ws::Kind::Binary } else { ws::Kind::Text };
            ws::write_header(out, kind, payload_bytes);
        }
        Transport::Tcp => tcp::write_header(out, payload_bytes),
    }
    if let Some(body) = &frame.body {
        // Headers stay below 2²⁴ bytes, so that the first byte of a binary form is 0.
        out.put_u32(frame.json.len() as u32);
        out.extend_from_slice(&frame.json);
        out.extend_from_slice(body);
    } else {
        out.extend_from_slice(&frame.json);
    }
}

/// Frames of one transport back to back in one buffer, for everybody who gets them.
#[derive(Debug)]
pub struct Row {
    pub bytes: Bytes,
    /// Where each frame ends.
    ends: SmallVec<[usize; 4]>,
}

impl Row {
    /// `window_bits` as for [`Shared::bytes`].
    pub fn new<'a>(
        frames: impl Iterator<Item = &'a Frame> + Clone,
        transport: Transport,
        window_bits: Option<NonZeroU8>,
        deflater: &mut Deflater,
    ) -> Self {
        let bytes = frames.clone().map(|frame| ws::HEADER_BYTES_MAX + frame.len()).sum();
        let mut out = Vec::with_capacity(bytes);
        let ends = frames.map(|frame| {
            match window_bits.and_then(|window_bits| deflate(frame, window_bits, deflater)) {
                Some(deflated) => out.extend_from_slice(&deflated),
                None => append(&mut out, frame, transport),
            }
            out.len()
        });
        Self { ends: ends.collect(), bytes: out.into() }
    }

    pub fn frames(&self) -> usize {
        self.ends.len()
    }

    /// Where the frame of this number begins; that after the last begins at the end.
    pub fn start(&self, number: usize) -> usize {
        if number == 0 { 0 } else { self.ends[number - 1] }
    }

    /// How many frames lie whole before this byte.
    pub fn whole(&self, bytes: usize) -> usize {
        self.ends.partition_point(|end| *end <= bytes)
    }

    /// One frame.
    pub fn frame(&self, number: usize) -> Bytes {
        self.bytes.slice(self.start(number)..self.ends[number])
    }
}

/// A frame for WebSocket, compressed; `None` when that would be no shorter.
fn deflate(frame: &Frame, window_bits: NonZeroU8, deflater: &mut Deflater) -> Option<Bytes> {
    if frame.len() < DEFLATE_BYTES_MIN {
        return None;
    }
    let header_bytes = (frame.json.len() as u32).to_be_bytes();
    let deflated = match &frame.body {
        Some(body) => deflater.deflate(window_bits.get(), &[&header_bytes, &frame.json, body])?,
        None => deflater.deflate(window_bits.get(), &[&frame.json])?,
    };
    let mut out = Vec::with_capacity(ws::HEADER_BYTES_MAX + deflated.len());
    ws::write_deflated(&mut out, frame.body.is_none(), deflated);
    Some(out.into())
}

/// One frame for many connections: framed, and compressed, once for each form that is asked for.
pub struct Shared<'a> {
    frame: &'a Frame,
    web_socket: Option<Bytes>,
    tcp: Option<Bytes>,
    /// By window; nearly everybody has the same.
    deflated: SmallVec<[(NonZeroU8, Bytes); 1]>,
}

impl<'a> Shared<'a> {
    pub fn new(frame: &'a Frame) -> Self {
        Self { frame, web_socket: None, tcp: None, deflated: SmallVec::new() }
    }

    /// `window_bits` is what a WebSocket client has agreed to have compressed.
    pub fn bytes(
        &mut self,
        transport: Transport,
        window_bits: Option<NonZeroU8>,
        deflater: &mut Deflater,
    ) -> Bytes {
        match window_bits {
            Some(window_bits) => self.deflated_bytes(window_bits, deflater),
            None => self.plain_bytes(transport),
        }
    }

    fn deflated_bytes(&mut self, window_bits: NonZeroU8, deflater: &mut Deflater) -> Bytes {
        if let Some((_, bytes)) = self.deflated.iter().find(|(bits, _)| *bits == window_bits) {
            return bytes.clone();
        }
        let deflated = deflate(self.frame, window_bits, deflater);
        let bytes = deflated.unwrap_or_else(|| self.plain_bytes(Transport::WebSocket));
        self.deflated.push((window_bits, bytes.clone()));
        bytes
    }

    fn plain_bytes(&mut self, transport: Transport) -> Bytes {
        let cell = match transport {
            Transport::WebSocket => &mut self.web_socket,
            Transport::Tcp => &mut self.tcp,
        };
        cell.get_or_insert_with(|| encode(self.frame, transport)).clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_transports_and_both_forms() {
        let text = Frame { json: Bytes::from_static(b"{}"), body: None };
        let binary = Frame { json: Bytes::from_static(b"{}"), body: Some(Bytes::from_static(b"\xff")) };
        let rows: [(&Frame, Transport, &[u8]); 4] = [
            (&text, Transport::WebSocket, b"\x81\x02{}"),
            (&text, Transport::Tcp, b"\0\0\0\x02{}"),
            (&binary, Transport::WebSocket, b"\x82\x07\0\0\0\x02{}\xff"),
            (&binary, Transport::Tcp, b"\0\0\0\x07\0\0\0\x02{}\xff"),
        ];
        for (frame, transport, expected) in rows {
            assert_eq!(&encode(frame, transport)[..], expected, "{transport:?}");
        }
        let mut shared = Shared::new(&text);
        let mut deflater = Deflater::default();
        let mut twice = |transport, window_bits: Option<u8>| {
            let window_bits = window_bits.and_then(NonZeroU8::new);
            let mut one = || shared.bytes(transport, window_bits, &mut deflater);
            let (one, two) = (one(), one());
            assert_eq!(one.as_ptr(), two.as_ptr());
            one
        };
        twice(Transport::Tcp, None);
        let plain = twice(Transport::WebSocket, None);
        // Too short to gain anything.
        assert_eq!(twice(Transport::WebSocket, Some(15)).as_ptr(), plain.as_ptr());
    }

    #[test]
    fn what_is_compressed_comes_out_as_it_was() {
        let long = "x".repeat(1000);
        let text = Frame { json: Bytes::from(format!("{{{long}}}")), body: None };
        let binary = Frame { json: text.json.clone(), body: Some(Bytes::from(long.clone())) };
        let mut deflater = Deflater::default();
        let mut inflater = ws::deflate::Inflater::default();
        for (frame, first, payload) in [
            (&text, 0xc1, format!("{{{long}}}").into_bytes()),
            (&binary, 0xc2, [&1002_u32.to_be_bytes()[..], format!("{{{long}}}{long}").as_bytes()].concat()),
        ] {
            for bits in [9, 15] {
                let mut shared = Shared::new(frame);
                let bytes = shared.bytes(Transport::WebSocket, NonZeroU8::new(bits), &mut deflater);
                assert_eq!((bytes[0], bytes.len()), (first, 2 + usize::from(bytes[1])));
                assert_eq!(inflater.inflate(&bytes[2..], 10_000), Ok(&payload[..]));
            }
        }
    }

    #[test]
    fn a_row_knows_where_its_frames_are() {
        let frames = ["{}", "{\"a\":1}", "[]"].map(|json| Frame { json: json.into(), body: None });
        for (transport, header) in [(Transport::WebSocket, 2), (Transport::Tcp, 4)] {
            let row = Row::new(frames.iter(), transport, None, &mut Deflater::default());
            let mut at = 0;
            for (number, frame) in frames.iter().enumerate() {
                assert_eq!((row.start(number), row.frame(number)), (at, encode(frame, transport)));
                assert_eq!((row.whole(at), row.whole(at + 1)), (number, number));
                at += header + frame.len();
            }
            assert_eq!((row.start(3), row.whole(at), row.frames(), row.bytes.len()), (at, 3, 3, at));
        }
    }
}
