//! Small files that describe more memory than a host has. Reading each of them fails within the
//! memory budget.

#![allow(clippy::unwrap_used)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::Write as _;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use flate2::{Compression, write::GzEncoder};
use harness_allocator::units::Bytes;
use harness_trace::snapshot::{Snapshot, SnapshotError};

/// The limit of most reads here: an eighth of that for users, so that the tests are short.
const LIMIT: Bytes = Bytes::mib(128);

/// Counts the bytes in use and their peak.
struct Counting;

static USED: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator with the same arguments.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        PEAK.fetch_max(
            USED.fetch_add(layout.size(), Relaxed) + layout.size(),
            Relaxed,
        );
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        USED.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // The system grows large blocks in place, so the old and new block never coexist.
        PEAK.fetch_max(
            USED.fetch_add(size, Relaxed) + size - layout.size(),
            Relaxed,
        );
        USED.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller keeps the contract of `realloc`.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Writes a pickle into a gzip file.
struct Pickle(GzEncoder<Vec<u8>>);

impl Pickle {
    fn new() -> Self {
        Self(GzEncoder::new(Vec::new(), Compression::fast())).with(b"\x80\x04")
    }

    fn with(self, bytes: &[u8]) -> Self {
        self.repeated(bytes, 1)
    }

    fn repeated(mut self, bytes: &[u8], times: usize) -> Self {
        let each = (1 << 16) / bytes.len() + 1;
        let batch = bytes.repeat(each.min(times));
        (0..times / each).for_each(|_| self.0.write_all(&batch).unwrap());
        self.0.write_all(&bytes.repeat(times % each)).unwrap();
        self
    }

    /// Writes texts, and numbers in decimal form.
    fn items(mut self, items: &[&str]) -> Self {
        for item in items {
            match item.parse::<i64>() {
                Ok(number) => self
                    .0
                    .write_all(&[&[0x8a, 8][..], &number.to_le_bytes()].concat())
                    .unwrap(),
                Err(_) => self
                    .0
                    .write_all(&[&[0x8c, item.len() as u8], item.as_bytes()].concat())
                    .unwrap(),
            }
        }
        self
    }

    fn event(self, action: &str, address: i64, size: i64) -> Self {
        let (address, size) = (address.to_string(), size.to_string());
        self.with(b"}(")
            .items(&[
                "action", action, "addr", &address, "size", &size, "stream", "0",
            ])
            .with(b"u")
    }

    fn segment(self, size: i64, blocks: usize) -> Self {
        let size_of_block = (size / blocks as i64).to_string();
        let pickle = self.with(b"}(").items(&[
            "address",
            "0",
            "total_size",
            &size.to_string(),
            "segment_type",
            "large",
            "blocks",
        ]);
        // The block is object 0. All list entries refer to it.
        let pickle = pickle
            .with(b"](}(")
            .items(&["size", &size_of_block, "state", "inactive"])
            .with(b"u\x94");
        pickle.repeated(b"h\0", blocks - 1).with(b"eu")
    }

    fn finish(self) -> Vec<u8> {
        self.with(b".").0.finish().unwrap()
    }
}

/// Reads a file that no host should read. The peak counts the capacity of vectors, which can be
/// twice the memory in use.
fn assert_refused(
    name: &str,
    file: &[u8],
    limit: Bytes,
    read: impl Fn(&[u8]) -> Result<Snapshot, SnapshotError>,
) {
    let before = USED.load(Relaxed);
    PEAK.store(before, Relaxed);
    let error = read(file).expect_err(name);
    let peak = PEAK.load(Relaxed) - before;
    let is_refused = match error {
        SnapshotError::TooMuchMemory { limit: of_error } => of_error == limit,
        _ => matches!(error, SnapshotError::TooLarge { .. }),
    };
    assert!(is_refused, "{name}: {error}");
    assert!(
        peak < limit.0 as usize / 4 * 9,
        "{name}: {} MiB for a file of {} bytes",
        peak >> 20,
        file.len()
    );
    eprintln!("{name}: {} KB, {} MiB", file.len() / 1000, peak >> 20);
}

/// A snapshot up to the value of `device_traces`.
fn traces() -> Pickle {
    Pickle::new()
        .with(b"}(")
        .items(&["segments"])
        .with(b"]")
        .items(&["device_traces"])
}

/// A list with a million references to one event, on 10,000 devices.
fn shared_list() -> Vec<u8> {
    let list = traces()
        .with(b"](](")
        .event("alloc", 0, 512)
        .with(b"\x94")
        .repeated(b"h\0", 1_000_000)
        .with(b"e\x94");
    list.repeated(b"h\x01", 9_999).with(b"eu").finish()
}

