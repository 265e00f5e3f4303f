//! [`Deferred`]: the freed blocks of PyTorch's allocators that other streams still used, and when
//! the host knew that their work had ended. With [`Events::Instant`] such a block is used again
//! sooner; a replay of the program shows the memory of a GPU that ends the work this late.
//!
//! [`Events::Instant`]: harness_gpu_settings::settings::Events::Instant

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::work::Work;

/// More blocks are not noted, and then none is known.
const MOST: usize = 500_000;

/// A free of an allocator: its device, and its number among the frees of that device, from 1.
pub(crate) type Free = (usize, u64);

#[derive(Debug, Default)]
pub(crate) struct Deferred {
    frees: Vec<DeferredFree>,
    /// By stream and number of its work: the positions of the frees that wait for it.
    waiting: BTreeMap<usize, BTreeMap<u64, Vec<usize>>>,
    /// Work that the program has seen to end, by its questions.
    seen: Work,
    /// Whether a free has no number, or there are too many.
    is_incomplete: bool,
}

#[derive(Debug)]
struct DeferredFree {
    free: Free,
    /// Streams whose work the host does not know to have ended.
    streams: usize,
    /// The number of allocations on the device when the host knew it.
    ended: Option<u64>,
}

impl Deferred {
    /// Notes a free that waits for this work.
    pub(crate) fn add(&mut self, free: Option<Free>, mut work: Work) {
        let Some(free) = free.filter(|_| self.frees.len() < MOST) else {
            self.is_incomplete = true;
            return;
        };
        let seen = &self.seen;
        work.retain(|stream, number| seen.get(stream).is_none_or(|seen| seen < number));
        if work.is_empty() {
            return;
        }
        for (stream, number) in &work {
            let of_stream = self.waiting.entry(*stream).or_default();
            of_stream.entry(*number).or_default().push(self.frees.len());
        }
        self.frees.push(DeferredFree {
            free,
            streams: work.len(),
            ended: None,
        });
    }

    /// Ends the work of a stream up to a number. `allocations` counts those on a device so far.
    pub(crate) fn end(&mut self, stream: usize, number: u64, allocations: impl Fn(usize) -> u64) {
        let Some(waiting) = self.waiting.get_mut(&stream) else {
            return;
        };
        let later = number.checked_add(1).map(|next| waiting.split_off(&next));
        let ended = std::mem::replace(waiting, later.unwrap_or_default());
        for index in ended.into_values().flatten() {
            let free = &mut self.frees[index];
            free.streams -= 1;
            if free.streams == 0 {
                free.ended = Some(allocations(free.free.0));
            }
        }
    }

    /// Ends work, because the program has asked and seen that it has ended.
    pub(crate) fn see(&mut self, work: Work, allocations: impl Fn(usize) -> u64) {
        for (stream, number) in work {
            self.end(stream, number, &allocations);
            let seen = self.seen.entry(stream).or_default();
            *seen = number.max(*seen);
        }
    }

    /// A line for each free: its device, its number, and the number of allocations when the host
    /// knew that the work had ended, or `never`. `None` if that is not known of all.
    pub(crate) fn lines(&self) -> Option<String> {
        let mut lines = String::new();
        for DeferredFree { free, ended, .. } in &self.frees {
            let (device, number) = free;
            let ended = ended.map_or_else(|| "never".to_owned(), |ended| ended.to_string());
            let _ = writeln!(lines, "free {device} {number} {ended}");
        }
        (!self.is_incomplete).then_some(lines)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn work(of: &[(usize, u64)]) -> Work {
        of.iter().copied().collect()
    }

    #[test]
    fn a_free_ends_when_the_host_knows_the_end_of_the_work_of_all_its_streams() {
        let mut deferred = Deferred::default();
        deferred.add(Some((0, 1)), work(&[(7, 3), (8, 5)]));
        deferred.add(Some((0, 2)), work(&[(7, 4)]));
        deferred.add(Some((1, 1)), work(&[(8, 5)]));
        deferred.end(8, 5, |device| 10 + device as u64);
        deferred.end(7, 3, |_| 20);
        deferred.end(9, u64::MAX, |_| 30);
        assert_eq!(
            deferred.lines().as_deref(),
            Some("free 0 1 20\nfree 0 2 never\nfree 1 1 11\n")
        );
        // A stream is destroyed.
        deferred.end(7, u64::MAX, |_| 40);
        let lines = deferred.lines().expect("all are known");
        assert!(lines.contains("free 0 2 40"), "{lines}");
    }

    #[test]
    fn work_that_the_program_has_seen_to_end_defers_no_later_free() {
        let mut deferred = Deferred::default();
        deferred.add(Some((0, 1)), work(&[(7, 3)]));
        deferred.see(work(&[(7, 3)]), |_| 5);
        deferred.add(Some((0, 2)), work(&[(7, 3)]));
        deferred.add(Some((0, 3)), work(&[(7, 3), (8, 1)]));
        deferred.end(8, 1, |_| 6);
        assert_eq!(
            deferred.lines().as_deref(),
            Some("free 0 1 5\nfree 0 3 6\n")
        );
    }

    #[test]
    fn nothing_is_known_if_a_free_has_no_number() {
        let mut deferred = Deferred::default();
        deferred.add(Some((0, 1)), work(&[(7, 3)]));
        deferred.add(None, work(&[(7, 4)]));
        assert_eq!(deferred.lines(), None);
    }
}
