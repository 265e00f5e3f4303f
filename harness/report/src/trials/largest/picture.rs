//! A picture of memory by category against the value of a parameter, with the memory of each GPU.

use std::collections::BTreeSet;

use harness_allocator::units::Bytes;
use harness_exec::trials::largest::{
    Evidence, LargestReport, LargestRow, MemoryCurve, MemoryPoint,
};
use harness_explain::categories::{ALL, about};
use plotters::style::text_anchor::HPos;
use plotters::{element::DashedPathElement, prelude::*};

use crate::svg::{
    self, Area, COLOURS, Chart, Drawn, INK, Key, LEFT, LIMIT, Legend, PATCH, TITLE, WIDTH,
    chart_on, cut, mesh, text,
};
use crate::words;

/// Height of a panel with title and axis, in pixels.
const PANEL: i32 = 380;
const PANELS: usize = 8;
/// Room for the names of GPUs.
const NAMES: u32 = 190;
/// Height of a name.
const NAME: i32 = 13;
/// Height above and below the axes.
const MARGINS: (i32, i32) = (26, 40);

/// Draws one panel for each command. `None` without curves.
pub(in super::super) fn draw(report: &LargestReport) -> Option<String> {
    let curves: Vec<&MemoryCurve> = report.curves.iter().take(PANELS).collect();
    if curves.is_empty() {
        return None;
    }
    let names = names(&curves);
    let keys: Vec<(&str, Key)> = names
        .iter()
        .map(|(category, name)| (name.as_str(), Key::Patch(colour(category))))
        .chain([
            ("reserved", Key::Line(INK, 2)),
            ("largest, ran", Key::Dot(INK)),
            ("largest, predicted", Key::Circle(INK)),
        ])
        .collect();
    let legend = Legend {
        left: LEFT as i32,
        gap: 18,
        names: keys.iter().map(|(name, _)| *name).collect(),
    };
    let head = 16 + legend.height();
    let title = format!("Memory by category against {}", report.parameter);
    let described: Vec<String> = curves.iter().map(|curve| in_words(report, curve)).collect();
    let height = head + PANEL * curves.len() as i32;
    Some(svg::document(
        height as u32,
        &title,
        &described.join(" "),
        |root| {
            legend.draw(root, 16, |index, place| keys[index].1.draw(root, place))?;
            for (index, curve) in curves.iter().enumerate() {
                let top = head + PANEL * index as i32;
                let area = root.clone().shrink((0, top), (WIDTH as i32, PANEL));
                panel(&area, report, curve)?;
            }
            Ok(())
        },
    ))
}

fn colour(category: &str) -> RGBColor {
    let at = ALL.iter().position(|other| *other == category);
    COLOURS[at.unwrap_or(0) % COLOURS.len()]
}

/// The categories of all curves in the order of their areas, with their names.
fn names(curves: &[&MemoryCurve]) -> Vec<(&'static str, String)> {
    let peaks = || curves.iter().flat_map(|curve| &curve.points);
    let peaks = || peaks().flat_map(|point| &point.categories);
    let name = |category: &&'static str| {
        let of = peaks().filter(|peak| peak.category == **category);
        let (bytes, inferred) = of.fold((0, 0), |(bytes, inferred), peak| {
            (
                bytes + u128::from(peak.bytes),
                inferred + u128::from(peak.inferred),
            )
        });
        let how = match inferred {
            _ if bytes == 0 => return None,
            0 => "",
            all if all == bytes => ", probably",
            _ => ", in part probably",
        };
        Some((*category, format!("{}{how}", about(category))))
    };
    ALL.iter().filter_map(name).collect()
}

fn rows<'a>(
    report: &'a LargestReport,
    curve: &MemoryCurve,
) -> impl Iterator<Item = &'a LargestRow> {
    let (others, lever) = (curve.others.clone(), curve.lever.clone());
    let of_command = move |row: &&LargestRow| row.others == others && row.lever == lever;
    report.rows.iter().filter(of_command)
}

