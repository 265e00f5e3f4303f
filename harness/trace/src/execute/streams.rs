//! The streams that a trace names, and those of the device that stand for them: [`Streams`].

use std::collections::BTreeSet;

use super::PrepareError;
use crate::trace::TraceEvent;
use harness_allocator::device::{Device, DeviceError, StreamId};

/// How many streams a trace may name beside the default stream. The simulated device tells races by what each stream has seen of each other
/// one, so its time and memory grow with the square of their number. PyTorch makes 32 of a priority
/// (`kStreamsPerPool` in <https://github.com/pytorch/pytorch/blob/v2.11.0/c10/cuda/CUDAStream.cpp>).
pub const MAX_STREAMS: usize = 1024;

/// One stream of the device for each stream that a trace names, whatever their numbers: a trace may name two, the second of them 3000000000.
///
/// They are made in the order of the trace's numbers, because allocators go through streams in order. The default stream stands for itself.
#[derive(Clone, Debug)]
pub struct Streams {
    /// By the trace's number, ascending: what the trace calls it, and what the device does.
    streams: Vec<(StreamId, StreamId)>,
}

impl Streams {
    /// Makes these streams and those that the trace names. Takes time and memory for these, and none for the numbers between them.
    ///
    /// # Errors
    /// [`PrepareError::TooManyStreams`]; [`PrepareError::Device`] where the device cannot make that many.
    pub fn make(streams: &[StreamId], events: &[TraceEvent], device: &mut dyn Device) -> Result<Self, PrepareError> {
        let mut named: BTreeSet<StreamId> = streams.iter().copied().filter(|&stream| stream != StreamId::DEFAULT).collect();
        for (index, &(mut event)) in events.iter().enumerate() {
            let stream = stream_of(&mut event).copied().filter(|&stream| stream != StreamId::DEFAULT);
            if stream.is_some_and(|stream| named.insert(stream)) && named.len() > MAX_STREAMS {
                return Err(PrepareError::TooManyStreams { operation: index + 1 });
            }
        }
        let mut streams = vec![(StreamId::DEFAULT, StreamId::DEFAULT)];
        for stream in named {
            streams.push((stream, device.create_stream()?));
        }
        Ok(Self { streams })
    }

    /// Makes the same streams on another device, which numbers them in the same way.
    pub(super) fn make_again(&self, device: &mut dyn Device) -> Result<(), DeviceError> {
        for expected in self.made() {
            let made = device.create_stream()?;
            if made != expected {
                return Err(DeviceError::UnknownHandle { kind: "stream", number: expected.0 });
            }
        }
        Ok(())
    }

    /// The same event, with the device's stream. One that names a stream that the trace did not is left as it is.
    #[must_use]
    pub fn on_device(&self, mut event: TraceEvent) -> TraceEvent {
        if let Some(stream) = stream_of(&mut event)
            && let Ok(place) = self.streams.binary_search_by_key(stream, |&(named, _)| named)
        {
            *stream = self.streams[place].1;
        }
        event
    }

    /// The device's streams that were made, the default stream not among them.
    pub fn made(&self) -> impl Iterator<Item = StreamId> + '_ {
        self.streams.iter().skip(1).map(|&(_, made)| made)
    }

    /// What the trace calls a stream of the device.
    #[must_use]
    pub fn in_trace(&self, made: StreamId) -> StreamId {
        self.streams.iter().find(|&&(_, there)| there == made).map_or(made, |&(named, _)| named)
    }
}

const fn stream_of(event: &mut TraceEvent) -> Option<&mut StreamId> {
    match event {
        TraceEvent::Allocate { stream, .. } | TraceEvent::RecordStream { stream, .. } | TraceEvent::SynchronizeStream(stream) => {
            Some(stream)
        }
        TraceEvent::Free { .. }
        | TraceEvent::Synchronize
        | TraceEvent::EmptyCache
        | TraceEvent::SetFraction(_)
        | TraceEvent::ResetPeaks
        | TraceEvent::Pressure(_)
        | TraceEvent::BeginPool(_)
        | TraceEvent::EndPool(_)
        | TraceEvent::ReleasePool(_) => None,
    }
}
