//! The exported functions. Each converts C's arguments for a [`Front`] and a failure into a null
//! pointer or an error code. Panics do not leave this module.

use std::ffi::{CStr, c_char, c_int};
use std::panic::{self, AssertUnwindSafe};
use std::{convert::Infallible, path::Path, ptr, sync::OnceLock};

use harness_allocator::{allocator::MemoryFraction, stats::StatKey, units::Bytes};
use harness_base::files;
use harness_cuda::device::CUstream;
use serde_json::{Map, Value};

use crate::failure::{self, Failure};
use crate::{front::Front, settings::Kind};

/// An upper bound on the devices of one machine.
const MAX_DEVICES: usize = 128;

/// One allocator per device, all of one kind. The first request opens a device's allocator; if that
/// fails, every later request fails too.
struct Allocators {
    kind: Kind,
    devices: [OnceLock<Result<Front, Failure>>; MAX_DEVICES],
}

impl Allocators {
    const fn of(kind: Kind) -> Self {
        Self {
            kind,
            devices: [const { OnceLock::new() }; MAX_DEVICES],
        }
    }

    fn on(&self, device: c_int) -> Result<&Front, Failure> {
        let slot = usize::try_from(device)
            .ok()
            .and_then(|index| self.devices.get(index));
        let slot = slot.ok_or_else(|| Failure::Argument(format!("there is no device {device}")))?;
        slot.get_or_init(|| Front::open(self.kind, device.unsigned_abs()))
            .as_ref()
            .map_err(Clone::clone)
    }

    fn open(&self) -> impl Iterator<Item = &Front> {
        self.devices
            .iter()
            .filter_map(|device| device.get()?.as_ref().ok())
    }

    /// Finds the device that has this address. Addresses of different devices never overlap.
    ///
    /// # Safety
    /// As [`Front::record_stream`].
    unsafe fn record_stream(&self, address: u64, stream: CUstream) -> Result<(), Failure> {
        let mut first = None;
        for front in self.open() {
            // SAFETY: the caller guarantees that the stream lives long enough.
            match unsafe { front.record_stream(address, stream) } {
                Ok(()) => return Ok(()),
                Err(failure) => first = first.or(Some(failure)),
            }
        }
        Err(first.unwrap_or_else(|| {
            Failure::Argument("this library has not allocated any memory yet".to_owned())
        }))
    }
}

/// Runs a call. If it fails, keeps the failure for this thread and returns `otherwise`.
fn answer<T>(call: &str, otherwise: T, body: impl FnOnce() -> Result<T, Failure>) -> T {
    match panic::catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(done)) => done,
        Ok(Err(failure)) => {
            failure::keep(call, &failure);
            otherwise
        }
        Err(_) => {
            failure::keep(
                call,
                &Failure::Argument(
                    "this is a bug of the library: please report it with the text above".to_owned(),
                ),
            );
            otherwise
        }
    }
}

fn size_of_request(size: isize) -> Result<Bytes, Failure> {
    u64::try_from(size)
        .map(Bytes)
        .map_err(|_| Failure::size(size))
}

/// All statistics as JSON, with the names of `torch.cuda.memory_stats()`.
fn json(front: &Front) -> String {
    let stats = front.stats();
    let stats: Map<String, Value> = StatKey::all()
        .map(|key| (key.to_string(), stats.get(key).into()))
        .collect();
    Value::Object(stats).to_string()
}

/// Copies as much of a text as fits, with a final NUL, and returns the length of the whole text.
///
/// # Safety
/// `into` is null, or has room for `capacity` bytes.
unsafe fn copy_text(text: &str, into: *mut c_char, capacity: usize) -> usize {
    if !into.is_null() && capacity > 0 {
        let length = text.len().min(capacity - 1);
        // SAFETY: `into` has room for `length` bytes and the NUL, by the caller's guarantee.
        unsafe {
            ptr::copy_nonoverlapping(text.as_ptr().cast::<c_char>(), into, length);
            into.add(length).write(0);
        }
    }
    text.len()
}

fn write_snapshot(front: &Front, path: &CStr) -> Result<(), Failure> {
    let snapshot = front.snapshot().ok_or(Failure::NotRecorded)?;
    let path = path.to_string_lossy();
    let written = files::write_by(Path::new(&*path), |file| {
        snapshot.write(file).map(Ok::<_, Infallible>)
    });
    written.map(drop).map_err(|error| Failure::Snapshot {
        path: path.into_owned(),
        why: error.to_string(),
    })
}

