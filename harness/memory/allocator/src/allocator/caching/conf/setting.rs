//! The known settings: names, values, effects, and the versions that have them. [`super::Reader`]
//! reads their values.

use crate::allocator::caching::TorchVersion;

/// A setting of PyTorch's allocator, for tables and messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Setting {
    pub name: &'static str,
    pub takes: &'static str,
    /// Its effect here.
    pub about: &'static str,
    /// The first version that has it, as far as [`TorchVersion`] goes back.
    pub since: TorchVersion,
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
    /// A whole number above 0. It has no effect on device memory.
    HostSize,
    ThrowOnMallocOom,
    ExpandableSegmentsReserve,
    ExpandableSegmentsReserveByClass,
}

impl Setting {
    pub const ALL: &'static [Self] = &[
        Self::new("max_split_size_mb", Key::MaxSplitSize)
            .takes("whole MiB, at least `large_segment_size_mb`")
            .about(
                "Blocks of at least this size are never split, and they serve only requests of \
                 at least this size.",
            ),
        Self::new("max_non_split_rounding_mb", Key::MaxNonSplitRounding)
            .takes("whole MiB, at least `large_segment_size_mb`, which is the default")
            .about(
                "The allowed excess of a block over its request if `max_split_size_mb` prevents \
                 a split.",
            )
            .since(TorchVersion::V2_6),
        Self::new("expandable_segments", Key::ExpandableSegments)
            .about("Segments are reserved addresses that grow and shrink by pages."),
        Self::new(
            "expandable_segments_reserve",
            Key::ExpandableSegmentsReserve,
        )
        .takes("a fraction of the device such as `0.5`, or a size such as `40G`")
        .about(
            "The addresses that an expandable segment reserves, and so the largest request. \
                 The default is 9/8 of the device.",
        )
        .since(TorchVersion::V2_15),
        Self::new(
            "garbage_collection_threshold",
            Key::GarbageCollectionThreshold,
        )
        .takes("a number above 0 and below 1")
        .about(
            "The fraction of the memory limit above which old cached blocks are released \
                 before a new segment is made. It has no effect without \
                 `per_process_memory_fraction` or `set_memory_fraction`.",
        ),
        Self::new("per_process_memory_fraction", Key::PerProcessMemoryFraction)
            .takes("a number from 0 to 1")
            .about("The limit on reserved memory as a fraction of the device; 1 means no limit.")
            .since(TorchVersion::V2_10),
        Self::new("throw_on_cudamalloc_oom", Key::ThrowOnMallocOom)
            .about(
                "A request fails at once, without release or retry, if its segment would exceed \
                 `per_process_memory_fraction` of the device, or the device.",
            )
            .since(TorchVersion::V2_12),
        Self::new("roundup_power2_divisions", Key::RoundupPower2Divisions)
            .takes("a power of two, or a list such as `[256:1,512:2,>:4]`")
            .about(
                "Requests are rounded up to this many steps between powers of two, by interval \
                 of their size in MiB. Missing intervals are not rounded this way, and `>` means \
                 all sizes after the last interval.",
            ),
        Self::new("large_segment_size_mb", Key::LargeSegmentSize)
            .takes("whole MiB, more than 10")
            .about(
                "The segment size for requests of more than 1 MiB and less than 10 MiB, and the \
                 page size of expandable segments. The default is 20.",
            )
            .since(TorchVersion::V2_11),
        Self::new("backend", Key::Backend).takes("`native`"),
        Self::host_switch("pinned_use_background_threads").since(TorchVersion::V2_6),
        Self::host_switch("pinned_use_cuda_host_register"),
        Self::host_switch("pinned_use_hip_host_register"),
        Self::host_switch("pinned_free_catch_all").since(TorchVersion::V2_12),
        Self::host_switch("release_lock_on_cudamalloc"),
        Self::host_switch("release_lock_on_hipmalloc"),
        Self::host_switch("graph_capture_record_stream_reuse").since(TorchVersion::V2_9),
        Self::new("pinned_num_register_threads", Key::PinnedNumRegisterThreads).takes(
            "a power of \
             two of at most 128",
        ),
        Self::host_size("pinned_reserve_segment_size_mb").since(TorchVersion::V2_10),
        Self::host_size("pinned_max_round_threshold_mb").since(TorchVersion::V2_13),
        Self::host_size("pinned_max_cached_size_mb").since(TorchVersion::V2_13),
        Self::new(
            "expandable_segments_reserve_by_class",
            Key::ExpandableSegmentsReserveByClass,
        )
        .takes("a list such as `[a:0.5,b:40G]`")
        .since(TorchVersion::V2_15),
    ];

    const fn new(name: &'static str, key: Key) -> Self {
        let about = "Checked as in PyTorch, but without effect here.";
        Self {
            name,
            takes: "`True` or `False`",
            about,
            since: TorchVersion::V2_4,
            key,
        }
    }

    const fn takes(self, takes: &'static str) -> Self {
        Self { takes, ..self }
    }

    const fn about(self, about: &'static str) -> Self {
        Self { about, ..self }
    }

    const fn since(self, since: TorchVersion) -> Self {
        Self { since, ..self }
    }

    const fn host_switch(name: &'static str) -> Self {
        Self::new(name, Key::HostSwitch)
    }

    const fn host_size(name: &'static str) -> Self {
        Self::new(name, Key::HostSize).takes("whole MiB, more than 0")
    }

    pub fn from_name(name: &str) -> Option<&'static Self> {
        Self::ALL.iter().find(|setting| setting.name == name)
    }
}
