//! Curves along an axis, for example latency by size: one panel per group, one line per arm.

use std::collections::BTreeSet;

use plotters::{prelude::*, style::text_anchor::HPos};

use super::{LABELS, axis::LogAxis, colour, mark};
use crate::svg::{Area, Drawn, INK, LIMIT, Legend, WIDTH, chart_on, cut, document, mesh, text};
use crate::{bench::words, words::distinct};
use harness_bench::record::{Entry, EntryResult, EntrySummary, Quantity, SuiteRecord};

const LEAST_POINTS: usize = 3;

/// Height of a panel with title and axis, in pixels.
const PANEL: i32 = 300;
const PANELS: usize = 8;

struct Group<'a> {
    name: &'a str,
    axis: &'a str,
    is_bytes: bool,
    lines: Vec<Vec<(u64, EntrySummary)>>,
}

/// Draws the curves of one quantity. `None` if no group has three points.
pub(in super::super) fn draw(suite: &SuiteRecord, quantity: Quantity) -> Option<String> {
    let entries = || {
        suite
            .entries
            .iter()
            .filter(|entry| entry.quantity == quantity && entry.point.is_some())
    };
    // The position of an arm selects its color and mark in all pictures of the suite.
    let measured = suite
        .entries
        .iter()
        .filter(|entry| matches!(entry.outcome, EntryResult::Measured(_)));
    let arms = distinct(measured.map(|entry| entry.arm.as_str()));
    let names = distinct(entries().map(|entry| entry.group.as_str()));
    let groups: Vec<Group<'_>> = names
        .into_iter()
        .filter_map(|name| group(suite, quantity, name, &arms))
        .take(PANELS)
        .collect();
    (!groups.is_empty()).then(|| picture(suite, quantity, &groups, &arms))
}

fn group<'a>(
    suite: &'a SuiteRecord,
    quantity: Quantity,
    name: &'a str,
    arms: &[&str],
) -> Option<Group<'a>> {
    let entries = || {
        suite
            .entries
            .iter()
            .filter(|entry| entry.group == name && entry.quantity == quantity)
    };
    let first = entries().find_map(|entry| entry.point.as_ref())?;
    let line = |arm: &&str| {
        let of_arm = entries().filter(|entry| entry.arm == **arm);
        let point = |entry: &Entry| {
            Some((
                entry.point.as_ref()?.value,
                entry.outcome.measured()?.summary,
            ))
        };
        let mut line: Vec<(u64, EntrySummary)> = of_arm.filter_map(point).collect();
        line.sort_by_key(|&(value, _)| value);
        line
    };
    let lines: Vec<Vec<(u64, EntrySummary)>> = arms.iter().map(line).collect();
    lines
        .iter()
        .any(|line| line.len() >= LEAST_POINTS)
        .then_some(Group {
            name,
            axis: &first.axis,
            is_bytes: first.bytes,
            lines,
        })
}

fn picture(suite: &SuiteRecord, quantity: Quantity, groups: &[Group<'_>], arms: &[&str]) -> String {
    let columns = if groups.len() > 1 { 2 } else { 1 };
    let wide = WIDTH as i32 / columns;
    let rows = (groups.len() as i32 + columns - 1) / columns;
    let title = format!(
        "{}: {}, by {}",
        suite.name,
        words::short(quantity),
        groups[0].axis
    );
    let is_drawn = |index: usize| groups.iter().any(|group| !group.lines[index].is_empty());
    let (drawn, names): (Vec<usize>, Vec<&str>) = arms
        .iter()
        .copied()
        .enumerate()
        .filter(|&(index, _)| is_drawn(index))
        .unzip();
    let legend = Legend {
        left: 12,
        gap: 18,
        names,
    };
    let keys_end = 58 + legend.height();
    let height = keys_end + rows * PANEL;
    let described: Vec<String> = groups
        .iter()
        .flat_map(|group| in_words(group, quantity, arms))
        .collect();
    document(
        u32::try_from(height).unwrap_or(1),
        &title,
        &described.join(" "),
        |root| {
            text(root, &title, (12, 16), HPos::Left, 13, INK)?;
            let caption = "Median, with a band from the smallest to the largest sample. Both axes \
                 are logarithmic. Equal curves cover each other.";
            text(root, caption, (12, 36), HPos::Left, 11, LIMIT)?;
            legend.draw(root, 58, |index, place| mark(root, place, drawn[index]))?;
            for (index, group) in groups.iter().enumerate() {
                let corner = (
                    index as i32 % columns * wide,
                    keys_end + index as i32 / columns * PANEL,
                );
                panel(root, group, quantity, corner, wide)?;
            }
            Ok(())
        },
    )
}

fn panel(
    root: &Area<'_>,
    group: &Group<'_>,
    quantity: Quantity,
    (left, top): (i32, i32),
    wide: i32,
) -> Drawn {
    text(
        root,
        cut(group.name, 60),
        (left + LABELS as i32, top + 10),
        HPos::Left,
        12,
        INK,
    )?;
    let points = || group.lines.iter().flatten();
    let values: BTreeSet<u64> = points().map(|&(value, _)| value).collect();
    let unit = group.is_bytes.then_some(Quantity::Memory);
    let across = LogAxis::marked(unit, values, 58.0 / f64::from(wide - LABELS as i32 - 26));
    let up = LogAxis::new(
        Some(quantity),
        points().flat_map(|(_, summary)| [summary.min, summary.max]),
    );
    let area = root.clone().shrink((left, top), (wide, PANEL));
    let mut chart = chart_on(&area, (24, 26), (LABELS, 44)).build_cartesian_2d(across, up)?;
    mesh(&mut chart.configure_mesh())
        .x_desc(group.axis)
        .y_labels(8)
        .draw()?;
    for (index, line) in group
        .lines
        .iter()
        .enumerate()
        .filter(|(_, line)| !line.is_empty())
    {
        let along = |figure: fn(&EntrySummary) -> u64| {
            line.iter()
                .map(move |(value, summary)| (*value, figure(summary)))
        };
        let (least, greatest) = (along(|summary| summary.min), along(|summary| summary.max));
        let band: Vec<(u64, u64)> = least.clone().chain(greatest.clone().rev()).collect();
        chart.draw_series([Polygon::new(band, colour(index).mix(0.18))])?;
        chart.draw_series(
            least
                .zip(greatest)
                .map(|(least, greatest)| PathElement::new([least, greatest], colour(index))),
        )?;
        let medians = || along(|summary| summary.median);
        chart.draw_series(LineSeries::new(medians(), colour(index).stroke_width(2)))?;
        for median in medians() {
            mark(root, chart.backend_coord(&median), index)?;
        }
    }
    Ok(())
}

fn in_words(group: &Group<'_>, quantity: Quantity, arms: &[&str]) -> Vec<String> {
    let told = group.lines.iter().zip(arms).filter_map(|(line, arm)| {
        let ((_, first), (_, last)) = (line.first()?, line.last()?);
        let (first, last) = (
            words::amount(quantity, first.median),
            words::amount(quantity, last.median),
        );
        Some(format!(
            "{} by {arm}: from {first} at the least {} to {last} at the greatest.",
            group.name, group.axis
        ))
    });
    told.collect()
}
