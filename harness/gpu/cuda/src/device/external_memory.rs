//! Memory taken from the device in place of other processes, so an allocator sees a fuller device.

use cudarc::driver::sys::CUdeviceptr;

use super::driver::{self, Driver, cuda};
use crate::library::Refusal;
use harness_allocator::units::Bytes;

/// Plain driver allocations, separate from those of the device's callers, newest last.
#[derive(Default)]
pub(super) struct ExternalMemory {
    pieces: Vec<(CUdeviceptr, Bytes)>,
}

/// Largest piece. Large enough to fill a GPU in few calls, small enough to release memory in steps.
const LARGEST: Bytes = Bytes::gib(1);

impl ExternalMemory {
    pub(super) fn held(&self) -> Bytes {
        self.pieces.iter().map(|piece| piece.1).sum()
    }

    /// Grows or shrinks to `target`, rounded down to multiples of `granularity`, or to the memory
    /// that the device has.
    pub(super) fn resize(
        &mut self,
        driver: &Driver,
        target: Bytes,
        granularity: Bytes,
    ) -> Result<Bytes, Refusal> {
        let target = Bytes(target.0 / granularity.0 * granularity.0);
        while self.held() > target {
            self.shrink(driver)?;
        }
        self.grow(driver, target, granularity)?;
        Ok(self.held())
    }

    /// Frees everything and ignores errors, when the device is dropped.
    pub(super) fn release(&mut self, driver: &Driver) {
        while !self.pieces.is_empty() && self.shrink(driver).is_ok() {}
    }

    fn shrink(&mut self, driver: &Driver) -> Result<(), Refusal> {
        if let Some(&(address, _)) = self.pieces.last() {
            cuda!(driver, cuMemFree_v2(address))?;
            self.pieces.pop();
        }
        Ok(())
    }

    /// Allocates pieces until the target is reached. Halves the size of a piece that does not fit.
    fn grow(&mut self, driver: &Driver, target: Bytes, granularity: Bytes) -> Result<(), Refusal> {
        let mut piece = LARGEST;
        loop {
            let missing = target.saturating_sub(self.held());
            let size = piece.min(missing);
            if size < granularity {
                return Ok(());
            }
            let mut address = 0;
            match cuda!(driver, cuMemAlloc_v2(&mut address, size.0 as usize)) {
                Ok(()) => self.pieces.push((address, size)),
                Err(Refusal {
                    code: driver::OUT_OF_MEMORY,
                    ..
                }) => piece = half(size, granularity),
                Err(refusal) => return Err(refusal),
            }
        }
    }
}

fn half(size: Bytes, granularity: Bytes) -> Bytes {
    Bytes(size.0 / 2 / granularity.0 * granularity.0)
}
