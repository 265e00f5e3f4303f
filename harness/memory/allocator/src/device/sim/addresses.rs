//! [`Addresses`]: chooses the next addresses, within the address ranges of the simulated device.
//!
//! Expandable segments reserve more addresses than the device has memory, for each pool and stream.
//! So the ranges are larger than the 47 to 49 address bits of a GPU: even a device of 1 PiB does
//! not exhaust them.

use std::{collections::BTreeMap, ops::Range, str::FromStr};

use serde::{Deserialize, Serialize};

use super::ranges::RangeMap;
use crate::{named::named_enum, units::Bytes};

pub(super) const ALLOCATIONS: Range<u64> = 0x7000_0000_0000..1 << 51;
pub(super) const POOLS: Range<u64> = 1 << 51..1 << 52;
pub(super) const RESERVATIONS: Range<u64> = 1 << 52..1 << 60;

/// The range of host memory, which orders and compares copies. It contains no device memory.
pub(super) const HOST: Range<u64> = 1 << 60..1 << 62;

named_enum! {
    /// The order in which addresses are used.
    #[derive(Default, Serialize, Deserialize)]
    #[serde(rename_all = "lowercase")]
    AddressOrder {
        /// From the lowest upward. Freed addresses are reused only when no others remain, so a use
        /// of freed memory is noticed.
        #[default]
        Up = "up",
        /// From the highest downward. Otherwise as `Up`.
        Down = "down",
        /// The lowest free address, as NVIDIA's driver chooses them under WSL. This finds
        /// allocators that confuse an address with its earlier use.
        Reuse = "reuse",
        /// As NVIDIA's driver on Linux: in regions of multiples of 32 MiB, from the highest
        /// downward. A stretch takes a gap that fits, of the region used last, or else a new region
        /// at the highest free addresses. Empty regions are freed.
        Linux = "linux",
    }
}

impl AddressOrder {
    /// The orders of NVIDIA's drivers: on Linux, and under WSL.
    pub const OF_DRIVERS: [Self; 2] = [Self::Linux, Self::Reuse];
}

impl FromStr for AddressOrder {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let names = || {
            Self::ALL
                .iter()
                .map(|order| order.name())
                .collect::<Vec<_>>()
                .join(", ")
        };
        let name = if text == "wsl" { "reuse" } else { text };
        Self::from_name(name)
            .ok_or_else(|| format!("`{text}` is not an order of addresses: write {}", names()))
    }
}

/// The unit of the driver's regions on Linux: their start and size are multiples of it. To align a
/// new region, the driver maps this much more than the region and frees the rest, so a region fits
/// only where one unit more is free. This explains the new address of 10 of 10 regions among freed
/// ones of PyTorch programs on an H200, driver 580.
const REGION: u64 = 32 << 20;

/// A range of addresses that are used in one order.
#[derive(Clone, Debug)]
pub(super) struct Addresses {
    /// The part that was never used. Empty with [`AddressOrder::Reuse`].
    fresh: Range<u64>,
    /// The unused gap after each stretch.
    guard: Bytes,
    /// Freed stretches, or the freed regions of [`AddressOrder::Linux`].
    free: RangeMap<()>,
    regions: Regions,
    order: AddressOrder,
}

/// The regions of [`AddressOrder::Linux`].
#[derive(Clone, Debug, Default)]
struct Regions {
    /// The end of each region and the tick of its last use, by its start.
    ends: BTreeMap<u64, (u64, u64)>,
    tick: u64,
    /// The free parts of regions, with the start of their region. So gaps of two regions stay
    /// apart.
    gaps: RangeMap<u64>,
}

impl Addresses {
    pub(super) fn new(range: Range<u64>, guard: Bytes, order: AddressOrder) -> Self {
        let mut addresses = Self {
            fresh: range,
            guard,
            free: RangeMap::default(),
            regions: Regions::default(),
            order,
        };
        if order == AddressOrder::Reuse {
            // Never used and freed addresses are alike, so a stretch may span both.
            let Range { start, end } = std::mem::replace(&mut addresses.fresh, 0..0);
            addresses.free.insert(start, end, ());
        }
        addresses
    }

    /// Returns a stretch of `len` bytes in the order of these addresses. Constant time for a never
    /// used stretch, otherwise linear in the freed stretches or gaps.
    pub(super) fn take(&mut self, len: Bytes) -> Option<u64> {
        let len = len.0.checked_add(self.guard.0)?;
        match self.order {
            AddressOrder::Up | AddressOrder::Down => {
                self.take_new(len).or_else(|| self.take_again(len))
            }
            AddressOrder::Reuse => self.take_again(len),
            AddressOrder::Linux => self.take_in_region(len),
        }
    }

