use proptest::prelude::*;

use super::*;

const SPACE: usize = 48;

#[derive(Clone, Debug)]
enum Change {
    Insert(u64, u64, u8),
    Remove(u64, u64),
    Update(u64, u64, u8),
}

fn a_change() -> impl Strategy<Value = Change> {
    let range = (0..SPACE as u64 - 1).prop_flat_map(|start| (Just(start), start + 1..SPACE as u64));
    (0..3, range, 1_u8..4).prop_map(|(kind, (start, end), value)| match kind {
        0 => Change::Insert(start, end, value),
        1 => Change::Remove(start, end),
        _ => Change::Update(start, end, value),
    })
}

proptest! {
    #[test]
    fn a_range_map_is_an_array_with_a_value_an_address(
        changes in prop::collection::vec(a_change(), 1..40)
    ) {
        let mut map = RangeMap::<u8>::default();
        let mut array = [None; SPACE];
        for change in changes {
            match change {
                Change::Insert(start, end, value) => {
                    map.insert(start, end, value);
                    array[start as usize..end as usize].fill(Some(value));
                }
                Change::Remove(start, end) => {
                    map.remove(start, end);
                    array[start as usize..end as usize].fill(None);
                }
                Change::Update(start, end, by) => {
                    map.update(start, end, |value| *value = value.wrapping_mul(5).wrapping_add(by));
                    for value in &mut array[start as usize..end as usize] {
                        *value = Some(value.unwrap_or(0).wrapping_mul(5).wrapping_add(by));
                    }
                }
            }
            let mut seen = [None; SPACE];
            for (start, end, &value) in map.overlapping(0, SPACE as u64) {
                prop_assert!(
                    seen[start as usize..end as usize].iter().all(Option::is_none),
                    "entries overlap"
                );
                seen[start as usize..end as usize].fill(Some(value));
            }
            prop_assert_eq!(seen, array);
        }
        for (start, end) in [(0, 7), (5, 6), (13, 40)] {
            let inside: usize =
                map.overlapping(start, end).map(|(from, to, _)| (to - from) as usize).sum();
            let expected = array[start as usize..end as usize].iter().flatten().count();
            prop_assert_eq!(inside, expected);
        }
    }
}

#[test]
fn neighbours_of_equal_value_are_one_entry() {
    let mut map = RangeMap::default();
    map.insert(0, 8, 'a');
    map.insert(16, 24, 'a');
    map.insert(8, 16, 'b');
    assert_eq!(map.entries.len(), 3);
    map.insert(8, 16, 'a');
    assert_eq!(map.entries.len(), 1);
}
