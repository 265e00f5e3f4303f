//! Where output goes: results to standard output ([`print`]), everything else to standard error ([`tell`], [`Terminal::fail`]), colour only where
//! it is wanted.

use std::ffi::OsStr;
use std::fmt::{self, Display};
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use clap::ValueEnum;
use harness_base::printable::{for_terminal, printable_lines};
use harness_report::text::Style;
use indicatif::{ProgressBar, ProgressStyle};
use miette::{Diagnostic, GraphicalTheme, LabeledSpan, MietteHandlerOpts, ReportHandler, SourceCode, ThemeStyles};
use terminal_size::{Height, Width};

use super::error::{CliError, Failures};
use super::exit::Exit;

/// Width of messages where standard error is no terminal: wide enough for most paths.
const WIDTH_OF_FILES: usize = 120;

/// Whether standard output and standard error show colors. Without colors, every escape sequence is escaped.
static COLORS: [AtomicBool; 2] = [AtomicBool::new(false), AtomicBool::new(false)];

/// When to use colour.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ColorChoice {
    Auto,
    Always,
    Never,
}

/// Where colour is used.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terminal {
    colour_out: bool,
    colour_err: bool,
}

impl Terminal {
    pub(crate) fn new(choice: ColorChoice) -> Self {
        let (no_color, term) = (std::env::var_os("NO_COLOR"), std::env::var_os("TERM"));
        let colour = |is_terminal: bool| match choice {
            ColorChoice::Auto => is_terminal && shows_colour(no_color.as_deref(), term.as_deref()),
            ColorChoice::Always => true,
            ColorChoice::Never => false,
        };
        let [colour_out, colour_err] = [colour(io::stdout().is_terminal()), colour(io::stderr().is_terminal())];
        COLORS[0].store(colour_out, Ordering::Relaxed);
        COLORS[1].store(colour_err, Ordering::Relaxed);
        Self { colour_out, colour_err }
    }

    /// How results are written.
    pub(crate) const fn style(&self) -> Style {
        if self.colour_out { Style::Colour } else { Style::Plain }
    }

    /// How messages are written.
    pub(crate) const fn style_of_messages(&self) -> Style {
        if self.colour_err { Style::Colour } else { Style::Plain }
    }

    /// Shows all of them on standard error. The exit code is that of the first.
    pub(crate) fn fail(&self, Failures(errors): Failures) -> Exit {
        let exit = errors.first().map_or(Exit::Internal, CliError::exit);
        for error in errors {
            self.show(error);
        }
        exit
    }

    fn show(&self, error: CliError) {
        struct Shown<'a>(&'a dyn ReportHandler, &'a Printable);
        impl fmt::Debug for Shown<'_> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.debug(self.1, f)
            }
        }
        let styles = if self.colour_err { ThemeStyles::ansi() } else { ThemeStyles::none() };
        let theme = GraphicalTheme { styles, ..GraphicalTheme::unicode() };
        // Our messages tell their causes themselves.
        let options = MietteHandlerOpts::new()
            .without_cause_chain()
            .terminal_links(false)
            .break_words(false)
            .graphical_theme(theme)
            .force_graphical(true);
        let width = if io::stderr().is_terminal() { None } else { Some(WIDTH_OF_FILES) };
        let options = width.into_iter().fold(options, MietteHandlerOpts::width);
        tell(format_args!("{:?}", Shown(&options.build(), &Printable::new(error))));
    }
}

/// An error whose message and help can do nothing to a terminal. Its excerpt can do nothing either: [`harness_base::excerpt`] sees to that.
#[derive(Debug)]
struct Printable {
    message: String,
    help: Option<String>,
    error: CliError,
}

impl Printable {
    fn new(error: CliError) -> Self {
        let shown = |text: &dyn Display| printable_lines(&text.to_string()).into_owned();
        Self { message: shown(&error), help: error.help().map(|help| shown(&help)), error }
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
        self.help.as_ref().map(|help| Box::new(help) as Box<dyn Display>)
    }

    fn source_code(&self) -> Option<&dyn SourceCode> {
        self.error.source_code()
    }

    fn labels(&self) -> Option<Box<dyn Iterator<Item = LabeledSpan> + '_>> {
        self.error.labels()
    }
}

/// Columns of the terminal that standard output is; `None` where it is none.
pub(crate) fn width_of_output() -> Option<usize> {
    width_of(terminal_size::terminal_size_of(io::stdout()))
}

/// Columns of the terminal that standard error is; `None` where it is none.
pub(crate) fn width_of_messages() -> Option<usize> {
    width_of(terminal_size::terminal_size_of(io::stderr()))
}

fn width_of(size: Option<(Width, Height)>) -> Option<usize> {
    size.map(|(Width(columns), _)| usize::from(columns)).filter(|&columns| columns > 0)
}

/// Whether a terminal is to be sent colour, by the variables `NO_COLOR` (set and not empty, as <https://no-color.org> has it) and `TERM`: a
/// dumb terminal prints escape codes as they are.
fn shows_colour(no_color: Option<&OsStr>, term: Option<&OsStr>) -> bool {
    no_color.is_none_or(OsStr::is_empty) && term.is_none_or(|term| term != "dumb")
}

/// Writes to standard output. A reader that has gone away, as in `harness list | head`, wants nothing more.
pub(crate) fn print(text: &str) -> Result<(), CliError> {
    print_document(&for_terminal(text, COLORS[0].load(Ordering::Relaxed)))
}

/// Writes a document for programs to standard output, without escapes.
pub(crate) fn print_document(text: &str) -> Result<(), CliError> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        other => other.map_err(|error| CliError::Output { target: None, error, help: "make room, or send the output elsewhere" }),
    }
}

/// Writes a line to standard error. One that nobody can read, as in `harness run 2>&1 | head`, is no reason to stop or to end otherwise.
pub(crate) fn tell(line: impl Display) {
    // In one piece, so that lines of several processes do not mix.
    let line = format!("{line}\n");
    let _ = io::stderr().lock().write_all(for_terminal(&line, COLORS[1].load(Ordering::Relaxed)).as_bytes());
}

/// A bar on standard error for so many things to do, if that is a terminal.
pub(crate) fn progress(is_wanted: bool, template: &str, length: u64) -> ProgressBar {
    if !is_wanted || !io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(length);
    // A template that indicatif does not understand leaves its own, which is good enough.
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar
}

/// Writes a document to standard output.
pub(crate) fn print_json(document: &impl serde::Serialize) -> Result<(), CliError> {
    let internal = |error: serde_json::Error| CliError::Internal { message: error.to_string(), help: "report this with the command" };
    let text = serde_json::to_string_pretty(document).map_err(internal)?;
    print_document(&format!("{text}\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dumb_terminal_and_one_where_colour_is_refused_get_none() {
        let shown = |no_color: Option<&str>, term: Option<&str>| shows_colour(no_color.map(OsStr::new), term.map(OsStr::new));
        assert!(shown(None, Some("xterm-256color")) && shown(None, None) && shown(Some(""), Some("xterm")));
        assert!(!shown(None, Some("dumb")) && !shown(Some("1"), Some("xterm")) && !shown(Some(""), Some("dumb")));
    }
}
