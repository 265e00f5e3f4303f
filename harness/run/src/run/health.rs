//! Health checks: everything is looked at after each so many steps and operations, for runs that are too long to be audited all the time.

use super::runner::Runner;
use crate::rig::{Checks, Stop};
use crate::world::World;

impl Runner<'_, '_> {
    /// Whether this run has health checks.
    pub(super) fn has_health_checks(&self) -> bool {
        self.checks != Checks::Timing && self.request.scenario.health_check.is_some()
    }

    /// A step, or an operation of one, is over: checks everything if it is time to.
    pub(super) fn check_health(&mut self, world: &mut World) -> Result<(), Stop> {
        let Some(every) = self.request.scenario.health_check.filter(|_| self.has_health_checks()) else { return Ok(()) };
        self.operations += 1;
        if !self.operations.is_multiple_of(every) {
            return Ok(());
        }
        world.verify_live()?;
        world.verify_storms()?;
        world.rig.check_health()
    }
}
