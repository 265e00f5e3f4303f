//! Where output goes: results to standard output ([`print`]), everything else to standard error ([`tell`]), colour only where it is wanted.

use std::ffi::OsStr;
use std::fmt::Display;
use std::io::{self, ErrorKind, IsTerminal, Write};

use harness_report::text::Style;
use miette::{GraphicalTheme, MietteHandlerOpts, ReportHandler, ThemeStyles};

use super::ColorChoice;
use super::error::CliError;

/// Width of messages where standard error is no terminal: wide enough for most paths.
const WIDTH_OF_FILES: usize = 120;

/// What is known of where the output goes.
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
        Self { colour_out: colour(io::stdout().is_terminal()), colour_err: colour(io::stderr().is_terminal()) }
    }

    /// How results are written.
    pub(crate) const fn style(&self) -> Style {
        if self.colour_out { Style::Colour } else { Style::Plain }
    }

    /// Shows an error on standard error.
    pub(crate) fn show(&self, report: miette::Report) {
        struct Shown<'a>(&'a dyn ReportHandler, &'a miette::Report);
        impl std::fmt::Debug for Shown<'_> {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                self.0.debug(self.1.as_ref(), f)
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
        let options = if io::stderr().is_terminal() { options } else { options.width(WIDTH_OF_FILES) };
        tell(format_args!("{:?}", Shown(&options.build(), &report)));
    }
}

/// Whether a terminal is to be sent colour, by the variables `NO_COLOR` (set and not empty, as <https://no-color.org> has it) and `TERM`: a
/// dumb terminal prints escape codes as they are.
fn shows_colour(no_color: Option<&OsStr>, term: Option<&OsStr>) -> bool {
    no_color.is_none_or(OsStr::is_empty) && term.is_none_or(|term| term != "dumb")
}

/// Writes to standard output. A reader that has gone away, as in `harness list | head`, wants nothing more.
pub(crate) fn print(text: &str) -> Result<(), CliError> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        other => other.map_err(|error| CliError::Output { target: None, error, help: "make room, or send the output elsewhere" }),
    }
}

/// Writes a line to standard error. One that nobody can read, as in `harness run 2>&1 | head`, is no reason to stop or to end otherwise.
pub(crate) fn tell(line: impl Display) {
    // In one piece, so that lines of several processes do not mix.
    let _ = io::stderr().lock().write_all(format!("{line}\n").as_bytes());
}

/// Writes a document to standard output.
pub(crate) fn print_json(document: &impl serde::Serialize) -> Result<(), CliError> {
    let internal = |error: serde_json::Error| CliError::Internal { message: error.to_string(), help: "report this with the command" };
    let text = serde_json::to_string_pretty(document).map_err(internal)?;
    print(&format!("{text}\n"))
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
