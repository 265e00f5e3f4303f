//! Names and texts from files, devices and command lines, made safe to print: [`printable`] on one line, [`printable_lines`] on several.

use std::borrow::Cow;

/// The text with every character escaped (as in `\u{1b}`) that a terminal, a log or an XML reader would act on instead of showing it:
/// control characters, line ends and tabs among them, and those that change the direction of writing. Linear time; borrowed where nothing
/// needs an escape.
#[must_use]
pub fn printable(text: &str) -> Cow<'_, str> {
    escaped(text, acts)
}

/// The same, but line feeds and tabs stay.
#[must_use]
pub fn printable_lines(text: &str) -> Cow<'_, str> {
    escaped(text, |character| acts(character) && !matches!(character, '\n' | '\t'))
}

/// Whether a character does something instead of being shown. Besides control characters: the line and paragraph separators, the marks of
/// Unicode's bidirectional algorithm (<https://www.unicode.org/reports/tr9/#Directional_Formatting_Characters>), and the two that XML 1.0
/// forbids (<https://www.w3.org/TR/xml/#charsets>).
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
    fn what_would_act_on_a_terminal_is_shown_as_an_escape() {
        assert_eq!(printable("\u{1b}]0;title\u{7}\r\n"), r"\u{1b}]0;title\u{7}\u{d}\u{a}");
        assert_eq!(printable("a\u{202e}b\u{9b}2J\u{2066}"), r"a\u{202e}b\u{9b}2J\u{2066}");
        assert_eq!(printable_lines("one\n\ttwo\r\n\u{1b}[2J"), "one\n\ttwo\\u{d}\n\\u{1b}[2J");
    }

    #[test]
    fn a_plain_text_is_borrowed_as_it_is() {
        assert!(matches!(printable("activations_2, 600 MiB → `µ`"), Cow::Borrowed(_)));
        assert!(matches!(printable_lines("about:\n\tx"), Cow::Borrowed(_)));
    }
}
