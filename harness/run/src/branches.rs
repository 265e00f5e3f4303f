//! [`Branches`]: a run that goes on in copies of this process, in each of which another call fails, so that what comes before the failures is run once for all.
//!
//! The run itself has no failures. In front of each operation in which a call is to fail, and of each launch that is to fail, it makes a copy, in which that call
//! fails and the run goes on to its end, and waits for the copy. Behind the last one nothing is left to do for the run itself: its process ends.

use std::cmp;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use harness_allocator::device::faulty::{DeviceCall, Injector, Made};
use harness_exec::forked::{Forked, fork, leave};
use harness_exec::process::End;
use serde::{Deserialize, Serialize};

/// A call that is to fail, and the operation of allocators in which it is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Point {
    /// Which one it is to whoever chose it.
    pub place: usize,
    /// The process that makes it, by its place in the scenario; `None`: the main one.
    pub process: Option<usize>,
    /// The call.
    pub made: Made,
    /// How many operations have begun by then.
    pub operation: u64,
}

impl Point {
    /// Whether it is work on a stream, which is in no operation of an allocator.
    fn is_launch(&self) -> bool {
        self.made.call == DeviceCall::LaunchKernel
    }
}

/// What fails in a copy: so many calls from that one on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failing {
    /// The first of them.
    pub point: Point,
    /// How many.
    pub count: u64,
}

/// When the copies of a point are made.
enum Due {
    Now,
    Later,
    /// Never: the run is behind it, and nothing is told of it.
    Missed,
}

/// How a copy ends: whether the call behind those that failed is to fail too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// No more of this point.
    Enough,
    /// In the next copy one more call fails.
    OneMore,
}

/// The exit code of a copy that wants [`Ended::OneMore`].
const ONE_MORE: u8 = 2;

/// See the module. Clones share their state.
#[derive(Clone, Debug)]
pub struct Branches(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    /// Where the run is to be copied, in the order of operations; in each, launches last.
    points: VecDeque<Point>,
    injector: Injector,
    /// What fails here, where this is a copy.
    failing: Option<Failing>,
}

impl Branches {
    /// Those of a run whose device has this injector, which has no faults of its own.
    #[must_use]
    pub fn new(points: impl IntoIterator<Item = Point>, injector: Injector) -> Self {
        let mut points: Vec<Point> = points.into_iter().collect();
        points.sort_by_key(|point| (point.operation, point.is_launch()));
        Self(Arc::new(Mutex::new(State { points: points.into(), injector, failing: None })))
    }

    /// What fails in this process; `None` where it is no copy.
    #[must_use]
    pub fn failing(&self) -> Option<Failing> {
        self.state().failing
    }

    /// Makes copies, right here, for the calls up to the end of an operation. Whether this is one of them.
    #[must_use]
    pub fn make_up_to(&self, operation: u64) -> bool {
        self.state().make(|point| if point.operation <= operation { Due::Now } else { Due::Later })
    }

    /// An operation begins: makes copies for the calls in it. Whether this is a copy, which is to check what comes from here on.
    #[must_use]
    pub fn reach_operation(&self, operation: u64) -> bool {
        self.state().make(|point| match point.operation.cmp(&operation) {
            cmp::Ordering::Less => Due::Missed,
            cmp::Ordering::Equal if !point.is_launch() => Due::Now,
            cmp::Ordering::Equal | cmp::Ordering::Greater => Due::Later,
        })
    }

    /// The next call is a launch: makes a copy if it is to fail.
    pub fn reach_launch(&self) {
        let mut state = self.state();
        let launches = state.injector.calls_of(DeviceCall::LaunchKernel);
        state.make(|point| if point.is_launch() && point.made.number == launches + 1 { Due::Now } else { Due::Later });
    }

    /// Ends this copy.
    pub fn end(ended: Ended) -> ! {
        leave(match ended {
            Ended::Enough => 0,
            Ended::OneMore => ONE_MORE,
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A thread that panicked with the lock in hand left a whole value.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Makes copies for the first points, up to one that is due later. Whether this is a copy, made here or before. Behind the last point it does not return
    /// but in copies.
    fn make(&mut self, due: impl Fn(&Point) -> Due) -> bool {
        if self.failing.is_some() {
            return true;
        }
        while let Some(point) = self.points.pop_front_if(|point| !matches!(due(point), Due::Later)) {
            if matches!(due(&point), Due::Now) && self.branch(point) {
                return true;
            }
        }
        if self.points.is_empty() {
            leave(0);
        }
        false
    }

    /// Makes the copies of a point, one after the other. Whether this is one of them.
    fn branch(&mut self, point: Point) -> bool {
        for count in 1.. {
            match fork() {
                Ok(Forked::Copy) => {
                    self.injector.fails(point.made.call, point.made.number, count);
                    self.failing = Some(Failing { point, count });
                    return true;
                }
                Ok(Forked::Original(copied)) => match copied.wait() {
                    Ok(End::Code(ONE_MORE)) => {}
                    _ => break,
                },
                // Whoever chose the point hears nothing of it.
                Err(_) => break,
            }
        }
        false
    }
}
