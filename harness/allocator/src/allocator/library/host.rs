//! [`Host`]: the process that a library runs in, as the harness sees it.

use std::env;
use std::io::{self, BufReader};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;

use super::LibrarySpec;
use super::wire::{self, Order, Reply};

/// The subcommand of the program that serves a library.
const SUBCOMMAND: &str = "library-host";

static PROGRAM: OnceLock<PathBuf> = OnceLock::new();

/// Names the program `harness`, where this process is another one, as a test is. Only the first name counts.
pub fn name_program(path: PathBuf) {
    PROGRAM.get_or_init(|| path);
}

/// The program `harness`: this process's own, where no other was named.
///
/// # Errors
/// That the system does not tell it.
pub fn program() -> io::Result<PathBuf> {
    PROGRAM.get().cloned().map_or_else(env::current_exe, Ok)
}

/// A process with a library in it, and the socket that leads to it: the process has it as its standard input.
#[derive(Debug)]
pub(super) struct Host {
    process: Child,
    socket: BufReader<UnixStream>,
}

impl Host {
    /// Starts the process. What it writes goes to standard error: standard output has the results of the harness.
    pub(super) fn start(spec: &LibrarySpec) -> Result<Self, String> {
        let start = |program: PathBuf| -> io::Result<Self> {
            let (ours, theirs) = UnixStream::pair()?;
            let mut command = Command::new(program);
            command.arg(SUBCOMMAND).arg(&spec.path).args(spec.functions().map(|(key, name)| format!("--{}={name}", key.replace('_', "-"))));
            let process = command.stdin(OwnedFd::from(theirs)).stdout(Stdio::from(io::stderr())).spawn()?;
            Ok(Self { process, socket: BufReader::new(ours) })
        };
        program().and_then(start).map_err(|error| format!("the process for it cannot be started: {error}"))
    }

    /// Gives an order, or an answer. Where the process has gone, the next [`Host::receive`] says so.
    pub(super) fn send(&mut self, order: &Order) {
        let _ = wire::send(self.socket.get_mut(), order);
    }

    /// What the process says next; `None` where it has gone.
    pub(super) fn receive(&mut self) -> Option<Reply> {
        wire::receive(&mut self.socket).ok().flatten()
    }

    /// How it ended. Where not as a program does that has done its work, in words.
    pub(super) fn end(&mut self) -> Result<(), String> {
        match self.process.wait() {
            Ok(status) if status.success() => Ok(()),
            Ok(status) => Err(how(status)),
            Err(error) => Err(format!("its process was lost ({error})")),
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // One that was told to end has ended; another one is stuck, or of no use any more.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn how(status: ExitStatus) -> String {
    let Some(signal) = status.signal() else { return format!("it ended its process with code {}", status.code().unwrap_or_default()) };
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
