//! `harness exec --largest`: the largest value of a parameter that fits on each GPU.

mod config_file;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::AtomicBool;

use clap::Args;
use harness_exec::trials::copies::Copies;
use harness_exec::trials::largest::{
    LargestCase, LargestReport, LargestSearch, Lever, Parameter, with_values,
};
use harness_exec::trials::runner::{RecordedRequests, Runner};
use harness_exec::{launch::Launch, machine::Machine, setup::Setup};
use harness_gpu_settings::context_overhead::ContextOverhead;
use harness_report::trials::Trials;

use self::config_file::ConfigFile;
use super::trials::MANY;
use super::{CliError, Exec, Exit, Failures, terminal};

/// The most rows of a table.
const MOST_CASES: usize = 10_000;

#[derive(Args)]
pub(super) struct LargestOptions {
    /// Find the largest value with which the program ends with exit code 0 and without
    /// out-of-memory errors, for each `--gpu` and `--alloc-conf`. `{NAME}` in the command stands
    /// for the value, also in `env LENGTH={length} python train.py`. VALUES is FIRST..LAST,
    /// FIRST..LAST:STEP or a list. Further `--largest` add a row for each of their values.
    #[arg(
        long,
        value_name = "NAME=VALUES",
        group = "searches",
        help_heading = MANY,
        conflicts_with_all = ["every_fault", "fail", "latency", "shard", "logs"],
    )]
    largest: Vec<Parameter>,
    /// With `--largest`: exit with code 1 if a row's largest value is smaller.
    #[arg(long, value_name = "VALUE", help_heading = MANY)]
    at_least: Option<u64>,
    /// With `--largest`: also search with these arguments after the command, as in `--try 'half:
    /// --half'`. Words such as `DTYPE=bfloat16` before the arguments are environment variables. All
    /// words after a word `--` are arguments, as in `--try 'small: -- model=small'`. A row shows
    /// the largest value and how much memory the arguments save.
    #[arg(
        long = "try",
        value_name = "NAME: ARGUMENTS",
        help_heading = MANY,
    )]
    levers: Vec<Lever>,
    /// With `--largest`: also replace `{NAME}` in this text file. An argument of the command names
    /// the file, as in `--config=train.yaml`. Each run reads its own copy, next to the file.
    /// `${NAME}` is not replaced. May be repeated.
    #[arg(long = "config", value_name = "FILE", help_heading = MANY)]
    configs: Vec<PathBuf>,
}

impl LargestOptions {
    pub(super) const fn are_asked_for(&self) -> bool {
        !self.largest.is_empty()
    }

    pub(super) fn check_needed(&self) -> Result<(), CliError> {
        let options = [
            ("--at-least", self.at_least.is_some()),
            ("--try", !self.levers.is_empty()),
            ("--config", !self.configs.is_empty()),
        ];
        super::require("`--largest`", self.are_asked_for(), &options)
    }
}

/// A GPU of the table, with what it can be told apart by.
struct Kind {
    name: String,
    kind: (u32, u32, u32),
    machine: Machine,
}

