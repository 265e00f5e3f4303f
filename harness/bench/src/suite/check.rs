use std::io::{ErrorKind, Read};
use std::{collections::BTreeMap, path::Path};

use harness_allocator::hash::fnv1a;
use harness_allocator::units::{Bytes, Nanos};
use harness_trace::trace;

use super::wire::{
    EmptyCacheWire, FileText, KindWire, LatencyWire, MAX_BLOCKS, MAX_ROUNDS, MAX_STREAMS,
    MAX_THREADS, MeasureWire, RecordStreamWire, RoundsWire, SUITE, SizesWire, SuiteWire,
    ThreadsWire, percent,
};
use super::{Case, LatencyCase, Measure, Rounds, Suite};
use crate::record::Point;
use harness_base::{excerpt::shortened, packed};

use harness_language::arms;
use harness_language::error::{FileError, Problem, choices};
use harness_language::fields::{about, memory, version};
use harness_language::located::{Located, Position};
use harness_language::text::{SizeText, bounded, duration, positive_size};
use harness_language::yaml::{self, MAX_FILE};
use harness_scenario::{SCENARIO, Scenario};

const DEFAULT_THRESHOLD: f64 = 0.05;
const DEFAULT_PRECISION: f64 = 0.02;
const DEFAULT_BUDGET: Nanos = Nanos::millis(10_000);
const DEFAULT_ROUNDS: Rounds = Rounds {
    least: 10,
    most: 200,
};
/// `kMinLargeAlloc` of PyTorch's `c10/cuda/CUDACachingAllocator.h`: each request of at least this
/// size gets its own segment.
const OWN_SEGMENT: Bytes = Bytes::mib(10);
const SMALL_REQUEST: Bytes = Bytes(512);
const LARGE_REQUEST: Bytes = Bytes::mib(2);

pub(super) enum Refused {
    /// The suite's text is invalid.
    Here(Problem),
    /// A referenced scenario is invalid.
    InFile(Box<FileError>),
}

impl From<Problem> for Refused {
    fn from(problem: Problem) -> Self {
        Self::Here(problem)
    }
}

pub(super) fn check(wire: &SuiteWire, source: &str, path: &Path) -> Result<Suite, Refused> {
    version(wire.version.as_ref())?;
    let about = about(&wire.about, SUITE.noun)?;
    let memory = memory(&wire.needs.memory)?;
    let threshold = wire
        .threshold
        .as_ref()
        .map_or(Ok(DEFAULT_THRESHOLD), percent)?;
    let precision = wire
        .precision
        .as_ref()
        .map_or(Ok(DEFAULT_PRECISION), percent)?;
    let budget = wire.budget.as_ref().map_or(Ok(DEFAULT_BUDGET), duration)?;
    let rounds = wire.rounds.as_ref().map_or(Ok(DEFAULT_ROUNDS), rounds)?;
    not_empty(
        &wire.arms,
        "a suite needs at least one arm",
        "as in `arms: [caching, direct]`",
    )?;
    let folder = path.parent().unwrap_or(Path::new(""));
    let arms = arms::check(None, Some(&wire.arms), source, folder)?;
    not_empty(
        &wire.time,
        "a suite needs at least one case",
        "as in `time: [latency: { sizes: [2MiB] }]`",
    )?;
    let mut checker = Checker {
        folder,
        memory,
        cases: Vec::new(),
        seen: BTreeMap::new(),
    };
    for measure in &wire.time.value {
        checker.measure(measure)?;
    }
    let name = path.file_stem().map_or_else(
        || SUITE.noun.to_owned(),
        |stem| stem.to_string_lossy().into_owned(),
    );
    let (cases, headline) = (checker.cases, wire.headline.unwrap_or(false));
    Ok(Suite {
        name,
        path: path.to_owned(),
        about,
        memory,
        threshold,
        precision,
        budget,
        headline,
        rounds,
        arms,
        cases,
    })
}

