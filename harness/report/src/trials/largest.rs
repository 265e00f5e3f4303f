//! The largest value of a parameter that fits on each GPU.

pub(super) mod picture;

use std::collections::{BTreeMap, BTreeSet};

use harness_allocator::units::Bytes;
use harness_exec::doubts::Doubt;
use harness_exec::trials::largest::{Evidence, LargestReport, LargestRow};

use super::{Grid, Parts, notes_on_doubts, words};

pub(super) fn parts(report: &LargestReport) -> Parts {
    let is_bad = |row: &LargestRow| row.largest.is_none() || row.failure.is_some();
    (
        sentence(report),
        report.rows.iter().any(is_bad),
        grid(report),
        notes(report),
    )
}

fn sentence(report: &LargestReport) -> String {
    let name = &report.parameter;
    match report.rows.as_slice() {
        [] => "No row was finished.".to_owned(),
        [row] => match (row.largest, &row.next) {
            _ if row.failure.is_some() => format!("The largest {name} is unknown."),
            (Some(largest), None) => format!("The largest {name}, {largest}, fits."),
            (Some(largest), Some(_)) => format!("The largest {name} that fits is {largest}."),
            (None, _) => format!("The smallest {name}, {}, does not fit.", report.smallest),
        },
        rows => format!("The largest {name} that fits, in {} cases:", rows.len()),
    }
}

fn grid(report: &LargestReport) -> Grid {
    let first = report.rows.first();
    let others = first.into_iter().flat_map(|row| row.others.keys().cloned());
    let has_settings = report.rows.iter().any(|row| row.alloc_conf.is_some());
    let has_levers = report.rows.iter().any(|row| row.lever.is_some());
    let name = &report.parameter;
    let heads = ["GPU".to_owned(), "memory".to_owned()]
        .into_iter()
        .chain(has_settings.then(|| "settings".to_owned()))
        .chain(others)
        .chain(has_levers.then(|| "with".to_owned()))
        .chain([
            format!("largest {name}"),
            "peak reserved".to_owned(),
            "the next".to_owned(),
            "lacks".to_owned(),
            "at".to_owned(),
            "basis".to_owned(),
        ])
        .chain(has_levers.then(|| "saves".to_owned()));
    let row = |row: &LargestRow| {
        let next = row.next.as_ref();
        let settings = row.alloc_conf.as_deref().map(settings);
        [row.gpu.clone(), Bytes(row.memory).to_string()]
            .into_iter()
            .chain(settings)
            .chain(row.others.values().map(u64::to_string))
            .chain(has_levers.then(|| words::or_nothing(row.lever.clone())))
            .chain([
                words::or_nothing(row.largest),
                words::or_nothing(row.peak_reserved.map(Bytes)),
                words::or_nothing(next.map(|next| next.value)),
                words::or_nothing(next.and_then(|next| next.lacks).map(Bytes)),
                words::or_nothing(next.and_then(|next| next.location.clone())),
                row.basis.to_string(),
            ])
            .chain(has_levers.then(|| words::or_nothing(row.saves.map(bytes))))
            .collect::<Vec<_>>()
    };
    Grid::new("lr", heads, report.rows.iter().map(row))
}

/// A short table, as for a README: one row for each GPU and setting, and one column for each
/// command.
pub(super) fn short(report: &LargestReport) -> Grid {
    let name = &report.parameter;
    let column = |row: &LargestRow| {
        let others = row.others.iter();
        let words = others.map(|(name, value)| format!("{name} {value}"));
        let words: Vec<String> = words.chain(row.lever.clone()).collect();
        if words.is_empty() {
            format!("fits up to {name}")
        } else {
            format!("{name} with {}", words.join(", "))
        }
    };
    let mut columns: Vec<String> = Vec::new();
    let mut rows: BTreeMap<(usize, Option<&str>), BTreeMap<usize, String>> = BTreeMap::new();
    let gpus = words::distinct(report.rows.iter().map(|row| row.gpu.as_str()));
    for row in &report.rows {
        let head = column(row);
        let at = columns.iter().position(|column| *column == head);
        let at = at.unwrap_or_else(|| {
            columns.push(head);
            columns.len() - 1
        });
        let cell = match row.largest {
            _ if row.failure.is_some() => "unknown".to_owned(),
            largest => words::or_nothing(largest),
        };
        let gpu = gpus.iter().position(|gpu| *gpu == row.gpu).unwrap_or(0);
        let cells = rows.entry((gpu, row.alloc_conf.as_deref())).or_default();
        cells.insert(at, cell);
    }
    let has_settings = rows.keys().any(|(_, conf)| conf.is_some());
    let heads = ["GPU".to_owned(), "memory".to_owned()]
        .into_iter()
        .chain(has_settings.then(|| "settings".to_owned()))
        .chain(columns.iter().cloned());
    let line = |((gpu, conf), cells): (&(usize, Option<&str>), &BTreeMap<usize, String>)| {
        let memory = report.rows.iter().find(|row| row.gpu == gpus[*gpu]);
        let memory = words::or_nothing(memory.map(|row| Bytes(row.memory)));
        let cell = |at: usize| words::or_nothing(cells.get(&at));
        [gpus[*gpu].to_owned(), memory]
            .into_iter()
            .chain(has_settings.then(|| settings(conf.unwrap_or_default())))
            .chain((0..columns.len()).map(cell))
            .collect::<Vec<_>>()
    };
    let aligned = if has_settings { "lrlr" } else { "lr" };
    Grid::new(aligned, heads, rows.iter().map(line))
}

