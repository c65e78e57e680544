//! The data directory: writable, with room, on a disk that SQLite can use; and the database in it.

use super::Finding;
use crate::config::Settings;
use bowline_store::sqlite::{self, Error};
use std::{
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
    time::SystemTime,
};

const DIRECTORY: &str = "data directory";
const DISK: &str = "disk";
const DATABASE: &str = "database";

/// The directory and the server that holds it.
pub struct Home {
    pub dir: PathBuf,
    pub holder: Option<u32>,
}

impl Home {
    pub fn of(settings: &Settings) -> Self {
        let dir = PathBuf::from(settings.text("node.data").unwrap_or_default());
        let holder = holder(&dir);
        Self { dir, holder }
    }

    /// When the database was last written.
    pub fn newest_file_ms(&self) -> Option<u64> {
        let written = |name: &str| {
            let modified = fs::metadata(self.dir.join(name)).ok()?.modified().ok()?;
            Some(modified.duration_since(SystemTime::UNIX_EPOCH).ok()?.as_millis() as u64)
        };
        ["bowline.db", "bowline.db-wal"].into_iter().filter_map(written).max()
    }
}

/// The process in the lock file, when it still holds the lock. Asking for the lock would be simpler, and would turn
/// away a server that starts at this very moment.
fn holder(dir: &Path) -> Option<u32> {
    let lock = dir.join("lock");
    let process: u32 = fs::read_to_string(&lock).ok()?.trim().parse().ok()?;
    let is_open = || -> Option<bool> {
        let lock = lock.canonicalize().ok()?;
        let mut files = fs::read_dir(format!("/proc/{process}/fd")).ok()?.flatten();
        Some(files.any(|file| fs::read_link(file.path()).is_ok_and(|to| to == lock)))
    };
    let is_locked = || -> Option<bool> {
        let inode = fs::metadata(&lock).ok()?.ino().to_string();
        let locks = fs::read_to_string("/proc/locks").ok()?;
        Some(locks.lines().any(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            let place = words.get(5).and_then(|place| place.rsplit(':').next());
            words.get(1) == Some(&"FLOCK") && place == Some(inode.as_str())
        }))
    };
    (is_open() == Some(true) || is_locked() == Some(true)).then_some(process)
}

pub fn examine(home: &Home) -> Vec<Finding> {
    let Some(place) = home.dir.ancestors().find(|path| path.exists() || path.as_os_str().is_empty()) else {
        return vec![Finding::fail(
            DIRECTORY,
            format!("{} has no parent", home.dir.display()),
            "name another (node.data, --data)",
        )];
    };
    // A relative path begins here.
    let place = if place.as_os_str().is_empty() { Path::new(".") } else { place };
    let mut findings = vec![directory(home, place)];
    findings.extend(permissions(home));
    findings.extend(disk(place));
    findings.push(database(home));
    findings
}

fn directory(home: &Home, place: &Path) -> Finding {
    let dir = home.dir.display();
    let advice = "make it writable for the user of the server, or name another (node.data, --data)";
    match fs::metadata(place) {
        Ok(metadata) if metadata.is_dir() => {}
        Ok(_) => return Finding::fail(DIRECTORY, format!("{} is no directory", place.display()), advice),
        Err(error) => return Finding::fail(DIRECTORY, format!("{}: {error}", place.display()), advice),
    }
    let access = rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK;
    if let Err(error) = rustix::fs::access(place, access) {
        let found = format!("{} cannot be written: {error}", place.display());
        return Finding::fail(DIRECTORY, found, advice);
    }
    if place != home.dir && !(home.dir.as_os_str().is_empty()) && !home.dir.exists() {
        return Finding::ok(DIRECTORY, format!("{dir} is not there yet and can be made"));
    }
    match home.holder {
        Some(process) => Finding::ok(DIRECTORY, format!("{dir}, held by the server of process {process}")),
        None => Finding::ok(DIRECTORY, format!("{dir}, no server runs on it")),
    }
}

/// Who else may read it; nothing before it is made.
fn permissions(home: &Home) -> Option<Finding> {
    const CHECK: &str = "permissions";
    let dir = home.dir.display();
    let mode = fs::metadata(&home.dir).ok()?.permissions().mode() & 0o777;
    if mode & 0o077 == 0 {
        return Some(Finding::ok(CHECK, format!("{dir} is for its owner only")));
    }
    Some(Finding::warn(
        CHECK,
        format!("{dir} has mode {mode:03o}: others may read messages and keys"),
        format!("chmod 700 {dir}"),
    ))
}

