//! Temporary folders of runs, and the guardian process that cleans up if this process is killed.
//!
//! The guardian is forked before the first run. It reads from a pipe whose other end only this process and its forked copies hold. When the pipe closes, it
//! ends every process with one of this process's run folders in its environment, and removes the folders. A guardian that is killed too, as with the whole
//! container, leaves them to the next start, which removes the folders of dead processes.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::os::fd::{AsRawFd as _, IntoRawFd as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use harness_gpu_settings::settings::RUN;
use libc::pid_t;
use tempfile::TempDir;

use crate::process;

/// Folder names begin with this and the process ID of the guarded process.
const PREFIX: &str = "harness-gpu-";
/// How long the guardian tries to end processes.
const MOST: Duration = Duration::from_secs(6);

/// The temporary folder of a run. Dropping it deletes the folder.
#[derive(Debug)]
pub struct RunFolder {
    folder: TempDir,
    /// Locked while the folder is in use, also from another container's view.
    _lock: File,
}

impl RunFolder {
    /// Creates a folder. The first call removes the folders of dead processes and starts the guardian.
    pub fn new() -> io::Result<Self> {
        let Guarded { temporary, prefix } = guarded()?;
        let folder = tempfile::Builder::new().prefix(&prefix).tempdir_in(temporary)?;
        let lock = File::open(folder.path())?;
        // File systems without locks hold nothing.
        let _ = lock.try_lock();
        Ok(Self { folder, _lock: lock })
    }

    pub fn path(&self) -> &Path {
        self.folder.path()
    }
}

/// The folder for temporary files, and how the names of this process's run folders begin.
#[derive(Clone)]
struct Guarded {
    temporary: PathBuf,
    prefix: String,
}

fn guarded() -> io::Result<Guarded> {
    static GUARDED: Mutex<Option<Guarded>> = Mutex::new(None);
    let mut started = GUARDED.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if let Some(guarded) = &*started {
        return Ok(guarded.clone());
    }
    let temporary = std::path::absolute(std::env::temp_dir())?;
    sweep(&temporary);
    let guarded = Guarded { temporary, prefix: format!("{PREFIX}{}-", std::process::id()) };
    start(&guarded)?;
    Ok(started.insert(guarded).clone())
}

/// Removes the run folders of dead processes, and ends programs that are still running in them.
fn sweep(temporary: &Path) {
    // SAFETY: takes nothing and cannot fail.
    let user = unsafe { libc::geteuid() };
    for entry in fs::read_dir(temporary).into_iter().flatten().flatten() {
        let owner = entry.file_name().to_str().and_then(|name| name.strip_prefix(PREFIX)?.split_once('-')?.0.parse::<pid_t>().ok());
        let is_ours = entry.metadata().is_ok_and(|found| found.is_dir() && found.uid() == user);
        let Some(owner) = owner.filter(|owner| is_ours && *owner > 0) else { continue };
        // SAFETY: takes integers only; signal 0 only checks that the process exists.
        let is_dead = unsafe { libc::kill(owner, 0) } != 0 && io::Error::last_os_error().raw_os_error() == Some(libc::ESRCH);
        // A process of another container has a number that means nothing here, but it holds the lock.
        if is_dead && File::open(entry.path()).is_ok_and(|folder| folder.try_lock().is_ok()) {
            end_programs(&entry.path());
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// Forks the guardian.
fn start(guarded: &Guarded) -> io::Result<()> {
    let (closed, open) = io::pipe()?;
    let mut adopts: libc::c_int = 0;
    // SAFETY: the first call writes an integer, the others take integers only. The child uses memory of its own from here on and ends by `_exit`.
    unsafe {
        // The guardian must not become a child of this process, which ends all its children.
        libc::prctl(libc::PR_GET_CHILD_SUBREAPER, &raw mut adopts);
        libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 0);
        let child = libc::fork();
        if child == 0 {
            if libc::fork() == 0 {
                drop(open);
                libc::setsid();
                libc::signal(libc::SIGTERM, libc::SIG_IGN);
                libc::dup2(closed.as_raw_fd(), 0);
                if let Ok(null) = File::options().read(true).write(true).open("/dev/null") {
                    libc::dup2(null.as_raw_fd(), 1);
                    libc::dup2(null.as_raw_fd(), 2);
                }
                libc::close_range(3, libc::c_uint::MAX, 0);
                let _ = std::panic::catch_unwind(|| clean_up(guarded));
            }
            libc::_exit(0);
        }
        let error = io::Error::last_os_error();
        if child > 0 {
            libc::waitpid(child, std::ptr::null_mut(), 0);
        }
        libc::prctl(libc::PR_SET_CHILD_SUBREAPER, adopts);
        if child < 0 {
            return Err(error);
        }
    }
    // The pipe closes when this process ends, and its forked copies have ended.
    let _ = open.into_raw_fd();
    Ok(())
}

/// The guardian: waits for the guarded process to end, then ends its programs and removes its folders.
fn clean_up(Guarded { temporary, prefix }: &Guarded) {
    let _ = io::stdin().lock().read(&mut [0]);
    end_programs(&temporary.join(prefix));
    for entry in fs::read_dir(temporary).into_iter().flatten().flatten() {
        if entry.file_name().to_str().is_some_and(|name| name.starts_with(prefix.as_str())) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// Ends the processes whose run folder begins with this path.
fn end_programs(folder: &Path) {
    let mut variable = OsString::from(format!("{RUN}="));
    variable.push(folder);
    let began = Instant::now();
    process::end_all(Duration::ZERO, || {
        let running: Vec<pid_t> = process::processes().filter(|pid| has_variable(*pid, variable.as_bytes())).collect();
        (!running.is_empty() && began.elapsed() < MOST).then_some(running)
    });
}

/// Returns whether a process was started with a variable that begins like this. Ended processes have no variables.
fn has_variable(pid: pid_t, begin: &[u8]) -> bool {
    let variables = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    pid != std::process::id() as pid_t && variables.split(|byte| *byte == 0).any(|variable| variable.starts_with(begin))
}

#[cfg(test)]
mod tests;
