//! Bytes on a socket, for what a well-behaved client library would not send.

use crate::wait::PATIENCE;
use std::{
    io::{ErrorKind, Read, Write},
    net::{SocketAddr, TcpStream},
    time::{Duration, Instant},
};

/// Connects with limits on reading and writing.
pub fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect_timeout(&address, PATIENCE)
        .unwrap_or_else(|error| panic!("connecting to {address}: {error}"));
    stream.set_nodelay(true).expect("a fresh socket takes options");
    stream.set_read_timeout(Some(PATIENCE)).expect("a fresh socket takes options");
    stream.set_write_timeout(Some(PATIENCE)).expect("a fresh socket takes options");
    stream
}

/// An HTTP answer that was read byte by byte.
#[derive(Debug)]
pub struct Response {
    pub status: u16,
    pub head: String,
    pub body: String,
}

impl Response {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.head
            .lines()
            .skip(1)
            .filter_map(|line| line.split_once(':'))
            .find(|(n, _)| n.trim().eq_ignore_ascii_case(name))
            .map(|(_, value)| value.trim())
    }

    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error} in {self:?}"))
    }
}

/// Reads one answer: the head, and as many bytes as `Content-Length` says.
pub fn read_response(stream: &mut TcpStream) -> Response {
    let mut bytes = Vec::new();
    let mut byte = [0];
    while !bytes.ends_with(b"\r\n\r\n") {
        let read = stream.read(&mut byte).unwrap_or_else(|error| {
            panic!("waiting for an answer, after {:?}: {error}", String::from_utf8_lossy(&bytes))
        });
        assert_eq!(read, 1, "the connection ended after {:?}", String::from_utf8_lossy(&bytes));
        bytes.push(byte[0]);
        assert!(bytes.len() < 1 << 16, "the head of the answer does not end");
    }
    let head = String::from_utf8(bytes).expect("the head of the answer is text");
    let status = head.split(' ').nth(1).and_then(|word| word.parse().ok());
    let mut response = Response { status: status.expect("a status"), head, body: String::new() };
    let length = response.header("content-length").map_or(0, |text| text.parse().expect("a length"));
    let mut body = vec![0; length];
    if response.status != 101 {
        stream.read_exact(&mut body).expect("the body is as long as announced");
        response.body = String::from_utf8(body).expect("the body is text");
    }
    response
}

/// Sends `bytes` on a new connection and reads one answer.
pub fn exchange(address: SocketAddr, bytes: &[u8]) -> Response {
    let mut stream = connect(address);
    // A server may answer and stop reading before the end of an oversize head.
    let _ = stream.write_all(bytes);
    read_response(&mut stream)
}

/// The head of an upgrade request, good unless `headers` spoil it.
pub fn upgrade(path: &str, headers: &[(&str, &str)]) -> Vec<u8> {
    let mut head = format!(
        "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    );
    for (name, value) in headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    head.push_str("\r\n");
    head.into_bytes()
}

/// One WebSocket frame as a client sends it. `first` is the first byte: FIN, reserved bits and opcode.
pub fn ws_frame(first: u8, payload: &[u8]) -> Vec<u8> {
    let mut frame = vec![first];
    match payload.len() {
        length @ 0..126 => frame.push(0x80 | length as u8),
        length @ 126..65536 => {
            frame.push(0x80 | 126);
            frame.extend_from_slice(&(length as u16).to_be_bytes());
        }
        length => {
            frame.push(0x80 | 127);
            frame.extend_from_slice(&(length as u64).to_be_bytes());
        }
    }
    let mask = [0x12, 0x34, 0x56, 0x78];
    frame.extend_from_slice(&mask);
    frame.extend(payload.iter().zip(mask.iter().cycle()).map(|(byte, mask)| byte ^ mask));
    frame
}

/// One TCP frame: length and bytes.
pub fn tcp_frame(payload: &[u8]) -> Vec<u8> {
    let mut frame = (payload.len() as u32).to_be_bytes().to_vec();
    frame.extend_from_slice(payload);
    frame
}

/// Reads until the other side ends the connection; what came, and whether it ended within `limit`.
pub fn read_to_end(stream: &mut TcpStream, limit: Duration) -> (Vec<u8>, bool) {
    let end = Instant::now() + limit;
    let mut all = Vec::new();
    let mut buffer = [0; 4096];
    stream.set_read_timeout(Some(Duration::from_millis(50))).expect("an open socket takes options");
    while Instant::now() < end {
        match stream.read(&mut buffer) {
            Ok(0) => return (all, true),
            Ok(count) => all.extend_from_slice(&buffer[..count]),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => return (all, true),
        }
    }
    (all, false)
}
