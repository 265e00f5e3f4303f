//! [`Branches`]: a run that forks itself, so that a different call fails in each copy. The steps
//! before a failure run only once.
//!
//! The run itself has no failures. Before each operation or launch that should fail, the process
//! forks. The chosen call fails in the copy, which runs to its end while the original waits. After
//! the last copy, the original exits.

use std::sync::{Arc, Mutex, MutexGuard};
use std::{cmp, collections::VecDeque};

use harness_allocator::device::faulty::{CallRecord, DeviceCall, Injector};
use harness_allocator::sync::lock;
use harness_exec::forked::{Forked, fork, leave};
use harness_exec::process::End;
use serde::{Deserialize, Serialize};

/// A call to fail, and the allocator operation that makes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BranchPoint {
    pub place: usize,
    /// The index of the process that makes the call; `None` for the main one.
    pub process: Option<usize>,
    pub made: CallRecord,
    /// The number of operations that have begun by then.
    pub operation: u64,
}

impl BranchPoint {
    fn is_launch(&self) -> bool {
        self.made.call == DeviceCall::LaunchKernel
    }
}

/// The failing calls of a copy: `count` calls, starting with `point`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failing {
    pub point: BranchPoint,
    pub count: u64,
}

enum Due {
    Now,
    Later,
    /// Never: the run is past it, and nothing is reported for it.
    Missed,
}

/// The exit code of a copy that asks for another copy, in which one more call fails.
const ONE_MORE: u8 = 2;

/// See the module. Clones share their state.
#[derive(Clone, Debug)]
pub struct Branches(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    /// The remaining points in the order of operations; within one operation, launches come last.
    points: VecDeque<BranchPoint>,
    injector: Injector,
    /// The failing calls, if this process is a copy.
    failing: Option<Failing>,
}

impl Branches {
    /// `injector` belongs to the run's device and has no faults yet.
    pub fn new(points: impl IntoIterator<Item = BranchPoint>, injector: Injector) -> Self {
        let mut points: Vec<BranchPoint> = points.into_iter().collect();
        points.sort_by_key(|point| (point.operation, point.is_launch()));
        Self(Arc::new(Mutex::new(State {
            points: points.into(),
            injector,
            failing: None,
        })))
    }

    pub fn failing(&self) -> Option<Failing> {
        self.state().failing
    }

    /// Forks for the calls up to the end of an operation. Returns whether this process is a copy.
    #[must_use]
    pub fn make_up_to(&self, operation: u64) -> bool {
        self.state().make(|point| {
            if point.operation <= operation {
                Due::Now
            } else {
                Due::Later
            }
        })
    }

    /// Forks for the calls of an operation that begins now.
    #[must_use]
    pub fn reach_operation(&self, operation: u64) -> bool {
        self.state()
            .make(|point| match point.operation.cmp(&operation) {
                cmp::Ordering::Less => Due::Missed,
                cmp::Ordering::Equal if !point.is_launch() => Due::Now,
                cmp::Ordering::Equal | cmp::Ordering::Greater => Due::Later,
            })
    }

    pub fn reach_launch(&self) {
        let mut state = self.state();
        let launches = state.injector.calls_of(DeviceCall::LaunchKernel);
        state.make(|point| {
            if point.is_launch() && point.made.number == launches + 1 {
                Due::Now
            } else {
                Due::Later
            }
        });
    }

    /// Ends a copy. `wants_one_more` asks for another copy, in which one more call fails.
    pub fn end(wants_one_more: bool) -> ! {
        leave(if wants_one_more { ONE_MORE } else { 0 })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.0)
    }
}

impl State {
    /// Forks for the next points, up to the first one that is due later. Returns whether this
    /// process is a copy, made now or earlier. After the last point, the original exits here.
    fn make(&mut self, due: impl Fn(&BranchPoint) -> Due) -> bool {
        if self.failing.is_some() {
            return true;
        }
        while let Some(point) = self
            .points
            .pop_front_if(|point| !matches!(due(point), Due::Later))
        {
            if matches!(due(&point), Due::Now) && self.branch(point) {
                return true;
            }
        }
        if self.points.is_empty() {
            leave(0);
        }
        false
    }

    /// Forks the copies of a point one after the other. Returns whether this process is one of
    /// them.
    fn branch(&mut self, point: BranchPoint) -> bool {
        for count in 1.. {
            match fork() {
                Ok(Forked::Copy) => {
                    self.injector
                        .add_failure(point.made.call, point.made.number, count);
                    self.failing = Some(Failing { point, count });
                    return true;
                }
                Ok(Forked::Original(copied)) => match copied.wait() {
                    Ok(End::Code(ONE_MORE)) => {}
                    _ => break,
                },
                // Nothing is reported for this point if the fork fails.
                Err(_) => break,
            }
        }
        false
    }
}
