//! Runs in copies of this process ([`Branches`]): what comes before a failure is run once for many calls that fail behind it.
//!
//! A server is a fork server, as fuzzers have them: a copy of this process from before anything was run. It is small, so that copies of it are made quickly. For each
//! [`Order`] it makes a copy that runs the arm, and that makes one for each call that is to fail. What came of those they tell by a line of JSON each. What nobody tells,
//! because a copy ended otherwise or could not be made, has to be found out by a run in this process.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use harness_allocator::device::faulty::Injector;
use harness_devices::DeviceSource;
use harness_exec::forked::{Copied, Forked, fork, leave};
use harness_exec::large_pages::use_for_code;
use harness_record::FaultedCase;
use serde::{Deserialize, Serialize};

use super::{ArmRun, Attempt, Engine, Outcome, Tried, Way};
use crate::branches::{Branches, Ended, Failing, Point};
use crate::faults::Faults;
use crate::processes::StartedBy;
use crate::rig::CheckedFrom;

/// Calls of one order at most: so many that the run up to them costs each of them little, and so few that all servers have something to do to the end.
pub(super) const MOST_POINTS: usize = 400;

/// Calls of one arm that are to fail, each in a copy of its own, in the order of their operations.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Order {
    /// The place of the arm among all.
    pub(super) arm: usize,
    /// Requests that run out of memory where no call fails.
    pub(super) ooms_without: u64,
    /// After so many calls a run does not end.
    pub(super) budget: u64,
    pub(super) points: Vec<Point>,
}

/// What a server says.
#[derive(Serialize, Deserialize)]
enum Answer {
    /// What came of a copy.
    Outcome { place: usize, case: FaultedCase, ended_at_once: bool, wants_one_more: bool },
    /// Nothing more is said to this order.
    Over,
}

/// Whether runs of an arm can be made in copies: only if nothing outside of the process takes part in them.
pub(super) fn can_run(source: &DeviceSource, arm: &ArmRun<'_>) -> bool {
    source.simulated_because().is_some() && arm.allocator.as_library().is_none()
}

/// Servers that wait for orders.
pub(super) struct Servers(Mutex<Vec<Server>>);

struct Server {
    /// Killed with this.
    _copied: Copied,
    socket: BufReader<UnixStream>,
}

impl Servers {
    /// One for each run that is made at one time, or as many as can be made; none where no arm has any use for them.
    pub(super) fn start(engine: &Engine<'_>, arms: &[ArmRun<'_>]) -> Self {
        let wanted = if arms.iter().any(|arm| can_run(engine.source, arm)) { engine.jobs } else { 0 };
        if wanted > 0 {
            // All copies share these pages. Where that cannot be done, they take more time.
            let _ = use_for_code();
        }
        Self(Mutex::new((0..wanted).map_while(|_| Server::start(engine, arms)).collect()))
    }

    /// Has an order done, and tells `progress` of each call. What was told of each place.
    pub(super) fn ask(&self, order: &Order, stop: &AtomicBool, progress: &(dyn Fn() + Sync)) -> BTreeMap<usize, Tried> {
        let take = || self.0.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut told = BTreeMap::new();
        let Some(mut server) = take().filter(|_| !stop.load(Ordering::Relaxed)) else { return told };
        // One that broke off, or that nobody wants to wait for any more, is killed.
        if server.ask(order, stop, &mut told, progress).is_some() {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).push(server);
        }
        told
    }
}

impl Server {
    /// `None` where there is no room for one.
    fn start(engine: &Engine<'_>, arms: &[ArmRun<'_>]) -> Option<Self> {
        let (ours, theirs) = UnixStream::pair().ok()?;
        match fork().ok()? {
            Forked::Copy => {
                drop(ours);
                serve(engine, arms, theirs)
            }
            Forked::Original(copied) => Some(Self { _copied: copied, socket: BufReader::new(ours) }),
        }
    }

    /// `None` where it did not come to the end of the order.
    fn ask(&mut self, order: &Order, stop: &AtomicBool, told: &mut BTreeMap<usize, Tried>, progress: &(dyn Fn() + Sync)) -> Option<()> {
        send(self.socket.get_mut(), order)?;
        // The first run of a call whose second one was not told yet.
        let mut first: Option<(usize, Tried)> = None;
        let mut line = Vec::new();
        while !stop.load(Ordering::Relaxed) {
            line.clear();
            self.socket.read_until(b'\n', &mut line).ok()?;
            let Answer::Outcome { place, case, ended_at_once, wants_one_more } = serde_json::from_slice(&line).ok()? else {
                return Some(());
            };
            let mut tried = match first.take() {
                Some((of, tried)) if of == place => tried,
                _ => Tried { cases: Vec::new(), ended_at_once },
            };
            tried.cases.push(case);
            if wants_one_more {
                first = Some((place, tried));
            } else {
                told.insert(place, tried);
                progress();
            }
        }
        None
    }
}

