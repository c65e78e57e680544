//! A connection whose first bytes were read by somebody else.

use crate::connection::Connection;
use bytes::{Buf, Bytes, BytesMut};
use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};

/// Gives `head` first, then what the socket gives.
pub(crate) struct Rewind {
    pub head: Bytes,
    pub stream: Connection,
}

impl Rewind {
    /// Whether the client's first bytes are these; reads as far as it takes to say so.
    pub async fn begins_with(&mut self, bytes: &[u8]) -> io::Result<bool> {
        while self.head.len() < bytes.len() && bytes.starts_with(&self.head) {
            let mut head = BytesMut::from(&self.head[..]);
            if self.stream.read_buf(&mut head).await? == 0 {
                return Ok(false);
            }
            self.head = head.freeze();
        }
        Ok(self.head.starts_with(bytes))
    }
}

impl AsyncRead for Rewind {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.head.is_empty() {
            return Pin::new(&mut self.stream).poll_read(context, out);
        }
        let take = self.head.len().min(out.remaining());
        out.put_slice(&self.head[..take]);
        self.head.advance(take);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Rewind {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
