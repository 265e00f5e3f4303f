//! `--baseline`: the exact memory of a program in a file, to be committed and compared. Two
//! `--python`: the memory of a program in two environments.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Display};
use std::path::Path;
use std::{env, io};

use harness_allocator::{stats::BlockState, units::Bytes};
use harness_base::words::count;
use harness_exec::record::{Process, Record};
use harness_exec::torch_record::{PEAK_ALLOCATED, TorchRecord};
use harness_exec::{launch::EndedProgram, summary::change, torch, trials::runner::RunnerError};
use harness_explain::sites::{AllocationSite, SiteKind, Sites};
use harness_explain::{causes, state::At, state::History};
use harness_trace::snapshot::{Action, Snapshot};
use serde::{Deserialize, Serialize};

use super::annotations::{Annotations, LineGrowth};
use crate::error::{CliError, Failures};
use crate::{
    snapshots,
    terminal::{self, JSON_VERSION},
};

/// Differences listed per process.
const MOST: usize = 12;
/// Further runs after a difference. If each run of a program has one of two values at random, all
/// of them have the value of the run after at most one in eight differences.
const REPEATS: usize = 3;
/// The call site of all bytes at the peak of a process that wrote no snapshot, as one that ended
/// without exit handlers.
const UNKNOWN: &str = "unknown: the process wrote no snapshot";
/// The prefix of a call site without Python frames. The site of the previous allocation follows it.
const AFTER: &str = "after ";

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Baseline {
    version: u32,
    /// torch, its settings and those of the machine, as in `gpu=h100-80`.
    settings: Vec<String>,
    /// The versions of the libraries other than torch that allocated, by name. They are known after
    /// the run. Earlier versions did not record them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    libraries: BTreeMap<String, String>,
    processes: BTreeMap<String, Figures>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Figures {
    /// `None` if a library other than torch does not publish it, as the next two optional figures.
    #[serde(skip_serializing_if = "Option::is_none")]
    peak_allocated: Option<u64>,
    peak_reserved: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    retries: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    out_of_memory_errors: Option<u64>,
    driver_allocations: u64,
    driver_frees: u64,
    failed_allocations: u64,
    /// Peaks of page-locked memory of the host. Earlier versions did not record them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pinned_allocated: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pinned_reserved: Option<u64>,
    /// How often freed memory waited for another stream, if it did: then the peaks depend on the
    /// timing of the GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    waits_of_frees: Option<u64>,
    /// Reads of values that nothing computed. With any, branches may have gone another way than on
    /// a GPU.
    #[serde(default)]
    uncomputed_reads: u64,
    /// Allocated bytes at the allocated peak, by call site.
    at_peak: BTreeMap<Place, u64>,
}

/// A call site. In the file it is text, as in `train.py:21 step`.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
struct Place {
    /// Relative to the current folder, or to the folder of Python packages.
    file: String,
    /// 0 if unknown.
    line: u32,
    function: String,
}

/// The allocations and frees of a process, in order: the requested bytes and the call site of the
/// allocation.
type Events = Vec<(Action, u64, Place)>;

/// A run: the content of the baseline, and what explains differences.
struct Observed {
    baseline: Baseline,
    events: BTreeMap<String, Events>,
}

/// The comparison that `--baseline` and `--update` request.
pub(super) struct Comparison<'a> {
    path: &'a Path,
    settings: Vec<String>,
    /// `None` with `--update`.
    old: Option<Baseline>,
}

impl From<String> for Place {
    fn from(text: String) -> Self {
        let parse = || {
            let (file, rest) = text.rsplit_once(':')?;
            let (line, function) = rest.split_once(' ').unwrap_or((rest, ""));
            Some(Self {
                file: file.to_owned(),
                line: line.parse().ok()?,
                function: function.to_owned(),
            })
        };
        parse().unwrap_or_else(|| Self {
            file: text,
            ..Self::default()
        })
    }
}

impl From<Place> for String {
    fn from(place: Place) -> Self {
        place.to_string()
    }
}

impl Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            file,
            line,
            function,
        } = self;
        match (line, function.as_str()) {
            (0, _) => write!(f, "{file}"),
            (_, "") => write!(f, "{file}:{line}"),
            _ => write!(f, "{file}:{line} {function}"),
        }
    }
}

