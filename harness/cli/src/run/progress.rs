//! What the user sees and the journal gets during the runs.

use std::io::{self, IsTerminal as _};
use std::time::{Duration, Instant};

use harness_base::printable::printable;
use harness_record::{Collector, Event};
use harness_report::store::{self, Journal};
use harness_report::text;
use indicatif::ProgressBar;

use crate::{recorded::Recordings, terminal};

/// Passes each event of the runs on.
pub(super) struct Observer {
    pub(super) progress: Progress,
    pub(super) recordings: Option<Recordings>,
    pub(super) log: Log,
}

impl Observer {
    pub(super) fn add(&mut self, event: Event) {
        self.progress.advance(&event);
        if let (Event::RunEnded(run), Some(recordings)) = (&event, &mut self.recordings) {
            recordings.run_ended(run);
        }
        self.log.add(event);
    }
}

/// Shows a progress bar, and a line for each finished run with the time since the start.
pub(super) struct Progress {
    bar: ProgressBar,
    prints_runs: bool,
    began: Instant,
}

impl Progress {
    /// On a terminal, prints the finished runs.
    pub(super) fn new(bar: &ProgressBar, prints_runs: bool) -> Self {
        Self {
            bar: bar.clone(),
            prints_runs: prints_runs && io::stderr().is_terminal(),
            began: Instant::now(),
        }
    }

    fn advance(&self, event: &Event) {
        match event {
            Event::RunStarted(run) => self.bar.set_message(
                printable(&format!("{} with {}", run.scenario.name, run.allocator)).into_owned(),
            ),
            Event::RunEnded(run) => {
                self.bar.inc(1);
                if self.prints_runs {
                    let elapsed = format!("{:>7} ", elapsed(self.began.elapsed()));
                    let room = terminal::width_of_messages()
                        .map(|width| width.saturating_sub(elapsed.len()));
                    let line = text::run_line(run, terminal::style_of_messages(), room);
                    self.bar
                        .suspend(|| terminal::message(format_args!("{elapsed}{line}")));
                }
            }
            Event::Started { .. } | Event::StepEnded(_) => {}
        }
    }
}

pub(super) fn elapsed(time: Duration) -> String {
    match time.as_secs() {
        0..10 => format!("{:.2}s", time.as_secs_f64()),
        10..600 => format!("{}s", time.as_secs()),
        seconds => format!("{}m{:02}s", seconds / 60, seconds % 60),
    }
}

/// Collects the events, and writes them to the journal.
pub(super) struct Log {
    pub(super) collector: Collector,
    pub(super) journal: Option<Journal>,
    /// The error if another process writes into the same folder. Nothing is saved then.
    pub(super) in_use: Option<store::StoreError>,
}

impl Log {
    pub(super) fn new(journal: Option<Journal>) -> Self {
        Self {
            collector: Collector::default(),
            journal,
            in_use: None,
        }
    }

    fn add(&mut self, event: Event) {
        if let Some(Err(error)) = self.journal.as_mut().map(|journal| journal.add(&event)) {
            terminal::message(format_args!(
                "the events are not saved during the runs: {error}"
            ));
            self.journal = None;
            self.in_use = matches!(error, store::StoreError::Busy { .. }).then_some(error);
        }
        self.collector.add(event);
    }
}
