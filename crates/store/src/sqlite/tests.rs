use super::*;
use crate::{Reader as _, Writer as _, conformance};
use bowline_delivery::persist::{
    Batch, Found, LedgerDelta, Member, Message, OutboxEvent, Outcome, Query, Refused, Write,
};
use bowline_protocol::{Body, ConversationId, DeviceId, MessageId, UserId, frame::Role};
use bytes::Bytes;
use std::{collections::VecDeque, sync::mpsc};
use tempfile::TempDir;

fn dir() -> TempDir {
    tempfile::tempdir().unwrap()
}

fn opened(dir: &TempDir) -> Opened {
    open(dir.path(), &Options::default()).unwrap()
}

fn refusal(dir: &Path) -> Error {
    match open(dir, &Options::default()) {
        Ok(_) => panic!("{} was opened", dir.display()),
        Err(error) => error,
    }
}

fn place() -> ConversationId {
    ConversationId::trusted("d:ann:bob")
}

fn member() -> Member {
    Member {
        role: Role::Member,
        joined: 1,
        first: 1,
        delivered: 0,
        read: 0,
        own_above_delivered: 0,
        own_above_read: 0,
        lagging: vec![(DeviceId::trusted("desk"), 0)],
    }
}

fn create() -> Write {
    Write::CreateConversation {
        conversation: place(),
        name: None,
        meta: None,
        at: 1,
        members: ["ann", "bob"].map(|name| (UserId::trusted(name), member())).to_vec(),
    }
}

fn message(seq: u64, body_bytes: usize) -> Message {
    Message {
        conversation: place(),
        seq,
        id: MessageId::trusted(&format!("m{seq}")),
        from: UserId::trusted("ann"),
        device: None,
        ts: seq,
        body: Body::Binary(Bytes::from(vec![seq as u8; body_bytes])),
        hash: u128::from(seq),
    }
}

fn batch(writes: Vec<Write>) -> Batch {
    Batch { writes, ..Batch::default() }
}

fn last(reader: &mut Reader) -> u64 {
    match reader.read(&Query::Conversation { conversation: place(), tail: 0 }) {
        Found::Conversation(state) => state.map_or(0, |state| state.last),
        other => panic!("{other:?}"),
    }
}

fn waiting(reader: &mut Reader) -> u64 {
    match reader.read(&Query::Ledger) {
        Found::Ledger { waiting, .. } => waiting,
        other => panic!("{other:?}"),
    }
}

#[test]
fn sqlite_conforms() {
    let mut dirs = Vec::new();
    conformance::run(
        || {
            let dir = dir();
            let opened = opened(&dir);
            dirs.push(dir);
            conformance::Store {
                reader: Box::new(opened.readers.open().unwrap()),
                writer: Box::new(opened.writer),
            }
        },
        0..20,
    );
}

#[test]
fn the_running_count_of_what_waits_is_that_of_the_rows() {
    /// Recounts after every batch.
    struct Recounting(Writer);
    impl crate::Writer for Recounting {
        fn commit(&mut self, batch: &Batch) -> Outcome {
            let outcome = self.0.commit(batch);
            let said: i64 =
                self.0.connection().query_row("SELECT waiting FROM ledger", [], |row| row.get(0)).unwrap();
            assert_eq!(said, self.0.recount_waiting().unwrap(), "after {batch:#?}");
            outcome
        }
    }
    for seed in 100..115 {
        let dir = dir();
        let opened = opened(&dir);
        let reader = Box::new(opened.readers.open().unwrap());
        let mut store = conformance::Store { writer: Box::new(Recounting(opened.writer)), reader };
        conformance::random(&mut store, seed, 60);
    }
}

#[test]
fn a_wrong_count_is_mended_at_start_and_told() {
    let dir = dir();
    {
        let mut opened = opened(&dir);
        let writes = vec![create(), Write::Message(message(1, 9))];
        assert_eq!(opened.writer.commit(&batch(writes)), Outcome::Committed);
        opened.writer.connection().execute("UPDATE ledger SET waiting = 40", []).unwrap();
    }
    {
        let opened = opened(&dir);
        assert_eq!(opened.waiting_mistaken, Some(40));
        assert_eq!(waiting(&mut opened.readers.open().unwrap()), 2);
    }
    assert_eq!(opened(&dir).waiting_mistaken, None);
}

