//! SVG pictures: documents, texts, legends, and panels with memory over an axis.

use harness_allocator::units::Bytes;
use harness_base::printable::printable;
use plotters::chart::MeshStyle;
use plotters::coord::Shift;
use plotters::coord::types::RangedCoordf64;
use plotters::element::DashedPathElement;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

pub(super) const WIDTH: u32 = 880;
/// Left edge of panels and of their titles and legends.
pub(super) const LEFT: u32 = 64;
/// Longest title that fits a panel. A character takes 7.4 pixels in 13-pixel sans-serif fonts.
pub(super) const TITLE: usize = ((WIDTH - LEFT) as f64 / 7.4) as usize;
const PANEL: u32 = 260;
const HEAD: u32 = 34;

// Okabe and Ito's palette for color-blind readers: <https://jfly.uni-koeln.de/color/>.
pub(super) const ALLOCATED: RGBColor = RGBColor(0, 114, 178);
pub(super) const ACTIVE: RGBColor = RGBColor(0, 158, 115);
pub(super) const RESERVED: RGBColor = RGBColor(230, 159, 0);
pub(super) const USED: RGBColor = RGBColor(190, 190, 190);
pub(super) const LIMIT: RGBColor = RGBColor(70, 70, 70);
pub(super) const OOM: RGBColor = RGBColor(200, 40, 0);
pub(super) const RETRY: RGBColor = RGBColor(150, 60, 130);
pub(super) const INK: RGBColor = RGBColor(30, 30, 30);
pub(super) const GRID: RGBColor = RGBColor(228, 228, 228);

pub(super) type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
pub(super) type Chart<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;
pub(super) type Drawn = Result<(), DrawingAreaErrorKind<std::io::Error>>;

/// Draws on a white background. Adds a title and a description as SVG defines them:
/// <https://www.w3.org/TR/SVG2/struct.html#DescriptionAndTitleElements>.
pub(super) fn document(height: u32, title: &str, description: &str, draw: impl FnOnce(&Area<'_>) -> Drawn) -> String {
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, (WIDTH, height)).into_drawing_area();
        let drawn = root.fill(&WHITE).and_then(|()| draw(&root)).and_then(|()| root.present());
        drawn.expect("drawing into a string cannot fail");
    }
    let escaped = |text: &str| printable(text).replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let words = format!("<title>{}</title>\n<desc>{}</desc>\n", escaped(title), escaped(description));
    let Some((tag, content)) = svg.split_once('>') else { return svg };
    format!("{tag} role=\"img\">\n{words}{}", content.trim_start())
}

/// A font of this size in pixels. The point of the text is at the given side and height of it.
pub(super) fn font(size: u32, colour: RGBColor, side: HPos, height: VPos) -> TextStyle<'static> {
    TextStyle { color: colour.to_backend_color(), pos: Pos::new(side, height), ..plain_font(size) }
}

fn plain_font(size: u32) -> TextStyle<'static> {
    ("sans-serif", f64::from(size) * 1.24).into_font().color(&INK)
}

/// Shortens a text at its end to `most` characters.
pub(super) fn cut(text: &str, most: usize) -> String {
    if text.chars().count() <= most { text.to_owned() } else { text.chars().take(most.saturating_sub(1)).chain(['…']).collect() }
}

pub(super) fn mesh<'m, 'a, 'b, 'c, X: Ranged, Y: Ranged>(
    style: &'m mut MeshStyle<'a, 'b, X, Y, SVGBackend<'c>>,
) -> &'m mut MeshStyle<'a, 'b, X, Y, SVGBackend<'c>> {
    style.light_line_style(TRANSPARENT).bold_line_style(GRID).axis_style(INK).label_style(plain_font(11))
}

#[derive(Clone, Copy)]
pub(super) enum Key {
    Line(RGBColor, u32),
    Limit,
    /// A line with a filled area below it.
    Area(RGBColor),
    Bar(RGBColor),
    Triangle(RGBColor),
    Circle(RGBColor),
    Cross(RGBColor),
}

