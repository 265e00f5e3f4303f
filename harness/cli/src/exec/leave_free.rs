//! `harness exec --leave-free`: runs a program on a real GPU that has only a given amount of free
//! memory.

use std::process::{Command, ExitCode, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};
use std::{ffi::OsString, io, thread};

use clap::Args;
use harness_allocator::device::{Device as _, DeviceError, DeviceMemory, TestDevice as _};
use harness_allocator::units::{Bytes, Nanos};
use harness_base::words::count;
use harness_cuda::CudaDevice;
use harness_exec::process::HeldSignals;
use harness_report::squeeze::{self, Look, Squeezed};

use super::{CliError, Exec, Failures, probe, terminal, write_report};
use crate::{Format, program};

const MOST_POINTS: usize = 4096;
/// The default of `--every`: 50 ms.
const EVERY: Nanos = Nanos(50_000_000);

#[derive(Args)]
pub(super) struct LeaveFree {
    /// Allocate memory of cuda:0, or of `--device`, until the driver reports this much as free, as
    /// in `6GiB`, then run the program unchanged. The free memory is exact to 2 MiB, and all
    /// processes share it. `harness squeeze` is an alias of `harness exec --leave-free`.
    #[arg(long, value_name = "SIZE", value_parser = Bytes::parse, conflicts_with_all = [
        "memory", "gpu", "devices", "cuda", "require_gpu", "context_overhead", "events",
        "addresses", "cudnn_workspace", "nccl_memory", "unmeasured", "values", "fail", "latency",
        "alloc_conf", "python", "snapshot", "junit", "baseline", "every_fault", "least_memory",
        "largest", "fresh", "shard", "jobs", "time_limit", "logs", "figures", "shared_memory",
    ])]
    leave_free: Option<Bytes>,
    /// With `--leave-free`: the interval between two measurements of device memory [default: 50ms].
    #[arg(long, value_name = "TIME", value_parser = Nanos::parse)]
    every: Option<Nanos>,
}

impl LeaveFree {
    pub(super) const fn size(&self) -> Option<Bytes> {
        self.leave_free
    }

    pub(super) fn check_needed(&self) -> Result<(), CliError> {
        let options = [("--every", self.every.is_some())];
        super::require("`--leave-free`", self.leave_free.is_some(), &options)
    }
}

impl Exec {
    pub(super) fn run_with_free_memory(&self, leave: Bytes) -> Result<ExitCode, Failures> {
        let pressure = Pressure {
            leave,
            device: self.device.unwrap_or_default(),
            every: self.leave_free.every.unwrap_or(EVERY),
            command: &self.command,
        };
        let squeezed = pressure.run(self.many.format)?;
        match self.many.format {
            Format::Text if self.quiet && squeezed.exit_code == 0 => {}
            Format::Text => terminal::message(pressure.summary(&squeezed)),
            Format::Json => terminal::print_json(&squeezed)?,
        }
        if let Some(path) = &self.record {
            terminal::save(path, &terminal::json(&squeezed)?)?;
        }
        if let Some(path) = &self.many.report {
            let again = pressure.again(&squeezed.command);
            let page = |picture: Option<&str>| squeeze::markdown(&squeezed, picture, &again);
            write_report(path, squeeze::picture(&squeezed).as_deref(), page)?;
        }
        Ok(squeezed.exit_code.into())
    }
}

/// A run of a program next to memory that is allocated for it.
struct Pressure<'a> {
    leave: Bytes,
    device: u32,
    every: Nanos,
    command: &'a [OsString],
}

