//! Frames as bytes of their transport.

use bowline_protocol::{Frame, tcp, ws};
use bytes::{BufMut, Bytes};
use smallvec::SmallVec;

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
    pub fn new<'a>(frames: impl Iterator<Item = &'a Frame> + Clone, transport: Transport) -> Self {
        let bytes = frames.clone().map(|frame| ws::HEADER_BYTES_MAX + frame.len()).sum();
        let mut out = Vec::with_capacity(bytes);
        let ends = frames.map(|frame| {
            append(&mut out, frame, transport);
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

/// One frame for many connections: framed once for each transport that is asked for.
pub struct Shared<'a> {
    frame: &'a Frame,
    web_socket: Option<Bytes>,
    tcp: Option<Bytes>,
}

impl<'a> Shared<'a> {
    pub fn new(frame: &'a Frame) -> Self {
        Self { frame, web_socket: None, tcp: None }
    }

    pub fn bytes(&mut self, transport: Transport) -> Bytes {
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
        let (one, two) = (shared.bytes(Transport::Tcp), shared.bytes(Transport::Tcp));
        assert_eq!(one.as_ptr(), two.as_ptr());
    }

    #[test]
    fn a_row_knows_where_its_frames_are() {
        let frames = ["{}", "{\"a\":1}", "[]"].map(|json| Frame { json: json.into(), body: None });
        for (transport, header) in [(Transport::WebSocket, 2), (Transport::Tcp, 4)] {
            let row = Row::new(frames.iter(), transport);
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