#[test]
fn what_was_committed_is_there_after_reopening() {
    let dir = dir();
    for seq in 1..=5 {
        let mut opened = opened(&dir);
        let mut reader = opened.readers.open().unwrap();
        assert_eq!(last(&mut reader), seq - 1);
        let mut writes = vec![Write::Message(message(seq, 9))];
        if seq == 1 {
            writes.insert(0, create());
        }
        let delta = LedgerDelta { accepted: 2, ..LedgerDelta::default() };
        assert_eq!(opened.writer.commit(&Batch { ledger: delta, ..batch(writes) }), Outcome::Committed);
        let again = opened.writer.commit(&batch(vec![Write::Message(message(seq, 9))]));
        let Outcome::Refused(faults) = again else { panic!("{again:?}") };
        assert!(matches!(&faults[..], [(0, Refused::Duplicate(receipt))] if receipt.seq == seq));
        assert_eq!(waiting(&mut reader), 2 * seq);
    }
}

#[test]
fn events_are_stored_with_their_batch_and_go_with_it() {
    let dir = dir();
    let mut opened = opened(&dir);
    let event = OutboxEvent { kind: "message.stored", key: "d:ann:bob".into(), at: 7, data: "{}".into() };
    let with_event = |writes| Batch { outbox: vec![event.clone()], ..batch(writes) };
    assert_eq!(opened.writer.commit(&with_event(vec![create()])), Outcome::Committed);
    assert!(matches!(opened.writer.commit(&with_event(vec![create()])), Outcome::Refused(_)));
    let db = opened.writer.connection();
    let rows: (i64, String, String, i64, Vec<u8>) = db
        .query_row("SELECT count(*), kind, key, at, data FROM outbox", [], |row| {
            Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?, row.get(4)?))
        })
        .unwrap();
    assert_eq!(rows, (1, "message.stored".into(), "d:ann:bob".into(), 7, b"{}".to_vec()));
}

#[test]
fn a_full_disk_refuses_and_work_goes_on_when_there_is_room() {
    let dir = dir();
    let mut opened = opened(&dir);
    let mut reader = opened.readers.open().unwrap();
    assert_eq!(opened.writer.commit(&batch(vec![create()])), Outcome::Committed);
    let limit = |opened: &Opened, pages: u32| {
        opened
            .writer
            .connection()
            .query_row(&format!("PRAGMA max_page_count = {pages}"), [], |row| row.get::<_, i64>(0))
            .unwrap();
    };
    limit(&opened, 1);
    let new = Write::PutMember { conversation: place(), user: UserId::trusted("cy"), member: member() };
    let full = batch(vec![new.clone(), Write::Message(message(1, 30_000))]);
    for _ in 0..3 {
        let outcome = opened.writer.commit(&full);
        assert!(matches!(&outcome, Outcome::Failed(text) if text.contains("full")), "{outcome:?}");
        assert_eq!(last(&mut reader), 0);
    }
    limit(&opened, 1 << 30);
    assert_eq!(opened.writer.commit(&full), Outcome::Committed);
    assert_eq!(last(&mut reader), 1);
    assert_eq!(waiting(&mut reader), 3);
    assert_eq!(opened.writer.recount_waiting().unwrap(), 3);
}

#[test]
fn a_directory_is_held_by_one_server() {
    let dir = dir();
    let held = opened(&dir);
    let error = refusal(dir.path());
    assert!(matches!(&error, Error::Locked { holder: Some(id), .. } if *id == std::process::id()));
    let text = error.to_string();
    assert!(text.contains(&dir.path().display().to_string()) && text.contains("--data"), "{text}");
    // What was made from it holds it, too.
    let reader = held.readers.open().unwrap();
    drop(held);
    assert!(matches!(refusal(dir.path()), Error::Locked { .. }));
    drop(reader);
    opened(&dir);
}

