use std::collections::BTreeMap;

/// Bytes per piece. Pieces that were never written use no host memory.
const PIECE: usize = 2 << 20;

/// Bytes that are compared or written together: whole stretches are fast in builds without
/// optimization too.
const STRETCH: usize = 4096;

/// The bytes of a piece that was never written.
static ZEROS: [u8; PIECE] = [0; PIECE];

#[derive(Debug, Default)]
pub(crate) struct DeviceBytes(BTreeMap<u64, Vec<u8>>);

struct Part {
    piece: u64,
    /// Start and end in the piece.
    from: usize,
    to: usize,
    /// Start in the range.
    offset: u64,
}

fn parts(address: u64, len: u64) -> impl Iterator<Item = Part> {
    let mut offset = 0;
    std::iter::from_fn(move || {
        let left = len.checked_sub(offset).filter(|left| *left > 0)?;
        let at = address + offset;
        let from = (at % PIECE as u64) as usize;
        let to = usize::try_from(left).unwrap_or(PIECE).min(PIECE - from) + from;
        let part = Part {
            piece: at / PIECE as u64,
            from,
            to,
            offset,
        };
        offset += (to - from) as u64;
        Some(part)
    })
}

impl DeviceBytes {
    fn part(&self, part: &Part) -> &[u8] {
        &self.0.get(&part.piece).map_or(&ZEROS[..], Vec::as_slice)[part.from..part.to]
    }

    fn part_mut(&mut self, part: &Part) -> &mut [u8] {
        &mut self.0.entry(part.piece).or_insert_with(|| vec![0; PIECE])[part.from..part.to]
    }

    pub(crate) fn fill(&mut self, address: u64, len: u64, pattern: [u8; 8]) {
        for part in parts(address, len) {
            let pattern = stretch(from_offset(pattern, part.offset), part.to - part.from);
            for bytes in self.part_mut(&part).chunks_mut(STRETCH) {
                bytes.copy_from_slice(&pattern[..bytes.len()]);
            }
        }
    }

    /// Counts the bytes that differ from a pattern, and returns the offset of the first.
    pub(crate) fn differing(&self, address: u64, len: u64, pattern: [u8; 8]) -> (u64, Option<u64>) {
        let (mut count, mut lowest) = (0, None);
        for part in parts(address, len) {
            let pattern = stretch(from_offset(pattern, part.offset), part.to - part.from);
            for (number, bytes) in self.part(&part).chunks(STRETCH).enumerate() {
                let should = &pattern[..bytes.len()];
                if bytes == should {
                    continue;
                }
                for (offset, (byte, should)) in bytes.iter().zip(should).enumerate() {
                    if byte != should {
                        count += 1;
                        lowest.get_or_insert(part.offset + (number * STRETCH + offset) as u64);
                    }
                }
            }
        }
        (count, lowest)
    }

    pub(crate) fn flip(&mut self, address: u64) {
        let mut byte = [0];
        self.read(address, &mut byte);
        self.write(address, &[byte[0] ^ 1]);
    }

    pub(crate) fn read(&self, address: u64, into: &mut [u8]) {
        for part in parts(address, into.len() as u64) {
            let bytes = self.part(&part);
            into[part.offset as usize..][..bytes.len()].copy_from_slice(bytes);
        }
    }

    pub(crate) fn write(&mut self, address: u64, bytes: &[u8]) {
        for part in parts(address, bytes.len() as u64) {
            let into = self.part_mut(&part);
            into.copy_from_slice(&bytes[part.offset as usize..][..into.len()]);
        }
    }

    pub(crate) fn forget(&mut self, address: u64, len: u64) {
        for part in parts(address, len) {
            if part.to - part.from == PIECE {
                self.0.remove(&part.piece);
            } else if let Some(bytes) = self.0.get_mut(&part.piece) {
                bytes[part.from..part.to].fill(0);
            }
        }
    }
}

/// Repeats a pattern for a range of this length, up to [`STRETCH`].
fn stretch(pattern: [u8; 8], len: usize) -> [u8; STRETCH] {
    let mut all = [0; STRETCH];
    let (words, _) = all.as_chunks_mut::<8>();
    let needed = len.div_ceil(8).min(words.len());
    words[..needed].fill(pattern);
    all
}

/// The pattern, starting at an offset.
fn from_offset(mut pattern: [u8; 8], offset: u64) -> [u8; 8] {
    pattern.rotate_left((offset % 8) as usize);
    pattern
}

#[cfg(test)]
mod tests;