fn command(curve: &MemoryCurve) -> String {
    let others = curve
        .others
        .iter()
        .map(|(name, value)| format!("{name} {value}"));
    let all: Vec<String> = others.chain(curve.lever.clone()).collect();
    if all.is_empty() {
        String::new()
    } else {
        format!(" with {}", all.join(", "))
    }
}

fn title(report: &LargestReport, curve: &MemoryCurve) -> String {
    let of = &curve.gpu;
    let name = &report.parameter;
    let with = command(curve);
    format!("Peak memory against {name}{with}, predicted from runs on {of}")
}

/// Memory in a unit that suits the highest value.
struct Axis {
    unit: u64,
    name: &'static str,
    end: f64,
    top: f64,
}

impl Axis {
    /// GPUs with much more memory than the program needs would flatten the curve.
    fn new(curve: &MemoryCurve, limits: impl Iterator<Item = u64>) -> Self {
        let highest = curve.points.iter().map(highest).max().unwrap_or(1).max(1);
        let near = limits.filter(|limit| limit / 3 <= highest).max();
        let top = near.unwrap_or(highest).max(highest);
        let (unit, name) = if top >= 8 << 30 {
            (1 << 30, "GiB")
        } else {
            (1 << 20, "MiB")
        };
        let mut axis = Self {
            unit,
            name,
            end: curve.points.last().map_or(1, |point| point.value).max(1) as f64,
            top: 0.0,
        };
        axis.top = axis.of(top) * 1.06;
        axis
    }

    fn of(&self, bytes: u64) -> f64 {
        bytes as f64 / self.unit as f64
    }
}

fn allocated(point: &MemoryPoint) -> u64 {
    point.categories.iter().map(|peak| peak.bytes).sum()
}

fn highest(point: &MemoryPoint) -> u64 {
    allocated(point).max(point.peak_reserved)
}

fn panel(area: &Area<'_>, report: &LargestReport, curve: &MemoryCurve) -> Drawn {
    let limits = rows(report, curve).map(|row| row.memory);
    let axis = Axis::new(curve, limits);
    let title = cut(&title(report, curve), TITLE);
    text(area, title, (LEFT as i32, 12), HPos::Left, 13, INK)?;
    let (above, below) = (MARGINS.0 as u32, MARGINS.1 as u32);
    // One value has no width.
    let first = curve.points.first().map_or(0, |point| point.value) as f64;
    let start = if first < axis.end { first } else { 0.0 };
    let mut chart = chart_on(area, (above, NAMES), (LEFT, below))
        .build_cartesian_2d(start..axis.end, 0.0..axis.top)?;
    mesh(&mut chart.configure_mesh())
        .x_labels(8)
        .y_labels(8)
        .x_desc(report.parameter.as_str())
        .x_label_formatter(&|x| format!("{x:.0}"))
        .y_label_formatter(&|y| format!("{y:.0} {}", axis.name))
        .draw()?;
    areas(&mut chart, curve, &axis)?;
    let reserved = curve
        .points
        .iter()
        .map(|point| (point.value as f64, axis.of(point.peak_reserved)));
    chart.draw_series(LineSeries::new(reserved, INK.stroke_width(2)))?;
    for row in rows(report, curve).filter(|row| axis.of(row.memory) <= axis.top) {
        let limit = axis.of(row.memory);
        let line = [(start, limit), (axis.end, limit)];
        let dashes = DashedPathElement::new(line, 5, 4, LIMIT.stroke_width(1));
        chart.draw_series([dashes])?;
        if let Some(largest) = row.largest {
            let (_, pixel) = chart.backend_coord(&(start, limit));
            let (across, _) = chart.backend_coord(&(largest as f64, limit));
            let (left, top) = area.get_base_pixel();
            let key = if row.basis == Evidence::Predicted {
                Key::Circle(INK)
            } else {
                Key::Dot(INK)
            };
            key.draw(area, (across - left, pixel - top))?;
        }
    }
    gpus(area, report, curve, &axis)
}

