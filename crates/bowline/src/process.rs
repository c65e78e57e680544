//! What a process uses, cheap enough to be read at every scrape.

use std::fs;

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Process {
    /// User and system time since the start.
    pub cpu_s: f64,
    /// Memory that is in use, shared libraries included.
    pub resident_bytes: u64,
}

impl Process {
    /// This process, where the system tells.
    pub fn this() -> Option<Self> {
        let stat = fs::read_to_string("/proc/self/stat").ok()?;
        // The name in parentheses may hold spaces; the fields count from behind it.
        let fields: Vec<&str> = stat.rsplit_once(") ")?.1.split_whitespace().collect();
        let ticks: u64 = fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?;
        let pages: u64 = fields.get(21)?.parse().ok()?;
        Some(Self {
            // A tick is 10 ms on Linux.
            cpu_s: ticks as f64 / 100.0,
            resident_bytes: pages * rustix::param::page_size() as u64,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_uses_memory() {
        if cfg!(target_os = "linux") {
            let process = Process::this().unwrap();
            assert!((1 << 20..1 << 36).contains(&process.resident_bytes), "{process:?}");
            assert!(process.cpu_s >= 0.0);
        }
    }
}
