//! Seeds without a violation, planted faults that are found, and runs that repeat.

use bowline_sim::{Plan, Plant, World, plan::Act, run, shrink};
use std::collections::BTreeSet;

#[test]
fn three_hundred_seeds_break_no_promise() {
    let mut resumed = 0;
    for seed in 0..300 {
        let report = run(seed, None);
        resumed += report.resumed;
        assert_eq!(report.violation, None, "seed {seed}");
        assert!(report.messages > 0, "seed {seed} stored nothing");
    }
    assert!(resumed > 100, "{resumed} sessions were resumed");
}

#[test]
fn the_same_seed_is_the_same_run() {
    for seed in 0..30 {
        let (one, other) = (run(seed, None), run(seed, None));
        assert_eq!((one.digest, one.steps, one.ended_at), (other.digest, other.steps, other.ended_at));
        assert_ne!(one.digest, run(seed + 1_000, None).digest);
    }
}

#[test]
fn every_planted_fault_is_found_within_a_thousand_seeds() {
    for (plant, name, _) in Plant::ALL {
        let found = (0..1_000).find(|seed| run(*seed, Some(plant)).violation.is_some());
        assert!(found.is_some(), "{name} was not found");
    }
}

#[test]
fn a_failing_plan_shrinks_and_fails_still() {
    for plant in [Plant::AckBeforeSync, Plant::UnreadCountsOwn, Plant::CursorEarly] {
        let (plan, violation) = (0..1_000)
            .map(Plan::new)
            .find_map(|plan| Some((plan.clone(), World::run(&plan, Some(plant), false).violation?)))
            .expect("it is found");
        let shrunk = shrink(&plan, Some(plant), &violation);
        assert!(shrunk.plan.steps.len() < plan.steps.len() / 3, "{} steps are left", shrunk.plan.steps.len());
        assert_eq!(shrunk.violation.invariant, violation.invariant);
        let again = World::run(&shrunk.plan, Some(plant), true);
        assert_eq!(again.violation, Some(shrunk.violation));
        assert!(again.history.iter().any(|line| line.contains("VIOLATION")));
    }
}

#[test]
fn plans_have_every_kind_of_step() {
    let mut kinds = BTreeSet::new();
    let mut faults = 0;
    for seed in 0..300 {
        let plan = Plan::new(seed);
        assert!(plan.steps.is_sorted_by_key(|step| step.at) && !plan.steps.is_empty());
        faults += plan.steps.iter().filter(|step| step.act.is_fault()).count();
        kinds.extend(plan.steps.iter().map(|step| name_of(&step.act)));
    }
    assert_eq!(kinds.len(), 28, "{kinds:?}");
    assert!(faults > 1_000, "{faults} faults in 300 plans");
}

fn name_of(act: &Act) -> String {
    format!("{act:?}").split([' ', '{']).next().unwrap_or_default().to_owned()
}
