//! The static check: knows what is live and what has a name at each point of a scenario, and resolves every name. The steps ask it in their
//! order.
//!
//! A scenario that passes cannot free twice, wait for an event that no step records, or look at a figure that does not exist yet. The first
//! mistake ends the check, because most later ones would follow from it.

use std::collections::BTreeMap;

use harness_allocator::allocator::{AllocatorKind, AllocatorSpec};

use super::metric::{
    Account, Amount, BufferName, DEFAULT_STREAM, EventName, Expectation, MeasureName, Metric, ReportKey, START, StepName, StreamName,
};
use harness_language::error::{Problem, choices, nearest, quoted};
use harness_language::expression::{self, ExpressionError, Unresolved};
use harness_language::located::{Located, Position};
use harness_language::text::{AmountText, ExpressionText, NameText};

/// Most operations of a scenario, `repeat` unrolled: a step is one, a `storm` as many as it makes, a `train` one for each layer of each
/// iteration.
pub const MAX_OPERATIONS: u64 = 10_000_000;
/// Most names of buffers in one scenario. Every step checks all that are live, so more would take minutes.
pub const MAX_BUFFERS: usize = 10_000;
/// How deep `repeat` may be nested.
pub const MAX_REPEAT_DEPTH: u32 = 4;

/// What is known at one point of the walk.
pub(crate) struct Checker<'a> {
    source: &'a str,
    allocators: &'a [AllocatorSpec],
    streams: &'a [StreamName],
    /// Ids and measures of the whole file, to tell "comes later" from "does not exist".
    announced: BTreeMap<String, Position>,
    buffers: BTreeMap<String, (BufferName, Buffer)>,
    events: BTreeMap<String, EventName>,
    ids: BTreeMap<String, Id>,
    measures: BTreeMap<String, (MeasureName, Position)>,
    repeat_depth: u32,
    /// How often the step at hand runs; 0 where a body is walked again.
    multiplier: u64,
    operations: u64,
}

#[derive(Clone, Copy)]
enum Buffer {
    Live {
        filled: bool,
    },
    /// A recovery policy may have freed it, or its request may have failed.
    MaybeLive {
        since: Position,
    },
    Freed {
        at: Position,
    },
    /// The scenario expects its request to fail.
    Refused {
        at: Position,
    },
}

/// A step with an id.
struct Id {
    name: StepName,
    /// Its key in YAML.
    step: &'static str,
    reports: &'static [ReportKey],
    at: Position,
    /// Of a storm: whether its blocks are live.
    storm: Option<BlocksLive>,
}

type BlocksLive = bool;

/// What a `free` may name.
pub(crate) enum Freed {
    /// The buffer, and whether it is certain to be live.
    Buffer(BufferName, bool),
    /// The blocks of a storm.
    Storm(StepName),
}

impl<'a> Checker<'a> {
    /// `announced` are the ids and measures of the whole file.
    pub(crate) fn new(
        source: &'a str,
        allocators: &'a [AllocatorSpec],
        streams: &'a [StreamName],
        announced: BTreeMap<String, Position>,
    ) -> Self {
        let start = (MeasureName::new(0, START), Position::default());
        Self {
            source,
            allocators,
            streams,
            announced,
            buffers: BTreeMap::new(),
            events: BTreeMap::new(),
            ids: BTreeMap::new(),
            measures: BTreeMap::from([(START.to_owned(), start)]),
            repeat_depth: 0,
            multiplier: 1,
            operations: 0,
        }
    }

    /// Counts what a step does, as often as it runs.
    pub(crate) fn count(&mut self, at: Position, operations: u64) -> Result<(), Problem> {
        self.operations = self.operations.saturating_add(self.multiplier.saturating_mul(operations));
        if self.operations <= MAX_OPERATIONS {
            return Ok(());
        }
        let message = format!("with this step the scenario does more than {MAX_OPERATIONS} operations");
        Err(Problem::new(at, message)
            .help("a step is one operation, a storm as many as it makes, a training one for each layer of each iteration; lower one of them, or `times`"))
    }

