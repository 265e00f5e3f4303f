use harness_allocator::units::Bytes;
use harness_record::{FaultOutcome, FaultedArm, FaultedCase, FaultedRuns};

use crate::words::{self, Grid};

const MOST_DEFECTS: usize = 20;

pub(super) fn sentence(runs: &FaultedRuns) -> String {
    let (all, defects) = (
        runs.cases().count(),
        runs.cases().filter(|case| case.is_defect()).count(),
    );
    let arms = runs
        .arms
        .iter()
        .filter(|arm| arm.not_tried.is_none())
        .count();
    let tried = format!(
        "{} of {}",
        words::count(all, "run"),
        words::count(arms, "scenario × allocator")
    );
    let repeats = match runs.arms.iter().map(|arm| arm.repeats).sum() {
        0 => String::new(),
        1 => " 1 further call was not tried because it repeats one of them.".to_owned(),
        repeats => {
            format!(" {repeats} further calls were not tried because they repeat one of them.")
        }
    };
    let ends = match defects {
        0 => "Each run recovered, ended out of memory, or ended with an error that names the call."
            .to_owned(),
        _ => format!("{defects} of them show a defect."),
    };
    format!("In {tried}, one device call was made to fail. {ends}{repeats}")
}

pub(super) fn grid(runs: &FaultedRuns) -> Grid {
    let heads = [
        "scenario",
        "allocator",
        "calls",
        "repeats",
        "runs",
        "healed",
        "recovered",
        "out of memory",
        "ended with an error",
        "defects",
    ];
    let rows = runs
        .arms
        .iter()
        .filter(|arm| arm.not_tried.is_none())
        .map(|arm| {
            let ends = |is_one: fn(&FaultOutcome) -> bool| {
                arm.cases.iter().filter(|case| is_one(&case.end)).count()
            };
            let counts = [
                arm.calls,
                arm.repeats,
                arm.cases.len(),
                ends(|end| matches!(end, FaultOutcome::Healed)),
                ends(|end| matches!(end, FaultOutcome::Recovered)),
                ends(|end| matches!(end, FaultOutcome::OutOfMemory)),
                ends(|end| matches!(end, FaultOutcome::NamedError { .. })),
                ends(|end| matches!(end, FaultOutcome::Defect { .. })),
            ];
            let names = [arm.scenario.clone(), arm.allocator.clone()];
            names
                .into_iter()
                .chain(counts.map(|count| count.to_string()))
                .collect()
        });
    Grid::new("llr", heads, rows)
}

pub(super) fn notes(runs: &FaultedRuns) -> Vec<String> {
    let defects = runs.arms.iter().flat_map(|arm| {
        arm.cases
            .iter()
            .filter_map(move |case| of_defect(arm, case))
    });
    let mut notes = words::at_most(defects.collect(), MOST_DEFECTS, |more| {
        format!(
            "{} more; `--format json` has all of them.",
            words::count(more, "defect")
        )
    });
    if runs.left_out > 0 {
        notes.push(format!(
            "Interrupted: {} not started.",
            words::count(runs.left_out, "call")
        ));
    }
    // If all calls were tried, no note is needed.
    let sampled = runs
        .arms
        .iter()
        .filter(|arm| arm.not_tried.is_none() && arm.chosen != format!("all {}", arm.calls));
    notes.extend(sampled.map(|arm| {
        format!(
            "{} with {}: sampled {} calls.",
            arm.scenario, arm.allocator, arm.chosen
        )
    }));
    let not_tried = runs
        .arms
        .iter()
        .filter_map(|arm| Some((arm, arm.not_tried.as_ref()?)));
    notes.extend(not_tried.map(|(arm, not)| {
        format!(
            "Not tried: {} with {}: {}",
            arm.scenario,
            arm.allocator,
            words::sentence(&not.why)
        )
    }));
    notes
}

fn of_defect(arm: &FaultedArm, case: &FaultedCase) -> Option<String> {
    let FaultOutcome::Defect { why } = &case.end else {
        return None;
    };
    let FaultedCase {
        process,
        call,
        number,
        size,
        step,
        reproduce,
        ..
    } = case;
    let whose = process.as_ref().map_or_else(String::new, |process| {
        format!(" of the process `{process}`")
    });
    let size = size.map_or_else(String::new, |size: Bytes| format!(" ({size})"));
    Some(format!(
        "{} with {}: {call} {number}{size}{whose} at step {step}: {}\n{reproduce}",
        arm.scenario,
        arm.allocator,
        words::sentence(why)
    ))
}
