//! Replays a program with many settings and allocators: [`Grid`].

use std::convert::Infallible;

use harness_allocator::allocator::caching::{ConfError, Config, TorchVersion};
use harness_allocator::allocator::{AllocatorKind, AllocatorSpec};
use harness_allocator::device::sim::GRANULARITY;
use harness_allocator::units::{Bytes, Nanos};
use harness_base::parallel::in_parallel;
use harness_trace::program::{
    Placement, PreparedReplay, ProgramError, RecordedProgram, ReplaySetup, Replayed,
};
use serde::Serialize;

use crate::least::{Least, least_memory};

/// More than any device has.
pub const UNLIMITED: Bytes = Bytes::gib(1024);

/// The tried values of `PYTORCH_ALLOC_CONF`: single settings, then combinations. Garbage collection
/// thresholds include a memory fraction, because they have no effect without one.
pub const SETTINGS: [&str; 24] = [
    "",
    "expandable_segments:True",
    "max_split_size_mb:32",
    "max_split_size_mb:64",
    "max_split_size_mb:128",
    "max_split_size_mb:256",
    "max_split_size_mb:512",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:8",
    "roundup_power2_divisions:16",
    "large_segment_size_mb:32",
    "large_segment_size_mb:64",
    "garbage_collection_threshold:0.6,per_process_memory_fraction:0.98",
    "garbage_collection_threshold:0.8,per_process_memory_fraction:0.98",
    "garbage_collection_threshold:0.9,per_process_memory_fraction:0.98",
    "expandable_segments:True,max_split_size_mb:128",
    "expandable_segments:True,max_split_size_mb:512",
    "expandable_segments:True,roundup_power2_divisions:8",
    "expandable_segments:True,large_segment_size_mb:64",
    "expandable_segments:True,garbage_collection_threshold:0.8,per_process_memory_fraction:0.98",
    "max_split_size_mb:128,roundup_power2_divisions:8",
    "max_split_size_mb:512,roundup_power2_divisions:8",
    "max_split_size_mb:128,garbage_collection_threshold:0.8,per_process_memory_fraction:0.98",
    "max_split_size_mb:512,garbage_collection_threshold:0.8,per_process_memory_fraction:0.98",
];

#[derive(Clone, Debug, PartialEq)]
pub struct Configuration {
    /// The settings as given or recorded, or the name of another allocator.
    pub name: String,
    pub allocator: AllocatorSpec,
}

impl Configuration {
    pub fn of_settings(torch: TorchVersion, conf: &str) -> Result<Self, ConfError> {
        Ok(Self {
            name: conf.to_owned(),
            allocator: AllocatorSpec::caching(Config::parse_for(torch, conf)?),
        })
    }

    /// The part of the device's memory that the allocator reserves at the start, if it reserves
    /// one.
    fn part_at_start(&self) -> Option<&'static str> {
        match self.allocator.kind() {
            Some(AllocatorKind::RmmPool | AllocatorKind::RmmArena | AllocatorKind::RmmBinning) => {
                Some("half")
            }
            Some(AllocatorKind::XlaBfc) => Some("three quarters"),
            Some(
                AllocatorKind::Caching
                | AllocatorKind::Expandable
                | AllocatorKind::Bfc
                | AllocatorKind::OrtArena
                | AllocatorKind::CupyPool
                | AllocatorKind::AsyncPool
                | AllocatorKind::Direct,
            )
            | None => None,
        }
    }

    pub fn of_allocator(kind: AllocatorKind) -> Self {
        Self {
            name: kind.name().to_owned(),
            allocator: kind.into(),
        }
    }

    /// A program's configurations: its recorded settings, the settings of the grid that differ and
    /// that its version of PyTorch has, then other allocators.
    pub fn grid(recorded: &Config) -> Vec<Self> {
        let own = Self {
            name: recorded.to_string(),
            allocator: AllocatorSpec::caching(recorded.clone()),
        };
        let settings = SETTINGS
            .iter()
            .filter_map(|conf| Self::of_settings(recorded.torch, conf).ok());
        let kinds = AllocatorKind::ALL.iter().copied();
        let others = kinds
            .map(Self::of_allocator)
            .filter(|other| !other.allocator.is_pytorch());
        let mut all = vec![own];
        for configuration in settings.chain(others) {
            if !all
                .iter()
                .any(|known| known.allocator.is_equivalent_to(&configuration.allocator))
            {
                all.push(configuration);
            }
        }
        all
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct GridRow {
    pub configuration: Configuration,
    /// The replay with the device's memory.
    pub replayed: Replayed,
    /// The least sufficient memory, if requested.
    pub least: Option<Least>,
    /// The peak of allocated memory with the least memory, or on an unlimited device.
    pub peak_allocated: Bytes,
}

/// A configuration without a result.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct UntriedChange {
    /// The settings, or the name of another allocator.
    pub conf: String,
    pub why: String,
}

