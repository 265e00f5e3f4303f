//! Correct allocators violate no invariant in any correct program.

use harness_allocator::allocator::{AllocatorKind, AllocatorSpec, MemoryFraction, caching::Config};
use harness_allocator::units::{Bytes, Nanos};
use proptest::prelude::*;

use crate::program::{MEMORY, Machine, Op, STREAMS};

const SLOTS: usize = 12;

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let slot = 0..SLOTS;
    let stream = 0..=STREAMS;
    let size = prop_oneof![
        2 => (0_u64..4096).prop_map(Bytes),
        3 => (1_u64..=24).prop_map(|n| Bytes(n * 700_000)),
        1 => Just(MEMORY),
        1 => Just(Bytes(MEMORY.0 + 1)),
    ];
    let op = prop_oneof![
        8 => (slot.clone(), size, stream.clone())
            .prop_map(|(slot, size, stream)| Op::Alloc(slot, size, stream)),
        4 => slot.clone().prop_map(Op::Fill),
        3 => (slot.clone(), stream.clone()).prop_map(|(slot, stream)| Op::HandOver(slot, stream)),
        1 => slot.clone().prop_map(Op::Verify),
        1 => (stream, 1_u64..10)
            .prop_map(|(stream, millis)| Op::Work(stream, Nanos::millis(millis))),
        6 => slot.prop_map(Op::Free),
        1 => Just(Op::Synchronize),
        1 => Just(Op::EmptyCache),
        1 => (0_u64..=48).prop_map(|mib| Op::ExternalMemory(Bytes::mib(mib))),
        1 => prop_oneof![Just(0.25), Just(0.6), Just(1.0)].prop_map(Op::Fraction),
        2 => Just(Op::EndStep),
    ];
    prop::collection::vec(op, 1..80)
}

prop_compose! {
    /// Settings of PyTorch's allocator with an effect in little memory. Drivers map pages of whole
    /// 2 MiB only.
    fn settings()(
        large in prop_oneof![Just(20), (6_u64..20).prop_map(|pages| 2 * pages)],
        split in proptest::option::of(0_u64..20),
        rounding in 0_u64..20,
        divisions in prop_oneof![
            prop::sample::select(vec![0_u64, 1, 4, 16]).prop_map(|value| [value; 16]),
            prop::array::uniform16(prop::sample::select(vec![0_u64, 2, 8])),
        ],
        threshold in proptest::option::of(0.05_f64..0.95),
        fraction in prop_oneof![Just(1.0), 0.05_f64..1.0],
        expandable_segments in any::<bool>(),
    ) -> Config {
        Config {
            max_split_size: split.map(|more| Bytes::mib(large + more)),
            max_non_split_rounding: Bytes::mib(large + rounding),
            large_segment_size: Bytes::mib(large),
            roundup_power2_divisions: divisions,
            garbage_collection_threshold: threshold,
            memory_fraction: MemoryFraction::new(fraction).expect("in range"),
            expandable_segments,
            ..Config::default()
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn no_program_makes_a_right_allocator_break_an_invariant(program in ops()) {
        for &kind in AllocatorKind::ALL {
            prop_assert_eq!(Machine::new(kind.build()).run(&program), Ok(()), "{}", kind.name());
        }
    }

    #[test]
    fn no_program_makes_pytorchs_allocator_break_an_invariant_whatever_its_settings(
        program in ops(), config in settings()
    ) {
        let arm = AllocatorSpec::caching(config);
        prop_assert_eq!(Machine::new(arm.build()).run(&program), Ok(()), "{}", arm);
    }
}
