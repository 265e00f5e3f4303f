//! [`Detector`] looks for hangs while a program runs.
//!
//! A process that waits for another that continues is no hang. Neither is one that uses the
//! processor, because another of its threads may end the wait. A thread that sleeps may do so after
//! it has woken; it is waited for once, because threads that watch something sleep again and again.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};
use std::{fs, fs::File, io};

use harness_gpu_settings::collectives::{
    CollectiveCall, CollectiveRanks, CollectiveWait, NO_PATIENCE, Rank, data_file, stack_file,
};
use harness_gpu_settings::mapping::Mapped;
use libc::pid_t;

use super::processes::{
    Numbers, Processes, is_main_asleep, numbers, of_program, sleeping, stack, wait_of,
};
use super::{FILE, Hang, HangingRank, RankState};
use crate::errors::{ErrorFrame, OutOfMemoryError};
use crate::files::read_of_kernel;
use crate::process;
use crate::torch_record::TorchRecord;

/// The run ends after the ranks have waited this long. A launcher may end the ranks earlier, and
/// another thread of a rank may call what others wait for.
const GRACE: Duration = Duration::from_secs(2);
/// The same after a process has failed, which a launcher may notice late.
const GRACE_OF_LAUNCHER: Duration = Duration::from_secs(5);
/// The longest sleep that is waited for.
const LONGEST_SLEEP: Duration = Duration::from_secs(60);
/// A process is asked for its stack after it has been idle this long.
const IDLE: Duration = Duration::from_millis(500);

/// What a waiting rank lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lacks {
    /// A call of this process.
    Process(u32),
    /// A call of any other rank, or a process, which may still start.
    Others,
    /// A process, which may still start.
    Start,
    /// Something that never comes.
    Never,
}

/// A rank that waits.
#[derive(Debug)]
pub(super) struct Waiting {
    communicator: usize,
    rank: usize,
    pub(super) pid: u32,
    wait: CollectiveWait,
    pub(super) lacks: Vec<(usize, Lacks)>,
}

/// A process that waits for other ranks outside of communicators.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Outside {
    pub(super) pid: u32,
    pub(super) function: String,
    pub(super) stack: Vec<ErrorFrame>,
}

/// Returns the processes of `waits` that wait forever. A process continues if all that it lacks
/// comes, which other processes decide. `running` are the ranks' processes.
pub(super) fn endless(
    waits: &[(u32, Vec<Lacks>)],
    running: &BTreeSet<u32>,
    can_start: impl FnOnce() -> bool,
) -> BTreeSet<u32> {
    let mut lacks = waits.iter().flat_map(|(_, lacks)| lacks);
    let can_start = lacks.any(|lacks| matches!(lacks, Lacks::Start | Lacks::Others)) && can_start();
    let mut stopped: BTreeSet<u32> = waits.iter().map(|(pid, _)| *pid).collect();
    loop {
        let comes = |lacks: &Lacks| match lacks {
            Lacks::Process(pid) => !stopped.contains(pid),
            Lacks::Others => can_start || !running.is_subset(&stopped),
            Lacks::Start => can_start,
            Lacks::Never => false,
        };
        let continues = |pid: &u32| {
            waits
                .iter()
                .filter(|(of, _)| of == pid)
                .all(|(_, lacks)| lacks.iter().all(comes))
        };
        let left: BTreeSet<u32> = stopped
            .iter()
            .copied()
            .filter(|pid| !continues(pid))
            .collect();
        if left.len() == stopped.len() {
            return stopped;
        }
        stopped = left;
    }
}

pub(super) type Communicators = Vec<(PathBuf, Mapped<CollectiveRanks>)>;

fn members(communicators: &Communicators) -> impl Iterator<Item = u32> {
    let pids = communicators
        .iter()
        .flat_map(|(_, ranks)| ranks.all())
        .map(|rank| rank.process.load(Ordering::Acquire));
    pids.filter(|pid| *pid != 0)
}

