use harness_allocator::units::Bytes;
use harness_explain::causes::{ByteCause, Explanation};
use harness_explain::ranks::Overview;
use plotters::{prelude::*, style::text_anchor::HPos};

use super::text;
use crate::svg::{self, Area, Drawn, INK, WIDTH, document};
use crate::{escape::prose, page::Page};

pub fn render(
    ranks: Option<&Overview>,
    (name, explanation): (&str, &Explanation),
    picture: Option<&str>,
) -> String {
    let mut page = Page::default();
    if let Some(overview) = ranks {
        add_ranks(&mut page, overview);
    }
    page.block(format!("# Where the memory was: {}", prose(name)));
    page.block(format!("**{}**", prose(&explanation.headline)));
    if let Some(picture) = picture {
        page.block(format!(
            "![{}]({})",
            prose(&in_words(explanation)),
            picture.replace(' ', "%20")
        ));
    }
    page.block(prose(&format!(
        "State: {}.",
        text::moment(&explanation.moment, explanation.device)
    )));
    page.grid(&text::causes(explanation));
    page.block(prose(&format!(
        "Together {} bytes.",
        explanation.device_total.get()
    )));
    if let Some(request) = &explanation.request {
        page.block("## Why the request failed");
        page.block(prose(&text::request(request, explanation)));
        page.list(
            explanation
                .ways
                .iter()
                .map(|way| format!("**{}**: {}", way.way.about(), prose(&way.why))),
        );
        text::more(explanation)
            .iter()
            .for_each(|why| page.block(prose(why)));
    }
    for (title, grid) in [
        ("## What pins free memory", text::pinned(explanation)),
        (
            "## What the allocated memory is for",
            text::categories(explanation),
        ),
    ] {
        if !grid.rows.is_empty() {
            page.block(title);
            page.grid(&grid);
        }
    }
    if !explanation.growing.is_empty() {
        page.block("## Leak suspects");
        page.list(
            explanation
                .growing
                .iter()
                .map(|growth| prose(&text::grows(growth))),
        );
    }
    page.list(
        explanation
            .notes
            .iter()
            .map(|note| format!("Note: {}", prose(note))),
    );
    page.ended().text
}

fn add_ranks(page: &mut Page, overview: &Overview) {
    page.block("# Where the memory of all snapshots was");
    page.block(format!("**{}**", prose(&text::ranks_in_short(overview))));
    page.grid(&text::ranks(overview));
    page.list(
        overview
            .differences
            .iter()
            .map(|difference| prose(&difference.sentence())),
    );
}

const BAR_TOP: i32 = 40;
const BAR_BOTTOM: i32 = 84;
const SIDE: i32 = 16;
const ROW: i32 = 20;

/// One color per cause, from Okabe and Ito's palette for color-blind readers:
/// <https://jfly.uni-koeln.de/color/>.
const fn colour(cause: ByteCause) -> RGBColor {
    match cause {
        ByteCause::Allocated => RGBColor(0, 114, 178),
        ByteCause::Rounding => RGBColor(86, 180, 233),
        ByteCause::PendingFree => RGBColor(0, 158, 115),
        ByteCause::OtherStream => RGBColor(204, 121, 167),
        ByteCause::OtherPool => RGBColor(150, 60, 130),
        ByteCause::PrivatePool => RGBColor(120, 94, 60),
        ByteCause::InactiveSplit => RGBColor(213, 94, 0),
        ByteCause::WholeSegments => RGBColor(230, 159, 0),
        ByteCause::OthersHold => RGBColor(120, 120, 120),
        ByteCause::Free | ByteCause::FreeOrOthersHold => RGBColor(225, 225, 225),
    }
}

/// Draws the causes as a bar of the device's memory with figures below it. The SVG has a white
/// background.
pub fn draw(explanation: &Explanation) -> String {
    let rows = i32::try_from(explanation.causes.len()).unwrap_or(0).max(1);
    let height = u32::try_from(BAR_BOTTOM + 16 + rows * ROW + 8).unwrap_or(0);
    document(
        height,
        "Where the device's memory was",
        &in_words(explanation),
        |root| bar(root, explanation),
    )
}

fn bar(root: &Area<'_>, explanation: &Explanation) -> Drawn {
    let total = explanation.device_total;
    svg::text(
        root,
        format!("{total} by cause"),
        (SIDE, 20),
        HPos::Left,
        13,
        INK,
    )?;
    let width = f64::from(WIDTH) - 2.0 * f64::from(SIDE);
    let mut before = 0_u64;
    for (row, cause) in (0..).zip(&explanation.causes) {
        let x =
            |bytes: u64| SIDE + (bytes as f64 / total.get().max(1) as f64 * width).round() as i32;
        let after = before + cause.bytes.get();
        let paint = colour(cause.cause);
        root.draw(&Rectangle::new(
            [(x(before), BAR_TOP), (x(after), BAR_BOTTOM)],
            paint.filled(),
        ))?;
        let y = BAR_BOTTOM + 24 + row * ROW;
        root.draw(&Rectangle::new(
            [(SIDE, y - 7), (SIDE + 14, y + 7)],
            paint.filled(),
        ))?;
        let (bytes, share) = (cause.bytes.to_string(), text::share(cause.bytes, total));
        svg::text(root, bytes, (SIDE + 100, y), HPos::Right, 12, INK)?;
        svg::text(root, share, (SIDE + 160, y), HPos::Right, 12, INK)?;
        let about = cause.cause.about();
        svg::text(root, about, (SIDE + 176, y), HPos::Left, 13, INK)?;
        before = after;
    }
    root.draw(&Rectangle::new(
        [(SIDE, BAR_TOP), (SIDE + width as i32, BAR_BOTTOM)],
        INK.stroke_width(1),
    ))
}

fn in_words(explanation: &Explanation) -> String {
    let causes = explanation
        .causes
        .iter()
        .filter(|cause| cause.bytes > Bytes::ZERO);
    let causes: Vec<String> = causes
        .map(|cause| format!("{} {}", cause.bytes, cause.cause.about()))
        .collect();
    format!("{}: {}", explanation.device_total, causes.join("; "))
}
