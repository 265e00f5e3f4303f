//! Generates smaller scenarios: [`Search::start`], then [`Search::reduce`]. Each pass tries its
//! changes with [`Search::accept`].

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use harness_scenario::Scenario;

use super::document::{Document, Map, Node, StepNode, value};
use super::{search::Search, values::words};
use crate::delta::{self, Flow};

const REQUIRED: [&str; 3] = ["about", "needs", "steps"];

/// Maximum number of rounds. Two or three are usual; later ones only exchange one round size for
/// another.
const MOST_ROUNDS: usize = 16;

impl Search<'_> {
    /// Keeps one configuration if one is enough, and its part of values that differ by
    /// configuration or device kind.
    pub(super) fn start(&mut self, scenario: &Scenario, arm: &str) -> Flow {
        let arms: Vec<String> = scenario
            .allocators
            .iter()
            .map(ToString::to_string)
            .collect();
        let mut candidate = self.best.clone();
        // This configuration ran, so skips concern others.
        candidate.remove("skip");
        candidate.visit(&mut |_, node| *node = of_arm(node, arm, &arms));
        if let (Some(Node::List(listed)), Some(place)) = (
            candidate.value("allocators"),
            arms.iter().position(|name| name == arm),
        ) {
            let only = listed.get(place).cloned().into_iter().collect();
            candidate.set("allocators", Node::List(only));
        }
        self.accept(candidate).map_continue(drop)
    }

    /// Repeats all passes until none makes progress.
    pub(super) fn reduce(&mut self) -> Flow {
        for _ in 0..MOST_ROUNDS {
            let before = self.best.clone();
            self.leave_out_names()?;
            self.leave_out_steps()?;
            self.shorten_loops()?;
            self.unfold_blocks()?;
            self.leave_out_fields()?;
            self.leave_out_entries()?;
            self.name_no_parameters()?;
            self.make_streams_one()?;
            self.simplify_values()?;
            if self.best == before {
                break;
            }
        }
        Flow::Continue(())
    }

    /// Removes all steps that share a name: a buffer's `alloc` together with its `free` and its
    /// uses.
    fn leave_out_names(&mut self) -> Flow {
        let mut names = names(&self.best);
        delta::leave_out(names.len(), &mut |range| {
            let gone = names[range]
                .iter()
                .flat_map(|(_, steps)| steps.iter().copied())
                .collect();
            if !self.accept_without(&gone)? {
                return Flow::Continue(None);
            }
            names = self::names(&self.best);
            Flow::Continue(Some(names.len()))
        })
    }

    pub(super) fn leave_out_steps(&mut self) -> Flow {
        delta::leave_out(self.best.steps().len(), &mut |range: Range<usize>| {
            let is_taken = self.accept_without(&range.collect())?;
            Flow::Continue(is_taken.then(|| self.best.steps().len()))
        })
    }

    fn leave_out_fields(&mut self) -> Flow {
        let optional: Vec<String> = self
            .best
            .keys
            .iter()
            .map(|(key, _)| key.clone())
            .filter(|key| !REQUIRED.contains(&key.as_str()))
            .collect();
        for key in optional {
            let mut candidate = self.best.clone();
            candidate.remove(&key);
            self.accept(candidate)?;
        }
        for step in 0..self.best.steps().len() {
            for place in (1..self.best.steps()[step].keys.len()).rev() {
                if let Some(candidate) = self.best.with_step(step, |keys| Some(keys.remove(place)))
                {
                    self.accept(candidate)?;
                }
            }
        }
        let is_map = |node: &Node| matches!(node, Node::Map(_));
        self.leave_out_of(&is_map)
    }

    /// Removes list entries, and replaces a list or map by one of its values.
    fn leave_out_entries(&mut self) -> Flow {
        self.leave_out_of(&|node| matches!(node, Node::List(_)))?;
        for number in 0..self.best.values().len() {
            for inner in self
                .nth(number)
                .map_or_else(Vec::new, |node| taken_out(&node))
            {
                self.try_value(number, inner)?;
            }
        }
        Flow::Continue(())
    }

    fn leave_out_of(&mut self, is_kind: &dyn Fn(&Node) -> bool) -> Flow {
        for number in (0..self.best.values().len()).rev() {
            let Some(node) = self.nth(number).filter(is_kind) else {
                continue;
            };
            delta::leave_out(parts(&node), &mut |range| {
                let now = self.nth(number).unwrap_or(Node::Nothing);
                let is_taken = self.try_value(number, without(now, &range))?;
                Flow::Continue(is_taken.then(|| self.nth(number).as_ref().map_or(0, parts)))
            })?;
        }
        Flow::Continue(())
    }

    fn name_no_parameters(&mut self) -> Flow {
        let Some(Node::Map(parameters)) = self.best.value("matrix").cloned() else {
            return Flow::Continue(());
        };
        for (name, values) in &parameters {
            let Node::List(values) = values else { continue };
            if let [Node::Scalar(value)] = values.as_slice() {
                let mut candidate = self.best.clone();
                candidate.visit(&mut |_, node| replace_word(node, name, value));
                let rest: Map = parameters
                    .iter()
                    .filter(|(other, _)| other != name)
                    .cloned()
                    .collect();
                if rest.is_empty() {
                    candidate.remove("matrix")
                } else {
                    candidate.set("matrix", Node::Map(rest))
                }
                self.accept(candidate)?;
            }
        }
        Flow::Continue(())
    }

    /// Moves the work of each stream to the default stream.
    fn make_streams_one(&mut self) -> Flow {
        let Some(Node::List(streams)) = self.best.value("streams").cloned() else {
            return Flow::Continue(());
        };
        for stream in &streams {
            let mut candidate = self.best.clone();
            let rest: Vec<Node> = streams
                .iter()
                .filter(|other| *other != stream)
                .cloned()
                .collect();
            if rest.is_empty() {
                candidate.remove("streams")
            } else {
                candidate.set("streams", Node::List(rest))
            }
            candidate.visit(&mut |key, node| {
                if node == stream && key != "streams" {
                    *node = Node::Scalar("default".to_owned());
                }
            });
            self.accept(candidate)?;
        }
        Flow::Continue(())
    }

    fn nth(&self, number: usize) -> Option<Node> {
        self.best
            .values()
            .into_iter()
            .nth(number)
            .map(|(_, node)| node)
    }

    pub(super) fn try_value(&mut self, number: usize, value: Node) -> Flow<bool> {
        self.accept(self.best.with_value(number, value))
    }
}

