//! What the reader of an explanation should know beside it: how the total is known, what the recording leaves out, and what was recorded.

use harness_allocator::device::Clock;
use harness_allocator::stats::BlockState;
use harness_allocator::units::Bytes;
use harness_trace::snapshot::{Action, Recording, RunInfo};

use crate::view::{TotalKnown, View};

impl View<'_> {
    pub(super) fn notes(&self, known: TotalKnown) -> Vec<String> {
        let mut notes = Vec::new();
        match known {
            TotalKnown::ReservedOnly => notes.push(
                "no request was refused in the recording, so the snapshot does not tell the device's memory: the total is what was reserved; \
                 give it by `--memory`"
                    .to_owned(),
            ),
            TotalKnown::AtOom => notes.push(
                "the total is what was reserved and what was free when a request was refused; what other programs and the CUDA context held is \
                 not in it: give the device's memory by `--memory`"
                    .to_owned(),
            ),
            TotalKnown::Given | TotalKnown::Recorded => {}
        }
        notes.extend(self.snapshot.run().map(|run| of_run(&run)));
        match self.snapshot.recording(self.device) {
            None => notes.push("nothing was recorded: only the final segments are known, neither sites nor ages".to_owned()),
            Some(recording) => notes.extend(self.left_out(&recording)),
        }
        notes
    }

    /// What the recording does not tell, in one sentence; `None` where it is whole.
    fn left_out(&self, recording: &Recording) -> Option<String> {
        let older: Bytes = self
            .state
            .segments
            .iter()
            .flat_map(|segment| &segment.blocks)
            .filter(|block| block.state == BlockState::Allocated && self.state.origin(block.address).allocated.is_none())
            .map(|block| block.size)
            .sum();
        let older = format!("{older} of what is allocated are older than its first event");
        let missing: Vec<&str> = recording.missing.iter().copied().map(Action::name).collect();
        let mut told = Vec::new();
        match recording {
            Recording { from_start: true, .. } => {}
            Recording { events_lost: true, .. } => told
                .push(format!("its first events are lost, overwritten by later ones (`max_entries`) or of an earlier recording: {older}")),
            Recording { .. } => told.push(format!("it began when the program held memory already: {older}")),
        }
        if !missing.is_empty() {
            told.push(format!("events were left out (`skip_actions`): {}", missing.join(", ")));
        }
        (!told.is_empty()).then(|| format!("the recording is not complete: {}", told.join("; ")))
    }
}

/// What the reader of a run's figures should know.
fn of_run(run: &RunInfo) -> String {
    let times = match run.clock {
        Clock::Simulated => "times are those of its cost model",
        Clock::Measured => "times were measured",
    };
    let rules = if run.is_pytorchs {
        ""
    } else {
        "; this allocator is not PyTorch's, so its rules do not tell why a request failed, and blocks that were freed before the end may have \
         been larger than shown"
    };
    let RunInfo { scenario, allocator, device, .. } = run;
    format!("recorded from the checked run of {scenario} with {allocator} on {device}: {times}, with the checks in them{rules}")
}
