use std::collections::BTreeSet;

use harness_allocator::{named_enum, units::Bytes};
use harness_language::schema::JsonSchema;
use serde::Deserialize;

use crate::cases::DeviceKind;
use crate::checker::{Parameters, size};
use harness_language::error::{Problem, named};
use harness_language::text::{AmountText, NameText, bounded};
use harness_language::{fields::check_memory, located::Located};

/// Largest `devices`.
const MAX_DEVICES: u64 = 64;

named_enum! {
    /// A device feature beyond plain memory.
    Feature {
        /// Virtual memory management: mapping pages into reserved addresses.
        VirtualMemory = "virtual_memory",
        /// Stream-ordered memory pools.
        MemoryPools = "memory_pools",
        /// Reporting how much memory this process uses.
        ProcessMemory = "process_memory",
    }
}

/// Checked requirements. A machine that does not meet them skips the scenario.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Needs {
    pub memory: Bytes,
    pub device: Option<DeviceKind>,
    pub devices: u64,
    pub features: BTreeSet<Feature>,
}

/// Requirements on the machine. A machine that does not meet them skips the scenario and reports
/// why.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename = "needs")]
pub(crate) struct NeedsWire {
    /// Memory of the device, from 2MiB to 1PiB. A larger device is limited to this.
    memory: AmountText,
    /// `simulated` or `gpu`. Default: any device.
    device: Option<NameText>,
    /// Smallest number of devices. Default: 1.
    #[schemars(range(min = 1, max = MAX_DEVICES))]
    devices: Option<Located<u64>>,
    /// Features of the device: `virtual_memory`, `memory_pools`, `process_memory`. Features that an
    /// allocator needs are checked without this.
    #[serde(default)]
    features: Vec<NameText>,
}

impl NeedsWire {
    pub(crate) fn check(&self, parameters: &Parameters, source: &str) -> Result<Needs, Problem> {
        let memory = check_memory(size(&self.memory, parameters, source)?, self.memory.at)?;
        let device = self.device.as_ref().map(|name| {
            named(
                name,
                ["kind of device", "kinds of device"],
                DeviceKind::from_name,
                DeviceKind::ALL.iter().map(|kind| kind.name()),
            )
        });
        let devices = self.devices.as_ref().map_or(Ok(1), |devices| {
            bounded(devices, "devices", 1..=MAX_DEVICES)
        })?;
        let features = self
            .features
            .iter()
            .map(|name| {
                named(
                    name,
                    ["feature", "features"],
                    Feature::from_name,
                    Feature::ALL.iter().map(|feature| feature.name()),
                )
            })
            .collect::<Result<_, _>>();
        Ok(Needs {
            memory,
            device: device.transpose()?,
            devices,
            features: features?,
        })
    }
}
