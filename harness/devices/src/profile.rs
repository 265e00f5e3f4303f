//! Device profiles: the measured costs of a real GPU in a YAML file, which the simulated device can use.
//!
//! [`Profile::load`] reads a file, [`Profile::to_yaml`] writes one, and [`Profile::sim_config`] configures a simulated device.
//! The field types admit only valid values, so a profile needs no further checks.

mod error;
mod figure;
pub(crate) mod header;

use std::borrow::Cow;
use std::fmt::{self, Write as _};
use std::path::Path;

use harness_allocator::device::DeviceInfo;
use harness_allocator::device::sim::{CostModel, Figure, SimConfig};
use harness_allocator::hash::fnv1a;
use harness_allocator::units::{Bytes, Nanos};
use serde::Deserialize;

use harness_base::date::Date;

pub use self::error::ProfileError;
pub use self::figure::{ByteCount, FitError, Measured, Nanoseconds, NanosecondsPerGib, NanosecondsPerMib, Share, Spread, UnitText};
pub use self::header::{PROFILE_VERSION, ProfileName, Version};

/// The folder of profiles, relative to the root of the project.
pub const FOLDER: &str = "scenarios/devices";

/// Maximum size of a file in bytes: a hundred times the size of a profile.
const MAX_FILE: u64 = 256 << 10;

/// The measured costs of a GPU.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    pub version: Version,
    /// Its name in reports.
    pub name: ProfileName,
    /// Date of the measurement, in UTC.
    pub measured: Date,
    /// Version of the harness that measured it.
    pub harness: String,
    /// Name of the GPU.
    pub device: String,
    /// Its total memory in bytes.
    pub memory: Bytes,
    /// Version of the kernel driver, if known.
    pub driver: Option<String>,
    /// CUDA version that the driver supports, if known.
    pub cuda: Option<String>,
    /// Reasons to doubt the figures: other processes, throttling, a busy processor. Empty if none were observed.
    pub contended: Vec<String>,
    pub figures: Figures,
}

/// All measured figures of a cost model. `None` if the device lacks the calls.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Figures {
    pub context_overhead: Measured<ByteCount>,
    pub malloc: Measured<Nanoseconds>,
    pub malloc_per_mib: Measured<NanosecondsPerMib>,
    pub free: Measured<Nanoseconds>,
    pub free_per_mib: Measured<NanosecondsPerMib>,
    pub map_page: Option<Measured<Nanoseconds>>,
    pub unmap_page: Option<Measured<Nanoseconds>>,
    pub pool_call: Option<Measured<Nanoseconds>>,
    pub submit: Measured<Nanoseconds>,
    pub stream_create: Measured<Nanoseconds>,
    pub event_create: Measured<Nanoseconds>,
    pub event_record: Measured<Nanoseconds>,
    pub event_query: Measured<Nanoseconds>,
    pub synchronize: Measured<Nanoseconds>,
    pub transfer_per_gib: Measured<NanosecondsPerGib>,
}

/// Reads a text file. Fails if it is too large or not UTF-8.
pub(crate) fn read(path: &Path) -> Result<String, ProfileError> {
    error::read(path, MAX_FILE)
}

impl Profile {
    /// Creates a profile from figures measured at this date.
    pub fn new(name: ProfileName, measured: Date, device: &DeviceInfo, contended: Vec<String>, figures: Figures) -> Self {
        Self {
            version: Version,
            name,
            measured,
            harness: env!("CARGO_PKG_VERSION").to_owned(),
            device: device.name.clone(),
            memory: device.fingerprint.memory.unwrap_or(device.total),
            driver: device.fingerprint.driver.clone(),
            cuda: device.fingerprint.cuda.clone(),
            contended,
            figures,
        }
    }

    /// Reads a profile from a file.
    pub fn load(path: &Path) -> Result<Self, ProfileError> {
        Self::parse(&read(path)?, path)
    }

    /// Parses a profile; `path` appears in errors.
    pub fn parse(text: &str, path: &Path) -> Result<Self, ProfileError> {
        let options = serde_saphyr::options! { strict_booleans: true, with_snippet: false };
        serde_saphyr::from_str_with_options(text, options).map_err(|error| ProfileError::text(&error, path, text))
    }

    /// Returns the file's text, which [`Profile::parse`] reads back unchanged.
    pub fn to_yaml(&self) -> String {
        let Self { version, name, measured, harness, device, memory, driver, cuda, contended, figures } = self;
        let mut yaml =
            "# A device profile, measured by `harness calibrate`: see the README.md of this project's scenarios/devices.\n".to_owned();
        let mut line = |key: &str, value: String| {
            // Writing to a string cannot fail.
            let _ = writeln!(yaml, "{key}: {value}");
        };
        line("version", version.to_string());
        line("name", quoted(&name.to_string()));
        line("measured", quoted(&measured.to_string()));
        line("harness", quoted(harness));
        line("device", quoted(device));
        line("memory", memory.0.to_string());
        driver.iter().for_each(|driver| line("driver", quoted(driver)));
        cuda.iter().for_each(|cuda| line("cuda", quoted(cuda)));
        line("contended", format!("[{}]", contended.iter().map(|reason| quoted(reason)).collect::<Vec<_>>().join(", ")));
        yaml.push_str("figures:\n");
        for (name, figure) in figures.rows() {
            let _ = writeln!(yaml, "  {name}: {figure}");
        }
        yaml
    }

