//! Records the main program's allocator: call stacks, owners, times, and the final snapshot.

use harness_trace::snapshot::{ExtraId, Frame, Recorder, RunInfo, Snapshot, StackId};

use super::{ProgramId, Rig};

impl Rig {
    /// Sets the scenario's call stack for the recording, the innermost frame first.
    pub fn set_place<F: IntoIterator<Item = Frame>>(&mut self, frames: impl FnOnce() -> F) {
        if let Some(recorder) = &self.recorder {
            recorder.set_place(frames());
        }
    }

    /// Sets the call site of the next operations of a trace in the recording, for example
    /// `model.py:41 forward`, inside of `place`.
    pub fn set_site(&mut self, place: Option<StackId>, site: Option<&str>) {
        self.go_back_to(place);
        if let (Some(recorder), Some(frame)) = (&self.recorder, site.and_then(frame_of_site)) {
            recorder.set_inner_place(frame);
        }
    }

    pub fn place(&self) -> Option<StackId> {
        self.recorder.as_ref().map(Recorder::place)
    }

    pub(super) fn go_back_to(&self, place: Option<StackId>) {
        if let (Some(recorder), Some(place)) = (&self.recorder, place) {
            recorder.go_back_to(place);
        }
    }

    /// The recording so far with the main program's current memory. `None` without a recording.
    pub fn recorded(&self, scenario: &str, arm: &str, is_pytorchs: bool) -> Option<Snapshot> {
        let recorder = self.recorder.as_ref()?;
        let mut snapshot = recorder.snapshot(&*self.programs[ProgramId::FIRST.index()].allocator);
        let info = self.device.info();
        snapshot.set_run(&RunInfo {
            scenario: scenario.to_owned(),
            allocator: arm.to_owned(),
            is_pytorchs,
            device: info.name.clone(),
            memory: self.start.total,
            clock: info.clock,
        });
        Some(snapshot)
    }

    pub(super) fn record_time(&mut self) {
        if let Some(recorder) = &self.recorder {
            recorder.set_time(self.device.now().0 / 1_000);
        }
    }
}

/// Parses a trace's site, for example `model.py:41 forward`. `None` if it names no line.
fn frame_of_site(site: &str) -> Option<Frame> {
    let (file, rest) = site.rsplit_once(':')?;
    let (line, name) = rest.split_once(' ').unwrap_or((rest, ""));
    let is_file = !file.is_empty() && !file.contains(", ");
    let line = line.parse().ok().filter(|_| is_file)?;
    Some(Frame {
        name: name.to_owned(),
        file: file.to_owned(),
        line,
        extra: ExtraId::NONE,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_site_that_names_a_line_becomes_a_frame() {
        let frame =
            |site: &str| frame_of_site(site).map(|frame| (frame.file, frame.line, frame.name));
        let place = |file: &str, line, name: &str| Some((file.to_owned(), line, name.to_owned()));
        assert_eq!(
            frame("model.py:41 forward"),
            place("model.py", 41, "forward")
        );
        assert_eq!(frame("gpt/my model.py:7"), place("gpt/my model.py", 7, ""));
        assert_eq!(frame("no Python frames, after model.py:41 forward"), None);
        assert_eq!(frame("no Python frames, requests below 1 MiB"), None);
        assert_eq!(frame("the optimizer: second moment"), None);
    }
}
