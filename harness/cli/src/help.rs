//! `harness help`: the chapters of the guide, and the help of commands.

use clap::{Args, CommandFactory as _};
use harness_language::error::did_you_mean;
use harness_report::guide;

use super::error::{CliError, Failures};
use super::{Cli, exit::Exit, program, terminal};

/// Longer lines are hard to read.
const WIDEST: usize = 100;

/// A chapter of the guide.
struct Chapter {
    topic: &'static str,
    /// The name of its file.
    file: &'static str,
    markdown: &'static str,
}

macro_rules! chapters {
    ($($topic:literal: $file:literal,)*) => {
        &[$(Chapter {
            topic: $topic,
            file: $file,
            markdown: include_str!(concat!("../../book/src/", $file)),
        }),*]
    };
}

/// All chapters, except for the reference of the commands, which is their own help.
const CHAPTERS: &[Chapter] = chapters! {
    "introduction": "introduction.md",
    "pytorch": "pytorch.md",
    "engines": "engines.md",
    "out-of-memory": "out-of-memory.md",
    // `fleet` is a command.
    "jobs": "fleet.md",
    "agents": "agents.md",
    "scenarios": "scenarios.md",
    "benchmarks": "benchmarks.md",
    "gpu": "gpu.md",
    "allocators": "allocators.md",
    "scenario-reference": "scenario-reference.md",
    "stable": "stable.md",
    "changelog": "changelog.md",
    "gpus": "gpus.md",
    "programs": "programs.md",
    "real-figures": "real-figures.md",
    "rules": "rules.md",
};

const EXAMPLES: &str = "Examples:
  harness help
  harness help out-of-memory
  harness help exec";

/// Show a chapter of the guide, or the help of a command.
///
/// Without a topic, the command lists the topics. On a terminal, the program in the variable PAGER
/// shows the text [default: less].
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Help {
    /// A chapter of the guide, or a command.
    #[arg(value_name = "TOPIC")]
    topic: Vec<String>,
}

impl Help {
    pub(super) fn run(self) -> Result<Exit, Failures> {
        let chapter = match self.topic.as_slice() {
            [] => {
                terminal::print(&topics())?;
                return Ok(Exit::Passed);
            }
            [topic] => CHAPTERS.iter().find(|chapter| chapter.topic == topic),
            _ => None,
        };
        let text = match chapter {
            Some(chapter) => shown(chapter),
            None => of_command(&self.topic)?,
        };
        terminal::page(&text)?;
        Ok(Exit::Passed)
    }
}

fn shown(chapter: &Chapter) -> String {
    let width = terminal::width_of_output().map_or(WIDEST, |width| width.min(WIDEST));
    let topic = |file: &str| {
        let chapter = CHAPTERS.iter().find(|chapter| chapter.file == file)?;
        Some(format!("`harness help {}`", chapter.topic))
    };
    guide::chapter(chapter.markdown, topic, terminal::style(), Some(width))
}

fn topics() -> String {
    let name = program::name();
    let chapters = CHAPTERS.iter().map(|chapter| {
        let mut lines = chapter.markdown.lines();
        let title = lines.find_map(|line| line.strip_prefix("# "));
        let title = title.unwrap_or_default();
        format!("  {:<20} {title}\n", chapter.topic)
    });
    let chapters: String = chapters.collect();
    format!(
        "Chapters of the guide, with `{name} help TOPIC`:\n{chapters}\nCommands, with `{name} help \
         COMMAND`:\n  {}\n",
        commands().join(", ")
    )
}

fn commands() -> Vec<String> {
    let root = Cli::command();
    let shown = root
        .get_subcommands()
        .filter(|command| !command.is_hide_set());
    shown.map(|command| command.get_name().to_owned()).collect()
}

/// The text of `harness COMMAND --help`.
fn of_command(path: &[String]) -> Result<String, CliError> {
    let mut root = Cli::command();
    root.build();
    let mut command = &mut root;
    for (depth, name) in path.iter().enumerate() {
        command = match command.find_subcommand_mut(name) {
            Some(command) => command,
            None => return Err(unknown(&path[..=depth])),
        };
    }
    Ok(command.render_long_help().to_string())
}

fn unknown(path: &[String]) -> CliError {
    let name = path.join(" ");
    let commands = commands();
    let names = CHAPTERS
        .iter()
        .map(|chapter| chapter.topic)
        .chain(commands.iter().map(String::as_str));
    CliError::input(
        format!("there is no topic `{name}`"),
        format!(
            "{}`harness help` lists the topics",
            did_you_mean(&name, names)
        ),
    )
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_chapter_of_the_book_is_a_topic_and_no_topic_is_a_command() {
        let summary = include_str!("../../book/src/SUMMARY.md");
        let listed: BTreeSet<&str> = summary
            .lines()
            .filter_map(|line| line.rsplit_once('(')?.1.strip_suffix(')'))
            .filter(|file| *file != "commands.md")
            .collect();
        let known: BTreeSet<&str> = CHAPTERS.iter().map(|chapter| chapter.file).collect();
        assert_eq!(listed, known);
        let commands = commands();
        for Chapter { topic, .. } in CHAPTERS {
            assert!(!commands.iter().any(|command| command == topic), "{topic}");
        }
    }

    #[test]
    fn chapters_have_no_line_wider_than_the_page_except_for_code() {
        for chapter in CHAPTERS {
            for line in shown(chapter)
                .lines()
                .filter(|line| !line.starts_with("    "))
            {
                let is_long_word = line.split_whitespace().any(|word| word.len() > WIDEST / 2);
                let width = unicode_width::UnicodeWidthStr::width(line);
                assert!(width <= WIDEST || is_long_word, "{}: {line}", chapter.file);
            }
        }
    }
}
