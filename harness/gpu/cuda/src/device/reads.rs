//! Reads queued by [`harness_allocator::device::TestDevice::verify_later`]: their slots and
//! results.

use std::collections::BTreeMap;

use super::kernels::{Found, SLOTS};
use harness_allocator::device::{DeviceError, DevicePtr, MemoryRange, StreamId, Tag};
use harness_allocator::units::Bytes;

/// A read whose result has not been collected.
#[derive(Clone, Copy, Debug)]
struct Read {
    stream: StreamId,
    range: MemoryRange,
    tag: Tag,
    slot: u32,
}

#[derive(Debug)]
pub(super) struct Reads {
    /// In queue order.
    queued: Vec<Read>,
    /// Slots that no queued read uses. The first slot is reserved for reads that wait.
    slots: Vec<u32>,
    /// The first corrupted read of each stream, until it is reported.
    wrong: BTreeMap<StreamId, DeviceError>,
}

impl Default for Reads {
    fn default() -> Self {
        Self {
            queued: Vec::new(),
            slots: (1..SLOTS).collect(),
            wrong: BTreeMap::new(),
        }
    }
}

impl Reads {
    /// Returns a slot for another read. If there is none, the reads of [`Reads::oldest`] must be
    /// finished first.
    pub(super) fn free_slot(&self) -> Option<u32> {
        self.slots.last().copied()
    }

    pub(super) fn oldest(&self) -> Option<StreamId> {
        self.queued.first().map(|read| read.stream)
    }

    pub(super) fn are_on(&self, stream: StreamId) -> bool {
        self.queued.iter().any(|read| read.stream == stream)
    }

    pub(super) fn add(&mut self, stream: StreamId, range: MemoryRange, tag: Tag) {
        if let Some(slot) = self.slots.pop() {
            self.queued.push(Read {
                stream,
                range,
                tag,
                slot,
            });
        }
    }

    /// Collects the results of a stream's finished reads, by slot.
    pub(super) fn finish(&mut self, stream: StreamId, findings: &[Option<Found>]) {
        for read in self.queued.extract_if(.., |read| read.stream == stream) {
            if let Some(found) = findings.get(read.slot as usize).copied().flatten() {
                self.wrong
                    .entry(stream)
                    .or_insert_with(|| corrupted(read.range, read.tag, found, None));
            }
            self.slots.push(read.slot);
        }
    }

    pub(super) fn take_result(&mut self, stream: StreamId) -> Result<(), DeviceError> {
        self.wrong.remove(&stream).map_or(Ok(()), Err)
    }

    /// Forgets a stream that ended after its work.
    pub(super) fn forget(&mut self, stream: StreamId) {
        self.finish(stream, &[]);
        self.wrong.remove(&stream);
    }
}

/// Returns the error for a range that does not hold its tag. `word` is the memory at the tag's word
/// around the first wrong byte, if it was read.
pub(super) fn corrupted(
    range: MemoryRange,
    tag: Tag,
    found: Found,
    word: Option<&[u8]>,
) -> DeviceError {
    let word = word.map_or_else(String::new, |word| {
        let digits: String = word
            .iter()
            .rev()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        format!("its word holds 0x{digits}, and ")
    });
    let text = format!("{word}{} of {} bytes differ", found.bytes, range.len.0);
    let at: DevicePtr = range.start.offset(Bytes(found.offset));
    DeviceError::Corrupted {
        range,
        at,
        expected: tag.0,
        found: text,
    }
}