fn rounds(wire: &RoundsWire) -> Result<Rounds, Problem> {
    let number = |given, what| {
        bounded(given, what, 1..=MAX_ROUNDS).map(|number| u32::try_from(number).unwrap_or(u32::MAX))
    };
    let rounds = Rounds {
        least: number(&wire.least, "least")?,
        most: number(&wire.most, "most")?,
    };
    if rounds.least <= rounds.most {
        return Ok(rounds);
    }
    let message = format!(
        "`most` is {}, which is below `least`, {}",
        rounds.most, rounds.least
    );
    Err(Problem::new(wire.most.at, message)
        .see(wire.least.at, "least")
        .help("as in `rounds: { least: 10, most: 200 }`"))
}

fn not_empty<T>(list: &Located<Vec<T>>, message: &str, help: &str) -> Result<(), Problem> {
    if list.value.is_empty() {
        Err(Problem::new(list.at, message).help(help))
    } else {
        Ok(())
    }
}

struct Checker<'a> {
    folder: &'a Path,
    memory: Bytes,
    cases: Vec<Case>,
    seen: BTreeMap<String, Position>,
}

impl Checker<'_> {
    fn measure(&mut self, wire: &Located<MeasureWire>) -> Result<(), Refused> {
        let at = wire.at;
        let kind = match &wire.value {
            MeasureWire::Kind(kind) => kind,
            MeasureWire::Bare(name) => return Err(bare(at, name).into()),
        };
        match kind {
            KindWire::Latency(latency) => self.latency(latency)?,
            KindWire::Trace(trace) => self.trace(&trace.file)?,
            KindWire::Scenario(scenario) => self.scenario(&scenario.file)?,
            KindWire::Recovery(SizesWire { sizes }) => {
                for (at, size) in self.sizes(sizes, 2)? {
                    if self.memory.0 / size.0 > MAX_BLOCKS {
                        let message = format!(
                            "more than {MAX_BLOCKS} requests of {size} fit in {}",
                            self.memory
                        );
                        return Err(Problem::new(at, message).help("name a larger size").into());
                    }
                    let measure = Measure::Recovery { size };
                    self.add(at, "recovery", Some(by_size(size)), measure, "")?;
                }
            }
            KindWire::Pipeline(SizesWire { sizes }) => {
                for (at, size) in self.sizes(sizes, 2)? {
                    let measure = Measure::Pipeline { size };
                    self.add(at, "pipeline", Some(by_size(size)), measure, "")?;
                }
            }
            KindWire::EmptyCache(EmptyCacheWire { segments, size }) => {
                let size = self.size_or(size.as_ref(), OWN_SEGMENT)?;
                for (at, segments) in numbers(segments, "segments", 1, MAX_BLOCKS)? {
                    self.fits(at, size, segments)?;
                    let point = Some(by_count("segments", segments));
                    let measure = Measure::EmptyCache { segments, size };
                    self.add(at, "empty_cache", point, measure, &size.0.to_string())?;
                }
            }
            KindWire::Threads(ThreadsWire { counts, size }) => {
                let size = self.size_or(size.as_ref(), SMALL_REQUEST)?;
                for (at, count) in numbers(counts, "counts", 1, MAX_THREADS)? {
                    self.fits(at, size, count)?;
                    let point = Some(by_count("threads", count));
                    let measure = Measure::Threads { count, size };
                    self.add(at, "threads", point, measure, &size.0.to_string())?;
                }
            }
            KindWire::RecordStream(RecordStreamWire { streams, size }) => {
                let size = self.size_or(size.as_ref(), LARGE_REQUEST)?;
                for (at, streams) in numbers(streams, "streams", 0, MAX_STREAMS)? {
                    let point = Some(by_count("other streams", streams));
                    let measure = Measure::RecordStream { streams, size };
                    self.add(at, "record_stream", point, measure, &size.0.to_string())?;
                }
            }
            KindWire::StartUp => self.add(at, "start_up", None, Measure::StartUp, "")?,
        }
        Ok(())
    }

    fn latency(&mut self, LatencyWire { sizes, cases }: &LatencyWire) -> Result<(), Refused> {
        const ALL: [LatencyCase; 3] = [
            LatencyCase::Hit,
            LatencyCase::Miss,
            LatencyCase::AfterEmptyCache,
        ];
        if let Some(cases) = cases {
            not_empty(
                cases,
                "`cases` names none",
                "leave it out for `[hit, miss, after_empty_cache]`",
            )?;
        }
        for &case in cases.as_ref().map_or(&ALL[..], |cases| &cases.value) {
            for (at, size) in self.sizes(sizes, 1)? {
                let measure = Measure::Latency { size, case };
                self.add(at, case.name(), Some(by_size(size)), measure, "")?;
            }
        }
        Ok(())
    }

    /// Adds a case. `settings` are the parts of the work that its name does not show.
    fn add(
        &mut self,
        at: Position,
        group: &str,
        point: Option<Point>,
        measure: Measure,
        settings: &str,
    ) -> Result<(), Problem> {
        let mut case = Case {
            group: group.to_owned(),
            point,
            measure,
            hash: String::new(),
        };
        let name = case.name();
        if let Some(first) = self.seen.get(&name) {
            let message = format!("`{name}` is timed twice in this suite");
            return Err(Problem::new(at, message)
                .see(*first, "first here")
                .help("name it once, or in two suites"));
        }
        case.hash = hash_text([self.memory.0.to_string().as_str(), &name, settings]);
        self.seen.insert(name, at);
        self.cases.push(case);
        Ok(())
    }

    fn trace(&mut self, file: &FileText) -> Result<(), Problem> {
        let at = file.0.at;
        let path = self.folder.join(&file.0.value);
        let refuse = |why: String, help: &str| {
            Problem::new(at, format!("`{}` {why}", path.display())).help(help)
        };
        let text = read_trace(&path).map_err(|error| match error.kind() {
            ErrorKind::NotFound => refuse(
                "does not exist".to_owned(),
                "paths are relative to the suite's folder",
            ),
            _ => refuse(
                format!("cannot be read: {error}"),
                "name an allocation trace, as text or gzip",
            ),
        })?;
        let events = trace::parse(&text).map_err(|error| {
            refuse(
                format!(
                    "is not an allocation trace: line {}, `{}`",
                    error.line,
                    shortened(&error.text)
                ),
                error.expected,
            )
        })?;
        if events.is_empty() {
            return Err(refuse(
                "has no operations".to_owned(),
                "name an allocation trace with at least one",
            ));
        }
        let content: String = events.iter().map(|event| format!("{event}\n")).collect();
        // `mixed` of `traces/mixed.txt.gz`.
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        self.add(
            at,
            name.trim_end_matches(".gz").trim_end_matches(".txt"),
            None,
            Measure::Trace { events },
            &content,
        )
    }

    fn scenario(&mut self, file: &FileText) -> Result<(), Refused> {
        let at = file.0.at;
        let path = self.folder.join(&file.0.value);
        let in_file = |error| Refused::InFile(Box::new(error));
        if !path.exists() {
            let message = format!("`{}` does not exist", path.display());
            return Err(Problem::new(at, message)
                .help("paths are relative to the suite's folder")
                .into());
        }
        let text = yaml::read(&path, &SCENARIO).map_err(in_file)?;
        let scenario = Scenario::parse(&text, &path).map_err(in_file)?;
        if scenario.needs.memory > self.memory {
            let message = format!(
                "`{}` needs {}, and this suite has {}",
                path.display(),
                scenario.needs.memory,
                self.memory
            );
            return Err(Problem::new(at, message)
                .help("raise the suite's `needs.memory`")
                .into());
        }
        if scenario.has_threads() {
            let message = format!(
                "`{}` has a storm with threads, which cannot be timed",
                path.display()
            );
            return Err(Problem::new(at, message)
                .help("the measure `threads` times requests of several threads")
                .into());
        }
        let name = scenario.name.clone();
        Ok(self.add(
            at,
            &name,
            None,
            Measure::Scenario(Box::new(scenario)),
            &content(&text),
        )?)
    }

    /// Sizes of which at least `count` fit.
    fn sizes(
        &self,
        given: &Located<Vec<SizeText>>,
        count: u64,
    ) -> Result<Vec<(Position, Bytes)>, Problem> {
        not_empty(given, "`sizes` names none", "as in `sizes: [512B, 2MiB]`")?;
        let sized = given.value.iter().map(|text| {
            let size = positive_size(text, "size")?;
            self.fits(text.at, size, count)?;
            Ok((text.at, size))
        });
        sized.collect()
    }

    fn size_or(&self, given: Option<&SizeText>, otherwise: Bytes) -> Result<Bytes, Problem> {
        let Some(text) = given else {
            return Ok(otherwise);
        };
        let size = positive_size(text, "size")?;
        self.fits(text.at, size, 1)?;
        Ok(size)
    }

    fn fits(&self, at: Position, size: Bytes, count: u64) -> Result<(), Problem> {
        if size
            .0
            .checked_mul(count)
            .is_some_and(|all| all <= self.memory.0)
        {
            return Ok(());
        }
        let what = if count == 1 {
            size.to_string()
        } else {
            format!("{count} × {size}")
        };
        Err(Problem::new(
            at,
            format!("{what} exceeds the {} that this suite needs", self.memory),
        )
        .help("raise `needs.memory`, or use smaller sizes"))
    }
}

