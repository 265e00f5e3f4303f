//! Runs a trace like `harness run`, with all checks, and finds the violated invariant: [`Audited`].

use std::{ops::ControlFlow, path::Path, sync::Arc};

use harness_allocator::allocator::AllocatorSpec;
use harness_language::text::exact_size;
use harness_record::{Invariant, Rule, Verdict, Violation};
use harness_scenario::{Scenario, Trace, steps::Action};

use super::{ShrinkError, TraceCase};
use crate::scenario::Engine;

/// A scenario whose only step replays a trace. OOMs do not fail it.
pub(super) struct Audited<'a> {
    engine: &'a dyn Engine,
    scenario: Scenario,
}

impl<'a> Audited<'a> {
    pub(super) fn new(case: &TraceCase, engine: &'a dyn Engine) -> Result<Self, ShrinkError> {
        let failed = |error: &dyn std::fmt::Display| ShrinkError::Trace(error.to_string());
        let text = format!(
            "about: A trace.\nneeds: {{ memory: {} }}\nsteps: [ replay: {{ id: program, trace: \
             program.trace, expect: any }} ]\n",
            exact_size(case.memory)
        );
        let trace = Arc::new(Trace::of(case.events.clone()));
        let scenario = Scenario::parse_with_trace(&text, Path::new("program.yaml"), Some(&trace))
            .map_err(|error| failed(&error))?;
        Ok(Self { engine, scenario })
    }

    /// The first violated invariant. The trace may only use streams of the original trace.
    pub(super) fn violated(&self, case: &TraceCase) -> Option<Invariant> {
        let mut scenario = self.scenario.clone();
        scenario.needs.memory = case.memory;
        scenario.allocators = vec![AllocatorSpec::caching(case.config.clone())];
        for step in &mut scenario.steps {
            if let Action::Replay(replay) = &mut step.action {
                replay.trace = Arc::new(Trace::of(case.events.clone()));
            }
        }
        let records = self
            .engine
            .run(&scenario, &mut |_| ControlFlow::Continue(()))
            .ok()?;
        records.iter().find_map(|record| match &record.verdict {
            Verdict::Failed {
                first:
                    Violation {
                        rule: Rule::Invariant(invariant),
                        ..
                    },
                ..
            } => Some(*invariant),
            _ => None,
        })
    }
}
