use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, Sender};

use harness_base::{files, shell::quoted};
use harness_record::timeline::Timeline;
use harness_report::timeline;

use super::{error::CliError, terminal};

pub(crate) struct Timelines {
    file: PathBuf,
    receiver: Receiver<Timeline>,
}

impl Timelines {
    pub(crate) fn new(file: &Path) -> Result<(Self, Sender<Timeline>), CliError> {
        files::check_place(file).map_err(CliError::unwritten(file))?;
        let (sender, receiver) = mpsc::channel();
        Ok((
            Self {
                file: file.to_owned(),
                receiver,
            },
            sender,
        ))
    }

    pub(crate) fn finish(self) -> Result<(), CliError> {
        let timelines: Vec<Timeline> = self.receiver.try_iter().collect();
        if timelines.is_empty() {
            terminal::message("no timeline is written: no run was timed");
            return Ok(());
        }
        terminal::save(&self.file, timeline::render(&timelines))?;
        terminal::message(format_args!(
            "timeline: {}; open it in https://ui.perfetto.dev",
            quoted(&self.file.to_string_lossy())
        ));
        Ok(())
    }
}
