use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};
use std::{collections::BTreeSet, io, sync::atomic::Ordering};

use clap::Args;
use harness_allocator::units::Nanos;
use harness_base::{date::Date, printable::printable, shell::quoted};
use harness_bench::accepted::{self, AcceptedBuild};
use harness_bench::builds::{self, Builds};
use harness_bench::execute::{Processes, Progress, Terms, Turns, cases_of};
use harness_bench::gate::{self, Scope};
use harness_bench::record::{Accepted, BenchRun, Build, Shard};
use harness_bench::store::{self, Runs, Saved};
use harness_bench::torch::{Torches, torch_arms};
use harness_bench::{
    compare, machine::Monitor, plan::BenchPlan, provider::SharedDevice, suite::Suite,
};

use harness_devices::DeviceSource;
use harness_report::{bench as report, junit};
use indicatif::ProgressBar;

use super::device::{self, DeviceOptions};
use super::error::{CliError, Failures};
use super::exit::{self, Exit};
use super::inputs::{self, SUITES};
use super::{
    Format, arguments, built, ci::Ci, interrupt, list, program, report::RENDERER, terminal,
};

/// Steps of the progress bar per suite.
const STEPS: u64 = 1000;

const EXAMPLES: &str = "Examples:
  harness bench                                     # all suites of scenarios/bench
  harness bench latency traces --budget 30s
  harness bench my-suite.yaml --device cuda:1 --report /tmp/mine
  harness bench latency empty_cache --device cuda --torch auto   # also PyTorch's own allocator
  harness bench --shard 1/2 --report shards/1       # on the first of two machines
  harness bench latency --no-report --format json | jq '.suites[].entries[0]'";

/// Time allocators side by side, in interleaved rounds, until the figures are precise or the time
/// budget is used up.
///
/// A suite is a name (`latency` for scenarios/bench/latency.yaml), a file or a folder. All suites
/// are checked before the first measurement. With `--accepted`, every round also measures the
/// accepted build, and each entry is compared with it. The exit code is 1 if an entry is worse or
/// broken. Without the accepted build, each entry is compared with the record of an earlier run,
/// and the exit code is 5, because two runs support no verdict; with `--report` or `--no-report` it
/// is 0. The run is added to the index of all runs. Ctrl-C stops after the current measurement and
/// saves nothing; a second Ctrl-C ends the program immediately.
#[derive(Args)]
#[command(after_help = format!("{EXAMPLES}\n\n{}", exit::explained()))]
pub(super) struct Bench {
    /// Names, files or folders of suites. Of a folder, the `*.yaml` files are timed, without
    /// subfolders [default: all of scenarios/bench].
    #[arg(value_name = "SUITE|PATH")]
    suites: Vec<PathBuf>,
    #[command(flatten)]
    device: DeviceOptions,
    /// The time for all suites together, as in `60s`, divided in proportion to their own budgets.
    #[arg(long, value_name = "TIME", value_parser = |text: &str| arguments::time("budget", text))]
    budget: Option<Nanos>,
    /// Run only part I of N, as in `1/2`. The names of the cases determine the parts.
    #[arg(long, value_name = "I/N")]
    shard: Option<Shard>,
    /// The seed for the order of entries.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Save the run in the subfolder `nightly` of this folder, which also contains earlier runs and
    /// their index [default: reports; without the accepted build reports/runs/bench, which git
    /// ignores].
    #[arg(long, value_name = "DIR")]
    reports: Option<PathBuf>,
    /// Write the run into this folder instead, without a comparison with earlier runs and without
    /// an index entry. Use this for shards and single looks.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["reports", "no_report"])]
    report: Option<PathBuf>,
    /// Save nothing.
    #[arg(long)]
    no_report: bool,
    /// Also time PyTorch's own allocator on the same GPU, in turn with ours: `never`, `auto`
    /// (python3, on a GPU), or a Python interpreter. The report says if torch is missing.
    #[arg(long, value_name = "PYTHON", default_value = "never")]
    torch: String,
    /// Measure this program, the accepted build, side by side with this one. `accepted.json` in the
    /// reports folder contains its commit.
    #[arg(long, value_name = "PROGRAM")]
    accepted: Option<PathBuf>,
    /// The reason in the report why the accepted build was not measured.
    #[arg(long, hide = true, value_name = "WHY", conflicts_with = "accepted")]
    accepted_missing: Option<String>,
    /// Measure the cases that arrive on standard input, one JSON object per line, and answer on
    /// standard output.
    #[arg(long, hide = true)]
    serve: bool,
    #[command(flatten)]
    ci: Ci,
    /// Write the medians to this file in the format `customSmallerIsBetter` of
    /// github-action-benchmark.
    #[arg(long, value_name = "FILE", value_parser = arguments::output())]
    smaller_is_better: Option<PathBuf>,
    /// The output format. `json` prints the record of the run, with the median of each round, and
    /// nothing else.
    #[arg(long, default_value = "text", value_name = "FORMAT")]
    format: Format,
    /// List the suites and their cases, without timing them.
    #[arg(long)]
    list: bool,
    /// Allow a suite to use more of a shared GPU than usual.
    #[arg(long)]
    allow_full_device: bool,
    /// Print text only if a case fails, and show no progress.
    #[arg(long, short)]
    quiet: bool,
}

