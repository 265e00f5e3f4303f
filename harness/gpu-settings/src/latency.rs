//! [`Latency`]: calls that take longer than they would.

use std::fmt;
use std::str::FromStr;
use std::thread;
use std::time::Duration;

use harness_allocator::device::faulty::{ANY, DeviceCall};
use harness_allocator::units::Nanos;

use crate::counters::Counters;
use crate::settings::FaultyCall;
use crate::text::{SettingsError, expected};

/// All calls that can take longer, where a call is wanted.
const ALL: &str = "all";

/// A call that can be made to take longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SlowCall {
    /// `cudaMalloc`, and the driver's own.
    Malloc,
    /// `cuMemCreate`.
    Create,
    /// `cudaMallocAsync`, and the driver's own.
    MallocAsync,
    /// `cudaHostAlloc`.
    HostAlloc,
    /// `cudaFree`, and the driver's own.
    Free,
    /// `cudaFreeAsync`, and the driver's own.
    FreeAsync,
    /// `cuMemUnmap`.
    Unmap,
}

impl SlowCall {
    /// All of them.
    pub const ALL: [Self; 7] = [Self::Malloc, Self::Create, Self::MallocAsync, Self::HostAlloc, Self::Free, Self::FreeAsync, Self::Unmap];

    /// The function.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Malloc => FaultyCall::Malloc.name(),
            Self::Create => FaultyCall::Create.name(),
            Self::MallocAsync => FaultyCall::MallocAsync.name(),
            Self::HostAlloc => FaultyCall::HostAlloc.name(),
            Self::Free => DeviceCall::Free.name(),
            Self::FreeAsync => DeviceCall::FreeAsync.name(),
            Self::Unmap => DeviceCall::Unmap.name(),
        }
    }

    const fn gets_device_memory(self) -> bool {
        matches!(self, Self::Malloc | Self::Create | Self::MallocAsync)
    }
}

impl From<FaultyCall> for SlowCall {
    fn from(call: FaultyCall) -> Self {
        match call {
            FaultyCall::Malloc => Self::Malloc,
            FaultyCall::Create => Self::Create,
            FaultyCall::MallocAsync => Self::MallocAsync,
            FaultyCall::HostAlloc => Self::HostAlloc,
        }
    }
}

/// Which calls take longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Slow {
    Call(SlowCall),
    /// All that get device memory.
    Any,
    All,
}

/// Calls that take so much longer each time: `CALL:DURATION`, as in `cudaFree:3ms`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Latency {
    calls: Slow,
    /// How much longer each of them takes.
    pub by: Nanos,
}

impl Latency {
    /// Whether this call takes longer by it.
    #[must_use]
    pub fn is_of(&self, call: SlowCall) -> bool {
        match self.calls {
            Slow::Call(slow) => slow == call,
            Slow::Any => call.gets_device_memory(),
            Slow::All => true,
        }
    }
}

/// Has this call take as much longer as these ask for, and counts it. Returns by how much.
pub fn wait(latencies: &[Latency], counters: &Counters, call: SlowCall) -> Nanos {
    let by: Nanos = latencies.iter().filter(|latency| latency.is_of(call)).map(|latency| latency.by).sum();
    if by > Nanos::ZERO {
        counters.count_slow(call);
        thread::sleep(Duration::from_nanos(by.0));
    }
    by
}

impl fmt::Display for Latency {
    /// As it is read: the duration in the largest unit in which it is whole.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let call = match self.calls {
            Slow::Call(call) => call.name(),
            Slow::Any => ANY,
            Slow::All => ALL,
        };
        let units = [("s", 1_000_000_000), ("ms", 1_000_000), ("us", 1_000)];
        let (unit, nanos) = units.into_iter().find(|(_, nanos)| self.by.0.is_multiple_of(*nanos)).unwrap_or(("ns", 1));
        write!(f, "{call}:{}{unit}", self.by.0 / nanos)
    }
}

impl FromStr for Latency {
    type Err = SettingsError;

    fn from_str(text: &str) -> Result<Self, SettingsError> {
        let (name, duration) = text.split_once(':').unwrap_or((text, ""));
        let calls = match name {
            ANY => Slow::Any,
            ALL => Slow::All,
            _ => {
                let accepted = SlowCall::ALL.into_iter().map(SlowCall::name).chain([ANY, ALL]);
                let named = SlowCall::ALL.into_iter().find(|call| call.name() == name);
                Slow::Call(named.ok_or_else(|| expected(name, "a call that can take longer", accepted))?)
            }
        };
        let form = || SettingsError(format!("`{text}` is not CALL:DURATION with a duration above 0, as in `cudaFree:3ms` or `any:250us`"));
        let by = Nanos::parse(duration).ok().filter(|by| *by > Nanos::ZERO).ok_or_else(form)?;
        Ok(Self { calls, by })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use harness_allocator::units::Bytes;

    use super::*;
    use crate::counters::Tally;

    fn latency(text: &str) -> Latency {
        text.parse().expect("a latency")
    }

    #[test]
    fn latencies_are_read_back_as_they_are_shown() {
        for text in ["cudaMalloc:5ms", "cuMemUnmap:1500us", "any:2s", "all:17ns", "cudaHostAlloc:250us", "cudaFreeAsync:1ms"] {
            assert_eq!(latency(text).to_string(), text);
        }
        assert_eq!(latency("cudaFree:1.5ms").to_string(), "cudaFree:1500us");
    }

    #[test]
    fn what_is_no_latency_says_what_is() {
        let message = |text: &str| text.parse::<Latency>().expect_err("it is wrong").to_string();
        let calls = "write cudaMalloc, cuMemCreate, cudaMallocAsync, cudaHostAlloc, cudaFree, cudaFreeAsync, cuMemUnmap, any, all";
        assert_eq!(message("cudaMemcpy:3ms"), format!("`cudaMemcpy` is not a call that can take longer: {calls}"));
        for text in ["cudaFree", "cudaFree:", "cudaFree:3", "cudaFree:0ms", "cudaFree:3ms:2"] {
            assert_eq!(
                message(text),
                format!("`{text}` is not CALL:DURATION with a duration above 0, as in `cudaFree:3ms` or `any:250us`")
            );
        }
    }

    #[test]
    fn a_call_takes_as_much_longer_as_all_that_name_it_ask_for_and_is_counted() {
        let folder = tempfile::tempdir().expect("a folder can be made");
        let counters = Counters::of_this_process(Some(folder.path()), 1, Bytes::gib(1));
        let latencies = ["cudaMalloc:2ms", "any:1ms", "all:500us"].map(latency);
        let began = Instant::now();
        let waited = [SlowCall::Malloc, SlowCall::Create, SlowCall::Free, SlowCall::Malloc].map(|call| wait(&latencies, counters, call));
        assert!(began.elapsed() >= Duration::from_millis(9));
        assert_eq!(waited, [3500, 1500, 500, 3500].map(Nanos::micros));
        assert_eq!(wait(&latencies[1..2], counters, SlowCall::HostAlloc), Nanos::ZERO);
        let tally = Tally::read_folder(folder.path()).expect("it can be read").remove(0);
        assert_eq!(tally.slow, [(SlowCall::Malloc, 2), (SlowCall::Create, 1), (SlowCall::Free, 1)]);
    }
}
