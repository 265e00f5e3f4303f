//! XLA's allocator in JAX: TensorFlow's allocator with one region, which is filled from its upper
//! end.
//!
//! It models `BFCAllocator` of OpenXLA (<https://github.com/openxla/xla>) with preallocation, the
//! default of JAX on a GPU. [`super::bfc`] has what both libraries do. The decisions equal those
//! recorded from JAX 0.12.
//!
//! * The first request allocates one region of `XLA_PYTHON_CLIENT_MEM_FRACTION` of the device's
//!   memory, 0.75 by default. Nothing else is allocated, so the fraction is a limit.
//! * Arrays lie at the upper end of the region and go downward. Memory of collectives lies at the
//!   lower end. This model has no collectives.
//! * The lowest free chunk is the gap between both ends. A request takes the gap only if no other
//!   free chunk fits, even if the gap fits better. Of other chunks of one size, it takes the one at
//!   the highest address.
//! * A chunk is cut by TensorFlow's rule, the gap too. The request gets the upper part.
//! * There is no garbage collection.
//!
//! With `XLA_PYTHON_CLIENT_PREALLOCATE=false`, XLA decides as TensorFlow does without garbage
//! collection: the lowest address comes first, and regions grow from 2 MiB.
//!
//! Deliberate differences:
//!
//! * Those of [`super::bfc`] for streams and for [`super::Allocator::empty_cache`], which XLA does
//!   not have.
//! * Before a request fails, XLA waits ten seconds for another thread. Here one thread makes all
//!   calls, so there is no wait.
//! * If the device has less than the first region, attempts follow TensorFlow's rule. No recording
//!   covers it.

use serde::Deserialize;

use crate::units::Bytes;

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct XlaBfcConfig {
    /// True if the first request allocates one region for all requests. The default is `true`.
    pub preallocate: bool,
    /// The limit on all regions together. The default is three quarters of the device's memory.
    // With this function, a recording without the field is an error.
    #[serde(deserialize_with = "Option::deserialize")]
    pub memory_limit: Option<Bytes>,
}

impl Default for XlaBfcConfig {
    fn default() -> Self {
        Self {
            preallocate: true,
            memory_limit: None,
        }
    }
}

impl XlaBfcConfig {
    /// The limit on a device with this much memory.
    pub(super) const fn limit(&self, total: Bytes) -> Bytes {
        match self.memory_limit {
            Some(limit) => limit,
            None => Bytes(total.0 - total.0.div_ceil(4)),
        }
    }
}
