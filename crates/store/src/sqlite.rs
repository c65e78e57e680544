//! The embedded store: one SQLite file, `bowline.db`, in the data directory.
//!
//! One writer commits in groups, any number of readers read beside it (write-ahead log, synchronous = FULL: what is
//! acknowledged is on disk), and a thread of its own copies the log into the file, so that no commit waits for that.

mod auth;
mod backup;
mod checkpoint;
mod codec;
mod inspect;
mod reader;
mod schema;
mod vfs;
mod writer;

pub use auth::{AuthError, AuthTables, Revocation, RevocationKind, Session};
pub use backup::{BackupError, backup};
pub use inspect::{Inspected, inspect};
pub use reader::Reader;
pub use writer::Writer;

use rusqlite::{Connection, ErrorCode, OpenFlags};
use std::{
    fs::{File, OpenOptions, TryLockError},
    io::{self, Read, Seek, Write as _},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

/// The database's name in the data directory.
pub const FILE_NAME: &str = "bowline.db";
/// Held by the server that uses the directory; holds its process id.
const LOCK_NAME: &str = "lock";
/// How long a connection waits for another one's lock. Writers of this process queue up before that; this is for
/// what comes from outside, such as a copy being made with another tool.
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Debug, Clone)]
pub struct Options {
    /// Bytes in a page of a database that is yet to be made: a power of two from 512 to 65,536. Small pages write
    /// less, because each message touches a page of its own in two indexes; large ones cost less time. Measured by
    /// `examples/commit_cost.rs`: with 2 kB a message costs a tenth less time and writes up to a half more.
    pub page_bytes: u32,
    /// Bytes of pages that the writer keeps in memory. More is not better: a commit that splits a page walks over
    /// all of them.
    pub writer_cache_bytes: u64,
    /// The same for each reader.
    pub reader_cache_bytes: u64,
    /// From this length on the log is copied into the database.
    pub log_bytes: u64,
    /// The writer waits for the copying rather than let the log grow beyond this. A running backup or a read that
    /// does not end can stretch it.
    pub log_bytes_max: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            page_bytes: 1024,
            writer_cache_bytes: 8 << 20,
            reader_cache_bytes: 2 << 20,
            log_bytes: 64 << 20,
            log_bytes_max: 256 << 20,
        }
    }
}

/// Why a store could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "data directory {} is held by another server{}; stop that one, or give this one a directory of its own \
         with --data",
        dir.display(),
        holder.map_or(String::new(), |id| format!(" (process {id})"))
    )]
    Locked { dir: PathBuf, holder: Option<u32> },
    #[error(
        "data directory {} cannot be written ({source}); make it writable for this user, or name another with --data",
        dir.display()
    )]
    Unwritable { dir: PathBuf, source: io::Error },
    #[error(
        "database {} is damaged ({detail}); put a backup in its place, or save what can be read with \
         `sqlite3 {} .recover | sqlite3 recovered.db`",
        path.display(),
        path.display()
    )]
    Corrupt { path: PathBuf, detail: String },
    #[error(
        "database {} has schema version {found} and this program knows versions up to {known}; run the program that \
         last used it, or a newer one, or put back a backup from before that upgrade",
        path.display()
    )]
    Newer { path: PathBuf, found: usize, known: usize },
    #[error("database {} cannot be opened: {source}", path.display())]
    Failed { path: PathBuf, source: rusqlite::Error },
}

/// An open store. The directory is held until all of these and what they made are gone.
pub struct Opened {
    pub writer: Writer,
    pub readers: Readers,
    pub auth: AuthTables,
    /// What the ledger said is waiting, when the members' rows said something else: a fault of an earlier run.
    /// The rows were believed.
    pub waiting_mistaken: Option<i64>,
}

/// What all connections of a store share.
struct Home {
    path: PathBuf,
    /// One transaction writes at a time; waiting here costs less than SQLite's polling.
    gate: Mutex<()>,
    /// Locked for as long as the store is open.
    _lock: File,
}

impl Home {
    fn enter(&self) -> MutexGuard<'_, ()> {
        // The gate guards no data of its own.
        self.gate.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn connect(&self, cache_bytes: u64) -> rusqlite::Result<Connection> {
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let db = Connection::open_with_flags_and_vfs(&self.path, flags, vfs::name())?;
        tune(&db, cache_bytes)?;
        Ok(db)
    }
}

fn tune(db: &Connection, cache_bytes: u64) -> rusqlite::Result<()> {
    db.busy_timeout(BUSY_TIMEOUT)?;
    db.set_prepared_statement_cache_capacity(64);
    db.pragma_update(None, "synchronous", "FULL")?;
    db.pragma_update(None, "wal_autocheckpoint", 0)?;
    db.pragma_update(None, "cache_size", -i64::try_from(cache_bytes / 1024).unwrap_or(i64::MAX))?;
    // Temporary tables and sorting stay off the disk that the log is on.
    db.pragma_update(None, "temp_store", "MEMORY")
}

/// Makes readers, each for one thread.
#[derive(Clone)]
pub struct Readers {
    home: Arc<Home>,
    cache_bytes: u64,
}

