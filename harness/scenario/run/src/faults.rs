use std::collections::BTreeMap;

use harness_allocator::device::faulty::{Fault, Injector};
use harness_scenario::{PlannedFault, ProcessName, Scenario};

/// One fault injector per process of a scenario. Clones share their state. The device of the main
/// process owns the main injector. Other processes have their own injectors and report the injected
/// faults to the main process.
#[derive(Clone, Debug)]
pub struct Faults {
    main: Injector,
    processes: BTreeMap<ProcessName, Injector>,
}

impl Faults {
    /// Creates an injector for each process; `None` is the main one.
    pub fn each_by(
        scenario: &Scenario,
        injector: impl Fn(Option<&ProcessName>) -> Injector,
    ) -> Self {
        let of_process = |name: &ProcessName| (name.clone(), injector(Some(name)));
        Self {
            main: injector(None),
            processes: scenario
                .processes
                .iter()
                .map(|process| of_process(&process.name))
                .collect(),
        }
    }

    /// The faults that the scenario declares, if any, for one run.
    pub fn planned(scenario: &Scenario, seed: u64) -> Option<Self> {
        let injector = |process: Option<&ProcessName>| {
            let faults: Vec<Fault> = planned_of(scenario, process)
                .map(|(_, planned)| planned.fault)
                .collect();
            Injector::new(&faults, seed_of(seed, process))
        };
        (!scenario.faults.is_empty()).then(|| Self::each_by(scenario, injector))
    }

    pub const fn main(&self) -> &Injector {
        &self.main
    }

    pub fn of(&self, process: Option<&ProcessName>) -> Option<&Injector> {
        process.map_or(Some(&self.main), |process| self.processes.get(process))
    }

    pub fn all(&self) -> impl Iterator<Item = (Option<&ProcessName>, &Injector)> {
        [(None, &self.main)].into_iter().chain(
            self.processes
                .iter()
                .map(|(name, injector)| (Some(name), injector)),
        )
    }
}

/// Derives an independent seed for each process.
fn seed_of(seed: u64, process: Option<&ProcessName>) -> u64 {
    seed ^ process.map_or(0, |process| (process.index() as u64 + 1) << 32)
}

/// The scenario's faults of a process, in the order of its injector, with their indexes in the
/// whole scenario.
pub(crate) fn planned_of<'s>(
    scenario: &'s Scenario,
    process: Option<&ProcessName>,
) -> impl Iterator<Item = (usize, &'s PlannedFault)> {
    scenario
        .faults
        .iter()
        .enumerate()
        .filter(move |(_, planned)| planned.process.as_ref() == process)
}
