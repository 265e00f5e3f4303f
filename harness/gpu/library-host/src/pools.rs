//! Stream-ordered pools, shared by the runtime and the driver, and the device attributes that
//! announce them. <https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MALLOC__ASYNC.html>

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU32, Ordering};

use harness_allocator::allocator::library::wire::{Code, LibraryCall, PoolFigure};

use crate::connection::{ask, unanswered};
use crate::handles::{Pool, Stream, put};

/// `CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED` and
/// `CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED`.
const POOLS_SUPPORTED: c_int = 115;
const MAPPING_SUPPORTED: c_int = 102;
/// `CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR` and `…_MINOR`. An H100's values; allocators run
/// no kernels that depend on them.
const CAPABILITY: [(c_int, c_int); 2] = [(75, 9), (76, 0)];

/// The pool of allocations that name none.
static CURRENT: AtomicU32 = AtomicU32::new(0);

pub(crate) fn current() -> Pool {
    Pool::new(CURRENT.load(Ordering::Relaxed))
}

pub(crate) fn set_current(pool: Pool) -> Result<(), Code> {
    CURRENT.store(pool.number()?, Ordering::Relaxed);
    Ok(())
}

pub(crate) fn destroy(pool: Pool) -> Result<(), Code> {
    let pool = pool.number()?;
    ask(LibraryCall::DestroyPool(pool))?;
    // As in CUDA, the default pool then becomes the current one.
    let _ = CURRENT.compare_exchange(pool, 0, Ordering::Relaxed, Ordering::Relaxed);
    Ok(())
}

pub(crate) fn allocate(pool: Pool, size: u64, stream: Stream) -> Result<u64, Code> {
    ask(LibraryCall::AllocateFrom {
        pool: pool.number()?,
        size,
        stream: stream.number()?,
    })
}

/// A pool attribute by its number, which the runtime and the driver share.
enum Attribute {
    /// A permission to reuse memory, as an `int`, and whether the harness's device uses it.
    Reuse(bool),
    /// A memory size in 64 bits.
    Figure(PoolFigure),
}

const fn attribute(number: c_int) -> Option<Attribute> {
    Some(match number {
        1 => Attribute::Reuse(true),
        2 | 3 => Attribute::Reuse(false),
        4 => Attribute::Figure(PoolFigure::Threshold),
        5 => Attribute::Figure(PoolFigure::Reserved),
        6 => Attribute::Figure(PoolFigure::ReservedHigh),
        7 => Attribute::Figure(PoolFigure::Used),
        8 => Attribute::Figure(PoolFigure::UsedHigh),
        _ => return None,
    })
}

/// # Safety
/// The pointer is null, or points to the attribute's value.
pub(crate) unsafe fn set_attribute(
    pool: Pool,
    number: c_int,
    value: *const c_void,
) -> Result<(), Code> {
    if value.is_null() {
        return Err(Code::InvalidValue);
    }
    match attribute(number).ok_or(Code::InvalidValue)? {
        // The device may ignore a permission.
        Attribute::Reuse(_) => pool.number().map(drop),
        Attribute::Figure(PoolFigure::Threshold) => {
            // SAFETY: the threshold has 64 bits.
            let bytes = unsafe { value.cast::<u64>().read_unaligned() };
            ask(LibraryCall::SetThreshold {
                pool: pool.number()?,
                bytes,
            })
            .map(drop)
        }
        Attribute::Figure(_) => Err(unanswered("cudaMemPoolSetAttribute for a high-water mark")),
    }
}

/// # Safety
/// The pointer is null, or writable with the size of the attribute's value.
pub(crate) unsafe fn get_attribute(
    pool: Pool,
    number: c_int,
    value: *mut c_void,
) -> Result<(), Code> {
    let pool = pool.number()?;
    // SAFETY: guaranteed by the caller; permissions have 32 bits, sizes 64.
    unsafe {
        match attribute(number).ok_or(Code::InvalidValue)? {
            Attribute::Reuse(is_used) => {
                put(value.cast::<MaybeUninit<c_int>>().as_mut(), is_used.into())
            }
            Attribute::Figure(figure) => put(
                value.cast::<MaybeUninit<u64>>().as_mut(),
                ask(LibraryCall::Pool { pool, figure })?,
            ),
        }
    }
}

pub(crate) fn device_attribute(name: &str, number: c_int) -> Result<c_int, Code> {
    if let Some(&(_, part)) = CAPABILITY
        .iter()
        .find(|(attribute, _)| *attribute == number)
    {
        return Ok(part);
    }
    let call = match number {
        POOLS_SUPPORTED => LibraryCall::HasPools,
        MAPPING_SUPPORTED => LibraryCall::HasMapping,
        _ => return Err(unanswered(&format!("{name} for attribute {number}"))),
    };
    ask(call).map(|has| c_int::from(has != 0))
}
