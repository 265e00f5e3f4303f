//! Assigns the comments of a scenario file to its steps: [`Comments`].

#[derive(Debug)]
pub(super) struct Comments {
    lines: Vec<Line>,
    /// True if each line's comment is already assigned.
    taken: usize,
}

#[derive(Debug)]
struct Line {
    comment: Option<String>,
    /// True if the line contains something else.
    has_content: bool,
    /// True if a step or a top-level key begins on the line.
    begins: bool,
}

impl Comments {
    pub(super) fn of(source: &str) -> Self {
        let line = |text: &str| {
            let start = start_of_comment(text);
            let content = start.map_or(text, |start| &text[..start]);
            let comment =
                start.map(|start| text[start..].trim_start_matches('#').trim().to_owned());
            let begins = content.trim_start().starts_with("- ")
                || content.starts_with(|c: char| !c.is_whitespace());
            Line {
                comment,
                has_content: !content.trim().is_empty(),
                begins,
            }
        };
        Self {
            lines: source.lines().map(line).collect(),
            taken: 0,
        }
    }

    /// Takes the comments of the step that begins on this line, counted from 1: the lines above it
    /// and the comments after it. Call it in file order. The first step on a line gets its
    /// comments.
    pub(super) fn take(&mut self, line: u32) -> (Vec<String>, Option<String>) {
        let own = (line as usize).saturating_sub(1).min(self.lines.len());
        if own < self.taken {
            return (Vec::new(), None);
        }
        let above = self.lines[self.taken..own]
            .iter()
            .rev()
            .take_while(|line| !line.has_content)
            .filter_map(|line| line.comment.clone());
        let mut above: Vec<String> = above.collect();
        above.reverse();
        let rest = self.lines[own..]
            .iter()
            .skip(1)
            .take_while(|line| line.has_content && !line.begins)
            .count();
        let end = (own + 1 + rest).min(self.lines.len());
        let behind: Vec<String> = self.lines[own..end]
            .iter()
            .filter_map(|line| line.comment.clone())
            .collect();
        self.taken = end;
        (above, (!behind.is_empty()).then(|| behind.join("; ")))
    }
}

/// The byte offset of a line's comment: a `#` outside quotes, at the start or after a blank.
fn start_of_comment(line: &str) -> Option<usize> {
    let (mut quote, mut before) = (None, ' ');
    for (at, c) in line.char_indices() {
        match quote {
            Some(open) => quote = if c == open { None } else { quote },
            None if c == '#' && before.is_whitespace() => return Some(at),
            // Within a word, it is an apostrophe.
            None if (c == '"' || c == '\'') && !before.is_alphanumeric() => quote = Some(c),
            None => {}
        }
        before = c;
    }
    None
}

#[cfg(test)]
mod tests;
