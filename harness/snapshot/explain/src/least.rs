//! Finds the least sufficient memory: [`least_memory`], or several amounts at a time with
//! [`least_memory_by`].

use harness_allocator::units::Bytes;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Least {
    /// The least memory that was tested as sufficient.
    pub enough: Bytes,
    /// The largest insufficient amount below `enough`. Zero if every tested amount was sufficient.
    pub too_little: Bytes,
    /// True if no tested amount above `enough` was insufficient. If it is false, more memory can
    /// hurt, and other amounts below `enough` may also be sufficient.
    pub is_monotonic: bool,
}

/// Finds the least sufficient memory between `low`, which may be insufficient, and `high`, which is
/// sufficient, to within `step`.
///
/// Bisection assumes that more memory never hurts. That can be wrong, because memory that an
/// allocator takes may be in the way later. So a few amounts above the answer are tested as well.
pub fn least_memory<E>(
    low: Bytes,
    high: Bytes,
    step: Bytes,
    mut is_enough: impl FnMut(Bytes) -> Result<bool, E>,
) -> Result<Least, E> {
    least_memory_by(low, high, step, 1, |memory| {
        memory.iter().map(|memory| is_enough(*memory)).collect()
    })
}

/// Like [`least_memory`], but tests up to `width` amounts at a time. `are_enough` answers for each
/// of the rising amounts.
pub fn least_memory_by<E>(
    low: Bytes,
    high: Bytes,
    step: Bytes,
    width: u64,
    mut are_enough: impl FnMut(&[Bytes]) -> Result<Vec<bool>, E>,
) -> Result<Least, E> {
    let unit = step.0.max(1);
    // In units of `step`. `enough` is sufficient; `too_little` is insufficient or below the range.
    let (mut too_little, mut enough) = ((low.0 / unit).saturating_sub(1), high.0.div_ceil(unit));
    let mut seen = None;
    while enough - too_little > 1 {
        let gap = enough - too_little;
        let parts = width.clamp(1, gap - 1) + 1;
        let tried: Vec<u64> = (1..parts)
            .map(|part| {
                too_little + (u128::from(gap) * u128::from(part) / u128::from(parts)) as u64
            })
            .collect();
        let answers = are_enough(
            &tried
                .iter()
                .map(|units| Bytes(units * unit))
                .collect::<Vec<_>>(),
        )?;
        // An insufficient amount above a sufficient one is handled by the final check.
        let first = tried
            .iter()
            .zip(answers)
            .find(|(_, is_enough)| *is_enough)
            .map(|(units, _)| *units);
        let below = tried
            .iter()
            .copied()
            .take_while(|units| Some(*units) != first)
            .last();
        enough = first.unwrap_or(enough);
        too_little = below.unwrap_or(too_little);
        seen = below.or(seen);
    }
    let above: Vec<Bytes> = [1, 2, 4]
        .map(|above| Bytes((enough + above) * unit))
        .into_iter()
        .filter(|memory| *memory < high)
        .collect();
    let is_monotonic =
        above.is_empty() || are_enough(&above)?.into_iter().all(|is_enough| is_enough);
    let found = Bytes(enough * unit).min(Bytes(high.0.div_ceil(unit) * unit));
    Ok(Least {
        enough: found,
        too_little: Bytes(seen.unwrap_or(0) * unit),
        is_monotonic,
    })
}

#[cfg(test)]
mod tests;
