//! The state of the double: what the process called so far, and the GPUs with what it holds of them.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::config::{Config, HANGS};
use crate::mapping::Mapping;
use crate::memory::{GRANULARITY, code, map, unmap};
use crate::pool::Pools;
use crate::staging::{CALLS, PROCESSES, REPORT};
use crate::work::{Kernel, Work};

/// All state of the double, once in a process.
pub(crate) struct World {
    pub(crate) config: Config,
    pub(crate) initialised: bool,
    pub(crate) nvml_initialised: bool,
    pub(crate) gpus: Vec<Gpu>,
    calls: BTreeMap<&'static str, u64>,
    /// Where the name of each call is written.
    list: Option<OsString>,
}

/// One GPU, with what the process holds of it while its primary context lives.
pub(crate) struct Gpu {
    pub(crate) ordinal: usize,
    pub(crate) has_mapping: bool,
    pub(crate) has_pools: bool,
    pub(crate) references: u32,
    pub(crate) streams: BTreeMap<usize, Stream>,
    pub(crate) events: BTreeMap<usize, Event>,
    pub(crate) modules: BTreeMap<usize, Module>,
    capacity: u64,
    overhead: u64,
    others: u64,
    /// Where other programs write what they hold.
    processes: Option<PathBuf>,
    pub(crate) in_container: bool,
    /// Address and asked-for size of what is allocated.
    allocations: BTreeMap<u64, u64>,
    /// Addresses and pages, apart.
    pub(crate) mapping: Mapping,
    /// Stream-ordered pools.
    pub(crate) pools: Pools,
    /// Queued work by the time when everything in front of it is done, then by order of submission.
    queue: BTreeMap<(Instant, u64), Work>,
    submitted: u64,
    next_handle: usize,
    /// The code that every call gets since work broke the context.
    broken: Option<u32>,
    wrong_write: Option<crate::WrongWrite>,
    blind_verify: bool,
    fills: u64,
}

/// A stream: work in order. It is idle from `ready_at` on.
pub(crate) struct Stream {
    pub(crate) ready_at: Instant,
}

/// An event, and when what was in front of its last record is done.
pub(crate) struct Event {
    pub(crate) done_at: Option<Instant>,
    /// Whether it keeps the time of its record.
    pub(crate) timing: bool,
}

/// A loaded module: its text, its kernels by handle, its one variable.
pub(crate) struct Module {
    pub(crate) text: String,
    pub(crate) kernels: BTreeMap<usize, Kernel>,
    pub(crate) findings: u64,
    /// The variable's size in bytes, as the text declares it.
    pub(crate) findings_size: u64,
}

impl Module {
    fn unmap(&self) {
        if self.findings_size > 0 {
            unmap(self.findings, self.findings_size);
        }
    }
}

/// The name of the variable of a module that has one.
pub(crate) const FINDINGS: &str = "harness_findings";

/// How many bytes the text declares for the variable; zero where it declares none.
fn declared_size(text: &str) -> u64 {
    let words = text.split(&format!(".b64 {FINDINGS}[")).nth(1).and_then(|rest| rest.split(']').next());
    words.and_then(|words| words.parse::<u64>().ok()).map_or(0, |words| 8 * words)
}

/// The state, made from the environment at the first call.
pub(crate) fn world() -> MutexGuard<'static, Option<World>> {
    static WORLD: Mutex<Option<World>> = Mutex::new(None);
    let mut world = WORLD.lock().unwrap_or_else(PoisonError::into_inner);
    if world.is_none() {
        let config = Config::from_env().unwrap_or_else(|sentence| {
            eprintln!("driver double: {sentence}");
            std::process::abort()
        });
        *world = Some(World::new(config));
    }
    world
}

/// Counts the call, fails it where the configuration says so, and runs it otherwise. Answers with the driver's code.
pub(crate) fn call(function: &'static str, body: impl FnOnce(&mut World) -> Result<(), u32>) -> u32 {
    let mut world = world();
    let Some(world) = world.as_mut() else { return code::NOT_INITIALIZED };
    while world.config.hang.as_deref() == Some(function) {
        // The lock is held meanwhile: in a driver that hangs, every later call hangs too.
        thread::sleep(Duration::from_secs(60));
    }
    world.count(function).and_then(|()| body(world)).err().unwrap_or(0)
}

/// A call that needs the current context: as [`call`], with its GPU, whose due work is done first.
pub(crate) fn with_context(function: &'static str, body: impl FnOnce(&mut Gpu) -> Result<(), u32>) -> u32 {
    call(function, |world| body(world.current()?))
}

