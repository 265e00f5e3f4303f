//! [`ArrayDescriptor`]: the size of a CUDA array, computed from its description
//! (<https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEM.html>, `cuArray3DCreate`).

use std::ffi::c_uint;

use harness_allocator::units::Bytes;

/// Flags: the depth counts layers or cube faces (first two); the array has no memory of its own
/// (last two).
const LAYERED: c_uint = 0x1;
const CUBEMAP: c_uint = 0x4;
const SPARSE: c_uint = 0x40;
const DEFERRED: c_uint = 0x80;

/// `CUDA_ARRAY3D_DESCRIPTOR`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct ArrayDescriptor {
    pub width: usize,
    pub height: usize,
    pub depth: usize,
    pub format: c_uint,
    pub channels: c_uint,
    pub flags: c_uint,
}

/// `CUDA_ARRAY_DESCRIPTOR`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FlatDescriptor {
    pub width: usize,
    pub height: usize,
    pub format: c_uint,
    pub channels: c_uint,
}

impl From<FlatDescriptor> for ArrayDescriptor {
    fn from(
        FlatDescriptor {
            width,
            height,
            format,
            channels,
        }: FlatDescriptor,
    ) -> Self {
        Self {
            width,
            height,
            depth: 0,
            format,
            channels,
            flags: 0,
        }
    }
}

impl ArrayDescriptor {
    /// Bytes of a row. `None` for formats without a fixed element size.
    pub fn row(&self) -> Option<usize> {
        let element = usize::try_from(channel_bytes(self.format)?).ok()?;
        self.width.checked_mul(element * self.channels as usize)
    }

    /// Bytes of all elements in this many mipmap levels. The driver may align rows, so this is a
    /// lower bound. `None` for formats without a fixed element size and for arrays without memory
    /// of their own.
    pub fn bytes(&self, levels: u32) -> Option<Bytes> {
        if self.flags & (SPARSE | DEFERRED) != 0 {
            return None;
        }
        let element = u64::from(self.channels) * channel_bytes(self.format)?;
        let level = |level: u32| {
            let halved = |extent: usize| (extent as u64).checked_shr(level).unwrap_or(0).max(1);
            let depth = if self.flags & (LAYERED | CUBEMAP) != 0 {
                (self.depth as u64).max(1)
            } else {
                halved(self.depth)
            };
            halved(self.width)
                .checked_mul(halved(self.height))?
                .checked_mul(depth)?
                .checked_mul(element)
        };
        (0..levels)
            .try_fold(0_u64, |sum, at| sum.checked_add(level(at)?))
            .map(Bytes)
    }
}

/// Bytes per channel, by `CUarray_format`.
const fn channel_bytes(format: c_uint) -> Option<u64> {
    match format {
        // Unsigned and signed integers.
        0x01 | 0x08 => Some(1),
        // Integers and half precision.
        0x02 | 0x09 | 0x10 => Some(2),
        // Integers and single precision.
        0x03 | 0x0a | 0x20 => Some(4),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
