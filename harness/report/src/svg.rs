//! SVG pictures: documents, texts, legends, and panels with memory over an axis.

use harness_allocator::units::Bytes;
use harness_base::printable::printable;
use plotters::coord::{Shift, types::RangedCoordf64};
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::{chart::MeshStyle, element::DashedPathElement, prelude::*};

use super::escape::between_tags;

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

// Okabe and Ito's palette for color-blind readers, without yellow, which is too pale on white:
// <https://jfly.uni-koeln.de/color/>. Then wine and olive of Paul Tol's muted scheme:
// <https://sronpersonalpages.nl/~pault/>.
pub(super) const COLOURS: [RGBColor; 9] = [
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

/// The opacity of filled areas, below grid lines.
pub(super) const PATCH: f64 = 0.75;

pub(super) type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
pub(super) type Chart<'a, 'b> =
    ChartContext<'a, SVGBackend<'b>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;
pub(super) type Drawn = Result<(), DrawingAreaErrorKind<std::io::Error>>;

/// Draws on a white background.
pub(super) fn document(
    height: u32,
    title: &str,
    description: &str,
    draw: impl FnOnce(&Area<'_>) -> Drawn,
) -> String {
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, (WIDTH, height)).into_drawing_area();
        let drawn = root
            .fill(&WHITE)
            .and_then(|()| draw(&root))
            .and_then(|()| root.present());
        drawn.expect("drawing into a string cannot fail");
    }
    let [title, description] = [title, description].map(|text| between_tags(&printable(text)));
    let words = format!("<title>{title}</title>\n<desc>{description}</desc>\n");
    let Some((tag, content)) = svg.split_once('>') else {
        return svg;
    };
    format!("{tag} role=\"img\">\n{words}{}", content.trim_start())
}

/// A font of this size in pixels. The point of the text is at the given side and height of it.
pub(super) fn font(size: u32, colour: RGBColor, side: HPos, height: VPos) -> TextStyle<'static> {
    TextStyle {
        color: colour.to_backend_color(),
        pos: Pos::new(side, height),
        ..plain_font(size)
    }
}

fn plain_font(size: u32) -> TextStyle<'static> {
    ("sans-serif", f64::from(size) * 1.24)
        .into_font()
        .color(&INK)
}

pub(super) fn cut(text: &str, most: usize) -> String {
    if text.chars().count() <= most {
        text.to_owned()
    } else {
        text.chars()
            .take(most.saturating_sub(1))
            .chain(['…'])
            .collect()
    }
}

pub(super) fn mesh<'m, 'a, 'b, 'c, X: Ranged, Y: Ranged>(
    style: &'m mut MeshStyle<'a, 'b, X, Y, SVGBackend<'c>>,
) -> &'m mut MeshStyle<'a, 'b, X, Y, SVGBackend<'c>> {
    style
        .light_line_style(TRANSPARENT)
        .bold_line_style(GRID)
        .axis_style(INK)
        .label_style(plain_font(11))
}

#[derive(Clone, Copy)]
pub(super) enum Key {
    Line(RGBColor, u32),
    Limit,
    /// A line with a filled area below it.
    Area(RGBColor),
    Bar(RGBColor),
    /// A filled area.
    Patch(RGBColor),
    Triangle(RGBColor),
    Circle(RGBColor),
    /// A filled circle.
    Dot(RGBColor),
    Cross(RGBColor),
}

impl Key {
    pub(super) fn draw(self, area: &Area<'_>, (x, y): (i32, i32)) -> Drawn {
        let line = [(x - 10, y), (x + 10, y)];
        match self {
            Self::Line(colour, width) => {
                area.draw(&PathElement::new(line, colour.stroke_width(width)))
            }
            Self::Limit => area.draw(&DashedPathElement::new(line, 5, 4, LIMIT.stroke_width(1))),
            Self::Area(colour) => {
                area.draw(&Rectangle::new(
                    [(x - 10, y - 5), (x + 10, y + 5)],
                    colour.mix(0.25).filled(),
                ))?;
                area.draw(&PathElement::new(
                    [(x - 10, y - 5), (x + 10, y - 5)],
                    colour.stroke_width(2),
                ))
            }
            Self::Bar(colour) => {
                let corners = [(x - 3, y - 8), (x + 4, y + 8)];
                area.draw(&Rectangle::new(corners, colour.mix(0.3).filled()))?;
                area.draw(&Rectangle::new(corners, colour.stroke_width(1)))
            }
            Self::Patch(colour) => area.draw(&Rectangle::new(
                [(x - 10, y - 6), (x + 10, y + 6)],
                colour.mix(PATCH).filled(),
            )),
            Self::Triangle(colour) => area.draw(&TriangleMarker::new((x, y), 6, colour.filled())),
            Self::Circle(colour) => area.draw(&Circle::new((x, y), 5, colour.stroke_width(2))),
            Self::Dot(colour) => area.draw(&Circle::new((x, y), 4, colour.filled())),
            Self::Cross(colour) => area.draw(&Cross::new((x, y), 5, colour.stroke_width(3))),
        }
    }
}

