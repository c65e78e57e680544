//! What was acknowledged is on disk, not only in the kernel: a process that commits is killed on a disk that forgets
//! what was not synced.
//!
//! The committing half is this same program, started again with [`CHILD`] set.

use bowline_delivery::persist::{Batch, Found, LedgerDelta, Member, Message, Outcome, Query, Write};
use bowline_protocol::{Body, ConversationId, MessageId, UserId, frame::Role};
use bowline_store::{
    Reader as _, Writer as _,
    sqlite::{self, Options},
};
use bytes::Bytes;
use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    path::Path,
    process::{Command, Stdio},
    sync::{Mutex, PoisonError},
};
use unsynced::Loss;

mod unsynced;

/// Names the data directory to commit to.
const CHILD: &str = "BOWLINE_TEST_COMMIT_TO";
/// Names a directory; a file `full` or `broken` in it is a fault of the disk, which the child makes now and then.
const FAULTS: &str = "BOWLINE_TEST_FAULTS_IN";
const BODY_BYTES: usize = 300;

/// The log begins anew every few commits, so that a kill finds it in every state.
fn options() -> Options {
    Options { log_bytes: 48 << 10, log_bytes_max: 192 << 10, ..Options::default() }
}

fn place() -> ConversationId {
    ConversationId::trusted("d:ann:bob")
}

fn member(delivered: u64) -> Member {
    Member {
        role: Role::Member,
        joined: 1,
        first: 1,
        delivered,
        read: 0,
        own_above_delivered: 0,
        own_above_read: 0,
        lagging: vec![],
    }
}

fn body(seq: u64) -> Bytes {
    Bytes::from((0..BODY_BYTES as u64).map(|at| (seq.wrapping_mul(31) ^ at) as u8).collect::<Vec<_>>())
}

fn message(seq: u64) -> Message {
    Message {
        conversation: place(),
        seq,
        id: MessageId::trusted(&format!(
            "{:08x}-0000-4000-8000-{seq:012x}",
            seq.wrapping_mul(0x9e37_79b9) as u32
        )),
        from: UserId::trusted("ann"),
        device: None,
        ts: seq,
        body: Body::Binary(body(seq)),
        hash: u128::from(seq),
    }
}

/// The newest number, after checking that everything up to it is whole.
fn whole(dir: &Path) -> Result<u64, String> {
    let mut opened = sqlite::open(dir, &options()).map_err(|error| error.to_string())?;
    let mut reader = opened.readers.open().map_err(|error| error.to_string())?;
    let (state, ledger) = match (
        reader.read(&Query::Conversation { conversation: place(), tail: u32::MAX }),
        reader.read(&Query::Ledger),
    ) {
        (Found::Conversation(state), Found::Ledger { ledger, waiting }) => {
            (state, (ledger.accepted, waiting))
        }
        other => return Err(format!("{other:?}")),
    };
    if let Some(told) = opened.waiting_mistaken {
        return Err(format!("the ledger said that {told} wait"));
    }
    let Some(state) = state else { return Ok(0) };
    let last = state.last;
    if state.tail.len() as u64 != last || ledger != (last, last) {
        return Err(format!("{} messages up to {last}, accepted and waiting {ledger:?}", state.tail.len()));
    }
    for (message, seq) in state.tail.iter().zip(1..) {
        if *message != self::message(seq) {
            return Err(format!("message {seq} is {message:?}"));
        }
    }
    // By id, too: sending it again is noticed.
    let again = Batch { writes: vec![Write::Message(message(last.max(1)))], ..Batch::default() };
    match opened.writer.commit(&again) {
        Outcome::Refused(_) => Ok(last),
        Outcome::Committed if last == 0 => Err("a conversation without its first message".into()),
        other => Err(format!("message {last} sent again was answered {other:?}")),
    }
}

