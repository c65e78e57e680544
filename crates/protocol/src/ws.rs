//! WebSocket framing (RFC 6455), the server's side, sans-IO.
//!
//! [`Decoder`] works in the caller's read buffer: a frame that lies there whole is unmasked in place and handed out
//! as a slice of it. Only what is partial, a frame that goes on behind the buffer or a fragmented message, is kept,
//! in a box that exists no longer than that. Text is validated as it arrives, so that an invalid byte ends the
//! connection at once and not at the end of a message.

pub mod deflate;
pub mod handshake;

use crate::error::CloseCode;

/// The longest payload of a control frame (RFC 6455, 5.5).
pub const CONTROL_BYTES_MAX: usize = 125;
/// The longest header of a frame that a server sends: two bytes and a 64-bit length.
pub const HEADER_BYTES_MAX: usize = 10;

/// What a client said.
#[derive(Debug, PartialEq, Eq)]
pub enum Message<'a> {
    /// Valid UTF-8.
    Text(&'a [u8]),
    Binary(&'a [u8]),
    /// A compressed message, to be opened with [`deflate::Inflater`] and, when it is text, validated.
    Deflated {
        is_text: bool,
        payload: &'a [u8],
    },
    Ping(&'a [u8]),
    Pong,
    /// The code is `None` when the frame was empty.
    Close(Option<u16>),
}

/// Why the connection must be failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    #[error("broken WebSocket framing: {0}")]
    Protocol(&'static str),
    #[error("a text message is not UTF-8")]
    Utf8,
    #[error("a compressed message cannot be opened")]
    Deflate,
    #[error("a message is longer than {max} bytes; send larger content as an object")]
    TooLarge { max: usize },
}

impl Fault {
    pub fn close_code(self) -> CloseCode {
        match self {
            Self::Protocol(_) => CloseCode::ProtocolError,
            Self::Utf8 | Self::Deflate => CloseCode::Malformed,
            Self::TooLarge { .. } => CloseCode::TooLarge,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Opcode {
    Continuation,
    Text,
    Binary,
    Close,
    Ping,
    Pong,
}

impl Opcode {
    fn is_control(self) -> bool {
        matches!(self, Self::Close | Self::Ping | Self::Pong)
    }
}

/// The header of one client frame.
#[derive(Debug, Clone, Copy)]
struct Header {
    opcode: Opcode,
    fin: bool,
    /// It begins a compressed message (RFC 7692, 6).
    deflated: bool,
    mask: [u8; 4],
    payload_bytes: u64,
}

impl Header {
    /// `None` while the header is not complete; otherwise also its length. Faults show as early as they can.
    fn parse(bytes: &[u8], may_deflate: bool) -> Result<Option<(Self, usize)>, Fault> {
        let Some(&first) = bytes.first() else { return Ok(None) };
        let opcode = match first & 0x0f {
            0 => Opcode::Continuation,
            1 => Opcode::Text,
            2 => Opcode::Binary,
            8 => Opcode::Close,
            9 => Opcode::Ping,
            10 => Opcode::Pong,
            _ => return Err(Fault::Protocol("the opcode is reserved")),
        };
        let deflated = first & 0x40 != 0;
        let may_deflate = may_deflate && matches!(opcode, Opcode::Text | Opcode::Binary);
        if first & 0x30 != 0 || deflated && !may_deflate {
            return Err(Fault::Protocol("a reserved bit is set"));
        }
        let fin = first & 0x80 != 0;
        if opcode.is_control() && !fin {
            return Err(Fault::Protocol("a control frame is fragmented"));
        }
        let Some(&second) = bytes.get(1) else { return Ok(None) };
        if second & 0x80 == 0 {
            return Err(Fault::Protocol("a client's frame is not masked"));
        }
        let (length_bytes, short) = match second & 0x7f {
            126 => (2, 0),
            127 => (8, 0),
            short => (0, u64::from(short)),
        };
        if opcode.is_control() && length_bytes != 0 {
            return Err(Fault::Protocol("a control frame is longer than 125 bytes"));
        }
        let length = 2 + length_bytes + 4;
        let Some(rest) = bytes.get(2..length) else { return Ok(None) };
        let (long, mask) = rest.split_at(length_bytes);
        let payload_bytes = long.iter().fold(short, |value, byte| value << 8 | u64::from(*byte));
        if payload_bytes >> 63 != 0 {
            return Err(Fault::Protocol("the highest bit of a length is set"));
        }
        let mask = mask.try_into().expect("the slice was cut to four bytes");
        Ok(Some((Self { opcode, fin, deflated, mask, payload_bytes }, length)))
    }
}

/// What is kept of a connection in mid-frame or mid-message.
#[derive(Debug, Default)]
struct Partial {
    /// Bytes of a header that goes on behind the buffer.
    header: Vec<u8>,
    frame: Option<Begun>,
    /// The message in progress: its kind, its bytes (unmasked), how many of them are known to be good text.
    text: Option<bool>,
    deflated: bool,
    message: Vec<u8>,
    checked: usize,
    /// The control frame in progress.
    control: Vec<u8>,
    /// `message` (or `control`) was handed out and is to be forgotten.
    message_done: bool,
    control_done: bool,
}

/// A frame of which some payload is still to come.
#[derive(Debug, Clone, Copy)]
struct Begun {
    header: Header,
    left: u64,
}

impl Partial {
    fn is_idle(&self) -> bool {
        self.header.is_empty() && self.frame.is_none() && self.text.is_none() && self.message.is_empty()
    }

    fn forget_done(&mut self) {
        if self.message_done {
            (self.message, self.text, self.checked, self.message_done) = (Vec::new(), None, 0, false);
            self.deflated = false;
        }
        if self.control_done {
            (self.control, self.control_done) = (Vec::new(), false);
        }
    }

    /// Validates what has arrived of a text; `complete` when the message ends here.
    fn check_text(&mut self, complete: bool) -> Result<(), Fault> {
        if self.text != Some(true) || self.deflated {
            return Ok(());
        }
        match simdutf8::compat::from_utf8(&self.message[self.checked..]) {
            Ok(_) => self.checked = self.message.len(),
            Err(error) if error.error_len().is_some() || complete => return Err(Fault::Utf8),
            Err(error) => self.checked += error.valid_up_to(),
        }
        Ok(())
    }
}

/// Takes the bytes of one connection apart. Eight bytes while nothing is partial.
#[derive(Debug, Default)]
pub struct Decoder {
    partial: Option<Box<Partial>>,
}

impl Decoder {
    /// The next message in `buf[*at..]`, or `None` when more bytes are needed; `at` moves behind what was used. The
    /// decoder keeps what is partial, so all of `buf` is used in the end. After a fault it must not be used again.
    ///
    /// No message, fragmented or not, may be longer than `max` bytes. Compressed ones come only where `may_deflate`.
    pub fn next<'b>(
        &'b mut self,
        buf: &'b mut [u8],
        at: &mut usize,
        max: usize,
        may_deflate: bool,
    ) -> Result<Option<Message<'b>>, Fault> {
        if let Some(partial) = &mut self.partial {
            partial.forget_done();
            if partial.is_idle() {
                self.partial = None;
            }
        }
        if self.partial.is_none() {
            match Header::parse(&buf[*at..], may_deflate)? {
                Some((header, length)) if !matches!(header.opcode, Opcode::Continuation) => {
                    let end = whole(&header, *at + length, buf.len(), max)?;
                    if let (Some(end), true) = (end, header.fin) {
                        let payload = &mut buf[*at + length..end];
                        *at = end;
                        unmask(payload, header.mask, 0);
                        return single(&header, payload).map(Some);
                    }
                }
                _ if *at == buf.len() => return Ok(None),
                _ => {}
            }
        }
        let partial = self.partial.get_or_insert_default();
        partial.next(buf, at, max, may_deflate)
    }

    /// Nothing is partial: the connection is between two messages.
    pub fn is_idle(&self) -> bool {
        self.partial.as_ref().is_none_or(|partial| partial.is_idle())
    }
}

/// Where the payload that starts at `start` ends, when it does so before `available`.
fn whole(header: &Header, start: usize, available: usize, max: usize) -> Result<Option<usize>, Fault> {
    if !header.opcode.is_control() && header.payload_bytes > bytes_max(max, header.deflated) as u64 {
        return Err(Fault::TooLarge { max });
    }
    Ok(start.checked_add(header.payload_bytes as usize).filter(|end| *end <= available))
}

/// The bound of what is collected of a message.
fn bytes_max(max: usize, deflated: bool) -> usize {
    if deflated { deflate::deflated_bytes_max(max) } else { max }
}

/// A message of one frame.
fn single<'a>(header: &Header, payload: &'a [u8]) -> Result<Message<'a>, Fault> {
    if header.deflated {
        return Ok(Message::Deflated { is_text: header.opcode == Opcode::Text, payload });
    }
    match header.opcode {
        Opcode::Text => match simdutf8::basic::from_utf8(payload) {
            Ok(_) => Ok(Message::Text(payload)),
            Err(_) => Err(Fault::Utf8),
        },
        Opcode::Binary => Ok(Message::Binary(payload)),
        Opcode::Ping => Ok(Message::Ping(payload)),
        Opcode::Pong => Ok(Message::Pong),
        Opcode::Close => close_code(payload).map(Message::Close),
        Opcode::Continuation => Err(Fault::Protocol("a continuation follows no message")),
    }
}

impl Partial {
    fn next<'b>(
        &'b mut self,
        buf: &'b mut [u8],
        at: &mut usize,
        max: usize,
        may_deflate: bool,
    ) -> Result<Option<Message<'b>>, Fault> {
        loop {
            let Begun { header, left } = match self.frame {
                Some(begun) => begun,
                None => match self.begin(buf, at, max, may_deflate)? {
                    Some(begun) => begun,
                    None => return Ok(None),
                },
            };
            let take = left.min((buf.len() - *at) as u64) as usize;
            let payload = &mut buf[*at..*at + take];
            *at += take;
            unmask(payload, header.mask, (header.payload_bytes - left) as usize);
            let left = left - take as u64;
            self.frame = (left > 0).then_some(Begun { header, left });
            let into = if header.opcode.is_control() { &mut self.control } else { &mut self.message };
            into.extend_from_slice(payload);
            if header.opcode.is_control() {
                if left > 0 {
                    return Ok(None);
                }
                self.control_done = true;
                return single(&header, &self.control).map(Some);
            }
            let complete = left == 0 && header.fin;
            self.check_text(complete)?;
            if complete {
                self.message_done = true;
                return Ok(Some(match self.text {
                    is_text if self.deflated => {
                        Message::Deflated { is_text: is_text == Some(true), payload: &self.message }
                    }
                    Some(true) => Message::Text(&self.message),
                    _ => Message::Binary(&self.message),
                }));
            }
            if left > 0 {
                return Ok(None);
            }
        }
    }

    /// Reads a header, across buffers if need be, and judges whether the frame may stand here.
    fn begin(
        &mut self,
        buf: &[u8],
        at: &mut usize,
        max: usize,
        may_deflate: bool,
    ) -> Result<Option<Begun>, Fault> {
        let header = if self.header.is_empty() {
            match Header::parse(&buf[*at..], may_deflate)? {
                Some((header, length)) => {
                    *at += length;
                    header
                }
                None => {
                    self.header.extend_from_slice(&buf[*at..]);
                    *at = buf.len();
                    return Ok(None);
                }
            }
        } else {
            loop {
                let Some(&byte) = buf.get(*at) else { return Ok(None) };
                *at += 1;
                self.header.push(byte);
                if let Some((header, _)) = Header::parse(&self.header, may_deflate)? {
                    self.header = Vec::new();
                    break header;
                }
            }
        };
        match (header.opcode, self.text) {
            (Opcode::Continuation, None) => return Err(Fault::Protocol("a continuation follows no message")),
            (Opcode::Text | Opcode::Binary, Some(_)) => {
                return Err(Fault::Protocol("a message begins inside another"));
            }
            (Opcode::Text, None) => self.text = Some(true),
            (Opcode::Binary, None) => self.text = Some(false),
            _ => {}
        }
        if matches!(header.opcode, Opcode::Text | Opcode::Binary) {
            self.deflated = header.deflated;
        }
        let room = bytes_max(max, self.deflated) - self.message.len();
        if !header.opcode.is_control() && header.payload_bytes > room as u64 {
            return Err(Fault::TooLarge { max });
        }
        Ok(Some(Begun { header, left: header.payload_bytes }))
    }
}

