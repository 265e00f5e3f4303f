//! Storms in threads: several host threads allocate concurrently from one [`SharedAllocator`],
//! PyTorch's multithreaded front, on the rig's device.
//!
//! The seed determines the requests of each thread, whether they succeed or not. The interleaving
//! differs from run to run, so the checks must hold for every interleaving. No address is handed
//! out twice, and blocks keep their contents. After all threads have ended, the structure and the
//! counters match the sum of their operations.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::{collections::BTreeMap, panic::resume_unwind, thread};

use harness_allocator::allocator::caching::{CachingAllocator, Config};
use harness_allocator::allocator::{Allocation, AllocatorError, Request, shared::SharedAllocator};
use harness_allocator::device::{DevicePtr, Tag, TestDevice};
use harness_allocator::sync::lock;
use harness_allocator::{stats::MemoryStats, units::Bytes};

use super::requests::{Operation, Requests};
use crate::context::RunContext;
use crate::context::live_blocks::{Block, LiveBlocks};
use crate::control::{BlockingCall, Control};
use crate::rig::{Finding, Stop, check_structure};
use crate::step_result::{StepResult, Unmet};
use harness_record::{Invariant, Outcome};
use harness_scenario::{ReportKey, Step, steps::storm::Storm};

type Front<'d> = SharedAllocator<&'d mut dyn TestDevice>;

struct Held {
    allocation: Allocation,
    tag: Option<Tag>,
}

/// A request and its result. A failed request keeps its entry, so later requests stay the same.
struct Asked {
    requested: Bytes,
    held: Option<Held>,
}

