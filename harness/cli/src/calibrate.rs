use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::{ops::ControlFlow, sync::atomic::Ordering, time::SystemTime};

use clap::Args;
use harness_allocator::device::{Device, DeviceError, TestDevice};
use harness_base::{date::Date, files};
use harness_bench::machine::Monitor;

use harness_devices::calibrate::{self, CalibrateError};
use harness_devices::profile::{self, Figures, Profile, ProfileName};
use harness_devices::{DeviceChoice, DeviceSource};
use harness_gpu_settings::workspaces::CudnnWorkspace;

use super::error::{CliError, Failures};
use super::exit::{self, Exit};
use super::{arguments, device, interrupt, probe, terminal};

const EXAMPLES: &str = "Examples:
  harness calibrate
  harness calibrate --device cuda:1 --name h200-node7 --output scenarios/devices/h200-node7.yaml
  harness run scenarios --device sim --device-profile scenarios/devices/h200-node7.yaml
  harness exec --gpu h200-141 --unmeasured convolutions.tsv -- python train.py  # lists them
  harness calibrate --workspaces convolutions.tsv --output measured.tsv         # measures them
  harness exec --gpu h200-141 --cudnn-workspace measured.tsv -- python train.py";

const SCRIPT: &str = include_str!("calibrate/workspaces.py");

const NEEDS_GPU: &str = "calibration needs a GPU; `harness doctor` lists the GPUs";

/// Measure the cost of calls and work on a GPU, and write a dated device profile for the simulated
/// device.
///
/// The command uses up to a quarter of the GPU's free memory for some seconds. It writes nothing if
/// it is interrupted.
#[derive(Args)]
#[command(after_help = format!("{EXAMPLES}\n\n{}", exit::explained()))]
pub(super) struct Calibrate {
    /// The GPU: `cuda` (the first one) or `cuda:N` [default: the variable HARNESS_DEVICE, else
    /// `cuda`].
    #[arg(long, value_name = "DEVICE")]
    device: Option<DeviceChoice>,
    /// The file to write or replace [default: a file in scenarios/devices with the profile's name].
    #[arg(long, short, value_name = "FILE", value_parser = arguments::output())]
    output: Option<PathBuf>,
    /// Measure cuDNN's workspaces of the convolutions in this table, which `harness exec
    /// --unmeasured` wrote, instead of costs. It needs a Python with torch on the GPU machine, and
    /// writes `measured.tsv` or the file of `--output` for `harness exec --cudnn-workspace`.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["name", "rounds"])]
    workspaces: Option<PathBuf>,
    /// With `--workspaces`: the Python with torch.
    #[arg(
        long,
        value_name = "PATH",
        default_value = "python3",
        requires = "workspaces"
    )]
    python: PathBuf,
    /// The profile's name in reports [default: the GPU's name, as in `nvidia-h200`].
    #[arg(long, value_name = "NAME")]
    name: Option<ProfileName>,
    /// The number of measurements.
    #[arg(
        long,
        value_name = "N",
        default_value_t = calibrate::ROUNDS,
        value_parser = clap::value_parser!(u32).range(3..=10_000),
    )]
    rounds: u32,
    /// Print only errors and warnings, and show no progress.
    #[arg(long, short)]
    quiet: bool,
}

impl Calibrate {
    pub(super) fn run(self) -> Result<Exit, Failures> {
        let ordinal = self.ordinal()?;
        if let Some(table) = &self.workspaces {
            return Ok(self.measure_workspaces(table, ordinal)?);
        }
        let opened = DeviceSource::new(DeviceChoice::Cuda(ordinal), &probe::probe()?, false)
            .and_then(|source| source.open());
        let mut device = opened.map_err(|error| CliError::device(&error, NEEDS_GPU))?;
        let info = device.info().clone();
        let monitor = Monitor::start(&mut *device);
        let Some(figures) = self.measure(&mut *device)? else {
            return Ok(Exit::Interrupted);
        };
        let contended = monitor.finish().contended;
        let name = self
            .name
            .unwrap_or_else(|| ProfileName::of_device(&info.name));
        let output = self
            .output
            .unwrap_or_else(|| Path::new(profile::FOLDER).join(format!("{name}.yaml")));
        for reason in &contended {
            terminal::message(format_args!("warning: the figures may be wrong: {reason}"));
        }
        let profile = Profile::new(name, Date::of(SystemTime::now()), &info, contended, figures);
        terminal::save(&output, profile.to_yaml())?;
        if !self.quiet {
            terminal::print(&format!(
                "{}\nprofile: {}\n",
                table(&profile),
                output.display()
            ))?;
        }
        Ok(Exit::Passed)
    }

