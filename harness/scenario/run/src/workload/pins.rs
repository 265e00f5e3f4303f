//! Blocks that pin segments: live blocks of a storm that keep free memory from being released to
//! the driver. [`list`] names them. [`free_for`] frees as few of them as a request needs.
//!
//! The driver gets back whole segments, or whole pages of expandable segments.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;

use harness_allocator::stats::{BlockInfo, BlockState, PoolKind, SegmentInfo};
use harness_allocator::{device::DevicePtr, units::Bytes};
use harness_base::words::count;

use crate::rig::{Stop, held_back, release_unit};
use crate::{context::RunContext, step_result::StepResult};
use harness_record::Table;
use harness_scenario::{ReportKey, StepName};

/// The number of table rows: the segments with the lowest ratio of live bytes to size.
const MOST_ROWS: usize = 16;

struct Pinned {
    segment: SegmentInfo,
    /// The live blocks of the storm, and the live blocks outside of it.
    blocks: u64,
    others: u64,
    /// The live bytes of the storm.
    bytes: Bytes,
    /// Free bytes that cannot be released to the driver.
    free: Bytes,
}

impl Pinned {
    fn new(segment: SegmentInfo, blocks: &BTreeSet<DevicePtr>, page: Bytes) -> Self {
        let live = segment
            .blocks
            .iter()
            .filter(|block| block.state != BlockState::Inactive);
        let (ours, others): (Vec<&BlockInfo>, Vec<_>) =
            live.partition(|block| blocks.contains(&block.address));
        let bytes = ours.iter().map(|block| block.size).sum();
        Self {
            blocks: ours.len() as u64,
            others: others.len() as u64,
            bytes,
            free: held_back(&segment, page),
            segment,
        }
    }
}

/// A fixed-point ratio of live bytes to size.
fn ratio(live: Bytes, size: Bytes) -> u128 {
    (u128::from(live.0) << 64) / u128::from(size.0.max(1))
}

/// All segments, in ascending order of the ratio of live bytes to size.
fn segments(ctx: &mut RunContext, storm: &StepName) -> Vec<Pinned> {
    let blocks: BTreeSet<DevicePtr> = ctx.storm(storm).addresses().collect();
    let page = ctx.rig.reserve_unit();
    let mut segments: Vec<Pinned> = ctx
        .rig
        .snapshot()
        .into_iter()
        .map(|segment| Pinned::new(segment, &blocks, page))
        .collect();
    segments.sort_by_key(|pinned| ratio(pinned.bytes, pinned.segment.size));
    segments
}

/// Lists the segments that the storm pins, with totals.
pub(crate) fn list(ctx: &mut RunContext, storm: &StepName) -> Result<StepResult, Stop> {
    let segments = segments(ctx, storm);
    let pinned: Vec<_> = segments
        .iter()
        .filter(|segment| segment.blocks > 0)
        .collect();
    let whole = segments
        .iter()
        .filter(|segment| segment.blocks + segment.others == 0)
        .count();
    let pinning_bytes: Bytes = pinned.iter().map(|segment| segment.bytes).sum();
    let free: Bytes = pinned.iter().map(|segment| segment.free).sum();
    let mut result = StepResult::default();
    result.reports.extend([
        (ReportKey::PinnedSegments, pinned.len() as u64),
        (
            ReportKey::PinningBlocks,
            pinned.iter().map(|segment| segment.blocks).sum(),
        ),
        (ReportKey::PinningBytes, pinning_bytes.0),
        (ReportKey::FreeInPinnedSegments, free.0),
        (ReportKey::FreeSegments, whole as u64),
    ]);
    result.notes.push(format!(
        "{} of {} segments are pinned: {pinning_bytes} of live blocks keep {free} of free memory \
         from being released to the driver",
        pinned.len(),
        segments.len()
    ));
    result.tables.push(table(&pinned));
    Ok(result)
}

fn table(pinned: &[&Pinned]) -> Table {
    let more = pinned.len().saturating_sub(MOST_ROWS);
    let rest = if more > 0 {
        format!("; {more} more are not shown")
    } else {
        String::new()
    };
    let columns = [
        "segment",
        "size",
        "pool",
        "stream",
        "pinning blocks",
        "pinning bytes",
        "free",
        "largest free block",
    ];
    let row = |Pinned {
                   segment,
                   blocks,
                   bytes,
                   free,
                   ..
               }: &&Pinned| {
        let pool = if segment.pool == PoolKind::Small {
            "small"
        } else {
            "large"
        };
        let stream = segment
            .stream
            .map_or_else(|| "several".to_owned(), |stream| stream.0.to_string());
        let largest = segment
            .blocks
            .iter()
            .filter(|block| block.state == BlockState::Inactive)
            .map(|block| block.size)
            .max();
        let sizes = [bytes, free, &largest.unwrap_or_default()].map(Bytes::to_string);
        [
            segment.address.to_string(),
            segment.size.to_string(),
            pool.to_owned(),
            stream,
            blocks.to_string(),
        ]
        .into_iter()
        .chain(sizes)
        .collect()
    };
    Table {
        title: format!("Pinned segments, the emptiest first{rest}"),
        columns: columns.map(str::to_owned).to_vec(),
        rows: pinned.iter().take(MOST_ROWS).map(row).collect(),
    }
}

