//! `bowline-sim`: runs seeds, and shows the first that fails.

use bowline_sim::{Plan, Plant, Report, World, model::INVARIANTS, run, shrink};
use clap::Parser;
use serde_json::json;
use std::{
    io::{self, Write},
    process::ExitCode,
    time::Instant,
};

/// Simulates a cluster, one run for each seed. Ends with 1 at the first seed that breaks a promise, and with 2 when it
/// was called wrongly.
#[derive(Parser)]
#[command(name = "bowline-sim", version)]
struct Args {
    /// Seeds from A to below B, or a single one.
    #[arg(long, value_name = "A..B", required_unless_present = "plant")]
    seeds: Option<String>,
    /// Plants a fault that has to be found; `list` names them.
    #[arg(long, value_name = "FAULT")]
    plant: Option<String>,
    /// One JSON object instead of text.
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    let args = Args::parse();
    if args.plant.as_deref() == Some("list") {
        for (_, name, _) in Plant::ALL {
            println!("{name}");
        }
        return ExitCode::SUCCESS;
    }
    let plant = match args.plant.as_deref().map(|name| Plant::named(name).ok_or(name)) {
        None => None,
        Some(Ok(plant)) => Some(plant),
        Some(Err(name)) => {
            eprintln!("there is no fault {name:?} to plant; `--plant list` names them");
            return ExitCode::from(2);
        }
    };
    let Some(seeds) = args.seeds.as_deref().and_then(parse_seeds) else {
        eprintln!("--seeds takes a range like 0..1000 (the end is left out), or one seed");
        return ExitCode::from(2);
    };
    let began = Instant::now();
    let mut count = 0;
    for seed in seeds {
        count += 1;
        let report = run(seed, plant);
        if report.violation.is_some() {
            // Whoever reads it may have seen enough.
            let _gone = show_failure(&args, seed, plant, &report, count, began.elapsed().as_secs_f64());
            return ExitCode::FAILURE;
        }
    }
    let seconds = began.elapsed().as_secs_f64();
    let per_second = count as f64 / seconds.max(0.001);
    if args.json {
        let mut object = json!({
            "seeds": count, "failed": 0, "seconds": seconds, "seeds_per_second": per_second
        });
        if let Some(plant) = plant {
            object["plant"] = json!(plant.name());
        }
        println!("{object}");
    } else {
        println!("{count} seeds, no violation, {seconds:.1} s, {per_second:.0} seeds/s");
    }
    ExitCode::SUCCESS
}

/// `A..B`, or one number.
fn parse_seeds(text: &str) -> Option<std::ops::Range<u64>> {
    let range = match text.split_once("..") {
        Some((from, to)) => from.trim().parse().ok()?..to.trim().parse().ok()?,
        None => {
            let seed: u64 = text.trim().parse().ok()?;
            seed..seed.checked_add(1)?
        }
    };
    (!range.is_empty()).then_some(range)
}

fn show_failure(
    args: &Args,
    seed: u64,
    plant: Option<Plant>,
    report: &Report,
    count: u64,
    seconds: f64,
) -> io::Result<()> {
    let Some(violation) = &report.violation else { return Ok(()) };
    let mut out = io::stdout().lock();
    let plan = Plan::new(seed);
    let shrunk = shrink(&plan, plant, violation);
    if args.json {
        let mut object = json!({
            "seeds": count,
            "failed": 1,
            "seed": seed,
            "invariant": violation.invariant,
            "explanation": violation.text,
            "steps": plan.steps.len(),
            "steps_shrunk": shrunk.plan.steps.len(),
            "seconds": seconds,
            "seeds_per_second": count as f64 / seconds.max(0.001),
        });
        if let Some(plant) = plant {
            object["plant"] = json!(plant.name());
        }
        return writeln!(out, "{object}");
    }
    let promise =
        INVARIANTS.iter().find(|(name, _)| *name == violation.invariant).map_or("", |(_, text)| text);
    writeln!(out, "seed {seed} fails after {} steps, at {} ms", report.steps, report.ended_at)?;
    if let Some(plant) = plant {
        writeln!(out, "  planted: {}: {}", plant.name(), plant.meaning())?;
    }
    writeln!(out, "  invariant: {}: {promise}", violation.invariant)?;
    writeln!(out, "  what happened: {}", violation.text)?;
    let small = &shrunk.plan;
    writeln!(
        out,
        "\nshrunk from {} to {} steps in {} runs: {} gateways, devices {:?}, {:?}",
        plan.steps.len(),
        small.steps.len(),
        shrunk.runs,
        small.gateways,
        small.devices,
        small.network
    )?;
    for step in &small.steps {
        writeln!(out, "  at {:>5} ms: {:?}", step.at, step.act)?;
    }
    writeln!(out, "  what happens then: {}", shrunk.violation.text)?;
    writeln!(out, "\nthe end of its history:")?;
    for line in World::run(small, plant, true).history {
        writeln!(out, "  {line}")?;
    }
    writeln!(out, "\nagain: cargo run --release -p bowline-sim -- --seeds {seed}..{}", seed + 1)?;
    Ok(())
}
