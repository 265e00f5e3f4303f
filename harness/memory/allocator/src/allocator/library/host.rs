//! [`Host`]: the process that runs a library, from the harness's view.

use std::io::{self, BufReader};
use std::os::fd::OwnedFd;
use std::os::unix::{net::UnixStream, process::ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::{env, sync::OnceLock};

use super::wire::{self, Order, Reply};

/// The subcommand of `harness` that runs a library.
const SUBCOMMAND: &str = "library-host";

static PROGRAM: OnceLock<PathBuf> = OnceLock::new();

/// Sets the path of the program `harness`, for processes that are another program, such as tests.
/// Only the first call counts.
pub fn name_program(path: PathBuf) {
    PROGRAM.get_or_init(|| path);
}

/// The path of the program `harness`: this process's own, unless set otherwise.
pub fn program() -> io::Result<PathBuf> {
    PROGRAM.get().cloned().map_or_else(env::current_exe, Ok)
}

/// A process with a library, and the socket that is its standard input.
#[derive(Debug)]
pub(super) struct Host {
    process: Child,
    socket: BufReader<UnixStream>,
}

impl Host {
    /// Starts the process. Its output goes to standard error, because the harness's results go to
    /// standard output.
    pub(super) fn start(library: &Path) -> Result<Self, String> {
        let start = |program: PathBuf| -> io::Result<Self> {
            let (ours, theirs) = UnixStream::pair()?;
            let mut command = Command::new(program);
            command
                .arg(SUBCOMMAND)
                .arg(library)
                .stdin(OwnedFd::from(theirs))
                .stdout(Stdio::from(io::stderr()));
            let process = command.spawn()?;
            Ok(Self {
                process,
                socket: BufReader::new(ours),
            })
        };
        program()
            .and_then(start)
            .map_err(|error| format!("cannot start its process: {error}"))
    }

    /// Sends an order or an answer. If the process has ended, the next [`Host::receive`] reports
    /// it.
    pub(super) fn send(&mut self, order: &Order) {
        let _ = wire::send(self.socket.get_mut(), order);
    }

    /// Waits for the next message, or returns `None` if the process has ended.
    pub(super) fn receive(&mut self) -> Option<Reply> {
        wire::receive(&mut self.socket).ok().flatten()
    }

    /// Ends the process and describes how it ended, unless it ended normally.
    pub(super) fn end(&mut self) -> Result<(), String> {
        match self.process.wait() {
            Ok(status) if status.success() => Ok(()),
            Ok(status) => Err(how(status)),
            Err(error) => Err(format!("its process cannot be waited for ({error})")),
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // A process that was asked to end has ended. Another one is stuck or useless.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn how(status: ExitStatus) -> String {
    let Some(signal) = status.signal() else {
        return format!(
            "it ended its process with code {}",
            status.code().unwrap_or_default()
        );
    };
    let name = match signal {
        4 => "SIGILL",
        6 => "SIGABRT",
        7 => "SIGBUS",
        8 => "SIGFPE",
        9 => "SIGKILL",
        11 => "SIGSEGV",
        15 => "SIGTERM",
        _ => return format!("signal {signal} ended its process"),
    };
    format!("{name} ended its process")
}
