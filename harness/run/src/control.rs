//! What a run shares with whoever watches it from another thread: whether it should stop, and where it stands.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use harness_allocator::units::Nanos;

/// The time limit of a step that names none, and of what is done before the first and after the last step.
pub const DEFAULT_TIME_LIMIT: Duration = Duration::from_secs(300);

/// How long a run may take to stop once its time is over. One that takes longer is stuck in a call that does not return.
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
    Memory = "the question how much memory is used (driver and NVML)",
    Pressure = "an allocation that stands for other programs",
}

/// Where a run stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// Before the first step: the device is opened.
    Opening,
    /// In a step.
    Step {
        /// Its number.
        number: u32,
        /// Its line in the scenario.
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

/// A place that took longer than it may.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Overrun {
    /// Which one.
    pub place: Place,
    /// How long it may take.
    pub limit: Duration,
    /// How long it has taken so far.
    pub taken: Duration,
    /// The last call that it began.
    pub call: Option<Call>,
}

impl Overrun {
    /// What should have been.
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

/// What a watcher sees.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Watched {
    /// All is well, or the run has just been told to stop.
    Running,
    /// The run does not stop though its time is over.
    Stuck(Overrun),
}

/// See the module. The time is the host's: it decides when a run has failed, and nothing else.
#[derive(Debug, Default)]
pub struct Control {
    interrupt: Arc<AtomicBool>,
    /// Whether the time of the present place is over.
    expired: AtomicBool,
    /// The last call that began: 1 + its index in [`Call::ALL`], or 0.
    call: AtomicU8,
    standing: Mutex<Option<Standing>>,
}

#[derive(Clone, Debug)]
struct Standing {
    place: Place,
    began: Instant,
    limit: Duration,
}

impl Control {
    /// `interrupt` is set by somebody else when everything should stop.
    #[must_use]
    pub fn new(interrupt: Arc<AtomicBool>) -> Self {
        Self { interrupt, ..Self::default() }
    }

    /// Whether the run should stop, for whatever reason.
    #[must_use]
    pub fn should_stop(&self) -> bool {
        self.is_interrupted() || self.expired.load(Ordering::Relaxed)
    }

    /// Whether the user wants everything to stop.
    #[must_use]
    pub fn is_interrupted(&self) -> bool {
        self.interrupt.load(Ordering::Relaxed)
    }

    /// Says where the run stands from now on.
    pub(crate) fn enter(&self, place: Place, limit: Duration) {
        self.call.store(0, Ordering::Relaxed);
        let mut standing = self.standing();
        self.expired.store(false, Ordering::Relaxed);
        *standing = Some(Standing { place, began: Instant::now(), limit });
    }

    /// Says that nothing runs.
    pub(crate) fn leave(&self) {
        let mut standing = self.standing();
        self.expired.store(false, Ordering::Relaxed);
        *standing = None;
    }

    /// Says which call begins.
    pub(crate) fn calls(&self, call: Call) {
        self.call.store(call as u8 + 1, Ordering::Relaxed);
    }

    /// The present place, if it has taken longer than it may.
    #[must_use]
    pub fn overrun(&self) -> Option<Overrun> {
        let Standing { place, began, limit } = self.standing().clone()?;
        let taken = began.elapsed();
        let call = usize::from(self.call.load(Ordering::Relaxed)).checked_sub(1).and_then(|index| Call::ALL.get(index).copied());
        (taken > limit).then_some(Overrun { place, limit, taken, call })
    }

    /// Looks after the run: tells it to stop where its time is over. To be called now and then by another thread.
    #[must_use]
    pub fn watch(&self) -> Watched {
        let Some(overrun) = self.overrun() else { return Watched::Running };
        let standing = self.standing();
        // It may have gone on since.
        if standing.as_ref().is_some_and(|standing| standing.place == overrun.place) {
            self.expired.store(true, Ordering::Relaxed);
        }
        drop(standing);
        if overrun.taken > overrun.limit + GRACE { Watched::Stuck(overrun) } else { Watched::Running }
    }

    fn standing(&self) -> MutexGuard<'_, Option<Standing>> {
        // Whoever panicked while it held the lock left a whole value.
        self.standing.lock().unwrap_or_else(PoisonError::into_inner)
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
