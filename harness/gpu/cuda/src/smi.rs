//! The program `nvidia-smi` for programs on a simulated GPU: the outputs that programs parse, from
//! NVML.

use std::{fmt::Write as _, mem};

use nvml_wrapper::enum_wrappers::device::TemperatureSensor;
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::{Device, Nvml, error::NvmlError};

use crate::nvml::functions::library;

/// What the program prints, and its exit code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Printed {
    pub text: String,
    pub code: u8,
}

/// The exit codes for arguments that are not known, and without a driver.
const UNKNOWN: u8 = 2;
const NO_DRIVER: u8 = 9;
const KNOWN: &str = "the simulated nvidia-smi knows no arguments, -L, --query-gpu=FIELDS and \
     --query-compute-apps=FIELDS with --format=csv[,noheader][,nounits], and -i N\n";
const NOT_AVAILABLE: &str = "[N/A]";
const MIB: u64 = 1 << 20;

/// Runs `nvidia-smi` with these arguments.
pub fn run(arguments: &[String]) -> Printed {
    let asked = match Asked::parse(arguments) {
        Ok(asked) => asked,
        Err(text) => {
            return Printed {
                text,
                code: UNKNOWN,
            };
        }
    };
    let found =
        library().and_then(|nvml| asked.answer(nvml).map_err(|error| format!("NVML: {error}")));
    match found {
        Ok(Ok(text)) => Printed { text, code: 0 },
        Ok(Err(text)) => Printed {
            text,
            code: UNKNOWN,
        },
        Err(error) => Printed {
            text: format!("no driver: {error}\n"),
            code: NO_DRIVER,
        },
    }
}

#[derive(Debug, Default, PartialEq, Eq)]
enum What {
    #[default]
    Table,
    List,
    Gpus(Vec<String>),
    Apps(Vec<String>),
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Asked {
    what: What,
    format: Vec<String>,
    /// The number, the UUID or the address of the only GPU.
    only: Option<String>,
}

impl Asked {
    fn parse(arguments: &[String]) -> Result<Self, String> {
        let mut asked = Self::default();
        let mut rest = arguments.iter();
        while let Some(argument) = rest.next() {
            let (name, given) = match argument.split_once('=') {
                Some((name, value)) => (name, Some(value.to_owned())),
                None => (argument.as_str(), None),
            };
            let mut value = || given.clone().or_else(|| rest.next().cloned());
            let mut list = || -> Option<Vec<String>> {
                let items = value()?;
                Some(
                    items
                        .split(',')
                        .map(|item| item.trim().to_owned())
                        .collect(),
                )
            };
            let taken = match name {
                "-L" | "--list-gpus" => Some(What::List),
                "--query-gpu" => list().map(What::Gpus),
                "--query-compute-apps" => list().map(What::Apps),
                "--format" => list().map(|format| {
                    asked.format = format;
                    mem::take(&mut asked.what)
                }),
                "-i" | "--id" => value().map(|only| {
                    asked.only = Some(only);
                    mem::take(&mut asked.what)
                }),
                _ => None,
            };
            asked.what = taken.ok_or_else(|| format!("`{argument}`: {KNOWN}"))?;
        }
        let is_query = matches!(asked.what, What::Gpus(_) | What::Apps(_));
        if is_query && !asked.has("csv") {
            return Err(format!("a query needs `--format=csv`: {KNOWN}"));
        }
        Ok(asked)
    }

    fn has(&self, format: &str) -> bool {
        self.format.iter().any(|word| word == format)
    }

