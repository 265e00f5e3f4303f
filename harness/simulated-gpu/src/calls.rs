//! [`Calls`]: calls of the driver and of NVML that are refused, that never return, or that are listed, as the settings say.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use harness_gpu_settings::driver::Refusal;
use harness_gpu_settings::settings::{CALLS, Settings};

/// Calls of this process.
#[derive(Debug)]
pub(crate) struct Calls {
    refusals: Vec<Refusal>,
    /// Where the name of each call is written.
    list: Option<PathBuf>,
    counted: Mutex<BTreeMap<&'static str, u64>>,
    /// Whether a call was made that never returns. In a driver that hangs, every later call hangs too.
    hangs: AtomicBool,
}

impl Calls {
    pub(crate) fn new(settings: &Settings, folder: Option<&Path>) -> Self {
        let list = folder.filter(|_| settings.list_calls).map(|folder| folder.join(CALLS));
        Self { refusals: settings.refusals.clone(), list, counted: Mutex::default(), hangs: AtomicBool::new(false) }
    }

    /// The answer to a call that is refused. Does next to nothing where no call is refused or listed.
    pub(crate) fn refusal(&self, function: &'static str) -> Option<c_int> {
        if self.refusals.is_empty() && self.list.is_none() {
            return None;
        }
        let nth = self.count(function);
        let refusal = self.refusals.iter().find(|refusal| refusal.function == function && [0, nth].contains(&refusal.nth));
        if refusal.is_some_and(|refusal| refusal.code.is_none()) {
            self.hangs.store(true, Ordering::Relaxed);
        }
        while self.hangs.load(Ordering::Relaxed) {
            thread::park();
        }
        refusal.and_then(|refusal| refusal.code).map(u32::cast_signed)
    }

    /// Counts and lists a call. Returns how many of the function there were.
    fn count(&self, function: &'static str) -> u64 {
        let mut counted = self.counted.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(path) = &self.list {
            append(path, &format!("{function}\n"));
        }
        let calls = counted.entry(function).or_default();
        *calls += 1;
        *calls
    }
}

/// Writes behind what stands in a file of the run's folder.
pub(crate) fn append(path: &Path, text: &str) {
    let written = OpenOptions::new().create(true).append(true).open(path).and_then(|mut file| file.write_all(text.as_bytes()));
    if let Err(error) = written {
        eprintln!("simulated GPU: cannot write to {}: {error}", path.display());
    }
}
