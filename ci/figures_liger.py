"""Runs a benchmark of Liger-Kernel, and prints its memory as `figure KERNEL/PROVIDER/MODE/[SETTING/]NAME=X MIB`:

    python ci/figures_liger.py benchmark/scripts/benchmark_KERNEL.py [ARGUMENT]...

SETTING is what differs among the kernel's configurations. The current folder is the repository. Where the benchmark measures times, each function runs
twice instead of many times, because times of a simulated GPU are not real. Modules have no initial weights, because the CPU would compute them.

With `--values cpu`, only values that decide sizes are computed: integers, the choice of the largest logits, and the kernels that count tokens by expert.
"""

import collections
import contextlib
import io
import json
import math
import os
import re
import runpy
import sys


def measured(text):
    for start in re.finditer(r"\*+ Benchmark Data \*+\s*", text):
        for data in json.JSONDecoder().raw_decode(text, start.end())[0]:
            if data["metric_name"] == "memory":
                yield data


def setting(configuration, configurations):
    """The entries of a configuration that others do not have."""
    return [f"{key}={json.dumps(value)}" for key, value in configuration.items() if value is not None and any(value != other.get(key) for other in configurations)]


def print_figures(text):
    series = list(measured(text))
    configurations = {}
    for data in series:
        configurations.setdefault(data["kernel_name"], []).append(json.loads(data["extra_benchmark_config_str"]))
    for data in series:
        kernel = data["kernel_name"]
        own = setting(json.loads(data["extra_benchmark_config_str"]), configurations[kernel])
        for x, peak in zip(data["x_values"], data["y_values_50"]):
            name = [kernel, data["kernel_provider"], data["kernel_operation_mode"] or "", *own, f"{data['x_name']}={x}"]
            print("figure", re.sub(r"[\s\"]+", "", "/".join(filter(None, name))), f"{peak}MiB")


def flushed_cache():
    """What Triton's benchmark writes between two calls. It stays in PyTorch's cache."""
    import torch
    import triton

    driver = triton.runtime.driver.active
    if hasattr(driver, "get_empty_cache_for_benchmark"):
        return driver.get_empty_cache_for_benchmark()
    # Triton 3.0 and 3.1 have no function for it.
    return torch.empty(256_000_000 // 4, dtype=torch.int, device="cuda")


def twice(function, *_, grad_to_none=None, quantiles=None, **__):
    function()
    _flushed = flushed_cache()
    for tensor in grad_to_none or []:
        tensor.grad = None
    function()
    return [1.0] * len(quantiles) if quantiles else 1.0


# Larger random tensors are weights or inputs. They take their part of the random numbers without being computed.
MOST_LOGITS = 2**23


def integers_only():
    """The mode in which operations on floating-point numbers compute no values."""
    import torch

    def decides_sizes(function, arguments, named):
        if function is torch.randn:
            return math.prod(size for size in arguments if isinstance(size, int)) <= MOST_LOGITS
        tensors = [leaf for leaf in torch.utils._pytree.tree_leaves((arguments, named)) if isinstance(leaf, torch.Tensor)]
        return function is torch.topk or not any(tensor.is_floating_point() for tensor in tensors)

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, arguments=(), named=None):
            named = named or {}
            with torch._C.DisableTorchFunction():
                computed = decides_sizes(function, arguments, named)
            run = function if computed else torch._harness_without_values(function)
            return run(*arguments, **named)

    return Mode()


def count_by_tile(experts, counts, *_, TOKENS_PER_TILE, E, **__):
    """The first kernel of the routing: the tokens of each expert in each tile."""
    tiles = [tile.flatten().bincount(minlength=E) for tile in experts.cpu().split(TOKENS_PER_TILE)]
    for column, tile in zip(counts.unbind(1), tiles):
        column.copy_(tile)


def number_tiles(counts, _, offsets, *, BLOCK_M_TOKEN, **__):
    """The second kernel of the routing: the number of tiles before each expert."""
    tiles = -(-counts.cpu() // BLOCK_M_TOKEN)
    offsets[1:].copy_(tiles.cumsum(0))
    offsets[:1].zero_()


def replace_routing(triton):
    """Lets PyTorch do what the kernels do whose results decide sizes, because Triton's kernels are no-ops."""
    substitutes = {"_moe_router_histogram_kernel": count_by_tile, "_moe_router_prefix_sum_kernel": number_tiles}
    compiled = triton.jit

    def jit(function=None, **options):
        substitute = substitutes.get(getattr(function, "__name__", None))
        return collections.defaultdict(lambda: substitute) if substitute else compiled(function, **options)

    triton.jit = jit


def main():
    import torch
    import triton

    triton.testing.do_bench = twice
    mode = contextlib.nullcontext()
    if hasattr(torch, "_harness_without_values"):
        mode = integers_only()
        replace_routing(triton)
    for name in ("kaiming_uniform_", "uniform_", "normal_"):
        setattr(torch.nn.init, name, lambda tensor, *_, **__: tensor)
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output), mode:
            runpy.run_path(script, run_name="__main__")
    finally:
        print_figures(output.getvalue())


if __name__ == "__main__":
    main()
