//! The limits of the machine: files, backlog, ports, memory.

use super::{Finding, data::Home};
use crate::{bench::ephemeral_ports, config::Settings};
use bowline_gateway::Files;
use rustix::process::{Resource, getrlimit};
use std::fs;

/// A server that is to hold many clients has more.
const SESSIONS_FEW: u64 = 10_000;
/// The accept backlog that the gateway asks for.
const BACKLOG: u64 = 4096;
const PORTS_FEW: u64 = 10_000;

/// Memory of one idle session: a socket in the kernel, and its places in gateway and router.
const SESSION_BYTES: u64 = 6_500;
/// The same with TLS.
const TLS_SESSION_BYTES: u64 = 15_000;
/// What a server takes without any.
const BASE_BYTES: u64 = 96 << 20;

pub fn examine(settings: &Settings, home: &Home) -> Vec<Finding> {
    let files = files_of(home.holder);
    let max_connections = settings.int::<u64>("gateway.max_connections");
    let sessions = match max_connections {
        0 => sessions_of(files),
        most => most.min(sessions_of(files)),
    };
    let session_bytes =
        if settings.text("gateway.tls.cert").is_some() { TLS_SESSION_BYTES } else { SESSION_BYTES };
    let mut findings = vec![
        judge_files(files, max_connections),
        judge_memory(available_bytes(), sessions, session_bytes),
        judge_ports(ephemeral_ports()),
    ];
    findings.extend(number_of("/proc/sys/net/core/somaxconn").map(judge_backlog));
    findings.extend(number_of("/proc/sys/net/ipv4/tcp_max_syn_backlog").map(judge_syn_backlog));
    findings.extend(
        number_of("/proc/sys/net/netfilter/nf_conntrack_max").map(|most| judge_tracking(most, sessions)),
    );
    findings
}

fn number_of(path: &str) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Open files that a server may have: the one that runs, or one that is started here.
fn files_of(holder: Option<u32>) -> u64 {
    let limits = holder.and_then(|process| fs::read_to_string(format!("/proc/{process}/limits")).ok());
    let of_holder = limits.as_deref().and_then(hard_limit);
    of_holder.unwrap_or_else(|| getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX))
}

/// How many sessions a gateway takes with so many files.
fn sessions_of(files: u64) -> u64 {
    Files::new(usize::try_from(files).unwrap_or(usize::MAX)).seats() as u64
}

fn hard_limit(limits: &str) -> Option<u64> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

fn judge_files(files: u64, max_connections: u64) -> Finding {
    const CHECK: &str = "open files";
    const RAISE: &str = "raise the hard limit: LimitNOFILE=1048576 in the service's unit, or ulimit -Hn";
    let sessions = sessions_of(files);
    let found = match files {
        u64::MAX => "no limit".to_owned(),
        files => format!("a server may open {files}, which is {sessions} sessions"),
    };
    if max_connections > sessions {
        let found = format!("{found}, and gateway.max_connections is {max_connections}");
        return Finding::fail(CHECK, found, RAISE);
    }
    if max_connections == 0 && sessions < SESSIONS_FEW {
        return Finding::warn(CHECK, found, RAISE);
    }
    Finding::ok(CHECK, found)
}

/// What can be had without taking it from others; within a container what is left of its share.
fn available_bytes() -> Option<u64> {
    let memory = fs::read_to_string("/proc/meminfo").ok()?;
    let line = memory.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let machine = line.split_whitespace().next()?.parse::<u64>().ok()? * 1024;
    let share = number_of("/sys/fs/cgroup/memory.max")
        .map(|most| most.saturating_sub(number_of("/sys/fs/cgroup/memory.current").unwrap_or(0)));
    Some(share.map_or(machine, |share| share.min(machine)))
}

fn judge_memory(available: Option<u64>, sessions: u64, session_bytes: u64) -> Finding {
    const CHECK: &str = "memory";
    let Some(available) = available else {
        return Finding::ok(CHECK, "this system does not tell how much is available");
    };
    let fitting = available.saturating_sub(BASE_BYTES) / session_bytes;
    let megabytes = available / 1_000_000;
    if available < BASE_BYTES {
        return Finding::fail(
            CHECK,
            format!("{megabytes} MB are available, and a server takes some 100 MB without any session"),
            "free memory, or take a larger machine",
        );
    }
    let found =
        format!("{megabytes} MB are available, for some {fitting} idle sessions of {session_bytes} bytes");
    if fitting < sessions {
        return Finding::warn(
            CHECK,
            format!("{found}; {sessions} may be opened"),
            format!("set gateway.max_connections to {fitting} or less, or take a larger machine"),
        );
    }
    Finding::ok(CHECK, found)
}

