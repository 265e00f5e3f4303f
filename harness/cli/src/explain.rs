use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use harness_allocator::{allocator::caching::TorchVersion, units::Bytes};
use harness_explain::categories::CategoryRule;
use harness_explain::causes::{self, ExplainError, Explanation, Options};
use harness_explain::ranks::{self, ExplainedRank, RankDifference};
use harness_explain::state::At;
use harness_report::explain::html::{self, PageData, RankData};
use harness_report::explain::{json, markdown, text};
use harness_report::terminal::Style;
use harness_trace::snapshot::Snapshot;

use super::browser::Browser;
use super::categories::CategoryOptions;
use super::error::{CliError, Failures};
use super::{arguments, device, exit::Exit, jobs, snapshots, terminal};

const EXAMPLES: &str = "Examples:
  harness explain memory_snapshot.pickle
  harness explain memory_snapshot.pickle --memory 80GiB --at peak
  harness explain snapshots/                    all ranks: which ones failed, how they differ
  harness explain memory_snapshot.pickle --format json | jq '.causes[] | {cause, bytes}'
  harness explain memory_snapshot.pickle --categories our_categories.yaml
  harness explain program.trace --memory 24GiB  a trace or an RMM log, replayed in simulation
  harness explain memory_snapshot.pickle --format markdown --out memory.md
  harness explain snapshots/ --format html --out memory.html
  harness explain memory_snapshot.pickle --open  the page memory_snapshot.html in a browser

