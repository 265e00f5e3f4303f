//! [`ProfileError`]: errors of device profiles, with file, line and column.

use std::fmt;
use std::fs::File;
use std::io::{ErrorKind, Read as _};
use std::path::{Path, PathBuf};

use miette::{Diagnostic, LabeledSpan, SourceCode};

use super::FOLDER;
use harness_base::excerpt::{Excerpt, shortened};

/// Why a profile cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// The file cannot be read.
    #[error("{}: {why}", path.display())]
    File {
        /// The file, as the user named it.
        path: PathBuf,
        /// The reason.
        why: String,
        /// The names of the profiles in [`FOLDER`].
        known: Vec<PathBuf>,
    },
    /// The file is not a valid profile.
    #[error("{}:{line}:{column}: {message}", path.display())]
    Text {
        /// The file, as the user named it.
        path: PathBuf,
        /// Line, counted from 1.
        line: u64,
        /// Column in characters, counted from 1.
        column: u64,
        /// The reason.
        message: String,
        /// The excerpt to show.
        excerpt: Box<Excerpt>,
    },
}

impl ProfileError {
    /// Returns the error for an invalid text.
    pub(crate) fn text(error: &serde_saphyr::Error, path: &Path, text: &str) -> Self {
        let error = error.without_snippet();
        let (line, column) = error.location().map_or((1, 1), |location| (location.line(), location.column()));
        let at = offset(text, line, column);
        let excerpt = Box::new(Excerpt::new(path.display().to_string(), text, &[(at..at, "here".to_owned())]));
        let message = shortened(&plain(&error.to_string())).into_owned();
        Self::Text { path: path.to_owned(), line, column, message, excerpt }
    }
}

/// Reads a text file of at most `most` bytes.
pub(super) fn read(path: &Path, most: u64) -> Result<String, ProfileError> {
    let file = |why: String| ProfileError::File { path: path.to_owned(), why, known: known() };
    let io = |error: std::io::Error| match error.kind() {
        ErrorKind::NotFound => file("there is no such file".to_owned()),
        ErrorKind::IsADirectory => file("this is a directory, not a device profile".to_owned()),
        _ => file(format!("cannot be read: {error}")),
    };
    let mut bytes = Vec::new();
    // The read is bounded, because a pipe or a device has no length.
    File::open(path).and_then(|opened| opened.take(most + 1).read_to_end(&mut bytes)).map_err(io)?;
    if bytes.len() as u64 > most {
        return Err(file(format!("the file has more than {most} bytes: it is not a device profile")));
    }
    String::from_utf8(bytes).map_err(|error| {
        let good = error.utf8_error().valid_up_to();
        let text = String::from_utf8_lossy(&error.as_bytes()[..good]);
        let (line, column) = (text.matches('\n').count() + 1, text.rsplit('\n').next().unwrap_or("").chars().count() + 1);
        let excerpt = Box::new(Excerpt::new(path.display().to_string(), &text, &[(good..good, "here".to_owned())]));
        let message = format!("byte {} of the file is not UTF-8: save it as UTF-8", good + 1);
        ProfileError::Text { path: path.to_owned(), line: line as u64, column: column as u64, message, excerpt }
    })
}

/// Returns the names of the profiles in [`FOLDER`]; none if the folder cannot be read.
fn known() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(FOLDER).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut profiles: Vec<PathBuf> = entries.filter(|path| path.extension().is_some_and(|ending| ending == "yaml")).collect();
    profiles.sort();
    profiles
}

/// Returns the byte offset of a line and a column, or the end.
fn offset(text: &str, line: u64, column: u64) -> usize {
    let before = |count: u64| usize::try_from(count.saturating_sub(1)).unwrap_or(usize::MAX);
    let start: usize = text.split_inclusive('\n').take(before(line)).map(str::len).sum();
    let within = text[start..].char_indices().nth(before(column)).map_or(text.len() - start, |(at, _)| at);
    start + within
}

/// Returns the message without its position, which ours already contains.
fn plain(message: &str) -> String {
    let end = [" at line ", ": line "].iter().filter_map(|mark| message.find(mark)).min().unwrap_or(message.len());
    message[..end].trim().to_owned()
}

impl Diagnostic for ProfileError {
    fn help<'a>(&'a self) -> Option<Box<dyn fmt::Display + 'a>> {
        Some(match self {
            Self::File { known, .. } if known.is_empty() => {
                Box::new(format!("name a file that `harness calibrate` wrote on a GPU; {FOLDER} contains none"))
            }
            Self::File { known, .. } => {
                let known: Vec<String> = known.iter().map(|path| format!("`{}`", path.display())).collect();
                Box::new(format!("name a file that `harness calibrate` wrote; {FOLDER} contains: {}", known.join(", ")))
            }
            Self::Text { .. } => Box::new("correct the file at this position, or measure a new profile with `harness calibrate`"),
        })
    }

    fn source_code(&self) -> Option<&dyn SourceCode> {
        match self {
            Self::File { .. } => None,
            Self::Text { excerpt, .. } => Some(excerpt.as_ref()),
        }
    }

    fn labels(&self) -> Option<Box<dyn Iterator<Item = LabeledSpan> + '_>> {
        match self {
            Self::File { .. } => None,
            Self::Text { excerpt, .. } => Some(Box::new(excerpt.labels())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_not_utf_8_is_refused_at_the_byte() {
        let path = std::env::temp_dir().join(format!("harness-profile-{}.yaml", std::process::id()));
        std::fs::write(&path, b"name: x\nabout: \xff\n").expect("a temporary file is writable");
        let error = read(&path, 100).expect_err("the file is not UTF-8");
        std::fs::remove_file(&path).expect("it is there");
        let told = error.to_string();
        assert!(told.ends_with(".yaml:2:8: byte 16 of the file is not UTF-8: save it as UTF-8"), "{told}");
    }
}
