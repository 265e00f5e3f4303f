//! The invariants that are checked after every step, by name: what each promises, in a sentence that a failure quotes.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Declares the invariants once: variant, name in scenarios and reports, and the promise.
macro_rules! invariants {
    ($($variant:ident = $name:literal: $promise:literal,)*) => {
        /// An always-checked invariant.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[allow(missing_docs, reason = "each variant's promise is its documentation: `Invariant::promise`")]
        pub enum Invariant { $(#[serde(rename = $name)] $variant,)* }

        impl Invariant {
            /// Every one, in the order in which they are checked.
            pub const ALL: &'static [Self] = &[$(Self::$variant),*];

            /// Its name in scenarios and reports.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name),* }
            }

            /// What it promises.
            #[must_use]
            pub const fn promise(self) -> &'static str {
                match self { $(Self::$variant => $promise),* }
            }
        }
    };
}

invariants! {
    AccountsAreOrdered = "accounts_are_ordered":
        "requested ≤ active and allocated ≤ active ≤ reserved ≤ device used − context overhead − pressure",
    CountersEqualStructure = "counters_equal_structure":
        "every counter equals the sum over the segments and blocks, recomputed",
    BlocksTileSegments = "blocks_tile_segments":
        "the blocks of a segment follow each other without gap or overlap, fill it exactly, and are of its stream if it has one",
    FreeNeighboursAreMerged = "free_neighbours_are_merged":
        "no two blocks that are free for the same stream stand side by side in a segment",
    AllocationsAreDisjoint = "allocations_are_disjoint":
        "what was handed out lies in one allocated block of its own, as large as was asked for, on the stream it was asked for",
    DeviceUsedFollowsReserved = "device_used_follows_reserved":
        "device used (NVML) moves with reserved, within the device's stated tolerance",
    ContentsAreIntact = "contents_are_intact":
        "memory holds what was written whenever it is read or freed",
    OomChangesOnlyTheCache = "oom_changes_only_the_cache":
        "an out-of-memory changes nothing but cached memory given back, and is counted",
    RetryMakesProgress = "retry_makes_progress":
        "a retry succeeds, asks for less, or meets other memory than the try before it",
    AttemptsAreBounded = "attempts_are_bounded":
        "a step is tried at most as often as its recovery policies allow",
    RecoveryIsRepeatable = "recovery_is_repeatable":
        "a second run from the same seed recovers by the same attempts (simulated device)",
    CollectivesMatch = "collectives_match":
        "every rank of a data-parallel training joins the same collectives in the same order, so that none waits for ever",
    EverythingGoesBack = "everything_goes_back":
        "after the last free and empty_cache nothing is reserved",
    WholeLimitFitsAtTheEnd = "whole_limit_fits_at_the_end":
        "after the last free and empty_cache one allocation of all that is free succeeds, in whole units of what the allocator takes",
    NothingLeaks = "nothing_leaks":
        "at the end the device has no allocation, stream or event that somebody forgot",
}

impl Invariant {
    /// The invariant of that name, if there is one.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|invariant| invariant.name() == name)
    }
}

impl fmt::Display for Invariant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
