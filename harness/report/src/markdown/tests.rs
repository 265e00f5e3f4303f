#![allow(clippy::unwrap_used)]

use harness_allocator::units::Nanos;
use proptest::prelude::*;
use pulldown_cmark::{Event, HeadingLevel, Options, Parser, Tag, TagEnd};

use super::render;
use crate::{Report, tests::examples};
use harness_record::{Claim, ClaimFigure, ClaimVerdict, Records, Verdict};

#[test]
fn the_settings_of_an_arm_stand_in_its_scenario_and_beside_its_failure() {
    let mut run = examples::failed("tuned", 0);
    run.settings = Some("max_split_size_mb:512,garbage_collection_threshold:0.8".to_owned());
    let text = markdown(&Records {
        runs: vec![run],
        ..examples::every_ending()
    });
    let settings = "`max_split_size_mb:512,garbage_collection_threshold:0.8`";
    for told in [
        format!("Settings in the form of `PYTORCH_ALLOC_CONF`: `tuned`: {settings}.\n"),
        format!("\nSettings: {settings}\n\nReproduce it:"),
        format!("Seed 7. Settings: {settings}."),
    ] {
        assert!(text.contains(&told), "{told}\n{text}");
    }
}

fn markdown(records: &Records) -> String {
    render(&Report::new(records)).text
}

/// What a GitHub reader sees: for each table its heading cells and its rows.
fn tables(markdown: &str) -> Vec<Vec<Vec<String>>> {
    let (mut tables, mut in_cell) = (Vec::new(), false);
    for event in Parser::new_ext(markdown, Options::ENABLE_TABLES) {
        match event {
            Event::Start(Tag::Table(_)) => tables.push(Vec::new()),
            Event::Start(Tag::TableHead | Tag::TableRow) => {
                tables.last_mut().unwrap().push(Vec::new())
            }
            Event::Start(Tag::TableCell) => {
                in_cell = true;
                tables
                    .last_mut()
                    .unwrap()
                    .last_mut()
                    .unwrap()
                    .push(String::new());
            }
            Event::End(TagEnd::TableCell) => in_cell = false,
            Event::Text(text) | Event::Code(text) if in_cell => {
                tables
                    .last_mut()
                    .unwrap()
                    .last_mut()
                    .unwrap()
                    .last_mut()
                    .unwrap()
                    .push_str(&text);
            }
            _ => {}
        }
    }
    tables
}

#[test]
fn a_simulated_retry_beside_direct_reads_well() {
    let records = Records {
        runs: vec![
            examples::oom_retry("caching", 0),
            examples::oom_retry("direct", 0),
            examples::skipped(),
        ],
        ..examples::every_ending()
    };
    insta::assert_snapshot!(markdown(&records));
}

#[test]
fn a_report_with_every_kind_of_end_reads_well() {
    insta::assert_snapshot!(markdown(&examples::every_ending()));
}

#[test]
fn a_failing_run_answers_why_memory_ran_out_though_some_was_free() {
    let mut run = examples::fragmented();
    let text = markdown(&Records {
        runs: vec![run.clone()],
        ..examples::every_ending()
    });
    insta::assert_snapshot!(text);
    let places = [
        "```text\nscenarios/fits_in_pieces.yaml:10:5: expectation\n  expected: 64 MiB to fit\n  \
         seen:     out of memory: 64 MiB requested",
        "**Why free memory did not help:** Enough memory is free in total, but no free block is \
         large enough: 224 MiB",
        "```sh\nharness run scenarios/fits_in_pieces.yaml --allocator caching --seed 7\n```",
        "| – – in segments with live blocks (inactive split) | 224 MiB |",
        "2 of 2 segments are pinned",
        "\nStep 2: What pins each segment",
        "| step | line |",
        "## `fits_in_pieces`\n",
    ]
    .map(|part| {
        text.find(part)
            .unwrap_or_else(|| panic!("{part:?} is not in\n{text}"))
    });
    assert!(places.is_sorted(), "{places:?}\n{text}");
    assert_eq!(
        text.matches("What pins each segment").count(),
        1,
        "told once, not folded"
    );

    // What the step gave back after its request had failed hides nothing.
    run.steps.last_mut().unwrap().accounts.allocated = harness_allocator::units::Bytes::ZERO;
    let text = markdown(&Records {
        runs: vec![run],
        ..examples::every_ending()
    });
    assert!(
        text.contains("Memory by owner when the request failed in step 3:"),
        "{text}"
    );
    assert!(text.contains("| – allocated | 800 MiB |"), "{text}");
}

