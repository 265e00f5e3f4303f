use std::collections::BTreeMap;

use harness_allocator::allocator::{AllocatorKind, AllocatorSpec};
use harness_language::error::{Problem, choices};
use harness_language::located::{Located, Position};
use harness_language::text::NameText;

use super::Checker;
use crate::metric::{
    Account, DEFAULT_STREAM, EventName, MeasureName, PoolName, ProcessName, ProgramName, ReportKey,
    START, StepName, StreamName,
};

pub(super) struct Id {
    pub(super) name: StepName,
    pub(super) step: &'static str,
    pub(super) reports: &'static [ReportKey],
    pub(super) at: Position,
    /// For a storm: whether its blocks are live.
    pub(super) storm: Option<bool>,
    /// For data-parallel training: the number of ranks.
    pub(super) ranks: usize,
}

/// Finds a name that the top of the file declares under this key.
fn declared<'n, T: Clone + 'n>(
    name: &NameText,
    [kind, key]: [&str; 2],
    known: impl Iterator<Item = &'n T> + Clone,
    text_of: fn(&T) -> &str,
) -> Result<T, Problem> {
    let text = name.text();
    known
        .clone()
        .find(|known| text_of(known) == text)
        .cloned()
        .ok_or_else(|| {
            let help = choices(text, key, known.map(text_of));
            Problem::new(name.at, format!("unknown {kind} `{text}`")).help(format!(
                "{help}; declare {key} at the top, as in `{key}: [{text}]`"
            ))
        })
}

fn earlier<'m, T>(
    name: &NameText,
    known: &'m BTreeMap<String, T>,
    does: &str,
    kinds: &str,
) -> Result<&'m T, Problem> {
    let text = name.text();
    let unknown = || {
        Problem::not_among(
            name,
            format!("no earlier step {does} `{text}`"),
            kinds,
            known.keys().map(String::as_str),
        )
    };
    known.get(text).ok_or_else(unknown)
}

