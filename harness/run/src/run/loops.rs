//! Leak checks of loops.

use harness_scenario::steps::Step;

use super::runner::Runner;
use crate::context::RunContext;
use crate::leaks::Watch;
use crate::rig::Stop;
use crate::step_result::StepResult;

impl Runner<'_, '_> {
    /// Starts the leak check of a block that has one.
    pub(super) fn begin_watch(&mut self, ctx: &RunContext, step: &Step) {
        let watch = Watch::begin(ctx, step.action.leak_check(), step.position);
        self.watches.extend(watch.map(|watch| (step.position, watch)));
    }

    pub(super) fn iteration_ended(&mut self, ctx: &RunContext, step: &Step) {
        if let Some((_, watch)) = self.watches.iter_mut().find(|(at, _)| *at == step.position) {
            watch.iteration_ended(ctx);
        }
    }

    /// Ends the leak check of a block that has one, and adds its findings to the result.
    pub(super) fn end_watch(&mut self, ctx: &mut RunContext, step: &Step, result: &mut StepResult) -> Result<(), Stop> {
        let Some(index) = self.watches.iter().position(|(at, _)| *at == step.position) else { return Ok(()) };
        let (_, watch) = self.watches.remove(index);
        result.append(watch.judge(ctx)?);
        Ok(())
    }

    /// Judges the loops that a failed run left early, because their leaks may be the cause. Nothing is reported if the
    /// device no longer responds.
    pub(super) fn judge_open_loops(&mut self, ctx: &mut RunContext) {
        if self.interrupted {
            return;
        }
        for (_, watch) in std::mem::take(&mut self.watches) {
            let unmet = watch.judge(ctx).map(|found| found.unmet).unwrap_or_default();
            unmet.into_iter().for_each(|unmet| self.unmet(unmet, &mut Vec::new()));
        }
    }
}