#[test]
fn what_holds_for_every_scenario_is_said_once() {
    let mut records = examples::every_ending();
    records
        .runs
        .iter_mut()
        .filter(|run| run.scenario.name == "storm")
        .for_each(|run| run.device.name = "another".to_owned());
    let text = markdown(&records);
    for once in [
        "made up for tests",
        "The model charges device calls only",
        "fewer than 100 samples",
        "from the cost model example 1",
    ] {
        let expected = if once == "made up for tests" { 2 } else { 1 };
        assert_eq!(
            text.matches(once).count(),
            expected,
            "{once}: the cost table has two rows, everything else stands alone"
        );
    }
}

#[test]
fn every_kind_of_verdict_is_told() {
    let text = markdown(&examples::every_ending());
    for expected in [
        "**2 of 17 runs failed: 12 passed, 2 failed, 1 skipped, 1 contended, 1 interrupted.**",
        "[**FAILED ×2**, line 9](#failure-cross_stream_reuse-caching)",
        "[passed ×3](#arm-",
        "[interrupted](#arm-training-caching)",
        "Skipped: `oom_retry` with `async_pool` on simulated: the device has no stream-ordered \
         driver pool",
        "- repetition 2 (seed 8): scenarios/cross_stream_reuse.yaml:9:5",
    ] {
        assert!(text.contains(expected), "{expected:?} is not in\n{text}");
    }
}

#[test]
fn a_report_of_nothing_says_so() {
    let records = Records {
        runs: Vec::new(),
        ..examples::every_ending()
    };
    assert_eq!(
        markdown(&records),
        "# Out-of-memory report\n\n**Nothing was run.**\n"
    );
}

#[test]
fn measured_and_model_times_never_share_a_table() {
    let mut records = examples::every_ending();
    // Each clock gets a time of its own that is looked for in the tables.
    for run in &mut records.runs {
        let is_measured = run.device.name == "Example GPU";
        run.timings.scenario = Nanos(if is_measured { 111_000 } else { 222_000 });
    }
    let text = markdown(&records);
    let timing: Vec<String> = tables(&text)
        .into_iter()
        .filter(|table| table[0][0] == "allocator")
        .map(|table| format!("{table:?}"))
        .collect();
    let (measured, model): (Vec<_>, Vec<_>) =
        timing.iter().partition(|table| table.contains("111 µs"));
    assert_eq!((measured.len(), model.len()), (1, 3));
    assert!(
        measured.iter().all(|table| !table.contains("222 µs"))
            && model.iter().all(|table| table.contains("222 µs"))
    );
    let heads = text.lines().filter(|line| {
        line.starts_with("**Measured times** on Example GPU") || line.starts_with("**Model times")
    });
    assert_eq!(heads.count(), 4);
}

#[test]
fn measured_runs_alone_carry_no_warning_about_model_times() {
    let records = Records {
        runs: vec![examples::measured("caching", 0)],
        ..examples::every_ending()
    };
    let text = markdown(&records).to_lowercase();
    assert!(
        !text.contains("model time")
            && !text.contains("cost model")
            && !text.contains("the model charges"),
        "{text}"
    );
}

#[test]
fn no_figure_is_infinite_or_not_a_number() {
    let mut records = examples::every_ending();
    for run in &mut records.runs {
        run.timings.scenario = Nanos::ZERO;
        run.timings
            .allocate
            .kept
            .iter_mut()
            .for_each(|time| *time = Nanos::ZERO);
    }
    let rendered = render(&Report::new(&records));
    let svgs = rendered.pictures.iter().map(|picture| &picture.1);
    for text in svgs.chain([&rendered.text]) {
        let words = text.split(|c: char| !c.is_alphanumeric());
        assert_eq!(
            words
                .filter(|word| ["NaN", "inf", "infinity"].contains(word))
                .count(),
            0
        );
    }
}

#[test]
fn rendering_twice_gives_equal_bytes() {
    let records = examples::every_ending();
    assert_eq!(
        render(&Report::new(&records)),
        render(&Report::new(&records.clone()))
    );
}

