//! `--open`: shows a page in the user's browser.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use std::{env, thread};

use clap::Args;

use super::terminal;

/// A browser that runs for longer shows the page.
const ANSWERS_WITHIN: Duration = Duration::from_secs(2);
const POLL: Duration = Duration::from_millis(20);

/// The openers of desktops: of the freedesktop.org standards, and of WSL.
const OPENERS: [&str; 2] = ["xdg-open", "wslview"];

#[derive(Args, Clone, Copy, Debug, Default)]
pub(super) struct Browser {
    /// Open the page in a browser: the variable BROWSER, else `xdg-open` or `wslview`.
    #[arg(long = "open")]
    is_asked_for: bool,
}

impl Browser {
    pub(super) const fn is_asked_for(self) -> bool {
        self.is_asked_for
    }

    /// Opens a page if the user asked for it. A missing browser changes no result, so it is a
    /// message.
    pub(super) fn show(self, page: &Path) {
        if !self.is_asked_for {
            return;
        }
        let page = page.canonicalize().unwrap_or_else(|_| page.to_owned());
        if !commands().iter().any(|command| opens(command, &page)) {
            terminal::message(format_args!(
                "no browser opened the page; set BROWSER, or open {}",
                page.display()
            ));
        }
    }
}

/// The commands to try. BROWSER is a list with colons, whose entries may contain options, and `%s`
/// for the page.
fn commands() -> Vec<String> {
    let chosen = env::var("BROWSER").unwrap_or_default();
    let chosen = chosen.split(':').filter(|command| !command.is_empty());
    let is_desktop = ["DISPLAY", "WAYLAND_DISPLAY", "WSL_DISTRO_NAME"]
        .iter()
        .any(|name| env::var_os(name).is_some());
    // Without a display, xdg-open prints an error or starts a browser in the terminal.
    let openers = OPENERS.into_iter().filter(|_| is_desktop);
    chosen.chain(openers).map(str::to_owned).collect()
}

/// Returns whether the command starts, and does not end with an error within two seconds.
fn opens(command: &str, page: &Path) -> bool {
    let has_place = command.contains("%s");
    let mut words = command.split_whitespace();
    let Some(program) = words.next() else {
        return false;
    };
    let shown = page.to_string_lossy();
    let mut opener = Command::new(program);
    opener.args(words.map(|word| word.replace("%s", &shown)));
    if !has_place {
        opener.arg(page);
    }
    let quiet = opener
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let Ok(mut child) = quiet.spawn() else {
        return false;
    };
    let begun = Instant::now();
    while begun.elapsed() < ANSWERS_WITHIN {
        match child.try_wait() {
            Ok(Some(status)) => return status.success(),
            Ok(None) => thread::sleep(POLL),
            Err(_) => return true,
        }
    }
    true
}
