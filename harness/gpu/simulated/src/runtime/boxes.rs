//! Rows and boxes of bytes: pitched memory, its copies and its fills.

use std::ffi::c_int;

use harness_allocator::units::Bytes;
use harness_gpu_settings::{calls::Call, export, ffi::Out};

use super::memory::{Read, allocate, copy, fill, settle_before};
use super::streams::{allow_unsafe, submit_in_order};
use crate::code::{Code, put, put_address, remember};
use crate::reads;
use crate::world::{current_device, is_device_memory, machine};

/// The alignment of rows.
const PITCH: usize = 512;

/// A box in memory: its start, and the distances of its rows and of its slices.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Corner {
    pub(crate) start: usize,
    pub(crate) pitch: usize,
    pub(crate) slice: usize,
}

/// Bytes in a row, rows in a slice, slices.
pub(crate) type Extent = [usize; 3];

impl Corner {
    pub(crate) const fn of_rows(start: usize, pitch: usize) -> Self {
        Self {
            start,
            pitch,
            slice: 0,
        }
    }

    /// The starts of the rows. The boxes of one call have equally many.
    fn rows(self, [width, height, depth]: Extent) -> impl Iterator<Item = usize> {
        let rows = if width > 0 { height } else { 0 };
        (0..depth).flat_map(move |slice| {
            (0..rows).map(move |row| {
                self.start
                    .wrapping_add(slice.wrapping_mul(self.slice))
                    .wrapping_add(row.wrapping_mul(self.pitch))
            })
        })
    }
}

/// Copies a box. Without a stream, in the order of the legacy stream. The program passes boxes of
/// this extent.
pub(crate) fn copy_box(
    to: Corner,
    from: Corner,
    extent: Extent,
    stream: Option<usize>,
) -> Result<(), Code> {
    let machine = machine();
    machine.usable()?;
    settle_before(to.start, stream);
    machine.tick();
    let is_captured = submit_in_order(stream)?;
    if is_captured && !is_device_memory(to.start as u64) {
        return Ok(());
    }
    let mut state = machine.state();
    let mut read = Read::Known;
    for (to, from) in to.rows(extent).zip(from.rows(extent)) {
        // SAFETY: the host addresses belong to the program.
        let row = unsafe { copy(machine, &mut state, to as u64, from as u64, extent[0]) };
        if row == Read::Uncomputed {
            read = row;
        }
    }
    if stream.is_none() {
        state.streams.wait_for(0, current_device())?;
    }
    drop(state);
    if read == Read::Uncomputed {
        reads::note(machine);
    }
    Ok(())
}

/// Fills a box with a pattern, likewise.
pub(crate) fn fill_box(
    to: Corner,
    extent: Extent,
    pattern: &[u8],
    stream: Option<usize>,
) -> Result<(), Code> {
    let machine = machine();
    machine.usable()?;
    machine.tick();
    submit_in_order(stream)?;
    to.rows(extent)
        .for_each(|row| fill(machine, row as u64, extent[0], pattern));
    Ok(())
}

/// Allocates rows, and returns the start and the distance of rows. Empty boxes have a null pointer.
pub(crate) fn allocate_rows(width: usize, rows: Option<usize>) -> Result<(usize, usize), Code> {
    let machine = machine();
    machine.delay(Call::Malloc);
    allow_unsafe()?;
    let pitch = width
        .checked_next_multiple_of(PITCH)
        .ok_or(Code::InvalidValue)?;
    let size = rows
        .and_then(|rows| pitch.checked_mul(rows))
        .ok_or(Code::InvalidValue)?;
    if size == 0 {
        return Ok((0, pitch));
    }
    let request = (Call::Malloc, Bytes(size as u64));
    let start = allocate(machine, &mut machine.state(), current_device(), request)?;
    Ok((start as usize, pitch))
}

/// `cudaExtent`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Sizes {
    width: usize,
    height: usize,
    depth: usize,
}

/// `cudaPitchedPtr`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Pitched {
    start: usize,
    pitch: usize,
    width: usize,
    height: usize,
}

/// One side of `cudaMemcpy3DParms`: an array or pitched memory, and a position in it.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Side {
    array: usize,
    position: [usize; 3],
    memory: Pitched,
}

/// `cudaMemcpy3DParms`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct CopyParameters {
    from: Side,
    to: Side,
    sizes: Sizes,
    kind: c_int,
}

/// One side of `cudaMemcpy3DPeerParms`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct PeerSide {
    side: Side,
    device: c_int,
}

