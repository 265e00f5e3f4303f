//! [`Calls`]: injects errors into calls of the driver and of NVML, makes them hang, or lists them,
//! as the settings request.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::{collections::BTreeMap, ffi::c_int, fs::OpenOptions, io::Write as _, thread};

use harness_allocator::sync::lock;
use harness_gpu_settings::driver::Refusal;
use harness_gpu_settings::settings::{CALLS, Settings};

#[derive(Debug)]
pub(crate) struct Calls {
    refusals: Vec<Refusal>,
    /// The file for the names of all calls.
    list: Option<PathBuf>,
    counted: Mutex<BTreeMap<&'static str, u64>>,
    /// Set by a call that hangs. Then every later call hangs too, as in a real driver.
    hangs: AtomicBool,
}

impl Calls {
    pub(crate) fn new(settings: &Settings, folder: Option<&Path>) -> Self {
        let list = folder
            .filter(|_| settings.list_calls)
            .map(|folder| folder.join(CALLS));
        Self {
            refusals: settings.refusals.clone(),
            list,
            counted: Mutex::default(),
            hangs: AtomicBool::new(false),
        }
    }

    /// The error code to return from a call. Cheap if the settings change no calls.
    pub(crate) fn injected_error(&self, function: &'static str) -> Option<c_int> {
        if self.refusals.is_empty() && self.list.is_none() {
            return None;
        }
        let nth = self.count(function);
        let refusal = self
            .refusals
            .iter()
            .find(|refusal| refusal.function == function && [0, nth].contains(&refusal.nth));
        if refusal.is_some_and(|refusal| refusal.code.is_none()) {
            self.hangs.store(true, Ordering::Relaxed);
        }
        while self.hangs.load(Ordering::Relaxed) {
            thread::park();
        }
        refusal
            .and_then(|refusal| refusal.code)
            .map(u32::cast_signed)
    }

    /// Counts and lists a call. Returns the number of calls of the function.
    fn count(&self, function: &'static str) -> u64 {
        let mut counted = lock(&self.counted);
        if let Some(path) = &self.list {
            append(path, &format!("{function}\n"));
        }
        let calls = counted.entry(function).or_default();
        *calls += 1;
        *calls
    }
}

pub(crate) fn append(path: &Path, text: &str) {
    let written = OpenOptions::new()
        .create(true)
        .append(true)
        .open(path)
        .and_then(|mut file| file.write_all(text.as_bytes()));
    if let Err(error) = written {
        eprintln!("simulated GPU: cannot write to {}: {error}", path.display());
    }
}
