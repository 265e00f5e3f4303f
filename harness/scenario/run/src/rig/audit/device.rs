use harness_allocator::device::{Clock, DeviceInfo, DeviceMemory, PoolMemory, TestDevice};
use harness_allocator::{stats::MemoryStats, units::Bytes};

use super::Finding;
use harness_record::Invariant;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    pub reserved: u64,
    /// The same in whole granules of the device. `None`: unknown, because the structure has changed
    /// since it was read.
    pub charged: Option<u64>,
}

impl Held {
    /// A program before its first request.
    pub const NOTHING: Self = Self {
        reserved: 0,
        charged: Some(0),
    };

    pub fn and(self, other: Self) -> Self {
        let charged = self
            .charged
            .zip(other.charged)
            .map(|(one, other)| one.saturating_add(other));
        Self {
            reserved: self.reserved.saturating_add(other.reserved),
            charged,
        }
    }
}

pub(super) struct Figures<'a> {
    pub(super) stats: &'a MemoryStats,
    pub(super) pool: Option<PoolMemory>,
    /// The allocator's memory. It comes from the structure, or from the counters if the structure
    /// is outdated.
    pub(super) held: Held,
    pub(super) others: Held,
}

#[derive(Debug)]
pub(super) struct DeviceAccount {
    tolerance: Bytes,
    simulated: bool,
    /// Describes how other processes changed the device's figures, if they did.
    pub(super) contention: Option<String>,
    /// The device's memory when the scenario began. Memory used until then is not counted.
    pub(super) start: DeviceMemory,
}

impl DeviceAccount {
    pub(super) fn new(info: &DeviceInfo, start: DeviceMemory) -> Self {
        let simulated = info.clock == Clock::Simulated;
        Self {
            tolerance: info.used_tolerance,
            simulated,
            contention: None,
            start,
        }
    }

    /// Compares the accounts with the device. A mismatch is read twice, because NVML's figures
    /// follow driver calls with a delay and do not change simultaneously.
    pub(super) fn check(
        &mut self,
        look: &Figures<'_>,
        device: &mut dyn TestDevice,
        findings: &mut Vec<Finding>,
    ) {
        let stats = look.stats;
        let mut pairs = account_pairs(stats);
        if let Some(pool) = look.pool {
            let handed_out = ("used in the driver's pool", pool.used.0);
            pairs.extend([
                (allocated(stats), handed_out),
                (handed_out, reserved(stats)),
            ]);
        }
        check_order(&pairs, findings);
        let mut reading = device.memory();
        let others_moved =
            |memory| self.contention.is_none() && self.others_moved(memory).is_some();
        if reading
            .as_ref()
            .is_ok_and(|&memory| others_moved(memory) || !self.differences(look, memory).is_empty())
        {
            reading = device.memory();
        }
        match reading {
            Ok(memory) => {
                let contention = self.others_moved(memory);
                self.contention = self.contention.take().or(contention);
                findings.append(&mut self.compare(look, memory));
            }
            Err(error) => {
                let expected = "the device to report its memory";
                findings.push(Finding::new(
                    Invariant::DeviceUsedFollowsReserved,
                    expected,
                    error.to_string(),
                ));
            }
        }
    }

    /// Describes how much memory other processes took or released since the start.
    fn others_moved(&self, memory: DeviceMemory) -> Option<String> {
        let others = |memory: &DeviceMemory| {
            memory
                .process
                .map(|process| memory.used.saturating_sub(process + memory.processes))
        };
        let (before, now) = (others(&self.start)?, others(&memory)?);
        let moved = !self.simulated && now.0.abs_diff(before.0) > self.tolerance.0;
        moved.then(|| {
            format!(
                "other processes held {before} of the device when the run began, and {now} later"
            )
        })
    }