/// The error for a name without fields: the measure has fields, or does not exist.
fn bare(at: Position, name: &str) -> Problem {
    if KindWire::NAMES.contains(&name) {
        return Problem::new(at, format!("`{name}` needs fields")).help(format!(
            "write `{name}: {{ … }}`; scenarios/bench/README.md lists the fields"
        ));
    }
    Problem::new(at, format!("unknown measure `{name}`")).help(choices(
        name,
        "accepted",
        KindWire::NAMES.iter().copied(),
    ))
}

fn numbers(
    given: &Located<Vec<Located<u64>>>,
    what: &str,
    least: u64,
    most: u64,
) -> Result<Vec<(Position, u64)>, Problem> {
    not_empty(
        given,
        &format!("`{what}` names none"),
        &format!("as in `{what}: [1, 2, 4]`"),
    )?;
    given
        .value
        .iter()
        .map(|number| Ok((number.at, bounded(number, what, least..=most)?)))
        .collect()
}

fn by_size(size: Bytes) -> Point {
    Point {
        axis: "size".to_owned(),
        value: size.0,
        bytes: true,
    }
}

fn by_count(axis: &str, value: u64) -> Point {
    Point {
        axis: axis.to_owned(),
        value,
        bytes: false,
    }
}

/// Reads a text, plain or gzipped, up to a limit on its unpacked size.
fn read_trace(path: &Path) -> std::io::Result<String> {
    let mut text = String::new();
    let read = packed::open(path)?
        .take(MAX_FILE + 1)
        .read_to_string(&mut text)?;
    if read as u64 > MAX_FILE {
        Err(std::io::Error::other(format!(
            "it has more than {MAX_FILE} bytes"
        )))
    } else {
        Ok(text)
    }
}

/// The scenario's steps and settings, without comments, layout and description.
fn content(text: &str) -> String {
    let parsed: Result<BTreeMap<String, serde_json::Value>, _> = serde_saphyr::from_str(text);
    // The language's own parser accepted it. If this reading fails, the source text is hashed.
    parsed.map_or_else(
        |_| text.to_owned(),
        |mut fields| {
            fields.remove("about");
            format!("{fields:?}")
        },
    )
}

/// Hashes texts with a separator after each that no text contains.
pub(crate) fn hash_of<'a>(texts: impl IntoIterator<Item = &'a str>) -> u64 {
    fnv1a(
        &texts
            .into_iter()
            .flat_map(|text| text.bytes().chain([0xff]))
            .collect::<Vec<u8>>(),
    )
}

pub(crate) fn hash_text<'a>(texts: impl IntoIterator<Item = &'a str>) -> String {
    format!("{:016x}", hash_of(texts))
}
