//! `harness squeeze`: takes memory of a real GPU until only so much is left, and runs any program beside that.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use harness_allocator::device::{Device as _, DeviceError, DeviceMemory, TestDevice as _};
use harness_allocator::units::{Bytes, Nanos};
use harness_base::words::count;
use harness_base::{files, shell};
use harness_cuda::{CudaDevice, machine};
use harness_exec::process::{End, HeldSignals};
use harness_report::squeeze::{self, Look, Squeezed};

use super::error::{CliError, Failures};
use super::exec::limited::ordinal;
use super::exec::{trials, unwritten, write_report};
use super::{Format, terminal};

const EXAMPLES: &str = "Examples:
  harness squeeze --leave 6GiB -- python train.py
  harness squeeze --leave 6GiB --record squeeze.json -- ./server --port 8000
  harness squeeze --leave 6GiB --report squeeze.md -- python train.py
  harness squeeze --leave 6GiB --format json -- python train.py | jq .least_free

Memory is taken by plain allocations of the driver before the program starts, and given back when it has ended, also when it is killed or this one is. Nothing of the
program is changed; it has our standard input, output and error, and its exit code is ours (128 + n where signal n ended it). What was seen of the device
is told on standard error, or as JSON on standard output, and then the program's standard output goes to standard error. What others take or give back meanwhile is not made up for. Nothing is run, and the code is 3, where the GPU cannot be used or has less free than is to be left; it is 2 where the program cannot
be started, and 4 where the record or the report cannot be written.";

/// How often the device is looked at where the user does not say.
const EVERY: &str = "50ms";
/// Points of the curve that are kept: of more, each stretch of several points keeps the one with the most used.
const MOST_POINTS: usize = 4096;

/// Run a program on a real GPU of which only so much memory is left free.
#[derive(Args)]
#[command(after_help = EXAMPLES, arg_required_else_help = true)]
pub(super) struct Squeeze {
    /// Memory that stays free for the program and everybody else, as in `6GiB`: what the driver tells to be free when the program starts, within 2 MiB.
    #[arg(long, value_name = "SIZE", value_parser = Bytes::parse)]
    leave: Bytes,
    /// The GPU, by its number for this process.
    #[arg(long, value_name = "cuda:N", value_parser = ordinal, default_value = "cuda:0")]
    device: u32,
    /// How often the device is looked at.
    #[arg(long, value_name = "TIME", default_value = EVERY, value_parser = Nanos::parse)]
    every: Nanos,
    /// Write what was seen, with the curve of device used, as JSON.
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    /// Write a report as markdown, with a picture of device used beside it. A folder gets `report.md`.
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// How what was seen is told. `json` is what `--record` writes, on standard output: that of the program goes to standard error.
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
    /// The program and its arguments.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// What was seen of the device.
#[derive(Debug, Default)]
struct Seen {
    /// Free before anything was taken, and when the program started.
    free_before: Bytes,
    free_at_start: Bytes,
    /// Taken when the program started.
    taken: Bytes,
    curve: Vec<Look>,
    peak_used: Bytes,
    least_free: Bytes,
    looks: u64,
    /// Why the device could not be looked at any more.
    lost: Option<DeviceError>,
}

impl Squeeze {
    pub(super) fn run(self) -> Result<ExitCode, Failures> {
        machine::probe().require(self.device)?;
        // Before any thread starts: the driver has threads of its own.
        let signals = HeldSignals::hold().map_err(|error| internal(&error))?;
        let (ready, taken) = mpsc::channel();
        let (stop, stopped) = mpsc::channel();
        let (ended, seen, took) = thread::scope(|scope| {
            let command = &self;
            let watcher = scope.spawn(move || command.watch(&ready, &stopped));
            // The device is the watcher's: it opens it, takes the memory, and gives it back.
            if taken.recv().is_err() {
                let failed = watcher.join().unwrap_or_else(|payload| std::panic::resume_unwind(payload)).err();
                return Err(failed.unwrap_or_else(|| internal(&io::Error::other("the device was not opened"))));
            }
            let began = Instant::now();
            let mut command = Command::new(&self.command[0]);
            command.args(&self.command[1..]).stdin(Stdio::inherit());
            if self.format == Format::Json {
                command.stdout(io::stderr());
            }
            let ended = signals.run(&mut command);
            let took = began.elapsed();
            // Wakes the watcher, which releases the memory of the GPU.
            drop(stop);
            let seen = watcher.join().unwrap_or_else(|payload| std::panic::resume_unwind(payload))?;
            Ok((ended, seen, took))
        })?;
        let end = ended.map_err(|error| {
            let message = format!("`{}` cannot be started: {error}", self.command[0].to_string_lossy());
            CliError::input(message, "give a program that can be started behind `--`")
        })?;
        let squeezed = self.squeezed(end, seen, took);
        match self.format {
            Format::Text => terminal::tell(self.summary(&squeezed)),
            Format::Json => terminal::print_json(&squeezed)?,
        }
        if let Some(path) = &self.record {
            record(path, &squeezed)?;
        }
        if let Some(path) = &self.report {
            let page = |picture: Option<&str>| squeeze::markdown(&squeezed, picture, &self.again(&squeezed.command));
            write_report(&trials::in_folder(path), squeeze::picture(&squeezed).as_deref(), page)?;
        }
        Ok(end.exit_code().into())
    }

