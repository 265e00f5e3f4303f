//! One row per snapshot, for tables of many jobs: [`Analysis`].

use harness_allocator::units::Bytes;
use harness_trace::program::{ProgramError, RecordedEnd, RecordedProgram};
use harness_trace::snapshot::Snapshot;
use serde::{Deserialize, Serialize};

use crate::byte_cause::ByteCause;
use crate::causes::{self, Options};
use crate::compare::Whole;
use crate::explanation::Explanation;
use crate::fidelity::Fidelity;
use crate::grid::{Configuration, Grid};
use crate::headline::Reason;
use crate::program_advice::each_change;
use crate::state::{History, main_device};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FleetOutcome {
    OutOfMemory,
    Ended,
    #[default]
    Unreadable,
}

impl FleetOutcome {
    pub const fn name(self) -> &'static str {
        match self {
            Self::OutOfMemory => "out_of_memory",
            Self::Ended => "ended",
            Self::Unreadable => "unreadable",
        }
    }
}

/// The result for one snapshot. Of several devices, the one that ran out of memory counts, else the
/// one with the most reserved memory.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Analysis {
    pub outcome: FleetOutcome,
    /// Why the snapshot cannot be read, or why its replay is no evidence.
    pub problem: Option<String>,
    pub device: u32,
    pub events: u64,
    /// Why the request failed: `too_large`, `nearly_full`, `memory_fraction`, `rounding`,
    /// `unproven`, or a cause as in `harness explain --format json`.
    pub cause: Option<String>,
    /// The missing bytes if the program is too large, the limit of the fraction, the rounded
    /// request, or else the bytes that the request could not use.
    pub cause_bytes: u64,
    pub requested: u64,
    pub allocated: u64,
    pub reserved: u64,
    /// The peaks since the recording began. Without events, the memory at the end: the peaks are at
    /// least that.
    pub peak_allocated: u64,
    pub peak_reserved: u64,
    pub device_total: u64,
    /// The line whose request failed.
    pub site: Option<String>,
    /// The line that holds most of the memory that the cause is about, and its bytes.
    pub top_site: Option<String>,
    pub top_site_bytes: u64,
    /// The largest category of allocated memory, and its bytes.
    pub category: Option<String>,
    pub category_bytes: u64,
    /// Whether a replay with the recorded settings equals the recording. `None` without events.
    pub faithful: Option<bool>,
    /// Settings (`PYTORCH_CUDA_ALLOC_CONF=…`) and changes of the program with which the failed
    /// request succeeds in a replay.
    pub cures: Vec<String>,
}

impl Analysis {
    pub fn unreadable(problem: impl Into<String>) -> Self {
        Self {
            problem: Some(problem.into()),
            ..Self::default()
        }
    }

    /// Explains a snapshot, and replays a failed program with other settings and with changes, each
    /// once. `memory` as in `harness advise`.
    pub fn of(snapshot: &Snapshot, memory: Option<Bytes>) -> Self {
        let Some((device, _)) = main_device(snapshot, &snapshot.devices()) else {
            return Self::unreadable("the snapshot has neither segments nor events");
        };
        let options = Options {
            memory,
            ..Options::default()
        };
        match causes::explain(snapshot, device, options) {
            Ok(explanation) => Self::explained(snapshot, memory, &explanation),
            Err(error) => Self::unreadable(error.to_string()),
        }
    }

    fn explained(snapshot: &Snapshot, memory: Option<Bytes>, explanation: &Explanation) -> Self {
        let Explanation {
            device,
            ref accounts,
            device_total,
            ref fidelity,
            ..
        } = *explanation;
        let history = History::new(snapshot, device, causes::config(snapshot));
        let peaks = Whole::of(&history);
        let largest = explanation
            .categories
            .iter()
            .max_by_key(|category| category.bytes);
        let mut analysis = Self {
            outcome: FleetOutcome::Ended,
            problem: fidelity.as_ref().and_then(divergence),
            device,
            events: explanation.moment.events as u64,
            allocated: accounts.allocated.0,
            reserved: accounts.reserved.0,
            peak_allocated: peaks
                .map_or(accounts.allocated, |peaks| peaks.peak_allocated)
                .0,
            peak_reserved: peaks
                .map_or(accounts.reserved, |peaks| peaks.peak_reserved)
                .0,
            device_total: device_total.0,
            category: largest.map(|category| category.category.clone()),
            category_bytes: largest.map_or(0, |category| category.bytes.0),
            faithful: fidelity.as_ref().map(|fidelity| fidelity.faithful),
            ..Self::default()
        };
        let Some(request) = &explanation.request else {
            return analysis;
        };
        let (cause, bytes, of) = match Reason::of(explanation, request) {
            Reason::Fraction { limit, .. } => ("memory_fraction", limit, ByteCause::Allocated),
            Reason::Rounding { asked, .. } => ("rounding", asked, ByteCause::Allocated),
            Reason::Unproven => ("unproven", request.asked, ByteCause::Allocated),
            Reason::TooLarge(lacking) => ("too_large", lacking, ByteCause::Allocated),
            Reason::NearlyFull(cached) => ("nearly_full", cached, ByteCause::Allocated),
            Reason::Unusable(cause) => (cause.name(), explanation.bytes(cause), cause),
        };
        let top = explanation.largest_site(of);
        analysis = Self {
            outcome: FleetOutcome::OutOfMemory,
            cause: Some(cause.to_owned()),
            cause_bytes: bytes.0,
            requested: request.requested.0,
            site: Some(request.site.clone()),
            top_site: top.map(|top| top.site.clone()),
            top_site_bytes: top.map_or(0, |top| top.bytes.0),
            ..analysis
        };
        if explanation.moment.events > 0 && explanation.run.is_none() && fidelity.is_none() {
            (analysis.faithful, analysis.problem) = (
                Some(false),
                Some("the recording cannot be replayed".to_owned()),
            );
        }
        if analysis.faithful == Some(true) {
            match cures(snapshot, device, memory) {
                Ok(cures) => analysis.cures = cures,
                Err(error) => analysis.problem = Some(error.to_string()),
            }
        }
        analysis
    }
}

