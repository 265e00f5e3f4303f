//! Whether chance explains that a program continues with more memory or less work after a failure.
//!
//! Two runs that agree do not prove that a program is deterministic. So all runs must be equal up
//! to their failures, and further runs must repeat the finding. If each run of a program has one of
//! two values at random, less than 1 % of the searches take chance for a mistake.

use harness_allocator::units::Bytes;
use harness_base::words::count;

use super::{Clean, Failed, FaultCase, Place, places};
use crate::trials::observed::{Observed, TrialEnd};
use crate::trials::{Trial, TrialProgram, which::spread};

/// Further runs without failures, all of which must be equal.
const CLEAN: usize = 3;
/// Further runs of the cases together, at least and at most.
const LEAST: usize = 3;
const MOST: usize = 8;

/// Returns what two runs do differently that should be equal, if any case continues with more
/// memory or less work. `is_random` if the first two runs without failures differ.
pub(super) fn explanation<E: Send>(
    program: &TrialProgram<'_, E>,
    clean: &Clean<'_>,
    is_random: bool,
    failed: &[Failed<'_>],
) -> Result<Option<String>, E> {
    let found = |failed: &&Failed<'_>| clean.finding(failed.run, &failed.case).is_some();
    let suspects: Vec<&Failed<'_>> = failed.iter().filter(found).collect();
    let (Some(measure), false) = (clean.measure().next(), suspects.is_empty()) else {
        return Ok(None);
    };
    // Copies have the same random numbers only until a failure makes the program skip some.
    if is_random {
        return Ok(Some("the program is not deterministic".to_owned()));
    }
    let before = failed
        .iter()
        .find_map(|failed| failed.difference_before(measure));
    if before.is_some() {
        return Ok(before);
    }
    let chosen = repeated(suspects.len());
    let of_cases = chosen.iter().map(|at| suspects[*at].trial.clone());
    let trials: Vec<Trial> = std::iter::repeat_n(&program.trial, CLEAN)
        .cloned()
        .chain(of_cases)
        .collect();
    let runs: Option<Vec<Observed>> = program.run(&trials)?.into_iter().collect();
    let Some(runs) = runs else {
        return Ok(Some("runs that confirm it did not start".to_owned()));
    };
    let (without, with) = runs.split_at(CLEAN);
    let differs = |run: &Observed| {
        let difference = measure
            .difference(run)
            .or_else(|| measure.difference_in_work(run))?;
        Some(format!("in another run without failures, {difference}"))
    };
    let of_clean = without.iter().find_map(differs);
    let mut repeats = chosen.iter().map(|at| suspects[*at]).zip(with);
    Ok(of_clean.or_else(|| repeats.find_map(|(failed, run)| clean.difference_of(failed, run))))
}

/// The positions of the suspects that run again, some several times if there are few.
pub(super) fn repeated(suspects: usize) -> Vec<usize> {
    let each = LEAST.div_ceil(suspects);
    spread(suspects, MOST)
        .flat_map(|at| std::iter::repeat_n(at, each))
        .collect()
}

impl Clean<'_> {
    /// What counts against a run that continues: whether it has more memory, and less work. `None`
    /// if nothing does.
    fn finding(&self, run: &Observed, case: &FaultCase) -> Option<[bool; 2]> {
        let finding = [case.holds_memory, self.has_less_work(run)];
        (case.continues() && finding != [false; 2]).then_some(finding)
    }

    /// Describes a repeated run that does not confirm the finding.
    fn difference_of(&self, failed: &Failed<'_>, again: &Observed) -> Option<String> {
        let Failed {
            place, run, case, ..
        } = failed;
        let of_again = self.case(place, failed.trial.faults.first()?, again);
        if self.finding(run, case) == self.finding(again, &of_again) {
            return None;
        }
        let difference = run
            .difference_at_end(again)
            .or_else(|| run.difference_in_work(again))
            .unwrap_or_else(|| "it continues in another way".to_owned());
        Some(format!(
            "after the same failure of {}, {difference} in another run",
            place.text()
        ))
    }
}

impl Failed<'_> {
    /// Describes what the run does differently before its failure.
    fn difference_before(&self, clean: &Observed) -> Option<String> {
        let place = self.place;
        // Other processes may make the most attempts after a failure.
        if place.call.is_some() || (place.rank.is_none() && clean.processes > 1) {
            return None;
        }
        let (clean, run) = (clean.of_rank(place.rank), self.run.of_rank(place.rank));
        let before = usize::try_from(place.attempt).unwrap_or(usize::MAX) - 1;
        let pairs = clean.attempts.iter().zip(&run.attempts).take(before);
        let (index, (clean, made)) = pairs
            .enumerate()
            .find(|(_, (clean, made))| clean.size != made.size)?;
        Some(format!(
            "before the failure of {}, attempt {} requests {} instead of {}",
            place.text(),
            index + 1,
            made.size,
            clean.size
        ))
    }
}

impl Place {
    fn text(&self) -> String {
        let of = self
            .rank
            .map_or_else(String::new, |rank| format!(" of rank {rank}"));
        let what = self.call.map_or("attempt", |call| call.name());
        format!("{what} {}{of}", self.attempt)
    }
}

impl Observed {
    /// Describes what another run of the same program does differently; `None` if it makes the same
    /// attempts and ends with the same memory.
    pub(super) fn difference(&self, again: &Self) -> Option<String> {
        let [before, after] = [self, again].map(places);
        let sizes = before
            .iter()
            .zip(&after)
            .find(|(before, after)| before.name() == after.name() && before.size != after.size);
        if self.ending != again.ending {
            let [before, after] = [self, again].map(|run| match run.ending {
                TrialEnd::By(end) => format!("exit code {}", end.exit_code()),
                TrialEnd::Hang => "its time limit".to_owned(),
            });
            Some(format!("it ends with {after} instead of {before}"))
        } else if let Some((before, after)) = sizes {
            Some(format!(
                "{} requests {} instead of {}",
                before.text(),
                after.size,
                before.size
            ))
        } else if before.len() != after.len() {
            Some(format!(
                "it makes {} instead of {}",
                count(after.len() as u64, "attempt"),
                before.len()
            ))
        } else {
            self.difference_at_end(again).or_else(|| {
                (self.peak_reserved != again.peak_reserved).then(|| {
                    format!(
                        "it reserves at most {} instead of {}",
                        again.peak_reserved, self.peak_reserved
                    )
                })
            })
        }
    }

    fn difference_at_end(&self, again: &Self) -> Option<String> {
        let [before, after] = [self, again].map(|run| run.allocated_at_end);
        let (before, after): (Bytes, Bytes) = (before?, after?);
        (before != after)
            .then(|| format!("it leaves {after} allocated at its end instead of {before}"))
    }

    fn difference_in_work(&self, again: &Self) -> Option<String> {
        let [before, after] = [self, again].map(|run| run.submitted);
        (before != after).then(|| {
            let after = count(after, "operation");
            format!("it submits {after} to the GPU instead of {before}")
        })
    }
}
