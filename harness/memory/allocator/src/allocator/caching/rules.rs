//! The effect of the settings on one request, computed once. A cache hit reads these few words and
//! does not branch on settings.

use super::config::{Config, LARGEST_UNSPLIT_REMAINDER};
use crate::allocator::blocks::BLOCK_UNIT;
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
            (
                [BLOCK_UNIT, LARGEST_UNSPLIT_REMAINDER + 1],
                [
                    u64::MAX,
                    config.max_split_size.map_or(u64::MAX, |max| max.0),
                ],
            )
        };
        Self {
            plain_rounding: config
                .roundup_power2_divisions
                .iter()
                .all(|&divisions| divisions <= 1),
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
        (remaining >= self.smallest_remainder[pool as usize])
            & (wanted < self.cut_below[pool as usize])
    }
}

#[cfg(test)]
mod tests;
