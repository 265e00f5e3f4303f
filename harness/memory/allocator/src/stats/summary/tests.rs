use super::*;
use crate::{stats::PoolKind, units::Bytes};

/// All columns differ, and every unit occurs.
fn stats() -> MemoryStats {
    let mut stats = MemoryStats {
        num_ooms: 3,
        num_alloc_retries: 5,
        num_device_alloc: 99,
        ..MemoryStats::default()
    };
    stats
        .allocated_bytes
        .increase(PoolKind::Large, Bytes::gib(900).get());
    stats
        .allocated_bytes
        .decrease(PoolKind::Large, Bytes::gib(899).get());
    stats.allocated_bytes.increase(PoolKind::Small, 512);
    stats
        .active_bytes
        .increase(PoolKind::Large, Bytes::gib(1).get());
    stats
        .active_bytes
        .increase(PoolKind::Small, Bytes::mib(1).get() + 1023);
    stats.requested_bytes.increase(PoolKind::Small, 500);
    stats.requested_bytes.decrease(PoolKind::Small, 500);
    stats
        .reserved_bytes
        .increase(PoolKind::Large, 768 * 1024 - 1);
    stats
        .inactive_split_bytes
        .increase(PoolKind::Large, 768 * 1024);
    stats.allocation.increase(PoolKind::Small, 749_999);
    stats.active.increase(PoolKind::Small, 750_000);
    stats.active.decrease(PoolKind::Small, 749_998);
    stats.segment.increase(PoolKind::Large, 999);
    stats.segment.increase(PoolKind::Small, 2_000_000_000);
    stats
}

/// The output of PyTorch's own formatting for the same figures, without the title and the two
/// oversize rows.
const EXPECTED: &str = "\
|===========================================================================|
|        Memory summary, laid out as by torch.cuda.memory_summary()         |
|---------------------------------------------------------------------------|
|            CUDA OOMs: 3            |        cudaMalloc retries: 5         |
|===========================================================================|
|        Metric         | Cur Usage  | Peak Usage | Tot Alloc  | Tot Freed  |
|---------------------------------------------------------------------------|
| Allocated memory      |   1024 MiB |    900 GiB |    900 GiB |    899 GiB |
|       from large pool |   1024 MiB |    900 GiB |    900 GiB |    899 GiB |
|       from small pool |      0 MiB |      0 GiB |      0 GiB |      0 GiB |
|---------------------------------------------------------------------------|
| Active memory         |   1025 MiB |   1025 MiB |   1025 MiB |      0 B   |
|       from large pool |   1024 MiB |   1024 MiB |   1024 MiB |      0 B   |
|       from small pool |      1 MiB |      1 MiB |      1 MiB |      0 B   |
|---------------------------------------------------------------------------|
| Requested memory      |      0 B   |    500 B   |    500 B   |    500 B   |
|       from large pool |      0 B   |      0 B   |      0 B   |      0 B   |
|       from small pool |      0 B   |    500 B   |    500 B   |    500 B   |
|---------------------------------------------------------------------------|
| GPU reserved memory   | 786431 B   | 786431 B   | 786431 B   |      0 B   |
|       from large pool | 786431 B   | 786431 B   | 786431 B   |      0 B   |
|       from small pool |      0 B   |      0 B   |      0 B   |      0 B   |
|---------------------------------------------------------------------------|
| Non-releasable memory |    768 KiB |    768 KiB |    768 KiB |      0 B   |
|       from large pool |    768 KiB |    768 KiB |    768 KiB |      0 B   |
|       from small pool |      0 KiB |      0 KiB |      0 KiB |      0 B   |
|---------------------------------------------------------------------------|
| Allocations           |  749999    |  749999    |  749999    |       0    |
|       from large pool |       0    |       0    |       0    |       0    |
|       from small pool |  749999    |  749999    |  749999    |       0    |
|---------------------------------------------------------------------------|
| Active allocs         |       2    |     750 K  |     750 K  |  749998    |
|       from large pool |       0    |       0 K  |       0 K  |       0    |
|       from small pool |       2    |     750 K  |     750 K  |  749998    |
|---------------------------------------------------------------------------|
| GPU reserved segments |    2000 M  |    2000 M  |    2000 M  |       0    |
|       from large pool |       0 M  |       0 M  |       0 M  |       0    |
|       from small pool |    2000 M  |    2000 M  |    2000 M  |       0    |
|---------------------------------------------------------------------------|
| Non-releasable allocs |       0    |       0    |       0    |       0    |
|       from large pool |       0    |       0    |       0    |       0    |
|       from small pool |       0    |       0    |       0    |       0    |
|===========================================================================|
";

#[test]
fn the_table_equals_that_of_pytorch() {
    let summary = stats().summary();
    assert_eq!(
        summary.lines().collect::<Vec<_>>(),
        EXPECTED.lines().collect::<Vec<_>>()
    );
    assert!(summary.ends_with("|\n"));
}

#[test]
fn every_line_is_as_wide_as_the_title_while_figures_fit_their_columns() {
    let summary = stats().summary();
    assert!(
        summary
            .lines()
            .all(|line| line.len() == WIDTH + 2 && line.starts_with('|') && line.ends_with('|')),
        "{summary}"
    );
}

#[test]
fn a_figure_above_the_largest_unit_widens_its_cell() {
    let mut stats = MemoryStats::default();
    stats.segment.increase(PoolKind::Large, u64::MAX);
    assert!(
        stats.summary().contains("| 18446744073709 M  |"),
        "{}",
        stats.summary()
    );
}