pub(super) fn waits(
    communicators: &Communicators,
    is_running: &dyn Fn(u32) -> bool,
) -> Vec<Waiting> {
    let mut found = Vec::new();
    for (communicator, (path, ranks)) in communicators.iter().enumerate() {
        for (rank, state) in ranks.all().iter().enumerate() {
            let pid = state.process.load(Ordering::Acquire);
            let Some(wait) = state
                .wait()
                .filter(|_| !state.has_left() && is_running(pid))
            else {
                continue;
            };
            let lacks = lacking(path, ranks, (rank, wait), is_running)
                .into_iter()
                .map(|(other, is_wrong)| {
                    let of = &ranks.all()[other];
                    let lacks = match of.process.load(Ordering::Acquire) {
                        _ if is_wrong || of.has_left() => Lacks::Never,
                        0 => Lacks::Start,
                        pid if is_running(pid) => Lacks::Process(pid),
                        _ => Lacks::Never,
                    };
                    (other, lacks)
                });
            found.push(Waiting {
                communicator,
                rank,
                pid,
                wait,
                lacks: lacks.collect(),
            });
        }
    }
    found
}

/// The ranks that a rank waits for, and whether their call is the wrong one.
fn lacking(
    path: &Path,
    ranks: &CollectiveRanks,
    (rank, wait): (usize, CollectiveWait),
    is_running: &dyn Fn(u32) -> bool,
) -> Vec<(usize, bool)> {
    let all = ranks.all();
    match wait {
        CollectiveWait::Message(number, from) => {
            let messages = File::open(data_file(path))
                .and_then(|data| all[rank].messages_in(&data))
                .unwrap_or_default();
            let has_arrived = messages
                .iter()
                .any(|message| (message.from, message.number) == (from, number));
            if from >= all.len() || has_arrived {
                Vec::new()
            } else {
                vec![(from, false)]
            }
        }
        CollectiveWait::Collective(number, from) => {
            let others = || {
                (0..all.len())
                    .filter(|other| *other != rank && from.is_none_or(|from| from == *other))
            };
            let is_before = |word: &AtomicU32| word.load(Ordering::Acquire) < number;
            let mut late: Vec<_> = others()
                .filter(|other| is_before(&all[*other].published))
                .collect();
            if late.is_empty() {
                // A rank may have ended while it reduced its part of the data.
                let is_running = |rank: &Rank| is_running(rank.process.load(Ordering::Acquire));
                late.extend(
                    others()
                        .filter(|other| is_before(&all[*other].read) && !is_running(&all[*other])),
                );
            }
            let call = |rank: usize| call(path, ranks, rank, number);
            let is_wrong = |other: &usize| {
                call(*other).is_some_and(|theirs| call(rank).is_some_and(|own| own != theirs))
            };
            let is_wrong_early = |other: &usize| {
                is_wrong(other)
                    && call(*other).map(|call| call.operation)
                        != call(rank).map(|call| call.operation)
            };
            let wrong = others().filter(|other| {
                if late.is_empty() {
                    is_wrong(other)
                } else {
                    is_wrong_early(other)
                }
            });
            wrong
                .map(|other| (other, true))
                .chain(late.iter().map(|other| (*other, false)))
                .collect()
        }
    }
}

fn call(
    communicator: &Path,
    ranks: &CollectiveRanks,
    rank: usize,
    number: u32,
) -> Option<CollectiveCall> {
    ranks
        .find(&File::open(data_file(communicator)).ok()?, rank, number)
        .ok()?
        .map(|published| published.call)
}

/// Looks for hangs while a program runs.
#[derive(Debug, Default)]
pub(crate) struct Detector {
    /// Processes of ranks, and those that have ended.
    processes: Processes,
    /// All running processes of the program.
    descendants: Processes,
    found: Option<Suspect>,
}

/// Processes that wait forever unless one of their threads goes on.
#[derive(Debug)]
struct Suspect {
    key: Key,
    since: Instant,
    /// The threads that slept at the end of the first grace period, as [`sleeping`] returns them,
    /// until they have woken.
    asleep: Option<BTreeSet<(u64, u64)>>,
}

/// What waits forever: the communicator, the rank and the wait of each, and the waits outside of
/// communicators.
type Key = (Vec<(PathBuf, usize, CollectiveWait)>, Vec<Outside>);

impl Detector {
    /// Returns whether the program hangs, and writes the hang to the folder of the run.
    /// `descendants` are the processes of the program.
    pub(crate) fn look(&mut self, run: &Path, descendants: &[pid_t]) -> bool {
        self.find(run, descendants).is_ok_and(|hang| {
            hang.is_some_and(|hang| {
                serde_json::to_vec(&hang).is_ok_and(|text| fs::write(run.join(FILE), text).is_ok())
            })
        })
    }

