//! Quoting for POSIX shells, used in the commands that reproduce a run.

/// Quotes a word if a POSIX shell would change it, for example a path with spaces or a
/// configuration with parentheses.
pub fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-./:,+@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

pub fn command(words: &[impl AsRef<str>]) -> String {
    words
        .iter()
        .map(|word| quoted(word.as_ref()))
        .collect::<Vec<_>>()
        .join(" ")
}

#[cfg(test)]
mod tests {
    use super::quoted;

    #[test]
    fn a_word_is_quoted_where_a_shell_would_not_take_it_as_it_is() {
        let words = [
            "scenarios/oom_retry.yaml",
            "d one/job.yaml",
            "it's.yaml",
            "caching(x:1)",
            "$HOME",
            "~",
            "",
        ];
        let expected = [
            "scenarios/oom_retry.yaml",
            "'d one/job.yaml'",
            r"'it'\''s.yaml'",
            "'caching(x:1)'",
            "'$HOME'",
            "'~'",
            "''",
        ];
        assert_eq!(words.map(quoted), expected);
    }
}
