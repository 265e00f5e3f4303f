//! Reads files into wire types within bounds, and words serde-saphyr's errors for users.

use std::{io::Read, path::Path};

use serde::de::DeserializeOwned;
use serde_json::Value;
use serde_saphyr::Error;

use super::error::{FileError, Problem, choices, quoted};
use super::located::Position;

/// Largest file that is read, in bytes.
pub const MAX_FILE: u64 = 32 << 20;
/// Most scalars, lists and maps of one file: enough for about 200,000 steps, because an `alloc` and
/// its `free` are ten.
pub const MAX_NODES: usize = 1_000_000;
/// Most values that come from aliases. Each takes 4 µs, so a small file is refused in about half a
/// second.
const MAX_ALIASED: usize = 100_000;

/// The advice for YAML's syntax.
pub const ONE_DOCUMENT: &str = "the file must be one YAML document, indented with spaces";

#[derive(Debug)]
pub struct Language {
    pub noun: &'static str,
    pub example: &'static str,
    pub shape: &'static str,
    pub required: &'static [&'static str],
    /// The keys that the map under this key must have.
    pub required_by: fn(&str) -> Vec<String>,
    /// A shorter way to write a file that is too large.
    pub shorter: &'static str,
    /// Keys that only this kind of file has.
    pub own: &'static [&'static str],
    /// Keys that only the other kind of file has.
    pub foreign: &'static [&'static str],
    /// The other kind of file, and its command.
    pub other: (&'static str, &'static str),
    /// Advice for errors without their own, such as those of YAML's syntax.
    pub advice: &'static str,
}

pub fn read(path: &Path, language: &Language) -> Result<String, FileError> {
    let Language {
        noun,
        example,
        shorter,
        ..
    } = language;
    let file = |why: String, help: String| FileError::unreadable(path, why, help);
    let io = |error: std::io::Error| match error.kind() {
        std::io::ErrorKind::NotFound => file(
            "there is no such file".to_owned(),
            format!("name a {noun} file, as in `{example}`"),
        ),
        _ => file(
            format!("cannot be read: {error}"),
            "make the file readable, or name another one".to_owned(),
        ),
    };
    if std::fs::metadata(path).map_err(io)?.is_dir() {
        let all = Path::new(example).with_file_name("*.yaml");
        return Err(file(
            format!("this is a directory, not a {noun} file"),
            format!("name the files in it, as in `{}`", all.display()),
        ));
    }
    // Bounded while reading: a pipe has no known length.
    let mut bytes = Vec::new();
    harness_base::files::open(path)
        .and_then(|opened| opened.take(MAX_FILE + 1).read_to_end(&mut bytes))
        .map_err(io)?;
    if bytes.len() as u64 > MAX_FILE {
        let why = format!("the file has more than {MAX_FILE} bytes");
        return Err(file(
            why,
            format!("use {shorter} instead of writing every step"),
        ));
    }
    String::from_utf8(bytes).map_err(|error| {
        let good = error.utf8_error().valid_up_to();
        let text = String::from_utf8_lossy(&error.as_bytes()[..good]).into_owned();
        let (line, column) = (
            text.matches('\n').count() + 1,
            text.rsplit('\n').next().unwrap_or("").chars().count() + 1,
        );
        let at = Position {
            line: line as u32,
            column: column as u32,
            length: 1,
        };
        let message = format!("byte {} of the file is not UTF-8", good + 1);
        FileError::text(
            Problem::new(at, message).help("save the file as UTF-8"),
            path,
            &text,
        )
    })
}

/// The beginning of a file.
const START: Position = Position {
    line: 1,
    column: 1,
    length: 1,
};

/// Reads the wire types out of a text.
pub fn parse<T: DeserializeOwned>(
    source: &str,
    path: &Path,
    language: &Language,
) -> Result<T, Problem> {
    if source
        .lines()
        .all(|line| line.trim().is_empty() || line.trim_start().starts_with('#'))
    {
        return Err(Problem::new(START, "the file is empty").help(language.shape));
    }
    let options = serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_nodes: MAX_NODES,
            max_events: 2 * MAX_NODES,
        },
        alias_limits: serde_saphyr::alias_limits! {
            max_total_replayed_events: MAX_ALIASED,
        },
        strict_booleans: true,
        with_snippet: false,
    };
    serde_saphyr::from_str_with_options(source, options).map_err(|error| {
        let problem = in_our_words(&error, source, language);
        if !is_of_another_kind(source, language) {
            return problem;
        }
        let (kind, command) = language.other;
        problem.help(format!(
            "this is {kind}: run it with `{command} {}`",
            path.display()
        ))
    })
}

/// Returns whether the file has keys of the other kind only. Looks at the lines, because the keys
/// could not be parsed.
fn is_of_another_kind(source: &str, language: &Language) -> bool {
    let has = |key: &str| {
        source.lines().any(|line| {
            line.strip_prefix(key)
                .is_some_and(|rest| rest.trim_start().starts_with(':'))
        })
    };
    language.foreign.iter().any(|key| has(key)) && !language.own.iter().any(|key| has(key))
}

