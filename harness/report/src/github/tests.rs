use super::*;
use crate::tests::examples;

#[test]
fn a_text_that_fits_stays_as_it_is() {
    assert_eq!(cut("one\ntwo\n", 8), "one\ntwo\n");
}

#[test]
fn a_text_that_does_not_fit_is_cut_between_lines_with_a_word() {
    let text = format!(
        "first\n\n<details><summary>µ</summary>\n\n```text\n{}```\n\n</details>\n",
        "line of some length µ\n".repeat(100)
    );
    for limit in 150..text.len() {
        let cut = cut(&text, limit);
        assert!(
            cut.len() <= limit && cut.ends_with(CUT),
            "{limit}: {} bytes, {cut}",
            cut.len()
        );
        assert_eq!(
            cut.matches("<details>").count(),
            cut.matches("</details>").count()
        );
        assert_eq!(
            cut.lines().filter(|line| line.starts_with("```")).count() % 2,
            0,
            "{cut}"
        );
    }
    assert_eq!(cut(&text, 10), "");
}

#[test]
fn the_summary_of_runs_has_no_pictures() {
    let records = examples::every_ending();
    let text = summary(&Report::new(&records), SUMMARY_LIMIT);
    assert!(
        text.starts_with("# Out-of-memory report\n\n**2 of 17 runs failed")
            && !text.contains(".svg"),
        "{text}"
    );
}

#[test]
fn commands_are_escaped_and_bounded() {
    assert_eq!(
        command("warning", "a: b, 5 %", "x\ny: 5 %"),
        "::warning title=a%3A b%2C 5 %25::x%0Ay: 5 %25"
    );
    let messages =
        |number: usize| annotations(&vec![("error", "t".to_owned(), "m".to_owned()); number]);
    assert_eq!(messages(10).len(), 10);
    assert_eq!(
        (messages(11).len(), messages(11)[9].as_str()),
        (10, "::notice title=2 more::The report has all of them.")
    );
}
