//! Shared libraries with the two functions of PyTorch's `CUDAPluggableAllocator`:
//! <https://docs.pytorch.org/docs/stable/notes/cuda.html#using-custom-memory-allocators-for-cuda>
//!
//! The library runs in its own process, the *host* (`harness library-host`). Its CUDA calls are
//! passed to this process and made on the device of the run ([`wire`]). So it works on a simulated
//! device, its segments are known exactly, and a crash ends only the host: the current request
//! fails with [`DeviceError::Library`] and the reason.
//!
//! Its state is inferred from its device calls. Each driver allocation, each piece of a driver pool
//! and each contiguous mapped range is a segment. A block has its requested size. Everything counts
//! in the large pool. The other functions of PyTorch's interface are optional. Without them
//! [`Allocator::record_stream`] and [`Allocator::empty_cache`] do nothing.

mod accounts;
mod held;
mod host;
pub mod wire;

use std::time::{Duration, Instant};
use std::{fmt, path::PathBuf, str::FromStr};

pub use self::host::{name_program, program};
use self::wire::{Code, LibraryCall, LibraryProgram, Order, Reply, Timed};
use self::{held::Held, host::Host};
use super::{
    Allocation, Allocator, AllocatorError, OomCause, Request, counted_by, live::out_of_memory,
};
use crate::device::{Device, DeviceError, DevicePtr, MemoryRange, PoolId, StreamId};
use crate::units::Bytes;

/// The alignment that tensors of the widest number type need.
const ALIGNMENT: u64 = 16;

const NOT_PASSED_ON: &str = "a CUDA function that is not passed on to the device of the run";

/// A library and the names of its functions.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct LibrarySpec {
    pub path: PathBuf,
    /// `void *alloc(ssize_t size, int device, CUstream stream)`.
    pub alloc: String,
    /// `void free(void *ptr, ssize_t size, int device, CUstream stream)`.
    pub free: String,
    /// `void record_stream(void *ptr, CUstream stream)`, as `set_record_stream_fn` takes it.
    pub record_stream: Option<String>,
    /// `void empty_cache(void)`, as `set_reset_fn` takes it.
    pub empty_cache: Option<String>,
}