    /// Checks the body of a `repeat` by this function, twice where it runs more than once: what the first iteration leaves must suit the
    /// second.
    pub(crate) fn repeat<T>(
        &mut self,
        at: Position,
        times: u64,
        mut body: impl FnMut(&mut Self) -> Result<T, Problem>,
    ) -> Result<T, Problem> {
        self.repeat_depth += 1;
        if self.repeat_depth > MAX_REPEAT_DEPTH {
            let message = format!("`repeat` is nested more than {MAX_REPEAT_DEPTH} deep");
            return Err(Problem::new(at, message).help("multiply the inner `times` into an outer one"));
        }
        let outer = self.multiplier;
        self.multiplier = outer.saturating_mul(times);
        let steps = body(self)?;
        if times > 1 {
            self.multiplier = 0;
            body(self).map_err(|problem| problem.see(at, "seen in the second iteration of this `repeat`"))?;
        }
        self.multiplier = outer;
        self.repeat_depth -= 1;
        Ok(steps)
    }

    // Buffers.

    /// A buffer that comes into being here, or that the scenario expects to be refused.
    pub(crate) fn make_buffer(&mut self, name: &NameText, refused: bool) -> Result<BufferName, Problem> {
        let text = name.checked()?;
        let state = if refused { Buffer::Refused { at: name.position() } } else { Buffer::Live { filled: false } };
        if let Some(id) = self.ids.get(text).filter(|id| id.storm.is_some()) {
            let message = format!("`{text}` is a storm already, and `free: {text}` could mean both");
            return Err(Problem::new(name.position(), message).see(id.at, "the storm").help("give the buffer another name"));
        }
        let index = self.buffers.len();
        match self.buffers.get_mut(text) {
            None if index == MAX_BUFFERS => {
                let message = format!("the scenario has more than {MAX_BUFFERS} buffers");
                Err(Problem::new(name.position(), message).help("use `storm` for many blocks, or a name again whose buffer is freed"))
            }
            None => {
                let buffer = BufferName::new(index, text);
                self.buffers.insert(text.to_owned(), (buffer.clone(), state));
                Ok(buffer)
            }
            Some((_, Buffer::Live { .. })) => Err(Problem::new(name.position(), format!("buffer `{text}` is live already"))
                .help(format!("free it first, with `- free: {text}`, or take another name"))),
            Some((_, Buffer::MaybeLive { since })) => {
                let message = format!("buffer `{text}` may still be live: that depends on the run");
                Err(Problem::new(name.position(), message)
                    .see(*since, "may be gone from here on")
                    .help(format!("put `- free: {text}` in front, which does nothing where it is gone")))
            }
            Some((buffer, old)) => {
                *old = state;
                Ok(buffer.clone())
            }
        }
    }

    /// A buffer that is certain to be live.
    pub(crate) fn live_buffer(&self, name: &NameText) -> Result<BufferName, Problem> {
        let text = name.checked()?;
        match self.buffers.get(text) {
            Some((buffer, Buffer::Live { .. })) => Ok(buffer.clone()),
            Some((_, Buffer::MaybeLive { since })) => {
                let message = format!("buffer `{text}` may be gone: that depends on the run");
                Err(Problem::new(name.position(), message).see(*since, "may be gone from here on").help("only `free` may name it now"))
            }
            Some((_, dead)) => Err(dead_buffer(text, name.position(), dead)),
            None => Err(self.no_such_buffer(text, name.position())),
        }
    }

    fn no_such_buffer(&self, text: &str, at: Position) -> Problem {
        let names = self.buffers.keys().map(String::as_str);
        Problem::new(at, format!("no step before this one makes a buffer `{text}`")).help(choices(text, "buffers", names))
    }

    /// Frees a buffer, or the blocks of a storm.
    pub(crate) fn free(&mut self, name: &Located<String>) -> Result<Freed, Problem> {
        let (text, at) = (name.value.as_str(), name.position());
        if let Some(Id { name, at: storm_at, storm: Some(live), .. }) = self.ids.get_mut(text) {
            return match std::mem::take(live) {
                true => Ok(Freed::Storm(name.clone())),
                false => Err(Problem::new(at, format!("the blocks of storm `{text}` are freed already")).see(*storm_at, "the storm")),
            };
        }
        match self.buffers.get_mut(text) {
            Some((buffer, state @ (Buffer::Live { .. } | Buffer::MaybeLive { .. }))) => {
                let certain = matches!(state, Buffer::Live { .. });
                *state = Buffer::Freed { at };
                Ok(Freed::Buffer(buffer.clone(), certain))
            }
            Some((_, dead)) => Err(dead_buffer(text, at, dead)),
            None => Err(self.no_such_buffer(text, at)),
        }
    }

