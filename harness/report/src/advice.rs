use std::fmt::Write as _;
use std::ptr;

use harness_allocator::units::{Bytes, Nanos};
use harness_base::words::count;
use harness_explain::advise::{Advice, AdviceVerdict};
use harness_explain::fidelity::Fidelity;
use harness_explain::grid::{GridRow, UntriedChange};

use super::text::Detail;
use super::{terminal, words::Grid};

/// How many settings and how many changes in the program a brief text has at least, if there are
/// so many.
const BRIEF: usize = 3;

/// Renders the result on one screen: the advice, the headline of the explanation, one line per
/// outcome, and notes on the figures. A brief text has the settings that `is_asked` selects, and
/// those that need the least memory.
pub fn render(
    advice: &Advice<'_>,
    headline: Option<&str>,
    (endings, not_tried): (&[GridRow], &[UntriedChange]),
    memory: Option<Bytes>,
    fidelity: Option<&Fidelity>,
    in_program: &[String],
    (detail, is_asked): (Detail, &dyn Fn(&GridRow) -> bool),
) -> String {
    let mut text = format!("{}\n", first_sentence(advice, memory));
    text.extend(headline.map(|headline| format!("{headline}\n")));
    text += &backing(fidelity, advice.is_complete);
    if !in_program.is_empty() {
        text += "\nChanges in the program, each tested by a replay with the recorded settings:\n";
        let shown = match detail {
            Detail::Brief => BRIEF,
            Detail::Full => in_program.len(),
        };
        for (number, sentence) in in_program.iter().take(shown).enumerate() {
            let _ = writeln!(text, "  {}. {sentence}.", number + 1);
        }
        text += &rest(in_program.len().saturating_sub(shown), "smaller change");
    }
    match detail {
        Detail::Full => text += &table(endings.iter(), not_tried),
        Detail::Brief => {
            let shown = brief(advice, endings, is_asked);
            text += &table(shown.iter().copied(), &[]);
            let hidden = endings.len() - shown.len() + not_tried.len();
            text += &rest(hidden, "other setting");
        }
    }
    text += "\nDriver times come from a cost model.";
    if endings
        .iter()
        .any(|one| one.least.is_some_and(|least| !least.is_monotonic))
    {
        text +=
            " `?` marks settings with which more memory hurts, so their least memory is a guess.";
    }
    text + "\n"
}

/// The recorded settings, the recommended ones, those that are asked for, and those that need the
/// least memory.
fn brief<'a>(
    advice: &Advice<'_>,
    endings: &'a [GridRow],
    is_asked: &dyn Fn(&GridRow) -> bool,
) -> Vec<&'a GridRow> {
    let mut by_least: Vec<&GridRow> = endings.iter().filter(|one| one.least.is_some()).collect();
    by_least.sort_by_key(|one| least(one));
    let best = |one: &GridRow| by_least.iter().take(BRIEF).any(|best| ptr::eq(*best, one));
    let is_shown = |one: &&GridRow| {
        ptr::eq(*one, advice.own)
            || advice.recommended().is_some_and(|best| ptr::eq(*one, best))
            || is_asked(one)
            || best(one)
    };
    endings.iter().filter(is_shown).collect()
}

/// Says how much `-v` adds.
fn rest(hidden: usize, what: &str) -> String {
    match hidden {
        0 => String::new(),
        hidden => format!("`-v` shows {}.\n", count(hidden as u64, what)),
    }
}

pub fn endings(
    (endings, not_tried): (&[GridRow], &[UntriedChange]),
    fidelity: Option<&Fidelity>,
    is_complete: bool,
) -> String {
    backing(fidelity, is_complete) + &table(endings.iter(), not_tried)
}

pub fn first_sentence(advice: &Advice<'_>, memory: Option<Bytes>) -> String {
    let device = memory.map_or_else(
        || "a device of unknown size".to_owned(),
        |memory| memory.to_string(),
    );
    let past = if advice.is_complete {
        ""
    } else {
        " past the point where the recording ends"
    };
    match &advice.verdict {
        AdviceVerdict::Fits(best) if best.configuration.name.is_empty() => {
            format!(
                "It runs{past} in {device} without any settings: {} is the cause.\n\n{}",
                named(advice.own),
                price(advice.own, best)
            )
        }
        AdviceVerdict::Fits(best) => format!(
            "It runs{past} in {device} with\n\n  PYTORCH_CUDA_ALLOC_CONF={}\n\n{}",
            best.configuration.name,
            price(advice.own, best)
        ),
        AdviceVerdict::Saves(best) => format!(
            "It fits without a change; it runs{past} in {} instead of {} with\n\n  \
             PYTORCH_CUDA_ALLOC_CONF={}\n\n{}",
            least(best),
            least(advice.own),
            best.configuration.name,
            price(advice.own, best)
        ),
        AdviceVerdict::Fine => {
            let (needs, reserves) = (
                least(advice.own),
                Bytes(advice.own.replayed.stats.reserved_bytes.all.peak),
            );
            let reserves = if reserves > needs {
                format!(", and reserves up to {reserves} if it can")
            } else {
                String::new()
            };
            match memory {
                None => format!(
                    "It needs {needs} without a change{reserves}, and no setting of PyTorch \
                     saves much."
                ),
                Some(_) => format!(
                    "It fits in {device} without a change, and no setting of PyTorch saves much: \
                     it needs {needs}{reserves}."
                ),
            }
        }
        AdviceVerdict::Nothing { needed, closest } => {
            let closest = closest.map_or_else(String::new, |closest| {
                let more =
                    memory.map_or(Bytes::ZERO, |memory| least(closest).saturating_sub(memory));
                format!(
                    " {} comes closest: it needs {more} more memory.",
                    named(closest)
                )
            });
            format!(
                "No setting makes it run{past} in {device}: its peak is {needed} \
                 allocated.{closest}"
            )
        }
    }
}

