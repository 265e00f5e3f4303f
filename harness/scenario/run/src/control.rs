//! [`Control`]: state shared between a run and the thread that enforces its time limits.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use derive_more::Display;
use harness_allocator::sync::lock;
use harness_allocator::units::Nanos;

/// The time limit of a step without its own limit, of opening the device, and of the cleanup after
/// the last step.
pub const DEFAULT_TIME_LIMIT: Duration = Duration::from_secs(300);

/// The time that a run gets to stop after its time limit. After that, it counts as stuck in a call.
const GRACE: Duration = Duration::from_secs(2);

/// Declares each call once: its variant and its name in messages.
macro_rules! calls {
    ($($variant:ident = $name:literal,)*) => {
        /// A call to the allocator or the device that may block.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum BlockingCall { $($variant,)* }

        impl BlockingCall {
            const ALL: &'static [Self] = &[$(Self::$variant),*];

            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name),* }
            }
        }
    };
}

calls! {
    Allocate = "the allocator's `allocate`",
    Free = "the allocator's `free`",
    EmptyCache = "the allocator's `empty_cache`",
    Fill = "a write to device memory",
    Verify = "a check of device memory",
    Work = "a launch of work on a stream",
    Event = "a call on an event",
    Synchronize = "a wait for the device",
    Memory = "a query of the memory used (driver and NVML)",
    Host = "a call for memory of the host",
    Copy = "a copy between host and device",
    ExternalMemory = "an allocation on behalf of other programs",
}

#[derive(Clone, Debug, PartialEq, Eq, Display)]
pub enum Phase {
    #[display("opening the device")]
    Opening,
    #[display("step {number} (line {line}: {text})")]
    Step {
        number: u32,
        line: u32,
        text: String,
    },
    #[display("releasing everything after the last step")]
    Closing,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Overrun {
    pub phase: Phase,
    pub limit: Duration,
    pub taken: Duration,
    /// The last call that the run began. It may still be waiting in it.
    pub call: Option<BlockingCall>,
}

impl Overrun {
    pub fn expected(&self) -> String {
        format!("{} to take at most {}", self.phase, duration(self.limit))
    }

    pub fn seen(&self) -> String {
        format!(
            "it was stopped after {}{}",
            duration(self.taken),
            self.last_call()
        )
    }

    pub fn seen_stuck(&self) -> String {
        format!(
            "it has not ended after {} and does not stop{}",
            duration(self.taken),
            self.last_call()
        )
    }

    fn last_call(&self) -> String {
        self.call.map_or_else(String::new, |call| {
            format!("; the last call that it began is {}", call.name())
        })
    }
}

fn duration(duration: Duration) -> String {
    Nanos(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)).to_string()
}

/// See the module. It uses the host's clock, only to decide whether a run exceeds its limit.
#[derive(Debug, Default)]
pub struct Control {
    interrupt: Arc<AtomicBool>,
    /// True if the current phase has exceeded its time limit.
    expired: AtomicBool,
    /// The last call that began: 1 + its index in [`BlockingCall::ALL`], or 0.
    call: AtomicU8,
    present: Mutex<Option<Present>>,
}

#[derive(Clone, Debug)]
struct Present {
    phase: Phase,
    began: Instant,
    limit: Duration,
}

impl Control {
    /// `interrupt` is set from outside to stop everything, for example by Ctrl-C.
    pub fn new(interrupt: Arc<AtomicBool>) -> Self {
        Self {
            interrupt,
            ..Self::default()
        }
    }

    /// Returns whether the user interrupted the run or a time limit has passed.
    pub fn should_stop(&self) -> bool {
        self.is_interrupted() || self.expired.load(Ordering::Relaxed)
    }

    pub fn is_interrupted(&self) -> bool {
        self.interrupt.load(Ordering::Relaxed)
    }

    pub(crate) fn enter(&self, phase: Phase, limit: Duration) {
        self.call.store(0, Ordering::Relaxed);
        let mut present = self.present();
        self.expired.store(false, Ordering::Relaxed);
        *present = Some(Present {
            phase,
            began: Instant::now(),
            limit,
        });
    }

    pub(crate) fn leave(&self) {
        let mut present = self.present();
        self.expired.store(false, Ordering::Relaxed);
        *present = None;
    }

    pub(crate) fn calls(&self, call: BlockingCall) {
        self.call.store(call as u8 + 1, Ordering::Relaxed);
    }

    pub fn overrun(&self) -> Option<Overrun> {
        let Present {
            phase,
            began,
            limit,
        } = self.present().clone()?;
        let taken = began.elapsed();
        let call = usize::from(self.call.load(Ordering::Relaxed))
            .checked_sub(1)
            .and_then(|index| BlockingCall::ALL.get(index).copied());
        (taken > limit).then_some(Overrun {
            phase,
            limit,
            taken,
            call,
        })
    }

    /// Asks the run to stop if it has exceeded its time limit.
    pub fn watch(&self) -> Option<Overrun> {
        let overrun = self.overrun()?;
        let present = self.present();
        // The run may have entered another phase in the meantime.
        if present
            .as_ref()
            .is_some_and(|present| present.phase == overrun.phase)
        {
            self.expired.store(true, Ordering::Relaxed);
        }
        drop(present);
        (overrun.taken > overrun.limit + GRACE).then_some(overrun)
    }

    fn present(&self) -> MutexGuard<'_, Option<Present>> {
        lock(&self.present)
    }
}

#[cfg(test)]
mod tests;
