//! Checks that a second run from the same seed recovers in the same way.

use harness_base::words::count;
use harness_record::{Invariant, Rule, RunRecord, Violation};

/// Returns whether a recovery policy had to decide something.
pub(super) fn has_recovered(record: &RunRecord) -> bool {
    record.steps.iter().any(|step| step.recovery.as_ref().is_some_and(|recovery| !recovery.listed.is_empty()))
}

/// Compares the decisions of the policies in two runs from the same seed. A difference fails the record.
pub(super) fn judge(record: &mut RunRecord, again: &RunRecord) {
    let decisions = |run: &RunRecord| -> Vec<_> {
        run.steps.iter().filter_map(|step| Some((step.number, step.recovery.as_ref()?.decisions()))).collect()
    };
    let (first, second) = (decisions(record), decisions(again));
    let Some(differs) = (0..first.len().max(second.len())).find(|&index| first.get(index) != second.get(index)) else { return };
    let told = |decided: Option<&(u32, harness_record::Recovery)>| match decided {
        None => "no such step".to_owned(),
        Some((number, recovery)) => {
            let asked: Vec<&str> = recovery.listed.iter().map(|attempt| attempt.asked.as_str()).collect();
            format!("step {number} with {}: {}", count(recovery.attempts, "attempt"), asked.join(", "))
        }
    };
    let step = first.get(differs).or(second.get(differs)).map_or(0, |(number, _)| *number);
    let expected = format!("the same in a second run from seed {}: {}", record.seed, told(first.get(differs)));
    let rule = Rule::Invariant(Invariant::RecoveryIsRepeatable);
    record.verdict = Violation { step, at: None, rule, expected, seen: told(second.get(differs)) }.into();
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

    use std::path::Path;
    use std::sync::Arc;

    use harness_allocator::allocator::AllocatorKind;
    use harness_allocator::device::sim::{SimConfig, SimDevice};
    use harness_allocator::units::Bytes;
    use harness_record::Verdict;
    use harness_scenario::Scenario;

    use super::*;
    use crate::run::{Run, RunRequest};

    /// Runs a training that recovers with a smaller batch twice.
    fn twice() -> [RunRecord; 2] {
        let text = "about: A test.\nneeds: { memory: 64MiB }\nsteps:\n  - train: { id: t, parameters: 1MiB, activations_per_sample: 2MiB, \
                    batch: 32, iterations: 2, on_oom: shrink_batch }\n";
        let scenario = Scenario::parse(text, Path::new("test.yaml")).unwrap();
        [(); 2].map(|()| {
            let config = SimConfig::default();
            let config = SimConfig { total: config.context_overhead + Bytes::mib(64), ..config };
            let (allocator, reproduce, interrupt) = (&AllocatorKind::Caching.into(), String::new(), Arc::default());
            let request = RunRequest { scenario: &scenario, allocator, seed: 3, repetition: 0, reproduce, audit: true, interrupt };
            Run::new(&request, Box::new(SimDevice::new(config))).checked().unwrap()
        })
    }

    #[test]
    fn a_run_that_recovers_by_the_same_attempts_passes() {
        let [mut first, second] = twice();
        assert!(has_recovered(&first));
        judge(&mut first, &second);
        assert_eq!(first.verdict, Verdict::Passed);
    }

    #[test]
    fn a_run_that_recovers_by_other_attempts_fails_and_reports_both() {
        let [mut first, mut second] = twice();
        second.steps[0].recovery.as_mut().unwrap().listed[1].asked = "a batch of 30".to_owned();
        judge(&mut first, &second);
        let Verdict::Failed { first: violation, .. } = &first.verdict else { panic!("{:?}", first.verdict) };
        assert_eq!((violation.step, &violation.rule), (1, &Rule::Invariant(Invariant::RecoveryIsRepeatable)));
        assert!(violation.expected.contains("from seed 3") && violation.expected.contains("a batch of 28"), "{violation}");
        assert!(violation.seen.contains("a batch of 30"), "{violation}");
    }
}
