//! Writes a [`Document`] as YAML. A YAML library cannot keep comments next to their steps, or write
//! one step per line as the catalogue does. This writer costs 180 lines and keeps reduced scenarios
//! readable.

use std::path::Path;

use harness_language::error::FileError;
use harness_scenario::Scenario;

use super::document::{Document, Map, Node, StepNode};

/// Longer steps are written on several lines.
const WIDTH: usize = 140;

/// The text, and the line of each step, counted from 1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Written {
    pub(super) text: String,
    pub(super) lines: Vec<u32>,
    count: u32,
}

impl Document {
    /// Writes the document, and checks the text as a scenario.
    pub(super) fn checked(&self, path: &Path) -> (Written, Result<Scenario, FileError>) {
        let written = Written::of(self);
        let scenario = Scenario::parse(&written.text, path);
        (written, scenario)
    }
}

impl Written {
    pub(super) fn of(document: &Document) -> Self {
        let mut written = Self {
            text: String::new(),
            lines: Vec::new(),
            count: 0,
        };
        for (key, node) in &document.keys {
            written.key(key, node, 0);
        }
        written
    }

    pub(super) fn step_at(&self, line: u32) -> Option<usize> {
        self.lines.iter().rposition(|&begins| begins <= line)
    }

    fn line(&mut self, indent: usize, text: &str) {
        self.text += &format!("{}{text}", " ".repeat(indent));
        self.text.truncate(self.text.trim_end_matches(' ').len());
        self.text.push('\n');
        self.count += 1;
    }

    /// Writes a key of the file, or a further key of a step.
    fn key(&mut self, key: &str, node: &Node, indent: usize) {
        match node {
            Node::Steps(steps) => {
                self.line(indent, &format!("{key}:"));
                steps.iter().for_each(|step| self.step(step, indent + 2));
            }
            Node::Scalar(text) if text.trim_end().contains('\n') => {
                self.line(indent, &format!("{key}: |"));
                text.trim_end()
                    .lines()
                    .for_each(|line| self.line(indent + 2, line));
            }
            Node::List(all) if all.iter().any(|one| matches!(one, Node::Map(_))) => {
                self.line(indent, &format!("{key}:"));
                for one in all {
                    let text = match one {
                        Node::Map(map) if map.len() == 1 => entries(map, true),
                        other => inline(other, false),
                    };
                    self.line(indent + 2, &format!("- {text}"));
                }
            }
            other => self.line(indent, &pair(key, other, false)),
        }
    }

    fn step(&mut self, step: &StepNode, indent: usize) {
        step.above
            .iter()
            .for_each(|comment| self.line(indent, &format!("# {comment}")));
        self.lines.push(self.count + 1);
        let comment = step
            .behind
            .as_ref()
            .map(|comment| format!("  # {comment}"))
            .unwrap_or_default();
        let Some(((key, node), beside)) = step.keys.split_first() else {
            return;
        };
        let on_one_line = format!(
            "- {}",
            if *node == Node::Nothing && beside.is_empty() {
                key.clone()
            } else {
                pair(key, node, false)
            }
        );
        match node {
            Node::Map(map) if indent + on_one_line.len() > WIDTH => {
                self.line(indent, &format!("- {key}:{comment}"));
                map.iter()
                    .for_each(|(key, node)| self.key(key, node, indent + 4));
            }
            _ => self.line(indent, &format!("{on_one_line}{comment}")),
        }
        beside
            .iter()
            .for_each(|(key, node)| self.key(key, node, indent + 2));
    }
}

fn pair(key: &str, node: &Node, is_inside: bool) -> String {
    let key = scalar(key, is_inside);
    if *node == Node::Nothing {
        format!("{key}:")
    } else {
        format!("{key}: {}", inline(node, is_inside))
    }
}

fn entries(map: &Map, is_inside: bool) -> String {
    map.iter()
        .map(|(key, node)| pair(key, node, is_inside))
        .collect::<Vec<_>>()
        .join(", ")
}

/// A value on one line. `is_inside` means within brackets or braces.
fn inline(node: &Node, is_inside: bool) -> String {
    match node {
        Node::Nothing => String::new(),
        Node::Scalar(text) => scalar(text, is_inside),
        Node::List(all) => format!(
            "[{}]",
            all.iter()
                .map(|one| inline(one, true))
                .collect::<Vec<_>>()
                .join(", ")
        ),
        Node::Map(map) if map.is_empty() => "{}".to_owned(),
        Node::Map(map) => format!("{{ {} }}", entries(map, true)),
        // Steps always have their own key, so they never occur in a one-line value.
        Node::Steps(_) => String::new(),
    }
}

/// A text in YAML, in quotes if it would otherwise mean something else.
fn scalar(text: &str, is_inside: bool) -> String {
    let first = text.chars().next().unwrap_or(' ');
    let is_plain = !text.contains(|c: char| c.is_control())
        && text.trim() == text
        && !text.contains(": ")
        && !text.contains(" #")
        && !text.ends_with(':')
        && !"?:,[]{}#&*!|>'\"%@`".contains(first)
        && !(first == '-'
            && text[1..]
                .chars()
                .next()
                .is_none_or(|c| c.is_whitespace() || c == '-'))
        && !(is_inside && text.contains([',', '[', ']', '{', '}']))
        && !["", "~", "null", "Null", "NULL"].contains(&text);
    if is_plain {
        return text.to_owned();
    }
    let quoted: String = text
        .chars()
        .map(|c| match c {
            '"' => "\\\"".to_owned(),
            '\\' => "\\\\".to_owned(),
            '\n' => "\\n".to_owned(),
            c if c.is_control() => format!("\\U{:08x}", u32::from(c)),
            c => c.to_string(),
        })
        .collect();
    format!("\"{quoted}\"")
}

#[cfg(test)]
mod tests;
