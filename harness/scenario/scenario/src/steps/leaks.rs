//! `leak_check` of a loop or a training.

use harness_allocator::units::Bytes;
use harness_language::schema::JsonSchema;
use serde::Deserialize;

use crate::checker::Checker;
use harness_language::error::Problem;
use harness_language::located::{Located, Position};
use harness_language::text::{AmountText, CountText};

/// Largest `warmup` and `every`.
pub const MAX_ITERATIONS: u64 = 1_000_000;
const WARMUP: u64 = 3;

/// Finds leaks. After each iteration it compares the allocated bytes of each allocation site. A
/// site is a step with the name of its buffer, or a kind of tensor of a training. All numbered
/// buffers of a step are one site. The run fails if a site grows by more than the limit. The report
/// shows the growth per iteration and how long memory would last. Memory that is held temporarily
/// does not count: the check compares the minimum of the first half of the iterations with the
/// minimum of the second half.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename = "leak_check")]
pub struct LeakCheck<B = Bytes, N = u64> {
    /// Most growth of a site per iteration, on average. Default: 0B if `total` is not given either.
    pub per_iteration: Option<B>,
    /// Most growth of a site in total after the warm-up.
    pub total: Option<B>,
    /// Iterations at the start that are not checked, for example because they fill a cache.
    /// Default: 3.
    pub warmup: N,
    /// Iterations from one check to the next. Default: 1.
    pub every: N,
}

pub(crate) type LeakCheckWire = LeakCheck<AmountText, Option<CountText>>;

pub(super) fn check(
    given: Option<&Located<LeakCheckWire>>,
    iterations: u64,
    checker: &Checker<'_>,
) -> Result<Option<LeakCheck>, Problem> {
    given
        .map(|check| check.value.check(check.at, iterations, checker))
        .transpose()
}

impl LeakCheckWire {
    fn check(
        &self,
        at: Position,
        iterations: u64,
        checker: &Checker<'_>,
    ) -> Result<LeakCheck, Problem> {
        let size =
            |text: &Option<AmountText>| text.as_ref().map(|text| checker.size(text)).transpose();
        let (per_iteration, total) = (size(&self.per_iteration)?, size(&self.total)?);
        let per_iteration = per_iteration.or(total.is_none().then_some(Bytes::ZERO));
        let check = LeakCheck {
            per_iteration,
            total,
            warmup: checker.whole_or(self.warmup.as_ref(), "warmup", 1..=MAX_ITERATIONS, WARMUP)?,
            every: checker.whole_or(self.every.as_ref(), "every", 1..=MAX_ITERATIONS, 1)?,
        };
        let least = check.warmup.saturating_add(check.every);
        if iterations < least {
            let at = self.warmup.as_ref().map_or(at, |text| text.at);
            let message = format!(
                "{iterations} iterations are too few: a warm-up of {} and one check after it need \
                 {least}",
                check.warmup
            );
            return Err(Problem::new(at, message)
                .help("run more iterations, or set `leak_check: { warmup: 1 }`"));
        }
        Ok(check)
    }
}
