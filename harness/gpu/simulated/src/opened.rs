//! Memory that another process shares: its [`Handle`], and what this process has [`Opened`].

use harness_allocator::units::Bytes;

/// `cudaIpcMemHandle_t` and `cudaIpcEventHandle_t`: 64 bytes, which processes only pass around.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(C)]
pub(crate) struct Handle {
    pub(crate) process: u64,
    /// The start of the allocation, or the event, in its process.
    pub(crate) object: u64,
    pub(crate) size: u64,
    /// The real number of the device.
    pub(crate) device: u64,
    /// The descriptor of the device's contents in its process.
    pub(crate) contents: u64,
    pub(crate) reserved: [u64; 3],
}

/// Memory of another process that this one has opened.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Opened {
    pub(crate) start: u64,
    pub(crate) size: Bytes,
    /// The number of opens without a close.
    pub(crate) count: u32,
}
