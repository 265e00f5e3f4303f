//! The processes of ranks, as the hook and the kernel report them: their ranks, whether they are
//! idle, where they wait, and how they ended.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::{Duration, Instant};
use std::{fs, io};

use harness_base::files;
use harness_gpu_settings::collectives::{STACK_SIGNAL, STACKS};
use procfs::process::{Process, Stat};

use crate::errors::ErrorFrame;
use crate::files::{numbered, read_of_kernel};
use crate::process::End;

/// The file of a process with its rank, before its ID. The hook uses the same name.
const RANK: &str = "rank-";
/// The processor time that an idle process uses at most: in threads that look for changes now and
/// then, and to write a stack.
const IDLE_PART: f64 = 0.1;
const IDLE_SECONDS: f64 = 0.05;
/// A stack that is not written after this time is requested again.
const LATE: Duration = Duration::from_secs(5);
/// Packages whose frames are not the program's.
const PACKAGES: [&str; 5] = ["torch", "torchvision", "torchaudio", "functorch", "triton"];
/// The parts of torch that wait for other ranks. A backward pass waits where Python has no frame.
const WAITING: [&str; 3] = ["distributed/", "autograd/", "nn/parallel/"];
/// Methods of a store that wait for other ranks.
const STORE_METHODS: [&str; 4] = [".get", ".wait", ".barrier", ".queue_pop"];

/// A process by its rank, and the number of ranks.
pub(super) type Numbers = BTreeMap<usize, (u32, usize)>;

/// The last process of each rank that its launcher or its call of `init_process_group` named.
pub(super) fn numbers(run: &Path) -> io::Result<Numbers> {
    let mut found = Vec::new();
    for (pid, path) in numbered(run, RANK, "")? {
        let text = fs::read_to_string(&path)?;
        let mut words = text.split(' ').map_while(|word| word.parse().ok());
        let numbers = words
            .next()
            .zip(words.next())
            .map(|(rank, size)| (rank, (pid, size)));
        found.push((fs::metadata(path)?.modified()?, numbers));
    }
    found.sort();
    Ok(found
        .into_iter()
        .filter_map(|(_, numbers)| numbers)
        .collect())
}

/// The TCP port at which the ranks of a run met.
pub(crate) fn port(run: &Path) -> io::Result<Option<u16>> {
    let ports = numbered(run, RANK, "")?
        .into_iter()
        .filter_map(|(_, path)| {
            fs::read_to_string(path)
                .ok()?
                .split(' ')
                .nth(2)?
                .parse()
                .ok()
        });
    Ok(ports.min())
}

#[derive(Debug)]
struct Known {
    idle_since: Instant,
    /// The processor time in ticks that it had used then, and the nanoseconds that each thread had
    /// waited for a processor.
    before: (u64, BTreeMap<u64, u64>),
    idle: Duration,
    file: Option<OwnedFd>,
    is_running: bool,
    end: Option<End>,
}

/// The known processes.
#[derive(Debug, Default)]
pub(super) struct Processes(BTreeMap<u32, Known>);

impl Processes {
    pub(super) fn look(&mut self, pid: u32) {
        let stat = Process::new(pid as i32).and_then(|process| process.stat());
        let known = self.0.entry(pid).or_insert_with(|| Known {
            file: open(pid),
            ..Known::default()
        });
        match stat {
            Ok(stat) if stat.state != 'Z' || stat.num_threads > 1 => known.look(pid, &stat),
            found if known.end.is_none() => {
                known.is_running = false;
                let status = found
                    .ok()
                    .and_then(|stat| stat.exit_code)
                    .or_else(|| exit_status(known.file.as_ref()?));
                known.end = status.map(|status| ExitStatus::from_raw(status).into());
            }
            _ => {}
        }
    }

    /// Looks at these processes, and forgets all others.
    pub(super) fn look_only(&mut self, pids: impl Iterator<Item = u32>) {
        let pids: BTreeSet<u32> = pids.collect();
        self.0.retain(|pid, _| pids.contains(pid));
        pids.into_iter().for_each(|pid| self.look(pid));
    }

    #[cfg(test)]
    pub(super) fn running(pids: std::ops::Range<u32>) -> Self {
        Self(pids.map(|pid| (pid, Known::default())).collect())
    }

    pub(super) fn is_running(&self, pid: u32) -> bool {
        self.0.get(&pid).is_some_and(|known| known.is_running)
    }

    pub(super) fn end(&self, pid: u32) -> Option<End> {
        self.0.get(&pid)?.end
    }

    /// Returns whether a process has failed: a launcher may react to it.
    pub(super) fn has_failed(&self) -> bool {
        self.0
            .values()
            .any(|known| known.end.is_some_and(|end| end != End::Code(0)))
    }

    /// How long a process has been idle. The time that it waited for a processor does not count.
    pub(super) fn idle(&self, pid: u32) -> Duration {
        self.0.get(&pid).map_or(Duration::ZERO, |known| known.idle)
    }
}

