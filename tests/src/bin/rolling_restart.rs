//! Restarts a loaded server under its clients: `rolling-restart [CONNECTIONS [RATE [RESTARTS]]]`, 10,000 connections,
//! 500 messages a second and 2 restarts by default. Exit code 1 when a promise was broken.

use bowline_tests::rolling::{self, Options};
use std::{process::ExitCode, time::Duration};

/// How much more than its even share of the spread may come back within any second. Those whose time came while the
/// server was away come on top of it, in the second of its return.
const PACE_FACTOR: f64 = 1.25;
/// How much longer than its own delay a client may be away.
const BEYOND_DELAY_MAX: Duration = Duration::from_secs(1);

fn main() -> ExitCode {
    let mut numbers: [usize; 3] = [10_000, 500, 2];
    for (number, text) in numbers.iter_mut().zip(std::env::args().skip(1)) {
        match text.parse() {
            Ok(given) => *number = given,
            Err(error) => {
                eprintln!("{text:?} is no number: {error}");
                return ExitCode::from(2);
            }
        }
    }
    let [connections, rate, restarts] = numbers;
    let spread = Duration::from_secs(10);
    let options = Options {
        connections: connections.next_multiple_of(2),
        rate,
        restarts,
        spread,
        calm: Duration::from_secs(5),
    };
    let report = rolling::run(options);
    println!("{report:#?}");
    let away = report.ending.iter().zip(&report.down).map(|(ending, down)| (*ending + *down).as_secs_f64());
    let share = options.connections as f64 / spread.as_secs_f64() * PACE_FACTOR;
    let paces: Vec<usize> = away.map(|away| (share * (1.0 + away)) as usize).collect();
    let checks = [
        ("nothing is lost", report.lost == 0 && report.acked == report.sent),
        ("nothing is doubled", report.doubled == 0 && report.out_of_order == 0),
        ("everybody was told when to come back", report.unannounced == 0),
        ("the pace was kept", report.peak_per_second.iter().zip(&paces).all(|(peak, pace)| peak <= pace)),
        (
            "nobody waited longer than its delay, or until the server was back, and a second",
            report.longest_beyond_return <= BEYOND_DELAY_MAX,
        ),
    ];
    for (promise, kept) in checks {
        println!("{}: {promise}", if kept { "kept" } else { "BROKEN" });
    }
    if checks.iter().all(|(_, kept)| *kept) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
