//! [`Control`]: what a run shares with the thread that watches its time limits: where the run is, and whether it should stop.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use harness_allocator::units::Nanos;

/// The time limit of a step that names none, of opening the device before the first step, and of giving everything back after the last one.
pub const DEFAULT_TIME_LIMIT: Duration = Duration::from_secs(300);

/// How long a run may take to stop once its time limit has passed. One that takes longer waits in a call that does not return.
const GRACE: Duration = Duration::from_secs(2);

/// Declares the calls once: variant, and its name in messages.
macro_rules! calls {
    ($($variant:ident = $name:literal,)*) => {
        /// What a run asks of its allocator or its device, and may have to wait for.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[allow(missing_docs, reason = "each variant's name in messages says what it is")]
        pub enum Call { $($variant,)* }

        impl Call {
            const ALL: &'static [Self] = &[$(Self::$variant),*];

            /// Its name in messages.
            #[must_use]
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
    Pressure = "an allocation in the place of other programs",
}

/// What a run is doing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// Before the first step: the device is opened.
    Opening,
    /// A step is done.
    Step {
        /// Counted from 1 over the whole run.
        number: u32,
        /// The line of the step in the scenario.
        line: u32,
        /// The step in a few words.
        text: String,
    },
    /// After the last step: everything is given back.
    Closing,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Opening => f.write_str("opening the device"),
            Self::Step { number, line, text } => write!(f, "step {number} (line {line}: {text})"),
            Self::Closing => f.write_str("giving everything back after the last step"),
        }
    }
}

/// A time limit that was exceeded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Overrun {
    /// What took too long.
    pub place: Place,
    /// The time that it may take.
    pub limit: Duration,
    /// The time that it has taken so far.
    pub taken: Duration,
    /// The last call that it began: where the run may be waiting.
    pub call: Option<Call>,
}

impl Overrun {
    /// What should have been seen, for the record.
    #[must_use]
    pub fn expected(&self) -> String {
        format!("{} to take at most {}", self.place, duration(self.limit))
    }

    /// What was seen, for a run that has stopped since.
    #[must_use]
    pub fn seen(&self) -> String {
        format!("it was stopped after {}{}", duration(self.taken), self.last_call())
    }

    /// What was seen, for a run that does not answer.
    #[must_use]
    pub fn seen_stuck(&self) -> String {
        format!("it has not ended after {} and does not stop{}", duration(self.taken), self.last_call())
    }

    fn last_call(&self) -> String {
        self.call.map_or_else(String::new, |call| format!("; the last call that it began is {}", call.name()))
    }
}

fn duration(duration: Duration) -> String {
    Nanos(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)).to_string()
}

/// What the watching thread sees of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Watched {
    /// It is within its time limit, or has been asked to stop and still has time to do so.
    Running,
    /// It was asked to stop and does not.
    Stuck(Overrun),
}

/// See the module. Times are the host's: they decide when a run exceeds a limit, and nothing else.
#[derive(Debug, Default)]
pub struct Control {
    interrupt: Arc<AtomicBool>,
    /// Whether the time limit of the present place has passed.
    expired: AtomicBool,
    /// The last call that began: 1 + its index in [`Call::ALL`], or 0.
    call: AtomicU8,
    present: Mutex<Option<Present>>,
}

/// What the run does now, and since when.
#[derive(Clone, Debug)]
struct Present {
    place: Place,
    began: Instant,
    limit: Duration,
}

impl Control {
    /// `interrupt` is set from elsewhere when everything should stop, for example by Ctrl-C.
    #[must_use]
    pub fn new(interrupt: Arc<AtomicBool>) -> Self {
        Self { interrupt, ..Self::default() }
    }

    /// Whether the run should stop: the user wants it, or a time limit has passed.
    #[must_use]
    pub fn should_stop(&self) -> bool {
        self.is_interrupted() || self.expired.load(Ordering::Relaxed)
    }

    /// Whether the user wants everything to stop.
    #[must_use]
    pub fn is_interrupted(&self) -> bool {
        self.interrupt.load(Ordering::Relaxed)
    }

    /// The run begins with something that may take so long.
    pub(crate) fn enter(&self, place: Place, limit: Duration) {
        self.call.store(0, Ordering::Relaxed);
        let mut present = self.present();
        self.expired.store(false, Ordering::Relaxed);
        *present = Some(Present { place, began: Instant::now(), limit });
    }

    /// The run is over.
    pub(crate) fn leave(&self) {
        let mut present = self.present();
        self.expired.store(false, Ordering::Relaxed);
        *present = None;
    }

    /// A call to the allocator or the device begins.
    pub(crate) fn calls(&self, call: Call) {
        self.call.store(call as u8 + 1, Ordering::Relaxed);
    }

    /// What the run does, if it has taken longer than it may.
    #[must_use]
    pub fn overrun(&self) -> Option<Overrun> {
        let Present { place, began, limit } = self.present().clone()?;
        let taken = began.elapsed();
        let call = usize::from(self.call.load(Ordering::Relaxed)).checked_sub(1).and_then(|index| Call::ALL.get(index).copied());
        (taken > limit).then_some(Overrun { place, limit, taken, call })
    }

    /// Asks the run to stop where it has exceeded its time limit. To be called again and again by the watching thread.
    #[must_use]
    pub fn watch(&self) -> Watched {
        let Some(overrun) = self.overrun() else { return Watched::Running };
        let present = self.present();
        // It may have gone on since.
        if present.as_ref().is_some_and(|present| present.place == overrun.place) {
            self.expired.store(true, Ordering::Relaxed);
        }
        drop(present);
        if overrun.taken > overrun.limit + GRACE { Watched::Stuck(overrun) } else { Watched::Running }
    }

    fn present(&self) -> MutexGuard<'_, Option<Present>> {
        // A thread that panicked with the lock in hand left a whole value.
        self.present.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_within_its_limit_is_left_alone() {
        let control = Control::default();
        assert_eq!((control.watch(), control.overrun()), (Watched::Running, None));
        control.enter(Place::Opening, Duration::from_secs(3600));
        assert_eq!((control.watch(), control.should_stop()), (Watched::Running, false));
    }

    #[test]
    fn a_step_beyond_its_limit_is_told_to_stop_and_the_next_one_is_not() {
        let control = Control::default();
        control.enter(Place::Closing, Duration::ZERO);
        control.calls(Call::Free);
        assert_eq!(control.watch(), Watched::Running, "it has some time to stop");
        assert!(control.should_stop() && !control.is_interrupted());
        let overrun = control.overrun().expect("the limit is exceeded");
        assert_eq!((overrun.place, overrun.call), (Place::Closing, Some(Call::Free)));
        control.enter(Place::Closing, Duration::from_secs(3600));
        assert!(!control.should_stop());
    }

    #[test]
    fn an_overrun_says_where_the_run_stands_and_what_it_waits_for() {
        let place = Place::Step { number: 3, line: 12, text: "free activations".to_owned() };
        let (limit, taken) = (Duration::from_millis(50), Duration::from_secs(2));
        let overrun = Overrun { place, limit, taken, call: Some(Call::Free) };
        assert_eq!(overrun.expected(), "step 3 (line 12: free activations) to take at most 50.0 ms");
        assert_eq!(
            overrun.seen_stuck(),
            "it has not ended after 2.00 s and does not stop; the last call that it began is the allocator's `free`"
        );
    }
}
