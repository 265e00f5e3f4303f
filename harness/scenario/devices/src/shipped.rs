//! GPUs with unmeasured costs: those that ship with the program, and a user's own, from a file with
//! `costs: not measured`. A simulated device has their memory and published costs.

use std::{borrow::Cow, fmt, num::NonZeroU16, path::Path};

use harness_allocator::device::sim::{CostModel, PCIE_3, PCIE_4, PCIE_5, SimConfig, Sourced};
use harness_allocator::units::Bytes;
use harness_gpu_settings::gpus::{GPUS, Gpu};
use harness_language::error::FileError;
use serde::{Deserialize, Deserializer};

use crate::profile::header::{ProfileName, Version};
use crate::profile::{parse, read};

/// A user's own GPU, as a file describes it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Own {
    #[serde(rename = "version")]
    _version: Version,
    name: ProfileName,
    /// The name that the driver returns.
    #[serde(deserialize_with = "device")]
    device: String,
    #[serde(deserialize_with = "amount")]
    memory: Bytes,
    #[serde(deserialize_with = "capability")]
    capability: (u32, u32),
    multiprocessors: NonZeroU16,
    #[serde(deserialize_with = "amount")]
    l2_cache: Bytes,
    #[serde(default)]
    clock_mhz: u16,
    #[serde(default)]
    memory_clock_mhz: u16,
    #[serde(default)]
    memory_bus_bits: u16,
    #[serde(default, deserialize_with = "generation")]
    pcie: Option<u8>,
    peer_access: Option<bool>,
    shares_host_memory: Option<bool>,
    #[serde(default)]
    source: String,
    #[serde(rename = "costs")]
    _costs: NotMeasured,
}

/// States that the costs are the published ones.
#[derive(Deserialize)]
enum NotMeasured {
    #[serde(rename = "not measured")]
    NotMeasured,
}

/// Deserializes a text or number and checks it.
fn checked<'de, D: Deserializer<'de>, T, E: fmt::Display>(
    deserializer: D,
    check: impl Fn(&str) -> Result<T, E>,
) -> Result<T, D::Error> {
    check(&String::deserialize(deserializer)?).map_err(serde::de::Error::custom)
}

/// The driver's buffer for a name has 256 bytes.
fn device<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    checked(deserializer, |text| match text.len() {
        1..=255 => Ok(text.to_owned()),
        length => Err(format!(
            "the name of a device has 1 to 255 bytes, not {length}"
        )),
    })
}

fn amount<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Bytes, D::Error> {
    checked(deserializer, |text| {
        Bytes::parse(text).map_err(|error| error.to_string())
    })
}

fn capability<'de, D: Deserializer<'de>>(deserializer: D) -> Result<(u32, u32), D::Error> {
    checked(deserializer, |text| {
        let parsed = text
            .split_once('.')
            .and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
        let known = parsed.filter(|capability| Gpu::has_limits(*capability));
        known.ok_or_else(|| {
            format!(
                "`{text}` is not a supported compute capability: write one of {}",
                Gpu::capabilities()
            )
        })
    })
}

fn generation<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u8>, D::Error> {
    match u8::deserialize(deserializer)? {
        generation @ 3..=5 => Ok(Some(generation)),
        other => {
            let message = format_args!(
                "{other} is not a supported generation of PCI Express: write 3, 4 or 5"
            );
            Err(serde::de::Error::custom(message))
        }
    }
}

impl From<Own> for Gpu {
    fn from(own: Own) -> Self {
        Self {
            name: own.name.to_string(),
            device: own.device,
            memory: own.memory,
            capability: own.capability,
            multiprocessors: u32::from(own.multiprocessors.get()),
            clock_khz: 1000 * u32::from(own.clock_mhz),
            memory_clock_khz: 1000 * u32::from(own.memory_clock_mhz),
            memory_bus_bits: u32::from(own.memory_bus_bits),
            l2_cache: u32::try_from(own.l2_cache.get()).unwrap_or(u32::MAX),
            pcie: own.pcie,
            peer_access: own.peer_access,
            shares_host_memory: own.shares_host_memory,
            source: own.source,
        }
    }
}

/// Reads a user's own GPU. It stays in memory until the process ends.
pub fn load(path: &Path) -> Result<&'static Gpu, FileError> {
    of_text(&read(path)?, path).map(Gpu::leak)
}

/// Parses a user's own GPU; `path` appears in errors.
pub(crate) fn of_text(text: &str, path: &Path) -> Result<Gpu, FileError> {
    parse::<Own>(text, path).map(Gpu::from)
}

/// Returns whether a text describes a GPU with unmeasured costs rather than a measured profile.
pub(crate) fn is_one(text: &str) -> bool {
    text.lines().any(|line| line.starts_with("costs:"))
}

/// Returns the smallest GPU on PCI Express that ships with the program and has this much memory
/// besides its context.
pub fn with_room_for(need: Bytes) -> Option<&'static Gpu> {
    let fits = |gpu: &&Gpu| {
        gpu.pcie.is_some()
            && gpu
                .memory
                .saturating_sub(CostModel::PUBLISHED.context_overhead.value)
                >= need
    };
    GPUS.iter().filter(fits).min_by_key(|gpu| gpu.memory)
}

/// Configures a simulated device with a GPU's memory and the published costs.
pub fn sim_config(gpu: &Gpu) -> SimConfig {
    let published = CostModel::PUBLISHED;
    let name = Cow::Owned(format!(
        "{}, costs not measured: {}",
        gpu.name, published.name
    ));
    let context_overhead = Sourced {
        value: published.context_overhead.value,
        source: published.context_overhead.source.clone(),
    };
    let pinned_copy_per_gib = match gpu.pcie {
        Some(3) => PCIE_3,
        Some(4) => PCIE_4,
        Some(5) => PCIE_5,
        _ => published.pinned_copy_per_gib,
    };
    let cost = CostModel {
        name,
        context_overhead,
        pinned_copy_per_gib,
        ..published
    };
    SimConfig {
        total: gpu.memory,
        context_overhead: cost.context_overhead.value,
        cost,
        ..SimConfig::default()
    }
}

#[cfg(test)]
mod tests;