#[test]
fn a_directory_that_cannot_be_written_is_named() {
    let dir = dir();
    let file = dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    let error = refusal(&file.join("data"));
    assert!(matches!(error, Error::Unwritable { .. }), "{error}");
    assert!(error.to_string().contains("file/data"), "{error}");
    // A database that is a directory.
    std::fs::create_dir_all(dir.path().join("odd").join(FILE_NAME)).unwrap();
    let error = refusal(&dir.path().join("odd"));
    assert!(matches!(error, Error::Unwritable { .. }), "{error}");
}

#[test]
fn a_damaged_database_is_told_with_the_way_out() {
    type Row = (&'static str, fn(&mut Vec<u8>));
    let rows: &[Row] = &[
        ("no database at all", |bytes| bytes[..16].fill(b'x')),
        ("cut off", |bytes| bytes.truncate(bytes.len() / 2)),
        ("the schema overwritten", |bytes| bytes[100..1000].fill(0xff)),
    ];
    for (name, damage) in rows {
        let dir = dir();
        drop(opened(&dir));
        let path = dir.path().join(FILE_NAME);
        let mut bytes = std::fs::read(&path).unwrap();
        damage(&mut bytes);
        std::fs::write(&path, bytes).unwrap();
        let error = refusal(dir.path());
        assert!(matches!(error, Error::Corrupt { .. }), "{name}: {error}");
        assert!(error.to_string().contains("backup") && error.to_string().contains(".recover"), "{error}");
    }
}

#[test]
fn a_database_of_a_newer_program_is_left_alone() {
    let dir = dir();
    drop(opened(&dir));
    let path = dir.path().join(FILE_NAME);
    Connection::open(&path).unwrap().pragma_update(None, "user_version", 99).unwrap();
    let before = std::fs::read(&path).unwrap();
    let error = refusal(dir.path());
    assert!(matches!(error, Error::Newer { found: 99, .. }), "{error}");
    assert_eq!(std::fs::read(&path).unwrap(), before);
}

#[test]
fn a_database_of_the_first_version_is_brought_up_to_date() {
    let dir = dir();
    {
        let mut db = Connection::open(dir.path().join(FILE_NAME)).unwrap();
        schema::migrate_to(&mut db, 1).unwrap().unwrap();
        db.execute_batch(
            "INSERT INTO users VALUES (1, 'ann'), (2, 'bob');
             INSERT INTO conversations VALUES (5, 'd:ann:bob', 'Us', NULL, 11, 0);
             INSERT INTO messages VALUES (1, 5, 1, 1, 'm1', 'phone', 12, zeroblob(16), 0, x'31', NULL, NULL);
             INSERT INTO members VALUES (5, 1, 0, 1, 1, 1, 1, 0, 0, NULL), (5, 2, 0, 1, 1, 0, 0, 0, 0, NULL);
             UPDATE ledger SET accepted = 1, waiting = 1;",
        )
        .unwrap();
    }
    let mut opened = opened(&dir);
    assert_eq!(opened.waiting_mistaken, None);
    let version: usize =
        opened.writer.connection().query_row("PRAGMA user_version", [], |row| row.get::<_, u32>(0)).unwrap()
            as usize;
    assert_eq!(version, schema::STEPS.len());
    assert_eq!(opened.writer.commit(&batch(vec![Write::Message(message(2, 9))])), Outcome::Committed);
    let mut reader = opened.readers.open().unwrap();
    match reader.read(&Query::Conversation { conversation: place(), tail: 10 }) {
        Found::Conversation(Some(state)) => {
            assert_eq!((state.name.as_deref(), state.last, state.tail.len()), (Some("Us"), 2, 2));
            assert_eq!(state.tail[0].body, Body::Json(Bytes::from_static(b"1")));
        }
        other => panic!("{other:?}"),
    }
    // Version 2: retention, and ids that outlive their messages.
    let expire = Write::ExpireMessages { conversation: place(), up_to: 1, ids_from: 12 };
    assert_eq!(opened.writer.commit(&batch(vec![expire])), Outcome::Committed);
    let asked = Query::Overdue { before: 0, ids_before: 13, after: 0, limit: 9 };
    assert!(matches!(reader.read(&asked), Found::Overdue { ids: true, .. }));
}

#[test]
fn the_first_number_after_retention_follows_the_last_one() {
    let dir = dir();
    {
        let mut opened = opened(&dir);
        let writes = vec![create(), Write::Message(message(1, 9)), Write::Message(message(2, 9))];
        assert_eq!(opened.writer.commit(&batch(writes)), Outcome::Committed);
        let expire = Write::ExpireMessages { conversation: place(), up_to: 2, ids_from: 0 };
        assert_eq!(opened.writer.commit(&batch(vec![expire])), Outcome::Committed);
    }
    let mut opened = opened(&dir);
    assert_eq!(opened.waiting_mistaken, None);
    let mut reader = opened.readers.open().unwrap();
    assert_eq!((last(&mut reader), waiting(&mut reader)), (2, 0));
    let asked = Query::Waiting { user: UserId::trusted("bob"), device: DeviceId::trusted("desk") };
    assert_eq!(reader.read(&asked), Found::Waiting { devices: vec![], conversations: vec![] });
    let refused = opened.writer.commit(&batch(vec![Write::Message(message(2, 9))]));
    assert!(
        matches!(&refused, Outcome::Refused(faults) if matches!(faults[0].1, Refused::Duplicate(_))),
        "{refused:?}"
    );
    assert_eq!(opened.writer.commit(&batch(vec![Write::Message(message(3, 9))])), Outcome::Committed);
    assert_eq!((last(&mut reader), waiting(&mut reader)), (3, 2));
}

/// The log begins anew again and again while a reader reads, and everything is there.
#[test]
fn the_log_stays_bounded_under_load() {
    let dir = dir();
    let options = Options { log_bytes: 256 << 10, log_bytes_max: 1 << 20, ..Options::default() };
    let mut opened = open(dir.path(), &options).unwrap();
    let mut reader = opened.readers.open().unwrap();
    assert_eq!(opened.writer.commit(&batch(vec![create()])), Outcome::Committed);
    let log = log_path(&dir.path().join(FILE_NAME));
    let mut log_bytes_most = 0;
    for seq in 1..=3000 {
        assert_eq!(
            opened.writer.commit(&batch(vec![Write::Message(message(seq, 2000))])),
            Outcome::Committed
        );
        if seq % 100 == 0 {
            assert_eq!(last(&mut reader), seq);
        }
        log_bytes_most = log_bytes_most.max(std::fs::metadata(&log).unwrap().len());
    }
    opened.writer.settle();
    // Six megabytes of bodies went through it.
    assert!(log_bytes_most < 2 << 20, "the log grew to {log_bytes_most} bytes");
}

/// A reader in the middle of a read keeps the log from beginning anew; commits go on, and it shrinks afterwards.
#[test]
fn a_reader_that_holds_an_old_state_stops_no_commit() {
    let dir = dir();
    let options = Options { log_bytes: 64 << 10, log_bytes_max: 256 << 10, ..Options::default() };
    let mut opened = open(dir.path(), &options).unwrap();
    let holder = opened.readers.open().unwrap();
    assert_eq!(opened.writer.commit(&batch(vec![create()])), Outcome::Committed);
    holder.connection().execute_batch("BEGIN").unwrap();
    let held: i64 =
        holder.connection().query_row("SELECT count(*) FROM messages", [], |row| row.get(0)).unwrap();
    assert_eq!(held, 0);
    let log = log_path(&dir.path().join(FILE_NAME));
    let mut store = |seqs: std::ops::RangeInclusive<u64>| {
        for seq in seqs {
            let outcome = opened.writer.commit(&batch(vec![Write::Message(message(seq, 2000))]));
            assert_eq!(outcome, Outcome::Committed);
        }
    };
    store(1..=500);
    assert!(std::fs::metadata(&log).unwrap().len() > 1 << 20);
    holder.connection().execute_batch("COMMIT").unwrap();
    store(501..=1000);
    assert!(std::fs::metadata(&log).unwrap().len() < 1 << 20);
}

#[test]
fn a_reader_sees_what_was_committed_before_it_asked() {
    let dir = dir();
    let mut opened = opened(&dir);
    assert_eq!(opened.writer.commit(&batch(vec![create()])), Outcome::Committed);
    let mut reader = opened.readers.open().unwrap();
    let (acknowledge, acknowledged) = mpsc::sync_channel(0);
    let thread = std::thread::spawn(move || {
        for seq in 1..=500 {
            assert_eq!(
                opened.writer.commit(&batch(vec![Write::Message(message(seq, 9))])),
                Outcome::Committed
            );
            acknowledge.send(seq).unwrap();
        }
    });
    let mut seen = VecDeque::new();
    while let Ok(seq) = acknowledged.recv() {
        let found = last(&mut reader);
        assert!(found >= seq, "{seq} was acknowledged and {found} is the newest");
        seen.push_back(found);
    }
    thread.join().unwrap();
    assert_eq!(seen.len(), 500);
}

#[test]
fn a_backup_made_under_load_is_a_whole_store() {
    let (dir, other) = (dir(), dir());
    let mut source = opened(&dir);
    assert_eq!(source.writer.commit(&batch(vec![create()])), Outcome::Committed);
    let mut reader = source.readers.open().unwrap();
    let mut writer = source.writer;
    let (store, asked) = mpsc::sync_channel::<u64>(0);
    let thread = std::thread::spawn(move || {
        while let Ok(seq) = asked.recv() {
            assert_eq!(writer.commit(&batch(vec![Write::Message(message(seq, 500))])), Outcome::Committed);
        }
    });
    (1..=200).for_each(|seq| store.send(seq).unwrap());
    let to = other.path().join(FILE_NAME);
    let backup = std::thread::spawn(move || {
        reader.backup(&to).unwrap();
        let again = reader.backup(&to);
        assert!(matches!(again, Err(BackupError::Exists { .. })));
        last(&mut reader)
    });
    let mut seq = 200;
    while !backup.is_finished() {
        seq += 1;
        store.send(seq).unwrap();
    }
    let seen = backup.join().unwrap();
    drop(store);
    thread.join().unwrap();
    let mut restored = opened(&other);
    assert_eq!(restored.waiting_mistaken, None);
    let mut reader = restored.readers.open().unwrap();
    let newest = last(&mut reader);
    // 200 were acknowledged before it began; one more was being handed over.
    assert!((199..=seen).contains(&newest), "the backup ends at {newest}");
    assert_eq!(waiting(&mut reader), 2 * newest);
    assert_eq!(
        restored.writer.commit(&batch(vec![Write::Message(message(newest + 1, 9))])),
        Outcome::Committed
    );
}

#[test]
fn revocations_and_sessions_outlive_a_restart_until_they_expire() {
    let dir = dir();
    let revocation = |kind, name: &str, issued_until, expires_at| Revocation {
        kind,
        name: name.into(),
        issued_until,
        expires_at,
    };
    let session =
        |id: &str, expires_at| Session { session_id: id.into(), user: UserId::trusted("ann"), expires_at };
    {
        let mut auth = opened(&dir).auth;
        auth.revoke(&revocation(RevocationKind::User, "ann", 50, 100)).unwrap();
        auth.revoke(&revocation(RevocationKind::User, "ann", 40, 200)).unwrap();
        auth.revoke(&revocation(RevocationKind::Token, "ann", 0, u64::MAX)).unwrap();
        auth.revoke(&revocation(RevocationKind::Session, "s1", 0, 90)).unwrap();
        auth.put_session(&session("s1", 90)).unwrap();
        auth.put_session(&session("s2", 90)).unwrap();
        auth.put_session(&session("s2", 120)).unwrap();
    }
    let mut auth = opened(&dir).auth;
    let mut found = auth.revocations(60_090).unwrap();
    found.sort_by_key(|revocation| revocation.expires_at);
    assert_eq!(
        found,
        [
            revocation(RevocationKind::User, "ann", 50, 200),
            revocation(RevocationKind::Token, "ann", 0, i64::MAX as u64),
        ]
    );
    assert_eq!(auth.sessions(60_090).unwrap(), [session("s2", 120)]);
}
