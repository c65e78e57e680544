//! A connection's socket, with or without TLS: whoever reads and writes need not know.

use crate::gate::{Gate, Place};
use bowline_tls::{Got, Stream, Tls};
use mio::net::TcpStream;
use std::{
    io::{self, IoSlice, Read, Write},
    net::{IpAddr, Shutdown},
    sync::Arc,
    time::Duration,
};

pub struct Socket {
    pub stream: TcpStream,
    tls: Option<Box<Tls>>,
    /// Behind the stream: the place is free when the file is closed.
    pub place: Place,
}

impl From<Socket> for Stream {
    fn from(socket: Socket) -> Self {
        let Socket { stream, tls, place } = socket;
        Self { socket: stream.into(), tls, attached: Some(Box::new(place)) }
    }
}

impl Socket {
    pub fn new(stream: TcpStream, tls: Option<Box<Tls>>, place: Place) -> Self {
        Self { stream, tls, place }
    }

    /// One that was handed on comes back, with its place. `None` when there is none for it.
    pub fn back(stream: Stream, gate: &Arc<Gate>) -> Option<Self> {
        let Stream { socket, tls, attached } = stream;
        let place = match attached.map(|attached| attached.downcast::<Place>()) {
            Some(Ok(place)) => *place,
            _ => gate.admit(socket.peer_addr().ok()?.ip())?,
        };
        Some(Self { stream: TcpStream::from_std(socket), tls, place })
    }

    /// Reads once. Nothing at all is the end of the input; a part of a record is bytes of the client and no plaintext.
    pub fn read(&mut self, buffer: &mut [u8]) -> io::Result<Got> {
        match &mut self.tls {
            None => {
                let bytes = self.stream.read(buffer)?;
                // A short read has emptied the socket.
                Ok(Got { bytes, raw: bytes, more: bytes == buffer.len() })
            }
            Some(tls) => tls.read(&mut self.stream, buffer),
        }
    }

    /// Bytes that were read and not given out yet: the socket may have nothing more to report.
    pub fn has_read_ahead(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.has_plaintext())
    }

    /// Writes what it takes. What it took may wait here for the socket, see [`Self::unsent_bytes`].
    pub fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.tls {
            None => self.stream.write(bytes),
            Some(tls) => tls.write(&mut self.stream, bytes),
        }
    }

    pub fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        match &mut self.tls {
            None => self.stream.write_vectored(slices),
            Some(tls) => tls.write_vectored(&mut self.stream, slices),
        }
    }

    /// One that takes less than it is offered is full, and says when it is not. TLS takes a bounded piece at a time.
    pub fn is_full_when_short(&self) -> bool {
        self.tls.is_none()
    }

    /// Offers the socket what waits here.
    pub fn flush(&mut self) -> io::Result<()> {
        match &mut self.tls {
            None => Ok(()),
            Some(tls) => tls.flush(&mut self.stream).map(|_| ()),
        }
    }

    /// What was taken and not written. While there is any, all is not sent.
    pub fn unsent_bytes(&self) -> usize {
        self.tls.as_ref().map_or(0, |tls| tls.unsent_bytes())
    }

    /// Says that nothing more comes. It fails when the client is gone, which the next read says.
    pub fn end_output(&mut self) {
        self.say_goodbye();
        let _gone = self.stream.shutdown(Shutdown::Write);
    }

    /// The end as TLS has it, which keeps a client from taking it for a cut.
    pub fn say_goodbye(&mut self) {
        if let Some(tls) = &mut self.tls {
            let _gone = tls.close(&mut self.stream);
        }
    }

    /// Its end will be a reset.
    pub fn reset_at_end(&self) -> io::Result<()> {
        socket2::SockRef::from(&self.stream).set_linger(Some(Duration::ZERO))
    }

    pub fn peer_ip(&self) -> Option<IpAddr> {
        self.stream.peer_addr().ok().map(|address| address.ip())
    }
}
