//! Escapes names and texts from files, devices and command lines: [`printable`] gives one line,
//! [`printable_lines`] keeps lines.

use std::borrow::Cow;

/// Escapes characters that a terminal, a log or an XML reader interprets, as in `\u{1b}`: control
/// characters, line ends, tabs and changes of the writing direction. Linear time; borrows a text
/// that needs no escape.
pub fn printable(text: &str) -> Cow<'_, str> {
    escaped(text, acts)
}

/// Like [`printable`], but keeps line feeds and tabs.
pub fn printable_lines(text: &str) -> Cow<'_, str> {
    escaped(text, |character| {
        acts(character) && !matches!(character, '\n' | '\t')
    })
}

/// Like [`printable_lines`], but keeps color codes (`ESC [ … m`) if `colors` is set. All output
/// to a terminal passes through here.
pub fn for_terminal(text: &str, colors: bool) -> Cow<'_, str> {
    if !colors {
        return printable_lines(text);
    }
    let mut pieces = text.split("\u{1b}[");
    let mut shown = printable_lines(pieces.next().unwrap_or_default()).into_owned();
    for piece in pieces {
        let rest = piece
            .trim_start_matches(|character: char| character.is_ascii_digit() || character == ';');
        let (code, rest) = match rest.strip_prefix('m') {
            Some(rest) => (
                format!("\u{1b}[{}", &piece[..piece.len() - rest.len()]),
                rest,
            ),
            None => (printable("\u{1b}[").into_owned(), piece),
        };
        shown.push_str(&code);
        shown.push_str(&printable_lines(rest));
    }
    Cow::Owned(shown)
}

/// Returns whether a terminal or XML reader interprets the character: control characters, line and
/// paragraph separators, bidirectional marks
/// (<https://www.unicode.org/reports/tr9/#Directional_Formatting_Characters>), and the characters
/// that XML 1.0 forbids (<https://www.w3.org/TR/xml/#charsets>).
pub const fn acts(character: char) -> bool {
    matches!(character, '\u{0}'..='\u{1f}' | '\u{7f}'..='\u{9f}')
        || matches!(character,
            '\u{200e}' | '\u{200f}' | '\u{61c}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
        || matches!(character, '\u{fffe}' | '\u{ffff}')
}

fn escaped(text: &str, needs_escape: impl Fn(char) -> bool) -> Cow<'_, str> {
    if !text.contains(&needs_escape) {
        return Cow::Borrowed(text);
    }
    let mut escaped = String::with_capacity(text.len() + 8);
    for character in text.chars() {
        if needs_escape(character) {
            escaped.extend(character.escape_unicode());
        } else {
            escaped.push(character);
        }
    }
    Cow::Owned(escaped)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped() {
        assert_eq!(
            printable("\u{1b}]0;title\u{7}\r\n"),
            r"\u{1b}]0;title\u{7}\u{d}\u{a}"
        );
        assert_eq!(
            printable("a\u{202e}b\u{9b}2J\u{2066}"),
            r"a\u{202e}b\u{9b}2J\u{2066}"
        );
        assert_eq!(
            printable_lines("one\n\ttwo\r\n\u{1b}[2J"),
            "one\n\ttwo\\u{d}\n\\u{1b}[2J"
        );
    }

    #[test]
    fn only_color_codes_reach_a_terminal_and_only_with_colors() {
        let text = "\u{1b}[1;31mFAILED\u{1b}[0m a\u{1b}[2J\u{1b}]0;title\u{7}\n";
        assert_eq!(
            for_terminal(text, true),
            "\u{1b}[1;31mFAILED\u{1b}[0m a\\u{1b}[2J\\u{1b}]0;title\\u{7}\n"
        );
        assert!(!for_terminal(text, false).contains('\u{1b}'));
    }

    #[test]
    fn a_plain_text_is_borrowed() {
        assert!(matches!(
            printable("activations_2, 600 MiB → `µ`"),
            Cow::Borrowed(_)
        ));
        assert!(matches!(printable_lines("about:\n\tx"), Cow::Borrowed(_)));
    }
}
