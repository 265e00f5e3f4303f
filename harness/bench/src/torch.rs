//! PyTorch's own allocator in a child process (`ci/torch_reference.py`) that takes its turn in each
//! round.
//!
//! Messages are one JSON object per line; the script documents them. It is compiled in, so one
//! program file is enough on a GPU machine.

use std::collections::{BTreeMap, BTreeSet};
use std::{process::Command, time::Duration};

use harness_allocator::allocator::{AllocatorKind, AllocatorSpec, MemoryFraction};
use harness_trace::trace::TraceEvent;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::child::{ChildProcess, Patience};
use crate::{measure::visit::Fault, suite::Suite};

const SCRIPT: &str = include_str!("../../../ci/torch_reference.py");

/// Importing torch from a cold file system takes most of a minute. The longest request releases a
/// thousand segments in well under a second.
const PATIENCE: Patience = Patience {
    start: Duration::from_secs(180),
    answer: Duration::from_secs(60),
};
/// The variable with the allocator's settings
/// (<https://docs.pytorch.org/docs/stable/cuda_environment_variables.html>), and its name before
/// version 2.9.
const SETTINGS: [&str; 2] = ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"];
const NO_CACHE: &str = "PYTORCH_NO_CUDA_MEMORY_CACHING";

/// Maximum starts: a request may break the process, but a run must not spend its time on importing
/// torch.
const STARTS: u32 = 3;

#[derive(Clone, Debug, PartialEq)]
pub struct TorchArm {
    /// The name in records: `torch`, followed by the matching arm's name if that has settings.
    pub name: String,
    /// In the form of `PYTORCH_ALLOC_CONF`.
    pub settings: String,
}

/// One PyTorch arm per caching arm of the suite; the default settings if there is no such arm.
pub fn torch_arms(suite: &Suite) -> Vec<TorchArm> {
    let mut arms: Vec<TorchArm> = Vec::new();
    let default = AllocatorSpec::from(AllocatorKind::Caching);
    for ours in suite.arms.iter().filter(|arm| arm.is_pytorch()) {
        // Every arm already has a memory limit, so a memory fraction is not repeated.
        let settings = ours
            .effective()
            .filter(|config| config.memory_fraction == MemoryFraction::ALL)
            .map(|config| config.to_string());
        if let Some(settings) =
            settings.filter(|settings| arms.iter().all(|other| other.settings != *settings))
        {
            let name = if ours.is_equivalent_to(&default) {
                "torch".to_owned()
            } else {
                format!("torch_{ours}")
            };
            arms.push(TorchArm { name, settings });
        }
    }
    if arms.is_empty() {
        arms.push(TorchArm {
            name: "torch".to_owned(),
            settings: String::new(),
        });
    }
    arms
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Answer {
    Done(Samples),
    Fault(Fault),
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub(crate) struct Samples {
    /// Picoseconds per operation.
    pub(crate) samples_ps: Vec<u64>,
    #[serde(flatten)]
    pub(crate) pass: Option<Pass>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct Pass {
    /// Allocations, including failed ones, and frees. Each sample is their mean.
    pub(crate) operations: u64,
    pub(crate) reserved: u64,
    /// Bytes of the peak that were not allocated then.
    pub(crate) unused: u64,
}

#[derive(Deserialize)]
struct Greeting {
    /// Why PyTorch cannot be measured here.
    unavailable: Option<String>,
}

/// One PyTorch process per setting, because PyTorch reads some settings only once.
#[derive(Debug)]
pub struct Torches {
    /// The interpreter and the CUDA ordinal; or why PyTorch is missing.
    place: Result<(String, u32), String>,
    /// By settings, with the number of starts.
    running: BTreeMap<String, (Result<TorchProcess, String>, u32)>,
}

impl Torches {
    pub fn new(python: &str, ordinal: u32) -> Self {
        Self {
            place: Ok((python.to_owned(), ordinal)),
            running: BTreeMap::new(),
        }
    }

    pub fn missing(reason: impl Into<String>) -> Self {
        Self {
            place: Err(reason.into()),
            running: BTreeMap::new(),
        }
    }

    /// PyTorch with these settings, in the form of `PYTORCH_ALLOC_CONF`. Starts it if it is not
    /// running, which takes seconds. The error says why it cannot be measured here.
    pub fn with(&mut self, settings: &str) -> Result<&mut TorchProcess, String> {
        let (python, ordinal) = self.place.as_ref().map_err(String::clone)?;
        let start = || TorchProcess::start(python, *ordinal, settings);
        let (torch, starts) = self
            .running
            .entry(settings.to_owned())
            .or_insert_with(|| (start(), 1));
        if *starts < STARTS
            && torch
                .as_ref()
                .is_ok_and(|torch| !torch.process.is_running())
        {
            (*torch, *starts) = (start(), *starts + 1);
        }
        torch.as_mut().map_err(|reason| reason.clone())
    }
}

/// A running PyTorch. It ends when its standard input closes, even if this program is killed.
#[derive(Debug)]
pub struct TorchProcess {
    process: ChildProcess,
    traces: BTreeSet<String>,
}

impl TorchProcess {
    fn start(python: &str, ordinal: u32, settings: &str) -> Result<Self, String> {
        let arguments = [
            "-u".to_owned(),
            "-c".to_owned(),
            SCRIPT.to_owned(),
            ordinal.to_string(),
        ];
        let mut command = Command::new(python);
        // The user's own settings must not decide the comparison.
        command.env_remove(NO_CACHE);
        for variable in SETTINGS {
            command.env(variable, settings);
        }
        let (process, greeting) =
            ChildProcess::start("PyTorch", command.args(arguments), Some(ordinal), PATIENCE)?;
        match greeting {
            Greeting {
                unavailable: Some(reason),
            } => Err(reason),
            Greeting { unavailable: None } => Ok(Self {
                process,
                traces: BTreeSet::new(),
            }),
        }
    }

    pub(crate) fn load(&mut self, trace: &str, events: &[TraceEvent]) -> Result<(), Fault> {
        if !self.traces.contains(trace) {
            let events: Vec<String> = events.iter().map(ToString::to_string).collect();
            // An allocator that refuses requests has no figures.
            self.ask(&json!({ "do": "load", "trace": trace, "events": events, "refused": 0 }))?;
            self.traces.insert(trace.to_owned());
        }
        Ok(())
    }

    pub(crate) fn ask(&mut self, question: &Value) -> Result<Samples, Fault> {
        if !self.process.is_running() {
            return Err(Fault::Skipped(
                "PyTorch stopped answering earlier".to_owned(),
            ));
        }
        match self.process.ask(question).map_err(Fault::Failed)? {
            Answer::Done(samples) => Ok(samples),
            Answer::Fault(fault) => Err(fault),
        }
    }
}

#[cfg(test)]
mod tests;
