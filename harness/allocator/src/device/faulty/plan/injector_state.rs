//! [`InjectorState`]: the progress of a run's faults, for another process. One process plans the faults and another one makes the
//! calls. Both have an [`Injector`]; the first takes over the state that the second sends.

use serde::{Deserialize, Serialize};

use super::{InjectedError, InjectedFault, Injector, Log, LoggedCall, Progress, State};

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct InjectorState {
    faults: Vec<Progress>,
    counts: Vec<u64>,
    total: u64,
    operations: u64,
    budget: Option<u64>,
    broken: Option<(usize, InjectedError)>,
    stuck: Option<usize>,
    /// The logged calls since the last message.
    calls: Option<Vec<LoggedCall>>,
    /// The faults injected since the last message.
    struck: Vec<InjectedFault>,
}

impl Injector {
    /// The state for a new process: the counts continue, and its device works.
    pub fn state_of_new_process(&self) -> InjectorState {
        let state = self.state();
        let calls = state.log.is_some().then(Vec::new);
        InjectorState { broken: None, stuck: None, ..state.to_send(calls, Vec::new()) }
    }

    /// Makes the injector of a new process.
    pub fn from_state(sent: InjectorState) -> Self {
        let injector = Self::new(&[], 0);
        injector.state().log = sent.calls.is_some().then(Log::default);
        injector.take_over(sent);
        injector
    }

    /// Takes the state to send. Each call and fault is sent once.
    pub fn take_state(&self) -> InjectorState {
        let mut state = self.state();
        let calls = state.log.as_mut().map(|log| std::mem::take(&mut log.calls));
        let struck = std::mem::take(&mut state.struck);
        state.to_send(calls, struck)
    }

    /// Takes over the state of another process.
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
    fn to_send(&self, calls: Option<Vec<LoggedCall>>, struck: Vec<InjectedFault>) -> InjectorState {
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
