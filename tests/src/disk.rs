//! Disks with faults: one that forgets what was not synced, or takes its time to sync; and one that is small.

use crate::server::Setup;
use std::{
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::OnceLock,
    time::Duration,
};

/// What becomes of the writes of a server below its data directory.
#[derive(Debug, Clone, Copy, Default)]
pub struct Fault {
    /// Syncs do nothing.
    pub ignore_syncs: bool,
    /// How many of a thousand writes reach the disk early, without a sync.
    pub leak_permille: u32,
    /// How long each sync takes.
    pub sync_delay: Duration,
}

/// The library that keeps unsynced writes in memory, built once for this run.
fn library() -> &'static Path {
    static BUILT: OnceLock<(tempfile::TempDir, PathBuf)> = OnceLock::new();
    let (_, path) = BUILT.get_or_init(|| {
        let folder = tempfile::tempdir().expect("a temporary directory");
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../crates/store/tests/unsynced/build.sh");
        let output = Command::new("sh").arg(script).arg(folder.path()).output().expect("sh can be run");
        assert!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&output.stderr));
        let path = PathBuf::from(String::from_utf8(output.stdout).expect("a path of text").trim());
        (folder, path)
    });
    path
}

/// While this file exists in the data directory of a server with a fault, its syncs fail.
pub const BROKEN: &str = "the-disk-is-broken";

/// The same server on a disk with this fault: a kill takes what was not synced, as a power cut would.
pub fn with_fault(setup: Setup, fault: Fault) -> Setup {
    let environment = environment(setup.data_dir(), fault);
    environment.iter().fold(setup, |setup, (name, value)| setup.environment(name, value))
}

/// What puts a program on such a disk, as far as it writes below this directory.
pub fn environment(data: &Path, fault: Fault) -> [(&'static str, String); 6] {
    let text = |path: &Path| path.to_str().expect("a path of text").to_owned();
    [
        ("UNSYNCED_BROKEN", text(&data.join(BROKEN))),
        ("LD_PRELOAD", text(library())),
        ("UNSYNCED_DIR", text(data)),
        ("UNSYNCED_IGNORE", if fault.ignore_syncs { "1" } else { "0" }.to_owned()),
        ("UNSYNCED_LEAK", fault.leak_permille.to_string()),
        ("UNSYNCED_DELAY_MS", fault.sync_delay.as_millis().to_string()),
    ]
}

/// A file system in memory of a fixed size. Mounting needs root: by itself, or by `sudo` without a password.
pub struct SmallDisk {
    place: tempfile::TempDir,
}

impl SmallDisk {
    pub fn mount(bytes: u64) -> Self {
        let place = tempfile::tempdir().expect("a temporary directory");
        let options = format!("size={bytes},mode=777");
        let path = place.path().to_str().expect("a path of text");
        let output = as_root(&["mount", "-t", "tmpfs", "-o", &options, "tmpfs", path]);
        assert!(
            output.status.success(),
            "a small file system cannot be mounted ({}): run the tests as root, let sudo work without a password, or \
             in a container give it the capability SYS_ADMIN",
            String::from_utf8_lossy(&output.stderr).trim()
        );
        Self { place }
    }

    pub fn path(&self) -> &Path {
        self.place.path()
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let path = self.place.path().to_str().expect("a path of text");
        // Lazily: a server that still ends must not keep it.
        let output = as_root(&["umount", "-l", path]);
        if !output.status.success() {
            eprintln!("{path} stays mounted: {}", String::from_utf8_lossy(&output.stderr));
        }
    }
}

fn as_root(command: &[&str]) -> Output {
    let id = Command::new("id").arg("-u").output().expect("`id` can be run");
    let is_root = id.stdout.trim_ascii() == b"0";
    let words: Vec<&str> = if is_root { vec![] } else { vec!["sudo", "-n"] }
        .into_iter()
        .chain(command.iter().copied())
        .collect();
    Command::new(words[0]).args(&words[1..]).output().unwrap_or_else(|error| panic!("{}: {error}", words[0]))
}
