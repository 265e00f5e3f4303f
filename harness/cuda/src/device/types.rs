//! Types of `cuda.h`, with the layout of C.
#![allow(non_camel_case_types, reason = "the driver's own names")]

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};

/// Declares a pointer to an opaque type of the driver.
macro_rules! handle {
    ($visibility:vis $handle:ident, $pointee:ident, $doc:literal) => {
        #[doc = concat!("What a [`", stringify!($handle), "`] points to. Opaque.")]
        #[repr(C)]
        $visibility struct $pointee {
            _private: [u8; 0],
        }
        #[doc = $doc]
        $visibility type $handle = *mut $pointee;
    };
}

handle!(pub CUstream, CUstream_st, "A stream of the CUDA driver. Pointers of other CUDA bindings convert with `cast()`.");
handle!(pub(super) CUcontext, CUctx_st, "A context.");
handle!(pub(super) CUevent, CUevent_st, "An event.");
handle!(pub(super) CUmodule, CUmod_st, "A loaded module.");
handle!(pub(super) CUfunction, CUfunc_st, "A kernel.");
handle!(pub(super) CUmemoryPool, CUmemPoolHandle_st, "A stream-ordered pool.");

/// The driver's number of a device.
pub(super) type CUdevice = c_int;
/// An address of device memory.
pub(super) type CUdeviceptr = c_ulonglong;
/// A page of physical memory.
pub(super) type CUmemGenericAllocationHandle = c_ulonglong;

#[repr(C)]
pub(super) struct CUuuid {
    pub(super) bytes: [c_char; 16],
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct CUmemLocation {
    pub(super) kind: c_uint,
    pub(super) id: c_int,
}

/// The flags in [`CUmemAllocationProp`].
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct CUmemAllocationFlags {
    pub(super) compression: u8,
    pub(super) gpu_direct_rdma: u8,
    pub(super) usage: u16,
    pub(super) reserved: [u8; 4],
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct CUmemAllocationProp {
    pub(super) kind: c_uint,
    pub(super) handle_types: c_uint,
    pub(super) location: CUmemLocation,
    pub(super) win32_handle_metadata: *mut c_void,
    pub(super) flags: CUmemAllocationFlags,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct CUmemAccessDesc {
    pub(super) location: CUmemLocation,
    pub(super) flags: c_uint,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct CUmemPoolProps {
    pub(super) kind: c_uint,
    pub(super) handle_types: c_uint,
    pub(super) location: CUmemLocation,
    pub(super) win32_security_attributes: *mut c_void,
    pub(super) max_size: usize,
    pub(super) usage: u16,
    pub(super) reserved: [u8; 54],
}
