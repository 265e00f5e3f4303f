//! [`fork`] copies this process. The copy continues from the same point in the program.
//!
//! The copy has only the thread that made it. Locks held by other threads at that moment stay locked in the copy. Therefore a
//! process forks before it starts threads, or while its threads hold nothing that the copy needs.

use std::io;
use std::mem::ManuallyDrop;
use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;
use std::ptr;

use libc::{c_int, pid_t};

use crate::process::End;

/// Identifies the process that `fork` returned in.
#[derive(Debug)]
pub enum Forked {
    /// The original process.
    Original(ForkedChild),
    /// The copy. It must end with [`leave`].
    Copy,
}

/// The original's handle of a copy. Dropping it kills a copy that has not been waited for.
#[derive(Debug)]
pub struct ForkedChild(pid_t);

/// Signals that a terminal sends to all its programs. The copy ignores them; the original decides.
const OF_TERMINALS: [c_int; 3] = [libc::SIGINT, libc::SIGQUIT, libc::SIGHUP];

/// Copies this process. The copy is killed when the thread that made it ends.
pub fn fork() -> io::Result<Forked> {
    let original = std::process::id() as pid_t;
    // SAFETY: takes no arguments. The copy has all memory of this process and only the calling thread. The GNU C library keeps
    // its own locks usable in both (<https://sourceware.org/glibc/manual/latest/html_node/Creating-a-Process.html>); the module's
    // documentation states the rule for other locks.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            end_with(original);
            Ok(Forked::Copy)
        }
        copy => Ok(Forked::Original(ForkedChild(copy))),
    }
}

/// Makes this copy end with its original and ignore the terminal's signals.
fn end_with(original: pid_t) {
    // SAFETY: these calls take integers only; no handler of these signals matters in a copy.
    let parent = unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        for signal in OF_TERMINALS {
            libc::signal(signal, libc::SIG_IGN);
        }
        libc::getppid()
    };
    // The original may have ended before the call to prctl.
    if parent != original {
        leave(1);
    }
}

/// Ends this process without running destructors and without writing buffers inherited from the original.
pub fn leave(exit_code: u8) -> ! {
    // SAFETY: takes an integer and does not return.
    unsafe { libc::_exit(c_int::from(exit_code)) }
}

impl ForkedChild {
    /// Waits for the copy to end.
    pub fn wait(self) -> io::Result<End> {
        ManuallyDrop::new(self).reap()
    }

    fn reap(&self) -> io::Result<End> {
        let mut status = 0;
        loop {
            // SAFETY: the status is writable. Nothing else waits for the copy, so its process ID is still valid.
            let waited = unsafe { libc::waitpid(self.0, ptr::from_mut(&mut status), 0) };
            let error = io::Error::last_os_error();
            match waited {
                -1 if error.kind() == io::ErrorKind::Interrupted => {}
                -1 => return Err(error),
                _ => return Ok(ExitStatus::from_raw(status).into()),
            }
        }
    }
}

impl Drop for ForkedChild {
    fn drop(&mut self) {
        // SAFETY: takes integers only. Nothing has waited for the copy, so its process ID is still valid.
        unsafe { libc::kill(self.0, libc::SIGKILL) };
        // It was killed, so this returns soon.
        let _ = self.reap();
    }
}

#[cfg(test)]
mod tests;