impl Block for Asked {
    fn requested(&self) -> Bytes {
        self.requested
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counts {
    allocations: u64,
    frees: u64,
    /// OOMs, which the allocator counts.
    ooms: u64,
    /// Requests beyond any device, which the allocator does not count.
    too_large: u64,
}

impl Counts {
    fn and(self, other: Self) -> Self {
        Self {
            allocations: self.allocations + other.allocations,
            frees: self.frees + other.frees,
            ooms: self.ooms + other.ooms,
            too_large: self.too_large + other.too_large,
        }
    }
}

struct Shared<'a, 'd> {
    allocator: &'a Front<'d>,
    storm: &'a Storm,
    control: &'a Control,
    /// The start and length of each live allocation.
    handed_out: Mutex<BTreeMap<DevicePtr, Bytes>>,
    /// Set by a thread that cannot continue, to stop the others.
    stops: AtomicBool,
}

/// Runs the storm in this many threads, then frees and releases everything.
pub(super) fn run(
    ctx: &mut RunContext,
    step: &Step,
    storm: &Storm,
    threads: u64,
) -> Result<StepResult, Stop> {
    let Some(config) = ctx.setup.alloc_conf.clone() else {
        return Ok(Unmet::at(
            step,
            "an allocator that supports threads",
            format!("`{}` does not", ctx.setup.arm),
        )
        .into());
    };
    let requests: Vec<Requests<'_>> = (0..threads)
        .map(|thread| Requests::new(ctx, storm, thread))
        .collect();
    let control = ctx.rig.control();
    let counts = ctx
        .rig
        .lend(|device| storm_on(device, config, storm, requests, &control))?;
    let ooms = counts.ooms + counts.too_large;
    let outcome = if ooms > 0 {
        Outcome::OutOfMemory
    } else {
        Outcome::Done
    };
    let mut result = StepResult {
        outcome,
        ..StepResult::default()
    };
    result.reports.extend([
        (ReportKey::Operations, threads * storm.operations),
        (ReportKey::Allocations, counts.allocations),
        (ReportKey::Frees, counts.frees),
        (ReportKey::Ooms, ooms),
    ]);
    result.notes.push(format!(
        "{threads} threads used one allocator concurrently; their requests are the same in every \
         run, their interleaving is not"
    ));
    Ok(result)
}

/// Runs one thread per sequence of requests on an otherwise idle device.
fn storm_on(
    device: &mut dyn TestDevice,
    config: Config,
    storm: &Storm,
    requests: Vec<Requests<'_>>,
    control: &Control,
) -> Result<Counts, Stop> {
    let granularity = device.info().granularity;
    let allocator = SharedAllocator::new(CachingAllocator::new(config), device);
    let shared = Shared {
        allocator: &allocator,
        storm,
        control,
        handed_out: Mutex::default(),
        stops: AtomicBool::new(false),
    };
    let done = shared
        .do_all(requests)
        .and_then(|all| shared.conclude(all, granularity));
    // Releases everything, whether the storm succeeded or not.
    let closed = allocator.close().map_err(Stop::from);
    done.and_then(|counts| closed.map(|()| counts))
}

impl Shared<'_, '_> {
    fn do_all(
        &self,
        requests: Vec<Requests<'_>>,
    ) -> Result<Vec<(Counts, LiveBlocks<Asked>)>, Stop> {
        thread::scope(|scope| {
            let spawn =
                |(thread, requests)| scope.spawn(move || self.do_one(thread as u64, requests));
            let threads: Vec<_> = requests.into_iter().enumerate().map(spawn).collect();
            // Joins all threads before it returns an error.
            let all: Vec<_> = threads
                .into_iter()
                .map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)))
                .collect();
            all.into_iter().collect()
        })
    }

    fn do_one(
        &self,
        thread: u64,
        mut requests: Requests<'_>,
    ) -> Result<(Counts, LiveBlocks<Asked>), Stop> {
        let (mut counts, mut live) = (Counts::default(), LiveBlocks::default());
        for now in 1..=self.storm.operations {
            if self.stops.load(Ordering::Relaxed) {
                break;
            }
            let did = if self.control.should_stop() {
                Err(Stop::Interrupted)
            } else {
                self.operate((thread, now), &mut requests, &mut counts, &mut live)
            };
            if let Err(stop) = did {
                self.stops.store(true, Ordering::Relaxed);
                return Err(stop);
            }
        }
        Ok((counts, live))
    }

    fn operate(
        &self,
        (thread, now): (u64, u64),
        requests: &mut Requests<'_>,
        counts: &mut Counts,
        live: &mut LiveBlocks<Asked>,
    ) -> Result<(), Stop> {
        match requests.next_operation(live, now) {
            Operation::Free(Asked { held: None, .. }) => {}
            Operation::Free(Asked {
                held: Some(held), ..
            }) => {
                self.free(held)?;
                counts.frees += 1;
            }
            Operation::Allocate(request, lifetime) => {
                let held = self.allocate(request, (thread, now), counts)?;
                live.insert(
                    requests.due(now, lifetime),
                    Asked {
                        requested: request.size,
                        held,
                    },
                );
            }
        }
        Ok(())
    }

    /// `None`: out of memory.
    fn allocate(
        &self,
        request: Request,
        (thread, now): (u64, u64),
        counts: &mut Counts,
    ) -> Result<Option<Held>, Stop> {
        self.control.calls(BlockingCall::Allocate);
        let allocation = match self.allocator.allocate(request) {
            Ok(allocation) => allocation,
            Err(AllocatorError::Device(error)) => return Err(error.into()),
            Err(AllocatorError::OutOfMemory(_)) => {
                counts.ooms += 1;
                return Ok(None);
            }
            Err(AllocatorError::TooLarge { .. }) => {
                counts.too_large += 1;
                return Ok(None);
            }
        };
        counts.allocations += 1;
        note_handed_out(&mut lock(&self.handed_out), &allocation)?;
        let mut held = Held {
            allocation,
            tag: None,
        };
        if self.storm.fill {
            // The odd factor spreads the thread and the operation over all eight bytes, so all tags
            // differ.
            let tag = Tag((((thread + 1) << 32) | now).wrapping_mul(0x9e37_79b9_7f4a_7c15));
            self.control.calls(BlockingCall::Fill);
            self.allocator.lock().device.fill(
                held.allocation.stream(),
                held.allocation.range(),
                tag,
            )?;
            held.tag = Some(tag);
        }
        Ok(Some(held))
    }

    /// Verifies a block's contents and frees it by its address, as PyTorch does.
    fn free(&self, Held { allocation, tag }: Held) -> Result<(), Stop> {
        if let Some(tag) = tag {
            self.control.calls(BlockingCall::Verify);
            self.allocator
                .lock()
                .device
                .verify(allocation.stream(), allocation.range(), tag)?;
        }
        // Removed before the free, because another thread may get the address right after it.
        lock(&self.handed_out).remove(&allocation.ptr());
        self.control.calls(BlockingCall::Free);
        Ok(self.allocator.free(allocation.ptr())?)
    }

    /// Checks the state after all threads have ended, frees the live blocks, and checks that
    /// everything is released.
    fn conclude(
        &self,
        all: Vec<(Counts, LiveBlocks<Asked>)>,
        granularity: Bytes,
    ) -> Result<Counts, Stop> {
        let counts = all
            .iter()
            .fold(Counts::default(), |sum, (counts, _)| sum.and(*counts));
        let left: Vec<Held> = all
            .into_iter()
            .flat_map(|(_, live)| live.into_blocks())
            .filter_map(|asked| asked.held)
            .collect();
        let stats = self.allocator.stats();
        let handed_out = left.iter().map(|held| &held.allocation);
        let mut findings = check_structure(
            granularity,
            self.allocator.snapshot(),
            handed_out.clone(),
            &stats,
        );
        findings.extend(check_counters(
            &counts,
            handed_out.map(Allocation::size).sum(),
            &stats,
        ));
        violated(findings)?;
        left.into_iter().try_for_each(|held| self.free(held))?;
        self.control.calls(BlockingCall::EmptyCache);
        self.allocator.empty_cache()?;
        violated(check_everything_released(&self.allocator.stats()))?;
        Ok(counts)
    }
}

