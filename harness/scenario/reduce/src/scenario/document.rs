//! A scenario file as an editable tree: [`Document`]. The language's checker interprets it.

use std::{collections::BTreeSet, path::Path};

use harness_language::located::{Located, Tree};
use harness_language::{error::FileError, yaml};
use harness_scenario::SCENARIO;

use super::comments::Comments;

/// Keys whose lists contain steps.
pub(super) const STEPS: &str = "steps";
pub(super) const MEANWHILE: &str = "meanwhile";

/// A scenario file with its keys in order.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Document {
    pub(super) keys: Map,
}

pub(super) type Map = Vec<(String, Node)>;

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Node {
    Nothing,
    Scalar(String),
    List(Vec<Node>),
    Map(Map),
    Steps(Vec<StepNode>),
}

/// A step with its comments. A step without fields is a single key without a value.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct StepNode {
    pub(super) above: Vec<String>,
    pub(super) behind: Option<String>,
    /// The step's own key, then its other keys.
    pub(super) keys: Map,
}

pub(super) fn value<'a>(map: &'a Map, key: &str) -> Option<&'a Node> {
    map.iter()
        .find(|(name, _)| name == key)
        .map(|(_, node)| node)
}

pub(super) fn set(map: &mut Map, key: &str, node: Node) {
    match map.iter_mut().find(|(name, _)| name == key) {
        Some((_, there)) => *there = node,
        None => map.push((key.to_owned(), node)),
    }
}

impl Document {
    pub(super) fn parse(source: &str, path: &Path) -> Result<Self, FileError> {
        let tree: Located<Tree> = yaml::parse(source, path, &SCENARIO)
            .map_err(|problem| FileError::text(problem, path, source))?;
        let mut comments = Comments::of(source);
        let keys = match tree.value {
            Tree::Map(entries) => map(entries, &mut comments),
            _ => Map::new(),
        };
        Ok(Self { keys })
    }

    pub(super) fn value(&self, key: &str) -> Option<&Node> {
        value(&self.keys, key)
    }

    pub(super) fn set(&mut self, key: &str, node: Node) {
        set(&mut self.keys, key, node);
    }

    pub(super) fn remove(&mut self, key: &str) {
        self.keys.retain(|(name, _)| name != key);
    }

    /// All steps, including nested ones, in file order. The index in this list is the step's
    /// number.
    pub(super) fn steps(&self) -> Vec<&StepNode> {
        let mut all = Vec::new();
        self.keys
            .iter()
            .for_each(|(_, node)| steps_of(node, &mut all));
        all
    }

    /// A copy in which the keys of one step are changed. `None` if `change` returns `None`.
    pub(super) fn with_step<T>(
        &self,
        number: usize,
        mut change: impl FnMut(&mut Map) -> Option<T>,
    ) -> Option<Self> {
        let mut done = None;
        let changed = self.replaced(&mut |other, mut step| {
            if other == number {
                done = change(&mut step.keys);
            }
            vec![step]
        });
        done.map(|_| changed)
    }

    /// A copy without the steps of some numbers and their nested steps. Blocks that become empty
    /// are removed.
    pub(super) fn without(&self, gone: &BTreeSet<usize>) -> Self {
        self.replaced(&mut |number, step| {
            if gone.contains(&number) {
                Vec::new()
            } else {
                vec![step]
            }
        })
    }

    /// A copy in which `replace` substitutes steps for each step. Nested steps are replaced before
    /// their block.
    pub(super) fn replaced(&self, by: &mut dyn FnMut(usize, StepNode) -> Vec<StepNode>) -> Self {
        let mut next = 0;
        Self {
            keys: replaced_in(&self.keys, &mut next, by),
        }
    }

