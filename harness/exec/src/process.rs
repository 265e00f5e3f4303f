//! Runs a program in place of this one: forwards signals, ends as it ends, and leaves none of its processes behind.

use std::collections::BTreeSet;
use std::io;
use std::mem::MaybeUninit;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};
use std::{fs, ptr};

use libc::{c_int, pid_t, sigset_t};

/// Forwarded signals. Ctrl-Z needs no forwarding: it stops the whole process group.
const PASSED_ON: [c_int; 6] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT, libc::SIGUSR1, libc::SIGUSR2];
/// How long remaining processes may take to end by themselves, and then after SIGTERM.
const GRACE: [Duration; 2] = [Duration::from_millis(500), Duration::from_secs(3)];

/// The time between two looks at a running program.
const LOOK: Duration = Duration::from_millis(250);

/// How a program ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// With this exit code.
    Code(u8),
    /// By this signal.
    Signal(u8),
}

impl End {
    /// Returns the exit code that shells use: 128 + n for signal n.
    pub const fn exit_code(self) -> u8 {
        match self {
            Self::Code(code) => code,
            Self::Signal(signal) => 128 + signal,
        }
    }

    /// Returns the signal that ended it.
    pub const fn signal(self) -> Option<u8> {
        match self {
            Self::Code(_) => None,
            Self::Signal(signal) => Some(signal),
        }
    }
}

/// Signals with a name that users may not know, and their usual cause.
const SIGNALS: [(c_int, &str, &str); 6] = [
    (libc::SIGXFSZ, "SIGXFSZ", "a file would have become larger than `ulimit -f` allows"),
    (libc::SIGXCPU, "SIGXCPU", "it took more processor time than `ulimit -t` allows"),
    (libc::SIGSEGV, "SIGSEGV", "it accessed memory that does not exist, or its stack was too small (`ulimit -s`)"),
    (libc::SIGBUS, "SIGBUS", "it accessed a mapped file beyond its end, or the disk was full"),
    (libc::SIGABRT, "SIGABRT", "it stopped itself after an error"),
    (libc::SIGKILL, "SIGKILL", "something killed it, for example the system when memory ran out"),
];

/// Returns a signal's name and usual cause, as in `SIGXFSZ: a file would have become larger than …`.
pub fn cause_of(signal: u8) -> Option<String> {
    SIGNALS.iter().find(|(number, ..)| *number == c_int::from(signal)).map(|(_, name, cause)| format!("{name}: {cause}"))
}

/// Makes this process's writes beyond the limit of `ulimit -f` fail with an error. By default they end it with SIGXFSZ. Programs get the default back.
pub fn survive_file_size_limit() {
    // SAFETY: takes integers only.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

impl From<ExitStatus> for End {
    fn from(status: ExitStatus) -> Self {
        // An exit code has eight bits, a signal seven.
        let byte = |number: i32| (number & 0xff) as u8;
        status.code().map_or_else(|| Self::Signal(byte(status.signal().unwrap_or_default())), |code| Self::Code(byte(code)))
    }
}

/// Holds back the forwarded signals in this thread and the threads that it starts, until a program receives them.
pub struct HeldSignals(Signals);

impl HeldSignals {
    /// Blocks the signals.
    pub fn hold() -> io::Result<Self> {
        Signals::block().map(Self)
    }

    /// Runs a command to its end. The caller must have no other children: all of them are ended. Calls `look` with the process ID now and then.
    pub fn run(self, command: &mut Command, look: impl FnMut(pid_t)) -> io::Result<End> {
        let Self(signals) = self;
        adopt();
        // The program inherits the signal mask.
        let mut child = ending_with_us(command, Some(signals.before)).spawn()?;
        let status = wait(&mut child, &signals, look)?;
        end_all_children();
        Ok(status.into())
    }
}

/// Makes this process the parent of orphaned descendants, so [`end_all_children`] finds them.
pub fn adopt() {
    // SAFETY: takes integers only.
    unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1) };
}

/// Makes the program end when the thread that starts it ends. Sets the program's signal mask if one is given.
fn ending_with_us(command: &mut Command, waiting: Option<sigset_t>) -> &mut Command {
    let prepare = move || {
        // SAFETY: the set comes from the system. All calls are allowed between fork and exec and touch no memory.
        unsafe {
            if let Some(waiting) = waiting {
                libc::sigprocmask(libc::SIG_SETMASK, &raw const waiting, ptr::null_mut());
            }
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM);
            libc::signal(libc::SIGXFSZ, libc::SIG_DFL);
        }
        Ok(())
    };
    // SAFETY: the closure makes only these system calls.
    unsafe { command.pre_exec(prepare) }
}

