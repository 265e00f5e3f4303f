//! All output of the program: results on standard output ([`print`]), messages on standard error
//! ([`message`], [`fail`]).
//!
//! [`print`] and [`message`] escape all control characters, because file names, devices and traces
//! may contain some. Documents that define their own escapes go through [`print_document`].

use std::fmt::{self, Display};
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::{ffi::OsStr, os::fd::AsFd, path::Path};

use clap::ValueEnum;
use harness_base::files;
use harness_base::printable::{for_terminal, printable_lines};
use harness_report::terminal::Style;
use indicatif::{ProgressBar, ProgressStyle};
use miette::{
    Diagnostic, GraphicalTheme, LabeledSpan, MietteHandlerOpts, ReportHandler, SourceCode,
    ThemeStyles,
};
use serde_json::Value;

use super::error::{CliError, Failures};
use super::exit::Exit;

/// The key of a document's version.
const VERSION: &str = "version";

/// Width of messages if standard error is not a terminal: wide enough for most paths.
const WIDTH_OF_FILES: usize = 120;

/// `true` if colours pass through [`print`] and [`message`].
static COLOUR_OUT: AtomicBool = AtomicBool::new(false);
static COLOUR_ERR: AtomicBool = AtomicBool::new(false);

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ColorChoice {
    Auto,
    Always,
    Never,
}

pub(crate) fn choose_colour(choice: ColorChoice) {
    let (no_color, term) = (std::env::var_os("NO_COLOR"), std::env::var_os("TERM"));
    let colour = |is_terminal: bool| match choice {
        ColorChoice::Auto => is_terminal && shows_colour(no_color.as_deref(), term.as_deref()),
        ColorChoice::Always => true,
        ColorChoice::Never => false,
    };
    COLOUR_OUT.store(colour(io::stdout().is_terminal()), Ordering::Relaxed);
    COLOUR_ERR.store(colour(io::stderr().is_terminal()), Ordering::Relaxed);
}

pub(crate) fn style() -> Style {
    if COLOUR_OUT.load(Ordering::Relaxed) {
        Style::Colour
    } else {
        Style::Plain
    }
}

pub(crate) fn style_of_messages() -> Style {
    if COLOUR_ERR.load(Ordering::Relaxed) {
        Style::Colour
    } else {
        Style::Plain
    }
}

/// Shows all errors on standard error. Returns the exit code of the first.
pub(crate) fn fail(Failures(errors): Failures) -> Exit {
    let exit = errors.first().map_or(Exit::Internal, CliError::exit);
    errors.into_iter().for_each(show);
    exit
}

fn show(error: CliError) {
    struct Shown<'a>(&'a dyn ReportHandler, &'a Printable);
    impl fmt::Debug for Shown<'_> {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            self.0.debug(self.1, f)
        }
    }
    let styles = if COLOUR_ERR.load(Ordering::Relaxed) {
        ThemeStyles::ansi()
    } else {
        ThemeStyles::none()
    };
    let theme = GraphicalTheme {
        styles,
        ..GraphicalTheme::unicode()
    };
    // Our messages contain their causes.
    let options = MietteHandlerOpts::new()
        .without_cause_chain()
        .terminal_links(false)
        .break_words(false)
        .graphical_theme(theme)
        .force_graphical(true);
    let width = if io::stderr().is_terminal() {
        None
    } else {
        Some(WIDTH_OF_FILES)
    };
    let options = width.into_iter().fold(options, MietteHandlerOpts::width);
    message(format_args!(
        "{:?}",
        Shown(&options.build(), &Printable::new(error))
    ));
}

/// An error with escaped message and help. [`harness_base::excerpt`] escapes the excerpt.
#[derive(Debug)]
struct Printable {
    message: String,
    help: Option<String>,
    error: CliError,
}

impl Printable {
    fn new(error: CliError) -> Self {
        let shown = |text: &dyn Display| printable_lines(&text.to_string()).into_owned();
        Self {
            message: shown(&error),
            help: error.help().map(|help| shown(&help)),
            error,
        }
    }
}

impl Display for Printable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Printable {}

impl Diagnostic for Printable {
    fn help<'a>(&'a self) -> Option<Box<dyn Display + 'a>> {
        self.help
            .as_ref()
            .map(|help| Box::new(help) as Box<dyn Display>)
    }

    fn source_code(&self) -> Option<&dyn SourceCode> {
        self.error.source_code()
    }

    fn labels(&self) -> Option<Box<dyn Iterator<Item = LabeledSpan> + '_>> {
        self.error.labels()
    }
}

/// Columns of the terminal on standard output; `None` if it is not a terminal.
pub(crate) fn width_of_output() -> Option<usize> {
    width_of(io::stdout())
}

/// Columns of the terminal on standard error; `None` if it is not a terminal.
pub(crate) fn width_of_messages() -> Option<usize> {
    width_of(io::stderr())
}