impl LibrarySpec {
    pub const PATH: &'static str = "path";
    /// The keys of the functions, and whether they are required.
    pub const FUNCTIONS: [(&'static str, bool); 4] = [
        ("alloc", true),
        ("free", true),
        ("record_stream", false),
        ("empty_cache", false),
    ];

    pub fn check_file(&self) -> Result<(), DeviceError> {
        if self.path.exists() {
            return Ok(());
        }
        let what = format!("the library `{}`", self.path.display());
        Err(DeviceError::Unavailable {
            what,
            why: "there is no such file: it is optional, and was not built".to_owned(),
        })
    }

    pub fn functions(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let names = [
            Some(&self.alloc),
            Some(&self.free),
            self.record_stream.as_ref(),
            self.empty_cache.as_ref(),
        ];
        Self::FUNCTIONS
            .into_iter()
            .zip(names)
            .filter_map(|((key, _), name)| Some((key, name?.as_str())))
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LibrarySpecError {
    #[error("a library needs `{0}`")]
    Missing(&'static str),
    #[error(
        "unknown key `{0}`: the keys are `path`, `alloc`, `free`, `record_stream` and `empty_cache`"
    )]
    Unknown(String),
}

impl FromStr for LibrarySpec {
    type Err = LibrarySpecError;

    /// Parses the text between the parentheses of an allocator:
    /// `path:./my_alloc.so,alloc:my_malloc,free:my_free`.
    fn from_str(text: &str) -> Result<Self, LibrarySpecError> {
        let items = text.split(',').filter(|item| !item.is_empty());
        let items: Vec<(&str, &str)> = items
            .map(|item| item.split_once(':').unwrap_or((item, "")))
            .collect();
        let known = |key: &str| {
            key == Self::PATH || Self::FUNCTIONS.iter().any(|(function, _)| *function == key)
        };
        if let Some((key, _)) = items.iter().find(|(key, _)| !known(key)) {
            return Err(LibrarySpecError::Unknown((*key).to_owned()));
        }
        let value = |key: &str| {
            items
                .iter()
                .find(|(name, value)| *name == key && !value.is_empty())
                .map(|(_, value)| (*value).to_owned())
        };
        Ok(Self {
            path: value(Self::PATH)
                .ok_or(LibrarySpecError::Missing(Self::PATH))?
                .into(),
            alloc: value("alloc").ok_or(LibrarySpecError::Missing("alloc"))?,
            free: value("free").ok_or(LibrarySpecError::Missing("free"))?,
            record_stream: value("record_stream"),
            empty_cache: value("empty_cache"),
        })
    }
}

impl fmt::Display for LibrarySpec {
    /// Formats the text between the parentheses of an allocator.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "path:{}", self.path.display())?;
        self.functions()
            .try_for_each(|(key, name)| write!(f, ",{key}:{name}"))
    }
}

#[derive(Debug)]
pub struct LibraryAllocator {
    spec: LibrarySpec,
    state: State,
    held: Held,
    /// Uses by other streams to pass to the library before its next call:
    /// [`Allocator::record_stream`] has no device.
    uses: Vec<(DevicePtr, StreamId)>,
}

#[derive(Debug)]
enum State {
    /// It starts with the first request.
    NotStarted,
    Running(Host),
    Ended(DeviceError),
}

/// Events during a call of the library.
#[derive(Debug, Default)]
struct Seen {
    /// The device's first error other than out of memory.
    refused: Option<DeviceError>,
    unanswered: Vec<String>,
    /// The largest allocation that the driver refused.
    refused_size: Option<Bytes>,
    /// True if the timed part of a program is running.
    is_timed: bool,
    /// The device's time for calls in that part.
    driver: Duration,
    timed: Option<Timed>,
}

impl LibraryAllocator {
    /// Makes the allocator. The first request loads the library.
    pub fn new(spec: LibrarySpec) -> Self {
        let held = Held::new(spec.path.display().to_string());
        Self {
            spec,
            state: State::NotStarted,
            held,
            uses: Vec::new(),
        }
    }

    fn failed(&self, why: impl Into<String>) -> DeviceError {
        DeviceError::Library {
            path: self.spec.path.display().to_string(),
            why: why.into(),
        }
    }

    /// Makes the library execute an order, after the pending uses by streams. `what` describes the
    /// order.
    fn order(
        &mut self,
        device: &mut dyn Device,
        order: &Order,
        what: &str,
    ) -> Result<(u64, Seen), DeviceError> {
        for (address, stream) in std::mem::take(&mut self.uses) {
            let told = Order::RecordStream {
                address: address.0,
                stream: stream.0,
            };
            self.order_now(
                device,
                &told,
                &format!(
                    "it was told that stream {} uses the memory at {address}",
                    stream.0
                ),
            )?;
        }
        self.order_now(device, order, what)
    }

