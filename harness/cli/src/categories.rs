//! The user's categories of memory: `--categories FILE.yaml`.

use std::path::PathBuf;

use clap::Args;
use harness_explain::categories::CategoryRule;
use harness_language::error::FileError;
use harness_language::yaml::{self, Language};
use serde::Deserialize;

use super::error::CliError;

const LANGUAGE: Language = Language {
    noun: "categories",
    example: "categories.yaml",
    shape: "write `categories:` and below it a list such as `- { category: lora, file: peft/tuners \
         }`",
    required: &["categories"],
    required_by: |_| Vec::new(),
    shorter: "fewer rules",
    own: &["categories"],
    foreign: &["steps"],
    other: ("a scenario", "harness run"),
    advice: "correct the file at this position",
};

#[derive(Args, Default)]
pub(crate) struct CategoryOptions {
    /// Your own categories of memory, which come before the built-in ones: a YAML file as in
    /// `categories: [{ category: lora, file: peft/tuners }, { category: kv_cache, function: grow },
    /// { category: rope, regex: 'rotary.*forward' }]`. A block belongs to the first rule that
    /// matches a frame of its stack: a part of the file's path, the function, or a regular
    /// expression for `file:line function`.
    #[arg(long, value_name = "FILE")]
    categories: Option<PathBuf>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Wire {
    categories: Vec<CategoryRule>,
}

impl CategoryOptions {
    pub(crate) fn rules(&self) -> Result<Vec<CategoryRule>, CliError> {
        let Some(path) = &self.categories else {
            return Ok(Vec::new());
        };
        let text = yaml::read(path, &LANGUAGE)?;
        let wire: Wire = yaml::parse(&text, path, &LANGUAGE)
            .map_err(|problem| FileError::text(problem, path, &text))?;
        match wire
            .categories
            .iter()
            .find(|rule| rule.matches_everything())
        {
            None => Ok(wire.categories),
            Some(rule) => {
                let message = format!(
                    "{}: the rule of the category `{}` matches every block",
                    path.display(),
                    rule.category
                );
                Err(CliError::input(
                    message,
                    "add `file`, `function` or `regex` to it",
                ))
            }
        }
    }
}
