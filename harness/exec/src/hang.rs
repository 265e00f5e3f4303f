//! [`Hang`]: ranks that wait for each other, or for ranks that never come. Found from outside of the program, in the files of its communicators.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use std::{fs, io};

use harness_base::words::joined;
use harness_gpu_settings::collectives::{Call, Ranks, Wait, message_file, stack_file};
use harness_gpu_settings::mapping::Mapped;
use harness_gpu_settings::process::is_running;
use libc::pid_t;
use serde::{Deserialize, Serialize};

use crate::process;
use crate::record::TorchRecord;
use crate::trials::observed::{Frame, OutOfMemory};

/// The exit code of a run that was stopped because its ranks hang, as that of `timeout`.
pub const EXIT_CODE: u8 = 124;
/// The file of a run with its hang.
const FILE: &str = "hang.json";
/// The run ends after the ranks have waited this long. A launcher may end the ranks earlier, and another thread of a rank may call what others wait for.
const GRACE: Duration = Duration::from_secs(2);
/// Packages whose frames are not the program's.
const PACKAGES: [&str; 5] = ["torch", "torchvision", "torchaudio", "functorch", "triton"];

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Hang {
    /// The ranks that wait and those that they wait for.
    pub ranks: Vec<HangingRank>,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct HangingRank {
    /// In the largest communicator of its process.
    pub rank: usize,
    pub pid: Option<u32>,
    #[serde(flatten)]
    pub state: RankState,
    /// Where PyTorch raised its last OutOfMemoryError.
    pub out_of_memory: Option<Frame>,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum RankState {
    Waits {
        /// The name of the collective, or `receive`.
        collective: String,
        /// Counted from 1 in its communicator, or among the messages of the sender.
        number: u32,
        elements: Option<usize>,
        element_type: Option<String>,
        root: Option<usize>,
        /// The number of the communicator in this hang, from 1.
        communicator: usize,
        /// The number of its ranks.
        size: usize,
        waits_for: Vec<usize>,
        /// The call stack without PyTorch's own frames, innermost first.
        stack: Vec<Frame>,
    },
    /// Its process has ended, with this line if an exception ended it.
    Ended { error: Option<String> },
    /// It destroyed its communicator.
    Left,
    /// It never joined the communicator.
    Missing,
    /// It goes on, after a call that the others do not expect.
    Continues,
}

impl Hang {
    pub(crate) fn read(run: &Path) -> io::Result<Option<Self>> {
        match fs::read(run.join(FILE)) {
            Ok(bytes) => Ok(serde_json::from_slice(&bytes).ok()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    pub(crate) fn is_in(run: &Path) -> bool {
        run.join(FILE).exists()
    }

    /// A line per group of ranks with the same state.
    pub fn lines(&self) -> Vec<String> {
        let mut groups: BTreeMap<(&RankState, &Option<Frame>), Vec<usize>> = BTreeMap::new();
        for rank in &self.ranks {
            groups.entry((&rank.state, &rank.out_of_memory)).or_default().push(rank.rank);
        }
        let mut groups: Vec<_> = groups.into_iter().collect();
        groups.sort_by_key(|((state, _), ranks)| (!matches!(state, RankState::Waits { .. }), ranks[0]));
        let is_several = self.ranks.iter().any(|rank| matches!(rank.state, RankState::Waits { communicator: 2.., .. }));
        groups.into_iter().map(|((state, out_of_memory), ranks)| line(state, out_of_memory.as_ref(), &ranks, is_several)).collect()
    }
}

fn line(state: &RankState, out_of_memory: Option<&Frame>, ranks: &[usize], names_communicator: bool) -> String {
    let (who, is_one) = (named(ranks), ranks.len() == 1);
    let place = out_of_memory.map(|frame| format!(" at {}", frame.short()));
    let after = place.as_ref().map_or_else(String::new, |place| format!(" after an OutOfMemoryError{place}"));
    let has = if is_one { "has" } else { "have" };
    match state {
        RankState::Waits { collective, number, elements, element_type, root, waits_for, stack, communicator, .. } => {
            let size = elements.zip(element_type.as_ref()).map_or_else(String::new, |(count, of)| format!(" of {count} {of}"));
            let root = root.map_or_else(String::new, |root| format!(" with root {root}"));
            let at = stack.first().map_or_else(String::new, |frame| format!(" at {}", frame.short()));
            let verb = if is_one { "waits" } else { "wait" };
            let of = if names_communicator { format!(" of communicator {communicator}") } else { String::new() };
            format!("{who} {verb} in {collective}{size}{root} (number {number}{of}){at} for {}{after}", named(waits_for))
        }
        RankState::Ended { error: Some(error) } if error.contains("OutOfMemoryError") => {
            format!("{who} {has} ended with OutOfMemoryError{}", place.unwrap_or_default())
        }
        RankState::Ended { error: Some(error) } => format!("{who} {has} ended with `{error}`{after}"),
        RankState::Ended { error: None } => format!("{who} {has} ended{after}"),
        RankState::Left => format!("{who} {has} destroyed the communicator{after}"),
        RankState::Missing => format!("{who} {has} not joined the communicator"),
        RankState::Continues => format!("{who} {}{after}", if is_one { "continues" } else { "continue" }),
    }
}

/// Names ranks, as in `ranks 0-2 and 5`.
fn named(ranks: &[usize]) -> String {
    let sorted: BTreeSet<usize> = ranks.iter().copied().collect();
    let mut spans: Vec<[usize; 2]> = Vec::new();
    for rank in sorted {
        match spans.last_mut() {
            Some([_, last]) if *last + 1 == rank => *last = rank,
            _ => spans.push([rank; 2]),
        }
    }
    let texts: Vec<String> =
        spans.iter().map(|[first, last]| if first == last { first.to_string() } else { format!("{first}-{last}") }).collect();
    format!("{} {}", if ranks.len() == 1 { "rank" } else { "ranks" }, joined(texts, ", "))
}

/// What a waiting rank lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lacks {
    /// A call of this process.
    Process(u32),
    /// A process, which may still start.
    Start,
    /// Something that never comes.
    Never,
}

/// A rank that waits.
#[derive(Debug)]
struct Waiting {
    communicator: usize,
    rank: usize,
    pid: u32,
    wait: Wait,
    lacks: Vec<(usize, Lacks)>,
}

/// Returns the waits that never end. A process continues if all that its waits lack comes, which other processes decide; the rest waits forever.
fn endless(waits: Vec<Waiting>, can_start: impl FnOnce() -> bool) -> Vec<Waiting> {
    let lacks = || waits.iter().flat_map(|waiting| &waiting.lacks).map(|(_, lacks)| *lacks);
    let can_start = lacks().any(|lacks| lacks == Lacks::Start) && can_start();
    let mut stopped: BTreeSet<u32> = waits.iter().map(|waiting| waiting.pid).collect();
    loop {
        let comes = |lacks: &Lacks| match lacks {
            Lacks::Process(pid) => !stopped.contains(pid),
            Lacks::Start => can_start,
            Lacks::Never => false,
        };
        let continues = |pid: &u32| {
            waits.iter().filter(|waiting| waiting.pid == *pid).all(|waiting| waiting.lacks.iter().all(|(_, lacks)| comes(lacks)))
        };
        let left: BTreeSet<u32> = stopped.iter().copied().filter(|pid| !continues(pid)).collect();
        if left.len() == stopped.len() {
            return waits.into_iter().filter(|waiting| stopped.contains(&waiting.pid)).collect();
        }
        stopped = left;
    }
}

type Communicators = Vec<(PathBuf, Mapped<Ranks>)>;

fn waits(communicators: &Communicators, is_running: &mut dyn FnMut(u32) -> bool) -> Vec<Waiting> {
    let mut found = Vec::new();
    for (communicator, (path, ranks)) in communicators.iter().enumerate() {
        for (rank, state) in ranks.all().iter().enumerate() {
            let pid = state.process.load(Ordering::Acquire);
            let Some(wait) = state.wait().filter(|_| !state.has_left() && is_running(pid)) else { continue };
            let lacks = lacking(path, ranks, (rank, wait)).into_iter().map(|(other, is_wrong)| {
                let of = &ranks.all()[other];
                let lacks = match of.process.load(Ordering::Acquire) {
                    _ if is_wrong || of.has_left() => Lacks::Never,
                    0 => Lacks::Start,
                    pid if is_running(pid) => Lacks::Process(pid),
                    _ => Lacks::Never,
                };
                (other, lacks)
            });
            found.push(Waiting { communicator, rank, pid, wait, lacks: lacks.collect() });
        }
    }
    found
}

/// The ranks that a rank waits for, and whether their call is the wrong one.
fn lacking(path: &Path, ranks: &Ranks, (rank, wait): (usize, Wait)) -> Vec<(usize, bool)> {
    let all = ranks.all();
    match wait {
        Wait::Message(number, from) => {
            if from >= all.len() || message_file(path, from, rank, number).exists() {
                Vec::new()
            } else {
                vec![(from, false)]
            }
        }
        Wait::Collective(number, from) => {
            let others = || (0..all.len()).filter(|other| *other != rank && from.is_none_or(|from| from == *other));
            let late: Vec<_> = others().filter(|other| all[*other].published.load(Ordering::Acquire) < number).collect();
            let call = |rank: usize| all[rank].call(number).map(|(call, _)| call);
            let is_wrong = |other: &usize| call(*other).is_some_and(|theirs| call(rank).is_some_and(|own| own != theirs));
            let is_wrong_early =
                |other: &usize| is_wrong(other) && call(*other).map(|call| call.operation) != call(rank).map(|call| call.operation);
            let wrong = others().filter(|other| if late.is_empty() { is_wrong(other) } else { is_wrong_early(other) });
            wrong.map(|other| (other, true)).chain(late.iter().map(|other| (*other, false))).collect()
        }
    }
}

/// Looks for hangs while a program runs.
#[derive(Debug, Default)]
pub(crate) struct Detector(Option<(Waits, Instant)>);

/// The communicator, the rank and the wait of each.
type Waits = Vec<(PathBuf, usize, Wait)>;

impl Detector {
    /// Returns whether the program hangs, and writes the hang to the folder of the run. `descendants` are the processes of the program.
    pub(crate) fn look(&mut self, run: &Path, descendants: &[pid_t]) -> bool {
        let mut communicators = Ranks::read_folder(run).unwrap_or_default();
        // The largest names the ranks.
        communicators.sort_by_key(|(path, ranks)| (std::cmp::Reverse(ranks.all().len()), path.clone()));
        let mut known = BTreeMap::new();
        let mut is_running = |pid| *known.entry(pid).or_insert_with(|| is_running(pid));
        let waits = waits(&communicators, &mut is_running);
        let pids: BTreeSet<u32> = waits.iter().map(|waiting| waiting.pid).collect();
        let endless = endless(waits, || can_start(descendants, &pids));
        let key: Waits =
            endless.iter().map(|waiting| (communicators[waiting.communicator].0.clone(), waiting.rank, waiting.wait)).collect();
        let since = match &self.0 {
            _ if key.is_empty() => {
                self.0 = None;
                return false;
            }
            Some((known, since)) if *known == key => *since,
            _ => self.0.insert((key, Instant::now())).1,
        };
        if since.elapsed() < GRACE {
            return false;
        }
        let hang = describe(run, &communicators, &endless, &mut is_running);
        serde_json::to_vec(&hang).is_ok_and(|text| fs::write(run.join(FILE), text).is_ok())
    }
}

/// Returns whether a process with torch runs that neither waits nor belongs to one that waits.
fn can_start(descendants: &[pid_t], waiting: &BTreeSet<u32>) -> bool {
    let of_waiting: BTreeSet<pid_t> =
        waiting.iter().flat_map(|pid| process::descendants(*pid as pid_t).into_iter().chain([*pid as pid_t])).collect();
    let has_torch = |pid: &&pid_t| fs::read_to_string(format!("/proc/{pid}/maps")).is_ok_and(|maps| maps.contains("/libtorch"));
    descendants.iter().filter(|pid| !of_waiting.contains(pid)).any(|pid| has_torch(&pid))
}

fn describe(run: &Path, communicators: &Communicators, endless: &[Waiting], is_running: &mut dyn FnMut(u32) -> bool) -> Hang {
    let name = |pid: u32, other: usize| {
        let position = |(_, ranks): &(_, Mapped<Ranks>)| ranks.all().iter().position(|rank| rank.process.load(Ordering::Acquire) == pid);
        communicators.iter().find_map(position).filter(|_| pid != 0).unwrap_or(other)
    };
    let mut ranks: BTreeMap<(usize, Option<u32>), RankState> = BTreeMap::new();
    let mut numbers: BTreeMap<usize, usize> = BTreeMap::new();
    let mut by_rank: Vec<&Waiting> = endless.iter().collect();
    by_rank.sort_by_key(|waiting| (name(waiting.pid, waiting.rank), waiting.communicator));
    for waiting in &by_rank {
        let next = numbers.len() + 1;
        numbers.entry(waiting.communicator).or_insert(next);
    }
    let pid_of = |waiting: &Waiting, rank: usize| communicators[waiting.communicator].1.all()[rank].process.load(Ordering::Acquire);
    for waiting in endless {
        let (path, members) = &communicators[waiting.communicator];
        let call = match waiting.wait {
            Wait::Collective(number, _) => members.all()[waiting.rank].call(number).map(|(call, _)| call),
            Wait::Message(..) => None,
        };
        let (Wait::Collective(number, _) | Wait::Message(number, _)) = waiting.wait;
        let sized = call.filter(Call::has_size);
        let stack = fs::read_to_string(stack_file(path, waiting.rank, waiting.wait)).unwrap_or_default();
        let state = RankState::Waits {
            collective: call.map_or_else(|| "receive".to_owned(), |call| call.operation.to_string()),
            number,
            elements: sized.map(|call| call.count),
            element_type: sized.map(|call| call.element().to_owned()),
            root: call.and_then(|call| call.root),
            communicator: numbers.get(&waiting.communicator).copied().unwrap_or(1),
            size: members.all().len(),
            waits_for: waiting.lacks.iter().map(|(rank, _)| name(pid_of(waiting, *rank), *rank)).collect(),
            stack: frames(&stack, run),
        };
        ranks.insert((name(waiting.pid, waiting.rank), Some(waiting.pid)), state);
    }
    for (waiting, rank) in endless.iter().flat_map(|waiting| waiting.lacks.iter().map(move |(rank, _)| (waiting, *rank))) {
        let pid = pid_of(waiting, rank);
        let state = if pid == 0 {
            RankState::Missing
        } else if !is_running(pid) {
            RankState::Ended { error: last_line(run, pid) }
        } else if communicators[waiting.communicator].1.all()[rank].has_left() {
            RankState::Left
        } else {
            RankState::Continues
        };
        ranks.entry((name(pid, rank), Some(pid).filter(|pid| *pid != 0))).or_insert(state);
    }
    let out_of_memory = |pid: u32| OutOfMemory::of_process(run, pid).pop().and_then(|error| error.frames.into_iter().next());
    let record = |((rank, pid), state): ((usize, Option<u32>), RankState)| HangingRank {
        rank,
        pid,
        state,
        out_of_memory: pid.and_then(out_of_memory),
    };
    Hang { ranks: ranks.into_iter().map(record).collect() }
}

/// The last line of the traceback, if an exception ended the process.
fn last_line(run: &Path, pid: u32) -> Option<String> {
    let torch: TorchRecord = serde_json::from_slice(&fs::read(run.join(format!("torch-{pid}.json"))).ok()?).ok()?;
    torch.traceback.into_iter().next_back()
}

/// The program's frames in a text of Python's faulthandler, innermost first: of the thread that wrote it, or else of the main thread, which is last.
fn frames(text: &str, run: &Path) -> Vec<Frame> {
    let mut threads: Vec<(bool, Vec<Frame>)> = Vec::new();
    for line in text.lines() {
        if line.contains("(most recent call first)") {
            threads.push((line.starts_with("Current"), Vec::new()));
        }
        let frame = || {
            let (file, rest) = line.trim_start().strip_prefix("File \"")?.split_once("\", line ")?;
            let (line, name) = rest.split_once(" in ")?;
            Some(Frame { file: file.to_owned(), line: line.parse().ok()?, name: name.to_owned() })
        };
        if let (Some((_, frames)), Some(frame)) = (threads.last_mut(), frame().filter(|frame| is_of_program(&frame.file, run))) {
            frames.push(frame);
        }
    }
    threads.retain(|(_, frames)| !frames.is_empty());
    let current = threads.iter().position(|(is_current, _)| *is_current);
    current.or(threads.len().checked_sub(1)).map(|index| threads.swap_remove(index).1).unwrap_or_default()
}

fn is_of_program(file: &str, run: &Path) -> bool {
    !file.starts_with('<')
        && !Path::new(file).starts_with(run)
        && !PACKAGES.iter().any(|package| file.contains(&format!("-packages/{package}/")))
}

#[cfg(test)]
mod tests;
