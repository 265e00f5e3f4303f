//! The recording of the main program's allocator, where the run has one: where the scenario is, whose memory it is, when; and the snapshot at the end.

use harness_trace::snapshot::{ExtraId, Frame, Recorder, RunInfo, Snapshot, StackId};

use super::names::Owner;
use super::{ProgramId, Rig};

impl Rig {
    /// Tells where the scenario is from now on, the innermost frame first, if that is recorded.
    pub fn set_place<F: IntoIterator<Item = Frame>>(&mut self, frames: impl FnOnce() -> F) {
        if let Some(recorder) = &self.recorder {
            recorder.set_place(frames());
        }
    }

    /// Tells, if that is recorded, that the next operations of a trace are from this line of the program, as `model.py:41 forward`, inside of a place
    /// that [`Rig::place`] has told. What is no line of a program is passed over.
    pub fn set_site(&mut self, place: Option<StackId>, site: Option<&str>) {
        self.go_back_to(place);
        if let (Some(recorder), Some(frame)) = (&self.recorder, site.and_then(frame_of_site)) {
            recorder.set_inner_place(frame);
        }
    }

    /// Where the recording has the scenario; `None` without a recording.
    #[must_use]
    pub fn place(&self) -> Option<StackId> {
        self.recorder.as_ref().map(Recorder::place)
    }

    /// Goes back to where [`Rig::place`] has told that the scenario is.
    fn go_back_to(&mut self, place: Option<StackId>) {
        if let (Some(recorder), Some(place)) = (&self.recorder, place) {
            recorder.go_back_to(place);
        }
    }

    /// The recording so far, with what the main program's allocator holds now. `None` without a recording.
    #[must_use]
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

    /// The next events happen now.
    pub(super) fn record_time(&mut self) {
        if let Some(recorder) = &self.recorder {
            recorder.set_time(self.device.now().0 / 1_000);
        }
    }

    /// The next blocks are this buffer's, or this workload's.
    pub(super) fn label_in_recording(&self, name: &str) {
        if let Some(recorder) = &self.recorder {
            recorder.set_label(Some(name));
        }
    }

    /// The step goes on that was left.
    pub(super) fn go_back_in_recording(&mut self, owner: Option<&Owner>, place: Option<StackId>) {
        self.go_back_to(place);
        if let Some(recorder) = &self.recorder {
            recorder.set_label(owner.map(|owner| owner.name.as_str()));
        }
    }
}

/// The place that a trace tells of an operation, as `model.py:41 forward`. `None` where it is no place.
fn frame_of_site(site: &str) -> Option<Frame> {
    let (file, rest) = site.rsplit_once(':')?;
    let (line, name) = rest.split_once(' ').unwrap_or((rest, ""));
    let is_file = !file.is_empty() && !file.contains(", ");
    let line = line.parse().ok().filter(|_| is_file)?;
    Some(Frame { name: name.to_owned(), file: file.to_owned(), line, extra: ExtraId::NONE })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_site_of_a_trace_is_a_frame_where_it_names_a_line() {
        let frame = |site: &str| frame_of_site(site).map(|frame| (frame.file, frame.line, frame.name));
        let place = |file: &str, line, name: &str| Some((file.to_owned(), line, name.to_owned()));
        assert_eq!(frame("model.py:41 forward"), place("model.py", 41, "forward"));
        assert_eq!(frame("gpt/my model.py:7"), place("gpt/my model.py", 7, ""));
        assert_eq!(frame("no Python frames, after model.py:41 forward"), None);
        assert_eq!(frame("no Python frames, requests below 1 MiB"), None);
        assert_eq!(frame("the optimizer: second moment"), None);
    }
}