impl Checker<'_> {
    pub(crate) fn stream(&self, name: Option<&NameText>) -> Result<StreamName, Problem> {
        let Some(name) = name else {
            return Ok(StreamName::new(0, DEFAULT_STREAM));
        };
        declared(
            name,
            ["stream", "streams"],
            self.declared.streams.iter(),
            StreamName::name,
        )
    }

    pub(crate) fn program(&self, name: &NameText) -> Result<ProgramName, Problem> {
        declared(
            name,
            ["program", "programs"],
            self.declared.programs.iter(),
            ProgramName::name,
        )
    }

    pub(crate) fn declared_process(&self, name: &NameText) -> Result<ProcessName, Problem> {
        declared(
            name,
            ["process", "processes"],
            self.declared.processes.iter().map(|process| &process.name),
            ProcessName::name,
        )
    }

    pub(crate) fn record_event(&mut self, name: &NameText) -> Result<EventName, Problem> {
        let text = name.checked()?;
        let index = self.names.events.len();
        Ok(self
            .names
            .events
            .entry(text.to_owned())
            .or_insert_with(|| EventName::new(index, text))
            .clone())
    }

    pub(crate) fn event(&self, name: &NameText) -> Result<EventName, Problem> {
        earlier(name, &self.names.events, "records event", "events").cloned()
    }

    /// Declares a private pool, or returns an existing one.
    pub(crate) fn use_pool(&mut self, name: &NameText) -> Result<PoolName, Problem> {
        let text = name.checked()?;
        let index = self.names.pools.len();
        Ok(self
            .names
            .pools
            .entry(text.to_owned())
            .or_insert_with(|| PoolName::new(index, text))
            .clone())
    }

    pub(crate) fn pool(&self, name: &NameText) -> Result<PoolName, Problem> {
        earlier(
            name,
            &self.names.pools,
            "uses a private pool",
            "private pools",
        )
        .cloned()
    }

    /// Declares the id of a step with these figures. `step` is its key in YAML.
    pub(crate) fn declare_id(
        &mut self,
        name: &NameText,
        step: &'static str,
        reports: &'static [ReportKey],
    ) -> Result<StepName, Problem> {
        let text = self
            .new_name(name, self.names.ids.get(name.text()).map(|id| id.at))?
            .to_owned();
        let index = self.names.ids.len();
        let new = || Id {
            name: StepName::new(index, &text),
            step,
            reports,
            at: name.at,
            storm: None,
            ranks: 0,
        };
        Ok(self
            .names
            .ids
            .entry(text.clone())
            .or_insert_with(new)
            .name
            .clone())
    }

    /// Sets the number of ranks of a step. Each rank has its own figures.
    pub(crate) fn declare_ranks(&mut self, id: &StepName, count: usize) {
        if let Some(declared) = self.names.ids.get_mut(id.name()) {
            declared.ranks = count;
        }
    }

    pub(crate) fn declare_storm(
        &mut self,
        name: &NameText,
        reports: &'static [ReportKey],
    ) -> Result<StepName, Problem> {
        let text = name.text();
        if self.names.buffers.contains_key(text) || self.names.elements.contains_key(text) {
            let message =
                format!("`{text}` is already a buffer, so `free: {text}` would be ambiguous");
            return Err(Problem::new(name.at, message).help("choose another id for the storm"));
        }
        self.named.insert(text.to_owned());
        let id = self.declare_id(name, "storm", reports)?;
        if let Some(declared) = self.names.ids.get_mut(text) {
            declared.storm = Some(true);
        }
        Ok(id)
    }

    pub(crate) fn storm_has_freed(&mut self, id: &StepName) {
        if let Some(declared) = self.names.ids.get_mut(id.name()) {
            declared.storm = Some(false);
        }
    }

    /// Declares a measure, which later steps can use.
    pub(crate) fn declare_measure(&mut self, name: &NameText) -> Result<MeasureName, Problem> {
        let text = self
            .new_name(
                name,
                self.names.measures.get(name.text()).map(|(_, at)| *at),
            )?
            .to_owned();
        let index = self.names.measures.len();
        Ok(self
            .names
            .measures
            .entry(text.clone())
            .or_insert_with(|| (MeasureName::new(index, &text), name.at))
            .0
            .clone())
    }

    pub(crate) fn measure(&self, name: &NameText) -> Result<MeasureName, Problem> {
        earlier(name, &self.names.measures, "measures", "measures")
            .map(|(measure, _)| measure.clone())
    }

    /// Checks that a name is unused. The same position again is the same step in another iteration.
    fn new_name<'n>(
        &self,
        name: &'n NameText,
        same_kind: Option<Position>,
    ) -> Result<&'n str, Problem> {
        let text = name.checked()?;
        let at = name.at;
        self.is_free_for_metrics(name)?;
        let elsewhere = || {
            let id = self.names.ids.get(text).map(|id| id.at);
            id.or(self.names.measures.get(text).map(|(_, first)| *first))
                .filter(|&first| first != at)
        };
        let other = if same_kind == Some(at) {
            None
        } else {
            same_kind.or_else(elsewhere)
        };
        match other {
            None => Ok(text),
            Some(first) => Err(Problem::new(
                at,
                format!(
                    "`{text}` is already the name of a step, at line {}",
                    first.line
                ),
            )
            .see(first, "the first one")
            .help("ids and measures must be unique")),
        }
    }

    /// Rejects a name that has another meaning in expressions.
    fn is_free_for_metrics(&self, name: &NameText) -> Result<(), Problem> {
        let text = name.text();
        let taken = if is_reserved(text) {
            "is the name of a metric"
        } else if self.declared.parameters.contains_key(text) {
            "is a parameter of this scenario"
        } else if self
            .variables
            .iter()
            .any(|(variable, _)| variable.name() == text)
        {
            "is the variable of a loop around this step"
        } else if self.program_named(text).is_some() {
            "is a program of this scenario"
        } else if self.process_named(text).is_some() {
            "is a process of this scenario"
        } else if self
            .declared
            .allocators
            .iter()
            .any(|arm| arm.to_string() == text)
        {
            "is an allocator of this scenario"
        } else {
            return Ok(());
        };
        Err(Problem::new(name.at, format!("`{text}` {taken}")).help("choose another name"))
    }

    pub(super) fn new_variable<'n>(&self, name: &'n NameText) -> Result<&'n str, Problem> {
        let text = name.checked()?;
        self.is_free_for_metrics(name)?;
        match self.announced.get(text) {
            None => Ok(text),
            Some(first) => Err(Problem::new(
                name.at,
                format!(
                    "`{text}` is already the name of a step, at line {}",
                    first.line
                ),
            )
            .see(*first, "the step")
            .help("choose another name")),
        }
    }

    pub(crate) fn live_storm(&mut self, name: &NameText) -> Result<StepName, Problem> {
        let text = name.text();
        self.named.insert(text.to_owned());
        let storms = || self.names.ids.values().filter(|id| id.storm.is_some());
        match storms().find(|id| id.name.name() == text) {
            Some(id) if id.storm == Some(true) => Ok(id.name.clone()),
            Some(id) => Err(Problem::new(
                name.at,
                format!("the blocks of `{text}` are already freed"),
            )
            .see(id.at, "the storm")),
            None => {
                let message = format!("no earlier step is a storm with id `{text}`");
                Err(Problem::not_among(
                    name,
                    message,
                    "storms",
                    storms().map(|id| id.name.name()),
                ))
            }
        }
    }

    /// Rejects a storm whose blocks from the previous iteration are still live.
    pub(crate) fn storm_may_start(&self, name: &NameText) -> Result<(), Problem> {
        match self.names.ids.get(name.text()) {
            Some(id) if id.storm == Some(true) && id.at == name.at => {
                let text = name.text();
                Err(Problem::new(
                    name.at,
                    format!("the blocks of `{text}` are still live from the previous iteration"),
                )
                .help(format!(
                    "free them with `- free: {text}` before the storm runs again"
                )))
            }
            _ => Ok(()),
        }
    }

    pub(crate) fn arm(&self, name: &Located<String>) -> Result<String, Problem> {
        let text = &name.value;
        let arms = self.arms();
        match AllocatorKind::from_name(text) {
            _ if arms.contains(text) => Ok(text.clone()),
            Some(kind) => Err(Problem::new(
                name.at,
                format!(
                    "this scenario does not run with the allocator `{}`",
                    kind.name()
                ),
            )
            .help(format!(
                "add it at the top, as in `allocators: [{}, {}]`",
                arms.join(", "),
                kind.name()
            ))),
            None => {
                let message = format!("this scenario has no allocator `{text}`");
                Err(Problem::not_among(
                    name,
                    message,
                    "allocators",
                    arms.iter().map(String::as_str),
                ))
            }
        }
    }

    pub(crate) fn arms(&self) -> Vec<String> {
        self.declared
            .allocators
            .iter()
            .map(AllocatorSpec::to_string)
            .collect()
    }
}

/// Returns a valid name that means nothing else in expressions.
pub(crate) fn has_no_meaning<'n>(name: &'n NameText, help: &str) -> Result<&'n str, Problem> {
    match name.checked()? {
        text if is_reserved(text) || AllocatorKind::from_name(text).is_some() => Err(Problem::new(
            name.at,
            format!("`{text}` has another meaning in expressions"),
        )
        .help(help)),
        text => Ok(text),
    }
}

/// Returns whether a name is the start of metric names.
fn is_reserved(name: &str) -> bool {
    let is_head = |account: Account| account.to_string().split('.').next() == Some(name);
    name == START || Account::SHORT.contains(&name) || Account::all().any(is_head)
}