impl Pressure<'_> {
    fn run(&self, format: Format) -> Result<Squeezed, CliError> {
        let help = "`harness doctor` lists the GPUs; without one, `harness exec --memory SIZE` \
             runs the program on a simulated GPU";
        probe::probe()?
            .require(self.device)
            .map_err(|error| CliError::device(&error, help))?;
        // This must come before the driver starts threads.
        let signals = HeldSignals::hold().map_err(|error| internal(&error))?;
        let (ready, taken) = mpsc::channel();
        let (stop, stopped) = mpsc::channel();
        let (ended, mut squeezed, took) = thread::scope(|scope| {
            let watcher = scope.spawn(move || self.watch(&ready, &stopped));
            // The watcher opens the device, allocates the memory, and releases it.
            if taken.recv().is_err() {
                let failed = watcher
                    .join()
                    .unwrap_or_else(|payload| std::panic::resume_unwind(payload))
                    .err();
                return Err(failed
                    .unwrap_or_else(|| internal(&io::Error::other("the device was not opened"))));
            }
            let began = Instant::now();
            let mut command = Command::new(&self.command[0]);
            command.args(&self.command[1..]).stdin(Stdio::inherit());
            if format == Format::Json {
                command.stdout(io::stderr());
            }
            let ended = signals.run(&mut command, |_| (), |_| Vec::new());
            let took = began.elapsed();
            // Wakes the watcher, which releases the memory of the GPU.
            drop(stop);
            let squeezed = watcher
                .join()
                .unwrap_or_else(|payload| std::panic::resume_unwind(payload))?;
            Ok((ended, squeezed, took))
        })?;
        let end = ended.map_err(|error| {
            let message = format!(
                "`{}` cannot be started: {error}",
                self.command[0].to_string_lossy()
            );
            CliError::input(message, "give an executable program after `--`")
        })?;
        squeezed.exit_code = end.exit_code();
        squeezed.signal = end.signal();
        squeezed.milliseconds = milliseconds(took);
        Ok(squeezed)
    }

    /// Opens the device, allocates the memory, sends `ready`, and measures until `stopped` closes.
    /// Dropping the device releases the memory.
    fn watch(&self, ready: &Sender<()>, stopped: &Receiver<()>) -> Result<Squeezed, CliError> {
        let mut device = CudaDevice::open_for_allocation(self.device)?;
        let free_before = device.free_memory()?;
        let mut measured = Squeezed {
            command: program::shown(self.command),
            leave: self.leave,
            free_before,
            ..Squeezed::default()
        };
        if measured.free_before < self.leave {
            let what = format!("{} of free memory", self.leave);
            let why = format!(
                "cuda:{} has only {} free",
                self.device, measured.free_before
            );
            let help =
                "give less `--leave-free`; `harness doctor` lists the processes that use the GPU";
            return Err(CliError::device(
                &DeviceError::Unavailable { what, why },
                help,
            ));
        }
        measured.taken = take(&mut device, self.leave)?;
        let mut memory = device.memory()?;
        (measured.free_at_start, measured.least_free) = (memory.free, memory.free);
        let _ = ready.send(());
        let began = Instant::now();
        add(&mut measured, began.elapsed(), memory);
        // The channel closes when the program has ended.
        while stopped.recv_timeout(Duration::from_nanos(self.every.0))
            == Err(RecvTimeoutError::Timeout)
        {
            match device.memory() {
                Ok(now) => memory = now,
                Err(error) => {
                    measured.lost = Some(error.to_string());
                    return Ok(measured);
                }
            }
            add(&mut measured, began.elapsed(), memory);
        }
        add(
            &mut measured,
            began.elapsed(),
            device.memory().unwrap_or(memory),
        );
        Ok(measured)
    }

    fn summary(&self, squeezed: &Squeezed) -> String {
        let Squeezed {
            exit_code,
            signal,
            taken,
            free_at_start,
            peak_used,
            least_free,
            ..
        } = squeezed;
        let how = match signal {
            None => format!("exit code {exit_code}"),
            Some(signal) => format!("signal {signal} ended it (exit code {exit_code})"),
        };
        let (took, looks) = (
            Nanos(squeezed.milliseconds.saturating_mul(1_000_000)),
            count(squeezed.looks, "measurement"),
        );
        let lost = squeezed
            .lost
            .iter()
            .map(|error| format!("\nlost           the measurements ended early: {error}"));
        format!(
            "\nsqueezed       {taken} taken of cuda:{}, {free_at_start} free at the \
             start\nprogram        {how}, after {took}\ndevice used    at most {peak_used}, at \
             least {least_free} free, in {looks}{}",
            self.device,
            lost.collect::<String>()
        )
    }

    fn again(&self, command: &str) -> String {
        let Self {
            leave,
            device,
            every,
            ..
        } = self;
        let program = program::name();
        format!(
            "{program} exec --leave-free {}B --device cuda:{device} --every {}ns -- {command}",
            leave.0, every.0
        )
    }
}

/// Adds a measurement. A full curve keeps the points with the most memory in use.
fn add(squeezed: &mut Squeezed, since: Duration, memory: DeviceMemory) {
    let DeviceMemory { used, free, .. } = memory;
    let Squeezed {
        curve,
        looks,
        peak_used,
        least_free,
        ..
    } = squeezed;
    *looks += 1;
    *peak_used = used.max(*peak_used);
    *least_free = free.min(*least_free);
    let point = Look {
        milliseconds: milliseconds(since),
        used,
        free,
    };
    // A stretch without change needs only its first and last point.
    if let [.., before, last] = curve.as_mut_slice()
        && (before.used, before.free, last.used, last.free) == (used, free, used, free)
    {
        *last = point;
        return;
    }
    curve.push(point);
    if curve.len() > MOST_POINTS {
        *curve = curve
            .chunks(2)
            .filter_map(|pair| pair.iter().copied().max_by_key(|point| point.used))
            .collect();
    }
}

/// Allocates memory until `leave` and less than one granule are free. Returns the allocated amount.
fn take(device: &mut CudaDevice, leave: Bytes) -> Result<Bytes, DeviceError> {
    let granularity = device.info().granularity;
    let mut held = Bytes::ZERO;
    loop {
        let more = device.free_memory()?.saturating_sub(leave);
        if more < granularity {
            return Ok(held);
        }
        let taken = device.set_external_memory(held + more)?;
        if taken <= held {
            return Ok(held);
        }
        held = taken;
    }
}

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

fn internal(error: &io::Error) -> CliError {
    let message = format!("the program cannot be supervised: {error}");
    CliError::internal(
        message,
        "check this machine's limits on threads and signals",
    )
}