impl Exec {
    pub(super) fn search_largest(&self, python: Option<&Path>) -> Result<ExitCode, Failures> {
        let parameters = &self.largest.largest;
        let [parameter, others @ ..] = parameters.as_slice() else {
            return Err(CliError::internal("no parameter is given", "give `--largest`").into());
        };
        let configs = self.config_files(parameters)?;
        self.check_placeholders(parameters, &configs)?;
        let last = parameter.values.last().copied().unwrap_or_default();
        if let Some(least) = self.largest.at_least.filter(|least| *least > last) {
            let message = format!("`--at-least {least}` is more than the last value, {last}");
            return Err(CliError::input(message, "search larger values too").into());
        }
        let smallest = parameters
            .iter()
            .map(|parameter| (parameter.name.clone(), parameter.values[0]))
            .collect();
        let setup = self.setup(&with_values(&self.command, &smallest), python)?;
        let kinds = self.kinds(&setup)?;
        self.check_levers()?;
        let cases = self.cases(&kinds, others)?;
        let jobs = kinds.iter().map(|kind| kind.machine.usual_jobs()).min();
        let bar = terminal::progress(true, "{spinner} {pos} runs, {elapsed}", None);
        self.many.interruptible(|stop| {
            let run = |case: &LargestCase, value: u64| {
                self.run_case(&setup, &kinds, &configs, (case, value), stop)
            };
            let search = LargestSearch {
                parameter,
                cases: &cases,
                run: &run,
                progress: &|| bar.inc(1),
                context_overhead: self.context_overhead.of_context(),
                memory_of_libraries: self.context_overhead == ContextOverhead::H200,
                allow_ooms: self.many.allow_ooms,
                jobs: self.many.jobs(jobs.unwrap_or(1)),
            };
            let report = search.report()?;
            bar.finish_and_clear();
            self.many.print(&report, Trials::Largest(&report))?;
            Ok(self.exit_of(&report))
        })
    }