impl Place {
    /// `true` if the line itself allocates, not code without Python frames after it.
    fn is_line(&self) -> bool {
        self.line > 0 && !self.file.starts_with(AFTER)
    }

    fn sentence(&self, old: u64, new: u64) -> String {
        let code = if self.is_line() { "" } else { "code " };
        format!(
            "{code}{self} allocates {}",
            change(" at the peak", old, new)
        )
    }

    fn of(site: &AllocationSite) -> Self {
        let (Some(file), Some(line)) = (&site.file, site.line) else {
            return Self::from(site.name.clone());
        };
        let packages = ["/site-packages/", "/dist-packages/"]
            .iter()
            .find_map(|folder| Some(file.rsplit_once(folder)?.1));
        let here = || {
            Some(
                Path::new(file)
                    .strip_prefix(env::current_dir().ok()?)
                    .ok()?
                    .to_str()?
                    .to_owned(),
            )
        };
        let file = packages
            .map(str::to_owned)
            .or_else(here)
            .unwrap_or_else(|| file.clone());
        let function = site
            .function
            .clone()
            .filter(|function| function != "<module>")
            .unwrap_or_default();
        Self {
            file: if site.kind == SiteKind::After {
                format!("{AFTER}{file}")
            } else {
                file
            },
            line,
            function,
        }
    }
}