impl Bench {
    pub(super) fn run(self) -> Result<Exit, Failures> {
        if self.serve {
            return self.serve();
        }
        let mut suites = self.load()?;
        if self.list {
            terminal::print(&listed(&suites, self.shard))?;
            return Ok(Exit::Passed);
        }
        // Check the report folder before a long run, not after it.
        self.check_place()?;
        let bar = terminal::progress(!self.quiet, "{bar:30} {percent:>3} % {wide_msg}", Some(0));
        let interrupt = interrupt::watch_with(&bar, "measurement")?;
        let source = self.device_source()?;
        let pinned = self.pinned()?;
        let accepted_suites = pinned.as_ref().map_or(&[][..], |build| &build.suites);
        let (is_whole, shard) = (self.suites.is_empty(), self.shard);
        let gate = gate::apply(&mut suites, accepted_suites, Scope { is_whole, shard });
        let terms = Terms {
            seed: self.seed,
            budget: self.budget,
            shard: self.shard,
            interrupt: interrupt.clone(),
            turns: Turns::default(),
        };
        let mut plan = BenchPlan { suites, terms };
        let mut device = source.open()?;
        let (builds, accepted) = self.builds(&source, pinned.map(|build| build.commit))?;
        let machine = harness_bench::machine::machine(&*device, built::COMPILER);
        let run = BenchRun {
            seed: self.seed,
            reproduce: self.reproduce(&source),
            shard: self.shard,
            build: built::build(),
            accepted,
            is_whole,
            gate,
            ..BenchRun::new(utc(SystemTime::now()), machine)
        };
        if builds.is_some() {
            plan.terms.turns = self.turns(&run);
        }
        let mut monitor = Monitor::start(&mut *device);
        let torches = self.torches(&plan, &source);
        let mut processes = Processes { builds, torches };
        let mut provider = SharedDevice::new(source, device, std::env::current_exe().ok());
        bar.set_length(plan.suites().len() as u64 * STEPS);
        let mut done = 0_u64;
        let (suites, took) = plan.run(
            &mut provider,
            &mut processes,
            || {
                monitor.observe();
                bar.set_position(done * STEPS);
                done += 1;
            },
            |progress| advance(&bar, &progress),
        );
        bar.finish_and_clear();
        if interrupt.load(Ordering::Relaxed) {
            return Ok(Exit::Interrupted);
        }
        self.finish(BenchRun {
            took_ms: took.0 / 1_000_000,
            suites,
            conditions: monitor.finish(),
            ..run
        })
    }

    fn finish(&self, run: BenchRun) -> Result<Exit, Failures> {
        // If saving fails, the measurements are still printed.
        let (run, place) = match self.save(run.clone()) {
            Ok(saved) => saved,
            Err(error) => {
                self.print(&run, None)?;
                return Err(error.into());
            }
        };
        self.print(&run, place.as_deref())?;
        self.write_for_ci(&run)?;
        Ok(exit_of(&run))
    }

