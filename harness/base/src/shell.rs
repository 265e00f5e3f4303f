//! Words for a POSIX shell, in the commands that reproduce a run.

/// A word as a POSIX shell has to be given it: paths have spaces, and names of arms brackets where they tell settings.
#[must_use]
pub fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-./:,+@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) { word.to_owned() } else { format!("'{}'", word.replace('\'', r"'\''")) }
}

/// A command as one would type it.
#[must_use]
pub fn command(words: &[impl AsRef<str>]) -> String {
    words.iter().map(|word| quoted(word.as_ref())).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::quoted;

    #[test]
    fn a_word_is_quoted_where_a_shell_would_not_take_it_as_it_is() {
        let words = ["scenarios/oom_retry.yaml", "d one/job.yaml", "it's.yaml", "caching(x:1)", "$HOME", "~", ""];
        let expected = ["scenarios/oom_retry.yaml", "'d one/job.yaml'", r"'it'\''s.yaml'", "'caching(x:1)'", "'$HOME'", "'~'", "''"];
        assert_eq!(words.map(quoted), expected);
    }
}
