//! After which operations a run is checked. A run without failures checks each. Where calls of the device fail, what comes before was checked in the run without;
//! then the operation with the failure and [`BEHIND`] more are checked one by one, and everything at the ends of steps and of the run.

use harness_allocator::device::faulty::Injector;

use super::program::Program;
use super::{Audit, Rig, Stop};
use crate::branches::Branches;

/// Operations behind one with a failure that are checked one by one. What goes wrong behind them and is right again at the end of its step is not seen.
const BEHIND: u64 = 16;

/// From where on a run checks what happens.
#[derive(Clone, Debug, Default)]
pub enum CheckedFrom {
    /// From its beginning, each operation.
    #[default]
    Start,
    /// From this operation of allocators on.
    Operation(u64),
    /// In a copy, from the next operation on that begins in it.
    Branches(Branches),
}

impl CheckedFrom {
    /// Whether there is anything that is not checked.
    pub(super) const fn is_later(&self) -> bool {
        !matches!(self, Self::Start)
    }

    /// Whether it is this operation, which begins now.
    fn is_reached(&self, operation: u64) -> bool {
        match self {
            Self::Start => true,
            Self::Operation(from) => operation >= *from,
            Self::Branches(branches) => branches.reach_operation(operation),
        }
    }
}

/// What is checked now.
#[derive(Debug)]
pub(super) enum Checking {
    /// Nothing yet.
    From(CheckedFrom),
    /// Each operation, up to this one where there is one.
    Operations { until: Option<u64> },
    /// The ends of steps, as often as the audit's budget allows: what that costs is linear in operations and steps.
    Steps,
}

impl Rig {
    /// Whether operations are not checked.
    pub(super) const fn is_asleep(&self) -> bool {
        !matches!(self.checking, Checking::Operations { .. })
    }

    /// An operation of an allocator begins.
    pub(super) fn begin_operation(&mut self) -> Result<(), Stop> {
        let Some(operation) = self.faults.as_ref().map(Injector::begin_operation) else { return Ok(()) };
        match &self.checking {
            Checking::From(from) if from.is_reached(operation) => self.wake(Some(operation + BEHIND)),
            Checking::Operations { until: Some(until) } if operation > *until => {
                self.doze();
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Work is about to be given to a stream.
    pub(super) fn begin_launch(&self) {
        if let Checking::From(CheckedFrom::Branches(branches)) = &self.checking {
            branches.reach_launch();
        }
    }

    /// Checks what is to be checked at the end of a step.
    pub(super) fn check_step(&mut self) -> Result<(), Stop> {
        if matches!(self.checking, Checking::Steps) {
            let mut audits = self.programs.iter_mut().filter_map(|program| program.audit.as_mut());
            if audits.any(Audit::may_check_everything) {
                self.wake(None)?;
                self.doze();
            }
            return Ok(());
        }
        self.in_each_program(|rig| rig.check(|audit, allocator, device| audit.step_ended(allocator, device)))
    }

    /// Checks everything once, and then each operation, up to that one where there is one.
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

    /// From now on only the ends of steps are checked.
    fn doze(&mut self) {
        self.checking = Checking::Steps;
        self.programs.iter_mut().filter_map(|program| program.audit.as_mut()).for_each(Audit::sleep);
    }
}
