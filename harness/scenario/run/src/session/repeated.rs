use harness_base::words::count;
use harness_record::{Invariant, Rule, RunRecord, Violation};

/// Returns whether a recovery policy had to decide something.
pub(super) fn has_recovered(record: &RunRecord) -> bool {
    record.steps.iter().any(|step| {
        step.recovery
            .as_ref()
            .is_some_and(|recovery| !recovery.listed.is_empty())
    })
}

/// Compares the decisions of the policies in two runs from the same seed. A difference fails the
/// record.
pub(super) fn judge(record: &mut RunRecord, again: &RunRecord) {
    let decisions = |run: &RunRecord| -> Vec<_> {
        run.steps
            .iter()
            .filter_map(|step| Some((step.number, step.recovery.as_ref()?.decisions())))
            .collect()
    };
    let (first, second) = (decisions(record), decisions(again));
    let Some(differs) =
        (0..first.len().max(second.len())).find(|&index| first.get(index) != second.get(index))
    else {
        return;
    };
    let told = |decided: Option<&(u32, harness_record::Recovery)>| match decided {
        None => "no such step".to_owned(),
        Some((number, recovery)) => {
            let asked: Vec<&str> = recovery
                .listed
                .iter()
                .map(|attempt| attempt.asked.as_str())
                .collect();
            format!(
                "step {number} with {}: {}",
                count(recovery.attempts, "attempt"),
                asked.join(", ")
            )
        }
    };
    let step = first
        .get(differs)
        .or(second.get(differs))
        .map_or(0, |(number, _)| *number);
    let expected = format!(
        "the same in a second run from seed {}: {}",
        record.seed,
        told(first.get(differs))
    );
    let rule = Rule::Invariant(Invariant::RecoveryIsRepeatable);
    record.verdict = Violation {
        step,
        at: None,
        rule,
        expected,
        seen: told(second.get(differs)),
    }
    .into();
}

#[cfg(test)]
mod tests;
