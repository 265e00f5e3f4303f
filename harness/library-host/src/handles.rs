//! Streams, events and pools: the harness's numbers as opaque pointers.

use harness_allocator::allocator::library::wire::Code;

/// A stream of CUDA. Null and `CU_STREAM_LEGACY` are the default stream.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Stream(usize);

/// An event of CUDA.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Event(usize);

/// A pool of CUDA. Number 0 is the device's default pool.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Pool(usize);

const STREAMS: usize = 0x5_0000_0000;
const EVENTS: usize = 0x6_0000_0000;
const POOLS: usize = 0x7_0000_0000;
const STEP: usize = 16;
/// `CU_STREAM_LEGACY` and `CU_STREAM_PER_THREAD`, both mapped to the only default stream.
const DEFAULTS: [usize; 3] = [0, 1, 2];

impl Stream {
    pub(crate) const fn new(number: u32) -> Self {
        Self(if number == 0 { 0 } else { STREAMS + number as usize * STEP })
    }

    pub(crate) fn number(self) -> Result<u32, Code> {
        if DEFAULTS.contains(&self.0) { Ok(0) } else { number(self.0, STREAMS) }
    }
}

impl Event {
    pub(crate) const fn new(number: u32) -> Self {
        Self(EVENTS + number as usize * STEP)
    }

    pub(crate) fn number(self) -> Result<u32, Code> {
        number(self.0, EVENTS)
    }
}

impl Pool {
    pub(crate) const DEFAULT: Self = Self::new(0);

    pub(crate) const fn new(number: u32) -> Self {
        Self(POOLS + number as usize * STEP)
    }

    pub(crate) fn number(self) -> Result<u32, Code> {
        number(self.0, POOLS)
    }
}

fn number(handle: usize, first: usize) -> Result<u32, Code> {
    let offset = handle.checked_sub(first).filter(|offset| offset.is_multiple_of(STEP)).ok_or(Code::InvalidHandle)?;
    u32::try_from(offset / STEP).map_err(|_| Code::InvalidHandle)
}

/// The harness's number of a stream, an event or a pool.
pub(crate) fn small(number: u64) -> Result<u32, Code> {
    u32::try_from(number).map_err(|_| Code::Unknown)
}
