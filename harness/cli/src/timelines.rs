//! What `harness run --trace` writes: what each run did and when, in one file.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, Sender};

use harness_base::files;
use harness_base::shell::quoted;
use harness_record::timeline::Timeline;
use harness_report::timeline;

use super::error::CliError;
use super::terminal;

/// What to do where the file cannot be written.
const UNWRITTEN: &str = "make room, choose another place with `--trace`, or make this one writable";

fn unwritten(file: &Path, error: io::Error) -> CliError {
    CliError::Output { target: Some(file.to_owned()), error, help: UNWRITTEN }
}

/// Takes the timelines of runs.
pub(crate) struct Timelines {
    file: PathBuf,
    receiver: Receiver<Timeline>,
}

impl Timelines {
    /// Says before anything runs what cannot be written there.
    pub(crate) fn new(file: &Path) -> Result<(Self, Sender<Timeline>), CliError> {
        files::check_place(file).map_err(|error| unwritten(file, error))?;
        let (sender, receiver) = mpsc::channel();
        Ok((Self { file: file.to_owned(), receiver }, sender))
    }

    /// Writes what the runs have sent.
    pub(crate) fn finish(self) -> Result<(), CliError> {
        let timelines: Vec<Timeline> = self.receiver.try_iter().collect();
        if timelines.is_empty() {
            terminal::tell("nothing to trace: no run has times");
            return Ok(());
        }
        files::write(&self.file, &timeline::render(&timelines)).map_err(|error| unwritten(&self.file, error))?;
        terminal::tell(format_args!("timeline: {}; open it in https://ui.perfetto.dev", quoted(&self.file.to_string_lossy())));
        Ok(())
    }
}
