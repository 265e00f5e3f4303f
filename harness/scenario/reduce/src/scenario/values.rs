//! Simplifies values: evaluates formulas, shrinks and rounds amounts, shrinks numbers and the
//! device, and removes settings.

use harness_allocator::units::{Bytes, Nanos};
use harness_allocator::{allocator::caching::Config, device::sim::GRANULARITY};
use harness_language::expression::{Dimension, Quantity, Unit, Value, parse_constant};
use harness_language::text::exact_size;

use super::document::{Document, Node, set};
use super::search::{Search, memory};
use crate::delta::{self, Flow, SETTINGS};

/// Durations to try in place of longer ones.
const DURATIONS: [(&str, Nanos); 3] = [
    ("1us", Nanos(1_000)),
    ("1ms", Nanos(1_000_000)),
    ("1s", Nanos(1_000_000_000)),
];

struct Nothing;

impl Quantity for Nothing {
    fn dimension(&self) -> Dimension {
        Dimension::NUMBER
    }
}

impl Search<'_> {
    pub(super) fn simplify_values(&mut self) -> Flow {
        self.compute_formulas()?;
        self.halve_everything()?;
        for number in 0..self.best.values().len() {
            match self.best.values().into_iter().nth(number) {
                // The memory has its own pass.
                Some((key, _)) if ["about", "seed", "needs", "matrix"].contains(&key.as_str()) => {}
                Some((_, Node::Scalar(text))) => self.simplify(number, &text)?,
                _ => {}
            }
        }
        self.less_memory()
    }

    fn simplify(&mut self, number: usize, text: &str) -> Flow {
        if let Ok(whole) = text.parse::<u64>() {
            return delta::least(0, whole, &mut |less| {
                self.try_value(number, Node::Scalar(less.to_string()))
            })
            .map_continue(drop);
        }
        if let Ok(bytes) = Bytes::parse(text) {
            return self.simpler_size(number, bytes);
        }
        if let Ok(time) = Nanos::parse(text) {
            for (shorter, _) in DURATIONS.iter().filter(|(_, shorter)| *shorter < time) {
                if self.try_value(number, Node::Scalar((*shorter).to_owned()))? {
                    break;
                }
            }
            return Flow::Continue(());
        }
        self.fewer_settings(number, text)
    }

    /// Tries a smaller and rounder size, with the device memory changed by the same amount or
    /// unchanged.
    fn simpler_size(&mut self, number: usize, bytes: Bytes) -> Flow {
        let mut now = bytes;
        delta::simpler_size(bytes, &mut |new| {
            let candidate = self.best.with_value(number, Node::Scalar(exact_size(new)));
            let less = Bytes(now.saturating_sub(new).0 / GRANULARITY.0 * GRANULARITY.0);
            let more = Bytes(new.saturating_sub(now).0.next_multiple_of(GRANULARITY.0));
            let other = memory(&self.best)
                .map(|memory| memory.saturating_sub(less) + more)
                .filter(|memory| Some(*memory) <= self.memory_before);
            let other = other.map(|memory| with_memory(&candidate, memory));
            let is_taken = match other {
                Some(smaller) if new < now => self.accept(smaller)? || self.accept(candidate)?,
                Some(larger) => self.accept(candidate)? || self.accept(larger)?,
                None => self.accept(candidate)?,
            };
            now = if is_taken { new } else { now };
            Flow::Continue(is_taken)
        })
    }

    fn halve_everything(&mut self) -> Flow {
        while let Some(now) = memory(&self.best).filter(|memory| *memory > GRANULARITY) {
            let mut candidate = with_memory(
                &self.best,
                Bytes((now.0 / 2).next_multiple_of(GRANULARITY.0)),
            );
            candidate.visit(&mut |key, node| {
                if let Node::Scalar(text) = node
                    && !["needs", "about"].contains(&key)
                    && let (Err(_), Ok(bytes)) = (text.parse::<u64>(), Bytes::parse(text))
                    && bytes > Bytes::mib(1)
                {
                    *text = exact_size(Bytes(bytes.0 / 2));
                }
            });
            if !self.accept(candidate)? {
                break;
            }
        }
        Flow::Continue(())
    }

    /// Finds the least device memory, then a round one.
    fn less_memory(&mut self) -> Flow {
        let Some(memory) = memory(&self.best) else {
            return Flow::Continue(());
        };
        let units = delta::least(0, memory.0 / GRANULARITY.0, &mut |units| {
            let candidate = with_memory(&self.best, Bytes(units * GRANULARITY.0));
            self.accept(candidate)
        })?;
        delta::simpler_size(Bytes(units * GRANULARITY.0), &mut |new| {
            if Some(new) > self.memory_before {
                return Flow::Continue(false);
            }
            let candidate = with_memory(&self.best, new);
            self.accept(candidate)
        })
    }

    fn compute_formulas(&mut self) -> Flow {
        for (number, (_, node)) in self.best.values().into_iter().enumerate() {
            if let Node::Scalar(text) = node
                && let Some(computed) = computed(&text)
            {
                self.try_value(number, Node::Scalar(computed))?;
            }
        }
        Flow::Continue(())
    }

    fn fewer_settings(&mut self, number: usize, text: &str) -> Flow {
        let Ok(mut config) = Config::parse(text) else {
            return Flow::Continue(());
        };
        for reset in SETTINGS {
            let mut simpler = config.clone();
            reset(&mut simpler);
            if simpler != config && self.try_value(number, Node::Scalar(simpler.to_string()))? {
                config = simpler;
            }
        }
        Flow::Continue(())
    }
}

