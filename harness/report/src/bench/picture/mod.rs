//! Pictures of a benchmark run: curves along an axis, and the trend of an entry.
//!
//! Each has a white background, a title and a description.

mod axis;
pub(super) mod curve;
pub(super) mod trend;

use plotters::chart::MeshStyle;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::bench::distinct;
use crate::picture::{self, Area, Drawn, GRID, INK, LIMIT, WIDTH};
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

/// Creates a picture of this height, with a title and a description for screen readers.
fn document(height: i32, title: &str, description: &str, draw: impl FnOnce(&Canvas<'_, '_>) -> Drawn) -> String {
    let mut svg = String::new();
    let height = u32::try_from(height).unwrap_or(1);
    {
        let root = SVGBackend::with_string(&mut svg, (WIDTH, height)).into_drawing_area();
        let drawn = root.fill(&WHITE).and_then(|()| draw(&Canvas(&root))).and_then(|()| root.present());
        drawn.expect("drawing into a string cannot fail");
    }
    picture::described(&svg, title, description)
}

/// Position of a text relative to its point.
#[derive(Clone, Copy)]
enum Side {
    Right,
    Left,
}

/// Width of the vertical axis labels, in pixels.
const LABELS: u32 = 74;

/// Lines and labels of all charts.
fn mesh<'m, 'a, 'b, 'c, X, Y>(style: &'m mut MeshStyle<'a, 'b, X, Y, SVGBackend<'c>>) -> &'m mut MeshStyle<'a, 'b, X, Y, SVGBackend<'c>>
where
    X: Ranged,
    Y: Ranged,
{
    style.light_line_style(TRANSPARENT).bold_line_style(GRID).axis_style(INK).label_style(picture::font(11))
}

/// A drawing area, in pixels from the upper left corner.
struct Canvas<'a, 'b>(&'a Area<'b>);

impl Canvas<'_, '_> {
    fn text(&self, text: &str, place: (i32, i32), side: Side, size: u32, colour: RGBColor) -> Drawn {
        let pos = match side {
            Side::Right => Pos::new(HPos::Left, VPos::Center),
            Side::Left => Pos::new(HPos::Right, VPos::Center),
        };
        self.0.draw(&Text::new(text.to_owned(), place, picture::font(size).color(&colour).pos(pos)))
    }

    /// Draws an arm's mark.
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
            self.text(key, (x + 25, y), Side::Right, 12, INK)?;
        }
        Ok(())
    }

    fn caption(&self, text: &str, place: (i32, i32)) -> Drawn {
        self.text(text, place, Side::Right, 11, LIMIT)
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

/// Height of a legend in pixels.
fn legend_height(keys: &[(usize, &str)]) -> i32 {
    places(keys).last().map_or(0, |(_, line)| (line + 1) * LEGEND_LINE)
}

/// Approximate width of a text of size 12.
fn width(text: &str) -> i32 {
    (text.chars().count() as f64 * CHARACTER).ceil() as i32
}

/// Shortens a text at its end to `most` characters.
fn fitted(text: &str, characters: usize) -> String {
    if text.chars().count() <= characters {
        return text.to_owned();
    }
    text.chars().take(characters.saturating_sub(1)).chain(['…']).collect()
}

/// Arms with figures in a suite, in the order of first appearance. The position of an arm selects its color and mark in all
/// pictures of the suite.
fn arms(suite: &SuiteRecord) -> Vec<&str> {
    distinct(suite.entries.iter().filter(|entry| matches!(entry.outcome, Outcome::Measured(_))).map(|entry| entry.arm.as_str()))
}