/// Draws a legend with its middle at `y` and `gap` pixels between the entries.
pub(super) fn legend(head: &Area<'_>, y: i32, gap: i32, keys: &[(&str, Key)]) -> Drawn {
    let mut x = LEFT as i32;
    for (name, key) in keys {
        let (line, middle) = ([(x, y), (x + 20, y)], (x + 10, y));
        match *key {
            Key::Line(colour, width) => head.draw(&PathElement::new(line, colour.stroke_width(width)))?,
            Key::Limit => head.draw(&DashedPathElement::new(line, 5, 4, LIMIT.stroke_width(1)))?,
            Key::Area(colour) => {
                head.draw(&Rectangle::new([(x, y - 5), (x + 20, y + 5)], colour.mix(0.25).filled()))?;
                head.draw(&PathElement::new([(x, y - 5), (x + 20, y - 5)], colour.stroke_width(2)))?;
            }
            Key::Bar(colour) => {
                let corners = [(x + 7, y - 8), (x + 14, y + 8)];
                head.draw(&Rectangle::new(corners, colour.mix(0.3).filled()))?;
                head.draw(&Rectangle::new(corners, colour.stroke_width(1)))?;
            }
            Key::Triangle(colour) => head.draw(&TriangleMarker::new(middle, 6, colour.filled()))?,
            Key::Circle(colour) => head.draw(&Circle::new(middle, 5, colour.stroke_width(2)))?,
            Key::Cross(colour) => head.draw(&Cross::new(middle, 5, colour.stroke_width(3)))?,
        }
        head.draw(&Text::new((*name).to_owned(), (x + 26, y), font(12, INK, HPos::Left, VPos::Center)))?;
        // A character takes 6.4 pixels in 12-pixel sans-serif fonts.
        x += 26 + (name.chars().count() as f64 * 6.4) as i32 + gap;
    }
    Ok(())
}

/// Draws panels of equal height below a legend.
pub(super) fn panels<T>(
    (title, description): (&str, &str),
    keys: &[(&str, Key)],
    panels: &[T],
    draw: impl Fn(&Area<'_>, &T) -> Drawn,
) -> String {
    let height = HEAD + PANEL * u32::try_from(panels.len()).unwrap_or(u32::MAX / PANEL - 1);
    document(height, title, description, |root| {
        let (head, body) = root.split_vertically(HEAD);
        legend(&head, 16, 20, keys)?;
        body.split_evenly((panels.len(), 1)).iter().zip(panels).try_for_each(|(area, panel)| draw(area, panel))
    })
}

/// A panel with memory in MiB over an axis that starts at 0.
pub(super) struct Plot<'a> {
    pub(super) title: String,
    pub(super) x: &'a str,
    pub(super) end: f64,
    pub(super) top: Bytes,
}

impl Plot<'_> {
    pub(super) fn chart<'a, 'b>(&self, area: &'a Area<'b>) -> Result<Chart<'a, 'b>, DrawingAreaErrorKind<std::io::Error>> {
        area.draw(&Text::new(self.title.clone(), (LEFT as i32, 4), font(13, INK, HPos::Left, VPos::Top)))?;
        let mut chart = ChartBuilder::on(area)
            .margin_top(26)
            .margin_right(30)
            .set_label_area_size(LabelAreaPosition::Left, LEFT)
            .set_label_area_size(LabelAreaPosition::Bottom, 40)
            .build_cartesian_2d(0.0..self.end, 0.0..mib(self.top) * 1.1)?;
        mesh(&mut chart.configure_mesh())
            .x_labels(8)
            .y_labels(6)
            .x_desc(self.x)
            .x_label_formatter(&|x| format!("{x:.0}"))
            .y_label_formatter(&|y| format!("{y:.0} MiB"))
            .draw()?;
        Ok(chart)
    }
}

pub(super) fn line(chart: &mut Chart<'_, '_>, points: impl IntoIterator<Item = (f64, Bytes)>, colour: RGBColor) -> Drawn {
    let points: Vec<(f64, f64)> = points.into_iter().map(|(x, bytes)| (x, mib(bytes))).collect();
    chart.draw_series([PathElement::new(points, colour.stroke_width(2))]).map(drop)
}

pub(super) fn limit(chart: &mut Chart<'_, '_>, end: f64, limit: f64) -> Drawn {
    chart.draw_series([DashedPathElement::new([(0.0, limit), (end, limit)], 5, 4, LIMIT.stroke_width(1))]).map(drop)
}

pub(super) fn mib(bytes: Bytes) -> f64 {
    bytes.get() as f64 / f64::from(1 << 20)
}
