//! This build and the accepted build, measured side by side. Each is a process, `harness bench
//! --serve`, that takes its turn in every round. Both are started in the same way, so they differ
//! only in their code.
//!
//! Messages are one JSON object per line. A process first sends its protocol version and commit
//! (`Greeting`). Each `Request` names a case by suite and name, with the hash of its work; the
//! process sends an `Answer`. A build that reads the suite differently says so, and the entry is
//! not compared.

use std::io::{self, BufRead, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, atomic::AtomicBool};
use std::{borrow::Cow, collections::BTreeMap, ffi::OsString, process::Command, time::Duration};

use serde::{Deserialize, Serialize};

use crate::child::{ChildProcess, Patience};
use crate::clock::{Stopwatch, overhead_ps};
use crate::measure::visit::{Fault, Reading, Visit};
use crate::measure::{self};
use crate::{provider::DeviceProvider, suite::Suite};

/// Version of requests and answers. A build with another version is not measured side by side.
pub const PROTOCOL: u32 = 1;

/// A cold driver takes seconds to open its device; the longest case, a scenario on a slow machine,
/// takes seconds.
const PATIENCE: Patience = Patience {
    start: Duration::from_secs(60),
    answer: Duration::from_secs(120),
};

/// Share of the time that new processes may cost. Each process has its heap and stack at other
/// addresses, and its functions in another order if the program has layouts ([`layouts`]). Both
/// decide cache conflicts (T. Mytkowicz and others, "Producing Wrong Data Without Doing Anything
/// Obviously Wrong!", 2009, <https://doi.org/10.1145/1508244.1508275>). Many processes average this
/// out.
const SHARE_OF_STARTS: f64 = 0.05;

#[derive(Debug, Serialize, Deserialize)]
struct Greeting {
    protocol: u32,
    commit: Option<String>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Request<'a> {
    pub(crate) suite: Cow<'a, Path>,
    pub(crate) case: Cow<'a, str>,
    pub(crate) arm: Cow<'a, str>,
    pub(crate) hash: Cow<'a, str>,
    /// Operations to time together, once known; the same for both builds.
    pub(crate) batch: Option<u64>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    Measured {
        readings: Vec<Reading>,
        batch: Option<u64>,
    },
    #[serde(untagged)]
    Fault(Fault),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    This,
    Accepted,
}

#[derive(Debug)]
pub struct Builds {
    sides: [Build; 2],
    began: Stopwatch,
    /// Nanoseconds spent on starting processes.
    starting: u64,
}

#[derive(Debug)]
struct Build {
    /// The program, or the same program linked in several orders. Each process takes the next.
    layouts: Vec<PathBuf>,
    started: usize,
    arguments: Vec<OsString>,
    ordinal: Option<u32>,
    commit: Option<String>,
    process: ChildProcess,
}

impl Builds {
    /// Starts both programs with arguments that select the same device; `ordinal` is its CUDA
    /// ordinal. The error says why they cannot be measured side by side.
    pub fn start(
        this: &Path,
        accepted: &Path,
        arguments: &[OsString],
        ordinal: Option<u32>,
    ) -> Result<Self, String> {
        let began = Stopwatch::start();
        let mut programs = [this, accepted].map(layouts);
        if programs.iter().any(Vec::is_empty) {
            programs = [this, accepted].map(|program| vec![program.to_owned()]);
        }
        let [this, accepted] = programs.map(|layouts| Build::start(layouts, arguments, ordinal));
        Ok(Self {
            sides: [this?, accepted?],
            began,
            starting: began.elapsed_ns(),
        })
    }

    pub fn accepted_commit(&self) -> Option<&str> {
        self.sides[Side::Accepted as usize].commit.as_deref()
    }

    pub(crate) fn renew(&mut self) {
        if self.starting as f64 > SHARE_OF_STARTS * self.began.elapsed_ns() as f64 {
            return;
        }
        let watch = Stopwatch::start();
        for build in &mut self.sides {
            // A process that cannot start now is retried at its next request.
            build.restart().ok();
        }
        self.starting += watch.elapsed_ns();
    }

    /// Visits a case once. Also returns the number of operations timed together.
    pub(crate) fn visit(
        &mut self,
        side: Side,
        request: &Request<'_>,
    ) -> Result<(Vec<Reading>, Option<u64>), Fault> {
        let build = &mut self.sides[side as usize];
        if !build.process.is_running() {
            build.restart().map_err(Fault::Failed)?;
        }
        match build.process.ask(request).map_err(Fault::Failed)? {
            Answer::Measured { readings, batch } => Ok((readings, batch)),
            Answer::Fault(fault) => Err(fault),
        }
    }
}

