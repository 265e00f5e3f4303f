//! The program `nvidia-smi` for programs on a simulated GPU: the outputs that programs parse, from
//! NVML.

use std::{fmt::Write as _, mem};

use nvml_wrapper::enum_wrappers::device::TemperatureSensor;
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::struct_wrappers::device::MemoryInfo;
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
     --query-compute-apps=FIELDS with --format=csv[,noheader][,nounits], and -i N[,N]\n";
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
    /// The numbers, UUIDs or addresses of the only GPUs; all without any.
    only: Vec<String>,
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
                "-i" | "--id" => list().map(|only| {
                    asked.only = only;
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
        let unknown = match &asked.what {
            What::Gpus(fields) => unknown_field(&GPU_FIELDS, fields),
            What::Apps(fields) => unknown_field(&APP_FIELDS, fields),
            What::Table | What::List => None,
        };
        match unknown {
            Some(field) => Err(format!(
                "Field \"{field}\" is not a valid field to query.\n"
            )),
            None => Ok(asked),
        }
    }

    fn has(&self, format: &str) -> bool {
        self.format.iter().any(|word| word == format)
    }

    /// Returns the text, or what is wrong with the arguments.
    fn answer(&self, nvml: &'static Nvml) -> Result<Result<String, String>, NvmlError> {
        let mut devices = Vec::new();
        let mut missing: Vec<&String> = self.only.iter().collect();
        for index in 0..nvml.device_count()? {
            let device = nvml.device_by_index(index)?;
            let names = [index.to_string(), device.uuid()?, device.pci_info()?.bus_id];
            if self.only.is_empty() || self.only.iter().any(|only| names.contains(only)) {
                devices.push((index, device));
            }
            missing.retain(|only| !names.contains(only));
        }
        if devices.is_empty() || !missing.is_empty() {
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
            What::Gpus(fields) => {
                let row = |(index, device): &(u32, Device<'_>)| {
                    fields
                        .iter()
                        .map(|field| of_gpu(nvml, *index, device, field))
                        .collect()
                };
                let rows: Result<Vec<_>, _> = devices.iter().map(row).collect();
                Ok(Ok(self.csv(&GPU_FIELDS, fields, &rows?)))
            }
            What::Apps(fields) => {
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
                        rows.push(row.collect::<Result<Vec<_>, _>>()?);
                    }
                }
                Ok(Ok(self.csv(&APP_FIELDS, fields, &rows)))
            }
        }
    }

    /// Prints rows, each with a value per field, after a line with the fields and their units.
    fn csv(&self, known: &[Field], fields: &[String], rows: &[Vec<Option<String>>]) -> String {
        let unit = |field: &String| {
            known
                .iter()
                .find(|known| known.0 == field)
                .map_or("", |it| it.1)
        };
        let mut text = String::new();
        if !self.has("noheader") {
            let head = fields.iter().map(|field| match unit(field) {
                "" => field.clone(),
                unit => format!("{field} [{unit}]"),
            });
            let _ = writeln!(text, "{}", head.collect::<Vec<_>>().join(", "));
        }
        for row in rows {
            let cells = fields
                .iter()
                .zip(row)
                .map(|(field, value)| match (value, unit(field)) {
                    (None, _) => NOT_AVAILABLE.to_owned(),
                    (Some(value), "") => value.clone(),
                    (Some(value), _) if self.has("nounits") => value.clone(),
                    (Some(value), unit) => format!("{value} {unit}"),
                });
            let _ = writeln!(text, "{}", cells.collect::<Vec<_>>().join(", "));
        }
        text
    }
}

/// A field of a query, with the unit of its values.
type Field = (&'static str, &'static str);

const GPU_FIELDS: [Field; 23] = [
    ("index", ""),
    ("count", ""),
    ("name", ""),
    ("gpu_name", ""),
    ("uuid", ""),
    ("gpu_uuid", ""),
    ("driver_version", ""),
    ("pci.bus_id", ""),
    ("gpu_bus_id", ""),
    ("compute_cap", ""),
    ("memory.total", "MiB"),
    ("memory.used", "MiB"),
    ("memory.free", "MiB"),
    ("utilization.gpu", "%"),
    ("utilization.memory", "%"),
    ("temperature.gpu", ""),
    ("power.draw", "W"),
    ("compute_mode", ""),
    ("mig.mode.current", ""),
    ("pstate", ""),
    ("serial", ""),
    ("persistence_mode", ""),
    ("fan.speed", "%"),
];
const APP_FIELDS: [Field; 8] = [
    ("pid", ""),
    ("process_name", ""),
    ("name", ""),
    ("used_memory", "MiB"),
    ("used_gpu_memory", "MiB"),
    ("gpu_uuid", ""),
    ("gpu_name", ""),
    ("gpu_bus_id", ""),
];

/// Returns the first field that a query does not know.
fn unknown_field<'a>(known: &[Field], fields: &'a [String]) -> Option<&'a String> {
    let is_known = |field: &&String| known.iter().any(|known| known.0 == field.as_str());
    fields.iter().find(|field| !is_known(field))
}

