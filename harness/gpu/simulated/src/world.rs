//! [`Machine`]: the state of the simulated machine in one process.
//!
//! The first call creates it from the environment, and [`harness_machine_restart`] creates it
//! again. All calls except kernel launches use one lock, which stays usable in forked children.

use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::{
    cell::Cell,
    collections::{BTreeMap, BTreeSet},
    env,
    ffi::c_int,
    path::PathBuf,
    ptr,
    time::Instant,
};

use harness_allocator::device::Device as _;
use harness_allocator::sync::lock;
use harness_allocator::units::{Bytes, Nanos};

use crate::clock::{Streams, captures::is_any_active, work::Submitted};
use crate::code::{Code, on_error};
use crate::graph_memory::GraphMemory;
use crate::loaded::Loaded;
use crate::memory::{DeviceMemory, FIRST_ADDRESS, device_of};
use crate::opened::{Handle, Opened};
use crate::pools::Pools;
use crate::shared_memory::Shared;
use crate::{
    calls::Calls, contexts::Contexts, copied, copied::CopiedBytes, execution::Execution,
    host::HostMemory, torch_allocator,
};
use harness_gpu_settings::arrays::ArrayDescriptor;
use harness_gpu_settings::attempts::{Attempt, AttemptOutcome, Attempts};
use harness_gpu_settings::context_overhead::LibraryContext;
use harness_gpu_settings::ledger::{Holding, LEDGER, Ledger, LedgerAccount};
use harness_gpu_settings::process::{ForkedState, keep_usable_after_fork};
use harness_gpu_settings::settings::{LEFT, RUN, SETTINGS, Settings, UNMEASURED};
use harness_gpu_settings::text::{of_variable, or_abort};
use harness_gpu_settings::{calls::Call, counters::OwnCounters, driver::Kernels, gpus::Gpu};

pub(crate) struct Machine {
    pub(crate) settings: Settings,
    pub(crate) counters: OwnCounters,
    /// The real numbers of the devices in `CUDA_VISIBLE_DEVICES`.
    pub(crate) visible: Vec<u32>,
    pub(crate) calls: Calls,
    pub(crate) initialized: AtomicBool,
    /// Set in forked children of a process with a context, in which CUDA does not work.
    inherits_context: AtomicBool,
    /// The program has read the amount of memory.
    shows_memory: AtomicBool,
    /// The sum of injected latencies in nanoseconds.
    late_by: AtomicU64,
    pub(crate) submitted: Arc<Submitted>,
    /// The file for resources that leak in contexts.
    pub(crate) leaks_file: Option<PathBuf>,
    /// The file for estimated workspaces.
    pub(crate) unmeasured_file: Option<PathBuf>,
    began: Instant,
    state: Mutex<State>,
}

pub(crate) struct State {
    /// By the index that the process sees.
    pub(crate) devices: Vec<DeviceMemory>,
    /// The work of the devices, likewise; empty if kernels are no-ops.
    pub(crate) executions: Vec<Execution>,
    pub(crate) streams: Streams,
    pub(crate) host: HostMemory,
    pub(crate) attempts: Attempts,
    pub(crate) copied: CopiedBytes,
    /// Addresses of variables in device code, by device and host symbol.
    pub(crate) symbols: BTreeMap<(usize, usize), u64>,
    /// Descriptions of arrays by handle.
    pub(crate) arrays: BTreeMap<usize, ArrayDescriptor>,
    pub(crate) pools: Pools,
    pub(crate) graph_memory: GraphMemory,
    pub(crate) contexts: Contexts,
    pub(crate) loaded: Loaded,
    /// Pairs of devices: the first may access the memory of the second.
    pub(crate) peers: BTreeSet<(usize, usize)>,
    /// The parts of libraries that hold memory, by the index of a device.
    pub(crate) parts: BTreeSet<(usize, LibraryContext)>,
    /// The bytes of loaded modules, by the index of a device.
    pub(crate) code: BTreeMap<usize, Bytes>,
    /// Memory of other processes.
    pub(crate) opened: BTreeMap<Handle, Opened>,
    pub(crate) shared: Shared,
    /// The device memory of this process, entered for processes that share the devices.
    account: LedgerAccount,
}

/// Null before the first call.
static MACHINE: AtomicPtr<Machine> = AtomicPtr::new(ptr::null_mut());

