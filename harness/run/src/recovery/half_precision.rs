//! `half_precision`: switches activations to 16-bit numbers.

use harness_scenario::{Plan, Precision};

/// `None`: the precision is already mixed.
pub(super) fn next(plan: &Plan) -> Option<Plan> {
    match plan.precision {
        Precision::Fp32 => Some(Plan { precision: Precision::Mixed, ..plan.clone() }),
        Precision::Mixed => None,
    }
}
