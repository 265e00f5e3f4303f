//! Outcomes of invented programs.

use harness_allocator::units::Bytes;
use harness_gpu_settings::attempts::{Attempt, AttemptOutcome};
use harness_gpu_settings::{calls::Call, settings::AddressOrder};

use crate::errors::{ErrorFrame, OutOfMemoryError};
use crate::process::End;
use crate::torch_record::Caller;
use crate::trials::Trial;
use crate::trials::observed::{Observed, TrialEnd};

/// Returns a trial with this memory.
pub(crate) fn trial(memory: Bytes) -> Trial {
    Trial {
        memory,
        addresses: Some(AddressOrder::Linux),
        alloc_conf: None,
        faults: Vec::new(),
        faulty_device: None,
    }
}

/// Returns a successful run with attempts of these sizes in MiB.
pub(crate) fn ended_well(sizes: &[u64]) -> Observed {
    let attempt = |size: &u64| Attempt {
        call: Call::Malloc,
        size: Bytes::mib(*size),
        submitted: 0,
        outcome: AttemptOutcome::Served,
        device: 0,
        number: 0,
        held: Bytes::ZERO,
    };
    let peak = Bytes::mib(sizes.iter().sum());
    Observed {
        ending: TrialEnd::By(End::Code(0)),
        is_copy: false,
        processes: 1,
        caller: Caller::Torch,
        peak_reserved: peak,
        peak_allocated: Some(peak),
        allocated_at_end: Some(Bytes::mib(10)),
        retries: Some(0),
        ooms: Some(0),
        unreported: None,
        driver_calls: sizes.len() as u64,
        submitted: 100,
        reads_free_memory: false,
        slow_calls: Vec::new(),
        attempts: sizes.iter().map(attempt).collect(),
        calls_of_libraries: Vec::new(),
        errors: Vec::new(),
        failed_calls: Vec::new(),
        ranks: Vec::new(),
        port: None,
        port_in_use: None,
        hang: None,
        ended_out_of_memory: false,
        caught_out_of_memory: false,
        ended_in_handler: false,
        ended_by_library: false,
        error: None,
        is_end_unknown: false,
        late_import: None,
        last_lines: Vec::new(),
        doubts: Vec::new(),
    }
}

/// Returns an out of memory error in this line, after this many attempts.
pub(crate) fn error(attempts: u64, line: u64) -> OutOfMemoryError {
    OutOfMemoryError {
        attempts,
        frames: vec![ErrorFrame {
            file: "/home/me/train.py".to_owned(),
            line,
            name: "step".to_owned(),
        }],
    }
}