pub(crate) fn machine() -> &'static Machine {
    created().unwrap_or_else(|| {
        static FIRST: OnceLock<&Machine> = OnceLock::new();
        let machine = *FIRST.get_or_init(|| {
            // SAFETY: the function is the C library's, and this library is never unloaded.
            unsafe { keep_usable_after_fork::<State>(libc::pthread_atfork) };
            on_error(note_refusal);
            Box::leak(Box::new(Machine::of_environment()))
        });
        MACHINE.store(ptr::from_ref(machine).cast_mut(), Ordering::Release);
        machine
    })
}

/// Errors that programs expect in normal work.
const EXPECTED: [Code; 3] = [Code::OutOfMemory, Code::NotReady, Code::InvalidContext];

/// Notes a result of CUDA that shows why a library may not use the GPU.
pub(crate) fn note_refusal(result: c_int) {
    if result > 0 && !EXPECTED.iter().any(|code| *code as c_int == result) {
        let counters = &machine().counters;
        counters.note_refusal(FUNCTION.get().as_bytes(), result.unsigned_abs().into());
    }
}

fn created() -> Option<&'static Machine> {
    // SAFETY: null, or of a machine that is never freed.
    unsafe { MACHINE.load(Ordering::Acquire).as_ref() }
}

/// Returns whether the program has neither used the devices nor read what differs between the runs
/// of a program: then [`harness_machine_restart`] works.
#[unsafe(no_mangle)]
extern "C" fn harness_machine_is_unused() -> bool {
    created().is_none_or(|machine| {
        !machine.shows_memory.load(Ordering::Relaxed) && machine.state().is_unused()
    })
}

/// Creates the machine again, from the variables of this process. The process is a copy with one
/// thread.
#[unsafe(no_mangle)]
extern "C" fn harness_machine_restart() {
    if let Some(old) = created() {
        let new = Machine::of_environment();
        new.initialized
            .store(old.initialized.load(Ordering::Relaxed), Ordering::Relaxed);
        MACHINE.store(Box::leak(Box::new(new)), Ordering::Release);
    }
}

/// Ends injected failures that last until an error of a library, which the hook has seen.
#[unsafe(no_mangle)]
extern "C" fn harness_failures_end() {
    if let Some(machine) = created() {
        machine.state().attempts.end_failures();
    }
}

/// Returns whether an address is on a device. Host addresses of x86-64 are lower.
pub(crate) const fn is_device_memory(address: u64) -> bool {
    address >= FIRST_ADDRESS
}

/// Forgets the copy around a word, if the word is an address to which code of the GPU may write.
pub(crate) fn forget_output(word: u64) {
    if is_device_memory(word) && copied::any() && copied::may_know(word) {
        machine().state().copied.forget_around(word);
    }
}

impl Machine {
    fn of_environment() -> Self {
        let settings: Settings = match env::var(SETTINGS).map(|text| of_variable(&text)) {
            Err(_) => Settings::new(
                Gpu::named("h100-80").unwrap_or(&harness_gpu_settings::gpus::GPUS[0]),
                Bytes::gib(80),
            ),
            Ok(Ok(settings)) => settings,
            Ok(settings) => or_abort("simulated GPU", SETTINGS, settings),
        };
        let visible = visible(
            settings.devices,
            env::var("CUDA_VISIBLE_DEVICES").ok().as_deref(),
        );
        let folder = env::var_os(RUN).map(PathBuf::from);
        let executing = if settings.kernels == Kernels::Execute {
            visible.len()
        } else {
            0
        };
        let state = State {
            devices: (0..visible.len())
                .map(|index| DeviceMemory::new(index, &settings))
                .collect(),
            executions: (0..executing)
                .map(|index| Execution::new(index, &settings))
                .collect(),
            streams: Streams::new(visible.len()),
            host: HostMemory::default(),
            attempts: Attempts::new(folder.as_deref(), &settings.faults),
            copied: CopiedBytes::default(),
            symbols: BTreeMap::new(),
            arrays: BTreeMap::new(),
            pools: Pools::new(visible.len()),
            graph_memory: GraphMemory::default(),
            contexts: Contexts::default(),
            loaded: Loaded::default(),
            peers: BTreeSet::new(),
            parts: BTreeSet::new(),
            code: BTreeMap::new(),
            opened: BTreeMap::new(),
            shared: Shared::new(&settings, folder.as_deref()),
            account: LedgerAccount::new(
                env::var_os(LEDGER)
                    .map(|path| or_abort("simulated GPU", LEDGER, Ledger::open(path.as_ref()))),
            ),
        };
        let counters = OwnCounters::new(
            folder.as_deref(),
            u32::try_from(visible.len()).unwrap_or(0),
            settings.memory,
        );
        Self {
            counters,
            visible,
            calls: Calls::new(&settings, folder.as_deref()),
            initialized: AtomicBool::new(false),
            inherits_context: AtomicBool::new(false),
            shows_memory: AtomicBool::new(false),
            late_by: AtomicU64::new(0),
            submitted: state.streams.submitted(),
            leaks_file: folder.as_ref().map(|folder| folder.join(LEFT)),
            unmeasured_file: folder.as_ref().map(|folder| folder.join(UNMEASURED)),
            began: Instant::now(),
            settings,
            state: Mutex::new(state),
        }
    }