    /// Returns the text, or what is wrong with the arguments.
    fn answer(&self, nvml: &'static Nvml) -> Result<Result<String, String>, NvmlError> {
        let mut devices = Vec::new();
        for index in 0..nvml.device_count()? {
            let device = nvml.device_by_index(index)?;
            let names = [index.to_string(), device.uuid()?, device.pci_info()?.bus_id];
            if self.only.as_ref().is_none_or(|only| names.contains(only)) {
                devices.push((index, device));
            }
        }
        if devices.is_empty() {
            return Ok(Err("No devices were found\n".to_owned()));
        }
        match &self.what {
            What::Table => table(nvml, &devices).map(Ok),
            What::List => {
                let line = |(index, device): &(u32, Device<'_>)| -> Result<String, NvmlError> {
                    Ok(format!(
                        "GPU {index}: {} (UUID: {})\n",
                        device.name()?,
                        device.uuid()?
                    ))
                };
                devices
                    .iter()
                    .map(line)
                    .collect::<Result<String, _>>()
                    .map(Ok)
            }
            What::Gpus(fields) => self.csv(fields, || {
                let row = |(index, device): &(u32, Device<'_>)| {
                    fields
                        .iter()
                        .map(|field| of_gpu(nvml, *index, device, field))
                        .collect()
                };
                devices.iter().map(row).collect()
            }),
            What::Apps(fields) => self.csv(fields, || {
                let mut rows = Vec::new();
                for (_, device) in &devices {
                    for process in device.running_compute_processes()? {
                        let used = match process.used_gpu_memory {
                            UsedGpuMemory::Used(bytes) => Some(bytes),
                            UsedGpuMemory::Unavailable => None,
                        };
                        let row = fields
                            .iter()
                            .map(|field| of_app(device, process.pid, used, field));
                        rows.push(row.collect::<Result<_, _>>()?);
                    }
                }
                Ok(rows)
            }),
        }
    }

