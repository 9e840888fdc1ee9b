//! Shortens a plan with a contradiction: removes calls as long as the contradiction remains.

use std::time::{Duration, Instant};

use crate::model::Lie;
use crate::plan::Plan;

/// How often a plan is repeated before it counts as free of the contradiction, which may depend on the interleaving.
const REPEATS: usize = 40;
/// Time limit for shortening one plan.
const TIME: Duration = Duration::from_secs(20);

/// The shortest plan that was found, as text, with its finding.
pub fn shrunk(plan: &Plan, kind: &str, run: &dyn Fn(&Plan) -> Vec<Lie>) -> String {
    let started = Instant::now();
    let shows = |plan: &Plan, repeats: usize| {
        (0..repeats)
            .filter(|_| started.elapsed() < TIME)
            .find_map(|_| run(plan).into_iter().find(|lie| lie.kind == kind))
    };
    let Some(mut lie) = shows(plan, 4 * REPEATS) else {
        return format!("{kind}: not again in {} repetitions\n{plan}", 4 * REPEATS);
    };
    let mut plan = plan.clone();
    let simpler = [
        Plan {
            lingers: false,
            ..plan.clone()
        },
        plan.in_one_thread(),
        Plan {
            lingers: false,
            ..plan.in_one_thread()
        },
    ];
    for simpler in simpler {
        if let Some(found) = shows(&simpler, REPEATS) {
            (plan, lie) = (simpler, found);
        }
    }
    let mut chunk = plan.steps.len().div_ceil(2);
    loop {
        let mut at = 0;
        while at < plan.steps.len() && started.elapsed() < TIME {
            let mut shorter = plan.clone();
            shorter.steps.drain(at..(at + chunk).min(plan.steps.len()));
            match shows(&shorter, REPEATS) {
                Some(found) => (plan, lie) = (shorter.tidied(), found),
                None => at += chunk,
            }
        }
        if chunk == 1 {
            break;
        }
        chunk = chunk.div_ceil(2);
    }
    if let Some(found) = shows(&plan.in_one_thread(), REPEATS) {
        (plan, lie) = (plan.in_one_thread(), found);
    }
    format!("{kind}: {}\n{plan}", lie.text)
}
