//! The texts of a pickle, each once. The first ones are the keys and words of a snapshot, so that a key is recognized by its number.

use std::collections::HashMap;

/// Names a text of [`Texts`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in super::super) struct TextId(pub(in super::super) u32);

macro_rules! words {
    ($($name:ident $text:literal)*) => {
        /// In the order of their numbers.
        const WORDS: &[&str] = &[$($text),*];

        /// The keys and words that PyTorch writes.
        #[allow(missing_docs, reason = "the names say what they are")]
        impl TextId {
            words!(@ 0, $($name)*);
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

/// Texts, each once.
pub(in super::super) struct Texts {
    texts: Vec<Box<str>>,
    ids: HashMap<Box<str>, TextId>,
}

impl Default for Texts {
    fn default() -> Self {
        let mut texts = Self { texts: Vec::new(), ids: HashMap::new() };
        for word in WORDS {
            texts.intern(word.as_bytes());
        }
        texts
    }
}

impl Texts {
    /// What is not UTF-8 is replaced: Python writes halves of surrogate pairs for file names that are none.
    pub(super) fn intern(&mut self, bytes: &[u8]) -> TextId {
        let text = String::from_utf8_lossy(bytes);
        if let Some(&id) = self.ids.get(&*text) {
            return id;
        }
        let id = TextId(u32::try_from(self.texts.len()).expect("the machine bounds what it holds"));
        self.texts.push((*text).into());
        self.ids.insert((*text).into(), id);
        id
    }

    pub(super) fn len(&self) -> usize {
        self.texts.len()
    }

    pub(in super::super) fn get(&self, id: TextId) -> &str {
        &self.texts[id.0 as usize]
    }
}