/// The value of a field of [`GPU_FIELDS`]; `None` if it is not available.
fn of_gpu(
    nvml: &Nvml,
    index: u32,
    device: &Device<'_>,
    field: &str,
) -> Result<Option<String>, NvmlError> {
    let memory = || memory_of(device);
    let rates = || device.utilization_rates().ok();
    Ok(Some(match field {
        "index" => index.to_string(),
        "count" => nvml.device_count()?.to_string(),
        "name" | "gpu_name" => device.name()?,
        "uuid" | "gpu_uuid" => device.uuid()?,
        "driver_version" => nvml.sys_driver_version()?,
        "pci.bus_id" | "gpu_bus_id" => device.pci_info()?.bus_id,
        "compute_cap" => capability(device)?,
        "memory.total" => return Ok(memory()?.map(|it| (it.total / MIB).to_string())),
        "memory.used" => return Ok(memory()?.map(|it| it.used.div_ceil(MIB).to_string())),
        "memory.free" => return Ok(memory()?.map(|it| (it.free / MIB).to_string())),
        "utilization.gpu" => return Ok(rates().map(|rates| rates.gpu.to_string())),
        "utilization.memory" => return Ok(rates().map(|rates| rates.memory.to_string())),
        "temperature.gpu" => return Ok(temperature(device).map(|celsius| celsius.to_string())),
        "power.draw" => return Ok(power(device)),
        "compute_mode" => "Default".to_owned(),
        "mig.mode.current" => "Disabled".to_owned(),
        _ => return Ok(None),
    }))
}

/// The value of a field of [`APP_FIELDS`]; `None` if it is not available.
fn of_app(
    device: &Device<'_>,
    pid: u32,
    used: Option<u64>,
    field: &str,
) -> Result<Option<String>, NvmlError> {
    Ok(match field {
        "pid" => Some(pid.to_string()),
        "process_name" | "name" => std::fs::read_link(format!("/proc/{pid}/exe"))
            .ok()
            .map(|name| name.display().to_string()),
        "used_memory" | "used_gpu_memory" => used.map(|bytes| bytes.div_ceil(MIB).to_string()),
        "gpu_uuid" => Some(device.uuid()?),
        "gpu_name" => Some(device.name()?),
        "gpu_bus_id" => Some(device.pci_info()?.bus_id),
        _ => None,
    })
}

fn capability(device: &Device<'_>) -> Result<String, NvmlError> {
    let capability = device.cuda_compute_capability()?;
    Ok(format!("{}.{}", capability.major, capability.minor))
}

/// The memory of a GPU; `None` if it shares the host's memory.
fn memory_of(device: &Device<'_>) -> Result<Option<MemoryInfo>, NvmlError> {
    match device.memory_info() {
        Err(NvmlError::NotSupported) => Ok(None),
        found => found.map(Some),
    }
}

/// The temperature in degrees Celsius. A simulated GPU reports 0 for what it does not know.
fn temperature(device: &Device<'_>) -> Option<u32> {
    let celsius = device.temperature(TemperatureSensor::Gpu).ok();
    celsius.filter(|celsius| *celsius > 0)
}

/// The power in watts, likewise.
fn power(device: &Device<'_>) -> Option<String> {
    let milliwatts = device.power_usage().ok().filter(|power| *power > 0)?;
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
        let memory = memory_of(device)?.map_or_else(
            || format!("{:^23}", "Not Supported"),
            |memory| {
                let (used, total) = (memory.used.div_ceil(MIB), memory.total / MIB);
                format!("{used:>7}MiB / {total:>7}MiB")
            },
        );
        let or_unknown = |value: Option<String>, unit| {
            value.map_or_else(|| "N/A".to_owned(), |value| value + unit)
        };
        let rates = device.utilization_rates().ok();
        let rates = or_unknown(rates.map(|rates| rates.gpu.to_string()), "%");
        let degrees = or_unknown(temperature(device).map(|celsius| celsius.to_string()), "C");
        let watts = or_unknown(power(device), "W");
        text += &row(format!(
            "{index:>3}  {:<40} {}",
            device.name()?,
            device.pci_info()?.bus_id
        ));
        text += &row(format!(
            "N/A  {degrees:>4}  {watts:>8}  {memory}  {rates:>4}"
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
        let asked = parse("--query-gpu=name,memory.total --format csv,noheader -i 0,1");
        let names = ["name", "memory.total"].map(str::to_owned);
        let expected = Asked {
            what: What::Gpus(names.into()),
            format: ["csv", "noheader"].map(str::to_owned).into(),
            only: ["0", "1"].map(str::to_owned).into(),
        };
        assert_eq!(asked, Ok(expected));
        assert_eq!(parse("-L").map(|asked| asked.what), Ok(What::List));
    }

    #[test]
    fn a_query_without_rows_has_a_header_and_an_unknown_field_is_refused() {
        let asked = parse("--query-compute-apps=pid,used_memory --format=csv").unwrap_or_default();
        let fields = ["pid", "used_memory"].map(str::to_owned);
        let head = "pid, used_memory [MiB]\n";
        assert_eq!(asked.csv(&APP_FIELDS, &fields, &[]), head);
        let row = [Some("7".to_owned()), None].into();
        assert_eq!(
            asked.csv(&APP_FIELDS, &fields, &[row]),
            format!("{head}7, [N/A]\n")
        );
        for query in ["compute-apps=pid", "gpu=name"] {
            assert_eq!(
                parse(&format!("--query-{query},nosuch --format=csv")),
                Err("Field \"nosuch\" is not a valid field to query.\n".to_owned())
            );
        }
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
