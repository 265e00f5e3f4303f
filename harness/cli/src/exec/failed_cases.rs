//! The cases of `--every-fault` that a program did not survive, for `--last-failed`: a file in the
//! cache folder for each command and folder.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::{env, fs};

use harness_allocator::hash::fnv1a;
use harness_exec::cache;
use harness_exec::trials::faults::{Expectation, FaultReport};
use serde::{Deserialize, Serialize};

use crate::terminal;

#[derive(Default, Serialize, Deserialize)]
pub(super) struct FailedCases {
    /// The folder and the command, which the name of the file has as a hash.
    program: String,
    cases: BTreeSet<String>,
}

impl FailedCases {
    /// Reads the cases of a command in the current folder. An unreadable file counts as missing.
    pub(super) fn read(command: &str) -> Self {
        let folder = env::current_dir().unwrap_or_default();
        let program = format!("{}$ {command}", folder.display());
        path(&program)
            .and_then(|path| serde_json::from_str::<Self>(&fs::read_to_string(path).ok()?).ok())
            .filter(|read| read.program == program)
            .unwrap_or(Self {
                program,
                cases: BTreeSet::new(),
            })
    }

    /// The cases, if there are any.
    pub(super) fn asked(&self) -> Option<&BTreeSet<String>> {
        (!self.cases.is_empty()).then_some(&self.cases)
    }

    /// Adds failed cases, removes the others of the report, and writes the file.
    pub(super) fn update(mut self, report: &FaultReport, expectation: Option<Expectation>) {
        let expectation = expectation.unwrap_or(Expectation::Recovers);
        for case in &report.cases {
            if case.meets(expectation) {
                self.cases.remove(&case.name());
            } else {
                self.cases.insert(case.name());
            }
        }
        let Some(path) = path(&self.program) else {
            return;
        };
        if self.cases.is_empty() && !path.exists() {
            return;
        }
        if let Some(folder) = path.parent() {
            // The next call reports an error.
            let _ = fs::create_dir_all(folder);
        }
        let written = terminal::json(&self).and_then(|text| terminal::save(&path, text));
        if let Err(error) = written {
            terminal::message(format_args!("`--last-failed` will not know these: {error}"));
        }
    }
}

/// `None` if there is no cache folder.
fn path(program: &str) -> Option<PathBuf> {
    let folder = cache::folder(|name| env::var_os(name)).ok()?;
    let name = format!("{:016x}.json", fnv1a(program.as_bytes()));
    Some(folder.join("last-failed").join(name))
}
