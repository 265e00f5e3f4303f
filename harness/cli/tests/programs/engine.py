"""The parts of vLLM, SGLang and FlashInfer that need kernels, in processes that `multiprocessing` forks: counts of sampled tokens, and compiled code."""
import json
import multiprocessing
import os
import sys
import tempfile
import types

import numpy
import torch

MODULES = {
    "vllm/v1/worker/gpu/model_runner.py": """
import torch
class GPUModelRunner:
    model_memory_usage = 3 << 30
    def sample(self, hidden_states, batch, grammar):
        counts = torch.ones(len(batch.prefill_len_np), dtype=torch.int32, device="cuda")
        return None, counts, torch.zeros_like(counts)
    def capture_model(self):
        return 1 << 28
class AsyncOutput:
    def __init__(self, num_sampled_tokens):
        self.sampled = num_sampled_tokens.tolist()
""",
    "vllm/v1/worker/gpu_worker.py": """
import types
from .gpu.model_runner import GPUModelRunner
class Worker:
    requested_memory, total_consumed, peak_activation_memory = 11 << 30, 4 << 30, 1 << 30
    cudagraph_memory_estimate, available_kv_cache_memory_bytes = 1 << 29, 5 << 30
    cache_config = types.SimpleNamespace(num_gpu_blocks=1000, block_size=16)
    def __init__(self):
        self.model_runner = GPUModelRunner()
    def compile_or_warm_up_model(self):
        self.model_runner.capture_model()
        return "warm"
""",
    "vllm-0.33.0.dist-info/METADATA": "Name: vllm\nVersion: 0.33.0\n",
    "flashinfer_python-0.8.1.dist-info/METADATA": "Name: flashinfer-python\nVersion: 0.8.1\n",
    "flashinfer/jit/core.py": """
class JitSpec:
    def __init__(self, problem):
        self.problem = problem
    def build_and_load(self):
        raise RuntimeError(self.problem)
""",
    "sglang/srt/model_executor/model_runner.py": """
import types
class ModelRunner:
    is_draft_worker, pre_model_load_memory, mem_fraction_static = False, 12.0, 0.75
    weight_load_mem_usage, max_total_num_tokens, page_size = 0.0078125, 4096, 64
    graph_memory_usage, token_to_kv_pool = {"prefill": 0.001953125, "decode": 0.0}, types.SimpleNamespace(mem_usage=0.0)
    def init_cuda_graphs(self, capture_decode_cuda_graph=True):
        pass
""",
    "sglang/kernels/jit/utils/compile/loader.py": """
import types
toolchain = types.SimpleNamespace(device_compiler_path=lambda: "/no/nvcc")
def load_jit(*args):
    raise FileNotFoundError("ninja")
""",
    "sglang/kernels/ops/memory/small_copy.py": """
def try_small_copy(destinations, sources):
    return True
""",
    "cutlass/base_dsl/compiler.py": """
class CompileCallable:
    def __call__(self, *args, **kwargs):
        raise RuntimeError("cudaErrorCallRequiresNewerDriver")
""",
}


def engine(results):
    from flashinfer.jit.core import JitSpec
    from vllm.v1.worker.gpu_worker import Worker

    kept = torch.empty(1 << 20, device="cuda")
    worker = Worker()
    # The first request has read its prompt after this step, the second has not.
    computed, scheduled, prompt = numpy.array([[0, 0], [100, 100], [100, 200]])
    batch = types.SimpleNamespace(num_computed_prefill_tokens_np=computed, num_scheduled_tokens=scheduled, prefill_len_np=prompt)
    counts = worker.model_runner.sample(None, batch, None)[1]
    kept.add_(1)
    sampled = sys.modules["vllm.v1.worker.gpu.model_runner"].AsyncOutput(num_sampled_tokens=counts).sampled
    warm = worker.compile_or_warm_up_model()
    module = JitSpec("Could not find nvcc").build_and_load()
    replaced = [module.plan(kept), module.run(kept)]
    try:
        JitSpec("ninja failed").build_and_load()
    except RuntimeError as error:
        results.put({"sampled": sampled, "warm": warm, "replaced": replaced, "error": str(error)})


def sglang(results):
    from cutlass.base_dsl.compiler import CompileCallable
    from sglang.kernels.jit.utils.compile.loader import load_jit
    from sglang.kernels.ops.memory.small_copy import try_small_copy
    from sglang.srt.model_executor.model_runner import ModelRunner

    kept = torch.empty(1 << 20, device="cuda")
    ModelRunner().init_cuda_graphs()
    results.put({"compiled": [load_jit("rope").run(kept), CompileCallable()("kernel", kept)(kept)], "own_copy": try_small_copy([], [])})


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for name, text in MODULES.items():
            os.makedirs(os.path.dirname(os.path.join(folder, name)), exist_ok=True)
            with open(os.path.join(folder, name), "w") as file:
                file.write(text)
        sys.path.insert(0, folder)
        context = multiprocessing.get_context("fork")
        results = context.SimpleQueue()
        found = {}
        for run in (engine, sglang):
            process = context.Process(target=run, args=(results,))
            process.start()
            process.join()
            found.update(results.get())
        print(json.dumps(found))
