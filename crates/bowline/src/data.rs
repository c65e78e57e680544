//! The data directory and the keys that were generated for it. The store says who holds it.

use crate::cli::Failure;
use anyhow::{Context, anyhow};
use base64::Engine;
use std::{
    fs::{self, DirBuilder, OpenOptions},
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

pub struct DataDir {
    path: PathBuf,
}

impl DataDir {
    /// The file with the generated secret of tokens.
    pub const TOKEN_SECRET: &'static str = "auth.secret";
    /// The file with the generated key of the API.
    pub const API_KEY: &'static str = "api.key";
    /// The file with the generated secret of webhooks.
    pub const HOOK_SECRET: &'static str = "hooks.secret";

    /// Opens the directory, making it when it is missing.
    pub fn open(path: &Path) -> Result<Self, Failure> {
        let mut builder = DirBuilder::new();
        builder.recursive(true).mode(0o700);
        builder
            .create(path)
            .with_context(|| {
                format!("the data directory {} cannot be made (node.data, --data)", path.display())
            })
            .map_err(Failure::Usage)?;
        Ok(Self { path: path.to_owned() })
    }

    /// Opens a directory that is there: whoever only needs its keys makes none, or a slip of the pen would be one.
    pub fn existing(path: &Path) -> Result<Self, Failure> {
        if path.is_dir() {
            return Ok(Self { path: path.to_owned() });
        }
        Err(Failure::Usage(anyhow!(
            "there is no data directory {} (node.data, --data); name that of the server, or start one there first: bowline \
             serve --data {}",
            path.display(),
            path.display()
        )))
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A random text of 256 bits, the same at every call for this directory.
    pub fn secret(&self, name: &str) -> Result<String, Failure> {
        let path = self.path.join(name);
        read_or_make(&path)
            .with_context(|| format!("the generated key {} cannot be read or written", path.display()))
            .map_err(Failure::Failed)
    }

    /// A generated key, if there is one and it may be read.
    pub fn peek(path: &Path, name: &str) -> Option<String> {
        let text = fs::read_to_string(path.join(name)).ok()?;
        Some(text.trim().to_owned()).filter(|text| !text.is_empty())
    }
}

/// Written beside its place and linked there, so that of two programs that begin at once both have the same key.
fn read_or_make(path: &Path) -> anyhow::Result<String> {
    if let Some(text) = read(path)? {
        return Ok(text);
    }
    let mut key = [0_u8; 32];
    getrandom::fill(&mut key).map_err(|error| anyhow!("the system gives no random bytes: {error}"))?;
    let text = base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(key);
    let beside = path.with_extension(format!("{}.new", crate::random_text()?));
    let mut file = OpenOptions::new().create_new(true).write(true).mode(0o600).open(&beside)?;
    file.write_all(format!("{text}\n").as_bytes())?;
    file.sync_all()?;
    let linked = fs::hard_link(&beside, path);
    fs::remove_file(&beside)?;
    match linked {
        Ok(()) => Ok(text),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            read(path)?.ok_or_else(|| anyhow!("it vanished while it was read"))
        }
        Err(error) => Err(error.into()),
    }
}

fn read(path: &Path) -> anyhow::Result<Option<String>> {
    match fs::read_to_string(path) {
        Ok(text) if text.trim().is_empty() => {
            Err(anyhow!("the file is empty; delete it, and a new key is made (tokens of the old one end)"))
        }
        Ok(text) => Ok(Some(text.trim().to_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_secret_is_made_once_even_by_many_at_once_and_is_nobody_elses() {
        let path = std::env::temp_dir().join(format!("bowline-data-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        let secrets: Vec<String> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8)
                .map(|_| scope.spawn(|| DataDir::open(&path).unwrap().secret(DataDir::TOKEN_SECRET).unwrap()))
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(secrets[0].len() == 43 && secrets.iter().all(|secret| *secret == secrets[0]));
        let data = DataDir::open(&path).unwrap();
        assert_ne!(data.secret(DataDir::API_KEY).unwrap(), secrets[0]);
        assert_eq!(DataDir::peek(&path, DataDir::TOKEN_SECRET), Some(secrets[0].clone()));
        let mode = fs::metadata(path.join(DataDir::TOKEN_SECRET)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert_eq!(fs::read_dir(&path).unwrap().count(), 2);
        fs::remove_dir_all(&path).unwrap();
    }
}
