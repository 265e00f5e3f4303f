//! The sections of a report as data. A section is collected once, and every format renders it.

use std::collections::BTreeSet;

use harness_allocator::units::Bytes;
use harness_record::{FailedRequest, PinnedSegment, RunRecord, StepRecord, Verdict, Violation};

use super::words::{self, Grid};
use super::{ArmGroup, DeviceGroup, Report, ScenarioGroup, why};

/// An arm with its scenario and device.
#[derive(Clone, Copy)]
pub(super) struct Place<'r, 'a> {
    pub(super) scenario: &'r ScenarioGroup<'a>,
    pub(super) device: &'r DeviceGroup<'a>,
    pub(super) arm: &'r ArmGroup<'a>,
    /// The report has other devices, so a place names its device.
    pub(super) has_devices: bool,
}

impl Place<'_, '_> {
    /// The scenario and the allocator.
    pub(super) fn name(&self) -> String {
        format!("{} with {}", self.scenario.info.name, self.arm.allocator)
    }
}

/// A failed run.
pub(super) struct Failure<'r> {
    pub(super) run: &'r RunRecord,
    pub(super) first: &'r Violation,
    /// Other violations at the same step.
    pub(super) rest: &'r [Violation],
    pub(super) request: Option<(&'r StepRecord, &'r FailedRequest)>,
}

impl<'r> Failure<'r> {
    pub(super) fn new(run: &'r RunRecord, first: &'r Violation, rest: &'r [Violation]) -> Self {
        let last = run.steps.last();
        let request = last.and_then(|last| Some((last, last.failed_request.as_ref()?)));
        Self {
            run,
            first,
            rest,
            request,
        }
    }

    pub(super) fn violations(&self) -> impl Iterator<Item = &'r Violation> + use<'r> {
        std::iter::once(self.first).chain(self.rest)
    }

    /// Why the last request failed: a title and an explanation.
    pub(super) fn why(&self) -> Option<(&'static str, String)> {
        let (_, failed_request) = self.request?;
        Some((why::title(failed_request), why::explain(failed_request)))
    }
}

impl<'a> Report<'a> {
    pub(super) fn places(&self) -> impl Iterator<Item = Place<'_, 'a>> {
        let has_devices = self.devices.len() > 1;
        self.by_device().flat_map(move |(scenario, on_device)| {
            on_device.arms.iter().map(move |arm| Place {
                scenario,
                device: &self.devices[on_device.device],
                arm,
                has_devices,
            })
        })
    }

    pub(super) fn failures(&self) -> impl Iterator<Item = (Place<'_, 'a>, Failure<'a>)> {
        self.places()
            .filter_map(|place| match &place.arm.shown().verdict {
                Verdict::Failed { first, rest } => {
                    Some((place, Failure::new(place.arm.shown(), first, rest)))
                }
                _ => None,
            })
    }

    /// Skipped and contended arms, each with its verdict and the reason.
    pub(super) fn unjudged(&self) -> impl Iterator<Item = (Place<'_, 'a>, &'static str, &'a str)> {
        self.places()
            .filter_map(|place| match &place.arm.shown().verdict {
                verdict @ (Verdict::Skipped { reason, .. } | Verdict::Contended { reason }) => {
                    Some((place, words::verdict(verdict), reason.as_str()))
                }
                _ => None,
            })
    }
}

/// Tabulates the memory by owner, at the moment of the failed request or else after the last step.
pub(super) fn memory_by_owner(run: &RunRecord, last: &StepRecord) -> Grid {
    let accounts = last
        .failed_request
        .as_ref()
        .map_or(&last.accounts, |failed_request| &failed_request.accounts);
    let device = &accounts.device;
    let unallocated = accounts.reserved.saturating_sub(accounts.active);
    let split = last.failed_request.as_ref().map_or(
        Bytes(run.stats.inactive_split_bytes.all.current),
        |failed_request| failed_request.inactive_split,
    );
    let split = Some(split.min(unallocated)).filter(|&split| split > Bytes::ZERO);
    let beyond = device.used.saturating_sub(
        device.context_overhead + accounts.reserved + device.external_memory + device.processes,
    );
    let always = |name, size| Some((name, size));
    let if_any = |name, size| (size > Bytes::ZERO).then_some((name, size));
    let rows = [
        always("limit", run.scenario.memory),
        always("free on the device", device.free),
        if_any("in use by other processes", device.external_memory),
        if_any("in use by other processes of the run", device.processes),
        if_any(
            "device used beyond reserved (the driver's rounding, other processes)",
            beyond,
        ),
        always("reserved by the allocator", accounts.reserved),
        always("– allocated", accounts.allocated),
        if_any(
            "– freed, but waiting for an event",
            accounts.active.saturating_sub(accounts.allocated),
        ),
        always("– free", unallocated),
        split.and_then(|split| always("– – in segments with live blocks (inactive split)", split)),
        split.and_then(|split| always("– – in free segments", unallocated.saturating_sub(split))),
    ];
    let rows = rows
        .into_iter()
        .flatten()
        .map(|(name, size)| vec![name.to_owned(), words::size(size)]);
    Grid::new("lr", ["the memory", "size"], rows)
}

pub(super) fn pinned_segments(failed_request: &FailedRequest) -> Grid {
    let cells = |segment: &PinnedSegment| {
        vec![
            words::size(segment.size),
            words::size(segment.free),
            why::holders_of(segment),
        ]
    };
    Grid::new(
        "rrl",
        ["segment of", "free in it", "live in it"],
        failed_request.pinned.iter().map(cells),
    )
}

pub(super) fn devices(report: &Report<'_>) -> Grid {
    let heads = [
        "device",
        "memory",
        "clock",
        "driver",
        "CUDA",
        "clocks (SM / memory)",
        "identity and state at the start",
    ];
    Grid::new("l", heads, report.devices.iter().map(device_cells))
}

fn device_cells(device: &DeviceGroup<'_>) -> Vec<String> {
    let print = &device.info.fingerprint;
    let (sm, memory): (BTreeSet<u32>, BTreeSet<u32>) = device.clocks_mhz.iter().copied().unzip();
    let clocks =
        (!sm.is_empty()).then(|| format!("{} / {} MHz", words::range(&sm), words::range(&memory)));
    let mut state: Vec<String> = print
        .uuid_hash
        .iter()
        .map(|hash| format!("UUID hash {hash}"))
        .collect();
    state.extend(
        print
            .mig
            .map(|on| if on { "MIG on" } else { "MIG off" }.to_owned()),
    );
    state.extend(
        print
            .ecc
            .map(|on| if on { "ECC on" } else { "ECC off" }.to_owned()),
    );
    state.extend(
        device
            .other_processes
            .map(|number| format!("other processes: {number}")),
    );
    if !device.throttle_reasons.is_empty() {
        let reasons: Vec<&str> = device.throttle_reasons.iter().copied().collect();
        state.push(format!("throttled: {}", reasons.join(", ")));
    }
    let cells = [
        device.label.clone(),
        words::memory(device),
        words::clock(device),
        words::or_nothing(print.driver.as_deref()),
        words::or_nothing(print.cuda.as_deref()),
        words::or_nothing(clocks),
        words::unless_empty(state.join(", ")),
    ];
    cells.to_vec()
}