/// A call that waits until the time that `until` tells, without holding the lock, so that other threads may call.
pub(crate) fn wait(function: &'static str, until: impl FnOnce(&mut Gpu) -> Result<Instant, u32>) -> u32 {
    let mut end = None;
    let answer = with_context(function, |gpu| {
        end = Some(until(gpu)?);
        Ok(())
    });
    let Some(end) = end.filter(|_| answer == 0) else { return answer };
    sleep_until(end);
    world().as_mut().map_or(code::NOT_INITIALIZED, |world| world.current().err().unwrap_or(0))
}

/// A call that waits as [`wait`], and then does something. It counts as one call.
pub(crate) fn wait_and(
    function: &'static str,
    until: impl FnOnce(&mut Gpu) -> Result<Instant, u32>,
    body: impl FnOnce(&mut Gpu) -> Result<(), u32>,
) -> u32 {
    match wait(function, until) {
        0 => world().as_mut().map_or(code::NOT_INITIALIZED, |world| world.current().and_then(body).err().unwrap_or(0)),
        refused => refused,
    }
}

/// A wait of the host behind which pools give memory back.
pub(crate) fn synchronize(function: &'static str, until: impl FnOnce(&mut Gpu) -> Result<Instant, u32>) -> u32 {
    let answer = wait(function, until);
    if answer == 0
        && let Some(gpu) = world().as_mut().and_then(|world| world.current().ok())
    {
        gpu.pools.release();
    }
    answer
}

fn sleep_until(end: Instant) {
    while let Some(left) = end.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
        thread::sleep(left);
    }
}

thread_local! {
    /// The calling thread's context: the GPU's ordinal plus one, 0 for none.
    static CURRENT: Cell<usize> = const { Cell::new(0) };
}

impl World {
    fn new(config: Config) -> Self {
        let gpus = (0..config.devices as usize).map(|ordinal| Gpu::new(&config, ordinal)).collect();
        Self { config, initialised: false, nvml_initialised: false, gpus, calls: BTreeMap::new(), list: std::env::var_os(CALLS) }
    }

    fn count(&mut self, function: &'static str) -> Result<(), u32> {
        if let Some(path) = &self.list {
            append(path, &format!("{function}\n"));
        }
        let calls = self.calls.entry(function).or_default();
        *calls += 1;
        let failure = self.config.fail.iter().find(|failure| failure.function == function && [0, *calls].contains(&failure.nth));
        match failure {
            None => Ok(()),
            // Every later call hangs too, as with a driver that is lost.
            Some(failure) if failure.code == HANGS => loop {
                thread::park();
            },
            Some(failure) => Err(failure.code),
        }
    }

    /// The GPU with an ordinal, once the driver is initialised.
    pub(crate) fn gpu(&mut self, ordinal: i32) -> Result<&mut Gpu, u32> {
        if !self.initialised {
            return Err(code::NOT_INITIALIZED);
        }
        usize::try_from(ordinal).ok().and_then(|ordinal| self.gpus.get_mut(ordinal)).ok_or(code::INVALID_DEVICE)
    }

    /// Makes a context the calling thread's; contexts are numbered as in [`CURRENT`].
    pub(crate) fn set_current(&mut self, context: usize) -> Result<(), u32> {
        if context != 0 && self.gpus.get(context - 1).is_none_or(|gpu| gpu.references == 0) {
            return Err(code::INVALID_CONTEXT);
        }
        CURRENT.set(context);
        Ok(())
    }

    /// The calling thread's context, 0 for none.
    pub(crate) fn current_context() -> usize {
        CURRENT.get()
    }

    fn current(&mut self) -> Result<&mut Gpu, u32> {
        let ordinal = CURRENT.get().checked_sub(1).ok_or(code::INVALID_CONTEXT)?;
        let gpu = self.gpus.get_mut(ordinal).filter(|gpu| gpu.references > 0).ok_or(code::INVALID_CONTEXT)?;
        gpu.settle();
        gpu.broken.map_or(Ok(gpu), Err)
    }

    /// The context that a stream is of. The default stream is the calling thread's context's.
    pub(crate) fn context_of(&mut self, stream: usize) -> Result<usize, u32> {
        if stream == 0 {
            return self.current().map(|gpu| gpu.ordinal + 1);
        }
        self.gpus.iter().position(|gpu| gpu.streams.contains_key(&stream)).map(|ordinal| ordinal + 1).ok_or(code::INVALID_HANDLE)
    }

