//! The known settings: names, values and effects. [`super::Reader`] reads their values.

/// A setting of PyTorch 2.11's allocator, for tables and messages.
#[derive(Debug, PartialEq, Eq)]
pub struct Setting {
    pub name: &'static str,
    /// The values that PyTorch accepts.
    pub takes: &'static str,
    /// Its effect here.
    pub about: &'static str,
    pub(super) key: Key,
}

/// The form of the text after a key's colon.
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
    /// A boolean without effect on device memory.
    HostSwitch,
    PinnedNumRegisterThreads,
    PinnedReserveSegmentSize,
}

impl Setting {
    /// All settings. Those with an effect here come first.
    pub const ALL: &'static [Self] = &[
        Self {
            name: "max_split_size_mb",
            takes: "whole MiB, at least `large_segment_size_mb`",
            about: "Blocks of at least this size are never split, and they serve only requests of at least this size.",
            key: Key::MaxSplitSize,
        },
        Self {
            name: "max_non_split_rounding_mb",
            takes: "whole MiB, at least `large_segment_size_mb`, which is the default",
            about: "The allowed excess of a block over its request if `max_split_size_mb` prevents a split.",
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
            about: "The fraction of the memory limit above which old cached blocks are released before a new segment is made. It has no effect without `per_process_memory_fraction` or `set_memory_fraction`.",
            key: Key::GarbageCollectionThreshold,
        },
        Self {
            name: "per_process_memory_fraction",
            takes: "a number from 0 to 1",
            about: "The limit on reserved memory as a fraction of the device; 1 means no limit.",
            key: Key::PerProcessMemoryFraction,
        },
        Self {
            name: "roundup_power2_divisions",
            takes: "a power of two, or a list such as `[256:1,512:2,>:4]`",
            about: "Requests are rounded up to this many steps between powers of two, by interval of their size in MiB. Missing intervals are not rounded this way, and `>` means all sizes after the last interval.",
            key: Key::RoundupPower2Divisions,
        },
        Self {
            name: "large_segment_size_mb",
            takes: "whole MiB, more than 10",
            about: "The segment size for requests of more than 1 MiB and less than 10 MiB, and the page size of expandable segments. The default is 20.",
            key: Key::LargeSegmentSize,
        },
        Self::without_effect("backend", "`native`", Key::Backend),
        Self::host_switch("pinned_use_background_threads"),
        Self::host_switch("pinned_use_cuda_host_register"),
        Self::host_switch("pinned_use_hip_host_register"),
        Self::host_switch("release_lock_on_cudamalloc"),
        Self::host_switch("release_lock_on_hipmalloc"),
        Self::host_switch("graph_capture_record_stream_reuse"),
        Self::without_effect("pinned_num_register_threads", "a power of two of at most 128", Key::PinnedNumRegisterThreads),
        Self::without_effect("pinned_reserve_segment_size_mb", "whole MiB, more than 0", Key::PinnedReserveSegmentSize),
    ];

    const fn host_switch(name: &'static str) -> Self {
        Self::without_effect(name, "`True` or `False`", Key::HostSwitch)
    }

    const fn without_effect(name: &'static str, takes: &'static str, key: Key) -> Self {
        Self { name, takes, about: "Checked as in PyTorch, but without effect here.", key }
    }

    /// The setting with this key.
    pub fn from_name(name: &str) -> Option<&'static Self> {
        Self::ALL.iter().find(|setting| setting.name == name)
    }
}
