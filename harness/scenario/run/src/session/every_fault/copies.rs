//! Runs arms in forked copies of this process ([`Branches`]), so the steps before a failure run
//! once for many calls.
//!
//! A server is a fork server, as in fuzzers: a copy of this process made before any run. It is
//! small, so forking it is fast. For each [`Order`] it forks a copy that runs the arm. That copy
//! forks again for each call to fail. Each of these reports its result as a line of JSON. A call
//! without a report, because a copy crashed or a fork failed, is tested in this process later.

use std::io::{BufRead as _, BufReader};
use std::os::unix::net::UnixStream;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use harness_allocator::device::faulty::Injector;
use harness_allocator::sync::lock;
use harness_devices::DeviceSource;
use harness_exec::forked::{Forked, ForkedChild, fork, leave};
use harness_exec::large_pages::use_for_code;
use serde::{Deserialize, Serialize};

use super::{ArmRun, Attempt, EveryFault, Outcome, Results, RunSetup};
use crate::branches::{BranchPoint, Branches};
use crate::processes::{StartedBy, wire};
use crate::{faults::Faults, rig::CheckedFrom, session::scenario_process::serve_in_copy};

pub(super) const MOST_POINTS: usize = 400;

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Order {
    pub(super) arm: usize,
    pub(super) ooms_without: u64,
    /// The maximum number of calls of a run.
    pub(super) budget: u64,
    pub(super) points: Vec<BranchPoint>,
}

/// The index of a call and the result of its copy; `None`: the order is complete.
type Answer = Option<(usize, Outcome)>;

/// Returns whether an arm can run in forked copies: nothing outside the process may take part.
pub(super) fn can_run(source: &DeviceSource, arm: &ArmRun<'_>) -> bool {
    source.simulated_because().is_some() && arm.allocator.as_library().is_none()
}

pub(super) struct Servers(Mutex<Vec<Server>>);

struct Server {
    /// Killed on drop.
    _copied: ForkedChild,
    socket: BufReader<UnixStream>,
}

impl Servers {
    /// Starts one server per parallel run, or as many as possible. Starts none if no arm can use
    /// them.
    pub(super) fn start(engine: &EveryFault<'_>, arms: &[ArmRun<'_>]) -> Self {
        let wanted = if arms.iter().any(|arm| can_run(engine.source, arm)) {
            engine.jobs
        } else {
            0
        };
        if wanted > 0 {
            // Copies share these pages.
            use_for_code();
        }
        Self(Mutex::new(
            (0..wanted)
                .map_while(|_| Server::start(engine, arms))
                .collect(),
        ))
    }

    /// Executes an order and returns the results by index. Calls `progress` after each call.
    pub(super) fn ask(
        &self,
        order: &Order,
        stop: &AtomicBool,
        progress: &(dyn Fn() + Sync),
    ) -> Results {
        let take = || lock(&self.0).pop();
        let mut told = Results::new();
        let Some(mut server) = take().filter(|_| !stop.load(Ordering::Relaxed)) else {
            return told;
        };
        // A server that failed or was interrupted is killed.
        if server.ask(order, stop, &mut told, progress).is_some() {
            lock(&self.0).push(server);
        }
        // The second run of a call may be missing.
        told.retain(|_, runs| runs.last().is_some_and(|last| !last.wants_one_more));
        told
    }
}

impl Server {
    /// `None` if it cannot be started.
    fn start(engine: &EveryFault<'_>, arms: &[ArmRun<'_>]) -> Option<Self> {
        let (ours, theirs) = UnixStream::pair().ok()?;
        match fork().ok()? {
            Forked::Copy => {
                drop(ours);
                serve(engine, arms, theirs)
            }
            Forked::Original(copied) => Some(Self {
                _copied: copied,
                socket: BufReader::new(ours),
            }),
        }
    }

    /// `None` if the order did not complete.
    fn ask(
        &mut self,
        order: &Order,
        stop: &AtomicBool,
        told: &mut Results,
        progress: &(dyn Fn() + Sync),
    ) -> Option<()> {
        wire::send(self.socket.get_mut(), order).ok()?;
        let mut line = Vec::new();
        while !stop.load(Ordering::Relaxed) {
            line.clear();
            self.socket.read_until(b'\n', &mut line).ok()?;
            let Some((place, outcome)) = wire::read::<Answer>(&line).ok()? else {
                return Some(());
            };
            if !outcome.wants_one_more {
                progress();
            }
            told.entry(place).or_default().push(outcome);
        }
        None
    }
}