    fn find(&mut self, run: &Path, descendants: &[pid_t]) -> io::Result<Option<Hang>> {
        let mut communicators = CollectiveRanks::read_folder(run)?;
        // The largest names the ranks.
        communicators
            .sort_by_key(|(path, ranks)| (std::cmp::Reverse(ranks.all().len()), path.clone()));
        let numbers = numbers(run)?;
        let all: BTreeSet<u32> = members(&communicators)
            .chain(numbers.values().map(|(pid, _)| *pid))
            .collect();
        all.iter().for_each(|pid| self.processes.look(*pid));
        let running: BTreeSet<u32> = all
            .into_iter()
            .filter(|pid| self.processes.is_running(*pid))
            .collect();
        let mut waits = waits(&communicators, &|pid| self.processes.is_running(pid));
        let mut outside = self.outside(
            run,
            running
                .iter()
                .copied()
                .filter(|pid| waits.iter().all(|waiting| waiting.pid != *pid))
                .collect(),
        );
        let lacks = waits.iter().map(|waiting| {
            (
                waiting.pid,
                waiting.lacks.iter().map(|(_, lacks)| *lacks).collect(),
            )
        });
        let lacks: Vec<_> = lacks
            .chain(
                outside
                    .iter()
                    .map(|waiting| (waiting.pid, vec![Lacks::Others])),
            )
            .collect();
        let pids = lacks.iter().map(|(pid, _)| *pid).collect();
        self.descendants
            .look_only(descendants.iter().map(|pid| *pid as u32));
        let stopped = endless(&lacks, &running, || {
            can_start(descendants, &pids, |pid| self.descendants.idle(pid) < GRACE)
        });
        waits.retain(|waiting| stopped.contains(&waiting.pid));
        outside.retain(|waiting| stopped.contains(&waiting.pid));
        let of_wait = |waiting: &Waiting| {
            (
                communicators[waiting.communicator].0.clone(),
                waiting.rank,
                waiting.wait,
            )
        };
        let key: Key = (waits.iter().map(of_wait).collect(), outside.clone());
        if stopped.is_empty() {
            self.found = None;
            return Ok(None);
        }
        if !self.observe(run, key, &stopped)? {
            return Ok(None);
        }
        let found = Found {
            run,
            communicators: &communicators,
            numbers: &numbers,
            waits: &waits,
            outside: &outside,
            processes: &self.processes,
        };
        Ok(Some(found.describe()))
    }

    /// Notes that these processes wait in the calls of `key`. Returns whether they have waited for
    /// the grace period and no sleeping thread can end the wait. Before, ranks go on that can do so
    /// without data.
    fn observe(&mut self, run: &Path, key: Key, stopped: &BTreeSet<u32>) -> io::Result<bool> {
        let suspect = match self.found.take().filter(|suspect| suspect.key == key) {
            Some(suspect) => self.found.insert(suspect),
            None => self.found.insert(Suspect {
                key,
                since: Instant::now(),
                asleep: None,
            }),
        };
        let since = suspect.since.elapsed();
        let idle = stopped
            .iter()
            .map(|pid| self.processes.idle(*pid))
            .chain([since])
            .min();
        let grace = if self.processes.has_failed() {
            GRACE_OF_LAUNCHER
        } else {
            GRACE
        };
        if idle >= Some(GRACE / 2) {
            fs::write(run.join(NO_PATIENCE), "")?;
        }
        if idle < Some(grace) {
            return Ok(false);
        }
        let asleep: BTreeSet<_> = stopped.iter().flat_map(|pid| sleeping(*pid)).collect();
        let before = suspect.asleep.get_or_insert_with(|| asleep.clone());
        if !before.is_disjoint(&asleep) {
            return Ok(since >= LONGEST_SLEEP);
        }
        if before.is_empty() {
            return Ok(true);
        }
        // All have woken. They have another grace period to end the wait.
        before.clear();
        suspect.since = Instant::now();
        Ok(false)
    }

    /// The waits outside of communicators, once all of these processes are idle.
    fn outside(&self, run: &Path, pids: Vec<u32>) -> Vec<Outside> {
        if pids.iter().any(|pid| self.processes.idle(*pid) < IDLE) {
            return Vec::new();
        }
        let wait = |pid| {
            wait_of(run, pid).map(|(function, stack)| Outside {
                pid,
                function,
                stack,
            })
        };
        pids.into_iter().filter_map(wait).collect()
    }
}

