//! The host: its processor, and other users of it. Everything is read from Linux' `/proc`;
//! elsewhere it is unknown.

use std::{fs, time::Duration};

use procfs::{
    CpuInfo, CpuTime, Current as _, CurrentSI as _, FromRead as _, KernelStats, process::Schedstat,
};

/// Share of the time in which a thread may wait for a core, or a hypervisor may take the cores.
/// Waiting lengthens timed regions by about its share, so below this limit it cannot pass for the
/// smallest change that suites look for.
const MAX_WAITING: f64 = 0.02;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct HostUse {
    /// This thread's time waiting for a core, in nanoseconds.
    thread: Option<u64>,
    /// The host's working time, and the time taken by a hypervisor.
    cores: Option<(u64, u64)>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Waiting {
    thread: Option<f64>,
    stolen: Option<f64>,
}

impl HostUse {
    pub(super) fn now() -> Self {
        Self {
            thread: Schedstat::from_file("/proc/thread-self/schedstat")
                .ok()
                .map(|thread| thread.run_delay),
            cores: KernelStats::current()
                .ok()
                .and_then(|host| cores_use(&host.total)),
        }
    }

    /// The losses between this reading and a later one of the same thread, `elapsed` apart. A
    /// thread that mostly waits for its measured processes uses little core time, so its waiting is
    /// a share of the whole time.
    pub(super) fn until(&self, later: &Self, elapsed: Duration) -> Waiting {
        let waited = self
            .thread
            .zip(later.thread)
            .map(|(first, last)| last.saturating_sub(first) as f64);
        let stolen = self.cores.zip(later.cores).map(|(first, last)| {
            (
                last.0.saturating_sub(first.0),
                last.1.saturating_sub(first.1),
            )
        });
        Waiting {
            thread: waited
                .filter(|_| !elapsed.is_zero())
                .map(|waited| waited / elapsed.as_nanos() as f64),
            stolen: stolen
                .filter(|(had, lost)| had + lost > 0)
                .map(|(had, lost)| lost as f64 / (had + lost) as f64),
        }
    }
}

pub(super) fn contended(waiting: &Waiting) -> Option<String> {
    let percent = |share: f64| format!("{:.0} %", 100.0 * share);
    let busy = [
        waiting
            .thread
            .filter(|share| *share > MAX_WAITING)
            .map(|share| {
                format!(
                    "the harness waited for a core {} of its time",
                    percent(share)
                )
            }),
        waiting
            .stolen
            .filter(|share| *share > MAX_WAITING)
            .map(|share| format!("the hypervisor took {} of the time", percent(share))),
    ];
    let busy: Vec<String> = busy.into_iter().flatten().collect();
    (!busy.is_empty()).then(|| {
        format!(
            "the processor was busy with other work: {}",
            busy.join("; ")
        )
    })
}

/// Working and stolen time in ticks. Idle time is excluded.
fn cores_use(time: &CpuTime) -> Option<(u64, u64)> {
    let steal = time.steal?;
    Some((
        time.user + time.nice + time.system + time.irq? + time.softirq? + steal,
        steal,
    ))
}

/// `model name` on x86; implementer and part numbers on ARM.
pub(super) fn cpu() -> Option<String> {
    let info = CpuInfo::current().ok()?;
    let field = |name| {
        info.get_field(0, name)
            .map(|value| value.split_whitespace().collect::<Vec<_>>().join(" "))
    };
    let model = field("model name").filter(|model| !model.is_empty());
    model.or_else(|| {
        Some(format!(
            "ARM implementer {}, part {}",
            field("CPU implementer")?,
            field("CPU part")?
        ))
    })
}

/// As in `Linux 6.8.0`.
pub(super) fn kernel() -> Option<String> {
    let read = |name: &str| {
        fs::read_to_string(format!("/proc/sys/kernel/{name}"))
            .ok()
            .map(|text| text.trim().to_owned())
    };
    Some(format!("{} {}", read("ostype")?, read("osrelease")?))
}

#[cfg(test)]
mod tests;
