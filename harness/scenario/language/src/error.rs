//! [`FileError`]: one message with file, line, column and the accepted forms.

use std::path::{Path, PathBuf};
use std::{fmt, ops::Range};

use miette::{Diagnostic, LabeledSpan, SourceCode};

use super::located::{Located, Position};
use harness_base::excerpt::{Excerpt, shortened};
use harness_base::printable::{printable, printable_lines};

/// Why a scenario or a suite cannot be used. Its text is `file:line:column: message`; as a
/// [`Diagnostic`] it shows the line and gives advice. Control characters of the file are escaped.
#[derive(Debug, thiserror::Error)]
#[error("{}: {}", self.place(), .0.message)]
pub struct FileError(Box<Contents>);

#[derive(Debug)]
struct Contents {
    path: PathBuf,
    /// `None`: the file could not be read.
    at: Option<Position>,
    message: String,
    help: Option<String>,
    excerpt: Option<Excerpt>,
}

impl FileError {
    pub fn unreadable(path: &Path, message: String, help: String) -> Self {
        Self(Box::new(Contents {
            path: path.to_owned(),
            at: None,
            message,
            help: Some(help),
            excerpt: None,
        }))
    }

    pub fn text(problem: Problem, path: &Path, source: &str) -> Self {
        let Problem {
            at,
            message,
            label,
            help,
            related,
        } = problem;
        let shown = |text: String| printable_lines(&text).into_owned();
        let places = std::iter::once((at, label)).chain(related);
        let places: Vec<_> = places
            .map(|(at, text)| (byte_range(source, at), shown(text)))
            .collect();
        let excerpt = Some(Excerpt::new(path.display().to_string(), source, &places));
        let message = printable(&shortened(&message)).into_owned();
        Self(Box::new(Contents {
            path: path.to_owned(),
            at: Some(at),
            message,
            help: help.map(shown),
            excerpt,
        }))
    }

    pub fn position(&self) -> Option<Position> {
        self.0.at
    }

    pub fn advice(&self) -> Option<&str> {
        self.0.help.as_deref()
    }

    pub fn with_advice(mut self, help: String) -> Self {
        self.0.help = Some(help);
        self
    }

    fn place(&self) -> String {
        let path = self.0.path.display().to_string();
        let path = printable(&path);
        self.0.at.map_or_else(
            || path.to_string(),
            |at| format!("{path}:{}:{}", at.line, at.column),
        )
    }
}

impl Diagnostic for FileError {
    fn help<'a>(&'a self) -> Option<Box<dyn fmt::Display + 'a>> {
        self.advice()
            .map(|help| Box::new(help) as Box<dyn fmt::Display>)
    }

    fn source_code(&self) -> Option<&dyn SourceCode> {
        self.0
            .excerpt
            .as_ref()
            .map(|excerpt| excerpt as &dyn SourceCode)
    }

    fn labels(&self) -> Option<Box<dyn Iterator<Item = LabeledSpan> + '_>> {
        Some(Box::new(self.0.excerpt.as_ref()?.labels()))
    }
}

/// The bytes of a position, at most to the end of its line.
fn byte_range(source: &str, at: Position) -> Range<usize> {
    let line_start = match at.line {
        0 | 1 => 0,
        line => source
            .match_indices('\n')
            .nth(line as usize - 2)
            .map_or(source.len(), |(at, _)| at + 1),
    };
    let line = source[line_start..].lines().next().unwrap_or("");
    let byte = |chars: usize| {
        line.char_indices()
            .nth(chars)
            .map_or(line.len(), |(at, _)| at)
    };
    let column = at.column.saturating_sub(1) as usize;
    line_start + byte(column)..line_start + byte(column + at.length.max(1) as usize)
}

#[derive(Clone, Debug)]
pub struct Problem {
    at: Position,
    message: String,
    label: String,
    help: Option<String>,
    related: Vec<(Position, String)>,
}

impl Problem {
    pub fn new(at: Position, message: impl Into<String>) -> Self {
        Self {
            at,
            message: message.into(),
            label: "here".to_owned(),
            help: None,
            related: Vec::new(),
        }
    }

    /// The problem of a text that is not one of these names: a message, and the names as advice.
    /// `kinds` is what they are, as in `streams`.
    pub fn not_among<'n>(
        given: &Located<String>,
        message: impl Into<String>,
        kinds: &str,
        names: impl IntoIterator<Item = &'n str>,
    ) -> Self {
        Self::new(given.at, message).help(choices(&given.value, kinds, names))
    }

    pub fn help(self, help: impl Into<String>) -> Self {
        Self {
            help: Some(help.into()),
            ..self
        }
    }

    /// Sets the position unless the problem has one.
    pub fn or_at(self, at: Position) -> Self {
        if self.at == Position::default() {
            Self { at, ..self }
        } else {
            self
        }
    }

    pub fn label(self, label: impl Into<String>) -> Self {
        Self {
            label: label.into(),
            ..self
        }
    }

    pub fn see(mut self, at: Position, text: impl Into<String>) -> Self {
        if at != self.at {
            self.related.push((at, text.into()));
        }
        self
    }
}

/// Finds what a name stands for. `kind` and `kinds` are words for it, as in `stream` and `streams`;
/// `names` are all names.
pub fn named<'n, T>(
    given: &Located<String>,
    [kind, kinds]: [&str; 2],
    find: impl FnOnce(&str) -> Option<T>,
    names: impl IntoIterator<Item = &'n str>,
) -> Result<T, Problem> {
    find(&given.value).ok_or_else(|| {
        Problem::not_among(
            given,
            format!("unknown {kind} `{}`", given.value),
            kinds,
            names,
        )
    })
}

/// Returns "did you mean …?" and the list of valid names.
pub fn choices<'a>(wrong: &str, kind: &str, names: impl IntoIterator<Item = &'a str>) -> String {
    let names: Vec<&str> = names.into_iter().collect();
    let hint = did_you_mean(wrong, names.iter().copied());
    match names.len() {
        0 => format!("{hint}there are no {kind} here"),
        1..=40 => format!("{hint}{kind}: {}", quoted(&names, ", ")),
        _ => hint.trim_end().to_owned(),
    }
}

/// Returns "did you mean …? ", or nothing if no name is similar.
pub fn did_you_mean<'a>(wrong: &str, names: impl IntoIterator<Item = &'a str>) -> String {
    match nearest(wrong, names).as_slice() {
        [] => String::new(),
        nearest => format!("did you mean {}? ", quoted(nearest, " or ")),
    }
}

/// Longer texts are not compared with names: the time grows with the product of both lengths.
const LONGEST_COMPARED: usize = 200;

/// Returns up to three similar names, the most similar first.
pub fn nearest<'a>(wrong: &str, names: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
    if wrong.len() > LONGEST_COMPARED {
        return Vec::new();
    }
    let mut scored: Vec<(f64, &str)> = names
        .into_iter()
        .map(|name| (strsim::jaro_winkler(wrong, name), name))
        .filter(|(score, _)| *score > 0.8)
        .collect();
    scored.sort_by(|(a, x), (b, y)| b.total_cmp(a).then_with(|| x.cmp(y)));
    let best = scored.first().map_or(0.0, |(score, _)| *score);
    scored
        .into_iter()
        .take(3)
        .filter(|(score, _)| *score > best - 0.03)
        .map(|(_, name)| name)
        .collect()
}

pub fn quoted(names: &[&str], separator: &str) -> String {
    names
        .iter()
        .map(|name| format!("`{name}`"))
        .collect::<Vec<_>>()
        .join(separator)
}
