//! Device profiles: the measured costs of a real GPU in a YAML file, which the simulated device can
//! use.
//!
//! [`Profile::load`] reads a file, [`Profile::to_yaml`] writes one, and [`Profile::sim_config`]
//! configures a simulated device. The field types admit only valid values, so a profile needs no
//! further checks.

mod figure;
pub(crate) mod header;

use std::{borrow::Cow, fmt::Write as _, path::Path};

use harness_allocator::device::DeviceInfo;
use harness_allocator::device::sim::{CostModel, SimConfig, Sourced};
use harness_allocator::hash::fnv1a;
use harness_allocator::units::{Bytes, Nanos};
use harness_base::date::Date;
use harness_language::error::FileError;
use harness_language::yaml::{self, Language};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

pub use self::figure::{
    ByteCount, FitError, MeasuredFigure, Nanoseconds, NanosecondsPerGib, NanosecondsPerMib, Share,
    Spread, UnitText,
};
pub use self::header::{PROFILE_VERSION, ProfileName, Version};

/// The folder of profiles, relative to the root of the project.
pub const FOLDER: &str = "scenarios/devices";

const LANGUAGE: Language = Language {
    noun: "device profile",
    example: "scenarios/devices/my-gpu.yaml",
    shape: "`harness calibrate` writes device profiles",
    required: &["version", "name", "device", "memory"],
    required_by: |_| Vec::new(),
    shorter: "a file that `harness calibrate` wrote",
    own: &["figures", "costs"],
    foreign: &["steps"],
    other: ("a scenario", "harness run"),
    advice: "correct the file at this position, or measure a new profile with `harness calibrate`",
};

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    pub version: Version,
    pub name: ProfileName,
    pub measured: Date,
    pub harness: String,
    pub device: String,
    pub memory: Bytes,
    /// Version of the kernel driver, if known.
    pub driver: Option<String>,
    /// CUDA version that the driver supports, if known.
    pub cuda: Option<String>,
    /// Reasons to doubt the figures: other processes, throttling, a busy processor. Empty if none
    /// were observed.
    pub contended: Vec<String>,
    pub figures: Figures,
}

/// All measured figures of a cost model. `None` if the device lacks the calls.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Figures {
    pub context_overhead: MeasuredFigure<ByteCount>,
    pub malloc: MeasuredFigure<Nanoseconds>,
    pub malloc_per_mib: MeasuredFigure<NanosecondsPerMib>,
    pub free: MeasuredFigure<Nanoseconds>,
    pub free_per_mib: MeasuredFigure<NanosecondsPerMib>,
    pub map_page: Option<MeasuredFigure<Nanoseconds>>,
    pub unmap_page: Option<MeasuredFigure<Nanoseconds>>,
    pub pool_call: Option<MeasuredFigure<Nanoseconds>>,
    pub submit: MeasuredFigure<Nanoseconds>,
    pub stream_create: MeasuredFigure<Nanoseconds>,
    pub event_create: MeasuredFigure<Nanoseconds>,
    pub event_record: MeasuredFigure<Nanoseconds>,
    pub event_query: MeasuredFigure<Nanoseconds>,
    pub synchronize: MeasuredFigure<Nanoseconds>,
    pub transfer_per_gib: MeasuredFigure<NanosecondsPerGib>,
}

/// Reads a text file. If it cannot be read, the advice lists the profiles in [`FOLDER`].
pub(crate) fn read(path: &Path) -> Result<String, FileError> {
    yaml::read(path, &LANGUAGE).map_err(|error| {
        if error.position().is_none() {
            error.with_advice(known())
        } else {
            error
        }
    })
}

/// Names the profiles in [`FOLDER`]; none if the folder cannot be read.
fn known() -> String {
    let entries = std::fs::read_dir(FOLDER)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path());
    let profiles = entries.filter(|path| path.extension().is_some_and(|ending| ending == "yaml"));
    let mut names: Vec<String> = profiles
        .map(|path| format!("`{}`", path.display()))
        .collect();
    names.sort();
    match names.is_empty() {
        true => {
            format!("name a file that `harness calibrate` wrote on a GPU; {FOLDER} contains none")
        }
        false => format!(
            "name a file that `harness calibrate` wrote; {FOLDER} contains: {}",
            names.join(", ")
        ),
    }
}

/// Parses a measured profile or a user's own GPU; `path` appears in errors.
pub fn parse<T: DeserializeOwned>(text: &str, path: &Path) -> Result<T, FileError> {
    yaml::parse(text, path, &LANGUAGE).map_err(|problem| FileError::text(problem, path, text))
}

