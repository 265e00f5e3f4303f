//! Reads the bytes of a pickle in pieces, so the file need not fit into memory.

use std::io::{self, BufRead, BufReader, ErrorKind, Read};

use super::super::error::SnapshotError;

const PIECE: usize = 1 << 16;

pub(super) struct Input<R>(BufReader<Counted<R>>);

struct Counted<R> {
    source: R,
    count: u64,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.source.read(into)?;
        self.count += read as u64;
        Ok(read)
    }
}

impl<R: Read> Input<R> {
    pub(super) fn new(source: R) -> Self {
        Self(BufReader::with_capacity(
            PIECE,
            Counted { source, count: 0 },
        ))
    }

    pub(super) fn offset(&self) -> u64 {
        self.0.get_ref().count - self.0.buffer().len() as u64
    }

    pub(super) fn peek(&mut self) -> Result<&[u8], SnapshotError> {
        match self.0.fill_buf() {
            Ok(_) => Ok(self.0.buffer()),
            Err(error) => Err(self.error(error)),
        }
    }

    #[inline]
    pub(super) fn byte(&mut self) -> Result<u8, SnapshotError> {
        let [byte] = self.array()?;
        Ok(byte)
    }

    #[inline]
    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], SnapshotError> {
        let mut bytes = [0; N];
        match self.0.read_exact(&mut bytes) {
            Ok(()) => Ok(bytes),
            Err(error) => Err(self.error(error)),
        }
    }

    /// Reads `count` bytes into a buffer. A wrong length takes no more memory than the file.
    pub(super) fn bytes(&mut self, count: u64, into: &mut Vec<u8>) -> Result<(), SnapshotError> {
        into.clear();
        match self.0.by_ref().take(count).read_to_end(into) {
            Ok(read) if read as u64 == count => Ok(()),
            Ok(_) => Err(self.error(ErrorKind::UnexpectedEof.into())),
            Err(error) => Err(self.error(error)),
        }
    }

    /// Reads the rest of the line into a buffer, without the line end.
    pub(super) fn line(&mut self, into: &mut Vec<u8>) -> Result<(), SnapshotError> {
        into.clear();
        self.0.read_until(b'\n', into)?;
        let line = into.strip_suffix(b"\n").ok_or(SnapshotError::Truncated {
            offset: self.offset(),
        })?;
        into.truncate(line.strip_suffix(b"\r").unwrap_or(line).len());
        Ok(())
    }

    /// Reads to the end, so the checksum of a packed file is verified.
    pub(super) fn finish(mut self) -> Result<(), SnapshotError> {
        io::copy(&mut self.0, &mut io::sink())
            .map(drop)
            .map_err(|error| self.error(error))
    }

    #[cold]
    fn error(&self, error: io::Error) -> SnapshotError {
        match error.kind() {
            ErrorKind::UnexpectedEof => SnapshotError::Truncated {
                offset: self.0.get_ref().count,
            },
            _ => error.into(),
        }
    }
}