#[cfg(test)]
impl Servers {
    /// None: each case is tried in a run of its own.
    pub(super) const fn none() -> Self {
        Self(Mutex::new(Vec::new()))
    }

    /// So many that end when they have heard their first order.
    pub(super) fn breaking_off(count: usize) -> Self {
        let server = |_| {
            let (ours, theirs) = UnixStream::pair().ok()?;
            match fork().ok()? {
                Forked::Copy => {
                    let _ = BufReader::new(theirs).read_until(b'\n', &mut Vec::new());
                    leave(0)
                }
                Forked::Original(copied) => Some(Server { _copied: copied, socket: BufReader::new(ours) }),
            }
        };
        Self(Mutex::new((0..count).map_while(server).collect()))
    }
}

/// Writes a line; `None` where nobody reads it.
fn send(to: &mut UnixStream, message: &impl Serialize) -> Option<()> {
    let mut line = serde_json::to_vec(message).ok()?;
    line.push(b'\n');
    to.write_all(&line).ok()
}

/// What a server does, to its end.
fn serve(engine: &Engine<'_>, arms: &[ArmRun<'_>], mut socket: UnixStream) -> ! {
    let Ok(orders) = socket.try_clone().map(BufReader::new) else { leave(1) };
    for line in orders.split(b'\n') {
        let order = line.ok().and_then(|line| serde_json::from_slice::<Order>(&line).ok());
        let Some((order, arm)) = order.and_then(|order| arms.get(order.arm).map(|arm| (order, arm))) else { break };
        match fork() {
            Ok(Forked::Copy) => try_points(engine, arm, order, &mut socket),
            // However it ended, it tells nothing more.
            Ok(Forked::Original(copied)) => drop(copied.wait()),
            Err(_) => {}
        }
        if send(&mut socket, &Answer::Over).is_none() {
            break;
        }
    }
    leave(0)
}

/// Runs an arm, and in copies lets the calls fail; those tell what came of it. None returns.
fn try_points(engine: &Engine<'_>, arm: &ArmRun<'_>, order: Order, socket: &mut UnixStream) -> ! {
    let Order { ooms_without, budget, points, .. } = order;
    let seed = engine.plan.seed_of(arm);
    let injector = Injector::new(&[], seed).with_budget(budget);
    let branches = Branches::new(points, injector.clone());
    let attempt = || {
        let Failing { point: Point { place, process, made, operation }, count } = branches.failing()?;
        let process = process.and_then(|place| arm.scenario.processes.get(place)).map(|process| &process.name);
        Some((place, Attempt { arm, seed, process, made, count, operation, ooms_without, budget }))
    };
    let outcome = if arm.scenario.processes.is_empty() {
        let faults = Faults::each_by(arm.scenario, |_| injector.clone());
        // What comes before the second operation is no work: those copies run all of it.
        let checked_from = if branches.make_up_to(1) { CheckedFrom::Operation(1) } else { CheckedFrom::Branches(branches.clone()) };
        let way = Way { faults: faults.clone(), checked_from, started_by: StartedBy::Fork };
        let seen = engine.see(arm, seed, way).ok();
        attempt().zip(seen).map(|((place, attempt), seen)| (place, engine.outcome(attempt, &faults, &seen)))
    } else {
        // The other processes are in no copy of this one: a copy for each call makes a run of its own, and of itself those processes.
        let made = branches.make_up_to(u64::MAX).then(attempt).flatten();
        made.and_then(|(place, attempt)| Some((place, engine.attempt(attempt, attempt.checked_from(), StartedBy::Fork).ok()?)))
    };
    let Some((place, Outcome { case, ended_at_once, wants_one_more })) = outcome else { leave(1) };
    match send(socket, &Answer::Outcome { place, case, ended_at_once, wants_one_more }) {
        Some(()) => Branches::end(if wants_one_more { Ended::OneMore } else { Ended::Enough }),
        None => leave(1),
    }
}