/// The JSON form of a result for `harness advise --format json`. In bytes, counts and modeled
/// nanoseconds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GridRowRecord {
    /// The settings, or the name of another allocator.
    pub conf: String,
    pub oom: bool,
    /// The event index of the first failed request that succeeded in the recording or ended it.
    pub oom_event: Option<u32>,
    pub peak_reserved: u64,
    pub peak_allocated: u64,
    pub num_alloc_retries: u64,
    pub num_ooms: u64,
    pub device_allocs: u64,
    #[serde(flatten)]
    pub more: Option<MoreOfEnding>,
}

/// Omitted if the user asked for specific settings only.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MoreOfEnding {
    pub oom_request: Option<u64>,
    /// The peak of memory that was reserved but not allocated directly after a driver call.
    pub peak_unused: u64,
    pub driver_calls: u64,
    /// From the cost model of the simulated device, not measured.
    pub modelled_driver_ns: u64,
    pub least_memory: Option<u64>,
}

impl GridRow {
    /// Returns true if every request succeeded that succeeded in the recording or ended it.
    pub const fn fits(&self) -> bool {
        self.replayed.oom.is_none()
    }

    pub fn record(&self, with_more: bool) -> GridRowRecord {
        let Replayed {
            oom,
            stats,
            calls,
            driver_time,
            peak_unused,
            ..
        } = &self.replayed;
        let more = || MoreOfEnding {
            oom_request: oom.map(|refused| refused.requested.0),
            peak_unused: peak_unused.0,
            driver_calls: calls.memory_calls(),
            modelled_driver_ns: driver_time.0,
            least_memory: self.least.map(|least| least.enough.0),
        };
        GridRowRecord {
            conf: self.configuration.name.clone(),
            oom: oom.is_some(),
            oom_event: oom.map(|refused| refused.event),
            peak_reserved: stats.reserved_bytes.all.peak,
            peak_allocated: stats.allocated_bytes.all.peak,
            num_alloc_retries: stats.num_alloc_retries,
            num_ooms: stats.num_ooms,
            device_allocs: stats.num_device_alloc,
            more: with_more.then(more),
        }
    }

    pub fn price(&self) -> (u64, Nanos) {
        (
            self.replayed.calls.memory_calls(),
            self.replayed.driver_time,
        )
    }
}

/// A prepared program and its device memory.
#[derive(Debug)]
pub struct Grid<'a> {
    prepared: &'a PreparedReplay<'a>,
    memory: Bytes,
}

impl<'a> Grid<'a> {
    pub const fn new(prepared: &'a PreparedReplay<'a>, memory: Bytes) -> Self {
        Self { prepared, memory }
    }

