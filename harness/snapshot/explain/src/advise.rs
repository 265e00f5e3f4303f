//! Recommends allocator settings from the results of a [`Grid`](crate::grid::Grid): [`Advice`].

use harness_allocator::units::Bytes;
use harness_trace::program::{RecordedEnd, RecordedProgram};

use crate::grid::GridRow;

/// Minimum saving in percent for which settings are recommended to a program that already fits.
const WORTH_PERCENT: u64 = 5;
/// Savings that differ by at most this percentage of memory count as equal; then the simplest
/// settings win.
const ALIKE_PERCENT: u64 = 5;

#[derive(Clone, Debug, PartialEq)]
pub struct Advice<'e> {
    pub own: &'e GridRow,
    /// True if the recording reaches the end of the program. If it ends with an OOM, a setting is
    /// known to pass that point only.
    pub is_complete: bool,
    pub verdict: AdviceVerdict<'e>,
}

#[derive(Clone, Debug, PartialEq)]
pub enum AdviceVerdict<'e> {
    /// The program fits only with these settings.
    Fits(&'e GridRow),
    /// The program fits without settings, but these save memory.
    Saves(&'e GridRow),
    /// The program fits, and no setting saves enough.
    Fine,
    /// No setting is sufficient. Every allocator needs the peak of allocated memory (`needed`);
    /// `closest` needs less memory than the recorded settings, and the least of all.
    Nothing {
        needed: Bytes,
        closest: Option<&'e GridRow>,
    },
}

impl<'e> Advice<'e> {
    /// Evaluates results on a device with `memory`. The first is that of the recorded settings.
    /// Returns `None` without results.
    pub fn new(program: &RecordedProgram, endings: &'e [GridRow], memory: Bytes) -> Option<Self> {
        let own = endings.first()?;
        let is_complete = is_complete(program);
        let pytorchs = || {
            endings
                .iter()
                .skip(1)
                .filter(|ending| ending.configuration.allocator.is_pytorch())
        };
        let fitting = best(pytorchs().filter(|ending| ending.fits()));
        let verdict = if own.fits() {
            let limit = least(own).0 - least(own).0 / 100 * WORTH_PERCENT;
            fitting
                .filter(|best| least(best).0 <= limit)
                .map_or(AdviceVerdict::Fine, AdviceVerdict::Saves)
        } else {
            let is_closer =
                |ending: &&GridRow| least(ending) > memory && least(ending) < least(own);
            let closest = pytorchs()
                .filter(is_closer)
                .min_by_key(|ending| (least(ending), simplicity(ending)));
            fitting.map_or(
                AdviceVerdict::Nothing {
                    needed: own.peak_allocated,
                    closest,
                },
                AdviceVerdict::Fits,
            )
        };
        Some(Self {
            own,
            is_complete,
            verdict,
        })
    }

    pub fn recommended(&self) -> Option<&'e GridRow> {
        match self.verdict {
            AdviceVerdict::Fits(best) | AdviceVerdict::Saves(best) => Some(best),
            AdviceVerdict::Fine | AdviceVerdict::Nothing { .. } => None,
        }
    }
}

/// Returns true if the recording appears to reach the end of its program.
pub const fn is_complete(program: &RecordedProgram) -> bool {
    matches!(program.ended, RecordedEnd::Well)
}

/// The results that need the least memory, then the fewest settings, then the cheapest driver
/// calls.
fn best<'e>(endings: impl Iterator<Item = &'e GridRow> + Clone) -> Option<&'e GridRow> {
    let smallest = endings.clone().map(least).min()?;
    let alike = Bytes(smallest.0 + smallest.0 / 100 * ALIKE_PERCENT);
    endings
        .filter(|ending| least(ending) <= alike)
        .min_by_key(|ending| (simplicity(ending), ending.price().1, least(ending)))
}

/// The least sufficient memory if it was searched, or else the reserved memory.
fn least(ending: &GridRow) -> Bytes {
    ending.least.map_or(
        Bytes(ending.replayed.stats.reserved_bytes.all.peak),
        |least| least.enough,
    )
}

fn simplicity(ending: &GridRow) -> usize {
    ending.configuration.name.matches(':').count()
}
