//! Escapes names and texts from files, devices and command lines: [`printable`] gives one line, [`printable_lines`] keeps lines.

use std::borrow::Cow;

/// Escapes characters that a terminal, a log or an XML reader interprets, as in `\u{1b}`: control characters, line ends, tabs and
/// changes of the writing direction. Linear time; borrows a text that needs no escape.
#[must_use]
pub fn printable(text: &str) -> Cow<'_, str> {
    escaped(text, acts)
}

/// Like [`printable`], but keeps line feeds and tabs.
#[must_use]
pub fn printable_lines(text: &str) -> Cow<'_, str> {
    escaped(text, |character| acts(character) && !matches!(character, '\n' | '\t'))
}

/// Whether a terminal or XML reader interprets the character: control characters, line and paragraph separators, bidirectional
/// marks (<https://www.unicode.org/reports/tr9/#Directional_Formatting_Characters>), and the characters that XML 1.0 forbids
/// (<https://www.w3.org/TR/xml/#charsets>).
#[must_use]
pub const fn acts(character: char) -> bool {
    matches!(character, '\u{0}'..='\u{1f}' | '\u{7f}'..='\u{9f}')
        || matches!(character, '\u{200e}' | '\u{200f}' | '\u{61c}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
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
        assert_eq!(printable("\u{1b}]0;title\u{7}\r\n"), r"\u{1b}]0;title\u{7}\u{d}\u{a}");
        assert_eq!(printable("a\u{202e}b\u{9b}2J\u{2066}"), r"a\u{202e}b\u{9b}2J\u{2066}");
        assert_eq!(printable_lines("one\n\ttwo\r\n\u{1b}[2J"), "one\n\ttwo\\u{d}\n\\u{1b}[2J");
    }

    #[test]
    fn a_plain_text_is_borrowed() {
        assert!(matches!(printable("activations_2, 600 MiB → `µ`"), Cow::Borrowed(_)));
        assert!(matches!(printable_lines("about:\n\tx"), Cow::Borrowed(_)));
    }
}
