//! The limit on open files: one connection is one file.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the soft limit to the hard one. What the system leaves there is for programs of another time; whoever wants
/// fewer connections says so with `gateway.max_connections`.
pub fn raise_limit() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let shown = |limit: Option<u64>| limit.map_or("unlimited".to_owned(), |files| files.to_string());
    if current == maximum {
        tracing::info!(open_files = shown(current), "the limit on open files is at the hard limit");
        return;
    }
    match setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        Ok(()) => {
            let (open_files, before) = (shown(maximum), shown(current));
            tracing::info!(open_files, before, "the limit on open files is raised to the hard limit");
        }
        Err(error) => tracing::warn!(
            %error,
            open_files = shown(current),
            "the limit on open files cannot be raised to {}; raise it before the start (ulimit -n, LimitNOFILE)",
            shown(maximum)
        ),
    }
}
