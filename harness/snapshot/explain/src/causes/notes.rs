//! Notes for an explanation: the source of the total, gaps in the recording, and the recorded run.

use harness_allocator::{device::Clock, stats::BlockState, units::Bytes};
use harness_trace::snapshot::{Action, Recording, RunInfo};

use crate::view::{TotalKnown, View};

impl View<'_> {
    pub(super) fn notes(&self, known: TotalKnown) -> Vec<String> {
        let mut notes = Vec::new();
        match known {
            TotalKnown::ReservedOnly => notes.push(
                "no request was refused in the recording, so the snapshot does not tell the \
                 device's memory: the total is what was reserved; \
                 give it by `--memory`"
                    .to_owned(),
            ),
            TotalKnown::AtOom => notes.push(
                "the total is what was reserved and what was free when a request was refused; what \
                 other processes and the CUDA context held is \
                 not in it: give the device's memory by `--memory`"
                    .to_owned(),
            ),
            TotalKnown::Given | TotalKnown::Recorded => {}
        }
        notes.extend(self.snapshot.run().map(|run| of_run(&run)));
        match self.snapshot.recording(self.device) {
            // The first request of a program that failed is all that happened.
            None if self.state.segments.is_empty() => {}
            None => notes.push(
                "nothing was recorded, so only the final segments are known, \
                 and not when their blocks were allocated"
                    .to_owned(),
            ),
            Some(recording) => notes.extend(self.left_out(&recording)),
        }
        notes
    }

    /// Describes the gaps of a recording. `None` if it is complete.
    fn left_out(&self, recording: &Recording) -> Option<String> {
        let older: Bytes = self
            .state
            .segments
            .iter()
            .flat_map(|segment| &segment.blocks)
            .filter(|block| {
                block.state == BlockState::Allocated
                    && self.state.origin(block.address).allocated.is_none()
            })
            .map(|block| block.size)
            .sum();
        let older = format!("{older} of allocated memory are older than its first event");
        let missing: Vec<&str> = recording
            .missing
            .iter()
            .copied()
            .map(Action::name)
            .collect();
        let mut told = Vec::new();
        match recording {
            Recording {
                from_start: true, ..
            } => {}
            Recording {
                events_lost: true, ..
            } => told.push(format!(
                "its first events are missing, because later ones overwrote them \
                     (`max_entries`) or because they belong to an earlier recording: {older}"
            )),
            Recording { .. } => told.push(format!(
                "it began after the program had allocated \
                 memory: {older}"
            )),
        }
        if !missing.is_empty() {
            told.push(format!(
                "these events were not recorded (`skip_actions`): {}",
                missing.join(", ")
            ));
        }
        (!told.is_empty()).then(|| format!("the recording is incomplete: {}", told.join("; ")))
    }
}

/// Notes about the figures of a harness run.
fn of_run(run: &RunInfo) -> String {
    let times = match run.clock {
        Clock::Simulated => "its cost model provides the times",
        Clock::Measured => "times were measured",
    };
    let rules = if run.is_pytorchs {
        ""
    } else {
        "; this allocator is not PyTorch's, so its rules do not tell why a request failed, and \
         blocks that were freed before the end may have \
         been larger than shown"
    };
    let RunInfo {
        scenario,
        allocator,
        device,
        ..
    } = run;
    format!(
        "recorded from the checked run of {scenario} with {allocator} on {device}: {times}, which \
         include the checks{rules}"
    )
}
