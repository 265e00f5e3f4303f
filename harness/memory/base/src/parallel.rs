use harness_allocator::sync::lock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::{cell::Cell, panic, thread};

thread_local! {
    static USES_ALL_CORES: Cell<bool> = const { Cell::new(true) };
}

/// Runs `act` for each item on all cores. Results keep the order of the items. Returns the error of
/// the first item that fails.
pub fn in_parallel<T: Sync, R: Send, E: Send>(
    items: &[T],
    act: impl Fn(&T) -> Result<R, E> + Sync,
) -> Result<Vec<R>, E> {
    let cores = if uses_all_cores() {
        thread::available_parallelism().map_or(1, usize::from)
    } else {
        1
    };
    in_parallel_by(cores, items, act)
}

/// Returns `false` within [`on_one_core`].
pub fn uses_all_cores() -> bool {
    USES_ALL_CORES.get()
}

/// Runs `act` on this thread alone, for callers that keep all cores busy already.
pub fn on_one_core<R>(act: impl FnOnce() -> R) -> R {
    let before = USES_ALL_CORES.replace(false);
    let result = act();
    USES_ALL_CORES.set(before);
    result
}

/// Like [`in_parallel`], with at most `most` items at a time.
pub fn in_parallel_by<T: Sync, R: Send, E: Send>(
    most: usize,
    items: &[T],
    act: impl Fn(&T) -> Result<R, E> + Sync,
) -> Result<Vec<R>, E> {
    let workers = most.clamp(1, items.len().max(1));
    let next = AtomicUsize::new(0);
    let answers: Vec<Mutex<Option<Result<R, E>>>> =
        items.iter().map(|_| Mutex::new(None)).collect();
    thread::scope(|scope| {
        let work = || {
            while let Some((item, answer)) = Some(next.fetch_add(1, Ordering::Relaxed))
                .and_then(|at| Some((items.get(at)?, answers.get(at)?)))
            {
                let found = act(item);
                *lock(answer) = Some(found);
            }
        };
        let others: Vec<_> = (1..workers).map(|_| scope.spawn(work)).collect();
        work();
        for other in others {
            if let Err(panic) = other.join() {
                panic::resume_unwind(panic);
            }
        }
    });
    answers
        .into_iter()
        .filter_map(|answer| answer.into_inner().unwrap_or_else(PoisonError::into_inner))
        .collect()
}
