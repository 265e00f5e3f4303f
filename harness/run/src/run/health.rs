//! Health checks: a full check every N steps and operations, for runs that are too long for a continuous audit.

use super::runner::Runner;
use crate::context::RunContext;
use crate::rig::{Checks, Stop};

impl Runner<'_, '_> {
    pub(super) fn has_health_checks(&self) -> bool {
        self.checks != Checks::Timing && self.request.scenario.health_check.is_some()
    }

    /// Counts a finished step or operation, and runs a full check every N of them.
    pub(super) fn check_health(&mut self, ctx: &mut RunContext) -> Result<(), Stop> {
        let Some(every) = self.request.scenario.health_check.filter(|_| self.has_health_checks()) else { return Ok(()) };
        self.operations += 1;
        if !self.operations.is_multiple_of(every) {
            return Ok(());
        }
        ctx.verify_live()?;
        ctx.verify_storms()?;
        ctx.rig.check_health()
    }
}