impl Build {
    fn start(
        layouts: Vec<PathBuf>,
        arguments: &[OsString],
        ordinal: Option<u32>,
    ) -> Result<Self, String> {
        let (process, commit) = start_process(&layouts[0], arguments, ordinal)?;
        Ok(Self {
            layouts,
            started: 1,
            arguments: arguments.to_owned(),
            ordinal,
            commit,
            process,
        })
    }

    fn restart(&mut self) -> Result<(), String> {
        self.process.end();
        let layout = &self.layouts[self.started % self.layouts.len()];
        self.started += 1;
        self.process = start_process(layout, &self.arguments, self.ordinal)?.0;
        Ok(())
    }
}

/// Returns the files in `PROGRAM.layouts`, which `ci/layouts` writes.
///
/// They replace the program on both sides or on neither, because the usual order of functions is
/// not a random one: some traces took 6 to 10 % longer with it than with each of four random
/// orders, while two sets of four random orders were equal in four runs.
fn layouts(program: &Path) -> Vec<PathBuf> {
    let mut folder = program.as_os_str().to_owned();
    folder.push(".layouts");
    let mut layouts: Vec<PathBuf> = std::fs::read_dir(folder)
        .into_iter()
        .flatten()
        .filter_map(|file| Some(file.ok()?.path()))
        .collect();
    layouts.sort();
    layouts
}

/// Also returns the commit of the build.
fn start_process(
    program: &Path,
    arguments: &[OsString],
    ordinal: Option<u32>,
) -> Result<(ChildProcess, Option<String>), String> {
    let mut command = Command::new(program);
    command.args(["bench", "--serve"]).args(arguments);
    let started = ChildProcess::start("the build", &mut command, ordinal, PATIENCE);
    let (process, Greeting { protocol, commit }) =
        started.map_err(|error| format!("{}: {error}", program.display()))?;
    if protocol != PROTOCOL {
        return Err(format!(
            "{} speaks version {protocol} of the protocol, this harness version {PROTOCOL}",
            program.display()
        ));
    }
    Ok((process, commit))
}

/// Runs `harness bench --serve`: sends the greeting and answers requests until its input ends.
pub fn serve(
    provider: &mut dyn DeviceProvider,
    commit: Option<String>,
    input: impl BufRead,
    output: &mut impl Write,
) -> io::Result<()> {
    let mut server = Server {
        provider,
        overhead_ps: overhead_ps(),
        suites: BTreeMap::new(),
        interrupt: Arc::default(),
    };
    say(
        output,
        &Greeting {
            protocol: PROTOCOL,
            commit,
        },
    )?;
    for line in input.lines() {
        let answer = match serde_json::from_str::<Request<'_>>(&line?) {
            Ok(request) => {
                let mut batch = request.batch;
                let readings = server.readings(&request, &mut batch);
                readings.map_or_else(Answer::Fault, |readings| Answer::Measured {
                    readings,
                    batch,
                })
            }
            Err(error) => Answer::Fault(Fault::Skipped(format!(
                "this build does not understand the request: {error}"
            ))),
        };
        say(output, &answer)?;
    }
    Ok(())
}

fn say(output: &mut impl Write, what: &impl Serialize) -> io::Result<()> {
    writeln!(output, "{}", serde_json::to_string(what)?)?;
    output.flush()
}

struct Server<'a> {
    provider: &'a mut dyn DeviceProvider,
    overhead_ps: u64,
    /// Suites read so far, or why they cannot be read.
    suites: BTreeMap<PathBuf, Result<Suite, String>>,
    interrupt: Arc<AtomicBool>,
}

impl Server<'_> {
    fn readings(
        &mut self,
        request: &Request<'_>,
        batch: &mut Option<u64>,
    ) -> Result<Vec<Reading>, Fault> {
        let unknown = |why: &str| Fault::Skipped(format!("this build {why}"));
        let read = || {
            Suite::load(&request.suite).map_err(|error| format!("cannot read the suite: {error}"))
        };
        let suite = self
            .suites
            .entry(request.suite.to_path_buf())
            .or_insert_with(read)
            .as_ref()
            .map_err(|why| unknown(why))?;
        let case = suite
            .cases
            .iter()
            .find(|case| case.name() == request.case)
            .ok_or_else(|| unknown("does not know the case"))?;
        if case.hash != request.hash {
            return Err(unknown("measures something else by this name"));
        }
        let arm = suite
            .arms
            .iter()
            .find(|arm| arm.to_string() == request.arm)
            .ok_or_else(|| unknown("does not know the arm"))?;
        let (memory, overhead_ps, interrupt) = (suite.memory, self.overhead_ps, &self.interrupt);
        measure::visit(
            &case.measure,
            &mut Visit {
                provider: self.provider,
                arm,
                memory,
                overhead_ps,
                batch,
                interrupt,
            },
        )
    }
}

#[cfg(test)]
mod tests;
