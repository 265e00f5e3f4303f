//! [`Work`]: the work of streams if kernels execute: the kernels of this project's CUDA device,
//! copies, and setting bytes.

use std::{ptr, slice};

use harness_allocator::{device::AccessKind, units::Nanos};

use crate::{bytes::DeviceBytes, code::Code};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kernel {
    FillWords,
    FillBytes,
    VerifyWords,
    VerifyBytes,
    Busy,
}

/// One piece of work. Byte k of a pattern is byte (k mod 8) of its value, lowest first.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Work {
    /// Writes the pattern, starting with its byte `first`, to `len` bytes.
    Fill {
        address: u64,
        len: u64,
        value: u64,
        first: u64,
    },
    /// Compares the pattern with memory. `findings` receives the number of wrong bytes and the
    /// lowest offset, which starts at `offset`.
    Verify {
        address: u64,
        len: u64,
        value: u64,
        first: u64,
        offset: u64,
        findings: u64,
    },
    /// Sets all bytes.
    Set { address: u64, len: u64, byte: u8 },
    /// Copies to page-locked host memory, which the program keeps until the copy is done.
    ToHost { address: u64, len: u64, to: usize },
    /// Copies from page-locked host memory.
    ToDevice { address: u64, len: u64, from: usize },
    /// Completes the free of a pool allocation with this number.
    Free { address: u64, number: u64 },
    /// Fails: memory was unmapped before the host waited for the work that uses it.
    Gone,
    /// Keeps the stream busy.
    Busy(Nanos),
    /// A word kernel got an address that is not a multiple of 8.
    Misaligned { address: u64 },
}

/// Bytes of the result of a verify kernel: count and lowest offset.
pub(crate) const FINDING: u64 = 16;

impl Kernel {
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

    /// The number of its parameters, all of 64 bits.
    pub(crate) const fn parameters(self) -> usize {
        match self {
            Self::Busy => 1,
            Self::FillWords => 3,
            Self::FillBytes => 4,
            Self::VerifyWords | Self::VerifyBytes => 5,
        }
    }

    /// Returns true if only one thread may run the kernel.
    pub(crate) const fn is_for_one_thread(self) -> bool {
        matches!(self, Self::FillBytes | Self::VerifyBytes | Self::Busy)
    }

    /// The work of a launch with [`Kernel::parameters`] parameters.
    pub(crate) fn work(self, parameters: &[u64]) -> Work {
        match (self, parameters) {
            (Self::FillWords | Self::VerifyWords, &[address, words, ..])
                if words > 0 && address % 8 != 0 =>
            {
                Work::Misaligned { address }
            }
            (Self::FillWords, &[address, words, value]) => Work::Fill {
                address,
                len: words.saturating_mul(8),
                value,
                first: 0,
            },
            (Self::FillBytes, &[start, first, len, value]) => Work::Fill {
                address: start.saturating_add(first),
                len,
                value,
                first,
            },
            (Self::VerifyWords, &[address, words, value, offset, findings]) => Work::Verify {
                address,
                len: words.saturating_mul(8),
                value,
                first: 0,
                offset,
                findings,
            },
            (Self::VerifyBytes, &[start, first, len, value, findings]) => Work::Verify {
                address: start.saturating_add(first),
                len,
                value,
                first,
                offset: first,
                findings,
            },
            (_, &[nanos, ..]) => Work::Busy(Nanos(nanos)),
            (_, []) => Work::Busy(Nanos::ZERO),
        }
    }
}

impl Work {
    /// Returns true for a fill of at least one byte.
    pub(crate) const fn is_fill(&self) -> bool {
        matches!(self, Self::Fill { len: 1.., .. })
    }

    /// The range that it reads or writes: address and length.
    pub(crate) const fn touches(&self) -> Option<(u64, u64, AccessKind)> {
        match *self {
            Self::Verify {
                address,
                len: len @ 1..,
                ..
            }
            | Self::ToHost {
                address,
                len: len @ 1..,
                ..
            } => Some((address, len, AccessKind::Read)),
            Self::Fill {
                address,
                len: len @ 1..,
                ..
            }
            | Self::Set {
                address,
                len: len @ 1..,
                ..
            }
            | Self::ToDevice {
                address,
                len: len @ 1..,
                ..
            } => Some((address, len, AccessKind::Write)),
            Self::Misaligned { address } => Some((address, 1, AccessKind::Read)),
            _ => None,
        }
    }

    /// The address of its result, which has [`FINDING`] bytes.
    pub(crate) const fn finds_at(&self) -> Option<u64> {
        match *self {
            Self::Verify {
                len: 1.., findings, ..
            } => Some(findings),
            _ => None,
        }
    }

    /// Runs it. A fill flips a bit of the byte at offset `wrong`.
    pub(crate) fn run(&self, bytes: &mut DeviceBytes, wrong: Option<u64>) -> Result<(), Code> {
        match *self {
            Self::Fill {
                address,
                len,
                value,
                first,
            } => {
                bytes.fill(address, len, pattern(value, first));
                if let Some(offset) = wrong.filter(|offset| *offset < len) {
                    bytes.flip(address + offset);
                }
            }
            Self::Verify {
                address,
                len,
                value,
                first,
                offset,
                findings,
            } => {
                if let (count, Some(lowest)) = bytes.differing(address, len, pattern(value, first))
                {
                    note(bytes, findings, count, lowest + offset);
                }
            }
            Self::Set { address, len, byte } => bytes.fill(address, len, [byte; 8]),
            Self::ToHost { address, len, to } => {
                // SAFETY: the program keeps the page-locked memory until the copy is done.
                let into = unsafe {
                    slice::from_raw_parts_mut(ptr::with_exposed_provenance_mut(to), len as usize)
                };
                bytes.read(address, into);
            }
            Self::ToDevice { address, len, from } => {
                // SAFETY: as for the other direction.
                bytes.write(address, unsafe {
                    slice::from_raw_parts(ptr::with_exposed_provenance(from), len as usize)
                });
            }
            Self::Busy(_) | Self::Free { .. } => {}
            Self::Gone => return Err(Code::IllegalAddress),
            Self::Misaligned { .. } => return Err(Code::MisalignedAddress),
        }
        Ok(())
    }
}

/// The bytes of a value, starting with byte `first`.
fn pattern(value: u64, first: u64) -> [u8; 8] {
    value.rotate_right((first % 8) as u32 * 8).to_le_bytes()
}

/// Adds the count to the first word of the result and lowers the second, as the kernels' atomics
/// do.
fn note(bytes: &mut DeviceBytes, findings: u64, count: u64, lowest: u64) {
    let mut words = [0; FINDING as usize];
    bytes.read(findings, &mut words);
    let found = u128::from_le_bytes(words);
    let (sum, least) = (
        (found as u64).wrapping_add(count),
        ((found >> 64) as u64).min(lowest),
    );
    bytes.write(
        findings,
        &(u128::from(least) << 64 | u128::from(sum)).to_le_bytes(),
    );
}
