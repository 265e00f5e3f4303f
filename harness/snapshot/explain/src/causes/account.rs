//! Sums memory at a moment, and computes the memory that a failed request lacked.

use std::collections::{BTreeMap, BTreeSet};

use harness_allocator::stats::{BlockState, PoolKind};
use harness_allocator::{allocator::caching::Config, device::DeviceMemory, units::Bytes};
use harness_record::{Accounts, FailedRequest, StreamPool, UnlistedSegments};
use harness_trace::snapshot::{Action, Event, MempoolId, Segment};

use super::ExplainError;
use crate::byte_cause::{ByteCause, CauseBytes, SiteBytes};
use crate::pins::{self, Pinner};
use crate::sites::{SiteId, Sites};
use crate::view::{DeviceSize, RefusedRequest, TotalKnown, Totals, View, pool_mismatch};
use crate::{attempts, idle::IdleStream};

impl View<'_> {
    pub(super) fn request(&self) -> Option<RefusedRequest> {
        let (index, event) = self.oom()?;
        let by_rule = |rule: fn(&Config, u64) -> Option<u64>, size: Bytes| {
            if self.is_foreign {
                size
            } else {
                rule(self.config, size.get()).map_or(size, Bytes)
            }
        };
        let rounded = by_rule(Config::round, event.size);
        let pool = if self.is_foreign {
            PoolKind::Large
        } else {
            PoolKind::of_block(rounded)
        };
        let recorded = self.snapshot.pool_of(event);
        let has_private_pools = self
            .state
            .segments
            .iter()
            .any(|segment| !segment.private_pool.is_default());
        let id = self.sites.of_event(index);
        Some(RefusedRequest {
            requested: event.size,
            rounded,
            asked: by_rule(Config::segment_size, rounded),
            stream: event.stream,
            pool,
            private_pool: recorded.unwrap_or_else(|| self.likely_pool(index, event.stream)),
            is_pool_inferred: recorded.is_none() && has_private_pools,
            site: self.sites.get(id).name.clone(),
            id,
        })
    }

    /// PyTorch up to 2.11 does not record a request's pool. A request for the default pool releases
    /// that pool's cached memory before it fails; a request for a private pool releases nothing. So
    /// if cached memory is left, the request probably used the private pool of the last request on
    /// its stream that used one. If all segments of a stream are in one private pool, as during the
    /// capture of a CUDA graph, requests on that stream probably use the same pool. A capture
    /// cannot use the default stream.
    fn likely_pool(&self, request: usize, stream: u64) -> MempoolId {
        let of_stream = || {
            self.state
                .segments
                .iter()
                .filter(|segment| segment.stream == stream)
        };
        let is_whole = |segment: &Segment| {
            pins::pieces(segment, self.config).any(|piece| piece.whole > Bytes::ZERO)
        };
        let mut pools = of_stream().map(|segment| segment.private_pool);
        let only = pools
            .next()
            .filter(|&first| pools.all(|pool| pool == first));
        if self
            .state
            .segments
            .iter()
            .any(|segment| segment.private_pool.is_default() && is_whole(segment))
        {
            let around = |event: &Event| {
                of_stream().find(|segment| {
                    (segment.address..segment.address + segment.size.0).contains(&event.address)
                })
            };
            let mut earlier = self.history.events()[..request].iter().rev();
            let last = earlier.find_map(|event| {
                let is_alloc = event.action == Action::Alloc && event.stream == stream;
                around(event).filter(|segment| is_alloc && !segment.private_pool.is_default())
            });
            return last
                .map(|segment| segment.private_pool)
                .or(only)
                .unwrap_or_default();
        }
        only.filter(|_| stream != 0 && attempts::given_back(self).is_empty())
            .unwrap_or_default()
    }

    pub(super) fn account(
        &self,
        request: Option<&RefusedRequest>,
        idle: &[IdleStream],
    ) -> (Totals, Held) {
        let mut totals = Totals {
            device_free: self.oom().map(|(_, event)| Bytes(event.address)),
            ..Totals::default()
        };
        let mut held = Held::default();
        for segment in &self.state.segments {
            totals.reserved += segment.size;
            for block in &segment.blocks {
                match block.state {
                    BlockState::Allocated => {
                        let (site, requested) =
                            (self.site_of(block), block.requested.min(block.size));
                        totals.requested += requested;
                        totals.allocated += block.size;
                        totals.active += block.size;
                        held.add(ByteCause::Allocated, Some(site), requested);
                        if requested < block.size {
                            held.add(ByteCause::Rounding, Some(site), block.size - requested);
                        }
                    }
                    BlockState::PendingFree => {
                        totals.requested += block.requested.min(block.size);
                        totals.active += block.size;
                        held.add(
                            ByteCause::PendingFree,
                            Some(self.site_of(block)),
                            block.size,
                        );
                    }
                    BlockState::Inactive => {}
                }
            }
            let of_pytorch = request.filter(|_| !self.is_foreign);
            let closed_to_request = of_pytorch.and_then(|request| pool_mismatch(segment, request));
            let without_request = || match segment.private_pool {
                MempoolId::DEFAULT => idle
                    .iter()
                    .any(|idle| idle.stream == segment.stream)
                    .then_some(ByteCause::OtherStream),
                _ => Some(ByteCause::PrivatePool),
            };
            let elsewhere = if request.is_none() {
                without_request()
            } else {
                closed_to_request
            };
            let pinner = Pinner::new(self, segment);
            for piece in pins::pieces(segment, self.config) {
                if piece.whole > Bytes::ZERO {
                    let cause = elsewhere.unwrap_or(ByteCause::WholeSegments);
                    held.add(cause, None, piece.whole);
                }
                if piece.pinned > Bytes::ZERO {
                    let site = pinner.of(&piece).map(|block| self.site_of(block));
                    let cause = elsewhere.unwrap_or(ByteCause::InactiveSplit);
                    held.add(cause, site, piece.pinned);
                }
            }
        }
        (totals, held)
    }

    /// The device's memory, and the part that the allocator does not hold.
    pub(super) fn size_of_device(&self, given: Option<Bytes>) -> Result<DeviceSize, ExplainError> {
        let reserved = self.state.reserved();
        let held = self.history.reserved();
        let seen = |index: usize| held[index] + Bytes(self.history.events()[index].address);
        let of_ooms = self
            .history
            .events()
            .iter()
            .enumerate()
            .filter(|(_, event)| event.action == Action::Oom);
        let at_ooms = of_ooms.map(|(index, _)| seen(index)).max();
        let free_now = self.oom().map(|(_, event)| Bytes(event.address));
        let known = free_now
            .map(|free| reserved + free)
            .or(at_ooms)
            .filter(|&known| known >= reserved);
        let most_held = held.iter().copied().max().unwrap_or_default().max(reserved);
        let (least, what) = match known.max(at_ooms) {
            Some(known) if known > most_held => {
                (known, "reserved and free when a request was refused")
            }
            _ => (most_held, "reserved at one time"),
        };
        if let Some(given) = given.filter(|&given| given < least) {
            return Err(ExplainError::MemoryTooSmall {
                given,
                least,
                device: self.device,
                what,
            });
        }
        let recorded = self
            .snapshot
            .run()
            .map(|run| run.memory)
            .filter(|&memory| memory >= least);
        let told = given.or(recorded);
        let total = told.or(known).unwrap_or(reserved);
        let unreserved = total - reserved;
        let mut outside = Vec::new();
        let mut add = |cause, bytes| {
            if bytes > Bytes::ZERO {
                outside.push(CauseBytes::new(cause, bytes));
            }
        };
        match free_now {
            Some(free) => {
                add(ByteCause::OthersHold, unreserved - free);
                add(ByteCause::Free, free);
            }
            None if told.is_none() => add(ByteCause::Free, unreserved),
            None => add(ByteCause::FreeOrOthersHold, unreserved),
        }
        let known = match (given, recorded, known) {
            (Some(_), _, _) => TotalKnown::Given,
            (None, Some(_), _) => TotalKnown::Recorded,
            (None, None, Some(_)) => TotalKnown::AtOom,
            (None, None, None) => TotalKnown::ReservedOnly,
        };
        Ok(DeviceSize {
            total,
            known,
            outside,
        })
    }

    pub(super) fn failed_request(
        &self,
        request: &RefusedRequest,
        totals: Totals,
        size: &DeviceSize,
    ) -> FailedRequest {
        let free = totals.device_free.unwrap_or_default();
        let is_own = |segment: &&Segment| segment.private_pool == request.private_pool;
        let segments = &self.state.segments;
        let of_segments = segments.iter().map(|segment| segment.stream);
        let streams = of_segments.chain([0, request.stream]);
        let streams = Vec::from_iter(BTreeSet::from_iter(streams));
        let stream_name = |handle: u64| {
            if handle == 0 {
                "default".to_owned()
            } else {
                format!("{handle:#x}")
            }
        };
        let closed = segments
            .iter()
            .filter(|segment| !is_own(segment))
            .flat_map(|segment| &segment.blocks);
        let free_in_others = closed
            .filter(|block| block.state == BlockState::Inactive)
            .map(|block| block.size);
        let missing = attempts::missing(self, request);
        let pieces = (segments.iter()).flat_map(|segment| pins::pieces(segment, self.config));
        let inactive_split = pieces.map(|piece| piece.pinned).sum();
        let device = DeviceMemory {
            total: size.total,
            free,
            used: size.total.saturating_sub(free),
            ..DeviceMemory::default()
        };
        FailedRequest {
            requested: request.requested,
            stream: number(&streams, request.stream),
            lacking: missing.bytes,
            asked: missing.from_driver,
            limit: attempts::limit(self, totals, size, missing.from_driver),
            allocator_limit: None,
            program_limit: None,
            injected: None,
            accounts: Accounts {
                requested: totals.requested,
                allocated: totals.allocated,
                active: totals.active,
                reserved: totals.reserved,
                peak_allocated: totals.allocated,
                peak_reserved: totals.reserved,
                retries: 0,
                ooms: 1,
                device,
            },
            inactive_split,
            lanes: Some(lanes(segments.iter().filter(is_own), &streams)),
            other_private_pools: free_in_others.collect(),
            is_pool_inferred: request.is_pool_inferred,
            streams: (0_u32..)
                .zip(&streams)
                .map(|(number, &handle)| (number, stream_name(handle)))
                .collect(),
            pinned: Vec::new(),
            pinned_unlisted: UnlistedSegments::default(),
            keeps_free_segments: false,
        }
    }
}

