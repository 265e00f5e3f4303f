//! A provider with the devices and allocators that a test selects.

use std::path::Path;

use harness_allocator::allocator::{Allocator, AllocatorSpec};
use harness_allocator::device::sim::{CostModel, SimConfig, SimDevice};
use harness_allocator::device::{Clock, DeviceError, TestDevice, limited::Limited};
use harness_allocator::units::{Bytes, Nanos};
use harness_bench::execute::{Processes, Progress, Terms, run_suite};
use harness_bench::provider::{DeviceProvider, MemoryLimit};
use harness_bench::record::{Entry, Measured, SuiteRecord};
use harness_bench::suite::Suite;

/// Simulated devices.
pub(crate) struct TestProvider {
    /// The costs of the devices.
    pub(crate) cost: CostModel,
    /// The reported clock of the devices. With `Measured`, the harness reads the host's clock.
    pub(crate) clock: Clock,
    /// The allocator for a configuration.
    pub(crate) build: fn(&AllocatorSpec) -> Box<dyn Allocator>,
    /// The errors of device requests, by the number of the request, from 1.
    pub(crate) refuse: fn(u64) -> Option<DeviceError>,
    /// The number of device requests.
    pub(crate) asked: u64,
}

impl TestProvider {
    pub(crate) fn new() -> Self {
        Self {
            cost: CostModel::PUBLISHED,
            clock: Clock::Simulated,
            build: AllocatorSpec::build,
            refuse: |_| None,
            asked: 0,
        }
    }

    pub(crate) fn run(&mut self, suite: &Suite) -> SuiteRecord {
        self.run_with(suite, &terms(0), |_| {})
    }

    pub(crate) fn run_with(
        &mut self,
        suite: &Suite,
        terms: &Terms,
        watch: impl FnMut(Progress<'_>),
    ) -> SuiteRecord {
        run_suite(suite, self, &mut Processes::default(), terms, watch)
    }
}

impl DeviceProvider for TestProvider {
    fn clock(&self) -> Clock {
        self.clock
    }

    fn device_name(&self) -> String {
        "sim".to_owned()
    }

    fn device(
        &mut self,
        memory: Bytes,
        limit: MemoryLimit,
    ) -> Result<Box<dyn TestDevice>, DeviceError> {
        self.asked += 1;
        if let Some(error) = (self.refuse)(self.asked) {
            return Err(error);
        }
        match limit {
            MemoryLimit::HostPath => Ok(Box::new(SimDevice::new(SimConfig::replay(memory)))),
            MemoryLimit::Reported | MemoryLimit::Enforced => {
                Ok(Box::new(Limited::new(self.open()?, memory)?))
            }
        }
    }

    fn open(&mut self) -> Result<Box<dyn TestDevice>, DeviceError> {
        Ok(Box::new(SimDevice::new(SimConfig {
            cost: self.cost.clone(),
            ..SimConfig::default()
        })))
    }

    fn allocator(&self, arm: &AllocatorSpec) -> Box<dyn Allocator> {
        (self.build)(arm)
    }
}

pub(crate) fn terms(seed: u64) -> Terms {
    Terms {
        seed,
        ..Terms::default()
    }
}

pub(crate) fn within(budget: Nanos) -> Terms {
    Terms {
        budget: Some(budget),
        ..terms(0)
    }
}

/// A suite that times these measures with these configurations.
pub(crate) fn suite(arms: &str, time: &str) -> Suite {
    let text =
        format!("about: A test.\nneeds: {{ memory: 1GiB }}\narms: [{arms}]\ntime:\n  - {time}\n");
    Suite::parse(&text, &catalogue().join("test.yaml"))
        .unwrap_or_else(|error| panic!("{:?}", miette::Report::new(error)))
}

/// The folder of the project's suites.
pub(crate) fn catalogue() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scenarios/bench")
}

pub(crate) fn measured(entry: &Entry) -> &Measured {
    entry
        .outcome
        .measured()
        .unwrap_or_else(|| panic!("{}, {}: {:?}", entry.case(), entry.arm, entry.outcome))
}

/// The medians of a configuration, by case.
pub(crate) fn medians(record: &SuiteRecord, arm: &str) -> Vec<(String, u64)> {
    let entries = record
        .entries
        .iter()
        .filter(|entry| entry.arm == arm && entry.quantity.is_time());
    entries
        .map(|entry| (entry.case(), measured(entry).summary.median))
        .collect()
}
