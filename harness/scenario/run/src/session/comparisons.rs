//! Comparisons between allocators: judged when the last allocator that one names has run, and
//! recorded in its record.

use std::collections::{BTreeMap, BTreeSet};

use harness_record::{Rule, RunRecord, Verdict, Violation};
use harness_scenario::{Expectation, Located, Metric, Number, Scenario, Value};

use crate::{context::Figures, run::describe_unmet};

/// The figures of one scenario's allocators that have run in one repetition.
#[derive(Debug, Default)]
pub(super) struct Comparisons {
    of: Option<(String, u32)>,
    figures: BTreeMap<String, Figures>,
}

impl Comparisons {
    /// Adds the figures of an allocator that has run, and judges the comparisons that are now
    /// complete.
    pub(super) fn add(&mut self, scenario: &Scenario, record: &mut RunRecord, figures: Figures) {
        let of = Some((record.scenario.id(), record.repetition));
        if self.of != of {
            *self = Self {
                of,
                figures: BTreeMap::new(),
            };
        }
        let arm = record.allocator.clone();
        self.figures.insert(arm.clone(), figures);
        // The run passed, or only comparisons have failed so far.
        let is_judged = match &record.verdict {
            Verdict::Passed => true,
            Verdict::Failed { first, .. } => first.rule == Rule::BetweenArms,
            _ => false,
        };
        for (number, expectation) in scenario.comparisons.iter().enumerate() {
            let is_last = last_arm(scenario, &expectation.value).is_some_and(|last| last == arm);
            if is_last && is_judged {
                self.judge(scenario, number, expectation, record);
            }
        }
    }

    fn judge(
        &self,
        scenario: &Scenario,
        number: usize,
        expectation: &Located<Expectation>,
        record: &mut RunRecord,
    ) {
        let mut figures = Vec::new();
        let mut place = 0;
        let evaluated = expectation.value.evaluate(|metric| {
            let figure = arm_of(metric)
                .and_then(|arm| self.figures.get(arm))
                .and_then(|figures| figures.get(&(number, place)));
            place += 1;
            let figure: Number = *figure.ok_or_else(|| metric.to_string())?;
            figures.push(format!(
                "{metric} = {}",
                Value {
                    number: figure,
                    dimension: metric.unit().into()
                }
            ));
            Ok::<_, String>(figure)
        });
        let seen = match evaluated {
            Ok(evaluation) if evaluation.holds => return,
            Ok(evaluation) => describe_unmet(&expectation.value, &evaluation, figures),
            Err(why) => {
                let note = format!(
                    "not compared: {}, because {why} is unknown: its allocator did not reach that \
                     step",
                    expectation.value
                );
                let behind = record
                    .steps
                    .iter_mut()
                    .rev()
                    .find(|step| step.kind == "expect" && step.line <= expectation.at.line);
                behind
                    .into_iter()
                    .for_each(|step| step.notes.push(note.clone()));
                return;
            }
        };
        let violation = Violation {
            step: record
                .steps
                .iter()
                .rev()
                .find(|step| step.line <= expectation.at.line)
                .map_or(0, |step| step.number),
            at: Some(scenario.place(expectation.at)),
            rule: Rule::BetweenArms,
            expected: expectation.value.text.clone(),
            seen,
        };
        match &mut record.verdict {
            Verdict::Failed { rest, .. } => rest.push(violation),
            verdict => *verdict = violation.into(),
        }
    }
}

fn arm_of(metric: &Metric) -> Option<&str> {
    match metric {
        Metric::Arm(arm, _) => Some(arm),
        _ => None,
    }
}

fn arms(expectation: &Expectation) -> BTreeSet<&str> {
    expectation.quantities().filter_map(arm_of).collect()
}

/// The last of the named allocators in the scenario's order.
fn last_arm(scenario: &Scenario, expectation: &Expectation) -> Option<String> {
    let named = arms(expectation);
    scenario
        .allocators
        .iter()
        .map(ToString::to_string)
        .rfind(|arm| named.contains(arm.as_str()))
}

/// The other allocators whose figures a run with this one needs, in the scenario's order.
pub(super) fn needed_for(scenario: &Scenario, arm: &str) -> Vec<String> {
    let of_this = scenario
        .comparisons
        .iter()
        .filter(|expectation| last_arm(scenario, &expectation.value).as_deref() == Some(arm));
    let needed: BTreeSet<&str> = of_this
        .flat_map(|expectation| arms(&expectation.value))
        .filter(|other| *other != arm)
        .collect();
    scenario
        .allocators
        .iter()
        .map(ToString::to_string)
        .filter(|other| needed.contains(other.as_str()))
        .collect()
}
