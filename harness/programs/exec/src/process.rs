//! Runs a program in place of this one: forwards signals, ends as it ends, and leaves none of its
//! processes behind.

use std::mem::{ManuallyDrop, MaybeUninit};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};
use std::{collections::BTreeMap, collections::BTreeSet, io};

use libc::{c_int, pid_t};
use nix::errno::Errno;
use nix::sys::prctl;
use nix::sys::resource::{Resource, getrlimit};
use nix::sys::signal::{self, SigSet, SigmaskHow, Signal, kill, killpg};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid, waitpid};
use nix::unistd::{Pid, getpid, getppid};
use procfs::process::{Process, Stat};

/// Returns whether a program that had this process's standard input would find nothing in it, or
/// not its beginning: a file that was read, or a pipe whose writer has ended.
pub fn is_input_used_up() -> bool {
    use std::os::unix::fs::FileTypeExt as _;
    let Ok(input) = std::fs::metadata("/proc/self/fd/0") else {
        return false;
    };
    let kind = input.file_type();
    if kind.is_file() {
        let place = std::fs::read_to_string("/proc/self/fdinfo/0").unwrap_or_default();
        return place.lines().next() != Some("pos:\t0");
    }
    let mut input = libc::pollfd {
        fd: 0,
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: there is one descriptor, which lives as long as the call.
    let is_polled = unsafe { libc::poll(&mut input, 1, 0) } > 0;
    (kind.is_fifo() || kind.is_socket()) && is_polled && input.revents & libc::POLLHUP != 0
}

/// Forwarded signals. Ctrl-Z needs no forwarding: it stops the whole process group.
const PASSED_ON: [Signal; 6] = [
    Signal::SIGINT,
    Signal::SIGTERM,
    Signal::SIGHUP,
    Signal::SIGQUIT,
    Signal::SIGUSR1,
    Signal::SIGUSR2,
];
/// How long remaining processes may take to end by themselves, and then after SIGTERM.
const GRACE: [Duration; 2] = [Duration::from_millis(500), Duration::from_secs(3)];
/// The first of these times if processes remain that could use the GPU. On a busy machine, they may
/// be about to end.
const GRACE_WITH_GPU: Duration = Duration::from_secs(2);

/// The time between two looks at a running program.
const LOOK: Duration = Duration::from_millis(250);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Code(u8),
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

    pub const fn signal(self) -> Option<u8> {
        match self {
            Self::Code(_) => None,
            Self::Signal(signal) => Some(signal),
        }
    }
}

/// Signals with a name that users may not know, and their usual cause.
const SIGNALS: [(Signal, &str); 6] = [
    (
        Signal::SIGXFSZ,
        "a file would have become larger than `ulimit -f` allows",
    ),
    (
        Signal::SIGXCPU,
        "it took more processor time than `ulimit -t` allows",
    ),
    (
        Signal::SIGSEGV,
        "it accessed memory that does not exist, or its stack was too small (`ulimit -s`)",
    ),
    (
        Signal::SIGBUS,
        "it accessed a mapped file beyond its end, or the disk was full",
    ),
    (Signal::SIGABRT, "it stopped itself after an error"),
    (
        Signal::SIGKILL,
        "something killed it, for example the system when memory ran out",
    ),
];

pub fn cause_of(signal: u8) -> Option<String> {
    SIGNALS
        .iter()
        .find(|(known, _)| *known as c_int == c_int::from(signal))
        .map(|(known, cause)| format!("{known}: {cause}"))
}

/// Makes this process's writes beyond the limit of `ulimit -f` fail with an error. By default they
/// end it with SIGXFSZ. Programs get the default back.
pub fn survive_file_size_limit() {
    // SAFETY: no handler runs.
    let _ = unsafe { signal::signal(Signal::SIGXFSZ, signal::SigHandler::SigIgn) };
}

/// The stack that the program needs: builds without optimization use up to 384 KiB.
const NEEDED_STACK: u64 = 512 << 10;