/// Exports the functions of one allocator. `harness_allocator.h` documents them.
macro_rules! export {
    ($allocators:ident of $kind:expr;
     $malloc:ident $free:ident $record_stream:ident $release_stream:ident $empty_cache:ident
     $set_memory_fraction:ident $stats:ident $snapshot:ident) => {
        static $allocators: Allocators = Allocators::of($kind);

        #[unsafe(no_mangle)]
        unsafe extern "C" fn $malloc(size: isize, device: c_int, stream: CUstream) -> *mut u8 {
            // SAFETY: the header requires a live stream of the program.
            let allocate = || unsafe {
                $allocators
                    .on(device)?
                    .allocate(size_of_request(size)?, stream)
            };
            ptr::with_exposed_provenance_mut(answer(stringify!($malloc), 0, allocate) as usize)
        }

        #[unsafe(no_mangle)]
        extern "C" fn $free(address: *mut u8, _: isize, device: c_int, _: CUstream) {
            answer(stringify!($free), (), || {
                $allocators.on(device)?.free(address.addr() as u64)
            });
        }

        #[unsafe(no_mangle)]
        unsafe extern "C" fn $record_stream(address: *mut u8, stream: CUstream) {
            // SAFETY: the header requires a live stream of the program.
            answer(stringify!($record_stream), (), || unsafe {
                $allocators.record_stream(address.addr() as u64, stream)
            });
        }

        #[unsafe(no_mangle)]
        extern "C" fn $release_stream(device: c_int, stream: CUstream) -> c_int {
            answer(stringify!($release_stream), -1, || {
                $allocators.on(device)?.release_stream(stream).map(|()| 0)
            })
        }

        #[unsafe(no_mangle)]
        extern "C" fn $empty_cache() {
            answer(stringify!($empty_cache), (), || {
                $allocators.open().try_for_each(Front::empty_cache)
            });
        }

        #[unsafe(no_mangle)]
        extern "C" fn $set_memory_fraction(fraction: f64, device: c_int) {
            let wrong =
                || Failure::Argument(format!("a memory fraction is from 0 to 1, not {fraction}"));
            let set = || {
                Ok($allocators
                    .on(device)?
                    .set_memory_fraction(MemoryFraction::new(fraction).ok_or_else(wrong)?))
            };
            answer(stringify!($set_memory_fraction), (), set);
        }

        #[unsafe(no_mangle)]
        unsafe extern "C" fn $stats(device: c_int, text: *mut c_char, capacity: usize) -> usize {
            answer(stringify!($stats), 0, || {
                // SAFETY: the header requires a buffer of this capacity.
                Ok(unsafe { copy_text(&json($allocators.on(device)?), text, capacity) })
            })
        }

        #[unsafe(no_mangle)]
        unsafe extern "C" fn $snapshot(device: c_int, path: *const c_char) -> c_int {
            // SAFETY: the header requires a C string.
            let path = unsafe { CStr::from_ptr(path) };
            answer(stringify!($snapshot), -1, || {
                write_snapshot($allocators.on(device)?, path).map(|()| 0)
            })
        }
    };
}

export! { CACHING of Kind::Caching;
    harness_caching_malloc harness_caching_free harness_caching_record_stream
    harness_caching_release_stream harness_caching_empty_cache harness_caching_set_memory_fraction
    harness_caching_stats harness_caching_snapshot
}
export! { BFC of Kind::Bfc;
    harness_bfc_malloc harness_bfc_free harness_bfc_record_stream harness_bfc_release_stream
    harness_bfc_empty_cache harness_bfc_set_memory_fraction harness_bfc_stats harness_bfc_snapshot
}
export! { RMM_POOL of Kind::RmmPool;
    harness_rmm_pool_malloc harness_rmm_pool_free harness_rmm_pool_record_stream
    harness_rmm_pool_release_stream harness_rmm_pool_empty_cache
    harness_rmm_pool_set_memory_fraction harness_rmm_pool_stats harness_rmm_pool_snapshot
}

/// Returns the last failure of the calling thread.
#[unsafe(no_mangle)]
extern "C" fn harness_allocator_last_error() -> *const c_char {
    failure::last()
}