/// Returns whether a process may become a rank: one with torch that neither waits nor has started a
/// rank that waits. A process that a waiting rank has started counts only while it is busy or
/// sleeps for a time. Workers of ranks, such as those of data loaders, are idle.
fn can_start(
    descendants: &[pid_t],
    waiting: &BTreeSet<u32>,
    is_busy: impl Fn(u32) -> bool,
) -> bool {
    let parents = process::parents();
    let up = |pid: pid_t| std::iter::successors(Some(pid), |pid| parents.get(pid).copied());
    let launchers: BTreeSet<pid_t> = waiting.iter().flat_map(|pid| up(*pid as pid_t)).collect();
    let has_torch = |pid: &pid_t| read_of_kernel(pid, "maps").contains("/libtorch");
    let is_of_waiting = |pid: &pid_t| up(*pid).any(|pid| waiting.contains(&(pid as u32)));
    let becomes_rank = |pid: &pid_t| {
        let is_worker = is_of_waiting(pid);
        is_worker && is_busy(*pid as u32)
            || has_torch(pid) && (!is_worker || is_main_asleep(*pid as u32))
    };
    descendants
        .iter()
        .filter(|pid| !launchers.contains(pid))
        .any(becomes_rank)
}

/// The parts of a hang.
pub(super) struct Found<'a> {
    pub(super) run: &'a Path,
    pub(super) communicators: &'a Communicators,
    pub(super) numbers: &'a Numbers,
    pub(super) waits: &'a [Waiting],
    pub(super) outside: &'a [Outside],
    pub(super) processes: &'a Processes,
}

