use super::*;
use rcgen::{CertificateParams, KeyPair};
use rustls::{
    ClientConfig, ClientConnection, ProtocolVersion, RootCertStore,
    crypto::aws_lc_rs,
    pki_types::{CertificateDer, ServerName, pem::PemObject},
};
use std::{
    collections::VecDeque,
    io::{self, IoSlice, Read, Write},
    path::{Path, PathBuf},
    sync::Arc,
};

struct Files {
    folder: tempfile::TempDir,
}

impl Files {
    fn new() -> Self {
        let files = Self { folder: tempfile::tempdir().unwrap() };
        files.renew();
        files
    }

    fn cert(&self) -> PathBuf {
        self.folder.path().join("cert.pem")
    }

    fn key(&self) -> PathBuf {
        self.folder.path().join("key.pem")
    }

    fn renew(&self) {
        let key = KeyPair::generate().unwrap();
        let cert = CertificateParams::new(["localhost".into()]).unwrap().self_signed(&key).unwrap();
        std::fs::write(self.cert(), cert.pem()).unwrap();
        std::fs::write(self.key(), key.serialize_pem()).unwrap();
    }

    fn acceptor(&self) -> Acceptor {
        Acceptor::load(&self.cert(), &self.key()).unwrap()
    }

    fn client_config(&self) -> Arc<ClientConfig> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(self.cert()).unwrap()).unwrap();
        let config = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        Arc::new(config)
    }

    fn client(&self) -> ClientConnection {
        ClientConnection::new(self.client_config(), ServerName::try_from("localhost").unwrap()).unwrap()
    }
}

/// A socket that gives and takes so many bytes at a time, and takes no more than `room` in all.
struct Wire {
    to_server: VecDeque<u8>,
    to_client: VecDeque<u8>,
    piece: usize,
    room: usize,
    client_ended: bool,
}

impl Wire {
    fn new(piece: usize) -> Self {
        let (to_server, to_client) = Default::default();
        Self { to_server, to_client, piece, room: usize::MAX, client_ended: false }
    }
}

impl Read for Wire {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.to_server.is_empty() && !self.client_ended {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let take = buffer.len().min(self.piece);
        (&mut self.to_server).take(take as u64).read(&mut buffer[..take])
    }
}

impl Write for Wire {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let take = bytes.len().min(self.piece).min(self.room);
        if take == 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        self.to_client.extend(&bytes[..take]);
        self.room -= take;
        Ok(take)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Both sides, and what each has been told.
struct Pair {
    wire: Wire,
    client: ClientConnection,
    server: Tls,
    heard_by_client: Vec<u8>,
    heard_by_server: Vec<u8>,
}

impl Pair {
    fn new(files: &Files, door: Door, piece: usize) -> Self {
        let (client, server) = (files.client(), files.acceptor().accept(door).unwrap());
        Self::of(client, server, piece)
    }

    fn of(client: ClientConnection, server: Tls, piece: usize) -> Self {
        let (heard_by_client, heard_by_server) = Default::default();
        Self { wire: Wire::new(piece), client, server, heard_by_client, heard_by_server }
    }

    fn open(mut self) -> Self {
        for _ in 0..10_000 {
            self.client_turn();
            if self.server.handshake(&mut self.wire).unwrap() {
                self.client_turn();
                assert!(!self.client.is_handshaking());
                return self;
            }
        }
        panic!("the handshake does not end");
    }

    fn client_turn(&mut self) {
        while self.client.wants_write() {
            self.client.write_tls(&mut self.wire.to_server).unwrap();
        }
        while !self.wire.to_client.is_empty() {
            self.client.read_tls(&mut self.wire.to_client).unwrap();
            let state = self.client.process_new_packets().unwrap();
            let mut piece = vec![0; state.plaintext_bytes_to_read()];
            self.client.reader().read_exact(&mut piece).unwrap();
            self.heard_by_client.append(&mut piece);
        }
        while self.client.wants_write() {
            self.client.write_tls(&mut self.wire.to_server).unwrap();
        }
    }

