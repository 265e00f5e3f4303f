//! Files that may be packed by gzip: allocation traces and recordings. What is packed is told by its content, not by its name.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Cursor, Read};
use std::path::Path;

use flate2::read::MultiGzDecoder;

/// The first bytes of a file packed by gzip, <https://www.rfc-editor.org/rfc/rfc1952#page-6>.
const MAGIC: [u8; 2] = [0x1f, 0x8b];

/// Opens a file, unpacking it where it is packed.
///
/// # Errors
/// [`io::Error`] of the file. What cannot be unpacked is told while it is read.
pub fn open(path: &Path) -> io::Result<Box<dyn BufRead>> {
    let mut file = File::open(path)?;
    let mut first = Vec::new();
    file.by_ref().take(MAGIC.len() as u64).read_to_end(&mut first)?;
    let is_packed = first == MAGIC;
    let whole = Cursor::new(first).chain(file);
    Ok(if is_packed { Box::new(BufReader::new(MultiGzDecoder::new(whole))) } else { Box::new(BufReader::new(whole)) })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::io::Write;

    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::*;

    fn packed(text: &str) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(text.as_bytes()).unwrap();
        encoder.finish().unwrap()
    }

    fn read(bytes: &[u8]) -> io::Result<String> {
        let mut file = tempfile::NamedTempFile::new()?;
        file.write_all(bytes)?;
        let mut text = String::new();
        open(file.path())?.read_to_string(&mut text).map(|_| text)
    }

    #[test]
    fn a_file_reads_the_same_whether_it_is_packed_once_in_pieces_or_not_at_all() {
        let pieces = [packed("a 1 512 0\n"), packed("f 1\n")].concat();
        for bytes in [b"a 1 512 0\nf 1\n".to_vec(), packed("a 1 512 0\nf 1\n"), pieces] {
            assert_eq!(read(&bytes).unwrap(), "a 1 512 0\nf 1\n");
        }
        assert_eq!((read(b"").unwrap(), read(b"d").unwrap()), (String::new(), "d".to_owned()));
    }

    #[test]
    fn a_packed_file_that_was_cut_off_is_an_error() {
        let whole = packed("a 1 512 0\nf 1\n");
        assert!(read(&whole[..whole.len() - 3]).is_err());
    }
}
