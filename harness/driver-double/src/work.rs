//! What streams do: the kernels of the CUDA device, by their names, and setting bytes.

use std::time::Duration;

use crate::memory::code;

/// A kernel that the double can stand in for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kernel {
    FillWords,
    FillBytes,
    VerifyWords,
    VerifyBytes,
    Busy,
}

/// One piece of work of a stream. Byte k of a pattern is byte (k mod 8) of its value, lowest first.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Work {
    /// Writes the pattern from its byte `first` on to `len` bytes from `address`.
    Fill { address: u64, len: u64, value: u64, first: u64 },
    /// Compares the same with memory; the first byte lies at `offset` of the range, and `findings` gets count and lowest offset.
    Verify { address: u64, len: u64, value: u64, first: u64, offset: u64, findings: u64 },
    /// Writes one byte to all.
    Set { address: u64, len: u64, byte: u8 },
    /// A free of a pool takes its turn; the world does it, whose pool it is.
    Free { address: u64 },
    /// Takes time.
    Busy(Duration),
    /// A word kernel was given an address that is no multiple of 8.
    Misaligned { address: u64 },
}

impl Kernel {
    /// The kernel with a name.
    pub(crate) fn named(name: &str) -> Option<Self> {
        Some(match name {
            "harness_fill_words" => Self::FillWords,
            "harness_fill_bytes" => Self::FillBytes,
            "harness_verify_words" => Self::VerifyWords,
            "harness_verify_bytes" => Self::VerifyBytes,
            "harness_busy" => Self::Busy,
            _ => return None,
        })
    }

    /// Number of its parameters, all of 64 bits.
    pub(crate) const fn parameters(self) -> usize {
        match self {
            Self::Busy => 1,
            Self::FillWords => 3,
            Self::FillBytes => 4,
            Self::VerifyWords | Self::VerifyBytes => 5,
        }
    }

    /// Whether only one thread may run it, since it does not share its work.
    pub(crate) const fn is_for_one_thread(self) -> bool {
        matches!(self, Self::FillBytes | Self::VerifyBytes | Self::Busy)
    }

    /// The work of a launch. `parameters` are as many as [`Kernel::parameters`].
    pub(crate) fn work(self, parameters: &[u64]) -> Work {
        match (self, parameters) {
            (Self::FillWords | Self::VerifyWords, &[address, words, ..]) if words > 0 && address % 8 != 0 => Work::Misaligned { address },
            (Self::FillWords, &[address, words, value]) => Work::Fill { address, len: words * 8, value, first: 0 },
            (Self::FillBytes, &[start, first, len, value]) => Work::Fill { address: start + first, len, value, first },
            (Self::VerifyWords, &[address, words, value, offset, findings]) => {
                Work::Verify { address, len: words * 8, value, first: 0, offset, findings }
            }
            (Self::VerifyBytes, &[start, first, len, value, findings]) => {
                Work::Verify { address: start + first, len, value, first, offset: first, findings }
            }
            (_, &[nanos, ..]) => Work::Busy(Duration::from_nanos(nanos)),
            (_, []) => Work::Busy(Duration::ZERO),
        }
    }
}

impl Work {
    /// How long it keeps its stream busy. Only spinning takes time: the double measures nothing.
    pub(crate) const fn duration(&self) -> Duration {
        match self {
            Self::Busy(duration) => *duration,
            _ => Duration::ZERO,
        }
    }

    /// Whether it is a fill that writes anything.
    pub(crate) const fn is_fill(&self) -> bool {
        matches!(self, Self::Fill { len: 1.., .. })
    }

    /// The bytes that it reads or writes: address and length.
    pub(crate) const fn touches(&self) -> Option<(u64, u64)> {
        match *self {
            Self::Fill { address, len: len @ 1.., .. }
            | Self::Verify { address, len: len @ 1.., .. }
            | Self::Set { address, len: len @ 1.., .. } => Some((address, len)),
            Self::Misaligned { address } => Some((address, 1)),
            _ => None,
        }
    }

    /// Where it writes what it finds: address and length.
    pub(crate) const fn finds_at(&self) -> Option<(u64, u64)> {
        match *self {
            Self::Verify { len: 1.., findings, .. } => Some((findings, 16)),
            _ => None,
        }
    }

    /// Does it. A fill with `wrong` flips a bit of its byte there.
    ///
    /// # Safety
    /// What [`Work::touches`] and [`Work::finds_at`] tell must be live host memory that nobody else uses meanwhile.
    pub(crate) unsafe fn run(&self, wrong: Option<u64>) -> Result<(), u32> {
        match *self {
            Self::Fill { address, len, value, first } => {
                // SAFETY: as the caller promised.
                let bytes = unsafe { memory(address, len) };
                write(bytes, value.rotate_right((first % 8) as u32 * 8));
                if let Some(byte) = wrong.and_then(|offset| bytes.get_mut(offset as usize)) {
                    *byte ^= 1;
                }
            }
            Self::Verify { address, len, value, first, offset, findings } => {
                // SAFETY: as the caller promised.
                let (bytes, findings) = unsafe { (memory(address, len), memory(findings, 16)) };
                let (count, lowest) = compare(bytes, value.rotate_right((first % 8) as u32 * 8));
                if let Some(lowest) = lowest {
                    note(findings, count, lowest + offset);
                }
            }
            Self::Set { address, len, byte } => {
                // SAFETY: as the caller promised.
                unsafe { memory(address, len) }.fill(byte);
            }
            Self::Busy(_) | Self::Free { .. } => {}
            Self::Misaligned { .. } => return Err(code::MISALIGNED_ADDRESS),
        }
        Ok(())
    }
}

/// # Safety
/// The bytes must be live host memory that nobody else uses while the slice lives.
unsafe fn memory<'a>(address: u64, len: u64) -> &'a mut [u8] {
    // SAFETY: as the caller promised.
    unsafe { std::slice::from_raw_parts_mut(address as *mut u8, len as usize) }
}

fn write(bytes: &mut [u8], value: u64) {
    let pattern = value.to_le_bytes();
    let (words, tail) = bytes.as_chunks_mut::<8>();
    words.fill(pattern);
    tail.copy_from_slice(&pattern[..tail.len()]);
}

/// Number of bytes that are not of the pattern, and the first of them.
fn compare(bytes: &[u8], value: u64) -> (u64, Option<u64>) {
    let pattern = value.to_le_bytes();
    let (mut count, mut lowest) = (0, None);
    let (words, tail) = bytes.as_chunks::<8>();
    let wrong_words = words.iter().enumerate().filter(|(_, word)| **word != pattern).map(|(index, word)| (index, word.as_slice()));
    for (index, chunk) in wrong_words.chain([(words.len(), tail)]) {
        for (offset, _) in chunk.iter().zip(pattern).enumerate().filter(|(_, (is, should))| *is != should) {
            count += 1;
            lowest.get_or_insert((index * 8 + offset) as u64);
        }
    }
    (count, lowest)
}

/// Adds the count to the first word of the findings and lowers the second, as the kernels' atomics do.
fn note(findings: &mut [u8], count: u64, lowest: u64) {
    let (total, least) = findings.split_at_mut(8);
    let word = |bytes: &[u8]| bytes.iter().rev().fold(0_u64, |word, byte| word << 8 | u64::from(*byte));
    let (sum, minimum) = (word(total).wrapping_add(count), word(least).min(lowest));
    total.copy_from_slice(&sum.to_le_bytes());
    least.copy_from_slice(&minimum.to_le_bytes());
}
