//! `harness exec --matrix`: a matrix of runs, whose rows a file keeps.

mod language;
mod table;

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use clap::{Args, FromArgMatches as _};
use harness_allocator::hash::fnv1a;
use harness_allocator::sync::lock;
use harness_base::files::slug;
use harness_base::parallel::in_parallel_by;
use harness_base::temporary;
use harness_base::words::count;
use harness_exec::matrix::{
    MatrixCell, MatrixReport, MatrixRow, ROW_VERSION, RunFigures, by_cell, of_shard,
};
use harness_exec::process::Started;
use harness_exec::trials::copies::Copies;
use harness_exec::trials::identity::{self, Run};
use harness_exec::trials::runner::Runner;
use harness_exec::{host_memory, machine::Machine, setup, setup::Setup, torch};
use harness_gpu_settings::settings::{Settings, Values};
use harness_report::trials::Trials;

use self::language::{PYTHON, Planned};
use self::table::Table;
use super::trials::MANY;
use super::{CliError, Exec, Exit, Failures, Timing, arguments, terminal, values};
use crate::{built, journal::Journal};

pub(crate) use self::table::{is_parquet, merged};

#[derive(Args)]
pub(super) struct MatrixOptions {
    /// Run each program of this YAML file with each combination of its axes, and keep a row of
    /// figures per run. The same command continues after an interruption. Axes are options of
    /// single runs, as `gpu`, `memory`, `python` and `alloc_conf`, and names that commands contain
    /// in braces. `exclude` and `include` are those of GitHub's matrices.
    #[arg(
        long,
        value_name = "FILE",
        help_heading = MANY,
        conflicts_with_all = [
            "addresses", "alloc_conf", "baseline", "command", "context_overhead", "cuda",
            "cudnn_workspace", "device", "devices", "events", "every_fault", "fail", "figures",
            "fresh", "gpu", "junit", "largest", "latency", "least_memory", "leave_free", "memory",
            "nccl_memory", "python", "quiet", "record", "require_gpu", "shared_memory", "snapshot",
            "unmeasured", "values",
        ],
    )]
    matrix: Option<PathBuf>,
    /// With `--matrix`: the file of the rows, one JSON document per line [default: the matrix file
    /// with the ending `.jsonl`, or `.I-N.jsonl` with `--shard`].
    #[arg(
        long,
        value_name = "FILE",
        help_heading = MANY,
        value_parser = arguments::output(),
    )]
    rows: Option<PathBuf>,
    /// With `--matrix`: list the runs whose peak is larger than in these rows, and exit with code 1
    /// if there are any. `--shard` then makes parts that take equally long by their times, so all
    /// shards need the same EARLIER.
    #[arg(long, value_name = "EARLIER", help_heading = MANY)]
    compare: Option<PathBuf>,
    /// With `--matrix`: start each run with these words before its command, as in `--launch 'srun
    /// -n1'`. The folder of the rows must be shared by all machines.
    #[arg(long, value_name = "WORDS", value_parser = launcher, help_heading = MANY)]
    launch: Option<String>,
    /// What `--launch` runs: writes the figures of one run to this file.
    #[arg(long, value_name = "FILE", hide = true)]
    figures: Option<PathBuf>,
}

impl MatrixOptions {
    pub(super) fn files(&self) -> (Option<&Path>, Option<&Path>) {
        (self.matrix.as_deref(), self.figures.as_deref())
    }

    pub(super) fn check_needed(&self) -> Result<(), CliError> {
        let options = [
            ("--rows", self.rows.is_some()),
            ("--compare", self.compare.is_some()),
            ("--launch", self.launch.is_some()),
        ];
        super::require("`--matrix`", self.matrix.is_some(), &options)
    }
}

/// Refuses words that are not split as a shell splits them.
fn launcher(words: &str) -> Result<String, &'static str> {
    match words {
        _ if words.contains(['\'', '"', '\\']) => {
            Err("quotes are not understood: write a script that runs its arguments")
        }
        _ if words.trim().is_empty() => Err("expected a command, as in `srun -n1`"),
        _ => Ok(words.to_owned()),
    }
}

/// The time between two looks of a launched run at the folder of its figures.
const LOOK: Duration = Duration::from_secs(1);

/// A run, and the hash of all that decides it.
struct Job {
    planned: Planned,
    run: String,
}

