//! [`Pools`]: the stream-ordered pools of devices whose kernels are no-ops. Their memory is that of
//! pools of `SimDevice`.
//!
//! Work takes no time, so a free is complete at once and any stream reuses the memory. With the
//! default attributes a driver does so too: it may wait for another stream's free on the device.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{c_int, c_uint};

use harness_allocator::device::sim::SimDevice;
use harness_allocator::device::{PoolId, PoolMemory, PooledDevice as _};
use harness_allocator::units::Bytes;

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
    /// The pool of each allocation.
    allocations: BTreeMap<u64, usize>,
}

#[derive(Debug)]
pub(crate) struct Pool {
    /// The pool of the simulated device, from the first allocation on.
    id: Option<PoolId>,
    /// The most bytes; zero for all.
    most: Bytes,
    /// The kinds of handles by which other processes may import it.
    pub(crate) handle_types: c_uint,
    /// Another process allocates from it.
    is_imported: bool,
    /// Which blocks may be reused: attributes 1 to 3.
    pub(crate) reuse: [c_int; 3],
    pub(crate) release_threshold: u64,
    /// Allocations that are not freed.
    live: u64,
    /// The program has destroyed it. It lives until its last allocation is freed.
    is_destroyed: bool,
}

impl Default for Pool {
    fn default() -> Self {
        Self {
            id: None,
            most: Bytes::ZERO,
            handle_types: 0,
            is_imported: false,
            reuse: [1; 3],
            release_threshold: 0,
            live: 0,
            is_destroyed: false,
        }
    }
}

impl Pool {
    /// The pool of the simulated device, which it creates if necessary.
    pub(crate) fn open(&mut self, sim: &mut SimDevice) -> Result<PoolId, Code> {
        if self.is_imported {
            return Err(Code::InvalidValue);
        }
        if let Some(id) = self.id {
            return Ok(id);
        }
        let id = sim.create_pool(Bytes(self.release_threshold))?;
        sim.limit_pool(id, self.most)?;
        self.id = Some(id);
        Ok(id)
    }

    pub(crate) fn set_threshold(&mut self, sim: &mut SimDevice, bytes: u64) -> Result<(), Code> {
        self.release_threshold = bytes;
        self.id.map_or(
            Ok(()),
            |id| Ok(sim.set_release_threshold(id, Bytes(bytes))?),
        )
    }

    pub(crate) fn memory(&self, sim: &mut SimDevice) -> Result<PoolMemory, Code> {
        Ok(match self.id {
            Some(id) => sim.pool_memory(id)?,
            None => PoolMemory::default(),
        })
    }