#[derive(Default)]
pub(super) struct Held(BTreeMap<ByteCause, BTreeMap<Option<SiteId>, (Bytes, u64)>>);

impl Held {
    fn add(&mut self, cause: ByteCause, site: Option<SiteId>, bytes: Bytes) {
        let (sum, count) = self.0.entry(cause).or_default().entry(site).or_default();
        *sum += bytes;
        *count += 1;
    }

    pub(super) fn into_causes(self, sites: &Sites) -> Vec<CauseBytes> {
        let cause = |(cause, of): (ByteCause, BTreeMap<Option<SiteId>, (Bytes, u64)>)| {
            let bytes = of.values().map(|&(bytes, _)| bytes).sum();
            let blocks = of.values().map(|&(_, blocks)| blocks).sum();
            let named = of.into_iter().filter_map(|(id, (bytes, blocks))| {
                id.map(|id| SiteBytes {
                    site: sites.get(id).name.clone(),
                    id,
                    bytes,
                    blocks,
                })
            });
            let mut sites: Vec<SiteBytes> = named.collect();
            sites.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.site.cmp(&b.site)));
            CauseBytes {
                blocks,
                sites,
                ..CauseBytes::new(cause, bytes)
            }
        };
        self.0.into_iter().map(cause).collect()
    }
}

/// A small number for a stream's handle, one of the ascending `streams`. The default stream is 0.
fn number(streams: &[u64], handle: u64) -> u32 {
    streams
        .binary_search(&handle)
        .map_or(u32::MAX, |index| index as u32)
}

/// Free and pending memory by pool and stream.
fn lanes<'a>(segments: impl Iterator<Item = &'a Segment>, streams: &[u64]) -> Vec<StreamPool> {
    let mut lanes: BTreeMap<(PoolKind, u32), StreamPool> = BTreeMap::new();
    for segment in segments {
        let stream = number(streams, segment.stream);
        let lane = lanes
            .entry((segment.pool, stream))
            .or_insert_with(|| StreamPool::new(Some(segment.pool), stream));
        for block in &segment.blocks {
            lane.add(block.state, block.size);
        }
    }
    lanes.into_values().collect()
}
