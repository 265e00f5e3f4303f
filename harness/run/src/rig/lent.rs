//! The rig's device, lent to an allocator that is not one of its programs.

use std::sync::Arc;

use harness_allocator::device::TestDevice;

use super::{Rig, Stop};
use crate::control::Control;

impl Rig {
    /// Lends the device, with no work left on it, and takes it back so. Whoever has it gives everything back that it takes of the device: the audit sees where it
    /// does not. Its calls are not counted, and faults do not strike them.
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

    /// Says when the run should stop, to threads too.
    pub(crate) fn control(&self) -> Arc<Control> {
        Arc::clone(&self.control)
    }
}
