//! Explains the use of a device's memory at one moment of a recording, and why a request failed.
//!
//! [`explain`] returns an [`Explanation`]. The bytes add up to the device's memory, because each
//! byte counts once, under the first cause that applies:
//!
//! 1. In an allocated block: `allocated` for the requested size, `rounding` for the rest.
//! 2. In a freed block that waits for other streams: `pending_free`.
//! 3. Free, in a private pool that does not serve the request: `private_pool`.
//! 4. Free, in the pool of the other size (small or large): `other_pool`.
//! 5. Free, for another stream: `other_stream`.
//! 6. Free, in a segment or page that is entirely free and can be released: `whole_segments`.
//! 7. Free, in a segment or page that a live block pins: `inactive_split`.
//! 8. Not reserved by the allocator: `free` on the device, or `others_hold`.
//!
//! Cause 4 applies only if a request failed. Without a failed request, cause 5 is about streams
//! that no longer allocate, although others reserve more memory.

mod account;
mod notes;

use std::collections::BTreeMap;

use harness_allocator::allocator::caching::{Config, TorchVersion};
use harness_allocator::units::Bytes;
use harness_record::{FailedRequest, cause_names};
use harness_trace::program::ProgramError;
use harness_trace::snapshot::{Action, Event, RecordedHostMemory, Snapshot};

pub use crate::byte_cause::{ByteCause, CauseBytes, SiteBytes};
use crate::categories::{self, CategoryBytes, CategoryRule};
pub use crate::consistency::Contradiction;
pub use crate::explanation::Explanation;
use crate::fidelity::{self, Fidelity};
use crate::state::{At, History, MomentError, MomentKind};
pub use crate::view::{RefusedRequest, TotalKnown, Totals};
use crate::{attempts, consistency, growth, idle, pins, sites::Sites, view::View, waits};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    pub memory: Option<Bytes>,
    pub at: At,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExplainError {
    #[error(transparent)]
    Moment(#[from] MomentError),
    /// The file was changed or truncated, or another tool wrote it.
    #[error(
        "the recording of device {device} contradicts itself: {contradiction}. Record the program \
         again"
    )]
    Contradiction {
        device: u32,
        contradiction: Contradiction,
    },
    #[error(
        "the device's memory cannot be {given}: the snapshot shows {least} ({} bytes) on device \
         {device}, {what}; give at least that much, or \
         leave the option out", least.get()
    )]
    MemoryTooSmall {
        given: Bytes,
        least: Bytes,
        device: u32,
        what: &'static str,
    },
}

/// The recorded settings. PyTorch's defaults if the file has none, or if this version cannot parse
/// them.
pub fn config(snapshot: &Snapshot) -> Config {
    snapshot.config().unwrap_or_else(|_| Config {
        torch: snapshot.torch(),
        ..Config::default()
    })
}

/// The facts about the last refused request of a recording. The first of [`harness_record::causes`]
/// is the main cause, which every command names. `None` if no request was refused.
pub fn refused(snapshot: &Snapshot, config: &Config, memory: Bytes) -> Option<FailedRequest> {
    let device = 0;
    let history = History::new(snapshot, device, config.clone());
    let moment = history.moment(At::Oom).ok()?;
    let (state, sites) = (history.state(moment.event), Sites::new(snapshot, device));
    let view = View {
        snapshot,
        device,
        config,
        history: &history,
        state: &state,
        sites: &sites,
        moment: &moment,
        is_foreign: false,
    };
    let (request, size) = (view.request()?, view.size_of_device(Some(memory)).ok()?);
    let (accounts, _) = view.account(Some(&request), &[]);
    Some(view.failed_request(&request, accounts, &size))
}

/// Explains the memory of one device. Takes `n log n` time for `n` events and blocks.
pub fn explain(
    snapshot: &Snapshot,
    device: u32,
    options: Options,
) -> Result<Explanation, ExplainError> {
    explain_by(snapshot, device, options, &[])
}

/// Like [`explain`], with the user's categories.
pub fn explain_by(
    snapshot: &Snapshot,
    device: u32,
    options: Options,
    rules: &[CategoryRule],
) -> Result<Explanation, ExplainError> {
    let replay = |is_foreign: bool| {
        let is_replayable = !snapshot.events_of(device).is_empty() && !is_foreign;
        is_replayable.then(|| {
            fidelity::recover(snapshot, device, options.memory).map(|(_, fidelity)| fidelity)
        })
    };
    explain_with(snapshot, device, options, rules, replay)
}

/// The headline of an explanation, without a replay.
pub fn headline(snapshot: &Snapshot, device: u32) -> Result<String, ExplainError> {
    explain_with(snapshot, device, Options::default(), &[], |_| None)
        .map(|explanation| explanation.headline)
}

/// The categories of memory, without a replay.
pub fn categories(snapshot: &Snapshot, device: u32) -> Result<Vec<CategoryBytes>, ExplainError> {
    explain_with(snapshot, device, Options::default(), &[], |_| None)
        .map(|explanation| explanation.categories)
}

