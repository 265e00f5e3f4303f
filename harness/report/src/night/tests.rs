#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};

use super::*;
use harness_bench::record::{ChangeVerdict, EntryOutcome, Quantity};

fn report(night: &NightRecord, earlier: &[NightRecord]) -> String {
    render(night, earlier).pop().unwrap().1
}

/// Folders as the store names them, with the nights of two machines and one from before a driver was changed.
fn everything() -> Vec<(String, NightRecord)> {
    let mut nights: Vec<NightRecord> = examples::before();
    nights[0].machine.driver = Some("0.9".to_owned());
    nights.extend([examples::eventful(), examples::model()]);
    nights
        .into_iter()
        .map(|night| (format!("nightly/{}-{}", words::date(&night.started), harness_base::files::slug(&night.machine.device)), night))
        .collect()
}

/// What a GitHub reader sees: for each table its rows of cells, the first of which are its heads.
fn tables(markdown: &str) -> Vec<Vec<Vec<String>>> {
    let (mut tables, mut in_cell) = (Vec::<Vec<Vec<String>>>::new(), false);
    for event in Parser::new_ext(markdown, Options::ENABLE_TABLES) {
        match event {
            Event::Start(Tag::Table(_)) => tables.push(Vec::new()),
            Event::Start(Tag::TableHead | Tag::TableRow) => tables.last_mut().unwrap().push(Vec::new()),
            Event::Start(Tag::TableCell) => {
                in_cell = true;
                tables.last_mut().unwrap().last_mut().unwrap().push(String::new());
            }
            Event::End(TagEnd::TableCell) => in_cell = false,
            Event::Text(text) | Event::Code(text) if in_cell => {
                tables.last_mut().unwrap().last_mut().unwrap().last_mut().unwrap().push_str(&text)
            }
            _ => {}
        }
    }
    tables
}

/// Targets of links and pictures.
fn targets(markdown: &str) -> Vec<String> {
    let events = Parser::new_ext(markdown, Options::ENABLE_TABLES);
    events
        .filter_map(|event| match event {
            Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => Some(dest_url.to_string()),
            _ => None,
        })
        .collect()
}

/// Every link of the last file leads to a file beside it, to a place in it, or to one of `elsewhere`.
fn assert_links_resolve(files: &[(String, String)], elsewhere: &[String]) {
    let names: BTreeSet<&str> = files.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names.len(), files.len(), "each file has a name of its own");
    let (_, markdown) = files.last().unwrap();
    for target in targets(markdown) {
        let found = match target.strip_prefix('#') {
            Some(anchor) => markdown.contains(&format!("<a id=\"{anchor}\"></a>")),
            None => names.contains(target.as_str()) || elsewhere.contains(&target),
        };
        assert!(found, "nothing is at {target}");
    }
    for name in names.iter().filter(|name| name.ends_with(".svg")) {
        assert!(targets(markdown).iter().any(|target| target == name), "nobody links to {name}");
    }
}

/// Elements are closed in order, and nothing but them has angle brackets.
fn assert_is_well_formed(svg: &str) {
    let mut open = Vec::new();
    let mut rest = svg;
    while let Some((text, after)) = rest.split_once('<') {
        assert!(!text.contains('>'), "a bracket in {text:?}");
        for reference in text.split('&').skip(1) {
            assert!(["amp;", "lt;", "gt;", "quot;", "apos;"].iter().any(|known| reference.starts_with(known)), "&{reference}");
        }
        let (tag, after) = after.split_once('>').unwrap();
        match tag.strip_prefix('/') {
            Some(name) => assert_eq!(open.pop(), Some(name.to_owned())),
            None if tag.ends_with('/') || tag.starts_with('?') => {}
            None => open.push(tag.split(' ').next().unwrap().to_owned()),
        }
        rest = after;
    }
    assert!(open.is_empty() && svg.starts_with("<svg") && svg.contains("role=\"img\">\n<title>") && svg.contains("fill=\"#FFFFFF\""));
}

#[test]
fn a_night_with_everything_that_can_happen_reads_well() {
    insta::assert_snapshot!(report(&examples::eventful(), &examples::before()));
}

