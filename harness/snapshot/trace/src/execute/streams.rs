//! Maps the streams of a trace to streams of the device.

use std::collections::{BTreeMap, BTreeSet};

use super::PrepareError;
use crate::trace::TraceEvent;
use harness_allocator::device::{Device, DeviceError, StreamId};

/// Maximum number of streams besides the default stream. The simulated device tracks races between
/// every two streams, so its time and memory grow with the square of the number. PyTorch creates 32
/// per priority (`kStreamsPerPool` in
/// <https://github.com/pytorch/pytorch/blob/v2.11.0/c10/cuda/CUDAStream.cpp>).
pub const MAX_STREAMS: usize = 1024;

/// Maps each stream number of a trace, however large, to one device stream.
///
/// The streams are created in the order of the trace's numbers, because allocators visit streams in
/// order. The default stream maps to itself.
#[derive(Clone, Debug)]
pub struct Streams(BTreeMap<StreamId, StreamId>);

impl Streams {
    /// Creates the given streams and those of the trace. Numbers between them cost no time or
    /// memory.
    pub fn make(
        streams: &[StreamId],
        events: &[TraceEvent],
        device: &mut dyn Device,
    ) -> Result<Self, PrepareError> {
        let mut named: BTreeSet<StreamId> = streams
            .iter()
            .copied()
            .filter(|&stream| stream != StreamId::DEFAULT)
            .collect();
        for (index, &(mut event)) in events.iter().enumerate() {
            let stream = event
                .stream_mut()
                .copied()
                .filter(|&stream| stream != StreamId::DEFAULT);
            if stream.is_some_and(|stream| named.insert(stream)) && named.len() > MAX_STREAMS {
                return Err(PrepareError::TooManyStreams {
                    operation: index + 1,
                });
            }
        }
        let created = named
            .into_iter()
            .map(|stream| Ok((stream, device.create_stream()?)));
        created
            .collect::<Result<_, DeviceError>>()
            .map(Self)
            .map_err(PrepareError::Device)
    }

    /// Creates the same streams on another device, which must number them the same way.
    pub(super) fn make_again(&self, device: &mut dyn Device) -> Result<(), DeviceError> {
        for expected in self.made() {
            let made = device.create_stream()?;
            if made != expected {
                return Err(DeviceError::unknown_handle("stream", expected.0));
            }
        }
        Ok(())
    }

    /// Replaces the event's stream by the device's. Streams that the trace does not name stay
    /// unchanged.
    #[must_use]
    pub fn on_device(&self, mut event: TraceEvent) -> TraceEvent {
        if let Some(stream) = event.stream_mut() {
            *stream = self.0.get(stream).copied().unwrap_or(*stream);
        }
        event
    }

    pub fn made(&self) -> impl Iterator<Item = StreamId> + '_ {
        self.0.values().copied()
    }

    pub fn in_trace(&self, made: StreamId) -> StreamId {
        self.0
            .iter()
            .find(|&(_, &there)| there == made)
            .map_or(made, |(&named, _)| named)
    }
}
