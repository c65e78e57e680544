//! The certificate, its key, and what is agreed with clients.

use crate::record::Tls;
use rustls::{
    ServerConfig, SupportedCipherSuite,
    crypto::{CryptoProvider, aws_lc_rs},
    pki_types::{
        CertificateDer, PrivateKeyDer,
        pem::{self, PemObject},
    },
};
use std::{
    path::{Path, PathBuf},
    sync::{Arc, PoisonError, RwLock},
};

/// Which of the two files is meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    Cert,
    Key,
}

impl Part {
    /// The last word of its key in the configuration.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Cert => "cert",
            Self::Key => "key",
        }
    }
}

/// Why TLS cannot be spoken with these files.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the file {} cannot be read: {source}; it must exist and be readable by the server's user", path.display())]
    Unreadable { part: Part, path: PathBuf, source: std::io::Error },
    #[error("the file {} is no PEM: {source}", path.display())]
    Broken { part: Part, path: PathBuf, source: pem::Error },
    #[error("the file {} has no certificate; it takes the chain as PEM, the server's own first", path.display())]
    NoCertificate { path: PathBuf },
    #[error("the file {} has no private key; it takes one as PEM, without a passphrase", path.display())]
    NoKey { path: PathBuf },
    #[error(
        "the key in {} does not belong to the first certificate in {}; name the two files of one certificate", key.display(), cert.display()
    )]
    Mismatch { cert: PathBuf, key: PathBuf },
    #[error("{} and {} cannot be used together: {source}", cert.display(), key.display())]
    Refused { cert: PathBuf, key: PathBuf, source: rustls::Error },
}

impl Error {
    pub fn part(&self) -> Part {
        match self {
            Self::Unreadable { part, .. } | Self::Broken { part, .. } => *part,
            Self::NoCertificate { .. } | Self::Refused { .. } => Part::Cert,
            Self::NoKey { .. } | Self::Mismatch { .. } => Part::Key,
        }
    }
}

/// In the order of preference, whatever the client's is. Processors have instructions for SHA-256 and seldom for
/// SHA-384, which takes a quarter of the CPU of a whole handshake.
const SUITES: [SupportedCipherSuite; 3] = [
    aws_lc_rs::cipher_suite::TLS13_AES_128_GCM_SHA256,
    aws_lc_rs::cipher_suite::TLS13_AES_256_GCM_SHA384,
    aws_lc_rs::cipher_suite::TLS13_CHACHA20_POLY1305_SHA256,
];

/// What is spoken inside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Door {
    /// HTTP/1.1, which is offered by ALPN.
    Http,
    /// Frames, for which there is no name: what a client proposes is passed over.
    Frames,
}

struct Current {
    http: Arc<ServerConfig>,
    frames: Arc<ServerConfig>,
}

/// Begins the TLS of connections, with the certificate that holds now.
pub struct Acceptor {
    cert: PathBuf,
    key: PathBuf,
    current: RwLock<Current>,
}

impl Acceptor {
    /// Reads both files.
    pub fn load(cert: &Path, key: &Path) -> Result<Self, Error> {
        let current = RwLock::new(Current::read(cert, key)?);
        Ok(Self { cert: cert.to_owned(), key: key.to_owned(), current })
    }

    /// Reads the files again. From here on handshakes get what they hold now; when they cannot be used, everything
    /// stays as it was. Tickets of before are worth nothing any more, so that nobody resumes with a certificate that
    /// was replaced.
    pub fn reload(&self) -> Result<(), Error> {
        let current = Current::read(&self.cert, &self.key)?;
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = current;
        Ok(())
    }

    /// The server's side of a new connection.
    pub fn accept(&self, door: Door) -> Result<Tls, rustls::Error> {
        let current = self.current.read().unwrap_or_else(PoisonError::into_inner);
        let config = match door {
            Door::Http => current.http.clone(),
            Door::Frames => current.frames.clone(),
        };
        drop(current);
        Tls::new(config)
    }
}

impl Current {
    fn read(cert: &Path, key: &Path) -> Result<Self, Error> {
        let chain = certificates(cert)?;
        let private = private_key(key)?;
        let (cert, key) = (cert.to_owned(), key.to_owned());
        let refused = |source| match source {
            rustls::Error::InconsistentKeys(_) => Error::Mismatch { cert: cert.clone(), key: key.clone() },
            source => Error::Refused { cert: cert.clone(), key: key.clone(), source },
        };
        let provider = CryptoProvider { cipher_suites: SUITES.to_vec(), ..aws_lc_rs::default_provider() };
        let mut config = ServerConfig::builder_with_provider(Arc::new(provider))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(refused)?
            .with_no_client_auth()
            .with_single_cert(chain, private)
            .map_err(refused)?;
        config.ignore_client_order = true;
        // What a session needs to be resumed lies in its ticket and not with us. One is enough for a client that
        // holds one connection.
        config.ticketer = aws_lc_rs::Ticketer::new().map_err(refused)?;
        config.send_tls13_tickets = 1;
        config.max_early_data_size = 0;
        let frames = Arc::new(config.clone());
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self { http: Arc::new(config), frames })
    }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, Error> {
    let text = read(Part::Cert, path)?;
    let chain = CertificateDer::pem_slice_iter(&text)
        .collect::<Result<Vec<_>, _>>()
        .map_err(|source| Error::Broken { part: Part::Cert, path: path.to_owned(), source })?;
    if chain.is_empty() {
        return Err(Error::NoCertificate { path: path.to_owned() });
    }
    Ok(chain)
}

fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, Error> {
    PrivateKeyDer::from_pem_slice(&read(Part::Key, path)?).map_err(|error| match error {
        pem::Error::NoItemsFound => Error::NoKey { path: path.to_owned() },
        source => Error::Broken { part: Part::Key, path: path.to_owned(), source },
    })
}

fn read(part: Part, path: &Path) -> Result<Vec<u8>, Error> {
    std::fs::read(path).map_err(|source| Error::Unreadable { part, path: path.to_owned(), source })
}
