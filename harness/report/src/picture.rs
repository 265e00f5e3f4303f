//! Pictures of allocated, active, reserved and device-used memory over the steps, with failed requests. One panel per allocator;
//! all panels share their axes.

use std::collections::BTreeMap;

use harness_allocator::units::Bytes;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, VPos};

use super::svg::{
    self, ACTIVE, ALLOCATED, Area, Chart, Drawn, GRID, INK, Key, LEFT, LIMIT, OOM, RESERVED, RETRY, TITLE, USED, WIDTH, cut, font,
};
use super::why;
use super::words::{self, shortened};
use harness_base::printable::printable;
use harness_record::{CurvePoint, RunRecord, StepRecord};

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
    let runs: Vec<&RunRecord> = runs.iter().copied().filter(|run| !run.curve.is_empty()).collect();
    let axes = Axes::new(&runs)?;
    let height = HEAD + PANEL * u32::try_from(runs.len()).ok()?;
    let scenario = runs.first().map_or("", |run| run.scenario.name.as_str());
    let described: Vec<String> = runs.iter().map(|run| in_words(run)).collect();
    Some(svg::document(height, &format!("Memory over the steps of {scenario}"), &described.join(" "), |root| {
        let (head, body) = root.split_vertically(HEAD);
        legend(&head, &axes)?;
        body.split_evenly((runs.len(), 1)).iter().zip(&runs).try_for_each(|(area, run)| panel(area, run, &axes))
    }))
}

/// Maximum number of failed requests in a panel's description.
const FAILED_IN_WORDS: usize = 3;

/// Describes a panel.
fn in_words(run: &RunRecord) -> String {
    let highest = |value: fn(&CurvePoint) -> Bytes| words::size(run.curve.iter().map(value).max().unwrap_or_default());
    let last = run.curve.last();
    let shortages = why::failed_requests(run).take(FAILED_IN_WORDS).map(|(step, shortage)| {
        format!(" Out of memory at {}, {}: {}.", words::step_place(step), why::request(shortage), why::in_short(shortage))
    });
    let shortages: String = shortages.collect();
    format!(
        "{}: {}; peak {} allocated, {} reserved and {} device used without the context overhead; limit {}; allocator retries: {}, OOMs: {}.{shortages}",
        run.allocator,
        words::verdict(&run.verdict),
        highest(|point| point.allocated),
        highest(|point| point.reserved),
        highest(|point| point.used),
        words::size(run.scenario.memory),
        last.map_or(0, |point| point.retries),
        last.map_or(0, |point| point.ooms),
    )
}

/// The axes that all panels share.
struct Axes {
    /// Start and end of each step's column.
    columns: BTreeMap<u32, (f64, f64)>,
    /// End of the last column; the first starts at 0.
    right: f64,
    /// The top of the axis, in `unit`.
    top: f64,
    unit: Unit,
    memory: Bytes,
    shows_limit: bool,
    /// `true` if active differs from allocated at any point.
    shows_active: bool,
    /// `true` if a request failed.
    shows_requests: bool,
    /// Labels below the columns: step name and loop iteration.
    names: BTreeMap<u32, StepName>,
}

/// The label of a step.
struct StepName {
    name: String,
    iteration: Option<String>,
}

struct Unit {
    name: &'static str,
    bytes: f64,
}

impl Axes {
    fn new(runs: &[&RunRecord]) -> Option<Self> {
        let points = || runs.iter().flat_map(|run| &run.curve);
        let highest = points().map(|point| point.allocated.max(point.reserved).max(point.used)).max()?;
        let memory = runs.first()?.scenario.memory;
        // A limit far above all values would flatten the curves, so only the legend has it.
        let shows_limit = memory.get() / 4 <= highest.get();
        let highest = if shows_limit { highest.max(memory) } else { highest.max(Bytes(1)) };
        let unit = match highest.get() {
            bytes if bytes >= 4 << 30 => Unit { name: "GiB", bytes: (1_u64 << 30) as f64 },
            bytes if bytes >= 4 << 20 => Unit { name: "MiB", bytes: (1_u64 << 20) as f64 },
            _ => Unit { name: "KiB", bytes: 1024.0 },
        };
        // Two rows of marks fit above the curves.
        let top = highest.get() as f64 / unit.bytes * 1.27;
        let (columns, right) = columns(runs);
        let shows_active = points().any(|point| point.active.is_some_and(|active| active != point.allocated));
        let shows_requests = runs.iter().any(|run| why::failed_requests(run).next().is_some());
        // Runs of one scenario have the same steps, except those that ended early.
        let steps = runs.iter().flat_map(|run| &run.steps);
        let names = steps.map(|step| (step.number, StepName { name: words::step_name(step), iteration: step.iteration.clone() })).collect();
        Some(Self { columns, right, top, unit, memory, shows_limit, shows_active, shows_requests, names })
    }

