//! Frees that waited for events of other streams. A snapshot does not tell which streams those were, so each such free waits for a made-up
//! stream, which is waited for where the recording completed the free. Frees that were completed together share one, and a stream whose frees are
//! all completed is used again: few are needed.

use std::collections::{BTreeSet, HashMap, HashSet};

use harness_allocator::device::StreamId;

use crate::snapshot::{Action, Event};

/// The made-up streams of one recording.
#[derive(Debug, Default)]
pub(super) struct PendingFrees {
    /// By the index of a `free_requested` that was put off, and by address where it came before the recording.
    requested: HashMap<usize, StreamId>,
    before: HashMap<u64, StreamId>,
    /// By the index of a `free_completed` that came late.
    completed: HashMap<usize, StreamId>,
    /// How many streams there are, the program's included.
    pub(super) streams: u32,
}

/// Frees that were completed together.
#[derive(Debug, Default)]
struct Batch {
    /// Indices of the requests; those from before the recording by address.
    requests: Vec<usize>,
    before: Vec<u64>,
    completions: Vec<usize>,
}

impl PendingFrees {
    /// Finds the frees that were put off, given those from before the recording and how many streams the program has.
    pub(super) fn find(events: &[Event], before: &HashSet<u64>, program_streams: u32) -> Self {
        let batches = batches(events, before);
        // Requests in the order of the recording, those from before it first, and with each the place where its stream is free again.
        let mut order: Vec<(Option<usize>, usize, &Batch)> = batches
            .iter()
            .map(|batch| {
                let first = if batch.before.is_empty() { batch.requests.first().copied() } else { None };
                (first, batch.completions.last().copied().unwrap_or(usize::MAX), batch)
            })
            .collect();
        order.sort_by_key(|&(first, last, _)| (first, last));
        let mut found = Self { streams: program_streams, ..Self::default() };
        // Streams in use, by the place where they are free again; and free ones.
        let (mut busy, mut idle) = (BTreeSet::new(), BTreeSet::new());
        for (first, last, batch) in order {
            while let Some(&(until, stream)) = busy.first()
                && first.is_some_and(|first| until < first)
            {
                busy.remove(&(until, stream));
                idle.insert(stream);
            }
            let stream = idle.pop_first().unwrap_or_else(|| {
                found.streams += 1;
                StreamId(found.streams - 1)
            });
            busy.insert((last, stream));
            found.requested.extend(batch.requests.iter().map(|&request| (request, stream)));
            found.before.extend(batch.before.iter().map(|&address| (address, stream)));
            found.completed.extend(batch.completions.iter().map(|&completion| (completion, stream)));
        }
        found
    }

    /// The stream that a `free_requested` waits for; `None` where it waits for nothing.
    pub(super) fn of_request(&self, event: usize) -> Option<StreamId> {
        self.requested.get(&event).copied()
    }

    /// The stream that a block waits for whose free was requested before the recording.
    pub(super) fn of_block_before(&self, address: u64) -> Option<StreamId> {
        self.before.get(&address).copied()
    }

    /// The stream that a `free_completed` tells to be done; `None` where the free had not waited.
    pub(super) fn of_completion(&self, event: usize) -> Option<StreamId> {
        self.completed.get(&event).copied()
    }
}

fn batches(events: &[Event], before: &HashSet<u64>) -> Vec<Batch> {
    let mut waiting: HashMap<u64, Option<usize>> = before.iter().map(|&address| (address, None)).collect();
    let (mut batches, mut batch) = (Vec::new(), Batch::default());
    for (index, event) in events.iter().enumerate() {
        match event.action {
            Action::FreeRequested => {
                finish(&mut batches, &mut batch);
                let at_once =
                    events.get(index + 1).is_some_and(|next| next.action == Action::FreeCompleted && next.address == event.address);
                if !at_once {
                    waiting.insert(event.address, Some(index));
                }
            }
            Action::FreeCompleted => {
                if let Some(request) = waiting.remove(&event.address) {
                    batch.completions.push(index);
                    match request {
                        Some(request) => batch.requests.push(request),
                        None => batch.before.push(event.address),
                    }
                }
            }
            Action::Alloc | Action::Oom | Action::Snapshot => finish(&mut batches, &mut batch),
            Action::SegmentAlloc | Action::SegmentFree | Action::SegmentMap | Action::SegmentUnmap => {}
        }
    }
    finish(&mut batches, &mut batch);
    for (address, request) in waiting {
        match request {
            Some(request) => batch.requests.push(request),
            None => batch.before.push(address),
        }
    }
    finish(&mut batches, &mut batch);
    batches
}

fn finish(batches: &mut Vec<Batch>, batch: &mut Batch) {
    let mut done = std::mem::take(batch);
    if !done.requests.is_empty() || !done.before.is_empty() {
        done.requests.sort_unstable();
        done.before.sort_unstable();
        batches.push(done);
    }
}