#[cfg(test)]
impl Servers {
    pub(super) const fn none() -> Self {
        Self(Mutex::new(Vec::new()))
    }

    /// Servers that exit after they receive their first order.
    pub(super) fn breaking_off(count: usize) -> Self {
        let server = |_| {
            let (ours, theirs) = UnixStream::pair().ok()?;
            match fork().ok()? {
                Forked::Copy => {
                    let _ = BufReader::new(theirs).read_until(b'\n', &mut Vec::new());
                    leave(0)
                }
                Forked::Original(copied) => Some(Server {
                    _copied: copied,
                    socket: BufReader::new(ours),
                }),
            }
        };
        Self(Mutex::new((0..count).map_while(server).collect()))
    }
}

fn serve(engine: &EveryFault<'_>, arms: &[ArmRun<'_>], mut socket: UnixStream) -> ! {
    let Ok(orders) = socket.try_clone().map(BufReader::new) else {
        leave(1)
    };
    for line in orders.split(b'\n') {
        let order = line.and_then(|line| wire::read::<Order>(&line)).ok();
        let Some((order, arm)) =
            order.and_then(|order| arms.get(order.arm).map(|arm| (order, arm)))
        else {
            break;
        };
        match fork() {
            Ok(Forked::Copy) => try_points(engine, arm, order, &mut socket),
            // The copy has sent its reports, however it ended.
            Ok(Forked::Original(copied)) => drop(copied.wait()),
            Err(_) => {}
        }
        if wire::send(&mut socket, &Answer::None).is_err() {
            break;
        }
    }
    leave(0)
}

/// Runs an arm and fails the calls in forked copies, which report the results. Never returns.
fn try_points(
    engine: &EveryFault<'_>,
    arm: &ArmRun<'_>,
    order: Order,
    socket: &mut UnixStream,
) -> ! {
    let Order {
        ooms_without,
        budget,
        points,
        ..
    } = order;
    let seed = engine.plan.seed_of(arm);
    let injector = Injector::new(&[], seed).with_budget(budget);
    let branches = Branches::new(points, injector.clone());
    let attempt = || {
        Some(Attempt {
            arm,
            seed,
            failing: branches.failing()?,
            ooms_without,
            budget,
        })
    };
    let place = |attempt: &Attempt<'_>| attempt.failing.point.place;
    let outcome = if arm.scenario.processes.is_empty() {
        let faults = Faults::each_by(arm.scenario, |_| injector.clone());
        // The steps before the second operation cost nothing, so their copies run all of it.
        let checked_from = if branches.make_up_to(1) {
            CheckedFrom::Operation(1)
        } else {
            CheckedFrom::Branches(branches.clone())
        };
        let setup = RunSetup {
            faults: faults.clone(),
            checked_from,
            started_by: StartedBy::Fork(serve_in_copy),
        };
        let end = engine.run_catching(arm, seed, setup).ok();
        attempt()
            .zip(end)
            .map(|(attempt, end)| (place(&attempt), engine.outcome(attempt, &faults, &end)))
    } else {
        // Other processes do not fork along with this one. So each call gets a copy that runs the
        // whole arm and starts its processes by forking itself.
        let made = branches.make_up_to(u64::MAX).then(attempt).flatten();
        made.and_then(|attempt| {
            let outcome = engine
                .attempt(
                    attempt,
                    attempt.checked_from(),
                    StartedBy::Fork(serve_in_copy),
                )
                .ok()?;
            Some((place(&attempt), outcome))
        })
    };
    let Some((_, Outcome { wants_one_more, .. })) = outcome else {
        leave(1)
    };
    match wire::send(socket, &outcome) {
        Ok(()) => Branches::end(wants_one_more),
        Err(_) => leave(1),
    }
}
