//! The README shows the real output of `harness explain`, `advise` and `shrink`, and the real content of quoted files. `UPDATE=1
//! cargo test --test readme` updates it.

use std::fs;
use std::path::Path;
use std::process::Command;

/// An excerpt of the README: its name, the command, and the first omitted line, if lines are omitted.
const EXCERPTS: [(&str, &[&str], Option<&str>); 3] = [
    ("explain", &["explain", "harness/explain/tests/snapshots/kept-features.pickle.gz"], Some("What keeps free memory")),
    ("advise", &["advise", "harness/explain/tests/snapshots/kept-features.pickle.gz"], Some("max_split_size_mb:256 ")),
    ("shrink", &["shrink", "scenarios/failing/adapters.yaml"], None),
];

#[test]
fn the_readme_shows_real_output_and_real_files() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let readme = fs::read_to_string(root.join("README.md")).expect("the README is there");
    let mut wanted = readme.clone();
    for (name, arguments, first_left_out) in EXCERPTS {
        let output = Command::new(env!("CARGO_BIN_EXE_harness")).args(arguments).current_dir(&root).output().expect("harness starts");
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8(output.stdout).expect("output is UTF-8");
        assert!(first_left_out.is_none_or(|first| text.contains(first)), "{text}");
        let is_shown = |line: &&str| first_left_out.is_none_or(|first| !line.starts_with(first));
        let shown: Vec<&str> = text.lines().take_while(is_shown).map(str::trim_end).collect();
        let begin = format!("<!-- excerpt: {name} -->\n");
        let (before, rest) = wanted.split_once(&begin).expect("the README has the excerpt's beginning");
        let (_, after) = rest.split_once("<!-- end -->").expect("the README has the excerpt's end");
        wanted = format!("{before}{begin}```text\n{}\n```\n<!-- end -->{after}", shown.join("\n").trim_end());
    }
    for begin in readme.lines().filter(|line| line.starts_with("<!-- file: ")) {
        let file = begin.trim_start_matches("<!-- file: ").trim_end_matches(" -->");
        let text = fs::read_to_string(root.join(file)).expect("the README quotes a file of the project");
        let (before, rest) = wanted.split_once(begin).expect("it was just found");
        let (_, after) = rest.split_once("<!-- end -->").expect("the README has the file's end");
        wanted = format!("{before}{begin}\n```python\n{}\n```\n<!-- end -->{after}", text.trim_end());
    }
    if std::env::var_os("UPDATE").is_some() {
        fs::write(root.join("README.md"), wanted).expect("the README can be written");
    } else {
        assert!(readme == wanted, "an excerpt in the README is not what the program prints: run with UPDATE=1");
    }
}
