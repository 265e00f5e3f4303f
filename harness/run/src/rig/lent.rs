//! Lends the rig's device to an allocator outside of its programs.

use std::sync::Arc;

use harness_allocator::device::TestDevice;

use super::{Rig, Stop};
use crate::control::Control;

impl Rig {
    /// Lends the device, synchronized before and after. The borrower must release everything it allocates; the audit
    /// detects a leak. Its calls are not counted and do not fail by injected faults.
    pub(crate) fn lend<T>(&mut self, act: impl FnOnce(&mut dyn TestDevice) -> Result<T, Stop>) -> Result<T, Stop> {
        self.synchronize()?;
        let counted = self.calls();
        let done = self.unstruck(|rig| act(&mut *rig.device));
        self.calls_at_start = self.device.calls().since(&counted);
        self.last_calls = self.device.calls();
        let others = self.held_by_other_programs();
        if let Some(audit) = &mut self.programs[self.entered.index()].audit {
            audit.resume(&*self.device, others);
        }
        let done = done?;
        self.synchronize()?;
        Ok(done)
    }

    /// The control of the run, for threads that must stop with it.
    pub(crate) fn control(&self) -> Arc<Control> {
        Arc::clone(&self.control)
    }
}