/// Refuses a stack (`ulimit -s`) that would overflow.
pub fn check_stack() -> Result<(), String> {
    match getrlimit(Resource::RLIMIT_STACK) {
        Ok((limit, _)) if limit < NEEDED_STACK => {
            let (has, needs) = (limit >> 10, NEEDED_STACK >> 10);
            Err(format!(
                "the stack has {has} KiB, and harness needs {needs} KiB: enter `ulimit -s {needs}` \
                 or more first"
            ))
        }
        _ => Ok(()),
    }
}

impl From<ExitStatus> for End {
    fn from(status: ExitStatus) -> Self {
        // An exit code has eight bits, a signal seven.
        let byte = |number: i32| (number & 0xff) as u8;
        status.code().map_or_else(
            || Self::Signal(byte(status.signal().unwrap_or_default())),
            |code| Self::Code(byte(code)),
        )
    }
}

/// Holds back the forwarded signals in this thread and the threads that it starts, until a program
/// receives them.
pub struct HeldSignals {
    held: SigSet,
    before: SigSet,
}

impl HeldSignals {
    pub fn hold() -> io::Result<Self> {
        let held: SigSet = PASSED_ON.into_iter().chain([Signal::SIGCHLD]).collect();
        Ok(Self {
            held,
            before: held.thread_swap_mask(SigmaskHow::SIG_BLOCK)?,
        })
    }

    /// Runs a command to its end. The caller must have no other children: all of them are ended.
    /// Calls `look` with the process ID now and then. When the program has ended, `remaining`
    /// returns the processes that could use the GPU and still run.
    pub fn run(
        self,
        command: &mut Command,
        mut look: impl FnMut(pid_t),
        remaining: impl Fn(pid_t) -> Vec<pid_t>,
    ) -> io::Result<End> {
        adopt();
        // The program inherits the signal mask.
        let mut child = ending_with_us(command, Some(self.before), Signal::SIGTERM).spawn()?;
        let pid = child.id() as pid_t;
        let status = loop {
            if let Some(status) = child.try_wait()? {
                break status;
            }
            look(pid);
            if let Some(signal) = self.next(LOOK).filter(|signal| PASSED_ON.contains(signal)) {
                // The child has not been reaped, so its process ID is valid.
                let _ = kill(Pid::from_raw(pid), signal);
            }
        };
        let ended = Instant::now();
        let has_time = || match ended.elapsed() {
            age if age < GRACE[0] => true,
            age => age < GRACE_WITH_GPU && !remaining(pid).is_empty(),
        };
        while children_left().is_some() && has_time() {
            std::thread::sleep(Duration::from_millis(5));
        }
        remaining(pid);
        end_all(Duration::ZERO, children_left);
        Ok(status.into())
    }

    /// Returns the next signal sent to this process alone. The terminal sends its signals to the
    /// whole group, so the program already has those.
    fn next(&self, patience: Duration) -> Option<Signal> {
        let mut info = MaybeUninit::uninit();
        let timeout = libc::timespec {
            tv_sec: 0,
            tv_nsec: patience.subsec_nanos().into(),
        };
        // SAFETY: all three are valid; the output is read only if the call succeeds.
        let (signal, info) = unsafe {
            match libc::sigtimedwait(self.held.as_ref(), info.as_mut_ptr(), &raw const timeout) {
                -1 => return None,
                signal => (signal, info.assume_init()),
            }
        };
        Signal::try_from(signal)
            .ok()
            .filter(|_| info.si_code != libc::SI_KERNEL)
    }
}

impl Drop for HeldSignals {
    fn drop(&mut self) {
        let _ = self.before.thread_set_mask();
    }
}

/// Makes this process the parent of orphaned descendants, so [`end_all_children`] finds them.
pub fn adopt() {
    let _ = prctl::set_child_subreaper(true);
}