    pub const fn program(&self) -> &'a RecordedProgram {
        self.prepared.program()
    }

    /// Replays the program with each configuration on all cores. Calls `progress` after each.
    /// Results keep the order of the configurations. `with_least` also searches the least
    /// sufficient memory, which takes about ten more replays each.
    ///
    /// Some states before a recording cannot be reached with other settings or do not fit with
    /// another allocator. Such configurations are returned as not tried. Fails if none can be
    /// tried.
    pub fn run(
        &self,
        configurations: &[Configuration],
        with_least: bool,
        progress: &(dyn Fn() + Sync),
    ) -> Result<(Vec<GridRow>, Vec<UntriedChange>), ProgramError> {
        let (unknown, configurations): (Vec<&Configuration>, Vec<&Configuration>) =
            configurations.iter().partition(|configuration| {
                self.memory == UNLIMITED && configuration.part_at_start().is_some()
            });
        let Ok(tried) = in_parallel(&configurations, |configuration| {
            let ending = self.ending(configuration, with_least);
            progress();
            Ok::<_, Infallible>(ending)
        });
        let of_size = |configuration: &&Configuration| UntriedChange {
            conf: configuration.name.clone(),
            why: format!(
                "it reserves {} of the device's memory, which is unknown",
                configuration.part_at_start().unwrap_or("a part")
            ),
        };
        unknown.iter().for_each(|_| progress());
        let (mut endings, mut not_tried, mut first) = (
            Vec::new(),
            unknown.iter().map(of_size).collect::<Vec<_>>(),
            None,
        );
        for (Configuration { name, .. }, ending) in configurations.iter().zip(tried) {
            match ending {
                Ok(ending) => endings.push(ending),
                Err(error) => {
                    not_tried.push(UntriedChange {
                        conf: name.clone(),
                        why: error.to_string(),
                    });
                    first.get_or_insert(error);
                }
            }
        }
        match first {
            Some(error) if endings.is_empty() => Err(error),
            _ => Ok((endings, not_tried)),
        }
    }

    fn ending(
        &self,
        configuration: &Configuration,
        with_least: bool,
    ) -> Result<GridRow, ProgramError> {
        let replayed = self.replay(configuration, self.memory)?;
        let (least, peak_allocated) =
            match with_least.then(|| self.least(configuration)).transpose()? {
                Some((least, peak)) => (Some(least), peak),
                None => (None, Bytes(replayed.stats.allocated_bytes.all.peak)),
            };
        Ok(GridRow {
            configuration: configuration.clone(),
            replayed,
            least,
            peak_allocated,
        })
    }

    pub fn replay(
        &self,
        configuration: &Configuration,
        memory: Bytes,
    ) -> Result<Replayed, ProgramError> {
        self.prepared.replay(&ReplaySetup {
            allocator: configuration.allocator.clone(),
            memory,
            placement: Placement::InOrder(self.program().address_order()),
        })
    }

    fn is_enough(
        &self,
        configuration: &Configuration,
        memory: Bytes,
    ) -> Result<bool, ProgramError> {
        match self.replay(configuration, memory) {
            Ok(replayed) => Ok(replayed.oom.is_none()),
            Err(
                ProgramError::TooLittleMemory { .. }
                | ProgramError::DoNotFit { .. }
                | ProgramError::NotConstructed { .. },
            ) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Finds the least memory with which the program succeeds, by bisection in steps of half a
    /// percent, at least 2 MiB. Also returns the peak of allocated memory.
    pub fn least(&self, configuration: &Configuration) -> Result<(Least, Bytes), ProgramError> {
        let unlimited = self.replay(configuration, UNLIMITED)?.stats;
        let peak = Bytes(unlimited.reserved_bytes.all.peak);
        // A memory fraction requires a larger device.
        let fraction = configuration
            .allocator
            .effective()
            .map_or(1.0, |config| config.memory_fraction.get());
        let low = Bytes(unlimited.allocated_bytes.all.peak).max(self.program().reserved_at_start());
        // Without a cache, a program may need less than it had reserved at the start, but a replay
        // starts with all of that.
        let mut high = Bytes((peak.0 as f64 / fraction.max(0.01)) as u64 + GRANULARITY.0).max(low);
        if configuration.part_at_start().is_some() {
            // The peak is a part of the unlimited device.
            high = low.max(GRANULARITY);
            while high < UNLIMITED && !self.is_enough(configuration, high)? {
                high = Bytes(high.0 * 2).min(UNLIMITED);
            }
        }
        let step = Bytes((high.0 / 200).next_multiple_of(GRANULARITY.0));
        let least = least_memory(low, high, step, |memory| {
            self.is_enough(configuration, memory)
        })?;
        Ok((least, Bytes(unlimited.allocated_bytes.all.peak)))
    }
}