    /// Gives a reference to a GPU's context back; the last one destroys it and reports what was left in it.
    pub(crate) fn release(&mut self, ordinal: i32) -> Result<(), u32> {
        let fresh = Gpu::new(&self.config, ordinal as usize);
        let gpu = self.gpu(ordinal)?;
        gpu.references = gpu.references.checked_sub(1).ok_or(code::INVALID_CONTEXT)?;
        if gpu.references == 0 {
            gpu.report();
            gpu.unmap_everything();
            *gpu = fresh;
        }
        Ok(())
    }
}

impl Gpu {
    fn new(config: &Config, ordinal: usize) -> Self {
        Self {
            ordinal,
            has_mapping: config.mapping,
            has_pools: config.pools,
            references: 0,
            // The default stream's handle is null.
            streams: BTreeMap::from([(0, Stream { ready_at: Instant::now() })]),
            events: BTreeMap::new(),
            modules: BTreeMap::new(),
            capacity: config.capacity,
            overhead: config.overhead,
            others: config.others,
            processes: std::env::var_os(PROCESSES).map(PathBuf::from),
            in_container: config.container,
            allocations: BTreeMap::new(),
            mapping: Mapping::default(),
            pools: Pools::default(),
            queue: BTreeMap::new(),
            submitted: 0,
            // Handles of different GPUs are different ones.
            next_handle: 0x1000 + (ordinal << 32),
            broken: None,
            wrong_write: config.wrong_write,
            blind_verify: config.blind_verify,
            fills: 0,
        }
    }

    /// What this process holds: its context, its allocations in whole granules, its pages and its pools.
    pub(crate) fn process_used(&self) -> u64 {
        let context = if self.references > 0 { self.overhead } else { 0 };
        context
            + self.allocations.values().map(|size| size.next_multiple_of(GRANULARITY)).sum::<u64>()
            + self.mapping.charged()
            + self.pools.reserved()
    }

    /// What a program without a file of its own holds.
    pub(crate) fn others(&self) -> u64 {
        self.others
    }

    /// Other programs that still run, by their numbers, with what they hold.
    pub(crate) fn processes(&self) -> BTreeMap<u32, u64> {
        let files = self.processes.iter().filter_map(|folder| fs::read_dir(folder).ok()).flatten().flatten();
        let held = files.filter_map(|file| {
            let number = file.file_name().to_str()?.parse().ok()?;
            let held = fs::read_to_string(file.path()).ok()?.trim().parse().ok()?;
            Path::new("/proc").join(file.file_name()).exists().then_some((number, held))
        });
        held.collect()
    }

    /// What all programs hold together.
    pub(crate) fn used(&self) -> u64 {
        self.process_used() + self.others + self.processes().values().sum::<u64>()
    }

    /// What no program holds.
    pub(crate) fn free(&self) -> u64 {
        self.capacity.saturating_sub(self.used())
    }

    /// A handle never used before in this context.
    pub(crate) fn handle(&mut self) -> usize {
        self.next_handle += 16;
        self.next_handle
    }

    /// Takes memory: address space of the host, which costs nothing until it is touched.
    pub(crate) fn allocate(&mut self, size: u64) -> Result<u64, u32> {
        if size == 0 {
            return Err(code::INVALID_VALUE);
        }
        if size.checked_next_multiple_of(GRANULARITY).is_none_or(|charged| charged > self.free()) {
            return Err(code::OUT_OF_MEMORY);
        }
        let address = map(size)?;
        self.allocations.insert(address, size);
        Ok(address)
    }

    /// Gives memory back.
    pub(crate) fn deallocate(&mut self, address: u64) -> Result<(), u32> {
        let size = self.allocations.remove(&address).ok_or(code::INVALID_VALUE)?;
        unmap(address, size);
        Ok(())
    }

    /// Whether an allocation begins there.
    pub(crate) fn is_allocation(&self, address: u64) -> bool {
        self.allocations.contains_key(&address)
    }

    /// When all work of all streams is done.
    pub(crate) fn idle_at(&self) -> Instant {
        self.streams.values().map(|stream| stream.ready_at).chain(self.queue.keys().map(|key| key.0)).max().unwrap_or_else(Instant::now)
    }

    /// The stream with a handle, null being the default stream.
    pub(crate) fn stream(&mut self, handle: usize) -> Result<&mut Stream, u32> {
        self.streams.get_mut(&handle).ok_or(code::INVALID_HANDLE)
    }

