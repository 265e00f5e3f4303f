//! NVIDIA GPUs as devices of [`harness_allocator`], through the CUDA driver, which is loaded at run
//! time, and NVML.
//!
//! Building and running need no CUDA toolkit. Without a driver, opening a device returns an error.
//!
//! # Use with cudarc and other CUDA bindings
//!
//! A program may also use cudarc with any of its features. If it needs another CUDA version than
//! cudarc's `cuda-12080`, it chooses the feature of that name here and turns off the default
//! features. Both share the driver's plain handles: an address is the same number, and a stream is
//! the same pointer. Pointers of other bindings convert with `cast()`.
//!
//! [`CudaDevice`] retains the device's *primary* context, like cudarc's `CudaContext::new` and the
//! CUDA runtime. Addresses and streams of one are valid in the other, in either order of opening.
//! Each call makes that context current in the calling thread and leaves it current.
//!
//! A program lends its own stream to the device, and then names it in requests:
//!
//! ```no_run
//! use harness_allocator::allocator::Request;
//! use harness_allocator::allocator::caching::CachingAllocator;
//! use harness_allocator::allocator::shared::SharedAllocator;
//! use harness_allocator::units::Bytes;
//! use harness_cuda::CudaDevice;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let theirs: cudarc::driver::sys::CUstream = std::ptr::null_mut();
//! // `theirs` is a stream of cudarc: `stream.cu_stream()`.
//! let allocator = SharedAllocator::new(CachingAllocator::default(), CudaDevice::open(0)?);
//! // SAFETY: the stream is destroyed after the device.
//! let stream = unsafe { allocator.lock().device.borrow_stream(theirs) }?;
//! let batch = allocator.allocate(Request::new(Bytes::mib(64)).on(stream))?;
//! // Kernels on `theirs` may use the memory at `batch.ptr().0`.
//! allocator.free(batch.ptr())?;
//! # Ok(())
//! # }
//! ```
//!
//! [`CudaDevice::raw_stream`] returns the driver's handle of a stream that this crate created.

pub mod device;
mod library;
pub mod machine;
pub mod nvml;
pub mod nvtx;
pub mod smi;

pub use device::{CudaDevice, KeptContext};