fn missing_field(field: &str, source: &str, language: &Language) -> (String, String) {
    let missing = missing(source, field, language);
    let missing: Vec<&str> = missing.iter().map(String::as_str).collect();
    match missing.as_slice() {
        [] | [_] if language.required.contains(&field) => (
            format!("the field `{field}` is missing"),
            language.shape.to_owned(),
        ),
        [] | [_] => (
            format!("the field `{field}` is missing"),
            format!("add `{field}: …` to this map"),
        ),
        [others @ .., last] => {
            let fields = others
                .iter()
                .map(|name| format!("`{name}: …`"))
                .collect::<Vec<_>>()
                .join(", ");
            (
                format!(
                    "the fields {} and `{last}` are missing",
                    quoted(others, ", ")
                ),
                format!("add {fields} and `{last}: …` to this map"),
            )
        }
    }
}

/// Rewords an error. Errors that are not listed are YAML syntax errors, which serde-saphyr words
/// well.
fn in_our_words(error: &Error, source: &str, language: &Language) -> Problem {
    let error = error.without_snippet();
    let at = error.location().map_or(START, Position::of);
    let (message, help) = match error {
        Error::AliasError { error, .. } => return in_our_words(error, source, language),
        Error::SerdeUnknownField {
            field, expected, ..
        } => (
            format!("unknown field `{field}`"),
            choices(field, "fields", expected.iter().copied()),
        ),
        Error::SerdeUnknownVariant {
            variant, expected, ..
        } => (
            format!("unknown value `{variant}`"),
            choices(variant, "accepted", expected.iter().copied()),
        ),
        Error::SerdeMissingField { field, .. } => missing_field(field, source, language),
        Error::DuplicateMappingKey { key: Some(key), .. } => (
            format!("the key `{key}` appears twice"),
            "remove one of them".to_owned(),
        ),
        Error::MultipleDocuments { .. } => (
            "a second YAML document begins here".to_owned(),
            format!("put each {} into its own file", language.noun),
        ),
        Error::InvalidScalar { ty, .. } => scalar(ty),
        Error::SerdeInvalidType {
            unexpected,
            expected,
            ..
        }
        | Error::SerdeInvalidValue {
            unexpected,
            expected,
            ..
        } => (
            format!("unexpected {unexpected}"),
            format!("expected {expected}"),
        ),
        Error::RecursiveReferencesRequireWeakTypes { .. } => (
            "the alias is part of its own anchor".to_owned(),
            "write the value in place of the alias".to_owned(),
        ),
        Error::NullIntoString { .. } => (
            "expected text, found nothing".to_owned(),
            "write a value after the colon".to_owned(),
        ),
        Error::Unexpected { expected, .. } => {
            (format!("expected {}", noun(expected)), FORM.to_owned())
        }
        Error::Budget { .. }
        | Error::AliasReplayLimitExceeded { .. }
        | Error::AliasExpansionLimitExceeded { .. }
        | Error::AliasReplayStackDepthExceeded { .. } => {
            let Language { noun, shorter, .. } = language;
            let help = format!(
                "a {noun} has at most {MAX_NODES} values, of which {MAX_ALIASED} come from \
                 aliases; use {shorter} for many operations"
            );
            (format!("the file is too large: {}", plain(error)), help)
        }
        _ => (plain(error), language.advice.to_owned()),
    };
    Problem::new(at, message).help(help)
}

/// Returns the keys that the map without this field lacks. Empty if the map is not found: the file
/// may have aliases or tags.
fn missing(source: &str, field: &str, language: &Language) -> Vec<String> {
    let Ok(file) = serde_saphyr::from_str::<Value>(source) else {
        return Vec::new();
    };
    lacking(&file, field, language).unwrap_or_default()
}

/// Looks at the inner maps first, as the parser does.
fn lacking(value: &Value, field: &str, language: &Language) -> Option<Vec<String>> {
    match value {
        Value::Array(items) => items.iter().find_map(|item| lacking(item, field, language)),
        Value::Object(fields) => fields.iter().find_map(|(key, inner)| {
            lacking(inner, field, language).or_else(|| {
                let has = |name: &String| {
                    inner
                        .as_object()
                        .is_none_or(|inner| inner.contains_key(name))
                };
                let missing: Vec<String> = (language.required_by)(key)
                    .into_iter()
                    .filter(|name| !has(name))
                    .collect();
                missing.iter().any(|name| name == field).then_some(missing)
            })
        }),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => None,
    }
}

const FORM: &str = "write fields as a map, as in `alloc: { buffer: a, size: 1MiB }`, and lists in \
     brackets or with `- ` before each item";

fn noun(expected: &str) -> &str {
    match expected {
        "mapping start" => "a map of fields",
        "sequence start" => "a list",
        "string scalar" => "text",
        other => other,
    }
}

/// The message and the advice for a scalar that is not of this type of Rust.
fn scalar(ty: &str) -> (String, String) {
    let (wanted, help) = match ty.as_bytes().first() {
        Some(b'u' | b'i') => (
            "a whole number from 0 to 18446744073709551615",
            "digits only, as in `3`",
        ),
        Some(b'f') => ("a number", "digits and a point, as in `0.5`"),
        _ => ("`true` or `false`", "`true` or `false`"),
    };
    (format!("expected {wanted}"), format!("write {help}"))
}

/// The error's text without its position, which our message already has.
fn plain(error: &Error) -> String {
    let text = error.to_string();
    let end = [" at line ", ": line "]
        .iter()
        .filter_map(|mark| text.find(mark))
        .min()
        .unwrap_or(text.len());
    text[..end].trim().to_owned()
}