    fn y(&self, bytes: Bytes) -> f64 {
        bytes.get() as f64 / self.unit.bytes
    }

    fn column(&self, step: u32) -> (f64, f64) {
        self.columns.get(&step).copied().unwrap_or_default()
    }

    /// The end of a step. A step without a column gets the end of the last column before it.
    fn end_of(&self, step: u32) -> f64 {
        self.columns.range(..=step).next_back().map_or(0.0, |(_, &(_, right))| right)
    }

    /// Pixels per unit of the x axis.
    fn pixels(&self) -> f64 {
        f64::from(WIDTH - LEFT - RIGHT) / self.right
    }
}

/// Computes a column per step. Its width grows with the square root of its points, so long and short steps are both visible.
/// Unrecorded steps have the width of a short step.
fn columns(runs: &[&RunRecord]) -> (BTreeMap<u32, (f64, f64)>, f64) {
    let mut points: BTreeMap<u32, f64> = runs.iter().flat_map(|run| &run.steps).map(|step| (step.number, 1.0)).collect();
    for step in runs.iter().flat_map(|run| run.curve.chunk_by(|a, b| a.step == b.step)) {
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

/// Draws the legend, and the explanation of the axes below it.
fn legend(head: &Area<'_>, axes: &Axes) -> Drawn {
    let limit = words::size(axes.memory);
    let limit_key = format!("limit {limit}");
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
    let keys: Vec<(&str, Key)> = keys.into_iter().filter(|(is_shown, ..)| *is_shown).map(|(_, text, key)| (text, key)).collect();
    // All keys just fit.
    let gap = if axes.shows_active && axes.shows_requests { 8 } else { 20 };
    svg::legend(head, 18, gap, &keys)?;
    let waiting = if axes.shows_active { " Active: allocated, or freed and waiting for an event." } else { "" };
    let off_scale = if axes.shows_limit { String::new() } else { format!(" The memory limit, {limit}, is far above.") };
    let axis = format!(
        "{} by step. A column shows memory after its step; a wide column also shows memory during the step.{waiting}{off_scale}",
        axes.unit.name
    );
    head.draw(&Text::new(axis, (LEFT as i32, 40), font(11, LIMIT, HPos::Left, VPos::Center)))
}

fn panel(area: &Area<'_>, run: &RunRecord, axes: &Axes) -> Drawn {
    let line =
        run.verdict.violation().map_or_else(String::new, |first| format!(" (thick vertical line: violation after step {})", first.step));
    let rest = format!(": {}{line}", words::verdict(&run.verdict));
    let unnamed = run.settings.as_ref().filter(|settings| !run.allocator.contains(settings.as_str()));
    let name = unnamed.map_or_else(|| run.allocator.clone(), |settings| format!("{} ({settings})", run.allocator));
    let title = shortened(&printable(&name), TITLE.saturating_sub(rest.chars().count())) + &rest;
    area.draw(&Text::new(title, (LEFT as i32, 2), font(13, INK, HPos::Left, VPos::Top)))?;
    if let Some(cause) = cause_line(run) {
        area.draw(&Text::new(cut(&printable(&cause), CAUSE), (LEFT as i32, 18), font(11, OOM, HPos::Left, VPos::Top)))?;
    }
    let mut chart = ChartBuilder::on(area)
        .margin_top(TITLES)
        .margin_right(RIGHT)
        .set_label_area_size(LabelAreaPosition::Left, LEFT)
        .set_label_area_size(LabelAreaPosition::Bottom, STEPS)
        .build_cartesian_2d(0.0..axes.right, 0.0..axes.top)?;
    let unit = axes.unit.name;
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

/// Longest line below a panel's title.
const CAUSE: usize = ((WIDTH - LEFT) as f64 / 6.0) as usize;

/// The cause of the last failed request. `None` if none failed.
fn cause_line(run: &RunRecord) -> Option<String> {
    let (step, shortage) = why::failed_requests(run).last()?;
    let more = match why::failed_requests(run).count() {
        1 => String::new(),
        count => format!(" (last of {count})"),
    };
    Some(format!("{}, {}{more}: {}", words::step_place(step), why::request(shortage), why::in_short(shortage)))
}

/// Draws step names below the numbers, if their columns have room. At a new loop iteration, draws its name and a line instead.
fn step_names(chart: &mut Chart<'_, '_>, axes: &Axes) -> Drawn {
    let style = font(10, LIMIT, HPos::Center, VPos::Top);
    let has_loops = axes.names.values().any(|step| step.iteration.is_some());
    let (mut before, mut free_from) = (None, f64::NEG_INFINITY);
    for (step, &(left, right)) in &axes.columns {
        let Some(StepName { name, iteration }) = axes.names.get(step) else { continue };
        if has_loops {
            if let Some(pass) = iteration.as_ref().filter(|&pass| before != Some(pass)) {
                let (x, room) = (left * axes.pixels(), pass.chars().count() as f64 * NAME);
                if x >= free_from {
                    free_from = x + room + NAME;
                    let style = font(10, LIMIT, HPos::Left, VPos::Top);
                    chart.draw_series([PathElement::new([(left, 0.0), (left, axes.top)], LIMIT.mix(0.25).stroke_width(1))])?;
                    chart.draw_series([EmptyElement::at((left, 0.0)) + Text::new(printable(pass).into_owned(), (0, 21), style)])?;
                }
            }
            before = iteration.as_ref();
            continue;
        }
        let most = ((right - left) * axes.pixels() / NAME) as usize;
        if most >= LEAST_NAME.min(name.chars().count()) {
            let name = cut(&printable(name), most);
            chart.draw_series([EmptyElement::at((f64::midpoint(left, right), 0.0)) + Text::new(name, (0, 21), style.clone())])?;
        }
    }
    Ok(())
}

/// Draws each failed request as a bar from the active bytes to active plus requested. A bar below the limit shows that free
/// memory was unusable.
fn failed_requests(chart: &mut Chart<'_, '_>, run: &RunRecord, axes: &Axes) -> Drawn {
    let style = font(11, OOM, HPos::Right, VPos::Top);
    // The rows of marks are above.
    let highest = axes.top * 0.82;
    let (points, mut free_from) = (positions(&run.curve, |step| axes.column(step)), f64::NEG_INFINITY);
    for (step, shortage) in why::failed_requests(run) {
        let right = place_of(&points, step, axes);
        if right * axes.pixels() < free_from {
            continue;
        }
        free_from = right * axes.pixels() + MARK_SPACING;
        let left = right - BAR / axes.pixels();
        let bottom = axes.y(shortage.accounts.active).min(highest);
        let top = axes.y(shortage.accounts.active + shortage.requested).min(highest);
        chart.draw_series([Rectangle::new([(left, bottom), (right, top)], OOM.mix(0.3).filled())])?;
        chart.draw_series([Rectangle::new([(left, bottom), (right, top)], OOM.stroke_width(1))])?;
        let text = shortage.requested.to_string();
        if left * axes.pixels() > text.chars().count() as f64 * DIGIT {
            chart.draw_series([EmptyElement::at((left, top)) + Text::new(text, (-3, 1), style.clone())])?;
        }
    }
    Ok(())
}

/// The time of a failed request: the last increase of the OOM counter within the step, or the step's end.
fn place_of(points: &[(f64, &CurvePoint)], step: &StepRecord, axes: &Axes) -> f64 {
    let end = points.partition_point(|(_, point)| point.step <= step.number);
    let begin = points.partition_point(|(_, point)| point.step < step.number).saturating_sub(1);
    let mut rises = points[begin..end].windows(2).filter(|pair| pair[1].1.ooms > pair[0].1.ooms);
    let (left, right) = axes.column(step.number);
    let least = left + BAR / axes.pixels();
    rises.next_back().map_or(right, |pair| pair[1].0).max(least.min(right))
}

/// Draws step numbers below the columns, as many as fit, and lines between wide columns.
fn step_numbers(chart: &mut Chart<'_, '_>, axes: &Axes) -> Drawn {
    let style = font(11, INK, HPos::Center, VPos::Top);
    let mut free_from = f64::NEG_INFINITY;
    for (step, &(left, right)) in &axes.columns {
        if left > 0.0 && (right - left) * axes.pixels() >= LEAST_COLUMN {
            chart.draw_series([PathElement::new([(left, 0.0), (left, axes.top)], GRID.stroke_width(1))])?;
        }
        let middle = f64::midpoint(left, right);
        if middle * axes.pixels() >= free_from {
            free_from = middle * axes.pixels() + LABEL_SPACING;
            chart.draw_series([EmptyElement::at((middle, 0.0)) + Text::new(step.to_string(), (0, 7), style.clone())])?;
        }
    }
    Ok(())
}

fn curves(chart: &mut Chart<'_, '_>, run: &RunRecord, axes: &Axes) -> Drawn {
    let stairs = |value: fn(&CurvePoint) -> Bytes| stairs(&run.curve, |step| axes.column(step), |point| axes.y(value(point)));
    let allocated = stairs(|point| point.allocated);
    let ends = allocated.first().zip(allocated.last()).map(|(&(first, _), &(last, _))| (first, last)).unwrap_or_default();
    let ground = allocated.iter().copied().chain([(ends.1, 0.0), (ends.0, 0.0)]).collect::<Vec<_>>();
    // Device used and reserved often coincide. The wide pale line remains visible below the thin one.
    chart.draw_series([PathElement::new(stairs(|point| point.used), USED.stroke_width(6))])?;
    chart.draw_series([Polygon::new(ground, ALLOCATED.mix(0.25))])?;
    if axes.shows_active {
        // The allocated line covers the active line wherever no block waits for an event.
        let active = stairs(|point| point.active.unwrap_or(point.allocated));
        chart.draw_series([PathElement::new(active, ACTIVE.stroke_width(2))])?;
    }
    chart.draw_series([PathElement::new(allocated, ALLOCATED.stroke_width(2))])?;
    chart.draw_series([PathElement::new(stairs(|point| point.reserved), RESERVED.stroke_width(2))])?;
    if axes.shows_limit {
        svg::limit(chart, axes.right, axes.y(axes.memory))?;
    }
    Ok(())
}

/// Positions of the points. The points of a step share its column by their numbers in the run. Older records have no numbers;
/// their points are spread evenly.
fn positions(curve: &[CurvePoint], column: impl Fn(u32) -> (f64, f64)) -> Vec<(f64, &CurvePoint)> {
    let steps = curve.chunk_by(|a, b| a.step == b.step);
    steps
        .flat_map(|step| {
            let (left, right) = column(step[0].step);
            let (points, is_numbered) = (span(step), is_numbered(step));
            step.iter().enumerate().map(move |(index, point)| {
                let at = if is_numbered { (point.at - step[0].at) as f64 } else { index as f64 };
                (left + (right - left) * at / points, point)
            })
        })
        .collect()
}

/// Returns whether the points of a step have numbers.
fn is_numbered(step: &[CurvePoint]) -> bool {
    step.is_sorted_by(|a, b| a.at < b.at)
}

/// Number of points in a step, including dropped ones.
fn span(step: &[CurvePoint]) -> f64 {
    match (step.first(), step.last()) {
        (Some(first), Some(last)) if is_numbered(step) => (last.at - first.at + 1) as f64,
        _ => step.len() as f64,
    }
}

/// Memory changes in steps, so each value holds until the next point.
fn stairs(curve: &[CurvePoint], column: impl Fn(u32) -> (f64, f64), y: impl Fn(&CurvePoint) -> f64) -> Vec<(f64, f64)> {
    let mut path: Vec<(f64, f64)> = Vec::new();
    for (x, point) in positions(curve, &column) {
        let y = y(point);
        match path.last() {
            Some(&(_, before)) if before == y => {}
            Some(&(_, before)) => path.extend([(x, before), (x, y)]),
            None => path.push((x, y)),
        }
    }
    if let (Some(&(_, before)), Some(last)) = (path.last(), curve.last()) {
        path.push((column(last.step).1, before));
    }
    path
}

/// Events that share one mark.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Mark {
    /// Pixels from the left to the first event.
    x: f64,
    count: u64,
}

impl Mark {
    fn number(self) -> String {
        if self.count > 1 { format!("×{}", self.count) } else { String::new() }
    }

    /// Leftmost position of the next mark.
    fn free_from(self) -> f64 {
        self.x + MARK_SPACING + self.number().chars().count() as f64 * DIGIT
    }
}

/// Positions at which a counter rises, in pixels. Merges overlapping marks.
fn rises(run: &RunRecord, axes: &Axes, counter: fn(&CurvePoint) -> u64) -> Vec<Mark> {
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

/// Draws OOMs and retries in two rows above the limit, and a line at a violation.
fn marks(chart: &mut Chart<'_, '_>, run: &RunRecord, axes: &Axes) -> Drawn {
    let (upper, lower) = (axes.top * 0.96, axes.top * 0.87);
    for mark in rises(run, axes, |point| point.ooms) {
        let place = (mark.x / axes.pixels(), upper);
        chart.draw_series([Cross::new(place, 5, OOM.stroke_width(3))])?;
        number_of(mark, place, OOM, chart)?;
    }
    for mark in rises(run, axes, |point| point.retries) {
        let place = (mark.x / axes.pixels(), lower);
        chart.draw_series([TriangleMarker::new(place, 6, RETRY.filled())])?;
        number_of(mark, place, RETRY, chart)?;
    }
    if let Some(first) = run.verdict.violation() {
        let x = axes.end_of(first.step);
        chart.draw_series([PathElement::new([(x, 0.0), (x, axes.top)], OOM.stroke_width(2))])?;
    }
    Ok(())
}

/// Draws the number of events to the right of a merged mark.
fn number_of(mark: Mark, place: (f64, f64), colour: RGBColor, chart: &mut Chart<'_, '_>) -> Drawn {
    if mark.count > 1 {
        let style = font(11, colour, HPos::Left, VPos::Center);
        chart.draw_series([EmptyElement::at(place) + Text::new(mark.number(), (8, 0), style)])?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::examples;

    #[test]
    fn curves_are_stairs_and_the_points_of_a_step_share_its_width() {
        let point = |step, mib| CurvePoint {
            at: 0,
            step,
            allocated: Bytes::mib(mib),
            active: None,
            reserved: Bytes::ZERO,
            used: Bytes::ZERO,
            ooms: 0,
            retries: 0,
        };
        let curve = [point(1, 2), point(2, 2), point(2, 4), point(3, 1)];
        let path = stairs(&curve, |step| (f64::from(step), f64::from(step) + 1.0), |point| (point.allocated.get() >> 20) as f64);
        assert_eq!(path, [(1.0, 2.0), (2.5, 2.0), (2.5, 4.0), (3.0, 4.0), (3.0, 1.0), (4.0, 1.0)]);
    }

    #[test]
    fn a_step_with_many_points_has_a_wider_column() {
        let (columns, right) = columns(&[&examples::storm()]);
        let widths: Vec<f64> = columns.values().map(|(left, right)| (right - left).round()).collect();
        assert_eq!(widths, [1.0, 24.0, 1.0]);
        assert_eq!(columns.values().last().map(|column| column.1), Some(right));
    }

    /// Ten points of a step keep their positions although points between them were dropped.
    #[test]
    fn points_stand_where_they_were_in_their_step_and_steps_that_are_not_recorded_keep_their_room() {
        let point = |at, step| CurvePoint {
            at,
            step,
            allocated: Bytes(at),
            active: None,
            reserved: Bytes::ZERO,
            used: Bytes::ZERO,
            ooms: 0,
            retries: 0,
        };
        let curve = [point(0, 1), point(75, 1), point(99, 1), point(100, 4)];
        let places: Vec<f64> = positions(&curve, |step| (f64::from(step), f64::from(step) + 1.0)).into_iter().map(|(x, _)| x).collect();
        assert_eq!(places, [1.0, 1.75, 1.99, 4.0]);
        let run = RunRecord { curve: curve.to_vec(), steps: Vec::new(), ..examples::oom_retry("caching", 0) };
        let (columns, right) = columns(&[&run]);
        assert_eq!((columns.get(&1), columns.get(&4), right), (Some(&(0.0, 10.0)), Some(&(12.0, 13.0)), 13.0));
    }

    #[test]
    fn a_picture_has_one_panel_an_allocator_and_its_own_ground() {
        let (caching, direct) = (examples::oom_retry("caching", 0), examples::oom_retry("direct", 0));
        let svg = draw(&[&caching, &direct]).expect("both have curves");
        assert!(svg.contains("caching: passed") && svg.contains("direct: passed"));
        assert!(svg.contains(&format!("height=\"{}\"", HEAD + 2 * PANEL)) && svg.contains("fill=\"#FFFFFF\""));
        assert!(svg.contains("limit 1 GiB"));
        assert_eq!(Some(svg), draw(&[&caching, &direct]));
    }

    #[test]
    fn a_long_name_keeps_its_ends_and_stays_inside_the_picture() {
        assert_eq!((shortened("abcdef", 6), shortened("abcdefg", 6)), ("abcdef".to_owned(), "abc…fg".to_owned()));
        let name = format!("caching({})", "garbage_collection_threshold:0.8,".repeat(9));
        let run = RunRecord { allocator: name, ..examples::failed("caching", 0) };
        let svg = draw(&[&run]).expect("it has a curve");
        let title = svg.lines().find(|line| line.starts_with("caching(") && line.contains("FAILED")).expect("the panel has a title");
        assert_eq!(title.chars().count(), TITLE, "{title}");
    }

    #[test]
    fn marks_of_evenly_spread_ooms_are_evenly_spread() {
        let steps: Vec<u32> = (1..=5_000).collect();
        let run = examples::long_run(5_000, &steps);
        let axes = Axes::new(&[&run]).expect("it has a curve");
        let marks = rises(&run, &axes, |point| point.ooms);
        let gaps: Vec<f64> = marks.windows(2).map(|pair| pair[1].x - pair[0].x).collect();
        let (least, most) = (gaps.iter().copied().fold(f64::MAX, f64::min), gaps.iter().copied().fold(0.0, f64::max));
        assert!(most < 1.2 * least, "{gaps:?}");
    }

    #[test]
    fn a_failed_request_is_drawn_with_its_size_and_cause() {
        let run = examples::fragmented();
        let svg = draw(&[&run]).expect("it has a curve");
        assert!(svg.contains("\nfailed request\n") && svg.contains("\n64 MiB\n"), "{svg}");
        let cause = "step 3, line 10, 64 MiB: enough memory is free in total, but it is fragmented: no free block is large enough";
        assert!(svg.contains(cause) && svg.contains("\nalloc wanted\n"), "{svg}");
        assert!(!draw(&[&examples::oom_retry("caching", 0)]).expect("it has a curve").contains("failed request"));
    }

    #[test]
    fn active_is_drawn_where_it_differs_from_allocated() {
        let svg = draw(&[&examples::storm()]).expect("it has a curve");
        assert!(svg.contains("\nactive\n") && svg.contains("freed and waiting for an event"), "{svg}");
        let mut run = examples::storm();
        run.curve.iter_mut().for_each(|point| point.active = Some(point.allocated));
        assert!(!draw(&[&run]).expect("it has a curve").contains("\nactive\n"));
    }

    #[test]
    fn passes_of_loops_are_marked_where_they_begin() {
        let mut run = examples::long_run(40, &[]);
        for step in &mut run.steps {
            step.iteration = Some(format!("i = {}", step.number / 10));
        }
        let svg = draw(&[&run]).expect("it has a curve");
        let marks: Vec<usize> = (0..=4).map(|pass| svg.matches(&format!("\ni = {pass}\n")).count()).collect();
        assert_eq!(marks, [1; 5], "{svg}");
    }

    #[test]
    fn settings_that_the_name_does_not_tell_stand_in_the_title() {
        let settings = Some("max_split_size_mb:512".to_owned());
        let run = RunRecord { settings, allocator: "tuned".to_owned(), ..examples::oom_retry("caching", 0) };
        assert!(draw(&[&run]).expect("it has a curve").contains("tuned (max_split_size_mb:512): passed"));
    }

    #[test]
    fn names_cannot_break_the_picture() {
        let run = RunRecord { allocator: "a<b>&\"".to_owned(), ..examples::oom_retry("caching", 0) };
        let svg = draw(&[&run]).expect("it has a curve");
        assert!(svg.contains("a&lt;b&gt;&amp;") && !svg.contains("a<b"), "{svg}");
    }

    #[test]
    fn a_run_without_a_curve_has_no_picture() {
        assert_eq!(draw(&[&examples::skipped()]), None);
        assert_eq!(draw(&[]), None);
    }

    #[test]
    fn a_limit_far_above_everything_is_named_but_not_drawn() {
        let mut run = examples::oom_retry("caching", 0);
        run.scenario.memory = Bytes::gib(80);
        let svg = draw(&[&run]).expect("it has a curve");
        assert!(svg.contains("The memory limit, 80 GiB, is far above.") && !svg.contains("\nlimit 80 GiB"));
    }

    #[test]
    fn marks_stand_where_the_counters_rise_and_merge_where_they_would_overlap() {
        let mut run = examples::storm();
        run.curve.iter_mut().for_each(|point| (point.ooms, point.retries) = (0, 0));
        let raise = |run: &mut RunRecord, from: usize, by: u64| run.curve[from..].iter_mut().for_each(|point| point.ooms += by);
        for (from, by) in [(100, 1), (102, 1), (104, 1), (400, 2)] {
            raise(&mut run, from, by);
        }
        let axes = Axes::new(&[&run]).expect("it has a curve");
        let at = |index: usize| positions(&run.curve, |step| axes.column(step))[index].0 * axes.pixels();
        let expected = [Mark { x: at(100), count: 3 }, Mark { x: at(400), count: 2 }];
        assert_eq!(rises(&run, &axes, |point| point.ooms), expected);
        assert_eq!(rises(&run, &axes, |point| point.retries), []);
        let svg = draw(&[&run]).expect("it has a curve");
        assert!(svg.contains("×3") && svg.contains("×2"), "{svg}");
    }

    #[test]
    fn thousands_of_marks_are_merged_and_none_is_lost() {
        let steps: Vec<u32> = (1..=5_000).collect();
        let run = examples::long_run(5_000, &steps);
        let axes = Axes::new(&[&run]).expect("it has a curve");
        let marks = rises(&run, &axes, |point| point.ooms);
        assert_eq!(marks.iter().map(|mark| mark.count).sum::<u64>(), 5_000);
        assert!(marks.windows(2).all(|pair| pair[0].free_from() <= pair[1].x), "{marks:?}");
        assert!(marks.len() < 60, "{} marks", marks.len());
    }

    #[test]
    fn a_violation_is_marked_at_the_end_of_its_step_even_where_that_is_not_recorded() {
        let run = examples::failed("caching", 0);
        let axes = Axes::new(&[&run]).expect("it has a curve");
        assert_eq!([0, 1, 3, 9].map(|step| axes.end_of(step)), [0.0, 1.0, 3.0, 3.0]);
        let svg = draw(&[&run]).expect("it has a curve");
        assert!(svg.contains("caching: FAILED (thick vertical line: violation after step 3)"), "{svg}");
    }

    #[test]
    fn a_picture_says_in_words_what_it_shows() {
        let run = RunRecord { allocator: "a<b>".to_owned(), ..examples::oom_retry("caching", 0) };
        let svg = draw(&[&run]).expect("it has a curve");
        let words = "role=\"img\">\n<title>Memory over the steps of oom_retry</title>\n<desc>a&lt;b&gt;: passed; peak 700.50 MiB allocated, \
                     702 MiB reserved and 702 MiB device used without the context overhead; limit 1 GiB; allocator retries: 1, OOMs: 0.</desc>\n";
        assert!(svg.contains(words), "{svg}");
    }
}
