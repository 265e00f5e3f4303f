//! The table of `torch.cuda.memory_summary()`, made from [`MemoryStats`].

use std::fmt::Write as _;

use super::{MemoryStats, PooledStat, Stat, StatFamily};

const WIDTH: usize = 75;

/// The title names the function with this layout. PyTorch's own title has a device number, which
/// statistics do not have.
const TITLE: &str = "Memory summary, laid out as by torch.cuda.memory_summary()";

const ROWS: [(StatFamily, &str); 9] = [
    (StatFamily::AllocatedBytes, "Allocated memory"),
    (StatFamily::ActiveBytes, "Active memory"),
    (StatFamily::RequestedBytes, "Requested memory"),
    (StatFamily::ReservedBytes, "GPU reserved memory"),
    (StatFamily::InactiveSplitBytes, "Non-releasable memory"),
    (StatFamily::Allocation, "Allocations"),
    (StatFamily::Active, "Active allocs"),
    (StatFamily::Segment, "GPU reserved segments"),
    (StatFamily::InactiveSplit, "Non-releasable allocs"),
];

impl MemoryStats {
    /// Formats the table of `torch.cuda.memory_summary()`. Two things differ from PyTorch: the
    /// title does not claim to be PyTorch's, and the rows of oversize allocations and segments are
    /// missing, because these are not counted here.
    ///
    /// Each of the four columns has its own unit: the largest one in which the figure of both pools
    /// is at least 768 (for counts 750), of B, KiB, MiB, … or of ones, thousands (K) and millions
    /// (M). Figures are rounded down, so the pools may add up to less than their sum. The text ends
    /// with a line break.
    ///
    /// Source: `torch/cuda/memory.py` of PyTorch at commit 00b65a04a2d3;
    /// <https://docs.pytorch.org/docs/stable/generated/torch.cuda.memory.memory_summary.html>.
    pub fn summary(&self) -> String {
        let mut table = Table::default();
        table.rule('=');
        table.line(&format!("{TITLE:^WIDTH$}"));
        table.rule('-');
        table.line(&format!(
            "{:12}CUDA OOMs: {:<13}|{:8}cudaMalloc retries: {:<10}",
            "", self.num_ooms, "", self.num_alloc_retries
        ));
        table.rule('=');
        table.line("        Metric         | Cur Usage  | Peak Usage | Tot Alloc  | Tot Freed  ");
        for (family, name) in ROWS {
            table.rule('-');
            table.pooled(name, self.family(family), family.is_bytes());
        }
        table.rule('=');
        table.text
    }
}

#[derive(Default)]
struct Table {
    text: String,
}

impl Table {
    fn line(&mut self, content: &str) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.text, "|{content}|");
    }

    fn rule(&mut self, mark: char) {
        self.line(&mark.to_string().repeat(WIDTH));
    }

    /// Three rows: the sum and both pools.
    fn pooled(
        &mut self,
        name: &str,
        PooledStat {
            all,
            small_pool,
            large_pool,
        }: &PooledStat,
        is_bytes: bool,
    ) {
        for (name, stat) in [
            (name, all),
            ("      from large pool", large_pool),
            ("      from small pool", small_pool),
        ] {
            let columns = figures(stat)
                .into_iter()
                .zip(figures(all))
                .map(|(figure, whole)| show(figure, whole, is_bytes));
            self.line(&format!(
                " {name:<21} | {} ",
                columns.collect::<Vec<_>>().join(" | ")
            ));
        }
    }
}

const fn figures(
    Stat {
        current,
        peak,
        allocated,
        freed,
    }: &Stat,
) -> [u64; 4] {
    [*current, *peak, *allocated, *freed]
}

/// A figure in the unit for its sum, ten characters wide. Bytes have steps of 1024, counts of 1000.
fn show(figure: u64, whole: u64, is_bytes: bool) -> String {
    if is_bytes {
        let (figure, unit) = shorten(
            figure,
            whole,
            1024,
            768,
            &["B  ", "KiB", "MiB", "GiB", "TiB", "PiB"],
        );
        format!("{figure:6} {unit}")
    } else {
        let (figure, unit) = shorten(figure, whole, 1000, 750, &[" ", "K", "M"]);
        format!("{figure:7} {unit} ")
    }
}

/// Divides by `step`, one unit at a time, until the sum is below `enough` or the largest unit is
/// reached.
fn shorten(
    mut figure: u64,
    mut whole: u64,
    step: u64,
    enough: u64,
    units: &[&'static str],
) -> (u64, &'static str) {
    let mut units = units.iter().copied();
    let mut unit = units.next().unwrap_or_default();
    for larger in units {
        if whole < enough * step {
            break;
        }
        (figure, whole, unit) = (figure / step, whole / step, larger);
    }
    (figure, unit)
}

#[cfg(test)]
mod tests;
