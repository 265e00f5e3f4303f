use super::*;

#[test]
fn amounts_and_addresses_are_not_part_of_a_failure() {
    assert_eq!(without_figures("700 MiB to fit"), "to fit");
    assert_eq!(without_figures("kv[12] to be live"), "kv[] to be live");
    assert_eq!(
        without_figures("double free at 0x7f00, in 3 ms"),
        "double free at in"
    );
}

#[test]
fn formulas_that_cannot_be_evaluated_are_detected() {
    assert!(is_computed("churn.ooms = 3") && is_computed("reserved - allocated = 5 B"));
    assert!(
        !is_computed("`reserved / allocated` divides by zero: reserved = 0 B")
            && !is_computed("a.time was not reported")
    );
}

#[test]
fn formulas_and_sentences_are_distinguished() {
    assert!(
        is_formula("eventually active == 0")
            && is_formula("a<=1GiB")
            && is_formula("reserved < 5 * allocated")
    );
    assert!(
        !is_formula("700 MiB to fit")
            && !is_formula("the cause `fragmented`: free memory is in pieces")
    );
}