    /// Opens the device, takes the memory, says so, and looks at the device until it is to stop. What was taken goes back with the device.
    fn watch(&self, ready: &Sender<()>, stopped: &Receiver<()>) -> Result<Seen, CliError> {
        let mut device = CudaDevice::open_for_allocation(self.device)?;
        let mut seen = Seen { free_before: device.free_memory()?, ..Seen::default() };
        if seen.free_before < self.leave {
            let message = format!("cuda:{} has {} free, and {} are to be left", self.device, seen.free_before, self.leave);
            let help = "leave less, or see by `harness doctor` who has the rest";
            return Err(CliError::Device {
                error: DeviceError::Unavailable { what: message, why: "nothing can be taken".to_owned() },
                help,
            });
        }
        seen.taken = take(&mut device, self.leave)?;
        let mut memory = device.memory()?;
        (seen.free_at_start, seen.least_free) = (memory.free, memory.free);
        let _ = ready.send(());
        let began = Instant::now();
        seen.add(began.elapsed(), memory);
        // The channel closes when the program has ended.
        while stopped.recv_timeout(Duration::from_nanos(self.every.0)) == Err(RecvTimeoutError::Timeout) {
            match device.memory() {
                Ok(now) => {
                    memory = now;
                    seen.add(began.elapsed(), memory);
                }
                Err(error) => {
                    seen.lost = Some(error);
                    break;
                }
            }
        }
        if seen.lost.is_none() {
            seen.add(began.elapsed(), device.memory().unwrap_or(memory));
        }
        Ok(seen)
    }

    fn squeezed(&self, end: End, seen: Seen, took: Duration) -> Squeezed {
        let words: Vec<String> = self.command.iter().map(|word| word.to_string_lossy().into_owned()).collect();
        let Seen { free_before, free_at_start, taken, curve, peak_used, least_free, looks, lost } = seen;
        Squeezed {
            command: shell::command(&words),
            exit_code: end.exit_code(),
            signal: if let End::Signal(signal) = end { Some(signal) } else { None },
            leave: self.leave,
            taken,
            free_before,
            free_at_start,
            peak_used,
            least_free,
            looks,
            milliseconds: milliseconds(took),
            lost: lost.map(|error| error.to_string()),
            curve,
        }
    }

    fn summary(&self, squeezed: &Squeezed) -> String {
        let Squeezed { exit_code, signal, taken, free_at_start, peak_used, least_free, .. } = squeezed;
        let how = match signal {
            None => format!("exit code {exit_code}"),
            Some(signal) => format!("signal {signal} ended it (exit code {exit_code})"),
        };
        let (took, looks) = (Nanos(squeezed.milliseconds.saturating_mul(1_000_000)), count(squeezed.looks, "look"));
        let lost = squeezed.lost.iter().map(|error| format!("\nlost           the device could not be looked at to the end: {error}"));
        format!(
            "\nsqueezed       {taken} taken of cuda:{}, {free_at_start} free at the start\nprogram        {how}, after {took}\ndevice used    at most {peak_used}, at least {least_free} free, in {looks}{}",
            self.device,
            lost.collect::<String>()
        )
    }

    /// A command that does the same again.
    fn again(&self, command: &str) -> String {
        let Self { leave, device, every, .. } = self;
        format!("harness squeeze --leave {}B --device cuda:{device} --every {}ns -- {command}", leave.0, every.0)
    }
}

fn record(path: &Path, squeezed: &Squeezed) -> Result<(), CliError> {
    let text = serde_json::to_string_pretty(squeezed).map_err(|error| internal(&error.into()))?;
    files::write(path, &(text + "\n")).map_err(|error| unwritten(path, error))
}

impl Seen {
    /// One look at the device. Of very many points the curve keeps those with the most used.
    fn add(&mut self, since: Duration, memory: DeviceMemory) {
        let DeviceMemory { used, free, .. } = memory;
        self.looks += 1;
        self.peak_used = self.peak_used.max(used);
        self.least_free = self.least_free.min(free);
        let point = Look { milliseconds: milliseconds(since), used, free };
        // What stays as it is needs a point at its beginning and at its end.
        if let [.., before, last] = self.curve.as_mut_slice()
            && (before.used, before.free, last.used, last.free) == (used, free, used, free)
        {
            *last = point;
            return;
        }
        self.curve.push(point);
        if self.curve.len() > MOST_POINTS {
            self.curve = self.curve.chunks(2).filter_map(|pair| pair.iter().copied().max_by_key(|point| point.used)).collect();
        }
    }
}

/// Takes memory until less than one granule is free beyond what is to be left. Tells how much was taken.
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
    let message = format!("the program cannot be watched: {error}");
    CliError::Internal { message, help: "this machine refuses threads or signals: see its limits" }
}
