//! What happens while scenarios run, as one type of event between whatever runs and whatever reports. [`Collector`] makes [`Records`] of
//! events; whoever writes each event down when it comes loses nothing of what was done when the program is killed.

use serde::{Deserialize, Serialize};

use crate::{PlannedRun, RECORD_VERSION, Records, RunRecord, StepRecord, Verdict};

/// Something that happened, in the order in which it did.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Event {
    /// The first event of all.
    Started {
        /// [`RECORD_VERSION`] of the writer.
        version: u32,
        /// Version of the harness that runs.
        harness: String,
        /// All runs, in the order in which they will start.
        planned: Vec<PlannedRun>,
    },
    /// A run has its device. The record is what is known now: no steps, and [`Verdict::Interrupted`] in case nothing more is heard of it.
    RunStarted(Box<RunRecord>),
    /// A step of the present run is done. Of a long run, only the first steps have one.
    StepEnded(Box<StepRecord>),
    /// The present run is done, or one ended that never had a device. The record is whole.
    RunEnded(Box<RunRecord>),
}

/// Makes records of events.
#[derive(Clone, Debug)]
pub struct Collector {
    records: Records,
    planned: Vec<PlannedRun>,
    running: Option<RunRecord>,
}

impl Default for Collector {
    fn default() -> Self {
        let records =
            Records { version: RECORD_VERSION, harness: env!("CARGO_PKG_VERSION").to_owned(), runs: Vec::new(), not_started: Vec::new() };
        Self { records, planned: Vec::new(), running: None }
    }
}

impl Collector {
    /// Adds the next event.
    pub fn add(&mut self, event: Event) {
        match event {
            Event::Started { version, harness, planned } => {
                (self.records.version, self.records.harness) = (version, harness);
                self.planned = planned;
            }
            Event::RunStarted(run) => self.running = Some(*run),
            Event::StepEnded(step) => {
                if let Some(run) = &mut self.running {
                    run.steps.push(*step);
                }
            }
            Event::RunEnded(run) => {
                self.running = None;
                self.records.runs.push(*run);
            }
        }
    }

    /// The run that has started and not ended, with the steps that it has done.
    #[must_use]
    pub const fn running(&self) -> Option<&RunRecord> {
        self.running.as_ref()
    }

    /// The records so far: a run that has not ended is [`Verdict::Interrupted`], and what has not started is listed.
    #[must_use]
    pub fn into_records(mut self) -> Records {
        if let Some(run) = self.running.take() {
            self.records.runs.push(RunRecord { verdict: Verdict::Interrupted, ..run });
        }
        self.records.not_started = self.planned.into_iter().skip(self.records.runs.len()).collect();
        self.records
    }
}