/// The code of a close frame; a wrong one is a fault (RFC 6455, 7.4).
fn close_code(payload: &[u8]) -> Result<Option<u16>, Fault> {
    let Some((code, reason)) = payload.split_first_chunk::<2>() else {
        return if payload.is_empty() {
            Ok(None)
        } else {
            Err(Fault::Protocol("a close frame has one byte"))
        };
    };
    let code = u16::from_be_bytes(*code);
    if !matches!(code, 1000..=1003 | 1007..=1014 | 3000..=4999) {
        return Err(Fault::Protocol("a close code must not be sent"));
    }
    simdutf8::basic::from_utf8(reason).map(|_| Some(code)).map_err(|_| Fault::Utf8)
}

/// Applies the mask to `payload`, which starts `offset` bytes into its frame.
fn unmask(payload: &mut [u8], mut mask: [u8; 4], offset: usize) {
    mask.rotate_left(offset % 4);
    let wide = u64::from_ne_bytes([mask[0], mask[1], mask[2], mask[3], mask[0], mask[1], mask[2], mask[3]]);
    let (chunks, rest) = payload.as_chunks_mut::<8>();
    for chunk in chunks {
        *chunk = (u64::from_ne_bytes(*chunk) ^ wide).to_ne_bytes();
    }
    for (byte, key) in rest.iter_mut().zip(mask.iter().cycle()) {
        *byte ^= key;
    }
}