fn price(own: &GridRow, best: &GridRow) -> String {
    let ((calls, time), (own_calls, own_time)) = (best.price(), own.price());
    let least = best.least.map_or_else(String::new, |least| {
        format!("It needs {} then. ", least.enough)
    });
    let until = if own.fits() {
        ""
    } else {
        ", up to where it failed,"
    };
    format!(
        "{least}The price: {} of the driver of some {} (model) instead of {own_calls} of {}{until} \
         as it was recorded.",
        count(calls, "call"),
        milliseconds(time),
        milliseconds(own_time)
    )
}

fn backing(fidelity: Option<&Fidelity>, is_complete: bool) -> String {
    let Some(fidelity) = fidelity else {
        return "These are replays of the program's requests; there is no recording to compare them \
             with.\n".to_owned();
    };
    let mut text = if fidelity.faithful {
        format!("A replay of the recording confirms this: {fidelity}.\n")
    } else {
        let why = fidelity
            .first_divergence
            .as_ref()
            .map_or_else(String::new, |divergence| {
                format!(" First divergence {divergence}")
            });
        format!("NOT CONFIRMED: a replay differs from the recording.{why}\n")
    };
    if !is_complete {
        text += "The recording ends at the OOM, so later memory use is unknown.\n";
    }
    text
}

/// One line per outcome: configurations with the same figures share a line.
fn table<'a>(endings: impl Iterator<Item = &'a GridRow>, not_tried: &[UntriedChange]) -> String {
    let heads = [
        "settings",
        "ends",
        "reserved",
        "unused",
        "retries",
        "driver calls",
        "driver time",
        "least memory",
    ];
    let mut rows: Vec<(Vec<String>, u64)> = Vec::new();
    for row in endings.map(cells) {
        match rows.iter_mut().find(|(known, _)| known[1..] == row[1..]) {
            Some((_, others)) => *others += 1,
            None => rows.push((row, 0)),
        }
    }
    let has_groups = rows.iter().any(|(_, others)| *others > 0);
    let rows = rows.into_iter().map(|(mut row, others)| {
        if others > 0 {
            row[0] += &format!(" and {}", count(others, "other"));
        }
        row
    });
    let mut text = format!(
        "\n{}",
        terminal::table(&Grid::new("llr", heads, rows), None, terminal::Style::Plain)
    );
    if has_groups {
        text += "Others have the same figures; `--format json` lists each.\n";
    }
    for UntriedChange { conf, why } in not_tried {
        let _ = writeln!(text, "not tried: {conf}: {why}");
    }
    text
}

fn cells(ending: &GridRow) -> Vec<String> {
    let replayed = &ending.replayed;
    let (calls, time) = ending.price();
    vec![
        named(ending),
        replayed.oom.map_or_else(
            || "well".to_owned(),
            |refused| format!("OOM at {}", refused.event),
        ),
        Bytes(replayed.stats.reserved_bytes.all.peak).to_string(),
        replayed.peak_unused.to_string(),
        replayed.stats.num_alloc_retries.to_string(),
        calls.to_string(),
        milliseconds(time),
        ending.least.map_or_else(String::new, |least| {
            format!(
                "{}{}",
                least.enough,
                if least.is_monotonic { "" } else { " ?" }
            )
        }),
    ]
}

fn named(ending: &GridRow) -> String {
    if ending.configuration.name.is_empty() {
        "(no settings)".to_owned()
    } else {
        ending.configuration.name.clone()
    }
}

fn least(ending: &GridRow) -> Bytes {
    ending.least.map_or(
        Bytes(ending.replayed.stats.reserved_bytes.all.peak),
        |least| least.enough,
    )
}

fn milliseconds(time: Nanos) -> String {
    format!("{:.1} ms", time.0 as f64 / 1e6)
}