#[test]
fn every_link_leads_somewhere_and_every_picture_is_shown_once() {
    let records = examples::every_ending();
    let rendered = render(&Report::new(&records));
    for event in Parser::new_ext(&rendered.text, Options::ENABLE_TABLES) {
        match event {
            Event::Start(Tag::Link { dest_url, .. }) => {
                let target = dest_url.strip_prefix('#').expect("links stay in the page");
                assert_eq!(
                    rendered
                        .text
                        .matches(&format!("<a id=\"{target}\"></a>"))
                        .count(),
                    1,
                    "{target}"
                );
            }
            Event::Start(Tag::Image { dest_url, .. }) => {
                assert_eq!(
                    rendered
                        .pictures
                        .iter()
                        .filter(|picture| picture.0 == *dest_url)
                        .count(),
                    1,
                    "{dest_url}"
                );
            }
            _ => {}
        }
    }
    let names: Vec<&str> = rendered
        .pictures
        .iter()
        .map(|picture| picture.0.as_str())
        .collect();
    assert_eq!(
        names,
        [
            "oom_retry-simulated.svg",
            "oom_retry-example-gpu.svg",
            "storm-simulated.svg",
            "cross_stream_reuse-simulated.svg",
            "training-simulated.svg",
            "nvml_ledger-example-gpu.svg",
        ]
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn no_text_from_outside_breaks_a_table_or_a_heading(text in "[a-z`|\\\\_*<>#&\n\\[\\]~ \
         µ-]{0,24}") {
        let mut records = examples::every_ending();
        for run in &mut records.runs {
            run.device.name.clone_from(&text);
            run.reproduce.clone_from(&text);
            run.scenario.about.clone_from(&text);
            for step in &mut run.steps {
                step.text.clone_from(&text);
                step.notes.push(text.clone());
            }
            if let Verdict::Failed { first, .. } = &mut run.verdict {
                first.seen.clone_from(&text);
            }
        }
        let shape = |records: &Records| {
            let text = markdown(records);
            let headings = Parser::new_ext(&text, Options::ENABLE_TABLES)
                .filter(|event| {
                    matches!(
                        event,
                        Event::Start(Tag::Heading {
                            level: HeadingLevel::H1 | HeadingLevel::H2,
                            ..
                        })
                    )
                })
                .count();
            let tables: Vec<(usize, Vec<usize>)> = tables(&text)
                .iter()
                .map(|table| (table.len(), table.iter().map(Vec::len).collect()))
                .collect();
            (headings, tables, text)
        };
        let (headings, tables_, rendered) = shape(&records);
        let (plain_headings, plain_tables, _) = shape(&examples::every_ending());
        prop_assert_eq!(headings, plain_headings);
        prop_assert_eq!(tables_.len(), plain_tables.len());
        prop_assert!(
            tables_.iter().all(|(_, widths)| widths.iter().all(|width| *width == widths[0]))
        );
        let words = format!(": {}", text.trim());
        let steps = tables(&rendered)
            .into_iter()
            .filter(|table| table[0][0] == "step")
            .flat_map(|table| table.into_iter().skip(1));
        for row in steps.filter(|row| !text.is_empty() && row[0] != "…") {
            // The reader sees the text itself, but for the backticks that mark code and line
            // breaks.
            let squeeze = |text: &str| {
                text.chars().filter(|c| *c != '`' && !c.is_whitespace()).collect::<String>()
            };
            prop_assert!(
                squeeze(&row[2]).ends_with(&squeeze(&words)),
                "{:?} became {:?}",
                words,
                row[2]
            );
        }
    }
}

fn with_a_claim(mut run: harness_record::RunRecord, verdict: ClaimVerdict) -> Records {
    run.scenario.claim = Some(Claim {
        says: "After `del x`, 400 MB stay | reserved.".to_owned(),
        source: Some("https://example.org/memory".to_owned()),
        verdict,
        because: (verdict != ClaimVerdict::Holds).then(|| "They go back to the driver.".to_owned()),
    });
    let figure = |name: &str, pytorch: Option<&str>, harness: Option<&str>| ClaimFigure {
        name: name.to_owned(),
        pytorch: pytorch.map(str::to_owned),
        harness: harness.map(str::to_owned),
    };
    run.figures = vec![
        figure("reserved", Some("382 MiB"), Some("382 MiB")),
        figure("retries", None, Some("0")),
    ];
    Records {
        runs: vec![run],
        ..examples::every_ending()
    }
}

#[test]
fn claims_are_one_table_with_verdict_and_figures() {
    let text = markdown(&with_a_claim(
        examples::oom_retry("caching", 0),
        ClaimVerdict::DoesNotHold,
    ));
    let table = tables(&text)
        .into_iter()
        .find(|table| table[0][0] == "claim")
        .unwrap();
    assert_eq!(
        table[0],
        ["claim", "verdict", "figure", "PyTorch", "harness"]
    );
    assert_eq!(
        table[1],
        [
            "After del x, 400 MB stay | reserved. (source)",
            "does not hold: They go back to the driver.",
            "reserved",
            "382 MiB",
            "382 MiB"
        ]
    );
    assert_eq!(table[2], ["", "", "retries", "–", "0"]);
    assert!(!markdown(&examples::every_ending()).contains("## Claims"));
}

#[test]
fn the_verdict_of_a_claim_whose_scenario_fails_is_not_shown_as_true() {
    let text = markdown(&with_a_claim(
        examples::failed("caching", 0),
        ClaimVerdict::Holds,
    ));
    let table = tables(&text)
        .into_iter()
        .find(|table| table[0][0] == "claim")
        .unwrap();
    assert_eq!(table[1][1], "unproven: holds; its scenario fails");
}