    /// The change of the device's figures since the start, without external memory and other
    /// processes of the run. Uses this process's figure if the device reports it, else that of the
    /// whole device, which other processes change too.
    fn moved(&self, memory: DeviceMemory) -> i128 {
        let moved = |now: Bytes, before: Bytes| i128::from(now.0) - i128::from(before.0);
        let external_memory = moved(memory.external_memory, self.start.external_memory);
        match (memory.process, self.start.process) {
            // On a real device, this process itself allocates the external memory.
            (Some(now), Some(before)) if !self.simulated => moved(now, before) - external_memory,
            _ => {
                moved(memory.used, self.start.used)
                    - external_memory
                    - moved(memory.processes, self.start.processes)
            }
        }
    }

    /// The differences between the accounts and the device. If their origin is unknown, they count
    /// as contention instead.
    fn compare(&mut self, look: &Figures<'_>, memory: DeviceMemory) -> Vec<Finding> {
        let findings = self.differences(look, memory);
        let is_known = self.simulated || (memory.process.is_some() && self.start.process.is_some());
        if is_known || findings.is_empty() {
            return findings;
        }
        // Another process may have caused the difference, so it does not prove an allocator bug.
        let (moved, reserved) = (self.moved(memory), look.held.and(look.others).reserved);
        let why = format!(
            "device used moved by {moved} B while {reserved} B were reserved, and NVML does not \
             report which process caused it"
        );
        self.contention.get_or_insert(why);
        Vec::new()
    }

    /// Compares the memory of all programs with the change of the device's figures.
    fn differences(&self, look: &Figures<'_>, memory: DeviceMemory) -> Vec<Finding> {
        let mut findings = Vec::new();
        let (moved, tolerance) = (self.moved(memory), i128::from(self.tolerance.0));
        let held = u64::try_from(moved + tolerance).unwrap_or(0);
        let (name, counted) = reserved(look.stats);
        let of_all = if look.others.reserved > 0 {
            "reserved by all programs"
        } else {
            name
        };
        let counted = (of_all, counted.saturating_add(look.others.reserved));
        check_order(
            &[(
                counted,
                ("device used − context overhead − external memory", held),
            )],
            &mut findings,
        );
        let Held { reserved, charged } = look.held.and(look.others);
        let most = charged.map_or(i128::MAX, |charged| i128::from(charged) + tolerance);
        if moved < i128::from(reserved) - tolerance || moved > most {
            let charge = charged
                .filter(|charged| *charged != reserved)
                .map_or_else(String::new, |charged| format!(" (charged as {charged})"));
            let programs = if look.others.reserved > 0 {
                " by all programs"
            } else {
                ""
            };
            let expected = format!(
                "device used moved by the {reserved} B reserved{programs}{charge}, within {}",
                self.tolerance
            );
            let seen = format!(
                "it moved by {moved} B, {:+} B off",
                moved - i128::from(reserved)
            );
            findings.push(Finding::new(
                Invariant::DeviceUsedFollowsReserved,
                expected,
                seen,
            ));
        }
        findings
    }
}

pub(super) type NamedAmount = (&'static str, u64);

const fn allocated(stats: &MemoryStats) -> NamedAmount {
    ("allocated", stats.allocated_bytes.all.current)
}

const fn reserved(stats: &MemoryStats) -> NamedAmount {
    ("reserved", stats.reserved_bytes.all.current)
}

/// Pairs of accounts whose first is never larger than the second.
pub(super) fn account_pairs(stats: &MemoryStats) -> Vec<(NamedAmount, NamedAmount)> {
    let (requested, active) = (
        ("requested", stats.requested_bytes.all.current),
        ("active", stats.active_bytes.all.current),
    );
    vec![
        (requested, active),
        (allocated(stats), active),
        (active, reserved(stats)),
    ]
}

pub(super) fn check_order(pairs: &[(NamedAmount, NamedAmount)], findings: &mut Vec<Finding>) {
    for ((lower_name, lower), (upper_name, upper)) in pairs {
        if lower > upper {
            let expected = format!("{lower_name} ≤ {upper_name}");
            let seen = format!(
                "{lower} B ({}) > {upper} B ({})",
                Bytes(*lower),
                Bytes(*upper)
            );
            findings.push(Finding::new(Invariant::AccountsAreOrdered, expected, seen));
        }
    }
}
