//! Tests of `harness help`, `harness completions` and `harness man`.

use std::path::Path;
use std::process::{Command, Output};
use std::{fs, str};

use tempfile::TempDir;

const HAS_SHELL: bool = cfg!(feature = "shell");

fn harness(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_harness"));
    command
        .args(arguments)
        .env_remove("CARGO")
        .output()
        .unwrap()
}

fn out(arguments: &[&str]) -> String {
    let output = harness(arguments);
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn help_lists_topics_and_shows_chapters_without_markdown() {
    let topics = out(&["help"]);
    assert!(
        topics.contains("  out-of-memory        From an error message to a setting\n"),
        "{topics}"
    );
    assert!(
        topics.contains("  scenario-reference   Scenario reference"),
        "{topics}"
    );
    let chapter = out(&["help", "out-of-memory"]);
    assert!(chapter.starts_with("From an error message to a setting\n"));
    for mark in ["```", "<!--", "](", "**", "|---"] {
        assert!(!chapter.contains(mark), "{mark}");
    }
}

#[test]
fn help_of_a_command_is_its_own_help() {
    for path in [["exec"].as_slice(), &["report", "merge"]] {
        let own = out(&[path, &["--help"]].concat());
        assert_eq!(out(&[&["help"], path].concat()), own);
    }
}

#[test]
fn an_unknown_topic_is_an_error_with_the_nearest_one() {
    let output = harness(&["help", "pytroch"]);
    assert_eq!(output.status.code(), Some(2));
    let message = str::from_utf8(&output.stderr).unwrap();
    assert!(message.contains("did you mean `pytorch`?"), "{message}");
}

#[test]
fn bash_completes_commands_and_options() {
    if !HAS_SHELL {
        return;
    }
    let folder = TempDir::new().unwrap();
    let script = folder.path().join("harness");
    fs::write(&script, out(&["completions", "bash"])).unwrap();
    let completed = |words: &[&str]| {
        let last = words.len() - 1;
        let position = last;
        let script = script.display();
        let (words, last, before) = (words.join(" "), words[last], words[last - 1]);
        let code = format!(
            "source '{script}'; COMP_WORDS=({words}); COMP_CWORD={position}
             _harness harness '{last}' '{before}'; echo \"${{COMPREPLY[@]}}\""
        );
        let output = Command::new("bash").args(["-c", &code]).output().unwrap();
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    };
    assert_eq!(completed(&["harness", "ex"]), "exec explain");
    assert_eq!(completed(&["harness", "exec", "--every-"]), "--every-fault");
    // The completions offer no hidden commands.
    assert_eq!(completed(&["harness", "library-"]), "");
    assert_eq!(
        completed(&["harness", "explain", "--format", "ma"]),
        "markdown"
    );
}

#[test]
fn every_visible_command_has_a_man_page() {
    if !HAS_SHELL {
        return;
    }
    let folder = TempDir::new().unwrap();
    let pages = folder.path().join("man1");
    out(&["man", pages.to_str().unwrap()]);
    let page = |name: &str| fs::read_to_string(pages.join(name)).unwrap();
    for command in ["exec", "explain", "demo", "report-merge"] {
        let text = page(&format!("harness-{command}.1"));
        assert!(text.contains(".SH SYNOPSIS"), "{text}");
    }
    assert!(page("harness.1").contains("harness\\-exec(1)"));
    assert!(!Path::new(&pages).join("harness-library-host.1").exists());
}

#[test]
fn a_build_without_the_scripts_answers_with_the_feature() {
    if HAS_SHELL {
        return;
    }
    for arguments in [["completions", "bash"], ["man", "folder"]] {
        let output = harness(&arguments);
        assert_eq!(output.status.code(), Some(2));
        assert!(
            str::from_utf8(&output.stderr)
                .unwrap()
                .contains("--features shell")
        );
    }
}
