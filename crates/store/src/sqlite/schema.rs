//! The tables, and how a database of an earlier version becomes one of this version.
//!
//! The layout follows from measurements: messages are appended in arrival order with integer keys, found by two
//! narrow unique indexes, and a message writes no other row. The newest number of a conversation is that of its
//! newest message, or `floor_seq` where retention has taken them all.

use rusqlite::{Connection, Result, TransactionBehavior};

/// What turns version n into n + 1; a new database runs them all. Never change one that was released: append.
pub(super) const STEPS: &[&str] = &[include_str!("schema/1.sql"), include_str!("schema/2.sql")];

/// Runs what is missing, each step in a transaction of its own. Answers with the version that it found when that
/// is newer than all that it knows.
pub(super) fn migrate(db: &mut Connection) -> Result<std::result::Result<(), usize>> {
    migrate_to(db, STEPS.len())
}

pub(super) fn migrate_to(db: &mut Connection, target: usize) -> Result<std::result::Result<(), usize>> {
    let found: i64 = db.query_row("PRAGMA user_version", [], |row| row.get(0))?;
    let found = usize::try_from(found).unwrap_or(usize::MAX);
    if found > target {
        return Ok(Err(found));
    }
    for (version, sql) in STEPS.iter().enumerate().take(target).skip(found) {
        let step = db.transaction_with_behavior(TransactionBehavior::Immediate)?;
        step.execute_batch(sql)?;
        step.pragma_update(None, "user_version", version as i64 + 1)?;
        step.commit()?;
    }
    Ok(Ok(()))
}
