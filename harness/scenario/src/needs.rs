//! What a scenario needs to run: memory, a kind of device, how many, and what it can do.

use std::collections::BTreeSet;

use harness_allocator::units::Bytes;
use schemars::JsonSchema;
use serde::Deserialize;

use crate::cases::DeviceKind;
use crate::checker::{Parameters, size};
use harness_language::error::{Problem, choices};
use harness_language::fields::check_memory;
use harness_language::located::Located;
use harness_language::text::{AmountText, NameText, bounded};

/// Most devices that can be asked for.
const MAX_DEVICES: u64 = 64;

/// What a device can do beyond plain memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Feature {
    /// Virtual memory management: pages that are mapped into reserved addresses.
    VirtualMemory,
    /// Pools of stream-ordered memory.
    MemoryPools,
    /// Telling how much memory this process holds.
    ProcessMemory,
}

impl Feature {
    /// Every one.
    pub const ALL: &'static [Self] = &[Self::VirtualMemory, Self::MemoryPools, Self::ProcessMemory];

    /// Its name in scenarios.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::VirtualMemory => "virtual_memory",
            Self::MemoryPools => "memory_pools",
            Self::ProcessMemory => "process_memory",
        }
    }
}

/// What a scenario needs, checked. On a machine without it, the scenario is skipped with the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Needs {
    /// The memory that the device has for it.
    pub memory: Bytes,
    /// The kind of device, if not any will do.
    pub device: Option<DeviceKind>,
    /// How many devices the machine must have: 1 if not given.
    pub devices: u64,
    /// What the device must be able to do.
    pub features: BTreeSet<Feature>,
}

/// What a scenario needs to run. A machine without it skips the scenario, and says why.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "needs")]
pub(crate) struct NeedsWire {
    /// The memory that the device has for it, from 2MiB to 1PiB. A larger device is limited to this.
    memory: AmountText,
    /// `simulated` or `gpu`: any device if not given.
    device: Option<NameText>,
    /// How many devices the machine has at least: 1 if not given.
    #[schemars(range(min = 1, max = MAX_DEVICES))]
    devices: Option<Located<u64>>,
    /// What the device can do: `virtual_memory`, `memory_pools`, `process_memory`. What an allocator needs is looked after without this.
    #[serde(default)]
    features: Vec<NameText>,
}

impl NeedsWire {
    pub(crate) fn check(&self, parameters: &Parameters, source: &str) -> Result<Needs, Problem> {
        let memory = check_memory(size(&self.memory, parameters, source)?, self.memory.position())?;
        let device = self.device.as_ref().map(device_kind).transpose()?;
        let devices = self.devices.as_ref().map_or(Ok(1), |devices| bounded(devices, "devices", 1..=MAX_DEVICES))?;
        let features = self.features.iter().map(feature).collect::<Result<_, _>>()?;
        Ok(Needs { memory, device, devices, features })
    }
}

fn device_kind(name: &NameText) -> Result<DeviceKind, Problem> {
    let kinds = [DeviceKind::Simulated, DeviceKind::Gpu];
    kinds.into_iter().find(|kind| kind.name() == name.text()).ok_or_else(|| {
        Problem::new(name.position(), format!("there is no kind of device `{}`", name.text())).help(choices(
            name.text(),
            "kinds of device",
            kinds.map(DeviceKind::name),
        ))
    })
}

fn feature(name: &NameText) -> Result<Feature, Problem> {
    Feature::ALL.iter().copied().find(|feature| feature.name() == name.text()).ok_or_else(|| {
        Problem::new(name.position(), format!("there is no feature `{}`", name.text())).help(choices(
            name.text(),
            "features",
            Feature::ALL.iter().map(|feature| feature.name()),
        ))
    })
}