impl Profile {
    /// Creates a profile from figures measured at this date.
    pub fn new(
        name: ProfileName,
        measured: Date,
        device: &DeviceInfo,
        contended: Vec<String>,
        figures: Figures,
    ) -> Self {
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

    pub fn load(path: &Path) -> Result<Self, FileError> {
        parse(&read(path)?, path)
    }

    /// Returns the file's text, which [`Profile::load`] reads back unchanged.
    pub fn to_yaml(&self) -> String {
        let Self {
            version: _,
            name,
            measured,
            harness,
            device,
            memory,
            driver,
            cuda,
            contended,
            figures,
        } = self;
        let mut yaml =
            "# A device profile, measured by `harness calibrate`: see the README.md of this \
             project's scenarios/devices.\n"
                .to_owned();
        let mut line = |key: &str, value: String| {
            // Writing to a string cannot fail.
            let _ = writeln!(yaml, "{key}: {value}");
        };
        line("version", PROFILE_VERSION.to_string());
        line("name", quoted(&name.to_string()));
        line("measured", quoted(&measured.to_string()));
        line("harness", quoted(harness));
        line("device", quoted(device));
        line("memory", memory.0.to_string());
        driver
            .iter()
            .for_each(|driver| line("driver", quoted(driver)));
        cuda.iter().for_each(|cuda| line("cuda", quoted(cuda)));
        line(
            "contended",
            format!(
                "[{}]",
                contended
                    .iter()
                    .map(|reason| quoted(reason))
                    .collect::<Vec<_>>()
                    .join(", ")
            ),
        );
        yaml.push_str("figures:\n");
        for (name, figure) in figures.rows() {
            let _ = writeln!(yaml, "  {name}: {figure}");
        }
        yaml
    }

    /// Returns the name in reports and records: with the date, and eight digits that identify its
    /// figures.
    pub fn title(&self) -> String {
        let rows = self
            .figures
            .rows()
            .map(|(name, figure)| format!("{name}: {figure}\n"))
            .collect::<String>();
        format!(
            "{} measured {} ({:08x})",
            self.name,
            self.measured,
            fnv1a(rows.as_bytes()) >> 32
        )
    }

    /// Returns the cost model of this profile. Costs that were not measured take the published
    /// values and say so.
    pub fn cost_model(&self) -> CostModel {
        let context = &self.figures.context_overhead;
        let published = CostModel::PUBLISHED;
        CostModel {
            name: Cow::Owned(self.title()),
            context_overhead: Sourced {
                value: Bytes(context.value),
                source: self.source(context.fit_error),
            },
            malloc: self.time(&self.figures.malloc),
            malloc_per_mib: self.time(&self.figures.malloc_per_mib),
            free: self.time(&self.figures.free),
            free_per_mib: self.time(&self.figures.free_per_mib),
            map_page: self.time_or(&self.figures.map_page, published.map_page),
            unmap_page: self.time_or(&self.figures.unmap_page, published.unmap_page),
            pool_call: self.time_or(&self.figures.pool_call, published.pool_call),
            submit: self.time(&self.figures.submit),
            stream_create: self.time(&self.figures.stream_create),
            event_create: self.time(&self.figures.event_create),
            event_record: self.time(&self.figures.event_record),
            event_query: self.time(&self.figures.event_query),
            synchronize: self.time(&self.figures.synchronize),
            transfer_per_gib: self.time(&self.figures.transfer_per_gib),
            // Calibration does not measure the host.
            ..published
        }
    }

    /// Configures a simulated device with this GPU's memory and costs.
    pub fn sim_config(&self) -> SimConfig {
        let cost = self.cost_model();
        SimConfig {
            total: self.memory,
            context_overhead: cost.context_overhead.value,
            cost,
            ..SimConfig::default()
        }
    }

    fn time_or(
        &self,
        figure: &Option<MeasuredFigure<Nanoseconds>>,
        published: Sourced<Nanos>,
    ) -> Sourced<Nanos> {
        figure
            .as_ref()
            .map_or(published, |figure| self.time(figure))
    }

    fn time<U: UnitText>(&self, figure: &MeasuredFigure<U>) -> Sourced<Nanos> {
        Sourced {
            value: Nanos(figure.value),
            source: self.source(figure.fit_error),
        }
    }

    /// For example `measured on NVIDIA H200, driver 580.65.06, 2026-11-20, fit error 3 %`.
    fn source(&self, fit_error: FitError) -> Cow<'static, str> {
        let driver = self
            .driver
            .as_ref()
            .map(|driver| format!(", driver {driver}"))
            .unwrap_or_default();
        Cow::Owned(format!(
            "measured on {}{driver}, {}, fit error {}",
            self.device, self.measured, fit_error.median
        ))
    }
}

impl Figures {
    /// Returns each measured figure with its field name, as written in the file.
    fn rows(&self) -> impl Iterator<Item = (String, String)> {
        let figures = match serde_json::to_value(self) {
            Ok(serde_json::Value::Object(figures)) => figures,
            other => unreachable!("figures are a map of texts: {other:?}"),
        };
        figures
            .into_iter()
            .filter_map(|(name, figure)| Some((name, figure.as_str()?.to_owned())))
    }
}

/// Writes a double-quoted scalar of YAML 1.2
/// (<https://yaml.org/spec/1.2.2/#57-escaped-characters>), with unprintable characters escaped.
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
