//! Long help texts of `harness run`.

use harness_allocator::allocator::AllocatorKind;
use harness_language::arms;

pub(super) const LAST_FAILED_HELP: &str = "\
Run only the runs that failed last time, or all runs if none failed.

The file reports/runs/last-failed.json in the current folder lists the failed runs by scenario and \
allocator. A run that passes is removed from the list; other runs stay in it. With --no-report the \
list is read but not changed.";

pub(super) const TRACE_HELP: &str = "\
Write a timeline of the runs: nested steps, driver calls with size and error, the work of each \
stream, and the allocated and reserved memory. The file has Chrome's trace format, with one \
process per run. https://ui.perfetto.dev and chrome://tracing show it.

The timeline comes from an additional run after the others, because recording takes time and would \
change the times in the report. The additional run happens even if the others failed. On the \
simulated device the times come from a cost model. A timeline contains at most the first 250,000 \
entries of a run.

A profiler with NVTX support shows the steps as ranges without this option, as in `nsys profile \
harness run my.yaml --device cuda`.";

pub(super) const SNAPSHOT_HELP: &str = "\
Write a PyTorch memory snapshot of each run: a file for one run, a folder with one file per run \
for several.

`harness explain`, `advise`, `shrink`, `import` and `compare` read the snapshot, and so do \
PyTorch's own viewers (python -m torch.cuda._memory_viz, https://docs.pytorch.org/memory_viz). The \
call stack of each event contains the line of its step and the enclosing steps. The user_metadata \
is the name of the buffer. A refused request is an `oom` event. The snapshot shows the state \
before the final frees, even if the run failed or was interrupted. In a folder, the file names are \
SCENARIO-ALLOCATOR.pickle, and SCENARIO-ALLOCATOR-2.pickle for the second repetition, in lower \
case. `-` replaces characters that are unusual in file names.

The snapshot comes from the checked run, so it does not affect the times in the report, which come \
from another run. For a scenario with several programs, it covers the main program; the memory of \
the others counts as in use by other processes. Runs with the driver's own pool (async_pool) are \
not recorded, because the driver does not report which memory of the pool is free.";

pub(super) const ALLOC_CONF_HELP: &str = "\
Also run PyTorch's allocator with these settings, in every scenario that lists it; may be repeated.

CONF has the format of PYTORCH_ALLOC_CONF. It adds a configuration named caching(CONF) to those \
that the scenario lists or --allocator selects, and the report compares them side by side. If the \
scenario already lists an identical configuration, only that one runs, and a message says so. To \
run one configuration alone, use --allocator 'caching(CONF)'. Expectations that name a \
configuration do not apply to added ones.

The variable PYTORCH_ALLOC_CONF is not read, so runs do not depend on the shell. Pass it with \
--alloc-conf \"$PYTORCH_ALLOC_CONF\".";

pub(super) fn allocator_help() -> String {
    let kinds = AllocatorKind::ALL
        .iter()
        .map(|kind| format!("\n- {}: {}", kind.name(), arms::about(*kind)));
    format!(
        "\
Run only these allocators of those that a scenario lists; may be repeated or contain commas.

NAME is the `name:` that the scenario gives, or the allocator with its settings, as in \
caching(max_split_size_mb:512). This form runs in every scenario that lists PyTorch's allocator, \
even without these settings.
Your own library runs in every scenario with library(path:FILE,alloc:FUNCTION,free:FUNCTION), \
and optionally record_stream:FUNCTION and empty_cache:FUNCTION.
{}",
        kinds.collect::<String>()
    )
}