torch.cuda.memory._dump_snapshot(FILE) writes a snapshot. This code writes one when memory runs out:
  torch.cuda.memory._record_memory_history()
  torch._C._cuda_attach_out_of_memory_observer(
      lambda device, allocated, total, free: torch.cuda.memory._dump_snapshot(\"oom.pickle\"))";

/// Explain the memory of a recorded PyTorch program, by cause and to the byte, and why it ran out.
#[derive(Args)]
#[command(after_help = EXAMPLES, arg_required_else_help = true)]
pub(super) struct Explain {
    /// Memory snapshots of PyTorch, plain or compressed with gzip. Of a folder, the *.pickle,
    /// *.pkl, *.pickle.gz and *.pkl.gz files are read, without subfolders. Allocation traces and
    /// RMM logs need `--memory`.
    #[arg(value_name = "SNAPSHOT", required = true)]
    paths: Vec<PathBuf>,
    /// The device's memory, as in `80GiB` [default: the reserved memory plus the free memory at a
    /// refused request].
    #[arg(long, value_name = "SIZE", value_parser = arguments::memory)]
    memory: Option<Bytes>,
    /// Explain only the device with this index [default: all devices, with details of the one that
    /// ran out of memory, else of the one with the most reserved memory].
    #[arg(long, value_name = "N")]
    device: Option<u32>,
    /// The version of PyTorch that wrote the snapshots [default: the newest one that agrees with
    /// each].
    #[arg(long, value_name = "VERSION", value_parser = device::torch_version)]
    torch: Option<TorchVersion>,
    /// The moment: `oom` (the last refused request), `peak` (of allocated memory), `end`, or the
    /// index of an event, from 0 [default: the out-of-memory error if no allocation follows it,
    /// else the end].
    #[arg(long, value_name = "MOMENT", value_parser = moment)]
    at: Option<At>,
    #[command(flatten)]
    categories: CategoryOptions,
    /// The output format [default: `html` with `--open`, else `text`].
    #[arg(long, value_name = "FORMAT")]
    format: Option<Format>,
    /// Write to this file instead of standard output. The picture of a markdown document goes into
    /// the same folder. With `--open`, the default is the name of the snapshot with the ending
    /// `.html`, in the current folder.
    #[arg(long, value_name = "FILE", value_parser = arguments::output())]
    out: Option<PathBuf>,
    #[command(flatten)]
    browser: Browser,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// For people, on one screen.
    Text,
    /// For programs: one document.
    Json,
    /// For a pull request: markdown, and an SVG picture if `--out` is given.
    Markdown,
    /// For a browser: one offline page with timeline, segments and flame graph.
    Html,
}

fn moment(text: &str) -> Result<At, String> {
    match text {
        "oom" => Ok(At::Oom),
        "peak" => Ok(At::Peak),
        "end" => Ok(At::End),
        number => number
            .parse()
            .map(At::Event)
            .map_err(|_| "a moment is `oom`, `peak`, `end`, or the index of an event".to_owned()),
    }
}

struct Explained {
    name: String,
    explanation: Explanation,
    shown: Option<RankData>,
}

impl Explain {
    pub(super) fn run(mut self) -> Result<Exit, Failures> {
        if self.browser.is_asked_for() {
            self.choose_page()?;
        }
        let files = snapshots::files(&self.paths)?;
        let rules = self.categories.rules()?;
        let made = snapshots::each(&files, |path| self.explain(path, &self.read(path)?, &rules));
        let (explained, failures) = Failures::split(made);
        let explained: Vec<Explained> = explained.into_iter().flatten().collect();
        let reserved = |one: &&Explained| one.explanation.accounts.reserved;
        let most = || explained.iter().rev().max_by_key(reserved);
        let Some(first) = explained
            .iter()
            .find(|one| one.explanation.request.is_some())
            .or_else(most)
        else {
            return Err(Failures(failures));
        };
        self.write(&explained, first)?;
        if let Some(page) = self.out.as_deref().filter(|_| self.browser.is_asked_for()) {
            terminal::message(format_args!("page: {}", page.display()));
            self.browser.show(page);
        }
        // Unreadable files do not prevent the explanation of the others.
        if failures.is_empty() {
            Ok(Exit::Passed)
        } else {
            Err(Failures(failures))
        }
    }

    /// Writes one page about all these snapshots.
    pub(super) fn page(
        paths: Vec<PathBuf>,
        memory: Option<Bytes>,
        out: PathBuf,
    ) -> Result<(), Failures> {
        let (categories, format) = (CategoryOptions::default(), Some(Format::Html));
        Self {
            paths,
            memory,
            device: None,
            torch: None,
            at: None,
            categories,
            format,
            out: Some(out),
            browser: Browser::default(),
        }
        .run()
        .map(drop)
    }

    fn format(&self) -> Format {
        self.format.unwrap_or(Format::Text)
    }

    /// `--open` shows an HTML page in a file.
    fn choose_page(&mut self) -> Result<(), CliError> {
        if *self.format.get_or_insert(Format::Html) != Format::Html {
            return Err(CliError::input(
                "`--open` shows a page, and `--format` requests another document",
                "leave one of them out, or give `--format html`",
            ));
        }
        if self.out.is_none() {
            let name = self.paths.first().and_then(|path| path.file_name());
            let name = name.map(|name| name.to_string_lossy().into_owned());
            let name = name.unwrap_or_else(|| "snapshots".to_owned());
            let page = PathBuf::from(format!("{}.html", snapshots::stem(&name)));
            let text = || harness_base::files::read_to_string(&page);
            if page.exists() && !text().is_ok_and(|text| html::is_page(text.as_bytes())) {
                return Err(CliError::input(
                    format!(
                        "{} exists, and is no page of `harness explain`",
                        page.display()
                    ),
                    "name the page with `--out`",
                ));
            }
            self.out = Some(page);
        }
        Ok(())
    }

    /// Reads a snapshot, or records one from the replay of a trace or an RMM log.
    fn read(&self, path: &Path) -> Result<Snapshot, CliError> {
        match jobs::requests(path, self.memory) {
            Some(requests) => {
                let (requests, memory) = requests?;
                requests
                    .record(memory)
                    .map_err(|error| jobs::of_job(path, &error))
            }
            None => Ok(Snapshot {
                given_torch: self.torch,
                ..snapshots::read(path)?
            }),
        }
    }

    fn explain(
        &self,
        path: &Path,
        snapshot: &Snapshot,
        rules: &[CategoryRule],
    ) -> Result<Vec<Explained>, CliError> {
        let options = Options {
            memory: self.memory,
            at: self.at.unwrap_or_default(),
        };
        let devices = jobs::devices(path, snapshot)?;
        self.device.map_or(Ok(()), |device| {
            jobs::check_device(path, "device", device, &devices)
        })?;
        let name = |device: u32| {
            let file = path.display().to_string();
            if devices.len() > 1 {
                format!("{file} (device {device})")
            } else {
                file
            }
        };
        let explain = |&device: &u32| {
            let explanation = causes::explain_by(snapshot, device, options, rules)
                .map_err(|error| invalid(path, &error))?;
            let name = name(device);
            let shown = (self.format() == Format::Html)
                .then(|| RankData::new(&name, snapshot, &explanation));
            Ok(Explained {
                name,
                explanation,
                shown,
            })
        };
        devices
            .iter()
            .filter(|&&device| self.device.is_none_or(|given| given == device))
            .map(explain)
            .collect()
    }

    fn write(&self, explained: &[Explained], first: &Explained) -> Result<(), CliError> {
        let (style, width) = match self.out {
            Some(_) => (Style::Plain, None),
            None => (terminal::style(), terminal::width_of_output()),
        };
        let named = (first.name.as_str(), &first.explanation);
        let ranks: Vec<ExplainedRank<'_>> = explained
            .iter()
            .map(|one| ExplainedRank {
                name: &one.name,
                explanation: &one.explanation,
            })
            .collect();
        let overview = (ranks.len() > 1).then(|| ranks::overview(&ranks));
        let document = match self.format() {
            Format::Text => match &overview {
                Some(overview) => text::render_ranks(overview, named, style, width),
                None => text::render(named.0, named.1, style, width),
            },
            Format::Json => {
                let documents = ranks
                    .iter()
                    .map(|rank| json::ExplainDocument::new(rank.name, rank.explanation));
                match &overview {
                    Some(overview) => terminal::json(&json::Documents {
                        overview,
                        snapshots: documents.collect(),
                    })?,
                    None => terminal::json(&json::ExplainDocument::new(named.0, named.1))?,
                }
            }
            Format::Markdown => {
                let save = |out: &PathBuf| terminal::save_picture(out, &markdown::draw(named.1));
                let link = self.out.as_ref().map_or(Ok(None), save)?;
                markdown::render(overview.as_ref(), named, link.as_deref())
            }
            Format::Html => {
                let title = if ranks.len() > 1 {
                    format!("{} snapshots", ranks.len())
                } else {
                    first.name.clone()
                };
                let differences = overview
                    .iter()
                    .flat_map(|overview| &overview.differences)
                    .map(RankDifference::sentence)
                    .collect();
                html::page(&PageData::new(
                    title,
                    differences,
                    explained
                        .iter()
                        .filter_map(|one| one.shown.clone())
                        .collect(),
                ))
            }
        };
        match &self.out {
            Some(out) => terminal::save(out, &document),
            None if self.format() == Format::Text => terminal::print(&document),
            None => terminal::print_document(&document),
        }
    }
}

fn invalid(path: &Path, error: &ExplainError) -> CliError {
    CliError::input(
        format!("{}: {error}", path.display()),
        "see `harness explain --help` for `--at` and `--memory`",
    )
}
