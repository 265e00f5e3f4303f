//! [`SharedMemory`]: the memory of the scenario's device, as programs see it that are run on a simulated GPU of its size, or on the GPU of the run under that limit.

use std::io;
use std::path::PathBuf;

use harness_allocator::units::Bytes;
use harness_gpu_settings::ledger::{Account, Ledger};
use tempfile::TempDir;

/// The number of the device that is shared.
const DEVICE: u32 = 0;
/// The file that says who holds how much.
const LEDGER: &str = "ledger";

/// The memory that programs share with the scenario's own allocators.
#[derive(Debug)]
pub(crate) struct SharedMemory {
    folder: TempDir,
    /// What the scenario itself holds.
    account: Account,
}

impl SharedMemory {
    /// Nobody holds anything.
    ///
    /// # Errors
    /// That its file cannot be made.
    pub(crate) fn new() -> io::Result<Self> {
        let folder = harness_exec::launch::folder_of_run()?;
        let account = Account::new(Some(Ledger::create(&folder.path().join(LEDGER))?));
        Ok(Self { folder, account })
    }

    /// The scenario itself holds so much from now on.
    pub(crate) fn hold(&mut self, held: Bytes) {
        let nothing_fails: Result<(), std::convert::Infallible> = self.account.change(DEVICE, |_| (Ok(()), held));
        let Ok(()) = nothing_fails;
    }

    /// The ledger, for programs.
    pub(crate) fn ledger(&self) -> PathBuf {
        self.folder.path().join(LEDGER)
    }
}
