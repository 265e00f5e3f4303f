//! [`Applied`]: what a policy did.

use harness_allocator::units::Bytes;
use harness_scenario::Plan;

/// What a policy did.
pub(super) struct Applied {
    /// How the next try is done.
    pub(super) plan: Plan,
    /// Whether it found anything to do.
    pub(super) did_something: bool,
    /// Cached bytes that went back to the driver.
    pub(super) given_back: Bytes,
    /// What it did, where its name does not tell.
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
