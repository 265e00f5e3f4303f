use unicode_width::UnicodeWidthStr;

use super::*;
use crate::tests::examples;
use harness_record::Records;

#[test]
fn the_terminal_shows_verdicts_failures_and_times() {
    let records = examples::every_ending();
    insta::assert_snapshot!(render(
        &Report::new(&records),
        Detail::Full,
        Style::Plain,
        None
    ));
}

#[test]
fn no_line_is_wider_than_the_terminal_but_commands() {
    let mut records = examples::every_ending();
    records.runs.push(examples::fragmented());
    for width in [50, 60, 80, 120, 200] {
        let text = render(
            &Report::new(&records),
            Detail::Full,
            Style::Plain,
            Some(width),
        );
        for line in text
            .lines()
            .filter(|line| !line.starts_with("reproduce: ") && !line.starts_with("explain: "))
        {
            // A place is one word.
            assert!(
                line.width() <= width || !line.trim().contains(' '),
                "{width}: {line}\n{text}"
            );
        }
        assert!(
            text.contains("FAILED") && text.contains("fits_in_pieces"),
            "{text}"
        );
    }
}

#[test]
fn a_narrow_terminal_shows_verdicts_and_causes_too() {
    let mut expected = examples::fragmented();
    expected.verdict = Verdict::Passed;
    expected.scenario.name = "expected".to_owned();
    let records = Records {
        runs: vec![examples::fragmented(), expected],
        ..examples::every_ending()
    };
    insta::assert_snapshot!(render(
        &Report::new(&records),
        Detail::Full,
        Style::Plain,
        Some(60)
    ));
}

#[test]
fn a_run_that_ended_is_one_line() {
    assert_eq!(
        run_line(&examples::oom_retry("caching", 1), Style::Plain, None),
        "passed      oom_retry with caching, repetition 2"
    );
    assert_eq!(
        run_line(&examples::fragmented(), Style::Plain, None),
        "FAILED      fits_in_pieces with caching, line 10"
    );
    assert_eq!(
        run_line(&examples::fragmented(), Style::Plain, Some(32)),
        "FAILED      fits_in_pi…, line 10"
    );
}

#[test]
fn the_settings_of_an_arm_are_told_where_its_name_does_not_tell_them() {
    let mut records = examples::every_ending();
    records.runs.truncate(2);
    let conf = "max_split_size_mb:512";
    for (run, name) in records
        .runs
        .iter_mut()
        .zip(["tuned", "caching(max_split_size_mb:512)"])
    {
        (run.allocator, run.settings) = (name.to_owned(), Some(conf.to_owned()));
    }
    let text = render(&Report::new(&records), Detail::Full, Style::Plain, None);
    assert!(
        text.contains("\nsettings: oom_retry with tuned: max_split_size_mb:512\n"),
        "{text}"
    );
    assert!(!text.contains("with caching("), "{text}");
    assert!(
        step_table(&records.runs[0]).contains("\nsettings: max_split_size_mb:512\nreproduce: ")
    );
}

#[test]
fn the_memory_summary_of_each_run_that_was_done_stands_under_its_name() {
    let mut records = examples::every_ending();
    records.runs[0].stats.num_ooms = 4;
    records.runs[16].stats.num_ooms = 5;
    let text = memory_summaries(&Report::new(&records));
    assert!(text.starts_with(&format!(
        "\noom_retry on simulated with caching, repetition 1, at its end:\n{}",
        records.runs[0].stats.summary()
    )));
    let last = records.runs[16].stats.summary();
    assert!(
        text.ends_with(&format!(
            "\nnvml_ledger on Example GPU with caching, at its end:\n{last}"
        )),
        "{text}"
    );
    assert_eq!(
        text.matches(", at its end:\n|====").count(),
        16,
        "all runs except the skipped one"
    );
    assert!(!text.contains("async_pool"));
}

#[test]
fn colours_add_nothing_but_escape_codes() {
    let records = examples::every_ending();
    let report = Report::new(&records);
    let coloured = render(&report, Detail::Full, Style::Colour, None);
    assert!(coloured.contains("\u{1b}[1m\u{1b}[31m"));
    let mut plain = String::new();
    let mut rest = coloured.as_str();
    while let Some((before, code)) = rest.split_once('\u{1b}') {
        plain.push_str(before);
        rest = code.split_once('m').expect("a code ends with m").1;
    }
    plain.push_str(rest);
    assert_eq!(plain, render(&report, Detail::Full, Style::Plain, None));
}

#[test]
fn a_failing_test_prints_the_steps_the_violations_and_the_command() {
    insta::assert_snapshot!(step_table(&examples::failed("caching", 1)));
}

#[test]
fn a_failing_test_prints_the_last_25_steps_and_says_how_many_it_left_out() {
    let text = step_table(&examples::long_run(40, &[]));
    assert!(
        text.contains("15 steps before these are omitted.\n"),
        "{text}"
    );
    assert_eq!(
        text.lines()
            .filter(|line| line.contains("touch: batch"))
            .count(),
        25
    );
}

#[test]
fn a_run_without_steps_says_so() {
    insta::assert_snapshot!(step_table(&examples::skipped()));
}

#[test]
fn a_brief_report_has_a_table_of_verdicts_and_all_of_each_failure() {
    let mut records = examples::every_ending();
    let brief = render(&Report::new(&records), Detail::Brief, Style::Plain, None);
    let full = render(&Report::new(&records), Detail::Full, Style::Plain, None);
    let failures = |text: &str| {
        text[text.find("\n\nFAILED ").expect("a failure")
            ..text.rfind("\n\n").expect("the last line")]
            .to_owned()
    };
    assert_eq!(failures(&brief), failures(&full));
    assert!(
        !brief.contains(", medians\n") && full.contains(", medians\n"),
        "{brief}"
    );
    let device = records.runs[0].device.name.clone();
    records
        .runs
        .retain(|run| run.verdict == Verdict::Passed && run.device.name == device);
    let passed = records.runs.clone();
    let few = Records {
        runs: passed[..2].to_vec(),
        ..examples::every_ending()
    };
    insta::assert_snapshot!(render(
        &Report::new(&few),
        Detail::Brief,
        Style::Plain,
        None
    ));
    let many = (0..BRIEF_ROWS + 1).map(|index| {
        let mut run = passed[0].clone();
        run.scenario.name = format!("scenario_{index}");
        run
    });
    let many = Records {
        runs: many.collect(),
        ..few
    };
    let text = render(&Report::new(&many), Detail::Brief, Style::Plain, None);
    assert_eq!(
        text.lines().count(),
        3,
        "the device, an empty line and the number of runs: {text}"
    );
}