fn explain_with(
    snapshot: &Snapshot,
    device: u32,
    options: Options,
    rules: &[CategoryRule],
    replay: impl FnOnce(bool) -> Option<Result<Fidelity, ProgramError>>,
) -> Result<Explanation, ExplainError> {
    let config = config(snapshot);
    let run = snapshot.run();
    let is_foreign = run.as_ref().is_some_and(|run| !run.is_pytorchs);
    if let Some(contradiction) =
        consistency::contradiction(snapshot, device).filter(|_| !is_foreign)
    {
        return Err(ExplainError::Contradiction {
            device,
            contradiction,
        });
    }
    let history = History::new(snapshot, device, config.clone());
    let moment = history.moment(options.at)?;
    let state = history.state(moment.event);
    let sites = Sites::new(snapshot, device);
    let view = View {
        snapshot,
        device,
        config: &config,
        history: &history,
        state: &state,
        sites: &sites,
        moment: &moment,
        is_foreign,
    };
    let recovered = replay(is_foreign);
    let mut explanation = explain_view(&view, options, rules, recovered)?;
    explanation.sites = explanation
        .named_sites()
        .map(|id| (id, sites.get(id).clone()))
        .collect();
    explanation.headline = crate::headline::of(&explanation);
    Ok(explanation)
}

/// Explains a moment, without headline and sites.
fn explain_view(
    view: &View<'_>,
    options: Options,
    rules: &[CategoryRule],
    recovered: Option<Result<Fidelity, ProgramError>>,
) -> Result<Explanation, ExplainError> {
    let View {
        snapshot,
        is_foreign,
        ..
    } = *view;
    let request = view.request();
    let size = view.size_of_device(options.memory)?;
    let idle_streams = if request.is_none() && !is_foreign {
        idle::list(view)
    } else {
        Vec::new()
    };
    let (accounts, held) = view.account(request.as_ref(), &idle_streams);
    let pinned = pins::list(view);
    let of_pytorch = request.as_ref().filter(|_| !is_foreign);
    let failed_request = of_pytorch.map(|request| view.failed_request(request, accounts, &size));
    let why: Vec<&str> = failed_request.iter().flat_map(cause_names).collect();
    let ways = of_pytorch
        .into_iter()
        .flat_map(|request| attempts::of(view, request, accounts, &size))
        .collect();
    let mut causes = held.into_causes(view.sites);
    causes.extend(size.outside);
    let mut notes = notes(view, size.known);
    notes.extend(
        recovered
            .as_ref()
            .map(|fidelity| replayed(fidelity, view.config.torch)),
    );
    Ok(Explanation {
        headline: String::new(),
        device_total: size.total,
        device_total_is: size.known,
        device: view.device,
        request,
        accounts,
        causes,
        why,
        ways,
        pinned,
        stalled_frees: waits::list(view),
        idle_streams,
        growing: growth::list(view),
        categories: if is_foreign {
            Vec::new()
        } else {
            categories::list(view, rules)
        },
        survived_ooms: survived_ooms(view),
        host_memory: snapshot.host_memory(),
        notes,
        fidelity: recovered.and_then(Result::ok),
        sites: BTreeMap::new(),
        conf: (snapshot.settings.as_ref()).map(|settings| settings.conf.clone()),
        run: snapshot.run(),
        failed_request,
        moment: view.moment.clone(),
    })
}

fn survived_ooms(view: &View<'_>) -> usize {
    let is_oom = |event: &&Event| event.action == Action::Oom;
    let all = view.history.events().iter().filter(is_oom).count();
    all.saturating_sub(usize::from(view.moment.at == MomentKind::Oom))
}

/// The notes on a snapshot, without those on its replay.
fn notes(view: &View<'_>, known: TotalKnown) -> Vec<String> {
    let snapshot = view.snapshot;
    let unknown = (snapshot.config().is_err())
        .then(|| "the settings cannot be parsed, so PyTorch's defaults are assumed".to_owned());
    let mut notes: Vec<String> = snapshot.notes.iter().cloned().chain(unknown).collect();
    notes.extend(view.notes(known));
    if !categories::recorded(snapshot).is_empty() {
        notes.push(
            "parameters, gradients and optimizer state are those that the program had".to_owned(),
        );
    }
    let host_memory = snapshot.host_memory();
    let host_memory = host_memory.filter(RecordedHostMemory::is_of_program);
    notes.extend(host_memory.map(|host| {
        format!(
            "pinned host memory at the time of the snapshot, besides the figures above: {} ({})",
            host.now(),
            host.peaks()
        )
    }));
    notes
}

fn replayed(fidelity: &Result<Fidelity, ProgramError>, torch: TorchVersion) -> String {
    match fidelity {
        Ok(fidelity) => match &fidelity.first_divergence {
            None => format!(
                "a replay with the recorded settings in PyTorch {torch} matches the recording: \
                 {fidelity}"
            ),
            Some(divergence) => format!(
                "a replay with the recorded settings in PyTorch {torch} differs from the recording \
                 ({fidelity}), so replays with other settings are unreliable. First difference: \
                 {divergence}"
            ),
        },
        Err(error @ ProgramError::NoRequests { .. }) => error.to_string(),
        Err(error) => format!("the recording cannot be replayed: {error}"),
    }
}

#[cfg(test)]
mod tests;