pub(super) fn text(
    area: &Area<'_>,
    text: impl Into<String>,
    place: (i32, i32),
    side: HPos,
    size: u32,
    colour: RGBColor,
) -> Drawn {
    area.draw(&Text::new(
        text.into(),
        place,
        font(size, colour, side, VPos::Center),
    ))
}

/// Legend entries in rows from the left edge, `gap` pixels apart.
pub(super) struct Legend<'a> {
    pub(super) left: i32,
    pub(super) gap: i32,
    pub(super) names: Vec<&'a str>,
}

impl Legend<'_> {
    const ROW: i32 = 18;

    /// The place of each entry: pixels from the left edge of the picture, and below the middle of
    /// the first row.
    fn places(&self) -> Vec<(i32, i32)> {
        let (mut x, mut y) = (self.left, 0);
        let place = |name: &&str| {
            // A character takes 6.4 pixels in 12-pixel sans-serif fonts.
            let wide = 26 + (name.chars().count() as f64 * 6.4) as i32;
            if x > self.left && x + wide > WIDTH as i32 {
                (x, y) = (self.left, y + Self::ROW);
            }
            let place = (x, y);
            x += wide + self.gap;
            place
        };
        self.names.iter().map(place).collect()
    }

    pub(super) fn height(&self) -> i32 {
        self.places().last().map_or(0, |(_, y)| y + Self::ROW)
    }

    /// Draws the legend with the middle of its first row at `top`. `key` draws the key of an entry
    /// around a place.
    pub(super) fn draw(
        &self,
        area: &Area<'_>,
        top: i32,
        key: impl Fn(usize, (i32, i32)) -> Drawn,
    ) -> Drawn {
        for (index, (name, (x, y))) in self.names.iter().zip(self.places()).enumerate() {
            key(index, (x + 10, top + y))?;
            text(area, *name, (x + 26, top + y), HPos::Left, 12, INK)?;
        }
        Ok(())
    }
}

pub(super) fn legend(head: &Area<'_>, top: i32, gap: i32, keys: &[(&str, Key)]) -> Drawn {
    let legend = Legend {
        left: LEFT as i32,
        gap,
        names: keys.iter().map(|(name, _)| *name).collect(),
    };
    legend.draw(head, top, |index, place| keys[index].1.draw(head, place))
}

/// Starts a chart with these margins, and with room for the labels of its left and lower axis.
pub(super) fn chart_on<'a, 'b>(
    area: &'a Area<'b>,
    (top, right): (u32, u32),
    (left, bottom): (u32, u32),
) -> ChartBuilder<'a, 'b, SVGBackend<'b>> {
    let mut chart = ChartBuilder::on(area);
    chart.margin_top(top).margin_right(right);
    chart
        .set_label_area_size(LabelAreaPosition::Left, left)
        .set_label_area_size(LabelAreaPosition::Bottom, bottom);
    chart
}

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
        body.split_evenly((panels.len(), 1))
            .iter()
            .zip(panels)
            .try_for_each(|(area, panel)| draw(area, panel))
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
    pub(super) fn chart<'a, 'b>(
        &self,
        area: &'a Area<'b>,
    ) -> Result<Chart<'a, 'b>, DrawingAreaErrorKind<std::io::Error>> {
        area.draw(&Text::new(
            self.title.clone(),
            (LEFT as i32, 4),
            font(13, INK, HPos::Left, VPos::Top),
        ))?;
        let mut chart = chart_on(area, (26, 30), (LEFT, 40))
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

pub(super) fn line(
    chart: &mut Chart<'_, '_>,
    points: impl IntoIterator<Item = (f64, Bytes)>,
    end: f64,
    colour: RGBColor,
) -> Drawn {
    let points = points.into_iter().map(|(x, bytes)| (x, mib(bytes)));
    chart
        .draw_series([PathElement::new(
            stairs(points, end),
            colour.stroke_width(2),
        )])
        .map(drop)
}

/// The path of a value that stays until the next point, and after the last point until `end`.
pub(super) fn stairs(points: impl IntoIterator<Item = (f64, f64)>, end: f64) -> Vec<(f64, f64)> {
    let mut path: Vec<(f64, f64)> = Vec::new();
    for (x, y) in points {
        match path.last() {
            Some(&(_, before)) if before == y => {}
            Some(&(_, before)) => path.extend([(x, before), (x, y)]),
            None => path.push((x, y)),
        }
    }
    path.extend(path.last().map(|&(_, last)| (end, last)));
    path
}

pub(super) fn limit(chart: &mut Chart<'_, '_>, end: f64, limit: f64) -> Drawn {
    chart
        .draw_series([DashedPathElement::new(
            [(0.0, limit), (end, limit)],
            5,
            4,
            LIMIT.stroke_width(1),
        )])
        .map(drop)
}

pub(super) fn mib(bytes: Bytes) -> f64 {
    bytes.get() as f64 / f64::from(1 << 20)
}
