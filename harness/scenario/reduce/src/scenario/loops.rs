use harness_language::expression::{Dimension, Value};
use harness_scenario::Step;
use harness_scenario::steps::Action;
use harness_scenario::steps::loops::{Loop, LoopRounds, Values};

use super::document::{Document, MEANWHILE, Node, STEPS, StepNode, value};
use super::{passes::replace_word, search::Search, values::written};
use crate::delta::{self, Flow};

/// A loop is unrolled only if that gives at most this many steps.
const MOST_WRITTEN_OUT: usize = 64;

impl Search<'_> {
    /// Shortens each loop: first from the end, then from the start.
    pub(super) fn shorten_loops(&mut self) -> Flow {
        for number in 0..self.best.steps().len() {
            let Some(found) = self.loop_at(number) else {
                continue;
            };
            let most = found.rounds.count();
            let last = delta::least(0, most, &mut |last| {
                self.try_rounds(number, &found, 0, last)
            })?;
            delta::least(0, last, &mut |kept| {
                self.try_rounds(number, &found, last - kept, last)
            })?;
        }
        Flow::Continue(())
    }

    /// Tries a range of a loop's iterations, counted from 0. The end is exclusive.
    fn try_rounds(&mut self, number: usize, of: &Loop, from: u64, to: u64) -> Flow<bool> {
        match with_rounds(&self.best, number, of, from, to) {
            Some(candidate) => self.accept(candidate),
            None => Flow::Continue(false),
        }
    }

    /// Replaces a block by its steps. A loop is unrolled if the result has fewer steps in the end.
    pub(super) fn unfold_blocks(&mut self) -> Flow {
        let mut number = self.best.steps().len();
        while number > 0 {
            number -= 1;
            if number >= self.best.steps().len() {
                continue;
            }
            let found = self.loop_at(number);
            let Some(unfolded) = unfolded(&self.best, number, found.as_ref()) else {
                continue;
            };
            let (before, most) = (
                (self.best.clone(), self.most_steps),
                self.most_written_out(),
            );
            if self.accept(unfolded)? && self.best.steps().len() > most {
                // Unrolling only pays if some steps are not needed.
                let done = self.leave_out_steps();
                if self.best.steps().len() > most {
                    (self.best, self.most_steps) = before;
                }
                done?;
            }
        }
        Flow::Continue(())
    }

    fn loop_at(&self, number: usize) -> Option<Loop> {
        let (written, scenario) = self.best.checked(self.path);
        let scenario = scenario.ok()?;
        let line = *written.lines.get(number)?;
        let step = step_at(&scenario.steps, line)?;
        match &step.action {
            Action::For(found) | Action::Repeat(found) => Some(found.clone()),
            _ => None,
        }
    }
}

fn step_at(steps: &[Step], line: u32) -> Option<&Step> {
    steps.iter().find_map(|step| {
        if step.position.line == line {
            return Some(step);
        }
        step_at(step.action.steps(), line).or_else(|| step_at(&step.meanwhile, line))
    })
}

/// The value of a loop's variable in scenario syntax. `None` without a variable, or if the value
/// has no syntax.
fn value_in(of: &Loop, iteration: u64) -> Option<String> {
    match (&of.rounds, of.rounds.value(iteration)) {
        (LoopRounds::Over { unit, .. }, Some((_, number))) => written(Value {
            number,
            dimension: Dimension::from(*unit),
        }),
        _ => None,
    }
}

/// A copy with only the iterations `from..to` of a loop.
fn with_rounds(
    document: &Document,
    number: usize,
    of: &Loop,
    from: u64,
    to: u64,
) -> Option<Document> {
    document.with_step(number, |keys| {
        let (key, rounds) = keys.first_mut()?;
        match (rounds, &of.rounds) {
            (
                Node::Map(variables),
                LoopRounds::Over {
                    values: Values::List(_),
                    ..
                },
            ) => {
                let (_, Node::List(all)) = variables.first_mut()? else {
                    return None;
                };
                *all = all.get(from as usize..to as usize)?.to_vec();
            }
            (Node::Map(variables), LoopRounds::Over { .. }) => {
                let (_, Node::Scalar(range)) = variables.first_mut()? else {
                    return None;
                };
                let by = range
                    .split_once(" by ")
                    .map(|(_, by)| format!(" by {by}"))
                    .unwrap_or_default();
                *range = format!(
                    "{}..{}{by}",
                    value_in(of, from)?,
                    value_in(of, to.checked_sub(1)?)?
                );
            }
            (Node::Scalar(times), LoopRounds::Times(_))
                if key == "repeat" && times.parse::<u64>().is_ok() =>
            {
                *times = (to - from).to_string()
            }
            _ => return None,
        }
        Some(())
    })
}

/// A copy with a block replaced by its steps. `None` if the step is not a block or would give too
/// many steps.
fn unfolded(document: &Document, number: usize, of: Option<&Loop>) -> Option<Document> {
    let steps = document.steps();
    let block = (*steps.get(number)?).clone();
    let Some(Node::Steps(body)) = value(&block.keys, STEPS).cloned() else {
        return None;
    };
    if value(&block.keys, MEANWHILE).is_some() {
        return None;
    }
    let rounds = match of {
        // Only a run shows the number of repetitions.
        Some(of) if of.until_oom || of.rounds.count() > MOST_WRITTEN_OUT as u64 => return None,
        Some(of) => (0..of.rounds.count())
            .map(|iteration| value_in(of, iteration))
            .collect(),
        None => vec![None],
    };
    if rounds.len() * body.len() > MOST_WRITTEN_OUT {
        return None;
    }
    let variable = match block.keys.first() {
        Some((_, Node::Map(variables))) => variables.first().map(|(name, _)| name.clone()),
        _ => None,
    };
    let mut all = Vec::new();
    for (iteration, text) in rounds.iter().enumerate() {
        let mut once = Document {
            keys: vec![(STEPS.to_owned(), Node::Steps(body.clone()))],
        };
        if let (Some(variable), Some(_)) = (&variable, of) {
            let text = text.as_ref()?;
            once.visit(&mut |_, node| replace_word(node, variable, text));
        }
        let Some(Node::Steps(steps)) = once.keys.pop().map(|(_, node)| node) else {
            return None;
        };
        // Only the first of several copies keeps its comments.
        let bare = |step: StepNode| {
            if iteration == 0 {
                step
            } else {
                StepNode {
                    above: Vec::new(),
                    behind: None,
                    ..step
                }
            }
        };
        all.extend(steps.into_iter().map(bare));
    }
    if let Some(first) = all.first_mut() {
        first.above = [
            block.above.clone(),
            block.behind.clone().into_iter().collect(),
            std::mem::take(&mut first.above),
        ]
        .concat();
    }
    let replaced = document.replaced(&mut |other, step| {
        if other == number {
            all.clone()
        } else {
            vec![step]
        }
    });
    Some(replaced)
}
