//! Runs candidates: [`Engine`], and [`Simulated`] for the simulated device.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use harness_allocator::device::DeviceError;
use harness_devices::DeviceSource;
use harness_record::{Collector, Event, RunRecord};
use harness_run::control::Control;
use harness_run::session::{Plan, Sinks};
use harness_scenario::Scenario;

/// Runs a scenario with each of its allocators. Must be deterministic.
pub trait Engine {
    /// Returns one record per allocator. Calls `on_step` with the number of each completed step; a
    /// break stops the run. Fails with [`DeviceError`] if no device is available.
    fn run(
        &self,
        scenario: &Scenario,
        on_step: &mut dyn FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Vec<RunRecord>, DeviceError>;
}

/// Runs on a simulated device that has enough memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct Simulated;

impl Engine for Simulated {
    fn run(
        &self,
        scenario: &Scenario,
        on_step: &mut dyn FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Vec<RunRecord>, DeviceError> {
        let (scenarios, program) = (vec![scenario.clone()], "harness".to_owned());
        let plan = Plan {
            scenarios,
            repetitions: 1,
            audit: true,
            program,
            ..Plan::default()
        };
        let source = DeviceSource::simulated().with_room_for(scenario.needs.memory);
        let interrupt = Arc::new(AtomicBool::new(false));
        let mut collector = Collector::default();
        let control = Arc::new(Control::new(Arc::clone(&interrupt)));
        plan.observe(&source, &control, &Sinks::default(), &mut |event| {
            if let Event::StepEnded(step) = &event
                && on_step(step.number).is_break()
            {
                interrupt.store(true, Ordering::Relaxed);
            }
            collector.add(event);
        })?;
        Ok(collector.into_records().runs)
    }
}
