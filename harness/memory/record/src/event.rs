//! Events of running scenarios. [`Collector`] builds [`Records`] from them. Writing each event to
//! disk when it occurs keeps the results of a killed program.

use serde::{Deserialize, Serialize};

use crate::{PlannedRun, RECORD_VERSION, Records, RunRecord, StepRecord, Verdict};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Event {
    /// The first event: [`RECORD_VERSION`] of the writer, and all runs in the order in which they
    /// will start.
    Started {
        version: u32,
        harness: String,
        planned: Vec<PlannedRun>,
    },
    /// A run opened its device. The record has no steps yet; its verdict is
    /// [`Verdict::Interrupted`] in case no further event follows.
    RunStarted(Box<RunRecord>),
    /// A step of the current run ended. A long run emits this event for its first steps only.
    StepEnded(Box<StepRecord>),
    /// The current run ended, or a run ended without a device. The record is complete.
    RunEnded(Box<RunRecord>),
}

#[derive(Clone, Debug)]
pub struct Collector {
    records: Records,
    planned: Vec<PlannedRun>,
    running: Option<RunRecord>,
}

impl Default for Collector {
    fn default() -> Self {
        let records = Records {
            version: RECORD_VERSION,
            harness: env!("CARGO_PKG_VERSION").to_owned(),
            runs: Vec::new(),
            not_started: Vec::new(),
        };
        Self {
            records,
            planned: Vec::new(),
            running: None,
        }
    }
}

impl Collector {
    pub fn add(&mut self, event: Event) {
        match event {
            Event::Started {
                version,
                harness,
                planned,
            } => {
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

    /// Returns the records so far. An unfinished run becomes [`Verdict::Interrupted`], and runs
    /// that did not start are listed.
    pub fn into_records(mut self) -> Records {
        if let Some(run) = self.running.take() {
            self.records.runs.push(RunRecord {
                verdict: Verdict::Interrupted,
                ..run
            });
        }
        self.records.not_started = self
            .planned
            .into_iter()
            .skip(self.records.runs.len())
            .collect();
        self.records
    }
}
