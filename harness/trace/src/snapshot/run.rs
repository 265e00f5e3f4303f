//! What a snapshot that one of our own runs wrote tells of the run: [`RunInfo`], under a key of the whole that PyTorch does not have and passes over.

use harness_allocator::device::Clock;
use harness_allocator::units::Bytes;
use serde::Serialize;

use super::{Snapshot, Value};

const KEY: &str = "harness_run";

/// The run that a snapshot was recorded from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RunInfo {
    /// The name of the scenario.
    pub scenario: String,
    /// The name of the allocator's arm.
    pub allocator: String,
    /// Whether that is PyTorch's allocator, under whatever settings.
    pub is_pytorchs: bool,
    /// The name of the device.
    pub device: String,
    /// All of the device's memory, with what the CUDA context and others hold.
    pub memory: Bytes,
    /// Whether the times of the events are those of a cost model.
    pub clock: Clock,
}

impl Snapshot {
    /// The run that this was recorded from, where it is one of ours.
    #[must_use]
    pub fn run(&self) -> Option<RunInfo> {
        let Value::Dict(pairs) = self.extras.value(self.extra, KEY)? else { return None };
        let value = |name: &str| pairs.iter().find_map(|(key, value)| (key.as_text() == Some(name)).then_some(value));
        let text = |name: &str| value(name).and_then(Value::as_text).map(str::to_owned);
        let is_true = |name: &str| match value(name) {
            Some(Value::Bool(is_true)) => Some(*is_true),
            _ => None,
        };
        Some(RunInfo {
            scenario: text("scenario")?,
            allocator: text("allocator")?,
            is_pytorchs: is_true("is_pytorchs")?,
            device: text("device")?,
            memory: value("memory").and_then(Value::as_u64).map(Bytes)?,
            clock: if is_true("simulated_times")? { Clock::Simulated } else { Clock::Measured },
        })
    }

    /// Tells the run that this was recorded from. Other further keys of the whole stay.
    pub fn set_run(&mut self, run: &RunInfo) {
        let text = |text: &str| Value::Text(text.to_owned());
        let pairs = [
            ("scenario", text(&run.scenario)),
            ("allocator", text(&run.allocator)),
            ("is_pytorchs", Value::Bool(run.is_pytorchs)),
            ("device", text(&run.device)),
            ("memory", Value::Int(run.memory.0.into())),
            ("simulated_times", Value::Bool(run.clock == Clock::Simulated)),
        ];
        let run = Value::Dict(pairs.into_iter().map(|(key, value)| (text(key), value)).collect());
        let others = self.extras.get(self.extra).iter().filter(|(key, _)| key != KEY).cloned();
        let keys = others.chain([(KEY.to_owned(), run)]).collect();
        self.extra = self.extras.intern(keys);
    }
}