/// Returns the function that waits for other ranks outside of communicators, and the program's
/// frames below it. Reads the stack that an earlier call requested, and requests the next.
pub(super) fn wait_of(run: &Path, pid: u32) -> Option<(String, Vec<ErrorFrame>)> {
    let stacks = run.join(format!("{STACKS}{pid}"));
    let text = fs::read_to_string(&stacks).ok()?;
    if !text.is_empty()
        || fs::metadata(&stacks)
            .ok()?
            .modified()
            .ok()?
            .elapsed()
            .is_ok_and(|age| age > LATE)
    {
        ask(&stacks, pid);
    }
    let stack = stack(&text, run);
    Some((waiting_function(&stack, run)?, of_program(stack, run)))
}

impl Default for Known {
    fn default() -> Self {
        let (before, idle, file, end) = Default::default();
        Self {
            idle_since: Instant::now(),
            before,
            idle,
            file,
            is_running: true,
            end,
        }
    }
}

impl Known {
    fn look(&mut self, pid: u32, stat: &Stat) {
        let (ticks, waits) = (stat.utime + stat.stime, waits_for_processor(pid));
        let waited = waits
            .iter()
            .map(|(thread, waited)| waited - self.before.1.get(thread).unwrap_or(&0).min(waited))
            .max()
            .unwrap_or(0);
        let used = ticks.saturating_sub(self.before.0) as f64 / procfs::ticks_per_second() as f64;
        self.idle = self
            .idle_since
            .elapsed()
            .saturating_sub(Duration::from_nanos(waited));
        // A process in state D reads or writes a disk.
        if stat.state == 'D' || used > IDLE_SECONDS + IDLE_PART * self.idle.as_secs_f64() {
            *self = Self {
                idle_since: Instant::now(),
                before: (ticks, waits),
                idle: Duration::ZERO,
                file: self.file.take(),
                ..*self
            };
        }
    }
}

/// The nanoseconds that each thread of a process has waited for a processor.
fn waits_for_processor(pid: u32) -> BTreeMap<u64, u64> {
    threads(pid)
        .filter_map(|thread| Some((number(&thread)?, scheduled(&thread, 1)?)))
        .collect()
}

/// The threads of a process that sleep for a time or wait for the end of a child process, each with
/// the number of times that it has run.
pub(super) fn sleeping(pid: u32) -> BTreeSet<(u64, u64)> {
    let waits_for_child = |thread: &Path| {
        let call = current_call(thread).0;
        matches!(call, Some(libc::SYS_wait4 | libc::SYS_waitid))
    };
    threads(pid)
        .filter(|thread| is_asleep(thread) || waits_for_child(thread))
        .filter_map(|thread| Some((number(&thread)?, scheduled(&thread, 2)?)))
        .collect()
}

/// Returns whether a thread sleeps for a time.
fn is_asleep(thread: &Path) -> bool {
    match current_call(thread) {
        (Some(libc::SYS_nanosleep | libc::SYS_clock_nanosleep), _) => true,
        // Python before 3.11 sleeps by waiting for none of zero files.
        (Some(libc::SYS_select | libc::SYS_pselect6), waits_for_none) => waits_for_none,
        _ => false,
    }
}

/// The number of the system call in which a thread is, and whether its first argument is zero.
fn current_call(thread: &Path) -> (Option<libc::c_long>, bool) {
    let call = fs::read_to_string(thread.join("syscall")).unwrap_or_default();
    let mut words = call.split_whitespace();
    (
        words.next().and_then(|number| number.parse().ok()),
        words.next() == Some("0x0"),
    )
}

/// Returns whether the main thread of a process sleeps for a time.
pub(super) fn is_main_asleep(pid: u32) -> bool {
    is_asleep(&PathBuf::from(format!("/proc/{pid}/task/{pid}")))
}

fn threads(pid: u32) -> impl Iterator<Item = PathBuf> {
    fs::read_dir(format!("/proc/{pid}/task"))
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
}

fn number(thread: &Path) -> Option<u64> {
    thread.file_name()?.to_str()?.parse().ok()
}

/// A figure of a thread's schedule: 1 is the time that it has waited for a processor, 2 the number
/// of times that it has run (<https://docs.kernel.org/scheduler/sched-stats.html>).
fn scheduled(thread: &Path, figure: usize) -> Option<u64> {
    fs::read_to_string(thread.join("schedstat"))
        .ok()?
        .split_whitespace()
        .nth(figure)?
        .parse()
        .ok()
}

