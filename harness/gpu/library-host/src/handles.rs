//! [`Handle`]: the harness's numbers of streams, events and pools as opaque pointers; and [`put`],
//! which writes an output.

use harness_allocator::allocator::library::wire::Code;
use harness_gpu_settings::ffi::{Out, write};

/// A handle of CUDA. Handles of one kind start at `FIRST`.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Handle<const FIRST: usize>(usize);

/// A stream. Null, `CU_STREAM_LEGACY` and `CU_STREAM_PER_THREAD` are the only default stream,
/// number 0.
pub(crate) type Stream = Handle<STREAMS>;
pub(crate) type Event = Handle<0x6_0000_0000>;
/// A pool. Number 0 is the device's default pool.
pub(crate) type Pool = Handle<0x7_0000_0000>;

const STREAMS: usize = 0x5_0000_0000;
const STEP: usize = 16;

impl<const FIRST: usize> Handle<FIRST> {
    pub(crate) const fn new(number: u32) -> Self {
        Self(if FIRST == STREAMS && number == 0 {
            0
        } else {
            FIRST + number as usize * STEP
        })
    }

    pub(crate) fn number(self) -> Result<u32, Code> {
        if FIRST == STREAMS && self.0 <= 2 {
            return Ok(0);
        }
        let offset = self
            .0
            .checked_sub(FIRST)
            .filter(|offset| offset.is_multiple_of(STEP))
            .ok_or(Code::InvalidHandle)?;
        u32::try_from(offset / STEP).map_err(|_| Code::InvalidHandle)
    }
}

/// The harness's number of a stream, an event or a pool.
pub(crate) fn small(number: u64) -> Result<u32, Code> {
    u32::try_from(number).map_err(|_| Code::Unknown)
}

/// Writes an output. A null pointer is an invalid value.
pub(crate) fn put<T>(place: Out<'_, T>, value: T) -> Result<(), Code> {
    if write(place, value) {
        Ok(())
    } else {
        Err(Code::InvalidValue)
    }
}