/// The committing half; on its own it has nothing to do.
#[test]
fn commit_until_killed() {
    let Some(dir) = std::env::var_os(CHILD) else { return };
    let begin = whole(Path::new(&dir)).expect("the store is whole at start");
    let mut opened = sqlite::open(Path::new(&dir), &options()).expect("the store opens");
    let mut out = std::io::stdout().lock();
    let faults = std::env::var_os(FAULTS);
    let mut seq = begin;
    loop {
        let mut writes = Vec::new();
        if seq == 0 {
            writes.push(Write::CreateConversation {
                conversation: place(),
                name: None,
                meta: None,
                at: 1,
                members: ["ann", "bob"].map(|name| (UserId::trusted(name), member(0))).to_vec(),
            });
        }
        let count = 1 + seq % 7;
        writes.extend((seq + 1..=seq + count).map(|seq| Write::Message(message(seq))));
        seq += count;
        // The sender has what it sent.
        writes.push(Write::PutMember {
            conversation: place(),
            user: UserId::trusted("ann"),
            member: member(seq),
        });
        let ledger = LedgerDelta { accepted: count, ..LedgerDelta::default() };
        let batch = Batch { writes, ledger, ..Batch::default() };
        if let Some(faults) = &faults {
            let fault = Path::new(faults).join(if seq.is_multiple_of(2) { "full" } else { "broken" });
            std::fs::write(&fault, "").expect("the fault begins");
            let outcome = opened.writer.commit(&batch);
            assert!(matches!(outcome, Outcome::Failed(_)), "with {fault:?}: {outcome:?}");
            std::fs::remove_file(&fault).expect("the fault ends");
        }
        match opened.writer.commit(&batch) {
            Outcome::Committed => {}
            other => panic!("message {seq}: {other:?}"),
        }
        // A closed pipe is the parent's end.
        if writeln!(out, "acknowledged {seq}").and_then(|()| out.flush()).is_err() {
            return;
        }
    }
}

/// Lets the child commit until `lines` acknowledgements were read, kills it, and tells the newest number that it
/// acknowledged.
fn commit_and_kill(library: &Path, dir: &Path, faults: Option<&Path>, loss: Loss, lines: u64) -> u64 {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(["--exact", "commit_until_killed", "--nocapture"]).env(CHILD, dir).stdout(Stdio::piped());
    unsynced::preload(&mut command, library, dir, loss);
    if let Some(faults) = faults {
        command.env(FAULTS, faults);
        unsynced::faults(&mut command, &faults.join("full"), &faults.join("broken"));
    }
    let mut child = command.spawn().expect("this program starts again");
    let mut out = BufReader::new(child.stdout.take().expect("a pipe"));
    let (mut newest, mut read) = (0, 0);
    let mut line = String::new();
    while read < lines {
        line.clear();
        assert_ne!(out.read_line(&mut line).expect("the child's words"), 0, "the child ended by itself");
        if let Some(seq) = line.trim().strip_prefix("acknowledged ") {
            newest = seq.parse().expect("a number");
            read += 1;
        }
    }
    child.kill().expect("the child is killed");
    // What it said until then counts; the last line may be cut off.
    let mut rest = String::new();
    out.read_to_string(&mut rest).expect("the child's last words");
    let whole_lines = rest.rsplit_once('\n').map_or("", |(lines, _)| lines);
    for seq in whole_lines.lines().filter_map(|line| line.trim().strip_prefix("acknowledged ")) {
        newest = seq.parse().expect("a number");
    }
    child.wait().expect("the child is gone");
    newest
}

/// Kills `rounds` times; tells the first fault that was found.
fn rounds(loss: Loss, has_faults: bool, rounds: u64) -> Result<(), String> {
    // One test at a time: a process that another one starts holds this one's lock on its directory until it becomes
    // the other program.
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let (tools, data) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let library = unsynced::build(tools.path());
    for round in 0..rounds {
        let lines = 1 + round * 7919 % 97;
        let acknowledged =
            commit_and_kill(&library, data.path(), has_faults.then_some(tools.path()), loss, lines);
        let found = whole(data.path()).map_err(|fault| format!("round {round}: {fault}"))?;
        if found < acknowledged {
            return Err(format!("round {round}: {acknowledged} was acknowledged, and {found} is the newest"));
        }
    }
    Ok(())
}

#[test]
fn nothing_acknowledged_is_lost_with_what_was_not_synced() {
    for leak_permille in [0, 300] {
        let loss = Loss { ignore_syncs: false, leak_permille };
        assert_eq!(rounds(loss, false, 12), Ok(()), "{loss:?}");
    }
}

/// A commit that the disk refuses is refused, the same commit goes through when the disk is well again, and what the
/// kernel dropped meanwhile is missed by nobody.
#[test]
fn a_disk_that_fails_now_and_then_loses_nothing_acknowledged() {
    for leak_permille in [0, 300] {
        let loss = Loss { ignore_syncs: false, leak_permille };
        assert_eq!(rounds(loss, true, 12), Ok(()), "{loss:?}");
    }
}

/// The tests above can fail: with the sync taken out, it does.
#[test]
fn a_missing_sync_is_noticed() {
    for leak_permille in [0, 300] {
        let loss = Loss { ignore_syncs: true, leak_permille };
        let fault = rounds(loss, false, 12).expect_err("acknowledged messages are gone");
        println!("{loss:?}: {fault}");
    }
}
