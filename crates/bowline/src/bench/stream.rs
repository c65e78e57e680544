//! A connection's socket, with TLS around it or without.

use super::wire::Place;
use anyhow::Context;
use bowline_client::Trust;
use rustls::{ClientConfig, ClientConnection, StreamOwned, client::Resumption, pki_types::ServerName};
use std::{
    io::{self, Read, Write},
    sync::Arc,
};

/// What TLS connections to a place have in common.
pub struct Tls {
    config: Arc<ClientConfig>,
    name: ServerName<'static>,
}

impl Tls {
    /// `None` where the address asks for none.
    pub fn of(place: &Place) -> anyhow::Result<Option<Self>> {
        if !place.is_secure {
            return Ok(None);
        }
        let trust = match &place.ca {
            Some(file) => Trust::file(file).context("--ca")?,
            None => Trust::system()?,
        };
        // Each connection stands for another client, which has no session of an earlier one to resume.
        let mut config = trust.config().clone();
        config.resumption = Resumption::disabled();
        let name = ServerName::try_from(place.host.clone())
            .with_context(|| format!("--url: {:?} is no name that a certificate can have", place.host))?;
        Ok(Some(Self { config: Arc::new(config), name }))
    }
}

pub enum Stream<S: Read + Write> {
    Plain(S),
    Tls(Box<StreamOwned<ClientConnection, S>>),
}

impl<S: Read + Write> Stream<S> {
    /// Nothing is said yet: the handshake is made by the first reads and writes.
    pub fn new(socket: S, tls: Option<&Tls>) -> io::Result<Self> {
        let Some(tls) = tls else { return Ok(Self::Plain(socket)) };
        let session =
            ClientConnection::new(tls.config.clone(), tls.name.clone()).map_err(io::Error::other)?;
        Ok(Self::Tls(Box::new(StreamOwned::new(session, socket))))
    }

    pub fn socket_mut(&mut self) -> &mut S {
        match self {
            Self::Plain(socket) => socket,
            Self::Tls(stream) => stream.get_mut(),
        }
    }

    pub fn socket(&self) -> &S {
        match self {
            Self::Plain(socket) => socket,
            Self::Tls(stream) => stream.get_ref(),
        }
    }
}

impl<S: Read + Write> Read for Stream<S> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(socket) => socket.read(bytes),
            Self::Tls(stream) => stream.read(bytes),
        }
    }
}

impl<S: Read + Write> Write for Stream<S> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Plain(socket) => socket.write(bytes),
            Self::Tls(stream) => stream.write(bytes),
        }
    }

    /// Hands over records that the socket had no room for; with TLS also what is left of the handshake.
    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Plain(socket) => socket.flush(),
            Self::Tls(stream) => stream.flush(),
        }
    }
}
