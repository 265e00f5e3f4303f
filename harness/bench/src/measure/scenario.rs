use std::sync::Arc;

use harness_allocator::{device::Clock, units::Nanos};

use super::visit::{Fault, Reading, Visit, for_shell};
use crate::provider::MemoryLimit;
use harness_base::shell::quoted;
use harness_record::Verdict;
use harness_run::run::{Run, RunRequest, RunResult};
use harness_run::session::has_pytorchs;
use harness_scenario::Scenario;

pub(super) fn visit(visit: &mut Visit<'_>, scenario: &Scenario) -> Result<Vec<Reading>, Fault> {
    let arm = visit.arm;
    // The same rule as `harness run`: PyTorch's allocator runs a scenario that lists it, under any
    // settings; a library runs any scenario.
    let is_listed = arm.as_library().is_some()
        || scenario
            .allocators
            .iter()
            .any(|listed| listed.is_equivalent_to(arm));
    let is_variant = || arm.settings().is_some() && arm.is_pytorch() && has_pytorchs(scenario);
    if !is_listed && !is_variant() {
        return Err(Fault::Skipped(format!(
            "`{}` does not list `{arm}`",
            scenario.path.display()
        )));
    }
    let (path, arm_for_shell) = (
        quoted(&scenario.path.to_string_lossy()),
        quoted(&for_shell(arm)),
    );
    let device = visit.provider.device_name();
    let request = RunRequest {
        scenario,
        allocator: arm,
        seed: scenario.seed,
        repetition: 0,
        reproduce: format!(
            "harness run {path} --device {device} --allocator {arm_for_shell} --skip-checks"
        ),
        audit: false,
        interrupt: Arc::clone(visit.interrupt),
    };
    let device = visit
        .provider
        .device(scenario.needs.memory, MemoryLimit::Enforced)?;
    let timed = Run::new(&request, device)
        .with_allocator(visit.provider.allocator(arm))
        .timed()?;
    match &timed.record.verdict {
        Verdict::Passed => Ok(readings(visit.provider.clock(), &timed, arm.not_timed())),
        Verdict::Failed { first, .. } | Verdict::FailedAsExpected { first, .. } => Err(
            Fault::Failed(format!("{first}; see `{}`", request.reproduce)),
        ),
        Verdict::Skipped { reason, .. } | Verdict::Contended { reason } => {
            Err(Fault::Skipped(reason.clone()))
        }
        Verdict::Interrupted => Err(Fault::Interrupted),
    }
}

/// `not_timed` states why measured times would not be the allocator's own.
fn readings(clock: Clock, run: &RunResult, not_timed: Option<&str>) -> Vec<Reading> {
    let ps = |time: Nanos| time.0.saturating_mul(1000);
    let not_timed = not_timed.filter(|_| clock == Clock::Measured);
    let time = |time| {
        let samples = not_timed.map_or_else(|| Ok(vec![ps(time)]), |reason| Err(reason.to_owned()));
        Reading {
            samples,
            ..Reading::time(clock, 1, Vec::new())
        }
    };
    // Zero lost time is recorded too, so the first retry is a difference.
    let lost = Reading {
        part: Some("lost to retry".into()),
        ..time(run.record.timings.lost_to_retry)
    };
    let peak = Reading::peak(
        run.record.stats.reserved_bytes.all.peak,
        run.unused_at_peak.0,
    );
    [time(run.record.timings.scenario), lost]
        .into_iter()
        .chain(peak)
        .collect()
}
