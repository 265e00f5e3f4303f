//! [`Carried`]: how far the faults of a run have come, on the way from one process to another. One process says what is to be done, and another one makes the
//! calls: both have an [`Injector`], and that of the first follows that of the other.

use serde::{Deserialize, Serialize};

use super::{InjectedError, Injector, Log, Noted, Progress, State, Struck};

/// See the module.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Carried {
    faults: Vec<Progress>,
    counts: Vec<u64>,
    total: u64,
    operations: u64,
    budget: Option<u64>,
    broken: Option<(usize, InjectedError)>,
    stuck: Option<usize>,
    /// Calls since the last time, where they are noted.
    calls: Option<Vec<Noted>>,
    /// Struck calls since the last time.
    struck: Vec<Struck>,
}

impl Injector {
    /// What a process begins with that makes calls from now on: they are counted on, and its device is in order.
    #[must_use]
    pub fn begin(&self) -> Carried {
        let state = self.state();
        let calls = state.log.is_some().then(Vec::new);
        Carried { broken: None, stuck: None, ..state.carried(calls, Vec::new()) }
    }

    /// The faults of a process that begins so.
    #[must_use]
    pub fn begun(carried: Carried) -> Self {
        let injector = Self::new(&[], 0);
        injector.state().log = carried.calls.is_some().then(Log::default);
        injector.follow(carried);
        injector
    }

    /// What has become of the calls. What was told once is not told again.
    #[must_use]
    pub fn tell(&self) -> Carried {
        let mut state = self.state();
        let calls = state.log.as_mut().map(|log| std::mem::take(&mut log.calls));
        let struck = std::mem::take(&mut state.struck);
        state.carried(calls, struck)
    }

    /// Takes over what another process tells.
    pub fn follow(&self, told: Carried) {
        let Carried { faults, counts, total, operations, budget, broken, stuck, calls, struck } = told;
        let mut state = self.state();
        (state.faults, state.counts, state.total, state.operations, state.budget) = (faults, counts, total, operations, budget);
        (state.broken, state.stuck) = (broken, stuck);
        state.struck.extend(struck);
        if let Some(log) = &mut state.log {
            log.calls.extend(calls.unwrap_or_default());
        }
    }
}

impl State {
    fn carried(&self, calls: Option<Vec<Noted>>, struck: Vec<Struck>) -> Carried {
        Carried {
            faults: self.faults.clone(),
            counts: self.counts.clone(),
            total: self.total,
            operations: self.operations,
            budget: self.budget,
            broken: self.broken,
            stuck: self.stuck,
            calls,
            struck,
        }
    }
}
