//! The scenarios and allocators that the options select, and messages on choices that the user may
//! not expect.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use harness_allocator::allocator::{AllocatorKind, AllocatorSpec, SpecError, caching::Config};
use harness_base::shell::quoted;
use harness_devices::{DeviceChoice, DeviceSource};
use harness_language::arms;
use harness_report::store;
use harness_run::session::{Selection, has_pytorchs, listed_as};
use harness_scenario::{ParameterSettings, Scenario, choices};

use super::Run;
use crate::error::{CliError, Failures};
use crate::{device, import, last_failed::LastFailed, terminal};

impl Run {
    fn settings(&self) -> Result<ParameterSettings, CliError> {
        let mut settings = ParameterSettings::new();
        for (name, value) in &self.settings {
            if settings.insert(name.clone(), value.clone()).is_some() {
                return Err(CliError::input(
                    format!("`{name}` is set twice"),
                    "give each parameter one value",
                ));
            }
        }
        Ok(settings)
    }

    /// Rejects settings that match no scenario: they are typing errors.
    fn check_settings(&self, scenarios: &[Scenario]) -> Result<(), CliError> {
        let known: BTreeSet<&str> = scenarios
            .iter()
            .flat_map(|scenario| &scenario.parameters)
            .map(|(name, _)| name.as_str())
            .collect();
        match self
            .settings
            .iter()
            .find(|(name, _)| !known.contains(name.as_str()))
        {
            None => Ok(()),
            Some((name, _)) => Err(CliError::input(
                format!("no scenario has a parameter `{name}`"),
                choices(name, "parameters", known),
            )),
        }
    }

    pub(super) fn chosen(&self) -> Result<(Vec<Scenario>, Selection), Failures> {
        self.paths
            .iter()
            .try_for_each(|path| refuse_records(path))?;
        let mut scenarios =
            import::load_with_programs(&self.paths, &self.settings()?, self.memory)?;
        self.check_settings(&scenarios)?;
        scenarios.retain(|scenario| {
            self.tags.is_empty() || scenario.tags.iter().any(|tag| self.tags.contains(tag))
        });
        if scenarios.is_empty() && !self.tags.is_empty() {
            let message = format!("no scenario has the tag {}", self.tags.join(" or "));
            return Err(CliError::input(
                message,
                "`harness list --format json` shows the tags of each scenario",
            )
            .into());
        }
        scenarios.retain(|scenario| {
            !scenario
                .tags
                .iter()
                .any(|tag| self.without_tags.contains(tag))
        });
        if scenarios.is_empty() {
            let message = format!(
                "every scenario has one of the tags {}",
                self.without_tags.join(", ")
            );
            return Err(CliError::input(message, "leave out one of `--without-tag`").into());
        }
        // This comes before the shard, because an allocator may be listed only by scenarios of
        // another shard.
        let mut selection = self.selection(&scenarios)?;
        if let Some(shard) = self.shard {
            scenarios.retain(|scenario| shard.has(&scenario.name));
        }
        selection.pairs = self.pairs(&scenarios, &selection)?;
        if selection.pairs.is_some() {
            scenarios.retain(|scenario| !selection.of(scenario).is_empty());
        }
        self.faults.add_to(&mut scenarios)?;
        Ok((scenarios, selection))
    }

    /// The configurations that the options select. Each allocator must be listed by a scenario, be
    /// `caching` with settings, or be a library.
    fn selection(&self, scenarios: &[Scenario]) -> Result<Selection, CliError> {
        let names: Vec<&str> = self
            .allocators
            .iter()
            .flat_map(|list| split_names(list))
            .collect();
        let mut selection = Selection::default();
        for name in &names {
            if scenarios.iter().any(|scenario| {
                scenario
                    .allocators
                    .iter()
                    .any(|arm| arm.to_string() == *name)
            }) {
                selection
                    .only
                    .get_or_insert_default()
                    .push((*name).to_owned());
            } else if name.contains('(') {
                selection.only.get_or_insert_default();
                let arm: AllocatorSpec = name.parse().map_err(|error| spec_error(name, error))?;
                check_library(&arm)?;
                selection.added.push(arm);
            } else {
                return Err(not_listed(name, scenarios));
            }
        }
        for conf in &self.alloc_conf {
            let config = Config::parse(conf).map_err(|error| CliError::conf(&error, conf))?;
            selection.added.push(AllocatorSpec::caching(config));
        }
        if selection.added.iter().any(AllocatorSpec::is_pytorch)
            && !scenarios.iter().any(has_pytorchs)
        {
            let help = format!(
                "{}; add `caching` to the `allocators:` of a scenario, or leave out the settings",
                lists(scenarios)
            );
            return Err(CliError::input(
                "the settings are for PyTorch's allocator, but no given scenario lists it",
                help,
            ));
        }
        Ok(selection)
    }

