//! The invariants that are checked after every step, with the sentence that a failure quotes.

described! {
    /// An invariant that is checked after every step. Its promise is the property that it
    /// guarantees.
    Invariant, promise:
    AccountsAreOrdered = "accounts_are_ordered":
        "requested ≤ active and allocated ≤ active ≤ reserved ≤ device used − context overhead − \
         external memory",
    CountersEqualStructure = "counters_equal_structure":
        "every counter equals the sum over the segments and blocks, recomputed",
    BlocksTileSegments = "blocks_tile_segments":
        "the blocks of a segment follow each other without gap or overlap, fill it exactly, and \
         are of its stream if it has one",
    FreeNeighboursAreMerged = "free_neighbours_are_merged":
        "no two blocks that are free for the same stream are adjacent in a segment",
    AllocationsAreDisjoint = "allocations_are_disjoint":
        "each allocation has its own block, of at least the requested size, on the requested \
         stream",
    DeviceUsedFollowsReserved = "device_used_follows_reserved":
        "device used (NVML) moves with reserved, within the device's stated tolerance",
    ContentsAreIntact = "contents_are_intact":
        "reading or freeing memory finds the values that were written",
    OomChangesOnlyTheCache = "oom_changes_only_the_cache":
        "an out-of-memory error is counted and changes nothing except that cached memory is \
         released",
    RetryMakesProgress = "retry_makes_progress":
        "a retry succeeds, requests less, or starts from another memory state than the attempt \
         before",
    AttemptsAreBounded = "attempts_are_bounded":
        "a step makes at most as many attempts as its recovery policies allow",
    RecoveryIsRepeatable = "recovery_is_repeatable":
        "a second run from the same seed recovers with the same attempts (simulated device)",
    CollectivesMatch = "collectives_match":
        "every rank of a data-parallel training joins the same collectives in the same order, so \
         none waits forever",
    EverythingGoesBack = "everything_goes_back":
        "after the last free and empty_cache no memory is reserved",
    WholeLimitFitsAtTheEnd = "whole_limit_fits_at_the_end":
        "after the last free and empty_cache one allocation of all free memory succeeds, in whole \
         segments or pages",
    NothingLeaks = "nothing_leaks":
        "at the end of the run no device allocation, stream or event is left",
}

impl Invariant {
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL
            .iter()
            .copied()
            .find(|invariant| invariant.name() == name)
    }
}
