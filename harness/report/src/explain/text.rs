//! Explanations for a terminal: [`render`] shows one, [`render_causes`] its beginning,
//! [`render_ranks`] several, [`render_comparison`] the differences of two.

use std::fmt::Display;

use harness_allocator::units::Bytes;
use harness_explain::categories::CategoryBytes;
use harness_explain::causes::{ByteCause, CauseBytes, Explanation, RefusedRequest, SiteBytes};
use harness_explain::compare::{self, SnapshotComparison, Whole};
use harness_explain::pins;
use harness_explain::ranks::{Overview, RankRow};
use harness_explain::state::{Moment, MomentKind};
use harness_trace::snapshot::MempoolId;

use crate::terminal::{Style, Text};
use crate::why;
use crate::words::{self, Grid};

const SHOWN: usize = 5;
const DIFFERENCES: usize = 12;

/// Renders an explanation on one screen: the main sentence, the causes, why each attempt to serve
/// the request failed, the pinned memory, and leak suspects. Tables fit into `width` columns;
/// `None` is for files and pipes.
pub fn render(name: &str, explanation: &Explanation, style: Style, width: Option<usize>) -> String {
    let mut out = begun(name, explanation, style, width);
    if let Some(request) = &explanation.request {
        out.line("");
        out.wrapped(&self::request(request, explanation), 2);
        explanation
            .ways
            .iter()
            .for_each(|way| out.wrapped(&format!("  {}: {}", way.way.about(), way.why), 4));
        more(explanation).iter().for_each(|why| out.wrapped(why, 2));
    }
    let pinned = pinned(explanation);
    if !pinned.rows.is_empty() {
        out.wrapped("\nWhat pins free memory:", 2);
        out.table(&pinned, 4, None);
    }
    let categories = categories(explanation);
    if !categories.rows.is_empty() {
        out.wrapped("\nWhat the allocated memory is for:", 2);
        out.table(&categories, 4, None);
    }
    suspects(&mut out, explanation);
    if explanation.survived_ooms > 0 {
        let requests = words::count(explanation.survived_ooms, "request");
        out.wrapped(
            &format!("{requests} more failed in this recording, and the program continued."),
            2,
        );
    }
    explanation
        .notes
        .iter()
        .for_each(|note| out.wrapped(&format!("note: {note}"), 6));
    out.text
}

pub fn render_causes(
    name: &str,
    explanation: &Explanation,
    style: Style,
    width: Option<usize>,
) -> String {
    begun(name, explanation, style, width).text
}

fn begun(name: &str, explanation: &Explanation, style: Style, width: Option<usize>) -> Text {
    let mut out = Text::new(style, width);
    out.wrapped(
        &format!(
            "{name}: {}",
            moment(&explanation.moment, explanation.device)
        ),
        2,
    );
    out.important(&explanation.headline, explanation.request.is_some());
    out.line("");
    let total = explanation.device_total;
    out.wrapped(
        &format!("Where the {total} are ({} bytes):", total.get()),
        2,
    );
    out.table(&causes(explanation), 4, None);
    out
}

/// Renders several snapshots: which failed, their differences, and the first that failed in full.
pub fn render_ranks(
    overview: &Overview,
    first: (&str, &Explanation),
    style: Style,
    width: Option<usize>,
) -> String {
    let mut out = Text::new(style, width);
    out.important(&ranks_in_short(overview), !overview.failed.is_empty());
    out.line("");
    out.table(&ranks(overview), 2, None);
    if !overview.differences.is_empty() {
        out.line("\nWhere they differ:");
        overview
            .differences
            .iter()
            .take(DIFFERENCES)
            .for_each(|difference| out.wrapped(&format!("  {}", difference.sentence()), 4));
    }
    out.line("");
    out.text + &render(first.0, first.1, style, width)
}

