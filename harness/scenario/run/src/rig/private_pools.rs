//! Private pools of the current program, as `torch.cuda.MemPool` and CUDA graphs use them.

use harness_allocator::allocator::{PrivatePoolError, PrivatePoolId, PrivatePools};
use harness_allocator::device::faulty::Injector;

use super::{Audit, Rig, Stop};
use crate::control::BlockingCall;

/// Why an operation on a private pool had no effect.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PoolRefused {
    #[error("the allocator `{0}` does not support private pools")]
    NotThere(&'static str),
    #[error(transparent)]
    Misuse(PrivatePoolError),
}

type Answer<T> = Result<Result<T, PoolRefused>, Stop>;

impl Rig {
    /// Reserves an id for a new private pool. The pool itself is created by its first `begin`.
    pub fn name_private_pool(&mut self) -> PrivatePoolId {
        let (program, _) = self.program_on_device();
        program.named_pools += 1;
        PrivatePoolId(program.named_pools)
    }

    /// Directs the current program's requests to a private pool, which is created on first use.
    pub fn begin_private_pool(&mut self, pool: PrivatePoolId) -> Answer<()> {
        let begun = self.with_pools(|pools| pools.begin(pool))?;
        if begun.is_ok() {
            let (program, _) = self.program_on_device();
            program.private_pools.insert(pool);
            program.open_pools.push(pool);
        }
        Ok(begun)
    }

    pub fn end_private_pool(&mut self, pool: PrivatePoolId) -> Answer<()> {
        let ended = self.with_pools(|pools| pools.end(pool))?;
        if ended.is_ok() {
            self.program_on_device()
                .0
                .open_pools
                .retain(|open| *open != pool);
        }
        Ok(ended)
    }

    pub fn release_private_pool(&mut self, pool: PrivatePoolId) -> Answer<()> {
        self.begin_operation()?;
        self.faults.iter().for_each(Injector::state_changed);
        self.record_time();
        self.control.calls(BlockingCall::EmptyCache);
        let (program, device) = self.program_on_device();
        let name = program.allocator.name();
        let Some(pools) = program.allocator.private_pools() else {
            return Ok(Err(PoolRefused::NotThere(name)));
        };
        let released = answer(pools.release(device, pool))?;
        if released.is_ok() {
            program.private_pools.remove(&pool);
            self.check(Audit::everything)?;
        }
        Ok(released)
    }

    /// Ends and releases the remaining pools of the current program.
    pub(super) fn release_private_pools(&mut self) -> Result<(), Stop> {
        let (program, _) = self.program_on_device();
        let (open, pools) = (program.open_pools.clone(), program.private_pools.clone());
        // A pool that refuses keeps its memory, which the next check detects.
        open.into_iter()
            .try_for_each(|pool| self.end_private_pool(pool).map(drop))?;
        pools
            .into_iter()
            .try_for_each(|pool| self.release_private_pool(pool).map(drop))
    }

    fn with_pools(
        &mut self,
        act: impl FnOnce(&mut dyn PrivatePools) -> Result<(), PrivatePoolError>,
    ) -> Answer<()> {
        self.faults.iter().for_each(Injector::state_changed);
        let (program, _) = self.program_on_device();
        let name = program.allocator.name();
        match program.allocator.private_pools() {
            Some(pools) => answer(act(pools)),
            None => Ok(Err(PoolRefused::NotThere(name))),
        }
    }
}

fn answer(result: Result<(), PrivatePoolError>) -> Answer<()> {
    match result {
        Ok(()) => Ok(Ok(())),
        Err(PrivatePoolError::Device(error)) => Err(error.into()),
        Err(refused) => Ok(Err(PoolRefused::Misuse(refused))),
    }
}