    fn take_in_region(&mut self, len: u64) -> Option<u64> {
        self.regions.tick += 1;
        let tick = self.regions.tick;
        let fitting = self
            .regions
            .gaps
            .overlapping(0, u64::MAX)
            .filter(|(start, end, _)| end - start >= len);
        let used = |region: &u64| self.regions.ends.get(region).map_or(0, |(_, used)| *used);
        let gap = fitting
            .max_by_key(|(start, _, region)| (used(region), std::cmp::Reverse(*start)))
            .map(|(start, _, region)| (start, *region));
        if let Some((start, region)) = gap {
            self.regions.gaps.remove(start, start + len);
            self.regions
                .ends
                .entry(region)
                .and_modify(|(_, used)| *used = tick);
            return Some(start);
        }
        let size = len.checked_next_multiple_of(REGION)?;
        let room = size.checked_add(REGION)?;
        let freed = self
            .free
            .overlapping(0, u64::MAX)
            .filter(|(start, end, ())| end - start >= room)
            .last()
            .map(|(_, end, ())| end - size);
        let start = match freed {
            Some(start) => {
                self.free.remove(start, start + size);
                start
            }
            None => {
                let start = self.fresh.end.checked_sub(size)? / REGION * REGION;
                if start < self.fresh.start {
                    return None;
                }
                self.fresh.end = start;
                start
            }
        };
        self.regions.ends.insert(start, (start + size, tick));
        if len < size {
            self.regions.gaps.insert(start + len, start + size, start);
        }
        Some(start)
    }

    /// Frees a stretch, and its region if that is empty. A stretch that was not taken from a region
    /// becomes free addresses.
    fn free_in_region(&mut self, start: u64, end: u64) {
        let region = self
            .regions
            .ends
            .range(..=start)
            .next_back()
            .filter(|(_, (region_end, _))| *region_end >= end);
        let Some((&region, &(region_end, _))) = region else {
            return self.free.insert(start, end, ());
        };
        self.regions.gaps.insert(start, end, region);
        if self.regions.gaps.exact(region, region_end).is_some() {
            self.regions.gaps.remove(region, region_end);
            self.regions.ends.remove(&region);
            if region == self.fresh.end {
                // The free regions above belong to the same gap.
                let above = self
                    .free
                    .overlapping(region_end, u64::MAX)
                    .next()
                    .filter(|(start, ..)| *start == region_end);
                self.fresh.end = above.map_or(region_end, |(_, end, ())| end);
                self.free.remove(region_end, self.fresh.end);
            } else {
                self.free.insert(region, region_end, ());
            }
        }
    }

    fn take_new(&mut self, len: u64) -> Option<u64> {
        if self.fresh.end - self.fresh.start < len {
            return None;
        }
        if self.order == AddressOrder::Down {
            self.fresh.end -= len;
            return Some(self.fresh.end);
        }
        self.fresh.start += len;
        Some(self.fresh.start - len)
    }

    /// Uses a given free stretch. Ignores stretches outside the range.
    pub(super) fn take_at(&mut self, start: u64, len: Bytes) {
        let end = start.saturating_add(len.0).saturating_add(self.guard.0);
        // The addresses between it and the used ones stay unused.
        match self.order {
            AddressOrder::Down | AddressOrder::Linux if end > self.fresh.start => {
                self.fresh.end = start.clamp(self.fresh.start, self.fresh.end)
            }
            AddressOrder::Up if start < self.fresh.end => {
                self.fresh.start = end.clamp(self.fresh.start, self.fresh.end)
            }
            _ => {}
        }
        self.free.remove(start, end);
        self.regions.gaps.remove(start, end);
    }

    fn take_again(&mut self, len: u64) -> Option<u64> {
        let (start, _, ()) = self
            .free
            .overlapping(0, u64::MAX)
            .find(|(start, end, ())| end - start >= len)?;
        self.free.remove(start, start + len);
        Some(start)
    }

    /// Frees a used stretch.
    pub(super) fn give_back(&mut self, start: u64, len: Bytes) {
        let end = start + len.0 + self.guard.0;
        if self.order == AddressOrder::Linux {
            self.free_in_region(start, end)
        } else {
            self.free.insert(start, end, ())
        }
    }
}

#[cfg(test)]
mod tests;
