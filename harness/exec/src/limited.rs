//! Starts a program on a real GPU with limited device memory and injected failures. All libraries are NVIDIA's; the library of
//! `harness-limits` is loaded next to them.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use harness_gpu_settings::limits::{LIMITS, LIMITS_LEDGER, LIMITS_RUN, Limits};

use crate::launch::{EXPECTED, Ended, Interposition, LaunchError, Prepared, joined, limiter, of_torch, write_hook};

/// The variable that selects the GPUs that a program sees.
const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";

/// A program and its limits.
#[derive(Clone, Copy, Debug)]
pub struct LimitedLaunch<'a> {
    /// The program and its arguments.
    pub command: &'a [OsString],
    /// The only GPU that the program sees, numbered as in this process.
    pub ordinal: u32,
    pub limits: &'a Limits,
    /// Settings of PyTorch's allocator.
    pub alloc_conf: Option<&'a str>,
    /// `true` if the program writes a memory snapshot.
    pub snapshot: bool,
    /// The version of the program's GNU C library.
    pub libc: (u32, u32),
    /// The ledger of a limit shared with other programs. Without it, each process has its own limit.
    pub ledger: Option<&'a Path>,
}

/// Returns the library that limits programs, if this version of the GNU C library supports it.
pub fn limiter_for(libc: (u32, u32)) -> Result<PathBuf, LaunchError> {
    if Interposition::of_libc(libc) == Interposition::Audit { limiter() } else { Err(LaunchError::OldLibc(libc)) }
}

/// The subfolder for the processes' counters. When the limits run on a simulated GPU, that writes its own files one level up.
pub(crate) fn counters_folder(run: &Path) -> PathBuf {
    run.join("limits")
}

impl LimitedLaunch<'_> {
    /// Runs the program with this process's standard streams. If `is_reported`, its processes record data for a timeline.
    pub fn run(&self, is_reported: bool) -> Result<Ended, LaunchError> {
        self.prepare()?.run(is_reported)
    }

    /// Creates the folder of a run and the command that runs the program in it.
    pub fn prepare(&self) -> Result<Prepared, LaunchError> {
        let library = limiter_for(self.libc)?;
        let fill = |run: &Path| write_hook(run).and_then(|_| fs::create_dir(counters_folder(run)));
        Prepared::new(self.command, fill, |run| self.environment(run, &library, |name| std::env::var_os(name)))
    }

    /// Returns the variables to set for the program. `inherited` returns the value it would otherwise inherit.
    fn environment(&self, run: &Path, library: &Path, inherited: impl Fn(&str) -> Option<OsString>) -> Vec<(&'static str, OsString)> {
        let mut set = of_torch(run, self.alloc_conf, self.snapshot, &inherited);
        set.extend([
            (LIMITS, self.limits.to_string().into()),
            (LIMITS_RUN, counters_folder(run).into()),
            (EXPECTED, library.file_name().unwrap_or_default().into()),
            (VISIBLE, visible(self.ordinal, inherited(VISIBLE))),
            // First in the list: for `dlsym`, the GNU C library skips auditors listed after one that ignores bindings.
            ("LD_AUDIT", joined([library.into(), inherited("LD_AUDIT").unwrap_or_default()])),
        ]);
        set.extend(self.ledger.map(|ledger| (LIMITS_LEDGER, ledger.into())));
        set
    }
}

/// Returns the value of CUDA_VISIBLE_DEVICES that selects the GPU with this number among the visible ones.
fn visible(ordinal: u32, inherited: Option<OsString>) -> OsString {
    let named = |list: &str| list.split(',').nth(ordinal as usize).map(|name| name.trim().to_owned());
    inherited.as_deref().and_then(|list| named(list.to_str()?)).unwrap_or_else(|| ordinal.to_string()).into()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use harness_allocator::units::Bytes;

    use super::*;

    #[test]
    fn a_program_sees_one_gpu_and_keeps_its_own_libraries() {
        let limits = Limits { device: Bytes::gib(80), memory: Some(Bytes::gib(24)), faults: Vec::new(), latencies: Vec::new() };
        let launch = LimitedLaunch {
            command: &[],
            ordinal: 1,
            limits: &limits,
            alloc_conf: Some("a:b"),
            snapshot: false,
            libc: (2, 39),
            ledger: Some(Path::new("/ledger")),
        };
        let inherited = |name: &str| match name {
            "LD_AUDIT" => Some("/mine.so".into()),
            VISIBLE => Some("3, GPU-5".into()),
            _ => None,
        };
        let set: BTreeMap<_, _> = launch.environment(Path::new("/run"), Path::new("/lib/limits.so"), inherited).into_iter().collect();
        let expected = BTreeMap::from(
            [
                ("CUDA_VISIBLE_DEVICES", "GPU-5"),
                ("HARNESS_GPU_EXPECTED", "limits.so"),
                ("HARNESS_GPU_LIMITS", "device=85899345920;memory=25769803776"),
                ("HARNESS_GPU_LIMITS_LEDGER", "/ledger"),
                ("HARNESS_GPU_LIMITS_RUN", "/run/limits"),
                ("HARNESS_GPU_RUN", "/run"),
                ("LD_AUDIT", "/lib/limits.so:/mine.so"),
                ("PYTHONPATH", "/run/python"),
                ("PYTORCH_ALLOC_CONF", "a:b"),
                ("PYTORCH_CUDA_ALLOC_CONF", "a:b"),
            ]
            .map(|(name, value)| (name, OsString::from(value))),
        );
        assert_eq!(set, expected);
    }

    #[test]
    fn a_gpu_is_selected_by_its_number_if_all_are_visible() {
        assert_eq!(visible(2, None), "2");
    }

    #[test]
    fn an_old_c_library_is_refused() {
        let limits = Limits { device: Bytes::gib(80), memory: None, faults: Vec::new(), latencies: Vec::new() };
        let launch =
            LimitedLaunch { command: &[], ordinal: 0, limits: &limits, alloc_conf: None, snapshot: false, libc: (2, 34), ledger: None };
        let error = launch.run(false).expect_err("the library is too old");
        assert_eq!(
            error.to_string(),
            "the program's GNU C library has version 2.34; limiting programs on a real GPU requires 2.35 or later"
        );
    }
}
