//! Pictures of allocated, active, reserved and device-used memory over the steps, with failed
//! requests. One panel per allocator; all panels share their axes.

use std::collections::BTreeMap;

use harness_allocator::units::Bytes;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, VPos};

use super::svg::{
    self, ACTIVE, ALLOCATED, Area, Chart, Drawn, GRID, INK, Key, LEFT, LIMIT, OOM, RESERVED, RETRY,
    TITLE, USED, WIDTH, cut, font,
};
use super::why;
use super::words::{self, shortened};
use harness_base::printable::printable;
use harness_record::{CurvePoint, RunProcesses, RunRecord, StepRecord};

const HEAD: u32 = 52;
const PANEL: u32 = 252;
/// Height above a panel's axes, for the title and a line about a failed request.
const TITLES: u32 = 34;
/// Height below a panel's axes, for step numbers and names.
const STEPS: u32 = 42;
const RIGHT: u32 = 44;
/// Width of a character of a step's name.
const NAME: f64 = 5.8;
/// Minimum length of a shortened step name.
const LEAST_NAME: usize = 6;
/// Width of the bar of a failed request, in pixels.
const BAR: f64 = 7.0;
/// Minimum distance of step numbers, in pixels.
const LABEL_SPACING: f64 = 36.0;
/// Narrower columns have no separator line.
const LEAST_COLUMN: f64 = 12.0;
/// Marks closer than this many pixels are drawn as one mark with a count.
const MARK_SPACING: f64 = 14.0;
/// Width of a character of the count.
const DIGIT: f64 = 6.4;

/// Draws runs of one scenario on one device as stacked panels. `None` if no run has a curve.
pub(super) fn draw(runs: &[&RunRecord]) -> Option<String> {
    let runs: Vec<&RunRecord> = runs
        .iter()
        .copied()
        .filter(|run| !run.curve.is_empty())
        .collect();
    let axes = Axes::new(&runs)?;
    let height = HEAD + PANEL * u32::try_from(runs.len()).ok()?;
    let scenario = runs.first().map_or("", |run| run.scenario.name.as_str());
    let described: Vec<String> = runs.iter().map(|run| in_words(run)).collect();
    Some(svg::document(
        height,
        &format!("Memory over the steps of {scenario}"),
        &described.join(" "),
        |root| {
            let (head, body) = root.split_vertically(HEAD);
            legend(&head, &axes)?;
            body.split_evenly((runs.len(), 1))
                .iter()
                .zip(&runs)
                .try_for_each(|(area, run)| panel(area, run, &axes))
        },
    ))
}

/// Maximum number of failed requests in a panel's description.
const FAILED_IN_WORDS: usize = 3;

fn in_words(run: &RunRecord) -> String {
    let highest = |value: fn(&CurvePoint) -> Bytes| {
        words::size(run.curve.iter().map(value).max().unwrap_or_default())
    };
    let last = run.curve.last();
    let failed_requests =
        why::failed_requests(run)
            .take(FAILED_IN_WORDS)
            .map(|(step, failed_request)| {
                format!(
                    " Out of memory at {}, {}: {}.",
                    words::step_place(step),
                    why::request(failed_request),
                    why::in_short(failed_request)
                )
            });
    let failed_requests: String = failed_requests.collect();
    format!(
        "{}: {}; peak {} allocated, {} reserved and {} device used without the context overhead{}; \
         limit {}; allocator retries: {}, OOMs: {}.{failed_requests}",
        run.allocator,
        words::verdict(&run.verdict),
        highest(|point| point.allocated),
        highest(|point| point.reserved),
        highest(|point| point.used),
        run.processes
            .as_ref()
            .map_or_else(String::new, |processes| format!(" ({})", sums(processes))),
        words::size(run.scenario.memory),
        last.map_or(0, |point| point.retries),
        last.map_or(0, |point| point.ooms),
    )
}

/// Says whose memory the curves show.
fn sums(processes: &RunProcesses) -> String {
    format!(
        "sums; peak reserved per process: {}",
        words::peaks(processes)
    )
}

struct Axes<'a> {
    /// Start and end of each step's column.
    columns: BTreeMap<u32, (f64, f64)>,
    /// End of the last column; the first starts at 0.
    right: f64,
    /// The top of the axis, in `unit`.
    top: f64,
    /// Its name and its size in bytes.
    unit: (&'static str, f64),
    memory: Bytes,
    shows_limit: bool,
    /// `true` if active differs from allocated at any point.
    shows_active: bool,
    shows_requests: bool,
    steps: BTreeMap<u32, &'a StepRecord>,
}