fn disk(place: &Path) -> Vec<Finding> {
    let mut findings = Vec::new();
    match rustix::fs::statvfs(place) {
        Ok(disk) => {
            let free = disk.f_bavail.saturating_mul(disk.f_frsize);
            let all = disk.f_blocks.saturating_mul(disk.f_frsize);
            findings.push(judge_space(free, all));
        }
        Err(error) => findings.push(Finding::warn(
            DISK,
            format!("the free space of {} is not known: {error}", place.display()),
            "look at it yourself (df)",
        )),
    }
    #[cfg(target_os = "linux")]
    if let Ok(system) = rustix::fs::statfs(place) {
        findings.extend(judge_file_system(system.f_type as u64));
    }
    findings
}

/// Below this nothing can be stored for long.
const SPACE_MIN: u64 = 256 << 20;
const SPACE_LOW: u64 = 2 << 30;

fn judge_space(free: u64, all: u64) -> Finding {
    let megabytes = |bytes: u64| bytes / 1_000_000;
    let found = format!("{} of {} MB are free", megabytes(free), megabytes(all));
    match free {
        0..SPACE_MIN => Finding::fail(
            DISK,
            found,
            "make room: the log of the database alone may take 256 MB, and messages are refused when it is full",
        ),
        SPACE_MIN..SPACE_LOW => Finding::warn(DISK, found, "make room before it is full"),
        _ => Finding::ok(DISK, found),
    }
}

#[cfg(target_os = "linux")]
fn judge_file_system(kind: u64) -> Option<Finding> {
    const CHECK: &str = "file system";
    let network = match kind as u32 {
        0x6969 => "NFS",
        0xff53_4d42 | 0xfe53_4d42 | 0x517b => "SMB",
        0x00c3_6400 => "Ceph",
        0x0102_1997 => "9P",
        0x0102_1994 | 0x8584_58f6 => {
            return Some(Finding::warn(
                CHECK,
                "the data directory is in memory: everything is gone after a restart of the machine",
                "put it on a disk (node.data, --data)",
            ));
        }
        _ => return None,
    };
    Some(Finding::warn(
        CHECK,
        format!("the data directory is on {network}: locks and shared memory of SQLite may not work there"),
        "put it on a local disk (node.data, --data)",
    ))
}

fn database(home: &Home) -> Finding {
    const RESTORE: &str = "put back a backup, or save what can be read (docs/operations.md)";
    match sqlite::inspect(&home.dir) {
        Ok(None) => Finding::ok(DATABASE, "there is none yet; the first start makes it"),
        Ok(Some(found)) => {
            let text = format!(
                "version {} (this program knows {}), {} MB, and {} MB of log",
                found.version,
                found.known,
                found.bytes / 1_000_000,
                found.log_bytes / 1_000_000
            );
            if found.version < found.known {
                return Finding::warn(
                    DATABASE,
                    text,
                    "the next start brings it up to date, and older programs refuse it then: make a backup first",
                );
            }
            Finding::ok(DATABASE, text)
        }
        Err(Error::Newer { found, known, .. }) => Finding::fail(
            DATABASE,
            format!("version {found}, and this program knows versions up to {known}"),
            "run the program that last used it, or a newer one, or put back a backup from before that upgrade",
        ),
        Err(error @ Error::Corrupt { .. }) => Finding::fail(DATABASE, error.to_string(), RESTORE),
        Err(error) => Finding::fail(DATABASE, error.to_string(), "run it as the user of the server"),
    }
}

#[cfg(test)]
mod tests {
    use super::{super::State, *};

    #[test]
    fn space_and_file_systems_are_judged() {
        assert_eq!(judge_space(100 << 20, 10 << 30).state, State::Fail);
        assert_eq!(judge_space(1 << 30, 10 << 30).state, State::Warn);
        assert_eq!(judge_space(5 << 30, 10 << 30).state, State::Ok);
        if cfg!(target_os = "linux") {
            assert!(judge_file_system(0x6969).is_some_and(|finding| finding.found.contains("NFS")));
            assert!(judge_file_system(0x0102_1994).is_some_and(|finding| finding.found.contains("memory")));
            assert_eq!(judge_file_system(0xef53), None);
        }
    }

    #[test]
    fn a_directory_that_is_a_file_fails() {
        let file = std::env::temp_dir().join(format!("bowline-doctor-{}", std::process::id()));
        fs::write(&file, "no directory").unwrap();
        for dir in [file.clone(), file.join("below")] {
            let findings = examine(&Home { holder: holder(&dir), dir });
            assert_eq!(findings[0].state, State::Fail, "{findings:?}");
        }
        fs::remove_file(file).unwrap();
    }
}