    /// When the stream's work so far is done: now or later.
    pub(crate) fn ready_at(&mut self, stream: usize) -> Result<Instant, u32> {
        Ok(self.stream(stream)?.ready_at.max(Instant::now()))
    }

    /// Queues work behind the stream's work so far.
    pub(crate) fn submit(&mut self, stream: usize, work: Work) -> Result<(), u32> {
        let start = self.ready_at(stream)?;
        self.submitted += 1;
        self.stream(stream)?.ready_at = start + work.duration();
        self.queue.insert((start, self.submitted), work);
        self.settle();
        self.broken.map_or(Ok(()), Err)
    }

    /// Does the work that is due, in the order of the streams' time.
    fn settle(&mut self) {
        let now = Instant::now();
        while let Some(entry) = self.queue.first_entry().filter(|entry| entry.key().0 <= now) {
            let work = entry.remove();
            if self.broken.is_none() {
                self.broken = self.run(&work).err();
            }
        }
    }

    fn run(&mut self, work: &Work) -> Result<(), u32> {
        if let Work::Free { address } = *work {
            self.pools.finish(address);
            return Ok(());
        }
        if self.blind_verify && matches!(work, Work::Verify { .. }) {
            return Ok(());
        }
        let Some((address, len)) = work.touches() else { return Ok(()) };
        if !self.is_live(address, len) || work.finds_at().is_some_and(|(address, len)| !self.is_live(address, len)) {
            return Err(code::ILLEGAL_ADDRESS);
        }
        if work.is_fill() {
            self.fills += 1;
        }
        let wrong = self.wrong_write.filter(|wrong| work.is_fill() && wrong.nth == self.fills);
        // SAFETY: the bytes and the findings are wholly inside live memory of this GPU, as was just seen, and the lock of the world is held.
        unsafe { work.run(wrong.map(|wrong| wrong.offset)) }
    }

    /// Whether the bytes are inside one allocation, also of a pool, mapped and accessible, or inside one module's variable.
    pub(crate) fn is_live(&self, address: u64, len: u64) -> bool {
        let inside = |start: u64, size: u64| address >= start && len <= size && address - start <= size - len;
        let allocation = self.allocations.range(..=address).next_back();
        allocation.is_some_and(|(start, size)| inside(*start, *size))
            || self.mapping.is_live(address, len)
            || self.pools.is_live(address, len)
            || self.modules.values().any(|module| inside(module.findings, module.findings_size))
    }

    /// Makes a module of its text, with memory for its variable.
    pub(crate) fn load(&mut self, text: String) -> Result<usize, u32> {
        let findings_size = declared_size(&text);
        let findings = if findings_size > 0 { map(findings_size)? } else { 0 };
        let handle = self.handle();
        self.modules.insert(handle, Module { text, kernels: BTreeMap::new(), findings, findings_size });
        Ok(handle)
    }

    /// Removes a module.
    pub(crate) fn unload(&mut self, handle: usize) -> Result<(), u32> {
        let module = self.modules.remove(&handle).ok_or(code::INVALID_HANDLE)?;
        module.unmap();
        Ok(())
    }

    /// The kernel with a function handle.
    pub(crate) fn kernel(&self, function: usize) -> Result<Kernel, u32> {
        self.modules.values().find_map(|module| module.kernels.get(&function)).copied().ok_or(code::INVALID_HANDLE)
    }

    fn report(&self) {
        let Some(path) = std::env::var_os(REPORT) else { return };
        let (reservations, pages) = self.mapping.left();
        let (pools, pooled) = self.pools.left();
        let line = format!(
            "device {} left: {} allocations, {reservations} reservations, {pages} pages, {pools} pools, {} streams, {} events, {} modules, \
             {} pieces of work\n",
            self.ordinal,
            self.allocations.len() + pooled,
            self.streams.len() - 1,
            self.events.len(),
            self.modules.len(),
            self.queue.len()
        );
        append(&path, &line);
    }

    fn unmap_everything(&mut self) {
        for (address, size) in std::mem::take(&mut self.allocations) {
            unmap(address, size);
        }
        self.mapping.clear();
        self.pools.clear();
        for module in std::mem::take(&mut self.modules).into_values() {
            module.unmap();
        }
    }
}

/// Writes behind what stands in a file of the staging.
fn append(path: &OsStr, text: &str) {
    let written = OpenOptions::new().create(true).append(true).open(path).and_then(|mut file| file.write_all(text.as_bytes()));
    if let Err(error) = written {
        eprintln!("driver double: cannot write to {}: {error}", path.display());
    }
}