fn with_memory(document: &Document, new: Bytes) -> Document {
    let mut changed = document.clone();
    if memory(document).is_some()
        && let Some((_, Node::Map(needs))) = changed.keys.iter_mut().find(|(key, _)| key == "needs")
    {
        set(needs, "memory", Node::Scalar(exact_size(new)));
    }
    changed
}

/// The result of a formula, or the number in the brackets of a buffer's name. `None` if it depends
/// on the run.
fn computed(text: &str) -> Option<String> {
    if let Some((name, index)) = text.strip_suffix(']').and_then(|text| text.split_once('[')) {
        return Some(format!("{name}[{}]", computed(index)?));
    }
    if !text.contains(['+', '-', '*', '/', '(']) {
        return None;
    }
    let value = parse_constant::<Nothing>(text, &|_| Err((String::new(), String::new()))).ok()?;
    written(value)
}

/// A value in scenario syntax, if it is a whole number of a unit.
pub(super) fn written(value: Value) -> Option<String> {
    let whole = value
        .number
        .is_integer()
        .then(|| value.number.to_integer())?;
    let amount = u64::try_from(whole);
    match [Unit::Count, Unit::Bytes, Unit::Time]
        .into_iter()
        .find(|&unit| Dimension::from(unit) == value.dimension)?
    {
        Unit::Count => Some(whole.to_string()),
        Unit::Bytes => amount.ok().map(|bytes| exact_size(Bytes(bytes))),
        Unit::Time => amount.ok().map(|nanos| format!("{nanos}ns")),
    }
}

/// The identifiers of a text with their byte offsets. Skips words after a point or a digit.
pub(super) fn words(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '.';
    let starts = text
        .char_indices()
        .filter(move |&(at, c)| is_part(c) && !text[..at].ends_with(is_part))
        .map(|(at, _)| at);
    starts.filter_map(move |at| {
        let rest = &text[at..];
        let end = rest.find(|c: char| !is_part(c)).unwrap_or(rest.len());
        let word = &rest[..end];
        word.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
            .then_some((at, word.split('.').next().unwrap_or(word)))
    })
}

#[cfg(test)]
mod tests;