/// `cudaMemcpy3DPeerParms`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct PeerCopyParameters {
    from: PeerSide,
    to: PeerSide,
    sizes: Sizes,
}

impl Pitched {
    const fn corner(self) -> Corner {
        Corner {
            start: self.start,
            pitch: self.pitch,
            slice: self.pitch.wrapping_mul(self.height),
        }
    }
}

impl Side {
    /// Arrays have no model in the runtime.
    fn corner(self) -> Result<Corner, Code> {
        if self.array != 0 {
            return Err(Code::NotSupported);
        }
        let corner = self.memory.corner();
        let [x, y, z] = self.position;
        Ok(Corner {
            start: corner
                .start
                .wrapping_add(x)
                .wrapping_add(y.wrapping_mul(corner.pitch))
                .wrapping_add(z.wrapping_mul(corner.slice)),
            ..corner
        })
    }
}

impl Sizes {
    const fn extent(self) -> Extent {
        [self.width, self.height, self.depth]
    }
}

fn copy_sides(to: Side, from: Side, sizes: Sizes, stream: Option<usize>) -> Result<(), Code> {
    let extent = sizes.extent();
    let is_too_wide = |side: Side| extent[1] > 1 && side.memory.pitch < extent[0];
    if is_too_wide(to) || is_too_wide(from) {
        return Err(Code::InvalidValue);
    }
    copy_box(to.corner()?, from.corner()?, extent, stream)
}

fn copy_given(given: Option<&CopyParameters>, stream: Option<usize>) -> c_int {
    let given = given.ok_or(Code::InvalidValue);
    remember(given.and_then(|all| copy_sides(all.to, all.from, all.sizes, stream)))
}

fn copy_between_peers(given: Option<&PeerCopyParameters>, stream: Option<usize>) -> c_int {
    let given = given.ok_or(Code::InvalidValue);
    remember(given.and_then(|all| copy_sides(all.to.side, all.from.side, all.sizes, stream)))
}

export! {
    cudaMallocPitch(address: Out<'_, usize>, pitch: Out<'_, usize>, width: usize, height: usize) =
        remember(allocate_rows(width, Some(height)).and_then(|(start, distance)| {
            put(pitch, distance).and(put_address(address, Ok(start as u64)))
        }));
    cudaMalloc3D(into: Out<'_, Pitched>, sizes: Sizes) =
        remember(allocate_rows(sizes.width, sizes.height.checked_mul(sizes.depth)).and_then(
            |(start, pitch)| {
                put(into, Pitched { start, pitch, width: sizes.width, height: sizes.height })
            },
        ));
    cudaMemcpy2D(
        to: usize, to_pitch: usize, from: usize, from_pitch: usize, width: usize, height: usize,
        _: c_int
    ) = remember(copy_box(
        Corner::of_rows(to, to_pitch),
        Corner::of_rows(from, from_pitch),
        [width, height, 1],
        None,
    ));
    cudaMemcpy2DAsync(
        to: usize, to_pitch: usize, from: usize, from_pitch: usize, width: usize, height: usize,
        _: c_int, stream: usize
    ) = remember(copy_box(
        Corner::of_rows(to, to_pitch),
        Corner::of_rows(from, from_pitch),
        [width, height, 1],
        Some(stream),
    ));
    cudaMemcpy3D(given: Option<&CopyParameters>) = copy_given(given, None);
    cudaMemcpy3DAsync(given: Option<&CopyParameters>, stream: usize) =
        copy_given(given, Some(stream));
    cudaMemcpy3DPeer(given: Option<&PeerCopyParameters>) = copy_between_peers(given, None);
    cudaMemcpy3DPeerAsync(given: Option<&PeerCopyParameters>, stream: usize) =
        copy_between_peers(given, Some(stream));
    cudaMemset2D(to: usize, pitch: usize, value: c_int, width: usize, height: usize) =
        remember(fill_box(Corner::of_rows(to, pitch), [width, height, 1], &[value as u8], None));
    cudaMemset2DAsync(
        to: usize, pitch: usize, value: c_int, width: usize, height: usize, stream: usize
    ) = remember(fill_box(
        Corner::of_rows(to, pitch),
        [width, height, 1],
        &[value as u8],
        Some(stream),
    ));
    cudaMemset3D(to: Pitched, value: c_int, sizes: Sizes) =
        remember(fill_box(to.corner(), sizes.extent(), &[value as u8], None));
    cudaMemset3DAsync(to: Pitched, value: c_int, sizes: Sizes, stream: usize) =
        remember(fill_box(to.corner(), sizes.extent(), &[value as u8], Some(stream)));
}
