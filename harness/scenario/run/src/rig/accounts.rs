//! The figures of a run: accounts, device memory, the allocator's counters and structure, and the
//! memory curve.
//!
//! The accounts describe one program. The curve has the sums over all programs and processes, and
//! the device's own figures cover all of them.

use harness_allocator::device::{DeviceCalls, DeviceInfo, DeviceMemory, DevicePtr, StreamId};
use harness_allocator::stats::{BlockState, MemoryStats, SegmentInfo};
use harness_allocator::units::{Bytes, Nanos};

use super::{ProgramId, Rig, Stop};
use crate::control::BlockingCall;
use harness_record::{Accounts, CurvePoint, MemoryFigures};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryState {
    blocks: Vec<(DevicePtr, Bytes, StreamId, BlockState)>,
    pub device_free: Bytes,
}

impl Rig {
    pub fn now(&mut self) -> Nanos {
        self.device.now()
    }

    pub fn stats(&self) -> MemoryStats {
        self.program().allocator.stats()
    }

    /// The structure of the current program's allocator. Linear in blocks.
    pub fn snapshot(&self) -> Vec<SegmentInfo> {
        self.program().allocator.snapshot()
    }

    /// The device's memory. Memory of the scenario's streams counts as context overhead.
    pub fn memory(&mut self) -> Result<DeviceMemory, Stop> {
        self.control.calls(BlockingCall::Memory);
        let memory = self.device.memory()?;
        Ok(DeviceMemory {
            context_overhead: self.start.context_overhead,
            ..memory
        })
    }

    pub fn free_memory(&mut self) -> Result<Bytes, Stop> {
        Ok(self.device.free_memory()?)
    }

    /// The memory state that a request of the current program would meet. Linear in blocks.
    pub fn memory_state(&mut self) -> Result<MemoryState, Stop> {
        let device_free = self.without_faults(|rig| rig.device.free_memory())?;
        let segments = self.snapshot();
        let blocks = segments.iter().flat_map(|segment| &segment.blocks);
        Ok(MemoryState {
            blocks: blocks
                .map(|block| (block.address, block.size, block.stream, block.state))
                .collect(),
            device_free,
        })
    }

    pub fn info(&self) -> &DeviceInfo {
        self.device.info()
    }

    /// The current program's allocator reserves memory for large requests in multiples of this
    /// size.
    pub fn reserve_unit(&self) -> Bytes {
        self.program().allocator.reserve_unit(&*self.device)
    }

    /// All programs' device calls since the rig took the device.
    pub fn calls(&self) -> DeviceCalls {
        self.device.calls().since(&self.calls_at_start)
    }

    pub fn accounts(&mut self) -> Result<Accounts, Stop> {
        self.accounts_of(ProgramId::FIRST)
    }

    pub fn accounts_of(&mut self, program: ProgramId) -> Result<Accounts, Stop> {
        Ok(Accounts::new(&self.stats_of(program), self.memory()?))
    }

    /// The figures of a program since the start of the run.
    pub(crate) fn figures_of(&self, program: ProgramId) -> MemoryFigures {
        let stats = self.stats_of(program);
        self.programs[program.index()]
            .peaks
            .higher(Peaks::of(&stats))
            .figures(stats.num_ooms, stats.num_alloc_retries)
    }

    pub(crate) const fn together(&self) -> Peaks {
        self.together
    }

    /// Adds the points of a step of another process to the curve. `others` is what the remaining
    /// processes hold, and `after` what all hold afterwards. `risen` has the process's new peaks.
    pub(crate) fn plot_process(
        &mut self,
        points: &[CurvePoint],
        risen: Peaks,
        others: Totals,
        after: Totals,
    ) -> Result<(), Stop> {
        self.elsewhere = after;
        if self.is_timed() {
            return Ok(());
        }
        let (own, end) = (self.totals_of_programs(), points.last().copied());
        let held = others.and(own);
        self.together = self.together.higher(held.memory().and(risen));
        for point in points {
            let of_process = Peaks {
                allocated: point.allocated,
                reserved: point.reserved,
            };
            self.together = self.together.higher(held.memory().and(of_process));
            let earlier = |last: u64, now: u64| last.saturating_sub(now);
            self.curve.push(CurvePoint {
                step: self.step,
                allocated: held.allocated + point.allocated,
                active: held.active + point.active,
                reserved: held.reserved + point.reserved,
                ooms: own.ooms + after.ooms - end.map_or(0, |end| earlier(end.ooms, point.ooms)),
                retries: own.retries + after.retries
                    - end.map_or(0, |end| earlier(end.retries, point.retries)),
                ..*point
            });
        }
        // The next points of this process show what the other one has changed.
        self.last_memory = self.memory()?;
        Ok(())
    }

    /// Sets what other processes hold.
    pub(crate) const fn set_elsewhere(&mut self, held: Totals) {
        self.elsewhere = held;
    }

