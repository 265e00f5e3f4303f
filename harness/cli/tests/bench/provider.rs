//! A provider whose devices and allocators are those that a test wants.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use harness_allocator::allocator::{Allocator, AllocatorSpec};
use harness_allocator::device::limited::Limited;
use harness_allocator::device::sim::{CostModel, SimConfig, SimDevice};
use harness_allocator::device::{Clock, DeviceError, TestDevice};
use harness_allocator::units::{Bytes, Nanos};
use harness_bench::execute::{Processes, Progress, Terms, run_suite};
use harness_bench::provider::{DeviceProvider, MemoryLimit};
use harness_bench::record::{Entry, Measured, SuiteRecord};
use harness_bench::suite::Suite;

/// Simulated devices.
pub(crate) struct TestProvider {
    /// What devices cost.
    pub(crate) cost: CostModel,
    /// Which clock the devices are said to run on: `Measured` has the harness read the host's.
    pub(crate) clock: Clock,
    /// Which allocator stands for an arm.
    pub(crate) build: fn(&AllocatorSpec) -> Box<dyn Allocator>,
    /// What a request for a device is refused with, by its number, counted from 1.
    pub(crate) refuse: fn(u64) -> Option<DeviceError>,
    /// How many devices were asked for.
    pub(crate) asked: u64,
}

impl TestProvider {
    pub(crate) fn new() -> Self {
        Self { cost: CostModel::PUBLISHED, clock: Clock::Simulated, build: AllocatorSpec::build, refuse: |_| None, asked: 0 }
    }

    pub(crate) fn run(&mut self, suite: &Suite) -> SuiteRecord {
        self.run_with(suite, &terms(0), |_| {})
    }

    pub(crate) fn run_with(&mut self, suite: &Suite, terms: &Terms, watch: impl FnMut(Progress<'_>)) -> SuiteRecord {
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

    fn device(&mut self, memory: Bytes, limit: MemoryLimit) -> Result<Box<dyn TestDevice>, DeviceError> {
        self.asked += 1;
        if let Some(error) = (self.refuse)(self.asked) {
            return Err(error);
        }
        match limit {
            MemoryLimit::HostPath => Ok(Box::new(SimDevice::new(SimConfig::replay(memory)))),
            MemoryLimit::Reported | MemoryLimit::Enforced => Ok(Box::new(Limited::new(self.open()?, memory)?)),
        }
    }

    fn open(&mut self) -> Result<Box<dyn TestDevice>, DeviceError> {
        Ok(Box::new(SimDevice::new(SimConfig { cost: self.cost.clone(), ..SimConfig::default() })))
    }

    fn allocator(&self, arm: &AllocatorSpec) -> Box<dyn Allocator> {
        (self.build)(arm)
    }
}

pub(crate) fn terms(seed: u64) -> Terms {
    Terms { seed, budget: None, shard: None, interrupt: Arc::<AtomicBool>::default() }
}

pub(crate) fn within(budget: Nanos) -> Terms {
    Terms { budget: Some(budget), ..terms(0) }
}

/// A suite that times these things with these arms.
pub(crate) fn suite(arms: &str, time: &str) -> Suite {
    let text = format!("about: A test.\nneeds: {{ memory: 1GiB }}\narms: [{arms}]\ntime:\n  - {time}\n");
    Suite::parse(&text, &catalogue().join("test.yaml")).unwrap_or_else(|error| panic!("{:?}", miette::Report::new(error)))
}

/// The folder of the ready suites.
pub(crate) fn catalogue() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scenarios/bench")
}

pub(crate) fn measured(entry: &Entry) -> &Measured {
    entry.outcome.measured().unwrap_or_else(|| panic!("{}, {}: {:?}", entry.case(), entry.arm, entry.outcome))
}

/// The medians of an arm, by case.
pub(crate) fn medians(record: &SuiteRecord, arm: &str) -> Vec<(String, u64)> {
    let entries = record.entries.iter().filter(|entry| entry.arm == arm && entry.quantity.is_time());
    entries.map(|entry| (entry.case(), measured(entry).summary.median)).collect()
}