    /// Returns the name in reports and records: with the date, and eight digits that identify its figures.
    pub fn title(&self) -> String {
        let rows = self.figures.rows().into_iter().map(|(name, figure)| format!("{name}: {figure}\n")).collect::<String>();
        format!("{} measured {} ({:08x})", self.name, self.measured, fnv1a(rows.as_bytes()) >> 32)
    }

    /// Returns the cost model of this profile. Costs that were not measured take the published values and say so.
    pub fn cost_model(&self) -> CostModel {
        let Figures { context_overhead, malloc, malloc_per_mib, free, free_per_mib, map_page, unmap_page, pool_call, .. } = &self.figures;
        let Figures { submit, stream_create, event_create, event_record, event_query, synchronize, transfer_per_gib, .. } = &self.figures;
        let published = CostModel::PUBLISHED;
        CostModel {
            name: Cow::Owned(self.title()),
            context_overhead: Figure { value: Bytes(context_overhead.value), source: self.source(context_overhead.fit_error) },
            malloc: self.time(malloc),
            malloc_per_mib: self.time(malloc_per_mib),
            free: self.time(free),
            free_per_mib: self.time(free_per_mib),
            map_page: map_page.as_ref().map_or(published.map_page, |figure| self.time(figure)),
            unmap_page: unmap_page.as_ref().map_or(published.unmap_page, |figure| self.time(figure)),
            pool_call: pool_call.as_ref().map_or(published.pool_call, |figure| self.time(figure)),
            submit: self.time(submit),
            stream_create: self.time(stream_create),
            event_create: self.time(event_create),
            event_record: self.time(event_record),
            event_query: self.time(event_query),
            synchronize: self.time(synchronize),
            transfer_per_gib: self.time(transfer_per_gib),
            // Calibration does not measure the host.
            pinned_alloc_per_mib: published.pinned_alloc_per_mib,
            pageable_alloc_per_mib: published.pageable_alloc_per_mib,
            pinned_copy_per_gib: published.pinned_copy_per_gib,
            pageable_copy_per_gib: published.pageable_copy_per_gib,
        }
    }

    /// Configures a simulated device with this GPU's memory and costs.
    pub fn sim_config(&self) -> SimConfig {
        let cost = self.cost_model();
        SimConfig { total: self.memory, context_overhead: cost.context_overhead.value, cost, ..SimConfig::default() }
    }

    fn time<U: UnitText>(&self, figure: &Measured<U>) -> Figure<Nanos> {
        Figure { value: Nanos(figure.value), source: self.source(figure.fit_error) }
    }

    /// For example `measured on NVIDIA H200, driver 580.65.06, 2026-11-20, fit error 3 %`.
    fn source(&self, fit_error: FitError) -> Cow<'static, str> {
        let driver = self.driver.as_ref().map(|driver| format!(", driver {driver}")).unwrap_or_default();
        Cow::Owned(format!("measured on {}{driver}, {}, fit error {}", self.device, self.measured, fit_error.median))
    }
}

impl Figures {
    /// Returns each measured figure with its field name, as written in the file.
    fn rows(&self) -> Vec<(&'static str, &dyn fmt::Display)> {
        let Self { context_overhead, malloc, malloc_per_mib, free, free_per_mib, map_page, unmap_page, pool_call, .. } = self;
        let Self { submit, stream_create, event_create, event_record, event_query, synchronize, transfer_per_gib, .. } = self;
        fn always<U: UnitText>(figure: &Measured<U>) -> Option<&dyn fmt::Display> {
            Some(figure)
        }
        fn maybe<U: UnitText>(figure: &Option<Measured<U>>) -> Option<&dyn fmt::Display> {
            figure.as_ref().and_then(always)
        }
        let rows: [(&'static str, Option<&dyn fmt::Display>); 15] = [
            ("context_overhead", always(context_overhead)),
            ("malloc", always(malloc)),
            ("malloc_per_mib", always(malloc_per_mib)),
            ("free", always(free)),
            ("free_per_mib", always(free_per_mib)),
            ("map_page", maybe(map_page)),
            ("unmap_page", maybe(unmap_page)),
            ("pool_call", maybe(pool_call)),
            ("submit", always(submit)),
            ("stream_create", always(stream_create)),
            ("event_create", always(event_create)),
            ("event_record", always(event_record)),
            ("event_query", always(event_query)),
            ("synchronize", always(synchronize)),
            ("transfer_per_gib", always(transfer_per_gib)),
        ];
        rows.into_iter().filter_map(|(name, figure)| Some((name, figure?))).collect()
    }
}

/// Writes a double-quoted scalar of YAML 1.2 (<https://yaml.org/spec/1.2.2/#57-escaped-characters>), with unprintable characters
/// escaped.
fn quoted(text: &str) -> String {
    let escaped = text.chars().map(|character| match character {
        '"' | '\\' => format!("\\{character}"),
        ' '..='~' => character.to_string(),
        printable if printable.is_alphanumeric() => printable.to_string(),
        other => format!("\\U{:08X}", u32::from(other)),
    });
    format!("\"{}\"", escaped.collect::<String>())
}

#[cfg(test)]
mod tests;
