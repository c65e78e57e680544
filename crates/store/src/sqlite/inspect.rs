//! A look at the database of a data directory, which a server may hold. Nothing is changed: no table is brought up to
//! date, and no log is copied.

use super::{Error, FILE_NAME, check_length, classify, log_path, schema};
use rusqlite::{Connection, OpenFlags, config::DbConfig};
use std::path::Path;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Inspected {
    /// Of the tables, and the one that this program brings them to.
    pub version: usize,
    pub known: usize,
    pub bytes: u64,
    pub log_bytes: u64,
}

/// `None` while there is no database.
pub fn inspect(dir: &Path) -> Result<Option<Inspected>, Error> {
    let path = dir.join(FILE_NAME);
    let Ok(file) = std::fs::metadata(&path) else { return Ok(None) };
    let look = || -> rusqlite::Result<usize> {
        let db = Connection::open_with_flags(
            &path,
            OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX,
        )?;
        // Whoever closes last would copy the log into the database.
        db.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true)?;
        // Reads the whole schema, which a damaged file seldom survives.
        db.query_row("SELECT count(*) FROM sqlite_schema", [], |_| Ok(()))?;
        check_length(&db, &path)?;
        db.query_row("PRAGMA user_version", [], |row| row.get(0))
    };
    let version = look().map_err(|error| classify(&path, error))?;
    let known = schema::STEPS.len();
    if version > known {
        return Err(Error::Newer { path, found: version, known });
    }
    let log_bytes = std::fs::metadata(log_path(&path)).map_or(0, |log| log.len());
    Ok(Some(Inspected { version, known, bytes: file.len(), log_bytes }))
}
