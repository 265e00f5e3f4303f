//! Describes the harness run that wrote a snapshot: [`RunInfo`]. It is stored under a top-level key
//! that PyTorch ignores.

use harness_allocator::{device::Clock, units::Bytes};
use serde::Serialize;

use super::{Snapshot, Value};

const KEY: &str = "harness_run";

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RunInfo {
    pub scenario: String,
    pub allocator: String,
    /// True if the run used PyTorch's allocator, with any settings.
    pub is_pytorchs: bool,
    pub device: String,
    /// The device's total memory, including the CUDA context and other processes.
    pub memory: Bytes,
    /// True if event times come from a cost model.
    pub clock: Clock,
}

impl Snapshot {
    /// Returns the run, if the harness wrote this snapshot.
    pub fn run(&self) -> Option<RunInfo> {
        let values = self.extras.value(self.extra, KEY)?;
        let value = |name: &str| values.get(name);
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
            clock: if is_true("simulated_times")? {
                Clock::Simulated
            } else {
                Clock::Measured
            },
        })
    }

    /// Stores the run. Other top-level keys stay unchanged.
    pub fn set_run(&mut self, run: &RunInfo) {
        let text = |text: &str| Value::Text(text.to_owned());
        let pairs = [
            ("scenario", text(&run.scenario)),
            ("allocator", text(&run.allocator)),
            ("is_pytorchs", Value::Bool(run.is_pytorchs)),
            ("device", text(&run.device)),
            ("memory", Value::Int(run.memory.0.into())),
            (
                "simulated_times",
                Value::Bool(run.clock == Clock::Simulated),
            ),
        ];
        let run = Value::Dict(
            pairs
                .into_iter()
                .map(|(key, value)| (text(key), value))
                .collect(),
        );
        let others = self
            .extras
            .get(self.extra)
            .iter()
            .filter(|(key, _)| key != KEY)
            .cloned();
        let keys = others.chain([(KEY.to_owned(), run)]).collect();
        self.extra = self.extras.intern(keys);
    }
}
