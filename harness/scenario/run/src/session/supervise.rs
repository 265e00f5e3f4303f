use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, atomic::AtomicBool};
use std::{panic, thread, time::Duration};

use harness_allocator::device::DeviceError;
use harness_devices::DeviceSource;
use harness_record::{Event, Rule, RunRecord, SourceLine, StepRecord, Violation};

use super::{Plan, Sinks};
use crate::control::{Control, Overrun, Phase};

/// The interval between checks of the time limits.
const PERIOD: Duration = Duration::from_millis(50);

/// Matches the stack size of a main thread.
const STACK: usize = 8 << 20;

#[derive(Debug)]
pub enum SupervisedEnd {
    /// Everything ran, or the user interrupted it.
    Done,
    Device(DeviceError),
    /// A run is stuck. Its thread still waits, so the program should report that and exit.
    Stuck(Overrun),
}

/// Runs a plan in a separate thread, calls `on_event` in this one, and sends recordings to `sinks`.
#[must_use]
pub fn supervise(
    plan: Plan,
    source: DeviceSource,
    interrupt: Arc<AtomicBool>,
    sinks: Sinks,
    mut on_event: impl FnMut(Event),
) -> SupervisedEnd {
    let control = Arc::new(Control::new(interrupt));
    let (sender, events) = mpsc::channel();
    let worker = thread::Builder::new()
        .name("session".to_owned())
        .stack_size(STACK)
        .spawn({
            let control = Arc::clone(&control);
            // The receiver is gone if the session was aborted.
            move || {
                plan.observe(&source, &control, &sinks, &mut |event| {
                    drop(sender.send(event))
                })
            }
        });
    let worker = match worker {
        Ok(worker) => worker,
        Err(error) => {
            return SupervisedEnd::Device(DeviceError::Unavailable {
                what: "a thread".to_owned(),
                why: error.to_string(),
            });
        }
    };
    let mut running: Option<RunRecord> = None;
    loop {
        match events.recv_timeout(PERIOD) {
            Ok(event) => {
                match &event {
                    Event::RunStarted(run) => running = Some(RunRecord::clone(run)),
                    Event::RunEnded(_) => running = None,
                    Event::StepEnded(step) => running
                        .iter_mut()
                        .for_each(|run| run.steps.push(StepRecord::clone(step))),
                    Event::Started { .. } => {}
                }
                on_event(event);
            }
            Err(RecvTimeoutError::Timeout) => {
                if let Some(overrun) = control.watch() {
                    running
                        .into_iter()
                        .for_each(|run| on_event(Event::RunEnded(Box::new(stuck(run, &overrun)))));
                    return SupervisedEnd::Stuck(overrun);
                }
            }
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    match worker.join() {
        Ok(Ok(())) => SupervisedEnd::Done,
        Ok(Err(error)) => SupervisedEnd::Device(error),
        Err(payload) => panic::resume_unwind(payload),
    }
}

fn stuck(run: RunRecord, overrun: &Overrun) -> RunRecord {
    let (step, at) = match overrun.phase {
        Phase::Step { number, line, .. } => (
            number,
            Some(SourceLine {
                path: run.scenario.path.clone(),
                line,
                column: 1,
            }),
        ),
        Phase::Opening | Phase::Closing => (0, None),
    };
    let first = Violation {
        step,
        at,
        rule: Rule::TimeLimit,
        expected: overrun.expected(),
        seen: overrun.seen_stuck(),
    };
    RunRecord {
        verdict: first.into(),
        ..run
    }
}
