//! [`Branches`]: a run that goes on in copies of this process, in each of which another call fails, so that what comes before the failures is run once for all.
//!
//! The run itself has no failures. In front of each operation in which a call is to fail it makes a copy, in which that call fails and the run goes on to its end,
//! and waits for the copy. Behind the last one nothing is left to do for the run itself: its process ends.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use harness_allocator::device::faulty::{Injector, Made};
use harness_exec::forked::{Forked, fork, leave};
use harness_exec::process::End;
use serde::{Deserialize, Serialize};

/// A call that is to fail, and the operation of allocators in which it is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Point {
    /// Which one it is to whoever chose it.
    pub place: usize,
    /// The call.
    pub made: Made,
    /// How many operations have begun by then.
    pub operation: u64,
}

/// What fails in a copy: so many calls from that one on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failing {
    /// The first of them.
    pub point: Point,
    /// How many.
    pub count: u64,
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
    /// Where the run is to be copied, in the order of operations.
    points: VecDeque<Point>,
    injector: Injector,
    /// What fails here, where this is a copy.
    failing: Option<Failing>,
}

impl Branches {
    /// Those of a run whose device has this injector, which has no faults of its own.
    #[must_use]
    pub fn new(points: impl IntoIterator<Item = Point>, injector: Injector) -> Self {
        Self(Arc::new(Mutex::new(State { points: points.into_iter().collect(), injector, failing: None })))
    }

    /// What fails in this process; `None` where it is no copy.
    #[must_use]
    pub fn failing(&self) -> Option<Failing> {
        self.state().failing
    }

    /// An operation begins: makes copies for the calls in it that are to fail. Tells in a copy, which is to check what comes from here on, that it is one. Behind the
    /// last point it does not return but in copies.
    #[must_use]
    pub fn reached(&self, operation: u64) -> bool {
        let mut state = self.state();
        if state.failing.is_some() {
            return false;
        }
        while let Some(point) = state.points.pop_front_if(|point| point.operation <= operation) {
            if state.branch(point) {
                return true;
            }
        }
        if state.points.is_empty() {
            leave(0);
        }
        false
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
