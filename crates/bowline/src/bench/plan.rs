//! Who holds how many connections, and whether this machine can.

use super::{Options, Scenario, job::Job, wire::Place};
use crate::cli::Failure;
use anyhow::anyhow;
use std::{fs, path::Path};

/// Files that a worker needs besides its connections.
const FILES_MARGIN: u64 = 64;
const WORKERS_MAX: usize = 256;
/// Connections from one source address; it has some 28,000 ports, of which others use some.
const PER_SOURCE_MAX: usize = 10_000;
/// Connections that are being opened at once, over all workers.
const OPENING_MAX: usize = 64;

pub struct Plan {
    pub jobs: Vec<Job>,
    pub as_processes: bool,
}

impl Plan {
    pub fn of(options: &Options, place: &Place) -> Result<Self, Failure> {
        let connections = check(options, place)?;
        let workers = match options.processes {
            Some(processes) => processes.clamp(1, connections / 2),
            None => workers_needed(connections, super::server::open_files_limit())?,
        };
        let sources = match place.address.ip().is_loopback() && place.address.is_ipv4() {
            true if connections > PER_SOURCE_MAX => connections.div_ceil(PER_SOURCE_MAX).min(250),
            _ => 0,
        };
        let users = (0..connections).map(Job::user);
        let tokens = options.tokens.many(users).map_err(Failure::Failed)?;
        let run = crate::random_text().map_err(Failure::Failed)?;
        let job = Job {
            scenario: options.scenario,
            place: place.clone(),
            first: 0,
            count: 0,
            total: connections,
            workers,
            tokens: Vec::new(),
            sources,
            opening_max: OPENING_MAX.div_ceil(workers),
            // Ids take it apart at the first "-".
            run: run.replace('-', "_"),
            rate: options.rate,
            in_flight: options.in_flight,
            publishers: options.publishers,
            stalled: options.stalled,
            body_bytes: options.body_bytes,
        };
        let jobs = shares(connections, workers)
            .map(|(first, count)| {
                let tokens = match options.tokens.is_shared() {
                    true => tokens.clone(),
                    false => tokens[first..first + count].to_vec(),
                };
                Job { first, count, tokens, ..job.clone() }
            })
            .collect();
        Ok(Self { jobs, as_processes: workers > 1 })
    }
}

/// Wrong usage in words; the connections that will be opened.
fn check(options: &Options, place: &Place) -> Result<usize, Failure> {
    let usage = |text: String| Err(Failure::Usage(anyhow!(text)));
    let mut connections = options.connections;
    if options.scenario == Scenario::Pair {
        connections &= !1;
        if options.tokens.is_shared() {
            return usage(
                "bench pair needs a user for each connection, and --token names one: leave it out, and say where the \
                 secret is (--config or --data)"
                    .into(),
            );
        }
    }
    if connections < 2 {
        return usage(format!("--connections {} is too few; it takes 2 or more", options.connections));
    }
    if let Some(pid) = options.server_pid
        && !is_process(pid)
    {
        return usage(format!(
            "--server-pid {pid} is no process of this machine; leave it out to have it found"
        ));
    }
    if options.in_flight == 0 || options.publishers == 0 {
        return usage("--in-flight and --publishers take 1 or more".into());
    }
    if options.publishers > connections {
        return usage(format!(
            "--publishers {} are more than the {connections} members; take fewer",
            options.publishers
        ));
    }
    if options.stalled > 0 && options.scenario != Scenario::Fanout {
        return usage("--stalled is for bench fanout; the other scenarios have no room".into());
    }
    if options.stalled > connections / 2 || options.stalled + options.publishers > connections {
        return usage(format!(
            "--stalled {} leaves too few of the {connections} members: half of them have to read, and publishers do",
            options.stalled
        ));
    }
    if options.rate.is_some_and(|rate| !rate.is_finite() || rate < 0.0) {
        return usage("--rate takes a number above 0; 0 is a closed loop".into());
    }
    let ports = ephemeral_ports();
    if !place.address.ip().is_loopback() && connections as u64 > ports {
        return usage(format!(
            "{connections} connections to one address need more than the {ports} ports that this machine gives to \
             outgoing ones; widen net.ipv4.ip_local_port_range, or run the bench from several machines"
        ));
    }
    Ok(connections)
}

/// As far as the system tells.
fn is_process(pid: u32) -> bool {
    !Path::new("/proc/self").exists() || Path::new(&format!("/proc/{pid}")).exists()
}

/// So many processes that each has files enough.
fn workers_needed(connections: usize, files: u64) -> Result<usize, Failure> {
    let each = files.saturating_sub(FILES_MARGIN) as usize;
    let workers = if each == 0 { usize::MAX } else { connections.div_ceil(each) };
    if workers > WORKERS_MAX {
        return Err(Failure::Usage(anyhow!(
            "{connections} connections need more than {WORKERS_MAX} processes of {files} open files each; raise the \
             limit (ulimit -n) or take fewer"
        )));
    }
    Ok(workers)
}

/// First number and count of each worker; pairs stay together.
fn shares(connections: usize, workers: usize) -> impl Iterator<Item = (usize, usize)> {
    let pairs = connections.div_ceil(2);
    (0..workers).map(move |worker| {
        let bound = |worker: usize| (pairs * worker / workers * 2).min(connections);
        (bound(worker), bound(worker + 1) - bound(worker))
    })
}

/// Ports for outgoing connections of one source address.
pub fn ephemeral_ports() -> u64 {
    let range = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
    let bounds: Vec<u64> = range.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    match bounds[..] {
        [low, high] => high.saturating_sub(low) + 1,
        _ => 16_384,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_cover_everything_and_part_no_pair() {
        for (connections, workers) in [(2, 1), (10, 3), (20_001, 2), (7, 3), (100_000, 6)] {
            let all: Vec<_> = shares(connections, workers).collect();
            let mut next = 0;
            for (first, count) in &all {
                assert_eq!((*first, first % 2), (next, 0), "{all:?}");
                next = first + count;
            }
            assert_eq!(next, connections, "{all:?}");
            assert_eq!(all.len(), workers);
        }
    }

    #[test]
    fn processes_are_as_many_as_the_files_ask_for() {
        assert!(matches!(workers_needed(19_000, 20_000), Ok(1)));
        assert!(matches!(workers_needed(60_000, 20_000), Ok(4)));
        assert!(workers_needed(60_000, 64).is_err());
        assert!(workers_needed(1_000_000, 1024).is_err());
    }
}
