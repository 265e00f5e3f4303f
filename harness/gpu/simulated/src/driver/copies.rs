//! Copies and fills of rows and boxes, for kernels that are no-ops.

use std::ffi::{c_int, c_uint, c_ushort};

use harness_gpu_settings::export;

use super::arrays::descriptor;
use super::memory::{and_wait, synchronously};
use crate::code::{Code, answer};
use crate::context::by_kernel_mode;
use crate::runtime::boxes::{Corner, Extent, copy_box, fill_box};

/// The kinds of memory, `CUmemorytype`. Unified memory is memory of a device or of the host.
const HOST: c_uint = 1;
const DEVICE: c_uint = 2;
const ARRAY: c_uint = 3;
const UNIFIED: c_uint = 4;

/// One side of `CUDA_MEMCPY3D` and of `CUDA_MEMCPY3D_PEER`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Side {
    position: [usize; 3],
    level: usize,
    kind: c_uint,
    host: usize,
    device: usize,
    array: usize,
    /// Of a copy between peers.
    context: usize,
    pitch: usize,
    height: usize,
}

/// `CUDA_MEMCPY3D` and `CUDA_MEMCPY3D_PEER`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct BoxCopy {
    from: Side,
    to: Side,
    extent: Extent,
}

/// One side of `CUDA_MEMCPY2D`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct FlatSide {
    position: [usize; 2],
    kind: c_uint,
    host: usize,
    device: usize,
    array: usize,
    pitch: usize,
}

/// `CUDA_MEMCPY2D`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct FlatCopy {
    from: FlatSide,
    to: FlatSide,
    extent: [usize; 2],
}

impl From<FlatSide> for Side {
    fn from(side: FlatSide) -> Self {
        let FlatSide {
            position: [x, y],
            kind,
            host,
            device,
            array,
            pitch,
        } = side;
        Self {
            position: [x, y, 0],
            level: 0,
            kind,
            host,
            device,
            array,
            context: 0,
            pitch,
            height: 0,
        }
    }
}

impl From<FlatCopy> for BoxCopy {
    fn from(copy: FlatCopy) -> Self {
        let [width, height] = copy.extent;
        Self {
            from: copy.from.into(),
            to: copy.to.into(),
            extent: [width, height, 1],
        }
    }
}

impl Side {
    /// The box of this side. Refuses rows that overlap, and slices that do.
    fn corner(&self, [width, height, depth]: Extent) -> Result<Corner, Code> {
        let [x, y, z] = self.position;
        let (start, pitch, rows) = match self.kind {
            HOST => (self.host, self.pitch, self.height),
            DEVICE | UNIFIED => (self.device, self.pitch, self.height),
            ARRAY => {
                let array = descriptor(self.array)?;
                let row = array.row().ok_or(Code::NotSupported)?;
                (self.array, row, array.height.max(1))
            }
            _ => return Err(Code::InvalidValue),
        };
        let fits = |needed: [usize; 2], given: usize| {
            needed[0]
                .checked_add(needed[1])
                .is_some_and(|end| end <= given)
        };
        if ((height > 1 || depth > 1) && !fits([x, width], pitch))
            || (depth > 1 && !fits([y, height], rows))
        {
            return Err(Code::InvalidValue);
        }
        let slice = pitch.checked_mul(rows).ok_or(Code::InvalidValue)?;
        let offset = [(1, x), (pitch, y), (slice, z)]
            .iter()
            .try_fold(start, |sum, (unit, count)| {
                unit.checked_mul(*count)?.checked_add(sum)
            });
        Ok(Corner {
            start: offset.ok_or(Code::InvalidValue)?,
            pitch,
            slice,
        })
    }
}

fn copy(function: &'static str, given: Option<BoxCopy>, stream: usize) -> c_int {
    let run = |given: BoxCopy| {
        let (to, from) = (
            given.to.corner(given.extent)?,
            given.from.corner(given.extent)?,
        );
        copy_box(to, from, given.extent, Some(stream))
    };
    by_kernel_mode(
        function,
        || answer(given.ok_or(Code::InvalidValue).and_then(run)),
        || Err(Code::NotSupported),
    )
}

/// Fills rows of `width` elements.
fn fill(
    function: &'static str,
    to: Corner,
    [width, height]: [usize; 2],
    element: &[u8],
    stream: usize,
) -> c_int {
    let run = || {
        let bytes = width.checked_mul(element.len()).ok_or(Code::InvalidValue)?;
        if height > 1 && to.pitch < bytes {
            return Err(Code::InvalidValue);
        }
        fill_box(to, [bytes, height, 1], element, Some(stream))
    };
    by_kernel_mode(function, || answer(run()), || Err(Code::NotSupported))
}

export! {
    cuMemcpy2DAsync_v2(given: Option<&FlatCopy>, stream: usize) =
        copy(THIS, given.map(|flat| (*flat).into()), stream);
    /// Any alignment of rows is accepted.
    cuMemcpy2D_v2, cuMemcpy2DUnaligned_v2(given: Option<&FlatCopy>) =
        and_wait(|| cuMemcpy2DAsync_v2(given, 0));
    cuMemcpy3DAsync_v2, cuMemcpy3DPeerAsync(given: Option<&BoxCopy>, stream: usize) =
        copy(THIS, given.copied(), stream);
    cuMemcpy3D_v2, cuMemcpy3DPeer(given: Option<&BoxCopy>) =
        and_wait(|| cuMemcpy3DAsync_v2(given, 0));
    cuMemsetD2D8Async(
        to: usize, pitch: usize, byte: u8, width: usize, height: usize, stream: usize
    ) = fill(THIS, Corner::of_rows(to, pitch), [width, height], &[byte], stream);
    cuMemsetD2D16Async(
        to: usize, pitch: usize, half: c_ushort, width: usize, height: usize, stream: usize
    ) = fill(THIS, Corner::of_rows(to, pitch), [width, height], &half.to_le_bytes(), stream);
    cuMemsetD2D32Async(
        to: usize, pitch: usize, word: c_uint, width: usize, height: usize, stream: usize
    ) = fill(THIS, Corner::of_rows(to, pitch), [width, height], &word.to_le_bytes(), stream);
    cuMemsetD2D8_v2(to: usize, pitch: usize, byte: u8, width: usize, height: usize) =
        synchronously(|| cuMemsetD2D8Async(to, pitch, byte, width, height, 0));
    cuMemsetD2D16_v2(to: usize, pitch: usize, half: c_ushort, width: usize, height: usize) =
        synchronously(|| cuMemsetD2D16Async(to, pitch, half, width, height, 0));
    cuMemsetD2D32_v2(to: usize, pitch: usize, word: c_uint, width: usize, height: usize) =
        synchronously(|| cuMemsetD2D32Async(to, pitch, word, width, height, 0));
    cuMemsetD16Async(to: usize, half: c_ushort, count: usize, stream: usize) =
        cuMemsetD2D16Async(to, 0, half, count, 1, stream);
    cuMemsetD16_v2(to: usize, half: c_ushort, count: usize) =
        synchronously(|| cuMemsetD16Async(to, half, count, 0));
}