/// Makes the program end by this signal when the thread that starts it ends. Sets the program's
/// signal mask if one is given.
fn ending_with_us(command: &mut Command, mask: Option<SigSet>, signal: Signal) -> &mut Command {
    let us = getpid();
    let prepare = move || {
        mask.map_or(Ok(()), |mask| mask.thread_set_mask())?;
        prctl::set_pdeathsig(signal)?;
        // We may have ended before.
        if getppid() != us {
            return Err(Errno::ESRCH.into());
        }
        // SAFETY: no handler runs.
        unsafe { signal::signal(Signal::SIGXFSZ, signal::SigHandler::SigDfl) }?;
        Ok(())
    };
    // SAFETY: the closure makes only system calls that are allowed between fork and exec.
    unsafe { command.pre_exec(prepare) }
}

/// A program in a process group of its own that runs in parallel with others. Dropping it kills the
/// program and its descendants.
#[derive(Debug)]
pub struct Started {
    pid: pid_t,
    began: Instant,
}

impl Started {
    pub fn start(command: &mut Command) -> io::Result<Self> {
        Self::start_with(command, Signal::SIGTERM)
    }

    /// Starts a command of this program, which no program can keep alive: it is killed when we end,
    /// and its descendants end after it.
    pub fn start_command(command: &mut Command) -> io::Result<Self> {
        Self::start_with(command, Signal::SIGKILL)
    }

    fn start_with(command: &mut Command, signal: Signal) -> io::Result<Self> {
        Ok(Self::adopted(
            ending_with_us(command, None, signal)
                .process_group(0)
                .spawn()?
                .id() as pid_t,
        ))
    }

    /// A child of this process that leads a process group.
    pub(crate) fn adopted(pid: pid_t) -> Self {
        Self {
            pid,
            began: Instant::now(),
        }
    }

    pub(crate) fn has_ended(&self) -> bool {
        has_ended(self.pid)
    }

    pub(crate) fn age(&self) -> Duration {
        self.began.elapsed()
    }