/// A text of 3 GiB.
fn long_text() -> Vec<u8> {
    Pickle::new()
        .with(b"](\x8d")
        .with(&(3_u64 << 30).to_le_bytes())
        .repeated(&[b'a'; 1 << 16], 400)
        .with(b"e")
        .finish()
}

/// Distinct texts of 8 MiB, 256 MiB in total.
fn many_texts() -> Vec<u8> {
    let mut pickle = Pickle::new().with(b"](");
    for number in 0..32_u32 {
        let length = (8_u32 << 20) + 4;
        pickle = pickle
            .with(b"X")
            .with(&length.to_le_bytes())
            .with(&number.to_le_bytes())
            .repeated(&[0xff; 1 << 16], 128);
    }
    pickle.with(b"e").finish()
}

/// A text of 1 MiB as 10,000 values of an unknown key.
fn shared_text() -> Vec<u8> {
    let pickle = Pickle::new()
        .with(b"}(")
        .items(&["segments"])
        .with(b"]")
        .items(&["x"])
        .with(b"](X");
    let pickle = pickle
        .with(&(1_u32 << 20).to_le_bytes())
        .repeated(&[b'a'; 1 << 16], 16)
        .with(b"\x94");
    pickle.repeated(b"h\0", 10_000).with(b"eu").finish()
}

/// A segment with 1,000 blocks that appears 100,000 times.
fn shared_segment() -> Vec<u8> {
    Pickle::new()
        .with(b"](")
        .segment(1000 << 20, 1000)
        .with(b"\x94")
        .repeated(b"h\x01", 100_000)
        .with(b"e")
        .finish()
}

#[test]
fn a_small_file_cannot_exhaust_the_memory() {
    let objects = |bytes: &[u8]| {
        Pickle::new()
            .with(b"](")
            .repeated(bytes, 12_500_000 / bytes.len())
            .with(b"e")
            .finish()
    };
    let files = [
        ("one list for 10,000 devices", shared_list()),
        ("a text of 3 GiB", long_text()),
        ("many texts", many_texts()),
        ("one text for 10,000 values", shared_text()),
        ("one segment for 100,000", shared_segment()),
        ("lists", objects(b"]")),
        ("discarded lists of one item", objects(b"]Na0")),
        ("dictionaries of one key", objects(b"}NNs")),
        ("sets", objects(b"\x8f0")),
        (
            "marks and nothing else",
            Pickle::new().repeated(b"(", 18_000_000).finish(),
        ),
        ("remembered items", objects(b"N\x94\x94\x94\x94")),
        (
            "an item with a large number",
            Pickle::new()
                .with(b"]")
                .repeated(b"N0", 6_000_000)
                .with(b"r\xff\xff\xaf\x00")
                .finish(),
        ),
    ];
    for (name, file) in files {
        assert_refused(name, &file, LIMIT, |file| {
            Snapshot::parse_within(file, LIMIT)
        });
    }
    assert_refused(
        "one list for 10,000 devices",
        &shared_list(),
        Bytes::gib(1),
        Snapshot::parse,
    );
}

#[test]
fn sizes_beyond_any_device_are_errors() {
    let petabyte = 1_i64 << 50;
    let event = |action: &str, address, size| {
        let file = traces()
            .with(b"](](")
            .event(action, address, size)
            .with(b"eeu")
            .finish();
        Snapshot::parse(&file)
            .map(drop)
            .map_err(|error| error.to_string())
    };
    for action in [
        "alloc",
        "free_completed",
        "segment_alloc",
        "segment_map",
        "segment_unmap",
    ] {
        let error = event(action, 0, petabyte).unwrap_err();
        assert!(
            error.contains(
                "device_traces[0][0].size should be at most 1 TiB, but is 1125899906842624"
            ),
            "{error}"
        );
        assert!(
            event(action, -512, 1024)
                .unwrap_err()
                .contains("within the address space"),
            "{action}"
        );
    }
    assert!(
        event("oom", petabyte, 512)
            .unwrap_err()
            .contains("device_free should be at most 1 TiB"),
        "free memory"
    );
    assert_eq!(
        event("oom", 0, petabyte),
        Ok(()),
        "a request of any size can fail"
    );
    let segment = Snapshot::parse(
        &Pickle::new()
            .with(b"](")
            .segment(petabyte, 1)
            .with(b"e")
            .finish(),
    );
    assert!(
        segment
            .unwrap_err()
            .to_string()
            .contains("segments[0].total_size should be at most 1 TiB")
    );
    let log = "Thread,Time,Action,Pointer,Size,Stream\n1,1,allocate,0x100,1125899906842624,0\n";
    assert!(
        Snapshot::parse(log.as_bytes())
            .unwrap_err()
            .to_string()
            .contains("a size of at most 1 TiB")
    );
}