    /// Adds the peak of a program that ran while everything else was idle, such as an `exec` step.
    pub(crate) fn plot_exec(&mut self, peak: Peaks) {
        if self.is_timed() {
            return;
        }
        let held = self.elsewhere.and(self.totals_of_programs());
        let all = held.memory().and(peak);
        self.together = self.together.higher(all);
        let point = self.point(held);
        self.curve.push(point);
        self.curve.push(CurvePoint {
            allocated: all.allocated,
            active: held.active + peak.allocated,
            reserved: all.reserved,
            used: point.used + peak.reserved,
            ..point
        });
    }

    /// Adds the most that programs have held at the same time, if it is a new peak. The allocated
    /// part is unknown.
    pub(crate) fn plot_parallel(&mut self, held: Bytes) {
        if held > self.together.reserved {
            let own = self.elsewhere.and(self.totals_of_programs()).reserved;
            self.plot_exec(Peaks {
                reserved: held.saturating_sub(own),
                allocated: Bytes::ZERO,
            });
        }
    }

    /// The points of the memory curve; empty for a timed run.
    pub fn take_curve(&mut self) -> Vec<CurvePoint> {
        std::mem::take(&mut self.curve).into_points()
    }

    pub(super) fn refresh_memory(&mut self) -> Result<(), Stop> {
        self.last_memory = self.memory()?;
        self.last_calls = self.device.calls();
        Ok(())
    }

    /// Adds a point with the sums over all programs and processes.
    pub(super) fn plot(&mut self) {
        let mut risen = Peaks::default();
        for program in &mut self.programs {
            let stats = program.allocator.stats();
            let (now, peaks) = (Totals::of(&stats), Peaks::of(&stats));
            // Within an operation, memory may be higher than before and after it.
            let beyond = |peak: Bytes, seen: Bytes, now: Bytes| {
                if peak > seen {
                    peak.saturating_sub(now)
                } else {
                    Bytes::ZERO
                }
            };
            risen.allocated += beyond(peaks.allocated, program.peaks_seen.allocated, now.allocated);
            risen.reserved += beyond(peaks.reserved, program.peaks_seen.reserved, now.reserved);
            (program.peaks, program.peaks_seen) = (program.peaks.higher(peaks), peaks);
        }
        let held = self.elsewhere.and(self.totals_of_programs());
        self.together = self.together.higher(held.memory().and(risen));
        self.curve.push(self.point(held));
    }

    fn point(&self, held: Totals) -> CurvePoint {
        CurvePoint {
            at: 0,
            step: self.step,
            allocated: held.allocated,
            active: held.active,
            reserved: held.reserved,
            used: self.last_memory.used_without_contexts(),
            ooms: held.ooms,
            retries: held.retries,
        }
    }

    fn totals_of_programs(&self) -> Totals {
        self.programs
            .iter()
            .fold(Totals::default(), |held, program| {
                held.and(Totals::of(&program.allocator.stats()))
            })
    }
}

/// What several allocators hold, and their counters.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Totals {
    pub(crate) allocated: Bytes,
    pub(crate) active: Bytes,
    pub(crate) reserved: Bytes,
    pub(crate) ooms: u64,
    pub(crate) retries: u64,
}

impl Totals {
    pub(crate) const fn of(stats: &MemoryStats) -> Self {
        Self {
            allocated: Bytes(stats.allocated_bytes.all.current),
            active: Bytes(stats.active_bytes.all.current),
            reserved: Bytes(stats.reserved_bytes.all.current),
            ooms: stats.num_ooms,
            retries: stats.num_alloc_retries,
        }
    }

    const fn memory(self) -> Peaks {
        Peaks {
            allocated: self.allocated,
            reserved: self.reserved,
        }
    }

    pub(crate) fn and(self, other: Self) -> Self {
        Self {
            allocated: self.allocated + other.allocated,
            active: self.active + other.active,
            reserved: self.reserved + other.reserved,
            ooms: self.ooms + other.ooms,
            retries: self.retries + other.retries,
        }
    }
}

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Peaks {
    pub(crate) allocated: Bytes,
    pub(crate) reserved: Bytes,
}

impl Peaks {
    pub(crate) const fn of(stats: &MemoryStats) -> Self {
        Self {
            allocated: Bytes(stats.allocated_bytes.all.peak),
            reserved: Bytes(stats.reserved_bytes.all.peak),
        }
    }

    pub(crate) fn higher(self, other: Self) -> Self {
        Self {
            allocated: self.allocated.max(other.allocated),
            reserved: self.reserved.max(other.reserved),
        }
    }

    /// The peaks that exceed the earlier ones; zeros for the others.
    pub(crate) fn above(self, earlier: Self) -> Self {
        let above = |now: Bytes, earlier: Bytes| if now > earlier { now } else { Bytes::ZERO };
        Self {
            allocated: above(self.allocated, earlier.allocated),
            reserved: above(self.reserved, earlier.reserved),
        }
    }

    fn and(self, other: Self) -> Self {
        Self {
            allocated: self.allocated + other.allocated,
            reserved: self.reserved + other.reserved,
        }
    }

    pub(crate) const fn figures(self, ooms: u64, retries: u64) -> MemoryFigures {
        MemoryFigures {
            peak_reserved: Some(self.reserved),
            peak_allocated: Some(self.allocated),
            ooms: Some(ooms),
            retries: Some(retries),
        }
    }
}
