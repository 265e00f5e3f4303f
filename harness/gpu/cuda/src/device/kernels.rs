//! The device's own kernels: fill, verify and spin. [`Kernels`] loads the PTX and launches them.

use std::ffi::{CStr, c_uint, c_void};
use std::ptr;

use cudarc::driver::sys::{CUdeviceptr, CUfunction, CUmodule, CUstream};

use super::driver::{Driver, cuda};
use crate::library::Refusal;
use harness_allocator::device::{MemoryRange, Tag};
use harness_allocator::units::Nanos;

/// The loaded kernels. All methods require the context of [`Kernels::load`] to be current.
#[derive(Clone, Copy)]
pub(super) struct Kernels {
    module: CUmodule,
    fill_words: CUfunction,
    fill_bytes: CUfunction,
    verify_words: CUfunction,
    verify_bytes: CUfunction,
    busy: CUfunction,
    /// [`SLOTS`] times two words.
    findings: CUdeviceptr,
}

/// Maximum number of concurrent verifications. Each has its own result slot: two words of
/// `harness_findings`.
pub(super) const SLOTS: u32 = 256;

const SLOT: u64 = 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) bytes: u64,
    /// Offset of the first wrong byte in the range.
    pub(super) offset: u64,
}

/// Memory that does not hold its tag.
pub(super) struct Mismatch {
    pub(super) found: Found,
    /// The memory at the tag's word around the first wrong byte; the range's last word may be
    /// shorter.
    pub(super) word: Vec<u8>,
}

const PTX: &CStr =
    match CStr::from_bytes_with_nul(concat!(include_str!("kernels.ptx"), "\0").as_bytes()) {
        Ok(text) => text,
        Err(_) => panic!("kernels.ptx holds a NUL byte"),
    };

/// Threads of a block: a multiple of every GPU's warp size, and within every GPU's limit.
const BLOCK: u32 = 256;
/// Maximum number of blocks of a launch. 2048 blocks of 256 threads exceed what any current GPU
/// runs concurrently (an H200 has 132 multiprocessors with 8 such blocks each).
const MOST_BLOCKS: u64 = 2048;
/// Longest single spin. Longer spins are split, because display watchdogs end kernels after some
/// seconds.
const LONGEST_SPIN: Nanos = Nanos(1_000_000_000);

impl Kernels {
    /// Compiles and loads the kernels, and runs each once without work. Drivers load kernels
    /// lazily, and that memory belongs to the context overhead, not to a later step.
    pub(super) fn load(driver: &Driver) -> Result<Self, Refusal> {
        let mut module = ptr::null_mut();
        cuda!(driver, cuModuleLoadData(&mut module, PTX.as_ptr().cast()))?;
        let loaded = Self::find(driver, module)
            .and_then(|kernels| kernels.warm_up(driver).map(|()| kernels));
        if loaded.is_err() {
            // The first error is returned.
            let _ = cuda!(driver, cuModuleUnload(module));
        }
        loaded
    }

    /// Queues a kernel that writes the tag to the range. The caller must hold the range.
    pub(super) fn fill(
        &self,
        driver: &Driver,
        stream: CUstream,
        range: MemoryRange,
        tag: Tag,
    ) -> Result<(), Refusal> {
        let parts = Parts::of(range, tag);
        for (offset, bytes) in parts.ends() {
            self.launch(
                driver,
                self.fill_bytes,
                1,
                stream,
                &mut [range.start.0, offset, bytes, tag.0],
            )?;
        }
        match parts.words {
            0 => Ok(()),
            words => self.launch(
                driver,
                self.fill_words,
                words,
                stream,
                &mut [range.start.0 + parts.head, words, parts.value],
            ),
        }
    }

    /// Compares the range with the tag after the stream's earlier work, and waits. Uses the first
    /// slot. The caller must hold the range.
    pub(super) fn verify(
        &self,
        driver: &Driver,
        stream: CUstream,
        range: MemoryRange,
        tag: Tag,
    ) -> Result<Option<Mismatch>, Refusal> {
        self.queue_verify(driver, stream, range, tag, 0)?;
        let mut slot = [0; SLOT as usize];
        read(driver, stream, self.findings, &mut slot)?;
        let Some(found) = found_in(slot) else {
            return Ok(None);
        };
        let word_start = found.offset / 8 * 8;
        let word_len = usize::try_from((range.len.0 - word_start).min(8)).unwrap_or(8);
        let mut word = vec![0; word_len];
        read(driver, stream, range.start.0 + word_start, &mut word)?;
        Ok(Some(Mismatch { found, word }))
    }

    /// Queues a comparison of the range with the tag. The caller must hold the range. The slot must
    /// be below [`SLOTS`] and unused by queued comparisons.
    pub(super) fn queue_verify(
        &self,
        driver: &Driver,
        stream: CUstream,
        range: MemoryRange,
        tag: Tag,
        slot: u32,
    ) -> Result<(), Refusal> {
        let parts = Parts::of(range, tag);
        let found = self.findings + u64::from(slot) * SLOT;
        cuda!(driver, cuMemsetD8Async(found, 0xff, SLOT as usize, stream))?;
        for (offset, bytes) in parts.ends() {
            self.launch(
                driver,
                self.verify_bytes,
                1,
                stream,
                &mut [range.start.0, offset, bytes, tag.0, found],
            )?;
        }
        let start = range.start.0 + parts.head;
        match parts.words {
            0 => Ok(()),
            words => self.launch(
                driver,
                self.verify_words,
                words,
                stream,
                &mut [start, words, parts.value, parts.head, found],
            ),
        }
    }

