//! [`Applied`]: the effect of a policy.

use harness_allocator::units::Bytes;
use harness_scenario::Plan;

pub(super) struct Applied {
    /// The plan of the next attempt.
    pub(super) plan: Plan,
    /// True if it found anything to do.
    pub(super) did_something: bool,
    /// Cached bytes released to the driver.
    pub(super) given_back: Bytes,
    /// A description of the effect, if the policy's name is not enough.
    pub(super) then: Option<String>,
}

impl Applied {
    pub(super) fn nothing(plan: &Plan) -> Self {
        Self { plan: plan.clone(), did_something: false, given_back: Bytes::ZERO, then: None }
    }

    pub(super) const fn changed(plan: Plan) -> Self {
        Self { plan, did_something: true, given_back: Bytes::ZERO, then: None }
    }
}
