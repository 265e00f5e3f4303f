//! Pictures of a benchmark run: curves along an axis, and the trend of an entry.
//!
//! Each has a white background, a title and a description.

mod axis;
pub(super) mod curve;
pub(super) mod trend;

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, VPos};

use crate::svg::{Area, Drawn, INK, LIMIT, WIDTH, font};
use crate::words::distinct;
use harness_bench::record::{Outcome, SuiteRecord};

/// Average width of a character in 12-pixel sans-serif fonts.
const CHARACTER: f64 = 6.6;
/// Left edge of legends, and height of a line.
const LEGEND_LEFT: i32 = 12;
const LEGEND_LINE: i32 = 18;

// Okabe and Ito's palette for color-blind readers, without yellow, which is too pale on white:
// <https://jfly.uni-koeln.de/color/>. Then wine and olive of Paul Tol's muted scheme: <https://sronpersonalpages.nl/~pault/>.
// Arms also differ by their marks.
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

/// Color and mark of an item, by its position in the legend.
fn colour(index: usize) -> RGBColor {
    COLOURS[index % COLOURS.len()]
}

/// Width of the vertical axis labels, in pixels.
const LABELS: u32 = 74;

/// A drawing area, in pixels from the upper left corner.
struct Canvas<'a, 'b>(&'a Area<'b>);

impl Canvas<'_, '_> {
    fn text(&self, text: &str, place: (i32, i32), side: HPos, size: u32, colour: RGBColor) -> Drawn {
        self.0.draw(&Text::new(text.to_owned(), place, font(size, colour, side, VPos::Center)))
    }

    fn mark(&self, (x, y): (i32, i32), index: usize) -> Drawn {
        let style = colour(index).filled();
        match index % 5 {
            0 => self.0.draw(&Circle::new((x, y), 4, style)),
            1 => self.0.draw(&TriangleMarker::new((x, y), 5, style)),
            2 => self.0.draw(&Rectangle::new([(x - 4, y - 4), (x + 4, y + 4)], style)),
            3 => self.0.draw(&Polygon::new(vec![(x, y - 5), (x + 5, y), (x, y + 5), (x - 5, y)], style)),
            _ => self.0.draw(&Cross::new((x, y), 4, colour(index).stroke_width(2))),
        }
    }

    /// Draws legend keys in rows. Each has the number that selects its color and mark.
    fn legend(&self, top: i32, keys: &[(usize, &str)], draw: impl Fn(usize, (i32, i32)) -> Drawn) -> Drawn {
        for (&(index, key), (x, line)) in keys.iter().zip(places(keys)) {
            let y = top + line * LEGEND_LINE;
            draw(index, (x + 10, y))?;
            self.text(key, (x + 25, y), HPos::Left, 12, INK)?;
        }
        Ok(())
    }

    fn caption(&self, text: &str, place: (i32, i32)) -> Drawn {
        self.text(text, place, HPos::Left, 11, LIMIT)
    }
}

/// Position of each legend key: pixels from the left, and its row.
fn places(keys: &[(usize, &str)]) -> Vec<(i32, i32)> {
    let (mut x, mut line) = (LEGEND_LEFT, 0);
    let place = |(_, key): &(usize, &str)| {
        let wide = width(key) + 26;
        if x > LEGEND_LEFT && x + wide > WIDTH as i32 - 10 {
            (x, line) = (LEGEND_LEFT, line + 1);
        }
        let place = (x, line);
        x += wide + 18;
        place
    };
    keys.iter().map(place).collect()
}

fn legend_height(keys: &[(usize, &str)]) -> i32 {
    places(keys).last().map_or(0, |(_, line)| (line + 1) * LEGEND_LINE)
}

/// Approximate width of a text of size 12.
fn width(text: &str) -> i32 {
    (text.chars().count() as f64 * CHARACTER).ceil() as i32
}

/// Arms with figures in a suite, in the order of first appearance. The position of an arm selects its color and mark in all
/// pictures of the suite.
fn arms(suite: &SuiteRecord) -> Vec<&str> {
    distinct(suite.entries.iter().filter(|entry| matches!(entry.outcome, Outcome::Measured(_))).map(|entry| entry.arm.as_str()))
}