/// A program in a process group of its own that runs in parallel with others.
#[derive(Debug)]
pub struct Started {
    child: Child,
    began: Instant,
}

impl Started {
    /// Starts a command.
    pub fn start(command: &mut Command) -> io::Result<Self> {
        Ok(Self { child: ending_with_us(command, None).process_group(0).spawn()?, began: Instant::now() })
    }

    /// Waits for its end, like [`Self::wait_and_look`].
    pub fn wait(self, give_up: impl FnMut(Duration) -> bool) -> io::Result<Option<End>> {
        self.wait_and_look(give_up, |_| ())
    }

    /// Waits for its end. `give_up` receives the age of the run. If it returns `true`, kills the program with its descendants and
    /// returns `None`. Calls `look` with the process ID now and then.
    pub fn wait_and_look(mut self, mut give_up: impl FnMut(Duration) -> bool, mut look: impl FnMut(pid_t)) -> io::Result<Option<End>> {
        let group = self.group();
        let mut looked = Duration::ZERO;
        while !has_ended(group) {
            let age = self.began.elapsed();
            if give_up(age) {
                return Ok(None);
            }
            if age - looked > LOOK {
                looked = age;
                look(group);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        // The group's ID stays valid until the child is waited for.
        let ended = Instant::now();
        while ended.elapsed() < GRACE[0] && processes().any(|pid| pid != group && stat(pid).is_some_and(|stat| stat.group == group)) {
            std::thread::sleep(Duration::from_millis(10));
        }
        // SAFETY: takes integers only.
        unsafe { libc::killpg(group, libc::SIGKILL) };
        Ok(Some(self.child.wait()?.into()))
    }

    /// Waits for an exiting process, then kills the rest of its group.
    pub fn ending(mut self) -> io::Result<End> {
        await_end(self.group(), 0)?;
        // SAFETY: takes integers only.
        unsafe { libc::killpg(self.group(), libc::SIGKILL) };
        Ok(self.child.wait()?.into())
    }

    /// Kills only this process, with SIGKILL, and waits for it.
    pub fn kill(mut self) -> io::Result<End> {
        self.child.kill()?;
        Ok(self.child.wait()?.into())
    }

    fn group(&self) -> pid_t {
        self.child.id() as pid_t
    }
}

impl Drop for Started {
    /// Kills the program and its descendants if nothing has waited for it.
    fn drop(&mut self) {
        // `Child` remembers that it was waited for.
        if matches!(self.child.try_wait(), Ok(None)) {
            kill(&descendants(self.group()));
            kill(&[self.group()]);
            // It was killed, so this returns soon. An error means that something else waited for it.
            let _ = self.child.wait();
        }
    }
}

/// Returns whether our child has ended.
fn has_ended(pid: pid_t) -> bool {
    await_end(pid, libc::WNOHANG).is_ok_and(|ended| ended)
}

/// Waits until our child has ended and returns whether it has; with `WNOHANG`, returns immediately. Leaves the child unreaped, so
/// its process ID stays valid.
fn await_end(pid: pid_t, options: c_int) -> io::Result<bool> {
    let mut info = MaybeUninit::<libc::siginfo_t>::zeroed();
    loop {
        // SAFETY: the information is writable, and zeroes are valid if nothing is written.
        let (waited, ended) = unsafe {
            let waited = libc::waitid(libc::P_PID, pid as libc::id_t, info.as_mut_ptr(), libc::WEXITED | libc::WNOWAIT | options);
            (waited, info.assume_init_ref().si_pid())
        };
        let error = io::Error::last_os_error();
        match waited {
            0 => return Ok(ended == pid),
            _ if error.kind() == io::ErrorKind::Interrupted => {}
            _ => return Err(error),
        }
    }
}

/// Returns the descendants of a process.
pub(crate) fn descendants(of: pid_t) -> Vec<pid_t> {
    let parents: Vec<(pid_t, pid_t)> = processes().filter_map(|pid| Some((pid, stat(pid)?.parent))).collect();
    let mut found = vec![of];
    let mut at = 0;
    while let Some(&parent) = found.get(at) {
        found.extend(parents.iter().filter(|(_, of)| *of == parent).map(|(pid, _)| *pid));
        at += 1;
    }
    found.split_off(1)
}

/// Sends SIGKILL.
pub(crate) fn kill(pids: &[pid_t]) {
    for pid in pids {
        // SAFETY: takes integers only.
        unsafe { libc::kill(*pid, libc::SIGKILL) };
    }
}

fn wait(child: &mut Child, signals: &Signals, mut look: impl FnMut(pid_t)) -> io::Result<ExitStatus> {
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        look(child.id() as pid_t);
        if let Some(signal) = signals.next(LOOK)
            && PASSED_ON.contains(&signal)
        {
            // SAFETY: takes integers only. The child has not been reaped, so its process ID is valid.
            unsafe { libc::kill(child.id() as pid_t, signal) };
        }
    }
}

/// Signals that stay blocked while this value lives.
struct Signals {
    set: sigset_t,
    before: sigset_t,
}

impl Signals {
    fn block() -> io::Result<Self> {
        let (mut set, mut before) = (MaybeUninit::uninit(), MaybeUninit::uninit());
        // SAFETY: the first call that receives a set initializes it.
        unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            for signal in PASSED_ON.into_iter().chain([libc::SIGCHLD]) {
                libc::sigaddset(set.as_mut_ptr(), signal);
            }
            match libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), before.as_mut_ptr()) {
                0 => Ok(Self { set: set.assume_init(), before: before.assume_init() }),
                error => Err(io::Error::from_raw_os_error(error)),
            }
        }
    }

    /// Returns the next signal sent to this process alone. The terminal sends its signals to the whole group, so the program
    /// already has those.
    fn next(&self, patience: Duration) -> Option<c_int> {
        let mut info = MaybeUninit::uninit();
        let timeout = libc::timespec { tv_sec: 0, tv_nsec: patience.subsec_nanos().into() };
        // SAFETY: all three are valid; the output is read only if the call succeeds.
        let (signal, info) = unsafe {
            match libc::sigtimedwait(&raw const self.set, info.as_mut_ptr(), &raw const timeout) {
                -1 => return None,
                signal => (signal, info.assume_init()),
            }
        };
        (info.si_code != libc::SI_KERNEL).then_some(signal)
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        // SAFETY: the set comes from the system.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.before, ptr::null_mut()) };
    }
}

