//! Opens the sockets of clients, with TLS or without, by the scheme of the address.

use rustls::{
    ClientConfig, RootCertStore,
    crypto::aws_lc_rs,
    pki_types::{CertificateDer, ServerName, pem::PemObject},
};
use std::{
    io::{self, IoSlice},
    path::{Path, PathBuf},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
};
use tokio_rustls::{TlsConnector, client::TlsStream};

/// The schemes: frames over WebSocket or over TCP, and whether TLS is around them.
const SCHEMES: [(&str, bool, bool, Option<u16>); 4] = [
    ("ws", true, false, Some(80)),
    ("wss", true, true, Some(443)),
    ("tcp", false, false, None),
    ("tls", false, true, None),
];

/// Whose certificates a client takes for good.
#[derive(Clone)]
pub struct Trust(Arc<ClientConfig>);

#[derive(Debug, thiserror::Error)]
pub enum TrustError {
    #[error("the system has no certificates that could be trusted: {0}; name a file of your own")]
    System(String),
    #[error("the file {} cannot be used: {source}", path.display())]
    File { path: PathBuf, source: rustls::pki_types::pem::Error },
    #[error("the file {} holds no certificate that can be trusted; it takes those of the issuers, as PEM", path.display())]
    Empty { path: PathBuf },
    #[error("TLS cannot be spoken: {0}")]
    Refused(#[from] rustls::Error),
}

impl Trust {
    /// The issuers that the system trusts, or those in the file that `SSL_CERT_FILE` names.
    pub fn system() -> Result<Self, TrustError> {
        let found = rustls_native_certs::load_native_certs();
        let mut roots = RootCertStore::empty();
        let (added, _) = roots.add_parsable_certificates(found.certs);
        if added == 0 {
            let cause = found.errors.first().map_or_else(|| "none is installed".into(), |e| e.to_string());
            return Err(TrustError::System(cause));
        }
        Self::of(roots)
    }

    /// The issuers in a PEM file, and nobody else.
    pub fn file(path: &Path) -> Result<Self, TrustError> {
        let fail = |source| TrustError::File { path: path.to_owned(), source };
        let certificates = CertificateDer::pem_file_iter(path).map_err(fail)?;
        let certificates = certificates.collect::<Result<Vec<_>, _>>().map_err(fail)?;
        let mut roots = RootCertStore::empty();
        if roots.add_parsable_certificates(certificates).0 == 0 {
            return Err(TrustError::Empty { path: path.to_owned() });
        }
        Self::of(roots)
    }

    /// The same for connections that are made elsewhere.
    pub fn config(&self) -> &ClientConfig {
        &self.0
    }

    fn of(roots: RootCertStore) -> Result<Self, TrustError> {
        let config = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .with_root_certificates(roots)
            .with_no_client_auth();
        Ok(Self(Arc::new(config)))
    }
}

/// An address of a server, taken apart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    pub is_web_socket: bool,
    pub is_secure: bool,
    /// Without the brackets of IPv6.
    pub host: String,
    pub port: u16,
}

impl Address {
    /// `None` when it is no address of a server.
    pub fn parse(url: &str) -> Option<Self> {
        let (scheme, rest) = url.split_once("://")?;
        let (_, is_web_socket, is_secure, port) = *SCHEMES.iter().find(|row| row.0 == scheme)?;
        let authority = rest.split(['/', '?']).next()?;
        let colon = authority.rfind(':').filter(|at| !authority[*at..].contains(']'));
        let (host, port) = match colon {
            Some(at) => (&authority[..at], authority[at + 1..].parse().ok().filter(|port| *port > 0)?),
            None => (authority, port?),
        };
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        (!host.is_empty()).then(|| Self { is_web_socket, is_secure, host: host.to_owned(), port })
    }

    /// Opens a connection, up to the end of the TLS handshake where there is one.
    pub async fn dial(&self, trust: Option<&Trust>) -> io::Result<Stream> {
        let socket = TcpStream::connect((self.host.as_str(), self.port)).await?;
        socket.set_nodelay(true)?;
        if !self.is_secure {
            return Ok(Stream::Plain(socket));
        }
        let Some(Trust(config)) = trust else {
            return Err(io::Error::other("nobody's certificate is trusted"));
        };
        let name = ServerName::try_from(self.host.clone()).map_err(io::Error::other)?;
        let stream = TlsConnector::from(config.clone()).connect(name, socket).await?;
        Ok(Stream::Tls(Box::new(stream)))
    }
}

/// A socket, with TLS around it or without.
pub enum Stream {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

impl Stream {
    /// The socket alone.
    pub fn into_socket(self) -> TcpStream {
        match self {
            Self::Plain(socket) => socket,
            Self::Tls(stream) => stream.into_inner().0,
        }
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_read(context, out),
            Self::Tls(stream) => Pin::new(stream).poll_read(context, out),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_write(context, bytes),
            Self::Tls(stream) => Pin::new(stream).poll_write(context, bytes),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_write_vectored(context, parts),
            Self::Tls(stream) => Pin::new(stream).poll_write_vectored(context, parts),
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_flush(context),
            Self::Tls(stream) => Pin::new(stream).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_shutdown(context),
            Self::Tls(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_servers() {
        let address = |is_web_socket, is_secure, host: &str, port| {
            Some(Address { is_web_socket, is_secure, host: host.into(), port })
        };
        let rows = [
            ("ws://127.0.0.1:8080/ws", address(true, false, "127.0.0.1", 8080)),
            ("wss://chat.example.com/ws?a=b:c", address(true, true, "chat.example.com", 443)),
            ("ws://example.com", address(true, false, "example.com", 80)),
            ("wss://[::1]:9/ws", address(true, true, "::1", 9)),
            ("wss://[::1]/ws", address(true, true, "::1", 443)),
            ("tcp://h:1", address(false, false, "h", 1)),
            ("tls://h:1", address(false, true, "h", 1)),
            ("tls://h", None),
            ("http://h:1", None),
            ("ws://:1/", None),
            ("ws://h:x/", None),
            ("ws://h:0/", None),
            ("h:1", None),
        ];
        for (url, expected) in rows {
            assert_eq!(Address::parse(url), expected, "{url}");
        }
    }

    #[test]
    fn a_file_without_certificates_is_refused() {
        let file = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"));
        assert!(matches!(Trust::file(file), Err(TrustError::Empty { .. })));
        assert!(matches!(Trust::file(Path::new("/nowhere/ca.pem")), Err(TrustError::File { .. })));
    }
}
