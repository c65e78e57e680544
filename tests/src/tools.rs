//! Programs beside the suite: Python, Node and a browser, as `scripts/test` installs them.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// The folder of this crate, where the clients in other languages lie.
pub fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

const SET_UP: &str = "run `scripts/setup` to install what the tests need";

/// The Python of the virtual environment with the `websockets` package.
pub fn python() -> Command {
    let python = folder().join("python/.venv/bin/python");
    assert!(python.is_file(), "{} does not exist: {SET_UP}", python.display());
    let check = Command::new(&python).args(["-c", "import websockets"]).stderr(Stdio::null()).status();
    assert!(
        check.is_ok_and(|status| status.success()),
        "{} has no websockets package: {SET_UP}",
        python.display()
    );
    Command::new(python)
}

/// Node.js, with the packages of `tests/node` installed.
pub fn node() -> Command {
    let packages = folder().join("node/node_modules");
    for package in ["ws", "playwright-core"] {
        assert!(
            packages.join(package).join("package.json").is_file(),
            "{}/{package} does not exist: {SET_UP}",
            packages.display()
        );
    }
    let check = Command::new("node").arg("--version").stdout(Stdio::null()).status();
    assert!(check.is_ok_and(|status| status.success()), "node cannot be run: {SET_UP}");
    Command::new("node")
}

/// The browser: `CHROMIUM`, or where Debian puts it.
pub fn chromium() -> PathBuf {
    let path = std::env::var_os("CHROMIUM").map_or(PathBuf::from("/usr/bin/chromium"), PathBuf::from);
    assert!(path.is_file(), "{} does not exist: {SET_UP}, or name the browser in CHROMIUM", path.display());
    path
}

/// Where screenshots go: `BOWLINE_TEST_OUT`, or beside the built tests.
pub fn output_folder() -> PathBuf {
    let folder = match std::env::var_os("BOWLINE_TEST_OUT") {
        Some(path) => PathBuf::from(path),
        None => {
            let test = std::env::current_exe().expect("a running test has a path");
            test.parent()
                .and_then(Path::parent)
                .expect("tests are built in <profile>/deps")
                .join("e2e-output")
        }
    };
    std::fs::create_dir_all(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    folder
}