    /// Answers requests until the standard input ends.
    fn serve(&self) -> Result<Exit, Failures> {
        let source = self.device_source()?;
        let device = source.open()?;
        let mut provider = SharedDevice::new(source, device, std::env::current_exe().ok());
        let Build { commit, dirty } = built::build();
        let commit = commit.filter(|_| dirty != Some(true));
        match builds::serve(
            &mut provider,
            commit,
            io::stdin().lock(),
            &mut io::stdout().lock(),
        ) {
            Ok(()) => Ok(Exit::Passed),
            Err(error) => {
                let message = format!("the connection to the parent harness is lost: {error}");
                Err(CliError::input(
                    message,
                    "`--serve` is an internal option of `harness bench`",
                )
                .into())
            }
        }
    }

    /// When the earlier runs measured each case. An unreadable run is named when this run is saved.
    fn turns(&self, run: &BenchRun) -> Turns {
        let Ok(Runs { whole, .. }) = store::load(&self.root(true)) else {
            return Turns::default();
        };
        Turns::after(
            whole
                .iter()
                .map(|(_, other)| other)
                .filter(|other| compare::is_comparable(other, run)),
        )
    }

    fn pinned(&self) -> Result<Option<AcceptedBuild>, CliError> {
        accepted::read(
            self.reports
                .as_deref()
                .unwrap_or(Path::new(store::DEFAULT_ROOT)),
        )
        .map_err(|error| {
            CliError::input(
                error,
                "repair the file, or accept a build with `harness report accept COMMIT`",
            )
        })
    }

    /// Starts this build and the accepted one, or returns why the accepted one is missing.
    fn builds(
        &self,
        source: &DeviceSource,
        pinned: Option<String>,
    ) -> Result<(Option<Builds>, Accepted), CliError> {
        let is_required = pinned.is_some()
            || self.accepted.is_some()
            || !(self.no_report || self.report.is_some());
        let missing = |why: String| {
            Ok((
                None,
                Accepted {
                    commit: pinned.clone(),
                    missing: Some(why),
                    is_required,
                },
            ))
        };
        let Some(program) = &self.accepted else {
            return missing(
                self.accepted_missing
                    .clone()
                    .unwrap_or_else(|| "`--accepted` names no program".to_owned()),
            );
        };
        let this = std::env::current_exe();
        let mut arguments = source.arguments();
        if self.allow_full_device {
            arguments.push("--allow-full-device".into());
        }
        let started = this
            .map_err(|error| error.to_string())
            .and_then(|this| Builds::start(&this, program, &arguments, source.cuda_ordinal()));
        match started {
            Ok(builds) => {
                let commit = builds.accepted_commit().map(str::to_owned);
                if let (Some(pinned), Some(commit)) = (&pinned, &commit)
                    && pinned != commit
                {
                    let message = format!(
                        "{} was built from {commit}, but the accepted build is {pinned}",
                        program.display()
                    );
                    return Err(CliError::input(
                        message,
                        "build the accepted commit, or accept this one with `harness report accept \
                         COMMIT`",
                    ));
                }
                let commit = pinned.or(commit);
                Ok((
                    Some(builds),
                    Accepted {
                        commit,
                        missing: None,
                        is_required,
                    },
                ))
            }
            Err(why) => {
                terminal::message(format_args!("the accepted build is not measured: {why}"));
                missing(why)
            }
        }
    }

    /// Starts PyTorch with all settings of the suites before the first measurement. Prints once why
    /// one is missing.
    fn torches(&self, plan: &BenchPlan, source: &DeviceSource) -> Option<Torches> {
        let mut torches = match (self.torch.as_str(), source.cuda_ordinal()) {
            ("never", _) | ("auto", None) => return None,
            ("auto", Some(ordinal)) => Torches::new("python3", ordinal),
            (python, Some(ordinal)) => Torches::new(python, ordinal),
            (_, None) => Torches::missing("it needs a GPU, but this run uses the simulated device"),
        };
        let wanted: BTreeSet<String> = plan
            .suites()
            .into_iter()
            .flat_map(torch_arms)
            .map(|arm| arm.settings)
            .collect();
        let missing: BTreeSet<String> = wanted
            .iter()
            .filter_map(|settings| torches.with(settings).err())
            .collect();
        if !self.quiet {
            missing.iter().for_each(|reason| {
                terminal::message(format_args!(
                    "PyTorch's own allocator is not timed: {reason}"
                ))
            });
        }
        Some(torches)
    }

