use super::*;

#[test]
fn formulas_are_evaluated_in_scenario_syntax() {
    for (text, expected) in [
        ("4MiB * 3", Some("12MiB")),
        ("kv[3 - 1]", Some("kv[2]")),
        ("2 * 8", Some("16")),
        ("5ms * 2", Some("10000000ns")),
        ("4MiB * i", None),
        ("4MiB", None),
        ("device.free - 2MiB", None),
    ] {
        assert_eq!(computed(text).as_deref(), expected, "{text}");
    }
}

#[test]
fn words_are_identifiers_before_a_point() {
    let found: Vec<&str> = words("kv[i - 1] 4MiB before.reserved_bytes.all x_1")
        .map(|(_, word)| word)
        .collect();
    assert_eq!(found, ["kv", "i", "before", "x_1"]);
}
