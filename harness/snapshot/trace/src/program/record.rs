//! Records a replay as a memory snapshot.

use std::ops::ControlFlow;

use super::{PreparedReplay, ProgramError, ReplaySetup};
use crate::execute::{ByHandle, OperationOutcome};
use crate::snapshot::{Frame, RecordedSettings, Recorder, Snapshot};

impl PreparedReplay<'_> {
    /// Replays the program from an empty allocator and returns the snapshot that PyTorch would
    /// write. Stops at the first request that fails but succeeded in the recording. `place` returns
    /// the call site of an operation.
    pub fn record(
        &self,
        setup: &ReplaySetup,
        place: impl Fn(usize) -> Option<Frame>,
    ) -> Result<Snapshot, ProgramError> {
        let settings = setup
            .allocator
            .effective()
            .map(|config| RecordedSettings::of(&config));
        let recorder = Recorder::new(settings);
        let mut device = self.device(setup)?;
        let mut allocator = recorder.around(setup.allocator.build());
        recorder.set_place(place(0));
        let mut snapshot = Snapshot::default();
        let last = self.program().operations.len().saturating_sub(1);
        let mut target = ByHandle {
            device: &mut device,
            allocator: &mut allocator,
        };
        self.run(&mut target, Vec::new(), |operation, outcome, target| {
            if operation == last || outcome == OperationOutcome::OutOfMemory {
                snapshot = recorder.snapshot(target.allocator);
            }
            recorder.set_place(place(operation + 1));
            ControlFlow::Continue(())
        })?;
        // Stream numbers become the program's handles.
        let handle = |number: &mut u64| {
            *number = self
                .program()
                .streams
                .get(*number as usize)
                .copied()
                .unwrap_or(*number)
        };
        snapshot
            .traces
            .iter_mut()
            .flatten()
            .for_each(|event| handle(&mut event.stream));
        snapshot
            .segments
            .iter_mut()
            .for_each(|segment| handle(&mut segment.stream));
        Ok(snapshot)
    }
}
