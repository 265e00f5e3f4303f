//! [`Streams`]: the program's streams, by the numbers that they are borrowed under.

use std::collections::BTreeMap;
use std::sync::{PoisonError, RwLock};

use harness_allocator::device::{DeviceError, StreamId};
use harness_cuda::CudaDevice;
use harness_cuda::device::CUstream;

/// The driver's own names for the default stream, null and `CU_STREAM_LEGACY`.
const DEFAULT: [usize; 2] = [0, 1];

/// Streams of one device that were named so far. A look-up takes a lock that readers share, and not the device's.
#[derive(Debug, Default)]
pub(crate) struct Streams(RwLock<BTreeMap<usize, StreamId>>);

impl Streams {
    /// The number of a stream, which is borrowed of the program at its first use.
    ///
    /// # Safety
    /// The stream lives until it is released, or to the end of the process.
    pub(crate) unsafe fn number<D>(&self, stream: CUstream, device: impl FnOnce() -> D) -> Result<StreamId, DeviceError>
    where
        D: std::ops::DerefMut<Target = CudaDevice>,
    {
        if let Some(known) = self.known(stream) {
            return Ok(known);
        }
        // SAFETY: as the caller promises.
        let number = unsafe { device().borrow_stream(stream) }?;
        self.0.write().unwrap_or_else(PoisonError::into_inner).insert(stream.addr(), number);
        Ok(number)
    }

    /// The number of a stream that was named before.
    pub(crate) fn known(&self, stream: CUstream) -> Option<StreamId> {
        if DEFAULT.contains(&stream.addr()) {
            return Some(StreamId::DEFAULT);
        }
        self.0.read().unwrap_or_else(PoisonError::into_inner).get(&stream.addr()).copied()
    }

    pub(crate) fn forget(&self, stream: CUstream) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).remove(&stream.addr());
    }
}
