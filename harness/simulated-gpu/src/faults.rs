//! [`Attempts`]: which driver calls fail because that was asked for.

use harness_allocator::units::Bytes;

use crate::settings::{Fault, FaultyCall};

/// Attempts counted so far, by fault.
#[derive(Debug, Default)]
pub(crate) struct Attempts(Vec<u64>);

impl Attempts {
    /// Counts an attempt. Tells whether it is to fail.
    pub(crate) fn fails(&mut self, faults: &[Fault], call: FaultyCall, size: Bytes) -> bool {
        self.0.resize(faults.len(), 0);
        let mut fails = false;
        for (fault, attempts) in faults.iter().zip(&mut self.0) {
            if fault.call == call && size >= fault.min_size {
                *attempts += 1;
                fails |= (fault.first..fault.first.saturating_add(fault.count)).contains(attempts);
            }
        }
        fails
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_attempts_that_were_asked_for_fail_and_smaller_ones_do_not_count() {
        let faults = ["cudaMalloc:2:2:1MiB", "cudaMalloc:5"].map(|text| text.parse().expect("a fault"));
        let mut attempts = Attempts::default();
        let sizes = [4096, 1 << 20, 2 << 20, 4096, 1 << 20, 3 << 20];
        let failed = sizes.map(|size| attempts.fails(&faults, FaultyCall::Malloc, Bytes(size)));
        assert_eq!(failed, [false, false, true, false, true, false]);
        assert!(!attempts.fails(&faults, FaultyCall::Create, Bytes::mib(2)));
    }
}
