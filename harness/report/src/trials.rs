mod calls;
mod largest;
pub mod matrix;

use std::collections::BTreeMap;

use harness_allocator::units::Bytes;
use harness_exec::doubts::Doubt;
use harness_exec::matrix::MatrixReport;
use harness_exec::torch_record::Caller;
use harness_exec::trials::faults::{
    FaultCase, FaultReport, RecoveryExpectation, Second, TrialOutcome,
};
use harness_exec::trials::largest::LargestReport;
use harness_exec::trials::least::{LeastReport, OrderLeast};
use harness_exec::trials::settings::{Basis, OtherOrder, SettingsReport, SettingsRow};
use harness_record::FaultedRuns;

use super::terminal::{Style, Text};
use super::words::{self, Grid};
use super::{escape::prose, page::Page};

/// Longest error that a table shows whole.
const LONGEST_ERROR: usize = 60;

/// Shown with comparisons of address orders.
const ORDERS: &str = "The address order of a real driver is unknown. The difference between orders \
     shows the uncertainty of the figure.";

#[derive(Clone, Copy, Debug)]
pub enum Trials<'a> {
    /// Each allocation was made to fail in one run, with an optional expectation.
    Faults(&'a FaultReport, Option<RecoveryExpectation>),
    Calls(&'a FaultedRuns),
    Least(&'a LeastReport),
    Largest(&'a LargestReport),
    Matrix(&'a MatrixReport),
    Settings(&'a SettingsReport),
}

/// The sentence, whether it is bad news, the table, and notes.
type Parts = (String, bool, Grid, Vec<String>);

pub fn text(trials: Trials<'_>, style: Style, width: Option<usize>) -> String {
    let (sentence, is_bad, grid, notes) = parts(trials, Columns::Few);
    let mut text = Text::new(style, width);
    text.important(&sentence, is_bad);
    if !grid.rows.is_empty() {
        text.line("");
        text.table(&grid, 2, None);
    }
    notes.iter().for_each(|note| text.wrapped(note, 2));
    text.text.trim_start().to_owned()
}

/// Draws memory against the value, if runs recorded it.
pub fn picture(trials: Trials<'_>) -> Option<String> {
    match trials {
        Trials::Largest(report) => largest::picture::draw(report),
        _ => None,
    }
}

/// `picture` is the name of the picture's file.
pub fn markdown(trials: Trials<'_>, picture: Option<&str>) -> String {
    let (sentence, _, grid, notes) = parts(trials, Columns::All);
    let mut page = Page::default();
    page.block(format!("**{}**", prose(&sentence)));
    if let Trials::Largest(report) = trials {
        page.grid(&largest::short(report));
    }
    if let Some(picture) = picture {
        page.block(format!("![{}]({picture})", prose(&sentence)));
    }
    if !grid.rows.is_empty() {
        page.grid(&grid);
    }
    page.list(notes.iter().map(|note| prose(note)));
    page.ended().text
}

/// The columns of the table of failures. JSON has all figures.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Columns {
    All,
    Few,
}

fn parts(trials: Trials<'_>, columns: Columns) -> Parts {
    match trials {
        Trials::Faults(report, expectation) => {
            let expected = expectation.unwrap_or(RecoveryExpectation::Recovers);
            let is_bad =
                report.is_untested() || report.injected().any(|case| !case.meets(expected));
            (
                sentence_of_faults(report),
                is_bad,
                grid_of_faults(report, columns),
                notes_on_faults(report, expectation, columns),
            )
        }
        Trials::Calls(runs) => (
            calls::sentence(runs),
            !runs.passed(),
            calls::grid(runs),
            calls::notes(runs),
        ),
        Trials::Least(report) => of_least(report),
        Trials::Largest(report) => largest::parts(report),
        Trials::Matrix(report) => matrix::parts(report),
        Trials::Settings(report) => (
            sentence_of_settings(report),
            report.best.is_none(),
            grid_of_settings(report),
            notes_on_settings(report),
        ),
    }
}

fn times(count: usize) -> String {
    if count == 1 {
        "once".to_owned()
    } else {
        format!("{count} times")
    }
}

fn sentence_of_faults(report: &FaultReport) -> String {
    let all = report.injected().count();
    let well = |case: &&FaultCase| case.continues();
    let recovered = report
        .injected()
        .filter(well)
        .filter(|case| !case.holds_memory)
        .count();
    let mut parts = vec![match recovered {
        _ if all == 0 => "No failure was injected".to_owned(),
        0 => format!(
            "The program survives none of {}",
            words::count(all, "injected failure")
        ),
        _ if recovered == all && all == 1 => {
            "The program recovers from the injected failure".to_owned()
        }
        _ if recovered == all => format!("The program recovers from all {all} injected failures"),
        _ => format!(
            "The program recovers from {recovered} of {}",
            words::count(all, "injected failure")
        ),
    }];
    let holding: Vec<i64> = report
        .cases
        .iter()
        .filter(well)
        .filter(|case| case.holds_memory)
        .filter_map(|case| case.more_at_end)
        .collect();
    if let Some(most) = holding.iter().max() {
        parts.push(format!(
            "{} it continues, but up to {} more stay allocated at its end",
            times(holding.len()),
            Bytes(most.unsigned_abs())
        ));
    }
    let mut ends: BTreeMap<(&TrialOutcome, String, String), usize> = BTreeMap::new();
    // The table has who waits for whom.
    let hanging = report
        .cases
        .iter()
        .filter(|case| has_hanging_ranks(case))
        .count();
    for case in report
        .injected()
        .filter(|case| !well(case) && !has_hanging_ranks(case))
    {
        // The failure and its location complete outcomes that do not name them.
        let place = case
            .stack
            .first()
            .map_or_else(String::new, |frame| format!(" at {}", frame.short()));
        let cause = case
            .call
            .as_ref()
            .map_or_else(|| error_of(&report.caller), |call| format!("failed {call}"));
        *ends.entry((&case.outcome, cause, place)).or_default() += 1;
    }
    if hanging > 0 {
        parts.push(format!("{} its ranks hang", times(hanging)));
    }
    parts.extend(ends.iter().map(|((outcome, cause, place), count)| {
        let what = ending(outcome, cause, place, &report.caller);
        format!("{} it {what}", times(*count))
    }));
    parts.join("; ") + "."
}

const fn has_hanging_ranks(case: &FaultCase) -> bool {
    matches!(&case.outcome, TrialOutcome::Hang { ranks } if !ranks.is_empty())
}

/// The error of the library, without an article.
fn error_of(caller: &Caller) -> String {
    match caller {
        Caller::Torch => "OutOfMemoryError".to_owned(),
        Caller::Library { name, .. } => format!("out of memory error of {name}"),
        Caller::Program => "out of memory error".to_owned(),
    }
}

fn ending(outcome: &TrialOutcome, cause: &str, place: &str, caller: &Caller) -> String {
    let error_of = error_of(caller);
    let after = if place.is_empty() {
        String::new()
    } else {
        format!(" after the {cause}{place}")
    };
    match outcome {
        TrialOutcome::Recovered | TrialOutcome::ServedByRetry => "recovers".to_owned(),
        TrialOutcome::EndedInHandler => {
            format!("ends in the handler of the {error_of}{place}, with exit code 0")
        }
        TrialOutcome::OutOfMemory if *caller == Caller::Torch => {
            format!("ends with {error_of}{place}")
        }
        TrialOutcome::OutOfMemory => format!("ends with the {error_of}{place}"),
        TrialOutcome::OtherError { error } => format!(
            "ends with `{}`{after}",
            words::shortened(error, LONGEST_ERROR)
        ),
        TrialOutcome::ExitCode { exit_code } => format!("ends with exit code {exit_code}{after}"),
        TrialOutcome::Signal { signal } => format!("ends with signal {signal}{after}"),
        TrialOutcome::Hang { .. } => format!("exceeds its time limit{after}"),
        TrialOutcome::NotReached => "does not reach the call to fail".to_owned(),
    }
}

fn outcome_cell(outcome: &TrialOutcome, caller: &Caller) -> String {
    match outcome {
        TrialOutcome::Recovered => "recovered".to_owned(),
        TrialOutcome::ServedByRetry => match caller {
            Caller::Torch => "served by PyTorch's retry".to_owned(),
            Caller::Library { name, .. } => format!("{name} continued"),
            Caller::Program => "the program continued".to_owned(),
        },
        TrialOutcome::EndedInHandler => "exit code 0 in the handler of".to_owned(),
        TrialOutcome::OutOfMemory => error_of(caller),
        TrialOutcome::OtherError { error } => words::shortened(error, LONGEST_ERROR),
        TrialOutcome::ExitCode { exit_code } => format!("exit code {exit_code}"),
        TrialOutcome::Signal { signal } => format!("signal {signal}"),
        TrialOutcome::Hang { ranks } => match ranks.first() {
            Some(waits) => format!("hang: {waits}"),
            None => "hang".to_owned(),
        },
        TrialOutcome::NotReached => "not reached".to_owned(),
    }
}

fn more(bytes: i64) -> String {
    if bytes == 0 {
        "the same".to_owned()
    } else {
        words::signed(bytes)
    }
}

fn grid_of_faults(report: &FaultReport, columns: Columns) -> Grid {
    let first = report.first.submitted;
    let cells = |case: &FaultCase| {
        let place = case
            .stack
            .first()
            .map(|frame| format!("{} {}", frame.short(), frame.name));
        let clean = if case.is_clean_end
            && case.call.is_none()
            && case.outcome != TrialOutcome::OutOfMemory
        {
            let after = match case.outcome {
                TrialOutcome::EndedInHandler => "",
                _ => " after",
            };
            format!("{after} {}", error_of(&report.caller))
        } else {
            String::new()
        };
        let kept = case
            .more_at_end
            .filter(|_| case.holds_memory && case.continues());
        let kept = kept.map_or_else(String::new, |more| {
            format!(", keeps {}", Bytes(more.unsigned_abs()))
        });
        let alone = case.alone.as_ref();
        let alone = alone.map(|outcome| outcome_cell(outcome, &report.caller));
        let work =
            (first > 0).then(|| format!("{:.0} %", case.submitted as f64 * 100.0 / first as f64));
        vec![
            words::or_nothing(case.rank),
            attempt(case),
            words::or_nothing(case.call.is_none().then_some(Bytes(case.size))),
            words::or_nothing(place),
            outcome_cell(&case.outcome, &report.caller) + &clean + &kept,
            words::or_nothing(alone),
            words::or_nothing(case.more_at_end.map(more)),
            more(case.more_at_peak),
            words::or_nothing(case.next_size.map(Bytes)),
            words::or_nothing(work),
        ]
    };
    let heads = [
        "rank",
        "attempt",
        "size",
        "location",
        "outcome",
        "single failure",
    ];
    let figures = [
        "allocated at the end",
        "peak reserved",
        "next request",
        "submitted work",
    ];
    let grid = Grid::new(
        "rrrlllr",
        heads.into_iter().chain(figures),
        report.cases.iter().map(cells),
    );
    let is_shown = |head: &str| {
        columns == Columns::All || ["rank", "attempt", "location", "outcome"].contains(&head)
    };
    grid.with_columns(|head| is_shown(head) && (report.has_ranks() || head != "rank"))
}

fn attempt(case: &FaultCase) -> String {
    case.call.as_ref().map_or_else(
        || case.attempt.to_string(),
        |call| format!("{call} {}", case.attempt),
    )
}

fn numbered(case: &FaultCase) -> String {
    case.rank.map_or_else(
        || attempt(case),
        |rank| format!("{} of rank {rank}", attempt(case)),
    )
}

fn notes_on_faults(
    report: &FaultReport,
    expectation: Option<RecoveryExpectation>,
    columns: Columns,
) -> Vec<String> {
    let first = &report.first;
    let interrupted = (report.left_out > 0).then(|| {
        format!(
            "Interrupted: {} not started.",
            words::count(report.left_out, "run")
        )
    });
    let expectation = expectation.map(|expectation| note_on_expectation(report, expectation));
    // Processes on several GPUs together hold more than the most that one GPU had reserved.
    let (ends, of) = match first.processes {
        0 | 1 => ("at its end".to_owned(), ""),
        all => (format!("at the ends of its {all} processes"), " on one GPU"),
    };
    let held = first.allocated_at_end.map_or_else(String::new, |bytes| {
        format!(", left {} allocated {ends}", Bytes(bytes))
    });
    let differences = match columns {
        Columns::All => match &report.second {
            Some(second) if second.is_comparable && second.has_copies => {
                " `allocated at the end` and `peak reserved` are differences to the second run."
            }
            Some(second) if second.is_comparable => {
                " `allocated at the end` and `peak reserved` are differences to the nearer one of \
                 the two runs without failures."
            }
            _ => " `allocated at the end` and `peak reserved` are differences to that run.",
        },
        Columns::Few => "",
    };
    let random = note_on_second_run(report);
    let figures = format!(
        "Without failures the program made {} to allocate device memory{held} and reserved at most \
         {}{of}.{differences} {} Injected: {}.",
        words::count(first.attempts, "attempt"),
        Bytes(first.peak_reserved),
        extent(&report.caller),
        report.chosen,
    );
    let several = (first.processes > 1 && !report.has_ranks()).then(|| {
        format!(
            "{} processes used \
         the GPU. The attempt fails in each of them; sizes and locations come from the process \
         with the most attempts.",
            first.processes
        )
    });
    [
        interrupted,
        expectation,
        Some(figures),
        random,
        note_on_less_work(report),
        note_on_chance(report),
        note_on_not_reached(report),
        note_on_next_request(report),
        note_on_single_failures(report),
        several,
    ]
    .into_iter()
    .flatten()
    .chain(notes_on_doubts(&report.all_doubts()))
    .collect()
}

/// How often the program survived a single failed attempt without an error.
fn note_on_single_failures(report: &FaultReport) -> Option<String> {
    let alone = || report.cases.iter().filter_map(|case| case.alone.as_ref());
    let runs = alone().count();
    let served = alone()
        .filter(|outcome| **outcome == TrialOutcome::ServedByRetry)
        .count();
    let continued = match &report.caller {
        _ if runs == 0 => return None,
        Caller::Torch => "PyTorch's retry succeeded".to_owned(),
        Caller::Library { name, .. } => format!("{name} continued without an error"),
        Caller::Program => return None,
    };
    let runs = words::count(runs, "run");
    Some(format!(
        "With a single failed attempt, {continued} in {served} of {runs}."
    ))
}

/// How many attempts fail in a row.
fn extent(caller: &Caller) -> String {
    match caller {
        Caller::Torch => {
            "Each run fails two attempts in a row, because PyTorch retries once.".to_owned()
        }
        Caller::Library {
            name,
            shows_errors: true,
        } => format!(
            "Each run fails attempts until the program gets the out of memory error of {name}."
        ),
        Caller::Library {
            name,
            shows_errors: false,
        } => format!(
            "Each run fails two attempts in a row. Errors of {name} that the program catches are \
             unknown: Python shows them from 3.12 on."
        ),
        Caller::Program => "Each run fails one attempt.".to_owned(),
    }
}

/// The cases that continue with less work than each run without failures, and its amount.
fn with_less_work(report: &FaultReport) -> (Vec<&FaultCase>, u64) {
    let first = report.first.submitted;
    let second = report.second.as_ref().filter(|second| second.is_comparable);
    let usual = second.map_or(first, |second| match second.figures.submitted {
        submitted if second.has_copies => submitted,
        submitted => submitted.min(first),
    });
    let has_less = |case: &&FaultCase| case.continues() && case.submitted < usual;
    (report.cases.iter().filter(has_less).collect(), usual)
}

/// Names failures after which the program continues with less work than without them.
fn note_on_less_work(report: &FaultReport) -> Option<String> {
    let (less, usual) = with_less_work(report);
    let least = less.iter().map(|case| case.submitted).min()?;
    if report.chance.is_some() {
        return None;
    }
    Some(format!(
        "The program continues with less work after failures of these attempts, so results may be \
         missing: {} (at least {:.0} % of the usual work).",
        less.iter()
            .map(|case| numbered(case))
            .collect::<Vec<_>>()
            .join(", "),
        least as f64 * 100.0 / usual as f64
    ))
}

/// What chance explains, and why.
fn note_on_chance(report: &FaultReport) -> Option<String> {
    let chance = report.chance.as_ref()?;
    let continuing = report.injected().filter(|case| case.continues());
    let most = continuing.filter_map(|case| case.more_at_end).max();
    let more = most.filter(|most| *most > 0).map(|most| {
        format!(
            "with up to {} more allocated at their end",
            Bytes(most.unsigned_abs())
        )
    });
    let less = !with_less_work(report).0.is_empty();
    let what: Vec<String> = more
        .into_iter()
        .chain(less.then(|| "with less work".to_owned()))
        .collect();
    Some(format!(
        "Some runs continue {}. That may be chance, so it does not count: {chance}.",
        what.join(" or ")
    ))
}

/// Names the failures that the program did not reach.
fn note_on_not_reached(report: &FaultReport) -> Option<String> {
    let was_missed = |case: &&FaultCase| case.outcome == TrialOutcome::NotReached;
    let missed = report.cases.iter().filter(was_missed);
    let missed: Vec<String> = missed.map(numbered).collect();
    (!missed.is_empty()).then(|| {
        format!(
            "Nothing failed in the runs for these attempts, because the program did not make \
             them again: {}.",
            missed.join(", ")
        )
    })
}

/// Names failures after which the program requests as much again, or more, as from an arena that
/// doubles its requests. A real GPU that stays full refuses that too. PyTorch rounds requests, so
/// its sizes show nothing.
fn note_on_next_request(report: &FaultReport) -> Option<String> {
    let is_no_smaller = |case: &&FaultCase| {
        case.outcome == TrialOutcome::Recovered && case.next_size >= Some(case.size)
    };
    let cases = report.cases.iter().filter(is_no_smaller);
    let no_smaller: Vec<String> = cases.map(numbered).collect();
    (report.caller != Caller::Torch && !no_smaller.is_empty()).then(|| {
        format!(
            "After failures of these attempts the next request is at least as large as the failed \
             one, so it fails again if the GPU stays full: {}.",
            no_smaller.join(", ")
        )
    })
}

fn note_on_expectation(report: &FaultReport, expectation: RecoveryExpectation) -> String {
    let missed: Vec<String> = report
        .injected()
        .filter(|case| !case.meets(expectation))
        .map(numbered)
        .collect();
    let what = match expectation {
        RecoveryExpectation::Recovers => "recovers",
        RecoveryExpectation::EndsCleanly => "recovers or ends cleanly",
    };
    let all = report.injected().count();
    match missed.len() {
        _ if report.is_untested() => "Expectation not met: no failure was injected.".to_owned(),
        0 => format!("Expectation met: it {what}."),
        missed if missed == all => {
            format!("Expectation not met: it {what} after none of the failures.")
        }
        _ => format!(
            "Expectation not met: it {what}, except after failures of these attempts: {}.",
            missed.join(", ")
        ),
    }
}

/// Names the differences between two runs without failures. `None` if they are equal.
fn note_on_second_run(report: &FaultReport) -> Option<String> {
    let second = report.second.as_ref()?;
    let measure = match second {
        Second {
            is_comparable: false,
            ..
        } => "That run is no measure, so each run is compared with the first one.",
        Second {
            has_copies: true, ..
        } => {
            "Only attempts that both make are failed. Further runs are copies of the second run, \
             with the same random numbers, so each is compared with that one."
        }
        Second { .. } => "Only attempts that both make are failed.",
    };
    Some(format!(
        "The program is not deterministic: in a second run without failures, {}. {measure}",
        second.difference
    ))
}

/// Why the figures may differ from those on a GPU.
fn notes_on_doubts(doubts: &[Doubt]) -> impl Iterator<Item = String> {
    doubts.iter().map(|doubt| format!("Uncertain: {doubt}."))
}

/// The least memory that is enough, and the largest tested one that is too little, if any is. Both
/// have their bytes if they look alike when rounded.
fn least_sizes(order: &OrderLeast) -> (String, Option<String>) {
    let [enough, too_little] = [order.enough, order.too_little].map(Bytes);
    let show = match enough.to_string() == too_little.to_string() {
        true => words::size,
        false => |bytes: Bytes| bytes.to_string(),
    };
    let less = (too_little > Bytes::ZERO).then(|| show(too_little));
    (show(enough), less)
}

fn of_least(report: &LeastReport) -> Parts {
    let first = report.orders.first();
    let sentence = first.map_or_else(
        || "No tested amount of memory is enough.".to_owned(),
        |order| {
            let (enough, too_little) = least_sizes(order);
            let less = too_little.map_or_else(String::new, |less| format!(", {less} are not"));
            let [plenty, reserved] = [report.plenty, report.peak_reserved].map(Bytes);
            format!("{enough} are enough{less}. With {plenty} the program reserved {reserved}.")
        },
    );
    let first = first.map_or(0, |order| order.enough);
    let rows = report.orders.iter().map(|order| {
        let (enough, too_little) = least_sizes(order);
        let mark = if order.is_monotonic { "" } else { " ?" };
        let enough = format!("{enough}{mark}");
        vec![
            order.addresses.clone(),
            enough,
            words::or_nothing(too_little),
            more(order.enough as i64 - first as i64),
        ]
    });
    let grid = Grid::new(
        "lr",
        ["addresses", "least memory", "too little", "compared"],
        rows,
    );
    let is_unsure = report.orders.iter().any(|order| !order.is_monotonic);
    let unsure =
        "`?`: a larger amount failed, so smaller amounts than the one shown may be enough.";
    let notes = [
        (report.orders.len() > 1).then_some(ORDERS),
        is_unsure.then_some(unsure),
    ];
    let notes = notes.into_iter().flatten().map(str::to_owned);
    let differs = report
        .orders
        .iter()
        .find_map(|order| order.difference.as_ref());
    let differs = differs.map(|difference| {
        format!(
            "A run with enough memory {difference}: the program is not deterministic, or adapts to \
             the memory. So another run may need more or less."
        )
    });
    (
        sentence,
        false,
        grid,
        notes
            .chain(differs)
            .chain(notes_on_doubts(&report.all_doubts()))
            .collect(),
    )
}

fn named(row: &SettingsRow) -> String {
    if row.alloc_conf.is_empty() {
        "(no settings)".to_owned()
    } else {
        row.alloc_conf.clone()
    }
}

fn row_ends(row: &SettingsRow) -> String {
    match (row.exit_code, row.signal) {
        _ if row.is_hang => "hang".to_owned(),
        (_, Some(signal)) => format!("signal {signal}"),
        (Some(0), _) if row.has_ooms() => "success after OOM".to_owned(),
        (Some(0), _) => "success".to_owned(),
        (code, _) if row.ended_out_of_memory => {
            format!("OutOfMemoryError, exit code {}", words::or_nothing(code))
        }
        (code, _) => format!("exit code {}", words::or_nothing(code)),
    }
}

fn sentence_of_settings(report: &SettingsReport) -> String {
    let Some(best) = report.best.and_then(|best| report.rows.get(best)) else {
        return format!(
            "The program fails in {} with each of these settings.",
            Bytes(report.memory)
        );
    };
    let memory = best.least_memory.map_or_else(
        || peak_by_orders(best),
        |least| format!("needs {}", Bytes(least)),
    );
    if report.rows.len() == 1 {
        return format!("The program {memory}.");
    }
    let well = report.rows.iter().filter(|row| row.ends_well()).count();
    format!(
        "{} is best: it {memory}. The program succeeds with {well} of {}.",
        named(best),
        words::count(report.rows.len(), "setting")
    )
}

/// The peak of reserved memory, as an interval if it depends on the order of addresses.
fn peak_by_orders(row: &SettingsRow) -> String {
    let peaks = || {
        [row]
            .into_iter()
            .chain(row.other_orders.iter().map(|other| &other.row))
            .map(|row| row.peak_reserved)
    };
    let [least, most] =
        [peaks().min(), peaks().max()].map(|peak| Bytes(peak.unwrap_or_default()).to_string());
    if least == most {
        format!("reserves at most {most}")
    } else {
        format!("reserves at most {least} to {most}, depending on the order of addresses")
    }
}

fn grid_of_settings(report: &SettingsReport) -> Grid {
    let heads = [
        "settings",
        "outcome",
        "peak reserved",
        "retries",
        "OOMs",
        "driver calls",
        "least memory",
        "basis",
    ];
    let rows = report.rows.iter().map(|row| {
        let figures =
            [row.num_alloc_retries, row.num_ooms, Some(row.driver_calls)].map(words::or_unknown);
        let cells = [
            named(row),
            row_ends(row),
            Bytes(row.peak_reserved).to_string(),
        ]
        .into_iter()
        .chain(figures);
        cells
            .chain([
                words::or_nothing(row.least_memory.map(Bytes)),
                row.basis.to_string(),
            ])
            .collect()
    });
    let with_least = report.rows.iter().any(|row| row.least_memory.is_some());
    Grid::new("llrrrrrl", heads, rows).with_columns(|head| with_least || head != "least memory")
}

fn notes_on_settings(report: &SettingsReport) -> Vec<String> {
    let mut notes: Vec<String> = report
        .is_interrupted
        .then(|| "Interrupted: the remaining runs did not start.".to_owned())
        .into_iter()
        .collect();
    for row in &report.rows {
        if let [first, others @ ..] = row.least_by_order.as_slice()
            && !others.is_empty()
        {
            let others = others.iter().map(|order| {
                format!(
                    "{} with {} ({})",
                    Bytes(order.enough),
                    order.addresses,
                    more(order.enough as i64 - first.enough as i64)
                )
            });
            let others = words::joined(others, ", ");
            notes.push(format!(
                "{} needs {} with addresses {}, {others}.",
                named(row),
                Bytes(first.enough),
                first.addresses
            ));
        }
        if !row.other_orders.is_empty() {
            let other = |other: &OtherOrder| {
                let peak = more(other.row.peak_reserved as i64 - row.peak_reserved as i64);
                let basis = if other.row.basis == Basis::Predicted {
                    " (predicted)"
                } else {
                    ""
                };
                format!(
                    "with addresses {}: {}, peak reserved {peak}{basis}",
                    other.addresses,
                    row_ends(&other.row)
                )
            };
            let others = row
                .other_orders
                .iter()
                .map(other)
                .collect::<Vec<_>>()
                .join("; ");
            notes.push(format!("{}: {others}.", named(row)));
        }
    }
    if report
        .rows
        .iter()
        .any(|row| row.least_by_order.len() > 1 || !row.other_orders.is_empty())
    {
        notes.push(ORDERS.to_owned());
    }
    if report.rows.iter().any(|row| row.basis == Basis::Predicted) {
        notes.push("predicted: by a replay of the first run; confirmed: by a run.".to_owned());
    }
    notes.extend(
        report
            .unpredicted
            .iter()
            .map(|reason| format!("Each setting was run, because the program {reason}.")),
    );
    notes.extend(notes_on_doubts(&report.all_doubts()));
    notes
}

#[cfg(test)]
mod tests;
