//! [`Machine`]: all state of the simulated machine in one process.
//!
//! It is made at the first call from the environment. Everything but kernel launches goes through one lock, which is free again in a forked child.

use std::cell::{Cell, RefCell};
use std::env;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use harness_allocator::units::{Bytes, Nanos};

use crate::calls::Calls;
use crate::clock::Streams;
use crate::code::Code;
use crate::execution::Execution;
use crate::host::HostMemory;
use crate::memory::{DeviceMemory, FIRST_ADDRESS, device_of};
use crate::values::Contents;
use harness_gpu_settings::attempts::{Attempt, Attempts, Outcome};
use harness_gpu_settings::calls::{FaultyCall, SlowCall};
use harness_gpu_settings::counters::Counters;
use harness_gpu_settings::driver::Kernels;
use harness_gpu_settings::gpus::Gpu;
use harness_gpu_settings::ledger::{Account, Holding, LEDGER, Ledger};
use harness_gpu_settings::settings::{LEFT, RUN, SETTINGS, Settings};

/// The simulated machine as this process sees it.
pub(crate) struct Machine {
    pub(crate) settings: Settings,
    pub(crate) counters: &'static Counters,
    /// The real numbers of the devices that the process can see: `CUDA_VISIBLE_DEVICES`.
    pub(crate) visible: Vec<u32>,
    pub(crate) calls: Calls,
    /// Whether `cuInit` was called.
    pub(crate) initialised: AtomicBool,
    /// Whether this is a forked child of a process that had a context: a driver's contexts cannot be used in one, nor new ones made.
    inherits_context: AtomicBool,
    /// How much longer calls took because that was asked for, in nanoseconds.
    late_by: AtomicU64,
    /// The file for what is left in contexts.
    pub(crate) left: Option<PathBuf>,
    /// When the machine was made.
    began: Instant,
    state: Mutex<State>,
}

/// What changes.
pub(crate) struct State {
    /// By the index that the process sees.
    pub(crate) devices: Vec<DeviceMemory>,
    /// What the devices do, likewise; none where kernels are skipped.
    pub(crate) executions: Vec<Execution>,
    pub(crate) streams: Streams,
    pub(crate) host: HostMemory,
    pub(crate) attempts: Attempts,
    pub(crate) contents: Contents,
    /// What this process holds of the devices' memory, which it shares with others.
    account: Account,
}

/// The machine. The first call makes it.
pub(crate) fn machine() -> &'static Machine {
    static MACHINE: OnceLock<Machine> = OnceLock::new();
    MACHINE.get_or_init(Machine::of_environment)
}

pub(crate) fn counters() -> &'static Counters {
    machine().counters
}

/// Whether an address lies on a device: no host address of x86-64 is that high.
pub(crate) const fn is_device_memory(address: u64) -> bool {
    address >= FIRST_ADDRESS
}

impl Machine {
    fn of_environment() -> Self {
        let settings: Settings = match env::var(SETTINGS).map(|text| text.parse()) {
            Err(_) => Settings::new(Gpu::named("h100-80").unwrap_or(&harness_gpu_settings::gpus::GPUS[0]), Bytes::gib(80)),
            Ok(Ok(settings)) => settings,
            Ok(Err(error)) => {
                eprintln!("simulated GPU: {SETTINGS}: {error}");
                std::process::abort()
            }
        };
        let visible = visible(settings.devices, env::var("CUDA_VISIBLE_DEVICES").ok().as_deref());
        let folder = env::var_os(RUN).map(PathBuf::from);
        let done = if settings.kernels == Kernels::Done { visible.len() } else { 0 };
        let state = State {
            devices: (0..visible.len()).map(|index| DeviceMemory::new(index, &settings)).collect(),
            executions: (0..done).map(|index| Execution::new(index, &settings)).collect(),
            streams: Streams::new(visible.len()),
            host: HostMemory::default(),
            attempts: Attempts::of_this_process(folder.as_deref()),
            contents: Contents::default(),
            account: Account::new(env::var_os(LEDGER).and_then(|path| Ledger::open(path.as_ref()).ok())),
        };
        unlock_in_forked_children();
        let counters = Counters::of_this_process(folder.as_deref(), u32::try_from(visible.len()).unwrap_or(0), settings.memory);
        Self {
            counters,
            visible,
            calls: Calls::new(&settings, folder.as_deref()),
            initialised: AtomicBool::new(false),
            inherits_context: AtomicBool::new(false),
            late_by: AtomicU64::new(0),
            left: folder.as_ref().map(|folder| folder.join(LEFT)),
            began: Instant::now(),
            settings,
            state: Mutex::new(state),
        }
    }

    /// Whether kernels are really done.
    pub(crate) fn does_kernels(&self) -> bool {
        self.settings.kernels == Kernels::Done
    }

