//! [`fork`] copies this process. The copy continues from the same point in the program.
//!
//! The copy has only the thread that made it. Locks held by other threads at that moment stay
//! locked in the copy. Therefore a process forks before it starts threads, or while its threads
//! hold nothing that the copy needs.

use std::{io, mem::ManuallyDrop};

use nix::sys::prctl;
use nix::sys::signal::{self, SigHandler, Signal};
use nix::unistd::{self, ForkResult, Pid};

use crate::process::{End, reap};

#[derive(Debug)]
pub enum Forked {
    Original(ForkedChild),
    /// The copy. It must end with [`leave`].
    Copy,
}

/// The original's handle of a copy. Dropping it kills a copy that has not been waited for.
#[derive(Debug)]
pub struct ForkedChild(Pid);

/// Signals that a terminal sends to all its programs. The copy ignores them; the original decides.
const OF_TERMINALS: [Signal; 3] = [Signal::SIGINT, Signal::SIGQUIT, Signal::SIGHUP];

pub fn fork() -> io::Result<Forked> {
    let original = Pid::this();
    // SAFETY: the copy has all memory of this process and only the calling thread. The GNU C
    // library keeps its own locks usable in both
    // (<https://sourceware.org/glibc/manual/latest/html_node/Creating-a-Process.html>); the
    // module's documentation states the rule for other locks.
    match unsafe { unistd::fork() }? {
        ForkResult::Child => {
            end_with(original);
            Ok(Forked::Copy)
        }
        ForkResult::Parent { child } => Ok(Forked::Original(ForkedChild(child))),
    }
}

/// Makes this copy end with its original and ignore the terminal's signals.
fn end_with(original: Pid) {
    let _ = prctl::set_pdeathsig(Signal::SIGKILL);
    for signal in OF_TERMINALS {
        // SAFETY: no handler of these signals matters in a copy.
        let _ = unsafe { signal::signal(signal, SigHandler::SigIgn) };
    }
    // The original may have ended before the call to prctl.
    if Pid::parent() != original {
        leave(1);
    }
}

/// Ends this process without running destructors and without writing buffers inherited from the
/// original.
pub fn leave(exit_code: u8) -> ! {
    // SAFETY: takes an integer and does not return.
    unsafe { libc::_exit(exit_code.into()) }
}

impl ForkedChild {
    pub fn wait(self) -> io::Result<End> {
        reap(ManuallyDrop::new(self).0)
    }
}

impl Drop for ForkedChild {
    fn drop(&mut self) {
        // Nothing has waited for the copy, so its process ID is still valid.
        let _ = signal::kill(self.0, Signal::SIGKILL);
        // It was killed, so this returns soon.
        let _ = reap(self.0);
    }
}

#[cfg(test)]
mod tests;
