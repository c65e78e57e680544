//! Opens and drops connections and checks that nothing of them is left: `churn [COUNT]`, 100,000 by default.

use bowline_tests::{Server, churn};
use std::process::ExitCode;

/// How much the server may hold more than after the warm-up, whatever the count.
const GROWTH_BYTES_MAX: u64 = 16 << 20;

fn main() -> ExitCode {
    let count = match std::env::args().nth(1).map(|text| text.parse()) {
        None => 100_000,
        Some(Ok(count)) => count,
        Some(Err(error)) => {
            eprintln!("the number of connections: {error}");
            return ExitCode::from(2);
        }
    };
    let server = Server::start();
    let report = churn::run(&server, count, GROWTH_BYTES_MAX);
    println!(
        "{} connections in {:.1} s, {} with an identity, {} reset; memory {} kB after the warm-up, {} kB at the end",
        report.opened,
        report.seconds,
        report.authenticated,
        report.abrupt,
        report.memory_before / 1024,
        report.memory_after / 1024,
    );
    ExitCode::SUCCESS
}