    /// After this, nobody knows whether the buffer is live.
    pub(crate) fn may_be_gone(&mut self, buffer: &BufferName, since: Position) {
        if let Some((_, state)) = self.buffers.get_mut(buffer.name()) {
            *state = Buffer::MaybeLive { since };
        }
    }

    pub(crate) fn fill(&mut self, name: &NameText) -> Result<BufferName, Problem> {
        let buffer = self.live_buffer(name)?;
        if let Some((_, state)) = self.buffers.get_mut(buffer.name()) {
            *state = Buffer::Live { filled: true };
        }
        Ok(buffer)
    }

    pub(crate) fn verify(&self, name: &NameText) -> Result<BufferName, Problem> {
        let buffer = self.live_buffer(name)?;
        match self.buffers.get(buffer.name()) {
            Some((_, Buffer::Live { filled: true })) => Ok(buffer),
            _ => Err(Problem::new(name.position(), format!("buffer `{buffer}` was never filled: there is nothing to verify"))
                .help(format!("put `- fill: {{ buffer: {buffer} }}` in front"))),
        }
    }

    // Streams and events.

    pub(crate) fn stream(&self, name: Option<&NameText>) -> Result<StreamName, Problem> {
        let text = name.map_or(DEFAULT_STREAM, NameText::text);
        match (self.streams.iter().find(|stream| stream.name() == text), name) {
            (Some(stream), _) => Ok(stream.clone()),
            (None, None) => Ok(StreamName::new(0, DEFAULT_STREAM)),
            (None, Some(name)) => {
                let help = choices(text, "streams", self.streams.iter().map(StreamName::name));
                Err(Problem::new(name.position(), format!("there is no stream `{text}`"))
                    .help(format!("{help}; more are declared at the top, as in `streams: [{text}]`")))
            }
        }
    }

    pub(crate) fn record_event(&mut self, name: &NameText) -> Result<EventName, Problem> {
        let text = name.checked()?;
        let index = self.events.len();
        Ok(self.events.entry(text.to_owned()).or_insert_with(|| EventName::new(index, text)).clone())
    }

    pub(crate) fn event(&self, name: &NameText) -> Result<EventName, Problem> {
        let text = name.text();
        self.events.get(text).cloned().ok_or_else(|| {
            Problem::new(name.position(), format!("no step before this one records event `{text}`")).help(choices(
                text,
                "events",
                self.events.keys().map(String::as_str),
            ))
        })
    }

    // Ids and measures.

    /// The id of a step, by which later steps read what it `reports`. `step` is its key in YAML.
    pub(crate) fn declare_id(&mut self, name: &NameText, step: &'static str, reports: &'static [ReportKey]) -> Result<StepName, Problem> {
        let text = self.new_name(name, self.ids.get(name.text()).map(|id| id.at))?.to_owned();
        let index = self.ids.len();
        let new = || Id { name: StepName::new(index, &text), step, reports, at: name.position(), storm: None };
        Ok(self.ids.entry(text.clone()).or_insert_with(new).name.clone())
    }

    /// The id of a storm, whose blocks are live from here on.
    pub(crate) fn declare_storm(&mut self, name: &NameText, reports: &'static [ReportKey]) -> Result<StepName, Problem> {
        let text = name.text();
        if self.buffers.contains_key(text) {
            let message = format!("`{text}` is a buffer already, and `free: {text}` could mean both");
            return Err(Problem::new(name.position(), message).help("give the storm another id"));
        }
        let id = self.declare_id(name, "storm", reports)?;
        if let Some(declared) = self.ids.get_mut(text) {
            declared.storm = Some(true);
        }
        Ok(id)
    }

    /// The name of a measure, which is known from the next step on.
    pub(crate) fn declare_measure(&mut self, name: &NameText) -> Result<MeasureName, Problem> {
        let text = self.new_name(name, self.measures.get(name.text()).map(|(_, at)| *at))?.to_owned();
        let index = self.measures.len();
        Ok(self.measures.entry(text.clone()).or_insert_with(|| (MeasureName::new(index, &text), name.position())).0.clone())
    }

