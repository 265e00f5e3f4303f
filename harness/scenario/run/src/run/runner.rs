//! The runner: runs the steps of a scenario in order, interleaves `meanwhile` steps, and records
//! the results.

use std::{collections::BTreeMap, ops::ControlFlow, time::Duration};

use harness_base::words::count;
use harness_record::{Event, Outcome, ProcessFigures, StepRecord, Violation};
use harness_scenario::steps::{Action, Step};
use harness_scenario::{Chain, Expectation, Located, Position, ReportKey};

use super::cursor::{Cursor, Next};
use super::{RunObserver, RunRequest, StepTimes, execute, frames::frames, kept::Steps};
use crate::control::{DEFAULT_TIME_LIMIT, Phase};
use crate::rig::{Checks, StepEnd, Stop};
use crate::shared_memory::SharedMemory;
use crate::step_result::{StepResult, Unmet};
use crate::{context::RunContext, faults::Faults, leaks::Watch, processes::Inside};

pub(super) struct Runner<'a, 'o> {
    pub(super) request: &'a RunRequest<'a>,
    pub(super) checks: Checks,
    pub(super) observer: RunObserver<'o>,
    /// The steps of a checked run.
    pub(super) steps: Steps<StepRecord>,
    pub(super) times: Steps<(u32, StepTimes)>,
    pub(super) number: u32,
    /// Steps and operations so far, if there are health checks.
    pub(super) operations: u64,
    pub(super) watches: Vec<(Position, Watch)>,
    /// `eventually` expectations that have not held yet.
    pub(super) awaited: Vec<Located<Expectation>>,
    pub(super) violations: Vec<Violation>,
    /// What other processes did on the device.
    pub(super) contention: Option<String>,
    pub(super) interrupted: bool,
    /// The injected faults, shared with the devices.
    pub(super) faults: Option<Faults>,
    /// The fault whose error ended the run, by its index in the scenario.
    pub(super) ended_by: Option<usize>,
}

struct Task<'s> {
    cursor: Cursor<'s>,
    /// The `meanwhile` tasks of the blocks around the next step.
    meanwhile: Vec<(&'s Step, Task<'s>)>,
}

impl<'s> Task<'s> {
    fn new(steps: &'s [Step]) -> Self {
        Self {
            cursor: Cursor::new(steps),
            meanwhile: Vec::new(),
        }
    }

    fn beside(&self, step: &'s Step) -> Self {
        Self {
            cursor: self.cursor.meanwhile(step),
            meanwhile: Vec::new(),
        }
    }
}

struct StepOver<'s> {
    step: &'s Step,
    number: u32,
    /// Describes the iterations of the loops around it.
    iteration: Option<String>,
    result: StepResult,
    failed: bool,
}

/// True if a run or task continues.
pub(super) type Flow = ControlFlow<()>;

/// Notes the processes of an `exec` step under their names.
fn note_exec(ctx: &mut RunContext, step: &Step, programs: &mut [ProcessFigures], is_alone: bool) {
    let name = || match &step.id {
        Some(id) => id.to_string(),
        None => step.action.to_string(),
    };
    for program in &mut *programs {
        program.name += &name();
    }
    let held = ctx.shared_memory.as_ref().map(SharedMemory::peak);
    let held = held.unwrap_or_default();
    ctx.processes
        .note_exec(&mut ctx.rig, programs, held, is_alone);
}

fn described(step: &Step, iteration: Option<&str>) -> String {
    let what = format!("{} {}", step.action.kind(), step.action);
    iteration.map_or_else(
        || what.trim_end().to_owned(),
        |iteration| format!("{} ({iteration})", what.trim_end()),
    )
}

