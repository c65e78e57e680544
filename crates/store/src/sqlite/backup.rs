//! A copy of the database that is made while the server runs.

use super::{FILE_NAME, Reader, tune, vfs};
use rusqlite::{Connection, OpenFlags};
use std::{
    fs::{File, OpenOptions},
    io,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

/// Bytes of pages that a copying process keeps in memory; it reads each page once.
const CACHE_BYTES: u64 = 1 << 20;

#[derive(Debug, thiserror::Error)]
pub enum BackupError {
    #[error("there is no database {}; name the data directory of a server that was started once", path.display())]
    Missing { path: PathBuf },
    #[error("database {} cannot be opened: {source}", path.display())]
    Open { path: PathBuf, source: rusqlite::Error },
    #[error("backup {} exists already; name a file that does not", path.display())]
    Exists { path: PathBuf },
    #[error("backup {} could not be written: {source}", path.display())]
    Failed { path: PathBuf, source: rusqlite::Error },
    #[error("backup {} could not be made durable: {source}", path.display())]
    Sync { path: PathBuf, source: io::Error },
}

/// Writes the state of this moment of a data directory to a new file, whether a server holds the directory or not.
/// The directory is not locked for it.
pub fn backup(dir: &Path, to: &Path) -> Result<(), BackupError> {
    let path = dir.join(FILE_NAME);
    if !path.exists() {
        return Err(BackupError::Missing { path });
    }
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let opened = Connection::open_with_flags_and_vfs(&path, flags, vfs::name())
        .and_then(|db| tune(&db, CACHE_BYTES).map(|()| db));
    copy(&opened.map_err(|source| BackupError::Open { path, source })?, to)
}

impl Reader {
    /// Writes the state of this moment to a new file; commits go on meanwhile, and the log grows with them. To
    /// restore, stop the server and put the file in the place of `bowline.db`, without `bowline.db-wal` and
    /// `bowline.db-shm`.
    pub fn backup(&mut self, to: &Path) -> Result<(), BackupError> {
        let db = self.connection();
        let failed = |source| BackupError::Failed { path: to.to_owned(), source };
        // Writes to the other file only, which still counts as writing.
        db.pragma_update(None, "query_only", false).map_err(failed)?;
        let copied = copy(db, to);
        db.pragma_update(None, "query_only", true).map_err(failed)?;
        copied
    }
}

fn copy(db: &Connection, to: &Path) -> Result<(), BackupError> {
    if to.exists() {
        return Err(BackupError::Exists { path: to.to_owned() });
    }
    // Under another name until it is whole and on disk.
    let mut name = to.as_os_str().to_owned();
    name.push(".part");
    let part = PathBuf::from(name);
    let sync = |source| BackupError::Sync { path: to.to_owned(), source };
    match std::fs::remove_file(&part) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(sync(error)),
        _ => {}
    }
    // It holds what users wrote: for the owner only, as the data directory is. SQLite fills an empty file.
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(&part).map_err(sync)?;
    db.execute("VACUUM INTO ?1", [part.to_string_lossy()])
        .map_err(|source| BackupError::Failed { path: to.to_owned(), source })?;
    File::open(&part).and_then(|file| file.sync_all()).map_err(sync)?;
    std::fs::rename(&part, to).map_err(sync)?;
    let dir = to.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(sync)
}
