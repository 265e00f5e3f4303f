use super::*;

#[test]
fn operations_survive_writing_and_reading() {
    let text = "a 1 512 0\nf 1\nr 2 3\ns 1\nd\ne\nm 0.5\np\ng+ 7\ng- 7\ngr 7\nx 2097152\nx -5\n";
    let events = parse(text).expect("all are operations");
    let written: String = events.iter().map(|event| format!("{event}\n")).collect();
    assert_eq!(written, text);
}

#[test]
fn comments_are_skipped_and_errors_name_their_line() {
    assert_eq!(
        parse("# a trace\n\n d # wait\n")
            .expect("one operation")
            .len(),
        1
    );
    let error = parse("d\na 1 -5 0\n").expect_err("a negative size");
    assert_eq!(
        (error.line, error.expected),
        (2, "expected `a ID SIZE STREAM`, three whole numbers")
    );
    for wrong in [
        "q",
        "a 1 2",
        "f x",
        "m 1.5",
        "m nan",
        "d 1",
        "a 1 99999999999999999999 0",
    ] {
        assert!(parse(wrong).is_err(), "{wrong}");
    }
}