    fn config_files(&self, parameters: &[Parameter]) -> Result<Vec<ConfigFile<'_>>, CliError> {
        let levers = self.largest.levers.iter().flat_map(|lever| {
            let words = lever.variables.iter().chain(&lever.arguments);
            words.map(OsString::from)
        });
        let command: Vec<OsString> = self.command.iter().cloned().chain(levers).collect();
        let files = self.largest.configs.iter();
        files
            .map(|path| ConfigFile::read(path, &command, parameters))
            .collect()
    }

    /// Every parameter has its own name, and the command or a file has its placeholder.
    fn check_placeholders(
        &self,
        parameters: &[Parameter],
        configs: &[ConfigFile<'_>],
    ) -> Result<(), CliError> {
        let mut names = BTreeSet::new();
        for parameter in parameters {
            let name = &parameter.name;
            if !names.insert(name) {
                let message = format!("`--largest {name}=…` is given more than once");
                return Err(CliError::input(message, "give each parameter once"));
            }
            let placeholder = parameter.placeholder();
            let is_used = |argument: &OsString| parameter.is_in(&argument.to_string_lossy());
            let is_in_file = configs.iter().any(|config| config.uses(parameter));
            if !is_in_file && !self.command.iter().any(is_used) {
                let message = format!("no argument of the command contains `{placeholder}`");
                let help = format!(
                    "write `{placeholder}` where the value belongs, as in `-- python train.py \
                     --{name} {placeholder}`, or in a file that `--config` names"
                );
                return Err(CliError::input(message, help));
            }
        }
        Ok(())
    }

    fn check_levers(&self) -> Result<(), CliError> {
        let mut names = BTreeSet::new();
        match self
            .largest
            .levers
            .iter()
            .find(|lever| !names.insert(&lever.name))
        {
            Some(Lever { name, .. }) => {
                let message = format!("`--try '{name}: …'` is given more than once");
                Err(CliError::input(message, "give each lever its own name"))
            }
            None => Ok(()),
        }
    }

    fn kinds(&self, setup: &Setup) -> Result<Vec<Kind>, Failures> {
        if let Some(ordinal) = self.device {
            let (machine, name) = self.real_machine(ordinal)?;
            return Ok(vec![Kind {
                name,
                kind: (0, 0, 0),
                machine,
            }]);
        }
        let mut names = BTreeSet::new();
        let kind = |given: &String| {
            let gpu = super::device::gpu(given)?;
            if !names.insert(&gpu.name) {
                let message = format!("`--gpu {}` is given more than once", gpu.name);
                return Err(CliError::input(message, "name each GPU once"));
            }
            Ok(Kind {
                name: gpu.name.clone(),
                kind: (gpu.capability.0, gpu.capability.1, gpu.multiprocessors),
                machine: Machine::Simulated(self.settings_on(gpu, setup)?),
            })
        };
        self.gpu
            .iter()
            .map(kind)
            .collect::<Result<_, _>>()
            .map_err(Failures::from)
    }

    /// Combines the values of the other parameters, the GPUs and the settings.
    fn cases(&self, kinds: &[Kind], others: &[Parameter]) -> Result<Vec<LargestCase>, CliError> {
        let count = others.iter().map(|other| other.values.len()).fold(
            kinds.len() * self.alloc_conf.len().max(1) * (1 + self.largest.levers.len()),
            usize::saturating_mul,
        );
        if count > MOST_CASES {
            let message =
                format!("the options ask for {count} rows; at most {MOST_CASES} are searched");
            return Err(CliError::input(
                message,
                "give fewer values of the parameters after the first, as in `length=512,1024,2048`",
            ));
        }
        let mut combined = vec![BTreeMap::new()];
        for other in others {
            let with = |values: &BTreeMap<String, u64>, value: u64| {
                let mut values = values.clone();
                values.insert(other.name.clone(), value);
                values
            };
            combined = combined
                .iter()
                .flat_map(|values| other.values.iter().map(move |value| with(values, *value)))
                .collect();
        }
        let confs: Vec<Option<&str>> = if self.alloc_conf.is_empty() {
            vec![None]
        } else {
            self.alloc_conf
                .iter()
                .map(|conf| Some(conf.as_str()))
                .collect()
        };
        let levers = || {
            [None]
                .into_iter()
                .chain(self.largest.levers.iter().map(Some))
        };
        let mut cases = Vec::new();
        for others in &combined {
            for (kind, conf) in kinds
                .iter()
                .flat_map(|kind| confs.iter().map(move |conf| (kind, conf)))
            {
                cases.extend(levers().map(|lever| LargestCase {
                    gpu: kind.name.clone(),
                    kind: kind.kind,
                    others: others.clone(),
                    lever: lever.cloned(),
                    trial: kind.machine.trial(*conf),
                }));
            }
        }
        Ok(cases)
    }

    fn run_case(
        &self,
        setup: &Setup,
        kinds: &[Kind],
        configs: &[ConfigFile<'_>],
        (case, value): (&LargestCase, u64),
        stop: &AtomicBool,
    ) -> Result<Option<harness_exec::trials::runner::FirstRun>, CliError> {
        let machine = kinds.iter().find(|kind| kind.name == case.gpu);
        let machine = machine.map(|kind| &kind.machine).ok_or_else(|| {
            CliError::internal("a row has an unknown GPU", "report this with the command")
        })?;
        let first = self.largest.largest.first();
        let values = first.map_or_else(BTreeMap::new, |first| case.values(&first.name, value));
        let mut command = case.command(&self.command, &values);
        let copies: Vec<_> = configs
            .iter()
            .map(|config| config.copy(&mut command, &values))
            .collect::<Result<_, _>>()?;
        let runner = Runner {
            launch: Launch {
                command: &command,
                machine,
                setup,
                alloc_conf: case.trial.alloc_conf.as_deref(),
                snapshot: false,
                ledger: None,
            },
            logs: None,
            limit: self.many.limit_or_none(),
            copies: Copies::none(),
            stop,
        };
        let recording = match self.many.report.as_deref() {
            _ if !self.many.predicts() => RecordedRequests::Nothing,
            Some(_) => RecordedRequests::Stacks,
            None => RecordedRequests::Sizes,
        };
        let ran = runner.unseen(&case.trial, recording)?;
        drop(copies);
        Ok(ran)
    }

    fn exit_of(&self, report: &LargestReport) -> Exit {
        let at_least = self.largest.at_least.unwrap_or(0);
        let is_enough = |largest: Option<u64>| largest.is_some_and(|largest| largest >= at_least);
        let is_fine = if self.largest.at_least.is_some() {
            report.rows.iter().all(|row| is_enough(row.largest))
        } else {
            report.rows.iter().any(|row| is_enough(row.largest))
        };
        if is_fine && report.rows.iter().all(|row| row.failure.is_none()) {
            Exit::Passed
        } else {
            Exit::Failed
        }
    }
}