    fn load(&self) -> Result<Vec<Suite>, Failures> {
        let paths: Vec<PathBuf> = match self.suites.as_slice() {
            [] if !Path::new(SUITES).is_dir() => {
                let help = "run this in the root of the project, or name files or folders, as in \
                     `harness bench my-suite.yaml`";
                return Err(CliError::input(
                    format!("no suite is named, and there is no folder {SUITES} here"),
                    help,
                )
                .into());
            }
            [] => vec![PathBuf::from(SUITES)],
            named => named
                .iter()
                .map(|name| resolve(name))
                .collect::<Result<_, _>>()?,
        };
        let suites: Vec<Suite> = Failures::all(
            inputs::files(&paths, "suite")?
                .iter()
                .map(|path| Suite::load(path)),
        )?;
        // The suite's name identifies its entries.
        for (index, suite) in suites.iter().enumerate() {
            if let Some(other) = suites[..index]
                .iter()
                .find(|other| other.name == suite.name)
            {
                let message = format!(
                    "two suites have the name `{}`: {} and {}",
                    suite.name,
                    other.path.display(),
                    suite.path.display()
                );
                return Err(CliError::input(
                    message,
                    "the file gives a suite its name: rename one file, or leave it out",
                )
                .into());
            }
        }
        Ok(suites)
    }

    fn device_source(&self) -> Result<DeviceSource, CliError> {
        let choice = self.device.choice()?;
        let source = self.device.source(choice, self.allow_full_device)?;
        if !self.quiet {
            device::explain_choice(choice, &source);
        }
        Ok(source)
    }

    fn reproduce(&self, source: &DeviceSource) -> String {
        let mut command = format!("{} bench", program::name());
        for suite in &self.suites {
            command += &format!(" {}", quoted(&suite.to_string_lossy()));
        }
        command += &format!(" --device {source} --seed {}", self.seed);
        if let Some(budget) = self.budget {
            command += &format!(" --budget {}ns", budget.0);
        }
        if let Some(shard) = self.shard {
            command += &format!(" --shard {shard}");
        }
        command
    }

    fn check_place(&self) -> Result<(), CliError> {
        match &self.report {
            _ if self.no_report => Ok(()),
            Some(folder) => Ok(store::check_folder(folder)?),
            None => Ok(store::check_root(&self.root(self.accepted.is_some()))?),
        }
    }

    /// The folder of runs with or without the accepted build.
    fn root(&self, has_accepted: bool) -> PathBuf {
        let default = Path::new(store::DEFAULT_ROOT);
        self.reports.clone().unwrap_or_else(|| {
            if has_accepted {
                default.to_owned()
            } else {
                default.join(store::UNJUDGED)
            }
        })
    }

    fn save(&self, mut run: BenchRun) -> Result<(BenchRun, Option<PathBuf>), CliError> {
        if self.no_report {
            run.comparison = compare::compare(&run, &[], None);
            return Ok((run, None));
        }
        if let Some(folder) = &self.report {
            return Ok((
                store::save_into(folder, run, RENDERER)?,
                Some(folder.clone()),
            ));
        }
        let Saved {
            folder,
            run,
            broken,
        } = store::save(&self.root(run.accepted.missing.is_none()), run, RENDERER)?;
        for error in broken {
            terminal::message(format_args!(
                "skipped in the comparison and in the index: {error}"
            ));
        }
        Ok((run, Some(folder)))
    }

    fn print(&self, run: &BenchRun, place: Option<&Path>) -> Result<(), CliError> {
        let place = place.map(|folder| format!("report: {}", folder.join(store::REPORT).display()));
        match self.format {
            Format::Json => {
                place.iter().for_each(terminal::message);
                terminal::print_json(run)
            }
            Format::Text if self.quiet && exit_of(run) == Exit::Passed => Ok(()),
            Format::Text => {
                let place = place.map(|place| format!("{place}\n")).unwrap_or_default();
                terminal::print(&format!(
                    "{}{}{place}",
                    report::terminal(run),
                    report::comparison(run)
                ))
            }
        }
    }

