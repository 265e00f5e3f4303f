//! Reports of runs. [`Report::new`] groups the runs, and one pure function per format renders the
//! groups.
//!
//! An *arm* is one allocator on one scenario and one device, with all its repetitions. A *scenario
//! on a device* contains the arms whose times may be compared. Equal records give equal bytes.

#![recursion_limit = "256"]

pub mod advice;
pub mod annotations;
pub mod bench;
pub mod explain;
pub mod fleet;
pub mod github;
pub mod guide;
pub mod json;
pub mod junit;
pub mod program;
pub mod runs;
pub mod squeeze;
pub mod store;
pub mod terminal;
pub mod text;
pub mod timeline;
pub mod trials;

mod claims;
mod escape;
mod markdown;
mod page;
#[cfg(feature = "parquet")]
mod parquet;
mod picture;
mod recovery;
mod sections;
mod steps;
mod svg;
mod timing;
mod why;
mod words;

use std::collections::BTreeSet;

use harness_allocator::device::{Clock, DeviceInfo};
use harness_allocator::units::Bytes;

use harness_base::files::slug;
use harness_record::{CostFigure, Records, RunRecord, ScenarioInfo, SkipKind, Verdict};

#[derive(Clone, Debug)]
pub struct Report<'a> {
    pub records: &'a Records,
    pub counts: VerdictCounts,
    pub devices: Vec<DeviceGroup<'a>>,
    pub scenarios: Vec<ScenarioGroup<'a>>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VerdictCounts {
    pub passed: usize,
    pub failed: usize,
    pub skipped: usize,
    /// Those of the skipped runs for which the device was missing or insufficient.
    pub insufficient: usize,
    pub contended: usize,
    pub interrupted: usize,
}

#[derive(Clone, Debug)]
pub struct DeviceGroup<'a> {
    pub info: &'a DeviceInfo,
    pub label: String,
    /// Clock rates at the start of runs: streaming multiprocessors and memory, in MHz.
    pub clocks_mhz: BTreeSet<(u32, u32)>,
    pub throttle_reasons: BTreeSet<&'a str>,
    /// The largest number of other processes during a run.
    pub other_processes: Option<u32>,
    /// Figures of the cost model. Empty for a real device.
    pub cost_figures: Vec<&'a CostFigure>,
}

#[derive(Clone, Debug)]
pub struct ScenarioGroup<'a> {
    pub info: &'a ScenarioInfo,
    pub slug: String,
    pub by_device: Vec<ScenarioOnDevice<'a>>,
}

/// One scenario on one device. Only the times of these runs are compared.
#[derive(Clone, Debug)]
pub struct ScenarioOnDevice<'a> {
    pub device: usize,
    pub arms: Vec<ArmGroup<'a>>,
}

#[derive(Clone, Debug)]
pub struct ArmGroup<'a> {
    pub allocator: &'a str,
    pub slug: String,
    /// Repetitions in the order of execution; never empty.
    pub runs: Vec<&'a RunRecord>,
    pub counts: VerdictCounts,
}

impl<'a> Report<'a> {
    pub fn new(records: &'a Records) -> Self {
        let mut report = Self {
            records,
            counts: VerdictCounts::default(),
            devices: Vec::new(),
            scenarios: Vec::new(),
        };
        records.runs.iter().for_each(|run| report.add(run));
        report.name();
        report
    }

    fn by_device(&self) -> impl Iterator<Item = (&ScenarioGroup<'a>, &ScenarioOnDevice<'a>)> {
        self.scenarios.iter().flat_map(|scenario| {
            scenario
                .by_device
                .iter()
                .map(move |on_device| (scenario, on_device))
        })
    }

    fn add(&mut self, run: &'a RunRecord) {
        self.counts.add(&run.verdict);
        let new = || DeviceGroup {
            info: &run.device,
            label: String::new(),
            clocks_mhz: BTreeSet::new(),
            throttle_reasons: BTreeSet::new(),
            other_processes: None,
            cost_figures: Vec::new(),
        };
        let device = place_of(
            &mut self.devices,
            |known| device_key(known.info) == device_key(&run.device),
            new,
        );
        self.devices[device].add(run);
        let is_same = |known: &ScenarioGroup<'_>| {
            (&known.info.name, &known.info.path) == (&run.scenario.name, &run.scenario.path)
        };
        let new = || ScenarioGroup {
            info: &run.scenario,
            slug: String::new(),
            by_device: Vec::new(),
        };
        let scenario = place_of(&mut self.scenarios, is_same, new);
        let by_device = &mut self.scenarios[scenario].by_device;
        let on_device = place_of(
            by_device,
            |known| known.device == device,
            || ScenarioOnDevice {
                device,
                arms: Vec::new(),
            },
        );
        let arms = &mut by_device[on_device].arms;
        let new = || ArmGroup {
            allocator: &run.allocator,
            slug: String::new(),
            runs: Vec::new(),
            counts: VerdictCounts::default(),
        };
        let arm = place_of(arms, |known| known.allocator == run.allocator, new);
        arms[arm].runs.push(run);
        arms[arm].counts.add(&run.verdict);
    }

    fn name(&mut self) {
        let (mut devices, mut scenarios, mut arms) =
            (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
        self.devices
            .iter_mut()
            .for_each(|device| device.label = unique(&device.info.name, " ", &mut devices));
        for scenario in &mut self.scenarios {
            scenario.slug = unique(&slug(&scenario.info.name), "-", &mut scenarios);
            for arm in scenario
                .by_device
                .iter_mut()
                .flat_map(|on_device| &mut on_device.arms)
            {
                arm.slug = unique(
                    &format!("{}-{}", scenario.slug, slug(arm.allocator)),
                    "-",
                    &mut arms,
                );
            }
        }
    }
}