/// What a server may send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Text,
    Binary,
    Close,
    Ping,
    Pong,
}

/// Appends the header of an unfragmented frame with a payload of so many bytes.
pub fn write_header(out: &mut Vec<u8>, kind: Kind, payload_bytes: usize) {
    let first = match kind {
        Kind::Text => 0x81,
        Kind::Binary => 0x82,
        Kind::Close => 0x88,
        Kind::Ping => 0x89,
        Kind::Pong => 0x8a,
    };
    write_first_and_length(out, first, payload_bytes);
}

/// Appends a whole message with a compressed payload.
pub fn write_deflated(out: &mut Vec<u8>, is_text: bool, deflated: &[u8]) {
    write_first_and_length(out, if is_text { 0xc1 } else { 0xc2 }, deflated.len());
    out.extend_from_slice(deflated);
}

fn write_first_and_length(out: &mut Vec<u8>, first: u8, payload_bytes: usize) {
    out.push(first);
    match payload_bytes {
        0..126 => out.push(payload_bytes as u8),
        126..0x1_0000 => {
            out.push(126);
            out.extend_from_slice(&(payload_bytes as u16).to_be_bytes());
        }
        _ => {
            out.push(127);
            out.extend_from_slice(&(payload_bytes as u64).to_be_bytes());
        }
    }
}

/// Appends a close frame; the reason is cut to what fits.
pub fn write_close(out: &mut Vec<u8>, code: Option<u16>, reason: &str) {
    let Some(code) = code else { return write_header(out, Kind::Close, 0) };
    let reason = &reason[..reason.floor_char_boundary(CONTROL_BYTES_MAX - 2)];
    write_header(out, Kind::Close, 2 + reason.len());
    out.extend_from_slice(&code.to_be_bytes());
    out.extend_from_slice(reason.as_bytes());
}

#[cfg(test)]
mod tests;
