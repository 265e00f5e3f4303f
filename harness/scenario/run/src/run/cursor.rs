//! A position in a list of steps.

use harness_scenario::steps::{Action, Step, loops::Loop};
use harness_scenario::{Number, ProcessName, ProgramName, VariableName};

#[derive(Debug)]
pub(super) enum Next<'s> {
    Do(&'s Step),
    /// A step with inner steps begins.
    Enter(&'s Step),
    /// A step with inner steps has ended.
    Leave {
        step: &'s Step,
        iterations: u64,
        ran_out: bool,
    },
    /// An iteration of a loop with a leak check has ended, including the last one.
    Iterated(&'s Step),
}

#[derive(Debug)]
pub(super) struct Cursor<'s> {
    /// For `meanwhile` steps: the enclosing blocks and their iterations when the `meanwhile` steps
    /// began.
    around: Vec<Frame<'s>>,
    frames: Vec<Frame<'s>>,
    /// Blocks that an OOM ended, the innermost first.
    left: Vec<Next<'s>>,
}

#[derive(Clone, Copy, Debug)]
struct Frame<'s> {
    /// The block that contains the steps; `None` for the outermost ones.
    block: Option<&'s Step>,
    steps: &'s [Step],
    next: usize,
    /// The completed iterations of a loop.
    iterations: u64,
    /// True if [`Next::Iterated`] was returned for the current iteration.
    is_reported: bool,
}

impl<'s> Frame<'s> {
    fn as_loop(&self) -> Option<&'s Loop> {
        match &self.block?.action {
            Action::For(steps) | Action::Repeat(steps) => Some(steps),
            _ => None,
        }
    }
}

impl<'s> Cursor<'s> {
    pub(super) fn new(steps: &'s [Step]) -> Self {
        Self {
            around: Vec::new(),
            frames: vec![Frame {
                block: None,
                steps,
                next: 0,
                iterations: 0,
                is_reported: false,
            }],
            left: Vec::new(),
        }
    }

    /// A cursor for the `meanwhile` steps of the step that [`Self::advance`] returned last.
    pub(super) fn meanwhile(&self, step: &'s Step) -> Self {
        let is_around =
            |frame: &&Frame<'_>| !frame.block.is_some_and(|block| std::ptr::eq(block, step));
        Self {
            around: self.blocks().filter(is_around).copied().collect(),
            ..Self::new(&step.meanwhile)
        }
    }

    /// The blocks around the next step, the outermost first.
    fn blocks(&self) -> impl DoubleEndedIterator<Item = &Frame<'s>> {
        self.around.iter().chain(&self.frames)
    }

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
            self.frames.push(Frame {
                block: Some(step),
                steps: step.action.steps(),
                next: 0,
                iterations: 0,
                is_reported: false,
            });
            return Some(Next::Enter(step));
        }
        let watched = frame
            .block
            .filter(|step| step.action.leak_check().is_some() && !frame.is_reported);
        frame.is_reported = watched.is_some();
        if let Some(step) = watched {
            return Some(Next::Iterated(step));
        }
        frame.iterations += 1;
        if frame.iterations < frame.as_loop().map_or(1, |steps| steps.rounds.count()) {
            frame.next = 0;
            return self.advance();
        }
        let iterations = frame.iterations;
        let step = self.frames.pop()?.block?;
        Some(Next::Leave {
            step,
            iterations,
            ran_out: false,
        })
    }

    /// Handles an OOM that ends a loop: leaves all blocks up to and including the innermost loop
    /// with `until_oom`.
    pub(super) fn leave_loop(&mut self) {
        while let Some(frame) = self.frames.pop() {
            let ran_out = frame.as_loop().is_some_and(|steps| steps.until_oom);
            let iterations = frame.iterations;
            self.left.extend(frame.block.map(|step| Next::Leave {
                step,
                iterations,
                ran_out,
            }));
            if ran_out {
                return;
            }
        }
    }

    /// The blocks around this step, the innermost first.
    pub(super) fn around(&self, step: &'s Step) -> impl Iterator<Item = &'s Step> {
        self.blocks()
            .rev()
            .filter_map(|frame| frame.block)
            .filter(move |block| !std::ptr::eq(*block, step))
    }

    /// The variables of the loops around the next step, the outermost first.
    pub(super) fn variables(&self) -> impl Iterator<Item = (&'s VariableName, Number)> {
        self.blocks()
            .filter_map(|frame| frame.as_loop()?.rounds.value(frame.iterations))
    }

    /// Describes the process of the next step and the iterations of the loops around it, the
    /// outermost first: `i = 3`, or `iteration 3` counted from 1.
    pub(super) fn iteration(&self) -> Option<String> {
        let words: Vec<String> = self
            .blocks()
            .filter_map(|frame| match &frame.block?.action {
                Action::Process(process) => Some(format!("process {}", process.name)),
                Action::For(steps) | Action::Repeat(steps) => {
                    Some(match steps.rounds.value(frame.iterations) {
                        Some((variable, value)) => {
                            format!("{variable} = {}", steps.rounds.in_words(value))
                        }
                        None => format!("iteration {}", frame.iterations + 1),
                    })
                }
                _ => None,
            })
            .collect();
        (!words.is_empty()).then(|| words.join(", "))
    }

    /// The process of the next step; `None` for the main one.
    pub(super) fn process(&self) -> Option<&'s ProcessName> {
        self.blocks()
            .rev()
            .find_map(|frame| match &frame.block?.action {
                Action::Process(process) => Some(&process.name),
                _ => None,
            })
    }

    /// The loops around the next step with their completed iterations, the outermost first.
    pub(super) fn loops(&self) -> impl Iterator<Item = (&'s Step, u64)> {
        self.blocks().filter_map(|frame| {
            frame
                .as_loop()
                .and(frame.block)
                .map(|block| (block, frame.iterations))
        })
    }

    /// The program of the next step; `None` for the main one.
    pub(super) fn program(&self) -> Option<&'s ProgramName> {
        self.blocks()
            .rev()
            .find_map(|frame| match &frame.block?.action {
                Action::Program(program) => Some(&program.name),
                _ => None,
            })
    }
}
