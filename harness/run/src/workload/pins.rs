//! Blocks that pin segments: live blocks of a storm that keep free memory from being released to the driver. [`list`]
//! names them. [`free_for`] frees as few of them as a request needs.
//!
//! The driver gets back whole segments, or whole pages of expandable segments.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;

use harness_allocator::device::DevicePtr;
use harness_allocator::stats::{BlockInfo, BlockState, PoolKind, SegmentInfo};
use harness_allocator::units::Bytes;
use harness_base::words::count;

use crate::context::RunContext;
use crate::rig::{Stop, held_back, release_unit};
use crate::step_result::StepResult;
use harness_record::Table;
use harness_scenario::{ReportKey, StepName};

/// The number of table rows: the segments with the lowest ratio of live bytes to size.
const MOST_ROWS: usize = 16;

/// A segment with its live and free memory.
#[derive(Debug)]
struct Pinned {
    address: DevicePtr,
    size: Bytes,
    pool: PoolKind,
    /// The stream that it serves; `None` for several.
    stream: Option<u32>,
    blocks: u64,
    /// Live blocks outside of the storm.
    others: u64,
    bytes: Bytes,
    /// Free bytes that cannot be released to the driver.
    free: Bytes,
    /// The largest free block.
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

    /// Returns whether a block of the storm prevents its release to the driver.
    const fn is_pinned(&self) -> bool {
        self.blocks > 0
    }

    /// Returns whether nothing in it is live, so `empty_cache` releases it.
    const fn is_free(&self) -> bool {
        self.blocks + self.others == 0
    }
}

/// All segments, in ascending order of the ratio of live bytes to size.
fn segments(ctx: &mut RunContext, storm: &StepName) -> Vec<Pinned> {
    let blocks: BTreeSet<DevicePtr> = ctx.storm(storm).addresses().collect();
    let page = ctx.rig.reserve_unit();
    let mut segments: Vec<Pinned> = ctx.rig.snapshot().iter().map(|segment| Pinned::of(segment, &blocks, page)).collect();
    // A fixed-point ratio of bytes to size.
    segments.sort_by_key(|segment| (u128::from(segment.bytes.0) << 64) / u128::from(segment.size.0.max(1)));
    segments
}

/// Lists the segments that the storm pins, with totals.
pub(crate) fn list(ctx: &mut RunContext, storm: &StepName) -> Result<StepResult, Stop> {
    let segments = segments(ctx, storm);
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
        "{} of {} segments are pinned: {pinning_bytes} of live blocks keep {free} of free memory from being released to the driver",
        pinned.len(),
        segments.len()
    ));
    result.tables.push(table(&pinned));
    Ok(result)
}

fn table(pinned: &[&Pinned]) -> Table {
    let more = pinned.len().saturating_sub(MOST_ROWS);
    let rest = if more > 0 { format!("; {more} more are not shown") } else { String::new() };
    let columns = ["segment", "size", "pool", "stream", "pinning blocks", "pinning bytes", "free", "largest free block"];
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
        title: format!("Pinned segments, the emptiest first{rest}"),
        columns: columns.map(str::to_owned).to_vec(),
        rows: pinned.iter().take(MOST_ROWS).map(row).collect(),
    }
}

/// The unit of release to the driver: a segment, or a page of an expandable one.
#[derive(Debug)]
struct Part {
    size: Bytes,
    /// Blocks of the storm in it; some may extend into its neighbors.
    blocks: BTreeSet<DevicePtr>,
    /// Their bytes inside it.
    bytes: Bytes,
    /// True if other blocks are live in it.
    others: bool,
}

/// All memory as parts, and the parts of each block of the storm.
#[derive(Debug, Default)]
struct Layout {
    parts: Vec<Part>,
    /// The size and the parts of each block.
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

    /// The indexes of the parts that only the storm pins, in ascending order of the ratio of live bytes to size.
    fn cheapest(&self) -> Vec<usize> {
        let pinned = self.parts.iter().enumerate().filter(|(_, part)| !part.others && !part.blocks.is_empty());
        let mut pinned: Vec<(u128, usize)> =
            pinned.map(|(index, part)| ((u128::from(part.bytes.0) << 64) / u128::from(part.size.0.max(1)), index)).collect();
        pinned.sort_unstable();
        pinned.into_iter().map(|(_, index)| index).collect()
    }

    /// Removes a freed block. Returns its size, and the sizes of the parts that can now be released.
    fn free(&mut self, address: DevicePtr) -> (Bytes, Vec<Bytes>) {
        let Some((size, range)) = self.blocks.remove(&address) else { return Default::default() };
        let mut released = Vec::new();
        for part in &mut self.parts[range] {
            part.blocks.remove(&address);
            if part.blocks.is_empty() && !part.others {
                released.push(part.size);
            }
        }
        (size, released)
    }
}

/// Frees blocks of the storm until the driver has room for the request. Starts with the segments, or pages of
/// expandable ones, with the lowest ratio of live bytes to size. Returns a summary.
pub(crate) fn free_for(ctx: &mut RunContext, storm: &StepName, request: Bytes) -> Result<String, Stop> {
    let page = ctx.rig.reserve_unit();
    let wanted = request.checked_round_up(page).unwrap_or(request);
    let addresses: BTreeSet<DevicePtr> = ctx.storm(storm).addresses().collect();
    let segments = ctx.rig.snapshot();
    let mut layout = Layout::default();
    segments.iter().for_each(|segment| layout.add(segment, page, &addresses));
    let free = ctx.rig.free_memory()?;
    let back: Bytes = layout.parts.iter().filter(|part| !part.others && part.blocks.is_empty()).map(|part| part.size).sum();
    // Only whole pages of the device's free memory can serve the request.
    let mut room = Bytes(free.0 / page.0.max(1) * page.0) + back;
    let (mut freed, mut blocks, mut bytes) = (0, 0_u64, Bytes::ZERO);
    for part in layout.cheapest() {
        if room >= wanted {
            break;
        }
        let inside = layout.parts[part].blocks.clone();
        for buffer in ctx.storm(storm).take_where(|address| inside.contains(&address)) {
            let (size, released) = layout.free(buffer.range().start);
            ctx.rig.free(buffer)?;
            blocks += 1;
            bytes += size;
            freed += released.len();
            room += released.into_iter().sum();
        }
    }
    let unit = if segments.iter().any(|segment| segment.expandable) { "page" } else { "segment" };
    let enough = if room < wanted { format!(", not enough for {wanted}: other live blocks pin the rest") } else { String::new() };
    let (blocks, freed) = (count(blocks, "block"), count(freed, unit));
    Ok(format!("{blocks} ({bytes}) in {freed} freed: room for {room} in whole {unit}s{enough}"))
}

#[cfg(test)]
mod tests;