fn violated(findings: Vec<Finding>) -> Result<(), Stop> {
    if findings.is_empty() {
        Ok(())
    } else {
        Err(Stop::Violated(findings))
    }
}

/// Tracks an allocation. An overlap with a live one is a violation.
fn note_handed_out(
    handed_out: &mut BTreeMap<DevicePtr, Bytes>,
    allocation: &Allocation,
) -> Result<(), Stop> {
    let (start, end) = (allocation.ptr(), allocation.ptr().offset(allocation.size()));
    if let Some((address, size)) = handed_out
        .range(..end)
        .next_back()
        .filter(|(address, size)| address.offset(**size) > start)
    {
        let expected = format!(
            "{start} to be free before {} are allocated there",
            allocation.requested()
        );
        let seen = format!("{size} are still in use at {address}, by one of the threads");
        return Err(Stop::Violated(vec![Finding::new(
            Invariant::AllocationsAreDisjoint,
            expected,
            seen,
        )]));
    }
    handed_out.insert(start, allocation.size());
    Ok(())
}

/// Compares the counters with the threads' counts. `live` is the total size of live blocks.
fn check_counters(counts: &Counts, live: Bytes, stats: &MemoryStats) -> Vec<Finding> {
    let Counts {
        allocations,
        frees,
        ooms,
        ..
    } = *counts;
    let figures = [
        (
            "allocation.all.allocated",
            allocations,
            stats.allocation.all.allocated,
        ),
        ("allocation.all.freed", frees, stats.allocation.all.freed),
        (
            "allocated_bytes.all.current",
            live.0,
            stats.allocated_bytes.all.current,
        ),
        ("num_ooms", ooms, stats.num_ooms),
    ];
    let wrong = figures
        .into_iter()
        .filter(|(_, did, counted)| did != counted);
    let finding = |(name, did, counted): (&str, u64, u64)| {
        Finding::new(
            Invariant::CountersEqualStructure,
            format!("{name} = {did}, the sum over all threads"),
            counted.to_string(),
        )
    };
    wrong.map(finding).collect()
}

/// Checks that nothing is reserved after the last free and `empty_cache`.
fn check_everything_released(stats: &MemoryStats) -> Vec<Finding> {
    let reserved = stats.reserved_bytes.all.current;
    let expected = "0 B reserved after the last free and empty_cache";
    let finding = || {
        Finding::new(
            Invariant::EverythingGoesBack,
            expected,
            format!("{reserved} B ({})", Bytes(reserved)),
        )
    };
    (reserved != 0).then(finding).into_iter().collect()
}

#[cfg(test)]
mod tests;
