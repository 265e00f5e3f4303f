//! [`InjectorState`]: the progress of a run's faults, for another process. One process plans the
//! faults and another one makes the calls. Both have an [`Injector`]; the first takes over the
//! state that the second sends.

use serde::{Deserialize, Serialize};

use super::{InjectedFault, Injector, Log, LoggedCall, Plan};

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct InjectorState {
    plan: Plan,
    /// The logged calls since the last message.
    calls: Option<Vec<LoggedCall>>,
    /// The faults injected since the last message.
    struck: Vec<InjectedFault>,
}

impl Injector {
    /// The state for a new process: the counts continue, and its device works.
    pub fn state_of_new_process(&self) -> InjectorState {
        let state = self.state();
        let plan = Plan {
            broken: None,
            stuck: None,
            ..state.plan.clone()
        };
        InjectorState {
            plan,
            calls: state.log.is_some().then(Vec::new),
            struck: Vec::new(),
        }
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
        InjectorState {
            plan: state.plan.clone(),
            calls,
            struck: std::mem::take(&mut state.struck),
        }
    }

    pub fn take_over(&self, sent: InjectorState) {
        let mut state = self.state();
        state.plan = sent.plan;
        state.struck.extend(sent.struck);
        if let Some(log) = &mut state.log {
            log.calls.extend(sent.calls.unwrap_or_default());
        }
    }
}
