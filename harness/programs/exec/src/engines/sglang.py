# What SGLang needs on a simulated GPU.
import os
import sys

import harness_guard as guard

NAME, DISTRIBUTION = "SGLang", "sglang"
# The first and the last version with which `ci/engines` passed.
TESTED = ("0.5.23", "0.5.23")
# Set by the hook: its functions for engines.
hook = None
this = sys.modules[__name__]


def note_memory_of_worker(module):
    """Notes how SGLang divides the memory, when a worker has captured its graphs."""

    def capture_and_note(capture, runner, *args, **kwargs):
        capture(runner, *args, **kwargs)
        try:
            free, memory = sys.modules["torch"].cuda.mem_get_info()
            gib = 1 << 30
            weights, before = int(gib * runner.weight_load_mem_usage), gib * runner.pre_model_load_memory
            graphs, kv_cache = int(gib * sum(runner.graph_memory_usage.values())), int(gib * runner.token_to_kv_pool.mem_usage)
            if runner.is_draft_worker:
                return
            hook.note_memory(
                name="SGLang",
                memory=memory,
                requested=int(before * runner.mem_fraction_static),
                weights=weights,
                consumed=max(weights, int(before) - free - kv_cache - graphs),
                graphs=graphs,
                kv_cache=kv_cache,
                blocks=runner.max_total_num_tokens // runner.page_size,
                block_tokens=runner.page_size,
                free=free,
            )
        except AttributeError:
            hook.note_unchanged(this, "the division of the memory")

    guard.wrap(module.ModelRunner, "init_cuda_graphs", capture_and_note)


def without_nvcc(module):
    """Replaces code that SGLang cannot compile, because there is no nvcc."""
    if not os.path.exists(module.toolchain.device_compiler_path()):
        guard.wrap(module, "load_jit", lambda load, *args, **kwargs: hook.NoKernels())


def with_computed_copies(module):
    """Makes SGLang copy with PyTorch's operations, which the CPU computes, instead of its own kernel. Neither allocates memory."""
    guard.wrap(module, "try_small_copy", lambda copy, destinations, sources: False)


# The modules to change after their execution, and those to change with `--values cpu`.
MODULES = {
    "sglang.srt.model_executor.model_runner": note_memory_of_worker,
    "sglang.kernels.jit.utils.compile.loader": without_nvcc,
}
MODULES_WITH_VALUES = {"sglang.kernels.ops.memory.small_copy": with_computed_copies}
