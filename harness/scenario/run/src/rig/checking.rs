//! Selects the operations to check. A run without failures checks every operation. In a run with an
//! injected failure, the earlier operations were already checked in the run without failures. So
//! only the operation with the failure and the next [`CHECKED_AFTER`] are checked one by one, and
//! everything is checked at the ends of steps and of the run.

use harness_allocator::device::faulty::Injector;

use super::{Audit, Rig, Stop, program::Program};
use crate::branches::Branches;

/// The number of operations to check individually after a failure.
const CHECKED_AFTER: u64 = 16;

#[derive(Clone, Debug, Default)]
pub enum CheckedFrom {
    /// At the first operation.
    #[default]
    Start,
    /// At this allocator operation.
    Operation(u64),
    /// In a forked copy, at the first operation that begins in it.
    Branches(Branches),
}

impl CheckedFrom {
    /// Returns whether checks start at this operation, which begins now.
    fn is_reached(&self, operation: u64) -> bool {
        match self {
            Self::Start => true,
            Self::Operation(from) => operation >= *from,
            Self::Branches(branches) => branches.reach_operation(operation),
        }
    }
}

#[derive(Debug)]
pub(super) enum Checking {
    From(CheckedFrom),
    /// Each operation, up to this one if given.
    Operations {
        until: Option<u64>,
    },
    /// The ends of steps, limited by the audit's budget, so the total cost stays linear in
    /// operations and steps.
    Steps,
}

impl Rig {
    pub(super) const fn is_asleep(&self) -> bool {
        !matches!(self.checking, Checking::Operations { .. })
    }

    pub(super) fn begin_operation(&mut self) -> Result<(), Stop> {
        let Some(operation) = self.faults.as_ref().map(Injector::begin_operation) else {
            return Ok(());
        };
        match &self.checking {
            Checking::From(from) if from.is_reached(operation) => {
                self.wake(Some(operation + CHECKED_AFTER))
            }
            Checking::Operations { until: Some(until) } if operation > *until => {
                self.doze();
                Ok(())
            }
            _ => Ok(()),
        }
    }

    pub(super) fn begin_launch(&self) {
        if let Checking::From(CheckedFrom::Branches(branches)) = &self.checking {
            branches.reach_launch();
        }
    }

    pub(super) fn check_step(&mut self) -> Result<(), Stop> {
        if matches!(self.checking, Checking::Steps) {
            let mut audits = self
                .programs
                .iter_mut()
                .filter_map(|program| program.audit.as_mut());
            if audits.any(Audit::may_check_everything) {
                self.wake(None)?;
                self.doze();
            }
            return Ok(());
        }
        self.in_each_program(|rig| {
            rig.check(|audit, allocator, device| audit.step_ended(allocator, device))
        })
    }

    /// Runs a full check, then checks each operation, up to `until` if given.
    pub(super) fn wake(&mut self, until: Option<u64>) -> Result<(), Stop> {
        self.checking = Checking::Operations { until };
        for program in self.programs() {
            self.within(program, |rig| {
                let others = rig.held_by_other_programs();
                let (Program { audit, .. }, device) = rig.program_on_device();
                if let Some(audit) = audit {
                    audit.wake();
                    audit.resume(device, others);
                }
                rig.check(Audit::everything)
            })?;
        }
        self.refresh_memory()
    }

    fn doze(&mut self) {
        self.checking = Checking::Steps;
        self.programs
            .iter_mut()
            .filter_map(|program| program.audit.as_mut())
            .for_each(Audit::sleep);
    }
}
