//! Examples in pages. The tests of schemas use them too.

/// The blocks of a markdown text fenced as ```` ```yaml ````.
pub(crate) fn yaml_blocks(markdown: &str) -> Vec<&str> {
    let fenced = markdown.split("\n```").skip(1).step_by(2);
    fenced
        .filter_map(|block| block.strip_prefix("yaml\n"))
        .collect()
}

/// Adds the keys that a scenario needs to a list of steps.
pub(crate) fn as_scenario(block: &str) -> String {
    if !block.trim_start().starts_with("- ") {
        return block.to_owned();
    }
    let steps: String = block.lines().map(|line| format!("  {line}\n")).collect();
    format!(
        "about: An example.\nneeds: {{ memory: 4GiB }}\nstreams: [side, copy]\nprograms: \
         [server]\nprocesses: [helper]\nsteps:\n{steps}"
    )
}
