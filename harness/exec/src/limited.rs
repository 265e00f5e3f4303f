//! Starts a program on a real GPU with a limit on its device memory and failures that are asked for. All libraries are NVIDIA's own: the library
//! of `harness-limits` is loaded beside them.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use harness_gpu_settings::limits::{LIMITS, LIMITS_LEDGER, LIMITS_RUN, Limits};

use crate::launch::{Ended, LaunchError, Prepared, Way, joined, limiter, of_torch, write_hook};

/// The variable that chooses the GPUs that a program sees.
const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";

/// A program, and how it is limited.
#[derive(Clone, Copy, Debug)]
pub struct LimitedLaunch<'a> {
    /// The program and its arguments.
    pub command: &'a [OsString],
    /// The only GPU that it sees, by its number for this process.
    pub ordinal: u32,
    /// Its limits.
    pub limits: &'a Limits,
    /// Settings of PyTorch's allocator.
    pub alloc_conf: Option<&'a str>,
    /// Whether a memory snapshot is wanted.
    pub snapshot: bool,
    /// The version of the GNU C library that it has.
    pub libc: (u32, u32),
    /// The ledger of the limit that it shares with others; each of its processes has the limit by itself without it.
    pub ledger: Option<&'a Path>,
}

/// The library that limits programs with this version of the GNU C library.
///
/// # Errors
/// That it is too old, or that the library is missing.
pub fn limiter_for(libc: (u32, u32)) -> Result<PathBuf, LaunchError> {
    if Way::of_libc(libc) == Way::Audit { limiter() } else { Err(LaunchError::OldLibc(libc)) }
}

/// Where processes leave their counters, in the folder of a run. What a simulated GPU leaves, where the limits are tried on one, lies above.
pub(crate) fn counters_folder(run: &Path) -> PathBuf {
    run.join("limits")
}

impl LimitedLaunch<'_> {
    /// Runs the program to its end. Its standard streams are ours. Where it is to be reported, its processes note what a timeline needs.
    ///
    /// # Errors
    /// That it cannot be limited or started.
    pub fn run(&self, is_reported: bool) -> Result<Ended, LaunchError> {
        self.prepare()?.run(is_reported)
    }

    /// Makes the folder of a run, and the command that runs the program in it.
    ///
    /// # Errors
    /// That it cannot be limited, or that the folder cannot be made.
    pub fn prepare(&self) -> Result<Prepared, LaunchError> {
        let library = limiter_for(self.libc)?;
        let fill = |run: &Path| write_hook(run).and_then(|_| fs::create_dir(counters_folder(run)));
        Prepared::new(self.command, fill, |run| self.environment(run, &library, |name| std::env::var_os(name)))
    }

    /// The variables that are set for the program, given those that it would have.
    fn environment(&self, run: &Path, library: &Path, inherited: impl Fn(&str) -> Option<OsString>) -> Vec<(&'static str, OsString)> {
        let mut set = of_torch(run, self.alloc_conf, self.snapshot, &inherited);
        set.extend([
            (LIMITS, self.limits.to_string().into()),
            (LIMITS_RUN, counters_folder(run).into()),
            (VISIBLE, visible(self.ordinal, inherited(VISIBLE))),
            // In front: at a call of `dlsym` the GNU C library asks none behind one that does not look at bindings.
            ("LD_AUDIT", joined([library.into(), inherited("LD_AUDIT").unwrap_or_default()])),
        ]);
        set.extend(self.ledger.map(|ledger| (LIMITS_LEDGER, ledger.into())));
        set
    }
}

/// The GPU with this number among those that are visible, as a program that sees only this one has to be told.
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
    fn a_program_sees_one_gpu_and_its_libraries_are_its_own() {
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
    fn a_gpu_is_named_by_its_number_where_all_are_visible() {
        assert_eq!(visible(2, None), "2");
    }

    #[test]
    fn an_old_c_library_is_told() {
        let limits = Limits { device: Bytes::gib(80), memory: None, faults: Vec::new(), latencies: Vec::new() };
        let launch =
            LimitedLaunch { command: &[], ordinal: 0, limits: &limits, alloc_conf: None, snapshot: false, libc: (2, 34), ledger: None };
        let error = launch.run(false).expect_err("it is too old");
        assert_eq!(error.to_string(), "the program's GNU C library is version 2.34: programs on a real GPU can be limited from 2.35 on");
    }
}