    /// Time of the host since the machine was made.
    pub(crate) fn host_time(&self) -> Nanos {
        Nanos(u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }

    /// What the process that is none of this machine holds of each device.
    pub(crate) const fn others(&self) -> Bytes {
        self.settings.others
    }

    /// The state, for this thread alone.
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses what needs a context in a forked child that inherited one, as CUDA does there
    /// (<https://docs.pytorch.org/docs/stable/notes/multiprocessing.html>).
    pub(crate) fn usable(&self) -> Result<(), Code> {
        if self.inherits_context.load(Ordering::Relaxed) { Err(Code::NotInitialized) } else { Ok(()) }
    }

    /// Has a call take as much longer as is asked for. To be called without the state, which other threads may need meanwhile.
    pub(crate) fn delay(&self, call: SlowCall) {
        let by = self.counters.wait(&self.settings.latencies, call);
        self.late_by.fetch_add(by.0, Ordering::Relaxed);
    }

    /// How much longer calls took so far because that was asked for.
    pub(crate) fn late_by(&self) -> Nanos {
        Nanos(self.late_by.load(Ordering::Relaxed))
    }

    /// How much work was submitted so far.
    pub(crate) fn now(&self) -> u64 {
        self.counters.submitted().load(Ordering::Relaxed)
    }

    /// One more piece of work is submitted. Returns the time behind it.
    pub(crate) fn tick(&self) -> u64 {
        self.counters.submitted().fetch_add(1, Ordering::Relaxed) + 1
    }
}

impl State {
    /// Makes an attempt to get memory, of the host where no device is named: it fails where that was asked for, else it does what `get` does. Tells too whether the failure was injected.
    pub(crate) fn attempt<T>(
        &mut self,
        machine: &Machine,
        (call, size): (FaultyCall, Bytes),
        device: Option<usize>,
        get: impl FnOnce(&mut Self) -> Result<T, Code>,
    ) -> (Result<T, Code>, bool) {
        let held = device.and_then(|index| self.devices.get_mut(index)).map_or(Bytes::ZERO, DeviceMemory::used);
        let injected = self.attempts.fails(&machine.settings.faults, call, size);
        let got = if injected { Err(Code::OutOfMemory) } else { get(self) };
        let outcome = match (&got, injected) {
            (_, true) => Outcome::Injected,
            (Ok(_), _) => Outcome::Served,
            (Err(_), _) => Outcome::Refused,
        };
        let device = device.map_or(0, |index| index as u32);
        self.attempts.note(&Attempt { call, size, submitted: machine.now(), outcome, device, held });
        (got, injected)
    }

    /// Does something that needs a context on a device and may take memory of it, by the index that the process sees.
    pub(crate) fn on_device<T>(&mut self, index: usize, mut act: impl FnMut(&mut DeviceMemory) -> Result<T, Code>) -> Result<T, Code> {
        let (Some(memory), Some(number)) = (self.devices.get_mut(index), machine().visible.get(index)) else { return Err(Code::NoDevice) };
        let elsewhere = machine().others();
        self.account.change(*number, |others| (memory.open(others + elsewhere).and_then(|()| act(memory)), memory.held()))
    }

    /// Does something that gives memory of a device back.
    pub(crate) fn give_back<T>(&mut self, index: usize, act: impl FnOnce(&mut DeviceMemory) -> Result<T, Code>) -> Result<T, Code> {
        let (Some(memory), Some(number)) = (self.devices.get_mut(index), machine().visible.get(index)) else {
            return Err(Code::InvalidValue);
        };
        let done = act(memory);
        self.account.gave_back(*number, memory.held());
        done
    }

    /// Notes that memory of a device was given back.
    pub(crate) fn note_free(&mut self, machine: &Machine, index: usize) {
        let Some(held) = self.devices.get_mut(index).map(DeviceMemory::used) else { return };
        self.attempts.note_free(machine.now(), index as u32, held);
    }

    /// Free bytes and all bytes of the current device.
    pub(crate) fn free_and_total(&mut self) -> Result<(Bytes, Bytes), Code> {
        self.account.give_back_of_the_dead();
        self.on_device(current_device(), |memory| Ok(memory.free_and_total()))
    }

    /// A forked child begins an account of its own. Where its parent had contexts it has none: on a GPU these cannot be used in it, so what it seems
    /// to hold is its parent's.
    fn forked(&mut self) {
        match self.devices.iter().any(DeviceMemory::has_context) {
            true => {
                self.account = Account::new(None);
                machine().inherits_context.store(true, Ordering::Relaxed);
            }
            false => self.account.forked(),
        }
    }

