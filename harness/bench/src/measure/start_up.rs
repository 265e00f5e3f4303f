//! Start-up: the program with one small scenario, opening a device, and the device memory of its
//! context before the first request.

use std::process::{Command, Stdio};

use harness_allocator::device::{Clock, DeviceError};
use harness_allocator::{allocator::AllocatorKind, units::Bytes};

use super::visit::{Fault, Reading, Visit, for_shell};
use crate::clock::Stopwatch;

pub(super) fn visit(visit: &mut Visit<'_>) -> Result<Vec<Reading>, Fault> {
    let watch = Stopwatch::start();
    let device = visit.provider.open()?;
    let opened = watch.elapsed_ps();
    let overhead = device.own_context();
    // Nothing else is open while the program is timed.
    drop(device);
    let process = process(visit)?;
    let mut readings = vec![Reading::time(Clock::Measured, 1, vec![process])];
    // A simulated device opens in microseconds that depend only on the page cache, so opening is
    // not timed.
    if visit.provider.clock() == Clock::Measured {
        readings.push(Reading {
            part: Some("opening the device".into()),
            ..Reading::time(Clock::Measured, 1, vec![opened])
        });
    }
    readings.push(match overhead {
        Ok(Bytes(overhead)) => Reading::memory("context overhead", overhead),
        Err(error @ DeviceError::Unavailable { .. }) => Reading {
            samples: Err(error.to_string()),
            ..Reading::memory("context overhead", 0)
        },
        Err(error) => return Err(error.into()),
    });
    Ok(readings)
}

fn process(visit: &Visit<'_>) -> Result<u64, Fault> {
    let Some(program) = visit.provider.program() else {
        return Err(Fault::Skipped(
            "this program cannot be started again: its path is unknown".to_owned(),
        ));
    };
    let failed = |error: std::io::Error| {
        Fault::Failed(format!(
            "`{}` cannot be started: {error}",
            program.display()
        ))
    };
    // A library runs in every scenario.
    let (arm, memory) = (
        visit.arm.kind().unwrap_or(AllocatorKind::Direct).name(),
        visit.memory.0,
    );
    let scenario = format!(
        "about: One step.\nneeds: {{ memory: {memory}B }}\nallocators: [{arm}]\nsteps:\n  - alloc: \
         {{ buffer: a, size: 1B }}\n"
    );
    let folder = tempfile::tempdir().map_err(failed)?;
    let path = folder.path().join("one_step.yaml");
    std::fs::write(&path, scenario).map_err(failed)?;
    let mut command = Command::new(program);
    command.arg("run").arg(&path).args([
        "--no-report",
        "--quiet",
        "--allocator",
        &for_shell(visit.arm),
    ]);
    command.args(visit.provider.device_arguments());
    let watch = Stopwatch::start();
    let output = command.stdin(Stdio::null()).output().map_err(failed)?;
    let time = watch.elapsed_ps();
    match output.status.success() {
        true => Ok(time),
        false => Err(Fault::Failed(format!(
            "a scenario of one step ended with {}: {}{}",
            output.status,
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        ))),
    }
}
