//! The project's prose stays easy to read: a test counts constructions that most readers have to
//! read twice.
//!
//! Prose is comments, string literals of at least four words, and markdown outside code blocks. A
//! listed word may be right in one sentence, so the test limits the rate, not each use. Rewrite the
//! sentences it lists: subject first, active voice, one idea. Do not replace one odd word by
//! another.

use std::path::{Path, PathBuf};
use std::{fmt::Write as _, fs};

use regex_lite::Regex;

/// Hard constructions per 1,000 lines of prose. ripgrep has 15, nextest 8.
const MOST_PER_THOUSAND: usize = 20;

/// Folders of data and of build output.
const SKIPPED: [&str; 8] = [
    ".git",
    "target",
    "node_modules",
    "fixtures",
    "snapshots",
    "recordings",
    "golden",
    "kept_report",
];

/// A construction: its name, a pattern, and a plainer form.
const CONSTRUCTIONS: [(&str, &str, &str); 13] = [
    (
        "tell",
        r"(?i)\b(tells?|told|telling)\b",
        "print, report, show, return",
    ),
    (
        "behind",
        r"(?i)\b(behind|beside|in front of)\b",
        "after, next to, before",
    ),
    ("stand", r"(?i)\b(stands?|stood)\b", "is, appears"),
    (
        "nobody",
        r"(?i)\b(nobody|somebody|whoever|whichever)\b",
        "no process, another process, any",
    ),
    (
        "what-clause",
        concat!(
            r"(?i)(^|[.:;,(] ?)what (is|was|it|they|a|an|the|comes?|came|has|had|does|did|takes",
            r"|goes|could|would|cannot|may|must|each|no)\b",
        ),
        "a noun",
    ),
    (
        "fronted clause",
        r"^(Of|Where|Whether|Whichever|How far|How much|Behind|Beside) ",
        "the subject first",
    ),
    (
        "is said",
        r"(?i)\b(is|are|was|were) (said|meant|wanted|asked of|had again)\b",
        "active voice",
    ),
    (
        "there is none",
        r"(?i)\b(there (is|are|was|were) none|is none)\b",
        "no X exists",
    ),
    (
        "give back",
        r"(?i)\b(gives?|gave|given|giving|goes|went|go|going) back\b",
        "release, free, return",
    ),
    (
        "let",
        r"(?i)\b(lets|let|letting) ([a-z]+) ",
        "allow, make, or the verb itself",
    ),
    (
        "so many",
        r"(?i)\b(so many|so much|as far as|as many as|as much as)\b",
        "a number, a limit",
    ),
    (
        "of which",
        concat!(
            r"(?i)\b(of which|in (its|their) turn|in vain|at hand|meanwhile|thereby|whereby",
            r"|the former|the latter)\b",
        ),
        "two sentences",
    ),
    (
        "is to be",
        r"(?i)\b(is|are|was|were) to be\b|\bmade up\b|\bcame (out|of)\b|\bhad (again|once)\b",
        "must, is",
    ),
];

struct Pattern {
    name: &'static str,
    regex: Regex,
    plainer: &'static str,
}

impl Pattern {
    fn matches(&self, text: &str) -> bool {
        // "let us" and "let the user" are fine; the regex crate has no look-ahead.
        self.regex.captures_iter(text).any(|found| {
            self.name != "let"
                || !found
                    .get(2)
                    .is_some_and(|word| matches!(word.as_str(), "us" | "the"))
        })
    }
}

fn words(text: &str) -> usize {
    text.split_whitespace().count()
}

