//! Which settings would have saved a program: [`Advice`], out of what a [`Grid`](crate::grid::Grid) found.

use harness_allocator::units::Bytes;
use harness_trace::program::{Ended, RecordedProgram};

use crate::grid::Ending;

/// Settings are recommended to a program that ends well without them only where they save this share of its memory, in percent.
const WORTH_PERCENT: u64 = 5;
/// Of settings that save about as much, within this share of the memory in percent, the simplest are recommended.
const ALIKE_PERCENT: u64 = 5;

/// What follows from the endings of a program under all configurations.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct Advice<'e> {
    /// How the program ends under the settings that it was recorded under.
    pub own: &'e Ending,
    /// Whether the recording goes to the end of the program. One that ended in an out-of-memory tells only whether a setting gets past that point.
    pub is_complete: bool,
    pub verdict: Verdict<'e>,
}

/// What to do about the settings.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict<'e> {
    /// These make it fit.
    Fits(&'e Ending),
    /// It fits without; these save memory.
    Saves(&'e Ending),
    /// It fits, and nothing saves enough to be worth a setting.
    Fine,
    /// Nothing helps.
    Nothing {
        /// The most that is allocated at one time: no allocator could do with less.
        needed: Bytes,
        /// The settings that come closest, with the least memory that would be enough for them.
        closest: Option<&'e Ending>,
    },
}

impl<'e> Advice<'e> {
    /// Judges the endings of a program, the first of which is under its own settings, on a device of that memory. `None` where there are no endings.
    #[must_use]
    pub fn new(program: &RecordedProgram, endings: &'e [Ending], memory: Bytes) -> Option<Self> {
        let own = endings.first()?;
        let is_complete = is_complete(program);
        let pytorchs = || endings.iter().skip(1).filter(|ending| ending.configuration.is_pytorchs());
        let fitting = best(pytorchs().filter(|ending| ending.fits()));
        let verdict = if own.fits() {
            let limit = least(own).0 - least(own).0 / 100 * WORTH_PERCENT;
            fitting.filter(|best| least(best).0 <= limit).map_or(Verdict::Fine, Verdict::Saves)
        } else {
            fitting.map_or_else(|| nothing(endings, pytorchs(), memory), Verdict::Fits)
        };
        Some(Self { own, is_complete, verdict })
    }
}

impl<'e> Advice<'e> {
    /// The settings to be set, where some are worth it.
    #[must_use]
    pub fn recommended(&self) -> Option<&'e str> {
        match self.verdict {
            Verdict::Fits(best) | Verdict::Saves(best) => Some(&best.configuration.name),
            Verdict::Fine | Verdict::Nothing { .. } => None,
        }
    }
}

/// Whether a recording goes to the end of its program, as far as it shows.
#[must_use]
pub const fn is_complete(program: &RecordedProgram) -> bool {
    matches!(program.ended, Ended::Well)
}

fn nothing<'e>(endings: &[Ending], pytorchs: impl Iterator<Item = &'e Ending>, memory: Bytes) -> Verdict<'e> {
    let needed = endings.first().map_or(Bytes::ZERO, |own| own.peak_allocated);
    let closest = pytorchs.filter(|ending| least(ending) > memory).min_by_key(|ending| (least(ending), simplicity(ending)));
    Verdict::Nothing { needed, closest }
}

/// Those that need the least memory; of those that need about as much, the simplest, and then those whose driver calls cost least.
fn best<'e>(endings: impl Iterator<Item = &'e Ending> + Clone) -> Option<&'e Ending> {
    let smallest = endings.clone().map(least).min()?;
    let alike = Bytes(smallest.0 + smallest.0 / 100 * ALIKE_PERCENT);
    endings.filter(|ending| least(ending) <= alike).min_by_key(|ending| (simplicity(ending), ending.price().1, least(ending)))
}

/// The least memory that would be enough; where that was not looked for, what it reserved.
fn least(ending: &Ending) -> Bytes {
    ending.least.map_or(Bytes(ending.replayed.stats.reserved_bytes.all.peak), |least| least.enough)
}

/// How many settings there are.
fn simplicity(ending: &Ending) -> usize {
    ending.configuration.name.matches(':').count()
}
