//! Where a list of steps stands while it is done: loops are unrolled one iteration at a time, so that memory does not grow with their length.

use harness_scenario::Number;
use harness_scenario::steps::{Action, Step};
use harness_scenario::{ProcessName, ProgramName, VariableName};

/// What comes next.
#[derive(Debug)]
pub(super) enum Next<'s> {
    /// A step without steps inside it.
    Do(&'s Step),
    /// A step with steps inside it begins.
    Enter(&'s Step),
    /// It has ended.
    Leave {
        step: &'s Step,
        /// How many iterations of it are complete.
        iterations: u64,
        /// Whether a request that ran out of memory ended it.
        ran_out: bool,
    },
    /// One of several iterations of it has ended, where somebody looks at that: the last one too.
    Iterated(&'s Step),
}

/// Steps, of which some may have been done.
#[derive(Debug)]
pub(super) struct Cursor<'s> {
    /// Of steps that are done meanwhile: the blocks around them, as they stood when they began. Their loops go on when they are done.
    around: Vec<Frame<'s>>,
    frames: Vec<Frame<'s>>,
    /// Blocks that were left early, the innermost first.
    left: Vec<Next<'s>>,
}

/// Steps that are being done.
#[derive(Clone, Copy, Debug)]
struct Frame<'s> {
    /// The step that they are inside of; `None` for the outermost ones.
    block: Option<&'s Step>,
    steps: &'s [Step],
    /// The one that comes next.
    next: usize,
    /// Of a loop: complete iterations.
    iterations: u64,
    /// Whether the end of the present iteration has been told.
    is_told: bool,
}

impl<'s> Frame<'s> {
    /// The loop, where the end of its iteration is to be told and has not been yet.
    fn ends_watched_iteration(&mut self) -> Option<&'s Step> {
        let step = self.block.filter(|step| step.action.leak_check().is_some() && !self.is_told)?;
        self.is_told = true;
        Some(step)
    }

    /// How often the steps are done in all.
    fn rounds(&self) -> u64 {
        match self.block.map(|block| &block.action) {
            Some(Action::For(steps) | Action::Repeat(steps)) => steps.rounds.count(),
            _ => 1,
        }
    }

    fn is_until_oom(&self) -> bool {
        matches!(self.block.map(|block| &block.action), Some(Action::For(steps) | Action::Repeat(steps)) if steps.until_oom)
    }
}

impl<'s> Cursor<'s> {
    /// Before the first of these steps.
    pub(super) fn new(steps: &'s [Step]) -> Self {
        Self { around: Vec::new(), frames: vec![Frame { block: None, steps, next: 0, iterations: 0, is_told: false }], left: Vec::new() }
    }

    /// Before the first of the steps that are done while the step goes on that came last.
    pub(super) fn meanwhile(&self, step: &'s Step) -> Self {
        let is_around = |frame: &&Frame<'_>| !frame.block.is_some_and(|block| std::ptr::eq(block, step));
        Self { around: self.blocks().filter(is_around).copied().collect(), ..Self::new(&step.meanwhile) }
    }

    /// What stands around the next step, the outermost first.
    fn blocks(&self) -> impl DoubleEndedIterator<Item = &Frame<'s>> {
        self.around.iter().chain(&self.frames)
    }

    /// Goes on to what comes next; `None` behind the last step.
    pub(super) fn advance(&mut self) -> Option<Next<'s>> {
        if !self.left.is_empty() {
            return Some(self.left.remove(0));
        }
        let frame = self.frames.last_mut()?;
        if let Some(step) = frame.steps.get(frame.next) {
            frame.next += 1;
            if !step.action.is_block() {
                return Some(Next::Do(step));
            }
            self.frames.push(Frame { block: Some(step), steps: step.action.steps(), next: 0, iterations: 0, is_told: false });
            return Some(Next::Enter(step));
        }
        if let Some(step) = frame.ends_watched_iteration() {
            return Some(Next::Iterated(step));
        }
        frame.is_told = false;
        frame.iterations += 1;
        if frame.iterations < frame.rounds() {
            frame.next = 0;
            return self.advance();
        }
        let iterations = frame.iterations;
        let step = self.frames.pop()?.block?;
        Some(Next::Leave { step, iterations, ran_out: false })
    }

    /// A request ran out of memory: leaves everything up to the innermost loop that this ends.
    pub(super) fn leave_loop(&mut self) {
        while let Some(frame) = self.frames.pop() {
            let ran_out = frame.is_until_oom();
            let iterations = frame.iterations;
            self.left.extend(frame.block.map(|step| Next::Leave { step, iterations, ran_out }));
            if ran_out {
                return;
            }
        }
    }

    /// The steps that stand around this one, the innermost first.
    pub(super) fn around(&self, step: &'s Step) -> impl Iterator<Item = &'s Step> {
        self.blocks().rev().filter_map(|frame| frame.block).filter(move |block| !std::ptr::eq(*block, step))
    }

    /// The variables of all loops around the next step, the outermost first.
    pub(super) fn variables(&self) -> impl Iterator<Item = (&'s VariableName, Number)> {
        self.blocks().filter_map(|frame| match &frame.block?.action {
            Action::For(steps) | Action::Repeat(steps) => steps.rounds.value(frame.iterations),
            _ => None,
        })
    }

    /// The process of the next step and the iterations of all loops around it, the outermost first, in words: `i = 3`, or `iteration 3` counted from 1.
    pub(super) fn iteration(&self) -> Option<String> {
        let words: Vec<String> = self
            .blocks()
            .filter_map(|frame| match &frame.block?.action {
                Action::Process(process) => Some(format!("process {}", process.process)),
                Action::For(steps) | Action::Repeat(steps) => Some(match steps.rounds.value(frame.iterations) {
                    Some((variable, value)) => format!("{variable} = {}", steps.rounds.in_words(value)),
                    None => format!("iteration {}", frame.iterations + 1),
                }),
                _ => None,
            })
            .collect();
        (!words.is_empty()).then(|| words.join(", "))
    }

    /// The process that the next step is of; `None` for the main one.
    pub(super) fn process(&self) -> Option<&'s ProcessName> {
        self.blocks().rev().find_map(|frame| match &frame.block?.action {
            Action::Process(process) => Some(&process.process),
            _ => None,
        })
    }

    /// The loops around the next step with their complete iterations, the outermost first.
    pub(super) fn loops(&self) -> impl Iterator<Item = (&'s Step, u64)> {
        self.blocks().filter_map(|frame| {
            let block = frame.block?;
            matches!(block.action, Action::For(_) | Action::Repeat(_)).then_some((block, frame.iterations))
        })
    }

    /// The program that the next step is of; `None` for the main one.
    pub(super) fn program(&self) -> Option<&'s ProgramName> {
        self.blocks().rev().find_map(|frame| match &frame.block?.action {
            Action::Program(program) => Some(&program.program),
            _ => None,
        })
    }
}
