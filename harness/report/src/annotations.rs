//! Annotations of lines of code, for code review: workflow commands of GitHub, GitLab's code
//! quality report, and SARIF.

use harness_allocator::hash::fnv1a;
use serde_json::{Value, json};

use super::github;

/// The rule that the findings of all formats name.
const RULE: &str = "gpu-memory-grew";

/// A line of code with a message. The path is relative to the root of the repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LineNote {
    pub path: String,
    /// From 1.
    pub line: u32,
    pub message: String,
}

/// Renders workflow commands of GitHub, one per line: at most [`github::ANNOTATIONS`]. The last one
/// gives the number of omitted ones.
pub fn github(notes: &[LineNote]) -> Vec<String> {
    let note = |note: &LineNote| github::of_line("warning", &note.path, note.line, &note.message);
    github::limited(
        notes.iter().map(note).collect(),
        "`--code-quality` and `--sarif` write all of them.",
    )
}

/// Renders GitLab's code quality report.
///
/// Source: <https://docs.gitlab.com/ci/testing/code_quality/#code-quality-report-format>.
pub fn code_quality(notes: &[LineNote]) -> Value {
    let issue = |note: &LineNote| {
        // Equal findings of two runs have one fingerprint, also if their figures differ.
        let place = format!("{RULE} {}:{}", note.path, note.line);
        json!({
            "description": note.message,
            "check_name": RULE,
            "fingerprint": format!("{:016x}", fnv1a(place.as_bytes())),
            "severity": "major",
            "location": { "path": note.path, "lines": { "begin": note.line } },
        })
    };
    notes.iter().map(issue).collect()
}

/// Renders SARIF 2.1.0.
///
/// Source: <https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html>.
pub fn sarif(notes: &[LineNote]) -> Value {
    let result = |note: &LineNote| {
        json!({
            "ruleId": RULE,
            "level": "warning",
            "message": { "text": note.message },
            "locations": [{
                "physicalLocation": {
                    "artifactLocation": { "uri": uri(&note.path), "uriBaseId": "%SRCROOT%" },
                    "region": { "startLine": note.line },
                },
            }],
        })
    };
    json!({
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{
            "tool": { "driver": {
                "name": "harness",
                "version": env!("CARGO_PKG_VERSION"),
                "rules": [{
                    "id": RULE,
                    "shortDescription": {
                        "text": "A line allocates more GPU memory than in the baseline.",
                    },
                }],
            } },
            "results": notes.iter().map(result).collect::<Vec<_>>(),
        }],
    })
}

/// A path as a relative reference of RFC 3986.
fn uri(path: &str) -> String {
    let encoded = |byte: u8| {
        let is_plain = byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte);
        if is_plain {
            char::from(byte).to_string()
        } else {
            format!("%{byte:02X}")
        }
    };
    path.bytes().map(encoded).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn notes(count: u32) -> Vec<LineNote> {
        let note = |line| LineNote {
            path: "src/a b.py".to_owned(),
            line,
            message: "5 % more: 2 MiB".to_owned(),
        };
        (1..=count).map(note).collect()
    }

    #[test]
    fn github_gets_the_file_and_the_line_of_at_most_ten_notes() {
        assert_eq!(
            github(&notes(1)),
            ["::warning file=src/a b.py,line=1,title=GPU memory::5 %25 more: 2 MiB"]
        );
        let many = github(&notes(11));
        assert_eq!(many.len(), 10);
        assert!(many[9].starts_with("::notice title=2 more::"));
    }

    #[test]
    fn gitlab_gets_a_fingerprint_per_line_that_figures_do_not_change() {
        let fingerprint = |notes: &[LineNote]| code_quality(notes)[0]["fingerprint"].clone();
        let [first, second] = [1, 2].map(|line| fingerprint(&notes(2)[line - 1..]));
        assert!(first != second);
        let mut other = notes(1);
        other[0].message = "6 % more".to_owned();
        assert_eq!(fingerprint(&other), first);
        let issue = &code_quality(&notes(1))[0];
        assert_eq!(
            issue["location"],
            json!({ "path": "src/a b.py", "lines": { "begin": 1 } })
        );
        assert_eq!(code_quality(&[]), json!([]));
    }

    #[test]
    fn sarif_has_relative_addresses() {
        let document = sarif(&notes(1));
        let place = &document["runs"][0]["results"][0]["locations"][0]["physicalLocation"];
        assert_eq!(place["artifactLocation"]["uri"], "src/a%20b.py");
        assert_eq!(place["region"]["startLine"], 1);
    }
}