    /// Waits for its end. `give_up` receives the age of the run. If it returns `true`, kills the
    /// program with its descendants and returns `None`. Calls `look` with the process ID now and
    /// then. When the program has ended, `remaining` returns processes outside of its group that
    /// are to be ended too.
    pub fn wait(
        self,
        mut give_up: impl FnMut(Duration) -> bool,
        mut look: impl FnMut(pid_t),
        remaining: impl Fn(pid_t) -> Vec<pid_t>,
    ) -> io::Result<Option<End>> {
        let group = self.pid;
        let mut looked = Duration::ZERO;
        while !self.has_ended() {
            let age = self.age();
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
        let mut left = remaining(group);
        let is_in_group = |other: Stat| other.pid != group && other.pgrp == group;
        while match ended.elapsed() {
            age if age < GRACE[0] => !left.is_empty() || stats().any(is_in_group),
            age => age < GRACE_WITH_GPU && !left.is_empty(),
        } {
            std::thread::sleep(Duration::from_millis(10));
            left = remaining(group);
        }
        kill_all(&left);
        let _ = killpg(Pid::from_raw(group), Signal::SIGKILL);
        self.reap().map(Some)
    }

    /// Waits for its end. If `is_cancelled`, kills only this process and returns `None`.
    pub fn wait_unless(self, is_cancelled: impl Fn() -> bool) -> io::Result<Option<End>> {
        while !self.has_ended() {
            if is_cancelled() {
                return self.kill().map(|_| None);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        self.reap().map(Some)
    }

    /// Waits for its end. If `is_cancelled`, asks it to end, kills it with its descendants some
    /// seconds later, and returns `None`.
    pub fn wait_or_terminate(self, is_cancelled: impl Fn() -> bool) -> io::Result<Option<End>> {
        let mut asked: Option<Instant> = None;
        while !self.has_ended() {
            match asked {
                Some(asked) if asked.elapsed() > GRACE[1] => return Ok(None),
                None if is_cancelled() => {
                    let _ = kill(Pid::from_raw(self.pid), Signal::SIGTERM);
                    asked = Some(Instant::now());
                }
                _ => {}
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(Some(self.reap()?).filter(|_| asked.is_none()))
    }

    /// Waits for an exiting process, then kills the rest of its group.
    pub fn ending(self) -> io::Result<End> {
        let group = Pid::from_raw(self.pid);
        while waitid(Id::Pid(group), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT)
            == Err(Errno::EINTR)
        {}
        let _ = killpg(group, Signal::SIGKILL);
        self.reap()
    }

    /// Kills only this process, with SIGKILL, and waits for it.
    pub fn kill(self) -> io::Result<End> {
        kill_all(&[self.pid]);
        self.reap()
    }

    fn reap(self) -> io::Result<End> {
        reap(Pid::from_raw(ManuallyDrop::new(self).pid))
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        kill_all(&descendants(self.pid));
        kill_all(&[self.pid]);
        // It was killed, so this returns soon. An error means that something else waited for it.
        let _ = reap(Pid::from_raw(self.pid));
    }
}

/// Waits for a child. Nothing else waits for it, so its process ID is still valid.
pub(crate) fn reap(child: Pid) -> io::Result<End> {
    loop {
        match waitpid(child, None) {
            Ok(WaitStatus::Exited(_, code)) => return Ok(End::Code(code as u8)),
            Ok(WaitStatus::Signaled(_, signal, _)) => return Ok(End::Signal(signal as u8)),
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

fn has_ended(pid: pid_t) -> bool {
    let options = WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT | WaitPidFlag::WNOHANG;
    waitid(Id::Pid(Pid::from_raw(pid)), options) != Ok(WaitStatus::StillAlive)
}

/// The parent of each process.
pub(crate) fn parents() -> BTreeMap<pid_t, pid_t> {
    stats().map(|stat| (stat.pid, stat.ppid)).collect()
}

pub(crate) fn descendants(of: pid_t) -> Vec<pid_t> {
    let parents = parents();
    let mut found = vec![of];
    let mut at = 0;
    while let Some(&parent) = found.get(at) {
        found.extend(
            parents
                .iter()
                .filter(|(_, of)| **of == parent)
                .map(|(pid, _)| *pid),
        );
        at += 1;
    }
    found.split_off(1)
}

pub(crate) fn kill_all(pids: &[pid_t]) {
    for pid in pids {
        let _ = kill(Pid::from_raw(*pid), Signal::SIGKILL);
    }
}

/// Ends the program's remaining processes: waits a moment, then sends SIGTERM, then SIGKILL.
/// Nothing else waits for our children, so their process IDs are valid.
pub fn end_all_children() {
    end_all(GRACE[0], children_left);
}

/// Sends each running process SIGTERM after `patience`, and SIGKILL some seconds later. Ends when
/// `running` returns `None`.
pub(crate) fn end_all(patience: Duration, running: impl Fn() -> Option<Vec<pid_t>>) {
    let began = Instant::now();
    let mut asked = BTreeSet::new();
    while let Some(running) = running() {
        let age = began.elapsed();
        for pid in running {
            let signal = if age > patience + GRACE[1] {
                Signal::SIGKILL
            } else {
                Signal::SIGTERM
            };
            if age >= patience && asked.insert((pid, signal)) {
                let _ = kill(Pid::from_raw(pid), signal);
            }
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Reaps ended children and returns the running ones, or `None` if there are no children.
fn children_left() -> Option<Vec<pid_t>> {
    loop {
        match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
            Ok(WaitStatus::StillAlive) => break,
            Err(Errno::ECHILD) => return None,
            _ended => {}
        }
    }
    let own = std::process::id() as pid_t;
    Some(
        stats()
            .filter(|stat| stat.ppid == own)
            .map(|stat| stat.pid)
            .collect(),
    )
}

/// Returns all processes that still exist.
pub(crate) fn processes() -> impl Iterator<Item = Process> {
    procfs::process::all_processes()
        .into_iter()
        .flatten()
        .flatten()
}

fn stats() -> impl Iterator<Item = Stat> {
    processes().filter_map(|process| process.stat().ok())
}