    /// Prints rows. A field that is not known is `None` in the first row.
    fn csv(
        &self,
        fields: &[String],
        rows: impl FnOnce() -> Result<Vec<Vec<Option<Value>>>, NvmlError>,
    ) -> Result<Result<String, String>, NvmlError> {
        let rows = rows()?;
        let mut text = String::new();
        for (number, row) in rows.into_iter().enumerate() {
            if let Some(place) = row.iter().position(Option::is_none) {
                let field = &fields[place];
                return Ok(Err(format!(
                    "Field \"{field}\" is not a valid field to query.\n"
                )));
            }
            let row: Vec<Value> = row.into_iter().flatten().collect();
            if number == 0 && !self.has("noheader") {
                let head = fields
                    .iter()
                    .zip(&row)
                    .map(|(field, value)| match value.unit {
                        "" => field.clone(),
                        unit => format!("{field} [{unit}]"),
                    });
                let _ = writeln!(text, "{}", head.collect::<Vec<_>>().join(", "));
            }
            let cells = row.iter().map(|value| match value.unit {
                "" => value.text.clone(),
                _ if self.has("nounits") || value.text == NOT_AVAILABLE => value.text.clone(),
                unit => format!("{} {unit}", value.text),
            });
            let _ = writeln!(text, "{}", cells.collect::<Vec<_>>().join(", "));
        }
        Ok(Ok(text))
    }
}

struct Value {
    text: String,
    unit: &'static str,
}

fn plain(text: impl ToString) -> Value {
    Value {
        text: text.to_string(),
        unit: "",
    }
}

fn in_unit<T: ToString>(value: Option<T>, unit: &'static str) -> Value {
    Value {
        text: value.map_or_else(|| NOT_AVAILABLE.to_owned(), |value| value.to_string()),
        unit,
    }
}

/// The value of a field of `--query-gpu`; `None` if the field is not known.
fn of_gpu(
    nvml: &Nvml,
    index: u32,
    device: &Device<'_>,
    field: &str,
) -> Result<Option<Value>, NvmlError> {
    let memory = || device.memory_info();
    Ok(Some(match field {
        "index" => plain(index),
        "count" => plain(nvml.device_count()?),
        "name" | "gpu_name" => plain(device.name()?),
        "uuid" | "gpu_uuid" => plain(device.uuid()?),
        "driver_version" => plain(nvml.sys_driver_version()?),
        "pci.bus_id" | "gpu_bus_id" => plain(device.pci_info()?.bus_id),
        "compute_cap" => plain(capability(device)?),
        "memory.total" => in_unit(Some(memory()?.total / MIB), "MiB"),
        "memory.used" => in_unit(Some(memory()?.used.div_ceil(MIB)), "MiB"),
        "memory.free" => in_unit(Some(memory()?.free / MIB), "MiB"),
        "utilization.gpu" => in_unit(device.utilization_rates().ok().map(|rates| rates.gpu), "%"),
        "utilization.memory" => in_unit(
            device.utilization_rates().ok().map(|rates| rates.memory),
            "%",
        ),
        "temperature.gpu" => plain(in_unit(temperature(device), "").text),
        "power.draw" => in_unit(power(device), "W"),
        "compute_mode" => plain("Default"),
        "mig.mode.current" => plain("Disabled"),
        "pstate" | "serial" | "persistence_mode" | "fan.speed" => plain(NOT_AVAILABLE),
        _ => return Ok(None),
    }))
}

/// The value of a field of `--query-compute-apps`.
fn of_app(
    device: &Device<'_>,
    pid: u32,
    used: Option<u64>,
    field: &str,
) -> Result<Option<Value>, NvmlError> {
    Ok(Some(match field {
        "pid" => plain(pid),
        "process_name" | "name" => {
            let name = std::fs::read_link(format!("/proc/{pid}/exe"));
            plain(name.map_or_else(
                |_| NOT_AVAILABLE.to_owned(),
                |name| name.display().to_string(),
            ))
        }
        "used_memory" | "used_gpu_memory" => in_unit(used.map(|bytes| bytes.div_ceil(MIB)), "MiB"),
        "gpu_uuid" => plain(device.uuid()?),
        "gpu_name" => plain(device.name()?),
        "gpu_bus_id" => plain(device.pci_info()?.bus_id),
        _ => return Ok(None),
    }))
}

fn capability(device: &Device<'_>) -> Result<String, NvmlError> {
    let capability = device.cuda_compute_capability()?;
    Ok(format!("{}.{}", capability.major, capability.minor))
}

fn temperature(device: &Device<'_>) -> Option<u32> {
    device.temperature(TemperatureSensor::Gpu).ok()
}

/// The power in watts.
fn power(device: &Device<'_>) -> Option<String> {
    let milliwatts = device.power_usage().ok()?;
    Some(format!(
        "{}.{:02}",
        milliwatts / 1000,
        milliwatts % 1000 / 10
    ))
}

/// The table of all GPUs. Programs look for the versions, the names and the used memory.
fn table(nvml: &Nvml, devices: &[(u32, Device<'_>)]) -> Result<String, NvmlError> {
    let driver = nvml.sys_driver_version()?;
    let cuda = nvml.sys_cuda_driver_version()?;
    let cuda = format!("{}.{}", cuda / 1000, cuda % 1000 / 10);
    let line = format!("+{}+\n", "-".repeat(89));
    let row = |text: String| format!("| {text:<87} |\n");
    let mut text = line.clone();
    text += &row(format!(
        "NVIDIA-SMI {driver:<22} Driver Version: {driver:<14} CUDA Version: {cuda}"
    ));
    text += &line;
    for (index, device) in devices {
        let memory = device.memory_info()?;
        let rates = device.utilization_rates().map_or(0, |rates| rates.gpu);
        let degrees =
            temperature(device).map_or_else(|| "N/A".to_owned(), |celsius| format!("{celsius}C"));
        let watts = power(device).unwrap_or_else(|| "N/A".to_owned());
        text += &row(format!(
            "{index:>3}  {:<40} {}",
            device.name()?,
            device.pci_info()?.bus_id
        ));
        text += &row(format!(
            "N/A  {degrees:>4}  {watts:>7}W  {:>7}MiB / {:>7}MiB  {rates:>3}%",
            memory.used.div_ceil(MIB),
            memory.total / MIB
        ));
        text += &line;
    }
    text += &row("Processes:".to_owned());
    for (index, device) in devices {
        for process in device.running_compute_processes()? {
            let used = match process.used_gpu_memory {
                UsedGpuMemory::Used(bytes) => format!("{}MiB", bytes.div_ceil(MIB)),
                UsedGpuMemory::Unavailable => "N/A".to_owned(),
            };
            text += &row(format!("{index:>3}  {:>9}  C  {used:>10}", process.pid));
        }
    }
    Ok(text + &line)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Asked, String> {
        let words: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
        Asked::parse(&words)
    }

    #[test]
    fn a_query_names_its_fields_and_its_format() {
        let asked = parse("--query-gpu=name,memory.total --format csv,noheader -i 1");
        let names = ["name", "memory.total"].map(str::to_owned);
        let expected = Asked {
            what: What::Gpus(names.into()),
            format: ["csv", "noheader"].map(str::to_owned).into(),
            only: Some("1".to_owned()),
        };
        assert_eq!(asked, Ok(expected));
        assert_eq!(parse("-L").map(|asked| asked.what), Ok(What::List));
    }

    #[test]
    fn other_arguments_are_refused_with_those_that_are_known() {
        for text in ["-q", "--query-gpu", "--query-gpu=name"] {
            let refusal = parse(text);
            assert!(
                refusal.as_ref().is_err_and(|text| text.ends_with(KNOWN)),
                "{refusal:?}"
            );
        }
    }
}
