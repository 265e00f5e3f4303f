//! Contracts: the obligations of every implementation of a trait, written once and run on all of
//! them.
//!
//! A [`Case`] is a test body that knows no implementation. A [`Row`] is an implementation of a
//! device that knows no body. Every case runs on every row with a fresh device, and must leave
//! nothing on it. A new body is a line in its module's table, a new module of bodies a line in
//! [`cases`], a new implementation a line in [`rows`].
//!
//! Some rows need their own process, for example because a driver library is loaded permanently.
//! Their cases run in a child process: this program, with the case and the row in [`CHILD`].
//! Unavailable rows are listed as ignored with the reason, because nextest would count a run-time
//! skip as passed.

mod allocator;
mod device;
mod host;
mod library;
mod mapped;
mod pooled;

use std::process::{Command, ExitCode};
use std::sync::{Arc, Mutex, PoisonError};

use harness_allocator::device::sim::{AddressOrder, SimConfig, SimDevice};
use harness_allocator::device::{Clock, DeviceError, TestDevice, limited::Limited};
use harness_allocator::units::Bytes;
use harness_cuda::CudaDevice;
use harness_cuda::machine::{self};
use harness_devices::DeviceChoice;
use harness_gpu_settings::settings::Settings;
use harness_staging::trials::{self, Skip};
use harness_staging::{Staging, strict};
use libtest_mimic::{Arguments, Failed, Trial};

/// Set for a child process: `row::case`.
const CHILD: &str = "HARNESS_CONTRACT_CHILD";

/// The memory of each row's device: small, so a test can fill it quickly.
const MEMORY: Bytes = Bytes::mib(64);

/// A device error that the body did not expect. Broken promises panic instead.
pub(crate) type Outcome = Result<(), DeviceError>;

/// A test body with all arguments except the device.
pub(crate) type Body = Box<dyn Fn(&mut dyn TestDevice) -> Outcome + Send + Sync>;

/// A body and its contract.
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) run: Body,
}

/// An implementation of a device.
struct Row {
    name: &'static str,
    /// Creates a fresh device with [`MEMORY`].
    make: fn() -> Result<Box<dyn TestDevice>, DeviceError>,
    process: Process,
    /// Why its cases cannot run here, if so.
    unavailable: Option<String>,
}

/// The process of a row's cases.
enum Process {
    /// In this process, in parallel with other cases.
    Here,
    /// Each case in its own process, one at a time on this machine.
    Child(Machine),
}

/// The result of a child process.
#[derive(Clone, Copy)]
enum Machine {
    /// What there is.
    Real,
    /// The simulated GPU as a driver, with one device that has [`MEMORY`].
    Simulated,
    /// The same with more memory than is allocated.
    RoomySimulated,
}

