use std::path::Path;

use harness_scenario::{ParameterSettings, Scenario};

use super::*;

#[test]
fn catalogue_scenarios_survive_writing_and_reading() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../scenarios");
    let mut count = 0;
    for entry in ["", "failing"]
        .iter()
        .flat_map(|below| std::fs::read_dir(folder.join(below)).expect("the catalogue is there"))
    {
        let path = entry.expect("it can be read").path();
        if path.extension().is_none_or(|ending| ending != "yaml") {
            continue;
        }
        count += 1;
        let source = std::fs::read_to_string(&path).expect("it can be read");
        let document = Document::parse(&source, &path).expect("it is a scenario");
        let Written { text, lines, .. } = Written::of(&document);
        let again = Document::parse(&text, &path).unwrap_or_else(|error| panic!("{error}\n{text}"));
        assert_eq!(again, document, "{text}");
        assert_eq!(lines.len(), document.steps().len());
        for (step, line) in document.steps().iter().zip(&lines) {
            let written = text.lines().nth(*line as usize - 1).expect("a line");
            assert!(
                written
                    .trim_start()
                    .starts_with(&format!("- {}", step.keys[0].0)),
                "{written}"
            );
        }
        let points = |source: &str| {
            Scenario::parse_points(source, &path, &ParameterSettings::new()).expect("it is valid")
        };
        let said = |scenario: &Scenario| {
            (
                scenario.name.clone(),
                scenario.about.trim().to_owned(),
                scenario.needs.clone(),
            )
        };
        assert!(
            points(&source)
                .iter()
                .map(said)
                .eq(points(&text).iter().map(said)),
            "{text}"
        );
    }
    assert!(count > 20, "{count}");
}

#[test]
fn special_yaml_texts_are_quoted() {
    for (text, inside, expected) in [
        ("kv[i]", false, "kv[i]"),
        ("kv[i]", true, "\"kv[i]\""),
        ("a: b", false, "\"a: b\""),
        ("say \"x\"", false, "say \"x\""),
        ("- 5", false, "\"- 5\""),
        ("-5", false, "-5"),
        (">:4", true, "\">:4\""),
        ("", true, "\"\""),
        ("two\nlines", true, "\"two\\nlines\""),
    ] {
        assert_eq!(scalar(text, inside), expected);
    }
}
