//! Test programs with tests that cannot run on every machine. At its end, such a program prints how
//! many tests it skipped, why, and the command that runs them.

use std::sync::{Mutex, PoisonError};
use std::{collections::BTreeMap, process::ExitCode};

use libtest_mimic::{Arguments, Completion, Failed, Trial};

/// Why tests cannot run here, and the command or the installation that makes them run.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct Skip {
    pub why: String,
    pub remedy: &'static str,
}

impl Skip {
    #[must_use]
    pub fn new(why: impl Into<String>, remedy: &'static str) -> Self {
        let why = why.into();
        Self { why, remedy }
    }

    /// Counts a skipped test. Its line shows `reason`.
    #[must_use]
    pub fn count(&self, reason: &str) -> Completion {
        let mut skipped = SKIPPED.lock().unwrap_or_else(PoisonError::into_inner);
        *skipped.entry(self.clone()).or_default() += 1;
        Completion::ignored_with(reason)
    }
}

/// The skipped tests of this program.
static SKIPPED: Mutex<BTreeMap<Skip, u64>> = Mutex::new(BTreeMap::new());

/// A test, or a skipped one.
pub fn trial(
    name: impl Into<String>,
    skip: Option<Skip>,
    test: impl FnOnce() -> Result<(), Failed> + Send + 'static,
) -> Trial {
    Trial::ignorable_test(name, move || match skip {
        Some(skip) => Ok(skip.count(&skip.why)),
        None => test().map(|()| Completion::Completed),
    })
}

/// Runs the tests that the arguments select, and prints what was skipped.
#[must_use]
pub fn run(arguments: &Arguments, trials: Vec<Trial>) -> ExitCode {
    let code = libtest_mimic::run(arguments, trials).exit_code();
    let skipped = SKIPPED.lock().unwrap_or_else(PoisonError::into_inner);
    for (Skip { why, remedy }, count) in &*skipped {
        println!("skipped {count}: {why}. To run: {remedy}");
    }
    code
}
