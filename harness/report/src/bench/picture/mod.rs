//! Pictures of a benchmark run: curves along an axis, and the trend of an entry.
//!
//! Each has a white background, a title and a description.

mod axis;
pub(super) mod curve;
pub(super) mod trend;

use plotters::prelude::*;

use crate::svg::{Area, Drawn};

// Okabe and Ito's palette for color-blind readers, without yellow, which is too pale on white:
// <https://jfly.uni-koeln.de/color/>. Then wine and olive of Paul Tol's muted scheme:
// <https://sronpersonalpages.nl/~pault/>. Arms also differ by their marks.
const COLOURS: [RGBColor; 9] = [
    RGBColor(0, 114, 178),
    RGBColor(230, 159, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(213, 94, 0),
    RGBColor(86, 180, 233),
    RGBColor(90, 90, 90),
    RGBColor(136, 34, 85),
    RGBColor(153, 153, 51),
];

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
