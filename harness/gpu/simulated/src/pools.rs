//! [`Pools`]: the stream-ordered pools of devices whose kernels are no-ops. They cache nothing.

use std::collections::BTreeMap;
use std::ffi::c_int;

use harness_allocator::{device::sim::GRANULARITY, units::Bytes};

use crate::{code::Code, handles::Handles};

const POOLS: Handles = Handles::starting_at(0x7_0000_0000);
/// The numbers of a device's pools; the first is its default pool.
const PER_DEVICE: usize = 1 << 20;
/// The pools of all devices, by number.
#[derive(Debug)]
pub(crate) struct Pools {
    pools: BTreeMap<usize, Pool>,
    /// The last number of a pool of the program.
    last: usize,
    /// By device, if the program has chosen one.
    current: BTreeMap<usize, usize>,
    /// The pool and the size of each allocation.
    allocations: BTreeMap<u64, (usize, Bytes)>,
}

#[derive(Debug)]
pub(crate) struct Pool {
    /// The most bytes; zero for all.
    most: Bytes,
    /// Which blocks may be reused: attributes 1 to 3.
    pub(crate) reuse: [c_int; 3],
    pub(crate) release_threshold: u64,
    pub(crate) used: Usage,
    pub(crate) reserved: Usage,
    /// The program has destroyed it. It lives until its last allocation is freed.
    is_destroyed: bool,
}

/// Current and highest bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Usage {
    pub(crate) now: u64,
    pub(crate) high: u64,
}

impl Usage {
    const fn add(&mut self, bytes: u64) {
        self.now += bytes;
        if self.now > self.high {
            self.high = self.now;
        }
    }
}

impl Default for Pool {
    fn default() -> Self {
        Self {
            most: Bytes::ZERO,
            reuse: [1; 3],
            release_threshold: 0,
            used: Usage::default(),
            reserved: Usage::default(),
            is_destroyed: false,
        }
    }
}

const fn device_of_pool(number: usize) -> usize {
    number / PER_DEVICE
}

impl Pools {
    /// The default pools of this many devices.
    pub(crate) fn new(devices: usize) -> Self {
        let default = |device| (device * PER_DEVICE, Pool::default());
        Self {
            pools: (0..devices).map(default).collect(),
            last: 0,
            current: BTreeMap::new(),
            allocations: BTreeMap::new(),
        }
    }

    /// The handle of the default pool of a device.
    pub(crate) const fn of_device(device: usize) -> usize {
        POOLS.handle(device * PER_DEVICE)
    }

    /// The pool of a handle.
    pub(crate) fn get(&mut self, handle: usize) -> Result<&mut Pool, Code> {
        self.numbered(handle).map(|(_, pool)| pool)
    }

    fn numbered(&mut self, handle: usize) -> Result<(usize, &mut Pool), Code> {
        let number = POOLS.number(handle).map_err(|_| Code::InvalidValue)?;
        self.pools
            .get_mut(&number)
            .filter(|pool| !pool.is_destroyed)
            .map(|pool| (number, pool))
            .ok_or(Code::InvalidValue)
    }

    /// The device of a pool that has space for an allocation.
    pub(crate) fn device_with_space(&mut self, handle: usize, size: Bytes) -> Result<usize, Code> {
        let (number, pool) = self.numbered(handle)?;
        if pool.most > Bytes::ZERO && pool.reserved.now + reserved(size) > pool.most.0 {
            return Err(Code::OutOfMemory);
        }
        Ok(device_of_pool(number))
    }

    /// Notes an allocation from a pool.
    pub(crate) fn note(&mut self, handle: usize, start: u64, size: Bytes) {
        if let Ok((number, pool)) = self.numbered(handle) {
            pool.used.add(size.0);
            pool.reserved.add(reserved(size));
            self.allocations.insert(start, (number, size));
        }
    }

    /// Makes a pool the one of the allocations on its device that name no pool.
    pub(crate) fn choose(&mut self, device: usize, handle: usize) -> Result<(), Code> {
        let (number, _) = self.numbered(handle)?;
        if device_of_pool(number) != device {
            return Err(Code::InvalidValue);
        }
        self.current.insert(device, number);
        Ok(())
    }

    pub(crate) fn create(&mut self, device: usize, most: Bytes) -> usize {
        self.last += 1;
        let number = device * PER_DEVICE + self.last;
        let pool = Pool {
            most,
            ..Pool::default()
        };
        self.pools.insert(number, pool);
        POOLS.handle(number)
    }

    pub(crate) fn current(&self, device: usize) -> usize {
        POOLS.handle(*self.current.get(&device).unwrap_or(&(device * PER_DEVICE)))
    }

    pub(crate) fn destroy(&mut self, handle: usize) -> Result<(), Code> {
        let (number, pool) = self.numbered(handle)?;
        if number.is_multiple_of(PER_DEVICE) {
            return Err(Code::InvalidValue);
        }
        pool.is_destroyed = true;
        if pool.used.now == 0 {
            self.pools.remove(&number);
        }
        // The device's default pool becomes the current one.
        self.current.retain(|_, current| *current != number);
        Ok(())
    }

    /// Destroys the pools of a device and empties its default pool.
    pub(crate) fn reset(&mut self, device: usize) {
        self.pools
            .retain(|number, _| device_of_pool(*number) != device);
        self.allocations
            .retain(|_, (number, _)| device_of_pool(*number) != device);
        self.pools.insert(device * PER_DEVICE, Pool::default());
        self.current.remove(&device);
    }

    /// Notes that an allocation is freed.
    pub(crate) fn forget(&mut self, start: u64) {
        let Some((number, size)) = self.allocations.remove(&start) else {
            return;
        };
        if let Some(pool) = self.pools.get_mut(&number) {
            pool.used.now -= size.0;
            pool.reserved.now -= reserved(size);
            if pool.is_destroyed && pool.used.now == 0 {
                self.pools.remove(&number);
            }
        }
    }
}

fn reserved(size: Bytes) -> u64 {
    size.0.next_multiple_of(GRANULARITY.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_counts_what_it_holds_until_its_last_allocation_is_freed() {
        let mut pools = Pools::new(2);
        let pool = pools.create(1, Bytes(4 << 20));
        assert_eq!(pools.choose(0, pool), Err(Code::InvalidValue));
        pools.choose(1, pool).expect("the pool is on this device");
        assert_eq!(
            (pools.current(0), pools.current(1)),
            (Pools::of_device(0), pool)
        );
        assert_eq!(pools.device_with_space(pool, Bytes(3 << 20)), Ok(1));
        pools.note(pool, 7, Bytes(3 << 20));
        assert_eq!(
            pools.device_with_space(pool, Bytes(1)),
            Err(Code::OutOfMemory)
        );
        let figures = pools
            .get(pool)
            .map(|pool| (pool.used.now, pool.reserved.now));
        assert_eq!(figures, Ok((3 << 20, 4 << 20)));
        assert_eq!(pools.destroy(pool), Ok(()));
        assert_eq!(pools.destroy(pool), Err(Code::InvalidValue));
        assert_eq!(pools.current(1), Pools::of_device(1));
        assert_eq!(pools.pools.len(), 3);
        pools.forget(7);
        assert_eq!(pools.pools.len(), 2);
        assert_eq!(pools.destroy(Pools::of_device(0)), Err(Code::InvalidValue));
    }
}
