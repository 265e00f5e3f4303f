//! The exchange of [`Member`]s when ranks split a communicator: each rank appends a record to a file of the split, and waits for the others, as NCCL
//! does.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::{path::Path, thread, time::Duration};

const POLL: Duration = Duration::from_millis(1);

/// What a rank passes to `ncclCommSplit`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Member {
    pub(super) rank: i32,
    pub(super) color: i32,
    pub(super) key: i32,
}

impl Member {
    const SIZE: usize = 12;

    fn to_bytes(self) -> Vec<u8> {
        [self.rank, self.color, self.key].into_iter().flat_map(i32::to_ne_bytes).collect()
    }

    fn of_bytes(bytes: &[u8; Self::SIZE]) -> Self {
        let [rank, color, key] = [0, 4, 8].map(|at| i32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]));
        Self { rank, color, key }
    }
}

/// Returns the size of this member's new communicator and its rank there, once `ranks` members have called. Members of a color are ordered by key, then
/// by rank.
pub(super) fn split(file: &Path, ranks: usize, own: Member) -> io::Result<(usize, usize)> {
    // Appending a short record is atomic.
    File::options().append(true).create(true).open(file)?.write_all(&own.to_bytes())?;
    let mut bytes = fs::read(file)?;
    while bytes.len() < ranks * Member::SIZE {
        thread::sleep(POLL);
        bytes = fs::read(file)?;
    }
    let (members, _) = bytes.as_chunks::<{ Member::SIZE }>();
    let mut group: Vec<Member> = members.iter().map(Member::of_bytes).filter(|member| member.color == own.color).collect();
    group.sort_by_key(|member| (member.key, member.rank));
    let rank = group.iter().position(|member| *member == own).ok_or(io::ErrorKind::InvalidData)?;
    Ok((group.len(), rank))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

    use super::*;

    #[test]
    fn ranks_with_one_color_are_ordered_by_key() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("split");
        let members = [(0, 0, 5), (1, 1, 0), (2, 0, 4), (3, 0, 4)].map(|(rank, color, key)| Member { rank, color, key });
        let split = |member| split(&file, members.len(), member).unwrap();
        let new = thread::scope(|threads| members.map(|member| threads.spawn(move || split(member))).map(|thread| thread.join().unwrap()));
        assert_eq!(new, [(3, 2), (1, 0), (3, 0), (3, 1)]);
    }
}