impl<'a> Axes<'a> {
    fn new(runs: &[&'a RunRecord]) -> Option<Self> {
        let points = || runs.iter().flat_map(|run| &run.curve);
        let highest = points()
            .map(|point| point.allocated.max(point.reserved).max(point.used))
            .max()?;
        let memory = runs.first()?.scenario.memory;
        // A limit far above all values would flatten the curves, so only the legend has it.
        let shows_limit = memory.get() / 4 <= highest.get();
        let highest = if shows_limit {
            highest.max(memory)
        } else {
            highest.max(Bytes(1))
        };
        let unit = match highest.get() {
            bytes if bytes >= 4 << 30 => ("GiB", f64::from(1 << 30)),
            bytes if bytes >= 4 << 20 => ("MiB", f64::from(1 << 20)),
            _ => ("KiB", 1024.0),
        };
        // Two rows of marks fit above the curves.
        let top = highest.get() as f64 / unit.1 * 1.27;
        let (columns, right) = columns(runs);
        let shows_active = points().any(|point| point.active != point.allocated);
        let shows_requests = runs
            .iter()
            .any(|run| why::failed_requests(run).next().is_some());
        // Runs of one scenario have the same steps, except those that ended early.
        let steps = runs
            .iter()
            .flat_map(|run| &run.steps)
            .map(|step| (step.number, step))
            .collect();
        Some(Self {
            columns,
            right,
            top,
            unit,
            memory,
            shows_limit,
            shows_active,
            shows_requests,
            steps,
        })
    }

    fn y(&self, bytes: Bytes) -> f64 {
        bytes.get() as f64 / self.unit.1
    }

    fn column(&self, step: u32) -> (f64, f64) {
        self.columns.get(&step).copied().unwrap_or_default()
    }

    /// The end of a step. A step without a column gets the end of the last column before it.
    fn end_of(&self, step: u32) -> f64 {
        self.columns
            .range(..=step)
            .next_back()
            .map_or(0.0, |(_, &(_, right))| right)
    }

    fn pixels(&self) -> f64 {
        f64::from(WIDTH - LEFT - RIGHT) / self.right
    }
}

/// Computes a column per step. Its width grows with the square root of its points, so long and
/// short steps are both visible. Unrecorded steps have the width of a short step.
fn columns(runs: &[&RunRecord]) -> (BTreeMap<u32, (f64, f64)>, f64) {
    let mut points: BTreeMap<u32, f64> = runs
        .iter()
        .flat_map(|run| &run.steps)
        .map(|step| (step.number, 1.0))
        .collect();
    for step in runs
        .iter()
        .flat_map(|run| run.curve.chunk_by(|a, b| a.step == b.step))
    {
        let most = points.entry(step[0].step).or_insert(1.0);
        *most = span(step).max(*most);
    }
    let mut right = 0.0;
    let mut next = points.keys().next().copied().unwrap_or_default();
    let columns = points.into_iter().map(|(step, points)| {
        let left = right + f64::from(step - next);
        next = step + 1;
        right = left + points.sqrt();
        (step, (left, right))
    });
    (columns.collect(), right)
}

fn legend(head: &Area<'_>, axes: &Axes<'_>) -> Drawn {
    let limit_key = format!("limit {}", axes.memory);
    let keys = [
        (true, "used − overhead", Key::Line(USED, 6)),
        (true, "reserved", Key::Line(RESERVED, 2)),
        (axes.shows_active, "active", Key::Line(ACTIVE, 2)),
        (true, "allocated", Key::Area(ALLOCATED)),
        (true, "allocator retry", Key::Triangle(RETRY)),
        (true, "OOM", Key::Cross(OOM)),
        (axes.shows_requests, "failed request", Key::Bar(OOM)),
        (axes.shows_limit, limit_key.as_str(), Key::Limit),
    ];
    let keys: Vec<(&str, Key)> = keys
        .into_iter()
        .filter(|(is_shown, ..)| *is_shown)
        .map(|(_, text, key)| (text, key))
        .collect();
    // All keys just fit.
    let gap = if axes.shows_active && axes.shows_requests {
        8
    } else {
        20
    };
    svg::legend(head, 18, gap, &keys)?;
    let waiting = if axes.shows_active {
        " Active: allocated, or freed and waiting for an event."
    } else {
        ""
    };
    let off_scale = if axes.shows_limit {
        String::new()
    } else {
        format!(
            " The memory limit, {}, is far above.",
            words::size(axes.memory)
        )
    };
    let axis = format!(
        "{} by step. A column shows memory after its step; a wide column also shows memory during \
         the step.{waiting}{off_scale}",
        axes.unit.0
    );
    svg::text(head, axis, (LEFT as i32, 40), HPos::Left, 11, LIMIT)
}

fn panel(area: &Area<'_>, run: &RunRecord, axes: &Axes<'_>) -> Drawn {
    let line = run.verdict.violation().map_or_else(String::new, |first| {
        format!(
            " (thick vertical line: violation after step {})",
            first.step
        )
    });
    let rest = format!(": {}{line}", words::verdict(&run.verdict));
    let name = words::unnamed_settings(run).map_or_else(
        || run.allocator.clone(),
        |settings| format!("{} ({settings})", run.allocator),
    );
    let title = shortened(
        &printable(&name),
        TITLE.saturating_sub(rest.chars().count()),
    ) + &rest;
    area.draw(&Text::new(
        title,
        (LEFT as i32, 2),
        font(13, INK, HPos::Left, VPos::Top),
    ))?;
    // The cause of the last failed request, or the processes.
    if let Some(processes) = run
        .processes
        .as_ref()
        .filter(|_| why::failed_requests(run).next().is_none())
    {
        let text = cut(&printable(&sums(processes)), CAUSE);
        area.draw(&Text::new(
            text,
            (LEFT as i32, 18),
            font(11, LIMIT, HPos::Left, VPos::Top),
        ))?;
    }
    if let Some((step, failed_request)) = why::failed_requests(run).last() {
        let requests = why::failed_requests(run).count();
        let more = if requests > 1 {
            format!(" (last of {requests})")
        } else {
            String::new()
        };
        let cause = format!(
            "{}, {}{more}: {}",
            words::step_place(step),
            why::request(failed_request),
            why::in_short(failed_request)
        );
        area.draw(&Text::new(
            cut(&printable(&cause), CAUSE),
            (LEFT as i32, 18),
            font(11, OOM, HPos::Left, VPos::Top),
        ))?;
    }
    let mut chart = svg::chart_on(area, (TITLES, RIGHT), (LEFT, STEPS))
        .build_cartesian_2d(0.0..axes.right, 0.0..axes.top)?;
    let unit = axes.unit.0;
    svg::mesh(&mut chart.configure_mesh())
        .disable_x_mesh()
        .x_labels(0)
        .y_labels(6)
        .y_label_formatter(&|y| format!("{} {unit}", (y * 1e3).round() / 1e3))
        .draw()?;
    step_numbers(&mut chart, axes)?;
    step_names(&mut chart, axes)?;
    curves(&mut chart, run, axes)?;
    failed_requests(&mut chart, run, axes)?;
    marks(&mut chart, run, axes)
}

const CAUSE: usize = ((WIDTH - LEFT) as f64 / 6.0) as usize;

/// Draws step names below the numbers, if their columns have room. At a new loop iteration, draws
/// its name and a line instead.
fn step_names(chart: &mut Chart<'_, '_>, axes: &Axes<'_>) -> Drawn {
    let style = font(10, LIMIT, HPos::Center, VPos::Top);
    let has_loops = axes.steps.values().any(|step| step.iteration.is_some());
    let (mut before, mut free_from) = (None, f64::NEG_INFINITY);
    for (step, &(left, right)) in &axes.columns {
        let Some(step) = axes.steps.get(step) else {
            continue;
        };
        if has_loops {
            let x = left * axes.pixels();
            if let Some(pass) = step
                .iteration
                .as_ref()
                .filter(|&pass| before != Some(pass) && x >= free_from)
            {
                free_from = x + (pass.chars().count() + 1) as f64 * NAME;
                let style = font(10, LIMIT, HPos::Left, VPos::Top);
                chart.draw_series([PathElement::new(
                    [(left, 0.0), (left, axes.top)],
                    LIMIT.mix(0.25).stroke_width(1),
                )])?;
                chart.draw_series([EmptyElement::at((left, 0.0))
                    + Text::new(printable(pass).into_owned(), (0, 21), style)])?;
            }
            before = step.iteration.as_ref();
            continue;
        }
        let most = ((right - left) * axes.pixels() / NAME) as usize;
        let name = words::step_name(step);
        if most >= LEAST_NAME.min(name.chars().count()) {
            let name = cut(&printable(&name), most);
            chart.draw_series([EmptyElement::at((f64::midpoint(left, right), 0.0))
                + Text::new(name, (0, 21), style.clone())])?;
        }
    }
    Ok(())
}

/// Draws each failed request as a bar from the active bytes to active plus requested.
fn failed_requests(chart: &mut Chart<'_, '_>, run: &RunRecord, axes: &Axes<'_>) -> Drawn {
    let style = font(11, OOM, HPos::Right, VPos::Top);
    // The rows of marks are above.
    let highest = axes.top * 0.82;
    let (points, mut free_from) = (
        positions(&run.curve, |step| axes.column(step)),
        f64::NEG_INFINITY,
    );
    for (step, failed_request) in why::failed_requests(run) {
        let right = place_of(&points, step, axes);
        if right * axes.pixels() < free_from {
            continue;
        }
        free_from = right * axes.pixels() + MARK_SPACING;
        let left = right - BAR / axes.pixels();
        // In a run with several processes, the bar stands on what all of them hold.
        let at = points
            .partition_point(|(x, _)| *x <= right)
            .checked_sub(1)
            .map(|at| points[at].1);
        let held = at
            .filter(|_| run.processes.is_some())
            .map_or(failed_request.accounts.active, |point| point.active);
        let bottom = axes.y(held).min(highest);
        let top = axes.y(held + failed_request.requested).min(highest);
        chart.draw_series([Rectangle::new(
            [(left, bottom), (right, top)],
            OOM.mix(0.3).filled(),
        )])?;
        chart.draw_series([Rectangle::new(
            [(left, bottom), (right, top)],
            OOM.stroke_width(1),
        )])?;
        let text = failed_request.requested.to_string();
        if left * axes.pixels() > text.chars().count() as f64 * DIGIT {
            chart.draw_series([
                EmptyElement::at((left, top)) + Text::new(text, (-3, 1), style.clone())
            ])?;
        }
    }
    Ok(())
}

/// The time of a failed request: the last increase of the OOM counter within the step, or the
/// step's end.
fn place_of(points: &[(f64, &CurvePoint)], step: &StepRecord, axes: &Axes<'_>) -> f64 {
    let end = points.partition_point(|(_, point)| point.step <= step.number);
    let begin = points
        .partition_point(|(_, point)| point.step < step.number)
        .saturating_sub(1);
    let mut rises = points[begin..end]
        .windows(2)
        .filter(|pair| pair[1].1.ooms > pair[0].1.ooms);
    let (left, right) = axes.column(step.number);
    let least = left + BAR / axes.pixels();
    rises
        .next_back()
        .map_or(right, |pair| pair[1].0)
        .max(least.min(right))
}

/// Draws step numbers below the columns, as many as fit, and lines between wide columns.
fn step_numbers(chart: &mut Chart<'_, '_>, axes: &Axes<'_>) -> Drawn {
    let style = font(11, INK, HPos::Center, VPos::Top);
    let mut free_from = f64::NEG_INFINITY;
    for (step, &(left, right)) in &axes.columns {
        if left > 0.0 && (right - left) * axes.pixels() >= LEAST_COLUMN {
            chart.draw_series([PathElement::new(
                [(left, 0.0), (left, axes.top)],
                GRID.stroke_width(1),
            )])?;
        }
        let middle = f64::midpoint(left, right);
        if middle * axes.pixels() >= free_from {
            free_from = middle * axes.pixels() + LABEL_SPACING;
            chart.draw_series([EmptyElement::at((middle, 0.0))
                + Text::new(step.to_string(), (0, 7), style.clone())])?;
        }
    }
    Ok(())
}

fn curves(chart: &mut Chart<'_, '_>, run: &RunRecord, axes: &Axes<'_>) -> Drawn {
    let points = positions(&run.curve, |step| axes.column(step));
    let end = run
        .curve
        .last()
        .map_or(0.0, |last| axes.column(last.step).1);
    let stairs = |value: fn(&CurvePoint) -> Bytes| {
        svg::stairs(
            points.iter().map(|(x, point)| (*x, axes.y(value(point)))),
            end,
        )
    };
    let allocated = stairs(|point| point.allocated);
    let ends = allocated
        .first()
        .zip(allocated.last())
        .map(|(&(first, _), &(last, _))| (first, last))
        .unwrap_or_default();
    let ground = allocated
        .iter()
        .copied()
        .chain([(ends.1, 0.0), (ends.0, 0.0)])
        .collect::<Vec<_>>();
    // Device used and reserved often coincide. The wide pale line remains visible below the thin
    // one.
    chart.draw_series([PathElement::new(
        stairs(|point| point.used),
        USED.stroke_width(6),
    )])?;
    chart.draw_series([Polygon::new(ground, ALLOCATED.mix(0.25))])?;
    if axes.shows_active {
        // The allocated line covers the active line wherever no block waits for an event.
        let active = stairs(|point| point.active);
        chart.draw_series([PathElement::new(active, ACTIVE.stroke_width(2))])?;
    }
    chart.draw_series([PathElement::new(allocated, ALLOCATED.stroke_width(2))])?;
    chart.draw_series([PathElement::new(
        stairs(|point| point.reserved),
        RESERVED.stroke_width(2),
    )])?;
    if axes.shows_limit {
        svg::limit(chart, axes.right, axes.y(axes.memory))?;
    }
    Ok(())
}

fn positions(curve: &[CurvePoint], column: impl Fn(u32) -> (f64, f64)) -> Vec<(f64, &CurvePoint)> {
    let steps = curve.chunk_by(|a, b| a.step == b.step);
    steps
        .flat_map(|step| {
            let (left, right) = column(step[0].step);
            step.iter().map(move |point| {
                let at = (point.at - step[0].at) as f64;
                (left + (right - left) * at / span(step), point)
            })
        })
        .collect()
}

/// The number of points of a step, which has at least one, including dropped ones.
fn span(step: &[CurvePoint]) -> f64 {
    (step[step.len() - 1].at - step[0].at + 1) as f64
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Mark {
    /// Pixels from the left to the first event.
    x: f64,
    count: u64,
}

impl Mark {
    fn number(self) -> String {
        if self.count > 1 {
            format!("×{}", self.count)
        } else {
            String::new()
        }
    }

    /// Leftmost position of the next mark.
    fn free_from(self) -> f64 {
        self.x + MARK_SPACING + self.number().chars().count() as f64 * DIGIT
    }
}

/// Positions at which a counter rises, in pixels. Merges overlapping marks.
fn rises(run: &RunRecord, axes: &Axes<'_>, counter: fn(&CurvePoint) -> u64) -> Vec<Mark> {
    let mut marks: Vec<Mark> = Vec::new();
    let mut before = 0;
    for (x, point) in positions(&run.curve, |step| axes.column(step)) {
        let (x, count) = (x * axes.pixels(), counter(point).saturating_sub(before));
        before = counter(point);
        match marks.last_mut() {
            _ if count == 0 => {}
            Some(last) if x < last.free_from() => last.count += count,
            _ => marks.push(Mark { x, count }),
        }
    }
    marks
}

/// Draws OOMs and retries in two rows above the limit, and a line at a violation. A merged mark has
/// its number of events.
fn marks(chart: &mut Chart<'_, '_>, run: &RunRecord, axes: &Axes<'_>) -> Drawn {
    for (height, colour) in [(0.96, OOM), (0.87, RETRY)] {
        for mark in rises(
            run,
            axes,
            if colour == OOM {
                |point| point.ooms
            } else {
                |point| point.retries
            },
        ) {
            let place = (mark.x / axes.pixels(), axes.top * height);
            if colour == OOM {
                chart.draw_series([Cross::new(place, 5, OOM.stroke_width(3))])?;
            } else {
                chart.draw_series([TriangleMarker::new(place, 6, RETRY.filled())])?;
            }
            if mark.count > 1 {
                let style = font(11, colour, HPos::Left, VPos::Center);
                chart.draw_series([
                    EmptyElement::at(place) + Text::new(mark.number(), (8, 0), style)
                ])?;
            }
        }
    }
    if let Some(first) = run.verdict.violation() {
        let x = axes.end_of(first.step);
        chart.draw_series([PathElement::new(
            [(x, 0.0), (x, axes.top)],
            OOM.stroke_width(2),
        )])?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