    /// The pairs of scenario and allocator that match the filters and `--last-failed`; `None` for
    /// all pairs.
    fn pairs(
        &self,
        scenarios: &[Scenario],
        selection: &Selection,
    ) -> Result<Option<BTreeSet<(String, String)>>, CliError> {
        let failed = if self.last_failed {
            Some(LastFailed::read()?)
        } else {
            None
        };
        if failed.as_ref().is_some_and(LastFailed::is_empty) && !self.quiet {
            terminal::message("no run failed last time, so all runs are started");
        }
        let failed = failed.filter(|failed| !failed.is_empty());
        if failed.is_none() && self.filter.is_empty() {
            return Ok(None);
        }
        let all = scenarios.iter().flat_map(|scenario| {
            selection
                .of(scenario)
                .into_iter()
                .map(|arm| (scenario.id(), arm.to_string()))
        });
        let all: BTreeSet<(String, String)> = all.collect();
        let pairs: BTreeSet<(String, String)> = all
            .iter()
            .filter(|pair| self.has_words(pair))
            .cloned()
            .collect();
        if pairs.is_empty() && !all.is_empty() {
            let help = "the name of a run is SCENARIO::ALLOCATOR, as in `oom_retry::caching`; \
                 `harness list` lists the scenarios";
            return Err(CliError::input(
                format!("no run matches `{}`", self.filter.join("` or `")),
                help,
            ));
        }
        let Some(failed) = failed else {
            return Ok(Some(pairs));
        };
        let pairs: BTreeSet<(String, String)> =
            pairs.into_iter().filter(|pair| failed.has(pair)).collect();
        if pairs.is_empty() && !self.quiet {
            terminal::message("none of these runs failed last time");
        }
        Ok(Some(pairs))
    }

    /// Returns whether a run's name contains all words of one of the filters.
    fn has_words(&self, (scenario, allocator): &(String, String)) -> bool {
        let name = format!("{scenario}::{allocator}");
        self.filter.is_empty()
            || self
                .filter
                .iter()
                .any(|words| words.split_whitespace().all(|word| name.contains(word)))
    }

    /// Prints decisions that the user may not expect.
    pub(super) fn explain_choices(
        &self,
        scenarios: &[Scenario],
        selection: &Selection,
        choice: DeviceChoice,
        source: &DeviceSource,
    ) {
        if self.quiet {
            return;
        }
        device::explain_choice(choice, source);
        if let (Some(shard), []) = (self.shard, scenarios) {
            terminal::message(format_args!(
                "part {shard} contains none of these scenarios"
            ));
        }
        self.explain_added(scenarios, &selection.added);
        // Each setting without effect is named once.
        let arms = scenarios
            .iter()
            .flat_map(|scenario| selection.of(scenario))
            .chain(&selection.added);
        let idle: BTreeSet<&str> = arms
            .filter_map(AllocatorSpec::effective)
            .flat_map(|config| config.idle_settings())
            .collect();
        idle.iter().for_each(terminal::message);
        for scenario in scenarios {
            if selection.of(scenario).is_empty() {
                terminal::message(format_args!(
                    "skipping {}: it lists only {}",
                    scenario.path.display(),
                    names(&scenario.allocators)
                ));
            }
        }
    }

    /// Names settings of `--alloc-conf` that equal another configuration.
    fn explain_added(&self, scenarios: &[Scenario], added: &[AllocatorSpec]) {
        // The configurations of `--alloc-conf` come last.
        let (others, of_conf) = added.split_at(added.len().saturating_sub(self.alloc_conf.len()));
        for (index, (conf, arm)) in self.alloc_conf.iter().zip(of_conf).enumerate() {
            let earlier = others
                .iter()
                .chain(&of_conf[..index])
                .find(|earlier| earlier.is_equivalent_to(arm));
            if let Some(same) = identical_to(arm, scenarios, earlier) {
                let conf = if conf.is_empty() { "''" } else { conf };
                terminal::message(format_args!(
                    "skipping --alloc-conf {conf}: identical to {same}"
                ));
            }
        }
    }
}