fn judge_backlog(most: u64) -> Finding {
    const CHECK: &str = "accept backlog";
    if most < BACKLOG {
        return Finding::warn(
            CHECK,
            format!(
                "net.core.somaxconn is {most}: of a burst of new connections the rest is dropped and waits 1 s"
            ),
            format!("sysctl -w net.core.somaxconn={BACKLOG}"),
        );
    }
    Finding::ok(CHECK, format!("net.core.somaxconn is {most}, and {BACKLOG} are asked for"))
}

fn judge_syn_backlog(most: u64) -> Finding {
    const CHECK: &str = "half-open connections";
    const LEAST: u64 = 1024;
    if most < LEAST {
        return Finding::warn(
            CHECK,
            format!(
                "net.ipv4.tcp_max_syn_backlog is {most}: bursts of new connections fall back on SYN cookies"
            ),
            format!("sysctl -w net.ipv4.tcp_max_syn_backlog={BACKLOG}"),
        );
    }
    Finding::ok(CHECK, format!("net.ipv4.tcp_max_syn_backlog is {most}"))
}

fn judge_ports(ports: u64) -> Finding {
    const CHECK: &str = "ephemeral ports";
    let found = format!("{ports} for outgoing connections of one address");
    if ports < PORTS_FEW {
        return Finding::warn(
            CHECK,
            format!("{found}: a proxy or bench on this machine reaches no more sessions than that"),
            "sysctl -w net.ipv4.ip_local_port_range=\"10240 65535\"",
        );
    }
    Finding::ok(CHECK, found)
}

fn judge_tracking(most: u64, sessions: u64) -> Finding {
    const CHECK: &str = "connection tracking";
    let found = format!("the firewall remembers {most} connections");
    if most < sessions {
        return Finding::warn(
            CHECK,
            format!("{found}, and {sessions} sessions may be opened: packets of further ones are dropped"),
            format!("sysctl -w net.netfilter.nf_conntrack_max={}", sessions.saturating_mul(2)),
        );
    }
    Finding::ok(CHECK, found)
}

#[cfg(test)]
mod tests {
    use super::{super::State, *};

    #[test]
    fn limits_are_judged_against_what_is_wanted() {
        let rows = [
            (judge_files(1024, 0), State::Warn),
            (judge_files(20_000, 0), State::Ok),
            (judge_files(20_000, 19_488), State::Ok),
            (judge_files(20_000, 19_489), State::Fail),
            (judge_files(u64::MAX, 1_000_000), State::Ok),
            (judge_memory(None, 1_000_000, SESSION_BYTES), State::Ok),
            (judge_memory(Some(50 << 20), 100, SESSION_BYTES), State::Fail),
            (judge_memory(Some(2 << 30), 1_000_000, SESSION_BYTES), State::Warn),
            (judge_memory(Some(8 << 30), 1_000_000, SESSION_BYTES), State::Ok),
            (judge_memory(Some(8 << 30), 1_000_000, TLS_SESSION_BYTES), State::Warn),
            (judge_backlog(128), State::Warn),
            (judge_backlog(4096), State::Ok),
            (judge_syn_backlog(128), State::Warn),
            (judge_syn_backlog(4096), State::Ok),
            (judge_ports(28_232), State::Ok),
            (judge_ports(1_000), State::Warn),
            (judge_tracking(65_536, 1_000_000), State::Warn),
            (judge_tracking(262_144, 20_000), State::Ok),
        ];
        for (finding, state) in rows {
            assert_eq!(finding.state, state, "{finding:?}");
            assert_eq!(finding.advice.is_some(), state != State::Ok, "{finding:?}");
        }
    }

    #[test]
    fn the_hard_limit_of_a_process_is_read() {
        let limits = "Limit                     Soft Limit           Hard Limit           Units     \n\
                      Max open files            1024                 20000                files     \n";
        assert_eq!(hard_limit(limits), Some(20_000));
        assert!(files_of(Some(std::process::id())) > 64);
    }
}
