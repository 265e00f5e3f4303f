//! The least memory with which a program ends as it does with plenty: [`least`].

use harness_allocator::units::Bytes;
use harness_explain::least::{Least, least_memory_by};
use harness_gpu_settings::settings::AddressOrder;
use serde::Serialize;

use super::observed::Observed;
use super::{Program, Run, Trial};

/// Memory is given in pages of this size.
const PAGE: Bytes = Bytes::mib(2);
/// The orders of addresses that a simulated GPU can have.
pub(crate) const ORDERS: [AddressOrder; 3] = [AddressOrder::Up, AddressOrder::Down, AddressOrder::Reuse];
/// The order of a real GPU, as a word.
const DRIVERS: &str = "driver";

/// How to search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Search {
    /// To the page, and not to 1 %.
    pub exact: bool,
    /// Whether out of memory errors that the program survives are fine.
    pub allow_ooms: bool,
    /// What each process takes before its first allocation.
    pub context_overhead: Bytes,
}

/// What was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LeastReport {
    /// Memory of the device in the first run.
    pub plenty: u64,
    /// The most bytes that a process held in it.
    pub peak_reserved: u64,
    /// The least memory, by the order of addresses: first the order of the first run.
    pub orders: Vec<OrderLeast>,
}

/// The least memory with one order of addresses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct OrderLeast {
    /// The order; `driver` for that of a real GPU.
    pub addresses: String,
    /// The least memory that was seen to be enough.
    pub enough: u64,
    /// The most that was seen not to be; 0 where everything tried was enough.
    pub too_little: u64,
    /// Whether more memory never hurt.
    pub is_monotonic: bool,
}

/// What ends a search: the user, or what the program's runner says.
enum Stop<E> {
    Interrupted,
    Failed(E),
}

/// Searches for each order of addresses, or only for that of the first run, as always on a real GPU. `None` where the user interrupted.
///
/// # Errors
/// What the program's runner says.
pub fn least<R: Run>(program: &Program<'_, R>, search: Search, all_orders: bool) -> Result<Option<LeastReport>, R::Error> {
    let mut orders = vec![program.trial.addresses];
    if all_orders && program.trial.addresses.is_some() {
        orders.extend(ORDERS.map(Some).into_iter().filter(|order| *order != program.trial.addresses));
    }
    let mut found: Vec<OrderLeast> = Vec::new();
    for order in orders {
        let near = found.first().map(|first| Bytes(first.enough));
        match of_order(program, search, order, near) {
            Ok(Least { enough, too_little, is_monotonic }) => {
                let addresses = order.map_or_else(|| DRIVERS.to_owned(), |order| order.to_string());
                found.push(OrderLeast { addresses, enough: enough.0, too_little: too_little.0, is_monotonic });
            }
            Err(Stop::Interrupted) => return Ok(None),
            Err(Stop::Failed(error)) => return Err(error),
        }
    }
    Ok(Some(LeastReport { plenty: program.trial.memory.0, peak_reserved: program.first.peak_reserved.0, orders: found }))
}

/// Whether a run ended as the first one did, without out of memory errors but those that are allowed.
#[must_use]
pub fn is_enough(first: &Observed, run: &Observed, allow_ooms: bool) -> bool {
    run.ending == first.ending && (allow_ooms || run.ooms == 0)
}

/// The bisection of one order. Where another order's answer is known, amounts near it are tried first.
fn of_order<R: Run>(
    program: &Program<'_, R>,
    search: Search,
    order: Option<AddressOrder>,
    near: Option<Bytes>,
) -> Result<Least, Stop<R::Error>> {
    let answers = |amounts: &[Bytes]| {
        let trial = |memory: &Bytes| Trial { memory: *memory, addresses: order, ..program.trial.clone() };
        let runs = program.run(&amounts.iter().map(trial).collect::<Vec<_>>()).map_err(Stop::Failed)?;
        let answer = |run: Option<Observed>| Ok(is_enough(program.first, &run.ok_or(Stop::Interrupted)?, search.allow_ooms));
        runs.into_iter().map(answer).collect::<Result<Vec<bool>, _>>()
    };
    let rounded = |bytes: Bytes| Bytes(bytes.0.next_multiple_of(PAGE.0));
    let overhead = search.context_overhead;
    let step = if search.exact { PAGE } else { rounded(Bytes(program.first.peak_reserved.0 / 100)).max(PAGE) };
    // A program that asks for no more than in the first run fits in what it held then; one that goes by the size of the device may not.
    let held = Bytes((overhead.0 + program.first.peak_reserved.0).next_multiple_of(step.0)).min(program.trial.memory);
    let guesses = [near.map(|near| near.saturating_sub(step)), near, Some(held)];
    let guesses: Vec<Bytes> = guesses.into_iter().flatten().filter(|guess| *guess > overhead).collect();
    let (mut low, mut high, mut refuted) = (Bytes(overhead.0 + 1), program.trial.memory, Bytes::ZERO);
    let mut guesses: Vec<Bytes> = guesses.into_iter().filter(|guess| *guess <= high).collect();
    guesses.sort_unstable();
    guesses.dedup();
    for (guess, enough) in guesses.iter().zip(answers(&guesses)?) {
        match enough {
            true => high = high.min(*guess),
            false if *guess < high => (low, refuted) = (Bytes(guess.0 + step.0), *guess),
            false => {}
        }
    }
    let found = least_memory_by(low, high, step, program.jobs as u64, answers)?;
    Ok(Least { enough: found.enough.min(program.trial.memory), too_little: found.too_little.max(refuted), ..found })
}

#[cfg(test)]
mod tests;
