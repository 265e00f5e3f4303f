//! [`SharedMemory`]: the device memory that a scenario shares with the programs it runs, on a
//! simulated GPU or on a limited real one.

use std::{io, path::PathBuf};

use harness_allocator::units::Bytes;
use harness_exec::launch::RunFolder;
use harness_gpu_settings::ledger::{Ledger, LedgerAccount};
use harness_gpu_settings::settings::MOST_DEVICES;

const DEVICE: u32 = 0;
/// The file that records the memory of each process.
const LEDGER: &str = "ledger";

#[derive(Debug)]
pub(crate) struct SharedMemory {
    folder: RunFolder,
    account: LedgerAccount,
    /// What the scenario holds.
    held: Bytes,
}

impl SharedMemory {
    /// Creates an empty ledger.
    pub(crate) fn new() -> io::Result<Self> {
        let folder = RunFolder::new()?;
        let account = LedgerAccount::new(Some(Ledger::create(&folder.path().join(LEDGER))?));
        let held = Bytes::ZERO;
        Ok(Self {
            folder,
            account,
            held,
        })
    }

    /// Sets what the scenario holds, before a program starts alone, and begins new peaks.
    pub(crate) fn hold(&mut self, held: Bytes) {
        self.held = held;
        let nothing_fails: Result<(), std::convert::Infallible> =
            self.account.change(DEVICE, |_| (Ok(()), held));
        let Ok(()) = nothing_fails;
        self.account
            .ledger()
            .iter()
            .for_each(|ledger| ledger.begin_peaks());
    }

    /// The most bytes that the scenario and its programs have held together since the last program
    /// that started alone. Of several devices, those of the fullest.
    pub(crate) fn peak(&self) -> Bytes {
        self.peak_without(Bytes::ZERO)
    }

    /// The same without the scenario's memory.
    pub(crate) fn peak_of_programs(&self) -> Bytes {
        self.peak_without(self.held)
    }

    fn peak_without(&self, held: Bytes) -> Bytes {
        let ledger = self.account.ledger();
        let peak = |device: u32| {
            let held = if device == DEVICE { held } else { Bytes::ZERO };
            ledger.map(|ledger| ledger.peak(device).saturating_sub(held))
        };
        (0..MOST_DEVICES).filter_map(peak).max().unwrap_or_default()
    }

    pub(crate) fn ledger(&self) -> PathBuf {
        self.folder.path().join(LEDGER)
    }
}
