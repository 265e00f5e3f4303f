//! `leak_check` of a loop or a training: how much may grow from iteration to iteration.

use harness_allocator::units::Bytes;
use schemars::JsonSchema;
use serde::Deserialize;

use crate::checker::Checker;
use harness_language::error::Problem;
use harness_language::located::Position;
use harness_language::text::{AmountText, CountText};

/// Most iterations of a warm-up, and from one look to the next.
pub const MAX_ITERATIONS: u64 = 1_000_000;
/// Iterations of the warm-up, if the file does not say.
const WARMUP: u64 = 3;

/// What may grow from iteration to iteration, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeakCheck {
    /// The most that a site may grow by an iteration, on average; `None`: it is not looked at.
    pub per_iteration: Option<Bytes>,
    /// The most that a site may grow by in all.
    pub total: Option<Bytes>,
    /// Iterations in front that are not looked at.
    pub warmup: u64,
    /// From one look to the next, in iterations.
    pub every: u64,
}

/// Finds leaks: after each iteration it is compared how many bytes each site holds that are allocated. A site is a step in its place, with the name of its buffer, or
/// with what the tensors of a training are for; numbered buffers of a step are one site. The run fails where one grows by more than it may, and the report tells by how much an iteration, and how long
/// memory would last. How much is held for a while does not count: least held in the first half of the iterations is compared with least held in the second half.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "leak_check")]
pub(crate) struct LeakCheckWire {
    /// The most that a site may grow by an iteration, on average: 0 B if neither this nor `total` is given.
    per_iteration: Option<AmountText>,
    /// The most that a site may grow by in all, behind the warm-up.
    total: Option<AmountText>,
    /// Iterations in front that are not looked at, such as those that fill a cache: 3 if not given.
    warmup: Option<CountText>,
    /// From one look to the next, in iterations: 1 if not given.
    every: Option<CountText>,
}

impl LeakCheckWire {
    /// `iterations` is how many there are at most, `at` the place of the step.
    pub(super) fn check(&self, at: Position, iterations: u64, checker: &Checker<'_>) -> Result<LeakCheck, Problem> {
        let size = |text: &Option<AmountText>| text.as_ref().map(|text| checker.size(text)).transpose();
        let whole = |text: &Option<CountText>, what, least, default| {
            text.as_ref().map_or(Ok(default), |text| checker.whole(text, what, least..=MAX_ITERATIONS))
        };
        let (per_iteration, total) = (size(&self.per_iteration)?, size(&self.total)?);
        let per_iteration = per_iteration.or(total.is_none().then_some(Bytes::ZERO));
        let check = LeakCheck {
            per_iteration,
            total,
            warmup: whole(&self.warmup, "warmup", 1, WARMUP)?,
            every: whole(&self.every, "every", 1, 1)?,
        };
        let least = check.warmup.saturating_add(check.every);
        if iterations < least {
            let at = self.warmup.as_ref().map_or(at, |text| text.position());
            let message = format!(
                "nothing is compared in {iterations} iterations: a warm-up of {} and one look behind it take {least}",
                check.warmup
            );
            return Err(Problem::new(at, message).help("let it do more iterations, or say `leak_check: { warmup: 1 }`"));
        }
        Ok(check)
    }
}
