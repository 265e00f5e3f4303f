//! What all allocators of a suite changed by together from one night to another.
//!
//! The yardstick follows the processor's clock. It does not see memory or caches that are slower for a night, as neighbours on a virtual
//! machine make them, nor what a compiler does to code that all allocators share. Both move all allocators one way, and a change in one
//! allocator, or in code that some share, moves only those. So what every allocator changed by at least has another cause than any one of
//! them: of allocators that all moved one way, the change of the one that moved least; none where one stayed or moved the other way. An
//! allocator's change is the median over its entries, so that none counts more because it has more arms or cases.

use std::collections::BTreeMap;

use harness_allocator::allocator::AllocatorKind;

use super::inference::median;
use super::record::Quantity;

/// Of fewer allocators, all may run the code that changed.
const LEAST_ALLOCATORS: usize = 3;

/// Whose code an allocator of this kind runs, in one word.
pub(super) const fn code_of(kind: AllocatorKind) -> &'static str {
    // Expandable segments are a setting.
    if kind.is_pytorchs() { AllocatorKind::Caching.name() } else { kind.name() }
}

/// How an entry's figure changed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step<'a> {
    pub(super) suite: &'a str,
    pub(super) quantity: Quantity,
    /// Whose code was measured: arms of one allocator count as one.
    pub(super) allocator: &'a str,
    /// The logarithm of the ratio, new over old.
    pub(super) log: f64,
}

/// The common change of every suite and quantity that enough allocators were measured for.
#[derive(Debug, Default)]
pub(super) struct Drifts<'a>(BTreeMap<(&'a str, Quantity), Drift>);

/// What every allocator changed by at least.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Drift {
    /// The logarithm of the ratio, new over old; zero where it is not known.
    pub(super) log: f64,
    /// How many allocators there are.
    pub(super) allocators: usize,
}

impl<'a> Drifts<'a> {
    /// Linear time but for the order of suites.
    pub(super) fn of(steps: impl Iterator<Item = Step<'a>>) -> Self {
        let mut by_suite: BTreeMap<(&str, Quantity), BTreeMap<&str, Vec<f64>>> = BTreeMap::new();
        for Step { suite, quantity, allocator, log } in steps {
            by_suite.entry((suite, quantity)).or_default().entry(allocator).or_default().push(log);
        }
        let drift = |mut allocators: BTreeMap<&str, Vec<f64>>| {
            let medians: Vec<f64> = allocators.values_mut().filter_map(|logs| median(logs)).collect();
            let (least, most) =
                medians.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(least, most), &log| (least.min(log), most.max(log)));
            // The end that is nearer to no change, where both lie on one side of it.
            let log = if least > 0.0 { least } else { most.min(0.0) };
            (medians.len() >= LEAST_ALLOCATORS).then_some(Drift { log, allocators: medians.len() })
        };
        Self(by_suite.into_iter().filter_map(|(key, allocators)| Some((key, drift(allocators)?))).collect())
    }

    pub(super) fn get(&self, suite: &str, quantity: Quantity) -> Drift {
        self.0.get(&(suite, quantity)).copied().unwrap_or_default()
    }

    /// By suite and quantity.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&'a str, Quantity, Drift)> {
        self.0.iter().map(|(&(suite, quantity), &drift)| (suite, quantity, drift))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drift(steps: &[(&str, f64)]) -> Drift {
        let step = |&(allocator, log)| Step { suite: "traces", quantity: Quantity::HostTime, allocator, log };
        Drifts::of(steps.iter().map(step)).get("traces", Quantity::HostTime)
    }

    #[test]
    fn what_all_allocators_changed_by_is_what_each_changed_by_at_least() {
        let of = |caching, bfc, rmm_pool| drift(&[("caching", caching), ("bfc", bfc), ("rmm_pool", rmm_pool)]);
        assert_eq!(of(0.08, 0.09, 0.07), Drift { log: 0.07, allocators: 3 });
        assert_eq!(of(-0.08, -0.02, -0.07), Drift { log: -0.02, allocators: 3 });
        assert_eq!(of(0.08, 0.0, 0.07), Drift { log: 0.0, allocators: 3 });
        assert_eq!(of(0.5, -0.01, 0.5), Drift { log: 0.0, allocators: 3 });
    }

    #[test]
    fn many_arms_of_one_allocator_are_one_voice() {
        let caching = [("caching", 0.1); 7];
        let others = [("bfc", 0.01), ("rmm_pool", 0.02), ("rmm_pool", 0.03), ("rmm_pool", 0.07)];
        assert_eq!(drift(&[&caching[..], &others].concat()), Drift { log: 0.01, allocators: 3 });
        assert_eq!(drift(&[&caching[..], &others[1..]].concat()), Drift::default());
    }

    #[test]
    fn of_two_allocators_nothing_is_common() {
        assert_eq!(drift(&[("caching", 0.1), ("bfc", 0.1), ("bfc", 0.1)]), Drift::default());
    }

    #[test]
    fn quantities_and_suites_drift_on_their_own() {
        let step = |suite, quantity, allocator| Step { suite, quantity, allocator, log: 0.1 };
        let steps = ["a", "b", "c"].map(|allocator| step("one", Quantity::HostTime, allocator));
        let others = [step("one", Quantity::DeviceTime, "a"), step("two", Quantity::HostTime, "a")];
        let drifts = Drifts::of(steps.into_iter().chain(others));
        assert_eq!(drifts.iter().map(|(suite, quantity, _)| (suite, quantity)).collect::<Vec<_>>(), [("one", Quantity::HostTime)]);
        assert_eq!(drifts.get("two", Quantity::HostTime), Drift::default());
    }
}
