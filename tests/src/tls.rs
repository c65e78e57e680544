//! Certificates, and a way for clients without TLS to a server that speaks nothing else.

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use rustls::{
    ClientConfig, ClientConnection, RootCertStore,
    crypto::aws_lc_rs,
    pki_types::{CertificateDer, ServerName, pem::PemObject},
};
use socket2::SockRef;
use std::{
    io::{self, Read, Write},
    net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream},
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

/// An issuer, and the files of a server's certificate for this machine.
pub struct Certificates {
    folder: tempfile::TempDir,
    issuer: Issuer<'static, KeyPair>,
}

impl Default for Certificates {
    fn default() -> Self {
        Self::new()
    }
}

impl Certificates {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().expect("a temporary directory");
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, "The issuer of the tests");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let key = KeyPair::generate().expect("a key can be made");
        let ca = params.self_signed(&key).expect("a certificate can be made");
        std::fs::write(folder.path().join("ca.pem"), ca.pem()).expect("a file can be written");
        let all = Self { folder, issuer: Issuer::new(params, key) };
        all.renew();
        all
    }

    pub fn ca(&self) -> PathBuf {
        self.folder.path().join("ca.pem")
    }

    pub fn cert(&self) -> PathBuf {
        self.folder.path().join("cert.pem")
    }

    pub fn key(&self) -> PathBuf {
        self.folder.path().join("key.pem")
    }

    /// Puts another certificate of the same issuer in the place of the server's.
    pub fn renew(&self) {
        let names = ["localhost", "127.0.0.1"].map(String::from);
        let mut params = CertificateParams::new(names).expect("the names are good");
        params.distinguished_name.push(DnType::CommonName, "The server of the tests");
        params.use_authority_key_identifier_extension = true;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let key = KeyPair::generate().expect("a key can be made");
        let cert = params.signed_by(&key, &self.issuer).expect("a certificate can be made");
        std::fs::write(self.cert(), cert.pem()).expect("a file can be written");
        std::fs::write(self.key(), key.serialize_pem()).expect("a file can be written");
    }

    fn client(&self) -> Arc<ClientConfig> {
        let mut roots = RootCertStore::empty();
        let ca = CertificateDer::from_pem_file(self.ca()).expect("the issuer's certificate is there");
        roots.add(ca).expect("it is one");
        let config = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .expect("TLS 1.3 is known")
            .with_root_certificates(roots)
            .with_no_client_auth();
        Arc::new(config)
    }
}

/// What the kernel holds of a tunnel's connection in each direction, so that a slow reader at one end is felt at the
/// other.
const KERNEL_BYTES: usize = 64 << 10;

/// Listens without TLS and carries every connection to a listener with TLS, bytes and ends alike.
pub struct Tunnel {
    pub address: SocketAddr,
    is_over: Arc<AtomicBool>,
}

impl Tunnel {
    pub fn to(target: SocketAddr, certificates: &Certificates) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port is free");
        let address = listener.local_addr().expect("a bound socket has an address");
        let is_over = Arc::new(AtomicBool::new(false));
        let (config, to, over) = (certificates.client(), target, is_over.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                if over.load(Ordering::Acquire) {
                    return;
                }
                let Ok(plain) = stream else { continue };
                let config = config.clone();
                // How a connection ends is for the two ends to judge.
                std::thread::spawn(move || drop(carry(plain, to, config)));
            }
        });
        Self { address, is_over }
    }
}

impl Drop for Tunnel {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Release);
        drop(TcpStream::connect(self.address));
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One connection: this thread carries what the server says, another what the client says.
fn carry(plain: TcpStream, to: SocketAddr, config: Arc<ClientConfig>) -> io::Result<()> {
    let secure = TcpStream::connect(to)?;
    for socket in [&plain, &secure] {
        socket.set_nodelay(true)?;
        SockRef::from(socket).set_recv_buffer_size(KERNEL_BYTES)?;
        SockRef::from(socket).set_send_buffer_size(KERNEL_BYTES)?;
    }
    let name = ServerName::from(std::net::IpAddr::from(Ipv4Addr::LOCALHOST));
    let mut tls = ClientConnection::new(config, name).map_err(io::Error::other)?;
    tls.set_buffer_limit(None);
    while tls.is_handshaking() {
        tls.complete_io(&mut &secure)?;
    }
    let tls = Arc::new(Mutex::new(tls));
    let (up_plain, up_secure, up_tls) = (plain.try_clone()?, secure.try_clone()?, tls.clone());
    let up = std::thread::spawn(move || {
        if carry_up(&up_plain, &up_secure, &up_tls).is_err() {
            let _gone = up_secure.shutdown(Shutdown::Both);
            let _gone = up_plain.shutdown(Shutdown::Both);
        }
    });
    if carry_down(&plain, &secure, &tls).is_err() {
        let _gone = plain.shutdown(Shutdown::Both);
        let _gone = secure.shutdown(Shutdown::Both);
    }
    let _ended = up.join();
    Ok(())
}

fn carry_up(mut plain: &TcpStream, mut secure: &TcpStream, tls: &Mutex<ClientConnection>) -> io::Result<()> {
    let mut buffer = [0; 16 << 10];
    loop {
        let count = plain.read(&mut buffer)?;
        let mut sealed = Vec::new();
        {
            let mut tls = lock(tls);
            match count {
                0 => tls.send_close_notify(),
                _ => tls.writer().write_all(&buffer[..count])?,
            }
            while tls.wants_write() {
                tls.write_tls(&mut sealed)?;
            }
        }
        secure.write_all(&sealed)?;
        if count == 0 {
            return secure.shutdown(Shutdown::Write);
        }
    }
}

fn carry_down(
    mut plain: &TcpStream,
    mut secure: &TcpStream,
    tls: &Mutex<ClientConnection>,
) -> io::Result<()> {
    let mut buffer = [0; 16 << 10];
    loop {
        let count = secure.read(&mut buffer)?;
        let mut opened = Vec::new();
        let mut rest = &buffer[..count];
        let mut has_ended = count == 0;
        while !rest.is_empty() && !has_ended {
            let mut tls = lock(tls);
            tls.read_tls(&mut rest)?;
            let state = tls.process_new_packets().map_err(io::Error::other)?;
            let mut piece = vec![0; state.plaintext_bytes_to_read()];
            tls.reader().read_exact(&mut piece)?;
            opened.append(&mut piece);
            has_ended = state.peer_has_closed();
        }
        plain.write_all(&opened)?;
        if has_ended {
            return plain.shutdown(Shutdown::Write);
        }
    }
}
