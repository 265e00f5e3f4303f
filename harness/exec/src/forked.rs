//! Copies of this process: [`fork`] makes one, which goes on from the same place in the program and does something of its own.
//!
//! A copy has the thread that made it and no other one. What other threads hold locked at that moment stays locked in it, so a process forks before it starts
//! threads, or while none of them does anything that the copy needs.

use std::io;
use std::mem::ManuallyDrop;
use std::ptr;

use libc::{c_int, pid_t};

use crate::process::End;

/// Which of the two processes this is.
#[derive(Debug)]
pub enum Forked {
    /// The one that forked.
    Original(Copied),
    /// The copy. It ends by [`leave`].
    Copy,
}

/// A copy, as the one that forked has it. Where nobody has waited for it, it is killed with this.
#[derive(Debug)]
pub struct Copied(pid_t);

/// Signals that a terminal sends to all of its programs: what becomes of a copy, its original decides.
const OF_TERMINALS: [c_int; 3] = [libc::SIGINT, libc::SIGQUIT, libc::SIGHUP];

/// Makes a copy of this process, which is killed where the thread that made it ends.
///
/// # Errors
/// That there is no room for it.
pub fn fork() -> io::Result<Forked> {
    let original = std::process::id() as pid_t;
    // SAFETY: takes nothing. The copy has all memory of this process, and of its threads the one that runs here: the GNU C library keeps its own locks in
    // order in both (<https://sourceware.org/glibc/manual/latest/html_node/Creating-a-Process.html>), and of other locks the module says what is asked of callers.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            end_with(original);
            Ok(Forked::Copy)
        }
        copy => Ok(Forked::Original(Copied(copy))),
    }
}

/// Has this copy end with its original, and by nothing that a terminal sends.
fn end_with(original: pid_t) {
    // SAFETY: these calls take integers only; nobody relies on a handler of these signals in a copy.
    let parent = unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        for signal in OF_TERMINALS {
            libc::signal(signal, libc::SIG_IGN);
        }
        libc::getppid()
    };
    // It may have ended before this one asked to be told.
    if parent != original {
        leave(1);
    }
}

/// Ends this process at once: nothing is dropped, and nothing written that the original had begun to write.
pub fn leave(exit_code: u8) -> ! {
    // SAFETY: takes an integer and does not return.
    unsafe { libc::_exit(c_int::from(exit_code)) }
}

impl Copied {
    /// Waits for its end.
    ///
    /// # Errors
    /// What the system says.
    pub fn wait(self) -> io::Result<End> {
        ManuallyDrop::new(self).reap()
    }

    fn reap(&self) -> io::Result<End> {
        let mut status = 0;
        loop {
            // SAFETY: the status may be written. Nobody else waits for the copy, so the number is its own.
            let waited = unsafe { libc::waitpid(self.0, ptr::from_mut(&mut status), 0) };
            let error = io::Error::last_os_error();
            match waited {
                -1 if error.kind() == io::ErrorKind::Interrupted => {}
                -1 => return Err(error),
                _ if libc::WIFSIGNALED(status) => return Ok(End::Signal((libc::WTERMSIG(status) & 0x7f) as u8)),
                _ => return Ok(End::Code((libc::WEXITSTATUS(status) & 0xff) as u8)),
            }
        }
    }
}

impl Drop for Copied {
    fn drop(&mut self) {
        // SAFETY: takes integers only. Nobody has waited for the copy, so the number is its own.
        unsafe { libc::kill(self.0, libc::SIGKILL) };
        // It was killed, so it ends.
        let _ = self.reap();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_copy_goes_on_from_the_same_place_and_changes_nothing_of_the_original() {
        let (mut ours, mut theirs) = UnixStream::pair().unwrap();
        let mut seen = vec![1, 2];
        match fork().unwrap() {
            Forked::Copy => {
                seen.push(3);
                let _ = theirs.write_all(&seen);
                leave(7);
            }
            Forked::Original(copied) => {
                drop(theirs);
                assert_eq!(copied.wait().unwrap(), End::Code(7));
                let mut told = Vec::new();
                ours.read_to_end(&mut told).unwrap();
                assert_eq!((told, seen), (vec![1, 2, 3], vec![1, 2]));
            }
        }
    }

    #[test]
    fn a_copy_that_nobody_waits_for_is_killed() {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let Forked::Original(copied) = fork().unwrap() else {
            loop {
                std::thread::park();
            }
        };
        drop((copied, theirs));
        // Its end of the connection is closed, as it is closed when it has ended.
        assert_eq!(ours.read(&mut [0]).unwrap(), 0);
    }
}
