//! NVIDIA GPUs as devices of [`harness_allocator`]: the CUDA driver, loaded at run time, and NVML.
//!
//! * [`CudaDevice`]: one GPU, opened on its primary context;
//! * [`machine`]: which GPUs there are, without opening one;
//! * [`nvml`]: what the management library knows of a GPU.
//!
//! No CUDA toolkit is needed to build, and none to run: where the driver is missing, opening a device says so.
//!
//! # Beside cudarc and other users of the GPU
//!
//! [`CudaDevice`] retains the device's *primary* context, which cudarc's `CudaContext::new` and the CUDA runtime use too:
//! addresses and streams of one are valid in the other, and it does not matter who opens first. It makes that context the calling thread's
//! current one with each call and leaves it so. A stream made here is launched on elsewhere by its raw handle; ask for it before the device
//! moves into the allocator:
//!
//! ```no_run
//! use harness_allocator::device::Device;
//! use harness_cuda::CudaDevice;
//!
//! let mut gpu = CudaDevice::open(0)?;
//! let stream = gpu.create_stream()?; // what a request names
//! let raw: cudarc::driver::sys::CUstream = gpu.raw_stream(stream)?.cast(); // what a launch names
//! # let _ = raw;
//! # Ok::<(), harness_allocator::device::DeviceError>(())
//! ```
//!
//! The other way round there is no way in: memory that is used on a stream of somebody else's making is allocated for a stream of ours, and
//! freed when the other stream's work is known to be done, or ordered in front of ours by an event.

pub mod device;
mod library;
pub mod machine;
pub mod nvml;

pub use device::CudaDevice;