    /// Waits for the stream and returns the result of each slot. Slots of unfinished comparisons
    /// are undefined.
    pub(super) fn findings(
        &self,
        driver: &Driver,
        stream: CUstream,
    ) -> Result<Vec<Option<Found>>, Refusal> {
        let mut slots = vec![0; SLOTS as usize * SLOT as usize];
        read(driver, stream, self.findings, &mut slots)?;
        Ok(slots.as_chunks().0.iter().copied().map(found_in).collect())
    }

    /// Queues kernels that spin for about `duration`, each for at most a second.
    pub(super) fn busy(
        &self,
        driver: &Driver,
        stream: CUstream,
        duration: Nanos,
    ) -> Result<(), Refusal> {
        let mut left = duration.0;
        while left > 0 {
            let piece = left.min(LONGEST_SPIN.0);
            self.launch(driver, self.busy, 1, stream, &mut [piece])?;
            left -= piece;
        }
        Ok(())
    }

    pub(super) fn unload(self, driver: &Driver) -> Result<(), Refusal> {
        cuda!(driver, cuModuleUnload(self.module))
    }

    fn find(driver: &Driver, module: CUmodule) -> Result<Self, Refusal> {
        let function = |name: &CStr| {
            let mut function = ptr::null_mut();
            cuda!(
                driver,
                cuModuleGetFunction(&mut function, module, name.as_ptr())
            )
            .map(|()| function)
        };
        let (mut findings, mut size) = (0, 0);
        cuda!(
            driver,
            cuModuleGetGlobal_v2(
                &mut findings,
                &mut size,
                module,
                c"harness_findings".as_ptr()
            )
        )?;
        Ok(Self {
            module,
            fill_words: function(c"harness_fill_words")?,
            fill_bytes: function(c"harness_fill_bytes")?,
            verify_words: function(c"harness_verify_words")?,
            verify_bytes: function(c"harness_verify_bytes")?,
            busy: function(c"harness_busy")?,
            findings,
        })
    }

    fn warm_up(&self, driver: &Driver) -> Result<(), Refusal> {
        let stream = ptr::null_mut();
        self.launch(
            driver,
            self.fill_words,
            1,
            stream,
            &mut [self.findings, 0, 0],
        )?;
        self.launch(
            driver,
            self.fill_bytes,
            1,
            stream,
            &mut [self.findings, 0, 0, 0],
        )?;
        self.launch(
            driver,
            self.verify_words,
            1,
            stream,
            &mut [self.findings, 0, 0, 0, self.findings],
        )?;
        self.launch(
            driver,
            self.verify_bytes,
            1,
            stream,
            &mut [self.findings, 0, 0, 0, self.findings],
        )?;
        self.launch(driver, self.busy, 1, stream, &mut [1])?;
        cuda!(driver, cuCtxSynchronize())
    }

    /// Launches a kernel for `work` independent items. `arguments` are all of the kernel's
    /// parameters in order, each of 64 bits.
    fn launch(
        &self,
        driver: &Driver,
        kernel: CUfunction,
        work: u64,
        stream: CUstream,
        arguments: &mut [u64],
    ) -> Result<(), Refusal> {
        let grid =
            c_uint::try_from(work.div_ceil(u64::from(BLOCK)).clamp(1, MOST_BLOCKS)).unwrap_or(1);
        let block = if work == 1 { 1 } else { BLOCK };
        let mut pointers: Vec<*mut c_void> = arguments
            .iter_mut()
            .map(|argument| ptr::from_mut(argument).cast())
            .collect();
        // The arguments match the kernel's parameters in kernels.ptx, and the driver copies them
        // before it returns.
        cuda!(
            driver,
            cuLaunchKernel(
                kernel,
                grid,
                1,
                1,
                block,
                1,
                1,
                0,
                stream,
                pointers.as_mut_ptr(),
                ptr::null_mut()
            )
        )
    }
}

fn read(
    driver: &Driver,
    stream: CUstream,
    from: CUdeviceptr,
    into: &mut [u8],
) -> Result<(), Refusal> {
    let copied = cuda!(
        driver,
        cuMemcpyDtoHAsync_v2(into.as_mut_ptr().cast(), from, into.len(), stream)
    );
    // Also waits after a failed copy, so `into` outlives it.
    let waited = cuda!(driver, cuStreamSynchronize(stream));
    copied.and(waited)
}

/// Decodes a slot. Both words are all ones if the comparison found nothing.
fn found_in(slot: [u8; SLOT as usize]) -> Option<Found> {
    let value = u128::from_le_bytes(slot);
    let found = Found {
        bytes: (value as u64).wrapping_add(1),
        offset: (value >> 64) as u64,
    };
    (found.bytes > 0).then_some(found)
}

/// A range split at the 8-byte boundaries of its addresses.
#[derive(Debug, PartialEq, Eq)]
struct Parts {
    /// Bytes before the first aligned word.
    head: u64,
    /// Aligned words.
    words: u64,
    /// Bytes after the last aligned word.
    tail: u64,
    /// The value of each aligned word: the tag, rotated by the head.
    value: u64,
}

impl Parts {
    fn of(range: MemoryRange, tag: Tag) -> Self {
        let head = (range.start.0.wrapping_neg() % 8).min(range.len.0);
        let words = (range.len.0 - head) / 8;
        let tail = range.len.0 - head - 8 * words;
        Self {
            head,
            words,
            tail,
            value: tag.0.rotate_right(8 * head as u32),
        }
    }

    /// Offset and length of the bytes before and after the aligned words, if there are any.
    fn ends(&self) -> impl Iterator<Item = (u64, u64)> {
        [(0, self.head), (self.head + 8 * self.words, self.tail)]
            .into_iter()
            .filter(|(_, bytes)| *bytes > 0)
    }
}

#[cfg(test)]
mod tests;
