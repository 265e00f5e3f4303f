//! NVIDIA GPUs as devices of [`harness_allocator`]: the CUDA driver, loaded at run time, and NVML.
//!
//! * [`CudaDevice`]: one GPU, opened on its primary context;
//! * [`machine`]: which GPUs there are, without opening one;
//! * [`nvml`]: what the management library knows of a GPU;
//! * [`nvtx`]: ranges for profilers.
//!
//! No CUDA toolkit is needed to build, and none to run: where the driver is missing, opening a device says so.
//!
//! # Beside cudarc and other users of the GPU
//!
//! This crate declares the driver's functions itself and finds them at run time, so it takes part in nobody's choice of CUDA version or
//! linking: a program may use cudarc beside it with any of cudarc's features. What both share are plain handles of the driver. An address is
//! the same number, and a stream the same pointer, which is `cast()` from one type to the other.
//!
//! [`CudaDevice`] retains the device's *primary* context, which cudarc's `CudaContext::new` and the CUDA runtime use too:
//! addresses and streams of one are valid in the other, and it does not matter who opens first. It makes that context the calling thread's
//! current one with each call and leaves it so.
//!
//! A stream that the program has is borrowed, and then named by requests:
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
//! // `theirs` is a stream of cudarc's: `stream.cu_stream()`.
//! let allocator = SharedAllocator::new(CachingAllocator::default(), CudaDevice::open(0)?);
//! // SAFETY: the stream is destroyed after the device.
//! let stream = unsafe { allocator.lock().device.borrow_stream(theirs.cast()) }?;
//! let batch = allocator.allocate(Request::new(Bytes::mib(64)).on(stream))?;
//! // Kernels on `theirs` may use the memory at `batch.ptr().0`.
//! allocator.free(batch.ptr())?;
//! # Ok(())
//! # }
//! ```
//!
//! The other way round, [`CudaDevice::raw_stream`] gives the driver's handle of a stream that was made here.

pub mod device;
mod library;
pub mod machine;
pub mod nvml;
pub mod nvtx;

pub use device::{CudaDevice, KeptContext};
