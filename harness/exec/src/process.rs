//! Runs a program as if it had been started in our place: signals are passed on, its end is ours, and nothing that it started outlives it.

use std::collections::BTreeSet;
use std::io;
use std::mem::MaybeUninit;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};
use std::{fs, ptr};

use libc::{c_int, pid_t, sigset_t};

/// Signals that are passed on. Ctrl-Z stops the program anyway, since it is in our process group.
const PASSED_ON: [c_int; 6] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT, libc::SIGUSR1, libc::SIGUSR2];
/// How long what the program left running may take to end by itself, and then after it was asked to.
const GRACE: [Duration; 2] = [Duration::from_millis(500), Duration::from_secs(3)];

/// How a program ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// With this exit code.
    Code(u8),
    /// By this signal.
    Signal(u8),
}

impl End {
    /// As shells tell it: 128 + n for signal n.
    #[must_use]
    pub const fn exit_code(self) -> u8 {
        match self {
            Self::Code(code) => code,
            Self::Signal(signal) => 128 + signal,
        }
    }
}

impl From<ExitStatus> for End {
    fn from(status: ExitStatus) -> Self {
        // An exit code has eight bits, a signal seven.
        let byte = |number: i32| (number & 0xff) as u8;
        status.code().map_or_else(|| Self::Signal(byte(status.signal().unwrap_or_default())), |code| Self::Code(byte(code)))
    }
}

/// Runs a command to its end. To be called once, by a program that has no other children: all of them are ended.
///
/// # Errors
/// That it cannot be started.
pub fn run(command: &mut Command) -> io::Result<End> {
    HeldSignals::hold()?.run(command)
}

/// Signals that are passed on wait from now on, in this thread and in those that it starts, for the program that they are passed on to.
pub struct HeldSignals(Signals);

impl HeldSignals {
    /// Has them wait.
    ///
    /// # Errors
    /// What the system says.
    pub fn hold() -> io::Result<Self> {
        Signals::block().map(Self)
    }

    /// Runs a command to its end, as [`run`] does.
    ///
    /// # Errors
    /// That it cannot be started.
    pub fn run(self, command: &mut Command) -> io::Result<End> {
        let Self(signals) = self;
        adopt();
        // A program inherits which signals wait.
        let mut child = ending_with_us(command, Some(signals.before)).spawn()?;
        let status = wait(&mut child, &signals)?;
        end_all_children();
        Ok(status.into())
    }
}

/// From now on what loses its parent becomes our child, so that it can be found by [`end_all_children`].
pub fn adopt() {
    // SAFETY: takes integers only.
    unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1) };
}

/// Has the command's program ended when the thread that starts it ends, and where a set is given, only these signals wait in it.
fn ending_with_us(command: &mut Command, waiting: Option<sigset_t>) -> &mut Command {
    let prepare = move || {
        // SAFETY: the set is one that the system gave; both calls may be made between fork and exec, and touch no memory.
        unsafe {
            if let Some(waiting) = waiting {
                libc::sigprocmask(libc::SIG_SETMASK, &raw const waiting, ptr::null_mut());
            }
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM);
        }
        Ok(())
    };
    // SAFETY: the closure makes two system calls and nothing else.
    unsafe { command.pre_exec(prepare) }
}

/// A program that runs beside others, in a process group of its own, which is ended with it.
#[derive(Debug)]
pub struct Started {
    child: Child,
    began: Instant,
}

impl Started {
    /// Starts a command.
    ///
    /// # Errors
    /// That it cannot be started.
    pub fn start(command: &mut Command) -> io::Result<Self> {
        Ok(Self { child: ending_with_us(command, None).process_group(0).spawn()?, began: Instant::now() })
    }

