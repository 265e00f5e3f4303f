//! GitHub Actions output: step summaries of limited size, and annotations.

use super::{Report, markdown};

/// Size limit of our step summary in bytes. GitHub refuses more than 1 MiB per step, and the step's
/// other output needs room.
///
/// Source:
/// <https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-commands#step-isolation-and-limits>.
pub const SUMMARY_LIMIT: usize = (1 << 20) - (16 << 10);

/// Annotations per step: GitHub shows no more of each kind.
///
/// Source: <https://docs.github.com/en/actions/reference/limits>, and
/// <https://github.com/orgs/community/discussions/26680>.
pub const ANNOTATIONS: usize = 10;

const CUT: &str = "**Cut here** by GitHub's size limit: the whole report is `report.md` in the \
     folder of this run.\n";

/// Renders the verdict, the failures and their causes as a step summary of at most `limit` bytes.
pub fn summary(report: &Report<'_>, limit: usize) -> String {
    cut(&markdown::summary(report), limit)
}

/// Returns the lines that fit into `limit` bytes. If lines are cut, closes open folds and fences
/// and adds a note. If the limit is too small for the note, returns an empty text.
pub(super) fn cut(text: &str, limit: usize) -> String {
    if text.len() <= limit {
        return text.to_owned();
    }
    // Folds do not nest and fences are short, so closing them needs little room. An empty line
    // precedes the note.
    let Some(room) = limit.checked_sub(CUT.len() + "\n````````\n\n</details>\n\n".len()) else {
        return String::new();
    };
    let end = text
        .char_indices()
        .take_while(|&(at, _)| at < room)
        .filter(|&(_, c)| c == '\n')
        .last()
        .map_or(0, |(at, _)| at + 1);
    let mut kept = text[..end].to_owned();
    if let Some(fence) = open_fence(&kept) {
        kept.push_str(&fence);
        kept.push('\n');
    }
    if kept.matches("<details>").count() > kept.matches("</details>").count() {
        kept.push_str("\n</details>\n");
    }
    kept.push('\n');
    kept.push_str(CUT);
    kept
}

fn open_fence(text: &str) -> Option<String> {
    let mut open: Option<String> = None;
    for line in text.lines().filter(|line| line.starts_with("```")) {
        let ticks: String = line.chars().take_while(|c| *c == '`').collect();
        match &open {
            None => open = Some(ticks),
            Some(fence) if line == fence => open = None,
            Some(_) => {}
        }
    }
    open
}

/// Renders at most [`ANNOTATIONS`] workflow commands: `error`, `warning` or `notice`, each with a
/// title and a message. The last one gives the number of omitted ones.
pub(super) fn annotations(messages: &[(&str, String, String)]) -> Vec<String> {
    let commands = messages
        .iter()
        .map(|(level, title, message)| command(level, title, message));
    limited(commands.collect(), "The report has all of them.")
}

/// Keeps at most [`ANNOTATIONS`] workflow commands. The last one gives the number of omitted ones,
/// and says what has all.
pub(super) fn limited(mut commands: Vec<String>, all: &str) -> Vec<String> {
    if commands.len() > ANNOTATIONS {
        let more = commands.split_off(ANNOTATIONS - 1).len();
        commands.push(command("notice", &format!("{more} more"), all));
    }
    commands
}

/// Formats and escapes a workflow command.
///
/// Source: <https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-commands>.
/// Escaping: <https://github.com/actions/toolkit/blob/main/packages/core/src/command.ts>.
fn command(level: &str, title: &str, message: &str) -> String {
    format!("::{level} title={}::{}", property(title), data(message))
}

/// Formats and escapes a workflow command about a line of a file, which GitHub shows there.
pub(super) fn of_line(level: &str, path: &str, line: u32, message: &str) -> String {
    let (path, message) = (property(path), data(message));
    format!("::{level} file={path},line={line},title=GPU memory::{message}")
}

fn data(text: &str) -> String {
    text.replace('%', "%25")
        .replace('\r', "%0D")
        .replace('\n', "%0A")
}

fn property(text: &str) -> String {
    data(text).replace(':', "%3A").replace(',', "%2C")
}

#[cfg(test)]
mod tests;
