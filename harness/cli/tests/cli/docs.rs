//! The documentation is current: command output and files that it quotes, links, and the length of
//! the README.
//!
//! `UPDATE=1 cargo test -p harness --test cli docs::` rewrites the quotations. A page quotes with a
//! comment above a code block, and `<!-- end -->` below it:
//!
//! * `<!-- output: COMMAND -->` quotes what `harness COMMAND` prints; `| from: TEXT` and `| until:
//!   TEXT` select lines by how they begin;
//! * `<!-- file: PATH -->` quotes a file of the project.

use std::path::{Path, PathBuf};
use std::{collections::BTreeSet, env, fs, process::Command};

use harness_scenario::{StepKind, example};
use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};

const END: &str = "<!-- end -->";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .canonicalize()
        .expect("the project's root exists")
}

/// The hand-written pages and the generated references, without generated reports.
fn pages() -> Vec<PathBuf> {
    let root = root();
    let mut pages = [
        "README.md",
        "harness/ARCHITECTURE.md",
        "ci/README.md",
        "scenarios/README.md",
    ]
    .map(|page| root.join(page))
    .to_vec();
    for folder in ["harness/book/src", "scenarios/bench", "scenarios/devices"] {
        let entries = fs::read_dir(root.join(folder))
            .expect("the folder exists")
            .map(|entry| entry.expect("it is readable").path());
        pages.extend(
            entries.filter(|path| path.extension().is_some_and(|extension| extension == "md")),
        );
    }
    pages.sort();
    pages
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The code block for one quotation, from the text of its comment.
fn quoted(comment: &str) -> Option<String> {
    if let Some(file) = comment.strip_prefix("file: ") {
        let language = if file.ends_with(".py") { "python" } else { "" };
        return Some(format!(
            "```{language}\n{}\n```\n",
            read(&root().join(file)).trim_end()
        ));
    }
    let mut parts = comment.strip_prefix("output: harness ")?.split(" | ");
    let command = parts.next().expect("split yields at least one part");
    let (mut from, mut until) = (None, None);
    for part in parts {
        match part.split_once(": ") {
            Some(("from", text)) => from = Some(text),
            Some(("until", text)) => until = Some(text),
            _ => panic!("`{part}` in `{comment}` is neither `from: TEXT` nor `until: TEXT`"),
        }
    }
    let output = Command::new(env!("CARGO_BIN_EXE_harness"))
        .args(command.split(' '))
        .current_dir(root())
        .env("HARNESS_DEVICE", "sim")
        .env("NO_COLOR", "1")
        .output()
        .expect("harness starts");
    let text = String::from_utf8(output.stdout).expect("the output is UTF-8");
    for mark in [from, until].into_iter().flatten() {
        assert!(
            text.lines().any(|line| line.starts_with(mark)),
            "`harness {command}` prints no line that begins with `{mark}`:\n{text}"
        );
    }
    let lines = text
        .lines()
        .map(str::trim_end)
        .skip_while(|line| from.is_some_and(|from| !line.starts_with(from)));
    let lines: Vec<&str> = lines
        .take_while(|line| until.is_none_or(|until| !line.starts_with(until)))
        .collect();
    Some(format!("```text\n{}\n```\n", lines.join("\n").trim_end()))
}

/// The page with every quotation renewed.
fn renewed(page: &str) -> String {
    let mut renewed = String::new();
    let mut lines = page.lines();
    while let Some(line) = lines.next() {
        renewed += line;
        renewed.push('\n');
        let block = line
            .strip_prefix("<!-- ")
            .and_then(|line| line.strip_suffix(" -->"))
            .and_then(quoted);
        if let Some(block) = block {
            renewed += &block;
            assert!(
                lines.by_ref().any(|line| line == END),
                "no `{END}` below `{line}`"
            );
            renewed += END;
            renewed.push('\n');
        }
    }
    renewed
}

#[test]
fn quoted_output_and_files_are_current() {
    for path in pages() {
        let page = read(&path);
        let renewed = renewed(&page);
        if std::env::var_os("UPDATE").is_some() {
            fs::write(&path, renewed).expect("the page is writable");
        } else {
            assert_current(&path, &page, &renewed);
        }
    }
}

fn assert_current(path: &Path, page: &str, renewed: &str) {
    let different = page
        .lines()
        .zip(renewed.lines())
        .find(|(old, new)| old != new);
    assert!(
        page == renewed,
        "{}: a quotation is out of date, first at {different:?}; run with UPDATE=1",
        path.display()
    );
}

/// A heading's anchor, by GitHub's rules.
fn slug(heading: &str) -> String {
    let kept = heading.trim().to_lowercase();
    kept.chars()
        .filter(|&c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'))
        .map(|c| if c == ' ' { '-' } else { c })
        .collect()
}

/// The link targets and the anchors of a page.
fn links_and_anchors(page: &str) -> (Vec<String>, BTreeSet<String>) {
    let (mut links, mut anchors, mut heading) = (Vec::new(), BTreeSet::new(), None);
    for event in Parser::new_ext(page, Options::ENABLE_TABLES) {
        match event {
            Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
                links.push(dest_url.to_string())
            }
            Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
            Event::End(TagEnd::Heading(_)) => {
                let base = slug(&heading.take().unwrap_or_default());
                let numbered = (1..).map(|n| format!("{base}-{n}"));
                let anchor = std::iter::once(base.clone())
                    .chain(numbered)
                    .find(|anchor| !anchors.contains(anchor));
                anchors.extend(anchor);
            }
            Event::Text(text) | Event::Code(text) => {
                if let Some(heading) = &mut heading {
                    heading.push_str(&text);
                }
            }
            Event::Html(html) | Event::InlineHtml(html) => {
                anchors.extend(
                    html.split("id=\"")
                        .skip(1)
                        .filter_map(|rest| Some(rest.split_once('"')?.0.to_owned())),
                );
            }
            _ => {}
        }
    }
    (links, anchors)
}

#[test]
fn every_link_between_pages_has_its_target() {
    let mut broken = Vec::new();
    for path in pages() {
        for link in links_and_anchors(&read(&path)).0 {
            if link.contains("://") {
                continue;
            }
            let (file, anchor) = link.split_once('#').unwrap_or((&link, ""));
            let target = if file.is_empty() {
                path.clone()
            } else {
                path.parent().expect("a page is in a folder").join(file)
            };
            let is_page = target
                .extension()
                .is_some_and(|extension| extension == "md");
            let found = target.exists()
                && (anchor.is_empty()
                    || !is_page
                    || links_and_anchors(&read(&target)).1.contains(anchor));
            if !found {
                broken.push(format!(
                    "{}: {link}",
                    path.strip_prefix(root()).unwrap_or(&path).display()
                ));
            }
        }
    }
    assert!(
        broken.is_empty(),
        "links without a target:\n{}",
        broken.join("\n")
    );
}

#[test]
fn the_summary_of_the_book_lists_every_chapter() {
    let folder = root().join("harness/book/src");
    let (links, _) = links_and_anchors(&read(&folder.join("SUMMARY.md")));
    let listed: BTreeSet<String> = links.into_iter().chain(["SUMMARY.md".to_owned()]).collect();
    let chapters: BTreeSet<String> = fs::read_dir(folder)
        .expect("the folder exists")
        .map(|entry| {
            entry
                .expect("it is readable")
                .file_name()
                .to_string_lossy()
                .into_owned()
        })
        .filter(|name| name.ends_with(".md"))
        .collect();
    assert_eq!(listed, chapters);
}

#[test]
fn the_readme_fits_on_two_hundred_lines_and_has_a_picture_at_the_top() {
    let readme = read(&root().join("README.md"));
    let (lines, words) = (readme.lines().count(), readme.split_whitespace().count());
    assert!(
        lines <= 200 && words <= 1500,
        "{lines} lines and {words} words"
    );
    assert!(
        readme.lines().take(30).any(|line| line.starts_with("![")),
        "no picture in the first 30 lines"
    );
}

/// Programs of an `exec` run if HARNESS_TEST_PYTHON names a Python with torch; otherwise that
/// example is skipped.
#[test]
fn the_example_of_every_step_runs_and_passes() {
    let folder = tempfile::tempdir().expect("a folder can be created");
    for entry in fs::read_dir(root().join("scenarios"))
        .expect("the folder exists")
        .map(|entry| entry.expect("it is readable"))
    {
        if entry.path().is_dir() {
            std::os::unix::fs::symlink(entry.path(), folder.path().join(entry.file_name()))
                .expect("a link can be created");
        }
    }
    for kind in StepKind::ALL {
        fs::write(folder.path().join(format!("{kind}.yaml")), example(*kind))
            .expect("a file can be written");
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_harness"));
    command
        .arg("run")
        .arg(folder.path())
        .args(["--device", "sim", "--no-report"]);
    let python = env::var_os("HARNESS_TEST_PYTHON").map(PathBuf::from);
    if let Some(python) = &python {
        let others = env::var("PATH").unwrap_or_default();
        command.env(
            "PATH",
            format!(
                "{}:{others}",
                python.parent().expect("the path has a folder").display()
            ),
        );
    }
    let output = command.output().expect("harness starts");
    let (passed, skipped) = if python.is_some() {
        (StepKind::ALL.len(), 0)
    } else {
        (StepKind::ALL.len() - 1, 1)
    };
    let expected = if skipped == 0 {
        format!("All {passed} runs passed.")
    } else {
        format!("No run failed: {passed} passed, 0 failed, 1 skipped.")
    };
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains(&expected),
        "{text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn git_ignores_the_places_that_commands_write_to_by_default() {
    let folder = tempfile::tempdir().expect("there is space");
    let git = |arguments: &[&str]| {
        Command::new("git")
            .args(arguments)
            .current_dir(folder.path())
            .status()
            .expect("git starts")
            .success()
    };
    assert!(git(&["init", "--quiet"]));
    fs::copy(root().join(".gitignore"), folder.path().join(".gitignore")).expect("the file exists");
    let is_ignored = |path: &str| git(&["check-ignore", "--quiet", path]);
    for path in [
        "fleet/fleet.html",
        "harness-demo/oom.html",
        "measured.tsv",
        "reports/runs/0001-oom_retry-sim/report.md",
        "reports/runs/bench/README.md",
        "reports/runs/last-failed.json",
        "scenarios/devices/nvidia-h200.yaml",
        "shards/1-of-2/benchmark.json",
        "target/book/index.html",
    ] {
        assert!(is_ignored(path), "{path}");
    }
    for path in [
        "harness/cli/src/fleet/rows.rs",
        "harness/report/src/fleet/mod.rs",
        "scenarios/devices/my-gpu.yaml",
        "reports/README.md",
    ] {
        assert!(!is_ignored(path), "{path}");
    }
}
