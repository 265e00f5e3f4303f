//! What pins segments: the live blocks of a storm that keep memory from going back to the driver. [`list`] names them, [`free_for`] frees as few of
//! them as a request needs.
//!
//! A segment goes back to the driver as a whole, an expandable one page by page.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;

use harness_allocator::device::DevicePtr;
use harness_allocator::stats::{BlockInfo, BlockState, PoolKind, SegmentInfo};
use harness_allocator::units::Bytes;
use harness_base::words::count;

use crate::rig::{Stop, held_back, release_unit};
use crate::step_result::StepResult;
use crate::world::World;
use harness_record::Table;
use harness_scenario::{ReportKey, StepName};

/// Rows of the table: the segments with the fewest live bytes for their size.
const MOST_ROWS: usize = 16;

/// A segment, with what is live in it and what is free.
#[derive(Debug)]
struct Pinned {
    address: DevicePtr,
    size: Bytes,
    pool: PoolKind,
    /// The stream that it serves. `None`: several.
    stream: Option<u32>,
    /// Live blocks of the storm.
    blocks: u64,
    /// Live blocks that are not of the storm.
    others: u64,
    /// Bytes of the storm's live blocks.
    bytes: Bytes,
    /// Free bytes that cannot go back to the driver.
    free: Bytes,
    /// The largest free piece.
    largest_free: Bytes,
}

impl Pinned {
    fn of(segment: &SegmentInfo, blocks: &BTreeSet<DevicePtr>, page: Bytes) -> Self {
        let live = segment.blocks.iter().filter(|block| block.state != BlockState::Inactive);
        let (ours, others): (Vec<_>, Vec<_>) = live.partition(|block| blocks.contains(&block.address));
        let free = || segment.blocks.iter().filter(|block| block.state == BlockState::Inactive);
        Self {
            address: segment.address,
            size: segment.size,
            pool: segment.pool,
            stream: segment.stream.map(|stream| stream.0),
            blocks: ours.len() as u64,
            others: others.len() as u64,
            bytes: ours.iter().map(|block: &&BlockInfo| block.size).sum(),
            free: held_back(segment, page),
            largest_free: free().map(|block| block.size).max().unwrap_or_default(),
        }
    }

    /// Whether a block of the storm keeps it from going back to the driver.
    const fn is_pinned(&self) -> bool {
        self.blocks > 0
    }

    /// Whether nothing is live in it, so that `empty_cache` gives it back.
    const fn is_free(&self) -> bool {
        self.blocks + self.others == 0
    }
}

/// All segments, those with the fewest live bytes for their size first.
fn segments(world: &mut World, storm: &StepName) -> Vec<Pinned> {
    let blocks: BTreeSet<DevicePtr> = world.storm(storm).addresses().collect();
    let page = world.rig.reserve_unit();
    let mut segments: Vec<Pinned> = world.rig.snapshot().iter().map(|segment| Pinned::of(segment, &blocks, page)).collect();
    // bytes / size, compared without division.
    segments.sort_by_key(|segment| (u128::from(segment.bytes.0) << 64) / u128::from(segment.size.0.max(1)));
    segments
}

/// Lists the segments that the storm pins, and adds up what they keep.
pub(crate) fn list(world: &mut World, storm: &StepName) -> Result<StepResult, Stop> {
    let segments = segments(world, storm);
    let pinned: Vec<_> = segments.iter().filter(|segment| segment.is_pinned()).collect();
    let whole = segments.iter().filter(|segment| segment.is_free()).count();
    let pinning_bytes: Bytes = pinned.iter().map(|segment| segment.bytes).sum();
    let free: Bytes = pinned.iter().map(|segment| segment.free).sum();
    let mut result = StepResult::default();
    result.reports.extend([
        (ReportKey::PinnedSegments, pinned.len() as u64),
        (ReportKey::PinningBlocks, pinned.iter().map(|segment| segment.blocks).sum()),
        (ReportKey::PinningBytes, pinning_bytes.0),
        (ReportKey::FreeInPinnedSegments, free.0),
        (ReportKey::FreeSegments, whole as u64),
    ]);
    result.notes.push(format!(
        "{} of {} segments are pinned: {pinning_bytes} of live blocks keep {free} of free memory from going back to the driver",
        pinned.len(),
        segments.len()
    ));
    result.tables.push(table(&pinned));
    Ok(result)
}

