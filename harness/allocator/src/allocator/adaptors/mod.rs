//! Resources that wrap a resource, in any order and number: each adds one thing and passes all calls on.
//!
//! | adaptor | adds | RMM's name |
//! |---|---|---|
//! | [`Logged`] | tells each call and its result to a function | `logging_resource_adaptor` |
//! | [`Limited`] | refuses what would exceed a number of bytes | `limiting_resource_adaptor` |
//! | [`OnOutOfMemory`] | asks a function for room, and tries again | `failure_callback_resource_adaptor` |
//! | [`Named`] | keeps a name for each allocation, and tells what is live by name | – |

mod limited;
mod logged;
mod named;
mod on_out_of_memory;

pub use limited::Limited;
pub use logged::{Call, Logged};
pub use named::{LiveName, Named};
pub use on_out_of_memory::OnOutOfMemory;

/// The methods that an adaptor passes on unchanged to its field `inner`.
macro_rules! pass_on {
    (record_stream) => {
        fn record_stream(&self, allocation: &Allocation, stream: StreamId) -> Result<(), DeviceError> {
            self.inner.record_stream(allocation, stream)
        }
    };
    (free) => {
        fn free(&self, allocation: Allocation) -> Result<(), DeviceError> {
            self.inner.free(allocation)
        }
    };
    (release_stream) => {
        fn release_stream(&self, stream: StreamId) -> Result<(), DeviceError> {
            self.inner.release_stream(stream)
        }
    };
    (empty_cache) => {
        fn empty_cache(&self) -> Result<(), DeviceError> {
            self.inner.empty_cache()
        }
    };
    (set_memory_fraction) => {
        fn set_memory_fraction(&self, fraction: MemoryFraction) {
            self.inner.set_memory_fraction(fraction);
        }
    };
    (stats) => {
        fn stats(&self) -> MemoryStats {
            self.inner.stats()
        }
    };
    (snapshot) => {
        fn snapshot(&self) -> Vec<SegmentInfo> {
            self.inner.snapshot()
        }
    };
    (close) => {
        fn close(&self) -> Result<(), DeviceError> {
            self.inner.close()
        }
    };
    ($first:ident, $($other:ident),+) => {
        pass_on!($first);
        $(pass_on!($other);)+
    };
}
use pass_on;
