//! Frees that waited for events of other streams. A snapshot does not name these streams, so each
//! free waits for a synthetic stream, which is synchronized when the recording completes the free.
//! Frees that complete together share a stream, and streams are reused, so few are needed.

use std::collections::{BTreeSet, HashMap, HashSet};

use harness_allocator::device::StreamId;

use crate::snapshot::{Action, Event};

#[derive(Debug, Default)]
pub(super) struct PendingFrees {
    /// By the index of the `free_requested` event. Frees that were not deferred are absent.
    pub(super) requested: HashMap<usize, StreamId>,
    /// By address: blocks whose free was requested before the recording.
    pub(super) before: HashMap<u64, StreamId>,
    /// By the index of the `free_completed` event.
    pub(super) completed: HashMap<usize, StreamId>,
    /// The number of streams, including the program's.
    pub(super) streams: u32,
}

#[derive(Debug, Default)]
struct Batch {
    /// Indices of the `free_requested` events. Earlier frees are in `before`, by address.
    requests: Vec<usize>,
    before: Vec<u64>,
    completions: Vec<usize>,
}

impl PendingFrees {
    /// Finds the deferred frees. `before` lists blocks whose free was requested before the
    /// recording.
    pub(super) fn find(events: &[Event], before: &HashSet<u64>, program_streams: u32) -> Self {
        let batches = batches(events, before);
        // Sorted by the first request; frees from before the recording come first. Each also has
        // the index of its last completion.
        let mut order: Vec<(Option<usize>, usize, &Batch)> = batches
            .iter()
            .map(|batch| {
                let first = if batch.before.is_empty() {
                    batch.requests.first().copied()
                } else {
                    None
                };
                (
                    first,
                    batch.completions.last().copied().unwrap_or(usize::MAX),
                    batch,
                )
            })
            .collect();
        order.sort_by_key(|&(first, last, _)| (first, last));
        let mut found = Self {
            streams: program_streams,
            ..Self::default()
        };
        // Streams in use, with the index of their last completion, and idle streams.
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
            found
                .requested
                .extend(batch.requests.iter().map(|&request| (request, stream)));
            found
                .before
                .extend(batch.before.iter().map(|&address| (address, stream)));
            found.completed.extend(
                batch
                    .completions
                    .iter()
                    .map(|&completion| (completion, stream)),
            );
        }
        found
    }
}

impl Batch {
    fn add(&mut self, address: u64, request: Option<usize>) {
        match request {
            Some(request) => self.requests.push(request),
            None => self.before.push(address),
        }
    }
}

fn batches(events: &[Event], before: &HashSet<u64>) -> Vec<Batch> {
    let mut waiting: HashMap<u64, Option<usize>> =
        before.iter().map(|&address| (address, None)).collect();
    let (mut batches, mut batch) = (Vec::new(), Batch::default());
    for (index, event) in events.iter().enumerate() {
        match event.action {
            Action::FreeRequested => {
                finish(&mut batches, &mut batch);
                let at_once = events.get(index + 1).is_some_and(|next| {
                    next.action == Action::FreeCompleted && next.address == event.address
                });
                if !at_once {
                    waiting.insert(event.address, Some(index));
                }
            }
            Action::FreeCompleted => {
                if let Some(request) = waiting.remove(&event.address) {
                    batch.completions.push(index);
                    batch.add(event.address, request);
                }
            }
            Action::Alloc | Action::Oom | Action::Snapshot => finish(&mut batches, &mut batch),
            Action::SegmentAlloc
            | Action::SegmentFree
            | Action::SegmentMap
            | Action::SegmentUnmap => {}
        }
    }
    finish(&mut batches, &mut batch);
    waiting
        .into_iter()
        .for_each(|(address, request)| batch.add(address, request));
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