/// The unit of release to the driver: a segment, or a page of an expandable one.
#[derive(Clone, Default)]
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
#[derive(Default)]
struct Layout {
    parts: Vec<Part>,
    /// The size and the parts of each block.
    blocks: BTreeMap<DevicePtr, (Bytes, RangeInclusive<usize>)>,
}

impl Layout {
    fn add(&mut self, segment: &SegmentInfo, page: Bytes, storm: &BTreeSet<DevicePtr>) {
        let (unit, first) = (release_unit(segment, page).0.max(1), self.parts.len());
        let starts = (0..segment.size.0).step_by(usize::try_from(unit).unwrap_or(usize::MAX));
        self.parts.extend(starts.map(|start| Part {
            size: Bytes(unit.min(segment.size.0 - start)),
            ..Part::default()
        }));
        for block in segment
            .blocks
            .iter()
            .filter(|block| block.state != BlockState::Inactive && block.size > Bytes::ZERO)
        {
            let start = block.address.0 - segment.address.0;
            let end = start + block.size.0;
            let index = |at: u64| first + usize::try_from(at / unit).unwrap_or(usize::MAX);
            let range = index(start)..=index(end - 1);
            let ours = storm.contains(&block.address);
            for (part, index) in self.parts[range.clone()].iter_mut().zip(start / unit..) {
                part.others |= !ours;
                if ours {
                    part.blocks.insert(block.address);
                    part.bytes += Bytes(end.min((index + 1) * unit) - start.max(index * unit));
                }
            }
            if ours {
                self.blocks.insert(block.address, (block.size, range));
            }
        }
    }

    /// The indexes of the parts that only the storm pins, in ascending order of the ratio of live
    /// bytes to size.
    fn cheapest(&self) -> Vec<usize> {
        let pinned = self
            .parts
            .iter()
            .enumerate()
            .filter(|(_, part)| !part.others && !part.blocks.is_empty());
        let mut pinned: Vec<(u128, usize)> = pinned
            .map(|(index, part)| (ratio(part.bytes, part.size), index))
            .collect();
        pinned.sort_unstable();
        pinned.into_iter().map(|(_, index)| index).collect()
    }

    /// Removes a freed block. Returns its size, and the sizes of the parts that can now be
    /// released.
    fn free(&mut self, address: DevicePtr) -> (Bytes, Vec<Bytes>) {
        let Some((size, range)) = self.blocks.remove(&address) else {
            return Default::default();
        };
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

/// Frees blocks of the storm until the driver has room for the request. Starts with the segments,
/// or pages of expandable ones, with the lowest ratio of live bytes to size. Returns a summary.
pub(crate) fn free_for(
    ctx: &mut RunContext,
    storm: &StepName,
    request: Bytes,
) -> Result<String, Stop> {
    let page = ctx.rig.reserve_unit();
    let wanted = request.checked_round_up(page).unwrap_or(request);
    let addresses: BTreeSet<DevicePtr> = ctx.storm(storm).addresses().collect();
    let segments = ctx.rig.snapshot();
    let mut layout = Layout::default();
    segments
        .iter()
        .for_each(|segment| layout.add(segment, page, &addresses));
    let free = ctx.rig.free_memory()?;
    let back: Bytes = layout
        .parts
        .iter()
        .filter(|part| !part.others && part.blocks.is_empty())
        .map(|part| part.size)
        .sum();
    // Only whole pages of the device's free memory can serve the request.
    let mut room = Bytes(free.0 / page.0.max(1) * page.0) + back;
    let (mut freed, mut blocks, mut bytes) = (0, 0_u64, Bytes::ZERO);
    for part in layout.cheapest() {
        if room >= wanted {
            break;
        }
        let inside = layout.parts[part].blocks.clone();
        for buffer in ctx
            .storm(storm)
            .take_where(|address| inside.contains(&address))
        {
            let (size, released) = layout.free(buffer.range().start);
            ctx.rig.free(buffer)?;
            blocks += 1;
            bytes += size;
            freed += released.len();
            room += released.into_iter().sum();
        }
    }
    let unit = if segments.iter().any(|segment| segment.expandable) {
        "page"
    } else {
        "segment"
    };
    let enough = if room < wanted {
        format!(", not enough for {wanted}: other live blocks pin the rest")
    } else {
        String::new()
    };
    let (blocks, freed) = (count(blocks, "block"), count(freed, unit));
    Ok(format!(
        "{blocks} ({bytes}) in {freed} freed: room for {room} in whole {unit}s{enough}"
    ))
}

#[cfg(test)]
mod tests;
