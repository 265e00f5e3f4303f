//! The effect of the settings on one request, computed once. A cache hit reads these few words and does not branch on settings.

use super::config::{BLOCK_UNIT, Config, LARGEST_UNSPLIT_REMAINDER};
use crate::stats::PoolKind;

#[derive(Clone, Copy, Debug)]
pub(super) struct Rules {
    /// True if sizes are only rounded up to multiples of the unit.
    plain_rounding: bool,
    /// By kind of pool: the smallest remainder that is split off.
    smallest_remainder: [u64; 2],
    /// By kind of pool: only requests below this size split a block.
    cut_below: [u64; 2],
    /// True if blocks record when they became free.
    pub(super) ages: bool,
    pub(super) expandable: bool,
}

impl Rules {
    pub(super) fn new(config: &Config) -> Self {
        let (smallest_remainder, cut_below) = if config.expandable_segments {
            ([BLOCK_UNIT; 2], [u64::MAX; 2])
        } else {
            ([BLOCK_UNIT, LARGEST_UNSPLIT_REMAINDER + 1], [u64::MAX, config.max_split_size.map_or(u64::MAX, |max| max.0)])
        };
        Self {
            plain_rounding: config.roundup_power2_divisions.iter().all(|&divisions| divisions <= 1),
            smallest_remainder,
            cut_below,
            ages: config.garbage_collection_threshold.is_some(),
            expandable: config.expandable_segments,
        }
    }

    /// The block size for a request of at least one byte, as [`Config::round`] computes it.
    #[inline]
    pub(super) fn round(&self, config: &Config, requested: u64) -> Option<u64> {
        if self.plain_rounding {
            return Some(requested.checked_add(BLOCK_UNIT - 1)? & !(BLOCK_UNIT - 1));
        }
        config.round(requested)
    }

    /// Returns true if the block is split after `wanted` bytes, with `remaining` bytes left.
    #[inline]
    pub(super) fn splits(&self, pool: PoolKind, wanted: u64, remaining: u64) -> bool {
        (remaining >= self.smallest_remainder[pool as usize]) & (wanted < self.cut_below[pool as usize])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::Bytes;

    #[test]
    fn a_large_remainder_of_one_mebibyte_stays_with_the_block() {
        let rules = Rules::new(&Config::default());
        assert!(!rules.splits(PoolKind::Large, 19 << 20, 1 << 20));
        assert!(rules.splits(PoolKind::Large, (19 << 20) - 512, (1 << 20) + 512));
        assert!(rules.splits(PoolKind::Small, 512, 512));
        assert!(!rules.splits(PoolKind::Small, 512, 0));
    }

    #[test]
    fn oversize_requests_take_whole_blocks_unless_segments_are_expandable() {
        let limited = Config { max_split_size: Some(Bytes::mib(64)), ..Config::default() };
        let expandable = Config { expandable_segments: true, ..limited.clone() };
        for (config, wanted, cut) in [(&limited, 63, true), (&limited, 64, false), (&expandable, 64, true)] {
            assert_eq!(Rules::new(config).splits(PoolKind::Large, wanted << 20, 20 << 20), cut, "{wanted} MiB");
        }
        assert!(Rules::new(&expandable).splits(PoolKind::Large, 64 << 20, 512));
        assert!(!Rules::new(&expandable).splits(PoolKind::Large, 64 << 20, 0));
    }

    #[test]
    fn the_fast_rounding_equals_that_of_the_settings() {
        let plain = Config::default();
        let ones = Config { roundup_power2_divisions: [1; 16], ..Config::default() };
        let divided = Config { roundup_power2_divisions: [4; 16], ..Config::default() };
        for config in [plain, ones, divided] {
            let rules = Rules::new(&config);
            for requested in [1, 511, 512, 513, 1200, 5 << 20, (5 << 20) + 1, u64::MAX >> 1, u64::MAX - 511, u64::MAX - 510, u64::MAX] {
                assert_eq!(rules.round(&config, requested), config.round(requested), "{requested}");
            }
        }
    }
}