    /// Makes the library execute an order, and makes its device calls meanwhile.
    fn order_now(
        &mut self,
        device: &mut dyn Device,
        order: &Order,
        what: &str,
    ) -> Result<(u64, Seen), DeviceError> {
        if let State::NotStarted = self.state {
            self.state =
                State::Running(Host::start(&self.spec.path).map_err(|why| self.failed(why))?);
            self.order_now(device, &Order::Load(self.spec.clone()), "it was loaded")?;
        }
        let mut seen = Seen::default();
        let mut said = Some(order.clone());
        loop {
            let host = match &mut self.state {
                State::Running(host) => host,
                State::Ended(error) => return Err(error.clone()),
                State::NotStarted => return Err(self.failed("it is not running")),
            };
            said.take().into_iter().for_each(|order| host.send(&order));
            match host.receive() {
                Some(Reply::Timing(is_timed)) => seen.is_timed = is_timed,
                Some(Reply::Timed(timed)) => {
                    seen.timed = Some(timed);
                    return seen.refused.take().map_or(Ok((0, seen)), Err);
                }
                Some(Reply::Done(value)) => {
                    return seen.refused.take().map_or(Ok((value, seen)), Err);
                }
                Some(Reply::Refused(why)) => {
                    let error = self.failed(why);
                    self.state = State::Ended(error.clone());
                    return Err(error);
                }
                Some(Reply::Unanswered(function)) => seen.unanswered.push(function),
                Some(Reply::Call(call)) => {
                    let (code, value) = self.serve(device, call, &mut seen);
                    said = Some(Order::Answer { code, value });
                }
                None => {
                    let how = match host.end() {
                        Ok(()) if *order == Order::End => return Ok((0, seen)),
                        Ok(()) => "it ended its process".to_owned(),
                        Err(how) => how,
                    };
                    let error = self.failed(format!("{how} while {what}"));
                    self.state = State::Ended(error.clone());
                    return Err(error);
                }
            }
        }
    }

    /// Makes the library run a program. Returns the refused requests and the time of the timed
    /// part: the time of the library's functions in its process, and the device's time for their
    /// calls. Communication between the processes is excluded. A device call leaves the library's
    /// CPU caches cold, which is part of the time.
    ///
    /// The allocations are not validated. There must be no live allocations before, and none
    /// remain. Fails with [`DeviceError`] of a broken device or library.
    pub fn time(
        &mut self,
        device: &mut dyn Device,
        program: LibraryProgram,
    ) -> Result<Timed, DeviceError> {
        let (_, seen) = self.order(device, &Order::Time(program), "it was timed")?;
        if let Some(function) = seen.unanswered.first() {
            return Err(self.failed(format!("it called {function}, {NOT_PASSED_ON}")));
        }
        let Some(timed) = seen.timed else {
            return Err(self.failed("its process returned no time"));
        };
        let driver = u64::try_from(seen.driver.as_nanos()).unwrap_or(u64::MAX);
        Ok(Timed {
            nanos: timed.nanos.saturating_add(driver),
            ..timed
        })
    }

    fn serve(
        &mut self,
        device: &mut dyn Device,
        call: LibraryCall,
        seen: &mut Seen,
    ) -> (Code, u64) {
        let began = seen.is_timed.then(Instant::now);
        let done = self.held.call(device, call);
        if let Some(began) = began {
            seen.driver += began.elapsed();
        }
        match done {
            Ok(value) => (Code::Success, value),
            Err(DeviceError::OutOfMemory { requested, .. }) => {
                seen.refused_size = seen.refused_size.max(Some(requested));
                (Code::OutOfMemory, 0)
            }
            Err(DeviceError::NotReady(_)) => (Code::NotReady, 0),
            Err(error) => {
                let code = match error {
                    DeviceError::UnknownHandle { .. } => Code::InvalidHandle,
                    DeviceError::Unavailable { .. } => Code::NotSupported,
                    _ => Code::InvalidValue,
                };
                seen.refused.get_or_insert(error);
                (code, 0)
            }
        }
    }

    /// The reason why a request returned null.
    fn refusal(&mut self, device: &mut dyn Device, size: Bytes, seen: &Seen) -> AllocatorError {
        if let Some(function) = seen.unanswered.first() {
            let why = format!(
                "`{}` called {function}, {NOT_PASSED_ON}, and returned null",
                self.spec.alloc
            );
            return self.failed(why).into();
        }
        match device.free_memory() {
            Ok(free) => {
                let refused = seen.refused_size.unwrap_or(size);
                out_of_memory(
                    &mut self.held.accounts.stats,
                    device,
                    [size, refused],
                    OomCause::Device { free },
                    None,
                )
            }
            Err(error) => error.into(),
        }
    }
}

impl Allocator for LibraryAllocator {
    fn name(&self) -> &'static str {
        "library"
    }

