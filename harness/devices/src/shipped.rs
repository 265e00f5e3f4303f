//! Profiles of common GPUs that ship with the program: their memory, as the driver reports it. Their costs were not measured and
//! take published values.
//!
//! They are the files `scenarios/devices/*.yaml` with `costs: not measured`. [`Shipped::named`] finds one by name, and
//! [`Shipped::with_room_for`] finds the smallest with enough free memory.

use std::borrow::Cow;
use std::path::Path;

use harness_allocator::device::sim::{CostModel, Figure, PCIE_3, PCIE_4, PCIE_5, SimConfig};
use harness_allocator::units::{Bytes, Nanos};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};

use crate::profile::header::{ProfileName, Version};
use crate::profile::{FOLDER, parse};

/// The files, in ascending order of memory.
const FILES: [&str; 7] = [
    include_str!("../../../scenarios/devices/t4-16.yaml"),
    include_str!("../../../scenarios/devices/l4-24.yaml"),
    include_str!("../../../scenarios/devices/rtx4090-24.yaml"),
    include_str!("../../../scenarios/devices/a100-40.yaml"),
    include_str!("../../../scenarios/devices/h100-80.yaml"),
    include_str!("../../../scenarios/devices/a100-80.yaml"),
    include_str!("../../../scenarios/devices/h200-141.yaml"),
];

/// A GPU with known memory and unmeasured costs.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shipped {
    pub version: Version,
    /// Its name, as `--device-profile` takes it.
    pub name: ProfileName,
    /// Name of the GPU.
    pub device: String,
    /// Its total memory in bytes, as the driver reports it.
    pub memory: Bytes,
    /// The source of that figure.
    pub source: String,
    /// The published cost of copies to pinned host memory over its link to the host.
    #[serde(deserialize_with = "copies")]
    pub pcie: Figure<Nanos>,
    /// States that the costs are the published ones.
    pub costs: NotMeasured,
}

/// Returns the cost of copies over 16 lanes of a generation of PCI Express.
fn copies<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Figure<Nanos>, D::Error> {
    match u8::deserialize(deserializer)? {
        3 => Ok(PCIE_3),
        4 => Ok(PCIE_4),
        5 => Ok(PCIE_5),
        other => Err(D::Error::custom(format_args!("{other} is not a supported generation of PCI Express: write 3, 4 or 5"))),
    }
}

/// The text `not measured`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub enum NotMeasured {
    #[serde(rename = "not measured")]
    NotMeasured,
}

impl Shipped {
    /// Returns all shipped profiles, in ascending order of memory.
    pub fn all() -> impl Iterator<Item = Self> {
        FILES.iter().filter_map(|text| parse(text, Path::new(FOLDER)).ok())
    }

    pub fn named(name: &str) -> Option<Self> {
        Self::all().find(|shipped| shipped.name.to_string() == name)
    }

    /// Returns the smallest profile with this much memory besides its context.
    pub fn with_room_for(need: Bytes) -> Option<Self> {
        Self::all().find(|shipped| shipped.memory.saturating_sub(CostModel::PUBLISHED.context_overhead.value) >= need)
    }

    /// Returns whether a text is a shipped profile rather than a measured one.
    pub(crate) fn is_one(text: &str) -> bool {
        text.lines().any(|line| line.starts_with("costs:"))
    }

    /// Configures a simulated device with this GPU's memory and the published costs.
    pub fn sim_config(&self) -> SimConfig {
        let published = CostModel::PUBLISHED;
        let name = Cow::Owned(format!("{}, costs not measured: {}", self.name, published.name));
        let context_overhead = Figure { value: published.context_overhead.value, source: published.context_overhead.source.clone() };
        let cost = CostModel { name, context_overhead, pinned_copy_per_gib: self.pcie.clone(), ..published };
        SimConfig { total: self.memory, context_overhead: cost.context_overhead.value, cost, ..SimConfig::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shipped_profile_is_valid_and_cites_its_source() {
        let read = |text| parse(text, Path::new(FOLDER)).expect("a shipped profile is valid");
        let profiles: Vec<Shipped> = FILES.into_iter().map(read).collect();
        assert!(profiles.is_sorted_by_key(|profile| profile.memory), "the smallest comes first");
        for profile in &profiles {
            assert_eq!(Shipped::named(&profile.name.to_string()).as_ref(), Some(profile));
            assert!(profile.source.contains("https://"), "{}", profile.name);
            let config = profile.sim_config();
            assert_eq!(config.total, profile.memory);
            assert!(config.cost.name.contains("costs not measured"), "{}", config.cost.name);
        }
    }

    #[test]
    fn the_smallest_sufficient_profile_is_found() {
        let name = |need| Shipped::with_room_for(need).map(|profile| profile.name.to_string());
        assert_eq!(name(Bytes::gib(10)).as_deref(), Some("t4-16"));
        assert_eq!(name(Bytes::gib(100)).as_deref(), Some("h200-141"));
        assert_eq!(name(Bytes::gib(500)), None);
    }
}
