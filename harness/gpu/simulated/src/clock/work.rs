//! The work of each stream, and what the host knows about its end.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{HANDLES, PER_THREAD_STREAMS, STEP, Streams, key};

/// `cudaStreamNonBlocking`: a flag of a stream that does not synchronize with the legacy stream.
pub(super) const NON_BLOCKING: u32 = 1;

/// By stream: the number of its pieces of work.
pub(crate) type Work = BTreeMap<usize, u64>;

/// Counters of submitted work. More streams than these share counters, and the work of one then
/// counts for all that share.
const COUNTERS: usize = 1 << 13;
/// Counters of the default streams: one half are those of `cudaStreamPerThread`.
const OF_DEFAULT: usize = 1 << 10;

/// The pieces of work that each stream has got so far.
#[derive(Debug)]
pub(crate) struct Submitted(Box<[AtomicU64]>);

impl Default for Submitted {
    fn default() -> Self {
        Self((0..COUNTERS).map(|_| AtomicU64::new(0)).collect())
    }
}

impl Submitted {
    fn counter(&self, stream: usize) -> &AtomicU64 {
        let index = match stream {
            HANDLES.. => OF_DEFAULT + (stream - HANDLES) / STEP % (COUNTERS - OF_DEFAULT),
            PER_THREAD_STREAMS.. => {
                OF_DEFAULT / 2 + (stream - PER_THREAD_STREAMS) % (OF_DEFAULT / 2)
            }
            _ => stream % (OF_DEFAULT / 2),
        };
        &self.0[index]
    }

    pub(super) fn by(&self, stream: usize) -> u64 {
        self.counter(stream).load(Ordering::Relaxed)
    }

    /// Counts a piece of work. Launches call this, so it takes no lock.
    pub(crate) fn add(&self, handle: usize, current: usize) {
        self.counter(key(handle, current))
            .fetch_add(1, Ordering::Relaxed);
    }
}

impl Streams {
    /// The pending work that must end before a stream is idle. The legacy stream waits for the
    /// blocking streams of its device.
    pub(super) fn work_of(&self, stream: usize) -> Work {
        let mut work = self.own_work(stream);
        if let Some(legacy) = self.streams.get(&stream)
            && stream < PER_THREAD_STREAMS
        {
            let blocking = self.streams.iter().filter(|(key, other)| {
                **key != stream && other.device == legacy.device && other.flags & NON_BLOCKING == 0
            });
            for (key, _) in blocking {
                add(&mut work, self.own_work(*key));
            }
        }
        work
    }

    /// The pending work that must end before the next piece of work of a stream. A blocking stream
    /// waits for the legacy stream.
    pub(super) fn work_before_next(&self, stream: usize) -> Work {
        let mut work = self.work_of(stream);
        let blocking = self
            .streams
            .get(&stream)
            .filter(|_| stream >= PER_THREAD_STREAMS)
            .filter(|of| of.flags & NON_BLOCKING == 0);
        if let Some(blocking) = blocking {
            add(&mut work, self.own_work(blocking.device));
        }
        work
    }

    fn own_work(&self, stream: usize) -> Work {
        let Some(of) = self.streams.get(&stream) else {
            return Work::new();
        };
        let mut work = of.after.clone();
        work.insert(stream, self.submitted.by(stream));
        work.retain(|stream, number| self.is_pending((stream, number)));
        work
    }

    /// Returns whether the host does not know that this much work of a stream has ended. That of a
    /// destroyed stream has.
    pub(super) fn is_pending(&self, (stream, number): (&usize, &u64)) -> bool {
        let stream = self.streams.get(stream);
        stream.is_some_and(|stream| stream.waited < *number)
    }

    /// The work of a stream so far.
    pub(crate) fn submitted_by(&self, handle: usize, current: usize) -> Work {
        let stream = key(handle, current);
        Work::from([(stream, self.submitted.by(stream))])
    }

    /// Returns whether the host knows that work has ended.
    pub(crate) fn has_ended(&self, work: &Work) -> bool {
        !work.iter().any(|work| self.is_pending(work))
    }

    /// Returns whether work ends before the next piece of work of a stream.
    pub(crate) fn ends_before_next(&self, work: &Work, handle: usize, current: usize) -> bool {
        self.ends_with(work, &self.work_before_next(key(handle, current)))
    }

    /// Returns whether work has ended when other work has.
    pub(crate) fn ends_with(&self, work: &Work, other: &Work) -> bool {
        work.iter().all(|(stream, number)| {
            other.get(stream).is_some_and(|other| other >= number)
                || !self.is_pending((stream, number))
        })
    }

    /// The pending work for which a host waits that waits for a stream.
    pub(crate) fn before_idle(&self, handle: usize, current: usize) -> Work {
        self.work_of(key(handle, current))
    }

    /// Likewise for the next piece of work of a stream.
    pub(crate) fn before_next(&self, handle: usize, current: usize) -> Work {
        self.work_before_next(key(handle, current))
    }

    /// Likewise for a device.
    pub(crate) fn before_idle_device(&self, device: usize) -> Work {
        let mut work = Work::new();
        let streams = self.streams.iter();
        streams
            .filter(|(_, stream)| stream.device == device)
            .for_each(|(key, _)| add(&mut work, self.work_of(*key)));
        work
    }

    /// Likewise for an event.
    pub(crate) fn before_event(&self, event: usize) -> Work {
        let record = self.events.get(&event).and_then(|of| of.record.as_ref());
        record.map(|record| record.work.clone()).unwrap_or_default()
    }

    /// All work so far.
    pub(crate) fn all_work(&self) -> Work {
        let keys = self.streams.keys().copied();
        keys.map(|key| (key, self.submitted.by(key))).collect()
    }

    /// Ends work for which the host waits.
    pub(super) fn end(&mut self, work: Work) {
        for (key, number) in work {
            if let Some(stream) = self.streams.get_mut(&key) {
                stream.waited = stream.waited.max(number);
                self.end_for_host(key, number);
            }
        }
    }

    /// Makes the next work of a stream wait for other work.
    pub(super) fn order(&mut self, stream: usize, work: Work) {
        if let Some(mut of) = self.streams.remove(&stream) {
            add(&mut of.after, work);
            of.after
                .retain(|stream, number| self.is_pending((stream, number)));
            self.streams.insert(stream, of);
        }
    }
}

fn add(to: &mut Work, other: Work) {
    for (stream, number) in other {
        let known = to.entry(stream).or_default();
        *known = number.max(*known);
    }
}