fn table(pinned: &[&Pinned]) -> Table {
    let more = pinned.len().saturating_sub(MOST_ROWS);
    let rest = if more > 0 { format!("; {more} more are not shown") } else { String::new() };
    let columns = ["segment", "size", "pool", "stream", "pinning blocks", "pinning bytes", "free", "largest free piece"];
    let row = |segment: &&Pinned| {
        let pool = match segment.pool {
            PoolKind::Small => "small",
            PoolKind::Large => "large",
        };
        vec![
            segment.address.to_string(),
            segment.size.to_string(),
            pool.to_owned(),
            segment.stream.map_or_else(|| "several".to_owned(), |stream| stream.to_string()),
            segment.blocks.to_string(),
            segment.bytes.to_string(),
            segment.free.to_string(),
            segment.largest_free.to_string(),
        ]
    };
    Table {
        title: format!("What pins each segment, the emptiest first{rest}"),
        columns: columns.map(str::to_owned).to_vec(),
        rows: pinned.iter().take(MOST_ROWS).map(row).collect(),
    }
}

/// Memory that goes back to the driver as one, once nothing in it is live: a segment, or a page of an expandable one.
#[derive(Debug)]
struct Part {
    size: Bytes,
    /// Blocks of the storm in it, some of which may lie in its neighbours too.
    blocks: BTreeSet<DevicePtr>,
    /// Bytes of them in it.
    bytes: Bytes,
    /// Whether something else is live in it.
    others: bool,
}

/// What one freed block unpins.
#[derive(Debug, Default)]
struct Unpinned {
    /// The size of the block.
    freed: Bytes,
    /// Parts in which nothing is live any more, in number and in bytes.
    parts: u64,
    bytes: Bytes,
}

/// All memory in parts, and the parts in which each block of the storm lies.
#[derive(Debug, Default)]
struct Layout {
    parts: Vec<Part>,
    /// The size of each block, and its parts.
    blocks: BTreeMap<DevicePtr, (Bytes, RangeInclusive<usize>)>,
}

impl Layout {
    fn add(&mut self, segment: &SegmentInfo, page: Bytes, storm: &BTreeSet<DevicePtr>) {
        let (unit, first) = (release_unit(segment, page).0.max(1), self.parts.len());
        self.parts.extend((0..segment.size.0).step_by(usize::try_from(unit).unwrap_or(usize::MAX)).map(|start| Part {
            size: Bytes(unit.min(segment.size.0 - start)),
            blocks: BTreeSet::new(),
            bytes: Bytes::ZERO,
            others: false,
        }));
        for block in segment.blocks.iter().filter(|block| block.state != BlockState::Inactive && block.size > Bytes::ZERO) {
            let start = block.address.0 - segment.address.0;
            let end = start + block.size.0;
            let index = |at: u64| first + usize::try_from(at / unit).unwrap_or(usize::MAX);
            let range = index(start)..=index(end - 1);
            let ours = storm.contains(&block.address);
            for (part, begin) in
                self.parts[range.clone()].iter_mut().zip((start / unit * unit..).step_by(usize::try_from(unit).unwrap_or(usize::MAX)))
            {
                if ours {
                    part.blocks.insert(block.address);
                    part.bytes += Bytes(end.min(begin + unit) - start.max(begin));
                } else {
                    part.others = true;
                }
            }
            if ours {
                self.blocks.insert(block.address, (block.size, range));
            }
        }
    }

    /// The parts that only the storm pins, by index, with the fewest live bytes for their size first.
    fn cheapest(&self) -> Vec<usize> {
        let pinned = self.parts.iter().enumerate().filter(|(_, part)| !part.others && !part.blocks.is_empty());
        let mut pinned: Vec<(u128, usize)> =
            pinned.map(|(index, part)| ((u128::from(part.bytes.0) << 64) / u128::from(part.size.0.max(1)), index)).collect();
        pinned.sort_unstable();
        pinned.into_iter().map(|(_, index)| index).collect()
    }

    /// Takes a block out that is freed, and returns what goes back to the driver for it.
    fn free(&mut self, address: DevicePtr) -> Unpinned {
        let Some((size, range)) = self.blocks.remove(&address) else { return Unpinned::default() };
        let mut unpinned = Unpinned { freed: size, ..Unpinned::default() };
        for part in &mut self.parts[range] {
            part.blocks.remove(&address);
            if part.blocks.is_empty() && !part.others {
                unpinned.parts += 1;
                unpinned.bytes += part.size;
            }
        }
        unpinned
    }
}