/// The setups of programs.
#[derive(Default)]
struct Setups(Mutex<HashMap<Vec<String>, Found>>);

/// A setup, or why there is none.
type Found = Result<Arc<Setup>, String>;

impl Setups {
    /// What decides a setup: the words of the command that are programs, other files or commands of
    /// a shell, and the CUDA release.
    fn key(planned: &Planned) -> Vec<String> {
        let is_program = |word: &&String| {
            word.contains(char::is_whitespace)
                || Path::new(word).is_file()
                || torch::in_path(OsStr::new(word)).is_some()
        };
        let cuda = planned
            .options
            .iter()
            .filter(|option| option.starts_with("--cuda="));
        [&planned.cell.program]
            .into_iter()
            .chain(planned.command.first())
            .chain(planned.command.iter().filter(is_program))
            .chain(cuda)
            .cloned()
            .collect()
    }

    fn of(&self, planned: &Planned) -> Found {
        let mut known = lock(&self.0);
        known
            .entry(Self::key(planned))
            .or_insert_with(|| {
                let exec = exec_of(&planned.options, &planned.command)?;
                let setup = exec.setup(&exec.command, None);
                setup.map(Arc::new).map_err(|error| error.to_string())
            })
            .clone()
    }
}

/// The options and the command of a run as `harness exec` reads them.
fn exec_of(options: &[String], command: &[String]) -> Result<Exec, String> {
    let words = options.iter().map(String::as_str).chain(["--"]);
    let words = words.chain(command.iter().map(String::as_str));
    Exec::augment_args(clap::Command::new("exec").no_binary_name(true))
        .try_get_matches_from(words)
        .and_then(|matches| Exec::from_arg_matches(&matches))
        .map_err(|error| reason(&error.to_string()))
}

fn is_same_file(one: &Path, other: &Path) -> bool {
    let [one, other] = [one, other].map(|path| path.canonicalize().ok());
    one.is_some() && one == other
}

