# What vLLM needs on a simulated GPU.
import sys

import harness_guard as guard

NAME, DISTRIBUTION = "vLLM", "vllm"
# The first and the last version with which `ci/engines` passed.
TESTED = ("0.33.0", "0.33.0")
# Set by the hook: its functions for engines.
hook = None
this = sys.modules[__name__]


def count_sampled(module):
    """Makes vLLM's second model runner count sampled tokens on the host. It counts them in a kernel, and requests that sample no token never end.
    A request samples one token in each step, except in the steps before the last of its prompt."""

    def sample_and_count(sample, runner, hidden_states, batch, *others):
        result = sample(runner, hidden_states, batch, *others)
        try:
            result[1].harness_counts = batch.num_computed_prefill_tokens_np + batch.num_scheduled_tokens >= batch.prefill_len_np
        except (AttributeError, TypeError):
            hook.note_unchanged(this, "the count of sampled tokens")
        return result

    def write_and_read_back(read_back, output, *args, **kwargs):
        counts = kwargs.get("num_sampled_tokens")
        if hasattr(counts, "harness_counts"):
            counts.copy_(sys.modules["torch"].from_numpy(counts.harness_counts))
        read_back(output, *args, **kwargs)

    guard.wrap(module.GPUModelRunner, "sample", sample_and_count)
    guard.wrap(module.AsyncOutput, "__init__", write_and_read_back)


def note_memory_of_worker(module):
    """Notes how vLLM divides the memory, when a worker is ready."""

    def warm_up_and_note(warm_up, worker):
        graphs = []
        guard.wrap(worker.model_runner, "capture_model", lambda capture: graphs.append(capture()) or graphs[0])
        result = warm_up(worker)
        try:
            cache = worker.cache_config
            free, memory = sys.modules["torch"].cuda.mem_get_info()
            hook.note_memory(
                name="vLLM",
                memory=memory,
                requested=int(worker.requested_memory),
                weights=worker.model_runner.model_memory_usage,
                consumed=worker.total_consumed,
                activations=worker.peak_activation_memory,
                graphs=sum(graphs),
                graphs_estimated=worker.cudagraph_memory_estimate,
                kv_cache=worker.available_kv_cache_memory_bytes,
                blocks=cache.num_gpu_blocks,
                block_tokens=cache.block_size,
                free=free,
            )
        except AttributeError as error:
            # With a given size of the KV cache, vLLM does not measure the memory.
            if getattr(getattr(worker, "cache_config", None), "kv_cache_memory_bytes", None) is None:
                hook.note_unchanged(this, "the division of the memory (no %s)" % error.name)
        return result

    guard.wrap(module.Worker, "compile_or_warm_up_model", warm_up_and_note)


# The modules to change after their execution, and those to change with `--values cpu`.
MODULES = {
    "vllm.v1.worker.gpu.model_runner": count_sampled,
    "vllm.v1.worker.gpu_worker": note_memory_of_worker,
}
MODULES_WITH_VALUES = {}