    pub(crate) fn executes_kernels(&self) -> bool {
        self.settings.kernels == Kernels::Execute
    }

    /// The memory of each device, for the program.
    pub(crate) fn memory(&self) -> Bytes {
        self.shows_memory.store(true, Ordering::Relaxed);
        self.settings.memory
    }

    /// Time since the machine was created.
    pub(crate) fn host_time(&self) -> Nanos {
        Nanos(u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Refuses calls in a forked child that inherited a context, as CUDA does
    /// (<https://docs.pytorch.org/docs/stable/notes/multiprocessing.html>). In other processes,
    /// opens the counters.
    pub(crate) fn usable(&self) -> Result<(), Code> {
        if self.inherits_context.load(Ordering::Relaxed) {
            return Err(Code::NotInitialized);
        }
        self.counters.open();
        Ok(())
    }

    /// Applies the injected latency of a call. Callers do not hold the state, which other threads
    /// may need.
    pub(crate) fn delay(&self, call: Call) {
        let by = self.counters.delay(&self.settings.latencies, call);
        self.late_by.fetch_add(by.0, Ordering::Relaxed);
    }

    pub(crate) fn late_by(&self) -> Nanos {
        Nanos(self.late_by.load(Ordering::Relaxed))
    }

    pub(crate) fn now(&self) -> u64 {
        self.counters.submitted().load(Ordering::Relaxed)
    }

    /// Submits the work of a library to a stream, of which captures keep no account. Callers do not
    /// hold the state.
    pub(crate) fn submit_for_library(&self, stream: usize) {
        let device = current_device();
        if !is_any_active() || !self.state().streams.captures(stream, device) {
            self.submitted.add(stream, device);
        }
    }

    /// Counts a piece of submitted work. Returns the time after it.
    pub(crate) fn tick(&self) -> u64 {
        self.counters.submitted().fetch_add(1, Ordering::Relaxed) + 1
    }
}

impl ForkedState for State {
    fn lock() -> MutexGuard<'static, Self> {
        let state = machine().state();
        torch_allocator::before_fork();
        state
    }

    /// A child cannot use the contexts of its parent, whose memory stays the parent's. Without
    /// contexts, the child uses the devices itself.
    fn start_child(&mut self) {
        let machine = machine();
        torch_allocator::start_child();
        machine.counters.start_child();
        self.attempts.start_child();
        self.shared.start_child();
        if self.devices.iter().any(DeviceMemory::has_context) {
            self.account = LedgerAccount::new(None);
            machine.inherits_context.store(true, Ordering::Relaxed);
        } else {
            self.account.start_child();
        }
    }
}

impl State {
    fn is_unused(&self) -> bool {
        let Self {
            devices,
            streams,
            attempts,
            symbols,
            opened,
            ..
        } = self;
        !devices.iter().any(DeviceMemory::has_context)
            && streams.is_unused()
            && attempts.noted() == 0
            && symbols.is_empty()
            && opened.is_empty()
    }

    /// Requests memory with `get` unless a fault makes the attempt fail. Without a device it is
    /// host memory. Also returns whether the failure was injected.
    pub(crate) fn attempt<T>(
        &mut self,
        machine: &Machine,
        (call, size): (Call, Bytes),
        device: Option<usize>,
        get: impl FnOnce(&mut Self) -> Result<T, Code>,
    ) -> (Result<T, Code>, bool) {
        let held = device
            .and_then(|index| self.devices.get_mut(index))
            .map_or(Bytes::ZERO, DeviceMemory::used);
        self.attempts.open();
        if self.shared.counts_resident() {
            self.look_at_machine(machine);
        }
        let is_faulty =
            |faulty: u32| device.and_then(|index| machine.visible.get(index)) == Some(&faulty);
        let injected =
            machine.settings.faulty_device.is_none_or(is_faulty) && self.attempts.fails(call, size);
        let got = if injected {
            Err(Code::OutOfMemory)
        } else {
            get(self)
        };
        let outcome = match (&got, injected) {
            (_, true) => AttemptOutcome::Injected,
            (Ok(_), _) => AttemptOutcome::Served,
            (Err(_), _) => AttemptOutcome::Refused,
        };
        let number = device
            .and_then(|index| machine.visible.get(index))
            .copied()
            .unwrap_or(0);
        let device = device.map_or(0, |index| index as u32);
        self.attempts.note(&Attempt {
            call,
            size,
            submitted: machine.now(),
            outcome,
            device,
            number,
            held,
        });
        self.look_at_machine(machine);
        (got, injected)
    }

