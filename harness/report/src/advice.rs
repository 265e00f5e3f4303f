use std::fmt::Write as _;

use harness_allocator::units::{Bytes, Nanos};
use harness_base::words::count;
use harness_explain::advise::{Advice, Verdict};
use harness_explain::fidelity::Fidelity;
use harness_explain::grid::{Ending, NotTried};

use super::{terminal, words::Grid};

/// Renders the result on one screen: the advice, the headline of the explanation, one line per
/// outcome, and notes on the figures.
pub fn render(
    advice: &Advice<'_>,
    headline: Option<&str>,
    (endings, not_tried): (&[Ending], &[NotTried]),
    memory: Option<Bytes>,
    fidelity: Option<&Fidelity>,
    in_program: &[String],
) -> String {
    let mut text = format!("{}\n", first_sentence(advice, memory));
    text.extend(headline.map(|headline| format!("{headline}\n")));
    text += &backing(fidelity, advice.is_complete);
    if !in_program.is_empty() {
        text += "\nChanges in the program, each tested by a replay with the recorded settings:\n";
        for (number, sentence) in in_program.iter().enumerate() {
            let _ = writeln!(text, "  {}. {sentence}.", number + 1);
        }
    }
    text += &table(endings, not_tried);
    text += "\nDriver times come from a cost model. The search for the least memory assumes that \
         more memory never hurts; `?` marks configurations that contradict this.\n";
    text
}

pub fn endings(
    (endings, not_tried): (&[Ending], &[NotTried]),
    fidelity: Option<&Fidelity>,
    is_complete: bool,
) -> String {
    backing(fidelity, is_complete) + &table(endings, not_tried)
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
        Verdict::Fits(best) if best.configuration.name.is_empty() => {
            format!(
                "It runs{past} in {device} without any settings: {} is the cause.\n\n{}",
                named(advice.own),
                price(advice.own, best)
            )
        }
        Verdict::Fits(best) => format!(
            "It runs{past} in {device} with\n\n  PYTORCH_CUDA_ALLOC_CONF={}\n\n{}",
            best.configuration.name,
            price(advice.own, best)
        ),
        Verdict::Saves(best) => format!(
            "It fits without a change; it runs{past} in {} instead of {} with\n\n  \
             PYTORCH_CUDA_ALLOC_CONF={}\n\n{}",
            least(best),
            least(advice.own),
            best.configuration.name,
            price(advice.own, best)
        ),
        Verdict::Fine => {
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
                    "It needs {needs} without a change{reserves}, and no setting saves much."
                ),
                Some(_) => format!(
                    "It fits in {device} without a change, and no setting saves much: it needs \
                     {needs}{reserves}."
                ),
            }
        }
        Verdict::Nothing { needed, closest } => {
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

fn price(own: &Ending, best: &Ending) -> String {
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
fn table(endings: &[Ending], not_tried: &[NotTried]) -> String {
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
    for row in endings.iter().map(cells) {
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
    for NotTried { conf, why } in not_tried {
        let _ = writeln!(text, "not tried: {conf}: {why}");
    }
    text
}

fn cells(ending: &Ending) -> Vec<String> {
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

fn named(ending: &Ending) -> String {
    if ending.configuration.name.is_empty() {
        "(no settings)".to_owned()
    } else {
        ending.configuration.name.clone()
    }
}

fn least(ending: &Ending) -> Bytes {
    ending.least.map_or(
        Bytes(ending.replayed.stats.reserved_bytes.all.peak),
        |least| least.enough,
    )
}

fn milliseconds(time: Nanos) -> String {
    format!("{:.1} ms", time.0 as f64 / 1e6)
}