    fn check_device(&self, _: &mut dyn Device) -> Result<(), DeviceError> {
        self.spec.check_file()
    }

    fn allocate(
        &mut self,
        device: &mut dyn Device,
        request: Request,
    ) -> Result<Allocation, AllocatorError> {
        let Request { size, stream } = request;
        if size == Bytes::ZERO {
            return Ok(Allocation::null(request));
        }
        if let Some(limit) = self.held.accounts.exceeded_limit(size) {
            return Err(out_of_memory(
                &mut self.held.accounts.stats,
                device,
                [size; 2],
                OomCause::Fraction { limit },
                None,
            ));
        }
        let number = self.held.accounts.stats.allocation.all.allocated + 1;
        let what = format!(
            "`{}` allocated {size} on stream {}, request {number}",
            self.spec.alloc, stream.0
        );
        let (address, seen) = self.order(
            device,
            &Order::Allocate {
                size: size.0,
                stream: stream.0,
            },
            &what,
        )?;
        if address == 0 {
            return Err(self.refusal(device, size, &seen));
        }
        if !address.is_multiple_of(ALIGNMENT) {
            let why = format!(
                "`{}` returned {}, which is not a multiple of {ALIGNMENT} bytes",
                self.spec.alloc,
                DevicePtr(address)
            );
            return Err(self.failed(why).into());
        }
        let range = MemoryRange::new(DevicePtr(address), size);
        Ok(Allocation::new(
            range,
            request,
            self.held.accounts.handed_out(range, stream),
        ))
    }

    fn free(&mut self, device: &mut dyn Device, allocation: Allocation) -> Result<(), DeviceError> {
        if allocation.is_null() {
            return Ok(());
        }
        let (address, size) = (allocation.ptr(), allocation.requested());
        let slot = self.held.accounts.slot_of(&allocation)?;
        let what = format!("`{}` freed {size} at {address}", self.spec.free);
        // Recorded first, because the library may return the memory to the driver.
        self.held.accounts.taken_back(slot);
        let (_, seen) = self.order(
            device,
            &Order::Free {
                address: address.0,
                size: size.0,
                stream: allocation.stream().0,
            },
            &what,
        )?;
        match seen.unanswered.first() {
            Some(function) => Err(self.failed(format!(
                "`{}` called {function}, {NOT_PASSED_ON}",
                self.spec.free
            ))),
            None => Ok(()),
        }
    }

    fn record_stream(
        &mut self,
        allocation: &Allocation,
        stream: StreamId,
    ) -> Result<(), DeviceError> {
        if allocation.is_null() {
            return Ok(());
        }
        self.held.accounts.slot_of(allocation)?;
        if self.spec.record_stream.is_some() {
            self.uses.push((allocation.ptr(), stream));
        }
        Ok(())
    }

    fn empty_cache(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        if let Some(function) = self
            .spec
            .empty_cache
            .clone()
            .filter(|_| matches!(self.state, State::Running(_)))
        {
            self.order(
                device,
                &Order::EmptyCache,
                &format!("`{function}` emptied the cache"),
            )?;
        }
        self.held.empty_pool(device)
    }

    fn driver_pool(&self) -> Option<PoolId> {
        self.held.pool()
    }

    counted_by!(held.accounts);

    /// Stops the host; its exit handlers still run.
    fn close(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        let ended = match self.state {
            State::Running(_) => self
                .order(device, &Order::End, "the process was asked to end")
                .map(drop),
            State::NotStarted | State::Ended(_) => Ok(()),
        };
        (self.state, self.uses) = (State::NotStarted, Vec::new());
        let cleared = self.held.clear(device);
        ended.and(cleared)
    }
}