    /// Requests memory of a device with `get`, and counts the request.
    pub(crate) fn request(
        &mut self,
        machine: &Machine,
        request: (Call, Bytes),
        index: usize,
        get: impl FnMut(&mut DeviceMemory) -> Result<u64, Code>,
    ) -> Result<u64, Code> {
        let (got, injected) = self.attempt(machine, request, Some(index), |state| {
            state.on_device(index, get)
        });
        machine.counters.count_allocation(
            index,
            self.devices[index].used(),
            injected,
            got.is_err(),
        );
        got
    }

    /// Runs `act`, which needs a context and may use more memory of a device. The index is the one
    /// that the process sees.
    pub(crate) fn on_device<T>(
        &mut self,
        index: usize,
        mut act: impl FnMut(&mut DeviceMemory) -> Result<T, Code>,
    ) -> Result<T, Code> {
        let (Some(memory), Some(number)) =
            (self.devices.get_mut(index), machine().visible.get(index))
        else {
            return Err(Code::NoDevice);
        };
        let elsewhere = machine().settings.others + self.shared.counted();
        self.account.change(*number, |others| {
            (
                memory.open(others + elsewhere).and_then(|()| act(memory)),
                memory.held(),
            )
        })
    }

    pub(crate) fn release<T>(
        &mut self,
        index: usize,
        act: impl FnOnce(&mut DeviceMemory) -> Result<T, Code>,
    ) -> Result<T, Code> {
        let (Some(memory), Some(number)) =
            (self.devices.get_mut(index), machine().visible.get(index))
        else {
            return Err(Code::InvalidValue);
        };
        let result = act(memory);
        self.account.released(*number, memory.held());
        result
    }

    /// Releases the memory of pools above their thresholds, after a wait of the host.
    pub(crate) fn release_pools(&mut self, machine: &Machine) -> Result<(), Code> {
        for index in self.pools.devices() {
            self.release(index, |memory| Ok(memory.sim().synchronize()?))?;
            let used = self.devices[index].used();
            machine.counters.count_frees(index, used, 0);
        }
        Ok(())
    }

    /// Destroys everything on a device, so that later calls create it again.
    pub(crate) fn reset(&mut self, machine: &'static Machine, index: usize) -> Result<(), Code> {
        machine.usable()?;
        let is_elsewhere = |address: u64| device_of(address) != Some(index);
        let memory = self.devices.get_mut(index).ok_or(Code::InvalidDevice)?;
        let left = memory.left();
        self.contexts.remove_all(index);
        self.peers.retain(|(device, _)| *device != index);
        self.host.free_all_managed(|charge| !is_elsewhere(charge));
        self.streams.reset(index);
        self.pools.reset(index);
        self.graph_memory.reset(index, is_elsewhere);
        self.copied.forget_device(is_elsewhere);
        self.loaded.forget_variables(is_elsewhere);
        self.symbols.retain(|(device, _), _| *device != index);
        self.arrays.retain(|start, _| is_elsewhere(*start as u64));
        self.parts.retain(|(device, _)| *device != index);
        self.code.remove(&index);
        self.opened.retain(|_, opened| is_elsewhere(opened.start));
        self.release(index, |memory| {
            *memory = DeviceMemory::new(index, &machine.settings);
            Ok(())
        })?;
        self.enter_pinned();
        machine
            .counters
            .count_frees(index, Bytes::ZERO, left.allocations);
        self.note_free(machine, index);
        Ok(())
    }

    pub(crate) fn note_free(&mut self, machine: &Machine, index: usize) {
        let Some(held) = self.devices.get_mut(index).map(DeviceMemory::used) else {
            return;
        };
        self.attempts.note_free(machine.now(), index as u32, held);
    }