impl Figures {
    /// The figures with their names, and whether they are bytes. `None` is unknown.
    fn all(&self) -> [(&'static str, Option<u64>, bool); 11] {
        // These are missing if a process used none.
        let or_none = |figure: Option<u64>| Some(figure.unwrap_or_default());
        [
            ("peak allocated", self.peak_allocated, true),
            ("peak reserved", Some(self.peak_reserved), true),
            ("retries", self.retries, false),
            ("out-of-memory errors", self.out_of_memory_errors, false),
            ("driver allocations", Some(self.driver_allocations), false),
            ("driver frees", Some(self.driver_frees), false),
            (
                "failed driver allocations",
                Some(self.failed_allocations),
                false,
            ),
            (
                "reads of values that nothing computed",
                Some(self.uncomputed_reads),
                false,
            ),
            (
                "peak allocated of pinned host memory",
                or_none(self.pinned_allocated),
                true,
            ),
            (
                "peak reserved of pinned host memory",
                or_none(self.pinned_reserved),
                true,
            ),
            (
                "waits of freed memory for another stream",
                or_none(self.waits_of_frees),
                false,
            ),
        ]
    }

    /// Reads the figures and the events of a process, over all devices. A process that was killed
    /// wrote no snapshot of its end.
    fn read(process: &Process, snapshot: Option<&Path>) -> Result<(Self, Events), CliError> {
        // Without torch or another library, there is no caching allocator.
        let sum = |name: &str| match &process.torch {
            None => Some(0),
            Some(torch) => torch.figure(name),
        };
        let mut figures = Self {
            retries: sum("num_alloc_retries"),
            out_of_memory_errors: sum("num_ooms"),
            ..Self::default()
        };
        let reported = process.torch.as_ref().filter(|_| process.has_reported());
        if let Some(host) = reported.and_then(TorchRecord::host_memory) {
            (figures.pinned_allocated, figures.pinned_reserved) = (
                host.peak_allocated.map(Bytes::get),
                Some(host.peak_reserved.0),
            );
        }
        figures.waits_of_frees = Some(process.waits_of_frees).filter(|waits| *waits > 0);
        figures.uncomputed_reads = process.uncomputed_reads;
        for device in &process.devices {
            figures.peak_reserved += device.peak_reserved;
            figures.driver_allocations += device.mallocs;
            figures.driver_frees += device.frees;
            figures.failed_allocations += device.failed;
        }
        let mut events = Vec::new();
        let Some(path) = snapshot else {
            figures.peak_allocated = sum(PEAK_ALLOCATED);
            // Other libraries have no snapshots.
            let is_torch = process
                .torch
                .as_ref()
                .is_none_or(|torch| torch.other_library.is_none());
            let peak = figures.peak_allocated.filter(|peak| *peak > 0 && is_torch);
            let at = Place::from(UNKNOWN.to_owned());
            figures.at_peak.extend(peak.map(|peak| (at, peak)));
            return Ok((figures, events));
        };
        let snapshot = snapshots::read(path)?;
        for device in snapshot.devices() {
            let peak = figures.add_peak(&snapshot, device, &mut events);
            // The program can reset the peak of torch, and a long history lacks its beginning.
            let stats = process
                .torch
                .as_ref()
                .and_then(|torch| torch.memory_stats.get(&device.to_string()));
            let of_torch = stats
                .and_then(|stats| stats.get(PEAK_ALLOCATED)?.as_u64())
                .unwrap_or_default();
            *figures.peak_allocated.get_or_insert(0) += peak.0.max(of_torch);
        }
        Ok((figures, events))
    }

    /// Adds the call sites at the peak of a device, and appends its events. Returns the peak.
    fn add_peak(&mut self, snapshot: &Snapshot, device: u32, events: &mut Events) -> Bytes {
        let history = History::new(snapshot, device, causes::config(snapshot));
        let Ok(moment) = history.moment(At::Peak) else {
            return Bytes::ZERO;
        };
        let sites = Sites::new(snapshot, device);
        let places: Vec<Place> = sites.all().iter().map(Place::of).collect();
        for (index, event) in history.events().iter().enumerate() {
            let allocated_by = if event.action == Action::Alloc {
                Some(index as u32)
            } else {
                history.freed(index).allocated
            };
            if matches!(event.action, Action::Alloc | Action::FreeRequested) {
                let site = sites.of_block(allocated_by, event.stack);
                events.push((event.action, event.size.0, places[site.0 as usize].clone()));
            }
        }
        let state = history.state(moment.event);
        let blocks = state
            .segments
            .iter()
            .flat_map(|segment| &segment.blocks)
            .filter(|block| block.state == BlockState::Allocated);
        let mut peak = Bytes::ZERO;
        for block in blocks {
            let site = sites.of_block(state.origin(block.address).allocated, block.stack);
            *self
                .at_peak
                .entry(places[site.0 as usize].clone())
                .or_default() += block.size.0;
            peak += block.size;
        }
        peak
    }

    /// The call sites whose bytes differ, most first.
    fn changed_sites(&self, new: &Self) -> Vec<(Place, u64, u64)> {
        let mut sites = changed_sites(&self.at_peak, &new.at_peak);
        sites.sort_by_key(|(_, old, new)| Reverse(old.abs_diff(*new)));
        sites
    }

    fn differences(&self, new: &Self) -> Vec<String> {
        let figures = self
            .all()
            .into_iter()
            .zip(new.all())
            .filter(|(old, new)| old != new);
        let figure = |((name, old, is_bytes), (_, new, _)): ((_, Option<u64>, _), (_, _, _))| {
            if let (Some(old), Some(new), true) = (old, new, is_bytes) {
                return format!("{name} is {}", change("", old, new));
            }
            let [new, old] = [new, old].map(|figure| match figure {
                None => "unknown".to_owned(),
                Some(figure) if is_bytes => Bytes(figure).to_string(),
                Some(figure) => figure.to_string(),
            });
            format!("{name}: {new} instead of {old}")
        };
        let mut differences: Vec<String> = figures.map(figure).collect();
        let sites = self.changed_sites(new);
        let sentence = |(place, old, new): &(Place, u64, u64)| place.sentence(*old, *new);
        differences.extend(sites.iter().map(sentence));
        let more = differences.len().saturating_sub(MOST);
        if more > 0 {
            differences.truncate(MOST);
            differences.push(format!("and {more} more"));
        }
        differences
    }
}

/// Lines of a function, with their bytes.
type Lines<'a> = Vec<(&'a Place, u64)>;

