//! Temporary folders of runs, and the guardian process that cleans up if this process is killed.
//!
//! The guardian is forked before the first run. It reads from a pipe whose other end only this
//! process and its forked copies hold. When the pipe closes, it ends every process with one of this
//! process's run folders in its environment, and removes the folders, along with files elsewhere
//! that a link in them names. A guardian that is killed too, as with the whole container, leaves
//! them to the next start, which removes the folders of dead processes.

use std::fs::{self, File};
use std::io::{self, PipeReader, Read as _};
use std::os::fd::IntoRawFd as _;
use std::os::unix::{ffi::OsStrExt as _, fs::MetadataExt as _, fs::symlink};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{ffi::OsStr, sync::Mutex};

use harness_gpu_settings::settings::RUN;
use libc::pid_t;
use nix::errno::Errno;
use nix::sys::signal::{self, SigHandler, Signal};
use nix::sys::{prctl, wait::waitpid};
use nix::unistd::{self, ForkResult, Pid};
use procfs::process::Process;
use tempfile::{NamedTempFile, TempDir};

use crate::{forked, process};

/// Folder names begin with this and the process ID of the guarded process.
const PREFIX: &str = "harness-gpu-";
/// A link in a run folder to a file that is removed with the folder.
const ELSEWHERE: &str = "elsewhere";
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
    /// Creates a folder. The first call removes the folders of dead processes and starts the
    /// guardian.
    pub fn new() -> io::Result<Self> {
        let Guarded { temporary, prefix } = guarded()?;
        let folder = tempfile::Builder::new()
            .prefix(&prefix)
            .tempdir_in(temporary)?;
        let lock = File::open(folder.path())?;
        // File systems without locks hold nothing.
        let _ = lock.try_lock();
        Ok(Self {
            folder,
            _lock: lock,
        })
    }

    pub fn path(&self) -> &Path {
        self.folder.path()
    }
}

/// A temporary file outside of the folder for temporary files. Dropping it deletes the file, and if
/// this process is killed, the guardian deletes it.
#[derive(Debug)]
pub struct GuardedFile {
    file: NamedTempFile,
    _folder: RunFolder,
}

impl GuardedFile {
    /// Creates a file whose name begins and ends like this.
    pub fn create(folder: &Path, prefix: &str, suffix: &str) -> io::Result<Self> {
        let guarded = RunFolder::new()?;
        let file = tempfile::Builder::new()
            .prefix(prefix)
            .suffix(suffix)
            .tempfile_in(std::path::absolute(folder)?)?;
        symlink(file.path(), guarded.path().join(ELSEWHERE))?;
        Ok(Self {
            file,
            _folder: guarded,
        })
    }

    pub fn path(&self) -> &Path {
        self.file.path()
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
    let mut started = GUARDED
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    if let Some(guarded) = &*started {
        return Ok(guarded.clone());
    }
    let temporary = std::path::absolute(std::env::temp_dir())?;
    sweep(&temporary);
    let guarded = Guarded {
        temporary,
        prefix: format!("{PREFIX}{}-", std::process::id()),
    };
    start(&guarded)?;
    Ok(started.insert(guarded).clone())
}

/// Removes the run folders of dead processes, and ends programs that are still running in them.
fn sweep(temporary: &Path) {
    let user = unistd::geteuid().as_raw();
    for entry in fs::read_dir(temporary).into_iter().flatten().flatten() {
        let owner = entry.file_name().to_str().and_then(|name| {
            name.strip_prefix(PREFIX)?
                .split_once('-')?
                .0
                .parse::<pid_t>()
                .ok()
        });
        let is_ours = entry
            .metadata()
            .is_ok_and(|found| found.is_dir() && found.uid() == user);
        let Some(owner) = owner.filter(|owner| is_ours && *owner > 0) else {
            continue;
        };
        let is_dead = signal::kill(Pid::from_raw(owner), None) == Err(Errno::ESRCH);
        // A process of another container has a number that means nothing here, but it holds the
        // lock.
        if is_dead && File::open(entry.path()).is_ok_and(|folder| folder.try_lock().is_ok()) {
            end_programs(&entry.path());
            remove(&entry.path());
        }
    }
}

fn start(guarded: &Guarded) -> io::Result<()> {
    let (closed, open) = io::pipe()?;
    // The guardian must not become a child of this process, which ends all its children.
    let adopts = prctl::get_child_subreaper()?;
    prctl::set_child_subreaper(false)?;
    // SAFETY: the child uses memory of its own from here on and ends by `_exit`.
    let forked = unsafe { unistd::fork() };
    if let Ok(ForkResult::Child) = forked {
        // SAFETY: as above.
        if let Ok(ForkResult::Child) = unsafe { unistd::fork() } {
            drop(open);
            let _ = std::panic::catch_unwind(|| leave_session(&closed).map(|()| clean_up(guarded)));
        }
        forked::leave(0);
    }
    if let Ok(ForkResult::Parent { child }) = forked {
        let _ = waitpid(child, None);
    }
    prctl::set_child_subreaper(adopts)?;
    forked?;
    // The pipe closes when this process ends, and its forked copies have ended.
    let _ = open.into_raw_fd();
    Ok(())
}

/// Frees the guardian of the terminal, of SIGTERM and of all files. Its standard input becomes
/// `input`.
fn leave_session(input: &PipeReader) -> io::Result<()> {
    unistd::setsid()?;
    // SAFETY: no handler runs.
    unsafe { signal::signal(Signal::SIGTERM, SigHandler::SigIgn) }?;
    unistd::dup2_stdin(input)?;
    if let Ok(null) = File::options().read(true).write(true).open("/dev/null") {
        unistd::dup2_stdout(&null)?;
        unistd::dup2_stderr(&null)?;
    }
    // SAFETY: nothing uses another file from here on.
    unsafe { libc::close_range(3, libc::c_uint::MAX, 0) };
    Ok(())
}

/// The guardian: waits for the guarded process to end, then ends its programs and removes its
/// folders.
fn clean_up(Guarded { temporary, prefix }: &Guarded) {
    let _ = io::stdin().lock().read(&mut [0]);
    end_programs(&temporary.join(prefix));
    for entry in fs::read_dir(temporary).into_iter().flatten().flatten() {
        if entry
            .file_name()
            .to_str()
            .is_some_and(|name| name.starts_with(prefix.as_str()))
        {
            remove(&entry.path());
        }
    }
}

/// Removes a run folder, and the file elsewhere that belongs to it.
fn remove(folder: &Path) {
    if let Ok(elsewhere) = fs::read_link(folder.join(ELSEWHERE)) {
        let _ = fs::remove_file(elsewhere);
    }
    let _ = fs::remove_dir_all(folder);
}

fn end_programs(folder: &Path) {
    let began = Instant::now();
    process::end_all(Duration::ZERO, || {
        let running: Vec<pid_t> = process::processes()
            .filter(|process| runs_in(process, folder))
            .map(|process| process.pid)
            .collect();
        (!running.is_empty() && began.elapsed() < MOST).then_some(running)
    });
}

/// Returns whether a process was started with a run folder that begins like this. Ended processes
/// have no variables.
fn runs_in(process: &Process, folder: &Path) -> bool {
    let variables = process.environ().unwrap_or_default();
    let run = variables
        .get(OsStr::new(RUN))
        .filter(|_| process.pid != std::process::id() as pid_t);
    run.is_some_and(|run| run.as_bytes().starts_with(folder.as_os_str().as_bytes()))
}

#[cfg(test)]
mod tests;