    /// What processes hold of a device, by its real number.
    pub(crate) fn holdings(&mut self, number: u32) -> Vec<Holding> {
        if let Some(ledger) = self.account.ledger() {
            return ledger.holdings(number);
        }
        let index = machine().visible.iter().position(|visible| *visible == number);
        let held = index.map_or(Bytes::ZERO, |index| self.held(index));
        let own = Holding { pid: std::process::id(), held };
        (held > Bytes::ZERO).then_some(own).into_iter().collect()
    }

    /// Enters what this process holds of a device for others that share it, where kernels are done.
    pub(crate) fn enter_held(&mut self, index: usize) {
        if self.account.ledger().is_none() || self.executions.is_empty() {
            return;
        }
        let held = self.held(index);
        if let Some(number) = machine().visible.get(index) {
            let Ok(()) = self.account.change(*number, |_| (Ok::<(), std::convert::Infallible>(()), held));
        }
    }

    /// What others of the run hold of a device.
    pub(crate) fn held_by_others(&self, index: usize) -> Bytes {
        machine().visible.get(index).map_or(Bytes::ZERO, |number| self.account.held_by_others(*number))
    }

    /// What this process holds of a device, its context included. Where kernels are done that lasts while somebody refers to it.
    fn held(&mut self, index: usize) -> Bytes {
        let Some(memory) = self.devices.get_mut(index) else { return Bytes::ZERO };
        match self.executions.get(index) {
            None => memory.held(),
            Some(execution) if execution.references > 0 => memory.used() + machine().settings.context_overhead,
            Some(_) => memory.used(),
        }
    }

    /// The device that an address lies on.
    pub(crate) fn device_at(&mut self, address: u64) -> Result<&mut DeviceMemory, Code> {
        device_of(address).and_then(|index| self.devices.get_mut(index)).ok_or(Code::InvalidValue)
    }
}

/// The devices that `CUDA_VISIBLE_DEVICES` names, up to the first that is none
/// (<https://docs.nvidia.com/cuda/cuda-c-programming-guide/#env-vars>). Names as `GPU-...` end the list too: simulated devices go by number.
fn visible(devices: u32, variable: Option<&str>) -> Vec<u32> {
    let Some(variable) = variable else { return (0..devices).collect() };
    let numbers = variable.split(',').map_while(|text| text.trim().parse().ok().filter(|number| *number < devices));
    let mut seen = Vec::new();
    for number in numbers {
        if seen.contains(&number) {
            return Vec::new();
        }
        seen.push(number);
    }
    seen
}

thread_local! {
    /// The device that the thread has chosen.
    static CURRENT: Cell<Option<usize>> = const { Cell::new(None) };
    /// The lock, held by the thread that forks.
    static HELD: RefCell<Option<MutexGuard<'static, State>>> = const { RefCell::new(None) };
}

/// The device that the calling thread has chosen, at first the first one. On a machine without devices there is none with that index.
pub(crate) fn current_device() -> usize {
    CURRENT.get().unwrap_or(0)
}

/// The device that the calling thread has chosen, if it has.
pub(crate) fn chosen_device() -> Option<usize> {
    CURRENT.get()
}

/// The calling thread has chosen no device any more.
pub(crate) fn choose_no_device() {
    CURRENT.set(None);
}

/// Chooses a device for the calling thread.
pub(crate) fn set_current_device(index: usize) -> Result<(), Code> {
    if index >= machine().visible.len() {
        return Err(Code::InvalidDevice);
    }
    CURRENT.set(Some(index));
    Ok(())
}

/// Lets a thread fork only while it has the lock, and gives it free on both sides: otherwise a child would wait for a thread that it does not have.
fn unlock_in_forked_children() {
    extern "C" fn take() {
        let guard = machine().state();
        HELD.with_borrow_mut(|held| *held = Some(guard));
    }
    extern "C" fn give() {
        HELD.with_borrow_mut(|held| *held = None);
    }
    extern "C" fn give_in_child() {
        HELD.with_borrow_mut(|held| {
            if let Some(mut state) = held.take() {
                state.forked();
            }
        });
    }
    // SAFETY: the handlers are functions that live as long as this library, which is never unloaded. Without them a fork may hang, no more.
    unsafe { libc::pthread_atfork(Some(take), Some(give), Some(give_in_child)) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn visible_devices_end_with_the_first_that_is_none_and_repeat_none() {
        assert_eq!(visible(4, None), [0, 1, 2, 3]);
        assert_eq!(visible(4, Some("2, 0")), [2, 0]);
        assert_eq!(visible(4, Some("1,7,2")), [1]);
        assert_eq!(visible(4, Some("")), Vec::<u32>::new());
        assert_eq!(visible(4, Some("1,1")), Vec::<u32>::new());
    }
}
