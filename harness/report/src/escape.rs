//! Escapes text from scenarios and devices for Markdown.

use harness_base::printable::{acts, printable, printable_lines};

/// Escapes text for a terminal or a CI log: no control characters and no GitHub workflow commands.
///
/// GitHub interprets `::` after leading spaces and `##[` anywhere, see
/// <https://github.com/actions/runner/blob/main/src/Runner.Common/ActionCommand.cs>.
pub(super) fn log_lines(text: &str) -> String {
    let lines: Vec<String> = printable_lines(text).split('\n').map(log_line).collect();
    lines.join("\n")
}

pub(super) fn log_line(text: &str) -> String {
    let text = printable(text).replace("##[", "##\\[");
    let start = text.len() - text.trim_start().len();
    if text[start..].starts_with("::") {
        format!("{}\\{}", &text[..start], &text[start..])
    } else {
        text
    }
}

pub(super) fn between_tags(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

/// Formats a name as a code span, or escapes it if a code span in a table cannot contain it.
pub(super) fn code(text: &str) -> String {
    if text.is_empty() || text.contains(['`', '|', '\\']) || text.contains(acts) {
        escape(text)
    } else {
        format!("`{text}`")
    }
}

/// Escapes a line, in which balanced backticks mark code.
pub(super) fn prose(text: &str) -> String {
    let pieces: Vec<&str> = text.split('`').collect();
    let is_code = |index: usize| index % 2 == 1;
    let is_balanced = pieces.len() % 2 == 1;
    let is_safe = pieces.iter().enumerate().all(|(index, piece)| {
        !is_code(index) || !(piece.trim().is_empty() || code(piece) == escape(piece))
    });
    if !is_balanced || !is_safe {
        return escape(text);
    }
    pieces
        .iter()
        .enumerate()
        .map(|(index, piece)| {
            if is_code(index) {
                code(piece)
            } else {
                escape(piece)
            }
        })
        .collect()
}

/// Escapes paragraphs separated by empty lines.
pub(super) fn prose_block(text: &str) -> String {
    let paragraphs = text
        .split("\n\n")
        .map(str::trim)
        .filter(|paragraph| !paragraph.is_empty());
    paragraphs
        .map(|paragraph| prose(&paragraph.replace('\n', " ")))
        .collect::<Vec<_>>()
        .join("\n\n")
}

/// Encloses a text in a fence that the text cannot close. `language` may be empty.
pub(super) fn fenced(language: &str, text: &str) -> String {
    let longest = text
        .split(|c| c != '`')
        .map(str::len)
        .max()
        .unwrap_or_default();
    let fence = "`".repeat(3.max(longest + 1));
    format!("{fence}{language}\n{}\n{fence}", printable_lines(text))
}

/// Escapes plain text. Keeps underscores within words and the characters of URLs.
fn escape(text: &str) -> String {
    text.split_inclusive(char::is_whitespace)
        .map(escape_word)
        .collect()
}

fn escape_word(word: &str) -> String {
    let is_address = word.starts_with("https://") || word.starts_with("http://");
    let mut escaped = String::with_capacity(word.len());
    let mut before = ' ';
    let mut rest = word.chars().peekable();
    while let Some(c) = rest.next() {
        let is_inner = before.is_alphanumeric()
            && rest
                .peek()
                .is_some_and(|next| next.is_alphanumeric() || *next == '_');
        match c {
            '_' if is_inner || before == '_' && !escaped.ends_with("\\_") => escaped.push('_'),
            '_' | '~' | '&' | '#' if is_address => escaped.push(c),
            '\\' | '`' | '*' | '_' | '<' | '>' | '[' | ']' | '|' | '~' | '&' | '#' => {
                escaped.extend(['\\', c])
            }
            c if acts(c) => escaped.push(' '),
            c => escaped.push(c),
        }
        before = c;
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_line_neither_acts_on_a_terminal_nor_commands_a_workflow() {
        assert_eq!(
            log_lines("  ::error::x\n\u{1b}[2J\nscenarios/a::b"),
            "  \\::error::x\n\\u{1b}[2J\nscenarios/a::b"
        );
        assert_eq!(log_line("x ##[error]y\n::z"), "x ##\\[error]y\\u{a}::z");
        assert_eq!(fenced("", "a\u{1b}b\nc"), "```\na\\u{1b}b\nc\n```");
    }

    #[test]
    fn names_and_sentences_come_out_as_they_are_meant() {
        assert_eq!(code("oom_retry"), "`oom_retry`");
        assert_eq!(code("a|b`c"), "a\\|b\\`c");
        assert_eq!(prose("num_ooms is 3 < 4"), "num_ooms is 3 \\< 4");
        assert_eq!(
            prose("a~b, see https://example.com/~b_/#c|"),
            "a\\~b, see https://example.com/~b_/#c\\|"
        );
        assert_eq!(prose("call `a_b()` | then"), "call `a_b()` \\| then");
        assert_eq!(prose("one ` alone"), "one \\` alone");
        assert_eq!(prose("`a|b`"), "\\`a\\|b\\`");
        assert_eq!(prose("two\nlines _so_"), "two lines \\_so\\_");
        assert_eq!(fenced("sh", "run ```it"), "````sh\nrun ```it\n````");
        assert_eq!(prose_block("one\ntwo\n\n\nthree\n"), "one two\n\nthree");
    }
}
