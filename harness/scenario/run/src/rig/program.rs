//! The programs that allocate on the rig's device. Each has its own allocator, counters and audit,
//! like processes that share a GPU.
//!
//! Memory operations apply to the current program ([`Rig::enter`]). Only frees apply to the
//! buffer's own program. To one program, the memory of the others counts as used by other
//! processes.

use std::collections::BTreeSet;

use harness_allocator::allocator::{Allocator, PrivatePoolId};
use harness_allocator::device::{DeviceMemory, TestDevice};
use harness_allocator::{stats::MemoryStats, units::Bytes};

use super::{Audit, Checks, Finding, Held, Peaks, Rig, Stop};

/// A program on the rig's device, numbered in order of addition.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProgramId(u32);

impl ProgramId {
    pub const FIRST: Self = Self(0);

    pub(super) const fn index(self) -> usize {
        self.0 as usize
    }
}

pub(super) struct Program {
    pub(super) allocator: Box<dyn Allocator>,
    pub(super) audit: Option<Audit>,
    /// The allocator's retries that were already counted.
    pub(super) retries: u64,
    /// Private pools that were begun and not released.
    pub(super) private_pools: BTreeSet<PrivatePoolId>,
    /// The open private pools, the innermost last.
    pub(super) open_pools: Vec<PrivatePoolId>,
    /// The number of pool ids so far.
    pub(super) named_pools: u32,
    /// Its peaks since the start of the run, and the allocator's peaks when they were last read.
    pub(super) peaks: Peaks,
    pub(super) peaks_seen: Peaks,
    /// True after [`Rig::take_construction_failure`] has returned a text.
    is_failure_told: bool,
}

impl Program {
    /// A program without allocations. `start` is the device's memory when the scenario began.
    pub(super) fn new(
        allocator: Box<dyn Allocator>,
        device: &dyn TestDevice,
        start: DeviceMemory,
        (checks, asleep): (Checks, bool),
    ) -> Self {
        let mut audit = match checks {
            Checks::Audit => Some(Audit::new(device, start)),
            Checks::Health => Some(Audit::new(device, start).when_asked()),
            Checks::Accounts | Checks::Timing => None,
        };
        audit.iter_mut().filter(|_| asleep).for_each(Audit::sleep);
        Self {
            allocator,
            audit,
            retries: 0,
            private_pools: BTreeSet::new(),
            open_pools: Vec::new(),
            named_pools: 0,
            peaks: Peaks::default(),
            peaks_seen: Peaks::default(),
            is_failure_told: false,
        }
    }

    /// The device memory that its allocator holds, in whole granules. Linear in blocks.
    pub(super) fn charged(&self, device: &mut dyn TestDevice) -> Bytes {
        let told = self
            .allocator
            .driver_pool()
            .and_then(|pool| device.pooled()?.pool_reserved(pool).ok());
        told.unwrap_or_else(|| {
            let granularity = device.info().granularity;
            self.allocator
                .snapshot()
                .iter()
                .map(|segment| {
                    segment
                        .size
                        .checked_round_up(granularity)
                        .unwrap_or(segment.size)
                })
                .sum()
        })
    }
}

impl Rig {
    pub fn add_program(&mut self, allocator: Box<dyn Allocator>) -> ProgramId {
        let id = ProgramId(u32::try_from(self.programs.len()).unwrap_or(u32::MAX));
        self.programs.push(Program::new(
            allocator,
            &*self.device,
            self.start,
            (self.checks, self.is_asleep()),
        ));
        id
    }

    pub const fn entered(&self) -> ProgramId {
        self.entered
    }

    /// Makes a program the current one: memory operations and allocator figures apply to it from
    /// now on.
    ///
    /// # Panics
    /// If the program belongs to another rig.
    pub fn enter(&mut self, program: ProgramId) {
        assert!(
            program.index() < self.programs.len(),
            "{program:?} does not belong to this rig"
        );
        if program == self.entered {
            return;
        }
        self.entered = program;
        if self.is_asleep() {
            return;
        }
        let others = self.held_by_other_programs();
        if let Some(audit) = &mut self.programs[program.index()].audit {
            audit.resume(&*self.device, others);
        }
    }

    pub fn programs(&self) -> impl Iterator<Item = ProgramId> + use<> {
        (0..self.programs.len() as u32).map(ProgramId)
    }

    pub fn stats_of(&self, program: ProgramId) -> MemoryStats {
        self.programs[program.index()].allocator.stats()
    }

    pub(super) fn within<T>(&mut self, program: ProgramId, act: impl FnOnce(&mut Self) -> T) -> T {
        let entered = self.entered;
        self.enter(program);
        let result = act(self);
        self.enter(entered);
        result
    }

    pub(super) fn in_each_program(
        &mut self,
        mut act: impl FnMut(&mut Self) -> Result<(), Stop>,
    ) -> Result<(), Stop> {
        self.programs()
            .try_for_each(|program| self.within(program, &mut act))
    }

    pub(super) fn program(&self) -> &Program {
        &self.programs[self.entered.index()]
    }

    /// Why the library that the current program's allocator models could not be constructed here.
    /// Returns it once.
    pub fn take_construction_failure(&mut self) -> Option<String> {
        let program = &mut self.programs[self.entered.index()];
        if program.is_failure_told {
            return None;
        }
        let failure = program.allocator.construction_failure();
        program.is_failure_told = failure.is_some();
        failure
    }

    pub(super) fn program_on_device(&mut self) -> (&mut Program, &mut dyn TestDevice) {
        (&mut self.programs[self.entered.index()], &mut *self.device)
    }

    pub(super) fn held_by_other_programs(&mut self) -> Held {
        let mut held = Held::NOTHING;
        for index in (0..self.programs.len()).filter(|&index| index != self.entered.index()) {
            let Program {
                allocator, audit, ..
            } = &mut self.programs[index];
            if let Some(audit) = audit {
                held = held.and(audit.held(&**allocator, &mut *self.device));
            }
        }
        held
    }

    /// The device memory of the other programs, in whole granules. Linear in their blocks.
    pub(super) fn charged_to_other_programs(&mut self) -> Bytes {
        let others = self
            .programs
            .iter()
            .enumerate()
            .filter(|(index, _)| *index != self.entered.index());
        others
            .map(|(_, program)| program.charged(&mut *self.device))
            .sum()
    }

    /// Lends the device, synchronized before and after.
    pub(crate) fn lend<T>(
        &mut self,
        act: impl FnOnce(&mut dyn TestDevice) -> Result<T, Stop>,
    ) -> Result<T, Stop> {
        self.synchronize()?;
        let counted = self.calls();
        let done = self.without_faults(|rig| act(&mut *rig.device));
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

    /// Adds the number of the program to findings if there are several programs.
    pub(super) fn name_program(&self, mut findings: Vec<Finding>) -> Vec<Finding> {
        if self.programs.len() > 1 {
            let number = self.entered.index() + 1;
            findings.iter_mut().for_each(|finding| {
                finding.expected = format!("in program {number}: {}", finding.expected)
            });
        }
        findings
    }
}