fn width_of(stream: impl AsFd) -> Option<usize> {
    terminal_size::terminal_size_of(stream)
        .map(|(width, _)| usize::from(width.0))
        .filter(|&columns| columns > 0)
}

/// Returns whether the variables `NO_COLOR` (<https://no-color.org>) and `TERM` permit colour. A
/// dumb terminal prints escape codes as text.
fn shows_colour(no_color: Option<&OsStr>, term: Option<&OsStr>) -> bool {
    no_color.is_none_or(OsStr::is_empty) && term.is_none_or(|term| term != "dumb")
}

pub(crate) fn print(text: &str) -> Result<(), CliError> {
    print_document(&for_terminal(text, COLOUR_OUT.load(Ordering::Relaxed)))
}

/// Writes a document, for example JSON or HTML, to standard output. A reader that closes the pipe,
/// as in `harness list | head`, is no error.
pub(crate) fn print_document(text: &str) -> Result<(), CliError> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        other => other.map_err(|error| {
            CliError::output(
                None,
                &error,
                "free disk space, or redirect the output to another place",
            )
        }),
    }
}

/// Shows a long text in the program of PAGER if standard output is a terminal.
pub(crate) fn page(text: &str) -> Result<(), CliError> {
    let chosen = std::env::var("PAGER").unwrap_or_else(|_| "less".to_owned());
    let mut words = chosen.split_whitespace();
    let (Some(program), true) = (words.next(), io::stdout().is_terminal()) else {
        return print(text);
    };
    let mut pager = Command::new(program);
    pager.args(words).stdin(Stdio::piped());
    // Less ends if the text fits on the screen, and shows colours.
    if std::env::var_os("LESS").is_none() {
        pager.env("LESS", "FRX");
    }
    let Ok(mut pager) = pager.spawn() else {
        return print(text);
    };
    if let Some(mut input) = pager.stdin.take() {
        // A reader that quits early closes the pipe.
        let shown = for_terminal(text, COLOUR_OUT.load(Ordering::Relaxed));
        let _ = input.write_all(shown.as_bytes());
    }
    let _ = pager.wait();
    Ok(())
}

/// Writes a file that the user named.
pub(crate) fn save(path: &Path, content: impl AsRef<[u8]>) -> Result<(), CliError> {
    files::write(path, content).map_err(CliError::unwritten(path))
}

/// Writes the picture next to a report, and returns its file name.
pub(crate) fn save_picture(report: &Path, svg: &str) -> Result<Option<String>, CliError> {
    let picture = report.with_extension("svg");
    save(&picture, svg)?;
    Ok(picture
        .file_name()
        .map(|name| name.to_string_lossy().into_owned()))
}

/// Writes a line to standard error, without control characters. Errors are ignored: a closed pipe
/// changes neither the work nor the exit code.
pub(crate) fn message(line: impl Display) {
    let line = format!("{line}\n");
    // One write per line keeps the lines of several processes apart.
    let _ = io::stderr()
        .lock()
        .write_all(for_terminal(&line, COLOUR_ERR.load(Ordering::Relaxed)).as_bytes());
}

/// A progress bar on standard error if that is a terminal and `is_shown`. Without a `length` it is
/// a spinner.
pub(crate) fn progress(is_shown: bool, template: &str, length: Option<u64>) -> ProgressBar {
    if !is_shown || !io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = length.map_or_else(ProgressBar::new_spinner, ProgressBar::new);
    // With an invalid template, indicatif keeps its own.
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar
}

/// The version of the JSON documents that have no version of their own. A field that is removed or
/// renamed, or that gets another meaning or unit, raises it. A new field does not.
pub(crate) const JSON_VERSION: u32 = 1;

/// A document as text. An object without a version begins with [`JSON_VERSION`].
pub(crate) fn json(document: &impl serde::Serialize) -> Result<String, CliError> {
    let internal = |error: serde_json::Error| {
        CliError::internal(error.to_string(), "report this with the command")
    };
    let mut document = serde_json::to_value(document).map_err(internal)?;
    if let Value::Object(fields) = &mut document
        && !fields.contains_key(VERSION)
    {
        fields.shift_insert(0, VERSION.to_owned(), JSON_VERSION.into());
    }
    Ok(format!("{document:#}\n"))
}

pub(crate) fn print_json(document: &impl serde::Serialize) -> Result<(), CliError> {
    print_document(&json(document)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dumb_terminal_and_the_variable_no_color_switch_colour_off() {
        let shown = |no_color: Option<&str>, term: Option<&str>| {
            shows_colour(no_color.map(OsStr::new), term.map(OsStr::new))
        };
        assert!(
            shown(None, Some("xterm-256color"))
                && shown(None, None)
                && shown(Some(""), Some("xterm"))
        );
        assert!(
            !shown(None, Some("dumb"))
                && !shown(Some("1"), Some("xterm"))
                && !shown(Some(""), Some("dumb"))
        );
    }
}