/// A line before and after a change. One of them is `None` if the line was added or removed.
type Pair<'a> = (Option<(&'a Place, u64)>, Option<(&'a Place, u64)>);

/// Returns the call sites whose bytes differ, with the old and new bytes. The lines of a function
/// move when code above them changes, so they are matched by their order in the function.
fn changed_sites(old: &BTreeMap<Place, u64>, new: &BTreeMap<Place, u64>) -> Vec<(Place, u64, u64)> {
    let mut functions: BTreeMap<(&str, &str), [Lines<'_>; 2]> = BTreeMap::new();
    for (side, places) in [old, new].into_iter().enumerate() {
        for (place, bytes) in places {
            functions.entry((&place.file, &place.function)).or_default()[side]
                .push((place, *bytes));
        }
    }
    let bytes = |line: Option<(&Place, u64)>| line.map_or(0, |(_, bytes)| bytes);
    functions
        .values()
        .flat_map(|[old, new]| pairs(old, new))
        .filter(|(old, new)| bytes(*old) != bytes(*new))
        .filter_map(|(old, new)| Some((new.or(old)?.0.clone(), bytes(old), bytes(new))))
        .collect()
}

/// Pairs the lines of a function. If all lines moved equally far, the code has its old shape, so
/// each line has its counterpart. Otherwise, most pairs have equal bytes; of such pairings, one
/// with the most pairs counts, and then with the most lines that did not move.
fn pairs<'a>(old: &[(&'a Place, u64)], new: &[(&'a Place, u64)]) -> Vec<Pair<'a>> {
    let moved = |(old, new): (&(&Place, u64), &(&Place, u64))| old.0.line.wrapping_sub(new.0.line);
    let mut distances = old.iter().zip(new).map(moved);
    let first = distances.next();
    if old.len() == new.len() && distances.all(|distance| Some(distance) == first) {
        let both = old.iter().zip(new);
        return both.map(|(old, new)| (Some(*old), Some(*new))).collect();
    }
    let score = |old: &(&Place, u64), new: &(&Place, u64)| {
        [old.1 == new.1, true, old.0.line == new.0.line].map(u32::from)
    };
    // The best score of the lines from here to the end.
    let mut best = vec![vec![[0; 3]; new.len() + 1]; old.len() + 1];
    let paired = |best: &[Vec<[u32; 3]>], at: usize, to: usize| {
        let (here, rest) = (score(&old[at], &new[to]), best[at + 1][to + 1]);
        [0, 1, 2].map(|part| here[part] + rest[part])
    };
    for at in (0..old.len()).rev() {
        for to in (0..new.len()).rev() {
            let unpaired = best[at + 1][to].max(best[at][to + 1]);
            best[at][to] = unpaired.max(paired(&best, at, to));
        }
    }
    let (mut at, mut to, mut pairs) = (0, 0, Vec::new());
    while at < old.len() && to < new.len() {
        let score = best[at][to];
        if score == paired(&best, at, to) {
            pairs.push((Some(old[at]), Some(new[to])));
            (at, to) = (at + 1, to + 1);
        } else if score == best[at + 1][to] {
            pairs.push((Some(old[at]), None));
            at += 1;
        } else {
            pairs.push((None, Some(new[to])));
            to += 1;
        }
    }
    pairs.extend(old[at..].iter().map(|line| (Some(*line), None)));
    pairs.extend(new[to..].iter().map(|line| (None, Some(*line))));
    pairs
}

/// Returns the settings that figures depend on. `machine` are those of the simulated GPUs.
pub(super) fn settings(version: &str, machine: &str, alloc_conf: Option<&str>) -> Vec<String> {
    let inherited =
        || torch::settings_of_allocator(version, |name| env::var(name).ok()).map(|(_, conf)| conf);
    let conf = alloc_conf
        .map(str::to_owned)
        .or_else(inherited)
        .unwrap_or_default();
    let of_torch = [format!("torch={version}"), format!("alloc_conf={conf}")];
    // Machines have cuDNN and tables in different folders.
    let without_folder = |setting: &str| match setting
        .strip_prefix("cudnn_workspace=")
        .map(|file| Path::new(file).file_name())
    {
        Some(Some(name)) => format!("cudnn_workspace={}", name.display()),
        _ => setting.to_owned(),
    };
    of_torch
        .into_iter()
        .chain(machine.split(';').map(without_folder))
        .collect()
}

fn setting(name: &str, value: &str) -> String {
    format!("{name}={value}")
}

/// Returns the settings that the others lack.
fn only(settings: &[String], others: &[String]) -> String {
    let own: Vec<&str> = settings
        .iter()
        .filter(|setting| !others.contains(setting))
        .map(String::as_str)
        .collect();
    if own.is_empty() {
        "no other".to_owned()
    } else {
        own.join(", ")
    }
}

/// The error of a run with other settings than those of its baseline.
fn of_other_settings(file: &Path, old: &[String], new: &[String]) -> CliError {
    let message = format!(
        "{}: the settings differ: the baseline has {}; this run has {}",
        file.display(),
        only(old, new),
        only(new, old)
    );
    CliError::input(
        message,
        "use the settings of the baseline, name another file, or write it again with `--update`",
    )
}

/// Prints what differs between two runs, which have these settings. Returns whether anything does.
pub(super) fn differ(runs: &[(EndedProgram, Record, Vec<String>)]) -> Result<bool, Failures> {
    let read = |(ended, record, settings): &(EndedProgram, Record, Vec<String>)| {
        Observed::read(record, ended.folder(), settings)
    };
    let runs = runs
        .iter()
        .map(|run| Ok(read(run)?.baseline))
        .collect::<Result<Vec<_>, CliError>>()?;
    let [old, new] = runs.as_slice() else {
        return Ok(false);
    };
    let differences = old.differences(new);
    let all = |baseline: &Baseline| -> Vec<String> {
        let libraries = baseline.libraries.iter();
        let versions = libraries.map(|(name, version)| setting(name, version));
        baseline.settings.iter().cloned().chain(versions).collect()
    };
    let (old, new) = (all(old), all(new));
    let settings = match (only(&new, &old), only(&old, &new)) {
        (new, old) if new == old => "equal settings".to_owned(),
        (new, old) => format!("{new} instead of {old}"),
    };
    let lines = if differences.is_empty() {
        vec!["no difference".to_owned()]
    } else {
        differences.clone()
    };
    terminal::message(format_args!("\n{settings}:\n  {}", lines.join("\n  ")));
    Ok(!differences.is_empty())
}

impl Baseline {
    /// Reads a baseline for a run with these settings.
    fn read(path: &Path, settings: &[String]) -> Result<Self, CliError> {
        let file = path.display();
        let text =
            harness_base::files::read_to_string(path).map_err(|error| match error.kind() {
                io::ErrorKind::NotFound => CliError::input(
                    format!("{file}: there is no such baseline"),
                    "`--update` writes it",
                ),
                _ => CliError::input(
                    format!("{file}: {error}"),
                    "name a file that `--baseline FILE --update` wrote",
                ),
            })?;
        let baseline: Self = serde_json::from_str(&text).map_err(|error| {
            let (line, column) = (error.line(), error.column());
            let error = error
                .to_string()
                .replace(&format!(" at line {line} column {column}"), "");
            let message = format!("{file}:{line}:{column}: this is not a baseline: {error}");
            CliError::input(
                message,
                "name a file that `--baseline FILE --update` wrote, or write \
                 it again with `--update`",
            )
        })?;
        if baseline.version != JSON_VERSION {
            let message = format!(
                "{file}: this harness reads baselines of version {JSON_VERSION}, not {}",
                baseline.version
            );
            return Err(CliError::input(message, "use the harness that wrote it"));
        }
        if baseline.settings == settings {
            return Ok(baseline);
        }
        Err(of_other_settings(path, &baseline.settings, settings))
    }

    /// Returns the versions that differ, of libraries that both runs used.
    fn other_versions(&self, new: &Self) -> [Vec<String>; 2] {
        let both = |name: &&String| new.libraries.contains_key(*name);
        let names: Vec<&String> = self.libraries.keys().filter(both).collect();
        let of = |baseline: &Self| {
            let version = |name: &&String| setting(name, &baseline.libraries[*name]);
            names.iter().map(version).collect()
        };
        [of(self), of(new)]
    }

    /// The lines that allocate more, with a sentence. A line of several processes is there once.
    fn grown(&self, new: &Self) -> Vec<LineGrowth> {
        let none = Figures::default();
        let changed = |(name, new): (&String, &Figures)| {
            self.processes.get(name).unwrap_or(&none).changed_sites(new)
        };
        let mut sites: Vec<(Place, u64, u64)> = new
            .processes
            .iter()
            .flat_map(changed)
            .filter(|(place, old, new)| new > old && place.is_line())
            .collect();
        sites.sort_by_key(|(_, old, new)| Reverse(new - old));
        let mut seen = BTreeSet::new();
        sites.retain(|(place, ..)| seen.insert((place.file.clone(), place.line)));
        let growth = |(place, old, new): (Place, u64, u64)| LineGrowth {
            message: place.sentence(old, new),
            file: place.file,
            line: place.line,
        };
        sites.into_iter().map(growth).collect()
    }

    /// Lists all differences. Those of several processes begin with the process.
    fn differences(&self, new: &Self) -> Vec<String> {
        let mut differences = Vec::new();
        let names: BTreeSet<&String> = self.processes.keys().chain(new.processes.keys()).collect();
        for name in &names {
            let who = if names.len() > 1 {
                format!("{name}: ")
            } else {
                String::new()
            };
            match (self.processes.get(*name), new.processes.get(*name)) {
                (Some(old), Some(new)) => differences.extend(
                    old.differences(new)
                        .into_iter()
                        .map(|line| format!("{who}{line}")),
                ),
                (Some(_), None) => differences.push(format!("{name} does not use the GPU")),
                (None, _) => differences.push(format!("{name} uses the GPU, unlike before")),
            }
        }
        differences
    }
}

impl<'a> Comparison<'a> {
    /// Reads the baseline, unless it is to be written.
    pub(super) fn new(
        path: &'a Path,
        settings: Vec<String>,
        is_update: bool,
    ) -> Result<Self, CliError> {
        let old = if is_update {
            None
        } else {
            Some(Baseline::read(path, &settings)?)
        };
        Ok(Self {
            path,
            settings,
            old,
        })
    }

    /// Compares a run with the baseline or writes the baseline, and prints the outcome. `repeat`
    /// runs the program again. Returns the differences.
    pub(super) fn check(
        self,
        record: &Record,
        run: &Path,
        annotations: &Annotations,
        repeat: impl FnMut() -> Result<(EndedProgram, Record), Failures>,
    ) -> Result<Vec<String>, Failures> {
        let mut grown = Vec::new();
        let differences = self.compare(record, run, &mut grown, repeat)?;
        // Files of an earlier run are out of date also if this run shows nothing.
        annotations.write(&grown)?;
        Ok(differences)
    }

    /// Reads a run. Fails if a library has another version than in the baseline.
    fn observe(&self, record: &Record, run: &Path) -> Result<Observed, CliError> {
        let new = Observed::read(record, run, &self.settings)?;
        if let Some(old) = &self.old
            && let [old, new] = old.other_versions(&new.baseline)
            && old != new
        {
            return Err(of_other_settings(self.path, &old, &new));
        }
        Ok(new)
    }

    /// Like [`Self::check`]. `grown` gets the lines that allocate more, unless the program is
    /// random.
    fn compare(
        self,
        record: &Record,
        run: &Path,
        grown: &mut Vec<LineGrowth>,
        mut repeat: impl FnMut() -> Result<(EndedProgram, Record), Failures>,
    ) -> Result<Vec<String>, Failures> {
        let file = self.path.display();
        if let Some(unreported) = record.unreported() {
            terminal::message(format_args!(
                "baseline: {file} is not {}: {unreported}",
                if self.old.is_some() {
                    "compared"
                } else {
                    "written"
                }
            ));
            return Ok(vec![unreported]);
        }
        let new = self.observe(record, run)?;
        let differences = self.old.as_ref().map(|old| old.differences(&new.baseline));
        if differences.as_ref().is_some_and(Vec::is_empty) {
            terminal::message(format_args!("baseline: no difference from {file}"));
            return Ok(Vec::new());
        }
        if differences.is_none() && record.exit_code != 0 {
            terminal::message(format_args!(
                "baseline: {file} is not written, because the program ended with exit code {}",
                record.exit_code
            ));
            return Ok(Vec::new());
        }
        let runs = if differences.is_some() { REPEATS } else { 1 };
        let mut unequal = None;
        for _ in 0..runs {
            let (ended, repeated) = repeat()?;
            let again = Observed::read(&repeated, ended.folder(), &self.settings)?;
            unequal = new.first_difference(&again);
            if unequal.is_some() {
                break;
            }
        }
        let random = unequal
            .as_ref()
            .map(|first| format!("the program is not deterministic: {first}"));
        let Some(differences) = differences else {
            if let Some(random) = random {
                terminal::message(format_args!("baseline: {file} is not written: {random}"));
                return Ok(vec![random]);
            }
            terminal::save(self.path, terminal::json(&new.baseline)?)?;
            terminal::message(format_args!("baseline: {file}"));
            return Ok(Vec::new());
        };
        if let Some(old) = self.old.filter(|_| random.is_none()) {
            *grown = old.grown(&new.baseline);
        }
        let cause = random.unwrap_or_else(|| {
            format!("{REPEATS} further runs have the same figures; `--update` accepts them")
        });
        terminal::message(format_args!(
            "baseline: {file} differs:\n  {}\n{cause}",
            differences.join("\n  ")
        ));
        Ok(differences
            .into_iter()
            .chain(unequal.map(|_| cause))
            .collect())
    }
}

impl Observed {
    /// Reads a run from its folder.
    fn read(record: &Record, run: &Path, settings: &[String]) -> Result<Self, CliError> {
        let snapshots = record.snapshots(run).map_err(RunnerError::Lost)?;
        let torch = |process: &Process| {
            process
                .torch
                .as_ref()
                .map(|torch| (torch.rank.clone(), torch.started))
                .unwrap_or_default()
        };
        let mut used: Vec<&Process> = record
            .processes
            .iter()
            .filter(|of| of.devices.iter().any(|device| device.mallocs > 0))
            .collect();
        used.sort_by_cached_key(|process| (torch(process).1, process.pid));
        let libraries = versions(&used);
        let (mut processes, mut events) = (BTreeMap::new(), BTreeMap::new());
        for (number, process) in (1..).zip(used) {
            let snapshot = snapshots
                .iter()
                .find(|snapshot| snapshot.pid == process.pid && !snapshot.is_of_error);
            let (figures, made) =
                Figures::read(process, snapshot.map(|snapshot| snapshot.path.as_path()))?;
            let of_rank = torch(process).0.map(|rank| format!("rank {rank}"));
            let name = of_rank
                .filter(|name| !processes.contains_key(name))
                .unwrap_or_else(|| format!("process {number}"));
            events.insert(name.clone(), made);
            processes.insert(name, figures);
        }
        Ok(Self {
            baseline: Baseline {
                version: JSON_VERSION,
                settings: settings.to_vec(),
                libraries,
                processes,
            },
            events,
        })
    }

    /// Describes the first allocation or free that differs in a repeated run, or the first figure
    /// if no recorded one does; `None` if the figures agree.
    fn first_difference(&self, again: &Self) -> Option<String> {
        let figures = self.baseline.differences(&again.baseline);
        let figure = figures.into_iter().next()?;
        let shown = |event: Option<&(Action, u64, Place)>| match event {
            Some((Action::Alloc, size, place)) => format!("allocates {size} B at {place}"),
            Some((_, size, place)) => format!("frees {size} B allocated at {place}"),
            None => "ends".to_owned(),
        };
        let first = self.events.iter().find_map(|(name, made)| {
            let repeated = again.events.get(name)?;
            let index = (0..made.len().max(repeated.len()))
                .find(|index| made.get(*index) != repeated.get(*index))?;
            let earlier = made[..index.min(made.len())]
                .iter()
                .filter(|(action, ..)| *action == Action::Alloc)
                .count();
            let [first, second] = [made, repeated].map(|all| shown(all.get(index)));
            Some(format!(
                "after {}, {name} {first}; in another run it {second}",
                count(earlier as u64, "allocation")
            ))
        });
        Some(first.unwrap_or_else(|| format!("in another run, {figure}")))
    }
}

/// The versions of the libraries other than torch. Processes may use several.
fn versions(processes: &[&Process]) -> BTreeMap<String, String> {
    let mut found = BTreeMap::<&String, BTreeSet<&str>>::new();
    for (name, version) in processes
        .iter()
        .filter_map(|process| process.torch.as_ref()?.other_library.as_ref())
        .flat_map(|library| &library.versions)
    {
        found.entry(name).or_default().insert(version);
    }
    let joined = |(name, versions): (&String, BTreeSet<&str>)| {
        let versions: Vec<&str> = versions.into_iter().collect();
        (name.clone(), versions.join(" and "))
    };
    found.into_iter().map(joined).collect()
}

#[cfg(test)]
mod tests;