/// Stacks the categories.
fn areas(chart: &mut Chart<'_, '_>, curve: &MemoryCurve, axis: &Axis) -> Drawn {
    let mut below: Vec<u64> = vec![0; curve.points.len()];
    for category in ALL {
        let above: Vec<u64> = curve
            .points
            .iter()
            .zip(&below)
            .map(|(point, below)| {
                let of = point
                    .categories
                    .iter()
                    .filter(|peak| peak.category == category);
                below + of.map(|peak| peak.bytes).sum::<u64>()
            })
            .collect();
        if above != below {
            let edge = |edge: &[u64]| -> Vec<(f64, f64)> {
                let points = curve.points.iter().zip(edge);
                points
                    .map(|(point, bytes)| (point.value as f64, axis.of(*bytes)))
                    .collect()
            };
            let outline: Vec<_> = edge(&above)
                .into_iter()
                .chain(edge(&below).into_iter().rev())
                .collect();
            chart.draw_series([Polygon::new(outline, colour(category).mix(PATCH))])?;
        }
        below = above;
    }
    Ok(())
}

/// Names each GPU next to its line, with its largest value, without overlaps.
fn gpus(area: &Area<'_>, report: &LargestReport, curve: &MemoryCurve, axis: &Axis) -> Drawn {
    let mut named: Vec<&LargestRow> = rows(report, curve).collect();
    named.sort_by_key(|row| std::cmp::Reverse(row.memory));
    let height = f64::from(PANEL - MARGINS.0 - MARGINS.1);
    let wanted = |row: &LargestRow| {
        let share = (axis.of(row.memory) / axis.top).min(1.0);
        MARGINS.0 + (height * (1.0 - share)) as i32
    };
    let wanted: Vec<i32> = named.iter().map(|row| wanted(row)).collect();
    let edge = (WIDTH - NAMES) as i32;
    let placed = apart(&wanted, MARGINS.0, PANEL - MARGINS.1);
    for ((row, line), place) in named.iter().zip(wanted).zip(placed) {
        let name = match (row.largest, &row.alloc_conf) {
            _ if row.failure.is_some() => format!("{}: failed", row.gpu),
            (Some(largest), _) => format!("{}: {largest}", row.gpu),
            (None, _) => format!("{}: none", row.gpu),
        };
        area.draw(&PathElement::new(
            [(edge, line), (edge + 10, place)],
            LIMIT.stroke_width(1),
        ))?;
        text(
            area,
            cut(&name, 28),
            (edge + 14, place),
            HPos::Left,
            11,
            INK,
        )?;
    }
    Ok(())
}

/// Moves rising places apart by the height of a name, between these limits if there is room.
fn apart(wanted: &[i32], top: i32, bottom: i32) -> Vec<i32> {
    let mut places: Vec<i32> = Vec::new();
    for place in wanted {
        let least = places.last().map_or(top, |last| last + NAME);
        places.push((*place).max(least));
    }
    let mut most = bottom;
    for place in places.iter_mut().rev() {
        *place = (*place).min(most);
        most = *place - NAME;
    }
    places
}