    /// Accepts a name that nothing else has; the same place again is the same step in another iteration.
    fn new_name<'n>(&self, name: &'n NameText, same_kind: Option<Position>) -> Result<&'n str, Problem> {
        let text = name.checked()?;
        let at = name.position();
        if is_reserved(text) {
            return Err(Problem::new(at, format!("`{text}` is the name of metrics that always exist")).help("take another name"));
        }
        let other = if same_kind == Some(at) { None } else { same_kind.or_else(|| self.announced_elsewhere(text, at)) };
        match other {
            None => Ok(text),
            Some(first) => Err(Problem::new(at, format!("`{text}` names another step already, at line {}", first.line))
                .see(first, "the first one")
                .help("ids and measures share one set of names; each is given once")),
        }
    }

    /// An earlier step of either kind with this name.
    fn announced_elsewhere(&self, text: &str, at: Position) -> Option<Position> {
        let id = self.ids.get(text).map(|id| id.at);
        let measure = self.measures.get(text).map(|(_, first)| *first);
        id.or(measure).filter(|&first| first != at)
    }

    /// A storm whose blocks are live.
    pub(crate) fn live_storm(&self, name: &NameText) -> Result<StepName, Problem> {
        let text = name.text();
        let storms = || self.ids.values().filter(|id| id.storm.is_some());
        match storms().find(|id| id.name.name() == text) {
            Some(id) if id.storm == Some(true) => Ok(id.name.clone()),
            Some(id) => {
                Err(Problem::new(name.position(), format!("the blocks of storm `{text}` are freed already")).see(id.at, "the storm"))
            }
            None => Err(Problem::new(name.position(), format!("no step before this one is a storm with id `{text}`")).help(choices(
                text,
                "storms",
                storms().map(|id| id.name.name()),
            ))),
        }
    }

    /// Refuses a storm that would lose the blocks of the one before.
    pub(crate) fn storm_may_start(&self, name: &NameText) -> Result<(), Problem> {
        match self.ids.get(name.text()) {
            Some(id) if id.storm == Some(true) && id.at == name.position() => {
                let text = name.text();
                Err(Problem::new(name.position(), format!("the blocks of storm `{text}` are live from the time before"))
                    .help(format!("free them before it runs again, with `- free: {text}`")))
            }
            _ => Ok(()),
        }
    }

    /// The name of an arm of this scenario.
    pub(crate) fn arm(&self, name: &Located<String>) -> Result<String, Problem> {
        let text = &name.value;
        let arms: Vec<String> = self.allocators.iter().map(AllocatorSpec::to_string).collect();
        match AllocatorKind::from_name(text) {
            _ if arms.contains(text) => Ok(text.clone()),
            Some(kind) => Err(Problem::new(name.position(), format!("allocator `{}` is not among those of this scenario", kind.name()))
                .help(format!("add it at the top, as in `allocators: [{}, {}]`", arms.join(", "), kind.name()))),
            None => Err(Problem::new(name.position(), format!("this scenario has no allocator `{text}`")).help(choices(
                text,
                "allocators",
                arms.iter().map(String::as_str),
            ))),
        }
    }

    // Values.

    pub(crate) fn amount(&self, text: &AmountText) -> Result<Amount, Problem> {
        expression::parse_amount(text.text(), &|name| self.resolve(name)).map_err(|error| self.locate(&text.0, error))
    }

    pub(crate) fn expectation(&self, text: &Located<String>) -> Result<Expectation, Problem> {
        expression::parse_expectation(&text.value, &|name| self.resolve(name)).map_err(|error| self.locate(text, error))
    }

    /// An expectation that is looked at after every step: only what exists after every step can be in it.
    pub(crate) fn invariant(&self, text: &ExpressionText) -> Result<Expectation, Problem> {
        let resolve = |name: &str| match Account::from_name(name) {
            Some(account) => Ok(Metric::Now(account)),
            None if name.starts_with("start.") => self.resolve(name),
            None => match name.split_once('.') {
                Some((head, _)) if self.announced.contains_key(head) => {
                    let help = "invariants are checked after every step, so they can use accounts and `start.…` only; use an `expect` step"
                        .to_owned();
                    Err((format!("`{name}` does not exist after every step"), help))
                }
                _ => Err(unknown_metric(name, account_names().iter().map(String::as_str))),
            },
        };
        expression::parse_expectation(text.text(), &resolve).map_err(|error| self.locate(&text.0, error))
    }

    /// Puts the place inside an expression into the file.
    fn locate(&self, text: &Located<String>, error: ExpressionError) -> Problem {
        let at = text.within(self.source, error.start, error.length);
        Problem::new(at, error.message).help(error.help)
    }

    /// Turns a name into a metric that is known at this point.
    fn resolve(&self, name: &str) -> Result<Metric, Unresolved> {
        if let Some(account) = Account::from_name(name) {
            return Ok(Metric::Now(account));
        }
        let (head, rest) = name.split_once('.').unwrap_or((name, ""));
        if let Some((measure, _)) = self.measures.get(head) {
            return match Account::from_name(rest) {
                Some(account) => Ok(Metric::At(measure.clone(), account)),
                None => Err(unknown_metric_of(head, rest)),
            };
        }
        if let Some(id) = self.ids.get(head) {
            let reports = id.reports;
            return match ReportKey::from_name(rest).filter(|key| reports.contains(key)) {
                Some(key) => Ok(Metric::Report(id.name.clone(), key)),
                None => Err((
                    format!("`{}` step `{head}` does not report `{rest}`", id.step),
                    choices(rest, "it reports", reports.iter().map(|key| key.name())),
                )),
            };
        }
        if let Some(later) = self.announced.get(head) {
            return Err((
                format!("`{name}` is not known yet: the step `{head}` comes later, at line {}", later.line),
                "move this behind it".to_owned(),
            ));
        }
        let known = account_names();
        // The nearest names are looked for among so many measures and ids.
        const MOST: usize = 100;
        let heads = self.measures.keys().take(MOST).flat_map(|measure| known.iter().map(move |account| format!("{measure}.{account}")));
        let reports = self.ids.iter().take(MOST).flat_map(|(id, known)| known.reports.iter().map(move |key| format!("{id}.{key}")));
        let names: Vec<String> = known.iter().cloned().chain(heads).chain(reports).collect();
        Err(unknown_metric(name, names.iter().map(String::as_str)))
    }
}

