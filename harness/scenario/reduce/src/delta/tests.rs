use super::*;

#[test]
fn needed_parts_are_kept() {
    for needed in [vec![0], vec![99], vec![3, 50, 51], (20..40).collect()] {
        let mut parts: Vec<usize> = (0..100).collect();
        let done = leave_out(parts.len(), &mut |range| {
            let rest: Vec<usize> = [&parts[..range.start], &parts[range.end..]].concat();
            let fails = needed.iter().all(|part| rest.contains(part));
            if fails {
                parts = rest;
            }
            Flow::Continue(fails.then_some(parts.len()))
        });
        assert_eq!((done, parts), (Flow::Continue(()), needed));
    }
}

#[test]
fn the_least_failing_number_is_found() {
    for wanted in [1, 2, 7, 99, 100] {
        assert_eq!(
            least(0, 100, &mut |number| Flow::Continue(number >= wanted)),
            Flow::Continue(wanted)
        );
    }
}

#[test]
fn sizes_become_small_then_round() {
    let mut size = Bytes(60_000_000);
    let done = simpler_size(size, &mut |new| {
        let fails = new >= Bytes(5_000_000);
        if fails {
            size = new;
        }
        Flow::Continue(fails)
    });
    assert_eq!((done, size), (Flow::Continue(()), Bytes::mib(8)));
}
