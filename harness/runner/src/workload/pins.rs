//! What pins segments: the live blocks of a storm that keep memory from going back to the driver, and freeing just enough of them.

use std::collections::BTreeSet;

use harness_allocator::device::DevicePtr;
use harness_allocator::stats::{BlockInfo, BlockState, PoolKind, SegmentInfo};
use harness_allocator::units::Bytes;

use crate::record::Table;
use crate::rig::Halt;
use crate::scenario::{ReportKey, StepName};
use crate::world::{Done, World};

/// Rows of the table: the segments that are cheapest to unpin.
const MOST_ROWS: usize = 16;

/// A segment, as seen from the storm.
#[derive(Debug)]
struct Pinned {
    address: DevicePtr,
    size: Bytes,
    pool: PoolKind,
    /// `None`: it serves several.
    stream: Option<u32>,
    /// Live blocks of the storm, and of others.
    blocks: u64,
    others: u64,
    bytes: Bytes,
    /// Free pieces: all of them, and the largest.
    free: Bytes,
    largest_free: Bytes,
}

impl Pinned {
    fn of(segment: &SegmentInfo, blocks: &BTreeSet<DevicePtr>) -> Self {
        let live = segment.blocks.iter().filter(|block| block.state != BlockState::Inactive);
        let (ours, others): (Vec<_>, Vec<_>) = live.partition(|block| blocks.contains(&block.address));
        let free = || segment.blocks.iter().filter(|block| block.state == BlockState::Inactive).map(|block| block.size);
        Self {
            address: segment.address,
            size: segment.size,
            pool: segment.pool,
            stream: segment.stream.map(|stream| stream.0),
            blocks: ours.len() as u64,
            others: others.len() as u64,
            bytes: ours.iter().map(|block: &&BlockInfo| block.size).sum(),
            free: free().sum(),
            largest_free: free().max().unwrap_or_default(),
        }
    }

    /// Whether the storm keeps it from going back.
    const fn is_pinned(&self) -> bool {
        self.blocks > 0
    }

    /// Whether `empty_cache` gives it back.
    const fn is_free(&self) -> bool {
        self.blocks + self.others == 0
    }
}

/// All segments, those with the fewest live bytes for their size first.
fn segments(world: &mut World, storm: &StepName) -> Vec<Pinned> {
    let blocks: BTreeSet<DevicePtr> = world.storm(storm).addresses().collect();
    let mut segments: Vec<Pinned> = world.rig.snapshot().iter().map(|segment| Pinned::of(segment, &blocks)).collect();
    // bytes / size, compared without division.
    segments.sort_by_key(|segment| (u128::from(segment.bytes.0) << 64) / u128::from(segment.size.0.max(1)));
    segments
}

/// The table and the sums.
pub(crate) fn list(world: &mut World, storm: &StepName) -> Result<Done, Halt> {
    let segments = segments(world, storm);
    let pinned: Vec<_> = segments.iter().filter(|segment| segment.is_pinned()).collect();
    let whole = segments.iter().filter(|segment| segment.is_free()).count();
    let pinning_bytes: Bytes = pinned.iter().map(|segment| segment.bytes).sum();
    let free: Bytes = pinned.iter().map(|segment| segment.free).sum();
    let mut done = Done::default();
    done.reports.extend([
        (ReportKey::PinnedSegments, pinned.len() as u64),
        (ReportKey::PinningBlocks, pinned.iter().map(|segment| segment.blocks).sum()),
        (ReportKey::PinningBytes, pinning_bytes.0),
        (ReportKey::FreeInPinnedSegments, free.0),
        (ReportKey::FreeSegments, whole as u64),
    ]);
    done.notes.push(format!(
        "{} of {} segments are pinned: {pinning_bytes} of live blocks keep {free} of free memory from going back to the driver",
        pinned.len(),
        segments.len()
    ));
    done.tables.push(table(&pinned));
    Ok(done)
}

fn table(pinned: &[&Pinned]) -> Table {
    let more = pinned.len().saturating_sub(MOST_ROWS);
    let rest = if more > 0 { format!("; {more} more are fuller") } else { String::new() };
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

/// Frees the storm's blocks in the segments that are cheapest to unpin, until the driver would have room for a request of that size.
pub(crate) fn free_for(world: &mut World, storm: &StepName, request: Bytes) -> Result<String, Halt> {
    let unit = world.rig.info().granularity;
    let wanted = request.checked_round_up(unit).unwrap_or(request);
    let segments = segments(world, storm);
    let mut room = world.rig.memory()?.free + segments.iter().filter(|segment| segment.is_free()).map(|segment| segment.size).sum();
    let (mut freed, mut blocks, mut bytes) = (0, 0, Bytes::ZERO);
    for segment in segments.iter().filter(|segment| segment.is_pinned() && segment.others == 0) {
        if room >= wanted {
            break;
        }
        let inside = |address: DevicePtr| address >= segment.address && address < segment.address.offset(segment.size);
        let taken = world.storm(storm).take_where(inside);
        for buffer in taken {
            world.rig.free(buffer)?;
        }
        room += segment.size;
        freed += 1;
        blocks += segment.blocks;
        bytes += segment.bytes;
    }
    let enough = if room < wanted { format!(", not enough for {wanted}: what else is live pins the rest") } else { String::new() };
    Ok(format!("{blocks} blocks ({bytes}) in {freed} segments freed: room for {room} in whole segments{enough}"))
}
