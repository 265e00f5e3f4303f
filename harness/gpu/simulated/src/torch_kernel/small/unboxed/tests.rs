use super::*;

static STACK: [u64; 3] = [7, 8, 9];

fn call() -> Call {
    Call {
        integers: [1, 2, 3, 4, 5, 6],
        doubles: [0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5].map(f64::to_bits),
        stack: STACK.as_ptr(),
        function: 0,
        results: [0; 2],
    }
}

#[test]
fn arguments_are_in_the_registers_and_on_the_stack_where_the_calling_convention_puts_them() {
    let words = |letters: &str| {
        let types =
            Types::of(letters.as_bytes(), Functions([1, 0])).expect("all letters are known");
        let arguments = types.arguments.iter();
        let words: Vec<u64> = arguments
            .map(|(_, places)| call().word(places[0]))
            .collect();
        (words, types.words_on_stack)
    };
    let double = |value: f64| value.to_bits();
    assert_eq!(words("tsv"), (vec![3, 4], 0));
    assert_eq!(
        words("tst"),
        (vec![4, 5], 0),
        "the address of the result comes first"
    );
    assert_eq!(words("ltst"), (vec![4, 6, 7], 1));
    assert_eq!(
        words("ttlbr"),
        (vec![3, 4, 5, 7], 1),
        "both words of a list are registers"
    );
    assert_eq!(
        words("tttlir"),
        (vec![3, 4, 5, 7, 6], 2),
        "a list is never split"
    );
    assert_eq!(
        words("twbyt"),
        (vec![4, 7, 5, 6], 3),
        "optional integers are on the stack"
    );
    assert_eq!(words("tfgbr"), (vec![3, double(0.5), double(1.5), 5], 0));
    assert!(Types::of(b"t?r", Functions([1, 0])).is_none());
}

#[test]
fn a_call_passes_registers_and_words_of_the_stack_and_stores_the_result() {
    extern "C" fn target(
        a: u64,
        _: u64,
        _: u64,
        _: u64,
        _: u64,
        f: u64,
        g: u64,
        h: u64,
        x: f64,
    ) -> u64 {
        a + 10 * f + 100 * g + 1000 * h + (x * 2.0) as u64 * 10_000
    }
    let mut call = call();
    call.function = target as *const () as usize;
    // SAFETY: the function takes these registers and two words of the stack.
    unsafe { harness_small_call(&mut call, 2) };
    assert_eq!(call.results[0], 1 + 60 + 700 + 8000 + 10_000);
}