impl Readers {
    pub fn open(&self) -> Result<Reader, Error> {
        let db = self.home.connect(self.cache_bytes).map_err(|error| classify(&self.home.path, error))?;
        db.pragma_update(None, "query_only", true).map_err(|error| classify(&self.home.path, error))?;
        Ok(Reader::new(db, Arc::clone(&self.home)))
    }

    /// The database file.
    pub fn path(&self) -> &Path {
        &self.home.path
    }
}

/// Opens the store of a data directory, which is made when there is none, and brings its tables up to date.
pub fn open(dir: &Path, options: &Options) -> Result<Opened, Error> {
    let lock = lock(dir)?;
    let path = dir.join(FILE_NAME);
    let mut db = prepare(&path, options).map_err(|error| classify(&path, error))?;
    schema::migrate(&mut db).map_err(|error| classify(&path, error))?.map_err(|found| Error::Newer {
        path: path.clone(),
        found,
        known: schema::STEPS.len(),
    })?;
    // A new file, and the log that each start makes, are durable only when the directory is.
    File::open(dir)
        .and_then(|dir| dir.sync_all())
        .map_err(|source| Error::Unwritable { dir: dir.to_owned(), source })?;
    let home = Arc::new(Home { path, gate: Mutex::new(()), _lock: lock });
    let failed = |error| classify(&home.path, error);
    let (writer, waiting_mistaken) = Writer::new(db, Arc::clone(&home), options).map_err(failed)?;
    let auth = AuthTables::new(home.connect(1 << 20).map_err(failed)?, Arc::clone(&home));
    let readers = Readers { home: Arc::clone(&home), cache_bytes: options.reader_cache_bytes };
    Ok(Opened { writer, readers, auth, waiting_mistaken })
}

fn lock(dir: &Path) -> Result<File, Error> {
    let unwritable = |source| Error::Unwritable { dir: dir.to_owned(), source };
    std::fs::create_dir_all(dir).map_err(unwritable)?;
    let path = dir.join(LOCK_NAME);
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)
        .map_err(unwritable)?;
    match file.try_lock() {
        Ok(()) => {
            let written = file
                .set_len(0)
                .and_then(|()| file.rewind())
                .and_then(|()| writeln!(file, "{}", std::process::id()));
            written.map_err(unwritable).map(|()| file)
        }
        Err(TryLockError::WouldBlock) => {
            let mut text = String::new();
            let holder = file.read_to_string(&mut text).ok().and_then(|_| text.trim().parse().ok());
            Err(Error::Locked { dir: dir.to_owned(), holder })
        }
        Err(TryLockError::Error(source)) => Err(unwritable(source)),
    }
}

fn prepare(path: &Path, options: &Options) -> rusqlite::Result<Connection> {
    let flags =
        OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let db = Connection::open_with_flags_and_vfs(path, flags, vfs::name())?;
    // Counts only while the file is empty.
    db.pragma_update(None, "page_size", options.page_bytes)?;
    db.pragma_update(None, "journal_mode", "WAL")?;
    tune(&db, options.writer_cache_bytes)?;
    // After a burst the log file shrinks to this when it begins anew.
    db.pragma_update(None, "journal_size_limit", i64::try_from(options.log_bytes_max).unwrap_or(i64::MAX))?;
    check_length(&db, path)?;
    Ok(db)
}

/// A file that lost its end opens well and fails later, in the middle of work. Reading it all would take too long
/// at each start; comparing lengths does not.
fn check_length(db: &Connection, path: &Path) -> rusqlite::Result<()> {
    let log_bytes = std::fs::metadata(log_path(path)).map_or(0, |log| log.len());
    // While there is a log, the file may rightly be shorter than the database.
    let Ok(file) = std::fs::metadata(path) else { return Ok(()) };
    if log_bytes > 0 || file.len() == 0 {
        return Ok(());
    }
    let page_count: u64 = db.query_row("PRAGMA page_count", [], |row| codec::unsigned(row, 0))?;
    let page_bytes: u64 = db.query_row("PRAGMA page_size", [], |row| codec::unsigned(row, 0))?;
    if file.len() >= page_count * page_bytes {
        return Ok(());
    }
    let text = format!("{} bytes long instead of {page_count} pages of {page_bytes}", file.len());
    Err(rusqlite::Error::SqliteFailure(rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_CORRUPT), Some(text)))
}

fn log_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push("-wal");
    PathBuf::from(name)
}

/// Which of the faults at opening an error is.
fn classify(path: &Path, error: rusqlite::Error) -> Error {
    let dir = || path.parent().unwrap_or(path).to_owned();
    let unwritable = |text: &str| Error::Unwritable { dir: dir(), source: io::Error::other(text.to_owned()) };
    match error.sqlite_error_code() {
        Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => {
            Error::Corrupt { path: path.to_owned(), detail: error.to_string() }
        }
        Some(ErrorCode::ReadOnly | ErrorCode::PermissionDenied | ErrorCode::CannotOpen) => {
            unwritable(&error.to_string())
        }
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => {
            Error::Locked { dir: dir(), holder: None }
        }
        _ => Error::Failed { path: path.to_owned(), source: error },
    }
}

#[cfg(test)]
mod tests;
