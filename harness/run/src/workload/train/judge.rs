//! Judges the end of a training.

use harness_allocator::allocator::AllocatorError;
use harness_base::words::count;
use harness_record::{FailedRequest, Outcome};
use harness_scenario::Step;
use harness_scenario::steps::train::Train;

use crate::context::RunContext;
use crate::step_result::StepResult;

/// Judges the end of a training: its iterations and retries, and a description of the final plan.
pub(super) fn judge(
    ctx: &RunContext,
    step: &Step,
    train: &Train,
    (iterations, retries, became): (u64, u64, String),
    failed: Option<(AllocatorError, Option<FailedRequest>)>,
    result: &mut StepResult,
) {
    let completed = format!("{iterations} of {}", count(train.iterations, "iteration"));
    let expected = train.expect.of(&ctx.arm, ctx.device);
    match failed {
        None => {
            result.outcome = Outcome::Fits { retries: retries as u32 };
            if retries > 0 {
                result.notes.push(format!("{}: {became}", count(retries, "retry")));
            }
            result.fits(step, expected, "training to run out of memory", completed);
        }
        Some((error, failed_request)) => {
            let seen = format!("{completed}, then {error}");
            result.runs_out(step, expected, seen.clone(), ("training to finish", seen), failed_request);
        }
    }
}

/// Describes the effect of retries on the batch.
pub(super) fn batch_became(train: &Train, batch: u64) -> String {
    match train.batches[0] {
        first if first == batch => format!("the last batch was {batch}, like the first"),
        first => format!("batch {first} became {batch}"),
    }
}
