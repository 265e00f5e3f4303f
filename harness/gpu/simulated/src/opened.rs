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

impl Handle {
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let [first, second, third] = self.reserved;
        let words = [
            self.process,
            self.object,
            self.size,
            self.device,
            self.contents,
            first,
            second,
            third,
        ];
        words.map(u64::to_ne_bytes).concat()
    }

    pub(crate) fn of_bytes(bytes: &[u8; 64]) -> Self {
        let word = |index: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[8 * index..8 * index + 8]);
            u64::from_ne_bytes(word)
        };
        Self {
            process: word(0),
            object: word(1),
            size: word(2),
            device: word(3),
            contents: word(4),
            reserved: [word(5), word(6), word(7)],
        }
    }
}

/// Memory of another process that this one has opened.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Opened {
    pub(crate) start: u64,
    pub(crate) size: Bytes,
    /// The number of opens without a close.
    pub(crate) count: u32,
}
