//! Panels, legends and limit lines of memory plots.

use harness_allocator::units::Bytes;
use plotters::coord::types::RangedCoordf64;
use plotters::element::DashedPathElement;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::picture::{self, Drawn, GRID, INK, LIMIT, WIDTH};

const PANEL: u32 = 260;
const HEAD: u32 = 34;
const LEFT: u32 = 64;
/// Longest title that fits a panel, in characters. A character takes 7.4 pixels in 13-pixel sans-serif fonts.
pub(super) const TITLE: usize = ((WIDTH - LEFT) as f64 / 7.4) as usize;

pub(super) type Chart<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;

pub(super) struct Plot<'a> {
    pub(super) title: String,
    /// Label of the horizontal axis.
    pub(super) x: &'a str,
    /// End of the horizontal axis, which starts at 0.
    pub(super) end: f64,
    /// Largest memory value shown.
    pub(super) top: Bytes,
}

/// The symbol of a legend entry.
pub(super) enum Key {
    Line(RGBColor),
    /// The line of [`Plot::limit`].
    Limit,
    Triangle(RGBColor),
    Circle(RGBColor),
    Cross(RGBColor),
}

/// Draws panels below a legend.
pub(super) fn drawn(panels: usize, draw: impl FnOnce(&picture::Area<'_>, &[picture::Area<'_>]) -> Drawn) -> String {
    let mut svg = String::new();
    let height = HEAD + PANEL * u32::try_from(panels).unwrap_or(u32::MAX / PANEL - 1);
    {
        let root = SVGBackend::with_string(&mut svg, (WIDTH, height)).into_drawing_area();
        let all = || {
            root.fill(&WHITE)?;
            let (head, body) = root.split_vertically(HEAD);
            draw(&head, &body.split_evenly((panels, 1)))?;
            root.present()
        };
        all().expect("drawing into a string cannot fail");
    }
    svg
}

/// Draws the legend.
pub(super) fn legend(head: &picture::Area<'_>, keys: &[(&str, Key)]) -> Drawn {
    let style = picture::font(12).pos(Pos::new(HPos::Left, VPos::Center));
    let mut x = LEFT as i32;
    for (name, key) in keys {
        let (line, middle) = ([(x, 16), (x + 20, 16)], (x + 10, 16));
        match key {
            Key::Line(colour) => head.draw(&PathElement::new(line, colour.stroke_width(2)))?,
            Key::Limit => head.draw(&DashedPathElement::new(line, 5, 4, LIMIT.stroke_width(1)))?,
            Key::Triangle(colour) => head.draw(&TriangleMarker::new(middle, 6, colour.filled()))?,
            Key::Circle(colour) => head.draw(&Circle::new(middle, 5, colour.stroke_width(2)))?,
            Key::Cross(colour) => head.draw(&Cross::new(middle, 5, colour.stroke_width(3)))?,
        }
        head.draw(&Text::new((*name).to_owned(), (x + 26, 16), style.clone()))?;
        x += 46 + (name.chars().count() as f64 * 6.4) as i32;
    }
    Ok(())
}

impl Plot<'_> {
    /// Draws the title and axes.
    pub(super) fn chart<'a, 'b>(&self, area: &'a picture::Area<'b>) -> Result<Chart<'a, 'b>, DrawingAreaErrorKind<std::io::Error>> {
        let style = picture::font(13).pos(Pos::new(HPos::Left, VPos::Top));
        area.draw(&Text::new(self.title.clone(), (LEFT as i32, 4), style))?;
        let mut chart = ChartBuilder::on(area)
            .margin_top(26)
            .margin_right(30)
            .set_label_area_size(LabelAreaPosition::Left, LEFT)
            .set_label_area_size(LabelAreaPosition::Bottom, 40)
            .build_cartesian_2d(0.0..self.end, 0.0..mib(self.top) * 1.1)?;
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .bold_line_style(GRID)
            .axis_style(INK)
            .label_style(picture::font(11))
            .x_labels(8)
            .y_labels(6)
            .x_desc(self.x)
            .x_label_formatter(&|x| format!("{x:.0}"))
            .y_label_formatter(&|y| format!("{y:.0} MiB"))
            .draw()?;
        Ok(chart)
    }

    /// Draws the memory limit.
    pub(super) fn limit(&self, chart: &mut Chart<'_, '_>, memory: Bytes) -> Drawn {
        let line = [(0.0, mib(memory)), (self.end, mib(memory))];
        chart.draw_series([DashedPathElement::new(line, 5, 4, LIMIT.stroke_width(1))])?;
        Ok(())
    }
}

pub(super) fn mib(bytes: Bytes) -> f64 {
    bytes.get() as f64 / f64::from(1 << 20)
}

pub(super) fn in_mib(points: Vec<(f64, Bytes)>) -> Vec<(f64, f64)> {
    points.into_iter().map(|(x, bytes)| (x, mib(bytes))).collect()
}
