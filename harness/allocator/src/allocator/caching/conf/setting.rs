//! The settings there are: their names, what they take, what they do. [`super::Reader`] reads their values.

/// A setting of PyTorch 2.11's allocator, for tables and messages.
#[derive(Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct Setting {
    pub name: &'static str,
    /// The values that PyTorch takes.
    pub takes: &'static str,
    /// What it does here.
    pub about: &'static str,
    pub(super) key: Key,
}

/// How the text behind a key's colon is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Key {
    LargeSegmentSize,
    MaxSplitSize,
    MaxNonSplitRounding,
    RoundupPower2Divisions,
    GarbageCollectionThreshold,
    PerProcessMemoryFraction,
    ExpandableSegments,
    Backend,
    /// A boolean that does not concern device memory.
    HostSwitch,
    PinnedNumRegisterThreads,
    PinnedReserveSegmentSize,
}

impl Setting {
    /// Every one, those with an effect here first.
    pub const ALL: &'static [Self] = &[
        Self {
            name: "max_split_size_mb",
            takes: "whole MiB, at least `large_segment_size_mb`",
            about: "Blocks of at least this are never split, and such blocks serve only requests of at least this.",
            key: Key::MaxSplitSize,
        },
        Self {
            name: "max_non_split_rounding_mb",
            takes: "whole MiB, at least `large_segment_size_mb`, which it is if not given",
            about: "How much larger than the request a block may be that is not split because of `max_split_size_mb`.",
            key: Key::MaxNonSplitRounding,
        },
        Self {
            name: "expandable_segments",
            takes: "`True` or `False`",
            about: "Segments are reserved addresses that grow and shrink by pages.",
            key: Key::ExpandableSegments,
        },
        Self {
            name: "garbage_collection_threshold",
            takes: "a number above 0 and below 1",
            about: "Share of the memory limit above which old cached blocks go back before a new segment is made; without `per_process_memory_fraction` or `set_fraction` it does nothing.",
            key: Key::GarbageCollectionThreshold,
        },
        Self {
            name: "per_process_memory_fraction",
            takes: "a number from 0 to 1",
            about: "Share of the device that may be held at most; 1 is no limit.",
            key: Key::PerProcessMemoryFraction,
        },
        Self {
            name: "roundup_power2_divisions",
            takes: "a power of two, or a list such as `[256:1,512:2,>:4]`",
            about: "Requests are rounded up to one of so many steps between powers of two, by interval of their size in MiB; intervals that a list leaves out are not rounded so, and `>` is all behind the last one.",
            key: Key::RoundupPower2Divisions,
        },
        Self {
            name: "large_segment_size_mb",
            takes: "whole MiB, more than 10",
            about: "Segment for requests of more than 1 MiB and less than 10 MiB, and page of expandable segments: 20 if not given.",
            key: Key::LargeSegmentSize,
        },
        Self { name: "backend", takes: "`native`", about: NO_EFFECT, key: Key::Backend },
        Self::host_switch("pinned_use_background_threads"),
        Self::host_switch("pinned_use_cuda_host_register"),
        Self::host_switch("pinned_use_hip_host_register"),
        Self::host_switch("release_lock_on_cudamalloc"),
        Self::host_switch("release_lock_on_hipmalloc"),
        Self::host_switch("graph_capture_record_stream_reuse"),
        Self {
            name: "pinned_num_register_threads",
            takes: "a power of two of at most 128",
            about: NO_EFFECT,
            key: Key::PinnedNumRegisterThreads,
        },
        Self {
            name: "pinned_reserve_segment_size_mb",
            takes: "whole MiB, more than 0",
            about: NO_EFFECT,
            key: Key::PinnedReserveSegmentSize,
        },
    ];

    const fn host_switch(name: &'static str) -> Self {
        Self { name, takes: "`True` or `False`", about: NO_EFFECT, key: Key::HostSwitch }
    }

    /// The setting of that key.
    #[must_use]
    pub fn from_name(name: &str) -> Option<&'static Self> {
        Self::ALL.iter().find(|setting| setting.name == name)
    }
}

const NO_EFFECT: &str = "Checked as PyTorch does, and without effect here.";
