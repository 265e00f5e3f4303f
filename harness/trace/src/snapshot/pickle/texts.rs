//! The distinct texts of a pickle. The first ones are known keys and words, so keys are recognized by number.

use indexmap::IndexSet;

/// Identifies a text of [`Texts`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in super::super) struct TextId(pub(in super::super) u32);

macro_rules! words {
    ($($name:ident $text:literal)*) => {
        const WORDS: &[&str] = &[$($text),*];

        /// The keys and words that PyTorch writes.
        #[allow(dead_code, reason = "actions are recognized by their position")]
        impl TextId {
            words!(@ 0, $($name)*);

            /// The text of one of these constants.
            pub(super) fn name(self) -> &'static str {
                WORDS[self.0 as usize]
            }
        }
    };
    (@ $number:expr, $name:ident $($rest:ident)*) => {
        pub(in super::super) const $name: Self = Self($number);
        words!(@ $number + 1, $($rest)*);
    };
    (@ $number:expr,) => {};
}

words! {
    ACTION "action" ADDR "addr" DEVICE_FREE "device_free" SIZE "size" STREAM "stream" TIME_US "time_us" FRAMES "frames"
    NAME "name" FILENAME "filename" LINE "line"
    ALLOC "alloc" FREE_REQUESTED "free_requested" FREE_COMPLETED "free_completed" SEGMENT_ALLOC "segment_alloc" SEGMENT_FREE "segment_free"
    SEGMENT_MAP "segment_map" SEGMENT_UNMAP "segment_unmap" SNAPSHOT "snapshot" OOM "oom" USER_DEFINED "user_defined"
    SEGMENTS "segments" DEVICE_TRACES "device_traces" ALLOCATOR_SETTINGS "allocator_settings" EXTERNAL_ANNOTATIONS "external_annotations"
    DEVICE "device" ADDRESS "address" TOTAL_SIZE "total_size" ALLOCATED_SIZE "allocated_size" ACTIVE_SIZE "active_size"
    REQUESTED_SIZE "requested_size" SEGMENT_TYPE "segment_type" SEGMENT_POOL_ID "segment_pool_id" IS_EXPANDABLE "is_expandable" BLOCKS "blocks"
    LARGE "large" SMALL "small" STATE "state" HISTORY "history" REAL_SIZE "real_size"
    ACTIVE_ALLOCATED "active_allocated" ACTIVE_PENDING_FREE "active_pending_free" ACTIVE_AWAITING_FREE "active_awaiting_free" INACTIVE "inactive"
    STAGE "stage" START "START" END "END"
}

pub(super) struct Texts(IndexSet<String>);

impl Default for Texts {
    fn default() -> Self {
        Self(WORDS.iter().map(|&word| word.to_owned()).collect())
    }
}

impl Texts {
    /// The number of a text, and whether the text is new. Replaces invalid UTF-8: Python writes lone surrogates for such file names.
    pub(super) fn add(&mut self, bytes: &[u8]) -> (TextId, bool) {
        let text = String::from_utf8_lossy(bytes);
        let known = self.0.get_index_of(&*text);
        let id = known.unwrap_or_else(|| self.0.insert_full(text.into_owned()).0);
        (TextId(id as u32), known.is_none())
    }

    pub(super) fn get(&self, id: TextId) -> &str {
        &self.0[id.0 as usize]
    }
}