    /// The pool of the simulated device, if memory has been allocated from it.
    pub(crate) const fn id(&self) -> Option<PoolId> {
        self.id
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

    /// The device and the pool of a handle.
    pub(crate) fn get(&mut self, handle: usize) -> Result<(usize, &mut Pool), Code> {
        let (number, pool) = self.numbered(handle)?;
        Ok((device_of_pool(number), pool))
    }

    fn numbered(&mut self, handle: usize) -> Result<(usize, &mut Pool), Code> {
        let number = POOLS.number(handle).map_err(|_| Code::InvalidValue)?;
        self.pools
            .get_mut(&number)
            .filter(|pool| !pool.is_destroyed)
            .map(|pool| (number, pool))
            .ok_or(Code::InvalidValue)
    }

    /// The devices that have pools with memory.
    pub(crate) fn devices(&self) -> BTreeSet<usize> {
        let used = self.pools.iter().filter(|(_, pool)| pool.id.is_some());
        used.map(|(number, _)| device_of_pool(*number)).collect()
    }

    /// The pool of an allocation.
    pub(crate) fn of_allocation(&self, start: u64) -> Option<usize> {
        let number = self.allocations.get(&start)?;
        Some(POOLS.handle(*number))
    }

    /// Notes an allocation from a pool.
    pub(crate) fn note(&mut self, handle: usize, start: u64) {
        if let Ok((number, pool)) = self.numbered(handle) {
            pool.live += 1;
            self.allocations.insert(start, number);
        }
    }

    /// Makes a pool the one of the allocations on its device that name no pool.
    pub(crate) fn choose(&mut self, device: usize, handle: usize) -> Result<(), Code> {
        let (number, pool) = self.numbered(handle)?;
        if device_of_pool(number) != device || pool.is_imported {
            return Err(Code::InvalidValue);
        }
        self.current.insert(device, number);
        Ok(())
    }

    fn add(&mut self, device: usize, pool: Pool) -> usize {
        self.last += 1;
        let number = device * PER_DEVICE + self.last;
        self.pools.insert(number, pool);
        POOLS.handle(number)
    }

    pub(crate) fn create(&mut self, device: usize, most: Bytes, handle_types: c_uint) -> usize {
        let pool = Pool {
            most,
            handle_types,
            ..Pool::default()
        };
        self.add(device, pool)
    }

    /// Adds a pool of another process.
    pub(crate) fn import(&mut self, device: usize) -> usize {
        let pool = Pool {
            is_imported: true,
            ..Pool::default()
        };
        self.add(device, pool)
    }

    pub(crate) fn current(&self, device: usize) -> usize {
        POOLS.handle(*self.current.get(&device).unwrap_or(&(device * PER_DEVICE)))
    }

    /// Destroys a pool. Returns the one of the simulated device to destroy, with its device.
    pub(crate) fn destroy(&mut self, handle: usize) -> Result<Option<(usize, PoolId)>, Code> {
        let (number, pool) = self.numbered(handle)?;
        if number.is_multiple_of(PER_DEVICE) {
            return Err(Code::InvalidValue);
        }
        pool.is_destroyed = true;
        // The device's default pool becomes the current one.
        self.current.retain(|_, current| *current != number);
        Ok(self.remove_unused(number))
    }

    /// Removes a destroyed pool without allocations.
    fn remove_unused(&mut self, number: usize) -> Option<(usize, PoolId)> {
        let is_unused = |pool: &&Pool| pool.is_destroyed && pool.live == 0;
        self.pools.get(&number).filter(is_unused)?;
        let removed = self.pools.remove(&number)?;
        Some((device_of_pool(number), removed.id?))
    }

    /// Destroys the pools of a device and empties its default pool.
    pub(crate) fn reset(&mut self, device: usize) {
        self.pools
            .retain(|number, _| device_of_pool(*number) != device);
        self.allocations
            .retain(|_, number| device_of_pool(*number) != device);
        self.pools.insert(device * PER_DEVICE, Pool::default());
        self.current.remove(&device);
    }

    /// Notes that an allocation is freed. Returns the pool to destroy, likewise.
    pub(crate) fn forget(&mut self, start: u64) -> Option<(usize, PoolId)> {
        let number = self.allocations.remove(&start)?;
        self.pools.get_mut(&number)?.live -= 1;
        self.remove_unused(number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_lives_until_its_last_allocation_is_freed() {
        let mut pools = Pools::new(2);
        let pool = pools.create(1, Bytes::mib(4), 0);
        assert_eq!(pools.choose(0, pool), Err(Code::InvalidValue));
        pools.choose(1, pool).expect("the pool is on this device");
        assert_eq!(
            (pools.current(0), pools.current(1)),
            (Pools::of_device(0), pool)
        );
        pools.note(pool, 7);
        assert_eq!(pools.destroy(pool), Ok(None));
        assert_eq!(pools.destroy(pool), Err(Code::InvalidValue));
        assert_eq!(pools.current(1), Pools::of_device(1));
        assert_eq!(pools.pools.len(), 3);
        assert_eq!(pools.forget(7), None);
        assert_eq!(pools.pools.len(), 2);
        assert_eq!(pools.destroy(Pools::of_device(0)), Err(Code::InvalidValue));
    }

    #[test]
    fn another_process_allocates_from_an_imported_pool() {
        let mut pools = Pools::new(1);
        let imported = pools.import(0);
        assert_eq!(pools.choose(0, imported), Err(Code::InvalidValue));
        assert_eq!(pools.destroy(imported), Ok(None));
    }
}