pub fn render_comparison(
    names: [&str; 2],
    comparison: &SnapshotComparison,
    style: Style,
    width: Option<usize>,
) -> String {
    let mut out = Text::new(style, width);
    out.wrapped(&format!("before: {}", names[0]), 2);
    out.wrapped(&format!("after:  {}", names[1]), 2);
    out.important(&comparison.headline, false);
    if let (Some(before), Some(after)) = (&comparison.before, &comparison.after) {
        out.line("");
        out.table(&wholes(before, after), 3, None);
    }
    out.line("\nBy cause, at the moment compared:");
    let row = |change: &compare::CauseChange| {
        vec![
            change.cause.about().to_owned(),
            change.before.to_string(),
            change.after.to_string(),
            signed(change.before, change.after),
        ]
    };
    out.table(
        &Grid::new(
            "lr",
            ["cause", "before", "after", "change"],
            comparison.causes.iter().map(row),
        ),
        4,
        None,
    );
    if !comparison.sites.is_empty() {
        out.line("\nBy site, allocated then:");
        let row = |change: &compare::SiteChange| {
            let blocks = format!("{} → {}", change.blocks_before, change.blocks_after);
            vec![
                change.site.clone(),
                change.before.to_string(),
                change.after.to_string(),
                signed(change.before, change.after),
                blocks,
            ]
        };
        let sites = comparison.sites.iter().take(DIFFERENCES).map(row);
        out.table(
            &Grid::new("lr", ["site", "before", "after", "change", "blocks"], sites),
            4,
            None,
        );
        let more = comparison.sites.len().saturating_sub(DIFFERENCES);
        if more > 0 {
            out.line(&format!("… and {more} more, by `--format json`"));
        }
    }
    out.text
}

pub(super) fn moment(moment: &Moment, device: u32) -> String {
    let what = match moment.at {
        MomentKind::Oom => "out of memory",
        MomentKind::Peak => "at the peak of allocated memory",
        MomentKind::End => "at the time of the snapshot",
        MomentKind::Event => "as asked for",
    };
    let place = match moment.event {
        Some(event) => format!(
            ", after event {event} (events are counted from 0; there are {})",
            moment.events
        ),
        None if moment.events > 0 => ", before the first event".to_owned(),
        None => String::new(),
    };
    let device = if device > 0 {
        format!(" on device {device}")
    } else {
        String::new()
    };
    format!("{what}{device}{place}")
}

pub(super) fn share(part: Bytes, whole: Bytes) -> String {
    if whole == Bytes::ZERO {
        return words::NOTHING.to_owned();
    }
    format!("{:.1} %", part.get() as f64 / whole.get() as f64 * 100.0)
}

pub(super) fn causes(explanation: &Explanation) -> Grid {
    let cells = |cause: &CauseBytes| {
        let share = share(cause.bytes, explanation.device_total);
        vec![
            cause.bytes.to_string(),
            share,
            cause.cause.about().to_owned(),
            most_of(cause),
        ]
    };
    Grid::new(
        "rrl",
        ["bytes", "share", "what", "most of it"],
        explanation.causes.iter().map(cells),
    )
}

pub(super) fn categories(explanation: &Explanation) -> Grid {
    let cells = |category: &CategoryBytes| {
        let figures = [category.bytes, category.peak_bytes].map(|bytes| bytes.to_string());
        figures
            .into_iter()
            .chain([category.about.clone(), largest(&category.sites)])
            .collect()
    };
    Grid::new(
        "rrl",
        ["bytes", "at the peak", "what", "most of it"],
        explanation.categories.iter().map(cells),
    )
}

fn largest(sites: &[SiteBytes]) -> String {
    const NAMED: usize = 2;
    let named = sites
        .iter()
        .map(|site| format!("{} {}", site.bytes, site.site));
    words::at_most(named.collect(), NAMED, |more| format!("{more} more")).join("; ")
}

fn most_of(cause: &CauseBytes) -> String {
    let of_pins = !matches!(
        cause.cause,
        ByteCause::Allocated | ByteCause::Rounding | ByteCause::PendingFree
    );
    let text = largest(&cause.sites);
    if of_pins && !text.is_empty() {
        format!("pinned by {text}")
    } else {
        text
    }
}

pub(super) fn request(request: &RefusedRequest, explanation: &Explanation) -> String {
    let exact = if request.requested == request.asked {
        String::new()
    } else {
        format!(" ({} requested)", request.requested)
    };
    let asked = explanation.sites[&request.id]
        .with_verb(&format!("{}{exact} were asked for", request.asked));
    let probably = match request.private_pool {
        _ if !request.is_pool_inferred => String::new(),
        MempoolId::DEFAULT => {
            ", probably in the default pool (PyTorch before 2.12 does not record it)".to_owned()
        }
        MempoolId(first, second) => format!(
            ", probably in private pool ({first}, {second}) (PyTorch before 2.12 does not record \
             it)"
        ),
    };
    let ways = if explanation.ways.is_empty() {
        ""
    } else {
        " Each attempt to serve the request failed:"
    };
    format!("{asked}{probably}.{ways}")
}

/// Causes of the failure that the attempts do not show.
pub(super) fn more(explanation: &Explanation) -> Option<String> {
    explanation
        .failed_request
        .as_ref()
        .map(why::beside_fragmentation)
        .filter(|why| !why.is_empty())
}

