//! Right allocators are never accused, whatever a right program does with them.

use harness_allocator::allocator::AllocatorKind;
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
        8 => (slot.clone(), size, stream.clone()).prop_map(|(slot, size, stream)| Op::Alloc(slot, size, stream)),
        4 => slot.clone().prop_map(Op::Fill),
        3 => (slot.clone(), stream.clone()).prop_map(|(slot, stream)| Op::HandOver(slot, stream)),
        1 => slot.clone().prop_map(Op::Verify),
        1 => (stream, 1_u64..10).prop_map(|(stream, millis)| Op::Work(stream, Nanos::millis(millis))),
        6 => slot.prop_map(Op::Free),
        1 => Just(Op::Synchronize),
        1 => Just(Op::EmptyCache),
        1 => (0_u64..=48).prop_map(|mib| Op::Pressure(Bytes::mib(mib))),
        1 => prop_oneof![Just(0.25), Just(0.6), Just(1.0)].prop_map(Op::Fraction),
        2 => Just(Op::EndStep),
    ];
    prop::collection::vec(op, 1..80)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn no_program_makes_a_right_allocator_break_an_invariant(program in ops()) {
        for &kind in AllocatorKind::ALL {
            prop_assert_eq!(Machine::new(kind.build()).run(&program), Ok(()), "{}", kind.name());
        }
    }
}