/// Ends the program's remaining processes: waits a moment, then sends SIGTERM, then SIGKILL. Nothing else waits for our children, so their process IDs are
/// valid.
pub fn end_all_children() {
    end_all(GRACE[0], children_left);
}

/// Sends each running process SIGTERM after `patience`, and SIGKILL some seconds later. Ends when `running` returns `None`.
pub(crate) fn end_all(patience: Duration, running: impl Fn() -> Option<Vec<pid_t>>) {
    let began = Instant::now();
    let mut asked = BTreeSet::new();
    while let Some(running) = running() {
        let age = began.elapsed();
        for pid in running {
            let signal = if age > patience + GRACE[1] { libc::SIGKILL } else { libc::SIGTERM };
            if age >= patience && asked.insert((pid, signal)) {
                // SAFETY: takes integers only.
                unsafe { libc::kill(pid, signal) };
            }
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Reaps ended children and returns the running ones, or `None` if there are no children.
fn children_left() -> Option<Vec<pid_t>> {
    loop {
        // SAFETY: takes integers, and a null pointer because no status is needed.
        match unsafe { libc::waitpid(-1, ptr::null_mut(), libc::WNOHANG) } {
            0 => break,
            -1 => return None,
            _ended => {}
        }
    }
    let own = std::process::id() as pid_t;
    Some(processes().filter(|pid| stat(*pid).is_some_and(|stat| stat.parent == own)).collect())
}

/// Returns the IDs of all processes.
pub(crate) fn processes() -> impl Iterator<Item = pid_t> {
    fs::read_dir("/proc").into_iter().flatten().flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// The needed fields of `/proc/PID/stat`.
struct Stat {
    parent: pid_t,
    group: pid_t,
}

/// Parses the second and third fields after the name. The name may contain any character.
fn stat(pid: pid_t) -> Option<Stat> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut words = stat.rsplit_once(')')?.1.split_whitespace().skip(1).map(str::parse);
    Some(Stat { parent: words.next()?.ok()?, group: words.next()?.ok()? })
}