fn settings(conf: &str) -> String {
    match conf {
        "" => "(no settings)".to_owned(),
        conf => conf.to_owned(),
    }
}

/// More memory is negative.
fn bytes(saved: i64) -> String {
    let sign = if saved < 0 { "−" } else { "" };
    format!("{sign}{}", Bytes(saved.unsigned_abs()))
}

/// Names the commands whose requests do not depend on the value.
fn without_effect(report: &LargestReport) -> BTreeSet<String> {
    let is_all = report.rows.iter().all(|row| row.has_no_effect);
    let rows = report.rows.iter().filter(|row| row.has_no_effect);
    rows.map(|row| {
        let lever = row.lever.as_ref();
        let lever = lever.map_or_else(|| "no lever".to_owned(), ToString::to_string);
        let others = row.others.iter();
        let with: String = others
            .map(|(name, value)| format!(", {name} {value}"))
            .collect();
        let with = if is_all {
            String::new()
        } else {
            format!("With {lever}{with}: ")
        };
        format!(
            "{with}{} program made the same requests with different values: does it use {}?",
            if is_all { "The" } else { "the" },
            report.parameter
        )
    })
    .collect()
}

fn notes(report: &LargestReport) -> Vec<String> {
    let name = &report.parameter;
    let mut notes = Vec::new();
    for row in &report.rows {
        let of = row.lever.as_ref().map_or_else(
            || row.gpu.clone(),
            |lever| format!("{} with {lever}", row.gpu),
        );
        if let Some(failure) = &row.failure {
            notes.push(format!("{of}: the search ended early, because {failure}."));
        }
        if row.is_refuted {
            notes.push(format!(
                "{of}: a run refuted a prediction, so more runs followed."
            ));
        }
        if let Some(exception) = row.exception {
            notes.push(format!(
                "{of}: {name} {exception} does not fit, although a larger one does."
            ));
        }
    }
    if report
        .rows
        .iter()
        .any(|row| row.failure.is_none() && row.next.is_none())
    {
        notes.push(format!(
            "Where no next value is shown, the largest {name}, {}, fits.",
            report.largest
        ));
    }
    notes.extend(without_effect(report));
    let has = |basis: Evidence| report.rows.iter().any(|row| row.basis == basis);
    if has(Evidence::NextPredicted) {
        notes.push(format!(
            "next predicted: the program ran on this GPU with the largest {name}. A replay of its \
             requests with the next one runs out of memory. A run might not."
        ));
    }
    if has(Evidence::Predicted) {
        notes.push(
            "predicted: by replays of what other rows recorded, so runs may find a higher or a \
             lower value. `--fresh` runs all rows."
                .to_owned(),
        );
    }
    if report.rows.iter().any(|row| row.lever.is_some()) {
        notes.push(format!(
            "saves: how much less is reserved at the peak, with the largest {name} of the command \
             itself on this GPU."
        ));
    }
    notes.extend(notes_on_doubts(&Doubt::of_all(
        report.rows.iter().map(|row| &row.doubts),
    )));
    if report.is_interrupted {
        notes.push("Interrupted: rows are missing.".to_owned());
    }
    notes.push(words::count(report.runs, "run") + ".");
    notes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_doubts_of_all_rows_are_one() {
        let timing = |line: &str| Doubt::Timing {
            waits: 0,
            at: vec![line.to_owned()],
        };
        let row = |doubts: Vec<Doubt>| LargestRow {
            gpu: "h200-141".to_owned(),
            memory: 141 << 30,
            alloc_conf: None,
            others: Default::default(),
            lever: None,
            saves: None,
            largest: Some(8),
            peak_reserved: None,
            next: None,
            basis: Evidence::Predicted,
            runs: 0,
            is_refuted: false,
            exception: None,
            failure: None,
            has_no_effect: false,
            doubts,
        };
        let report = LargestReport {
            parameter: "batch".to_owned(),
            smallest: 1,
            largest: 8,
            rows: vec![
                row(vec![]),
                row(vec![timing("b.py:2")]),
                LargestRow {
                    lever: Some("half".to_owned()),
                    has_no_effect: true,
                    ..row(vec![timing("a.py:1")])
                },
            ],
            curves: vec![],
            runs: 3,
            is_interrupted: false,
        };
        let notes = notes(&report);
        let doubts: Vec<&String> = notes
            .iter()
            .filter(|note| note.starts_with("Uncertain"))
            .collect();
        assert_eq!(
            doubts,
            [
                "Uncertain: the program asked whether the GPU had finished at b.py:2, a.py:1, so \
              peaks can depend on timing."
            ]
        );
        let with = "With half: the program made the same requests with different values: does it \
                    use batch?";
        assert!(notes.iter().any(|note| note == with), "{notes:?}");
        let has = |text: &str| notes.iter().any(|note| note.contains(text));
        assert!(has("by replays of what other rows recorded"), "{notes:?}");
    }
}
