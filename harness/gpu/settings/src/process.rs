//! The life of a process: how others recognize it, and how its state survives `fork`.
//!
//! A process opens its counters, its attempts and its ledger entry when it first uses a device.
//! After `exec` it continues these files. A forked child starts its own. When a process ends,
//! others find its ledger entry and release it.

use std::{any::Any, cell::RefCell, ffi::c_int, sync::MutexGuard};

use procfs::process::Process;

/// One program in one process. A process number alone can return later, and `exec` keeps both the
/// number and the start time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Program {
    /// Start of the process, in ticks since boot.
    pub(crate) started: u64,
    /// Address of the stack, which changes with each `exec`; 0 if it cannot be read.
    pub(crate) stack: u64,
}

impl Program {
    /// The program that a process runs; `None` after its end, also before its parent waits for it.
    pub(crate) fn of_process(pid: u64) -> Option<Self> {
        let stat = Process::new(i32::try_from(pid).ok()?)
            .and_then(|process| process.stat())
            .ok()?;
        // A process whose first thread has ended lives as long as other threads run.
        let has_ended =
            matches!(stat.state, 'X' | 'x') || (stat.state == 'Z' && stat.num_threads <= 1);
        (!has_ended).then_some(Self {
            started: stat.starttime,
            stack: stat.startstack,
        })
    }

    /// Compares two programs. An unknown stack equals every stack.
    pub(crate) const fn is(self, other: Self) -> bool {
        self.started == other.started
            && (self.stack == other.stack || self.stack == 0 || other.stack == 0)
    }
}

pub fn is_running(pid: u32) -> bool {
    Program::of_process(pid.into()).is_some()
}

/// State with a lock. [`keep_usable_after_fork`] keeps it usable in forked children.
pub trait ForkedState: Sized + 'static {
    /// Locks the state of this process.
    fn lock() -> MutexGuard<'static, Self>;

    /// Starts the state of a forked child, which has only the calling thread.
    fn start_child(&mut self);
}

/// `pthread_atfork`: handlers to run before a fork, and after it in the parent and in the child.
pub type AtFork = unsafe extern "C" fn(
    Option<unsafe extern "C" fn()>,
    Option<unsafe extern "C" fn()>,
    Option<unsafe extern "C" fn()>,
) -> c_int;

thread_local! {
    /// The lock, held by a thread that forks.
    static HELD: RefCell<Option<Box<dyn Any>>> = const { RefCell::new(None) };
}

/// Makes each fork wait for the lock of the state and releases it on both sides. Otherwise a child
/// waits for a thread that it does not have.
///
/// # Safety
/// `at_fork` registers handlers for forks of this process, and the caller's code is never unloaded.
pub unsafe fn keep_usable_after_fork<T: ForkedState>(at_fork: AtFork) {
    unsafe extern "C" fn before<T: ForkedState>() {
        let guard: Box<dyn Any> = Box::new(T::lock());
        HELD.with_borrow_mut(|held| *held = Some(guard));
    }
    unsafe extern "C" fn in_parent() {
        drop(HELD.take());
    }
    unsafe extern "C" fn in_child<T: ForkedState>() {
        if let Some(mut guard) = HELD
            .take()
            .and_then(|held| held.downcast::<MutexGuard<'static, T>>().ok())
        {
            guard.start_child();
        }
    }
    // SAFETY: the handlers live as long as the caller's code.
    unsafe { at_fork(Some(before::<T>), Some(in_parent), Some(in_child::<T>)) };
}
