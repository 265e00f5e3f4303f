//! What can be wrong with a scenario: [`ScenarioError`], one clear message with file, line, column and the accepted forms.

use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

use miette::{Diagnostic, LabeledSpan, SourceCode};

use super::located::Position;
use harness_base::excerpt::{Excerpt, shortened};

/// Why a scenario cannot be run. Its text is `file:line:column: message`; as a [`Diagnostic`] it shows the place and says what to do.
#[derive(Debug, thiserror::Error)]
pub enum ScenarioError {
    /// The file could not be read: name another one, or make this one readable.
    #[error("{}: {why}", .path.display())]
    File {
        /// What it should be: `scenario`, or `suite`.
        noun: &'static str,
        /// The file, as the user named it.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
        /// What to do about it.
        help: String,
    },
    /// The file was read and is no scenario: correct it at the place named.
    #[error("{0}")]
    Text(Box<TextError>),
}

impl ScenarioError {
    /// A short name of the kind of mistake, for programs.
    #[must_use]
    pub fn kind(&self) -> String {
        match self {
            Self::File { noun, .. } => format!("{noun}::file"),
            Self::Text(error) => format!("{}::{}", error.noun, error.problem.code.name()),
        }
    }

    /// The place, where the mistake has one.
    #[must_use]
    pub fn position(&self) -> Option<Position> {
        match self {
            Self::File { .. } => None,
            Self::Text(error) => Some(error.problem.at),
        }
    }

    /// What to do about it.
    #[must_use]
    pub fn advice(&self) -> Option<&str> {
        match self {
            Self::File { help, .. } => Some(help),
            Self::Text(error) => error.problem.help.as_deref(),
        }
    }

    /// `noun` is what the text should be.
    pub fn text(problem: Problem, path: &Path, source: &str, noun: &'static str) -> Self {
        let first = (byte_range(source, problem.at), problem.label.clone());
        let related = problem.related.iter().map(|(at, text)| (byte_range(source, *at), text.clone()));
        let places: Vec<_> = std::iter::once(first).chain(related).collect();
        let excerpt = Excerpt::new(path.display().to_string(), source, &places);
        Self::Text(Box::new(TextError { noun, path: path.to_owned(), excerpt, problem }))
    }
}

/// A mistake at one place of the text.
#[derive(Debug)]
pub struct TextError {
    noun: &'static str,
    path: PathBuf,
    excerpt: Excerpt,
    problem: Problem,
}

impl fmt::Display for TextError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Position { line, column, .. } = self.problem.at;
        write!(f, "{}:{line}:{column}: {}", self.path.display(), shortened(&self.problem.message))
    }
}

impl std::error::Error for TextError {}

impl Diagnostic for ScenarioError {
    fn code<'a>(&'a self) -> Option<Box<dyn fmt::Display + 'a>> {
        Some(Box::new(self.kind()))
    }

    fn help<'a>(&'a self) -> Option<Box<dyn fmt::Display + 'a>> {
        self.advice().map(|help| Box::new(help) as Box<dyn fmt::Display>)
    }

    fn source_code(&self) -> Option<&dyn SourceCode> {
        match self {
            Self::File { .. } => None,
            Self::Text(error) => Some(&error.excerpt),
        }
    }

    fn labels(&self) -> Option<Box<dyn Iterator<Item = LabeledSpan> + '_>> {
        match self {
            Self::File { .. } => None,
            Self::Text(error) => Some(Box::new(error.excerpt.labels())),
        }
    }
}

/// Bytes from a place to its end, at most to the end of its line.
fn byte_range(source: &str, at: Position) -> Range<usize> {
    let line_start = match at.line {
        0 | 1 => 0,
        line => source.match_indices('\n').nth(line as usize - 2).map_or(source.len(), |(at, _)| at + 1),
    };
    let line = source[line_start..].lines().next().unwrap_or("");
    let byte = |chars: usize| line.char_indices().nth(chars).map_or(line.len(), |(at, _)| at);
    let column = at.column.saturating_sub(1) as usize;
    line_start + byte(column)..line_start + byte(column + at.length.max(1) as usize)
}

/// Kinds of mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// Not YAML, or more of it than a scenario can be.
    Yaml,
    /// YAML of another shape than the language has.
    Shape,
    /// A scalar that is not what its field wants.
    Value,
    /// A name that nothing has, or that something else has.
    Name,
    /// A comparison that cannot be read or cannot be meant.
    Expression,
    /// Steps in an order that cannot work.
    Order,
}

impl Code {
    /// Its name in error codes.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Yaml => "yaml",
            Self::Shape => "shape",
            Self::Value => "value",
            Self::Name => "name",
            Self::Expression => "expression",
            Self::Order => "order",
        }
    }
}

/// A mistake before it knows its file.
#[derive(Clone, Debug)]
pub struct Problem {
    code: Code,
    at: Position,
    message: String,
    label: String,
    help: Option<String>,
    related: Vec<(Position, String)>,
}

impl Problem {
    /// A mistake of this kind at this place.
    pub fn new(code: Code, at: Position, message: impl Into<String>) -> Self {
        Self { code, at, message: message.into(), label: "here".to_owned(), help: None, related: Vec::new() }
    }

    /// With what to do about it.
    #[must_use]
    pub fn help(self, help: impl Into<String>) -> Self {
        Self { help: Some(help.into()), ..self }
    }

    /// With what stands under the place.
    #[must_use]
    pub fn label(self, label: impl Into<String>) -> Self {
        Self { label: label.into(), ..self }
    }

    /// Shows another place that has to do with it.
    pub fn see(mut self, at: Position, text: impl Into<String>) -> Self {
        if at != self.at {
            self.related.push((at, text.into()));
        }
        self
    }
}

/// "did you mean" and the names there are, for a name that is not among them.
pub fn choices<'a>(wrong: &str, kind: &str, names: impl IntoIterator<Item = &'a str>) -> String {
    let names: Vec<&str> = names.into_iter().collect();
    let nearest = nearest(wrong, names.iter().copied());
    let hint = if nearest.is_empty() { String::new() } else { format!("did you mean {}? ", quoted(&nearest, " or ")) };
    match names.len() {
        0 => format!("{hint}there are no {kind} here"),
        1..=40 => format!("{hint}{kind}: {}", quoted(&names, ", ")),
        _ => hint.trim_end().to_owned(),
    }
}

/// Up to three names that look like the wrong one, the nearest first.
pub fn nearest<'a>(wrong: &str, names: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
    let mut scored: Vec<(f64, &str)> =
        names.into_iter().map(|name| (strsim::jaro_winkler(wrong, name), name)).filter(|(score, _)| *score > 0.8).collect();
    scored.sort_by(|(a, x), (b, y)| b.total_cmp(a).then_with(|| x.cmp(y)));
    let best = scored.first().map_or(0.0, |(score, _)| *score);
    scored.into_iter().take(3).filter(|(score, _)| *score > best - 0.03).map(|(_, name)| name).collect()
}

/// Names in backticks, with the separator between them.
#[must_use]
pub fn quoted(names: &[&str], separator: &str) -> String {
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(separator)
}
