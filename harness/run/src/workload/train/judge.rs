//! Judges the end of a training.

use harness_allocator::allocator::AllocatorError;
use harness_base::words::count;
use harness_record::{FailedRequest, Outcome};
use harness_scenario::steps::train::Train;
use harness_scenario::{Expected, Step};

use crate::context::RunContext;
use crate::step_result::{StepResult, Unmet};

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
    match (failed, train.expect.of(&ctx.arm, ctx.device)) {
        (None, expected) => {
            result.outcome = Outcome::Fits { retries: retries as u32 };
            if retries > 0 {
                result.notes.push(format!("{}: {became}", count(retries, "retry")));
            }
            if let Expected::Oom(_) = expected {
                result.unmet.push(Unmet::at(step, "training to run out of memory", completed));
            }
        }
        (Some((error, failed_request)), expected) => {
            result.outcome = Outcome::OutOfMemory;
            result.failed_request = failed_request;
            result.notes.push(format!("{completed}, then {error}"));
            if let Expected::Oom(Some(cause)) = expected {
                result.unmet.extend(Unmet::other_cause(step, cause, result.failed_request.as_ref()));
            }
            if expected == Expected::Fits {
                result.unmet.push(Unmet::at(step, "training to finish", format!("{completed}, then {error}")));
            }
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
