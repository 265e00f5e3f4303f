//! Memory taken from the device on behalf of "others", so that an allocator meets a fuller device.

use super::driver::{self, Driver};
use super::types::CUdeviceptr;
use crate::library::Refusal;
use harness_allocator::units::Bytes;

/// Plain driver allocations, apart from those of the device's callers, newest last.
#[derive(Default)]
pub(super) struct Pressure {
    pieces: Vec<(CUdeviceptr, Bytes)>,
}

/// Largest piece: a few calls take a whole GPU, and giving back a little does not mean giving back everything.
const LARGEST: Bytes = Bytes::gib(1);

impl Pressure {
    pub(super) fn held(&self) -> Bytes {
        self.pieces.iter().map(|piece| piece.1).sum()
    }

    /// Grows or shrinks to `target`, in whole multiples of `granularity` (rounded down), or to what the device has.
    pub(super) fn resize(&mut self, driver: &Driver, target: Bytes, granularity: Bytes) -> Result<Bytes, Refusal> {
        let target = Bytes(target.0 / granularity.0 * granularity.0);
        while self.held() > target {
            self.shrink(driver)?;
        }
        self.grow(driver, target, granularity)?;
        Ok(self.held())
    }

    /// Gives everything back as far as the driver lets it; for the end of the device.
    pub(super) fn release(&mut self, driver: &Driver) {
        while !self.pieces.is_empty() && self.shrink(driver).is_ok() {}
    }

    fn shrink(&mut self, driver: &Driver) -> Result<(), Refusal> {
        if let Some(&(address, _)) = self.pieces.last() {
            // SAFETY: the address came from `allocate`, no work touches it, and it is forgotten right after.
            unsafe { driver.free(address) }?;
            self.pieces.pop();
        }
        Ok(())
    }

    /// Takes pieces, halving their size whenever one does not fit, until the target is met or nothing fits.
    fn grow(&mut self, driver: &Driver, target: Bytes, granularity: Bytes) -> Result<(), Refusal> {
        let mut piece = LARGEST;
        loop {
            let missing = target.saturating_sub(self.held());
            let size = piece.min(missing);
            if size < granularity {
                return Ok(());
            }
            let mut address = 0;
            // SAFETY: `address` is a place for the answer.
            match unsafe { driver.allocate(&raw mut address, size.0 as usize) } {
                Ok(()) => self.pieces.push((address, size)),
                Err(Refusal { code: driver::OUT_OF_MEMORY, .. }) => piece = half(size, granularity),
                Err(refusal) => return Err(refusal),
            }
        }
    }
}

/// Half of a size in whole granules; zero from one granule.
fn half(size: Bytes, granularity: Bytes) -> Bytes {
    Bytes(size.0 / 2 / granularity.0 * granularity.0)
}