#[test]
fn a_first_night_on_the_simulated_device_reads_well() {
    insta::assert_snapshot!(report(&examples::model(), &[]));
}

#[test]
fn the_index_of_all_nights_reads_well() {
    insta::assert_snapshot!(index(&everything()).pop().unwrap().1);
}

#[test]
fn an_index_without_nights_says_so() {
    let files = index(&[]);
    assert!(files.len() == 1 && files[0].1.contains("There is no night yet"), "{files:?}");
}

#[test]
fn the_same_records_give_the_same_bytes() {
    let (night, before) = (examples::eventful(), examples::before());
    let again: NightRecord = serde_json::from_str(&serde_json::to_string(&night).unwrap()).unwrap();
    assert_eq!(render(&night, &before), render(&again, &before));
    let mut shuffled = everything();
    shuffled.reverse();
    assert_eq!(index(&everything()), index(&shuffled), "whatever order the folders are found in");
}

#[test]
fn the_first_screen_is_short_whatever_happened() {
    let mut night = examples::eventful();
    night.conditions.contended = (0..50).map(|number| format!("reason {number}")).collect();
    for index in 0..50 {
        let mut entry = night.suites[0].entries[0].clone();
        entry.outcome = EntryOutcome::Skipped { reason: format!("reason {index} {}", "long ".repeat(100)) };
        night.suites[0].entries.push(entry);
    }
    // Three kinds of figures among the most important, each with a table of its own.
    let changes = &mut night.comparison.as_mut().unwrap().changes;
    for (index, quantity) in [Quantity::HostTime, Quantity::ModelTime, Quantity::Memory].into_iter().enumerate() {
        let change = &mut changes[index];
        (change.entry.quantity, change.verdict) = (quantity, ChangeVerdict::Broken);
    }
    let text = report(&night, &examples::before());
    let first_screen = text.split("<details>").next().unwrap();
    assert!(first_screen.lines().count() <= 40, "{first_screen}");
}

#[test]
fn the_first_screen_tells_verdict_changes_contention_and_skips() {
    let text = report(&examples::eventful(), &examples::before());
    let first_screen = text.split("<details>").next().unwrap();
    for expected in [
        "**8 entries became slower, 1 faster, of 35 compared with the night of 2026-11-19 02:17 UTC (commit `19c0ffee19`); 1 newly BROKEN.**",
        "> **Contended:** 2 other processes on the GPU; clocks held down by sw_power_cap.",
        "(and 7 other points alike)",
        "- Skipped 2: the device cannot capture graphs\n",
        "defined anew, and so not compared: `storm`",
    ] {
        assert!(first_screen.contains(expected), "{expected:?} is not in\n{first_screen}");
    }
}

#[test]
fn verdicts_are_counted_in_words() {
    let mut night = examples::eventful();
    night.suites[0].entries.retain(|entry| matches!(entry.outcome, EntryOutcome::Measured(_)));
    let changes = &mut night.comparison.as_mut().unwrap().changes;
    changes.retain(|change| change.figures.is_some());
    changes.iter_mut().for_each(|change| change.verdict = ChangeVerdict::Same);
    let told = important::verdict(&night);
    assert!(told.starts_with("No entry became slower or faster, of 34 compared with") && told.ends_with("; nothing broken."), "{told}");
    night.comparison.as_mut().unwrap().changes[0].verdict = ChangeVerdict::Better;
    assert!(important::verdict(&night).starts_with("1 entry became faster, none slower, of 34"));
    night.comparison.as_mut().unwrap().changes[0].entry.quantity = Quantity::Memory;
    assert!(important::verdict(&night).starts_with("1 entry became better, none worse, of 34"));
    night.suites.clear();
    assert_eq!(important::verdict(&night), "Nothing was measured.");
}

