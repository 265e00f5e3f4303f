//! [`Streams`]: the program's streams and their numbers on the device.

use std::collections::BTreeMap;
use std::sync::{PoisonError, RwLock};

use harness_allocator::device::{DeviceError, StreamId};
use harness_cuda::device::CUstream;

/// The driver's own names for the default stream, null and `CU_STREAM_LEGACY`.
const DEFAULT: [usize; 2] = [0, 1];

/// The known streams of one device. A look-up takes a lock that readers share, and not the
/// device's.
#[derive(Debug, Default)]
pub(crate) struct Streams(RwLock<BTreeMap<usize, StreamId>>);

impl Streams {
    /// Returns the number of a stream. Calls `borrow` for a stream that it does not know yet.
    pub(crate) fn number(
        &self,
        stream: CUstream,
        borrow: impl FnOnce() -> Result<StreamId, DeviceError>,
    ) -> Result<StreamId, DeviceError> {
        if let Some(known) = self.known(stream) {
            return Ok(known);
        }
        let number = borrow()?;
        self.0
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(stream.addr(), number);
        Ok(number)
    }

    pub(crate) fn known(&self, stream: CUstream) -> Option<StreamId> {
        if DEFAULT.contains(&stream.addr()) {
            return Some(StreamId::DEFAULT);
        }
        self.0
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&stream.addr())
            .copied()
    }

    pub(crate) fn forget(&self, stream: CUstream) {
        self.0
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&stream.addr());
    }
}
