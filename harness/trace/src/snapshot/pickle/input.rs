//! Reads the bytes of a pickle in pieces, so the file need not fit into memory.

use std::io::{ErrorKind, Read};

use super::super::error::SnapshotError;

/// The number of bytes per read.
const PIECE: usize = 1 << 16;

/// Buffered bytes and their offset.
pub(super) struct Input<R> {
    source: R,
    buffer: Box<[u8]>,
    at: usize,
    end: usize,
    /// The offset of the buffer's first byte.
    start: u64,
}

impl<R: Read> Input<R> {
    pub(super) fn new(source: R) -> Self {
        Self { source, buffer: vec![0; PIECE].into_boxed_slice(), at: 0, end: 0, start: 0 }
    }

    /// The offset of the next byte.
    pub(super) fn offset(&self) -> u64 {
        self.start + self.at as u64
    }

    /// Returns up to 64 of the first bytes without consuming them.
    pub(super) fn peek(&mut self) -> Result<&[u8], SnapshotError> {
        while self.end < 64 && self.refill()? {}
        Ok(&self.buffer[self.at..self.end.min(self.at + 64)])
    }

    #[inline]
    pub(super) fn byte(&mut self) -> Result<u8, SnapshotError> {
        let [byte] = self.array()?;
        Ok(byte)
    }

    #[inline]
    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], SnapshotError> {
        while self.end - self.at < N {
            if !self.refill()? {
                return Err(SnapshotError::Truncated { offset: self.start + self.end as u64 });
            }
        }
        let mut bytes = [0; N];
        bytes.copy_from_slice(&self.buffer[self.at..self.at + N]);
        self.at += N;
        Ok(bytes)
    }

    /// Reads `count` bytes into a buffer. A wrong length takes no more memory than the file.
    pub(super) fn bytes(&mut self, count: u64, into: &mut Vec<u8>) -> Result<(), SnapshotError> {
        into.clear();
        let mut left = count;
        while left > 0 {
            if self.at == self.end && !self.refill()? {
                return Err(SnapshotError::Truncated { offset: self.offset() });
            }
            let piece = (self.end - self.at).min(usize::try_from(left).unwrap_or(usize::MAX));
            into.extend_from_slice(&self.buffer[self.at..self.at + piece]);
            self.at += piece;
            left -= piece as u64;
        }
        Ok(())
    }

    /// Reads the rest of the line into a buffer, without the line end.
    pub(super) fn line(&mut self, into: &mut Vec<u8>) -> Result<(), SnapshotError> {
        into.clear();
        loop {
            match self.byte()? {
                b'\n' => break,
                byte => into.push(byte),
            }
        }
        if into.last() == Some(&b'\r') {
            into.pop();
        }
        Ok(())
    }

    /// Reads to the end, so the checksum of a packed file is verified.
    pub(super) fn finish(mut self) -> Result<(), SnapshotError> {
        loop {
            self.at = self.end;
            if !self.refill()? {
                return Ok(());
            }
        }
    }

    /// Reads more bytes. Returns `false` at the end of the file.
    fn refill(&mut self) -> Result<bool, SnapshotError> {
        self.buffer.copy_within(self.at..self.end, 0);
        self.start += self.at as u64;
        self.end -= self.at;
        self.at = 0;
        loop {
            match self.source.read(&mut self.buffer[self.end..]) {
                Ok(read) => {
                    self.end += read;
                    return Ok(read > 0);
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
                    return Err(SnapshotError::Truncated { offset: self.start + self.end as u64 });
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
}