#[test]
fn model_times_and_measured_times_never_share_a_table() {
    let mut night = examples::eventful();
    let mut model = examples::model();
    // One suite with all quantities, and changes of all of them.
    night.suites[0].entries.append(&mut model.suites[0].entries);
    let mut changes = night.comparison.clone().unwrap().changes;
    changes.truncate(2);
    changes[1].entry.quantity = Quantity::ModelTime;
    changes.iter_mut().for_each(|change| change.verdict = ChangeVerdict::Worse);
    night.comparison.as_mut().unwrap().changes = changes;
    let text = report(&night, &[]);
    let with_case = |table: &&Vec<Vec<String>>| table[0].iter().any(|head| head == "case");
    let all = tables(&text);
    assert_eq!(all.iter().filter(with_case).count(), 2 + 4, "two of changes, four of figures");
    for table in all.iter().filter(with_case) {
        let has = |case: &str| table.iter().any(|row| row.iter().any(|cell| cell.starts_with(case)));
        assert!(!has("allocate, ") || !has("free") && !has("reserved"), "{table:?}");
    }
    assert!(text.contains("### Model times (simulated clock), not measured"));
}

#[test]
fn all_links_resolve_and_every_picture_is_shown() {
    assert_links_resolve(&render(&examples::eventful(), &examples::before()), &[]);
    assert_links_resolve(&render(&examples::model(), &[]), &[]);
    let nights = everything();
    let mut elsewhere: Vec<String> = nights.iter().map(|(folder, _)| format!("{folder}/{REPORT}")).collect();
    elsewhere.push("example/report.md".to_owned());
    assert_links_resolve(&index(&nights), &elsewhere);
}

#[test]
fn a_suite_done_in_parts_has_places_and_pictures_of_its_own() {
    let mut night = examples::eventful();
    night.suites.push(examples::quiet(20, 1.0).suites.remove(0));
    assert_links_resolve(&render(&night, &examples::before()), &[]);
}

#[test]
fn pictures_are_well_formed_whatever_the_names() {
    let mut nights = everything();
    for (folder, night) in &mut nights {
        folder.push_str(" (a b)");
        night.machine.device = "a<b> & \"c\" | `d`\n".to_owned();
        for suite in &mut night.suites {
            suite.name = "s<u>i|te & `x`".to_owned();
            suite.entries.iter_mut().for_each(|entry| entry.arm = format!("<{}>&|", entry.arm));
        }
    }
    let last = nights[19].1.clone();
    let earlier: Vec<NightRecord> = nights[1..19].iter().map(|(_, night)| night.clone()).collect();
    let files: Vec<(String, String)> = render(&last, &earlier).into_iter().chain(index(&nights)).collect();
    let pictures: Vec<&String> = files.iter().filter(|(name, _)| name.ends_with(".svg")).map(|(_, svg)| svg).collect();
    assert!(pictures.len() >= 5, "{}", pictures.len());
    pictures.into_iter().for_each(|svg| assert_is_well_formed(svg));
    for (name, text) in files.iter().filter(|(name, _)| name.ends_with(".md")) {
        assert!(tables(text).iter().all(|table| table.iter().all(|row| row.len() == table[0].len())), "{name}");
    }
    // The arm is cut out of no table, and stands there as it is.
    assert!(
        tables(&files[files.iter().position(|(name, _)| name == REPORT).unwrap()].1)
            .iter()
            .flatten()
            .flatten()
            .any(|cell| cell == "<caching>&|")
    );
}

#[test]
fn a_picture_of_nights_marks_contended_and_failed_ones() {
    let files = render(&examples::eventful(), &examples::before());
    let (_, trend) = files.iter().find(|(name, _)| name == "host_path-trend.svg").unwrap();
    assert!(trend.contains("It failed in 1 of the nights."), "{trend}");
    assert!(trend.contains("over 20 nights, to 2026-11-20"));
}

#[test]
fn a_suite_that_was_defined_anew_starts_a_new_trend() {
    let mut before = examples::before();
    before[10].suites[0].hash = "other".to_owned();
    let files = render(&examples::eventful(), &before);
    let (_, trend) = files.iter().find(|(name, _)| name == "host_path-trend.svg").unwrap();
    assert!(trend.contains("over 9 nights, to 2026-11-20"), "{trend}");
}