    /// A copy with one value replaced, by its number.
    pub(super) fn with_value(&self, number: usize, value: Node) -> Self {
        let (mut next, mut value) = (0, Some(value));
        let mut changed = self.clone();
        changed.visit(&mut |_, node| {
            // The numbers after this one have changed, so the search stops.
            if next == number
                && let Some(value) = value.take()
            {
                *node = value;
            }
            next += 1;
        });
        changed
    }

    /// Visits every value that is not a list of steps, and the values inside it, with the file's
    /// key that contains the value.
    pub(super) fn visit(&mut self, act: &mut dyn FnMut(&str, &mut Node)) {
        for (key, node) in &mut self.keys {
            visit(node, &mut |node| act(key, node));
        }
    }

    /// All values in the order of [`Self::visit`]. The index in this list is the value's number.
    pub(super) fn values(&self) -> Vec<(String, Node)> {
        let mut all = Vec::new();
        self.clone()
            .visit(&mut |key, node| all.push((key.to_owned(), node.clone())));
        all
    }
}

fn map(entries: Vec<(Located<String>, Located<Tree>)>, comments: &mut Comments) -> Map {
    entries
        .into_iter()
        .map(|(key, tree)| (key.value.clone(), node(&key.value, tree, comments)))
        .collect()
}

fn node(key: &str, tree: Located<Tree>, comments: &mut Comments) -> Node {
    match tree.value {
        Tree::Nothing => Node::Nothing,
        Tree::One(text) => Node::Scalar(text),
        Tree::Many(all) if [STEPS, MEANWHILE].contains(&key) => {
            Node::Steps(all.into_iter().map(|one| step(one, comments)).collect())
        }
        Tree::Many(all) => Node::List(all.into_iter().map(|one| node("", one, comments)).collect()),
        Tree::Map(entries) => Node::Map(map(entries, comments)),
    }
}

fn step(tree: Located<Tree>, comments: &mut Comments) -> StepNode {
    let (above, behind) = comments.take(tree.at.line);
    let keys = match tree.value {
        Tree::One(name) => vec![(name, Node::Nothing)],
        Tree::Map(entries) => map(entries, comments),
        Tree::Nothing | Tree::Many(_) => Map::new(),
    };
    StepNode {
        above,
        behind,
        keys,
    }
}

fn steps_of<'a>(node: &'a Node, all: &mut Vec<&'a StepNode>) {
    let Node::Steps(steps) = node else { return };
    for step in steps {
        all.push(step);
        step.keys.iter().for_each(|(_, node)| steps_of(node, all));
    }
}

fn replaced_in(
    keys: &Map,
    next: &mut usize,
    by: &mut dyn FnMut(usize, StepNode) -> Vec<StepNode>,
) -> Map {
    let mut of = |node: &Node| match node {
        Node::Steps(steps) => {
            let mut all = Vec::new();
            for step in steps {
                let number = *next;
                *next += 1;
                let had_steps = value(&step.keys, STEPS).is_some();
                let mut step = StepNode {
                    keys: replaced_in(&step.keys, next, by),
                    ..step.clone()
                };
                step.keys
                    .retain(|(_, node)| !matches!(node, Node::Steps(steps) if steps.is_empty()));
                if !had_steps || value(&step.keys, STEPS).is_some() {
                    all.extend(by(number, step));
                }
            }
            Node::Steps(all)
        }
        other => other.clone(),
    };
    keys.iter()
        .map(|(key, node)| (key.clone(), of(node)))
        .collect()
}

fn visit(node: &mut Node, act: &mut dyn FnMut(&mut Node)) {
    if !matches!(node, Node::Steps(_)) {
        act(node);
    }
    match node {
        Node::Nothing | Node::Scalar(_) => {}
        Node::List(all) => all.iter_mut().for_each(|one| visit(one, act)),
        Node::Map(map) => map.iter_mut().for_each(|(_, one)| visit(one, act)),
        Node::Steps(steps) => steps
            .iter_mut()
            .flat_map(|step| &mut step.keys)
            .for_each(|(_, one)| visit(one, act)),
    }
}
