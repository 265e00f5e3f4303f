//! The host: its processor, and other users of it. Everything is read from Linux' `/proc`; elsewhere it is unknown.

use std::fs;
use std::time::Duration;

/// Share of the time in which a thread may wait for a core, or a hypervisor may take the cores. Waiting lengthens timed regions
/// by about its share, so below this limit it cannot pass for the smallest change that suites look for.
const MAX_WAITING: f64 = 0.02;

/// Counters in units whose ratios matter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct HostUse {
    /// This thread's time on a core, and its time waiting for one.
    thread: Option<(u64, u64)>,
    /// The host's working time, and the time taken by a hypervisor.
    cores: Option<(u64, u64)>,
}

/// Shares of time lost between two readings.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Waiting {
    thread: Option<f64>,
    stolen: Option<f64>,
}

impl HostUse {
    pub(super) fn now() -> Self {
        let read = |path: &str| fs::read_to_string(path).ok();
        Self {
            thread: read("/proc/thread-self/schedstat").as_deref().and_then(thread_use),
            cores: read("/proc/stat").as_deref().and_then(cores_use),
        }
    }

    /// The losses between this reading and a later one of the same thread, `elapsed` apart. A thread that mostly waits for its
    /// measured processes uses little core time, so its waiting is a share of the whole time.
    pub(super) fn until(&self, later: &Self, elapsed: Duration) -> Waiting {
        let waited = self.thread.zip(later.thread).map(|(first, last)| last.1.saturating_sub(first.1) as f64);
        let stolen = self.cores.zip(later.cores).map(|(first, last)| (last.0.saturating_sub(first.0), last.1.saturating_sub(first.1)));
        Waiting {
            thread: waited.filter(|_| !elapsed.is_zero()).map(|waited| waited / elapsed.as_nanos() as f64),
            stolen: stolen.filter(|(had, lost)| had + lost > 0).map(|(had, lost)| lost as f64 / (had + lost) as f64),
        }
    }
}

/// Why the host's times are unreliable.
pub(super) fn contended(waiting: &Waiting) -> Option<String> {
    let percent = |share: f64| format!("{:.0} %", 100.0 * share);
    let busy = [
        waiting
            .thread
            .filter(|share| *share > MAX_WAITING)
            .map(|share| format!("the harness waited for a core {} of its time", percent(share))),
        waiting.stolen.filter(|share| *share > MAX_WAITING).map(|share| format!("the hypervisor took {} of the time", percent(share))),
    ];
    let busy: Vec<String> = busy.into_iter().flatten().collect();
    (!busy.is_empty()).then(|| format!("the processor was busy with other work: {}", busy.join("; ")))
}

/// Parses `/proc/PID/schedstat`: time on a core and on a run queue, in nanoseconds
/// (<https://docs.kernel.org/scheduler/sched-stats.html>).
fn thread_use(schedstat: &str) -> Option<(u64, u64)> {
    let mut fields = schedstat.split_whitespace().map(str::parse);
    Some((fields.next()?.ok()?, fields.next()?.ok()?))
}

/// Parses the first line of `/proc/stat`: user, nice, system, idle, iowait, irq, softirq, steal, in ticks
/// (<https://docs.kernel.org/filesystems/proc.html>). Idle time is excluded.
fn cores_use(stat: &str) -> Option<(u64, u64)> {
    let fields: Vec<u64> = stat.lines().next()?.strip_prefix("cpu ")?.split_whitespace().map_while(|field| field.parse().ok()).collect();
    let [user, nice, system, _idle, _iowait, irq, softirq, steal, ..] = fields[..] else { return None };
    Some((user + nice + system + irq + softirq, steal))
}

pub(super) fn cpu() -> Option<String> {
    cpu_model(&fs::read_to_string("/proc/cpuinfo").ok()?)
}

/// `model name` on x86; implementer and part numbers on ARM.
fn cpu_model(cpuinfo: &str) -> Option<String> {
    let field = |name: &str| {
        let values = cpuinfo.lines().filter_map(|line| line.split_once(':')).filter(|(key, _)| key.trim() == name);
        values.map(|(_, value)| value.split_whitespace().collect::<Vec<_>>().join(" ")).find(|value| !value.is_empty())
    };
    field("model name").or_else(|| Some(format!("ARM implementer {}, part {}", field("CPU implementer")?, field("CPU part")?)))
}

/// As in `Linux 6.8.0`.
pub(super) fn kernel() -> Option<String> {
    let read = |name: &str| fs::read_to_string(format!("/proc/sys/kernel/{name}")).ok().map(|text| text.trim().to_owned());
    Some(format!("{} {}", read("ostype")?, read("osrelease")?))
}

#[cfg(test)]
mod tests;