    pub(crate) fn free_and_total(&mut self) -> Result<(Bytes, Bytes), Code> {
        machine().counters.count_memory_read();
        self.look_at_machine(machine());
        self.account.release_ended();
        self.on_device(current_device(), |memory| Ok(memory.free_and_total()))
    }

    /// The processes that hold memory of a device, by its real number.
    pub(crate) fn holdings(&mut self, number: u32) -> Vec<Holding> {
        if let Some(ledger) = self.account.ledger() {
            return ledger.holdings(number);
        }
        let index = machine()
            .visible
            .iter()
            .position(|visible| *visible == number);
        let held = index.map_or(Bytes::ZERO, |index| self.held(index));
        let own = Holding {
            pid: std::process::id(),
            held,
            pinned: self.devices.iter().map(DeviceMemory::pinned).sum(),
            registered: self.host.registered(),
        };
        (held > Bytes::ZERO).then_some(own).into_iter().collect()
    }

    /// Enters the page-locked memory among the memory that this process holds.
    pub(crate) fn enter_pinned(&self) {
        let pinned = self.devices.iter().map(DeviceMemory::pinned).sum();
        self.account.set_pinned(pinned, self.host.registered());
    }

    /// Enters the memory that this process holds of a device, if kernels execute.
    pub(crate) fn enter_held(&mut self, index: usize) {
        if self.account.ledger().is_none() || self.executions.is_empty() {
            return;
        }
        let held = self.held(index);
        if let Some(number) = machine().visible.get(index) {
            let Ok(()) = self
                .account
                .change(*number, |_| (Ok::<(), std::convert::Infallible>(()), held));
        }
    }

    /// The memory of a device that other processes of the run hold.
    pub(crate) fn held_by_others(&self, index: usize) -> Bytes {
        machine()
            .visible
            .get(index)
            .map_or(Bytes::ZERO, |number| self.account.held_by_others(*number))
    }

    /// The memory that this process holds of a device, with its context. If kernels execute, the
    /// context lives as long as references to it.
    fn held(&mut self, index: usize) -> Bytes {
        let Some(memory) = self.devices.get_mut(index) else {
            return Bytes::ZERO;
        };
        match self.executions.get(index) {
            None => memory.held(),
            Some(execution) if execution.references > 0 => {
                memory.used() + machine().settings.context_overhead
            }
            Some(_) => memory.used(),
        }
    }

    pub(crate) fn device_at(&mut self, address: u64) -> Result<&mut DeviceMemory, Code> {
        device_of(address)
            .and_then(|index| self.devices.get_mut(index))
            .ok_or(Code::InvalidValue)
    }
}

/// The devices in `CUDA_VISIBLE_DEVICES`, up to the first unknown number
/// (<https://docs.nvidia.com/cuda/cuda-c-programming-guide/#env-vars>). Names such as `GPU-...` are
/// unknown too: simulated devices have numbers.
fn visible(count: u32, variable: Option<&str>) -> Vec<u32> {
    let Some(variable) = variable else {
        return (0..count).collect();
    };
    let numbers = variable
        .split(',')
        .map_while(|text| text.trim().parse().ok().filter(|number| *number < count));
    let mut devices = Vec::new();
    for number in numbers {
        if devices.contains(&number) {
            return Vec::new();
        }
        devices.push(number);
    }
    devices
}

thread_local! {
    /// The function of the driver that the thread is calling.
    pub(crate) static FUNCTION: Cell<&'static str> =
        const { Cell::new("a function of the runtime") };
    /// The device of the thread's current context.
    pub(crate) static CURRENT: Cell<Option<usize>> = const { Cell::new(None) };
    /// The handle of the current context, if the program created it.
    pub(crate) static CREATED: Cell<Option<usize>> = const { Cell::new(None) };
}

/// The index of the thread's current device, which is 0 before a choice, even on a machine without
/// devices.
pub(crate) fn current_device() -> usize {
    CURRENT.get().unwrap_or(0)
}

pub(crate) fn set_current_device(index: usize) -> Result<(), Code> {
    if index >= machine().visible.len() {
        return Err(Code::InvalidDevice);
    }
    CURRENT.set(Some(index));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn visible_devices_end_at_the_first_unknown_one_and_do_not_repeat() {
        assert_eq!(visible(4, None), [0, 1, 2, 3]);
        assert_eq!(visible(4, Some("2, 0")), [2, 0]);
        assert_eq!(visible(4, Some("1,7,2")), [1]);
        assert_eq!(visible(4, Some("")), Vec::<u32>::new());
        assert_eq!(visible(4, Some("1,1")), Vec::<u32>::new());
    }
}