/// Selects this configuration on the simulated device from a map of configurations or device kinds.
/// Other values stay unchanged.
fn of_arm(node: &Node, arm: &str, arms: &[String]) -> Node {
    let Node::Map(map) = node else {
        return node.clone();
    };
    let has_only =
        |known: &dyn Fn(&str) -> bool| !map.is_empty() && map.iter().all(|(key, _)| known(key));
    let chosen = match () {
        () if has_only(&|key| ["simulated", "gpu"].contains(&key)) => value(map, "simulated"),
        () if has_only(&|key| key == "others" || arms.iter().any(|arm| arm == key)) => {
            value(map, arm).or_else(|| value(map, "others"))
        }
        () => None,
    };
    chosen.map_or_else(|| node.clone(), |chosen| of_arm(chosen, arm, arms))
}

/// Names that several steps share, each with the numbers of these steps.
fn names(document: &Document) -> Vec<(String, BTreeSet<usize>)> {
    let mut steps: BTreeMap<String, BTreeSet<usize>> = BTreeMap::new();
    for (number, step) in document.steps().into_iter().enumerate() {
        for word in words_of(step) {
            steps.entry(word).or_default().insert(number);
        }
    }
    steps
        .into_iter()
        .filter(|(_, steps)| steps.len() > 1)
        .collect()
}

/// The words in a step's values, without nested steps.
fn words_of(step: &StepNode) -> BTreeSet<String> {
    fn of(node: &Node, all: &mut BTreeSet<String>) {
        match node {
            Node::Scalar(text) => all.extend(words(text).map(|(_, word)| word.to_owned())),
            Node::List(list) => list.iter().for_each(|one| of(one, all)),
            Node::Map(map) => map.iter().for_each(|(_, node)| of(node, all)),
            Node::Nothing | Node::Steps(_) => {}
        }
    }
    let mut all = BTreeSet::new();
    step.keys.iter().for_each(|(_, node)| of(node, &mut all));
    all
}

/// Replaces a name by a value wherever it is a complete word.
pub(super) fn replace_word(node: &mut Node, name: &str, value: &str) {
    if let Node::Scalar(text) = node {
        let places: Vec<usize> = words(text)
            .filter(|(_, word)| *word == name)
            .map(|(at, _)| at)
            .collect();
        for at in places.into_iter().rev() {
            text.replace_range(at..at + name.len(), value);
        }
    }
}

const fn parts(node: &Node) -> usize {
    match node {
        Node::List(all) => all.len(),
        Node::Map(map) => map.len(),
        Node::Nothing | Node::Scalar(_) | Node::Steps(_) => 0,
    }
}

fn without(node: Node, gone: &Range<usize>) -> Node {
    match node {
        Node::List(mut all) => {
            all.drain(gone.clone());
            Node::List(all)
        }
        Node::Map(mut map) => {
            map.drain(gone.clone());
            Node::Map(map)
        }
        other => other,
    }
}

/// Possible replacements of a list or map: its only entry, each value of a map, or the name of a
/// map without settings.
fn taken_out(node: &Node) -> Vec<Node> {
    match node {
        Node::List(all) if all.len() == 1 => all.clone(),
        Node::Map(map) => match map.as_slice() {
            [(name, Node::Map(inner))] if inner.is_empty() => vec![Node::Scalar(name.clone())],
            map => map.iter().map(|(_, node)| node.clone()).collect(),
        },
        _ => Vec::new(),
    }
}