/// The configurations that are identical to this one: an earlier option, or configurations of
/// scenarios.
fn identical_to(
    arm: &AllocatorSpec,
    scenarios: &[Scenario],
    earlier: Option<&AllocatorSpec>,
) -> Option<String> {
    if let Some(earlier) = earlier {
        return Some(format!("the earlier option `{earlier}`"));
    }
    let mut listed: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for scenario in scenarios {
        if let Some(same) = listed_as(scenario, arm) {
            listed
                .entry(same.to_string())
                .or_default()
                .push(&scenario.name);
        }
    }
    let places: Vec<String> = listed
        .iter()
        .map(|(name, scenarios)| match scenarios.as_slice() {
            [only] => format!("`{name}` of {only}"),
            several => format!("`{name}` of {} scenarios", several.len()),
        })
        .collect();
    (!places.is_empty()).then(|| places.join(", "))
}

/// Rejects the records of a run, and names the command for them. [`super::inputs::load`] rejects
/// other kinds of files.
fn refuse_records(path: &Path) -> Result<(), CliError> {
    if !store::is_of_run(path) {
        return Ok(());
    }
    let help = format!(
        "render its report with `harness report render {}`",
        quoted(&path.to_string_lossy())
    );
    Err(CliError::input(
        format!(
            "{} contains the records of a run, not a scenario",
            path.display()
        ),
        help,
    ))
}

fn names(arms: &[AllocatorSpec]) -> String {
    arms.iter()
        .map(|arm| format!("`{arm}`"))
        .collect::<Vec<_>>()
        .join(", ")
}

fn lists(scenarios: &[Scenario]) -> String {
    let lists = scenarios.iter().map(|scenario| {
        format!(
            "{} lists {}",
            scenario.path.display(),
            names(&scenario.allocators)
        )
    });
    lists.collect::<Vec<_>>().join("; ")
}

fn not_listed(name: &str, scenarios: &[Scenario]) -> CliError {
    if AllocatorKind::from_name(name).is_some() {
        let help = format!(
            "{}; add it to the `allocators:` of a scenario, or leave it out",
            lists(scenarios)
        );
        return CliError::input(
            format!("no given scenario lists the allocator `{name}`"),
            help,
        );
    }
    let arms: BTreeSet<String> = scenarios
        .iter()
        .flat_map(|scenario| scenario.allocators.iter().map(ToString::to_string))
        .collect();
    let help = choices(
        name,
        "listed by the given scenarios",
        arms.iter().map(String::as_str),
    );
    CliError::input(format!("no given scenario has an allocator `{name}`"), help)
}

fn spec_error(name: &str, error: SpecError) -> CliError {
    match error {
        SpecError::Conf(error) => {
            let conf = name
                .split_once('(')
                .map_or("", |(_, conf)| conf)
                .trim_end_matches(')');
            CliError::conf_of("--allocator", &error, conf)
        }
        SpecError::Library(error) => CliError::input(
            error.to_string(),
            "as in `--allocator 'library(path:./my_alloc.so,alloc:my_malloc,free:my_free)'`",
        ),
        error @ (SpecError::Unknown { .. }
        | SpecError::Unclosed
        | SpecError::NoSettings(_)
        | SpecError::Torch(_)) => CliError::input(
            error.to_string(),
            "as in `--allocator 'caching(max_split_size_mb:512)'`",
        ),
    }
}

fn check_library(arm: &AllocatorSpec) -> Result<(), CliError> {
    let checked = arm.as_library().map_or(Ok(()), arms::check_library);
    checked.map_err(|arms::Unusable { message, help, .. }| CliError::input(message, help))
}

/// Splits a list at its commas, except for commas within brackets, which separate settings.
fn split_names(list: &str) -> impl Iterator<Item = &str> {
    let mut depth = 0_u32;
    list.split(move |c| {
        match c {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            _ => {}
        }
        c == ',' && depth == 0
    })
}
