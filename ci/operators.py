"""Compares PyTorch's operators on a simulated GPU with the CPU, by the samples of torch's own tests (`op_db`), with gradients.

    harness exec --values cpu -- python ci/operators.py float32

Needs the packages expecttest and numpy. Prints each operator that differs, then the numbers. The second form prints a checksum of the sizes that each
operator allocates, for a comparison with a GPU:

    harness exec --gpu h100-80 --values cpu -- python ci/operators.py allocations | diff - reports/h100/operators.tsv
"""
import collections
import random
import sys
import warnings
import zlib

import numpy

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_map

# Their results are random or uninitialized. `tensor_split` takes an argument on the CPU.
UNKNOWN = set("""
bernoulli cauchy empty empty_like empty_permuted empty_strided exponential geometric log_normal multinomial new_empty new_empty_strided
nn.functional.alpha_dropout nn.functional.dropout nn.functional.dropout2d nn.functional.dropout3d nn.functional.feature_alpha_dropout
nn.functional.fractional_max_pool2d nn.functional.fractional_max_pool3d nn.functional.multi_head_attention_forward nn.functional.rrelu normal pca_lowrank rand_like
randint randint_like randn randn_like svd_lowrank tensor_split uniform
""".split())
MOST_SAMPLES = 12
# torch allocates this workspace of cuBLAS at the first product of a process.
CUBLAS_WORKSPACE = 32 << 20


def run(operator, sample, device):
    """Returns the tensors that an operator returns, and the gradients of the first."""
    move = lambda value: value.detach().to(device).requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value
    first, args, kwargs = tree_map(move, (sample.input, sample.args, sample.kwargs))
    if "device" in kwargs:
        kwargs["device"] = device
    results = [result for result in tree_flatten(operator(first, *args, **kwargs))[0] if isinstance(result, torch.Tensor)]
    inputs = [value for value in tree_flatten((first, args, kwargs))[0] if isinstance(value, torch.Tensor) and value.requires_grad]
    differentiable = [result for result in results if result.requires_grad]
    gradients = []
    if differentiable and inputs:
        result = differentiable[0]
        gradients = torch.autograd.grad(result, inputs, torch.ones_like(result), allow_unused=True)
    return [result.detach() for result in results] + [gradient for gradient in gradients if gradient is not None]


def difference(operator, sample, tolerance):
    try:
        expected = run(operator, sample, "cpu")
    except Exception:
        return None
    try:
        found = run(operator, sample, "cuda")
        torch.testing.assert_close(found, expected, equal_nan=True, check_device=False, check_dtype=False, atol=tolerance, rtol=tolerance)
    except Exception as error:
        return str(error).split("\n")[0]


def allocated(operator, dtype):
    """Returns the sizes that an operator allocates, for each of its first six samples."""
    name = f"{operator.formatted_name} {str(dtype).removeprefix('torch.')}"
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(zlib.crc32(name.encode()))
    samples = operator.sample_inputs("cpu", dtype, requires_grad=operator.supports_autograd)
    sizes, start = [], 0
    torch.cuda.memory._record_memory_history(None)
    torch.cuda.memory._record_memory_history(context=None)
    for sample, _ in zip(samples, range(6)):
        try:
            run(operator, sample, "cuda")
        except Exception:
            pass
        torch.cuda.synchronize()
        events = torch.cuda.memory._snapshot()["device_traces"][0]
        new = [event["size"] for event in events[start:] if event["action"] == "alloc"]
        sizes.append([size for size in new if size != CUBLAS_WORKSPACE])
        start = len(events)
    return name, sizes


def allocations():
    for dtype in (torch.float32, torch.bfloat16):
        for operator in op_db:
            if dtype in operator.dtypes and dtype in operator.dtypesIfCUDA:
                name, sizes = allocated(operator, dtype)
                print(name, len(sizes), zlib.crc32(repr(sizes).encode()), sep="\t", flush=True)


def main():
    warnings.filterwarnings("ignore")
    if sys.argv[1] == "allocations":
        return allocations()
    torch.manual_seed(0)
    dtype = getattr(torch, sys.argv[1])
    tolerance = 0.2 if dtype in (torch.float16, torch.bfloat16) else 1e-3
    counts = collections.Counter()
    for operator in op_db:
        name = operator.formatted_name
        if operator.name in UNKNOWN or dtype not in operator.dtypes or dtype not in operator.dtypesIfCUDA:
            continue
        samples = operator.sample_inputs("cpu", dtype, requires_grad=operator.supports_autograd and (dtype.is_floating_point or dtype.is_complex))
        samples = [sample for sample, _ in zip(samples, range(MOST_SAMPLES)) if sample.kwargs.get("dropout_p", 0.0) == 0.0]
        differences = [text for text in (difference(operator, sample, tolerance) for sample in samples) if text]
        counts["samples"] += len(samples)
        counts["operators"] += 1
        counts["operators that differ"] += bool(differences)
        if differences:
            print(f"{name}: {len(differences)} of {len(samples)} samples: {differences[0]}", flush=True)
    print(", ".join(f"{count} {what}" for what, count in counts.items()))


main()
