//! A copy of the database that is made while the server runs.

use super::Reader;
use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
};

#[derive(Debug, thiserror::Error)]
pub enum BackupError {
    #[error("backup {} exists already; name a file that does not", path.display())]
    Exists { path: PathBuf },
    #[error("backup {} could not be written: {source}", path.display())]
    Failed { path: PathBuf, source: rusqlite::Error },
    #[error("backup {} could not be made durable: {source}", path.display())]
    Sync { path: PathBuf, source: io::Error },
}

impl Reader {
    /// Writes the state of this moment to a new file; commits go on meanwhile, and the log grows with them. To
    /// restore, stop the server and put the file in the place of `bowline.db`, without `bowline.db-wal` and
    /// `bowline.db-shm`.
    pub fn backup(&mut self, to: &Path) -> Result<(), BackupError> {
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
        let db = self.connection();
        let failed = |source| BackupError::Failed { path: to.to_owned(), source };
        // Writes to the other file only, which still counts as writing.
        db.pragma_update(None, "query_only", false).map_err(failed)?;
        let copied = db.execute("VACUUM INTO ?1", [part.to_string_lossy()]);
        db.pragma_update(None, "query_only", true).map_err(failed)?;
        copied.map_err(failed)?;
        File::open(&part).and_then(|file| file.sync_all()).map_err(sync)?;
        std::fs::rename(&part, to).map_err(sync)?;
        let dir = to.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        File::open(dir).and_then(|dir| dir.sync_all()).map_err(sync)
    }
}