impl Found<'_> {
    /// The number of a process in the largest communicator, or the one that its launcher named.
    fn name(&self, pid: u32, other: usize) -> usize {
        let position = |(_, ranks): &(_, Mapped<CollectiveRanks>)| {
            ranks
                .all()
                .iter()
                .position(|rank| rank.process.load(Ordering::Acquire) == pid)
        };
        let named = || {
            self.numbers
                .iter()
                .find(|(_, (of, _))| *of == pid)
                .map(|(rank, _)| *rank)
        };
        self.communicators
            .iter()
            .find_map(position)
            .or_else(named)
            .filter(|_| pid != 0)
            .unwrap_or(other)
    }

    fn pid_of(&self, waiting: &Waiting, rank: usize) -> u32 {
        self.communicators[waiting.communicator].1.all()[rank]
            .process
            .load(Ordering::Acquire)
    }

    pub(super) fn describe(&self) -> Hang {
        let mut ranks: BTreeMap<(usize, Option<u32>), RankState> = BTreeMap::new();
        let numbers = self.numbers_of_communicators();
        for waiting in self.waits {
            let rank = self.name(waiting.pid, waiting.rank);
            ranks.insert((rank, Some(waiting.pid)), self.in_call(waiting, &numbers));
        }
        let size = self.numbers.values().map(|(_, size)| *size).max();
        let size = size.unwrap_or_default();
        let mut lacking: Vec<(usize, u32, bool)> = Vec::new();
        for waiting in self.outside {
            let waits_for = self.lacking_outside(waiting, size);
            let pid_of = |rank: &usize| self.numbers.get(rank).map_or(0, |(pid, _)| *pid);
            lacking.extend(waits_for.iter().map(|rank| (*rank, pid_of(rank), false)));
            let (number, elements, element_type, root, communicator) = Default::default();
            let state = RankState::Waits {
                collective: waiting.function.clone(),
                number,
                elements,
                element_type,
                root,
                communicator,
                size,
                waits_for,
                stack: waiting.stack.clone(),
            };
            ranks.insert((self.name(waiting.pid, size), Some(waiting.pid)), state);
        }
        lacking.extend(self.lacking_in_communicators());
        for (rank, pid, has_left) in lacking {
            ranks
                .entry((self.name(pid, rank), Some(pid).filter(|pid| *pid != 0)))
                .or_insert_with(|| self.not_waiting(pid, has_left));
        }
        let out_of_memory = |pid: u32| {
            OutOfMemoryError::of_process(self.run, pid)
                .pop()
                .and_then(|error| error.frames.into_iter().next())
        };
        let record = |((rank, pid), state): ((usize, Option<u32>), RankState)| HangingRank {
            rank,
            pid,
            state,
            out_of_memory: pid.and_then(out_of_memory),
        };
        Hang {
            ranks: ranks.into_iter().map(record).collect(),
        }
    }

    /// Numbers the communicators in the order of the ranks that wait in them.
    fn numbers_of_communicators(&self) -> BTreeMap<usize, usize> {
        let mut numbers: BTreeMap<usize, usize> = BTreeMap::new();
        let mut by_rank: Vec<&Waiting> = self.waits.iter().collect();
        by_rank.sort_by_key(|waiting| (self.name(waiting.pid, waiting.rank), waiting.communicator));
        for waiting in by_rank {
            let next = numbers.len() + 1;
            numbers.entry(waiting.communicator).or_insert(next);
        }
        numbers
    }

    /// The state of a rank that waits in a call of NCCL.
    fn in_call(&self, waiting: &Waiting, numbers: &BTreeMap<usize, usize>) -> RankState {
        let (path, members) = &self.communicators[waiting.communicator];
        let call = match waiting.wait {
            CollectiveWait::Collective(number, _) => call(path, members, waiting.rank, number),
            CollectiveWait::Message(..) => None,
        };
        let (CollectiveWait::Collective(number, _) | CollectiveWait::Message(number, _)) =
            waiting.wait;
        let sized = call.filter(CollectiveCall::has_size);
        let text =
            fs::read_to_string(stack_file(path, waiting.rank, waiting.wait)).unwrap_or_default();
        RankState::Waits {
            collective: call
                .map_or_else(|| "receive".to_owned(), |call| call.operation.to_string()),
            number: Some(number),
            elements: sized.map(|call| call.count),
            element_type: sized.map(|call| call.element().to_owned()),
            root: call.and_then(|call| call.root),
            communicator: numbers.get(&waiting.communicator).copied(),
            size: members.all().len(),
            waits_for: waiting
                .lacks
                .iter()
                .map(|(rank, _)| self.name(self.pid_of(waiting, *rank), *rank))
                .collect(),
            stack: of_program(stack(&text, self.run), self.run),
        }
    }

    /// The ranks that a process outside of communicators waits for: those that wait elsewhere, or
    /// all others.
    fn lacking_outside(&self, waiting: &Outside, size: usize) -> Vec<usize> {
        let is_same = |rank: usize| {
            self.outside.iter().any(|other| {
                self.name(other.pid, size) == rank && other.function == waiting.function
            })
        };
        let own = self.name(waiting.pid, size);
        let elsewhere: Vec<usize> = (0..size).filter(|rank| !is_same(*rank)).collect();
        if elsewhere.is_empty() {
            (0..size).filter(|rank| *rank != own).collect()
        } else {
            elsewhere
        }
    }

    /// The ranks that calls of NCCL wait for, their processes, and whether they have left.
    fn lacking_in_communicators(&self) -> impl Iterator<Item = (usize, u32, bool)> {
        let lacks = self
            .waits
            .iter()
            .flat_map(|waiting| waiting.lacks.iter().map(move |(rank, _)| (waiting, *rank)));
        lacks.map(|(waiting, rank)| {
            let members = self.communicators[waiting.communicator].1.all();
            // A process that has not joined may have a number from its launcher.
            let named = || {
                self.numbers
                    .get(&rank)
                    .filter(|(_, size)| *size == members.len())
                    .map_or(0, |(pid, _)| *pid)
            };
            let pid = Some(self.pid_of(waiting, rank))
                .filter(|pid| *pid != 0)
                .unwrap_or_else(named);
            (rank, pid, members[rank].has_left())
        })
    }

    /// The state of a process that others wait for, and that does not wait.
    fn not_waiting(&self, pid: u32, has_left: bool) -> RankState {
        if pid == 0 {
            RankState::Missing
        } else if !self.processes.is_running(pid) {
            RankState::ended(self.last_line(pid), self.processes.end(pid))
        } else if has_left {
            RankState::Left
        } else {
            RankState::Continues
        }
    }

    /// The last line of the traceback, if an exception ended the process.
    fn last_line(&self, pid: u32) -> Option<String> {
        let torch: TorchRecord =
            serde_json::from_slice(&fs::read(self.run.join(format!("torch-{pid}.json"))).ok()?)
                .ok()?;
        torch.traceback.into_iter().next_back()
    }
}