    /// Reads as an owner would, with a buffer of so many bytes; says whether the input has ended.
    fn server_turn(&mut self, buffer_bytes: usize) -> bool {
        let mut buffer = vec![0; buffer_bytes];
        loop {
            match self.server.read(&mut self.wire, &mut buffer) {
                Ok(Got { bytes: 0, raw: 0, .. }) => return true,
                Ok(got) => self.heard_by_server.extend_from_slice(&buffer[..got.bytes]),
                Err(error) => {
                    assert_eq!(error.kind(), io::ErrorKind::WouldBlock, "{error}");
                    assert!(!self.server.has_plaintext());
                    return false;
                }
            }
        }
    }
}

fn bytes(count: usize) -> Vec<u8> {
    (0..count).map(|n| (n * 7 + n / 256) as u8).collect()
}

#[test]
fn bytes_arrive_both_ways_however_they_are_cut() {
    let files = Files::new();
    for (piece, buffer_bytes) in [(1, 7), (3, 64 << 10), (1000, 100), (usize::MAX, 64 << 10), (usize::MAX, 1)]
    {
        let mut pair = Pair::new(&files, Door::Http, piece).open();
        assert_eq!(pair.client.protocol_version(), Some(ProtocolVersion::TLSv1_3));
        assert_eq!(pair.server.unsent_bytes(), 0);
        let up = bytes(50_000);
        for part in up.chunks(20_000) {
            pair.client.writer().write_all(part).unwrap();
            pair.client_turn();
            assert!(!pair.server_turn(buffer_bytes));
        }
        assert!(pair.heard_by_server == up, "piece {piece}");

        let down = bytes(150_000);
        let mut at = 0;
        while at < down.len() {
            // Three slices, of which it takes what it likes.
            let third = (down.len() - at).div_ceil(3);
            let slices: Vec<_> = down[at..].chunks(third).map(IoSlice::new).collect();
            at += pair.server.write_vectored(&mut pair.wire, &slices).unwrap();
            pair.client_turn();
        }
        assert!(pair.heard_by_client == down, "piece {piece}");
    }
}

#[test]
fn a_connection_at_rest_has_no_buffers() {
    let mut pair = Pair::new(&Files::new(), Door::Frames, usize::MAX).open();
    pair.client.writer().write_all(b"hello").unwrap();
    pair.client_turn();
    pair.server_turn(100);
    pair.server.write(&mut pair.wire, b"hello").unwrap();
    assert_eq!(pair.server.kept_bytes(), 0);
}

#[test]
fn a_full_socket_takes_nothing_until_it_has_taken_what_it_was_given() {
    let mut pair = Pair::new(&Files::new(), Door::Frames, usize::MAX).open();
    pair.wire.room = 10_000;
    let down = bytes(100_000);
    let taken = pair.server.write(&mut pair.wire, &down).unwrap();
    assert_eq!(taken, limits::SEALED_BYTES);
    assert!(pair.server.unsent_bytes() > taken - 10_000);
    let again = pair.server.write(&mut pair.wire, &down[taken..]).unwrap_err();
    assert_eq!(again.kind(), io::ErrorKind::WouldBlock);
    assert!(!pair.server.flush(&mut pair.wire).unwrap());
    // The end stands behind what waits.
    pair.server.close(&mut pair.wire).unwrap();
    pair.wire.room = usize::MAX;
    assert!(pair.server.flush(&mut pair.wire).unwrap());
    assert_eq!(pair.server.unsent_bytes(), 0);
    pair.client_turn();
    assert!(pair.heard_by_client == down[..taken]);
    assert!(matches!(pair.client.reader().read(&mut [0; 1]), Ok(0)), "close_notify was read");
}

#[test]
fn the_end_is_told_in_both_directions() {
    let mut pair = Pair::new(&Files::new(), Door::Frames, usize::MAX).open();
    pair.client.writer().write_all(b"last words").unwrap();
    pair.client.send_close_notify();
    pair.client_turn();
    assert!(pair.server_turn(4));
    assert_eq!(pair.heard_by_server, b"last words");
    // The other direction is open still.
    pair.server.write(&mut pair.wire, b"farewell").unwrap();
    pair.server.close(&mut pair.wire).unwrap();
    pair.client_turn();
    assert_eq!(pair.heard_by_client, b"farewell");
    assert!(pair.server.write(&mut pair.wire, b"more").is_err(), "nothing follows the end");

    // A socket that ends without a word ends the input too.
    let mut pair = Pair::new(&Files::new(), Door::Frames, usize::MAX).open();
    pair.wire.client_ended = true;
    assert!(pair.server_turn(4));
}

#[test]
fn a_change_of_keys_is_answered_and_changes_nothing() {
    for piece in [1, usize::MAX] {
        let mut pair = Pair::new(&Files::new(), Door::Frames, piece).open();
        for round in 0..3_u8 {
            pair.client.writer().write_all(&[round; 100]).unwrap();
            pair.client.refresh_traffic_keys().unwrap();
            pair.client.writer().write_all(&[round; 100]).unwrap();
            pair.client_turn();
            // In the middle of a record of the client's.
            let rest = pair.wire.to_server.split_off(pair.wire.to_server.len() - 50);
            pair.server_turn(1000);
            pair.server.write(&mut pair.wire, &[round; 50]).unwrap();
            pair.wire.to_server.extend(rest);
            pair.server_turn(1000);
            pair.client_turn();
        }
        assert_eq!((pair.heard_by_server.len(), pair.heard_by_client.len()), (600, 150));
    }
}

#[test]
fn bytes_that_came_with_the_handshakes_end_are_kept() {
    let mut pair = Pair::new(&Files::new(), Door::Http, usize::MAX);
    pair.client.writer().write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let mut pair = pair.open();
    assert!(pair.server.has_plaintext());
    pair.server_turn(5);
    assert_eq!(pair.heard_by_server, b"GET / HTTP/1.1\r\n\r\n");
}

#[test]
fn what_is_no_handshake_fails() {
    let files = Files::new();
    let acceptor = files.acceptor();
    let rows: [&[u8]; 6] = [
        b"GET / HTTP/1.1\r\n\r\n",
        &[0; 30_000],
        &[22, 3, 1, 0xff, 0xff, 1, 2, 3],
        &[23, 3, 3, 0, 1, 0],
        // A message that is longer than any, whole in none of its records and begun in a second one.
        &[22, 3, 1, 0, 5, 1, 0xff, 0xff, 0xff, 0],
        &[22, 3, 1, 0, 1, 1, 22, 3, 1, 0, 4, 0xff, 0xff, 0xff, 0],
    ];
    for bytes in rows {
        for piece in [1, usize::MAX] {
            let mut wire = Wire::new(piece);
            wire.to_server.extend(bytes);
            wire.client_ended = true;
            let mut tls = acceptor.accept(Door::Http).unwrap();
            assert!(tls.handshake(&mut wire).is_err(), "{:?}", &bytes[..6]);
        }
    }
    // A message that never ends, in as many records as it likes.
    let mut wire = Wire::new(usize::MAX);
    let mut tls = acceptor.accept(Door::Http).unwrap();
    let first = [&[22, 3, 1, 0, 4][..], &[1, 0, 0xff, 0xf0]].concat();
    wire.to_server.extend(first);
    let failed_after = (0..100_000).find(|_| {
        wire.to_server.extend([22, 3, 1, 0, 1, 0]);
        tls.handshake(&mut wire).is_err()
    });
    assert!(failed_after.is_some_and(|records| records * 6 <= limits::HANDSHAKE_BYTES), "{failed_after:?}");
}

#[test]
fn a_broken_record_is_told_by_an_alert() {
    let mut pair = Pair::new(&Files::new(), Door::Frames, usize::MAX).open();
    pair.client.writer().write_all(b"hello").unwrap();
    pair.client.write_tls(&mut pair.wire.to_server).unwrap();
    *pair.wire.to_server.back_mut().unwrap() ^= 1;
    let error = pair.server.read(&mut pair.wire, &mut [0; 100]).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    pair.client.read_tls(&mut pair.wire.to_client).unwrap();
    assert!(matches!(
        pair.client.process_new_packets(),
        Err(rustls::Error::AlertReceived(rustls::AlertDescription::BadRecordMac))
    ));
    // From here on nothing is read or said.
    pair.wire.to_server.extend([23, 3, 3, 0, 1, 0]);
    assert!(pair.server.read(&mut pair.wire, &mut [0; 100]).is_err());
    assert!(pair.server.write(&mut pair.wire, b"hello").is_err());
    pair.server.close(&mut pair.wire).unwrap();
    assert!(pair.wire.to_client.is_empty());
}

/// Numbers below what is asked for; the same in every run.
fn numbers() -> impl FnMut(usize) -> usize {
    let mut state = 0x2545_f491_u32;
    move |below| {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state as usize % below.max(1)
    }
}

/// Records that look like some, with messages of a handshake that look like some, in pieces.
#[test]
fn records_made_up_at_random_end_their_connection_at_worst() {
    let acceptor = Files::new().acceptor();
    let mut next = numbers();
    for _ in 0..20_000 {
        let mut wire = Wire::new(1 + next(40));
        let mut tls = acceptor.accept(Door::Http).unwrap();
        for _ in 0..1 + next(5) {
            let body: Vec<u8> = (0..next(20)).map(|_| [0, 1, 2, 255, next(256) as u8][next(5)]).collect();
            let told = if next(4) == 0 { next(70_000) as u16 } else { body.len() as u16 };
            let kind = [20, 21, 22, 22, 22, 23, 24][next(7)];
            wire.to_server
                .extend([kind, 3, [1, 3][next(2)]].into_iter().chain(told.to_be_bytes()).chain(body));
            match tls.handshake(&mut wire) {
                Ok(is_done) => assert!(!is_done),
                Err(_) if next(2) == 0 => break,
                Err(_) => {}
            }
        }
    }
}

/// Bytes of a client changed at random, in the handshake and behind it, between all that an owner may do meanwhile.
#[test]
fn whatever_a_client_sends_ends_its_connection_at_worst() {
    let files = Files::new();
    let acceptor = files.acceptor();
    let mut next = numbers();
    let mut opened = 0;
    for _ in 0..400 {
        let mut pair = Pair::of(files.client(), acceptor.accept(Door::Http).unwrap(), 1 + next(3000));
        let harm_from = next(12);
        for step in 0..16 {
            if step % 3 == 0 && !pair.client.is_handshaking() {
                let _closed = pair.client.writer().write(&vec![7; next(5000)]);
                if next(4) == 0 {
                    let _closed = pair.client.refresh_traffic_keys();
                }
            }
            while pair.client.wants_write() {
                pair.client.write_tls(&mut pair.wire.to_server).unwrap();
            }
            if step >= harm_from && next(3) == 0 {
                let at = next(pair.wire.to_server.len());
                match next(3) {
                    0 => pair.wire.to_server.truncate(at),
                    1 => pair.wire.to_server.extend((0..40).map(|_| next(256) as u8)),
                    _ => {
                        pair.wire.to_server.iter_mut().skip(at).take(1).for_each(|byte| *byte ^= 1 << next(8))
                    }
                }
            }
            let _may_fail = pair.server.handshake(&mut pair.wire);
            if pair.server.is_open {
                opened += 1;
                let _may_fail = pair.server.read(&mut pair.wire, &mut vec![0; 1 + next(4000)]);
                let _may_fail = pair.server.write(&mut pair.wire, &vec![8; next(40_000)]);
                if next(20) == 0 {
                    let _may_fail = pair.server.close(&mut pair.wire);
                    // rustls asserts, in builds like this one, that no alert follows `close_notify`.
                    break;
                }
            }
            while !pair.wire.to_client.is_empty() && pair.client.read_tls(&mut pair.wire.to_client).is_ok() {
                if pair.client.process_new_packets().is_err() {
                    break;
                }
                let _nothing_yet = pair.client.reader().read(&mut [0; 50_000]);
            }
            pair.wire.to_client.clear();
        }
    }
    assert!(opened > 500, "only {opened} turns came behind the handshake");
}

#[test]
fn a_session_is_resumed_until_the_certificate_changes() {
    let files = Files::new();
    let (acceptor, config) = (files.acceptor(), files.client_config());
    let open = || {
        let name = ServerName::try_from("localhost").unwrap();
        let client = ClientConnection::new(config.clone(), name).unwrap();
        let mut pair = Pair::of(client, acceptor.accept(Door::Frames).unwrap(), usize::MAX).open();
        pair.client_turn();
        pair.server.is_resumed()
    };
    assert_eq!([open(), open(), open()], [false, true, true]);
    acceptor.reload().unwrap();
    assert!(!open());
}

#[test]
fn files_that_cannot_be_used_are_named_and_change_nothing() {
    let (files, other) = (Files::new(), Files::new());
    let (cert, key) = (files.cert(), files.key());
    let load = |cert: &Path, key: &Path| Acceptor::load(cert, key).map(|_| ()).unwrap_err();
    let nowhere = Path::new("/nowhere/x.pem");
    assert!(matches!(load(nowhere, &key), Error::Unreadable { part: Part::Cert, .. }));
    assert!(matches!(load(&cert, nowhere), Error::Unreadable { part: Part::Key, .. }));
    assert!(matches!(load(&key, &key), Error::NoCertificate { .. }));
    assert!(matches!(load(&cert, &cert), Error::NoKey { .. }));
    assert!(matches!(load(&cert, &other.key()), Error::Mismatch { .. }));
    std::fs::write(other.cert(), "-----BEGIN CERTIFICATE-----\n!!!\n-----END CERTIFICATE-----\n").unwrap();
    assert!(matches!(load(&other.cert(), &key), Error::Broken { part: Part::Cert, .. }));
    let no_der = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    std::fs::write(other.cert(), no_der).unwrap();
    assert!(matches!(load(&other.cert(), &key), Error::Refused { .. }));

    let acceptor = files.acceptor();
    std::fs::write(&key, "nothing").unwrap();
    assert!(matches!(acceptor.reload(), Err(Error::NoKey { .. })));
    assert!(acceptor.accept(Door::Frames).is_ok());
    files.renew();
    acceptor.reload().unwrap();
    Pair::of(files.client(), acceptor.accept(Door::Frames).unwrap(), 100).open();
}