/// The first difference, without its addresses and its event.
fn divergence(fidelity: &Fidelity) -> Option<String> {
    let first = fidelity.first_divergence.as_ref()?;
    let without_place = |text: &str| text.split(" at ").next().unwrap_or_default().to_owned();
    let (recorded, replayed) = (
        without_place(&first.recorded),
        without_place(&first.replayed),
    );
    let what = if recorded == replayed {
        format!("another address for {recorded}")
    } else {
        format!("recorded {recorded}, replayed {replayed}")
    };
    Some(format!(
        "the replay differs{}: {what}",
        if first.event.is_some() {
            ""
        } else {
            " at the end"
        }
    ))
}

/// The start of a cure by settings: the variable that every version of PyTorch reads first, even if
/// it is empty.
pub const SETTINGS: &str = "PYTORCH_CUDA_ALLOC_CONF=";

fn cures(
    snapshot: &Snapshot,
    device: u32,
    memory: Option<Bytes>,
) -> Result<Vec<String>, ProgramError> {
    let program = RecordedProgram::recover_with(snapshot, device, memory)?;
    let (Some(memory), RecordedEnd::Oom { .. }) = (memory.or(program.memory), program.ended) else {
        return Ok(Vec::new());
    };
    let configurations = Configuration::grid(&program.config);
    let fits = |program: &RecordedProgram, configuration: &Configuration| {
        let prepared = program.prepare()?;
        Ok::<_, ProgramError>(
            Grid::new(&prepared, memory)
                .replay(configuration, memory)?
                .oom
                .is_none(),
        )
    };
    let Some((own, others)) = configurations.split_first() else {
        return Ok(Vec::new());
    };
    let pytorchs = others
        .iter()
        .filter(|configuration| configuration.allocator.is_pytorch());
    // Some settings cannot be replayed from the recorded start.
    let settings = pytorchs.filter(|configuration| fits(&program, configuration).unwrap_or(false));
    let name = |Configuration { name, .. }: &Configuration| {
        if name.is_empty() { "''" } else { name.as_str() }.to_owned()
    };
    let mut cures: Vec<String> = settings
        .map(|configuration| format!("{SETTINGS}{}", name(configuration)))
        .collect();
    each_change(&program, snapshot, |change| {
        if fits(&change.program, own).unwrap_or(false) {
            // In a sentence, a comma ends an inserted clause.
            cures.push(change.kind.trim_end_matches(',').to_owned());
        }
    });
    Ok(cures)
}

/// An analysed file. `harness fleet` keeps rows as lines of JSON.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The path or URL.
    pub file: String,
    pub job: String,
    pub rank: Option<u32>,
    /// Changes when the file does.
    pub stamp: String,
    pub hash: String,
    /// The version and the options that made the analysis.
    pub made_with: String,
    #[serde(flatten)]
    pub analysis: Analysis,
}

/// The job and the rank in a path: `JOB-rank3-gpu0-….pickle` as `harness.observe` names its
/// files, or `JOB/rank3.pickle`. Without a rank, each file is a job.
pub fn job_of(file: &str) -> (String, Option<u32>) {
    let (folder, name) = file.rsplit_once('/').unwrap_or(("", file));
    let with_folder = |prefix: &str| match (folder, prefix) {
        (folder, "") => folder.to_owned(),
        ("", prefix) => prefix.to_owned(),
        (folder, prefix) => format!("{folder}/{prefix}"),
    };
    let found = name.rmatch_indices("rank").find_map(|(at, _)| {
        let rest = name[at + 4..].trim_start_matches(['-', '_', '=']);
        let digits = rest
            .find(|c: char| !c.is_ascii_digit())
            .unwrap_or(rest.len());
        Some((&name[..at], rest[..digits].parse().ok()?))
    });
    match found {
        Some((prefix, rank)) => (
            with_folder(prefix.trim_end_matches(['-', '_', '.'])),
            Some(rank),
        ),
        None => (with_folder(name.split(".p").next().unwrap_or(name)), None),
    }
}

#[cfg(test)]
mod tests;