/// The prose of a file with its line numbers.
fn prose(path: &Path) -> Vec<(usize, String)> {
    let Ok(text) = fs::read_to_string(path) else {
        return Vec::new();
    };
    let extension = path
        .extension()
        .and_then(|extension| extension.to_str())
        .unwrap_or_default();
    let script = extension.is_empty() && text.starts_with("#!");
    let literal = Regex::new(r#""((?:[^"\\]|\\.)*)""#).expect("the pattern is valid");
    let hash_comment = Regex::new(r"(?:^|\s)#\s?(.*)").expect("the pattern is valid");
    let (mut found, mut in_code) = (Vec::new(), false);
    for (number, line) in text
        .lines()
        .enumerate()
        .map(|(index, line)| (index + 1, line.trim()))
    {
        match extension {
            "md" if line.starts_with("```") => in_code = !in_code,
            "md" if !in_code && words(line) >= 4 => found.push((
                number,
                line.trim_start_matches(['#', '*', '-', '>', '|', ' '])
                    .to_owned(),
            )),
            "rs" => match line.strip_prefix("//") {
                Some(comment) => {
                    let comment = comment.trim_start_matches(['/', '!']).trim_start();
                    if words(comment) >= 3 {
                        found.push((number, comment.to_owned()));
                    }
                }
                None => found.extend(
                    literal
                        .captures_iter(line)
                        .filter(|text| words(&text[1]) >= 4)
                        .map(|text| (number, text[1].to_owned())),
                ),
            },
            "py" | "sh" | "yaml" | "yml" | "toml" | "" if !extension.is_empty() || script => {
                if let Some(comment) = hash_comment
                    .captures(line)
                    .filter(|comment| words(&comment[1]) >= 3 && !line.starts_with("#!"))
                {
                    found.push((number, comment[1].to_owned()));
                } else if let Some(about) = line.strip_prefix("about:") {
                    found.push((number, about.trim().to_owned()));
                }
            }
            _ => {}
        }
    }
    found
}

fn files(folder: &Path, into: &mut Vec<PathBuf>) {
    let entries = fs::read_dir(folder)
        .expect("the folder is readable")
        .map(|entry| entry.expect("it is readable").path());
    for path in entries {
        let name = path
            .file_name()
            .map(|name| name.to_string_lossy().into_owned())
            .unwrap_or_default();
        if path.is_symlink() || SKIPPED.contains(&name.as_str()) {
            continue;
        }
        if path.is_dir() {
            files(&path, into);
        } else if !path.ends_with("harness/cli/tests/cli/prose.rs") {
            into.push(path);
        }
    }
}

#[test]
fn the_prose_of_the_project_has_few_hard_constructions() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .canonicalize()
        .expect("the project's root exists");
    let patterns = CONSTRUCTIONS.map(|(name, pattern, plainer)| Pattern {
        name,
        regex: Regex::new(pattern).expect("the pattern is valid"),
        plainer,
    });
    let mut all = Vec::new();
    for folder in [".ci", ".github", "ci", "harness", "scenarios"] {
        files(&root.join(folder), &mut all);
    }
    all.extend(["README.md", "Cargo.toml"].map(|file| root.join(file)));
    all.sort();
    let (mut lines, mut hits) = (0, Vec::new());
    for path in &all {
        for (number, text) in prose(path) {
            lines += 1;
            let file = path.strip_prefix(&root).unwrap_or(path).display();
            hits.extend(
                patterns
                    .iter()
                    .filter(|pattern| pattern.matches(&text))
                    .map(|pattern| {
                        let start: String = text.chars().take(120).collect();
                        format!(
                            "{file}:{number}: {} (write: {}): {start}",
                            pattern.name, pattern.plainer
                        )
                    }),
            );
        }
    }
    assert!(lines > 1000, "only {lines} lines of prose were found");
    let rate = 1000 * hits.len() / lines;
    println!("{rate} hard constructions per 1,000 of {lines} lines of prose");
    let list = hits.iter().fold(String::new(), |mut list, hit| {
        let _ = writeln!(list, "{hit}");
        list
    });
    assert!(
        rate <= MOST_PER_THOUSAND,
        "{list}{rate} hard constructions per 1,000 lines of prose; at most {MOST_PER_THOUSAND} are \
         allowed"
    );
}

#[test]
fn each_construction_is_found_in_an_example_and_not_in_plain_english() {
    let examples = [
        "the report tells why",
        "the block behind it",
        "the line stands there",
        "for whoever reads it",
        "what is free goes",
        "Of these two, one is kept",
        "more is wanted",
        "if there is none",
        "memory that goes back",
        "it lets calls fail",
        "after so many calls",
        "each of which fails",
        "it is to be freed",
    ];
    for ((name, pattern, plainer), example) in CONSTRUCTIONS.into_iter().zip(examples) {
        let pattern = Pattern {
            name,
            regex: Regex::new(pattern).expect("the pattern is valid"),
            plainer,
        };
        assert!(pattern.matches(example), "{name}: {example}");
        assert!(
            !pattern.matches("The allocator returns empty segments to the driver."),
            "{name}"
        );
    }
}
