//! Pictures of a benchmark run: curves along an axis, and the trend of an entry.
//!
//! Each has a white background, a title and a description. Arms differ by colors and by marks.

mod axis;
pub(super) mod curve;
pub(super) mod trend;

use plotters::prelude::*;

use crate::svg::{Area, COLOURS, Drawn};

fn colour(index: usize) -> RGBColor {
    COLOURS[index % COLOURS.len()]
}

/// Width of the vertical axis labels, in pixels.
const LABELS: u32 = 74;

fn mark(area: &Area<'_>, (x, y): (i32, i32), index: usize) -> Drawn {
    let style = colour(index).filled();
    match index % 5 {
        0 => area.draw(&Circle::new((x, y), 4, style)),
        1 => area.draw(&TriangleMarker::new((x, y), 5, style)),
        2 => area.draw(&Rectangle::new([(x - 4, y - 4), (x + 4, y + 4)], style)),
        3 => area.draw(&Polygon::new(
            vec![(x, y - 5), (x + 5, y), (x, y + 5), (x - 5, y)],
            style,
        )),
        _ => area.draw(&Cross::new((x, y), 4, colour(index).stroke_width(2))),
    }
}
