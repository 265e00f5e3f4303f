//! [`SharedMemory`]: the device memory that a scenario shares with the programs it runs, on a
//! simulated GPU or on a limited real one.

use std::{io, path::PathBuf};

use harness_allocator::units::Bytes;
use harness_exec::launch::RunFolder;
use harness_gpu_settings::ledger::{Ledger, LedgerAccount};

const DEVICE: u32 = 0;
/// The file that records the memory of each process.
const LEDGER: &str = "ledger";

#[derive(Debug)]
pub(crate) struct SharedMemory {
    folder: RunFolder,
    account: LedgerAccount,
}

impl SharedMemory {
    /// Creates an empty ledger.
    pub(crate) fn new() -> io::Result<Self> {
        let folder = RunFolder::new()?;
        let account = LedgerAccount::new(Some(Ledger::create(&folder.path().join(LEDGER))?));
        Ok(Self { folder, account })
    }

    pub(crate) fn hold(&mut self, held: Bytes) {
        let nothing_fails: Result<(), std::convert::Infallible> =
            self.account.change(DEVICE, |_| (Ok(()), held));
        let Ok(()) = nothing_fails;
    }

    pub(crate) fn ledger(&self) -> PathBuf {
        self.folder.path().join(LEDGER)
    }
}
