use std::collections::BTreeSet;

use proptest::prelude::*;

use super::super::blocks::{BLOCK_UNIT, Blocks, TieOrder};
use super::super::ids::StreamPoolId;
use super::*;
use crate::device::{DevicePtr, MemoryRange};
use crate::{stats::PoolKind, units::Bytes};

/// Sizes that share bins, sizes that do not, and many equal ones.
fn sizes() -> impl Strategy<Value = u64> {
    let units = prop_oneof![
        1_u64..20,
        4090_u64..4110,
        8180_u64..8200,
        (0_u64..40).prop_map(|n| (1 << 20) + n),
        1_u64..1 << 30
    ];
    units.prop_map(|units| units * BLOCK_UNIT)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]
    #[test]
    fn it_finds_the_same_blocks_as_an_ordered_set(
        operations in prop::collection::vec((sizes(), any::<prop::sample::Index>(), 0..12_u32),
            1..300)
    ) {
        let mut stream_pool = FreeBlocks::<BLOCK_UNIT>::default();
        let mut blocks = Blocks::new(TieOrder::Address);
        let mut model = BTreeSet::new();
        for (step, (size, choice, kind)) in operations.into_iter().enumerate() {
            let best = stream_pool.best_fit(&blocks, size);
            let expected = model.range((size, 0, BlockId::NONE)..).next().copied();
            prop_assert_eq!(best, expected.map(|(_, _, id)| id));
            if kind < 6 {
                // Addresses in random order.
                let address = (step as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
                let range = MemoryRange::new(DevicePtr(address), Bytes(size));
                let id = blocks.add_segment(range, StreamPoolId(0), PoolKind::Large, false);
                stream_pool.insert(&mut blocks, id);
                model.insert((size, address, id));
            } else if let (Some(found), Some(entry), true) = (best, expected, kind < 8) {
                stream_pool.remove(&mut blocks, found);
                blocks.remove_segment(found);
                model.remove(&entry);
            } else if kind < 11 && !model.is_empty() {
                let entry = **choice.get(&model.iter().collect::<Vec<_>>());
                stream_pool.remove(&mut blocks, entry.2);
                blocks.remove_segment(entry.2);
                model.remove(&entry);
            }
        }
        let all: Vec<_> = model.iter().map(|&(_, _, id)| id).collect();
        prop_assert_eq!(stream_pool.largest(&blocks), model.last().map_or(0, |&(size, _, _)| size));
        prop_assert_eq!(stream_pool.in_order(&blocks), all);
    }
}
