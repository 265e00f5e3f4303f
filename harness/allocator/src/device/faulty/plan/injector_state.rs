//! [`InjectorState`]: how far the faults of a run have come, to be sent from one process to another. One process says what is to be done, and another one makes the
//! calls: both have an [`Injector`], and that of the first takes over what the other one sends.

use serde::{Deserialize, Serialize};

use super::{InjectedError, Injector, Log, Noted, Progress, State, Struck};

/// See the module.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct InjectorState {
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
    pub fn state_of_new_process(&self) -> InjectorState {
        let state = self.state();
        let calls = state.log.is_some().then(Vec::new);
        InjectorState { broken: None, stuck: None, ..state.to_send(calls, Vec::new()) }
    }

    /// The faults of a process that begins so.
    #[must_use]
    pub fn from_state(sent: InjectorState) -> Self {
        let injector = Self::new(&[], 0);
        injector.state().log = sent.calls.is_some().then(Log::default);
        injector.take_over(sent);
        injector
    }

    /// What has become of the calls. What was told once is not told again.
    #[must_use]
    pub fn take_state(&self) -> InjectorState {
        let mut state = self.state();
        let calls = state.log.as_mut().map(|log| std::mem::take(&mut log.calls));
        let struck = std::mem::take(&mut state.struck);
        state.to_send(calls, struck)
    }

    /// Takes over what another process tells.
    pub fn take_over(&self, sent: InjectorState) {
        let InjectorState { faults, counts, total, operations, budget, broken, stuck, calls, struck } = sent;
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
    fn to_send(&self, calls: Option<Vec<Noted>>, struck: Vec<Struck>) -> InjectorState {
        InjectorState {
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