fn in_words(report: &LargestReport, curve: &MemoryCurve) -> String {
    let name = &report.parameter;
    let point = |point: &MemoryPoint| {
        format!(
            "{} allocated and {} reserved with {name} {}",
            words::size(Bytes(allocated(point))),
            words::size(Bytes(point.peak_reserved)),
            point.value
        )
    };
    let ends: BTreeSet<usize> = [0, curve.points.len() - 1].into();
    let ends: Vec<String> = ends.iter().map(|at| point(&curve.points[*at])).collect();
    let largest = rows(report, curve).map(|row| {
        let value = row
            .largest
            .map_or_else(|| "none".to_owned(), |it| it.to_string());
        format!("{} {value}", row.gpu)
    });
    let largest: Vec<String> = largest.collect();
    format!(
        "{}: {}. Largest {name} that fits: {}.",
        title(report, curve),
        ends.join(", "),
        largest.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trials::largest::short;
    use harness_exec::trials::largest::CategoryPeak;

    const GIB: u64 = 1 << 30;

    fn row(gpu: &str, memory: u64, largest: u64, length: u64) -> LargestRow {
        LargestRow {
            gpu: gpu.to_owned(),
            memory,
            alloc_conf: None,
            others: [("length".to_owned(), length)].into(),
            lever: None,
            saves: None,
            largest: Some(largest),
            peak_reserved: None,
            next: None,
            basis: Evidence::Predicted,
            runs: 0,
            is_refuted: false,
            exception: None,
            failure: None,
            has_no_effect: false,
            doubts: vec![],
        }
    }

    fn report() -> LargestReport {
        let point = |value: u64| MemoryPoint {
            value,
            peak_reserved: (2 + value) * GIB,
            categories: vec![
                CategoryPeak {
                    category: "parameters".to_owned(),
                    bytes: GIB,
                    inferred: 0,
                },
                CategoryPeak {
                    category: "activations".to_owned(),
                    bytes: value * GIB,
                    inferred: value,
                },
            ],
        };
        LargestReport {
            parameter: "batch".to_owned(),
            smallest: 1,
            largest: 100,
            rows: vec![
                row("big & bigger", 80 * GIB, 78, 512),
                row("small", 24 * GIB, 22, 512),
                row("other", 24 * GIB, 22, 512),
                row("small", 24 * GIB, 11, 1024),
            ],
            curves: vec![MemoryCurve {
                gpu: "big & bigger".to_owned(),
                others: [("length".to_owned(), 512)].into(),
                lever: None,
                points: [1, 40, 78].map(point).into(),
            }],
            runs: 5,
            is_interrupted: false,
        }
    }

    #[test]
    fn each_gpu_has_a_line_and_inferred_categories_are_marked() {
        let svg = draw(&report()).expect("there is a curve");
        for text in [
            ">\nparameters and buffers\n<",
            "activations, in part probably",
            "big &amp; bigger: 78",
            "small: 22",
            "other: 22",
            "with length 512, predicted from runs on",
        ] {
            assert!(svg.contains(text), "{text}: {svg}");
        }
        // The limit of another length is not in this panel.
        assert!(!svg.contains("small: 11"));
    }

    #[test]
    fn a_picture_of_one_value_or_of_no_memory_can_be_drawn() {
        let mut one = report();
        one.curves[0].points.truncate(1);
        assert!(draw(&one).is_some());
        one.curves[0].points[0] = MemoryPoint {
            value: 0,
            peak_reserved: 0,
            categories: vec![],
        };
        assert!(draw(&one).is_some());
        one.curves.clear();
        assert_eq!(draw(&one), None);
    }

    #[test]
    fn names_of_gpus_with_equal_memory_do_not_cover_each_other() {
        assert_eq!(apart(&[30, 30, 31, 200], 26, 340), [30, 43, 56, 200]);
        assert_eq!(apart(&[338, 339, 340], 26, 340), [314, 327, 340]);
    }

    #[test]
    fn the_short_table_has_a_column_for_each_command() {
        let grid = short(&report());
        let heads: Vec<&str> = grid.columns.iter().map(|(head, _)| head.as_str()).collect();
        let with = ["batch with length 512", "batch with length 1024"];
        assert_eq!(heads, ["GPU", "memory", with[0], with[1]]);
        assert_eq!(
            grid.rows[0],
            ["big & bigger", "80 GiB", "78", words::NOTHING]
        );
        assert_eq!(grid.rows[1], ["small", "24 GiB", "22", "11"]);
    }
}