/// Makes the hook write the stacks of a process, if it handles the signal.
fn ask(stacks: &Path, pid: u32) {
    let signal = libc::SIGRTMIN() + STACK_SIGNAL;
    let status = read_of_kernel(pid, "status");
    let caught = status
        .lines()
        .find_map(|line| u64::from_str_radix(line.strip_prefix("SigCgt:")?.trim(), 16).ok());
    let is_caught = caught.is_some_and(|caught| caught >> (signal - 1) & 1 == 1);
    // A signal would interrupt the sleep between torch's attempts to connect, and torch would
    // report an error. So another thread gets it.
    let other = is_main_asleep(pid)
        .then(|| threads(pid).find(|thread| current_call(thread).0 == Some(libc::SYS_futex)))
        .flatten();
    let thread = other
        .and_then(|thread| number(&thread))
        .unwrap_or_else(|| pid.into());
    if is_caught
        && fs::File::options()
            .write(true)
            .truncate(true)
            .open(stacks)
            .is_ok()
    {
        // SAFETY: sends a signal, for which the process has a handler.
        unsafe {
            libc::syscall(
                libc::SYS_tgkill,
                pid as libc::pid_t,
                thread as libc::pid_t,
                signal,
            )
        };
    }
}

/// A descriptor of a process, by which Linux 6.15 and newer reports the end of a process for which
/// its parent has waited.
fn open(pid: u32) -> Option<OwnedFd> {
    // SAFETY: opens a descriptor or fails.
    let file = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    // SAFETY: the descriptor is new.
    (file >= 0).then(|| unsafe { OwnedFd::from_raw_fd(file as i32) })
}

/// The status of a process that has ended, as `waitpid` returns it.
fn exit_status(file: &OwnedFd) -> Option<i32> {
    /// `PIDFD_GET_INFO` with a `struct pidfd_info` of 64 bytes, whose last word is the status.
    const GET_INFO: libc::Ioctl = 0xc040_ff0b;
    /// `PIDFD_INFO_EXIT`.
    const EXIT: u64 = 1 << 3;
    let mut info = [0u64; 8];
    info[0] = EXIT;
    // SAFETY: the kernel writes at most 64 bytes.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), GET_INFO, info.as_mut_ptr()) };
    (result == 0 && info[0] & EXIT != 0).then_some((info[7] >> 32) as i32)
}

/// The stack in a text of Python's faulthandler, innermost frame first: of the thread that wrote
/// it, or else of the main thread, which is last. Threads without frames of the program are left
/// out.
pub(crate) fn stack(text: &str, run: &Path) -> Vec<ErrorFrame> {
    let mut threads: Vec<(bool, Vec<ErrorFrame>)> = Vec::new();
    for line in text.lines() {
        if line.contains("(most recent call first)") {
            threads.push((line.starts_with("Current"), Vec::new()));
        }
        let frame = || {
            let (file, rest) = line
                .trim_start()
                .strip_prefix("File \"")?
                .split_once("\", line ")?;
            let (line, name) = rest.split_once(" in ")?;
            Some(ErrorFrame {
                file: file.to_owned(),
                line: line.parse().ok()?,
                name: name.to_owned(),
            })
        };
        if let (Some((_, frames)), Some(frame)) = (threads.last_mut(), frame()) {
            frames.push(frame);
        }
    }
    threads.retain(|(_, frames)| frames.iter().any(|frame| is_of_program(frame, run)));
    let current = threads.iter().position(|(is_current, _)| *is_current);
    current
        .or(threads.len().checked_sub(1))
        .map(|index| threads.swap_remove(index).1)
        .unwrap_or_default()
}

pub(crate) fn of_program(mut stack: Vec<ErrorFrame>, run: &Path) -> Vec<ErrorFrame> {
    stack.retain(|frame| is_of_program(frame, run));
    stack
}

/// The function of [`WAITING`] that the program called, or the method of a store, if the innermost
/// frame waits there.
pub(super) fn waiting_function(stack: &[ErrorFrame], run: &Path) -> Option<String> {
    let first = stack.iter().position(|frame| is_of_program(frame, run))?;
    let is_of_torch = |frame: &&ErrorFrame| {
        let part = frame
            .file
            .split_once("-packages/torch/")
            .map_or("", |(_, part)| part);
        WAITING.iter().any(|waiting| part.starts_with(waiting)) && frame.name != "wrapper"
    };
    if let Some(innermost) = stack[..first].first() {
        is_of_torch(&innermost).then_some(())?;
        return stack[..first]
            .iter()
            .rfind(is_of_torch)
            .map(|frame| frame.name.clone());
    }
    let text = files::read_to_string(Path::new(&stack[0].file)).ok()?;
    let line = text
        .lines()
        .nth(usize::try_from(stack[0].line).ok()?.checked_sub(1)?)?;
    let method = STORE_METHODS
        .iter()
        .find(|method| line.contains(&format!("{method}(")))?;
    line.to_lowercase()
        .contains("store")
        .then(|| format!("store{method}"))
}

fn is_of_program(ErrorFrame { file, .. }: &ErrorFrame, run: &Path) -> bool {
    !file.starts_with('<')
        && !Path::new(file).starts_with(run)
        && !PACKAGES
            .iter()
            .any(|package| file.contains(&format!("-packages/{package}/")))
}