/// Why an option is invalid, without the option, which the caller names.
fn reason(error: &str) -> String {
    let text = error.trim_start_matches("error: ");
    let text = text.split("\n\nFor more").next().unwrap_or(text);
    let why = text.split_once(">': ").map_or(text, |(_, why)| why);
    why.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Why the value of an option cannot be used.
fn invalid(option: &str) -> Option<String> {
    match exec_of(&[option.to_owned()], &["true".to_owned()]) {
        Err(why) => Some(why),
        Ok(exec) if exec.events == Some(Timing::Range) => {
            Some("`range` makes two runs: write `instant` and `synchronize` as values".to_owned())
        }
        Ok(_) => None,
    }
}

impl Exec {
    pub(super) fn run_matrix(&self, file: &Path) -> Result<ExitCode, Failures> {
        let (text, planned) = language::read(file, invalid).map_err(CliError::from)?;
        let path = self.rows_of(file)?;
        let earlier = self.matrix.compare.as_deref();
        if let Some(earlier) = earlier.filter(|earlier| is_same_file(earlier, &path)) {
            let message = format!("{}: the rows would replace EARLIER", earlier.display());
            return Err(CliError::input(message, "copy it first").into());
        }
        let earlier = earlier.map(Table::existing).transpose()?;
        let earlier = earlier.map(|table| table.rows);
        let setups = Setups::default();
        let (jobs, of_all) = self.jobs_of(planned, &setups)?;
        let is_own = self.own(&jobs, earlier.as_deref());
        let own: Vec<&Job> = jobs
            .iter()
            .zip(is_own)
            .filter_map(|(job, is_own)| is_own.then_some(job))
            .collect();
        self.many.interruptible(|stop| {
            let mut table = Table::empty(text, of_all);
            let (journal, _lock) = table.continued(&path, &jobs)?;
            let runs = Runs {
                exec: self,
                settled: values::settled()?,
                setups: &setups,
                journal: &journal,
                folder: path.parent().unwrap_or(Path::new("/")),
                stop,
            };
            let rows = runs.make(&own, &by_cell(&table.rows))?;
            table.rows.extend(rows);
            let known = by_cell(&table.rows);
            let done = own.iter().filter_map(|job| known.get(&job.planned.cell));
            let done: Vec<MatrixRow> = done.map(|row| (*row).clone()).collect();
            if stop.load(Ordering::Relaxed) {
                terminal::message(format_args!(
                    "{} of {} are in {}; the same command continues",
                    done.len(),
                    count(own.len(), "row"),
                    path.display()
                ));
                return Ok(Exit::Interrupted);
            }
            table.sort(&jobs);
            table.save(&path)?;
            let report = MatrixReport::new(done, earlier.as_deref());
            self.many.print(&report, Trials::Matrix(&report))?;
            if self.many.format != crate::Format::Json {
                terminal::print(&format!("rows: {}\n", path.display()))?;
            }
            Ok(if report.is_success() {
                Exit::Passed
            } else {
                Exit::Failed
            })
        })
    }

    /// The file of the rows. Its path is absolute, because a launcher may change the folder.
    fn rows_of(&self, matrix: &Path) -> Result<PathBuf, CliError> {
        let default = || match self.many.shard {
            Some(shard) => format!("{}-{}.jsonl", shard.index, shard.count),
            None => "jsonl".to_owned(),
        };
        let given = self.matrix.rows.clone();
        let path = given.unwrap_or_else(|| matrix.with_extension(default()));
        if is_same_file(&path, matrix) {
            let message = format!("{}: the rows would replace the matrix", path.display());
            return Err(CliError::input(
                message,
                "choose another file with `--rows`",
            ));
        }
        std::path::absolute(&path).map_err(CliError::unwritten(&path))
    }

    /// What decides each run, and what decides all of them.
    fn jobs_of(&self, planned: Vec<Planned>, setups: &Setups) -> Result<(Vec<Job>, Run), CliError> {
        let settled = values::settled()?.map_or_else(String::new, |values| values.to_string());
        let mut of_all = identity::variables("", false, std::env::vars_os());
        of_all.extend([
            ("the version of harness".to_owned(), built::identity()),
            ("the default of `--values`".to_owned(), settled),
        ]);
        let common = format!("{of_all:?}");
        let mut files: HashMap<Vec<String>, Run> = HashMap::new();
        let mut jobs = Vec::with_capacity(planned.len());
        for mut planned in planned {
            if let Some(python) = planned.cell.values.get(PYTHON) {
                let words: Vec<OsString> = planned.command.iter().map(OsString::from).collect();
                let words = setup::run_by(Path::new(python), &words).into_iter();
                planned.command = words
                    .map(|word| word.to_string_lossy().into_owned())
                    .collect();
            }
            let of_files = files.entry(planned.command.clone()).or_insert_with(|| {
                let words: Vec<OsString> = planned.command.iter().map(OsString::from).collect();
                identity::code(&words)
            });
            // Another machine of a launcher may have another torch.
            let torch = match self.matrix.launch {
                Some(_) => None,
                None => setups
                    .of(&planned)
                    .ok()
                    .map(|setup| setup.torch_version().to_owned()),
            };
            let Planned {
                options, command, ..
            } = &planned;
            let text = format!("{common} {of_files:?} {options:?} {command:?} {torch:?}");
            of_all.extend(of_files.clone());
            if let (Some(torch), Some(program)) = (torch, planned.command.first()) {
                of_all.insert(format!("the torch of {program}"), torch);
            }
            let run = format!("{:016x}", fnv1a(text.as_bytes()));
            jobs.push(Job { planned, run });
        }
        Ok((jobs, of_all))
    }

    /// Which runs belong to the shard, if there is one.
    fn own(&self, jobs: &[Job], earlier: Option<&[MatrixRow]>) -> Vec<bool> {
        let Some(shard) = self.many.shard else {
            return vec![true; jobs.len()];
        };
        let known = by_cell(earlier.unwrap_or_default());
        let time = |job: &Job| known.get(&job.planned.cell)?.figures.took_ms;
        of_shard(&jobs.iter().map(time).collect::<Vec<_>>(), shard)
    }

    /// What `--launch` runs. Stops if the folder of the figures is removed: then the matrix was
    /// interrupted, and its launcher did not end this run.
    pub(super) fn run_for_matrix(&self, path: &Path) -> Result<ExitCode, Failures> {
        let folder = path.parent().filter(|folder| folder.is_dir());
        self.many.interruptible(|stop| {
            let setup = self.setup(&self.command, None);
            let (ended, is_ended) = mpsc::channel::<()>();
            let watch = move || {
                while is_ended.recv_timeout(LOOK) == Err(mpsc::RecvTimeoutError::Timeout) {
                    let is_removed =
                        folder.is_some_and(|folder| folder.try_exists().is_ok_and(|is| !is));
                    stop.fetch_or(is_removed, Ordering::Relaxed);
                }
            };
            let figures = setup.and_then(|setup| {
                thread::scope(|scope| {
                    scope.spawn(watch);
                    let limit = self.many.limit_or_none();
                    let figures = self.figures(&setup, limit, self.many.logs.as_deref(), stop);
                    drop(ended);
                    figures
                })
            });
            let figures =
                figures.unwrap_or_else(|error| Some(RunFigures::without_run(error.to_string())));
            figures.map_or(Ok(()), |figures| {
                terminal::save(path, terminal::json(&figures)?)
            })?;
            Ok(Exit::Passed)
        })
    }

    /// Makes one run. Returns `None` after an interrupt.
    fn figures(
        &self,
        setup: &Setup,
        limit: Duration,
        logs: Option<&Path>,
        stop: &AtomicBool,
    ) -> Result<Option<RunFigures>, CliError> {
        let run = |settings: Settings| {
            let machine = Machine::Simulated(settings);
            let runner = Runner {
                launch: self.launch(&machine, setup),
                logs,
                limit,
                copies: Copies::none(),
                stop,
            };
            let conf = self.alloc_conf.first().map(String::as_str);
            let run = runner.kept(&machine.trial(conf))?;
            Ok::<_, CliError>(run.map(|(record, observed, took)| {
                let figures = RunFigures {
                    took_ms: Some(u64::try_from(took.as_millis()).unwrap_or(u64::MAX)),
                    torch: setup.torch_version().to_owned(),
                    ..RunFigures::of(&record, &observed)
                };
                (record, figures)
            }))
        };
        let settings = self.settings(setup)?;
        let Some((mut record, figures)) = run(settings.clone())? else {
            return Ok(None);
        };
        record.is_watched &= torch::begins_with_python(&self.command);
        if self.ended_by_values(&record).is_none() {
            return Ok(Some(figures));
        }
        let first = figures.took_ms;
        let again = run(Settings {
            values: Values::Cpu,
            ..settings
        })?;
        Ok(again.map(|(_, figures)| RunFigures {
            with_cpu_values: true,
            took_ms: first
                .zip(figures.took_ms)
                .map(|(first, again)| first + again),
            ..figures
        }))
    }
}

/// Makes runs and keeps their rows.
struct Runs<'a> {
    exec: &'a Exec,
    settled: Option<Values>,
    setups: &'a Setups,
    journal: &'a Journal,
    /// The folder of the rows.
    folder: &'a Path,
    stop: &'a AtomicBool,
}