impl<'a, 'o> Runner<'a, 'o> {
    pub(super) fn new(
        request: &'a RunRequest<'a>,
        checks: Checks,
        observer: RunObserver<'o>,
        steps: Steps<StepRecord>,
        faults: Option<Faults>,
    ) -> Self {
        Self {
            request,
            checks,
            observer,
            steps,
            times: Steps::new(),
            number: 0,
            operations: 0,
            watches: Vec::new(),
            awaited: Vec::new(),
            violations: Vec::new(),
            contention: None,
            interrupted: false,
            faults,
            ended_by: None,
        }
    }
}

impl Runner<'_, '_> {
    /// Runs all steps, or stops early if the run cannot continue.
    pub(super) fn run_all(&mut self, ctx: &mut RunContext, steps: &[Step]) -> Flow {
        let mut task = Task::new(steps);
        loop {
            match self.advance(ctx, &mut task) {
                ControlFlow::Continue(true) => {}
                ControlFlow::Continue(false) => break,
                ControlFlow::Break(()) => {
                    self.judge_open_loops(ctx);
                    return Flow::Break(());
                }
            }
        }
        self.judge_awaited(ctx);
        if self.violations.is_empty() || self.only_expected_violations() {
            Flow::Continue(())
        } else {
            Flow::Break(())
        }
    }

