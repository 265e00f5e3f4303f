//! [`Latency`]: delays injected into calls.

use std::{fmt, str::FromStr};

use harness_allocator::{device::faulty::ANY, units::Nanos};
use serde::{Deserialize, Serialize};

use crate::calls::Call;
use crate::text::{SettingsError, expected};

/// Names all calls that can be delayed.
const ALL: &str = "all";

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Slow {
    Call(Call),
    /// All that request device memory.
    Any,
    All,
}

/// A delay for each call of a function: `CALL:DURATION`, for example `cudaFree:3ms`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Latency {
    calls: Slow,
    pub by: Nanos,
}

impl Latency {
    pub fn sum(latencies: &[Self], call: Call) -> Nanos {
        latencies
            .iter()
            .filter(|latency| latency.is_of(call))
            .map(|latency| latency.by)
            .sum()
    }

    pub fn is_of(&self, call: Call) -> bool {
        match self.calls {
            Slow::Call(slow) => slow == call,
            Slow::Any => call.requests_device_memory(),
            Slow::All => true,
        }
    }
}

impl fmt::Display for Latency {
    /// Writes the text that is parsed, with the duration in the largest unit that gives a whole
    /// number.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let call = match self.calls {
            Slow::Call(call) => call.name(),
            Slow::Any => ANY,
            Slow::All => ALL,
        };
        let units = [("s", 1_000_000_000), ("ms", 1_000_000), ("us", 1_000)];
        let (unit, nanos) = units
            .into_iter()
            .find(|(_, nanos)| self.by.0.is_multiple_of(*nanos))
            .unwrap_or(("ns", 1));
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
                let calls = || {
                    Call::ALL
                        .iter()
                        .copied()
                        .filter(|call| !call.is_of_library())
                };
                let accepted = calls().map(Call::name).chain([ANY, ALL]);
                let named = calls().find(|call| call.name() == name);
                Slow::Call(
                    named.ok_or_else(|| expected(name, "a call that can be delayed", accepted))?,
                )
            }
        };
        let form = || {
            SettingsError(format!(
                "`{text}` is not CALL:DURATION with a duration above 0, as in `cudaFree:3ms` or \
                 `any:250us`"
            ))
        };
        let by = Nanos::parse(duration)
            .ok()
            .filter(|by| *by > Nanos::ZERO)
            .ok_or_else(form)?;
        Ok(Self { calls, by })
    }
}

#[cfg(test)]
mod tests;