impl VerdictCounts {
    pub const fn total(self) -> usize {
        self.passed + self.failed + self.skipped + self.contended + self.interrupted
    }

    fn add(&mut self, verdict: &Verdict) {
        self.insufficient += usize::from(matches!(
            verdict,
            Verdict::Skipped {
                kind: SkipKind::Insufficient,
                ..
            }
        ));
        *match verdict {
            Verdict::Passed | Verdict::FailedAsExpected { .. } => &mut self.passed,
            Verdict::Failed { .. } => &mut self.failed,
            Verdict::Skipped { .. } => &mut self.skipped,
            Verdict::Contended { .. } => &mut self.contended,
            Verdict::Interrupted => &mut self.interrupted,
        } += 1;
    }
}

impl<'a> DeviceGroup<'a> {
    fn add(&mut self, run: &'a RunRecord) {
        let fingerprint = &run.device.fingerprint;
        self.clocks_mhz.extend(fingerprint.clocks_mhz);
        self.throttle_reasons
            .extend(fingerprint.throttle_reasons.iter().map(String::as_str));
        self.other_processes = self.other_processes.max(fingerprint.other_processes);
        if self.cost_figures.is_empty() {
            self.cost_figures = run.cost_figures.iter().collect();
        }
    }
}

impl<'a> ArmGroup<'a> {
    /// The run to show in full: the first failed run, else the first that did not pass, else the
    /// first.
    pub fn shown(&self) -> &'a RunRecord {
        let rank = |run: &&RunRecord| match run.verdict {
            Verdict::Failed { .. } => 0,
            Verdict::Interrupted => 1,
            Verdict::Contended { .. } => 2,
            Verdict::Passed | Verdict::FailedAsExpected { .. } => 3,
            Verdict::Skipped { .. } => 4,
        };
        self.runs
            .iter()
            .copied()
            .min_by_key(rank)
            .expect("an arm has at least one run")
    }

    /// Settings that differ from the allocator's defaults, unless the name contains them.
    pub fn unnamed_settings(&self) -> Option<&'a str> {
        words::unnamed_settings(self.shown())
    }

    /// Returns whether a run failed, was contended or interrupted, or did not meet an expectation.
    fn is_noteworthy(&self) -> bool {
        let VerdictCounts {
            failed,
            contended,
            interrupted,
            ..
        } = self.counts;
        failed + contended + interrupted > 0 || words::not_judged(self.shown()).is_some()
    }

    pub fn passed(&self) -> impl Iterator<Item = &'a RunRecord> {
        self.runs
            .iter()
            .copied()
            .filter(|run| run.verdict == Verdict::Passed)
    }
}

/// Returns the position of the item for which `is_same` holds, and adds a new item if there is
/// none.
fn place_of<T>(items: &mut Vec<T>, is_same: impl Fn(&T) -> bool, new: impl FnOnce() -> T) -> usize {
    items.iter().position(is_same).unwrap_or_else(|| {
        items.push(new());
        items.len() - 1
    })
}

/// Two runs used the same device if these facts are equal. The key omits facts that vary between
/// runs: memory limit, clock rates, throttling and other processes.
type DeviceKey<'a> = (
    &'a str,
    bool,
    Option<Bytes>,
    [Option<&'a str>; 4],
    [Option<bool>; 2],
);

fn device_key(info: &DeviceInfo) -> DeviceKey<'_> {
    let print = &info.fingerprint;
    let texts = [
        &print.uuid_hash,
        &print.driver,
        &print.cuda,
        &print.cost_model,
    ]
    .map(Option::as_deref);
    (
        &info.name,
        info.clock == Clock::Simulated,
        print.memory,
        texts,
        [print.mig, print.ecc],
    )
}

/// Returns `name`, or `name` with the first free number from 2.
fn unique(name: &str, separator: &str, taken: &mut BTreeSet<String>) -> String {
    let numbered = (2_u64..).map(|number| format!("{name}{separator}{number}"));
    let free = std::iter::once(name.to_owned())
        .chain(numbered)
        .find(|candidate| !taken.contains(candidate));
    let free = free.unwrap_or_else(|| name.to_owned());
    taken.insert(free.clone());
    free
}

#[cfg(test)]
mod tests;