    /// Waits for its end. `None` where `give_up`, which is told the age of the run, had it killed with all that it had started.
    ///
    /// # Errors
    /// What the system says.
    pub fn wait(mut self, mut give_up: impl FnMut(Duration) -> bool) -> io::Result<Option<End>> {
        let group = self.group();
        while !has_ended(group) {
            if give_up(self.began.elapsed()) {
                return Ok(None);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        // Until it is waited for, the number of the group is its own.
        let ended = Instant::now();
        while ended.elapsed() < GRACE[0] && processes().any(|pid| pid != group && stat(pid).is_some_and(|stat| stat.group == group)) {
            std::thread::sleep(Duration::from_millis(10));
        }
        // SAFETY: takes integers only.
        unsafe { libc::killpg(group, libc::SIGKILL) };
        Ok(Some(self.child.wait()?.into()))
    }

    /// Waits for its end, which is at hand, and kills what it may have left in its group.
    ///
    /// # Errors
    /// What the system says.
    pub fn ending(mut self) -> io::Result<End> {
        await_end(self.group(), 0)?;
        // SAFETY: takes integers only.
        unsafe { libc::killpg(self.group(), libc::SIGKILL) };
        Ok(self.child.wait()?.into())
    }

    /// Ends it by SIGKILL, it alone, and waits for its end.
    ///
    /// # Errors
    /// What the system says.
    pub fn kill(mut self) -> io::Result<End> {
        self.child.kill()?;
        Ok(self.child.wait()?.into())
    }

    fn group(&self) -> pid_t {
        self.child.id() as pid_t
    }
}

impl Drop for Started {
    /// Kills it with all that it had started, where nobody has waited for it.
    fn drop(&mut self) {
        // What was waited for is remembered as such.
        if matches!(self.child.try_wait(), Ok(None)) {
            kill(&descendants(self.group()));
            kill(&[self.group()]);
            // It was killed, so it ends; that it cannot be waited for says that somebody did.
            let _ = self.child.wait();
        }
    }
}

/// Runs a command beside others to its end, as [`Started::wait`] does.
///
/// # Errors
/// That it cannot be started.
pub fn run_beside_others(command: &mut Command, give_up: impl FnMut(Duration) -> bool) -> io::Result<Option<End>> {
    Started::start(command)?.wait(give_up)
}

/// Whether our child has ended.
fn has_ended(pid: pid_t) -> bool {
    await_end(pid, libc::WNOHANG).is_ok_and(|ended| ended)
}

/// Waits until our child has ended, or with `WNOHANG` does not wait: whether it has. It is not waited for, so its number stays its own.
fn await_end(pid: pid_t, options: c_int) -> io::Result<bool> {
    let mut info = MaybeUninit::<libc::siginfo_t>::zeroed();
    loop {
        // SAFETY: the information may be written, and zeroes are valid where nothing is written.
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

/// What a process started, and what that started.
fn descendants(of: pid_t) -> Vec<pid_t> {
    let parents: Vec<(pid_t, pid_t)> = processes().filter_map(|pid| Some((pid, stat(pid)?.parent))).collect();
    let mut found = vec![of];
    let mut at = 0;
    while let Some(&parent) = found.get(at) {
        found.extend(parents.iter().filter(|(_, of)| *of == parent).map(|(pid, _)| *pid));
        at += 1;
    }
    found.split_off(1)
}

fn kill(pids: &[pid_t]) {
    for pid in pids {
        // SAFETY: takes integers only.
        unsafe { libc::kill(*pid, libc::SIGKILL) };
    }
}

fn wait(child: &mut Child, signals: &Signals) -> io::Result<ExitStatus> {
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        // Also without a signal one looks again: nothing is lost where one is.
        if let Some(signal) = signals.next(Duration::from_secs(1))
            && PASSED_ON.contains(&signal)
        {
            // SAFETY: takes integers only. The child was not waited for yet, so the number is its own.
            unsafe { libc::kill(child.id() as pid_t, signal) };
        }
    }
}

/// Signals that wait until they are asked for, as long as this lives.
struct Signals {
    set: sigset_t,
    before: sigset_t,
}

impl Signals {
    fn block() -> io::Result<Self> {
        let (mut set, mut before) = (MaybeUninit::uninit(), MaybeUninit::uninit());
        // SAFETY: each set is initialized by the first call that gets it.
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

    /// The next signal that somebody sent to us alone. What a terminal sends goes to the whole process group, so the program has it already.
    fn next(&self, patience: Duration) -> Option<c_int> {
        let mut info = MaybeUninit::uninit();
        let timeout = libc::timespec { tv_sec: patience.as_secs() as libc::time_t, tv_nsec: 0 };
        // SAFETY: all three are valid; what the call writes is read only where it succeeds.
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
        // SAFETY: the set is the one that the system gave.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.before, ptr::null_mut()) };
    }
}

/// Ends what the program left running: by itself, if it does so soon; else it is asked to, and then made to.
pub fn end_all_children() {
    let began = Instant::now();
    let mut asked = BTreeSet::new();
    while let Some(children) = children_left() {
        let age = began.elapsed();
        for child in children {
            let signal = if age > GRACE[0] + GRACE[1] { libc::SIGKILL } else { libc::SIGTERM };
            if age > GRACE[0] && asked.insert((child, signal)) {
                // SAFETY: takes integers only. Nobody else waits for our children, so the number is the child's.
                unsafe { libc::kill(child, signal) };
            }
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The children that still run; `None` when there is none. Those that have ended are taken note of.
fn children_left() -> Option<Vec<pid_t>> {
    loop {
        // SAFETY: takes integers, and a null pointer where no status is wanted.
        match unsafe { libc::waitpid(-1, ptr::null_mut(), libc::WNOHANG) } {
            0 => break,
            -1 => return None,
            _ended => {}
        }
    }
    let own = std::process::id() as pid_t;
    Some(processes().filter(|pid| stat(*pid).is_some_and(|stat| stat.parent == own)).collect())
}

/// All processes that there are.
fn processes() -> impl Iterator<Item = pid_t> {
    fs::read_dir("/proc").into_iter().flatten().flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// What is needed of `/proc/PID/stat`.
struct Stat {
    parent: pid_t,
    group: pid_t,
}

/// The second and third word behind the name; names may hold anything.
fn stat(pid: pid_t) -> Option<Stat> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut words = stat.rsplit_once(')')?.1.split_whitespace().skip(1).map(str::parse);
    Some(Stat { parent: words.next()?.ok()?, group: words.next()?.ok()? })
}