/// Frees blocks of the storm until the driver has room for a request of that size. Segments, or pages of expandable ones, with the fewest live bytes
/// for their size come first. Returns a sentence about what was freed.
pub(crate) fn free_for(world: &mut World, storm: &StepName, request: Bytes) -> Result<String, Stop> {
    let page = world.rig.reserve_unit();
    let wanted = request.checked_round_up(page).unwrap_or(request);
    let addresses: BTreeSet<DevicePtr> = world.storm(storm).addresses().collect();
    let segments = world.rig.snapshot();
    let mut layout = Layout::default();
    segments.iter().for_each(|segment| layout.add(segment, page, &addresses));
    let free = world.rig.free_memory()?;
    let back: Bytes = layout.parts.iter().filter(|part| !part.others && part.blocks.is_empty()).map(|part| part.size).sum();
    // Only whole pages of what is free on the device can serve the request.
    let mut room = Bytes(free.0 / page.0.max(1) * page.0) + back;
    let (mut freed, mut blocks, mut bytes) = (0, 0_u64, Bytes::ZERO);
    for part in layout.cheapest() {
        if room >= wanted {
            break;
        }
        let inside = layout.parts[part].blocks.clone();
        for buffer in world.storm(storm).take_where(|address| inside.contains(&address)) {
            let unpinned = layout.free(buffer.range().start);
            world.rig.free(buffer)?;
            blocks += 1;
            bytes += unpinned.freed;
            freed += unpinned.parts;
            room += unpinned.bytes;
        }
    }
    let unit = if segments.iter().any(|segment| segment.expandable) { "page" } else { "segment" };
    let enough = if room < wanted { format!(", not enough for {wanted}: what else is live pins the rest") } else { String::new() };
    let (blocks, freed) = (count(blocks, "block"), count(freed, unit));
    Ok(format!("{blocks} ({bytes}) in {freed} freed: room for {room} in whole {unit}s{enough}"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::path::Path;
    use std::sync::Arc;

    use harness_allocator::allocator::AllocatorKind;

    use crate::session::{ArmRun, Plan, Selection};
    use harness_devices::DeviceSource;
    use harness_record::Verdict;
    use harness_scenario::Scenario;

    fn passes(steps: &str, allocator: AllocatorKind) {
        let text = format!("about: A test.\nneeds: {{ memory: 512MiB }}\nseed: 3\nsteps:\n{steps}");
        let scenario = Scenario::parse(&text, Path::new("pins.yaml")).unwrap_or_else(|error| panic!("{error}\n{text}"));
        let (scenarios, selection, program) = (vec![scenario.clone()], Selection::default(), "harness".to_owned());
        let plan = Plan { scenarios, selection, seed: None, memory: None, repetitions: 1, audit: true, fail_fast: false, program };
        let arm = ArmRun { scenario: &scenario, allocator: &allocator.into(), repetition: 0 };
        let run = plan.run_arm(&arm, &DeviceSource::simulated(), &Arc::default()).unwrap();
        assert_eq!(run.verdict, Verdict::Passed, "{} notes {:?}", allocator.name(), run.steps);
    }

    #[test]
    fn what_pins_keep_is_what_an_emptied_cache_still_has_free() {
        let steps =
            "  - storm: { id: s, operations: 2000, sizes: { min: 256KiB, max: 64MiB }, live: 400MiB, lifetime: { min: 10, max: 200 } }
  - pins: { storm: s, id: p }
  - empty_cache
  - expect: p.free_in_pinned_segments == reserved_bytes.all.current - allocated_bytes.all.current
";
        passes(steps, AllocatorKind::Caching);
        passes(steps, AllocatorKind::Expandable);
    }

    #[test]
    fn of_expandable_segments_no_more_is_freed_than_the_pages_take() {
        let steps = "  - storm: { id: s, operations: 400, sizes: { min: 1MiB, max: 20MiB }, live: 480MiB, lifetime: { min: 10, max: 300 } }
  - free: { pinning: s, for: 60MiB, id: f }
  - expect: f.freed_bytes <= 120MiB
  - alloc: { buffer: x, size: 60MiB }
";
        passes(steps, AllocatorKind::Expandable);
    }
}
