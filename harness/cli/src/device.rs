use std::path::{Path, PathBuf};

use clap::Args;
use harness_allocator::allocator::caching::{TorchVersion, TorchVersionError};
use harness_devices::{DeviceChoice, DeviceSource, ParseDeviceError, shipped};
use harness_gpu_settings::gpus::Gpu;
use harness_scenario::steps::exec::similar_gpus;

use super::{error::CliError, probe::probe, terminal};

const VARIABLE: &str = "HARNESS_DEVICE";

/// The device of the option, else of the variable `HARNESS_DEVICE`, else `otherwise`. An empty
/// variable counts as unset.
pub(crate) fn choice(
    option: Option<DeviceChoice>,
    otherwise: DeviceChoice,
) -> Result<DeviceChoice, CliError> {
    if let Some(choice) = option {
        return Ok(choice);
    }
    match std::env::var_os(VARIABLE) {
        Some(value) if !value.is_empty() => {
            value
                .to_string_lossy()
                .parse()
                .map_err(|error: ParseDeviceError| {
                    let help = format!(
                        "correct the variable {VARIABLE} or unset it, or give `--device`, \
                 which takes precedence"
                    );
                    CliError::input(format!("{VARIABLE}: {error}"), help)
                })
        }
        _ => Ok(otherwise),
    }
}

/// The version of PyTorch in an option. Says so if it has no rules of its own here.
pub(crate) fn torch_version(text: &str) -> Result<TorchVersion, TorchVersionError> {
    let version: TorchVersion = text.parse()?;
    if !version.covers(text) {
        terminal::message(format!(
            "the rules of PyTorch {text} are not known; those of PyTorch {version} apply"
        ));
    }
    Ok(version)
}

// The device of `run` and `bench`. A doc comment here would replace the descriptions of those
// commands.
#[derive(Args)]
pub(crate) struct DeviceOptions {
    /// The device: `auto` (the first GPU, or the simulated device if there is no GPU), `sim`,
    /// `cuda` or `cuda:N` [default: the variable HARNESS_DEVICE, else `auto`].
    #[arg(long, value_name = "DEVICE")]
    device: Option<DeviceChoice>,
    /// Simulate this GPU: a file that `harness calibrate` wrote, or a GPU as in `harness exec
    /// --gpu`, which has published costs.
    #[arg(long, value_name = "PROFILE")]
    device_profile: Option<PathBuf>,
}

impl DeviceOptions {
    pub(crate) fn choice(&self) -> Result<DeviceChoice, CliError> {
        choice(self.device, DeviceChoice::Auto)
    }

    pub(crate) const fn has_profile(&self) -> bool {
        self.device_profile.is_some()
    }

    /// The source of devices for the user's choice, on the profile if one is named. The driver is
    /// called only if a GPU may be used.
    pub(crate) fn source(
        &self,
        choice: DeviceChoice,
        allow_full_device: bool,
    ) -> Result<DeviceSource, CliError> {
        let source = match choice {
            DeviceChoice::Simulated => DeviceSource::simulated(),
            DeviceChoice::Auto | DeviceChoice::Cuda(_) => {
                DeviceSource::new(choice, &probe()?, allow_full_device)?
            }
        };
        match &self.device_profile {
            None => Ok(source),
            Some(path) if source.simulated_because().is_some() => Ok(source.with_profile(path)?),
            Some(_) => {
                let message = format!(
                    "a device profile is for the simulated device, but the device is {source}"
                );
                Err(CliError::input(
                    message,
                    "add `--device sim`, or leave `--device-profile` out",
                ))
            }
        }
    }
}

pub(crate) fn explain_choice(choice: DeviceChoice, source: &DeviceSource) {
    if choice == DeviceChoice::Auto && source.simulated_because().is_some() {
        terminal::message(
            "on the simulated device, because no GPU can be used: `harness doctor` says why",
        );
    }
}

/// Parses the value of `--gpu`: the name of a GPU, or a file that describes one.
pub(crate) fn gpu_or_file(text: &str) -> Result<String, String> {
    let is_file = text.contains('/')
        || Path::new(text)
            .extension()
            .is_some_and(|extension| extension == "yaml" || extension == "yml");
    if is_file {
        return Ok(text.to_owned());
    }
    Gpu::named(text)
        .map(|gpu| gpu.name.clone())
        .ok_or_else(|| format!("unknown GPU; {}", similar_gpus(text)))
}

/// Finds the GPU of a name, or reads the file.
pub(crate) fn gpu(name_or_file: &str) -> Result<&'static Gpu, CliError> {
    Gpu::named(name_or_file).map_or_else(|| Ok(shipped::load(Path::new(name_or_file))?), Ok)
}
