//! PyTorch's statistics of pinned host memory: [`RecordedHostMemory`]. PyTorch does not write them
//! into snapshots, but `harness exec` and `harness.observe` do.

use harness_allocator::{allocator::caching::TorchVersion, units::Bytes};
use serde::Serialize;

use super::Snapshot;

const KEY: &str = "harness_host_memory";
/// Below this, pinned memory is only that of PyTorch's own reads of single values.
const LEAST: Bytes = Bytes::mib(1);

/// Page-locked memory of one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct RecordedHostMemory {
    /// `None` if this version of PyTorch miscounts it.
    pub allocated: Option<Bytes>,
    pub reserved: Bytes,
    /// At most this much: PyTorch adds the peaks of blocks of different sizes, which can have
    /// different times.
    pub peak_allocated: Option<Bytes>,
    pub peak_reserved: Bytes,
}

impl RecordedHostMemory {
    /// The figures among the statistics of `torch.cuda.host_memory_stats()` of this version, if
    /// they are known. Until 2.9 they have other names than today. In 2.11, freed blocks stay
    /// allocated in the statistics; 2.15 counts them. Between the two it is not known.
    pub fn of(version: &str, statistic: impl Fn(&str) -> Option<u64>) -> Option<Self> {
        let is_older = statistic("reserved_bytes.peak").is_some();
        let [allocated, reserved] = if is_older {
            ["allocated_bytes", "reserved_bytes"]
        } else {
            ["active_bytes", "allocated_bytes"]
        };
        let is_right = is_older
            || version
                .parse()
                .is_ok_and(|version: TorchVersion| version >= TorchVersion::V2_15);
        let figure =
            |quantity: &str, kind: &str| statistic(&format!("{quantity}.{kind}")).map(Bytes);
        Some(Self {
            allocated: figure(allocated, "current").filter(|_| is_right),
            reserved: figure(reserved, "current")?,
            peak_allocated: figure(allocated, "peak").filter(|_| is_right),
            peak_reserved: figure(reserved, "peak")?,
        })
    }

    /// Returns whether the program itself used pinned memory, and not only PyTorch for reads of
    /// single values.
    pub fn is_of_program(&self) -> bool {
        self.peak_reserved >= LEAST
    }

    /// The peaks, for example `peak allocated at most 1 GiB, peak reserved 1 GiB`.
    pub fn peaks(&self) -> String {
        let allocated = self.peak_allocated;
        let allocated =
            allocated.map_or_else(|| "unknown".to_owned(), |peak| format!("at most {peak}"));
        format!(
            "peak allocated {allocated}, peak reserved {}",
            self.peak_reserved
        )
    }

    /// The current figures, for example `allocated 512 MiB, reserved 1 GiB`.
    pub fn now(&self) -> String {
        let allocated = self.allocated;
        let allocated = allocated.map_or_else(|| "unknown".to_owned(), |bytes| bytes.to_string());
        format!("allocated {allocated}, reserved {}", self.reserved)
    }
}

impl Snapshot {
    /// Returns the pinned host memory at the time of the snapshot. `None` for snapshots that
    /// PyTorch wrote.
    pub fn host_memory(&self) -> Option<RecordedHostMemory> {
        let values = self.extras.value(self.extra, KEY)?;
        let value = |name: &str| values.get(name);
        RecordedHostMemory::of(value("torch")?.as_text()?, |name| value(name)?.as_u64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_read_by_their_names_in_each_version_if_it_counts_them_right() {
        let newer = [("active_bytes", [1, 2]), ("allocated_bytes", [3, 4])];
        let older = [("allocated_bytes", [1, 2]), ("reserved_bytes", [3, 4])];
        let of = |version: &str, statistics: &[(&str, [u64; 2])]| {
            RecordedHostMemory::of(version, |name| {
                let (quantity, kind) = name.split_once('.')?;
                let &(_, [current, peak]) =
                    statistics.iter().find(|(name, _)| *name == quantity)?;
                Some(if kind == "peak" { peak } else { current })
            })
        };
        let [reserved, peak_reserved] = [3, 4].map(Bytes);
        let all = RecordedHostMemory {
            allocated: Some(Bytes(1)),
            reserved,
            peak_allocated: Some(Bytes(2)),
            peak_reserved,
        };
        let miscounted = RecordedHostMemory {
            allocated: None,
            peak_allocated: None,
            ..all
        };
        let found = [
            of("2.15.0+cu130", &newer),
            of("2.11.0", &newer),
            of("2.9.1+cu128", &older),
            of("2.15.0", &[]),
        ];
        assert_eq!(found, [Some(all), Some(miscounted), Some(all), None]);
    }
}
