use harness_allocator::units::{Bytes, Nanos};
use harness_base::printable::printable;
use serde::Serialize;

use super::svg::{self, Key, Plot, RESERVED};
use super::words::{self, Grid};
use super::{escape::prose, page::Page};

/// Observations of a device while a program ran. Times are measured on the host's clock.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Squeezed {
    pub command: String,
    pub exit_code: u8,
    pub signal: Option<u8>,
    /// The requested free memory.
    pub leave: Bytes,
    pub taken: Bytes,
    /// Free memory before the harness occupied any, and at the start of the program.
    pub free_before: Bytes,
    pub free_at_start: Bytes,
    pub peak_used: Bytes,
    pub least_free: Bytes,
    pub looks: u64,
    pub milliseconds: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lost: Option<String>,
    /// Changes between samples. If there are too many, those with the most memory in use are kept.
    pub curve: Vec<Look>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Look {
    pub milliseconds: u64,
    pub used: Bytes,
    pub free: Bytes,
}

impl Squeezed {
    fn sentence(&self) -> String {
        let end = match self.signal {
            Some(signal) => format!("Signal {signal} ended the program"),
            None if self.exit_code == 0 => "The program ended well".to_owned(),
            None => format!("The program ended with exit code {}", self.exit_code),
        };
        let (peak, least) = (words::size(self.peak_used), words::size(self.least_free));
        format!("{end}. Device memory: at most {peak} in use, at least {least} free.")
    }
}

pub fn picture(squeezed: &Squeezed) -> Option<String> {
    let first = squeezed.curve.first()?;
    let plot = Plot {
        title: words::shortened(&printable(&squeezed.command), svg::TITLE),
        x: "milliseconds since the program started, on the host's clock",
        end: squeezed
            .curve
            .last()
            .map_or(0, |look| look.milliseconds)
            .max(1) as f64,
        top: squeezed
            .curve
            .iter()
            .map(|look| look.used + look.free)
            .max()
            .unwrap_or_default(),
    };
    let described = format!(
        "{} It was {} when the program started.",
        squeezed.sentence(),
        words::size(first.used)
    );
    let keys = [
        ("device used (driver)", Key::Line(RESERVED, 2)),
        ("all of its memory", Key::Limit),
    ];
    Some(svg::panels(
        ("Device used while the program ran", &described),
        &keys,
        &[plot],
        |area, plot| {
            let mut chart = plot.chart(area)?;
            svg::line(
                &mut chart,
                squeezed
                    .curve
                    .iter()
                    .map(|look| (look.milliseconds as f64, look.used)),
                plot.end,
                RESERVED,
            )?;
            svg::limit(&mut chart, plot.end, svg::mib(plot.top))
        },
    ))
}

/// Renders the record. It links to the picture by this file name.
pub fn markdown(squeezed: &Squeezed, picture: Option<&str>, again: &str) -> String {
    let mut page = Page::default();
    page.block(format!("# {}", prose(&squeezed.command)));
    page.block(format!("**{}**", prose(&squeezed.sentence())));
    if let Some(picture) = picture {
        page.block(format!("![Device used while the program ran]({picture})"));
    }
    let rows = [
        ("free before", words::size(squeezed.free_before)),
        ("to be left free", words::size(squeezed.leave)),
        ("taken", words::size(squeezed.taken)),
        (
            "free when the program started",
            words::size(squeezed.free_at_start),
        ),
        ("least free", words::size(squeezed.least_free)),
        ("most used", words::size(squeezed.peak_used)),
        (
            "time of the program (measured)",
            Nanos(squeezed.milliseconds.saturating_mul(1_000_000)).to_string(),
        ),
    ];
    page.grid(&Grid::new(
        "lr",
        ["figure", "value"],
        rows.map(|(figure, value)| vec![figure.to_owned(), value]),
    ));
    let looks = words::count(squeezed.looks, "look");
    page.block(prose(&format!(
        "The figures are the driver's for the whole device, in {looks} while the program ran: what \
         others hold and what was taken counts as used, and what came and went \
         between two looks was not seen."
    )));
    if let Some(lost) = &squeezed.lost {
        page.block(prose(&format!(
            "Sampling of the device stopped early: {lost}."
        )));
    }
    page.block("## Again");
    page.command(again);
    page.ended().text
}

#[cfg(test)]
mod tests;
