//! What the server's process uses, read from /proc.

use std::fs;

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Usage {
    /// User and system time since the start, in microseconds.
    pub cpu_us: u64,
    /// Memory that is the process's own: heap and stacks.
    pub anonymous_bytes: u64,
    /// Bytes handed to the disk.
    pub written_bytes: u64,
}

impl Usage {
    pub fn of(pid: u32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name in parentheses may hold spaces; the fields count from behind it.
        let fields: Vec<&str> = stat.rsplit_once(") ")?.1.split_whitespace().collect();
        let ticks: u64 = fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?;
        let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
        let io = fs::read_to_string(format!("/proc/{pid}/io")).unwrap_or_default();
        Some(Self {
            // A tick is 10 ms on Linux.
            cpu_us: ticks * 10_000,
            anonymous_bytes: number(&rollup, "Anonymous:")? * 1024,
            written_bytes: number(&io, "write_bytes:").unwrap_or_default(),
        })
    }
}

fn number(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

/// The process that listens at the port of a URL on this machine.
pub fn listener_of(url: &str) -> Option<u32> {
    let authority = url.split("://").nth(1)?.split('/').next()?;
    listener_at(authority.rsplit_once(':')?.1.parse().ok()?)
}

/// The process that listens at a port of this machine, if this user may see it.
pub fn listener_at(port: u16) -> Option<u32> {
    let inode = listening_inode(&fs::read_to_string("/proc/net/tcp").ok()?, port)
        .or_else(|| listening_inode(&fs::read_to_string("/proc/net/tcp6").ok()?, port))?;
    let wanted = format!("socket:[{inode}]");
    let pids =
        fs::read_dir("/proc").ok()?.flatten().filter_map(|e| e.file_name().to_str()?.parse::<u32>().ok());
    pids.into_iter().find(|pid| {
        let links = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        links.into_iter().any(|link| fs::read_link(link.path()).is_ok_and(|to| to.to_str() == Some(&wanted)))
    })
}

fn listening_inode(table: &str, port: u16) -> Option<u64> {
    table.lines().skip(1).find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let local = u16::from_str_radix(fields.get(1)?.rsplit_once(':')?.1, 16).ok()?;
        (local == port && *fields.get(3)? == "0A").then(|| fields.get(9)?.parse().ok())?
    })
}

/// How many files this process may open.
pub fn open_files_limit() -> u64 {
    let limits = fs::read_to_string("/proc/self/limits").unwrap_or_default();
    number(&limits, "Max open files").unwrap_or(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_is_found_by_its_port() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("ws://{}/ws", listener.local_addr().unwrap());
        assert_eq!(listener_of(&url), Some(std::process::id()));
        assert!(Usage::of(std::process::id()).is_some_and(|usage| usage.anonymous_bytes > 0));
        drop(listener);
        assert_eq!(listener_of(&url), None);
    }
}