    fn write_for_ci(&self, run: &BenchRun) -> Result<(), CliError> {
        self.ci
            .write(|limit| report::summary(run, limit), || junit::of_bench(run))?;
        if let Some(path) = &self.smaller_is_better {
            terminal::save(path, report::smaller_is_better(run))?;
        }
        // GitHub reads annotations from standard output.
        if std::env::var_os("GITHUB_ACTIONS").is_some_and(|value| value == "true")
            && self.format == Format::Text
        {
            for annotation in report::annotations(run) {
                terminal::print(&format!("{annotation}\n"))?;
            }
        }
        Ok(())
    }
}

/// Returns files and folders unchanged, and turns a name into the file of that suite.
fn resolve(given: &Path) -> Result<PathBuf, CliError> {
    let named = Path::new(SUITES).join(given).with_extension("yaml");
    if given.exists() || given.components().count() > 1 || given.extension().is_some() {
        return Ok(given.to_owned());
    }
    if named.is_file() {
        return Ok(named);
    }
    if !Path::new(SUITES).is_dir() {
        let message = format!(
            "there is no suite `{}`, because there is no folder {SUITES} here",
            given.display()
        );
        return Err(CliError::input(
            message,
            "run this in the root of the project, or name a file, as in `my-suite.yaml`",
        ));
    }
    let known: Vec<String> = inputs::files(&[PathBuf::from(SUITES)], "suite")
        .unwrap_or_default()
        .iter()
        .filter_map(|path| Some(path.file_stem()?.to_string_lossy().into_owned()))
        .collect();
    let help = match known.as_slice() {
        [] => format!("the folder {SUITES} contains no suite: name a file, as in `my-suite.yaml`"),
        names => format!(
            "suites: {}; or name a file, as in `my-suite.yaml`",
            names.join(", ")
        ),
    };
    Err(CliError::input(
        format!("there is no suite `{}`", given.display()),
        help,
    ))
}

fn listed(suites: &[Suite], shard: Option<Shard>) -> String {
    let width = suites
        .iter()
        .map(|suite| suite.name.len())
        .max()
        .unwrap_or_default();
    let line = |suite: &Suite| {
        let (cases, budget) = (cases_of(suite, shard).count(), suite.budget);
        let arms: Vec<String> = suite.arms.iter().map(ToString::to_string).collect();
        let about = list::first_sentence(&suite.about);
        format!(
            "{:<width$}  {cases:>3} cases × {}  {budget:>5}  {about}\n",
            suite.name,
            arms.join(", ")
        )
    };
    suites.iter().map(line).collect()
}

fn advance(bar: &ProgressBar, progress: &Progress<'_>) {
    let Progress {
        suite,
        case,
        arm,
        round,
        used,
    } = progress;
    let whole = bar.position() / STEPS * STEPS;
    bar.set_position(whole + (used * (STEPS - 1) as f64) as u64);
    bar.set_message(
        printable(&format!(
            "{}, round {round}: {} with {arm}",
            suite.name,
            case.name()
        ))
        .into_owned(),
    );
}

fn exit_of(run: &BenchRun) -> Exit {
    match run.entries().count() {
        _ if run.fails() => Exit::Failed,
        // Cases skip configurations that they are not for, and a shard may be empty.
        entries @ 1.. if entries == run.skipped() => Exit::Device,
        _ if run.inconclusive().is_some() => Exit::Inconclusive,
        _ => Exit::Passed,
    }
}

/// Formats a time as in `2026-11-20T02:17:00Z`.
fn utc(now: SystemTime) -> String {
    let second = now
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
        % 86_400;
    format!(
        "{}T{:02}:{:02}:{:02}Z",
        Date::of(now),
        second / 3600,
        second / 60 % 60,
        second % 60
    )
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn times_are_in_utc() {
        let times = [0, 951_782_400, 1_795_141_020, 4_107_542_399];
        let expected = [
            "1970-01-01T00:00:00Z",
            "2000-02-29T00:00:00Z",
            "2026-11-20T02:17:00Z",
            "2100-02-28T23:59:59Z",
        ];
        assert_eq!(
            times.map(|seconds| utc(UNIX_EPOCH + Duration::from_secs(seconds))),
            expected
        );
    }
}
