//! Makes a failing plan small: steps are left out, many at once and then one by one, as long as the same invariant is
//! broken; then the network is made as good as it can be.

use crate::{
    model::Violation,
    plan::{Act, Plan, Step},
    plants::Plant,
    world::World,
};

/// Runs that may be spent on making a plan smaller.
const RUNS_MAX: usize = 600;

/// A plan that still fails, and how it does.
pub struct Shrunk {
    pub plan: Plan,
    pub violation: Violation,
    pub runs: usize,
}

struct Shrinker {
    plan: Plan,
    violation: Violation,
    plant: Option<Plant>,
    runs: usize,
}

pub fn shrink(plan: &Plan, plant: Option<Plant>, violation: &Violation) -> Shrunk {
    let mut shrinker = Shrinker { plan: plan.clone(), violation: violation.clone(), plant, runs: 0 };
    shrinker.leave_out_steps();
    shrinker.simplify();
    shrinker.leave_out_steps();
    let Shrinker { plan, violation, runs, .. } = shrinker;
    Shrunk { plan, violation, runs }
}

impl Shrinker {
    /// Keeps a smaller plan if it breaks the same invariant.
    fn keep(&mut self, smaller: Plan) -> bool {
        if self.runs >= RUNS_MAX {
            return false;
        }
        self.runs += 1;
        let violation = World::run(&smaller, self.plant, false).violation;
        match violation.filter(|v| v.invariant == self.violation.invariant) {
            Some(violation) => {
                (self.plan, self.violation) = (smaller, violation);
                true
            }
            None => false,
        }
    }

    fn leave_out_steps(&mut self) {
        let mut size = self.plan.steps.len().div_ceil(2).max(1);
        loop {
            let mut at = 0;
            while at < self.plan.steps.len() {
                let mut smaller = self.plan.clone();
                let end = (at + size).min(smaller.steps.len());
                smaller.steps.drain(at..end);
                if !self.keep(smaller) {
                    at += size;
                }
            }
            if size == 1 {
                return;
            }
            size = size.div_ceil(2);
        }
    }

    /// Less of everything else: a better network, one gateway, one message at a time.
    fn simplify(&mut self) {
        let changes: [fn(&mut Plan); 9] = [
            |plan| plan.network.twice = 0,
            |plan| plan.network.late = 0,
            |plan| plan.network.not_here = 0,
            |plan| plan.network.link_ms = 0,
            |plan| plan.network.coordination_ms = 0,
            |plan| plan.gateways = 1,
            |plan| plan.before_send = false,
            |plan| plan.outbox = false,
            |plan| plan.devices.truncate(3),
        ];
        for change in changes {
            let mut smaller = self.plan.clone();
            change(&mut smaller);
            self.keep(smaller);
        }
        for index in 0..self.plan.steps.len() {
            let mut smaller = self.plan.clone();
            if let Step { act: Act::Send { count, .. }, .. } = &mut smaller.steps[index]
                && *count > 1
            {
                *count = 1;
                self.keep(smaller);
            }
        }
    }
}
