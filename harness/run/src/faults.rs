//! [`Faults`]: what goes wrong in one run, by the process whose calls it strikes.

use std::collections::BTreeMap;

use harness_allocator::device::faulty::{Fault, Injector};
use harness_scenario::{PlannedFault, ProcessName, Scenario};

/// An injector for each process of a scenario. Clones share their state.
///
/// That of the main process is with its device. Another process has its own, and what it tells of it is taken over by the one that is here.
#[derive(Clone, Debug)]
pub struct Faults {
    main: Injector,
    processes: BTreeMap<ProcessName, Injector>,
}

impl Faults {
    /// One for each process, the main one being `None`.
    pub fn each_by(scenario: &Scenario, injector: impl Fn(Option<&ProcessName>) -> Injector) -> Self {
        let of_process = |name: &ProcessName| (name.clone(), injector(Some(name)));
        Self { main: injector(None), processes: scenario.processes.iter().map(|process| of_process(&process.name)).collect() }
    }

    /// The scenario's own, for one run of it; `None` where it has none.
    #[must_use]
    pub fn planned(scenario: &Scenario, seed: u64) -> Option<Self> {
        let injector = |process: Option<&ProcessName>| {
            let faults: Vec<Fault> = planned_of(scenario, process).map(|(_, planned)| planned.fault).collect();
            Injector::new(&faults, seed_of(seed, process))
        };
        (!scenario.faults.is_empty()).then(|| Self::each_by(scenario, injector))
    }

    /// The faults of the main process.
    #[must_use]
    pub const fn main(&self) -> &Injector {
        &self.main
    }

    /// Those of a process of the scenario, the main one being `None`.
    #[must_use]
    pub fn of(&self, process: Option<&ProcessName>) -> Option<&Injector> {
        process.map_or(Some(&self.main), |process| self.processes.get(process))
    }

    /// Those of all processes, the main one first.
    pub fn all(&self) -> impl Iterator<Item = (Option<&ProcessName>, &Injector)> {
        [(None, &self.main)].into_iter().chain(self.processes.iter().map(|(name, injector)| (Some(name), injector)))
    }
}

/// What is drawn in one process says nothing of what is drawn in another.
fn seed_of(seed: u64, process: Option<&ProcessName>) -> u64 {
    seed ^ process.map_or(0, |process| (process.index() as u64 + 1) << 32)
}

/// The scenario's faults of a process, in the order of its injector, with their places among all.
pub(crate) fn planned_of<'s>(scenario: &'s Scenario, process: Option<&ProcessName>) -> impl Iterator<Item = (usize, &'s PlannedFault)> {
    scenario.faults.iter().enumerate().filter(move |(_, planned)| planned.process.as_ref() == process)
}