    fn ordinal(&self) -> Result<u32, CliError> {
        match device::choice(self.device, DeviceChoice::Cuda(0))? {
            DeviceChoice::Simulated => {
                let message = "the simulated device cannot be measured, because its costs come \
                     from a cost model";
                Err(CliError::input(
                    message,
                    "name a GPU, as in `--device cuda:0`; `harness doctor` lists the GPUs",
                ))
            }
            // If there is no GPU, the error for this one says why.
            DeviceChoice::Auto => Ok(0),
            DeviceChoice::Cuda(ordinal) => Ok(ordinal),
        }
    }

    fn measure_workspaces(&self, table: &Path, ordinal: u32) -> Result<Exit, CliError> {
        let read = |_: &Path| files::read_to_string(table);
        CudnnWorkspace::parse(&table.to_string_lossy(), read).map_err(|error| {
            CliError::input(
                error.to_string(),
                "`harness exec --unmeasured FILE` writes such a table",
            )
        })?;
        probe::probe()?
            .require(ordinal)
            .map_err(|error| CliError::device(&error, NEEDS_GPU))?;
        let mut command = Command::new(&self.python);
        command
            .arg("-c")
            .arg(SCRIPT)
            .arg(table)
            .arg(ordinal.to_string())
            .stderr(Stdio::inherit());
        let failed = |why: String| {
            CliError::input(
                why,
                "name a Python with torch for CUDA, as in `--python venv/bin/python`",
            )
        };
        let measured = command.output().map_err(|error| {
            failed(format!(
                "{} cannot be started: {error}",
                self.python.display()
            ))
        })?;
        if !measured.status.success() {
            return Err(failed(format!(
                "the measurement ended with {}",
                measured.status
            )));
        }
        let output = self
            .output
            .clone()
            .unwrap_or_else(|| PathBuf::from("measured.tsv"));
        terminal::save(&output, measured.stdout)?;
        if !self.quiet {
            terminal::print(&format!("workspaces: {}\n", output.display()))?;
        }
        Ok(Exit::Passed)
    }

    fn measure(&self, device: &mut dyn TestDevice) -> Result<Option<Figures>, CliError> {
        let bar = terminal::progress(!self.quiet, "{bar:30} {pos}/{len} {wide_msg}", Some(0))
            .with_message("rounds");
        let interrupt = interrupt::watch_with(&bar, "round")?;
        let measured = calibrate::calibrate(device, self.rounds, |done, all| {
            bar.set_length(all.into());
            bar.set_position(done.into());
            if interrupt.load(Ordering::Relaxed) {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        });
        bar.finish_and_clear();
        match measured {
            Ok(figures) => Ok(Some(figures)),
            Err(CalibrateError::Interrupted) => Ok(None),
            Err(CalibrateError::Device(error)) => Err(error.into()),
            Err(error @ CalibrateError::TooSmall { .. }) => {
                let (what, why) = (device.info().name.clone(), error.to_string());
                Err(DeviceError::Unavailable { what, why }.into())
            }
        }
    }
}

fn table(profile: &Profile) -> String {
    let figures = profile.cost_model().figures();
    let width = figures
        .iter()
        .map(|figure| figure.name.len())
        .max()
        .unwrap_or(0);
    let values = figures
        .iter()
        .map(|figure| figure.value.len())
        .max()
        .unwrap_or(0);
    let rows = figures.iter().map(|figure| {
        format!(
            "{:<width$}  {:>values$}  {}",
            figure.name, figure.value, figure.source
        )
    });
    rows.collect::<Vec<_>>().join("\n")
}
