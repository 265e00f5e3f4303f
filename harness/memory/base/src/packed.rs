//! Files with optional gzip compression, such as allocation traces and recordings. The content
//! decides, not the file name.

use std::io::{self, BufRead, BufReader, Cursor, ErrorKind, Read, Write as _};
use std::path::Path;

use flate2::{Compression, read::MultiGzDecoder, write::GzEncoder};

use crate::files;

/// The first bytes of a gzip file, <https://www.rfc-editor.org/rfc/rfc1952#page-6>.
const MAGIC: [u8; 2] = [0x1f, 0x8b];

/// Limit of the decompressed size. A gzip file of a few kilobytes can expand to gigabytes.
pub const MAX_UNPACKED: u64 = 128 << 20;

/// Opens a file and decompresses it if needed.
pub fn open(path: &Path) -> io::Result<Box<dyn BufRead>> {
    Ok(Box::new(BufReader::new(unpack(
        files::open(path)?,
        MAX_UNPACKED,
    )?)))
}

/// Reads a source and decompresses it if needed.
pub fn unpack<'a>(mut source: impl Read + 'a, at_most: u64) -> io::Result<Box<dyn Read + 'a>> {
    let mut first = Vec::new();
    source
        .by_ref()
        .take(MAGIC.len() as u64)
        .read_to_end(&mut first)?;
    let is_packed = first == MAGIC;
    let whole = Cursor::new(first).chain(source);
    let unpacked: Box<dyn Read + 'a> = if is_packed {
        Box::new(MultiGzDecoder::new(whole))
    } else {
        Box::new(whole)
    };
    Ok(Box::new(Bounded {
        rest: unpacked,
        left: at_most,
        at_most,
    }))
}

struct Bounded<R> {
    rest: R,
    left: u64,
    at_most: u64,
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.rest.read(buffer)?;
        match self.left.checked_sub(read as u64) {
            Some(left) => self.left = left,
            None => {
                let why = format!(
                    "it is larger than {} bytes after decompression: split it",
                    self.at_most
                );
                return Err(io::Error::new(ErrorKind::FileTooLarge, why));
            }
        }
        Ok(read)
    }
}

/// Compresses a text. Equal texts give equal bytes on every machine.
pub fn pack(text: &str) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    // Writing to a vector cannot fail.
    let _ = encoder.write_all(text.as_bytes());
    encoder.finish().unwrap_or_default()
}

#[cfg(test)]
mod tests;