pub(super) fn pinned(explanation: &Explanation) -> Grid {
    let groups = pins::by_site(&explanation.pinned);
    let rows = groups.iter().take(SHOWN).map(|group| {
        let site = &explanation.sites[&group.id];
        let first = group.segments[0];
        let held = match (first.expandable, group.are_single()) {
            (true, _) => format!(
                "a live block in the same page {}",
                site.with_verb("allocated")
            ),
            (false, true) => format!("{} {}", group.one_block(), site.with_verb("allocated")),
            (false, false) => format!("live blocks, the oldest {}", site.with_verb("allocated")),
        };
        let age = group.oldest_us().map_or_else(
            || "all of the recording".to_owned(),
            |us| time(us, explanation),
        );
        vec![
            group.free.to_string(),
            group.segments.len().to_string(),
            held,
            age,
        ]
    });
    Grid::new("rrl", ["free", "segments", "each held by", "for"], rows)
}

fn time(us: u64, explanation: &Explanation) -> String {
    let of = if explanation.has_simulated_times() {
        " (model)"
    } else {
        ""
    };
    format!("{}{of}", harness_allocator::units::Nanos::micros(us))
}

fn suspects(out: &mut Text, explanation: &Explanation) {
    if !explanation.growing.is_empty() {
        out.wrapped(
            "\nLeak suspects (the minimum of live memory grows from part to part of the \
             recording):",
            2,
        );
        for growth in explanation.growing.iter().take(SHOWN) {
            out.wrapped(&format!("  {}", grows(growth)), 4);
        }
    }
    let waiting: Vec<_> = explanation
        .stalled_frees
        .iter()
        .filter(|wait| wait.completed_at.is_none())
        .collect();
    if !waiting.is_empty() {
        out.wrapped("\nFreed, but still in use by other streams:", 2);
        for wait in waiting.iter().take(SHOWN) {
            let time = wait
                .time_us
                .map_or_else(String::new, |us| format!(", {}", time(us, explanation)));
            out.wrapped(
                &format!(
                    "  {} of {}: for {}{time}",
                    wait.size,
                    wait.site,
                    words::count(wait.events, "event")
                ),
                4,
            );
        }
    }
}

pub(super) fn grows(growth: &harness_explain::growth::Growth) -> String {
    let held: Vec<String> = growth.held.iter().map(ToString::to_string).collect();
    format!(
        "{} grew by {}: {}",
        growth.site,
        growth.grown,
        held.join(", ")
    )
}

pub fn ranks_in_short(overview: &Overview) -> String {
    let all = overview.ranks.len();
    match overview.failed.as_slice() {
        [] => format!(
            "None of {} ends with an out-of-memory error.",
            words::count(all, "snapshot")
        ),
        [one] => format!(
            "1 of {} ends with an out-of-memory error: {one}.",
            words::count(all, "snapshot")
        ),
        [first, rest @ ..] => {
            format!(
                "{} of {all} snapshots end with an out-of-memory error: {first} first, then {}.",
                rest.len() + 1,
                rest.join(", ")
            )
        }
    }
}

pub(super) fn ranks(overview: &Overview) -> Grid {
    let cells = |rank: &RankRow| {
        let ended = if rank.failed { "out of memory" } else { "well" };
        let figures =
            [rank.allocated, rank.reserved, rank.device_total].map(|bytes| bytes.to_string());
        [rank.name.clone(), ended.to_owned()]
            .into_iter()
            .chain(figures)
            .collect()
    };
    Grid::new(
        "llr",
        ["snapshot", "ended", "allocated", "reserved", "total"],
        overview.ranks.iter().map(cells),
    )
}

fn wholes(before: &Whole, after: &Whole) -> Grid {
    let row = |name: &str, before: &dyn Display, after: &dyn Display| {
        vec![name.to_owned(), before.to_string(), after.to_string()]
    };
    let rows = [
        row(
            "peak allocated",
            &before.peak_allocated,
            &after.peak_allocated,
        ),
        row("peak reserved", &before.peak_reserved, &after.peak_reserved),
        row("blocks handed out", &before.allocations, &after.allocations),
        row(
            "segments from the driver",
            &before.driver_allocations,
            &after.driver_allocations,
        ),
        row(
            "segments given back",
            &before.driver_frees,
            &after.driver_frees,
        ),
        row("requests refused", &before.ooms, &after.ooms),
    ];
    Grid::new("lr", ["over the whole recording", "before", "after"], rows)
}

fn signed(before: Bytes, after: Bytes) -> String {
    words::signed(after.get() as i64 - before.get() as i64)
}