/// All bodies of all contracts.
fn cases() -> Vec<Case> {
    [
        device::cases(),
        host::cases(),
        mapped::cases(),
        pooled::cases(),
        allocator::cases(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// All implementations of a device.
fn rows() -> Vec<Row> {
    vec![
        Row {
            name: "simulated",
            make: simulated,
            process: Process::Here,
            unavailable: None,
        },
        Row {
            name: "simulated_limited",
            make: simulated_limited,
            process: Process::Here,
            unavailable: None,
        },
        Row {
            name: "simulated_reusing_addresses",
            make: simulated_reusing_addresses,
            process: Process::Here,
            unavailable: None,
        },
        // The child process itself is tested on a device that always exists.
        Row {
            name: "simulated_in_a_child",
            make: simulated,
            process: Process::Child(Machine::Real),
            unavailable: None,
        },
        Row {
            name: "cuda_on_the_simulated_gpu",
            make: cuda,
            process: Process::Child(Machine::Simulated),
            unavailable: None,
        },
        Row {
            name: "cuda_on_the_simulated_gpu_limited",
            make: cuda_limited,
            process: Process::Child(Machine::RoomySimulated),
            unavailable: None,
        },
        Row {
            name: "cuda_limited",
            make: cuda_limited,
            process: Process::Child(Machine::Real),
            unavailable: no_cuda_device(),
        },
    ]
}

fn no_cuda_device() -> Option<String> {
    let there = DeviceChoice::Cuda(0).resolve(&machine::probe()).is_ok();
    (!there).then(|| "no CUDA device here, ask `harness doctor` why".to_owned())
}

fn cuda() -> Result<Box<dyn TestDevice>, DeviceError> {
    Ok(Box::new(CudaDevice::open(0)?))
}

fn cuda_limited() -> Result<Box<dyn TestDevice>, DeviceError> {
    Ok(Box::new(Limited::new(cuda()?, MEMORY)?))
}

fn simulated() -> Result<Box<dyn TestDevice>, DeviceError> {
    let config = SimConfig::default();
    Ok(Box::new(SimDevice::new(SimConfig {
        total: MEMORY + config.context_overhead,
        ..config
    })))
}

/// Reuses freed addresses, as drivers do.
fn simulated_reusing_addresses() -> Result<Box<dyn TestDevice>, DeviceError> {
    let config = SimConfig {
        addresses: AddressOrder::Reuse,
        ..SimConfig::default()
    };
    Ok(Box::new(SimDevice::new(SimConfig {
        total: MEMORY + config.context_overhead,
        ..config
    })))
}

fn simulated_limited() -> Result<Box<dyn TestDevice>, DeviceError> {
    Ok(Box::new(Limited::new(
        Box::new(SimDevice::new(SimConfig::default())),
        MEMORY,
    )?))
}

fn main() -> ExitCode {
    if let Some(code) = library::serve() {
        return code;
    }
    if let Ok(wanted) = std::env::var(CHILD) {
        return child(&wanted);
    }
    let arguments = Arguments::from_args();
    let cases: Vec<Arc<Case>> = cases().into_iter().map(Arc::new).collect();
    let rows: Vec<Arc<Row>> = rows().into_iter().map(Arc::new).collect();
    let mut trials = vec![Trial::test(
        "a_case_that_fails_in_a_child_fails_here_with_its_message",
        a_failing_child_is_noticed,
    )];
    for row in &rows {
        trials.extend(
            cases
                .iter()
                .map(|case| trial(Arc::clone(row), Arc::clone(case))),
        );
    }
    trials::run(&arguments, trials)
}

fn trial(row: Arc<Row>, case: Arc<Case>) -> Trial {
    let name = format!("{}::{}", row.name, case.name);
    let skip = row.unavailable.as_ref().map(|reason| {
        let remedy = "`cargo test --package harness-run --test contract` on a machine with a GPU";
        Skip::new(reason.as_str(), remedy)
    });
    trials::trial(name, skip, move || match &row.process {
        Process::Here => run(&row, &case),
        Process::Child(machine) => run_in_child(&format!("{}::{}", row.name, case.name), *machine),
    })
}

/// Runs a case on a fresh device of the row, and checks for leaks.
fn run(row: &Row, case: &Case) -> Result<(), Failed> {
    let mut device = (row.make)()?;
    (case.run)(device.as_mut())?;
    let leaks = device.leaks();
    if leaks.is_empty() {
        Ok(())
    } else {
        Err(format!("left behind: {leaks}").into())
    }
}

/// Returns whether a device was made for these tests and supports everything. A real device may
/// lack what virtual GPUs lack.
pub(crate) fn is_made_for_tests(device: &dyn TestDevice) -> bool {
    device.info().clock == Clock::Simulated || device.info().name == "Simulated GPU"
}

fn run_in_child(wanted: &str, machine: Machine) -> Result<(), Failed> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let mut command = Command::new(std::env::current_exe()?);
    // Lives as long as the child, because its folder holds the libraries.
    let staging = match machine {
        Machine::Real => None,
        Machine::Simulated => {
            let config = strict();
            Some(Staging::new(&Settings {
                memory: MEMORY + config.context_overhead,
                ..config
            })?)
        }
        Machine::RoomySimulated => Some(Staging::new(&strict())?),
    };
    if let Some(staging) = &staging {
        staging.apply(&mut command);
    }
    let output = command.env(CHILD, wanted).output()?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!(
        "{}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    )
    .into())
}

/// Runs the case that the parent requested. Its standard error is the parent's message.
fn child(wanted: &str) -> ExitCode {
    let (rows, cases) = (rows(), cases());
    let pairs = rows
        .iter()
        .flat_map(|row| cases.iter().map(move |case| (row, case)));
    let found = pairs
        .into_iter()
        .find(|(row, case)| format!("{}::{}", row.name, case.name) == wanted);
    let result = match found {
        Some((row, case)) => run(row, case),
        None => Err(format!("there is no case {wanted}").into()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failed) => {
            eprintln!("{}", failed.message().unwrap_or("failed without a message"));
            ExitCode::FAILURE
        }
    }
}

fn a_failing_child_is_noticed() -> Result<(), Failed> {
    match run_in_child("no_row::no_case", Machine::Real) {
        Err(failed)
            if failed
                .message()
                .is_some_and(|text| text.contains("there is no case no_row::no_case")) =>
        {
            Ok(())
        }
        Err(failed) => Err(format!("another message: {failed:?}").into()),
        Ok(()) => Err("the child's failure was not noticed".into()),
    }
}
