//! Connections come and go under load, and the memory must not grow: `soak [SECONDS]`, an hour by default. Exit code 1
//! when it does.

use bowline_tests::{Server, soak};
use std::{process::ExitCode, time::Duration};

fn main() -> ExitCode {
    let seconds = match std::env::args().nth(1).map(|text| text.parse()) {
        None => 3600,
        Some(Ok(seconds)) => seconds,
        Some(Err(error)) => {
            eprintln!("the number of seconds: {error}");
            return ExitCode::from(2);
        }
    };
    let server = Server::start();
    let report = soak::run(&server, Duration::from_secs(seconds));
    // About sixty points of the curve.
    for (at, bytes) in report.samples.iter().step_by(report.samples.len() / 60 + 1) {
        println!("{at:6.0} s {:8.0} kB", bytes / 1024.0);
    }
    println!(
        "{} connections and {} messages in {:.0} s; memory {:.0} kB on average after the warm-up, slope {:+.0} ± {:.0} kB an hour: {}",
        report.connections,
        report.messages,
        report.seconds,
        report.mean_bytes() / 1024.0,
        report.slope / 1024.0,
        report.slope_error / 1024.0,
        if report.is_flat() { "flat" } else { "GROWS" },
    );
    if report.is_flat() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
