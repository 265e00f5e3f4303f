//! Numbers of the distinct texts of a pickle. The first ones are known keys and words, so keys are
//! recognized by number.

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in super::super) struct TextId(pub(in super::super) u32);

macro_rules! words {
    ($($name:ident $text:literal)*) => {
        /// The first texts of every pickle: the keys and words that PyTorch writes.
        pub(super) const WORDS: &[&str] = &[$($text),*];

        #[allow(clippy::upper_case_acronyms, non_camel_case_types, reason = "they only number the \
             constants")]
        enum Word {
            $($name),*
        }

        #[allow(dead_code, reason = "actions are recognized by their position")]
        impl TextId {
            $(pub(in super::super) const $name: Self = Self(Word::$name as u32);)*

            pub(super) fn name(self) -> &'static str {
                WORDS[self.0 as usize]
            }
        }
    };
}

words! {
    ACTION "action" ADDR "addr" DEVICE_FREE "device_free" SIZE "size" STREAM "stream"
    TIME_US "time_us" FRAMES "frames"
    NAME "name" FILENAME "filename" LINE "line"
    ALLOC "alloc" FREE_REQUESTED "free_requested" FREE_COMPLETED "free_completed"
    SEGMENT_ALLOC "segment_alloc" SEGMENT_FREE "segment_free" SEGMENT_MAP "segment_map"
    SEGMENT_UNMAP "segment_unmap" SNAPSHOT "snapshot" OOM "oom" USER_DEFINED "user_defined"
    SEGMENTS "segments" DEVICE_TRACES "device_traces" ALLOCATOR_SETTINGS "allocator_settings"
    EXTERNAL_ANNOTATIONS "external_annotations"
    DEVICE "device" ADDRESS "address" TOTAL_SIZE "total_size" ALLOCATED_SIZE "allocated_size"
    ACTIVE_SIZE "active_size" REQUESTED_SIZE "requested_size" SEGMENT_TYPE "segment_type"
    SEGMENT_POOL_ID "segment_pool_id" IS_EXPANDABLE "is_expandable" BLOCKS "blocks" LARGE "large"
    SMALL "small" STATE "state" HISTORY "history" REAL_SIZE "real_size"
    ACTIVE_ALLOCATED "active_allocated" ACTIVE_PENDING_FREE "active_pending_free"
    ACTIVE_AWAITING_FREE "active_awaiting_free" INACTIVE "inactive" STAGE "stage" START "START"
    END "END"
}
