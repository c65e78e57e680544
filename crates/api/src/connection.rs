//! A connection of the public listener on tokio, with or without TLS.

use bowline_tls::{Stream, Tls};
use std::{
    any::Any,
    io::{self, IoSlice, Read, Write},
    pin::Pin,
    task::{Context, Poll, ready},
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
};

/// One that a shard has handed over; its TLS goes on where the shard left it.
pub(crate) struct Connection {
    socket: TcpStream,
    tls: Option<Box<Tls>>,
    attached: Option<Box<dyn Any + Send + Sync>>,
}

impl Connection {
    /// The socket must not be blocking.
    pub fn new(stream: Stream) -> io::Result<Self> {
        let Stream { socket, tls, attached } = stream;
        Ok(Self { socket: TcpStream::from_std(socket)?, tls, attached })
    }

    /// For whoever takes it back.
    pub fn into_stream(self) -> io::Result<Stream> {
        Ok(Stream { socket: self.socket.into_std()?, tls: self.tls, attached: self.attached })
    }
}

/// The socket as TLS takes it: not ready is `WouldBlock`, and the task is woken when it is.
struct Ready<'a, 'b> {
    socket: &'a mut TcpStream,
    context: &'a mut Context<'b>,
}

fn now<T>(poll: Poll<io::Result<T>>) -> io::Result<T> {
    match poll {
        Poll::Ready(result) => result,
        Poll::Pending => Err(io::ErrorKind::WouldBlock.into()),
    }
}

fn later<T>(result: io::Result<T>) -> Poll<io::Result<T>> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Poll::Pending,
        result => Poll::Ready(result),
    }
}

impl Read for Ready<'_, '_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut buffer = ReadBuf::new(buffer);
        now(Pin::new(&mut *self.socket).poll_read(self.context, &mut buffer))?;
        Ok(buffer.filled().len())
    }
}

impl Write for Ready<'_, '_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        now(Pin::new(&mut *self.socket).poll_write(self.context, bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let Self { socket, tls, .. } = &mut *self;
        let Some(tls) = tls else { return Pin::new(socket).poll_read(context, out) };
        loop {
            let got = later(tls.read(&mut Ready { socket, context }, out.initialize_unfilled()));
            let got = ready!(got)?;
            // A part of a record is not the end.
            if got.bytes > 0 || got.raw == 0 {
                out.advance(got.bytes);
                return Poll::Ready(Ok(()));
            }
        }
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.as_mut().poll_write_vectored(context, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let Self { socket, tls, .. } = &mut *self;
        match tls {
            None => Pin::new(socket).poll_write_vectored(context, parts),
            Some(tls) => later(tls.write_vectored(&mut Ready { socket, context }, parts)),
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Self { socket, tls, .. } = &mut *self;
        if let Some(tls) = tls
            && !tls.flush(&mut Ready { socket, context })?
        {
            return Poll::Pending;
        }
        Pin::new(socket).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Self { socket, tls, .. } = &mut *self;
        if let Some(tls) = tls {
            tls.close(&mut Ready { socket, context })?;
            if !tls.flush(&mut Ready { socket, context })? {
                return Poll::Pending;
            }
        }
        Pin::new(socket).poll_shutdown(context)
    }
}