fn dead_buffer(text: &str, at: Position, state: &Buffer) -> Problem {
    match state {
        Buffer::Freed { at: first } => {
            Problem::new(at, format!("buffer `{text}` is freed already, at line {}", first.line)).see(*first, "freed here")
        }
        Buffer::Refused { at: first } => {
            let message = format!("buffer `{text}` does not exist: line {} expects its request to fail", first.line);
            Problem::new(at, message).see(*first, "`expect: oom`")
        }
        Buffer::Live { .. } | Buffer::MaybeLive { .. } => Problem::new(at, format!("buffer `{text}` is live")),
    }
}

/// Whether metrics begin with it.
fn is_reserved(name: &str) -> bool {
    name == START || Account::all().any(|account| account.to_string().split('.').next() == Some(name))
}

fn account_names() -> Vec<String> {
    Account::all().map(|account| account.to_string()).collect()
}

fn unknown_metric<'n>(name: &str, names: impl IntoIterator<Item = &'n str>) -> Unresolved {
    let nearest = nearest(name, names);
    let hint = if nearest.is_empty() { String::new() } else { format!("did you mean {}? ", quoted(&nearest, " or ")) };
    let forms = "a metric is a key of torch.cuda.memory_stats(), device.…, time.now, one of these behind `start.` or a measure's name, or what a step with an `id` reports";
    (format!("there is no metric `{name}`"), format!("{hint}{forms}"))
}

fn unknown_metric_of(measure: &str, rest: &str) -> Unresolved {
    let names = account_names();
    let nearest = nearest(rest, names.iter().map(String::as_str));
    let hint = if nearest.is_empty() {
        "as in `device.used` or `reserved_bytes.all.peak`".to_owned()
    } else {
        format!("did you mean {}?", quoted(&nearest, " or "))
    };
    (format!("measure `{measure}` has no metric `{rest}`"), hint)
}