#[test]
fn a_clock_that_ran_slower_moves_no_trend() {
    let slower = |night: &NightRecord| {
        let mut night = night.clone();
        let suite = &mut night.suites[0];
        suite.yardstick_ps.iter_mut().for_each(|picoseconds| *picoseconds *= 2);
        for entry in suite.entries.iter_mut().filter(|entry| entry.quantity == Quantity::HostTime) {
            if let EntryOutcome::Measured(measured) = &mut entry.outcome {
                let summary = &mut measured.summary;
                [&mut summary.median, &mut summary.low, &mut summary.high].into_iter().for_each(|value| *value *= 2);
            }
        }
        night
    };
    let (first, last) = (examples::quiet(1, 1.0), examples::quiet(1, 1.0));
    let trend = series::Trend::new("host_path", &[&slower(&first), &last]).index(Quantity::HostTime);
    assert!((trend[1] - 1.0).abs() < 1e-3, "{trend:?}");
    let trend = series::Trend::new("host_path", &[&first, &examples::quiet(1, 1.47)]).index(Quantity::HostTime);
    assert!(trend[1] > 1.1, "{trend:?}");
}

#[test]
fn a_year_of_nights_is_rendered_in_a_second() {
    let years = examples::years(365, 200);
    let (last, earlier) = years.split_last().unwrap();
    let nights: Vec<(String, NightRecord)> =
        years.iter().enumerate().map(|(number, night)| (format!("nightly/{number}"), night.clone())).collect();
    let start = Instant::now();
    let files = render(last, earlier).len() + index(&nights).len();
    // A release build takes a fraction of it; this one is slower, and the machine may be busy.
    let bound = if cfg!(debug_assertions) { Duration::from_secs(6) } else { Duration::from_secs(1) };
    let took = start.elapsed();
    assert!(files > 10 && took < bound, "{files} files took {took:?}");
}

#[test]
fn a_summary_stays_below_its_limit_and_says_where_the_rest_is() {
    let night = examples::years(1, 20_000).remove(0);
    let whole = summary(&night, usize::MAX);
    assert!(whole.len() > 2 << 20 && !whole.contains(".svg"), "{} bytes", whole.len());
    let cut = summary(&night, crate::github::SUMMARY_LIMIT);
    assert!(cut.len() <= crate::github::SUMMARY_LIMIT && cut.len() > 1_000_000, "{} bytes", cut.len());
    assert!(cut.ends_with("**Cut here**, because GitHub takes no more: the whole report is `report.md` in the folder of this run.\n"));
    assert_links_resolve(&[("summary.md".to_owned(), summary(&examples::eventful(), usize::MAX))], &[]);
}

#[test]
fn annotations_tell_the_worst_first() {
    insta::assert_snapshot!(annotations(&examples::eventful()).join("\n"));
    assert_eq!(annotations(&examples::quiet(3, 1.0)), Vec::<String>::new());
}

#[test]
fn figures_for_github_action_benchmark_have_names_units_and_ranges() {
    insta::assert_snapshot!(smaller_is_better(&examples::model()));
    let figures: Vec<serde_json::Value> = serde_json::from_str(&smaller_is_better(&examples::eventful())).unwrap();
    assert_eq!(figures.len(), 34, "one for each entry with figures");
    let names: BTreeSet<&str> = figures.iter().map(|figure| figure["name"].as_str().unwrap()).collect();
    assert_eq!(names.len(), figures.len(), "each has a name of its own");
    assert!(figures.iter().all(|figure| figure["unit"] == "ns" && figure["value"].as_f64().unwrap() > 0.0));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn any_figures_and_names_are_rendered(name in "\\PC{0,20}", values in prop::collection::vec(any::<u64>(), 1..20)) {
        let mut night = examples::quiet(1, 1.0);
        let mut values = values.into_iter().cycle();
        for entry in &mut night.suites[0].entries {
            entry.group.push_str(&name);
            if let EntryOutcome::Measured(measured) = &mut entry.outcome {
                let mut samples: Vec<u64> = values.by_ref().take(5).collect();
                samples.sort_unstable();
                measured.rounds = vec![samples.clone()];
                let summary = &mut measured.summary;
                (summary.min, summary.low, summary.median, summary.high, summary.max) = (samples[0], samples[1], samples[2], samples[3], samples[4]);
                summary.p99 = None;
            }
        }
        let files = render(&night, &[examples::quiet(2, 1.0)]);
        files.iter().filter(|(name, _)| name.ends_with(".svg")).for_each(|(_, svg)| assert_is_well_formed(svg));
    }
}