impl Runs<'_> {
    /// Makes those of the runs whose rows are not known. Returns the rows of the runs that ended.
    fn make(
        &self,
        own: &[&Job],
        known: &HashMap<&MatrixCell, &MatrixRow>,
    ) -> Result<Vec<MatrixRow>, CliError> {
        let todo = own
            .iter()
            .filter(|job| !known.contains_key(&job.planned.cell));
        let todo: Vec<&Job> = todo.copied().collect();
        let devices = todo.iter().filter_map(|job| {
            let devices = job.planned.cell.values.get("devices")?;
            devices.parse().ok()
        });
        let usual = host_memory::usual_jobs(devices.max().unwrap_or(1));
        let bar = terminal::progress(
            true,
            "{bar:30} {pos}/{len} rows, {eta} left",
            Some(own.len() as u64),
        );
        bar.set_position((own.len() - todo.len()) as u64);
        bar.reset_eta();
        // Removes what killed launchers left, and keeps the folders of these runs.
        let held = fs::File::open(self.folder).map_err(CliError::unwritten(self.folder))?;
        if held.try_lock().is_ok() {
            temporary::tidy(self.folder);
        }
        let is_broken = AtomicBool::new(false);
        let make = |job: &&Job| {
            if is_broken.load(Ordering::Relaxed) || self.stop.load(Ordering::Relaxed) {
                return Ok(None);
            }
            let figures = match self.exec.matrix.launch.as_deref() {
                Some(words) => self.launched(words, job),
                None => self.here(job),
            };
            let figures =
                figures.unwrap_or_else(|error| Some(RunFigures::without_run(error.to_string())));
            // A program that ends because of the interrupt has no outcome.
            let Some(figures) = figures.filter(|_| !self.stop.load(Ordering::Relaxed)) else {
                return Ok(None);
            };
            let row = MatrixRow {
                version: ROW_VERSION,
                cell: job.planned.cell.clone(),
                run: job.run.clone(),
                figures,
            };
            let added = self.journal.add(&row);
            is_broken.fetch_or(added.is_err(), Ordering::Relaxed);
            bar.inc(1);
            added.map(|()| Some(row))
        };
        let rows = in_parallel_by(self.exec.many.jobs(usual), &todo, make);
        bar.finish_and_clear();
        Ok(rows?.into_iter().flatten().collect())
    }

    /// The folder for the output of a run, if it is to be kept.
    fn logs(&self, job: &Job) -> Result<Option<PathBuf>, CliError> {
        let folder = |logs: &Path| {
            let name = slug(&job.planned.cell.to_string());
            let folder = logs.join(format!("{name}-{}", job.run));
            fs::create_dir_all(&folder).map_err(CliError::unwritten(&folder))?;
            Ok(folder)
        };
        self.exec.many.logs.as_deref().map(folder).transpose()
    }

    fn here(&self, job: &Job) -> Result<Option<RunFigures>, CliError> {
        let failed = |why: String| Ok(Some(RunFigures::without_run(why)));
        let setup = match self.setups.of(&job.planned) {
            Ok(setup) => setup,
            Err(why) => return failed(why),
        };
        let Planned {
            options, command, ..
        } = &job.planned;
        match exec_of(options, command) {
            Ok(exec) => {
                let exec = Exec {
                    settled_values: self.settled,
                    ..exec
                };
                let logs = self.logs(job)?;
                exec.figures(
                    &setup,
                    self.exec.many.limit_or_none(),
                    logs.as_deref(),
                    self.stop,
                )
            }
            Err(why) => failed(why),
        }
    }

    /// Starts `harness exec` for one run with the words of a launcher, and reads its figures.
    fn launched(&self, words: &str, job: &Job) -> Result<Option<RunFigures>, CliError> {
        let unwritten = CliError::unwritten(self.folder);
        let (files, _lock) = temporary::folder_in(self.folder).map_err(&unwritten)?;
        let [figures, errors] = ["figures.json", "stderr"].map(|name| files.path().join(name));
        let own = std::env::current_exe().map_err(&unwritten)?;
        let mut all: Vec<OsString> = words.split_whitespace().map(OsString::from).collect();
        all.extend([
            own.into(),
            "exec".into(),
            "--figures".into(),
            figures.clone().into(),
        ]);
        if let Some(limit) = self.exec.many.time_limit {
            all.extend(["--time-limit".into(), format!("{}ns", limit.0).into()]);
        }
        if let Some(logs) = self.logs(job)? {
            all.extend(["--logs".into(), logs.into()]);
        }
        all.extend(job.planned.options.iter().map(OsString::from));
        all.push("--".into());
        all.extend(job.planned.command.iter().map(OsString::from));
        let mut command = Command::new(&all[0]);
        command
            .args(&all[1..])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(fs::File::create(&errors).map_err(&unwritten)?);
        let ended = Started::start(&mut command)
            .and_then(|started| started.wait_or_terminate(|| self.stop.load(Ordering::Relaxed)));
        let launcher = all[0].to_string_lossy();
        let failed = |why: String| Ok(Some(RunFigures::without_run(why)));
        match ended {
            Err(error) => failed(format!("`{launcher}` cannot start: {error}")),
            Ok(None) => Ok(None),
            Ok(Some(end)) => {
                let text = fs::read_to_string(&figures).unwrap_or_default();
                let read = serde_json::from_str(&text);
                read.map(Some).or_else(|_| {
                    let errors = fs::read(&errors).unwrap_or_default();
                    let errors = String::from_utf8_lossy(&errors);
                    let last = errors.trim_end().lines().next_back();
                    let last = last.map_or_else(String::new, |last| format!(": {last}"));
                    failed(format!(
                        "`{launcher}` ended with exit code {} and no figures{last}",
                        end.exit_code()
                    ))
                })
            }
        }
    }
}

#[cfg(test)]
mod tests;