    /// Runs the next step of a task, then one step of each of its `meanwhile` tasks. Returns
    /// whether a step was left.
    fn advance<'s>(&mut self, ctx: &mut RunContext, task: &mut Task<'s>) -> ControlFlow<(), bool> {
        // Only allocations check for an interrupt themselves.
        if self.observer.control.is_interrupted() {
            self.interrupted = true;
            return ControlFlow::Break(());
        }
        while let Some(next) = task.cursor.advance() {
            match next {
                Next::Do(step) => {
                    self.do_step(ctx, task, step)?;
                    task.meanwhile
                        .iter_mut()
                        .try_for_each(|(_, task)| self.advance(ctx, task).map_continue(drop))?;
                    return ControlFlow::Continue(true);
                }
                Next::Enter(step) => self.enter_block(ctx, task, step)?,
                Next::Iterated(step) => {
                    let watches = self
                        .watches
                        .iter_mut()
                        .filter(|(at, _)| *at == step.position);
                    watches.for_each(|(_, watch)| watch.iteration_ended(ctx));
                }
                Next::Leave {
                    step,
                    iterations,
                    ran_out,
                } => self.leave_block(ctx, task, step, iterations, ran_out)?,
            }
        }
        ControlFlow::Continue(false)
    }

    fn resume<'s>(&self, ctx: &mut RunContext, task: &Task<'s>, step: &'s Step) {
        ctx.set_variables(task.cursor.variables());
        ctx.enter(task.cursor.program());
        let number = |step: &Step| self.request.scenario.step_number(step);
        ctx.inside = task.cursor.process().map(|process| Inside {
            process: process.clone(),
            loops: task
                .cursor
                .loops()
                .filter_map(|(step, iterations)| Some((number(step)?, iterations)))
                .collect(),
        });
        ctx.rig
            .set_place(|| frames(&self.request.scenario.path, step, task.cursor.around(step)));
    }

    fn enter_block<'s>(
        &mut self,
        ctx: &mut RunContext,
        task: &mut Task<'s>,
        step: &'s Step,
    ) -> Flow {
        if !step.meanwhile.is_empty() {
            task.meanwhile.push((step, task.beside(step)));
        }
        let watch = Watch::begin(ctx, step.action.leak_check(), step.position);
        self.watches
            .extend(watch.map(|watch| (step.position, watch)));
        if let Action::PrivatePool(_) = step.action {
            self.resume(ctx, task, step);
            self.run_step(ctx, step, task.cursor.iteration(), None)?;
        }
        Flow::Continue(())
    }

    fn leave_block<'s>(
        &mut self,
        ctx: &mut RunContext,
        task: &mut Task<'s>,
        step: &'s Step,
        iterations: u64,
        ran_out: bool,
    ) -> Flow {
        if let Some((_, mut rest)) = task
            .meanwhile
            .pop_if(|(block, _)| std::ptr::eq(*block, step))
        {
            while self.advance(ctx, &mut rest)? {}
        }
        self.resume(ctx, task, step);
        match &step.action {
            Action::PrivatePool(block) => {
                let pool = ctx.pool(&block.name);
                if let Err(stop) = ctx.rig.end_private_pool(pool) {
                    self.stop(stop, Some(step));
                    return Flow::Break(());
                }
                Flow::Continue(())
            }
            Action::For(steps) | Action::Repeat(steps)
                if steps.until_oom || step.id.is_some() || steps.leak_check.is_some() =>
            {
                let mut result = StepResult {
                    reports: BTreeMap::from([(ReportKey::Iterations, iterations)]),
                    ..StepResult::default()
                };
                if steps.until_oom && !ran_out {
                    let seen = format!("{} ended without that", count(iterations, "iteration"));
                    result.unmet.push(Unmet::at(
                        step,
                        "a request inside the loop to run out of memory",
                        seen,
                    ));
                }
                let ending = |runner: &mut Self, ctx: &mut RunContext| {
                    if let Some(index) = runner
                        .watches
                        .iter()
                        .position(|(at, _)| *at == step.position)
                    {
                        result.append(runner.watches.remove(index).1.judge(ctx)?);
                    }
                    Ok(result)
                };
                self.run_as_step(ctx, step, task.cursor.iteration(), ending)
                    .map_continue(drop)
            }
            _ => Flow::Continue(()),
        }
    }

    /// Runs one step without inner steps. An OOM in it may end the loop around it.
    fn do_step<'s>(&mut self, ctx: &mut RunContext, task: &mut Task<'s>, step: &'s Step) -> Flow {
        self.resume(ctx, task, step);
        let iteration = task.cursor.iteration();
        let mut own = (!step.meanwhile.is_empty()).then(|| task.beside(step));
        let outcome = self.run_step(ctx, step, iteration, own.as_mut())?;
        if let Some(mut rest) = own {
            while self.advance(ctx, &mut rest)? {}
            self.resume(ctx, task, step);
        }
        let ends_loop = match &step.action {
            Action::Alloc(alloc) => alloc.expect.ends_loop,
            Action::Train(train) => train.expect.ends_loop,
            Action::Infer(infer) => infer.expect.ends_loop,
            _ => false,
        };
        if ends_loop && outcome == Outcome::OutOfMemory {
            task.cursor.leave_loop();
        }
        Flow::Continue(())
    }

    /// Runs a step. Between its operations it checks the scenario's invariants and advances
    /// `meanwhile`.
    fn run_step(
        &mut self,
        ctx: &mut RunContext,
        step: &Step,
        iteration: Option<String>,
        meanwhile: Option<&mut Task<'_>>,
    ) -> ControlFlow<(), Outcome> {
        if let Some(inside) = ctx.inside.clone()
            && let Some(step_number) = self.request.scenario.step_number(step)
        {
            return self.run_as_step(ctx, step, iteration, |runner, ctx| {
                ctx.processes
                    .run(&mut ctx.rig, &inside, step, (runner.number, step_number))
            });
        }
        let waits = step.action.on_oom().is_some_and(Chain::waits);
        let is_workload = waits
            || matches!(
                step.action,
                Action::Storm(_)
                    | Action::Train(_)
                    | Action::Infer(_)
                    | Action::Replay(_)
                    | Action::Exec(_)
            );
        let has_invariants =
            self.checks != Checks::Timing && !self.request.scenario.invariants.is_empty();
        if !is_workload || (meanwhile.is_none() && !has_invariants && !self.has_health_checks()) {
            return self.run_as_step(ctx, step, iteration, |_, ctx| {
                execute::execute(ctx, step, None)
            });
        }
        let mut meanwhile = meanwhile;
        self.run_as_step(ctx, step, iteration, |runner, ctx| {
            let mut between = |ctx: &mut RunContext| {
                runner.check_health(ctx)?;
                let seen = runner.violations.len();
                runner.check_invariants(ctx, step, &mut Vec::new());
                if let Some(task) = meanwhile.as_deref_mut() {
                    let paused = ctx.rig.pause_step();
                    // External programs run by themselves, so all `meanwhile` programs start at the
                    // first pause.
                    let goes_on = |flow: &ControlFlow<(), bool>| {
                        matches!(step.action, Action::Exec(_))
                            && *flow == ControlFlow::Continue(true)
                    };
                    let mut flow = runner.advance(ctx, task);
                    while goes_on(&flow) {
                        flow = runner.advance(ctx, task);
                    }
                    ctx.rig.resume_step(paused);
                    if flow.is_break() {
                        return Err(Stop::Violated(Vec::new()));
                    }
                }
                let has_failed =
                    runner.violations.len() > seen && !runner.only_expected_violations();
                // The violations are already recorded.
                if has_failed {
                    Err(Stop::Violated(Vec::new()))
                } else {
                    Ok(())
                }
            };
            execute::execute(ctx, step, Some(&mut between))
        })
    }

    fn begin(&mut self, ctx: &mut RunContext, step: &Step, iteration: Option<&str>) -> u32 {
        self.number += 1;
        let number = self.number;
        let limit = step
            .time_limit
            .map_or(DEFAULT_TIME_LIMIT, |limit| Duration::from_nanos(limit.0));
        self.observer.control.enter(
            Phase::Step {
                number,
                line: step.position.line,
                text: described(step, None),
            },
            limit,
        );
        ctx.rig.begin_step(number);
        ctx.rig.describe_step(|| described(step, iteration));
        number
    }

    /// Notes unmet expectations, or why the step failed.
    fn note_result(&mut self, done: Result<StepResult, Stop>, step: &Step) -> Option<StepResult> {
        match done {
            Ok(mut result) => {
                for unmet in std::mem::take(&mut result.unmet) {
                    self.unmet(unmet, &mut result.notes);
                }
                Some(result)
            }
            Err(stop) => {
                self.stop(stop, Some(step));
                None
            }
        }
    }

    /// Runs `act` as a numbered step, with a time limit, checks and a record.
    fn run_as_step(
        &mut self,
        ctx: &mut RunContext,
        step: &Step,
        iteration: Option<String>,
        act: impl FnOnce(&mut Self, &mut RunContext) -> Result<StepResult, Stop>,
    ) -> ControlFlow<(), Outcome> {
        let number = self.begin(ctx, step, iteration.as_deref());
        let seen = self.violations.len();
        let done = act(self, ctx).and_then(|result| self.check_health(ctx).map(|()| result));
        let mut result = self.note_result(done, step);
        let ended = match (ctx.rig.end_step(result.is_none()), &result) {
            (Ok(ended), _) => Some(ended),
            // The failed step has already explained why; audit findings would hide that.
            (Err(_), None) => None,
            (Err(stop), Some(_)) => {
                self.stop(stop, Some(step));
                None
            }
        };
        for finding in ctx.rig.take_findings() {
            self.find(finding, Some(step));
        }
        if let Some(result) = &mut result {
            // Otherwise other steps ran at the same time.
            let is_alone = self.number == number && ctx.rig.running_programs == 0;
            note_exec(ctx, step, &mut result.programs, is_alone);
        }
        // A step that was cut short leaves partial state, so later checks would be meaningless.
        let cut_short = result.is_none() || ended.is_none();
        if let (Some(result), false) = (&mut result, cut_short) {
            self.check_invariants(ctx, step, &mut result.notes);
            self.check_awaited(ctx, step);
        }
        self.check_time(Some(step));
        let failed = self.violations.len() > seen;
        let outcome = result
            .as_ref()
            .map_or(Outcome::Failed, |result| result.outcome.clone());
        // An interrupted step has neither succeeded nor failed.
        if !self.interrupted {
            let mut result = result.unwrap_or_else(|| StepResult {
                outcome: Outcome::Failed,
                ..StepResult::default()
            });
            result.notes.extend(ctx.rig.take_construction_failure());
            result.notes.extend(self.injected_calls());
            self.record(
                ctx,
                StepOver {
                    step,
                    number,
                    iteration,
                    result,
                    failed,
                },
                ended,
            );
        }
        let stops = self.interrupted || cut_short || (failed && !self.only_expected_violations());
        if stops {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(outcome)
        }
    }

    fn record(&mut self, ctx: &mut RunContext, over: StepOver<'_>, ended: Option<StepEnd>) {
        let StepEnd { duration, accounts } = ended.unwrap_or_default();
        let reports = over.result.reports_with(duration);
        // Only named steps report figures.
        let own = over.step.id.iter().flat_map(|_| &reports);
        let named = own
            .map(|(key, value)| (key.name().to_owned(), *value))
            .collect();
        if let Some(id) = &over.step.id {
            ctx.values.reports.insert(id.clone(), reports);
        }
        if let Some(duration) = duration {
            self.times.push((
                over.number,
                StepTimes {
                    duration,
                    reports: named,
                    recovery: over.result.recovery,
                },
            ));
            return;
        }
        let accounts = if self.checks == Checks::Timing {
            None
        } else {
            accounts.or_else(|| ctx.rig.accounts().ok())
        };
        let Some(accounts) = accounts else { return };
        let inside = ctx.inside.as_ref().map(|inside| &inside.process);
        let accounts = inside
            .and_then(|process| ctx.processes.accounts(process))
            .unwrap_or(accounts);
        let process = inside
            .map(ToString::to_string)
            .or_else(|| ctx.name_of_program(self.request.scenario));
        if !self.steps.keeps() {
            self.steps.count();
            return;
        }
        let StepOver { step, result, .. } = over;
        let outcome = match result.outcome {
            Outcome::Done if over.failed => Outcome::Failed,
            outcome => outcome,
        };
        let step = StepRecord {
            number: over.number,
            line: step.position.line,
            kind: step.action.kind().name().to_owned(),
            text: step.action.to_string(),
            iteration: over.iteration,
            size: result.size,
            outcome,
            process,
            accounts,
            program: result.program,
            duration: None,
            reports: named,
            notes: result.notes,
            tables: result.tables,
            failed_request: result.failed_request,
            recovery: result.recovery,
        };
        if self.steps.has_room_in_front()
            && let Some(emit) = &mut self.observer.emit
        {
            emit(Event::StepEnded(Box::new(step.clone())));
        }
        self.steps.push(step);
    }

    /// Frees all live memory, checks the final state if all steps ran, and closes the device.
    pub(super) fn finish(&mut self, mut ctx: RunContext, completed: bool) {
        let mut clean = completed;
        if completed {
            ctx.rig.begin_step(self.number + 1);
            let finished = ctx.processes.finish(&mut ctx.rig, self.number + 1);
            let ended = finished
                .and_then(|()| ctx.free_everything())
                .and_then(|()| ctx.rig.finish());
            if let Err(stop) = ended {
                clean = false;
                self.stop(stop, None);
            }
        }
        self.contention = ctx.rig.contention().map(str::to_owned);
        ctx.processes
            .close(&mut ctx.rig)
            .into_iter()
            .for_each(|stop| self.stop(stop, None));
        if let Err(stop) = ctx.close()
            // After an injected failure, the main process must release everything if the device
            // still works.
            && (clean || self.faults.as_ref().is_some_and(|faults| !faults.main().is_broken()))
        {
            self.stop(stop, None);
        }
        self.check_time(None);
    }
}
