//! The end of a report: its terms, units and cost models.

use harness_allocator::{device::Clock, units::Bytes};
use harness_base::statistics::LEAST_FOR_P99;
use harness_record::CostFigure;

use crate::escape::prose;
use crate::words::Grid;
use crate::{Report, page::Page};

impl Page {
    pub(super) fn how_to_read(&mut self, report: &Report<'_>) {
        self.block("## How to read this");
        let max = format!(
            "**max**: the largest sample, shown instead of p99 for fewer than {LEAST_FOR_P99} \
             samples."
        );
        let lines = [
            "**requested**: bytes requested by the caller.",
            "**allocated**: requested bytes after rounding.",
            "**active**: allocated bytes, plus freed blocks that wait for an event of another \
             stream.",
            "**reserved**: memory obtained from the driver, including cached memory.",
            "**device used**: NVML's figure for the whole device; the tables show it without the \
             context overhead.",
            "**context overhead**: device used before the first allocation: the CUDA context, its \
             modules, and other processes.",
            "**peak**: the maximum since the start of the run or the last reset.",
            "**allocator retry**: a failed driver allocation, after which the allocator released \
             its cache and tried again (`num_alloc_retries`).",
            "**OOM**: a request that failed after all allocator retries.",
            "**fits after 1 retry**: the step's recovery policy repeated a failed request. \
             Allocator retries do not count.",
            "**rank**: position among completed trainings of the same arm with the same model and \
             first request, but other recovery policies. \
             Ordered by throughput (completed samples divided by the time of the step), then by \
             effective batch.",
            "**memory summary**: the allocator's counters at the end of a run that did not pass, \
             laid out as by `torch.cuda.memory_summary()`; \
             *non-releasable*: free memory in segments with live blocks. Oversize allocations are \
             not counted. `harness run --memory-summary` \
             prints it for every run.",
            "**runs**: repetitions that passed. Allocators take turns, so a drift of the device \
             affects all of them.",
            "**audited and timed**: a run is checked after every operation. If it passes, it is \
             repeated on a new device without checks, to \
             measure times.",
            "**median, MAD, p99**: the median sample, the median absolute deviation (unscaled), \
             and the 99th percentile by nearest rank.",
            &max,
            "**(n)**: number of samples; `a of b`: a random sample of a from b operations.",
            "**÷ direct**: the median divided by the median of `direct`, which calls the driver \
             for every request. Below 1 is faster.",
        ];
        let is_simulated = report
            .devices
            .iter()
            .any(|device| device.info.clock == Clock::Simulated);
        let model_times = is_simulated.then_some(
            "**0 ns**, as a model time: an operation without a device call, for example an \
             allocation from the cache. The model charges \
             device calls only, not the allocator's work on the host.",
        );
        let lines = lines.into_iter().chain(model_times).map(str::to_owned);
        self.list(lines);
        self.block(format!(
            "Written from records of harness {}.",
            prose(&report.records.harness)
        ));
        self.block(format!(
            "Sizes have binary units (1 MiB = {} bytes); if the short form rounds, the bytes \
             follow in parentheses.",
            Bytes::mib(1).get()
        ));
    }

    /// Adds each cost model once, even if several devices use it.
    pub(super) fn cost_models(&mut self, report: &Report<'_>) {
        let mut shown: Vec<(Option<&str>, &[&CostFigure])> = Vec::new();
        for device in report
            .devices
            .iter()
            .filter(|device| !device.cost_figures.is_empty())
        {
            let model = (
                device.info.fingerprint.cost_model.as_deref(),
                device.cost_figures.as_slice(),
            );
            if !shown.contains(&model) {
                shown.push(model);
                self.cost_model(model.0.unwrap_or("without a name"), model.1);
            }
        }
    }

    pub(crate) fn cost_figures<'f>(&mut self, figures: impl Iterator<Item = &'f CostFigure>) {
        let cells = |figure: &CostFigure| {
            vec![
                figure.name.clone(),
                figure.value.clone(),
                figure.source.clone(),
            ]
        };
        self.grid(&Grid::new(
            "lrl",
            ["operation", "charge", "source"],
            figures.map(cells),
        ));
    }

    fn cost_model(&mut self, name: &str, figures: &[&CostFigure]) {
        self.fold(
            &format!(
                "Cost model {}: the charge for each operation, and its source",
                prose(name)
            ),
            |page| {
                page.cost_figures(figures.iter().copied());
            },
        );
    }
}
