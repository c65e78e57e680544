//! Frames as bytes of their transport.

use bowline_protocol::{Frame, tcp, ws};
use bytes::{BufMut, Bytes};

/// What carries a connection's frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    WebSocket,
    Tcp,
}

/// A frame, framed.
pub fn encode(frame: &Frame, transport: Transport) -> Bytes {
    let payload_bytes = frame.len();
    let mut out = Vec::with_capacity(ws::HEADER_BYTES_MAX + payload_bytes);
    match transport {
        Transport::WebSocket => {
            let kind = if frame.body.is_some() { ws::Kind::Binary } else { ws::Kind::Text };
            ws::write_header(&mut out, kind, payload_bytes);
        }
        Transport::Tcp => tcp::write_header(&mut out, payload_bytes),
    }
    if let Some(body) = &frame.body {
        // Headers stay below 2²⁴ bytes, so that the first byte of a binary form is 0.
        out.put_u32(frame.json.len() as u32);
        out.extend_from_slice(&frame.json);
        out.extend_from_slice(body);
    } else {
        out.extend_from_slice(&frame.json);
    }
    out.into()
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
}
