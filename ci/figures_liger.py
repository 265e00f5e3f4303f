"""Runs a benchmark of Liger-Kernel, and prints its memory as `figure KERNEL/PROVIDER/MODE/[SETTING/]NAME=X MIB`:

    python ci/figures_liger.py benchmark/scripts/benchmark_KERNEL.py [ARGUMENT]...

SETTING is what differs among the kernel's configurations. The current folder is the repository. Where the benchmark measures times, each function runs
twice instead of many times, because times of a simulated GPU are not real. Modules have no initial weights, because the CPU would compute them.
"""

import contextlib
import io
import json
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


def twice(function, *_, grad_to_none=None, quantiles=None, **__):
    import triton

    function()
    driver = triton.runtime.driver.active
    if hasattr(driver, "get_empty_cache_for_benchmark"):
        # The benchmark writes it between two calls, and it stays in PyTorch's cache.
        _flushed = driver.get_empty_cache_for_benchmark()
    for tensor in grad_to_none or []:
        tensor.grad = None
    function()
    return [1.0] * len(quantiles) if quantiles else 1.0


def main():
    import torch
    import triton

    triton.testing.do_bench = twice
    for name in ("kaiming_uniform_", "uniform_", "normal_"):
        setattr(torch.nn.init, name, lambda tensor, *_, **__: tensor)
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            runpy.run_path(script, run_name="__main__")
    finally:
        print_figures(output.getvalue())


if __name__ == "__main__":
    main()
