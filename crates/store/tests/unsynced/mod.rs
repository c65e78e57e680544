//! The library that loses unsynced writes, for tests that kill a process: see `unsynced.c`.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

/// Builds the library into a directory.
pub fn build(into: &Path) -> PathBuf {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/unsynced/build.sh");
    let output = Command::new("sh").arg(script).arg(into).output().expect("sh runs the build script");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    PathBuf::from(String::from_utf8(output.stdout).expect("a path").trim())
}

/// What becomes of the writes of a process below `data`.
#[derive(Debug, Clone, Copy)]
pub struct Loss {
    /// Syncs do nothing: the sync taken out.
    pub ignore_syncs: bool,
    /// How many of a thousand writes reach the disk early.
    pub leak_permille: u32,
}

/// Lets a command run on a disk that has only what was synced.
pub fn preload(command: &mut Command, library: &Path, data: &Path, loss: Loss) {
    command
        .env("LD_PRELOAD", library)
        .env("UNSYNCED_DIR", data)
        .env("UNSYNCED_IGNORE", if loss.ignore_syncs { "1" } else { "0" })
        .env("UNSYNCED_LEAK", loss.leak_permille.to_string());
}

/// While the file `full` exists, the disk is full; while `broken` does, syncs fail and lose what they were to write.
pub fn faults(command: &mut Command, full: &Path, broken: &Path) {
    command.env("UNSYNCED_FULL", full).env("UNSYNCED_BROKEN", broken);
}
