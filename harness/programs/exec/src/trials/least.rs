//! [`least`] searches for the least memory with which a program ends as it does with plenty.

use std::cell::{Cell, RefCell};

use harness_allocator::units::Bytes;
use harness_explain::least::{Least, least_memory_by};
use harness_gpu_settings::settings::AddressOrder;
use serde::{Deserialize, Serialize};

use super::part::Part;
use super::{Trial, TrialProgram, observed::Observed};
use crate::doubts::Doubt;

/// The granularity of memory sizes.
const PAGE: Bytes = Bytes::mib(2);
/// The name of a real GPU's address order.
const DRIVERS: &str = "driver";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Search {
    /// `true` to search to the page, `false` to within 1 %.
    pub exact: bool,
    /// `true` to accept out of memory errors that the program survives.
    pub allow_ooms: bool,
    /// How many address orders runs confirm. Of further ones, replays decide if they can.
    pub confirmed: usize,
    /// Memory that each process takes before its first allocation.
    pub context_overhead: Bytes,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeastReport {
    /// Memory of the device in the first run.
    pub plenty: u64,
    /// Peak bytes that one process held in the first run.
    pub peak_reserved: u64,
    /// The least memory for each address order, beginning with the first run's.
    pub orders: Vec<OrderLeast>,
    /// Why the figures of the first run may differ from those on a GPU.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub doubts: Vec<Doubt>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub part: Option<Part>,
}

impl LeastReport {
    /// Returns the doubts about all runs.
    pub fn all_doubts(&self) -> Vec<Doubt> {
        let of_orders = self.orders.iter().map(|order| &order.doubts);
        Doubt::of_all([&self.doubts].into_iter().chain(of_orders))
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OrderLeast {
    /// The order; `driver` for a real GPU.
    pub addresses: String,
    /// The smallest amount that was enough.
    pub enough: u64,
    /// The largest amount that failed; 0 if every amount was enough.
    pub too_little: u64,
    /// `true` if no run failed with more memory than one that succeeded. Includes replays if they
    /// found the amount.
    pub is_monotonic: bool,
    /// The number of runs; 0 if replays alone found the amount.
    pub runs: usize,
    /// How a run with enough memory differs from the first run, if it does: the program is not
    /// deterministic, or adapts to the memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub difference: Option<String>,
    /// Why the outcomes of its runs, or of the run that replays repeat, may differ from those on a
    /// GPU.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub doubts: Vec<Doubt>,
}

/// Why a search stopped: an interrupt, or an error of the runner.
enum Stop<E> {
    Interrupted,
    Failed(E),
}

/// Searches with each driver's address order. A real GPU has only one. Returns `None` if the user
/// interrupted.
pub fn least<E: Send>(
    program: &TrialProgram<'_, E>,
    search: Search,
) -> Result<Option<LeastReport>, E> {
    let mut orders = vec![program.trial.addresses];
    if program.trial.addresses.is_some() {
        orders.extend(
            AddressOrder::OF_DRIVERS
                .map(Some)
                .into_iter()
                .filter(|order| *order != program.trial.addresses),
        );
    }
    let name = |order: &Option<AddressOrder>| {
        order.map_or_else(|| DRIVERS.to_owned(), |order| order.to_string())
    };
    let part = program.keep_shard(&mut orders, name);
    let mut found: Vec<OrderLeast> = Vec::new();
    for (index, order) in orders.into_iter().enumerate() {
        match of_order(
            program,
            search,
            order,
            found.first(),
            index < search.confirmed,
        ) {
            Ok(Found {
                least:
                    Least {
                        enough,
                        too_little,
                        is_monotonic,
                    },
                runs,
                difference,
                doubts,
            }) => {
                found.push(OrderLeast {
                    addresses: name(&order),
                    enough: enough.0,
                    too_little: too_little.0,
                    is_monotonic,
                    runs,
                    difference,
                    doubts,
                });
            }
            Err(Stop::Interrupted) => return Ok(None),
            Err(Stop::Failed(error)) => return Err(error),
        }
    }
    Ok(Some(LeastReport {
        plenty: program.trial.memory.0,
        peak_reserved: program.first.peak_reserved.0,
        orders: found,
        doubts: program.first.doubts.clone(),
        part,
    }))
}

/// Returns whether a run ended like the first one, without out of memory errors other than accepted
/// ones.
pub fn is_enough(first: &Observed, run: &Observed, allow_ooms: bool) -> bool {
    run.ending == first.ending && (allow_ooms || run.ooms == Some(0) && run.unreported.is_none())
}

struct Found {
    least: Least,
    runs: usize,
    /// As in [`OrderLeast`].
    difference: Option<String>,
    /// About the runs and the first run, with which each is compared.
    doubts: Vec<Doubt>,
}

/// Describes what a run without an out of memory error allocates unlike the first run. Both have
/// enough memory, so a deterministic program allocates the same, unless it adapts.
fn difference(first: &Observed, run: &Observed) -> Option<String> {
    if (first.ooms, run.ooms) != (Some(0), Some(0)) {
        return None;
    }
    let peaks = (first.peak_allocated, run.peak_allocated);
    let ends = (first.allocated_at_end, run.allocated_at_end);
    match (peaks, ends) {
        ((Some(before), Some(after)), _) if before != after => {
            Some(format!("allocates at most {after} instead of {before}"))
        }
        (_, (Some(before), Some(after))) if before != after => Some(format!(
            "leaves {after} allocated at its end instead of {before}"
        )),
        _ => None,
    }
}

/// Searches with one order. Replays of the first run predict the result, and two runs confirm it;
/// if they do not, runs replace the replays.
fn of_order<E: Send>(
    program: &TrialProgram<'_, E>,
    search: Search,
    order: Option<AddressOrder>,
    near: Option<&OrderLeast>,
    is_confirmed: bool,
) -> Result<Found, Stop<E>> {
    let trial = |memory: &Bytes| Trial {
        memory: *memory,
        addresses: order,
        ..program.trial.clone()
    };
    let runs = Cell::new(0);
    let doubts = RefCell::new(program.first.doubts.clone());
    let differs = RefCell::new(None);
    let run = |amounts: &[Bytes]| {
        runs.set(runs.get() + amounts.len());
        let observed = program
            .run(&amounts.iter().map(trial).collect::<Vec<_>>())
            .map_err(Stop::Failed)?;
        let answer = |run: Option<Observed>| {
            let run = run.ok_or(Stop::Interrupted)?;
            Doubt::add(&mut doubts.borrow_mut(), &run.doubts);
            let enough = is_enough(program.first, &run, search.allow_ooms);
            if enough {
                let found = differs.take().or_else(|| difference(program.first, &run));
                differs.replace(found);
            }
            Ok(enough)
        };
        observed
            .into_iter()
            .map(answer)
            .collect::<Result<Vec<bool>, _>>()
    };
    let found = |least, runs| Found {
        least,
        runs,
        difference: differs.take(),
        doubts: doubts.take(),
    };
    if let Some(least) = predicted(program, search, near, trial) {
        if !is_confirmed {
            return Ok(found(least, 0));
        }
        let below = Some(least.too_little).filter(|below| *below > search.context_overhead);
        let amounts: Vec<Bytes> = below.into_iter().chain([least.enough]).collect();
        let expected: Vec<bool> = amounts
            .iter()
            .map(|amount| *amount == least.enough)
            .collect();
        if run(&amounts)? == expected {
            return Ok(found(least, runs.get()));
        }
    }
    let least = bisect(program, search, near, run)?;
    Ok(found(least, runs.get()))
}

/// Searches with replays of the first run. After an error that the program survives, a replay
/// cannot follow it.
fn predicted<E>(
    program: &TrialProgram<'_, E>,
    search: Search,
    near: Option<&OrderLeast>,
    trial: impl Fn(&Bytes) -> Trial,
) -> Option<Least> {
    let replay = |amounts: &[Bytes]| {
        let predicted = amounts.iter().map(|memory| {
            let run = (program.predict)(&trial(memory)).ok_or(())?;
            Ok(is_enough(program.first, &run, false))
        });
        predicted.collect::<Result<Vec<bool>, ()>>()
    };
    if search.allow_ooms {
        return None;
    }
    bisect(program, search, near, replay).ok()
}

/// Bisects. Tries the result of another order first, if it is known.
fn bisect<T, E>(
    program: &TrialProgram<'_, T>,
    search: Search,
    near: Option<&OrderLeast>,
    are_enough: impl Fn(&[Bytes]) -> Result<Vec<bool>, E>,
) -> Result<Least, E> {
    let step_for = |bytes: Bytes| {
        if search.exact {
            PAGE
        } else {
            Bytes((bytes.0 / 100).next_multiple_of(PAGE.0)).max(PAGE)
        }
    };
    let overhead = search.context_overhead;
    let mut step = near.map_or(step_for(program.first.peak_reserved), |near| {
        Bytes(near.enough.saturating_sub(near.too_little)).max(PAGE)
    });
    // A program with the same requests as the first run fits into that run's peak. One that adapts
    // to the device's size may not.
    let held = Bytes((overhead.0 + program.first.peak_reserved.0).next_multiple_of(step.0))
        .min(program.trial.memory);
    let mut found = Least {
        enough: program.trial.memory,
        too_little: Bytes::ZERO,
        is_monotonic: true,
    };
    let guesses = [
        near.map(|near| Bytes(near.too_little)),
        near.map(|near| Bytes(near.enough)),
        Some(held),
    ];
    let mut guesses: Vec<Bytes> = guesses
        .into_iter()
        .flatten()
        .filter(|guess| *guess > overhead && *guess <= found.enough)
        .collect();
    guesses.sort_unstable();
    guesses.dedup();
    for (guess, enough) in guesses.iter().zip(are_enough(&guesses)?) {
        match enough {
            true => found.enough = found.enough.min(*guess),
            false if *guess < found.enough => found.too_little = *guess,
            false => {}
        }
    }
    loop {
        let low = Bytes(found.too_little.max(overhead).0 + step.0);
        let least = least_memory_by(low, found.enough, step, program.jobs as u64, &are_enough)?;
        found.enough = found.enough.min(least.enough);
        found.too_little = found.too_little.max(least.too_little);
        found.is_monotonic &= least.is_monotonic;
        // A program that fills the memory it finds, such as a server, needs far less than its peak
        // in the first run.
        if step_for(found.enough) >= step {
            return Ok(found);
        }
        step = step_for(found.enough);
    }
}

#[cfg(test)]
mod tests;
